// Prefill attention on Hopper for large head dims: bound by shared memory and the tensor cores.
//
// A persistent, warp-specialized kernel: a TMA producer warp, a scheduler warp, and two consumer warpgroups.
//
// The accumulators of 64 rows by 512 value dims fill half of an SM's registers, so a CTA has 64 rows, shared by two
// consumer warpgroups: they split the keys of a K tile in Q K^T, and the value dims in P V. Probabilities are exchanged
// through shared memory.
//
// 64 rows per CTA need more L2 bandwidth than there is. A cluster of two CTAs therefore shares a tile of 128 rows: both
// step through the same K tiles, and each loads half of every chunk for both by TMA multicast. A pipeline stage is free
// when the consumers of both CTAs have released it.
//
// Within a warpgroup, Q K^T of the next K tile is issued before P V of the previous one, and the softmax overlaps the
// latter.
#include "hopper/skeleton.cuh"
#include "hopper/wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES,
// CLUSTER_SIZE (rows of `prefill_sm90_wide` in cuda/registry/tables.rs).
//
// The specialized kernel (FALLBACK = 0) takes unmodified scores and rows of exact dims. Outputs have the inputs' type.
//
// KEY_TERMS: how many elements are added up for one of a key (widen.cu); heads of the key tensor are that many times
// those of the cache.
#ifndef KEY_TERMS
#define KEY_TERMS 1
#endif
constexpr unsigned CTAS_PER_TILE = CLUSTER_SIZE;
constexpr unsigned short ALL_CTAS = (1 << CTAS_PER_TILE) - 1; // bits of a TMA multicast
constexpr int CONSUMERS = 2;                                  // consumer warpgroups
constexpr int ROWS = TILE_ROWS / (int)CTAS_PER_TILE, KEYS = TILE_KEYS, KEYS_PER_WARPGROUP = KEYS / CONSUMERS,
              DIMS_PER_WARPGROUP = 256;
// A pipeline stage holds a 16 KB chunk: 64 dims of all keys of a K tile, or VALUE_KEYS keys of a warpgroup's value
// dims.
constexpr int CHUNK_BYTES = 16384, VALUE_KEYS = 32;
constexpr int PART_CHUNKS = 4; // chunks of keys whose products the fallback lets tensor cores sum up
constexpr int MAX_KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_STEPS = KEYS / VALUE_KEYS;
constexpr int SUBTILE_BYTES = 64 * 128; // 64 rows of 64 elements
constexpr int QUERY_BYTES = MAX_KEY_CHUNKS * SUBTILE_BYTES, PROB_BYTES = CONSUMERS * SUBTILE_BYTES;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
typedef Element<ElementType(ELEMENT_TYPE)> E;

constexpr int MAXIMA_OFFSET = 1024, QUERY_OFFSET = 2048, PROBS_OFFSET = QUERY_OFFSET + QUERY_BYTES,
              STAGES_OFFSET = PROBS_OFFSET + 2 * PROB_BYTES;
constexpr int STAGES = (hopper::MAX_SHARED_BYTES - STAGES_OFFSET) / CHUNK_BYTES;
static_assert(ROWS == 64 && KEYS_PER_WARPGROUP == 64 && VALUE_DIM == CONSUMERS * DIMS_PER_WARPGROUP &&
                  THREADS == 128 * (CONSUMERS + 1),
              "the only shape that this kernel has");
static_assert(STAGES_OFFSET + STAGES * CHUNK_BYTES == SHARED_BYTES, "as the host has it");
static_assert(STAGES >= 7, "the values of three steps, and a chunk of keys behind them");

struct Shared {
    unsigned long long query_full, query_empty;
    unsigned long long full[STAGES], empty[STAGES];
    TileQueue queue;
    unsigned long long number_full, number_empty; // the latter in the first CTA only
    unsigned number;                              // the cluster's next tile
    int stage_flags[STAGES];                      // in the stage of a K tile's first chunk
};
static_assert(sizeof(Shared) <= MAXIMA_OFFSET, "it overlaps what follows");

// The values that the two consumer warpgroups exchange per row.
struct Exchange {
    float maxima[CONSUMERS][ROWS], sums[CONSUMERS][ROWS];
};
static_assert(sizeof(Exchange) <= QUERY_OFFSET - MAXIMA_OFFSET, "it overlaps what follows");

// Named barriers.
constexpr int CONSUMERS_BARRIER = 1, WARPGROUP_BARRIER = CONSUMERS_BARRIER + 1;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Chunks of a K tile's keys, of one of their terms. Padding is not loaded, except that there are always two chunks.
static __device__ __forceinline__ int key_chunks(const AttentionParameters &params) {
    return FALLBACK ? max((params.head_dim + 63) / 64, 2) : MAX_KEY_CHUNKS;
}

// The term that chunk c of all terms belongs to.
static __device__ __forceinline__ int term_of(int c, int chunks) {
    return (KEY_TERMS > 1 && c >= chunks) + (KEY_TERMS > 2 && c >= 2 * chunks);
}
static_assert(KEY_TERMS <= 3, "as term_of counts");

// The next tile number, the same in both CTAs of a cluster: the first CTA claims it and sends it to both.
static __device__ __forceinline__ unsigned next_number(const PrefillParameters &prefill, Shared &shared, unsigned rank,
                                                       int lane, unsigned &phase) {
    if (rank == 0 && lane == 0) {
        hopper::mbarrier_wait(shared_address(&shared.number_empty), phase ^ 1);
        unsigned taken = claim_tile(prefill, gridDim.x / CTAS_PER_TILE);
#pragma unroll
        for (unsigned cta = 0; cta < CTAS_PER_TILE; cta++)
            hopper::st_async_remote(shared_address(&shared.number), taken, shared_address(&shared.number_full), cta);
    }
    __syncwarp();
    hopper::mbarrier_wait_cluster(shared_address(&shared.number_full), phase);
    phase ^= 1;
    unsigned number = __shfl_sync(~0u, *(volatile unsigned *)&shared.number, 0);
    if (lane == 0) hopper::mbarrier_arrive_remote(shared_address(&shared.number_empty), 0);
    return number;
}

// The slice of a K tile's values that a warpgroup multiplies in this step: its own keys come first.
static __device__ __forceinline__ int value_slice_of(int step, int group) { return step ^ group * (VALUE_STEPS / 2); }

// The TMA boxes of a K tile, one per lane: their places, and which lanes have a box with visible keys. The others are
// skipped: their page-table entries may be invalid.
struct TmaBoxes {
    KeyPlace place; // with paged KV, `batch` is a page-table entry, clamped late because its load is slow
    unsigned seen;
};

// The TMA producer warp.
struct Producer {
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const TensorMaps &maps;
    Shared &shared;
    unsigned base; // of shared memory
    unsigned rank; // of this CTA in its cluster
    int lane;
    int box_shift; // log2 of the keys per box

    PipelineState<STAGES> stage;

    __device__ __forceinline__ TmaBoxes find_boxes(const PrefillTile &tile, int first_key) const {
        int key = first_key + (lane << box_shift);
        bool seen = lane < KEYS >> box_shift && key + (1 << box_shift) > tile.seq_start && key < tile.seq_end;
        TmaBoxes boxes = {contiguous_place(params, tile, key), __ballot_sync(~0u, seen)};
        if (params.block_size && seen) find_paged_place(params, tile, key, boxes.place);
        return boxes;
    }

    // The lanes among these whose boxes start at keys `first` to `end` of the K tile.
    __device__ __forceinline__ unsigned between(unsigned lanes, int first, int end) const {
        return lanes & ((1u << (end >> box_shift)) - 1) & ~((1u << (first >> box_shift)) - 1);
    }

    // Waits until the next pipeline stage is free.
    __device__ __forceinline__ void wait_stage() const {
        hopper::mbarrier_wait(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
    }

    // Makes the stage's mbarrier wait for `boxes` boxes, from both CTAs.
    __device__ __forceinline__ unsigned expect(int boxes) const {
        unsigned barrier = shared_address(&shared.full[stage.index]);
        if (lane == 0) hopper::mbarrier_arrive_expect_tx(barrier, boxes * 128 << box_shift);
        return barrier;
    }

    // The batch index of this lane's box: its page, or its sequence.
    __device__ __forceinline__ int batch_of(const TmaBoxes &boxes) const {
        return params.block_size ? page_of(params, boxes.place.batch) : boxes.place.batch;
    }

    // This CTA loads half of the keys, for both CTAs.
    __device__ __forceinline__ void fetch_keys(const PrefillTile &tile, const TmaBoxes &boxes, int stage_flags) {
        bool loads = between(boxes.seen, (int)rank * (KEYS / 2), (int)(rank + 1) * (KEYS / 2)) >> lane & 1;
        int batch = batch_of(boxes), chunks = key_chunks(params);
#pragma unroll 1
        for (int c = 0; c < KEY_TERMS * chunks; c++) {
            wait_stage();
            if (lane == 0 && c == 0) shared.stage_flags[stage.index] = stage_flags;
            unsigned barrier = expect(__popc(boxes.seen));
            int term = term_of(c, chunks);
            if (loads)
                hopper::tma_load_multicast(
                    ALL_CTAS, base + STAGES_OFFSET + stage.index * CHUNK_BYTES + (lane * 128 << box_shift), maps.key,
                    barrier, {(c - term * chunks) * 64, KEY_TERMS * tile.kv_head + term, boxes.place.token, batch});
            stage.advance();
        }
    }

    // This CTA loads half of the dims of both warpgroups, each of which gets the values of its own keys first.
    __device__ __forceinline__ void fetch_values(const PrefillTile &tile, const TmaBoxes &boxes) {
        int batch = batch_of(boxes);
#pragma unroll 1
        for (int step = 0; step < VALUE_STEPS; step++) {
#pragma unroll 1
            for (int group = 0; group < CONSUMERS; group++) {
                int first = VALUE_KEYS * value_slice_of(step, group);
                unsigned seen = between(boxes.seen, first, first + VALUE_KEYS);
                bool loads = seen >> lane & 1;
                wait_stage();
                unsigned barrier = expect(__popc(seen) * (DIMS_PER_WARPGROUP / 64));
                unsigned to = base + STAGES_OFFSET + stage.index * CHUNK_BYTES + ((lane << box_shift) - first) * 128;
#pragma unroll
                for (int i = 0; i < DIMS_PER_WARPGROUP / 128; i++) {
                    int dims = (int)rank * (DIMS_PER_WARPGROUP / 128) + i;
                    if (loads)
                        hopper::tma_load_multicast(
                            ALL_CTAS, to + dims * VALUE_KEYS * 128, maps.value, barrier,
                            {group * DIMS_PER_WARPGROUP + dims * 64, tile.kv_head, boxes.place.token, batch});
                }
                stage.advance();
            }
        }
    }

    __device__ __forceinline__ void fetch_queries(const PrefillTile &tile) const {
        if (lane != 0) return;
        unsigned barrier = shared_address(&shared.query_full);
        int chunks = key_chunks(params);
        hopper::mbarrier_arrive_expect_tx(barrier, chunks * SUBTILE_BYTES);
#pragma unroll 1
        for (int c = 0; c < chunks; c++)
            hopper::tma_load(base + QUERY_OFFSET + c * SUBTILE_BYTES, maps.query, barrier,
                             {c * 64, tile.head, tile.seq.q_start + tile.first_token + ROWS * (int)rank,
                              params.cu_seqlens_q ? 0 : tile.sequence});
    }

    __device__ __forceinline__ void run() {
        unsigned query_phase = 0;
        for_each_tile(shared.queue, lane, [&](const TileDescriptor &descriptor) {
            const PrefillTile &tile = descriptor.tile;
            hopper::mbarrier_wait(shared_address(&shared.query_empty), query_phase ^ 1);
            fetch_queries(tile);
            query_phase ^= 1;
            KeyTileOrder order(prefill, descriptor);
            // Values are loaded one K tile behind the keys, in the order of use.
            bool has_previous = false;
            TmaBoxes previous = {}, following = find_boxes(tile, order.current * KEYS);
#pragma unroll 1
            for (;;) {
                TmaBoxes current = following;
                order.following = order.first - 1;
                bool is_done = order.is_done();
                if (!is_done) {
                    order.find_following(lane);
                    if (!order.is_last()) {
                        following = find_boxes(tile, order.following * KEYS);
                    } else if (lane == 0) {
                        shared.queue.request();
                    }
                    fetch_keys(tile, current, order.stage_flags());
                }
                if (has_previous) fetch_values(tile, previous);
                if (is_done) break;
                has_previous = true;
                previous = current;
                order.current = order.following;
            }
        });
    }
};

// A consumer warpgroup.
struct Consumer {
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    Shared &shared;
    Exchange &exchange;
    unsigned base;
    int first_row;             // of this CTA within the tile
    int warpgroup, warp, lane; // index of the warpgroup, and of the warp in it

    TileReader tiles;
    PipelineState<STAGES> stage, unreleased; // the next stage to use, and the first that is not released
    unsigned query_phase = 0;
    int probs = 0; // which of the two probability buffers is next
    float scores[KEYS_PER_WARPGROUP / 8][4];
    float out[DIMS_PER_WARPGROUP / 2];
    unsigned own[KEYS_PER_WARPGROUP / 16][4]; // probabilities of this warpgroup's keys
    float factor[2];                          // by which the accumulators must be rescaled: see softmax_step
    float row_max[2], row_sum[2];             // lazy rescale: the maximum may be stale by RESCALE_THRESHOLD

    struct TileView : VisibleRange {
        float slope;
    };

    __device__ __forceinline__ void consumers_sync() const {
        hopper::named_barrier_sync(CONSUMERS_BARRIER, 128 * CONSUMERS);
    }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&barrier));
    }
    // The upper of a thread's two rows, within this CTA.
    __device__ __forceinline__ int row() const { return 16 * warp + lane / 4; }

    // Waits for the next tile; false if there is none.
    __device__ __forceinline__ bool next_tile(TileView &view) {
        if (!tiles.next(shared.queue, view, first_row)) return false;
        view.slope = FALLBACK && params.alibi_slopes ? load_slope(params, current_tile().head) : 0.0f;
        return true;
    }

    __device__ __forceinline__ const PrefillTile &current_tile() const { return tiles.current(shared.queue); }

    __device__ __forceinline__ unsigned chunk(const PipelineState<STAGES> &state) const {
        return base + STAGES_OFFSET + state.index * CHUNK_BYTES;
    }
    __device__ __forceinline__ void wait_chunk(const PipelineState<STAGES> &state) const {
        hopper::mbarrier_wait(shared_address(&shared.full[state.index]), state.phase);
    }

    // Releases stages to the producers of both CTAs.
    template <int COUNT> __device__ __forceinline__ void release_chunks() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (lane < (int)CTAS_PER_TILE)
                hopper::mbarrier_arrive_remote(shared_address(&shared.empty[unreleased.index]), lane);
            unreleased.advance();
        }
    }

    // Issues Q K^T over 64 dims, for this warpgroup's keys. `c`: of the chunks of all terms.
    __device__ __forceinline__ void mma_qk(int c, bool adds) {
        int chunks = key_chunks(params), query_chunk = c - term_of(c, chunks) * chunks;
        SharedTile<64> queries = {base + QUERY_OFFSET + query_chunk * SUBTILE_BYTES};
        SharedTile<64> keys = {chunk(stage) + warpgroup * SUBTILE_BYTES};
        float (&sum)[KEYS_PER_WARPGROUP / 2] = *(float (*)[KEYS_PER_WARPGROUP / 2]) & scores;
        wait_chunk(stage);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            Wgmma<KEYS_PER_WARPGROUP>::mma_ss(sum, queries.k_major(step), keys.k_major(step), adds || step > 0);
        hopper::wgmma_commit();
        stage.advance();
    }

    // Issues the first two chunks, then the others; the last two are not released.
    __device__ __forceinline__ void mma_qk_first_chunks() {
        warpgroup_fence_operand(*(float (*)[KEYS_PER_WARPGROUP / 2]) & scores);
        mma_qk(0, false);
        mma_qk(1, true);
    }
    __device__ __forceinline__ void mma_qk_other_chunks() {
        int chunks = KEY_TERMS * key_chunks(params);
        if constexpr (FALLBACK) {
            mma_qk_parts(chunks);
        } else {
            mma_qk_chunks(2, chunks, true);
        }
    }
    __device__ __forceinline__ void mma_qk_chunks(int first, int end, bool adds) {
#pragma unroll 1
        for (int c = first; c < end; c++) {
            mma_qk(c, adds || c > first);
            hopper::wgmma_wait<2>();
            release_chunks<1>();
        }
    }
    // Tensor cores truncate sums, and those of many dims of one sign by more than a log-sum-exp may be off: parts of
    // 256 dims are added up by FADDs. It takes 1.2 times as long, because P V waits for Q K^T; so the specialized
    // kernel, which does not, has problems without a log-sum-exp.
    __device__ __forceinline__ void mma_qk_parts(int chunks) {
        mma_qk_chunks(2, min(chunks, PART_CHUNKS), true);
#pragma unroll 1
        for (int first = PART_CHUNKS; first < chunks; first += PART_CHUNKS) {
            float before[KEYS_PER_WARPGROUP / 8][4];
            wait_scores();
#pragma unroll
            for (int j = 0; j < KEYS_PER_WARPGROUP / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) before[j][e] = scores[j][e];
            mma_qk_chunks(first, min(chunks, first + PART_CHUNKS), false);
            wait_scores();
#pragma unroll
            for (int j = 0; j < KEYS_PER_WARPGROUP / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) scores[j][e] += before[j][e];
        }
    }
    __device__ __forceinline__ void wait_scores() {
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(*(float (*)[KEYS_PER_WARPGROUP / 2]) & scores);
    }

    // Issues P V for this warpgroup's dims; the last step is not waited for. The probabilities of its own keys come
    // first, from registers, so that the other warpgroup's are needed later. `behind`: Q K^T has not been waited for
    // yet.
    template <bool BEHIND> __device__ __forceinline__ void mma_pv(int first_key, const PrefillTile &tile) {
        SharedTile<64> theirs = {base + PROBS_OFFSET + probs * PROB_BYTES + (1 - warpgroup) * SUBTILE_BYTES};
        warpgroup_fence_operand(out);
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) {
            PipelineState<STAGES> own_values = stage;
            wait_chunk(stage);
            stage.advance();
            wait_chunk(stage);
            if (warpgroup == 1) own_values = stage;
            stage.advance();
            unsigned v = chunk(own_values);
            if (step == VALUE_STEPS / 2) consumers_sync();
            zero_invisible_values<VALUE_KEYS>(tile, first_key + VALUE_KEYS * value_slice_of(step, warpgroup), v,
                                              CHUNK_BYTES, WARPGROUP_BARRIER + warpgroup);
            hopper::wgmma_fence();
#pragma unroll
            for (int i = 0; i < VALUE_KEYS / 16; i++) {
                int sixteenth = step * VALUE_KEYS / 16 + i;
                unsigned long long values = SharedTile<VALUE_KEYS>{v}.mn_major(i);
                if (sixteenth < KEYS_PER_WARPGROUP / 16) {
                    Wgmma<DIMS_PER_WARPGROUP>::mma_rs(out, own[sixteenth], values);
                } else {
                    Wgmma<DIMS_PER_WARPGROUP>::mma_ss_transposed(
                        out, theirs.k_major(sixteenth - KEYS_PER_WARPGROUP / 16), values);
                }
            }
            hopper::wgmma_commit();
            if (BEHIND && step == 0) {
                hopper::wgmma_wait<1>();
                warpgroup_fence_operand(*(float (*)[KEYS_PER_WARPGROUP / 2]) & scores);
                release_chunks<2>();
            }
            if (step > 0) {
                hopper::wgmma_wait<1>();
                release_chunks<2>();
            }
        }
        probs ^= 1;
    }

    // Online softmax with lazy rescale: scores become probabilities in shared memory, and `factor` is set to rescale
    // sums and accumulators. Overlaps P V of the previous K tile.
    __device__ __forceinline__ void softmax_step(const TileView &view, int flags, bool first) {
        int first_key = first_key_of(flags) + KEYS_PER_WARPGROUP * warpgroup;
        bool partly = first_key < view.start(ROWS - 1) || first_key + KEYS_PER_WARPGROUP > view.end(0);
        if (FALLBACK && has_uneven_ranges(params)) {
            const PrefillTile &tile = current_tile();
            partly = first_key < tile.every_start || first_key + KEYS_PER_WARPGROUP > tile.every_end;
        }
        RowFacts rows[2];
        find_row_facts(view, rows);
        int new_tokens = FALLBACK ? current_tile().seq.kv_len - current_tile().seq.q_len : 0;
        modify_scores(params, current_tile().scale, scores, rows,
                      {first_key, new_tokens, partly, (flags & MASKED_KEY_TILE) != 0});
        float scale = exponent_scale(params, current_tile().scale), tile_max[2];
        find_maxima(tile_max);
        consumers_sync();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float new_max = fmaxf(tile_max[r], exchange.maxima[1 - warpgroup][row() + 8 * r]);
            // Lazy rescale. -inf - -inf is NaN, for which the comparison is false.
            bool keeps_max = (new_max - row_max[r]) * scale <= RESCALE_THRESHOLD;
            new_max = keeps_max ? row_max[r] : new_max;
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            float reference = new_max == -INF ? 0.0f : new_max * scale;
            factor[r] = keeps_max ? 1.0f : exp2_fast(fmaf(row_max[r], scale, -reference));
            bool exists = first_row + row() + 8 * r < current_tile().tokens;
            if (__any_sync(~0u, exists && new_max != -INF && is_large(reference))) {
                // Differences first: see `is_large`.
                float subtracted = new_max == -INF ? 0.0f : new_max;
                factor[r] = keeps_max ? 1.0f : exp2_fast((row_max[r] - subtracted) * scale);
                reference = 0.0f;
#pragma unroll
                for (int j = 0; j < KEYS_PER_WARPGROUP / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) scores[j][2 * r + e] -= subtracted;
            }
            row_max[r] = new_max;
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < KEYS_PER_WARPGROUP / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = scores[j][2 * r + e];
                    score = exp2_fast(fmaf(score, scale, -reference));
                    sum[e] += score;
                }
            row_sum[r] = fmaf(row_sum[r], factor[r], sum[0] + sum[1]);
        }
        // Wait for P V here, before its last stages are released: later, and the next values would wait for a free
        // stage.
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        if (!first) release_chunks<2>();
        store_probs();
    }

    // The facts of this thread's two rows.
    __device__ __forceinline__ void find_row_facts(const TileView &view, RowFacts (&rows)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            rows[r].start = view.start(row() + 8 * r);
            rows[r].end = view.end(row() + 8 * r);
            // The other facts are computed on demand, to save registers.
            if (!FALLBACK) continue;
            const PrefillTile &tile = current_tile();
            // A padding row takes the facts of the last row, because the mask need not extend to it.
            int token = tile.first_token + min(first_row + row() + 8 * r, tile.tokens - 1);
            if (has_uneven_ranges(params)) {
                rows[r].start = visible_start(params, tile.seq, token);
                rows[r].end = visible_end(params, tile.seq, token);
            }
            if (params.alibi_slopes) {
                rows[r].position = tile.seq.offset + token;
                rows[r].slope = view.slope;
            }
            if (params.mask_kind != MaskKind::None) rows[r].mask = mask_offset(params, tile, tile.head, token);
            if (params.tree_mask) rows[r].tree = tree_offset(params, tile, token);
        }
    }

    // The maxima of this warpgroup's scores, left in shared memory for the other one too.
    __device__ __forceinline__ void find_maxima(float (&tile_max)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float pair[2] = {scores[0][2 * r], scores[0][2 * r + 1]};
#pragma unroll
            for (int j = 1; j < KEYS_PER_WARPGROUP / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) pair[e] = fmaxf(pair[e], scores[j][2 * r + e]);
            tile_max[r] = quad_max(fmaxf(pair[0], pair[1]));
            if (lane % 4 == 0) exchange.maxima[warpgroup][row() + 8 * r] = tile_max[r];
        }
    }

    // Stores this warpgroup's probabilities for the other one, and keeps them in registers as operand A.
    __device__ __forceinline__ void store_probs() {
        int to_row = 16 * warp + lane % 16;
        SharedTile<64> to = {base + PROBS_OFFSET + probs * PROB_BYTES + warpgroup * SUBTILE_BYTES};
#pragma unroll
        for (int j = 0; j < KEYS_PER_WARPGROUP / 16; j++) {
            const float (&left)[4] = scores[2 * j], (&right)[4] = scores[2 * j + 1];
            own[j][0] = E::pack(left[0], left[1]), own[j][1] = E::pack(left[2], left[3]);
            own[j][2] = E::pack(right[0], right[1]), own[j][3] = E::pack(right[2], right[3]);
            hopper::stmatrix_x4(to.chunk(to_row, 2 * j + lane / 16), own[j][0], own[j][1], own[j][2], own[j][3]);
        }
        hopper::fence_proxy_async();
    }

    // Rescales sums and accumulators if a maximum of the warp rose. P V has been waited for, which takes the whole
    // warpgroup; this is per warp.
    __device__ __forceinline__ void rescale_if_needed() {
        if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
        rescale(out, factor);
    }

    // Prologue of a tile: clears the state, and computes the scores of the first K tile.
    __device__ __forceinline__ int begin_tile() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = -INF;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < DIMS_PER_WARPGROUP / 2; i++) out[i] = 0.0f;
        hopper::mbarrier_wait(shared_address(&shared.query_full), query_phase);
        query_phase ^= 1;
        int flags = next_flags();
        mma_qk_first_chunks();
        mma_qk_other_chunks();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(*(float (*)[KEYS_PER_WARPGROUP / 2]) & scores);
        release_chunks<2>();
        return flags;
    }

    // The stage flags of the next K tile, read by the lane that releases the stage.
    __device__ __forceinline__ int next_flags() const {
        wait_chunk(stage);
        return __shfl_sync(~0u, lane == 0 ? shared.stage_flags[stage.index] : 0, 0);
    }

    // P V of the last K tile, and the epilogue.
    __device__ __forceinline__ void finish_tile(int first_key) {
        release(shared.query_empty);
        rescale_if_needed();
        mma_pv<false>(first_key, current_tile());
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        release_chunks<2>();
        epilogue(current_tile());
    }

    // Q K^T of the next K tile, whose stage flags are returned, and P V of this one.
    __device__ __forceinline__ int next_key_tile(int first_key) {
        int flags = next_flags();
        rescale_if_needed();
        mma_qk_first_chunks();
        mma_qk_other_chunks();
        mma_pv<true>(first_key, current_tile());
        return flags;
    }

    // mma_qk_other_chunks and mma_pv have released them.
    __device__ __forceinline__ void release_keys() const {}

    // Epilogue: adds the sink, normalizes, and writes output and LSE.
    __device__ __forceinline__ void epilogue(const PrefillTile &facts) {
        const PrefillTile tile = facts;
        float scale = has_natural_scores(params) ? 1.0f : exponent_scale(params, tile.scale);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_sum[r] = quad_sum(row_sum[r]);
            if (lane % 4 == 0) exchange.sums[warpgroup][row() + 8 * r] = row_sum[r];
        }
        consumers_sync();
        State states[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            states[r] = {row_max[r] * scale, row_sum[r] + exchange.sums[1 - warpgroup][row() + 8 * r]};
        finalize_rows(params, tile, {first_row + row(), warpgroup == 0 && lane % 4 == 0}, states, out);
        unsigned packed[sizeof(out) / 8];
        pack_outputs(out, packed);
        store_rows(params, tile, first_row + row(), warpgroup * DIMS_PER_WARPGROUP, packed, lane);
    }
};

extern "C" __global__ void __cluster_dims__(CTAS_PER_TILE, 1, 1) __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill,
            const __grid_constant__ TensorMaps maps) {
    Shared &shared = *(Shared *)dynamic_shared;
    unsigned rank = hopper::cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(shared.query_full, 1);
        mbarrier_init(shared.query_empty, 4 * CONSUMERS);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared.full[i], 1);
            mbarrier_init(shared.empty[i], 4 * CONSUMERS * CTAS_PER_TILE);
        }
        shared.queue.init(4 * CONSUMERS + 1);
        mbarrier_init(shared.number_full, 1);
        mbarrier_init(shared.number_empty, CTAS_PER_TILE);
        hopper::fence_mbarrier_init();
        hopper::prefetch_tensor_map(maps.query);
        hopper::prefetch_tensor_map(maps.key);
        hopper::prefetch_tensor_map(maps.value);
    }
    grid_dependency_wait();
    __syncwarp();
    // No CTA may write to the other before its mbarriers are initialized.
    hopper::cluster_sync();
    // Producers need few registers; consumers get the rest.
    if (threadIdx.x < 128) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            Producer producer = {
                params, prefill, maps, shared, shared_address(dynamic_shared), rank, lane, __ffs(prefill.box_keys) - 1};
            producer.run();
        } else if (warp == 1) {
            unsigned clusters = gridDim.x / CTAS_PER_TILE, number_phase = 0;
            Scheduler scheduler = {params, prefill, shared.queue, lane, rank == 0};
            scheduler.run(blockIdx.x / CTAS_PER_TILE,
                          [&] { return next_number(prefill, shared, rank, lane, number_phase); });
            if (rank == 0 && lane == 0) finish_tile_scheduler(prefill, clusters);
        }
    } else {
        hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Exchange &exchange = *(Exchange *)(dynamic_shared + MAXIMA_OFFSET);
        Consumer consumer = {params,
                             prefill,
                             shared,
                             exchange,
                             shared_address(dynamic_shared),
                             ROWS * (int)rank,
                             warp / 4 - 1,
                             warp % 4,
                             (int)threadIdx.x % 32};
        Consumer::TileView view;
        if (consumer.next_tile(view)) consumer_mainloop(consumer, view);
    }
    // No CTA may exit while the other may still write to its shared memory.
    __syncwarp();
    hopper::cluster_sync();
}
