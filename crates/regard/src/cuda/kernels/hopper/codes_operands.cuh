// Operands of decode over 8-bit codes on Hopper: fragments of wgmma's first operand, converted from codes in shared
// memory. Every code is converted once per tile of rows.
#pragma once
#include "common/formats.cuh"
#if CACHE == 2 || CACHE == 3
#include "decode/decode_codes.cuh"
#endif
#include "hopper/codes_shape.cuh"

namespace codes {

// Conversion of four codes to f16, as `Codes` of formats.cuh has it.
template <CacheFormat FORMAT> struct Converter : Codes<FORMAT> {};

template <> struct Converter<CacheFormat::E4M3> {
    // The conversion reads the upper half of a register as well as the lower one, where the compiler sees both.
    static __device__ __forceinline__ void to_f16(unsigned codes, unsigned &first, unsigned &second) {
        asm("{\n"
            ".reg .b16 low, high;\n"
            "mov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\n"
            "cvt.rn.f16x2.e4m3x2 %1, high;\n"
            "}"
            : "=r"(first), "=r"(second)
            : "r"(codes));
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
    int tile = VALUE_BLOCKS * warp + block;
#if CACHE == 2 || CACHE == 3
    Products products;
    products.lane = lane;
    return products.value_dim_of(tile, element);
#endif
    return 16 * tile + 2 * (lane >> 2) + (element >> 1);
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

#if CACHE == 2 || CACHE == 3
// The same of blocks, as `qk_blocks` of decode_codes.cuh loads them. `keys`: of the warp, less the shift of its rows.
static __device__ __forceinline__ void block_key_operands(unsigned (&a)[KEY_STEPS][4], float (&scales)[KEY_SETS][2],
                                                          unsigned keys, unsigned shift, int lane) {
    constexpr int CODES = BLOCK_BYTES - 2, LAST = CODES / 16 - 1;
    int word = 4 * (lane & 3);
    unsigned wrap = (lane & 3) == 3 ? 0x7610 : 0x3210, from = keys + (lane >> 2) * KEY_PITCH + shift;
#pragma unroll
    for (int pair = 0; pair < KEY_SETS / 2; pair++) {
        unsigned codes[2][2][2]; // of the pair, the two keys, the words of a lane
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned at = from + 8 * half * KEY_PITCH + pair * 2 * BLOCK_BYTES;
            unsigned start = load_shared_word(at), middle = load_shared_word(at + CODES);
            scales[2 * pair][half] = block_scale(start);
            scales[2 * pair + 1][half] = block_scale(middle >> 16);
            if (LAST == 1) {
                codes[0][half][0] = load_shared_word(at + 4 + word);
                codes[1][half][0] = load_shared_word(at + 4 + CODES + word);
            }
            codes[0][half][LAST] = __byte_perm(load_shared_word(at + 4 + 16 * LAST + word), start, wrap);
            codes[1][half][LAST] = load_shared_word(at + 4 + CODES + 16 * LAST + word);
        }
#pragma unroll
        for (int block = 0; block < 2; block++) {
            unsigned two[2][4];
            Products::block_operands(two, codes[block]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[4 * pair + 2 * block][i] = two[0][i];
                a[4 * pair + 2 * block + 1][i] = two[1][i];
            }
        }
    }
}

// The values of block `warp`. `from`: keys 2 (lane % 4) and the next.
static __device__ __forceinline__ void block_value_operands(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4],
                                                            const unsigned (&from)[2], int warp, int lane) {
    Products products;
    products.lane = lane;
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; step++) {
        unsigned two[2][4];
        products.block_value_operands(two, from, step, warp);
#pragma unroll
        for (int i = 0; i < 4; i++) a[0][step][i] = two[0][i], a[1][step][i] = two[1][i];
    }
}

// The scales of the values of two keys, 8 apart.
static __device__ __forceinline__ void block_value_scales(float (&scales)[WEIGHT_SETS][2], unsigned from) {
#pragma unroll
    for (int set = 0; set < WEIGHT_SETS; set++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            scales[set][half] = block_scale(load_shared_half(from + 8 * half * VALUE_PITCH + set * BLOCK_BYTES));
}
#endif

} // namespace codes
