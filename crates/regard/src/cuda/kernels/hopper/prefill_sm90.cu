// Prefill attention on Hopper: many query rows, bound by the tensor cores.
//
// A persistent, warp-specialized kernel. A CTA has CONSUMERS consumer warpgroups of 64 query rows each, and one
// producer warpgroup: a scheduler warp (tile_scheduler.cuh) and three TMA producer warps for keys, values and queries.
// Keys and values each have a TMA pipeline of STAGES stages, loaded from a tile's last K tile to its first, so that the
// causal boundary comes first; but see find_tile_range.
//
// Within a warpgroup, Q K^T of the next K tile and P V of the previous one overlap the softmax. Across warpgroups, the
// warp scheduler barriers give ping-pong scheduling: one warpgroup's exponentials run while the other's wgmmas do.
#include "hopper/code_converter.cuh"
#include "hopper/skeleton.cuh"
#include "hopper/wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES.
//
// CACHE = 1: keys and values are 8-bit codes, which a converter warpgroup turns into 16-bit tiles (code_converter.cuh).
//
// The specialized kernel (FALLBACK = 0) takes unmodified scores and rows of exact dims. Outputs have the inputs' type.
// The scale is positive, because maxima are taken before it is applied.
#ifndef CACHE
#define CACHE 0
#endif
constexpr bool HAS_CODES = CACHE == 1;
constexpr int CONSUMERS = TILE_ROWS / 64, KEYS = TILE_KEYS, CONVERTERS = HAS_CODES; // warpgroups
constexpr int STAGES = HEAD_DIM <= 64 ? 3 : 2;       // pipeline stages of keys, and of values
constexpr int QUERY_STAGES = HEAD_DIM <= 64 ? 2 : 1; // tiles whose queries are resident
constexpr int KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_CHUNKS = (VALUE_DIM + 63) / 64;  // of 64 dims, 128 bytes
constexpr int QUERY_BYTES = 64 * KEY_CHUNKS * 128, OUT_BYTES = 64 * VALUE_CHUNKS * 128; // per warpgroup
constexpr int KEY_BYTES = KEYS * KEY_CHUNKS * 128, VALUE_BYTES = KEYS * VALUE_CHUNKS * 128;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Registers per thread: what the producers need, and what that leaves for the consumers.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 && !HAS_CODES ? 40 : 32, CONVERTER_REGISTERS = 64;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? (HAS_CODES ? 208 : 232) : 160;
static_assert(!HAS_CODES || CONSUMERS == 2, "registers are counted for two");

typedef Element<ElementType(ELEMENT_TYPE)> E;

// The initial row maximum: finite, so that differences to it are numbers.
constexpr float MIN_FLOAT = -3.40282347e38f;
// Minimum scale of scores over codes.
constexpr float MIN_NORMAL = 1.17549435e-38f;
// The largest sum of probabilities, in a thread's part of a row, relative to a stale max. f16 holds each of them.
constexpr float MAX_STALE_SUM = 4096.0f;

// Whether K tiles are usually exponentiated against a stale max: see softmax_step. Specialized kernels of large dims
// lack the registers.
constexpr bool LAZY_MAX = FALLBACK || VALUE_DIM <= 128;

// Whether a register holds the score features of the call.
constexpr bool KEEPS_FEATURES = FALLBACK && VALUE_DIM <= 128;

// The softcap as a polynomial in the score: first s + third s^3 + fifth s^5, in units of log2. Three operations per
// score, where tanh takes a dozen.
//
// With x = score / cap, the polynomial is within a relative 2^-21 of tanh x for |x| <= 0.25, and monotonic. No score
// needs a check. Above: the sum check keeps probabilities below 2^8, so if the row maximum is at most 8 (log2) below
// the value at 0.25, no score exceeds it. Below -0.25: if the row maximum is above -0.1 of a cap of at least 45, such
// scores weigh 2^-9 of the maximum or less, and their weight falls faster than the polynomial errs: 2e-8 at most.
struct SoftcapPolynomial {
    float first, third, fifth;
    float least, most; // the range of row maxima in which it is valid
};

static __device__ __forceinline__ SoftcapPolynomial softcap_polynomial(const AttentionParameters &params) {
    float inward = params.scale * reciprocal(params.softcap), square = inward * inward, first = params.scale * LOG2_E,
          outward = params.softcap * LOG2_E;
    bool usual = params.softcap >= 45.0f && params.softcap < 1e6f && fabsf(inward) > 1e-6f && fabsf(inward) < 1e6f;
    return {0.999999604f * first, -0.333219063f * square * first, 0.128415892f * square * square * first,
            -0.1f * outward, usual ? 0.2449f * outward - 8.0f : -INF};
}

struct Shared {
    unsigned long long query_full[QUERY_STAGES][CONSUMERS], query_empty[QUERY_STAGES][CONSUMERS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    TileQueue queue;
    int stage_flags[STAGES];
    SoftcapPolynomial cap;
    CodeBuffer key_codes, value_codes; // where HAS_CODES
};

constexpr int QUERY_OFFSET = 1024;
constexpr int KEY_OFFSET = QUERY_OFFSET + QUERY_STAGES * CONSUMERS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * KEY_BYTES;
constexpr int CODES_OFFSET = VALUE_OFFSET + STAGES * VALUE_BYTES, KEY_CODE_BYTES = HAS_CODES * KEYS * HEAD_DIM,
              VALUE_CODE_BYTES = HAS_CODES * KEYS * VALUE_DIM;
constexpr int OUT_OFFSET = CODES_OFFSET + KEY_CODE_BYTES + VALUE_CODE_BYTES;
// The output goes through shared memory and TMA if there is room.
constexpr bool OUT_STAGED = OUT_OFFSET + CONSUMERS * OUT_BYTES <= 232448;
static_assert(sizeof(Shared) <= QUERY_OFFSET && OUT_OFFSET + OUT_STAGED * CONSUMERS * OUT_BYTES == SHARED_BYTES,
              "as the host has it");
static_assert(THREADS == 128 * (CONSUMERS + CONVERTERS + 1), "as the host has it");

// Named barriers.
constexpr int WARP_SCHEDULER_BARRIER = 1, WARPGROUP_BARRIER = WARP_SCHEDULER_BARRIER + CONSUMERS;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// The producer warp of keys, or of values.
template <bool IS_KEYS> struct Producer {
    // A TMA box has 64 dims of 16 bits, or a whole row of codes.
    static constexpr int CHUNKS = HAS_CODES ? 1 : IS_KEYS ? KEY_CHUNKS : VALUE_CHUNKS;
    static constexpr int ROW_BYTES = !HAS_CODES ? 128 : IS_KEYS ? HEAD_DIM : VALUE_DIM; // of a box
    static constexpr int RING_OFFSET = HAS_CODES ? CODES_OFFSET + (IS_KEYS ? 0 : KEY_CODE_BYTES)
                                       : IS_KEYS ? KEY_OFFSET
                                                 : VALUE_OFFSET;
    static constexpr int STAGE_BYTES = KEYS * CHUNKS * ROW_BYTES;
    static constexpr int BUFFERS = HAS_CODES ? 1 : STAGES;
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const TensorMap &map;
    Shared &shared;
    unsigned base; // of shared memory
    int lane;

    // With paged KV, each lane loads one box: its first slot within the page, -1 if there is nothing to load; and its
    // page-table entry, not clamped yet.
    struct TmaBox {
        int slot, entry;
    };

    // Boxes without visible keys are skipped: their page-table entries may be invalid. The load of the entry is still
    // in flight when this returns, and is used one K tile later.
    __device__ __forceinline__ TmaBox find_box(const PrefillTile &tile, int key_tile) const {
        TmaBox box = {-1, 0};
        int within = lane * prefill.box_keys, key = key_tile * KEYS + within;
        if (params.block_size && within < KEYS && key + prefill.box_keys > tile.seq_start && key < tile.seq_end) {
            int index = page_index(params, key);
            box.slot = page_slot(params, key, index);
            box.entry = page_table(params, tile.sequence)[index];
        }
        return box;
    }

    // Starts the TMA loads of a K tile.
    __device__ __forceinline__ void fetch(const PrefillTile &tile, int key_tile, TmaBox box, unsigned to,
                                          unsigned barrier) const {
        if (!params.block_size) {
            if (lane == 0) {
                hopper::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
#pragma unroll 1
                for (int c = 0; c < CHUNKS; c++)
                    hopper::tma_load(to + c * KEYS * 128, map, barrier, c * 64, tile.kv_head,
                                     tile.seq.kv_start + key_tile * KEYS, params.cu_seqlens_k ? 0 : tile.sequence);
            }
            return;
        }
        unsigned boxes = __ballot_sync(~0u, box.slot >= 0);
        if (lane == 0)
            hopper::mbarrier_arrive_expect_tx(barrier, __popc(boxes) * prefill.box_keys * CHUNKS * ROW_BYTES);
        if (box.slot >= 0) {
            int block = page_of(params, box.entry);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++)
                hopper::tma_load(to + (c * KEYS + lane * prefill.box_keys) * ROW_BYTES, map, barrier, c * 64,
                                 tile.kv_head, box.slot, block);
        }
    }

    // The mbarriers of a buffer, and the flags that go with its keys.
    __device__ __forceinline__ unsigned long long &full(int stage) const {
        if constexpr (HAS_CODES) return IS_KEYS ? shared.key_codes.full : shared.value_codes.full;
        return IS_KEYS ? shared.key_full[stage] : shared.value_full[stage];
    }
    __device__ __forceinline__ unsigned long long &empty(int stage) const {
        if constexpr (HAS_CODES) return IS_KEYS ? shared.key_codes.empty : shared.value_codes.empty;
        return IS_KEYS ? shared.key_empty[stage] : shared.value_empty[stage];
    }
    __device__ __forceinline__ int &flags(int stage) const {
        return HAS_CODES ? shared.key_codes.flags : shared.stage_flags[stage];
    }

    __device__ __forceinline__ void run() {
        PipelineState<BUFFERS> stage;
        for_each_tile(shared.queue, lane, [&](const TileDescriptor &descriptor) {
            const PrefillTile &tile = descriptor.tile;
            KeyTileOrder order(prefill, descriptor);
            TmaBox box = find_box(tile, order.current);
#pragma unroll 1
            while (!order.is_done()) {
                order.find_following(lane);
                TmaBox following_box = find_box(tile, order.following);
                int stage_flags = order.stage_flags();
                if (IS_KEYS && order.is_last() && lane == 0) shared.queue.request();
                hopper::mbarrier_wait(shared_address(&empty(stage.index)), stage.phase ^ 1);
                if (IS_KEYS && lane == 0) flags(stage.index) = stage_flags;
                fetch(tile, order.current, box, base + RING_OFFSET + stage.index * STAGE_BYTES,
                      shared_address(&full(stage.index)));
                stage.advance();
                order.current = order.following;
                box = following_box;
            }
        });
    }
};

#if CACHE
// A warp of the converter warpgroup: alternates between the keys and the values of each K tile.
struct Converter {
    const CacheParameters &cache;
    Shared &shared;
    unsigned base;
    int thread; // of the warpgroup

    PipelineState<1> codes; // of keys and of values
    PipelineState<STAGES> stage;

    // Makes this warp's stores visible to wgmma, hands the tile over, and gives the code buffer back.
    __device__ __forceinline__ void hand_over(unsigned long long &full, unsigned long long &empty) const {
        hopper::fence_proxy_async();
        __syncwarp();
        if (thread % 32 == 0) {
            hopper::mbarrier_arrive(shared_address(&full));
            hopper::mbarrier_arrive(shared_address(&empty));
        }
    }

    // Returns the flags of the K tile.
    __device__ __forceinline__ int convert_keys() const {
        hopper::mbarrier_wait(shared_address(&shared.key_codes.full), codes.phase);
        int flags = shared.key_codes.flags;
        hopper::mbarrier_wait(shared_address(&shared.key_empty[stage.index]), stage.phase ^ 1);
        if (thread == 0) shared.stage_flags[stage.index] = flags;
        convert_codes<KEYS, HEAD_DIM>(cache.key_format, base + CODES_OFFSET,
                                      {base + KEY_OFFSET + stage.index * KEY_BYTES}, thread);
        hand_over(shared.key_full[stage.index], shared.key_codes.empty);
        return flags;
    }

    __device__ __forceinline__ void convert_values() const {
        hopper::mbarrier_wait(shared_address(&shared.value_codes.full), codes.phase);
        hopper::mbarrier_wait(shared_address(&shared.value_empty[stage.index]), stage.phase ^ 1);
        convert_codes<KEYS, VALUE_DIM>(cache.value_format, base + CODES_OFFSET + KEY_CODE_BYTES,
                                       {base + VALUE_OFFSET + stage.index * VALUE_BYTES}, thread);
        hand_over(shared.value_full[stage.index], shared.value_codes.empty);
    }

    __device__ __forceinline__ void run() {
        for_each_tile(shared.queue, thread % 32, [&](const TileDescriptor &) {
            int flags;
#pragma unroll 1
            do {
                flags = convert_keys();
                convert_values();
                codes.advance();
                stage.advance();
            } while (!(flags & LAST_KEY_TILE));
        });
    }
};
#endif

// The producer warp of queries.
static __device__ __forceinline__ void fetch_queries(const AttentionParameters &params, const TensorMap &map,
                                                     Shared &shared, unsigned base, int lane) {
    PipelineState<QUERY_STAGES> query;
    for_each_tile(shared.queue, lane, [&](const TileDescriptor &descriptor) {
        const PrefillTile &tile = descriptor.tile;
#pragma unroll 1
        for (int w = 0; w < CONSUMERS; w++) {
            hopper::mbarrier_wait(shared_address(&shared.query_empty[query.index][w]), query.phase ^ 1);
            unsigned to = base + QUERY_OFFSET + (query.index * CONSUMERS + w) * QUERY_BYTES,
                     barrier = shared_address(&shared.query_full[query.index][w]);
            if (lane != 0) continue;
            hopper::mbarrier_arrive_expect_tx(barrier, QUERY_BYTES);
#pragma unroll 1
            for (int c = 0; c < KEY_CHUNKS; c++)
                hopper::tma_load(to + c * 64 * 128, map, barrier, c * 64, tile.head,
                                 tile.seq.q_start + tile.first_token + 64 * w, params.cu_seqlens_q ? 0 : tile.sequence);
        }
        query.advance();
    });
}

// A consumer warpgroup.
struct Consumer {
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const TensorMaps &maps;
    const CacheParameters *cache; // where HAS_CODES
    Shared &shared;
    unsigned base;
    int warpgroup, warp, lane; // index of the warpgroup, and of the warp in it
    float scale;               // of dot products: that of the call, times that of the keys

    TileReader tiles;
    PipelineState<STAGES> key, value;
    PipelineState<QUERY_STAGES> query;
    float scores[KEYS / 8][4];
    unsigned probs[VALUE_STEPS][4]; // probabilities: operand A of P V
    float out[VALUE_DIM / 2];
    float row_max[2], row_sum[2]; // online softmax state in units of log2; the maximum may be stale: see softmax_step
    bool rising = false;          // maxima rose a lot with the previous K tile, or are large
    bool by_polynomial = false;   // row maxima allow the softcap polynomial
    int kept_features;            // see features()

    struct TileView : VisibleRange {
        bool row_valid[2]; // whether this thread's rows exist: padding rows must not trigger a max recomputation for
                           // their warp
        float slope;
    };

    // Reading them from a register is faster; large head dims have none left, so that they are found again.
    __device__ __forceinline__ int features() const {
        return KEEPS_FEATURES ? kept_features : FALLBACK ? score_features(params) : 0;
    }
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
    __device__ __forceinline__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }

    // Waits for the next tile; false if there is none.
    __device__ __forceinline__ bool next_tile(TileView &view) {
        if (!tiles.next(shared.queue, view, 64 * warpgroup)) return false;
        const PrefillTile &tile = current_tile();
        for (int r = 0; r < 2; r++) view.row_valid[r] = row() + 8 * r < tile.tokens;
        scale = params.scale;
        if constexpr (HAS_CODES) {
            // Not 0: minus infinity times 0 is NaN.
            scale = fmaxf(scale * head_scale(cache->key_scales, cache->key_scale_strides, tile.kv_head), MIN_NORMAL);
        }
        if (FALLBACK && features() & SLOPES) view.slope = load_slope(params, tile.head) * logit_unit(params);
        return true;
    }

    __device__ __forceinline__ const PrefillTile &current_tile() const { return tiles.current(shared.queue); }

    __device__ __forceinline__ void mma_qk() {
        SharedTile<64> queries = {base + QUERY_OFFSET + (query.index * CONSUMERS + warpgroup) * QUERY_BYTES};
        SharedTile<KEYS> keys = {base + KEY_OFFSET + key.index * KEY_BYTES};
        float (&sum)[KEYS / 2] = *(float (*)[KEYS / 2]) & scores;
        warpgroup_fence_operand(sum);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            Wgmma<KEYS>::mma_ss(sum, queries.k_major(step), keys.k_major(step), step > 0);
        hopper::wgmma_commit();
    }

    template <int DIM> __device__ __forceinline__ void mma_pv_step(SharedTile<KEYS> values, int step) {
        if constexpr (HAS_CODES && DIM > 128) {
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

    template <int PENDING> __device__ __forceinline__ void wait_scores() {
        hopper::wgmma_wait<PENDING>();
        warpgroup_fence_operand(*(float (*)[KEYS / 2]) & scores);
    }

    // P V of the previous K tile is done: release its stage.
    __device__ __forceinline__ void release_values() {
        release(shared.value_empty[value.index]);
        value.advance();
    }

    // Q K^T of a K tile is done: release its stage.
    __device__ __forceinline__ void release_keys() {
        __syncwarp(); // all lanes have read the stage flags
        release(shared.key_empty[key.index]);
        key.advance();
    }

    // Facts of this thread's rows, computed on demand to save registers.
    struct Rows {
        const Consumer &consumer;
        const TileView &view;
        __device__ __forceinline__ RowFacts operator[](int r) const {
            RowFacts facts = {};
            int in_group = 16 * consumer.warp + consumer.lane / 4 + 8 * r;
            facts.start = view.start(in_group);
            facts.end = view.end(in_group);
            if (!FALLBACK) return facts;
            const AttentionParameters &params = consumer.params;
            const PrefillTile &tile = consumer.current_tile();
            // A padding row takes the facts of the last row, because the mask need not extend to it.
            int token = tile.first_token + min(consumer.row() + 8 * r, tile.tokens - 1);
            facts.mask = mask_offset(params, tile, tile.head, token);
            facts.tree = tree_offset(params, tile, token);
            return facts;
        }
    };

    // Whether every row of the tile sees these keys, by structure.
    __device__ __forceinline__ bool sees_whole_tile(int first_key, int keys) const {
        return first_key >= current_tile().every_start && first_key + keys <= current_tile().every_end;
    }

    // Online softmax with a stale max: exponentiate against the row max of the previous K tiles. If the sum exceeds
    // MAX_STALE_SUM, recompute the max, rescale the accumulators, and exponentiate again.
    //
    // P V of the previous K tile is waited for in between. (ptxas moves the wait before the exponentials from any place
    // in this source; after them measured slower.)
    __device__ __forceinline__ void softmax_step(const TileView &view, int flags, bool first) {
        int first_key = first_key_of(flags);
        bool partly = first_key < view.start(63) || first_key + KEYS > view.end(0) ||
                      (FALLBACK && features() & HAS_UNEVEN_ROWS && !sees_whole_tile(first_key, KEYS));
        bool rare = partly || (FALLBACK && ((flags & MASKED_KEY_TILE && features() & (ADDS_MASK | HIDES_BY_MASK)) ||
                                            features() & HIDES_BY_TREE));
        bool natural = FALLBACK && features() & ADDS_MASK; // the units of scores: state.cuh
        float unit = natural ? LOG2_E : 1.0f, logit_unit = natural ? 1.0f : LOG2_E;
        ExponentTerms left = {(HAS_CODES ? scale : params.scale) * logit_unit, 0.0f, 0.0f, false};
        bool polynomial = FALLBACK && by_polynomial && !first && !rising && !rare;
        if (FALLBACK && features() & CAPS) {
            left.scale = params.softcap * logit_unit;
            if (!polynomial) softcap_scores();
        }
        // Whether some row has ALiBi biases on both sides of it in this K tile: they are then added to the scores here.
        bool bends = FALLBACK && features() & SLOPES && find_alibi_terms(view, first_key, natural, left);
        if (rare || bends) mask_scores(view, flags, partly, bends, left);
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        if (!first) release_values();
        bool sure = first || rising || !LAZY_MAX;
        float max_sum = polynomial ? 256.0f : MAX_STALE_SUM;
        float sums[2];
#pragma unroll 1
        for (;;) {
            // When maxima are recomputed, biases become part of the scores.
            if (FALLBACK && sure && left.steps) add_alibi(left);
            bool large = sure && update_max(view, left, unit, first);
            exponentiate(left, unit, polynomial, large, sums);
            bool small[2] = {sums[0] <= max_sum || !view.row_valid[0], sums[1] <= max_sum || !view.row_valid[1]};
            if (sure || __all_sync(~0u, small[0] && small[1])) break;
            sure = true;
            if (polynomial) {
                polynomial = false;
                softcap_scores();
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += sums[r];
    }

    // Softcap. `tanh.approx` errs by 2^-11, which shows in the LSE.
    __device__ __forceinline__ void softcap_scores() {
        float inward = params.scale * reciprocal(params.softcap);
        for_each_score(scores, 0, [&](float &score, int, int) { score = tanhf(score * inward); });
    }

    // ALiBi: the distance of this thread's first key, and the bias per key if it is linear in this K tile. Returns true
    // if it is not linear: keys on both sides of a row's position, or biases that are added in natural units.
    __device__ __forceinline__ bool find_alibi_terms(const TileView &view, int first_key, bool natural,
                                                     ExponentTerms &left) const {
        const PrefillTile &tile = current_tile();
        long long stride = params.key_positions.stride;
        long long ahead = tile.seq.offset + tile.first_token + row() - (2 * (lane & 3) + first_key) * stride;
        left.distance = (float)ahead;
        left.step = view.slope;
        // Strides and rows together give distances that are no whole numbers of keys: they are not split into steps.
        bool bends = natural || stride > 1;
        if (features() & SLOPES_BOTH_WAYS && !bends) {
            bool behind = __all_sync(~0u, ahead >= KEYS - 7), before = __all_sync(~0u, ahead + 8 <= 0);
            bends = !behind && !before;
            if (before) left.step = -left.step;
        }
        left.steps = !bends;
        return bends;
    }

    // ALiBi biases that are linear in this K tile, added to the scores.
    __device__ __forceinline__ void add_alibi(ExponentTerms &left) {
        float distance = opaque(left.distance);
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            score = fmaf((float)(column - 8 * r) - distance, left.step, score * left.scale);
        });
        left.scale = 1.0f;
        left.steps = false;
    }

    // The rare K tiles: biases that bend, additive masks, and everything that hides keys.
    __device__ __forceinline__ void mask_scores(const TileView &view, int flags, bool partly, bool bends,
                                                ExponentTerms &left) {
        int first_key = first_key_of(flags);
        if (FALLBACK && (bends || (features() & ADDS_MASK && flags & MASKED_KEY_TILE))) {
            float slope = bends ? left.step : 0.0f, key_step = (float)params.key_positions.stride;
            float distance = opaque(left.distance), distances[2] = {distance, distance + 8.0f};
            for_each_score(scores, 0, [&](float &score, int column, int r) {
                score = fmaf(fabsf(fmaf((float)-column, key_step, distances[r])), -slope, score * left.scale);
            });
            left.scale = 1.0f;
            if (features() & ADDS_MASK && flags & MASKED_KEY_TILE)
                apply_additive_mask(params, scores, Rows{*this, view}, first_key, !partly);
        }
        int new_tokens =
            FALLBACK && features() & HIDES_BY_TREE ? current_tile().seq.kv_len - current_tile().seq.q_len : 0;
        ::mask_scores(params, scores, Rows{*this, view}, first_key, new_tokens, partly, flags & MASKED_KEY_TILE);
        if (FALLBACK && partly && features() & HAS_UNEVEN_ROWS) mask_uneven_rows(first_key);
    }

    // Chunked attention and strided keys: `VisibleRange` moves by one key per row.
    __device__ __forceinline__ void mask_uneven_rows(int first_key) {
        const PrefillTile &tile = current_tile();
        int within = first_key + 2 * (lane & 3), starts[2], ends[2]; // relative to this thread's first key
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int token = tile.first_token + row() + 8 * r;
            starts[r] = visible_start(params, tile.seq, token) - within;
            ends[r] = visible_end(params, tile.seq, token) - within;
        }
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            if (column < starts[r] || column >= ends[r]) score = -INF;
        });
    }

    // Probabilities of the scores relative to the row max, and their sums.
    __device__ __forceinline__ void exponentiate(const ExponentTerms &left, float unit, bool polynomial, bool large,
                                                 float (&sums)[2]) {
        float scale = left.scale * unit, add[2] = {row_max[0] * -unit, row_max[1] * -unit};
        if (polynomial) {
            const SoftcapPolynomial cap = shared.cap;
            exponentiate(sums, [&](float score, int, int r) {
                float square = score * score;
                return fmaf(score, fmaf(square, fmaf(square, cap.fifth, cap.third), cap.first), add[r]);
            });
        } else if (FALLBACK && left.steps) {
            // Distances are exact, and the bias is added to the maximum in one rounding: far keys have large biases,
            // whose rounding errors must not reach near keys.
            float distance = opaque(left.distance);
            exponentiate(sums, [&](float score, int column, int r) {
                float even = fmaf((float)(column / 2 * 2 - 8 * r) - distance, left.step, add[r]);
                return fmaf(score, scale, column % 2 ? even + left.step : even);
            });
        } else if (large) {
            exponentiate(sums, [&](float score, int, int r) {
                float difference = __fadd_rn(__fmul_rn(score, left.scale), -row_max[r]);
                return FALLBACK ? difference * unit : difference;
            });
        } else {
            exponentiate(sums, [&](float score, int, int r) { return fmaf(score, scale, add[r]); });
        }
    }

    // Recomputes the row max over this K tile and the previous ones, and rescales sums and accumulators to it. Returns
    // whether `is_large` holds for a maximum of the warp: exponents then have to be differences of rounded scores.
    __device__ __forceinline__ bool update_max(const TileView &view, const ExponentTerms &left, float unit,
                                               bool first) {
        float factor[2], all[2], most[2][2] = {{-INF, -INF}, {-INF, -INF}};
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            most[r][column % 2] = fmaxf(most[r][column % 2], score);
        });
        bool moves = LAZY_MAX;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            all[r] = fmaxf(most[r][0], most[r][1]) * left.scale;
            moves |= view.row_valid[r] && (all[r] - row_max[r] > RESCALE_THRESHOLD || has_large_max(r));
        }
        if (!LAZY_MAX && !__any_sync(~0u, moves)) return false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            all[r] = fmaxf(all[r], __shfl_xor_sync(~0u, all[r], 1));
            all[r] = fmaxf(all[r], __shfl_xor_sync(~0u, all[r], 2));
            all[r] = fmaxf(all[r], row_max[r]);
        }
        bool up = false;
#pragma unroll
        for (int r = 0; r < 2; r++) up |= view.row_valid[r] && !first && all[r] - row_max[r] > RESCALE_THRESHOLD;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factor[r] = exp2_fast((row_max[r] - all[r]) * unit);
            row_max[r] = all[r];
            row_sum[r] *= factor[r];
        }
        bool large = (view.row_valid[0] && has_large_max(0)) || (view.row_valid[1] && has_large_max(1));
        // Large maxima are looked at again with all keys.
        rising = LAZY_MAX && __any_sync(~0u, up || large);
        large = (!LAZY_MAX || rising) && __any_sync(~0u, large);
        if (!first) rescale(out, factor);
        if (FALLBACK && (features() & (CAPS | SLOPES | ADDS_MASK)) == CAPS) {
            float least = shared.cap.least, most = shared.cap.most;
            auto allowed = [&](int r) { return !view.row_valid[r] || (row_max[r] >= least && row_max[r] <= most); };
            by_polynomial = __all_sync(~0u, allowed(0) && allowed(1));
        }
        return large;
    }

    // The max of a row that has seen no key is the lowest float; an additive mask may also hold that number.
    __device__ __forceinline__ bool has_large_max(int r) const {
        return is_large(row_max[r]) && ((FALLBACK && features() & ADDS_MASK) || row_max[r] > -MAX_FLOAT);
    }

    // Exponentiates the scores: `exponent` gives each exponent of 2. Returns the sums of the probabilities.
    template <class Exponent> __device__ __forceinline__ void exponentiate(float (&sums)[2], Exponent exponent) {
        float each[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    pair[e] = exp2_fast(exponent(scores[j][2 * r + e], 8 * j + e, r));
                    each[r][e] += pair[e];
                }
                probs[j / 2][j % 2 * 2 + r] = E::pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int r = 0; r < 2; r++) sums[r] = each[r][0] + each[r][1];
    }

    __device__ __forceinline__ void zero_invisible_values(int first_key, const PrefillTile &tile) const {
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
        mma_qk();
        warp_scheduler_barrier_arrive();
        wait_scores<0>();
        return flags;
    }

    // P V of the last K tile, and the epilogue.
    __device__ __forceinline__ void finish_tile(int first_key) {
        release(shared.query_empty[query.index][warpgroup]);
        query.advance();
        hopper::mbarrier_wait(shared_address(&shared.value_full[value.index]), value.phase);
        zero_invisible_values(first_key, current_tile());
        mma_pv();
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
        mma_qk();
        hopper::mbarrier_wait(shared_address(&shared.value_full[value.index]), value.phase);
        zero_invisible_values(first_key, current_tile());
        mma_pv();
        warp_scheduler_barrier_arrive();
        wait_scores<1>();
        return flags;
    }

    __device__ __forceinline__ void run() {
        // Through a shuffle, so that the compiler does not recompute it for every K tile.
        kept_features = KEEPS_FEATURES ? __shfl_sync(~0u, score_features(params), 0) : 0;
        if (warpgroup == CONSUMERS - 1) hopper::named_barrier_arrive(WARP_SCHEDULER_BARRIER, 256);
        TileView view;
        if (!next_tile(view)) return;
        consumer_mainloop(*this, view);
        if (OUT_STAGED && warp == 0 && lane == 0) hopper::tma_store_wait();
    }

    // Epilogue: adds the sink, normalizes, and writes output and LSE.
    __device__ __forceinline__ void epilogue(const PrefillTile &facts) {
        const PrefillTile tile = facts;
        State states[2] = {{row_max[0], quad_sum(row_sum[0])}, {row_max[1], quad_sum(row_sum[1])}};
        float value_scale = 1.0f;
        if constexpr (HAS_CODES)
            value_scale = head_scale(cache->value_scales, cache->value_scale_strides, tile.kv_head);
        finalize_rows(params, tile, row(), states, lane % 4 == 0, value_scale, out);
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
                store_8(params, tile, 64 * warpgroup + row, 8 * chunk, hopper::ld_shared_v4(to.chunk(row, chunk)));
            }
        } else if (warp == 0 && lane == 0) {
#pragma unroll 1
            for (int c = 0; c < VALUE_CHUNKS; c++)
                hopper::tma_store(maps.out, to.chunk(0, 8 * c), c * 64, tile.head,
                                  tile.seq.q_start + tile.first_token + 64 * warpgroup,
                                  params.cu_seqlens_q ? 0 : tile.sequence);
            hopper::tma_store_commit();
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill,
            const __grid_constant__ TensorMaps maps
#if CACHE
            ,
            const __grid_constant__ CacheParameters cache
#endif
    ) {
#if CACHE
    const CacheParameters *storage = &cache;
#else
    const CacheParameters *storage = 0;
#endif
    Shared &shared = *(Shared *)dynamic_shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < QUERY_STAGES; i++)
            for (int w = 0; w < CONSUMERS; w++) {
                mbarrier_init(shared.query_full[i][w], 1);
                mbarrier_init(shared.query_empty[i][w], 4);
            }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared.key_full[i], HAS_CODES ? 4 : 1);
            mbarrier_init(shared.key_empty[i], 4 * CONSUMERS);
            mbarrier_init(shared.value_full[i], HAS_CODES ? 4 : 1);
            mbarrier_init(shared.value_empty[i], 4 * CONSUMERS);
        }
        if constexpr (HAS_CODES) {
            shared.key_codes.init();
            shared.value_codes.init();
        }
        shared.queue.init(4 * (CONSUMERS + CONVERTERS) + 3);
        hopper::fence_mbarrier_init();
        if (FALLBACK && params.softcap != 0.0f) shared.cap = softcap_polynomial(params);
        hopper::prefetch_tensor_map(maps.query);
        hopper::prefetch_tensor_map(maps.key);
        hopper::prefetch_tensor_map(maps.value);
        hopper::prefetch_tensor_map(maps.out);
    }
    __syncthreads();
    // Producers need few registers; consumers get the rest.
    if (threadIdx.x < 128) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned base = shared_address(dynamic_shared);
        if (warp == 0) {
            Producer<true>{params, prefill, maps.key, shared, base, lane}.run();
        } else if (warp == 1) {
            Producer<false>{params, prefill, maps.value, shared, base, lane}.run();
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
        Converter{cache, shared, shared_address(dynamic_shared), (int)threadIdx.x - 128}.run();
#endif
    } else {
        hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Consumer consumer = {params,
                             prefill,
                             maps,
                             storage,
                             shared,
                             shared_address(dynamic_shared),
                             warp / 4 - 1 - CONVERTERS,
                             warp % 4,
                             (int)threadIdx.x % 32};
        consumer.run();
    }
}
