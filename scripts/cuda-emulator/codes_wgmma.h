// codes_wgmma.cuh, emulated: every thread computes its own elements.
#pragma once
template <int N> struct CodeWgmma {
    static inline void mma(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, int keep) {
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
                for (int e = 0; e < 2; e++)
                    A[i % 2][2 * l + e + 8 * (i / 2)] = Element<ElementType::F16>::to_float((unsigned short)(w[4 * l + i] >> (16 * e)));
        int lane = cur->tid % 32;
        for (int j = 0; j < N / 8; j++)
            for (int e = 0; e < 2; e++) {
                float B[16];
                for (int k = 0; k < 16; k++)
                    B[k] = Element<ElementType::F16>::to_float(*(unsigned short *)emu_at(hopper::swz((unsigned)b + (8 * j + 2 * (lane % 4) + e) * 128 + 2 * k), 2));
                for (int h = 0; h < 2; h++) {
                    float t = keep ? sum[4 * j + 2 * h + e] : 0;
                    for (int k = 0; k < 16; k++) t += A[h][k] * B[k];
                    sum[4 * j + 2 * h + e] = t;
                }
            }
    }
};
