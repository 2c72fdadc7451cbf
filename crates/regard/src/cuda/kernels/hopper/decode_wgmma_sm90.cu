// Decode attention of many rows on Hopper, over 8-bit codes, blocks of q8_0 or q4_0, or 16-bit elements: as
// decode/decode.cu, but keys and values are read, and codes converted, once for all rows of a tile.
//
// The rows of a tile are the N of wgmma: S^T = K Q^T and O^T = V^T P^T take keys and values as their first operand from
// registers, where a warp has its 16 keys, then its value dims, converted if they are codes. A CTA has a warpgroup of
// consumers, which walk K tiles of 64 keys: conversion of values runs beside Q K^T, that of the next keys beside P V.
// Probabilities go through shared memory. A warpgroup of loaders (decode_wgmma_loader.cuh) copies keys and values ahead
// of the consumers, also those of the next tile.
//
// Maxima of rows are exchanged only where a score exceeds a row's reference by so much that f16 could not hold its
// probability.
//
// Plain scores, exact head dims and runs of 16 keys, as the specialized modules of decode.cu, whose division of work
// and partial states it has. Not in batch-invariant mode.
#include "common/arrival.cuh"
#include "common/paging.cuh"
#include "decode/decode_cache.cuh"
#include "decode/decode_combine_entry.cuh"
#include "decode/decode_schedule.cuh"
#include "hopper/decode_wgmma_loader.cuh"
#include "hopper/decode_wgmma_operands.cuh"
#include "hopper/decode_wgmma_softmax.cuh"
#if READS_CODES
#include "hopper/decode_wgmma_blocks.cuh"
#endif

namespace decode_wgmma {

#if READS_CODES
template <bool BLOCKS> struct ProductsOf {
    typedef ByteKeys Keys;
    typedef ByteValues Values;
};
template <> struct ProductsOf<true> {
    typedef BlockKeys Keys;
    typedef BlockValues Values;
};
typedef ProductsOf<KeySide::HAS_BLOCKS> Products;
#else
struct Products {
    typedef ElementKeys Keys;
    typedef ElementValues Values;
};
#endif

struct Consumer {
    const AttentionParameters &params;
    const CacheParameters &cache;
    Facts &facts;
    unsigned base; // of shared memory
    int warp, lane;
    unsigned needs;
    RingState ring;
    PieceReader<PIECES> pieces;
    Softmax softmax;
    float out[VALUE_BLOCKS][SUMS];

    static constexpr int WARP_ROWS = ROWS / CONSUMER_WARPS;

    // Keeps the compiler from computing what depends on the lane ahead, for all pieces: between a piece and its queries
    // that would be code to fetch, and local memory.
    __device__ __forceinline__ void reread_lane() { lane = read_lane(), base = read_base(); }

    // The row of a tile that is number `i` of this warp.
    __device__ __forceinline__ int row_of(int i) const { return warp + i * CONSUMER_WARPS; }

    // Where queries of this warp's rows start, counted in elements: of row l % WARP_ROWS in lane l.
    __device__ __forceinline__ long long find_queries(const Tile &tile) const {
        int row = row_of(lane % WARP_ROWS), head, token;
        tile.find_row(params, row < tile.rows ? row : 0, head, token);
        return tile.sequence * params.query.strides.batch +
               (long long)(tile.seq.q_start + token) * params.query.strides.token + head * params.query.strides.head;
    }

    // What dot products with a row's query as an operand, times `factor`, are multiplied by: greater than 0, so that
    // hidden keys stay at -inf. The sign of `scale` is that of the operand.
    static __device__ __forceinline__ float row_scale(float scale, float inverse) {
        float product = fabsf(scale) * inverse;
        return product == 0.0f ? __int_as_float(0x00800000) : product;
    }

#if READS_CODES
    // The rows of this warp, some at once. A lane has the dims that it multiplies with words of codes, four each.
    static constexpr int ROW_WORDS = HEAD_DIM / 4, ROW_LANES = ROW_WORDS < 32 ? ROW_WORDS : 32,
                         LANE_WORDS = ROW_WORDS / ROW_LANES, ROWS_AT_ONCE = 32 / ROW_LANES;
    typedef unsigned Queries[WARP_ROWS / ROWS_AT_ONCE][LANE_WORDS][2]; // pairs of neighbouring dims

    __device__ __forceinline__ int lane_row(int i) const { return row_of(i * ROWS_AT_ONCE + lane / ROW_LANES); }
    __device__ __forceinline__ int lane_word(int i) const { return lane % ROW_LANES * LANE_WORDS + i; }
    // A word of codes has this slot, the next one, and those 8 further. Code 2 is as many further as `dim_of_slot`
    // says.
    static __device__ __forceinline__ int first_slot(int word) { return 16 * (word / 4) + 2 * (word % 4); }
    static constexpr int CODE_2 = KeySide::IS_BYTES ? 8 : 1;

    // Asks for all rows before the first is used. Rows that do not exist are zeros.
    __device__ __forceinline__ void load_queries(const Tile &tile, Queries &queries) const {
        long long starts = find_queries(tile);
        const unsigned char *from = (const unsigned char *)params.query.pointer;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / ROWS_AT_ONCE; i++) {
            long long at = __shfl_sync(~0u, starts, i * ROWS_AT_ONCE + lane / ROW_LANES) * 2;
#pragma unroll
            for (int word = 0; word < LANE_WORDS; word++) {
                // The dims of codes 0 and 1, then those of 2 and 3.
                int slot = first_slot(lane_word(word)), dims[2] = {dim_of_slot(slot), dim_of_slot(slot + CODE_2)};
#pragma unroll
                for (int pair = 0; pair < 2; pair++)
                    queries[i][word][pair] =
                        lane_row(i) < tile.rows ? *(const unsigned *)(from + (at + dims[pair] * 2)) : 0;
            }
        }
    }

    // Stores them as f16, in the order of codes. bf16 rows are multiplied by a power of two.
    __device__ __forceinline__ void store_queries(const Queries &queries, float scale) const {
        SharedTile<ROWS> to = {base + QUERY_OFFSET};
#pragma unroll
        for (int i = 0; i < WARP_ROWS / ROWS_AT_ONCE; i++) {
            int row = lane_row(i);
            float values[LANE_WORDS][4], most = 0.0f;
#pragma unroll
            for (int word = 0; word < LANE_WORDS; word++)
#pragma unroll
                for (int code = 0; code < 4; code++) {
                    values[word][code] = E::to_float((Bits)(queries[i][word][code / 2] >> code % 2 * 16));
                    most = fmaxf(most, fabsf(values[word][code]));
                }
            WeightScale power = {1.0f, 1.0f};
            if (ElementType(ELEMENT_TYPE) == ElementType::BF16) power = query_power<ROW_LANES>(most);
            float factor = copysignf(power.factor, scale);
            if (lane % ROW_LANES == 0) row_numbers().scale(row) = row_scale(scale, power.inverse);
#pragma unroll
            for (int word = 0; word < LANE_WORDS; word++) {
                int slot = first_slot(lane_word(word));
                float (&x)[4] = values[word];
                constexpr int NEXT = CODE_2 == 1 ? 2 : 1; // the code that follows code 0
                st_shared_word(to.chunk(row, slot / 8) + slot % 8 * 2, Half::pack(x[0] * factor, x[NEXT] * factor));
                st_shared_word(to.chunk(row, slot / 8 + 1) + slot % 8 * 2,
                               Half::pack(x[3 - NEXT] * factor, x[3] * factor));
            }
        }
    }
#else
    typedef uint4 Queries[WARP_ROWS];

    // Queries, 16 bytes by a lane.
    __device__ __forceinline__ void load_queries(const Tile &tile, Queries &queries) const {
        static_assert(HEAD_DIM == 256, "a warp copies a row");
        long long starts = find_queries(tile);
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            const uint4 *from = (const uint4 *)((const Bits *)params.query.pointer + __shfl_sync(~0u, starts, i));
            queries[i] = row_of(i) < tile.rows ? from[lane] : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void store_queries(const Queries &queries, float scale) const {
        SharedTile<ROWS> to = {base + QUERY_OFFSET};
        unsigned sign = scale < 0.0f ? 0x80008000 : 0;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) {
            uint4 x = queries[i];
            st_shared_v4(to.chunk(row_of(i), lane), make_uint4(x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign));
        }
        if (threadIdx.x < ROWS) row_numbers().scale(threadIdx.x) = row_scale(scale, 1.0f);
    }
#endif

    // What multiplies scores and values: scales that all keys of the tile share.
    struct TileScales {
        float keys, values;
    };

    __device__ __forceinline__ TileScales load_scales(const Tile &tile) const {
        TileScales scales = {1.0f, 1.0f};
#if READS_CODES
        if (KeySide::IS_BYTES && !(needs & KEYS_SCALED) && tile.rows)
            scales.keys = *scale_start(params, tile, cache.key_scales, cache.key_scale_strides);
        if (ValueSide::IS_BYTES && !(needs & VALUES_SCALED) && tile.rows)
            scales.values = *scale_start(params, tile, cache.value_scales, cache.value_scale_strides);
#endif
        return scales;
    }

    // Facts of a row, and its numbers before the first key, by a thread each.
    __device__ __forceinline__ void begin_rows(const Tile &tile, float value_scale) const {
        if (threadIdx.x >= ROWS) return;
        int row = threadIdx.x;
        RowFacts found = {0, 0, 0, 0.0f, 0, 0, 0};
        if (row < tile.rows) {
            int head, token;
            tile.find_row(params, row, head, token);
            found = row_facts<false>(params, tile, head, token);
        }
        facts.rows[row] = found;
        row_numbers().out[row].factors[1] = value_scale;
        Softmax::begin_row(row);
    }

    // Keeps the compiler from moving uses of the output across this point.
    __device__ __forceinline__ void fence_out() {
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);
    }

    __device__ __forceinline__ void begin_piece(const Tile &tile) {
        Queries queries;
        reread_lane();
        load_queries(tile, queries);
        TileScales scales = load_scales(tile);
        begin_rows(tile, scales.values);
        reread_lane();
        store_queries(queries, params.scale * LOG2_E * scales.keys);
        // wgmma reads the queries.
        hopper::fence_proxy_async();
        synchronize_consumers();
        reread_lane();
        softmax.begin(base, warp, lane);
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) out[block][i] = 0.0f;
    }

    // The K tiles of a piece.
    __device__ __forceinline__ void run_tiles(const Piece &piece) {
        const Tile &tile = piece.tile;
        int end = uniform(piece.end_tile()), turn = 0;
        // K tiles whose keys of this warp are visible to every row.
        int every_start = uniform((max(tile.every_start - WARP_KEYS * warp, 0) + KEYS - 1) / KEYS),
            every_end = uniform((tile.every_end - WARP_KEYS * (warp + 1) + KEYS) / KEYS);
        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        unsigned value_fragments[VALUE_BLOCKS][VALUE_STEPS][4];
        Products::Keys key_products;
        Products::Values value_products;
        key_products.set(tile.key_base, params.keys.strides.token * KeySide::BYTES, warp, lane);
        value_products.set(tile.value_base, params.values.strides.token * ValueSide::BYTES, warp, lane);
#pragma unroll 1
        for (int key_tile = uniform(piece.first_tile()); key_tile < end; key_tile++) {
            unsigned keys = ring.address(base), values = keys + KEYS * KEY_PITCH;
            if (HAS_LARGE_HEADS) {
                hopper::wgmma_wait<0>();
                fence_out();
            }
            ring.wait_full(base);
            key_products.load(needs, keys, lane);
            if (!HAS_LARGE_HEADS) {
                hopper::wgmma_wait<0>();
                fence_out();
            }
            key_products.multiply(queries);
            key_products.continue_scores(queries, keys, lane);
            bool any_scales = !value_products.load(needs, value_fragments, {0, EARLY_BLOCKS}, values, warp, lane);
            key_products.finish_scores();
            fence_out();

            float (&scores)[SUMS] = key_products.scores;
            unsigned scales = values + KEYS * VALUE_PITCH;
            if (needs & KEYS_SCALED) softmax.scale_keys(scores, scales, warp, lane);
            if (UNLIKELY(key_tile < every_start || key_tile >= every_end))
                hide_invisible(scores, facts.rows, key_tile * KEYS + WARP_KEYS * warp, lane);
            unsigned probabilities = base + PROBABILITY_OFFSET + turn * PROBABILITY_BYTES;
            float sums[ROW_BLOCKS][2];
            bool exceeds = softmax.exponentiate(scores, scales, needs, probabilities, sums, warp, lane);
            hopper::fence_proxy_async();
            if (UNLIKELY(any_consumer(exceeds || any_scales))) {
                softmax.raise(scores, scales, needs, out, warp, lane);
                if (ValueSide::HAS_BLOCKS && any_consumer(any_scales)) {
                    value_products.add_any_scales(out, scores, softmax, values, probabilities, warp, lane);
                    // Nothing is left for the products below.
#pragma unroll
                    for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
                        for (int i = 0; i < VALUE_STEPS; i++)
#pragma unroll
                            for (int word = 0; word < 4; word++) value_fragments[block][i][word] = 0;
                }
                softmax.exponentiate(scores, scales, needs, probabilities, sums, warp, lane);
                hopper::fence_proxy_async();
                synchronize_consumers();
            }
            softmax.add(sums);
            SharedTile<ROWS> weights = {probabilities};
            fence_out();
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++) {
                if (block >= EARLY_BLOCKS)
                    value_products.load(needs, value_fragments, {block, block + 1}, values, warp, lane);
                if (block == 0 || block >= EARLY_BLOCKS) hopper::wgmma_fence();
#pragma unroll
                for (int i = 0; i < VALUE_STEPS; i++)
                    multiply_operands(out[block], value_fragments[block][i], weights.k_major(i), 1);
            }
            hopper::wgmma_commit();
            ring.release(base);
            turn ^= 1;
        }
        hopper::wgmma_wait<0>();
        fence_out();
    }

    // Stores the tile's rows, or their partial states.
    __device__ __forceinline__ void store_rows(const Piece &piece) {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float sum = softmax.row_sum[j][r];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (lane < 4) row_numbers().exchange[warp][8 * j + 2 * lane + r] = sum;
            }
        synchronize_consumers();
        if (threadIdx.x < ROWS) row_numbers().out[threadIdx.x] = finish_row(piece, threadIdx.x);
        synchronize_consumers();
        if (!piece.is_whole())
            store_outputs<ElementType::F32>(partial_of(piece), true);
        else if (piece.tile.seq.first_key)
            store_outputs<ElementType::F32>((float *)params.own_out.pointer, true);
        else if (params.out_f32)
            store_outputs<ElementType::F32>((float *)params.out.pointer, params.out_aligned);
        else
            store_outputs<ElementType(ELEMENT_TYPE)>((Bits *)params.out.pointer, params.out_aligned);
    }

    // The outputs of this thread's rows, where `finish_row` says. `aligned`: two at once.
    template <ElementType TYPE, class Out> __device__ __forceinline__ void store_outputs(Out *to, bool aligned) const {
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const RowOut &row = row_numbers().out[8 * j + 2 * (lane & 3) + r];
                float4 factors = *(const float4 *)row.factors;
                long long at = row.at;
#pragma unroll
                for (int block = 0; block < VALUE_BLOCKS; block++) {
                    float x[2]; // neighbouring dims, or two that are 8 apart
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        // Added to 0, so that -0 becomes 0, as `store_row` has it.
                        x[i] = fmaf(out[block][4 * j + 2 * i + r] * factors.x * factors.y * factors.z, factors.w, 0.0f);
                        if (TYPE != ElementType::F32) x[i] = bound_output(x[i]);
                    }
                    Out *first = to + at + Products::Values::dim_of(block, r, warp, lane),
                        *second = to + at + Products::Values::dim_of(block, 2 + r, warp, lane);
                    if (at < 0) continue;
                    if (!Products::Values::HAS_PAIRS || !aligned) {
                        store_element((unsigned long long)first, 0, TYPE, x[0]);
                        store_element((unsigned long long)second, 0, TYPE, x[1]);
                    } else if (TYPE == ElementType::F32) {
                        *(float2 *)first = make_float2(x[0], x[1]);
                    } else {
                        *(unsigned *)first = E::pack(x[0], x[1]);
                    }
                }
            }
    }

    // The partial state of a tile of which other CTAs have parts.
    __device__ __forceinline__ float *partial_of(const Piece &piece) const {
        return partial_state(params, blockIdx.x, piece.starts_here ? 0 : 1);
    }

    // Stores a row's state, or its LSE. Returns what is to be done with its output.
    __device__ __forceinline__ RowOut finish_row(const Piece &piece, int row) const {
        const Tile &tile = piece.tile;
        if (row >= tile.rows) return {{}, -1};
        Rows &numbers = row_numbers();
        LastReference last = last_reference(numbers.reference(row));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < CONSUMER_WARPS; i++) sum += numbers.exchange[i][row];
        State state = {last.reference, sum * last.step};
        RowOut done = {{last.step, numbers.out[row].factors[1], 1.0f, 1.0f}, 0};
        if (READS_CODES && numbers.needs & VALUES_SCALED) done.factors[1] = inverse_power(numbers.weight_powers[row]);
        int head, token;
        tile.find_row(params, row, head, token);
        if (!piece.is_whole()) {
            float *to = partial_of(piece);
            to[row] = state.max;
            to[TILE_ROWS + row] = state.sum;
            done.at = 2 * TILE_ROWS + row * VALUE_DIM;
        } else if (tile.seq.first_key) {
            // `merge_prefix` merges this state with those of the prefix.
            *(float2 *)((float *)params.own_states.pointer + row_offset(params.own_states.strides, tile, head, token)) =
                make_float2(state.max, state.sum);
            done.at = row_offset(params.own_out.strides, tile, head, token);
        } else {
            float unit = unit_of(params);
            FinalizedRow finalized =
                finalize_row(params, state, load_sink(params, head, unit), unit, params.lse.pointer != 0);
            done.factors[2] = finalized.factors.first, done.factors[3] = finalized.factors.second;
            done.at = out_offset(params, tile, head, token);
            if (params.lse.pointer) store_lse(params, tile, head, token, finalized.lse);
        }
        return done;
    }

    // Hands over a tile that is split over several CTAs: to `combine`, or to the last of the CTAs to arrive.
    __device__ __forceinline__ void finish_piece(const Piece &piece) const {
        if (params.stream_k.combines) {
            if (threadIdx.x == 0) count_part(params, piece.tile, piece.starts_here, piece.first_part, piece.last_part);
        } else if (!piece.is_whole()) {
            // Other CTAs have the rest of this tile. The last to arrive combines all parts.
            unsigned *counter = arrivals_of(params, piece.first_part, 0);
            if (threadIdx.x == 0)
                facts.is_last = count_arrival(counter) == (unsigned)(piece.last_part - piece.first_part);
            synchronize_consumers();
            if (!facts.is_last) return;
#pragma unroll 1
            for (int row = warp; row < piece.tile.rows; row += CONSUMER_WARPS)
                combine_row<STATES_PER_BATCH>(params, piece.tile, row, lane, piece.first_part, piece.last_part,
                                              element_out_type(params));
            if (threadIdx.x == 0) *counter = 0;
        }
    }

    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (bool rehearses = MAY_REHEARSE && row_numbers().rehearses;; rehearses = false) {
            rehearses = __shfl_sync(~0u, rehearses, 0);
            const Piece &piece = pieces.next(queues(), rehearses);
            if (!piece.more) break;
            begin_piece(piece.tile);
            run_tiles(piece);
            reread_lane();
            store_rows(piece);
            synchronize_consumers();
            if (rehearses) continue;
            finish_piece(piece);
            pieces.release(queues(), lane);
        }
    }
};

// Whether consumers rehearse: in a CTA with a long part of a tile. It takes longer than the wait for a short part.
static __device__ __forceinline__ bool rehearses(const AttentionParameters &params, const CtaRange &range) {
    constexpr int LONG_PART = 8; // K tiles
    return MAY_REHEARSE && params.stream_k.combines && range.end - range.begin >= LONG_PART;
}

// Finds the work range of this CTA: from the schedule of the step if there is one. The first loader does, which hands
// out pieces of it; the other warps help with much work.
static __device__ __forceinline__ void find_range(const AttentionParameters &params, Facts &facts, int warp) {
    CtaRange range;
    if (is_scheduled(params)) {
        if (threadIdx.x < 32) load_scheduled(params, facts.scheduled, threadIdx.x);
        __syncthreads();
        if (params.block_size) touch_pages(params, facts.scheduled, threadIdx.x);
        range = facts.scheduled.range;
    } else {
        if (!params.stream_k.work_total) {
            grid_dependency_wait();
            prefetch_lengths(params);
        }
        if (warp == CONSUMER_WARPS || !warps_find_range(params))
            range = find_cta_range(params, *(RangeScratch *)(dynamic_shared + RING_OFFSET));
    }
    if (threadIdx.x == CONSUMER_WARPS * 32) {
        facts.range = range;
        row_numbers().rehearses = rehearses(params, range);
    }
    __syncthreads();
}

static __device__ __forceinline__ unsigned needs_of(const AttentionParameters &params, const CacheParameters &cache) {
    unsigned needs = 0;
#if READS_CODES
    if (KeySide::IS_BYTES && varies(params, cache.key_scale_strides)) needs |= KEYS_SCALED;
    if (ValueSide::IS_BYTES && varies(params, cache.value_scale_strides)) needs |= VALUES_SCALED;
    if (cache.key_format == CacheFormat::I8) needs |= KEYS_I8;
    if (cache.value_format == CacheFormat::I8) needs |= VALUES_I8;
    if (cache.key_format == CacheFormat::E5M2) needs |= KEYS_E5M2;
    if (cache.value_format == CacheFormat::E5M2) needs |= VALUES_E5M2;
#endif
    return needs;
}

static __device__ __forceinline__ void init_queues() {
    for (int stage = 0; stage < RING_STAGES; stage++) {
        mbarrier_init(queues().full[stage], LOADER_THREADS);
        mbarrier_init(queues().empty[stage], CONSUMER_WARPS);
    }
    for (int i = 0; i < PIECES; i++) {
        mbarrier_init(queues().piece_full[i], 1);
        mbarrier_init(queues().piece_empty[i], THREADS / 32);
    }
    hopper::fence_mbarrier_init();
}

} // namespace decode_wgmma

extern "C" __global__ void __launch_bounds__(THREADS, decode_wgmma::CTAS_PER_SM)
#if READS_CODES
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ CacheParameters cache) {
#else
    decode(const __grid_constant__ AttentionParameters params) {
    const CacheParameters cache = {};
#endif
    using namespace decode_wgmma;
    Facts &facts = *(Facts *)(dynamic_shared + FACTS_OFFSET);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31);
    unsigned base = uniform(shared_address(dynamic_shared));
    if (threadIdx.x == 0) {
        init_queues();
        row_numbers().needs = needs_of(params, cache);
    } else if (threadIdx.x == 32) {
        init_rehearsal(queues().pieces[PIECES]);
    }
    touch_parameters(params);
    find_range(params, facts, warp);
    if (warp >= CONSUMER_WARPS) {
        if (SHARES_REGISTERS) hopper::setmaxnreg_dec<LOADER_REGISTERS>();
        Loader loader = {params, cache, warp - CONSUMER_WARPS, lane};
        loader.run(facts.range, facts.scheduled);
        // A CTA without work ends after the preceding kernel too: a kernel that waits for this one waits for both.
        if (is_scheduled(params)) grid_dependency_wait();
    } else {
        if (SHARES_REGISTERS) hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer = {params, cache, facts, base, warp, lane, (unsigned)uniform(row_numbers().needs)};
        constexpr unsigned I8_PER_TOKEN = KEYS_SCALED | VALUES_SCALED | KEYS_I8 | VALUES_I8;
        if (!KeySide::IS_BYTES || consumer.needs == 0)
            consumer.needs = 0, consumer.run();
        else if (consumer.needs == I8_PER_TOKEN)
            consumer.needs = I8_PER_TOKEN, consumer.run();
        else
            consumer.run();
    }
}

// The schedule of a step: the range that each CTA of `decode`, of the same grid, would compute by itself.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    schedule_ctas(const __grid_constant__ AttentionParameters params) {
    write_schedule(params);
}

// Combines the parts of tiles that `decode` split over several CTAs. The grid is all possible tiles by groups of rows.
// Each row of a CTA has some warps, which divide its parts.
extern "C" __global__ void __launch_bounds__(decode_wgmma::COMBINE_WARPS * 32)
    combine(const __grid_constant__ AttentionParameters params) {
    using namespace decode_wgmma;
    launch_dependents();
    float (*states)[OUT_PITCH] = (float (*)[OUT_PITCH])dynamic_shared; // of warps
    int rows = TILE_ROWS / gridDim.y, warps = COMBINE_WARPS / rows, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    SplitTile split = find_tile(params, blockIdx.x, blockIdx.y * rows);
    await_parts(params, split, *(unsigned *)&states[COMBINE_WARPS]);
    int row = blockIdx.y * rows + warp / warps, first = warp % warps;
    float unit = unit_of(params);
    bool present = row < split.rows && split.is_split();
    PartialStates slot = {partial_state(params, split.parts.first, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    RowState state = empty_row();
    if (present)
        combine_states<2 * STATES_PER_BATCH>(
            unit, state, (split.parts.last - split.parts.first + warps - first) / warps, lane,
            [&](int k) {
                const float *from = slot(first + k * warps);
                return State{__ldcg(from + row), __ldcg(from + TILE_ROWS + row)};
            },
            [&](int k, int column) {
                return __ldcg((const float4 *)(slot(first + k * warps) + 2 * TILE_ROWS + row * VALUE_DIM + column));
            });
    if (warps > 1) {
        if (lane == 0) *(float2 *)&states[warp][VALUE_DIM] = make_float2(state.state.max, state.state.sum);
#pragma unroll
        for (int i = 0; i < FLOAT4S_PER_LANE; i++)
            if (has_column(lane, i)) *(float4 *)&states[warp][column_of(lane, i)] = state.out[i];
        __syncthreads();
        present &= first == 0;
        state = empty_row();
        if (present)
            combine_states<COMBINE_WARPS>(
                unit, state, warps, lane,
                [&](int k) { return State{states[warp + k][VALUE_DIM], states[warp + k][VALUE_DIM + 1]}; },
                [&](int k, int column) { return *(const float4 *)&states[warp + k][column]; });
    }
    if (present) store_row(params, split.tile, row, lane, state, element_out_type(params));
    end_combine(split);
}
