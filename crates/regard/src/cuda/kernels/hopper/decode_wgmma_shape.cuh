// Shapes and shared memory of decode of many rows on Hopper (decode_wgmma_sm90.cu).
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, TILE_ROWS, CACHE, FALLBACK (0), THREADS, RING_STAGES,
// MAX_THREADS.
#pragma once
#include "decode/decode_tile.cuh"
#include "hopper/codes_wgmma.cuh"
#include "hopper/pipeline.cuh"

namespace decode_wgmma {

// The type of what is multiplied: codes become f16.
constexpr ElementType OPERAND = READS_CODES ? ElementType::F16 : ElementType(ELEMENT_TYPE);

constexpr int ROWS = TILE_ROWS, ROW_BLOCKS = ROWS / 8;
static_assert(ROWS % 16 == 0, "probabilities are stored for 16 rows at a time");
constexpr int KEYS = 64;       // per K tile: 16 per warp
constexpr int WARP_KEYS = 16;  // a run of neighbours in memory
constexpr int SUMS = ROWS / 2; // elements of a thread per 64 keys, or per 64 value dims
constexpr int VALUE_BLOCKS = VALUE_DIM / 64;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Operands of keys and of values do not fit into registers at head dim 256. There values are converted in two parts,
// one of which runs beside Q K^T, and keys after P V.
constexpr bool HAS_LARGE_HEADS = HEAD_DIM > 128;
constexpr int EARLY_BLOCKS = HAS_LARGE_HEADS ? 1 : VALUE_BLOCKS; // of values, beside Q K^T
static_assert(HEAD_DIM % 64 == 0 && VALUE_DIM % 64 == 0 && HEAD_DIM <= 256, "whole chunks, and no parts of sums");

// A pipeline stage: keys and values as they are stored, scales of keys and of values.
constexpr int SCALE_OFFSET = KEYS * (KEY_PITCH + VALUE_PITCH);
constexpr int STAGE_BYTES = SCALE_OFFSET + KEYS * 8;

// Shared memory: facts, queries, numbers that the warps of a group exchange, the tile, and for each group its
// probabilities (two K tiles) and its pipeline stages. States lie over those of all groups. Keep in step with codes.rs.
constexpr int MAX_GROUPS = THREADS / 128;
constexpr int QUERY_OFFSET = (1024 + 128 * ROWS + 1023) / 1024 * 1024;
constexpr int EXCHANGE_OFFSET = QUERY_OFFSET + HEAD_DIM / 64 * ROWS * 128;
constexpr int WEIGHT_OFFSET = EXCHANGE_OFFSET + MAX_GROUPS * 4 * ROWS * 4; // powers of weights
constexpr int TILE_OFFSET = WEIGHT_OFFSET + MAX_GROUPS * ROWS * 4;
constexpr int GROUP_OFFSET = (TILE_OFFSET + 256 + 1023) / 1024 * 1024;
static_assert(sizeof(Tile) <= 256, "as the host has it");
constexpr int PROBABILITY_BYTES = ROWS * 128;
constexpr int GROUP_BYTES = 2 * PROBABILITY_BYTES + (RING_STAGES * STAGE_BYTES + 1023) / 1024 * 1024;
static_assert(sizeof(Shared) <= QUERY_OFFSET && ROWS * OUT_PITCH * 4 <= GROUP_BYTES, "as the host has it");

// Exponents of probabilities (of 2) that f16 can hold, and that of the largest one where the reference is chosen.
constexpr float MAX_EXPONENT = 15.0f, USUAL_EXPONENT = 7.0f;
// Bound of probabilities times scales of values.
constexpr float MAX_WEIGHT = 32768.0f;

} // namespace decode_wgmma
