// Tiles of several adjacent key/value heads over blocks (HEADS), on Hopper: some warps copy the rows of keys and of
// values to shared memory, a token's rows of all heads at once, and run ahead of the warps of the heads, which wait for
// nothing but their data.
#pragma once
#include "decode/decode_scores.cuh"
#include "decode/decode_tile.cuh"
#include "decode/head_slots.cuh"

// A copying warp's part of a K tile's keys, or of its values: consecutive lanes copy consecutive chunks of 16 bytes, so
// that a request is for whole lines where rows follow one another in memory.
template <class Side> struct RowCopies {
    static constexpr int CHUNKS = Side::ROW_BYTES / 16, ALL = COPIED_ROWS * CHUNKS, ROUNDS = (ALL + 31) / 32;
    int rows[ROUNDS]; // of this lane's chunks

    __device__ __forceinline__ void set(int lane) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) rows[i] = (lane + 32 * i) / CHUNKS;
    }

    // Starts the copies. `from`: of the warp's first row. Rows from `first` on exist, `count` of them; the others
    // become zeros.
    __device__ __forceinline__ void start(unsigned to, unsigned long long from, long long stride, int first,
                                          unsigned count, int lane) const {
        int to_next = opaque(Side::PITCH - Side::ROW_BYTES);
        long long from_next = stride - Side::ROW_BYTES;
        asm volatile("" : "+l"(from_next)); // multiplied where it is needed, not ahead of all rounds
        to += lane * 16, from += lane * 16;
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            if (ALL % 32 && lane + 32 * i >= ALL) break;
            cp_async_alone(to + rows[i] * to_next + 512 * i, (const void *)(from + rows[i] * from_next + 512 * i),
                           unsigned(rows[i] - first) < count ? 16 : 0);
        }
    }
};

// Copies the keys and values of a tile for a group.
template <class Worker> static __device__ __forceinline__ void
copy_tile(Worker &w, const RowCopies<KeySide> &key_copies, const RowCopies<ValueSide> &value_copies, int first_row) {
    static_assert(16 % COPIED_ROWS == 0, "rows of one run of 16 keys");
    const AttentionParameters &params = w.params;
    int step = params.stream_k.key_groups, end = (w.key_end + TILE_KEYS - 1) / TILE_KEYS;
    int key = (w.first_key_tile + w.group) * TILE_KEYS + first_row, entry = 0;
    if (params.block_size) w.last_entry = page_index(params, max(w.key_end - 1, 0));
    // Neither does the preceding kernel write the page table if lengths are scheduled.
    if (!is_scheduled(params)) grid_dependency_wait();
    if (key < w.key_end) entry = w.look_up(key);
    if (is_scheduled(params)) grid_dependency_wait();
#pragma unroll 1
    for (int key_tile = w.first_key_tile + w.group; key_tile < end; key_tile += step, key += step * TILE_KEYS) {
        long long key_at, value_at;
        w.locate(key, entry, key_at, value_at);
        entry = w.look_up(key + step * TILE_KEYS);
        int first_key = w.key_start - key, keys = w.key_end - w.key_start;
        key_copies.start(w.slots.wait_empty() + first_row * KEY_PITCH, w.tile.key_base + key_at * KeySide::BYTES,
                         params.keys.strides.token * KeySide::BYTES, first_key, keys, w.lane);
        w.slots.announce();
        value_copies.start(w.slots.wait_empty() + first_row * VALUE_PITCH,
                           w.tile.value_base + value_at * ValueSide::BYTES,
                           params.values.strides.token * ValueSide::BYTES, first_key, keys, w.lane);
        w.slots.announce();
    }
}

// The warps that copy: all tiles of the CTA, as the main loop of the kernel finds them.
template <class Worker> static __device__ __forceinline__ void copy_tiles(Worker &w, CtaRange &cta_range) {
    const AttentionParameters &params = w.params;
    int first_row = (threadIdx.x - computing_threads()) / 32 % COPY_WARPS * COPIED_ROWS;
    RowCopies<KeySide> key_copies;
    RowCopies<ValueSide> value_copies;
    key_copies.set(w.lane);
    value_copies.set(w.lane);
    WorkCursor &cursor = cta_range.cursor;
    long long at = cta_range.begin;
    while (at < cta_range.end) {
        w.tile.sequence = cursor.sequence;
        w.tile.seq = load_work(params, cursor.sequence);
        SequenceTiles tiles = sequence_tiles(params, w.tile.seq, cta_range.costs);
        if (at >= cursor.before + tiles.work(params)) {
            cursor = {cursor.sequence + 1, cursor.before + tiles.work(params)};
            if (!params.stream_k.work_total) cursor = find_sequence(params, cta_range.costs, cursor, at);
            if (cursor.sequence >= params.batch) break;
            continue;
        }
        int tile = (int)divide(at - cursor.before, tiles.cost);
        long long start = cursor.before + (long long)tile * tiles.cost, keys_start = start + cta_range.costs.start;
        w.select_tile(tile, tiles);
        long long end = min(cta_range.end, start + tiles.cost);
        int unit = (int)max(at - keys_start, 0ll), last_unit = (int)max(end - keys_start, 0ll);
        select_keys(params, w, tiles.first_unit, unit, max(last_unit - unit, 1), last_unit);
        copy_tile(w, key_copies, value_copies, first_row);
        __syncthreads(); // states are merged where the next rows are copied to
        at = end;
    }
}

// The warps of the heads: each has the rows of its own.
template <class Worker>
static __device__ __forceinline__ void multiply_tiles(Worker &w, const RowView &view, int first, int end, int step) {
    const AttentionParameters &params = w.params;
    grid_dependency_wait();
    w.load_queries();
    w.load_tile_scales();
    w.load_row_facts();
    synchronize_computing();
    w.products.keys.load_query_fragments();
    w.load_query_scales();
#pragma unroll 1
    for (int key_tile = first; key_tile < end; key_tile += step) {
        Scores scores = {};
        w.products.keys.mma_qk(scores, w.slots.wait_full() + w.row_warp * KeySide::HEAD_BYTES);
        w.slots.release(w.lane);
        w.scale_scores(scores, 0);
        modify_scores(params, scores, view, key_tile * TILE_KEYS, w.lane);
        w.softmax_step(scores);
        w.products.values.mma_pv(w.out, scores, w.slots.wait_full() + w.row_warp * ValueSide::HEAD_BYTES, 0, 0);
        w.slots.release(w.lane);
    }
}
