// The online softmax of decode of many rows on Hopper. A thread has the scores of two keys and ROWS / 4 rows: element
// [4 j + e] is key lane / 4 + 8 (e / 2) of the warp, row 8 j + 2 (lane % 4) + e % 2.
//
// Probabilities are relative to a reference per row, which all warps of a group know. It moves only where f16 could not
// hold a probability: a row's largest one is between 2^0 and 2^MAX_EXPONENT then.
#pragma once
#include "hopper/decode_wgmma_shape.cuh"

namespace decode_wgmma {

// Calls `change(element, j, half, r)` for the elements of a thread: row block, half of its keys, row of its pair.
template <class Change> static __device__ __forceinline__ void for_each_element(Change change) {
#pragma unroll
    for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++) change(4 * j + 2 * half + r, j, half, r);
}

// Hides keys that a row does not see by structure.
static __device__ __forceinline__ void hide_invisible(float (&scores)[SUMS], const RowFacts *rows, int first_key,
                                                      int lane) {
    for_each_element([&](int i, int j, int half, int r) {
        const RowFacts &row = rows[8 * j + 2 * (lane & 3) + r];
        int key = first_key + (lane >> 2) + 8 * half;
        if (key < row.start || key >= row.end) scores[i] = -INF;
    });
}

// The reference of a row that has seen no key. Finite, so that exponents of hidden keys are -inf.
constexpr float NO_REFERENCE = -MAX_FLOAT;

struct Softmax {
    bool keys_scaled, values_scaled; // whether keys, or values, of a tile have different scales
    float reference[ROW_BLOCKS][2];  // of exponents
    float row_sum[ROW_BLOCKS][2];    // this thread's part
    // Powers of two that bring weights into f16's range, if values are scaled: of all rows, in shared memory.
    float *weight_powers;

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                reference[j][r] = NO_REFERENCE;
                row_sum[j][r] = 0.0f;
            }
    }

    // Powers of weights before the first: the largest. By one warp.
    __device__ __forceinline__ void begin_weights(int lane) const {
        for (int row = lane; row < ROWS; row += 32) weight_powers[row] = __int_as_float(253 << 23); // 2^126
    }

    // Numbers of this thread's rows, in shared memory.
    static __device__ __forceinline__ void load_rows(float (&x)[ROW_BLOCKS][2], const float *from, int lane) {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++) {
            float2 pair = *(const float2 *)(from + 8 * j + 2 * (lane & 3));
            x[j][0] = pair.x, x[j][1] = pair.y;
        }
    }

    // Makes references the largest scores where that is exact, so that a log-sum-exp is not a difference of larger
    // numbers.
    __device__ __forceinline__ void finish(float (&out)[VALUE_BLOCKS][SUMS]) {
        for_each_element([&](int, int j, int half, int r) {
            if (half) return;
            float from = reference[j][r], to = from + USUAL_EXPONENT, step = to - from;
            if ((from - (to - step)) + (USUAL_EXPONENT - step) != 0.0f) return;
            constexpr float FACTOR = 1.0f / (1 << int(USUAL_EXPONENT));
            reference[j][r] = to;
            row_sum[j][r] *= FACTOR;
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++) {
                out[block][4 * j + r] *= FACTOR;
                out[block][4 * j + 2 + r] *= FACTOR;
            }
        });
    }

    // A row's maximum as states have it.
    __device__ __forceinline__ float max_of(int j, int r) const {
        return reference[j][r] == NO_REFERENCE ? -INF : reference[j][r];
    }

    // What multiplies a row's output. `scale`: of all values.
    __device__ __forceinline__ float out_scale(float scale, int row) const {
        if (!values_scaled) return scale;
        return __int_as_float((254 << 23) - (int)__float_as_uint(weight_powers[row])); // its inverse
    }

    // The scales of this thread's keys, and of their values. `from`: of the K tile.
    __device__ __forceinline__ void load_scales(float (&scales)[2][2], unsigned from, int warp, int lane) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned at = from + (WARP_KEYS * warp + (lane >> 2) + 8 * half) * 4;
            scales[0][half] = keys_scaled ? __uint_as_float(ld_shared_word(at)) : 1.0f;
            scales[1][half] = values_scaled ? __uint_as_float(ld_shared_word(at + KEYS * 4)) : 1.0f;
        }
    }

    // Dot products become scores, in units of log2.
    __device__ __forceinline__ void scale(float (&scores)[SUMS], const float (&key_scales)[2], const float *row_scales,
                                          int lane) const {
        float row_scale[ROW_BLOCKS][2];
        load_rows(row_scale, row_scales, lane);
        if (keys_scaled)
            for_each_element([&](int i, int, int half, int) { scores[i] = __fmul_rn(scores[i], key_scales[half]); });
        for_each_element([&](int i, int j, int, int r) { scores[i] = __fmul_rn(scores[i], row_scale[j][r]); });
    }

    // The same with one scale.
    static __device__ __forceinline__ void scale(float (&scores)[SUMS], float scale) {
        for_each_element([&](int i, int, int, int) { scores[i] = __fmul_rn(scores[i], scale); });
    }

    // Stores the K tile's probabilities, or weights, as operands: [row][key]. `sums`: of probabilities. Returns whether
    // one of this thread's is too large for f16; all of them are meaningless then.
    __device__ __forceinline__ bool exponentiate(const float (&scores)[SUMS], const float (&value_scales)[2],
                                                 unsigned to, float (&sums)[ROW_BLOCKS][2], int warp, int lane) const {
        float most = -INF, heaviest = 0.0f, probs[SUMS];
        for_each_element([&](int i, int j, int, int r) {
            float exponent = scores[i] - reference[j][r];
            most = fmaxf(most, exponent);
            probs[i] = exp2_fast(exponent);
        });
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) sums[j][r] = probs[4 * j + r] + probs[4 * j + 2 + r];
        if (values_scaled) {
            float powers[ROW_BLOCKS][2];
            load_rows(powers, weight_powers, lane);
            for_each_element([&](int i, int j, int half, int r) {
                probs[i] = probs[i] * value_scales[half] * powers[j][r];
                heaviest = fmaxf(heaviest, probs[i]);
            });
        }
        store(probs, to, warp, lane);
        return most > MAX_EXPONENT || heaviest > MAX_WEIGHT;
    }

    static __device__ __forceinline__ void store(const float (&probs)[SUMS], unsigned to, int warp, int lane) {
        if (HAS_LARGE_HEADS) lane = opaque(lane);
        unsigned pairs[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                pairs[j][half] = Element<OPERAND>::pack(probs[4 * j + 2 * half], probs[4 * j + 2 * half + 1]);
        SharedTile<ROWS> tile = {to};
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j += 2)
            hopper::stmatrix_x4_transposed(tile.chunk(8 * j + (lane & 7) + (lane & 16) / 2, 2 * warp + (lane >> 3 & 1)),
                                           pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]);
    }

    __device__ __forceinline__ void add(const float (&sums)[ROW_BLOCKS][2]) {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) row_sum[j][r] += sums[j][r];
    }

    // The maximum of x over the keys of the group's K tile, per row. All warps of the group call this, and between two
    // calls they synchronize.
    static __device__ __forceinline__ void find_maxima(float (&x)[ROW_BLOCKS][2], unsigned exchange, int group,
                                                       int warp, int lane) {
        float *numbers = (float *)__cvta_shared_to_generic(exchange);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2) x[j][r] = fmaxf(x[j][r], __shfl_xor_sync(~0u, x[j][r], step));
                if (lane < 4) numbers[warp * ROWS + 8 * j + 2 * lane + r] = x[j][r];
            }
        hopper::named_barrier_sync(1 + group, 128);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = 8 * j + 2 * (lane & 3) + r;
                x[j][r] = fmaxf(fmaxf(numbers[row], numbers[ROWS + row]),
                                fmaxf(numbers[2 * ROWS + row], numbers[3 * ROWS + row]));
            }
    }

    // Raises the references of rows whose scores exceed them by too much, and lowers the powers of weights that are too
    // large. Rows decide each for themselves. It rarely runs.
    __device__ __forceinline__ void raise(const float (&scores)[SUMS], const float (&value_scales)[2],
                                          float (&out)[VALUE_BLOCKS][SUMS], unsigned exchange, int group, int warp,
                                          int lane) {
        float most[ROW_BLOCKS][2], factors[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) most[j][r] = fmaxf(scores[4 * j + r], scores[4 * j + 2 + r]);
        find_maxima(most, exchange, group, warp, lane);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                factors[j][r] = 1.0f;
                if (!(most[j][r] - reference[j][r] > MAX_EXPONENT)) continue;
                // Where rounding moves it far, the reference is the maximum itself.
                float next = most[j][r] - USUAL_EXPONENT;
                if (most[j][r] - next > MAX_EXPONENT) next = most[j][r];
                factors[j][r] = exp2_fast(reference[j][r] - next);
                reference[j][r] = next;
                row_sum[j][r] *= factors[j][r];
            }
        if (values_scaled) {
            hopper::named_barrier_sync(1 + group, 128); // all have read the maxima
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    most[j][r] = fmaxf(exp2_fast(scores[4 * j + r] - reference[j][r]) * value_scales[0],
                                       exp2_fast(scores[4 * j + 2 + r] - reference[j][r]) * value_scales[1]);
            find_maxima(most, exchange, group, warp, lane);
            float powers[ROW_BLOCKS][2];
            load_rows(powers, weight_powers, lane);
            hopper::named_barrier_sync(1 + group, 128); // all have read the powers
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (most[j][r] * powers[j][r] <= MAX_WEIGHT) continue;
                    float next = weight_scale(fminf(most[j][r], MAX_FLOAT / 16.0f) * 8.0f).factor;
                    factors[j][r] *= next * __int_as_float((254 << 23) - (int)__float_as_uint(powers[j][r]));
                    if (warp == 0 && lane < 4) weight_powers[8 * j + 2 * lane + r] = next;
                }
            hopper::named_barrier_sync(1 + group, 128);
        }
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++)
            for_each_element([&](int i, int j, int, int r) { out[block][i] *= factors[j][r]; });
    }
};

} // namespace decode_wgmma
