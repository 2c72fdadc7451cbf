// Appends new keys and values to a paged cache, with optional RoPE on keys, and on queries in place: one SIMD group per
// new token and head. Tokens past the end of the page table, or whose entry names no page, are dropped.

// A lane's elements of a row, at most: 576 / 32.
constant int MAX_LANE_ELEMENTS = 18;

// Element `dim` of a head, rotated: the first of a pair is x cos - y sin, the second y cos + x sin. `angles` holds the
// cosines of all pairs, then their sines.
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

// A new token: its row in the new keys, its sequence (-1 if it has none) and its position there.
struct NewToken {
    int row;
    int sequence;
    long position;
};

METAL_FUNC NewToken find_token(int row, device const int* kv_lens, device const int* cu_seqlens,
                               constant AppendParameters& params) {
    NewToken token = {row, -1, 0};
    long start = 0;
    long end = 0;
    if (params.new_tokens != 0) {
        token.sequence = row / params.new_tokens;
        start = long(token.sequence) * params.new_tokens;
        end = start + params.new_tokens;
    } else {
        // Binary search for the last sequence that starts at or before the token, past empty ones.
        int low = 0;
        int high = params.batch;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (cu_seqlens[middle + 1] <= row) low = middle + 1;
            else high = middle;
        }
        if (low >= params.batch || row < cu_seqlens[low]) return token;
        token.sequence = low;
        start = cu_seqlens[low];
        end = cu_seqlens[low + 1];
    }
    token.position = long(kv_lens[token.sequence]) - end + row;
    return token;
}

// A head of the queries, in place.
template <typename T>
METAL_FUNC void rotate_in_place(device T* head, device const float* angles, int lane,
                                constant AppendParameters& params) {
    float rotated[MAX_LANE_ELEMENTS];
    UNROLL
    for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        rotated[c] = dim < params.rotary_dim ? rotate<T>(head, dim, angles, params) : 0.0f;
    }
    // All elements are read before any is written.
    simdgroup_barrier(mem_flags::mem_device);
    UNROLL
    for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        if (dim < params.rotary_dim) head[dim] = T(rotated[c]);
    }
}

template <typename T>
METAL_FUNC void copy_row(device const T* from, device T* to, int dims, int lane) {
    for (int dim = lane; dim < dims; dim += SIMD_WIDTH) to[dim] = from[dim];
}

METAL_FUNC long token_offset(int row, int head, constant TokenStrides& strides) {
    return long(row) * strides.token + long(head) * strides.head;
}

METAL_FUNC long slot_offset(int block, int slot, int head, constant RowStrides& strides) {
    return long(block) * strides.batch + long(slot) * strides.token + long(head) * strides.head;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void append(
    constant AppendParameters& params [[buffer(0)]], device const T* key [[buffer(1)]],
    device const T* value [[buffer(2)]], device T* key_pool [[buffer(3)]], device T* value_pool [[buffer(4)]],
    device const int* kv_lens [[buffer(5)]], device const int* cu_seqlens [[buffer(6)]],
    device const int* block_table [[buffer(7)]], device const float* rotary [[buffer(8)]],
    device T* query [[buffer(9)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]]) {
    const int lane = int(lane_index);
    const int head = int(group.y);
    const NewToken token = find_token(int(group.x), kv_lens, cu_seqlens, params);
    if (token.sequence < 0) return;
    // Positions outside the table take its first or last row.
    const long last_row = max(params.rotary_positions - 1, 0);
    const long row = max_long(0, min_long(token.position, last_row));
    device const float* angles = rotary + row * long(params.rotary_dim);
    if (head >= params.kv_heads) {
        const int query_head = head - params.kv_heads;
        rotate_in_place<T>(query + token_offset(token.row, query_head, params.query_strides), angles, lane, params);
        return;
    }
    if (token.position < 0) return;
    const long column = token.position / params.block_size;
    if (column >= params.table_blocks) return;
    const int block = block_table[long(token.sequence) * params.block_table_stride + column];
    if (block < 0 || block >= params.blocks) return;
    const int slot = int(token.position - column * params.block_size);

    device const T* key_row = key + token_offset(token.row, head, params.key_strides);
    device T* key_slot = key_pool + slot_offset(block, slot, head, params.key_pool_strides);
    if (params.rotary_dim == 0) {
        copy_row(key_row, key_slot, params.head_dim, lane);
    } else {
        for (int dim = lane; dim < params.head_dim; dim += SIMD_WIDTH) {
            key_slot[dim] = T(rotate<T>(key_row, dim, angles, params));
        }
    }
    copy_row(value + token_offset(token.row, head, params.value_strides),
             value_pool + slot_offset(block, slot, head, params.value_pool_strides), params.value_dim, lane);
}

#define APPEND(T) template [[host_name("append_" #T)]] [[kernel]] decltype(append<T>) append<T>;
APPEND(float)
APPEND(half)
APPEND(bfloat)
