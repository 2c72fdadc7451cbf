// The score warpgroup of the decode kernel for latent caches: Q K^T, the online softmax, and P^T for the value
// warpgroups.
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// State and steps common to both kinds of score warpgroups.
struct ScoreWarpgroup {
    static constexpr int SCORES = ROWS * KEYS / 128; // of a thread

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
    float scores[SCORES];

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

    // Multiplies queries by the keys of the next K tile; `multiply(queries, keys, keep)` issues the products of 16
    // dims.
    template <class Multiply> __device__ __forceinline__ void mma_qk(Multiply multiply) {
        // Descriptors that were computed ahead of the loop would be spilled.
        unsigned base = opaque(this->base);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = chunks.at(i);
            hopper::mbarrier_wait(shared_address(&shared.full[chunk.index]), chunk.phase);
            SharedTile<KEYS> keys = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < CHUNK_DIMS / 16; step++)
                multiply(queries.k_major(first_dim_of(i) / 16 + step), keys.k_major(step), i + step);
        }
        hopper::mbarrier_wait(shared_address(&shared.rest_full[rest.index]), rest.phase);
        SharedTile<KEYS> keys = {base + REST_OFFSET + rest.index * REST_BYTES};
#pragma unroll
        for (int step = 0; step < REST_SUBTILES * 4; step++)
            multiply(queries.k_major(VALUE_DIM / 16 + step), keys.k_major(step), 1);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        arrive_at_all(shared.rest_empty[rest.index], lane);
        chunks.advance(TILE_CHUNKS);
        rest.advance();
    }

    // The address of eight probabilities of a row, from key 8 * `chunk` on.
    __device__ __forceinline__ unsigned probability_chunk(int row, int chunk) const {
        return SharedTile<ROWS>{base + PROBS_OFFSET}.chunk(row, probs.index * (KEYS / 8) + chunk);
    }

    // Dot products become scores, in units of log2; whether some row does not see some key of the K tile.
    __device__ __forceinline__ bool scale_scores(const Tile &tile, int first_key) {
        float scale = params.scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < SCORES; i++) scores[i] = __fmul_rn(scores[i], scale);
        return first_key < tile.every_start || first_key + KEYS > tile.every_end;
    }

    // Waits until the value warpgroups are done with the probabilities before.
    __device__ __forceinline__ void wait_probs_empty() const {
        hopper::mbarrier_wait(shared_address(&shared.probs_empty[probs.index]), probs.phase ^ 1);
    }

    // Stores the probabilities of elements 4 j to 4 j + 7, as pairs in four matrices.
    template <class Store> __device__ __forceinline__ void store_pairs(unsigned to, int j, Store store) const {
        const float *x = scores + 4 * j;
        store(to, E::pack(x[0], x[1]), E::pack(x[2], x[3]), E::pack(x[4], x[5]), E::pack(x[6], x[7]));
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
            exchange.out_factor[row_of_cta] = finalized.factor;
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

    // Counts the arrival of a part of a tile that has others, for `combine`, or combines them if this is the last one.
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
            unsigned before = count_arrival(arrivals);
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

// All pieces of work of a score warpgroup.
template <class Rows> static __device__ __forceinline__ void run_scores(Rows &rows) {
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = rows.pieces.wait(rows.shared);
        if (!piece.more) return;
        rows.begin(piece.tile);
        rows.run_tiles(piece);
        rows.finish_rows(piece);
        if (is_counted(rows.params, piece)) {
            hopper::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_THREADS);
            rows.finish_part(piece);
        }
        rows.pieces.release(rows.shared, rows.lane);
    }
}

} // namespace latent
