// Attention of the rows of prefix groups to their shared prefix on Hopper.
//
// A CTA takes one work item (prefill/prefix_item.cuh) after the other. Warp-specialized: two consumer warpgroups of 64
// rows each, a TMA producer warp of keys and one of values. Rows are of several sequences, so consumers copy their
// queries row by row. Q K^T of the next K tile and P V of the previous one overlap the softmax.
//
// By programmatic dependent launch a CTA starts where those of decode have left room for it, and waits for decode only
// when it has finished.
//
// Plain scores and exact head dims only, and a positive scale, because maxima are taken before it is applied.
#include "hopper/prefix_sm90_shape.cuh"
#include "hopper/skeleton.cuh"
#include "prefill/prefix_item.cuh"
#include "prefill/prefix_merge.cuh"

struct Shared {
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    PrefixItem item;
    PrefixKeys keys[CONSUMERS]; // the same for all
};

static_assert(sizeof(Shared) <= QUERY_OFFSET && ROWS_OFFSET + TILE_ROWS * sizeof(PrefixRow) == SHARED_BYTES,
              "as the host has it");

static __device__ __forceinline__ PrefixRow *prefix_rows() { return (PrefixRow *)(dynamic_shared + ROWS_OFFSET); }

// The K tiles of an item.
struct KeyTiles {
    int first, end;
};

// Calls `body(K tiles)` for every item of this CTA. All warps of the CTA take part. Consumers look up the item and its
// rows; unless windows hide keys of the prefix, producers do not wait for the rows.
template <bool IS_CONSUMER, class Body> static __device__ __forceinline__ void
for_each_item(const AttentionParameters &params, const PrefixParameters &prefix, Shared &shared, Body body) {
    int items = load_totals(prefix).items;
    bool has_window = params.window.left < params.kv_len;
#pragma unroll 1
    for (int number = blockIdx.x; number < items; number += gridDim.x) {
        // Every warp has finished the previous item.
        if (number != blockIdx.x) hopper::named_barrier_sync(ITEM_BARRIER, THREADS);
        if (IS_CONSUMER && threadIdx.x < TILE_ROWS) {
            PrefixItem item = find_item(prefix, load_totals(prefix).groups, number);
            if (threadIdx.x == 0) shared.item = item;
            hopper::named_barrier_sync(ITEM_BARRIER, THREADS);
            find_rows<false>(params, prefix, item, prefix_rows());
        } else {
            hopper::named_barrier_sync(ITEM_BARRIER, THREADS);
        }
        if (IS_CONSUMER) {
            hopper::named_barrier_sync(CONSUMER_BARRIER, 128 * CONSUMERS);
            PrefixKeys keys = find_keys(shared.item, prefix_rows());
            if (threadIdx.x % 128 == 0) shared.keys[threadIdx.x / 128] = keys;
        }
        int start = shared.item.start, end = shared.item.end;
        if (has_window) {
            hopper::named_barrier_sync(ITEM_BARRIER, THREADS);
            start = shared.keys[0].any_start;
            end = max(start, shared.keys[0].any_end);
        }
        KeyTiles tiles = {start / KEYS, (end + KEYS - 1) / KEYS};
        if (start == end) tiles.end = tiles.first;
        body(tiles);
    }
}

// The TMA producer warp of keys, or of values.
template <bool IS_KEYS> struct Producer {
    static constexpr int CHUNKS = IS_KEYS ? KEY_CHUNKS : VALUE_CHUNKS, STAGE_BYTES = KEYS * CHUNKS * 128;
    const AttentionParameters &params;
    const PrefixParameters &prefix;
    const TensorMap &map;
    Shared &shared;
    unsigned base; // of shared memory
    int lane;
    int box_shift; // log2 of the keys per TMA box

    // The key of this lane's box within a K tile, and its chunk of dims.
    __device__ __forceinline__ int own_key() const { return (lane << box_shift) & (KEYS - 1); }
    __device__ __forceinline__ int own_chunk() const { return (lane << box_shift) / KEYS; }

    // The place of this lane's box of a K tile. Page-table entries past the last visible key are not read.
    __device__ __forceinline__ KeyPlace find_box(int sequence, int key_tile, int last_key) const {
        int key = key_tile * KEYS + own_key();
        int index = min(page_index(params, key), page_index(params, last_key));
        int slot = page_slot(params, key, index);
        KeyPlace place;
        place.token = slot < params.block_size ? slot : 0;
        place.batch = page_table(params, sequence)[index];
        return place;
    }

    __device__ __forceinline__ void run() {
        PipelineState<STAGES> stage;
        for_each_item<false>(params, prefix, shared, [&](const KeyTiles &tiles) {
            if (tiles.first == tiles.end) return;
            int sequence = __ldcg(&shared.item.group->sequence), kv_head = shared.item.kv_head;
            int last_key = shared.item.end - 1;
            KeyPlace box = find_box(sequence, tiles.first, last_key);
#pragma unroll 1
            for (int key_tile = tiles.first; key_tile < tiles.end; key_tile++) {
                KeyPlace next = box;
                if (key_tile + 1 < tiles.end) next = find_box(sequence, key_tile + 1, last_key);
                unsigned barrier =
                    shared_address(IS_KEYS ? &shared.key_full[stage.index] : &shared.value_full[stage.index]);
                hopper::mbarrier_wait(
                    shared_address(IS_KEYS ? &shared.key_empty[stage.index] : &shared.value_empty[stage.index]),
                    stage.phase ^ 1);
                if (lane == 0) hopper::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
                __syncwarp();
                if (own_chunk() < CHUNKS) {
                    unsigned to = base + (IS_KEYS ? KEY_OFFSET : VALUE_OFFSET) + stage.index * STAGE_BYTES +
                                  own_chunk() * KEYS * 128 + own_key() * 128;
                    hopper::tma_load(to, map, barrier,
                                     {own_chunk() * 64, kv_head, box.token, page_of(params, box.batch)});
                }
                stage.advance();
                box = next;
            }
        });
    }
};

// A consumer warpgroup. A thread has two rows, 8 apart: see Wgmma.
struct Consumer {
    const AttentionParameters &params;
    const PrefixParameters &prefix;
    Shared &shared;
    unsigned base;
    int warpgroup, warp, lane; // index of the warpgroup, and of the warp in it
    float factor;              // from scores to exponents of 2

    PipelineState<STAGES> key, value;
    float scores[KEYS / 8][4];
    unsigned probs[VALUE_STEPS][4]; // probabilities: operand A of P V
    float out[VALUE_DIM / 2];
    // Online softmax: the row max, by which RESCALE_THRESHOLD may be exceeded, and this thread's part of the row sum.
    float row_max[2], row_sum[2];
    bool large; // whether a maximum of the warp's is: see `is_large`

    __device__ __forceinline__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&barrier));
    }
    __device__ __forceinline__ void release_keys() {
        release(shared.key_empty[key.index]);
        key.advance();
    }
    __device__ __forceinline__ void release_values() {
        release(shared.value_empty[value.index]);
        value.advance();
    }
    __device__ __forceinline__ void wait_keys() const {
        hopper::mbarrier_wait(shared_address(&shared.key_full[key.index]), key.phase);
    }
    __device__ __forceinline__ void wait_values() const {
        hopper::mbarrier_wait(shared_address(&shared.value_full[value.index]), value.phase);
    }

    // Copies the queries of this warpgroup's rows; zeros for rows that the item does not have.
    __device__ __forceinline__ void load_queries() const {
        constexpr int CHUNKS = HEAD_DIM / 8; // of 16 bytes
        SharedTile<64> to = {base + QUERY_OFFSET + warpgroup * QUERY_BYTES};
        int rows = shared.item.rows - 64 * warpgroup;
#pragma unroll 4
        for (int i = threadIdx.x % 128; i < 64 * CHUNKS; i += 128) {
            int row = i / CHUNKS, chunk = i % CHUNKS;
            const unsigned short *from =
                (const unsigned short *)params.query.pointer + prefix_rows()[64 * warpgroup + row].query + 8 * chunk;
            cp_async(to.chunk(row, chunk), from, row < rows ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        hopper::fence_proxy_async();
        hopper::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
    }

    __device__ __forceinline__ void mma_qk() {
        SharedTile<64> queries = {base + QUERY_OFFSET + warpgroup * QUERY_BYTES};
        SharedTile<KEYS> keys = {base + KEY_OFFSET + key.index * KEY_BYTES};
        float (&sum)[KEYS / 2] = *(float (*)[KEYS / 2]) & scores;
        warpgroup_fence_operand(sum);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            Wgmma<KEYS>::mma_ss(sum, queries.k_major(step), keys.k_major(step), step > 0);
        hopper::wgmma_commit();
    }

    __device__ __forceinline__ void mma_pv() {
        SharedTile<KEYS> values = {base + VALUE_OFFSET + value.index * VALUE_BYTES};
        warpgroup_fence_operand(out);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
            Wgmma<VALUE_DIM>::mma_rs(out, probs[step], values.mn_major(step));
        hopper::wgmma_commit();
    }

    template <int PENDING> __device__ __forceinline__ void wait_scores() {
        hopper::wgmma_wait<PENDING>();
        warpgroup_fence_operand(*(float (*)[KEYS / 2]) & scores);
    }

    // Hides keys that a row does not see.
    __device__ __forceinline__ void mask_scores(int first_key) {
        int lane_key = first_key + 2 * (lane & 3), starts[2], ends[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const RowFacts &facts = prefix_rows()[row() + 8 * r].facts;
            starts[r] = facts.start - lane_key;
            ends[r] = facts.end - lane_key;
        }
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            if (column < starts[r] || column >= ends[r]) score = -INF;
        });
    }

    // The maxima of this thread's rows over the K tile.
    __device__ __forceinline__ void find_maxima(float (&tile_max)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
#pragma unroll
            for (int j = 1; j < KEYS / 8; j++) x = fmaxf(x, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
            tile_max[r] = quad_max(x);
        }
    }

    // Rescales sums and accumulators where a maximum rose by more than RESCALE_THRESHOLD.
    __device__ __forceinline__ void update_max(const float (&tile_max)[2]) {
        bool rises[2] = {(tile_max[0] - row_max[0]) * factor > RESCALE_THRESHOLD,
                         (tile_max[1] - row_max[1]) * factor > RESCALE_THRESHOLD};
        if (!__any_sync(~0u, rises[0] || rises[1])) return;
        float factors[2];
        large = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factors[r] = rises[r] ? exp2_fast((row_max[r] - tile_max[r]) * factor) : 1.0f;
            if (rises[r]) row_max[r] = tile_max[r];
            large |= row_max[r] != -INF && is_large(row_max[r] * factor);
            row_sum[r] *= factors[r];
        }
        rescale(out, factors);
        large = __any_sync(~0u, large);
    }

    // Exponentiates the scores relative to the row max, and adds them to the row sums.
    __device__ __forceinline__ void exponentiate() {
        float reference[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            float max = row_max[r] == -INF ? 0.0f : row_max[r];
            reference[r] = large ? 0.0f : max * -factor;
            if (!large) continue;
            // Differences first: see `is_large`.
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                scores[j][2 * r] -= max;
                scores[j][2 * r + 1] -= max;
            }
        }
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = exp2_fast(fmaf(scores[j][2 * r], factor, reference[r]));
                float y = exp2_fast(fmaf(scores[j][2 * r + 1], factor, reference[r]));
                row_sum[r] += x + y;
                probs[j / 2][j % 2 * 2 + r] = E::pack(x, y);
            }
    }

    // 0 * NaN = NaN, so V rows that no query of the item can see are zeroed.
    __device__ __forceinline__ void zero_invisible_values(int first_key) const {
        PrefillTile tile;
        tile.seq_start = shared.keys[warpgroup].any_start;
        tile.seq_end = shared.keys[warpgroup].any_end;
        ::zero_invisible_values<KEYS>(tile, first_key, base + VALUE_OFFSET + value.index * VALUE_BYTES, VALUE_BYTES,
                                      WARPGROUP_BARRIER + warpgroup);
    }

    // Takes part in the pipelines without rows.
    __device__ __forceinline__ void skip(const KeyTiles &tiles) {
#pragma unroll 1
        for (int key_tile = tiles.first; key_tile < tiles.end; key_tile++) {
            wait_keys();
            release_keys();
            wait_values();
            release_values();
        }
    }

    __device__ __forceinline__ void clear() {
        large = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = -INF;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] = 0.0f;
    }

    // Mainloop over the K tiles of an item. Those from `whole.first` to before `whole.end` are seen by all rows.
    __device__ __forceinline__ void mainloop(KeyTiles tiles, KeyTiles whole) {
        wait_keys();
        mma_qk();
        wait_scores<0>();
        bool first = true;
#pragma unroll 1
        for (int key_tile = tiles.first;; key_tile++) {
            release_keys();
            bool partly = key_tile < whole.first || key_tile >= whole.end;
            if (partly) mask_scores(key_tile * KEYS);
            float tile_max[2];
            find_maxima(tile_max);
            // P V of the previous K tile.
            hopper::wgmma_wait<0>();
            warpgroup_fence_operand(out);
            if (!first) release_values();
            first = false;
            update_max(tile_max);
            exponentiate();
            if (key_tile + 1 == tiles.end) break;
            wait_keys();
            mma_qk();
            wait_values();
            if (partly) zero_invisible_values(key_tile * KEYS);
            mma_pv();
            wait_scores<1>();
        }
        wait_values();
        zero_invisible_values((tiles.end - 1) * KEYS);
        mma_pv();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
        release_values();
    }

    // Epilogue of an item: stores the states of this thread's rows.
    __device__ __forceinline__ void store_states() const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(row_sum[r]);
            if (row() + 8 * r >= shared.item.rows) continue;
            long long state = shared.item.first_state + row() + 8 * r;
            float max = row_max[r] == -INF ? -INF : row_max[r] * factor;
            if (lane % 4 == 0) ((float2 *)prefix.partial_states)[state] = make_float2(max, sum);
            float *to = (float *)prefix.partial_out + state * VALUE_DIM + 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < VALUE_DIM / 8; j++)
                *(float2 *)(to + 8 * j) = make_float2(out[4 * j + 2 * r], out[4 * j + 2 * r + 1]);
        }
    }

    __device__ __forceinline__ void run() {
        for_each_item<true>(params, prefix, shared, [&](const KeyTiles &tiles) {
            if (64 * warpgroup >= shared.item.rows) {
                skip(tiles);
                return;
            }
            load_queries();
            clear();
            const PrefixKeys &keys = shared.keys[warpgroup];
            KeyTiles whole = {(keys.every_start + KEYS - 1) / KEYS, keys.every_end / KEYS};
            if (tiles.first < tiles.end) mainloop(tiles, whole);
            store_states();
        });
    }
};

extern "C" __global__ void __maxnreg__(LAUNCH_REGISTERS)
    prefix(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefixParameters prefix,
           const __grid_constant__ TensorMap key_map, const __grid_constant__ TensorMap value_map) {
    Shared &shared = *(Shared *)dynamic_shared;
    begin_beside_decode();
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared.key_full[i], 1);
            mbarrier_init(shared.key_empty[i], 4 * CONSUMERS);
            mbarrier_init(shared.value_full[i], 1);
            mbarrier_init(shared.value_empty[i], 4 * CONSUMERS);
        }
        hopper::fence_mbarrier_init();
        hopper::prefetch_tensor_map(key_map);
        hopper::prefetch_tensor_map(value_map);
    }
    __syncthreads();
    unsigned base = shared_address(dynamic_shared);
    if (warp >= 4 * CONSUMERS) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        // Keys per box: what K tiles and pages are both made of.
        int box_shift = __ffs(min(KEYS, params.block_size & -params.block_size)) - 1;
        if (warp == 4 * CONSUMERS) {
            Producer<true>{params, prefix, key_map, shared, base, lane, box_shift}.run();
        } else if (warp == 4 * CONSUMERS + 1) {
            Producer<false>{params, prefix, value_map, shared, base, lane, box_shift}.run();
        } else {
            for_each_item<false>(params, prefix, shared, [](const KeyTiles &) {});
        }
    } else {
        hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer = {params,   prefix,   shared, base,
                             warp / 4, warp % 4, lane,   exponent_scale(params, params.scale)};
        consumer.run();
    }
    end_beside_decode();
}
