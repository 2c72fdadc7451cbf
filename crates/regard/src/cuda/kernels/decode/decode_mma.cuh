// S^T = K Q^T and O^T = V^T P^T on tensor cores, for f16 and bf16.
//
// The MMAs are transposed: keys (then value dims) are the 16-row operand A and the few query rows the 8-column operand
// B, so that few rows waste little of the tile.
#pragma once
#include "decode/decode_query.cuh"

// S^T = K Q^T of keys in the type of queries.
struct ElementKeys : QueryFragments {
    template <class View> __device__ __forceinline__ void set(const View &, bool) {}

    // Tensor cores truncate sums instead of rounding them, and the errors add up where terms have one sign. Large head
    // dims are therefore accumulated in parts.
    __device__ __forceinline__ void mma_qk(Scores &scores, unsigned keys) const {
        if constexpr (HEAD_DIM > 256) {
            constexpr int PART = KEY_STEPS % 18 == 0 ? 18 : 16;
            static_assert(HEAD_DIM <= 256 || KEY_STEPS % PART == 0, "whole parts");
#pragma unroll 1
            for (int first = 0; first < KEY_STEPS; first += PART) {
                Scores part = {};
                mma_qk_steps<PART>(part, keys, first);
#pragma unroll
                for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) scores[k][n][e] += part[k][n][e];
            }
        } else {
            mma_qk_steps<KEY_STEPS>(scores, keys, 0);
        }
    }

    template <int STEPS> __device__ __forceinline__ void mma_qk_steps(Scores &scores, unsigned keys, int first) const {
        int row = (lane & 7) + (lane & 8), at = (lane & 16);
#pragma unroll(QUERY_IN_REGISTERS ? STEPS / 2 : STEPS / 2 % 4 == 0 ? 4 : 3)
        for (int step = first; step < first + STEPS; step += 2) {
            unsigned b[MMA_ROW_TILES][4];
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++) {
                if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                    for (int i = 0; i < 4; i++) b[n][i] = kept[step / 2][n][i];
                } else {
                    load_query(step, n, b[n]);
                }
            }
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned a[4];
                ldmatrix_x4(a, swizzle(keys, 16 * k + row, KEY_PITCH, at + step * 32 % 128) + step * 32 / 128 * 128);
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) E::mma(scores[k][n], a, b[n][0], b[n][1]);
                ldmatrix_x4(a,
                            swizzle(keys, 16 * k + row, KEY_PITCH, at + step * 32 % 128 + 32) + step * 32 / 128 * 128);
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) E::mma(scores[k][n], a, b[n][2], b[n][3]);
            }
        }
    }
};

// O^T = V^T P^T of values in the type of queries.
struct ElementValues {
    int lane;

    template <class View> __device__ __forceinline__ void set(const View &, bool, bool) {}

    // `first`: this warp's first value dim.
    __device__ __forceinline__ void mma_pv(Outputs &out, const Scores &probs, unsigned values, unsigned,
                                           int first) const {
        unsigned b[MMA_KEY_TILES][MMA_ROW_TILES][2];
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++) {
                b[k][n][0] = movmatrix_transposed(E::pack(probs[k][n][0], probs[k][n][1]));
                b[k][n][1] = movmatrix_transposed(E::pack(probs[k][n][2], probs[k][n][3]));
            }
        int row = (lane & 7) + (lane & 16) / 2, at = first * ELEMENT_BYTES + (lane & 8) * 2;
#pragma unroll
        for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned a[4];
                // Two warps that split the value dims may start off a multiple of 128 bytes, so the offset is swizzled
                // too.
                unsigned whole = VALUE_WARPS == 1 ? v * 32 / 128 * 128 : 0;
                ldmatrix_x4_transposed(a, swizzle(values, 16 * k + row, VALUE_PITCH, at + v * 32 - whole) + whole);
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) E::mma(out[v][n], a, b[k][n][0], b[k][n][1]);
            }
    }

    // The value dim, counted from this warp's first, of output element [tile][.][element].
    __device__ __forceinline__ int value_dim_of(int tile, int element) const {
        return 16 * tile + (lane >> 2) + 8 * (element >> 1);
    }
};
