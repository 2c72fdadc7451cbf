// What both prefill kernels for Hopper need around their products: tiles as the warp that looks for them hands them on, rings, and how rows are written.
//
// From the module: ELEMENT_TYPE, GENERAL.
#pragma once
#include "hopper/hopper.cuh"
#include "prefill/prefill_scores.cuh"
#include "common/state.cuh"

// What the warp that looks for tiles says of one.
struct TileNews {
    PrefillTile tile;
    int more;                  // whether there is one: else this is the end
    int first_keys, last_keys; // key tiles, first and last
    int start_at, end_at;      // of the first row's view, unclamped: row r sees from start_at + r to end_at + r, where there are keys
#if GENERAL
    int turn_keys; // the key tile that is fetched first: see find_work
    __device__ __forceinline__ int turn() const { return turn_keys; }
#else
    __device__ __forceinline__ int turn() const { return last_keys; }
#endif
};

// What the rows of a block or a warpgroup see: the first of them keys from start_at to end_at, row r from r further on, where there are any.
struct View {
    int start_at, end_at, keys;

    __device__ __forceinline__ int start(int row) const { return max(start_at + row, 0); }
    __device__ __forceinline__ int end(int row) const { return clamp_int(end_at + row, 0, keys); }
};

// What the fetching warp says of the keys in a stage: their tile, and two flags.
constexpr int LAST_KEYS = 1;  // of this tile of rows
constexpr int MIXED_KEYS = 2; // the mask changes some scores
constexpr int KEYS_SHIFT = 2;

// A place in a ring, and the parity of how often the ring went round.
template <int LENGTH> struct Turn {
    int at = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++at == LENGTH) {
            at = 0;
            parity ^= 1;
        }
    }
};

// Has the compiler keep what follows behind what came before.
template <int N> static __device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

static __device__ __forceinline__ long long out_offset(const AttentionParameters &p, const PrefillTile &tile, int row) {
    return tile.sequence * p.out_batch_stride + (long long)(tile.facts.q_start + tile.first_token + row) * p.out_token_stride + tile.head * p.out_head_stride;
}

static __device__ __forceinline__ void write_lse(const AttentionParameters &p, const PrefillTile &tile, int row, float lse) {
    long long at = tile.sequence * p.lse_batch_stride + (long long)(tile.facts.q_start + tile.first_token + row) * p.lse_token_stride + tile.head * p.lse_head_stride;
    ((float *)p.lse)[at] = lse;
}

// The rows of a tile that sees nothing, by one warp.
static __device__ __forceinline__ void write_empty(const AttentionParameters &p, const PrefillTile &tile, int lane) {
    unsigned short *to = (unsigned short *)p.out + out_offset(p, tile, 0);
#pragma unroll 1
    for (int row = 0; row < tile.tokens; row++, to += p.out_token_stride) {
#pragma unroll 1
        for (int i = lane; i < p.value_dim; i += 32) to[i] = 0;
    }
    if (!p.lse) return;
#pragma unroll 1
    for (int row = lane; row < tile.tokens; row += 32) write_lse(p, tile, row, p.sinks ? ((const float *)p.sinks)[tile.head] : -INFINITE);
}

// The last key tile up to `tile`, not before `first`, that the mask leaves something of; first - 1 where there is none.
static __device__ __forceinline__ int find_kept(const unsigned char *map, int tile, int first, int lane) {
#pragma unroll 1
    for (; map && tile >= first; tile -= 32) {
        int mine = tile - lane;
        unsigned some = __ballot_sync(~0u, mine >= first && __ldcg(map + mine) != MAP_EMPTY);
        if (some) return tile - (__ffs(some) - 1);
    }
    return map ? first - 1 : tile;
}

// The tile of that number, its first and last key tile, and the one that is fetched first: of which something is left. The last is before the first where nothing is.
//
// Key tiles are fetched from the last one down to the first, so that what causality cuts comes at once. With slopes for keys on both sides of rows there are two
// rounds: from the last row's own position (`turn`: what is left there, or else below) down to the first key tile, then from the last one down to there. Biases are
// greatest at a row's own position, so that maxima found there hold; keys ahead of rows that come nearer from tile to tile would have them rise each time.
template <int ROWS, int KEYS>
static __device__ __forceinline__ bool find_work(const AttentionParameters &p, const PrefillParameters &t, unsigned number, TilePlace &place, int lane, PrefillTile &tile, int &first,
                                                 int &last, int &turn) {
    first = 0, last = -1, turn = -1;
    bool found = find_tile<ROWS>(p, t, number, place, tile);
    if (found) {
        first = tile.start / KEYS;
        last = turn = (tile.end - 1) / KEYS;
        if (GENERAL && p.alibi_slopes && p.window_right > 0) {
            long long position = tile.facts.offset + tile.first_token + tile.tokens - 1;
            turn = min(last, max(first, (int)max(0ll, min(position, (long long)tile.end)) / KEYS));
        }
        const unsigned char *map = GENERAL ? find_map(t, tile, ROWS) : nullptr;
        if (tile.end <= tile.start) {
            last = first - 1;
        } else if (map) {
            // First for the last one, then for that of the turn: a loop, so that the search is there once.
            int from = last;
#pragma unroll 1
            for (int i = 0; i < 2; i++) {
                int kept = find_kept(map, from, first, lane);
                if (i == 0) {
                    last = kept;
                    from = min(turn, last);
                } else {
                    turn = kept < first ? last : kept;
                }
            }
        }
    }
    return found;
}

// Goes on with the second round where the first one is over: `next` is the key tile before, `then` the one after it, and `first` the end of the round.
static __device__ __forceinline__ void go_round(const TileNews &news, int next, int &then, int &first) {
    if (then >= first || next > news.turn() || news.turn() >= news.last_keys) return;
    then = news.last_keys;
    first = news.turn() + 1;
}

static __device__ __forceinline__ TileNews news_of(const AttentionParameters &p, const PrefillTile &tile, bool found, int first, int last, int turn) {
    // Within 32 bits, and rows can still be added.
    long long position = tile.facts.offset + tile.first_token, most = 0x7fffff00;
    int start_at = (int)max(-most, min(position - p.window_left, most)), end_at = (int)max(-most, min(position + p.window_right + 1, most));
#if GENERAL
    return {tile, found, first, last, start_at, end_at, turn};
#else
    return {tile, found, first, last, start_at, end_at};
#endif
}

// Eight neighbours of a row; a plain kernel has no part of them behind the row's end.
static __device__ __forceinline__ void write_eight(const AttentionParameters &p, const PrefillTile &tile, int row, int column, uint4 eight) {
    unsigned short *to = (unsigned short *)p.out + out_offset(p, tile, row) + column;
    if (!GENERAL || column + 8 <= p.value_dim) {
        *(uint4 *)to = eight;
    } else {
        const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < p.value_dim) to[i] = pairs[i / 2] >> (16 * (i % 2)) & 0xffff;
    }
}

// Rows `row` and `row` + 8 of the tile, from `first_column` on, from a product's registers: the four lanes of a row exchange its columns until each has
// eight neighbours.
template <int N>
static __device__ __forceinline__ void write_chunks(const AttentionParameters &p, const PrefillTile &tile, int row, int first_column, const float (&out)[N], int lane) {
    bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool present = row + 8 * r < tile.tokens;
        unsigned short *to = (unsigned short *)p.out + out_offset(p, tile, row + 8 * r) + first_column + 8 * (lane & 3);
#pragma unroll
        for (int j = 0; j < N / 4; j += 4) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = Element<ELEMENT_TYPE>::pack(out[4 * (j + i) + 2 * r], out[4 * (j + i) + 2 * r + 1]);
            unsigned x = __shfl_xor_sync(~0u, upper ? a[0] : a[2], 2), y = __shfl_xor_sync(~0u, upper ? a[1] : a[3], 2);
            a[0] = upper ? x : a[0], a[1] = upper ? y : a[1], a[2] = upper ? a[2] : x, a[3] = upper ? a[3] : y;
            x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
            a[0] = odd ? x : a[0], a[1] = odd ? a[1] : x, a[2] = odd ? y : a[2], a[3] = odd ? a[3] : y;
            uint4 eight = make_uint4(a[0], a[1], a[2], a[3]);
            if (GENERAL) {
                if (present) write_eight(p, tile, row + 8 * r, first_column + 8 * (j + (lane & 3)), eight);
            } else if (present) {
                asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to + 8 * j), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
            }
        }
    }
}
