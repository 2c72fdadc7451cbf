// A decode tile: its rows and keys, and what its CTA keeps in shared memory.
#pragma once
#include "common/grid_dependency.cuh"
#include "common/problem.cuh"
#include "common/state.cuh"
#include "decode/decode_scores.cuh"
#include "decode/decode_shape.cuh"
#if HEADS > 1
#include "decode/head_slots.cuh"
#endif
#include "decode/stream_k.cuh"

// Threads of the CTA that compute; their barrier; and that of all threads. With tiles of several heads, others copy.
#if HEADS > 1
static __device__ __forceinline__ int computing_threads() { return COMPUTING_THREADS; }
static __device__ __forceinline__ void synchronize_computing() {
    hopper::named_barrier_sync(HEAD_GROUPS + 1, COMPUTING_THREADS); // those up to HEAD_GROUPS are of groups
}
#else
static __device__ __forceinline__ int computing_threads() { return blockDim.x; }
static __device__ __forceinline__ void synchronize_computing() { __syncthreads(); }
#endif

// The range of a tile in the stream-K work.
struct TileRange {
    long long start, keys_start, end;
};

// The entry of a CTA of `decode` in the schedule of a step (decode_schedule.cuh); the same bytes in every module.
constexpr int SCHEDULED_BYTES = 128;
struct alignas(SCHEDULED_BYTES) ScheduledCta {
    CtaRange range;
    int first_page, end_page; // page-table entries of its keys in the first sequence; none if keys are not paged
    SequenceInfo sequence;    // of range.cursor; only specialized modules read it
};

// Whether the workspace has the schedule of a step. Rows with lists of keys have none: every layer has its own lists.
static __device__ __forceinline__ bool is_scheduled(const AttentionParameters &params) {
    return !LISTS && params.stream_k.schedule;
}

struct Shared {
#if HEADS > 1
    SlotBarriers barriers;
#endif
    RowFacts rows[TILE_ROWS]; // by slot
    float max[MAX_KEY_GROUPS][TILE_ROWS];
    float sum[MAX_KEY_GROUPS][TILE_ROWS];
#if READS_CODES
    float query_scale[TILE_ROWS]; // by slot: inverse powers of two
#endif
    // Running states of a tile's rows in batch-invariant mode; double-buffered, because one is read while the other is
    // written.
    State folded[2][TILE_ROWS];
    ScheduledCta scheduled;
    TileRange tile_range;
    int last;
};

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// A tile: TILE_ROWS packed rows (token, query head) of one sequence and key/value head (packed GQA).
struct Tile {
    SequenceInfo seq;
    int sequence, kv_head, first_row, rows;
    int any_start, any_end;     // keys that some row sees by structure; of a list: its entries
    int every_start, every_end; // keys that every row sees
    const int *table;
#if LISTS
    const int *list;
    int first_list_len; // entries in use of `list`; those after it are of the second list
    const int *numbers; // of the list's pages in their sequence, or null
#endif
    unsigned long long key_base, value_base;

    // Unpacks a row into query head and token.
    __device__ __forceinline__ void find_row(const AttentionParameters &params, int row, int &head, int &token) const {
        unsigned packed = first_row + row;
        token = seq.q_len == 1 ? 0 : packed / (unsigned)params.group;
        head = kv_head * params.group + packed - token * params.group;
    }

    // The keys that the rows of a token see.
    __device__ __forceinline__ KeyRange keys_of(const AttentionParameters &params, int token) const {
        if (seq.q_len == 1) return {every_start, every_end};
        return visible_keys(params, seq, token);
    }

    // Finds the keys of its rows. `of_sequence`: those that some row of its sequence sees. A warp calls this.
    __device__ __forceinline__ void find_keys(const AttentionParameters &params, KeyRange of_sequence, int lane) {
        KeyRange keys = of_sequence;
        if (LISTS || seq.q_len > 1) {
            // Even lanes have the first row, odd lanes the last.
            int head, token;
            find_row(params, lane & 1 ? rows - 1 : 0, head, token);
            keys = visible_keys(params, seq, token);
        }
        // Shuffles tell the compiler that the branch above does not make them differ.
        any_start = __shfl_sync(~0u, keys.start, 0);
        every_start = __shfl_sync(~0u, keys.start, 1);
        every_end = __shfl_sync(~0u, keys.end, 0);
        any_end = __shfl_sync(~0u, keys.end, 1);
#if LISTS
        set_list(params, *this);
#endif
    }

    // The row in a slot of shared memory: each of several heads has 8 slots. -1 if there is none.
    __device__ __forceinline__ int row_of_slot(const AttentionParameters &params, int slot) const {
        if (TILE_HEADS == 1) return slot < rows ? slot : -1;
        unsigned group = params.group / TILE_HEADS, token = slot % 8 / group;
        int row = token * params.group + slot / 8 * group + slot % 8 - token * group;
        return token < seq.q_len ? row : -1;
    }
};
