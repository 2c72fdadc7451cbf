// Tile shapes and shared-memory layout of a decode kernel, from its macros: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM,
// TILE_ROWS, FALLBACK, CACHE where keys and values are not stored as queries are, and HEADS where a tile has several
// key/value heads.
#pragma once
#include "common/cache_class.cuh"
#include "common/element.cuh"

typedef Element<ElementType(ELEMENT_TYPE)> E;
typedef E::Bits Bits;

constexpr bool WIDE_ELEMENT = ElementType(ELEMENT_TYPE) == ElementType::F32;
constexpr int ELEMENT_BYTES = WIDE_ELEMENT ? 4 : 2;
constexpr int CHUNK = 16 / ELEMENT_BYTES; // elements per 16-byte chunk

// Adjacent key/value heads of a tile, which the parameters count as one with the rows of all: each has one warp of a
// group, and up to 8 rows. Rows of q8_0 and q4_0 share sectors with those of the next head, and are copied together.
#ifndef HEADS
#define HEADS 1
#endif
constexpr int TILE_HEADS = HEADS;
static_assert(TILE_HEADS == 1 || (TILE_ROWS == 8 * TILE_HEADS && !FALLBACK), "8 rows per head, in runs of 16 keys");

// An element of rows of a class that has no blocks.
template <bool BYTES> struct StoredElement {
    typedef Bits Type;
};
template <> struct StoredElement<true> {
    typedef unsigned char Type;
};

// How rows of keys, or of values, are stored, and how they lie in shared memory.
template <CacheClass CLASS, int DIM> struct Side {
    static constexpr int DIMS = DIM;
    static constexpr bool IS_BYTES = CLASS == CacheClass::Bytes, IS_Q8_0 = CLASS == CacheClass::Q8_0;
    static constexpr bool HAS_BLOCKS = IS_Q8_0 || CLASS == CacheClass::Q4_0, HAS_CODES = IS_BYTES || HAS_BLOCKS;
    typedef typename StoredElement<IS_BYTES>::Type Item;

    // An element in memory: a code, or a block of 32 values.
    static constexpr int BLOCK_BYTES = IS_Q8_0 ? 34 : 18;
    static constexpr int BYTES = IS_BYTES ? 1 : HAS_BLOCKS ? BLOCK_BYTES : ELEMENT_BYTES;
    static constexpr int ITEMS_PER_CHUNK = 16 / sizeof(Item);
    static constexpr int HEAD_BYTES = HAS_BLOCKS ? DIM / 32 * BLOCK_BYTES : DIM * BYTES;
    static constexpr int ROW_BYTES = TILE_HEADS * HEAD_BYTES; // of all heads of the tile

    // Rows of blocks start at multiples of 4, 8 or 16 bytes, and are copied from the multiple of 16 before.
    static constexpr int ALIGNMENT = ROW_BYTES % 16 == 0 ? 16 : ROW_BYTES % 8 == 0 ? 8 : 4;
    static constexpr int CHUNKS = HAS_BLOCKS ? (ROW_BYTES + 16 - ALIGNMENT + 15) / 16 : ROW_BYTES / 16;

    // Shared-memory swizzle: rows start at multiples of 128 bytes, and 16-byte chunk c of row r is stored at chunk c ^
    // (r % 8), so that 8 rows have no bank conflict. (Padded rows instead of a swizzle measured 5% slower.) Two rows of
    // 64 bytes share 128 bytes. Rows of blocks, which are read word by word, have an odd number of chunks instead.
    // Rows of q8_0 of several heads start as far from a multiple of 32 there as in memory, or copies would read half of
    // their sectors twice, which costs more than bank conflicts of two rows.
    static constexpr bool KEEPS_SECTORS = TILE_HEADS > 1 && IS_Q8_0 &&ROW_BYTES % 32 == 0;
    static constexpr int PITCH = KEEPS_SECTORS     ? (ROW_BYTES / 32 | 1) * 32
                                 : HAS_BLOCKS      ? (CHUNKS | 1) * 16
                                 : ROW_BYTES == 64 ? 64
                                                   : (ROW_BYTES + 127) / 128 * 128;
};
typedef Side<KEY_CLASS, HEAD_DIM> KeySide;
typedef Side<VALUE_CLASS, VALUE_DIM> ValueSide;

constexpr bool HAS_CODES = KeySide::HAS_CODES || ValueSide::HAS_CODES; // codes in shared memory
static_assert(!HAS_CODES || ElementType(ELEMENT_TYPE) != ElementType::F32, "codes are multiplied in f16");
static_assert(CACHE_CLASS != CacheClass::Any || ElementType(ELEMENT_TYPE) == ElementType::F32, "any format is in f32");

// A K tile has 32 keys if two pipeline stages of that size fit for each group of warps, else 16. Longer tiles mean more
// MMAs between waits; with one row or small heads, shorter ones finish sooner. Keep in step with shape.rs.
constexpr int MMA_KEY_TILES =
    HAS_CODES ? (HEAD_DIM + VALUE_DIM <= 256 ? 2 : 1)
    : ElementType(ELEMENT_TYPE) != ElementType::F32 && HEAD_DIM + VALUE_DIM <= (TILE_ROWS == 8 ? 128 : 256) ? 2
                                                                                                            : 1;

// The specialized kernel (FALLBACK = 0) takes unmodified scores (scale, length, causality, window) and aligned rows of
// exact dims in page-aligned runs of 16 keys (LoadKind::PageAligned16). It gives the same bits as the fallback with
// half the code, because a short call spends most of its time on instruction fetches.
constexpr bool IS_FALLBACK = FALLBACK;

// Keys per K tile of a group of warps.
constexpr int TILE_KEYS = 16 * MMA_KEY_TILES;

// K tiles that a CTA should have at least, of `groups` groups of warps: with codes, half of the groups may be idle, for
// their tiles are longer and a short call is over sooner on more CTAs. Keep in step with schedule.rs.
static __device__ __forceinline__ int min_units(int groups) { return HAS_CODES ? (groups + 1) / 2 : groups; }

constexpr int QUERY_PITCH = (HEAD_DIM * ELEMENT_BYTES + 127) / 128 * 128;
constexpr int KEY_PITCH = KeySide::PITCH, VALUE_PITCH = ValueSide::PITCH;
// Scales of codes: one per key for keys and for values.
constexpr int SCALE_BYTES = KeySide::IS_BYTES || ValueSide::IS_BYTES ? TILE_KEYS * 8 : 0;
// Rows of any format are copied as they are stored, and then made f32 in place (decode_stored.cuh): room for that, and
// notes per row.
constexpr int STORED_ROOM = CACHE_CLASS == CacheClass::Any ? TILE_KEYS * 64 : 0, ROW_NOTE_BYTES = 8;
constexpr int STORED_SIDE_BYTES = TILE_KEYS * KEY_PITCH + STORED_ROOM;
constexpr int NOTE_BYTES = CACHE_CLASS == CacheClass::Any ? 2 * TILE_KEYS * ROW_NOTE_BYTES : 0;
constexpr int STAGE_BYTES = TILE_KEYS * (KEY_PITCH + VALUE_PITCH) + 2 * STORED_ROOM + SCALE_BYTES + NOTE_BYTES;
// One stage where two would not fit into the 99 KB of a consumer GPU, and for rows of any format, which take more time
// to convert than to copy; three where stages are small blocks. Keep in step with shape.rs.
constexpr int STAGES = CACHE_CLASS == CacheClass::Any || STAGE_BYTES > TILE_HEADS * 48 * 1024                 ? 1
                       : KeySide::HAS_BLOCKS && ValueSide::HAS_BLOCKS && STAGE_BYTES <= TILE_HEADS * 6 * 1024 ? 3
                                                                                                              : 2;
constexpr int PREFETCH_DISTANCE = STAGES - 1; // K tiles that copies run ahead of the MMAs
constexpr int OUT_PITCH = VALUE_DIM + 4;      // in floats

// The warps of a group share its keys. They split the rows and, where the accumulators exceed one warp's registers, the
// value dims.
constexpr int VALUE_WARPS = VALUE_DIM > 256 ? 2 : 1;
constexpr int WARP_VALUE_DIM = VALUE_DIM / VALUE_WARPS;
// Every warp that shares keys converts their codes: with codes, a warp has more rows.
constexpr int MAX_MMA_ROW_TILES = WARP_VALUE_DIM <= 128 ? (HAS_CODES ? 4 : 2) : 1;
constexpr int MMA_ROW_TILES = TILE_HEADS > 1                      ? 1
                              : TILE_ROWS / 8 < MAX_MMA_ROW_TILES ? TILE_ROWS / 8
                                                                  : MAX_MMA_ROW_TILES;
constexpr int ROW_WARPS = TILE_ROWS / 8 / MMA_ROW_TILES;
constexpr int WARPS_PER_GROUP = ROW_WARPS * VALUE_WARPS;
constexpr int THREADS_PER_GROUP = WARPS_PER_GROUP * 32;

constexpr int KEY_STEPS = HEAD_DIM / 16;
constexpr int MMA_VALUE_TILES = WARP_VALUE_DIM / 16;

// Scores of a K tile: element [k][n][e] is key 16 k + lane / 4 + 8 (e / 2) and row 8 n + 2 (lane % 4) + e % 2 of the
// warp.
typedef float Scores[MMA_KEY_TILES][MMA_ROW_TILES][4];
// Output accumulators: element [v][n][e] is the same row, and the value dim that `value_dim_of` of decode_mma.cuh or
// decode_fma.cuh gives.
typedef float Outputs[MMA_VALUE_TILES][MMA_ROW_TILES][4];

// The swizzled address of the chunk at byte `at` of a row. Only the low 7 bits of `at` are swizzled: multiples of 128
// can be added to the result as an immediate offset.
static __device__ __forceinline__ unsigned swizzle(unsigned rows, int row, int pitch, int at) {
    return rows + row * pitch + (at ^ (pitch == 64 ? (row & 6) << 3 : (row & 7) << 4));
}
