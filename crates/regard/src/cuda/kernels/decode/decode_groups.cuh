// Merges the states of a CTA's groups of warps, which they leave in shared memory.
#pragma once
#include "decode/decode_combine.cuh"

// Maximum groups of warps per CTA, and the rows that a warp combines at once, so that their loads overlap.
constexpr int MAX_GROUPS = MAX_THREADS / THREADS_PER_GROUP;
constexpr int ROWS_PER_BATCH = TILE_ROWS == 8 || FLOAT4S_PER_LANE > 1 ? 1 : 2;

// Merges the states that the groups of a CTA left in shared memory, for rows `first`, `first + step`, ...
static __device__ __forceinline__ void combine_groups(const AttentionParameters &params,
                                                      RowState (&combined)[ROWS_PER_BATCH], const Shared &shared,
                                                      const float *states, int first, int step, int lane) {
    int groups = params.stream_k.key_groups;
    float unit = unit_of(params);
#pragma unroll
    for (int i = 0; i < ROWS_PER_BATCH; i++) {
        int row = min(first + i * step, TILE_ROWS - 1);
        combined[i] = empty_row();
        State each[MAX_GROUPS];
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; g++) {
            each[g] = {-INF, 0.0f};
            if (g < groups) each[g] = {shared.max[g][row], shared.sum[g][row]};
            combined[i].state.max = fmaxf(combined[i].state.max, each[g].max);
        }
        float reference = combined[i].state.max == -INF ? 0.0f : combined[i].state.max;
#pragma unroll
        for (int g = 0; g < MAX_GROUPS; g++) {
            float factor = exp2_fast((each[g].max - reference) * unit);
            combined[i].state.sum = fmaf(each[g].sum, factor, combined[i].state.sum);
#pragma unroll
            for (int j = 0; j < FLOAT4S_PER_LANE; j++)
                if (g < groups && has_column(lane, j)) {
                    combined[i].out[j] =
                        add_four(combined[i].out[j], factor,
                                 *(const float4 *)(states + (g * TILE_ROWS + row) * OUT_PITCH + column_of(lane, j)));
                }
        }
    }
}
