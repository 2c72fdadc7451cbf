// Writes new keys and values where a cache keeps them: one SIMD group for a token and key/value head. The new tokens are the last of each
// sequence, as `kv_lens` counts them.

template <typename T>
inline void copy_row(device const T* from, device T* to, int dims, int lane) {
    for (int dim = lane; dim < dims; dim += SIMD_WIDTH) to[dim] = from[dim];
}

template <typename T>
[[kernel]] void append(constant AppendCall& call [[buffer(0)]], device const T* new_k [[buffer(1)]],
                       device const T* new_v [[buffer(2)]], device T* k [[buffer(3)]], device T* v [[buffer(4)]],
                       device const int* kv_lens [[buffer(5)]], device const int* cu_seqlens [[buffer(6)]],
                       device const int* block_table [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
                       uint lane_index [[thread_index_in_simdgroup]]) {
    const int lane = int(lane_index);
    const int index = int(group.z);
    const int head = int(group.y);
    const int token = int(group.x);
    int2 tokens = int2(0, call.new_tokens);
    if (call.ragged != 0) tokens = span(cu_seqlens, index, call.total);
    const int kv_len = min(kv_lens[index], call.capacity);
    // Where the new tokens begin; some do not fit where the lengths are wrong, and are left out.
    const int key = kv_len - tokens.y + token;
    if (token >= tokens.y || key < 0 || key >= kv_len) return;
    long key_at = long(key) * call.k_token_stride + long(head) * call.k_head_stride;
    long value_at = long(key) * call.v_token_stride + long(head) * call.v_head_stride;
    if (call.block_size != 0) {
        const int block = block_table[long(index) * call.table_stride + long(key / call.block_size)];
        if (block < 0 || block >= call.blocks) return;
        const long slot = key % call.block_size;
        key_at = long(block) * call.k_batch_stride + slot * call.k_token_stride + long(head) * call.k_head_stride;
        value_at = long(block) * call.v_batch_stride + slot * call.v_token_stride + long(head) * call.v_head_stride;
    } else {
        key_at += long(index) * call.k_batch_stride;
        value_at += long(index) * call.v_batch_stride;
    }
    const long from = long(tokens.x) + long(token);
    copy_row(new_k + (long(index) * call.new_k_batch_stride + from * call.new_k_token_stride + long(head) * call.new_k_head_stride),
             k + key_at, call.head_dim, lane);
    copy_row(new_v + (long(index) * call.new_v_batch_stride + from * call.new_v_token_stride + long(head) * call.new_v_head_stride),
             v + value_at, call.value_dim, lane);
}

#define APPEND(T) template [[host_name("append_" #T)]] [[kernel]] decltype(append<T>) append<T>;
APPEND(float)
APPEND(half)
APPEND(bfloat)
