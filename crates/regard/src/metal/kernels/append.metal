// Writes new keys and values into a cache: one SIMD group per token and key/value head. The new tokens of a sequence are the last of those
// that `kv_lens` counts.

template <typename T>
METAL_FUNC void copy_row(device const T* from, device T* to, int dims, int lane) {
    for (int dim = lane; dim < dims; dim += SIMD_WIDTH) to[dim] = from[dim];
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void append(constant AppendParameters& params [[buffer(0)]], device const T* new_k [[buffer(1)]],
                       device const T* new_v [[buffer(2)]], device T* k [[buffer(3)]], device T* v [[buffer(4)]],
                       device const int* kv_lens [[buffer(5)]], device const int* cu_seqlens [[buffer(6)]],
                       device const int* block_table [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
                       uint lane_index [[thread_index_in_simdgroup]]) {
    const int lane = int(lane_index);
    const int index = int(group.z);
    const int head = int(group.y);
    const int token = int(group.x);
    int2 tokens = int2(0, params.new_tokens);
    if (params.ragged != 0) tokens = ragged_range(cu_seqlens, index, params.total);
    const int kv_len = min(kv_lens[index], params.capacity);
    // The cache position of the token. Wrong lengths leave no place for some tokens; those are not written.
    const int key = kv_len - tokens.y + token;
    if (token >= tokens.y || key < 0 || key >= kv_len) return;
    long key_at = long(key) * params.k_token_stride + long(head) * params.k_head_stride;
    long value_at = long(key) * params.v_token_stride + long(head) * params.v_head_stride;
    if (params.block_size != 0) {
        const int page = block_table[long(index) * params.table_stride + long(key / params.block_size)];
        if (page < 0 || page >= params.blocks) return;
        const long slot = key % params.block_size;
        key_at = long(page) * params.k_batch_stride + slot * params.k_token_stride + long(head) * params.k_head_stride;
        value_at = long(page) * params.v_batch_stride + slot * params.v_token_stride + long(head) * params.v_head_stride;
    } else {
        key_at += long(index) * params.k_batch_stride;
        value_at += long(index) * params.v_batch_stride;
    }
    const long from = long(tokens.x) + long(token);
    copy_row(new_k + (long(index) * params.new_k_batch_stride + from * params.new_k_token_stride + long(head) * params.new_k_head_stride),
             k + key_at, params.head_dim, lane);
    copy_row(new_v + (long(index) * params.new_v_batch_stride + from * params.new_v_token_stride + long(head) * params.new_v_head_stride),
             v + value_at, params.value_dim, lane);
}

#define APPEND(T) template [[host_name("append_" #T)]] [[kernel]] decltype(append<T>) append<T>;
APPEND(float)
APPEND(half)
APPEND(bfloat)
