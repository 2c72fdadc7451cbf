// Loads a cache in any format under queries of any type, in kernels that multiply f32. Functions of a Worker of
// decode.cu.
//
// cp.async copies a K tile's rows as they are stored, and its group of warps waits for them while other groups
// multiply: one stage and more groups are faster than two stages (docs/perf/cuda.md). Then the rows become f32, in
// place: a stage has room for f32 rows of keys and of values, and stored rows are at the end of that room, in order. A
// converted row ends before the stored rows after it begin.
#pragma once
#include "common/copy.cuh"
#include "common/formats.cuh"
#include "common/stored_format.cuh"
#include "decode/decode_cache.cuh"

#if CACHE == 4
static_assert(TILE_KEYS == 16, "a lane per key and per value");
static_assert(HEAD_DIM == VALUE_DIM && KEY_PITCH == VALUE_PITCH, "keys and values take turns in one loop");

// How a side, keys or values, is stored. The last dims of keys may be in a tensor of their own: a second part of rows,
// which has the format and the scales of the first.
struct StoredLayout {
    CacheFormat format;
    int dims, first_part_dims;
    int bytes[2];    // of the parts of a row
    bool joined;     // four elements may be of both parts: the second follows the first without a gap
    int second_part; // its place in a row in shared memory
    int pitch;       // from row to row there

    static __device__ __forceinline__ int row_bytes(CacheFormat format, int dims) {
        if (has_blocks(format)) dims /= 32;
        return (format == CacheFormat::Mla656 ? 1 : dims) * stored_bytes(format);
    }

    template <class Worker> __device__ __forceinline__ StoredLayout(const Worker &w, bool of_keys) {
        format = of_keys ? w.cache.key_format : w.cache.value_format;
        dims = of_keys ? w.params.head_dim : w.params.value_dim;
        bool two_parts = of_keys && w.rotary.pointer;
        first_part_dims = two_parts ? w.params.value_dim : dims;
        bytes[0] = row_bytes(format, first_part_dims);
        bytes[1] = two_parts ? row_bytes(format, dims - first_part_dims) : 0;
        joined = two_parts && first_part_dims % 4 != 0;
        // Parts start up to 15 bytes past a multiple of 16.
        second_part = (bytes[0] + 30) & ~15;
        pitch = second_part + (two_parts ? (bytes[1] + 30) & ~15 : 0);
    }

    // Where stored rows start in a stage.
    __device__ __forceinline__ unsigned start(unsigned stage, bool of_keys) const {
        return stage + (of_keys ? 1 : 2) * STORED_SIDE_BYTES - TILE_KEYS * pitch;
    }
};

// What is known of a row in shared memory: the scale of its codes, and how far past a multiple of 16 bytes its parts
// start, in the lower and the upper half of a word.
static __device__ __forceinline__ unsigned row_notes(unsigned stage, int row, bool of_keys) {
    return stage + 2 * STORED_SIDE_BYTES + (row + (of_keys ? 0 : TILE_KEYS)) * ROW_NOTE_BYTES;
}

#if LISTS
// The scale of a listed key or its value.
template <bool KEYS, class Worker>
static __device__ __forceinline__ const float *listed_scale(const Worker &w, const ListedKey &listed) {
    KeyPlace place = listed.place;
    if (listed.in_second) {
        const SecondCache &second = lists_of(w.params).second;
        const RowStrides &strides = KEYS ? second.key_scale_strides : second.value_scale_strides;
        return (const float *)(KEYS ? second.key_scales : second.value_scales) + place.batch * strides.batch +
               place.token * strides.token + w.tile.kv_head * strides.head;
    }
    const RowStrides &strides = KEYS ? w.cache.key_scale_strides : w.cache.value_scale_strides;
    return scale_start(w.params, w.tile, KEYS ? w.cache.key_scales : w.cache.value_scales, strides) +
           (w.params.block_size ? place.batch * strides.batch : 0) + place.token * strides.token;
}
#endif

// The row of a key or its value in memory.
struct StoredRow {
    unsigned long long parts[2]; // 0 if the row does not exist
    const float *scale;          // of its codes, if they have one
};

template <class Worker>
static __device__ __forceinline__ StoredRow find_stored_row(const Worker &w, int key, bool of_keys) {
    StoredRow row = {{0, 0}, nullptr};
    if (key < w.key_start || key >= w.key_end) return row;
    unsigned long long base = of_keys ? w.tile.key_base : w.tile.value_base;
    unsigned long long scales = of_keys ? w.cache.key_scales : w.cache.value_scales;
    const RowStrides &rotary_strides = w.rotary.strides;
    int bytes = stored_bytes(of_keys ? w.cache.key_format : w.cache.value_format);
    unsigned long long rotary = w.rotary.pointer + row_start(w.params, w.tile, rotary_strides) * bytes;
#if LISTS
    ListedKey listed = find_listed_key(w.params, w.tile, key);
    if (listed.key < 0) return row;
    row.parts[0] = of_keys ? w.template listed_address<true>(listed, base, bytes)
                           : w.template listed_address<false>(listed, base, bytes);
    row.parts[1] = rotary + ((w.params.block_size ? listed.place.batch * rotary_strides.batch : 0) +
                             listed.place.token * rotary_strides.token) *
                                bytes;
    if (scales) row.scale = of_keys ? listed_scale<true>(w, listed) : listed_scale<false>(w, listed);
#else
    const RowStrides &strides = of_keys ? w.params.keys.strides : w.params.values.strides;
    const RowStrides &scale_strides = of_keys ? w.cache.key_scale_strides : w.cache.value_scale_strides;
    int entry = w.look_up(key);
    row.parts[0] = base + row_offset(w, key, entry, strides) * bytes;
    row.parts[1] = rotary + row_offset(w, key, entry, rotary_strides) * bytes;
    if (scales)
        row.scale = scale_start(w.params, w.tile, scales, scale_strides) + row_offset(w, key, entry, scale_strides);
#endif
    return row;
}

// Copies rows of keys whose parts are joined, byte by byte.
template <class Worker> static __device__ __forceinline__ void
copy_joined(const Worker &w, unsigned rows, const StoredLayout &layout, const StoredRow &mine) {
#pragma unroll 1
    for (int row = threadIdx.x / 32 % WARPS_PER_GROUP; row < TILE_KEYS; row += WARPS_PER_GROUP) {
        const unsigned char *first = (const unsigned char *)__shfl_sync(~0u, mine.parts[0], row),
                            *second = (const unsigned char *)__shfl_sync(~0u, mine.parts[1], row) - layout.bytes[0];
        unsigned char *to = (unsigned char *)__cvta_shared_to_generic(rows + row * layout.pitch);
#pragma unroll 1
        for (int at = w.lane; at < layout.bytes[0] + layout.bytes[1]; at += 32)
            to[at] = first ? (at < layout.bytes[0] ? first : second)[at] : 0;
    }
}

// Starts the copies of a K tile's rows, as they are stored, into a pipeline stage. Rows that do not exist are zeros.
template <class Worker>
static __device__ __forceinline__ void fetch_stored(const Worker &w, unsigned stage, int key_tile) {
    // The rows of keys by the first 16 lanes, those of values by the others.
    bool of_keys = w.lane < TILE_KEYS;
    StoredRow mine = find_stored_row(w, key_tile * TILE_KEYS + w.lane % TILE_KEYS, of_keys);
    int warp = threadIdx.x / 32 % WARPS_PER_GROUP;
    if (warp == 0) {
        unsigned notes = row_notes(stage, w.lane % TILE_KEYS, of_keys);
        bool joined = of_keys && StoredLayout(w, true).joined;
        if (mine.scale) {
            cp_async_word(notes, mine.scale, true);
        } else {
            st_shared_word(notes, __float_as_uint(1.0f));
        }
        st_shared_word(notes + 4, joined ? 0 : ((unsigned)mine.parts[1] & 15) << 16 | ((unsigned)mine.parts[0] & 15));
    }
    constexpr int LANES = 8, AT_ONCE = 32 / LANES;                       // lanes per row, and rows
    constexpr int ROUNDS = TILE_KEYS / AT_ONCE, WARPS = WARPS_PER_GROUP; // of rows
#pragma unroll 1
    for (int side = 0; side < 2; side++) {
        StoredLayout layout(w, side == 0);
        unsigned rows = layout.start(stage, side == 0);
        if (layout.joined) {
            copy_joined(w, rows, layout, mine);
            continue;
        }
#pragma unroll 1
        for (int part = 0; part < (layout.bytes[1] ? 2 : 1); part++) {
            if (warp >= ROUNDS) break;
            constexpr int MINE = WARPS < ROUNDS ? ROUNDS / WARPS : 1;
            unsigned long long from[MINE];
            int end[MINE], longest = 0;
            unsigned to = rows + (warp * AT_ONCE + w.lane / LANES) * layout.pitch + part * layout.second_part;
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                int row = (warp + i * WARPS) * AT_ONCE + w.lane / LANES;
                from[i] = __shfl_sync(~0u, part ? mine.parts[1] : mine.parts[0], side * TILE_KEYS + row);
                end[i] = (int)(from[i] & 15) + (part ? layout.bytes[1] : layout.bytes[0]);
                longest = max(longest, end[i]);
            }
#pragma unroll 1
            for (int at = w.lane % LANES * 16; at < longest; at += LANES * 16)
#pragma unroll
                for (int i = 0; i < MINE; i++)
                    if (at < end[i])
                        cp_async_sectors(to + i * WARPS * AT_ONCE * layout.pitch + at,
                                         (const void *)((from[i] & ~15ull) + at), from[i] ? min(end[i] - at, 16) : 0);
        }
    }
}

// Where a thread finds four elements of rows in shared memory, `dim` and the three after it, and how they become f32.
struct StoredColumn {
    int at, scale_at;   // bytes from the start of a row, or of its second part
    int note_shift;     // 16 in the second part, whose notes are in an upper half
    int nibble_shift;   // 4 in the second half of a block of nibbles
    CacheFormat format; // of these elements: latent rows have codes and bf16
    bool has_scale_in_row;

    __device__ __forceinline__ void set(const StoredLayout &layout, int dim) {
        if (dim >= layout.dims) dim = 0; // clear_tail comes later
        bool in_second = !layout.joined && dim >= layout.first_part_dims;
        int part = in_second ? layout.second_part : 0;
        if (in_second) dim -= layout.first_part_dims;
        note_shift = in_second ? 16 : 0;
        format = layout.format;
        has_scale_in_row = format >= CacheFormat::Q8_0;
        nibble_shift = 0;
        scale_at = 0;
        if (HEAD_DIM == 576 && format == CacheFormat::Mla656) {
            // 512 codes, their scales, and elements of bf16.
            scale_at = 512 + (dim < 512 ? dim / 128 * 4 : 0);
            format = dim < 512 ? CacheFormat::E4M3 : CacheFormat::BF16;
            at = dim < 512 ? dim : 528 + (dim - 512) * 2;
        } else if (has_scale_in_row) {
            bool nibbles = format == CacheFormat::Q4_0;
            scale_at = part + dim / 32 * stored_bytes(format);
            at = scale_at + 2 + dim % (nibbles ? 16 : 32);
            if (nibbles) nibble_shift = dim % 32 / 16 * 4;
        } else {
            at = part + dim * stored_bytes(format);
        }
    }
};

// Four elements as they are stored, from any byte on.
struct StoredFour {
    unsigned words[4], shift; // shift: in bits, of which the lower 5 count
    float scale;              // of codes

    // `row`: in shared memory.
    __device__ __forceinline__ void load(unsigned row, const StoredColumn &column, uint2 notes) {
        unsigned start = row + (notes.y >> column.note_shift & 0xffff), from = start + column.at;
        shift = from * 8;
        words[2] = words[3] = 0;
        words[0] = ld_shared_word(from & ~3u);
        words[1] = ld_shared_word((from & ~3u) + 4);
        if (column.format <= CacheFormat::F32) words[2] = ld_shared_word((from & ~3u) + 8);
        if (column.format == CacheFormat::F32) words[3] = ld_shared_word((from & ~3u) + 12);
        scale = __uint_as_float(notes.x);
        if (HEAD_DIM == 576 && column.has_scale_in_row && column.format < CacheFormat::Q8_0)
            scale = __uint_as_float(ld_shared_word(start + column.scale_at));
        else if (column.has_scale_in_row)
            scale = Element<ElementType::F16>::to_float(ld_shared_half(start + column.scale_at));
    }

    // The first word of elements, and the second.
    __device__ __forceinline__ unsigned first() const { return __funnelshift_r(words[0], words[1], shift); }
    __device__ __forceinline__ unsigned second() const { return __funnelshift_r(words[1], words[2], shift); }
};

template <ElementType TYPE>
static __device__ __forceinline__ void convert_pairs(float (&x)[4], unsigned first, unsigned second) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x[i] = Element<TYPE>::to_float((unsigned short)(first >> (16 * i)));
        x[2 + i] = Element<TYPE>::to_float((unsigned short)(second >> (16 * i)));
    }
}

// Makes stored elements f32, of several rows: one branch for all.
template <int COUNT> static __device__ __forceinline__ void
convert_fours(float (&x)[COUNT][4], const StoredFour (&four)[COUNT], const StoredColumn &column) {
    CacheFormat format = column.format;
    if (format == CacheFormat::F32) {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = __uint_as_float(four[n].words[i]);
    } else if (format == CacheFormat::BF16) {
#pragma unroll
        for (int n = 0; n < COUNT; n++) convert_pairs<ElementType::BF16>(x[n], four[n].first(), four[n].second());
    } else if (format >= CacheFormat::I8) {
        // Bytes from 0 on: the last bits of floats from 2^23 on.
        bool nibbles = format == CacheFormat::Q4_0;
        unsigned mask = nibbles ? 0x0f0f0f0f : ~0u, signs = nibbles ? 0 : 0x80808080;
        float zero = nibbles ? 8388608.0f + 8.0f : 8388608.0f + 128.0f;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            unsigned bytes = (four[n].first() >> column.nibble_shift & mask) ^ signs;
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n][i] = (__uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 | i)) - zero) * four[n].scale;
        }
    } else {
        // Codes become f16, exactly.
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            unsigned first = four[n].first(), second = four[n].second();
            if (format == CacheFormat::E4M3)
                Codes<CacheFormat::E4M3>::to_f16(first, first, second);
            else if (format == CacheFormat::E5M2)
                Codes<CacheFormat::E5M2>::to_f16(first, first, second);
            convert_pairs<ElementType::F16>(x[n], first, second);
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] *= four[n].scale;
        }
    }
}

// How the threads of a group divide rows of f32: several rows at a time, or a row in several rounds.
constexpr int FOURS = HEAD_DIM / 4;
constexpr int LANES_PER_ROW = FOURS < THREADS_PER_GROUP ? (FOURS % 32 == 0 ? 32
                                                           : FOURS < 32    ? FOURS
                                                                           : THREADS_PER_GROUP)
                                                        : THREADS_PER_GROUP;
constexpr int COLUMNS = (FOURS + LANES_PER_ROW - 1) / LANES_PER_ROW, ROWS_AT_ONCE = THREADS_PER_GROUP / LANES_PER_ROW;

// Converts the rows of a side. A thread has the same columns of several rows at a time, and loads all before it
// converts them.
template <class Worker> static __device__ __forceinline__ void
convert_stored_rows(const Worker &w, const StoredLayout &layout, unsigned stage, bool of_keys) {
    constexpr int MAX_PASSES = TILE_KEYS / ROWS_AT_ONCE;
    constexpr int SOME = COLUMNS >= 3 ? 1 : (MMA_ROW_TILES == 1 ? 8 : 4) / COLUMNS; // as registers allow
    constexpr int PASSES = SOME < MAX_PASSES ? SOME : MAX_PASSES;
    static_assert(MAX_PASSES % PASSES == 0, "whole passes");
    int thread = threadIdx.x % THREADS_PER_GROUP, first_four = thread % LANES_PER_ROW;
    unsigned stored = layout.start(stage, of_keys), to = stage + (of_keys ? 0 : STORED_SIDE_BYTES);
    StoredColumn columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) columns[c].set(layout, (first_four + c * LANES_PER_ROW) * 4);
#pragma unroll 1
    for (int row = thread / LANES_PER_ROW; row < TILE_KEYS; row += PASSES * ROWS_AT_ONCE) {
        uint2 notes[PASSES];
#pragma unroll
        for (int p = 0; p < PASSES; p++) notes[p] = ld_shared_v2(row_notes(stage, row + p * ROWS_AT_ONCE, of_keys));
        StoredFour four[COLUMNS][PASSES];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
            for (int p = 0; p < PASSES; p++)
                four[c][p].load(stored + (row + p * ROWS_AT_ONCE) * layout.pitch, columns[c], notes[p]);
        }
        w.synchronize_group(); // before stored rows are overwritten
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int at = first_four + c * LANES_PER_ROW;
            if (FOURS % LANES_PER_ROW && at >= FOURS) break;
            float x[PASSES][4];
            convert_fours(x, four[c], columns[c]);
#pragma unroll
            for (int p = 0; p < PASSES; p++)
                st_shared_v4(swizzle(to, row + p * ROWS_AT_ONCE, KEY_PITCH, at * 16),
                             make_uint4(__float_as_uint(x[p][0]), __float_as_uint(x[p][1]), __float_as_uint(x[p][2]),
                                        __float_as_uint(x[p][3])));
        }
    }
}

// Zeros for the dims that rows do not have, by the threads that converted them.
static __device__ __forceinline__ void clear_tail(unsigned rows, int dims) {
    int thread = threadIdx.x % THREADS_PER_GROUP;
#pragma unroll 1
    for (int row = thread / LANES_PER_ROW; row < TILE_KEYS; row += ROWS_AT_ONCE)
#pragma unroll 1
        for (int four = thread % LANES_PER_ROW; four < FOURS; four += LANES_PER_ROW)
#pragma unroll 1
            for (int dim = max(dims, four * 4); dim < four * 4 + 4; dim++)
                st_shared_word(swizzle(rows, row, KEY_PITCH, four * 16) + dim % 4 * 4, 0);
}

// Makes the stored rows of a stage f32.
template <class Worker> static __device__ __forceinline__ void convert_stored(const Worker &w, unsigned stage) {
#pragma unroll 1
    for (int side = 0; side < 2; side++) {
        StoredLayout layout(w, side == 0);
        convert_stored_rows(w, layout, stage, side == 0);
        if (layout.dims < HEAD_DIM) clear_tail(stage + side * STORED_SIDE_BYTES, layout.dims);
    }
    w.synchronize_group();
}

// Queries of any type as f32.
template <class Worker> static __device__ __forceinline__ void load_any_queries(const Worker &w) {
    long long element_bytes = w.cache.query_type == ElementType::F32 ? 4 : 2;
#pragma unroll 1
    for (int row = threadIdx.x >> 5; row < TILE_ROWS; row += blockDim.x >> 5) {
        bool present = row < w.tile.rows;
        int head, token;
        w.tile.find_row(w.params, present ? row : 0, head, token);
        const RowStrides &strides = w.params.query.strides;
        long long at = w.tile.sequence * strides.batch + (long long)(w.tile.seq.q_start + token) * strides.token +
                       head * strides.head;
#pragma unroll 1
        for (int dim = w.lane; dim < HEAD_DIM; dim += 32) {
            float value = 0.0f;
            if (present && dim < w.params.head_dim)
                value = load_element(w.params.query.pointer + at * element_bytes, dim, w.cache.query_type);
            unsigned to = swizzle(w.query, row, QUERY_PITCH, dim * 4 % 128) + dim * 4 / 128 * 128;
            *(float *)__cvta_shared_to_generic(to) = value;
        }
    }
}
#endif
