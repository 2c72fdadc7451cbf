// Combines the split-KV partials of the decode kernel for latent caches: in a grid of its own if parts of a tile are
// many, else in `decode`, by the CTA that is the last to finish one.
#pragma once
#include "decode/decode_combine_entry.cuh"
#include "hopper/latent_partials.cuh"

namespace latent {

// A thread has four outputs of some parts of a row. Either a group of COMBINE_GROUP threads has a row and all of its
// parts, or the whole CTA has a slice of one row's outputs, and its groups divide the parts. The host chooses by the
// grid: more than TILE_ROWS CTAs per tile are slices of rows.
constexpr int COMBINE_THREADS = 512, COMBINE_GROUP = VALUE_DIM / 4;
// 128 rows have more CTAs than an H200 has SMs even with few tiles.
constexpr int COMBINE_CTAS_PER_SM = TILE_ROWS > 64 ? 2 : 1;

struct CombineShared {
    float4 out[COMBINE_THREADS];
    // Of parts, and of halves of their outputs if these have units; a row has no more parts than threads.
    float weights[PARTIAL_UNITS ? PARTIAL_UNITS : 1][COMBINE_THREADS];
    float maxima[COMBINE_THREADS / 32], sums[COMBINE_THREADS / 32];
    unsigned word; // of the tile
};

// The division of a CTA's rows among its threads. All numbers are powers of two; these are their logarithms.
struct CombineShape {
    int rows;   // of a CTA
    int slices; // of a row, one per CTA
    int width;  // threads of a group: four outputs each
    int groups; // per row

    __device__ __forceinline__ CombineShape(int ctas_per_tile) {
        int ctas_per_row = __ffs(ctas_per_tile) - log2_of(TILE_ROWS) - 1; // negative: a CTA has several rows
        rows = max(0, -ctas_per_row);
        slices = max(0, ctas_per_row);
        width = log2_of(COMBINE_GROUP) - slices;
        groups = log2_of(COMBINE_THREADS) - width - rows;
    }
    static __device__ __forceinline__ constexpr int log2_of(int power) {
        return power == 1 ? 0 : 1 + log2_of(power / 2);
    }
};

// Calls `f` for the halves of outputs that have weights of their own.
template <class F> static __device__ __forceinline__ void for_halves(F f) {
#pragma unroll
    for (int half = 0; half < (PARTIAL_UNITS ? PARTIAL_UNITS : 1); half++) f(half);
}

// Combines the parts of a row, which may not exist; waits for them if they were known before. `slice`: of the row's
// outputs.
static __device__ __forceinline__ void combine_slice(const AttentionParameters &params, SplitTile &split,
                                                     const CombineShape &shape, int first_row, int slice) {
    CombineShared &shared = *(CombineShared *)dynamic_shared;
    int thread = threadIdx.x, lane = thread & 31, groups = 1 << shape.groups, width = 1 << shape.width;
    int row_threads = COMBINE_THREADS >> shape.rows, warps = row_threads / 32;
    int part = thread & row_threads - 1, first_thread = thread - part;
    int row = first_row + (thread >> shape.width + shape.groups);
    int group = part >> shape.width, column = slice * width + (thread & width - 1);
    int parts = row < split.rows ? split.parts.last - split.parts.first + 1 : 0;
    PartialStates slot = {partial_state(params, split.parts.first, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    // A thread per four outputs of parts `group`, `group + groups`, ..., in batches: loads have long latency, so the
    // first batch is on its way while the weights are found, and each is loaded whole before any of it is used.
    constexpr int BATCH = (COMBINE_CTAS_PER_SM > 1 ? 24 : 32) / (sizeof(PartialFour) / 4); // as registers allow
    PartialFour values[BATCH];
    int left = parts - group;
    long long step = slot.stride << shape.groups;
    const float *next = slot.slots + group * slot.stride;
    auto load = [&](const float *first) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (i << shape.groups < left)
                values[i] = PartialTile{i == 0 ? first : next + i * step}.four(row, 4 * column);
    };
    // Addresses are found before the wait: instructions that are fetched first take longer to arrive than to run.
    const float *first = slot(group), *own_part = slot(part);
    asm volatile("" : "+l"(first), "+l"(next), "+l"(own_part));
    if (params.stream_k.work_total) await_parts(params, split, shared.word);
    load(first);
    // A thread per part: their weights.
    State own = {-INF, 0.0f};
    float units[PARTIAL_UNITS ? PARTIAL_UNITS : 1] = {};
    if (part < parts) {
        own = PartialTile{own_part}.state(row);
        for_halves([&](int half) { units[half] = PartialTile{own_part}.unit_of_half(half, row); });
    }
    float row_max = own.max;
#pragma unroll
    for (int step = 16; step; step /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, step));
    if (lane == 0) shared.maxima[thread / 32] = row_max;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < warps; i++) row_max = fmaxf(row_max, shared.maxima[first_thread / 32 + i]);
    float weight = exp2_fast(own.max - (row_max == -INF ? 0.0f : row_max)), sum = __fmul_rn(own.sum, weight);
    for_halves([&](int half) { shared.weights[half][thread] = __fmul_rn(weight, units[half]); });
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) shared.sums[thread / 32] = sum;
    __syncthreads();
    const float *weights = shared.weights[PARTIAL_UNITS ? 4 * column / DIMS_PER_WARPGROUP : 0] + first_thread + group;
    sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < warps; i++) sum += shared.sums[first_thread / 32 + i];
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (bool again = false; left > 0; again = true) {
        if (again) load(next);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (i << shape.groups < left) out = add_four(out, weights[i << shape.groups], unpack_four(values[i]));
        next += BATCH * step;
        weights += BATCH << shape.groups;
        left -= BATCH << shape.groups;
    }
    if (groups > 1) {
        shared.out[thread] = out;
        __syncthreads();
    }
    if (group != 0 || row >= split.rows) return;
#pragma unroll 4
    for (int i = 1; i < groups; i++) out = add_four(out, 1.0f, shared.out[thread + (i << shape.width)]);
    int head, token;
    split.tile.find_row(params, row, head, token);
    FinalizedRow finalized =
        finalize_row(params, {row_max, sum}, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
    out = scale_four(scale_four(out, finalized.factors.first), finalized.factors.second);
    store_four(params, out_offset(params, split.tile, head, token), 4 * column, out, element_out_type(params));
    if (params.lse.pointer && column == 0) store_lse(params, split.tile, head, token, finalized.lse);
}

// Combines the parts of a row and writes it. One warp per row.
static __device__ __forceinline__ void combine_whole_row(const AttentionParameters &params, const Piece &piece, int row,
                                                         int lane) {
    PartialStates slot = {partial_state(params, piece.first_part, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    RowState state = empty_row();
    combine_states<1>(
        1.0f, state, piece.last_part - piece.first_part + 1, lane,
        [&](int k) { return PartialTile{slot(k)}.state(row); },
        [&](int k, int column) {
            PartialTile part = {slot(k)};
            return scale_four(unpack_four(part.four(row, column)), part.unit_of_half(column / DIMS_PER_WARPGROUP, row));
        });
    store_row(params, piece.tile, row, lane, state, element_out_type(params));
}

// Combines the tiles that a CTA is the last to finish a part of. The scheduler and the loaders call this, when they
// have no more work and all consumers have stored their parts: consumers would lack registers for their outputs.
static __device__ __forceinline__ void combine_parts(const AttentionParameters &params, Shared &shared) {
    int rank = blockIdx.x % CTAS_PER_TILE, thread = threadIdx.x - 32 * SCHEDULER_WARP;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        if (i == 0 ? !shared.first_part.more : shared.last_part < 0) continue;
        const Piece &piece = i == 0 ? shared.first_part : shared.pieces[shared.last_part];
        if (thread == 0) {
            unsigned *arrivals = arrivals_of(params, piece.first_part, rank);
            shared.is_last = count_arrival(arrivals) == (unsigned)(piece.last_part - piece.first_part);
            if (shared.is_last) *arrivals = 0;
        }
        hopper::named_barrier_sync(PART_BARRIER, 32 * PRODUCER_WARPS);
        if (shared.is_last) {
            int end = min(piece.tile.rows, first_row_of_cta() + ROWS);
#pragma unroll 1
            for (int row = first_row_of_cta() + thread / 32; row < end; row += PRODUCER_WARPS)
                combine_whole_row(params, piece, row, thread & 31);
        }
        hopper::named_barrier_sync(PART_BARRIER, 32 * PRODUCER_WARPS);
    }
}

} // namespace latent
