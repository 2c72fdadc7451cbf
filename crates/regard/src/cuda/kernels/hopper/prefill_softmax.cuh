// The scores of a consumer warpgroup of Hopper prefill: scale, softcap, ALiBi, masks, and the online softmax.
//
// A thread has two rows, 8 apart: elements [j][e] and [j][2 + e] of `scores` are keys 8 j + 2 (lane % 4) + e of the K
// tile, as wgmma leaves them. Maxima and sums are in units of log2.
#pragma once
#include "hopper/prefill_sm90_shape.cuh"

// The initial row maximum: finite, so that differences to it are numbers.
constexpr float MIN_FLOAT = -MAX_FLOAT;
// The largest sum of probabilities, in a thread's part of a row, relative to a stale max. f16 holds each of them.
constexpr float MAX_STALE_SUM = 4096.0f;

// Whether K tiles are usually exponentiated against a stale max: see exponentiate_and_sum. Specialized kernels of large
// dims lack the registers.
constexpr bool LAZY_MAX = FALLBACK || VALUE_DIM <= 128;

// Whether registers hold the score features of the call, and the scale of the tile.
constexpr bool KEEPS_FEATURES = FALLBACK && VALUE_DIM <= 128;
constexpr bool KEEPS_SCALE = !FALLBACK && VALUE_DIM > 64 && VALUE_DIM <= 128;

// The score modifications that modify_scores leaves to the exponential.
struct ScoreTerms {
    ExponentTerms exponent;
    float unit;         // of scores: see state.cuh
    bool by_polynomial; // scores are dot products still: the exponential applies softcap, by its polynomial
};

// The state of a consumer warpgroup, and what it does with scores.
struct SoftmaxWarpgroup {
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const TensorMaps &maps;
    Shared &shared;
    unsigned base;
    int warpgroup, warp, lane; // index of the warpgroup, and of the warp in it
    float kept_scale;          // see scale()

    TileReader tiles;
    PipelineState<STAGES> key, value;
    PipelineState<QUERY_STAGES> query;
    float scores[KEYS / 8][4];
    unsigned probs[VALUE_STEPS][4]; // probabilities: operand A of P V
    float out[VALUE_DIM / 2];
    // Online softmax: the row max, which may be stale (see exponentiate_and_sum), and this thread's part of the row
    // sum.
    float row_max[2], row_sum[2];
    bool recheck_max = false;           // maxima rose with the previous K tile, or are large: recompute them
    bool max_allows_polynomial = false; // row maxima are in the range of the softcap polynomial
    int kept_features;                  // see features()

    struct TileView : VisibleRange {
        bool row_valid[2]; // whether this thread's rows exist: padding rows must not trigger a max recomputation for
                           // their warp
        float slope;
    };

    // Reading them from a register is faster; large head dims have none left, so that they are found again.
    __device__ __forceinline__ int features() const {
        return KEEPS_FEATURES ? kept_features : FALLBACK ? score_features(params, prefill) : 0;
    }
    // Of dot products.
    __device__ __forceinline__ float scale() const { return KEEPS_SCALE ? kept_scale : current_tile().scale; }
    __device__ __forceinline__ int row() const { return 64 * warpgroup + 16 * warp + lane / 4; }

    __device__ __forceinline__ const PrefillTile &current_tile() const { return tiles.current(shared.queue); }

    // Facts of this thread's rows, computed on demand to save registers.
    struct Rows {
        const SoftmaxWarpgroup &warpgroup;
        const TileView &view;
        __device__ __forceinline__ RowFacts operator[](int r) const {
            RowFacts facts = {};
            int in_group = 16 * warpgroup.warp + warpgroup.lane / 4 + 8 * r;
            facts.start = view.start(in_group);
            facts.end = view.end(in_group);
            if (!FALLBACK) return facts;
            const AttentionParameters &params = warpgroup.params;
            const PrefillTile &tile = warpgroup.current_tile();
            // A padding row takes the facts of the last row, because the mask need not extend to it.
            int token = tile.first_token + min(warpgroup.row() + 8 * r, tile.tokens - 1);
            facts.mask = mask_offset(params, tile, tile.head, token);
            facts.tree = tree_offset(params, tile, token);
            return facts;
        }
    };

    // Whether every row of the tile sees these keys, by structure.
    __device__ __forceinline__ bool sees_whole_tile(int first_key, int keys) const {
        return first_key >= current_tile().every_start && first_key + keys <= current_tile().every_end;
    }

    // Scale, softcap, ALiBi and masks of a K tile's scores, as far as they are not folded into the exponential.
    __device__ __forceinline__ ScoreTerms modify_scores(const TileView &view, int flags, bool first) {
        int first_key = first_key_of(flags);
        bool partly = first_key < view.start(63) || first_key + KEYS > view.end(0) ||
                      (FALLBACK && features() & HAS_UNEVEN_ROWS && !sees_whole_tile(first_key, KEYS));
        bool masked = partly || (FALLBACK && ((flags & MASKED_KEY_TILE && features() & (ADDS_MASK | HIDES_BY_MASK)) ||
                                              features() & HIDES_BY_TREE));
        bool natural = FALLBACK && features() & ADDS_MASK; // the units of scores: state.cuh
        float unit = natural ? LOG2_E : 1.0f, logit_unit = natural ? 1.0f : LOG2_E;
        ScoreTerms terms = {{scale() * logit_unit, 0.0f, 0.0f, false}, unit, false};
        terms.by_polynomial = FALLBACK && max_allows_polynomial && !first && !recheck_max && !masked;
        if (FALLBACK && features() & CAPS) {
            terms.exponent.scale = params.softcap * logit_unit;
            if (!terms.by_polynomial) softcap_scores();
        }
        // Whether some row has ALiBi biases on both sides of it in this K tile: they are then added to the scores here.
        bool bends = FALLBACK && features() & SLOPES && find_alibi_terms(view, first_key, natural, terms.exponent);
        if (masked || bends) mask_scores(view, flags, partly, bends, terms.exponent);
        return terms;
    }

    // Online softmax with a stale max: exponentiate against the row max of the previous K tiles. If the row sum exceeds
    // MAX_STALE_SUM, recompute the max, rescale the accumulators, and exponentiate again. P V of the previous K tile
    // has been waited for.
    __device__ __forceinline__ void exponentiate_and_sum(const TileView &view, ScoreTerms &terms, bool first) {
        bool has_max = first || recheck_max || !LAZY_MAX; // the max is recomputed before the exponentials
        float max_sum = terms.by_polynomial ? 256.0f : MAX_STALE_SUM;
        float sums[2];
#pragma unroll 1
        for (;;) {
            // When maxima are recomputed, biases become part of the scores.
            if (FALLBACK && has_max && terms.exponent.steps) add_alibi(terms.exponent);
            bool large = has_max && update_max(view, terms.exponent, terms.unit, first);
            exponentiate(terms, large, sums);
            bool small[2] = {sums[0] <= max_sum || !view.row_valid[0], sums[1] <= max_sum || !view.row_valid[1]};
            if (has_max || __all_sync(~0u, small[0] && small[1])) break;
            has_max = true;
            if (terms.by_polynomial) {
                terms.by_polynomial = false;
                softcap_scores();
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] += sums[r];
    }

    // Softcap. `tanh.approx` errs by 2^-11, which shows in the LSE.
    __device__ __forceinline__ void softcap_scores() {
        float inward = clamp_float(scale() * reciprocal(params.softcap));
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
        ::mask_scores(params, scores, Rows{*this, view},
                      {first_key, new_tokens, partly, (flags & MASKED_KEY_TILE) != 0});
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

    // Recomputes the row max over this K tile and the previous ones, and rescales sums and accumulators to it. Returns
    // whether `is_large` holds for a maximum of the warp: exponents then have to be differences of rounded scores.
    __device__ __forceinline__ bool update_max(const TileView &view, const ExponentTerms &left, float unit,
                                               bool first) {
        float factor[2], new_max[2], tile_max[2][2] = {{-INF, -INF}, {-INF, -INF}};
        for_each_score(scores, 0, [&](float &score, int column, int r) {
            tile_max[r][column % 2] = fmaxf(tile_max[r][column % 2], score);
        });
        bool must_update = LAZY_MAX;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            new_max[r] = fmaxf(tile_max[r][0], tile_max[r][1]) * left.scale;
            must_update |= view.row_valid[r] && (new_max[r] - row_max[r] > RESCALE_THRESHOLD || has_large_max(r));
        }
        if (!LAZY_MAX && !__any_sync(~0u, must_update)) return false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 1));
            new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(~0u, new_max[r], 2));
            new_max[r] = fmaxf(new_max[r], row_max[r]);
        }
        bool rises = false;
#pragma unroll
        for (int r = 0; r < 2; r++) rises |= view.row_valid[r] && !first && new_max[r] - row_max[r] > RESCALE_THRESHOLD;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            factor[r] = exp2_fast((row_max[r] - new_max[r]) * unit);
            row_max[r] = new_max[r];
            row_sum[r] *= factor[r];
        }
        bool large = (view.row_valid[0] && has_large_max(0)) || (view.row_valid[1] && has_large_max(1));
        // Large maxima are looked at again with the next K tile.
        recheck_max = LAZY_MAX && __any_sync(~0u, rises || large);
        large = (!LAZY_MAX || recheck_max) && __any_sync(~0u, large);
        if (!first) rescale(out, factor);
        if (FALLBACK && (features() & (CAPS | SLOPES | ADDS_MASK)) == CAPS) {
            SoftcapRange range = softcap_range(params, scale());
            auto allowed = [&](int r) {
                return !view.row_valid[r] || (row_max[r] >= range.min && row_max[r] <= range.max);
            };
            max_allows_polynomial = __all_sync(~0u, allowed(0) && allowed(1));
        }
        return large;
    }

    // The max of a row that has seen no key is the lowest float; an additive mask may also hold that number.
    __device__ __forceinline__ bool has_large_max(int r) const {
        return is_large(row_max[r]) && ((FALLBACK && features() & ADDS_MASK) || row_max[r] > -MAX_FLOAT);
    }

    // Probabilities of the scores relative to the row max, and their sums.
    __device__ __forceinline__ void exponentiate(const ScoreTerms &terms, bool large, float (&sums)[2]) {
        const ExponentTerms &left = terms.exponent;
        float unit = terms.unit;
        float scale = left.scale * unit, add[2] = {row_max[0] * -unit, row_max[1] * -unit};
        if (terms.by_polynomial) {
            const SoftcapPolynomial cap = softcap_polynomial(params, this->scale());
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
};
