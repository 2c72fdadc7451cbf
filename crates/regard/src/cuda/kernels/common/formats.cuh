// Conversion of 8- and 4-bit codes to pairs of f16 or bf16: exact, without their scales.
//
// Every 8-bit code is a number of f16 (e5m2 is the upper byte of one) and of bf16. Functions take
// four codes in a word, the first in its lowest byte. `to_*` gives the pairs (0, 1) and (2, 3), `to_*_even_odd` the
// pairs (0, 2) and (1, 3): words of ldmatrix.trans hold two dims of one key, then two of the next.
#pragma once
#include "common/element.cuh"

static __device__ __forceinline__ unsigned mul_f16x2(unsigned a, unsigned b) {
    unsigned c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

static __device__ __forceinline__ unsigned sub_f16x2(unsigned a, unsigned b) {
    unsigned c;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

static __device__ __forceinline__ unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// (a & mask) | bits, one instruction. From the expression ptxas makes two, because only one of its operands may be
// immediate.
static __device__ __forceinline__ unsigned and_or(unsigned a, unsigned mask, unsigned bits) {
    unsigned c;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(c) : "r"(a), "r"(mask), "r"(bits));
    return c;
}

// a * b in bf16; sm_80 multiplies with an FMA of -0.
static __device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) { return fma_bf16x2(a, b, 0x80008000); }

template <CacheFormat FORMAT> struct Codes;

template <> struct Codes<CacheFormat::E4M3> {
    // The codes in the lower 16 bits of `codes`.
    static __device__ __forceinline__ unsigned pair_to_f16(unsigned codes) {
#if __CUDA_ARCH__ >= 890
        unsigned pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)codes));
        return pair;
#else
        return widened_to_f16(__byte_perm(codes, 0, 0x1404));
#endif
    }
    // Codes in the upper bytes of both halves. The exponent moves to where f16 has it, and 2^8 makes up for the other
    // bias, of subnormal numbers too. NaN becomes 480.
    static __device__ __forceinline__ unsigned widened_to_f16(unsigned upper) {
        return mul_f16x2((upper & 0x80008000) | ((upper & 0x7f007f00) >> 1), 0x5c005c00);
    }
    // The same for bf16: 2^120.
    static __device__ __forceinline__ unsigned widened_to_bf16(unsigned upper) {
        return mul_bf16x2((upper & 0x80008000) | ((upper & 0x7f007f00) >> 4), 0x7b807b80);
    }
    static __device__ __forceinline__ void to_f16(unsigned codes, unsigned &first, unsigned &second) {
#if __CUDA_ARCH__ >= 890
        first = pair_to_f16(codes);
        second = pair_to_f16(codes >> 16);
#else
        first = widened_to_f16(__byte_perm(codes, 0, 0x1404));
        second = widened_to_f16(__byte_perm(codes, 0, 0x3424));
#endif
    }
    static __device__ __forceinline__ void to_f16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
#if __CUDA_ARCH__ >= 890
        to_f16(__byte_perm(codes, 0, 0x3120), even, odd);
#else
        even = widened_to_f16(codes << 8);
        odd = widened_to_f16(codes);
#endif
    }
    static __device__ __forceinline__ void to_bf16(unsigned codes, unsigned &first, unsigned &second) {
        first = widened_to_bf16(__byte_perm(codes, 0, 0x1404));
        second = widened_to_bf16(__byte_perm(codes, 0, 0x3424));
    }
    static __device__ __forceinline__ void to_bf16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        even = widened_to_bf16(codes << 8);
        odd = widened_to_bf16(codes);
    }
};

template <> struct Codes<CacheFormat::E5M2> {
    // Codes in the upper bytes of both halves, as bf16: the exponent moves by three bits, and 2^112 makes up for the
    // other bias. An infinity or NaN becomes a finite number.
    static __device__ __forceinline__ unsigned widened_to_bf16(unsigned upper) {
        return mul_bf16x2((upper & 0x80008000) | ((upper & 0x7f007f00) >> 3), 0x77807780);
    }
    static __device__ __forceinline__ void to_f16(unsigned codes, unsigned &first, unsigned &second) {
        first = __byte_perm(codes, 0, 0x1404);
        second = __byte_perm(codes, 0, 0x3424);
    }
    static __device__ __forceinline__ void to_f16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        even = __byte_perm(codes, 0, 0x2404);
        odd = codes & 0xff00ff00;
    }
    static __device__ __forceinline__ void to_bf16(unsigned codes, unsigned &first, unsigned &second) {
        first = widened_to_bf16(__byte_perm(codes, 0, 0x1404));
        second = widened_to_bf16(__byte_perm(codes, 0, 0x3424));
    }
    static __device__ __forceinline__ void to_bf16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        even = widened_to_bf16(codes << 8);
        odd = widened_to_bf16(codes);
    }
};

template <> struct Codes<CacheFormat::I8> {
    // With its sign flipped, a code is the mantissa of an f16 from 1024 on: code + 1152.
    static __device__ __forceinline__ unsigned biased_to_f16(unsigned biased) { return sub_f16x2(biased, 0x64806480); }
    static __device__ __forceinline__ void to_f16(unsigned codes, unsigned &first, unsigned &second) {
        codes ^= 0x80808080;
        first = biased_to_f16(__byte_perm(codes, 0x64, 0x4140));
        second = biased_to_f16(__byte_perm(codes, 0x64, 0x4342));
    }
    static __device__ __forceinline__ void to_f16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        codes ^= 0x80808080;
        even = biased_to_f16(__byte_perm(codes, 0x64, 0x4240));
        odd = biased_to_f16(__byte_perm(codes, 0x64, 0x4341));
    }
    // A code in the lower byte of each half, anything in the upper one: its lower 7 bits as a mantissa from 128 on,
    // less 128, or 256 if it is negative.
    static __device__ __forceinline__ unsigned lower_to_bf16(unsigned lower) {
        unsigned magnitude = (lower & 0x007f007f) | 0x43004300, bias = (lower & 0x00800080) | 0x43004300;
        return fma_bf16x2(bias, 0xbf80bf80, magnitude);
    }
    static __device__ __forceinline__ void to_bf16(unsigned codes, unsigned &first, unsigned &second) {
        first = lower_to_bf16(__byte_perm(codes, 0, 0x4140));
        second = lower_to_bf16(__byte_perm(codes, 0, 0x4342));
    }
    static __device__ __forceinline__ void to_bf16_even_odd(unsigned codes, unsigned &even, unsigned &odd) {
        even = lower_to_bf16(codes);
        odd = lower_to_bf16(codes >> 8);
    }
};

// Four codes as the pairs (0, 1) and (2, 3), like `to_f16` and `to_bf16`, with fewer instructions per pair: byte
// permutations and one product. (e4m3's conversion instruction has a lower rate.) For code that does nothing else, such
// as the converter warpgroup of Hopper prefill.
template <ElementType TYPE, CacheFormat FORMAT>
static __device__ __forceinline__ void widen_codes(unsigned codes, unsigned &first, unsigned &second) {
    // The upper and the lower byte of each number, without the exponent's bias, which the product with a power of two
    // adds.
    if constexpr (TYPE == ElementType::F16 && FORMAT == CacheFormat::E4M3) {
        unsigned lower = codes << 7 & 0x80808080, upper = (codes >> 1 & 0x3f3f3f3f) | (codes & 0x80808080);
        first = mul_f16x2(__byte_perm(lower, upper, 0x5140), 0x5c005c00); // 2^8
        second = mul_f16x2(__byte_perm(lower, upper, 0x7362), 0x5c005c00);
    } else if constexpr (TYPE == ElementType::F16) {
        Codes<FORMAT>::to_f16(codes, first, second);
    } else if constexpr (FORMAT == CacheFormat::E4M3) {
        unsigned lower = codes << 4 & 0xf0f0f0f0, upper = (codes >> 4 & 0x07070707) | (codes & 0x80808080);
        first = mul_bf16x2(__byte_perm(lower, upper, 0x5140), 0x7b807b80); // 2^120
        second = mul_bf16x2(__byte_perm(lower, upper, 0x7362), 0x7b807b80);
    } else if constexpr (FORMAT == CacheFormat::E5M2) {
        unsigned lower = codes << 5 & 0xe0e0e0e0, upper = (codes >> 3 & 0x0f0f0f0f) | (codes & 0x80808080);
        first = mul_bf16x2(__byte_perm(lower, upper, 0x5140), 0x77807780); // 2^112
        second = mul_bf16x2(__byte_perm(lower, upper, 0x7362), 0x77807780);
    } else {
        // i8: the lower 7 bits as a mantissa from 128 on, less 128, or 256 if the code is negative.
        unsigned magnitudes = codes & 0x7f7f7f7f, signs = codes & 0x80808080;
        first = fma_bf16x2(__byte_perm(signs, 0x43, 0x4140), 0xbf80bf80, __byte_perm(magnitudes, 0x43, 0x4140));
        second = fma_bf16x2(__byte_perm(signs, 0x43, 0x4342), 0xbf80bf80, __byte_perm(magnitudes, 0x43, 0x4342));
    }
}

template <> struct Codes<CacheFormat::Q8_0> : Codes<CacheFormat::I8> {};

// Nibbles: a word has eight, of the dims i to i + 3 in the lower and i + 16 to i + 19 in the upper halves of its bytes.
template <> struct Codes<CacheFormat::Q4_0> {
    // The nibbles of bytes 0 and 2: lower ones n + 1024, less 1032; upper ones 16 n + 1024, over 16 and less 72.
    static __device__ __forceinline__ unsigned lower_nibbles(unsigned codes) {
        return sub_f16x2(and_or(codes, 0x000f000f, 0x64006400), 0x64086408);
    }
    static __device__ __forceinline__ unsigned upper_nibbles(unsigned codes) {
        return fma_f16x2(and_or(codes, 0x00f000f0, 0x64006400), 0x2c002c00, 0xd480d480);
    }
    // Pairs of bytes (0, 2) and (1, 3): `lower` nibbles, then `upper` ones.
    static __device__ __forceinline__ void to_f16_even_odd(unsigned codes, unsigned (&lower)[2], unsigned (&upper)[2]) {
        lower[0] = lower_nibbles(codes);
        upper[0] = upper_nibbles(codes);
        lower[1] = lower_nibbles(codes >> 8);
        upper[1] = upper_nibbles(codes >> 8);
    }
};

// One 8-bit code of a format known only at run time; a nibble of q4_0 comes with its 8 subtracted by the caller.
static __device__ __forceinline__ float code_to_float(unsigned code, CacheFormat format) {
    unsigned first, second;
    if (format == CacheFormat::E4M3) {
        // Exponent 15 and all of the mantissa: NaN.
        if ((code & 0x7f) == 0x7f) return __int_as_float(0x7fffffff);
        Codes<CacheFormat::E4M3>::to_f16(code, first, second);
    } else if (format == CacheFormat::E5M2) {
        first = code << 8;
    } else {
        return (float)(int)(signed char)code;
    }
    return Element<ElementType::F16>::to_float((unsigned short)first);
}

// A power of two that brings weights up to `most` into f16's range, and its inverse.
struct WeightScale {
    float factor, inverse;
};

static __device__ __forceinline__ WeightScale weight_scale(float most) {
    int exponent = (int)(__float_as_uint(most) >> 23);
    int field = min(max(254 + 14 - exponent, 1), 253);
    return {__int_as_float(field << 23), __int_as_float((254 - field) << 23)};
}
