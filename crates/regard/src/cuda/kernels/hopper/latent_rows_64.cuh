// The decode kernel for latent caches with 64 rows: rows are the M of both products.
#pragma once
#include "hopper/latent_scores.cuh"
#include "hopper/latent_values.cuh"

namespace latent {

// 64 rows: S = Q K^T. A thread has the scores of rows `row(0)` and `row(1)`: element 4 j + 2 h + e is that of row h and
// key 8 j + 2 (lane % 4) + e.
struct RowScores : ScoreWarpgroup {
    static constexpr int COLUMNS = KEYS / 4; // keys of a thread
    float row_max[2], row_sum[2];            // maxima of all keys, this thread's part of sums
    int products = 0;                        // which barrier says that the products are done

    __device__ __forceinline__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }

    __device__ __forceinline__ void begin(const Tile &tile) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_max[h] = -INF;
            row_sum[h] = 0.0f;
        }
        // All warps are done with the queries and the row bounds of the piece before.
        synchronize();
        int thread = threadIdx.x % 128;
        if (thread < ROWS) {
            int head, token;
            tile.find_row(params, min(first_row_of_cta() + thread, tile.rows - 1), head, token);
            exchange.visible[thread] = {visible_start(params, tile.seq, token), visible_end(params, tile.seq, token)};
        }
        load_queries(tile);
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            mma_qk([&](unsigned long long queries, unsigned long long keys, int keep) {
                Wgmma<KEYS>::mma_ss(scores, queries, keys, keep);
            });
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.products_done[products]));
            products ^= 1;
            modify_scores(piece.tile, key_tile * KEYS);
            softmax_step();
        }
    }

    // Dot products become scores.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key) {
        if (!scale_scores(tile, first_key)) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            VisibleKeys visible = exchange.visible[row(h)];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                int key = first_key + i / 2 * 8 + 2 * (lane & 3) + i % 2;
                if (key < visible.start || key >= visible.end) scores[i / 2 * 4 + 2 * h + i % 2] = -INF;
            }
        }
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory.
    __device__ __forceinline__ void softmax_step() {
        float tile_max[2], factor[2] = {1.0f, 1.0f};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            tile_max[h] = scores[2 * h];
#pragma unroll
            for (int i = 1; i < COLUMNS; i++) tile_max[h] = fmaxf(tile_max[h], scores[i / 2 * 4 + 2 * h + i % 2]);
        }
        bool rescales = __any_sync(~0u, tile_max[0] > row_max[0] + RESCALE_THRESHOLD ||
                                            tile_max[1] > row_max[1] + RESCALE_THRESHOLD);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (rescales) {
#pragma unroll
                for (int step = 1; step < 4; step *= 2)
                    tile_max[h] = fmaxf(tile_max[h], __shfl_xor_sync(~0u, tile_max[h], step));
                tile_max[h] = fmaxf(tile_max[h], row_max[h]);
                // An empty row uses 0 as its reference: -inf - -inf is NaN.
                factor[h] = exp2_fast(row_max[h] - (tile_max[h] == -INF ? 0.0f : tile_max[h]));
                row_max[h] = tile_max[h];
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
        unsigned own_lane = opaque(lane), to = probability_chunk(16 * warp + own_lane % 16, own_lane / 16);
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j += 2) store_pairs(to ^ j << 4, j, hopper::stmatrix_x4);
        if (lane % 4 == 0) {
#pragma unroll
            for (int h = 0; h < 2; h++) exchange.rescale[probs.index][row(h)] = factor[h];
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

// 64 rows: O = P V. Element [i][4 j + 2 h + e] of a thread's sums is row `row(h)`, and value dim 128 i + 8 j +
// 2 (lane % 4) + e of the warpgroup's.
struct RowValues : ValueWarpgroup {
    float out[OWN_CHUNKS][CHUNK_DIMS / 2];
    PipelineState<2> products = {1, 0}; // of the next K tile's scores

    __device__ __forceinline__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int k = 0; k < CHUNK_DIMS / 2; k++) out[i][k] = 0.0f;
    }

    __device__ __forceinline__ void rescale() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = exchange.rescale[probs.index][row(h)];
#pragma unroll
            for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
                for (int k = 0; k < CHUNK_DIMS / 4; k++) out[i][k / 2 * 4 + 2 * h + k % 2] *= factor;
        }
    }

    // O += P V; every chunk is released as soon as it was read. The second half of the products waits for those of the
    // next K tile's scores, if there is one: the tensor cores then have it while those scores become probabilities.
    __device__ __forceinline__ void multiply(bool has_next) {
        static_assert(OWN_CHUNKS == 2, "halves");
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) warpgroup_fence_operand(out[i]);
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            if (i == 1 && has_next)
                hopper::mbarrier_wait(shared_address(&shared.products_done[products.index]), products.phase);
            hopper::wgmma_fence();
            SharedTile<KEYS> values = {chunk_address(base, own_chunk(i))};
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
                Wgmma<CHUNK_DIMS>::mma_ss_transposed(out[i], probabilities(step), values.mn_major(step));
            hopper::wgmma_commit();
            hopper::wgmma_wait<0>();
            warpgroup_fence_operand(out[i]);
            release(own_chunk(i));
        }
        products.advance();
    }

    // Calls `store(dim, x, y)` for this thread's pairs of outputs of row h.
    template <class Store> __device__ __forceinline__ void for_each_pair(int h, Store store) const {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int j = 0; j < CHUNK_DIMS / 8; j++)
                store(i * CHUNK_DIMS + 8 * j, out[i][4 * j + 2 * h], out[i][4 * j + 2 * h + 1]);
    }

    // Stores a piece's outputs: to the workspace, or normalized as rows of the output.
    __device__ __forceinline__ void store_outputs(const Piece &piece) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int own_row = 16 * warp + (opaque(lane) >> 2) + 8 * h;
            if (first_row_of_cta() + own_row >= piece.tile.rows) continue;
            int first_dim = half * DIMS_PER_WARPGROUP + 2 * (lane & 3);
            bool whole = piece.is_whole();
            float factor = whole ? exchange.out_factor[own_row] : 1.0f;
            long long at = whole ? out_row(piece, own_row) + first_dim : 0;
            if (!whole || params.out_f32) {
                float *to = whole ? (float *)params.out.pointer + at : partial_row(piece, own_row) + first_dim;
                for_each_pair(h, [&](int dim, float x, float y) {
                    *(float2 *)(to + dim) = make_float2(__fmul_rn(x, factor), __fmul_rn(y, factor));
                });
            } else {
                unsigned short *to = (unsigned short *)params.out.pointer + at;
                for_each_pair(h, [&](int dim, float x, float y) {
                    *(unsigned *)(to + dim) =
                        E::pack(bound_output(__fmul_rn(x, factor)), bound_output(__fmul_rn(y, factor)));
                });
            }
        }
    }
};

} // namespace latent
