// Loads a cache that is not stored in the type of queries: scales, blocks, and queries in the order of codes. Functions
// of a Worker of decode.cu.
#pragma once
#include "common/formats.cuh"
#include "common/copy.cuh"
#include "common/paging.cuh"
#include "decode/decode_shape.cuh"
#include "decode/decode_tile.cuh"

// The query dim in slot `slot` of the MMAs' k dimension. An MMA step has 16 slots; lane t of a quad holds slots 2t, 2t
// + 1, 2t + 8 and 2t + 9.
static __device__ __forceinline__ int dim_of_slot(int slot) {
    int step = slot >> 4, quad_lane = (slot & 7) >> 1;
    int low = slot & 1, high = slot >> 3 & 1;
    if (KeySide::IS_BYTES) return 16 * step + 4 * quad_lane + low + 2 * high;
    // Bytes 0 and 2 of a lane's word are converted together. Codes of the first block of a pair start at half a word:
    // lanes are two codes ahead.
    int block = step >> 1, ahead = block & 1 ? 0 : 2, byte = 4 * quad_lane + 2 * low + high + ahead;
    if (KeySide::IS_Q8_0) return 32 * block + ((16 * (step & 1) + byte) & 31);
    return 32 * block + 16 * (step & 1) + (byte & 15); // a byte has two nibbles
}

// Whether codes of keys in blocks become exact operands: where an MMA more per row tile would cost more than that, and
// in batch-invariant mode, where all tiles add in the same order.
static __device__ __forceinline__ bool has_exact_keys(const AttentionParameters &params) {
    return MMA_ROW_TILES > 1 || (TILE_HEADS == 1 && params.batch_invariant);
}

// Whether keys of a sequence have different scales.
static __device__ __forceinline__ bool varies(const AttentionParameters &params, const RowStrides &strides) {
    return strides.token != 0 || (params.block_size && strides.batch != 0);
}

// The offset of a tile's head in a tensor with a row per key, in elements: in the pool if paged, else of the sequence.
static __device__ __forceinline__ long long row_start(const AttentionParameters &params, const Tile &tile,
                                                      const RowStrides &strides) {
    long long at = tile.kv_head * strides.head;
    if (!params.block_size)
        at += params.cu_seqlens_k ? tile.seq.kv_start * strides.token : tile.sequence * strides.batch;
    return at;
}

// The offset of a key's row from there. `entry`: of the page table.
template <class Worker>
static __device__ __forceinline__ long long row_offset(const Worker &w, int key, int entry, const RowStrides &strides) {
    if (!w.params.block_size) return key * strides.token;
    return page_of(w.params, entry) * strides.batch + page_slot(w.params, key, w.entry_of(key)) * strides.token;
}

// The first scale of a tile's head.
static __device__ __forceinline__ const float *scale_start(const AttentionParameters &params, const Tile &tile,
                                                           unsigned long long scales, const RowStrides &strides) {
    return (const float *)scales + row_start(params, tile, strides);
}

// Starts the copies of a K tile's scales: of keys, then of values. Keys outside of the worker's range get zeros.
template <class Worker, class RunPages>
static __device__ __forceinline__ void load_scales(const Worker &w, unsigned to, int key_tile, const RunPages &runs) {
    if (!w.keys_scaled && !w.values_scaled) return;
    if (WARPS_PER_GROUP > 1 && threadIdx.x / 32 % WARPS_PER_GROUP) return;
    const RowStrides &keys = w.cache.key_scale_strides, &values = w.cache.value_scale_strides;
#pragma unroll
    for (int i = w.lane; i < TILE_KEYS; i += 32) {
        int key = key_tile * TILE_KEYS + i;
        bool present = key >= w.key_start && key < w.key_end;
        int near = present ? key : w.key_start, entry = runs.entry[0];
        if (IS_FALLBACK && w.params.load_kind != LoadKind::PageAligned16) {
            entry = w.look_up(near);
        } else {
            near = key;
#pragma unroll
            for (int k = 1; k < MMA_KEY_TILES; k++)
                if (i >= 16 * k) entry = runs.entry[k];
        }
        if (w.keys_scaled)
            cp_async_word(to + i * 4,
                          scale_start(w.params, w.tile, w.cache.key_scales, keys) + row_offset(w, near, entry, keys),
                          present);
        if (w.values_scaled)
            cp_async_word(to + (TILE_KEYS + i) * 4,
                          scale_start(w.params, w.tile, w.cache.value_scales, values) +
                              row_offset(w, near, entry, values),
                          present);
    }
}

// 16 bytes of a row of blocks, from byte `at` on; zeros behind the row's end. The row starts at a multiple of two
// bytes: words that have some of its bytes are loaded, and none else.
static __device__ __forceinline__ uint4 load_unaligned_chunk(unsigned long long row, int at, int row_bytes) {
    unsigned long long from = row + at;
    bool odd = from & 2;
    const unsigned *word = (const unsigned *)(from & ~3ull);
    int end = row_bytes - at + (odd ? 2 : 0); // bytes from the first word on to the row's end
    unsigned words[5], four[4];
#pragma unroll
    for (int i = 0; i < 5; i++) words[i] = 4 * i < end && (i < 4 || odd) ? word[i] : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        four[i] = odd ? __byte_perm(words[i], words[i + 1], 0x5432) : words[i];
        int left = row_bytes - at - 4 * i;
        if (left < 4) four[i] &= left > 0 ? 0xffffu : 0;
    }
    return make_uint4(four[0], four[1], four[2], four[3]);
}

// Blocks anywhere, 16 bytes at a time.
template <class Side, bool KEYS, class Worker> static __device__ __forceinline__ void
load_scattered_blocks(const Worker &w, unsigned to, unsigned long long base, int dims, int key_tile) {
    constexpr int CHUNKS = (Side::ROW_BYTES + 15) / 16, ROUNDS = TILE_KEYS * CHUNKS;
    static_assert(16 * CHUNKS <= Side::PITCH, "whole chunks are stored");
    int row_bytes = dims / 32 * Side::BLOCK_BYTES;
#pragma unroll 2
    for (int i = threadIdx.x % THREADS_PER_GROUP; i < ROUNDS; i += THREADS_PER_GROUP) {
        int row = i / CHUNKS, at = (i - row * CHUNKS) * 16, key = key_tile * TILE_KEYS + row;
        uint4 chunk = make_uint4(0, 0, 0, 0);
        if (key >= w.key_start && key < w.key_end && at < row_bytes) {
            long long key_offset, value_offset;
            w.locate(key, w.look_up(key), key_offset, value_offset);
            chunk = load_unaligned_chunk(base + (KEYS ? key_offset : value_offset) * Side::BLOCK_BYTES, at, row_bytes);
        }
        st_shared_v4(to + row * Side::PITCH + at, chunk);
    }
}

// A power of two that brings the largest element of a row of queries to the top of f16's range: elements down to 2^-29
// of it stay exact (2^-25 where they are multiplied with nibbles, whose upper ones are 16 times too large as operands).
// LANES lanes have the row; `most`: the largest element of this one.
template <int LANES> static __device__ __forceinline__ WeightScale query_power(float most) {
    if (LANES == 32) {
        most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    } else {
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    }
    return weight_scale(most);
}

// Loads queries as f16, a warp per row. Stores their dims in the order of codes. Multiplies each row by a power of two,
// and stores the inverse powers. f16 rows are not multiplied, except for nibbles.
template <class Worker> static __device__ __forceinline__ void load_code_queries(const Worker &w) {
    if constexpr (KeySide::HAS_CODES) {
        constexpr int SLOTS = HEAD_DIM / 32; // per lane
#pragma unroll(TILE_ROWS == 8 ? 1 : 4)
        for (int slot = threadIdx.x >> 5; slot < TILE_ROWS; slot += computing_threads() >> 5) {
            int row = w.tile.row_of_slot(w.params, slot);
            bool present = row >= 0;
            int head, token;
            w.tile.find_row(w.params, max(row, 0), head, token);
            const Bits *from = (const Bits *)w.params.query.pointer + w.tile.sequence * w.params.query.strides.batch +
                               (long long)(w.tile.seq.q_start + token) * w.params.query.strides.token +
                               head * w.params.query.strides.head;
            float value[SLOTS], most = 0.0f;
#pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                int dim = dim_of_slot(w.lane * SLOTS + i);
                value[i] = present && (!IS_FALLBACK || dim < w.params.head_dim) ? E::to_float(from[dim]) : 0.0f;
                most = fmaxf(most, fabsf(value[i]));
            }
            WeightScale power = {1.0f, 1.0f};
            bool has_nibbles = KEY_CLASS == CacheClass::Q4_0 && !has_exact_keys(w.params);
            if (has_nibbles || ElementType(ELEMENT_TYPE) == ElementType::BF16) power = query_power<32>(most);
            if (w.lane == 0) w.shared.query_scale[slot] = power.inverse;
#pragma unroll
            for (int i = 0; i < SLOTS; i += 2) {
                int slot_of_dim = w.lane * SLOTS + i, at = slot_of_dim * 2;
                float each = has_nibbles && slot_of_dim / 16 % 2 ? power.factor * 0.0625f : power.factor;
                unsigned to = swizzle(w.query, slot, QUERY_PITCH, at % 128) + at / 128 * 128;
                *(unsigned *)__cvta_shared_to_generic(to) =
                    Element<ElementType::F16>::pack(value[i] * each, value[i + 1] * each);
            }
        }
    }
}
