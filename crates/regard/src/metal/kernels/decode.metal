// Few query rows against many keys: decode and speculative verify. Memory-bound, so every key and value is read once for all rows of a
// key/value head, and the lanes of a SIMD group read a row of memory in order.
//
// A lane holds CHUNKS vectors of WIDTH elements of every row: vector c of lane l begins at dim (32 c + l) * WIDTH. A step of a SIMD group
// takes 32 / ROWS keys and so makes 32 scores, one per lane: the partial sums of the dot products of the keys in flight are exchanged by
// halves instead of being reduced one by one, and softcap, biases, masks and exponentials run once per score, on all lanes.
// The SIMD groups of a threadgroup take steps in turn; their states are joined through threadgroup memory at the end.

struct ThreadPosition {
    uint3 group;
    int lane;
    int simdgroup;
    int index;
};

// Sums of COUNT values over groups of COUNT lanes, by exchanging halves: lane l gets its group's sum of value l % COUNT.
template <int COUNT>
struct SumAcrossLanes {
    static METAL_FUNC float of(const thread float* values, int lane) {
        const float low = SumAcrossLanes<COUNT / 2>::of(values, lane);
        const float high = SumAcrossLanes<COUNT / 2>::of(values + COUNT / 2, lane);
        const bool keeps_high = (lane & COUNT / 2) != 0;
        const float kept = keeps_high ? high : low;
        const float given = keeps_high ? low : high;
        return kept + simd_shuffle_xor(given, ushort(COUNT / 2));
    }
};
template <>
struct SumAcrossLanes<1> {
    static METAL_FUNC float of(const thread float* values, int) { return values[0]; }
};

// Loads the vectors of COUNT keys or values from `first` on. Those outside the range are not read: they may be anything.
template <int WIDTH, typename T, typename V, int COUNT, int CHUNKS>
METAL_FUNC void load_tokens(KeyView<T> view, int first, int2 range, int dims, int lane, thread V (&vectors)[COUNT][CHUNKS]) {
    UNROLL
    for (int j = 0; j < COUNT; j++) {
        const int token = first + j;
        UNROLL
        for (int c = 0; c < CHUNKS; c++) vectors[j][c] = V(T(0));
        if (token >= range.x && token < range.y) {
            device const T* row = key_address(view, token);
            UNROLL
            for (int c = 0; c < CHUNKS; c++) vectors[j][c] = load_vector<T, WIDTH>(row, (c * SIMD_WIDTH + lane) * WIDTH, dims);
        }
    }
}

template <typename T, int WIDTH, int CHUNKS, int ROWS>
METAL_FUNC void decode_rows(constant AttentionParameters& params, device const T* q, device const T* k, device const T* v,
                        OptionalOperands operands, Outputs outputs, threadgroup float* shared, ThreadPosition at) {
    typedef vec<float, WIDTH> Vector;
    // Keys per step, and how many of them are in flight: more would not fit in registers.
    const int STEP_KEYS = SIMD_WIDTH / ROWS;
    const int KEYS_IN_FLIGHT = CHUNKS == 1 ? 4 : (CHUNKS == 2 ? 2 : 1);
    const int LOADS = STEP_KEYS / KEYS_IN_FLIGHT;
    // Weighted values are added up from zero over a step, or over the keys in flight if a step's sums do not fit in registers: one chain
    // over all keys would be inexact if the values have one sign.
    const bool SUMS_PER_STEP = LOADS > 1 && ROWS * WIDTH * CHUNKS < 32;
    const int lane = at.lane;
    const int kv_head = int(at.group.y);
    const Sequence sequence = load_sequence(int(at.group.z), params, operands);
    const RowBlock block = load_row_block(at.group.x, sequence, params);
    if (block.rows <= 0) return;

    const KeyView<T> keys = key_view(k, params.k_batch_stride, params.k_token_stride, params.k_head_stride, kv_head, sequence, params, operands);
    const KeyView<T> values = key_view(v, params.v_batch_stride, params.v_token_stride, params.v_head_stride, kv_head, sequence, params, operands);
    // This lane's score of every step: row lane % ROWS, key lane / ROWS.
    const RowFacts row = load_row(block.first_row + lane % ROWS, kv_head, sequence, params, operands);

    vec<T, WIDTH> query[ROWS][CHUNKS];
    Vector sums[ROWS][CHUNKS];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        const int place = block.first_row + min(r, block.rows - 1);
        device const T* from = q + (long(sequence.index) * params.q_batch_stride +
                                    (long(sequence.q_start) + long(place / params.group)) * params.q_token_stride +
                                    long(kv_head * params.group + place % params.group) * params.q_head_stride);
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            query[r][c] = load_vector<T, WIDTH>(from, (c * SIMD_WIDTH + lane) * WIDTH, HEAD_DIM);
            sums[r][c] = vec<float, WIDTH>(0.0f);
        }
    }

    State state = empty_state();
    const int2 range = int2(block.start, block.end);
    const int stride = SIMD_GROUPS * STEP_KEYS;
    for (int first = block.start / stride * stride + at.simdgroup * STEP_KEYS; first < block.end; first += stride) {
        if (first + STEP_KEYS <= block.start) continue;
        float score = 0.0f;
        NO_UNROLL
        for (int n = 0; n < LOADS; n++) {
            vec<T, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH>(keys, first + n * KEYS_IN_FLIGHT, range, HEAD_DIM, lane, loaded);
            float dots[KEYS_IN_FLIGHT * ROWS];
            UNROLL
            for (int j = 0; j < KEYS_IN_FLIGHT; j++) {
                UNROLL
                for (int r = 0; r < ROWS; r++) {
                    Vector product = vec<float, WIDTH>(query[r][0]) * vec<float, WIDTH>(loaded[j][0]);
                    UNROLL
                    for (int c = 1; c < CHUNKS; c++) product = fma(vec<float, WIDTH>(query[r][c]), vec<float, WIDTH>(loaded[j][c]), product);
                    float dot_product = 0.0f;
                    UNROLL
                    for (int i = 0; i < WIDTH; i++) dot_product += product[i];
                    dots[j * ROWS + r] = dot_product;
                }
            }
            float sum = SumAcrossLanes<KEYS_IN_FLIGHT * ROWS>::of(dots, lane);
            UNROLL
            for (int bit = KEYS_IN_FLIGHT * ROWS; bit < SIMD_WIDTH; bit *= 2) sum += simd_shuffle_xor(sum, ushort(bit));
            score = lane / (KEYS_IN_FLIGHT * ROWS) == n ? sum : score;
            // Keeps the compiler from loading the next keys before these are used.
            simdgroup_barrier(mem_flags::mem_none);
        }

        // softmax_step
        const int key = first + lane / ROWS;
        const bool in_row = key >= max(row.start, block.start) && key < min(row.end, block.end);
        const bool is_visible = in_row && finish_score(score, row, key, sequence, params, operands);
        float step_max = is_visible ? score : MIN_SCORE;
        UNROLL
        for (int bit = ROWS; bit < SIMD_WIDTH; bit *= 2) step_max = max(step_max, simd_shuffle_xor(step_max, ushort(bit)));
        const float new_max = max(state.max, step_max);
        const float factor = score_exp(state.max - new_max);
        const float probability = is_visible ? score_exp(score - new_max) : 0.0f;
        // Each lane sums its own keys; the lanes of a row come together at the end.
        state.sum = fma(state.sum, factor, probability);
        state.max = new_max;

        Vector step_sums[SUMS_PER_STEP ? ROWS : 1][CHUNKS];
        if (SUMS_PER_STEP) {
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                UNROLL
                for (int c = 0; c < CHUNKS; c++) step_sums[SUMS_PER_STEP ? r : 0][c] = vec<float, WIDTH>(0.0f);
            }
        }
        NO_UNROLL
        for (int n = 0; n < LOADS; n++) {
            vec<T, WIDTH> loaded[KEYS_IN_FLIGHT][CHUNKS];
            load_tokens<WIDTH>(values, first + n * KEYS_IN_FLIGHT, range, VALUE_DIM, lane, loaded);
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                float weights[KEYS_IN_FLIGHT];
                UNROLL
                for (int j = 0; j < KEYS_IN_FLIGHT; j++) {
                    weights[j] = simd_shuffle(probability, ushort((n * KEYS_IN_FLIGHT + j) * ROWS + r));
                }
                const float row_factor = SUMS_PER_STEP || n > 0 ? 1.0f : simd_shuffle(factor, ushort(r));
                UNROLL
                for (int c = 0; c < CHUNKS; c++) {
                    Vector sum = SUMS_PER_STEP ? step_sums[SUMS_PER_STEP ? r : 0][c] : vec<float, WIDTH>(0.0f);
                    UNROLL
                    for (int j = 0; j < KEYS_IN_FLIGHT; j++) sum = fma(vec<float, WIDTH>(weights[j]), vec<float, WIDTH>(loaded[j][c]), sum);
                    if (SUMS_PER_STEP) step_sums[SUMS_PER_STEP ? r : 0][c] = sum;
                    else sums[r][c] = fma(sums[r][c], vec<float, WIDTH>(row_factor), sum);
                }
            }
            simdgroup_barrier(mem_flags::mem_none);
        }
        if (SUMS_PER_STEP) {
            UNROLL
            for (int r = 0; r < ROWS; r++) {
                const float row_factor = simd_shuffle(factor, ushort(r));
                UNROLL
                for (int c = 0; c < CHUNKS; c++) {
                    sums[r][c] = fma(sums[r][c], vec<float, WIDTH>(row_factor), step_sums[SUMS_PER_STEP ? r : 0][c]);
                }
            }
        }
    }
    UNROLL
    for (int bit = ROWS; bit < SIMD_WIDTH; bit *= 2) state.sum += simd_shuffle_xor(state.sum, ushort(bit));

    // SIMD groups store their states and sums; the threadgroup joins them in order.
    threadgroup float* maxima = shared;
    threadgroup float* totals = maxima + SIMD_GROUPS * ROWS;
    threadgroup float* factors = totals + SIMD_GROUPS * ROWS;
    threadgroup float* stored = factors + SIMD_GROUPS * ROWS;
    if (lane < ROWS) {
        maxima[at.simdgroup * ROWS + lane] = state.max;
        totals[at.simdgroup * ROWS + lane] = state.sum;
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            UNROLL
            for (int i = 0; i < WIDTH; i++) {
                const int dim = (c * SIMD_WIDTH + lane) * WIDTH + i;
                if (dim < VALUE_DIM) stored[(at.simdgroup * ROWS + r) * VALUE_DIM + dim] = sums[r][c][i];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index < block.rows) {
        const int r = at.index;
        State whole = empty_state();
        for (int s = 0; s < SIMD_GROUPS; s++) {
            State part;
            part.max = maxima[s * ROWS + r];
            part.sum = totals[s * ROWS + r];
            float unused_a, unused_b;
            whole = join(whole, part, unused_a, unused_b);
        }
        float scale = 1.0f;
        const float row_max = whole.max;
        const RowFacts facts = load_row(block.first_row + r, kv_head, sequence, params, operands);
        if (PARTIAL) {
            device float* partial = partial_at(outputs, block.first_row + r, block.split, kv_head, sequence, params);
            partial[VALUE_DIM] = whole.max;
            partial[VALUE_DIM + 1] = whole.sum;
        } else {
            whole = finish_row(whole, facts.head, operands, scale);
            if (LSE) write_lse(outputs, facts, sequence, whole, params);
        }
        for (int s = 0; s < SIMD_GROUPS; s++) {
            const bool is_empty = totals[s * ROWS + r] == 0.0f;
            factors[s * ROWS + r] = is_empty ? 0.0f : scale * score_exp(maxima[s * ROWS + r] - row_max);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = at.index; i < block.rows * VALUE_DIM; i += SIMD_GROUPS * SIMD_WIDTH) {
        const int r = i / VALUE_DIM;
        const int dim = i % VALUE_DIM;
        float total = 0.0f;
        for (int s = 0; s < SIMD_GROUPS; s++) {
            total = fma(stored[(s * ROWS + r) * VALUE_DIM + dim], factors[s * ROWS + r], total);
        }
        if (PARTIAL) {
            partial_at(outputs, block.first_row + r, block.split, kv_head, sequence, params)[dim] = total;
        } else {
            const RowFacts facts = load_row(block.first_row + r, kv_head, sequence, params, operands);
            const long first = output_row(facts, sequence, params.out_batch_stride, params.out_token_stride, params.out_head_stride);
            write_out<T>(outputs, first + dim, total);
        }
    }
}

// Rows are a template argument of the work and a function constant of the pipeline; the other cases vanish when it is specialised.
template <typename T, int WIDTH, int CHUNKS, int MAX_ROWS>
[[kernel, max_total_threads_per_threadgroup(256)]] void decode(
    constant AttentionParameters& params [[buffer(0)]], device const T* q [[buffer(1)]], device const T* k [[buffer(2)]],
    device const T* v [[buffer(3)]], device uchar* out [[buffer(4)]], device uint* lse [[buffer(5)]], device const uchar* mask [[buffer(6)]],
    device const float* slopes [[buffer(7)]], device const float* sinks [[buffer(8)]], device const int* tree [[buffer(9)]],
    device const int* kv_lens [[buffer(10)]], device const int* cu_seqlens_q [[buffer(11)]], device const int* cu_seqlens_k [[buffer(12)]],
    device const int* block_table [[buffer(13)]], device const int* q_offsets [[buffer(14)]], device float* partials [[buffer(15)]],
    threadgroup float* shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    const OptionalOperands operands = {mask, slopes, sinks, tree, kv_lens, cu_seqlens_q, cu_seqlens_k, block_table, q_offsets};
    const Outputs outputs = {out, lse, partials};
    const ThreadPosition at = {group, int(lane_index), int(simdgroup_index), int(thread_index)};
    const int TWO = MAX_ROWS < 2 ? MAX_ROWS : 2;
    const int FOUR = MAX_ROWS < 4 ? MAX_ROWS : 4;
    if (BLOCK_ROWS == 1) decode_rows<T, WIDTH, CHUNKS, 1>(params, q, k, v, operands, outputs, shared, at);
    if (BLOCK_ROWS == 2) decode_rows<T, WIDTH, CHUNKS, TWO>(params, q, k, v, operands, outputs, shared, at);
    if (BLOCK_ROWS == 4) decode_rows<T, WIDTH, CHUNKS, FOUR>(params, q, k, v, operands, outputs, shared, at);
    if (BLOCK_ROWS == 8) decode_rows<T, WIDTH, CHUNKS, MAX_ROWS>(params, q, k, v, operands, outputs, shared, at);
}

#define DECODE(T, WIDTH, CHUNKS, MAX_ROWS)                                 \
    template [[host_name("decode_" #T "_" #WIDTH "x" #CHUNKS)]] [[kernel]] \
    decltype(decode<T, WIDTH, CHUNKS, MAX_ROWS>) decode<T, WIDTH, CHUNKS, MAX_ROWS>;
#define DECODE_TYPE(T) DECODE(T, 2, 1, 8) DECODE(T, 4, 1, 8) DECODE(T, 4, 2, 4) DECODE(T, 4, 5, 1)
DECODE_TYPE(float)
DECODE_TYPE(half)
DECODE_TYPE(bfloat)
