// What the loaders of the decode kernel for latent caches have in common if they copy keys one by one, because rows
// have lists of them or because a key is a record of mla656.
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
    Shared &shared;
    unsigned base; // of shared memory
    int index, lane;
    unsigned long long policy = key_policy(params); // of L2
};

} // namespace latent
