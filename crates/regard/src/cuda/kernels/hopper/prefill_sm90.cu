// Prefill attention on Hopper: many query rows, bound by the tensor cores.
//
// A persistent, warp-specialized kernel. A CTA has CONSUMERS consumer warpgroups of 64 query rows each, and one
// producer warpgroup: a scheduler warp (tile_scheduler.cuh) and three TMA producer warps for keys, values and queries.
// Keys and values each have a TMA pipeline of STAGES stages, loaded from a tile's last K tile to its first, so that the
// causal boundary comes first; but see find_tile_range.
//
// Within a warpgroup, Q K^T of the next K tile and P V of the previous one overlap the softmax. Across warpgroups, the
// warp scheduler barriers give ping-pong scheduling: one warpgroup's exponentials run while the other's wgmmas do.
//
// Files: prefill_sm90_shape.cuh has the shapes and shared memory, prefill_sm90_loader.cuh the producer warps,
// prefill_softmax.cuh what happens to scores, skeleton.cuh the scheduler warp and the consumers' mainloop. Caches in
// another type than the queries': code_converter.cuh and stored_converter.cuh. Keys with a scale each: key_scales.cuh.
// Keys that are sums of elements: KEY_TERMS of prefill_sm90_shape.cuh.
//
// If there are few tiles, their keys are split among CTAs, which leave partial states (combine_splits.cu).
//
// The specialized kernel (FALLBACK = 0) takes unmodified scores and rows of exact dims. Outputs have the inputs' type,
// or are f32. The scale is positive, because maxima are taken before it is applied.
#include "hopper/prefill_sm90_loader.cuh"
#include "hopper/prefill_softmax.cuh"
#include "hopper/stored_converter.cuh"
#include "hopper/wgmma.cuh"

// A consumer warpgroup.
struct Consumer : SoftmaxWarpgroup {
    __device__ __forceinline__ void warpgroup_sync() const {
        hopper::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
    }
    __device__ __forceinline__ void warp_scheduler_barrier_sync() const {
        hopper::named_barrier_sync(WARP_SCHEDULER_BARRIER + warpgroup, 256);
    }
    __device__ __forceinline__ void warp_scheduler_barrier_arrive() const {
        hopper::named_barrier_arrive(WARP_SCHEDULER_BARRIER + (warpgroup + 1 == CONSUMERS ? 0 : warpgroup + 1), 256);
    }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&barrier));
    }
    // Waits for the next tile; false if there is none.
    __device__ __forceinline__ bool next_tile(TileView &view) {
        if (!tiles.next(shared.queue, view, 64 * warpgroup)) return false;
        const PrefillTile &tile = current_tile();
        for (int r = 0; r < 2; r++) view.row_valid[r] = row() + 8 * r < tile.tokens;
        kept_scale = tile.scale;
        if (FALLBACK && features() & SLOPES) view.slope = load_slope(params, tile.head) * logit_unit(params);
        return true;
    }

    __device__ __forceinline__ void mma_qk() {
        SharedTile<64> queries = {base + QUERY_OFFSET + (query.index * CONSUMERS + warpgroup) * QUERY_BYTES};
        float (&sum)[KEYS / 2] = *(float (*)[KEYS / 2]) & scores;
        warpgroup_fence_operand(sum);
        hopper::wgmma_fence();
#pragma unroll
        for (int term = 0; term < KEY_TERMS; term++) {
            SharedTile<KEYS> keys = {base + KEY_OFFSET + key.index * KEY_BYTES + term * KEY_TERM_BYTES};
#pragma unroll
            for (int step = 0; step < KEY_STEPS; step++)
                Wgmma<KEYS>::mma_ss(sum, queries.k_major(step), keys.k_major(step), term > 0 || step > 0);
        }
        hopper::wgmma_commit();
    }

    // Q K^T over a block of head dims.
    __device__ __forceinline__ void mma_block(float (&sum)[KEYS / 2], int block) {
        SharedTile<64> queries = {base + QUERY_OFFSET + (query.index * CONSUMERS + warpgroup) * QUERY_BYTES};
        SharedTile<KEYS> keys = {base + KEY_OFFSET + key.index * KEY_BYTES};
        warpgroup_fence_operand(sum);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
            int at = block * (BLOCK / 16) + step;
            Wgmma<KEYS>::mma_ss(sum, queries.k_major(at), keys.k_major(at), step > 0);
        }
        hopper::wgmma_commit();
    }

    // Adds the sums of a block of head dims to scores, times the scale that each key has there.
    __device__ __forceinline__ void add_block(const float (&sum)[KEYS / 2], int block) {
        const float *scales = (const float *)(dynamic_shared + SCALES_OFFSET) + (key.index * BLOCKS + block) * KEYS;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) {
            const float4 &four = *(const float4 *)(scales + scale_place(j / 2 * 16 + 2 * (lane % 4)));
            float pair[2] = {j % 2 ? four.z : four.x, j % 2 ? four.w : four.y};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float product = sum[4 * j + e] * pair[e % 2];
                scores[j][e] = block == 0 ? product : scores[j][e] + product;
            }
        }
    }

    // Adds up Q K^T of a K tile block by block of head dims, because keys have a scale for each: two products are under
    // way at a time.
    __device__ __forceinline__ void mma_blocks() {
        static_assert(BLOCKS >= 2, "two are begun at once");
        float sums[2][KEYS / 2];
        mma_block(sums[0], 0);
        mma_block(sums[1], 1);
        warp_scheduler_barrier_arrive();
        add_blocks<0>(sums);
    }

    template <int FIRST> __device__ __forceinline__ void add_blocks(float (&sums)[2][KEYS / 2]) {
        if constexpr (FIRST < BLOCKS) {
            float (&sum)[KEYS / 2] = sums[FIRST % 2];
            hopper::wgmma_wait<FIRST + 1 < BLOCKS>();
            warpgroup_fence_operand(sum);
            add_block(sum, FIRST);
            if constexpr (FIRST + 2 < BLOCKS) mma_block(sum, FIRST + 2);
            add_blocks<FIRST + 1>(sums);
        }
    }

    template <int DIM> __device__ __forceinline__ void mma_pv_step(SharedTile<KEYS> values, int step) {
        if constexpr (CONVERTERS && DIM > 128) {
            // ptxas wants the operands of an instruction to fit into the registers that 512 threads start with.
            constexpr int HALF = DIM / 2;
            SharedTile<KEYS> upper = {values.address + HALF / 64 * KEYS * 128};
            Wgmma<HALF>::mma_rs(*(float (*)[HALF / 2]) & out[0], probs[step], values.mn_major(step));
            Wgmma<HALF>::mma_rs(*(float (*)[HALF / 2]) & out[HALF / 2], probs[step], upper.mn_major(step));
        } else {
            Wgmma<DIM>::mma_rs(out, probs[step], values.mn_major(step));
        }
    }

    __device__ __forceinline__ void mma_pv() {
        SharedTile<KEYS> values = {base + VALUE_OFFSET + value.index * VALUE_BYTES};
        warpgroup_fence_operand(out);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) mma_pv_step<VALUE_DIM>(values, step);
        hopper::wgmma_commit();
    }

    // P V of a K tile, when its values are there.
    __device__ __forceinline__ void begin_values(int first_key) {
        hopper::mbarrier_wait(shared_address(&shared.value_full[value.index]), value.phase);
        zero_invisible_values(first_key, current_tile());
        mma_pv();
    }

    template <int PENDING> __device__ __forceinline__ void wait_dot_products() {
        hopper::wgmma_wait<PENDING>();
        warpgroup_fence_operand(*(float (*)[KEYS / 2]) & scores);
    }

    template <int PENDING> __device__ __forceinline__ void wait_scores() {
        if constexpr (!SCALES_KEYS || SCALES_AFTER_VALUES) {
            wait_dot_products<PENDING>();
        } else if constexpr (LOADS_SCALES_EARLY) {
            LoadedKeyScales scales(key.index, lane);
            wait_dot_products<PENDING>();
            scales.multiply(scores);
        } else {
            wait_dot_products<PENDING>();
            LoadedKeyScales(key.index, lane).multiply(scores);
        }
    }

    // P V of the previous K tile is done: release its stage.
    __device__ __forceinline__ void release_values() {
        release(shared.value_empty[value.index]);
        value.advance();
    }

    // Waits for P V of the previous K tile.
    __device__ __forceinline__ void wait_values(bool first) {
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        if (!first) release_values();
    }

    __device__ __forceinline__ void release_key_stage() {
        __syncwarp(); // all lanes have read the stage flags, and scales
        release(shared.key_empty[key.index]);
        key.advance();
    }

    // Q K^T of a K tile is done: release its stage, unless its scales are still to be read.
    __device__ __forceinline__ void release_keys() {
        if constexpr (!SCALES_AFTER_VALUES) release_key_stage();
    }

    // P V of the previous K tile is waited for between the score modifications and the exponentials. (ptxas moves the
    // wait before the exponentials from any place in this source; after them measured slower.)
    __device__ __forceinline__ void softmax_step(const TileView &view, int flags, bool first) {
        if constexpr (SCALES_AFTER_VALUES) {
            wait_values(first);
            LoadedKeyScales(key.index, lane).multiply(scores);
            release_key_stage();
        }
        ScoreTerms terms = modify_scores(view, flags, first);
        if constexpr (!SCALES_AFTER_VALUES) wait_values(first);
        exponentiate_and_sum(view, terms, first);
    }

    __device__ __forceinline__ void zero_invisible_values(int first_key, const PrefillTile &tile) const {
        if constexpr (IS_STORED) return; // the converter makes them zeros
        ::zero_invisible_values<KEYS>(tile, first_key, base + VALUE_OFFSET + value.index * VALUE_BYTES,
                                      KEYS * VALUE_CHUNKS * 128, WARPGROUP_BARRIER + warpgroup);
    }

    // Prologue of a tile: clears the state, and computes the scores of the first K tile.
    __device__ __forceinline__ int begin_tile() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = MIN_FLOAT;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] = 0.0f;
        hopper::mbarrier_wait(shared_address(&shared.query_full[query.index][warpgroup]), query.phase);
        hopper::mbarrier_wait(shared_address(&shared.key_full[key.index]), key.phase);
        int flags = shared.stage_flags[key.index];
        warp_scheduler_barrier_sync();
        if constexpr (IS_STORED) {
            mma_blocks();
        } else {
            mma_qk();
            warp_scheduler_barrier_arrive();
            wait_scores<0>();
        }
        return flags;
    }

    // P V of the last K tile, and the epilogue.
    __device__ __forceinline__ void finish_tile(int first_key) {
        release(shared.query_empty[query.index][warpgroup]);
        query.advance();
        begin_values(first_key);
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        release_values();
        epilogue(current_tile());
    }

    // Q K^T of the next K tile, whose stage flags are returned, and P V of this one.
    __device__ __forceinline__ int next_key_tile(int first_key) {
        hopper::mbarrier_wait(shared_address(&shared.key_full[key.index]), key.phase);
        int flags = shared.stage_flags[key.index];
        warp_scheduler_barrier_sync();
        if constexpr (IS_STORED) {
            // In this order scores and probabilities are never in registers together.
            begin_values(first_key);
            mma_blocks();
        } else {
            mma_qk();
            begin_values(first_key);
            warp_scheduler_barrier_arrive();
            wait_scores<1>();
        }
        return flags;
    }

    __device__ __forceinline__ void run() {
        // Through a shuffle, so that the compiler does not recompute it for every K tile.
        kept_features = KEEPS_FEATURES ? __shfl_sync(~0u, score_features(params, prefill), 0) : 0;
        if (warpgroup == CONSUMERS - 1) hopper::named_barrier_arrive(WARP_SCHEDULER_BARRIER, 256);
        TileView view;
        if (!next_tile(view)) return;
        consumer_mainloop(*this, view);
        if (OUT_STAGED && warp == 0 && lane == 0) hopper::tma_store_wait();
    }

    // Epilogue: adds the sink, normalizes, and writes output and LSE.
    __device__ __forceinline__ void epilogue(const PrefillTile &facts) {
        if (prefill.splits.count > 1) return store_partial(facts);
        const PrefillTile tile = facts;
        State states[2] = {{row_max[0], quad_sum(row_sum[0])}, {row_max[1], quad_sum(row_sum[1])}};
        finalize_rows(params, tile, {row(), lane % 4 == 0}, states, out);
        if (params.out_f32) return store_f32(tile);
        unsigned packed[VALUE_DIM / 4];
        pack_outputs(out, packed);
        // TMA clips rows past the tensor's end, but not past a sequence's end inside a ragged batch, and it writes 16
        // bytes at a time, which may cross a fallback kernel's row end.
        bool whole =
            (64 * warpgroup + 64 <= tile.tokens || !params.cu_seqlens_q) && (!FALLBACK || params.value_dim % 8 == 0);
        if (OUT_STAGED) {
            store_through_shared(tile, whole, packed);
        } else {
            store_rows(params, tile, row(), 0, packed, lane);
        }
    }

    // This thread among those of the consumers. Read anew, so that nothing that depends on it takes a register of the
    // main loop.
    static __device__ __forceinline__ int own_thread() { return opaque((int)threadIdx.x) - 128 * (1 + CONVERTERS); }

    // Stores the upper (0) or the lower (1) of this thread's rows as it is. `quad_lane`: of this thread.
    template <int ROW> __device__ __forceinline__ void store_row(float *to, int quad_lane) const {
        to += 2 * quad_lane;
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 8; j++)
            if (!FALLBACK || 8 * j + 2 * quad_lane < params.value_dim)
                *(float2 *)(to + 8 * j) = make_float2(out[4 * j + 2 * ROW], out[4 * j + 2 * ROW + 1]);
    }

    // The epilogue's store of f32 outputs.
    template <int ROW = 0> __device__ __forceinline__ void store_f32(const PrefillTile &tile) const {
        int thread = own_thread(), own = thread / 32 * 16 + thread % 32 / 4 + 8 * ROW;
        if (own < tile.tokens)
            store_row<ROW>((float *)params.out.pointer + out_offset(params, tile, tile.head, tile.first_token + own),
                           thread % 4);
        if constexpr (ROW == 0) store_f32<1>(tile);
    }

    // The epilogue over a split of the keys.
    template <int ROW = 0> __device__ __forceinline__ void store_partial(const PrefillTile &tile) const {
        int thread = own_thread(), own = thread / 32 * 16 + thread % 32 / 4 + 8 * ROW;
        float sum = quad_sum(row_sum[ROW]);
        if (own < tile.tokens) {
            if (thread % 4 == 0) *partial_state(prefill.splits, tile, own) = make_float2(row_max[ROW], sum);
            store_row<ROW>(partial_outputs(prefill.splits, tile, own), thread % 4);
        }
        if constexpr (ROW == 0) store_partial<1>(tile);
    }

    // The epilogue's store through shared memory: stmatrix, then TMA. Pairs 2 j and 2 j + 1 of outputs are columns
    // 8 j + 2 * (lane % 4) of the thread's upper and lower row.
    __device__ __forceinline__ void store_through_shared(const PrefillTile &tile, bool whole,
                                                         const unsigned (&packed)[VALUE_DIM / 4]) const {
        SharedTile<64> to = {base + OUT_OFFSET + warpgroup * OUT_BYTES};
        // Wait until the previous tile's store has read the buffer.
        if (warp == 0 && lane == 0) hopper::tma_store_wait();
        warpgroup_sync();
        int to_row = 16 * warp + lane % 16;
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++) {
            unsigned at = to.chunk(to_row, 2 * j + lane / 16);
            hopper::stmatrix_x4(at, packed[4 * j], packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
        }
        if (whole) hopper::fence_proxy_async();
        warpgroup_sync();
        if (!whole) {
            // Row by row, up to the last of the sequence.
            int rows = min(64, tile.tokens - 64 * warpgroup);
#pragma unroll 1
            for (int i = threadIdx.x % 128; i < rows * (VALUE_DIM / 8); i += 128) {
                int row = i / (VALUE_DIM / 8), chunk = i % (VALUE_DIM / 8);
                store_8(params, tile, 64 * warpgroup + row, 8 * chunk, ld_shared_v4(to.chunk(row, chunk)));
            }
        } else if (warp == 0 && lane == 0) {
#pragma unroll 1
            for (int c = 0; c < VALUE_CHUNKS; c++)
                hopper::tma_store(maps.out, to.chunk(0, 8 * c),
                                  {c * 64, tile.head, tile.seq.q_start + tile.first_token + 64 * warpgroup,
                                   params.cu_seqlens_q ? 0 : tile.sequence});
            hopper::tma_store_commit();
        }
    }
};

// By one thread. Arrivals: one per warp, or one with the bytes that TMA brings.
static __device__ __forceinline__ void init_mbarriers(Shared &shared) {
    for (int i = 0; i < QUERY_STAGES; i++)
        for (int w = 0; w < CONSUMERS; w++) {
            mbarrier_init(shared.query_full[i][w], 1);
            mbarrier_init(shared.query_empty[i][w], 4);
        }
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(shared.key_full[i], CONVERTERS ? 4 : 1);
        mbarrier_init(shared.key_empty[i], 4 * CONSUMERS);
        mbarrier_init(shared.value_full[i], CONVERTERS ? 4 : 1);
        mbarrier_init(shared.value_empty[i], 4 * CONSUMERS);
    }
    if constexpr (HAS_CODES) {
        shared.key_codes.init();
        shared.value_codes.init();
    }
    if constexpr (IS_STORED) shared.stored.init();
    shared.queue.init(4 * (CONSUMERS + HAS_CODES) + 3);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill,
            const __grid_constant__ TensorMaps maps
#if CACHE
            ,
            const __grid_constant__ CacheParameters cache
#endif
    ) {
    Shared &shared = *(Shared *)dynamic_shared;
    if (threadIdx.x == 0) {
        init_mbarriers(shared);
        hopper::fence_mbarrier_init();
        hopper::prefetch_tensor_map(maps.query);
        if (!IS_STORED || prefill.box_keys > 0) {
            hopper::prefetch_tensor_map(maps.key);
            hopper::prefetch_tensor_map(maps.value);
        }
        if (!params.out_f32 && prefill.splits.count == 1) hopper::prefetch_tensor_map(maps.out);
    }
    grid_dependency_wait();
    __syncthreads();
    // Producers need few registers; consumers get the rest.
    if (threadIdx.x < 128) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned base = shared_address(dynamic_shared);
        if (warp == 0) {
#if CACHE == 4 // Any
            StoredProducer<true>{params, prefill, cache, maps.key, shared, base, lane}.run();
#else
            Producer<true>{params, prefill, maps.key, shared, base, lane}.run();
#endif
        } else if (warp == 1) {
#if CACHE == 4
            StoredProducer<false>{params, prefill, cache, maps.value, shared, base, lane}.run();
#else
            Producer<false>{params, prefill, maps.value, shared, base, lane}.run();
#endif
        } else if (warp == 2) {
            fetch_queries(params, maps.query, shared, base, lane);
        } else {
            Scheduler scheduler = {params, prefill, shared.queue, lane, true};
            scheduler.run(blockIdx.x, [&] { return __shfl_sync(~0u, lane == 0 ? claim_tile(prefill) : 0, 0); });
            if (lane == 0) finish_tile_scheduler(prefill);
        }
#if CACHE
    } else if (threadIdx.x < 256) {
        hopper::setmaxnreg_dec<CONVERTER_REGISTERS>();
        int thread = (int)threadIdx.x - 128;
#if CACHE == 4
        StoredConverter{params, cache, shared, shared_address(dynamic_shared), thread}.run(prefill.box_keys > 0);
#else
        Converter{cache, shared, shared_address(dynamic_shared), thread}.run();
#endif
#endif
    } else {
        hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Consumer consumer = {{params, prefill, maps, shared, shared_address(dynamic_shared), warp / 4 - 1 - CONVERTERS,
                              warp % 4, (int)threadIdx.x % 32}};
        consumer.run();
    }
}
