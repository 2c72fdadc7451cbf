// Where keys are in memory: with paged KV, the page and slot of a key.
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

// The page table of a sequence.
static __device__ __forceinline__ const int *page_table(const AttentionParameters &params, int sequence) {
    return (const int *)params.block_table + sequence * params.block_table_stride;
}
