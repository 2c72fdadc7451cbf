// Loaders of the decode kernel for latent caches where rows have lists of keys: cp.async copies the listed keys one by
// one, in the layout that TMA would write.
#pragma once
#include "hopper/latent_keys.cuh"

namespace latent {

// As cp_async, with a policy of L2.
static __device__ __forceinline__ void cp_async_with(unsigned long long policy, unsigned to, const void *from,
                                                     int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

// A loader warp: copies the chunks of value warpgroup `index`, or the rest of K tiles.
struct Gatherer : KeyLoader {
    // The keys of a K tile: a lane has where keys `lane` and 32 + `lane` are.
    struct Keys {
        const unsigned char *from[2];
        unsigned present[2]; // bit k: key k, or 32 + k, of the list exists and is seen
    };

    __device__ __forceinline__ Keys find_keys(const Piece &piece, int key_tile) const {
        Keys keys;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = key_tile * KEYS + 32 * half + lane;
            bool present = key >= piece.key_start && key < piece.key_end;
            unsigned long long at = params.keys.pointer;
            if (present) present = find_address(piece.tile, key, at);
            keys.present[half] = __ballot_sync(~0u, present);
            keys.from[half] = (const unsigned char *)at;
        }
        return keys;
    }

    // Copies 128 bytes of the keys, `from_byte` and on, to each of COUNT columns; eight lanes have a key.
    template <int COUNT> __device__ __forceinline__ void copy(const Keys &keys, int from_byte, unsigned to) const {
        int part = lane % 8;
        unsigned offset = from_byte + part * 16;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll 4
            for (int first = 0; first < 32; first += 4) {
                int key = first + lane / 8;
                const unsigned char *from =
                    (const unsigned char *)__shfl_sync(~0u, (unsigned long long)keys.from[half], key) + offset;
                int bytes = keys.present[half] >> key & 1 ? 16 : 0;
                unsigned at = to + (32 * half + key) * 128 + ((part ^ key % 8) << 4);
#pragma unroll
                for (int i = 0; i < COUNT; i++) cp_async_with(policy, at + i * SUBTILE_BYTES, from + i * 128, bytes);
            }
        }
    }

    __device__ __forceinline__ void load_rest(const Keys &keys, const PipelineState<REST_STAGES> &rest) const {
        hopper::mbarrier_wait(shared_address(&shared.rest_empty[rest.index]), rest.phase ^ 1);
        unsigned full = shared_address(&shared.rest_full[rest.index]);
        if (lane == 0) {
            shared.present[rest.index] = (unsigned long long)keys.present[1] << 32 | keys.present[0];
            hopper::mbarrier_arrive(full);
        }
        copy<REST_SUBTILES>(keys, 0, base + REST_OFFSET + rest.index * REST_BYTES);
        hopper::mbarrier_arrive_copies(full);
    }

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
