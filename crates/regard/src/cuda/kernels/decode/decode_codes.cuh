// S^T = K Q^T and O^T = V^T P^T on tensor cores over 8- and 4-bit codes: they are converted to f16, exactly, on the way
// from shared memory into the MMAs, whose sums are f32.
//
// A lane loads words of four consecutive codes of a key, so the dims within an MMA step are permuted: `dim_of_slot`
// gives the dim of a slot, and queries are stored in that order. Output dims are permuted likewise (`value_dim_of`).
//
// Codes of blocks are made unsigned and put into lower bits of an f16, which makes them subnormal numbers, and the MMAs
// take off what was added to the codes. Tensor cores align products by the exponents of their factors, where subnormal
// numbers have 2^-14 as the smallest normal one has: products of small ones lose bits. So scores from codes in the
// lowest bits would have errors up to 2^-15 of the query's largest element per dim, in units of a code, which is too
// much where other dims decide a score. Codes of keys are moved up by KEY_SHIFT bits.
//
// Scales of keys multiply scores, scales of values probabilities. Products of probabilities and scales are brought into
// f16's range by a power of two per row and K tile, and sums of a K tile are added to the output in f32. So for any
// range of scales a weight is lost only if it is below 2^-40 of the largest in its K tile.
#pragma once
#include "common/formats.cuh"
#include "decode/decode_query.cuh"

typedef Element<ElementType::F16> Half;

// Probabilities are multiplied by 2^this before they are rounded to f16, so that small ones are not subnormal.
constexpr int PROBABILITY_SHIFT = 15;

// The scale of a block, an f16 in the lower bits.
static __device__ __forceinline__ float block_scale(unsigned bits) { return Half::to_float((unsigned short)bits); }

// Codes of blocks as operands of the MMAs. A block has two steps of MMAs over keys, and two tiles of value dims; of
// nibbles, the lower ones and the upper ones. They are moved up by SHIFT bits.
template <class Side, int SHIFT> struct BlockOperands {
    // Makes an operand its code plus 128, or 8.
    static __device__ __forceinline__ float unit(int part) {
        return 1 << (24 - SHIFT - (!Side::IS_Q8_0 && part ? 4 : 0));
    }

    // Operands A that take 128, or 8, times the other operand off a sum.
    unsigned zeros[Side::IS_Q8_0 ? 1 : 2][4];

    // `room`: shared memory, through which these registers come, from an address that differs between lanes: ptxas
    // would make constants, or what is the same for a warp, again and again. All warps write the same.
    __device__ __forceinline__ void set(unsigned room, int lane) {
        room += 16 * (lane & 1);
#pragma unroll
        for (int part = 0; part < (Side::IS_Q8_0 ? 1 : 2); part++) {
            unsigned x = 0x80008000 | (Side::IS_Q8_0 || part ? 0x00800080 : 0x00080008) << SHIFT;
            st_shared_v4(room + 32 * part, make_uint4(x, x, x, x));
            __syncwarp();
            uint4 four = ld_shared_v4(room + 32 * part);
            zeros[part][0] = four.x, zeros[part][1] = four.y, zeros[part][2] = four.z, zeros[part][3] = four.w;
        }
    }

    __device__ __forceinline__ void subtract_zeros(float (&sum)[4], int part, unsigned b0, unsigned b1) const {
        Half::mma(sum, zeros[Side::IS_Q8_0 ? 0 : part], b0, b1);
    }

    // Codes of q8_0, of bytes (0, 2) and (1, 3). The bits to flip are those of `zeros`, in a register.
    __device__ __forceinline__ void to_even_odd(unsigned codes, unsigned &even, unsigned &odd) const {
        even = ((codes << SHIFT) ^ zeros[0][0]) & 0x00ff00ff << SHIFT;
        odd = ((codes >> (8 - SHIFT)) ^ zeros[0][0]) & 0x00ff00ff << SHIFT;
    }

    // Nibbles of bytes (0, 2) and (1, 3).
    __device__ __forceinline__ void to_even_odd(unsigned codes, unsigned (&lower)[2], unsigned (&upper)[2]) const {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            unsigned moved = odd ? codes >> (8 - SHIFT) : codes << SHIFT;
            lower[odd] = moved & 0x000f000f << SHIFT;
            upper[odd] = moved & 0x00f000f0 << SHIFT;
        }
    }
};

// Whether codes of values in blocks become exact operands: an MMA more per row tile would cost more than that.
constexpr bool EXACT_VALUES = MMA_ROW_TILES > 1;

// The most by which a byte is still in the bits of an f16 whose numbers are equally far apart, the lowest 11.
constexpr int KEY_SHIFT = 3;
typedef BlockOperands<KeySide, KEY_SHIFT> KeyBlocks;
typedef BlockOperands<ValueSide, 0> ValueBlocks;

// What makes dot products of queries and keys those of codes, and likewise outputs of a tile of value dims.
static __device__ __forceinline__ float key_unit(const AttentionParameters &params) {
    return KeySide::HAS_BLOCKS && !has_exact_keys(params) ? KeyBlocks::unit(0) : 1.0f;
}
static __device__ __forceinline__ float value_unit(int tile) {
    return ValueSide::HAS_BLOCKS && !EXACT_VALUES ? ValueBlocks::unit(tile % 2) : 1.0f;
}

// P^T as operand B: [k][n] are the 16 keys of an MMA step by 8 rows.
typedef unsigned Weights[MMA_KEY_TILES][MMA_ROW_TILES][2];

static __device__ __forceinline__ void pack_weights(Weights &weights, const Scores &probs) {
#pragma unroll
    for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++) {
            weights[k][n][0] = movmatrix_transposed(Half::pack(probs[k][n][0], probs[k][n][1]));
            weights[k][n][1] = movmatrix_transposed(Half::pack(probs[k][n][2], probs[k][n][3]));
        }
}

// Inverses of the powers of two in weights, per row.
typedef float Inverses[MMA_ROW_TILES][2];

// Weights are probabilities times the scales of this lane's keys, 16 k + lane / 4 + 8 half.
static __device__ __forceinline__ void pack_scaled_weights(Weights &weights, Inverses &inverses, const Scores &probs,
                                                           const float (&scales)[MMA_KEY_TILES][2]) {
    Scores scaled;
#pragma unroll
    for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = 0.0f;
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float &weight = scaled[k][n][2 * half + r];
                    weight = probs[k][n][2 * half + r] * scales[k][half];
                    most = fmaxf(most, fabsf(weight)); // scales of blocks have a sign
                }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            WeightScale power = weight_scale(most);
            inverses[n][r] = power.inverse;
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) scaled[k][n][2 * half + r] *= power.factor;
        }
    pack_weights(weights, scaled);
}

static __device__ __forceinline__ void add_scaled(float (&out)[4], const float (&part)[4], const float (&inverse)[2]) {
#pragma unroll
    for (int e = 0; e < 4; e++) out[e] = fmaf(part[e], inverse[e & 1], out[e]);
}

// The codes of a tile's keys, or of its values, as the products read them.
struct CodeView {
    CacheFormat format;
    unsigned at, step; // lower bits of their address, and of the bytes from token to token

    // Rows of blocks start off a multiple of 16 bytes in shared memory, as in global memory.
    template <class Side> __device__ __forceinline__ unsigned shift(int row) const {
        return Side::ALIGNMENT == 16 ? 0 : (at + row * step) & 15;
    }
};

// Keys in codes: S^T = K Q^T.
struct CodeKeys : QueryFragments {
    CodeView view;
    KeyBlocks blocks;
    bool is_exact; // has_exact_keys

    __device__ __forceinline__ void set(const CodeView &tile, bool has_exact) {
        view = tile;
        is_exact = has_exact;
    }

    __device__ __forceinline__ void query_steps(int step, unsigned (&b)[MMA_ROW_TILES][4]) const {
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++) {
            if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; i++) b[n][i] = kept[step / 2][n][i];
            } else {
                load_query(step, n, b[n]);
            }
        }
    }

    // Steps `first` to `first + STEPS` of 16 dims, from codes of one byte. An MMA waits for the one before that adds to
    // the same sums: large head dims have CHAINS of them. Others add in the order of the kernels for 16-bit keys.
    template <CacheFormat FORMAT, int STEPS>
    __device__ __forceinline__ void qk_bytes(Scores &scores, unsigned keys, int first) const {
        constexpr int CHAINS = HEAD_DIM > 256 ? 4 : 1;
        int row = (lane & 7) + (lane & 8), at = (lane & 16);
        Scores chains[CHAINS] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i += 2) {
            int step = first + i;
            unsigned b[MMA_ROW_TILES][4];
            query_steps(step, b);
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned codes[4], a[2][4];
                ldmatrix_x4(codes,
                            swizzle(keys, 16 * k + row, KEY_PITCH, at + step * 16 % 128) + step * 16 / 128 * 128);
                Codes<FORMAT>::to_f16(codes[0], a[0][0], a[0][2]);
                Codes<FORMAT>::to_f16(codes[1], a[0][1], a[0][3]);
                Codes<FORMAT>::to_f16(codes[2], a[1][0], a[1][2]);
                Codes<FORMAT>::to_f16(codes[3], a[1][1], a[1][3]);
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) {
                    Half::mma(chains[i % CHAINS][k][n], a[0], b[n][0], b[n][1]);
                    Half::mma(chains[(i + 1) % CHAINS][k][n], a[1], b[n][2], b[n][3]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float sum = chains[0][k][n][e];
                    if (CHAINS > 1) sum += chains[1 % CHAINS][k][n][e];
                    if (CHAINS > 2) sum += chains[2 % CHAINS][k][n][e] + chains[3 % CHAINS][k][n][e];
                    scores[k][n][e] = sum;
                }
    }

    // Tensor cores truncate sums: large head dims are accumulated in parts.
    template <CacheFormat FORMAT> __device__ __forceinline__ void qk_bytes(Scores &scores, unsigned keys) const {
        if constexpr (HEAD_DIM > 256) {
#pragma unroll 1
            for (int first = 0; first < KEY_STEPS; first += 16) {
                Scores part = {};
                qk_bytes<FORMAT, 16>(part, keys, first);
#pragma unroll
                for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++) scores[k][n][e] += part[k][n][e];
            }
        } else {
            qk_bytes<FORMAT, KEY_STEPS>(scores, keys, 0);
        }
    }

    // A block's codes of two keys (rows lane / 4 and 8 further) as operand A of two steps. `convert`: a word of codes.
    template <class Convert> static __device__ __forceinline__ void
    convert_block(unsigned (&a)[2][4], const unsigned (&codes)[2][2], Convert convert) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if constexpr (KeySide::IS_Q8_0) {
#pragma unroll
                for (int step = 0; step < 2; step++) convert(codes[half][step], a[step][half], a[step][2 + half]);
            } else {
                unsigned lower[2], upper[2];
                convert(codes[half][0], lower, upper);
                a[0][half] = lower[0], a[0][2 + half] = lower[1];
                a[1][half] = upper[0], a[1][2 + half] = upper[1];
            }
        }
    }
    // The codes as they are.
    static __device__ __forceinline__ void exact_operands(unsigned (&a)[2][4], const unsigned (&codes)[2][2]) {
        convert_block(a, codes, [](unsigned word, auto &first, auto &second) {
            Codes<KeySide::IS_Q8_0 ? CacheFormat::I8 : CacheFormat::Q4_0>::to_f16_even_odd(word, first, second);
        });
    }
    // As BlockOperands has them.
    static __device__ __forceinline__ void block_operands(unsigned (&a)[2][4], const unsigned (&codes)[2][2],
                                                          const KeyBlocks &blocks) {
        convert_block(a, codes,
                      [&](unsigned word, auto &first, auto &second) { blocks.to_even_odd(word, first, second); });
    }

    // The words that the scales of a pair of blocks are in: in the lower half, and in the upper half.
    struct BlockScales {
        unsigned first, second;
    };

    // Loads this lane's codes of a pair of blocks, from `at` on: its words of both, of key `half`. The first block has
    // its scale in the lower half of a word and its codes from the upper half on, the second has them in an upper half
    // and from a word on. The last lane of the first has the end of its codes and, from the first word, their start.
    static __device__ __forceinline__ BlockScales load_pair(unsigned (&codes)[2][2][2], int half, unsigned at,
                                                            int lane) {
        constexpr int CODES = KeySide::BLOCK_BYTES - 2, LAST = CODES / 16 - 1;
        int word = 4 * (lane & 3);
        unsigned wrap = (lane & 3) == 3 ? 0x7610 : 0x3210;
        unsigned start = ld_shared_word(at), middle = ld_shared_word(at + CODES);
        if (LAST == 1) {
            codes[0][half][0] = ld_shared_word(at + 4 + word);
            codes[1][half][0] = ld_shared_word(at + 4 + CODES + word);
        }
        codes[0][half][LAST] = __byte_perm(ld_shared_word(at + 4 + 16 * LAST + word), start, wrap);
        codes[1][half][LAST] = ld_shared_word(at + 4 + CODES + 16 * LAST + word);
        return {start, middle};
    }

    template <bool IS_EXACT> __device__ __forceinline__ void qk_blocks(Scores &scores, unsigned keys) const {
        int row = lane >> 2;
        unsigned from = keys + row * KEY_PITCH + view.shift<KeySide>(row);
#pragma unroll
        for (int pair = 0; pair < HEAD_DIM / 64; pair++) {
            unsigned b[2][MMA_ROW_TILES][4];
            query_steps(4 * pair, b[0]);
            query_steps(4 * pair + 2, b[1]);
            float zeros[2][MMA_ROW_TILES][4] = {};
#pragma unroll
            for (int block = 0; block < 2; block++)
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
                    for (int step = 0; step < 2 && !IS_EXACT; step++)
                        blocks.subtract_zeros(zeros[block][n], step, b[block][n][2 * step], b[block][n][2 * step + 1]);
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned codes[2][2][2]; // of the pair, the two keys, the words of a lane
                float scales[2][2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned at = from + (16 * k + 8 * half) * KEY_PITCH + pair * 2 * KeySide::BLOCK_BYTES;
                    BlockScales words = load_pair(codes, half, at, lane);
                    scales[0][half] = block_scale(words.first);
                    scales[1][half] = block_scale(words.second >> 16);
                }
#pragma unroll
                for (int block = 0; block < 2; block++) {
                    unsigned a[2][4];
                    if constexpr (IS_EXACT)
                        exact_operands(a, codes[block]);
                    else
                        block_operands(a, codes[block], blocks);
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++) {
                        float part[4];
#pragma unroll
                        for (int e = 0; e < 4; e++) part[e] = zeros[block][n][e];
                        Half::mma(part, a[0], b[block][n][0], b[block][n][1]);
                        Half::mma(part, a[1], b[block][n][2], b[block][n][3]);
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            scores[k][n][e] = fmaf(part[e], scales[block][e >> 1], scores[k][n][e]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void mma_qk(Scores &scores, unsigned keys) const {
        if constexpr (KeySide::HAS_BLOCKS) {
            if (is_exact)
                qk_blocks<true>(scores, keys);
            else
                qk_blocks<false>(scores, keys);
        } else if (view.format == CacheFormat::E4M3) {
            qk_bytes<CacheFormat::E4M3>(scores, keys);
        } else if (view.format == CacheFormat::I8) {
            qk_bytes<CacheFormat::I8>(scores, keys);
        } else {
            qk_bytes<CacheFormat::E5M2>(scores, keys);
        }
    }
};

// Values in codes: O^T = V^T P^T.
struct CodeValues {
    CodeView view;
    ValueBlocks blocks;
    int lane;
    bool scaled; // a scale per token or page; else one joins at the end of the tile
    // Of blocks: probabilities times scales are brought into f16's range. In batch-invariant mode, where scales of keys
    // that only other rows see must not decide how a row's are rounded. And after a scale of 0 with weight: if nearly
    // all of the weight is on such keys, that of others decides the output however small it is.
    bool any_scales;

    __device__ __forceinline__ void set(const CodeView &tile, bool is_scaled, bool is_batch_invariant) {
        view = tile;
        scaled = is_scaled;
        any_scales = is_batch_invariant;
    }

    // Codes of 16 value dims and all keys of the K tile as operands A.
    template <CacheFormat FORMAT>
    __device__ __forceinline__ void value_operands(unsigned (&a)[MMA_KEY_TILES][4], unsigned values, int at) const {
        unsigned codes[2 * MMA_KEY_TILES];
        if constexpr (MMA_KEY_TILES == 1) {
            ldmatrix_x2_transposed(codes, swizzle(values, lane & 15, VALUE_PITCH, at % 128) + at / 128 * 128);
        } else {
            unsigned from = swizzle(values, lane, VALUE_PITCH, at % 128) + at / 128 * 128;
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k += 2) {
                unsigned four[4];
                ldmatrix_x4_transposed(four, from + 16 * k * VALUE_PITCH);
#pragma unroll
                for (int i = 0; i < 4; i++) codes[2 * k + i] = four[i];
            }
        }
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++) {
            Codes<FORMAT>::to_f16_even_odd(codes[2 * k], a[k][0], a[k][1]);
            Codes<FORMAT>::to_f16_even_odd(codes[2 * k + 1], a[k][2], a[k][3]);
        }
    }

    template <CacheFormat FORMAT> __device__ __forceinline__ void
    pv_bytes(Outputs &out, const Scores &probs, unsigned values, unsigned scales, int first) const {
        Weights weights;
        if (!scaled) {
            pack_weights(weights, probs);
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++) {
                unsigned a[MMA_KEY_TILES][4];
                value_operands<FORMAT>(a, values + first, 16 * v);
#pragma unroll
                for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++)
                        Half::mma(out[v][n], a[k], weights[k][n][0], weights[k][n][1]);
            }
            return;
        }
        float scale[MMA_KEY_TILES][2];
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                scale[k][half] = __uint_as_float(ld_shared_word(scales + (16 * k + 8 * half + (lane >> 2)) * 4));
        Inverses inverses;
        pack_scaled_weights(weights, inverses, probs, scale);
#pragma unroll
        for (int v = 0; v < MMA_VALUE_TILES; v++) {
            unsigned a[MMA_KEY_TILES][4];
            value_operands<FORMAT>(a, values + first, 16 * v);
#pragma unroll
            for (int n = 0; n < MMA_ROW_TILES; n++) {
                float part[4] = {};
#pragma unroll
                for (int k = 0; k < MMA_KEY_TILES; k++) Half::mma(part, a[k], weights[k][n][0], weights[k][n][1]);
                add_scaled(out[v][n], part, inverses[n]);
            }
        }
    }

    // A block's codes of the keys 16 k + 2t, + 1, + 8 and + 9 as operands A of two tiles of 16 value dims: as they are,
    // or as BlockOperands has them.
    template <bool IS_EXACT> __device__ __forceinline__ void
    block_value_operands(unsigned (&a)[2][4], const unsigned (&from)[2], int k, int block) const {
        unsigned codes[2][2]; // the two runs of 8 keys, the two keys
        int eighth = lane >> 2;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int key = 0; key < 2; key++) {
                unsigned at = from[key] + (16 * k + 8 * half) * VALUE_PITCH + block / 2 * 2 * ValueSide::BLOCK_BYTES;
                if (!ValueSide::IS_Q8_0) {
                    codes[half][key] = ld_shared_half(at + block % 2 * ValueSide::BLOCK_BYTES + 2 + 2 * eighth);
                } else if (block % 2) {
                    codes[half][key] = ld_shared_word(at + 4 + ValueSide::BLOCK_BYTES - 2 + 4 * eighth);
                } else {
                    codes[half][key] = __byte_perm(ld_shared_word(at + 4 + 4 * eighth), ld_shared_word(at),
                                                   eighth == 7 ? 0x7610 : 0x3210);
                }
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (ValueSide::IS_Q8_0) {
                unsigned first = __byte_perm(codes[half][0], codes[half][1], 0x5410),
                         second = __byte_perm(codes[half][0], codes[half][1], 0x7632);
                if constexpr (IS_EXACT) {
                    Codes<CacheFormat::I8>::to_f16_even_odd(first, a[0][2 * half], a[0][2 * half + 1]);
                    Codes<CacheFormat::I8>::to_f16_even_odd(second, a[1][2 * half], a[1][2 * half + 1]);
                } else {
                    blocks.to_even_odd(first, a[0][2 * half], a[0][2 * half + 1]);
                    blocks.to_even_odd(second, a[1][2 * half], a[1][2 * half + 1]);
                }
            } else {
                unsigned lower[2], upper[2], nibbles = __byte_perm(codes[half][0], codes[half][1], 0x5410);
                if constexpr (IS_EXACT)
                    Codes<CacheFormat::Q4_0>::to_f16_even_odd(nibbles, lower, upper);
                else
                    blocks.to_even_odd(nibbles, lower, upper);
                a[0][2 * half] = lower[0], a[0][2 * half + 1] = lower[1];
                a[1][2 * half] = upper[0], a[1][2 * half + 1] = upper[1];
            }
        }
    }

    // Whether a scale is from 2^-14 to 2. `bits`: without its sign.
    static __device__ __forceinline__ bool is_moderate(unsigned bits) { return bits - 0x0400 < 0x4000 - 0x0400; }

    // Whether probabilities times the scales of any block of the K tile are in the range of f16, with 26 bits behind
    // the point for a probability of 1. Scales of 0 are, if no row has weight on their keys, such as those past the
    // end.
    __device__ __forceinline__ bool find_moderate_scales(const Scores &probs, unsigned start) {
        bool moderate = true;
#pragma unroll
        for (int key = 0; key < TILE_KEYS; key += 32) {
            if (lane + key >= TILE_KEYS) break;
            unsigned from = start + (key + lane) * VALUE_PITCH + view.shift<ValueSide>(lane);
#pragma unroll
            for (int block = 0; block < MMA_VALUE_TILES / 2; block++)
                moderate &= is_moderate(ld_shared_half(from + block * ValueSide::BLOCK_BYTES) & 0x7fff);
        }
        if (__all_sync(~0u, moderate)) return true;
        moderate = true;
        bool zero = false;
        unsigned from = start + (lane >> 2) * VALUE_PITCH + view.shift<ValueSide>(lane >> 2);
#pragma unroll
        for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = 0.0f;
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++)
                    most = fmaxf(most, fmaxf(probs[k][n][2 * half], probs[k][n][2 * half + 1]));
                unsigned at = from + (16 * k + 8 * half) * VALUE_PITCH;
#pragma unroll 1
                for (int block = 0; block < MMA_VALUE_TILES / 2; block++) {
                    unsigned bits = ld_shared_half(at + block * ValueSide::BLOCK_BYTES) & 0x7fff;
                    moderate &= is_moderate(bits) | (bits == 0);
                    zero |= (bits == 0) & (most > 0.0f);
                }
            }
        any_scales = __any_sync(~0u, zero);
        return !any_scales && __all_sync(~0u, moderate);
    }

    // The common case: probabilities are multiplied by scales in f16.
    __device__ __forceinline__ void pv_moderate_blocks(Outputs &out, const Scores &probs,
                                                       const unsigned (&from)[2]) const {
        Weights weights;
        pack_weights(weights, probs);
#pragma unroll
        for (int block = 0; block < MMA_VALUE_TILES / 2; block++)
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned scales[2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned at = (16 * k + 8 * half) * VALUE_PITCH + block * ValueSide::BLOCK_BYTES;
                    scales[half] = __byte_perm(ld_shared_half(from[0] + at), ld_shared_half(from[1] + at), 0x5410);
                }
                unsigned a[2][4];
                block_value_operands<EXACT_VALUES>(a, from, k, block);
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) {
                    unsigned scaled[2];
#pragma unroll
                    for (int half = 0; half < 2; half++) scaled[half] = mul_f16x2(weights[k][n][half], scales[half]);
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        float (&sum)[4] = out[2 * block + tile][n];
                        if (!EXACT_VALUES) blocks.subtract_zeros(sum, tile, scaled[0], scaled[1]);
                        Half::mma(sum, a[tile], scaled[0], scaled[1]);
                    }
                }
            }
    }

    __device__ __forceinline__ void pv_blocks(Outputs &out, const Scores &probs, unsigned values, int first) {
        int key = 2 * (lane & 3), row = lane >> 2;
        unsigned start = values + first / 32 * ValueSide::BLOCK_BYTES;
        if (!any_scales && find_moderate_scales(probs, start)) {
            unsigned pair[2] = {start + key * VALUE_PITCH + view.shift<ValueSide>(key),
                                start + (key + 1) * VALUE_PITCH + view.shift<ValueSide>(key + 1)};
            pv_moderate_blocks(out, probs, pair);
            return;
        }
        unsigned from[2] = {start + key * VALUE_PITCH + view.shift<ValueSide>(key),
                            start + (key + 1) * VALUE_PITCH + view.shift<ValueSide>(key + 1)};
        unsigned scales = start + row * VALUE_PITCH + view.shift<ValueSide>(row);
#pragma unroll
        for (int block = 0; block < MMA_VALUE_TILES / 2; block++) {
            float scale[MMA_KEY_TILES][2];
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    scale[k][half] = block_scale(
                        ld_shared_half(scales + (16 * k + 8 * half) * VALUE_PITCH + block * ValueSide::BLOCK_BYTES));
            Weights weights;
            Inverses inverses;
            pack_scaled_weights(weights, inverses, probs, scale);
            float part[2][MMA_ROW_TILES][4] = {};
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++) {
                unsigned a[2][4];
                block_value_operands<true>(a, from, k, block);
#pragma unroll
                for (int tile = 0; tile < 2; tile++)
#pragma unroll
                    for (int n = 0; n < MMA_ROW_TILES; n++)
                        Half::mma(part[tile][n], a[tile], weights[k][n][0], weights[k][n][1]);
            }
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int n = 0; n < MMA_ROW_TILES; n++) {
                    float units[2] = {inverses[n][0] / value_unit(tile), inverses[n][1] / value_unit(tile)};
                    add_scaled(out[2 * block + tile][n], part[tile][n], units);
                }
        }
    }

    // `first`: this warp's first value dim. `scales`: of values, in shared memory.
    __device__ __forceinline__ void mma_pv(Outputs &out, const Scores &probs, unsigned values, unsigned scales,
                                           int first) {
        if constexpr (ValueSide::HAS_BLOCKS) {
            pv_blocks(out, probs, values, first);
        } else if (view.format == CacheFormat::E4M3) {
            pv_bytes<CacheFormat::E4M3>(out, probs, values, scales, first);
        } else if (view.format == CacheFormat::I8) {
            pv_bytes<CacheFormat::I8>(out, probs, values, scales, first);
        } else {
            pv_bytes<CacheFormat::E5M2>(out, probs, values, scales, first);
        }
    }

    // The value dim, counted from this warp's first, of output element [tile][.][element].
    __device__ __forceinline__ int value_dim_of(int tile, int element) const {
        if (ValueSide::IS_Q8_0) {
            int block = tile / 2, ahead = block & 1 ? 0 : 2;
            return 32 * block + ((4 * (lane >> 2) + 2 * (tile & 1) + (element >> 1) + ahead) & 31);
        }
        return 16 * tile + 2 * (lane >> 2) + (element >> 1);
    }
};
