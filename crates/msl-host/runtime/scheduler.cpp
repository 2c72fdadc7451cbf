// Runs a dispatch: threadgroup by threadgroup, each thread a fiber that runs until it has to wait for others. Compiled without
// instrumentation; every change of stack is announced to AddressSanitizer.
#include "scheduler.h"
#include "switch.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <algorithm>
#include <map>
#include <set>
#include <vector>

extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* data, size_t size);
}

msl_constant msl_constants[MSL_CONSTANTS];

namespace msl {
namespace {

constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned MAX_THREADS = 1024;
constexpr unsigned MAX_FINDINGS = 20;

enum class State { Ready, InSimdgroup, InThreadgroup, Done };

struct Fiber {
    void* stack_pointer;
    char* stack;
    State state;
    // The call that it waits at.
    const char* what;
    int line, flags;
    // The row of slots, of its SIMD group's two, that it writes next.
    unsigned parity;
    msl_position position;
    unsigned simdgroup;
};

struct Simdgroup {
    // Two rows: a lane may write its next value before the slowest has read the last one.
    alignas(MSL_SLOT_BYTES) char slots[2][MSL_SIMD_WIDTH][MSL_SLOT_BYTES];
    unsigned threads, live, waiting;
    // Steps that order memory: SIMD-group barriers and threadgroup barriers.
    unsigned step;
};

std::vector<Fiber> fibers;
std::vector<Simdgroup> simdgroups;
int current = -1;
void* scheduler_stack_pointer;
const void* scheduler_stack;
size_t scheduler_stack_bytes;

const msl_kernel* kernel;
msl_arguments arguments;
unsigned threads, done, at_barrier;

int findings;
std::set<std::string> told;
void (*tell)(void*, const char*);
void* tell_context;

std::map<std::string, const msl_kernel*>& kernels() {
    static std::map<std::string, const msl_kernel*> all;
    return all;
}

// ---- threadgroup memory -----------------------------------------------------------------------------------------------------
struct Declared {
    void* data;
    bool this_group;
};
std::vector<Declared> declared;
size_t threadgroup_bytes;

// All bits set is NaN in every floating type.
void poison(void* data, size_t bytes) { memset(data, 0xff, bytes); }

// ---- fibers -----------------------------------------------------------------------------------------------------------------
void leave_fiber() {
    bool ends = fibers[current].state == State::Done;
    static void* fake_stack;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack, scheduler_stack, scheduler_stack_bytes);
    msl_switch_stack(&fibers[current].stack_pointer, scheduler_stack_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void fiber_main() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    kernel->entry();
    fibers[current].state = State::Done;
    leave_fiber();
    abort();
}

void resume(unsigned index) {
    current = (int)index;
    static void* fake_stack;
    if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&fake_stack, fibers[index].stack, STACK_BYTES);
    msl_switch_stack(&scheduler_stack_pointer, fibers[index].stack_pointer);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
    current = -1;
}

void start_fiber(unsigned index, const msl_dispatch& dispatch, msl_uint3 group) {
    Fiber& fiber = fibers[index];
    const msl_uint3 size = dispatch.threads_per_threadgroup, groups = dispatch.threadgroups;
    const msl_uint3 in_group = {index % size.x, index / size.x % size.y, index / size.x / size.y};
    fiber.state = State::Ready;
    fiber.parity = 0;
    fiber.simdgroup = index / MSL_SIMD_WIDTH;
    fiber.position = {
        group,
        in_group,
        {group.x * size.x + in_group.x, group.y * size.y + in_group.y, group.z * size.z + in_group.z},
        size,
        groups,
        {groups.x * size.x, groups.y * size.y, groups.z * size.z},
        index % MSL_SIMD_WIDTH,
        fiber.simdgroup,
        index,
        (threads + MSL_SIMD_WIDTH - 1) / MSL_SIMD_WIDTH,
        MSL_SIMD_WIDTH,
    };
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
    void** top = (void**)(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = (void*)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;  // the six registers that msl_switch_stack pops
    fiber.stack_pointer = top;
}

// ---- meeting points -----------------------------------------------------------------------------------------------------------
// All live lanes of a SIMD group wait: they go on together, if they wait at the same place.
void release_simdgroup(unsigned index) {
    Simdgroup& group = simdgroups[index];
    const Fiber* first = nullptr;
    bool same = true;
    for (unsigned i = index * MSL_SIMD_WIDTH; i < index * MSL_SIMD_WIDTH + group.threads; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state != State::InSimdgroup) continue;
        if (!first) first = &fiber;
        same = same && fiber.line == first->line && !strcmp(fiber.what, first->what);
        fiber.state = State::Ready;
    }
    if (!same || group.live != group.threads) {
        char text[300];
        snprintf(text, sizeof text, "divergence: SIMD group %u runs %s (line %d) with %s (%u of %u lanes live)", index, first->what,
                 first->line, same ? "lanes gone" : "lanes at different calls", group.live, group.threads);
        report("divergence" + std::to_string(first->line), text);
    }
    if (!strcmp(first->what, "simdgroup_barrier") && first->flags != 0) group.step++;
    group.waiting = 0;
}

// All live threads of the threadgroup wait at a barrier.
void release_threadgroup() {
    const Fiber* first = nullptr;
    bool same = true;
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state != State::InThreadgroup) continue;
        if (!first) first = &fiber;
        same = same && fiber.line == first->line;
        fiber.state = State::Ready;
    }
    if (!same || done > 0) {
        char text[200];
        snprintf(text, sizeof text, "divergence: threadgroup_barrier (line %d) with %s", first->line,
                 same ? "threads gone" : "threads at different barriers");
        report("barrier" + std::to_string(first->line), text);
    }
    at_barrier = 0;
    shadow::barrier(first->flags & 1, first->flags & 2);
    for (Simdgroup& group : simdgroups) group.step++;
}

void report_deadlock() {
    std::string waiting;
    for (unsigned i = 0; i < threads; i++) {
        const Fiber& fiber = fibers[i];
        if (fiber.state == State::Done || (i > 0 && fiber.line == fibers[i - 1].line)) continue;
        waiting += " thread " + std::to_string(i) + " at " + fiber.what + " (line " + std::to_string(fiber.line) + ")";
    }
    report("deadlock", "deadlock:" + waiting);
}

// ---- one threadgroup ------------------------------------------------------------------------------------------------------------
// The order in which SIMD groups and lanes get their turn. It is unfair on purpose: a SIMD group runs as far as it can before the
// next one starts, because taking turns fairly hides missing barriers.
struct Order {
    unsigned schedule, state;
    std::vector<unsigned> groups;

    explicit Order(unsigned schedule, unsigned count) : schedule(schedule), state(schedule * 2654435761u + 12345u) {
        for (unsigned i = 0; i < count; i++) groups.push_back(schedule == 1 ? count - 1 - i : i);
        shuffle();
    }
    unsigned random() {
        state ^= state << 13;
        state ^= state >> 17;
        return state ^= state << 5;
    }
    void shuffle() {
        if (schedule < 2) return;
        for (unsigned i = (unsigned)groups.size(); i > 1; i--) std::swap(groups[i - 1], groups[random() % i]);
    }
    unsigned first_lane(unsigned count) { return schedule < 2 ? 0 : random() % count; }
    unsigned lane(unsigned i, unsigned first, unsigned count) const {
        return schedule == 1 ? count - 1 - i : (i + first) % count;
    }
};

// Gives every ready lane of one SIMD group a turn; whether there was one.
bool run_simdgroup(unsigned index, Order& order) {
    Simdgroup& group = simdgroups[index];
    bool ran = false;
    const unsigned first = order.first_lane(group.threads);
    for (unsigned i = 0; i < group.threads; i++) {
        const unsigned thread_index = index * MSL_SIMD_WIDTH + order.lane(i, first, group.threads);
        if (fibers[thread_index].state != State::Ready) continue;
        ran = true;
        resume(thread_index);
        if (fibers[thread_index].state == State::Done) {
            done++;
            group.live--;
        }
    }
    if (group.waiting > 0 && group.waiting == group.live) {
        release_simdgroup(index);
        ran = true;
    }
    return ran;
}

void grow(unsigned count) {
    while (fibers.size() < count) {
        Fiber fiber = {};
        fiber.stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fiber.stack == MAP_FAILED) abort();
        fibers.push_back(fiber);
    }
}

// Whether it came to an end.
bool run_threadgroup(const msl_dispatch& dispatch, msl_uint3 group) {
    const unsigned count = (threads + MSL_SIMD_WIDTH - 1) / MSL_SIMD_WIDTH;
    grow(threads);
    simdgroups.resize(count);
    done = at_barrier = 0;
    threadgroup_bytes = 0;
    for (Declared& variable : declared) variable.this_group = false;
    shadow::begin_threadgroup();
    for (unsigned i = 0; i < MSL_THREADGROUP_BUFFERS; i++) {
        if (!dispatch.threadgroup_bytes[i]) continue;
        poison(arguments.threadgroup_memory[i], dispatch.threadgroup_bytes[i]);
        threadgroup_bytes += dispatch.threadgroup_bytes[i];
    }
    for (unsigned i = 0; i < count; i++) {
        simdgroups[i].threads = simdgroups[i].live = std::min(threads - i * MSL_SIMD_WIDTH, (unsigned)MSL_SIMD_WIDTH);
        simdgroups[i].waiting = 0;
    }
    for (unsigned i = 0; i < threads; i++) start_fiber(i, dispatch, group);
    Order order(dispatch.schedule, count);
    while (done < threads) {
        bool ran = false;
        for (unsigned i = 0; i < count && !ran; i++) ran = run_simdgroup(order.groups[i], order);
        if (ran && dispatch.schedule > 1 && order.random() % 64 == 0) order.shuffle();
        if (at_barrier > 0 && at_barrier + done == threads) {
            release_threadgroup();
            ran = true;
        }
        if (!ran && done < threads) {
            report_deadlock();
            return false;
        }
    }
    if (threadgroup_bytes > dispatch.threadgroup_limit) {
        report("threadgroup memory", "the threadgroup uses " + std::to_string(threadgroup_bytes) + " bytes of threadgroup memory, more than the limit of " +
                                         std::to_string(dispatch.threadgroup_limit));
    }
    return true;
}

}  // namespace

void report(const std::string& key, const std::string& finding) {
    findings++;
    if (told.size() < MAX_FINDINGS && told.insert(key).second) tell(tell_context, finding.c_str());
}

int current_thread() { return current; }
unsigned current_simdgroup() { return fibers[current].simdgroup; }
unsigned current_step() { return simdgroups[fibers[current].simdgroup].step; }
bool is_private(const void* address) {
    const char* at = (const char*)address;
    const Fiber& fiber = fibers[current];
    const char* groups = (const char*)simdgroups.data();
    return (at >= fiber.stack && at < fiber.stack + STACK_BYTES) ||
           (at >= groups && at < groups + simdgroups.size() * sizeof(Simdgroup)) ||
           (at >= (const char*)&fiber && at < (const char*)(&fiber + 1));
}

}  // namespace msl

using namespace msl;

extern "C" {

void msl_register(const msl_kernel* registered, int count) {
    for (int i = 0; i < count; i++) kernels()[registered[i].name] = &registered[i];
}

const msl_position* msl_where() { return &fibers[current].position; }
const msl_arguments* msl_bound() { return &arguments; }
unsigned msl_lane() { return fibers[current].position.thread_index_in_simdgroup; }

const void* msl_exchange(const void* slot, const char* what, int line) {
    Fiber& fiber = fibers[current];
    Simdgroup& group = simdgroups[fiber.simdgroup];
    const unsigned row = fiber.parity;
    fiber.parity ^= 1;
    memcpy(group.slots[row][fiber.position.thread_index_in_simdgroup], slot, MSL_SLOT_BYTES);
    fiber.state = State::InSimdgroup;
    fiber.what = what;
    fiber.line = line;
    group.waiting++;
    leave_fiber();
    return simdgroups[fibers[current].simdgroup].slots[row];
}

void msl_simdgroup_barrier(int flags, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = State::InSimdgroup;
    fiber.what = "simdgroup_barrier";
    fiber.line = line;
    fiber.flags = flags;
    simdgroups[fiber.simdgroup].waiting++;
    leave_fiber();
}

void msl_threadgroup_barrier(int flags, int line) {
    Fiber& fiber = fibers[current];
    fiber.state = State::InThreadgroup;
    fiber.what = "threadgroup_barrier";
    fiber.line = line;
    fiber.flags = flags;
    at_barrier++;
    leave_fiber();
}

void msl_declare_threadgroup(void* data, size_t bytes, const char* name) {
    auto known = std::find_if(declared.begin(), declared.end(), [&](const Declared& variable) { return variable.data == data; });
    if (known == declared.end()) {
        declared.push_back({data, false});
        known = declared.end() - 1;
        shadow::add(data, bytes, true, name, true);
    }
    if (known->this_group) return;
    known->this_group = true;
    threadgroup_bytes += (bytes + 15) / 16 * 16;
    poison(data, bytes);
}

void msl_constant_undefined(const char* name) {
    report(std::string("constant ") + name, std::string("function constant ") + name + " is read but was not set");
}

int msl_run(const msl_dispatch* dispatch, const unsigned* indices, const double* values, size_t constants,
            void (*report_to)(void*, const char*), void* context) {
    auto found = kernels().find(dispatch->kernel);
    if (found == kernels().end()) return -1;
    kernel = found->second;
    findings = 0;
    told.clear();
    tell = report_to;
    tell_context = context;
    current = -1;
    for (msl_constant& value : msl_constants) value = {};
    for (size_t i = 0; i < constants; i++) msl_constants[indices[i]] = {true, values[i]};
    kernel->set_constants();
    shadow::begin();
    declared.clear();
    // Access to an unbound buffer faults.
    static void* unbound = mmap(nullptr, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < MSL_BUFFERS; i++) {
        const msl_buffer& buffer = dispatch->buffer[i];
        arguments.buffer[i] = buffer.data ? buffer.data : unbound;
        if (buffer.data) shadow::add(buffer.data, buffer.bytes, false, "buffer(" + std::to_string(i) + ")", buffer.writable);
    }
    for (unsigned i = 0; i < MSL_THREADGROUP_BUFFERS; i++) {
        const size_t bytes = dispatch->threadgroup_bytes[i];
        arguments.threadgroup_memory[i] = bytes ? aligned_alloc(16, (bytes + 15) / 16 * 16) : unbound;
        if (bytes) shadow::add(arguments.threadgroup_memory[i], bytes, true, "threadgroup(" + std::to_string(i) + ")", true);
    }
    const msl_uint3 size = dispatch->threads_per_threadgroup, groups = dispatch->threadgroups;
    const unsigned long all = (unsigned long)size.x * size.y * size.z;
    if (all == 0 || all > MAX_THREADS) {
        report("threads", std::to_string(all) + " threads in a threadgroup; Metal allows 1 to 1024");
    } else {
        threads = (unsigned)all;
        bool ended = true;
        const msl_uint3 first = dispatch->first_threadgroup;
        for (unsigned z = first.z; z < groups.z && ended; z++)
            for (unsigned y = first.y; y < groups.y && ended; y++)
                for (unsigned x = first.x; x < groups.x && ended; x++) ended = run_threadgroup(*dispatch, {x, y, z});
    }
    for (unsigned i = 0; i < MSL_THREADGROUP_BUFFERS; i++)
        if (dispatch->threadgroup_bytes[i]) free(arguments.threadgroup_memory[i]);
    return findings;
}
}
