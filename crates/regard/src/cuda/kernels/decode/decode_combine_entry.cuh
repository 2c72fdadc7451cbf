// Common to the kernels that combine partial states: which CTAs of `decode` have parts of a tile, and when they are
// done. (The last CTA of `decode` to arrive would combine the rows of the whole tile while the others idle.)
//
// Such a kernel starts when all CTAs of `decode` have started. If the CTAs of each tile are known before, because the
// host knows the lengths or they were scheduled, it waits for these CTAs only.
#pragma once
#include "decode/decode_combine.cuh"

// Whether the CTAs of each tile are known before `decode` runs.
static __device__ __forceinline__ bool knows_partial_ranges(const AttentionParameters &params) {
    return params.stream_k.work_total || is_scheduled(params);
}

// A tile whose keys may be split over several CTAs of `decode`.
struct SplitTile {
    Tile tile;
    int rows; // of the tile; none if another launch has them
    PartialRange parts;
    unsigned *arrivals;

    // Has more than one part, so that `decode` has not stored its rows.
    __device__ __forceinline__ bool is_split() const { return parts.first < parts.last; }

    // Its CTAs are waited for by their counter.
    __device__ __forceinline__ bool is_awaited(const AttentionParameters &params) const {
        return params.stream_k.work_total || (is_scheduled(params) && rows > 0);
    }
};

// Finds the parts of tile `number`, and waits for them. The CTA's rows start at `first_row`; all threads call this.
static __device__ __forceinline__ SplitTile begin_combine(const AttentionParameters &params, int number,
                                                          int first_row) {
    int row_tiles = row_tiles_at_most(params), heads = number / row_tiles;
    SplitTile split;
    Tile &tile = split.tile;
    tile.sequence = heads / params.kv_heads;
    tile.kv_head = heads - tile.sequence * params.kv_heads;
    tile.first_row = (number - heads * row_tiles) * TILE_ROWS;
    if (!knows_partial_ranges(params)) grid_dependency_wait();
    tile.seq = load_work(params, tile.sequence);
    split.rows = tile.seq.q_len > params.max_query_len ? 0 : tile.seq.q_len * params.group - tile.first_row;
    split.parts = {0, 0};
#if LISTS
    tile.sequence = tile.seq.sequence;
#endif
    if (params.stream_k.work_total) {
        int parts = (int)divide(params.stream_k.work_per_tile, params.stream_k.work_per_cta);
        split.parts = {number * parts, (number + 1) * parts - 1};
    } else if (split.rows > 0) {
        split.parts = partial_range_of(params, tile);
    }
    split.arrivals = arrivals_of(params, split.parts.first, first_row / (TILE_ROWS / CTAS_PER_TILE));
    if (split.is_awaited(params)) {
        if (threadIdx.x == 0) {
            unsigned arrived, parts = split.parts.last - split.parts.first + 1;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(split.arrivals) : "memory");
            while (arrived < parts);
        }
        __syncthreads();
    }
    return split;
}

// The last CTA of the tile resets the counter. A kernel that waits for this one also waits for `decode`.
static __device__ __forceinline__ void end_combine(const AttentionParameters &params, const SplitTile &split) {
    if (!knows_partial_ranges(params)) return;
    if (threadIdx.x == 0 && split.is_awaited(params)) {
        unsigned before, parts = split.parts.last - split.parts.first + 1;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(split.arrivals) : "memory");
        if (before == parts + gridDim.y / CTAS_PER_TILE - 1) *split.arrivals = 0;
    }
    grid_dependency_wait();
}
