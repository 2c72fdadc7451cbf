// records_instructions.cuh, emulated: copies at once, wgmma by every thread for its own elements.
#pragma once
namespace records {
static inline void bulk_load(unsigned long long, unsigned to, unsigned long long from, int bytes, unsigned barrier) {
    if (from % 16 || bytes % 16) abort();
    memcpy(emu_at(to, bytes), (const void *)from, bytes);
    MB &there = hopper::mb(barrier);
    there.tx -= bytes;
    hopper::settle(there);
}
// B is read as CodeWgmma reads it.
template <ElementType TYPE> static inline void mma(float (&sum)[32], const unsigned (&a)[4], unsigned long long b, int keep) {
    typedef Element<TYPE> E;
    Slot s{};
    memcpy(s.w, a, 16);
    s = emu_collective(s, [](Slot *in, Slot *out) {
        for (int i = 0; i < 32; i++)
            for (int l = 0; l < 4; l++) memcpy((char *)out[i].w + 16 * l, in[i / 4 * 4 + l].w, 16);
    });
    float A[2][16];
    const unsigned *w = (const unsigned *)s.w;
    for (int l = 0; l < 4; l++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) A[i % 2][2 * l + e + 8 * (i / 2)] = E::to_float((unsigned short)(w[4 * l + i] >> (16 * e)));
    int lane = cur->tid % 32;
    for (int j = 0; j < 8; j++)
        for (int e = 0; e < 2; e++) {
            float B[16];
            for (int k = 0; k < 16; k++)
                B[k] = E::to_float(*(unsigned short *)emu_at(hopper::swz((unsigned)b + (8 * j + 2 * (lane % 4) + e) * 128 + 2 * k), 2));
            for (int h = 0; h < 2; h++) {
                float t = keep ? sum[4 * j + 2 * h + e] : 0;
                for (int k = 0; k < 16; k++) t += A[h][k] * B[k];
                sum[4 * j + 2 * h + e] = t;
            }
        }
}
static inline void mma_f16(float (&sum)[32], const unsigned (&a)[4], unsigned long long b, int keep) { mma<ElementType::F16>(sum, a, b, keep); }
static inline void mma_bf16(float (&sum)[32], const unsigned (&a)[4], unsigned long long b, int keep) { mma<ElementType::BF16>(sum, a, b, keep); }
} // namespace records
