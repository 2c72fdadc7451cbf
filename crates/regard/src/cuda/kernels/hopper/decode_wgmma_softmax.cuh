// The online softmax of decode of many rows on Hopper. A thread has the scores of two keys and ROWS / 4 rows: element
// [4 j + e] is key lane / 4 + 8 (e / 2) of the warp, row 8 j + 2 (lane % 4) + e % 2.
//
// Probabilities are relative to a reference per row. It moves only where f16 could not hold a probability: a row's
// largest one is between 2^0 and 2^MAX_EXPONENT then.
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

// A reference in the end, and what that multiplies sums by: it becomes the largest score where that is exact, so that a
// log-sum-exp is not a difference of larger numbers.
struct LastReference {
    float reference, step;
};
static __device__ __forceinline__ LastReference last_reference(float from) {
    float to = from + USUAL_EXPONENT, step = to - from;
    bool exact = (from - (to - step)) + (USUAL_EXPONENT - step) == 0.0f;
    if (from == NO_REFERENCE) return {-INF, 1.0f};
    return exact ? LastReference{to, 1.0f / (1 << int(USUAL_EXPONENT))} : LastReference{from, 1.0f};
}

// The inverse of a power of two.
static __device__ __forceinline__ float inverse_power(float power) {
    return __int_as_float((254 << 23) - (int)__float_as_uint(power));
}

// Whether numbers of rows are read per K tile, where registers are scarce.
constexpr bool READS_ROWS = ROWS == 32 && (HAS_LARGE_HEADS || KeySide::HAS_BLOCKS);

struct Softmax {
    float row_sum[ROW_BLOCKS][2]; // this thread's part
    RowPair pairs[ROW_BLOCKS];    // of its rows
    unsigned numbers;             // shared memory: `Rows`, from the lane's first pair on
    unsigned place;               // of this lane's probabilities, as stmatrix stores them, in a tile of them

    // Before a piece.
    __device__ __forceinline__ void begin(unsigned base, int warp, int lane) {
        place = opaque(SharedTile<ROWS>{0}.chunk((lane & 7) + (lane & 16) / 2, 2 * warp + (lane >> 3 & 1)));
        numbers = opaque(base + ROWS_OFFSET + (lane & 3) * (int)sizeof(RowPair));
        load_pairs(pairs);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) row_sum[j][r] = 0.0f;
    }

    // A row before its first key, by one thread.
    static __device__ __forceinline__ void begin_row(int row) {
        row_numbers().reference(row) = NO_REFERENCE;
        row_numbers().weight_powers[row] = __int_as_float(253 << 23); // 2^126, the largest
    }

    // Numbers of this thread's rows.
    __device__ __forceinline__ void load_pairs(RowPair (&pairs)[ROW_BLOCKS]) const {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++) {
            uint4 x = ld_shared_v4(numbers + j * 4 * (int)sizeof(RowPair));
            pairs[j] = {{__uint_as_float(x.x), __uint_as_float(x.y)}, {__uint_as_float(x.z), __uint_as_float(x.w)}};
        }
    }
    static __device__ __forceinline__ void load_powers(float (&powers)[ROW_BLOCKS][2], int lane) {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++) {
            float2 x = *(const float2 *)&row_numbers().weight_powers[8 * j + 2 * (lane & 3)];
            powers[j][0] = x.x, powers[j][1] = x.y;
        }
    }

    // Dot products with codes become dot products with keys. `scales`: of the K tile.
    static __device__ __forceinline__ void scale_keys(float (&scores)[SUMS], unsigned scales, int warp, int lane) {
        float own[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
            own[half] = __uint_as_float(ld_shared_word(scales + (WARP_KEYS * warp + (lane >> 2) + 8 * half) * 4));
        for_each_element([&](int i, int, int half, int) { scores[i] = __fmul_rn(scores[i], own[half]); });
    }

    // The scales of the values of this thread's keys.
    static __device__ __forceinline__ void load_value_scales(float (&own)[2], unsigned scales, int warp, int lane) {
#pragma unroll
        for (int half = 0; half < 2; half++)
            own[half] =
                __uint_as_float(ld_shared_word(scales + (KEYS + WARP_KEYS * warp + (lane >> 2) + 8 * half) * 4));
    }

    // A score in units of log2, relative to the reference.
    static __device__ __forceinline__ float exponent(float score, const RowPair &pair, int r) {
        return fmaf(score, pair.scale[r], -pair.reference[r]);
    }

    // Stores the K tile's probabilities, or weights, as operands: [row][key]. `sums`: of probabilities. Returns whether
    // one of this thread's is too large for f16; all of them are meaningless then. `scales`: of the K tile.
    __device__ __forceinline__ bool exponentiate(const float (&scores)[SUMS], unsigned scales, unsigned needs,
                                                 unsigned to, float (&sums)[ROW_BLOCKS][2], int warp, int lane) {
        float most = 0.0f, probs[SUMS];
        if (READS_ROWS) load_pairs(pairs);
        for_each_element([&](int i, int j, int, int r) { probs[i] = exp2_fast(exponent(scores[i], pairs[j], r)); });
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sums[j][r] = probs[4 * j + r] + probs[4 * j + 2 + r];
                most = fmaxf(most, sums[j][r]);
            }
        if (needs & VALUES_SCALED) {
            float powers[ROW_BLOCKS][2], value_scales[2];
            load_powers(powers, lane);
            load_value_scales(value_scales, scales, warp, lane);
            for_each_element([&](int i, int j, int half, int r) {
                probs[i] = probs[i] * value_scales[half] * powers[j][r];
                most = fmaxf(most, probs[i]);
            });
            store(probs, to);
        } else {
            store(probs, to);
        }
        return most > MAX_WEIGHT;
    }

    __device__ __forceinline__ void store(const float (&probs)[SUMS], unsigned to) const {
        unsigned pairs[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                pairs[j][half] = Element<OPERAND>::pack(probs[4 * j + 2 * half], probs[4 * j + 2 * half + 1]);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j += 2)
            hopper::stmatrix_x4_transposed(to + place + j * 8 * 128, pairs[j][0], pairs[j][1], pairs[j + 1][0],
                                           pairs[j + 1][1]);
    }

    __device__ __forceinline__ void add(const float (&sums)[ROW_BLOCKS][2]) {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) row_sum[j][r] += sums[j][r];
    }

    // The maximum of x over the keys of the K tile, per row. All warps call this, and between two calls they
    // synchronize.
    static __device__ __forceinline__ void find_maxima(float (&x)[ROW_BLOCKS][2], int warp, int lane) {
        float (&numbers)[CONSUMER_WARPS][ROWS] = row_numbers().exchange;
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2) x[j][r] = fmaxf(x[j][r], __shfl_xor_sync(~0u, x[j][r], step));
                if (lane < 4) numbers[warp][8 * j + 2 * lane + r] = x[j][r];
            }
        synchronize_consumers();
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = 8 * j + 2 * (lane & 3) + r;
                x[j][r] = fmaxf(fmaxf(numbers[0][row], numbers[1][row]), fmaxf(numbers[2][row], numbers[3][row]));
            }
    }

    // Raises the references of rows whose scores exceed them by too much, and lowers the powers of weights that are too
    // large. Rows decide each for themselves. It rarely runs.
    __device__ __forceinline__ void raise(const float (&scores)[SUMS], unsigned scales, unsigned needs,
                                          float (&out)[VALUE_BLOCKS][SUMS], int warp, int lane) {
        if (READS_ROWS) load_pairs(pairs);
        float most[ROW_BLOCKS][2], factors[ROW_BLOCKS][2];
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                most[j][r] = __fmul_rn(fmaxf(scores[4 * j + r], scores[4 * j + 2 + r]), pairs[j].scale[r]);
        find_maxima(most, warp, lane);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                factors[j][r] = 1.0f;
                float &reference = pairs[j].reference[r];
                if (!(most[j][r] - reference > MAX_EXPONENT)) continue;
                // Where rounding moves it far, the reference is the maximum itself.
                float next = most[j][r] - USUAL_EXPONENT;
                if (most[j][r] - next > MAX_EXPONENT) next = most[j][r];
                factors[j][r] = exp2_fast(reference - next);
                reference = next;
                row_sum[j][r] *= factors[j][r];
                if (warp == 0 && lane < 4) row_numbers().reference(8 * j + 2 * lane + r) = next;
            }
        synchronize_consumers(); // all have read the maxima
        if (needs & VALUES_SCALED) {
            float value_scales[2];
            load_value_scales(value_scales, scales, warp, lane);
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    most[j][r] = fmaxf(exp2_fast(exponent(scores[4 * j + r], pairs[j], r)) * value_scales[0],
                                       exp2_fast(exponent(scores[4 * j + 2 + r], pairs[j], r)) * value_scales[1]);
            find_maxima(most, warp, lane);
            float powers[ROW_BLOCKS][2];
            load_powers(powers, lane);
            synchronize_consumers(); // all have read the powers
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (most[j][r] * powers[j][r] <= MAX_WEIGHT) continue;
                    float next = weight_scale(fminf(most[j][r], MAX_FLOAT / 16.0f) * 8.0f).factor;
                    factors[j][r] *= next * inverse_power(powers[j][r]);
                    if (warp == 0 && lane < 4) row_numbers().weight_powers[8 * j + 2 * lane + r] = next;
                }
            synchronize_consumers();
        }
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++)
            for_each_element([&](int i, int j, int, int r) { out[block][i] *= factors[j][r]; });
    }
};

} // namespace decode_wgmma
