// Softcap without tanh: the polynomial of the fallback Hopper prefill kernel, and the row maxima that it holds for.
#pragma once
#include "common/element.cuh"

// The softcap as a polynomial in the score: first s + third s^3 + fifth s^5, in units of log2. Three operations per
// score, where tanh takes a dozen.
//
// With x = score / cap, the polynomial is within a relative 2^-21 of tanh x for |x| <= 0.25, and monotonic. No score
// needs a check. Above: the sum check keeps probabilities below 2^8, so if the row maximum is at most 8 (log2) below
// the value at 0.25, no score exceeds it. Below -0.25: if the row maximum is above -0.1 of a cap of at least 45, such
// scores weigh 2^-9 of the maximum or less, and their weight falls faster than the polynomial errs: 2e-8 at most.
struct SoftcapPolynomial {
    float first, third, fifth;
};

// `scale`: of dot products.
static __device__ __forceinline__ SoftcapPolynomial softcap_polynomial(const AttentionParameters &params, float scale) {
    float inward = scale * reciprocal(params.softcap), square = inward * inward, first = scale * LOG2_E;
    return {0.999999604f * first, -0.333219063f * square * first, 0.128415892f * square * square * first};
}

// The row maxima in which it is valid.
struct SoftcapRange {
    float min, max;
};

static __device__ __forceinline__ SoftcapRange softcap_range(const AttentionParameters &params, float scale) {
    float inward = scale * reciprocal(params.softcap), outward = params.softcap * LOG2_E;
    bool usual = params.softcap >= 45.0f && params.softcap < 1e6f && fabsf(inward) > 1e-6f && fabsf(inward) < 1e6f;
    return {-0.1f * outward, usual ? 0.2449f * outward - 8.0f : -INF};
}
