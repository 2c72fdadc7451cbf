// Shapes and shared memory of Hopper prefill (prefill_sm90.cu), and the mbarriers between its warps.
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES (rows of
// `prefill_sm90` in cuda/registry/tables.rs), CACHE (common/cache_class.cuh): Elements, Bytes or Any; SCALES_KEYS:
// whether a scale of each key lies beside elements (key_scales.cuh); and KEY_TERMS: how many elements are added up for
// each of a key (widen.cu). They are adjacent heads of the key tensor, from KEY_TERMS h on.
#pragma once
#include "common/cache_class.cuh"
#include "hopper/code_converter.cuh"
#include "hopper/skeleton.cuh"
#include "hopper/softcap_polynomial.cuh"
#include "hopper/stored_stages.cuh"

#ifndef SCALES_KEYS
#define SCALES_KEYS 0
#endif
#ifndef KEY_TERMS
#define KEY_TERMS 1
#endif

// A converter warpgroup turns keys and values into 16-bit tiles: 8-bit codes with one scale per head, which TMA brings
// (code_converter.cuh); or rows of any formats, as they are in memory (stored_converter.cuh).
constexpr bool HAS_CODES = CACHE_CLASS == CacheClass::Bytes, IS_STORED = CACHE_CLASS == CacheClass::Any;
static_assert(HAS_CODES || IS_STORED || CACHE_CLASS == CacheClass::Elements, "other classes are for decode");
static_assert(!SCALES_KEYS || CACHE_CLASS == CacheClass::Elements, "other classes have scales of their own");
static_assert(KEY_TERMS == 1 || CACHE_CLASS == CacheClass::Elements, "other classes are converted from one element");
constexpr int CONSUMERS = TILE_ROWS / 64, KEYS = TILE_KEYS, CONVERTERS = HAS_CODES || IS_STORED; // warpgroups
constexpr int STAGES = HEAD_DIM <= 64 ? 3 : 2;       // pipeline stages of keys, and of values
constexpr int QUERY_STAGES = HEAD_DIM <= 64 ? 2 : 1; // tiles whose queries are resident
constexpr int KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_CHUNKS = (VALUE_DIM + 63) / 64;  // of 64 dims, 128 bytes
constexpr int QUERY_BYTES = 64 * KEY_CHUNKS * 128, OUT_BYTES = 64 * VALUE_CHUNKS * 128; // per warpgroup
constexpr int KEY_TERM_BYTES = KEYS * KEY_CHUNKS * 128, KEY_BYTES = KEY_TERMS * KEY_TERM_BYTES;
constexpr int VALUE_BYTES = KEYS * VALUE_CHUNKS * 128;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Registers per thread: what the producers need, and what that leaves for the consumers.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 && !CONVERTERS ? 40 : 32, CONVERTER_REGISTERS = 64;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (CONVERTERS ? 208 : 232) : 160;
static_assert(!CONVERTERS || CONSUMERS == 2, "registers are counted for two");

typedef Element<ElementType(ELEMENT_TYPE)> E;

struct Shared {
    unsigned long long query_full[QUERY_STAGES][CONSUMERS], query_empty[QUERY_STAGES][CONSUMERS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    TileQueue queue;
    int stage_flags[STAGES];
    CodeBuffer key_codes, value_codes; // where HAS_CODES
    StoredStages stored;               // where IS_STORED
};

constexpr int QUERY_OFFSET = 1024;
constexpr int KEY_OFFSET = QUERY_OFFSET + QUERY_STAGES * CONSUMERS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * KEY_BYTES;
constexpr int CODES_OFFSET = VALUE_OFFSET + STAGES * VALUE_BYTES, KEY_CODE_BYTES = HAS_CODES * KEYS * HEAD_DIM,
              VALUE_CODE_BYTES = HAS_CODES * KEYS * VALUE_DIM;
// Where IS_STORED: stages of rows as they are stored, and of notes of them; and for each stage of keys, the scale of
// each key in each block of head dims.
constexpr int BLOCK = 32, BLOCKS = HEAD_DIM / BLOCK;
constexpr int STORED_OFFSET = CODES_OFFSET;
constexpr int STORED_KEY_BYTES = KEYS * (2 * HEAD_DIM + 16), STORED_VALUE_BYTES = KEYS * (2 * VALUE_DIM + 16);
constexpr int STORED_BYTES = STORED_KEY_BYTES + STORED_VALUE_BYTES;
constexpr int NOTES_OFFSET = STORED_OFFSET + STORED_STAGES * STORED_BYTES, NOTE_BYTES = 2 * KEYS * sizeof(RowNote);
constexpr int SCALES_OFFSET = NOTES_OFFSET + STORED_STAGES * NOTE_BYTES;
constexpr int SCALES_END = (SCALES_OFFSET + STAGES * BLOCKS * KEYS * 4 + 1023) / 1024 * 1024;
// Where SCALES_KEYS: for each stage of keys, the scale of each key.
constexpr int KEY_SCALES_OFFSET = CODES_OFFSET, KEY_SCALE_BYTES = KEYS * 4;
constexpr int KEY_SCALES_END = (KEY_SCALES_OFFSET + SCALES_KEYS * STAGES * KEY_SCALE_BYTES + 1023) / 1024 * 1024;
constexpr int OUT_OFFSET = IS_STORED ? SCALES_END : KEY_SCALES_END + KEY_CODE_BYTES + VALUE_CODE_BYTES;
// The output goes through shared memory and TMA if there is room.
constexpr bool OUT_STAGED = OUT_OFFSET + CONSUMERS * OUT_BYTES <= hopper::MAX_SHARED_BYTES;
static_assert(sizeof(Shared) <= QUERY_OFFSET && OUT_OFFSET + OUT_STAGED * CONSUMERS * OUT_BYTES == SHARED_BYTES,
              "as the host has it");
static_assert(THREADS == 128 * (CONSUMERS + CONVERTERS + 1), "as the host has it");

// Where the scale of a key is among those of a block of head dims: the four of a thread's scores of 16 keys together.
static __device__ __forceinline__ int scale_place(int key) {
    return key / 16 * 16 + key % 8 / 2 * 4 + key / 8 % 2 * 2 + key % 2;
}

// Named barriers.
constexpr int WARP_SCHEDULER_BARRIER = 1, WARPGROUP_BARRIER = WARP_SCHEDULER_BARRIER + CONSUMERS;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];
