// Operands of decode over 8-bit codes on Hopper: fragments of wgmma's first operand, converted from codes in shared
// memory. Every code is converted once per tile of rows.
#pragma once
#include "common/formats.cuh"
#include "hopper/codes_shape.cuh"
#include "hopper/widen_e4m3.cuh"

namespace codes {

// Conversion of four codes to f16, as `Codes` of formats.cuh has it.
template <CacheFormat FORMAT> struct Converter : Codes<FORMAT> {};

template <> struct Converter<CacheFormat::E4M3> {
    static __device__ __forceinline__ void to_f16(unsigned codes, unsigned &first, unsigned &second) {
        hopper::widen_e4m3(codes, first, second);
    }
    static __device__ __forceinline__ void to_f16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        to_f16(__byte_perm(codes, 0, 0x3120), even, odd);
    }
};

// The keys of a warp as operand A of Q K^T, all steps. `keys`: the K tile.
template <CacheFormat FORMAT>
static __device__ __forceinline__ void key_operands(unsigned (&a)[KEY_STEPS][4], unsigned keys, int warp, int lane) {
    int row = WARP_KEYS * warp + (lane & 15), at = lane & 16;
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step += 2) {
        unsigned words[4];
        ldmatrix_x4(words, swizzle(keys, row, KEY_PITCH, at + step * 16 % 128) + step * 16 / 128 * 128);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Converter<FORMAT>::to_f16(words[2 * i], a[step + i][0], a[step + i][2]);
            Converter<FORMAT>::to_f16(words[2 * i + 1], a[step + i][1], a[step + i][3]);
        }
    }
}

// The value dims of a warp as operand A of P V, all keys: 16 dims for each 64 of the head dim.
template <CacheFormat FORMAT> static __device__ __forceinline__ void
value_operands(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values, int warp, int lane) {
#pragma unroll
    for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step += 2) {
            unsigned words[4];
            int at = 16 * (VALUE_BLOCKS * warp + block);
            ldmatrix_x4_transposed(words, swizzle(values, 16 * step + lane, VALUE_PITCH, at % 128) + at / 128 * 128);
#pragma unroll
            for (int i = 0; i < 4; i++)
                Converter<FORMAT>::to_f16_even_odd(words[i], a[block][step + i / 2][i % 2 * 2],
                                                   a[block][step + i / 2][i % 2 * 2 + 1]);
        }
}

// The value dim of element [block][4 j + e] of a thread's output.
static __device__ __forceinline__ int value_dim_of(int block, int element, int warp, int lane) {
    return 16 * (VALUE_BLOCKS * warp + block) + 2 * (lane >> 2) + (element >> 1);
}

static __device__ __forceinline__ void key_operands(CacheFormat format, unsigned (&a)[KEY_STEPS][4], unsigned keys,
                                                    int warp, int lane) {
    if (format == CacheFormat::E4M3)
        key_operands<CacheFormat::E4M3>(a, keys, warp, lane);
    else if (format == CacheFormat::I8)
        key_operands<CacheFormat::I8>(a, keys, warp, lane);
    else
        key_operands<CacheFormat::E5M2>(a, keys, warp, lane);
}

static __device__ __forceinline__ void value_operands(CacheFormat format, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4],
                                                      unsigned values, int warp, int lane) {
    if (format == CacheFormat::E4M3)
        value_operands<CacheFormat::E4M3>(a, values, warp, lane);
    else if (format == CacheFormat::I8)
        value_operands<CacheFormat::I8>(a, values, warp, lane);
    else
        value_operands<CacheFormat::E5M2>(a, values, warp, lane);
}

} // namespace codes
