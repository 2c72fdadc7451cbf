// Prefill attention on Hopper with short windows: every row sees a few keys, which all fit into shared memory.
//
// A persistent, warp-specialized kernel. An item is 64 rows of tokens of one sequence, for query heads that share a
// key/value head. Items start at positions that are multiples of 64, so that their rows see keys of KEY_BLOCKS blocks
// of 64 keys at most (the host selects this kernel for windows of which that is true). These are loaded once for all
// heads of the item, and each row's softmax is computed at once: there is no loop over K tiles.
//
// A CTA has CONSUMERS consumer warpgroups, which take an item's heads in turns, and one producer warpgroup: a scheduler
// warp, and three TMA producer warps for keys, values and queries. Consumers compute exponentials one after another, so
// that one's exponentials run while the others' wgmmas do.
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK (0), TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES.
// Scores are unmodified, rows have exact dims, and outputs have the inputs' type. The scale is positive.
#include "hopper/skeleton.cuh"
#include "hopper/wgmma.cuh"

constexpr int CONSUMERS = THREADS / 128 - 1, KEY_BLOCKS = 3, KEYS = KEY_BLOCKS * TILE_KEYS;
constexpr int STAGES = 2;                    // items whose keys and values are resident
constexpr int QUERY_SLOTS = 2 * CONSUMERS;   // heads whose queries are
constexpr int QUERY_BYTES = TILE_ROWS * 128; // of a head; so has its output
constexpr int KEY_BYTES = KEYS * 128;        // of an item; so have its values
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 144;
static_assert(HEAD_DIM == 64 && VALUE_DIM == 64 && TILE_ROWS == 64 && TILE_KEYS == 64 && !FALLBACK,
              "written for these");
static_assert(CONSUMERS == 3, "registers are counted for three");

typedef Element<ElementType(ELEMENT_TYPE)> E;

constexpr float MIN_FLOAT = -MAX_FLOAT; // the initial row maximum: finite, so that differences to it are numbers

// An item, as the scheduler warp describes it to producers and consumers. Of `tile`, `head` is the first head,
// `first_token` may be negative: rows before token 0 do not exist.
struct Item {
    PrefillTile tile;
    int more;      // 0: no more items
    int heads;     // from `tile.head` on
    int first_key; // of the first block: a multiple of 64, maybe negative
    // Of the first row, unclamped: row r sees keys from first_row_start + r to first_row_end + r.
    int first_row_start, first_row_end;
};

constexpr int ITEM_STAGES = 3; // previous, current and next

struct Shared {
    unsigned long long query_full[QUERY_SLOTS], query_empty[QUERY_SLOTS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    unsigned long long item_full[ITEM_STAGES], item_empty[ITEM_STAGES];
    unsigned long long requested; // the keys of an item are about to be loaded
    Item items[ITEM_STAGES];
};

constexpr int QUERY_OFFSET = 1024;
constexpr int KEY_OFFSET = QUERY_OFFSET + QUERY_SLOTS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * KEY_BYTES;
constexpr int OUT_OFFSET = VALUE_OFFSET + STAGES * KEY_BYTES;
static_assert(sizeof(Shared) <= QUERY_OFFSET && OUT_OFFSET + CONSUMERS * QUERY_BYTES == SHARED_BYTES,
              "as the host has it");

// Named barriers of each consumer warpgroup.
constexpr int WARPGROUP_BARRIER = 1, TURN_BARRIER = WARPGROUP_BARRIER + CONSUMERS;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

static __device__ __forceinline__ int round_up_64(int x) { return (x + 63) & ~63; }

// Query heads per item: all that share keys, but few if CTAs would share the work unequally.
static __device__ __forceinline__ int heads_per_item(const AttentionParameters &params) {
    constexpr int MIN_ITEMS = 4, FEW_HEADS = 2; // of a CTA, of an item
    long long row_tiles = params.cu_seqlens_q
                              ? (long long)params.query_len / TILE_ROWS + params.batch
                              : (long long)((params.query_len + TILE_ROWS - 1) / TILE_ROWS) * params.batch;
    return row_tiles * params.kv_heads < MIN_ITEMS * gridDim.x ? min(params.group, FEW_HEADS) : params.group;
}

// Looks up item `number` for the whole warp; false if there is none, nor any after it. Sequence by sequence, from the
// first tokens to the last; the key/value heads of the same tokens follow one another.
static __device__ __forceinline__ bool find_item(const AttentionParameters &params, const PrefillParameters &prefill,
                                                 unsigned number, int span, TileCursor &cursor, Item &item) {
    unsigned lane = threadIdx.x & 31, parts = ((unsigned)params.group + span - 1) / span,
             per_tile = params.kv_heads * parts;
    for (;;) {
        if (cursor.sequence >= params.batch) return false;
        int index = cursor.sequence + lane;
        unsigned count = 0;
        if (index < params.batch) {
            SequenceInfo s = load_sequence(params, index);
            if (s.q_len > 0 && s.q_len >= prefill.min_query_len)
                count = ((unsigned)(s.offset & 63) + s.q_len + TILE_ROWS - 1) / TILE_ROWS * per_tile;
        }
        unsigned until = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            unsigned other = __shfl_up_sync(~0u, until, step);
            if (lane >= step) until += other;
        }
        unsigned past = __ballot_sync(~0u, number - cursor.before < until);
        if (past) {
            int found = __ffs(past) - 1;
            cursor.sequence += found;
            cursor.before += __shfl_sync(~0u, until - count, found);
            break;
        }
        cursor.before += __shfl_sync(~0u, until, 31);
        cursor.sequence += 32;
    }
    PrefillTile &tile = item.tile;
    tile.sequence = cursor.sequence;
    tile.seq = load_sequence(params, cursor.sequence);
    unsigned rest = number - cursor.before, row_tile = divide_small(rest, per_tile),
             within = rest - row_tile * per_tile;
    tile.kv_head = divide_small(within, parts);
    unsigned first_head = (within - tile.kv_head * parts) * span;
    tile.head = tile.kv_head * params.group + first_head;
    item.heads = min(span, params.group - (int)first_head);
    tile.first_token = row_tile * TILE_ROWS - (int)(tile.seq.offset & 63);
    tile.tokens = min(TILE_ROWS, tile.seq.q_len - tile.first_token);
    find_key_ranges(params, tile);
    find_scales(params, prefill, tile);
    // Clamped so that rows and columns can be added within 32 bits.
    long long position = tile.seq.offset + tile.first_token, limit = 0x7fffff00;
    item.first_row_start = (int)max(-limit, min(position - params.window.left, limit));
    item.first_row_end = (int)max(-limit, min(position + params.window.right + 1, limit));
    long long first_key = position - (params.window.left + 63) / 64 * 64;
    item.first_key = (int)max((long long)-KEYS, min(first_key, (long long)round_up_64(tile.seq.kv_len)));
    return true;
}

// The scheduler warp: see Scheduler in skeleton.cuh.
static __device__ __forceinline__ void schedule_items(const AttentionParameters &params,
                                                      const PrefillParameters &prefill, Shared &shared, int lane) {
    PipelineState<ITEM_STAGES> stage;
    TileCursor cursor = {0, 0};
    unsigned requested_phase = 0, number = blockIdx.x;
    int span = heads_per_item(params);
#pragma unroll 1
    for (;;) {
        Item item;
        item.more = find_item(params, prefill, number, span, cursor, item);
        hopper::mbarrier_wait(shared_address(&shared.item_empty[stage.index]), stage.phase ^ 1);
        if (lane == 0) {
            shared.items[stage.index] = item;
            hopper::mbarrier_arrive(shared_address(&shared.item_full[stage.index]));
        }
        __syncwarp();
        stage.advance();
        if (!item.more) break;
        hopper::mbarrier_wait(shared_address(&shared.requested), requested_phase);
        requested_phase ^= 1;
        number = __shfl_sync(~0u, lane == 0 ? claim_tile(prefill) : 0, 0);
    }
    if (lane == 0) finish_tile_scheduler(prefill);
}

// A warp's loop over items.
template <class Body> static __device__ __forceinline__ void for_each_item(Shared &shared, int lane, Body body) {
    PipelineState<ITEM_STAGES> stage;
#pragma unroll 1
    for (;;) {
        hopper::mbarrier_wait(shared_address(&shared.item_full[stage.index]), stage.phase);
        const Item &item = shared.items[stage.index];
        if (!item.more) break;
        body(item);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.item_empty[stage.index]));
        stage.advance();
    }
}

// The TMA producer warp of keys, or of values: each lane loads one box. Boxes without keys that some row of the
// sequence sees are left out: page-table entries may be invalid there.
template <bool IS_KEYS>
static __device__ __forceinline__ void fetch_keys(const AttentionParameters &params, const PrefillParameters &prefill,
                                                  const TensorMap &map, Shared &shared, unsigned base, int lane) {
    PipelineState<STAGES> stage;
    for_each_item(shared, lane, [&](const Item &item) {
        const PrefillTile &tile = item.tile;
        int box_keys = prefill.box_keys, within = lane * box_keys, key = item.first_key + within;
        bool needed = within < KEYS && key >= 0 && key + box_keys > tile.seq_start && key < tile.seq_end;
        KeyPlace box = {0, 0};
        if (needed) {
            if (params.block_size) {
                find_paged_place(params, tile, key, box);
                box.batch = page_of(params, box.batch);
            } else {
                box.batch = params.cu_seqlens_k ? 0 : tile.sequence;
                box.token = tile.seq.kv_start + key;
            }
        }
        unsigned count = __popc(__ballot_sync(~0u, needed));
        unsigned barrier = shared_address(IS_KEYS ? &shared.key_full[stage.index] : &shared.value_full[stage.index]),
                 empty = shared_address(IS_KEYS ? &shared.key_empty[stage.index] : &shared.value_empty[stage.index]),
                 to = base + (IS_KEYS ? KEY_OFFSET : VALUE_OFFSET) + stage.index * KEY_BYTES;
        hopper::mbarrier_wait(empty, stage.phase ^ 1);
        if (lane == 0) {
            if (IS_KEYS) hopper::mbarrier_arrive(shared_address(&shared.requested));
            hopper::mbarrier_arrive_expect_tx(barrier, count * box_keys * 128);
        }
        if (needed) hopper::tma_load(to + within * 128, map, barrier, {0, tile.kv_head, box.token, box.batch});
        stage.advance();
    });
}

// The TMA producer warp of queries.
static __device__ __forceinline__ void fetch_queries(const AttentionParameters &params, const TensorMap &map,
                                                     Shared &shared, unsigned base, int lane) {
    PipelineState<QUERY_SLOTS> slot;
    for_each_item(shared, lane, [&](const Item &item) {
        const PrefillTile &tile = item.tile;
#pragma unroll 1
        for (int h = 0; h < item.heads; h++) {
            hopper::mbarrier_wait(shared_address(&shared.query_empty[slot.index]), slot.phase ^ 1);
            if (lane == 0) {
                unsigned barrier = shared_address(&shared.query_full[slot.index]);
                hopper::mbarrier_arrive_expect_tx(barrier, QUERY_BYTES);
                hopper::tma_load(
                    base + QUERY_OFFSET + slot.index * QUERY_BYTES, map, barrier,
                    {0, tile.head + h, tile.seq.q_start + tile.first_token, params.cu_seqlens_q ? 0 : tile.sequence});
            }
            slot.advance();
        }
    });
}

// A consumer warpgroup. A thread has two rows, 8 apart: elements [j][e] and [j][2 + e] of `scores` are keys
// 8 j + 2 (lane % 4) + e of the item, as wgmma leaves them.
struct Consumer {
    const AttentionParameters &params;
    const TensorMaps &maps;
    Shared &shared;
    unsigned base;
    int warpgroup, warp, lane;

    PipelineState<STAGES> stage;
    int slot;                // of the next head's queries
    unsigned slot_phase = 0; // of its mbarriers
    float scores[KEYS / 8][4];
    unsigned probs[VALUE_STEPS][4]; // probabilities: operand A of P V
    float out[VALUE_DIM / 2];

    __device__ __forceinline__ void warpgroup_sync() const {
        hopper::named_barrier_sync(WARPGROUP_BARRIER + warpgroup, 128);
    }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&barrier));
    }
    // Exponentials take turns, in the order of heads: a warpgroup waits until that of the previous head has computed
    // its own.
    __device__ __forceinline__ void wait_turn() const { hopper::named_barrier_sync(TURN_BARRIER + warpgroup, 256); }
    __device__ __forceinline__ void pass_turn() const {
        hopper::named_barrier_arrive(TURN_BARRIER + (warpgroup + 1 == CONSUMERS ? 0 : warpgroup + 1), 256);
    }
    __device__ __forceinline__ int row() const { return 16 * warp + lane / 4; }

    __device__ __forceinline__ void mma_qk() {
        SharedTile<64> queries = {base + QUERY_OFFSET + slot * QUERY_BYTES};
        SharedTile<KEYS> keys = {base + KEY_OFFSET + stage.index * KEY_BYTES};
        float (&sum)[KEYS / 2] = *(float (*)[KEYS / 2]) & scores;
        hopper::mbarrier_wait(shared_address(&shared.query_full[slot]), slot_phase);
        hopper::mbarrier_wait(shared_address(&shared.key_full[stage.index]), stage.phase);
        warpgroup_fence_operand(sum);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            Wgmma<KEYS>::mma_ss(sum, queries.k_major(step), keys.k_major(step), step > 0);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(sum);
        release(shared.query_empty[slot]);
        slot += CONSUMERS;
        if (slot >= QUERY_SLOTS) {
            slot -= QUERY_SLOTS;
            slot_phase ^= 1;
        }
    }

    // Hides what rows do not see, block by block.
    __device__ __forceinline__ void mask_scores(const Item &item, const VisibleRange &view) {
        int first_row = 16 * warp, last_row = first_row + 15, column = item.first_key + 2 * (lane & 3);
        int starts[2] = {view.start(row()) - column, view.start(row() + 8) - column};
        int ends[2] = {view.end(row()) - column, view.end(row() + 8) - column};
        int last_start = view.start(last_row) - item.first_key, first_end = view.end(first_row) - item.first_key;
#pragma unroll
        for (int block = 0; block < KEY_BLOCKS; block++) {
            constexpr int TILES = TILE_KEYS / 8;
            float (&part)[TILES][4] = *(float (*)[TILES][4]) & scores[block * TILES];
            if (last_start > block * TILE_KEYS) {
                for_each_score(part, block * TILE_KEYS, [&](float &score, int column, int r) {
                    if (column < starts[r]) score = -INF;
                });
            }
            if (first_end < (block + 1) * TILE_KEYS) {
                for_each_score(part, block * TILE_KEYS, [&](float &score, int column, int r) {
                    if (column >= ends[r]) score = -INF;
                });
            }
        }
    }

    // Exponentiates the scores: `exponent` gives each exponent of 2.
    template <class Exponent> __device__ __forceinline__ void exponentiate(State (&states)[2], Exponent exponent) {
        float each[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    pair[e] = exp2_fast(exponent(scores[j][2 * r + e], r));
                    each[r][e] += pair[e];
                }
                probs[j / 2][j % 2 * 2 + r] = E::pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int r = 0; r < 2; r++) states[r].sum = quad_sum(each[r][0] + each[r][1]);
    }

    // The softmax of the rows, but for its normalization.
    __device__ __forceinline__ void softmax(const Item &item, State (&states)[2]) {
        float scale = item.tile.scale * LOG2_E, largest[2][2] = {{-INF, -INF}, {-INF, -INF}};
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            largest[r][column % 2] = fmaxf(largest[r][column % 2], score);
        });
        bool large = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            states[r].max = fmaxf(quad_max(fmaxf(largest[r][0], largest[r][1])) * scale, MIN_FLOAT);
            // Rows that do not exist must not change how those of their warp are rounded.
            int token = item.tile.first_token + row() + 8 * r;
            large |= is_large(states[r].max) && states[r].max > MIN_FLOAT && token >= 0 && token < item.tile.seq.q_len;
        }
        large = __any_sync(~0u, large);
        wait_turn();
        if (large) {
            exponentiate(states,
                         [&](float score, int r) { return __fadd_rn(__fmul_rn(score, scale), -states[r].max); });
        } else {
            exponentiate(states, [&](float score, int r) { return fmaf(score, scale, -states[r].max); });
        }
        pass_turn();
    }

    __device__ __forceinline__ void mma_pv(const Item &item) {
        SharedTile<KEYS> values = {base + VALUE_OFFSET + stage.index * KEY_BYTES};
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] = 0.0f;
        hopper::mbarrier_wait(shared_address(&shared.value_full[stage.index]), stage.phase);
        zero_invisible_values<KEYS>(item.tile, item.first_key, values.address, KEY_BYTES,
                                    WARPGROUP_BARRIER + warpgroup);
        warpgroup_fence_operand(out);
        hopper::wgmma_fence();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
            Wgmma<VALUE_DIM>::mma_rs(out, probs[step], values.mn_major(step));
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(out);
    }

    // Adds the sink, normalizes, and writes output and LSE of a head.
    __device__ __forceinline__ void epilogue(const PrefillTile &tile, int head, Sink sink, const State (&states)[2]) {
        float first[2], second[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int token = tile.first_token + row() + 8 * r;
            bool wants_lse = params.lse.pointer && lane % 4 == 0 && token >= 0 && token < tile.seq.q_len;
            FinalizedRow finalized = finalize_row(params, states[r], sink, 1.0f, wants_lse);
            first[r] = finalized.factors.first, second[r] = finalized.factors.second * tile.value_scale;
            if (wants_lse) store_lse(params, tile, head, token, finalized.lse);
        }
        if (first[0] != 1.0f || first[1] != 1.0f) rescale(out, first);
        rescale(out, second);
        unsigned packed[VALUE_DIM / 4];
        pack_outputs(out, packed);
        store(tile, head, packed);
    }

    // Stores through shared memory: stmatrix, then TMA. Pairs 2 j and 2 j + 1 of outputs are columns
    // 8 j + 2 * (lane % 4) of the thread's upper and lower row.
    __device__ __forceinline__ void store(const PrefillTile &tile, int head,
                                          const unsigned (&packed)[VALUE_DIM / 4]) const {
        SharedTile<64> to = {base + OUT_OFFSET + warpgroup * QUERY_BYTES};
        // TMA clips rows past the tensor's end, but not past a sequence's end inside a ragged batch.
        bool whole = tile.first_token >= 0 && (tile.tokens == TILE_ROWS || !params.cu_seqlens_q);
        // Wait until the previous store has read the buffer.
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
#pragma unroll 1
            for (int i = threadIdx.x % 128; i < tile.tokens * (VALUE_DIM / 8); i += 128) {
                int row = i / (VALUE_DIM / 8), chunk = i % (VALUE_DIM / 8), token = tile.first_token + row;
                if (token < 0) continue;
                unsigned short *out = (unsigned short *)params.out.pointer + out_offset(params, tile, head, token);
                *(uint4 *)(out + 8 * chunk) = ld_shared_v4(to.chunk(row, chunk));
            }
        } else if (warp == 0 && lane == 0) {
            hopper::tma_store(maps.out, to.address,
                              {0, head, tile.seq.q_start + tile.first_token, params.cu_seqlens_q ? 0 : tile.sequence});
            hopper::tma_store_commit();
        }
    }

    __device__ __forceinline__ void run() {
        // The first turn is passed to the first warpgroup; the last one is not taken.
        if (warpgroup == CONSUMERS - 1) pass_turn();
        slot = warpgroup;
        int turn = warpgroup; // heads from the item's first one to this warpgroup's next one
        for_each_item(shared, lane, [&](const Item &item) {
            VisibleRange view = {item.first_row_start, item.first_row_end, item.tile.seq.kv_len};
#pragma unroll 1
            for (; turn < item.heads; turn += CONSUMERS) {
                int head = item.tile.head + turn;
                Sink sink = load_sink(params, head, 1.0f);
                State states[2];
                mma_qk();
                mask_scores(item, view);
                softmax(item, states);
                mma_pv(item);
                epilogue(item.tile, head, sink, states);
            }
            turn -= item.heads;
            __syncwarp();
            release(shared.key_empty[stage.index]);
            release(shared.value_empty[stage.index]);
            stage.advance();
        });
        if (warp == 0 && lane == 0) hopper::tma_store_wait();
    }
};

// By one thread. Arrivals: one per warp, or one with the bytes that TMA brings.
static __device__ __forceinline__ void init_mbarriers(Shared &shared) {
    for (int i = 0; i < QUERY_SLOTS; i++) {
        mbarrier_init(shared.query_full[i], 1);
        mbarrier_init(shared.query_empty[i], 4);
    }
    for (int i = 0; i < STAGES; i++) {
        mbarrier_init(shared.key_full[i], 1);
        mbarrier_init(shared.key_empty[i], 4 * CONSUMERS);
        mbarrier_init(shared.value_full[i], 1);
        mbarrier_init(shared.value_empty[i], 4 * CONSUMERS);
    }
    for (int i = 0; i < ITEM_STAGES; i++) {
        mbarrier_init(shared.item_full[i], 1);
        mbarrier_init(shared.item_empty[i], 4 * CONSUMERS + 3);
    }
    mbarrier_init(shared.requested, 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill,
            const __grid_constant__ TensorMaps maps) {
    Shared &shared = *(Shared *)dynamic_shared;
    if (threadIdx.x == 0) {
        init_mbarriers(shared);
        hopper::fence_mbarrier_init();
        hopper::prefetch_tensor_map(maps.query);
        hopper::prefetch_tensor_map(maps.key);
        hopper::prefetch_tensor_map(maps.value);
        hopper::prefetch_tensor_map(maps.out);
    }
    grid_dependency_wait();
    __syncthreads();
    unsigned base = shared_address(dynamic_shared);
    // Producers need few registers; consumers get the rest.
    if (threadIdx.x < 128) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            fetch_keys<true>(params, prefill, maps.key, shared, base, lane);
        } else if (warp == 1) {
            fetch_keys<false>(params, prefill, maps.value, shared, base, lane);
        } else if (warp == 2) {
            fetch_queries(params, maps.query, shared, base, lane);
        } else {
            schedule_items(params, prefill, shared, lane);
        }
    } else {
        hopper::setmaxnreg_inc<CONSUMER_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Consumer consumer = {params, maps, shared, base, warp / 4 - 1, warp % 4, (int)threadIdx.x % 32};
        consumer.run();
    }
}
