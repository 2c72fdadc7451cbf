// Decode attention of rows that have lists of pages: `decode` (decode.cu) for plain scores, exact head dims and aligned
// rows, where pages are multiples of 16 keys.
//
// A list of pages is the page table of its sequence and key/value head: an entry gives a run of 16 neighbouring keys.
// The other modules for lists look every key up. Rows are heads of one token, so all of them see the same keys, and the
// keys of a run that they see are one range.
//
// Work is divided among rows, as in the other modules for lists (common/lists.cuh), without groups of warps that wait
// for each other; it is known before the preceding kernel has ended if the host knows how long lists are.
#include "common/arrival.cuh"
#include "common/lists.cuh"
#include "decode/decode_groups.cuh"
#include "decode/decode_products.cuh"
#include "decode/decode_shape.cuh"
#include "decode/decode_tile.cuh"
#include "decode/stream_k.cuh"

static_assert(LISTS && !IS_FALLBACK && CACHE_CLASS == CacheClass::Elements, "what this kernel is for");
static_assert(TILE_ROWS == 8 && WARPS_PER_GROUP == 1 && STAGES == 2, "a group is a warp, and fetches one K tile ahead");

// The runs of 16 keys of a K tile: the pages that they are in, and the numbers of these in the sequence. They are
// looked up one round before use so that the latency is hidden.
struct RunPages {
    int page[MMA_KEY_TILES], number[MMA_KEY_TILES];
};

// The keys of a run that exist and are seen: from `start` to `end` of the 16.
struct SeenKeys {
    int start, end;
};

// A warp's part of one tile over a range of keys.
struct PageWorker {
    const AttentionParameters &params;
    unsigned query; // shared memory: the tile's queries
    unsigned ring;  // shared memory: this warp's pipeline stages
    int lane, group;
    Tile tile;
    int key_start, key_end; // entries of this piece
    int last_page;          // the page of the last one, in the list
    bool waits_for_pages;   // fetches a K tile only after the one before has arrived

    // Online softmax state: each row's running maximum, this lane's part of the sum, and the output accumulators.
    float row_max[2], row_sum[2];
    Outputs out;
    Products products;

    __device__ __forceinline__ void select_tile(int number, const SequenceTiles &tiles) {
        tile.kv_head = tiles.row_tiles == 1 ? number : (int)divide(number, tiles.row_tiles);
        tile.first_row = (number - tile.kv_head * tiles.row_tiles) * TILE_ROWS;
        tile.rows = min(TILE_ROWS, params.group - tile.first_row);
    }

    // What the rows see, and their list. Both may be written by the preceding kernel.
    __device__ __forceinline__ void load_list(int row) {
        tile.seq = load_listed_row(params, row);
        tile.find_keys(params, {}, lane);
        tile.key_base = params.keys.pointer + tile.kv_head * params.keys.strides.head * ELEMENT_BYTES;
        tile.value_base = params.values.pointer + tile.kv_head * params.values.strides.head * ELEMENT_BYTES;
    }

    __device__ __forceinline__ RunPages look_up_pages(int key_tile) const {
        RunPages runs;
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++) {
            // Entries past the last one are not read.
            int index = min(page_index(params, key_tile * TILE_KEYS + 16 * k), last_page);
            runs.page[k] = tile.list[index];
            runs.number[k] = tile.numbers ? tile.numbers[index] : index;
        }
        return runs;
    }

    // Starts the copies of a K tile into a pipeline stage. Keys that are not seen become zeros.
    __device__ __forceinline__ void fetch(int key_tile, int stage, const RunPages &runs,
                                          SeenKeys (&seen)[MMA_KEY_TILES]) const {
        unsigned keys = ring + stage * STAGE_BYTES, values = keys + TILE_KEYS * KEY_PITCH;
        long long key_at[MMA_KEY_TILES], value_at[MMA_KEY_TILES];
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++) {
            int key = key_tile * TILE_KEYS + 16 * k, index = min(page_index(params, key), last_page);
            int slot = page_slot(params, key, index);
            bool exists = (unsigned)runs.page[k] < (unsigned)params.blocks;
            long long position = (long long)runs.number[k] * params.block_size + slot;
            auto within_run = [](long long at) { return (int)max(0ll, min(at, 16ll)); };
            seen[k].start = within_run(max(tile.every_start - position, (long long)key_start - key));
            seen[k].end = exists ? within_run(min(tile.every_end - position, (long long)key_end - key)) : 0;
            long long page = exists ? runs.page[k] : 0;
            slot = min(slot, params.block_size - 16);
            key_at[k] = page * params.keys.strides.batch + slot * params.keys.strides.token;
            value_at[k] = page * params.values.strides.batch + slot * params.values.strides.token;
        }
        load_rows<HEAD_DIM, KEY_PITCH>(keys, (const Bits *)tile.key_base, key_at, params.keys.strides.token, seen);
        load_rows<VALUE_DIM, VALUE_PITCH>(values, (const Bits *)tile.value_base, value_at, params.values.strides.token,
                                          seen);
    }

    // Several lanes copy a row, the others the next rows.
    template <int DIM, int PITCH>
    __device__ __forceinline__ void load_rows(unsigned to, const Bits *base, const long long (&runs)[MMA_KEY_TILES],
                                              long long stride, const SeenKeys (&seen)[MMA_KEY_TILES]) const {
        constexpr int CHUNKS = DIM / CHUNK, LANES = CHUNKS % 8 == 0 ? 8 : 4, AT_ONCE = 32 / LANES;
        constexpr int COLUMN_ROUNDS = CHUNKS / LANES;
        int row = lane / LANES, column = lane % LANES * CHUNK;
        const Bits *from = base + row * stride + column;
#pragma unroll
        for (int i = 0; i < TILE_KEYS; i += AT_ONCE) {
            const Bits *source = from + runs[i / 16] + i % 16 * stride;
            int in_run = i % 16 + row;
            int bytes = in_run >= seen[i / 16].start && in_run < seen[i / 16].end ? 16 : 0;
#pragma unroll
            for (int j = 0; j < COLUMN_ROUNDS; j++) {
                unsigned place = swizzle(to, i % 8 + row, PITCH, column * ELEMENT_BYTES + j * LANES * 16 % 128);
                cp_async(place + i / 8 * 8 * PITCH + j * LANES * 16 / 128 * 128, source + j * LANES * CHUNK, bytes);
            }
        }
    }

    __device__ __forceinline__ void load_queries() const {
        constexpr int CHUNKS = HEAD_DIM / CHUNK;
        for (int i = threadIdx.x; i < TILE_ROWS * CHUNKS; i += blockDim.x) {
            int row = i / CHUNKS, column = i - row * CHUNKS;
            bool present = row < tile.rows;
            const Bits *from = (const Bits *)params.query.pointer +
                               row_offset(params.query.strides, tile,
                                          tile.kv_head * params.group + tile.first_row + (present ? row : 0), 0);
            cp_async(swizzle(query, row, QUERY_PITCH, column * 16), from + column * CHUNK, present ? 16 : 0);
        }
    }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = -INF;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
            for (int e = 0; e < 4; e++) out[v][0][e] = 0.0f;
    }

    // Scales the dot products, in units of log2, and hides keys that are not seen.
    __device__ __forceinline__ void scale_scores(Scores &scores, const SeenKeys (&seen)[MMA_KEY_TILES]) const {
        float scale = params.scale * LOG2_E;
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[k][0][e] = __fmul_rn(scores[k][0][e], scale);
            if (seen[k].start == 0 && seen[k].end == 16) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int key = (lane >> 2) + e / 2 * 8;
                if (key < seen[k].start || key >= seen[k].end) scores[k][0][e] = -INF;
            }
        }
    }

    // Online softmax over the scores of a K tile: updates the running maxima, rescales sums and accumulators if a
    // maximum rose, and exponentiates.
    __device__ __forceinline__ void softmax_step(Scores &scores) {
        bool moved = false;
        float reference[2], factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = row_max[r];
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) most = fmaxf(most, fmaxf(scores[k][0][r], scores[k][0][2 + r]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            reference[r] = most == -INF ? 0.0f : most;
            factor[r] = exp2_fast(row_max[r] - reference[r]);
            moved |= most != row_max[r];
            row_max[r] = most;
        }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int r = 0; r < 2; r++) row_sum[r] = __fmul_rn(row_sum[r], factor[r]);
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[v][0][e] *= factor[e & 1];
        }
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                scores[k][0][e] = exp2_fast(scores[k][0][e] - reference[e & 1]);
                row_sum[e & 1] = __fadd_rn(row_sum[e & 1], scores[k][0][e]);
            }
    }

    // Mainloop over this warp's K tiles of entries `key_start..key_end`, as that of decode.cu: copies run one K tile
    // ahead of the MMAs, and round 0 is the first with an MMA. All warps run as many rounds as the first.
    __device__ __forceinline__ void mainloop() {
        int first = key_start / TILE_KEYS, end = (key_end + TILE_KEYS - 1) / TILE_KEYS,
            step = params.stream_k.key_groups, stage = 0;
        last_page = page_index(params, max(key_end - 1, 0));
        RunPages runs = {};
        SeenKeys fetched[MMA_KEY_TILES] = {};
        begin();
#pragma unroll 1
        for (int round = -1, ahead = first + group; round <= 0 || ahead - step - group < end; round++, ahead += step) {
            bool at_once = !waits_for_pages || round == 0;
            if (round < 0 && ahead < end) runs = look_up_pages(ahead);
            // All threads of the CTA load the queries, together with the first K tile.
            auto synchronize = [&] { round == 0 ? __syncthreads() : __syncwarp(); };
            if (at_once) {
                if (round > 0) __syncwarp();
            } else if (round >= 0) {
                cp_async_wait<0>();
                synchronize();
            }
            SeenKeys seen[MMA_KEY_TILES];
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) seen[k] = fetched[k];
            if (ahead < end) {
                fetch(ahead, stage, runs, fetched);
                runs = look_up_pages(ahead + step);
            }
            if (round < 0) load_queries();
            cp_async_commit();
            stage ^= 1;
            if (at_once && round >= 0) {
                cp_async_wait<1>();
                synchronize();
            }
            if (round == 0) products.keys.load_query_fragments();
            if (round < 0 || ahead - step >= end) continue;
            unsigned keys = ring + stage * STAGE_BYTES;
            Scores scores = {};
            products.keys.mma_qk(scores, keys);
            scale_scores(scores, seen);
            softmax_step(scores);
            products.values.mma_pv(out, scores, keys + TILE_KEYS * KEY_PITCH, 0, 0);
        }
    }

    // Stores this warp's state to shared memory, over the pipeline stages.
    __device__ __forceinline__ void store_state(Shared &shared, float *states) const {
        float *mine = states + group * TILE_ROWS * OUT_PITCH;
        int first_row = 2 * (lane & 3);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = row_sum[r];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) all += __shfl_xor_sync(~0u, all, step);
            if (lane < 4) {
                shared.max[group][first_row + r] = row_max[r];
                shared.sum[group][first_row + r] = all;
            }
        }
#pragma unroll
        for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                mine[(first_row + (e & 1)) * OUT_PITCH + products.values.value_dim_of(v, e)] = out[v][0][e];
    }
};

// A tile whose keys other CTAs have too: the last of them to arrive combines all parts.
static __device__ __forceinline__ void finish_split_tile(const PageWorker &w, Shared &shared, int first_cta,
                                                         int last_cta) {
    unsigned *counter = (unsigned *)w.params.workspace + first_cta;
    if (threadIdx.x == 0) shared.last = count_arrival(counter) == (unsigned)(last_cta - first_cta);
    __syncthreads();
    if (shared.last) {
        for (int row = threadIdx.x >> 5; row < w.tile.rows; row += blockDim.x >> 5)
            combine_row<STATES_PER_BATCH>(w.params, w.tile, row, w.lane, first_cta, last_cta,
                                          element_out_type(w.params));
        if (threadIdx.x == 0) *counter = 0;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) decode(const __grid_constant__ ListedParameters listed) {
    const AttentionParameters &params = listed.attention;
    Shared &shared = *(Shared *)dynamic_shared;
    constexpr int QUERY_OFFSET = (sizeof(Shared) + 127) / 128 * 128;
    constexpr int RING_OFFSET = QUERY_OFFSET + (TILE_ROWS * QUERY_PITCH + 127) / 128 * 128;
    float *states = (float *)(dynamic_shared + RING_OFFSET);
    static_assert(sizeof(Shared) <= 1024 + 128 * TILE_ROWS, "the host reserves this much shared memory");

    PageWorker w = {params};
    w.lane = threadIdx.x & 31;
    w.group = threadIdx.x >> 5;
    w.query = shared_address(dynamic_shared + QUERY_OFFSET);
    w.products.keys.query = w.query;
    w.products.keys.lane = w.products.values.lane = w.lane;
    w.ring = shared_address(dynamic_shared + RING_OFFSET) + w.group * STAGES * STAGE_BYTES;
    touch_parameters(params);

    // Lengths of lists on the device may be written by the preceding kernel.
    bool knows_work = params.stream_k.work_total;
    if (!knows_work) grid_dependency_wait();
    CtaRange cta_range = find_cta_range(params, *(RangeScratch *)states);
    if (knows_work) grid_dependency_wait();
    // Tiles cost nothing to start where each has CTAs of its own.
    w.waits_for_pages = cta_range.costs.start == 0;
    WorkCursor &cursor = cta_range.cursor;
    long long at = cta_range.begin;
    while (at < cta_range.end) {
        w.tile.seq = load_listed_row(params, cursor.sequence);
        SequenceTiles tiles = sequence_tiles(params, w.tile.seq, cta_range.costs);
        if (at >= cursor.before + tiles.work(params)) {
            cursor = {cursor.sequence + 1, cursor.before + tiles.work(params)};
            if (!knows_work) cursor = find_sequence(params, cta_range.costs, cursor, at);
            if (cursor.sequence >= params.batch) break;
            continue;
        }
        w.tile.sequence = w.tile.seq.sequence;
        int number = (int)divide(at - cursor.before, tiles.cost);
        w.select_tile(number, tiles);
        w.load_list(cursor.sequence);
        long long start = cursor.before + (long long)number * tiles.cost, keys_start = start + cta_range.costs.start,
                  tile_end = start + tiles.cost, end = min(cta_range.end, tile_end);
        bool starts_here = start >= at, ends_here = tile_end <= cta_range.end;
        // Units of keys.
        int unit = (int)max(at - keys_start, 0ll), last_unit = (int)max(end - keys_start, 0ll);
        w.key_start = unit << params.stream_k.work_unit_shift;
        w.key_end = (int)min((long long)w.tile.any_end, (long long)last_unit << params.stream_k.work_unit_shift);
        if (w.key_end <= w.key_start) w.key_start = w.key_end = 0;
        w.mainloop();
        cp_async_wait<0>();
        __syncthreads();
        w.store_state(shared, states);
        __syncthreads();
        int warps = blockDim.x >> 5;
        for (int row = w.group; row < w.tile.rows; row += warps) {
            RowState combined[ROWS_PER_BATCH];
            combine_groups(params, combined, shared, states, row, warps, w.lane);
            if (starts_here && ends_here)
                store_row(params, w.tile, row, w.lane, combined[0], element_out_type(params));
            else
                store_partial(partial_state(params, blockIdx.x, starts_here ? 0 : 1), row, w.lane, combined[0]);
        }
        __syncthreads();
        if (!starts_here || !ends_here) {
            int first_cta = starts_here ? (int)blockIdx.x : (int)divide(start, cta_range.work_per_cta);
            int last_cta = ends_here ? (int)blockIdx.x : (int)divide(tile_end - 1, cta_range.work_per_cta);
            finish_split_tile(w, shared, first_cta, last_cta);
        }
        at = end;
    }
}
