// Scores of a query row, and states of online softmax: shared by the attention kernels, after common.metal.

// ---- scores ---------------------------------------------------------------------------------------------------------

// A query row. Packed GQA: the query heads of a key/value head are neighbouring rows, so row r is token r / group.
struct RowFacts {
    int token;
    int head;
    // The keys that causality, window and length leave to it; none for a row past the last.
    int start;
    int end;
    // Counted from that of the first key.
    long position;
    // -slope, in the unit of scores.
    float slope;
    long mask;
    long tree;
    // The first new token, for a tree mask.
    int first_new;
};

METAL_FUNC RowFacts load_row(int row, SequenceHead head, constant AttentionParameters& params,
                             OptionalOperands operands) {
    const Sequence sequence = head.sequence;
    RowFacts facts;
    const bool exists = row < sequence.q_len * params.group;
    const int place = exists ? row : 0;
    facts.token = place / params.group;
    facts.head = head.kv_head * params.group + place % params.group;
    facts.position = sequence.position + facts.token;
    const int2 keys = exists ? visible_range(facts.position, sequence, params) : int2(0, 0);
    facts.start = keys.x;
    facts.end = keys.y;
    facts.slope = ALIBI ? -operands.slopes[facts.head] * SCORE_UNIT : 0.0f;
    facts.mask = long(sequence.index) * params.mask_strides.batch + long(facts.head) * params.mask_strides.head +
                 long(sequence.first_token + facts.token) * params.mask_strides.row;
    facts.tree = long(sequence.index) * params.tree_strides.batch +
                 long(sequence.first_token + facts.token) * params.tree_strides.row;
    facts.first_new = sequence.first_new;
    return facts;
}

// Keeps NaN.
METAL_FUNC float clamp_score(float score) {
    score = score < -MAX_SCORE ? -MAX_SCORE : score;
    return score > MAX_SCORE ? MAX_SCORE : score;
}

// Adds an element of the additive mask. False if it hides the key, which only minus infinity does: many engines write
// the lowest finite number for "hidden", and a row with nothing else is not empty by the contract.
METAL_FUNC bool mask_bias(float bias, thread float& score) {
    if (as_type<uint>(bias) == MINUS_INFINITY) return false;
    score = clamp_score(fma(bias, SCORE_UNIT, score));
    return true;
}

// exp2 of a number that is not above 0. The precise variant: with the errors that the fast one may have, one in a
// thousand random problems misses the tolerance in f32.
METAL_FUNC float exp2_of_negative(float x) { return exp2(x); }

// The base of the scores to the power of a difference of scores that is not above 0. In base 16 the difference is
// bounded first: four times it could overflow, and the power is 0 all the same.
METAL_FUNC float score_exp(float difference) {
    if (!BASE_16) return exp2_of_negative(difference);
    return exp2_of_negative(4.0f * (difference < -64.0f ? -64.0f : difference));
}

// Turns a dot product into a score, in the contract's order: scale, softcap, ALiBi, mask. False if a mask hides the
// key. The bounds of the row (causality, window, length) are the caller's: tiles inside all of them skip the test. The
// mask is not read where, by the tile map, it changes nothing (`reads_mask`).
METAL_FUNC bool modify_score(thread float& score, RowFacts row, int key, bool reads_mask,
                             constant AttentionParameters& params, OptionalOperands operands) {
    score *= params.score_factor;
    if (SOFTCAP) score = precise::tanh(score) * params.softcap;
    if (ALIBI) score += row.slope * fabs(float(row.position - long(key) * params.key_stride));
    if (!mask_is(MaskKind::None) && !reads_mask) {
        // As if a bias of 0 were added.
        if (!mask_is(MaskKind::Bool)) score = clamp_score(score);
    } else if (!mask_is(MaskKind::None)) {
        const long at = row.mask + long(key) * params.mask_strides.key;
        device const uchar* mask = operands.mask;
        if (mask_is(MaskKind::Bool) && mask[at] == 0) return false;
        if (mask_is(MaskKind::F32) && !mask_bias(((device const float*)mask)[at], score)) return false;
        if (mask_is(MaskKind::F16) && !mask_bias(float(((device const half*)mask)[at]), score)) return false;
        if (mask_is(MaskKind::BF16) && !mask_bias(float(((device const bfloat*)mask)[at]), score)) return false;
    }
    if (TREE) {
        const long token = long(key) - long(row.first_new);
        if (token >= 0 && (uint(operands.tree[row.tree + token / 32]) >> uint(token % 32) & 1u) == 0) return false;
    }
    return true;
}

// ---- states ---------------------------------------------------------------------------------------------------------

// Online softmax of a row: the largest score, and the sum of score_exp(score - max). A sum of 0 is the empty state.
struct State {
    float max;
    float sum;
};

METAL_FUNC State empty_state() {
    State state;
    state.max = MIN_SCORE;
    state.sum = 0.0f;
    return state;
}

// Merges two states over disjoint keys; `factor_a` and `factor_b` rescale their outputs. With explicit fma, so that
// every kernel that merges gives the same bits.
METAL_FUNC State merge_states(State a, State b, thread float& factor_a, thread float& factor_b) {
    factor_a = 1.0f;
    factor_b = 0.0f;
    if (b.sum == 0.0f) return a;
    factor_a = 0.0f;
    factor_b = 1.0f;
    if (a.sum == 0.0f) return b;
    State merged;
    merged.max = max(a.max, b.max);
    factor_a = score_exp(a.max - merged.max);
    factor_b = score_exp(b.max - merged.max);
    merged.sum = fma(b.sum, factor_b, a.sum * factor_a);
    return merged;
}

// A sink is a key without a value.
METAL_FUNC State sink_state(float logit) {
    State state = empty_state();
    if (as_type<uint>(logit) == MINUS_INFINITY) return state;
    state.max = clamp_score(logit * SCORE_UNIT);
    state.sum = 1.0f;
    return state;
}

// The epilogue of a row: adds the head's sink; `factor` normalizes the row's output, and is 0 for an empty row.
METAL_FUNC State finalize_row(State state, int head, OptionalOperands operands, thread float& factor) {
    float unused;
    factor = 1.0f;
    if (SINKS) state = merge_states(state, sink_state(operands.sinks[head]), factor, unused);
    factor = state.sum == 0.0f ? 0.0f : factor / state.sum;
    return state;
}

// ---- outputs --------------------------------------------------------------------------------------------------------
struct Outputs {
    device uchar* out;
    device uint* lse;
    device float* partials;
};

// The place of a row in the queries or the outputs.
METAL_FUNC long row_offset(RowFacts row, Sequence sequence, constant RowStrides& strides) {
    return long(sequence.index) * strides.batch + (long(sequence.q_start) + long(row.token)) * strides.token +
           long(row.head) * strides.head;
}

template <typename T>
METAL_FUNC void store_out(Outputs outputs, long at, float value) {
    // Adding 0 turns -0 into 0: -0 would depend on which invisible keys were in a tile.
    value += 0.0f;
    if (OUT_FLOAT) {
        ((device float*)outputs.out)[at] = value;
    } else {
        ((device T*)outputs.out)[at] = T(value);
    }
}

METAL_FUNC void store_lse(Outputs outputs, RowFacts row, Sequence sequence, State state,
                          constant AttentionParameters& params) {
    long at = row_offset(row, sequence, params.lse_strides);
    // As bits: fast math does not preserve a minus infinity in arithmetic.
    outputs.lse[at] = state.sum == 0.0f ? MINUS_INFINITY : as_type<uint>(fma(state.max, NATURAL_UNIT, log(state.sum)));
}

// The partial state of a row and split: VALUE_DIM sums, the maximum, the sum.
METAL_FUNC device float* partial_at(Outputs outputs, int row, int split, SequenceHead head,
                                    constant AttentionParameters& params) {
    const int number = LISTS != 0 ? head.sequence.list_row : head.sequence.index;
    long heads = long(number) * long(params.kv_heads) + long(head.kv_head);
    long state = heads * long(params.rows) + long(row);
    return outputs.partials + (state * long(params.splits) + long(split)) * long(VALUE_DIM + 2);
}

// ---- the rows and keys of a threadgroup -----------------------------------------------------------------------------
// A tile: rows of one sequence and key/value head (packed GQA), and the split of keys that the threadgroup has.
struct RowTile {
    // The first row, counted from the first of the sequence and key/value head.
    int first_row;
    int rows;
    int split;
    // The keys of the split that some row of the tile sees.
    int start;
    int end;
};

// Threadgroup x of the grid has a row tile and a split. With a causal mask the last row tile has the most keys, so it
// runs first.
METAL_FUNC RowTile load_row_tile(uint x, SequenceHead head, constant AttentionParameters& params,
                                 OptionalOperands operands) {
    const Sequence sequence = head.sequence;
    RowTile tile;
    int splits = PARTIAL ? params.splits : 1;
    tile.split = int(x % uint(splits));
    tile.first_row = (params.row_blocks - 1 - int(x / uint(splits))) * TILE_ROWS;
    tile.rows = min(TILE_ROWS, sequence.q_len * params.group - tile.first_row);
    tile.start = 0;
    tile.end = 0;
    if (tile.rows <= 0) return tile;
    long first = sequence.position + tile.first_row / params.group;
    long last = sequence.position + (tile.first_row + tile.rows - 1) / params.group;
    if (LISTS != 0) {
        // Entries of the list.
        tile.end = list_len(head, params, operands);
    } else {
        tile.start = visible_range(first, sequence, params).x;
        tile.end = visible_range(last, sequence, params).y;
    }
    if (PARTIAL) {
        long from = long(tile.split) * params.split_keys;
        tile.start = int(max_long(tile.start, min_long(from, tile.end)));
        tile.end = int(min_long(tile.end, from + params.split_keys));
    }
    tile.end = max(tile.start, tile.end);
    return tile;
}
