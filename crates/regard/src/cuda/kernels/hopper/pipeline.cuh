// Common to the warp-specialized Hopper kernels of decode and prefill: pipeline stages, wgmma registers, and matrices
// in shared memory.
#pragma once
#include "hopper/hopper.cuh"

static __device__ __forceinline__ void mbarrier_init(unsigned long long &barrier, int arrivals) {
    hopper::mbarrier_init(shared_address(&barrier), arrivals);
}

// A position in a circular pipeline: the stage index, and the phase parity of its mbarriers.
template <int STAGES> struct PipelineState {
    int index = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == STAGES) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Keeps the compiler from moving uses of wgmma registers across this point.
template <int N> static __device__ __forceinline__ void warpgroup_fence_operand(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// Makes the compiler compute what depends on `x` where it is used, instead of ahead of a loop in registers that would
// spill in it.
static __device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x)::"memory");
    return x;
}

// A matrix of 16-bit elements in shared memory, as TMA writes it and wgmma reads it: 64 columns (128 bytes) of all ROWS
// rows after one another, with the 128-byte swizzle.
template <int ROWS> struct SharedTile {
    unsigned address;

    // The address of columns 8 * chunk to 8 * chunk + 7 of a row.
    __device__ __forceinline__ unsigned chunk(int row, int chunk) const {
        return address + chunk / 8 * ROWS * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
    }
    // Descriptors of operands summed over columns: columns 16 * step to 16 * step + 15.
    __device__ __forceinline__ unsigned long long k_major(int step) const {
        return hopper::advance_descriptor(hopper::make_descriptor(address, 16), step / 4 * ROWS * 128 + step % 4 * 32);
    }
    // Descriptors of operands summed over rows: rows 16 * step to 16 * step + 15.
    __device__ __forceinline__ unsigned long long mn_major(int step) const {
        return hopper::advance_descriptor(hopper::make_descriptor(address, ROWS * 128), step * 16 * 128);
    }
};
