// The converter warpgroup of Hopper prefill over a cache of 8-bit codes: TMA brings a K tile's codes, which the
// converter turns into the swizzled 16-bit tiles that wgmma reads. Codes are exact in f16 and in bf16, without their
// scales: one scale per key/value head joins the scores, another the output.
//
// From the module: ELEMENT_TYPE.
#pragma once
#include "common/formats.cuh"
#include "hopper/skeleton.cuh"

// A K tile's keys or values as codes: one row of DIM bytes per key. The code buffer has one stage, because the 16-bit
// tiles behind it have several.
struct CodeBuffer {
    unsigned long long full, empty;
    int flags; // of the stage that the keys go to

    __device__ __forceinline__ void init() {
        mbarrier_init(full, 1);
        mbarrier_init(empty, 4);
    }
};

template <CacheFormat FORMAT>
static __device__ __forceinline__ void convert_word(unsigned codes, unsigned &first, unsigned &second) {
#if ELEMENT_TYPE == 0
    Codes<FORMAT>::to_f16(codes, first, second);
#else
    if constexpr (FORMAT == CacheFormat::E4M3) {
        // Lower and upper bytes of four bf16 numbers, without the exponent's bias, which the product with 2^120 adds.
        unsigned lower = codes << 4 & 0xf0f0f0f0, upper = (codes >> 4 & 0x07070707) | (codes & 0x80808080);
        first = mul_bf16x2(__byte_perm(lower, upper, 0x5140), 0x7b807b80);
        second = mul_bf16x2(__byte_perm(lower, upper, 0x7362), 0x7b807b80);
    } else {
        Codes<FORMAT>::to_bf16(codes, first, second);
    }
#endif
}

// Converts ROWS rows of DIM codes, by the 128 threads of a warpgroup. A thread takes 16 codes at a time, which are two
// 16-byte chunks of the tile: threads of odd column blocks store the second one first, against bank conflicts. There is
// one converter warp per warp scheduler, so several loads are in flight before the first is converted.
template <CacheFormat FORMAT, int ROWS, int DIM>
static __device__ __forceinline__ void convert_codes(unsigned from, SharedTile<ROWS> to, int thread) {
    constexpr int COLUMNS = DIM / 16, STEP = 128 / COLUMNS, STEPS = ROWS / STEP, AT_ONCE = STEPS % 4 == 0 ? 4 : 2;
    static_assert(128 % COLUMNS == 0 && STEP % 8 == 0 && STEPS % AT_ONCE == 0, "threads keep columns and swizzle");
    int row = thread / COLUMNS, column = thread % COLUMNS, odd = column / 4 % 2;
    unsigned source = from + row * DIM + column * 16, early = to.chunk(row, 2 * column + odd),
             late = to.chunk(row, 2 * column + (odd ^ 1));
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AT_ONCE) {
        uint4 codes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) codes[i] = hopper::ld_shared_v4(source + i * STEP * DIM);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint2 lower = make_uint2(codes[i].x, codes[i].y), upper = make_uint2(codes[i].z, codes[i].w);
            uint2 first = odd ? upper : lower, second = odd ? lower : upper;
            uint4 chunk;
            convert_word<FORMAT>(first.x, chunk.x, chunk.y);
            convert_word<FORMAT>(first.y, chunk.z, chunk.w);
            st_shared_v4(early + i * STEP * 128, chunk);
            convert_word<FORMAT>(second.x, chunk.x, chunk.y);
            convert_word<FORMAT>(second.y, chunk.z, chunk.w);
            st_shared_v4(late + i * STEP * 128, chunk);
        }
        source += AT_ONCE * STEP * DIM, early += AT_ONCE * STEP * 128, late += AT_ONCE * STEP * 128;
    }
}

template <int ROWS, int DIM> static __device__ __forceinline__ void convert_codes(CacheFormat format, unsigned from,
                                                                                  SharedTile<ROWS> to, int thread) {
    if (format == CacheFormat::E4M3) {
        convert_codes<CacheFormat::E4M3, ROWS, DIM>(from, to, thread);
    } else if (format == CacheFormat::E5M2) {
        convert_codes<CacheFormat::E5M2, ROWS, DIM>(from, to, thread);
    } else {
        convert_codes<CacheFormat::I8, ROWS, DIM>(from, to, thread);
    }
}

// The scale of a key/value head; 1 if there is none.
static __device__ __forceinline__ float head_scale(unsigned long long scales, const RowStrides &strides, int kv_head) {
    return scales ? ((const float *)scales)[kv_head * strides.head] : 1.0f;
}
