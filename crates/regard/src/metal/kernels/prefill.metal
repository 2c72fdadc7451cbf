// Many query rows: both products on 8 x 8 matrices (simdgroup_matrix), accumulated in f32.
//
// A SIMD group owns 8 rows. For wide heads PARTS SIMD groups share 8 rows, each with a part of the dims. A SIMD group
// holds its part of the queries and of the output in registers: MATRICES matrices each, 4 values per lane and matrix. A
// K tile, then its values, is copied into threadgroup memory once for all SIMD groups. The copy hides pages, tails and
// odd dims: invisible slots become zeros, and the products see whole matrices only. Scores go from the first product to
// the second in registers. The scores of PARTS parts are added, in order, through threadgroup memory.
//
// Tiles start at multiples of TILE_KEYS from key 0 and rows never mix, so a row's bits do not depend on its neighbours.

// Matrices of scores per tile, at most: TILE_KEYS / 8.
constant int MAX_SCORE_MATRICES = 4;
// Matrices of 8 dims that a dot product adds up from zero: one chain over all dims would be inexact if all products
// have one sign.
constant int RUN_MATRICES = 4;

// The position of a lane's two elements in an 8 x 8 matrix, as the hardware has it.
METAL_FUNC int matrix_row_of(int lane) { return (lane / 4 & 4) + (lane / 2) % 4; }
METAL_FUNC int matrix_column_of(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// Elements per row of a tile in threadgroup memory: 16 bytes more than the dims, so that rows start in different banks.
template <typename T>
METAL_FUNC int tile_stride(int dims) {
    return dims + 16 / int(sizeof(T));
}

// Four elements in the type of the tile, which holds them exactly: metal/select.rs takes tiles of floats for blocks and
// for floats of another type than the queries.
template <typename T, typename Stored>
METAL_FUNC vec<T, 4> load_tile_elements(KeyRow<Stored> row, int dim, int dims, int format) {
    const auto stored = load_row<4>(row, {dim, dims, false}, format);
    vec<T, 4> elements;
    UNROLL
    for (int i = 0; i < 4; i++) elements[i] = T(stored[i]);
    return elements;
}

// Copies of tiles: of keys, or of values.
struct TileCopy {
    int format;
    int dims;
    // The dims of all parts, in whole matrices.
    int padded_dims;
    // The keys that are copied: from x to before y.
    int2 range;
    int thread_index;
};

// Copies keys first..first + TILE_KEYS into threadgroup memory, with zeros for keys outside the range and for dims past
// the last.
//
// A row is copied by `row_threads` threads, so a thread computes the address of a row once and keeps its dims: one
// vector per row, or `row_vectors` of them if a row is wider than a quarter of the threads.
template <typename T, typename Stored>
METAL_FUNC void copy_rows(threadgroup T* tile, KeyView<Stored> view, TileCopy copy, int first) {
    const int threads = SIMD_GROUPS * SIMD_WIDTH;
    const int vectors = copy.padded_dims / 4;
    const int row_vectors = (vectors * 4 + threads - 1) / threads;
    const int row_threads = (vectors + row_vectors - 1) / row_vectors;
    const int rows = threads / row_threads;
    if (copy.thread_index >= rows * row_threads) return;
    for (int j = copy.thread_index / row_threads; j < TILE_KEYS; j += rows) {
        const int key = first + j;
        const bool is_visible = key >= copy.range.x && key < copy.range.y;
        KeyRow<Stored> row = {view.data, view.data};
        if (is_visible) row = key_row(view, key);
        threadgroup T* to = tile + j * tile_stride<T>(copy.padded_dims);
        for (int n = copy.thread_index % row_threads; n < vectors; n += row_threads) {
            vec<T, 4> elements = vec<T, 4>(T(0));
            if (is_visible) elements = load_tile_elements<T>(row, n * 4, copy.dims, copy.format);
            *(threadgroup vec<T, 4>*)(to + n * 4) = elements;
        }
    }
}

template <typename T, typename Q>
METAL_FUNC void copy_tile(threadgroup T* tile, CacheView<Q> view, TileCopy copy, int first) {
    if (is_native(copy.format)) copy_rows(tile, view.native, copy, first);
    else copy_rows(tile, view.bytes, copy, first);
}

// The scales of a K tile in threadgroup memory, if keys or values are codes. Invisible slots have scale 0.
struct TileScales {
    threadgroup float* keys;
    threadgroup float* values;
};

METAL_FUNC void copy_scales(TileScales tile, ScaleViews views, int first, int2 range, int thread_index) {
    if (thread_index >= TILE_KEYS) return;
    const int key = first + thread_index;
    const bool is_visible = key >= range.x && key < range.y;
    if (has_scales(KEY_FORMAT)) tile.keys[thread_index] = is_visible ? *key_address(views.keys, key) : 0.0f;
    if (has_scales(VALUE_FORMAT)) tile.values[thread_index] = is_visible ? *key_address(views.values, key) : 0.0f;
}

// The scores of 8 rows by TILE_KEYS keys, before and after the softmax step: a lane has two of each matrix.
struct Scores {
    simdgroup_float8x8 matrices[MAX_SCORE_MATRICES];
};

// S = Q @ K^T over this part's dims.
template <typename T, int MATRICES>
METAL_FUNC void multiply_keys(thread Scores& scores, thread simdgroup_matrix<T, 8, 8> (&query)[MATRICES],
                              threadgroup T* tile, int stride, int matrices) {
    UNROLL
    for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
        if (j >= TILE_KEYS / 8) continue;
        scores.matrices[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_float8x8 run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLL
        for (int m = 0; m < MATRICES; m++) {
            if (m >= matrices) continue;
            simdgroup_matrix<T, 8, 8> key;
            simdgroup_load(key, tile + j * 8 * stride + m * 8, ulong(stride), ulong2(0, 0), true);
            simdgroup_multiply_accumulate(run, query[m], key, run);
            if (m % RUN_MATRICES == RUN_MATRICES - 1 || m == matrices - 1) {
                UNROLL
                for (int i = 0; i < 2; i++) scores.matrices[j].thread_elements()[i] += run.thread_elements()[i];
                run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
        }
        // Keeps the compiler from loading the next keys before these are used.
        simdgroup_barrier(mem_flags::mem_none);
    }
}

// A lane's row in the softmax step.
struct LaneRow {
    RowFacts facts;
    // The keys that it sees within the split.
    int start;
    int end;
    // The lane's first column of every matrix.
    int column;
};

// The tile map (mask_map.metal) of a row tile, by K tile; null if there is no map.
struct MapRow {
    device const uchar* kinds;
    bool is_given;
};

METAL_FUNC MapRow map_row(RowTile tile, SequenceHead head, constant AttentionParameters& params,
                          OptionalOperands operands) {
    constant MapStrides& strides = params.map.strides;
    const long at = long(head.sequence.index) * strides.batch + long(head.kv_head) * strides.head +
                    long(tile.first_row / TILE_ROWS) * strides.row;
    return {operands.map + at, !mask_is(MaskKind::None) && params.map.key_tiles > 0};
}

METAL_FUNC int map_kind(MapRow map, int key) {
    return map.is_given ? int(map.kinds[key / TILE_KEYS]) : int(MapKind::Mixed);
}

// A K tile: its first key, its scales, and what the rows of the SIMD group see of it.
struct KeyTile {
    int first;
    TileScales scales;
    bool reads_mask;
    // Some row sees some of its keys.
    bool is_visible;
    // Bounds leave all of its keys to all rows.
    bool all_visible;
};

// Turns the scores of a K tile into probabilities, times the scales of values, and returns the factor
// that rescales the sums before.
// ALL_VISIBLE: bounds leave every key of the tile to every row of the SIMD group, so they are not tested.
template <bool ALL_VISIBLE>
METAL_FUNC float softmax_step(thread Scores& scores, thread State& state, KeyTile keys, LaneRow row,
                              constant AttentionParameters& params, OptionalOperands operands) {
    uint visible = 0;
    float tile_max = MIN_SCORE;
    UNROLL
    for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
        if (j >= TILE_KEYS / 8) continue;
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int key = keys.first + j * 8 + row.column + i;
            float score = scores.matrices[j].thread_elements()[i];
            if (has_scales(KEY_FORMAT)) score *= keys.scales.keys[j * 8 + row.column + i];
            bool is_visible = ALL_VISIBLE || (key >= row.start && key < row.end);
            if (is_visible) {
                is_visible = modify_score(score, row.facts, key, keys.reads_mask, params, operands);
            }
            scores.matrices[j].thread_elements()[i] = score;
            visible |= is_visible ? 1u << (j * 2 + i) : 0u;
            tile_max = is_visible ? max(tile_max, score) : tile_max;
        }
    }
    // The four lanes of a row.
    tile_max = max(tile_max, simd_shuffle_xor(tile_max, 1));
    tile_max = max(tile_max, simd_shuffle_xor(tile_max, 8));
    const float new_max = max(state.max, tile_max);
    const float factor = score_exp(state.max - new_max);
    state.max = new_max;
    state.sum *= factor;
    UNROLL
    for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
        if (j >= TILE_KEYS / 8) continue;
        UNROLL
        for (int i = 0; i < 2; i++) {
            const float score = scores.matrices[j].thread_elements()[i];
            const bool is_visible = (visible >> (j * 2 + i) & 1u) != 0;
            float probability = is_visible ? score_exp(score - new_max) : 0.0f;
            state.sum += probability;
            if (has_scales(VALUE_FORMAT) && is_visible) probability *= keys.scales.values[j * 8 + row.column + i];
            scores.matrices[j].thread_elements()[i] = probability;
        }
    }
    return factor;
}

// O = factor * O + P @ V over this part's dims. The values of a tile are a run of the sum over all keys.
template <typename T, int MATRICES>
METAL_FUNC void multiply_values(thread simdgroup_float8x8 (&sums)[MATRICES], thread Scores& scores, float factor,
                                threadgroup T* tile, int stride, int matrices) {
    UNROLL
    for (int m = 0; m < MATRICES; m++) {
        if (m >= matrices) continue;
        simdgroup_float8x8 run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        UNROLL
        for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
            if (j >= TILE_KEYS / 8) continue;
            simdgroup_matrix<T, 8, 8> value;
            simdgroup_load(value, tile + j * 8 * stride + m * 8, ulong(stride));
            simdgroup_multiply_accumulate(run, scores.matrices[j], value, run);
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
            sums[m].thread_elements()[i] = fma(sums[m].thread_elements()[i], factor, run.thread_elements()[i]);
        }
        simdgroup_barrier(mem_flags::mem_none);
    }
}

// The sum of a row's probabilities, from its four lanes.
METAL_FUNC float sum_of_row(float sum) {
    sum += simd_shuffle_xor(sum, 1);
    return sum + simd_shuffle_xor(sum, 8);
}

// Combines the sums and the state of a split with those of the splits before it, as combine.metal does.
template <int MATRICES>
METAL_FUNC State combine_split(State combined, State state, thread simdgroup_float8x8 (&combined_sums)[MATRICES],
                            thread simdgroup_float8x8 (&sums)[MATRICES]) {
    float factor_a, factor_b;
    state.sum = sum_of_row(state.sum);
    combined = merge_states(combined, state, factor_a, factor_b);
    UNROLL
    for (int m = 0; m < MATRICES; m++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            combined_sums[m].thread_elements()[i] =
                fma(sums[m].thread_elements()[i], factor_b, combined_sums[m].thread_elements()[i] * factor_a);
        }
    }
    return combined;
}

// A lane's rows and columns of the matrices, and whether its row exists.
struct PrefillLane {
    int lane;
    int simdgroup;
    // The part of the dims that this SIMD group has.
    int part;
    // The first row of the SIMD group, and the lane's own, counted from the first of the tile.
    int group_row;
    int row;
    int column;
    bool exists;
};

template <int PARTS>
METAL_FUNC PrefillLane prefill_lane(int lane, int simdgroup, RowTile tile) {
    PrefillLane at;
    at.lane = lane;
    at.simdgroup = simdgroup;
    at.part = simdgroup % PARTS;
    at.group_row = simdgroup / PARTS * 8;
    at.row = at.group_row + matrix_row_of(lane);
    at.column = matrix_column_of(lane);
    at.exists = at.row < tile.rows;
    return at;
}

// The rows of a threadgroup, and this lane's.
struct PrefillTile {
    SequenceHead head;
    RowTile rows;
    PrefillLane at;
    LaneRow row;
};

template <int PARTS>
METAL_FUNC PrefillTile prefill_tile(SequenceHead head, RowTile rows, ThreadPosition thread_at,
                                    constant AttentionParameters& params, OptionalOperands operands) {
    const PrefillLane at = prefill_lane<PARTS>(thread_at.lane, thread_at.simdgroup, rows);
    const RowFacts facts = load_row(rows.first_row + at.row, head, params, operands);
    const LaneRow row = {facts, max(facts.start, rows.start), min(facts.end, rows.end), at.column};
    return {head, rows, at, row};
}

// Matrices of 8 dims that a part has.
template <int PARTS>
METAL_FUNC int part_matrices(int dims) {
    return (dims + 8 * PARTS - 1) / (8 * PARTS);
}

// Keys that some row of the SIMD group sees, and keys that all of its rows see: from x to before y.
struct VisibleKeys {
    int2 to_some;
    int2 to_all;
};

METAL_FUNC VisibleKeys visible_keys(PrefillTile prefill, constant AttentionParameters& params) {
    const PrefillLane at = prefill.at;
    const RowTile tile = prefill.rows;
    const Sequence sequence = prefill.head.sequence;
    VisibleKeys keys = {int2(0, 0), int2(0, 0)};
    if (at.group_row >= tile.rows) return keys;
    const int last = min(at.group_row + 7, tile.rows - 1);
    const int2 of_first =
        visible_range(sequence.position + (tile.first_row + at.group_row) / params.group, sequence, params);
    const int2 of_last = visible_range(sequence.position + (tile.first_row + last) / params.group, sequence, params);
    keys.to_some = int2(of_first.x, of_last.y);
    keys.to_all = int2(max(of_last.x, tile.start), min(of_first.y, tile.end));
    return keys;
}

// This SIMD group's part of the queries of its 8 rows.
template <typename T, typename Q, int MATRICES>
METAL_FUNC void load_queries(thread simdgroup_matrix<T, 8, 8> (&query)[MATRICES], device const Q* row, PrefillLane at,
                             int matrices) {
    UNROLL
    for (int m = 0; m < MATRICES; m++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int dim = (at.part * matrices + m) * 8 + at.column + i;
            query[m].thread_elements()[i] = at.exists && m < matrices && dim < HEAD_DIM ? T(row[dim]) : T(0);
        }
    }
}

template <int MATRICES>
METAL_FUNC void fill_zero(thread simdgroup_float8x8 (&sums)[MATRICES]) {
    UNROLL
    for (int m = 0; m < MATRICES; m++) sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// Stores this part's scores for the other parts of the rows.
METAL_FUNC void store_scores(threadgroup float* partial_scores, thread Scores& scores, PrefillLane at) {
    UNROLL
    for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
        if (j >= TILE_KEYS / 8) continue;
        UNROLL
        for (int i = 0; i < 2; i++) {
            partial_scores[(at.simdgroup * 8 + matrix_row_of(at.lane)) * TILE_KEYS + j * 8 + at.column + i] =
                scores.matrices[j].thread_elements()[i];
        }
    }
}

// The scores over all dims: those of the parts, added in order.
template <int PARTS>
METAL_FUNC void add_parts(threadgroup float* partial_scores, thread Scores& scores, PrefillLane at) {
    UNROLL
    for (int j = 0; j < MAX_SCORE_MATRICES; j++) {
        if (j >= TILE_KEYS / 8) continue;
        UNROLL
        for (int i = 0; i < 2; i++) {
            float score = 0.0f;
            UNROLL
            for (int p = 0; p < PARTS; p++) {
                const int other = at.simdgroup - at.part + p;
                score += partial_scores[(other * 8 + matrix_row_of(at.lane)) * TILE_KEYS + j * 8 + at.column + i];
            }
            scores.matrices[j].thread_elements()[i] = score;
        }
    }
}

// The registers of a SIMD group: its part of 8 rows.
template <typename T, int MATRICES>
struct PrefillRows {
    simdgroup_matrix<T, 8, 8> query[MATRICES];
    simdgroup_float8x8 sums[MATRICES];
    State state;
    // Of the splits before, if the threadgroup walks several.
    simdgroup_float8x8 combined_sums[MATRICES];
    State combined;
};

template <typename T, int MATRICES>
METAL_FUNC void start_split(thread PrefillRows<T, MATRICES>& rows) {
    fill_zero(rows.sums);
    rows.state = empty_state();
}

// Leaves the sums and the state over all keys.
template <typename T, int MATRICES>
METAL_FUNC void finish_rows(thread PrefillRows<T, MATRICES>& rows) {
    if (!WALKS_SPLITS) {
        rows.state.sum = sum_of_row(rows.state.sum);
        return;
    }
    rows.state = combine_split(rows.combined, rows.state, rows.combined_sums, rows.sums);
    UNROLL
    for (int m = 0; m < MATRICES; m++) rows.sums[m] = rows.combined_sums[m];
}

// Epilogue: stores the lane's elements of its row: the partial state of a split, or output and LSE.
template <typename Q, typename T, int MATRICES, int PARTS>
METAL_FUNC void store_row(thread PrefillRows<T, MATRICES>& rows, PrefillTile tile,
                          constant AttentionParameters& params, OptionalOperands operands, Outputs outputs) {
    const PrefillLane at = tile.at;
    const RowFacts facts = tile.row.facts;
    const int matrices = part_matrices<PARTS>(VALUE_DIM);
    float scale = 1.0f;
    device float* partial = outputs.partials;
    // One lane of a row, of the first part, writes the row's state.
    const bool writes_state = at.part == 0 && at.column == 0;
    if (PARTIAL) {
        partial = partial_at(outputs, tile.rows.first_row + at.row, tile.rows.split, tile.head, params);
        if (writes_state) {
            partial[VALUE_DIM] = rows.state.max;
            partial[VALUE_DIM + 1] = rows.state.sum;
        }
    } else {
        const State state = finalize_row(rows.state, facts.head, operands, scale);
        if (LSE && writes_state) store_lse(outputs, facts, tile.head.sequence, state, params);
    }
    const long first = row_offset(facts, tile.head.sequence, params.out_strides);
    UNROLL
    for (int m = 0; m < MATRICES; m++) {
        if (m >= matrices) continue;
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int dim = (at.part * matrices + m) * 8 + at.column + i;
            if (dim >= VALUE_DIM) continue;
            const float sum = rows.sums[m].thread_elements()[i] * scale;
            if (PARTIAL) partial[dim] = sum;
            else store_out<Q>(outputs, first + dim, sum);
        }
    }
}

// The keys and values of a threadgroup, and the threadgroup memory that their tiles are copied to.
template <typename Q, typename T>
struct KeySource {
    CacheView<Q> keys;
    CacheView<Q> values;
    ScaleViews scales;
    TileCopy key_copy;
    TileCopy value_copy;
    threadgroup T* tile;
    threadgroup float* partial_scores;
    TileScales tile_scales;
};

template <typename Q, typename T, int PARTS>
METAL_FUNC KeySource<Q, T> key_source(Inputs<Q> inputs, PrefillTile tile, threadgroup uchar* memory, int thread_index,
                                      constant AttentionParameters& params, OptionalOperands operands) {
    const int key_dims = part_matrices<PARTS>(HEAD_DIM) * 8 * PARTS;
    const int value_dims = part_matrices<PARTS>(VALUE_DIM) * 8 * PARTS;
    const int2 range = int2(tile.rows.start, tile.rows.end);
    KeySource<Q, T> source;
    source.keys = with_rotary(cache_view(inputs.k, params.key_strides, KEY_FORMAT, tile.head, params, operands),
                              inputs.rotary_k, params.rotary_strides, KEY_FORMAT, tile.head, params, operands);
    source.values = cache_view(inputs.v, params.value_strides, VALUE_FORMAT, tile.head, params, operands);
    source.scales = scale_views(tile.head, params, operands);
    source.key_copy = {KEY_FORMAT, HEAD_DIM, key_dims, range, thread_index};
    source.value_copy = {VALUE_FORMAT, VALUE_DIM, value_dims, range, thread_index};
    source.tile = (threadgroup T*)memory;
    source.partial_scores =
        (threadgroup float*)(memory + TILE_KEYS * tile_stride<T>(max(key_dims, value_dims)) * int(sizeof(T)));
    threadgroup float* scales = source.partial_scores + (PARTS > 1 ? SIMD_GROUPS * 8 * TILE_KEYS : 0);
    source.tile_scales = {scales, scales + TILE_KEYS};
    return source;
}

// Attends to one K tile. All threads of the threadgroup come here together.
template <typename T, int MATRICES, int PARTS, typename Q>
METAL_FUNC void attend_tile(thread PrefillRows<T, MATRICES>& rows, KeySource<Q, T> source, PrefillTile tile,
                            KeyTile keys, constant AttentionParameters& params, OptionalOperands operands) {
    const int key_matrices = part_matrices<PARTS>(HEAD_DIM);
    const int value_matrices = part_matrices<PARTS>(VALUE_DIM);
    const int part = tile.at.part;
    copy_tile(source.tile, source.keys, source.key_copy, keys.first);
    if (has_scales(KEY_FORMAT) || has_scales(VALUE_FORMAT)) {
        copy_scales(source.tile_scales, source.scales, keys.first, source.key_copy.range, source.key_copy.thread_index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Scores scores;
    if (keys.is_visible) {
        multiply_keys<T, MATRICES>(scores, rows.query, source.tile + part * key_matrices * 8,
                                   tile_stride<T>(source.key_copy.padded_dims), key_matrices);
        if (PARTS > 1) store_scores(source.partial_scores, scores, tile.at);
    }
    // All threads have read the keys, and the scores of all parts are stored.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    copy_tile(source.tile, source.values, source.value_copy, keys.first);
    float factor = 1.0f;
    if (keys.is_visible) {
        if (PARTS > 1) add_parts<PARTS>(source.partial_scores, scores, tile.at);
        factor = keys.all_visible ? softmax_step<true>(scores, rows.state, keys, tile.row, params, operands)
                                  : softmax_step<false>(scores, rows.state, keys, tile.row, params, operands);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (keys.is_visible) {
        multiply_values<T, MATRICES>(rows.sums, scores, factor, source.tile + part * value_matrices * 8,
                                     tile_stride<T>(source.value_copy.padded_dims), value_matrices);
    }
    // The next tile's keys overwrite these values.
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Q is the type of queries and outputs, T that of the products' operands.
template <typename Q, typename T, int MATRICES, int PARTS>
METAL_FUNC void prefill_rows(constant AttentionParameters& params, Inputs<Q> inputs, OptionalOperands operands,
                             Outputs outputs, threadgroup uchar* memory, ThreadPosition thread_at) {
    const SequenceHead head = load_sequence_head(thread_at, params, operands);
    const RowTile row_tile = load_row_tile(uint(params.first_block) + thread_at.group.x, head, params, operands);
    if (row_tile.rows <= 0) return;

    // Prologue: the queries, and this lane's row.
    const PrefillTile tile = prefill_tile<PARTS>(head, row_tile, thread_at, params, operands);
    const KeySource<Q, T> source =
        key_source<Q, T, PARTS>(inputs, tile, memory, thread_at.index, params, operands);
    const VisibleKeys visible = visible_keys(tile, params);
    const MapRow map = map_row(row_tile, head, params, operands);
    PrefillRows<T, MATRICES> rows;
    device const Q* query_row = inputs.q + row_offset(tile.row.facts, head.sequence, params.query_strides);
    load_queries<T, Q, MATRICES>(rows.query, query_row, tile.at, part_matrices<PARTS>(HEAD_DIM));
    start_split(rows);
    fill_zero(rows.combined_sums);
    rows.combined = empty_state();

    // Mainloop over K tiles.
    for (int first = row_tile.start / TILE_KEYS * TILE_KEYS; first < row_tile.end; first += TILE_KEYS) {
        if (WALKS_SPLITS && divide_long(first, params.split_keys) * params.split_keys == first) {
            rows.combined = combine_split(rows.combined, rows.state, rows.combined_sums, rows.sums);
            start_split(rows);
        }
        // A K tile that the mask empties changes nothing, not even bits: its factor would be 1, and its sums 0.
        const int kind = map_kind(map, first);
        if (kind == int(MapKind::Empty)) continue;
        KeyTile keys;
        keys.first = first;
        keys.scales = source.tile_scales;
        keys.reads_mask = kind != int(MapKind::Full);
        keys.is_visible = first < visible.to_some.y && first + TILE_KEYS > visible.to_some.x;
        keys.all_visible = first >= visible.to_all.x && first + TILE_KEYS <= visible.to_all.y;
        attend_tile<T, MATRICES, PARTS>(rows, source, tile, keys, params, operands);
    }

    // Epilogue.
    finish_rows(rows);
    if (tile.at.exists) store_row<Q, T, MATRICES, PARTS>(rows, tile, params, operands, outputs);
}

template <typename Q, typename T, int MATRICES, int PARTS>
[[kernel, max_total_threads_per_threadgroup(256)]] void prefill(
    constant AttentionParameters& params [[buffer(0)]], device const Q* q [[buffer(1)]],
    device const Q* k [[buffer(2)]], device const Q* v [[buffer(3)]], device uchar* out [[buffer(4)]],
    device uint* lse [[buffer(5)]], device const uchar* mask [[buffer(6)]], device const float* slopes [[buffer(7)]],
    device const float* sinks [[buffer(8)]], device const int* tree [[buffer(9)]],
    device const int* kv_lens [[buffer(10)]], device const int* cu_seqlens_q [[buffer(11)]],
    device const int* cu_seqlens_k [[buffer(12)]], device const int* block_table [[buffer(13)]],
    device const int* q_offsets [[buffer(14)]], device float* partials [[buffer(15)]],
    device const float* k_scales [[buffer(16)]], device const float* v_scales [[buffer(17)]],
    device const uchar* map [[buffer(18)]], device const int* key_offsets [[buffer(19)]],
    device const Q* rotary_k [[buffer(29)]],
    threadgroup uchar* shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    // Without lists, which are decode's.
    const OptionalOperands operands = {mask,         slopes,       sinks,       tree,        kv_lens,
                                       cu_seqlens_q, cu_seqlens_k, block_table, q_offsets,   k_scales,
                                       v_scales,     map,          key_offsets, key_offsets, key_offsets,
                                       key_offsets,  k_scales,     v_scales,    key_offsets, key_offsets};
    const Outputs outputs = {out, lse, partials};
    const Inputs<Q> inputs = {q, k, v, rotary_k, k, v};
    const ThreadPosition at = {group, int(lane_index), int(simdgroup_index), int(thread_index)};
    prefill_rows<Q, T, MATRICES, PARTS>(params, inputs, operands, outputs, shared, at);
}

#define PREFILL(NAME, Q, T, MATRICES, PARTS)                                     \
    template [[host_name("prefill_" NAME "_" #MATRICES "x" #PARTS)]] [[kernel]] \
    decltype(prefill<Q, T, MATRICES, PARTS>) prefill<Q, T, MATRICES, PARTS>;
#define PREFILL_TYPES(NAME, Q, T) \
    PREFILL(NAME, Q, T, 8, 1) PREFILL(NAME, Q, T, 16, 1) PREFILL(NAME, Q, T, 16, 2) PREFILL(NAME, Q, T, 18, 4)
PREFILL_TYPES("float", float, float)
PREFILL_TYPES("half", half, half)
PREFILL_TYPES("bfloat", bfloat, bfloat)
PREFILL_TYPES("half_float", half, float)
PREFILL_TYPES("bfloat_float", bfloat, float)
