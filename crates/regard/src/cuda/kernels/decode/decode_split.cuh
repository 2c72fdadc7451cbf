// Tiles that are split over several CTAs, and pieces of a tile in batch-invariant mode.
#pragma once
#include "common/arrival.cuh"
#include "decode/decode_combine.cuh"
#include "decode/decode_tile.cuh"

// Merges the partial states of CTAs `first..=last` for all rows of a tile, and writes the rows.
template <class Worker> static __device__ __forceinline__ void
combine_ctas(const Worker &w, long long work_per_cta, long long first, long long last, const TileRange &tile_range) {
    const AttentionParameters &params = w.params;
    for (int row = threadIdx.x >> 5; row < w.tile.rows; row += computing_threads() >> 5) {
        if (!params.batch_invariant) {
            combine_row<STATES_PER_BATCH>(params, w.tile, row, w.lane, first, last, w.out_type());
            continue;
        }
        RowState state = load_partial(partial_state(params, first, 0), row, w.lane);
        for (long long cta = first + 1; cta <= last; cta++) {
            int pieces =
                (int)(min((cta + 1) * work_per_cta, tile_range.end) - max(cta * work_per_cta, tile_range.keys_start));
            for (int piece = 0; piece < pieces; piece++)
                combine_next(unit_of(params), state, load_partial(partial_state(params, cta, 1 + piece), row, w.lane));
        }
        store_row(params, w.tile, row, w.lane, state, w.out_type());
    }
}

// Merges the previous pieces of a row into the state of this piece, in batch-invariant mode.
template <class Worker> static __device__ __forceinline__ void
fold_piece(const AttentionParameters &params, Shared &shared, const Worker &w, RowState &state, int piece, int row) {
    // This CTA has the tile's first pieces and folds them as they come. Each lane reads back its own writes.
    if (piece > 0) {
        RowState folded = load_partial(partial_state(params, blockIdx.x, 0), row, w.lane);
        folded.state = shared.folded[piece & 1][row];
        combine_next(unit_of(params), folded, state);
        state = folded;
    }
    if (w.lane == 0) shared.folded[(piece + 1) & 1][row] = state.state;
}

// Hands over a tile that is split over several CTAs: to `combine`, or to the last of the CTAs to arrive.
template <class Worker> static __device__ __forceinline__ void
finish_tile(Worker &w, long long work_per_cta, const TileRange &tile_range, bool starts_here, bool ends_here) {
    const AttentionParameters &params = w.params;
    Shared &shared = w.shared;
    if (params.stream_k.combines) {
        if (threadIdx.x == 0)
            count_part(params, w.tile, starts_here, blockIdx.x,
                       ends_here ? (int)blockIdx.x : (int)divide(tile_range.end - 1, work_per_cta));
    } else if (!starts_here || !ends_here) {
        // Other CTAs have the rest of this tile. The last to arrive combines all parts.
        long long first_cta = starts_here ? blockIdx.x : divide(tile_range.start, work_per_cta);
        long long last_cta = ends_here ? blockIdx.x : divide(tile_range.end - 1, work_per_cta);
        unsigned *counter = (unsigned *)params.workspace + first_cta;
        if (threadIdx.x == 0) shared.last = count_arrival(counter) == (unsigned)(last_cta - first_cta);
        synchronize_computing();
        if (shared.last) {
            combine_ctas(w, work_per_cta, first_cta, last_cta, tile_range);
            if (threadIdx.x == 0) *counter = 0;
        }
        synchronize_computing();
    }
}
