// Over records of mla656: what probabilities are multiplied by, for each chunk of values.
//
// It is the scale of the key's values. With 16 rows it is in a unit, so that products with values are f16: codes become
// f16 in fewer instructions than bf16. A unit is a power of two per chunk. The largest scale of the piece so far is 32
// to 64 times the unit, and with probabilities up to 2^RESCALE_THRESHOLD products are below 2^14.
//
// A scale far below the largest would leave its key few bits in f16, and that key may have all the weight. So a K tile
// with such a scale is wide: its probabilities and codes are bf16, in the same unit.
#pragma once
#include "common/formats.cuh"
#include "hopper/latent_scores.cuh"

namespace latent {

struct RecordWeights : ScoreWarpgroup {
    // Scales in units that f16 does for: below the one, and not below the other, or 0.
    static constexpr float WEIGHT_BOUND = 64.0f, SMALL_WEIGHT = 0.125f;

    typedef float Weights[2][TILE_CHUNKS];
    Weights scales; // of this thread's two keys

    // The inverse of the unit for a largest scale, which `weight_scale` would bring to 2^14.
    static __device__ __forceinline__ float inverse_unit(float largest) {
        return weight_scale(largest).factor * (WEIGHT_BOUND / 0x1p15f);
    }

    // Of a power of two, whose reciprocal is a normal number too.
    static __device__ __forceinline__ float reciprocal_of_power(float x) {
        return __uint_as_float((254u << 23) - __float_as_uint(x));
    }

    // At the start of a piece, for the thread of each chunk.
    __device__ __forceinline__ void begin_units(int chunk) const {
        if (chunk < TILE_CHUNKS) exchange.units.inverse[chunk] = inverse_unit(0.0f);
    }

    // Finds what the probabilities of this thread's keys are multiplied by. Returns whether f16 does not do for one.
    __device__ __forceinline__ bool find_weights(Weights &weights) const {
        float4 inverse = *(const float4 *)exchange.units.inverse;
        float inverses[TILE_CHUNKS] = {inverse.x, inverse.y, inverse.z, inverse.w};
        bool is_outside = false;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < TILE_CHUNKS; i++) {
                float weight = HAS_VALUE_UNITS ? __fmul_rn(scales[h][i], inverses[i]) : scales[h][i];
                bool is_large = fabsf(weight) >= WEIGHT_BOUND, is_small = fabsf(weight) < SMALL_WEIGHT;
                // With logical operators the compiler makes a branch per condition.
                is_outside |= is_large | (is_small & (weight != 0.0f));
                weights[h][i] = weight;
            }
        return HAS_VALUE_UNITS && is_outside;
    }

    // Leaves this warp's largest scale per chunk in shared memory. NaN is none.
    __device__ __forceinline__ void find_largest_scales() const {
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            float largest = fmaxf(0.0f, fmaxf(fabsf(scales[0][i]), fabsf(scales[1][i])));
            unsigned of_warp = __reduce_max_sync(~0u, __float_as_uint(largest));
            if (lane == 0) exchange.units.largest[warp][i] = __uint_as_float(of_warp);
        }
    }

    // Raises units that a scale is too large for, and leaves factors of outputs. For the thread of each chunk.
    __device__ __forceinline__ void raise_units(int chunk) const {
        if (chunk >= TILE_CHUNKS) return;
        float largest = 0.0f, before = exchange.units.inverse[chunk];
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, exchange.units.largest[i][chunk]);
        float inverse = fminf(before, inverse_unit(largest));
        exchange.units.inverse[chunk] = inverse;
        exchange.units.factor[probs.index][chunk] = __fmul_rn(inverse, reciprocal_of_power(before));
    }

    // Leaves what a piece's outputs are multiples of. For the thread of each chunk.
    __device__ __forceinline__ void finish_units(int chunk) const {
        if (chunk < TILE_CHUNKS) exchange.units.of_piece[chunk] = reciprocal_of_power(exchange.units.inverse[chunk]);
    }
};

} // namespace latent
