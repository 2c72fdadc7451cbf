// Loaders of the decode kernel for latent caches that copy keys one by one, because rows have lists of them or because
// a key is a record of mla656: where the keys of a K tile are, and copies of the dims that are not values.
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// The policy of L2 for keys. Keys that are read once are evicted first: else they drive the kernel's code out, and the
// next call waits for instructions. Rows of a sequence may list the same keys, and read them from L2.
static __device__ __forceinline__ unsigned long long key_policy(const AttentionParameters &params) {
#if LISTS
    if (params.batch != lists_of(params).sequences) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        return policy;
    }
#endif
    return hopper::evict_first_policy();
}

// As cp_async, with a policy of L2.
static __device__ __forceinline__ void cp_async_with(unsigned long long policy, unsigned to, const void *from,
                                                     int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

struct KeyLoader {
    const AttentionParameters &params;
    const KvTensor &rest_keys; // the dims of keys that are not values; of mla656 none
    Shared &shared;
    unsigned base; // of shared memory
    int index, lane;
    unsigned long long policy = key_policy(params); // of L2

    // The keys of a K tile: a lane has where keys `lane` and 32 + `lane` are.
    struct Keys {
        const unsigned char *from[2];
        unsigned present[2]; // bit k: key k, or 32 + k, is one of the piece; of a list: exists and is seen
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

    // Sets the address of a key, or of entry `key` of the tile's list; false if the list has no key there.
    __device__ __forceinline__ bool find_address(const Tile &tile, int key, unsigned long long &at) const {
        constexpr int ELEMENT = RECORDS ? RECORD_BYTES : 2;
#if LISTS
        ListedKey listed = find_listed_key(params, tile, key);
        if (listed.key < 0) return false;
        at = !RECORDS && index == VALUE_WARPGROUPS ? find_rest(tile, listed)
                                                   : listed_key_address(params, tile, listed, ELEMENT);
#else
        KeyPlace place;
        if (params.block_size) {
            find_paged_place(params, tile, key, place);
            place.batch = page_of(params, place.batch);
        } else {
            place = contiguous_place(params, tile, key);
        }
        const RowStrides &strides = params.keys.strides;
        at += (place.batch * strides.batch + place.token * strides.token + tile.kv_head * strides.head) * ELEMENT;
#endif
        return true;
    }

#if LISTS
    // The address of the dims of a listed key that are not values.
    __device__ __forceinline__ unsigned long long find_rest(const Tile &tile, const ListedKey &listed) const {
        // Keys of a second cache are in one tensor.
        if (listed.in_second) return listed_key_address(params, tile, listed, 2) + VALUE_DIM * 2;
        const RowStrides &strides = rest_keys.strides;
        long long at = tile.kv_head * strides.head + listed.place.token * strides.token;
        if (params.block_size)
            at += listed.place.batch * strides.batch;
        else
            at += params.cu_seqlens_k ? tile.seq.kv_start * strides.token : tile.sequence * strides.batch;
        return rest_keys.pointer + at * 2;
    }
#endif

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

    // Copies the scales of the keys.
    __device__ __forceinline__ void copy_scales(const Keys &keys, unsigned to) const {
#pragma unroll
        for (int half = 0; half < 2; half++)
            cp_async(to + (32 * half + lane) * 16, keys.from[half] + SCALES_BYTE,
                     keys.present[half] >> lane & 1 ? 16 : 0);
    }

    __device__ __forceinline__ void load_rest(const Keys &keys, const PipelineState<REST_STAGES> &rest) const {
        hopper::mbarrier_wait(shared_address(&shared.rest_empty[rest.index]), rest.phase ^ 1);
        unsigned full = shared_address(&shared.rest_full[rest.index]);
#if LISTS
        if (lane == 0) {
            shared.present[rest.index] = (unsigned long long)keys.present[1] << 32 | keys.present[0];
            hopper::mbarrier_arrive(full);
        }
#endif
        if (CONVERTS) copy_scales(keys, base + SCALES_OFFSET + rest.index * SCALE_BYTES);
        copy<REST_SUBTILES>(keys, CONVERTS ? ROTARY_BYTE : 0, base + REST_OFFSET + rest.index * REST_BYTES);
        hopper::mbarrier_arrive_copies(full);
    }
};

} // namespace latent
