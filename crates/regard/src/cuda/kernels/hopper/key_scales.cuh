// A scale of each key beside keys in the type of queries (SCALES_KEYS). Scales come with their K tile, in the pipeline
// stage of its keys, and multiply its dot products before all else.
#pragma once
#include "hopper/prefill_sm90_shape.cuh"

// Whether scales are loaded while the products of their keys run. Three consumers lack the registers.
constexpr bool LOADS_SCALES_EARLY = SCALES_KEYS && CONSUMERS == 2;
// Whether scores are scaled after P V of the previous K tile. Specialized kernels of large dims have no registers for
// scales beside its probabilities.
constexpr bool SCALES_AFTER_VALUES = SCALES_KEYS && !FALLBACK && VALUE_DIM > 128;

// By one lane: copies the scales of a K tile to shared memory; the mbarrier counts their bytes. Those of keys past the
// last of a sequence are any numbers: their scores are hidden afterwards.
static __device__ __forceinline__ void fetch_key_scales(const AttentionParameters &params, const KeyScales &scales,
                                                        const PrefillTile &tile, int key_tile, unsigned to,
                                                        unsigned barrier) {
    long long head = (long long)tile.sequence * params.kv_heads + tile.kv_head;
    const float *from = (const float *)scales.pointer + head * scales.stride + key_tile * KEYS;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(KEY_SCALE_BYTES), "r"(barrier)
                 : "memory");
}

// The scales of the keys of a thread's scores.
struct LoadedKeyScales {
    float2 pairs[KEYS / 8];

    // `stage`: of keys.
    __device__ __forceinline__ LoadedKeyScales(int stage, int lane) {
        const float *scales = (const float *)(dynamic_shared + KEY_SCALES_OFFSET + stage * KEY_SCALE_BYTES);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) pairs[j] = *(const float2 *)(scales + 8 * j + 2 * (lane & 3));
    }
    // Multiplies the dot products of each key by its scale.
    __device__ __forceinline__ void multiply(float (&scores)[KEYS / 8][4]) const {
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            scores[j][0] *= pairs[j].x, scores[j][1] *= pairs[j].y;
            scores[j][2] *= pairs[j].x, scores[j][3] *= pairs[j].y;
        }
    }
};
