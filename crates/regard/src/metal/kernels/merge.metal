// Joins the partial states that the splits of a row left, in key order: one SIMD group a row, lanes along the dims.

template <typename T>
[[kernel]] void merge(constant AttentionCall& call [[buffer(0)]], device uchar* out [[buffer(4)]],
                      device uint* lse [[buffer(5)]], device const float* sinks [[buffer(8)]],
                      device const int* kv_lens [[buffer(10)]], device const int* cu_seqlens_q [[buffer(11)]],
                      device const int* cu_seqlens_k [[buffer(12)]], device const int* q_offsets [[buffer(14)]],
                      device float* partials [[buffer(15)]], uint3 group [[threadgroup_position_in_grid]],
                      uint lane_index [[thread_index_in_simdgroup]],
                      uint simdgroup_index [[simdgroup_index_in_threadgroup]]) {
    const int MOST_DIMS = 18;  // 576 / 32
    const int lane = int(lane_index);
    Extras extras;
    extras.sinks = sinks;
    extras.kv_lens = kv_lens;
    extras.cu_seqlens_q = cu_seqlens_q;
    extras.cu_seqlens_k = cu_seqlens_k;
    extras.q_offsets = q_offsets;
    const Outputs outputs = {out, lse, partials};
    const int kv_head = int(group.y);
    const Sequence sequence = sequence_at(int(group.z), call, extras);
    const int place = int(group.x) * SIMD_GROUPS + int(simdgroup_index);
    if (place >= sequence.q_len * call.group) return;

    Row row;
    row.token = place / call.group;
    row.head = kv_head * call.group + place % call.group;
    State state = empty_state();
    float sums[MOST_DIMS];
    UNROLL
    for (int c = 0; c < MOST_DIMS; c++) sums[c] = 0.0f;
    for (int split = 0; split < call.splits; split++) {
        device const float* partial = partial_at(outputs, place, split, kv_head, sequence, call);
        State part;
        part.max = partial[VALUE_DIM];
        part.sum = partial[VALUE_DIM + 1];
        if (part.sum == 0.0f) continue;
        float factor_a, factor_b;
        state = join(state, part, factor_a, factor_b);
        UNROLL
        for (int c = 0; c < MOST_DIMS; c++) {
            const int dim = c * SIMD_WIDTH + lane;
            if (dim < VALUE_DIM) sums[c] = fma(partial[dim], factor_b, sums[c] * factor_a);
        }
    }
    float scale;
    state = finish(state, row.head, extras, scale);
    if (LSE && lane == 0) write_lse(outputs, row, sequence, state, call);
    const long at = output_row(row, sequence, call.out_batch_stride, call.out_token_stride, call.out_head_stride);
    UNROLL
    for (int c = 0; c < MOST_DIMS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        if (dim < VALUE_DIM) write_out<T>(outputs, at + dim, sums[c] * scale);
    }
}

#define MERGE(T) template [[host_name("merge_" #T)]] [[kernel]] decltype(merge<T>) merge<T>;
MERGE(float)
MERGE(half)
MERGE(bfloat)
