// The decode kernel for latent caches with 64 rows: rows are the M of both products, and two warpgroups take K tiles in
// turn (ping-pong).
//
// Warpgroup 0 has the scores of a piece's K tiles 0, 2, 4, ..., warpgroup 1 those of 1, 3, 5, ...; either has half of
// the value dims for all of them. Maxima go from K tile to K tile, and so from warpgroup to warpgroup, together with
// the probabilities:
//
//     warpgroup 0   S0 = Q K0^T, softmax, P0 ---> O += P0 V0              O += P1 V1, S2 = Q K2^T, ...
//     warpgroup 1        S1 = Q K1^T,    O += P0 V0, softmax, P1 ---> O += P1 V1, S3 = Q K3^T, ...
//
// The softmax of warpgroup 1 runs beside its first products with values, or with lists before them.
#pragma once
#include "hopper/latent_consumer.cuh"

namespace latent {

// A thread has the scores of rows `row(0)` and `row(1)`: element 4 j + 2 h + e is that of row h and key 8 j + 2 (lane %
// 4) + e. Element [i][4 j + 2 h + e] of its outputs is row h, and value dim 128 i + 8 j + 2 (lane % 4) + e of the
// warpgroup's.
struct RowConsumer : Consumer {
    static constexpr int COLUMNS = KEYS / 4; // keys of a thread

    float row_max[2], row_sum[2]; // maxima of all keys, this thread's part of the sums over the warpgroup's K tiles
    float scores[KEYS / 2];
    unsigned probs[KEYS / 4]; // pairs, as wgmma takes them from registers
    float out[OWN_CHUNKS][CHUNK_DIMS / 2];
    PipelineState<REST_STAGES> rest; // of the next K tile
    // Of the barriers: the own products, the other warpgroup's probabilities, its maxima.
    unsigned products_phase = 0, others_phase = 0, max_phase = 0;

    // A K tile in shared memory.
    struct KeyTile {
        int first_key;
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
    };

    __device__ __forceinline__ KeyTile next_tile(int key_tile) {
        KeyTile tile = {key_tile * KEYS, chunks, rest};
        chunks.advance(TILE_CHUNKS);
        rest.advance();
        return tile;
    }

    __device__ __forceinline__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }
    __device__ __forceinline__ int other() const { return warpgroup ^ 1; }

    __device__ __forceinline__ void begin(const Tile &tile) {
        // All warps are done with the queries and the row bounds of the piece before.
        hopper::named_barrier_sync(SCORES_BARRIER, CONSUMER_THREADS);
        request_queries(tile, 4 * warpgroup + warp);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            row_max[h] = -INF;
            row_sum[h] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int k = 0; k < CHUNK_DIMS / 2; k++) out[i][k] = 0.0f;
#if !LISTS
        if (threadIdx.x < ROWS) {
            int head, token;
            tile.find_row(params, min(first_row_of_cta() + (int)threadIdx.x, tile.rows - 1), head, token);
            exchange.visible[threadIdx.x] = tile.keys_of(params, token);
        }
#endif
        await_queries();
        hopper::named_barrier_sync(SCORES_BARRIER, CONSUMER_THREADS);
    }

    // S = Q K^T. When it returns, other warps may still read the K tile.
    __device__ __forceinline__ void multiply_keys(const KeyTile &tile) {
        // Descriptors that were computed ahead of the loop would be spilled.
        unsigned base = opaque(this->base);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = tile.chunks.at(i);
            wait_chunk(chunk);
            SharedTile<KEYS> keys = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < CHUNK_DIMS / 16; step++)
                Wgmma<KEYS>::mma_ss(scores, queries.k_major(first_dim_of(i) / 16 + step), keys.k_major(step), i + step);
        }
        wait_rest(tile.rest);
        SharedTile<KEYS> keys = {base + REST_OFFSET + tile.rest.index * REST_BYTES};
#pragma unroll
        for (int step = 0; step < REST_SUBTILES * 4; step++)
            Wgmma<KEYS>::mma_ss(scores, queries.k_major(VALUE_DIM / 16 + step), keys.k_major(step), 1);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.products_done[warpgroup]));
    }

    // Hides the keys that rows do not see. Returns what the dot products are still to be multiplied by to become
    // scores, in units of log2: a positive number, so that the maximum of products is that of scores.
    __device__ __forceinline__ float mask_scores(const Tile &tile, const KeyTile &keys) {
        float scale = params.scale * LOG2_E;
        if (UNLIKELY(!(scale > 0.0f))) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) scores[i] = __fmul_rn(scores[i], scale);
            scale = 1.0f;
        }
#if LISTS
        unsigned long long present = shared.present[keys.rest.index].of_tile;
        if (UNLIKELY(~present)) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++)
                if (!(present >> (i / 4 * 8 + 2 * (lane & 3) + i % 2) & 1)) scores[i] = -INF;
        }
#else
        int first_key = keys.first_key;
        if (UNLIKELY(first_key < tile.every_start || first_key + KEYS > tile.every_end)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                KeyRange visible = exchange.visible[row(h)];
#pragma unroll
                for (int i = 0; i < COLUMNS; i++) {
                    int key = first_key + i / 2 * 8 + 2 * (lane & 3) + i % 2;
                    if (key < visible.start || key >= visible.end) scores[i / 2 * 4 + 2 * h + i % 2] = -INF;
                }
            }
        }
#endif
        return scale;
    }

    // Factors of what came before a K tile.
    struct Rescale {
        bool needed; // by a row of this warp
        float factor[2];
    };

    // The first half of online softmax: updates the row max to that of a K tile.
    __device__ __forceinline__ Rescale update_max(float scale) {
        float tile_max[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            tile_max[h] = scores[2 * h];
#pragma unroll
            for (int i = 1; i < COLUMNS; i++) tile_max[h] = fmaxf(tile_max[h], scores[i / 2 * 4 + 2 * h + i % 2]);
            tile_max[h] = __fmul_rn(tile_max[h], scale);
        }
        Rescale rescale = {(bool)__any_sync(~0u, tile_max[0] > row_max[0] + RESCALE_THRESHOLD ||
                                                     tile_max[1] > row_max[1] + RESCALE_THRESHOLD),
                           {1.0f, 1.0f}};
        if (lane == 0) shared.rescales[warpgroup][warp] = rescale.needed;
        if (UNLIKELY(rescale.needed)) raise_max(tile_max, rescale.factor);
        if (warpgroup == 0) {
            __syncwarp();
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.max_full));
        }
        return rescale;
    }

    __device__ __forceinline__ void raise_max(float (&tile_max)[2], float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2)
                tile_max[h] = fmaxf(tile_max[h], __shfl_xor_sync(~0u, tile_max[h], step));
            tile_max[h] = fmaxf(tile_max[h], row_max[h]);
            factor[h] = exp2_fast(row_max[h] - reference_of(tile_max[h]));
            row_max[h] = tile_max[h];
            row_sum[h] = __fmul_rn(row_sum[h], factor[h]);
            if (lane % 4 == 0) {
                exchange.max[warpgroup][row(h)] = row_max[h];
                exchange.rescale[warpgroup][row(h)] = factor[h];
            }
        }
    }

    // An empty row uses 0 as its reference: -inf - -inf is NaN.
    static __device__ __forceinline__ float reference_of(float max) { return max == -INF ? 0.0f : max; }

    // The second half, in steps of eight keys: scores become probabilities.
    static constexpr int SOFTMAX_STEPS = KEYS / 8;
    __device__ __forceinline__ void exponentiate(int step, float scale) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = exp2_fast(fmaf(scores[4 * step + 2 * h], scale, -reference_of(row_max[h]))),
                  y = exp2_fast(fmaf(scores[4 * step + 2 * h + 1], scale, -reference_of(row_max[h])));
            row_sum[h] = __fadd_rn(row_sum[h], __fadd_rn(x, y));
            probs[2 * step + h] = E::pack(x, y);
        }
    }

    // Hands probabilities to the other warpgroup, in the place of dims that are not values. `rescales`: whether a
    // factor of this warp's is not 1.
    __device__ __forceinline__ void publish(const KeyTile &tile) {
        // All warps have read these dims.
        hopper::mbarrier_wait(shared_address(&shared.products_done[warpgroup]), products_phase);
        products_phase ^= 1;
        // Lane l gives the address of row l % 8 of matrix l / 8: the two groups of eight rows, then groups of keys.
        unsigned own_lane = opaque(lane), to = probabilities(tile).chunk(16 * warp + own_lane % 16, own_lane / 16);
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 4)
            hopper::stmatrix_x4(to ^ j << 3, probs[j], probs[j + 1], probs[j + 2], probs[j + 3]);
        hopper::fence_proxy_async();
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_full[warpgroup]));
    }

    __device__ __forceinline__ SharedTile<ROWS> probabilities(const KeyTile &tile) const {
        return {base + REST_OFFSET + tile.rest.index * REST_BYTES};
    }

    __device__ __forceinline__ void rescale_outputs(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
            for (int k = 0; k < CHUNK_DIMS / 2; k++) out[i][k] *= factor[k / 2 % 2];
    }

    // Takes over the other warpgroup's maxima.
    __device__ __forceinline__ void take_maxima() {
        if (UNLIKELY(shared.rescales[other()][warp])) {
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                row_max[h] = exchange.max[other()][row(h)];
                factor[h] = exchange.rescale[other()][row(h)];
                row_sum[h] = __fmul_rn(row_sum[h], factor[h]);
            }
            rescale_outputs(factor);
        }
    }

    // Warpgroup 0 has maxima before it has probabilities.
    __device__ __forceinline__ void wait_maxima() {
        hopper::mbarrier_wait(shared_address(&shared.max_full), max_phase);
        max_phase ^= 1;
    }

    __device__ __forceinline__ void wait_probabilities() {
        hopper::mbarrier_wait(shared_address(&shared.probs_full[other()]), others_phase);
        others_phase ^= 1;
    }

    // Issues O += P V; `multiply(out, step, values)` issues the products of 16 keys and a chunk.
    template <class Multiply> __device__ __forceinline__ void issue_values(const Piece &piece, const KeyTile &tile,
                                                                           bool waits, Multiply multiply) {
        zero_others(piece, tile.first_key, tile.chunks);
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = own_chunk(tile.chunks, i);
            if (waits) wait_chunk(chunk);
            warpgroup_fence_operand(out[i]);
            hopper::wgmma_fence();
            SharedTile<KEYS> values = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++) multiply(out[i], step, values.mn_major(step));
            hopper::wgmma_commit();
        }
    }

    // With the probabilities of this warpgroup, in registers. Q K^T has waited for the chunks; with lists the kernel is
    // 3% faster if this waits too.
    __device__ __forceinline__ void issue_own(const Piece &piece, const KeyTile &tile) {
        issue_values(piece, tile, LISTS, [&](float (&sum)[CHUNK_DIMS / 2], int step, unsigned long long values) {
            const unsigned a[4] = {probs[4 * step], probs[4 * step + 1], probs[4 * step + 2], probs[4 * step + 3]};
            Wgmma<CHUNK_DIMS>::mma_rs(sum, a, values);
        });
    }

    // With those of the other warpgroup, in shared memory.
    __device__ __forceinline__ void issue_other(const Piece &piece, const KeyTile &tile) {
        issue_values(piece, tile, true, [&](float (&sum)[CHUNK_DIMS / 2], int step, unsigned long long values) {
            Wgmma<CHUNK_DIMS>::mma_ss_transposed(sum, probabilities(tile).k_major(step), values);
        });
    }

    // Waits for O += P V; every chunk is released as soon as it was read.
    __device__ __forceinline__ void finish_values(const KeyTile &tile) {
        static_assert(OWN_CHUNKS == 2, "the waits below");
        hopper::wgmma_wait<1>();
        release(own_chunk(tile.chunks, 0));
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) warpgroup_fence_operand(out[i]);
        release(own_chunk(tile.chunks, 1));
    }

    __device__ __forceinline__ void finish_other(const KeyTile &tile) {
        finish_values(tile);
        arrive_at_all(shared.rest_empty[tile.rest.index], lane);
    }

    // K tiles of a piece, as warpgroup 0.
    __device__ __forceinline__ void run_even(const Piece &piece) {
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile += 2) {
            KeyTile own = next_tile(key_tile);
            multiply_keys(own);
            float scale = mask_scores(piece.tile, own);
            Rescale rescale = update_max(scale);
#pragma unroll
            for (int i = 0; i < SOFTMAX_STEPS; i++) exponentiate(i, scale);
            publish(own);
            if (UNLIKELY(rescale.needed)) rescale_outputs(rescale.factor);
            issue_own(piece, own);
            finish_values(own);
            if (key_tile + 1 < end) {
                KeyTile other = next_tile(key_tile + 1);
                wait_probabilities();
                take_maxima();
                issue_other(piece, other);
                finish_other(other);
            }
        }
    }

    // Whether warpgroup 1 issues the products with values of the other's K tile before the softmax of its own, so that
    // they run beside it and release the K tile early. With lists, whose chunks take longer to arrive, it is slower.
    static constexpr bool ISSUES_EARLY = !LISTS;

    // K tiles of a piece, as warpgroup 1.
    __device__ __forceinline__ void run_odd(const Piece &piece) {
        int end = piece.end_tile(), key_tile = piece.first_tile();
#pragma unroll 1
        for (; key_tile + 1 < end; key_tile += 2) {
            KeyTile other = next_tile(key_tile), own = next_tile(key_tile + 1);
            multiply_keys(own);
            wait_maxima();
            take_maxima();
            if (ISSUES_EARLY) {
                wait_probabilities();
                issue_other(piece, other);
            }
            float scale = mask_scores(piece.tile, own);
            Rescale rescale = update_max(scale);
#pragma unroll
            for (int step = 0; step < SOFTMAX_STEPS; step++) exponentiate(step, scale);
            publish(own);
            if (!ISSUES_EARLY) {
                wait_probabilities();
                issue_other(piece, other);
            }
            finish_other(other);
            if (UNLIKELY(rescale.needed)) rescale_outputs(rescale.factor);
            issue_own(piece, own);
            finish_values(own);
        }
        if (key_tile < end) {
            KeyTile other = next_tile(key_tile);
            wait_probabilities();
            wait_maxima();
            take_maxima();
            issue_other(piece, other);
            finish_other(other);
        }
    }

    // Sums of both warpgroups, and the outputs: to the workspace, or normalized as rows of the output.
    __device__ __forceinline__ void finish(const Piece &piece) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], step);
            if (lane % 4 == 0) exchange.sum[warpgroup][row(h)] = row_sum[h];
        }
        hopper::named_barrier_sync(SCORES_BARRIER, CONSUMER_THREADS);
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int own_row = row(h);
            State state = {row_max[h], exchange.sum[0][own_row] + exchange.sum[1][own_row]};
            factor[h] = finish_row(piece, own_row, state, warpgroup == 0 && lane % 4 == 0);
        }
        bool present = first_row_of_cta() + staged_row() < piece.tile.rows;
        if (!piece.is_whole()) {
            set_units(piece, factor);
            store_staged<unsigned>(partial_row(piece, staged_row()) + first_dim(), present, factor,
                                   [](float x, float y) { return Element<ElementType::F16>::pack(x, y); });
        } else {
            long long at = present ? out_row(piece, staged_row()) + first_dim() : 0;
            if (params.out_f32) {
                store_staged<float2>((float *)params.out.pointer + at, present, factor, make_float2);
            } else {
                store_staged<unsigned>((unsigned short *)params.out.pointer + at, present, factor,
                                       [](float x, float y) { return E::pack(bound_output(x), bound_output(y)); });
            }
        }
    }

    // Stores the units of a part's outputs. `factor`: what makes outputs multiples of them.
    __device__ __forceinline__ void set_units(const Piece &piece, float (&factor)[2]) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < OWN_CHUNKS; i++)
#pragma unroll
                for (int j = 0; j < CHUNK_DIMS / 2; j++) {
                    // x + 0 x is NaN if x is not finite, and fmaxf ignores NaN.
                    float x = out[i][j];
                    if (j / 2 % 2 == h) largest = fmaxf(largest, fabsf(fmaf(x, 0.0f, x)));
                }
#pragma unroll
            for (int step = 1; step < 4; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
            WeightScale power = weight_scale(largest);
            factor[h] = power.factor;
            int own_row = first_row_of_cta() + row(h);
            if (lane % 4 == 0 && own_row < piece.tile.rows)
                *partial_tile(piece).unit(warpgroup, own_row) = power.inverse;
        }
    }

    __device__ __forceinline__ int first_dim() const { return warpgroup * DIMS_PER_WARPGROUP; }

    // The row of the CTA that this lane copies.
    __device__ __forceinline__ int staged_row() const { return 16 * warp + lane % 16; }

    // Outputs times their rows' factors, to where this lane's row begins. A warp stages a chunk of its 16 rows where
    // the queries were, packed as pairs, so that its stores to global memory are of whole rows.
    template <class Pair, class Output, class Pack>
    __device__ __forceinline__ void store_staged(Output *to, bool present, const float (&factor)[2], Pack pack) const {
        // Rows are apart so that a warp's stores to shared memory have no bank conflicts.
        constexpr int PITCH = CHUNK_DIMS / 2 + 4, BYTES = 16 * PITCH * (int)sizeof(Pair), // of a warp's chunk
            ROW_LANES = CHUNK_DIMS * (int)sizeof(Output) / 16;                            // that store a row
        static_assert(CONSUMER_THREADS / 32 * BYTES <= ROWS * HEAD_DIM * 2, "in the place of queries");
        unsigned char *staged = dynamic_shared + QUERY_OFFSET + (4 * warpgroup + warp) * BYTES;
        unsigned long long own_row = present ? (unsigned long long)to : 0;
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            Pair *pairs = (Pair *)staged + (lane >> 2) * PITCH + (lane & 3);
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int j = 0; j < CHUNK_DIMS / 8; j++)
                    pairs[8 * h * PITCH + 4 * j] = pack(__fmul_rn(out[i][4 * j + 2 * h], factor[h]),
                                                        __fmul_rn(out[i][4 * j + 2 * h + 1], factor[h]));
            __syncwarp();
#pragma unroll
            for (int first = 0; first < 16; first += 32 / ROW_LANES) {
                int row = first + lane / ROW_LANES, part = lane % ROW_LANES * 16;
                unsigned long long row_at = __shfl_sync(~0u, own_row, row);
                if (row_at)
                    *(uint4 *)(row_at + i * CHUNK_DIMS * (int)sizeof(Output) + part) =
                        *(const uint4 *)(staged + row * PITCH * (int)sizeof(Pair) + part);
            }
            __syncwarp();
        }
    }
};

// Runs a consumer warp of the CTA: all pieces of work, one after another.
static __device__ __forceinline__ void run_consumer(const AttentionParameters &params, Shared &shared,
                                                    Exchange &exchange, int warp, int lane) {
    hopper::setmaxnreg_inc<VALUE_REGISTERS>();
    Consumer common = {params, shared, exchange, shared_address(dynamic_shared), warp / 4, warp % 4, lane};
    RowConsumer rows = {common};
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = rows.pieces.wait(shared);
        if (!piece.more) return;
        rows.begin(piece.tile);
        if (rows.warpgroup == 0) {
            rows.run_even(piece);
        } else {
            rows.run_odd(piece);
        }
        rows.finish(piece);
        if (is_counted(params)) {
            if (rows.warpgroup == 0) {
                hopper::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_THREADS);
                rows.count(piece);
            } else {
                hopper::named_barrier_arrive(CONSUMERS_BARRIER, CONSUMER_THREADS);
            }
        }
        rows.pieces.release(shared, lane);
    }
}

} // namespace latent
