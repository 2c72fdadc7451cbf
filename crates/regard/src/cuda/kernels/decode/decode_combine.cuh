// Split-KV combine for decode: merges the partial states of a tile's rows, within a CTA and across CTAs, and writes
// finished rows.
#pragma once
#include "common/epilogue.cuh"
#include "common/state.cuh"
#include "decode/decode_shape.cuh"
#include "decode/decode_tile.cuh"

constexpr int COUNTERS = 1024; // at the start of the workspace, at most one per CTA
constexpr int PARTIAL_FLOATS = TILE_ROWS * (VALUE_DIM + 2);

// A partial state in the workspace: maxima, sums, outputs.
static __device__ __forceinline__ float *partial_state(const AttentionParameters &params, long long cta, int slot) {
    return (float *)(params.workspace + COUNTERS * 4) +
           (cta * params.stream_k.partials_per_cta + slot) * PARTIAL_FLOATS;
}

// The counter of the parts of a tile that are done. The last CTA to arrive combines the parts. CTAs of different `rank`
// have different rows of the tile, so each rank has a counter.
static __device__ __forceinline__ unsigned *arrivals_of(const AttentionParameters &params, long long first_part,
                                                        int rank) {
    return (unsigned *)params.workspace + first_part * CTAS_PER_TILE + rank;
}

// The state of a row, spread over a warp: lane l has the four outputs from 4 l on, and those 128, 256, ... further.
constexpr int FLOAT4S_PER_LANE = (VALUE_DIM + 127) / 128;

struct RowState {
    State state; // the same in all lanes
    float4 out[FLOAT4S_PER_LANE];
};

static __device__ __forceinline__ int column_of(int lane, int i) { return 4 * lane + 128 * i; }

static __device__ __forceinline__ bool has_column(int lane, int i) {
    return VALUE_DIM % 128 == 0 || column_of(lane, i) < VALUE_DIM;
}

static __device__ __forceinline__ RowState empty_row() {
    RowState row;
    row.state = {-INF, 0.0f};
#pragma unroll
    for (int i = 0; i < FLOAT4S_PER_LANE; i++) row.out[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return row;
}

// Merges `count` states into a row's state. `stats(k)` returns the maximum and sum of state k, `values(k, column)` four
// of its outputs. A batch of BATCH states is loaded before any of it is used, because the loads have long latency.
constexpr int STATES_PER_BATCH = FLOAT4S_PER_LANE == 1 ? 8 : FLOAT4S_PER_LANE == 2 ? 4 : 2;

template <int BATCH, class Stats, class Values> static __device__ __forceinline__ void
combine_states(float unit, RowState &row, int count, int lane, Stats stats, Values values) {
#pragma unroll 1
    for (int base = 0; base < count; base += BATCH) {
        float4 value[BATCH][FLOAT4S_PER_LANE];
#pragma unroll
        for (int k = 0; k < BATCH; k++)
#pragma unroll
            for (int i = 0; i < FLOAT4S_PER_LANE; i++)
                if (base + k < count && has_column(lane, i)) value[k][i] = values(base + k, column_of(lane, i));
        // Lane l weighs state l % BATCH.
        State own = {-INF, 0.0f};
        int own_part = base + lane % BATCH;
        if (own_part < count) own = stats(own_part);
        float new_max = fmaxf(own.max, row.state.max);
#pragma unroll
        for (int step = BATCH / 2; step; step /= 2) new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, step));
        float reference = new_max == -INF ? 0.0f : new_max;
        float factor = exp2_fast((own.max - reference) * unit), carried = exp2_fast((row.state.max - reference) * unit);
        float sum = __fmul_rn(own.sum, factor);
#pragma unroll
        for (int step = BATCH / 2; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        row.state = {new_max, fmaf(row.state.sum, carried, sum)};
#pragma unroll
        for (int i = 0; i < FLOAT4S_PER_LANE; i++) row.out[i] = scale_four(row.out[i], carried);
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            float weight = __shfl_sync(~0u, factor, k);
#pragma unroll
            for (int i = 0; i < FLOAT4S_PER_LANE; i++)
                if (base + k < count && has_column(lane, i)) row.out[i] = add_four(row.out[i], weight, value[k][i]);
        }
    }
}

// Merges one more state: batch-invariant mode merges one by one, in the order of the keys.
static __device__ __forceinline__ void combine_next(float unit, RowState &row, const RowState &next) {
    float left, right;
    row.state = merge_states(row.state, next.state, unit, left, right);
#pragma unroll
    for (int i = 0; i < FLOAT4S_PER_LANE; i++) row.out[i] = add_four(scale_four(row.out[i], left), right, next.out[i]);
}

static __device__ __forceinline__ RowState load_partial(const float *from, int row, int lane) {
    RowState state;
    state.state = {__ldcg(from + row), __ldcg(from + TILE_ROWS + row)};
#pragma unroll
    for (int i = 0; i < FLOAT4S_PER_LANE; i++)
        if (has_column(lane, i))
            state.out[i] = __ldcg((const float4 *)(from + 2 * TILE_ROWS + row * VALUE_DIM + column_of(lane, i)));
    return state;
}

static __device__ __forceinline__ void store_partial(float *to, int row, int lane, const RowState &state) {
    if (lane == 0) {
        to[row] = state.state.max;
        to[TILE_ROWS + row] = state.state.sum;
    }
#pragma unroll
    for (int i = 0; i < FLOAT4S_PER_LANE; i++)
        if (has_column(lane, i)) *(float4 *)(to + 2 * TILE_ROWS + row * VALUE_DIM + column_of(lane, i)) = state.out[i];
}

// The type of the output where queries are elements.
static __device__ __forceinline__ ElementType element_out_type(const AttentionParameters &params) {
    return params.out_f32 ? ElementType::F32 : ElementType(ELEMENT_TYPE);
}

// Stores four outputs of a row from `column` on; the row starts at element `at` of the output.
static __device__ __forceinline__ void store_four(const AttentionParameters &params, long long at, int column, float4 x,
                                                  ElementType out_type) {
    if (!params.out_f32) x = make_float4(bound_output(x.x), bound_output(x.y), bound_output(x.z), bound_output(x.w));
    if (params.out_aligned && column + 4 <= params.value_dim &&
        (CACHE_CLASS != CacheClass::Any || out_type == ElementType::F32)) {
        if (WIDE_ELEMENT || params.out_f32) {
            asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"((float *)params.out.pointer + at + column),
                         "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                         : "memory");
        } else {
            asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"((Bits *)params.out.pointer + at + column),
                         "r"(E::pack(x.x, x.y)), "r"(E::pack(x.z, x.w))
                         : "memory");
        }
    } else {
#pragma unroll 1
        for (int e = 0; e < min(4, params.value_dim - column); e++) {
            float value = e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w;
            store_element(params.out.pointer, at + column + e, out_type, value);
        }
    }
}

// The epilogue of a row: adds the sink, normalizes, and writes output and LSE.
static __device__ __forceinline__ void store_row(const AttentionParameters &params, const Tile &tile, int row, int lane,
                                                 const RowState &done, ElementType out_type) {
    int head, token;
    tile.find_row(params, row, head, token);
    if (tile.seq.first_key) {
        // `merge_prefix` merges this state with those of the prefix.
        float *out = (float *)params.own_out.pointer + row_offset(params.own_out.strides, tile, head, token);
#pragma unroll
        for (int i = 0; i < FLOAT4S_PER_LANE; i++)
            if (column_of(lane, i) < params.value_dim) *(float4 *)(out + column_of(lane, i)) = done.out[i];
        long long at = row_offset(params.own_states.strides, tile, head, token);
        if (lane == 0)
            *(float2 *)((float *)params.own_states.pointer + at) = make_float2(done.state.max, done.state.sum);
        return;
    }
    FinalizedRow finalized = finalize_row(params, done.state, load_sink(params, head, unit_of(params)), unit_of(params),
                                          params.lse.pointer != 0);
    OutputFactors factors = finalized.factors;
    long long at = out_offset(params, tile, head, token);
    // Added to 0, so that -0 becomes 0: a merge with an empty part does the same, and bits must not depend on one.
    float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < FLOAT4S_PER_LANE; i++)
        store_four(params, at, column_of(lane, i),
                   add_four(zero, factors.second, scale_four(done.out[i], factors.first)), out_type);
    if (params.lse.pointer && lane == 0) store_lse(params, tile, head, token, finalized.lse);
}

// The partial states of a tile's parts: the first CTA's is in its slot 0, every other CTA's in its slot 1.
struct PartialStates {
    const float *slots; // slot 1 of the first CTA
    long long stride;
    __device__ __forceinline__ const float *operator()(int k) const {
        return k == 0 ? slots - PARTIAL_FLOATS : slots + k * stride;
    }
};

// Merges a row's partial states of CTAs `first..=last`, one each, and writes the row. One warp per row.
template <int BATCH>
static __device__ __forceinline__ void combine_row(const AttentionParameters &params, const Tile &tile, int row,
                                                   int lane, long long first, long long last, ElementType out_type) {
    PartialStates slot = {partial_state(params, first, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    RowState state = empty_row();
    combine_states<BATCH>(
        unit_of(params), state, (int)(last - first) + 1, lane,
        [&](int k) { return State{__ldcg(slot(k) + row), __ldcg(slot(k) + TILE_ROWS + row)}; },
        [&](int k, int column) {
            return __ldcg((const float4 *)(slot(k) + 2 * TILE_ROWS + row * VALUE_DIM + column));
        });
    store_row(params, tile, row, lane, state, out_type);
}

// The sequence of a tile, or the row if rows have lists of keys.
static __device__ __forceinline__ int work_of(const Tile &tile) {
#if LISTS
    return tile.seq.list_row;
#else
    return tile.sequence;
#endif
}

// What `combine` waits for: a word per tile among the counters, 0 before a call and after it. Every CTA that has stored
// its part adds 1; the one that has the tile's first key adds which CTA it is, and how many parts there are.
struct TileWord {
    static constexpr int BITS = 10, LARGEST = (1 << BITS) - 1; // of each of the three
    unsigned bits;

    __device__ __forceinline__ int arrivals() const { return bits & LARGEST; }
    __device__ __forceinline__ int parts() const { return bits >> BITS & LARGEST; }
    __device__ __forceinline__ int first_part() const { return bits >> 2 * BITS; }
    // All parts are stored. CTAs that combine arrive too.
    __device__ __forceinline__ bool is_complete() const { return parts() && arrivals() >= parts(); }
};
static_assert(COUNTERS <= TileWord::LARGEST + 1 && 3 * TileWord::BITS <= 32, "a part, or their number");

// The word of tile `number`, for the rows that CTA `rank` of each part has. Tiles are numbered by sequence, head and
// row, independent of lengths.
static __device__ __forceinline__ unsigned *tile_word(const AttentionParameters &params, int number, int rank) {
    return (unsigned *)params.workspace + number * CTAS_PER_TILE + rank;
}

// Counts a part of a tile for `combine`. One thread calls this, after a barrier of those that have stored it.
static __device__ __forceinline__ void count_part(const AttentionParameters &params, const Tile &tile, bool starts_here,
                                                  int first_part, int last_part) {
    int number =
        (work_of(tile) * params.kv_heads + tile.kv_head) * row_tiles_at_most(params) + tile.first_row / TILE_ROWS;
    unsigned add = 1;
    if (starts_here) add += (last_part - first_part + 1 << TileWord::BITS) + (first_part << 2 * TileWord::BITS);
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], %1;" ::"l"(tile_word(params, number, blockIdx.x % CTAS_PER_TILE)),
        "r"(add)
        : "memory");
}
