// Decode attention of many rows on Hopper, over 8-bit codes, blocks of q8_0 or q4_0, or 16-bit elements: as
// decode/decode.cu, but keys and values are read, and codes converted, once for all rows of a tile.
//
// The rows of a tile are the N of wgmma: S^T = K Q^T and O^T = V^T P^T take keys and values as their first operand from
// registers, where a warp has its 16 keys, then its value dims, converted if they are codes. A group is a warpgroup. It
// walks its own K tiles of 64 keys through its own cp.async pipeline; conversion of values runs beside Q K^T, that of
// the next keys beside P V. Probabilities go through shared memory.
//
// Maxima of rows are exchanged only where a score exceeds a row's reference by so much that f16 could not hold its
// probability.
//
// Plain scores, exact head dims and runs of 16 keys, as the specialized modules of decode.cu, whose division of work
// and partial states it has. Not in batch-invariant mode.
#include "common/paging.cuh"
#include "decode/decode_cache.cuh"
#include "decode/decode_combine_entry.cuh"
#include "decode/decode_groups.cuh"
#include "decode/decode_schedule.cuh"
#include "hopper/decode_wgmma_operands.cuh"
#include "hopper/decode_wgmma_softmax.cuh"
#if READS_CODES
#include "hopper/decode_wgmma_blocks.cuh"
#endif

namespace decode_wgmma {

static_assert(::MAX_GROUPS >= MAX_GROUPS, "the states of all groups are combined");

#if READS_CODES
template <bool BLOCKS> struct ProductsOf {
    typedef ByteKeys Keys;
    typedef ByteValues Values;
};
template <> struct ProductsOf<true> {
    typedef BlockKeys Keys;
    typedef BlockValues Values;
};
typedef ProductsOf<KeySide::HAS_BLOCKS> Products;
#else
struct Products {
    typedef ElementKeys Keys;
    typedef ElementValues Values;
};
#endif

// A thread's part of one tile over a range of keys.
struct Worker {
    const AttentionParameters &params;
    const CacheParameters &cache;
    Shared &shared;
    unsigned base; // of shared memory
    unsigned ring; // shared memory: this group's pipeline stages
    int lane, group, warp;
    Tile &tile;             // in shared memory, to save registers
    int key_start, key_end; // keys of this piece
    int first_key_tile;     // of the first group; K tiles go round robin over the groups
    int last_entry;         // index in the page table of the last key's page
    Softmax softmax;
    float out[VALUE_BLOCKS][SUMS];
    float value_scale; // multiplies the output

    // Tile `number` of the sequence.
    __device__ __forceinline__ void select_tile(Tile &tile, int number, const SequenceTiles &tiles) {
        tile.kv_head = tiles.row_tiles == 1 ? number : (int)divide(number, tiles.row_tiles);
        tile.first_row = (number - tile.kv_head * tiles.row_tiles) * TILE_ROWS;
        tile.rows = min(TILE_ROWS, tile.seq.q_len * params.group - tile.first_row);
        // Even lanes compute the visible range of the first row, odd lanes that of the last.
        int head, token;
        tile.find_row(params, lane & 1 ? tile.rows - 1 : 0, head, token);
        int start = visible_start(params, tile.seq, token), end = visible_end(params, tile.seq, token);
        tile.any_start = __shfl_sync(~0u, start, 0);
        tile.every_start = __shfl_sync(~0u, start, 1);
        tile.every_end = __shfl_sync(~0u, end, 0);
        tile.any_end = __shfl_sync(~0u, end, 1);
        long long key_at, value_at;
        find_kv_start(params, tile, key_at, value_at);
        tile.key_base = params.keys.pointer + key_at * KeySide::BYTES;
        tile.value_base = params.values.pointer + value_at * ValueSide::BYTES;
        tile.table = page_table(params, tile.sequence);
        if (threadIdx.x == 0) this->tile = tile;
#if READS_CODES
        softmax.keys_scaled = KeySide::IS_BYTES && varies(params, cache.key_scale_strides);
        softmax.values_scaled = ValueSide::IS_BYTES && varies(params, cache.value_scale_strides);
#else
        softmax.keys_scaled = softmax.values_scaled = false;
#endif
    }

    // Finds the keys of a piece: the units of the tile from `unit` to before `last_unit`.
    __device__ __forceinline__ void select_keys(const Tile &tile, int first_unit, int unit, int last_unit) {
        key_start = max(tile.any_start, (first_unit + unit) * KEYS);
        key_end = (int)min((long long)tile.any_end, (long long)(first_unit + last_unit) * KEYS);
        if (key_end <= key_start) key_start = key_end = 0;
        first_key_tile = key_start / KEYS;
    }

    __device__ __forceinline__ void synchronize_group() const { hopper::named_barrier_sync(1 + group, 128); }

    // The page-table index of a key. Entries past the last visible key are not read.
    __device__ __forceinline__ int entry_of(int key) const { return min(page_index(params, key), last_entry); }

    // The page-table entry of this warp's keys of a K tile.
    __device__ __forceinline__ int look_up(int key_tile) const {
        return params.block_size ? tile.table[entry_of(key_tile * KEYS + WARP_KEYS * warp)] : 0;
    }

    // Starts the copies of this warp's keys of a K tile, and of their values and scales, into a pipeline stage.
    __device__ __forceinline__ void fetch(int key_tile, int stage, int entry) const {
        int first = key_tile * KEYS + WARP_KEYS * warp;
        long long key_at, value_at;
        if (params.block_size) {
            int slot = page_slot(params, first, entry_of(first));
            long long from = page_of(params, entry);
            key_at = from * params.keys.strides.batch + slot * params.keys.strides.token;
            value_at = from * params.values.strides.batch + slot * params.values.strides.token;
        } else {
            key_at = first * params.keys.strides.token;
            value_at = first * params.values.strides.token;
        }
        unsigned to = ring + stage * STAGE_BYTES;
        load_rows<KeySide>(to, tile.key_base + key_at * KeySide::BYTES, params.keys.strides.token * KeySide::BYTES,
                           first);
        load_rows<ValueSide>(to + KEYS * KEY_PITCH, tile.value_base + value_at * ValueSide::BYTES,
                             params.values.strides.token * ValueSide::BYTES, first);
#if READS_CODES
        if (softmax.keys_scaled || softmax.values_scaled) load_scales(to + SCALE_OFFSET, first, entry);
#endif
    }

    // Rows of 16 keys from `first` on. Several lanes copy a row, the others the next rows. The stride is in bytes.
    template <class Side>
    __device__ __forceinline__ void load_rows(unsigned to, unsigned long long from, long long stride, int first) const {
        constexpr int PITCH = Side::PITCH;
#if READS_CODES
        if constexpr (Side::HAS_BLOCKS)
            return copy_block_rows<Side>(to + WARP_KEYS * warp * PITCH, from, stride, first - key_start,
                                         key_end - key_start, lane);
#endif
        constexpr int CHUNKS = Side::CHUNKS, LANES = CHUNKS % 8 == 0 ? 8 : 4, AT_ONCE = 32 / LANES;
        int row = lane / LANES, column = lane % LANES * 16;
        unsigned keys = key_end - key_start, key = first + row - key_start;
        const unsigned char *source = (const unsigned char *)from + row * stride + column;
#pragma unroll
        for (int i = 0; i < WARP_KEYS; i += AT_ONCE) {
            int bytes = key + i < keys ? 16 : 0;
#pragma unroll
            for (int j = 0; j < CHUNKS / LANES; j++) {
                unsigned place = swizzle(to + WARP_KEYS * warp * PITCH, i + row, PITCH, column + j * LANES * 16 % 128) +
                                 j * LANES * 16 / 128 * 128;
                if (Side::ROW_BYTES % 128)
                    cp_async_alone(place, source + j * LANES * 16, bytes);
                else
                    cp_async(place, source + j * LANES * 16, bytes);
            }
            source += AT_ONCE * stride;
        }
    }

#if READS_CODES
    // Scales of keys by the first lanes, those of values by the others. Keys outside of the piece get zeros.
    __device__ __forceinline__ void load_scales(unsigned to, int first, int entry) const {
        bool of_keys = lane < WARP_KEYS;
        int key = first + lane % WARP_KEYS;
        const RowStrides &strides = of_keys ? cache.key_scale_strides : cache.value_scale_strides;
        const float *from = scale_start(params, tile, of_keys ? cache.key_scales : cache.value_scales, strides) +
                            row_offset(*this, key, entry, strides);
        bool present = key >= key_start && key < key_end;
        if (of_keys ? softmax.keys_scaled : softmax.values_scaled)
            cp_async_word(to + ((of_keys ? 0 : KEYS) + WARP_KEYS * warp + lane % WARP_KEYS) * 4, from, present);
    }

    // Queries as f16, in the order of codes, a warp per row. bf16 rows are scaled by a power of two that brings their
    // largest element to the top of f16's range. Stores what dot products are multiplied by.
    __device__ __forceinline__ void load_queries() const {
        constexpr int SLOTS = HEAD_DIM / 32; // per lane
        SharedTile<ROWS> to = {base + QUERY_OFFSET};
        float scale = params.scale * LOG2_E;
        if (KeySide::IS_BYTES && !softmax.keys_scaled)
            scale *= *scale_start(params, tile, cache.key_scales, cache.key_scale_strides);
#pragma unroll 4
        for (int row = threadIdx.x >> 5; row < ROWS; row += blockDim.x >> 5) {
            bool present = row < tile.rows;
            int head, token;
            tile.find_row(params, present ? row : 0, head, token);
            const Bits *from = (const Bits *)params.query.pointer + tile.sequence * params.query.strides.batch +
                               (long long)(tile.seq.q_start + token) * params.query.strides.token +
                               head * params.query.strides.head;
            float value[SLOTS], most = 0.0f;
#pragma unroll
            for (int i = 0; i < SLOTS; i++) {
                value[i] = present ? E::to_float(from[dim_of_slot(lane * SLOTS + i)]) : 0.0f;
                most = fmaxf(most, fabsf(value[i]));
            }
            float factor = 1.0f, inverse = 1.0f;
            if (ElementType(ELEMENT_TYPE) == ElementType::BF16) {
                most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
                WeightScale power = weight_scale(most);
                factor = power.factor, inverse = power.inverse;
            }
            if (lane == 0) shared.query_scale[row] = inverse * scale;
#pragma unroll
            for (int i = 0; i < SLOTS; i += 2) {
                int slot = lane * SLOTS + i;
                *(unsigned *)__cvta_shared_to_generic(to.chunk(row, slot / 8) + slot % 8 * 2) =
                    Element<ElementType::F16>::pack(value[i] * factor, value[i + 1] * factor);
            }
        }
    }
#else
    // Queries as they are, 16 bytes by a lane.
    __device__ __forceinline__ void load_queries() const {
        constexpr int CHUNKS = HEAD_DIM / 8;
        SharedTile<ROWS> to = {base + QUERY_OFFSET};
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += blockDim.x) {
            int row = i / CHUNKS, chunk = i % CHUNKS, head, token;
            bool present = row < tile.rows;
            tile.find_row(params, present ? row : 0, head, token);
            const Bits *from = (const Bits *)params.query.pointer + tile.sequence * params.query.strides.batch +
                               (long long)(tile.seq.q_start + token) * params.query.strides.token +
                               head * params.query.strides.head + chunk * 8;
            st_shared_v4(to.chunk(row, chunk), present ? *(const uint4 *)from : make_uint4(0, 0, 0, 0));
        }
    }
#endif

    // Dot products become scores, in units of log2.
    __device__ __forceinline__ void scale_scores(float (&scores)[SUMS], const float (&key_scales)[2]) const {
#if READS_CODES
        softmax.scale(scores, key_scales, shared.query_scale, lane);
#else
        softmax.scale(scores, params.scale * LOG2_E);
#endif
    }

    // What multiplies the output.
    __device__ __forceinline__ float scale_of_values() const {
#if READS_CODES
        if (ValueSide::IS_BYTES && !softmax.values_scaled)
            return *scale_start(params, tile, cache.value_scales, cache.value_scale_strides);
#endif
        return 1.0f;
    }

    __device__ __forceinline__ void load_row_facts() const {
        for (int row = threadIdx.x; row < ROWS; row += blockDim.x) {
            RowFacts facts = {0, 0, 0, 0.0f, 0, 0, 0};
            if (row < tile.rows) {
                int head, token;
                tile.find_row(params, row, head, token);
                facts = row_facts<false>(params, tile, head, token);
            }
            shared.rows[row] = facts;
        }
    }

    // Mainloop over this group's K tiles of keys `key_start..key_end`.
    __device__ __forceinline__ void mainloop() {
        int first = first_key_tile + group, end = (key_end + KEYS - 1) / KEYS, step = params.stream_k.key_groups;
        if (params.block_size) last_entry = page_index(params, max(key_end - 1, 0));
        if (!is_scheduled(params)) grid_dependency_wait();
        int entries[RING_STAGES];
#pragma unroll
        for (int i = 0; i < RING_STAGES; i++) entries[i] = first + i * step < end ? look_up(first + i * step) : 0;
        if (is_scheduled(params)) grid_dependency_wait();
#pragma unroll
        for (int i = 0; i < RING_STAGES; i++) {
            if (first + i * step < end) fetch(first + i * step, i, entries[i]);
            cp_async_commit();
        }
        int entry = first + RING_STAGES * step < end ? look_up(first + RING_STAGES * step) : 0;
        load_queries();
        load_row_facts();
        value_scale = scale_of_values();
        int every_start = tile.every_start, every_end = tile.every_end; // at head dim 256, read again per K tile
        // wgmma reads the queries.
        hopper::fence_proxy_async();
        cp_async_wait<RING_STAGES - 1>();
        softmax.begin();
        if (warp == 0) softmax.begin_weights(lane);
        __syncthreads();
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < SUMS; i++) out[block][i] = 0.0f;

        SharedTile<ROWS> queries = {base + QUERY_OFFSET};
        int stage = 0, turn = 0;
        unsigned value_fragments[VALUE_BLOCKS][VALUE_STEPS][4];
        Products::Keys key_products;
        Products::Values value_products;
        key_products.set(tile.key_base, params.keys.strides.token * KeySide::BYTES, warp, lane);
        value_products.set(tile.value_base, params.values.strides.token * ValueSide::BYTES, warp, lane);
#pragma unroll 1
        for (int key_tile = first; key_tile < end; key_tile += step) {
            unsigned keys = ring + stage * STAGE_BYTES, values = keys + KEYS * KEY_PITCH;
            if (HAS_LARGE_HEADS) {
                hopper::wgmma_wait<0>();
#pragma unroll
                for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);
            }
            key_products.load(cache.key_format, keys, warp, lane);
            hopper::wgmma_wait<0>();
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);
            key_products.multiply(queries);
            float scores[SUMS], scales[2][2]; // scales: of this thread's keys, and of their values
            key_products.begin_scores(scores);
            bool any_scales = !value_products.load(cache.value_format, value_fragments, values, warp, lane);
            softmax.load_scales(scales, values + KEYS * VALUE_PITCH, warp, lane);
            key_products.finish_scores(scores);
            value_products.load_rest(cache.value_format, value_fragments, values, warp, lane);
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);

            int first_key = key_tile * KEYS + WARP_KEYS * warp;
            scale_scores(scores, scales[0]);
            if (HAS_LARGE_HEADS) every_start = tile.every_start, every_end = tile.every_end;
            if (first_key < every_start || first_key + WARP_KEYS > every_end)
                hide_invisible(scores, shared.rows, first_key, lane);
            unsigned probabilities = ring - 2 * PROBABILITY_BYTES + turn * PROBABILITY_BYTES;
            float sums[ROW_BLOCKS][2];
            bool exceeds = softmax.exponentiate(scores, scales[1], probabilities, sums, warp, lane) || any_scales;
            hopper::fence_proxy_async();
            // The next K tile has arrived.
            cp_async_wait<RING_STAGES - 2>();
            if (hopper::named_barrier_or(1 + group, 128, exceeds)) {
                unsigned exchange = base + EXCHANGE_OFFSET + group * 4 * ROWS * 4;
                softmax.raise(scores, scales[1], out, exchange, group, warp, lane);
                if (ValueSide::HAS_BLOCKS && hopper::named_barrier_or(1 + group, 128, any_scales)) {
                    value_products.add_any_scales(out, scores, softmax, values, probabilities, exchange, group, warp,
                                                  lane);
                    // Nothing is left for the products below.
#pragma unroll
                    for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
                        for (int i = 0; i < VALUE_STEPS; i++)
#pragma unroll
                            for (int word = 0; word < 4; word++) value_fragments[block][i][word] = 0;
                }
                softmax.exponentiate(scores, scales[1], probabilities, sums, warp, lane);
                hopper::fence_proxy_async();
                synchronize_group();
            }
            softmax.add(sums);
            // All warps have read this stage.
            int ahead = key_tile + RING_STAGES * step;
            if (ahead < end) fetch(ahead, stage, entry);
            cp_async_commit();
            if (ahead + step < end) entry = look_up(ahead + step);
            SharedTile<ROWS> weights = {probabilities};
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);
            hopper::wgmma_fence();
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
                for (int i = 0; i < VALUE_STEPS; i++)
                    multiply_operands(out[block], value_fragments[block][i], weights.k_major(i), 1);
            hopper::wgmma_commit();
            stage = stage == RING_STAGES - 1 ? 0 : stage + 1;
            turn ^= 1;
        }
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++) warpgroup_fence_operand(out[block]);
    }

    // Stores this group's state to shared memory, over the pipeline stages. All threads of the CTA call this.
    __device__ __forceinline__ void store_state(float *states) {
        float *exchange = (float *)(dynamic_shared + EXCHANGE_OFFSET) + group * 4 * ROWS;
        softmax.finish(out);
#pragma unroll
        for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = 8 * j + 2 * (lane & 3) + r;
                float sum = softmax.row_sum[j][r];
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                if (lane < 4) exchange[warp * ROWS + row] = sum;
                if (lane < 4 && warp == 0) shared.max[group][row] = softmax.max_of(j, r);
            }
        __syncthreads();
        if (warp == 0)
#pragma unroll 1
            for (int row = lane; row < ROWS; row += 32)
                shared.sum[group][row] =
                    exchange[row] + exchange[ROWS + row] + (exchange[2 * ROWS + row] + exchange[3 * ROWS + row]);
        float *mine = states + group * ROWS * OUT_PITCH;
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; block++)
#pragma unroll
            for (int j = 0; j < ROW_BLOCKS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = 8 * j + 2 * (lane & 3) + (e & 1);
                    mine[row * OUT_PITCH + Products::Values::dim_of(block, e, warp, lane)] =
                        out[block][4 * j + e] * softmax.out_scale(value_scale, row);
                }
    }
};

// Hands over a tile that is split over several CTAs: to `combine`, or to the last of the CTAs to arrive.
static __device__ __forceinline__ void finish_tile(Worker &w, long long work_per_cta, const TileRange &tile_range,
                                                   bool starts_here, bool ends_here) {
    const AttentionParameters &params = w.params;
    Shared &shared = w.shared;
    if (params.stream_k.partial_ranges && knows_partial_ranges(params)) {
        // `combine` combines the parts, and waits until all of them are counted.
        if (threadIdx.x == 0) {
            unsigned *counter = (unsigned *)params.workspace + divide(tile_range.start, work_per_cta);
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        }
    } else if (params.stream_k.partial_ranges) {
        // `combine` combines the parts when all CTAs are done.
        if (starts_here && threadIdx.x == 0) {
            partial_range_of(params, w.tile) = {
                (int)blockIdx.x, ends_here ? (int)blockIdx.x : (int)divide(tile_range.end - 1, work_per_cta)};
        }
    } else if (!starts_here || !ends_here) {
        // Other CTAs have the rest of this tile. The last to arrive combines all parts.
        long long first_cta = starts_here ? blockIdx.x : divide(tile_range.start, work_per_cta);
        long long last_cta = ends_here ? blockIdx.x : divide(tile_range.end - 1, work_per_cta);
        unsigned *counter = (unsigned *)params.workspace + first_cta;
        if (threadIdx.x == 0) {
            unsigned before;
            asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
            shared.last = before == (unsigned)(last_cta - first_cta);
        }
        __syncthreads();
        if (shared.last) {
            for (int row = threadIdx.x >> 5; row < w.tile.rows; row += blockDim.x >> 5)
                combine_row<STATES_PER_BATCH>(params, w.tile, row, w.lane, first_cta, last_cta,
                                              element_out_type(params));
            if (threadIdx.x == 0) *counter = 0;
        }
        __syncthreads();
    }
}

// The work range of this CTA: from the schedule of the step if there is one.
static __device__ __forceinline__ void find_range(const AttentionParameters &params, Shared &shared,
                                                  CtaRange &cta_range) {
    if (is_scheduled(params)) {
        load_scheduled(params, shared.scheduled);
        cta_range = shared.scheduled.range;
        if (params.block_size) touch_pages(params, shared.scheduled);
    } else {
        if (!params.stream_k.work_total) {
            grid_dependency_wait();
            prefetch_lengths(params);
        }
        cta_range = find_cta_range(params, shared.scan, shared.cta_range);
    }
}

// The rows of a tile, whose groups' states are in shared memory: stores them, or a partial state.
static __device__ __forceinline__ void store_rows(const Worker &w, const float *states, bool starts_here,
                                                  bool ends_here) {
    const AttentionParameters &params = w.params;
    int warps = blockDim.x >> 5;
    for (int first = threadIdx.x >> 5; first < w.tile.rows; first += ROWS_PER_BATCH * warps) {
        RowState combined[ROWS_PER_BATCH];
        combine_groups(params, combined, w.shared, states, first, warps, w.lane);
#pragma unroll
        for (int i = 0; i < ROWS_PER_BATCH; i++) {
            int row = first + i * warps;
            if (row >= w.tile.rows) break;
            if (starts_here && ends_here)
                store_row(params, w.tile, row, w.lane, combined[i], element_out_type(params));
            else
                store_partial(partial_state(params, blockIdx.x, starts_here ? 0 : 1), row, w.lane, combined[i]);
        }
    }
}

} // namespace decode_wgmma

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if READS_CODES
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ CacheParameters cache) {
#else
    decode(const __grid_constant__ AttentionParameters params) {
    const CacheParameters cache = {};
#endif
    using namespace decode_wgmma;
    Shared &shared = *(Shared *)dynamic_shared;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    unsigned base = shared_address(dynamic_shared);
    Worker w = {
        params, cache, shared, base, 0, (int)(threadIdx.x & 31), group, warp, *(Tile *)(dynamic_shared + TILE_OFFSET)};
    w.softmax.weight_powers = (float *)(dynamic_shared + WEIGHT_OFFSET) + group * ROWS;
    w.ring = w.base + GROUP_OFFSET + w.group * GROUP_BYTES + 2 * PROBABILITY_BYTES;
    float *states = (float *)(dynamic_shared + GROUP_OFFSET);
    touch_parameters(params);

    // Ranges are in shared memory during the mainloop, to save registers.
    const CtaRange &cta_range = shared.cta_range;
    const TileRange &tile_range = shared.tile_range;
    WorkCursor cursor;
    long long at;
    {
        CtaRange found;
        find_range(params, shared, found);
        cursor = found.cursor, at = found.begin;
        __syncthreads();
        if (threadIdx.x == 0) shared.cta_range = found;
        __syncthreads();
    }
#pragma unroll 1
    while (at < cta_range.end) {
        Tile tile;
        tile.sequence = cursor.sequence;
        if (is_scheduled(params) && cursor.sequence == shared.scheduled.range.cursor.sequence)
            tile.seq = shared.scheduled.sequence;
        else
            tile.seq = load_work(params, cursor.sequence);
        SequenceTiles tiles = sequence_tiles(params, tile.seq, cta_range.costs);
        if (at >= cursor.before + tiles.work(params)) {
            cursor = {cursor.sequence + 1, cursor.before + tiles.work(params)};
            if (!params.stream_k.work_total) cursor = find_sequence(params, cta_range.costs, cursor, at);
            if (cursor.sequence >= params.batch) break;
            continue;
        }
        int number = (int)divide(at - cursor.before, tiles.cost);
        TileRange here;
        here.start = cursor.before + number * tiles.cost;
        here.keys_start = here.start + cta_range.costs.start;
        here.end = here.start + tiles.cost;
        w.select_tile(tile, number, tiles);
        // Key units, counted from the first of the sequence.
        int unit = (int)max(at - here.keys_start, 0ll),
            last_unit = (int)max(min(cta_range.end, here.end) - here.keys_start, 0ll);
        if (threadIdx.x == 0) shared.tile_range = here;
        w.select_keys(tile, tiles.first_unit, unit, last_unit);
        __syncthreads();
        w.mainloop();
        cp_async_wait<0>();
        w.store_state(states);
        __syncthreads();
        bool starts_here = tile_range.start >= at, ends_here = tile_range.end <= cta_range.end;
        store_rows(w, states, starts_here, ends_here);
        at = min(cta_range.end, tile_range.end);
        __syncthreads();
        finish_tile(w, cta_range.work_per_cta, tile_range, starts_here, ends_here);
    }
    // A CTA without work ends after the preceding kernel too: a kernel that waits for this one waits for both.
    if (is_scheduled(params)) grid_dependency_wait();
}

// The schedule of a step: the range that each CTA of `decode`, of the same grid, would compute by itself.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    schedule_ctas(const __grid_constant__ AttentionParameters params) {
    write_schedule(params);
}

// Combines the parts of tiles that `decode` split over several CTAs. A CTA takes eight rows, a warp each; the grid is
// all possible tiles by TILE_ROWS / 8.
extern "C" __global__ void __launch_bounds__(256) combine(const __grid_constant__ AttentionParameters params) {
    launch_dependents();
    SplitTile split = begin_combine(params, blockIdx.x, blockIdx.y * 8);
    int row = blockIdx.y * 8 + threadIdx.x / 32;
    if (row < split.rows && split.is_split())
        combine_row<2 * STATES_PER_BATCH>(params, split.tile, row, threadIdx.x & 31, split.parts.first,
                                          split.parts.last, element_out_type(params));
    end_combine(params, split);
}
