// Appends new keys and values to a cache, with optional RoPE on keys, and on queries in place; quantizes to pools of
// codes or blocks. A warp per head of a token. Tokens past the end of the page table, or whose entry names no page, are
// dropped.
#include "common/paging.cuh"
#include "utility/quantize.cuh"

// The sequence of new token `index`, the token's place among that sequence's new tokens, and their count.
static __device__ __forceinline__ int find_sequence(const AppendParameters &params, int index, int &place, int &count) {
    if (!params.cu_seqlens) {
        int sequence = index / params.new_tokens;
        place = index - sequence * params.new_tokens;
        count = params.new_tokens;
        return sequence < params.batch ? sequence : -1;
    }
    const int *cumulative = (const int *)params.cu_seqlens;
    // Binary search for the last sequence that starts at or before the token, past empty ones.
    int low = 0, high = params.batch;
    while (low < high) {
        int middle = (low + high) / 2;
        if (cumulative[middle + 1] <= index)
            low = middle + 1;
        else
            high = middle;
    }
    if (low >= params.batch || index < cumulative[low]) return -1;
    place = index - cumulative[low];
    count = cumulative[low + 1] - cumulative[low];
    return low;
}

// RoPE of element `i` of a head: the element that it is rotated with, and their angle.
struct RotaryPair {
    int partner, angle;
    bool first; // whether `i` is the first of the two
};

// `half`: of the dims that are rotated.
static __device__ __forceinline__ RotaryPair find_rotary_pair(const AppendParameters &params, int half, int i) {
    bool first = params.rotary_interleaved ? i % 2 == 0 : i < half;
    int angle = params.rotary_interleaved ? i / 2 : i % half;
    int partner = params.rotary_interleaved ? i ^ 1 : first ? i + half : i - half;
    return {partner, angle, first};
}

// Element `i` of a head after RoPE, computed with its partner.
static __device__ __forceinline__ float rotated(const AppendParameters &params, unsigned long long head, long long at,
                                                int i, const float *angles) {
    float x = load_element(head, at + i, params.element_type);
    if (!angles || i >= params.rotary_dim) return x;
    int half = params.rotary_dim / 2;
    RotaryPair pair = find_rotary_pair(params, half, i);
    float y = load_element(head, at + pair.partner, params.element_type);
    float cosine = angles[pair.angle], sine = angles[half + pair.angle];
    return pair.first ? x * cosine - y * sine : x * cosine + y * sine;
}

// A new row of keys or values.
struct Source {
    unsigned long long tensor;
    long long offset; // in elements
    int dims;
    const float *angles; // of RoPE; null if it is not rotated
};

// The destination of a row in a pool.
struct Target {
    unsigned long long pool;
    CacheFormat format;
    long long offset; // in elements or blocks
    float *scale;     // of codes
    int dynamic_scale;
};

static __device__ __forceinline__ long long slot_offset(const RowStrides &strides, int page, int slot, int head) {
    return page * strides.batch + slot * strides.token + head * strides.head;
}

// Quantizes a row, after RoPE if there are angles: of the dims from `rotary_start` on. Rotations are rounded as the CPU
// rounds them: products and sums each.
static __device__ __forceinline__ void append_quantized(const AppendParameters &params, const Source &source,
                                                        const Target &target, int lane) {
    WarpRow row;
    row.dims = source.dims;
    int half = params.rotary_dim / 2;
#pragma unroll
    for (int step = 0; step < MAX_ROW_STEPS; step++) {
        int i = 32 * step + lane;
        row.values[step] = 0.0f;
        if (i >= source.dims) continue;
        float x = load_element(source.tensor, source.offset + i, params.element_type);
        int rotary = i - params.rotary_start;
        if (source.angles && rotary >= 0 && rotary < params.rotary_dim) {
            RotaryPair pair = find_rotary_pair(params, half, rotary);
            float y =
                load_element(source.tensor, source.offset + params.rotary_start + pair.partner, params.element_type);
            float product = __fmul_rn(y, source.angles[half + pair.angle]);
            x = __fadd_rn(__fmul_rn(x, source.angles[pair.angle]), pair.first ? -product : product);
        }
        row.values[step] = x;
    }
    if (target.format == CacheFormat::Mla656) {
        store_mla656(row, (unsigned char *)target.pool + target.offset * 656, lane);
        return;
    }
    if (is_block(target.format)) {
        int bytes = target.format == CacheFormat::Q8_0 ? 34 : 18;
        store_blocks(row, target.format, (unsigned char *)target.pool + target.offset * bytes, lane);
        return;
    }
    float scale;
    if (target.dynamic_scale) {
        scale = dynamic_scale(row, target.format);
        if (lane == 0) *target.scale = scale;
    } else {
        scale = *target.scale;
    }
    store_codes(row, target.format, scale, (unsigned char *)target.pool + target.offset, lane);
}

extern "C" __global__ void __launch_bounds__(256) append(const __grid_constant__ AppendParameters params) {
    int lane = threadIdx.x & 31;
    long long work = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    int heads = 2 * params.kv_heads + (params.query.pointer ? params.query_heads : 0);
    int token = (int)(work / heads), head = (int)(work - (long long)token * heads);
    if (token >= params.tokens) return;
    int place, count;
    int sequence = find_sequence(params, token, place, count);
    if (sequence < 0) return;
    long long position = (long long)((const int *)params.kv_lens)[sequence] - count + place;
    const float *angles = 0;
    if (params.rotary) {
        long long row = min(max(position, 0ll), (long long)params.rotary_positions - 1);
        angles = (const float *)params.rotary + row * params.rotary_dim;
    }
    if (head >= 2 * params.kv_heads) {
        // A query in place: read all elements before any is written.
        long long at = token * params.query.strides.token + (head - 2 * params.kv_heads) * params.query.strides.head;
        float values[18]; // 576 / 32
#pragma unroll
        for (int j = 0; j < 18; j++)
            if (lane + 32 * j < params.rotary_dim)
                values[j] = rotated(params, params.query.pointer, at, lane + 32 * j, angles);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 18; j++)
            if (lane + 32 * j < params.rotary_dim)
                store_element(params.query.pointer, at + lane + 32 * j, params.element_type, values[j]);
        return;
    }
    if (position < 0) return;
    long long column = position / params.block_size;
    int slot = (int)(position - column * params.block_size);
    if (column >= params.table_blocks) return;
    int page = sequence;
    if (params.block_table) page = page_table(params, sequence)[column];
    if (page < 0 || page >= params.blocks) return;
    bool key = head < params.kv_heads;
    if (!key) head -= params.kv_heads;
    unsigned long long from = key ? params.new_keys.pointer : params.new_values.pointer,
                       to = key ? params.keys.pointer : params.values.pointer;
    long long source = key ? token * params.new_keys.strides.token + head * params.new_keys.strides.head
                           : token * params.new_values.strides.token + head * params.new_values.strides.head;
    long long target = slot_offset(key ? params.keys.strides : params.values.strides, page, slot, head);
    int dims = key ? params.head_dim : params.value_dim;
    if (!dims) return; // The values of a latent row are a part of it.
    bool rotates = key && angles;
    CacheFormat format = key ? params.cache.key_format : params.cache.value_format;
    if (is_code(format) || is_block(format) || format == CacheFormat::Mla656) {
        const RowStrides &strides = key ? params.cache.key_scale_strides : params.cache.value_scale_strides;
        float *scales = (float *)(key ? params.cache.key_scales : params.cache.value_scales);
        Target quantized = {to, format, target, scales + slot_offset(strides, page, slot, head),
                            key ? params.dynamic_key_scales : params.dynamic_value_scales};
        append_quantized(params, {from, source, dims, rotates ? angles : 0}, quantized, lane);
        return;
    }
    // 16-byte copies where nothing is rotated and both ends are aligned.
    long long bytes = (long long)dims * params.element_bytes;
    unsigned long long source_address = from + source * params.element_bytes,
                       target_address = to + target * params.element_bytes;
    if (!rotates && ((source_address | target_address | bytes) & 15) == 0) {
        for (long long i = lane * 16; i < bytes; i += 512)
            *(uint4 *)(target_address + i) = *(const uint4 *)(source_address + i);
        return;
    }
    for (int i = lane; i < dims; i += 32) {
        if (rotates) {
            store_element(to, target + i, params.element_type, rotated(params, from, source, i, angles));
        } else if (params.element_bytes == 2) {
            ((unsigned short *)to)[target + i] = ((const unsigned short *)from)[source + i];
        } else {
            ((unsigned *)to)[target + i] = ((const unsigned *)from)[source + i];
        }
    }
}
