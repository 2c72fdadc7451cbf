// cp.async loads of a tile's queries, keys and values into shared memory, in swizzled rows (prefill_shape.cuh). All
// threads of a CTA load; CopyPartition divides rows and 16-byte chunks among them.
#pragma once
#include "common/copy.cuh"
#include "common/paging.cuh"
#include "prefill/cache_loader.cuh"
#include "prefill/prefill_scores.cuh"
#include "prefill/prefill_shape.cuh"

// A tile, and the addresses of its operands.
struct TileOperands {
    PrefillTile tile;
    const unsigned char *map;
    const int *table;
    unsigned long long key_base, value_base;
    int valid; // whether there is such a tile
};

// The place of a key, from `key_base` or `value_base` on. Some row must see it.
static __device__ __forceinline__ KeyPlace find_place(const AttentionParameters &params, const TileOperands &operands,
                                                      int key) {
    if (!params.block_size) return {operands.tile.sequence, key};
    int index = page_index(params, key);
    return {page_of(params, operands.table[index]), page_slot(params, key, index)};
}

// Loads the keys or values of a K tile, and converts them. Several loads are in flight at a time. (Not inlined: it is
// called in several places.)
template <bool IS_KEYS>
static __device__ __noinline__ void convert_tile(const AttentionParameters &params, const CacheParameters &cache,
                                                 const TileOperands &operands, int key_tile, unsigned to) {
    constexpr int DIM = IS_KEYS ? HEAD_DIM : VALUE_DIM, PITCH = IS_KEYS ? KEY_PITCH : VALUE_PITCH;
    constexpr int CHUNKS = DIM / CHUNK, AT_ONCE = 4;
    const RowStrides &strides = IS_KEYS ? params.keys.strides : params.values.strides;
    unsigned long long base = IS_KEYS ? operands.key_base : operands.value_base;
    CacheFormat format = IS_KEYS ? cache.key_format : cache.value_format;
    int dims = IS_KEYS ? params.head_dim : params.value_dim, bytes = stored_bytes(format);
    // Keys that no row of the tile sees are not read: their pages may not exist.
    int start = operands.tile.any_start, end = operands.tile.any_end;
#pragma unroll 1
    for (int i = threadIdx.x; i < TILE_KEYS * CHUNKS; i += AT_ONCE * THREADS) {
        RawChunk raw[AT_ONCE];
        bool present[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            int row = (i + n * THREADS) / CHUNKS, first = (i + n * THREADS) % CHUNKS * CHUNK;
            int key = key_tile * TILE_KEYS + row;
            raw[n] = {};
            present[n] = row < TILE_KEYS && key >= start && key < end && first < dims;
            if (!present[n]) continue;
            KeyPlace place = find_place(params, operands, key);
            long long at = (params.block_size ? place.batch * strides.batch : 0) + place.token * strides.token;
            raw[n] = StoredRow{base + at * bytes, format}.load(first, dims - first);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
            int row = (i + n * THREADS) / CHUNKS, column = (i + n * THREADS) % CHUNKS;
            if (row >= TILE_KEYS) break;
            uint4 chunk = make_uint4(0, 0, 0, 0);
            if (present[n]) chunk = StoredRow{0, format}.convert(raw[n], column * CHUNK);
            st_shared_v4(swizzle<PITCH>(to, row, column * 16), chunk);
        }
    }
}

struct Loader {
    const AttentionParameters &params;
    const CacheParameters *cache; // where CONVERTS
    unsigned memory;              // shared memory

    // Called by a whole warp: looks up tile `number` for all warps.
    __device__ __forceinline__ void find_work(const PrefillParameters &prefill, unsigned number, TileCursor &cursor,
                                              TileOperands &operands) const {
        PrefillTile tile;
        bool there = find_tile(params, prefill, TILE_ROWS, number, cursor, tile);
        if (threadIdx.x % 32 != 0) return;
        operands.valid = there;
        if (!there) return;
        operands.tile = tile;
        find_scales(params, prefill, operands.tile);
        if (IS_FALLBACK) operands.map = tile_map_row(prefill, tile, TILE_ROWS);
        long long key_start, value_start;
        find_kv_start(params, tile, key_start, value_start);
        int key_bytes = CONVERTS ? stored_bytes(cache->key_format) : ELEMENT_BYTES;
        int value_bytes = CONVERTS ? stored_bytes(cache->value_format) : ELEMENT_BYTES;
        key_start += (KEY_TERMS - 1) * (long long)tile.kv_head * params.keys.strides.head;
        operands.key_base = params.keys.pointer + key_start * key_bytes;
        operands.value_base = params.values.pointer + value_start * value_bytes;
        operands.table = page_table(params, tile.sequence);
    }

    // The rows and 16-byte chunks that a thread copies: adjacent lanes copy a row, the others the next rows.
    template <int DIM, int COUNT> struct CopyPartition {
        static constexpr int CHUNKS = DIM / CHUNK;
        static constexpr int WIDE = CHUNKS % 16 == 0 ? 16 : CHUNKS % 8 == 0 ? 8 : 4;
        static constexpr int LANES_PER_ROW = COUNT * WIDE < THREADS && CHUNKS % (2 * WIDE) == 0 ? 2 * WIDE : WIDE;
        static constexpr int ROWS_PER_PASS = THREADS / LANES_PER_ROW;
        static constexpr int PASSES = (COUNT + ROWS_PER_PASS - 1) / ROWS_PER_PASS, COLUMNS = CHUNKS / LANES_PER_ROW;
        int row = threadIdx.x / LANES_PER_ROW, column = threadIdx.x % LANES_PER_ROW;
        // Whether this thread has a row in that pass.
        __device__ __forceinline__ bool takes(int pass) const {
            return COUNT % ROWS_PER_PASS == 0 || row + pass * ROWS_PER_PASS < COUNT;
        }
    };

    // Whether rows of `dims` elements can be copied in whole chunks.
    __device__ __forceinline__ bool is_chunked(int dims) const {
        return !IS_FALLBACK || (params.load_kind != LoadKind::Elements && dims % CHUNK == 0);
    }

    // Starts the copies of a row's chunks; zeros if there is no such row, and past its dims.
    template <int PITCH, class P> __device__ __forceinline__ void
    copy_row(unsigned to, const P &part, int pass, const Bits *from, bool present, int dims) const {
#pragma unroll
        for (int j = 0; j < P::COLUMNS; j++) {
            int column = part.column + j * P::LANES_PER_ROW;
            bool reads = present && (!IS_FALLBACK || column * CHUNK < dims);
            cp_async(swizzle<PITCH>(to, part.row + pass * P::ROWS_PER_PASS, column * 16), from + column * CHUNK,
                     reads ? 16 : 0);
        }
    }

    // Copies a chunk element by element.
    static __device__ __forceinline__ void copy_elements(unsigned to, const Bits *from, int elements) {
#pragma unroll 1
        for (int i = 0; i < CHUNK; i++)
            *(Bits *)__cvta_shared_to_generic(to + i * ELEMENT_BYTES) = i < elements ? from[i] : (Bits)0;
    }

    // Starts the copies of the keys or values of a K tile, or converts them.
    template <bool IS_KEYS>
    __device__ __forceinline__ void fetch(const TileOperands &operands, int key_tile, unsigned to) const {
        if constexpr (CONVERTS) {
            convert_tile<IS_KEYS>(params, *cache, operands, key_tile, to);
        } else {
            const Bits *base = (const Bits *)(IS_KEYS ? operands.key_base : operands.value_base);
#pragma unroll 1
            for (int term = 0; term < (IS_KEYS ? KEY_TERMS : 1); term++)
                fetch_rows<IS_KEYS>(operands, base + term * params.keys.strides.head, key_tile,
                                    to + term * KEY_TERM_BYTES);
        }
    }

    // Starts the copies of rows of a K tile. `base`: of the sequence and head.
    template <bool IS_KEYS> __device__ __forceinline__ void fetch_rows(const TileOperands &operands, const Bits *base,
                                                                       int key_tile, unsigned to) const {
        constexpr int DIM = IS_KEYS ? HEAD_DIM : VALUE_DIM, PITCH = IS_KEYS ? KEY_PITCH : VALUE_PITCH;
        typedef CopyPartition<DIM, TILE_KEYS> P;
        long long stride = IS_KEYS ? params.keys.strides.token : params.values.strides.token,
                  block_stride = IS_KEYS ? params.keys.strides.batch : params.values.strides.batch;
        int dims = IS_KEYS ? params.head_dim : params.value_dim;
        // Keys that no row of the tile sees are not read: their pages may not exist.
        int start = operands.tile.any_start, seen = operands.tile.any_end - start;
        if (!is_chunked(dims) || (params.block_size && params.block_shift < 0)) {
            // The rare layouts: one chunk at a time.
#pragma unroll 1
            for (int i = threadIdx.x; i < TILE_KEYS * P::CHUNKS; i += THREADS) {
                int row = i / P::CHUNKS, column = i % P::CHUNKS, key = key_tile * TILE_KEYS + row;
                int elements =
                    (unsigned)(key - start) < (unsigned)seen ? clamp_int(dims - column * CHUNK, 0, CHUNK) : 0;
                key = clamp_int(key, start, start + seen - 1);
                const Bits *from = base + column * CHUNK;
                if (params.block_size) {
                    int index = page_index(params, key);
                    from +=
                        page_of(params, operands.table[index]) * block_stride + page_slot(params, key, index) * stride;
                } else {
                    from += key * stride;
                }
                unsigned place = swizzle<PITCH>(to, row, column * 16);
                if (IS_FALLBACK && params.load_kind == LoadKind::Elements) {
                    copy_elements(place, from, elements);
                } else {
                    cp_async(place, from, elements * ELEMENT_BYTES);
                }
            }
            return;
        }
        P part;
        int key = key_tile * TILE_KEYS + part.row;
        if (!params.block_size) {
            const Bits *from = base + key * stride;
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++) {
                if (!part.takes(pass)) break;
                copy_row<PITCH>(to, part, pass, from,
                                (unsigned)(key + pass * P::ROWS_PER_PASS - start) < (unsigned)seen, dims);
                from += P::ROWS_PER_PASS * stride;
            }
        } else {
            int entries[P::PASSES]; // the page size is a power of 2 here
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++)
                entries[pass] =
                    __ldg(operands.table +
                          (clamp_int(key + pass * P::ROWS_PER_PASS, start, start + seen - 1) >> params.block_shift));
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++) {
                if (!part.takes(pass)) break;
                int slot = (key + pass * P::ROWS_PER_PASS) & (params.block_size - 1);
                const Bits *from = base + page_of(params, entries[pass]) * block_stride + slot * stride;
                copy_row<PITCH>(to, part, pass, from,
                                (unsigned)(key + pass * P::ROWS_PER_PASS - start) < (unsigned)seen, dims);
            }
        }
    }

    // Loads the scales of a K tile, which scores and probabilities are multiplied by; 1 where a format has none.
    __device__ __forceinline__ void fetch_scales(const TileOperands &operands, int key_tile, int stage) const {
        if constexpr (CONVERTS) {
            float *to = stage_scales(stage);
#pragma unroll 1
            for (int i = threadIdx.x; i < 2 * TILE_KEYS; i += THREADS) {
                bool of_values = i >= TILE_KEYS;
                int key = key_tile * TILE_KEYS + i % TILE_KEYS;
                const float *scales = (const float *)(of_values ? cache->value_scales : cache->key_scales);
                const RowStrides &strides = of_values ? cache->value_scale_strides : cache->key_scale_strides;
                bool seen = key >= operands.tile.any_start && key < operands.tile.any_end;
                to[i] = !scales ? 1.0f : seen ? scales[scale_offset(operands, strides, key)] : 0.0f;
            }
        }
    }
    __device__ __forceinline__ long long scale_offset(const TileOperands &operands, const RowStrides &strides,
                                                      int key) const {
        KeyPlace place = find_place(params, operands, key);
        bool ragged = !params.block_size && params.cu_seqlens_k;
        if (ragged) place = {0, place.token + operands.tile.seq.kv_start};
        return place.batch * strides.batch + place.token * strides.token + operands.tile.kv_head * strides.head;
    }
    // The scales of a stage: of keys, then of values.
    __device__ __forceinline__ float *stage_scales(int stage) const {
        return (float *)__cvta_shared_to_generic(memory + SCALES_OFFSET + stage * SCALE_STAGE_BYTES);
    }

    // Queries of another type than the tile's.
    __device__ __forceinline__ void convert_queries(const TileOperands &operands) const {
        constexpr int CHUNKS = HEAD_DIM / CHUNK;
        const PrefillTile &tile = operands.tile;
        const RowStrides &strides = params.query.strides;
        long long start = tile.sequence * strides.batch + tile.head * strides.head;
#pragma unroll 1
        for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, first = i % CHUNKS * CHUNK;
            long long at = start + ((long long)tile.seq.q_start + tile.first_token + row) * strides.token + first;
            float numbers[4] = {};
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (row < tile.tokens && first + e < params.head_dim)
                    numbers[e] = load_element(params.query.pointer, at + e, cache->query_type);
            uint4 chunk = make_uint4(__float_as_uint(numbers[0]), __float_as_uint(numbers[1]),
                                     __float_as_uint(numbers[2]), __float_as_uint(numbers[3]));
            st_shared_v4(swizzle<KEY_PITCH>(memory + QUERY_OFFSET, row, i % CHUNKS * 16), chunk);
        }
    }

    __device__ __forceinline__ void load_queries(const TileOperands &operands) const {
        if constexpr (CONVERTS && WIDE_ELEMENT) {
            convert_queries(operands);
            return;
        }
        typedef CopyPartition<HEAD_DIM, TILE_ROWS> P;
        P part;
        const PrefillTile &tile = operands.tile;
        long long token = (long long)tile.seq.q_start + tile.first_token + part.row;
        const Bits *from = (const Bits *)params.query.pointer + tile.sequence * params.query.strides.batch +
                           tile.head * params.query.strides.head + token * params.query.strides.token;
        if (!is_chunked(params.head_dim)) {
#pragma unroll 1
            for (int row = part.row; row < TILE_ROWS;
                 row += P::ROWS_PER_PASS, from += P::ROWS_PER_PASS * params.query.strides.token)
#pragma unroll 1
                for (int column = part.column; column < P::CHUNKS; column += P::LANES_PER_ROW) {
                    int elements = row < tile.tokens ? clamp_int(params.head_dim - column * CHUNK, 0, CHUNK) : 0;
                    unsigned place = swizzle<KEY_PITCH>(memory + QUERY_OFFSET, row, column * 16);
                    if (params.load_kind == LoadKind::Elements) {
                        copy_elements(place, from + column * CHUNK, elements);
                    } else {
                        cp_async(place, from + column * CHUNK, elements * ELEMENT_BYTES);
                    }
                }
            return;
        }
#pragma unroll 4
        for (int pass = 0; pass < P::PASSES; pass++) {
            if (!part.takes(pass)) break;
            copy_row<KEY_PITCH>(memory + QUERY_OFFSET, part, pass, from,
                                part.row + pass * P::ROWS_PER_PASS < tile.tokens, params.head_dim);
            from += P::ROWS_PER_PASS * params.query.strides.token;
        }
    }
};
