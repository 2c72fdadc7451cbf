// The loader warps of decode of many rows on Hopper: they find the pieces of work, and copy keys and values, with their
// scales, to shared memory, ahead of the consumers.
#pragma once
#include "common/paging.cuh"
#include "decode/decode_cache.cuh"
#include "decode/decode_schedule.cuh"
#include "hopper/decode_wgmma_softmax.cuh"
#if READS_CODES
#include "hopper/decode_wgmma_blocks.cuh"
#endif

namespace decode_wgmma {

static_assert(KEY_CLASS == VALUE_CLASS && KEY_PITCH == VALUE_PITCH && HEAD_DIM == VALUE_DIM,
              "code of a loader is that for keys and for values");
typedef KeySide Side;

struct CopiedKeys {
    int start, end, last_entry;
};

// Two of the loaders copy keys, two values: half of every K tile each, in two runs of 16. The first one finds the
// pieces.
struct Loader {
    static constexpr int HALF_KEYS = KEYS / 2, RUNS = HALF_KEYS / WARP_KEYS;

    const AttentionParameters &params;
    const CacheParameters &cache;
    int warp, lane;

    __device__ __forceinline__ bool has_values() const { return warp / 2; }
    // Its first key of a K tile.
    __device__ __forceinline__ int first_key(int key_tile) const { return key_tile * KEYS + warp % 2 * HALF_KEYS; }

    // The page-table entries of this warp's runs of a K tile, a lane each. Those past the last visible key are not
    // read.
    __device__ __forceinline__ int look_up(const Tile &tile, const CopiedRows &rows, int key_tile) const {
        if (!params.block_size) return 0;
        int key = first_key(key_tile) + read_lane() % RUNS * WARP_KEYS;
        return tile.table[min(page_index(params, key), rows.last_entry)];
    }

    // Copies keys of all pieces. `range`: of the CTA, in shared memory; what is left of it.
    __device__ __forceinline__ void run(CtaRange &range, const ScheduledCta &scheduled) {
        PieceReader<PIECES> pieces;
        unsigned place = shared_address(queues().loader_places[warp]);
        st_shared_word(place, 0);
        st_shared_word(place + 4, 0);
        bool first = true;
#pragma unroll 1
        for (;;) {
            if (warp == 0) find_piece(pieces.slot, range, scheduled, first);
            first = false;
            const Piece &piece = pieces.wait(queues());
            if (!piece.more) break;
            uint2 state = ld_shared_v2(place);
            RingState ring = {{(int)state.x, state.y}};
            __syncwarp(); // all lanes have read it
            load(piece, queues().rows[pieces.slot.index], ring);
            st_shared_word(place, ring.state.index);
            st_shared_word(place + 4, ring.state.phase);
            pieces.release(queues(), lane);
        }
    }

    // Finds the next piece, and hands it out. `first`: it is the CTA's first one.
    __device__ __forceinline__ void find_piece(PipelineState<PIECES> slot, CtaRange &range,
                                               const ScheduledCta &scheduled, bool first) const {
        WorkIterator<KEYS, true> work = {params, range, scheduled.sequence, first && is_scheduled(params)};
        Piece piece;
        CopiedRows rows;
        piece.more = work.next(piece);
        if (piece.more) {
            long long key_at, value_at;
            find_kv_start(params, piece.tile, key_at, value_at);
            piece.tile.key_base = params.keys.pointer + key_at * KeySide::BYTES;
            piece.tile.value_base = params.values.pointer + value_at * ValueSide::BYTES;
            piece.tile.table = page_table(params, piece.tile.sequence);
            rows = {piece.key_start,
                    piece.key_end,
                    params.block_size ? page_index(params, max(piece.key_end - 1, 0)) : 0,
                    0,
                    {{piece.tile.key_base, params.keys.strides.token * KeySide::BYTES},
                     {piece.tile.value_base, params.values.strides.token * ValueSide::BYTES}}};
        }
        hopper::mbarrier_wait(shared_address(&queues().piece_empty[slot.index]), slot.phase ^ 1);
        __syncwarp(); // all lanes have read the range
        if (lane == 0) {
            queues().pieces[slot.index] = piece;
            queues().rows[slot.index] = rows;
            range = work.range;
            hopper::mbarrier_arrive(shared_address(&queues().piece_full[slot.index]));
        }
        __syncwarp();
        // Those of the first are loaded at once.
        if (piece.more && !first) prefetch_queries<ROWS>(params, piece.tile, 0, lane);
    }

    // Copies this warp's keys, or values, of a piece.
    __device__ __forceinline__ void load(const Piece &piece, const CopiedRows &copied, RingState &ring) const {
        unsigned rows = shared_address(&copied) - shared_address(dynamic_shared);
        int key_tile = piece.first_tile(), end = piece.end_tile();
        // Neither does the preceding kernel write the page table if lengths are scheduled.
        if (!is_scheduled(params)) grid_dependency_wait();
        int entries = key_tile < end ? look_up(piece.tile, copied, key_tile) : 0;
        if (is_scheduled(params)) grid_dependency_wait();
#pragma unroll 1
        for (; key_tile < end; key_tile++) {
            int next = key_tile + 1 < end ? look_up(piece.tile, copied, key_tile + 1) : 0;
            unsigned base = read_base();
            ring.wait_empty(base);
            copy(piece.tile, base + rows, key_tile, ring.address(base), entries);
            ring.announce(base);
            entries = next;
        }
    }

    static __device__ __forceinline__ CopiedKeys read_keys(unsigned rows) {
        uint4 words = ld_shared_v4(rows);
        return {(int)words.x, (int)words.y, (int)words.z};
    }

    // Starts the copies of this warp's part of a K tile into a pipeline stage. `rows`: shared memory.
    __device__ __forceinline__ void copy(const Tile &tile, unsigned rows, int key_tile, unsigned stage,
                                         int entries) const {
        unsigned to = stage + (has_values() ? KEYS * KEY_PITCH : 0) + warp % 2 * HALF_KEYS * Side::PITCH;
#pragma unroll 1
        for (int run = 0; run < RUNS; run++) {
            CopiedKeys keys = read_keys(rows);
            uint4 side = ld_shared_v4(rows + 16 + (has_values() ? 16 : 0));
            unsigned long long from = side.x | (unsigned long long)side.y << 32;
            long long stride = (long long)(side.z | (unsigned long long)side.w << 32);
            int first = first_key(key_tile) + run * WARP_KEYS;
            if (params.block_size) {
                long long page = page_of(params, __shfl_sync(~0u, entries, run));
                long long page_stride = has_values() ? params.values.strides.batch : params.keys.strides.batch;
                int slot = page_slot(params, first, min(page_index(params, first), keys.last_entry));
                from += page * page_stride * Side::BYTES + slot * stride;
            } else {
                from += first * stride;
            }
            // Code for blocks is large.
            if (!Side::HAS_BLOCKS && first >= keys.start && first + WARP_KEYS <= keys.end)
                copy_rows<true>(to + run * WARP_KEYS * Side::PITCH, from, stride, keys, first);
            else
                copy_rows<false>(to + run * WARP_KEYS * Side::PITCH, from, stride, keys, first);
        }
#if READS_CODES
        if (Side::IS_BYTES && row_numbers().needs & (has_values() ? VALUES_SCALED : KEYS_SCALED))
            copy_scales(tile, stage + SCALE_OFFSET, read_keys(rows), first_key(key_tile) + read_lane(),
                        __shfl_sync(~0u, entries, read_lane() / WARP_KEYS));
#endif
    }

    // Rows of 16 keys from `first` on. Several lanes copy a row, the others the next rows. WHOLE: all of them are keys
    // of the piece; else the others become zeros.
    template <bool WHOLE> static __device__ __forceinline__ void
    copy_rows(unsigned to, unsigned long long from, long long stride, const CopiedKeys &visible, int first) {
        constexpr int PITCH = Side::PITCH;
        int lane = read_lane();
#if READS_CODES
        if constexpr (Side::HAS_BLOCKS)
            return copy_block_rows<Side>(to, from, stride, first - visible.start, visible.end - visible.start, lane);
#endif
        constexpr int CHUNKS = Side::CHUNKS, LANES = CHUNKS % 8 == 0 ? 8 : 4, AT_ONCE = 32 / LANES;
        int row = lane / LANES, column = lane % LANES * 16;
        unsigned keys = visible.end - visible.start, key = first + row - visible.start;
        const unsigned char *source = (const unsigned char *)from + row * stride + column;
        // Rows that are 8 apart are swizzled alike.
        unsigned places[2] = {swizzle(to, row, PITCH, column), swizzle(to, row + AT_ONCE % 8, PITCH, column)};
#pragma unroll
        for (int i = 0; i < WARP_KEYS; i += AT_ONCE) {
            int bytes = WHOLE || key + i < keys ? 16 : 0;
            unsigned place = places[i % 8 > 0] + i / 8 * 8 * PITCH;
#pragma unroll
            for (int j = 0; j < CHUNKS / LANES; j++) {
                static_assert(Side::HAS_BLOCKS || CHUNKS == LANES || LANES == 8, "128 bytes per round, or one");
                if (Side::ROW_BYTES % 128)
                    cp_async_alone(place + j * 128, source + j * LANES * 16, bytes);
                else
                    cp_async(place + j * 128, source + j * LANES * 16, bytes);
            }
            source += AT_ONCE * stride;
        }
    }

#if READS_CODES
    // Scales of the warp's keys, or values, a lane each. Those outside of the piece become zeros.
    __device__ __forceinline__ void copy_scales(const Tile &tile, unsigned to, const CopiedKeys &visible, int key,
                                                int entry) const {
        const RowStrides &strides = has_values() ? cache.value_scale_strides : cache.key_scale_strides;
        const float *from = scale_start(params, tile, has_values() ? cache.value_scales : cache.key_scales, strides);
        if (params.block_size) {
            int slot = page_slot(params, key, min(page_index(params, key), visible.last_entry));
            from += page_of(params, entry) * strides.batch + slot * strides.token;
        } else {
            from += key * strides.token;
        }
        bool present = key >= visible.start && key < visible.end;
        cp_async_word(to + ((has_values() ? KEYS : 0) + key % KEYS) * 4, from, present);
    }
#endif
};

} // namespace decode_wgmma
