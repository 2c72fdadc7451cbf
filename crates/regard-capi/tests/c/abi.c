/* The C interface as a C program sees it: compiled against include/regard.h and run by tests/abi.rs. Compiles as C and as C++. */
#include "expect.h"
#include "regard.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 2 sequences, 4 query heads over 2 key/value heads, head dim 16, at most 37 keys. */
enum { BATCH = 2, QUERY_HEADS = 4, KV_HEADS = 2, GROUP = QUERY_HEADS / KV_HEADS, DIM = 16, KEYS = 37, BLOCK = 4, TABLE = 10 };
enum { BLOCKS = BATCH * TABLE };

static float q_data[BATCH * 1 * QUERY_HEADS * DIM];
static float k_data[BATCH * KEYS * KV_HEADS * DIM];
static float v_data[BATCH * KEYS * KV_HEADS * DIM];
static float out_data[BATCH * 1 * QUERY_HEADS * DIM];
static float lse_data[BATCH * 1 * QUERY_HEADS];
static int32_t lens_data[BATCH] = {KEYS, 20};
static double expected_out[BATCH][QUERY_HEADS][DIM];
static double expected_lse[BATCH][QUERY_HEADS];

/* The parts of the formula besides the operands. */
typedef struct {
    double scale, softcap;
    const float *sinks, *slopes;
    int window_left; /* -1: unbounded */
} variant;

static float noise(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static regard_tensor tensor(void *data, int32_t dtype, uint32_t rank, int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t shape[] = {a, b, c, d};
    return regard_contiguous(data, dtype, rank, shape);
}

/* One query row per sequence, the last token of its keys. */
static void naive(const variant *v) {
    for (int b = 0; b < BATCH; b++) {
        int keys = lens_data[b], position = keys - 1;
        for (int h = 0; h < QUERY_HEADS; h++) {
            double scores[KEYS], most = v->sinks ? v->sinks[h] : -INFINITY, sum = 0;
            int first = v->window_left < 0 || position < v->window_left ? 0 : position - v->window_left;
            for (int j = first; j < keys; j++) {
                double dot = 0;
                for (int d = 0; d < DIM; d++)
                    dot += (double)q_data[(b * QUERY_HEADS + h) * DIM + d] *
                           k_data[((b * KEYS + j) * KV_HEADS + h / GROUP) * DIM + d];
                scores[j] = dot * v->scale;
                if (v->softcap > 0) scores[j] = v->softcap * tanh(scores[j] / v->softcap);
                if (v->slopes) scores[j] -= v->slopes[h] * abs(position - j);
                if (scores[j] > most) most = scores[j];
            }
            memset(expected_out[b][h], 0, sizeof expected_out[b][h]);
            if (v->sinks) sum = exp(v->sinks[h] - most);
            for (int j = first; j < keys; j++) {
                double p = exp(scores[j] - most);
                sum += p;
                for (int d = 0; d < DIM; d++)
                    expected_out[b][h][d] += p * v_data[((b * KEYS + j) * KV_HEADS + h / GROUP) * DIM + d];
            }
            for (int d = 0; d < DIM; d++) expected_out[b][h][d] /= sum;
            expected_lse[b][h] = most + log(sum);
        }
    }
}

static void expect_results(void) {
    double worst = 0;
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < QUERY_HEADS; h++) {
            for (int d = 0; d < DIM; d++)
                worst = fmax(worst, fabs(expected_out[b][h][d] - out_data[(b * QUERY_HEADS + h) * DIM + d]));
            worst = fmax(worst, fabs(expected_lse[b][h] - lse_data[b * QUERY_HEADS + h]));
        }
    /* f32 sums of at most 37 numbers of about 1. */
    EXPECT(worst < 1e-5);
}

/* Plans for the operands, runs, and compares with the naive computation. */
static void plan_and_run(const regard_operands *operands, const regard_device *device, const variant *v) {
    regard_plan *plan = NULL;
    EXPECT(regard_plan_for(operands, device, &plan) == REGARD_STATUS_OK);
    if (plan == NULL) return;
    EXPECT(strstr(regard_plan_explain(plan), "kernel") != NULL);
    size_t bytes = regard_plan_workspace_bytes(plan);
    EXPECT(regard_plan_zeroed_bytes(plan) == 0);
    EXPECT(regard_plan_load(plan) == REGARD_STATUS_OK);
    void *workspace = malloc(bytes);
    memset(out_data, 0xff, sizeof out_data);
    memset(lse_data, 0xff, sizeof lse_data);
    EXPECT(regard_plan_run(plan, operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
    naive(v);
    expect_results();

    memset(out_data, 0x7f, sizeof out_data);
    EXPECT_ERROR(regard_plan_run(plan, operands, workspace, bytes - 1, NULL), REGARD_STATUS_ARGUMENT, "`workspace` is");
    EXPECT_ERROR(regard_plan_run(plan, operands, NULL, bytes, NULL), REGARD_STATUS_ARGUMENT, "`workspace` is null");
    EXPECT_ERROR(regard_plan_run(plan, operands, NULL, 0, NULL), REGARD_STATUS_ARGUMENT, "`workspace` is 0 bytes long");
    EXPECT_ERROR(regard_plan_run(plan, operands, workspace, bytes, workspace), REGARD_STATUS_ARGUMENT, "`stream` is not null");
    EXPECT_ERROR(regard_plan_run(plan, NULL, workspace, bytes, NULL), REGARD_STATUS_ARGUMENT, "`operands` is null");
    EXPECT_ERROR(regard_plan_run(NULL, operands, workspace, bytes, NULL), REGARD_STATUS_ARGUMENT, "`plan` is null");
    for (size_t i = 0; i < sizeof out_data; i++) EXPECT(((unsigned char *)out_data)[i] == 0x7f);
    free(workspace);
    regard_plan_destroy(plan);
}

/* Operands that are wrong in one place. */
static void wrong(const regard_operands *good) {
    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    regard_tensor wide = *good->out;
    wide.shape[wide.rank - 1] = good->k->shape[good->k->rank - 1] + 1;
#define WRONG(change, words)                                                                                 \
    do {                                                                                                     \
        regard_operands operands = *good;                                                                    \
        regard_tensor t = *good->q;                                                                          \
        operands.q = &t;                                                                                     \
        change;                                                                                              \
        EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, words);           \
    } while (0)
    WRONG(operands.size = 0, "`operands.size` is 0; allowed: sizeof(regard_operands)");
    WRONG(operands.q = NULL, "`q` is null");
    WRONG(operands.v = NULL, "`v` is null");
    WRONG(operands.out = NULL, "`out` is null");
    WRONG(t.data = NULL, "`q.data` is null");
    WRONG(t.data = (char *)t.data + 1, "`q.data` is 0x");
    WRONG(t.dtype = 0, "`q.dtype` is 0");
    WRONG(t.dtype = 77, "`q.dtype` is 77");
    WRONG(t.rank = 0, "`q.rank` is 0");
    WRONG(t.rank = 6, "`q.rank` is 6; allowed: 1..=5");
    WRONG(t.rank = 3, "`q` is of shape");
    WRONG(t.shape[3] = -1, "`q.shape[3]` is -1");
    WRONG(t.shape[3] = INT64_MAX, "`q.shape` is");
    WRONG(t.strides[3] = 2, "`q.strides` is [0, 0, 0, 2] without REGARD_STRIDED; allowed: zeros, or that option");
    WRONG((t.options = REGARD_STRIDED, t.strides[3] = 2), "`q` is a view with strides");
    WRONG(t.options = REGARD_STRIDED, "`q` is a view with strides [0, 0, 0, 0]; allowed: an innermost stride of 1");
    WRONG(t.options = 4, "`q.options` is 0x4");
    WRONG(t = regard_at(t, 1), "`q.data` is 0x");
    WRONG(t = regard_at(t, UINT64_MAX - 3), "`q.offset` is 18446744073709551612");
    WRONG(t.reserved = 1, "`q.reserved` is 1; allowed: 0");
    WRONG(t.data = (void *)(UINTPTR_MAX - 15), "past the end of the address space");
    WRONG((t.options = REGARD_STRIDED, t.strides[3] = 1, t.strides[0] = INT64_MIN / 32), "past the end of the address space");
    WRONG(operands.options = 1u << 31, "`operands.options` is 0x80000000");
    WRONG(operands.softcap = 30, "`softcap` is 30 without REGARD_SOFTCAP");
    WRONG((operands.options = REGARD_SOFTCAP, operands.softcap = -1), "`softcap` is -1");
    WRONG((operands.options = REGARD_SCALE, operands.scale = NAN), "`scale` is NaN");
    WRONG(operands.window_left = 3, "`window_left` is 3 without REGARD_WINDOW_LEFT");
    WRONG((operands.options = REGARD_WINDOW_LEFT, operands.window_left = -1), "`window_left` is -1");
    WRONG(operands.chunk = 4, "`chunk` is 4 without REGARD_CHUNK");
    WRONG(operands.options = REGARD_CHUNK, "`chunk` is 0; allowed: 1..=2147483647");
    WRONG(operands.key_stride = 2, "`key_stride` is 2 without REGARD_KEY_POSITIONS");
    WRONG(operands.key_offsets = operands.kv_lens, "`key_offsets` is given without REGARD_KEY_POSITIONS");
    WRONG((operands.options = REGARD_KEY_POSITIONS, operands.key_stride = 1), "`q_offset` is not given");
    WRONG(operands.options = REGARD_KEY_POSITIONS | REGARD_Q_OFFSET, "`key_stride` is 0; allowed: 1..=32768");
    WRONG((operands.options = REGARD_Q_OFFSET, operands.q_offsets = operands.kv_lens), "`q_offsets` is given together");
    WRONG(operands.options = REGARD_VALUES_KEY_PREFIX, "in other memory; allowed: the first dims of `k`");
    WRONG((operands.options = REGARD_VALUES_KEY_PREFIX, operands.v = NULL, operands.out = &wide),
          "of values, without `v`; allowed: 1 or more, at most the head dim of `k`");
    WRONG(operands.lse = operands.out, "`lse`");
#undef WRONG
    regard_operands moved = *good;
    regard_tensor behind = regard_at(*good->q, 64);
    behind.data = (void *)((uintptr_t)behind.data - 64);
    moved.q = &behind;
    EXPECT(regard_problem_of(&moved, NULL, &problem) == REGARD_STATUS_OK);
    EXPECT_ERROR(regard_problem_of(good, NULL, NULL), REGARD_STATUS_ARGUMENT, "`problem` is null");
    problem.size = 0;
    EXPECT_ERROR(regard_problem_of(good, NULL, &problem), REGARD_STATUS_ARGUMENT, "`problem.size` is 0");

    lens_data[1] = KEYS + 1;
    problem.size = sizeof problem;
    EXPECT_ERROR(regard_problem_of(good, NULL, &problem), REGARD_STATUS_ARGUMENT, "`kv_lens[1]` is 38; allowed: 0..=37");
    lens_data[1] = 20;

    /* A struct of a later version of the header: zeros past the known fields are fine, anything else is not. */
    struct {
        regard_operands known;
        int64_t later;
    } longer;
    longer.known = *good;
    longer.known.size = sizeof longer;
    longer.later = 0;
    EXPECT(regard_problem_of(&longer.known, NULL, &problem) == REGARD_STATUS_OK);
    longer.later = 1;
    EXPECT_ERROR(regard_problem_of(&longer.known, NULL, &problem), REGARD_STATUS_ARGUMENT, "fields in use that this library");
}

static void decode(void) {
    regard_tensor q = tensor(q_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM);
    regard_tensor k = tensor(k_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM);
    regard_tensor v = tensor(v_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM);
    regard_tensor out = tensor(out_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM);
    regard_tensor lse = tensor(lse_data, REGARD_DTYPE_F32, 3, BATCH, 1, QUERY_HEADS, 0);
    regard_tensor lens = tensor(lens_data, REGARD_DTYPE_I32, 1, BATCH, 0, 0, 0);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out, operands.lse = &lse, operands.kv_lens = &lens;
    operands.options = REGARD_CAUSAL;
    variant plain = {0.25, 0, NULL, NULL, -1};
    plan_and_run(&operands, NULL, &plain);
    wrong(&operands);

    /* On one thread, and in scalar code. */
    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.threads = 1;
    plan_and_run(&operands, &device, &plain);
    device.machine = "scalar";
    plan_and_run(&operands, &device, &plain);

    /* Everything with a number. */
    float sinks[QUERY_HEADS] = {0.5f, -1, 2, 0}, slopes[QUERY_HEADS] = {0.5f, 0.25f, 0.125f, 0.0625f};
    regard_tensor sinks_tensor = tensor(sinks, REGARD_DTYPE_F32, 1, QUERY_HEADS, 0, 0, 0);
    regard_tensor slopes_tensor = tensor(slopes, REGARD_DTYPE_F32, 1, QUERY_HEADS, 0, 0, 0);
    regard_operands more = operands;
    more.options |= REGARD_SCALE | REGARD_SOFTCAP | REGARD_WINDOW_LEFT | REGARD_BATCH_INVARIANT;
    more.scale = 0.5f;
    more.softcap = 2;
    more.window_left = 11;
    more.sinks = &sinks_tensor;
    more.alibi_slopes = &slopes_tensor;
    variant capped = {0.5, 2, sinks, slopes, 11};
    plan_and_run(&more, NULL, &capped);

    /* The problem has all of that; a plan for a larger one runs it too. */
    regard_problem problem;
    memset(&problem, 0xff, sizeof problem);
    problem.size = sizeof problem;
    EXPECT(regard_problem_of(&more, NULL, &problem) == REGARD_STATUS_OK);
    EXPECT(problem.batch == BATCH && problem.query_heads == QUERY_HEADS && problem.kv_heads == KV_HEADS);
    EXPECT(problem.head_dim == DIM && problem.value_dim == DIM && problem.query_len == 1 && problem.kv_len == KEYS);
    EXPECT(problem.window_left == 11 && problem.window_right == 0 && problem.query_rows == 0 && problem.block_size == 0);
    EXPECT(problem.dtype == REGARD_DTYPE_F32 && problem.out_dtype == REGARD_DTYPE_F32 && problem.mask_dtype == 0);
    EXPECT(problem.options == (REGARD_CAUSAL | REGARD_WINDOW_LEFT | REGARD_SOFTCAP | REGARD_BATCH_INVARIANT | REGARD_ALIBI |
                               REGARD_SINKS | REGARD_LSE));
    problem.batch = 16;
    problem.kv_len = 4096;
    regard_plan *plan = NULL;
    EXPECT(regard_plan_create(&problem, NULL, &plan) == REGARD_STATUS_OK);
    size_t bytes = regard_plan_workspace_bytes(plan);
    void *workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, &more, workspace, bytes, NULL) == REGARD_STATUS_OK);
    naive(&capped);
    expect_results();
    EXPECT_ERROR(regard_plan_run(plan, &operands, workspace, bytes, NULL), REGARD_STATUS_ARGUMENT, "as planned");
    free(workspace);
    regard_plan_destroy(plan);
}

static void paged_decode(void) {
    /* One pool for keys and values, [blocks, 2, block_size, heads, dim]: each a view of it. Blocks of sequences alternate, backwards. */
    enum { PAGE = BLOCK * KV_HEADS * DIM };
    float *pool = (float *)malloc(sizeof(float) * BLOCKS * 2 * PAGE);
    for (int i = 0; i < BLOCKS * 2 * PAGE; i++) pool[i] = NAN;
    int32_t table[BATCH * TABLE];
    for (int b = 0; b < BATCH; b++)
        for (int i = 0; i < TABLE; i++) {
            int block = BLOCKS - 1 - (i * BATCH + b);
            table[b * TABLE + i] = i * BLOCK < lens_data[b] ? block : -1;
            for (int slot = 0; slot < BLOCK && i * BLOCK + slot < lens_data[b]; slot++) {
                size_t from = (size_t)(b * KEYS + i * BLOCK + slot) * KV_HEADS * DIM, to = (size_t)slot * KV_HEADS * DIM;
                memcpy(pool + (size_t)(block * 2 + 0) * PAGE + to, k_data + from, KV_HEADS * DIM * sizeof(float));
                memcpy(pool + (size_t)(block * 2 + 1) * PAGE + to, v_data + from, KV_HEADS * DIM * sizeof(float));
            }
        }
    /* Queries are ragged here: one row each. */
    int32_t rows[BATCH + 1] = {0, 1, 2};
    regard_tensor q = tensor(q_data, REGARD_DTYPE_F32, 3, BATCH, QUERY_HEADS, DIM, 0);
    regard_tensor k = tensor(pool, REGARD_DTYPE_F32, 4, BLOCKS, BLOCK, KV_HEADS, DIM);
    k.strides[0] = 2 * PAGE, k.strides[1] = KV_HEADS * DIM, k.strides[2] = DIM, k.strides[3] = 1;
    k.options = REGARD_STRIDED;
    regard_tensor v = k;
    v.data = pool + PAGE;
    regard_tensor out = tensor(out_data, REGARD_DTYPE_F32, 3, BATCH, QUERY_HEADS, DIM, 0);
    regard_tensor lse = tensor(lse_data, REGARD_DTYPE_F32, 2, BATCH, QUERY_HEADS, 0, 0);
    regard_tensor lens = tensor(lens_data, REGARD_DTYPE_I32, 1, BATCH, 0, 0, 0);
    regard_tensor blocks = tensor(table, REGARD_DTYPE_I32, 2, BATCH, TABLE, 0, 0);
    regard_tensor starts = tensor(rows, REGARD_DTYPE_I32, 1, BATCH + 1, 0, 0, 0);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out, operands.lse = &lse;
    operands.kv_lens = &lens, operands.block_table = &blocks, operands.cu_seqlens_q = &starts;
    variant plain = {0.25, 0, NULL, NULL, -1};
    plan_and_run(&operands, NULL, &plain);

    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    EXPECT(regard_problem_of(&operands, NULL, &problem) == REGARD_STATUS_OK);
    EXPECT(problem.block_size == BLOCK && problem.query_rows == BATCH);
    EXPECT(problem.options == (REGARD_RAGGED_QUERIES | REGARD_LSE));

    table[3] = BLOCKS;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`block_table[0, 3]` is 20; allowed: 0..20");
    operands.kv_lens = NULL;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`kv_lens` is missing");
    free(pool);
}

static void verify_with_masks(void) {
    /* The two queries as two rows of one sequence, a tree of siblings: each sees the prefix and itself, not the other. */
    int32_t tree_data[2] = {1, 2}, len = 22;
    float out_tree[2 * QUERY_HEADS * DIM], out_mask[2 * QUERY_HEADS * DIM];
    regard_tensor q = tensor(q_data, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, DIM);
    regard_tensor k = tensor(k_data, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, DIM);
    regard_tensor v = tensor(v_data, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, DIM);
    regard_tensor out = tensor(out_tree, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, DIM);
    regard_tensor lens = tensor(&len, REGARD_DTYPE_I32, 1, 1, 0, 0, 0);
    regard_tensor tree = tensor(tree_data, REGARD_DTYPE_I32, 3, 1, 2, 1, 0);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out, operands.kv_lens = &lens, operands.tree_mask = &tree;
    regard_plan *plan = NULL;
    EXPECT(regard_plan_for(&operands, NULL, &plan) == REGARD_STATUS_OK);
    size_t bytes = regard_plan_workspace_bytes(plan);
    void *workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, &operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
    free(workspace);
    regard_plan_destroy(plan);

    /* The same by a boolean mask of the whole call. */
    unsigned char kept[2][22];
    memset(kept, 1, sizeof kept);
    kept[0][21] = kept[1][20] = 0;
    regard_tensor mask = tensor(kept, REGARD_DTYPE_BOOL, 4, 1, 1, 2, 22);
    operands.tree_mask = NULL;
    operands.mask = &mask;
    out.data = out_mask;
    EXPECT(regard_plan_for(&operands, NULL, &plan) == REGARD_STATUS_OK);
    bytes = regard_plan_workspace_bytes(plan);
    workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, &operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
    free(workspace);
    regard_plan_destroy(plan);
    for (int i = 0; i < 2 * QUERY_HEADS * DIM; i++) EXPECT(fabsf(out_tree[i] - out_mask[i]) < 1e-6f);
}

typedef struct {
    regard_work work;
    void *data;
} task;

static void *do_task(void *given) {
    task *t = (task *)given;
    t->work(t->data);
    return NULL;
}

/* Threads of the caller's. */
static void on_threads(void *calls, size_t copies, regard_work work, void *work_data) {
    pthread_t threads[64];
    size_t started = 0;
    task t = {work, work_data};
    while (started < copies && started < 64 && pthread_create(&threads[started], NULL, do_task, &t) == 0) started++;
    for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    ++*(int *)calls;
}

static void callers_threads(void) {
    /* Large enough to be shared out. The same plan on other threads gives the same bits. */
    enum { LONG = 4096, LONG_DIM = 64, ELEMENTS = LONG * KV_HEADS * LONG_DIM };
    float *keys = (float *)malloc(sizeof(float) * ELEMENTS), *values = (float *)malloc(sizeof(float) * ELEMENTS);
    float queries[8 * LONG_DIM], results[3][8 * LONG_DIM];
    unsigned state = 7;
    for (int i = 0; i < ELEMENTS; i++) keys[i] = noise(&state), values[i] = noise(&state);
    for (int i = 0; i < 8 * LONG_DIM; i++) queries[i] = noise(&state);
    regard_tensor q = tensor(queries, REGARD_DTYPE_F32, 4, 1, 1, 8, LONG_DIM);
    regard_tensor k = tensor(keys, REGARD_DTYPE_F32, 4, 1, LONG, KV_HEADS, LONG_DIM);
    regard_tensor v = tensor(values, REGARD_DTYPE_F32, 4, 1, LONG, KV_HEADS, LONG_DIM);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v;
    int calls = 0;
    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.threads = 4;
    for (int i = 0; i < 3; i++) {
        /* The library's threads, then twice the caller's. */
        device.executor = i == 0 ? NULL : on_threads;
        device.executor_data = &calls;
        regard_tensor out = tensor(results[i], REGARD_DTYPE_F32, 4, 1, 1, 8, LONG_DIM);
        operands.out = &out;
        regard_plan *plan = NULL;
        EXPECT(regard_plan_for(&operands, &device, &plan) == REGARD_STATUS_OK);
        size_t bytes = regard_plan_workspace_bytes(plan);
        void *workspace = malloc(bytes);
        EXPECT(regard_plan_run(plan, &operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
        EXPECT(calls == i);
        EXPECT(memcmp(results[0], results[i], sizeof results[0]) == 0);
        free(workspace);
        regard_plan_destroy(plan);
    }
    free(keys);
    free(values);
}

typedef struct {
    const regard_plan *plan;
    const regard_operands *operands;
    int failed;
} runner;

/* Runs a plan a few times with separate outputs and workspace, and compares with the operands' outputs. */
static void *run_often(void *given) {
    runner *r = (runner *)given;
    float out_here[sizeof out_data / sizeof *out_data];
    regard_tensor out = *r->operands->out;
    out.data = out_here;
    regard_operands operands = *r->operands;
    operands.out = &out, operands.lse = NULL;
    size_t bytes = regard_plan_workspace_bytes(r->plan);
    void *workspace = malloc(bytes);
    for (int i = 0; i < 50; i++) {
        memset(out_here, 0xff, sizeof out_here);
        r->failed += regard_plan_run(r->plan, &operands, workspace, bytes, NULL) != REGARD_STATUS_OK;
        r->failed += memcmp(out_here, out_data, sizeof out_here) != 0;
    }
    /* Errors belong to the thread that made them. */
    operands.q = NULL;
    r->failed += regard_plan_run(r->plan, &operands, workspace, bytes, NULL) != REGARD_STATUS_ARGUMENT;
    r->failed += strstr(regard_last_error(), "`q` is null") == NULL;
    free(workspace);
    return NULL;
}

static void one_plan_on_many_threads(void) {
    regard_tensor q = tensor(q_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM);
    regard_tensor k = tensor(k_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM);
    regard_tensor v = tensor(v_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM);
    regard_tensor out = tensor(out_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out;
    regard_plan *plan = NULL;
    EXPECT(regard_plan_for(&operands, NULL, &plan) == REGARD_STATUS_OK);
    size_t bytes = regard_plan_workspace_bytes(plan);
    void *workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, &operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
    free(workspace);
    EXPECT_ERROR(regard_plan_run(plan, NULL, NULL, 0, NULL), REGARD_STATUS_ARGUMENT, "`operands` is null");
    pthread_t threads[4];
    runner runners[4];
    for (int i = 0; i < 4; i++) {
        runners[i].plan = plan, runners[i].operands = &operands, runners[i].failed = 0;
        EXPECT(pthread_create(&threads[i], NULL, run_often, &runners[i]) == 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        EXPECT(runners[i].failed == 0);
    }
    EXPECT(strstr(regard_last_error(), "`operands` is null") != NULL);
    regard_plan_destroy(plan);
}

/* The answer to any numbers in descriptors is a status: nothing crashes, and a plan that is made can be asked and freed. */
static void nonsense(void) {
    static const int64_t numbers[] = {0, 1, 2, 3, 4, 5, 16, 37, 64, 576, 577, -1, 70000, INT64_MAX, INT64_MIN, (int64_t)1 << 40};
    enum { NUMBERS = sizeof numbers / sizeof *numbers, TENSORS = 5, ROUNDS = 20000 };
    unsigned state = 3;
    int counts[8] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        regard_tensor tensors[TENSORS] = {
            tensor(q_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM),
            tensor(k_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM),
            tensor(v_data, REGARD_DTYPE_F32, 4, BATCH, KEYS, KV_HEADS, DIM),
            tensor(out_data, REGARD_DTYPE_F32, 4, BATCH, 1, QUERY_HEADS, DIM),
            tensor(lse_data, REGARD_DTYPE_F32, 3, BATCH, 1, QUERY_HEADS, 0),
        };
        regard_operands operands;
        memset(&operands, 0, sizeof operands);
        operands.size = sizeof operands;
        operands.q = &tensors[0], operands.k = &tensors[1], operands.v = &tensors[2];
        operands.out = &tensors[3], operands.lse = &tensors[4];
#define ANY (state = state * 1664525u + 1013904223u, (int)(state >> 16))
        for (int change = ANY % 4; change >= 0; change--) {
            /* The same number in the same place of several tensors, so that some of it fits together. */
            int64_t number = numbers[ANY % NUMBERS];
            int which = ANY, dimension = ANY % REGARD_MAX_RANK, field = ANY % 8;
            for (int i = 0; i < TENSORS; i++) {
                if (((which >> i) & 1) == 0) continue;
                if (field < 4) tensors[i].shape[dimension] = number;
                else if (field < 6) tensors[i].strides[dimension] = number, tensors[i].options = REGARD_STRIDED;
                else if (field == 6) tensors[i].dtype = (int32_t)number;
                else tensors[i].rank = (uint32_t)number;
            }
            operands.options ^= 1u << ANY % 9;
            if (ANY % 4 == 0) operands.q_offset = number;
            if (ANY % 4 == 0) operands.window_left = number;
        }
#undef ANY
        regard_plan *plan = NULL;
        regard_status status = regard_plan_for(&operands, NULL, &plan);
        EXPECT(status == REGARD_STATUS_OK || status == REGARD_STATUS_ARGUMENT);
        EXPECT((status == REGARD_STATUS_OK) == (plan != NULL));
        counts[status & 7]++;
        if (plan != NULL) EXPECT(regard_plan_workspace_bytes(plan) > 0 && regard_plan_explain(plan) != NULL);
        regard_plan_destroy(plan);
    }
    printf("nonsense: %d plans, %d argument errors\n", counts[REGARD_STATUS_OK], counts[REGARD_STATUS_ARGUMENT]);
    EXPECT(counts[REGARD_STATUS_OK] > ROUNDS / 100 && counts[REGARD_STATUS_ARGUMENT] > ROUNDS / 10);
}

static void refusals_and_devices(void) {
    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    problem.batch = 1, problem.query_heads = 32, problem.kv_heads = 8, problem.head_dim = 128;
    problem.query_len = 1, problem.kv_len = 4096, problem.dtype = REGARD_DTYPE_BF16;
    const char *reason = "";
    EXPECT(regard_can_implement(&problem, NULL, &reason) == REGARD_STATUS_OK && reason == NULL);
    EXPECT(regard_can_implement(&problem, NULL, NULL) == REGARD_STATUS_OK);

    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.machine = "a machine that does not exist";
    EXPECT_ERROR(regard_can_implement(&problem, &device, &reason), REGARD_STATUS_ARGUMENT, "`machine` is \"a machine that");
    EXPECT(reason == regard_last_error());
    EXPECT(regard_machine_facts(&device) == NULL);
    device.machine = "h200";
    EXPECT_ERROR(regard_can_implement(&problem, &device, &reason), REGARD_STATUS_ARGUMENT, "`device.machine` is \"h200\", which is no CPU");
    device.kind = REGARD_DEVICE_KIND_CUDA;
    EXPECT(regard_machine_facts(&device) != NULL && strstr(regard_machine_facts(&device), "sm_90") != NULL);
    /* A GPU that is not here: nothing runs on it, and the reason names it. */
    device.machine = NULL;
    device.ordinal = 1000;
    regard_plan *plan = (regard_plan *)&device;
    EXPECT(regard_plan_create(&problem, &device, &plan) != REGARD_STATUS_OK && plan == NULL);
    EXPECT(strstr(regard_last_error(), "NVIDIA") != NULL || strstr(regard_last_error(), "cuda:1000") != NULL);
    device.ordinal = 0;
    device.threads = 2;
    EXPECT_ERROR(regard_can_implement(&problem, &device, NULL), REGARD_STATUS_ARGUMENT, "`device.threads` is 2");
    device.kind = 9;
    EXPECT_ERROR(regard_can_implement(&problem, &device, NULL), REGARD_STATUS_ARGUMENT, "`device.kind` is 9");
    device.size = 3;
    EXPECT_ERROR(regard_can_implement(&problem, &device, NULL), REGARD_STATUS_ARGUMENT, "`device.size` is 3");

    problem.query_heads = 33;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`query_heads` is 33");
    problem.query_heads = 32, problem.head_dim = 577;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`head_dim` is 577");
    problem.head_dim = 128, problem.kv_len = -4;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`kv_len` is -4");
    problem.kv_len = 4096, problem.options = REGARD_SCALE;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`problem.options` is 0x20");
    problem.options = REGARD_RAGGED_KEYS, problem.block_size = 16;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`block_size` is 16 with REGARD_RAGGED_KEYS");
    EXPECT_ERROR(regard_can_implement(NULL, NULL, NULL), REGARD_STATUS_ARGUMENT, "`problem` is null");
    EXPECT_ERROR(regard_plan_create(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`plan` is null");
    EXPECT_ERROR(regard_plan_for(NULL, NULL, &plan), REGARD_STATUS_ARGUMENT, "`operands` is null");

    EXPECT_ERROR(regard_plan_load(NULL), REGARD_STATUS_ARGUMENT, "`plan` is null");
    EXPECT(regard_plan_zeroed_bytes(NULL) == 0);
    regard_plan_destroy(NULL);
    EXPECT(regard_plan_workspace_bytes(NULL) == 0);
    EXPECT(regard_plan_explain(NULL) == NULL);
    EXPECT(regard_machine_facts(NULL) != NULL && strstr(regard_machine_facts(NULL), "host (CPU") != NULL);
}

/* A plan for a GPU that is not here, for operands at made-up addresses, which are not read. */
static void plan_for_a_machine_by_name(void) {
    regard_tensor q = tensor((void *)0x1000000, REGARD_DTYPE_BF16, 3, 50, 8, 64, 0);
    regard_tensor k = tensor((void *)0x2000000, REGARD_DTYPE_BF16, 4, 100, 16, 2, 64);
    regard_tensor v = tensor((void *)0x3000000, REGARD_DTYPE_BF16, 4, 100, 16, 2, 64);
    regard_tensor out = tensor((void *)0x4000000, REGARD_DTYPE_BF16, 3, 50, 8, 64, 0);
    regard_tensor lens = tensor((void *)0x5000000, REGARD_DTYPE_I32, 1, 3, 0, 0, 0);
    regard_tensor starts = tensor((void *)0x6000000, REGARD_DTYPE_I32, 1, 4, 0, 0, 0);
    regard_tensor table = tensor((void *)0x7000000, REGARD_DTYPE_I32, 2, 3, 20, 0, 0);
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out;
    operands.kv_lens = &lens, operands.cu_seqlens_q = &starts, operands.block_table = &table;
    operands.options = REGARD_CAUSAL;
    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.kind = REGARD_DEVICE_KIND_CUDA;
    device.machine = "h200";
    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    EXPECT(regard_problem_of(&operands, &device, &problem) == REGARD_STATUS_OK);
    EXPECT(problem.batch == 3 && problem.query_rows == 50 && problem.kv_len == 320 && problem.block_size == 16);

    regard_plan *plan = NULL;
    regard_status status = regard_plan_create(&problem, &device, &plan);
    EXPECT((status == REGARD_STATUS_OK) == (plan != NULL));
    if (plan == NULL) {
        EXPECT(status == REGARD_STATUS_REFUSED && strstr(regard_last_error(), "h200") != NULL);
    } else {
        printf("%s", regard_plan_explain(plan));
        EXPECT(regard_plan_zeroed_bytes(plan) <= regard_plan_workspace_bytes(plan));
        EXPECT_ERROR(regard_plan_load(plan), REGARD_STATUS_REFUSED, "is not here");
        EXPECT_ERROR(regard_plan_run(plan, &operands, (void *)0x8000000, regard_plan_workspace_bytes(plan), NULL),
                     REGARD_STATUS_REFUSED, "is not here");
    }
    regard_plan_destroy(plan);

    k.data = (void *)0x2000001;
    EXPECT_ERROR(regard_problem_of(&operands, &device, &problem), REGARD_STATUS_ARGUMENT, "`k.data` is 0x2000001; allowed: a multiple of 2");
    k.data = (void *)0x4000000;
    EXPECT_ERROR(regard_problem_of(&operands, &device, &problem), REGARD_STATUS_ARGUMENT, "`out` is memory shared with `k`");
    device.context = &device;
    EXPECT_ERROR(regard_problem_of(&operands, &device, &problem), REGARD_STATUS_ARGUMENT, "`device.context` is not null");
}

static void appending(void) {
    regard_tensor key = tensor((void *)0x1000000, REGARD_DTYPE_BF16, 3, 6, 2, 64, 0);
    regard_tensor value = tensor((void *)0x2000000, REGARD_DTYPE_BF16, 3, 6, 2, 64, 0);
    regard_tensor key_pool = tensor((void *)0x3000000, REGARD_DTYPE_BF16, 4, 10, 16, 2, 64);
    regard_tensor value_pool = tensor((void *)0x4000000, REGARD_DTYPE_BF16, 4, 10, 16, 2, 64);
    regard_tensor table = tensor((void *)0x5000000, REGARD_DTYPE_I32, 2, 3, 5, 0, 0);
    regard_tensor lens = tensor((void *)0x6000000, REGARD_DTYPE_I32, 1, 3, 0, 0, 0);
    regard_append append;
    memset(&append, 0, sizeof append);
    append.size = sizeof append;
    append.key = &key, append.value = &value, append.key_pool = &key_pool, append.value_pool = &value_pool;
    append.block_table = &table, append.kv_lens = &lens;
    EXPECT_ERROR(regard_append_run(&append, NULL, &append), REGARD_STATUS_ARGUMENT, "`stream` is not null; allowed: null, because the device is a CPU");
    EXPECT(regard_append_load(NULL) == REGARD_STATUS_OK);

    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.kind = REGARD_DEVICE_KIND_CUDA;
    device.machine = "h200";
    EXPECT_ERROR(regard_append_load(&device), REGARD_STATUS_REFUSED, "is not here");
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_REFUSED, "is not here");
    append.query = &key;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`query` is given without rotary_table");
    append.query = NULL, append.options = REGARD_ROTARY_INTERLEAVED;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`append.options` is REGARD_ROTARY_INTERLEAVED");
    append.options = REGARD_APPEND_LATENT;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`value` is given with REGARD_APPEND_LATENT");
    append.value = NULL;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`value_pool` is given with REGARD_APPEND_LATENT");
    append.value_pool = NULL;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_REFUSED, "is not here");
    append.v_scales = &lens;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`v_scales` is given with REGARD_APPEND_LATENT");
    append.v_scales = NULL, append.options = REGARD_APPEND_DYNAMIC_K_SCALES;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`k_scales` is null");
    append.options = 0;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`value` is null");
    append.value = &value, append.value_pool = &value_pool, append.key_pool = NULL;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`key_pool` is null");
    append.size = 8;
    EXPECT_ERROR(regard_append_run(&append, &device, NULL), REGARD_STATUS_ARGUMENT, "`append.size` is 8");
    EXPECT_ERROR(regard_append_run(NULL, &device, NULL), REGARD_STATUS_ARGUMENT, "`append` is null");
}

static void merging(void) {
    regard_tensor parts = tensor((void *)0x1000000, REGARD_DTYPE_BF16, 3, 2, 6, 64, 0);
    regard_tensor part_lse = tensor((void *)0x2000000, REGARD_DTYPE_F32, 2, 2, 6, 0, 0);
    regard_tensor out = tensor((void *)0x3000000, REGARD_DTYPE_BF16, 2, 6, 64, 0, 0);
    regard_merge merge;
    memset(&merge, 0, sizeof merge);
    merge.size = sizeof merge;
    merge.parts = &parts, merge.part_lse = &part_lse, merge.out = &out;
    EXPECT_ERROR(regard_merge_run(&merge, NULL, &merge), REGARD_STATUS_ARGUMENT, "`stream` is not null");
    part_lse.dtype = REGARD_DTYPE_BF16;
    EXPECT_ERROR(regard_merge_run(&merge, NULL, NULL), REGARD_STATUS_ARGUMENT, "`part_lse` is");
    part_lse.dtype = REGARD_DTYPE_F32;
    EXPECT(regard_merge_load(NULL) == REGARD_STATUS_OK);

    /* Archives are Metal's: elsewhere there is nothing to compile. */
    size_t pipelines = 7;
    EXPECT(regard_device_use_archive(NULL, "no such file") == REGARD_STATUS_OK);
    EXPECT(regard_device_save_archive(NULL, "/no such folder/file", &pipelines) == REGARD_STATUS_OK);
    EXPECT(pipelines == 0);
    EXPECT(regard_device_save_archive(NULL, "/no such folder/file", NULL) == REGARD_STATUS_OK);
    EXPECT_ERROR(regard_device_use_archive(NULL, NULL), REGARD_STATUS_ARGUMENT, "`path` is null");
    EXPECT_ERROR(regard_device_save_archive(NULL, "\xff", NULL), REGARD_STATUS_ARGUMENT, "`path` is not UTF-8");

    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.kind = REGARD_DEVICE_KIND_CUDA;
    device.machine = "h200";
    EXPECT_ERROR(regard_merge_load(&device), REGARD_STATUS_REFUSED, "is not here");
    EXPECT_ERROR(regard_device_use_archive(&device, "file"), REGARD_STATUS_REFUSED, "is not here");
    pipelines = 7;
    EXPECT_ERROR(regard_device_save_archive(&device, "file", &pipelines), REGARD_STATUS_REFUSED, "is not here");
    EXPECT(pipelines == 7);
    EXPECT_ERROR(regard_merge_run(&merge, &device, NULL), REGARD_STATUS_REFUSED, "is not here");
    merge.out = NULL;
    EXPECT_ERROR(regard_merge_run(&merge, &device, NULL), REGARD_STATUS_ARGUMENT, "`out` is null");
    merge.size = 8;
    EXPECT_ERROR(regard_merge_run(&merge, &device, NULL), REGARD_STATUS_ARGUMENT, "`merge.size` is 8");
    EXPECT_ERROR(regard_merge_run(NULL, &device, NULL), REGARD_STATUS_ARGUMENT, "`merge` is null");
}

static void copying_blocks(void) {
    /* Three blocks of two slots of two elements, and a scale for each block. */
    float keys[12], scales[3] = {0, 1, 2};
    for (int i = 0; i < 12; i++) keys[i] = i;
    regard_tensor key_pool = tensor(keys, REGARD_DTYPE_F32, 4, 3, 2, 1, 2);
    regard_tensor scale_pool = tensor(scales, REGARD_DTYPE_F32, 3, 3, 1, 1, 0);
    const regard_tensor *pools[] = {&key_pool, &scale_pool};
    regard_block_copy list[] = {{0, 1, 2}, {1, 2, 1}};
    regard_block_copies copies;
    memset(&copies, 0, sizeof copies);
    copies.size = sizeof copies;
    EXPECT(regard_copy_blocks(&copies, NULL, NULL) == REGARD_STATUS_OK);
    copies.pools = pools, copies.pool_count = 2, copies.copies = list, copies.copy_count = 2;
    EXPECT(regard_copy_blocks(&copies, NULL, NULL) == REGARD_STATUS_OK);
    static const float expected[] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 10, 11};
    EXPECT(memcmp(keys, expected, sizeof keys) == 0 && scales[1] == 0 && scales[2] == 0);

    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, &copies), REGARD_STATUS_ARGUMENT, "`stream` is not null");
    list[1].to = 3;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`copies[1]` is 1 slots of block 1 to block 3");
    list[1].to = -1;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`copies[1].to` is -1");
    list[1].to = 2, scale_pool.shape[0] = 2;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`pools[1]` is");
    scale_pool.shape[0] = 3;

    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.kind = REGARD_DEVICE_KIND_CUDA;
    device.machine = "h200";
    EXPECT_ERROR(regard_copy_blocks(&copies, &device, NULL), REGARD_STATUS_REFUSED, "is not here");
    pools[1] = NULL;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`pools[1]` is null");
    copies.pools = NULL;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`pools` is null");
    copies.size = 8;
    EXPECT_ERROR(regard_copy_blocks(&copies, NULL, NULL), REGARD_STATUS_ARGUMENT, "`block_copies.size` is 8");
    EXPECT_ERROR(regard_copy_blocks(NULL, NULL, NULL), REGARD_STATUS_ARGUMENT, "`block_copies` is null");
}

static void standard_slopes(void) {
    float slopes[13];
    slopes[12] = -1;
    EXPECT(regard_alibi_slopes(12, slopes) == REGARD_STATUS_OK);
    /* The slopes of 8 heads, then every second slope of 16. */
    for (int h = 0; h < 8; h++) EXPECT(slopes[h] == (float)exp2(-(h + 1)));
    for (int h = 8; h < 12; h++) EXPECT(fabs(slopes[h] - exp2(-0.5 * (2 * (h - 8) + 1))) < 1e-7);
    EXPECT(slopes[12] == -1);
    EXPECT(regard_alibi_slopes(0, NULL) == REGARD_STATUS_OK);
    EXPECT_ERROR(regard_alibi_slopes(1, NULL), REGARD_STATUS_ARGUMENT, "`slopes` is null");
    EXPECT_ERROR(regard_alibi_slopes((size_t)-1, slopes), REGARD_STATUS_ARGUMENT, "`query_heads` is");
}

int main(void) {
    EXPECT(strcmp(regard_last_error(), "") == 0);
    EXPECT(regard_abi_version() == REGARD_ABI_VERSION);
    EXPECT(strlen(regard_version()) >= 5);
    unsigned state = 1;
    for (size_t i = 0; i < sizeof q_data / sizeof *q_data; i++) q_data[i] = 3 * noise(&state);
    for (size_t i = 0; i < sizeof k_data / sizeof *k_data; i++) k_data[i] = noise(&state), v_data[i] = noise(&state);

    decode();
    paged_decode();
    verify_with_masks();
    callers_threads();
    one_plan_on_many_threads();
    nonsense();
    refusals_and_devices();
    plan_for_a_machine_by_name();
    appending();
    merging();
    copying_blocks();
    standard_slopes();
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures > 0;
}
