// The algebra of partial attention: a maximum and a sum (of powers of 2 relative to it) for each row, and an output relative to both.
// The same as state.rs. The empty state (minus infinity, 0) is neutral to the bit.
#pragma once
#include "element.cuh"
#include "parameters.cuh"

struct State {
    float max, sum;
};

constexpr float MAX_FLOAT = 3.40282347e38f;

// A score with what an additive mask has for it. Beyond what f32 holds it is the largest number with its sign: a finite mask value hides nothing, only minus infinity does.
static __device__ __forceinline__ float add_mask(float score, float bias) {
    float sum = score + bias;
    return fabsf(sum) == INFINITE && bias != -INFINITE ? copysignf(MAX_FLOAT, sum) : sum;
}

// Scores and maxima are in units of log2: logits times log2(e), so that the exponential is a power of 2. Calls with an additive mask keep natural units, because a
// mask may hold any finite f32 (f32::MIN is common), and log2(e) times it would overflow: there the difference to the maximum is multiplied instead.
static __device__ __forceinline__ bool has_natural_scores(const AttentionParameters &p) { return GENERAL && p.mask_type >= 2; }

// What logits are multiplied by to become scores.
static __device__ __forceinline__ float score_unit(const AttentionParameters &p) { return has_natural_scores(p) ? 1.0f : LOG2_E; }

// 2 to the power of a difference of scores.
static __device__ __forceinline__ float exponential(const AttentionParameters &p, float difference) {
    return exp2_fast(GENERAL ? difference * (has_natural_scores(p) ? LOG2_E : 1.0f) : difference);
}

// Maxima from here on are large: see `is_large`.
constexpr float LARGE_MAX = 1048576.0f;

// Whether exponents relative to a row's maximum have to be differences of rounded scores. Where scores are large, that of a product which is not rounded and a maximum which
// is can be far above 0, and its power of 2 infinite. A row that has seen nothing yet has the least maximum there is.
static __device__ __forceinline__ bool is_large(float row_max) { return fabsf(row_max) > LARGE_MAX && row_max > -MAX_FLOAT; }

// An average of f16 values whose weights were rounded can be above the largest of them by a rounding, which f16 would turn into infinity.
static __device__ __forceinline__ float bound_output(float x) {
    constexpr float LARGEST = 65504.0f;
    return ELEMENT_TYPE == F16 && fabsf(x) < 65600.0f ? fminf(fmaxf(x, -LARGEST), LARGEST) : x;
}

// The same for many, of which next to none are that large.
template <int N> static __device__ __forceinline__ void bound_outputs(float (&out)[N]) {
    if constexpr (ELEMENT_TYPE == F16) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) most = fmaxf(most, fabsf(out[i]));
        if (most > 65504.0f) {
#pragma unroll
            for (int i = 0; i < N; i++) out[i] = bound_output(out[i]);
        }
    }
}

// Joins two states, rounding the same wherever it is inlined; outputs are to be multiplied by `left` and `right` before they are added.
static __device__ __forceinline__ State join(const AttentionParameters &p, State a, State b, float &left, float &right) {
    float most = fmaxf(a.max, b.max);
    float reference = most == -INFINITE ? 0.0f : most;
    left = exponential(p, a.max - reference);
    right = exponential(p, b.max - reference);
    return {most, fmaf(a.sum, left, __fmul_rn(b.sum, right))};
}

// A head's sink: its logit, and the score that it is; minus infinity where there is none.
struct Sink {
    float logit, score;
};

static __device__ __forceinline__ Sink load_sink(const AttentionParameters &p, int head) {
    if (!p.sinks) return {-INFINITE, -INFINITE};
    float logit = ((const float *)p.sinks)[head];
    // The largest sinks overflow in units of log2, and infinity less itself is NaN: they become the largest finite number.
    return {logit, logit == -INFINITE ? logit : fmaxf(fminf(logit * score_unit(p), MAX_FLOAT), -MAX_FLOAT)};
}

// A finished row: what its output is multiplied by, and its log-sum-exp.
struct FinishedRow {
    float factor, lse;
};

// The sink joins, the sum divides. A row that sees no key is 0, with the sink for its log-sum-exp.
static __device__ __forceinline__ FinishedRow finish_row(const AttentionParameters &p, State state, Sink sink) {
    float left = 1.0f, right;
    if (p.sinks) state = join(p, state, State{sink.score, 1.0f}, left, right);
    float factor = state.sum > 0.0f ? left * reciprocal(state.sum) : 0.0f, log_sum = log2f(state.sum);
    float lse = has_natural_scores(p) ? fmaf(log_sum, LN_2, state.max) : (state.max + log_sum) * LN_2;
    // Next to the sink the rest weighs nothing.
    if (state.sum == 1.0f && state.max == sink.score) lse = sink.logit;
    return {factor, state.sum > 0.0f ? lse : -INFINITE};
}

static __device__ __forceinline__ float4 scale_four(float4 a, float factor) {
    return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor), __fmul_rn(a.w, factor));
}

// a + b * factor
static __device__ __forceinline__ float4 add_four(float4 a, float factor, float4 b) {
    return make_float4(fmaf(b.x, factor, a.x), fmaf(b.y, factor, a.y), fmaf(b.z, factor, a.z), fmaf(b.w, factor, a.w));
}
