// Score warpgroups of the decode kernel for latent caches, with 16 rows or over records of mla656: Q K^T, the online
// softmax, and P^T for the value warpgroups.
#pragma once
#include "hopper/latent_consumer.cuh"

namespace latent {

// A thread has the scores of two keys, and of COLUMNS rows: element 4 j + 2 h + e is key 16 warp + lane / 4 + 8 h, row
// 8 j + 2 (lane % 4) + e. Column 2 j + e is that row.
struct ScoreWarpgroup : Consumer {
    static constexpr int SCORES = ROWS * KEYS / 128; // of a thread
    static constexpr int COLUMNS = ROWS / 4;

    PipelineState<REST_STAGES> rest;
    PipelineState<PROB_STAGES> probs;
    unsigned factor_phase = 0;
    float scores[SCORES];
#if LISTS
    unsigned long long present; // keys of the K tile that exist and are seen
#endif
#if CACHE
    float score_scale; // of dot products, with the scale of all keys
#endif

    // The number of this score warpgroup.
    __device__ __forceinline__ int group() const { return SCORE_WARPGROUPS > 1 ? warpgroup - VALUE_WARPGROUPS : 0; }

    __device__ __forceinline__ void synchronize() const { hopper::named_barrier_sync(SCORES_BARRIER + group(), 128); }

    __device__ __forceinline__ int row_of(int column) const { return column / 2 * 8 + 2 * (lane & 3) + column % 2; }

    // Before the first piece.
    __device__ __forceinline__ void start() {}

    // Multiplies queries by the keys of the next K tile; `multiply(sum, queries, keys, keep)` issues the products of 16
    // dims.
    template <class Multiply> __device__ __forceinline__ void mma_qk(Multiply multiply) {
        // Descriptors that were computed ahead of the loop would be spilled.
        unsigned base = opaque(this->base);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = chunks.at(i);
            wait_chunk(chunk);
            SharedTile<KEYS> keys = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < CHUNK_DIMS / 16; step++) {
                unsigned long long own = queries.k_major(first_dim_of(i) / 16 + step);
                multiply(scores, own, keys.k_major(step), i + step);
            }
        }
        wait_rest(rest);
        SharedTile<KEYS> keys = {base + REST_OFFSET + rest.index * REST_BYTES};
#pragma unroll
        for (int step = 0; step < REST_SUBTILES * 4; step++)
            multiply(scores, queries.k_major(VALUE_DIM / 16 + step), keys.k_major(step), 1);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
#if LISTS
        present = shared.present[rest.index].of_tile;
        __syncwarp();
#endif
        arrive_at_all(shared.rest_empty[rest.index], lane);
        chunks.advance(TILE_CHUNKS);
        rest.advance();
    }

    // The address of eight probabilities of a row, from key 8 * `chunk` on. `tile`: of those for each chunk of values.
    __device__ __forceinline__ unsigned probability_chunk(int tile, int row, int chunk) const {
        return SharedTile<ROWS>{base + PROBS_OFFSET}.chunk(row, (probs.index * PROB_TILES + tile) * (KEYS / 8) + chunk);
    }

    // Dot products become scores, in units of log2; whether some row does not see some key of the K tile.
    __device__ __forceinline__ bool scale_scores(const Tile &tile, int first_key) {
#if CACHE
        float scale = score_scale;
#else
        float scale = params.scale * LOG2_E;
#endif
#pragma unroll
        for (int i = 0; i < SCORES; i++) scores[i] = __fmul_rn(scores[i], scale);
        return first_key < tile.every_start || first_key + KEYS > tile.every_end;
    }

#if !LISTS
    // Hides the keys of a K tile that rows do not see.
    __device__ __forceinline__ void hide_unseen(const Tile &tile, int first_key) {
        // Bit 2 c + half: whether row `row_of(c)` sees the key. Not unrolled, because it rarely runs.
        unsigned visible = 0;
#pragma unroll 1
        for (int c = 0; c < COLUMNS; c++) {
            int head, token, key = first_key + 16 * warp + (lane >> 2);
            tile.find_row(params, min(first_row_of_cta() + row_of(c), tile.rows - 1), head, token);
            KeyRange seen = tile.keys_of(params, token);
            visible |= (unsigned)(key >= seen.start && key < seen.end) << 2 * c;
            visible |= (unsigned)(key + 8 >= seen.start && key + 8 < seen.end) << 2 * c + 1;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (!(visible >> 2 * c + half & 1)) scores[c / 2 * 4 + 2 * half + c % 2] = -INF;
    }
#endif

    // Waits until the value warpgroups are done with the probabilities before.
    __device__ __forceinline__ void wait_probs_empty() const {
        hopper::mbarrier_wait(shared_address(&shared.probs_empty[probs.index]), probs.phase ^ 1);
    }

    // Combines a number per row over all threads that have the row, by `f`, and leaves it in `exchange.rows`. It rarely
    // runs, so its code is short: through shared memory, where the next probabilities will be.
    template <class F> __device__ __forceinline__ void reduce_rows(const float (&x)[COLUMNS], F f) {
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
            exchange.rows[group()][thread] = combined;
        }
        synchronize();
    }

    // Hands the probabilities to the value warpgroups. `rescales`: whether a factor of this warp's is not 1.
    __device__ __forceinline__ void publish(bool rescales) {
        if (lane == 0) shared.rescales[probs.index][warp] = rescales;
        hopper::fence_proxy_async();
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_full[probs.index]));
#pragma unroll
        for (int i = 0; i < SCORE_WARPGROUPS; i++) probs.advance();
    }

    // Waits until the value warpgroups are done with the factors of the piece before.
    __device__ __forceinline__ void wait_factor_empty() {
        hopper::mbarrier_wait(shared_address(&shared.factor_empty), factor_phase ^ 1);
        factor_phase ^= 1;
    }

    __device__ __forceinline__ void publish_factors() const {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_full));
    }
};

// All pieces of work of a score warpgroup.
template <class Rows> static __device__ __forceinline__ void run_scores(Rows &rows) {
    rows.start();
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = rows.pieces.wait(rows.shared);
        if (!piece.more) return;
        rows.begin(piece.tile);
        rows.run_tiles(piece);
        rows.finish_rows(piece);
        if (is_counted(rows.params)) {
            hopper::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_THREADS);
            if (rows.group() == 0) rows.count(piece);
        }
        rows.pieces.release(rows.shared, rows.lane);
    }
}

} // namespace latent
