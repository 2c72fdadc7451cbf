// Per-row parameters of scores (position, mask, tree, ALiBi slope), the same in every kernel.
#pragma once
#include "common/problem.cuh"

struct RowFacts {
    int start, end; // keys it sees by structure; none if there is no such row
    int token;
    float slope;
    long long position; // counted from that of the first key
    long long mask;     // element offset of its mask row
    long long tree;     // word offset of its tree bits
};

// Offsets of a row's mask and tree bits. `Tile`: of decode or of prefill.
template <class Tile> static __device__ __forceinline__ long long mask_offset(const AttentionParameters &params,
                                                                              const Tile &tile, int head, int token) {
    return tile.sequence * params.mask_strides.batch + head * params.mask_strides.head +
           token * params.mask_strides.row;
}

template <class Tile> static __device__ __forceinline__ long long tree_offset(const AttentionParameters &params,
                                                                              const Tile &tile, int token) {
    return tile.sequence * params.tree_strides.batch + token * params.tree_strides.row;
}

// The number of a token in its sequence: rows with lists are sequences of one token to decode.
static __device__ __forceinline__ int token_of_sequence(const SequenceInfo &s, int token) {
#if LISTS
    return s.first_token + token;
#else
    return token;
#endif
}

// The facts of a row that exists. IS_FALLBACK: also those of slopes, masks and trees.
template <bool IS_FALLBACK, class Tile>
static __device__ __forceinline__ RowFacts row_facts(const AttentionParameters &params, const Tile &tile, int head,
                                                     int token) {
    RowFacts facts = {0, 0, 0, 0.0f, 0, 0, 0};
    facts.token = token;
    facts.start = visible_start(params, tile.seq, token);
    facts.end = visible_end(params, tile.seq, token);
    if (IS_FALLBACK) {
        facts.position = tile.seq.offset + token;
        if (params.alibi_slopes) facts.slope = load_slope(params, head);
        facts.mask = mask_offset(params, tile, head, token_of_sequence(tile.seq, token));
        facts.tree = tree_offset(params, tile, token_of_sequence(tile.seq, token));
    }
    return facts;
}
