// wgmma: sum[64 x N] += a[64 x 16] * b[16 x N] by a warpgroup, asynchronous.
// Element [4 j + e] of a thread's sum is row `16 * warp + lane / 4 + 8 * (e / 2)` and column `8 j + 2 * (lane % 4) + e
// % 2`.
#pragma once
#include "common/element.cuh"

template <int N> struct Wgmma;

// Operand numbers 8 k to 8 k + 7, and the operands.
#define WGMMA_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_SUM(k)                                                                                          \
    "+f"(sum[8 * k]), "+f"(sum[8 * k + 1]), "+f"(sum[8 * k + 2]), "+f"(sum[8 * k + 3]), "+f"(sum[8 * k + 4]), \
        "+f"(sum[8 * k + 5]), "+f"(sum[8 * k + 6]), "+f"(sum[8 * k + 7])
#if ELEMENT_TYPE == 0
#define WGMMA_TYPES ".f32.f16.f16 "
#else
#define WGMMA_TYPES ".f32.bf16.bf16 "
#endif

// `mma_ss`: a and b from shared memory, both contiguous in the summed dimension; overwrites the sum if `keep` is 0.
// `mma_ss_transposed`: the same with b contiguous in its columns.
// `mma_ss_rows_transposed`: the same with a contiguous in its rows instead.
// `mma_rs`: a from registers, in the fragment layout of mma.m16n8k16; b from shared memory, contiguous in its columns.
#define WGMMA(N, NUMBERS, P0, P1, P2, P3, P4, ...)                                                                     \
    template <> struct Wgmma<N> {                                                                                      \
        static __device__ __forceinline__ void mma_ss(float (&sum)[N / 2], unsigned long long a, unsigned long long b, \
                                                      int keep) {                                                      \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " P2 ", 0;\n"                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" NUMBERS "}, " P0 ", " P1         \
                         ", keep, 1, 1, 0, 0;\n}"                                                                      \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b), "r"(keep));                                                                 \
        }                                                                                                              \
        static __device__ __forceinline__ void mma_ss_transposed(float (&sum)[N / 2], unsigned long long a,            \
                                                                 unsigned long long b) {                               \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" NUMBERS "}, " P0 ", " P1         \
                         ", 1, 1, 1, 0, 1;"                                                                            \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b));                                                                            \
        }                                                                                                              \
        static __device__ __forceinline__ void mma_ss_rows_transposed(float (&sum)[N / 2], unsigned long long a,       \
                                                                      unsigned long long b) {                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" NUMBERS "}, " P0 ", " P1         \
                         ", 1, 1, 1, 1, 0;"                                                                            \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b));                                                                            \
        }                                                                                                              \
        static __device__ __forceinline__ void mma_rs(float (&sum)[N / 2], const unsigned (&a)[4],                     \
                                                      unsigned long long b) {                                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" NUMBERS "}, {" P0 "," P1 "," P2  \
                         "," P3 "}, " P4 ", 1, 1, 1, 1;"                                                               \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                              \
    };

WGMMA(16, WGMMA_0, "%8", "%9", "%10", "%11", "%12", WGMMA_SUM(0))
WGMMA(32, WGMMA_0 "," WGMMA_1, "%16", "%17", "%18", "%19", "%20", WGMMA_SUM(0), WGMMA_SUM(1))
WGMMA(48, WGMMA_0 "," WGMMA_1 "," WGMMA_2, "%24", "%25", "%26", "%27", "%28", WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2))
WGMMA(64, WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3, "%32", "%33", "%34", "%35", "%36", WGMMA_SUM(0), WGMMA_SUM(1),
      WGMMA_SUM(2), WGMMA_SUM(3))
WGMMA(80, WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4, "%40", "%41", "%42", "%43", "%44", WGMMA_SUM(0),
      WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4))
WGMMA(96, WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4 "," WGMMA_5, "%48", "%49", "%50", "%51", "%52",
      WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4), WGMMA_SUM(5))
WGMMA(112, WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4 "," WGMMA_5 "," WGMMA_6, "%56", "%57", "%58", "%59",
      "%60", WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4), WGMMA_SUM(5), WGMMA_SUM(6))
WGMMA(128, WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4 "," WGMMA_5 "," WGMMA_6 "," WGMMA_7, "%64", "%65",
      "%66", "%67", "%68", WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4), WGMMA_SUM(5),
      WGMMA_SUM(6), WGMMA_SUM(7))
WGMMA(192,
      WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4 "," WGMMA_5 "," WGMMA_6 "," WGMMA_7 "," WGMMA_8
              "," WGMMA_9 "," WGMMA_10 "," WGMMA_11,
      "%96", "%97", "%98", "%99", "%100", WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4),
      WGMMA_SUM(5), WGMMA_SUM(6), WGMMA_SUM(7), WGMMA_SUM(8), WGMMA_SUM(9), WGMMA_SUM(10), WGMMA_SUM(11))
WGMMA(256,
      WGMMA_0 "," WGMMA_1 "," WGMMA_2 "," WGMMA_3 "," WGMMA_4 "," WGMMA_5 "," WGMMA_6 "," WGMMA_7 "," WGMMA_8
              "," WGMMA_9 "," WGMMA_10 "," WGMMA_11 "," WGMMA_12 "," WGMMA_13 "," WGMMA_14 "," WGMMA_15,
      "%128", "%129", "%130", "%131", "%132", WGMMA_SUM(0), WGMMA_SUM(1), WGMMA_SUM(2), WGMMA_SUM(3), WGMMA_SUM(4),
      WGMMA_SUM(5), WGMMA_SUM(6), WGMMA_SUM(7), WGMMA_SUM(8), WGMMA_SUM(9), WGMMA_SUM(10), WGMMA_SUM(11), WGMMA_SUM(12),
      WGMMA_SUM(13), WGMMA_SUM(14), WGMMA_SUM(15))
