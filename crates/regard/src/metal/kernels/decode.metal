// Few query rows against many keys: decode and speculative verify. Memory-bound, so every key and value is read once
// for all rows of a key/value head, and the lanes of a SIMD group read a row of memory in order.
//
// A lane holds CHUNKS vectors of WIDTH elements of every row: vector c of lane l begins at dim (32 c + l) * WIDTH. A
// step of a SIMD group takes 32 / ROWS keys and so makes 32 scores, one per lane: the partial sums of the dot products
// of the keys in flight are exchanged by halves instead of being reduced one by one, and softcap, biases, masks and
// exponentials run once per score, on all lanes. Steps go round-robin to the SIMD groups of a threadgroup; their states
// are merged through threadgroup memory at the end.

// Sums of COUNT values over groups of COUNT lanes, DISTANCE lanes from each other, by exchanging halves: lane l gets
// its group's sum of value l / DISTANCE % COUNT.
template <int COUNT, int DISTANCE>
struct SumAcrossLanes {
    static METAL_FUNC float of(const thread float* values, int lane) {
        const float low = SumAcrossLanes<COUNT / 2, DISTANCE>::of(values, lane);
        const float high = SumAcrossLanes<COUNT / 2, DISTANCE>::of(values + COUNT / 2, lane);
        const int bit = COUNT / 2 * DISTANCE;
        const bool keeps_high = (lane & bit) != 0;
        const float kept = keeps_high ? high : low;
        const float given = keeps_high ? low : high;
        return kept + simd_shuffle_xor(given, ushort(bit));
    }
};
template <int DISTANCE>
struct SumAcrossLanes<1, DISTANCE> {
    static METAL_FUNC float of(const thread float* values, int) { return values[0]; }
};

// The keys that a lane walks: from x to before y of `range`, or entries of a list.
struct KeyWalk {
    int2 range;
    int lane;
    KeyList list;
};

// The loads of a lane: of keys, or of values.
struct TokenLoads {
    int format;
    int dims;
    KeyWalk walk;
};

// Chunk `chunk` of this lane's part of a row of `dims`.
template <int WIDTH>
METAL_FUNC RowPart lane_part(int chunk, int lane, int dims) {
    return {(chunk * SIMD_WIDTH + lane) * WIDTH, dims, (chunk + 1) * SIMD_WIDTH * WIDTH <= dims};
}

// Loads the vectors of COUNT keys or values from `first` on. Places outside the range, which is not empty, repeat its
// first or last key: loads without branches overlap. Entries of a list that name no key give zeros. E is the element
// type of vectors.
template <int WIDTH, typename E, typename T, typename V, int COUNT, int CHUNKS>
METAL_FUNC void load_tokens(KeyView<T> view, TokenLoads loads, int first, thread V (&vectors)[COUNT][CHUNKS]) {
    UNROLL
    for (int j = 0; j < COUNT; j++) {
        const int token = clamp(first + j, loads.walk.range.x, loads.walk.range.y - 1);
        int key = token;
        const bool in_second = is_second_entry(loads.walk.list, token);
        if (LISTS != 0) {
            key = listed_key(loads.walk.list, view, token);
            if (key < 0) {
                UNROLL
                for (int c = 0; c < CHUNKS; c++) vectors[j][c] = V(E(0));
                continue;
            }
            if (LISTS_OF_PAGES) key = token;
        }
        const KeyRow<T> row = key_row(view, key, in_second);
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            vectors[j][c] = load_row<WIDTH>(row, lane_part<WIDTH>(c, loads.walk.lane, loads.dims), loads.format);
        }
    }
}

// Zeros the values outside the range: 0 * infinity = NaN.
template <typename E, typename V, int COUNT, int CHUNKS>
METAL_FUNC void zero_tokens_outside(int2 range, int first, thread V (&vectors)[COUNT][CHUNKS]) {
    UNROLL
    for (int j = 0; j < COUNT; j++) {
        const bool is_inside = first + j >= range.x && first + j < range.y;
        UNROLL
        for (int c = 0; c < CHUNKS; c++) vectors[j][c] = is_inside ? vectors[j][c] : V(E(0));
    }
}

// Constants of a step.
template <int WIDTH, int CHUNKS, int ROWS>
struct DecodeStep {
    enum : int {
        // Keys per step, and how many of them are in flight: more would not fit in registers.
        KEYS = SIMD_WIDTH / ROWS,
        KEYS_IN_FLIGHT = CHUNKS == 1 ? 4 : (CHUNKS == 2 ? 2 : 1),
        LOADS = KEYS / KEYS_IN_FLIGHT,
        // Weighted values are added up from zero over a step, or over the keys in flight if a step's sums do not fit
        // in registers: one chain over all keys would be inexact if the values have one sign.
        SUMS_PER_STEP = LOADS > 1 && ROWS * WIDTH * CHUNKS < 32,
    };
};

// The rows of a threadgroup.
struct DecodeTile {
    SequenceHead head;
    RowTile rows;
};

// A lane's part of every row.
template <typename T, int WIDTH, int CHUNKS, int ROWS>
struct DecodeRows {
    vec<T, WIDTH> query[ROWS][CHUNKS];
    vec<float, WIDTH> sums[ROWS][CHUNKS];
};

template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC void load_queries(thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows, device const T* q, DecodeTile tile,
                             int lane, constant AttentionParameters& params) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int place = tile.rows.first_row + min(r, tile.rows.rows - 1);
        RowFacts row;
        row.token = place / params.group;
        row.head = tile.head.kv_head * params.group + place % params.group;
        device const T* from = q + row_offset(row, tile.head.sequence, params.query_strides);
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            rows.query[r][c] = load_vector<T, WIDTH>(from, lane_part<WIDTH>(c, lane, HEAD_DIM));
            rows.sums[r][c] = vec<float, WIDTH>(0.0f);
        }
    }
}

// The dot products of every row with every key in flight: lane l gets that of row l % ROWS and key l / ROWS % KEYS,
// over the dims of its group of KEYS * ROWS lanes. A key's lane sums are exchanged before those of the next are
// computed, so that registers hold one key's at a time.
template <typename T, int WIDTH, int CHUNKS, int ROWS, int KEYS, typename V>
METAL_FUNC float multiply_loaded_keys(thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows,
                                      thread V (&keys)[KEYS][CHUNKS], int lane) {
    float key_sums[KEYS];
    UNROLL
    for (int j = 0; j < KEYS; j++) {
        float dots[ROWS];
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            vec<float, WIDTH> product = vec<float, WIDTH>(rows.query[r][0]) * vec<float, WIDTH>(keys[j][0]);
            UNROLL
            for (int c = 1; c < CHUNKS; c++) {
                product = fma(vec<float, WIDTH>(rows.query[r][c]), vec<float, WIDTH>(keys[j][c]), product);
            }
            float dot_product = 0.0f;
            UNROLL
            for (int i = 0; i < WIDTH; i++) dot_product += product[i];
            dots[r] = dot_product;
        }
        key_sums[j] = SumAcrossLanes<ROWS, 1>::of(dots, lane);
    }
    return SumAcrossLanes<KEYS, ROWS>::of(key_sums, lane);
}

// S = Q @ K^T: the 32 scores of a step, one per lane.
template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC float score_keys(thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows, CacheView<T> keys, int first,
                            KeyWalk walk) {
    const TokenLoads loads = {KEY_FORMAT, HEAD_DIM, walk};
    const int lane = walk.lane;
    const int KEYS_IN_FLIGHT = DecodeStep<WIDTH, CHUNKS, ROWS>::KEYS_IN_FLIGHT;
    const int LOADS = DecodeStep<WIDTH, CHUNKS, ROWS>::LOADS;
    const int DOTS = KEYS_IN_FLIGHT * ROWS;
    float score = 0.0f;
    NO_UNROLL
    for (int n = 0; n < LOADS; n++) {
        const int first_loaded = first + n * KEYS_IN_FLIGHT;
        float sum;
        if (is_native(KEY_FORMAT)) {
            vec<T, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH, T>(keys.native, loads, first_loaded, loaded);
            sum = multiply_loaded_keys<T, WIDTH, CHUNKS, ROWS, KEYS_IN_FLIGHT>(rows, loaded, lane);
        } else {
            vec<float, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH, float>(keys.bytes, loads, first_loaded, loaded);
            sum = multiply_loaded_keys<T, WIDTH, CHUNKS, ROWS, KEYS_IN_FLIGHT>(rows, loaded, lane);
        }
        UNROLL
        for (int bit = DOTS; bit < SIMD_WIDTH; bit *= 2) sum += simd_shuffle_xor(sum, ushort(bit));
        score = lane / DOTS == n ? sum : score;
        // Keeps the compiler from loading the next keys before these are used.
        simdgroup_barrier(mem_flags::mem_none);
    }
    return score;
}

// This lane's score of a step, its key, and what has the key's address.
struct StepScore {
    float score;
    int key;
    int address;
    bool in_second;
};

// The probability of this lane's key, times its value's scale, and the factor that rescales the sums before.
struct StepWeight {
    float probability;
    float factor;
};

// Online softmax over the scores of a step. A lane has row lane % ROWS and key lane / ROWS.
template <int ROWS>
METAL_FUNC StepWeight softmax_step(StepScore step, thread State& state, RowFacts row, ScaleViews scales,
                                   constant AttentionParameters& params, OptionalOperands operands) {
    float score = step.score;
    const int key = step.key;
    const bool in_row = key >= row.start && key < row.end;
    if (has_scales(KEY_FORMAT) && in_row) score *= *key_address(scales.keys, step.address, step.in_second);
    const bool is_visible = in_row && modify_score(score, row, key, true, params, operands);
    float step_max = is_visible ? score : MIN_SCORE;
    UNROLL
    for (int bit = ROWS; bit < SIMD_WIDTH; bit *= 2) step_max = max(step_max, simd_shuffle_xor(step_max, ushort(bit)));
    const float new_max = max(state.max, step_max);
    StepWeight weight;
    weight.factor = score_exp(state.max - new_max);
    weight.probability = is_visible ? score_exp(score - new_max) : 0.0f;
    // Each lane sums its own keys; the lanes of a row come together at the end.
    state.sum = fma(state.sum, weight.factor, weight.probability);
    state.max = new_max;
    if (has_scales(VALUE_FORMAT) && is_visible) {
        weight.probability *= *key_address(scales.values, step.address, step.in_second);
    }
    return weight;
}

// O = factor * O + P @ V over the values in flight, load `n` of the step.
template <typename T, int WIDTH, int CHUNKS, int ROWS, int KEYS, int STEP_ROWS, typename S, typename V>
METAL_FUNC void add_values_of_load(thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows,
                                   thread S (&step_sums)[STEP_ROWS][CHUNKS], thread V (&values)[KEYS][CHUNKS],
                                   StepWeight weight, int n) {
    const bool SUMS_PER_STEP = DecodeStep<WIDTH, CHUNKS, ROWS>::SUMS_PER_STEP;
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        float weights[KEYS];
        UNROLL
        for (int j = 0; j < KEYS; j++) weights[j] = simd_shuffle(weight.probability, ushort((n * KEYS + j) * ROWS + r));
        const float row_factor = SUMS_PER_STEP || n > 0 ? 1.0f : simd_shuffle(weight.factor, ushort(r));
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            vec<float, WIDTH> sum = SUMS_PER_STEP ? step_sums[SUMS_PER_STEP ? r : 0][c] : vec<float, WIDTH>(0.0f);
            UNROLL
            for (int j = 0; j < KEYS; j++)
                sum = fma(vec<float, WIDTH>(weights[j]), vec<float, WIDTH>(values[j][c]), sum);
            if (SUMS_PER_STEP) step_sums[SUMS_PER_STEP ? r : 0][c] = sum;
            else rows.sums[r][c] = fma(rows.sums[r][c], vec<float, WIDTH>(row_factor), sum);
        }
    }
}

// O = factor * O + P @ V over the values of a step.
template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC void add_values(thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows, CacheView<T> values, StepWeight weight,
                           int first, KeyWalk walk) {
    const int KEYS_IN_FLIGHT = DecodeStep<WIDTH, CHUNKS, ROWS>::KEYS_IN_FLIGHT;
    const int LOADS = DecodeStep<WIDTH, CHUNKS, ROWS>::LOADS;
    const bool SUMS_PER_STEP = DecodeStep<WIDTH, CHUNKS, ROWS>::SUMS_PER_STEP;
    const int STEP_ROWS = SUMS_PER_STEP ? ROWS : 1;
    const TokenLoads loads = {VALUE_FORMAT, VALUE_DIM, walk};
    vec<float, WIDTH> step_sums[STEP_ROWS][CHUNKS];
    if (SUMS_PER_STEP) {
        UNROLL
        for (int r = 0; r < STEP_ROWS; r++) {
            UNROLL
            for (int c = 0; c < CHUNKS; c++) step_sums[r][c] = vec<float, WIDTH>(0.0f);
        }
    }
    NO_UNROLL
    for (int n = 0; n < LOADS; n++) {
        const int first_loaded = first + n * KEYS_IN_FLIGHT;
        if (is_native(VALUE_FORMAT)) {
            vec<T, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH, T>(values.native, loads, first_loaded, loaded);
            zero_tokens_outside<T>(walk.range, first_loaded, loaded);
            add_values_of_load<T, WIDTH, CHUNKS, ROWS, KEYS_IN_FLIGHT, STEP_ROWS>(rows, step_sums, loaded, weight, n);
        } else {
            vec<float, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH, float>(values.bytes, loads, first_loaded, loaded);
            zero_tokens_outside<float>(walk.range, first_loaded, loaded);
            add_values_of_load<T, WIDTH, CHUNKS, ROWS, KEYS_IN_FLIGHT, STEP_ROWS>(rows, step_sums, loaded, weight, n);
        }
        simdgroup_barrier(mem_flags::mem_none);
    }
    if (!SUMS_PER_STEP) return;
    UNROLL
    for (int r = 0; r < STEP_ROWS; r++) {
        const float row_factor = simd_shuffle(weight.factor, ushort(r));
        UNROLL
        for (int c = 0; c < CHUNKS; c++)
            rows.sums[r][c] = fma(rows.sums[r][c], vec<float, WIDTH>(row_factor), step_sums[r][c]);
    }
}

// Threadgroup memory: states, factors and sums of every SIMD group, ROWS of each.
struct DecodeShared {
    threadgroup float* maxima;
    threadgroup float* totals;
    threadgroup float* factors;
    threadgroup float* sums;
};

METAL_FUNC DecodeShared decode_shared(threadgroup float* shared, int rows) {
    const int states = SIMD_GROUPS * rows;
    return {shared, shared + states, shared + 2 * states, shared + 3 * states};
}

template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC void store_simdgroup(DecodeShared shared, thread DecodeRows<T, WIDTH, CHUNKS, ROWS>& rows, State state,
                                ThreadPosition at) {
    const int first = at.simdgroup * ROWS;
    if (at.lane < ROWS) {
        shared.maxima[first + at.lane] = state.max;
        shared.totals[first + at.lane] = state.sum;
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            const RowPart part = lane_part<WIDTH>(c, at.lane, VALUE_DIM);
            UNROLL
            for (int i = 0; i < WIDTH; i++) {
                const int dim = part.first + i;
                if (part.is_inside || dim < VALUE_DIM) shared.sums[(first + r) * VALUE_DIM + dim] = rows.sums[r][c][i];
            }
        }
    }
}

// Epilogue: merges the states of row `r` of all SIMD groups, in order; stores the row's state or LSE, and leaves the
// factors of the SIMD groups' sums.
template <int ROWS>
METAL_FUNC void merge_simdgroups(DecodeShared shared, int r, DecodeTile tile, constant AttentionParameters& params,
                                OptionalOperands operands, Outputs outputs) {
    State whole = empty_state();
    for (int s = 0; s < SIMD_GROUPS; s++) {
        State part;
        part.max = shared.maxima[s * ROWS + r];
        part.sum = shared.totals[s * ROWS + r];
        float unused_a, unused_b;
        whole = merge_states(whole, part, unused_a, unused_b);
    }
    float scale = 1.0f;
    const float row_max = whole.max;
    const int row = tile.rows.first_row + r;
    const RowFacts facts = load_row(row, tile.head, params, operands);
    if (PARTIAL) {
        device float* partial = partial_at(outputs, row, tile.rows.split, tile.head, params);
        partial[VALUE_DIM] = whole.max;
        partial[VALUE_DIM + 1] = whole.sum;
    } else {
        whole = finalize_row(whole, facts.head, operands, scale);
        if (LSE) store_lse(outputs, facts, tile.head.sequence, whole, params);
    }
    for (int s = 0; s < SIMD_GROUPS; s++) {
        const bool is_empty = shared.totals[s * ROWS + r] == 0.0f;
        shared.factors[s * ROWS + r] = is_empty ? 0.0f : scale * score_exp(shared.maxima[s * ROWS + r] - row_max);
    }
}

// Adds up the sums of all SIMD groups and stores them: all threads, along rows and dims.
template <typename T, int ROWS>
METAL_FUNC void store_rows(DecodeShared shared, int thread_index, DecodeTile tile, constant AttentionParameters& params,
                           OptionalOperands operands, Outputs outputs) {
    for (int i = thread_index; i < tile.rows.rows * VALUE_DIM; i += SIMD_GROUPS * SIMD_WIDTH) {
        const int r = i / VALUE_DIM;
        const int dim = i % VALUE_DIM;
        float total = 0.0f;
        for (int s = 0; s < SIMD_GROUPS; s++) {
            total = fma(shared.sums[(s * ROWS + r) * VALUE_DIM + dim], shared.factors[s * ROWS + r], total);
        }
        const int row = tile.rows.first_row + r;
        if (PARTIAL) {
            partial_at(outputs, row, tile.rows.split, tile.head, params)[dim] = total;
        } else {
            const RowFacts facts = load_row(row, tile.head, params, operands);
            store_out<T>(outputs, row_offset(facts, tile.head.sequence, params.out_strides) + dim, total);
        }
    }
}

template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC void decode_rows(constant AttentionParameters& params, Inputs<T> inputs, OptionalOperands operands,
                            Outputs outputs, threadgroup float* memory, ThreadPosition at) {
    const int STEP_KEYS = DecodeStep<WIDTH, CHUNKS, ROWS>::KEYS;
    const int lane = at.lane;
    const SequenceHead head = load_sequence_head(at, params, operands);
    const DecodeTile decode_tile = {head, load_row_tile(uint(params.first_block) + at.group.x, head, params, operands)};
    const RowTile tile = decode_tile.rows;
    if (tile.rows <= 0) return;

    // Prologue: the queries, and this lane's row with its keys of the split.
    constant SecondCache& second = params.second;
    const CacheView<T> keys =
        with_second(with_rotary(cache_view(inputs.k, params.key_strides, KEY_FORMAT, head, params, operands),
                                inputs.rotary_k, params.rotary_strides, KEY_FORMAT, head, params, operands),
                    inputs.second_k, second.key_strides, KEY_FORMAT, head, params);
    const CacheView<T> values =
        with_second(cache_view(inputs.v, params.value_strides, VALUE_FORMAT, head, params, operands), inputs.second_v,
                    second.value_strides, VALUE_FORMAT, head, params);
    const ScaleViews scales = with_second(scale_views(head, params, operands), head, params, operands);
    RowFacts row = load_row(tile.first_row + lane % ROWS, head, params, operands);
    if (LISTS == 0) {
        row.start = max(row.start, tile.start);
        row.end = min(row.end, tile.end);
    }
    DecodeRows<T, WIDTH, CHUNKS, ROWS> rows;
    load_queries<T, WIDTH, CHUNKS, ROWS>(rows, inputs.q, decode_tile, lane, params);
    State state = empty_state();

    // Mainloop: every SIMD group takes one step of keys, then the threadgroup's next.
    const int end = tile.start < tile.end ? tile.end : 0;
    const KeyWalk walk = {int2(tile.start, tile.end), lane, key_list(head, params, operands)};
    const int stride = SIMD_GROUPS * STEP_KEYS;
    for (int first = tile.start / stride * stride + at.simdgroup * STEP_KEYS; first < end; first += stride) {
        if (first + STEP_KEYS <= tile.start) continue;
        const int entry = first + lane / ROWS;
        int key = entry;
        if (LISTS != 0)
            key = entry >= tile.start && entry < tile.end ? listed_key(walk.list, keys.bytes, entry) : -1;
        const StepScore step = {score_keys<T, WIDTH, CHUNKS, ROWS>(rows, keys, first, walk), key,
                                LISTS_OF_PAGES ? entry : key, is_second_entry(walk.list, entry)};
        const StepWeight weight = softmax_step<ROWS>(step, state, row, scales, params, operands);
        add_values<T, WIDTH, CHUNKS, ROWS>(rows, values, weight, first, walk);
    }
    UNROLL
    for (int bit = ROWS; bit < SIMD_WIDTH; bit *= 2) state.sum += simd_shuffle_xor(state.sum, ushort(bit));

    // Epilogue: SIMD groups store their states and sums; the threadgroup merges them in order.
    const DecodeShared shared = decode_shared(memory, ROWS);
    store_simdgroup<T, WIDTH, CHUNKS, ROWS>(shared, rows, state, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index < tile.rows) merge_simdgroups<ROWS>(shared, at.index, decode_tile, params, operands, outputs);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store_rows<T, ROWS>(shared, at.index, decode_tile, params, operands, outputs);
}

// The row count is a template argument here and a function constant of the pipeline; specialization removes the other
// cases.
template <typename T, int WIDTH, int CHUNKS, int MAX_ROWS>
[[kernel, max_total_threads_per_threadgroup(256)]] void decode(
    constant AttentionParameters& params [[buffer(0)]], device const T* q [[buffer(1)]],
    device const T* k [[buffer(2)]], device const T* v [[buffer(3)]], device uchar* out [[buffer(4)]],
    device uint* lse [[buffer(5)]], device const uchar* mask [[buffer(6)]], device const float* slopes [[buffer(7)]],
    device const float* sinks [[buffer(8)]], device const int* tree [[buffer(9)]],
    device const int* kv_lens [[buffer(10)]], device const int* cu_seqlens_q [[buffer(11)]],
    device const int* cu_seqlens_k [[buffer(12)]], device const int* block_table [[buffer(13)]],
    device const int* q_offsets [[buffer(14)]], device float* partials [[buffer(15)]],
    device const float* k_scales [[buffer(16)]], device const float* v_scales [[buffer(17)]],
    device const int* key_offsets [[buffer(19)]], device const int* key_indices [[buffer(20)]],
    device const int* key_counts [[buffer(21)]], device const int* page_numbers [[buffer(22)]],
    device const T* second_k [[buffer(23)]], device const T* second_v [[buffer(24)]],
    device const float* second_k_scales [[buffer(25)]], device const float* second_v_scales [[buffer(26)]],
    device const int* second_indices [[buffer(27)]], device const int* second_counts [[buffer(28)]],
    device const T* rotary_k [[buffer(29)]],
    threadgroup float* shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    const OptionalOperands operands = {mask,         slopes,          sinks,           tree,           kv_lens,
                                       cu_seqlens_q, cu_seqlens_k,    block_table,     q_offsets,      k_scales,
                                       v_scales,     mask,            key_offsets,     key_indices,    key_counts,
                                       page_numbers, second_k_scales, second_v_scales, second_indices, second_counts};
    const Outputs outputs = {out, lse, partials};
    const Inputs<T> inputs = {q, k, v, rotary_k, second_k, second_v};
    const ThreadPosition at = {group, int(lane_index), int(simdgroup_index), int(thread_index)};
    const int TWO = MAX_ROWS < 2 ? MAX_ROWS : 2;
    const int FOUR = MAX_ROWS < 4 ? MAX_ROWS : 4;
    if (TILE_ROWS == 1) decode_rows<T, WIDTH, CHUNKS, 1>(params, inputs, operands, outputs, shared, at);
    if (TILE_ROWS == 2) decode_rows<T, WIDTH, CHUNKS, TWO>(params, inputs, operands, outputs, shared, at);
    if (TILE_ROWS == 4) decode_rows<T, WIDTH, CHUNKS, FOUR>(params, inputs, operands, outputs, shared, at);
    if (TILE_ROWS == 8) decode_rows<T, WIDTH, CHUNKS, MAX_ROWS>(params, inputs, operands, outputs, shared, at);
}

#define DECODE(T, WIDTH, CHUNKS, MAX_ROWS)                                 \
    template [[host_name("decode_" #T "_" #WIDTH "x" #CHUNKS)]] [[kernel]] \
    decltype(decode<T, WIDTH, CHUNKS, MAX_ROWS>) decode<T, WIDTH, CHUNKS, MAX_ROWS>;
#define DECODE_TYPE(T) DECODE(T, 2, 1, 8) DECODE(T, 4, 1, 8) DECODE(T, 4, 2, 4) DECODE(T, 4, 5, 1)
DECODE_TYPE(float)
DECODE_TYPE(half)
DECODE_TYPE(bfloat)
