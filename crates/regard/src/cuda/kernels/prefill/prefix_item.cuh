// Work items over the prefixes of groups (prefix_schedule.cuh): which rows and keys an item has.
//
// An item is TILE_ROWS packed rows (token, query head) of a group and key/value head, and a split of the prefix, which
// is read through the page table of one member. Each row keeps its own position, mask and length.
#pragma once
#include "common/paging.cuh"
#include "common/row_facts.cuh"
#include "prefill/prefix_schedule.cuh"

// A query row of a prefix group.
struct PrefixRow {
    RowFacts facts;
    long long query; // where its query starts, in elements
};

struct PrefixItem {
    const PrefixGroup *group;
    int kv_head, first_row, rows;
    int start, end; // keys
    long long first_state;
};

// Programmatic dependent launch: the prefix kernel starts when all CTAs of decode have started, and runs beside them.
// `schedule` has ended by then, because decode waits for it. Later kernels find decode's results too, because
// this one ends after it.
static __device__ __forceinline__ void begin_beside_decode() { launch_dependents(); }
static __device__ __forceinline__ void end_beside_decode() { wait_for_preceding(); }

// Read past L1, which may still hold an earlier schedule.
static __device__ __forceinline__ PrefixTotals load_totals(const PrefixParameters &prefix) {
    const int *totals = (const int *)prefix.totals;
    return {__ldcg(totals), __ldcg(totals + 1)};
}

// The keys that some row of an item sees, and that every row sees.
struct PrefixKeys {
    int any_start, any_end, every_start, every_end;
};

static __device__ __forceinline__ PrefixItem find_item(const PrefixParameters &prefix, int groups, int number) {
    const PrefixGroup *schedule = (const PrefixGroup *)prefix.schedule;
    int low = 0, high = groups - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (__ldcg(&schedule[middle].first_item) <= number)
            low = middle;
        else
            high = middle - 1;
    }
    PrefixItem item;
    item.group = schedule + low;
    const PrefixGroup &group = *item.group;
    int row_tiles = __ldcg(&group.row_tiles), splits = __ldcg(&group.splits), rows = __ldcg(&group.rows);
    // Tiles of the same keys are neighbours: they run at the same time, and read them from L2.
    int rest = number - __ldcg(&group.first_item), tile = rest % row_tiles;
    rest /= row_tiles;
    int split = rest % splits, split_keys = __ldcg(&group.split_keys);
    item.kv_head = rest / splits;
    item.first_row = tile * TILE_ROWS;
    item.rows = min(TILE_ROWS, rows - item.first_row);
    item.start = split * split_keys;
    item.end = min(item.start + split_keys, __ldcg(&group.len));
    item.first_state = __ldcg(&group.first_state) + ((long long)item.kv_head * splits + split) * rows + item.first_row;
    return item;
}

// Looks up the rows of an item: their queries, and what their scores depend on. All threads of the CTA.
template <bool HAS_FEATURES> static __device__ __forceinline__ void
find_rows(const AttentionParameters &params, const PrefixParameters &prefix, const PrefixItem &item, PrefixRow *rows) {
    int first_token = __ldcg(&item.group->first_token);
#pragma unroll 1
    for (int row = threadIdx.x; row < TILE_ROWS; row += THREADS) {
        PrefixRow found;
        found.facts = {0, 0, 0, 0.0f, 0, 0, 0};
        found.query = 0;
        if (row < item.rows) {
            int packed = item.first_row + row, at = packed / params.group;
            const int *pair = (const int *)prefix.tokens + 2 * (first_token + at);
            IntPair token = {__ldcg(pair), __ldcg(pair + 1)};
            int head = item.kv_head * params.group + packed - at * params.group;
            PrefillTile tile;
            tile.sequence = token.first;
            tile.seq = load_sequence(params, token.first);
            found.facts = row_facts<HAS_FEATURES>(params, tile, head, token.second);
            found.facts.start = clamp_int(found.facts.start, item.start, item.end);
            found.facts.end = clamp_int(found.facts.end, found.facts.start, item.end);
            const RowStrides &strides = params.query.strides;
            found.query = tile.sequence * strides.batch + (long long)(tile.seq.q_start + token.second) * strides.token +
                          head * strides.head;
        }
        rows[row] = found;
    }
}

// The keys of an item, by one warp.
static __device__ __forceinline__ PrefixKeys find_keys(const PrefixItem &item, const PrefixRow *rows) {
    int lane = threadIdx.x & 31;
    PrefixKeys keys = {item.end, item.start, item.start, item.end};
    for (int row = lane; row < item.rows; row += 32) {
        const RowFacts &facts = rows[row].facts;
        if (facts.start < facts.end) {
            keys.any_start = min(keys.any_start, facts.start);
            keys.any_end = max(keys.any_end, facts.end);
        }
        keys.every_start = max(keys.every_start, facts.start);
        keys.every_end = min(keys.every_end, facts.end);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        keys.any_start = min(keys.any_start, __shfl_xor_sync(~0u, keys.any_start, step));
        keys.any_end = max(keys.any_end, __shfl_xor_sync(~0u, keys.any_end, step));
        keys.every_start = max(keys.every_start, __shfl_xor_sync(~0u, keys.every_start, step));
        keys.every_end = min(keys.every_end, __shfl_xor_sync(~0u, keys.every_end, step));
    }
    return keys;
}
