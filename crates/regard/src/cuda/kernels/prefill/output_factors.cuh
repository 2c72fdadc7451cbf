// What normalizes an output next to which the sink is large.
#pragma once
#include "common/epilogue.cuh"

// Factors of a row's output, to be multiplied by one after the other.
struct OutputFactors {
    float first, second;
};

// The maximum of a row may be stale by RESCALE_THRESHOLD, and outputs relative to it that much larger than values. So
// an output that is a normal number may have a factor that is not, which would be flushed to 0: it is divided in two.
static __device__ __forceinline__ OutputFactors output_factors(const AttentionParameters &params, State state,
                                                               Sink sink, float unit, FinalizedRow finalized) {
    if (!params.sinks || state.sum == 0.0f || finalized.factor > 0x1p-64f) return {1.0f, finalized.factor};
    // Keys do not change the sum, which is the sink's.
    return {0x1p-64f, exp2_fast((state.max - sink.score) * unit + 64.0f)};
}
