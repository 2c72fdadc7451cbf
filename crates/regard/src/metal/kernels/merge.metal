// Merges partial results over disjoint sets of keys (a shared prefix and its suffixes, caches spread over devices):
// outputs and log-sum-exps (LSE), as state.rs does. One SIMD group per row.

// Rows per threadgroup; see metal/merge.rs.
constant int MERGE_SIMD_GROUPS = 4;
constant float LOG2_E = 1.44269504088896340736f;

// Whether a part saw a key. As bits: fast math does not preserve a minus infinity in arithmetic.
METAL_FUNC bool saw_keys(float lse) { return as_type<uint>(lse) != MINUS_INFINITY; }

struct RowLse {
    device const float* parts;
    long stride;
    int count;
    // The largest LSE, and the sum of exp(lse - max); a sum of 0 if no part saw a key.
    float max;
    float sum;
};

METAL_FUNC RowLse load_row_lse(device const float* parts, int lane, constant MergeParameters& params) {
    RowLse row = {parts, params.part_lse_stride, params.count, -3.402823466e+38f, 0.0f};
    for (int k = lane; k < row.count; k += SIMD_WIDTH) {
        const float lse = parts[k * row.stride];
        row.max = saw_keys(lse) ? max(row.max, lse) : row.max;
    }
    UNROLL
    for (int bit = 1; bit < SIMD_WIDTH; bit *= 2) row.max = max(row.max, simd_shuffle_xor(row.max, ushort(bit)));
    for (int k = lane; k < row.count; k += SIMD_WIDTH) {
        const float lse = parts[k * row.stride];
        row.sum += saw_keys(lse) ? exp2((lse - row.max) * LOG2_E) : 0.0f;
    }
    UNROLL
    for (int bit = 1; bit < SIMD_WIDTH; bit *= 2) row.sum += simd_shuffle_xor(row.sum, ushort(bit));
    return row;
}

METAL_FUNC void store_float(device uchar* to, long at, ElementType type, float value) {
    if (type == ElementType::F32) ((device float*)to)[at] = value;
    else if (type == ElementType::F16) ((device half*)to)[at] = half(value);
    else ((device bfloat*)to)[at] = bfloat(value);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void merge(
    constant MergeParameters& params [[buffer(0)]], device const T* parts [[buffer(1)]],
    device const float* part_lse [[buffer(2)]], device uchar* out [[buffer(3)]], device uint* lse [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]]) {
    const int lane = int(lane_index);
    const long index = long(group.x) * MERGE_SIMD_GROUPS + long(simdgroup_index);
    if (index >= params.rows) return;
    const RowLse row = load_row_lse(part_lse + index, lane, params);
    const bool is_empty = row.sum == 0.0f;
    const float inverse = is_empty ? 0.0f : 1.0f / row.sum;
    for (int dim = lane; dim < params.dim; dim += SIMD_WIDTH) {
        float sum = 0.0f;
        for (int k = 0; k < params.count; k++) {
            const float part = row.parts[k * row.stride];
            // The output of an empty part is never read.
            if (!saw_keys(part)) continue;
            const float weight = exp2((part - row.max) * LOG2_E) * inverse;
            if (weight == 0.0f) continue;
            sum = fma(weight, float(parts[k * params.part_stride + index * params.dim + dim]), sum);
        }
        store_float(out, index * params.dim + dim, params.out_type, sum);
    }
    if (params.writes_lse != 0 && lane == 0)
        lse[index] = is_empty ? MINUS_INFINITY : as_type<uint>(row.max + log(row.sum));
}

#define MERGE(T) template [[host_name("merge_" #T)]] [[kernel]] decltype(merge<T>) merge<T>;
MERGE(float)
MERGE(half)
MERGE(bfloat)
