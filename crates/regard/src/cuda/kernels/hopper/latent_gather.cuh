// Loaders of the decode kernel for latent caches where rows have lists of keys: cp.async copies the listed keys one by
// one, in the layout that TMA would write.
#pragma once
#include "hopper/latent_keys.cuh"
#include "hopper/latent_loader.cuh"

namespace latent {

// As cp_async, with a policy of L2.
static __device__ __forceinline__ void cp_async_with(unsigned long long policy, unsigned to, const void *from,
                                                     int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

// A loader warp. Those of a value warpgroup's chunks (`index`) have little more to do than to issue copies. Keys are
// found by the loader of the rest and by the scheduler warp, half of every K tile each (`half`): these share where keys
// are, and copy the rest of them.
struct Gatherer : KeyLoader {
    const KvTensor &rest_keys; // the dims of keys that are not values
    KeyAddresses &addresses;

    // Sets the addresses of a key of the tile's lists: of its value dims and of the rest.
    __device__ __forceinline__ void set_addresses(const Tile &tile, const ListedKey &listed, unsigned long long &at,
                                                  unsigned long long &rest_at) const {
        at = listed_key_address(params, tile, listed, 2);
        if (listed.in_second) {
            // Keys of a second cache are in one tensor.
            rest_at = at + VALUE_DIM * 2;
            return;
        }
        const RowStrides &strides = rest_keys.strides;
        long long rest = tile.kv_head * strides.head + listed.place.token * strides.token;
        if (params.block_size)
            rest += listed.place.batch * strides.batch;
        else
            rest += params.cu_seqlens_k ? tile.seq.kv_start * strides.token : tile.sequence * strides.batch;
        rest_at = rest_keys.pointer + rest * 2;
    }

    // The keys of a piece, if entry times stride is where they are: slots of a pool whose pages follow one another, or
    // positions without pages. This takes a fifth of the instructions of find_listed_key.
    struct EvenKeys {
        bool are_even;
        const int *list;
        int start, end;                 // keys that the row sees
        unsigned long long at, rest_at; // of key 0
        long long stride, rest_stride;  // in bytes
    };

    // Whether the slots of pages are evenly apart. Sets the distance, in elements.
    __device__ __forceinline__ bool are_slots_even(const RowStrides &strides, long long &stride) const {
        // Strides of dimensions of 1 are 0.
        stride = params.block_size == 1 ? strides.batch : strides.token;
        return params.blocks == 1 || strides.batch == params.block_size * stride;
    }

    __device__ __forceinline__ EvenKeys find_even_keys(const Tile &tile) const {
        const ListParameters &lists = lists_of(params);
        EvenKeys keys;
        keys.list = tile.list;
        keys.start = tile.every_start, keys.end = tile.every_end;
        keys.stride = params.keys.strides.token, keys.rest_stride = rest_keys.strides.token;
        keys.are_even = !lists.are_pages && tile.any_end == tile.first_list_len;
        if (params.block_size) {
            keys.are_even &= lists.are_slots && are_slots_even(params.keys.strides, keys.stride) &&
                             are_slots_even(rest_keys.strides, keys.rest_stride);
            keys.end = (int)min((long long)keys.end, (long long)params.blocks * params.block_size);
        }
        keys.stride *= 2, keys.rest_stride *= 2;
        set_addresses(tile, {0, {0, 0}, false}, keys.at, keys.rest_at);
        return keys;
    }

    // The entry of this lane in half of the keys of a K tile; -1 if the piece has none.
    __device__ __forceinline__ int load_entry(const EvenKeys &even, const Piece &piece, int key_tile, int half) const {
        int entry = key_tile * KEYS + 32 * half + lane;
        return even.are_even && entry >= piece.key_start && entry < piece.key_end ? even.list[entry] : -1;
    }

    // Half of the keys of a K tile: a lane has where key 32 * half + lane is.
    struct FoundKeys {
        unsigned long long at, rest_at; // the first value dim, and the first of the rest
        unsigned present;               // bit k: key k of the half exists and is seen
    };

    __device__ __forceinline__ FoundKeys find_keys(const Piece &piece, int key_tile, int half) const {
        FoundKeys keys;
        int entry = key_tile * KEYS + 32 * half + lane;
        bool present = entry >= piece.key_start && entry < piece.key_end;
        keys.at = keys.rest_at = params.keys.pointer;
        if (present) {
            ListedKey listed = find_listed_key(params, piece.tile, entry);
            present = listed.key >= 0;
            if (present) set_addresses(piece.tile, listed, keys.at, keys.rest_at);
        }
        keys.present = __ballot_sync(~0u, present);
        return keys;
    }

    // The same, of what load_entry returned.
    __device__ __forceinline__ FoundKeys find_even(const EvenKeys &even, int key) const {
        bool present = key >= even.start && key < even.end;
        key = present ? key : 0;
        return {even.at + key * even.stride, even.rest_at + key * even.rest_stride, __ballot_sync(~0u, present)};
    }

    // Hands the keys to the loaders of the chunks.
    __device__ __forceinline__ void share(const FoundKeys &keys, int half, unsigned phase) const {
        hopper::mbarrier_wait(shared_address(&shared.addresses_empty), phase ^ 1);
        addresses.of[32 * half + lane] = keys.at | (keys.present >> lane & 1);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.addresses_full));
    }

    // Copies 128 bytes of each key; eight lanes have a key: lines of L1 are the bound of such copies.
    __device__ __forceinline__ void load_rest(const FoundKeys &keys, int half,
                                              const PipelineState<REST_STAGES> &rest) const {
        static_assert(REST_SUBTILES == 1, "a column");
        hopper::mbarrier_wait(shared_address(&shared.rest_empty[rest.index]), rest.phase ^ 1);
        unsigned full = shared_address(&shared.rest_full[rest.index]);
        if (lane == 0) {
            shared.present[rest.index].of_half[half] = keys.present;
            hopper::mbarrier_arrive(full);
        }
        int part = lane % 8;
        unsigned to = base + REST_OFFSET + rest.index * REST_BYTES + half * (32 * 128);
#pragma unroll 4
        for (int first = 0; first < 32; first += 4) {
            int key = first + lane / 8;
            const unsigned char *from = (const unsigned char *)__shfl_sync(~0u, keys.rest_at, key) + part * 16;
            cp_async_with(policy, to + key * 128 + ((part ^ key % 8) << 4), from, keys.present >> key & 1 ? 16 : 0);
        }
        hopper::mbarrier_arrive_copies(full);
    }

    // Finds half of the keys of all K tiles of a piece, and loads their rest.
    __device__ __forceinline__ void run_rest(const Piece &piece, int half, PipelineState<REST_STAGES> &rest,
                                             unsigned &addresses_phase) const {
        int key_tile = piece.first_tile(), end = piece.end_tile();
        EvenKeys even = find_even_keys(piece.tile);
        int entry = load_entry(even, piece, key_tile, half);
#pragma unroll 1
        for (; key_tile < end; key_tile++) {
            FoundKeys keys = even.are_even ? find_even(even, entry) : find_keys(piece, key_tile, half);
            entry = load_entry(even, piece, key_tile + 1, half);
            share(keys, half, addresses_phase);
            load_rest(keys, half, rest);
            rest.advance();
            addresses_phase ^= 1;
        }
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

    // As a loader warp.
    __device__ __forceinline__ void run() const {
        grid_dependency_wait();
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
        PieceReader<PIECES> pieces;
        unsigned addresses_phase = 0;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            if (index == VALUE_WARPGROUPS) {
                run_rest(piece, 0, rest, addresses_phase);
            } else {
                int end = piece.end_tile();
#pragma unroll 1
                for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
                    LaneKeys keys = take_keys(addresses_phase);
#pragma unroll
                    for (int i = 0; i < OWN_CHUNKS; i++) load_chunk(keys, i, chunks.at(i * VALUE_WARPGROUPS + index));
                    chunks.advance(TILE_CHUNKS);
                    addresses_phase ^= 1;
                }
            }
            pieces.release(shared, lane);
        }
        // The CTA's shared memory lives until its copies are done.
        cp_async_wait<0>();
    }

    // As the scheduler warp.
    __device__ __forceinline__ void run_scheduler(const WorkIterator<KEYS, false> &work) const {
        PipelineState<REST_STAGES> rest;
        unsigned addresses_phase = 0;
        latent::run_scheduler(shared, work, lane,
                              [&](const Piece &piece) { run_rest(piece, 1, rest, addresses_phase); });
        cp_async_wait<0>();
    }
};

} // namespace latent
