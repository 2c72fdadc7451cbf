// Loaders of the decode kernel for latent caches of mla656.
#pragma once
#include "hopper/latent_keys.cuh"
#include "hopper/records_instructions.cuh"

namespace latent {

// A loader warp: takes halves of K tiles in turn with the others, a lane per key.
struct RecordLoader : KeyLoader {
    // Sets the address of a key, or of entry `key` of the tile's list; false if the list has no key there.
    __device__ __forceinline__ bool find_address(const Tile &tile, int key, unsigned long long &at) const {
#if LISTS
        ListedKey listed = find_listed_key(params, tile, key);
        if (listed.key < 0) return false;
        at = listed_key_address(params, tile, listed, RECORD_BYTES);
#else
        KeyPlace place;
        if (params.block_size) {
            find_paged_place(params, tile, key, place);
            place.batch = page_of(params, place.batch);
        } else {
            place = contiguous_place(params, tile, key);
        }
        const RowStrides &strides = params.keys.strides;
        at += (place.batch * strides.batch + place.token * strides.token + tile.kv_head * strides.head) * RECORD_BYTES;
#endif
        return true;
    }

    // Loads half a K tile into a stage, when it is free.
    __device__ __forceinline__ void load(const Piece &piece, int half, const PipelineState<CHUNKS> &stage) const {
        int key = half * STAGE_KEYS + lane;
        bool present = key >= piece.key_start && key < piece.key_end;
        unsigned long long at = params.keys.pointer;
        if (present) present = find_address(piece.tile, key, at);
        unsigned all_present = __ballot_sync(~0u, present);
        // Records one after another are one copy: many small ones are slower.
        bool is_next = at == __shfl_sync(~0u, at, 0) + lane * RECORD_BYTES,
             is_run = __all_sync(~0u, present && is_next);
        bool copies = is_run ? lane == 0 : present;
        int bytes = is_run ? STAGE_BYTES : RECORD_BYTES;
        unsigned to = base + CHUNKS_OFFSET + stage.index * STAGE_BYTES + lane * RECORD_BYTES;
        unsigned full = shared_address(&shared.full[stage.index]);
        hopper::mbarrier_wait(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
        if (UNLIKELY(~all_present)) {
            // 0 * NaN = NaN, so what the piece does not have is zeroed.
            if (!present) {
#pragma unroll 1
                for (int i = 0; i < RECORD_BYTES; i += 16) st_shared_v4(to + i, make_uint4(0, 0, 0, 0));
                hopper::fence_proxy_async();
            }
            __syncwarp();
        }
        if (lane == 0) {
#if LISTS
            shared.present[stage.index].of_tile = all_present;
#endif
            hopper::mbarrier_arrive_expect_tx(full, __popc(all_present) * RECORD_BYTES);
        }
        __syncwarp();
        if (copies) records::bulk_load(policy, to, at, bytes, full);
    }

    __device__ __forceinline__ void run() {
        // If the lengths are scheduled, the page table is not written by the preceding kernel either.
        bool waits = LISTS || !is_scheduled(params);
        if (waits) grid_dependency_wait();
        PieceReader<PIECES> pieces;
        PipelineState<CHUNKS> stage;
        int turn = 0;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            if (!waits) grid_dependency_wait();
            waits = true;
            int end = 2 * piece.end_tile();
#pragma unroll 1
            for (int half = 2 * piece.first_tile(); half < end; half++) {
                if (turn == index) load(piece, half, stage);
                turn = turn == LOADERS - 1 ? 0 : turn + 1;
                stage.advance();
            }
            pieces.release(shared, lane);
        }
    }
};

} // namespace latent
