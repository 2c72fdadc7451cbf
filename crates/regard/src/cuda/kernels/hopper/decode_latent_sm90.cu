// Decode attention on Hopper over a latent cache (MLA): the values are the first dims of the keys.
//
// A K tile is loaded once, by TMA, and serves both products.
//
// 16 rows are the N of wgmma: S^T = K Q^T has a row of keys and O^T = V^T P^T a row of value dims, and both take their
// first operand from the K tile as it is in shared memory. As the M, 16 heads would cost as much as 64.
//
// 64 rows are the M: S = Q K^T and O = P V. Two warpgroups take K tiles in turn (ping-pong): each has the scores of its
// own K tiles, and the outputs of half of the value dims over all of them. Softmax of one K tile runs beside products
// of the other.
//
// Warp-specialized: a scheduler warp, which finds the CTA's work; three loader warps; two value warpgroups with half of
// the value dims each; and with 16 rows or over records one or two score warpgroups, with Q K^T, the online softmax and
// P. Scheduler and loaders combine split tiles when they have no more work.
//
// With lists of keys (LISTS), the rows of a tile are heads of one token, and loaders copy the listed keys one by one;
// the scheduler warp is one of them.
//
// Over records of mla656 (CACHE), by lists or not, rows are the N of wgmma, also 64 of them: codes stay in shared
// memory, and consumers convert them to operands in registers (records_*.cuh).
//
// The work is divided by stream-K (decode/stream_k.cuh) in units of one K tile. A tile of 128 rows belongs to a cluster
// of two CTAs: each has 64 of its rows, and loads half of every K tile for both, by TMA multicast.
// Caches whose tokens several devices take in turn: see common/problem.cuh.
#define HAS_STRIDED_KEYS 1
#include "hopper/latent_combine.cuh"
#if CACHE
#include "hopper/records_loader.cuh"
#elif LISTS
#include "hopper/latent_gather.cuh"
#endif
#include "hopper/latent_loader.cuh"
#if CACHE
#include "hopper/records_scores.cuh"
#include "hopper/records_values.cuh"
#elif TILE_ROWS == 16
#include "hopper/latent_rows_16.cuh"
#else
#include "hopper/latent_rows_64.cuh"
#endif

namespace latent {

// Finds the range of work of the CTA, for the scheduler warp; the other warps help with much work.
//
// Device-side lengths may be written by the preceding kernel. If the host knows them, or they were scheduled before,
// the work is found before it has ended.
static __device__ __forceinline__ void find_work(WorkIterator<KEYS, false> &work, ScheduledCta &scheduled, int warp,
                                                 int lane) {
    const AttentionParameters &params = work.params;
    bool scheduler = warp == SCHEDULER_WARP;
    if (is_scheduled(params)) {
        if (!scheduler) return;
        load_scheduled(params, scheduled, lane);
        work.range = scheduled.range;
        work.first = scheduled.sequence;
        work.knows_sequence = true;
        if (params.block_size) touch_pages(params, scheduled, lane);
        return;
    }
    if (!params.stream_k.work_total || reads_lengths(params)) {
        grid_dependency_wait();
        if (!LISTS) prefetch_lengths(params);
    }
    if (scheduler || !warps_find_range(params))
        work.range = find_cta_range(params, *(RangeScratch *)(dynamic_shared + QUERY_OFFSET));
}

// `rest`: the dims of keys that are not values, which may be in a tensor of their own; of records, how they are stored.
template <class Rest> static __device__ __forceinline__ void run_cta(const AttentionParameters &params,
                                                                     const TensorMap &keys, const Rest &rest) {
    Shared &shared = *(Shared *)dynamic_shared;
    Exchange &exchange = *(Exchange *)(dynamic_shared + EXCHANGE_OFFSET);
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) {
        for (int i = 0; i < CHUNKS; i++) {
            mbarrier_init(shared.full[i], LOADED_ARRIVALS);
            mbarrier_init(shared.empty[i], RELEASE_ARRIVALS);
        }
        for (int i = 0; i < REST_STAGES; i++) {
            mbarrier_init(shared.rest_full[i], REST_ARRIVALS);
            mbarrier_init(shared.rest_empty[i], RELEASE_ARRIVALS);
        }
        for (int i = 0; i < PROB_STAGES; i++) {
            mbarrier_init(shared.probs_full[i], 4);
            mbarrier_init(shared.probs_empty[i], 4 * VALUE_WARPGROUPS);
        }
#if LISTS
        mbarrier_init(shared.addresses_full, FINDERS);
        mbarrier_init(shared.addresses_empty, VALUE_WARPGROUPS);
#endif
        for (int i = 0; i < PIECES; i++) {
            mbarrier_init(shared.piece_full[i], 1);
            mbarrier_init(shared.piece_empty[i], SCHEDULER_WARP + LOADERS);
        }
        mbarrier_init(shared.factor_full, 4);
        mbarrier_init(shared.factor_empty, 4 * VALUE_WARPGROUPS);
        for (int i = 0; i < VALUE_WARPGROUPS; i++) mbarrier_init(shared.products_done[i], 4);
        mbarrier_init(shared.max_full, 4);
        shared.first_part.more = false;
        shared.last_part = -1;
        hopper::fence_mbarrier_init();
#if !LISTS && !CACHE
        hopper::prefetch_tensor_map(keys);
        hopper::prefetch_tensor_map(rest);
#endif
    }
    touch_parameters(params);
#if LISTS
    touch_lists(params);
#endif
#if CACHE
    touch_cache(rest);
#endif
    WorkIterator<KEYS, false> work = {params, {}, {}, false};
    find_work(work, exchange.scheduled, warp, lane);
#if CACHE
    if (threadIdx.x == 0) exchange.key_scale_at = (const float *)rest.key_scales;
#endif
    if (MULTICAST) {
        hopper::cluster_sync();
    } else {
        __syncthreads();
    }
    unsigned base = shared_address(dynamic_shared);
    if (warp >= SCHEDULER_WARP) {
        hopper::setmaxnreg_dec<PRODUCER_REGISTERS>();
#if LISTS && !CACHE
        Gatherer loader = {{params, shared, base, warp - LOADER_WARP, lane}, rest, exchange.addresses};
        if (warp == SCHEDULER_WARP) {
            loader.run_scheduler(work);
        } else {
            loader.run();
        }
#else
        if (warp == SCHEDULER_WARP) {
            run_scheduler(shared, work, lane, [](const Piece &) {});
        } else {
            int index = warp - LOADER_WARP;
#if CACHE
            if (UNLIKELY(rest.key_format == CacheFormat::E4M3))
                RecordLoader<true>{{params, shared, base, index, lane}}.run();
            else
                RecordLoader<false>{{params, shared, base, index, lane}}.run();
#else
            // Keys per box: a K tile's, or what these and pages are both made of.
            int box_keys = params.block_size ? min(KEYS, params.block_size & -params.block_size) : KEYS;
            const TensorMap &map = index == VALUE_WARPGROUPS ? rest : keys;
            Loader{params, map, shared, base, index, lane, __ffs(box_keys) - 1}.run();
#endif
        }
#endif
    } else {
        run_consumer(params, shared, exchange, warp, lane);
    }
    if (!is_counted(params)) {
        __syncthreads();
        if (warp >= SCHEDULER_WARP) combine_parts(params, shared);
    }
    // The other CTA may still load into this one's shared memory, or arrive at its barriers.
    if (MULTICAST) hopper::cluster_sync();
}

} // namespace latent

#if CACHE
#define CACHE_PARAMETER , const __grid_constant__ CacheParameters cache
#else
#define CACHE_PARAMETER
#endif
extern "C" __global__ void __cluster_dims__(CTAS_PER_TILE, 1, 1) __launch_bounds__(THREADS, 1)
#if CACHE && LISTS
    decode(const __grid_constant__ ListedParameters call CACHE_PARAMETER) {
    latent::run_cta(call.attention, TensorMap(), cache);
}
#elif CACHE
    decode(const __grid_constant__ AttentionParameters params CACHE_PARAMETER) {
    latent::run_cta(params, TensorMap(), cache);
}
#elif LISTS
    decode(const __grid_constant__ ListedParameters call, const __grid_constant__ KvTensor rest) {
    latent::run_cta(call.attention, TensorMap(), rest);
}
#else
    decode(const __grid_constant__ AttentionParameters params, const __grid_constant__ TensorMap keys,
           const __grid_constant__ TensorMap rest) {
    latent::run_cta(params, keys, rest);
}
#endif

#if !LISTS
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    schedule_ctas(const __grid_constant__ AttentionParameters params) {
    write_schedule(params);
}
#endif

extern "C" __global__ void __launch_bounds__(latent::COMBINE_THREADS, latent::COMBINE_CTAS_PER_SM)
#if LISTS
    combine(const __grid_constant__ ListedParameters call) {
    const AttentionParameters &params = call.attention;
#else
    combine(const __grid_constant__ AttentionParameters params) {
#endif
    launch_dependents();
    latent::CombineShape shape(gridDim.y);
    int first_row = blockIdx.y >> shape.slices << shape.rows, slice = blockIdx.y & (1 << shape.slices) - 1;
    SplitTile split = find_tile(params, blockIdx.x, first_row);
    unsigned &word = ((latent::CombineShared *)dynamic_shared)->word;
    bool knows_parts = params.stream_k.work_total;
    if (!knows_parts) await_parts(params, split, word);
    if (split.is_split()) {
        latent::combine_slice(params, split, shape, first_row, slice);
    } else if (knows_parts) {
        await_parts(params, split, word);
    }
    end_combine(split);
}
