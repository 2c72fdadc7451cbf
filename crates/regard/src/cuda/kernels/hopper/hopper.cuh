// Hopper primitives: mbarriers, TMA, clusters, wgmma synchronization, shared-memory descriptors.
#pragma once
#include "common/copy.cuh"
#include "common/parameters.cuh"

namespace hopper {

// Dynamic shared memory per CTA: 227 KB.
constexpr int MAX_SHARED_BYTES = 232448;

static __device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the TMA bytes that the phase waits for.
// Arrives when the copies that this thread has begun by cp.async are done.
static __device__ __forceinline__ void mbarrier_arrive_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

#define MBARRIER_WAIT(ORDER)                                                           \
    asm volatile("{\n"                                                                 \
                 ".reg .pred done;\n"                                                  \
                 "again:\n"                                                            \
                 "mbarrier.try_wait.parity" ORDER ".shared::cta.b64 done, [%0], %1;\n" \
                 "@done bra over;\n"                                                   \
                 "bra again;\n"                                                        \
                 "over:\n"                                                             \
                 "}" ::"r"(barrier),                                                   \
                 "r"(phase)                                                            \
                 : "memory")

// Waits until the phase of that parity completes.
static __device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned phase) { MBARRIER_WAIT(""); }

// Arrives at the mbarrier of the CTA of that rank in the cluster.
static __device__ __forceinline__ void mbarrier_arrive_remote(unsigned barrier, unsigned rank) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Stores a number to the shared memory of the CTA of that rank in the cluster, then arrives at an mbarrier there.
static __device__ __forceinline__ void st_async_remote(unsigned to, unsigned number, unsigned barrier, unsigned rank) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %3;\n"
                 "st.shared::cluster.u32 [there], %1;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(to),
                 "r"(number), "r"(barrier), "r"(rank)
                 : "memory");
}

// Waits like mbarrier_wait, and acquires what st_async_remote stored.
static __device__ __forceinline__ void mbarrier_wait_cluster(unsigned barrier, unsigned phase) {
    MBARRIER_WAIT(".acquire.cluster");
}

// This CTA's rank in its cluster.
static __device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Synchronizes all threads of the cluster.
static __device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The first element of a TMA box, innermost coordinate first. `batch`: a sequence, or a page.
struct TmaCoordinates {
    int dim, head, token, batch;
};

// TMA load of a box.
static __device__ __forceinline__ void tma_load(unsigned to, const TensorMap &map, unsigned barrier,
                                                TmaCoordinates at) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
            "r"(to),
        "l"((unsigned long long)&map), "r"(barrier), "r"(at.dim), "r"(at.head), "r"(at.token), "r"(at.batch)
        : "memory");
}

// An L2 policy: what is loaded is evicted first.
static __device__ __forceinline__ unsigned long long evict_first_policy() {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// TMA load of a box with a policy for L2.
static __device__ __forceinline__ void tma_load_with(unsigned long long policy, unsigned to, const TensorMap &map,
                                                     unsigned barrier, TmaCoordinates at) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::
            "r"(to),
        "l"((unsigned long long)&map), "r"(barrier), "r"(at.dim), "r"(at.head), "r"(at.token), "r"(at.batch),
        "l"(policy)
        : "memory");
}

// TMA multicast: loads the box to the same shared address in every CTA of the cluster whose bit is set in `ctas`; each
// CTA's own mbarrier counts the bytes.
static __device__ __forceinline__ void tma_load_multicast(unsigned short ctas, unsigned to, const TensorMap &map,
                                                          unsigned barrier, TmaCoordinates at) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::
            "r"(to),
        "l"((unsigned long long)&map), "r"(barrier), "r"(at.dim), "r"(at.head), "r"(at.token), "r"(at.batch), "h"(ctas)
        : "memory");
}

// The same with a policy for L2.
static __device__ __forceinline__ void tma_load_multicast_with(unsigned long long policy, unsigned short ctas,
                                                               unsigned to, const TensorMap &map, unsigned barrier,
                                                               TmaCoordinates at) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::
            "r"(to),
        "l"((unsigned long long)&map), "r"(barrier), "r"(at.dim), "r"(at.head), "r"(at.token), "r"(at.batch), "h"(ctas),
        "l"(policy)
        : "memory");
}

static __device__ __forceinline__ void tma_store(const TensorMap &map, unsigned from, TmaCoordinates at) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     (unsigned long long)&map),
                 "r"(from), "r"(at.dim), "r"(at.head), "r"(at.token), "r"(at.batch)
                 : "memory");
}

static __device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's TMA stores have read their shared memory.
static __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

static __device__ __forceinline__ void prefetch_tensor_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((unsigned long long)&map) : "memory");
}

// Makes this thread's shared-memory writes visible to TMA and wgmma (the async proxy).
static __device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes initialized mbarriers visible to TMA and to the cluster.
static __device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Register reallocation between producer and consumer warpgroups: registers per thread from here on.
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> static __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> static __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Named barriers of `threads` threads.
static __device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same; returns whether `x` holds for any of them.
static __device__ __forceinline__ bool named_barrier_or(int barrier, int threads, bool x) {
    int any;
    asm volatile("{\n"
                 ".reg .pred x, any;\n"
                 "setp.ne.b32 x, %3, 0;\n"
                 "barrier.cta.red.or.pred any, %1, %2, x;\n"
                 "selp.b32 %0, 1, 0, any;\n"
                 "}"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((int)x)
                 : "memory");
    return any;
}
static __device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The shared-memory descriptor of a 16-bit matrix in rows of 128 bytes with the 128-byte swizzle. `apart`: the stride
// between 64-element columns, for an operand that is not contiguous in the summed dimension.
static __device__ __forceinline__ unsigned long long make_descriptor(unsigned from, unsigned apart) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (unsigned long long)(1024 >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | (unsigned long long)(apart >> 4) << 16 | ((from & 0x3ffff) >> 4);
}

// Advances a descriptor by `bytes`.
static __device__ __forceinline__ unsigned long long advance_descriptor(unsigned long long descriptor, unsigned bytes) {
    return (descriptor & 0xffffffff00000000ull) | ((unsigned)descriptor + (bytes >> 4));
}

static __device__ __forceinline__ void stmatrix_x4(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// The same with every matrix transposed.
static __device__ __forceinline__ void stmatrix_x4_transposed(unsigned to, unsigned a, unsigned b, unsigned c,
                                                              unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

} // namespace hopper
