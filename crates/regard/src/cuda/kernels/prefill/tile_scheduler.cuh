// The tiles of a prefill: which one comes next, and its facts.
//
// A tile is up to so many (`ROWS`) consecutive tokens of one query head of one sequence. Blocks stay on their multiprocessor and take tiles by
// number: their own number first, then from a counter in the workspace. Numbers are ordered so that long work comes first and blocks that run side by
// side read the same keys. Tiles are counted in 32 bits, which nobody checks: 2^32 tiles of 128 rows and 64 dims have 64 TB of output.
#pragma once
#include "common/problem.cuh"

struct PrefillTile {
    int sequence;
    Sequence facts;
    int head, kv_head;
    int first_token, tokens;
    int start, end;           // keys that some row of the tile sees by structure
    int each_start, each_end; // keys that every row of it sees
    int first_seen, last_seen; // keys that some row of the sequence sees: what lies outside must not reach a product with values
};

// Where a search stands: numbers only go up, so the next one continues there.
struct TilePlace {
    int sequence;    // its index
    unsigned before; // tiles before its first
};

// The next tile's number; one thread asks. `takers`: blocks, or clusters of them, that take tiles.
static __device__ __forceinline__ unsigned take_tile(const PrefillParameters &t, unsigned takers = gridDim.x) {
    return takers + atomicAdd((unsigned *)t.counters, 1u);
}

// One thread of a block says that the block takes no more tiles: the last block leaves the counters as it found them.
static __device__ __forceinline__ void finish_tiles(const PrefillParameters &t, unsigned takers = gridDim.x) {
    unsigned *counters = (unsigned *)t.counters, before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counters + 1) : "memory");
    if (before == takers - 1) counters[0] = counters[1] = 0;
}

// A quotient of small numbers, which f32 divides exactly but for the last unit; a tenth of the time of any numbers.
static __device__ __forceinline__ unsigned divide_small(unsigned a, unsigned b) {
    if ((a | b) >> 24) return a / b;
    int quotient = (int)__fdividef((float)(int)a, (float)(int)b);
    int rest = (int)a - quotient * (int)b;
    return quotient + (rest >= (int)b) - (rest < 0);
}

// What the tile's place in its sequence says about keys: a lane reckons one token's.
static __device__ __forceinline__ void find_keys(const AttentionParameters &p, PrefillTile &tile) {
    int lane = threadIdx.x & 31, last = tile.first_token + tile.tokens - 1;
    int token = lane == 0 ? tile.first_token : lane == 1 ? last : lane == 2 ? 0 : tile.facts.q_len - 1;
    int start = visible_start(p, tile.facts, token), end = visible_end(p, tile.facts, token);
    tile.start = __shfl_sync(~0u, start, 0);
    tile.each_end = __shfl_sync(~0u, end, 0);
    tile.each_start = __shfl_sync(~0u, start, 1);
    tile.end = __shfl_sync(~0u, end, 1);
    tile.first_seen = __shfl_sync(~0u, start, 2);
    tile.last_seen = __shfl_sync(~0u, end, 3);
}

// The tile of that number, known to the whole warp that asks; false where there is none, nor any after it.
template <int ROWS>
static __device__ __forceinline__ bool find_tile(const AttentionParameters &p, const PrefillParameters &t, unsigned number, TilePlace &place, PrefillTile &tile) {
    unsigned row_tile;
    if (t.tiles > 0) {
        // All sequences are alike. Sections of pairs (sequence, key/value head); in a section the last rows first; then pair by pair.
        if (number >= (unsigned long long)t.tiles) return false;
        unsigned group = p.group, pairs = (unsigned)p.batch * p.kv_heads, row_tiles = t.row_tiles;
        unsigned section_tiles = t.section * group * row_tiles;
        unsigned section = divide_small(number, section_tiles), rest = number - section * section_tiles;
        unsigned row_heads = min((unsigned)t.section, pairs - section * t.section) * group;
        unsigned row = divide_small(rest, row_heads), pair = rest - row * row_heads;
        row_tile = row_tiles - 1 - row;
        unsigned in_section = divide_small(pair, group), member = pair - in_section * group;
        pair = section * t.section + in_section;
        tile.sequence = divide_small(pair, p.kv_heads);
        tile.kv_head = pair - tile.sequence * p.kv_heads;
        tile.head = tile.kv_head * group + member;
        tile.facts = load_sequence(p, tile.sequence);
    } else {
        // Only the device knows the lengths: 32 sequences at a time.
        unsigned lane = threadIdx.x & 31, heads = (unsigned)p.kv_heads * p.group;
        for (;;) {
            if (place.sequence >= p.batch) return false;
            int index = place.sequence + lane;
            unsigned count = 0;
            if (index < p.batch) {
                int q_len = load_sequence(p, index).q_len;
                if (q_len >= t.least_query_len) count = ((unsigned)q_len + ROWS - 1) / ROWS * heads;
            }
            unsigned until = count;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                unsigned other = __shfl_up_sync(~0u, until, step);
                if (lane >= step) until += other;
            }
            unsigned past = __ballot_sync(~0u, number - place.before < until);
            if (past) {
                int found = __ffs(past) - 1;
                place.sequence += found;
                place.before += __shfl_sync(~0u, until - count, found);
                break;
            }
            place.before += __shfl_sync(~0u, until, 31);
            place.sequence += 32;
        }
        tile.sequence = place.sequence;
        tile.facts = load_sequence(p, place.sequence);
        unsigned rest = number - place.before, row = divide_small(rest, heads);
        row_tile = ((unsigned)tile.facts.q_len + ROWS - 1) / ROWS - 1 - row;
        tile.head = rest - row * heads;
        tile.kv_head = divide_small(tile.head, p.group);
    }
    tile.first_token = row_tile * ROWS;
    tile.tokens = min(ROWS, tile.facts.q_len - tile.first_token);
    find_keys(p, tile);
    return true;
}

// Which key tiles a mask empties, which it leaves whole: one byte each, prepared by mask_map.cu.
enum MapKind { MAP_EMPTY = 0, MAP_FULL = 1, MAP_MIXED = 2 };

// The tile's row of the map, indexed by key tile; null where there is none.
static __device__ __forceinline__ const unsigned char *find_map(const PrefillParameters &t, const PrefillTile &tile, int tile_rows) {
    if (!t.tile_map) return nullptr;
    long long at = tile.sequence * t.map_batch_stride + tile.head * t.map_head_stride + (long long)(tile.first_token / tile_rows) * t.map_row_stride;
    return (const unsigned char *)t.tile_map + at;
}
