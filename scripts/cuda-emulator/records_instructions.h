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
static inline void mma_f16(float (&sum)[32], const unsigned (&a)[4], unsigned long long b, int keep) {
    emu_mma_rs<64, Element<ElementType::F16>>(sum, a, b, keep);
}
static inline void mma_bf16(float (&sum)[32], const unsigned (&a)[4], unsigned long long b, int keep) {
    emu_mma_rs<64, Element<ElementType::BF16>>(sum, a, b, keep);
}
} // namespace records
