// Element types f16, bf16 and f32: conversions to and from f32, and their mma.sync.
// No CUDA header is included anywhere in this folder: NVRTC compiles these sources as they are.
#pragma once
#include "common/parameters.cuh"

template <ElementType TYPE> struct Element;

// sum[16 x 8] += a[16 x K] * b[K x 8], in the fragment layout of mma.m16n8kK.
#define MMA_SYNC(SHAPE, TYPE)                                                                                       \
    static __device__ __forceinline__ void mma(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { \
        asm("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE                                                 \
            ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                            \
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                        \
    }

// The operations common to the 16-bit types.
#define ELEMENT_16_BIT(TYPE)                                                         \
    typedef unsigned short Bits;                                                     \
    static __device__ __forceinline__ Bits from_float(float value) {                 \
        Bits bits;                                                                   \
        asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(value));                \
        return bits;                                                                 \
    }                                                                                \
    static __device__ __forceinline__ unsigned pack(float low, float high) {         \
        unsigned pair;                                                               \
        asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low)); \
        return pair;                                                                 \
    }                                                                                \
    MMA_SYNC("m16n8k16", TYPE)

template <> struct Element<ElementType::F16> {
    ELEMENT_16_BIT("f16")
    static __device__ __forceinline__ float to_float(Bits bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    // sum + 0 * pair, both halves: NaN if the pair holds an infinity.
    static __device__ __forceinline__ unsigned add_zero_times(unsigned sum, unsigned pair) {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
        return sum;
    }
};

template <> struct Element<ElementType::BF16> {
    ELEMENT_16_BIT("bf16")
    static __device__ __forceinline__ float to_float(Bits bits) { return __uint_as_float((unsigned)bits << 16); }
};

template <> struct Element<ElementType::F32> {
    typedef float Bits;
    static __device__ __forceinline__ float to_float(Bits bits) { return bits; }
    static __device__ __forceinline__ Bits from_float(float value) { return value; }
    static __device__ __forceinline__ unsigned pack(float low, float) { return __float_as_uint(low); } // never used
    MMA_SYNC("m16n8k8", "tf32")
};

// One element of a type known only at run time.
static __device__ __forceinline__ float load_element(unsigned long long address, long long index, ElementType type) {
    if (type == ElementType::F32) return ((const float *)address)[index];
    unsigned short bits = ((const unsigned short *)address)[index];
    return type == ElementType::F16 ? Element<ElementType::F16>::to_float(bits)
                                    : Element<ElementType::BF16>::to_float(bits);
}

static __device__ __forceinline__ void store_element(unsigned long long address, long long index, ElementType type,
                                                     float value) {
    if (type == ElementType::F32) {
        ((float *)address)[index] = value;
    } else {
        ((unsigned short *)address)[index] = type == ElementType::F16 ? Element<ElementType::F16>::from_float(value)
                                                                      : Element<ElementType::BF16>::from_float(value);
    }
}

// 2^x, to 2 ulp of f32; 0 for x = -inf.
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, to 1 ulp.
static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
#define INF __int_as_float(0x7f800000)

// Of a condition: code that rarely runs is laid out behind other code, which so has fewer instructions to fetch.
#define UNLIKELY(condition) __builtin_expect((condition) ? 1 : 0, 0)
