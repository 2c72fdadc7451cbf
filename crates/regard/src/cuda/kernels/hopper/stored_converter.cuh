// Hopper prefill over a cache in any formats: rows come to shared memory as they are stored, and a converter warpgroup
// turns them into the swizzled 16-bit tiles that wgmma reads. TMA copies the rows if it can address them, by one of two
// producer warps; else the converter does by cp.async, from the addresses that these warps find.
//
// Keys become their codes, exactly; scales join scores, one for each block of 32 head dims. Values become products of
// code and scale, rounded to the tile's type, as probabilities are.
#pragma once
#include "common/copy.cuh"
#include "common/formats.cuh"
#include "common/paging.cuh"
#include "common/stored_format.cuh"
#include "hopper/prefill_sm90_loader.cuh"

#if CACHE == 4 // Any: see IS_STORED
static_assert(ElementType(ELEMENT_TYPE) == ElementType::BF16, "f16 does not hold all products of codes and scales");

// Eight codes become the pairs of bf16 (0, 1) to (6, 7), exactly.
template <CacheFormat FORMAT>
static __device__ __forceinline__ uint4 widen_eight(const unsigned (&words)[2], int nibble_shift) {
    uint4 pairs;
    if constexpr (FORMAT == CacheFormat::Q4_0) {
        // A nibble is the mantissa of a bf16 from 128 on: code + 136.
        unsigned lower = words[0] >> nibble_shift & 0x0f0f0f0f, upper = words[1] >> nibble_shift & 0x0f0f0f0f;
        auto code = [](unsigned biased) { return fma_bf16x2(biased, 0x3f803f80, 0xc308c308); };
        pairs.x = code(__byte_perm(lower, 0x43, 0x4140));
        pairs.y = code(__byte_perm(lower, 0x43, 0x4342));
        pairs.z = code(__byte_perm(upper, 0x43, 0x4140));
        pairs.w = code(__byte_perm(upper, 0x43, 0x4342));
    } else {
        constexpr CacheFormat CODES = FORMAT == CacheFormat::Q8_0 ? CacheFormat::I8 : FORMAT;
        widen_codes<ElementType::BF16, CODES>(words[0], pairs.x, pairs.y);
        widen_codes<ElementType::BF16, CODES>(words[1], pairs.z, pairs.w);
    }
    return pairs;
}

// Multiplies pairs of codes by a scale. The product is rounded once; an error of at most 2^-17 of it comes before.
static __device__ __forceinline__ uint4 scale_eight(uint4 pairs, float scale) {
    float rest = scale - __uint_as_float(__float_as_uint(scale) & 0xffff0000);
    unsigned high = __byte_perm(__float_as_uint(scale), 0, 0x3232), low = E::pack(rest, rest);
    auto product = [&](unsigned codes) { return fma_bf16x2(codes, high, mul_bf16x2(codes, low)); };
    return make_uint4(product(pairs.x), product(pairs.y), product(pairs.z), product(pairs.w));
}

// Eight elements of each block of 32 of a row, as they are stored: a quarter of the blocks. MAPPED: rows start at
// multiples of 16 bytes, or of 4 if they are of blocks.
template <CacheFormat FORMAT, bool MAPPED, int BLOCK_COUNT> struct StoredEights {
    static constexpr bool IS_BLOCK = has_blocks(FORMAT), IS_FLOAT = FORMAT == CacheFormat::BF16;
    static constexpr int BLOCKS_PER_ROW = BLOCK_COUNT, WORDS = IS_FLOAT ? 4 : 2;
    static constexpr int BLOCK_BYTES = FORMAT == CacheFormat::Q8_0   ? 34
                                       : FORMAT == CacheFormat::Q4_0 ? 18
                                                                     : BLOCK * (IS_FLOAT ? 2 : 1);
    static constexpr int FIRST = IS_BLOCK ? 2 : 0; // the first code of a block, behind its scale
    unsigned words[BLOCK_COUNT][WORDS + 1], shift;
    unsigned short halves[BLOCK_COUNT]; // scales of blocks
    float factor;                       // the scale of codes

    // Whether the words of a block start within words of shared memory.
    static constexpr bool is_split(int block) { return !MAPPED || (block * BLOCK_BYTES + FIRST) % 4 != 0; }

    // `row`: its address in shared memory.
    __device__ __forceinline__ void load(unsigned row, int quarter) {
        unsigned mine = row + (FORMAT == CacheFormat::Q4_0 ? quarter % 2 * 8 : quarter * 8 * (IS_FLOAT ? 2 : 1));
        shift = MAPPED ? 0 : mine * 8;
#pragma unroll
        for (int b = 0; b < BLOCK_COUNT; b++) {
            int at = b * BLOCK_BYTES + FIRST;
            if (IS_BLOCK) halves[b] = ld_shared_half(row + b * BLOCK_BYTES);
            if (is_split(b)) {
                unsigned from = MAPPED ? mine + (at & ~3) : (mine + at) & ~3u;
#pragma unroll
                for (int w = 0; w < WORDS + 1; w++) words[b][w] = ld_shared_word(from + 4 * w);
            } else if constexpr (IS_FLOAT) {
                uint4 all = ld_shared_v4(mine + at);
                words[b][0] = all.x, words[b][1] = all.y, words[b][2] = all.z, words[b][3] = all.w;
            } else if (!IS_BLOCK) {
                uint2 both = ld_shared_v2(mine + at);
                words[b][0] = both.x, words[b][1] = both.y;
            } else {
                words[b][0] = ld_shared_word(mine + at);
                words[b][1] = ld_shared_word(mine + at + 4);
            }
        }
    }

    __device__ __forceinline__ float scale(int block) const {
        if (IS_BLOCK) return Element<ElementType::F16>::to_float(halves[block]);
        return has_scales(FORMAT) ? factor : 1.0f;
    }

    // The elements of a block as pairs of bf16, without scales.
    __device__ __forceinline__ uint4 pairs(int block, int quarter) const {
        unsigned aligned[WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            unsigned bits = shift + (block * BLOCK_BYTES + FIRST) * 8; // of which the lower 5 count
            aligned[w] =
                is_split(block) ? __funnelshift_r(words[block][w], words[block][w + 1], bits) : words[block][w];
        }
        if constexpr (IS_FLOAT) {
            return make_uint4(aligned[0], aligned[1], aligned[2], aligned[3]);
        } else {
            return widen_eight<FORMAT>(aligned, FORMAT == CacheFormat::Q4_0 ? quarter / 2 * 4 : 0);
        }
    }
};

// How rows of keys, or of values, are in shared memory as they are stored. Bytes keep their places within 16: rows
// start up to 15 bytes behind a multiple of it.
template <bool IS_KEYS> struct StoredRows {
    int bytes, pitch; // of a row in memory, and from row to row in shared memory

    // `mapped`: TMA copies them. Only those of blocks then start elsewhere than at multiples of 16, as heads do.
    __device__ __forceinline__ StoredRows(const AttentionParameters &params, CacheFormat format, bool mapped) {
        constexpr int DIM = IS_KEYS ? HEAD_DIM : VALUE_DIM;
        bytes = (has_blocks(format) ? DIM / BLOCK : DIM) * stored_bytes(format);
        int furthest = 15;
        if (mapped) {
            int heads = params.kv_heads == 1 ? 16 : head_bytes(params, format);
            furthest = has_blocks(format) ? 16 - min(heads & -heads, 16) : 0;
        }
        pitch = (bytes + furthest + 15) & ~15;
    }
    // From head to head, which is less than 2^31 where TMA copies rows.
    static __device__ __forceinline__ int head_bytes(const AttentionParameters &params, CacheFormat format) {
        return (int)(IS_KEYS ? params.keys : params.values).strides.head * stored_bytes(format);
    }
    static __device__ __forceinline__ unsigned start(unsigned base, int stage) {
        return base + STORED_OFFSET + stage * STORED_BYTES + (IS_KEYS ? 0 : STORED_KEY_BYTES);
    }
    static __device__ __forceinline__ unsigned note(unsigned base, int stage, int row) {
        return base + NOTES_OFFSET + stage * NOTE_BYTES + (row + (IS_KEYS ? 0 : KEYS)) * (int)sizeof(RowNote);
    }
};

// The producer warp of keys, or of values: finds the rows of each K tile, and has TMA copy them if it can.
template <bool IS_KEYS> struct StoredProducer {
    static constexpr int MINE = KEYS / 32; // rows of a lane
    const AttentionParameters &params;
    const PrefillParameters &prefill;
    const CacheParameters &cache;
    const TensorMap &map;
    Shared &shared;
    unsigned base;
    int lane;

    struct Places {
        KeyPlace each[MINE];
        KeyPlace box;
    };

    __device__ __forceinline__ CacheFormat format() const { return IS_KEYS ? cache.key_format : cache.value_format; }
    __device__ __forceinline__ const KvTensor &tensor() const { return IS_KEYS ? params.keys : params.values; }
    __device__ __forceinline__ bool is_mapped() const { return prefill.box_keys > 0; }
    // Whether each row has to be found.
    __device__ __forceinline__ bool finds_rows() const {
        return !is_mapped() || (IS_KEYS ? cache.key_scales : cache.value_scales);
    }

    // The places of a K tile's rows. In place of keys that no row of the tile sees, whose pages may not exist, the
    // nearest one that some row sees: its probability will be 0.
    __device__ __forceinline__ Places find(const PrefillTile &tile, int key_tile) const {
        Places places = {};
        if (is_mapped()) places.box = find_box(params, prefill, tile, key_tile, lane);
        if (!finds_rows()) return places;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            int key = clamp_int(key_tile * KEYS + 32 * i + lane, tile.any_start, tile.any_end - 1);
            if (params.block_size)
                find_paged_place(params, tile, key, places.each[i]);
            else
                places.each[i] = contiguous_place(params, tile, key);
        }
        return places;
    }

    // Notes the addresses of rows that TMA does not copy, and the scales of all.
    __device__ __forceinline__ void note_rows(const PrefillTile &tile, const Places &places, int stage) const {
        const RowStrides &scale_strides = IS_KEYS ? cache.key_scale_strides : cache.value_scale_strides;
        const float *scales = (const float *)(IS_KEYS ? cache.key_scales : cache.value_scales);
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            KeyPlace place = places.each[i];
            if (params.block_size) place.batch = page_of(params, place.batch);
            auto offset = [&](const RowStrides &strides) {
                return place.batch * strides.batch + place.token * strides.token + tile.kv_head * strides.head;
            };
            unsigned long long address = 0;
            if (!is_mapped()) address = tensor().pointer + offset(tensor().strides) * stored_bytes(format());
            unsigned note = StoredRows<IS_KEYS>::note(base, stage, 32 * i + lane);
            asm volatile("st.shared.b64 [%0], %1;" ::"r"(note), "l"(address) : "memory");
            if (scales)
                cp_async_word(note + 8, scales + offset(scale_strides), true);
            else
                st_shared_word(note + 8, __float_as_uint(1.0f));
        }
    }

    // Starts the TMA copies of a K tile. Returns their bytes to lane 0.
    __device__ __forceinline__ int copy(const PrefillTile &tile, int key_tile, KeyPlace box, int stage) const {
        StoredRows<IS_KEYS> rows(params, format(), true);
        unsigned full = shared_address(&shared.stored.full[stage]), to = rows.start(base, stage);
        // Rows of all heads of a token are one row to TMA, of bytes. A box begins at a multiple of 16.
        int first_byte = tile.kv_head * rows.head_bytes(params, format());
        if (lane == 0) shared.stored.shifts[!IS_KEYS][stage] = first_byte & 15;
        first_byte &= ~15;
        if (!params.block_size) {
            if (lane == 0)
                hopper::tma_load(
                    to, map, full,
                    {first_byte, 0, tile.seq.kv_start + key_tile * KEYS, params.cu_seqlens_k ? 0 : tile.sequence});
            return KEYS * rows.pitch;
        }
        unsigned boxes = __ballot_sync(~0u, box.token >= 0);
        if (box.token >= 0)
            hopper::tma_load(to + lane * prefill.box_keys * rows.pitch, map, full,
                             {first_byte, 0, box.token, page_of(params, box.batch)});
        return __popc(boxes) * prefill.box_keys * rows.pitch;
    }

    // Arrives at a stage, which is full when `bytes` have come.
    __device__ __forceinline__ void arrive(int stage, int bytes) const {
        unsigned full = shared_address(&shared.stored.full[stage]);
        hopper::mbarrier_arrive_copies(full);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive_expect_tx(full, bytes);
    }

    __device__ __forceinline__ void run() {
        PipelineState<STORED_STAGES> stage;
        StoredStages &stored = shared.stored;
        for_each_tile(shared.queue, lane, [&](const TileDescriptor &descriptor) {
            const PrefillTile &tile = descriptor.tile;
            KeyTileOrder order(prefill, descriptor);
            Places places = find(tile, order.current);
#pragma unroll 1
            while (!order.is_done()) {
                order.find_following(lane);
                Places following = find(tile, order.following);
                int flags = order.stage_flags();
                if (IS_KEYS && order.is_last() && lane == 0) shared.queue.request();
                hopper::mbarrier_wait(shared_address(&stored.empty[stage.index]), stage.phase ^ 1);
                int bytes = is_mapped() ? copy(tile, order.current, places.box, stage.index) : 0;
                if (finds_rows()) note_rows(tile, places, stage.index);
                if (IS_KEYS && lane == 0) {
                    stored.flags[stage.index] = flags;
                    stored.starts[stage.index] = tile.any_start - order.current * KEYS;
                    stored.ends[stage.index] = tile.any_end - order.current * KEYS;
                }
                arrive(stage.index, bytes);
                stage.advance();
                order.current = order.following;
                places = following;
            }
        });
        hopper::mbarrier_wait(shared_address(&stored.empty[stage.index]), stage.phase ^ 1);
        if (IS_KEYS && lane == 0) stored.flags[stage.index] = StoredStages::NO_KEY_TILE;
        arrive(stage.index, 0);
    }
};

// The converter warpgroup: alternates between the keys and the values of each K tile. Four threads share a row: each
// converts a quarter of every block of 32 dims. They also copy the row, if TMA does not, so that no other warp has to
// be waited for.
struct StoredConverter {
    static constexpr int ROWS = 128 / 4, MINE = KEYS / ROWS; // rows at once, and of a thread
    const AttentionParameters &params;
    const CacheParameters &cache;
    Shared &shared;
    unsigned base;
    int thread; // of the warpgroup

    PipelineState<STAGES> stage;
    PipelineState<STORED_STAGES> stored;

    __device__ __forceinline__ int quarter() const { return thread % 4; }
    // A thread's first row. Eight threads have rows 4 apart, so that their stores reach all banks.
    __device__ __forceinline__ int first_row() const { return thread / 32 * 8 + thread % 32 / 8 + thread / 4 % 2 * 4; }

    // Starts the copies of this thread's rows of a side. 16 bytes that a row shares with its neighbours are copied
    // whole.
    template <bool IS_KEYS> __device__ __forceinline__ void copy_side(int stage) const {
        StoredRows<IS_KEYS> rows(params, IS_KEYS ? cache.key_format : cache.value_format, false);
        unsigned to = rows.start(base, stage) + first_row() * rows.pitch + quarter() * 16;
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            uint4 note = ld_shared_v4(rows.note(base, stage, first_row() + i * ROWS));
            int left = (note.x & 15) + rows.bytes - quarter() * 16;
            const unsigned char *from =
                (const unsigned char *)((unsigned long long)note.y << 32 | (note.x & ~15u)) + quarter() * 16;
#pragma unroll
            for (int at = 0; at < 2 * (IS_KEYS ? HEAD_DIM : VALUE_DIM) + 16; at += 64)
                if (at < left) cp_async_sectors(to + i * ROWS * rows.pitch + at, from + at, 16);
        }
    }

    // Waits for the notes of a K tile, and starts its copies; false if there is none.
    __device__ __forceinline__ bool copy(const PipelineState<STORED_STAGES> &noted) const {
        bool there = wait(noted);
        if (there) {
            copy_side<true>(noted.index);
            copy_side<false>(noted.index);
        }
        cp_async_commit();
        return there;
    }

    // Waits for the notes of a K tile, and for what TMA copies; false if there is none.
    __device__ __forceinline__ bool wait(const PipelineState<STORED_STAGES> &noted) const {
        hopper::mbarrier_wait(shared_address(&shared.stored.full[noted.index]), noted.phase);
        return shared.stored.flags[noted.index] != StoredStages::NO_KEY_TILE;
    }

    // Converts this thread's rows of a side. MAPPED: TMA copied them.
    template <bool IS_KEYS, bool MAPPED, CacheFormat FORMAT>
    __device__ __forceinline__ void convert_rows(SharedTile<KEYS> to, unsigned scales) const {
        typedef StoredEights<FORMAT, MAPPED, (IS_KEYS ? HEAD_DIM : VALUE_DIM) / BLOCK> Eights;
        constexpr int AT_ONCE = FORMAT == CacheFormat::BF16 ? 1 : MINE; // rows, as registers allow
        StoredRows<IS_KEYS> rows(params, FORMAT, MAPPED);
        unsigned shift = MAPPED && Eights::IS_BLOCK ? shared.stored.shifts[!IS_KEYS][stored.index] : 0;
        unsigned start = shift + rows.start(base, stored.index) + first_row() * rows.pitch;
#pragma unroll
        for (int first = 0; first < MINE; first += AT_ONCE) {
            Eights eights[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++) {
                int i = first + n;
                uint4 note = {};
                if (!MAPPED || has_scales(FORMAT))
                    note = ld_shared_v4(rows.note(base, stored.index, first_row() + i * ROWS));
                eights[n].load(start + i * ROWS * rows.pitch + (MAPPED ? 0 : note.x & 15), quarter());
                eights[n].factor = __uint_as_float(note.z);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
                for (int b = 0; b < Eights::BLOCKS_PER_ROW; b++) {
                    int row = first_row() + (first + n) * ROWS;
                    float scale = eights[n].scale(b);
                    uint4 pairs = eights[n].pairs(b, quarter());
                    if (!IS_KEYS && FORMAT != CacheFormat::BF16) pairs = scale_eight(pairs, scale);
                    st_shared_v4(to.chunk(row, b * 4 + quarter()), pairs);
                    if (IS_KEYS && quarter() == 0)
                        st_shared_word(scales + (b * KEYS + scale_place(row)) * 4, __float_as_uint(scale));
                }
        }
    }

    template <bool IS_KEYS, bool MAPPED>
    __device__ __forceinline__ void convert_side(SharedTile<KEYS> to, unsigned scales) const {
        CacheFormat format = IS_KEYS ? cache.key_format : cache.value_format;
        if (format == CacheFormat::E4M3) {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::E4M3>(to, scales);
        } else if (format == CacheFormat::E5M2) {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::E5M2>(to, scales);
        } else if (format == CacheFormat::I8) {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::I8>(to, scales);
        } else if (format == CacheFormat::Q8_0) {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::Q8_0>(to, scales);
        } else if (format == CacheFormat::Q4_0) {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::Q4_0>(to, scales);
        } else {
            convert_rows<IS_KEYS, MAPPED, CacheFormat::BF16>(to, scales);
        }
    }

    // Zeros in place of values that no row of the tile sees: TMA brings what is there, and 0 * NaN = NaN.
    __device__ __forceinline__ void clear_invisible(SharedTile<KEYS> values) const {
        int start = shared.stored.starts[stored.index], end = shared.stored.ends[stored.index];
        if (start <= 0 && end >= KEYS) return;
#pragma unroll 1
        for (int row = first_row(); row < KEYS; row += ROWS)
            if (row < start || row >= end)
#pragma unroll 1
                for (int b = 0; b < VALUE_DIM / BLOCK; b++)
                    st_shared_v4(values.chunk(row, b * 4 + quarter()), make_uint4(0, 0, 0, 0));
    }

    // Makes this warp's stores visible to wgmma, and hands the tile over.
    __device__ __forceinline__ void hand_over(unsigned long long &full) const {
        hopper::fence_proxy_async();
        __syncwarp();
        if (thread % 32 == 0) hopper::mbarrier_arrive(shared_address(&full));
    }

    template <bool MAPPED> __device__ __forceinline__ void convert() const {
        hopper::mbarrier_wait(shared_address(&shared.key_empty[stage.index]), stage.phase ^ 1);
        if (thread == 0) shared.stage_flags[stage.index] = shared.stored.flags[stored.index];
        convert_side<true, MAPPED>({base + KEY_OFFSET + stage.index * KEY_BYTES},
                                   base + SCALES_OFFSET + stage.index * BLOCKS * KEYS * 4);
        hand_over(shared.key_full[stage.index]);
        SharedTile<KEYS> values = {base + VALUE_OFFSET + stage.index * VALUE_BYTES};
        hopper::mbarrier_wait(shared_address(&shared.value_empty[stage.index]), stage.phase ^ 1);
        convert_side<false, MAPPED>(values, 0);
        if (MAPPED) clear_invisible(values);
        hand_over(shared.value_full[stage.index]);
        if (thread % 32 == 0) hopper::mbarrier_arrive(shared_address(&shared.stored.empty[stored.index]));
    }

    __device__ __forceinline__ void run(bool mapped) {
        bool there = mapped ? wait(stored) : copy(stored);
#pragma unroll 1
        while (there) {
            PipelineState<STORED_STAGES> next = stored;
            next.advance();
            if (mapped) {
                convert<true>();
                there = wait(next);
            } else {
                there = copy(next);
                cp_async_wait<1>();
                __syncwarp();
                convert<false>();
            }
            stored = next;
            stage.advance();
        }
    }
};
#endif
