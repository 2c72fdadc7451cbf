// Builds the tile map of a mask: for each (row tile, K tile), whether the mask hides all of it, changes nothing, or
// neither. Prefill skips the first kind and does not read the mask in the second. A warp per tile; the mask is read
// once, in order.
#include "common/element.cuh"
#include "prefill/tile_scheduler.cuh"

// The state of a tile's scan: which kinds of mask elements it has met.
struct Found {
    bool kept, changed; // some key is kept; some key is hidden or has a bias
    __device__ __forceinline__ void note(bool keeps, bool changes) {
        kept |= keeps;
        changed |= changes;
    }
};

// One element of an additive mask.
static __device__ __forceinline__ void note_bias(Found &found, float bias) { found.note(bias != -INF, bias != 0.0f); }

// 16 bytes of a mask row.
static __device__ __forceinline__ void note_chunk(Found &found, uint4 chunk, MaskKind kind) {
    unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned word = words[i];
        if (kind == MaskKind::Bool) {
            // Sets the high bit of each non-zero byte.
            unsigned kept = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
            found.note(kept != 0, kept != 0x80808080u);
        } else if (kind == MaskKind::F32) {
            note_bias(found, __uint_as_float(word));
        } else {
            unsigned short low = word & 0xffff, high = word >> 16;
            note_bias(found, kind == MaskKind::F16 ? Element<ElementType::F16>::to_float(low)
                                                   : Element<ElementType::BF16>::to_float(low));
            note_bias(found, kind == MaskKind::F16 ? Element<ElementType::F16>::to_float(high)
                                                   : Element<ElementType::BF16>::to_float(high));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    mask_map(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefillParameters prefill) {
    grid_dependency_wait();
    int lane = threadIdx.x & 31;
    int bytes = params.mask_kind == MaskKind::Bool ? 1 : params.mask_kind == MaskKind::F32 ? 4 : 2, wide = 16 / bytes;
    // Whether all rows start at multiples of 16 bytes.
    unsigned long long strides =
        (params.mask_strides.batch | params.mask_strides.head | params.mask_strides.row) * bytes;
    bool aligned =
        params.mask_strides.key == 1 && (params.mask | strides) % 16 == 0 && prefill.map.tile_keys % wide == 0;
    unsigned long long tiles =
        (unsigned long long)prefill.map.batch * prefill.map.heads * prefill.map.row_tiles * prefill.map.key_tiles;
    unsigned long long warps = (unsigned long long)gridDim.x * (blockDim.x / 32);
    for (unsigned long long number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; number < tiles;
         number += warps) {
        // Adjacent warps take adjacent keys of the same rows.
        unsigned long long rest = number / prefill.map.key_tiles;
        int key_tile = (int)(number - rest * prefill.map.key_tiles);
        unsigned long long matrix = rest / prefill.map.row_tiles;
        int row_tile = (int)(rest - matrix * prefill.map.row_tiles), batch = (int)(matrix / prefill.map.heads),
            head = (int)(matrix - (unsigned long long)batch * prefill.map.heads);
        int first_key = key_tile * prefill.map.tile_keys,
            keys = min(prefill.map.tile_keys, prefill.map.mask_keys - first_key);
        int first_row = row_tile * prefill.map.tile_rows,
            rows = min(prefill.map.tile_rows, prefill.map.mask_rows - first_row);
        long long at = batch * params.mask_strides.batch + head * params.mask_strides.head +
                       first_row * params.mask_strides.row + first_key * params.mask_strides.key;
        Found found = {false, false};
        bool chunks = aligned && keys == prefill.map.tile_keys && first_key % wide == 0;
        int columns = chunks ? keys / wide : keys;
        // Stop reading a tile once it is known to be mixed.
#pragma unroll 1
        for (int first = 0; first < rows * columns; first += 128) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int index = first + 32 * i + lane;
                if (index >= rows * columns) continue;
                int row = index / columns, column = index - row * columns;
                if (chunks) {
                    const unsigned char *from =
                        (const unsigned char *)params.mask + (at + row * params.mask_strides.row) * bytes + column * 16;
                    note_chunk(found, __ldg((const uint4 *)from), params.mask_kind);
                } else {
                    long long element = at + row * params.mask_strides.row + column * params.mask_strides.key;
                    if (params.mask_kind == MaskKind::Bool) {
                        bool kept = ((const unsigned char *)params.mask)[element];
                        found.note(kept, !kept);
                    } else {
                        note_bias(found, load_element(params.mask, element, mask_element(params.mask_kind)));
                    }
                }
            }
            if (__any_sync(~0u, found.kept) && __any_sync(~0u, found.changed)) break;
        }
        bool kept = __any_sync(~0u, found.kept), changed = __any_sync(~0u, found.changed);
        if (lane == 0) {
            long long to = batch * prefill.map.strides.batch + head * prefill.map.strides.head +
                           row_tile * prefill.map.strides.row + key_tile;
            ((unsigned char *)prefill.map.pointer)[to] = (unsigned char)(!kept     ? MapKind::Empty
                                                                         : changed ? MapKind::Mixed
                                                                                   : MapKind::Full);
        }
    }
}
