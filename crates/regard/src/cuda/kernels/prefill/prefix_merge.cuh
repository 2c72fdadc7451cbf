// Merges what each row has of its prefix (the splits of a work item) and of its own keys (decode) into its result.
#pragma once
#include "common/epilogue.cuh"
#include "prefill/prefix_schedule.cuh"

constexpr int MERGE_FLOAT4S = (VALUE_DIM + 127) / 128;
constexpr int MERGE_BATCH = 8; // parts that are loaded before any is used

// A row and its states: decode's, and those of the splits of the prefix (its parts).
struct MergedRow {
    const float2 *own_state, *part_states;
    const float *own_out, *part_outs;
    int parts;
    long long part_step; // states from one part to the next
    float own_factor;    // from decode's units of scores

    __device__ __forceinline__ State own() const {
        float2 found = __ldcg(own_state);
        return {found.x == -INF ? -INF : found.x * own_factor, found.y};
    }
    __device__ __forceinline__ State part(int k) const {
        if (k >= parts) return {-INF, 0.0f};
        float2 found = __ldcg(part_states + k * part_step);
        return {found.x, found.y};
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
    // Read past L1, which may still hold an earlier schedule.
    const PrefixGroup *group = (const PrefixGroup *)prefix.schedule + place.first;
    int splits = __ldcg(&group->splits), rows = __ldcg(&group->rows);
    int kv_head = head / params.group, packed = (place.second + token) * params.group + head - kv_head * params.group;
    long long first = __ldcg(&group->first_state) + (long long)kv_head * splits * rows + packed;
    row.parts = splits;
    row.part_step = rows;
    row.part_states = (const float2 *)prefix.partial_states + first;
    row.part_outs = (const float *)prefix.partial_out + first * VALUE_DIM;
    return row;
}

// This lane's columns of an output.
typedef float4 MergedColumns[MERGE_FLOAT4S];

static __device__ __forceinline__ void load_columns(const AttentionParameters &params, const float *from, bool there,
                                                    MergedColumns &to) {
#pragma unroll
    for (int i = 0; i < MERGE_FLOAT4S; i++) {
        int column = 4 * (threadIdx.x & 31) + 128 * i;
        bool has = there && (VALUE_DIM % 128 == 0 || column < VALUE_DIM) && column < params.value_dim;
        to[i] = has ? __ldcg((const float4 *)(from + column)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// Loads the outputs of parts from `first` on.
static __device__ __forceinline__ void load_parts(const AttentionParameters &params, const MergedRow &row, int first,
                                                  MergedColumns (&to)[MERGE_BATCH]) {
#pragma unroll
    for (int k = 0; k < MERGE_BATCH; k++)
        load_columns(params, row.part_outs + (first + k) * row.part_step * VALUE_DIM, first + k < row.parts, to[k]);
}

// Merges the states of a row and writes its result to element `at` of the output. One warp.
static __device__ __forceinline__ void merge_row(const AttentionParameters &params, const MergedRow &row,
                                                 const Sink &sink, long long at, float *lse) {
    int lane = threadIdx.x & 31;
    // Loads that depend on nothing come first: one latency for all of them.
    State own = row.own(), mine = row.part(lane);
    MergedColumns out, values[MERGE_BATCH];
    load_columns(params, row.own_out, true, out);
    load_parts(params, row, 0, values);
    float unit = unit_of(params), most = fmaxf(own.max, mine.max);
    for (int k = lane + 32; k < row.parts; k += 32) most = fmaxf(most, row.part(k).max);
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float reference = most == -INF ? 0.0f : most, own_weight = exp2_fast((own.max - reference) * unit);
    float sum = lane == 0 ? own.sum * own_weight : 0.0f;
#pragma unroll
    for (int i = 0; i < MERGE_FLOAT4S; i++)
        out[i] = own_weight != 0.0f ? scale_four(out[i], own_weight) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int base = 0; base < row.parts; base += 32) {
        if (base) mine = row.part(base + lane);
        float weight = exp2_fast((mine.max - reference) * unit);
        sum += mine.sum * weight;
#pragma unroll 1
        for (int first = 0; first < min(32, row.parts - base); first += MERGE_BATCH) {
            if (base + first) load_parts(params, row, base + first, values);
#pragma unroll
            for (int k = 0; k < MERGE_BATCH; k++) {
                float factor = __shfl_sync(~0u, weight, first + k);
#pragma unroll
                for (int i = 0; i < MERGE_FLOAT4S; i++)
                    if (factor != 0.0f) out[i] = add_four(out[i], factor, values[k][i]);
            }
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    FinalizedRow finalized = finalize_row(params, {most, sum}, sink, unit, lse != nullptr);
#pragma unroll
    for (int i = 0; i < MERGE_FLOAT4S; i++) {
        int column = 4 * lane + 128 * i;
        float4 value = scale_four(scale_four(out[i], finalized.factors.first), finalized.factors.second);
        if (column < params.value_dim) store_merged(params, at, column, value);
    }
    if (lse && lane == 0) *lse = finalized.lse;
}

// A CTA has rows of one sequence, a warp each at a time: CTA (x, y) starts with row 8 y of sequence x.
extern "C" __global__ void __launch_bounds__(256)
    merge_prefix(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefixParameters prefix) {
    // What `schedule` has left is there already, as for the kernel over prefixes: the first row is looked up before
    // that kernel has ended.
    launch_dependents();
    int sequence = blockIdx.x, heads = params.kv_heads * params.group;
    SequenceInfo seq = load_sequence(params, sequence);
    const int *pair = (const int *)prefix.places + 2 * sequence;
    IntPair place = {__ldcg(pair), __ldcg(pair + 1)};
    // Decode has stored the rows of sequences without a group.
    int rows = place.first < 0 ? 0 : seq.q_len * heads;
    bool waits = true;
#pragma unroll 1
    for (int row = 8 * blockIdx.y + threadIdx.x / 32; row < rows; row += 8 * gridDim.y) {
        int token = row / heads, head = row - token * heads;
        MergedRow merged = find_parts(params, prefix, sequence, seq, place, token, head);
        Sink sink = load_sink(params, head, unit_of(params));
        long long at = seq.q_start + token;
        float *lse = nullptr;
        if (params.lse.pointer)
            lse = (float *)params.lse.pointer + sequence * params.lse.strides.batch + at * params.lse.strides.token +
                  head * params.lse.strides.head;
        at = sequence * params.out.strides.batch + at * params.out.strides.token + head * params.out.strides.head;
        if (waits) wait_for_preceding();
        waits = false;
        merge_row(params, merged, sink, at, lse);
    }
    // A kernel that waits for this one waits for those before it too.
    if (waits) wait_for_preceding();
}
