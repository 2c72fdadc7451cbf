// The decode kernel for latent caches with 16 rows: rows are the N of both products.
#pragma once
#include "hopper/latent_roles.cuh"

namespace latent {

// Few rows: S^T = K Q^T.
struct RowScores : ScoreWarpgroup {
    float row_max[COLUMNS], row_sum[COLUMNS]; // maxima of all keys, this thread's part of sums

    __device__ __forceinline__ void begin(const Tile &tile) {
        request_queries(tile, warp);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            row_max[c] = -INF;
            row_sum[c] = 0.0f;
        }
        await_queries();
        synchronize();
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            mma_qk([&](float (&sum)[SCORES], unsigned long long queries, unsigned long long keys, int keep) {
                Wgmma<ROWS>::mma_ss(sum, keys, queries, keep);
            });
            modify_scores(piece.tile, key_tile * KEYS);
            softmax_step();
        }
    }

    // Dot products become scores.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key) {
        bool hides = scale_scores(tile, first_key);
#if LISTS
        if (!UNLIKELY(~present)) return;
        int key = 16 * warp + (lane >> 2);
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (!(present >> (key + i / 2 % 2 * 8) & 1)) scores[i] = -INF;
#else
        if (!hides) return;
        hide_unseen(tile, first_key);
#endif
    }

    // Updates the row max to that of the K tile, and leaves the factors of outputs in shared memory.
    __device__ __forceinline__ void update_max() {
        float tile_max[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) tile_max[c] = fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
        reduce_rows(tile_max, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) tile_max[c] = exchange.rows[0][row_of(c)];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            tile_max[c] = fmaxf(tile_max[c], row_max[c]);
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            float factor = exp2_fast(row_max[c] - (tile_max[c] == -INF ? 0.0f : tile_max[c]));
            row_max[c] = tile_max[c];
            row_sum[c] = __fmul_rn(row_sum[c], factor);
            if (warp == 0 && lane < 4) exchange.rescale[probs.index][row_of(c)] = factor;
        }
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory.
    __device__ __forceinline__ void softmax_step() {
        bool rises = false;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            rises |= fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]) > row_max[c] + RESCALE_THRESHOLD;
        bool rescales = hopper::named_barrier_or(SCORES_BARRIER, 128, rises);
        if (rescales) update_max();
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
        for (int j = 0; j < SCORES; j += 8) {
            auto pair = [&](int i) { return E::pack(scores[j + i], scores[j + i + 1]); };
            unsigned to = probability_chunk(0, 2 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
            hopper::stmatrix_x4_transposed(to, pair(0), pair(2), pair(4), pair(6));
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
        if (row < ROWS) exchange.out_factor[row] = finish_row(piece, row, {maxima[row], exchange.rows[0][row]}, true);
        publish_factors();
    }
};

// Few rows: O^T = V^T P^T. Element [i][4 j + 2 h + e] of a thread's sums is value dim 64 i + 16 warp + lane / 4 + 8 h
// of the warpgroup's, and row 8 j + 2 (lane % 4) + e.
struct RowValues : ValueWarpgroup {
    float out[VALUE_SUBTILES][ROWS / 2];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
            for (int k = 0; k < ROWS / 2; k++) out[i][k] = 0.0f;
    }

    __device__ __forceinline__ void rescale() {
        const float *factors = exchange.rescale[probs.index];
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float factor = factors[8 * j + 2 * (lane & 3) + e];
#pragma unroll
                for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) out[i][4 * j + 2 * h + e] *= factor;
            }
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            hopper::mbarrier_wait(shared_address(&shared.probs_full[probs.index]), probs.phase);
            if (*(const int *)shared.rescales[probs.index]) rescale();
            wait_chunks(chunks);
            zero_others(piece, key_tile * KEYS, chunks);
            multiply();
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_empty[probs.index]));
            chunks.advance(TILE_CHUNKS);
            probs.advance();
        }
    }

    // O^T += V^T P^T; every chunk is released as soon as it was read.
    __device__ __forceinline__ void multiply() {
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(chunks, i));
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
                for (int j = 0; j < CHUNK_SUBTILES; j++)
                    Wgmma<ROWS>::mma_ss_rows_transposed(out[i * CHUNK_SUBTILES + j],
                                                        SharedTile<KEYS>{keys + j * SUBTILE_BYTES}.mn_major(step),
                                                        probabilities(i, step));
            hopper::wgmma_commit();
        }
        static_assert(OWN_CHUNKS == 2, "the waits below");
        hopper::wgmma_wait<1>();
        release(own_chunk(chunks, 0));
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        release(own_chunk(chunks, 1));
    }

    // Calls `store(row of the CTA, f)` for this thread's rows that exist, one after another; `f(each)` calls
    // `each(dim, output)` for the thread's outputs of the row.
    template <class Store> __device__ __forceinline__ void for_each_row(const Piece &piece, Store store) const {
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            int own_lane = opaque(lane), row = c / 2 * 8 + 2 * (own_lane & 3) + c % 2;
            int first_dim = warpgroup * DIMS_PER_WARPGROUP + 16 * warp + (own_lane >> 2);
            if (first_row_of_cta() + row >= piece.tile.rows) continue;
            store(row, [&](auto each) {
#pragma unroll
                for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) each(first_dim + 64 * i + 8 * h, out[i][c / 2 * 4 + 2 * h + c % 2]);
            });
        }
    }

    // Stores a piece's outputs: to the workspace, or normalized as rows of the output.
    __device__ __forceinline__ void store_outputs(const Piece &piece) const {
        if (!piece.is_whole()) {
            for_each_row(piece, [&](int row, auto outputs) {
                float *to = partial_row(piece, row);
                outputs([&](int dim, float x) { to[dim] = x; });
            });
            return;
        }
        for_each_row(piece, [&](int row, auto outputs) {
            float factor = exchange.out_factor[row];
            long long at = out_row(piece, row);
            if (params.out_f32) {
                float *to = (float *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = __fmul_rn(x, factor); });
            } else {
                unsigned short *to = (unsigned short *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = E::from_float(bound_output(__fmul_rn(x, factor))); });
            }
        });
    }
};

// Runs a consumer warp of the CTA.
static __device__ __forceinline__ void run_consumer(const AttentionParameters &params, Shared &shared,
                                                    Exchange &exchange, int warp, int lane) {
    run_role<RowScores, RowValues>(params, shared, exchange, warp, lane);
}

} // namespace latent
