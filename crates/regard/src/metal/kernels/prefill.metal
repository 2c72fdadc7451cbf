// Many query rows: both products on 8 x 8 matrices (simdgroup_matrix), accumulated in f32.
//
// A SIMD group owns 8 rows, or, where the head dim is wide, PARTS SIMD groups share 8 rows, each with its part of the dims: it holds that part of
// the queries and of the output in registers (2 * 2 * MATRICES values a lane, the same for every class of head dims). A tile of keys, then of values, is copied into
// threadgroup memory once for all SIMD groups; there pages, tails and dims end, unseen slots become zeros, and the products see
// whole matrices only. Scores go from the first product to the second in registers. Where dims are in parts, each SIMD group has
// a part of every dot product; the parts are added, in order, through threadgroup memory.
//
// Tiles begin at multiples of TILE_KEYS from key 0 and rows never mix, so a row's bits do not depend on its neighbours.

// Where a lane's two elements of an 8 x 8 matrix are: the order of the hardware.
inline int matrix_row_of(int lane) { return (lane / 4 & 4) + (lane / 2) % 4; }
inline int matrix_column_of(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

// Elements of a staged row: 16 bytes more than the dims, so that rows start in different banks.
template <typename T>
inline int staged_stride(int dims) {
    return dims + 16 / int(sizeof(T));
}

// Copies keys first..first + TILE_KEYS into threadgroup memory, zeros for those outside start..end and for dims past the last.
template <typename T>
inline void stage(threadgroup T* staged, Keys<T> keys, int first, int2 range, int dims, int padded_dims, int thread_index, int threads) {
    const int pieces = padded_dims / 4;
    for (int i = thread_index; i < TILE_KEYS * pieces; i += threads) {
        const int j = i / pieces;
        const int dim = i % pieces * 4;
        const int key = first + j;
        vec<T, 4> elements = vec<T, 4>(T(0));
        if (key >= range.x && key < range.y) elements = load_4(key_address(keys, key), dim, dims);
        UNROLL
        for (int e = 0; e < 4; e++) staged[j * staged_stride<T>(padded_dims) + dim + e] = elements[e];
    }
}

template <typename T, int MATRICES, int PARTS>
[[kernel]] void prefill(constant AttentionCall& call [[buffer(0)]], device const T* q [[buffer(1)]],
                        device const T* k [[buffer(2)]], device const T* v [[buffer(3)]], device uchar* out [[buffer(4)]],
                        device uint* lse [[buffer(5)]], device const uchar* mask [[buffer(6)]],
                        device const float* slopes [[buffer(7)]], device const float* sinks [[buffer(8)]],
                        device const int* tree [[buffer(9)]], device const int* kv_lens [[buffer(10)]],
                        device const int* cu_seqlens_q [[buffer(11)]], device const int* cu_seqlens_k [[buffer(12)]],
                        device const int* block_table [[buffer(13)]], device const int* q_offsets [[buffer(14)]],
                        device float* partials [[buffer(15)]], threadgroup uchar* shared [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]],
                        uint simdgroup_index [[simdgroup_index_in_threadgroup]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
    // Columns of score matrices a tile, at most.
    const int MOST_COLUMNS = 4;
    // Matrices of 8 dims that a dot product adds up from zero.
    const int RUN_MATRICES = 4;
    const int lane = int(lane_index);
    const int simdgroup = int(simdgroup_index);
    const int threads = SIMD_GROUPS * SIMD_WIDTH;
    const Extras extras = {mask, slopes, sinks, tree, kv_lens, cu_seqlens_q, cu_seqlens_k, block_table, q_offsets};
    const Outputs outputs = {out, lse, partials};
    const int kv_head = int(group.y);
    const Sequence sequence = sequence_at(int(group.z), call, extras);
    const Work work = work_at(group.x, sequence, call);
    if (work.rows <= 0) return;

    const Keys<T> keys = keys_of(k, call.k_batch_stride, call.k_token_stride, call.k_head_stride, kv_head, sequence, call, extras);
    const Keys<T> values = keys_of(v, call.v_batch_stride, call.v_token_stride, call.v_head_stride, kv_head, sequence, call, extras);
    // Matrices of 8 dims that a part has, and all parts' dims together.
    const int key_matrices = (HEAD_DIM + 8 * PARTS - 1) / (8 * PARTS);
    const int value_matrices = (VALUE_DIM + 8 * PARTS - 1) / (8 * PARTS);
    const int key_dims = key_matrices * 8 * PARTS;
    const int value_dims = value_matrices * 8 * PARTS;
    const int columns = TILE_KEYS / 8;
    const int part = simdgroup % PARTS;
    const int first_key_dim = part * key_matrices * 8;
    const int first_value_dim = part * value_matrices * 8;

    threadgroup T* staged = (threadgroup T*)shared;
    threadgroup float* exchanged =
        (threadgroup float*)(shared + TILE_KEYS * staged_stride<T>(max(key_dims, value_dims)) * int(sizeof(T)));

    // This lane's row, and its two columns of every matrix.
    const int group_row = simdgroup / PARTS * 8;
    const int own_row = group_row + matrix_row_of(lane);
    const int column = matrix_column_of(lane);
    const Row row = row_at(work.first_row + own_row, kv_head, sequence, call, extras);
    const bool real = own_row < work.rows;
    // Keys that some row of the SIMD group sees.
    int2 seen = int2(0, 0);
    if (group_row < work.rows) {
        const int last = min(group_row + 7, work.rows - 1);
        seen.x = visible(sequence.position + (work.first_row + group_row) / call.group, sequence, call).x;
        seen.y = visible(sequence.position + (work.first_row + last) / call.group, sequence, call).y;
    }

    simdgroup_matrix<T, 8, 8> query[MATRICES];
    simdgroup_float8x8 sums[MATRICES];
    simdgroup_float8x8 folded[MATRICES];
    device const T* query_row = q + output_row(row, sequence, call.q_batch_stride, call.q_token_stride, call.q_head_stride);
    UNROLL
    for (int m = 0; m < key_matrices; m++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int dim = first_key_dim + m * 8 + column + i;
            query[m].thread_elements()[i] = real && dim < HEAD_DIM ? query_row[dim] : T(0);
        }
    }
    UNROLL
    for (int m = 0; m < value_matrices; m++) {
        sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        folded[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    State state = empty_state();
    State folded_state = empty_state();

    for (int first = work.start / TILE_KEYS * TILE_KEYS; first < work.end; first += TILE_KEYS) {
        const bool begins_split = FOLDS && long(first) % call.split_keys == 0;
        if (begins_split) {
            // What the last split left joins the earlier ones, as `merge` would do it.
            float sum = state.sum;
            sum += simd_shuffle_xor(sum, 1);
            sum += simd_shuffle_xor(sum, 8);
            state.sum = sum;
            float factor_a, factor_b;
            folded_state = join(folded_state, state, factor_a, factor_b);
            UNROLL
            for (int m = 0; m < value_matrices; m++) {
                UNROLL
                for (int i = 0; i < 2; i++) {
                    folded[m].thread_elements()[i] =
                        fma(sums[m].thread_elements()[i], factor_b, folded[m].thread_elements()[i] * factor_a);
                }
                sums[m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            }
            state = empty_state();
        }
        const int2 range = int2(work.start, work.end);
        const bool meets = first < seen.y && first + TILE_KEYS > seen.x;
        stage(staged, keys, first, range, HEAD_DIM, key_dims, int(thread_index), threads);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        simdgroup_float8x8 scores[MOST_COLUMNS];
        if (meets) {
            UNROLL
            for (int j = 0; j < columns; j++) {
                scores[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                // In runs: one chain over all dims would stray where all products have one sign.
                simdgroup_float8x8 run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                UNROLL
                for (int m = 0; m < key_matrices; m++) {
                    simdgroup_matrix<T, 8, 8> key;
                    simdgroup_load(key, staged + j * 8 * staged_stride<T>(key_dims) + first_key_dim + m * 8,
                                   ulong(staged_stride<T>(key_dims)), ulong2(0, 0), true);
                    simdgroup_multiply_accumulate(run, query[m], key, run);
                    if (m % RUN_MATRICES != RUN_MATRICES - 1 && m != key_matrices - 1) continue;
                    UNROLL
                    for (int i = 0; i < 2; i++) scores[j].thread_elements()[i] += run.thread_elements()[i];
                    run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                }
            }
            if (PARTS > 1) {
                UNROLL
                for (int j = 0; j < columns; j++) {
                    UNROLL
                    for (int i = 0; i < 2; i++) {
                        exchanged[(simdgroup * 8 + matrix_row_of(lane)) * TILE_KEYS + j * 8 + column + i] =
                            scores[j].thread_elements()[i];
                    }
                }
            }
        }
        // All have read the keys, and all parts are there.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        stage(staged, values, first, range, VALUE_DIM, value_dims, int(thread_index), threads);
        float factor = 1.0f;
        if (meets) {
            float tile_max = LOWEST;
            bool kept[MOST_COLUMNS * 2];
            UNROLL
            for (int j = 0; j < columns; j++) {
                UNROLL
                for (int i = 0; i < 2; i++) {
                    float score = scores[j].thread_elements()[i];
                    if (PARTS > 1) {
                        score = 0.0f;
                        UNROLL
                        for (int p = 0; p < PARTS; p++) {
                            const int other = simdgroup - part + p;
                            score += exchanged[(other * 8 + matrix_row_of(lane)) * TILE_KEYS + j * 8 + column + i];
                        }
                    }
                    const int key = first + j * 8 + column + i;
                    const bool in_split = key >= work.start && key < work.end;
                    kept[j * 2 + i] = in_split && score_key(score, row, key, sequence, call, extras);
                    scores[j].thread_elements()[i] = score;
                    if (kept[j * 2 + i]) tile_max = max(tile_max, score);
                }
            }
            // The four lanes of a row.
            tile_max = max(tile_max, simd_shuffle_xor(tile_max, 1));
            tile_max = max(tile_max, simd_shuffle_xor(tile_max, 8));
            const float new_max = max(state.max, tile_max);
            factor = power(state.max - new_max);
            state.max = new_max;
            state.sum *= factor;
            UNROLL
            for (int j = 0; j < columns; j++) {
                UNROLL
                for (int i = 0; i < 2; i++) {
                    const float score = scores[j].thread_elements()[i];
                    const float probability = kept[j * 2 + i] ? power(score - new_max) : 0.0f;
                    scores[j].thread_elements()[i] = probability;
                    state.sum += probability;
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (meets) {
            UNROLL
            for (int m = 0; m < value_matrices; m++) {
                // A tile's values are a run of the sum over all keys.
                simdgroup_float8x8 run = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                UNROLL
                for (int j = 0; j < columns; j++) {
                    simdgroup_matrix<T, 8, 8> value;
                    simdgroup_load(value, staged + j * 8 * staged_stride<T>(value_dims) + first_value_dim + m * 8,
                                   ulong(staged_stride<T>(value_dims)));
                    simdgroup_multiply_accumulate(run, scores[j], value, run);
                }
                UNROLL
                for (int i = 0; i < 2; i++) {
                    sums[m].thread_elements()[i] = fma(sums[m].thread_elements()[i], factor, run.thread_elements()[i]);
                }
            }
        }
        // The next tile's keys go where these values are.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    state.sum += simd_shuffle_xor(state.sum, 1);
    state.sum += simd_shuffle_xor(state.sum, 8);
    if (FOLDS) {
        float factor_a, factor_b;
        state = join(folded_state, state, factor_a, factor_b);
        UNROLL
        for (int m = 0; m < value_matrices; m++) {
            UNROLL
            for (int i = 0; i < 2; i++) {
                sums[m].thread_elements()[i] =
                    fma(sums[m].thread_elements()[i], factor_b, folded[m].thread_elements()[i] * factor_a);
            }
        }
    }
    if (!real) return;
    float scale = 1.0f;
    device float* partial = outputs.partials;
    // One of the lanes of a row and of the parts writes what is one a row.
    const bool writes_state = part == 0 && column == 0;
    if (PARTIAL) {
        partial = partial_at(outputs, work.first_row + own_row, work.split, kv_head, sequence, call);
        if (writes_state) {
            partial[VALUE_DIM] = state.max;
            partial[VALUE_DIM + 1] = state.sum;
        }
    } else {
        state = finish(state, row.head, extras, scale);
        if (LSE && writes_state) write_lse(outputs, row, sequence, state, call);
    }
    const long at = output_row(row, sequence, call.out_batch_stride, call.out_token_stride, call.out_head_stride);
    UNROLL
    for (int m = 0; m < value_matrices; m++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int dim = first_value_dim + m * 8 + column + i;
            if (dim >= VALUE_DIM) continue;
            const float sum = sums[m].thread_elements()[i] * scale;
            if (PARTIAL) partial[dim] = sum;
            else write_out<T>(outputs, at + dim, sum);
        }
    }
}

#define PREFILL(T, MATRICES, PARTS)                                           \
    template [[host_name("prefill_" #T "_" #MATRICES "x" #PARTS)]] [[kernel]] \
    decltype(prefill<T, MATRICES, PARTS>) prefill<T, MATRICES, PARTS>;
#define PREFILL_TYPE(T) PREFILL(T, 8, 1) PREFILL(T, 16, 1) PREFILL(T, 16, 2) PREFILL(T, 18, 4)
PREFILL_TYPE(float)
PREFILL_TYPE(half)
PREFILL_TYPE(bfloat)
