// The score warpgroup of the decode kernel for latent caches: Q K^T, the online softmax, and P^T for the value
// warpgroups.
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// What both kinds of score warpgroups have.
struct ScoreWarpgroup {
    // Maxima are raised only if a score is above one by more than this, so that outputs are seldom rescaled:
    // probabilities of 2^MARGIN are no less exact.
    static constexpr float MARGIN = 8.0f;

    const AttentionParameters &params;
    Shared &shared;
    Exchange &exchange;
    unsigned base; // of shared memory
    int warp, lane;

    ChunkState chunks;
    PipelineState<REST_STAGES> rest;
    PipelineState<PROB_STAGES> probs;
    PieceReader pieces;
    unsigned factor_phase = 0;
    float scores[ROWS / 2];

    __device__ __forceinline__ void synchronize() const { hopper::named_barrier_sync(SCORES_BARRIER, 128); }

    // Queries of the CTA's rows, as wgmma reads them: a warp per row.
    __device__ __forceinline__ void load_queries(const Tile &tile) const {
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
#pragma unroll 1
        for (int row = warp; row < ROWS; row += 4) {
            bool present = first_row_of_cta() + row < tile.rows;
            int head, token;
            tile.find_row(params, present ? first_row_of_cta() + row : 0, head, token);
            const unsigned short *from =
                (const unsigned short *)params.query.pointer + tile.sequence * params.query.strides.batch +
                (long long)(tile.seq.q_start + token) * params.query.strides.token + head * params.query.strides.head;
#pragma unroll
            for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 32)
                if (chunk + 32 <= HEAD_DIM / 8 || lane < HEAD_DIM / 8 - chunk)
                    cp_async(query.chunk(row, chunk + lane), from + (chunk + lane) * 8, present ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        hopper::fence_proxy_async();
        synchronize();
    }

    // The products of queries and the keys of the next K tile; `multiply(keys, key step, query step, keep)` issues 16
    // dims of them.
    template <class Multiply> __device__ __forceinline__ void mma_qk(Multiply multiply) {
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = chunks.at(i);
            hopper::mbarrier_wait(shared_address(&shared.full[chunk.index]), chunk.phase);
            SharedTile<KEYS> keys = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < CHUNK_DIMS / 16; step++)
                multiply(keys.k_major(step), query().k_major(first_dim_of(i) / 16 + step), i + step);
        }
        hopper::mbarrier_wait(shared_address(&shared.rest_full[rest.index]), rest.phase);
        SharedTile<KEYS> keys = {base + REST_OFFSET + rest.index * REST_BYTES};
#pragma unroll
        for (int step = 0; step < REST_SUBTILES * 4; step++)
            multiply(keys.k_major(step), query().k_major(VALUE_DIM / 16 + step), 1);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.rest_empty[rest.index]));
        chunks.advance(TILE_CHUNKS);
        rest.advance();
    }

    __device__ __forceinline__ SharedTile<ROWS> query() const { return {base + QUERY_OFFSET}; }
    __device__ __forceinline__ SharedTile<ROWS> probabilities() const {
        return {base + PROBS_OFFSET + probs.index * PROB_BYTES};
    }

    // Dot products become scores, in units of log2; whether some row does not see some key of the K tile.
    __device__ __forceinline__ bool scale_scores(const Tile &tile, int first_key) {
        float scale = params.scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) scores[i] = __fmul_rn(scores[i], scale);
        return first_key < tile.every_start || first_key + KEYS > tile.every_end;
    }

    // Waits until the value warpgroups are done with the probabilities before.
    __device__ __forceinline__ void wait_probs_empty() const {
        hopper::mbarrier_wait(shared_address(&shared.probs_empty[probs.index]), probs.phase ^ 1);
    }

    // Hands the probabilities to the value warpgroups. `rescales`: whether a factor of this warp's is not 1.
    __device__ __forceinline__ void publish(bool rescales) {
        if (lane == 0) shared.rescales[probs.index][warp] = rescales;
        hopper::fence_proxy_async();
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_full[probs.index]));
        probs.advance();
    }

    // Waits until the value warpgroups are done with the factors of the piece before.
    __device__ __forceinline__ void wait_factor_empty() {
        hopper::mbarrier_wait(shared_address(&shared.factor_empty), factor_phase ^ 1);
        factor_phase ^= 1;
    }

    // A row's state at the end of a piece: to the workspace, or into the factor of its outputs and the LSE.
    __device__ __forceinline__ void finish_row(const Piece &piece, int row_of_cta, State state) const {
        int row = first_row_of_cta() + row_of_cta;
        if (row >= piece.tile.rows) return;
        if (piece.is_whole()) {
            int head, token;
            piece.tile.find_row(params, row, head, token);
            FinalizedRow finalized =
                finalize_row(params, state, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
            shared.out_factor[row_of_cta] = finalized.factor;
            if (params.lse.pointer) store_lse(params, piece.tile, head, token, finalized.lse);
        } else {
            float *partial = partial_state(params, part_index(), piece.starts_here ? 0 : 1);
            partial[row] = state.max;
            partial[TILE_ROWS + row] = state.sum;
        }
    }

    __device__ __forceinline__ void publish_factors() const {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_full));
    }

    // Counts a part of a tile that has others for `join`, or combines them if this is the last one.
    __device__ __forceinline__ void finish_part(const Piece &piece) const {
        int rank = blockIdx.x % CTAS_PER_TILE, thread = opaque(threadIdx.x % 128);
        unsigned *arrivals = arrivals_of(params, piece.first_part, rank);
        if (params.stream_k.partial_ranges) {
            if (thread != 0) return;
            if (params.stream_k.work_total) {
                asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
            } else if (piece.starts_here) {
                partial_range_of(params, piece.tile) = {piece.first_part, piece.last_part};
            }
            return;
        }
        if (thread == 0) {
            unsigned before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
            shared.last = before == (unsigned)(piece.last_part - piece.first_part);
            if (shared.last) *arrivals = 0;
        }
        synchronize();
        if (shared.last) {
            int end = min(piece.tile.rows, first_row_of_cta() + ROWS);
            for (int row = first_row_of_cta() + thread / 32; row < end; row += 4)
                combine_row<STATES_PER_BATCH>(params, piece.tile, row, thread & 31, piece.first_part, piece.last_part,
                                              element_out_type(params));
        }
        synchronize();
    }
};

// Few rows: S^T = K Q^T. A thread has the scores of two keys, and of COLUMNS rows: column 2 j + e is row 8 j + 2 (lane
// % 4) + e.
struct FewRows : ScoreWarpgroup {
    static constexpr int COLUMNS = ROWS / 4;
    float row_max[COLUMNS], row_sum[COLUMNS]; // maxima of all keys, this thread's part of sums

    __device__ __forceinline__ int row_of(int column) const { return column / 2 * 8 + 2 * (lane & 3) + column % 2; }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            row_max[c] = -INF;
            row_sum[c] = 0.0f;
        }
    }

    __device__ __forceinline__ void multiply() {
        mma_qk([&](unsigned long long keys, unsigned long long queries, int keep) {
            Wgmma<ROWS>::mma_ss(scores, keys, queries, keep);
        });
    }

    // Dot products become scores.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key) {
        if (!scale_scores(tile, first_key)) return;
        // Bit 2 c + half: whether row `row_of(c)` sees the key. Not unrolled, because it rarely runs.
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
                if (!(visible >> 2 * c + half & 1)) scores[c / 2 * 4 + 2 * half + c % 2] = -INF;
    }

    // Combines a number per row over all threads that have the row, by `f`, and leaves it with all of them. It rarely
    // runs, so its code is short: through shared memory, where the next probabilities will be.
    template <class F> __device__ __forceinline__ void reduce_rows(float (&x)[COLUMNS], F f) {
        wait_probs_empty();
        float *all = (float *)(dynamic_shared + PROBS_OFFSET + probs.index * PROB_BYTES); // [COLUMNS][128]
        static_assert(COLUMNS * 128 * sizeof(float) <= PROB_BYTES, "one stage of probabilities");
        int thread = threadIdx.x % 128;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) all[c * 128 + thread] = x[c];
        synchronize();
        if (thread < ROWS) {
            const float *own = all + (thread / 8 * 2 + thread % 2) * 128 + thread % 8 / 2;
            float combined = own[0];
#pragma unroll 4
            for (int i = 1; i < 32; i++) combined = f(combined, own[i * 4]);
            exchange.rows[thread] = combined;
        }
        synchronize();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) x[c] = exchange.rows[row_of(c)];
    }

    // Raises the maxima to those of the K tile, and leaves the factors of outputs in shared memory.
    __device__ __forceinline__ void raise_maxima() {
        float most[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) most[c] = fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
        reduce_rows(most, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            most[c] = fmaxf(most[c], row_max[c]);
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            float factor = exp2_fast(row_max[c] - (most[c] == -INF ? 0.0f : most[c]));
            row_max[c] = most[c];
            row_sum[c] = __fmul_rn(row_sum[c], factor);
            if (warp == 0 && lane < 4) shared.rescale[probs.index][row_of(c)] = factor;
        }
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory.
    __device__ __forceinline__ void softmax_step() {
        bool above = false;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            above |= fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]) > row_max[c] + MARGIN;
        bool rescales = hopper::named_barrier_or(SCORES_BARRIER, 128, above);
        if (rescales) raise_maxima();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float reference = row_max[c] == -INF ? 0.0f : row_max[c];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &score = scores[c / 2 * 4 + 2 * half + c % 2];
                score = exp2_fast(score - reference);
                row_sum[c] = __fadd_rn(row_sum[c], score);
            }
        }
        wait_probs_empty();
        // Lane l gives the address of row l % 8 of matrix l / 8: rows of the tile, then the two groups of eight keys.
#pragma unroll
        for (int j = 0; j < ROWS / 8; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = (j + i / 2) * 4 + i % 2 * 2;
                pairs[i] = E::pack(scores[at], scores[at + 1]);
            }
            hopper::stmatrix_x4_transposed(
                probabilities().chunk(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), pairs[0], pairs[1],
                pairs[2], pairs[3]);
        }
        publish(rescales);
    }

    __device__ __forceinline__ void finish_rows(const Piece &piece) {
        reduce_rows(row_sum, [](float a, float b) { return a + b; });
        float *maxima = (float *)(dynamic_shared + PROBS_OFFSET + probs.index * PROB_BYTES);
        if (warp == 0) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (lane < 4) maxima[row_of(c)] = row_max[c];
        }
        synchronize();
        wait_factor_empty();
        int row = 32 * warp + lane;
        if (row < ROWS) finish_row(piece, row, {maxima[row], exchange.rows[row]});
        publish_factors();
    }
};

// 64 rows: S = Q K^T. A thread has the scores of rows `row(0)` and `row(1)`: element 4 j + 2 h + e is that of row h and
// key 8 j + 2 (lane % 4) + e.
struct ManyRows : ScoreWarpgroup {
    static constexpr int COLUMNS = ROWS / 4; // keys of a thread: there are as many in a K tile as rows
    float row_max[2], row_sum[2];            // maxima of all keys, this thread's part of sums

    __device__ __forceinline__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_max[h] = -INF;
            row_sum[h] = 0.0f;
        }
    }

    __device__ __forceinline__ void multiply() {
        mma_qk([&](unsigned long long keys, unsigned long long queries, int keep) {
            Wgmma<ROWS>::mma_ss(scores, queries, keys, keep);
        });
    }

    // Dot products become scores.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key) {
        if (!scale_scores(tile, first_key)) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int head, token;
            tile.find_row(params, min(first_row_of_cta() + row(h), tile.rows - 1), head, token);
            int start = visible_start(params, tile.seq, token), end = visible_end(params, tile.seq, token);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                int key = first_key + i / 2 * 8 + 2 * (lane & 3) + i % 2;
                if (key < start || key >= end) scores[i / 2 * 4 + 2 * h + i % 2] = -INF;
            }
        }
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory.
    __device__ __forceinline__ void softmax_step() {
        float most[2], factor[2] = {1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            most[h] = scores[2 * h];
#pragma unroll
            for (int i = 1; i < COLUMNS; i++) most[h] = fmaxf(most[h], scores[i / 2 * 4 + 2 * h + i % 2]);
        }
        bool rescales = __any_sync(~0u, most[0] > row_max[0] + MARGIN || most[1] > row_max[1] + MARGIN);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (rescales) {
#pragma unroll
                for (int step = 1; step < 4; step *= 2) most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], step));
                most[h] = fmaxf(most[h], row_max[h]);
                // An empty row uses 0 as its reference: -inf - -inf is NaN.
                factor[h] = exp2_fast(row_max[h] - (most[h] == -INF ? 0.0f : most[h]));
                row_max[h] = most[h];
                row_sum[h] = __fmul_rn(row_sum[h], factor[h]);
            }
            float reference = row_max[h] == -INF ? 0.0f : row_max[h];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                float &score = scores[i / 2 * 4 + 2 * h + i % 2];
                score = exp2_fast(score - reference);
                row_sum[h] = __fadd_rn(row_sum[h], score);
            }
        }
        wait_probs_empty();
        // Lane l gives the address of row l % 8 of matrix l / 8: the two groups of eight rows, then groups of keys.
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = (j + i / 2) * 4 + i % 2 * 2;
                pairs[i] = E::pack(scores[at], scores[at + 1]);
            }
            hopper::stmatrix_x4(probabilities().chunk(16 * warp + lane / 8 % 2 * 8 + lane % 8, j + lane / 16), pairs[0],
                                pairs[1], pairs[2], pairs[3]);
        }
        if (lane % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) shared.rescale[probs.index][row(h)] = factor[h];
        }
        publish(rescales);
    }

    __device__ __forceinline__ void finish_rows(const Piece &piece) {
        wait_factor_empty();
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], step);
            if (lane % 4 == 0) finish_row(piece, row(h), {row_max[h], row_sum[h]});
        }
        publish_factors();
    }
};

// All pieces of work of a score warpgroup.
template <class Rows> static __device__ __forceinline__ void run_scores(Rows &rows) {
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = rows.pieces.wait(rows.shared);
        if (!piece.more) return;
        rows.begin();
        rows.load_queries(piece.tile);
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            rows.multiply();
            rows.modify_scores(piece.tile, key_tile * KEYS);
            rows.softmax_step();
        }
        rows.finish_rows(piece);
        if (is_counted(rows.params, piece)) {
            hopper::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_THREADS);
            rows.finish_part(piece);
        }
        rows.pieces.release(rows.shared, rows.lane);
    }
}

} // namespace latent
