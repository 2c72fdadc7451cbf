// Merges what each row has of its prefix (the splits of a work item) and of its own keys (decode) into its result.
#pragma once
#include "common/epilogue.cuh"
#include "prefill/prefix_schedule.cuh"

constexpr int MERGE_FLOAT4S = (VALUE_DIM + 127) / 128;
constexpr int MERGE_BATCH = 8; // parts that are loaded before any is used

// A row and its states: decode's first, then the splits of the prefix.
struct MergedRow {
    const float2 *own_state, *part_states;
    const float *own_out, *part_outs;
    int parts;           // of the prefix
    long long part_step; // states from one split to the next
    float own_factor;    // from decode's units of scores

    __device__ __forceinline__ State state(int k) const {
        if (k > parts) return {-INF, 0.0f};
        float2 found = __ldcg(k == 0 ? own_state : part_states + (k - 1) * part_step);
        if (k == 0 && found.x != -INF) found.x *= own_factor;
        return {found.x, found.y};
    }
    __device__ __forceinline__ float4 out(int k, int column) const {
        const float *from = k == 0 ? own_out : part_outs + (k - 1) * part_step * VALUE_DIM;
        return __ldcg((const float4 *)(from + column));
    }
};

static __device__ __forceinline__ void store_merged(const AttentionParameters &params, long long at, int column,
                                                    float4 x) {
    ElementType type = params.out_f32 ? ElementType::F32 : ElementType(ELEMENT_TYPE);
    if (type != ElementType::F32)
        x = make_float4(bound_output(x.x), bound_output(x.y), bound_output(x.z), bound_output(x.w));
    if (params.out_aligned && column + 4 <= params.value_dim) {
        if (type == ElementType::F32) {
            *(float4 *)((float *)params.out.pointer + at + column) = x;
        } else {
            uint2 packed;
            packed.x = E::pack(x.x, x.y);
            packed.y = E::pack(x.z, x.w);
            *(uint2 *)((unsigned short *)params.out.pointer + at + column) = packed;
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float value = e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w;
        if (column + e < params.value_dim) store_element(params.out.pointer, at + column + e, type, value);
    }
}

// The parts of row (token, head) of a sequence.
static __device__ __forceinline__ MergedRow find_parts(const AttentionParameters &params,
                                                       const PrefixParameters &prefix, int sequence,
                                                       const SequenceInfo &seq, IntPair place, int token, int head) {
    const RowStrides &out = params.own_out.strides, &states = params.own_states.strides;
    long long at = seq.q_start + token;
    MergedRow row;
    row.own_out = (const float *)params.own_out.pointer + sequence * out.batch + at * out.token + head * out.head;
    row.own_state = (const float2 *)((const float *)params.own_states.pointer + sequence * states.batch +
                                     at * states.token + head * states.head);
    row.own_factor = params.unmodified_scores || has_natural_scores(params) ? 1.0f : LOG2_E;
    const PrefixGroup &group = ((const PrefixGroup *)prefix.schedule)[place.first];
    int kv_head = head / params.group, packed = (place.second + token) * params.group + head - kv_head * params.group;
    long long first = group.first_state + (long long)kv_head * group.splits * group.rows + packed;
    row.parts = group.splits;
    row.part_step = group.rows;
    row.part_states = (const float2 *)prefix.partial_states + first;
    row.part_outs = (const float *)prefix.partial_out + first * VALUE_DIM;
    return row;
}

// Merges the parts of a row and writes its result. One warp.
static __device__ __forceinline__ void merge_row(const AttentionParameters &params, const MergedRow &row, long long at,
                                                 int head, float *lse) {
    int lane = threadIdx.x & 31;
    float unit = unit_of(params), most = -INF, sum = 0.0f;
    for (int k = lane; k <= row.parts; k += 32) most = fmaxf(most, row.state(k).max);
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float reference = most == -INF ? 0.0f : most;
    float4 out[MERGE_FLOAT4S];
#pragma unroll
    for (int i = 0; i < MERGE_FLOAT4S; i++) out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int base = 0; base <= row.parts; base += 32) {
        State mine = row.state(base + lane);
        float weight = exp2_fast((mine.max - reference) * unit);
        sum += mine.sum * weight;
#pragma unroll 1
        for (int first = 0; first < min(32, row.parts + 1 - base); first += MERGE_BATCH) {
            float4 value[MERGE_BATCH][MERGE_FLOAT4S];
#pragma unroll
            for (int k = 0; k < MERGE_BATCH; k++)
#pragma unroll
                for (int i = 0; i < MERGE_FLOAT4S; i++) {
                    int column = 4 * lane + 128 * i;
                    bool there = base + first + k <= row.parts && (VALUE_DIM % 128 == 0 || column < VALUE_DIM) &&
                                 column < params.value_dim;
                    value[k][i] = there ? row.out(base + first + k, column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
#pragma unroll
            for (int k = 0; k < MERGE_BATCH; k++) {
                float factor = __shfl_sync(~0u, weight, first + k);
#pragma unroll
                for (int i = 0; i < MERGE_FLOAT4S; i++)
                    if (factor != 0.0f) out[i] = add_four(out[i], factor, value[k][i]);
            }
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    FinalizedRow finalized = finalize_row(params, {most, sum}, load_sink(params, head, unit), unit, lse != nullptr);
#pragma unroll
    for (int i = 0; i < MERGE_FLOAT4S; i++) {
        int column = 4 * lane + 128 * i;
        if (column < params.value_dim) store_merged(params, at, column, scale_four(out[i], finalized.factor));
    }
    if (lse && lane == 0) *lse = finalized.lse;
}

// A CTA has rows of one sequence, a warp each at a time: CTA (x, y) starts with row 8 y of sequence x.
extern "C" __global__ void __launch_bounds__(256)
    merge_prefix(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefixParameters prefix) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int sequence = blockIdx.x, heads = params.kv_heads * params.group;
    SequenceInfo seq = load_sequence(params, sequence);
    IntPair place = ((const IntPair *)prefix.places)[sequence];
    // Decode has stored the rows of sequences without a group.
    if (place.first < 0) return;
#pragma unroll 1
    for (int row = 8 * blockIdx.y + threadIdx.x / 32; row < seq.q_len * heads; row += 8 * gridDim.y) {
        int token = row / heads, head = row - token * heads;
        long long at = seq.q_start + token;
        float *lse = nullptr;
        if (params.lse.pointer)
            lse = (float *)params.lse.pointer + sequence * params.lse.strides.batch + at * params.lse.strides.token +
                  head * params.lse.strides.head;
        at = sequence * params.out.strides.batch + at * params.out.strides.token + head * params.out.strides.head;
        merge_row(params, find_parts(params, prefix, sequence, seq, place, token, head), at, head, lse);
    }
}
