// element.cuh, emulated: conversions, and mma.sync by the whole warp.
#pragma once
#include "common/parameters.cuh"
#include "tensor_core.h"
template <ElementType TYPE> struct Element;
static inline float emu_h2f(unsigned short h) {
    _Float16 x;
    memcpy(&x, &h, 2);
    return (float)x;
}
static inline unsigned short emu_f2h(float f) {
    _Float16 x = (_Float16)f;
    unsigned short h;
    memcpy(&h, &x, 2);
    return h;
}
static inline unsigned short emu_f2b(float f) {
    unsigned u = __float_as_uint(f);
    if (f != f) return 0x7fff;
    return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// mma.m16n8k16 of two numbers a register (PARTS 2) or m16n8k8 of one; `part(register, i)` is number i of it.
template <int PARTS, class Part> static inline void emu_mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int smallest, Part part) {
    Slot s{};
    memcpy(s.w, sum, 16);
    memcpy(s.w + 2, a, 16);
    memcpy(s.w + 4, &b0, 4);
    memcpy((char *)(s.w + 4) + 4, &b1, 4);
    s = emu_collective(s, [part, smallest](Slot *in, Slot *out) {
        constexpr int DEPTH = 8 * PARTS;
        float A[16][DEPTH], B[8][DEPTH], C_[16][8];
        for (int l = 0; l < 32; l++) {
            int g = l / 4, t = l % 4;
            unsigned a[4], b[2];
            float c[4];
            memcpy(c, in[l].w, 16);
            memcpy(a, in[l].w + 2, 16);
            memcpy(b, in[l].w + 4, 8);
            for (int h = 0; h < PARTS; h++) {
                for (int i = 0; i < 4; i++) A[g + 8 * (i & 1)][PARTS * (t + 4 * (i >> 1)) + h] = part(a[i], h);
                for (int i = 0; i < 2; i++) B[g][PARTS * (t + 4 * i) + h] = part(b[i], h);
            }
            for (int e = 0; e < 4; e++) C_[g + 8 * (e >> 1)][2 * t + (e & 1)] = c[e];
        }
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) C_[i][j] = emu_dot<DEPTH>(C_[i][j], A[i], B[j], smallest);
        for (int l = 0; l < 32; l++) {
            float c[4];
            for (int e = 0; e < 4; e++) c[e] = C_[l / 4 + 8 * (e >> 1)][2 * (l % 4) + (e & 1)];
            memcpy(out[l].w, c, 16);
        }
    });
    memcpy(sum, s.w, 16);
}
template <> struct Element<ElementType::F16> {
    typedef unsigned short Bits;
    static constexpr int SMALLEST_EXPONENT = -14; // of normal numbers
    static float to_float(Bits b) { return emu_h2f(b); }
    static Bits from_float(float v) { return emu_f2h(v); }
    static unsigned pack(float l, float h) { return emu_f2h(l) | (unsigned)emu_f2h(h) << 16; }
    static unsigned add_zero_times(unsigned sum, unsigned pair) {
        auto half = [&](int h) { return emu_h2f((unsigned short)(pair >> (16 * h))) * 0.0f + emu_h2f((unsigned short)(sum >> (16 * h))); };
        return pack(half(0), half(1));
    }
    static void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { emu_mma<2>(sum, a, b0, b1, SMALLEST_EXPONENT, [](unsigned x, int h) { return emu_h2f((unsigned short)(x >> (16 * h))); }); }
};
template <> struct Element<ElementType::BF16> {
    typedef unsigned short Bits;
    static constexpr int SMALLEST_EXPONENT = -126; // of normal numbers
    static float to_float(Bits b) { return __uint_as_float((unsigned)b << 16); }
    static Bits from_float(float v) { return emu_f2b(v); }
    static unsigned pack(float l, float h) { return emu_f2b(l) | (unsigned)emu_f2b(h) << 16; }
    static void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        emu_mma<2>(sum, a, b0, b1, SMALLEST_EXPONENT, [](unsigned x, int h) { return to_float((unsigned short)(x >> (16 * h))); });
    }
};
template <> struct Element<ElementType::F32> {
    typedef float Bits;
    static constexpr int SMALLEST_EXPONENT = -126; // of normal numbers
    static float to_float(Bits b) { return b; }
    static Bits from_float(float v) { return v; }
    static unsigned pack(float l, float) { return __float_as_uint(l); }
    static void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        emu_mma<1>(sum, a, b0, b1, SMALLEST_EXPONENT, [](unsigned x, int) { return __uint_as_float(x & 0xffffe000u); });
    }
};
// Two codes of e4m3 as f16.
static inline unsigned emu_e4m3x2(unsigned codes) {
    auto half = [&](int h) {
        int code = codes >> (8 * h) & 255, exponent = code >> 3 & 15, mantissa = code & 7;
        float x = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
        if ((code & 127) == 127) return 0x7fffu;
        return (unsigned)emu_f2h(code & 128 ? -x : x);
    };
    return half(0) | half(1) << 16;
}
// a * b + c of two numbers a register.
template <ElementType TYPE> static inline unsigned emu_pairs(unsigned a, unsigned b, unsigned c) {
    auto half = [&](int h) {
        auto number = [&](unsigned x) { return (double)Element<TYPE>::to_float((unsigned short)(x >> (16 * h))); };
        return (float)(number(a) * number(b) + number(c));
    };
    return Element<TYPE>::pack(half(0), half(1));
}
static inline float load_element(unsigned long long address, long long index, ElementType type) {
    if (type == ElementType::F32) return ((const float *)address)[index];
    unsigned short bits = ((const unsigned short *)address)[index];
    return type == ElementType::F16 ? Element<ElementType::F16>::to_float(bits) : Element<ElementType::BF16>::to_float(bits);
}
static inline void store_element(unsigned long long address, long long index, ElementType type, float value) {
    if (type == ElementType::F32) ((float *)address)[index] = value;
    else ((unsigned short *)address)[index] = type == ElementType::F16 ? Element<ElementType::F16>::from_float(value) : Element<ElementType::BF16>::from_float(value);
}
static inline float exp2_fast(float x) { return exp2f(x); }
static inline float reciprocal(float x) { return 1 / x; }
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)
#define UNLIKELY(condition) (condition)
