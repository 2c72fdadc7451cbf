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

// Converts ROWS rows of DIM codes, by the 128 threads of a warpgroup. A thread takes 8 codes at a time, a 16-byte chunk
// of the tile: loads and stores have no bank conflicts. There is one converter warp per warp scheduler, so several
// loads are in flight before the first is converted.
template <CacheFormat FORMAT, int ROWS, int DIM>
static __device__ __forceinline__ void convert_codes(unsigned from, SharedTile<ROWS> to, int thread) {
    constexpr int COLUMNS = DIM / 8, STEP = 128 / COLUMNS; // rows that the warpgroup takes at a time
    constexpr int STEPS = ROWS / STEP, AT_ONCE = 8;
    static_assert(128 % COLUMNS == 0 && STEP % 4 == 0 && STEPS % AT_ONCE == 0, "rows alternate between two swizzles");
    int row = thread / COLUMNS, column = thread % COLUMNS;
    unsigned source = from + row * DIM + column * 8;
    unsigned even = to.chunk(row, column), odd = to.chunk(row + STEP, column);
#pragma unroll 1
    for (int step = 0; step < STEPS; step += AT_ONCE) {
        uint2 codes[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) codes[i] = ld_shared_v2(source + i * STEP * DIM);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint4 chunk;
            widen_codes<ElementType(ELEMENT_TYPE), FORMAT>(codes[i].x, chunk.x, chunk.y);
            widen_codes<ElementType(ELEMENT_TYPE), FORMAT>(codes[i].y, chunk.z, chunk.w);
            st_shared_v4((i % 2 ? odd : even) + i / 2 * 2 * STEP * 128, chunk);
        }
        source += AT_ONCE * STEP * DIM, even += AT_ONCE * STEP * 128, odd += AT_ONCE * STEP * 128;
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
