// Query fragments of the MMAs of decode: the 8-column operand B.
#pragma once
#include "common/copy.cuh"
#include "decode/decode_shape.cuh"

// Query fragments stay in registers if they are few.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM * MMA_ROW_TILES <= 128;

struct QueryFragments {
    unsigned query; // shared memory, first row of this warp
    int lane;
    unsigned kept[QUERY_IN_REGISTERS ? KEY_STEPS / 2 : 1][MMA_ROW_TILES][4]; // two MMA steps each

    // Loads the B fragments of two steps of 16 dims.
    __device__ __forceinline__ void load_query(int step, int tile, unsigned (&b)[4]) const {
        ldmatrix_x4(b, swizzle(query, tile * 8 + (lane & 7), QUERY_PITCH, step * 32 % 128 + (lane >> 3) * 16) +
                           step * 32 / 128 * 128);
    }

    __device__ __forceinline__ void load_query_fragments() {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step += 2)
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) load_query(step, n, kept[step / 2][n]);
        }
    }
};
