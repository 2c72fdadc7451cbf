// Lengths and positions of one sequence, and the keys that a row sees: docs/semantics.md, on the device.
// Lengths and page-table entries that only the device knows are clamped to what the operands can hold.
#pragma once
#include "common/parameters.cuh"

// Whether rows may see ranges that do not move by one key per row: chunked attention, and keys at every second, third,
// ... position. Specialized modules are not selected for those, except that decode over latent caches takes strides.
#if defined(FALLBACK) && !FALLBACK
#define HAS_CHUNKS 0
#else
#define HAS_CHUNKS 1
#endif
#ifndef HAS_STRIDED_KEYS
#define HAS_STRIDED_KEYS HAS_CHUNKS
#endif

// Whether rows have lists of the keys that they attend to (lists.cuh).
#ifndef LISTS
#define LISTS 0
#endif

struct SequenceInfo {
    int q_start, q_len;
    int kv_start, kv_len;
    int first_key;    // keys before it are attended to elsewhere (prefix groups)
    long long offset; // position of the first row, counted from that of the first key
#if HAS_CHUNKS
    int key_offset; // position of the first key
#endif
#if LISTS
    int list_row;    // the row that this is
    int sequence;    // the row's sequence
    int first_token; // the row's number in it
    int new_tokens;  // the first key that is a new token
    int walked;      // entries of the longest list of its heads
#endif
};

static __device__ __forceinline__ int clamp_int(int x, int low, int high) { return min(max(x, low), high); }

static __device__ __forceinline__ SequenceInfo load_sequence(const AttentionParameters &params, int index) {
    SequenceInfo s;
    s.q_start = 0;
    s.q_len = params.query_len;
    if (params.cu_seqlens_q) {
        const int *cumulative = (const int *)params.cu_seqlens_q + index;
        s.q_start = clamp_int(cumulative[0], 0, params.query_len);
        s.q_len = min(clamp_int(cumulative[1], s.q_start, params.query_len) - s.q_start, params.query_len_bound);
    }
    s.kv_start = 0;
    s.kv_len = params.kv_len;
    if (params.cu_seqlens_k) {
        const int *cumulative = (const int *)params.cu_seqlens_k + index;
        s.kv_start = clamp_int(cumulative[0], 0, params.kv_len);
        s.kv_len = min(clamp_int(cumulative[1], s.kv_start, params.kv_len) - s.kv_start, params.kv_len_bound);
    }
    if (params.kv_lens) s.kv_len = clamp_int(((const int *)params.kv_lens)[index], 0, s.kv_len);
#if LISTS
    s.list_row = s.sequence = index;
    s.first_token = s.new_tokens = s.walked = 0;
#endif
    s.first_key = params.first_keys ? ((const int *)params.first_keys)[index] : 0;
    s.offset = params.offset_kind == OffsetKind::BottomRight ? (long long)s.kv_len - s.q_len
               : params.offset_kind == OffsetKind::Same      ? params.q_offset
                                                             : (long long)((const int *)params.q_offsets)[index];
    const KeyPositions &keys = params.key_positions;
    int key_offset = keys.offsets ? ((const int *)keys.offsets)[index] : (int)keys.offset;
    s.offset -= key_offset;
#if HAS_CHUNKS
    s.key_offset = key_offset;
#endif
    return s;
}

// The element type of an additive mask.
static __device__ __forceinline__ ElementType mask_element(MaskKind kind) {
    return kind == MaskKind::F32 ? ElementType::F32 : kind == MaskKind::F16 ? ElementType::F16 : ElementType::BF16;
}

// A head's ALiBi slope, clamped to +-2^60 so that no distance makes a bias overflow. The host cannot check slopes that
// are on the device.
static __device__ __forceinline__ float load_slope(const AttentionParameters &params, int head) {
    constexpr float LARGEST = 1152921504606846976.0f;
    return fminf(fmaxf(((const float *)params.alibi_slopes)[head], -LARGEST), LARGEST);
}

static __device__ __forceinline__ bool has_uneven_ranges(const AttentionParameters &params) {
    return (HAS_CHUNKS && params.chunk.length) || (HAS_STRIDED_KEYS && params.key_positions.stride > 1);
}

#if HAS_CHUNKS
// Chunked attention: the start of the chunk that a position is in; both are counted from the position of the first key.
// The quotient is exact, because a position times a chunk's length is below 2^64.
static __device__ __forceinline__ long long chunk_start(const AttentionParameters &params, const SequenceInfo &s,
                                                        long long position) {
    position += s.key_offset;
    bool negative = position < 0;
    unsigned long long distance = negative ? params.chunk.length - 1 - position : position;
    long long start = (long long)__umul64hi(distance, params.chunk.inverse) * params.chunk.length;
    return (negative ? -start : start) - s.key_offset;
}
#endif

// Keys before a position, which is counted from that of the first key. The quotient is exact: a stride is at most 2^15,
// and a distance below 2^47.
static __device__ __forceinline__ long long keys_before(const AttentionParameters &params, const SequenceInfo &s,
                                                        long long position) {
    const KeyPositions &keys = params.key_positions;
    if (!HAS_STRIDED_KEYS || keys.stride == 1) return position;
    long long distance = max(0ll, min(position, s.kv_len * keys.stride));
    return (long long)__umul64hi(distance + keys.stride - 1, keys.inverse);
}

// One past the last key that row `token` sees by length, causality, window and chunk.
static __device__ __forceinline__ int visible_end(const AttentionParameters &params, const SequenceInfo &s, int token) {
    long long position = s.offset + token, end = position + params.window.right + 1;
#if HAS_CHUNKS
    if (params.chunk.length) end = min(end, chunk_start(params, s, position) + params.chunk.length);
#endif
    end = keys_before(params, s, end);
    return (int)max(0ll, min(end, (long long)s.kv_len));
}

// The first key that row `token` sees. `end`: one past its last one.
static __device__ __forceinline__ int visible_start(const AttentionParameters &params, const SequenceInfo &s, int token,
                                                    int end) {
    long long position = s.offset + token, start = position - params.window.left;
#if HAS_CHUNKS
    if (params.chunk.length) start = max(start, chunk_start(params, s, position));
#endif
    start = keys_before(params, s, start);
    return (int)max(0ll, min(max(start, (long long)s.first_key), (long long)end));
}
static __device__ __forceinline__ int visible_start(const AttentionParameters &params, const SequenceInfo &s,
                                                    int token) {
    return visible_start(params, s, token, visible_end(params, s, token));
}

// Keys from `start` up to `end`, which is not one of them.
struct KeyRange {
    int start, end;
};

// The keys that row `token` sees.
static __device__ __forceinline__ KeyRange visible_keys(const AttentionParameters &params, const SequenceInfo &s,
                                                        int token) {
    int end = visible_end(params, s, token);
    return {visible_start(params, s, token, end), end};
}
