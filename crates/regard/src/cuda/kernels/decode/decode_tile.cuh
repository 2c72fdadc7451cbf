// A tile of decode: what its thread block keeps of it in shared memory, and which rows and keys it has.
#pragma once
#include "common/problem.cuh"
#include "common/state.cuh"
#include "decode/decode_scores.cuh"
#include "decode/decode_shape.cuh"
#include "decode/stream_k.cuh"

// How rows of keys and values can be read (`load_kind` of the parameters).
enum LoadKind {
    LOAD_ELEMENTS = 0, // one element at a time: rows do not start at multiples of 16 bytes
    LOAD_CHUNKS = 1,   // 16 bytes at a time
    LOAD_PAGE_ALIGNED_16 =
        2, // likewise; 16 keys are neighbours, and rows have exactly the dims that the kernel was compiled for
};

// A tile's tile_range of the line.
struct TileRange {
    long long start, keys_start, end;
};

struct Shared {
    RowFacts rows[ROWS];
    float max[MAX_KEY_GROUPS][ROWS];
    float sum[MAX_KEY_GROUPS][ROWS];
    // The state of what was folded so far; two, because one is read while the other is written.
    State folded[2][ROWS];
    CtaScan scan;
    CtaRange cta_range;
    TileRange tile_range;
    int last;
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// One tile of rows.
struct Tile {
    SequenceInfo seq;
    int sequence, kv_head, first_row, rows;
    int any_start, any_end;     // keys that some row sees by structure
    int every_start, every_end; // keys that every row sees
    const int *table;
    unsigned long long key_base, value_base;

    // Query head and token of a row.
    __device__ __forceinline__ void find_row(const AttentionParameters &params, int row, int &head, int &token) const {
        unsigned packed = first_row + row;
        token = seq.q_len == 1 ? 0 : packed / (unsigned)params.group;
        head = kv_head * params.group + packed - token * params.group;
    }
};

// Where the launch allows that, this kernel has started before the one in front of it has ended: from here on, it has.
// The one behind it may start when all blocks have come this far.
static __device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
