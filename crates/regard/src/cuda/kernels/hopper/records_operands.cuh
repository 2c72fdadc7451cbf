// Operands of decode over records of mla656: fragments of wgmma's first operand, converted from codes in shared memory.
// Rows of 656 bytes, 41 times 16, have no bank conflicts.
#pragma once
#include "common/copy.cuh"
#include "hopper/records_instructions.cuh"
#include "hopper/widen_e4m3.cuh"

namespace records {

constexpr int KEY_STEPS = 2; // products of 16 dims that are issued together

// A pair of f16 as bf16, in which codes are exact too.
static __device__ __forceinline__ unsigned to_bf16(unsigned pair) {
    typedef Element<ElementType::F16> Half;
    return Element<ElementType::BF16>::pack(Half::to_float((unsigned short)pair),
                                            Half::to_float((unsigned short)(pair >> 16)));
}

// 32 dims of a warp's 16 keys as operand A of Q K^T, in f16. A thread has four codes of a key in a word, of 16 dims
// those from 4 t on: products sum them as slots 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. `words`: by ldmatrix.
static __device__ __forceinline__ void key_operands(unsigned (&a)[KEY_STEPS][4], const unsigned (&words)[4]) {
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) {
        hopper::widen_e4m3(words[2 * i], a[i][0], a[i][2]);
        hopper::widen_e4m3(words[2 * i + 1], a[i][1], a[i][3]);
    }
}

// The same for dims that are stored in bf16, in their order. `from`: of this lane's row.
static __device__ __forceinline__ void rotary_operands(unsigned (&a)[KEY_STEPS][4], unsigned from) {
#pragma unroll
    for (int step = 0; step < KEY_STEPS; step++) ldmatrix_x4(a[step], from + step * 32);
}

// The dim in a slot of Q K^T, in pairs: pair `i` of 16 slots.
static __device__ __forceinline__ constexpr int pair_of_slots(int i) { return i % 4 * 2 + i / 4; }

// 16 value dims of 32 keys as operand A of P V, in f16, or in bf16 if the K tile is wide. Rows lane / 4 and lane / 4 +
// 8 are dims 2 (lane / 4) and 2 (lane / 4) + 1. `words`: by ldmatrix, transposed.
template <bool IS_WIDE>
static __device__ __forceinline__ void value_operands(unsigned (&a)[2][4], const unsigned (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Words have two dims of a key, then of the next.
        unsigned even, odd;
        hopper::widen_e4m3(__byte_perm(words[i], 0, 0x3120), even, odd);
        a[i / 2][i % 2 * 2] = IS_WIDE ? to_bf16(even) : even;
        a[i / 2][i % 2 * 2 + 1] = IS_WIDE ? to_bf16(odd) : odd;
    }
}

} // namespace records
