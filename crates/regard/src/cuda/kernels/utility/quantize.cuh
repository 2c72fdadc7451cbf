// Quantizing a row of a head, by a warp: codes, blocks and scales have the bits of src/format.rs and src/quantize.rs.
// Every rounding is explicit, so that nothing is contracted to an FMA.
#pragma once
#include "common/element.cuh"

constexpr int MAX_ROW_STEPS = 18; // of 32 dims: 576 in all

// A row of up to 576 values, spread over a warp: value 32 * step + lane. Values past its end are 0.
struct WarpRow {
    float values[MAX_ROW_STEPS];
    int dims;
};

static __device__ __forceinline__ bool is_nan(float x) { return !(x == x); }

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

static __device__ __forceinline__ bool is_code(CacheFormat format) {
    return format == CacheFormat::E4M3 || format == CacheFormat::E5M2 || format == CacheFormat::I8;
}

static __device__ __forceinline__ bool is_block(CacheFormat format) {
    return format == CacheFormat::Q8_0 || format == CacheFormat::Q4_0;
}

static __device__ __forceinline__ float largest_code(CacheFormat format) {
    return format == CacheFormat::E4M3 ? 448.0f : format == CacheFormat::E5M2 ? 57344.0f : 127.0f;
}

// The nearest code of an 8-bit float, ties to even, saturated. `bits` of mantissa; the smallest normal number is
// 2^min_exponent.
static __device__ __forceinline__ unsigned encode_float8(float x, float largest, int bits, int min_exponent) {
    unsigned sign = __float_as_uint(x) >> 31 << 7;
    if (is_nan(x)) return 0x7f;
    float magnitude = fminf(fabsf(x), largest);
    int exponent = max((int)(__float_as_uint(magnitude) >> 23) - 127, min_exponent);
    // Neighbours there are a power of two apart, so the product is exact. Steps run on into the exponent.
    int steps = __float2int_rn(__fmul_rn(magnitude, __uint_as_float((unsigned)(127 + bits - exponent) << 23)));
    return sign | (unsigned)(((exponent - min_exponent) << bits) + steps);
}

// The code of a value under a scale. (Not inlined: rows are unrolled.)
static __device__ __noinline__ unsigned encode(float x, float scale, CacheFormat format) {
    if (!is_nan(x)) x = scale == 0.0f ? 0.0f : __fdiv_rn(x, scale);
    if (format == CacheFormat::E4M3) return encode_float8(x, 448.0f, 3, -6);
    if (format == CacheFormat::E5M2) return encode_float8(x, 57344.0f, 2, -14);
    return is_nan(x) ? 0 : (unsigned)__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f)) & 0xff;
}

// The scale that maps the row's largest magnitude to the largest code. NaNs are passed over, but make a scale of i8
// NaN.
static __device__ __forceinline__ float dynamic_scale(const WarpRow &row, CacheFormat format) {
    float largest = 0.0f;
    bool broken = false;
#pragma unroll
    for (int step = 0; step < MAX_ROW_STEPS; step++) {
        largest = fmaxf(largest, fabsf(row.values[step])); // fmaxf passes over NaN
        broken |= is_nan(row.values[step]);
    }
    if (__any_sync(~0u, broken) && format == CacheFormat::I8) return __uint_as_float(0x7fc00000);
    return __fdiv_rn(fminf(warp_max(largest), 3.40282347e38f), largest_code(format));
}

static __device__ __forceinline__ void store_codes(const WarpRow &row, CacheFormat format, float scale,
                                                   unsigned char *to, int lane) {
#pragma unroll
    for (int step = 0; step < MAX_ROW_STEPS; step++) {
        if (32 * step + lane >= row.dims) break;
        to[32 * step + lane] = (unsigned char)encode(row.values[step], scale, format);
    }
}

// A latent row of 576 values: 512 codes, a scale per 128 of them, then the rotary dims in bf16.
static __device__ __forceinline__ void store_mla656(const WarpRow &row, unsigned char *to, int lane) {
#pragma unroll
    for (int group = 0; group < 4; group++) {
        float largest = 0.0f;
#pragma unroll
        for (int step = 4 * group; step < 4 * group + 4; step++)
            largest = fmaxf(largest, fabsf(row.values[step])); // fmaxf passes over NaN
        float scale = __fdiv_rn(fminf(warp_max(largest), 3.40282347e38f), 448.0f);
        if (lane == 0) ((float *)(to + 512))[group] = scale;
#pragma unroll
        for (int step = 4 * group; step < 4 * group + 4; step++)
            to[32 * step + lane] = (unsigned char)encode(row.values[step], scale, CacheFormat::E4M3);
    }
#pragma unroll
    for (int step = 16; step < MAX_ROW_STEPS; step++) {
        float x = row.values[step];
        ((unsigned short *)(to + 528))[32 * (step - 16) + lane] =
            is_nan(x) ? 0x7fc0 : Element<ElementType::BF16>::from_float(x);
    }
}

// Rounds half away from zero.
static __device__ __forceinline__ float round_away(float x) {
    float whole = __int2float_rn(__float2int_rz(x)), rest = __fsub_rn(fabsf(x), fabsf(whole));
    return rest >= 0.5f ? whole + (x < 0.0f ? -1.0f : 1.0f) : whole;
}

// GGUF's blocks of 32 values: one value per lane.
static __device__ __noinline__ void store_block(float x, CacheFormat format, unsigned char *to, int lane) {
    bool nibbles = format == CacheFormat::Q4_0;
    bool broken = __any_sync(~0u, is_nan(x));
    float magnitude = is_nan(x) ? 0.0f : fabsf(x), largest = warp_max(magnitude);
    // q4_0: the first value of that magnitude, with its sign, gets the code -8.
    unsigned first = __ffs(__ballot_sync(~0u, magnitude == largest)) - 1;
    float signed_largest = __shfl_sync(~0u, is_nan(x) ? 0.0f : x, first);
    if (largest == 0.0f) signed_largest = 0.0f;
    float scale = nibbles ? __fdiv_rn(signed_largest, -8.0f) : __fdiv_rn(largest, 127.0f);
    // Scales saturate from where f16 would round to infinity.
    if (fabsf(scale) >= 65520.0f) scale = copysignf(65504.0f, scale);
    float inverse = __fdiv_rn(1.0f, scale);
    if (!(fabsf(inverse) <= 3.40282347e38f)) inverse = 0.0f;
    float quotient = __fmul_rn(x, inverse);
    unsigned short stored = broken ? 0x7e00 : Element<ElementType::F16>::from_float(scale);
    if (lane == 0) *(unsigned short *)to = stored;
    if (nibbles) {
        // The minimum first: it turns NaN into a number.
        float code = is_nan(quotient) ? 0.0f : fmaxf(fminf(__fadd_rn(quotient, 8.5f), 15.0f), 0.0f);
        unsigned nibble = (unsigned)__float2int_rz(code), upper = __shfl_down_sync(~0u, nibble, 16);
        if (lane < 16) to[2 + lane] = (unsigned char)(nibble | upper << 4);
    } else {
        float code = is_nan(quotient) ? 0.0f : fmaxf(fminf(quotient, 127.0f), -127.0f);
        to[2 + lane] = (unsigned char)(int)round_away(code);
    }
}

static __device__ __forceinline__ void store_blocks(const WarpRow &row, CacheFormat format, unsigned char *to,
                                                    int lane) {
    int bytes = format == CacheFormat::Q8_0 ? 34 : 18;
#pragma unroll
    for (int step = 0; step < MAX_ROW_STEPS; step++) {
        if (32 * step >= row.dims) break;
        store_block(row.values[step], format, to + step * bytes, lane);
    }
}
