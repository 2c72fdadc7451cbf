// The schedule of a step: the work range of every CTA of `decode`, computed by one launch for all layers that have the
// same lengths. `decode` reads it before the preceding kernel has ended.
//
// So the launch that writes it never lets a dependent kernel start early: every later one starts after it has ended.
#pragma once
#include "common/paging.cuh"
#include "decode/decode_combine.cuh"
#include "decode/decode_tile.cuh"
#include "decode/stream_k.cuh"

constexpr int SCHEDULE_THREADS = 128;
static_assert(sizeof(ScheduledCta) == SCHEDULED_BYTES, "the host reserves this many bytes per CTA");

static __device__ __forceinline__ ScheduledCta *scheduled_cta(const AttentionParameters &params) {
    return (ScheduledCta *)(params.stream_k.schedule + (unsigned long long)part_index() * SCHEDULED_BYTES);
}

// Brings this CTA's entry to shared memory. Read past L1, which may still hold an earlier schedule. A warp calls this.
static __device__ __forceinline__ void load_scheduled(const AttentionParameters &params, ScheduledCta &shared,
                                                      int lane) {
    static_assert(SCHEDULED_BYTES == 32 * 4, "a word per lane");
    ((int *)&shared)[lane] = __ldcg((const int *)scheduled_cta(params) + lane);
    __syncwarp();
}

// Brings the page-table entries of a CTA's keys into L1 while its first tile is set up, a sector of 8 per thread.
static __device__ __forceinline__ void touch_pages(const AttentionParameters &params, const ScheduledCta &cta,
                                                   int thread) {
    int page = cta.first_page + 8 * thread;
    [[maybe_unused]] int unused; // the load only fills the cache
    if (page < cta.end_page)
        asm volatile("ld.global.ca.b32 %0, [%1];"
                     : "=r"(unused)
                     : "l"(page_table(params, cta.range.cursor.sequence) + page));
}

static __device__ __forceinline__ void write_schedule(const AttentionParameters &params) {
    __shared__ RangeScratch scratch;
    wait_for_preceding();
    CtaRange cta_range = find_cta_range(params, scratch);
    if (threadIdx.x != 0) return;
    ScheduledCta &to = *scheduled_cta(params);
    to.range = cta_range;
    to.first_page = to.end_page = 0;
    if (cta_range.begin < cta_range.end) {
        to.sequence = load_sequence(params, cta_range.cursor.sequence);
        SequenceTiles tiles = sequence_tiles(params, to.sequence, cta_range.costs);
        long long at = cta_range.begin - cta_range.cursor.before;
        int unit = (int)max(at - divide(at, tiles.cost) * tiles.cost - cta_range.costs.start, 0ll);
        long long first = (long long)(tiles.first_unit + unit) << params.stream_k.work_unit_shift,
                  end = first + ((cta_range.end - cta_range.begin) << params.stream_k.work_unit_shift);
        if (params.block_size && first < to.sequence.kv_len) {
            to.first_page = page_index(params, (int)first);
            to.end_page = page_index(params, (int)min(end, (long long)to.sequence.kv_len) - 1) + 1;
        }
    }
    // Kernels that start when this one has ended read it without waiting for the kernels in between.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
