// Launches that start before the preceding kernel has ended.
#pragma once

// Programmatic dependent launch: waits for the preceding kernel to end, and lets the next one start once all CTAs are
// here.
static __device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
