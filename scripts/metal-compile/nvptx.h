// The instructions behind metal.h, for NVPTX.
#pragma once
#pragma clang system_header

#define UNARY(name, instruction)                                 \
    inline float name(float x) {                                 \
        float y;                                                 \
        __asm__(instruction ".f32 %0, %1;" : "=f"(y) : "f"(x)); \
        return y;                                                \
    }
// One instruction each, also for the precise variants, whose registers are not known.
UNARY(log, "lg2.approx")
UNARY(exp2, "ex2.approx")
namespace precise {
UNARY(tanh, "tanh.approx")
}
namespace fast {
UNARY(sin, "sin.approx")
UNARY(cos, "cos.approx")
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __asm__ volatile("bar.sync 0;" ::: "memory"); }
inline void simdgroup_barrier(mem_flags) { __asm__ volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
inline float simd_shuffle_xor(float value, ushort mask) {
    float y;
    __asm__ volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(value), "r"((uint)mask));
    return y;
}
inline float simd_shuffle(float value, ushort lane) {
    float y;
    __asm__ volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(y) : "f"(value), "r"((uint)lane));
    return y;
}
// One FMA of a matrix product.
inline float opaque_fma(float a, float b, float c) {
    float x;
    __asm__("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
    return x;
}

// The place of a thread in the grid.
#define SPECIAL(name, register)                                      \
    inline uint name() {                                             \
        uint value;                                                  \
        __asm__("mov.u32 %0, %%" register ";" : "=r"(value));        \
        return value;                                                \
    }
SPECIAL(group_x, "ctaid.x") SPECIAL(group_y, "ctaid.y") SPECIAL(group_z, "ctaid.z") SPECIAL(thread_index_in_threadgroup, "tid.x")
SPECIAL(thread_index_in_simdgroup, "laneid")
inline uint simdgroup_index_in_threadgroup() { return thread_index_in_threadgroup() / 32; }
inline uint3 threadgroup_position_in_grid() {
    uint3 v;
    v.x = group_x();
    v.y = group_y();
    v.z = group_z();
    return v;
}
