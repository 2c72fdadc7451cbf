// Operands of decode of many rows on Hopper: fragments of wgmma's first operand, from 16-bit elements in shared memory,
// or converted from 8-bit codes there. Every code is converted once per tile of rows.
#pragma once
#include "common/formats.cuh"
#include "hopper/decode_wgmma_shape.cuh"
#include "hopper/widen_e4m3.cuh"

namespace decode_wgmma {

// sum += a b, or overwrites it if `keep` is 0.
static __device__ __forceinline__ void multiply_operands(float (&sum)[SUMS], const unsigned (&a)[4],
                                                         unsigned long long b, int keep) {
    if constexpr (OPERAND == ElementType::BF16)
        CodeWgmma<ROWS>::mma_bf16(sum, a, b, keep);
    else
        CodeWgmma<ROWS>::mma_f16(sum, a, b, keep);
}

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

// The value dims of a warp as operand A of P V, all keys: 16 dims for each 64 of the head dim. BLOCKS of these from
// FIRST on.
template <CacheFormat FORMAT, int FIRST, int BLOCKS> static __device__ __forceinline__ void
value_operands(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values, int warp, int lane) {
    if (HAS_LARGE_HEADS) warp = opaque(warp);
#pragma unroll
    for (int block = FIRST; block < FIRST + BLOCKS; block++)
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step += 2) {
            unsigned words[4];
            unsigned at = 16 * (VALUE_BLOCKS * warp + block);
            ldmatrix_x4_transposed(words, swizzle(values, 16 * step + lane, VALUE_PITCH, at % 128) + at / 128 * 128);
#pragma unroll
            for (int i = 0; i < 4; i++)
                Converter<FORMAT>::to_f16_even_odd(words[i], a[block][step + i / 2][i % 2 * 2],
                                                   a[block][step + i / 2][i % 2 * 2 + 1]);
        }
}

// The keys of a warp, and their dot products with all rows.
struct Keys {
    unsigned operands[KEY_STEPS][4];
    float sums[SUMS];

    __device__ __forceinline__ void set(unsigned long long, long long, int, int) {}

    // Starts the products.
    __device__ __forceinline__ void multiply(const SharedTile<ROWS> &queries) {
        warpgroup_fence_operand(sums);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) multiply_operands(sums, operands[i], queries.k_major(i), i > 0);
        hopper::wgmma_commit();
    }

    __device__ __forceinline__ void begin_scores(float (&)[SUMS]) {}

    __device__ __forceinline__ void finish_scores(float (&scores)[SUMS]) {
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(sums);
#pragma unroll
        for (int i = 0; i < SUMS; i++) scores[i] = sums[i];
    }
};

// Keys in codes.
struct ByteKeys : Keys {
    __device__ __forceinline__ void load(CacheFormat format, unsigned keys, int warp, int lane) {
        if (format == CacheFormat::E4M3)
            key_operands<CacheFormat::E4M3>(operands, keys, warp, lane);
        else if (format == CacheFormat::I8)
            key_operands<CacheFormat::I8>(operands, keys, warp, lane);
        else
            key_operands<CacheFormat::E5M2>(operands, keys, warp, lane);
    }
};

// 16-bit keys.
struct ElementKeys : Keys {
    __device__ __forceinline__ void load(CacheFormat, unsigned keys, int warp, int lane) {
        int row = WARP_KEYS * warp + (lane & 15), at = lane & 16;
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            ldmatrix_x4(operands[step], swizzle(keys, row, KEY_PITCH, at + step * 32 % 128) + step * 32 / 128 * 128);
    }
};

// The value dims of a warp, 16 for each 64 of the head dim, whose scales are no part of operands.
struct Values {
    __device__ __forceinline__ void set(unsigned long long, long long, int, int) {}

    template <class Softmax>
    __device__ __forceinline__ void add_any_scales(float (&)[VALUE_BLOCKS][SUMS], const float (&)[SUMS],
                                                   const Softmax &, unsigned, unsigned, unsigned, int, int, int) const {
    }
};

// Values in codes.
struct ByteValues : Values {
    // Returns true: no scale is too far from 1 for operands.
    __device__ __forceinline__ bool load(CacheFormat format, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4],
                                         unsigned values, int warp, int lane) const {
        load_blocks<0, EARLY_BLOCKS>(format, a, values, warp, lane);
        return true;
    }

    // What `load` leaves.
    __device__ __forceinline__ void load_rest(CacheFormat format, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4],
                                              unsigned values, int warp, int lane) const {
        if constexpr (EARLY_BLOCKS < VALUE_BLOCKS)
            load_blocks<EARLY_BLOCKS, VALUE_BLOCKS - EARLY_BLOCKS>(format, a, values, warp, lane);
    }

    template <int FIRST, int BLOCKS>
    __device__ __forceinline__ void load_blocks(CacheFormat format, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4],
                                                unsigned values, int warp, int lane) const {
        if (format == CacheFormat::E4M3)
            value_operands<CacheFormat::E4M3, FIRST, BLOCKS>(a, values, warp, lane);
        else if (format == CacheFormat::I8)
            value_operands<CacheFormat::I8, FIRST, BLOCKS>(a, values, warp, lane);
        else
            value_operands<CacheFormat::E5M2, FIRST, BLOCKS>(a, values, warp, lane);
    }

    // The value dim of element [block][4 j + e] of a thread's output.
    static __device__ __forceinline__ int dim_of(int block, int element, int warp, int lane) {
        return 16 * (VALUE_BLOCKS * warp + block) + 2 * (lane >> 2) + (element >> 1);
    }
};

// 16-bit values.
struct ElementValues : Values {
    __device__ __forceinline__ bool load(CacheFormat, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values,
                                         int warp, int lane) const {
        load_blocks<0, EARLY_BLOCKS>(a, values, warp, lane);
        return true;
    }

    __device__ __forceinline__ void load_rest(CacheFormat, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values,
                                              int warp, int lane) const {
        load_blocks<EARLY_BLOCKS, VALUE_BLOCKS - EARLY_BLOCKS>(a, values, warp, lane);
    }

    template <int FIRST, int BLOCKS> __device__ __forceinline__ void
    load_blocks(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values, int warp, int lane) const {
        if (HAS_LARGE_HEADS) warp = opaque(warp);
        int key = (lane & 7) + (lane & 16) / 2;
#pragma unroll
        for (int block = FIRST; block < FIRST + BLOCKS; block++) {
            unsigned at = 32 * (VALUE_BLOCKS * warp + block);
#pragma unroll
            for (int step = 0; step < VALUE_STEPS; step++)
                ldmatrix_x4_transposed(a[block][step],
                                       swizzle(values, 16 * step + key, VALUE_PITCH, at % 128 + 2 * (lane & 8)) +
                                           at / 128 * 128);
        }
    }

    // The value dim of element [block][4 j + e] of a thread's output.
    static __device__ __forceinline__ int dim_of(int block, int element, int warp, int lane) {
        return 16 * (VALUE_BLOCKS * warp + block) + (lane >> 2) + 8 * (element >> 1);
    }
};

} // namespace decode_wgmma
