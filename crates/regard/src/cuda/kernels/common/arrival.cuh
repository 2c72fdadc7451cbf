// Counters that CTAs arrive at when they have stored their part: the last to arrive reads what all of them stored.
#pragma once

// Counts an arrival, releases what the caller stored and acquires what earlier arrivals released. Returns how many
// there were before. Called by one thread, after a barrier of those whose stores count.
static __device__ __forceinline__ unsigned count_arrival(unsigned *counter) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}
