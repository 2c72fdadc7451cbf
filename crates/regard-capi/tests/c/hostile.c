/* The C interface as an attacker, or a program with a bug, uses it: operands against guard pages, memory that is shared, numbers of any size, structs
   of any size. Compiles as C and as C++; run by tests/abi.rs as both. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#endif
#include "expect.h"
#include "regard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static unsigned state = 12345;

/* A number below `count`. */
static int any(int count) {
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (unsigned)count);
}

/* Memory between two guard pages. */
typedef struct {
    unsigned char *base, *data;
    size_t mapped;
} guarded;

static size_t page;

/* So many bytes right before the guard behind them, or right behind the guard before them. */
static guarded guard(size_t bytes, int at_end) {
    guarded g;
    size_t inner = (bytes + page - 1) / page * page;
    g.mapped = inner + 2 * page;
    g.base = (unsigned char *)mmap(NULL, g.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.base == (unsigned char *)MAP_FAILED || (inner > 0 && mprotect(g.base + page, inner, PROT_READ | PROT_WRITE) != 0)) {
        printf("no memory\n");
        exit(1);
    }
    g.data = g.base + page + (at_end ? inner - bytes : 0);
    return g;
}

static void unguard(guarded g) { munmap(g.base, g.mapped); }

enum { MAX_TENSORS = 12 };

/* A tensor and the bytes that it is a view of. */
typedef struct {
    regard_tensor tensor;
    size_t first, bytes; /* from the lowest address to `data`, and in all */
    unsigned char content[1 << 16];
    int written;
} operand;

static operand operands_[MAX_TENSORS];
static int used;

static size_t size_of_type(int32_t dtype) {
    return dtype == REGARD_DTYPE_BOOL ? 1 : dtype == REGARD_DTYPE_F16 || dtype == REGARD_DTYPE_BF16 ? 2 : 4;
}

/* A new operand of that shape: its outer dimensions in any order in memory, with gaps, backwards, or repeated if it is only read. */
static operand *view(int32_t dtype, uint32_t rank, const int64_t *shape, int plain, int written) {
    operand *o = &operands_[used++];
    int64_t strides[REGARD_MAX_RANK] = {0}, step = shape[rank - 1], low = 0, high = shape[rank - 1] - 1;
    uint32_t order[REGARD_MAX_RANK] = {0, 1, 2, 3, 4};
    memset(o, 0, sizeof *o);
    o->written = written;
    strides[rank - 1] = 1;
    if (!plain) step += any(3);
    for (uint32_t i = 0; i + 1 < rank && !plain; i++) {
        uint32_t j = i + (uint32_t)any((int)(rank - 1 - i)), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
    for (uint32_t n = rank - 1; n-- > 0;) {
        uint32_t i = order[n];
        strides[i] = !plain && !written && any(6) == 0 ? 0 : !plain && any(5) == 0 ? -step : step;
        if (strides[i] != 0) step *= shape[i];
        if (shape[i] > 0) *(strides[i] < 0 ? &low : &high) += strides[i] * (shape[i] - 1);
    }
    int empty = 0;
    for (uint32_t i = 0; i < rank; i++) empty |= shape[i] == 0;
    size_t size = size_of_type(dtype);
    o->first = empty ? 0 : (size_t)-low * size;
    o->bytes = empty ? 0 : (size_t)(high - low + 1) * size;
    if (o->bytes > sizeof o->content) printf("too large: %zu\n", o->bytes), exit(1);
    o->tensor = plain && any(2) ? regard_contiguous(NULL, dtype, rank, shape) : regard_strided(NULL, dtype, rank, shape, strides);
    for (size_t i = 0; i < o->bytes / size; i++) {
        float number = (float)any(1000) / 250.0f - 2.0f;
        unsigned bits;
        memcpy(&bits, &number, 4);
        if (dtype == REGARD_DTYPE_F32) memcpy(o->content + 4 * i, &number, 4);
        else if (dtype == REGARD_DTYPE_BF16) o->content[2 * i] = (unsigned char)(bits >> 16), o->content[2 * i + 1] = (unsigned char)(bits >> 24);
        /* f16: any finite number of about 1. */
        else if (dtype == REGARD_DTYPE_F16) o->content[2 * i] = (unsigned char)any(256), o->content[2 * i + 1] = (unsigned char)(0x38 + any(5) + 128 * any(2));
        else if (dtype == REGARD_DTYPE_BOOL) o->content[i] = (unsigned char)any(2);
    }
    return o;
}

static void put_ints(operand *o, const int32_t *numbers, size_t count) { memcpy(o->content, numbers, count * sizeof *numbers); }

static const int32_t FLOATS[3] = {REGARD_DTYPE_F32, REGARD_DTYPE_F16, REGARD_DTYPE_BF16};

/* A random problem; its operands are in `operands_`, not yet anywhere in memory. */
static void compose(regard_operands *o) {
    int64_t batch = any(4), heads_kv = 1 + any(2), heads = heads_kv * (1 + any(3)), dim = 1 + any(40), dim_v = any(2) ? dim : 1 + any(40);
    int64_t rows = any(5) == 0 ? 20 : any(4), keys = any(40), block = 1 + any(5), columns = keys / block + 1;
    int32_t dtype = FLOATS[any(3)], numbers[64], starts[5] = {0}, lens[4];
    int ragged = any(3) == 0, kind = any(3); /* keys: batched, ragged, paged */
    used = 0;
    memset(o, 0, sizeof *o);
    o->size = sizeof *o;
    for (int b = 0; b < batch; b++) starts[b + 1] = starts[b] + (ragged ? any((int)rows + 1) : 0), lens[b] = any((int)keys + 1);
    const int64_t q_batched[] = {batch, rows, heads, dim}, q_ragged[] = {starts[batch], heads, dim};
    const int64_t out_batched[] = {batch, rows, heads, dim_v}, out_ragged[] = {starts[batch], heads, dim_v};
    const int64_t vector[] = {batch}, cumulative[] = {batch + 1}, table[] = {batch, columns}, head[] = {heads};
    uint32_t rank = ragged ? 3 : 4;
    o->q = &view(dtype, rank, ragged ? q_ragged : q_batched, any(2), 0)->tensor;
    o->out = &view(any(3) ? dtype : REGARD_DTYPE_F32, rank, ragged ? out_ragged : out_batched, any(2), 1)->tensor;
    if (any(2)) {
        /* The innermost stride of lse is free: it is the outer part of a view with a dimension more. */
        operand *lse = view(REGARD_DTYPE_F32, rank - 1, ragged ? out_ragged : out_batched, 1, 1);
        o->lse = &lse->tensor;
    }
    if (ragged) {
        operand *c = view(REGARD_DTYPE_I32, 1, cumulative, 1, 0);
        put_ints(c, starts, (size_t)batch + 1);
        o->cu_seqlens_q = &c->tensor;
    }
    if (kind == 1) {
        for (int b = 0; b < batch; b++) numbers[b + 1] = (b ? numbers[b] : 0) + lens[b];
        numbers[0] = 0;
        const int64_t k[] = {numbers[batch], heads_kv, dim}, v[] = {numbers[batch], heads_kv, dim_v};
        o->k = &view(dtype, 3, k, any(2), 0)->tensor;
        o->v = &view(dtype, 3, v, any(2), 0)->tensor;
        operand *c = view(REGARD_DTYPE_I32, 1, cumulative, 1, 0);
        put_ints(c, numbers, (size_t)batch + 1);
        o->cu_seqlens_k = &c->tensor;
    } else {
        const int64_t blocks = batch * columns;
        const int64_t k[] = {kind == 2 ? blocks : batch, kind == 2 ? block : keys, heads_kv, dim};
        const int64_t v[] = {k[0], k[1], heads_kv, dim_v};
        o->k = &view(dtype, 4, k, any(2), 0)->tensor;
        o->v = &view(dtype, 4, v, any(2), 0)->tensor;
        if (kind == 2 || any(2)) {
            operand *l = view(REGARD_DTYPE_I32, 1, vector, 1, 0);
            put_ints(l, lens, (size_t)batch);
            o->kv_lens = &l->tensor;
        }
        if (kind == 2) {
            operand *t = view(REGARD_DTYPE_I32, 2, table, 1, 0);
            for (int64_t b = 0; b < batch; b++)
                for (int64_t i = 0; i < columns; i++) {
                    int32_t entry = i * block < lens[b] ? (int32_t)any((int)blocks) : (int32_t)(any(2) ? -1 : 0x7fffffff);
                    memcpy(t->content + 4 * (b * columns + i), &entry, 4);
                }
            o->block_table = &t->tensor;
        }
    }
    if (any(3) == 0) {
        const int64_t mask[] = {any(2) ? batch : 1, any(2) ? heads : 1, any(2) ? rows : 1, any(2) ? keys : 1};
        int fits = batch == 0 || ((mask[0] > 0 || batch == 0) && (mask[2] > 0 || rows == 0) && (mask[3] > 0 || keys == 0));
        /* Ragged keys may be longer than `keys`, never; rows neither. */
        if (fits) o->mask = &view(any(2) ? REGARD_DTYPE_BOOL : FLOATS[any(3)], 4, mask, any(2), 0)->tensor;
    }
    if (any(3) == 0) o->alibi_slopes = &view(REGARD_DTYPE_F32, 1, head, 1, 0)->tensor;
    if (any(3) == 0) o->sinks = &view(REGARD_DTYPE_F32, 1, head, 1, 0)->tensor;
    if (any(3) == 0) {
        operand *offsets = view(REGARD_DTYPE_I32, 1, vector, 1, 0);
        for (int b = 0; b < batch; b++) numbers[b] = any(8) == 0 ? INT32_MIN : any(60) - 10;
        put_ints(offsets, numbers, (size_t)batch);
        o->q_offsets = &offsets->tensor;
    }
    if (any(2)) o->options |= REGARD_CAUSAL;
    if (any(4) == 0) o->options |= REGARD_WINDOW_LEFT, o->window_left = any(4) ? any(30) : INT64_MAX;
    if (any(4) == 0) o->options |= REGARD_WINDOW_RIGHT, o->window_right = any(4) ? any(30) : INT64_MAX;
    if (any(4) == 0) o->options |= REGARD_SOFTCAP, o->softcap = 3;
    if (any(4) == 0) o->options |= REGARD_BATCH_INVARIANT;
}

/* Runs on operands and a workspace that end, or start, at a guard page. Keeps the outputs. */
static regard_status run_guarded(const regard_plan *plan, const regard_operands *o, int at_end) {
    guarded places[MAX_TENSORS];
    for (int i = 0; i < used; i++) {
        places[i] = guard(operands_[i].bytes, at_end);
        memcpy(places[i].data, operands_[i].content, operands_[i].bytes);
        operands_[i].tensor.data = places[i].data + operands_[i].first;
    }
    size_t bytes = regard_plan_workspace_bytes(plan);
    guarded workspace = guard(bytes, at_end);
    memset(workspace.data, 0xff, bytes);
    regard_status status = regard_plan_run(plan, o, workspace.data, bytes, NULL);
    for (int i = 0; i < used; i++) {
        if (operands_[i].written) memcpy(operands_[i].content, places[i].data, operands_[i].bytes);
        else EXPECT(memcmp(operands_[i].content, places[i].data, operands_[i].bytes) == 0);
        unguard(places[i]);
    }
    unguard(workspace);
    return status;
}

/* Random problems between guard pages: nothing outside the views is touched, and the results do not depend on their addresses. */
static void between_guard_pages(const char *machine) {
    enum { ROUNDS = 1500 };
    static unsigned char first[2][sizeof operands_[0].content];
    int ran = 0;
    regard_device device;
    memset(&device, 0, sizeof device);
    device.size = sizeof device;
    device.machine = machine;
    device.threads = 1;
    for (int round = 0; round < ROUNDS; round++) {
        regard_operands o;
        compose(&o);
        /* Planned over operands in ordinary memory. */
        for (int i = 0; i < used; i++) operands_[i].tensor.data = operands_[i].content + operands_[i].first;
        regard_plan *plan = NULL;
        regard_status status = regard_plan_for(&o, &device, &plan);
        EXPECT(status == REGARD_STATUS_OK || status == REGARD_STATUS_ARGUMENT);
        if (plan == NULL) continue;
        ran++;
        EXPECT(run_guarded(plan, &o, 1) == REGARD_STATUS_OK);
        for (int i = 0, kept = 0; i < used; i++)
            if (operands_[i].written) memcpy(first[kept++], operands_[i].content, operands_[i].bytes);
        EXPECT(run_guarded(plan, &o, 0) == REGARD_STATUS_OK);
        for (int i = 0, kept = 0; i < used; i++)
            if (operands_[i].written) EXPECT(memcmp(first[kept++], operands_[i].content, operands_[i].bytes) == 0);
        regard_plan_destroy(plan);
    }
    printf("%d of %d problems ran between guard pages (%s)\n", ran, ROUNDS, machine);
    EXPECT(ran > ROUNDS / 2);
}

/* 3 rows of 5 heads over 200 keys: the outputs, and a workspace that overlaps one operand after the other. */
static void shared_memory(void) {
    enum { ROWS = 3, HEADS = 5, KEYS = 200, DIM = 16, PLACES = 6 };
    const int64_t q_shape[] = {1, ROWS, HEADS, DIM}, kv_shape[] = {1, KEYS, HEADS, DIM}, lse_shape[] = {1, ROWS, HEADS}, one[] = {1};
    static const char *const names[PLACES] = {"`q`", "`k`", "`v`", "`out`", "`lse`", "`kv_lens`"};
    static const size_t sizes[PLACES] = {ROWS * HEADS * DIM, KEYS * HEADS * DIM, KEYS * HEADS * DIM, ROWS * HEADS * DIM, ROWS * HEADS, 1};
    regard_operands o;
    regard_problem problem;
    regard_plan *plan = NULL;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    problem.batch = 1, problem.query_heads = HEADS, problem.kv_heads = HEADS, problem.head_dim = DIM;
    problem.query_len = ROWS, problem.kv_len = KEYS, problem.dtype = REGARD_DTYPE_F32, problem.options = REGARD_LSE;
    EXPECT(regard_plan_create(&problem, NULL, &plan) == REGARD_STATUS_OK);
    if (plan == NULL) return;
    size_t bytes = regard_plan_workspace_bytes(plan), gap = bytes + 64, total = 0;
    for (int i = 0; i < PLACES; i++) total += sizes[i] * 4 + 2 * gap;
    unsigned char *memory = (unsigned char *)malloc(total), *places[PLACES], *next = memory + gap;
    memset(memory, 0, total);
    for (int i = 0; i < PLACES; i++) places[i] = next, next += (sizes[i] * 4 + gap) / 64 * 64 + 64;
    const int32_t len = KEYS;
    memcpy(places[5], &len, 4);
    regard_tensor q = regard_contiguous(places[0], REGARD_DTYPE_F32, 4, q_shape), k = regard_contiguous(places[1], REGARD_DTYPE_F32, 4, kv_shape);
    regard_tensor v = regard_contiguous(places[2], REGARD_DTYPE_F32, 4, kv_shape), out = regard_contiguous(places[3], REGARD_DTYPE_F32, 4, q_shape);
    regard_tensor lse = regard_contiguous(places[4], REGARD_DTYPE_F32, 3, lse_shape), lens = regard_contiguous(places[5], REGARD_DTYPE_I32, 1, one);
    memset(&o, 0, sizeof o);
    o.size = sizeof o;
    o.q = &q, o.k = &k, o.v = &v, o.out = &out, o.lse = &lse, o.kv_lens = &lens;
    unsigned char *apart = (unsigned char *)malloc(bytes);
    EXPECT(regard_plan_run(plan, &o, apart, bytes, NULL) == REGARD_STATUS_OK);
    for (int i = 0; i < PLACES; i++) {
        size_t last = sizes[i] * 4 - 1;
        /* Over the first byte, over the last, and from somewhere inside. */
        unsigned char *workspaces[3] = {places[i] + 1 - bytes, places[i] + last, places[i] + last / 2};
        for (int j = 0; j < 3; j++) {
            EXPECT_ERROR(regard_plan_run(plan, &o, workspaces[j], bytes, NULL), REGARD_STATUS_ARGUMENT, "`workspace` is memory shared with ");
            EXPECT(strstr(regard_last_error(), names[i]) != NULL);
        }
        EXPECT(regard_plan_run(plan, &o, places[i] - bytes, bytes, NULL) == REGARD_STATUS_OK);
        /* The library does not use bytes past the size that it asked for. */
        EXPECT(regard_plan_run(plan, &o, places[i] - bytes, bytes + last, NULL) == REGARD_STATUS_OK);
    }
    EXPECT_ERROR(regard_plan_run(plan, &o, (void *)(UINTPTR_MAX - 8), bytes, NULL), REGARD_STATUS_ARGUMENT, "`workspace` is 0xfff");
    EXPECT_ERROR(regard_plan_run(plan, &o, apart, SIZE_MAX, NULL), REGARD_STATUS_ARGUMENT, "`workspace_bytes` is");
    /* Outputs on inputs and on each other. */
    for (int i = 0; i < PLACES; i++) {
        if (i == 3) continue;
        regard_tensor elsewhere = out;
        elsewhere.data = places[i];
        o.out = &elsewhere;
        EXPECT_ERROR(regard_plan_run(plan, &o, apart, bytes, NULL), REGARD_STATUS_ARGUMENT, "memory shared with");
        EXPECT(strstr(regard_last_error(), names[i]) != NULL);
        o.out = &out;
    }
    free(apart);
    free(memory);
    regard_plan_destroy(plan);
}

/* Problems and devices of any numbers: a status, and a plan that can be asked. */
static void wild_problems(void) {
    static const int64_t numbers[] = {0, 1, 2, 3, 8, 64, 128, 576, 577, 4096, 65536, 0x7fffffff, 0x80000000, (int64_t)1 << 40, INT64_MAX, INT64_MIN, -1};
    static const char *const machines[] = {NULL, "host", "scalar", "avx2", "avx512", "neon", "h200", "a100", "m2", "", "\xff", "nobody"};
    enum { NUMBERS = sizeof numbers / sizeof *numbers, ROUNDS = 30000 };
    int counts[8] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        regard_problem p;
        memset(&p, 0, sizeof p);
        p.size = sizeof p;
        p.batch = 1, p.query_heads = 8, p.kv_heads = 2, p.head_dim = 64, p.query_len = 3, p.kv_len = 100, p.dtype = FLOATS[any(3)];
        int64_t *fields[] = {&p.batch, &p.query_heads, &p.kv_heads, &p.head_dim, &p.value_dim, &p.query_len, &p.kv_len,
                             &p.query_rows, &p.block_size, &p.window_left, &p.window_right};
        for (int change = any(6); change > 0; change--) *fields[any(11)] = numbers[any(NUMBERS)];
        if (any(3) == 0) p.options = (uint32_t)any(1 << 14) & ~(uint32_t)(REGARD_SCALE | REGARD_Q_OFFSET);
        if (any(20) == 0) p.options = (uint32_t)numbers[any(NUMBERS)];
        if (any(8) == 0) p.dtype = (int32_t)numbers[any(NUMBERS)];
        if (any(8) == 0) p.out_dtype = (int32_t)numbers[any(NUMBERS)];
        if (any(4) == 0) p.mask_dtype = (int32_t)any(7);
        regard_device device;
        memset(&device, 0, sizeof device);
        device.size = sizeof device;
        device.kind = any(3) == 0 ? REGARD_DEVICE_KIND_CUDA : REGARD_DEVICE_KIND_CPU;
        device.machine = machines[device.kind == REGARD_DEVICE_KIND_CUDA ? 6 + any(6) : any(12)];
        if (any(4) == 0) device.threads = (uint32_t)numbers[any(NUMBERS)];
        if (any(40) == 0) device.ordinal = (int32_t)numbers[any(NUMBERS)];
        if (any(40) == 0) device.kind = (int32_t)numbers[any(NUMBERS)];
        regard_plan *plan = NULL;
        regard_status status = regard_plan_create(&p, &device, &plan);
        counts[status & 7]++;
        EXPECT(status == REGARD_STATUS_OK || status == REGARD_STATUS_ARGUMENT || status == REGARD_STATUS_REFUSED);
        EXPECT((status == REGARD_STATUS_OK) == (plan != NULL));
        if (plan != NULL) EXPECT(regard_plan_explain(plan) != NULL && regard_plan_workspace_bytes(plan) <= SIZE_MAX / 2);
        regard_plan_destroy(plan);
    }
    printf("wild problems: %d plans, %d argument errors, %d refusals\n", counts[0], counts[1], counts[2]);
    EXPECT(counts[0] > ROUNDS / 50 && counts[1] > ROUNDS / 10 && counts[2] > 0);
}

/* Structs with any size field, at the end of readable memory. */
static void wild_sizes(void) {
    static const size_t sizes[] = {0, 1, 7, 8, 16, 40, 55, 56, 57, 64, 80, 88, 96, 104, 112, 113, 120, 121, 128, 129, 159, 160, 161, 168, 176, 177, 4096, 65536, 65537, SIZE_MAX};
    const size_t known[6] = {offsetof(regard_operands, k_scales), offsetof(regard_problem, chunk), sizeof(regard_device), offsetof(regard_append, k_scales), sizeof(regard_merge), sizeof(regard_block_copies)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int which = 0; which < 6; which++) {
            /* Only as much can be read as in the field, if that makes sense; else only the field. */
            size_t size = sizes[i], sense = size >= known[which] && size <= 65536;
            guarded g = guard(sense ? size : sizeof size, 1);
            memset(g.data, 0, sense ? size : sizeof size);
            memcpy(g.data, &size, sizeof size);
            regard_problem problem;
            memset(&problem, 0, sizeof problem);
            problem.size = sizeof problem;
            regard_status status = REGARD_STATUS_OK;
            if (which == 0) status = regard_problem_of((regard_operands *)g.data, NULL, &problem);
            if (which == 1) status = regard_can_implement((regard_problem *)g.data, NULL, NULL);
            if (which == 2) status = regard_append_load((regard_device *)g.data);
            if (which == 3) status = regard_append_run((regard_append *)g.data, NULL, NULL);
            if (which == 4) status = regard_merge_run((regard_merge *)g.data, NULL, NULL);
            if (which == 5) status = regard_copy_blocks((regard_block_copies *)g.data, NULL, NULL);
            /* All zeros: this CPU as a device, or no copies; otherwise something is missing. */
            regard_status expected = sense && (which == 2 || which == 5) ? REGARD_STATUS_OK : REGARD_STATUS_ARGUMENT;
            EXPECT(status == expected);
            EXPECT(sense || strstr(regard_last_error(), ".size` is ") != NULL);
            unguard(g);
        }
    /* A tensor at the end of readable memory. */
    guarded g = guard(sizeof(regard_tensor), 1);
    memset(g.data, 0, sizeof(regard_tensor));
    regard_operands o;
    regard_problem problem;
    memset(&o, 0, sizeof o);
    memset(&problem, 0, sizeof problem);
    o.size = sizeof o, problem.size = sizeof problem;
    o.q = (regard_tensor *)g.data;
    EXPECT_ERROR(regard_problem_of(&o, NULL, &problem), REGARD_STATUS_ARGUMENT, "`q.rank` is 0");
    unguard(g);
}

/* Devices with absurd numbers of threads still run. */
static void many_threads(void) {
    float q[64], k[64 * 50], v[64 * 50], out[64];
    const int64_t q_shape[] = {1, 1, 1, 64}, kv_shape[] = {1, 50, 1, 64};
    for (int i = 0; i < 64; i++) q[i] = 1;
    for (int i = 0; i < 64 * 50; i++) k[i] = 0, v[i] = 2;
    regard_tensor qt = regard_contiguous(q, REGARD_DTYPE_F32, 4, q_shape), kt = regard_contiguous(k, REGARD_DTYPE_F32, 4, kv_shape);
    regard_tensor vt = regard_contiguous(v, REGARD_DTYPE_F32, 4, kv_shape), ot = regard_contiguous(out, REGARD_DTYPE_F32, 4, q_shape);
    regard_operands o;
    regard_device device;
    memset(&o, 0, sizeof o);
    memset(&device, 0, sizeof device);
    o.size = sizeof o, device.size = sizeof device;
    o.q = &qt, o.k = &kt, o.v = &vt, o.out = &ot;
    device.threads = UINT32_MAX;
    regard_plan *plan = NULL;
    EXPECT(regard_plan_for(&o, &device, &plan) == REGARD_STATUS_OK);
    if (plan == NULL) return;
    size_t bytes = regard_plan_workspace_bytes(plan);
    void *workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, &o, workspace, bytes, NULL) == REGARD_STATUS_OK);
    for (int i = 0; i < 64; i++) EXPECT(out[i] == 2);
    free(workspace);
    regard_plan_destroy(plan);
}

int main(void) {
    page = (size_t)sysconf(_SC_PAGESIZE);
    setvbuf(stdout, NULL, _IONBF, 0);
    shared_memory();
    wild_sizes();
    wild_problems();
    many_threads();
    between_guard_pages("host");
    between_guard_pages("scalar");
    printf(failures ? "%d failures\n" : "all as expected\n", failures);
    return failures > 0;
}
