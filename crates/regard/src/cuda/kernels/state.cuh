// The algebra of partial attention: a maximum and a sum (of powers of 2 relative to it) for each row, and an output relative to both.
// The same as state.rs. The empty state (minus infinity, 0) is neutral to the bit.
#pragma once
#include "element.cuh"

struct State {
    float max, sum;
};

// Joins two states, rounding the same wherever it is inlined; outputs are to be multiplied by `left` and `right` before they are added.
static __device__ __forceinline__ State join(State a, State b, float &left, float &right) {
    float most = fmaxf(a.max, b.max);
    float reference = most == -INFINITE ? 0.0f : most;
    left = exp2_fast(a.max - reference);
    right = exp2_fast(b.max - reference);
    return {most, fmaf(a.sum, left, __fmul_rn(b.sum, right))};
}

static __device__ __forceinline__ float4 scale_four(float4 a, float factor) {
    return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor), __fmul_rn(a.w, factor));
}

// a + b * factor
static __device__ __forceinline__ float4 add_four(float4 a, float factor, float4 b) {
    return make_float4(fmaf(b.x, factor, a.x), fmaf(b.y, factor, a.y), fmaf(b.z, factor, a.z), fmaf(b.w, factor, a.w));
}
