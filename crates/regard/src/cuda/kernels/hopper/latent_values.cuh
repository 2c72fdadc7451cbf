// The value warpgroups of the decode kernel for latent caches: P V, the rescaling of outputs, and the epilogue. Each
// has half of the value dims; chunks of K tiles and stages of probabilities arrive through mbarriers
// (latent_shape.cuh).
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// State and steps common to both kinds of value warpgroups.
struct ValueWarpgroup {
    const AttentionParameters &params;
    Shared &shared;
    const Exchange &exchange;
    unsigned base;  // of shared memory
    int half;       // which value warpgroup
    int warp, lane; // warp within it

    ChunkState chunks;
    PipelineState<PROB_STAGES> probs;
    PieceReader pieces;
    unsigned factor_phase = 0;

    // This warpgroup's chunk i of the current K tile.
    __device__ __forceinline__ PipelineState<CHUNKS> own_chunk(int i) const {
        return chunks.at(i * VALUE_WARPGROUPS + half);
    }

    // The score warpgroup has waited for the K tile; so must everyone who reads what TMA wrote.
    __device__ __forceinline__ void wait_chunks() const {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
            hopper::mbarrier_wait(shared_address(&shared.full[own_chunk(i).index]), own_chunk(i).phase);
    }

    __device__ __forceinline__ void release(const PipelineState<CHUNKS> &chunk) const {
        arrive_at_all(shared.empty[chunk.index], lane);
    }

    // 0 * NaN = NaN, so values that the piece does not have are zeroed.
    __device__ __forceinline__ void zero_others(const Piece &piece, int first_key) const {
        if (first_key >= piece.key_start && first_key + KEYS <= piece.key_end) return;
#pragma unroll 1
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(i));
#pragma unroll 1
            for (int at = threadIdx.x % 128; at < CHUNK_BYTES / 16; at += 128) {
                int key = first_key + at / 8 % KEYS;
                if (key < piece.key_start || key >= piece.key_end) st_shared_v4(keys + at * 16, make_uint4(0, 0, 0, 0));
            }
        }
        hopper::fence_proxy_async();
        hopper::named_barrier_sync(VALUES_BARRIER + half, 128);
    }

    // The descriptor of the probabilities of 16 keys.
    __device__ __forceinline__ unsigned long long probabilities(int step) const {
        return SharedTile<ROWS>{base + PROBS_OFFSET}.k_major(probs.index * (KEYS / 16) + step);
    }

    // The outputs of a row of the CTA in the workspace.
    __device__ __forceinline__ float *partial_row(const Piece &piece, int row) const {
        return partial_state(params, part_index(), piece.starts_here ? 0 : 1) + 2 * TILE_ROWS +
               (first_row_of_cta() + row) * VALUE_DIM;
    }

    // Offset of a row of the CTA in the output.
    __device__ __forceinline__ long long out_row(const Piece &piece, int row) const {
        int head, token;
        piece.tile.find_row(params, first_row_of_cta() + row, head, token);
        return out_offset(params, piece.tile, head, token);
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
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            hopper::mbarrier_wait(shared_address(&shared.probs_full[rows.probs.index]), rows.probs.phase);
            if (*(const int *)shared.rescales[rows.probs.index]) rows.rescale();
            rows.wait_chunks();
            rows.zero_others(piece, key_tile * KEYS);
            rows.multiply(key_tile + 1 < end);
            if (rows.lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_empty[rows.probs.index]));
            rows.chunks.advance(TILE_CHUNKS);
            rows.probs.advance();
        }
        hopper::mbarrier_wait(shared_address(&shared.factor_full), rows.factor_phase);
        rows.factor_phase ^= 1;
        rows.store_outputs(piece);
        __syncwarp();
        if (rows.lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_empty));
        if (is_counted(rows.params, piece)) hopper::named_barrier_arrive(CONSUMERS_BARRIER, CONSUMER_THREADS);
        rows.pieces.release(shared, rows.lane);
    }
}

} // namespace latent
