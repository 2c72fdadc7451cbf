// Runs one kernel, whose translated source is included here: see README.md.
#include "emulator.h"
#include "common/element.cuh"
#include "common/copy.cuh"
#include "switch.h"
#if defined(MASK_MAP)
#include "prefill/mask_map.cu"
#define ENTRY mask_map(*attention, *parameters)
#define THREADS 256
#define SHARED_BYTES 16
#elif defined(HOPPER)
#include "hopper/hopper.cuh"
#include HOPPER
#define ENTRY prefill(*attention, *parameters, *maps)
#else
#include "prefill/prefill_sm80.cu"
#define ENTRY prefill(*attention, *parameters)
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
// What kernels find under these names is the block's of the fiber that runs.
static void enter(Block &block) {
    blockIdx = block.index;
    emu_shared = block.shared;
    warps = block.warps;
    bars = block.bars;
}
static void begin(Block &block, unsigned number, unsigned char *shared) {
    block.index = {number, 0, 0};
    block.shared = shared;
    memset(shared, 0xff, SHARED_BYTES); // NaN
    memset((void *)block.warps, 0, sizeof block.warps);
    memset((void *)block.bars, 0, sizeof block.bars);
}
static bool ready(const Fiber &f) { return !f.done && (!f.cond || *f.cond != f.val); }
// 0, or 1 where all threads of a cluster wait for each other.
extern "C" int run(const AttentionParameters *p, const PrefillParameters *t, const TensorMaps *m, unsigned clusters, int late, unsigned seed) {
    attention = p;
    parameters = t;
    maps = m;
    emu_late = late;
    std::mt19937 rng(seed);
    gridDim = {clusters * CLUSTER_SIZE, 1, 1};
    blockDim = {THREADS, 1, 1};
    const int ALL = THREADS * CLUSTER_SIZE;
    const size_t STACK = 256 << 10, APART = (SHARED_BYTES + 1023) / 1024 * 1024;
    static unsigned char *stacks = (unsigned char *)aligned_alloc(4096, STACK * 1024);
    emu_shared_size = SHARED_BYTES;
    std::vector<unsigned char> mem(APART * CLUSTER_SIZE + 1024);
    unsigned char *shared = (unsigned char *)(((uintptr_t)mem.data() + 1023) / 1024 * 1024);
    for (unsigned c = 0; c < clusters; c++) {
        for (unsigned b = 0; b < CLUSTER_SIZE; b++) begin(blocks[b], c * CLUSTER_SIZE + b, shared + b * APART);
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
                fprintf(stderr, "deadlock in block %u\n", c * CLUSTER_SIZE);
                return 1;
            }
            if (ran) stuck = 0;
        }
    }
    return 0;
}
