// Attention of the rows of prefix groups to their shared prefix, and what goes before and after it.
//
// Items leave partial states.
#pragma once
#include "prefill/prefix_item.cuh"
#include "prefill/prefix_merge.cuh"

// The tile of an item, by one warp.
static __device__ __forceinline__ void find_operands(const AttentionParameters &params, const PrefixItem &item,
                                                     TileOperands &operands) {
    PrefixKeys keys = find_keys(item, prefix_rows());
    if (threadIdx.x % 32 != 0) return;
    PrefillTile &tile = operands.tile;
    tile.sequence = __ldcg(&item.group->sequence);
    tile.kv_head = item.kv_head;
    // No key of a prefix is a new token: see load_member.
    tile.seq = {0, 0, 0, 0x7fffffff, 0, 0};
    tile.head = item.kv_head * params.group;
    tile.first_token = 0;
    tile.tokens = item.rows;
    tile.any_start = tile.seq_start = keys.any_start;
    tile.any_end = tile.seq_end = keys.any_end;
    tile.every_start = keys.every_start;
    tile.every_end = keys.every_end;
    tile.scale = params.scale;
    operands.map = nullptr;
    operands.valid = 1;
    operands.table = page_table(params, tile.sequence);
    long long key_start, value_start;
    find_kv_start(params, tile, key_start, value_start);
    operands.key_base = params.keys.pointer + key_start * ELEMENT_BYTES;
    operands.value_base = params.values.pointer + value_start * ELEMENT_BYTES;
}

// Starts the copies of an item's queries; zeros for rows that it does not have.
static __device__ __forceinline__ void load_query_rows(const Loader &loader, int rows) {
    const AttentionParameters &params = loader.params;
    typedef Loader::CopyPartition<HEAD_DIM, TILE_ROWS> P;
    P part;
    bool chunked = loader.is_chunked(params.head_dim);
#pragma unroll 4
    for (int pass = 0; pass < P::PASSES; pass++) {
        if (!part.takes(pass)) break;
        int row = part.row + pass * P::ROWS_PER_PASS;
        const Bits *from = (const Bits *)params.query.pointer + prefix_rows()[row].query;
        if (chunked) {
            loader.copy_row<KEY_PITCH>(loader.memory + QUERY_OFFSET, part, pass, from, row < rows, params.head_dim);
            continue;
        }
#pragma unroll 1
        for (int column = part.column; column < P::CHUNKS; column += P::LANES_PER_ROW) {
            int elements = row < rows ? clamp_int(params.head_dim - column * CHUNK, 0, CHUNK) : 0;
            unsigned place = swizzle<KEY_PITCH>(loader.memory + QUERY_OFFSET, row, column * 16);
            if (params.load_kind == LoadKind::Elements)
                Loader::copy_elements(place, from + column * CHUNK, elements);
            else
                cp_async(place, from + column * CHUNK, elements * ELEMENT_BYTES);
        }
    }
}

// Prologue of an item, as Worker::begin: starts the copies of its queries and first K tile, and returns that K tile.
static __device__ __forceinline__ int begin_item(Worker &w, const TileOperands &operands) {
    w.key_tiles.start(operands);
    int key_tile = operands.tile.any_start / TILE_KEYS;
    if (key_tile < w.key_tiles.end) {
        load_query_rows(w.loader, operands.tile.tokens);
        w.loader.fetch<true>(operands, key_tile, w.key_stage(0));
        if constexpr (KV_BUFFERS == 4) w.loader.fetch<false>(operands, key_tile, w.value_stage(0));
    }
    return key_tile;
}

// Epilogue of an item: stores the states of its rows.
static __device__ __forceinline__ void store_states(const Worker &w, const PrefixParameters &prefix,
                                                    const PrefixItem &item) {
    w.exchange_sums();
#pragma unroll
    for (int block = 0; block < MMA_ROW_TILES; block++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = w.row_warp * WARP_ROWS + block * 16 + 8 * r + w.lane / 4;
            float sum = w.total(block, r);
            if (row >= item.rows) continue;
            long long state = item.first_state + row;
            if (w.lane % 4 == 0 && w.value_warp == 0)
                ((float2 *)prefix.partial_states)[state] = make_float2(w.scaled_max(block, r), sum);
            float *out = (float *)prefix.partial_out + state * VALUE_DIM + w.value_warp * WARP_VALUE_DIM;
#pragma unroll
            for (int v = 0; v < MMA_VALUE_TILES; v++)
                *(float2 *)(out + 8 * v + 2 * (w.lane % 4)) =
                    make_float2(w.out[block][v][2 * r], w.out[block][v][2 * r + 1]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS_PER_SM)
    prefix(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefixParameters prefix) {
    Shared &shared = *(Shared *)dynamic_shared;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Worker w = {params, {params, nullptr, shared_start()}};
    w.lane = lane;
    w.row_warp = warp / VALUE_WARPS;
    w.value_warp = warp % VALUE_WARPS;
    w.factor = exponent_scale(params, params.scale);
    w.products.lane = lane;
    w.products.query = Products::a_fragment_address<KEY_PITCH>(
        w.loader.memory + QUERY_OFFSET + w.row_warp * WARP_ROWS * KEY_PITCH, lane);
    w.products.probs = w.loader.memory + PROBS_OFFSET + w.row_warp * WARP_ROWS * PROB_PITCH;
    begin_beside_decode();
    PrefixTotals totals = load_totals(prefix);
#pragma unroll 1
    for (int number = blockIdx.x; number < totals.items; number += gridDim.x) {
        PrefixItem item = find_item(prefix, totals.groups, number);
        find_rows<IS_FALLBACK>(params, prefix, item, prefix_rows());
        __syncthreads();
        TileOperands &operands = shared.tiles[0];
        if (warp == 0) find_operands(params, item, operands);
        __syncthreads();
        int key_tile = begin_item(w, operands);
        cp_async_commit();
        w.clear();
        if constexpr (QUERY_IN_REGISTERS) {
            cp_async_wait<0>();
            __syncthreads();
            w.products.load_query_fragments();
        }
        w.mainloop(operands, key_tile);
        cp_async_wait<0>();
        store_states(w, prefix, item);
        __syncthreads();
    }
    end_beside_decode();
}
