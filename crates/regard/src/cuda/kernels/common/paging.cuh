// Addresses of keys: with paged KV, the page and slot of a key.
#pragma once
#include "common/problem.cuh"

// The page-table index of a key's page.
static __device__ __forceinline__ int page_index(const AttentionParameters &params, int key) {
    return params.block_shift >= 0 ? key >> params.block_shift : key / params.block_size;
}

// The slot of a key in its page, from its page-table index.
static __device__ __forceinline__ int page_slot(const AttentionParameters &params, int key, int index) {
    return key - index * params.block_size;
}

// The page that a page-table entry names, clamped to the pool.
static __device__ __forceinline__ int page_of(const AttentionParameters &params, int entry) {
    return clamp_int(entry, 0, params.blocks - 1);
}

// The page table of a sequence. `Parameters`: of attention or of append.
template <class Parameters>
static __device__ __forceinline__ const int *page_table(const Parameters &params, int sequence) {
    return (const int *)params.block_table + sequence * params.block_table_stride;
}

// The parameters are cold in the constant cache: each warp touches a part of them.
static __device__ __forceinline__ void touch_parameters(const AttentionParameters &params) {
    int touched = ((const int *)&params)[min(threadIdx.x / 32 * 32, (unsigned)sizeof(params) / 4 - 1)];
    asm volatile("" ::"r"(touched));
}

// Every CTA reads the lengths and a small page table soon, in dependent loads: prefetch all of them now.
static __device__ __forceinline__ void prefetch_lengths(const AttentionParameters &params) {
    int at = threadIdx.x * 128;
    [[maybe_unused]] int unused; // the load only fills the cache
    if (params.kv_lens && at < params.batch * 4)
        asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(params.kv_lens + at));
    if (params.block_size && params.block_shift >= 0) {
        long long columns = (params.kv_len + params.block_size - 1ll) >> params.block_shift,
                  bytes = ((params.batch - 1) * params.block_table_stride + columns) * 4;
        if (at >= bytes) return;
        if (bytes <= 16 << 10)
            asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(params.block_table + at));
        else if (bytes <= 1 << 20)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(params.block_table + at));
    }
}

// The place of a key in a tensor of keys or values: batch index and token; with paged KV, page and slot.
struct KeyPlace {
    int batch, token;
};

// Without pages. A ragged batch has one batch index, and its tokens are counted from the tensor's start.
template <class Tile> static __device__ __forceinline__ KeyPlace contiguous_place(const AttentionParameters &params,
                                                                                  const Tile &tile, int key) {
    KeyPlace place;
    place.token = tile.seq.kv_start + key;
    place.batch = params.cu_seqlens_k ? 0 : tile.sequence;
    return place;
}

// With paged KV: the slot, and the page-table entry, which `page_of` has yet to clamp. The entry's load is still in
// flight when this returns.
template <class Tile> static __device__ __forceinline__ void
find_paged_place(const AttentionParameters &params, const Tile &tile, int key, KeyPlace &place) {
    int index = page_index(params, key);
    place.token = page_slot(params, key, index);
    place.batch = page_table(params, tile.sequence)[index];
}

// Offsets of the keys and values of a tile's head, in elements: in the pool if paged, else of the sequence.
template <class Tile> static __device__ __forceinline__ void
find_kv_start(const AttentionParameters &params, const Tile &tile, long long &key_start, long long &value_start) {
    const RowStrides &keys = params.keys.strides, &values = params.values.strides;
    key_start = tile.kv_head * keys.head, value_start = tile.kv_head * values.head;
    if (!params.block_size) {
        // A ragged sequence starts at its cumulative length, a batched one at its batch entry.
        key_start += params.cu_seqlens_k ? tile.seq.kv_start * keys.token : tile.sequence * keys.batch;
        value_start += params.cu_seqlens_k ? tile.seq.kv_start * values.token : tile.sequence * values.batch;
    }
}
