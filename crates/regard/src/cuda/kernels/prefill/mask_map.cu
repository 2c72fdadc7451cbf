// The tile map of a mask: for each tile of rows and keys, whether the mask empties it, leaves it whole, or neither. A prefill then skips the first
// kind and does not look at the mask in the second. The mask is read once, from its first byte to its last; a warp takes a tile at a time.
#include "common/element.cuh"
#include "prefill/tile_scheduler.cuh"

// What was found in a tile so far.
struct Found {
    bool kept, changed; // some key is kept; some key is hidden or has something added
    __device__ __forceinline__ void note(bool keeps, bool changes) {
        kept |= keeps;
        changed |= changes;
    }
};

// One element of an additive mask.
static __device__ __forceinline__ void note_bias(Found &found, float bias) { found.note(bias != -INFINITE, bias != 0.0f); }

// 16 bytes of a mask's row.
static __device__ __forceinline__ void note_chunk(Found &found, uint4 chunk, int mask_type) {
    unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned word = words[i];
        if (mask_type == 1) {
            // The highest bit of each byte is set where the byte is not 0.
            unsigned kept = (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) & 0x80808080u;
            found.note(kept != 0, kept != 0x80808080u);
        } else if (mask_type == 2) {
            note_bias(found, __uint_as_float(word));
        } else {
            unsigned short low = word & 0xffff, high = word >> 16;
            note_bias(found, mask_type == 3 ? Element<F16>::load(low) : Element<BF16>::load(low));
            note_bias(found, mask_type == 3 ? Element<F16>::load(high) : Element<BF16>::load(high));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) mask_map(const __grid_constant__ AttentionParameters p, const __grid_constant__ PrefillParameters t) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    int lane = threadIdx.x & 31;
    int bytes = p.mask_type == 1 ? 1 : p.mask_type == 2 ? 4 : 2, wide = 16 / bytes;
    // Whether all rows start at multiples of 16 bytes.
    unsigned long long strides = (p.mask_batch_stride | p.mask_head_stride | p.mask_row_stride) * bytes;
    bool aligned = p.mask_key_stride == 1 && (p.mask | strides) % 16 == 0 && t.map_keys % wide == 0;
    unsigned long long tiles = (unsigned long long)t.map_batch * t.map_heads * t.map_row_tiles * t.map_key_tiles;
    unsigned long long warps = (unsigned long long)gridDim.x * (blockDim.x / 32);
    for (unsigned long long number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; number < tiles; number += warps) {
        // Neighbouring warps take neighbouring keys of the same rows.
        unsigned long long rest = number / t.map_key_tiles;
        int key_tile = (int)(number - rest * t.map_key_tiles);
        unsigned long long matrix = rest / t.map_row_tiles;
        int row_tile = (int)(rest - matrix * t.map_row_tiles), batch = (int)(matrix / t.map_heads), head = (int)(matrix - (unsigned long long)batch * t.map_heads);
        int first_key = key_tile * t.map_keys, keys = min(t.map_keys, t.mask_keys - first_key);
        int first_row = row_tile * t.map_rows, rows = min(t.map_rows, t.mask_rows - first_row);
        long long at = batch * p.mask_batch_stride + head * p.mask_head_stride + first_row * p.mask_row_stride + first_key * p.mask_key_stride;
        Found found = {false, false};
        bool chunks = aligned && keys == t.map_keys && first_key % wide == 0;
        int columns = chunks ? keys / wide : keys;
        // Once a tile is known to be mixed, the rest of it need not be read.
#pragma unroll 1
        for (int first = 0; first < rows * columns; first += 128) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int index = first + 32 * i + lane;
                if (index >= rows * columns) continue;
                int row = index / columns, column = index - row * columns;
                if (chunks) {
                    const unsigned char *from = (const unsigned char *)p.mask + (at + row * p.mask_row_stride) * bytes + column * 16;
                    note_chunk(found, __ldg((const uint4 *)from), p.mask_type);
                } else {
                    long long element = at + row * p.mask_row_stride + column * p.mask_key_stride;
                    if (p.mask_type == 1) {
                        bool kept = ((const unsigned char *)p.mask)[element];
                        found.note(kept, !kept);
                    } else {
                        note_bias(found, load_element(p.mask, element, p.mask_type == 2 ? F32 : p.mask_type == 3 ? F16 : BF16));
                    }
                }
            }
            if (__any_sync(~0u, found.kept) && __any_sync(~0u, found.changed)) break;
        }
        bool kept = __any_sync(~0u, found.kept), changed = __any_sync(~0u, found.changed);
        if (lane == 0) {
            long long to = batch * t.map_batch_stride + head * t.map_head_stride + row_tile * t.map_row_stride + key_tile;
            ((unsigned char *)t.tile_map)[to] = !kept ? MAP_EMPTY : changed ? MAP_MIXED : MAP_FULL;
        }
    }
}
