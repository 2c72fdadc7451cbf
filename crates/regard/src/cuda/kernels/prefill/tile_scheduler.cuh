// The tiles of a prefill: which one comes next, and its facts.
//
// A tile is up to so many (`ROWS`) consecutive tokens of one query head of one sequence. Blocks stay on their
// multiprocessor and take tiles by number: their own number first, then from a counter in the workspace. Numbers are
// ordered so that long work comes first and blocks that run side by side read the same keys. Tiles are counted in 32
// bits, which nobody checks: 2^32 tiles of 128 rows and 64 dims have 64 TB of output.
#pragma once
#include "common/problem.cuh"

struct PrefillTile {
    int sequence;
    SequenceInfo seq;
    int head, kv_head;
    int first_token, tokens;
    int any_start, any_end;     // keys that some row of the tile sees by structure
    int every_start, every_end; // keys that every row of it sees
    int seq_start,
        seq_end; // keys that some row of the sequence sees: what lies outside must not reach a product with values
};

// Where a search stands: numbers only go up, so the next one continues there.
struct TileCursor {
    int sequence;    // its index
    unsigned before; // tiles before its first
};

// The next tile's number; one thread asks. `workers`: blocks, or clusters of them, that take tiles.
static __device__ __forceinline__ unsigned claim_tile(const PrefillParameters &prefill, unsigned workers = gridDim.x) {
    return workers + atomicAdd((unsigned *)prefill.counters, 1u);
}

// One thread of a block says that the block takes no more tiles: the last block leaves the counters as it found them.
static __device__ __forceinline__ void finish_tile_scheduler(const PrefillParameters &prefill,
                                                             unsigned workers = gridDim.x) {
    unsigned *counters = (unsigned *)prefill.counters, before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + 1) : "memory");
    if (before == workers - 1) counters[0] = counters[1] = 0;
}

// A quotient of small numbers, which f32 divides exactly but for the last unit; a tenth of the time of any numbers.
static __device__ __forceinline__ unsigned divide_small(unsigned a, unsigned b) {
    if ((a | b) >> 24) return a / b;
    int quotient = (int)__fdividef((float)(int)a, (float)(int)b);
    int rest = (int)a - quotient * (int)b;
    return quotient + (rest >= (int)b) - (rest < 0);
}

// What the tile's place in its sequence says about keys: a lane reckons one token's.
static __device__ __forceinline__ void find_key_ranges(const AttentionParameters &params, PrefillTile &tile) {
    int lane = threadIdx.x & 31, last = tile.first_token + tile.tokens - 1;
    int token = lane == 0 ? tile.first_token : lane == 1 ? last : lane == 2 ? 0 : tile.seq.q_len - 1;
    int start = visible_start(params, tile.seq, token), end = visible_end(params, tile.seq, token);
    tile.any_start = __shfl_sync(~0u, start, 0);
    tile.every_end = __shfl_sync(~0u, end, 0);
    tile.every_start = __shfl_sync(~0u, start, 1);
    tile.any_end = __shfl_sync(~0u, end, 1);
    tile.seq_start = __shfl_sync(~0u, start, 2);
    tile.seq_end = __shfl_sync(~0u, end, 3);
}

// The tile of that number, known to the whole warp that asks; false where there is none, nor any after it.
template <int ROWS> static __device__ __forceinline__ bool find_tile(const AttentionParameters &params,
                                                                     const PrefillParameters &prefill, unsigned number,
                                                                     TileCursor &cursor, PrefillTile &tile) {
    unsigned row_tile;
    if (prefill.tiles > 0) {
        // All sequences are alike. Sections of pairs (sequence, key/value head); in a section the last rows first; then
        // pair by pair.
        if (number >= (unsigned long long)prefill.tiles) return false;
        unsigned group = params.group, pairs = (unsigned)params.batch * params.kv_heads, row_tiles = prefill.row_tiles;
        unsigned tiles_per_l2_group = prefill.l2_group * group * row_tiles;
        unsigned l2_group = divide_small(number, tiles_per_l2_group), rest = number - l2_group * tiles_per_l2_group;
        unsigned row_heads = min((unsigned)prefill.l2_group, pairs - l2_group * prefill.l2_group) * group;
        unsigned row = divide_small(rest, row_heads), pair = rest - row * row_heads;
        row_tile = row_tiles - 1 - row;
        unsigned in_l2_group = divide_small(pair, group), member = pair - in_l2_group * group;
        pair = l2_group * prefill.l2_group + in_l2_group;
        tile.sequence = divide_small(pair, params.kv_heads);
        tile.kv_head = pair - tile.sequence * params.kv_heads;
        tile.head = tile.kv_head * group + member;
        tile.seq = load_sequence(params, tile.sequence);
    } else {
        // Only the device knows the lengths: 32 sequences at a time.
        unsigned lane = threadIdx.x & 31, heads = (unsigned)params.kv_heads * params.group;
        for (;;) {
            if (cursor.sequence >= params.batch) return false;
            int index = cursor.sequence + lane;
            unsigned count = 0;
            if (index < params.batch) {
                int q_len = load_sequence(params, index).q_len;
                if (q_len >= prefill.min_query_len) count = ((unsigned)q_len + ROWS - 1) / ROWS * heads;
            }
            unsigned until = count;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                unsigned other = __shfl_up_sync(~0u, until, step);
                if (lane >= step) until += other;
            }
            unsigned past = __ballot_sync(~0u, number - cursor.before < until);
            if (past) {
                int found = __ffs(past) - 1;
                cursor.sequence += found;
                cursor.before += __shfl_sync(~0u, until - count, found);
                break;
            }
            cursor.before += __shfl_sync(~0u, until, 31);
            cursor.sequence += 32;
        }
        tile.sequence = cursor.sequence;
        tile.seq = load_sequence(params, cursor.sequence);
        unsigned rest = number - cursor.before, row = divide_small(rest, heads);
        row_tile = ((unsigned)tile.seq.q_len + ROWS - 1) / ROWS - 1 - row;
        tile.head = rest - row * heads;
        tile.kv_head = divide_small(tile.head, params.group);
    }
    tile.first_token = row_tile * ROWS;
    tile.tokens = min(ROWS, tile.seq.q_len - tile.first_token);
    find_key_ranges(params, tile);
    return true;
}

// Which key tiles a mask empties, which it leaves whole: one byte each, prepared by mask_map.cu.
enum MapKind { MAP_EMPTY = 0, MAP_FULL = 1, MAP_MIXED = 2 };

// The tile's row of the map, indexed by key tile; null where there is none.
static __device__ __forceinline__ const unsigned char *tile_map_row(const PrefillParameters &prefill,
                                                                    const PrefillTile &tile, int tile_rows) {
    if (!prefill.tile_map) return nullptr;
    long long at = tile.sequence * prefill.map_batch_stride + tile.head * prefill.map_head_stride +
                   (long long)(tile.first_token / tile_rows) * prefill.map_row_stride;
    return (const unsigned char *)prefill.tile_map + at;
}
