// From where a tile's queries, keys and values are to shared memory.
#pragma once
#include "common/copy.cuh"
#include "prefill/prefill_scores.cuh"
#include "prefill/prefill_shape.cuh"

constexpr int FETCH_ELEMENTS = 0; // of the parameters' `fetch`: rows do not start at multiples of 16 bytes

// A tile, and where its operands are.
struct Work {
    PrefillTile tile;
    const unsigned char *map;
    const int *table;
    unsigned long long key_base, value_base;
    int there; // whether there is one
};

struct Loader {
    const AttentionParameters &p;
    unsigned memory; // shared

    // By one whole warp: the tile of that number, for all.
    __device__ __forceinline__ void find_work(const PrefillParameters &t, unsigned number, TilePlace &place, Work &work) const {
        PrefillTile tile;
        bool there = find_tile<TILE_ROWS>(p, t, number, place, tile);
        if (threadIdx.x % 32 != 0) return;
        work.there = there;
        if (!there) return;
        work.tile = tile;
        if (GENERAL_SCORES) work.map = find_map(t, tile, TILE_ROWS);
        long long key_at = tile.kv_head * p.key_head_stride, value_at = tile.kv_head * p.value_head_stride;
        if (!p.block_size) {
            // A ragged sequence starts at a row of its own, any other at a batch entry of its own.
            key_at += p.cu_seqlens_k ? tile.facts.kv_start * p.key_token_stride : tile.sequence * p.key_batch_stride;
            value_at += p.cu_seqlens_k ? tile.facts.kv_start * p.value_token_stride : tile.sequence * p.value_batch_stride;
        }
        work.key_base = p.key + key_at * ELEMENT_BYTES;
        work.value_base = p.value + value_at * ELEMENT_BYTES;
        work.table = (const int *)p.block_table + tile.sequence * p.block_table_stride;
    }

    // Which rows and chunks of 16 bytes a thread copies: several neighbours copy a row, the others take the next rows.
    template <int DIM, int COUNT> struct Part {
        static constexpr int CHUNKS = DIM / CHUNK;
        static constexpr int WIDE = CHUNKS % 16 == 0 ? 16 : CHUNKS % 8 == 0 ? 8 : 4;
        static constexpr int LANES = COUNT * WIDE < THREADS && CHUNKS % (2 * WIDE) == 0 ? 2 * WIDE : WIDE;
        static constexpr int AT_ONCE = THREADS / LANES;
        static constexpr int PASSES = (COUNT + AT_ONCE - 1) / AT_ONCE, COLUMNS = CHUNKS / LANES;
        int row = threadIdx.x / LANES, column = threadIdx.x % LANES;
        // Whether this thread has a row in that pass.
        __device__ __forceinline__ bool takes(int pass) const { return COUNT % AT_ONCE == 0 || row + pass * AT_ONCE < COUNT; }
    };

    // Whether rows of so many elements can be copied in whole chunks.
    __device__ __forceinline__ bool in_chunks(int dims) const { return !GENERAL_SCORES || (p.fetch != FETCH_ELEMENTS && dims % CHUNK == 0); }

    // Starts the copies of a row's chunks; of a row that is not there, and past its dims, zeros.
    template <int PITCH, class P> __device__ __forceinline__ void copy_row(unsigned to, const P &part, int pass, const Bits *from, bool present, int dims) const {
#pragma unroll
        for (int j = 0; j < P::COLUMNS; j++) {
            int column = part.column + j * P::LANES;
            bool reads = present && (!GENERAL_SCORES || column * CHUNK < dims);
            copy_async(swizzle<PITCH>(to, part.row + pass * P::AT_ONCE, column * 16), from + column * CHUNK, reads ? 16 : 0);
        }
    }

    // A chunk by its elements.
    static __device__ __forceinline__ void copy_elements(unsigned to, const Bits *from, int elements) {
#pragma unroll 1
        for (int i = 0; i < CHUNK; i++) *(Bits *)__cvta_shared_to_generic(to + i * ELEMENT_BYTES) = i < elements ? from[i] : (Bits)0;
    }

    // Starts the copy of a key tile's keys or values.
    template <bool IS_KEYS> __device__ __forceinline__ void fetch(const Work &work, int key_tile, unsigned to) const {
        constexpr int DIM = IS_KEYS ? HEAD_DIM : VALUE_DIM, PITCH = IS_KEYS ? KEY_PITCH : VALUE_PITCH;
        typedef Part<DIM, TILE_KEYS> P;
        const Bits *base = (const Bits *)(IS_KEYS ? work.key_base : work.value_base);
        long long stride = IS_KEYS ? p.key_token_stride : p.value_token_stride, block_stride = IS_KEYS ? p.key_batch_stride : p.value_batch_stride;
        int dims = IS_KEYS ? p.head_dim : p.value_dim;
        // What no row of the tile sees is not read: it may be anything, and what lies past a table's end does not exist.
        int start = work.tile.start, seen = work.tile.end - start;
        if (!in_chunks(dims) || (p.block_size && p.block_shift < 0)) {
            // What is rare: one chunk at a time.
#pragma unroll 1
            for (int i = threadIdx.x; i < TILE_KEYS * P::CHUNKS; i += THREADS) {
                int row = i / P::CHUNKS, column = i % P::CHUNKS, key = key_tile * TILE_KEYS + row;
                int elements = (unsigned)(key - start) < (unsigned)seen ? clamp_int(dims - column * CHUNK, 0, CHUNK) : 0;
                key = clamp_int(key, start, start + seen - 1);
                const Bits *from = base + column * CHUNK;
                if (p.block_size) {
                    int entry = key / p.block_size;
                    from += clamp_int(work.table[entry], 0, p.blocks - 1) * block_stride + (key - entry * p.block_size) * stride;
                } else {
                    from += key * stride;
                }
                unsigned place = swizzle<PITCH>(to, row, column * 16);
                if (GENERAL_SCORES && p.fetch == FETCH_ELEMENTS) {
                    copy_elements(place, from, elements);
                } else {
                    copy_async(place, from, elements * ELEMENT_BYTES);
                }
            }
            return;
        }
        P part;
        int key = key_tile * TILE_KEYS + part.row;
        if (!p.block_size) {
            const Bits *from = base + key * stride;
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++) {
                if (!part.takes(pass)) break;
                copy_row<PITCH>(to, part, pass, from, (unsigned)(key + pass * P::AT_ONCE - start) < (unsigned)seen, dims);
                from += P::AT_ONCE * stride;
            }
        } else {
            int blocks[P::PASSES];
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++)
                blocks[pass] = __ldg(work.table + (clamp_int(key + pass * P::AT_ONCE, start, start + seen - 1) >> p.block_shift));
#pragma unroll
            for (int pass = 0; pass < P::PASSES; pass++) {
                if (!part.takes(pass)) break;
                int slot = (key + pass * P::AT_ONCE) & (p.block_size - 1);
                const Bits *from = base + clamp_int(blocks[pass], 0, p.blocks - 1) * block_stride + slot * stride;
                copy_row<PITCH>(to, part, pass, from, (unsigned)(key + pass * P::AT_ONCE - start) < (unsigned)seen, dims);
            }
        }
    }

    __device__ __forceinline__ void load_queries(const Work &work) const {
        typedef Part<HEAD_DIM, TILE_ROWS> P;
        P part;
        const PrefillTile &tile = work.tile;
        long long token = (long long)tile.facts.q_start + tile.first_token + part.row;
        const Bits *from = (const Bits *)p.query + tile.sequence * p.query_batch_stride + tile.head * p.query_head_stride + token * p.query_token_stride;
        if (!in_chunks(p.head_dim)) {
#pragma unroll 1
            for (int row = part.row; row < TILE_ROWS; row += P::AT_ONCE, from += P::AT_ONCE * p.query_token_stride)
#pragma unroll 1
                for (int column = part.column; column < P::CHUNKS; column += P::LANES) {
                    int elements = row < tile.tokens ? clamp_int(p.head_dim - column * CHUNK, 0, CHUNK) : 0;
                    unsigned place = swizzle<KEY_PITCH>(memory + QUERY_AT, row, column * 16);
                    if (p.fetch == FETCH_ELEMENTS) {
                        copy_elements(place, from + column * CHUNK, elements);
                    } else {
                        copy_async(place, from + column * CHUNK, elements * ELEMENT_BYTES);
                    }
                }
            return;
        }
#pragma unroll 4
        for (int pass = 0; pass < P::PASSES; pass++) {
            if (!part.takes(pass)) break;
            copy_row<KEY_PITCH>(memory + QUERY_AT, part, pass, from, part.row + pass * P::AT_ONCE < tile.tokens, p.head_dim);
            from += P::AT_ONCE * p.query_token_stride;
        }
    }
};
