// CUDA for one thread of the host: a fiber for each thread of a block, which runs until it waits for others.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <vector>
#include <algorithm>
#include <random>
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__
using std::max;
using std::min;
static inline unsigned min(unsigned a, int b) { return a < (unsigned)b ? a : b; }
static inline unsigned min(int a, unsigned b) { return (unsigned)a < b ? a : b; }
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint2 {
    unsigned x, y;
};
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }
static inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
struct Dim {
    unsigned x, y, z;
};
struct Copy {
    unsigned to;
    const void *from;
    int bytes, size; // read, the others become zero
};
struct Block;
struct Fiber {
    void *sp;
    int tid;
    Block *block;
    bool done;
    volatile int *cond;
    int val;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
extern Fiber *cur;
extern Dim blockIdx, gridDim, blockDim;
struct Tid {
    operator unsigned() const { return cur->tid; }
};
static struct {
    Tid x;
} threadIdx;
extern unsigned char *emu_shared;
extern unsigned emu_shared_size;
extern int emu_late;
#define dynamic_shared emu_shared
void emu_wait(volatile int *cond, int val);
struct Slot {
    uint64_t w[8];
};
struct WarpState {
    volatile int phase;
    int arrived;
    Slot in[2][32], out[2][32];
};
extern WarpState *warps;
struct BarState {
    volatile int phase;
    int arrived;
    bool any, found; // of a barrier that asks whether something holds for any thread
};
extern BarState *bars;
// A barrier that counts bytes: hopper.h.
struct MB {
    int count, pending;
    long tx;
    volatile int phase;
};
// State that the threads of a block share, and the threads of its cluster see.
struct Block {
    Dim index;
    unsigned char *shared;
    WarpState warps[32];
    BarState bars[16];
    MB mbs[128];
};
// Blocks of a cluster.
#ifdef DECODE_LATENT
#define CLUSTER_SIZE CTAS_PER_TILE
#endif
#ifndef CLUSTER_SIZE
#define CLUSTER_SIZE 1
#endif
extern Block blocks[CLUSTER_SIZE];
extern BarState cluster_bar;
template <class F> static inline Slot emu_collective(const Slot &mine, F f) {
    WarpState &w = warps[cur->tid / 32];
    int lane = cur->tid % 32, ph = w.phase;
    w.in[ph][lane] = mine;
    if (++w.arrived == 32) {
        f(w.in[ph], w.out[ph]);
        w.arrived = 0;
        w.phase = ph ^ 1;
    } else emu_wait(&w.phase, ph);
    return w.out[ph][lane];
}
static inline void emu_bar(BarState &b, int count) {
    int ph = b.phase;
    if (++b.arrived == count) {
        b.arrived = 0;
        b.phase = ph ^ 1;
    } else emu_wait(&b.phase, ph);
}
static inline void emu_bar(int id, int count) { emu_bar(bars[id], count); }
static inline void __syncthreads() { emu_bar(0, blockDim.x); }
static inline void __syncwarp() {
    emu_collective(Slot{}, [](Slot *, Slot *) {});
}
template <class T> static inline T emu_shfl(T x, int src) {
    Slot s{};
    memcpy(s.w, &x, sizeof x);
    s.w[7] = src;
    s = emu_collective(s, [](Slot *in, Slot *out) {
        for (int i = 0; i < 32; i++) {
            out[i] = in[in[i].w[7] & 31];
        }
    });
    memcpy(&x, s.w, sizeof x);
    return x;
}
#define LANE (cur->tid & 31)
template <class T> static inline T __shfl_sync(unsigned, T x, int src) { return emu_shfl(x, src); }
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int m) { return emu_shfl(x, LANE ^ m); }
template <class T> static inline T __shfl_down_sync(unsigned, T x, int d) { return emu_shfl(x, LANE + d < 32 ? LANE + d : LANE); }
template <class T> static inline T __shfl_up_sync(unsigned, T x, int d) { return emu_shfl(x, LANE >= d ? LANE - d : LANE); }
static inline unsigned __ballot_sync(unsigned, bool p) {
    Slot s{};
    s.w[0] = p;
    s = emu_collective(s, [](Slot *in, Slot *out) {
        unsigned b = 0;
        for (int i = 0; i < 32; i++) b |= (unsigned)(in[i].w[0] & 1) << i;
        for (int i = 0; i < 32; i++) out[i].w[0] = b;
    });
    return (unsigned)s.w[0];
}
template <class T, class F> static inline T emu_reduce(T x, F f) {
    for (int step = 16; step; step /= 2) x = f(x, emu_shfl(x, LANE ^ step));
    return x;
}
static inline int __reduce_add_sync(unsigned, int x) {
    return emu_reduce(x, [](int a, int b) { return a + b; });
}
static inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    return emu_reduce(x, [](unsigned a, unsigned b) { return max(a, b); });
}
static inline bool __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
static inline bool __all_sync(unsigned m, bool p) { return __ballot_sync(m, p) == ~0u; }
static inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = a | (unsigned long long)b << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned nibble = selector >> (4 * i), byte = (unsigned)(both >> (8 * (nibble & 7))) & 255;
        out |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return out;
}
static inline unsigned __funnelshift_r(unsigned lower, unsigned upper, unsigned shift) {
    return (unsigned)((lower | (unsigned long long)upper << 32) >> (shift & 31));
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline unsigned __float_as_uint(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
static inline float __uint_as_float(unsigned u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static inline float __int_as_float(int u) { return __uint_as_float(u); }
static inline float __fdividef(float a, float b) { return a / b * 1.0000001f; }
// Neither is fused with an operation before or after it.
static inline float emu_rounded(float x) {
    asm("" : "+x"(x));
    return x;
}
static inline float __fmul_rn(float a, float b) { return emu_rounded(a * b); }
static inline float __fadd_rn(float a, float b) { return emu_rounded(emu_rounded(a) + b); }
static inline float __fsub_rn(float a, float b) { return emu_rounded(emu_rounded(a) - b); }
static inline float __fdiv_rn(float a, float b) { return emu_rounded(a / b); }
static inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline int atomicAdd(int *p, int x) {
    int before = *p;
    *p += x;
    return before;
}
static inline int atomicMin(int *p, int x) {
    int before = *p;
    *p = min(before, x);
    return before;
}
static inline unsigned __match_any_sync(unsigned, int x) {
    unsigned peers = 0;
    for (int lane = 0; lane < 32; lane++) peers |= (unsigned)(emu_shfl(x, lane) == x) << lane;
    return peers;
}
static inline unsigned atomicAdd(unsigned *p, unsigned x) {
    unsigned o = *p;
    *p += x;
    return o;
}
template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
static inline void *emu_at(unsigned a, unsigned bytes) {
    if (a + bytes > emu_shared_size || a % std::min(bytes, 16u)) {
        fprintf(stderr, "shared address %u + %u of %u\n", a, bytes, emu_shared_size);
        abort();
    }
    return emu_shared + a;
}
// Checked as an address of the type that it is cast to.
struct EmuSharedAddress {
    unsigned at;
    template <class T> explicit operator T *() const { return (T *)emu_at(at, sizeof(T)); }
};
static inline EmuSharedAddress __cvta_shared_to_generic(unsigned a) { return {a}; }
