// What the attention kernels share: where a sequence's rows and keys are, what a row sees, and how a dot product becomes a score.
//
// Scores are in base 2 (times log2 e), so that a probability is one exp2; where a mask or a sink may bring any finite number (WIDE), in base 16,
// so that those beyond 2^127 still have their place and their distances. No code relies on infinities: a hidden key is told by a
// flag, an empty state by a sum of 0, so the kernels also stand being compiled with fast math.

// ---- function constants: what a pipeline is specialised on. The host sets all of them; see pipeline.rs --------------------------
constant int HEAD_DIM [[function_constant(0)]];
constant int VALUE_DIM [[function_constant(1)]];
// Query rows a threadgroup.
constant int BLOCK_ROWS [[function_constant(2)]];
// Keys a tile (prefill).
constant int TILE_KEYS [[function_constant(3)]];
constant int SIMD_GROUPS [[function_constant(4)]];
// Whether a threadgroup leaves a partial state for `merge`.
constant bool PARTIAL [[function_constant(5)]];
// Whether a threadgroup walks several splits, joined in key order (prefill).
constant bool FOLDS [[function_constant(6)]];
// Whether causality or a window hides keys.
constant bool BOUNDED [[function_constant(7)]];
constant bool SOFTCAP [[function_constant(8)]];
constant bool ALIBI [[function_constant(9)]];
constant bool SINKS [[function_constant(10)]];
// 0 none, 1 boolean, 2 float, 3 half, 4 bfloat.
constant int MASK [[function_constant(11)]];
constant bool TREE [[function_constant(12)]];
// Slots a page; 0 where keys are not paged.
constant int BLOCK_SIZE [[function_constant(13)]];
constant bool LSE [[function_constant(14)]];
// Whether the output is f32 though the inputs are not.
constant bool OUT_FLOAT [[function_constant(15)]];
// Whether every row of queries, keys and values starts at a multiple of 4 elements and has a multiple of 4.
constant bool ALIGNED [[function_constant(16)]];

// Bounds are function constants: once a pipeline is specialised they are known, and arrays that such loops index live in registers.
#define UNROLL _Pragma("clang loop unroll(full)")

// Whether scores are in base 16.
#define WIDE (MASK >= 2 || SINKS)
// From natural units to those of scores, and back.
#define SCORE_UNIT (WIDE ? 0.36067376022224085184f : 1.44269504088896340736f)
#define NATURAL_UNIT (WIDE ? 2.77258872223978123768f : 0.69314718055994530942f)
// The score of nothing: no score is lower.
#define LOWEST (WIDE ? -1.70141183e+38f : -3.402823466e+38f)
// Where scores in base 16 end: f32's largest number in natural units, less three roundings, so that the way back cannot overflow.
constant float LARGEST_WIDE = 1.22730900e+38f;
constant uint MINUS_INFINITY = 0xff800000u;
constant int SIMD_WIDTH = 32;

inline long least(long a, long b) { return a < b ? a : b; }
inline long most(long a, long b) { return a < b ? b : a; }

// ---- sequences ----------------------------------------------------------------------------------------------------------------
// The operands besides queries, keys, values and outputs. What a call has not is bound to something and never read.
struct Extras {
    device const uchar* mask;
    device const float* slopes;
    device const float* sinks;
    device const int* tree;
    device const int* kv_lens;
    device const int* cu_seqlens_q;
    device const int* cu_seqlens_k;
    device const int* block_table;
    device const int* q_offsets;
};

struct Sequence {
    int index;
    int q_len;
    int kv_len;
    // The position of the first query row.
    long position;
    // Its first row and key in ragged tensors, 0 in batched ones.
    int q_start;
    int kv_start;
};

// A pair of neighbouring cumulative lengths, clamped to what there is: only the device may know them.
inline int2 span(device const int* cumulative, int index, int total) {
    int start = clamp(cumulative[index], 0, total);
    int end = clamp(cumulative[index + 1], start, total);
    return int2(start, end - start);
}

inline Sequence sequence_at(int index, constant AttentionCall& call, Extras extras) {
    Sequence sequence;
    sequence.index = index;
    int2 queries = int2(0, call.query_len);
    if (call.ragged_queries != 0) queries = span(extras.cu_seqlens_q, index, call.query_total);
    int2 keys = int2(0, call.kv_len);
    if (call.ragged_keys != 0) keys = span(extras.cu_seqlens_k, index, call.key_total);
    sequence.q_start = queries.x;
    sequence.q_len = min(queries.y, call.query_len);
    sequence.kv_start = keys.x;
    sequence.kv_len = keys.y;
    if (call.given_kv_lens != 0) sequence.kv_len = clamp(extras.kv_lens[index], 0, keys.y);
    if (call.offset_kind == 0) sequence.position = long(sequence.kv_len) - long(sequence.q_len);
    if (call.offset_kind == 1) sequence.position = call.q_offset;
    if (call.offset_kind == 2) sequence.position = extras.q_offsets[index];
    return sequence;
}

// The keys x..y that a query at this position sees by causality, window and length.
inline int2 visible(long position, Sequence sequence, constant AttentionCall& call) {
    if (!BOUNDED) return int2(0, sequence.kv_len);
    long end = most(0, least(position + call.window_right + 1, sequence.kv_len));
    long start = most(0, least(position - call.window_left, end));
    return int2(int(start), int(end));
}

// ---- addresses, in 64 bits ------------------------------------------------------------------------------------------------------
// Where the keys (or values) of one sequence and head are.
template <typename T>
struct Keys {
    device const T* data;
    long block_stride;
    long token_stride;
    device const int* table;
    int blocks;
};

template <typename T>
inline device const T* key_address(Keys<T> keys, int key) {
    if (BLOCK_SIZE == 0) return keys.data + long(key) * keys.token_stride;
    // Entries of visible pages are checked where the host can read them; here they cannot leave the pool.
    int block = clamp(keys.table[key / BLOCK_SIZE], 0, keys.blocks - 1);
    return keys.data + (long(block) * keys.block_stride + long(key % BLOCK_SIZE) * keys.token_stride);
}

template <typename T>
inline Keys<T> keys_of(device const T* data, long batch_stride, long token_stride, long head_stride, int head,
                       Sequence sequence, constant AttentionCall& call, Extras extras) {
    Keys<T> keys;
    long first = long(head) * head_stride;
    if (BLOCK_SIZE == 0) first += long(sequence.index) * batch_stride + long(sequence.kv_start) * token_stride;
    keys.data = data + first;
    keys.block_stride = batch_stride;
    keys.token_stride = token_stride;
    keys.table = extras.block_table + long(sequence.index) * call.table_stride;
    keys.blocks = call.blocks;
    return keys;
}

// Four neighbouring elements from `dim` on, zeros past `dims`.
template <typename T>
inline vec<T, 4> load_4(device const T* row, int dim, int dims) {
    if (ALIGNED) {
        if (dim >= dims) return vec<T, 4>(T(0));
        return *(device const vec<T, 4>*)(row + dim);
    }
    vec<T, 4> elements = vec<T, 4>(T(0));
    for (int i = 0; i < 4; i++) {
        if (dim + i < dims) elements[i] = row[dim + i];
    }
    return elements;
}

template <typename T>
inline void load(device const T* row, int dim, int dims, thread float4& elements) {
    elements = float4(load_4(row, dim, dims));
}

template <typename T>
inline void load(device const T* row, int dim, int dims, thread float2& elements) {
    if (ALIGNED) {
        elements = float2(0.0f);
        if (dim < dims) elements = float2(*(device const vec<T, 2>*)(row + dim));
        return;
    }
    for (int i = 0; i < 2; i++) elements[i] = dim + i < dims ? float(row[dim + i]) : 0.0f;
}

// ---- scores -------------------------------------------------------------------------------------------------------------------
// A query row: query heads that share a key/value head are rows beside each other, so row r is token r / group.
struct Row {
    int token;
    int head;
    // The keys that it sees by causality, window and length; none for a row past the last.
    int start;
    int end;
    long position;
    // -slope, in the unit of scores.
    float slope;
    long mask;
    long tree;
};

inline Row row_at(int row, int kv_head, Sequence sequence, constant AttentionCall& call, Extras extras) {
    Row it;
    bool real = row < sequence.q_len * call.group;
    int place = real ? row : 0;
    it.token = place / call.group;
    it.head = kv_head * call.group + place % call.group;
    it.position = sequence.position + it.token;
    int2 keys = real ? visible(it.position, sequence, call) : int2(0, 0);
    it.start = keys.x;
    it.end = keys.y;
    it.slope = ALIBI ? -extras.slopes[it.head] * SCORE_UNIT : 0.0f;
    it.mask = long(sequence.index) * call.mask_batch_stride + long(it.head) * call.mask_head_stride +
              long(it.token) * call.mask_row_stride;
    it.tree = long(sequence.index) * call.tree_batch_stride + long(it.token) * call.tree_row_stride;
    return it;
}

// A score where scores end. Written so that NaN stays.
inline float within_range(float score) {
    score = score < -LARGEST_WIDE ? -LARGEST_WIDE : score;
    return score > LARGEST_WIDE ? LARGEST_WIDE : score;
}

// Adds the additive mask's element; whether it leaves the key visible. Only minus infinity hides: the lowest finite numbers, which
// stand for "hidden" in many engines' masks, do not, so a row of nothing else is not empty.
inline bool mask_bias(float bias, thread float& score) {
    if (as_type<uint>(bias) == MINUS_INFINITY) return false;
    score = within_range(fma(bias, SCORE_UNIT, score));
    return true;
}

// The base of the scores to the power of a difference of scores that is not above 0. In base 16 what is far below is raised first: it cannot
// overflow, and its power is 0 all the same.
inline float power(float difference) {
    if (!WIDE) return exp2(difference);
    return exp2(4.0f * (difference < -64.0f ? -64.0f : difference));
}

// From a dot product to a score, in the contract's order; whether the row sees the key.
inline bool score_key(thread float& score, Row row, int key, Sequence sequence, constant AttentionCall& call, Extras extras) {
    if (key < row.start || key >= row.end) return false;
    score *= call.score_factor;
    if (SOFTCAP) score = precise::tanh(score) * call.softcap;
    if (ALIBI) score += row.slope * fabs(float(row.position - long(key)));
    if (MASK != 0) {
        long at = row.mask + long(key) * call.mask_key_stride;
        if (MASK == 1 && extras.mask[at] == 0) return false;
        if (MASK == 2 && !mask_bias(((device const float*)extras.mask)[at], score)) return false;
        if (MASK == 3 && !mask_bias(float(((device const half*)extras.mask)[at]), score)) return false;
        if (MASK == 4 && !mask_bias(float(((device const bfloat*)extras.mask)[at]), score)) return false;
    }
    if (TREE) {
        long token = long(key) - (long(sequence.kv_len) - long(sequence.q_len));
        if (token >= 0 && (uint(extras.tree[row.tree + token / 32]) >> uint(token % 32) & 1u) == 0) return false;
    }
    return true;
}

// ---- states -------------------------------------------------------------------------------------------------------------------
// A row's running softmax: the largest score and the sum of power(score - max); a sum of 0 is the empty state.
struct State {
    float max;
    float sum;
};

inline State empty_state() {
    State state;
    state.max = LOWEST;
    state.sum = 0.0f;
    return state;
}

// Joins two states over disjoint keys; the factors by which their outputs count. Written with fma so that every kernel that joins
// gives the same bits.
inline State join(State a, State b, thread float& factor_a, thread float& factor_b) {
    factor_a = 1.0f;
    factor_b = 0.0f;
    if (b.sum == 0.0f) return a;
    factor_a = 0.0f;
    factor_b = 1.0f;
    if (a.sum == 0.0f) return b;
    State joined;
    joined.max = max(a.max, b.max);
    factor_a = power(a.max - joined.max);
    factor_b = power(b.max - joined.max);
    joined.sum = fma(b.sum, factor_b, a.sum * factor_a);
    return joined;
}

// A sink is a key without a value.
inline State sink_state(float logit) {
    State state = empty_state();
    if (as_type<uint>(logit) == MINUS_INFINITY) return state;
    state.max = within_range(logit * SCORE_UNIT);
    state.sum = 1.0f;
    return state;
}

// The state with the head's sink, and what the row's output is multiplied by in the end; 0 for an empty row.
inline State finish(State state, int head, Extras extras, thread float& factor) {
    float unused;
    factor = 1.0f;
    if (SINKS) state = join(state, sink_state(extras.sinks[head]), factor, unused);
    factor = state.sum == 0.0f ? 0.0f : factor / state.sum;
    return state;
}

// ---- outputs --------------------------------------------------------------------------------------------------------------------
struct Outputs {
    device uchar* out;
    device uint* lse;
    device float* partials;
};

inline long output_row(Row row, Sequence sequence, long batch_stride, long token_stride, long head_stride) {
    return long(sequence.index) * batch_stride + (long(sequence.q_start) + long(row.token)) * token_stride +
           long(row.head) * head_stride;
}

template <typename T>
inline void write_out(Outputs outputs, long at, float value) {
    // Adding 0 turns -0 into 0: whether a row met keys that it sees nothing of leaves no trace.
    value += 0.0f;
    if (OUT_FLOAT) {
        ((device float*)outputs.out)[at] = value;
    } else {
        ((device T*)outputs.out)[at] = T(value);
    }
}

inline void write_lse(Outputs outputs, Row row, Sequence sequence, State state, constant AttentionCall& call) {
    long at = output_row(row, sequence, call.lse_batch_stride, call.lse_token_stride, call.lse_head_stride);
    // As bits: a minus infinity in arithmetic would not survive fast math.
    outputs.lse[at] = state.sum == 0.0f ? MINUS_INFINITY : as_type<uint>(fma(state.max, NATURAL_UNIT, log(state.sum)));
}

// The partial state of a row and split: VALUE_DIM sums, the maximum, the sum.
inline device float* partial_at(Outputs outputs, int row, int split, int kv_head, Sequence sequence, constant AttentionCall& call) {
    long state = (long(sequence.index) * long(call.kv_heads) + long(kv_head)) * long(call.rows) + long(row);
    return outputs.partials + (state * long(call.splits) + long(split)) * long(VALUE_DIM + 2);
}

// ---- what a threadgroup does ------------------------------------------------------------------------------------------------------
struct Work {
    // Its first row, of those of a sequence and key/value head.
    int first_row;
    int rows;
    int split;
    // The keys that some row of the block sees, within the split.
    int start;
    int end;
};

// Threadgroup x of the grid is a block of rows and a split. Blocks with the most keys (in causal order, the last) come first.
inline Work work_at(uint x, Sequence sequence, constant AttentionCall& call) {
    Work work;
    int splits = PARTIAL ? call.splits : 1;
    work.split = int(x % uint(splits));
    work.first_row = (call.row_blocks - 1 - int(x / uint(splits))) * BLOCK_ROWS;
    work.rows = min(BLOCK_ROWS, sequence.q_len * call.group - work.first_row);
    work.start = 0;
    work.end = 0;
    if (work.rows <= 0) return work;
    long first = sequence.position + work.first_row / call.group;
    long last = sequence.position + (work.first_row + work.rows - 1) / call.group;
    work.start = visible(first, sequence, call).x;
    work.end = visible(last, sequence, call).y;
    if (PARTIAL) {
        long from = long(work.split) * call.split_keys;
        work.start = int(most(work.start, least(from, work.end)));
        work.end = int(least(work.end, from + call.split_keys));
    }
    work.end = max(work.start, work.end);
    return work;
}
