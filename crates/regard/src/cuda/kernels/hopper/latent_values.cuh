// The value warpgroups of the decode kernel for latent caches, with 16 rows or over records of mla656: P V, the
// rescaling of outputs, and the epilogue. Each has half of the value dims; chunks of K tiles and stages of
// probabilities arrive through mbarriers (latent_shape.cuh).
#pragma once
#include "hopper/latent_consumer.cuh"

namespace latent {

struct ValueWarpgroup : Consumer {
    PipelineState<PROB_STAGES> probs;
    unsigned factor_phase = 0;

    // The descriptor of the probabilities of 16 keys, for chunk i of this warpgroup's values.
    __device__ __forceinline__ unsigned long long probabilities(int i, int step) const {
        int tile = PROB_TILES > 1 ? i * VALUE_WARPGROUPS + warpgroup : 0;
        return SharedTile<ROWS>{base + PROBS_OFFSET}.k_major((probs.index * PROB_TILES + tile) * (KEYS / 16) + step);
    }
};

// All pieces of work of a value warpgroup.
template <class Rows> static __device__ __forceinline__ void run_values(Rows &rows) {
    Shared &shared = rows.shared;
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = rows.pieces.wait(shared);
        if (!piece.more) return;
        rows.begin();
        rows.run_tiles(piece);
        hopper::mbarrier_wait(shared_address(&shared.factor_full), rows.factor_phase);
        rows.factor_phase ^= 1;
        rows.store_outputs(piece);
        __syncwarp();
        if (rows.lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_empty));
        if (is_counted(rows.params)) hopper::named_barrier_arrive(CONSUMERS_BARRIER, CONSUMER_THREADS);
        rows.pieces.release(shared, rows.lane);
    }
}

} // namespace latent
