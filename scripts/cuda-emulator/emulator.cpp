// Runs one kernel, whose translated source is included here: see README.md.
#include "emulator.h"
#include "common/element.cuh"
#include "common/copy.cuh"
#include "switch.h"
#include "launch.h"
#ifndef CACHE
#define CACHE 0
#endif
#ifndef LISTS
#define LISTS 0
#endif
#if LISTS
#define CALL *launch->listed
#else
#define CALL *launch->attention
#endif
#if CACHE
#define AND_CACHE , *launch->cache
#else
#define AND_CACHE
#endif
#if defined(DECODE_LATENT)
#include "hopper/decode_latent_sm90.cu"
#undef THREADS
#undef SHARED_BYTES
#elif defined(DECODE_WGMMA)
#include "hopper/hopper.cuh"
#include "hopper/decode_wgmma_sm90.cu"
#undef THREADS
#undef SHARED_BYTES
#elif defined(DECODE)
#include "decode/decode.cu"
#elif defined(DECODE_PAGES)
#include "decode/decode_pages.cu"
#elif defined(APPEND)
#include "utility/append.cu"
#define THREADS 256
#define SHARED_BYTES 16
#elif defined(WIDEN)
#include "utility/widen.cu"
#elif defined(MASK_MAP)
#include "prefill/mask_map.cu"
#define THREADS 256
#define SHARED_BYTES 16
#elif defined(COMBINE_SPLITS)
#include "prefill/combine_splits.cu"
#define SHARED_BYTES 16
#elif defined(HOPPER)
#include "hopper/hopper.cuh"
#include HOPPER
#else
#include "prefill/prefill_sm80.cu"
#endif
// These kernels have their threads and shared memory from the launch.
#if PREFIX
#undef THREADS
#undef SHARED_BYTES
#endif
#if defined(DECODE) || defined(DECODE_PAGES) || defined(DECODE_WGMMA) || defined(DECODE_LATENT) || defined(WIDEN) || PREFIX
#define THREADS ((int)launch->threads)
#define SHARED_BYTES launch->shared_bytes
#endif
Fiber *cur;
Dim blockIdx, gridDim, blockDim;
unsigned char *emu_shared;
unsigned emu_shared_size;
int emu_late;
WarpState *warps;
BarState *bars;
BarState cluster_bar;
Block blocks[CLUSTER_SIZE];
static void *main_sp;
static Fiber fibers[1024];
static const EmulatedLaunch *launch;
// The thread that runs, from the kernel's first line to its last.
static void call_kernel() {
#if defined(DECODE_LATENT)
    if (launch->combines) return combine(CALL);
#if !LISTS
    if (launch->schedules) return schedule_ctas(*launch->attention);
#endif
#if CACHE
    decode(CALL AND_CACHE);
#elif LISTS
    decode(CALL, *launch->rest);
#else
    decode(*launch->attention, launch->maps->key, *launch->rest_map);
#endif
#elif defined(DECODE) || defined(DECODE_WGMMA)
#if !LISTS
    if (launch->schedules) return schedule_ctas(*launch->attention);
#endif
#if TILE_ROWS > 8 && CACHE != 4 && !LISTS
    if (launch->combines) return combine(*launch->attention);
#endif
#if CACHE == 4
    decode(CALL AND_CACHE, *launch->rest);
#else
    decode(CALL AND_CACHE);
#endif
#elif defined(DECODE_PAGES)
    decode(CALL);
#elif defined(APPEND)
    append(*launch->append);
#elif defined(WIDEN)
    if (launch->entry == EmulatedLaunch::WIDEN_UNITS) return widen_units(*launch->attention, *launch->widening, *launch->cache);
    if (launch->entry == EmulatedLaunch::WIDEN_ROUNDED) return widen_rounded(*launch->attention, *launch->widening, *launch->cache);
    widen(*launch->attention, *launch->widening, *launch->cache);
#elif defined(MASK_MAP)
    mask_map(*launch->attention, *launch->prefill);
#elif defined(COMBINE_SPLITS)
    combine_splits(*launch->attention, *launch->prefill);
#elif defined(HOPPER) && !PREFIX
    prefill(*launch->attention, *launch->prefill, *launch->maps AND_CACHE);
#elif PREFIX
    if (launch->entry == EmulatedLaunch::SCHEDULE) return schedule(*launch->attention, *launch->prefix);
    if (launch->entry == EmulatedLaunch::MERGE_PREFIX) return merge_prefix(*launch->attention, *launch->prefix);
#ifdef HOPPER
    prefix(*launch->attention, *launch->prefix, launch->maps->key, launch->maps->value);
#else
    prefix(*launch->attention, *launch->prefix);
#endif
#else
    prefill(*launch->attention, *launch->prefill AND_CACHE);
#endif
}
void emu_wait(volatile int *cond, int val) {
    cur->cond = cond;
    cur->val = val;
    Fiber *me = cur;
    msl_switch_stack(&me->sp, main_sp);
}
static void entry() {
    call_kernel();
    cur->done = true;
    Fiber *me = cur;
    msl_switch_stack(&me->sp, main_sp);
    abort();
}
// Points these names, which kernels use, at the block of the fiber that runs.
static void enter(Block &block) {
    blockIdx = block.index;
    emu_shared = block.shared;
    warps = block.warps;
    bars = block.bars;
}
static void begin(Block &block, unsigned number, unsigned char *shared) {
    block.index = {number % gridDim.x, number / gridDim.x, 0};
    block.shared = shared;
    memset(shared, 0xff, SHARED_BYTES); // NaN
    memset((void *)block.warps, 0, sizeof block.warps);
    memset((void *)block.bars, 0, sizeof block.bars);
}
static bool ready(const Fiber &f) { return !f.done && (!f.cond || *f.cond != f.val); }
// 0, or 1 if all threads of a cluster wait for each other.
extern "C" int run(const EmulatedLaunch *what) {
    launch = what;
    emu_late = launch->copies_late;
    std::mt19937 rng(launch->seed);
#ifdef DECODE_LATENT
    // `combine` and `schedule_ctas` have no clusters, and of decode kernels the launch counts blocks.
    const unsigned size = launch->combines || launch->schedules ? 1 : CLUSTER_SIZE, across = launch->blocks[0] / size;
#else
    const unsigned size = CLUSTER_SIZE, across = launch->blocks[0];
#endif
    gridDim = {across * size, launch->blocks[1], 1};
    blockDim = {(unsigned)THREADS, 1, 1};
    const unsigned clusters = across * launch->blocks[1];
    const int ALL = THREADS * size;
    const size_t STACK = 256 << 10, APART = (SHARED_BYTES + 1023) / 1024 * 1024;
    static unsigned char *stacks = (unsigned char *)aligned_alloc(4096, STACK * 1024);
    if (ALL > 1024) abort();
    emu_shared_size = SHARED_BYTES;
    std::vector<unsigned char> mem(APART * CLUSTER_SIZE + 1024);
    unsigned char *shared = (unsigned char *)(((uintptr_t)mem.data() + 1023) / 1024 * 1024);
    for (unsigned c = 0; c < clusters; c++) {
        for (unsigned b = 0; b < size; b++) begin(blocks[b], c * size + b, shared + b * APART);
        cluster_bar = {};
        for (int i = 0; i < ALL; i++) {
            Fiber &f = fibers[i];
            f.tid = i % THREADS;
            f.block = &blocks[i / THREADS];
            f.done = false;
            f.cond = nullptr;
            f.open.clear();
            f.groups.clear();
            void **sp = (void **)(stacks + STACK * (i + 1)) - 2; // aligned so that entry sees a call
            *sp = (void *)entry;
            sp -= 6;
            memset(sp, 0, 48);
            f.sp = sp;
        }
        int left = ALL;
        long stuck = 0;
        while (left) {
            bool ran = false;
            int warp0 = rng() % (ALL / 32);
            for (int k = 0; k < ALL; k++) {
                Fiber &f = fibers[(k + 32 * warp0) % ALL];
                while (ready(f)) {
                    f.cond = nullptr;
                    cur = &f;
                    enter(*f.block);
                    msl_switch_stack(&main_sp, f.sp);
                    ran = true;
                    if (f.done) left--;
                }
                // a warp at a time: stay in it while it makes progress
                if ((k & 31) == 31) {
                    int base = (k - 31 + 32 * warp0) % ALL;
                    bool again = false;
                    if (rng() % 4)
                        for (int l = 0; l < 32; l++) again |= ready(fibers[base + l]);
                    if (again) k -= 32;
                }
            }
            if (!ran && ++stuck > 2) {
                fprintf(stderr, "deadlock in block %u\n", c * size);
                return 1;
            }
            if (ran) stuck = 0;
        }
    }
    return 0;
}
