// copy.cuh, emulated: asynchronous copies arrive when they are waited for, or at once (`emu_late`).
#pragma once
static inline unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - emu_shared); }
static inline void emu_copy(const Copy &c) {
    unsigned char *d = (unsigned char *)emu_at(c.to, c.size);
    memset(d, 0, c.size);
    if (c.bytes) memcpy(d, c.from, c.bytes);
}
static inline void emu_copy_later(const Copy &c) {
    if (c.bytes < 0 || c.bytes > c.size || (uintptr_t)c.from % c.size) {
        fprintf(stderr, "copy of %d of %d bytes from %p\n", c.bytes, c.size, c.from);
        abort();
    }
    if (emu_late) cur->open.push_back(c);
    else emu_copy(c);
}
static inline void cp_async(unsigned to, const void *from, int bytes) { emu_copy_later({to, from, bytes, 16}); }
static inline void cp_async_alone(unsigned to, const void *from, int bytes) { cp_async(to, from, bytes); }
static inline void cp_async_sectors(unsigned to, const void *from, int bytes) { cp_async(to, from, bytes); }
static inline void cp_async_eight(unsigned to, const void *from, bool present) { emu_copy_later({to, from, present ? 8 : 0, 8}); }
static inline void cp_async_word(unsigned to, const void *from, bool present) { emu_copy_later({to, from, present ? 4 : 0, 4}); }
template <class T> static inline T emu_load(unsigned from) {
    T x;
    memcpy(&x, emu_at(from, sizeof x), sizeof x);
    return x;
}
template <class T> static inline void emu_store(unsigned to, T x) { memcpy(emu_at(to, sizeof x), &x, sizeof x); }
static inline unsigned ld_shared_word(unsigned from) { return emu_load<unsigned>(from); }
static inline unsigned short ld_shared_half(unsigned from) { return emu_load<unsigned short>(from); }
static inline uint2 ld_shared_v2(unsigned from) { return emu_load<uint2>(from); }
static inline uint4 ld_shared_v4(unsigned from) { return emu_load<uint4>(from); }
static inline void st_shared_word(unsigned to, unsigned word) { emu_store(to, word); }
static inline void st_shared_v4(unsigned to, uint4 x) { emu_store(to, x); }
static inline void cp_async_commit() {
    cur->groups.push_back(std::move(cur->open));
    cur->open.clear();
}
template <int PENDING> static inline void cp_async_wait() {
    while ((int)cur->groups.size() > PENDING) {
        for (auto &c : cur->groups.front()) emu_copy(c);
        cur->groups.erase(cur->groups.begin());
    }
}
static inline void emu_ldm(unsigned (&a)[4], unsigned from, bool trans) {
    Slot s{};
    s.w[0] = from;
    s = emu_collective(s, [trans](Slot *in, Slot *out) {
        for (int m = 0; m < 4; m++) {
            unsigned short M[8][8];
            for (int r = 0; r < 8; r++) memcpy(M[r], emu_at((unsigned)in[8 * m + r].w[0], 16), 16);
            for (int l = 0; l < 32; l++) {
                int g = l / 4, t = l % 4;
                unsigned lo = trans ? M[2 * t][g] : M[g][2 * t], hi = trans ? M[2 * t + 1][g] : M[g][2 * t + 1];
                unsigned v = lo | hi << 16;
                memcpy((char *)out[l].w + 4 * m, &v, 4);
            }
        }
    });
    memcpy(a, s.w, 16);
}
// Any length, for branches that are not taken.
template <int LENGTH> static inline void ldmatrix_x2_transposed(unsigned (&a)[LENGTH], unsigned from) {
    // The addresses of the first 16 lanes count.
    unsigned four[4];
    emu_ldm(four, emu_shfl(from, LANE & 15), true);
    a[0] = four[0], a[1] = four[1];
}
// Row r of the matrix: lanes 4r to 4r + 3.
static inline unsigned movmatrix_transposed(unsigned a) {
    Slot s{};
    s.w[0] = a;
    s = emu_collective(s, [](Slot *in, Slot *out) {
        auto at = [&](int row, int column) { return (unsigned)in[4 * row + column / 2].w[0] >> (16 * (column & 1)) & 0xffff; };
        for (int l = 0; l < 32; l++) out[l].w[0] = at(2 * (l % 4), l / 4) | at(2 * (l % 4) + 1, l / 4) << 16;
    });
    return (unsigned)s.w[0];
}
static inline void ldmatrix_x4(unsigned (&a)[4], unsigned from) { emu_ldm(a, from, false); }
static inline void ldmatrix_x4_transposed(unsigned (&a)[4], unsigned from) { emu_ldm(a, from, true); }
