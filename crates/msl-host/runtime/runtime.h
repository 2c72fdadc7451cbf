// The interface between generated kernels, the scheduler (scheduler.cpp), the race checker (shadow.cpp) and the Rust side.
// No header of the C or C++ library is included here or in msl.h: kernels must not see names that Metal lacks.
#pragma once

typedef __SIZE_TYPE__ msl_size;

struct msl_uint3 {
    unsigned x, y, z;
};

// The position of a thread: one field for each attribute that a kernel parameter can have.
struct msl_position {
    msl_uint3 threadgroup_position_in_grid, thread_position_in_threadgroup, thread_position_in_grid;
    msl_uint3 threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
    unsigned thread_index_in_simdgroup, simdgroup_index_in_threadgroup, thread_index_in_threadgroup;
    unsigned simdgroups_per_threadgroup, threads_per_simdgroup;
};

enum { MSL_BUFFERS = 31, MSL_THREADGROUP_BUFFERS = 8, MSL_CONSTANTS = 1024, MSL_SIMD_WIDTH = 32, MSL_SLOT_BYTES = 64 };

// The arguments of a kernel.
struct msl_arguments {
    void* buffer[MSL_BUFFERS];
    void* threadgroup_memory[MSL_THREADGROUP_BUFFERS];
};

// A kernel as the generated code registers it.
struct msl_kernel {
    const char* name;
    void (*entry)();
    void (*set_constants)();
};

// The value of a function constant.
struct msl_constant {
    bool defined;
    double value;
};

// A buffer bound to a dispatch.
struct msl_buffer {
    void* data;
    msl_size bytes;
    bool writable;
};

// One dispatch, as the Rust side describes it.
struct msl_dispatch {
    const char* kernel;
    msl_uint3 threadgroups, threads_per_threadgroup;
    msl_buffer buffer[MSL_BUFFERS];
    msl_size threadgroup_bytes[MSL_THREADGROUP_BUFFERS];
    msl_size threadgroup_limit;
    // The first threadgroup that runs, in each dimension: threadgroups before it are left out.
    msl_uint3 first_threadgroup;
    // 0: SIMD groups and lanes in ascending order; 1: descending; any other: the seed of a random order.
    unsigned schedule;
};

extern "C" {
// Called by kernels, through msl.h.
const void* msl_exchange(const void* slot, const char* what, int line);
unsigned msl_lane();
void msl_threadgroup_barrier(int flags, int line);
void msl_simdgroup_barrier(int flags, int line);
void msl_declare_threadgroup(void* data, msl_size bytes, const char* name);
void msl_constant_undefined(const char* name);
const msl_position* msl_where();
const msl_arguments* msl_bound();
void msl_register(const msl_kernel* kernels, int count);

// Called by the Rust side: calls `report` with every finding and returns their number, or -1 if there is no such
// kernel.
int msl_run(const msl_dispatch* dispatch, const unsigned* indices, const double* values, msl_size constants,
            void (*report)(void* context, const char* finding), void* context);
}

extern msl_constant msl_constants[MSL_CONSTANTS];
