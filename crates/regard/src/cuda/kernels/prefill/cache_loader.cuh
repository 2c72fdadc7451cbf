// Keys and values that are stored in another format than the tile has: loads of 16-byte chunks of a tile's elements,
// which convert on the way. 8-bit codes come without their scales, blocks and floats as the tile's elements.
#pragma once
#include "common/formats.cuh"
#include "common/stored_format.cuh"
#include "prefill/prefill_shape.cuh"

template <class T> static __device__ __forceinline__ T load_global(unsigned long long address) {
    return *(const T *)address;
}

// A chunk on its way, so that several loads are in flight before the first is converted.
struct RawChunk {
    unsigned words[4];    // CHUNK bytes of codes, or the chunk itself
    unsigned short scale; // of a block
};

// The elements of a row in memory from `address` on, of which a chunk takes those from `first` on.
struct StoredRow {
    unsigned long long address;
    CacheFormat format;

    // Loads a chunk, of which `count` elements exist, one at least.
    __device__ __forceinline__ RawChunk load(int first, int count) const {
        RawChunk raw = {};
        if (has_scales(format)) {
            load_codes(raw, address + first, count);
        } else if (has_blocks(format)) {
            load_block(raw, address + first / 32 * stored_bytes(format), first % 32);
        } else {
            float numbers[CHUNK];
            ElementType type = ElementType((int)format); // the first three formats are the element types
#pragma unroll
            for (int i = 0; i < CHUNK; i++) numbers[i] = i < count ? load_element(address, first + i, type) : 0.0f;
            pack(numbers, raw.words);
        }
        return raw;
    }

    // The chunk of elements.
    __device__ __forceinline__ uint4 convert(const RawChunk &raw, int first) const {
        unsigned words[4] = {raw.words[0], raw.words[1], raw.words[2], raw.words[3]};
        if (format == CacheFormat::E4M3) {
            convert_codes<CacheFormat::E4M3>(raw, words);
        } else if (format == CacheFormat::E5M2) {
            convert_codes<CacheFormat::E5M2>(raw, words);
        } else if (format == CacheFormat::I8) {
            convert_codes<CacheFormat::I8>(raw, words);
        } else if (has_blocks(format)) {
            convert_block(raw, first % 32, words);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

private:
    static __device__ __forceinline__ void pack(const float (&numbers)[CHUNK], unsigned (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = WIDE_ELEMENT ? __float_as_uint(numbers[i])
                                    : E::pack(numbers[2 * i % CHUNK], numbers[(2 * i + 1) % CHUNK]);
    }

    static __device__ __forceinline__ void load_codes(RawChunk &raw, unsigned long long from, int count) {
        if (count >= CHUNK && from % CHUNK == 0) {
#pragma unroll
            for (int i = 0; i < CHUNK / 4; i++) raw.words[i] = load_global<unsigned>(from + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK; i++)
                if (i < count) raw.words[i / 4] |= load_global<unsigned char>(from + i) << (i % 4 * 8);
        }
    }

    // Blocks start at multiples of two bytes. A chunk does not cross a block's halves.
    __device__ __forceinline__ void load_block(RawChunk &raw, unsigned long long block, int within) const {
        raw.scale = load_global<unsigned short>(block);
        unsigned long long from = block + 2 + (format == CacheFormat::Q4_0 ? within % 16 : within);
#pragma unroll
        for (int i = 0; i < CHUNK / 2; i++)
            raw.words[i / 2] |= (unsigned)load_global<unsigned short>(from + 2 * i) << (i % 2 * 16);
    }

    template <CacheFormat FORMAT>
    static __device__ __forceinline__ void convert_codes(const RawChunk &raw, unsigned (&words)[4]) {
        if constexpr (WIDE_ELEMENT) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = __float_as_uint(code_to_float(raw.words[0] >> (8 * i) & 0xff, FORMAT));
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (ElementType(ELEMENT_TYPE) == ElementType::BF16) {
                    Codes<FORMAT>::to_bf16(raw.words[i], words[2 * i], words[2 * i + 1]);
                } else {
                    Codes<FORMAT>::to_f16(raw.words[i], words[2 * i], words[2 * i + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ void convert_block(const RawChunk &raw, int within, unsigned (&words)[4]) const {
        float scale = Element<ElementType::F16>::to_float(raw.scale), numbers[CHUNK];
        bool nibbles = format == CacheFormat::Q4_0;
        int shift = nibbles && within >= 16 ? 4 : 0;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            unsigned byte = raw.words[i / 4] >> (i % 4 * 8) & 0xff;
            int code = nibbles ? (int)(byte >> shift & 15) - 8 : (int)(signed char)byte;
            numbers[i] = (float)code * scale;
        }
        pack(numbers, words);
    }
};
