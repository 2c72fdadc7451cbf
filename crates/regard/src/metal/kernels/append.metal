// Writes new keys and values into a cache: one SIMD group per token and head. The new tokens of a sequence are the last of those that
// `kv_lens` counts. Keys may be rotated on the way, and the queries of the same tokens in place (RoPE).

// A lane's elements of a row, at most: 576 / 32.
constant int MAX_LANE_ELEMENTS = 18;

// Element `dim` of a head, rotated: the first of a pair is x cos - y sin, the second y cos + x sin. `angles` holds the cosines of all pairs,
// then their sines.
template <typename T>
METAL_FUNC float rotate(device const T* head, int dim, device const float* angles, constant AppendParameters& params) {
    const float own = float(head[dim]);
    if (dim >= params.rotary_dim) return own;
    const int pairs = params.rotary_dim / 2;
    const bool interleaved = params.rotary_interleaved != 0;
    const bool is_first = interleaved ? dim % 2 == 0 : dim < pairs;
    const int pair = interleaved ? dim / 2 : dim % pairs;
    const int partner = interleaved ? dim ^ 1 : (is_first ? dim + pairs : dim - pairs);
    const float other = float(head[partner]) * angles[pairs + pair];
    return fma(own, angles[pair], is_first ? -other : other);
}

template <typename T>
METAL_FUNC void copy_row(device const T* from, device T* to, int dims, int lane) {
    for (int dim = lane; dim < dims; dim += SIMD_WIDTH) to[dim] = from[dim];
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void append(
    constant AppendParameters& params [[buffer(0)]], device const T* new_k [[buffer(1)]], device const T* new_v [[buffer(2)]],
    device T* k [[buffer(3)]], device T* v [[buffer(4)]], device const int* kv_lens [[buffer(5)]], device const int* cu_seqlens [[buffer(6)]],
    device const int* block_table [[buffer(7)]], device const float* rotary [[buffer(8)]], device T* query [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]]) {
    const int lane = int(lane_index);
    const int index = int(group.z);
    const int head = int(group.y);
    const int token = int(group.x);
    int2 tokens = int2(0, params.new_tokens);
    if (params.ragged != 0) tokens = ragged_range(cu_seqlens, index, params.total);
    if (token >= tokens.y) return;
    const int kv_len = clamp(kv_lens[index], 0, params.capacity);
    const int key = kv_len - tokens.y + token;
    const long row = long(tokens.x) + long(token);
    // Positions past the table take its last row.
    const int position = clamp(key, 0, max(params.rotary_positions - 1, 0));
    device const float* angles = rotary + long(position) * long(params.rotary_dim);

    if (head >= params.kv_heads) {
        // A query, in place: every lane reads all of its elements before any is written.
        device T* at = query + (long(index) * params.query_batch_stride + row * params.query_token_stride +
                                long(head - params.kv_heads) * params.query_head_stride);
        float rotated[MAX_LANE_ELEMENTS];
        UNROLL
        for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
            const int dim = c * SIMD_WIDTH + lane;
            rotated[c] = dim < params.rotary_dim ? rotate<T>(at, dim, angles, params) : 0.0f;
        }
        simdgroup_barrier(mem_flags::mem_device);
        UNROLL
        for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
            const int dim = c * SIMD_WIDTH + lane;
            if (dim < params.rotary_dim) at[dim] = T(rotated[c]);
        }
        return;
    }
    // Wrong lengths leave no place for some tokens; those are not written.
    if (key < 0 || key >= kv_len) return;
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
    device const T* key_row =
        new_k + (long(index) * params.new_k_batch_stride + row * params.new_k_token_stride + long(head) * params.new_k_head_stride);
    if (params.rotary_dim == 0) {
        copy_row(key_row, k + key_at, params.head_dim, lane);
    } else {
        for (int dim = lane; dim < params.head_dim; dim += SIMD_WIDTH) k[key_at + dim] = T(rotate<T>(key_row, dim, angles, params));
    }
    copy_row(new_v + (long(index) * params.new_v_batch_stride + row * params.new_v_token_stride + long(head) * params.new_v_head_stride),
             v + value_at, params.value_dim, lane);
}

#define APPEND(T) template [[host_name("append_" #T)]] [[kernel]] decltype(append<T>) append<T>;
APPEND(float)
APPEND(half)
APPEND(bfloat)
