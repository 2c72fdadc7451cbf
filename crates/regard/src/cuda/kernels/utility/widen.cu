// Copies keys and values into tensors of the queries' type, for the prefill kernels over elements. Codes are exact
// there. Scales that heads share come later. Other scales of keys are copied beside them, and multiply scores. Values
// with other scales, in blocks, or of another type are rounded, as probabilities are. Keys in blocks or of another type
// become two or three elements each: a rounded one, and what rounding took. Only keys that some row sees are copied,
// and pages become contiguous. A CTA per block of keys of a sequence, or of its values.
//
// What is not exact is rounded to f16 as a multiple of a power of two, because f16 has a small range: `widen_units`
// finds one for the keys of each sequence and head, and one for the values.
#include "common/arrival.cuh"
#include "common/formats.cuh"
#include "common/grid_dependency.cuh"
#include "common/paging.cuh"
#include "common/stored_format.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int KEYS_PER_WARP = 4, BLOCK_KEYS = WARPS * KEYS_PER_WARP;
constexpr int CHUNK = 8;           // dims that a thread takes at a time: 16 bytes of the copy
constexpr int UNIT_THREADS = 1024; // 32 warps, because one warp reduces their results

// The rows of a sequence, for common/paging.cuh.
struct Rows {
    int sequence;
    SequenceInfo seq;
};

// Keys, or values: what is copied and where.
struct Side {
    bool of_keys;
    KvTensor from, to;
    CacheFormat format;
    int dims;
    unsigned long long scales; // 0 if there are none, or blocks have them
    RowStrides scale_strides;

    // Field by field, so that they stay in registers.
    __device__ __forceinline__ Side(const AttentionParameters &params, const WidenParameters &widening,
                                    const CacheParameters &cache, bool of_keys)
        : of_keys(of_keys) {
        from = of_keys ? params.keys : params.values;
        to = of_keys ? widening.keys : widening.values;
        format = of_keys ? cache.key_format : cache.value_format;
        dims = of_keys ? params.head_dim : params.value_dim;
        scales = of_keys ? cache.key_scales : cache.value_scales;
        scale_strides = of_keys ? cache.key_scale_strides : cache.value_scale_strides;
    }
};

static __device__ __forceinline__ long long token_offset(const RowStrides &strides, const KeyPlace &place) {
    return place.batch * strides.batch + place.token * strides.token;
}

// `count` bytes from any address; zeros follow.
static __device__ __forceinline__ uint4 load_bytes(const unsigned char *from, int count) {
    unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (i < count) words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// How keys, or values, are stored.
enum class Storage { Codes, Elements, Floats, Blocks }; // elements of 16 bits, floats of 32

static __device__ __forceinline__ Storage storage_of(CacheFormat format) {
    if (has_blocks(format)) return Storage::Blocks;
    if (has_scales(format)) return Storage::Codes;
    return format == CacheFormat::F32 ? Storage::Floats : Storage::Elements;
}

// Eight dims of a row as they are stored: codes in 8 bytes, elements in 16, floats in 32; of blocks, as codes of i8.
template <Storage STORAGE> struct Chunk8 {
    uint4 words[STORAGE == Storage::Floats ? 2 : 1];
};

// `dims`: from there to the row's end. ALIGNED: whole, and from a multiple of 16 bytes.
template <Storage STORAGE, bool ALIGNED>
static __device__ __forceinline__ Chunk8<STORAGE> load_chunk(const unsigned char *from, int dims) {
    Chunk8<STORAGE> chunk;
    constexpr int ITEM_BYTES = STORAGE == Storage::Codes ? 1 : STORAGE == Storage::Elements ? 2 : 4;
    int bytes = min(dims, CHUNK) * ITEM_BYTES;
    if constexpr (!ALIGNED) {
        chunk.words[0] = load_bytes(from, bytes);
        if constexpr (STORAGE == Storage::Floats) chunk.words[1] = load_bytes(from + 16, bytes - 16);
    } else if constexpr (STORAGE == Storage::Codes) {
        uint2 codes = *(const uint2 *)from;
        chunk.words[0] = make_uint4(codes.x, codes.y, 0, 0);
    } else {
        chunk.words[0] = *(const uint4 *)from;
        if constexpr (STORAGE == Storage::Floats) chunk.words[1] = *(const uint4 *)(from + 16);
    }
    return chunk;
}

static __device__ __forceinline__ float scale_of_block(const unsigned char *block) {
    return Element<ElementType::F16>::to_float(*(const unsigned short *)block);
}

// Eight values of a block as codes of i8. Blocks start at multiples of 2 bytes.
static __device__ __forceinline__ uint4 load_block_chunk(const unsigned char *block, int dim, bool is_nibble) {
    const unsigned short *from = (const unsigned short *)(block + 2 + dim % (is_nibble ? 16 : 32));
    uint4 codes = make_uint4(from[0] | (unsigned)from[1] << 16, from[2] | (unsigned)from[3] << 16, 0, 0);
    auto extended = [&](unsigned word) {
        // n - 8, whose lowest four bits are n ^ 8.
        unsigned low = ((dim < 16 ? word : word >> 4) & 0x0f0f0f0f) ^ 0x08080808;
        return low | (low & 0x08080808) * 0x1e;
    };
    return is_nibble ? make_uint4(extended(codes.x), extended(codes.y), 0, 0) : codes;
}

template <ElementType TYPE, CacheFormat FORMAT> static __device__ __forceinline__ void widen(uint4 &chunk) {
    unsigned first = chunk.x, second = chunk.y;
    widen_codes<TYPE, FORMAT>(first, chunk.x, chunk.y);
    widen_codes<TYPE, FORMAT>(second, chunk.z, chunk.w);
}

template <ElementType TYPE> static __device__ __forceinline__ void widen(CacheFormat format, uint4 &chunk) {
    if (format == CacheFormat::E4M3)
        widen<TYPE, CacheFormat::E4M3>(chunk);
    else if (format == CacheFormat::E5M2)
        widen<TYPE, CacheFormat::E5M2>(chunk);
    else if (format >= CacheFormat::I8) // blocks too
        widen<TYPE, CacheFormat::I8>(chunk);
}

// The values of a chunk, times a scale.
template <Storage STORAGE> static __device__ __forceinline__ void to_floats(CacheFormat format, Chunk8<STORAGE> chunk,
                                                                            float scale, float (&values)[CHUNK]) {
    if constexpr (STORAGE == Storage::Floats) {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const uint4 &four = chunk.words[i / 4];
            values[i] = __uint_as_float(i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w);
        }
    } else {
        if (STORAGE != Storage::Elements) widen<ElementType::BF16>(format, chunk.words[0]);
        const unsigned pairs[4] = {chunk.words[0].x, chunk.words[0].y, chunk.words[0].z, chunk.words[0].w};
        bool is_half = STORAGE == Storage::Elements && format == CacheFormat::F16;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            unsigned short bits = (unsigned short)(pairs[i / 2] >> 16 * (i % 2));
            values[i] =
                is_half ? Element<ElementType::F16>::to_float(bits) : Element<ElementType::BF16>::to_float(bits);
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) values[i] *= scale;
}

// Eight values rounded, which are subtracted from them.
template <ElementType TYPE> static __device__ __forceinline__ uint4 round_off(float (&values)[CHUNK]) {
    typedef Element<TYPE> E;
    unsigned pairs[4];
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        if (i % 2 == 0) pairs[i / 2] = E::pack(values[i], values[i + 1]);
        float rounded = E::to_float((unsigned short)(pairs[i / 2] >> 16 * (i % 2)));
        values[i] = fabsf(rounded) < INF ? values[i] - rounded : 0.0f;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

static __device__ __forceinline__ uint4 round_off(ElementType type, float (&values)[CHUNK]) {
    return type == ElementType::F16 ? round_off<ElementType::F16>(values) : round_off<ElementType::BF16>(values);
}

// How often elements are rounded: copies are exact; or one element; or two or three that add up, in different heads:
// each is what rounding those before it took.
enum class Rounding { None, Once, Twice, Thrice };

// The inverse of the unit of a head's keys, or values.
static __device__ __forceinline__ float inverse_unit(const AttentionParameters &params, const WidenParameters &widening,
                                                     bool of_keys, int sequence, int head) {
    if (!widening.units) return 1.0f;
    int side = of_keys ? 0 : 1;
    float unit = ((const float *)widening.units)[(side * params.batch + sequence) * params.kv_heads + head];
    return __uint_as_float((254u << 23) - __float_as_uint(unit));
}

// Where a key is stored.
static __device__ __forceinline__ KeyPlace stored_place(const AttentionParameters &params, const Rows &rows, int key) {
    KeyPlace place = contiguous_place(params, rows, key);
    if (params.block_size) {
        find_paged_place(params, rows, key, place);
        place.batch = page_of(params, place.batch);
    }
    return place;
}

// Copies the keys, or values, of a block that are in `start` to `end`.
template <Rounding ROUNDING, Storage STORAGE, bool ALIGNED>
static __device__ __forceinline__ void copy_rows(const AttentionParameters &params, const WidenParameters &widening,
                                                 const Rows &rows, const Side &side, ElementType type, int first,
                                                 int start, int end) {
    constexpr int AT_ONCE = !ALIGNED ? 1 : STORAGE == Storage::Floats ? 2 : 4; // keys of a warp
    constexpr bool EXACT = ROUNDING == Rounding::None, IS_SCALED = !EXACT && STORAGE == Storage::Codes;
    constexpr int TERMS = EXACT ? 1 : (int)ROUNDING;
    int item_bytes = stored_bytes(side.format), lane = threadIdx.x % 32;
    int per_head = (side.dims + CHUNK - 1) / CHUNK, chunks = per_head * params.kv_heads;
    bool is_nibble = side.format == CacheFormat::Q4_0;
#pragma unroll 1
    for (int group = 0; group < KEYS_PER_WARP; group += AT_ONCE) {
        int key = first + threadIdx.x / 32 + WARPS * group;
        unsigned short *to =
            (unsigned short *)side.to.pointer + token_offset(side.to.strides, contiguous_place(params, rows, key));
        const unsigned char *from[AT_ONCE];
        const float *scales[IS_SCALED ? AT_ONCE : 1];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            // Without branches around loads: keys that are not copied load what others do.
            KeyPlace place = stored_place(params, rows, clamp_int(key + WARPS * i, start, end - 1));
            from[i] = (const unsigned char *)side.from.pointer + token_offset(side.from.strides, place) * item_bytes;
            if constexpr (IS_SCALED) scales[i] = (const float *)side.scales + token_offset(side.scale_strides, place);
        }
#pragma unroll 1
        for (int at = lane; at < chunks; at += 32) {
            int head = at / per_head, dim = (at - head * per_head) * CHUNK;
            int item = STORAGE == Storage::Blocks ? dim / 32 : dim;
            long long source = (head * side.from.strides.head + item) * item_bytes;
            Chunk8<STORAGE> loaded[AT_ONCE];
            float scale[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                scale[i] = 1.0f;
                if constexpr (STORAGE == Storage::Blocks) {
                    loaded[i].words[0] = load_block_chunk(from[i] + source, dim % 32, is_nibble);
                    scale[i] = scale_of_block(from[i] + source);
                } else {
                    loaded[i] = load_chunk<STORAGE, ALIGNED>(from[i] + source, side.dims - dim);
                    if constexpr (IS_SCALED) scale[i] = scales[i][head * side.scale_strides.head];
                }
            }
            float factor = EXACT ? 1.0f : inverse_unit(params, widening, side.of_keys, rows.sequence, head);
            long long target = head * TERMS * side.to.strides.head + dim;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                if (key + WARPS * i < start || key + WARPS * i >= end) continue;
                unsigned short *copy = to + WARPS * i * side.to.strides.token + target; // rows of it are whole chunks
                if constexpr (EXACT) {
                    uint4 &chunk = loaded[i].words[0];
                    if (type == ElementType::F16)
                        widen<ElementType::F16>(side.format, chunk);
                    else
                        widen<ElementType::BF16>(side.format, chunk);
                    *(uint4 *)copy = chunk;
                } else {
                    float values[CHUNK];
                    to_floats(side.format, loaded[i], scale[i] * factor, values);
#pragma unroll
                    for (int term = 0; term < TERMS; term++)
                        *(uint4 *)(copy + term * side.to.strides.head) = round_off(type, values);
                }
            }
        }
    }
}

// What of a side is known at run time.
template <Storage STORAGE, bool ALIGNED> struct Form {
    static constexpr Storage storage = STORAGE;
    static constexpr bool aligned = ALIGNED;
};

// Calls `f` with the form of a side.
template <class F>
static __device__ __forceinline__ void with_form(const WidenParameters &widening, const Side &side, F f) {
    Storage storage = storage_of(side.format);
    bool aligned = widening.aligned && side.dims % CHUNK == 0;
    if (storage == Storage::Blocks)
        f(Form<Storage::Blocks, true>());
    else if (storage == Storage::Codes)
        aligned ? f(Form<Storage::Codes, true>()) : f(Form<Storage::Codes, false>());
    else if (storage == Storage::Elements)
        aligned ? f(Form<Storage::Elements, true>()) : f(Form<Storage::Elements, false>());
    else
        aligned ? f(Form<Storage::Floats, true>()) : f(Form<Storage::Floats, false>());
}

// Copies the scales of keys.
static __device__ __forceinline__ void copy_scales(const AttentionParameters &params, const Rows &rows,
                                                   const CacheParameters &cache, const KeyScales &to, int start,
                                                   int end) {
    for (int i = threadIdx.x; i < (end - start) * params.kv_heads; i += THREADS) {
        int key = start + i / params.kv_heads, head = i % params.kv_heads;
        KeyPlace place = stored_place(params, rows, key);
        const float *from = (const float *)cache.key_scales + token_offset(cache.key_scale_strides, place);
        ((float *)to.pointer)[((long long)rows.sequence * params.kv_heads + head) * to.stride + key] =
            from[head * cache.key_scale_strides.head];
    }
}

// Copies a block of keys, or of values. ROUNDS: some of them may be rounded.
template <bool ROUNDS> static __device__ __forceinline__ void
copy_block(const AttentionParameters &params, const WidenParameters &widening, const CacheParameters &cache) {
    grid_dependency_wait();
    Rows rows;
    // From the last sequence to the first, because prefill begins with the first: L2 holds what was copied last.
    int number = gridDim.x - 1 - blockIdx.x, block = number / 2;
    rows.sequence = block / widening.key_blocks;
    rows.seq = load_sequence(params, rows.sequence);
    const SequenceInfo &seq = rows.seq;
    if (seq.q_len < max(widening.min_query_len, 1)) return;
    int first = (block - rows.sequence * widening.key_blocks) * BLOCK_KEYS;
    int start = max(first, visible_start(params, seq, 0));
    int end = min(first + BLOCK_KEYS, visible_end(params, seq, seq.q_len - 1));
    if (start >= end) return;

    Side side(params, widening, cache, number % 2 == 0);
    ElementType type = cache.query_type;
    Rounding of_keys = widening.key_terms > 1 ? (Rounding)widening.key_terms : Rounding::None,
             of_values = widening.round_values ? Rounding::Once : Rounding::None;
    Rounding rounding = side.of_keys ? of_keys : of_values;
    with_form(widening, side, [&](auto form) {
        constexpr Storage STORAGE = form.storage;
        constexpr bool ALIGNED = form.aligned, CAN_BE_EXACT = STORAGE == Storage::Codes || STORAGE == Storage::Elements;
        if (ROUNDS && rounding == Rounding::Thrice)
            copy_rows<Rounding::Thrice, STORAGE, ALIGNED>(params, widening, rows, side, type, first, start, end);
        else if (ROUNDS && rounding == Rounding::Twice)
            copy_rows<Rounding::Twice, STORAGE, ALIGNED>(params, widening, rows, side, type, first, start, end);
        else if (ROUNDS && rounding == Rounding::Once)
            copy_rows<Rounding::Once, STORAGE, ALIGNED>(params, widening, rows, side, type, first, start, end);
        else if constexpr (CAN_BE_EXACT)
            copy_rows<Rounding::None, STORAGE, ALIGNED>(params, widening, rows, side, type, first, start, end);
    });
    if (side.of_keys && widening.each_key.pointer) copy_scales(params, rows, cache, widening.each_key, start, end);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    widen(const __grid_constant__ AttentionParameters params, const __grid_constant__ WidenParameters widening,
          const __grid_constant__ CacheParameters cache) {
    copy_block<false>(params, widening, cache);
}

// The same where some copies are rounded, for which threads need more registers.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    widen_rounded(const __grid_constant__ AttentionParameters params, const __grid_constant__ WidenParameters widening,
                  const __grid_constant__ CacheParameters cache) {
    copy_block<true>(params, widening, cache);
}

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// The largest magnitude that a code of a format can have.
static __device__ __forceinline__ float largest_code(CacheFormat format) {
    if (format == CacheFormat::E4M3) return 448.0f;
    if (format == CacheFormat::E5M2) return 57344.0f;
    return format == CacheFormat::Q4_0 ? 8.0f : 128.0f;
}

// No less than any magnitude of a thread's share of a head's keys, or values, from `start` to `end`.
template <Storage STORAGE, bool ALIGNED> static __device__ __forceinline__ float
largest_of_thread(const AttentionParameters &params, const Rows &rows, const Side &side, int head, int start, int end) {
    int item_bytes = stored_bytes(side.format);
    // Scales of codes and of blocks; of others, chunks.
    int per_key = STORAGE == Storage::Codes    ? 1
                  : STORAGE == Storage::Blocks ? side.dims / 32
                                               : (side.dims + CHUNK - 1) / CHUNK;
    int items = (end - start) * per_key;
    float largest = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < items; i += UNIT_THREADS) {
        int key = i / per_key, item = i - key * per_key;
        KeyPlace place = stored_place(params, rows, start + key);
        if constexpr (STORAGE == Storage::Codes) {
            const float *scales = (const float *)side.scales + token_offset(side.scale_strides, place);
            largest = fmaxf(largest, fabsf(scales[head * side.scale_strides.head]));
        } else {
            long long row = token_offset(side.from.strides, place) + head * side.from.strides.head;
            const unsigned char *from = (const unsigned char *)side.from.pointer + row * item_bytes;
            if constexpr (STORAGE == Storage::Blocks) {
                largest = fmaxf(largest, fabsf(scale_of_block(from + item * item_bytes)));
            } else {
                int dim = item * CHUNK;
                float values[CHUNK];
                to_floats(side.format, load_chunk<STORAGE, ALIGNED>(from + dim * item_bytes, side.dims - dim), 1.0f,
                          values);
#pragma unroll
                for (int j = 0; j < CHUNK; j++) largest = fmaxf(largest, fabsf(values[j]));
            }
        }
    }
    return STORAGE == Storage::Codes || STORAGE == Storage::Blocks ? largest * largest_code(side.format) : largest;
}

static __device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// The power of two of which a magnitude is 2^14 to 2^15 times. It and its inverse are normal numbers.
static __device__ __forceinline__ float unit_for(float largest) {
    int exponent = (int)(__float_as_uint(largest) >> 23) - 14;
    float unit = __uint_as_float((unsigned)min(max(exponent, 2), 252) << 23);
    return largest > 0.0f && largest < INF ? unit : 1.0f;
}

// Finds the powers of two that copies are multiples of. Blocks x: a sequence and head, of keys or of values; blocks y:
// some of its visible keys each. The last CTA reads what all have found.
extern "C" __global__ void __launch_bounds__(UNIT_THREADS)
    widen_units(const __grid_constant__ AttentionParameters params, const __grid_constant__ WidenParameters widening,
                const __grid_constant__ CacheParameters cache) {
    float *warps = (float *)dynamic_shared;
    grid_dependency_wait();
    int pair = blockIdx.x / params.kv_heads, head = blockIdx.x - pair * params.kv_heads, thread = threadIdx.x;
    bool of_keys = pair < params.batch, is_rounded = of_keys ? widening.key_terms > 1 : widening.round_values;
    Rows rows;
    rows.sequence = pair - (of_keys ? 0 : params.batch);
    rows.seq = load_sequence(params, rows.sequence);
    float largest = 0.0f;
    if (is_rounded && rows.seq.q_len >= max(widening.min_query_len, 1)) {
        int start = visible_start(params, rows.seq, 0), end = visible_end(params, rows.seq, rows.seq.q_len - 1);
        int share = (end - start + gridDim.y - 1) / gridDim.y;
        start += blockIdx.y * share;
        end = min(end, start + share);
        Side side(params, widening, cache, of_keys);
        with_form(widening, side, [&](auto form) {
            largest = largest_of_thread<form.storage, form.aligned>(params, rows, side, head, start, end);
        });
    }
    largest = warp_max(largest);
    if (thread % 32 == 0) warps[thread / 32] = largest;
    __syncthreads();
    float *units = (float *)widening.units, *found = units + gridDim.x; // of CTAs
    unsigned *is_last = (unsigned *)(warps + UNIT_THREADS / 32), ctas = gridDim.x * gridDim.y;
    if (thread < 32) {
        largest = warp_max(warps[thread]);
        if (thread == 0) {
            found[blockIdx.y * gridDim.x + blockIdx.x] = largest;
            unsigned *counter = (unsigned *)widening.counter;
            *is_last = count_arrival(counter) == ctas - 1;
            if (*is_last) *counter = 0;
        }
    }
    __syncthreads();
    if (!*is_last) return;
    for (int i = thread; i < gridDim.x; i += UNIT_THREADS) {
        largest = 0.0f;
#pragma unroll 4
        for (int y = 0; y < gridDim.y; y++) largest = fmaxf(largest, __ldcg(found + y * gridDim.x + i));
        units[i] = unit_for(largest);
    }
}
