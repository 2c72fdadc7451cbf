// Quantizes a row by a SIMD group: codes, blocks and scales have the bits of src/format.rs and src/quantize.rs.
// Every product and sum is rounded separately, and NaN is recognized by its bits, which fast math cannot change.

METAL_FUNC float magnitude_of(float x) { return as_type<float>(as_type<uint>(x) & 0x7fffffffu); }
METAL_FUNC bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }
METAL_FUNC bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// A row of new keys or values. `rotary_dim` elements from `rotary_start` on are rotated; `angles` holds the cosines of
// all pairs, then their sines.
template <typename T>
struct NewRow {
    device const T* data;
    device const float* angles;
    int dims;
    int rotary_start;
    int rotary_dim;
    bool interleaved;
};

// An element: the first of a pair is x cos - y sin, the second y cos + x sin. Products are rounded as on the CPU.
template <typename T>
METAL_FUNC float load_rotated(NewRow<T> row, int dim) {
    const float own = float(row.data[dim]);
    const int place = dim - row.rotary_start;
    if (place < 0 || place >= row.rotary_dim) return own;
    const int pairs = row.rotary_dim / 2;
    const bool is_first = row.interleaved ? place % 2 == 0 : place < pairs;
    const int pair = row.interleaved ? place / 2 : place % pairs;
    const int partner = row.interleaved ? place ^ 1 : (is_first ? place + pairs : place - pairs);
    const float other = float(row.data[row.rotary_start + partner]) * row.angles[pairs + pair];
    return own * row.angles[pair] + (is_first ? -other : other);
}

// ---- codes under a scale --------------------------------------------------------------------------------------------

METAL_FUNC float largest_code(int format) {
    if (is_format(format, KvFormat::E4M3)) return 448.0f;
    return is_format(format, KvFormat::E5M2) ? 57344.0f : 127.0f;
}

// The nearest code of an 8-bit float with `mantissa_bits` mantissa bits and smallest normal number 2^min_exponent,
// ties to even, saturated.
METAL_FUNC uint encode_float8(float x, float largest, int mantissa_bits, int min_exponent) {
    if (is_nan(x)) return 0x7fu;
    const uint sign = as_type<uint>(x) >> 24 & 0x80u;
    const float magnitude = min(magnitude_of(x), largest);
    const int exponent = max(int(as_type<uint>(magnitude) >> 23) - 127, min_exponent);
    // The distance between neighbours is 2^(exponent - mantissa_bits): the quotient is exact.
    const float steps = magnitude * as_type<float>(uint(127 + mantissa_bits - exponent) << 23);
    // Steps run on into the exponent: 2^mantissa_bits of them are the least normal number.
    return sign | (uint(exponent - min_exponent) * (1u << uint(mantissa_bits)) + uint(rint(steps)));
}

// A code of -127 to 127 as a byte; 0 for NaN.
METAL_FUNC uchar signed_byte(float x) {
    return uchar(is_nan(x) ? 0u : uint(int(min(max(x, -127.0f), 127.0f))) & 0xffu);
}

METAL_FUNC uchar encode(float x, float scale, int format) {
    if (!is_nan(x)) x = magnitude_of(scale) == 0.0f ? 0.0f : x / scale;
    if (is_format(format, KvFormat::E4M3)) return uchar(encode_float8(x, largest_code(format), 3, -6));
    if (is_format(format, KvFormat::E5M2)) return uchar(encode_float8(x, largest_code(format), 2, -14));
    return signed_byte(rint(x));
}

// The scale that maps the row's largest magnitude to the largest code. NaNs are passed over, but make a scale of i8
// NaN.
template <typename T>
METAL_FUNC float dynamic_scale(NewRow<T> row, int format, int lane) {
    float largest = 0.0f;
    bool has_nan = false;
    for (int dim = lane; dim < row.dims; dim += SIMD_WIDTH) {
        const float x = load_rotated(row, dim);
        has_nan = has_nan || is_nan(x);
        largest = is_nan(x) ? largest : max(largest, magnitude_of(x));
    }
    largest = max_of_simdgroup(largest);
    if (any_of_simdgroup(has_nan) && is_format(format, KvFormat::I8)) return as_type<float>(0x7fc00000u);
    return min(largest, 3.402823466e+38f) / largest_code(format);
}

// ---- blocks of 32 values: one value per lane ------------------------------------------------------------------------

// Scales saturate from where a half would be infinite.
METAL_FUNC float saturate_scale(float scale) {
    if (magnitude_of(scale) < 65520.0f) return scale;
    return scale < 0.0f ? -65504.0f : 65504.0f;
}

METAL_FUNC float inverse_scale(float scale) {
    const float inverse = 1.0f / scale;
    return is_finite(inverse) ? inverse : 0.0f;
}

// The scale of a block; NaN if a value is.
METAL_FUNC void store_block_scale(device uchar* block, float scale, bool has_nan) {
    *(device ushort*)block = has_nan ? ushort(0x7e00) : as_type<ushort>(half(scale));
}

// Codes are rounded half away from zero.
METAL_FUNC void store_q8_0(float x, device uchar* block, int lane) {
    const bool has_nan = any_of_simdgroup(is_nan(x));
    const float largest = max_of_simdgroup(is_nan(x) ? 0.0f : magnitude_of(x));
    const float scale = saturate_scale(largest / 127.0f);
    block[2 + lane] = signed_byte(round(x * inverse_scale(scale)));
    if (lane == 0) store_block_scale(block, scale, has_nan);
}

// The first of the values of largest magnitude gets the code -8. Byte i holds value i in its low four bits, and value
// i + 16 in its high ones.
METAL_FUNC void store_q4_0(float x, device uchar* block, int lane) {
    const bool has_nan = any_of_simdgroup(is_nan(x));
    const float magnitude = is_nan(x) ? 0.0f : magnitude_of(x);
    const float largest = max_of_simdgroup(magnitude);
    const float first = -max_of_simdgroup(magnitude == largest ? -float(lane) : -float(SIMD_WIDTH));
    const float extreme = simd_shuffle(x, ushort(first));
    const float scale = saturate_scale((largest == 0.0f ? 0.0f : extreme) / -8.0f);
    const float place = x * inverse_scale(scale) + 8.5f;
    const uint low = uint(is_nan(place) ? 0.0f : min(max(place, 0.0f), 15.0f));
    const uint high = uint(simd_shuffle_xor(float(low), ushort(16)));
    if (lane < 16) block[2 + lane] = uchar(low | high << 4);
    if (lane == 0) store_block_scale(block, scale, has_nan);
}

// ---- latent rows of 576 values: 512 codes, a scale per 128 of them, then the rotary dims in bfloat ------------------

template <typename T>
METAL_FUNC void store_mla656(NewRow<T> row, device uchar* to, int lane) {
    for (int group = 0; group < 4; group++) {
        float values[4];
        float largest = 0.0f;
        UNROLL
        for (int i = 0; i < 4; i++) {
            values[i] = load_rotated(row, 128 * group + SIMD_WIDTH * i + lane);
            largest = is_nan(values[i]) ? largest : max(largest, magnitude_of(values[i]));
        }
        const float scale = min(max_of_simdgroup(largest), 3.402823466e+38f) / 448.0f;
        if (lane == 0) ((device float*)(to + 512))[group] = scale;
        UNROLL
        for (int i = 0; i < 4; i++) {
            to[128 * group + SIMD_WIDTH * i + lane] = encode(values[i], scale, int(KvFormat::E4M3));
        }
    }
    for (int dim = 512 + lane; dim < 576; dim += SIMD_WIDTH) {
        const float x = load_rotated(row, dim);
        ((device ushort*)(to + 528))[dim - 512] = is_nan(x) ? ushort(0x7fc0) : as_type<ushort>(bfloat(x));
    }
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// The destination of a quantized row: its codes or blocks, and its scale, which is computed or given.
struct QuantizedSlot {
    device uchar* codes;
    device float* scale;
    bool is_dynamic;
};

template <typename T>
METAL_FUNC void quantize_row(NewRow<T> row, QuantizedSlot slot, int format, int lane) {
    if (is_format(format, KvFormat::Mla656)) {
        store_mla656(row, slot.codes, lane);
        return;
    }
    if (!has_scales(format)) {
        // Rows are whole blocks.
        for (int block = 0; block < row.dims / SIMD_WIDTH; block++) {
            const float x = load_rotated(row, block * SIMD_WIDTH + lane);
            device uchar* to = slot.codes + long(block) * format_bytes(format);
            if (is_format(format, KvFormat::Q8_0)) store_q8_0(x, to, lane);
            else store_q4_0(x, to, lane);
        }
        return;
    }
    float scale = 0.0f;
    if (slot.is_dynamic) {
        scale = dynamic_scale(row, format, lane);
        if (lane == 0) *slot.scale = scale;
    } else {
        scale = *slot.scale;
    }
    for (int dim = lane; dim < row.dims; dim += SIMD_WIDTH) {
        slot.codes[dim] = encode(load_rotated(row, dim), scale, format);
    }
}
