// Few query rows against many keys: decoding and verifying. Memory sets the pace, so every key and value is read once for all rows
// of a key/value head, by whole SIMD groups, a row of memory at a time.
//
// A lane holds CHUNKS pieces of WIDTH elements of every row: piece c of lane l begins at dim (32 c + l) * WIDTH, so that the lanes
// together read a key in order. In one step a SIMD group takes 32 / BLOCK_ROWS keys and so makes 32 scores, one for each lane:
// partial sums of all 32 dot products are exchanged by halves (16 + 8 + 4 + 2 + 1 shuffles in place of 32 * 5), and everything
// between the two products (softcap, biases, masks, powers) runs once for each score, on all lanes.
// Steps go round the SIMD groups of the threadgroup; their states are joined through threadgroup memory at the end.

template <typename T, int WIDTH, int CHUNKS, int ROWS>
[[kernel]] void decode(constant AttentionCall& call [[buffer(0)]], device const T* q [[buffer(1)]],
                       device const T* k [[buffer(2)]], device const T* v [[buffer(3)]], device uchar* out [[buffer(4)]],
                       device uint* lse [[buffer(5)]], device const uchar* mask [[buffer(6)]],
                       device const float* slopes [[buffer(7)]], device const float* sinks [[buffer(8)]],
                       device const int* tree [[buffer(9)]], device const int* kv_lens [[buffer(10)]],
                       device const int* cu_seqlens_q [[buffer(11)]], device const int* cu_seqlens_k [[buffer(12)]],
                       device const int* block_table [[buffer(13)]], device const int* q_offsets [[buffer(14)]],
                       device float* partials [[buffer(15)]], threadgroup float* shared [[threadgroup(0)]],
                       uint3 group [[threadgroup_position_in_grid]], uint lane_index [[thread_index_in_simdgroup]],
                       uint simdgroup_index [[simdgroup_index_in_threadgroup]],
                       uint thread_index [[thread_index_in_threadgroup]]) {
    typedef vec<float, WIDTH> Piece;
    const int lane = int(lane_index);
    const int simdgroup = int(simdgroup_index);
    const Extras extras = {mask, slopes, sinks, tree, kv_lens, cu_seqlens_q, cu_seqlens_k, block_table, q_offsets};
    const Outputs outputs = {out, lse, partials};
    const int kv_head = int(group.y);
    const Sequence sequence = sequence_at(int(group.z), call, extras);
    const Work work = work_at(group.x, sequence, call);
    if (work.rows <= 0) return;

    const Keys<T> keys = keys_of(k, call.k_batch_stride, call.k_token_stride, call.k_head_stride, kv_head, sequence, call, extras);
    const Keys<T> values = keys_of(v, call.v_batch_stride, call.v_token_stride, call.v_head_stride, kv_head, sequence, call, extras);
    const int step_keys = SIMD_WIDTH / BLOCK_ROWS;
    // This lane's score of every step: row lane % BLOCK_ROWS, key lane / BLOCK_ROWS.
    const int own_row = lane % BLOCK_ROWS;
    const Row row = row_at(work.first_row + own_row, kv_head, sequence, call, extras);

    Piece query[ROWS][CHUNKS];
    Piece sums[ROWS][CHUNKS];
    UNROLL
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const int place = work.first_row + min(r, work.rows - 1);
        device const T* from = q + (long(sequence.index) * call.q_batch_stride +
                                    (long(sequence.q_start) + long(place / call.group)) * call.q_token_stride +
                                    long(kv_head * call.group + place % call.group) * call.q_head_stride);
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            load(from, (c * SIMD_WIDTH + lane) * WIDTH, HEAD_DIM, query[r][c]);
            sums[r][c] = Piece(0.0f);
        }
    }

    State state = empty_state();
    const int stride = SIMD_GROUPS * step_keys;
    for (int first = work.start / stride * stride + simdgroup * step_keys; first < work.end; first += stride) {
        if (first + step_keys <= work.start) continue;
        float dots[SIMD_WIDTH];
        UNROLL
        for (int j = 0; j < step_keys; j++) {
            const int key = first + j;
            // What no row of the block sees is not read: it may be anything.
            const bool seen = key >= work.start && key < work.end;
            Piece key_piece[CHUNKS];
            UNROLL
            for (int c = 0; c < CHUNKS; c++) {
                key_piece[c] = Piece(0.0f);
                if (seen) load(key_address(keys, key), (c * SIMD_WIDTH + lane) * WIDTH, HEAD_DIM, key_piece[c]);
            }
            UNROLL
            for (int r = 0; r < BLOCK_ROWS; r++) {
                Piece product = query[r][0] * key_piece[0];
                UNROLL
                for (int c = 1; c < CHUNKS; c++) product = fma(query[r][c], key_piece[c], product);
                float dot_product = 0.0f;
                UNROLL
                for (int i = 0; i < WIDTH; i++) dot_product += product[i];
                dots[j * BLOCK_ROWS + r] = dot_product;
            }
        }
        // Lanes with and without the bit keep one half each of what is left, and give each other the other half.
        UNROLL
        for (int bit = SIMD_WIDTH / 2; bit > 0; bit /= 2) {
            const bool upper = (lane & bit) != 0;
            UNROLL
            for (int i = 0; i < bit; i++) {
                const float mine = upper ? dots[i + bit] : dots[i];
                const float other = upper ? dots[i] : dots[i + bit];
                dots[i] = mine + simd_shuffle_xor(other, ushort(bit));
            }
        }
        float score = dots[0];
        const int key = first + lane / BLOCK_ROWS;
        const bool seen = key >= work.start && key < work.end && score_key(score, row, key, sequence, call, extras);
        float step_max = seen ? score : LOWEST;
        UNROLL
        for (int bit = BLOCK_ROWS; bit < SIMD_WIDTH; bit *= 2) step_max = max(step_max, simd_shuffle_xor(step_max, ushort(bit)));
        const float new_max = max(state.max, step_max);
        const float factor = power(state.max - new_max);
        const float probability = seen ? power(score - new_max) : 0.0f;
        // Each lane sums its own keys; the lanes of a row come together at the end.
        state.sum = fma(state.sum, factor, probability);
        state.max = new_max;

        // The step's values are added up from zero: one chain over all keys would stray where values have one sign.
        Piece step_sums[ROWS][CHUNKS];
        UNROLL
        for (int r = 0; r < BLOCK_ROWS; r++) {
            UNROLL
            for (int c = 0; c < CHUNKS; c++) step_sums[r][c] = Piece(0.0f);
        }
        UNROLL
        for (int j = 0; j < step_keys; j++) {
            const int value = first + j;
            const bool read = value >= work.start && value < work.end;
            Piece value_piece[CHUNKS];
            UNROLL
            for (int c = 0; c < CHUNKS; c++) {
                value_piece[c] = Piece(0.0f);
                if (read) load(key_address(values, value), (c * SIMD_WIDTH + lane) * WIDTH, VALUE_DIM, value_piece[c]);
            }
            UNROLL
            for (int r = 0; r < BLOCK_ROWS; r++) {
                const float weight = simd_shuffle(probability, ushort(j * BLOCK_ROWS + r));
                UNROLL
                for (int c = 0; c < CHUNKS; c++) step_sums[r][c] = fma(Piece(weight), value_piece[c], step_sums[r][c]);
            }
        }
        UNROLL
        for (int r = 0; r < BLOCK_ROWS; r++) {
            const float row_factor = simd_shuffle(factor, ushort(r));
            UNROLL
            for (int c = 0; c < CHUNKS; c++) sums[r][c] = fma(sums[r][c], Piece(row_factor), step_sums[r][c]);
        }
    }
    UNROLL
    for (int bit = BLOCK_ROWS; bit < SIMD_WIDTH; bit *= 2) state.sum += simd_shuffle_xor(state.sum, ushort(bit));

    // SIMD groups leave their states and sums; the threadgroup joins them in order.
    threadgroup float* maxima = shared;
    threadgroup float* totals = maxima + SIMD_GROUPS * BLOCK_ROWS;
    threadgroup float* factors = totals + SIMD_GROUPS * BLOCK_ROWS;
    threadgroup float* stored = factors + SIMD_GROUPS * BLOCK_ROWS;
    if (lane < BLOCK_ROWS) {
        maxima[simdgroup * BLOCK_ROWS + lane] = state.max;
        totals[simdgroup * BLOCK_ROWS + lane] = state.sum;
    }
    UNROLL
    for (int r = 0; r < BLOCK_ROWS; r++) {
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            UNROLL
            for (int i = 0; i < WIDTH; i++) {
                const int dim = (c * SIMD_WIDTH + lane) * WIDTH + i;
                if (dim < VALUE_DIM) stored[(simdgroup * BLOCK_ROWS + r) * VALUE_DIM + dim] = sums[r][c][i];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (int(thread_index) < work.rows) {
        const int r = int(thread_index);
        State whole = empty_state();
        for (int s = 0; s < SIMD_GROUPS; s++) {
            State part;
            part.max = maxima[s * BLOCK_ROWS + r];
            part.sum = totals[s * BLOCK_ROWS + r];
            float unused_a, unused_b;
            whole = join(whole, part, unused_a, unused_b);
        }
        float scale = 1.0f;
        const float largest = whole.max;
        const Row it = row_at(work.first_row + r, kv_head, sequence, call, extras);
        if (PARTIAL) {
            device float* partial = partial_at(outputs, work.first_row + r, work.split, kv_head, sequence, call);
            partial[VALUE_DIM] = whole.max;
            partial[VALUE_DIM + 1] = whole.sum;
        } else {
            whole = finish(whole, it.head, extras, scale);
            if (LSE) write_lse(outputs, it, sequence, whole, call);
        }
        for (int s = 0; s < SIMD_GROUPS; s++) {
            const bool empty = totals[s * BLOCK_ROWS + r] == 0.0f;
            factors[s * BLOCK_ROWS + r] = empty ? 0.0f : scale * power(maxima[s * BLOCK_ROWS + r] - largest);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < work.rows * VALUE_DIM; i += SIMD_GROUPS * SIMD_WIDTH) {
        const int r = i / VALUE_DIM;
        const int dim = i % VALUE_DIM;
        float total = 0.0f;
        for (int s = 0; s < SIMD_GROUPS; s++) {
            total = fma(stored[(s * BLOCK_ROWS + r) * VALUE_DIM + dim], factors[s * BLOCK_ROWS + r], total);
        }
        if (PARTIAL) {
            partial_at(outputs, work.first_row + r, work.split, kv_head, sequence, call)[dim] = total;
        } else {
            const Row it = row_at(work.first_row + r, kv_head, sequence, call, extras);
            const long at = output_row(it, sequence, call.out_batch_stride, call.out_token_stride, call.out_head_stride);
            write_out<T>(outputs, at + dim, total);
        }
    }
}

#define DECODE(T, WIDTH, CHUNKS, ROWS)                                     \
    template [[host_name("decode_" #T "_" #WIDTH "x" #CHUNKS)]] [[kernel]] \
    decltype(decode<T, WIDTH, CHUNKS, ROWS>) decode<T, WIDTH, CHUNKS, ROWS>;
#define DECODE_TYPE(T) DECODE(T, 2, 1, 8) DECODE(T, 4, 1, 8) DECODE(T, 4, 2, 4) DECODE(T, 4, 5, 2)
DECODE_TYPE(float)
DECODE_TYPE(half)
DECODE_TYPE(bfloat)
