// Shapes and shared memory of the kernel for prefix groups on Hopper (prefix_sm90.cu).
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK (0), TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES (rows
// of `prefix` in cuda/registry/tables.rs).
#pragma once
#include "hopper/pipeline.cuh"
#include "hopper/wgmma.cuh"

typedef Element<ElementType(ELEMENT_TYPE)> E;

constexpr int CONSUMERS = TILE_ROWS / 64, KEYS = TILE_KEYS;
constexpr int STAGES = 4;                                                // pipeline stages of keys, and of values
constexpr int KEY_CHUNKS = HEAD_DIM / 64, VALUE_CHUNKS = VALUE_DIM / 64; // of 64 dims, 128 bytes
constexpr int QUERY_BYTES = 64 * KEY_CHUNKS * 128;                       // per warpgroup
constexpr int KEY_BYTES = KEYS * KEY_CHUNKS * 128, VALUE_BYTES = KEYS * VALUE_CHUNKS * 128;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
static_assert(HEAD_DIM % 64 == 0 && VALUE_DIM % 64 == 0 && KEYS == 64, "a warp has a TMA box per lane");

// Registers per thread: at launch, and then those of producers and consumers. No more than these need, so that a CTA
// starts as soon as most of decode's CTAs on its multiprocessor have ended.
constexpr int LAUNCH_REGISTERS = 104, PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 144;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <= (CONSUMERS + 1) * LAUNCH_REGISTERS, "of a CTA");

constexpr int QUERY_OFFSET = 1024;
constexpr int KEY_OFFSET = QUERY_OFFSET + CONSUMERS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * KEY_BYTES;
constexpr int ROWS_OFFSET = VALUE_OFFSET + STAGES * VALUE_BYTES; // the rows of an item
static_assert(THREADS == 128 * (CONSUMERS + 1) && TILE_ROWS == 128, "a thread of a warpgroup looks up each row");

// Named barriers.
constexpr int ITEM_BARRIER = 1, CONSUMER_BARRIER = 2, WARPGROUP_BARRIER = 3;
