// 64 rows over records of mla656: the score warpgroup. S^T = K Q^T takes keys as its first operand from registers.
//
// A thread has the scores of two keys, and of COLUMNS rows: element 4 j + 2 h + e is key 16 warp + lane / 4 + 8 h, row 8
// j + 2 (lane % 4) + e. Column 2 j + e is that row.
//
// Keys are codes, which have a scale per key and chunk of 128 dims: sums are multiplied by the quotient of two scales
// between chunks, and by the last scale in the end. Then the other dims are added, which are bf16.
//
// Queries are multiplied by a power of two per row, which brings the largest number that meets codes to the top of
// f16's range. Those that meet codes are f16, the others bf16.
#pragma once
#include "common/formats.cuh"
#include "hopper/latent_scores.cuh"
#include "hopper/records_operands.cuh"

namespace latent {

struct RecordScores : ScoreWarpgroup {
    static constexpr int COLUMNS = ROWS / 4;
    // Exponents of probabilities are relative to the maximum of a row's scores so far, or to this.
    static constexpr float NO_REFERENCE = -MAX_FLOAT;

    float row_sum[COLUMNS]; // this thread's part

    typedef unsigned Operands[records::KEY_STEPS][4];

    __device__ __forceinline__ int row_of(int column) const { return column / 2 * 8 + 2 * (lane & 3) + column % 2; }

    __device__ __forceinline__ void begin(const Tile &tile) {
        load_queries(tile, warp);
        convert_queries();
        if (threadIdx.x % 128 < ROWS) exchange.reference[threadIdx.x % 128] = NO_REFERENCE;
        if (threadIdx.x % 128 == 0) shared.has_large_scores = false;
        synchronize();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) row_sum[c] = 0.0f;
    }

    // What dot products are multiplied by to be scores, in units of log2: a positive number, so that the maximum of
    // products is that of scores. Other ones are multiplied by the scale first.
    __device__ __forceinline__ bool has_positive_scale() const { return params.scale > 0.0f; }

    static __device__ __forceinline__ float larger_of(unsigned pair) {
        return fmaxf(fabsf(E::to_float((unsigned short)pair)), fabsf(E::to_float((unsigned short)(pair >> 16))));
    }

    // The largest of non-negative numbers of a warp.
    static __device__ __forceinline__ float warp_max(float x) {
        return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
    }

    // Multiplies a pair of queries by a power of two.
    template <ElementType TYPE> static __device__ __forceinline__ unsigned scale_pair(unsigned pair, float factor) {
        return Element<TYPE>::pack(__fmul_rn(E::to_float((unsigned short)pair), factor),
                                   __fmul_rn(E::to_float((unsigned short)(pair >> 16)), factor));
    }

    // Converts what `load_queries` has loaded, in its place: a warp its rows, a lane 16 dims that meet codes and two
    // others.
    __device__ __forceinline__ void convert_queries() const {
        // Numbers that do not meet codes stay in range too, and factors do.
        constexpr float ROTARY_RANGE = 0x1p-46f, SMALLEST = 0x1p-80f, SMALLEST_FACTOR = 0x1p-126f;
        static_assert(HEAD_DIM - VALUE_DIM == 64, "two dims per lane");
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
        float scale = has_positive_scale() ? params.scale * LOG2_E : 1.0f;
        __syncwarp();
#pragma unroll 2
        for (int row = warp; row < ROWS; row += QUERY_WARPS) {
            unsigned at[2] = {query.chunk(row, 2 * lane), query.chunk(row, 2 * lane + 1)}, pairs[8];
            unsigned *rotary =
                (unsigned *)__cvta_shared_to_generic(query.chunk(row, VALUE_DIM / 8 + lane / 4) + lane % 4 * 4);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint4 x = hopper::ld_shared_v4(at[i]);
                pairs[4 * i] = x.x, pairs[4 * i + 1] = x.y, pairs[4 * i + 2] = x.z, pairs[4 * i + 3] = x.w;
            }
            float most = fmaxf(larger_of(*rotary) * ROTARY_RANGE, SMALLEST);
#pragma unroll
            for (int i = 0; i < 8; i++) most = fmaxf(most, larger_of(pairs[i]));
            WeightScale power = weight_scale(warp_max(most));
            unsigned slots[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                slots[i] = scale_pair<ElementType::F16>(pairs[records::pair_of_slots(i)], power.factor);
            st_shared_v4(at[0], make_uint4(slots[0], slots[1], slots[2], slots[3]));
            st_shared_v4(at[1], make_uint4(slots[4], slots[5], slots[6], slots[7]));
            *rotary = scale_pair<ElementType::BF16>(*rotary, power.factor);
            if (lane == 0) exchange.factor[row] = fmaxf(power.inverse * scale, SMALLEST_FACTOR);
        }
        hopper::fence_proxy_async();
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            unsigned hidden = multiply_keys();
            hide_scores(piece.tile, key_tile * KEYS, hidden);
            softmax_step();
            chunks.advance(2);
            publishes = PUBLISH_OPERAND >= 0 && key_tile + 1 < end;
            if (!publishes) publish();
        }
    }

    // The operand of the next K tile before which probabilities are handed to the value warpgroups.
#ifndef PUBLISH_AT
#define PUBLISH_AT -1
#endif
    static constexpr int PUBLISH_OPERAND = PUBLISH_AT;
    bool publishes = false; // whether there are such probabilities

    __device__ __forceinline__ void publish() {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_full[0]));
    }

    // What the sums of a key are multiplied by after each chunk: the quotient of its scale and the next one; after the
    // last, its scale. Scales that are smaller by so much that sums could overflow are taken for larger ones, whose
    // products are as good as 0.
    static __device__ __forceinline__ void find_quotients(float (&x)[TILE_CHUNKS], unsigned record) {
        constexpr float SMALLEST = 0x1p-100f, QUOTIENT = 0x1p-90f;
        uint4 words = hopper::ld_shared_v4(record + SCALES_BYTE);
        x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y);
        x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
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
        unsigned base = __shfl_sync(~0u, this->base, 0);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        hopper::mbarrier_wait(shared_address(&shared.full[own_stage().index]), own_stage().phase);
        unsigned records = own_records(), from = records + (lane & 15) * RECORD_BYTES + (lane & 16);
        float quotients[2][TILE_CHUNKS];
#pragma unroll
        for (int h = 0; h < 2; h++) find_quotients(quotients[h], records + ((lane >> 2) + 8 * h) * RECORD_BYTES);
        Operands a[BUFFERS];
        unsigned words[4];
        ldmatrix_x4(words, from);
        convert(a[0], words, from, 0);
#pragma unroll
        for (int n = 0; n < OPERANDS; n++) {
            bool is_rotary = n >= CODE_OPERANDS;
            if (n % CHUNK_OPERANDS == 0) {
                if (n) finish_chunk(quotients, n / CHUNK_OPERANDS - 1);
                warpgroup_fence_operand(scores);
            }
            if (n == PUBLISH_OPERAND && publishes) publish();
            hopper::wgmma_fence();
#pragma unroll
            for (int step = 0; step < records::KEY_STEPS; step++) {
                unsigned long long b = queries.k_major(records::KEY_STEPS * n + step);
                if (is_rotary)
                    records::mma_bf16(scores, a[n % BUFFERS][step], b, 1);
                else
                    records::mma_f16(scores, a[n % BUFFERS][step], b, n % OPERANDS || step);
            }
            hopper::wgmma_commit();
            if (n + 1 < OPERANDS) {
                hopper::wgmma_wait<BUFFERS - 1>();
                convert(a[(n + 1) % BUFFERS], words, from, n + 1);
            }
        }
        unsigned hidden = 0;
#if LISTS
        hidden = ~(unsigned)shared.present[own_stage().index] >> (16 * (warp & 1) + (lane >> 2));
        hidden = (hidden & 1) | (hidden >> 7 & 2);
#endif
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.empty[own_stage().index]));
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        return hidden;
    }

    // Operands of a K tile: dims that are codes, then the others.
    static constexpr int OPERAND_DIMS = 16 * records::KEY_STEPS, CHUNK_OPERANDS = CHUNK_DIMS / OPERAND_DIMS,
                         CODE_OPERANDS = VALUE_DIM / OPERAND_DIMS, OPERANDS = HEAD_DIM / OPERAND_DIMS;
    // Operands in registers: products read some while others are converted.
    static constexpr int BUFFERS = 2;

    // Makes an operand of its codes, and loads those of the next one.
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

    // Hides the keys that rows do not see. `hidden`: those that lists do not have.
    __device__ __forceinline__ void hide_scores(const Tile &tile, int first_key, unsigned hidden) {
        if (UNLIKELY(!has_positive_scale())) {
            float scale = params.scale * LOG2_E;
#pragma unroll
            for (int i = 0; i < SCORES; i++) scores[i] = __fmul_rn(scores[i], scale);
        }
#if LISTS
        if (!UNLIKELY(hidden)) return;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (hidden >> i / 2 % 2 & 1) scores[i] = -INF;
#else
        if (!UNLIKELY(first_key < tile.every_start || first_key + KEYS > tile.every_end)) return;
        // Bit 2 c + h: whether row `row_of(c)` sees the key. Not unrolled, because it rarely runs.
        unsigned visible = 0;
#pragma unroll 1
        for (int c = 0; c < COLUMNS; c++) {
            int head, token, key = first_key + 16 * warp + (lane >> 2);
            tile.find_row(params, min(first_row_of_cta() + row_of(c), tile.rows - 1), head, token);
            int start = visible_start(params, tile.seq, token), end = visible_end(params, tile.seq, token);
            visible |= (unsigned)(key >= start && key < end) << 2 * c;
            visible |= (unsigned)(key + 8 >= start && key + 8 < end) << 2 * c + 1;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (!(visible >> 2 * c + half & 1)) element(c, half) = -INF;
#endif
    }

    // The maximum of a column over this thread's keys.
    __device__ __forceinline__ float column_max(int c) { return fmaxf(element(c, 0), element(c, 1)); }

    // Combines numbers of rows over all threads that have the row, by `f`, and hands them to `finish(row, number)` of
    // one thread. `number_of(column)`. It rarely runs, so its code is short: through shared memory, where the next
    // probabilities will be.
    template <class NumberOf, class F, class Finish>
    __device__ __forceinline__ void reduce_rows(NumberOf number_of, F f, Finish finish) {
        wait_probs_empty();
        float *all = (float *)(dynamic_shared + STAGED_OFFSET); // [COLUMNS][128]
        static_assert(COLUMNS * 128 * sizeof(float) <= STAGED_BYTES, "the place of probabilities");
        int thread = opaque(threadIdx.x % 128);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) all[c * 128 + thread] = number_of(c);
        synchronize();
        if (thread < ROWS) {
            const float *own = all + (thread / 8 * 2 + thread % 2) * 128 + thread % 8 / 2;
            float combined = own[0];
#pragma unroll 4
            for (int i = 1; i < 32; i++) combined = f(combined, own[i * 4]);
            finish(thread, combined);
        }
    }

    // Raises the references to the maxima of rows, and leaves the factors of outputs in shared memory. Products become
    // scores. It rarely runs.
    __device__ __forceinline__ void raise_references() {
        for_each_column(false, [&](int c, float factor, float) {
#pragma unroll
            for (int h = 0; h < 2; h++) element(c, h) = __fmul_rn(element(c, h), factor);
        });
        reduce_rows([&](int c) { return column_max(c); }, [](float a, float b) { return fmaxf(a, b); },
                    [&](int row, float max) {
                        float before = exchange.reference[row];
                        max = fmaxf(max, before);
                        exchange.reference[row] = max;
                        exchange.rescale[0][row] = exp2_fast(before - max);
                        if (max != NO_REFERENCE && is_large(max)) shared.has_large_scores = true;
                    });
        synchronize();
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            float2 factor = *(const float2 *)(exchange.rescale[0] + row_of(c));
            row_sum[c] = __fmul_rn(row_sum[c], factor.x), row_sum[c + 1] = __fmul_rn(row_sum[c + 1], factor.y);
        }
    }

    // The product of a column and one of this thread's keys.
    __device__ __forceinline__ float &element(int c, int h) { return scores[c / 2 * 4 + 2 * h + c % 2]; }

    // Online softmax over the products of a K tile, which become probabilities in shared memory.
    //
    // The exponent of an element is a product that is not rounded less the reference, as long as none exceeds the
    // threshold and references are not so large that this would be wrong.
    __device__ __forceinline__ void softmax_step() {
        float most = -INF;
        for_each_column(false, [&](int c, float factor, float reference) {
            most = fmaxf(most, fmaf(column_max(c), factor, -reference));
        });
        bool raises = most > RESCALE_THRESHOLD || shared.has_large_scores;
        raises = hopper::named_barrier_or(SCORES_BARRIER, 128, raises);
        if (UNLIKELY(raises)) raise_references();
        for_each_column(raises, [&](int c, float factor, float reference) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                element(c, h) = exp2_fast(fmaf(element(c, h), factor, -reference));
                row_sum[c] = __fadd_rn(row_sum[c], element(c, h));
            }
        });
        wait_probs_empty();
        if (lane == 0) shared.rescales[0][warp] = raises;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
            st_shared_v4(staged_probabilities(base, j),
                         make_uint4(__float_as_uint(scores[4 * j]), __float_as_uint(scores[4 * j + 1]),
                                    __float_as_uint(scores[4 * j + 2]), __float_as_uint(scores[4 * j + 3])));
        probs.advance();
    }

    // Calls `each(column, factor, reference)`. `scaled`: whether products are scores already.
    template <class Each> __device__ __forceinline__ void for_each_column(bool scaled, Each each) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 2) {
            float2 factor = *(const float2 *)(exchange.factor + row_of(c)),
                   reference = *(const float2 *)(exchange.reference + row_of(c));
            each(c, scaled ? 1.0f : factor.x, reference.x);
            each(c + 1, scaled ? 1.0f : factor.y, reference.y);
        }
    }

    __device__ __forceinline__ void finish_rows(const Piece &piece) {
        wait_factor_empty();
        reduce_rows([&](int c) { return row_sum[c]; }, [](float a, float b) { return a + b; },
                    [&](int row, float sum) {
                        float reference = exchange.reference[row];
                        State state = {reference == NO_REFERENCE ? -INF : reference, sum};
                        exchange.out_factor[row] = finish_row(piece, row, state, true);
                    });
        publish_factors();
    }
};

} // namespace latent
