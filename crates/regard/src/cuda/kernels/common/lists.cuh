// Selection: rows that attend to a list of keys. Decode divides its work among rows then, not sequences: a row walks
// the entries of its list, numbered from 0.
//
// An entry is the position of a key in the row's sequence, or a physical slot of the pool. If lists are of pages, the
// rows of a sequence share them, and entry e is slot e % block_size of page e / block_size. Entries that name no key,
// or one that the row does not see, are skipped: nothing is loaded, and their score is -inf.
//
// With a second cache, a row's entries are those of its list of slots, then those of its list of slots of that cache.
#pragma once
#include "common/paging.cuh"

static __device__ __forceinline__ const ListParameters &lists_of(const AttentionParameters &params) {
    // LISTS: the kernel's parameters start with those of the call.
    return ((const ListedParameters *)&params)->lists;
}

// Tokens of a sequence, and the first of them.
struct TokenRange {
    int first, len;
};

static __device__ __forceinline__ TokenRange load_tokens(const AttentionParameters &params, int sequence) {
    const int *cumulative = (const int *)params.cu_seqlens_q + sequence;
    int first = clamp_int(cumulative[0], 0, params.query_len);
    return {first, clamp_int(cumulative[1], first, params.query_len) - first};
}

// The sequence of a row, and the row's number in it; past the last sequence if the row belongs to none.
static __device__ __forceinline__ int find_sequence_of_row(const AttentionParameters &params, int row, int &token) {
    int sequences = lists_of(params).sequences;
    if (!params.cu_seqlens_q) {
        int sequence = params.query_len == 1 ? row : row / params.query_len;
        token = row - sequence * params.query_len;
        return sequence;
    }
    // The first sequence that ends after the row.
    int low = 0, high = sequences;
    while (low < high) {
        int middle = (low + high) / 2;
        if (clamp_int(((const int *)params.cu_seqlens_q)[middle + 1], 0, params.query_len) <= row)
            low = middle + 1;
        else
            high = middle;
    }
    token = low < sequences ? row - load_tokens(params, low).first : 0;
    return token < 0 ? sequences : low;
}

// The row or sequence that a row has its list from.
static __device__ __forceinline__ int list_owner(const AttentionParameters &params, const SequenceInfo &s) {
    return lists_of(params).are_pages ? s.sequence : s.list_row;
}

// Entries in use of the list of a row and key/value head; without those of a second list.
static __device__ __forceinline__ int list_len(const AttentionParameters &params, const SequenceInfo &s, int kv_head) {
    const ListParameters &lists = lists_of(params);
    if (!lists.counts) return lists.len;
    long long at = list_owner(params, s) * lists.count_strides.token + kv_head * lists.count_strides.head;
    return clamp_int(((const int *)lists.counts)[at], 0, lists.len);
}

// Entries in use of its list into the second cache.
static __device__ __forceinline__ int second_len(const AttentionParameters &params, const SequenceInfo &s,
                                                 int kv_head) {
    const SecondCache &second = lists_of(params).second;
    if (!second.counts) return second.len;
    long long at = s.list_row * second.count_strides.token + kv_head * second.count_strides.head;
    return clamp_int(((const int *)second.counts)[at], 0, second.len);
}

static __device__ __forceinline__ const int *list_of(const AttentionParameters &params, const SequenceInfo &s,
                                                     int kv_head) {
    const ListParameters &lists = lists_of(params);
    return (const int *)lists.indices + list_owner(params, s) * lists.index_strides.token +
           kv_head * lists.index_strides.head;
}

// The numbers of a list's pages in the sequence; null if they have no positions.
static __device__ __forceinline__ const int *numbers_of(const AttentionParameters &params, const SequenceInfo &s,
                                                        int kv_head) {
    const ListParameters &lists = lists_of(params);
    if (!lists.numbers) return 0;
    return (const int *)lists.numbers + s.sequence * lists.number_strides.token + kv_head * lists.number_strides.head;
}

// A row as decode's unit of work: a sequence of one token that walks a list. Its lengths and positions are those of its
// sequence, counted from the row.
static __device__ __forceinline__ SequenceInfo load_listed_row(const AttentionParameters &params, int row) {
    int token, sequence = find_sequence_of_row(params, row, token);
    SequenceInfo s = {};
    s.list_row = row;
    if (sequence >= lists_of(params).sequences) return s;
    s = load_sequence(params, sequence);
    s.list_row = row;
    s.sequence = sequence;
    if (token >= s.q_len) {
        s.q_len = 0;
        return s;
    }
    s.first_token = token;
    s.new_tokens = s.kv_len - s.q_len;
    s.offset += token;
    s.q_start += token;
    s.q_len = 1;
    // Slots have no positions: a row sees all of a pool. Of pages, any position may be listed.
    const ListParameters &lists = lists_of(params);
    if (lists.are_slots || lists.are_pages) s.kv_len = 0x7fffffff;
    // Heads that share a list have a stride of 0.
    int heads = lists.count_strides.head || lists.second.count_strides.head ? params.kv_heads : 1;
    s.walked = 0;
#pragma unroll 1
    for (int head = 0; head < heads; head++)
        s.walked = max(s.walked, list_len(params, s, head) + second_len(params, s, head));
    return s;
}

// The key of an entry: its position or slot (the entry itself, if its page has no number), and its place. -1 if there
// is no such key, or the row does not see it.
struct ListedKey {
    int key;
    KeyPlace place;
    bool in_second; // cache
};

// The list of a tile's head. Its rows are heads of one token; its keys are numbered by the entries.
template <class Tile> static __device__ __forceinline__ void set_list(const AttentionParameters &params, Tile &tile) {
    tile.first_list_len = list_len(params, tile.seq, tile.kv_head);
    tile.any_start = 0, tile.any_end = tile.first_list_len + second_len(params, tile.seq, tile.kv_head);
    tile.list = list_of(params, tile.seq, tile.kv_head);
    tile.numbers = numbers_of(params, tile.seq, tile.kv_head);
}

// The slot of a listed page.
template <class Tile> static __device__ __forceinline__ ListedKey find_key_of_page(const AttentionParameters &params,
                                                                                   const Tile &tile, int entry) {
    constexpr ListedKey NONE = {-1, {0, 0}, false};
    int index = page_index(params, entry);
    KeyPlace place = {tile.list[index], page_slot(params, entry, index)};
    if (place.batch < 0 || place.batch >= params.blocks) return NONE;
    if (!tile.numbers) return {entry, place, false};
    long long key = (long long)tile.numbers[index] * params.block_size + place.token;
    if (key < tile.every_start || key >= tile.every_end) return NONE;
    return {(int)key, place, false};
}

// The slot of entry `entry` of a tile's list into the second cache.
template <class Tile> static __device__ __forceinline__ ListedKey find_second_key(const AttentionParameters &params,
                                                                                  const Tile &tile, int entry) {
    constexpr ListedKey NONE = {-1, {0, 0}, true};
    const SecondCache &second = lists_of(params).second;
    int slot = ((const int *)second.indices)[tile.seq.list_row * second.index_strides.token +
                                             tile.kv_head * second.index_strides.head + entry];
    if (slot < 0 || slot == 0x7fffffff) return NONE;
    int page = second.block_shift >= 0 ? slot >> second.block_shift : slot / second.block_size;
    if (page >= second.blocks) return NONE;
    return {slot, {page, slot - page * second.block_size}, true};
}

// The key of entry `entry` of a tile's lists.
template <class Tile> static __device__ __forceinline__ ListedKey find_listed_key(const AttentionParameters &params,
                                                                                  const Tile &tile, int entry) {
    if (lists_of(params).are_pages) return find_key_of_page(params, tile, entry);
    if (entry >= tile.first_list_len) return find_second_key(params, tile, entry - tile.first_list_len);
    constexpr ListedKey NONE = {-1, {0, 0}, false};
    int key = tile.list[entry];
    if (key < tile.every_start || key >= tile.every_end) return NONE;
    if (lists_of(params).are_slots) {
        int page = page_index(params, key);
        if (page >= params.blocks) return NONE;
        return {key, {page, page_slot(params, key, page)}, false};
    }
    // Bases are those of the tile's sequence.
    if (!params.block_size) return {key, {0, key}, false};
    KeyPlace place;
    find_paged_place(params, tile, key, place);
    if (place.batch < 0 || place.batch >= params.blocks) return NONE;
    return {key, place, false};
}

// The address of a listed key. `bytes`: of an element, which strides count.
template <class Tile> static __device__ __forceinline__ unsigned long long
listed_key_address(const AttentionParameters &params, const Tile &tile, const ListedKey &listed, int bytes) {
    KeyPlace place = listed.place;
    const KvTensor &keys = listed.in_second ? lists_of(params).second.keys : params.keys;
    long long at =
        place.batch * keys.strides.batch + place.token * keys.strides.token + tile.kv_head * keys.strides.head;
    // Without pages, places are counted from the tile's sequence.
    if (!listed.in_second && !params.block_size) {
        long long value_start;
        find_kv_start(params, tile, at, value_start);
        at += place.token * keys.strides.token;
    }
    return keys.pointer + at * bytes;
}
