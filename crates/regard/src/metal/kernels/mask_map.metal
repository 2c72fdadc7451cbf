// Builds the tile map of a mask: for each (row tile, K tile) of a key/value head, whether the mask hides all of
// it, changes nothing, or neither (MapKind). Prefill skips the first kind and does not read the mask in the second.
// One SIMD group per tile. A tile of packed rows (packed GQA) takes all elements of its tokens and grouped heads.

// SIMD groups of a threadgroup: as metal/launch.rs has it.
constant int MAP_SIMD_GROUPS = 8;

// Compares bits: with fast math, comparisons with NaN and infinities are undefined.
METAL_FUNC bool keeps_key(float bias) { return as_type<uint>(bias) != MINUS_INFINITY; }
METAL_FUNC bool changes_score(float bias) { return (as_type<uint>(bias) & 0x7fffffffu) != 0; }
METAL_FUNC bool keeps_key(half bias) { return keeps_key(float(bias)); }
METAL_FUNC bool changes_score(half bias) { return changes_score(float(bias)); }
METAL_FUNC bool keeps_key(bfloat bias) { return keeps_key(float(bias)); }
METAL_FUNC bool changes_score(bfloat bias) { return changes_score(float(bias)); }
METAL_FUNC bool keeps_key(uchar keeps) { return keeps != 0; }
METAL_FUNC bool changes_score(uchar keeps) { return keeps == 0; }

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void mask_map(
    constant AttentionParameters& params [[buffer(0)]], device const T* mask [[buffer(6)]],
    device uchar* map [[buffer(18)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroup_index [[simdgroup_index_in_threadgroup]]) {
    const int lane = int(lane_index);
    const int sequence = params.first_sequence + int(group.z);
    const int key_tile = (params.first_block + int(group.x)) * MAP_SIMD_GROUPS + int(simdgroup_index);
    if (key_tile >= params.map.key_tiles) return;
    const int row_tile = int(group.y) % params.map.row_blocks;
    const int kv_head = int(group.y) / params.map.row_blocks;
    const int first_key = key_tile * TILE_KEYS;
    const int keys = min(TILE_KEYS, params.map.mask_keys - first_key);
    const int first_row = row_tile * TILE_ROWS;
    const int first_token = first_row / params.group;
    const int last_token = min((first_row + TILE_ROWS - 1) / params.group, params.map.mask_rows - 1);
    const int heads = params.mask_strides.head == 0 ? 1 : params.group;
    const int rows = (last_token - first_token + 1) * heads;
    device const T* first = mask + long(sequence) * params.mask_strides.batch +
                            long(kv_head * params.group) * params.mask_strides.head +
                            long(first_token) * params.mask_strides.row + long(first_key) * params.mask_strides.key;
    bool keeps = false;
    bool changes = false;
    for (int index = lane; index < rows * keys; index += SIMD_WIDTH) {
        const int row = index / keys;
        const int key = index % keys;
        const T element = first[long(row / heads) * params.mask_strides.row +
                                long(row % heads) * params.mask_strides.head + long(key) * params.mask_strides.key];
        keeps = keeps || keeps_key(element);
        changes = changes || changes_score(element);
    }
    keeps = any_of_simdgroup(keeps);
    changes = any_of_simdgroup(changes);
    if (lane != 0) return;
    const MapKind kind = !keeps ? MapKind::Empty : (changes ? MapKind::Mixed : MapKind::Full);
    map[long(sequence) * params.map.strides.batch + long(kv_head) * params.map.strides.head +
        long(row_tile) * params.map.strides.row + long(key_tile)] = uchar(int(kind));
}

#define MASK_MAP(NAME, T) template [[host_name("mask_map_" NAME)]] [[kernel]] decltype(mask_map<T>) mask_map<T>;
MASK_MAP("bool", uchar)
MASK_MAP("float", float)
MASK_MAP("half", half)
MASK_MAP("bfloat", bfloat)
