// The race checker: for every byte that a kernel may touch, who wrote it and who read it last. It is fed by clang's load and
// store callbacks (-fsanitize-coverage=trace-loads,trace-stores), so it works in builds that have them and costs nothing in others.
//
// Two accesses of which one writes are in order if the same thread made them, if a threadgroup barrier for that kind of memory is
// between them, or, within one SIMD group, a SIMD-group barrier. SIMD-group functions (shuffles, sums) order nothing.
#include "scheduler.h"
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>
#include <algorithm>
#include <vector>

namespace msl::shadow {
namespace {

struct Access {
    // Thread plus one; 0 for none.
    uint32_t thread;
    // Threadgroup, the barriers that it had passed, and the steps that the thread's SIMD group had taken.
    uint32_t group, epoch, step;
};

struct Byte {
    Access write, read;
    // A reader of another SIMD group than `read`'s, in the same epoch, plus one.
    uint32_t other_reader;
};

struct Region {
    char* data;
    size_t bytes;
    bool threadgroup, writable;
    std::string name;
    Byte* shadow;
};

std::vector<Region> regions;
uint32_t group, device_epoch, threadgroup_epoch;

uint32_t simdgroup_of(uint32_t thread_plus_one) { return (thread_plus_one - 1) / MSL_SIMD_WIDTH; }

void found(const char* kind, const Region& region, size_t offset, const Access& other, void* code) {
    char text[300];
    Dl_info info;
    const size_t at = dladdr(code, &info) ? (char*)code - (char*)info.dli_fbase : (size_t)code;
    const char* function = dladdr(code, &info) && info.dli_sname ? info.dli_sname : "?";
    snprintf(text, sizeof text, "%s: %s byte %zu, thread %d and thread %d, in %s (code +0x%zx)", kind, region.name.c_str(), offset,
             current_thread(), (int)other.thread - 1, function, at);
    report(kind + region.name + std::to_string(at), text);
}

void access(const Region& region, size_t offset, bool writes, void* code) {
    Byte& byte = region.shadow[offset];
    const uint32_t me = (uint32_t)current_thread() + 1, simdgroup = current_simdgroup(), step = current_step();
    const uint32_t epoch = region.threadgroup ? threadgroup_epoch : device_epoch;
    const Access now = {me, group, epoch, step};
    // Whether an earlier access of this threadgroup is not in order with this one.
    auto unordered = [&](const Access& then) {
        if (!then.thread || then.thread == me || then.group != group || then.epoch != epoch) return false;
        return simdgroup_of(then.thread) != simdgroup || then.step == step;
    };
    if (writes && !region.writable) found("write to a read-only buffer", region, offset, now, code);
    if (!writes && region.threadgroup && (!byte.write.thread || byte.write.group != group))
        found("read of uninitialized threadgroup memory", region, offset, now, code);
    if (!region.threadgroup && byte.write.thread && byte.write.group != group)
        found(writes ? "two threadgroups write the same place" : "read of what another threadgroup writes", region, offset, byte.write, code);
    if (unordered(byte.write)) found(writes ? "race, write after write" : "race, read after write", region, offset, byte.write, code);
    if (!writes) {
        const bool same_epoch = byte.read.thread && byte.read.group == group && byte.read.epoch == epoch;
        if (same_epoch && simdgroup_of(byte.read.thread) != simdgroup) byte.other_reader = byte.read.thread;
        if (!same_epoch) byte.other_reader = 0;
        byte.read = now;
        return;
    }
    if (unordered(byte.read)) found("race, write after read", region, offset, byte.read, code);
    Access other = byte.read;
    other.thread = byte.other_reader;
    if (byte.other_reader && simdgroup_of(byte.other_reader) != simdgroup && unordered(other))
        found("race, write after read", region, offset, other, code);
    byte.write = now;
}

}  // namespace

void begin() {
    for (Region& region : regions) munmap(region.shadow, region.bytes * sizeof(Byte));
    regions.clear();
    group = 1;
    device_epoch = threadgroup_epoch = 0;
}

void add(void* data, size_t bytes, bool threadgroup, const std::string& name, bool writable) {
    if (bytes == 0) return;
    // One allocation bound twice (keys and values of one pool) is one region, writable if either binding is.
    for (Region& region : regions) {
        if (region.data == data && region.bytes == bytes) {
            region.writable |= writable;
            return;
        }
    }
    void* shadow = mmap(nullptr, bytes * sizeof(Byte), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shadow == MAP_FAILED) abort();
    regions.push_back({(char*)data, bytes, threadgroup, writable, name, (Byte*)shadow});
}

void begin_threadgroup() {
    group++;
    device_epoch++;
    threadgroup_epoch++;
}

void barrier(bool device_memory, bool threadgroup_memory) {
    device_epoch += device_memory;
    threadgroup_epoch += threadgroup_memory;
}

namespace {

void trace(void* address, size_t bytes, bool writes, void* code) {
    if (current_thread() < 0 || is_private(address)) return;
    char* at = (char*)address;
    for (const Region& region : regions) {
        if (at < region.data || at >= region.data + region.bytes) continue;
        const size_t offset = at - region.data;
        if (bytes > region.bytes - offset) {
            Access none = {};
            found("access past the end", region, region.bytes, none, code);
            bytes = region.bytes - offset;
        }
        for (size_t i = 0; i < bytes; i++) access(region, offset + i, writes, code);
        return;
    }
    // Globals of the compiled kernels (function constants) are no buffer, and fine.
    Dl_info info;
    if (dladdr(address, &info)) return;
    char text[200];
    snprintf(text, sizeof text, "%s outside every bound buffer, thread %d, at %p", writes ? "write" : "read", current_thread(), address);
    report("outside" + std::to_string((size_t)code), text);
}

}  // namespace
}  // namespace msl::shadow

#define MSL_TRACE(bytes)                                                                              \
    extern "C" void __sanitizer_cov_load##bytes(void* address) {                                      \
        msl::shadow::trace(address, bytes, false, __builtin_return_address(0));                       \
    }                                                                                                 \
    extern "C" void __sanitizer_cov_store##bytes(void* address) {                                     \
        msl::shadow::trace(address, bytes, true, __builtin_return_address(0));                        \
    }
MSL_TRACE(1) MSL_TRACE(2) MSL_TRACE(4) MSL_TRACE(8) MSL_TRACE(16)
