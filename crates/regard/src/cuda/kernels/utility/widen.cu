// Copies keys and values of 8-bit codes into tensors of the queries' type, for the prefill kernels over elements. Codes
// are exact there. Scales that heads share come later. Other scales of keys are copied beside them, and multiply
// scores; other scales of values multiply values here, which are rounded, as probabilities are. Only keys that some row
// sees are copied, and pages become contiguous. A CTA per block of keys of a sequence, or of its values.
#include "common/formats.cuh"
#include "common/grid_dependency.cuh"
#include "common/paging.cuh"
#include "common/stored_format.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KEYS_PER_WARP = 8, BLOCK_KEYS = WARPS * KEYS_PER_WARP;
constexpr int CHUNK = 8; // dims that a thread takes at a time: 16 bytes of the copy

// The rows of a sequence, for common/paging.cuh.
struct Rows {
    int sequence;
    SequenceInfo seq;
};

// Keys, or values: what is copied and where.
struct Side {
    KvTensor from, to;
    CacheFormat format;
    int dims;
    unsigned long long scales; // that values are multiplied by; blocks have theirs inside
    RowStrides scale_strides;
};

static __device__ __forceinline__ long long token_offset(const RowStrides &strides, const KeyPlace &place) {
    return place.batch * strides.batch + place.token * strides.token;
}

// `count` bytes from any address; zeros follow.
static __device__ __forceinline__ uint4 load_bytes(const unsigned char *from, int count) {
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i < count) words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Dims of a chunk as they are stored: codes in the first 8 bytes, elements in all 16.
static __device__ __forceinline__ uint4 load_chunk(const unsigned char *from, int dims, bool is_code, bool aligned) {
    if (!aligned || dims < CHUNK) return load_bytes(from, min(dims, CHUNK) * (is_code ? 1 : 2));
    if (!is_code) return *(const uint4 *)from;
    uint2 codes = *(const uint2 *)from;
    return make_uint4(codes.x, codes.y, 0, 0);
}

// Eight values of a block as codes of i8, and the block's scale. Blocks start at multiples of 2 bytes.
static __device__ __forceinline__ uint4 load_block_chunk(const unsigned char *block, int dim, bool is_nibble,
                                                         float &scale) {
    scale = Element<ElementType::F16>::to_float(*(const unsigned short *)block);
    const unsigned short *from = (const unsigned short *)(block + 2 + dim % (is_nibble ? 16 : 32));
    uint4 codes = make_uint4(from[0] | (unsigned)from[1] << 16, from[2] | (unsigned)from[3] << 16, 0, 0);
    if (!is_nibble) return codes;
    auto extended = [&](unsigned word) {
        // n - 8, whose lowest four bits are n ^ 8.
        unsigned low = ((dim < 16 ? word : word >> 4) & 0x0f0f0f0f) ^ 0x08080808;
        return low | (low & 0x08080808) * 0x1e;
    };
    return make_uint4(extended(codes.x), extended(codes.y), 0, 0);
}

// A pair of bf16, multiplied and rounded.
static __device__ __forceinline__ unsigned multiply(unsigned pair, float scale) {
    typedef Element<ElementType::BF16> E;
    return E::pack(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000) * scale);
}

template <ElementType TYPE, CacheFormat FORMAT> static __device__ __forceinline__ void widen(uint4 &chunk) {
    unsigned first = chunk.x, second = chunk.y;
    widen_codes<TYPE, FORMAT>(first, chunk.x, chunk.y);
    widen_codes<TYPE, FORMAT>(second, chunk.z, chunk.w);
}

template <ElementType TYPE> static __device__ __forceinline__ void widen(CacheFormat format, uint4 &chunk) {
    if (format == CacheFormat::E4M3)
        widen<TYPE, CacheFormat::E4M3>(chunk);
    else if (format == CacheFormat::E5M2)
        widen<TYPE, CacheFormat::E5M2>(chunk);
    else if (format >= CacheFormat::I8) // blocks too
        widen<TYPE, CacheFormat::I8>(chunk);
}

// Where a key is stored.
static __device__ __forceinline__ KeyPlace stored_place(const AttentionParameters &params, const Rows &rows, int key) {
    KeyPlace place = contiguous_place(params, rows, key);
    if (params.block_size) {
        find_paged_place(params, rows, key, place);
        place.batch = page_of(params, place.batch);
    }
    return place;
}

// Copies the keys, or values, of a block that are in `start` to `end`, AT_ONCE per warp at a time. SCALED: values times
// their scales.
template <bool SCALED, int AT_ONCE>
static __device__ __forceinline__ void copy_rows(const AttentionParameters &params, const Rows &rows, Side side,
                                                 ElementType type, bool aligned, int first, int start, int end) {
    int item_bytes = stored_bytes(side.format), lane = threadIdx.x % 32;
    int per_head = (side.dims + CHUNK - 1) / CHUNK, chunks = per_head * params.kv_heads;
#pragma unroll 1
    for (int group = 0; group < KEYS_PER_WARP; group += AT_ONCE) {
        const unsigned char *from[AT_ONCE];
        unsigned short *to[AT_ONCE];
        const float *scales[AT_ONCE];
        bool present[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int key = first + threadIdx.x / 32 + WARPS * (group + i);
            present[i] = key >= start && key < end;
            if (!present[i]) continue;
            to[i] =
                (unsigned short *)side.to.pointer + token_offset(side.to.strides, contiguous_place(params, rows, key));
            KeyPlace place = stored_place(params, rows, key);
            from[i] = (const unsigned char *)side.from.pointer + token_offset(side.from.strides, place) * item_bytes;
            if (SCALED) scales[i] = (const float *)side.scales + token_offset(side.scale_strides, place);
        }
#pragma unroll 1
        for (int at = lane; at < chunks; at += 32) {
            int head = at / per_head, dim = (at - head * per_head) * CHUNK;
            bool is_block = SCALED && has_blocks(side.format);
            long long source = (head * side.from.strides.head + (is_block ? dim / 32 : dim)) * item_bytes,
                      target = head * side.to.strides.head + dim;
            uint4 loaded[AT_ONCE];
            float scale[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (!present[i]) continue;
                if (is_block) {
                    bool is_nibble = side.format == CacheFormat::Q4_0;
                    loaded[i] = load_block_chunk(from[i] + source, dim % 32, is_nibble, scale[i]);
                } else {
                    loaded[i] = load_chunk(from[i] + source, side.dims - dim, has_scales(side.format), aligned);
                    if (SCALED) scale[i] = scales[i][head * side.scale_strides.head];
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (!present[i]) continue;
                uint4 &chunk = loaded[i];
                if (!SCALED && type == ElementType::F16)
                    widen<ElementType::F16>(side.format, chunk);
                else
                    widen<ElementType::BF16>(side.format, chunk);
                if (SCALED) {
                    chunk.x = multiply(chunk.x, scale[i]), chunk.y = multiply(chunk.y, scale[i]);
                    chunk.z = multiply(chunk.z, scale[i]), chunk.w = multiply(chunk.w, scale[i]);
                }
                // Rows of the copy are whole chunks.
                *(uint4 *)(to[i] + target) = chunk;
            }
        }
    }
}

// Copies the scales of keys.
static __device__ __forceinline__ void copy_scales(const AttentionParameters &params, const Rows &rows,
                                                   const CacheParameters &cache, const KeyScales &to, int start,
                                                   int end) {
    for (int i = threadIdx.x; i < (end - start) * params.kv_heads; i += THREADS) {
        int key = start + i / params.kv_heads, head = i % params.kv_heads;
        KeyPlace place = stored_place(params, rows, key);
        const float *from = (const float *)cache.key_scales + token_offset(cache.key_scale_strides, place);
        ((float *)to.pointer)[((long long)rows.sequence * params.kv_heads + head) * to.stride + key] =
            from[head * cache.key_scale_strides.head];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    widen(const __grid_constant__ AttentionParameters params, const __grid_constant__ WidenParameters widening,
          const __grid_constant__ CacheParameters cache) {
    grid_dependency_wait();
    Rows rows;
    // From the last sequence to the first, because prefill begins with the first: L2 holds what was copied last.
    int number = gridDim.x - 1 - blockIdx.x, block = number / 2;
    rows.sequence = block / widening.key_blocks;
    rows.seq = load_sequence(params, rows.sequence);
    const SequenceInfo &seq = rows.seq;
    if (seq.q_len < max(widening.min_query_len, 1)) return;
    int first = (block - rows.sequence * widening.key_blocks) * BLOCK_KEYS;
    int start = max(first, visible_start(params, seq, 0));
    int end = min(first + BLOCK_KEYS, visible_end(params, seq, seq.q_len - 1));
    if (start >= end) return;

    // Field by field, so that they stay in registers.
    bool of_keys = number % 2 == 0;
    Side side;
    side.from = of_keys ? params.keys : params.values;
    side.to = of_keys ? widening.keys : widening.values;
    side.format = of_keys ? cache.key_format : cache.value_format;
    side.dims = of_keys ? params.head_dim : params.value_dim;
    side.scales = cache.value_scales;
    side.scale_strides = cache.value_scale_strides;
    if (!of_keys && widening.scale_values && (side.scales || has_blocks(side.format))) {
        copy_rows<true, 2>(params, rows, side, cache.query_type, widening.aligned, first, start, end);
    } else {
        copy_rows<false, 4>(params, rows, side, cache.query_type, widening.aligned, first, start, end);
        if (of_keys && widening.each_key.pointer) copy_scales(params, rows, cache, widening.each_key, start, end);
    }
}
