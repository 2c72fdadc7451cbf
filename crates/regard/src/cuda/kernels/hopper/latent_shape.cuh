// Shapes and shared memory of the decode kernel for latent caches, and the buffers between its warps.
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK (0), TILE_ROWS, CTAS_PER_TILE, THREADS, SHARED_BYTES,
// and CACHE if keys are records of mla656 (rows of `decode_latent_sm90` in cuda/registry/tables.rs).
#pragma once
#include "common/arrival.cuh"
#include "common/paging.cuh"
#include "decode/decode_combine_entry.cuh"
#include "decode/decode_schedule.cuh"
#include "decode/stream_k.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/work_pieces.cuh"

namespace latent {

constexpr int ROWS = TILE_ROWS / CTAS_PER_TILE; // of this CTA
constexpr int KEYS = 64;                        // of a K tile
constexpr int SUBTILE_BYTES = KEYS * 128;       // 64 dims of a K tile
constexpr int VALUE_WARPGROUPS = 2, DIMS_PER_WARPGROUP = VALUE_DIM / VALUE_WARPGROUPS;
// A K tile arrives in chunks of 128 value dims, which belong to the two value warpgroups alternately, and the rest:
// dims that are not values.
constexpr int CHUNK_DIMS = 128, CHUNK_SUBTILES = CHUNK_DIMS / 64, CHUNK_BYTES = CHUNK_SUBTILES * SUBTILE_BYTES;
constexpr int TILE_CHUNKS = VALUE_DIM / CHUNK_DIMS, OWN_CHUNKS = TILE_CHUNKS / VALUE_WARPGROUPS;
constexpr int VALUE_SUBTILES = OWN_CHUNKS * CHUNK_SUBTILES; // of a value warpgroup
constexpr int REST_SUBTILES = (HEAD_DIM - VALUE_DIM) / 64, REST_BYTES = REST_SUBTILES * SUBTILE_BYTES;
static __device__ __forceinline__ constexpr int first_dim_of(int chunk) {
    return chunk % VALUE_WARPGROUPS * DIMS_PER_WARPGROUP + chunk / VALUE_WARPGROUPS * CHUNK_DIMS;
}
// Whether keys are records of mla656. Their codes stay in shared memory.
constexpr bool RECORDS = CACHE_CLASS == CacheClass::Mla656;
// A CTA's warps: of the value warpgroups, with 16 rows or records of score warpgroups, the scheduler, and the loaders.
// Two score warpgroups take K tiles in turn, where one would take longer than memory: 16 rows of records that follow
// one another.
#define HAS_SCORE_WARPS (TILE_ROWS == 16 || CACHE)
constexpr int SCORE_WARPGROUPS = !HAS_SCORE_WARPS ? 0 : RECORDS && ROWS == 16 && !LISTS ? 2 : 1;
constexpr int SCORE_WARP = 4 * VALUE_WARPGROUPS, SCHEDULER_WARP = SCORE_WARP + 4 * SCORE_WARPGROUPS,
              LOADER_WARP = SCHEDULER_WARP + 1;
// One for the chunks of each value warpgroup, one for the rest; those of records take halves of K tiles in turn.
constexpr int PRODUCER_WARPS = 4, LOADERS = PRODUCER_WARPS - 1;
constexpr int CONSUMER_THREADS = 32 * SCHEDULER_WARP;
// The warps that load queries: those of the warpgroups that have scores.
constexpr int QUERY_WARPS = SCORE_WARPGROUPS ? 4 * SCORE_WARPGROUPS : SCHEDULER_WARP;
// Registers per thread: of value warpgroups, of score warpgroups, and of scheduler and loaders, together those that the
// CTA has at launch.
constexpr int VALUE_REGISTERS = !SCORE_WARPGROUPS       ? 208
                                : !RECORDS              ? 160
                                : SCORE_WARPGROUPS == 2 ? 88
                                : ROWS == 16            ? 120
                                                        : 176,
              SCORE_REGISTERS = !RECORDS                ? 136
                                : SCORE_WARPGROUPS == 2 ? 120
                                : ROWS == 16            ? 208
                                                        : 128,
              PRODUCER_REGISTERS = !SCORE_WARPGROUPS ? 88
                                   : !RECORDS        ? 56
                                   : ROWS == 16      ? 64
                                                     : 32,
              LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
static_assert(128 * (VALUE_WARPGROUPS * VALUE_REGISTERS + SCORE_WARPGROUPS * SCORE_REGISTERS) +
                      32 * PRODUCER_WARPS * PRODUCER_REGISTERS <=
                  THREADS * LAUNCH_REGISTERS,
              "setmaxnreg would wait for ever");
template <int COUNT> static __device__ __forceinline__ void set_registers() {
    if constexpr (COUNT > LAUNCH_REGISTERS) {
        hopper::setmaxnreg_inc<COUNT>();
    } else {
        hopper::setmaxnreg_dec<COUNT>();
    }
}
static_assert(THREADS == CONSUMER_THREADS + 32 * PRODUCER_WARPS, "the host launches this many");
static_assert(VALUE_DIM % (CHUNK_DIMS * VALUE_WARPGROUPS) == 0 && HEAD_DIM % 64 == 0 && HEAD_DIM > VALUE_DIM &&
                  (ROWS == 16 || ROWS == 64),
              "the only shapes that this kernel has");

// Pipeline stages: of chunks, of the rest of K tiles, and of probabilities. As many as fit. 64 rows leave their
// probabilities in the rest of the K tile, which nothing reads after Q K^T.
//
// Records of mla656 have a scale per key and chunk. Their codes are exact in 16 bits: scales multiply the scores of
// each chunk, and probabilities, of which every chunk has its own. (Codes times scales, rounded to bf16, have scores
// that are too far off for the log-sum-exp, and for outputs if few keys have most of the weight.) A stage is the
// records of half a K tile, as they are in memory.
constexpr int CHUNKS = RECORDS      ? (ROWS == 16 ? 9 : 5)
                       : ROWS == 16 ? 11
                                    : 8,
              REST_STAGES = RECORDS ? CHUNKS : 3, PROB_STAGES = RECORDS && ROWS == 64 ? 1 : 2;
constexpr int PROB_TILES = RECORDS ? TILE_CHUNKS : 1; // of a stage
// Whether products of probabilities and values are f16, in units (records_weights.cuh). With 64 rows what that adds
// takes longer than what it saves.
constexpr bool HAS_VALUE_UNITS = RECORDS && ROWS == 16;
constexpr int PROB_BYTES = PROB_TILES * ROWS * KEYS * 2;
// A record of mla656: codes of the value dims, an f32 scale per chunk of them, and the other dims in bf16.
constexpr int RECORD_BYTES = 656, SCALES_BYTE = VALUE_DIM, ROTARY_BYTE = SCALES_BYTE + TILE_CHUNKS * 4;
static_assert(!RECORDS || (ElementType(ELEMENT_TYPE) == ElementType::BF16 && VALUE_DIM == 512 &&
                           ROTARY_BYTE + (HEAD_DIM - VALUE_DIM) * 2 == RECORD_BYTES),
              "the only records");
// Rows of e4m3 codes of all dims become records whose scales are 1: the scale of all keys multiplies scores and
// outputs.
constexpr int STAGE_KEYS = KEYS / 2, STAGE_BYTES = STAGE_KEYS * RECORD_BYTES; // of records
// CTAs that share a tile are a cluster. TMA multicast gives all of them every K tile, of which each loads some columns.
// Keys of lists and records are copied by each of them.
constexpr bool MULTICAST = CTAS_PER_TILE > 1 && !LISTS && !RECORDS;
// Warps that find listed keys and copy their rest, each a key per lane: the loader of the rest, and the scheduler.
constexpr int FINDERS = KEYS / 32;
// Arrivals at the barriers of loaded stages: one with TMA and of records, else one per thread of a warp; of the rest of
// listed keys those of the warps that copy it, and one more of each, when it has stored which keys exist. Half a K
// tile of records is released by the score warps that have its keys, and by the value warps.
constexpr int LOADED_ARRIVALS = LISTS && !RECORDS ? 32 : 1, REST_ARRIVALS = LISTS ? FINDERS * (32 + 1) : 1,
              RELEASE_ARRIVALS = RECORDS ? 2 + 4 * VALUE_WARPGROUPS : 4 * (MULTICAST ? CTAS_PER_TILE : 1);
static_assert(CTAS_PER_TILE <= 2, "columns of a chunk");

typedef WorkPiece<KEYS> Piece;
constexpr int PIECES = 2; // on their way from the scheduler to loaders and consumers

struct Shared {
    unsigned long long full[CHUNKS], empty[CHUNKS];
    unsigned long long rest_full[REST_STAGES], rest_empty[REST_STAGES];
    unsigned long long probs_full[PROB_STAGES], probs_empty[PROB_STAGES];
    unsigned long long piece_full[PIECES], piece_empty[PIECES];
    unsigned long long factor_full, factor_empty;
    unsigned long long products_done[VALUE_WARPGROUPS]; // 64 rows: the warpgroup's Q K^T
    unsigned long long max_full;                        // 64 rows: maxima of warpgroup 0
    Piece pieces[PIECES];
#if LISTS
    // Keys of the K tile that exist and are seen: bit k for key k.
    union {
        unsigned long long of_tile;
        unsigned of_half[FINDERS];
    } present[REST_STAGES];
    unsigned long long addresses_full, addresses_empty;
#endif
    unsigned char rescales[PROB_STAGES][4]; // per warp that has scores: whether a factor is not 1
    // The CTA's parts of tiles: of one that began before this CTA's work (`more`: if there is one), and which of
    // `pieces` is one that does not end with it, or -1.
    Piece first_part;
    int last_part;
    bool is_last; // CTA to finish a part of a tile
};

// Shared-memory layout.
constexpr int QUERY_OFFSET = 1024, KEYS_OFFSET = QUERY_OFFSET + ROWS * HEAD_DIM * 2;
constexpr int CHUNKS_OFFSET = KEYS_OFFSET + (RECORDS ? PROB_STAGES * PROB_BYTES : 0),
              REST_OFFSET = CHUNKS_OFFSET + CHUNKS * (RECORDS ? STAGE_BYTES : CHUNK_BYTES),
              PROBS_OFFSET = RECORDS ? KEYS_OFFSET : REST_OFFSET + REST_STAGES * REST_BYTES,
              EXCHANGE_OFFSET = RECORDS            ? REST_OFFSET
                                : SCORE_WARPGROUPS ? PROBS_OFFSET + PROB_STAGES * PROB_BYTES
                                                   : PROBS_OFFSET;
static_assert(sizeof(Shared) <= QUERY_OFFSET && PROBS_OFFSET % 1024 == 0,
              "it overlaps the queries, and swizzled tiles");

// Where the keys of a K tile are: set by the loader of the rest, read by those of the chunks. The lowest bit is set if
// the key exists and is seen; keys are aligned to 16 bytes.
struct KeyAddresses {
    unsigned long long of[KEYS];
};

#if CACHE
// Units of values, a power of two per chunk (records_weights.cuh).
struct ValueUnits {
    alignas(16) float inverse[TILE_CHUNKS]; // of the piece so far
    float largest[4][TILE_CHUNKS];          // scale of a K tile, per score warp
    float factor[PROB_STAGES][TILE_CHUNKS]; // of the outputs so far, if rows are rescaled
    bool is_wide[PROB_STAGES];              // the same: whether the K tile has bf16 numbers instead
    float of_piece[TILE_CHUNKS];            // of a piece's outputs in the end
};
#endif

#if HAS_SCORE_WARPS
struct Exchange {
#if LISTS && !CACHE
    KeyAddresses addresses;
#endif
    // Between the warps of a score warpgroup: a maximum or a sum per row. At the start, before there is any, the CTA's
    // entry of a schedule is in the same place.
    union {
        float rows[SCORE_WARPGROUPS][ROWS];
        ScheduledCta scheduled;
    };
    // From score to value warps: factors of the outputs so far, and of a piece's outputs in the end.
    float rescale[PROB_STAGES][ROWS], out_factor[ROWS];
#if CACHE
    // Of score warps: what exponents are relative to, and the powers of two that queries were divided by.
    float reference[ROWS], query_scale[ROWS];
    ValueUnits units;
    const float *key_scale_at; // null if keys are records
    float key_scale;           // of all keys, beside those of records
#endif
};
#else
struct Exchange {
    // The keys that the rows see, or where they are. At the start the CTA's entry of a schedule is in the same place.
    union {
#if LISTS
        KeyAddresses addresses;
#else
        KeyRange visible[ROWS];
#endif
        ScheduledCta scheduled;
    };
    // From either warpgroup to the other: a row's maximum after a K tile and the factor of what came before it, and in
    // the end the sum over the warpgroup's K tiles.
    float max[VALUE_WARPGROUPS][ROWS], rescale[VALUE_WARPGROUPS][ROWS], sum[VALUE_WARPGROUPS][ROWS];
};
#endif
static_assert(EXCHANGE_OFFSET + sizeof(Exchange) <= SHARED_BYTES, "the host reserves this much shared memory");

// Named barriers. Of SCORES_BARRIER and TURN_BARRIER there is one per score warpgroup, of VALUES_BARRIER one per value
// warpgroup.
constexpr int CONSUMERS_BARRIER = 1, PART_BARRIER = 2, ALL_SCORES_BARRIER = 3, VALUES_BARRIER = 4,
              SCORES_BARRIER = VALUES_BARRIER + VALUE_WARPGROUPS, TURN_BARRIER = SCORES_BARRIER + 2;

// A position in the pipeline of chunks.
struct ChunkState {
    PipelineState<CHUNKS> first;

    // The position of the chunk `count` further.
    __device__ __forceinline__ PipelineState<CHUNKS> at(int count) const {
        bool wraps = first.index + count >= CHUNKS;
        return {first.index + count - (wraps ? CHUNKS : 0), first.phase ^ wraps};
    }
    __device__ __forceinline__ void advance(int count) { first = at(count); }
};

static __device__ __forceinline__ unsigned chunk_address(unsigned base, const PipelineState<CHUNKS> &chunk) {
    return base + CHUNKS_OFFSET + chunk.index * CHUNK_BYTES;
}

// The records of half a K tile.
static __device__ __forceinline__ unsigned chunk_records(unsigned base, const PipelineState<CHUNKS> &stage) {
    return base + CHUNKS_OFFSET + stage.index * STAGE_BYTES;
}

// A CTA's first row within a tile.
static __device__ __forceinline__ int first_row_of_cta() { return blockIdx.x % CTAS_PER_TILE * ROWS; }

// Arrives at an mbarrier of all CTAs that share the tile. A whole warp calls this.
static __device__ __forceinline__ void arrive_at_all(unsigned long long &barrier, int lane) {
    if (MULTICAST) {
        if (lane < CTAS_PER_TILE) hopper::mbarrier_arrive_remote(shared_address(&barrier), lane);
    } else if (lane == 0) {
        hopper::mbarrier_arrive(shared_address(&barrier));
    }
}

// Whether `combine` waits for the parts of tiles. Else the CTA that is the last to finish a part of a tile combines
// them.
static __device__ __forceinline__ bool is_counted(const AttentionParameters &params) {
    return params.stream_k.combines;
}

} // namespace latent
