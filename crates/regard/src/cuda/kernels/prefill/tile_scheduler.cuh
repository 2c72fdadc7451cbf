// Tile scheduler of the persistent prefill kernels.
//
// A tile is up to ROWS consecutive tokens of one query head of one sequence. CTAs stay resident and take tiles by
// number: first their own index, then from an atomic counter in the workspace. Numbers are ordered so that long tiles
// come first and concurrent CTAs read the same keys from L2. They are 32 bits, unchecked: 2^32 tiles of 128 rows and 64
// dims would have 64 TB of output.
#pragma once
#include "common/arrival.cuh"
#include "common/grid_dependency.cuh"
#include "common/problem.cuh"

struct PrefillTile {
    int sequence;
    SequenceInfo seq;
    int head, kv_head;
    int first_token, tokens;
    int any_start, any_end;     // keys that some row of the tile sees by structure
    int every_start, every_end; // keys that every row of the tile sees
    int seq_start,
        seq_end;       // keys that some row of the sequence sees: others must not reach P V
    float scale;       // of dot products: the call's, times that of the head's keys
    float value_scale; // of the head's values
    int split;         // which part of its keys
};

// The state of a search. Tile numbers only grow, so the next search continues from here.
struct TileCursor {
    int sequence;    // its index
    unsigned before; // tiles of all sequences before it
};

// Claims the next tile number; called by one thread. `workers`: CTAs, or clusters of them, that claim tiles.
static __device__ __forceinline__ unsigned claim_tile(const PrefillParameters &prefill, unsigned workers = gridDim.x) {
    return workers + atomicAdd((unsigned *)prefill.counters, 1u);
}

// Called by one thread per worker when it is done: the last one resets the counters for the next launch.
static __device__ __forceinline__ void finish_tile_scheduler(const PrefillParameters &prefill,
                                                             unsigned workers = gridDim.x) {
    unsigned *counters = (unsigned *)prefill.counters;
    if (count_arrival(counters + 1) == workers - 1) counters[0] = counters[1] = 0;
}

// A quotient of small numbers, ten times faster than `/`: f32 division is off by at most one.
static __device__ __forceinline__ unsigned divide_small(unsigned a, unsigned b) {
    if ((a | b) >> 24) return a / b;
    int quotient = (int)__fdividef((float)(int)a, (float)(int)b);
    int rest = (int)a - quotient * (int)b;
    return quotient + (rest >= (int)b) - (rest < 0);
}

// The key ranges of a tile: lanes 0 to 3 compute one token each.
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

// 1 if there are none.
static __device__ __forceinline__ float head_scale(const HeadScales &scales, const PrefillTile &tile) {
    long long at = tile.sequence * scales.sequence_stride + tile.kv_head * scales.stride;
    return scales.pointer ? ((const float *)scales.pointer)[at] : 1.0f;
}

// The scales of a tile's head.
static __device__ __forceinline__ void find_scales(const AttentionParameters &params, const PrefillParameters &prefill,
                                                   PrefillTile &tile) {
    // Neither 0, nor infinite in units of log2: their products with infinity and with 0 are NaN.
    constexpr float SMALLEST = 1.17549435e-38f, LARGEST = 1.7e38f;
    float scale = params.scale * head_scale(prefill.key_scales, tile);
    if (prefill.key_scales.pointer) scale = copysignf(fminf(fmaxf(fabsf(scale), SMALLEST), LARGEST), params.scale);
    tile.scale = scale;
    tile.value_scale = head_scale(prefill.value_scales, tile);
}

// Looks up tile `number` of `rows` rows for the whole warp; find_scales finds its scales. False if there is none, nor
// any after it.
static __device__ __forceinline__ bool find_tile(const AttentionParameters &params, const PrefillParameters &prefill,
                                                 int rows, unsigned number, TileCursor &cursor, PrefillTile &tile) {
    unsigned row_tile;
    if (prefill.tiles > 0) {
        // All sequences have equal lengths. Order: L2 groups of (sequence, key/value head) pairs; within a group the
        // last rows first; then pair by pair.
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
        // Lengths are only on the device: scan 32 sequences at a time.
        unsigned lane = threadIdx.x & 31, heads = (unsigned)params.kv_heads * params.group;
        for (;;) {
            if (cursor.sequence >= params.batch) return false;
            int index = cursor.sequence + lane;
            unsigned count = 0;
            if (index < params.batch) {
                int q_len = load_sequence(params, index).q_len;
                if (q_len >= prefill.min_query_len) count = ((unsigned)q_len + rows - 1) / rows * heads;
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
        row_tile = ((unsigned)tile.seq.q_len + rows - 1) / rows - 1 - row;
        tile.head = rest - row * heads;
        tile.kv_head = divide_small(tile.head, params.group);
    }
    tile.first_token = row_tile * rows;
    tile.tokens = min(rows, tile.seq.q_len - tile.first_token);
    find_key_ranges(params, tile);
    return true;
}

// The tile's row of the mask's tile map (mask_map.cu), indexed by K tile; null if there is none.
static __device__ __forceinline__ const unsigned char *tile_map_row(const PrefillParameters &prefill,
                                                                    const PrefillTile &tile, int tile_rows) {
    if (!prefill.map.pointer) return nullptr;
    long long at = tile.sequence * prefill.map.strides.batch + tile.head * prefill.map.strides.head +
                   (long long)(tile.first_token / tile_rows) * prefill.map.strides.row;
    return (const unsigned char *)prefill.map.pointer + at;
}
