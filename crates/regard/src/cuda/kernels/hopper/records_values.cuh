// Over records of mla656: the value warpgroups. O^T = V^T P^T takes values as its first operand from registers.
//
// Element [i][b][4 j + 2 h + e] of a thread's outputs is chunk i of this warpgroup's value dims, dim 64 b + 16 warp + 2
// (lane / 4) + h of it, and row 8 j + 2 (lane % 4) + e.
#pragma once
#include "hopper/latent_roles.cuh"
#include "hopper/records_scores.cuh"

namespace latent {

struct RecordValues : ValueWarpgroup {
    typedef unsigned Operands[2][4];

    float out[OWN_CHUNKS][CHUNK_SUBTILES][ROWS / 2];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int b = 0; b < CHUNK_SUBTILES; b++)
#pragma unroll
                for (int k = 0; k < ROWS / 2; k++) out[i][b][k] = 0.0f;
    }

    __device__ __forceinline__ void fence_outputs() {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int b = 0; b < CHUNK_SUBTILES; b++) warpgroup_fence_operand(out[i][b]);
    }

    // The chunk of a record's values that is chunk i of this warpgroup's.
    __device__ __forceinline__ int chunk_of_record(int i) const { return warpgroup * OWN_CHUNKS + i; }

    __device__ __forceinline__ void rescale() {
        const float *factors = exchange.rescale[probs.index], *unit_factors = exchange.units.factor[probs.index];
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float factor = factors[8 * j + 2 * (lane & 3) + e];
#pragma unroll
                for (int i = 0; i < OWN_CHUNKS; i++) {
                    float own_factor = HAS_VALUE_UNITS ? factor * unit_factors[chunk_of_record(i)] : factor;
#pragma unroll
                    for (int b = 0; b < CHUNK_SUBTILES; b++)
#pragma unroll
                        for (int h = 0; h < 2; h++) out[i][b][4 * j + 2 * h + e] *= own_factor;
                }
            }
    }

    // Waits for half a K tile; the address of this lane's dims of its key.
    __device__ __forceinline__ unsigned wait_half(int half) const {
        PipelineState<CHUNKS> stage = chunks.at(half);
        hopper::mbarrier_wait(shared_address(&shared.full[stage.index]), stage.phase);
        return chunk_records(base, stage) + lane * RECORD_BYTES + warpgroup * DIMS_PER_WARPGROUP + 16 * warp;
    }

    // Codes were read by this warp.
    __device__ __forceinline__ void release_half(int half) const {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.empty[chunks.at(half).index]));
    }

    // A K tile has operands of 32 keys and 64 value dims: those of its first half, then of its second.
    static constexpr int HALF_OPERANDS = OWN_CHUNKS * CHUNK_SUBTILES, OPERANDS = 2 * HALF_OPERANDS;
    // Operands in registers: products read some while others are converted.
    static constexpr int BUFFERS = 2;

    // Issues the products of operand `number` of a K tile.
    template <bool IS_WIDE> __device__ __forceinline__ void issue(const Operands &a, int number) {
        int half = number / HALF_OPERANDS, i = number % HALF_OPERANDS / CHUNK_SUBTILES, b = number % CHUNK_SUBTILES;
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; step++) {
            if (IS_WIDE)
                CodeWgmma<ROWS>::mma_bf16(out[i][b], a[step], probabilities(i, 2 * half + step), 1);
            else
                CodeWgmma<ROWS>::mma_f16(out[i][b], a[step], probabilities(i, 2 * half + step), 1);
        }
        hopper::wgmma_commit();
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        int count = piece.end_tile() - piece.first_tile();
#pragma unroll 1
        for (int i = 0; i < count; i++) run_tile();
    }

    // O^T += V^T P^T over a K tile.
    __device__ __forceinline__ void run_tile() {
        Operands a[BUFFERS];
        unsigned words[4], from = wait_half(0);
        convert_first<!HAS_VALUE_UNITS>(a, words, from);
        hopper::mbarrier_wait(shared_address(&shared.probs_full[probs.index]), probs.phase);
        bool is_wide = false;
        if (UNLIKELY(*(const int *)shared.rescales[probs.index])) {
            rescale();
            is_wide = HAS_VALUE_UNITS && exchange.units.is_wide[probs.index];
        }
        if (UNLIKELY(is_wide)) {
            convert_first<true>(a, words, from);
            multiply<true>(a, words, from);
        } else {
            multiply<!HAS_VALUE_UNITS>(a, words, from);
        }
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_empty[probs.index]));
        chunks.advance(2);
        probs.advance();
    }

    // Converts operands that need no products to be done.
    template <bool IS_WIDE>
    __device__ __forceinline__ void convert_first(Operands (&a)[BUFFERS], unsigned (&words)[4], unsigned &from) const {
        load(words, from, 0);
#pragma unroll
        for (int n = 0; n < BUFFERS; n++) convert<IS_WIDE>(a[n], words, from, n);
    }

    // Multiplies the operands of a K tile by probabilities; the first are converted.
    template <bool IS_WIDE>
    __device__ __forceinline__ void multiply(Operands (&a)[BUFFERS], unsigned (&words)[4], unsigned &from) {
        fence_outputs();
#pragma unroll
        for (int n = 0; n < OPERANDS; n++) {
            if (n >= BUFFERS) {
                hopper::wgmma_wait<BUFFERS - 1>();
                convert<IS_WIDE>(a[n % BUFFERS], words, from, n);
            }
            issue<IS_WIDE>(a[n % BUFFERS], n);
        }
        hopper::wgmma_wait<0>();
        fence_outputs();
    }

    // Loads the codes of operand `number`. `from`: of its half.
    static __device__ __forceinline__ void load(unsigned (&words)[4], unsigned from, int number) {
        int i = number % HALF_OPERANDS / CHUNK_SUBTILES, b = number % CHUNK_SUBTILES;
        ldmatrix_x4_transposed(words, from + i * CHUNK_DIMS + b * 64);
    }

    // Converts the codes of operand `number`, and loads those of the next one.
    template <bool IS_WIDE>
    __device__ __forceinline__ void convert(Operands &a, unsigned (&words)[4], unsigned &from, int number) const {
        records::value_operands<IS_WIDE>(a, words);
        if (number % HALF_OPERANDS == HALF_OPERANDS - 1) release_half(number / HALF_OPERANDS);
        if (number + 1 == HALF_OPERANDS) from = wait_half(1);
        if (number + 1 < OPERANDS) load(words, from, number + 1);
    }

    // Calls `store(row of the CTA, f)` for this thread's rows that exist, one after another; `f(each)` calls
    // `each(dim, output, next output)` for the thread's outputs of the row.
    template <class Store> __device__ __forceinline__ void for_each_row(const Piece &piece, Store store) const {
        float key_scale = exchange.key_scale;
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            int own_lane = opaque(lane), row = c / 2 * 8 + 2 * (own_lane & 3) + c % 2;
            int first_dim = warpgroup * DIMS_PER_WARPGROUP + 16 * warp + 2 * (own_lane >> 2);
            if (first_row_of_cta() + row >= piece.tile.rows) continue;
            store(row, [&](auto each) {
#pragma unroll
                for (int i = 0; i < OWN_CHUNKS; i++) {
                    float unit = HAS_VALUE_UNITS ? exchange.units.of_piece[chunk_of_record(i)] * key_scale : key_scale;
#pragma unroll
                    for (int b = 0; b < CHUNK_SUBTILES; b++)
                        each(first_dim + CHUNK_DIMS * i + 64 * b, __fmul_rn(out[i][b][c / 2 * 4 + c % 2], unit),
                             __fmul_rn(out[i][b][c / 2 * 4 + 2 + c % 2], unit));
                }
            });
        }
    }

    // Stores a piece's outputs: to the workspace, or normalized as rows of the output.
    __device__ __forceinline__ void store_outputs(const Piece &piece) const {
        if (!piece.is_whole()) {
            for_each_row(piece, [&](int row, auto outputs) {
                float *to = partial_row(piece, row);
                outputs([&](int dim, float x, float y) { *(float2 *)(to + dim) = make_float2(x, y); });
            });
            return;
        }
        for_each_row(piece, [&](int row, auto outputs) {
            float factor = exchange.out_factor[row];
            long long at = out_row(piece, row);
            if (params.out_f32) {
                float *to = (float *)params.out.pointer + at;
                outputs([&](int dim, float x, float y) {
                    *(float2 *)(to + dim) = make_float2(__fmul_rn(x, factor), __fmul_rn(y, factor));
                });
            } else {
                unsigned short *to = (unsigned short *)params.out.pointer + at;
                outputs([&](int dim, float x, float y) {
                    *(unsigned *)(to + dim) =
                        E::pack(bound_output(__fmul_rn(x, factor)), bound_output(__fmul_rn(y, factor)));
                });
            }
        });
    }
};

// Runs a consumer warp of the CTA.
static __device__ __forceinline__ void run_consumer(const AttentionParameters &params, Shared &shared,
                                                    Exchange &exchange, int warp, int lane) {
    run_role<RecordScores, RecordValues>(params, shared, exchange, warp, lane);
}

} // namespace latent
