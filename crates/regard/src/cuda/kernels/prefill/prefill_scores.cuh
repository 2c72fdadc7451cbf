// Score modifications of prefill, on the register layout of the m16n8 accumulator.
//
// Element [j][e] of `float s[N8][4]` is row lane / 4 + 8 * (e / 2) of 16, and key first_key + 8 * j + 2 * (lane % 4) +
// e % 2. FALLBACK = 0 compiles unmodified scores only (scale, length, causality, window).
#pragma once
#include "common/element.cuh"
#include "prefill/tile_scheduler.cuh"
#include "common/quad.cuh"
#include "common/row_facts.cuh"
#include "common/state.cuh"

constexpr bool IS_FALLBACK = FALLBACK;

// Whether scores are in natural units (state.cuh).
static __device__ __forceinline__ bool has_natural_scores(const AttentionParameters &params) {
    return IS_FALLBACK && params.mask_kind >= MaskKind::F32;
}

static __device__ __forceinline__ float unit_of(const AttentionParameters &params) {
    return has_natural_scores(params) ? LOG2_E : 1.0f;
}

// The factor from logits to units of scores.
static __device__ __forceinline__ float logit_unit(const AttentionParameters &params) {
    return has_natural_scores(params) ? 1.0f : LOG2_E;
}

// The facts of row `row` of a tile; a row that sees nothing if there is no such row.
static __device__ __forceinline__ RowFacts find_row(const AttentionParameters &params, const PrefillTile &tile,
                                                    int row) {
    if (row >= tile.tokens) return {0, 0, 0, 0.0f, 0, 0, 0};
    return row_facts<IS_FALLBACK>(params, tile, tile.head, tile.first_token + row);
}

// Whether scores stay plain dot products, with the scale folded into the exponential. (A negative scale would turn
// maxima into minima.)
static __device__ __forceinline__ bool scores_are_unmodified(const AttentionParameters &params) {
    return !IS_FALLBACK ||
           (params.scale > 0.0f && params.softcap == 0.0f && !params.alibi_slopes && params.mask_kind < MaskKind::F32);
}

// Calls `change(score, column, row)` for every score. Its key is first_key + `column`, and `column` is lane_column plus
// a constant.
template <int N8, class Change>
static __device__ __forceinline__ void for_each_score(float (&s)[N8][4], int lane_column, Change change) {
#pragma unroll
    for (int j = 0; j < N8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) change(s[j][e], lane_column + 8 * j + (e & 1), e >> 1);
}

// The same in a rolled loop, for rare features: four scores per iteration. Registers cannot be indexed, so the scores
// rotate through s[0]. `find` gathers what `change` needs for all four first: it may read memory.
template <int N8, class Find, class Change> static __device__ __forceinline__ void
for_each_score_rolled(float (&s)[N8][4], int lane_column, Find find, Change change) {
#pragma unroll 1
    for (int j = 0; j < N8; j++, lane_column += 8) {
        decltype(find(0, 0)) found[4];
        float first[4];
#pragma unroll
        for (int e = 0; e < 4; e++) found[e] = find(lane_column + (e & 1), e >> 1);
#pragma unroll
        for (int e = 0; e < 4; e++) first[e] = change(s[0][e], found[e]);
#pragma unroll
        for (int i = 0; i < N8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] = i + 1 < N8 ? s[i + 1 < N8 ? i + 1 : 0][e] : first[e];
    }
}

// Reads a boolean mask row of 64 keys, 16 per lane of a quad. Bit k of the result is set if key k is kept.
static __device__ __forceinline__ unsigned long long gather_mask(const unsigned char *row, int quad_lane) {
    uint4 bytes;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                 : "l"(row + 16 * quad_lane));
    // Sets the high bit of each non-zero byte; a multiplication gathers the four bits at the top.
    auto nibble = [](unsigned four) {
        return ((((four & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four) & 0x80808080u) * 0x00204081u >> 28;
    };
    unsigned low = nibble(bytes.x) | nibble(bytes.y) << 4 | nibble(bytes.z) << 8 | nibble(bytes.w) << 12;
    unsigned other = __shfl_xor_sync(~0u, low, 1);
    unsigned half = quad_lane & 1 ? other | low << 16 : low | other << 16;
    unsigned far = __shfl_xor_sync(~0u, half, 2);
    unsigned first = quad_lane & 2 ? far : half, second = quad_lane & 2 ? half : far;
    return first | (unsigned long long)second << 32;
}

// Applies a boolean mask. `inside`: every row sees all these keys, so the mask extends to them.
template <int N8, class Rows> static __device__ __forceinline__ void
apply_boolean_mask(const AttentionParameters &params, float (&s)[N8][4], const Rows &rows, int first_key, bool inside) {
    int quad_lane = threadIdx.x & 3;
    const unsigned char *mask = (const unsigned char *)params.mask;
    if constexpr (N8 % 8 == 0) {
        // Whether rows can be read in 16-byte chunks, the same for all rows of a mask.
        bool wide =
            inside && params.mask_strides.key == 1 &&
            ((params.mask + first_key) |
             (unsigned long long)(params.mask_strides.batch | params.mask_strides.head | params.mask_strides.row)) %
                    16 ==
                0;
        if (wide) {
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int part = 0; part < N8 / 8; part++) {
                    unsigned long long kept =
                        gather_mask(mask + rows[r].mask + first_key + 64 * part, quad_lane) >> (2 * quad_lane);
                    unsigned halves[2] = {(unsigned)kept, (unsigned)(kept >> 32)};
#pragma unroll
                    for (int j = 0; j < 8; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float &score = s[8 * part + j][2 * r + e];
                            if (!(halves[j / 4] >> (8 * (j % 4) + e) & 1)) score = -INF;
                        }
                }
            return;
        }
    }
    const unsigned char *row_masks[2] = {mask + rows[0].mask + first_key * params.mask_strides.key,
                                         mask + rows[1].mask + first_key * params.mask_strides.key};
    int starts[2] = {rows[0].start - first_key, rows[1].start - first_key},
        ends[2] = {rows[0].end - first_key, rows[1].end - first_key};
    auto keeps = [&](int column, int r) {
        // The mask need not extend to other keys; the structural mask hides them.
        bool there = column >= starts[r] && column < ends[r];
        return *(there ? row_masks[r] + column * params.mask_strides.key : mask);
    };
    for_each_score_rolled(s, 2 * quad_lane, keeps, [](float score, unsigned char kept) { return kept ? score : -INF; });
}

// Adds an additive mask to scores in natural units.
template <int N8, class Rows>
static __device__ __forceinline__ void apply_additive_mask(const AttentionParameters &params, float (&s)[N8][4],
                                                           const Rows &rows, int first_key, bool inside) {
    int lane_column = 2 * (threadIdx.x & 3);
    int bytes = params.mask_kind == MaskKind::F32 ? 4 : 2;
    // Read pairs of keys if they are contiguous and aligned, the same for all rows of a mask.
    bool pairs = inside && params.mask_strides.key == 1 && params.mask % (2 * bytes) == 0 &&
                 ((unsigned long long)(params.mask_strides.batch | params.mask_strides.head | params.mask_strides.row) |
                  first_key) %
                         2 ==
                     0;
    long long from[2] = {rows[0].mask + first_key * params.mask_strides.key,
                         rows[1].mask + first_key * params.mask_strides.key};
    if (pairs && params.mask_kind == MaskKind::F32) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < N8; j++) {
                float2 pair = __ldg((const float2 *)((const float *)params.mask + from[r] + lane_column) + 4 * j);
                s[j][2 * r] += pair.x;
                s[j][2 * r + 1] += pair.y;
            }
    } else if (pairs) {
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < N8; j++) {
                unsigned pair =
                    __ldg((const unsigned *)((const unsigned short *)params.mask + from[r] + lane_column) + 4 * j);
                unsigned short low = pair & 0xffff, high = pair >> 16;
                s[j][2 * r] += params.mask_kind == MaskKind::F16 ? Element<ElementType::F16>::to_float(low)
                                                                 : Element<ElementType::BF16>::to_float(low);
                s[j][2 * r + 1] += params.mask_kind == MaskKind::F16 ? Element<ElementType::F16>::to_float(high)
                                                                     : Element<ElementType::BF16>::to_float(high);
            }
    } else {
        int starts[2] = {rows[0].start - first_key, rows[1].start - first_key},
            ends[2] = {rows[0].end - first_key, rows[1].end - first_key};
        auto bias = [&](int column, int r) {
            // The mask need not extend to other keys; the structural mask hides them.
            bool there = column >= starts[r] && column < ends[r];
            return load_element(params.mask, there ? from[r] + column * params.mask_strides.key : 0,
                                mask_element(params.mask_kind));
        };
        for_each_score_rolled(s, lane_column, bias, [](float score, float bias) { return score + bias; });
    }
}

// The keys of some scores, and what they need. Each need is one warp-uniform branch.
struct ScoreKeys {
    int first_key;
    int new_tokens;       // the first key that is a new token: the tree mask begins there
    bool needs_structure; // some row of the tile does not see all of these keys
    bool needs_mask;      // the mask changes some of these scores
};

// Masks 16 rows of scores: hidden ones become -inf. `rows[0]` and `rows[1]` are the facts of this thread's two rows, 8
// apart.
template <int N8, class Rows> static __device__ __forceinline__ void
mask_scores(const AttentionParameters &params, float (&s)[N8][4], const Rows &rows, ScoreKeys keys) {
    int first_key = keys.first_key;
    int lane_column = 2 * (threadIdx.x & 3);
    if (IS_FALLBACK) {
        if (params.mask_kind == MaskKind::Bool && keys.needs_mask)
            apply_boolean_mask(params, s, rows, first_key, !keys.needs_structure);
        if (params.tree_mask && first_key + 8 * N8 > keys.new_tokens) {
            const unsigned *bits[2] = {(const unsigned *)params.tree_mask + rows[0].tree,
                                       (const unsigned *)params.tree_mask + rows[1].tree};
            int ends[2] = {rows[0].end, rows[1].end};
            auto hides = [&](int column, int r) {
                int token = first_key + column - keys.new_tokens;
                bool there = token >= 0 && first_key + column < ends[r];
                return there && !(bits[r][there ? token >> 5 : 0] >> (token & 31) & 1);
            };
            for_each_score_rolled(s, lane_column, hides,
                                  [](float score, bool hidden) { return hidden ? -INF : score; });
        }
    }
    if (keys.needs_structure) {
        // Columns relative to this lane's first.
        int starts[2] = {rows[0].start - first_key - lane_column, rows[1].start - first_key - lane_column};
        int ends[2] = {rows[0].end - first_key - lane_column, rows[1].end - first_key - lane_column};
        // Usually only causality hides keys, at the end of the row.
        if (__any_sync(~0u, starts[0] > -lane_column || starts[1] > -lane_column)) {
            for_each_score(s, 0, [&](float &score, int column, int r) {
                if (column < starts[r]) score = -INF;
            });
        }
        for_each_score(s, 0, [&](float &score, int column, int r) {
            if (column >= ends[r]) score = -INF;
        });
    }
}

// A factor that may have overflowed: 0 times infinity is NaN.
static __device__ __forceinline__ float clamp_float(float x) { return fminf(fmaxf(x, -MAX_FLOAT), MAX_FLOAT); }

// The factor from the scores that modify_scores leaves to exponents of 2. `scale`: of dot products.
static __device__ __forceinline__ float exponent_scale(const AttentionParameters &params, float scale) {
    return scores_are_unmodified(params) ? scale * LOG2_E : unit_of(params);
}

// Applies scale, softcap, ALiBi and masks to 16 rows of scores. Unmodified scores stay unscaled; the scale is folded
// into the exponential. See mask_scores. `dot_scale`: of dot products.
template <int N8, class Rows> static __device__ __forceinline__ void
modify_scores(const AttentionParameters &params, float dot_scale, float (&s)[N8][4], const Rows &rows, ScoreKeys keys) {
    int first_key = keys.first_key;
    int lane_column = 2 * (threadIdx.x & 3);
    if (!scores_are_unmodified(params)) {
        float unit = logit_unit(params);
        if (params.softcap != 0.0f) {
            // `tanh.approx` errs by 2^-11, which shows in the LSE.
            float inward = clamp_float(dot_scale / params.softcap), outward = params.softcap * unit;
            for_each_score(s, lane_column, [&](float &score, int, int) { score = tanhf(score * inward) * outward; });
        } else {
            float scale = dot_scale * unit;
            for_each_score(s, lane_column, [&](float &score, int, int) { score *= scale; });
        }
        if (params.alibi_slopes) {
            long long stride = params.key_positions.stride, lane_key = (first_key + lane_column) * stride;
            long long ahead[2] = {rows[0].position - lane_key, rows[1].position - lane_key};
            float slopes[2] = {rows[0].slope * -unit, rows[1].slope * -unit};
            constexpr long long EXACT = 1 << 23; // sums of such numbers and distances within a tile are exact in f32
            bool exact = ahead[0] < EXACT && ahead[0] > -EXACT && ahead[1] < EXACT && ahead[1] > -EXACT;
            if (__all_sync(~0u, exact)) {
                float distances[2] = {(float)(int)ahead[0], (float)(int)ahead[1]}, key_step = (float)stride;
                for_each_score(s, 0, [&](float &score, int column, int r) {
                    score = fmaf(fabsf(fmaf((float)-column, key_step, distances[r])), slopes[r], score);
                });
            } else {
                for_each_score(s, 0, [&](float &score, int column, int r) {
                    score = fmaf(fabsf((float)(ahead[r] - column * stride)), slopes[r], score);
                });
            }
        }
        if (params.mask_kind >= MaskKind::F32 && keys.needs_mask)
            apply_additive_mask(params, s, rows, first_key, !keys.needs_structure);
    }
    mask_scores(params, s, rows, keys);
}

// The score modifications of a call.
enum ScoreFeature {
    CAPS = 1,
    SLOPES = 2,
    SLOPES_BOTH_WAYS = 4,
    ADDS_MASK = 8,
    HIDES_BY_MASK = 16,
    HIDES_BY_TREE = 32,
    HAS_UNEVEN_ROWS = 64
};

static __device__ __forceinline__ int score_features(const AttentionParameters &params,
                                                     const PrefillParameters &prefill) {
    if (!IS_FALLBACK) return 0;
    int features = (params.softcap != 0.0f ? CAPS : 0) | (params.alibi_slopes ? SLOPES : 0) |
                   (params.mask_kind >= MaskKind::F32 ? ADDS_MASK : 0) |
                   (params.mask_kind == MaskKind::Bool ? HIDES_BY_MASK : 0);
    // With causality, keys after the row are hidden anyway.
    return features | (params.alibi_slopes && params.window.right > 0 ? SLOPES_BOTH_WAYS : 0) |
           (params.tree_mask ? HIDES_BY_TREE : 0) | (has_uneven_ranges(params) ? HAS_UNEVEN_ROWS : 0);
}

// Terms that are folded into the exponential: multiply scores by `scale`; then, if `steps`, add `step` per key of
// distance.
struct ExponentTerms {
    float scale, step;
    float distance; // from the first row's position back to this thread's first key
    bool steps;
};
