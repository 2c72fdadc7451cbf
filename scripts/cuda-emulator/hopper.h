// hopper.cuh, emulated: barriers that count bytes, the copy engine (at once), waits of a warpgroup (none).
#pragma once
#include "common/copy.cuh"
#include "common/parameters.cuh"
namespace hopper {
constexpr int MAX_SHARED_BYTES = 232448;
struct TmaCoordinates {
    int dim, head, token, batch;
};
static inline MB &mb(unsigned a, Block &block) {
    if (a % 8 || a >= 1024) abort();
    return block.mbs[a / 8];
}
static inline MB &mb(unsigned a) { return mb(a, *cur->block); }
static inline void settle(MB &m) {
    if (m.pending == 0 && m.tx == 0) {
        m.phase ^= 1;
        m.pending = m.count;
    }
    if (m.pending < 0) {
        fprintf(stderr, "too many arrivals\n");
        abort();
    }
}
static inline void mbarrier_init(unsigned a, int n) { mb(a) = {n, n, 0, 0}; }
static inline void arrive(MB &m) {
    m.pending--;
    settle(m);
}
static inline void mbarrier_arrive(unsigned a) { arrive(mb(a)); }
static inline void mbarrier_arrive_copies(unsigned a) {
    cp_async_commit();
    cp_async_wait<0>();
    arrive(mb(a));
}
static inline void mbarrier_arrive_remote(unsigned a, unsigned block) { arrive(mb(a, blocks[block])); }
static inline void st_async_remote(unsigned to, unsigned number, unsigned barrier, unsigned block) {
    emu_at(to, 4);
    memcpy(blocks[block].shared + to, &number, 4);
    arrive(mb(barrier, blocks[block]));
}
static inline unsigned cluster_rank() { return blockIdx.x % CLUSTER_SIZE; }
static inline void cluster_sync() { emu_bar(cluster_bar, blockDim.x * CLUSTER_SIZE); }
static inline void mbarrier_arrive_expect_tx(unsigned a, unsigned bytes) {
    MB &m = mb(a);
    m.tx += bytes;
    m.pending--;
    settle(m);
}
static inline void mbarrier_wait(unsigned a, unsigned phase) {
    MB &m = mb(a);
    while (m.phase == (int)phase) emu_wait(&m.phase, phase);
}
static inline void mbarrier_wait_cluster(unsigned a, unsigned phase) { mbarrier_wait(a, phase); }
// The contents that the stand-in driver writes into a tensor map.
struct Map {
    char name[8];
    uint64_t address;
    uint64_t dims[4], strides[3];
    unsigned box[4];
    int type;
};
static inline unsigned swz(unsigned a) { return a ^ (a >> 3 & 0x70); }
// Rows of bytes, as they are; else of 16-bit elements, swizzled.
static inline bool has_bytes(const Map &m) { return m.type == 0; }
static inline unsigned char *place(const Map &m, int x, int y, int z, int w) {
    if (x < 0 || y < 0 || z < 0 || w < 0 || (uint64_t)x >= m.dims[0] || (uint64_t)y >= m.dims[1] || (uint64_t)z >= m.dims[2] ||
        (uint64_t)w >= m.dims[3])
        return nullptr;
    return (unsigned char *)m.address + (has_bytes(m) ? 1 : 2) * (uint64_t)x + y * m.strides[0] + z * m.strides[1] + w * m.strides[2];
}
// To the same place of all blocks of the cluster that have a bit in `to_blocks`.
static inline void tma_load_multicast(unsigned short to_blocks, unsigned to, const TensorMap &map, unsigned barrier, const TmaCoordinates &at) {
    const Map &m = *(const Map *)&map;
    const bool bytes = has_bytes(m);
    const unsigned columns = bytes ? m.box[0] : 64, size = bytes ? 1 : 2, row = columns * size;
    if (to % 1024)
        if ((to % 128) || m.box[2] % 8) abort();
    if (at.dim * size % 16) abort();
    for (unsigned r = 0; r < m.box[2]; r++)
        for (unsigned i = 0; i < columns; i++) {
            unsigned short v = 0;
            unsigned char *from = place(m, at.dim + i, at.head, at.token + r, at.batch);
            if (from) memcpy(&v, from, size);
            unsigned there = to + r * row + size * i;
            unsigned offset = (unsigned char *)emu_at(bytes ? there : swz(there), size) - emu_shared;
            for (int b = 0; b < CLUSTER_SIZE; b++)
                if (to_blocks >> b & 1) memcpy(blocks[b].shared + offset, &v, size);
        }
    for (int b = 0; b < CLUSTER_SIZE; b++) {
        if (!(to_blocks >> b & 1)) continue;
        MB &there = mb(barrier, blocks[b]);
        there.tx -= row * m.box[2];
        settle(there);
    }
}
static inline void tma_load(unsigned to, const TensorMap &map, unsigned barrier, const TmaCoordinates &at) {
    tma_load_multicast(1 << cluster_rank(), to, map, barrier, at);
}
static inline unsigned long long evict_first_policy() { return 1; }
static inline void tma_load_with(unsigned long long, unsigned to, const TensorMap &map, unsigned barrier, const TmaCoordinates &at) {
    tma_load(to, map, barrier, at);
}
static inline void tma_load_multicast_with(unsigned long long, unsigned short to_blocks, unsigned to, const TensorMap &map, unsigned barrier,
                                           const TmaCoordinates &at) {
    tma_load_multicast(to_blocks, to, map, barrier, at);
}
static inline void tma_store(const TensorMap &map, unsigned from, const TmaCoordinates &at) {
    const Map &m = *(const Map *)&map;
    for (unsigned r = 0; r < m.box[2]; r++)
        for (int i = 0; i < 64; i++) {
            unsigned char *to = place(m, at.dim + i, at.head, at.token + r, at.batch);
            if (to) memcpy(to, emu_at(swz(from + r * 128 + 2 * i), 2), 2);
        }
}
// Contiguous bytes, at once.
static inline void bulk_load(unsigned to, const void *from, int bytes, unsigned barrier) {
    if ((uintptr_t)from % 16 || bytes % 16 || to % 16) abort();
    memcpy(emu_at(to, bytes), from, bytes);
    MB &there = mb(barrier);
    there.tx -= bytes;
    settle(there);
}
static inline void tma_store_commit() {}
static inline void tma_store_wait() {}
static inline void prefetch_tensor_map(const TensorMap &) {}
static inline void fence_proxy_async() {}
static inline void fence_mbarrier_init() {}
template <int N> static inline void setmaxnreg_dec() {}
template <int N> static inline void setmaxnreg_inc() {}
static inline void wgmma_fence() {}
static inline void wgmma_commit() {}
template <int N> static inline void wgmma_wait() {}
static inline void named_barrier_sync(int id, int n) { emu_bar(id, n); }
static inline bool named_barrier_or(int id, int n, bool x) {
    BarState &b = bars[id];
    b.any |= x;
    if (b.arrived + 1 == n) {
        b.found = b.any;
        b.any = false;
    }
    emu_bar(b, n);
    return b.found;
}
static inline void named_barrier_arrive(int id, int n) {
    BarState &b = bars[id];
    if (++b.arrived == n) {
        b.arrived = 0;
        b.phase = b.phase ^ 1;
    }
}
static inline unsigned long long make_descriptor(unsigned from, unsigned apart) { return from | (unsigned long long)apart << 32; }
static inline unsigned long long advance_descriptor(unsigned long long descriptor, unsigned bytes) { return descriptor + bytes; }
// `place(rows, lane, e)`: where a lane's element e of a matrix goes, whose rows have these slots.
template <class Place> static inline void emu_stmatrix(unsigned to, const unsigned (&values)[4], Place place) {
    Slot s{};
    s.w[0] = to;
    for (int m = 0; m < 4; m++) s.w[1 + m] = values[m];
    emu_collective(s, [place](Slot *in, Slot *) {
        for (int m = 0; m < 4; m++)
            for (int l = 0; l < 32; l++)
                for (int e = 0; e < 2; e++) {
                    unsigned short half = in[l].w[1 + m] >> (16 * e);
                    memcpy(place(in + 8 * m, l, e), &half, 2);
                }
    });
}
// Element `column` of a row, whose address a lane gave.
static inline char *emu_element(const Slot &row, int column) { return (char *)emu_at((unsigned)row.w[0], 16) + 2 * column; }
static inline void stmatrix_x4(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    emu_stmatrix(to, {a, b, c, d}, [](Slot *rows, int l, int e) { return emu_element(rows[l / 4], 2 * (l % 4) + e); });
}
static inline void stmatrix_x4_transposed(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    emu_stmatrix(to, {a, b, c, d}, [](Slot *rows, int l, int e) { return emu_element(rows[2 * (l % 4) + e], l / 4); });
}
} // namespace hopper

// Operand A of wgmma from registers: the thread's two rows of 16 numbers, of which each thread of a quad has some.
template <class E> static inline void emu_a_rows(float (&A)[2][16], const unsigned (&a)[4]) {
    Slot s{};
    memcpy(s.w, a, 16);
    s = emu_collective(s, [](Slot *in, Slot *out) {
        for (int i = 0; i < 32; i++)
            for (int l = 0; l < 4; l++) memcpy((char *)out[i].w + 16 * l, in[i / 4 * 4 + l].w, 16);
    });
    const unsigned *w = (const unsigned *)s.w;
    for (int l = 0; l < 4; l++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) A[i % 2][2 * l + e + 8 * (i / 2)] = E::to_float((unsigned short)(w[4 * l + i] >> (16 * e)));
}
// wgmma with operand A from registers, and B contiguous in the summed dimension: every thread computes its own elements.
template <int N, class E> static inline void emu_mma_rs(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, int keep) {
    float A[2][16];
    emu_a_rows<E>(A, a);
    int lane = cur->tid % 32;
    for (int j = 0; j < N / 8; j++)
        for (int e = 0; e < 2; e++) {
            float B[16];
            for (int k = 0; k < 16; k++)
                B[k] = E::to_float(*(unsigned short *)emu_at(hopper::swz((unsigned)b + (8 * j + 2 * (lane % 4) + e) * 128 + 2 * k), 2));
            for (int h = 0; h < 2; h++) {
                float &s = sum[4 * j + 2 * h + e];
                s = emu_dot<16>(keep ? s : 0, A[h], B, E::SMALLEST_EXPONENT);
            }
        }
}
