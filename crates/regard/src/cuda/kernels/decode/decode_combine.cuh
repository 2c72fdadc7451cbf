// Partial states of decode tiles: how they are joined, within a thread block and over several, and how finished rows are written.
#pragma once
#include "common/state.cuh"
#include "decode/decode_shape.cuh"
#include "decode/decode_tile.cuh"

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
    FinishedRow finished = finish_row(p, done.state, load_sink(p, head, unit_of(p)), unit_of(p));
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
