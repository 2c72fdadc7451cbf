/* Caches in 8 bits, and selection, as a C program sees them: compiled against include/regard.h and run by tests/abi.rs. */
#include "expect.h"
#include "regard.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One sequence, 2 query rows of 4 query heads over 2 key/value heads, 37 keys. */
enum { QUERY_HEADS = 4, KV_HEADS = 2, KEYS = 37 };

static float noise(unsigned *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static regard_tensor tensor(void *data, int32_t dtype, uint32_t rank, int64_t a, int64_t b, int64_t c, int64_t d) {
    const int64_t shape[] = {a, b, c, d};
    return regard_contiguous(data, dtype, rank, shape);
}

/* The nearest f16 of a small positive number, rounded down: enough for a scale. */
static uint16_t f16_bits(float x) {
    union {
        float number;
        uint32_t bits;
    } u;
    u.number = x;
    return x == 0 ? 0 : (uint16_t)(((u.bits >> 23) - 112) << 10 | (u.bits >> 13 & 0x3ff));
}

static float f16_number(uint16_t bits) { return ldexpf((float)(0x400 | (bits & 0x3ff)), (bits >> 10) - 25); }

/* A block as GGUF's Q8_0 stores it. */
typedef struct {
    uint16_t scale;
    int8_t codes[32];
} q8_block;

/* Plans the operands and runs the plan. Leaves their problem in `problem`; 0 if there is no plan. */
static int plan_and_run(const regard_operands *operands, regard_problem *problem) {
    memset(problem, 0, sizeof *problem);
    problem->size = sizeof *problem;
    EXPECT(regard_problem_of(operands, NULL, problem) == REGARD_STATUS_OK);
    regard_plan *plan = NULL;
    EXPECT(regard_plan_create(problem, NULL, &plan) == REGARD_STATUS_OK);
    if (plan == NULL) return 0;
    size_t bytes = regard_plan_workspace_bytes(plan);
    void *workspace = malloc(bytes);
    EXPECT(regard_plan_run(plan, operands, workspace, bytes, NULL) == REGARD_STATUS_OK);
    free(workspace);
    regard_plan_destroy(plan);
    return 1;
}

/* Runs the operands and compares with a run over the same numbers in f32. */
static void same_as_floats(const regard_operands *stored, const float *keys, const float *values, int dim) {
    float results[2][2 * QUERY_HEADS * 64];
    regard_tensor k = tensor((void *)keys, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, dim);
    regard_tensor v = tensor((void *)values, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, dim);
    for (int i = 0; i < 2; i++) {
        regard_operands operands = *stored;
        if (i == 1) operands.k = &k, operands.v = &v, operands.k_scales = NULL, operands.v_scales = NULL;
        regard_tensor out = tensor(results[i], REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, dim);
        operands.out = &out;
        regard_problem problem;
        if (!plan_and_run(&operands, &problem)) return;
        EXPECT(problem.dtype == REGARD_DTYPE_F32 && problem.head_dim == dim && problem.value_dim == dim);
        EXPECT(problem.key_dtype == operands.k->dtype && problem.value_dtype == operands.v->dtype);
    }
    for (int i = 0; i < 2 * QUERY_HEADS * dim; i++) EXPECT(fabsf(results[0][i] - results[1][i]) < 1e-5f);
}

/* Caches in 8 bits: i8 codes with a scale per token and head, and GGUF's blocks. */
static void caches_in_8_bits(void) {
    enum { D = 64, ROWS = KEYS * KV_HEADS };
    static float queries[2 * QUERY_HEADS * D], keys[ROWS * D], values[ROWS * D], key_scales[ROWS], value_scale[1] = {0.02f};
    static int8_t key_codes[ROWS * D], value_codes[ROWS * D];
    static q8_block blocks[ROWS * D / 32];
    unsigned state = 11;
    for (int i = 0; i < 2 * QUERY_HEADS * D; i++) queries[i] = noise(&state);
    for (int row = 0; row < ROWS; row++) key_scales[row] = 0.01f + 0.01f * (float)(row % 5);
    for (int i = 0; i < ROWS * D; i++) {
        key_codes[i] = (int8_t)(127 * noise(&state)), value_codes[i] = (int8_t)(127 * noise(&state));
        keys[i] = key_scales[i / D] * key_codes[i], values[i] = value_scale[0] * value_codes[i];
    }
    regard_tensor q = tensor(queries, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    regard_tensor k = tensor(key_codes, REGARD_DTYPE_I8, 4, 1, KEYS, KV_HEADS, D);
    regard_tensor v = tensor(value_codes, REGARD_DTYPE_I8, 4, 1, KEYS, KV_HEADS, D);
    regard_tensor k_scales = tensor(key_scales, REGARD_DTYPE_F32, 3, 1, KEYS, KV_HEADS, 0);
    regard_tensor v_scales = tensor(value_scale, REGARD_DTYPE_F32, 3, 1, 1, 1, 0);
    regard_tensor out = tensor(queries, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    float out_data[2 * QUERY_HEADS * D];
    out.data = out_data;
    regard_operands operands;
    memset(&operands, 0, sizeof operands);
    operands.size = sizeof operands;
    operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out;
    operands.k_scales = &k_scales, operands.v_scales = &v_scales;
    operands.options = REGARD_CAUSAL;
    same_as_floats(&operands, keys, values, D);

    /* Wrong in one place. */
    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    regard_operands wrong = operands;
    wrong.k_scales = NULL;
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is missing; allowed: scales: `k` is i8");
    wrong = operands, k_scales.shape[1] = KEYS - 1;
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is of shape [1, 36, 2]");
    k_scales.shape[1] = KEYS, k_scales.rank = 2;
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is of shape [1, 37]");
    k_scales.rank = 3, k_scales.dtype = REGARD_DTYPE_I32;
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is of type i32");
    k_scales.dtype = REGARD_DTYPE_F32, q.dtype = REGARD_DTYPE_I8;
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`q` is of type i8");
    q.dtype = REGARD_DTYPE_F32;
    /* A run reads the scales that all tokens share. */
    static char workspace[1 << 20];
    regard_plan *plan = NULL;
    EXPECT(regard_problem_of(&operands, NULL, &problem) == REGARD_STATUS_OK);
    EXPECT(regard_plan_create(&problem, NULL, &plan) == REGARD_STATUS_OK);
    value_scale[0] = -1;
    EXPECT_ERROR(regard_plan_run(plan, &operands, workspace, sizeof workspace, NULL), REGARD_STATUS_ARGUMENT, "`v_scales");
    value_scale[0] = 0.02f;
    regard_plan_destroy(plan);
    /* A program that was compiled before scales were known cannot have given any. */
    wrong = operands, wrong.size = offsetof(regard_operands, k_scales);
    EXPECT_ERROR(regard_problem_of(&wrong, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is missing");

    /* The same keys in GGUF's blocks; values stay as they are. */
    for (int i = 0; i < ROWS * D / 32; i++) {
        float largest = 0;
        for (int j = 0; j < 32; j++) largest = fmaxf(largest, fabsf(keys[i * 32 + j]));
        blocks[i].scale = f16_bits(largest / 126);
        for (int j = 0; j < 32; j++) {
            blocks[i].codes[j] = (int8_t)(keys[i * 32 + j] / f16_number(blocks[i].scale));
            keys[i * 32 + j] = f16_number(blocks[i].scale) * blocks[i].codes[j];
        }
    }
    k = tensor(blocks, REGARD_DTYPE_Q8_0, 4, 1, KEYS, KV_HEADS, D / 32);
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k_scales` is given");
    operands.k_scales = NULL;
    same_as_floats(&operands, keys, values, D);
    k.shape[3] = 1;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k` is of head dim 32; allowed: 64, as q has");
    k.shape[3] = 2, k.data = (char *)blocks + 1;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`k.data` is 0x");

    /* By a problem alone. */
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    problem.batch = 1, problem.query_heads = 8, problem.kv_heads = 2, problem.head_dim = 72, problem.query_len = 1, problem.kv_len = 100;
    problem.dtype = REGARD_DTYPE_BF16, problem.key_dtype = REGARD_DTYPE_Q4_0;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`head_dim` is 72; allowed: a multiple of 32");
    problem.head_dim = 64, problem.value_dtype = REGARD_DTYPE_I32;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`value_dtype` is of type i32");
    problem.value_dtype = REGARD_DTYPE_E5M2;
    EXPECT(regard_can_implement(&problem, NULL, NULL) == REGARD_STATUS_OK);
}

/* Appends to pools of codes: keys under scales that the library computes, values under one that is given. */
static void quantizing_appends(void) {
    enum { D = 32, TOKENS = 3, BLOCKS = 4, SLOTS = 2 };
    static float key_rows[TOKENS * KV_HEADS * D], value_rows[TOKENS * KV_HEADS * D], scales[BLOCKS * SLOTS * KV_HEADS];
    static int8_t keys[BLOCKS * SLOTS * KV_HEADS * D], values[BLOCKS * SLOTS * KV_HEADS * D];
    static q8_block blocks[BLOCKS * SLOTS * KV_HEADS];
    float value_scale[1] = {1.0f / 100};
    int32_t table[2] = {3, 1}, length[1] = {TOKENS};
    unsigned state = 3;
    for (int i = 0; i < TOKENS * KV_HEADS * D; i++) key_rows[i] = noise(&state), value_rows[i] = 2 * noise(&state);
    regard_tensor key = tensor(key_rows, REGARD_DTYPE_F32, 3, TOKENS, KV_HEADS, D, 0);
    regard_tensor value = tensor(value_rows, REGARD_DTYPE_F32, 3, TOKENS, KV_HEADS, D, 0);
    regard_tensor key_pool = tensor(keys, REGARD_DTYPE_I8, 4, BLOCKS, SLOTS, KV_HEADS, D);
    regard_tensor value_pool = tensor(values, REGARD_DTYPE_I8, 4, BLOCKS, SLOTS, KV_HEADS, D);
    regard_tensor k_scales = tensor(scales, REGARD_DTYPE_F32, 3, BLOCKS, SLOTS, KV_HEADS, 0);
    regard_tensor v_scales = tensor(value_scale, REGARD_DTYPE_F32, 3, 1, 1, 1, 0);
    regard_tensor block_table = tensor(table, REGARD_DTYPE_I32, 2, 1, 2, 0, 0);
    regard_tensor lengths = tensor(length, REGARD_DTYPE_I32, 1, 1, 0, 0, 0);
    regard_append append;
    memset(&append, 0, sizeof append);
    append.size = sizeof append;
    append.key = &key, append.value = &value, append.key_pool = &key_pool, append.value_pool = &value_pool;
    append.block_table = &block_table, append.kv_lens = &lengths;
    append.k_scales = &k_scales, append.v_scales = &v_scales, append.options = REGARD_APPEND_DYNAMIC_K_SCALES;
    EXPECT(regard_append_run(&append, NULL, NULL) == REGARD_STATUS_OK);
    for (int token = 0; token < TOKENS; token++) {
        for (int head = 0; head < KV_HEADS; head++) {
            int from = (token * KV_HEADS + head) * D, slot = (table[token / SLOTS] * SLOTS + token % SLOTS) * KV_HEADS + head;
            float largest = 0;
            for (int i = 0; i < D; i++) largest = fmaxf(largest, fabsf(key_rows[from + i]));
            EXPECT(scales[slot] == largest / 127);
            for (int i = 0; i < D; i++) {
                EXPECT(keys[slot * D + i] == (int8_t)rintf(key_rows[from + i] / scales[slot]));
                EXPECT(values[slot * D + i] == (int8_t)fmaxf(-127, fminf(127, rintf(value_rows[from + i] / value_scale[0]))));
            }
        }
    }
    EXPECT(scales[0] == 0 && keys[0] == 0 && values[0] == 0 && value_scale[0] == 1.0f / 100);

    /* Keys in blocks have no scales beside them. */
    key_pool = tensor(blocks, REGARD_DTYPE_Q8_0, 4, BLOCKS, SLOTS, KV_HEADS, D / 32);
    EXPECT_ERROR(regard_append_run(&append, NULL, NULL), REGARD_STATUS_ARGUMENT, "`k_scales` is given");
    append.k_scales = NULL, append.options = 0;
    EXPECT(regard_append_run(&append, NULL, NULL) == REGARD_STATUS_OK);
    for (int i = 0; i < D; i++) {
        q8_block block = blocks[table[0] * SLOTS * KV_HEADS];
        EXPECT(fabsf(f16_number(block.scale) * block.codes[i] - key_rows[i]) <= f16_number(block.scale));
    }

    /* Wrong in one place. */
    append.v_scales = NULL;
    EXPECT_ERROR(regard_append_run(&append, NULL, NULL), REGARD_STATUS_ARGUMENT, "`v_scales` is missing");
    append.v_scales = &v_scales, append.options = REGARD_APPEND_DYNAMIC_V_SCALES;
    EXPECT_ERROR(regard_append_run(&append, NULL, NULL), REGARD_STATUS_ARGUMENT, "`v_scales` is");
    append.options = 0, value_scale[0] = -1;
    EXPECT_ERROR(regard_append_run(&append, NULL, NULL), REGARD_STATUS_ARGUMENT, "`v_scales");
}

/* Lists of the keys that rows attend to: the first 10 are the keys of a sequence of 10 keys. */
static void lists_of_keys(void) {
    enum { D = 32, LEN = 12, ROWS = KEYS * KV_HEADS };
    static float queries[2 * QUERY_HEADS * D], keys[ROWS * D], values[ROWS * D], results[2][2 * QUERY_HEADS * D];
    int32_t indices[2 * LEN], counts[2] = {LEN, LEN - 1}, length = 10;
    unsigned state = 5;
    for (int i = 0; i < 2 * QUERY_HEADS * D; i++) queries[i] = noise(&state);
    for (int i = 0; i < ROWS * D; i++) keys[i] = noise(&state), values[i] = noise(&state);
    for (int i = 0; i < 2 * LEN; i++) indices[i] = i % LEN < 10 ? 9 - i % LEN : (i % 2 ? -1 : KEYS);
    regard_tensor q = tensor(queries, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    regard_tensor k = tensor(keys, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, D);
    regard_tensor v = tensor(values, REGARD_DTYPE_F32, 4, 1, KEYS, KV_HEADS, D);
    regard_tensor lists = tensor(indices, REGARD_DTYPE_I32, 3, 2, 1, LEN, 0);
    regard_tensor used = tensor(counts, REGARD_DTYPE_I32, 2, 2, 1, 0, 0);
    regard_tensor lengths = tensor(&length, REGARD_DTYPE_I32, 1, 1, 0, 0, 0);
    regard_operands operands;
    for (int i = 0; i < 2; i++) {
        memset(&operands, 0, sizeof operands);
        operands.size = sizeof operands;
        regard_tensor out = tensor(results[i], REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
        operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out;
        if (i == 0) operands.kv_lens = &lengths;
        else operands.key_indices = &lists, operands.key_counts = &used;
        regard_problem problem;
        if (!plan_and_run(&operands, &problem)) return;
        EXPECT(problem.list_len == (i ? LEN : 0) && problem.options == (i ? REGARD_KEY_LISTS : 0u));
    }
    for (int i = 0; i < 2 * QUERY_HEADS * D; i++) EXPECT(fabsf(results[0][i] - results[1][i]) < 1e-5f);

    /* Wrong in one place. */
    regard_tensor out = tensor(results[0], REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    operands.out = &out;
    regard_problem problem;
    memset(&problem, 0, sizeof problem);
    problem.size = sizeof problem;
    counts[1] = LEN + 1;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`key_counts[1, 0]` is 13; allowed: 0..=12");
    operands.options = REGARD_INDICES_ARE_SLOTS | REGARD_CAUSAL;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`causal` is given; allowed: nothing that needs positions");
    operands.options = 0, operands.key_indices = NULL;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`key_counts` is given");
    problem.batch = 1, problem.query_heads = 8, problem.kv_heads = 2, problem.head_dim = 64, problem.query_len = 1, problem.kv_len = 100;
    problem.dtype = REGARD_DTYPE_BF16, problem.list_len = 7;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "`list_len` is 7 without REGARD_KEY_LISTS");
    problem.options = REGARD_KEY_LISTS | REGARD_LISTS_PER_HEAD;
    EXPECT(regard_can_implement(&problem, NULL, NULL) == REGARD_STATUS_OK);
    problem.list_len = 0, problem.options = REGARD_LISTS_PER_HEAD;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "allowed: REGARD_KEY_LISTS too");
}

/* A list of all pages gives the results of a block table. */
static void lists_of_pages(void) {
    enum { D = 32, BLOCKS = 4, SLOTS = 4, PAGES = 3, ROWS = BLOCKS * SLOTS * KV_HEADS };
    static float queries[2 * QUERY_HEADS * D], keys[ROWS * D], values[ROWS * D], results[2][2 * QUERY_HEADS * D];
    int32_t blocks[KV_HEADS * PAGES], numbers[KV_HEADS * PAGES], lengths[KV_HEADS];
    unsigned state = 6;
    for (int i = 0; i < 2 * QUERY_HEADS * D; i++) queries[i] = noise(&state);
    for (int i = 0; i < ROWS * D; i++) keys[i] = noise(&state), values[i] = noise(&state);
    for (int i = 0; i < KV_HEADS * PAGES; i++) blocks[i] = BLOCKS - 1 - i % PAGES, numbers[i] = i % PAGES;
    for (int i = 0; i < KV_HEADS; i++) lengths[i] = 10;
    regard_tensor q = tensor(queries, REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    regard_tensor k = tensor(keys, REGARD_DTYPE_F32, 4, BLOCKS, SLOTS, KV_HEADS, D);
    regard_tensor v = tensor(values, REGARD_DTYPE_F32, 4, BLOCKS, SLOTS, KV_HEADS, D);
    regard_tensor table = tensor(blocks, REGARD_DTYPE_I32, 2, 1, PAGES, 0, 0), length = tensor(lengths, REGARD_DTYPE_I32, 1, 1, 0, 0, 0);
    regard_tensor lists = tensor(blocks, REGARD_DTYPE_I32, 3, KV_HEADS, 1, PAGES, 0), numbered = tensor(numbers, REGARD_DTYPE_I32, 3, KV_HEADS, 1, PAGES, 0);
    regard_tensor list_lengths = tensor(lengths, REGARD_DTYPE_I32, 2, KV_HEADS, 1, 0, 0);
    const unsigned given = REGARD_KEY_LISTS | REGARD_LISTS_PER_HEAD | REGARD_LISTS_OF_PAGES | REGARD_PAGE_NUMBERS;
    regard_operands operands;
    regard_problem problem;
    for (int i = 0; i < 2; i++) {
        memset(&operands, 0, sizeof operands);
        operands.size = sizeof operands;
        regard_tensor out = tensor(results[i], REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
        operands.q = &q, operands.k = &k, operands.v = &v, operands.out = &out;
        operands.options = REGARD_CAUSAL | REGARD_Q_OFFSET, operands.q_offset = 8;
        if (i == 0) operands.block_table = &table, operands.kv_lens = &length;
        else operands.page_indices = &lists, operands.page_list_lens = &list_lengths, operands.page_numbers = &numbered;
        if (!plan_and_run(&operands, &problem)) return;
        EXPECT(problem.list_len == (i ? PAGES * SLOTS : 0) && problem.options == (REGARD_CAUSAL | (i ? given : 0u)));
    }
    for (int i = 0; i < 2 * QUERY_HEADS * D; i++) EXPECT(fabsf(results[0][i] - results[1][i]) < 1e-5f);

    regard_tensor out = tensor(results[0], REGARD_DTYPE_F32, 4, 1, 2, QUERY_HEADS, D);
    operands.out = &out, operands.page_numbers = NULL;
    EXPECT_ERROR(regard_problem_of(&operands, NULL, &problem), REGARD_STATUS_ARGUMENT, "`causal` is given; allowed: nothing that needs positions");
    problem.options = REGARD_KEY_LISTS | REGARD_PAGE_NUMBERS;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "allowed: REGARD_LISTS_OF_PAGES too");
    problem.options = REGARD_KEY_LISTS | REGARD_LISTS_OF_PAGES | REGARD_INDICES_ARE_SLOTS;
    EXPECT_ERROR(regard_can_implement(&problem, NULL, NULL), REGARD_STATUS_ARGUMENT, "allowed: one of the two");
}

int main(void) {
    if (regard_abi_version() != REGARD_ABI_VERSION) return 1;
    caches_in_8_bits();
    quantizing_appends();
    lists_of_keys();
    lists_of_pages();
    if (failures > 0) return 1;
    printf("all as expected\n");
    return 0;
}
