// Loaders of the decode kernel for latent caches of mla656.
#pragma once
#include "common/formats.cuh"
#include "hopper/latent_keys.cuh"
#include "hopper/records_instructions.cuh"

namespace latent {

// The parameters of the cache, which follow those of the call: as touch_parameters.
static __device__ __forceinline__ void touch_cache(const CacheParameters &cache) {
    int touched = ((const int *)&cache)[min(threadIdx.x / 32 * 16, (unsigned)sizeof(CacheParameters) / 4 - 1)];
    asm volatile("" ::"r"(touched));
}

// A loader warp: takes halves of K tiles in turn with the others, a lane per key. ARE_E4M3: keys are rows of e4m3
// codes, which become records.
template <bool ARE_E4M3> struct RecordLoader : KeyLoader {
    // Sets the address of a key, or of entry `key` of the tile's list; false if the list has no key there.
    __device__ __forceinline__ bool find_address(const Tile &tile, int key, unsigned long long &at) const {
        constexpr int ELEMENT_BYTES = ARE_E4M3 ? 1 : RECORD_BYTES;
#if LISTS
        ListedKey listed = find_listed_key(params, tile, key);
        if (listed.key < 0) return false;
        at = listed_key_address(params, tile, listed, ELEMENT_BYTES);
#else
        KeyPlace place;
        if (params.block_size) {
            find_paged_place(params, tile, key, place);
            place.batch = page_of(params, place.batch);
        } else {
            place = contiguous_place(params, tile, key);
        }
        const RowStrides &strides = params.keys.strides;
        at += (place.batch * strides.batch + place.token * strides.token + tile.kv_head * strides.head) * ELEMENT_BYTES;
#endif
        return true;
    }

    // Makes a record of a row of e4m3 codes, but for the codes of the value dims: scales of 1, and bf16.
    static __device__ __forceinline__ void store_rest(unsigned to, unsigned long long row) {
        constexpr unsigned ONE = 0x3f800000;
        st_shared_v4(to + SCALES_BYTE, make_uint4(ONE, ONE, ONE, ONE));
#pragma unroll(ROWS == 16 ? 4 : 1)
        for (int i = 0; i < (HEAD_DIM - VALUE_DIM) / 16; i++) {
            uint4 codes = *(const uint4 *)(row + VALUE_DIM + 16 * i), x, y;
            Codes<CacheFormat::E4M3>::to_bf16(codes.x, x.x, x.y);
            Codes<CacheFormat::E4M3>::to_bf16(codes.y, x.z, x.w);
            Codes<CacheFormat::E4M3>::to_bf16(codes.z, y.x, y.y);
            Codes<CacheFormat::E4M3>::to_bf16(codes.w, y.z, y.w);
            st_shared_v4(to + ROTARY_BYTE + 32 * i, x);
            st_shared_v4(to + ROTARY_BYTE + 32 * i + 16, y);
        }
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
             is_run = __all_sync(~0u, present && is_next && !ARE_E4M3);
        bool copies = is_run ? lane == 0 : present;
        constexpr int KEY_BYTES = ARE_E4M3 ? VALUE_DIM : RECORD_BYTES; // that are copied
        int bytes = is_run ? STAGE_BYTES : KEY_BYTES;
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
        if constexpr (ARE_E4M3) {
            // Copies first: the other loads are waited for.
            if (copies) records::bulk_load(policy, to, at, bytes, full);
            if (present) store_rest(to, at);
            __syncwarp();
        }
        if (lane == 0) {
#if LISTS
            shared.present[stage.index].of_tile = all_present;
#endif
            hopper::mbarrier_arrive_expect_tx(full, __popc(all_present) * KEY_BYTES);
        }
        __syncwarp();
        if (copies && !ARE_E4M3) records::bulk_load(policy, to, at, bytes, full);
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
