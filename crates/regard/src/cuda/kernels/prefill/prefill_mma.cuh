// S = Q K^T and O = P V of prefill with mma.sync; rows are operand A.
//
// f32 uses tf32 MMAs: each factor is split into a rounded high part and the remainder. S takes all four products; O
// leaves out low * low, which is up to 2^-22 of a product: too much for the log-sum-exp of large scores, little for
// values. Tensor cores truncate sums instead of rounding them, so only short sums are accumulated in them, and these
// are added up by FADDs.
#pragma once
#include "common/copy.cuh"
#include "prefill/prefill_shape.cuh"

// Query fragments stay in registers if they are few.
constexpr bool QUERY_IN_REGISTERS = !WIDE_ELEMENT && HEAD_DIM * WARP_ROWS <= 64 * 32;

struct Tf32Split {
    unsigned high, low;
};

static __device__ __forceinline__ Tf32Split split_tf32(unsigned bits) {
    Tf32Split x;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x.high) : "f"(__uint_as_float(bits)));
    x.low = __float_as_uint(__uint_as_float(bits) - __uint_as_float(x.high));
    return x;
}

// Operand A: the fragments of 16 rows by 32 bytes.
struct OperandA {
    unsigned high[4], low[4]; // `low` for f32 only
    __device__ __forceinline__ void set(const unsigned (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (WIDE_ELEMENT) {
                Tf32Split x = split_tf32(a[i]);
                high[i] = x.high;
                low[i] = x.low;
            } else {
                high[i] = a[i];
            }
        }
    }
};

struct OperandB {
    unsigned high[2], low[2];
    __device__ __forceinline__ void set(unsigned b0, unsigned b1) {
        if constexpr (WIDE_ELEMENT) {
            Tf32Split x = split_tf32(b0), y = split_tf32(b1);
            high[0] = x.high, high[1] = y.high, low[0] = x.low, low[1] = y.low;
        } else {
            high[0] = b0, high[1] = b1;
        }
    }
};

// sum += a * b, without low * low
static __device__ __forceinline__ void mma(float (&sum)[4], const OperandA &a, const OperandB &b) {
    if constexpr (WIDE_ELEMENT) {
        E::mma(sum, a.low, b.high[0], b.high[1]);
        E::mma(sum, a.high, b.low[0], b.low[1]);
    }
    E::mma(sum, a.high, b.high[0], b.high[1]);
}

// sum += a.low * b.low
static __device__ __forceinline__ void mma_low(float (&sum)[4], const OperandA &a, const OperandB &b) {
    if constexpr (WIDE_ELEMENT) E::mma(sum, a.low, b.low[0], b.low[1]);
}

struct Products {
    int lane;
    unsigned query; // shared address of this lane's first chunk of the warp's queries
    unsigned probs; // likewise of the warp's rows of probabilities, if warps share rows
    unsigned kept[QUERY_IN_REGISTERS ? KEY_STEPS : 1][MMA_ROW_TILES][4];

    // The ldmatrix address for operand A, 16 rows by 32 bytes: rows first.
    template <int PITCH> static __device__ __forceinline__ unsigned a_fragment_address(unsigned rows, int lane) {
        return swizzle<PITCH>(rows, lane & 15, lane & 16);
    }
    // The ldmatrix address for operand B: bytes first. (With only 8 keys per warp, the same rows twice.)
    template <int PITCH> static __device__ __forceinline__ unsigned b_fragment_address(unsigned rows, int lane) {
        return swizzle<PITCH>(rows, (lane & 7) + (MMA_KEY_TILES > 1 ? (lane & 16) / 2 : 0), (lane & 8) * 2);
    }

    __device__ __forceinline__ void load_query(int step, int m, unsigned (&a)[4], int base = 0) const {
        ldmatrix_x4(a, advance_swizzled<KEY_PITCH>(query + base, step * STEP_BYTES) + m * 16 * KEY_PITCH);
    }

    __device__ __forceinline__ void load_query_fragments() {
        if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++)
#pragma unroll
                for (int m = 0; m < MMA_ROW_TILES; m++) load_query(step, m, kept[step][m]);
        }
    }

    // 32 bytes of head dims: step `step`, counted from byte `base` (a multiple of 128).
    __device__ __forceinline__ void mma_qk_step(Scores &scores, int step, unsigned place, int base = 0) const {
        OperandA a[MMA_ROW_TILES];
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++) {
            if constexpr (QUERY_IN_REGISTERS) {
                a[m].set(kept[step][m]);
            } else {
                unsigned bits[4];
                load_query(step, m, bits, base);
                a[m].set(bits);
            }
        }
#pragma unroll
        for (int j = 0; j < MMA_KEY_TILES; j += 2) {
            unsigned bits[4];
            ldmatrix_x4(bits, advance_swizzled<KEY_PITCH>(place + base, step * STEP_BYTES) + 8 * j * KEY_PITCH);
            OperandB b[2];
            b[0].set(bits[0], bits[1]);
            b[1].set(bits[2], bits[3]);
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++) {
                mma_low(scores[m][j], a[m], b[0]);
                mma(scores[m][j], a[m], b[0]);
                if (j + 1 < MMA_KEY_TILES) {
                    mma_low(scores[m][(j + 1) % MMA_KEY_TILES], a[m], b[1]);
                    mma(scores[m][(j + 1) % MMA_KEY_TILES], a[m], b[1]);
                }
            }
        }
    }

    // `keys`: shared address of this warp's first key.
    __device__ __forceinline__ void mma_qk(Scores &scores, unsigned keys) const {
        unsigned place = b_fragment_address<KEY_PITCH>(keys, lane);
        if constexpr (WIDE_ELEMENT || HEAD_DIM > 256) {
            constexpr int PART_STEPS = WIDE_ELEMENT ? 4 : 16;
#pragma unroll 1
            for (int first = 0; first < KEY_STEPS; first += PART_STEPS) {
                Scores part = {};
                int end = KEY_STEPS % PART_STEPS == 0 ? first + PART_STEPS : min(first + PART_STEPS, KEY_STEPS);
#pragma unroll 1
                for (int four = first; four < end; four += 4)
#pragma unroll
                    for (int step = 0; step < 4; step++) mma_qk_step(part, step, place, four * STEP_BYTES);
#pragma unroll
                for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                    for (int j = 0; j < MMA_KEY_TILES; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) scores[m][j][e] += part[m][j][e];
            }
        } else {
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++) mma_qk_step(scores, step, place);
        }
    }

    // Operand A of step `step`: the probabilities of 16 keys (f32: 8) of one MMA row tile.
    __device__ __forceinline__ void load_probs(OperandA &a, const Scores &scores, int step, int m) const {
        unsigned bits[4];
        if constexpr (VALUE_WARPS > 1) {
            unsigned at = probs + m * 16 * PROB_PITCH;
            if constexpr (WIDE_ELEMENT) {
                // The k index is permuted to the order in which registers hold it.
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned place =
                        swizzle<PROB_PITCH>(at, (lane >> 2) + 8 * half, step * STEP_BYTES + (lane & 2) * 8) +
                        (lane & 1) * 8;
                    uint2 pair = ld_shared_v2(place);
                    bits[half] = pair.x, bits[2 + half] = pair.y;
                }
            } else {
                ldmatrix_x4(bits,
                            advance_swizzled<PROB_PITCH>(a_fragment_address<PROB_PITCH>(at, lane), step * STEP_BYTES));
            }
        } else if constexpr (WIDE_ELEMENT) {
            const float (&s)[4] = scores[m][step];
            bits[0] = __float_as_uint(s[0]), bits[1] = __float_as_uint(s[2]), bits[2] = __float_as_uint(s[1]),
            bits[3] = __float_as_uint(s[3]);
        } else {
            const float (&s)[4] = scores[m][2 * step], (&next)[4] = scores[m][(2 * step + 1) % MMA_KEY_TILES];
            bits[0] = E::pack(s[0], s[1]), bits[1] = E::pack(s[2], s[3]), bits[2] = E::pack(next[0], next[1]),
            bits[3] = E::pack(next[2], next[3]);
        }
        a.set(bits);
    }

    // Stores this warp's probabilities for the warps that share its rows. `column`: its first key within the K tile.
    __device__ __forceinline__ void store_probs(const Scores &scores, int column) const {
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
            for (int j = 0; j < MMA_KEY_TILES; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = m * 16 + (lane >> 2) + 8 * half, at = (column + 8 * j) * ELEMENT_BYTES;
                    float x = scores[m][j][2 * half], y = scores[m][j][2 * half + 1];
                    if constexpr (WIDE_ELEMENT) {
                        unsigned place = swizzle<PROB_PITCH>(probs, row, at + (lane & 2) * 8) + (lane & 1) * 8;
                        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(place), "f"(x), "f"(y) : "memory");
                    } else {
                        unsigned place = swizzle<PROB_PITCH>(probs, row, at) + (lane & 3) * 4;
                        st_shared_word(place, E::pack(x, y));
                    }
                }
    }

    // The ldmatrix address of two 16-bit value tiles from `tile` on; `first` as in mma_pv.
    static __device__ __forceinline__ unsigned value_fragment_address(unsigned place, int first, int tile) {
        if constexpr (VALUE_WARPS == 1 || WARP_VALUE_DIM * ELEMENT_BYTES % 128 == 0) {
            return advance_swizzled<VALUE_PITCH>(place + first, tile * 16);
        } else {
            int at = first + tile * 16;
            return (place ^ (at & 127)) + (at & ~127);
        }
    }

    // `values`: shared address of the K tile's first value row; `first`: the byte of a row at which this warp's value
    // dims start.
    __device__ __forceinline__ void mma_pv(Outputs &out, const Scores &scores, unsigned values, int first) const {
        if constexpr (WIDE_ELEMENT) {
            constexpr int AT_ONCE = 2; // value tiles
            // This lane's first two keys of a step of 8.
            unsigned rows = values + 2 * (lane & 3) * VALUE_PITCH;
            int even = swizzle_bits<VALUE_PITCH>(2 * (lane & 3)), odd = swizzle_bits<VALUE_PITCH>(2 * (lane & 3) + 1);
#pragma unroll
            for (int step = 0; step < TILE_KEYS / 8; step += 2) {
                OperandA a[2][MMA_ROW_TILES];
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int m = 0; m < MMA_ROW_TILES; m++) load_probs(a[i][m], scores, step + i, m);
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v += AT_ONCE) {
                    float part[MMA_ROW_TILES][AT_ONCE][4] = {};
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int n = 0; n < AT_ONCE; n++) {
                            int at = first + (v + n) * 32 + (lane >> 2) * 4;
                            unsigned from = rows + (step + i) * 8 * VALUE_PITCH;
                            OperandB b;
                            b.set(ld_shared_word(from + (at ^ even)), ld_shared_word(from + VALUE_PITCH + (at ^ odd)));
#pragma unroll
                            for (int m = 0; m < MMA_ROW_TILES; m++) mma(part[m][n], a[i][m], b);
                        }
#pragma unroll
                    for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                        for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                            for (int e = 0; e < 4; e++) out[m][v + n][e] += part[m][n][e];
                }
            }
        } else {
            unsigned place = a_fragment_address<VALUE_PITCH>(values, lane);
#pragma unroll
            for (int step = 0; step < TILE_KEYS / 16; step++) {
                OperandA a[MMA_ROW_TILES];
#pragma unroll
                for (int m = 0; m < MMA_ROW_TILES; m++) load_probs(a[m], scores, step, m);
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v += 2) {
                    unsigned b[4];
                    ldmatrix_x4_transposed(b, value_fragment_address(place, first, v) + step * 16 * VALUE_PITCH);
#pragma unroll
                    for (int m = 0; m < MMA_ROW_TILES; m++) {
                        E::mma(out[m][v], a[m].high, b[0], b[1]);
                        E::mma(out[m][v + 1], a[m].high, b[2], b[3]);
                    }
                }
            }
        }
    }
};
