// The partial states of tiles in the workspace, of the decode kernel for latent caches: maxima and sums of rows, and
// their outputs.
//
// Calls of few sequences are bound by writing and reading these outputs, if a CTA has 64 rows: 128 KB per CTA in f32.
// So they are f16, times a power of two per row and half of the value dims: the unit, of which the largest output of
// these is between 2^14 and 2^15. Outputs down to 2^-29 of the largest are rounded to 11 bits, as probabilities are in
// f16; in bf16 these have 8. 16 rows have f32.
#pragma once
#include "common/formats.cuh"
#include "decode/decode_combine.cuh"
#include "hopper/latent_shape.cuh"

namespace latent {

#if HAS_SCORE_WARPS
constexpr int PARTIAL_UNITS = 0;
typedef float PartialOutput;
typedef float4 PartialFour;
static __device__ __forceinline__ float4 unpack_four(float4 four) { return four; }
#else
constexpr int PARTIAL_UNITS = VALUE_WARPGROUPS; // per row
typedef unsigned short PartialOutput;
typedef uint2 PartialFour;
static __device__ __forceinline__ float4 unpack_four(uint2 four) {
    typedef Element<ElementType::F16> F16;
    return make_float4(F16::to_float((unsigned short)four.x), F16::to_float((unsigned short)(four.x >> 16)),
                       F16::to_float((unsigned short)four.y), F16::to_float((unsigned short)(four.y >> 16)));
}
#endif
constexpr int PARTIAL_HEADER_FLOATS = (2 + PARTIAL_UNITS) * TILE_ROWS;
static_assert(PARTIAL_HEADER_FLOATS * 4 + TILE_ROWS * VALUE_DIM * (int)sizeof(PartialOutput) <= PARTIAL_FLOATS * 4,
              "the host reserves f32 outputs");

// The state of a part of a tile.
struct PartialTile {
    const float *begin;

    __device__ __forceinline__ float *max(int row) const { return (float *)begin + row; }
    __device__ __forceinline__ float *sum(int row) const { return (float *)begin + TILE_ROWS + row; }
    __device__ __forceinline__ float *unit(int half, int row) const {
        return (float *)begin + (2 + half) * TILE_ROWS + row;
    }
    __device__ __forceinline__ PartialOutput *outputs(int row) const {
        return (PartialOutput *)(begin + PARTIAL_HEADER_FLOATS) + row * VALUE_DIM;
    }

    __device__ __forceinline__ State state(int row) const { return {__ldcg(max(row)), __ldcg(sum(row))}; }
    // What outputs of a half are multiples of.
    __device__ __forceinline__ float unit_of_half(int half, int row) const {
        return PARTIAL_UNITS ? __ldcg(unit(half, row)) : 1.0f;
    }
    // Four outputs, still in that unit.
    __device__ __forceinline__ PartialFour four(int row, int column) const {
        return __ldcg((const PartialFour *)(outputs(row) + column));
    }
};

} // namespace latent
