// wgmma over codes that become 16-bit operands in registers: sum[64 x N] += a[64 x 16] * b[16 x N] with f32 sums. a is
// from registers, in the fragment layout of mma.m16n8k16; b is from shared memory, contiguous in the summed dimension.
// Element [4 j + e] of a thread's sum is as in wgmma.cuh.
#pragma once
#include "common/element.cuh"

template <int N> struct CodeWgmma;

// Overwrites the sum if `keep` is 0.
#define CODE_WGMMA_OF(NAME, TYPES, N, NUMBERS, A0, A1, A2, A3, B, KEEP, ...)                                       \
    static __device__ __forceinline__ void NAME(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, \
                                                int keep) {                                                        \
        asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" TYPES "{" NUMBERS "}, {" A0 "," A1 "," A2 "," A3 \
                     "}, " B ", keep, 1, 1, 0;\n}"                                                                 \
                     : __VA_ARGS__                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                             \
    }
#define CODE_WGMMA(N, ...)                                         \
    template <> struct CodeWgmma<N> {                              \
        CODE_WGMMA_OF(mma_f16, ".f32.f16.f16 ", N, __VA_ARGS__)    \
        CODE_WGMMA_OF(mma_bf16, ".f32.bf16.bf16 ", N, __VA_ARGS__) \
    };

#define CODE_SUM(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define CODE_NUMBERS "%0,%1,%2,%3,%4,%5,%6,%7"
CODE_WGMMA(16, CODE_NUMBERS, "%8", "%9", "%10", "%11", "%12", "%13", CODE_SUM(0), CODE_SUM(4))
CODE_WGMMA(32, CODE_NUMBERS ",%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", "%19", "%20", "%21", CODE_SUM(0),
           CODE_SUM(4), CODE_SUM(8), CODE_SUM(12))
CODE_WGMMA(64,
           CODE_NUMBERS
           ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",
           "%32", "%33", "%34", "%35", "%36", "%37", CODE_SUM(0), CODE_SUM(4), CODE_SUM(8), CODE_SUM(12), CODE_SUM(16),
           CODE_SUM(20), CODE_SUM(24), CODE_SUM(28))
