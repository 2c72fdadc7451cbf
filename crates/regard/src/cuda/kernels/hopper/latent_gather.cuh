// Loaders of the decode kernel for latent caches where rows have lists of keys: cp.async copies the listed keys one by
// one, in the layout that TMA would write.
#pragma once
#include "hopper/latent_keys.cuh"

namespace latent {

// A loader warp: copies the chunks of value warpgroup `index`, or the rest of K tiles.
struct Gatherer : KeyLoader {
    __device__ __forceinline__ void load_chunk(const Keys &keys, int i, const PipelineState<CHUNKS> &chunk) const {
        hopper::mbarrier_wait(shared_address(&shared.empty[chunk.index]), chunk.phase ^ 1);
        copy<CHUNK_SUBTILES>(keys, first_dim_of(i) * 2, chunk_address(base, chunk));
        hopper::mbarrier_arrive_copies(shared_address(&shared.full[chunk.index]));
    }

    __device__ __forceinline__ void run() const {
        grid_dependency_wait();
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
        PieceReader pieces;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            int end = piece.end_tile(), key_tile = piece.first_tile();
            Keys keys = find_keys(piece, key_tile);
#pragma unroll 1
            while (key_tile < end) {
                if (index == VALUE_WARPGROUPS) {
                    load_rest(keys, rest);
                    rest.advance();
                } else {
#pragma unroll 1
                    for (int i = index; i < TILE_CHUNKS; i += VALUE_WARPGROUPS) load_chunk(keys, i, chunks.at(i));
                    chunks.advance(TILE_CHUNKS);
                }
                // While the copies are on their way.
                if (++key_tile < end) keys = find_keys(piece, key_tile);
            }
            pieces.release(shared, lane);
        }
        // The CTA's shared memory lives until its copies are done.
        cp_async_wait<0>();
    }
};

} // namespace latent
