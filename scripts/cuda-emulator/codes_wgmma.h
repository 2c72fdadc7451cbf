// codes_wgmma.cuh, emulated.
#pragma once
template <int N> struct CodeWgmma {
    static inline void mma_f16(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, int keep) {
        emu_mma_rs<N, Element<ElementType::F16>>(sum, a, b, keep);
    }
    static inline void mma_bf16(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b, int keep) {
        emu_mma_rs<N, Element<ElementType::BF16>>(sum, a, b, keep);
    }
};
