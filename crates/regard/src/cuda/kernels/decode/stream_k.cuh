// How work is divided over a fixed grid when only the device knows the lengths.
//
// A tile is ROWS packed rows of one (sequence, key/value head). Its cost is the units of 2^unit_shift keys that some row of its sequence
// sees, and some more for starting it. Tiles stand in a line: sequence by sequence, head by head. Every thread block takes the
// same length of that line, so a long sequence is cut among many blocks and many short ones share a block. Where a block's end cuts
// a tile, each block leaves a partial state of it, and the last one to finish joins them, in the line's order.
#pragma once
#include "common/problem.cuh"

constexpr int MOST_KEY_GROUPS = 8;
constexpr int MOST_WARPS = 16;

// What tiles cost.
struct Costs {
    int multiple; // a tile's units are rounded up to this; 1 where they are not
    int start;    // units for starting one
};

// One sequence's part of the line.
struct Tiles {
    int row_tiles;   // of each key/value head
    int first_unit;  // unit of its first visible key
    long long units; // units that some row sees
    long long cost;  // of each tile
    __device__ __forceinline__ long long count(const AttentionParameters &p) const { return (long long)row_tiles * p.kv_heads; }
    __device__ __forceinline__ long long length(const AttentionParameters &p) const { return cost * count(p); }
};

// A quotient of what may be large. Not inlined, like all that is rarely run: instructions that were never fetched before cost a short
// call more than the work they do.
static __device__ __noinline__ long long divide_wide(long long a, long long b) { return a / b; }

// A quotient of numbers from 0 up: nearly always small ones, which f32 divides exactly but for the last unit.
static __device__ __forceinline__ long long divide(long long a, long long b) {
    if ((unsigned long long)(a | b) >> 24) return divide_wide(a, b);
    int quotient = (int)__fdividef((float)(int)a, (float)(int)b);
    int rest = (int)a - quotient * (int)b;
    return quotient + (rest >= (int)b) - (rest < 0);
}

static __device__ __forceinline__ long long divide_up(long long a, long long b) { return divide(a + b - 1, b); }

static __device__ __forceinline__ Tiles tiles_of(const AttentionParameters &p, const Sequence &s, Costs costs) {
    Tiles tiles;
    tiles.row_tiles = s.q_len > p.most_query_len ? 0 : (int)(((long long)s.q_len * p.group + ROWS - 1) / ROWS);
    int start = visible_start(p, s, 0), end = visible_end(p, s, s.q_len - 1);
    tiles.first_unit = start >> p.unit_shift;
    tiles.units = end > start ? ((end - 1) >> p.unit_shift) + 1 - tiles.first_unit : 0;
    if (p.line) {
        tiles.cost = p.tile_cost;
    } else if (costs.multiple == 1) {
        tiles.cost = tiles.units + costs.start;
    } else {
        tiles.cost = divide_up(max(tiles.units, 1ll), costs.multiple) * costs.multiple;
    }
    return tiles;
}

struct Scan {
    long long warps[MOST_WARPS];
    long long total, before;
    int found;
};

// Where a thread block stands in the line.
struct Place {
    int sequence;     // its index
    long long before; // length of the line before that sequence
};

static __device__ __forceinline__ long long scan_warp(long long x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        long long other = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

static __device__ __forceinline__ long long sum_warp(long long x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// The sum over the threads of a block, known to all of them.
static __device__ long long sum_block(long long x, Scan &scan) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = sum_warp(x);
    __syncthreads();
    if (lane == 0) scan.warps[warp] = x;
    __syncthreads();
    long long sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += scan.warps[i];
    return sum;
}

// The sequence that position `at` of the line lies in, looking from `from` on. Each warp finds it by itself, 32 sequences at a time.
static __device__ __noinline__ Place find_sequence(const AttentionParameters &p, Costs costs, Place from, long long at) {
    int lane = threadIdx.x & 31;
    for (;;) {
        int i = from.sequence + lane;
        long long length = i < p.batch ? tiles_of(p, load_sequence(p, i), costs).length(p) : 0;
        long long until = scan_warp(length, lane);
        unsigned past = __ballot_sync(~0u, from.before + until > at);
        if (past) {
            int lane_found = __ffs(past) - 1;
            long long before = __shfl_sync(~0u, until - length, lane_found);
            return {from.sequence + lane_found, from.before + before};
        }
        from.before += __shfl_sync(~0u, until, 31);
        from.sequence += 32;
        if (from.sequence >= p.batch) return {p.batch, from.before};
    }
}

// A block's part of the line.
struct Part {
    Costs costs;
    long long share; // units that every block takes
    long long at, until;
    Place place;
};

// Where lengths are only known here, each block adds them up, decides as schedule.rs does for equal lengths, and looks for its part.
static __device__ __noinline__ void measure_part(const AttentionParameters &p, Scan &scan, Part &result) {
    Part part;
    const Costs bare = {1, 0};
    part.costs = {1, p.start_units};
    // Where sequences are few, each warp looks at all of them: that is sooner done than waiting for other warps.
    bool few = p.batch <= 256;
    int from = few ? threadIdx.x & 31 : threadIdx.x, step = few ? 32 : blockDim.x;
    auto sum = [&](long long x) { return few ? sum_warp(x) : sum_block(x, scan); };
    long long tiles = 0, units = 0, parts = 0;
    for (int i = from; i < p.batch; i += step) {
        Tiles here = tiles_of(p, load_sequence(p, i), bare);
        tiles += here.count(p);
        units += here.length(p);
    }
    tiles = sum(tiles);
    units = sum(units);
    long long line = units + tiles * p.start_units, blocks = gridDim.x;
    part.share = divide_up(line, blocks);
    if (tiles && 2 * tiles <= blocks && !p.batch_invariant) {
        // No block starts twice where every tile takes a whole number of shares. Shares as for tiles of equal lengths, if the blocks suffice.
        long long share = max(divide_up(units, min(divide(blocks, tiles), max(1ll, divide(units, tiles * p.key_groups))) * tiles), 2ll);
        for (int i = from; i < p.batch; i += step) {
            Tiles here = tiles_of(p, load_sequence(p, i), {(int)share, 0});
            parts += divide(here.cost, share) * here.count(p);
        }
        parts = sum(parts);
        // Rounding up adds less than a part a tile: this many always suffice.
        if (parts > blocks) share = max(divide_up(units, blocks - tiles), 2ll);
        part.costs = {(int)share, 0};
        part.share = share;
        line = blocks * share;
    } else if (!p.batch_invariant) {
        // Whole tiles for every block, where they are alike and that is as even as cutting them.
        Tiles first = tiles_of(p, load_sequence(p, 0), part.costs);
        long long whole = divide_up(tiles, blocks) * first.cost;
        bool alike = first.units * tiles == units;
        for (int i = from; i < p.batch && alike; i += step) {
            Tiles here = tiles_of(p, load_sequence(p, i), part.costs);
            alike = here.units == first.units || !here.row_tiles;
        }
        if (!sum(!alike) && whole * 25 <= (part.share + p.start_units) * 26) part.share = whole;
    }
    part.at = blockIdx.x * part.share;
    part.until = min(part.at + part.share, line);
    part.place = {0, 0};
    Place &place = part.place;
    if (part.at < part.until) {
        // Whole rounds of the block's threads, until one passes `at`.
        for (; !few && place.sequence + (int)blockDim.x < p.batch; place.sequence += blockDim.x) {
            long long round = sum_block(tiles_of(p, load_sequence(p, place.sequence + threadIdx.x), part.costs).length(p), scan);
            if (place.before + round > part.at) break;
            place.before += round;
        }
        place = find_sequence(p, part.costs, place, part.at);
        // Where tiles are rounded up, the line may end before the last blocks.
        if (place.sequence >= p.batch) part.until = part.at;
    }
    if (threadIdx.x == 0) result = part;
}

// A sequence as the short way below sees it: its tiles, and the units of each.
struct Few {
    int count, units;
};

static __device__ __forceinline__ Few few_of(const AttentionParameters &p, int index) {
    Tiles tiles = tiles_of(p, load_sequence(p, min(index, p.batch - 1)), {1, 0});
    return index < p.batch ? Few{(int)tiles.count(p), (int)tiles.units} : Few{0, 0};
}

// Whether sequences are so few, and the line so short, that the short way can take them.
constexpr int SHORT_LINE = 1 << 23;
static __device__ __forceinline__ bool is_short(const AttentionParameters &p) {
    float row_tiles = (float)p.query_len * (float)p.group * (1.0f / ROWS) + 1.0f;
    float units = (float)((p.kv_len >> p.unit_shift) + 2 + p.start_units);
    return p.batch <= 256 && (float)p.batch * (float)p.kv_heads * row_tiles * units < (float)SHORT_LINE;
}

// A quotient of numbers below SHORT_LINE.
static __device__ __forceinline__ int divide_short(int a, int b) {
    int quotient = (int)__fdividef((float)a, (float)b);
    int rest = a - quotient * b;
    return quotient + (rest >= b) - (rest < 0);
}

static __device__ __forceinline__ int divide_short_up(int a, int b) { return divide_short(a + b - 1, b); }

// What measure_part finds, the short way: every warp for itself, a lane a sequence, in 32 bits. What a call of few sequences waits for is this
// chain of instructions, so nothing in it waits for other warps, calls anything, or reads parameters from anywhere but constant memory.
static __device__ __forceinline__ Part measure_short(const AttentionParameters &p) {
    int lane = threadIdx.x & 31;
    Few mine = few_of(p, lane);
    int tiles = mine.count, units = mine.count * mine.units;
#pragma unroll 1
    for (int i = lane + 32; i < p.batch; i += 32) {
        Few other = few_of(p, i);
        tiles += other.count;
        units += other.count * other.units;
    }
    tiles = __reduce_add_sync(~0u, tiles);
    units = __reduce_add_sync(~0u, units);
    int blocks = gridDim.x, line = units + tiles * p.start_units;
    int share, start = p.start_units;
    // Tiles take a whole number of shares.
    bool rounded = tiles && 2 * tiles <= blocks && !p.batch_invariant;
    if (rounded) {
        int parts = min(divide_short(blocks, tiles), max(1, divide_short(units, tiles * p.key_groups)));
        share = max(divide_short_up(units, parts * tiles), 2);
        if (p.batch > 1) {
            auto parts_of = [&](const Few &few) { return divide_short_up(max(few.units, 1), share) * few.count; };
            int all = parts_of(mine);
#pragma unroll 1
            for (int i = lane + 32; i < p.batch; i += 32) all += parts_of(few_of(p, i));
            if (__reduce_add_sync(~0u, all) > blocks) share = max(divide_short_up(units, blocks - tiles), 2);
        }
        start = 0;
        line = blocks * share;
    } else {
        share = divide_short_up(line, blocks);
        int first = __shfl_sync(~0u, mine.units, 0);
        bool alike = mine.units == first || !mine.count;
#pragma unroll 1
        for (int i = lane + 32; i < p.batch; i += 32) {
            Few other = few_of(p, i);
            alike &= other.units == first || !other.count;
        }
        int whole = divide_short_up(tiles, blocks) * (first + start);
        if (!p.batch_invariant && __all_sync(~0u, alike) && first * tiles == units && whole * 25ll <= (share + start) * 26ll) share = whole;
    }
    Part part;
    part.costs = {rounded ? share : 1, start};
    part.share = share;
    int at = blockIdx.x * share, before = 0, sequence = 0;
    int until = min(at + share, line);
    // The sequence that it lies in, 32 at a time.
    while (p.batch > 1 && at < until) {
        int length = mine.count * (rounded ? divide_short_up(max(mine.units, 1), share) * share : mine.units + start);
        int reached = length;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(~0u, reached, step);
            if (lane >= step) reached += other;
        }
        unsigned past = __ballot_sync(~0u, before + reached > at);
        if (past) {
            int found = __ffs(past) - 1;
            sequence += found;
            before += __shfl_sync(~0u, reached - length, found);
            break;
        }
        before += __shfl_sync(~0u, reached, 31);
        sequence += 32;
        if (sequence >= p.batch) {
            // Where tiles are rounded up, the line may end before the last blocks.
            until = at;
        } else {
            mine = few_of(p, sequence + lane);
        }
    }
    part.at = at;
    part.until = until;
    part.place = {sequence, before};
    return part;
}

// Finds it, for all threads of the block.
static __device__ __forceinline__ Part find_part(const AttentionParameters &p, Scan &scan, Part &shared) {
    if (!p.line) {
        if (is_short(p)) return measure_short(p);
        measure_part(p, scan, shared);
        __syncthreads();
        return shared;
    }
    // The host knew that all sequences are alike.
    Part part;
    part.costs = {1, p.start_units};
    part.share = p.share;
    part.at = blockIdx.x * p.share;
    part.until = min(part.at + p.share, p.line);
    part.place = {0, 0};
    if (p.batch > 1) {
        long long length = tiles_of(p, load_sequence(p, 0), part.costs).length(p);
        part.place.sequence = (int)divide(part.at, length);
        part.place.before = part.place.sequence * length;
    }
    return part;
}
