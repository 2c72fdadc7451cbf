// Merges the partial states of prefill over splits of the keys (KeySplits): a CTA has some rows of a tile, a warp a row
// at a time.
#define ELEMENT_TYPE 0 // f16: of outputs that are bounded (state.cuh)
#include "common/epilogue.cuh"
#include "prefill/tile_scheduler.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = 4; // of a lane, which follow one another

// A row's state over a split, and its outputs.
static __device__ __forceinline__ State load_state(const KeySplits &splits, const PrefillTile &tile, int token,
                                                   int split) {
    long long at = row_offset(splits.states.strides, tile, tile.head, token) + split * splits.state_stride;
    float2 state = __ldcg((const float2 *)((const float *)splits.states.pointer + at));
    return {state.x, state.y};
}
static __device__ __forceinline__ float4 load_outputs(const KeySplits &splits, const PrefillTile &tile, int token,
                                                      int split, int column) {
    long long at = row_offset(splits.out.strides, tile, tile.head, token) + split * splits.out_stride;
    return __ldcg((const float4 *)((const float *)splits.out.pointer + at + column));
}

// A row's output and log-sum-exp. Lane l has the state over split l.
static __device__ __forceinline__ void combine_row(const AttentionParameters &params, const KeySplits &splits,
                                                   const PrefillTile &tile, int token, int lane) {
    float unit = params.mask_kind >= MaskKind::F32 ? LOG2_E : 1.0f;
    State own = {-MAX_FLOAT, 0.0f};
    if (lane < splits.count) own = load_state(splits, tile, token, lane);
    State all = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) all.max = fmaxf(all.max, __shfl_xor_sync(~0u, all.max, step));
    // The outputs of a split that the row sees no key of are not written.
    float own_weight = own.sum != 0.0f ? exp2_fast((own.max - all.max) * unit) : 0.0f;
    all.sum = own_weight * own.sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) all.sum += __shfl_xor_sync(~0u, all.sum, step);
    FinalizedRow finalized =
        finalize_row(params, all, load_sink(params, tile.head, unit), unit, params.lse.pointer != 0);
    if (params.lse.pointer && lane == 0) store_lse(params, tile, tile.head, token, finalized.lse);
    long long at = out_offset(params, tile, tile.head, token);
#pragma unroll 1
    for (int base = 0; base < params.value_dim; base += 32 * COLUMNS) {
        int column = base + lane * COLUMNS;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int split = 0; split < splits.count; split++) {
            float weight = __shfl_sync(~0u, own_weight, split);
            if (weight != 0.0f && column < params.value_dim)
                sum = add_four(sum, weight, load_outputs(splits, tile, token, split, column));
        }
        const float four[COLUMNS] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) {
            float out = finalized.factors(four[i]) * tile.value_scale;
            if (splits.out_type == ElementType::F16) out = bound_output(out);
            if (column + i < params.value_dim) store_element(params.out.pointer, at + column + i, splits.out_type, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    combine_splits(const __grid_constant__ AttentionParameters params,
                   const __grid_constant__ PrefillParameters prefill) {
    grid_dependency_wait();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TileCursor cursor = {0, 0};
    PrefillTile tile;
    if (!find_tile(params, prefill, prefill.map.tile_rows, blockIdx.x, cursor, tile)) return;
    find_scales(params, prefill, tile);
#pragma unroll 1
    for (int row = blockIdx.y * WARPS + warp; row < tile.tokens; row += gridDim.y * WARPS)
        combine_row(params, prefill.splits, tile, tile.first_token + row, lane);
}
