// Attention of many query rows: prefill and its chunks, on every GPU from sm_80 up.
//
// A thread block takes tiles of TILE_ROWS tokens of one query head, one after the other (tile_scheduler.cuh). Of each it walks the keys that some row
// sees, TILE_KEYS at a time. Copies are asynchronous: a step's come during the step before, or its values during its first product and the next
// keys during its second; the next tile's first ones while a tile is written. Warps divide the rows; scores, probabilities and outputs stay
// in registers. Where registers cannot hold a warp's rows of the output, warps share rows (VALUE_WARPS) and hand each other their probabilities.
//
// A kernel that is not GENERAL takes plain scores, a scale above 0, rows of exactly its dims that start at multiples of 16 bytes, and an output
// of the inputs' type whose rows start at multiples of four elements.
#include "common/copy.cuh"
#include "prefill/tile_loader.cuh"
#include "prefill/prefill_mma.cuh"
#include "prefill/prefill_scores.cuh"
#include "prefill/prefill_shape.cuh"
#include "prefill/tile_scheduler.cuh"
#include "common/state.cuh"

struct Shared {
    Work work[3]; // the tile before, which may still be written; this one; the next
};
static_assert(sizeof(Shared) <= QUERY_AT, "they do not overlap");

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Its address, which the compiler would reckon anew wherever it is used.
static __device__ __forceinline__ unsigned shared_start() {
    unsigned address;
    asm volatile("mov.u32 %0, dynamic_shared;" : "=r"(address));
    return address;
}

// The key tiles of a tile of rows, without those that the mask empties.
struct KeyWalk {
    const unsigned char *map;
    int end;
    int block; // the 32 key tiles that the bits stand for
    unsigned live, full;

    __device__ __forceinline__ void start(const Work &work) {
        map = work.map;
        end = work.tile.end > work.tile.start ? (work.tile.end - 1) / TILE_KEYS + 1 : 0;
        block = -1;
        live = full = 0;
    }

    // The first key tile from `key_tile` on that has something to see; `end` or more where there is none.
    __device__ __forceinline__ int from(int key_tile) {
        if constexpr (GENERAL_SCORES) {
#pragma unroll 1
            while (map && key_tile < end) {
                if (key_tile >> 5 != block) {
                    block = key_tile >> 5;
                    int mine = 32 * block + (threadIdx.x & 31), kind = mine < end ? map[mine] : MAP_EMPTY;
                    live = __ballot_sync(~0u, kind != MAP_EMPTY);
                    full = __ballot_sync(~0u, kind == MAP_FULL);
                }
                unsigned rest = live >> (key_tile & 31);
                if (rest) return key_tile + __ffs(rest) - 1;
                key_tile = (key_tile | 31) + 1;
            }
        }
        return key_tile;
    }

    // Whether the mask changes anything in the key tile that `from` found last.
    __device__ __forceinline__ bool is_mixed(int key_tile) const { return !GENERAL_SCORES || !map || !(full >> (key_tile & 31) & 1); }
};

// The facts of a warp's rows, as they are asked for.
struct Rows {
    const AttentionParameters &p;
    const PrefillTile &tile;
    int first;
    __device__ __forceinline__ PrefillRow operator[](int i) const { return find_row(p, tile, first + 8 * i); }
};

// What a thread does.
struct Worker {
    const AttentionParameters &p;
    Loader loader;
    int lane, row_warp, value_warp;
    float factor; // from scores to exponents of 2
    Products products;
    KeyWalk walk;
    // Each thread has two rows of every block of 16.
    Outputs out;
    float row_max[ROW_BLOCKS][2], row_sum[ROW_BLOCKS][2];
    bool large; // whether a maximum of the warp's is: see `is_large`

    // The warps that share rows wait for each other.
    __device__ __forceinline__ void synchronize_rows() const {
        if constexpr (VALUE_WARPS == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(row_warp + 1), "n"(VALUE_WARPS * 32) : "memory");
        }
    }

    // Folds a step's scores into the running state; they become probabilities.
    __device__ __forceinline__ void join_scores(Scores &scores) {
        float most[ROW_BLOCKS][2];
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float x = fmaxf(scores[block][0][2 * r], scores[block][0][2 * r + 1]);
#pragma unroll
                for (int j = 1; j < KEY_TILES; j++) x = fmaxf(x, fmaxf(scores[block][j][2 * r], scores[block][j][2 * r + 1]));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                most[block][r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
            }
        if constexpr (VALUE_WARPS > 1) {
            float *maxima = (float *)(dynamic_shared + MAXIMA_AT) + row_warp * WARP_ROWS * VALUE_WARPS;
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (lane % 4 == 0) maxima[(block * 16 + 8 * r + lane / 4) * VALUE_WARPS + value_warp] = most[block][r];
            synchronize_rows();
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int i = 0; i < VALUE_WARPS; i++)
                        most[block][r] = fmaxf(most[block][r], maxima[(block * 16 + 8 * r + lane / 4) * VALUE_WARPS + i]);
        }
        bool moved = false;
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
            for (int r = 0; r < 2; r++) moved |= (most[block][r] - row_max[block][r]) * factor > SLACK;
        if (__any_sync(~0u, moved)) {
            large = false;
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float before = row_max[block][r];
                    bool moves = (most[block][r] - before) * factor > SLACK;
                    float carried = moves ? exp2_fast((before - most[block][r]) * factor) : 1.0f;
                    if (moves) row_max[block][r] = most[block][r];
                    large |= row_max[block][r] != -INFINITE && is_large(row_max[block][r] * factor);
                    row_sum[block][r] *= carried;
#pragma unroll
                    for (int v = 0; v < VALUE_TILES; v++) {
                        out[block][v][2 * r] *= carried;
                        out[block][v][2 * r + 1] *= carried;
                    }
                }
            large = __any_sync(~0u, large);
        }
        if (large) {
            // Differences first: see `is_large`.
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
                for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float most = row_max[block][e / 2];
                        scores[block][j][e] -= most == -INFINITE ? 0.0f : most;
                    }
        }
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                // A row that has seen nothing yet has 0 for its reference: minus infinity minus itself is NaN.
                float reference = row_max[block][r] == -INFINITE || large ? 0.0f : row_max[block][r] * -factor;
#pragma unroll
                for (int j = 0; j < KEY_TILES; j++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        float x = exp2_fast(fmaf(scores[block][j][e], factor, reference));
                        scores[block][j][e] = x;
                        row_sum[block][r] += x;
                    }
            }
        if constexpr (VALUE_WARPS > 1) {
            products.store_weights(scores, value_warp * WARP_KEYS);
            synchronize_rows();
        }
    }

    __device__ __forceinline__ unsigned key_slot(int stage) const { return loader.memory + KEYS_AT + stage * KEY_SLOT; }
    __device__ __forceinline__ unsigned value_slot(int stage) const { return loader.memory + VALUES_AT + stage * VALUE_SLOT; }

    // Starts the copies of a tile's queries and first step; says which that is.
    __device__ __forceinline__ int begin(const Work &work) {
        walk.start(work);
        int key_tile = walk.from(work.tile.start / TILE_KEYS);
        if (key_tile < walk.end) {
            loader.load_queries(work);
            loader.fetch<true>(work, key_tile, key_slot(0));
            if constexpr (SLOTS == 4) loader.fetch<false>(work, key_tile, value_slot(0));
        }
        return key_tile;
    }

    // The first product of a step, and all that happens to scores.
    __device__ __forceinline__ void take_keys(const Work &work, Scores &scores, int key_tile, bool mixed, unsigned keys) {
        products.multiply_keys(scores, keys + value_warp * WARP_KEYS * KEY_PITCH);
        const PrefillTile &tile = work.tile;
        int first_key = key_tile * TILE_KEYS;
        bool structure = first_key < tile.each_start || first_key + TILE_KEYS > tile.each_end;
        // (A tree hides keys also where the mask's map says that the mask changes nothing.)
        if (structure || (GENERAL_SCORES && (mixed || p.tree_mask || !scores_are_bare(p)))) {
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++) {
                Rows rows = {p, tile, row_warp * WARP_ROWS + block * 16 + (lane >> 2)};
                finish_scores(p, scores[block], rows, first_key + value_warp * WARP_KEYS, tile.facts.kv_len - tile.facts.q_len, structure, mixed);
            }
        }
        join_scores(scores);
    }

    __device__ __forceinline__ void take_values(const Scores &scores, unsigned values) {
        products.multiply_values(out, scores, values, value_warp * WARP_VALUE_DIM * ELEMENT_BYTES);
    }

    // All of a tile's steps; the copies of its queries and first step are under way.
    __device__ __forceinline__ void walk_keys(const Work &work, int key_tile) {
        bool mixed = walk.is_mixed(key_tile);
        int stage = 0;
#pragma unroll 1
        while (key_tile < walk.end) {
            int next = walk.from(key_tile + 1);
            bool next_mixed = walk.is_mixed(next), more = next < walk.end;
            Scores scores = {};
            copy_wait<0>();
            __syncthreads();
            if constexpr (SLOTS == 4) {
                if (more) {
                    loader.fetch<true>(work, next, key_slot(stage ^ 1));
                    loader.fetch<false>(work, next, value_slot(stage ^ 1));
                }
                copy_commit();
                take_keys(work, scores, key_tile, mixed, key_slot(stage));
                take_values(scores, value_slot(stage));
                stage ^= 1;
            } else if constexpr (SLOTS == 2) {
                loader.fetch<false>(work, key_tile, value_slot(0));
                copy_commit();
                take_keys(work, scores, key_tile, mixed, key_slot(0));
                copy_wait<0>();
                __syncthreads();
                if (more) loader.fetch<true>(work, next, key_slot(0));
                copy_commit();
                take_values(scores, value_slot(0));
            } else {
                take_keys(work, scores, key_tile, mixed, key_slot(0));
                __syncthreads();
                loader.fetch<false>(work, key_tile, value_slot(0));
                copy_commit();
                copy_wait<0>();
                __syncthreads();
                take_values(scores, value_slot(0));
                __syncthreads();
                if (more) loader.fetch<true>(work, next, key_slot(0));
                copy_commit();
            }
            key_tile = next;
            mixed = next_mixed;
        }
    }

    __device__ __forceinline__ void clear() {
        large = false;
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                row_max[block][r] = -INFINITE;
                row_sum[block][r] = 0.0f;
            }
#pragma unroll
            for (int v = 0; v < VALUE_TILES; v++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[block][v][e] = 0.0f;
        }
    }

    // Writes a finished tile: the sink joins, the sum divides.
    __device__ __forceinline__ void write(const Work &work) {
        const PrefillTile &tile = work.tile;
        long long first_token = (long long)tile.facts.q_start + tile.first_token;
        if constexpr (VALUE_WARPS > 1) {
            // Each warp has summed its own keys.
            float *sums = (float *)(dynamic_shared + MAXIMA_AT) + row_warp * WARP_ROWS * VALUE_WARPS;
#pragma unroll
            for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float x = row_sum[block][r];
                    x += __shfl_xor_sync(~0u, x, 1);
                    x += __shfl_xor_sync(~0u, x, 2);
                    if (lane % 4 == 0) sums[(block * 16 + 8 * r + lane / 4) * VALUE_WARPS + value_warp] = x;
                }
            synchronize_rows();
        }
        Sink sink = load_sink(p, tile.head, unit_of(p));
#pragma unroll
        for (int block = 0; block < ROW_BLOCKS; block++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = row_warp * WARP_ROWS + block * 16 + 8 * r + lane / 4;
                float all;
                if constexpr (VALUE_WARPS > 1) {
                    const float *sums = (const float *)(dynamic_shared + MAXIMA_AT) + row * VALUE_WARPS;
                    all = sums[0];
#pragma unroll
                    for (int i = 1; i < VALUE_WARPS; i++) all += sums[i];
                } else {
                    all = row_sum[block][r];
                    all += __shfl_xor_sync(~0u, all, 1);
                    all += __shfl_xor_sync(~0u, all, 2);
                }
                bool keep = row_max[block][r] == -INFINITE || has_natural_scores(p);
                FinishedRow finished = finish_row(p, {keep ? row_max[block][r] : row_max[block][r] * factor, all}, sink, unit_of(p));
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    out[block][v][2 * r] *= finished.factor;
                    out[block][v][2 * r + 1] *= finished.factor;
                }
                if (p.lse && lane % 4 == 0 && value_warp == 0 && row < tile.tokens) {
                    long long at = tile.sequence * p.lse_batch_stride + (first_token + row) * p.lse_token_stride + tile.head * p.lse_head_stride;
                    ((float *)p.lse)[at] = finished.lse;
                }
            }

        if (!p.out_f32) bound_outputs(*(float(*)[ROW_BLOCKS * VALUE_TILES * 4]) & out);
        write_rows<0, 0>(tile, first_token);
        write_rows<0, 1>(tile, first_token);
        if constexpr (ROW_BLOCKS == 2) {
            write_rows<ROW_BLOCKS - 1, 0>(tile, first_token);
            write_rows<ROW_BLOCKS - 1, 1>(tile, first_token);
        }
    }

    // Writes this thread's part of row `lane / 4` of half `r` of a block.
    template <int BLOCK, int R> __device__ __forceinline__ void write_rows(const PrefillTile &tile, long long first_token) const {
        int first_dim = value_warp * WARP_VALUE_DIM;
        int row = row_warp * WARP_ROWS + BLOCK * 16 + 8 * R + lane / 4;
        bool present = row < tile.tokens;
        long long at = tile.sequence * p.out_batch_stride + (first_token + row) * p.out_token_stride + tile.head * p.out_head_stride;
        if constexpr (!WIDE_ELEMENT) {
            if (!GENERAL_SCORES || (!p.out_f32 && p.out_aligned)) {
                // A lane's four pairs of four tiles become 8 neighbours of one.
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v += 4) {
                    unsigned pairs[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) pairs[i] = E::pack(out[BLOCK][v + i][2 * R], out[BLOCK][v + i][2 * R + 1]);
                    transpose_quad(pairs);
                    if (present) store_eight(at, first_dim + 8 * (v + lane % 4), pairs);
                }
                return;
            }
        }
        if constexpr (WIDE_ELEMENT || GENERAL_SCORES) {
            // Calls `store(index, dims left, pair)` for every pair of neighbours.
            auto each_pair = [&](auto store) {
#pragma unroll
                for (int v = 0; v < VALUE_TILES; v++) {
                    int column = first_dim + 8 * v + 2 * (lane % 4), left = p.value_dim - column;
                    if (present && left > 0) store(at + column, left, out[BLOCK][v][2 * R], out[BLOCK][v][2 * R + 1]);
                }
            };
            float *wide = (float *)p.out;
            Bits *narrow = (Bits *)p.out;
            if ((WIDE_ELEMENT || p.out_f32) && p.out_aligned) {
                each_pair([&](long long i, int left, float x, float y) {
                    if (left > 1) {
                        asm volatile("st.global.v2.f32 [%0], {%1,%2};" ::"l"(wide + i), "f"(x), "f"(y) : "memory");
                    } else {
                        wide[i] = x;
                    }
                });
            } else if (WIDE_ELEMENT || p.out_f32) {
                each_pair([&](long long i, int left, float x, float y) {
                    wide[i] = x;
                    if (left > 1) wide[i + 1] = y;
                });
            } else {
                each_pair([&](long long i, int left, float x, float y) {
                    narrow[i] = E::store(x);
                    if (left > 1) narrow[i + 1] = E::store(y);
                });
            }
        }
    }

    // Transposes four numbers of each of four lanes.
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

    // Writes 8 neighbours of a row, or as many as it has.
    __device__ __forceinline__ void store_eight(long long at, int column, const unsigned (&pairs)[4]) const {
        Bits *to = (Bits *)p.out + at + column;
        if (!GENERAL_SCORES || column + 8 <= p.value_dim) {
#pragma unroll
            for (int i = 0; i < 4; i += 2) asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to + 2 * i), "r"(pairs[i]), "r"(pairs[i + 1]) : "memory");
        } else {
#pragma unroll
            for (int e = 0; e < 7; e++)
                if (column + e < p.value_dim) to[e] = (Bits)(pairs[e / 2] >> (e % 2 * 16));
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    prefill(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters t) {
    Shared &shared = *(Shared *)dynamic_shared;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Worker w = {p, {p, shared_start()}};
    w.lane = lane;
    w.row_warp = warp / VALUE_WARPS;
    w.value_warp = warp % VALUE_WARPS;
    w.factor = exponent_scale(p);
    w.products.lane = lane;
    w.products.query = Products::tall_place<KEY_PITCH>(w.loader.memory + QUERY_AT + w.row_warp * WARP_ROWS * KEY_PITCH, lane);
    w.products.weights = w.loader.memory + WEIGHTS_AT + w.row_warp * WARP_ROWS * WEIGHT_PITCH;

#if __CUDA_ARCH__ >= 900
    // Started before the kernel in front of it has ended, where the launch allows that: nothing of the caller's was touched so far.
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    // The number of the tile after the next is asked for a tile ahead; the next one's facts are found while this one is worked on.
    TilePlace place = {0, 0};
    unsigned number = 0;
    if (warp == 0) {
        if (lane == 0) number = take_tile(t);
        w.loader.find_work(t, blockIdx.x, place, shared.work[0]);
    }
    __syncthreads();
    int which = 0;
#pragma unroll 1
    for (bool first = true;; first = false) {
        // The first copies of a tile are under way while the tile before it is written.
        const Work &work = shared.work[which];
        int key_tile = 0;
        if (work.there) key_tile = w.begin(work);
        copy_commit();
        if (!first) w.write(shared.work[which == 0 ? 2 : which - 1]);
        if (!work.there) break;
        which = which == 2 ? 0 : which + 1;
        if (warp == 0) {
            unsigned next = __shfl_sync(~0u, number, 0);
            if (lane == 0) number = take_tile(t);
            w.loader.find_work(t, next, place, shared.work[which]);
        }
        w.clear();
        if constexpr (QUERY_IN_REGISTERS) {
            copy_wait<0>();
            __syncthreads();
            w.products.keep_queries();
        }
        w.walk_keys(work, key_tile);
        copy_wait<0>();
        __syncthreads();
    }
    if (threadIdx.x == 0) finish_tiles(t);
}
