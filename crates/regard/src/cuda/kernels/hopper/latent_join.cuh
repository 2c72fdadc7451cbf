// Combines the partial states of the decode kernel for latent caches.
#pragma once
#include "decode/decode_join.cuh"

namespace latent {

// Groups of VALUE_DIM / 4 threads have
// a row each, or all of a CTA have one and take its parts in turn: the host says by the grid.
constexpr int JOIN_THREADS = 512, JOIN_GROUP = VALUE_DIM / 4, JOIN_GROUPS = JOIN_THREADS / JOIN_GROUP;

struct JoinShared {
    float4 out[JOIN_GROUPS][JOIN_GROUP];
    float weights[JOIN_THREADS]; // of parts; a row has no more than threads
    float maxima[JOIN_THREADS / 32], sums[JOIN_THREADS / 32];
};

// `groups`: of a row. The row may not exist.
static __device__ __forceinline__ void join_row(const AttentionParameters &params, const JoinedRows &joined, int row,
                                                int groups) {
    JoinShared &shared = *(JoinShared *)dynamic_shared;
    int thread = threadIdx.x, lane = thread & 31, column = thread % JOIN_GROUP;
    int first_group = thread / (JOIN_GROUP * groups) * groups, group = thread / JOIN_GROUP - first_group;
    int first_thread = first_group * JOIN_GROUP, warps = groups * (JOIN_GROUP / 32);
    int parts = row < joined.rows ? joined.parts.last - joined.parts.first + 1 : 0;
    PartialStates slot = {partial_state(params, joined.parts.first, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    // A thread per four outputs of some parts, in batches: loads have long latency, so the first batch is on its way
    // while the weights are found, and each is loaded whole before any of it is used.
    constexpr int BATCH = 8;
    float4 values[BATCH];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * groups < parts)
                values[i] =
                    __ldcg((const float4 *)(slot(first + i * groups) + 2 * TILE_ROWS + row * VALUE_DIM) + column);
    };
    load(group);
    // A thread per part: their weights.
    State mine = {-INF, 0.0f};
    int part = thread - first_thread;
    if (part < parts) mine = {__ldcg(slot(part) + row), __ldcg(slot(part) + TILE_ROWS + row)};
    float most = mine.max;
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (lane == 0) shared.maxima[thread / 32] = most;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < warps; i++) most = fmaxf(most, shared.maxima[first_thread / 32 + i]);
    float weight = exp2_fast(mine.max - (most == -INF ? 0.0f : most)), sum = __fmul_rn(mine.sum, weight);
    shared.weights[thread] = weight;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) shared.sums[thread / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < warps; i++) sum += shared.sums[first_thread / 32 + i];
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = group; first < parts; first += groups * BATCH) {
        if (first != group) load(first);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * groups < parts)
                out = add_four(out, shared.weights[first_thread + first + i * groups], values[i]);
    }
    if (groups > 1) {
        shared.out[first_group + group][column] = out;
        __syncthreads();
    }
    if (group != 0 || row >= joined.rows) return;
    for (int i = 1; i < groups; i++) out = add_four(out, 1.0f, shared.out[first_group + i][column]);
    int head, token;
    joined.tile.find_row(params, row, head, token);
    FinalizedRow finalized =
        finalize_row(params, {most, sum}, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
    store_four(params, out_offset(params, joined.tile, head, token), 4 * column, scale_four(out, finalized.factor),
               element_out_type(params));
    if (params.lse.pointer && column == 0) store_lse(params, joined.tile, head, token, finalized.lse);
}

} // namespace latent
