// copy.cuh, emulated: asynchronous copies arrive when they are waited for, or at once (`emu_late`).
#pragma once
static inline unsigned shared_address(const void *p) { return (unsigned)((const unsigned char *)p - emu_shared); }
static inline void emu_copy(const Copy &c) {
    unsigned char *d = (unsigned char *)emu_at(c.to, 16);
    memset(d, 0, 16);
    if (c.bytes) memcpy(d, c.from, c.bytes);
}
static inline void cp_async(unsigned to, const void *from, int bytes) {
    if (bytes && (uintptr_t)from % 16) {
        fprintf(stderr, "unaligned copy\n");
        abort();
    }
    if (emu_late) cur->open.push_back({to, from, bytes});
    else emu_copy({to, from, bytes});
}
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
static inline void ldmatrix_x4(unsigned (&a)[4], unsigned from) { emu_ldm(a, from, false); }
static inline void ldmatrix_x4_transposed(unsigned (&a)[4], unsigned from) { emu_ldm(a, from, true); }
