// Copies of records of mla656.
#pragma once
#include "hopper/hopper.cuh"

namespace records {

// Copies contiguous bytes, a multiple of 16, to shared memory; the mbarrier counts them.
static __device__ __forceinline__ void bulk_load(unsigned long long policy, unsigned to, unsigned long long from,
                                                 int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
                 "[%3], %4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

} // namespace records
