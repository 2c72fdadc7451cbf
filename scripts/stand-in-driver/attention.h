// Computes the results that the kernels' parameters ask for, one row and one key at a time: docs/semantics.md in C++.
#pragma once
#include "../../crates/regard/src/cuda/kernels/common/parameters.cuh"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

constexpr int LANES = 16;

inline double load(unsigned long long address, long long index, ElementType type) {
    if (type == ElementType::F32) return ((const float *)address)[index];
    unsigned short bits = ((const unsigned short *)address)[index];
    if (type == ElementType::F16) {
        _Float16 number;
        std::memcpy(&number, &bits, 2);
        return number;
    }
    unsigned wide = (unsigned)bits << 16;
    float number;
    std::memcpy(&number, &wide, 4);
    return number;
}

// Elements that are neighbours, to the start of `to`. One loop per type: these loops take most of the time.
inline void load_row(unsigned long long address, long long index, ElementType type, int count, std::vector<float> &to) {
    const unsigned short *halves = (const unsigned short *)address + index;
    if (type == ElementType::F32) {
        std::memcpy(to.data(), (const float *)address + index, 4 * count);
    } else if (type == ElementType::F16) {
        for (int i = 0; i < count; i++) {
            _Float16 number;
            std::memcpy(&number, halves + i, 2);
            to[i] = number;
        }
    } else {
        for (int i = 0; i < count; i++) {
            unsigned wide = (unsigned)halves[i] << 16;
            std::memcpy(&to[i], &wide, 4);
        }
    }
}

inline void store(unsigned long long address, long long index, ElementType type, double value) {
    float number = (float)value;
    if (type == ElementType::F32) {
        ((float *)address)[index] = number;
        return;
    }
    unsigned short bits;
    if (type == ElementType::F16) {
        _Float16 half = (_Float16)number;
        std::memcpy(&bits, &half, 2);
    } else {
        unsigned wide;
        std::memcpy(&wide, &number, 4);
        bits = number != number ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
    ((unsigned short *)address)[index] = bits;
}

#include "quantize.h"

// The element type of an additive mask.
inline ElementType mask_element(MaskKind kind) { return kind == MaskKind::F32 ? ElementType::F32 : kind == MaskKind::F16 ? ElementType::F16 : ElementType::BF16; }

inline int int_at(unsigned long long address, long long index) { return ((const int *)address)[index]; }

inline int clamped(long long x, long long low, long long high) { return (int)std::min(std::max(x, low), high); }

// The place of one sequence's rows and keys.
struct Sequence {
    int index, q_start, q_len, kv_start, kv_len;
    long long offset, key_offset;
};

inline Sequence sequence_of(const AttentionParameters &p, int index) {
    Sequence s = {index, 0, p.query_len, 0, p.kv_len, 0, 0};
    if (p.cu_seqlens_q) {
        s.q_start = clamped(int_at(p.cu_seqlens_q, index), 0, p.query_len);
        s.q_len = clamped(int_at(p.cu_seqlens_q, index + 1), s.q_start, p.query_len) - s.q_start;
        s.q_len = std::min(s.q_len, p.query_len_bound);
    }
    if (p.cu_seqlens_k) {
        s.kv_start = clamped(int_at(p.cu_seqlens_k, index), 0, p.kv_len);
        s.kv_len = clamped(int_at(p.cu_seqlens_k, index + 1), s.kv_start, p.kv_len) - s.kv_start;
        s.kv_len = std::min(s.kv_len, p.kv_len_bound);
    }
    if (p.kv_lens) s.kv_len = clamped(int_at(p.kv_lens, index), 0, s.kv_len);
    s.offset = p.offset_kind == OffsetKind::BottomRight ? (long long)s.kv_len - s.q_len : p.offset_kind == OffsetKind::Same ? p.q_offset : int_at(p.q_offsets, index);
    s.key_offset = p.key_positions.offsets ? int_at(p.key_positions.offsets, index) : p.key_positions.offset;
    return s;
}

// The element offset of a key's row from the start of keys or values with these strides.
inline long long place_of_key(const AttentionParameters &p, const Sequence &s, long long key, const RowStrides &strides) {
    if (!p.block_size) {
        return p.cu_seqlens_k ? (s.kv_start + key) * strides.token : s.index * strides.batch + key * strides.token;
    }
    // Without a block table keys are physical slots, also keys of listed pages.
    long long entry = p.block_table ? int_at(p.block_table, s.index * p.block_table_stride + key / p.block_size) : key / p.block_size;
    return clamped(entry, 0, p.blocks - 1) * strides.batch + key % p.block_size * strides.token;
}

// The value of a code of 8 bits.
inline float code_value(unsigned char code, CacheFormat format) {
    if (format == CacheFormat::I8) return (signed char)code;
    if (format == CacheFormat::E5M2) {
        unsigned short bits = (unsigned short)(code << 8);
        _Float16 number;
        std::memcpy(&number, &bits, 2);
        return number;
    }
    int exponent = code >> 3 & 15, mantissa = code & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    float magnitude = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return code & 128 ? -magnitude : magnitude;
}

// The row of a key or its value in whatever format, as numbers.
inline void load_stored(const AttentionParameters &p, const Sequence &s, const KvTensor &stored, CacheFormat format, unsigned long long scales,
                        const RowStrides &scale_strides, long long key, int kv_head, int count, std::vector<float> &to) {
    long long at = place_of_key(p, s, key, stored.strides) + kv_head * stored.strides.head;
    if (format <= CacheFormat::F32) return load_row(stored.pointer, at, (ElementType)(int)format, count, to);
    if (format <= CacheFormat::I8) {
        float scale = (float)load(scales, place_of_key(p, s, key, scale_strides) + kv_head * scale_strides.head, ElementType::F32);
        for (int i = 0; i < count; i++) to[i] = scale * code_value(((const unsigned char *)stored.pointer)[at + i], format);
        return;
    }
    if (format == CacheFormat::Mla656) {
        const unsigned char *row = (const unsigned char *)stored.pointer + at * 656;
        for (int i = 0; i < count; i++) {
            to[i] = i < 512 ? (float)load((unsigned long long)row + 512, i / 128, ElementType::F32) * code_value(row[i], CacheFormat::E4M3)
                            : (float)load((unsigned long long)row + 528, i - 512, ElementType::BF16);
        }
        return;
    }
    const bool eight = format == CacheFormat::Q8_0;
    const unsigned char *blocks = (const unsigned char *)stored.pointer + at * (eight ? 34 : 18);
    for (int i = 0; i < count; i++) {
        const unsigned char *block = blocks + i / 32 * (eight ? 34 : 18);
        const int nibble = block[2 + i % 16] >> (i % 32 / 16 * 4) & 15;
        to[i] = (float)load((unsigned long long)block, 0, ElementType::F16) * (eight ? (float)(signed char)block[2 + i % 32] : (float)(nibble - 8));
    }
}

// How keys and values are stored, the tensor of key dims from the value dim on (null if a launch has none), and how many heads add up to one of keys.
struct StoredCache : CacheParameters {
    KvTensor rest = {};
    int key_terms = 1;
};

// The row of a key, whose dims may be in two tensors.
inline void load_key(const AttentionParameters &p, const StoredCache &cache, const Sequence &s, long long key, int kv_head, std::vector<float> &to) {
    auto load = [&](const KvTensor &stored, int count, std::vector<float> &to) {
        load_stored(p, s, stored, cache.key_format, cache.key_scales, cache.key_scale_strides, key, kv_head, count, to);
    };
    if (cache.key_terms > 1) {
        std::vector<float> term(p.head_dim);
        load_stored(p, s, p.keys, cache.key_format, 0, {}, key, cache.key_terms * kv_head, p.head_dim, to);
        for (int i = 1; i < cache.key_terms; i++) {
            load_stored(p, s, p.keys, cache.key_format, 0, {}, key, cache.key_terms * kv_head + i, p.head_dim, term);
            for (int dim = 0; dim < p.head_dim; dim++) to[dim] += term[dim];
        }
        return;
    }
    if (!cache.rest.pointer) return load(p.keys, p.head_dim, to);
    std::vector<float> rest(p.head_dim - p.value_dim);
    load(p.keys, p.value_dim, to);
    load(cache.rest, p.head_dim - p.value_dim, rest);
    std::copy(rest.begin(), rest.end(), to.begin() + p.value_dim);
}

// A key that a row attends to: its number, from which its position follows, and what has its address.
struct RowKey {
    long long key, address;
    bool in_second; // cache
};

// The pools of keys and values.
struct Pools {
    AttentionParameters attention;
    StoredCache cache;
};

// A call that reads the second cache in place of the first.
inline Pools pools_of_second(const AttentionParameters &p, const StoredCache &cache, const SecondCache &second) {
    Pools pools = {p, cache};
    pools.attention.keys = second.keys, pools.attention.values = second.values;
    pools.attention.blocks = second.blocks, pools.attention.block_size = second.block_size;
    pools.cache.rest = {};
    pools.cache.key_scales = second.key_scales, pools.cache.value_scales = second.value_scales;
    pools.cache.key_scale_strides = second.key_scale_strides, pools.cache.value_scale_strides = second.value_scale_strides;
    return pools;
}

// The score of a key, minus infinity where it is hidden. `row` has room for the key.
inline double score_of(const AttentionParameters &p, const StoredCache &cache, const Sequence &s, int token, int head, const std::vector<float> &query,
                       std::vector<float> &row, RowKey row_key, float key_scale) {
    const long long key = row_key.key;
    long long new_token = key - ((long long)s.kv_len - s.q_len);
    if (p.tree_mask && new_token >= 0) {
        unsigned word = int_at(p.tree_mask, s.index * p.tree_strides.batch + token * p.tree_strides.row + new_token / 32);
        if (!(word >> (new_token % 32) & 1)) return -INFINITY;
    }
    long long mask = s.index * p.mask_strides.batch + head * p.mask_strides.head + token * p.mask_strides.row + key * p.mask_strides.key;
    if (p.mask_kind == MaskKind::Bool && !((const unsigned char *)p.mask)[mask]) return -INFINITY;
    load_key(p, cache, s, row_key.address, head / p.group, row);
    // Sixteen sums, so that the compiler can keep them in vectors. Rows are read in full: `query` and `row` are padded with zeros.
    double sums[LANES] = {}, score = 0;
    for (size_t i = 0; i < query.size(); i += LANES) {
        for (int lane = 0; lane < LANES; lane++) sums[lane] += (double)query[i + lane] * row[i + lane];
    }
    for (double sum : sums) score += sum;
    score *= (double)p.scale * key_scale;
    if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
    if (p.alibi_slopes) score -= load(p.alibi_slopes, head, ElementType::F32) * std::fabs((double)(s.offset + token - s.key_offset - key * p.key_positions.stride));
    if (p.mask_kind >= MaskKind::F32) score += load(p.mask, mask, mask_element(p.mask_kind));
    return score;
}

// Scales of keys or values that were copied without them.
inline float head_scale(const HeadScales &scales, int sequence, int kv_head) {
    return scales.pointer ? ((const float *)scales.pointer)[sequence * scales.sequence_stride + kv_head * scales.stride] : 1.0f;
}

// The byte of the tile map for a key.
inline MapKind tile_of(const PrefillParameters &t, const Sequence &s, int token, int head, long long key) {
    if (!t.map.pointer) return MapKind::Mixed;
    long long row = t.map.strides.row ? token / t.map.tile_rows : 0;
    return (MapKind)((const unsigned char *)t.map.pointer)[s.index * t.map.strides.batch + head * t.map.strides.head + row * t.map.strides.row + key / t.map.tile_keys];
}

// The keys of the list of pages of a sequence and key/value head. `sees`: by position.
template <class Sees> std::vector<RowKey> keys_of_pages(const AttentionParameters &p, const Sequence &s, const ListParameters &lists, int kv_head, Sees sees) {
    std::vector<RowKey> keys;
    auto at = [&](const TokenStrides &strides) { return s.index * strides.token + kv_head * strides.head; };
    int len = lists.counts ? clamped(int_at(lists.counts, at(lists.count_strides)), 0, lists.len) : lists.len;
    for (int entry = 0; entry < len; entry++) {
        long long page = entry / p.block_size, slot = entry % p.block_size, key = entry;
        long long block = int_at(lists.indices, at(lists.index_strides) + page);
        if (block < 0 || block >= p.blocks) continue;
        if (lists.numbers) {
            key = int_at(lists.numbers, at(lists.number_strides) + page) * (long long)p.block_size + slot;
            if (key < 0 || key >= 0x7fffffff || !sees(key)) continue;
        }
        keys.push_back({key, block * p.block_size + slot, false});
    }
    return keys;
}

// The keys that a row attends to: the keys from `first` to `end`, or the keys among them that its list names.
inline std::vector<RowKey> keys_of(const AttentionParameters &p, const Sequence &s, const ListParameters *lists, int token, int kv_head, long long first,
                                   long long end) {
    std::vector<RowKey> keys;
    if (!lists) {
        for (long long key = first; key < end; key++) keys.push_back({key, key, false});
        return keys;
    }
    long long row = p.cu_seqlens_q ? s.q_start + token : (long long)s.index * p.query_len + token;
    int len = lists->counts ? int_at(lists->counts, row * lists->count_strides.token + kv_head * lists->count_strides.head) : lists->len;
    for (int i = 0; i < len; i++) {
        long long key = int_at(lists->indices, row * lists->index_strides.token + kv_head * lists->index_strides.head + i);
        if (key < first || key >= end) continue;
        if (p.block_size && p.block_table) {
            int page = int_at(p.block_table, s.index * p.block_table_stride + key / p.block_size);
            if (page < 0 || page >= p.blocks) continue;
        }
        keys.push_back({key, key, false});
    }
    const SecondCache &second = lists->second;
    if (!second.indices) return keys;
    len = second.counts ? int_at(second.counts, row * second.count_strides.token + kv_head * second.count_strides.head) : second.len;
    const long long slots = std::min((long long)second.blocks * second.block_size, 0x7fffffffll);
    for (int i = 0; i < len; i++) {
        long long slot = int_at(second.indices, row * second.index_strides.token + kv_head * second.index_strides.head + i);
        if (slot >= 0 && slot < slots) keys.push_back({slot, slot, true});
    }
    return keys;
}

inline void attend_row(const AttentionParameters &p, const StoredCache &cache, const PrefillParameters &t, const Sequence &s, const ListParameters *lists,
                       int token, int head) {
    ElementType type = cache.query_type;
    long long position = s.offset + token, place = s.q_start + token;
    // Row by row, so that ranges need no division.
    long long first = 0, end = 0;
    auto sees = [&](long long key) {
        long long at = s.key_offset + key * p.key_positions.stride;
        auto chunk_of = [&](long long x) { return (x - (x % p.chunk.length + p.chunk.length) % p.chunk.length) / p.chunk.length; };
        return position - p.window.left <= at && at <= position + p.window.right && (!p.chunk.length || chunk_of(at) == chunk_of(position));
    };
    const bool has_pages = lists && lists->are_pages;
    while (!has_pages && first < s.kv_len && !sees(first)) first++;
    for (end = first; !has_pages && end < s.kv_len && sees(end);) end++;
    const int padded = (p.head_dim + LANES - 1) / LANES * LANES;
    std::vector<float> query(padded), row(padded), value(p.value_dim);
    load_row(p.query.pointer, s.index * p.query.strides.batch + place * p.query.strides.token + head * p.query.strides.head, type, p.head_dim, query);
    double sink = p.sinks ? load(p.sinks, head, ElementType::F32) : -INFINITY, most = sink;
    std::vector<double> scores;
    AttentionParameters unmasked = p;
    unmasked.mask_kind = MaskKind::None;
    const std::vector<RowKey> keys =
        has_pages ? keys_of_pages(p, s, *lists, head / p.group, sees) : keys_of(p, s, lists, token, head / p.group, first, end);
    const Pools first_cache = {p, cache}, second_cache = lists ? pools_of_second(p, cache, lists->second) : first_cache;
    for (RowKey key : keys) {
        MapKind tile = tile_of(t, s, token, head, key.key);
        const AttentionParameters &of_key = key.in_second ? second_cache.attention : tile == MapKind::Full ? unmasked : p;
        const StoredCache &stored = key.in_second ? second_cache.cache : cache;
        const float key_scale =
            t.each_key.pointer ? ((const float *)t.each_key.pointer)[(s.index * p.kv_heads + head / p.group) * t.each_key.stride + key.key] : 1.0f;
        scores.push_back(tile == MapKind::Empty ? -INFINITY : score_of(of_key, stored, s, token, head, query, row, key, key_scale));
        most = std::max(most, scores.back());
    }
    double sum = sink == -INFINITY ? 0 : std::exp(sink - most);
    std::vector<double> out(p.value_dim, 0.0);
    const float value_scale = head_scale(t.value_scales, s.index, head / p.group);
    for (size_t i = 0; i < keys.size(); i++) {
        if (scores[i] == -INFINITY) continue;
        double weight = std::exp(scores[i] - most);
        sum += weight;
        const Pools &pools = keys[i].in_second ? second_cache : first_cache;
        load_stored(pools.attention, s, pools.attention.values, pools.cache.value_format, pools.cache.value_scales, pools.cache.value_scale_strides,
                    keys[i].address, head / p.group, p.value_dim, value);
        for (int i = 0; i < p.value_dim; i++) out[i] += weight * value[i] * value_scale;
    }
    long long to = s.index * p.out.strides.batch + place * p.out.strides.token + head * p.out.strides.head;
    for (int i = 0; i < p.value_dim; i++) store(p.out.pointer, to + i, p.out_f32 ? ElementType::F32 : type, sum > 0 ? out[i] / sum : 0.0);
    long long lse = s.index * p.lse.strides.batch + place * p.lse.strides.token + head * p.lse.strides.head;
    if (p.lse.pointer) store(p.lse.pointer, lse, ElementType::F32, sum > 0 ? most + std::log(sum) : -INFINITY);
}

// Keys and values as elements of the queries' type.
inline StoredCache elements_of(ElementType type) {
    StoredCache cache = {};
    cache.key_format = cache.value_format = (CacheFormat)(int)type;
    cache.query_type = type;
    return cache;
}

// The rows of all sequences of so many tokens.
inline void attend(const AttentionParameters &p, const StoredCache &cache, const PrefillParameters &t, long long least, long long most,
                   const ListParameters *lists = nullptr) {
    // With lists `batch` counts rows.
    const int sequences = lists ? lists->sequences : p.batch;
    for (int index = 0; index < sequences; index++) {
        Sequence s = sequence_of(p, index);
        if (lists && lists->are_slots) s.kv_len = clamped((long long)p.blocks * p.block_size, 0, 0x7fffffff);
        if (s.q_len < least || s.q_len > most) continue;
#pragma omp parallel for collapse(2) schedule(dynamic)
        for (int token = 0; token < s.q_len; token++) {
            for (int head = 0; head < p.kv_heads * p.group; head++) {
                AttentionParameters of_head = p;
                of_head.scale *= head_scale(t.key_scales, index, head / p.group);
                attend_row(of_head, cache, t, s, lists, token, head);
            }
        }
    }
}

// Keys, or values, that are copied.
struct CopiedSide {
    KvTensor from, to;
    CacheFormat format;
    int dims;
    unsigned long long scales;
    RowStrides scale_strides;
    int terms;       // heads of the copy that add up to one
    bool is_rounded; // and multiplied by scales
    float *units;    // [B, Hkv], or null

    std::vector<float> load(const AttentionParameters &p, const Sequence &s, long long key, int head) const {
        std::vector<float> row(dims);
        load_stored(p, s, from, format, scales, scale_strides, key, head, dims, row);
        return row;
    }
};

inline std::vector<CopiedSide> copied_sides(const AttentionParameters &p, const WidenParameters &w, const StoredCache &cache) {
    float *units = (float *)w.units;
    const CopiedSide keys = {p.keys, w.keys, cache.key_format, p.head_dim, cache.key_scales, cache.key_scale_strides, w.key_terms, w.key_terms > 1, units};
    const CopiedSide values = {p.values,         w.values, cache.value_format,     p.value_dim, cache.value_scales, cache.value_scale_strides, 1,
                               !!w.round_values, units ? units + p.batch * p.kv_heads : nullptr};
    return {keys, values};
}

// What copies are multiples of.
inline void widen_units(const AttentionParameters &p, const WidenParameters &w, const StoredCache &cache) {
    for (int index = 0; index < p.batch; index++) {
        const Sequence s = sequence_of(p, index);
        if (s.q_len < w.min_query_len) continue;
        for (const CopiedSide &side : copied_sides(p, w, cache)) {
            for (int head = 0; head < p.kv_heads; head++) {
                float most = 0;
                for (long long key = 0; side.is_rounded && key < s.kv_len; key++)
                    for (float x : side.load(p, s, key, head)) most = std::max(most, std::fabs(x));
                side.units[index * p.kv_heads + head] = most > 0 && std::isfinite(most) ? std::ldexp(1.0f, std::ilogb(most) - 14) : 1.0f;
            }
        }
    }
}

// Copies of keys and values in the type of queries; codes without their scales, but for what is rounded.
inline void widen(const AttentionParameters &p, const WidenParameters &w, const StoredCache &cache) {
    AttentionParameters contiguous = p;
    contiguous.block_size = 0;
    for (int index = 0; index < p.batch; index++) {
        const Sequence s = sequence_of(p, index);
        if (s.q_len < w.min_query_len) continue;
        auto copy = [&](const CopiedSide &side, long long key, int head) {
            const auto &[from, to, format, dims, scales, scale_strides, terms, is_rounded, units] = side;
            const long long at = place_of_key(p, s, key, from.strides) + head * from.strides.head;
            const long long copied = place_of_key(contiguous, s, key, to.strides) + terms * head * to.strides.head;
            if (is_rounded) {
                std::vector<float> row = side.load(p, s, key, head);
                for (int i = 0; i < dims; i++) {
                    float x = units ? row[i] / units[index * p.kv_heads + head] : row[i];
                    for (int term = 0; term < terms; term++) {
                        const long long place = copied + term * to.strides.head + i;
                        store(to.pointer, place, cache.query_type, x);
                        x -= (float)load(to.pointer, place, cache.query_type);
                    }
                }
                return;
            }
            for (int i = 0; i < dims; i++) {
                const bool is_code = format >= CacheFormat::E4M3;
                const double x = is_code ? code_value(((const unsigned char *)from.pointer)[at + i], format) : load(from.pointer, at + i, (ElementType)(int)format);
                store(to.pointer, copied + i, cache.query_type, x);
            }
        };
        for (long long key = 0; key < s.kv_len; key++) {
            for (int head = 0; head < p.kv_heads; head++) {
                for (const CopiedSide &side : copied_sides(p, w, cache)) copy(side, key, head);
                if (!w.each_key.pointer) continue;
                const long long at = place_of_key(p, s, key, cache.key_scale_strides) + head * cache.key_scale_strides.head;
                ((float *)w.each_key.pointer)[(index * p.kv_heads + head) * w.each_key.stride + key] = (float)load(cache.key_scales, at, ElementType::F32);
            }
        }
    }
}

// One byte of a tile map.
inline MapKind tile_of_mask(const AttentionParameters &p, const PrefillParameters &t, int sequence, int head, int row_tile, int key_tile) {
    bool any = false, all = true;
    for (int row = row_tile * t.map.tile_rows; row < std::min((row_tile + 1) * t.map.tile_rows, t.map.mask_rows); row++) {
        for (int key = key_tile * t.map.tile_keys; key < std::min((key_tile + 1) * t.map.tile_keys, t.map.mask_keys); key++) {
            long long at = sequence * p.mask_strides.batch + head * p.mask_strides.head + row * p.mask_strides.row + key * p.mask_strides.key;
            if (p.mask_kind == MaskKind::Bool) {
                bool kept = ((const unsigned char *)p.mask)[at];
                any |= kept;
                all &= kept;
            } else {
                double added = load(p.mask, at, mask_element(p.mask_kind));
                any |= added != -INFINITY;
                all &= added == 0;
            }
        }
    }
    return !any ? MapKind::Empty : all ? MapKind::Full : MapKind::Mixed;
}

inline void map_tiles(const AttentionParameters &p, const PrefillParameters &t) {
    unsigned char *to = (unsigned char *)t.map.pointer;
    for (int sequence = 0; sequence < t.map.batch; sequence++) {
        for (int head = 0; head < t.map.heads; head++) {
            for (int row = 0; row < t.map.row_tiles; row++) {
                for (int key = 0; key < t.map.key_tiles; key++) *to++ = (unsigned char)tile_of_mask(p, t, sequence, head, row, key);
            }
        }
    }
}

// A new row that is quantized: rotated in f32, each product and sum rounded, and stored.
inline void quantize_row(const AppendParameters &p, int token, unsigned long long from, long long at, bool is_key, int block, int slot, int head) {
    std::vector<float> x(is_key ? p.head_dim : p.value_dim);
    for (size_t i = 0; i < x.size(); i++) x[i] = (float)load(from, at + i, p.element_type);
    const int half = p.rotary_dim / 2;
    const float *angles = (const float *)p.rotary + (long long)std::min(std::max(token, 0), p.rotary_positions - 1) * p.rotary_dim;
    for (int pair = 0; is_key && p.rotary && pair < half; pair++) {
        float *a = &x[p.rotary_start + (p.rotary_interleaved ? 2 * pair : pair)], *b = a + (p.rotary_interleaved ? 1 : half);
        const float cosine = angles[pair], sine = angles[half + pair], left = *a, right = *b;
        *a = rounded(rounded(left * cosine) - rounded(right * sine));
        *b = rounded(rounded(right * cosine) + rounded(left * sine));
    }
    auto place = [&](const RowStrides &strides) { return block * strides.batch + slot * strides.token + head * strides.head; };
    float *scales = (float *)(is_key ? p.cache.key_scales : p.cache.value_scales);
    scales += place(is_key ? p.cache.key_scale_strides : p.cache.value_scale_strides);
    const KvTensor &pool = is_key ? p.keys : p.values;
    const bool is_dynamic = is_key ? p.dynamic_key_scales : p.dynamic_value_scales;
    store_quantized(x, is_key ? p.cache.key_format : p.cache.value_format, pool.pointer, place(pool.strides), scales, is_dynamic);
}

// One head's vector of a new token: read, rotated if asked, written.
inline void move_vector(const AppendParameters &p, int token, unsigned long long from, long long at, unsigned long long to, long long place, int dims) {
    std::vector<double> x(dims);
    for (int i = 0; i < dims; i++) x[i] = load(from, at + i, p.element_type);
    int half = p.rotary_dim / 2;
    long long row = (long long)std::min(token, p.rotary_positions - 1) * p.rotary_dim;
    for (int pair = 0; p.rotary && pair < half; pair++) {
        int a = p.rotary_interleaved ? 2 * pair : pair, b = p.rotary_interleaved ? 2 * pair + 1 : pair + half;
        double cosine = load(p.rotary, row + pair, ElementType::F32), sine = load(p.rotary, row + half + pair, ElementType::F32);
        double left = x[a] * cosine - x[b] * sine, right = x[b] * cosine + x[a] * sine;
        x[a] = left;
        x[b] = right;
    }
    for (int i = 0; i < dims; i++) store(to, place + i, p.element_type, x[i]);
}

inline void append(const AppendParameters &p) {
    for (int index = 0; index < p.batch; index++) {
        int start = p.cu_seqlens ? int_at(p.cu_seqlens, index) : index * p.new_tokens;
        int count = p.cu_seqlens ? int_at(p.cu_seqlens, index + 1) - start : p.new_tokens;
        for (int i = 0; i < count; i++) {
            long long row = start + i;
            int token = int_at(p.kv_lens, index) - count + i;
            for (int head = 0; p.query.pointer && head < p.query_heads; head++) {
                long long at = row * p.query.strides.token + head * p.query.strides.head;
                move_vector(p, token, p.query.pointer, at, p.query.pointer, at, p.rotary_dim);
            }
            if (token < 0 || token / p.block_size >= p.table_blocks) continue;
            int block = int_at(p.block_table, index * p.block_table_stride + token / p.block_size), slot = token % p.block_size;
            if (block < 0 || block >= p.blocks) continue;
            for (int head = 0; head < p.kv_heads; head++) {
                long long to = block * p.keys.strides.batch + slot * p.keys.strides.token + head * p.keys.strides.head;
                long long key = row * p.new_keys.strides.token + head * p.new_keys.strides.head;
                if (p.cache.key_format > CacheFormat::F32)
                    quantize_row(p, token, p.new_keys.pointer, key, true, block, slot, head);
                else
                    move_vector(p, token, p.new_keys.pointer, key, p.keys.pointer, to, p.head_dim);
                long long from = row * p.new_values.strides.token + head * p.new_values.strides.head;
                if (p.value_dim && p.cache.value_format > CacheFormat::F32) {
                    quantize_row(p, token, p.new_values.pointer, from, false, block, slot, head);
                    continue;
                }
                to = block * p.values.strides.batch + slot * p.values.strides.token + head * p.values.strides.head;
                for (int d = 0; d < p.value_dim; d++) {
                    store(p.values.pointer, to + d, p.element_type, load(p.new_values.pointer, from + d, p.element_type));
                }
            }
        }
    }
}

inline void merge(const MergeParameters &p) {
    for (long long row = 0; row < p.rows; row++) {
        double most = -INFINITY, sum = 0;
        std::vector<double> weights(p.count), out(p.dim, 0.0);
        for (int k = 0; k < p.count; k++) most = std::max(most, load(p.part_lse, k * p.part_lse_stride + row, ElementType::F32));
        for (int k = 0; k < p.count; k++) {
            double lse = load(p.part_lse, k * p.part_lse_stride + row, ElementType::F32);
            if (lse == -INFINITY) continue;
            double weight = std::exp(lse - most);
            sum += weight;
            for (int i = 0; i < p.dim; i++) out[i] += weight * load(p.parts, k * p.part_stride + row * p.dim + i, p.part_type);
        }
        for (int i = 0; i < p.dim; i++) store(p.out, row * p.dim + i, p.out_type, sum > 0 ? out[i] / sum : 0.0);
        if (p.lse) store(p.lse, row, ElementType::F32, sum > 0 ? most + std::log(sum) : -INFINITY);
    }
}
