// The epilogue of every attention kernel: the sink joins the sum, the sum normalizes, output and LSE are stored.
#pragma once
#include "common/state.cuh"

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

// What a row's output is multiplied by, one after the other. Maxima may be stale by RESCALE_THRESHOLD, and outputs that
// much larger than values: next to a large sink an output may be a normal number where its factor is not, and would be
// flushed to 0. So that is divided in two.
struct OutputFactors {
    float first, second; // `first` is 1 but next to a large sink

    __device__ __forceinline__ float operator()(float x) const { return __fmul_rn(__fmul_rn(x, first), second); }
};

// The epilogue of a row: the factors of its output, and its log-sum-exp (LSE).
struct FinalizedRow {
    OutputFactors factors;
    float lse;
};

// Adds the sink to the sum and normalizes. A row that sees no key has output 0 and the sink as its LSE. The LSE is only
// computed if `wants_lse`.
static __device__ __forceinline__ FinalizedRow finalize_row(const AttentionParameters &params, State state, Sink sink,
                                                            float unit, bool wants_lse) {
    FinalizedRow finalized = {{1.0f, 1.0f}, -INF};
    if (UNLIKELY(params.sinks != 0)) {
        State keys = state;
        float right;
        state = merge_states(keys, State{sink.score, 1.0f}, unit, finalized.factors.second, right);
        // A factor this small: the sum is the sink's, which is 1.
        if (keys.sum > 0.0f && finalized.factors.second <= 0x1p-64f)
            finalized.factors = {0x1p-64f, exp2_fast((keys.max - sink.score) * unit + 64.0f)};
    }
    finalized.factors.second = state.sum > 0.0f ? finalized.factors.second * reciprocal(state.sum) : 0.0f;
    if (wants_lse && state.sum > 0.0f) {
        float log_sum = log2f(state.sum);
        finalized.lse = unit == 1.0f ? (state.max + log_sum) * LN_2 : fmaf(log_sum, LN_2, state.max);
        // The keys do not change the sum: the LSE is the sink, exactly.
        if (params.sinks && state.sum == 1.0f && state.max == sink.score) finalized.lse = sink.logit;
    }
    return finalized;
}

// Offset of a row of a tile in a tensor of rows. `Tile`: of decode or of prefill.
template <class Tile> static __device__ __forceinline__ long long row_offset(const RowStrides &strides,
                                                                             const Tile &tile, int head, int token) {
    return tile.sequence * strides.batch + (long long)(tile.seq.q_start + token) * strides.token + head * strides.head;
}

// Offsets of a row's output and LSE. `Tile`: of decode or of prefill.
template <class Tile> static __device__ __forceinline__ long long out_offset(const AttentionParameters &params,
                                                                             const Tile &tile, int head, int token) {
    return row_offset(params.out.strides, tile, head, token);
}

template <class Tile> static __device__ __forceinline__ void
store_lse(const AttentionParameters &params, const Tile &tile, int head, int token, float lse) {
    ((float *)params.lse.pointer)[row_offset(params.lse.strides, tile, head, token)] = lse;
}
