// Score modifications of decode, from dot products to exponents: scale, softcap, ALiBi, masks and structure.
#pragma once
#include "common/problem.cuh"
#include "common/row_facts.cuh"
#include "decode/decode_shape.cuh"
#include "common/state.cuh"

// Units of scores (state.cuh): log2 for unmodified scores, natural units otherwise.
static __device__ __forceinline__ float unit_of(const AttentionParameters &params) {
    return !IS_FALLBACK || params.unmodified_scores ? 1.0f : LOG2_E;
}

// The row facts of a tile, and the keys that need no structural mask.
struct RowView {
    const RowFacts *rows;       // from the first row of this warp
    int every_start, every_end; // keys that every row of the tile sees by structure
    int new_tokens;             // the first key that is a new token
#if LISTS
    int entries[MMA_KEY_TILES][2]; // of this lane's scores of a K tile; -1 if skipped
#endif
};

// Calls `change(score, key, row)` for every score.
template <class Change> static __device__ __forceinline__ void for_each_score(Scores &scores, const RowView &view,
                                                                              int first_key, int lane, Change change) {
#pragma unroll
    for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const RowFacts &row = view.rows[8 * n + 2 * (lane & 3) + r];
#pragma unroll
            for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
#if LISTS
                    int key = view.entries[k][half];
#else
                    int key = first_key + 16 * k + (lane >> 2) + 8 * half;
#endif
                    change(scores[k][n][2 * half + r], key, row);
                }
        }
}

// Applies scale, softcap, ALiBi and masks. Each feature is one warp-uniform branch. __fmul_rn keeps the scale from
// being fused with a later subtraction, so a score has the same bits whichever branch its K tile takes.
static __device__ __forceinline__ void modify_scores(const AttentionParameters &params, Scores &scores,
                                                     const RowView &view, int first_key, int lane) {
#if !READS_CODES // scores of codes are scaled already, per row and key
    // Unmodified scores: log2(e) is folded into the scale.
    bool unmodified = !IS_FALLBACK || params.unmodified_scores;
    float scale = unmodified ? params.scale * LOG2_E : params.scale;
#pragma unroll
    for (int k = 0; k < MMA_KEY_TILES; k++)
#pragma unroll
        for (int n = 0; n < MMA_ROW_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[k][n][e] = __fmul_rn(scores[k][n][e], scale);
#endif
    if (IS_FALLBACK && params.softcap != 0.0f) {
        float inverse = 1.0f / params.softcap;
        for_each_score(scores, view, first_key, lane,
                       [&](float &score, int, const RowFacts &) { score = params.softcap * tanhf(score * inverse); });
    }
    if (IS_FALLBACK && params.alibi_slopes) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            score -= row.slope * fabsf((float)(row.position - key * params.key_positions.stride));
        });
    }
    if (IS_FALLBACK && params.mask_kind >= MaskKind::Bool) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            if (key < row.start || key >= row.end) return; // the mask need not extend to there
            long long at = row.mask + key * params.mask_strides.key;
            if (params.mask_kind == MaskKind::Bool) {
                if (!((const unsigned char *)params.mask)[at]) score = -INF;
            } else {
                score += load_element(params.mask, at, mask_element(params.mask_kind));
            }
        });
    }
    if (IS_FALLBACK && params.tree_mask && (LISTS || first_key + TILE_KEYS > view.new_tokens)) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            int token = key - view.new_tokens;
            if (token < 0 || key >= row.end) return;
            if (!(((const unsigned *)params.tree_mask)[row.tree + (token >> 5)] >> (token & 31) & 1)) score = -INF;
        });
    }
    if (LISTS || first_key < view.every_start || first_key + TILE_KEYS > view.every_end) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            if (key < row.start || key >= row.end) score = -INF;
        });
    }
}
