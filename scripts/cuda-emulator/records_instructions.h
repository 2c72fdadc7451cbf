// records_instructions.cuh, emulated: copies at once.
#pragma once
namespace records {
static inline void bulk_load(unsigned long long, unsigned to, unsigned long long from, int bytes, unsigned barrier) {
    hopper::bulk_load(to, (const void *)from, bytes, barrier);
}
} // namespace records
