// Tensor maps, and checks that the arguments of a prefill launch make sense together.
#pragma once
#include "attention.h"
#include <cstdio>

// The contents that the stand-in writes in place of the driver's CUtensorMap.
struct Encoded {
    char name[8];
    unsigned long long address, dims[4], strides[3];
    unsigned box[4];
    int type;
};
static_assert(sizeof(Encoded) <= sizeof(TensorMap), "it is in a tensor map");

// As the driver checks: 0 or CUDA_ERROR_INVALID_VALUE.
inline int encode(void *map, int type, unsigned rank, unsigned long long address, const unsigned long long *dims, const unsigned long long *strides,
                  const unsigned *box, const unsigned *element_strides, int interleave, int swizzle) {
    // Codes come as stored, elements of 16 bits swizzled in lines of 128 bytes.
    bool codes = type == 0;
    bool legal = rank == 4 && address % 16 == 0 && (unsigned long long)map % 64 == 0 && interleave == 0 && swizzle == (codes ? 0 : 3);
    Encoded encoded = {"tensor", address, {}, {}, {}, type};
    for (unsigned i = 0; i < 4 && legal; i++) {
        legal = dims[i] >= 1 && dims[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 && element_strides[i] == 1;
        encoded.dims[i] = dims[i];
        encoded.box[i] = box[i];
    }
    for (unsigned i = 0; i < 3 && legal; i++) {
        legal = strides[i] % 16 == 0 && strides[i] < 1ull << 40;
        encoded.strides[i] = strides[i];
    }
    // A box has whole rows of bytes, or a line of each row of elements.
    if (!legal || (codes ? box[0] % 16 != 0 : box[0] != 64)) return 1;
    std::memcpy(map, &encoded, sizeof(encoded));
    return 0;
}

inline bool expect(bool holds, const char *what) {
    if (!holds) std::fprintf(stderr, "stand-in: prefill: %s\n", what);
    return holds;
}

// Whether a map is of that operand. Strides are in elements.
inline bool is_map_of(const TensorMap &map, CacheFormat format, unsigned long long address, int dim, int heads, const RowStrides &strides, const char *what) {
    Encoded found;
    std::memcpy(&found, &map, sizeof(found));
    if (!expect(!std::memcmp(found.name, "tensor", 7), what)) return false;
    const long long steps[3] = {strides.head, strides.token, strides.batch};
    bool same = found.address == address && found.dims[0] == (unsigned)dim && found.dims[1] == (unsigned)heads;
    bool codes = format >= CacheFormat::E4M3;
    // A box has whole rows of codes.
    same &= !codes || found.box[0] == found.dims[0];
    for (int i = 0; i < 3; i++) same &= found.dims[i + 1] == 1 || found.strides[i] == (codes ? 1ull : 2ull) * steps[i];
    return expect(same && found.type == (codes ? 0 : format == CacheFormat::F16 ? 6 : 9), what);
}

// Whether a map is of all heads of that operand, as rows of bytes.
inline bool is_map_of_rows(const TensorMap &map, CacheFormat format, unsigned long long address, int dim, int heads, const RowStrides &strides,
                           const char *what) {
    Encoded found;
    std::memcpy(&found, &map, sizeof(found));
    const bool blocks = format == CacheFormat::Q8_0 || format == CacheFormat::Q4_0;
    const unsigned long long unit = format == CacheFormat::Q8_0 ? 34 : blocks ? 18 : format == CacheFormat::BF16 ? 2 : 1;
    const unsigned long long row = (blocks ? dim / 32 : dim) * unit, last = heads > 1 ? (heads - 1) * strides.head * unit : 0;
    bool same = found.address == address && found.dims[0] == last + row && found.dims[1] == 1 && found.box[0] >= row;
    same &= found.dims[2] == 1 || found.strides[1] == unit * strides.token;
    same &= found.dims[3] == 1 || found.strides[2] == unit * strides.batch;
    // A box begins at a multiple of 16, before a head's row.
    for (int head = 0; head < heads; head++) same &= found.box[0] >= row + head * strides.head * unit % 16;
    return expect(same && found.type == 0, what);
}

// Whether keys and values are described as their kernel reads them: as elements or codes; or, `as_rows`, as rows of bytes or not at all.
inline bool expect_kv_maps(const AttentionParameters &p, const PrefillParameters &t, const TensorMaps &maps, const StoredCache &cache, bool as_rows) {
    Encoded key, value;
    std::memcpy(&key, &maps.key, sizeof(key));
    std::memcpy(&value, &maps.value, sizeof(value));
    if (as_rows && t.box_keys == 0) return expect(!key.address && !value.address, "maps that are not read");
    const auto is_map = as_rows ? is_map_of_rows : is_map_of;
    return is_map(maps.key, cache.key_format, p.keys.pointer, p.head_dim, cache.key_terms * p.kv_heads, p.keys.strides, "map of keys") &&
           is_map(maps.value, cache.value_format, p.values.pointer, p.value_dim, p.kv_heads, p.values.strides, "map of values") &&
           expect(key.box[2] == (unsigned)t.box_keys && value.box[2] == key.box[2], "box_keys") &&
           expect(!p.block_size || p.block_size % t.box_keys == 0, "a box inside a block") &&
           expect(!p.block_size || key.dims[2] == (unsigned)p.block_size, "slots of a block");
}

inline bool expect_maps(const AttentionParameters &p, const PrefillParameters &t, const TensorMaps &maps, const StoredCache &cache, bool as_rows) {
    CacheFormat elements = (CacheFormat)(int)cache.query_type;
    int heads = p.kv_heads * p.group;
    Encoded query;
    std::memcpy(&query, &maps.query, sizeof(query));
    return is_map_of(maps.query, elements, p.query.pointer, p.head_dim, heads, p.query.strides, "map of queries") &&
           expect_kv_maps(p, t, maps, cache, as_rows) &&
           (p.out_f32 || is_map_of(maps.out, elements, p.out.pointer, p.value_dim, heads, p.out.strides, "map of the output")) &&
           expect(p.cu_seqlens_q || query.dims[3] == (unsigned)p.batch, "sequences of the queries") &&
           expect(p.scale > 0 && (!p.out_f32 || p.out_aligned), "what it takes") && expect(t.splits.count == 1 << t.splits.shift, "splits of keys");
}

inline bool expect_sound(const AttentionParameters &p, const PrefillParameters &t) {
    const unsigned *counters = (const unsigned *)t.counters;
    long long rows = t.row_tiles;
    return expect(t.counters == p.workspace + 4080 && counters[0] == 0 && counters[1] == 0, "counters") && expect(t.l2_group >= 1, "l2_group") &&
           expect(p.cu_seqlens_q ? t.tiles == 0 : t.tiles == rows * p.batch * p.kv_heads * p.group, "tiles") &&
           expect(t.tiles == 0 || (rows * t.map.tile_rows >= p.query_len && (rows - 1) * t.map.tile_rows < p.query_len), "row tiles") &&
           expect(t.min_query_len == 0 || p.cu_seqlens_q, "min_query_len") && expect(!t.map.pointer || p.mask_kind != MaskKind::None, "a map without a mask");
}

// Scales of heads are those of the codes that the kernel reads, or of codes that were copied without them.
inline bool expect_scales(const PrefillParameters &t, const CacheParameters &cache, bool has_cache) {
    return !has_cache || (expect(!t.key_scales.pointer || t.key_scales.pointer == cache.key_scales, "scales of keys") &&
                          expect(!t.value_scales.pointer || t.value_scales.pointer == cache.value_scales, "scales of values"));
}

// A scale per key, for the modules that take them and no others.
inline bool expect_key_scales(const PrefillParameters &t, bool scales_keys, bool is_prefill) {
    return !is_prefill || (expect((t.each_key.pointer != 0) == scales_keys, "scales of single keys") &&
                           expect(t.each_key.pointer % 16 == 0 && t.each_key.stride % 4 == 0, "alignment of scales of single keys"));
}

// The tensor that a map is of.
inline KvTensor tensor_of(const TensorMap &map) {
    Encoded found;
    std::memcpy(&found, &map, sizeof(found));
    const long long size = found.type == 0 ? 1 : 2;
    return {found.address, {(long long)found.strides[2] / size, (long long)found.strides[1] / size, (long long)found.strides[0] / size}};
}

// A decode launch over a latent cache: the maps of its keys, whose first dims are the values, and of their other dims, which may be in a tensor of their own.
inline bool expect_latent(const AttentionParameters &p, const TensorMap &keys, const TensorMap &rest) {
    Encoded key, other;
    std::memcpy(&key, &keys, sizeof(key));
    std::memcpy(&other, &rest, sizeof(other));
    const CacheFormat elements = key.type == 6 ? CacheFormat::F16 : CacheFormat::BF16;
    const bool in_one = key.dims[0] == (unsigned)p.head_dim;
    const KvTensor last = in_one ? KvTensor{p.keys.pointer + 2 * p.value_dim, p.keys.strides} : tensor_of(rest);
    return is_map_of(keys, elements, p.keys.pointer, in_one ? p.head_dim : p.value_dim, p.kv_heads, p.keys.strides, "map of a latent cache") &&
           is_map_of(rest, elements, last.pointer, p.head_dim - p.value_dim, p.kv_heads, last.strides, "map of the dims that are not values") &&
           expect(key.dims[2] == other.dims[2] && key.dims[3] == other.dims[3] && key.box[2] == other.box[2], "keys in two parts") &&
           expect(p.values.pointer == p.keys.pointer && !std::memcmp(&p.values.strides, &p.keys.strides, sizeof(RowStrides)), "values that are keys") &&
           expect(p.block_size ? p.block_size % key.box[2] == 0 && key.dims[2] == (unsigned)p.block_size : key.box[2] == 64, "boxes of a latent cache");
}
