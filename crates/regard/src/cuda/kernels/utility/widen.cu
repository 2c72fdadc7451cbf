// Copies keys and values of 8-bit codes into tensors of the queries' type, for the prefill kernels over elements: codes
// are exact there, and their scales, one per head, come later. Only keys that some row sees are copied, and pages
// become contiguous. A CTA per block of keys of a sequence, or of its values.
#include "common/formats.cuh"
#include "common/paging.cuh"

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

    __device__ __forceinline__ bool is_code() const { return format >= CacheFormat::E4M3; }
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
    else if (format == CacheFormat::I8)
        widen<TYPE, CacheFormat::I8>(chunk);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    widen(const __grid_constant__ AttentionParameters params, const __grid_constant__ WidenParameters widening) {
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

    // This warp's keys: where they are, and where they go.
    Side side = number % 2 == 0 ? Side{params.keys, widening.keys, widening.key_format, params.head_dim}
                                : Side{params.values, widening.values, widening.value_format, params.value_dim};
    int item_bytes = side.is_code() ? 1 : 2, lane = threadIdx.x % 32;
    const unsigned char *from[KEYS_PER_WARP];
    unsigned short *to[KEYS_PER_WARP];
    bool present[KEYS_PER_WARP];
#pragma unroll
    for (int i = 0; i < KEYS_PER_WARP; i++) {
        int key = first + threadIdx.x / 32 + WARPS * i;
        present[i] = key >= start && key < end;
        if (!present[i]) continue;
        KeyPlace place = contiguous_place(params, rows, key);
        to[i] = (unsigned short *)side.to.pointer + token_offset(side.to.strides, place);
        if (params.block_size) {
            find_paged_place(params, rows, key, place);
            place.batch = page_of(params, place.batch);
        }
        from[i] = (const unsigned char *)side.from.pointer + token_offset(side.from.strides, place) * item_bytes;
    }
    int per_head = (side.dims + CHUNK - 1) / CHUNK, chunks = per_head * params.kv_heads;
#pragma unroll 1
    for (int at = lane; at < chunks; at += 32) {
        int head = at / per_head, dim = (at - head * per_head) * CHUNK;
        long long source = (head * side.from.strides.head + dim) * item_bytes,
                  target = head * side.to.strides.head + dim;
        uint4 loaded[KEYS_PER_WARP];
#pragma unroll
        for (int i = 0; i < KEYS_PER_WARP; i++)
            if (present[i]) loaded[i] = load_chunk(from[i] + source, side.dims - dim, side.is_code(), widening.aligned);
#pragma unroll
        for (int i = 0; i < KEYS_PER_WARP; i++) {
            if (!present[i]) continue;
            if (widening.query_type == ElementType::F16)
                widen<ElementType::F16>(side.format, loaded[i]);
            else
                widen<ElementType::BF16>(side.format, loaded[i]);
            // Rows of the copy are whole chunks.
            *(uint4 *)(to[i] + target) = loaded[i];
        }
    }
}
