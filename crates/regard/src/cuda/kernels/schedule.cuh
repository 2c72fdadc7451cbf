// How work is divided over a fixed grid when only the device knows the lengths.
//
// A tile is ROWS packed rows of one (sequence, key/value head). Its cost is the units of 2^unit_shift keys that some row of its sequence
// sees, and some more for starting it. Tiles stand in a line: sequence by sequence, head by head. Every thread block takes the
// same length of that line, so a long sequence is cut among many blocks and many short ones share a block. Where a block's end cuts
// a tile, each block leaves a partial state of it, and the last one to finish joins them, in the line's order.
#pragma once
#include "problem.cuh"

constexpr int MOST_KEY_GROUPS = 8;
constexpr int MOST_WARPS = 16;

// A quotient of what is nearly always small. Not inlined, like all that is rarely run or run many times over: instructions that
// were never fetched before cost a short call more than the work they do.
static __device__ __noinline__ long long divide(long long a, long long b) {
    return (unsigned long long)(a | b) >> 32 ? a / b : (long long)((unsigned)a / (unsigned)b);
}

// One sequence's part of the line.
struct Tiles {
    int row_tiles;  // of each key/value head
    int first_unit; // unit of its first visible key
    long long cost; // of each tile
    __device__ __forceinline__ long long length(const AttentionParameters &p) const { return cost * row_tiles * p.kv_heads; }
};

static __device__ __forceinline__ Tiles tiles_of(const AttentionParameters &p, const Sequence &s) {
    Tiles tiles;
    tiles.row_tiles = (int)(((long long)s.q_len * p.group + ROWS - 1) / ROWS);
    int start = visible_start(p, s, 0), end = visible_end(p, s, s.q_len - 1);
    tiles.first_unit = start >> p.unit_shift;
    tiles.cost = p.line ? p.tile_cost : p.start_units + (end > start ? ((end - 1) >> p.unit_shift) + 1 - tiles.first_unit : 0);
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

// The length of the whole line, known to every thread of the block.
static __device__ long long measure_line(const AttentionParameters &p, Scan &scan) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    long long length = 0;
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x) length += tiles_of(p, load_sequence(p, i)).length(p);
#pragma unroll
    for (int step = 16; step; step /= 2) length += __shfl_xor_sync(~0u, length, step);
    __syncthreads();
    if (lane == 0) scan.warps[warp] = length;
    __syncthreads();
    long long total = 0;
    for (int i = 0; i < blockDim.x / 32; i++) total += scan.warps[i];
    return total;
}

// The sequence that position `at` of the line lies in, looking from `from` on. Each warp finds it by itself, 32 sequences at a time.
static __device__ __noinline__ Place find_sequence(const AttentionParameters &p, Place from, long long at) {
    int lane = threadIdx.x & 31;
    for (;;) {
        int i = from.sequence + lane;
        long long length = i < p.batch ? tiles_of(p, load_sequence(p, i)).length(p) : 0;
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
    long long share; // units that every block takes
    long long at, until;
    Place place;
};

// Where lengths are only known here, each block adds up the line and looks for its part.
static __device__ __noinline__ Part measure_part(const AttentionParameters &p, Scan &scan) {
    Part part;
    long long line = measure_line(p, scan);
    part.share = divide(line + gridDim.x - 1, gridDim.x);
    part.at = blockIdx.x * part.share;
    part.until = min(part.at + part.share, line);
    part.place = {0, 0};
    if (part.at >= part.until) return part;
    // Whole rounds of the block's threads, until one passes `at`.
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x / 32;
    Place &place = part.place;
    for (; place.sequence + (int)blockDim.x < p.batch; place.sequence += blockDim.x) {
        long long length = tiles_of(p, load_sequence(p, place.sequence + threadIdx.x)).length(p);
#pragma unroll
        for (int step = 16; step; step /= 2) length += __shfl_xor_sync(~0u, length, step);
        __syncthreads();
        if (lane == 0) scan.warps[warp] = length;
        __syncthreads();
        long long round = 0;
        for (int i = 0; i < warps; i++) round += scan.warps[i];
        if (place.before + round > part.at) break;
        place.before += round;
    }
    place = find_sequence(p, place, part.at);
    return part;
}

static __device__ __forceinline__ Part find_part(const AttentionParameters &p, Scan &scan) {
    if (!p.line) return measure_part(p, scan);
    // The host knew that all sequences are alike.
    Part part;
    part.share = p.share;
    part.at = blockIdx.x * p.share;
    part.until = min(part.at + p.share, p.line);
    part.place = {0, 0};
    if (p.batch > 1) {
        long long length = tiles_of(p, load_sequence(p, 0)).length(p);
        part.place.sequence = (int)divide(part.at, length);
        part.place.before = part.place.sequence * length;
    }
    return part;
}
