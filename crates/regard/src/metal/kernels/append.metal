// Appends new keys and values to a cache, with optional RoPE on keys, and on queries in place; quantizes to pools of
// codes or blocks. One SIMD group per new token and head of keys, values or queries. Tokens past the end of the page
// table, or whose entry names no page, are dropped.

// A lane's elements of a row, at most: 576 / 32.
constant int MAX_LANE_ELEMENTS = 18;

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
METAL_FUNC void rotate_in_place(device T* head, NewRow<T> row, int lane) {
    float rotated[MAX_LANE_ELEMENTS];
    UNROLL
    for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        rotated[c] = dim < row.rotary_dim ? load_rotated(row, dim) : 0.0f;
    }
    // All elements are read before any is written.
    simdgroup_barrier(mem_flags::mem_device);
    UNROLL
    for (int c = 0; c < MAX_LANE_ELEMENTS; c++) {
        const int dim = c * SIMD_WIDTH + lane;
        if (dim < row.rotary_dim) head[dim] = T(rotated[c]);
    }
}

METAL_FUNC long token_offset(int row, int head, constant TokenStrides& strides) {
    return long(row) * strides.token + long(head) * strides.head;
}

// The place of a token and head in a cache.
struct CacheSlot {
    int page;
    int slot;
    int head;
};

METAL_FUNC long slot_offset(CacheSlot slot, constant RowStrides& strides) {
    return long(slot.page) * strides.batch + long(slot.slot) * strides.token + long(slot.head) * strides.head;
}

// Keys or values of a cache, and their scales.
struct Pool {
    device uchar* data;
    device float* scales;
    int format;
    bool has_dynamic_scales;
};

template <typename T>
METAL_FUNC void store_row(NewRow<T> row, Pool pool, CacheSlot slot, constant RowStrides& strides,
                          constant RowStrides& scale_strides, int lane) {
    const long at = slot_offset(slot, strides);
    if (!is_native(pool.format)) {
        const QuantizedSlot to = {pool.data + at * format_bytes(pool.format),
                                  pool.scales + slot_offset(slot, scale_strides), pool.has_dynamic_scales};
        quantize_row(row, to, pool.format, lane);
        return;
    }
    device T* to = (device T*)pool.data + at;
    for (int dim = lane; dim < row.dims; dim += SIMD_WIDTH) {
        to[dim] = dim < row.rotary_dim ? T(load_rotated(row, dim)) : row.data[dim];
    }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void append(
    constant AppendParameters& params [[buffer(0)]], device const T* key [[buffer(1)]],
    device const T* value [[buffer(2)]], device uchar* key_pool [[buffer(3)]], device uchar* value_pool [[buffer(4)]],
    device const int* kv_lens [[buffer(5)]], device const int* cu_seqlens [[buffer(6)]],
    device const int* block_table [[buffer(7)]], device const float* rotary [[buffer(8)]],
    device T* query [[buffer(9)]], device float* key_scales [[buffer(10)]],
    device float* value_scales [[buffer(11)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]]) {
    const int lane = int(lane_index);
    const int head = int(group.y);
    const NewToken token = find_token(int(group.x), kv_lens, cu_seqlens, params);
    if (token.sequence < 0) return;
    // Positions outside the table take its first or last row.
    const long last_row = max(params.rotary_positions - 1, 0);
    const long angles_row = max_long(0, min_long(token.position, last_row));
    device const float* angles = rotary + angles_row * long(params.rotary_dim);
    const bool interleaved = params.rotary_interleaved != 0;
    if (head >= 2 * params.kv_heads) {
        device T* row = query + token_offset(token.row, head - 2 * params.kv_heads, params.query_strides);
        rotate_in_place<T>(row, {row, angles, params.head_dim, 0, params.rotary_dim, interleaved}, lane);
        return;
    }
    if (token.position < 0) return;
    const long column = divide_long(token.position, params.block_size);
    if (column >= params.table_blocks) return;
    int page = token.sequence;
    if (params.given_block_table != 0) page = block_table[long(page) * params.block_table_stride + column];
    if (page < 0 || page >= params.blocks) return;

    const bool is_key = head < params.kv_heads;
    const int slot_in_page = int(token.position - column * params.block_size);
    const CacheSlot slot = {page, slot_in_page, is_key ? head : head - params.kv_heads};
    if (is_key) {
        device const T* from = key + token_offset(token.row, slot.head, params.key_strides);
        const NewRow<T> row = {from, angles, params.head_dim, params.rotary_start, params.rotary_dim, interleaved};
        const Pool pool = {key_pool, key_scales, int(params.key_format), params.dynamic_key_scales != 0};
        store_row(row, pool, slot, params.key_pool_strides, params.key_scale_strides, lane);
    } else if (params.value_dim > 0) { // The values of a latent row are a part of it.
        device const T* from = value + token_offset(token.row, slot.head, params.value_strides);
        const NewRow<T> row = {from, angles, params.value_dim, 0, 0, false};
        const Pool pool = {value_pool, value_scales, int(params.value_format), params.dynamic_value_scales != 0};
        store_row(row, pool, slot, params.value_pool_strides, params.value_scale_strides, lane);
    }
}

#define APPEND(T) template [[host_name("append_" #T)]] [[kernel]] decltype(append<T>) append<T>;
APPEND(float)
APPEND(half)
APPEND(bfloat)
