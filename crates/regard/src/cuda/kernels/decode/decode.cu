// Decode attention: few query rows over many keys (decoding, speculative verification, short chunks). Bound by the
// bandwidth of reading keys and values once.
//
// Packed GQA: the rows of one key/value head (tokens times grouped query heads) form tiles of TILE_ROWS; over blocks,
// those of several heads may (decode_heads.cuh). A CTA has several groups of warps. Each group walks its own K tiles
// through its own cp.async pipeline of STAGES stages, so that groups never wait for each other; the warps of a group
// share its keys and split the rows. At the end of a tile the groups' states are merged.
//
// The grid is fixed and the work is divided on the device (stream_k.cuh): one launch, in a graph, serves any lengths.
#include "common/paging.cuh"
#include "decode/decode_cache.cuh"
#include "decode/decode_groups.cuh"
#if HEADS > 1
#include "decode/decode_heads.cuh"
#endif
#include "decode/decode_products.cuh"
#include "decode/decode_combine_entry.cuh"
#include "decode/decode_rows.cuh"
#include "decode/decode_schedule.cuh"
#include "decode/decode_scores.cuh"
#include "decode/decode_shape.cuh"
#include "decode/decode_split.cuh"
#include "decode/decode_stored.cuh"
#include "decode/decode_tile.cuh"
#include "decode/stream_k.cuh"

// Whether the common case exists: rows in runs of 16 keys (decode_rows.cuh).
#define HAS_RUNS (!LISTS && CACHE != 4 && HEADS == 1)

// A thread's part of one tile over a range of keys.
struct Worker {
    const AttentionParameters &params;
#if CACHE
    const CacheParameters &cache;
#endif
#if CACHE == 4
    const KvTensor &rotary; // key dims from the value dim on, if they are in a tensor of their own; else null
#endif
    Shared &shared;
    unsigned query; // shared memory: the tile's queries
    unsigned ring;  // shared memory: this group's pipeline stages
    int lane, group, row_warp, value_warp;
    Tile tile;
    int key_start, key_end; // keys of this piece
    int first_key_tile;     // of the first group of warps; K tiles go round robin over the groups
    int last_entry;         // index in the page table of the last key's page
    bool waits_for_pages;   // fetches a K tile only after the one before has arrived

    // Online softmax state: each row's running maximum, this lane's part of the sum, and the output accumulators.
    float row_max[MMA_ROW_TILES][2];
    float row_sum[MMA_ROW_TILES][2];
    Outputs out;
    Products products;

#if READS_CODES
    bool keys_scaled, values_scaled;   // whether keys, or values, of this tile have different scales
    float row_scale[MMA_ROW_TILES][2]; // multiplies dot products
    float out_scale;                   // multiplies sums of probabilities times values
    float shift;                       // log2 of a factor of probabilities
#endif
#if HAS_RUNS
    KeyRows key_rows;
    ValueRows value_rows;
#endif
#if HEADS > 1
    HeadSlots<Shared> slots;
#endif

    // Tile `number` of the sequence.
    __device__ __forceinline__ void select_tile(int number, const SequenceTiles &tiles) {
        tile.kv_head = tiles.row_tiles == 1 ? number : (int)divide(number, tiles.row_tiles);
        tile.first_row = (number - tile.kv_head * tiles.row_tiles) * TILE_ROWS;
        tile.rows = min(TILE_ROWS, tile.seq.q_len * params.group - tile.first_row);
        tile.find_keys(params, tiles.keys, lane);
        long long key_at, value_at;
        find_kv_start(params, tile, key_at, value_at);
#if CACHE == 4
        tile.key_base = params.keys.pointer + key_at * stored_bytes(cache.key_format);
        tile.value_base = params.values.pointer + value_at * stored_bytes(cache.value_format);
#else
        tile.key_base = params.keys.pointer + key_at * KeySide::BYTES;
        tile.value_base = params.values.pointer + value_at * ValueSide::BYTES;
#endif
        tile.table = page_table(params, tile.sequence);
#if HAS_RUNS
        key_rows.set(tile.key_base, params.keys.strides.token * KeySide::BYTES, lane);
        value_rows.set(tile.value_base, params.values.strides.token * ValueSide::BYTES, lane);
#endif
#if READS_CODES
        keys_scaled = KeySide::IS_BYTES && varies(params, cache.key_scale_strides);
        values_scaled = ValueSide::IS_BYTES && varies(params, cache.value_scale_strides);
        bool aligned = !IS_FALLBACK || params.load_kind == LoadKind::PageAligned16;
        auto view = [&](CacheFormat format, unsigned long long base, long long step) {
            // Through shuffles, so that formats stay in registers: a constant is loaded in every round.
            return CodeView{CacheFormat(__shfl_sync(~0u, (int)format, 0)), aligned ? (unsigned)base : 0,
                            aligned ? (unsigned)step : 0};
        };
        products.keys.set(view(cache.key_format, tile.key_base, params.keys.strides.token * KeySide::BYTES),
                          has_exact_keys(params));
        products.values.set(view(cache.value_format, tile.value_base, params.values.strides.token * ValueSide::BYTES),
                            values_scaled, params.batch_invariant);
        shift = values_scaled || !ValueSide::HAS_CODES ? 0.0f : PROBABILITY_SHIFT;
#endif
    }

#if READS_CODES
    // Scales that all keys of the tile share join scores through those of its rows, and the output.
    __device__ __forceinline__ void load_tile_scales() {
        out_scale = shift == 0.0f ? 1.0f : 1.0f / (1 << PROBABILITY_SHIFT);
        if (ValueSide::IS_BYTES && !values_scaled)
            out_scale *= *scale_start(params, tile, cache.value_scales, cache.value_scale_strides);
        float scale = key_unit(params) * (unit_of(params) == 1.0f ? params.scale * LOG2_E : params.scale);
        if (KeySide::IS_BYTES && !keys_scaled)
            scale *= *scale_start(params, tile, cache.key_scales, cache.key_scale_strides);
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) row_scale[n][r] = scale;
    }

    // The powers of two of queries join them once they are in shared memory.
    __device__ __forceinline__ void load_query_scales() {
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                row_scale[n][r] *= shared.query_scale[(row_warp * MMA_ROW_TILES + n) * 8 + 2 * (lane & 3) + r];
                // The largest queries times the unit of keys: an infinite factor would make NaN of a dot product of 0.
                if (KeySide::HAS_BLOCKS) row_scale[n][r] = fminf(fmaxf(row_scale[n][r], -MAX_FLOAT), MAX_FLOAT);
            }
    }

    // Dot products of codes become scores. `scales`: of keys, in shared memory.
    __device__ __forceinline__ void scale_scores(Scores &scores, unsigned scales) const {
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float scale = 1.0f;
                if (keys_scaled)
                    scale = __uint_as_float(ld_shared_word(scales + (16 * k + 8 * half + (lane >> 2)) * 4));
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float &score = scores[k][n][2 * half + r];
                        if (keys_scaled) score = __fmul_rn(score, scale);
                        score = __fmul_rn(score, row_scale[n][r]);
                    }
            }
    }
#endif

    // The type of the output.
    __device__ __forceinline__ ElementType out_type() const {
#if CACHE == 4
        return params.out_f32 ? ElementType::F32 : cache.query_type;
#else
        return element_out_type(params);
#endif
    }

    // Synchronizes the warps of a group.
    __device__ __forceinline__ void synchronize_group() const {
        if (WARPS_PER_GROUP == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(THREADS_PER_GROUP) : "memory");
        }
    }

    // The pages of the runs of 16 keys in a K tile, looked up one round before use so that the latency is hidden. Of
    // keys that come one by one, the first is the page of this lane's key.
    struct RunPages {
        int entry[MMA_KEY_TILES];
    };

    // The page-table index of a key. Entries past the last visible key are not read.
    __device__ __forceinline__ int entry_of(int key) const { return min(page_index(params, key), last_entry); }

    // Offsets of a key in that page, and of its value, from the bases in elements.
    __device__ __forceinline__ void locate(int key, int entry, long long &key_offset, long long &value_offset) const {
        if (params.block_size) {
            int slot = page_slot(params, key, entry_of(key));
            long long from = page_of(params, entry);
            key_offset = from * params.keys.strides.batch + slot * params.keys.strides.token;
            value_offset = from * params.values.strides.batch + slot * params.values.strides.token;
        } else {
            key_offset = key * params.keys.strides.token;
            value_offset = key * params.values.strides.token;
        }
    }

#if LISTS
    // The address of a listed key or its value, in elements of some bytes. `base`: of the first cache.
    template <bool KEYS> __device__ __forceinline__ unsigned long long
    listed_address(const ListedKey &listed, unsigned long long base, int element_bytes) const {
        KeyPlace place = listed.place;
        if (listed.in_second) {
            const SecondCache &second = lists_of(params).second;
            const KvTensor &pool = KEYS ? second.keys : second.values;
            return pool.pointer + (place.batch * pool.strides.batch + place.token * pool.strides.token +
                                   tile.kv_head * pool.strides.head) *
                                      element_bytes;
        }
        const RowStrides &strides = KEYS ? params.keys.strides : params.values.strides;
        return base +
               ((params.block_size ? place.batch * strides.batch : 0) + place.token * strides.token) * element_bytes;
    }

    // The entries of this lane's scores of a K tile.
    __device__ __forceinline__ void load_entries(RowView &view, int first_key) const {
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int key = first_key + 16 * k + (lane >> 2) + 8 * half;
                bool present = key >= key_start && key < key_end;
                view.entries[k][half] = present ? find_listed_key(params, tile, key).key : -1;
            }
    }
#endif

    __device__ __forceinline__ int look_up(int key) const { return params.block_size ? tile.table[entry_of(key)] : 0; }

    __device__ __forceinline__ void look_up_pages(int key_tile, RunPages &runs) const {
        if (!HAS_RUNS || !params.block_size) return;
        if (!IS_FALLBACK || params.load_kind == LoadKind::PageAligned16) {
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) runs.entry[k] = tile.table[entry_of(key_tile * TILE_KEYS + 16 * k)];
        } else {
            runs.entry[0] = tile.table[entry_of(key_tile * TILE_KEYS + lane % TILE_KEYS)];
        }
    }

#if HAS_RUNS
    // The common case of `fetch`.
    __device__ __forceinline__ void fetch_runs(int key_tile, unsigned keys, unsigned values,
                                               const RunPages &runs) const {
        // Offsets of the first key of each run of 16, in bytes; the other 15 are contiguous.
        long long key_at[MMA_KEY_TILES], value_at[MMA_KEY_TILES];
        const RowStrides &key_strides = params.keys.strides, &value_strides = params.values.strides;
        long long key_stride = key_strides.token * KeySide::BYTES,
                  value_stride = value_strides.token * ValueSide::BYTES;
        int first = key_tile * TILE_KEYS;
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++) {
            int key = first + 16 * k;
            if (params.block_size) {
                int slot = page_slot(params, key, entry_of(key));
                long long page = page_of(params, runs.entry[k]);
                key_at[k] = page * key_strides.batch * KeySide::BYTES + slot * key_stride;
                value_at[k] = page * value_strides.batch * ValueSide::BYTES + slot * value_stride;
            } else {
                key_at[k] = k ? key_at[0] + 16 * k * key_stride : first * key_stride;
                value_at[k] = k ? value_at[0] + 16 * k * value_stride : first * value_stride;
            }
        }
        key_rows.load(*this, keys, key_at, key_stride, key_tile, params.head_dim);
        value_rows.load(*this, values, value_at, value_stride, key_tile, params.value_dim);
    }
#endif

    // Starts the copies of a K tile into a pipeline stage.
    __device__ __forceinline__ void fetch(int key_tile, int stage, const RunPages &runs) const {
#if CACHE == 4
        fetch_stored(*this, ring + stage * STAGE_BYTES, key_tile);
#else
        unsigned keys = ring + stage * STAGE_BYTES, values = keys + TILE_KEYS * KEY_PITCH;
#if HAS_RUNS
        if (!IS_FALLBACK || params.load_kind == LoadKind::PageAligned16)
            fetch_runs(key_tile, keys, values, runs);
        else
#endif
            fetch_scattered(key_tile, keys, values, runs);
#if READS_CODES
        load_scales(*this, values + TILE_KEYS * VALUE_PITCH, key_tile, runs);
#endif
#endif
    }

    // Whether the same code copies rows of keys and of values.
    static constexpr bool COPIES_ALIKE =
        HAS_RUNS && !KeySide::HAS_BLOCKS && KEY_CLASS == VALUE_CLASS && HEAD_DIM == VALUE_DIM;

    // The fallback of `fetch` for any layout, alignment and dims. A lane has where one of the keys is.
    __device__ __forceinline__ void fetch_scattered(int key_tile, unsigned keys, unsigned values,
                                                    const RunPages &runs) const {
        int key = clamp_int(key_tile * TILE_KEYS + lane % TILE_KEYS, key_start, key_end - 1);
        long long key_offset, value_offset;
        locate(key, runs.entry[0], key_offset, value_offset);
        if constexpr (COPIES_ALIKE) {
            if (params.load_kind == LoadKind::Chunks) {
#pragma unroll 1
                for (int side = 0; side < 2; side++)
                    load_rows<KeySide>(side ? values : keys, side ? tile.value_base : tile.key_base,
                                       side ? value_offset : key_offset, side ? params.value_dim : params.head_dim,
                                       key_tile);
                return;
            }
        }
        fetch_side<KeySide, true>(keys, tile.key_base, key_offset, params.head_dim, key_tile);
        fetch_side<ValueSide, false>(values, tile.value_base, value_offset, params.value_dim, key_tile);
    }

    template <class Side, bool KEYS> __device__ __forceinline__ void
    fetch_side(unsigned to, unsigned long long base, long long own_offset, int dims, int key_tile) const {
        if constexpr (Side::HAS_BLOCKS)
            load_scattered_blocks<Side, KEYS>(*this, to, base, dims, key_tile);
        else if (HAS_RUNS && !COPIES_ALIKE && params.load_kind == LoadKind::Chunks)
            load_rows<Side>(to, base, own_offset, dims, key_tile);
        else
            load_scattered<Side, KEYS>(to, (const typename Side::Item *)base, dims, key_tile);
    }

    // Rows that start at multiples of 16 bytes. `own_offset`: where this lane's key is.
    template <class Side> __device__ __forceinline__ void
    load_rows(unsigned to, unsigned long long base, long long own_offset, int dims, int key_tile) const {
        constexpr int CHUNKS = Side::CHUNKS, ALL = TILE_KEYS * CHUNKS;
        static_assert(ALL % 32 == 0, "all lanes of a warp exchange offsets");
        own_offset *= Side::BYTES;
#pragma unroll 2
        for (int i = threadIdx.x % THREADS_PER_GROUP; i < ALL; i += THREADS_PER_GROUP) {
            int row = i / CHUNKS, at = (i - row * CHUNKS) * 16, key = key_tile * TILE_KEYS + row;
            bool present = key >= key_start && key < key_end;
            const void *from = (const void *)(base + __shfl_sync(~0u, own_offset, row) + at);
            cp_async(swizzle(to, row, Side::PITCH, at), from, present ? clamp_int(dims * Side::BYTES - at, 0, 16) : 0);
        }
    }

    // Each thread copies one 16-byte chunk at a time.
    template <class Side, bool KEYS> __device__ __forceinline__ void
    load_scattered(unsigned to, const typename Side::Item *base, int dims, int key_tile) const {
        typedef typename Side::Item Item;
        constexpr int CHUNKS = Side::CHUNKS;
#pragma unroll 1
        for (int chunk = threadIdx.x % THREADS_PER_GROUP; chunk < TILE_KEYS * CHUNKS; chunk += THREADS_PER_GROUP) {
            int row = chunk / CHUNKS, column = chunk - row * CHUNKS, key = key_tile * TILE_KEYS + row;
            bool present = key >= key_start && key < key_end;
            int near = clamp_int(key, key_start, key_end - 1);
#if LISTS
            ListedKey listed = find_listed_key(params, tile, near);
            present = present && listed.key >= 0;
            const Item *from = (const Item *)listed_address<KEYS>(listed, (unsigned long long)base, Side::BYTES);
#else
            long long key_offset, value_offset;
            locate(near, look_up(near), key_offset, value_offset);
            const Item *from = base + (KEYS ? key_offset : value_offset);
#endif
            copy_any(swizzle(to, row, Side::PITCH, column * 16), from, column * Side::ITEMS_PER_CHUNK,
                     present ? dims : 0);
        }
    }

    // Copies 16 bytes of a row of `dims` elements, zero-filled past its end.
    template <class Item>
    __device__ __forceinline__ void copy_any(unsigned to, const Item *row, int first, int dims) const {
        constexpr int BYTES = sizeof(Item), ITEMS = 16 / BYTES;
        int elements = clamp_int(dims - first, 0, ITEMS);
        if (!IS_FALLBACK || params.load_kind != LoadKind::Elements) {
            cp_async(to, elements ? row + first : row, elements * BYTES);
        } else {
#pragma unroll 1
            for (int i = 0; i < ITEMS; i++) {
                *(Item *)__cvta_shared_to_generic(to + i * BYTES) = i < elements ? row[first + i] : (Item)0;
            }
        }
    }

    __device__ __forceinline__ void load_queries() const {
#if CACHE == 4
        return load_any_queries(*this);
#endif
        if constexpr (KeySide::HAS_CODES) return load_code_queries(*this);
        constexpr int CHUNKS = HEAD_DIM / CHUNK;
        for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += computing_threads()) {
            int row = i / CHUNKS, column = i - row * CHUNKS;
            bool present = row < tile.rows;
            int head, token;
            tile.find_row(params, present ? row : 0, head, token);
            const Bits *from = (const Bits *)params.query.pointer + tile.sequence * params.query.strides.batch +
                               (long long)(tile.seq.q_start + token) * params.query.strides.token +
                               head * params.query.strides.head;
            copy_any(swizzle(query, row, QUERY_PITCH, column * 16), from, column * CHUNK,
                     present ? params.head_dim : 0);
        }
    }

    __device__ __forceinline__ void load_row_facts() const {
        for (int slot = threadIdx.x; slot < TILE_ROWS; slot += computing_threads()) {
            RowFacts facts = {0, 0, 0, 0.0f, 0, 0, 0};
            int row = tile.row_of_slot(params, slot);
            if (row >= 0) {
                int head, token;
                tile.find_row(params, row, head, token);
                facts = row_facts<IS_FALLBACK>(params, tile, head, token);
            }
            shared.rows[slot] = facts;
        }
    }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                row_max[n][r] = -INF;
                row_sum[n][r] = 0.0f;
            }
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[v][n][e] = 0.0f;
        }
    }

    // Online softmax over a K tile's scores: updates running maxima, rescales if one of the warp rose, exponentiates.
    __device__ __forceinline__ void softmax_step(Scores &scores) {
        bool moved = false;
        float reference[MMA_ROW_TILES][2], factor[MMA_ROW_TILES][2], unit = unit_of(params);
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = fmaxf(scores[0][n][r], scores[0][n][2 + r]);
#pragma unroll
                for (int k = 1; k < MMA_KEY_TILES; k++) most = fmaxf(most, fmaxf(scores[k][n][r], scores[k][n][2 + r]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
                most = fmaxf(most, row_max[n][r]);
                // An empty row uses 0 as its reference: -inf - -inf is NaN.
                reference[n][r] = most == -INF ? 0.0f : most;
                factor[n][r] = exp2_fast((row_max[n][r] - reference[n][r]) * unit);
                moved |= most != row_max[n][r];
                row_max[n][r] = most;
            }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++) {
#pragma unroll
                for (int r = 0; r < 2; r++) row_sum[n][r] = __fmul_rn(row_sum[n][r], factor[n][r]);
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                    for (int e = 0; e < 4; e++) out[v][n][e] *= factor[n][e & 1];
            }
        }
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
#if READS_CODES
                    scores[k][n][e] = exp2_fast((scores[k][n][e] - reference[n][e & 1]) * unit + shift);
#else
                    scores[k][n][e] = exp2_fast((scores[k][n][e] - reference[n][e & 1]) * unit);
#endif
                    row_sum[n][e & 1] = __fadd_rn(row_sum[n][e & 1], scores[k][n][e]);
                }
    }

    // Mainloop over this group's K tiles of keys `key_start..key_end`.
    __device__ __forceinline__ void mainloop() {
        int first = first_key_tile + group, end = (key_end + TILE_KEYS - 1) / TILE_KEYS,
            step = params.stream_k.key_groups;
        if (params.block_size) last_entry = page_index(params, max(key_end - 1, 0));
        RunPages runs = {};
        begin();
#if LISTS
        int new_tokens = tile.seq.new_tokens;
#else
        int new_tokens = tile.seq.kv_len - tile.seq.q_len;
#endif
        RowView view = {shared.rows + row_warp * MMA_ROW_TILES * 8, tile.every_start, tile.every_end, new_tokens};
#if HEADS > 1
        return multiply_tiles(*this, view, first, end, step);
#endif

        // Software pipeline: copies run PREFETCH_DISTANCE K tiles ahead of the MMAs, and round 0 is the first with an
        // MMA. Prologue and mainloop are one loop, so that its code is fetched once. Later rounds have few branches,
        // each of which costs two warps per scheduler as much as several instructions.
        //
        // K tiles are prefetched before the current one has arrived. Only where few sequences are split over all CTAs,
        // scattered pages are prefetched after it, except in round 0: fewer copies in flight are faster there.
        int stage = 0, ahead = first, key_tile = first - PREFETCH_DISTANCE * step;
#pragma unroll 1
        for (int round = -PREFETCH_DISTANCE; round <= 0 || key_tile < end; round++, ahead += step, key_tile += step) {
            bool at_once = STAGES == 1 || !waits_for_pages;
            if (round > 0) {
                if (!at_once) cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();
                synchronize_group();
            } else if (round == -PREFETCH_DISTANCE) {
                // Neither does the preceding kernel write the page table if lengths are scheduled. If the host knows
                // them, nothing of that kernel's output has been read so far.
                if (!is_scheduled(params)) grid_dependency_wait();
                if (first < end) look_up_pages(first, runs);
                if (is_scheduled(params)) grid_dependency_wait();
            }
            if (ahead < end) {
                fetch(ahead, stage, runs);
                look_up_pages(ahead + step, runs);
            }
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (round > 0) {
                cp_async_commit();
                if (at_once) {
                    cp_async_wait<STAGES - 1>();
                    synchronize_group();
                }
            } else {
                // All threads of the CTA load the queries, together with the first K tile. Queries and scales of codes
                // come through registers, so their latency is waited for: behind the copies.
                if (round == (KeySide::HAS_CODES ? 0 : -PREFETCH_DISTANCE)) load_queries();
#if READS_CODES
                if (round == 0) load_tile_scales();
#endif
                cp_async_commit();
                if (round == -PREFETCH_DISTANCE) load_row_facts();
                if (round < 0) continue;
                cp_async_wait<STAGES - 1>();
                __syncthreads();
                products.keys.load_query_fragments();
#if READS_CODES
                if (KeySide::HAS_CODES) load_query_scales();
#endif
                if (key_tile >= end) break;
            }
            unsigned keys = ring + stage * STAGE_BYTES;
#if CACHE == 4
            convert_stored(*this, keys);
#endif
            Scores scores = {};
            int head = TILE_HEADS > 1 ? row_warp : 0;
            products.keys.mma_qk(scores, keys + head * KeySide::HEAD_BYTES);
            unsigned values = keys + STORED_SIDE_BYTES, scales = values + TILE_KEYS * VALUE_PITCH;
#if READS_CODES
            scale_scores(scores, scales);
#endif
#if LISTS
            load_entries(view, key_tile * TILE_KEYS);
#endif
            modify_scores(params, scores, view, key_tile * TILE_KEYS, lane);
            softmax_step(scores);
            products.values.mma_pv(out, scores, values + head * ValueSide::HEAD_BYTES, scales + TILE_KEYS * 4,
                                   value_warp * WARP_VALUE_DIM);
        }
    }

    // Stores this warp's state to shared memory, over the pipeline stages.
    __device__ __forceinline__ void store_state(float *states) {
#if READS_CODES
        float unshifted = shift == 0.0f ? 1.0f : 1.0f / (1 << PROBABILITY_SHIFT);
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++) {
#pragma unroll
            for (int r = 0; r < 2; r++) row_sum[n][r] *= unshifted;
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[v][n][e] *= out_scale * value_unit(v);
        }
#endif
        float *mine = states + group * TILE_ROWS * OUT_PITCH + value_warp * WARP_VALUE_DIM;
        int first_slot = row_warp * MMA_ROW_TILES * 8 + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // Slots are rows, but where a tile has several heads.
                int slot = first_slot + 8 * n + r, row = TILE_HEADS == 1 ? slot : tile.row_of_slot(params, slot);
                float all = row_sum[n][r];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(~0u, all, step);
                if (row < 0) continue;
                if (lane < 4 && value_warp == 0) {
                    shared.max[group][row] = row_max[n][r];
                    shared.sum[group][row] = all;
                }
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                    for (int e = r; e < 4; e += 2)
                        mine[row * OUT_PITCH + products.values.value_dim_of(v, e)] = out[v][n][e];
            }
    }
};

// Finds the keys of a piece, which has the key units of the tile from `unit` on: `step` of them, and none from
// `last_unit` on.
static __device__ __forceinline__ void select_keys(const AttentionParameters &params, Worker &w, int first_unit,
                                                   int unit, int step, int last_unit) {
    w.key_start = max(w.tile.any_start, (first_unit + unit) << params.stream_k.work_unit_shift);
    w.key_end = (int)min((long long)w.tile.any_end, (long long)(first_unit + min(unit + step, last_unit))
                                                        << params.stream_k.work_unit_shift);
    if (w.key_end <= w.key_start) w.key_start = w.key_end = 0;
    w.first_key_tile = w.key_start / TILE_KEYS;
    if (params.batch_invariant) {
        // The group that has a key must not depend on where the tile's first row begins to see, because the
        // groups' sums are merged afterwards.
        int unit_key_tile = ((first_unit + unit) << params.stream_k.work_unit_shift) / TILE_KEYS;
        if (w.first_key_tile > unit_key_tile)
            w.first_key_tile -= (w.first_key_tile - unit_key_tile) % params.stream_k.key_groups;
    }
}

// Finds this thread's place in the CTA, and its shared memory.
static __device__ __forceinline__ void place_worker(Worker &w, int query_offset, int ring_offset) {
    // Through a shuffle, or ptxas reads the thread's number again and again, behind the copies in the queue.
    w.lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31);
    w.group = threadIdx.x / THREADS_PER_GROUP;
    w.row_warp = (threadIdx.x >> 5) % ROW_WARPS;
    w.value_warp = (threadIdx.x >> 5) % WARPS_PER_GROUP / ROW_WARPS;
    w.query = shared_address(dynamic_shared + query_offset);
    w.products.keys.query = w.query + w.row_warp * MMA_ROW_TILES * 8 * QUERY_PITCH;
    w.products.keys.lane = w.products.values.lane = w.lane;
#if READS_CODES
    set_block_operands(w.products.keys, w.products.values, shared_address(&w.shared.folded), w.lane);
#endif
    w.ring = shared_address(dynamic_shared + ring_offset) + w.group * STAGES * STAGE_BYTES;
#if HEADS > 1
    if (threadIdx.x >= computing_threads()) w.group = (threadIdx.x - computing_threads()) / (32 * COPY_WARPS);
    w.slots.group = w.group;
    if (threadIdx.x == 0) w.shared.barriers.init();
    __syncthreads();
#endif
}

// The work range of this CTA: from the schedule of the step if there is one. `scratch`: shared memory that is still
// unused.
static __device__ __forceinline__ void find_range(const AttentionParameters &params, Shared &shared, void *scratch,
                                                  CtaRange &cta_range) {
    if (is_scheduled(params)) {
        if (threadIdx.x < 32) load_scheduled(params, shared.scheduled, threadIdx.x);
        __syncthreads();
        cta_range = shared.scheduled.range;
        if (params.block_size) touch_pages(params, shared.scheduled, threadIdx.x);
    } else {
        if (!params.stream_k.work_total) {
            grid_dependency_wait();
            if (!LISTS) prefetch_lengths(params);
        }
        cta_range = find_cta_range(params, *(RangeScratch *)scratch);
    }
}

// The loop over rows stays in the kernel: NVRTC compiles a function around it, although inlined, to other code.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
#if LISTS && CACHE
    decode(const __grid_constant__ ListedParameters listed, const __grid_constant__ CacheParameters cache,
           const __grid_constant__ KvTensor rotary) {
    const AttentionParameters &params = listed.attention;
#elif LISTS
    decode(const __grid_constant__ ListedParameters listed) {
    const AttentionParameters &params = listed.attention;
#elif CACHE == 4
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ CacheParameters cache,
           const __grid_constant__ KvTensor rotary) {
#elif CACHE
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ CacheParameters cache) {
#else
    decode(const __grid_constant__ AttentionParameters params) {
#endif
    Shared &shared = *(Shared *)dynamic_shared;
    constexpr int QUERY_OFFSET = (sizeof(Shared) + 127) / 128 * 128;
    constexpr int RING_OFFSET = QUERY_OFFSET + (TILE_ROWS * QUERY_PITCH + 127) / 128 * 128;
    float *states = (float *)(dynamic_shared + RING_OFFSET);
    static_assert(sizeof(Shared) <= 1024 + 128 * TILE_ROWS, "the host reserves this much shared memory");
    static_assert(sizeof(RangeScratch) <= TILE_KEYS * (KEY_PITCH + VALUE_PITCH), "in the place of keys");

#if CACHE == 4
    Worker w = {params, cache, rotary, shared};
#elif CACHE
    Worker w = {params, cache, shared};
#else
    Worker w = {params, shared};
#endif
    place_worker(w, QUERY_OFFSET, RING_OFFSET);
    touch_parameters(params);

    // Device-side lengths may be written by the preceding kernel. If the host knows them, or they were scheduled
    // before, `mainloop` waits instead.
    CtaRange cta_range;
    find_range(params, shared, states, cta_range);
#if HEADS > 1
    if (threadIdx.x >= computing_threads()) {
        hopper::setmaxnreg_dec<COPY_REGISTERS>();
        return copy_tiles(w, cta_range);
    }
    hopper::setmaxnreg_inc<COMPUTE_REGISTERS>();
#endif
    // Tiles cost nothing to start where each has CTAs of its own.
    w.waits_for_pages = params.block_size && cta_range.costs.start == 0;
    WorkCursor &cursor = cta_range.cursor;
    long long at = cta_range.begin;
    while (at < cta_range.end) {
        w.tile.sequence = cursor.sequence;
        if (!IS_FALLBACK && is_scheduled(params) && cursor.sequence == shared.scheduled.range.cursor.sequence)
            w.tile.seq = shared.scheduled.sequence;
        else
            w.tile.seq = load_work(params, cursor.sequence);
        SequenceTiles tiles = sequence_tiles(params, w.tile.seq, cta_range.costs);
        if (at >= cursor.before + tiles.work(params)) {
            cursor = {cursor.sequence + 1, cursor.before + tiles.work(params)};
            if (!params.stream_k.work_total) cursor = find_sequence(params, cta_range.costs, cursor, at);
            if (cursor.sequence >= params.batch) break;
            continue;
        }
#if LISTS
        w.tile.sequence = w.tile.seq.sequence;
#endif
        // Locate the tile.
        int tile = (int)divide(at - cursor.before, tiles.cost);
        TileRange here;
        here.start = cursor.before + (long long)tile * tiles.cost;
        here.keys_start = here.start + cta_range.costs.start;
        here.end = here.start + tiles.cost;
        w.select_tile(tile, tiles);

        bool starts_here = here.start >= at, ends_here = here.end <= cta_range.end;
        long long end = min(cta_range.end, here.end);
        // Key units, counted from the first of the sequence.
        int unit = (int)max(at - here.keys_start, 0ll), last_unit = (int)max(end - here.keys_start, 0ll);
        // Kept in shared memory during the mainloop, to save registers.
        const TileRange &tile_range = shared.tile_range;
        if (threadIdx.x == 0) shared.tile_range = here;
        int step = params.batch_invariant ? 1 : max(last_unit - unit, 1);
        int pieces = params.batch_invariant ? max(1, last_unit - unit) : 1;
        for (int piece = 0; piece < pieces; piece++, unit += step) {
            select_keys(params, w, tiles.first_unit, unit, step, last_unit);
            w.mainloop();
            cp_async_wait<0>();
            synchronize_computing();
            w.store_state(states);
            synchronize_computing();

            int warps = computing_threads() >> 5;
            for (int first = threadIdx.x >> 5; first < w.tile.rows; first += ROWS_PER_BATCH * warps) {
                RowState combined[ROWS_PER_BATCH];
                combine_groups(params, combined, shared, states, first, warps, w.lane);
#pragma unroll
                for (int i = 0; i < ROWS_PER_BATCH; i++) {
                    int row = first + i * warps;
                    if (row >= w.tile.rows) break;
                    RowState &state = combined[i];
                    if (starts_here && pieces > 1) fold_piece(params, shared, w, state, piece, row);
                    if (starts_here && ends_here && piece == pieces - 1) {
                        store_row(params, w.tile, row, w.lane, state, w.out_type());
                    } else {
                        store_partial(partial_state(params, blockIdx.x, starts_here ? 0 : 1 + piece), row, w.lane,
                                      state);
                    }
                }
            }
            __syncthreads();
        }

        finish_tile(w, cta_range.work_per_cta, tile_range, starts_here, ends_here);
        at = end;
    }
    // A CTA without work ends after the preceding kernel too: a kernel that waits for this one waits for both.
    if (is_scheduled(params)) grid_dependency_wait();
}

#if !LISTS
// The schedule of a step: the range that each CTA of `decode`, of the same grid, would compute by itself.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    schedule_ctas(const __grid_constant__ AttentionParameters params) {
    write_schedule(params);
}
#endif

#if TILE_ROWS > 8 && CACHE != 4 && !LISTS
// Combines the parts of tiles that `decode` split over several CTAs. A CTA takes eight rows, a warp each; the grid is
// all possible tiles by TILE_ROWS / 8.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ AttentionParameters params) {
    launch_dependents();
    SplitTile split = find_tile(params, blockIdx.x, blockIdx.y * 8);
    await_parts(params, split, *(unsigned *)dynamic_shared);
    int row = blockIdx.y * 8 + threadIdx.x / 32;
    if (row < split.rows && split.is_split())
        combine_row<2 * STATES_PER_BATCH>(params, split.tile, row, threadIdx.x & 31, split.parts.first,
                                          split.parts.last, element_out_type(params));
    end_combine(split);
}
#endif
