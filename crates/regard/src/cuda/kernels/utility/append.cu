// Appending to a paged cache: new keys and values go to their slots; keys, and queries where they lie, may be rotated on the way.
// A warp takes a head of a token. Tokens of slots that the table does not reach, or whose entry names no block, are dropped.
#include "common/element.cuh"
#include "common/parameters.cuh"

// The sequence that new token `index` of all belongs to, its place among that sequence's new tokens, and how many those are.
static __device__ __forceinline__ int find_sequence(const AppendParameters &p, int index, int &place, int &count) {
    if (!p.cu_seqlens) {
        int sequence = index / p.new_tokens;
        place = index - sequence * p.new_tokens;
        count = p.new_tokens;
        return sequence < p.batch ? sequence : -1;
    }
    const int *cumulative = (const int *)p.cu_seqlens;
    // The last sequence that starts at or before the token: empty ones before it are passed over.
    int low = 0, high = p.batch;
    while (low < high) {
        int middle = (low + high) / 2;
        if (cumulative[middle + 1] <= index) low = middle + 1;
        else high = middle;
    }
    if (low >= p.batch || index < cumulative[low]) return -1;
    place = index - cumulative[low];
    count = cumulative[low + 1] - cumulative[low];
    return low;
}

// Element `i` of a head, rotated to a position: with its partner, where it has one.
static __device__ __forceinline__ float rotated(const AppendParameters &p, unsigned long long head, long long at, int i, const float *angles) {
    float x = load_element(head, at + i, p.element_type);
    if (!angles || i >= p.rotary_dim) return x;
    int half = p.rotary_dim / 2;
    bool first = p.rotary_interleaved ? i % 2 == 0 : i < half;
    int pair = p.rotary_interleaved ? i / 2 : i % half;
    int partner = p.rotary_interleaved ? i ^ 1 : first ? i + half : i - half;
    float y = load_element(head, at + partner, p.element_type);
    float cosine = angles[pair], sine = angles[half + pair];
    return first ? x * cosine - y * sine : x * cosine + y * sine;
}

extern "C" __global__ void __launch_bounds__(256) append(const __grid_constant__ AppendParameters p) {
    int lane = threadIdx.x & 31;
    long long work = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    int heads = 2 * p.kv_heads + (p.query ? p.query_heads : 0);
    int token = (int)(work / heads), head = (int)(work - (long long)token * heads);
    if (token >= p.tokens) return;
    int place, count;
    int sequence = find_sequence(p, token, place, count);
    if (sequence < 0) return;
    long long position = (long long)((const int *)p.kv_lens)[sequence] - count + place;
    const float *angles = 0;
    if (p.rotary) {
        long long row = min(max(position, 0ll), (long long)p.rotary_positions - 1);
        angles = (const float *)p.rotary + row * p.rotary_dim;
    }
    if (head >= 2 * p.kv_heads) {
        // A query, where it lies: all of its elements are read before any is written.
        long long at = token * p.query_token_stride + (head - 2 * p.kv_heads) * p.query_head_stride;
        float values[18]; // 576 / 32
#pragma unroll
        for (int j = 0; j < 18; j++)
            if (lane + 32 * j < p.rotary_dim) values[j] = rotated(p, p.query, at, lane + 32 * j, angles);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 18; j++)
            if (lane + 32 * j < p.rotary_dim) store_element(p.query, at + lane + 32 * j, p.element_type, values[j]);
        return;
    }
    if (position < 0) return;
    long long column = position / p.block_size;
    int slot = (int)(position - column * p.block_size);
    if (column >= p.table_blocks) return;
    int block = ((const int *)p.block_table)[sequence * p.block_table_stride + column];
    if (block < 0 || block >= p.blocks) return;
    bool key = head < p.kv_heads;
    if (!key) head -= p.kv_heads;
    unsigned long long from = key ? p.key : p.value, to = key ? p.key_pool : p.value_pool;
    long long source = key ? token * p.key_token_stride + head * p.key_head_stride : token * p.value_token_stride + head * p.value_head_stride;
    long long target = key ? block * p.key_block_stride + slot * p.key_slot_stride + head * p.key_pool_head_stride
                           : block * p.value_block_stride + slot * p.value_slot_stride + head * p.value_pool_head_stride;
    int dims = key ? p.head_dim : p.value_dim;
    bool turn = key && angles;
    // Eight elements at once where nothing has to be rotated and both ends allow it.
    long long bytes = (long long)dims * p.element_bytes;
    unsigned long long source_address = from + source * p.element_bytes, target_address = to + target * p.element_bytes;
    if (!turn && ((source_address | target_address | bytes) & 15) == 0) {
        for (long long i = lane * 16; i < bytes; i += 512) *(uint4 *)(target_address + i) = *(const uint4 *)(source_address + i);
        return;
    }
    for (int i = lane; i < dims; i += 32) {
        if (turn) {
            store_element(to, target + i, p.element_type, rotated(p, from, source, i, angles));
        } else if (p.element_bytes == 2) {
            ((unsigned short *)to)[target + i] = ((const unsigned short *)from)[source + i];
        } else {
            ((unsigned *)to)[target + i] = ((const unsigned *)from)[source + i];
        }
    }
}
