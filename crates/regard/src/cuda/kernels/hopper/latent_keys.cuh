// Loaders of the decode kernel for latent caches that copy keys one by one, because rows have lists of them or because
// a key is a record of mla656: where keys are.
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

struct KeyLoader {
    const AttentionParameters &params;
    const KvTensor &rest_keys; // the dims of keys that are not values; of mla656 none
    Shared &shared;
    unsigned base; // of shared memory
    int index, lane;
    unsigned long long policy = key_policy(params); // of L2

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
};

} // namespace latent
