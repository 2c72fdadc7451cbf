// Rows of keys and values as they are stored, on their way to the converter warpgroup: what it is told of each row, and
// the mbarriers and flags of the stages.
#pragma once
#include "hopper/pipeline.cuh"

constexpr int STORED_STAGES = 2; // K tiles

struct alignas(16) RowNote {
    unsigned long long address; // 0 if TMA copies the row
    float scale;                // of its codes
};

struct StoredStages {
    static constexpr int NO_KEY_TILE = -1;
    unsigned long long full[STORED_STAGES], empty[STORED_STAGES];
    int flags[STORED_STAGES];                       // of the pipeline stage that the keys go to; or NO_KEY_TILE
    int starts[STORED_STAGES], ends[STORED_STAGES]; // visible keys, counted from the first of the K tile
    int shifts[2][STORED_STAGES];                   // of keys and of values: where rows start that TMA copies, in bytes

    __device__ __forceinline__ void init() {
        for (int i = 0; i < STORED_STAGES; i++) {
            // Of each of two warps: the copies of scales by each lane; what the warp stores, and what TMA brings.
            mbarrier_init(full[i], 2 * (32 + 1));
            mbarrier_init(empty[i], 4);
        }
    }
};
