// What a format of keys and values is made of, and its bytes.
#pragma once
#include "common/parameters.cuh"

static __device__ __forceinline__ constexpr bool has_scales(CacheFormat format) {
    return format == CacheFormat::E4M3 || format == CacheFormat::E5M2 || format == CacheFormat::I8;
}

static __device__ __forceinline__ constexpr bool has_blocks(CacheFormat format) {
    return format == CacheFormat::Q8_0 || format == CacheFormat::Q4_0;
}

// Bytes per element, block or latent row in memory, which strides count.
static __device__ __forceinline__ int stored_bytes(CacheFormat format) {
    if (format == CacheFormat::F32) return 4;
    if (format == CacheFormat::F16 || format == CacheFormat::BF16) return 2;
    if (format == CacheFormat::Mla656) return 656;
    return format == CacheFormat::Q8_0 ? 34 : format == CacheFormat::Q4_0 ? 18 : 1;
}
