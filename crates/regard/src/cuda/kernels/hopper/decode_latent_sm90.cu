// Decode attention on Hopper over a latent cache (MLA): the values are the first dims of the keys.
//
// A K tile is loaded once, by TMA, and serves both products. Rows are few, so they are the N of wgmma: S^T = K Q^T has
// a row of keys and O^T = V^T P^T a row of value dims, and both take their first operand from the K tile as it lies in
// shared memory. As the M, 16 heads would cost as much as 64.
//
// With 64 rows S = Q K^T has the rows as its M, so that a row's maximum is found within four threads.
//
// Warp-specialized: a scheduler warp, which finds the CTA's work; three loader warps; a score warpgroup with Q K^T, the
// online softmax and P^T; and two value warpgroups with half of the value dims each. Scores of a K tile are computed
// while the values of the one before are added.
//
// The work is divided by stream-K (decode/stream_k.cuh) in units of one K tile. With more than 64 rows, neighbouring
// CTAs share a tile: each has 64 of its rows, and the second finds the keys in L2.
// Caches whose tokens several devices take in turn: see common/problem.cuh.
#define HAS_STRIDED_KEYS 1
#include "hopper/latent_join.cuh"
#include "hopper/latent_loader.cuh"
#include "hopper/latent_scores.cuh"
#include "hopper/latent_values.cuh"

namespace latent {

static __device__ __forceinline__ void run_cta(const AttentionParameters &params, const TensorMap &keys) {
    Shared &shared = *(Shared *)dynamic_shared;
    Exchange &exchange = *(Exchange *)(dynamic_shared + EXCHANGE_OFFSET);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < CHUNKS; i++) {
            mbarrier_init(shared.full[i], 1);
            mbarrier_init(shared.empty[i], 4);
        }
        for (int i = 0; i < REST_STAGES; i++) {
            mbarrier_init(shared.rest_full[i], 1);
            mbarrier_init(shared.rest_empty[i], 4);
        }
        for (int i = 0; i < PROB_STAGES; i++) {
            mbarrier_init(shared.probs_full[i], 4);
            mbarrier_init(shared.probs_empty[i], 4 * VALUE_WARPGROUPS);
        }
        for (int i = 0; i < PIECES; i++) {
            mbarrier_init(shared.piece_full[i], 1);
            mbarrier_init(shared.piece_empty[i], SCHEDULER_WARP + LOADERS);
        }
        mbarrier_init(shared.factor_full, 4);
        mbarrier_init(shared.factor_empty, 4 * VALUE_WARPGROUPS);
        hopper::fence_mbarrier_init();
        hopper::prefetch_tensor_map(keys);
    }
    // Device-side lengths may be written by the preceding kernel. If the host knows them, the work is found before it
    // has ended.
    if (!params.stream_k.work_total) grid_dependency_wait();
    CtaRange cta_range = find_cta_range(params, exchange.division.scan, exchange.division.cta_range);
    __syncthreads();
    unsigned base = shared_address(dynamic_shared);
    if (warp >= SCHEDULER_WARP) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == SCHEDULER_WARP) {
            run_scheduler(shared, {params, cta_range}, lane);
        } else {
            // Keys per box: a K tile's, or what these and pages are both made of.
            int box_keys = params.block_size ? min(KEYS, params.block_size & -params.block_size) : KEYS;
            Loader loader = {params, keys, shared, base, warp - LOADER_WARP, lane, __ffs(box_keys) - 1};
            loader.run();
        }
    } else if (warp >= SCORE_WARP) {
        hopper::setmaxnreg_inc<SCORE_REGISTERS>();
        ScoreWarpgroup common = {params, shared, exchange, base, warp - SCORE_WARP, lane};
        if constexpr (ROWS == 16) {
            FewRows rows = {common};
            run_scores(rows);
        } else {
            ManyRows rows = {common};
            run_scores(rows);
        }
    } else {
        hopper::setmaxnreg_inc<VALUE_REGISTERS>();
        ValueWarpgroup values = {params, shared, base, warp / 4, warp % 4, lane};
        values.run();
    }
}

} // namespace latent

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ TensorMap keys) {
    latent::run_cta(params, keys);
}

extern "C" __global__ void __launch_bounds__(latent::JOIN_THREADS)
    join(const __grid_constant__ AttentionParameters params) {
    asm volatile("griddepcontrol.launch_dependents;");
    int rows = TILE_ROWS / gridDim.y, first_row = blockIdx.y * rows, groups = latent::JOIN_GROUPS / rows;
    JoinedRows joined = begin_join(params, blockIdx.x, first_row);
    if (joined.is_split())
        latent::join_row(params, joined, first_row + threadIdx.x / (latent::JOIN_GROUP * groups), groups);
    end_join(params, joined);
}
