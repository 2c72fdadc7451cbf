// The skeleton of the warp-specialized Hopper prefill kernels: the queue of tile descriptors, the scheduler warp, the
// producers' loops over tiles and K tiles, and the consumers' mainloop and epilogue.
//
// From the module: ELEMENT_TYPE, FALLBACK, TILE_ROWS, TILE_KEYS.
#pragma once
#include "hopper/prefill_hopper.cuh"

constexpr int TILE_STAGES = 3; // tile descriptors: previous, current and next

// Tiles on their way from the scheduler warp to producers and consumers, in shared memory.
struct TileQueue {
    unsigned long long full[TILE_STAGES], empty[TILE_STAGES];
    unsigned long long requested; // the producer is about to load a tile's last K tile
    TileDescriptor tiles[TILE_STAGES];

    // `readers`: warps that release every tile.
    __device__ __forceinline__ void init(int readers) {
        mbarrier_init(requested, 1);
        for (int i = 0; i < TILE_STAGES; i++) {
            mbarrier_init(full[i], 1);
            mbarrier_init(empty[i], readers);
        }
    }
    __device__ __forceinline__ const TileDescriptor &wait(const PipelineState<TILE_STAGES> &stage) const {
        hopper::mbarrier_wait(shared_address(&full[stage.index]), stage.phase);
        return tiles[stage.index];
    }
    __device__ __forceinline__ void release(int stage, int lane) {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&empty[stage]));
    }
    // By one lane: lets the scheduler warp claim the next tile.
    __device__ __forceinline__ void request() { hopper::mbarrier_arrive(shared_address(&requested)); }
};

// The scheduler warp. It claims the next tile only when the last K tile of this one is being loaded, so that a busy CTA
// does not hoard work and the last tiles go to the CTAs that are free first.
struct Scheduler {
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    TileQueue &queue;
    int lane;
    bool stores_empty; // whether this CTA stores the rows of fully masked tiles

    // Schedules tiles from `number` on; `claim` returns the number of the next one, to all lanes.
    template <class Claim> __device__ __forceinline__ void run(unsigned number, Claim claim) {
        PipelineState<TILE_STAGES> stage;
        TileCursor cursor = {0, 0};
        unsigned requested_phase = 0;
#pragma unroll 1
        for (;;) {
            PrefillTile tile;
            KeyTileRange range;
            bool found = find_tile_range<TILE_ROWS, TILE_KEYS>(params, prefill, number, cursor, tile, range);
            if (found && range.last < range.first) {
                if (stores_empty) store_empty_tile(params, tile, prefill.splits, lane);
            } else {
                hopper::mbarrier_wait(shared_address(&queue.empty[stage.index]), stage.phase ^ 1);
                if (lane == 0) {
                    queue.tiles[stage.index] = describe_tile(params, tile, found, range);
                    if (found) find_scales(params, prefill, queue.tiles[stage.index].tile);
                    hopper::mbarrier_arrive(shared_address(&queue.full[stage.index]));
                }
                __syncwarp();
                stage.advance();
                if (!found) break;
                hopper::mbarrier_wait(shared_address(&queue.requested), requested_phase);
                requested_phase ^= 1;
            }
            number = claim();
        }
    }
};

// A producer warp's loop over tiles. Descriptors stay in shared memory, to save producer registers.
template <class Body> static __device__ __forceinline__ void for_each_tile(TileQueue &queue, int lane, Body body) {
    PipelineState<TILE_STAGES> stage;
#pragma unroll 1
    for (;;) {
        const TileDescriptor &descriptor = queue.wait(stage);
        if (!descriptor.more) break;
        body(descriptor);
        __syncwarp();
        queue.release(stage.index, lane);
        stage.advance();
    }
}

// The K tiles of a tile in the order of loading: see find_tile_range.
struct KeyTileOrder {
    const TileDescriptor &descriptor;
    const unsigned char *map;
    int first, current, following;

    __device__ __forceinline__ KeyTileOrder(const PrefillParameters &prefill, const TileDescriptor &descriptor)
        : descriptor(descriptor), map(FALLBACK ? tile_map_row(prefill, descriptor.tile, TILE_ROWS) : nullptr),
          first(descriptor.first_keys), current(descriptor.initial()), following(0) {}

    __device__ __forceinline__ bool is_done() const { return current < first; }
    __device__ __forceinline__ bool is_last() const { return following < first; }
    __device__ __forceinline__ void find_following(int lane) {
        following = last_unmasked_tile(map, current - 1, first, lane);
        if constexpr (FALLBACK) begin_second_round(descriptor, current, following, first);
    }
    // The flags of the pipeline stage that the current K tile goes to.
    __device__ __forceinline__ int stage_flags() const {
        return current << KEY_TILE_SHIFT |
               (!map || (MapKind)__ldcg(map + current) == MapKind::Mixed ? MASKED_KEY_TILE : 0) |
               (is_last() ? LAST_KEY_TILE : 0);
    }
};

static __device__ __forceinline__ int first_key_of(int flags) { return (flags >> KEY_TILE_SHIFT) * TILE_KEYS; }

// A consumer's position in the queue of tiles: the current tile; before the first tile at the start.
struct TileReader {
    PipelineState<TILE_STAGES> stage = {TILE_STAGES - 1, 1};

    // Waits for the next tile; false if there is none. `first_row`: the consumer's first row within the tile. `view`:
    // what the consumer keeps in registers; the other facts stay in shared memory until the tile is released.
    __device__ __forceinline__ bool next(const TileQueue &queue, VisibleRange &view, int first_row) {
        stage.advance();
        const TileDescriptor &descriptor = queue.wait(stage);
        if (!descriptor.more) return false;
        view.first_row_start = descriptor.first_row_start + first_row;
        view.first_row_end = descriptor.first_row_end + first_row;
        view.keys = descriptor.tile.seq.kv_len;
        return true;
    }
    __device__ __forceinline__ const PrefillTile &current(const TileQueue &queue) const {
        return queue.tiles[stage.index].tile;
    }
    // After the epilogue.
    __device__ __forceinline__ void release(TileQueue &queue, int lane) const { queue.release(stage.index, lane); }
};

// The mainloop of a consumer warpgroup, over tiles from that of `view` on, and over the K tiles of each. `Consumer` has
// the steps: scores are computed one K tile ahead, and the last K tile of a tile has its P V to itself.
template <class Consumer, class View>
static __device__ __forceinline__ void consumer_mainloop(Consumer &consumer, View &view) {
    bool first = true;                 // K tile of this tile
    int flags = consumer.begin_tile(); // stage flags of the current scores
#pragma unroll 1
    for (;;) {
        consumer.release_keys();
        consumer.softmax_step(view, flags, first);
        int first_key = first_key_of(flags);
        if (flags & LAST_KEY_TILE) {
            consumer.finish_tile(first_key);
            __syncwarp();
            consumer.tiles.release(consumer.shared.queue, consumer.lane);
            if (!consumer.next_tile(view)) break;
            flags = consumer.begin_tile();
            first = true;
        } else {
            flags = consumer.next_key_tile(first_key);
            first = false;
        }
    }
}

template <int N> static __device__ __forceinline__ void rescale(float (&out)[N], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) out[i] *= factor[i / 2 % 2];
}

// 0 * NaN = NaN, so a warpgroup zeroes the V rows that no query of the sequence can see. `values`: COUNT rows from key
// `first_key` on, in `bytes` of shared memory. `barrier`: the warpgroup's named barrier.
template <int COUNT> static __device__ __forceinline__ void
zero_invisible_values(const PrefillTile &tile, int first_key, unsigned values, int bytes, int barrier) {
    if (first_key >= tile.seq_start && first_key + COUNT <= tile.seq_end) return;
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < bytes / 16; i += 128) {
        int key = first_key + i / 8 % COUNT;
        if (key < tile.seq_start || key >= tile.seq_end) st_shared_v4(values + i * 16, make_uint4(0, 0, 0, 0));
    }
    hopper::fence_proxy_async();
    hopper::named_barrier_sync(barrier, 128);
}

// The rows of a thread: `upper` and `upper` + 8 of the tile.
struct RowPair {
    int upper;
    bool stores_lse; // false where another lane or warpgroup has the same rows
};

// The epilogue of a thread's rows: adds the sink, normalizes the accumulators, and stores the LSE.
template <int N> static __device__ __forceinline__ void finalize_rows(const AttentionParameters &params,
                                                                      const PrefillTile &tile, RowPair rows,
                                                                      const State (&states)[2], float (&out)[N]) {
    float first[2], second[2];
    Sink sink = load_sink(params, tile.head, unit_of(params));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool wants_lse = params.lse.pointer && rows.stores_lse && rows.upper + 8 * r < tile.tokens;
        FinalizedRow finalized = finalize_row(params, states[r], sink, unit_of(params), wants_lse);
        first[r] = finalized.factors.first, second[r] = finalized.factors.second * tile.value_scale;
        if (wants_lse) store_lse(params, tile, tile.head, tile.first_token + rows.upper + 8 * r, finalized.lse);
    }
    if (first[0] != 1.0f || first[1] != 1.0f) rescale(out, first);
    rescale(out, second);
}
