// The instructions behind metal.h, for SPIR-V: builtins of OpenCL.
#pragma once
#pragma clang system_header

float native_exp2(float);
float native_log2(float);
float native_sin(float);
float native_cos(float);
float sub_group_shuffle(float, uint);
float sub_group_shuffle_xor(float, uint);
void work_group_barrier(uint);
ulong get_group_id(uint);
ulong get_local_id(uint);
uint get_sub_group_local_id();
uint get_sub_group_id();

// One instruction each, or the shortest formula, also for the precise variants, whose registers are not known.
inline float log(float x) { return native_log2(x) * 0.693147181f; }
inline float exp2(float x) { return native_exp2(x); }
namespace precise {
inline float tanh(float x) {
    const float e = native_exp2(x * 2.88539008f);
    return (e - 1.0f) / (e + 1.0f);
}
}
namespace fast {
inline float sin(float x) { return native_sin(x); }
inline float cos(float x) { return native_cos(x); }
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { work_group_barrier(1); }
inline void simdgroup_barrier(mem_flags) {}
inline float simd_shuffle_xor(float value, ushort mask) { return sub_group_shuffle_xor(value, mask); }
inline float simd_shuffle(float value, ushort lane) { return sub_group_shuffle(value, lane); }
inline float opaque_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// The place of a thread in the grid.
inline uint thread_index_in_threadgroup() { return get_local_id(0); }
inline uint thread_index_in_simdgroup() { return get_sub_group_local_id(); }
inline uint simdgroup_index_in_threadgroup() { return get_sub_group_id(); }
inline uint3 threadgroup_position_in_grid() {
    uint3 v;
    v.x = get_group_id(0);
    v.y = get_group_id(1);
    v.z = get_group_id(2);
    return v;
}
