// Stream-K: divides the work of a decode call over a fixed grid when only the device knows the lengths.
//
// A tile is TILE_ROWS packed rows of one (sequence, key/value head). Its work is the units of 2^work_unit_shift keys
// that some row of its sequence sees, plus a constant for starting it. Tiles are ordered by sequence, head and row, and
// their work is concatenated. Every CTA takes an equal range of it: a long sequence is split over many CTAs, and many
// short ones share a CTA. Where a CTA boundary splits a tile, each CTA leaves a partial state, and the last to finish
// combines them in order.
#pragma once
#include "common/problem.cuh"
#if LISTS
#include "common/lists.cuh"
#endif
#include "decode/decode_shape.cuh"

// CTAs that share every tile: CTA `rank` has rows TILE_ROWS / CTAS_PER_TILE * rank on. Work is divided among groups of
// CTAS_PER_TILE neighbouring CTAs, so that they read the same keys at the same time.
#ifndef CTAS_PER_TILE
#define CTAS_PER_TILE 1
#endif

// Kernels whose threads exchange registers have no calls: setmaxnreg would be ignored.
#if HEADS > 1
#define STREAM_K_CALL __forceinline__
#else
#define STREAM_K_CALL __noinline__
#endif

constexpr int MAX_KEY_GROUPS = 8;
#if defined(THREADS) && THREADS > 512
constexpr int MAX_WARPS = THREADS / 32;
#else
constexpr int MAX_WARPS = 16;
#endif

// How the work of a tile is counted.
struct TileCosts {
    int multiple; // a tile's units are rounded up to a multiple of this
    int start;    // units for starting a tile
};

// The tiles of one sequence.
struct SequenceTiles {
    int row_tiles;  // per key/value head
    KeyRange keys;  // that some row sees; with lists: entries of the longest one
    int first_unit; // unit of the first of them
    int units;      // units that some row sees
    int cost;       // work of each tile
    __device__ __forceinline__ long long count(const AttentionParameters &params) const {
        return (long long)row_tiles * params.kv_heads;
    }
    __device__ __forceinline__ long long work(const AttentionParameters &params) const { return cost * count(params); }
};

// This group of CTAs, and how many there are.
static __device__ __forceinline__ unsigned part_index() { return blockIdx.x / CTAS_PER_TILE; }
static __device__ __forceinline__ unsigned part_count() { return gridDim.x / CTAS_PER_TILE; }

// 64-bit division. Not inlined, like all code that rarely runs: a short call waits longer for cold instructions than
// for the work itself.
static __device__ STREAM_K_CALL long long divide_wide(long long a, long long b) { return a / b; }

// A quotient of non-negative numbers below 2^24. In f32 it is off by at most one.
static __device__ __forceinline__ int divide_small(int a, int b) {
    int quotient = (int)__fdividef((float)a, (float)b);
    int rest = a - quotient * b;
    return quotient + (rest >= b) - (rest < 0);
}

// A quotient of non-negative numbers.
static __device__ __forceinline__ long long divide(long long a, long long b) {
    return (unsigned long long)(a | b) >> 24 ? divide_wide(a, b) : divide_small((int)a, (int)b);
}

// The work is divided among sequences, or among rows if they have lists of keys.
static __device__ __forceinline__ SequenceInfo load_work(const AttentionParameters &params, int index) {
#if LISTS
    return load_listed_row(params, index);
#else
    return load_sequence(params, index);
#endif
}

static __device__ __forceinline__ SequenceTiles sequence_tiles(const AttentionParameters &params, const SequenceInfo &s,
                                                               TileCosts costs) {
    SequenceTiles tiles;
    tiles.row_tiles =
        s.q_len > params.max_query_len ? 0 : (int)(((long long)s.q_len * params.group + TILE_ROWS - 1) / TILE_ROWS);
#if LISTS
    tiles.keys = {0, s.walked};
#else
    tiles.keys = visible_keys(params, s, 0);
    if (s.q_len > 1) tiles.keys.end = visible_end(params, s, s.q_len - 1);
#endif
    int start = tiles.keys.start, end = tiles.keys.end;
    tiles.first_unit = start >> params.stream_k.work_unit_shift;
    tiles.units = end > start ? ((end - 1) >> params.stream_k.work_unit_shift) + 1 - tiles.first_unit : 0;
    if (params.stream_k.work_total) {
        tiles.cost = (int)params.stream_k.work_per_tile;
    } else if (costs.multiple == 1) {
        tiles.cost = tiles.units + costs.start;
    } else {
        tiles.cost = (int)divide(max(tiles.units, 1) + costs.multiple - 1, costs.multiple) * costs.multiple;
    }
    return tiles;
}

// Tiles of rows that a sequence has at most, per key/value head.
static __device__ __forceinline__ int row_tiles_at_most(const AttentionParameters &params) {
    return ((LISTS ? 1 : params.query_len) * params.group + TILE_ROWS - 1) / TILE_ROWS;
}

struct CtaScan {
    long long warps[MAX_WARPS];
    long long total, before;
    int found;
};

// A position in the concatenated work: a sequence, and the work before it.
struct WorkCursor {
    int sequence;     // index of the sequence
    long long before; // work of all sequences before it
};

static __device__ __forceinline__ int sum_warp(int x) { return __reduce_add_sync(~0u, x); }

static __device__ __forceinline__ long long sum_warp(long long x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Sums over the threads of the CTA; all of them get the sum.
static __device__ long long sum_cta(long long x, CtaScan &scan) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = sum_warp(x);
    __syncthreads();
    if (lane == 0) scan.warps[warp] = x;
    __syncthreads();
    long long sum = 0;
#pragma unroll 1
    for (int i = 0; i < blockDim.x / 32; i++) sum += scan.warps[i];
    return sum;
}

// Finds the sequence with work position `at` among 32 of a work each, which begin at `before`. Returns which, and sets
// `before` to the work before it. If it is none of these, returns 32, and `before` is the work before the next ones.
template <class Number> static __device__ __forceinline__ int find_among(Number work, Number at, Number &before) {
    int lane = threadIdx.x & 31;
    Number reached = work;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        Number other = __shfl_up_sync(~0u, reached, step);
        if (lane >= step) reached += other;
    }
    unsigned past = __ballot_sync(~0u, before + reached > at);
    int found = past ? __ffs(past) - 1 : 32;
    before += __shfl_sync(~0u, past ? reached - work : reached, min(found, 31));
    return found;
}

// Finds the sequence that contains work position `at`, searching forward from `from`. Each warp searches by itself, 32
// sequences per step.
static __device__ STREAM_K_CALL WorkCursor find_sequence(const AttentionParameters &params, TileCosts costs,
                                                         WorkCursor from, long long at) {
    int lane = threadIdx.x & 31, found;
    do {
        int i = from.sequence + lane;
        long long work = i < params.batch ? sequence_tiles(params, load_work(params, i), costs).work(params) : 0;
        found = find_among(work, at, from.before);
        from.sequence += found;
    } while (found == 32 && from.sequence < params.batch);
    from.sequence = min(from.sequence, params.batch);
    return from;
}

// The work range of a CTA.
struct CtaRange {
    TileCosts costs;
    long long work_per_cta; // work of every CTA
    long long begin, end;
    WorkCursor cursor;
};

// The tiles of a sequence and the units of each.
template <class Number> struct SequenceWork {
    Number count;
    int units;
};

// The work of sequence `index`; none past the last sequence.
template <class Number>
static __device__ __forceinline__ SequenceWork<Number> sequence_work(const AttentionParameters &params, int index) {
    SequenceTiles tiles = sequence_tiles(params, load_work(params, min(index, params.batch - 1)), {1, 0});
    return index < params.batch ? SequenceWork<Number>{(Number)tiles.count(params), tiles.units}
                                : SequenceWork<Number>{0, 0};
}

// The division of work where the lengths are only on the device: the rule of schedule.rs for equal lengths, applied to
// sums over all sequences. Number is int for little work, else long long.
template <class Number> struct WorkDivision {
    const AttentionParameters &params;
    int first_units;     // units of a tile of the first sequence
    Number tiles, units; // of all sequences
    Number ctas, work_per_cta;
    int start;    // work of starting a tile
    bool rounded; // tiles take a whole number of CTAs

    static __device__ __forceinline__ Number quotient(Number a, Number b) {
        if constexpr (sizeof(Number) == sizeof(int)) {
            return divide_small(a, b);
        } else {
            return divide(a, b);
        }
    }
    static __device__ __forceinline__ Number quotient_up(Number a, Number b) { return quotient(a + b - 1, b); }

    // Divides the work. `each` calls a function with the work of every sequence of this thread. `sum` sums a number
    // over the threads.
    template <class Each, class Sum> __device__ __forceinline__ void divide_all(const Each &each, const Sum &sum) {
        tiles = units = 0;
        each([&](const SequenceWork<Number> &of) {
            tiles += of.count;
            units += of.count * of.units;
        });
        tiles = sum(tiles);
        units = sum(units);
        divide_total();
        if (may_misfit()) {
            Number misfits = 0;
            each([&](const SequenceWork<Number> &of) { misfits += misfit(of); });
            fit(sum(misfits));
        }
    }

    __device__ __forceinline__ void divide_total() {
        ctas = part_count();
        start = params.stream_k.tile_start_work;
        // If the CTAs suffice, every tile takes a whole number of CTAs, so that no CTA starts two tiles.
        rounded = tiles && 2 * tiles <= ctas && !params.batch_invariant;
        if (rounded) {
            Number max_parts = quotient(units, tiles * min_units(params.stream_k.key_groups));
            Number parts = min(quotient(ctas, tiles), max(max_parts, (Number)1));
            work_per_cta = max(quotient_up(units, parts * tiles), (Number)2);
            start = 0;
        } else {
            work_per_cta = quotient_up(units + tiles * start, ctas);
        }
    }

    __device__ __forceinline__ Number parts(const SequenceWork<Number> &of) const {
        return quotient_up(max(of.units, 1), work_per_cta);
    }

    // Whether `fit` may change the division.
    __device__ __forceinline__ bool may_misfit() const {
        return rounded ? params.batch > 1 : !params.batch_invariant && first_units * tiles == units;
    }

    // The number that `fit` needs the sum of, over all sequences.
    __device__ __forceinline__ Number misfit(const SequenceWork<Number> &of) const {
        return rounded ? parts(of) * of.count : of.units != first_units && of.count;
    }

    // Corrects the division.
    __device__ __forceinline__ void fit(Number misfits) {
        if (rounded) {
            // Rounding up adds less than one CTA per tile, so this always fits.
            if (misfits > ctas) work_per_cta = max(quotient_up(units, ctas - tiles), (Number)2);
        } else {
            // Whole tiles per CTA, if tiles are equal and that balances as well as splitting them.
            Number whole_tiles = quotient_up(tiles, ctas) * (first_units + start);
            if (!misfits && whole_tiles * 25ll <= (work_per_cta + start) * 26ll) work_per_cta = whole_tiles;
        }
    }

    __device__ __forceinline__ Number total() const { return rounded ? ctas * work_per_cta : units + tiles * start; }

    __device__ __forceinline__ Number work(const SequenceWork<Number> &of) const {
        return of.count * (rounded ? parts(of) * work_per_cta : of.units + start);
    }

    // The range of this CTA. Its cursor is at the first sequence.
    __device__ __forceinline__ CtaRange range() const {
        CtaRange range;
        range.costs = {rounded ? (int)work_per_cta : 1, start};
        range.work_per_cta = work_per_cta;
        Number begin = part_index() * work_per_cta;
        range.begin = begin;
        range.end = min(begin + work_per_cta, total());
        range.cursor = {0, 0};
        return range;
    }
};

// Divides any work: each CTA sums the work of all sequences, and finds its own range.
static __device__ STREAM_K_CALL void partition_work(const AttentionParameters &params, CtaScan &scan,
                                                    CtaRange &result) {
    // With few sequences each warp scans all of them by itself, which is faster than a CTA-wide sum.
    bool few = params.batch <= 256;
    int from = few ? threadIdx.x & 31 : threadIdx.x, step = few ? 32 : blockDim.x;
    auto each = [&](auto &&take) {
#pragma unroll 1
        for (int i = from; i < params.batch; i += step) take(sequence_work<long long>(params, i));
    };
    WorkDivision<long long> all = {params, sequence_work<long long>(params, 0).units};
    all.divide_all(each, [&](long long x) { return few ? sum_warp(x) : sum_cta(x, scan); });
    CtaRange cta_range = all.range();
    WorkCursor &cursor = cta_range.cursor;
    if (cta_range.begin < cta_range.end) {
        // Skip blockDim.x sequences at a time, until a step passes `begin`.
#pragma unroll 1
        for (; !few && cursor.sequence + (int)blockDim.x < params.batch; cursor.sequence += blockDim.x) {
            long long work = all.work(sequence_work<long long>(params, cursor.sequence + threadIdx.x));
            long long skipped = sum_cta(work, scan);
            if (cursor.before + skipped > cta_range.begin) break;
            cursor.before += skipped;
        }
        cursor = find_sequence(params, cta_range.costs, cursor, cta_range.begin);
        // With rounded-up tiles, the work may end before the last CTAs.
        if (cursor.sequence >= params.batch) cta_range.end = cta_range.begin;
    }
    if (threadIdx.x == 0) result = cta_range;
}

// Whether the batch and the total work are small enough for the 32-bit path.
constexpr int LITTLE_WORK = 1 << 23, MAX_LITTLE_SEQUENCES = 256;
static __device__ __forceinline__ bool is_little_work(const AttentionParameters &params) {
    float row_tiles = (float)params.query_len * (float)params.group * (1.0f / TILE_ROWS) + 1.0f;
#if LISTS
    int keys = lists_of(params).len + lists_of(params).second.len;
#else
    int keys = params.kv_len;
#endif
    float units = (float)((keys >> params.stream_k.work_unit_shift) + 2 + params.stream_k.tile_start_work);
    return params.batch <= MAX_LITTLE_SEQUENCES &&
           (float)params.batch * (float)params.kv_heads * row_tiles * units < (float)LITTLE_WORK;
}

// The same result as partition_work for little work. This chain of instructions is the latency of a short call, so it
// has no call, reads parameters from constant memory only, and has no barrier if there are no more than 32 sequences:
// every warp is by itself then, with a lane per sequence.
static __device__ __forceinline__ CtaRange partition_little_work(const AttentionParameters &params,
                                                                 SequenceWork<int> (&works)[MAX_LITTLE_SEQUENCES]) {
    int lane = threadIdx.x & 31, index = lane;
    // More sequences than lanes: every thread counts the work of one, and warps read it from shared memory.
    bool many = params.batch > 32;
    SequenceWork<int> own;
    if (many) index = threadIdx.x;
#pragma unroll 1
    do {
        own = sequence_work<int>(params, index);
        if (many && index < MAX_LITTLE_SEQUENCES) works[index] = own;
        index += blockDim.x;
    } while (many && index < (params.batch + 31 & ~31));
    if (many) __syncthreads();
    auto each = [&](auto &&take) {
#pragma unroll 1
        for (int first = 0; first < params.batch; first += 32) {
            if (many) own = works[first + lane];
            take(own);
        }
    };
    WorkDivision<int> all = {params, many ? works[0].units : __shfl_sync(~0u, own.units, 0)};
    all.divide_all(each, [](int x) { return sum_warp(x); });
    CtaRange cta_range = all.range();
    int at = (int)cta_range.begin, sequence = 0, before = 0;
    if (params.batch > 1 && cta_range.begin < cta_range.end) {
        int found = 32;
#pragma unroll 1
        for (int first = 0; first < params.batch && found == 32; first += 32) {
            if (many) own = works[first + lane];
            found = find_among(all.work(own), at, before);
            sequence = first + found;
        }
    }
    if (many) __syncthreads();
    // With rounded-up tiles, the work may end before the last CTAs.
    if (sequence >= params.batch) cta_range.end = cta_range.begin;
    cta_range.cursor = {sequence, before};
    return cta_range;
}

// Shared memory for finding a work range.
union RangeScratch {
    SequenceWork<int> works[MAX_LITTLE_SEQUENCES];
    struct {
        CtaScan scan;
        CtaRange range;
    };
};

// Whether every warp finds the work range of its CTA by itself; else all threads of the CTA must.
static __device__ __forceinline__ bool warps_find_range(const AttentionParameters &params) {
    return params.stream_k.work_total || (params.batch <= 32 && is_little_work(params));
}

// The work range of this CTA. The scratch is free again when this returns.
static __device__ __forceinline__ CtaRange find_cta_range(const AttentionParameters &params, RangeScratch &scratch) {
    CtaRange cta_range;
    if (!params.stream_k.work_total) {
        if (is_little_work(params)) return partition_little_work(params, scratch.works);
        partition_work(params, scratch.scan, scratch.range);
        __syncthreads();
        cta_range = scratch.range;
        __syncthreads();
        return cta_range;
    }
    // The host knows that all sequences are equal.
    cta_range.costs = {1, params.stream_k.tile_start_work};
    cta_range.work_per_cta = params.stream_k.work_per_cta;
    cta_range.begin = part_index() * params.stream_k.work_per_cta;
    cta_range.end = min(cta_range.begin + params.stream_k.work_per_cta, params.stream_k.work_total);
    cta_range.cursor = {0, 0};
    if (params.batch > 1) {
        long long length = params.stream_k.work_per_tile * row_tiles_at_most(params) * params.kv_heads;
        cta_range.cursor.sequence = (int)divide(cta_range.begin, length);
        cta_range.cursor.before = cta_range.cursor.sequence * length;
    }
    return cta_range;
}
