// wgmma.cuh, emulated: every thread computes its own elements.
#pragma once
#include "hopper/hopper.cuh"
static constexpr int ELEMENT_SMALLEST = Element<ElementType(ELEMENT_TYPE)>::SMALLEST_EXPONENT;
static inline float elem(unsigned a) { return Element<ElementType(ELEMENT_TYPE)>::to_float(*(unsigned short *)emu_at(hopper::swz(a), 2)); }
template <int N> struct Wgmma {
    // The rows of a that this thread has elements of the sum in.
    static inline void load_rows(float (&A)[2][16], unsigned long long a) {
        int warp = cur->tid / 32 % 4, lane = cur->tid % 32;
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) A[h][k] = elem((unsigned)a + (16 * warp + lane / 4 + 8 * h) * 128 + 2 * k);
    }
    static inline void mma_ss(float (&sum)[N / 2], unsigned long long a, unsigned long long b, int keep) {
        int lane = cur->tid % 32;
        float A[2][16], B[16];
        load_rows(A, a);
        for (int j = 0; j < N / 8; j++)
            for (int e = 0; e < 2; e++) {
                for (int k = 0; k < 16; k++) B[k] = elem((unsigned)b + (8 * j + 2 * (lane % 4) + e) * 128 + 2 * k);
                for (int h = 0; h < 2; h++) {
                    float &s = sum[4 * j + 2 * h + e];
                    s = emu_dot<16>(keep ? s : 0, A[h], B, ELEMENT_SMALLEST);
                }
            }
    }
    static inline void mma_ss_rows_transposed(float (&sum)[N / 2], unsigned long long a, unsigned long long b) {
        int warp = cur->tid / 32 % 4, lane = cur->tid % 32;
        float A[2][16], B[16];
        for (int h = 0; h < 2; h++)
            for (int k = 0; k < 16; k++) A[h][k] = elem((unsigned)a + k / 8 * 1024 + k % 8 * 128 + (16 * warp + lane / 4 + 8 * h) * 2);
        for (int j = 0; j < N / 8; j++)
            for (int e = 0; e < 2; e++) {
                for (int k = 0; k < 16; k++) B[k] = elem((unsigned)b + (8 * j + 2 * (lane % 4) + e) * 128 + 2 * k);
                for (int h = 0; h < 2; h++) {
                    float &s = sum[4 * j + 2 * h + e];
                    s = emu_dot<16>(s, A[h], B, ELEMENT_SMALLEST);
                }
            }
    }
    // Adds the products of 16 rows of the sum with the columns of this thread.
    static inline void add_columns(float (&sum)[N / 2], const float (&A)[2][16], unsigned long long b) {
        int lane = cur->tid % 32;
        unsigned from = (unsigned)b, apart = b >> 32;
        for (int j = 0; j < N / 8; j++)
            for (int e = 0; e < 2; e++) {
                int n = 8 * j + 2 * (lane % 4) + e;
                float B[16];
                for (int k = 0; k < 16; k++) B[k] = elem(from + n / 64 * apart + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2);
                for (int h = 0; h < 2; h++) {
                    float &s = sum[4 * j + 2 * h + e];
                    s = emu_dot<16>(s, A[h], B, ELEMENT_SMALLEST);
                }
            }
    }
    static inline void mma_ss_transposed(float (&sum)[N / 2], unsigned long long a, unsigned long long b) {
        float A[2][16];
        load_rows(A, a);
        add_columns(sum, A, b);
    }
    static inline void mma_rs(float (&sum)[N / 2], const unsigned (&a)[4], unsigned long long b) {
        float A[2][16];
        emu_a_rows<Element<ElementType(ELEMENT_TYPE)>>(A, a);
        add_columns(sum, A, b);
    }
};
