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

// Rows of keys or values lie swizzled in a pipeline stage, which starts at a multiple of 128 bytes. An address in it
// is one of `first`, which is that of the lane in the stage, and numbers that the compiler knows.
template <class Side> struct SwizzledRows {
    unsigned first;

    // `at`: less than 128, and of the bits that the compiler does not know.
    __device__ __forceinline__ void set(int row, int at) {
        first = opaque(swizzle(0, row, Side::PITCH, at % 128) + at / 128 * 128);
    }

    // `at` more bytes, of other bits than `set` had.
    __device__ __forceinline__ unsigned address(unsigned stage, int rows, int at) const {
        return ((stage + first) ^ at % 128) + rows * Side::PITCH + at / 128 * 128;
    }
};

// The keys of a warp as operand A of Q K^T, all steps. `keys`: the K tile.
template <CacheFormat FORMAT> static __device__ __forceinline__ void
key_operands(unsigned (&a)[KEY_STEPS][4], const SwizzledRows<KeySide> &rows, unsigned keys) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step += 2) {
        unsigned words[4];
        ldmatrix_x4(words, rows.address(keys, 0, step * 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Converter<FORMAT>::to_f16(words[2 * i], a[step + i][0], a[step + i][2]);
            Converter<FORMAT>::to_f16(words[2 * i + 1], a[step + i][1], a[step + i][3]);
        }
    }
}

// A range of a warp's value blocks, of 16 dims each: one for each 64 of the head dim.
struct BlockRange {
    int first, end;
};

// Value blocks of a warp as operands A of P V, all keys.
template <CacheFormat FORMAT>
static __device__ __forceinline__ void value_operands(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], BlockRange blocks,
                                                      const SwizzledRows<ValueSide> &rows, unsigned values) {
#pragma unroll
    for (int block = blocks.first; block < blocks.end; block++)
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step += 2) {
            unsigned words[4];
            ldmatrix_x4_transposed(words, rows.address(values, 16 * step, 16 * block));
#pragma unroll
            for (int i = 0; i < 4; i++)
                Converter<FORMAT>::to_f16_even_odd(words[i], a[block][step + i / 2][i % 2 * 2],
                                                   a[block][step + i / 2][i % 2 * 2 + 1]);
        }
}

// The keys of a warp, and their dot products with all rows.
struct Keys {
    SwizzledRows<KeySide> rows;
    unsigned operands[KEY_STEPS][4];
    float scores[SUMS];

    __device__ __forceinline__ void set(unsigned long long, long long, int warp, int lane) {
        rows.set(WARP_KEYS * warp + (lane & 15), lane & 16);
    }

    // Starts the products.
    __device__ __forceinline__ void multiply(const SharedTile<ROWS> &queries) {
        warpgroup_fence_operand(scores);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEY_STEPS; i++) multiply_operands(scores, operands[i], queries.k_major(i), i > 0);
        hopper::wgmma_commit();
    }

    __device__ __forceinline__ void continue_scores(const SharedTile<ROWS> &, unsigned, int) {}

    __device__ __forceinline__ void finish_scores() {
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
    }
};

// Keys in codes.
struct ByteKeys : Keys {
    __device__ __forceinline__ void load(unsigned needs, unsigned keys, int) {
        if (needs & KEYS_I8)
            key_operands<CacheFormat::I8>(operands, rows, keys);
        else if (needs & KEYS_E5M2)
            key_operands<CacheFormat::E5M2>(operands, rows, keys);
        else
            key_operands<CacheFormat::E4M3>(operands, rows, keys);
    }
};

// 16-bit keys.
struct ElementKeys : Keys {
    __device__ __forceinline__ void load(unsigned, unsigned keys, int) {
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++) ldmatrix_x4(operands[step], rows.address(keys, 0, step * 32));
    }
};

// The value dims of a warp, whose scales are no part of operands.
struct Values {
    SwizzledRows<ValueSide> rows;

    template <class Softmax> __device__ __forceinline__ void add_any_scales(float (&)[VALUE_BLOCKS][SUMS],
                                                                            const float (&)[SUMS], const Softmax &,
                                                                            unsigned, unsigned, int, int) const {}
};

// Values in codes.
struct ByteValues : Values {
    static constexpr bool HAS_PAIRS = true; // elements e and e + 2 of an output are neighbouring dims
    __device__ __forceinline__ void set(unsigned long long, long long, int warp, int lane) {
        rows.set(lane, 16 * VALUE_BLOCKS * warp);
    }

    // Returns true: no scale is too far from 1 for operands.
    __device__ __forceinline__ bool load(unsigned needs, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], BlockRange blocks,
                                         unsigned values, int, int) const {
        if (needs & VALUES_I8)
            value_operands<CacheFormat::I8>(a, blocks, rows, values);
        else if (needs & VALUES_E5M2)
            value_operands<CacheFormat::E5M2>(a, blocks, rows, values);
        else
            value_operands<CacheFormat::E4M3>(a, blocks, rows, values);
        return true;
    }

    // The value dim of element [block][4 j + e] of a thread's output.
    static __device__ __forceinline__ int dim_of(int block, int element, int warp, int lane) {
        return 16 * (VALUE_BLOCKS * warp + block) + 2 * (lane >> 2) + (element >> 1);
    }
};

// 16-bit values.
struct ElementValues : Values {
    static constexpr bool HAS_PAIRS = false;
    __device__ __forceinline__ void set(unsigned long long, long long, int warp, int lane) {
        rows.set((lane & 7) + (lane & 16) / 2, 32 * VALUE_BLOCKS * warp + 2 * (lane & 8));
    }

    __device__ __forceinline__ bool load(unsigned, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], BlockRange blocks,
                                         unsigned values, int, int) const {
#pragma unroll
        for (int block = blocks.first; block < blocks.end; block++)
#pragma unroll
            for (int step = 0; step < VALUE_STEPS; step++)
                ldmatrix_x4_transposed(a[block][step], rows.address(values, 16 * step, 32 * block));
        return true;
    }

    // The value dim of element [block][4 j + e] of a thread's output.
    static __device__ __forceinline__ int dim_of(int block, int element, int warp, int lane) {
        return 16 * (VALUE_BLOCKS * warp + block) + (lane >> 2) + 8 * (element >> 1);
    }
};

} // namespace decode_wgmma
