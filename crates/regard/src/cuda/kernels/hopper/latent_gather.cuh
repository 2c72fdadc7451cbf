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

// A loader warp: copies the chunks of value warpgroup `index`, or the rest of K tiles. The latter finds the keys, also
// for the others, which so have little more to do than to issue copies.
struct Gatherer : KeyLoader {
    const KvTensor &rest_keys; // the dims of keys that are not values
    KeyAddresses &addresses;

    // Sets the addresses of entry `entry` of the tile's list: of its value dims and of the rest. False if the list has
    // no key there.
    __device__ __forceinline__ bool find_addresses(const Tile &tile, int entry, unsigned long long &at,
                                                   unsigned long long &rest_at) const {
        ListedKey listed = find_listed_key(params, tile, entry);
        if (listed.key < 0) return false;
        at = listed_key_address(params, tile, listed, 2);
        if (listed.in_second) {
            // Keys of a second cache are in one tensor.
            rest_at = at + VALUE_DIM * 2;
            return true;
        }
        const RowStrides &strides = rest_keys.strides;
        long long rest = tile.kv_head * strides.head + listed.place.token * strides.token;
        if (params.block_size)
            rest += listed.place.batch * strides.batch;
        else
            rest += params.cu_seqlens_k ? tile.seq.kv_start * strides.token : tile.sequence * strides.batch;
        rest_at = rest_keys.pointer + rest * 2;
        return true;
    }

    // The keys of a K tile: a lane has where keys `lane` and 32 + `lane` are.
    struct FoundKeys {
        unsigned long long at[2], rest_at[2]; // the first value dim, and the first of the rest
        unsigned present[2];                  // bit k: key k, or 32 + k, of the list exists and is seen
    };

    __device__ __forceinline__ FoundKeys find_keys(const Piece &piece, int key_tile) const {
        FoundKeys keys;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = key_tile * KEYS + 32 * half + lane;
            bool present = key >= piece.key_start && key < piece.key_end;
            keys.at[half] = keys.rest_at[half] = params.keys.pointer;
            if (present) present = find_addresses(piece.tile, key, keys.at[half], keys.rest_at[half]);
            keys.present[half] = __ballot_sync(~0u, present);
        }
        return keys;
    }

    // Hands the keys to the loaders of the chunks.
    __device__ __forceinline__ void share(const FoundKeys &keys, unsigned phase) const {
        hopper::mbarrier_wait(shared_address(&shared.addresses_empty), phase ^ 1);
#pragma unroll
        for (int half = 0; half < 2; half++)
            addresses.of[32 * half + lane] = keys.at[half] | (keys.present[half] >> lane & 1);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.addresses_full));
    }

    // Copies 128 bytes of each key; eight lanes have a key.
    __device__ __forceinline__ void load_rest(const FoundKeys &keys, const PipelineState<REST_STAGES> &rest) const {
        static_assert(REST_SUBTILES == 1, "a column");
        hopper::mbarrier_wait(shared_address(&shared.rest_empty[rest.index]), rest.phase ^ 1);
        unsigned full = shared_address(&shared.rest_full[rest.index]);
        if (lane == 0) {
            shared.present[rest.index] = (unsigned long long)keys.present[1] << 32 | keys.present[0];
            hopper::mbarrier_arrive(full);
        }
        int part = lane % 8;
        unsigned to = base + REST_OFFSET + rest.index * REST_BYTES;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll 4
            for (int first = 0; first < 32; first += 4) {
                int key = first + lane / 8;
                const unsigned char *from =
                    (const unsigned char *)__shfl_sync(~0u, keys.rest_at[half], key) + part * 16;
                cp_async_with(policy, to + (32 * half + key) * 128 + ((part ^ key % 8) << 4), from,
                              keys.present[half] >> key & 1 ? 16 : 0);
            }
        }
        hopper::mbarrier_arrive_copies(full);
    }

    // Where this lane copies from: 16 bytes of keys `lane / 8`, 4 + `lane / 8`, ...
    static constexpr int LANE_KEYS = KEYS / 4;
    struct LaneKeys {
        const unsigned char *from[LANE_KEYS];
        unsigned present; // bit i: the i-th of them
    };

    // Takes over the keys of a K tile.
    __device__ __forceinline__ LaneKeys take_keys(unsigned phase) const {
        hopper::mbarrier_wait(shared_address(&shared.addresses_full), phase);
        LaneKeys keys;
        keys.present = 0;
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) {
            unsigned long long at = addresses.of[4 * i + lane / 8];
            keys.present |= (unsigned)(at & 1) << i;
            keys.from[i] = (const unsigned char *)(at & ~1ull) + first_dim_of(index) * 2 + lane % 8 * 16;
        }
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.addresses_empty));
        return keys;
    }

    // Copies chunk i of this warp's.
    __device__ __forceinline__ void load_chunk(const LaneKeys &keys, int i, const PipelineState<CHUNKS> &chunk) const {
        hopper::mbarrier_wait(shared_address(&shared.empty[chunk.index]), chunk.phase ^ 1);
        // Key 4 k + g is in row g or 4 + g of its swizzled rows of eight.
        int group = lane / 8, part = lane % 8;
        unsigned to = chunk_address(base, chunk) + group * 128,
                 swizzled[2] = {to + ((part ^ group) << 4), to + ((part ^ (4 + group)) << 4)};
#pragma unroll
        for (int k = 0; k < LANE_KEYS; k++)
#pragma unroll
            for (int column = 0; column < CHUNK_SUBTILES; column++)
                cp_async_with(policy, swizzled[k % 2] + k * 512 + column * SUBTILE_BYTES,
                              keys.from[k] + i * CHUNK_DIMS * 2 + column * 128, keys.present >> k & 1 ? 16 : 0);
        hopper::mbarrier_arrive_copies(shared_address(&shared.full[chunk.index]));
    }

    __device__ __forceinline__ void run() const {
        grid_dependency_wait();
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
        PieceReader pieces;
        unsigned addresses_phase = 0;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            int end = piece.end_tile();
#pragma unroll 1
            for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
                if (index == VALUE_WARPGROUPS) {
                    FoundKeys keys = find_keys(piece, key_tile);
                    share(keys, addresses_phase);
                    load_rest(keys, rest);
                    rest.advance();
                } else {
                    LaneKeys keys = take_keys(addresses_phase);
#pragma unroll
                    for (int i = 0; i < OWN_CHUNKS; i++) load_chunk(keys, i, chunks.at(i * VALUE_WARPGROUPS + index));
                    chunks.advance(TILE_CHUNKS);
                }
                addresses_phase ^= 1;
            }
            pieces.release(shared, lane);
        }
        // The CTA's shared memory lives until its copies are done.
        cp_async_wait<0>();
    }
};

} // namespace latent
