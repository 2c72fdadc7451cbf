// The shape of a prefill block's work, from what the kernel is specialised on:
//
// ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, GENERAL, and
// TILE_ROWS     tokens of a tile,
// TILE_KEYS     keys of a step,
// WARP_ROWS     rows that a warp has: 16 or 32,
// VALUE_WARPS   warps that share these rows: each has its part of a step's keys in the first product, and of the value
// dims in the second, SLOTS         how much shared memory holds: 4, keys and values of two steps; 2, of one step; 1,
// keys or values, BLOCKS        blocks that a multiprocessor's registers have to suffice for. THREADS and SHARED_BYTES,
// which the host launches it with, follow from these: they are checked here.
#pragma once
#include "common/element.cuh"

typedef Element<ELEMENT_TYPE> E;
typedef E::Bits Bits;

constexpr bool WIDE_ELEMENT = ELEMENT_TYPE == F32;
constexpr int ELEMENT_BYTES = WIDE_ELEMENT ? 4 : 2;
constexpr int CHUNK = 16 / ELEMENT_BYTES; // elements in 16 bytes

constexpr int MMA_ROW_TILES = WARP_ROWS / 16; // of the matrix unit's 16
constexpr int ROW_WARPS = TILE_ROWS / WARP_ROWS;
constexpr int WARPS = ROW_WARPS * VALUE_WARPS;
static_assert(THREADS == WARPS * 32, "as the host launches it");

constexpr int WARP_KEYS = TILE_KEYS / VALUE_WARPS;
constexpr int MMA_KEY_TILES = WARP_KEYS / 8; // of the matrix unit's 8
constexpr int WARP_VALUE_DIM = VALUE_DIM / VALUE_WARPS;
constexpr int MMA_VALUE_TILES = WARP_VALUE_DIM / 8;
static_assert(WARP_VALUE_DIM % 16 == 0 && TILE_KEYS % 16 == 0 && WARP_KEYS % 8 == 0, "whole tiles");

// The first product goes through head dims 32 bytes at a time, whatever the type.
constexpr int STEP_BYTES = 32;
constexpr int KEY_STEPS = HEAD_DIM * ELEMENT_BYTES / STEP_BYTES;

// Rows in shared memory start at multiples of 64 bytes. To spread 8 rows over all banks, the 16-byte chunks of a row
// change places: see `swizzle`.
constexpr int pitch_of(int bytes) { return (bytes + 63) / 64 * 64; }
constexpr int KEY_PITCH = pitch_of(HEAD_DIM * ELEMENT_BYTES);
constexpr int VALUE_PITCH = pitch_of(VALUE_DIM * ELEMENT_BYTES);
constexpr int PROB_PITCH = pitch_of(TILE_KEYS * ELEMENT_BYTES);

// Shared memory: 1024 bytes for what `Shared` has; queries; keys; values; and, where warps share rows, probabilities
// and maxima.
constexpr int QUERY_OFFSET = 1024;
constexpr int KEYS_OFFSET = QUERY_OFFSET + TILE_ROWS * KEY_PITCH;
constexpr int KEY_STAGE_BYTES = TILE_KEYS * KEY_PITCH, VALUE_STAGE_BYTES = TILE_KEYS * VALUE_PITCH;
constexpr int STAGES = SLOTS == 4 ? 2 : 1;
constexpr int VALUES_OFFSET = SLOTS == 1 ? KEYS_OFFSET : KEYS_OFFSET + STAGES * KEY_STAGE_BYTES;
constexpr int PROBS_OFFSET =
    SLOTS == 1 ? KEYS_OFFSET + (KEY_STAGE_BYTES > VALUE_STAGE_BYTES ? KEY_STAGE_BYTES : VALUE_STAGE_BYTES)
               : VALUES_OFFSET + STAGES * VALUE_STAGE_BYTES;
constexpr int MAXIMA_OFFSET = PROBS_OFFSET + (VALUE_WARPS > 1 ? TILE_ROWS * PROB_PITCH : 0);
static_assert(SHARED_BYTES == MAXIMA_OFFSET + (VALUE_WARPS > 1 ? TILE_ROWS * VALUE_WARPS * 4 : 0),
              "as the host launches it");

// Rows whose pitch is a multiple of 128 bytes start in the same bank: 8 of them need 8 places. Others alternate between
// two halves: 4 do.
constexpr int span_of(int pitch) { return pitch % 128 == 0 ? 128 : 64; }

template <int PITCH> static __device__ __forceinline__ int swizzle_bits(int row) {
    return span_of(PITCH) == 128 ? (row & 7) << 4 : (row & 6) << 3;
}

// The place of byte `at` (of a chunk's start) of a row.
template <int PITCH> static __device__ __forceinline__ unsigned swizzle(unsigned rows, int row, int at) {
    return rows + row * PITCH + (at ^ swizzle_bits<PITCH>(row));
}

// The same, `bytes` (a multiple of 32) further in a row, from the place of its first or second chunk.
template <int PITCH> static __device__ __forceinline__ unsigned advance_swizzled(unsigned place, int bytes) {
    return (place ^ (bytes % span_of(PITCH))) + bytes / span_of(PITCH) * span_of(PITCH);
}

// Scores: [j][e] as prefill_scores.cuh has it. Outputs likewise, with value dims for keys.
typedef float Scores[MMA_ROW_TILES][MMA_KEY_TILES][4];
typedef float Outputs[MMA_ROW_TILES][MMA_VALUE_TILES][4];
