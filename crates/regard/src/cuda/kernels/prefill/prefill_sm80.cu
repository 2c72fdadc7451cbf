// Prefill attention for every GPU from sm_80 on: many query rows, in chunks or whole.
//
// A persistent kernel: each CTA takes tiles of TILE_ROWS tokens of one query head (tile_scheduler.cuh), and steps
// through the keys that some row sees, one K tile at a time. cp.async pipeline: with two stages, the next K tile is
// copied during this one; with one, values are copied during Q K^T and the next keys during P V. The next tile's first
// copies overlap the epilogue of this one. Warps split the rows; scores, probabilities and accumulators stay in
// registers. If the accumulators of a warp's rows do not fit, VALUE_WARPS warps share the rows and exchange
// probabilities through shared memory. Tile shapes are in prefill_shape.cuh. There is no packed GQA: the tile scheduler
// lets the query heads of a group run at the same time, so that their keys come from L2.
//
// The specialized kernel (FALLBACK = 0) takes unmodified scores, a positive scale, 16-byte aligned rows of exact dims,
// and an output of the inputs' type whose rows start at multiples of four elements.
#include "common/copy.cuh"
#include "common/epilogue.cuh"
#include "prefill/tile_loader.cuh"
#include "prefill/prefill_mma.cuh"
#include "prefill/prefill_scores.cuh"
#include "prefill/prefill_shape.cuh"
#include "prefill/tile_scheduler.cuh"

struct Shared {
    TileOperands tiles[3]; // the previous tile, which may still be in its epilogue; this one; the next
};
static_assert(sizeof(Shared) <= QUERY_OFFSET, "it overlaps the queries");

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// The address of dynamic shared memory, which the compiler would otherwise recompute at every use.
static __device__ __forceinline__ unsigned shared_start() {
    unsigned address;
    asm volatile("mov.u32 %0, dynamic_shared;" : "=r"(address));
    return address;
}

// Iterates over the K tiles of a tile, without those that the mask empties.
struct KeyTileIterator {
    const unsigned char *map;
    int end;
    int word; // the bits stand for K tiles 32 * word to 32 * word + 31
    unsigned live, full;

    __device__ __forceinline__ void start(const TileOperands &operands) {
        map = operands.map;
        end = operands.tile.any_end > operands.tile.any_start ? (operands.tile.any_end - 1) / TILE_KEYS + 1 : 0;
        word = -1;
        live = full = 0;
    }

    // The first K tile from `key_tile` on that the mask leaves something of; `end` or more if there is none.
    __device__ __forceinline__ int next_from(int key_tile) {
        if constexpr (IS_FALLBACK) {
#pragma unroll 1
            while (map && key_tile < end) {
                if (key_tile >> 5 != word) {
                    word = key_tile >> 5;
                    int own_tile = 32 * word + (threadIdx.x & 31);
                    MapKind kind = own_tile < end ? (MapKind)map[own_tile] : MapKind::Empty;
                    live = __ballot_sync(~0u, kind != MapKind::Empty);
                    full = __ballot_sync(~0u, kind == MapKind::Full);
                }
                unsigned rest = live >> (key_tile & 31);
                if (rest) return key_tile + __ffs(rest) - 1;
                key_tile = (key_tile | 31) + 1;
            }
        }
        return key_tile;
    }

    // Whether the mask changes anything in the K tile that next_from found last.
    __device__ __forceinline__ bool is_mixed(int key_tile) const {
        return !IS_FALLBACK || !map || !(full >> (key_tile & 31) & 1);
    }
};

#if PREFIX
#include "prefill/prefix_item.cuh"
static_assert(sizeof(PrefixRow) == ROW_BYTES, "as the host has it");

static __device__ __forceinline__ PrefixRow *prefix_rows() { return (PrefixRow *)(dynamic_shared + ROWS_OFFSET); }

// Row facts of a warp, from shared memory.
struct Rows {
    const AttentionParameters &params;
    const PrefillTile &tile;
    int first;
    __device__ __forceinline__ const RowFacts &operator[](int i) const { return prefix_rows()[first + 8 * i].facts; }
};
#else
// Row facts of a warp, computed on demand.
struct Rows {
    const AttentionParameters &params;
    const PrefillTile &tile;
    int first;
    __device__ __forceinline__ RowFacts operator[](int i) const { return find_row(params, tile, first + 8 * i); }
};
#endif

// A thread's part of its warp's rows; `m` counts MMA row tiles of 16 rows.
struct Worker {
    const AttentionParameters &params;
    Loader loader;
    int lane, row_warp, value_warp;
    float factor; // from scores to exponents of 2
    Products products;
    KeyTileIterator key_tiles;
    // A thread has two rows of every 16-row MMA tile.
    Outputs out;
    float row_max[MMA_ROW_TILES][2], row_sum[MMA_ROW_TILES][2];
    bool large; // whether a maximum of the warp's is: see `is_large`

    // Synchronizes the warps that share rows.
    __device__ __forceinline__ void synchronize_rows() const {
        if constexpr (VALUE_WARPS == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(row_warp + 1), "n"(VALUE_WARPS * 32) : "memory");
        }
    }

    // The maxima of rows over a K tile.
    __device__ __forceinline__ void find_maxima(const Scores &scores, float (&tile_max)[MMA_ROW_TILES][2]) const {
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = fmaxf(scores[m][0][2 * r], scores[m][0][2 * r + 1]);
#pragma unroll
                for (int j = 1; j < MMA_KEY_TILES; j++)
                    x = fmaxf(x, fmaxf(scores[m][j][2 * r], scores[m][j][2 * r + 1]));
                tile_max[m][r] = quad_max(x);
            }
        if constexpr (VALUE_WARPS > 1) {
            float *maxima = (float *)(dynamic_shared + MAXIMA_OFFSET) + row_warp * WARP_ROWS * VALUE_WARPS;
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (lane % 4 == 0) maxima[(m * 16 + 8 * r + lane / 4) * VALUE_WARPS + value_warp] = tile_max[m][r];
            synchronize_rows();
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int i = 0; i < VALUE_WARPS; i++)
                        tile_max[m][r] = fmaxf(tile_max[m][r], maxima[(m * 16 + 8 * r + lane / 4) * VALUE_WARPS + i]);
        }
    }

    // Online softmax with lazy rescale over the scores of a K tile: they become probabilities.
    __device__ __forceinline__ void softmax_step(Scores &scores, int stage) {
        float tile_max[MMA_ROW_TILES][2];
        find_maxima(scores, tile_max);
        bool any_rises = false;
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) any_rises |= (tile_max[m][r] - row_max[m][r]) * factor > RESCALE_THRESHOLD;
        if (__any_sync(~0u, any_rises)) {
            large = false;
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float old_max = row_max[m][r];
                    bool rises = (tile_max[m][r] - old_max) * factor > RESCALE_THRESHOLD;
                    float rescale = rises ? exp2_fast((old_max - tile_max[m][r]) * factor) : 1.0f;
                    if (rises) row_max[m][r] = tile_max[m][r];
                    large |= row_max[m][r] != -INF && is_large(row_max[m][r] * factor);
                    row_sum[m][r] *= rescale;
#pragma unroll
                    for (int v = 0; v < MMA_VALUE_TILES; v++) {
                        out[m][v][2 * r] *= rescale;
                        out[m][v][2 * r + 1] *= rescale;
                    }
                }
            large = __any_sync(~0u, large);
        }
        if (large) {
            // Differences first: see `is_large`.
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                for (int j = 0; j < MMA_KEY_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float reference = row_max[m][e / 2];
                        scores[m][j][e] -= reference == -INF ? 0.0f : reference;
                    }
        }
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // An empty row uses 0 as its reference: -inf - -inf is NaN.
                float reference = row_max[m][r] == -INF || large ? 0.0f : row_max[m][r] * -factor;
#pragma unroll
                for (int j = 0; j < MMA_KEY_TILES; j++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        float x = exp2_fast(fmaf(scores[m][j][e], factor, reference));
                        scores[m][j][e] = x;
                        row_sum[m][r] += x;
                    }
            }
        if constexpr (CONVERTS && !SCALES_OUTPUT) {
            if (loader.cache->value_scales) multiply(scores, loader.stage_scales(stage) + TILE_KEYS);
        }
        if constexpr (VALUE_WARPS > 1) {
            products.store_probs(scores, value_warp * WARP_KEYS);
            synchronize_rows();
        }
    }

    // Multiplies the scores of this warp's keys by scales of the K tile: of its keys, or of its values.
    __device__ __forceinline__ void multiply(Scores &scores, const float *scales) const {
#pragma unroll
        for (int j = 0; j < MMA_KEY_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float scale = scales[value_warp * WARP_KEYS + 8 * j + 2 * (lane & 3) + e];
#pragma unroll
                for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) scores[m][j][2 * r + e] *= scale;
            }
    }

    __device__ __forceinline__ unsigned key_stage(int stage) const {
        return loader.memory + KEYS_OFFSET + stage * KEY_STAGE_BYTES;
    }
    __device__ __forceinline__ unsigned value_stage(int stage) const {
        return loader.memory + VALUES_OFFSET + stage * VALUE_STAGE_BYTES;
    }

    // Prologue of a tile: starts the copies of its queries and first K tile, and returns that K tile.
    __device__ __forceinline__ int begin(const TileOperands &operands) {
        key_tiles.start(operands);
        int key_tile = key_tiles.next_from(operands.tile.any_start / TILE_KEYS);
        if (key_tile < key_tiles.end) {
            loader.load_queries(operands);
            loader.fetch<true>(operands, key_tile, key_stage(0));
            loader.fetch_scales(operands, key_tile, 0);
            if constexpr (KV_BUFFERS == 4) loader.fetch<false>(operands, key_tile, value_stage(0));
        }
        return key_tile;
    }

    // S = Q K^T of a K tile, score modifications and online softmax.
    __device__ __forceinline__ void compute_scores(const TileOperands &operands, Scores &scores, int key_tile,
                                                   bool mixed, int stage) {
#pragma unroll
        for (int term = 0; term < KEY_TERMS; term++)
            products.mma_qk(scores, key_stage(stage) + term * KEY_TERM_BYTES + value_warp * WARP_KEYS * KEY_PITCH);
        if constexpr (CONVERTS) {
            if (loader.cache->key_scales) multiply(scores, loader.stage_scales(stage));
        }
        const PrefillTile &tile = operands.tile;
        int first_key = key_tile * TILE_KEYS;
        bool structure = first_key < tile.every_start || first_key + TILE_KEYS > tile.every_end;
        // The tree mask hides keys even where the mask itself changes nothing by the tile map.
        if (structure || (IS_FALLBACK && (mixed || params.tree_mask || !scores_are_unmodified(params)))) {
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++) {
                Rows rows = {params, tile, row_warp * WARP_ROWS + m * 16 + (lane >> 2)};
                modify_scores(params, tile.scale, scores[m], rows,
                              {first_key + value_warp * WARP_KEYS, tile.seq.kv_len - tile.seq.q_len, structure, mixed});
            }
        }
        softmax_step(scores, stage);
    }

    __device__ __forceinline__ void accumulate_output(const Scores &scores, unsigned values) {
        products.mma_pv(out, scores, values, value_warp * WARP_VALUE_DIM * ELEMENT_BYTES);
    }

    // Mainloop: all K tiles of a tile. The copies of the prologue are in flight.
    __device__ __forceinline__ void mainloop(const TileOperands &operands, int key_tile) {
        bool mixed = key_tiles.is_mixed(key_tile);
        int stage = 0;
#pragma unroll 1
        while (key_tile < key_tiles.end) {
            int next = key_tiles.next_from(key_tile + 1);
            bool next_mixed = key_tiles.is_mixed(next), more = next < key_tiles.end;
            Scores scores = {};
            cp_async_wait<0>();
            __syncthreads();
            if constexpr (KV_BUFFERS == 4) {
                if (more) {
                    loader.fetch<true>(operands, next, key_stage(stage ^ 1));
                    loader.fetch_scales(operands, next, stage ^ 1);
                    loader.fetch<false>(operands, next, value_stage(stage ^ 1));
                }
                cp_async_commit();
                compute_scores(operands, scores, key_tile, mixed, stage);
                accumulate_output(scores, value_stage(stage));
                stage ^= 1;
            } else if constexpr (KV_BUFFERS == 2) {
                loader.fetch<false>(operands, key_tile, value_stage(0));
                cp_async_commit();
                compute_scores(operands, scores, key_tile, mixed, 0);
                cp_async_wait<0>();
                __syncthreads();
                if (more) {
                    loader.fetch<true>(operands, next, key_stage(0));
                    loader.fetch_scales(operands, next, 0);
                }
                cp_async_commit();
                accumulate_output(scores, value_stage(0));
            } else {
                compute_scores(operands, scores, key_tile, mixed, 0);
                __syncthreads();
                loader.fetch<false>(operands, key_tile, value_stage(0));
                cp_async_commit();
                cp_async_wait<0>();
                __syncthreads();
                accumulate_output(scores, value_stage(0));
                __syncthreads();
                if (more) {
                    loader.fetch<true>(operands, next, key_stage(0));
                    loader.fetch_scales(operands, next, 0);
                }
                cp_async_commit();
            }
            key_tile = next;
            mixed = next_mixed;
        }
    }

    __device__ __forceinline__ void clear() {
        large = false;
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                row_max[m][r] = -INF;
                row_sum[m][r] = 0.0f;
            }
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[m][v][e] = 0.0f;
        }
    }

    // Warps that share rows exchange their sums: each has those of its own keys.
    __device__ __forceinline__ void exchange_sums() const {
        if constexpr (VALUE_WARPS > 1) {
            float *sums = (float *)(dynamic_shared + MAXIMA_OFFSET) + row_warp * WARP_ROWS * VALUE_WARPS;
#pragma unroll
            for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = quad_sum(row_sum[m][r]);
                    if (lane % 4 == 0) sums[(m * 16 + 8 * r + lane / 4) * VALUE_WARPS + value_warp] = x;
                }
            synchronize_rows();
        }
    }

    // The sum of a row, after exchange_sums.
    __device__ __forceinline__ float total(int m, int r) const {
        if constexpr (VALUE_WARPS > 1) {
            int row = row_warp * WARP_ROWS + m * 16 + 8 * r + lane / 4;
            const float *sums = (const float *)(dynamic_shared + MAXIMA_OFFSET) + row * VALUE_WARPS;
            float all = sums[0];
#pragma unroll
            for (int i = 1; i < VALUE_WARPS; i++) all += sums[i];
            return all;
        } else {
            return quad_sum(row_sum[m][r]);
        }
    }

    // A row's maximum, in units of scores.
    __device__ __forceinline__ float scaled_max(int m, int r) const {
        bool keep = row_max[m][r] == -INF || has_natural_scores(params);
        return keep ? row_max[m][r] : row_max[m][r] * factor;
    }

    // Epilogue: adds the sink, normalizes, and writes output and LSE.
    __device__ __forceinline__ void write(const TileOperands &operands) {
        const PrefillTile &tile = operands.tile;
        exchange_sums();
        Sink sink = load_sink(params, tile.head, unit_of(params));
#pragma unroll
        for (int m = 0; m < MMA_ROW_TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = row_warp * WARP_ROWS + m * 16 + 8 * r + lane / 4;
                State state = {scaled_max(m, r), total(m, r)};
                FinalizedRow finalized = finalize_row(params, state, sink, unit_of(params), params.lse.pointer != 0);
                OutputFactors factors = finalized.factors;
                factors.second *= tile.value_scale;
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v++) {
                    out[m][v][2 * r] = factors(out[m][v][2 * r]);
                    out[m][v][2 * r + 1] = factors(out[m][v][2 * r + 1]);
                }
                if (params.lse.pointer && lane % 4 == 0 && value_warp == 0 && row < tile.tokens)
                    store_lse(params, tile, tile.head, tile.first_token + row, finalized.lse);
            }

        if (!params.out_f32) bound_outputs(*(float (*)[MMA_ROW_TILES * MMA_VALUE_TILES * 4]) & out);
        store_rows<0, 0>(tile);
        store_rows<0, 1>(tile);
        if constexpr (MMA_ROW_TILES == 2) {
            store_rows<MMA_ROW_TILES - 1, 0>(tile);
            store_rows<MMA_ROW_TILES - 1, 1>(tile);
        }
    }

    // Writes this thread's part of row lane / 4, in half R of an MMA row tile.
    template <int M, int R> __device__ __forceinline__ void store_rows(const PrefillTile &tile) const {
        int first_dim = value_warp * WARP_VALUE_DIM;
        int row = row_warp * WARP_ROWS + M * 16 + 8 * R + lane / 4;
        bool present = row < tile.tokens;
        long long at = out_offset(params, tile, tile.head, tile.first_token + row);
        if constexpr (!WIDE_ELEMENT) {
            if (!IS_FALLBACK || (!params.out_f32 && params.out_aligned)) {
                // Transpose within the quad: four pairs of four tiles become 8 contiguous elements of one.
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v += 4) {
                    unsigned pairs[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) pairs[i] = E::pack(out[M][v + i][2 * R], out[M][v + i][2 * R + 1]);
                    transpose_quad(pairs);
                    if (present) store_8(at, first_dim + 8 * (v + lane % 4), pairs);
                }
                return;
            }
        }
        if constexpr (WIDE_ELEMENT || IS_FALLBACK) {
            // Calls `store(index, dims left, x, y)` for every pair of adjacent elements.
            auto each_pair = [&](auto store) {
#pragma unroll
                for (int v = 0; v < MMA_VALUE_TILES; v++) {
                    int column = first_dim + 8 * v + 2 * (lane % 4), left = params.value_dim - column;
                    if (present && left > 0) store(at + column, left, out[M][v][2 * R], out[M][v][2 * R + 1]);
                }
            };
            if constexpr (CONVERTS && WIDE_ELEMENT) {
                ElementType type = params.out_f32 ? ElementType::F32 : loader.cache->query_type;
                if (type != ElementType::F32) {
                    each_pair([&](long long i, int left, float x, float y) {
                        store_element(params.out.pointer, i, type, x);
                        if (left > 1) store_element(params.out.pointer, i + 1, type, y);
                    });
                    return;
                }
            }
            float *wide = (float *)params.out.pointer;
            Bits *narrow = (Bits *)params.out.pointer;
            if ((WIDE_ELEMENT || params.out_f32) && params.out_aligned) {
                each_pair([&](long long i, int left, float x, float y) {
                    if (left > 1) {
                        asm volatile("st.global.v2.f32 [%0], {%1,%2};" ::"l"(wide + i), "f"(x), "f"(y) : "memory");
                    } else {
                        wide[i] = x;
                    }
                });
            } else if (WIDE_ELEMENT || params.out_f32) {
                each_pair([&](long long i, int left, float x, float y) {
                    wide[i] = x;
                    if (left > 1) wide[i + 1] = y;
                });
            } else {
                each_pair([&](long long i, int left, float x, float y) {
                    narrow[i] = E::from_float(x);
                    if (left > 1) narrow[i + 1] = E::from_float(y);
                });
            }
        }
    }

    // Transposes a 4 x 4 matrix, four numbers in each lane of a quad.
    __device__ __forceinline__ void transpose_quad(unsigned (&x)[4]) const {
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                int i = step == 1 ? 2 * k : k;
                unsigned other = __shfl_xor_sync(~0u, lane & step ? x[i] : x[i + step], step);
                if (lane & step) {
                    x[i] = other;
                } else {
                    x[i + step] = other;
                }
            }
    }

    // Writes 8 contiguous elements of a row, or as many as it has left.
    __device__ __forceinline__ void store_8(long long at, int column, const unsigned (&pairs)[4]) const {
        Bits *to = (Bits *)params.out.pointer + at + column;
        if (!IS_FALLBACK || column + 8 <= params.value_dim) {
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to + 2 * i), "r"(pairs[i]), "r"(pairs[i + 1])
                             : "memory");
        } else {
#pragma unroll
            for (int e = 0; e < 7; e++)
                if (column + e < params.value_dim) to[e] = (Bits)(pairs[e / 2] >> (e % 2 * 16));
        }
    }
};

#if PREFIX
#include "prefill/prefix_kernel.cuh"
#else
extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS_PER_SM)
    prefill(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill
#if CACHE
            ,
            const __grid_constant__ CacheParameters cache
#endif
    ) {
#if !CACHE
    constexpr const CacheParameters *storage = 0;
#else
    const CacheParameters *storage = &cache;
#endif
    Shared &shared = *(Shared *)dynamic_shared;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Worker w = {params, {params, storage, shared_start()}};
    w.lane = lane;
    w.row_warp = warp / VALUE_WARPS;
    w.value_warp = warp % VALUE_WARPS;
    w.products.lane = lane;
    w.products.query = Products::a_fragment_address<KEY_PITCH>(
        w.loader.memory + QUERY_OFFSET + w.row_warp * WARP_ROWS * KEY_PITCH, lane);
    w.products.probs = w.loader.memory + PROBS_OFFSET + w.row_warp * WARP_ROWS * PROB_PITCH;

    grid_dependency_wait(); // nothing of the preceding kernel's output has been read so far
    // Claim tiles two ahead, and look up the next one's facts while this one runs.
    TileCursor cursor = {0, 0};
    unsigned number = 0;
    if (warp == 0) {
        if (lane == 0) number = claim_tile(prefill);
        w.loader.find_work(prefill, blockIdx.x, cursor, shared.tiles[0]);
    }
    __syncthreads();
    int which = 0;
#pragma unroll 1
    for (bool first = true;; first = false) {
        // Prologue of this tile, overlapped with the epilogue of the previous one.
        const TileOperands &operands = shared.tiles[which];
        int key_tile = 0;
        if (operands.valid) key_tile = w.begin(operands);
        cp_async_commit();
        if (!first) w.write(shared.tiles[which == 0 ? 2 : which - 1]);
        if (!operands.valid) break;
        which = which == 2 ? 0 : which + 1;
        if (warp == 0) {
            unsigned next = __shfl_sync(~0u, number, 0);
            if (lane == 0) number = claim_tile(prefill);
            w.loader.find_work(prefill, next, cursor, shared.tiles[which]);
        }
        w.clear();
        w.factor = exponent_scale(params, operands.tile.scale);
        if constexpr (QUERY_IN_REGISTERS) {
            cp_async_wait<0>();
            __syncthreads();
            w.products.load_query_fragments();
        }
        w.mainloop(operands, key_tile);
        cp_async_wait<0>();
        __syncthreads();
    }
    if (threadIdx.x == 0) finish_tile_scheduler(prefill);
}
#endif
