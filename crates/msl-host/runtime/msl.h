// The vocabulary of <metal_stdlib> and <metal_simdgroup_matrix> for clang, as far as compute kernels commonly need it.
// Missing functions do not compile; nothing is approximated silently.
#pragma once
#include "runtime.h"

// ---- words of the language ------------------------------------------------------------------------------------------------
#ifdef MSL_TYPECHECK  // only checked, never run: address spaces are real and distinct
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920928955e-07f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef msl_size size_t;
typedef _Float16 half;
typedef __bf16 bfloat;
constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }

namespace metal {

// ---- vectors --------------------------------------------------------------------------------------------------------------
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define MSL_VECTORS(T)                                 \
    typedef T T##2 __attribute__((ext_vector_type(2))); \
    typedef T T##3 __attribute__((ext_vector_type(3))); \
    typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(short)
MSL_VECTORS(ushort) MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(long) MSL_VECTORS(ulong)
#undef MSL_VECTORS

// Number of components (0 for a scalar) and their type.
template <class V>
struct components {
    static constexpr int count = 0;
    using type = V;
};
template <class T, int N>
struct components<vec<T, N>> {
    static constexpr int count = N;
    using type = T;
};

template <class T, int N, class V>
inline void append_components(vec<T, N>& vector, int& filled, V value) {
    if constexpr (components<V>::count > 0) {
        for (int i = 0; i < components<V>::count; i++) vector[filled++] = (T)value[i];
    } else {
        vector[filled++] = (T)value;
    }
}

// float4(x), float4(a, b, c, d), float4(xy, zw), half4(float4): Metal's vector constructors. Construction is a macro, because a
// type name and a function cannot share a name.
template <class T, int N, class... A>
inline vec<T, N> make_vector(A... values) {
    vec<T, N> vector;
    int filled = 0;
    if constexpr (sizeof...(A) == 1 && (components<A>::count + ... + 0) == 0) {
        for (int i = 0; i < N; i++) vector[i] = (T)(values + ...);
    } else {
        static_assert(((components<A>::count > 0 ? components<A>::count : 1) + ... + 0) == N, "wrong number of components");
        (append_components<T, N>(vector, filled, values), ...);
    }
    return vector;
}

// ---- types about types ----------------------------------------------------------------------------------------------------
template <class A, class B>
inline constexpr bool is_same_v = __is_same(A, B);
template <bool B, class T, class F>
struct conditional {
    using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
    using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
    using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <class T, class U>
inline T as_type(U value) {
    return __builtin_bit_cast(T, value);
}

// ---- mathematics: computed in float, rounded once to the argument's type; vectors by component -------------------------------
#define MSL_UNARY(name, function)                                                                                   \
    template <class T>                                                                                              \
    inline T name(T x) {                                                                                            \
        if constexpr (components<T>::count > 0) {                                                                   \
            T y;                                                                                                    \
            for (int i = 0; i < components<T>::count; i++) y[i] = (typename components<T>::type)function((float)x[i]); \
            return y;                                                                                               \
        } else {                                                                                                    \
            return (T)function((float)x);                                                                           \
        }                                                                                                           \
    }
MSL_UNARY(exp, __builtin_expf) MSL_UNARY(exp2, __builtin_exp2f) MSL_UNARY(log, __builtin_logf) MSL_UNARY(log2, __builtin_log2f)
MSL_UNARY(sqrt, __builtin_sqrtf) MSL_UNARY(tanh, __builtin_tanhf) MSL_UNARY(sin, __builtin_sinf) MSL_UNARY(cos, __builtin_cosf)
MSL_UNARY(floor, __builtin_floorf) MSL_UNARY(ceil, __builtin_ceilf) MSL_UNARY(round, __builtin_roundf)
MSL_UNARY(rint, __builtin_rintf) MSL_UNARY(fabs, __builtin_fabsf)
#undef MSL_UNARY
template <class T>
inline T rsqrt(T x) {
    return (T)(1.0f / __builtin_sqrtf((float)x));
}
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <int N>
inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
    return __builtin_elementwise_fma(a, b, c);
}
template <class T>
inline bool isfinite(T x) {
    return __builtin_isfinite((float)x);
}
template <class T>
inline bool isinf(T x) {
    return __builtin_isinf((float)x);
}
template <class T>
inline bool isnan(T x) {
    return __builtin_isnan((float)x);
}
template <class T>
inline T abs(T x) {
    return x < T(0) ? -x : x;
}
// Returns the number if one operand is NaN, as Metal does.
template <class T>
inline T max(T a, T b) {
    if constexpr (components<T>::count > 0) return __builtin_elementwise_max(a, b);
    else return a != a ? b : b != b ? a : a < b ? b : a;
}
template <class T>
inline T min(T a, T b) {
    if constexpr (components<T>::count > 0) return __builtin_elementwise_min(a, b);
    else return a != a ? b : b != b ? a : b < a ? b : a;
}
template <class T>
inline T clamp(T x, T low, T high) {
    return min(max(x, low), high);
}
template <class T>
inline T select(T a, T b, bool choose_b) {
    return choose_b ? b : a;
}
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
    T sum = 0;
    for (int i = 0; i < N; i++) sum += a[i] * b[i];
    return sum;
}
namespace precise {
using metal::exp, metal::exp2, metal::log, metal::log2, metal::max, metal::min, metal::sqrt, metal::rsqrt, metal::tanh;
}
namespace fast {
// As inexact as a GPU may be: off by up to 4 + floor(|2 x|) ulp, by an amount and a sign that look random but depend on x alone.
// Subnormal results are flushed.
inline float exp2(float x) {
    const float exact = __builtin_exp2f(x);
    if (!(x > -126.0f && x < 127.0f)) return x < 0.0f && exact < FLT_MIN ? 0.0f : exact;
    const uint bound = 4u + (uint)(2.0f * __builtin_fabsf(x));
    const uint noise = __builtin_bit_cast(uint, x) * 2654435761u >> 16;
    // 2^0 is exact, and the error grows away from it.
    const int ulps = x == 0.0f ? 0 : (int)(noise % (2u * bound + 1u)) - (int)bound;
    return __builtin_bit_cast(float, __builtin_bit_cast(int, exact) + ulps);
}
}  // namespace fast

// ---- barriers -------------------------------------------------------------------------------------------------------------
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) { msl_threadgroup_barrier((int)flags, line); }
inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) { msl_simdgroup_barrier((int)flags, line); }

// ---- SIMD groups: each lane leaves a value, all meet, each reads what it needs ------------------------------------------------
struct alignas(MSL_SLOT_BYTES) Slot {
    char bytes[MSL_SLOT_BYTES];
};
template <class T>
struct Lanes {
    const char* slots;
    T operator[](unsigned lane) const {
        T value;
        __builtin_memcpy(&value, slots + MSL_SLOT_BYTES * (lane % MSL_SIMD_WIDTH), sizeof(T));
        return value;
    }
};
template <class T>
inline Lanes<T> meet(T value, const char* what, int line) {
    static_assert(sizeof(T) <= MSL_SLOT_BYTES, "too large to exchange");
    Slot slot{};
    __builtin_memcpy(slot.bytes, &value, sizeof(T));
    return {(const char*)msl_exchange(&slot, what, line)};
}
#define MSL_LINE int line = __builtin_LINE()
#define MSL_REDUCTION(name, combine)                                           \
    template <class T>                                                         \
    inline T name(T value, MSL_LINE) {                                         \
        Lanes<T> lanes = meet(value, #name, line);                             \
        T a[MSL_SIMD_WIDTH];                                                   \
        for (int i = 0; i < MSL_SIMD_WIDTH; i++) a[i] = lanes[i];              \
        for (int half = MSL_SIMD_WIDTH / 2; half > 0; half /= 2)               \
            for (int i = 0; i < half; i++) {                                   \
                T x = a[i], y = a[i + half];                                   \
                a[i] = combine;                                                \
            }                                                                  \
        return a[0];                                                           \
    }
MSL_REDUCTION(simd_sum, x + y) MSL_REDUCTION(simd_product, x* y) MSL_REDUCTION(simd_max, metal::max(x, y))
MSL_REDUCTION(simd_min, metal::min(x, y)) MSL_REDUCTION(simd_and, x& y) MSL_REDUCTION(simd_or, x | y)
MSL_REDUCTION(simd_xor, x ^ y)
#undef MSL_REDUCTION
template <class T>
inline T simd_shuffle(T value, ushort lane, MSL_LINE) {
    return meet(value, "simd_shuffle", line)[lane];
}
template <class T>
inline T simd_broadcast(T value, ushort lane, MSL_LINE) {
    return meet(value, "simd_broadcast", line)[lane];
}
template <class T>
inline T simd_broadcast_first(T value, MSL_LINE) {
    return meet(value, "simd_broadcast_first", line)[0];
}
template <class T>
inline T simd_shuffle_xor(T value, ushort mask, MSL_LINE) {
    return meet(value, "simd_shuffle_xor", line)[msl_lane() ^ mask];
}
template <class T>
inline T simd_shuffle_down(T value, ushort delta, MSL_LINE) {
    Lanes<T> lanes = meet(value, "simd_shuffle_down", line);
    return msl_lane() + delta < MSL_SIMD_WIDTH ? lanes[msl_lane() + delta] : value;
}
template <class T>
inline T simd_shuffle_up(T value, ushort delta, MSL_LINE) {
    Lanes<T> lanes = meet(value, "simd_shuffle_up", line);
    return msl_lane() >= delta ? lanes[msl_lane() - delta] : value;
}
template <class T>
inline T simd_prefix_inclusive_sum(T value, MSL_LINE) {
    Lanes<T> lanes = meet(value, "simd_prefix_inclusive_sum", line);
    T sum = lanes[0];
    for (unsigned i = 1; i <= msl_lane(); i++) sum = sum + lanes[i];
    return sum;
}
inline bool simd_all(bool value, MSL_LINE) { return simd_and((int)value, line) != 0; }
inline bool simd_any(bool value, MSL_LINE) { return simd_or((int)value, line) != 0; }
inline bool simd_is_first() { return msl_lane() == 0; }

// ---- 8 x 8 matrices, two elements per lane in the order of Apple's hardware -------------------------------------------------------
inline unsigned matrix_row(unsigned lane) { return (lane / 4 & 4) + (lane / 2) % 4; }
inline unsigned matrix_column(unsigned lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
// The lane that holds an element; the inverse of the two above.
inline unsigned matrix_lane(unsigned row, unsigned column) {
    return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1;
}

template <class T, int Columns = 8, int Rows = 8>
struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "Metal has 8 x 8 matrices only");
    vec<T, 2> elements;
    // Unwritten registers hold anything; NaN shows.
    simdgroup_matrix() { __builtin_memset(&elements, 0xff, sizeof elements); }
    explicit simdgroup_matrix(T value) { elements = value; }
    vec<T, 2>& thread_elements() { return elements; }
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
    return simdgroup_matrix<T, Columns, Rows>(value);
}

#define MSL_MATRIX_OFFSET(transpose)                                                                             \
    unsigned row = matrix_row(msl_lane()), column = matrix_column(msl_lane()) + i;                               \
    long offset = (long)(((transpose ? column : row) + origin.y) * stride + (transpose ? row : column) + origin.x)
#define MSL_LOAD(space)                                                                                           \
    template <class T>                                                                                            \
    inline void simdgroup_load(simdgroup_matrix<T>& matrix, space T* from, ulong stride = 8, ulong2 origin = 0,     \
                               bool transpose = false) {                                                          \
        for (unsigned i = 0; i < 2; i++) {                                                                        \
            MSL_MATRIX_OFFSET(transpose);                                                                         \
            matrix.elements[i] = from[offset];                                                                    \
        }                                                                                                         \
    }
#define MSL_STORE(space)                                                                                          \
    template <class T>                                                                                            \
    inline void simdgroup_store(simdgroup_matrix<T> matrix, space T* to, ulong stride = 8, ulong2 origin = 0,       \
                                bool transpose = false) {                                                         \
        for (unsigned i = 0; i < 2; i++) {                                                                        \
            MSL_MATRIX_OFFSET(transpose);                                                                         \
            to[offset] = matrix.elements[i];                                                                      \
        }                                                                                                         \
    }
#ifdef MSL_TYPECHECK
MSL_LOAD(const device) MSL_LOAD(const threadgroup) MSL_STORE(device) MSL_STORE(threadgroup)
#else
MSL_LOAD(const) MSL_STORE()
#endif
#undef MSL_LOAD
#undef MSL_STORE
#undef MSL_MATRIX_OFFSET

// d = a b + c, in float, each element one chain of fused multiply-adds in depth order.
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a, const simdgroup_matrix<B>& b,
                                          const simdgroup_matrix<C>& c, MSL_LINE) {
    struct Pair {
        float a[2], b[2];
    };
    Pair mine = {{(float)a.elements[0], (float)a.elements[1]}, {(float)b.elements[0], (float)b.elements[1]}};
    Lanes<Pair> lanes = meet(mine, "simdgroup_multiply_accumulate", line);
    unsigned row = matrix_row(msl_lane()), column = matrix_column(msl_lane());
    float sum[2] = {(float)c.elements[0], (float)c.elements[1]};
    for (unsigned k = 0; k < 8; k++) {
        float left = lanes[matrix_lane(row, k)].a[k % 2];
        Pair right = lanes[matrix_lane(k, column)];
        for (unsigned i = 0; i < 2; i++) sum[i] = __builtin_fmaf(left, right.b[i], sum[i]);
    }
    for (unsigned i = 0; i < 2; i++) d.elements[i] = (D)sum[i];
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D>& d, const simdgroup_matrix<A>& a, const simdgroup_matrix<B>& b, MSL_LINE) {
    simdgroup_multiply_accumulate(d, a, b, simdgroup_matrix<D>(D(0)), line);
}
#undef MSL_LINE

}  // namespace metal

#define float2(...) metal::make_vector<float, 2>(__VA_ARGS__)
#define float3(...) metal::make_vector<float, 3>(__VA_ARGS__)
#define float4(...) metal::make_vector<float, 4>(__VA_ARGS__)
#define half2(...) metal::make_vector<half, 2>(__VA_ARGS__)
#define half4(...) metal::make_vector<half, 4>(__VA_ARGS__)
#define bfloat2(...) metal::make_vector<bfloat, 2>(__VA_ARGS__)
#define bfloat4(...) metal::make_vector<bfloat, 4>(__VA_ARGS__)
#define int2(...) metal::make_vector<int, 2>(__VA_ARGS__)
#define int3(...) metal::make_vector<int, 3>(__VA_ARGS__)
#define int4(...) metal::make_vector<int, 4>(__VA_ARGS__)
#define uint2(...) metal::make_vector<uint, 2>(__VA_ARGS__)
#define uint3(...) metal::make_vector<uint, 3>(__VA_ARGS__)
#define uint4(...) metal::make_vector<uint, 4>(__VA_ARGS__)
#define ulong2(...) metal::make_vector<ulong, 2>(__VA_ARGS__)

// ---- what the generator writes ---------------------------------------------------------------------------------------------
// A threadgroup variable of a kernel's body.
#ifdef MSL_TYPECHECK
#define MSL_THREADGROUP(name, ...) static threadgroup __VA_ARGS__
#else
#define MSL_THREADGROUP(name, ...) \
    static __VA_ARGS__;            \
    msl_declare_threadgroup(&name, sizeof name, #name)
#endif

// A function constant: set when the kernel is chosen, reported where it is read without having been set.
template <class T>
inline T msl_constant_value(T value, bool defined, const char* name) {
    if (!defined) msl_constant_undefined(name);
    return value;
}

// A kernel's parameter of type P, from what was bound and from where the thread is.
template <class>
struct msl_signature;
template <class R, class... A>
struct msl_signature<R(A...)> {
    template <int I>
    using parameter = __type_pack_element<I, A...>;
};
template <class P>
struct msl_parameter {
    static P buffer(void* data) {
        if constexpr (__is_pointer(P)) return (P)data;
        else return *(__remove_reference_t(P)*)data;
    }
    static P position(unsigned index) { return (P)index; }
    static P position(msl_uint3 at) {
        if constexpr (metal::components<P>::count == 3) {
            return metal::make_vector<typename metal::components<P>::type, 3>(at.x, at.y, at.z);
        } else if constexpr (metal::components<P>::count == 2) {
            return metal::make_vector<typename metal::components<P>::type, 2>(at.x, at.y);
        } else {
            return (P)at.x;
        }
    }
};
