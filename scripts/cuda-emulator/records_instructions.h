// records_instructions.cuh, emulated: copies at once.
#pragma once
namespace records {
static inline void bulk_load(unsigned long long, unsigned to, unsigned long long from, int bytes, unsigned barrier) {
    if (from % 16 || bytes % 16) abort();
    memcpy(emu_at(to, bytes), (const void *)from, bytes);
    MB &there = hopper::mb(barrier);
    there.tx -= bytes;
    hopper::settle(there);
}
} // namespace records
