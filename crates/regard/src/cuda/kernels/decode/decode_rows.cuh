// Copies of K tiles in the common case: rows in runs of 16 keys. What a lane needs for its part is found once per tile,
// because the main loop of decode is short of instructions, not of registers.
#pragma once
#include "common/copy.cuh"
#include "decode/decode_shape.cuh"

// Rows of elements, which fill chunks of 16 bytes. Several lanes copy a row, the others the next rows. Rows may be
// shorter than DIM in the fallback: zeros follow.
template <class Side> struct ElementRows {
    static constexpr int DIM = Side::DIMS, PITCH = Side::PITCH, CHUNKS = Side::CHUNKS, LANES = CHUNKS % 8 == 0 ? 8 : 4,
                         AT_ONCE = 32 / LANES;
    static constexpr int ROW_ROUNDS = TILE_KEYS / AT_ONCE, COLUMN_ROUNDS = CHUNKS / LANES;
    static constexpr bool KEEPS_LANE = DIM <= 256; // long rows have no registers to spare

    unsigned long long from; // the lane's first chunk, or the tile's; without the offset of a run

    static __device__ __forceinline__ long long lane_offset(long long stride, int lane) {
        return lane / LANES * stride + lane % LANES * 16;
    }

    // The stride is in bytes, and the offsets of runs below.
    __device__ __forceinline__ void set(unsigned long long base, long long stride, int lane) {
        from = KEEPS_LANE ? base + lane_offset(stride, lane) : base;
    }

    // Starts the copies of a K tile into a pipeline stage. `dims`: of a row.
    template <class Worker> __device__ __forceinline__ void load(const Worker &w, unsigned to,
                                                                 const long long (&runs)[MMA_KEY_TILES],
                                                                 long long stride, int key_tile, int dims) const {
        int row = w.lane / LANES, column = w.lane % LANES * 16;
        int warp = WARPS_PER_GROUP > 1 ? threadIdx.x / 32 % WARPS_PER_GROUP : 0;
        unsigned keys = w.key_end - w.key_start, key = key_tile * TILE_KEYS + row - w.key_start;
        unsigned long long start = KEEPS_LANE ? from : from + lane_offset(stride, w.lane);
#pragma unroll
        for (int i = 0; i < ROW_ROUNDS; i++) {
            if (WARPS_PER_GROUP > 1 && i % WARPS_PER_GROUP != warp % ROW_ROUNDS) continue;
            unsigned long long source = start + runs[i * AT_ONCE / 16] + i * AT_ONCE % 16 * stride;
            bool present = key + i * AT_ONCE < keys;
#pragma unroll
            for (int j = 0; j < COLUMN_ROUNDS; j++) {
                bool in_row = !IS_FALLBACK || column + j * LANES * 16 < dims * Side::BYTES;
                int bytes = present && in_row ? 16 : 0;
                if (WARPS_PER_GROUP > ROW_ROUNDS && j % (WARPS_PER_GROUP / ROW_ROUNDS) != warp / ROW_ROUNDS) continue;
                unsigned place = swizzle(to, i * AT_ONCE % 8 + row, PITCH, column + j * LANES * 16 % 128);
                unsigned to_chunk = place + i * AT_ONCE / 8 * 8 * PITCH + j * LANES * 16 / 128 * 128;
                const void *chunk = (const void *)(source + j * LANES * 16);
                if (Side::ROW_BYTES % 128)
                    cp_async_alone(to_chunk, chunk, bytes);
                else
                    cp_async(to_chunk, chunk, bytes);
            }
        }
    }
};

// Rows of blocks, which start at multiples of 4, 8 or 16 bytes. Several lanes copy a row in whole chunks of 16 bytes,
// the others the next rows; what is left of a row is copied by one lane. Sources are without the offset of a run,
// places are in a pipeline stage.
template <class Side> struct BlockRows {
    static constexpr int PITCH = Side::PITCH, ALIGNMENT = Side::ALIGNMENT, CHUNKS = Side::CHUNKS;
    static constexpr int LANES = CHUNKS > 8 ? 8 : CHUNKS > 4 ? 4 : 2, AT_ONCE = 32 / LANES;
    static constexpr int COLUMN_ROUNDS = (CHUNKS - 1) / LANES, CHUNK_BYTES = COLUMN_ROUNDS * LANES * 16;
    static constexpr int REST = CHUNKS - COLUMN_ROUNDS * LANES; // chunks
    static_assert(REST <= 2 && CHUNK_BYTES <= Side::ROW_BYTES, "whole chunks, then one or two");
    static_assert(ALIGNMENT == 4 || Side::ROW_BYTES == CHUNK_BYTES + (ALIGNMENT == 8 ? 8 : 16 * REST), "then pieces");

    unsigned long long chunks, rest;
    unsigned chunks_to, rest_to;

    __device__ __forceinline__ void set(unsigned long long base, long long stride, int lane) {
        int row = lane / LANES, column = lane % LANES * 16;
        unsigned long long start = base + row * stride;
        chunks = (start & ~15ull) + column;
        chunks_to = row * PITCH + column;
        row = lane & 15;
        rest = base + row * stride;
        rest_to = lane * PITCH;
        if (ALIGNMENT == 8) {
            // A row off a multiple of 16 bytes begins with 8 bytes; another one ends with them.
            chunks += (start & 8) * 2;
            chunks_to += (start & 8) * 2;
            bool ends = !(rest & 8);
            rest_to += ends ? CHUNK_BYTES : 8;
            rest += ends ? CHUNK_BYTES : 0;
        } else if (ALIGNMENT == 16) {
            rest += CHUNK_BYTES;
            rest_to += CHUNK_BYTES;
        }
    }

    // Starts the copies of a K tile into a pipeline stage. Rows have DIM elements.
    template <class Worker> __device__ __forceinline__ void load(const Worker &w, unsigned to,
                                                                 const long long (&runs)[MMA_KEY_TILES],
                                                                 long long stride, int key_tile, int) const {
        int warp = WARPS_PER_GROUP > 1 ? threadIdx.x / 32 % WARPS_PER_GROUP : 0;
        unsigned keys = w.key_end - w.key_start, first = key_tile * TILE_KEYS - w.key_start, row = w.lane / LANES;
#pragma unroll
        for (int i = 0; i < TILE_KEYS / AT_ONCE; i++) {
            if (WARPS_PER_GROUP > 1 && i % WARPS_PER_GROUP != warp) continue;
            // Rows that far apart start equally far from a multiple of 16 bytes.
            unsigned long long source = chunks + runs[i * AT_ONCE / 16] + i * AT_ONCE % 16 * stride;
            int bytes = first + row + i * AT_ONCE < keys ? 16 : 0;
#pragma unroll
            for (int j = 0; j < COLUMN_ROUNDS; j++)
                cp_async_sectors(to + chunks_to + i * AT_ONCE * PITCH + j * LANES * 16,
                                 (const void *)(source + j * LANES * 16), bytes);
        }
        if (WARPS_PER_GROUP > 1 && warp != WARPS_PER_GROUP - 1) return;
        if (TILE_KEYS < 32 && w.lane >= TILE_KEYS) return;
        static_assert(TILE_KEYS <= 32, "a lane per row");
        unsigned long long start = rest + (w.lane < 16 ? runs[0] : runs[MMA_KEY_TILES - 1]);
        bool present = first + w.lane < keys;
        if (ALIGNMENT == 8) {
            cp_async_eight(to + rest_to, (const void *)start, present);
        } else if (ALIGNMENT == 16) {
#pragma unroll
            for (int j = 0; j < REST; j++)
                cp_async_sectors(to + rest_to + j * 16, (const void *)(start + j * 16), present ? 16 : 0);
        } else {
            int bytes = present ? (int)(start & 15) + Side::ROW_BYTES - CHUNK_BYTES : 0;
#pragma unroll
            for (int j = 0; j < REST; j++) {
                int at = CHUNK_BYTES + j * 16;
                cp_async_sectors(to + rest_to + at, (const void *)((start & ~15ull) + at),
                                 clamp_int(bytes - 16 * j, 0, 16));
            }
        }
    }
};

template <class Side, bool BLOCKS = Side::HAS_BLOCKS> struct SideRows {
    typedef ElementRows<Side> Type;
};
template <class Side> struct SideRows<Side, true> {
    typedef BlockRows<Side> Type;
};
typedef SideRows<KeySide>::Type KeyRows;
typedef SideRows<ValueSide>::Type ValueRows;
