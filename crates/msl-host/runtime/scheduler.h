// The interface between the scheduler and the race checker.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string>
#include "runtime.h"

namespace msl {

// Notes a finding; findings with the same key are the same defect and are reported once.
void report(const std::string& key, const std::string& finding);

// The thread that runs (-1 between threads), its SIMD group, and the number of synchronizing steps that its SIMD group
// has taken.
int current_thread();
unsigned current_simdgroup();
unsigned current_step();
// Whether an address is on the running thread's stack or is the scheduler's own.
bool is_private(const void* address);

namespace shadow {
// Begins a dispatch, with nothing known.
void begin();
// Memory that kernels may touch. Threadgroup memory starts uninitialized in each threadgroup.
void add(void* data, size_t bytes, bool threadgroup, const std::string& name, bool writable);
void begin_threadgroup();
// A threadgroup barrier that orders the given kinds of memory.
void barrier(bool device_memory, bool threadgroup_memory);
}  // namespace shadow

}  // namespace msl
