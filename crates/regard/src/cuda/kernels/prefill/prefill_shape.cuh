// Tile shapes and shared-memory layout of the sm_80 prefill kernel, from its macros (rows of `prefill_sm80_*` and
// `prefix` in cuda/registry/tables.rs):
//
// ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK, and
// TILE_ROWS        tokens per tile,
// TILE_KEYS        keys per K tile,
// WARP_ROWS        rows per warp: 16 or 32,
// VALUE_WARPS      warps that share these rows: they split the keys of Q K^T, and the value dims of P V,
// KV_BUFFERS       K and V tiles that fit in shared memory: 4, both of two stages; 2, both of one; 1, one at a time,
// MIN_CTAS_PER_SM  CTAs per SM (occupancy) that registers must suffice for,
// CACHE            CacheClass: Elements; or Any, converted to ELEMENT_TYPE while they are loaded. Scales of 8-bit codes
//                  join scores and probabilities,
// KEY_TERMS        elements that are added up for one of a key (widen.cu): adjacent heads of the key tensor,
// PREFIX           1 for the kernel of prefix groups (prefix_kernel.cuh), whose tiles are rows of several sequences.
//
// THREADS and SHARED_BYTES are the host's launch parameters; they follow from these and are checked here.
#pragma once
#include "common/cache_class.cuh"
#include "common/element.cuh"

constexpr bool CONVERTS = CACHE_CLASS == CacheClass::Any;
static_assert(CONVERTS || CACHE_CLASS == CacheClass::Elements, "8-bit codes alone are for Hopper");
#ifndef PREFIX
#define PREFIX 0
#endif
#ifndef KEY_TERMS
#define KEY_TERMS 1
#endif
static_assert(KEY_TERMS == 1 || (!CONVERTS && !PREFIX), "of copies");

typedef Element<ElementType(ELEMENT_TYPE)> E;
typedef E::Bits Bits;

constexpr bool WIDE_ELEMENT = ElementType(ELEMENT_TYPE) == ElementType::F32;
constexpr int ELEMENT_BYTES = WIDE_ELEMENT ? 4 : 2;
constexpr int CHUNK = 16 / ELEMENT_BYTES; // elements per 16-byte chunk

constexpr int MMA_ROW_TILES = WARP_ROWS / 16; // MMA M = 16
constexpr int ROW_WARPS = TILE_ROWS / WARP_ROWS;
constexpr int WARPS = ROW_WARPS * VALUE_WARPS;
static_assert(THREADS == WARPS * 32, "as the host launches it");

constexpr int WARP_KEYS = TILE_KEYS / VALUE_WARPS;
constexpr int MMA_KEY_TILES = WARP_KEYS / 8; // MMA N = 8
constexpr int WARP_VALUE_DIM = VALUE_DIM / VALUE_WARPS;
constexpr int MMA_VALUE_TILES = WARP_VALUE_DIM / 8;
static_assert(WARP_VALUE_DIM % 16 == 0 && TILE_KEYS % 16 == 0 && WARP_KEYS % 8 == 0, "whole tiles");

// Q K^T steps through head dims 32 bytes at a time, for every type.
constexpr int STEP_BYTES = 32;
constexpr int KEY_STEPS = HEAD_DIM * ELEMENT_BYTES / STEP_BYTES;

// Shared-memory rows start at multiples of 64 bytes; `swizzle` permutes their 16-byte chunks against bank conflicts.
constexpr int pitch_of(int bytes) { return (bytes + 63) / 64 * 64; }
constexpr int KEY_PITCH = pitch_of(HEAD_DIM * ELEMENT_BYTES);
constexpr int VALUE_PITCH = pitch_of(VALUE_DIM * ELEMENT_BYTES);
constexpr int PROB_PITCH = pitch_of(TILE_KEYS * ELEMENT_BYTES);

// Shared memory: 1024 bytes for `Shared`; queries; keys; values; and, if warps share rows, probabilities and maxima.
constexpr int QUERY_OFFSET = 1024;
constexpr int KEYS_OFFSET = QUERY_OFFSET + TILE_ROWS * KEY_PITCH;
constexpr int KEY_TERM_BYTES = TILE_KEYS * KEY_PITCH;
constexpr int KEY_STAGE_BYTES = KEY_TERMS * KEY_TERM_BYTES, VALUE_STAGE_BYTES = TILE_KEYS * VALUE_PITCH;
constexpr int STAGES = KV_BUFFERS == 4 ? 2 : 1;
constexpr int VALUES_OFFSET = KV_BUFFERS == 1 ? KEYS_OFFSET : KEYS_OFFSET + STAGES * KEY_STAGE_BYTES;
constexpr int PROBS_OFFSET =
    KV_BUFFERS == 1 ? KEYS_OFFSET + (KEY_STAGE_BYTES > VALUE_STAGE_BYTES ? KEY_STAGE_BYTES : VALUE_STAGE_BYTES)
                    : VALUES_OFFSET + STAGES * VALUE_STAGE_BYTES;
constexpr int MAXIMA_OFFSET = PROBS_OFFSET + (VALUE_WARPS > 1 ? TILE_ROWS * PROB_PITCH : 0);
// Scales of a K tile's keys, then of its values, for each stage.
constexpr int SCALES_OFFSET = MAXIMA_OFFSET + (VALUE_WARPS > 1 ? TILE_ROWS * VALUE_WARPS * 4 : 0);
constexpr int SCALE_STAGE_BYTES = CONVERTS ? 2 * TILE_KEYS * 4 : 0;
// The rows of a tile of a prefix group.
constexpr int ROWS_OFFSET = SCALES_OFFSET + STAGES * SCALE_STAGE_BYTES;
constexpr int ROW_BYTES = PREFIX ? 48 : 0;
static_assert(SHARED_BYTES == ROWS_OFFSET + TILE_ROWS * ROW_BYTES, "as the host launches it");

// In f16 a probability times a value's scale could underflow: the host sees to it that all values of a head have one
// scale, which joins the output.
constexpr bool SCALES_OUTPUT = CONVERTS && ElementType(ELEMENT_TYPE) == ElementType::F16;

// With a pitch that is a multiple of 128 bytes, rows start in the same bank, and 8 rows need 8 chunk positions.
// Otherwise they alternate between two halves, and 4 suffice.
constexpr int span_of(int pitch) { return pitch % 128 == 0 ? 128 : 64; }

template <int PITCH> static __device__ __forceinline__ int swizzle_bits(int row) {
    return span_of(PITCH) == 128 ? (row & 7) << 4 : (row & 6) << 3;
}

// The swizzled address of the chunk at byte `at` of a row.
template <int PITCH> static __device__ __forceinline__ unsigned swizzle(unsigned rows, int row, int at) {
    return rows + row * PITCH + (at ^ swizzle_bits<PITCH>(row));
}

// Advances the address of a row's first or second chunk by `bytes`, a multiple of 32.
template <int PITCH> static __device__ __forceinline__ unsigned advance_swizzled(unsigned place, int bytes) {
    return (place ^ (bytes % span_of(PITCH))) + bytes / span_of(PITCH) * span_of(PITCH);
}

// Scores: [j][e] as in prefill_scores.cuh. Outputs: the same, with value dims for keys.
typedef float Scores[MMA_ROW_TILES][MMA_KEY_TILES][4];
typedef float Outputs[MMA_ROW_TILES][MMA_VALUE_TILES][4];
