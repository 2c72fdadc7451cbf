// Programmatic dependent launch: kernels that start before the preceding one has ended.
#pragma once

// Lets the next kernel start once all CTAs are here, or have ended.
static __device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the preceding kernel to end: its results are visible then.
static __device__ __forceinline__ void wait_for_preceding() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Both: the next kernel starts when no CTA waits any more.
static __device__ __forceinline__ void grid_dependency_wait() {
    wait_for_preceding();
    launch_dependents();
}
