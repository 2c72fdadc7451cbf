// Common to both Hopper prefill kernels: tile descriptors, pipeline state, the order of K tiles, and the epilogue's
// stores.
//
// From the module: ELEMENT_TYPE, FALLBACK.
#pragma once
#include "common/epilogue.cuh"
#include "hopper/pipeline.cuh"
#include "prefill/prefill_scores.cuh"
#include "common/paging.cuh"

// A tile, as the scheduler warp describes it to producers and consumers.
struct TileDescriptor {
    PrefillTile tile;
    int more;                  // 0: no more tiles
    int first_keys, last_keys; // first and last K tile
    // Of the first row, unclamped: row r sees keys from first_row_start + r to first_row_end + r.
    int first_row_start, first_row_end;
#if FALLBACK
    int initial_key_tile; // the K tile that is loaded first: see find_tile_range
    __device__ __forceinline__ int initial() const { return initial_key_tile; }
#else
    __device__ __forceinline__ int initial() const { return last_keys; }
#endif
};

// The visible keys of a CTA's or a warpgroup's rows: row r sees first_row_start + r to first_row_end + r, clamped to
// the sequence.
struct VisibleRange {
    int first_row_start, first_row_end, keys;

    __device__ __forceinline__ int start(int row) const { return max(first_row_start + row, 0); }
    __device__ __forceinline__ int end(int row) const { return clamp_int(first_row_end + row, 0, keys); }
};

// Flags of a pipeline stage, with the number of its K tile above them.
constexpr int LAST_KEY_TILE = 1;   // the last one of this tile of rows
constexpr int MASKED_KEY_TILE = 2; // the mask changes some of its scores
constexpr int KEY_TILE_SHIFT = 2;

// Makes the compiler compute what depends on `x` where it is used, instead of ahead of a branch in registers that are
// needed elsewhere.
static __device__ __forceinline__ float opaque(float x) {
    asm volatile("" : "+f"(x));
    return x;
}

// The state of a row of a tile over its split of the keys, and the outputs.
static __device__ __forceinline__ float2 *partial_state(const KeySplits &splits, const PrefillTile &tile, int row) {
    long long at = row_offset(splits.states.strides, tile, tile.head, tile.first_token + row);
    return (float2 *)((float *)splits.states.pointer + tile.split * splits.state_stride + at);
}
static __device__ __forceinline__ float *partial_outputs(const KeySplits &splits, const PrefillTile &tile, int row) {
    long long at = row_offset(splits.out.strides, tile, tile.head, tile.first_token + row);
    return (float *)splits.out.pointer + tile.split * splits.out_stride + at;
}

// Epilogue of a fully masked tile, by one warp.
static __device__ __forceinline__ void store_empty_tile(const AttentionParameters &params, const PrefillTile &tile,
                                                        const KeySplits &splits, int lane) {
    if (splits.count > 1) {
        float *to = (float *)partial_state(splits, tile, lane);
#pragma unroll 1
        for (int row = lane; row < tile.tokens; row += 32, to += 32 * splits.states.strides.token)
            *(float2 *)to = make_float2(-MAX_FLOAT, 0.0f);
        return;
    }
    int halves = params.out_f32 ? 2 : 1;
    unsigned short *to =
        (unsigned short *)params.out.pointer + halves * out_offset(params, tile, tile.head, tile.first_token);
#pragma unroll 1
    for (int row = 0; row < tile.tokens; row++, to += halves * params.out.strides.token) {
#pragma unroll 1
        for (int i = lane; i < halves * params.value_dim; i += 32) to[i] = 0;
    }
    if (!params.lse.pointer) return;
#pragma unroll 1
    for (int row = lane; row < tile.tokens; row += 32)
        store_lse(params, tile, tile.head, tile.first_token + row,
                  params.sinks ? ((const float *)params.sinks)[tile.head] : -INF);
}

// The last K tile from `tile` down to `first` that the mask leaves something of; first - 1 if there is none.
static __device__ __forceinline__ int last_unmasked_tile(const unsigned char *map, int tile, int first, int lane) {
#pragma unroll 1
    for (; map && tile >= first; tile -= 32) {
        int own_tile = tile - lane;
        unsigned live = __ballot_sync(~0u, own_tile >= first && (MapKind)__ldcg(map + own_tile) != MapKind::Empty);
        if (live) return tile - (__ffs(live) - 1);
    }
    return map ? first - 1 : tile;
}

// The K tiles of a tile: the first, the last, and the one that is loaded first. last < first if the tile is fully
// masked.
struct KeyTileRange {
    int first, last, initial;
};

// Finds tile `number` and its K tiles. Called by a whole warp.
//
// K tiles are loaded from the last to the first, so that the causal boundary comes first. With ALiBi on both sides of a
// row there are two rounds: from the last row's own position (`initial`, or the next non-empty K tile below it) down to
// `first`, then from `last` down to `initial`. Biases are greatest at a row's own position, so the maxima found there
// hold; coming from keys far ahead, they would rise with each K tile.
//
// If keys are split, each number is one split of the K tiles of a tile.
template <int ROWS, int KEYS>
static __device__ __forceinline__ bool find_tile_range(const AttentionParameters &params,
                                                       const PrefillParameters &prefill, unsigned number,
                                                       TileCursor &cursor, PrefillTile &tile, KeyTileRange &range) {
    int lane = threadIdx.x & 31;
    int &first = range.first, &last = range.last, &initial = range.initial;
    first = 0, last = -1, initial = -1;
    tile.split = (int)number & (prefill.splits.count - 1);
    bool found = find_tile(params, prefill, ROWS, number >> prefill.splits.shift, cursor, tile);
    if (found) {
        first = tile.any_start / KEYS;
        last = initial = (tile.any_end - 1) / KEYS;
        if (FALLBACK && params.alibi_slopes && params.window.right > 0) {
            long long key = keys_before(params, tile.seq, tile.seq.offset + tile.first_token + tile.tokens - 1);
            initial = min(last, max(first, (int)max(0ll, min(key, (long long)tile.any_end)) / KEYS));
        }
        if (prefill.splits.count > 1) {
            int each = (last - first + prefill.splits.count) >> prefill.splits.shift;
            first += tile.split * each;
            last = min(last, first + each - 1);
            initial = min(max(initial, first), last);
        }
        const unsigned char *map = FALLBACK ? tile_map_row(prefill, tile, ROWS) : nullptr;
        if (tile.any_end <= tile.any_start || last < first) {
            last = first - 1;
        } else if (map) {
            // Search for `last`, then for `initial`: a loop, so that the search is compiled once.
            int from = last;
#pragma unroll 1
            for (int i = 0; i < 2; i++) {
                int kept = last_unmasked_tile(map, from, first, lane);
                if (i == 0) {
                    last = kept;
                    from = min(initial, last);
                } else {
                    initial = kept < first ? last : kept;
                }
            }
        }
    }
    return found;
}

// Starts the second round when the first is over. `previous`: the K tile before `following`; `first`: the end of the
// round.
static __device__ __forceinline__ void begin_second_round(const TileDescriptor &descriptor, int previous,
                                                          int &following, int &first) {
    if (following >= first || previous > descriptor.initial() || descriptor.initial() >= descriptor.last_keys) return;
    following = descriptor.last_keys;
    first = descriptor.initial() + 1;
}

static __device__ __forceinline__ TileDescriptor describe_tile(const AttentionParameters &params,
                                                               const PrefillTile &tile, bool found,
                                                               const KeyTileRange &range) {
    // Clamped so that rows can be added within 32 bits.
    long long position = tile.seq.offset + tile.first_token, limit = 0x7fffff00;
    int first_row_start = (int)max(-limit, min(position - params.window.left, limit)),
        first_row_end = (int)max(-limit, min(position + params.window.right + 1, limit));
#if FALLBACK
    // Consumers find uneven ranges row by row; this one hides nothing.
    if (has_uneven_ranges(params)) first_row_start = -(int)limit, first_row_end = (int)limit;
    return {tile, found, range.first, range.last, first_row_start, first_row_end, range.initial};
#else
    return {tile, found, range.first, range.last, first_row_start, first_row_end};
#endif
}

// Stores eight contiguous elements of a row; only fallback kernels can cross the row's end.
static __device__ __forceinline__ void store_8(const AttentionParameters &params, const PrefillTile &tile, int row,
                                               int column, uint4 eight) {
    unsigned short *to =
        (unsigned short *)params.out.pointer + out_offset(params, tile, tile.head, tile.first_token + row) + column;
    if (!FALLBACK || column + 8 <= params.value_dim) {
        *(uint4 *)to = eight;
    } else {
        const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < params.value_dim) to[i] = pairs[i / 2] >> (16 * (i % 2)) & 0xffff;
    }
}

// Stores rows `row` and `row` + 8 of the tile from wgmma registers, from `first_column` on. The four lanes of a row
// exchange columns until each has eight contiguous elements.
template <int N> static __device__ __forceinline__ void store_rows(const AttentionParameters &params,
                                                                   const PrefillTile &tile, int row, int first_column,
                                                                   const unsigned (&packed)[N], int lane) {
    bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        bool present = row + 8 * r < tile.tokens;
        unsigned short *to = (unsigned short *)params.out.pointer +
                             out_offset(params, tile, tile.head, tile.first_token + row + 8 * r) + first_column +
                             8 * (lane & 3);
#pragma unroll
        for (int j = 0; j < N / 2; j += 4) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = packed[2 * (j + i) + r];
            unsigned x = __shfl_xor_sync(~0u, upper ? a[0] : a[2], 2), y = __shfl_xor_sync(~0u, upper ? a[1] : a[3], 2);
            a[0] = upper ? x : a[0], a[1] = upper ? y : a[1], a[2] = upper ? a[2] : x, a[3] = upper ? a[3] : y;
            x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1), y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 1);
            a[0] = odd ? x : a[0], a[1] = odd ? a[1] : x, a[2] = odd ? y : a[2], a[3] = odd ? a[3] : y;
            uint4 eight = make_uint4(a[0], a[1], a[2], a[3]);
            if (FALLBACK) {
                if (present) store_8(params, tile, row + 8 * r, first_column + 8 * (j + (lane & 3)), eight);
            } else if (present) {
                asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(to + 8 * j), "r"(a[0]), "r"(a[1]), "r"(a[2]),
                             "r"(a[3])
                             : "memory");
            }
        }
    }
}
