// Shared by the attention kernels: sequences, addresses, visible keys, loads of elements. Scores are in scores.metal.
//
// Scores are in base 2 (times log2 e), so that a probability is one exp2. An additive mask or a sink may be any finite
// number; scores are in base 16 then (BASE_16), which keeps numbers beyond 2^127 and their distances. No code relies on
// infinities, so the kernels also work if compiled with fast math: a flag marks a hidden key, and a sum of 0 marks an
// empty state.

// Contraction would depend on how a pipeline is specialized, and batch-invariant bits must not. The kernels call fma
// explicitly.
#pragma METAL fp contract(off)

// ---- function constants: a pipeline is specialized on them. The host sets all of them; see metal/launch.rs ----------
constant int HEAD_DIM [[function_constant(0)]];
constant int VALUE_DIM [[function_constant(1)]];
// Query rows per tile of rows, which a threadgroup has.
constant int TILE_ROWS [[function_constant(2)]];
// Keys per K tile (prefill).
constant int TILE_KEYS [[function_constant(3)]];
constant int SIMD_GROUPS [[function_constant(4)]];
// Whether a threadgroup stores a partial state, which combine.metal combines (split-KV).
constant bool PARTIAL [[function_constant(5)]];
// Whether a threadgroup walks several splits and combines them in key order (prefill).
constant bool WALKS_SPLITS [[function_constant(6)]];
// Whether causality or a window hides keys.
constant bool BOUNDED [[function_constant(7)]];
constant bool SOFTCAP [[function_constant(8)]];
constant bool ALIBI [[function_constant(9)]];
constant bool SINKS [[function_constant(10)]];
// A MaskKind: function constants are numbers.
constant int MASK_KIND [[function_constant(11)]];
constant bool TREE [[function_constant(12)]];
// Slots per page; 0 if keys are not paged.
constant int BLOCK_SIZE [[function_constant(13)]];
constant bool LSE [[function_constant(14)]];
// Whether the output is f32 and the inputs are not.
constant bool OUT_FLOAT [[function_constant(15)]];
// Whether every row of queries, keys and values starts at a multiple of 4 elements and is a multiple of 4 long.
constant bool ALIGNED [[function_constant(16)]];
// The storage of keys and values: a KvFormat.
constant int KEY_FORMAT [[function_constant(17)]];
constant int VALUE_FORMAT [[function_constant(18)]];
// The kind of entries in the lists of keys (decode): 0 where there are none, 1 for positions, 2 for physical
// slots, 3 for pages, 4 for pages with their numbers in the sequence, 5 for physical slots of two caches.
constant int LISTS [[function_constant(19)]];
// Whether key dims from VALUE_DIM on are in a tensor of their own.
constant bool TWO_PARTS [[function_constant(20)]];
// A list of pages: entry e is slot e % BLOCK_SIZE of page e / BLOCK_SIZE. The rows of a sequence share it.
#define LISTS_OF_PAGES (LISTS == 3 || LISTS == 4)
#define LISTS_OF_SLOTS (LISTS == 2 || LISTS == 5)
// A row's entries are those of its list, then those of its list into the second cache.
#define TWO_CACHES (LISTS == 5)

// Loops over register arrays are bounded by template arguments, and function constants only guard their bodies: the
// arrays reach registers even if the compiler unrolls before it specializes.
#define UNROLL _Pragma("clang loop unroll(full)")
#define NO_UNROLL _Pragma("clang loop unroll(disable)")

// Whether scores are in base 16.
#define BASE_16 (MASK_KIND >= int(MaskKind::F32) || SINKS)
// From natural units to those of scores, and back.
#define SCORE_UNIT (BASE_16 ? 0.36067376022224085184f : 1.44269504088896340736f)
#define NATURAL_UNIT (BASE_16 ? 2.77258872223978123768f : 0.69314718055994530942f)
// The max of an empty state: no score is lower.
#define MIN_SCORE (BASE_16 ? -1.70141183e+38f : -3.402823466e+38f)
// Bound of scores in base 16: the largest f32 in natural units, less three roundings, so that the conversion back
// cannot overflow.
constant float MAX_SCORE = 1.22730900e+38f;
constant uint MINUS_INFINITY = 0xff800000u;
constant int SIMD_WIDTH = 32;

METAL_FUNC bool mask_is(MaskKind kind) { return MASK_KIND == int(kind); }
METAL_FUNC bool is_format(int format, KvFormat expected) { return format == int(expected); }
METAL_FUNC bool is_native(int format) { return is_format(format, KvFormat::Native); }
// Whether elements are codes with a separate tensor of scales.
METAL_FUNC bool has_scales(int format) {
    return is_format(format, KvFormat::E4M3) || is_format(format, KvFormat::E5M2) || is_format(format, KvFormat::I8);
}
METAL_FUNC float max_of_simdgroup(float x) {
    UNROLL
    for (int bit = 1; bit < SIMD_WIDTH; bit *= 2) x = max(x, simd_shuffle_xor(x, ushort(bit)));
    return x;
}
METAL_FUNC bool any_of_simdgroup(bool x) { return max_of_simdgroup(x ? 1.0f : 0.0f) != 0.0f; }

METAL_FUNC long min_long(long a, long b) { return a < b ? a : b; }
METAL_FUNC long max_long(long a, long b) { return a < b ? b : a; }

// Quotient of a number that is not negative and one that is positive. GPUs have no division of 64 bits, and a
// compiler's own takes hundreds of instructions at every place. Numbers of more than 32 bits are rare.
METAL_FUNC long divide_long(long dividend, long divisor) {
    const ulong from = ulong(dividend);
    const ulong by = ulong(divisor);
    if ((from | by) >> 32 == 0) return long(uint(from) / uint(by));
    ulong quotient = 0;
    ulong remainder = 0;
    NO_UNROLL
    for (int bit = 62; bit >= 0; bit--) {
        remainder = remainder * 2 + (from >> ulong(bit) & 1u);
        if (remainder < by) continue;
        remainder -= by;
        quotient |= ulong(1) << ulong(bit);
    }
    return long(quotient);
}

struct ThreadPosition {
    uint3 group;
    int lane;
    int simdgroup;
    int index;
};

// ---- sequences ------------------------------------------------------------------------------------------------------

// The operands besides queries, keys, values and outputs. Absent ones are bound to another buffer and never read.
struct OptionalOperands {
    device const uchar* mask;
    device const float* slopes;
    device const float* sinks;
    device const int* tree;
    device const int* kv_lens;
    device const int* cu_seqlens_q;
    device const int* cu_seqlens_k;
    device const int* block_table;
    device const int* q_offsets;
    device const float* k_scales;
    device const float* v_scales;
    device const uchar* map;
    device const int* key_offsets;
    // Of lists of keys or of pages.
    device const int* key_indices;
    device const int* key_counts;
    device const int* page_numbers;
    // Of the second cache.
    device const float* second_k_scales;
    device const float* second_v_scales;
    device const int* second_indices;
    device const int* second_counts;
};

// Queries, keys and values, and those of the second cache. Keys and values of another type are read as bytes.
template <typename T>
struct Inputs {
    device const T* q;
    device const T* k;
    device const T* v;
    // Key dims from VALUE_DIM on, if TWO_PARTS.
    device const T* rotary_k;
    device const T* second_k;
    device const T* second_v;
};

struct Sequence {
    int index;
    int q_len;
    int kv_len;
    // The position of the first query row, counted from that of the first key.
    long position;
    // The position of the first key.
    long key_offset;
    // The first row and key in ragged tensors, 0 in batched ones.
    int q_start;
    int kv_start;
    // The first key that is a new token, for a tree mask.
    int first_new;
    // With lists of keys a threadgroup's sequence is one row: its number among all rows, and among those of its
    // sequence.
    int list_row;
    int first_token;
};

// A key/value head of a sequence: what a threadgroup works on.
struct SequenceHead {
    Sequence sequence;
    int kv_head;
};

// Start and length of one sequence by its cumulative lengths. They may be known to the device alone, so they are
// clamped to the tensor.
METAL_FUNC int2 ragged_range(device const int* cumulative, int index, int total) {
    int start = clamp(cumulative[index], 0, total);
    int end = clamp(cumulative[index + 1], start, total);
    return int2(start, end - start);
}

METAL_FUNC Sequence load_sequence(int index, constant AttentionParameters& params, OptionalOperands operands) {
    Sequence sequence;
    sequence.index = index;
    int2 queries = int2(0, params.query_len);
    if (params.ragged_queries != 0) queries = ragged_range(operands.cu_seqlens_q, index, params.query_len);
    int2 keys = int2(0, params.kv_len);
    if (params.ragged_keys != 0) keys = ragged_range(operands.cu_seqlens_k, index, params.kv_len);
    sequence.q_start = queries.x;
    sequence.q_len = min(queries.y, params.query_len_bound);
    sequence.kv_start = keys.x;
    sequence.kv_len = min(keys.y, params.kv_len_bound);
    if (params.given_kv_lens != 0) sequence.kv_len = clamp(operands.kv_lens[index], 0, sequence.kv_len);
    if (params.offset_kind == OffsetKind::BottomRight) sequence.position = long(sequence.kv_len) - long(sequence.q_len);
    if (params.offset_kind == OffsetKind::Same) sequence.position = params.q_offset;
    if (params.offset_kind == OffsetKind::PerSequence) sequence.position = operands.q_offsets[index];
    sequence.key_offset = params.key_offset;
    if (params.given_key_offsets != 0) sequence.key_offset = operands.key_offsets[index];
    sequence.position -= sequence.key_offset;
    sequence.first_new = sequence.kv_len - sequence.q_len;
    sequence.list_row = 0;
    sequence.first_token = 0;
    return sequence;
}

// Slots of a pool; the number past the last one that an entry can name, at most.
METAL_FUNC int slots_of(int blocks, int block_size) {
    return int(min_long(long(blocks) * long(block_size), 0x7fffffff));
}

// A row with a list of keys, as a sequence of one token. It has none if no sequence has the row.
METAL_FUNC Sequence load_listed_row(int row, constant AttentionParameters& params, OptionalOperands operands) {
    int index = 0;
    int first = 0;
    if (params.ragged_queries != 0) {
        // The first sequence that ends after the row.
        int high = params.sequences;
        while (index < high) {
            const int middle = (index + high) / 2;
            if (clamp(operands.cu_seqlens_q[middle + 1], 0, params.query_len) <= row) index = middle + 1;
            else high = middle;
        }
        if (index < params.sequences) first = ragged_range(operands.cu_seqlens_q, index, params.query_len).x;
    } else {
        index = row / params.query_len;
        first = index * params.query_len;
    }
    const int token = row - first;
    Sequence sequence = load_sequence(min(index, params.sequences - 1), params, operands);
    sequence.list_row = row;
    if (index >= params.sequences || token < 0 || token >= sequence.q_len) {
        sequence.q_len = 0;
        return sequence;
    }
    sequence.first_token = token;
    sequence.position += token;
    sequence.q_start += token;
    sequence.q_len = 1;
    // Any position may be listed, and entries of two caches are held to the slots of their own (`listed_key`).
    if (LISTS_OF_PAGES || TWO_CACHES) sequence.kv_len = 0x7fffffff;
    // Slots have no positions: a row sees all of the pool.
    if (LISTS == 2) sequence.kv_len = slots_of(params.blocks, BLOCK_SIZE);
    return sequence;
}

// The sequence that index `index` of the grid stands for.
METAL_FUNC Sequence load_grid_sequence(int index, constant AttentionParameters& params, OptionalOperands operands) {
    if (LISTS != 0) return load_listed_row(index, params, operands);
    return load_sequence(index, params, operands);
}

// The sequence and key/value head of a threadgroup.
METAL_FUNC SequenceHead load_sequence_head(ThreadPosition at, constant AttentionParameters& params,
                                           OptionalOperands operands) {
    return {load_grid_sequence(params.first_sequence + int(at.group.z), params, operands), int(at.group.y)};
}

// Keys before a position, which is counted from that of the first key.
METAL_FUNC long keys_before(long position, Sequence sequence, constant AttentionParameters& params) {
    const long bounded = max_long(0, min_long(position, long(sequence.kv_len) * params.key_stride));
    return params.key_stride == 1 ? bounded : divide_long(bounded + params.key_stride - 1, params.key_stride);
}

// The keys x..y that causality, window and length leave to a query at this position.
METAL_FUNC int2 visible_range(long position, Sequence sequence, constant AttentionParameters& params) {
    if (!BOUNDED) return int2(0, sequence.kv_len);
    long end = position + params.window_right + 1;
    long start = position - params.window_left;
    if (params.chunk > 0) {
        // Chunked attention: the start of the position's chunk, rounded down.
        const long at = position + sequence.key_offset;
        const long chunks = divide_long(at < 0 ? params.chunk - 1 - at : at, params.chunk);
        const long chunk = (at < 0 ? -chunks : chunks) * params.chunk - sequence.key_offset;
        start = max_long(start, chunk);
        end = min_long(end, chunk + params.chunk);
    }
    end = keys_before(end, sequence, params);
    start = min_long(keys_before(start, sequence, params), end);
    return int2(int(start), int(end));
}

// ---- addresses, in 64 bits ------------------------------------------------------------------------------------------

// The keys (or values, or scales) of one sequence and head. T is uchar where KEY_FORMAT (VALUE_FORMAT) is not Native.
template <typename T>
struct KeyView {
    device const T* data;
    long page_stride;
    long token_stride;
    device const int* table;
    int pages;
    // Of the tensor of key dims from VALUE_DIM on, if TWO_PARTS.
    device const T* rotary_data;
    long rotary_page_stride;
    long rotary_token_stride;
    // Of the second cache, if there are two.
    device const T* second_data;
    long second_page_stride;
    long second_token_stride;
    int second_block_size;
};

// A key is a key of the sequence, a slot of the pool (the second one, if `in_second`), or an entry of a list of pages.
template <typename T>
METAL_FUNC device const T* key_address(KeyView<T> keys, int key, bool in_second = false) {
    if (BLOCK_SIZE == 0) return keys.data + long(key) * keys.token_stride;
    if (TWO_CACHES) {
        // Selects, so that the loads of keys in flight have no branches between them.
        const int block_size = in_second ? keys.second_block_size : BLOCK_SIZE;
        const int block = key / block_size;
        const long page_stride = in_second ? keys.second_page_stride : keys.page_stride;
        const long token_stride = in_second ? keys.second_token_stride : keys.token_stride;
        device const T* data = in_second ? keys.second_data : keys.data;
        return data + (long(block) * page_stride + long(key - block * block_size) * token_stride);
    }
    // Entries of visible pages are checked where the host can read them; here they cannot leave the pool.
    int page = LISTS == 2 ? key / BLOCK_SIZE : clamp(keys.table[key / BLOCK_SIZE], 0, keys.pages - 1);
    return keys.data + (long(page) * keys.page_stride + long(key % BLOCK_SIZE) * keys.token_stride);
}

// A row of keys or values. Keys have a second row if TWO_PARTS.
template <typename T>
struct KeyRow {
    device const T* row;
    device const T* rotary;
};

template <typename T>
METAL_FUNC KeyRow<T> key_row(KeyView<T> keys, int key, bool in_second = false) {
    device const T* row = key_address(keys, key, in_second);
    if (!TWO_PARTS) return {row, row};
    keys.data = keys.rotary_data;
    keys.page_stride = keys.rotary_page_stride;
    keys.token_stride = keys.rotary_token_stride;
    return {row, key_address(keys, key)};
}

// The start of the list of a row (of its sequence, if lists are of pages) and key/value head.
METAL_FUNC long list_start(SequenceHead head, constant TokenStrides& strides) {
    const int owner = LISTS_OF_PAGES ? head.sequence.index : head.sequence.list_row;
    return long(owner) * strides.token + long(head.kv_head) * strides.head;
}

// `unit` is the distance between elements in T.
template <typename T>
METAL_FUNC KeyView<T> key_view(device const T* data, constant RowStrides& strides, SequenceHead head,
                               constant AttentionParameters& params, OptionalOperands operands, long unit = 1) {
    const Sequence sequence = head.sequence;
    KeyView<T> keys;
    long first = long(head.kv_head) * strides.head;
    if (BLOCK_SIZE == 0) first += long(sequence.index) * strides.batch + long(sequence.kv_start) * strides.token;
    keys.data = data + first * unit;
    keys.page_stride = strides.batch * unit;
    keys.token_stride = strides.token * unit;
    keys.table = operands.block_table + long(sequence.index) * params.block_table_stride;
    if (LISTS_OF_PAGES) keys.table = operands.key_indices + list_start(head, params.list_strides);
    keys.pages = params.blocks;
    keys.rotary_data = keys.data;
    keys.rotary_page_stride = 0;
    keys.rotary_token_stride = 0;
    keys.second_data = keys.data;
    keys.second_page_stride = 0;
    keys.second_token_stride = 0;
    keys.second_block_size = 1;
    return keys;
}

// The same with the tensor of key dims from VALUE_DIM on.
template <typename T>
METAL_FUNC KeyView<T> with_rotary(KeyView<T> keys, device const T* data, constant RowStrides& strides,
                                  SequenceHead head, constant AttentionParameters& params, OptionalOperands operands,
                                  long unit = 1) {
    if (!TWO_PARTS) return keys;
    const KeyView<T> rotary = key_view(data, strides, head, params, operands, unit);
    keys.rotary_data = rotary.data;
    keys.rotary_page_stride = rotary.page_stride;
    keys.rotary_token_stride = rotary.token_stride;
    return keys;
}

// The same with the keys of the second cache.
template <typename T>
METAL_FUNC KeyView<T> with_second(KeyView<T> keys, device const T* data, constant RowStrides& strides,
                                  SequenceHead head, constant AttentionParameters& params, long unit = 1) {
    if (!TWO_CACHES) return keys;
    keys.second_data = data + long(head.kv_head) * strides.head * unit;
    keys.second_page_stride = strides.batch * unit;
    keys.second_token_stride = strides.token * unit;
    keys.second_block_size = params.second.block_size;
    return keys;
}

// The list of keys (or of pages, and their numbers) of a row and key/value head, and the keys that the row sees by
// structure.
struct KeyList {
    device const int* entries;
    device const int* numbers;
    int2 visible;
    // With two caches: the list into the second one, which has so many slots; entries from `first_len` on are its.
    device const int* second_entries;
    int second_slots;
    int first_len;
};

// Entries in use of the list of a row and key/value head, without those of a second list.
METAL_FUNC int first_list_len(SequenceHead head, constant AttentionParameters& params, OptionalOperands operands) {
    if (params.given_key_counts == 0) return params.list_len;
    return clamp(operands.key_counts[list_start(head, params.count_strides)], 0, params.list_len);
}

// Entries in use of all its lists.
METAL_FUNC int list_len(SequenceHead head, constant AttentionParameters& params, OptionalOperands operands) {
    const int len = first_list_len(head, params, operands);
    if (!TWO_CACHES) return len;
    constant SecondCache& second = params.second;
    if (second.given_counts == 0) return len + second.len;
    return len + clamp(operands.second_counts[list_start(head, second.count_strides)], 0, second.len);
}

METAL_FUNC KeyList key_list(SequenceHead head, constant AttentionParameters& params, OptionalOperands operands) {
    KeyList list = {operands.key_indices, operands.key_indices, int2(0, 0), operands.key_indices, 0, 0};
    if (LISTS == 0) return list;
    list.entries = operands.key_indices + list_start(head, params.list_strides);
    list.numbers = list.entries;
    if (LISTS == 4) list.numbers = operands.page_numbers + list_start(head, params.number_strides);
    list.visible = visible_range(head.sequence.position, head.sequence, params);
    if (TWO_CACHES) {
        list.visible.y = slots_of(params.blocks, BLOCK_SIZE);
        list.second_entries = operands.second_indices + list_start(head, params.second.list_strides);
        list.second_slots = slots_of(params.second.blocks, params.second.block_size);
        list.first_len = first_list_len(head, params, operands);
    }
    return list;
}

// Whether an entry is one of the list into the second cache.
METAL_FUNC bool is_second_entry(KeyList list, int entry) { return TWO_CACHES && entry >= list.first_len; }

// The key that an entry names; -1 if it names none, or one that the row does not see. Keys of pages without numbers are
// the entries themselves.
template <typename T>
METAL_FUNC int listed_key(KeyList list, KeyView<T> keys, int entry) {
    if (LISTS_OF_PAGES) {
        const int page = list.entries[entry / BLOCK_SIZE];
        if (page < 0 || page >= keys.pages) return -1;
        if (LISTS == 3) return entry;
        const long key = long(list.numbers[entry / BLOCK_SIZE]) * BLOCK_SIZE + entry % BLOCK_SIZE;
        return key < list.visible.x || key >= list.visible.y ? -1 : int(key);
    }
    if (TWO_CACHES) {
        const bool in_second = is_second_entry(list, entry);
        device const int* entries = in_second ? list.second_entries : list.entries;
        const int slot = entries[in_second ? entry - list.first_len : entry];
        return slot < 0 || slot >= (in_second ? list.second_slots : list.visible.y) ? -1 : slot;
    }
    const int key = list.entries[entry];
    if (key < list.visible.x || key >= list.visible.y) return -1;
    if (LISTS == 1 && BLOCK_SIZE != 0) {
        const int page = keys.table[key / BLOCK_SIZE];
        if (page < 0 || page >= keys.pages) return -1;
    }
    return key;
}

// A vector of a row of `dims`: the dims from `first` on. `is_inside` where the caller knows that all of it is there:
// the compiler does not know how many lanes there are.
struct RowPart {
    int first;
    int dims;
    bool is_inside;
};

// WIDTH neighbouring elements, zeros past the last dim. WIDTH is 2 or 4, so aligned rows (ALIGNED) end at a multiple
// of it.
template <typename T, int WIDTH>
METAL_FUNC vec<T, WIDTH> load_vector(device const T* row, RowPart part) {
    if (ALIGNED) {
        if (!part.is_inside && part.first >= part.dims) return vec<T, WIDTH>(T(0));
        return *(device const vec<T, WIDTH>*)(row + part.first);
    }
    vec<T, WIDTH> elements = vec<T, WIDTH>(T(0));
    UNROLL
    for (int i = 0; i < WIDTH; i++) {
        // Of a vector that is in both parts of a key, the first dims are before the second part.
        const bool is_before = TWO_PARTS && part.first + i < 0;
        if (part.is_inside || (!is_before && part.first + i < part.dims)) elements[i] = row[part.first + i];
    }
    return elements;
}

// ---- keys and values of another type than the queries ---------------------------------------------------------------

// Bytes of an element: of a block of 32 values in Q8_0 and Q4_0, of a row of Mla656.
METAL_FUNC long format_bytes(int format) {
    if (is_format(format, KvFormat::F32)) return 4;
    if (is_format(format, KvFormat::F16) || is_format(format, KvFormat::BF16)) return 2;
    if (is_format(format, KvFormat::Q8_0)) return 34;
    if (is_format(format, KvFormat::Q4_0)) return 18;
    if (is_format(format, KvFormat::Mla656)) return 656;
    return 1;
}

// Keys (or values) by their type: a specialized pipeline uses one of the views.
template <typename T>
struct CacheView {
    KeyView<T> native;
    KeyView<uchar> bytes;
};

template <typename T>
METAL_FUNC CacheView<T> cache_view(device const T* data, constant RowStrides& strides, int format, SequenceHead head,
                                   constant AttentionParameters& params, OptionalOperands operands) {
    return {key_view(data, strides, head, params, operands),
            key_view((device const uchar*)data, strides, head, params, operands, format_bytes(format))};
}

// The same with the tensor of key dims from VALUE_DIM on.
template <typename T>
METAL_FUNC CacheView<T> with_rotary(CacheView<T> cache, device const T* data, constant RowStrides& strides, int format,
                                    SequenceHead head, constant AttentionParameters& params,
                                    OptionalOperands operands) {
    return {with_rotary(cache.native, data, strides, head, params, operands),
            with_rotary(cache.bytes, (device const uchar*)data, strides, head, params, operands,
                        format_bytes(format))};
}

// The same with the second cache.
template <typename T>
METAL_FUNC CacheView<T> with_second(CacheView<T> cache, device const T* data, constant RowStrides& strides, int format,
                                    SequenceHead head, constant AttentionParameters& params) {
    return {with_second(cache.native, data, strides, head, params),
            with_second(cache.bytes, (device const uchar*)data, strides, head, params, format_bytes(format))};
}

// The scales of keys and values in codes.
struct ScaleViews {
    KeyView<float> keys;
    KeyView<float> values;
};

METAL_FUNC ScaleViews scale_views(SequenceHead head, constant AttentionParameters& params, OptionalOperands operands) {
    return {key_view(operands.k_scales, params.key_scale_strides, head, params, operands),
            key_view(operands.v_scales, params.value_scale_strides, head, params, operands)};
}

// The same with those of the second cache.
METAL_FUNC ScaleViews with_second(ScaleViews scales, SequenceHead head, constant AttentionParameters& params,
                                  OptionalOperands operands) {
    constant SecondCache& second = params.second;
    return {with_second(scales.keys, operands.second_k_scales, second.key_scale_strides, head, params),
            with_second(scales.values, operands.second_v_scales, second.value_scale_strides, head, params)};
}

// The value of a code. 8-bit codes are exact in every type of queries.
METAL_FUNC float decode_code(uchar code, int format) {
    if (is_format(format, KvFormat::I8)) return float(char(code));
    // An e5m2 is the upper byte of a half.
    if (is_format(format, KvFormat::E5M2)) return float(as_type<half>(ushort(uint(code) << 8)));
    // Exponent and mantissa of an e4m3, in their places of a half, whose exponent bias is 8 more.
    const uint magnitude = code & 0x7fu;
    const uint bits = magnitude == 0x7fu ? 0x7e00u : magnitude << 7;
    return float(as_type<half>(ushort(bits | (code & 0x80u) << 8))) * 256.0f;
}

// WIDTH neighbouring values of a row of Q8_0 or Q4_0 from `dim` on; `dim` is a multiple of WIDTH. Blocks are aligned to
// 2 bytes.
template <int WIDTH>
METAL_FUNC vec<float, WIDTH> load_block_values(device const uchar* row, int dim, int format) {
    const bool is_q4 = is_format(format, KvFormat::Q4_0);
    device const uchar* block = row + long(dim / 32) * format_bytes(format);
    const float scale = float(*(device const half*)block);
    const int value = dim % 32;
    // Byte i of a block of Q4_0 holds value i in its low four bits, and value i + 16 in its high ones.
    device const ushort* pairs = (device const ushort*)(block + 2 + (is_q4 ? value % 16 : value));
    vec<float, WIDTH> values;
    UNROLL
    for (int i = 0; i < WIDTH; i += 2) {
        const uint pair = pairs[i / 2];
        if (is_q4) {
            const uint nibbles = pair >> (value < 16 ? 0u : 4u);
            values[i] = scale * float(int(nibbles & 15u) - 8);
            values[i + 1] = scale * float(int(nibbles >> 8 & 15u) - 8);
        } else {
            values[i] = scale * float(char(pair & 0xffu));
            values[i + 1] = scale * float(char(pair >> 8));
        }
    }
    return values;
}

// WIDTH neighbouring values of a row of Mla656 from `dim` on; `dim` is a multiple of WIDTH.
template <int WIDTH>
METAL_FUNC vec<float, WIDTH> load_latent_values(device const uchar* row, int dim) {
    vec<float, WIDTH> values;
    if (dim < 512) {
        const float scale = ((device const float*)(row + 512))[dim / 128];
        UNROLL
        for (int i = 0; i < WIDTH; i++) values[i] = scale * decode_code(row[dim + i], int(KvFormat::E4M3));
    } else {
        device const bfloat* rotary = (device const bfloat*)(row + 528) + (dim - 512);
        UNROLL
        for (int i = 0; i < WIDTH; i++) values[i] = float(rotary[i]);
    }
    return values;
}

template <typename T, int WIDTH>
METAL_FUNC vec<float, WIDTH> load_floats(device const uchar* row, RowPart part) {
    const vec<T, WIDTH> elements = load_vector<T, WIDTH>((device const T*)row, part);
    vec<float, WIDTH> values;
    UNROLL
    for (int i = 0; i < WIDTH; i++) values[i] = float(elements[i]);
    return values;
}

// As load_vector: elements of the queries' type as they are, others as f32. Codes come without their scales, which
// join scores and probabilities; values of blocks with theirs, and exactly.
template <int WIDTH>
METAL_FUNC vec<float, WIDTH> load_elements(device const uchar* row, RowPart part, int format) {
    if (is_format(format, KvFormat::F32)) return load_floats<float, WIDTH>(row, part);
    if (is_format(format, KvFormat::F16)) return load_floats<half, WIDTH>(row, part);
    if (is_format(format, KvFormat::BF16)) return load_floats<bfloat, WIDTH>(row, part);
    if (!has_scales(format)) {
        if (!part.is_inside && part.first >= part.dims) return vec<float, WIDTH>(0.0f);
        if (is_format(format, KvFormat::Mla656)) return load_latent_values<WIDTH>(row, part.first);
        return load_block_values<WIDTH>(row, part.first, format);
    }
    const vec<uchar, WIDTH> codes = load_vector<uchar, WIDTH>(row, part);
    vec<float, WIDTH> values;
    UNROLL
    for (int i = 0; i < WIDTH; i++) values[i] = decode_code(codes[i], format);
    return values;
}
template <int WIDTH, typename T>
METAL_FUNC vec<T, WIDTH> load_elements(device const T* row, RowPart part, int) {
    return load_vector<T, WIDTH>(row, part);
}

// WIDTH neighbouring elements of a key's or value's row, in vectors V.
template <int WIDTH, typename V, typename T>
METAL_FUNC V load_row_vector(KeyRow<T> row, RowPart part, int format) {
    if (!TWO_PARTS || part.dims == VALUE_DIM) return load_elements<WIDTH>(row.row, part, format);
    const int rotary_dims = part.dims - VALUE_DIM;
    if (VALUE_DIM % WIDTH == 0) {
        const bool in_rotary = part.first >= VALUE_DIM;
        const RowPart own = {in_rotary ? part.first - VALUE_DIM : part.first, in_rotary ? rotary_dims : VALUE_DIM,
                             part.is_inside};
        return load_elements<WIDTH>(in_rotary ? row.rotary : row.row, own, format);
    }
    V elements = load_elements<WIDTH>(row.row, {part.first, VALUE_DIM, false}, format);
    const V rotary = load_elements<WIDTH>(row.rotary, {part.first - VALUE_DIM, rotary_dims, false}, format);
    UNROLL
    for (int i = 0; i < WIDTH; i++) {
        if (part.first + i >= VALUE_DIM) elements[i] = rotary[i];
    }
    return elements;
}

// As load_elements.
template <int WIDTH>
METAL_FUNC vec<float, WIDTH> load_row(KeyRow<uchar> row, RowPart part, int format) {
    return load_row_vector<WIDTH, vec<float, WIDTH>>(row, part, format);
}
template <int WIDTH, typename T>
METAL_FUNC vec<T, WIDTH> load_row(KeyRow<T> row, RowPart part, int format) {
    return load_row_vector<WIDTH, vec<T, WIDTH>>(row, part, format);
}
