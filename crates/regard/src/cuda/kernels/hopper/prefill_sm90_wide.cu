// Attention of many query rows on Hopper at large head dims: bound by shared memory and the matrix units.
//
// Outputs of 64 rows and 512 value dims are half of a multiprocessor's registers, so a thread block has 64 rows, which two warpgroups share: each has half
// of a step's keys in the first product, and half of the value dims in the second. Probabilities change hands through shared memory.
//
// 64 rows are too few for what L2 can deliver. A cluster of two blocks therefore shares a tile of 128 rows: both go through the same keys and values, and each
// fetches half of every chunk of them for both. A chunk's place is free when the warpgroups of both blocks have given it back.
//
// In a warpgroup, the scores of the next keys are multiplied before the last values, and become probabilities beside the latter.
#include "hopper/prefill_hopper.cuh"
#include "hopper/wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, GENERAL, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES, CLUSTER.
//
// A kernel that is not general takes plain scores, and rows of exactly the dims that it is compiled for. Outputs are of the inputs' type.
constexpr unsigned BLOCKS_A_TILE = CLUSTER;
constexpr int GROUPS = 2; // warpgroups that compute
constexpr int ROWS = TILE_ROWS / (int)BLOCKS_A_TILE, KEYS = TILE_KEYS, GROUP_KEYS = KEYS / GROUPS, GROUP_DIMS = 256;
constexpr int TILE_SLOTS = 3; // tiles whose facts are known: of the one before, this one and the next
// What comes through the ring, a chunk of 16 KB at a time: 64 dims of all keys; or the values of so many keys, of a warpgroup's dims.
constexpr int CHUNK_BYTES = 16384, VALUE_KEYS = 32;
constexpr int MOST_KEY_CHUNKS = (HEAD_DIM + 63) / 64, VALUE_STEPS = KEYS / VALUE_KEYS;
constexpr int BLOCK_BYTES = 64 * 128; // 64 rows of 64 elements
constexpr int QUERY_BYTES = MOST_KEY_CHUNKS * BLOCK_BYTES, WEIGHT_BYTES = GROUPS * BLOCK_BYTES;
constexpr int FEW_REGISTERS = 56, MANY_REGISTERS = 224;
typedef Element<ELEMENT_TYPE> E;

constexpr int MAXIMA_AT = 1024, QUERY_AT = 2048, WEIGHTS_AT = QUERY_AT + QUERY_BYTES, RING_AT = WEIGHTS_AT + 2 * WEIGHT_BYTES;
constexpr int SLOTS = (232448 - RING_AT) / CHUNK_BYTES;
static_assert(ROWS == 64 && GROUP_KEYS == 64 && VALUE_DIM == GROUPS * GROUP_DIMS && THREADS == 128 * (GROUPS + 1), "what this is written for");
static_assert(RING_AT + SLOTS * CHUNK_BYTES == SHARED_BYTES, "as the host has it");
static_assert(SLOTS >= 7, "the values of three steps, and a chunk of keys behind them");

struct Shared {
    unsigned long long query_full, query_empty;
    unsigned long long full[SLOTS], empty[SLOTS];
    unsigned long long tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
    unsigned long long tile_wanted;               // the last keys of a tile are about to be fetched
    unsigned long long number_full, number_empty; // the latter of the first block alone
    unsigned number;                              // of the cluster's next tile
    TileNews tiles[TILE_SLOTS];
    int keys[SLOTS]; // with a tile's first chunk of keys
};
static_assert(sizeof(Shared) <= MAXIMA_AT, "its place");

// What the warpgroups tell each other of their rows.
struct Exchange {
    float maxima[GROUPS][ROWS], sums[GROUPS][ROWS];
};
static_assert(sizeof(Exchange) <= QUERY_AT - MAXIMA_AT, "its place");

// The named barriers.
constexpr int BOTH_BARRIER = 1, GROUP_BARRIER = BOTH_BARRIER + 1;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Chunks of a tile of keys. Padding is not fetched, but for one chunk where there would be less than two.
static __device__ __forceinline__ int key_chunks(const AttentionParameters &p) {
    return GENERAL ? max((p.head_dim + 63) / 64, 2) : MOST_KEY_CHUNKS;
}

// The next tile's number, the same in both blocks of a cluster: the first one takes it, and tells both.
static __device__ __forceinline__ unsigned next_number(const PrefillParameters &t, Shared &shared, unsigned rank, int lane, unsigned &parity) {
    if (rank == 0 && lane == 0) {
        hopper::barrier_wait(shared_address(&shared.number_empty), parity ^ 1);
        unsigned taken = take_tile(t, gridDim.x / BLOCKS_A_TILE);
#pragma unroll
        for (unsigned block = 0; block < BLOCKS_A_TILE; block++)
            hopper::send(shared_address(&shared.number), taken, shared_address(&shared.number_full), block);
    }
    __syncwarp();
    hopper::barrier_wait_sent(shared_address(&shared.number_full), parity);
    parity ^= 1;
    unsigned number = __shfl_sync(~0u, *(volatile unsigned *)&shared.number, 0);
    if (lane == 0) hopper::barrier_arrive_at(shared_address(&shared.number_empty), 0);
    return number;
}

// The warp that looks for tiles. It takes one when the last keys of that before are about to be fetched: sooner would be unjust, for who begins a long tile
// should not have the next one as well.
static __device__ __forceinline__ void schedule(const AttentionParameters &p, const PrefillParameters &t, Shared &shared, unsigned rank, int lane) {
    Turn<TILE_SLOTS> slot;
    TilePlace place = {0, 0};
    unsigned number = blockIdx.x / BLOCKS_A_TILE, number_parity = 0, wanted_parity = 0;
#pragma unroll 1
    for (;;) {
        PrefillTile tile;
        int first, last, turn; // key tiles
        bool found = find_work<TILE_ROWS, KEYS>(p, t, number, place, lane, tile, first, last, turn);
        if (found && last < first) {
            if (rank == 0) write_empty(p, tile, lane);
        } else {
            hopper::barrier_wait(shared_address(&shared.tile_empty[slot.at]), slot.parity ^ 1);
            if (lane == 0) {
                shared.tiles[slot.at] = news_of(p, tile, found, first, last, turn);
                hopper::barrier_arrive(shared_address(&shared.tile_full[slot.at]));
            }
            __syncwarp();
            slot.next();
            if (!found) break;
            hopper::barrier_wait(shared_address(&shared.tile_wanted), wanted_parity);
            wanted_parity ^= 1;
        }
        number = next_number(t, shared, rank, lane, number_parity);
    }
    if (rank == 0 && lane == 0) finish_tiles(t, gridDim.x / BLOCKS_A_TILE);
}

// Which part of a tile's values a warpgroup multiplies in this step: it begins with its own keys.
static __device__ __forceinline__ int values_of(int step, int group) { return step ^ group * (VALUE_STEPS / 2); }

// The boxes of a tile of keys or of its values, one a lane: where they are in the tensor, and which lanes have one that some row of the sequence sees.
// The others are left out: their entries of a block table may mean nothing.
struct Boxes {
    int token, sequence; // or slot, and a block as the table has it: that is looked at late, because it comes late
    unsigned seen;
};

// The warp that fetches.
struct Producer {
    const AttentionParameters &p;
    const PrefillParameters &t;
    const TensorMaps &maps;
    Shared &shared;
    unsigned base; // of shared memory
    unsigned rank; // this block's number in its cluster
    int lane;
    int box_shift; // keys of a box, as a power of 2

    Turn<SLOTS> ring;

    __device__ __forceinline__ Boxes find_boxes(const PrefillTile &tile, int first_key) const {
        int key = first_key + (lane << box_shift);
        bool seen = lane < KEYS >> box_shift && key + (1 << box_shift) > tile.first_seen && key < tile.last_seen;
        Boxes boxes = {tile.facts.kv_start + key, p.cu_seqlens_k ? 0 : tile.sequence, __ballot_sync(~0u, seen)};
        if (p.block_size && seen) {
            int entry = p.block_shift >= 0 ? key >> p.block_shift : key / p.block_size;
            boxes.token = key - entry * p.block_size;
            boxes.sequence = ((const int *)p.block_table)[tile.sequence * p.block_table_stride + entry];
        }
        return boxes;
    }

    // Of these lanes, those whose boxes begin at `first` to `end` of the tile's keys.
    __device__ __forceinline__ unsigned between(unsigned lanes, int first, int end) const {
        return lanes & ((1u << (end >> box_shift)) - 1) & ~((1u << (first >> box_shift)) - 1);
    }

    // Waits until the next place of the ring is free.
    __device__ __forceinline__ void wait_place() const { hopper::barrier_wait(shared_address(&shared.empty[ring.at]), ring.parity ^ 1); }

    // Has its barrier wait for so many boxes, from both blocks.
    __device__ __forceinline__ unsigned expect(int boxes) const {
        unsigned barrier = shared_address(&shared.full[ring.at]);
        if (lane == 0) hopper::barrier_expect(barrier, boxes * 128 << box_shift);
        return barrier;
    }

    __device__ __forceinline__ int block_of(const Boxes &boxes) const { return p.block_size ? clamp_int(boxes.sequence, 0, p.blocks - 1) : boxes.sequence; }

    // This block fetches half of the keys for both.
    __device__ __forceinline__ void fetch_keys(const PrefillTile &tile, const Boxes &boxes, int news) {
        bool mine = between(boxes.seen, (int)rank * (KEYS / 2), (int)(rank + 1) * (KEYS / 2)) >> lane & 1;
        int block = block_of(boxes), chunks = key_chunks(p);
#pragma unroll 1
        for (int c = 0; c < chunks; c++) {
            wait_place();
            if (lane == 0 && c == 0) shared.keys[ring.at] = news;
            unsigned barrier = expect(__popc(boxes.seen));
            if (mine) hopper::load_box_for(3, base + RING_AT + ring.at * CHUNK_BYTES + (lane * 128 << box_shift), maps.key, barrier, c * 64, tile.kv_head, boxes.token, block);
            ring.next();
        }
    }

    // Half of the dims, of both warpgroups. Each has the values of its own keys first, as it needs them.
    __device__ __forceinline__ void fetch_values(const PrefillTile &tile, const Boxes &boxes) {
        int block = block_of(boxes);
#pragma unroll 1
        for (int step = 0; step < VALUE_STEPS; step++) {
#pragma unroll 1
            for (int group = 0; group < GROUPS; group++) {
                int first = VALUE_KEYS * values_of(step, group);
                unsigned seen = between(boxes.seen, first, first + VALUE_KEYS);
                bool mine = seen >> lane & 1;
                wait_place();
                unsigned barrier = expect(__popc(seen) * (GROUP_DIMS / 64));
                unsigned to = base + RING_AT + ring.at * CHUNK_BYTES + ((lane << box_shift) - first) * 128;
#pragma unroll
                for (int i = 0; i < GROUP_DIMS / 128; i++) {
                    int dims = (int)rank * (GROUP_DIMS / 128) + i;
                    if (mine) hopper::load_box_for(3, to + dims * VALUE_KEYS * 128, maps.value, barrier, group * GROUP_DIMS + dims * 64, tile.kv_head, boxes.token, block);
                }
                ring.next();
            }
        }
    }

    __device__ __forceinline__ void fetch_queries(const PrefillTile &tile) const {
        if (lane != 0) return;
        unsigned barrier = shared_address(&shared.query_full);
        int chunks = key_chunks(p);
        hopper::barrier_expect(barrier, chunks * BLOCK_BYTES);
#pragma unroll 1
        for (int c = 0; c < chunks; c++)
            hopper::load_box(base + QUERY_AT + c * BLOCK_BYTES, maps.query, barrier, c * 64, tile.head, tile.facts.q_start + tile.first_token + ROWS * (int)rank,
                             p.cu_seqlens_q ? 0 : tile.sequence);
    }

    __device__ __forceinline__ void run() {
        unsigned query_parity = 0;
        Turn<TILE_SLOTS> slot;
#pragma unroll 1
        for (;;) {
            hopper::barrier_wait(shared_address(&shared.tile_full[slot.at]), slot.parity);
            // Facts stay in shared memory: this warp has few registers.
            const TileNews &news = shared.tiles[slot.at];
            const PrefillTile &tile = news.tile;
            if (!news.more) break;
            hopper::barrier_wait(shared_address(&shared.query_empty), query_parity ^ 1);
            fetch_queries(tile);
            query_parity ^= 1;
            const unsigned char *map = GENERAL ? find_map(t, tile, TILE_ROWS) : nullptr;
            int first = news.first_keys, next = news.turn();
            bool values = false; // whether there are keys before, whose values are still to come: these come one tile behind, as they are used
            Boxes before = {}, ahead = find_boxes(tile, next * KEYS);
#pragma unroll 1
            for (;;) {
                Boxes now = ahead;
                int then = first - 1;
                bool over = next < first;
                if (!over) {
                    then = find_kept(map, next - 1, first, lane);
                    if constexpr (GENERAL) go_round(news, next, then, first);
                    if (then >= first) {
                        ahead = find_boxes(tile, then * KEYS);
                    } else if (lane == 0) {
                        hopper::barrier_arrive(shared_address(&shared.tile_wanted));
                    }
                    fetch_keys(tile, now, next << KEYS_SHIFT | (!map || __ldcg(map + next) == MAP_MIXED ? MIXED_KEYS : 0) | (then < first ? LAST_KEYS : 0));
                }
                if (values) fetch_values(tile, before);
                if (over) break;
                values = true;
                before = now;
                next = then;
            }
            __syncwarp();
            if (lane == 0) hopper::barrier_arrive(shared_address(&shared.tile_empty[slot.at]));
            slot.next();
        }
    }
};

// A warpgroup that computes.
struct Consumer {
    const AttentionParameters &p;
    const PrefillParameters &t;
    Shared &shared;
    Exchange &exchange;
    unsigned base;
    int first_row; // of the tile's, in this block
    int number, warp, lane; // warpgroup, warp of it

    Turn<SLOTS> ring, used; // the next chunk, and the first that has not been given back
    Turn<TILE_SLOTS> slot;
    unsigned query_parity = 0;
    int weights = 0; // which of two places probabilities go to
    float scores[GROUP_KEYS / 8][4];
    float out[GROUP_DIMS / 2];
    unsigned own[GROUP_KEYS / 16][4]; // probabilities of this warpgroup's keys
    float row_max[2], row_sum[2]; // the maximum is a reference: see SLACK

    // A tile, as the softmax needs it. Its other facts stay in shared memory.
    struct Mine : View {
        int slot;
        float slope;
    };

    __device__ __forceinline__ void meet() const { hopper::named_wait(BOTH_BARRIER, 128 * GROUPS); }
    __device__ __forceinline__ void release(unsigned long long &barrier) const {
        if (lane == 0) hopper::barrier_arrive(shared_address(&barrier));
    }
    // The upper of a thread's two rows, of this block's.
    __device__ __forceinline__ int row() const { return 16 * warp + lane / 4; }

    // The next tile; false where there is none. Its slot is given back when its rows have been written.
    __device__ __forceinline__ bool next_tile(Mine &mine) {
        hopper::barrier_wait(shared_address(&shared.tile_full[slot.at]), slot.parity);
        const TileNews &news = shared.tiles[slot.at];
        mine.slot = slot.at;
        slot.next();
        if (!news.more) return false;
        mine.start_at = news.start_at + first_row;
        mine.end_at = news.end_at + first_row;
        mine.keys = news.tile.facts.kv_len;
        mine.slope = GENERAL && p.alibi_slopes ? load_slope(p, news.tile.head) : 0.0f;
        return true;
    }

    __device__ __forceinline__ const PrefillTile &tile_of(const Mine &mine) const { return shared.tiles[mine.slot].tile; }

    __device__ __forceinline__ unsigned chunk(const Turn<SLOTS> &turn) const { return base + RING_AT + turn.at * CHUNK_BYTES; }
    __device__ __forceinline__ void wait_chunk(const Turn<SLOTS> &turn) const { hopper::barrier_wait(shared_address(&shared.full[turn.at]), turn.parity); }

    // Gives chunks back, to both blocks of the cluster.
    template <int COUNT> __device__ __forceinline__ void release_chunks() {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            if (lane < (int)BLOCKS_A_TILE) hopper::barrier_arrive_at(shared_address(&shared.empty[used.at]), lane);
            used.next();
        }
    }

    // Begins the product with 64 dims of this warpgroup's keys.
    __device__ __forceinline__ void multiply_keys(int c) {
        unsigned q = base + QUERY_AT + c * BLOCK_BYTES, k = chunk(ring) + number * BLOCK_BYTES;
        float(&sum)[GROUP_KEYS / 2] = *(float(*)[GROUP_KEYS / 2]) & scores;
        wait_chunk(ring);
        hopper::products_begin();
#pragma unroll
        for (int step = 0; step < 4; step++)
            Wgmma<GROUP_KEYS>::shared(sum, hopper::matrix(q + step * 32, 16), hopper::matrix(k + step * 32, 16), c > 0 || step > 0);
        hopper::products_commit();
        ring.next();
    }

    // The same with the first dims, and with the others, but for the last ones not waited for.
    __device__ __forceinline__ void multiply_first_keys() {
        hold(*(float(*)[GROUP_KEYS / 2]) & scores);
        multiply_keys(0);
        multiply_keys(1);
    }
    __device__ __forceinline__ void multiply_other_keys() {
        int chunks = key_chunks(p);
#pragma unroll 1
        for (int c = 2; c < chunks; c++) {
            multiply_keys(c);
            hopper::products_wait<2>();
            release_chunks<1>();
        }
    }

    // The products with values, of this warpgroup's dims; those of the last step are not waited for. The probabilities of its own keys come first, from
    // registers: the other warpgroup's are needed later then. `behind`: so far the products with keys were not waited for.
    template <bool BEHIND> __device__ __forceinline__ void multiply_values(int first_key, const PrefillTile &tile) {
        unsigned theirs = base + WEIGHTS_AT + weights * WEIGHT_BYTES + (1 - number) * BLOCK_BYTES;
        hold(out);
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) {
            Turn<SLOTS> mine = ring;
            wait_chunk(ring);
            ring.next();
            wait_chunk(ring);
            if (number == 1) mine = ring;
            ring.next();
            unsigned v = chunk(mine);
            if (step == VALUE_STEPS / 2) meet();
            clear_values(first_key + VALUE_KEYS * values_of(step, number), v, tile);
            hopper::products_begin();
#pragma unroll
            for (int i = 0; i < VALUE_KEYS / 16; i++) {
                int sixteenth = step * VALUE_KEYS / 16 + i;
                unsigned long long values = hopper::matrix(v + i * 16 * 128, VALUE_KEYS * 128);
                if (sixteenth < GROUP_KEYS / 16) {
                    Wgmma<GROUP_DIMS>::registers(out, own[sixteenth], values);
                } else {
                    Wgmma<GROUP_DIMS>::columns(out, hopper::matrix(theirs + (sixteenth - GROUP_KEYS / 16) * 32, 16), values);
                }
            }
            hopper::products_commit();
            if (BEHIND && step == 0) {
                hopper::products_wait<1>();
                hold(*(float(*)[GROUP_KEYS / 2]) & scores);
                release_chunks<2>();
            }
            if (step > 0) {
                hopper::products_wait<1>();
                release_chunks<2>();
            }
        }
        weights ^= 1;
    }

    // Values that no row of the sequence sees become zero: their weights are zero, but zero times what is no number is no number.
    __device__ __forceinline__ void clear_values(int first_key, unsigned v, const PrefillTile &tile) const {
        if (first_key >= tile.first_seen && first_key + VALUE_KEYS <= tile.last_seen) return;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < CHUNK_BYTES / 16; i += 128) {
            int key = first_key + i / 8 % VALUE_KEYS;
            if (key < tile.first_seen || key >= tile.last_seen) asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(v + i * 16), "r"(0) : "memory");
        }
        hopper::fence_async();
        hopper::named_wait(GROUP_BARRIER + number, 128);
    }

    static __device__ __forceinline__ int first_of(int keys) { return (keys >> KEYS_SHIFT) * KEYS; }

    // Scores become probabilities, in shared memory; what was summed up so far is to be multiplied by `factor`. The products with the values before run
    // on beside that.
    __device__ __forceinline__ void join_scores(const Mine &mine, int keys, bool first, float (&factor)[2]) {
        int first_key = first_of(keys) + GROUP_KEYS * number;
        bool partly = first_key < mine.start(ROWS - 1) || first_key + GROUP_KEYS > mine.end(0);
        PrefillRow rows[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            rows[r].start = mine.start(row() + 8 * r);
            rows[r].end = mine.end(row() + 8 * r);
            // The rest where it is asked for: registers are few.
            if (!GENERAL) continue;
            const PrefillTile &tile = tile_of(mine);
            // A row that is not there is taken for the last one: the mask need not have a place for it.
            int token = tile.first_token + min(first_row + row() + 8 * r, tile.tokens - 1);
            if (p.alibi_slopes) {
                rows[r].position = tile.facts.offset + token;
                rows[r].slope = mine.slope;
            }
            if (p.mask_type) rows[r].mask = tile.sequence * p.mask_batch_stride + tile.head * p.mask_head_stride + token * p.mask_row_stride;
            if (p.tree_mask) rows[r].tree = tile.sequence * p.tree_batch_stride + token * p.tree_row_stride;
        }
        finish_scores(p, scores, rows, first_key, GENERAL ? tile_of(mine).facts.kv_len - tile_of(mine).facts.q_len : 0, partly, keys & MIXED_KEYS);
        float scale = exponent_scale(p), most[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float pair[2] = {scores[0][2 * r], scores[0][2 * r + 1]};
#pragma unroll
            for (int j = 1; j < GROUP_KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) pair[e] = fmaxf(pair[e], scores[j][2 * r + e]);
            most[r] = fmaxf(pair[0], pair[1]);
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
            if (lane % 4 == 0) exchange.maxima[number][row() + 8 * r] = most[r];
        }
        meet();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = fmaxf(most[r], exchange.maxima[1 - number][row() + 8 * r]);
            // Where both are minus infinity this is no number, and no comparison holds.
            bool stays = (all - row_max[r]) * scale <= SLACK;
            all = stays ? row_max[r] : all;
            // A row that has seen nothing yet has 0 for its reference: minus infinity minus itself is no number.
            float reference = all == -INFINITE ? 0.0f : all * scale;
            factor[r] = stays ? 1.0f : exp2_fast(fmaf(row_max[r], scale, -reference));
            bool there = first_row + row() + 8 * r < tile_of(mine).tokens;
            if (__any_sync(~0u, there && all != -INFINITE && is_large(reference))) {
                // Differences first: see `is_large`.
                float least = all == -INFINITE ? 0.0f : all;
                factor[r] = stays ? 1.0f : exp2_fast((row_max[r] - least) * scale);
                reference = 0.0f;
#pragma unroll
                for (int j = 0; j < GROUP_KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) scores[j][2 * r + e] -= least;
            }
            row_max[r] = all;
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < GROUP_KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = scores[j][2 * r + e];
                    score = exp2_fast(fmaf(score, scale, -reference));
                    sum[e] += score;
                }
            row_sum[r] = fmaf(row_sum[r], factor[r], sum[0] + sum[1]);
        }
        // Before the last of them is given back, its products are through; later, and the next values would wait for its place.
        hopper::products_wait<0>();
        hold(out);
        if (!first) release_chunks<2>();
        int to_row = 16 * warp + lane % 16;
        unsigned to = base + WEIGHTS_AT + weights * WEIGHT_BYTES + number * BLOCK_BYTES + to_row * 128;
#pragma unroll
        for (int j = 0; j < GROUP_KEYS / 16; j++) {
            const float(&left)[4] = scores[2 * j], (&right)[4] = scores[2 * j + 1];
            own[j][0] = E::pack(left[0], left[1]), own[j][1] = E::pack(left[2], left[3]);
            own[j][2] = E::pack(right[0], right[1]), own[j][3] = E::pack(right[2], right[3]);
            hopper::store_matrices(to + (((2 * j + lane / 16) ^ (to_row & 7)) << 4), own[j][0], own[j][1], own[j][2], own[j][3]);
        }
        hopper::fence_async();
    }

    // What was summed up shrinks, where a row's reference has grown. Products are waited for before: all warps of a warpgroup have to do that together, and this is a
    // warp's own.
    __device__ __forceinline__ void shrink(const float (&factor)[2]) {
        if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
        rescale(factor);
    }

    __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < GROUP_DIMS / 2; i++) out[i] *= factor[i / 2 % 2];
    }

    // Sums start from nothing; the scores of the tile's last keys, which come first.
    __device__ __forceinline__ int begin_tile() {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = -INFINITE;
            row_sum[r] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < GROUP_DIMS / 2; i++) out[i] = 0.0f;
        hopper::barrier_wait(shared_address(&shared.query_full), query_parity);
        query_parity ^= 1;
        int keys = next_keys();
        multiply_first_keys();
        multiply_other_keys();
        hopper::products_wait<0>();
        hold(*(float(*)[GROUP_KEYS / 2]) & scores);
        release_chunks<2>();
        return keys;
    }

    // News of the keys that come next, read by the lane that gives their place back.
    __device__ __forceinline__ int next_keys() const {
        wait_chunk(ring);
        return __shfl_sync(~0u, lane == 0 ? shared.keys[ring.at] : 0, 0);
    }

    __device__ __forceinline__ void run() {
        Mine mine;
        float factor[2];
        bool first = true; // keys of this tile
        if (!next_tile(mine)) return;
        int keys = begin_tile(); // news of those whose scores are there
#pragma unroll 1
        for (;;) {
            join_scores(mine, keys, first, factor);
            int values = first_of(keys);
            if (keys & LAST_KEYS) {
                release(shared.query_empty);
                shrink(factor);
                multiply_values<false>(values, tile_of(mine));
                hopper::products_wait<0>();
                hold(out);
                release_chunks<2>();
                finish_rows(tile_of(mine));
                __syncwarp();
                release(shared.tile_empty[mine.slot]);
                if (!next_tile(mine)) break;
                keys = begin_tile();
                first = true;
            } else {
                keys = next_keys();
                shrink(factor);
                multiply_first_keys();
                multiply_other_keys();
                multiply_values<true>(values, tile_of(mine));
                first = false;
            }
        }
    }

    // The sink joins, the sum divides, and the rows are written.
    __device__ __forceinline__ void finish_rows(const PrefillTile &facts) {
        const PrefillTile tile = facts;
        float factor[2], scale = has_natural_scores(p) ? 1.0f : exponent_scale(p);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
            row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
            if (lane % 4 == 0) exchange.sums[number][row() + 8 * r] = row_sum[r];
        }
        meet();
        Sink sink = load_sink(p, tile.head, unit_of(p));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int at = first_row + row() + 8 * r;
            FinishedRow finished = finish_row(p, {row_max[r] * scale, row_sum[r] + exchange.sums[1 - number][row() + 8 * r]}, sink, unit_of(p));
            factor[r] = finished.factor;
            if (p.lse && number == 0 && lane % 4 == 0 && at < tile.tokens) write_lse(p, tile, at, finished.lse);
        }
        rescale(factor);
        bound_outputs(out);
        write_chunks(p, tile, first_row + row(), number * GROUP_DIMS, out, lane);
    }
};

extern "C" __global__ void __cluster_dims__(BLOCKS_A_TILE, 1, 1) __launch_bounds__(THREADS, 1)
    prefill(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters t, const __grid_constant__ TensorMaps maps) {
    Shared &shared = *(Shared *)dynamic_shared;
    unsigned rank = hopper::cluster_rank();
    if (threadIdx.x == 0) {
        auto init = [](unsigned long long &barrier, int arrivals) { hopper::barrier_init(shared_address(&barrier), arrivals); };
        init(shared.query_full, 1);
        init(shared.query_empty, 4 * GROUPS);
        for (int i = 0; i < SLOTS; i++) {
            init(shared.full[i], 1);
            init(shared.empty[i], 4 * GROUPS * BLOCKS_A_TILE);
        }
        for (int i = 0; i < TILE_SLOTS; i++) {
            init(shared.tile_full[i], 1);
            init(shared.tile_empty[i], 4 * GROUPS + 1);
        }
        init(shared.tile_wanted, 1);
        init(shared.number_full, 1);
        init(shared.number_empty, BLOCKS_A_TILE);
        hopper::barriers_ready();
        hopper::prefetch_map(maps.query);
        hopper::prefetch_map(maps.key);
        hopper::prefetch_map(maps.value);
    }
    __syncwarp();
    // Neither block writes to the other before that one's barriers are ready.
    hopper::cluster_wait();
    // A fetching warp needs few registers; the computing ones get what it leaves.
    if (threadIdx.x < 128) {
        hopper::fewer_registers<FEW_REGISTERS>();
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            Producer producer = {p, t, maps, shared, shared_address(dynamic_shared), rank, lane, __ffs(t.page_keys) - 1};
            producer.run();
        } else if (warp == 1) {
            schedule(p, t, shared, rank, lane);
        }
    } else {
        hopper::more_registers<MANY_REGISTERS>();
        int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        Exchange &exchange = *(Exchange *)(dynamic_shared + MAXIMA_AT);
        Consumer consumer = {p, t, shared, exchange, shared_address(dynamic_shared), ROWS * (int)rank, warp / 4 - 1, warp % 4, (int)threadIdx.x % 32};
        consumer.run();
    }
    // Nor does a block end while the other may still write to it.
    __syncwarp();
    hopper::cluster_wait();
}
