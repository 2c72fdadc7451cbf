// A serving engine's step over the C interface: continuous batching on a paged cache.
//
// Prepared once: a plan for the largest step, a workspace, the pools. Every step then has other sequences, lengths,
// tables and pages. docs/engine-contract.md lists the guarantees to engines. Compiled and run by tests/abi.rs.

#include <regard.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

namespace {

// The model's attention, and the largest step.
const int QUERY_HEADS = 8, KV_HEADS = 2, DIM = 64, LAYERS = 2;
const int BLOCK_SIZE = 16, BLOCKS = 64, MAX_BATCH = 8, MAX_TOKENS = 64, MAX_KEYS = 512;
const int ROW = KV_HEADS * DIM;

void fail(const char *what) {
    std::fprintf(stderr, "engine: %s: %s\n", what, regard_last_error());
    std::exit(1);
}

void check(regard_status status, const char *what) {
    if (status != REGARD_STATUS_OK) fail(what);
}

// A number that depends on all of these, between -1 and 1: stands for what the model computes.
float element(int what, int layer, int sequence, int position, int i) {
    unsigned x = 2654435761u * (unsigned)(what + 7 * layer + 31 * sequence + 131 * position) + 40503u * (unsigned)i;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return (float)(x % 2001u) / 1000.0f - 1.0f;
}
const int KEY = 0, VALUE = 1, QUERY = 2;

// A request: its tokens so far, and the blocks that hold them.
struct Sequence {
    int id;
    int len;
    std::vector<int32_t> blocks;
};

// New tokens of a sequence in a step.
struct Chunk {
    Sequence *sequence;
    int tokens;
};

// The tables of a step.
struct Tables {
    std::vector<int32_t> cu_seqlens_q, kv_lens, block_table;
    int max_blocks;
};

class Engine {
public:
    Engine() : out(MAX_TOKENS * QUERY_HEADS * DIM), queries(out.size()), pools(2 * LAYERS) {
        for (int block = BLOCKS; block-- > 0;) free_blocks.push_back(block);
        // Slots that were never written are not read: poison them.
        for (std::vector<float> &pool : pools) {
            pool.assign(BLOCKS * BLOCK_SIZE * ROW, std::numeric_limits<float>::quiet_NaN());
        }
        regard_problem bounds = regard_problem();
        bounds.size = sizeof bounds;
        bounds.batch = MAX_BATCH;
        bounds.query_heads = QUERY_HEADS;
        bounds.kv_heads = KV_HEADS;
        bounds.head_dim = DIM;
        bounds.query_len = MAX_TOKENS;
        bounds.query_rows = MAX_TOKENS;
        bounds.kv_len = MAX_KEYS;
        bounds.block_size = BLOCK_SIZE;
        bounds.dtype = REGARD_DTYPE_F32;
        bounds.options = REGARD_CAUSAL | REGARD_RAGGED_QUERIES;
        const char *reason = nullptr;
        check(regard_can_implement(&bounds, nullptr, &reason), "the largest step");
        check(regard_plan_create(&bounds, nullptr, &plan), "planning");
        check(regard_plan_load(plan), "loading");
        workspace.resize(regard_plan_workspace_bytes(plan), 0xff);
    }
    ~Engine() { regard_plan_destroy(plan); }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    // One step of the model: every sequence gets its new tokens, in every layer.
    void step(const std::vector<Chunk> &chunks) {
        take_blocks(chunks);
        const Tables tables = tables_of(chunks);
        for (int layer = 0; layer < LAYERS; layer++) {
            project(layer, chunks);
            check(attend(layer, tables), "attention");
            verify(layer, chunks);
        }
    }

    // A finished request gives its blocks back.
    void finish(Sequence &sequence) {
        free_blocks.insert(free_blocks.end(), sequence.blocks.begin(), sequence.blocks.end());
        sequence.blocks.clear();
        sequence.len = 0;
    }

    // A length that the table cannot hold is refused, and nothing is written.
    void refuse(const std::vector<Chunk> &chunks) {
        Tables tables = tables_of(chunks);
        tables.kv_lens[0] = tables.max_blocks * BLOCK_SIZE + 1;
        const std::vector<float> before = out;
        if (attend(0, tables) != REGARD_STATUS_ARGUMENT || before != out) fail("a refusal");
        std::printf("refused: %s\n", regard_last_error());
    }

private:
    void take_blocks(const std::vector<Chunk> &chunks) {
        for (const Chunk &chunk : chunks) {
            Sequence &sequence = *chunk.sequence;
            sequence.len += chunk.tokens;
            while ((int)sequence.blocks.size() * BLOCK_SIZE < sequence.len) {
                if (free_blocks.empty()) fail("no block is free");
                sequence.blocks.push_back(free_blocks.back());
                free_blocks.pop_back();
            }
        }
    }

    Tables tables_of(const std::vector<Chunk> &chunks) const {
        Tables tables;
        tables.cu_seqlens_q.push_back(0);
        tables.max_blocks = 0;
        for (const Chunk &chunk : chunks) {
            tables.cu_seqlens_q.push_back(tables.cu_seqlens_q.back() + chunk.tokens);
            tables.kv_lens.push_back(chunk.sequence->len);
            tables.max_blocks = std::max(tables.max_blocks, (int)chunk.sequence->blocks.size());
        }
        for (const Chunk &chunk : chunks) {
            std::vector<int32_t> row = chunk.sequence->blocks;
            row.resize(tables.max_blocks, -1); // entries that no row can see
            tables.block_table.insert(tables.block_table.end(), row.begin(), row.end());
        }
        return tables;
    }

    // Stands in for the projections of a layer: ragged queries, keys and values in their pages.
    void project(int layer, const std::vector<Chunk> &chunks) {
        int row = 0;
        for (const Chunk &chunk : chunks) {
            const Sequence &sequence = *chunk.sequence;
            for (int position = sequence.len - chunk.tokens; position < sequence.len; position++, row++) {
                for (int i = 0; i < QUERY_HEADS * DIM; i++) {
                    queries[row * QUERY_HEADS * DIM + i] = element(QUERY, layer, sequence.id, position, i);
                }
                const int slot = sequence.blocks[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE;
                for (int i = 0; i < ROW; i++) {
                    pools[2 * layer][slot * ROW + i] = element(KEY, layer, sequence.id, position, i);
                    pools[2 * layer + 1][slot * ROW + i] = element(VALUE, layer, sequence.id, position, i);
                }
            }
        }
    }

    // Attention of a layer, by the plan that was made once.
    regard_status attend(int layer, const Tables &step) {
        Tables &tables = const_cast<Tables &>(step); // tensors do not mark inputs as only read
        const int64_t batch = (int64_t)tables.kv_lens.size();
        const int64_t rows[] = {tables.cu_seqlens_q.back(), QUERY_HEADS, DIM};
        const int64_t pool[] = {BLOCKS, BLOCK_SIZE, KV_HEADS, DIM};
        const int64_t starts[] = {batch + 1}, table[] = {batch, tables.max_blocks};
        const regard_tensor q = regard_contiguous(queries.data(), REGARD_DTYPE_F32, 3, rows);
        const regard_tensor k = regard_contiguous(pools[2 * layer].data(), REGARD_DTYPE_F32, 4, pool);
        const regard_tensor v = regard_contiguous(pools[2 * layer + 1].data(), REGARD_DTYPE_F32, 4, pool);
        const regard_tensor result = regard_contiguous(out.data(), REGARD_DTYPE_F32, 3, rows);
        const regard_tensor cu_seqlens_q =
            regard_contiguous(tables.cu_seqlens_q.data(), REGARD_DTYPE_I32, 1, starts);
        const regard_tensor kv_lens = regard_contiguous(tables.kv_lens.data(), REGARD_DTYPE_I32, 1, &batch);
        const regard_tensor block_table =
            regard_contiguous(tables.block_table.data(), REGARD_DTYPE_I32, 2, table);
        regard_operands operands = regard_operands();
        operands.size = sizeof operands;
        operands.q = &q;
        operands.k = &k;
        operands.v = &v;
        operands.out = &result;
        operands.cu_seqlens_q = &cu_seqlens_q;
        operands.kv_lens = &kv_lens;
        operands.block_table = &block_table;
        operands.options = REGARD_CAUSAL;
        return regard_plan_run(plan, &operands, workspace.data(), workspace.size(), nullptr);
    }

    // The same in double, from the numbers themselves: no pool, no table.
    void verify(int layer, const std::vector<Chunk> &chunks) const {
        int row = 0;
        for (const Chunk &chunk : chunks) {
            const Sequence &sequence = *chunk.sequence;
            for (int position = sequence.len - chunk.tokens; position < sequence.len; position++, row++) {
                for (int head = 0; head < QUERY_HEADS; head++) verify_row(layer, sequence.id, position, row, head);
            }
        }
    }

    void verify_row(int layer, int sequence, int position, int row, int head) const {
        const int kv_head = head / (QUERY_HEADS / KV_HEADS);
        std::vector<double> scores;
        for (int key = 0; key <= position; key++) {
            double score = 0;
            for (int i = 0; i < DIM; i++) {
                score += (double)element(QUERY, layer, sequence, position, head * DIM + i) *
                         element(KEY, layer, sequence, key, kv_head * DIM + i);
            }
            scores.push_back(score / std::sqrt((double)DIM));
        }
        const double largest = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        std::vector<double> expected(DIM, 0.0);
        for (int key = 0; key <= position; key++) {
            const double weight = std::exp(scores[key] - largest);
            sum += weight;
            for (int i = 0; i < DIM; i++) expected[i] += weight * element(VALUE, layer, sequence, key, kv_head * DIM + i);
        }
        for (int i = 0; i < DIM; i++) {
            const double found = out[(row * QUERY_HEADS + head) * DIM + i];
            if (!(std::fabs(found - expected[i] / sum) < 1e-5)) fail("a wrong result");
        }
    }

    std::vector<float> out, queries;
    std::vector<std::vector<float>> pools; // keys and values of each layer
    std::vector<int32_t> free_blocks;
    std::vector<unsigned char> workspace;
    regard_plan *plan = nullptr;
};

} // namespace

int main() {
    if (regard_abi_version() != REGARD_ABI_VERSION) return 1;
    Engine engine;
    std::vector<Sequence> sequences;
    for (int id = 0; id < 4; id++) sequences.push_back(Sequence{id, 0, {}});
    Sequence &a = sequences[0], &b = sequences[1], &c = sequences[2], &d = sequences[3];

    engine.step({{&a, 40}});                             // a prompt
    engine.step({{&a, 1}, {&b, 50}});                    // a token, and another prompt
    engine.step({{&a, 1}, {&b, 1}, {&c, 17}, {&d, 9}});  // tokens and two prompts
    for (int i = 0; i < 20; i++) engine.step({{&d, 1}, {&c, 1}, {&b, 1}, {&a, 1}});
    engine.finish(b);                                    // its blocks go to others
    engine.step({{&c, 1}, {&a, 33}, {&d, 1}});           // the second question of a chat
    engine.step({{&b, 64}});
    engine.refuse({{&c, 1}, {&a, 1}});
    engine.step({{&a, 1}, {&b, 1}, {&c, 1}, {&d, 1}});
    std::printf("all as expected\n");
    return 0;
}
