// A tile of decode: what its thread block keeps of it in shared memory, and which rows and keys it has.
#pragma once
#include "common/problem.cuh"
#include "common/state.cuh"
#include "decode/decode_scores.cuh"
#include "decode/decode_shape.cuh"
#include "decode/stream_k.cuh"

// How rows of keys and values can be read (`fetch` of the parameters).
enum Fetch {
    FETCH_ELEMENTS = 0, // one element at a time: rows do not start at multiples of 16 bytes
    FETCH_CHUNKS = 1,   // 16 bytes at a time
    FETCH_RUNS = 2,     // likewise; 16 keys are neighbours, and rows have exactly the dims that the kernel was compiled for
};

// A tile's stretch of the line.
struct Stretch {
    long long start, keys_start, end;
};

struct Shared {
    RowFacts rows[ROWS];
    float max[MOST_KEY_GROUPS][ROWS];
    float sum[MOST_KEY_GROUPS][ROWS];
    // The state of what was folded so far; two, because one is read while the other is written.
    State folded[2][ROWS];
    Scan scan;
    Part part;
    Stretch stretch;
    int last;
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// One tile of rows.
struct Tile {
    Sequence sequence;
    int index, kv_head, first_row, rows;
    int all_start, all_end;   // keys that some row sees by structure
    int each_start, each_end; // keys that every row sees
    const int *table;
    unsigned long long key_base, value_base;

    // Query head and token of a row.
    __device__ __forceinline__ void find_row(const AttentionParameters &p, int row, int &head, int &token) const {
        unsigned packed = first_row + row;
        token = sequence.q_len == 1 ? 0 : packed / (unsigned)p.group;
        head = kv_head * p.group + packed - token * p.group;
    }
};

// Where the launch allows that, this kernel has started before the one in front of it has ended: from here on, it has. The one behind it may
// start when all blocks have come this far.
static __device__ __forceinline__ void wait_for_kernel_in_front() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
