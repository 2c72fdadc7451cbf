// The value warpgroups of the decode kernel for latent caches.
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// A value warpgroup: O^T = V^T P^T for half of the value dims. Element [i][4 j + 2 h + e] of a thread's sums is value
// dim 64 i + 16 warp + lane / 4 + 8 h of the warpgroup's, and row 8 j + 2 (lane % 4) + e.
struct ValueWarpgroup {
    const AttentionParameters &params;
    Shared &shared;
    unsigned base;  // of shared memory
    int half;       // which value warpgroup
    int warp, lane; // warp within it

    ChunkState chunks;
    PipelineState<PROB_STAGES> probs;
    PieceReader pieces;
    unsigned factor_phase = 0;
    float out[VALUE_SUBTILES][ROWS / 2];

    // This warpgroup's chunk i of the current K tile.
    __device__ __forceinline__ PipelineState<CHUNKS> own_chunk(int i) const {
        return chunks.at(i * VALUE_WARPGROUPS + half);
    }

    __device__ __forceinline__ void rescale() {
        const float *factors = shared.rescale[probs.index];
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

    // 0 * NaN = NaN, so values that the piece does not have are zeroed.
    __device__ __forceinline__ void zero_others(const Piece &piece, int first_key) const {
        if (first_key >= piece.key_start && first_key + KEYS <= piece.key_end) return;
#pragma unroll 1
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(i));
#pragma unroll 1
            for (int at = threadIdx.x % 128; at < CHUNK_BYTES / 16; at += 128) {
                int key = first_key + at / 8 % KEYS;
                if (key < piece.key_start || key >= piece.key_end) st_shared_v4(keys + at * 16, make_uint4(0, 0, 0, 0));
            }
        }
        hopper::fence_proxy_async();
        hopper::named_barrier_sync(VALUES_BARRIER + half, 128);
    }

    // O^T += V^T P^T; every chunk is released as soon as it was read.
    __device__ __forceinline__ void mma_pv() {
        SharedTile<ROWS> p = {base + PROBS_OFFSET + probs.index * PROB_BYTES};
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(i));
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
                for (int j = 0; j < CHUNK_SUBTILES; j++)
                    Wgmma<ROWS>::mma_ss_rows_transposed(out[i * CHUNK_SUBTILES + j],
                                                        SharedTile<KEYS>{keys + j * SUBTILE_BYTES}.mn_major(step),
                                                        p.k_major(step));
            hopper::wgmma_commit();
        }
        static_assert(OWN_CHUNKS == 2, "the waits below");
        hopper::wgmma_wait<1>();
        release(own_chunk(0));
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        release(own_chunk(1));
    }

    __device__ __forceinline__ void release(const PipelineState<CHUNKS> &chunk) const {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.empty[chunk.index]));
    }

    // Calls `store(row of the CTA, f)` for this thread's rows that exist, one after another; `f(each)` calls
    // `each(dim, output)` for the thread's outputs of the row.
    template <class Store> __device__ __forceinline__ void for_each_row(const Piece &piece, Store store) const {
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            int own_lane = opaque(lane), row = c / 2 * 8 + 2 * (own_lane & 3) + c % 2;
            int first_dim = half * DIMS_PER_WARPGROUP + 16 * warp + (own_lane >> 2);
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
            float *partial = partial_state(params, part_index(), piece.starts_here ? 0 : 1) + 2 * TILE_ROWS;
            for_each_row(piece, [&](int row, auto outputs) {
                float *to = partial + (first_row_of_cta() + row) * VALUE_DIM;
                outputs([&](int dim, float x) { to[dim] = x; });
            });
            return;
        }
        for_each_row(piece, [&](int row, auto outputs) {
            int head, token;
            piece.tile.find_row(params, first_row_of_cta() + row, head, token);
            float factor = shared.out_factor[row];
            long long at = out_offset(params, piece.tile, head, token);
            if (params.out_f32) {
                float *to = (float *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = __fmul_rn(x, factor); });
            } else {
                unsigned short *to = (unsigned short *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = E::from_float(bound_output(__fmul_rn(x, factor))); });
            }
        });
    }

    __device__ __forceinline__ void run() {
        grid_dependency_wait();
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) return;
#pragma unroll
            for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
                for (int k = 0; k < ROWS / 2; k++) out[i][k] = 0.0f;
            int end = piece.end_tile();
#pragma unroll 1
            for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
                hopper::mbarrier_wait(shared_address(&shared.probs_full[probs.index]), probs.phase);
                if (*(const int *)shared.rescales[probs.index]) rescale();
                // The score warpgroup has waited for the K tile; so must everyone who reads what TMA wrote.
#pragma unroll
                for (int i = 0; i < OWN_CHUNKS; i++)
                    hopper::mbarrier_wait(shared_address(&shared.full[own_chunk(i).index]), own_chunk(i).phase);
                zero_others(piece, key_tile * KEYS);
                mma_pv();
                if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_empty[probs.index]));
                chunks.advance(TILE_CHUNKS);
                probs.advance();
            }
            hopper::mbarrier_wait(shared_address(&shared.factor_full), factor_phase);
            factor_phase ^= 1;
            store_outputs(piece);
            __syncwarp();
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_empty));
            if (is_counted(params, piece)) hopper::named_barrier_arrive(CONSUMERS_BARRIER, CONSUMER_THREADS);
            pieces.release(shared, lane);
        }
    }
};

} // namespace latent
