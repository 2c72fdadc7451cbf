// Partial attention states and their merge: per row a maximum, the sum of 2^(score - maximum), and an output relative
// to both. The same as state.rs. The empty state (-inf, 0) is neutral to the bit.
#pragma once
#include "common/element.cuh"
#include "common/parameters.cuh"

struct State {
    float max, sum;
};

constexpr float MAX_FLOAT = 3.40282347e38f;

// Units of scores and of maxima: what a difference of scores is multiplied by to be an exponent of 2. Scores are in
// units of log2 (1), or in natural units (log2(e)) where an additive mask may hold any finite f32: f32::MIN is common,
// and log2(e) times it would overflow.

// Whether a maximum (in units of log2) is so large that exponents relative to it have to be differences of rounded
// scores: a product that is not rounded less a maximum that is can be far above 0 then, and its power of 2 infinite.
static __device__ __forceinline__ bool is_large(float row_max) { return fabsf(row_max) > 1048576.0f; }

// An average of f16 values whose probs were rounded can be above the largest of them by a rounding, which f16 would
// turn into infinity.
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

// Merges two states; the caller scales the two outputs by `left` and `right` before adding them. The explicit rounding
// gives the same bits wherever it is inlined.
static __device__ __forceinline__ State merge_states(State a, State b, float unit, float &left, float &right) {
    float most = fmaxf(a.max, b.max);
    float reference = most == -INF ? 0.0f : most;
    left = exp2_fast((a.max - reference) * unit);
    right = exp2_fast((b.max - reference) * unit);
    return {most, fmaf(a.sum, left, __fmul_rn(b.sum, right))};
}

// An attention sink of a head: its logit, and the same in units of scores; -inf if there is none.
struct Sink {
    float logit, score;
};

static __device__ __forceinline__ Sink load_sink(const AttentionParameters &params, int head, float unit) {
    Sink sink = {-INF, -INF};
    if (params.sinks) {
        sink.logit = ((const float *)params.sinks)[head];
        // The largest sinks overflow in units of log2, and inf - inf is NaN: clamp to the largest finite number.
        float score = unit == 1.0f ? sink.logit * LOG2_E : sink.logit;
        sink.score = sink.logit == -INF ? -INF : fmaxf(fminf(score, MAX_FLOAT), -MAX_FLOAT);
    }
    return sink;
}

// The epilogue of a row: the factor for its output, and its log-sum-exp (LSE).
struct FinalizedRow {
    float factor, lse;
};

// Adds the sink to the sum and normalizes. A row that sees no key has output 0 and the sink as its LSE.
static __device__ __forceinline__ FinalizedRow finalize_row(const AttentionParameters &params, State state, Sink sink,
                                                            float unit) {
    float left = 1.0f, right;
    if (params.sinks) state = merge_states(state, State{sink.score, 1.0f}, unit, left, right);
    if (!(state.sum > 0.0f)) return {0.0f, -INF};
    float log_sum = log2f(state.sum);
    float lse = unit == 1.0f ? (state.max + log_sum) * LN_2 : fmaf(log_sum, LN_2, state.max);
    // The keys do not change the sum: the LSE is the sink, exactly.
    if (params.sinks && state.sum == 1.0f && state.max == sink.score) lse = sink.logit;
    return {left * reciprocal(state.sum), lse};
}

static __device__ __forceinline__ float4 scale_four(float4 a, float factor) {
    return make_float4(__fmul_rn(a.x, factor), __fmul_rn(a.y, factor), __fmul_rn(a.z, factor), __fmul_rn(a.w, factor));
}

// a + b * factor
static __device__ __forceinline__ float4 add_four(float4 a, float factor, float4 b) {
    return make_float4(fmaf(b.x, factor, a.x), fmaf(b.y, factor, a.y), fmaf(b.z, factor, a.z), fmaf(b.w, factor, a.w));
}
