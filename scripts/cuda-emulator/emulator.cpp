// Runs one kernel, whose translated source is included here: see README.md.
#include "emulator.h"
#include "element.cuh"
#include "copy.cuh"
#include "switch.h"
#if defined(MASK_MAP)
#include "mask_map.cu"
#define ENTRY mask_map(*attention, *parameters)
#define THREADS 256
#define SHARED_BYTES 16
#elif defined(HOPPER)
#include "hopper.cuh"
#include "prefill_sm90.cu"
#define ENTRY prefill(*attention, *parameters, *maps)
#else
#include "prefill_sm80.cu"
#define ENTRY prefill(*attention, *parameters)
#endif
#ifdef HOPPER
MB mbs[128];
#endif
Fiber *cur;
Dim blockIdx, gridDim, blockDim;
unsigned char *emu_shared;
unsigned emu_shared_size;
int emu_late;
WarpState warps[64];
BarState bars[16];
static void *main_sp;
static Fiber fibers[1024];
static const AttentionParameters *attention;
static const PrefillParameters *parameters;
static const TensorMaps *maps;
void emu_wait(volatile int *cond, int val) {
    cur->cond = cond;
    cur->val = val;
    Fiber *me = cur;
    msl_switch_stack(&me->sp, main_sp);
}
static void entry() {
    ENTRY;
    cur->done = true;
    Fiber *me = cur;
    msl_switch_stack(&me->sp, main_sp);
    abort();
}
// 0, or 1 where all threads of a block wait for each other.
extern "C" int run(const AttentionParameters *p, const PrefillParameters *t, const TensorMaps *m, unsigned grid, int late, unsigned seed) {
    attention = p;
    parameters = t;
    maps = m;
    emu_late = late;
    std::mt19937 rng(seed);
    gridDim = {grid, 1, 1};
    blockDim = {THREADS, 1, 1};
    const size_t STACK = 256 << 10;
    static unsigned char *stacks = (unsigned char *)aligned_alloc(4096, STACK * 1024);
    emu_shared_size = SHARED_BYTES;
    std::vector<unsigned char> mem(SHARED_BYTES + 1024);
    emu_shared = (unsigned char *)(((uintptr_t)mem.data() + 1023) / 1024 * 1024);
    for (unsigned b = 0; b < grid; b++) {
        blockIdx = {b, 0, 0};
        for (unsigned i = 0; i < SHARED_BYTES; i++) emu_shared[i] = 0xff; // NaN
        memset((void *)warps, 0, sizeof warps);
        memset((void *)bars, 0, sizeof bars);
        for (int i = 0; i < THREADS; i++) {
            Fiber &f = fibers[i];
            f.tid = i;
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
        int left = THREADS;
        long stuck = 0;
        while (left) {
            bool ran = false;
            int warp0 = rng() % (THREADS / 32);
            for (int k = 0; k < THREADS; k++) {
                Fiber &f = fibers[(k + 32 * warp0) % THREADS];
                while (!f.done && (!f.cond || *f.cond != f.val)) {
                    f.cond = nullptr;
                    cur = &f;
                    msl_switch_stack(&main_sp, f.sp);
                    ran = true;
                    if (f.done) left--;
                }
                // a warp at a time: stay in it while it makes progress
                if ((k & 31) == 31) {
                    int base = (k - 31 + 32 * warp0) % THREADS;
                    bool again = false;
                    if (rng() % 4)
                        for (int l = 0; l < 32; l++) {
                            Fiber &g = fibers[base + l];
                            if (!g.done && (!g.cond || *g.cond != g.val)) again = true;
                        }
                    if (again) k -= 32;
                }
            }
            if (!ran && ++stuck > 2) {
                fprintf(stderr, "deadlock in block %u\n", b);
                return 1;
            }
            if (ran) stuck = 0;
        }
    }
    return 0;
}
