// Shapes and shared memory of Hopper prefill (prefill_sm90.cu), and the mbarriers between its warps.
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES (rows of
// `prefill_sm90` in cuda/registry/tables.rs), and CACHE (common/cache_class.cuh): Elements or Bytes.
#pragma once
#include "common/cache_class.cuh"
#include "hopper/code_converter.cuh"
#include "hopper/skeleton.cuh"
#include "hopper/softcap_polynomial.cuh"

// Keys and values are 8-bit codes, which a converter warpgroup turns into 16-bit tiles (code_converter.cuh).
constexpr bool HAS_CODES = CACHE_CLASS == CacheClass::Bytes;
static_assert(HAS_CODES || CACHE_CLASS == CacheClass::Elements, "other formats run on prefill_sm80.cu");
constexpr int CONSUMERS = TILE_ROWS / 64, KEYS = TILE_KEYS, CONVERTERS = HAS_CODES; // warpgroups
constexpr int STAGES = HEAD_DIM <= 64 ? 3 : 2;       // pipeline stages of keys, and of values
constexpr int QUERY_STAGES = HEAD_DIM <= 64 ? 2 : 1; // tiles whose queries are resident
constexpr int KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_CHUNKS = (VALUE_DIM + 63) / 64;  // of 64 dims, 128 bytes
constexpr int QUERY_BYTES = 64 * KEY_CHUNKS * 128, OUT_BYTES = 64 * VALUE_CHUNKS * 128; // per warpgroup
constexpr int KEY_BYTES = KEYS * KEY_CHUNKS * 128, VALUE_BYTES = KEYS * VALUE_CHUNKS * 128;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Registers per thread: what the producers need, and what that leaves for the consumers.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 && !HAS_CODES ? 40 : 32, CONVERTER_REGISTERS = 64;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (HAS_CODES ? 208 : 232) : 160;
static_assert(!HAS_CODES || CONSUMERS == 2, "registers are counted for two");

typedef Element<ElementType(ELEMENT_TYPE)> E;

struct Shared {
    unsigned long long query_full[QUERY_STAGES][CONSUMERS], query_empty[QUERY_STAGES][CONSUMERS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    TileQueue queue;
    int stage_flags[STAGES];
    SoftcapPolynomial cap;
    CodeBuffer key_codes, value_codes; // where HAS_CODES
};

constexpr int QUERY_OFFSET = 1024;
constexpr int KEY_OFFSET = QUERY_OFFSET + QUERY_STAGES * CONSUMERS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * KEY_BYTES;
constexpr int CODES_OFFSET = VALUE_OFFSET + STAGES * VALUE_BYTES, KEY_CODE_BYTES = HAS_CODES * KEYS * HEAD_DIM,
              VALUE_CODE_BYTES = HAS_CODES * KEYS * VALUE_DIM;
constexpr int OUT_OFFSET = CODES_OFFSET + KEY_CODE_BYTES + VALUE_CODE_BYTES;
// The output goes through shared memory and TMA if there is room.
constexpr bool OUT_STAGED = OUT_OFFSET + CONSUMERS * OUT_BYTES <= hopper::MAX_SHARED_BYTES;
static_assert(sizeof(Shared) <= QUERY_OFFSET && OUT_OFFSET + OUT_STAGED * CONSUMERS * OUT_BYTES == SHARED_BYTES,
              "as the host has it");
static_assert(THREADS == 128 * (CONSUMERS + CONVERTERS + 1), "as the host has it");

// Named barriers.
constexpr int WARP_SCHEDULER_BARRIER = 1, WARPGROUP_BARRIER = WARP_SCHEDULER_BARRIER + CONSUMERS;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];
