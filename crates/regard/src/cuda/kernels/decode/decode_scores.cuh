// From dot products to the powers of 2 of a softmax: scale, softcap, ALiBi, masks, and what a row does not see.
#pragma once
#include "common/problem.cuh"
#include "decode/decode_shape.cuh"
#include "common/state.cuh"

// The units of scores (state.cuh): natural ones where something comes between the product and the exponential.
static __device__ __forceinline__ float unit_of(const AttentionParameters &p) { return !IS_GENERAL || p.bare_scores ? 1.0f : LOG2_E; }

// What a row's scores depend on.
struct RowFacts {
    int start, end; // the keys it sees by structure
    int token;
    float slope;
    long long position;
    long long mask; // element offset of its mask row
    long long tree; // word offset of its tree bits
};

// The rows' facts of one tile, and which keys need no second look.
struct RowView {
    const RowFacts *rows;     // of this warp's first row
    int each_start, each_end; // keys that every row of the tile sees by structure
    int new_tokens;           // the first key that is a new token
};

// Calls `change(score, key, row)` for every score.
template <class Change> static __device__ __forceinline__ void for_each_score(Scores &scores, const RowView &view, int first_key, int lane, Change change) {
#pragma unroll
    for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const RowFacts &row = view.rows[8 * n + 2 * (lane & 3) + r];
#pragma unroll
            for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    change(scores[k][n][2 * half + r], first_key + 16 * k + (lane >> 2) + 8 * half, row);
                }
        }
}

// Each feature is one branch that all threads take together. Products that something is subtracted from later are kept from being fused
// with it: the same score is then rounded the same, whichever branch its strip takes.
static __device__ __forceinline__ void finish_scores(const AttentionParameters &p, Scores &scores, const RowView &view, int first_key, int lane) {
    // Where nothing comes between the product and the exponential, their factors are one.
    bool bare = !IS_GENERAL || p.bare_scores;
    float scale = bare ? p.scale * LOG2_E : p.scale;
#pragma unroll
    for (int k = 0; k < KEY_TILES; k++)
#pragma unroll
        for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) scores[k][n][e] = __fmul_rn(scores[k][n][e], scale);
    if (IS_GENERAL && p.softcap != 0.0f) {
        float inverse = 1.0f / p.softcap;
        for_each_score(scores, view, first_key, lane, [&](float &score, int, const RowFacts &) { score = p.softcap * tanhf(score * inverse); });
    }
    if (IS_GENERAL && p.alibi_slopes) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            score -= row.slope * fabsf((float)(row.position - key));
        });
    }
    if (IS_GENERAL && p.mask_type >= 1) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            if (key < row.start || key >= row.end) return; // the mask need not reach there
            long long at = row.mask + key * p.mask_key_stride;
            if (p.mask_type == 1) {
                if (!((const unsigned char *)p.mask)[at]) score = -INFINITE;
            } else {
                score += load_element(p.mask, at, p.mask_type == 2 ? F32 : p.mask_type == 3 ? F16 : BF16);
            }
        });
    }
    if (IS_GENERAL && p.tree_mask && first_key + STRIP > view.new_tokens) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            int token = key - view.new_tokens;
            if (token < 0 || key >= row.end) return;
            if (!(((const unsigned *)p.tree_mask)[row.tree + (token >> 5)] >> (token & 31) & 1)) score = -INFINITE;
        });
    }
    if (first_key < view.each_start || first_key + STRIP > view.each_end) {
        for_each_score(scores, view, first_key, lane, [&](float &score, int key, const RowFacts &row) {
            if (key < row.start || key >= row.end) score = -INFINITE;
        });
    }
}
