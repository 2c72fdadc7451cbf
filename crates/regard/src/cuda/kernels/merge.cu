// Joins partial results over disjoint sets of keys (a shared prefix and what follows it, caches spread over devices): outputs and their
// log-sum-exps, as state.rs does. A warp takes a row.
#include "element.cuh"
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(256) merge(const __grid_constant__ MergeParameters p) {
    int lane = threadIdx.x & 31;
    long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (row >= p.rows) return;
    const float *lse = (const float *)p.part_lse + row;
    float most = -INFINITE;
    for (int k = 0; k < p.count; k++) most = fmaxf(most, lse[k * p.part_lse_stride]);
    float sum = 0.0f;
    if (most != -INFINITE)
        for (int k = 0; k < p.count; k++) sum += exp2f((lse[k * p.part_lse_stride] - most) * LOG2_E);
    float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    for (int i = lane; i < p.dim; i += 32) {
        float out = 0.0f;
        for (int k = 0; k < p.count; k++) {
            float part = lse[k * p.part_lse_stride];
            // What an empty part holds does not matter.
            if (part == -INFINITE) continue;
            out += exp2f((part - most) * LOG2_E) * inverse * load_element(p.parts, k * p.part_stride + row * p.dim + i, p.part_type);
        }
        store_element(p.out, row * p.dim + i, p.out_type, out);
    }
    if (p.lse && lane == 0) ((float *)p.lse)[row] = sum > 0.0f ? most + logf(sum) : -INFINITE;
}
