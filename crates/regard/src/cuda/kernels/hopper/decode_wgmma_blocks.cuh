// Decode on Hopper over blocks of q8_0 and q4_0: copies of rows, and operands of wgmma. A K tile's codes are converted
// once per tile of rows.
//
// Each block of keys has sums of its own, which the scales of its keys multiply. Scales of values multiply codes, in
// f16; where they are not moderate, probabilities, in f32, by the slow path `add_any_scales`.
#pragma once
#include "decode/decode_codes.cuh"
#include "hopper/decode_wgmma_operands.cuh"
#include "hopper/decode_wgmma_softmax.cuh"

namespace decode_wgmma {

static_assert(!KeySide::HAS_BLOCKS || (KEY_CLASS == VALUE_CLASS && HEAD_DIM == VALUE_DIM),
              "a warp has the value dims of half a block, of one, or of two");
constexpr int KEY_BLOCKS = HEAD_DIM / 32;

// Rows of blocks lie in shared memory as far from a multiple of 16 bytes as in memory. `row`: of a run of 16 keys.
template <class Side>
static __device__ __forceinline__ unsigned row_shift(unsigned long long base, long long stride, int row) {
    return ((unsigned)base + row * (unsigned)stride) & (16 - Side::ALIGNMENT);
}

// Starts the copies of a run of 16 rows of blocks: whole chunks of 16 bytes by several lanes per row, and what is left
// of a row by one. `key`: the first, counted from the first of `keys` that exist; the others become zeros.
template <class Side> static __device__ __forceinline__ void
copy_block_rows(unsigned to, unsigned long long from, long long stride, unsigned key, unsigned keys, int lane) {
    constexpr int CHUNKS = Side::ROW_BYTES / 16,
                  LANES = CHUNKS < 4    ? 2
                          : CHUNKS < 8  ? 4
                          : CHUNKS < 16 ? 8
                                        : 16,
                  AT_ONCE = 32 / LANES, CHUNK_BYTES = LANES * 16;
    static_assert(Side::ROW_BYTES == CHUNK_BYTES + Side::ALIGNMENT && 32 % LANES == 0, "chunks, and one piece");
    static_assert(AT_ONCE * Side::ALIGNMENT % 16 == 0, "rows that far apart start equally far from a multiple of 16");
    // Rows at multiples of 8 bytes: the piece comes first if they are off a multiple of 16. At multiples of 4, chunks
    // begin before a row, and the piece is what is left.
    constexpr bool WHOLE = Side::ALIGNMENT == 8;
    int row = lane / LANES, column = lane % LANES * 16;
    unsigned shift = row_shift<Side>(from, stride, row);
    unsigned long long source = from + row * stride;
    source = WHOLE ? source + (column + shift) : source - shift + column;
    unsigned place = to + row * Side::PITCH + column + (WHOLE ? 2 * shift : 0);
#pragma unroll
    for (int i = 0; i < WARP_KEYS; i += AT_ONCE) {
        const void *chunk = (const void *)(source + i * stride);
        int bytes = key + row + i < keys ? 16 : 0;
        if (CHUNK_BYTES % 128 == 0)
            cp_async_alone(place + i * Side::PITCH, chunk, bytes);
        else
            cp_async_sectors(place + i * Side::PITCH, chunk, bytes);
    }
    if (lane >= WARP_KEYS) return;
    shift = row_shift<Side>(from, stride, lane);
    bool present = key + lane < keys;
    if constexpr (WHOLE) {
        unsigned rest = shift ? 0 : CHUNK_BYTES;
        cp_async_eight(to + lane * Side::PITCH + shift + rest, (const void *)(from + lane * stride + rest), present);
    } else {
        cp_async_sectors(to + lane * Side::PITCH + CHUNK_BYTES,
                         (const void *)(from + lane * stride - shift + CHUNK_BYTES),
                         present ? shift + Side::ALIGNMENT : 0);
    }
}

// The keys of a warp, and their dot products with all rows, block by block.
struct BlockKeys {
    // Of two pairs of blocks, which take turns.
    unsigned codes[2][2][2][4]; // of a block: operands A of two steps
    unsigned scales[2][2];      // of a pair and a key
    float sums[2][SUMS];        // of a pair of blocks
    float scores[SUMS];
    unsigned first; // offset of this lane's first key in a stage

    __device__ __forceinline__ void set(unsigned long long base, long long stride, int warp, int lane) {
        int row = lane >> 2;
        first = opaque((WARP_KEYS * warp + row) * KEY_PITCH + row_shift<KeySide>(base, stride, row));
    }

    // Loads the first pair of blocks.
    __device__ __forceinline__ void load(unsigned, unsigned keys, int lane) { load_pair(keys, 0, lane); }

    // Starts its products.
    __device__ __forceinline__ void multiply(const SharedTile<ROWS> &queries) { multiply_pair(queries, 0); }

    // The other pairs, and scores from the sums of those before: one is loaded beside the products of the one before.
    __device__ __forceinline__ void continue_scores(const SharedTile<ROWS> &queries, unsigned keys, int lane) {
#pragma unroll
        for (int pair = 1; pair < KEY_BLOCKS / 2; pair++) {
            load_pair(keys, pair, lane);
            add_scores(pair - 1);
            multiply_pair(queries, pair);
        }
    }

    __device__ __forceinline__ void load_pair(unsigned keys, int pair, int lane) {
        unsigned words[2][2][2]; // of the pair, the two keys, the words of a lane
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned at = keys + first + 8 * half * KEY_PITCH + pair * 2 * KeySide::BLOCK_BYTES;
            CodeKeys::BlockScales found = CodeKeys::load_pair(words, half, at, lane);
            scales[pair % 2][half] = __byte_perm(found.first, found.second, 0x7610);
        }
#pragma unroll
        for (int block = 0; block < 2; block++) CodeKeys::exact_operands(codes[pair % 2][block], words[block]);
    }

    __device__ __forceinline__ void finish_scores() { add_scores(KEY_BLOCKS / 2 - 1); }

    __device__ __forceinline__ void multiply_pair(const SharedTile<ROWS> &queries, int pair) {
#pragma unroll
        for (int block = 0; block < 2; block++) warpgroup_fence_operand(sums[block]);
        hopper::wgmma_fence();
#pragma unroll
        for (int block = 0; block < 2; block++)
#pragma unroll
            for (int step = 0; step < 2; step++)
                CodeWgmma<ROWS>::mma_f16(sums[block], codes[pair % 2][block][step],
                                         queries.k_major(4 * pair + 2 * block + step), step);
        hopper::wgmma_commit();
    }

    __device__ __forceinline__ void add_scores(int pair) {
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < 2; block++) {
            warpgroup_fence_operand(sums[block]);
            float scale[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                scale[half] = block_scale(scales[pair % 2][half] >> 16 * block & 0xffff);
            for_each_element([&](int i, int, int half, int) {
                scores[i] = fmaf(sums[block][i], scale[half], pair + block ? scores[i] : 0.0f);
            });
        }
    }
};

// The values of a K tile: a warp has the dims of a block, in two tiles of 16; at head dim 64 one of these tiles, at 256
// two neighbouring blocks.
struct BlockValues {
    static constexpr bool HAS_PAIRS = true;
    static constexpr int SCALES = VALUE_DIM / 64; // of a key, that a lane tests
    static constexpr int TILES = VALUE_BLOCKS < 2 ? VALUE_BLOCKS : 2,
                         BLOCKS = VALUE_BLOCKS / TILES; // of a block; of a warp
    static __device__ __forceinline__ int block_of(int warp, int number) {
        return TILES == 1 ? warp / 2 : BLOCKS * warp + number;
    }

    unsigned rows[2];    // offsets in a stage of the values of keys 2 (lane % 4) and the next
    unsigned scale_rows; // of the value of key lane % 16 of this warp

    __device__ __forceinline__ void set(unsigned long long base, long long stride, int warp, int lane) {
        int key = 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < 2; i++)
            rows[i] = opaque((key + i) * VALUE_PITCH + row_shift<ValueSide>(base, stride, key + i));
        int own = lane % WARP_KEYS;
        scale_rows = opaque((WARP_KEYS * warp + own) * VALUE_PITCH + row_shift<ValueSide>(base, stride, own));
    }

    // Whether scales of this warp's keys times any code are in the range of f16, with all bits.
    __device__ __forceinline__ bool has_moderate_scales(unsigned values, int lane) const {
        bool moderate = true;
#pragma unroll
        for (int i = 0; i < SCALES; i++) {
            int block = SCALES * (lane / WARP_KEYS) + i;
            unsigned bits = ld_shared_half(values + scale_rows + block * ValueSide::BLOCK_BYTES) & 0x7fff;
            moderate &= bits == 0 || bits - 0x0400 < 0x5c00 - 0x0400; // 2^-14 to 2^8
        }
        return moderate;
    }

    // Codes of the keys 16 step + 2t, + 1, + 8 and + 9 as operands A of all tiles, times their scales. Returns whether
    // all of this warp's scales are moderate.
    __device__ __forceinline__ bool load(unsigned, unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], BlockRange,
                                         unsigned values, int warp, int lane) const {
#pragma unroll
        for (int number = 0; number < BLOCKS; number++) load_codes<true>(a, values, number, warp, lane);
        return has_moderate_scales(values, lane);
    }

    // The same of the tiles of the warp's block `number`, times their scales if SCALED.
    template <bool SCALED> __device__ __forceinline__ void
    load_codes(unsigned (&a)[VALUE_BLOCKS][VALUE_STEPS][4], unsigned values, int number, int warp, int lane) const {
        int eighth = lane >> 2, odd = BLOCKS == 2 ? number : block_of(warp, 0) & 1;
        unsigned pair = values + block_of(warp, number) / 2 * 2 * ValueSide::BLOCK_BYTES;
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                unsigned words[2], scales[2], at[2]; // of the two keys
#pragma unroll
                for (int key = 0; key < 2; key++) at[key] = pair + rows[key] + (16 * step + 8 * half) * VALUE_PITCH;
                unsigned scale, tiles[2][2]; // of the tiles: the operands' words
                if (ValueSide::IS_Q8_0) {
                // The first block of a pair has its scale in the lower half of a word and codes from the upper half
                // on; the second has its scale in an upper half.
#pragma unroll
                    for (int key = 0; key < 2; key++) {
                        scales[key] = ld_shared_word(at[key] + (odd ? 32 : 0));
                        words[key] = __byte_perm(ld_shared_word(at[key] + (odd ? 36 : 4) + 4 * eighth), scales[key],
                                                 !odd && eighth == 7 ? 0x7610 : 0x3210);
                    }
                    scale = __byte_perm(scales[0], scales[1], odd ? 0x7632 : 0x5410);
                    unsigned first = TILES == 1 && warp & 1 ? 0x7362 : 0x5140;
                    Codes<CacheFormat::I8>::to_f16(__byte_perm(words[0], words[1], first), tiles[0][0], tiles[0][1]);
                    if (TILES == 2)
                        Codes<CacheFormat::I8>::to_f16(__byte_perm(words[0], words[1], 0x7362), tiles[1][0],
                                                       tiles[1][1]);
                } else {
#pragma unroll
                    for (int key = 0; key < 2; key++) {
                        scales[key] = ld_shared_half(at[key] + odd * ValueSide::BLOCK_BYTES);
                        words[key] = ld_shared_half(at[key] + odd * ValueSide::BLOCK_BYTES + 2 + 2 * eighth);
                    }
                    scale = __byte_perm(scales[0], scales[1], 0x5410);
                    unsigned nibbles = __byte_perm(words[0], words[1], 0x5410);
                    if (TILES == 1) nibbles >>= 4 * (warp & 1);
                    Codes<CacheFormat::Q4_0>::to_f16_even_odd(nibbles, tiles[0], tiles[1]);
                }
#pragma unroll
                for (int v = 0; v < TILES; v++)
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        a[2 * number + v][step][2 * half + i] = SCALED ? mul_f16x2(tiles[v][i], scale) : tiles[v][i];
            }
    }

    // The value dim of element [tile][4 j + e] of a thread's output.
    static __device__ __forceinline__ int dim_of(int tile, int element, int warp, int lane) {
        int block = block_of(warp, tile / 2);
        tile = TILES == 1 ? warp & 1 : tile % 2;
        int dim = 16 * tile + 2 * (lane >> 2) + (element >> 1);
        // Words of codes of the first block of a pair are two codes ahead.
        if (ValueSide::IS_Q8_0) dim = (4 * (lane >> 2) + 2 * tile + (element >> 1) + (block & 1 ? 0 : 2)) & 31;
        return 32 * block + dim;
    }

    // Adds a K tile's values whose scales are any numbers, as `CodeValues::pv_blocks` does: probabilities are
    // multiplied by the scales of a block in f32, and brought into f16's range by a power of two per row. A block after
    // another: all warps store weights for it, and the one that has its dims multiplies. `buffer`: for weights. It
    // rarely runs.
    __device__ __forceinline__ void add_any_scales(float (&out)[VALUE_BLOCKS][SUMS], const float (&scores)[SUMS],
                                                   const Softmax &softmax, unsigned values, unsigned buffer, int warp,
                                                   int lane) const {
        SharedTile<ROWS> tile = {buffer};
        RowPair pairs[ROW_BLOCKS];
        softmax.load_pairs(pairs);
#pragma unroll 1
        for (int block = 0; block < VALUE_DIM / 32; block++) {
            float weights[SUMS], most[ROW_BLOCKS][2], inverses[ROW_BLOCKS][2], scales[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Of key lane / 4 + 8 half of the warp, of which another lane has the row.
                unsigned row = __shfl_sync(~0u, scale_rows, (lane >> 2) + 8 * half);
                scales[half] = block_scale(ld_shared_half(values + row + block * ValueSide::BLOCK_BYTES));
            }
            for_each_element([&](int i, int j, int half, int r) {
                weights[i] = exp2_fast(Softmax::exponent(scores[i], pairs[j], r)) * scales[half];
            });
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    most[j][r] = fmaxf(fabsf(weights[4 * j + r]), fabsf(weights[4 * j + 2 + r]));
            Softmax::find_maxima(most, warp, lane);
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    WeightScale power = weight_scale(most[j][r]);
                    inverses[j][r] = power.inverse;
                    weights[4 * j + r] *= power.factor;
                    weights[4 * j + 2 + r] *= power.factor;
                }
            softmax.store(weights, buffer);
            synchronize_consumers();
#pragma unroll
            for (int number = 0; number < BLOCKS; number++) {
                if (block_of(warp, number) != block) continue;
                unsigned a[VALUE_BLOCKS][VALUE_STEPS][4];
                load_codes<false>(a, values, number, warp, lane);
#pragma unroll
                for (int j = 0; j < ROW_BLOCKS; j++) {
                    float parts[TILES][4] = {};
#pragma unroll
                    for (int step = 0; step < VALUE_STEPS; step += 2) {
                        unsigned b[4]; // of two steps
                        ldmatrix_x4(b, tile.chunk(8 * j + (lane & 7), 2 * step + (lane >> 3)));
#pragma unroll
                        for (int v = 0; v < TILES; v++) {
                            Half::mma(parts[v], a[2 * number + v][step], b[0], b[1]);
                            Half::mma(parts[v], a[2 * number + v][step + 1], b[2], b[3]);
                        }
                    }
#pragma unroll
                    for (int v = 0; v < TILES; v++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float &sum = out[2 * number + v][4 * j + e];
                            sum = fmaf(parts[v][e], inverses[j][e & 1], sum);
                        }
                }
            }
            synchronize_consumers(); // the weights have been read
        }
    }
};

} // namespace decode_wgmma
