// S = Q K^T and O = P V with FMAs, for f32: full f32 accuracy, in the register layout of decode_mma.cuh.
#pragma once
#include "common/copy.cuh"
#include "decode/decode_shape.cuh"

static __device__ __forceinline__ float4 load_four(unsigned from) {
    uint4 x = ld_shared_v4(from);
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

static __device__ __forceinline__ float dot_four(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// S^T = K Q^T.
struct FmaKeys {
    unsigned query; // shared memory, first row of this warp
    int lane;

    __device__ __forceinline__ void load_query_fragments() {}

    // Accumulates 64 dims at a time and adds these sums: rounding errors of same-signed terms grow with the length of
    // the chain.
    __device__ __forceinline__ void mma_qk(Scores &scores, unsigned keys) const {
        int key = lane >> 2, row = 2 * (lane & 3);
#pragma unroll 1
        for (int first = 0; first < HEAD_DIM; first += 64) {
            Scores part = {};
#pragma unroll 4
            for (int d = first; d < first + 64; d += 4)
#pragma unroll
                for (int k = 0; k < MMA_KEY_TILES; k++) {
                    float4 a0 = load_four(swizzle(keys, 16 * k + key, KEY_PITCH, d * 4));
                    float4 a1 = load_four(swizzle(keys, 16 * k + 8 + key, KEY_PITCH, d * 4));
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++) {
                        float4 b0 = load_four(swizzle(query, 8 * n + row, KEY_PITCH, d * 4));
                        float4 b1 = load_four(swizzle(query, 8 * n + row + 1, KEY_PITCH, d * 4));
                        part[k][n][0] = dot_four(part[k][n][0], a0, b0);
                        part[k][n][1] = dot_four(part[k][n][1], a0, b1);
                        part[k][n][2] = dot_four(part[k][n][2], a1, b0);
                        part[k][n][3] = dot_four(part[k][n][3], a1, b1);
                    }
                }
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) scores[k][n][e] += part[k][n][e];
        }
    }
};

// O^T = V^T P^T.
struct FmaValues {
    int lane;

    // Tiles of value dims whose sums of a K tile are in registers beside the outputs.
    static constexpr int AT_ONCE = MMA_VALUE_TILES <= 8 ? MMA_VALUE_TILES : MMA_VALUE_TILES % 8 == 0 ? 8 : 6;
    static_assert(MMA_VALUE_TILES % AT_ONCE == 0, "whole groups");

    // Adds the sums of a K tile, for the reason that `mma_qk` gives. `first`: this warp's first value dim.
    __device__ __forceinline__ void mma_pv(Outputs &out, const Scores &probs, unsigned values, unsigned,
                                           int first) const {
#pragma unroll
        for (int tile = 0; tile < MMA_VALUE_TILES; tile += AT_ONCE) {
            float part[AT_ONCE][MMA_ROW_TILES][4] = {};
            int at = (first + tile * 16) * ELEMENT_BYTES + (lane >> 2) * 16;
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll 2
                    for (int key = 0; key < 8; key++) {
                        // The lanes 4 key .. 4 key + 3 hold key `key` of this half, two rows each.
                        float weight[MMA_ROW_TILES][2];
#pragma unroll
                        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                            for (int r = 0; r < 2; r++)
                                weight[n][r] = __shfl_sync(~0u, probs[k][n][2 * half + r], key * 4 + (lane & 3));
#pragma unroll
                        for (int v = 0; v < AT_ONCE; v += 2) {
                            float4 x = load_four(swizzle(values, 16 * k + 8 * half + key, VALUE_PITCH, at + v * 64));
#pragma unroll
                            for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                                for (int r = 0; r < 2; r++) {
                                    part[v][n][r] = fmaf(x.x, weight[n][r], part[v][n][r]);
                                    part[v][n][2 + r] = fmaf(x.y, weight[n][r], part[v][n][2 + r]);
                                    part[v + 1][n][r] = fmaf(x.z, weight[n][r], part[v + 1][n][r]);
                                    part[v + 1][n][2 + r] = fmaf(x.w, weight[n][r], part[v + 1][n][2 + r]);
                                }
                        }
                    }
#pragma unroll
            for (int v = 0; v < AT_ONCE; v++)
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) out[tile + v][n][e] += part[v][n][e];
        }
    }

    // The value dim, counted from this warp's first, of output element [tile][.][element]: four contiguous dims per
    // lane.
    __device__ __forceinline__ int value_dim_of(int tile, int element) const {
        return 32 * (tile / 2) + 4 * (lane >> 2) + 2 * (tile & 1) + (element >> 1);
    }
};
