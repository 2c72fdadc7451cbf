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
    Codes<FORMAT>::to_bf16(codes, first, second);
#endif
}

// Converts ROWS rows of DIM codes, by the 128 threads of a warpgroup. A thread takes 16 codes at a time, which are two
// 16-byte chunks of the tile: threads of odd column blocks store the second one first, against bank conflicts.
template <CacheFormat FORMAT, int ROWS, int DIM>
static __device__ __forceinline__ void convert_codes(unsigned from, SharedTile<ROWS> to, int thread) {
    constexpr int CODES_PER_THREAD = 16, COLUMNS = DIM / CODES_PER_THREAD;
    static_assert(ROWS * COLUMNS % 128 == 0 && (COLUMNS >= 128 || 128 % COLUMNS == 0), "threads keep their columns");
    int column = thread % COLUMNS, odd = column / 4 % 2;
#pragma unroll 2
    for (int row = thread / COLUMNS; row < ROWS; row += 128 / COLUMNS) {
        uint4 codes = hopper::ld_shared_v4(from + row * DIM + column * CODES_PER_THREAD);
        uint4 chunks[2];
        convert_word<FORMAT>(codes.x, chunks[0].x, chunks[0].y);
        convert_word<FORMAT>(codes.y, chunks[0].z, chunks[0].w);
        convert_word<FORMAT>(codes.z, chunks[1].x, chunks[1].y);
        convert_word<FORMAT>(codes.w, chunks[1].z, chunks[1].w);
        uint4 early = odd ? chunks[1] : chunks[0], late = odd ? chunks[0] : chunks[1];
        st_shared_v4(to.chunk(row, 2 * column + odd), early);
        st_shared_v4(to.chunk(row, 2 * column + (odd ^ 1)), late);
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
