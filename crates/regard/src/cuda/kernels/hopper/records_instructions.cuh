// Instructions of decode over records of mla656 whose codes stay in shared memory: copies of records, and wgmma whose
// first operand is in registers.
#pragma once
#include "common/element.cuh"
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

#define RECORD_SUM(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])

// sum[64 x 64] += a[64 x 16] * b[16 x 64] with f32 sums. a is from registers, in the fragment layout of mma.m16n8k16; b
// is from shared memory, contiguous in the summed dimension. Element [4 j + e] of a thread's sum is as in wgmma.cuh.
// Overwrites the sum if `keep` is 0.
#define RECORD_WGMMA(NAME, TYPES)                                                                                      \
    static __device__ __forceinline__ void NAME(float (&sum)[32], const unsigned (&a)[4], unsigned long long b,        \
                                                int keep) {                                                            \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"                                                \
                     "wgmma.mma_async.sync.aligned.m64n64k16" TYPES                                                    \
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
                     "%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, keep, 1, 1, 0;\n}"                             \
                     : RECORD_SUM(0), RECORD_SUM(4), RECORD_SUM(8), RECORD_SUM(12), RECORD_SUM(16), RECORD_SUM(20),    \
                       RECORD_SUM(24), RECORD_SUM(28)                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                 \
    }
RECORD_WGMMA(mma_f16, ".f32.f16.f16 ")
RECORD_WGMMA(mma_bf16, ".f32.bf16.bf16 ")

} // namespace records
