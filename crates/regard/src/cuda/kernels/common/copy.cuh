// Shared memory: its loads and stores, cp.async copies to it from global memory, and ldmatrix loads of MMA fragments.
#pragma once

static __device__ __forceinline__ unsigned shared_address(const void *pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}

// Copies 16 bytes: `bytes` of them are read, the others become zero.
static __device__ __forceinline__ void cp_async(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same for rows that do not fill lines of 128 bytes: the rest of a line is not fetched into L2.
static __device__ __forceinline__ void cp_async_alone(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same through L1, so that sectors that two copies share are fetched once.
static __device__ __forceinline__ void cp_async_sectors(unsigned to, const void *from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Copies 8 bytes through L1, or writes zeros.
static __device__ __forceinline__ void cp_async_eight(unsigned to, const void *from, bool present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(present ? 8 : 0) : "memory");
}

// Copies 4 bytes, or writes zeros.
static __device__ __forceinline__ void cp_async_word(unsigned to, const void *from, bool present) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0) : "memory");
}

static __device__ __forceinline__ unsigned ld_shared_word(unsigned from) {
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

static __device__ __forceinline__ unsigned short ld_shared_half(unsigned from) {
    unsigned short half;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
    return half;
}

static __device__ __forceinline__ uint2 ld_shared_v2(unsigned from) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

static __device__ __forceinline__ uint4 ld_shared_v4(unsigned from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

static __device__ __forceinline__ void st_shared_word(unsigned to, unsigned word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

static __device__ __forceinline__ void st_shared_v4(unsigned to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

static __device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` cp.async groups of this thread are still in flight.
template <int PENDING> static __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
static __device__ __forceinline__ void ldmatrix_x4(unsigned (&a)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&a)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x2_transposed(unsigned (&a)[2], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(a[0]), "=r"(a[1])
                 : "r"(from)
                 : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements that is spread over a warp.
static __device__ __forceinline__ unsigned movmatrix_transposed(unsigned a) {
    unsigned b;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    return b;
}
