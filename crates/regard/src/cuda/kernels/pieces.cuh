// The kernel itself: a block's part of the line, tile by tile and piece by piece, and what becomes of finished pieces.
#pragma once
#include "state.cuh"

constexpr int COUNTERS = 1024; // in front of the workspace; a thread block each, at most
constexpr int PARTIAL_FLOATS = ROWS * (VALUE_DIM + 2);

// A partial state in the workspace: maxima, sums, outputs.
static __device__ __forceinline__ float *partial(const AttentionParameters &p, long long block, int slot) {
    return (float *)(p.workspace + COUNTERS * 4) + (block * p.partials_a_block + slot) * PARTIAL_FLOATS;
}

// A row's state, spread over a warp: a lane has the four output elements from 4 * lane on, and those 128, 256... further.
constexpr int LANE_FOURS = (VALUE_DIM + 127) / 128;

struct RowState {
    State state; // the same in all lanes
    float4 out[LANE_FOURS];
};

static __device__ __forceinline__ int column_of(int lane, int i) { return 4 * lane + 128 * i; }

static __device__ __forceinline__ bool has_column(int lane, int i) { return VALUE_DIM % 128 == 0 || column_of(lane, i) < VALUE_DIM; }

static __device__ __forceinline__ RowState empty_row() {
    RowState row;
    row.state = {-INFINITE, 0.0f};
#pragma unroll
    for (int i = 0; i < LANE_FOURS; i++) row.out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return row;
}

// Joins `count` states of a row to it. `stats(k)` is state k's maximum and sum, `values(k, column)` four of its outputs. Several at a
// time, and all their loads before anything waits for one: what is joined here comes from far away, or late.
constexpr int SOME_STATES = LANE_FOURS == 1 ? 8 : LANE_FOURS == 2 ? 4 : 2;

template <int BATCH, class Stats, class Values>
static __device__ __forceinline__ void join_many(float unit, RowState &row, int count, int lane, Stats stats, Values values) {
#pragma unroll 1
    for (int base = 0; base < count; base += BATCH) {
        float4 value[BATCH][LANE_FOURS];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
#pragma unroll
            for (int i = 0; i < LANE_FOURS; i++)
                if (base + k < count && has_column(lane, i)) value[k][i] = values(base + k, column_of(lane, i));
        // A lane weighs a state; every BATCH lanes do the same.
        State mine = {-INFINITE, 0.0f};
        int k_mine = base + lane % BATCH;
        if (k_mine < count) mine = stats(k_mine);
        float most = fmaxf(mine.max, row.state.max);
#pragma unroll
        for (int step = BATCH / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        float reference = most == -INFINITE ? 0.0f : most;
        float factor = exp2_fast((mine.max - reference) * unit), carried = exp2_fast((row.state.max - reference) * unit);
        float sum = __fmul_rn(mine.sum, factor);
#pragma unroll
        for (int step = BATCH / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        row.state = {most, fmaf(row.state.sum, carried, sum)};
#pragma unroll
        for (int i = 0; i < LANE_FOURS; i++) row.out[i] = scale_four(row.out[i], carried);
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            float weight = __shfl_sync(~0u, factor, k);
#pragma unroll
            for (int i = 0; i < LANE_FOURS; i++)
                if (base + k < count && has_column(lane, i)) row.out[i] = add_four(row.out[i], weight, value[k][i]);
        }
    }
}

// Groups of warps that a block has at most, and rows that a warp joins at once: their loads do not wait for each other.
constexpr int MOST_GROUPS = MOST_THREADS / GROUP_THREADS;
constexpr int ROWS_AT_ONCE = ROWS == 8 || LANE_FOURS > 1 ? 1 : 2;

// Joins the states that the groups of a block left in shared memory of the rows `first`, `first + step`...
static __device__ __forceinline__ void join_groups(const AttentionParameters &p, RowState (&joined)[ROWS_AT_ONCE], const Shared &shared, const float *states, int first,
                                                   int step, int lane) {
    int groups = p.key_groups;
    float unit = unit_of(p);
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        int row = min(first + i * step, ROWS - 1);
        joined[i] = empty_row();
        State each[MOST_GROUPS];
#pragma unroll
        for (int g = 0; g < MOST_GROUPS; g++) {
            each[g] = {-INFINITE, 0.0f};
            if (g < groups) each[g] = {shared.max[g][row], shared.sum[g][row]};
            joined[i].state.max = fmaxf(joined[i].state.max, each[g].max);
        }
        float reference = joined[i].state.max == -INFINITE ? 0.0f : joined[i].state.max;
#pragma unroll
        for (int g = 0; g < MOST_GROUPS; g++) {
            float factor = exp2_fast((each[g].max - reference) * unit);
            joined[i].state.sum = fmaf(each[g].sum, factor, joined[i].state.sum);
#pragma unroll
            for (int j = 0; j < LANE_FOURS; j++)
                if (g < groups && has_column(lane, j)) {
                    joined[i].out[j] = add_four(joined[i].out[j], factor, *(const float4 *)(states + (g * ROWS + row) * OUT_PITCH + column_of(lane, j)));
                }
        }
    }
}

// Joins one more state after the others: in batch-invariant mode, always one by one in the order of the keys.
static __device__ __forceinline__ void join_next(float unit, RowState &row, const RowState &next) {
    float left, right;
    row.state = join(row.state, next.state, unit, left, right);
#pragma unroll
    for (int i = 0; i < LANE_FOURS; i++) row.out[i] = add_four(scale_four(row.out[i], left), right, next.out[i]);
}

static __device__ __forceinline__ RowState load_partial(const float *from, int row, int lane) {
    RowState state;
    state.state = {__ldcg(from + row), __ldcg(from + ROWS + row)};
#pragma unroll
    for (int i = 0; i < LANE_FOURS; i++)
        if (has_column(lane, i)) state.out[i] = __ldcg((const float4 *)(from + 2 * ROWS + row * VALUE_DIM + column_of(lane, i)));
    return state;
}

static __device__ __forceinline__ void store_partial(float *to, int row, int lane, const RowState &state) {
    if (lane == 0) {
        to[row] = state.state.max;
        to[ROWS + row] = state.state.sum;
    }
#pragma unroll
    for (int i = 0; i < LANE_FOURS; i++)
        if (has_column(lane, i)) *(float4 *)(to + 2 * ROWS + row * VALUE_DIM + column_of(lane, i)) = state.out[i];
}

// Writes a finished row to where the caller wants it: the sink joins, the sum divides.
static __device__ __forceinline__ void write_row(const AttentionParameters &p, const Tile &tile, int row, int lane, const RowState &done) {
    int head, token;
    tile.find_row(p, row, head, token);
    FinishedRow finished = finish_row(p, done.state, load_sink(p, head, unit_of(p)), unit_of(p), p.lse != 0);
    long long at = tile.index * p.out_batch_stride + (long long)(tile.sequence.q_start + token) * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
    for (int i = 0; i < LANE_FOURS; i++) {
        int column = column_of(lane, i);
        float4 x = scale_four(done.out[i], finished.factor);
        if (!p.out_f32) x = make_float4(bound_output(x.x), bound_output(x.y), bound_output(x.z), bound_output(x.w));
        if (p.out_aligned && column + 4 <= p.value_dim) {
            if (WIDE_ELEMENT || p.out_f32) {
                asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"((float *)p.out + at + column), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                             : "memory");
            } else {
                asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"((Bits *)p.out + at + column), "r"(E::pack(x.x, x.y)), "r"(E::pack(x.z, x.w))
                             : "memory");
            }
        } else {
#pragma unroll 1
            for (int e = 0; e < min(4, p.value_dim - column); e++) {
                float value = e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w;
                store_element(p.out, at + column + e, p.out_f32 ? F32 : ELEMENT_TYPE, value);
            }
        }
    }
    if (p.lse && lane == 0) {
        long long lse = tile.index * p.lse_batch_stride + (long long)(tile.sequence.q_start + token) * p.lse_token_stride + head * p.lse_head_stride;
        ((float *)p.lse)[lse] = finished.lse;
    }
}

// Joins the partials that blocks `first..=last` left of a row, which are one each, and writes the result. A warp does.
template <int BATCH> static __device__ __forceinline__ void join_row(const AttentionParameters &p, const Tile &tile, int row, int lane, long long first, long long last) {
    // The first block's partial is in its slot 0, every other's in its slot 1.
    const float *slots = partial(p, first, 1);
    long long stride = (long long)p.partials_a_block * PARTIAL_FLOATS;
    auto slot = [&](int k) { return k == 0 ? slots - PARTIAL_FLOATS : slots + k * stride; };
    RowState state = empty_row();
    join_many<BATCH>(
        unit_of(p), state, (int)(last - first) + 1, lane, [&](int k) { return State{__ldcg(slot(k) + row), __ldcg(slot(k) + ROWS + row)}; },
        [&](int k, int column) { return __ldcg((const float4 *)(slot(k) + 2 * ROWS + row * VALUE_DIM + column)); });
    write_row(p, tile, row, lane, state);
}

// The same for all rows of a tile, and whatever the blocks left.
static __device__ __forceinline__ void join_blocks(const Worker &w, long long share, long long first, long long last, const Stretch &stretch) {
    const AttentionParameters &p = w.p;
    for (int row = threadIdx.x >> 5; row < w.tile.rows; row += blockDim.x >> 5) {
        if (!p.batch_invariant) {
            join_row<SOME_STATES>(p, w.tile, row, w.lane, first, last);
            continue;
        }
        RowState state = load_partial(partial(p, first, 0), row, w.lane);
        for (long long block = first + 1; block <= last; block++) {
            int pieces = (int)(min((block + 1) * share, stretch.end) - max(block * share, stretch.keys_start));
            for (int piece = 0; piece < pieces; piece++) join_next(unit_of(p), state, load_partial(partial(p, block, 1 + piece), row, w.lane));
        }
        write_row(p, w.tile, row, w.lane, state);
    }
}

// The blocks that have parts of a tile, first and last: what `decode` leaves for `join`.
struct Cut {
    int first, last;
};

// Tiles in the order of sequences, heads and rows: their numbers do not depend on lengths.
static __device__ __forceinline__ Cut &cut_of(const AttentionParameters &p, const Tile &tile) {
    int row_tiles = (p.query_len * p.group + ROWS - 1) / ROWS;
    long long number = ((long long)tile.index * p.kv_heads + tile.kv_head) * row_tiles + tile.first_row / ROWS;
    return ((Cut *)p.cuts)[number];
}

// Lengths and a small block table are read by all blocks, soon but one after the other: all are asked for now.
static __device__ __forceinline__ void touch_lengths(const AttentionParameters &p) {
    int at = threadIdx.x * 128;
    [[maybe_unused]] int unused; // what is there is not looked at
    if (p.kv_lens && at < p.batch * 4) asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(p.kv_lens + at));
    if (p.block_size && p.block_shift >= 0) {
        long long columns = (p.kv_len + p.block_size - 1ll) >> p.block_shift, bytes = ((p.batch - 1) * p.block_table_stride + columns) * 4;
        if (at >= bytes) return;
        if (bytes <= 16 << 10) asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(p.block_table + at));
        else if (bytes <= 1 << 20) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.block_table + at));
    }
}

extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1) decode(const __grid_constant__ AttentionParameters p) {
    Shared &shared = *(Shared *)dynamic_shared;
    constexpr int QUERY_AT = (sizeof(Shared) + 127) / 128 * 128;
    constexpr int RING_AT = QUERY_AT + (ROWS * KEY_PITCH + 127) / 128 * 128;
    float *states = (float *)(dynamic_shared + RING_AT);
    static_assert(sizeof(Shared) <= 1024 + 128 * ROWS, "the host reckons with this");

    Worker w = {p, shared};
    w.lane = threadIdx.x & 31;
    w.group = threadIdx.x / GROUP_THREADS;
    w.row_warp = (threadIdx.x >> 5) % ROW_WARPS;
    w.value_warp = (threadIdx.x >> 5) % GROUP_WARPS / ROW_WARPS;
    w.query = shared_address(dynamic_shared + QUERY_AT);
    w.products.query = w.query + w.row_warp * ROW_TILES * 8 * KEY_PITCH;
    w.products.lane = w.lane;
    w.ring = shared_address(dynamic_shared + RING_AT) + w.group * STAGES * STAGE_BYTES;
    // Parameters lie in constant memory, and nobody has read them yet: each warp has a part of them fetched.
    int touched = ((const int *)&p)[min(threadIdx.x / 32 * 32, (unsigned)sizeof(p) / 4 - 1)];
    asm volatile("" ::"r"(touched));

    // What only the device knows may come from the kernel in front. Where the host knew the lengths, `walk` waits.
    if (!p.line) {
        wait_for_kernel_in_front();
        touch_lengths(p);
    }
    Part part = find_part(p, shared.scan, shared.part);
    Place &place = part.place;
    long long at = part.at;
    while (at < part.until) {
        w.tile.index = place.sequence;
        w.tile.sequence = load_sequence(p, place.sequence);
        Tiles tiles = tiles_of(p, w.tile.sequence, part.costs);
        if (at >= place.before + tiles.length(p)) {
            place = {place.sequence + 1, place.before + tiles.length(p)};
            if (!p.line) place = find_sequence(p, part.costs, place, at);
            if (place.sequence >= p.batch) break;
            continue;
        }
        // The tile.
        int tile = (int)divide(at - place.before, tiles.cost);
        Stretch here;
        here.start = place.before + tile * tiles.cost;
        here.keys_start = here.start + part.costs.start;
        here.end = here.start + tiles.cost;
        w.take_tile(tile, tiles);

        bool starts_here = here.start >= at, ends_here = here.end <= part.until;
        long long end = min(part.until, here.end);
        // Units of keys, counted from the sequence's first.
        int unit = (int)max(at - here.keys_start, 0ll), last_unit = (int)max(end - here.keys_start, 0ll);
        // Kept there, not in registers, until the keys have been walked.
        const Stretch &stretch = shared.stretch;
        if (threadIdx.x == 0) shared.stretch = here;
        int step = p.batch_invariant ? 1 : max(last_unit - unit, 1);
        int pieces = p.batch_invariant ? max(1, last_unit - unit) : 1;
        for (int piece = 0; piece < pieces; piece++, unit += step) {
            w.key_start = max(w.tile.all_start, (tiles.first_unit + unit) << p.unit_shift);
            w.key_end = (int)min((long long)w.tile.all_end, (long long)(tiles.first_unit + min(unit + step, last_unit)) << p.unit_shift);
            if (w.key_end <= w.key_start) w.key_start = w.key_end = 0;
            w.first_strip = w.key_start / STRIP;
            if (p.batch_invariant) {
                // Which group of warps has a key must not depend on where the tile's first row begins to see, because sums of groups are joined afterwards.
                int unit_strip = ((tiles.first_unit + unit) << p.unit_shift) / STRIP;
                if (w.first_strip > unit_strip) w.first_strip -= (w.first_strip - unit_strip) % p.key_groups;
            }
            w.walk();
            copy_wait<0>();
            __syncthreads();
            w.leave_state(states);
            __syncthreads();

            int warps = blockDim.x >> 5;
            for (int first = threadIdx.x >> 5; first < w.tile.rows; first += ROWS_AT_ONCE * warps) {
                RowState joined[ROWS_AT_ONCE];
                join_groups(p, joined, shared, states, first, warps, w.lane);
#pragma unroll
                for (int i = 0; i < ROWS_AT_ONCE; i++) {
                    int row = first + i * warps;
                    if (row >= w.tile.rows) break;
                    RowState &state = joined[i];
                    if (starts_here && pieces > 1) {
                        // This block has the tile's first pieces: they are folded as they come. What a lane reads here it wrote itself.
                        if (piece > 0) {
                            RowState folded = load_partial(partial(p, blockIdx.x, 0), row, w.lane);
                            folded.state = shared.folded[piece & 1][row];
                            join_next(unit_of(p), folded, state);
                            state = folded;
                        }
                        if (w.lane == 0) shared.folded[(piece + 1) & 1][row] = state.state;
                    }
                    if (starts_here && ends_here && piece == pieces - 1) {
                        write_row(p, w.tile, row, w.lane, state);
                    } else {
                        store_partial(partial(p, blockIdx.x, starts_here ? 0 : 1 + piece), row, w.lane, state);
                    }
                }
            }
            __syncthreads();
        }

        if (p.cuts && p.line) {
            // `join` joins them, and waits for all of them to be counted.
            if (threadIdx.x == 0) {
                unsigned *counter = (unsigned *)p.workspace + divide(stretch.start, part.share);
                asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
            }
        } else if (p.cuts) {
            // `join` joins them when all blocks are done.
            if (starts_here && threadIdx.x == 0) {
                cut_of(p, w.tile) = {(int)blockIdx.x, ends_here ? (int)blockIdx.x : (int)divide(stretch.end - 1, part.share)};
            }
        } else if (!starts_here || !ends_here) {
            // Others hold the rest of this tile. The last block to arrive joins all parts.
            long long first_block = starts_here ? blockIdx.x : divide(stretch.start, part.share);
            long long last_block = ends_here ? blockIdx.x : divide(stretch.end - 1, part.share);
            unsigned *counter = (unsigned *)p.workspace + first_block;
            if (threadIdx.x == 0) {
                unsigned before;
                asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
                shared.last = before == (unsigned)(last_block - first_block);
            }
            __syncthreads();
            if (shared.last) {
                join_blocks(w, part.share, first_block, last_block, stretch);
                if (threadIdx.x == 0) *counter = 0;
            }
            __syncthreads();
        }
        at = end;
    }
}

#if ROWS > 8
// Joins what `decode` left of tiles that several blocks have parts of: a thread block takes eight rows, a warp each. (The last of those blocks would have
// the rows of the whole tile to itself, while all others are done.) Its grid is that of all tiles that there may be, and of ROWS / 8.
//
// It starts when all blocks of `decode` have. So where the host knew the lengths, and with them each tile's blocks, it can wait for those alone.
extern "C" __global__ void __launch_bounds__(256) join(const __grid_constant__ AttentionParameters p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    int row_tiles = (p.query_len * p.group + ROWS - 1) / ROWS, heads = blockIdx.x / row_tiles, row = blockIdx.y * 8 + threadIdx.x / 32;
    Tile tile;
    tile.index = heads / p.kv_heads;
    tile.kv_head = heads - tile.index * p.kv_heads;
    tile.first_row = (blockIdx.x - heads * row_tiles) * ROWS;
    if (!p.line) wait_for_kernel_in_front();
    tile.sequence = load_sequence(p, tile.index);
    int rows = tile.sequence.q_len > p.most_query_len ? 0 : tile.sequence.q_len * p.group - tile.first_row;
    Cut cut = {0, 0};
    if (p.line) {
        int parts = (int)divide(p.tile_cost, p.share);
        cut.first = blockIdx.x * parts;
        cut.last = cut.first + parts - 1;
    } else if (row < rows) {
        cut = cut_of(p, tile);
    }
    unsigned *counter = (unsigned *)p.workspace + cut.first, parts = cut.last - cut.first + 1;
    if (p.line) {
        if (threadIdx.x == 0) {
            unsigned arrived;
            do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
            while (arrived < parts);
        }
        __syncthreads();
    }
    if (row < rows && cut.first < cut.last) join_row<2 * SOME_STATES>(p, tile, row, threadIdx.x & 31, cut.first, cut.last);
    if (p.line) {
        // The last of the tile's blocks here leaves the counter as it was. Who waits for this kernel waits for `decode` too.
        if (threadIdx.x == 0) {
            unsigned before;
            asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            if (before == parts + gridDim.y - 1) *counter = 0;
        }
        wait_for_kernel_in_front();
    }
}
#endif
