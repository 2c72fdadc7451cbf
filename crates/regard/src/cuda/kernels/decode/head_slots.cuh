// Where tiles of several heads (decode_heads.cuh) keep rows in shared memory.
#pragma once
#include "decode/decode_shape.cuh"
#include "hopper/pipeline.cuh"

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// A group has SLOTS places for the keys of a K tile, or its values; they take turns.
constexpr int SLOT_BYTES = TILE_KEYS * (KEY_PITCH > VALUE_PITCH ? KEY_PITCH : VALUE_PITCH);
constexpr int HEAD_GROUPS = 8 / TILE_HEADS; // always all of them
constexpr int FREE_BYTES = hopper::MAX_SHARED_BYTES - (1024 + 128 * TILE_ROWS) - TILE_ROWS * QUERY_PITCH;
constexpr int SLOTS_THAT_FIT = FREE_BYTES / (HEAD_GROUPS * SLOT_BYTES);
constexpr int SLOTS = SLOTS_THAT_FIT < 8 ? SLOTS_THAT_FIT : 8; // keep in step with shape.rs

// Warps of a group that copy, and rows that each copies per K tile.
constexpr int COPY_WARPS = TILE_HEADS / 2, COPIED_ROWS = TILE_KEYS / COPY_WARPS;

constexpr int COMPUTING_THREADS = 32 * TILE_HEADS * HEAD_GROUPS;

// Registers of a thread: an SM has 65536, for 256 threads that compute and 128 that copy.
constexpr int COMPUTE_REGISTERS = 216, COPY_REGISTERS = 72;

// The mbarriers of the slots of each group.
struct SlotBarriers {
    unsigned long long full[HEAD_GROUPS][SLOTS], empty[HEAD_GROUPS][SLOTS];

    __device__ __forceinline__ void init() {
        for (int group = 0; group < HEAD_GROUPS; group++)
            for (int slot = 0; slot < SLOTS; slot++) {
                mbarrier_init(full[group][slot], 32 * COPY_WARPS);
                mbarrier_init(empty[group][slot], TILE_HEADS);
            }
        hopper::fence_mbarrier_init();
    }
};

// A thread's view of its group's slots. They lie behind the queries, at a fixed place, so that their addresses take no
// registers.
template <class Shared> struct HeadSlots {
    static constexpr int QUERY_OFFSET = (sizeof(Shared) + 127) / 128 * 128;
    static constexpr int RING_OFFSET = QUERY_OFFSET + (TILE_ROWS * QUERY_PITCH + 127) / 128 * 128;
    int group;
    PipelineState<SLOTS> state;

    __device__ __forceinline__ unsigned address() const {
        return shared_address(dynamic_shared + RING_OFFSET) + (group * SLOTS + state.index) * SLOT_BYTES;
    }
    __device__ __forceinline__ unsigned full() const {
        return shared_address(&((Shared *)dynamic_shared)->barriers.full[group][state.index]);
    }
    __device__ __forceinline__ unsigned empty() const {
        return shared_address(&((Shared *)dynamic_shared)->barriers.empty[group][state.index]);
    }

    // By the warps of the heads: waits for the next rows, and gives their place back.
    __device__ __forceinline__ unsigned wait_full() const {
        hopper::mbarrier_wait(full(), state.phase);
        return address();
    }
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(empty());
        state.advance();
    }

    // By the warps that copy: waits for the next place, and has its copies, which have been started, announced.
    __device__ __forceinline__ unsigned wait_empty() const {
        hopper::mbarrier_wait(empty(), state.phase ^ 1);
        return address();
    }
    __device__ __forceinline__ void announce() {
        hopper::mbarrier_arrive_copies(full());
        state.advance();
    }
};
