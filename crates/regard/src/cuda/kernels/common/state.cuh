// Partial attention states and their merge: per row a maximum, the sum of 2^(score - maximum), and an output relative
// to both. The same as state.rs. The empty state (-inf, 0) is neutral to the bit.
#pragma once
#include "common/element.cuh"
#include "common/parameters.cuh"

struct State {
    float max, sum;
};

constexpr float MAX_FLOAT = 3.40282347e38f;

// Lazy-rescale threshold (log2): keep the old maximum until a score exceeds it by 8. Probabilities are then at most
// 2^8.
constexpr float RESCALE_THRESHOLD = 8.0f;

// Units of scores and of maxima: what a difference of scores is multiplied by to be an exponent of 2. Scores are in
// units of log2 (1), or in natural units (log2(e)) where an additive mask may hold any finite f32: f32::MIN is common,
// and log2(e) times it would overflow.

// Whether a maximum (in units of log2) is so large that exponents relative to it have to be differences of rounded
// scores: a product that is not rounded less a maximum that is can be far above 0 then, and its power of 2 infinite.
static __device__ __forceinline__ bool is_large(float row_max) { return fabsf(row_max) > 1048576.0f; }

// Rounded probabilities can lift an average of f16 values above the largest of them by a rounding, which f16 would
// turn into infinity.
static __device__ __forceinline__ float bound_output(float x) {
    constexpr float LARGEST = 65504.0f;
    return ElementType(ELEMENT_TYPE) == ElementType::F16 && fabsf(x) < 65600.0f ? fminf(fmaxf(x, -LARGEST), LARGEST)
                                                                                : x;
}

// The same for many, of which next to none are that large.
template <int N> static __device__ __forceinline__ void bound_outputs(float (&out)[N]) {
    if constexpr (ElementType(ELEMENT_TYPE) == ElementType::F16) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(out[i]));
        if (largest > 65504.0f) {
#pragma unroll
            for (int i = 0; i < N; i++) out[i] = bound_output(out[i]);
        }
    }
}

// Packs outputs to pairs of 16 bits and bounds them (see bound_output). One FMA per pair finds an infinity (0 * inf =
// NaN); only then are the outputs of its chunk packed again.
template <int N> static __device__ __forceinline__ void pack_outputs(const float (&out)[N], unsigned (&packed)[N / 2]) {
    constexpr int CHUNK = N / 2 < 32 ? N / 2 : 32;
#pragma unroll
    for (int at = 0; at < N / 2; at += CHUNK) {
        unsigned check[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
        for (int i = at; i < at + CHUNK; i++) {
            packed[i] = Element<ElementType(ELEMENT_TYPE)>::pack(out[2 * i], out[2 * i + 1]);
            if (ElementType(ELEMENT_TYPE) == ElementType::F16)
                check[i % 8] = Element<ElementType::F16>::add_zero_times(check[i % 8], packed[i]);
        }
#pragma unroll
        for (int i = 1; i < 8; i++) check[0] |= check[i];
        if (ElementType(ELEMENT_TYPE) == ElementType::F16 && check[0] & 0x7fff7fff) {
#pragma unroll
            for (int i = at; i < at + CHUNK; i++)
                packed[i] =
                    Element<ElementType(ELEMENT_TYPE)>::pack(bound_output(out[2 * i]), bound_output(out[2 * i + 1]));
        }
    }
}

// Merges two states; the caller scales the two outputs by `left` and `right` before adding them. The explicit rounding
// gives the same bits wherever it is inlined.
static __device__ __forceinline__ State merge_states(State a, State b, float unit, float &left, float &right) {
    float new_max = fmaxf(a.max, b.max);
    float reference = new_max == -INF ? 0.0f : new_max;
    left = exp2_fast((a.max - reference) * unit);
    right = exp2_fast((b.max - reference) * unit);
    return {new_max, fmaf(a.sum, left, __fmul_rn(b.sum, right))};
}

static __device__ __forceinline__ float4 scale_four(float4 a, float factor) {
    return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor), __fmul_rn(a.w, factor));
}

// a + b * factor
static __device__ __forceinline__ float4 add_four(float4 a, float factor, float4 b) {
    return make_float4(fmaf(b.x, factor, a.x), fmaf(b.y, factor, a.y), fmaf(b.z, factor, a.z), fmaf(b.w, factor, a.w));
}
