// Common to the kernels that combine partial states: which CTAs of `decode` have parts of a tile, and when they are
// done. (The last CTA of `decode` to arrive would combine the rows of the whole tile while the others idle.)
//
// Such a kernel starts when all CTAs of `decode` have started, and waits for those that have parts of its tile only. It
// is for batches of sequences that all have the same number of queries.
#pragma once
#include "decode/decode_combine.cuh"

// The CTAs that have a part of a tile, first and last.
struct Parts {
    int first, last;
};

// A tile whose keys may be split over several CTAs of `decode`. Its sequence and its parts are known before they are
// waited for if the host divided the work, else after it.
struct SplitTile {
    Tile tile;
    int rows; // of the tile; none if another launch has them
    Parts parts;
    unsigned *word; // TileWord

    // Has more than one part, so that `decode` has not stored its rows.
    __device__ __forceinline__ bool is_split() const { return parts.first < parts.last; }

    __device__ __forceinline__ void load_sequence(const AttentionParameters &params) {
        tile.seq = load_work(params, tile.sequence);
#if LISTS
        tile.sequence = tile.seq.sequence;
#endif
    }
};

// Finds tile `number`. The CTA's rows start at `first_row`.
static __device__ __forceinline__ SplitTile find_tile(const AttentionParameters &params, int number, int first_row) {
    int row_tiles = row_tiles_at_most(params), heads = row_tiles == 1 ? number : number / row_tiles;
    SplitTile split;
    Tile &tile = split.tile;
    tile.sequence = params.kv_heads == 1 ? heads : heads / params.kv_heads;
    tile.kv_head = heads - tile.sequence * params.kv_heads;
    tile.first_row = (number - heads * row_tiles) * TILE_ROWS;
    int q_len = LISTS ? 1 : params.query_len;
    split.rows = q_len > params.max_query_len ? 0 : q_len * params.group - tile.first_row;
    split.word = tile_word(params, number, first_row / (TILE_ROWS / CTAS_PER_TILE));
    split.parts = {0, 0};
    if (params.stream_k.work_total) {
        int parts = (int)divide(params.stream_k.work_per_tile, params.stream_k.work_per_cta);
        split.parts = {number * parts, (number + 1) * parts - 1};
        split.load_sequence(params);
    }
    return split;
}

// Waits for the parts of a tile. `shared`: a word of shared memory. All threads call this.
static __device__ __forceinline__ void await_parts(const AttentionParameters &params, SplitTile &split,
                                                   unsigned &shared) {
    if (split.rows <= 0) return;
    if (threadIdx.x == 0) {
        TileWord word;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word.bits) : "l"(split.word) : "memory");
        while (!word.is_complete());
        shared = word.bits;
    }
    __syncthreads();
    if (params.stream_k.work_total) return;
    TileWord word = {shared};
    split.parts = {word.first_part(), word.first_part() + word.parts() - 1};
    split.load_sequence(params);
}

// The last CTA of the tile resets its word. A kernel that waits for this one also waits for `decode`.
static __device__ __forceinline__ void end_combine(const SplitTile &split) {
    if (threadIdx.x == 0 && split.rows > 0) {
        TileWord before;
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before.bits) : "l"(split.word) : "memory");
        if (before.arrivals() == before.parts() + (int)gridDim.y / CTAS_PER_TILE - 1) *split.word = 0;
    }
    grid_dependency_wait();
}
