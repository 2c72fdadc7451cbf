// Quantizing rows of new keys and values, with the bits of src/format.rs and src/quantize.rs. Numbers of f32 pass
// through memory if they have to be rounded, so that no compiler fuses two steps.
#pragma once
#include <cfloat>
#include <cmath>
#include <vector>

inline float rounded(float x) {
    volatile float memory = x;
    return memory;
}

// The nearest code of an 8-bit float, ties to even, saturated.
inline unsigned char float8_code(float x, float largest, int bits, int least_exponent) {
    if (x != x) return 0x7f;
    const double magnitude = std::fmin(std::fabs(x), largest);
    const int exponent = magnitude == 0 ? least_exponent : std::max(std::ilogb(magnitude), least_exponent);
    const int steps = (int)std::nearbyint(std::ldexp(magnitude, bits - exponent));
    return (std::signbit(x) ? 0x80 : 0) | (((exponent - least_exponent) << bits) + steps);
}

inline float largest_code(CacheFormat format) {
    return format == CacheFormat::E4M3 ? 448.0f : format == CacheFormat::E5M2 ? 57344.0f : 127.0f;
}

inline unsigned char code_of(float x, float scale, CacheFormat format) {
    if (x == x) x = scale == 0 ? 0.0f : rounded(x / scale);
    if (format == CacheFormat::E4M3) return float8_code(x, 448, 3, -6);
    if (format == CacheFormat::E5M2) return float8_code(x, 57344, 2, -14);
    return x != x ? 0 : (unsigned char)(int)std::nearbyint(std::fmin(std::fmax(x, -127.0f), 127.0f));
}

inline float largest_magnitude(const float *row, int count) {
    float largest = 0;
    for (int i = 0; i < count; i++) largest = std::fmax(largest, std::fabs(row[i])); // passes over NaN
    return largest;
}

inline float dynamic_scale(const float *row, int count, CacheFormat format) {
    bool broken = false;
    for (int i = 0; i < count; i++) broken |= row[i] != row[i];
    if (broken && format == CacheFormat::I8) return NAN;
    return rounded(std::fmin(largest_magnitude(row, count), FLT_MAX) / largest_code(format));
}

// GGUF's blocks of 32 values.
inline void store_block(const float *x, CacheFormat format, unsigned char *to) {
    const bool nibbles = format == CacheFormat::Q4_0;
    const float largest = largest_magnitude(x, 32);
    float extreme = 0;
    bool broken = false;
    for (int i = 31; i >= 0; i--) {
        if (std::fabs(x[i]) == largest && largest != 0) extreme = x[i];
        broken |= x[i] != x[i];
    }
    float scale = rounded(nibbles ? extreme / -8.0f : largest / 127.0f);
    if (std::fabs(scale) >= 65520) scale = std::copysign(65504.0f, scale);
    float inverse = rounded(1.0f / scale);
    if (!std::isfinite(inverse)) inverse = 0;
    store((unsigned long long)to, 0, ElementType::F16, scale);
    if (broken) *(unsigned short *)to = 0x7e00;
    unsigned char code[32];
    for (int i = 0; i < 32; i++) {
        const float quotient = rounded(x[i] * inverse), place = rounded(quotient + 8.5f);
        if (nibbles) {
            code[i] = place != place ? 0 : (unsigned char)std::fmax(std::fmin(place, 15.0f), 0.0f);
        } else {
            code[i] = quotient != quotient ? 0 : (unsigned char)(int)std::fmin(std::fmax(std::round(quotient), -127.0f), 127.0f);
        }
    }
    for (int i = 0; i < (nibbles ? 16 : 32); i++) to[2 + i] = nibbles ? code[i] | code[i + 16] << 4 : code[i];
}

// Stores a row in a format that is no float type; `at` counts its elements.
inline void store_quantized(const std::vector<float> &row, CacheFormat format, unsigned long long pool, long long at, float *scale, bool is_dynamic) {
    const int count = (int)row.size();
    if (format == CacheFormat::Mla656) {
        unsigned char *to = (unsigned char *)pool + at * 656;
        for (int group = 0; group < 4; group++) {
            const float *values = row.data() + 128 * group, own = dynamic_scale(values, 128, CacheFormat::E4M3);
            ((float *)(to + 512))[group] = own;
            for (int i = 0; i < 128; i++) to[128 * group + i] = code_of(values[i], own, CacheFormat::E4M3);
        }
        for (int i = 512; i < 576; i++) {
            store((unsigned long long)to + 528, i - 512, ElementType::BF16, row[i]);
            if (row[i] != row[i]) ((unsigned short *)(to + 528))[i - 512] = 0x7fc0;
        }
    } else if (format == CacheFormat::Q8_0 || format == CacheFormat::Q4_0) {
        const int bytes = format == CacheFormat::Q8_0 ? 34 : 18;
        for (int i = 0; i < count / 32; i++) store_block(row.data() + 32 * i, format, (unsigned char *)pool + at * bytes + i * bytes);
    } else {
        if (is_dynamic) *scale = dynamic_scale(row.data(), count, format);
        for (int i = 0; i < count; i++) ((unsigned char *)pool)[at + i] = code_of(row[i], *scale, format);
    }
}
