// The shape of a thread block's work, from what a kernel is specialised on: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, ROWS and
// GENERAL.
#pragma once
#include "common/element.cuh"

// Strips of 32 keys where two fit into the ring of each of a block's groups, else of 16: more products in a row, fewer
// waits. (One row and small strips finish sooner.) shape.rs has the same.
constexpr int MMA_KEY_TILES = ELEMENT_TYPE != F32 && HEAD_DIM + VALUE_DIM <= (ROWS == 8 ? 128 : 256) ? 2 : 1;

typedef Element<ELEMENT_TYPE> E;
typedef E::Bits Bits;

// A kernel that is not general takes plain scores (scale, length, causality, window) and whole aligned rows, 16
// neighbouring keys at a time (LOAD_PAGE_ALIGNED_16). It does what the general one does, to the bit, with half the
// code: a short call's time is mostly that of fetching instructions.
constexpr bool IS_GENERAL = GENERAL;

constexpr bool WIDE_ELEMENT = ELEMENT_TYPE == F32;
constexpr int ELEMENT_BYTES = WIDE_ELEMENT ? 4 : 2;
constexpr int CHUNK = 16 / ELEMENT_BYTES; // elements in 16 bytes

// Keys that a group of warps takes at a time.
constexpr int TILE_KEYS = 16 * MMA_KEY_TILES;

// Rows in shared memory start at multiples of 128 bytes (copies into padded rows are 5% slower). To spread 8 rows over
// all banks anyway, chunk c of 16 bytes of row r lies where chunk c ^ (r % 8) would: see `swizzle`.
constexpr int KEY_PITCH = (HEAD_DIM * ELEMENT_BYTES + 127) / 128 * 128;
constexpr int VALUE_PITCH = (VALUE_DIM * ELEMENT_BYTES + 127) / 128 * 128;
constexpr int STAGE_BYTES = TILE_KEYS * (KEY_PITCH + VALUE_PITCH);
// One stage where it is so large that two would not fit into a consumer GPU's 99 KB. shape.rs has the same.
constexpr int STAGES = STAGE_BYTES > 48 * 1024 ? 1 : 2;
constexpr int PREFETCH_DISTANCE = STAGES - 1; // strips that copies are ahead of products
constexpr int OUT_PITCH = VALUE_DIM + 4;      // floats

// Warps of a group share its keys. They divide the rows and, where one warp's registers cannot hold them, the value
// dims.
constexpr int VALUE_WARPS = VALUE_DIM > 256 ? 2 : 1;
constexpr int WARP_VALUE_DIM = VALUE_DIM / VALUE_WARPS;
constexpr int MAX_MMA_ROW_TILES = WARP_VALUE_DIM <= 128 ? 2 : 1;
constexpr int MMA_ROW_TILES = ROWS / 8 < MAX_MMA_ROW_TILES ? ROWS / 8 : MAX_MMA_ROW_TILES;
constexpr int ROW_WARPS = ROWS / 8 / MMA_ROW_TILES;
constexpr int WARPS_PER_GROUP = ROW_WARPS * VALUE_WARPS;
constexpr int THREADS_PER_GROUP = WARPS_PER_GROUP * 32;

constexpr int KEY_STEPS = HEAD_DIM / 16;
constexpr int MMA_VALUE_TILES = WARP_VALUE_DIM / 16;

// Scores of a key_tile: [k][n][e] belongs to key 16 k + lane / 4 + 8 (e / 2) and row 8 n + 2 (lane % 4) + e % 2 of the
// warp's.
typedef float Scores[MMA_KEY_TILES][MMA_ROW_TILES][4];
// The output: [v][n][e] belongs to the same row, and to a value dim that decode_mma.cuh and decode_fma.cuh decides.
typedef float Outputs[MMA_VALUE_TILES][MMA_ROW_TILES][4];

// The place of byte `at` (of a chunk's start) of a row: rows start at multiples of 128. Whole 128 bytes stay where they
// are: where a caller knows how many come before the chunk's own, they are better added afterwards, as part of an
// address.
static __device__ __forceinline__ unsigned swizzle(unsigned rows, int row, int pitch, int at) {
    return rows + row * pitch + (at ^ ((row & 7) << 4));
}
