// A scale of each key beside keys in the type of queries (SCALES_KEYS). Scales come with their K tile, in the pipeline
// stage of its keys, and multiply its dot products before all else.
#pragma once
#include "hopper/prefill_sm90_shape.cuh"

// Whether scores wait for P V of the previous K tile before they are scaled. Specialized kernels of large dims have
// no registers for scales beside its probabilities.
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

// Multiplies the dot products of each key by its scale. `stage`: of keys.
static __device__ __forceinline__ void scale_keys(float (&scores)[KEYS / 8][4], int stage, int lane) {
    const float *scales = (const float *)(dynamic_shared + KEY_SCALES_OFFSET + stage * KEY_SCALE_BYTES);
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
        float2 pair = *(const float2 *)(scales + 8 * j + 2 * (lane & 3));
        scores[j][0] *= pair.x, scores[j][1] *= pair.y;
        scores[j][2] *= pair.x, scores[j][3] *= pair.y;
    }
}
