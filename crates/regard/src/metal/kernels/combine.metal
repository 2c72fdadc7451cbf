// Combines the partial states of a row's splits (split-KV), in key order: one SIMD group per row, lanes along the dims.

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void combine_splits(
    constant AttentionParameters& params [[buffer(0)]], device uchar* out [[buffer(4)]], device uint* lse [[buffer(5)]],
    device const float* sinks [[buffer(8)]], device const int* kv_lens [[buffer(10)]],
    device const int* cu_seqlens_q [[buffer(11)]], device const int* cu_seqlens_k [[buffer(12)]],
    device const int* q_offsets [[buffer(14)]], device float* partials [[buffer(15)]],
    device const int* key_offsets [[buffer(19)]], device const int* key_counts [[buffer(21)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]]) {
    const int MAX_CHUNKS = 18; // 576 / 32
    const int lane = int(lane_index);
    OptionalOperands operands;
    operands.sinks = sinks;
    operands.kv_lens = kv_lens;
    operands.cu_seqlens_q = cu_seqlens_q;
    operands.cu_seqlens_k = cu_seqlens_k;
    operands.q_offsets = q_offsets;
    operands.key_offsets = key_offsets;
    operands.key_counts = key_counts;
    const Outputs outputs = {out, lse, partials};
    const int kv_head = int(group.y);
    const Sequence sequence = load_grid_sequence(params.first_sequence + int(group.z), params, operands);
    const int place = (params.first_block + int(group.x)) * SIMD_GROUPS + int(simdgroup_index);
    if (place >= sequence.q_len * params.group) return;

    RowFacts row;
    row.token = place / params.group;
    row.head = kv_head * params.group + place % params.group;
    State state = empty_state();
    float sums[MAX_CHUNKS];
    UNROLL
    for (int c = 0; c < MAX_CHUNKS; c++) sums[c] = 0.0f;
    for (int split = 0; split < params.splits; split++) {
        device const float* partial = partial_at(outputs, place, split, {sequence, kv_head}, params);
        State part;
        part.max = partial[VALUE_DIM];
        part.sum = partial[VALUE_DIM + 1];
        if (part.sum == 0.0f) continue;
        float factor_a, factor_b;
        state = merge_states(state, part, factor_a, factor_b);
        UNROLL
        for (int c = 0; c < MAX_CHUNKS; c++) {
            const int dim = c * SIMD_WIDTH + lane;
            if (dim < VALUE_DIM) sums[c] = fma(partial[dim], factor_b, sums[c] * factor_a);
        }
    }
    float scale;
    state = finalize_row(state, row.head, operands, scale);
    if (LSE && lane == 0) store_lse(outputs, row, sequence, state, params);
    const long at = row_offset(row, sequence, params.out_strides);
    UNROLL
    for (int c = 0; c < MAX_CHUNKS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        if (dim < VALUE_DIM) store_out<T>(outputs, at + dim, sums[c] * scale);
    }
}

#define COMBINE(T) template [[host_name("combine_" #T)]] [[kernel]] decltype(combine_splits<T>) combine_splits<T>;
COMBINE(float)
COMBINE(half)
COMBINE(bfloat)
