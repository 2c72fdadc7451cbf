// Attention of many query rows on Hopper: bound by the matrix units.
//
// A thread block is CONSUMERS warpgroups that compute, 64 query rows each, a warp that looks for tiles (prefill_tiles.cuh) and three that fetch: keys,
// values, queries. Keys and values come through rings of STAGES stages, filled by the tensor copy engine, from a tile's last keys to its first, so that
// what causality cuts is met at once.
//
// In a warpgroup, the product with the next keys and the one with the last values run while scores become probabilities. The warpgroups take turns at
// starting products, so that one's exponentials run beside another's products.
#include "prefill_hopper.cuh"
#include "wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, GENERAL, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES.
//
// A kernel that is not general takes plain scores, and rows of exactly the dims that it is compiled for. Outputs are of the inputs' type.
constexpr int CONSUMERS = TILE_ROWS / 64, KEYS = TILE_KEYS;
constexpr int STAGES = HEAD_DIM <= 64 ? 3 : 2;      // tiles of keys, and of values, on their way or in use
constexpr int QUERY_SLOTS = HEAD_DIM <= 64 ? 2 : 1; // tiles whose queries are there at once
constexpr int TILE_SLOTS = 3;                       // tiles whose facts are known: of the one before, this one and the next
constexpr int KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_CHUNKS = (VALUE_DIM + 63) / 64; // of 64 dims, 128 bytes
constexpr int QUERY_BYTES = 64 * KEY_CHUNKS * 128, OUT_BYTES = 64 * VALUE_CHUNKS * 128; // of a warpgroup
constexpr int KEY_BYTES = KEYS * KEY_CHUNKS * 128, VALUE_BYTES = KEYS * VALUE_CHUNKS * 128;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Of each thread: what those that look ahead need, and what that leaves for those that compute.
constexpr int FEW_REGISTERS = CONSUMERS == 2 ? 40 : 32, MANY_REGISTERS = CONSUMERS == 2 ? 232 : 160;

typedef Element<ELEMENT_TYPE> E;

struct Shared {
    unsigned long long query_full[QUERY_SLOTS][CONSUMERS], query_empty[QUERY_SLOTS][CONSUMERS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    unsigned long long tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
    unsigned long long tile_wanted; // the last keys of a tile are about to be fetched
    TileNews tiles[TILE_SLOTS];
    int keys[STAGES];
};

constexpr int QUERY_AT = 1024;
constexpr int KEY_AT = QUERY_AT + QUERY_SLOTS * CONSUMERS * QUERY_BYTES;
constexpr int VALUE_AT = KEY_AT + STAGES * KEY_BYTES;
constexpr int OUT_AT = VALUE_AT + STAGES * VALUE_BYTES;
// Where there is room for it, the output goes by way of shared memory.
constexpr bool OUT_STAGED = OUT_AT + CONSUMERS * OUT_BYTES <= 232448;
static_assert(sizeof(Shared) <= QUERY_AT && OUT_AT + OUT_STAGED * CONSUMERS * OUT_BYTES == SHARED_BYTES, "as the host has it");
static_assert(THREADS == 128 * (CONSUMERS + 1), "as the host has it");

// The named barriers.
constexpr int TURN_BARRIER = 1, GROUP_BARRIER = TURN_BARRIER + CONSUMERS;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// The warp that looks for tiles, ahead of the others: but not sooner than it must, because the last tiles go to those blocks that are free first.
static __device__ __forceinline__ void schedule(const AttentionParameters &p, const PrefillParameters &t, Shared &shared, int lane) {
    Turn<TILE_SLOTS> slot;
    TilePlace place = {0, 0};
    unsigned number = blockIdx.x, wanted_parity = 0;
#pragma unroll 1
    for (;;) {
        PrefillTile tile;
        int first = 0, last = -1; // key tiles
        bool found = find_tile<TILE_ROWS>(p, t, number, place, tile);
        if (found) {
            first = tile.start / KEYS;
            last = tile.end > tile.start ? find_kept(GENERAL ? find_map(t, tile, TILE_ROWS) : nullptr, (tile.end - 1) / KEYS, first, lane) : first - 1;
        }
        if (found && last < first) {
            write_empty(p, tile, lane);
        } else {
            hopper::barrier_wait(shared_address(&shared.tile_empty[slot.at]), slot.parity ^ 1);
            if (lane == 0) {
                // Within 32 bits, and rows can still be added.
                long long position = tile.facts.offset + tile.first_token, most = 0x7fffff00;
                int start_at = (int)max(-most, min(position - p.window_left, most)), end_at = (int)max(-most, min(position + p.window_right + 1, most));
                shared.tiles[slot.at] = {tile, found, first, last, start_at, end_at};
                hopper::barrier_arrive(shared_address(&shared.tile_full[slot.at]));
            }
            __syncwarp();
            slot.next();
            if (!found) break;
            hopper::barrier_wait(shared_address(&shared.tile_wanted), wanted_parity);
            wanted_parity ^= 1;
        }
        number = __shfl_sync(~0u, lane == 0 ? take_tile(t) : 0, 0);
    }
    if (lane == 0) finish_tiles(t);
}

// The warp that fetches keys, or the one that fetches values.
template <bool IS_KEYS> struct Producer {
    static constexpr int CHUNKS = IS_KEYS ? KEY_CHUNKS : VALUE_CHUNKS; // of 64 dims
    static constexpr int RING_AT = IS_KEYS ? KEY_AT : VALUE_AT, STAGE_BYTES = KEYS * CHUNKS * 128;
    const AttentionParameters &p;
    const PrefillParameters &t;
    const TensorMap &map;
    Shared &shared;
    unsigned base; // of shared memory
    int lane;

    // Of pages, a lane fetches a box: where in its block that starts, -1 where there is nothing to fetch, and the table's entry as it stands there.
    struct Box {
        int slot, entry;
    };

    // Boxes without a key that is seen are left out: their entries of the table may mean nothing. The entry is not there yet when this returns: a tile goes
    // by before it is used.
    __device__ __forceinline__ Box find_box(const PrefillTile &tile, int key_tile) const {
        Box box = {-1, 0};
        int within = lane * t.page_keys, key = key_tile * KEYS + within;
        if (p.block_size && within < KEYS && key + t.page_keys > tile.first_seen && key < tile.last_seen) {
            int index = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
            box.slot = key - index * p.block_size;
            box.entry = ((const int *)p.block_table)[tile.sequence * p.block_table_stride + index];
        }
        return box;
    }

    // Begins to fetch a tile.
    __device__ __forceinline__ void fetch(const PrefillTile &tile, int key_tile, Box box, unsigned to, unsigned barrier) const {
        if (!p.block_size) {
            if (lane == 0) {
                hopper::barrier_expect(barrier, STAGE_BYTES);
#pragma unroll 1
                for (int c = 0; c < CHUNKS; c++)
                    hopper::load_box(to + c * KEYS * 128, map, barrier, c * 64, tile.kv_head, tile.facts.kv_start + key_tile * KEYS, p.cu_seqlens_k ? 0 : tile.sequence);
            }
            return;
        }
        unsigned boxes = __ballot_sync(~0u, box.slot >= 0);
        if (lane == 0) hopper::barrier_expect(barrier, __popc(boxes) * t.page_keys * CHUNKS * 128);
        if (box.slot >= 0) {
            int block = clamp_int(box.entry, 0, p.blocks - 1);
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c++)
                hopper::load_box(to + (c * KEYS + lane * t.page_keys) * 128, map, barrier, c * 64, tile.kv_head, box.slot, block);
        }
    }

    __device__ __forceinline__ void run() {
        Turn<STAGES> stage;
        Turn<TILE_SLOTS> slot;
#pragma unroll 1
        for (;;) {
            hopper::barrier_wait(shared_address(&shared.tile_full[slot.at]), slot.parity);
            // Facts stay in shared memory: this warp has few registers.
            const TileNews &news = shared.tiles[slot.at];
            const PrefillTile &tile = news.tile;
            if (!news.more) break;
            const unsigned char *kept = GENERAL ? find_map(t, tile, TILE_ROWS) : nullptr;
            int first = news.first_keys, next = news.last_keys;
            Box box = find_box(tile, next);
#pragma unroll 1
            while (next >= first) {
                int then = find_kept(kept, next - 1, first, lane);
                Box then_box = find_box(tile, then);
                int said = next << KEYS_SHIFT | (!kept || __ldcg(kept + next) == MAP_MIXED ? MIXED_KEYS : 0) | (then < first ? LAST_KEYS : 0);
                if (IS_KEYS && then < first && lane == 0) hopper::barrier_arrive(shared_address(&shared.tile_wanted));
                hopper::barrier_wait(shared_address(IS_KEYS ? &shared.key_empty[stage.at] : &shared.value_empty[stage.at]), stage.parity ^ 1);
                if (IS_KEYS && lane == 0) shared.keys[stage.at] = said;
                fetch(tile, next, box, base + RING_AT + stage.at * STAGE_BYTES, shared_address(IS_KEYS ? &shared.key_full[stage.at] : &shared.value_full[stage.at]));
                stage.next();
                next = then;
                box = then_box;
            }
            __syncwarp();
            if (lane == 0) hopper::barrier_arrive(shared_address(&shared.tile_empty[slot.at]));
            slot.next();
        }
    }
};

// The warp that fetches queries.
static __device__ __forceinline__ void fetch_queries(const AttentionParameters &p, const TensorMap &map, Shared &shared, unsigned base, int lane) {
    Turn<QUERY_SLOTS> query;
    Turn<TILE_SLOTS> slot;
#pragma unroll 1
    for (;;) {
        hopper::barrier_wait(shared_address(&shared.tile_full[slot.at]), slot.parity);
        const PrefillTile &tile = shared.tiles[slot.at].tile;
        if (!shared.tiles[slot.at].more) break;
#pragma unroll 1
        for (int w = 0; w < CONSUMERS; w++) {
            hopper::barrier_wait(shared_address(&shared.query_empty[query.at][w]), query.parity ^ 1);
            unsigned to = base + QUERY_AT + (query.at * CONSUMERS + w) * QUERY_BYTES, barrier = shared_address(&shared.query_full[query.at][w]);
            if (lane != 0) continue;
            hopper::barrier_expect(barrier, QUERY_BYTES);
#pragma unroll 1
            for (int c = 0; c < KEY_CHUNKS; c++)
                hopper::load_box(to + c * 64 * 128, map, barrier, c * 64, tile.head, tile.facts.q_start + tile.first_token + 64 * w, p.cu_seqlens_q ? 0 : tile.sequence);
        }
        query.next();
        __syncwarp();
        if (lane == 0) hopper::barrier_arrive(shared_address(&shared.tile_empty[slot.at]));
        slot.next();
    }
}

// A warpgroup that computes.
struct Consumer {
    const AttentionParameters &p;
    const PrefillParameters &t;
    const TensorMaps &maps;
    Shared &shared;
    unsigned base;
    int number, warp, lane; // warpgroup, warp of it

    Turn<STAGES> key, value;
    Turn<TILE_SLOTS> slot;
    Turn<QUERY_SLOTS> query;
    float scores[KEYS / 8][4];
    unsigned weights[VALUE_STEPS][4]; // probabilities, as the second product takes them
    float out[VALUE_DIM / 2];
    float row_max[2], row_sum[2]; // the maximum is a reference: see SLACK

    // A tile, as the softmax needs it. Its other facts stay in shared memory.
    struct Mine {
        int slot;
        int start_at, end_at, keys; // the first row of this warpgroup sees keys from start_at to end_at, row r from r further on, where there are any
        float slope;

        __device__ __forceinline__ int start(int row) const { return max(start_at + row, 0); }
        __device__ __forceinline__ int end(int row) const { return clamp_int(end_at + row, 0, keys); }
    };

    __device__ __forceinline__ void synchronize() const { hopper::named_wait(GROUP_BARRIER + number, 128); }
    __device__ __forceinline__ void take_turn() const { hopper::named_wait(TURN_BARRIER + number, 256); }
    __device__ __forceinline__ void pass_turn() const { hopper::named_arrive(TURN_BARRIER + (number + 1 == CONSUMERS ? 0 : number + 1), 256); }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        if (lane == 0) hopper::barrier_arrive(shared_address(&barrier));
    }
    __device__ __forceinline__ int row() const { return 64 * number + 16 * warp + lane / 4; }

    // The next tile; false where there is none. Its slot is given back when its rows have been written.
    __device__ __forceinline__ bool next_tile(Mine &mine) {
        hopper::barrier_wait(shared_address(&shared.tile_full[slot.at]), slot.parity);
        const TileNews &news = shared.tiles[slot.at];
        mine.slot = slot.at;
        slot.next();
        if (!news.more) return false;
        mine.start_at = news.start_at + 64 * number;
        mine.end_at = news.end_at + 64 * number;
        mine.keys = news.tile.facts.kv_len;
        mine.slope = GENERAL && p.alibi_slopes ? ((const float *)p.alibi_slopes)[news.tile.head] : 0.0f;
        return true;
    }

    __device__ __forceinline__ const PrefillTile &tile_of(const Mine &mine) const { return shared.tiles[mine.slot].tile; }

    __device__ __forceinline__ void multiply_keys() {
        unsigned q = base + QUERY_AT + (query.at * CONSUMERS + number) * QUERY_BYTES, k = base + KEY_AT + key.at * KEY_BYTES;
        float(&sum)[KEYS / 2] = *(float(*)[KEYS / 2]) & scores;
        hold(sum);
        hopper::products_begin();
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            Wgmma<KEYS>::shared(sum, hopper::matrix(q + step / 4 * 64 * 128 + step % 4 * 32, 16), hopper::matrix(k + step / 4 * KEYS * 128 + step % 4 * 32, 16), step > 0);
        hopper::products_commit();
    }

    __device__ __forceinline__ void multiply_values() {
        unsigned v = base + VALUE_AT + value.at * VALUE_BYTES;
        hold(out);
        hopper::products_begin();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) Wgmma<VALUE_DIM>::registers(out, weights[step], hopper::matrix(v + step * 16 * 128, KEYS * 128));
        hopper::products_commit();
    }

    template <int PENDING> __device__ __forceinline__ void wait_scores() {
        hopper::products_wait<PENDING>();
        hold(*(float(*)[KEYS / 2]) & scores);
    }

    // The products with the values of the keys before are over.
    __device__ __forceinline__ void release_values() {
        release(shared.value_empty[value.at]);
        value.next();
    }

    // The scores of a stage's keys have come.
    __device__ __forceinline__ void release_keys() {
        release(shared.key_empty[key.at]);
        key.next();
    }

    // What is asked of this thread's rows, reckoned where it is asked for: registers are few.
    struct Rows {
        const Consumer &consumer;
        const Mine &mine;
        __device__ __forceinline__ PrefillRow operator[](int r) const {
            PrefillRow facts = {};
            int in_group = 16 * consumer.warp + consumer.lane / 4 + 8 * r;
            facts.start = mine.start(in_group);
            facts.end = mine.end(in_group);
            if (!GENERAL) return facts;
            const AttentionParameters &p = consumer.p;
            const PrefillTile &tile = consumer.tile_of(mine);
            // A row that is not there is taken for the last one: the mask need not have a place for it.
            int token = tile.first_token + min(consumer.row() + 8 * r, tile.tokens - 1);
            facts.position = tile.facts.offset + token;
            facts.slope = mine.slope;
            facts.mask = tile.sequence * p.mask_batch_stride + tile.head * p.mask_head_stride + token * p.mask_row_stride;
            facts.tree = tile.sequence * p.tree_batch_stride + token * p.tree_row_stride;
            return facts;
        }
    };

    // Scores become probabilities relative to a maximum of their row, and what was summed up so far shrinks to it: the products with the values before are
    // waited for in between, where there are any. (The assembler would put the wait in front of the exponentials wherever it stands here; behind them
    // measured slower.)
    __device__ __forceinline__ void join_scores(const Mine &mine, int keys, bool first) {
        int first_key = first_of(keys);
        bool partly = first_key < mine.start(63) || first_key + KEYS > mine.end(0);
        finish_scores(p, scores, Rows{*this, mine}, first_key, GENERAL ? tile_of(mine).facts.kv_len - tile_of(mine).facts.q_len : 0, partly, keys & MIXED_KEYS);
        // Of this thread's part of a row. What it is relative to stays while no row's maximum is much above it: then nothing shrinks.
        float scale = score_scale(), most[2], factor[2] = {1.0f, 1.0f};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float each[4];
#pragma unroll
            for (int i = 0; i < 4; i++) each[i] = scores[i / 2][2 * r + i % 2];
#pragma unroll
            for (int j = 2; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) each[j % 2 * 2 + e] = fmaxf(each[j % 2 * 2 + e], scores[j][2 * r + e]);
            most[r] = fmaxf(fmaxf(each[0], each[1]), fmaxf(each[2], each[3]));
        }
        // Where both are minus infinity the difference is no number, and not more.
        bool moves = __any_sync(~0u, (most[0] - row_max[0]) * scale > SLACK || (most[1] - row_max[1]) * scale > SLACK);
        if (moves) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float all = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
                all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
                all = fmaxf(all, row_max[r]);
                factor[r] = exp2_fast(fmaf(row_max[r], scale, -reference(all, scale)));
                row_max[r] = all;
            }
        }
        hopper::products_wait<0>();
        hold(out);
        if (!first) release_values();
#pragma unroll
        for (int r = 0; r < 2; r++) exponentials(r, scale, reference(row_max[r], scale), factor[r]);
        if (moves) rescale(factor);
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) weights[step][i] = E::pack(scores[2 * step + i / 2][i % 2 * 2], scores[2 * step + i / 2][i % 2 * 2 + 1]);
    }

    // What a row's exponents are relative to. One that has seen nothing yet keeps 0: minus infinity minus itself is no number.
    static __device__ __forceinline__ float reference(float row_max, float scale) { return row_max == -INFINITE ? 0.0f : row_max * scale; }

    // Of the upper (0) or the lower row (1).
    __device__ __forceinline__ void exponentials(int r, float scale, float reference, float factor) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &score = scores[j][2 * r + e];
                score = exp2_fast(fmaf(score, scale, -reference));
                sum[e] += score;
            }
        row_sum[r] = fmaf(row_sum[r], factor, sum[0] + sum[1]);
    }

    static __device__ __forceinline__ int first_of(int keys) { return (keys >> KEYS_SHIFT) * KEYS; }

    // What scores are still to be multiplied by.
    __device__ __forceinline__ float score_scale() const { return scores_are_bare(p) ? p.scale * LOG2_E : 1.0f; }

    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] *= factor[i / 2 % 2];
    }

    // Values that no row of the sequence sees become zero: their weights are zero, but zero times what is no number is no number.
    __device__ __forceinline__ void clear_values(int first_key, const PrefillTile &tile) const {
        if (first_key >= tile.first_seen && first_key + KEYS <= tile.last_seen) return;
        unsigned v = base + VALUE_AT + value.at * VALUE_BYTES;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < KEYS * VALUE_CHUNKS * 8; i += 128) {
            int key = first_key + i / 8 % KEYS;
            if (key < tile.first_seen || key >= tile.last_seen) asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(v + i * 16), "r"(0) : "memory");
        }
        hopper::fence_async();
        synchronize();
    }

    // Sums start from nothing; the scores of the tile's last keys, which come first.
    __device__ __forceinline__ int begin_tile() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = -INFINITE;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++) out[i] = 0.0f;
        hopper::barrier_wait(shared_address(&shared.query_full[query.at][number]), query.parity);
        hopper::barrier_wait(shared_address(&shared.key_full[key.at]), key.parity);
        int keys = shared.keys[key.at];
        take_turn();
        multiply_keys();
        pass_turn();
        wait_scores<0>();
        return keys;
    }

    __device__ __forceinline__ void run() {
        Mine mine;
        bool first = true; // keys of this tile
        if (number == CONSUMERS - 1) hopper::named_arrive(TURN_BARRIER, 256);
        if (!next_tile(mine)) return;
        int keys = begin_tile(); // news of those whose scores come
#pragma unroll 1
        for (;;) {
            release_keys();
            join_scores(mine, keys, first);
            if (keys & LAST_KEYS) {
                release(shared.query_empty[query.at][number]);
                query.next();
                hopper::barrier_wait(shared_address(&shared.value_full[value.at]), value.parity);
                clear_values(first_of(keys), tile_of(mine));
                multiply_values();
                hopper::products_wait<0>();
                hold(out);
                release_values();
                finish_rows(tile_of(mine));
                __syncwarp();
                release(shared.tile_empty[mine.slot]);
                if (!next_tile(mine)) break;
                keys = begin_tile();
                first = true;
            } else {
                int values = first_of(keys);
                hopper::barrier_wait(shared_address(&shared.key_full[key.at]), key.parity);
                keys = shared.keys[key.at];
                take_turn();
                multiply_keys();
                hopper::barrier_wait(shared_address(&shared.value_full[value.at]), value.parity);
                clear_values(values, tile_of(mine));
                multiply_values();
                pass_turn();
                wait_scores<1>();
                first = false;
            }
        }
        if (OUT_STAGED && warp == 0 && lane == 0) hopper::store_wait();
    }

    // The sink joins, the sum divides, and the rows are written.
    __device__ __forceinline__ void finish_rows(const PrefillTile &facts) {
        const PrefillTile tile = facts;
        float factor[2], scale = score_scale();
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            State state = {row_max[r] * scale, row_sum[r]};
            float left = 1.0f, right;
            if (p.sinks) state = join(state, sink_of(p, tile.head), left, right);
            factor[r] = state.sum > 0.0f ? left * reciprocal(state.sum) : 0.0f;
            if (p.lse && lane % 4 == 0 && row() + 8 * r < tile.tokens) write_lse(p, tile, row() + 8 * r, state);
        }
        rescale(factor);
        // The copy engine leaves out rows behind the tensor's end, but knows nothing of sequences' ends inside.
        bool whole = 64 * number + 64 <= tile.tokens || !p.cu_seqlens_q;
        if (OUT_STAGED) {
            write_staged(tile, whole);
        } else {
            write_chunks(p, tile, row(), 0, out, lane);
        }
    }

    // By way of shared memory.
    __device__ __forceinline__ void write_staged(const PrefillTile &tile, bool whole) const {
        unsigned to = base + OUT_AT + number * OUT_BYTES;
        // What was there before has been read.
        if (warp == 0 && lane == 0) hopper::store_wait();
        synchronize();
        int to_row = 16 * warp + lane % 16;
#pragma unroll
        for (int j = 0; j < VALUE_DIM / 16; j++) {
            unsigned at = to + j / 4 * 64 * 128 + to_row * 128 + (((j % 4 * 2 + lane / 16) ^ (to_row & 7)) << 4);
            hopper::store_matrices(at, pair(4 * j), pair(4 * j + 1), pair(4 * j + 2), pair(4 * j + 3));
        }
        if (whole) hopper::fence_async();
        synchronize();
        if (!whole) {
            // Row by row, up to the sequence's last.
            int rows = min(64, tile.tokens - 64 * number);
#pragma unroll 1
            for (int i = threadIdx.x % 128; i < rows * (VALUE_DIM / 8); i += 128) {
                int row = i / (VALUE_DIM / 8), chunk = i % (VALUE_DIM / 8);
                unsigned from = to + chunk / 8 * 64 * 128 + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
                write_eight(p, tile, 64 * number + row, 8 * chunk, hopper::load_four(from));
            }
        } else if (warp == 0 && lane == 0) {
#pragma unroll 1
            for (int c = 0; c < VALUE_CHUNKS; c++)
                hopper::store_box(maps.out, to + c * 64 * 128, c * 64, tile.head, tile.facts.q_start + tile.first_token + 64 * number, p.cu_seqlens_q ? 0 : tile.sequence);
            hopper::store_commit();
        }
    }

    // Two neighbours of the output: pairs 2 j and 2 j + 1 are columns 8 j + 2 * (lane % 4) of the upper and the lower row.
    __device__ __forceinline__ unsigned pair(int i) const { return E::pack(out[2 * i], out[2 * i + 1]); }

};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters t, const __grid_constant__ TensorMaps maps) {
    Shared &shared = *(Shared *)dynamic_shared;
    if (threadIdx.x == 0) {
        auto init = [](unsigned long long &barrier, int arrivals) { hopper::barrier_init(shared_address(&barrier), arrivals); };
        for (int i = 0; i < QUERY_SLOTS; i++)
            for (int w = 0; w < CONSUMERS; w++) {
                init(shared.query_full[i][w], 1);
                init(shared.query_empty[i][w], 4);
            }
        for (int i = 0; i < STAGES; i++) {
            init(shared.key_full[i], 1);
            init(shared.key_empty[i], 4 * CONSUMERS);
            init(shared.value_full[i], 1);
            init(shared.value_empty[i], 4 * CONSUMERS);
        }
        init(shared.tile_wanted, 1);
        for (int i = 0; i < TILE_SLOTS; i++) {
            init(shared.tile_full[i], 1);
            init(shared.tile_empty[i], 4 * CONSUMERS + 3);
        }
        hopper::barriers_ready();
        hopper::prefetch_map(maps.query);
        hopper::prefetch_map(maps.key);
        hopper::prefetch_map(maps.value);
        hopper::prefetch_map(maps.out);
    }
    __syncthreads();
    // A fetching warp needs few registers; the computing ones get what it leaves.
    if (threadIdx.x < 128) {
        hopper::fewer_registers<FEW_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned base = shared_address(dynamic_shared);
        if (warp == 0) {
            Producer<true>{p, t, maps.key, shared, base, lane}.run();
        } else if (warp == 1) {
            Producer<false>{p, t, maps.value, shared, base, lane}.run();
        } else if (warp == 2) {
            fetch_queries(p, maps.query, shared, base, lane);
        } else {
            schedule(p, t, shared, lane);
        }
    } else {
        hopper::more_registers<MANY_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Consumer consumer = {p, t, maps, shared, shared_address(dynamic_shared), warp / 4 - 1, warp % 4, (int)threadIdx.x % 32};
        consumer.run();
    }
}
