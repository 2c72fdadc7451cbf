// Attention of many query rows on Hopper: bound by the matrix units.
//
// A thread block is CONSUMERS warpgroups that compute, 64 query rows each, a warp that looks for tiles (tile_scheduler.cuh) and three that fetch: keys,
// values, queries. Keys and values come through rings of STAGES stages, filled by the tensor copy engine, from a tile's last keys to its first, so that
// what causality cuts is met at once; but see find_work.
//
// In a warpgroup, the product with the next keys and the one with the last values run while scores become probabilities. The warpgroups take turns at
// starting products, so that one's exponentials run beside another's products.
#include "hopper/prefill_hopper.cuh"
#include "hopper/wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, GENERAL, TILE_ROWS, TILE_KEYS, THREADS, SHARED_BYTES.
//
// A kernel that is not general takes plain scores, and rows of exactly the dims that it is compiled for. Outputs are of the inputs' type. The scale is positive: maxima are taken before it is
// multiplied.
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

// A row's maximum before it has seen a key: the least number, so that differences to it are numbers.
constexpr float NOTHING = -3.40282347e38f;
// Probabilities relative to an earlier maximum may sum up to this in a thread's part of a row; f16 holds each of them.
constexpr float MOST_SUM = 4096.0f;

// Whether the usual step does without maxima: see join_scores. Plain kernels of large dims have no registers for that.
constexpr bool HASTY = GENERAL || VALUE_DIM <= 128;

// A cap as a polynomial of scores, first s + third s^3 + fifth s^5, in units of log2: three operations a score, where tanh takes a dozen.
//
// With x for a score over the cap, the polynomial is within 2^-21 of tanh x, relatively, for |x| up to 0.25, and it grows with x. It needs no check of each score. No probability is
// above 2^8 (their sum is looked at), so where the row's maximum is at most 8 below the value at 0.25, in units of log2, no score is past that. What is below -0.25 has next to no
// weight: where the row's maximum is above -0.1 of a cap of 45, or more, it is 2^-9 of the maximum's and less, and falls faster than the polynomial errs: by 2e-8 at most.
struct Cap {
    float first, third, fifth;
    float least, most; // maxima between which it may be used
};

static __device__ __forceinline__ Cap find_cap(const AttentionParameters &p) {
    float inward = p.scale * reciprocal(p.softcap), square = inward * inward, first = p.scale * LOG2_E, outward = p.softcap * LOG2_E;
    bool usual = p.softcap >= 45.0f && p.softcap < 1e6f && fabsf(inward) > 1e-6f && fabsf(inward) < 1e6f;
    return {0.999999604f * first, -0.333219063f * square * first, 0.128415892f * square * square * first, -0.1f * outward, usual ? 0.2449f * outward - 8.0f : -INFINITE};
}

struct Shared {
    unsigned long long query_full[QUERY_SLOTS][CONSUMERS], query_empty[QUERY_SLOTS][CONSUMERS];
    unsigned long long key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES];
    unsigned long long tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
    unsigned long long tile_wanted; // the last keys of a tile are about to be fetched
    TileNews tiles[TILE_SLOTS];
    int keys[STAGES];
    Cap cap;
    float saved_max[TILE_ROWS]; // see keep_large_max
};

constexpr int QUERY_AT = 2048;
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
        int first, last, turn; // key tiles
        bool found = find_work<TILE_ROWS, KEYS>(p, t, number, place, lane, tile, first, last, turn);
        if (found && last < first) {
            write_empty(p, tile, lane);
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
            int first = news.first_keys, next = news.turn();
            Box box = find_box(tile, next);
#pragma unroll 1
            while (next >= first) {
                int then = find_kept(kept, next - 1, first, lane);
                if constexpr (GENERAL) go_round(news, next, then, first);
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
    float row_max[2], row_sum[2]; // in units of log2; the maximum may be one of the first keys', see join_scores
    bool rising = false; // maxima went up a lot with the keys before, or are large: see `is_large`
    bool by_polynomial = false; // maxima allow it
    int features; // of the call
    float inward; // what scores are multiplied by before they are capped

    // A tile, as the softmax needs it. Its other facts stay in shared memory.
    struct Mine : View {
        int slot;
        bool there[2]; // whether this thread's rows are rows of the sequence: what others hold, and keys that only those see, must not decide anything for a warp
        float slope;
        long long position; // of this thread's first row, less what its first key is past the tile's
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
        for (int r = 0; r < 2; r++) mine.there[r] = row() + 8 * r < news.tile.tokens;
        if (GENERAL && features & SLOPES) {
            mine.slope = load_slope(p, news.tile.head) * logit_unit(p);
        }
        if (GENERAL) mine.position = news.tile.facts.offset + news.tile.first_token + row() - 2 * (lane & 3);
        return true;
    }

    __device__ __forceinline__ const PrefillTile &tile_of(const Mine &mine) const { return shared.tiles[mine.slot].tile; }

    __device__ __forceinline__ void multiply_keys() {
        unsigned q = base + QUERY_AT + (query.at * CONSUMERS + number) * QUERY_BYTES, k = base + KEY_AT + key.at * KEY_BYTES;
        unsigned long long queries = hopper::matrix(q, 16), keys = hopper::matrix(k, 16);
        float(&sum)[KEYS / 2] = *(float(*)[KEYS / 2]) & scores;
        hold(sum);
        hopper::products_begin();
#pragma unroll
        for (int step = 0; step < KEY_STEPS; step++)
            Wgmma<KEYS>::shared(sum, hopper::further(queries, step / 4 * 64 * 128 + step % 4 * 32), hopper::further(keys, step / 4 * KEYS * 128 + step % 4 * 32), step > 0);
        hopper::products_commit();
    }

    __device__ __forceinline__ void multiply_values() {
        unsigned long long values = hopper::matrix(base + VALUE_AT + value.at * VALUE_BYTES, KEYS * 128);
        hold(out);
        hopper::products_begin();
#pragma unroll
        for (int step = 0; step < VALUE_STEPS; step++) Wgmma<VALUE_DIM>::registers(out, weights[step], hopper::further(values, step * 16 * 128));
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
        __syncwarp(); // all lanes have read the news of them
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
            facts.mask = tile.sequence * p.mask_batch_stride + tile.head * p.mask_head_stride + token * p.mask_row_stride;
            facts.tree = tile.sequence * p.tree_batch_stride + token * p.tree_row_stride;
            return facts;
        }
    };

    // Scores become probabilities relative to a maximum of their row: that of the keys before, as long as that will do. That it does shows afterwards, in the
    // probabilities' sum: where that is too large, the maximum is found, what was summed up so far shrinks to it, and probabilities are reckoned again.
    //
    // The products with the values before are waited for in between, where there are any. (The assembler would put the wait in front of the exponentials wherever it
    // stands here; behind them measured slower.)
    __device__ __forceinline__ void join_scores(const Mine &mine, int keys, bool first) {
        int first_key = first_of(keys);
        bool partly = first_key < mine.start(63) || first_key + KEYS > mine.end(0);
        bool rare = partly || (GENERAL && ((keys & MIXED_KEYS && features & (ADDS_MASK | HIDES_BY_MASK)) || features & HIDES_BY_TREE));
        bool natural = GENERAL && features & ADDS_MASK; // the units of scores: state.cuh
        float unit = natural ? LOG2_E : 1.0f, logit_unit = natural ? 1.0f : LOG2_E;
        Exponents left = {p.scale * logit_unit, 0.0f, 0.0f, false};
        bool polynomial = GENERAL && by_polynomial && !first && !rising && !rare;
        if (GENERAL && features & CAPS) {
            left.scale = p.softcap * logit_unit;
            if (!polynomial) for_each_score(scores, 0, [&](float &score, int, int) { score = tanhf(score * inward); });
        }
        bool bends = false;
        if (GENERAL && features & SLOPES) {
            long long ahead = mine.position - first_key;
            left.distance = (float)ahead;
            left.step = mine.slope;
            bends = natural;
            if (features & SLOPES_BOTH_WAYS && !natural) {
                bool behind = __all_sync(~0u, ahead >= KEYS - 7), before = __all_sync(~0u, ahead + 8 <= 0);
                bends = !behind && !before;
                if (before) left.step = -left.step;
            }
            left.steps = !bends;
        }
        if (rare || bends) {
            if (GENERAL && (bends || (features & ADDS_MASK && keys & MIXED_KEYS))) {
                float slope = bends ? left.step : 0.0f;
                for_each_score(scores, 0, [&](float &score, int column, int r) {
                    score = fmaf(fabsf(left.distance + (float)(8 * r - column)), -slope, score * left.scale);
                });
                left.scale = 1.0f;
                if (features & ADDS_MASK && keys & MIXED_KEYS) apply_additive_mask(p, scores, Rows{*this, mine}, first_key, !partly);
            }
            int new_tokens = GENERAL && features & HIDES_BY_TREE ? tile_of(mine).facts.kv_len - tile_of(mine).facts.q_len : 0;
            hide_scores(p, scores, Rows{*this, mine}, first_key, new_tokens, partly, keys & MIXED_KEYS);
        }
        hopper::products_wait<0>();
        hold(out);
        if (!first) release_values();
        bool sure = first || rising || !HASTY;
        float most_sum = polynomial ? 256.0f : MOST_SUM;
        float sums[2];
#pragma unroll 1
        for (;;) {
            if (GENERAL && sure && left.steps) {
                // Where maxima are looked for, biases are part of scores.
                for_each_score(scores, 0, [&](float &score, int column, int r) {
                    score = fmaf((float)(column - 8 * r) - left.distance, left.step, score * left.scale);
                });
                left.scale = 1.0f;
                left.steps = false;
            }
            if (sure) find_references(mine, left, unit, first);
            bool large = sure && has_large_max(mine, natural);
            if (large) keep_large_max(left.scale);
            float scale = left.scale * unit, add[2] = {row_max[0] * -unit, row_max[1] * -unit};
            if (polynomial) {
                const Cap cap = shared.cap;
                exponentials(sums, [&](float score, int, int r) {
                    float square = score * score;
                    return fmaf(score, fmaf(square, fmaf(square, cap.fifth, cap.third), cap.first), add[r]);
                });
            } else if (GENERAL && left.steps) {
                // Distances are exact, and biases are added to the maximum in one step: far keys have large biases, whose roundings near keys must not have.
                exponentials(sums, [&](float score, int column, int r) {
                    float even = fmaf((float)(column / 2 * 2 - 8 * r) - left.distance, left.step, add[r]);
                    return fmaf(score, scale, column % 2 ? even + left.step : even);
                });
            } else {
                exponentials(sums, [&](float score, int, int r) { return fmaf(score, scale, add[r]); });
            }
            if (large) restore_max();
            bool small[2] = {sums[0] <= most_sum || !mine.there[0], sums[1] <= most_sum || !mine.there[1]};
            if (sure || __all_sync(~0u, small[0] && small[1])) break;
            sure = true;
            if (polynomial) {
                polynomial = false;
                for_each_score(scores, 0, [&](float &score, int, int) { score = tanhf(score * inward); });
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += sums[r];
    }

    // Whether a row of the warp has a maximum for which `is_large` holds. A row that has seen nothing has the least one; an additive mask may also hold that number.
    __device__ __forceinline__ bool has_large_max(const Mine &mine, bool natural) const {
        auto large = [&](int r) { return mine.there[r] && is_large(row_max[r]) && (natural || row_max[r] > -MAX_FLOAT); };
        return __any_sync(~0u, large(0) || large(1));
    }

    // Scores become their rounded differences to large maxima, over the scale that they are multiplied by; maxima are 0 meanwhile.
    __device__ __forceinline__ void keep_large_max(float scale) {
        float inverse = fminf(reciprocal(scale), MAX_FLOAT);
        for_each_score_rolled(
            scores, 0, [&](int, int r) { return row_max[r]; }, [&](float score, float most) { return __fadd_rn(__fmul_rn(score, scale), -most) * inverse; });
#pragma unroll
        for (int r = 0; r < 2; r++) {
            shared.saved_max[row() + 8 * r] = row_max[r]; // the same from all lanes of a row
            row_max[r] = 0.0f;
        }
    }

    __device__ __forceinline__ void restore_max() {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < 2; r++) row_max[r] = shared.saved_max[row() + 8 * r];
    }

    // Scores' exponents are relative to the largest of their row, of these keys and those before, and sums shrink to that.
    __device__ __forceinline__ void find_references(const Mine &mine, const Exponents &left, float unit, bool first) {
        float factor[2], all[2], most[2][2] = {{-INFINITE, -INFINITE}, {-INFINITE, -INFINITE}};
        for_each_score(scores, 0, [&](float &score, int column, int r) { most[r][column % 2] = fmaxf(most[r][column % 2], score); });
        bool moves = HASTY;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            all[r] = fmaxf(most[r][0], most[r][1]) * left.scale;
            moves |= mine.there[r] && all[r] - row_max[r] > SLACK;
        }
        if (!HASTY && !__any_sync(~0u, moves)) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            all[r] = fmaxf(all[r], __shfl_xor_sync(~0u, all[r], 1));
            all[r] = fmaxf(all[r], __shfl_xor_sync(~0u, all[r], 2));
            all[r] = fmaxf(all[r], row_max[r]);
        }
        rising = HASTY && !first && __any_sync(~0u, (mine.there[0] && all[0] - row_max[0] > SLACK) || (mine.there[1] && all[1] - row_max[1] > SLACK));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factor[r] = exp2_fast((row_max[r] - all[r]) * unit);
            row_max[r] = all[r];
            row_sum[r] *= factor[r];
        }
        // Large maxima are looked at again with all keys.
        rising |= HASTY && has_large_max(mine, GENERAL && features & ADDS_MASK);
        if (!first) rescale(factor);
        if (GENERAL && (features & (CAPS | SLOPES | ADDS_MASK)) == CAPS) {
            float least = shared.cap.least, most = shared.cap.most;
            auto allowed = [&](int r) { return !mine.there[r] || (row_max[r] >= least && row_max[r] <= most); };
            by_polynomial = __all_sync(~0u, allowed(0) && allowed(1));
        }
    }

    // Probabilities of scores whose exponents `exponent` says, and their sums.
    template <class Exponent> __device__ __forceinline__ void exponentials(float (&sums)[2], Exponent exponent) {
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
                weights[j / 2][j % 2 * 2 + r] = E::pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int r = 0; r < 2; r++) sums[r] = each[r][0] + each[r][1];
    }

    static __device__ __forceinline__ int first_of(int keys) { return (keys >> KEYS_SHIFT) * KEYS; }

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
            row_max[r] = NOTHING;
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
        // By way of a shuffle, so that the compiler does not reckon it again for every tile of keys.
        features = GENERAL ? __shfl_sync(~0u, find_features(p), 0) : 0;
        inward = GENERAL && features & CAPS ? p.scale * reciprocal(p.softcap) : 0.0f;
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
        float factor[2];
        Sink sink = load_sink(p, tile.head, unit_of(p));
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            FinishedRow finished = finish_row(p, {row_max[r], row_sum[r]}, sink, unit_of(p));
            factor[r] = finished.factor;
            if (p.lse && lane % 4 == 0 && row() + 8 * r < tile.tokens) write_lse(p, tile, row() + 8 * r, finished.lse);
        }
        rescale(factor);
        bound_outputs(out);
        // The copy engine leaves out rows behind the tensor's end, but knows nothing of sequences' ends inside.
        // It writes 16 bytes at a time: where rows of a general kernel end inside of these, it would write what is beside them.
        bool whole = (64 * number + 64 <= tile.tokens || !p.cu_seqlens_q) && (!GENERAL || p.value_dim % 8 == 0);
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
        if (GENERAL && p.softcap != 0.0f) shared.cap = find_cap(p);
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
