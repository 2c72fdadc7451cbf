// The producer warps of Hopper prefill: TMA loads of keys, values and queries, and the converter warpgroup of 8-bit
// caches.
#pragma once
#include "common/paging.cuh"
#include "hopper/key_scales.cuh"
#include "hopper/prefill_sm90_shape.cuh"

// With paged KV, each lane loads one TMA box: the place of its first key; token -1 if there is nothing to load. Boxes
// without visible keys are skipped: their page-table entries may be invalid.
static __device__ __forceinline__ KeyPlace find_box(const AttentionParameters &params, const PrefillParameters &prefill,
                                                    const PrefillTile &tile, int key_tile, int lane) {
    KeyPlace box = {0, -1};
    int within = lane * prefill.box_keys, key = key_tile * KEYS + within;
    if (params.block_size && within < KEYS && key + prefill.box_keys > tile.seq_start && key < tile.seq_end)
        find_paged_place(params, tile, key, box);
    return box;
}

// The TMA producer warp of keys, or of values.
template <bool IS_KEYS> struct Producer {
    // A TMA box has 64 dims of 16 bits, or a whole row of codes, of the keys of a K tile or of a part of a page.
    static constexpr int CHUNKS = HAS_CODES ? 1 : IS_KEYS ? KEY_CHUNKS : VALUE_CHUNKS;
    static constexpr int ROW_BYTES = !HAS_CODES ? 128 : IS_KEYS ? HEAD_DIM : VALUE_DIM; // of a box
    static constexpr int STAGES_OFFSET = HAS_CODES ? CODES_OFFSET + (IS_KEYS ? 0 : KEY_CODE_BYTES)
                                         : IS_KEYS ? KEY_OFFSET
                                                   : VALUE_OFFSET;
    static constexpr int TERMS = IS_KEYS ? KEY_TERMS : 1;
    static constexpr int STAGE_BYTES = TERMS * KEYS * CHUNKS * ROW_BYTES;
    static constexpr int SCALE_BYTES = IS_KEYS && SCALES_KEYS ? KEY_SCALE_BYTES : 0; // beside a stage
    static constexpr int BUFFERS = HAS_CODES ? 1 : STAGES;
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const TensorMap &map;
    Shared &shared;
    unsigned base; // of shared memory
    int lane;

    __device__ __forceinline__ KeyPlace find_box(const PrefillTile &tile, int key_tile) const {
        return ::find_box(params, prefill, tile, key_tile, lane);
    }

    // By one lane: starts the TMA loads of a box of keys.
    __device__ __forceinline__ void load_box(unsigned to, unsigned barrier, int kv_head, int token,
                                             int sequence) const {
#pragma unroll 1
        for (int term = 0; term < TERMS; term++)
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++)
                hopper::tma_load(to + (term * CHUNKS + c) * KEYS * ROW_BYTES, map, barrier,
                                 {c * 64, kv_head * TERMS + term, token, sequence});
    }

    // Starts the TMA loads of a K tile.
    __device__ __forceinline__ void fetch(const PrefillTile &tile, int key_tile, KeyPlace box, int stage) const {
        unsigned to = base + STAGES_OFFSET + stage * STAGE_BYTES, barrier = shared_address(&full(stage));
        if (!params.block_size) {
            if (lane == 0) {
                hopper::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES + SCALE_BYTES);
                if constexpr (SCALE_BYTES > 0)
                    fetch_key_scales(params, prefill.each_key, tile, key_tile,
                                     base + KEY_SCALES_OFFSET + stage * SCALE_BYTES, barrier);
                load_box(to, barrier, tile.kv_head, tile.seq.kv_start + key_tile * KEYS,
                         params.cu_seqlens_k ? 0 : tile.sequence);
            }
            return;
        }
        unsigned boxes = __ballot_sync(~0u, box.token >= 0);
        if (lane == 0)
            hopper::mbarrier_arrive_expect_tx(barrier, __popc(boxes) * prefill.box_keys * TERMS * CHUNKS * ROW_BYTES);
        if (box.token >= 0)
            load_box(to + lane * prefill.box_keys * ROW_BYTES, barrier, tile.kv_head, box.token,
                     page_of(params, box.batch));
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
            KeyPlace box = find_box(tile, order.current);
#pragma unroll 1
            while (!order.is_done()) {
                order.find_following(lane);
                KeyPlace following_box = find_box(tile, order.following);
                int stage_flags = order.stage_flags();
                if (IS_KEYS && order.is_last() && lane == 0) shared.queue.request();
                hopper::mbarrier_wait(shared_address(&empty(stage.index)), stage.phase ^ 1);
                if (IS_KEYS && lane == 0) flags(stage.index) = stage_flags;
                fetch(tile, order.current, box, stage.index);
                stage.advance();
                order.current = order.following;
                box = following_box;
            }
        });
    }
};

#if CACHE == 1 // Bytes: see HAS_CODES
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

// The TMA producer warp of queries.
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
                hopper::tma_load(to + c * 64 * 128, map, barrier,
                                 {c * 64, tile.head, tile.seq.q_start + tile.first_token + 64 * w,
                                  params.cu_seqlens_q ? 0 : tile.sequence});
        }
        query.advance();
    });
}
