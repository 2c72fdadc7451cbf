// Merges partial results over disjoint sets of keys (a shared prefix and its suffixes, caches spread over devices):
// outputs and log-sum-exps (LSE), as state.rs does. A warp per row.
#include "common/element.cuh"
#include "common/parameters.cuh"

// Four contiguous elements, aligned to their size.
static __device__ __forceinline__ float4 load_four(unsigned long long address, long long index, ElementType type) {
    if (type == ElementType::F32) return *(const float4 *)((const float *)address + index);
    uint2 bits = *(const uint2 *)((const unsigned short *)address + index);
    auto number = [&](unsigned short half) {
        return type == ElementType::F16 ? Element<ElementType::F16>::to_float(half)
                                        : Element<ElementType::BF16>::to_float(half);
    };
    return make_float4(number(bits.x & 0xffff), number(bits.x >> 16), number(bits.y & 0xffff), number(bits.y >> 16));
}

static __device__ __forceinline__ float component(const float4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// A row's output, one or four elements per lane at a time. Lane l computes the weights of the parts l, l + 32, ...
template <int AT_ONCE> static __device__ __forceinline__ void merge_row(const MergeParameters &params, long long row,
                                                                        float max_lse, float inverse) {
    int lane = threadIdx.x & 31;
    const float *lse = (const float *)params.part_lse + row;
    for (int first = 0; first < params.dim; first += 32 * AT_ONCE) {
        int column = first + lane * AT_ONCE;
        float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int base = 0; base < params.count; base += 32) {
            // A missing part, or one that saw no key, has weight 0.
            float part = base + lane < params.count ? lse[(base + lane) * params.part_lse_stride] : -INF;
            float own_weight = part == -INF ? 0.0f : exp2f((part - max_lse) * LOG2_E) * inverse;
#pragma unroll 4
            for (int k = 0; k < min(32, params.count - base); k++) {
                float weight = __shfl_sync(~0u, own_weight, k);
                // The output of an empty part is never read.
                if (weight == 0.0f || column >= params.dim) continue;
                long long at = (base + k) * params.part_stride + row * params.dim + column;
                if (AT_ONCE == 4) {
                    float4 x = load_four(params.parts, at, params.part_type);
                    out = make_float4(fmaf(weight, x.x, out.x), fmaf(weight, x.y, out.y), fmaf(weight, x.z, out.z),
                                      fmaf(weight, x.w, out.w));
                } else {
                    out.x = fmaf(weight, load_element(params.parts, at, params.part_type), out.x);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (column + i < params.dim)
                store_element(params.out, row * params.dim + column + i, params.out_type, component(out, i));
    }
}

extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ MergeParameters params) {
    int lane = threadIdx.x & 31;
    long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= params.rows) return;
    const float *lse = (const float *)params.part_lse + row;
    float max_lse = -INF, sum = 0.0f;
    for (int k = lane; k < params.count; k += 32) max_lse = fmaxf(max_lse, lse[k * params.part_lse_stride]);
#pragma unroll
    for (int step = 16; step; step /= 2) max_lse = fmaxf(max_lse, __shfl_xor_sync(~0u, max_lse, step));
    if (max_lse != -INF) {
        for (int k = lane; k < params.count; k += 32)
            sum += exp2f((lse[k * params.part_lse_stride] - max_lse) * LOG2_E);
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    }
    float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    // Whether every row starts at a multiple of four elements.
    unsigned long long four = params.part_type == ElementType::F32 ? 16 : 8;
    if (params.parts % four == 0 && params.dim % 4 == 0 && params.part_stride % 4 == 0)
        merge_row<4>(params, row, max_lse, inverse);
    else
        merge_row<1>(params, row, max_lse, inverse);
    if (params.lse && lane == 0) ((float *)params.lse)[row] = sum > 0.0f ? max_lse + logf(sum) : -INF;
}
