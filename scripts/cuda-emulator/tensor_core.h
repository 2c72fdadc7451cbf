// The sums of Hopper's tensor cores, bit for bit: mma.sync and wgmma agree (compared on an H200 over f16, bf16 and tf32, with subnormal numbers and zeros).
//
// Products and the number that they are added to are aligned to the largest exponent among them and truncated to 25 bits behind its first, then summed
// exactly; the sum is truncated to f32. A product's exponent is the sum of its factors' exponents, and a subnormal factor has the smallest exponent of its type,
// however small it is: products with it lose the bits that its zeros in front take. Products of zero have no exponent.
#pragma once
static inline int emu_exponent(float x, int smallest) { return std::max((int)(__float_as_uint(x) >> 23 & 255) - 127, smallest); }
// c + a[0] b[0] + a[1] b[1] ... `smallest`: the exponent of the smallest normal number of the factors' type.
template <int DEPTH> static inline float emu_dot(float c, const float *a, const float *b, int smallest) {
    constexpr int NONE = -1000;
    int most = c == 0 ? NONE : emu_exponent(c, -126);
    bool finite = std::isfinite(c);
    double product[DEPTH];
    for (int k = 0; k < DEPTH; k++) {
        product[k] = (double)a[k] * b[k];
        finite &= std::isfinite(product[k]);
        if (product[k] != 0) most = std::max(most, emu_exponent(a[k], smallest) + emu_exponent(b[k], smallest));
    }
    if (!finite) {
        for (int k = 0; k < DEPTH; k++) c += a[k] * b[k];
        return c;
    }
    if (most == NONE) return 0.0f;
    double unit = ldexp(1.0, 25 - most);
    long long sum = (long long)(c * unit);
    for (int k = 0; k < DEPTH; k++) sum += (long long)(product[k] * unit);
    double exact = (double)sum / unit;
    float rounded = (float)exact;
    return std::isfinite(rounded) && fabs(rounded) > fabs(exact) ? nextafterf(rounded, 0.0f) : rounded;
}
