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
#ifdef __SPIRV__
#include "spirv.h"
#else
#include "nvptx.h"
#endif

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
template <class T>
inline void simdgroup_load(thread simdgroup_matrix<T>& matrix, const threadgroup T* from, ulong stride, ulong2 = ulong2(0, 0),
                           bool transpose = false) {
    const int lane = thread_index_in_simdgroup();
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
    d.elements.x = opaque_fma(left.x, right.x, c.elements.x);
    d.elements.y = opaque_fma(left.y, right.y, c.elements.y);
}
