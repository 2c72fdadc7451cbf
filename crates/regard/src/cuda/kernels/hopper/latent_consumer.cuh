// Shared by all consumers of the decode kernel for latent caches: queries, chunks of values, and the ends of pieces.
#pragma once
#include "hopper/latent_partials.cuh"

namespace latent {

struct Consumer {
    const AttentionParameters &params;
    Shared &shared;
    Exchange &exchange;
    unsigned base;  // of shared memory
    int warpgroup;  // value warpgroups have a half of the value dims each
    int warp, lane; // warp within the warpgroup

    ChunkState chunks; // of the next K tile
    PieceReader<PIECES> pieces;

    // Starts copies of queries of the CTA's rows, as wgmma reads them: a warp those of rows `index`, `index +
    // QUERY_WARPS`, ...
    __device__ __forceinline__ void request_queries(const Tile &tile, int index) const {
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
        // A lane per row finds where it is.
        int own_row = first_row_of_cta() + index + lane * QUERY_WARPS, head, token;
        bool present = own_row < tile.rows;
        tile.find_row(params, present ? own_row : 0, head, token);
        long long own_offset = tile.sequence * params.query.strides.batch +
                               (long long)(tile.seq.q_start + token) * params.query.strides.token +
                               head * params.query.strides.head;
        unsigned all_present = __ballot_sync(~0u, present);
#pragma unroll 1
        for (int i = 0; i < ROWS / QUERY_WARPS; i++) {
            const unsigned short *from =
                (const unsigned short *)params.query.pointer + __shfl_sync(~0u, own_offset, i) + lane * 8;
            int row = index + i * QUERY_WARPS, bytes = all_present >> i & 1 ? 16 : 0;
#pragma unroll
            for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 32)
                if (chunk + 32 <= HEAD_DIM / 8 || lane < HEAD_DIM / 8 - chunk)
                    cp_async(query.chunk(row, chunk + lane), from + chunk * 8, bytes);
        }
        cp_async_commit();
    }
    static __device__ __forceinline__ void await_queries() {
        cp_async_wait<0>();
        hopper::fence_proxy_async();
    }

    // Chunk i of this warpgroup's half of the value dims of a K tile.
    __device__ __forceinline__ PipelineState<CHUNKS> own_chunk(const ChunkState &tile, int i) const {
        return tile.at(i * VALUE_WARPGROUPS + warpgroup);
    }

    // Waits for a chunk. A warpgroup with scores has waited for the K tile; every reader of loaded data must. wgmma
    // needs a fence to read data of cp.async, and none to read data of TMA.
    __device__ __forceinline__ void wait_chunk(const PipelineState<CHUNKS> &chunk) const {
        hopper::mbarrier_wait(shared_address(&shared.full[chunk.index]), chunk.phase);
        if (LISTS) hopper::fence_proxy_async();
    }
    __device__ __forceinline__ void wait_rest(const PipelineState<REST_STAGES> &rest) const {
        hopper::mbarrier_wait(shared_address(&shared.rest_full[rest.index]), rest.phase);
        if (LISTS) hopper::fence_proxy_async();
    }
    __device__ __forceinline__ void wait_chunks(const ChunkState &tile) const {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) wait_chunk(own_chunk(tile, i));
    }

    __device__ __forceinline__ void release(const PipelineState<CHUNKS> &chunk) const {
        arrive_at_all(shared.empty[chunk.index], lane);
    }

    // 0 * NaN = NaN, so values that the piece does not have are zeroed.
    __device__ __forceinline__ void zero_others(const Piece &piece, int first_key, const ChunkState &tile) const {
        // Loaders that copy keys one by one zero them.
        if (!LISTS && UNLIKELY(first_key < piece.key_start || first_key + KEYS > piece.key_end)) {
            wait_chunks(tile);
#pragma unroll 1
            for (int i = 0; i < OWN_CHUNKS; i++) {
                unsigned keys = chunk_address(base, own_chunk(tile, i));
#pragma unroll 1
                for (int at = threadIdx.x % 128; at < CHUNK_BYTES / 16; at += 128) {
                    int key = first_key + at / 8 % KEYS;
                    if (key < piece.key_start || key >= piece.key_end)
                        st_shared_v4(keys + at * 16, make_uint4(0, 0, 0, 0));
                }
            }
            hopper::fence_proxy_async();
            hopper::named_barrier_sync(VALUES_BARRIER + warpgroup, 128);
        }
    }

    // The CTA's state of a part of a tile in the workspace.
    __device__ __forceinline__ PartialTile partial_tile(const Piece &piece) const {
        return {partial_state(params, part_index(), piece.starts_here ? 0 : 1)};
    }

    // The outputs of a row of the CTA there.
    __device__ __forceinline__ PartialOutput *partial_row(const Piece &piece, int row) const {
        return partial_tile(piece).outputs(first_row_of_cta() + row);
    }

    // Offset of a row of the CTA in the output.
    __device__ __forceinline__ long long out_row(const Piece &piece, int row) const {
        int head, token;
        piece.tile.find_row(params, first_row_of_cta() + row, head, token);
        return out_offset(params, piece.tile, head, token);
    }

    // A row's state at the end of a piece: to the workspace, or into the LSE. Returns the factor of its outputs,
    // which is subnormal, but not 0, next to a large sink: two factors would be code that short calls fetch in vain.
    __device__ __forceinline__ float finish_row(const Piece &piece, int row_of_cta, State state, bool stores) const {
        int row = first_row_of_cta() + row_of_cta;
        if (row >= piece.tile.rows) return 1.0f;
        if (piece.is_whole()) {
            int head, token;
            piece.tile.find_row(params, row, head, token);
            FinalizedRow finalized =
                finalize_row(params, state, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
            if (params.lse.pointer && stores) store_lse(params, piece.tile, head, token, finalized.lse);
            return finalized.factors.first * finalized.factors.second;
        }
        if (stores) {
            PartialTile partial = partial_tile(piece);
            *partial.max(row) = state.max;
            *partial.sum(row) = state.sum;
        }
        return 1.0f;
    }

    // Counts a part of a tile for `combine`. One warpgroup calls this.
    __device__ __forceinline__ void count(const Piece &piece) const {
        if (threadIdx.x % 128 == 0)
            count_part(params, piece.tile, piece.starts_here, piece.first_part, piece.last_part);
    }
};

} // namespace latent
