// The vocabulary of <metal_stdlib> and <metal_simdgroup_matrix> in C++ for OpenCL, for scripts/metal-compile.py: the shipped kernels through
// clang's OpenCL front end (real address spaces) and through its NVPTX back end and ptxas. It is compiled and never run.
#pragma once
#pragma clang system_header

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define half _Float16
#define METAL_FUNC inline __attribute__((always_inline))
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __bf16 bfloat;

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
typedef vec<int, 2> int2;
typedef vec<uint, 3> uint3;
typedef vec<ulong, 2> ulong2;
inline int2 make_int2(int x, int y) {
    int2 v;
    v.x = x;
    v.y = y;
    return v;
}
inline ulong2 make_ulong2(ulong x, ulong y) {
    ulong2 v;
    v.x = x;
    v.y = y;
    return v;
}
#define int2(...) make_int2(__VA_ARGS__)
#define ulong2(...) make_ulong2(__VA_ARGS__)
// vec<float, N>(x), as the script rewrites it.
template <class V>
inline V convert_to(float x) {
    return V(x);
}
template <class V, class T, int N>
inline V convert_to(vec<T, N> v) {
    return __builtin_convertvector(v, V);
}

template <class T, class U>
inline T as_type(U value) {
    return __builtin_bit_cast(T, value);
}
inline int max(int a, int b) { return a < b ? b : a; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float rint(float x) { return __builtin_rintf(x); }
inline float round(float x) { return __builtin_roundf(x); }
inline int clamp(int x, int low, int high) { return min(max(x, low), high); }
inline float fabs(float x) { return __builtin_fabsf(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <int N>
inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
    return __builtin_elementwise_fma(a, b, c);
}
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

// 8 x 8 matrices: two elements per lane. A product is an opaque pair of FMAs.
template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
    vec<T, 2> elements;
    vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, Columns, Rows> matrix;
    matrix.elements = vec<T, 2>(value);
    return matrix;
}
inline int matrix_lane() {
    int lane;
    __asm__("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}
template <class T>
inline void simdgroup_load(thread simdgroup_matrix<T>& matrix, const threadgroup T* from, ulong stride, ulong2 = ulong2(0, 0),
                           bool transpose = false) {
    const int lane = matrix_lane();
    const ulong row = (lane / 4 & 4) + (lane / 2) % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
    if (transpose) {
        matrix.elements.x = from[column * stride + row];
        matrix.elements.y = from[(column + 1) * stride + row];
    } else {
        matrix.elements = *(const threadgroup vec<T, 2>*)(from + row * stride + column);
    }
}
inline vec<float, 2> as_operand(vec<float, 2> elements) { return elements; }
template <class T>
inline vec<float, 2> as_operand(vec<T, 2> elements) {
    return vec<float, 2>(__builtin_bit_cast(float, elements));
}
template <class A, class B>
inline void simdgroup_multiply_accumulate(thread simdgroup_float8x8& d, thread simdgroup_matrix<A>& a, thread simdgroup_matrix<B>& b,
                                          thread simdgroup_float8x8& c) {
    const vec<float, 2> left = as_operand(a.elements), right = as_operand(b.elements);
    float x, y;
    __asm__("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(left.x), "f"(right.x), "f"(c.elements.x));
    __asm__("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(left.y), "f"(right.y), "f"(c.elements.y));
    d.elements.x = x;
    d.elements.y = y;
}

// Where a thread is.
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
