// Over records of mla656: score warpgroups. S^T = K Q^T takes keys as its first operand from registers.
//
// With 16 rows and no lists there are two, which take K tiles in turn: products of one run beside softmax of the other.
// Named barriers (TURN_BARRIER) keep the order of what they do to references and units.
//
// Keys are codes, which have a scale per key and chunk of 128 dims. With 16 rows every chunk has sums of its own. With
// 64 rows there are no registers for them: sums are multiplied by the quotient of two scales between chunks, and by the
// last scale in the end. Queries of these dims are f16, divided by a power of two per row that brings their largest
// number to the top of f16's range. The other dims are bf16, and have sums of their own or are added last.
#pragma once
#include "common/formats.cuh"
#include "hopper/codes_wgmma.cuh"
#include "hopper/records_operands.cuh"
#include "hopper/records_weights.cuh"

namespace latent {

struct RecordScores : RecordWeights {
    // Exponents of probabilities are relative to the maximum of a row's scores so far, or to this.
    static constexpr float NO_REFERENCE = -MAX_FLOAT;

    static constexpr bool HAS_CHUNK_SUMS = ROWS == 16;

    float row_sum[COLUMNS];  // this thread's part
    float followed[COLUMNS]; // of two warpgroups: the references that `row_sum` is relative to
    int turn = 0;            // the warpgroup of the next K tile

    typedef float Columns[COLUMNS];
    typedef unsigned Operands[records::KEY_STEPS][4];
    typedef float ChunkSums[TILE_CHUNKS][SCORES];

    // Numbers of this thread's rows, of all rows in shared memory.
    __device__ __forceinline__ void load_columns(Columns &x, const float *from) const {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            float2 pair = *(const float2 *)(from + row_of(c));
            x[c] = pair.x, x[c + 1] = pair.y;
        }
    }

    __device__ __forceinline__ void begin(const Tile &tile) {
        request_queries(tile, 4 * group() + warp);
        await_queries();
        convert_queries();
        int thread = threadIdx.x % 128;
        if (group() == 0 && thread < ROWS) exchange.reference[thread] = NO_REFERENCE;
        if (HAS_VALUE_UNITS && group() == 0) begin_units(thread);
        if (group() == 0 && thread == 0) exchange.key_scale = exchange.key_scale_at ? *exchange.key_scale_at : 1.0f;
        synchronize_all();
        score_scale = params.scale * LOG2_E * exchange.key_scale;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) row_sum[c] = 0.0f, followed[c] = NO_REFERENCE;
    }

    // With all score warpgroups.
    __device__ __forceinline__ void synchronize_all() const {
        hopper::named_barrier_sync(ALL_SCORES_BARRIER, 128 * SCORE_WARPGROUPS);
    }

    // Waits for the references and units of the previous K tile.
    __device__ __forceinline__ void take_turn() const {
        if constexpr (SCORE_WARPGROUPS > 1) hopper::named_barrier_sync(TURN_BARRIER + group(), 128 * SCORE_WARPGROUPS);
    }
    // Lets the warpgroup of the next K tile go on.
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (SCORE_WARPGROUPS > 1)
            hopper::named_barrier_arrive(TURN_BARRIER + (group() ^ 1), 128 * SCORE_WARPGROUPS);
    }

    // Before the first piece.
    __device__ __forceinline__ void start() {
        if constexpr (SCORE_WARPGROUPS > 1) {
            if (group() == 1) {
                probs.advance();
                pass_turn();
            }
        }
    }

    // Makes this thread's sums relative to `references`, which the other warpgroup may have raised.
    __device__ __forceinline__ void follow(const Columns &references) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            row_sum[c] = __fmul_rn(row_sum[c], exp2_fast(followed[c] - references[c]));
            followed[c] = references[c];
        }
    }

    // Converts what `request_queries` has loaded, in its place: a warp its rows, a lane 16 dims.
    __device__ __forceinline__ void convert_queries() const {
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
        __syncwarp();
#pragma unroll 1
        for (int row = 4 * group() + warp; row < ROWS; row += QUERY_WARPS) {
            unsigned at[2] = {query.chunk(row, 2 * lane), query.chunk(row, 2 * lane + 1)}, pairs[8];
            float most = 0.0f;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 x = ld_shared_v4(at[i]);
                pairs[4 * i] = x.x, pairs[4 * i + 1] = x.y, pairs[4 * i + 2] = x.z, pairs[4 * i + 3] = x.w;
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                most = fmaxf(most, fmaxf(fabsf(E::to_float((unsigned short)pairs[i])),
                                         fabsf(E::to_float((unsigned short)(pairs[i] >> 16)))));
            most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
            WeightScale power = weight_scale(most);
            unsigned slots[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                unsigned pair = pairs[records::pair_of_slots(i)];
                slots[i] = Element<ElementType::F16>::pack(E::to_float((unsigned short)pair) * power.factor,
                                                           E::to_float((unsigned short)(pair >> 16)) * power.factor);
            }
            st_shared_v4(at[0], make_uint4(slots[0], slots[1], slots[2], slots[3]));
            st_shared_v4(at[1], make_uint4(slots[4], slots[5], slots[6], slots[7]));
            if (lane == 0) exchange.query_scale[row] = power.inverse;
        }
        hopper::fence_proxy_async();
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            if (turn == group()) {
                unsigned hidden = multiply_keys();
                modify_scores(piece.tile, key_tile * KEYS, hidden);
                softmax_step();
            }
            if (++turn == SCORE_WARPGROUPS) turn = 0;
            chunks.advance(2);
        }
    }

    // The scales of a key, by chunk. `record`: its address.
    static __device__ __forceinline__ void load_scales(float (&x)[TILE_CHUNKS], unsigned record) {
        uint4 words = ld_shared_v4(record + SCALES_BYTE);
        x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y);
        x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
    }

    // What the sums of a key are multiplied by after each chunk: the quotient of its scale and the next one; after the
    // last, its scale. Scales that are smaller by so much that sums could overflow are taken for larger ones, whose
    // products are as good as 0.
    static __device__ __forceinline__ void find_quotients(float (&x)[TILE_CHUNKS], unsigned record) {
        constexpr float SMALLEST = 0x1p-100f, QUOTIENT = 0x1p-90f;
        load_scales(x, record);
        float bound = 0.0f;
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) bound = fmaxf(bound, fabsf(x[i]));
        bound = fmaxf(bound * QUOTIENT, SMALLEST);
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++)
            if (fabsf(x[i]) < bound) x[i] = bound;
#pragma unroll
        for (int i = 0; i + 1 < TILE_CHUNKS; i++) x[i] = __fmul_rn(x[i], reciprocal(x[i + 1]));
    }

    // The stage of this warp's keys.
    __device__ __forceinline__ PipelineState<CHUNKS> own_stage() const { return chunks.at(warp / 2); }
    __device__ __forceinline__ unsigned own_records() const {
        return chunk_records(base, own_stage()) + warp % 2 * 16 * RECORD_BYTES;
    }

    // Multiplies queries by the keys of the next K tile. Returns which of this thread's keys a list does not have: bit
    // h.
    __device__ __forceinline__ unsigned multiply_keys() {
        unsigned base = opaque(this->base);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        hopper::mbarrier_wait(shared_address(&shared.full[own_stage().index]), own_stage().phase);
        unsigned records = own_records(), from = records + (lane & 15) * RECORD_BYTES + (lane & 16);
        [[maybe_unused]] float quotients[2][TILE_CHUNKS];
        if constexpr (!HAS_CHUNK_SUMS) {
#pragma unroll
            for (int h = 0; h < 2; h++) find_quotients(quotients[h], records + ((lane >> 2) + 8 * h) * RECORD_BYTES);
        }
        ChunkSums sums;
        Operands a[BUFFERS];
        unsigned words[4];
        ldmatrix_x4(words, from);
        convert(a[0], words, from, 0);
#pragma unroll
        for (int n = 0; n < OPERANDS; n++) {
            bool is_rotary = n >= CODE_OPERANDS;
            if (!HAS_CHUNK_SUMS && n % CHUNK_OPERANDS == 0) {
                if (n) finish_chunk(quotients, n / CHUNK_OPERANDS - 1);
                if (is_rotary) multiply_by_query_scales();
                warpgroup_fence_operand(scores);
            }
            float (&sum)[SCORES] = HAS_CHUNK_SUMS && !is_rotary ? sums[n / CHUNK_OPERANDS] : scores;
            hopper::wgmma_fence();
#pragma unroll
            for (int step = 0; step < records::KEY_STEPS; step++) {
                unsigned long long b = queries.k_major(records::KEY_STEPS * n + step);
                int keep = step || (HAS_CHUNK_SUMS ? n % CHUNK_OPERANDS : n);
                if (is_rotary)
                    CodeWgmma<ROWS>::mma_bf16(sum, a[n % BUFFERS][step], b, keep);
                else
                    CodeWgmma<ROWS>::mma_f16(sum, a[n % BUFFERS][step], b, keep);
            }
            hopper::wgmma_commit();
            if (n + 1 < OPERANDS) {
                hopper::wgmma_wait<BUFFERS - 1>();
                convert(a[(n + 1) % BUFFERS], words, from, n + 1);
            }
        }
        unsigned hidden = 0;
#if LISTS
        hidden = ~(unsigned)shared.present[own_stage().index].of_tile >> (16 * (warp & 1) + (lane >> 2));
        hidden = (hidden & 1) | (hidden >> 7 & 2);
#endif
#pragma unroll
        for (int h = 0; h < 2; h++) load_scales(scales[h], records + ((lane >> 2) + 8 * h) * RECORD_BYTES);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.empty[own_stage().index]));
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        if constexpr (HAS_CHUNK_SUMS) add_chunks(sums);
        return hidden;
    }

    // Adds the products of codes, times their scales, to those of the rotary dims.
    __device__ __forceinline__ void add_chunks(ChunkSums &sums) {
        Columns query_scales;
        load_columns(query_scales, exchange.query_scale);
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) warpgroup_fence_operand(sums[i]);
#pragma unroll
        for (int k = 0; k < SCORES; k++) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < TILE_CHUNKS; i++) sum = fmaf(sums[i][k], scales[k / 2 % 2][i], sum);
            scores[k] = fmaf(sum, query_scales[k / 4 * 2 + k % 2], scores[k]);
        }
    }

    // Operands of a K tile: dims that are codes, then the others.
    static constexpr int OPERAND_DIMS = 16 * records::KEY_STEPS, CHUNK_OPERANDS = CHUNK_DIMS / OPERAND_DIMS,
                         CODE_OPERANDS = VALUE_DIM / OPERAND_DIMS, OPERANDS = HEAD_DIM / OPERAND_DIMS;
    // Operands in registers: products read some while others are converted.
    static constexpr int BUFFERS = 2;

    // Converts the codes of operand `number`, and loads those of the next one.
    static __device__ __forceinline__ void convert(Operands &a, unsigned (&words)[4], unsigned from, int number) {
        if (number < CODE_OPERANDS)
            records::key_operands(a, words);
        else
            records::rotary_operands(a, from + ROTARY_BYTE + (number - CODE_OPERANDS) * OPERAND_DIMS * 2);
        if (number + 1 < CODE_OPERANDS) ldmatrix_x4(words, from + (number + 1) * OPERAND_DIMS);
    }

    __device__ __forceinline__ void finish_chunk(const float (&quotients)[2][TILE_CHUNKS], int chunk) {
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
#pragma unroll
        for (int i = 0; i < SCORES; i++) scores[i] = __fmul_rn(scores[i], quotients[i / 2 % 2][chunk]);
    }

    __device__ __forceinline__ void multiply_by_query_scales() {
        Columns query_scales;
        load_columns(query_scales, exchange.query_scale);
#pragma unroll
        for (int i = 0; i < SCORES; i++) scores[i] = __fmul_rn(scores[i], query_scales[i / 4 * 2 + i % 2]);
    }

    // Dot products become scores.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key, unsigned hidden) {
        bool hides = scale_scores(tile, first_key);
#if LISTS
        if (!UNLIKELY(hidden)) return;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (hidden >> i / 2 % 2 & 1) scores[i] = -INF;
#else
        if (!hides) return;
        hide_unseen(tile, first_key);
#endif
    }

    __device__ __forceinline__ float tile_max(int c) const {
        return fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
    }

    // Raises the references to the maxima of rows, and units by the largest scales, and leaves the factors of outputs
    // in shared memory.
    __device__ __forceinline__ void update_references() {
        if (HAS_VALUE_UNITS) find_largest_scales();
        Columns maxima, before;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) maxima[c] = tile_max(c);
        reduce_rows(maxima, [](float a, float b) { return fmaxf(a, b); });
        load_columns(maxima, exchange.rows[group()]);
        load_columns(before, exchange.reference);
        synchronize(); // all have read them
        if (HAS_VALUE_UNITS) raise_units(threadIdx.x % 128);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            maxima[c] = fmaxf(maxima[c], before[c]);
            float factor = exp2_fast(before[c] - maxima[c]);
            if (SCORE_WARPGROUPS == 1) row_sum[c] = __fmul_rn(row_sum[c], factor);
            if (warp == 0 && lane < 4) {
                exchange.reference[row_of(c)] = maxima[c];
                exchange.rescale[probs.index][row_of(c)] = factor;
            }
        }
        synchronize();
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory: a copy for each chunk of
    // values, times its scales.
    __device__ __forceinline__ void softmax_step() {
        Columns references;
        Weights weights;
        take_turn();
        load_columns(references, exchange.reference);
        bool changes = find_weights(weights), is_wide = !HAS_VALUE_UNITS;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) changes |= tile_max(c) - references[c] > RESCALE_THRESHOLD;
        bool rescales = hopper::named_barrier_or(SCORES_BARRIER + group(), 128, changes);
        if (UNLIKELY(rescales)) {
            update_references();
            load_columns(references, exchange.reference);
            if (HAS_VALUE_UNITS) {
                is_wide = hopper::named_barrier_or(SCORES_BARRIER + group(), 128, find_weights(weights));
                if (threadIdx.x % 128 == 0) exchange.units.is_wide[probs.index] = is_wide;
            }
        }
        pass_turn();
        if constexpr (SCORE_WARPGROUPS > 1) follow(references);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &score = scores[c / 2 * 4 + 2 * half + c % 2];
                score = exp2_fast(score - references[c]);
                row_sum[c] = __fadd_rn(row_sum[c], score);
            }
        wait_probs_empty();
        if (UNLIKELY(is_wide))
            store_probabilities<ElementType::BF16>(weights);
        else
            store_probabilities<ElementType::F16>(weights);
        publish(rescales);
    }

    template <ElementType TYPE> __device__ __forceinline__ void store_probabilities(const Weights &weights) const {
#pragma unroll
        for (int tile = 0; tile < PROB_TILES; tile++)
#pragma unroll
            for (int j = 0; j < ROWS / 8; j += 2) store_pairs<TYPE>(tile, j, weights);
    }

    // Stores the probabilities of elements 4 j to 4 j + 7, as pairs in four matrices. Lane l gives the address of row l
    // % 8 of matrix l / 8: rows of the tile, then the two groups of eight keys.
    template <ElementType TYPE>
    __device__ __forceinline__ void store_pairs(int tile, int j, const Weights &weights) const {
        int chunk = first_dim_of(tile) / CHUNK_DIMS;
        auto pair = [&](int i) {
            float weight = weights[i / 2 % 2][chunk];
            return Element<TYPE>::pack(__fmul_rn(scores[4 * j + i], weight), __fmul_rn(scores[4 * j + i + 1], weight));
        };
        hopper::stmatrix_x4_transposed(probability_chunk(tile, 8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                                       pair(0), pair(2), pair(4), pair(6));
    }

    __device__ __forceinline__ void finish_rows(const Piece &piece) {
        if constexpr (SCORE_WARPGROUPS > 1) {
            synchronize_all(); // references are final
            Columns references;
            load_columns(references, exchange.reference);
            follow(references);
        }
        reduce_rows(row_sum, [](float a, float b) { return a + b; });
        if constexpr (SCORE_WARPGROUPS > 1) {
            synchronize_all();
            if (group() != 0) return;
        }
        wait_factor_empty();
        int row = 32 * warp + lane;
        if (HAS_VALUE_UNITS) finish_units(row);
        if (row < ROWS) {
            float reference = exchange.reference[row], sum = exchange.rows[0][row];
#pragma unroll
            for (int i = 1; i < SCORE_WARPGROUPS; i++) sum += exchange.rows[i][row];
            State state = {reference == NO_REFERENCE ? -INF : reference, sum};
            exchange.out_factor[row] = finish_row(piece, row, state, true);
        }
        publish_factors();
    }
};

} // namespace latent
