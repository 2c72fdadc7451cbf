// Decode attention on Hopper over a latent cache (MLA): the values are the first dims of the keys.
//
// A K tile is loaded once, by TMA, and serves both products. Rows are few, so they are the N of wgmma: S^T = K Q^T has
// a row of keys and O^T = V^T P^T a row of value dims, and both take their first operand from the K tile as it lies in
// shared memory. As the M, 16 heads would cost as much as 64.
//
// Warp-specialized: a scheduler warp, which finds the CTA's work; three loader warps; a score warpgroup with S^T, the online softmax and P^T; and two value warpgroups
// with half of the value dims each. Scores of a K tile are computed while the values of the one before are added.
//
// The work is divided by stream-K (decode/stream_k.cuh) in units of one K tile. With more than 64 rows, neighbouring
// CTAs share a tile: each has 64 of its rows, and the second finds the keys in L2.
#include "common/paging.cuh"
#include "decode/decode_combine.cuh"
#include "decode/decode_join.cuh"
#include "decode/stream_k.cuh"
#include "hopper/pipeline.cuh"
#include "hopper/wgmma.cuh"

// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, FALLBACK (0), TILE_ROWS, CTAS_PER_TILE, THREADS, SHARED_BYTES.
namespace latent {

constexpr int ROWS = TILE_ROWS / CTAS_PER_TILE; // of this CTA
constexpr int KEYS = 64;                        // of a K tile
constexpr int SUBTILE_BYTES = KEYS * 128;       // 64 dims of a K tile
constexpr int VALUE_WARPGROUPS = 2, DIMS_PER_WARPGROUP = VALUE_DIM / VALUE_WARPGROUPS;
// A K tile arrives in chunks of 128 dims that are values, in turn those of the first and of the second value warpgroup,
// and the rest: dims that are no values.
constexpr int CHUNK_DIMS = 128, CHUNK_SUBTILES = CHUNK_DIMS / 64, CHUNK_BYTES = CHUNK_SUBTILES * SUBTILE_BYTES;
constexpr int TILE_CHUNKS = VALUE_DIM / CHUNK_DIMS, OWN_CHUNKS = TILE_CHUNKS / VALUE_WARPGROUPS;
constexpr int VALUE_SUBTILES = OWN_CHUNKS * CHUNK_SUBTILES; // of a value warpgroup
constexpr int REST_SUBTILES = (HEAD_DIM - VALUE_DIM) / 64, REST_BYTES = REST_SUBTILES * SUBTILE_BYTES;
static __device__ __forceinline__ constexpr int first_dim_of(int chunk) {
    return chunk % VALUE_WARPGROUPS * DIMS_PER_WARPGROUP + chunk / VALUE_WARPGROUPS * CHUNK_DIMS;
}
// A CTA's warps: of the value warpgroups, of the score warpgroup, the scheduler, and the loaders.
constexpr int SCORE_WARP = 4 * VALUE_WARPGROUPS, SCHEDULER_WARP = SCORE_WARP + 4, LOADER_WARP = SCHEDULER_WARP + 1;
constexpr int LOADERS = VALUE_WARPGROUPS + 1; // one for the chunks of each value warpgroup, one for the rest
constexpr int CONSUMER_THREADS = 32 * SCHEDULER_WARP;
// Registers per thread: of two value warpgroups, of the score warpgroup, and of scheduler and loaders, together those of
// an SM.
constexpr int VALUE_REGISTERS = 160, SCORE_REGISTERS = 136, PRODUCER_REGISTERS = 56;
static_assert(THREADS == CONSUMER_THREADS + 128, "as the host has it");
static_assert(VALUE_DIM % (CHUNK_DIMS * VALUE_WARPGROUPS) == 0 && HEAD_DIM % 64 == 0 && HEAD_DIM > VALUE_DIM && (ROWS == 16 || ROWS == 64),
              "what this is written for");

// Pipeline stages: of chunks, of the rest of K tiles, and of probabilities. As many as fit.
constexpr int CHUNKS = ROWS == 16 ? 11 : 8, REST_STAGES = ROWS == 16 ? 3 : 2, PROB_STAGES = ROWS == 16 ? 2 : 1;
constexpr int PROB_BYTES = ROWS * 128;

// A piece of work: a tile over a range of keys.
struct Piece {
    bool more; // false: there are no more pieces
    Tile tile;
    int key_start, key_end;
    bool starts_here, ends_here; // whether this CTA has the tile's first key, and its last
    int first_part, last_part;   // the CTAs that have parts of the tile, divided by CTAS_PER_TILE

    __device__ __forceinline__ int first_tile() const { return key_start / KEYS; }
    // One past the last K tile; `first_tile` if there are no keys.
    __device__ __forceinline__ int end_tile() const { return (key_end + KEYS - 1) / KEYS; }
    __device__ __forceinline__ bool is_whole() const { return starts_here && ends_here; }
};
constexpr int PIECES = 2; // on their way from the scheduler to loaders and consumers

struct Shared {
    unsigned long long full[CHUNKS], empty[CHUNKS];
    unsigned long long rest_full[REST_STAGES], rest_empty[REST_STAGES];
    unsigned long long probs_full[PROB_STAGES], probs_empty[PROB_STAGES];
    unsigned long long piece_full[PIECES], piece_empty[PIECES];
    unsigned long long factor_full, factor_empty;
    Piece pieces[PIECES];
    int rescales[PROB_STAGES];        // whether a factor is not 1
    int last;                         // whether this CTA is the last to finish its part of the tile
    float rescale[PROB_STAGES][ROWS]; // factors of the outputs so far
    float out_factor[ROWS];           // of a piece's outputs in the end
};

// Where things are in shared memory.
constexpr int QUERY_OFFSET = 1024, CHUNKS_OFFSET = QUERY_OFFSET + ROWS * HEAD_DIM * 2,
              REST_OFFSET = CHUNKS_OFFSET + CHUNKS * CHUNK_BYTES,
              PROBS_OFFSET = REST_OFFSET + REST_STAGES * REST_BYTES,
              EXCHANGE_OFFSET = PROBS_OFFSET + PROB_STAGES * PROB_BYTES;
static_assert(sizeof(Shared) <= QUERY_OFFSET, "its place");

// What the score warps exchange: a maximum or a sum per row. At the start, before there is any, the division of work is
// found in the same place.
union Exchange {
    float rows[ROWS];
    struct {
        CtaScan scan;
        CtaRange cta_range;
    } division;
};
static_assert(EXCHANGE_OFFSET + sizeof(Exchange) <= SHARED_BYTES, "as the host has it");

// Named barriers.
constexpr int SCORES_BARRIER = 1, CONSUMERS_BARRIER = 2, VALUES_BARRIER = 3; // the last: one per value warpgroup

// The pieces of work of a CTA, one after another.
struct WorkIterator {
    const AttentionParameters &params;
    CtaRange range;

    __device__ __forceinline__ bool next(Piece &piece) {
        WorkCursor &cursor = range.cursor;
        Tile &tile = piece.tile;
        while (range.begin < range.end) {
            tile.sequence = cursor.sequence;
            tile.seq = load_sequence(params, cursor.sequence);
            SequenceTiles tiles = sequence_tiles(params, tile.seq, range.costs);
            long long work = tiles.work(params);
            if (range.begin >= cursor.before + work) {
                cursor = {cursor.sequence + 1, cursor.before + work};
                if (!params.stream_k.work_total) cursor = find_sequence(params, range.costs, cursor, range.begin);
                if (cursor.sequence >= params.batch) return false;
                continue;
            }
            int number = (int)divide(range.begin - cursor.before, tiles.cost);
            tile.kv_head = tiles.row_tiles == 1 ? number : (int)divide(number, tiles.row_tiles);
            tile.first_row = (number - tile.kv_head * tiles.row_tiles) * TILE_ROWS;
            tile.rows = min(TILE_ROWS, tile.seq.q_len * params.group - tile.first_row);
            int first_token = tile.first_row / params.group, last_token = (tile.first_row + tile.rows - 1) / params.group;
            tile.any_start = visible_start(params, tile.seq, first_token);
            tile.every_start = visible_start(params, tile.seq, last_token);
            tile.every_end = visible_end(params, tile.seq, first_token);
            tile.any_end = visible_end(params, tile.seq, last_token);
            long long start = cursor.before + number * tiles.cost, keys_start = start + range.costs.start,
                      end = start + tiles.cost;
            piece.starts_here = start >= range.begin;
            piece.ends_here = end <= range.end;
            piece.first_part = piece.starts_here ? (int)part_index() : (int)divide(start, range.work_per_cta);
            piece.last_part = piece.ends_here ? (int)part_index() : (int)divide(end - 1, range.work_per_cta);
            long long until = min(range.end, end);
            int unit = tiles.first_unit + (int)max(range.begin - keys_start, 0ll),
                last_unit = tiles.first_unit + (int)max(until - keys_start, 0ll);
            piece.key_start = max(tile.any_start, unit * KEYS);
            piece.key_end = (int)min((long long)tile.any_end, (long long)last_unit * KEYS);
            if (piece.key_end <= piece.key_start) piece.key_start = piece.key_end = 0;
            range.begin = until;
            return true;
        }
        return false;
    }
};

// A position in the ring of chunks.
struct ChunkState {
    PipelineState<CHUNKS> first;

    // The position of the chunk `count` further.
    __device__ __forceinline__ PipelineState<CHUNKS> at(int count) const {
        bool wraps = first.index + count >= CHUNKS;
        return {first.index + count - (wraps ? CHUNKS : 0), first.phase ^ wraps};
    }
    __device__ __forceinline__ void advance(int count) { first = at(count); }
};

static __device__ __forceinline__ unsigned chunk_address(unsigned base, const PipelineState<CHUNKS> &chunk) {
    return base + CHUNKS_OFFSET + chunk.index * CHUNK_BYTES;
}

// A CTA's first row within a tile.
static __device__ __forceinline__ int first_row_of_cta() { return blockIdx.x % CTAS_PER_TILE * ROWS; }

// The scheduler warp: hands the pieces to loaders and consumers.
static __device__ __forceinline__ void run_scheduler(Shared &shared, WorkIterator work, int lane) {
    PipelineState<PIECES> slot;
    Piece piece;
#pragma unroll 1
    do {
        piece.more = work.next(piece);
        hopper::mbarrier_wait(shared_address(&shared.piece_empty[slot.index]), slot.phase ^ 1);
        if (lane == 0) {
            shared.pieces[slot.index] = piece;
            hopper::mbarrier_arrive(shared_address(&shared.piece_full[slot.index]));
        }
        __syncwarp();
        slot.advance();
    } while (piece.more);
}

// A warp's position in the queue of pieces.
struct PieceReader {
    PipelineState<PIECES> slot;

    __device__ __forceinline__ const Piece &wait(const Shared &shared) const {
        hopper::mbarrier_wait(shared_address(&shared.piece_full[slot.index]), slot.phase);
        return shared.pieces[slot.index];
    }
    __device__ __forceinline__ void release(Shared &shared, int lane) {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.piece_empty[slot.index]));
        slot.advance();
    }
};

// A loader warp: loads the chunks of value warpgroup `index`, or the rest of K tiles.
struct Loader {
    // Without many K tiles in shared memory, L2 has to have them when a stage gets free: K tiles that are prefetched
    // ahead of those that are loaded.
    static constexpr int PREFETCH_TILES = ROWS == 16 ? 0 : 2;
    static constexpr bool READS_ONCE = CTAS_PER_TILE == 1;

    const AttentionParameters &params;
    const TensorMap &map;
    Shared &shared;
    unsigned base; // of shared memory
    int index, lane;
    int box_shift; // log2 of the keys per TMA box
    // Keys that are read once must not drive the kernel's code out of L2.
    unsigned long long policy = READS_ONCE ? hopper::evict_first_policy() : hopper::evict_normal_policy();

    // Where a box starts: token and sequence, or slot and page.
    struct Place {
        int token, sequence;
    };

    // The key of this lane's box within a K tile, and its 64-dim column within a chunk.
    __device__ __forceinline__ int own_key() const { return (lane << box_shift) & (KEYS - 1); }
    __device__ __forceinline__ int own_column() const { return lane << box_shift >> 6; }

    // This lane's box of a K tile. Entries past the last visible key are not read.
    __device__ __forceinline__ Place find_box(const Piece &piece, int key_tile) const {
        const Tile &tile = piece.tile;
        int key = key_tile * KEYS + own_key();
        if (!params.block_size) return {tile.seq.kv_start + key, params.cu_seqlens_k ? 0 : tile.sequence};
        int entry = min(page_index(params, key), page_index(params, piece.key_end - 1));
        int slot = key - entry * params.block_size;
        return {slot < params.block_size ? slot : 0, page_of(params, page_table(params, tile.sequence)[entry])};
    }

    // Loads `columns` 64-dim columns of a K tile, from column `first` on, when their place is free.
    __device__ __forceinline__ void load(unsigned long long &full, unsigned long long &empty, unsigned phase,
                                         unsigned to, int first, int columns, int kv_head, Place place) const {
        hopper::mbarrier_wait(shared_address(&empty), phase ^ 1);
        unsigned barrier = shared_address(&full);
        if (lane == 0) hopper::mbarrier_arrive_expect_tx(barrier, columns * SUBTILE_BYTES);
        __syncwarp();
        if (own_column() < columns)
            hopper::tma_load_with(policy, to + own_column() * SUBTILE_BYTES + own_key() * 128, map, barrier,
                                  (first + own_column()) * 64, kv_head, place.token, place.sequence);
    }

    __device__ __forceinline__ void prefetch(int first, int columns, int kv_head, Place place) const {
        if (own_column() < columns)
            hopper::tma_prefetch(map, (first + own_column()) * 64, kv_head, place.token, place.sequence);
    }

    // Calls `f(first column, columns)` for this loader's parts of a K tile.
    template <class F> __device__ __forceinline__ void for_each_part(F f) const {
        if (index == VALUE_WARPGROUPS) {
            f(VALUE_DIM / 64, REST_SUBTILES);
        } else {
#pragma unroll
            for (int i = 0; i < OWN_CHUNKS; i++) f(first_dim_of(i * VALUE_WARPGROUPS + index) / 64, CHUNK_SUBTILES);
        }
    }

    __device__ __forceinline__ void run() {
        grid_dependency_wait();
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
        PieceReader pieces;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) return;
            int kv_head = piece.tile.kv_head, end = piece.end_tile();
#pragma unroll 1
            for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
                Place place = find_box(piece, key_tile);
                if (index == VALUE_WARPGROUPS) {
                    load(shared.rest_full[rest.index], shared.rest_empty[rest.index], rest.phase,
                         base + REST_OFFSET + rest.index * REST_BYTES, VALUE_DIM / 64, REST_SUBTILES, kv_head, place);
                    rest.advance();
                } else {
#pragma unroll 1
                    for (int i = index; i < TILE_CHUNKS; i += VALUE_WARPGROUPS) {
                        PipelineState<CHUNKS> chunk = chunks.at(i);
                        load(shared.full[chunk.index], shared.empty[chunk.index], chunk.phase,
                             chunk_address(base, chunk), first_dim_of(i) / 64, CHUNK_SUBTILES, kv_head, place);
                    }
                    chunks.advance(TILE_CHUNKS);
                }
                if (PREFETCH_TILES && key_tile + PREFETCH_TILES < end && first_row_of_cta() == 0) {
                    Place ahead = find_box(piece, key_tile + PREFETCH_TILES);
                    for_each_part([&](int first, int columns) { prefetch(first, columns, kv_head, ahead); });
                }
            }
            pieces.release(shared, lane);
        }
    }
};

// The score warpgroup: S^T = K Q^T, the online softmax, and P^T. A thread has the scores of two keys, and of COLUMNS
// rows: column 2 j + e is row 8 j + 2 (lane % 4) + e.
struct ScoreWarpgroup {
    static constexpr int COLUMNS = ROWS / 4;
    const AttentionParameters &params;
    Shared &shared;
    Exchange &exchange;
    unsigned base; // of shared memory
    int warp, lane;

    ChunkState chunks;
    PipelineState<REST_STAGES> rest;
    PipelineState<PROB_STAGES> probs;
    PieceReader pieces;
    unsigned factor_phase = 0;
    float scores[ROWS / 2];
    float row_max[COLUMNS], row_sum[COLUMNS]; // maxima of all keys, this thread's part of sums

    __device__ __forceinline__ int row_of(int column) const { return column / 2 * 8 + 2 * (lane & 3) + column % 2; }
    __device__ __forceinline__ void synchronize() const { hopper::named_barrier_sync(SCORES_BARRIER, 128); }

    // Queries of the CTA's rows, as wgmma reads them: a warp per row.
    __device__ __forceinline__ void load_queries(const Tile &tile) const {
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
#pragma unroll 1
        for (int row = warp; row < ROWS; row += 4) {
            bool present = first_row_of_cta() + row < tile.rows;
            int head, token;
            tile.find_row(params, present ? first_row_of_cta() + row : 0, head, token);
            const unsigned short *from = (const unsigned short *)params.query.pointer +
                                         tile.sequence * params.query.strides.batch +
                                         (long long)(tile.seq.q_start + token) * params.query.strides.token +
                                         head * params.query.strides.head;
#pragma unroll
            for (int chunk = 0; chunk < HEAD_DIM / 8; chunk += 32)
                if (chunk + 32 <= HEAD_DIM / 8 || lane < HEAD_DIM / 8 - chunk)
                    cp_async(query.chunk(row, chunk + lane), from + (chunk + lane) * 8, present ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        hopper::fence_proxy_async();
        synchronize();
    }

    // S^T of the next K tile.
    __device__ __forceinline__ void mma_qk() {
        SharedTile<ROWS> query = {base + QUERY_OFFSET};
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; i++) {
            PipelineState<CHUNKS> chunk = chunks.at(i);
            hopper::mbarrier_wait(shared_address(&shared.full[chunk.index]), chunk.phase);
            SharedTile<KEYS> keys = {chunk_address(base, chunk)};
#pragma unroll
            for (int step = 0; step < CHUNK_DIMS / 16; step++)
                Wgmma<ROWS>::mma_ss(scores, keys.k_major(step), query.k_major(first_dim_of(i) / 16 + step), i + step);
        }
        hopper::mbarrier_wait(shared_address(&shared.rest_full[rest.index]), rest.phase);
        SharedTile<KEYS> keys = {base + REST_OFFSET + rest.index * REST_BYTES};
#pragma unroll
        for (int step = 0; step < REST_SUBTILES * 4; step++)
            Wgmma<ROWS>::mma_ss(scores, keys.k_major(step), query.k_major(VALUE_DIM / 16 + step), 1);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        warpgroup_fence_operand(scores);
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.rest_empty[rest.index]));
        chunks.advance(TILE_CHUNKS);
        rest.advance();
    }

    // Dot products become scores, in units of log2.
    __device__ __forceinline__ void modify_scores(const Tile &tile, int first_key) {
        float scale = params.scale * LOG2_E;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) scores[i] = __fmul_rn(scores[i], scale);
        if (first_key >= tile.every_start && first_key + KEYS <= tile.every_end) return;
        // Bit 2 c + half: whether row `row_of(c)` sees the key. Not unrolled, because it rarely runs.
        unsigned visible = 0;
#pragma unroll 1
        for (int c = 0; c < COLUMNS; c++) {
            int head, token, key = first_key + 16 * warp + (lane >> 2);
            tile.find_row(params, min(first_row_of_cta() + row_of(c), tile.rows - 1), head, token);
            int start = visible_start(params, tile.seq, token), end = visible_end(params, tile.seq, token);
            visible |= (unsigned)(key >= start && key < end) << 2 * c;
            visible |= (unsigned)(key + 8 >= start && key + 8 < end) << 2 * c + 1;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (!(visible >> 2 * c + half & 1)) scores[c / 2 * 4 + 2 * half + c % 2] = -INF;
    }

    // Waits until the value warpgroups are done with the probabilities before.
    __device__ __forceinline__ void wait_probs_empty() const {
        hopper::mbarrier_wait(shared_address(&shared.probs_empty[probs.index]), probs.phase ^ 1);
    }

    // Combines a number per row over all threads that have the row, by `f`, and leaves it with all of them. It rarely
    // runs, so its code is short: through shared memory, where the next probabilities will be.
    template <class F> __device__ __forceinline__ void reduce_rows(float (&x)[COLUMNS], F f) {
        wait_probs_empty();
        float *all = (float *)(dynamic_shared + PROBS_OFFSET + probs.index * PROB_BYTES); // [COLUMNS][128]
        static_assert(COLUMNS * 128 * sizeof(float) <= PROB_BYTES, "one stage of probabilities");
        int thread = threadIdx.x % 128;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) all[c * 128 + thread] = x[c];
        synchronize();
        if (thread < ROWS) {
            const float *own = all + (thread / 8 * 2 + thread % 2) * 128 + thread % 8 / 2;
            float combined = own[0];
#pragma unroll 4
            for (int i = 1; i < 32; i++) combined = f(combined, own[i * 4]);
            exchange.rows[thread] = combined;
        }
        synchronize();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) x[c] = exchange.rows[row_of(c)];
    }

    // Raises the maxima to those of the K tile, and leaves the factors of outputs in shared memory.
    __device__ __forceinline__ void raise_maxima() {
        float most[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) most[c] = fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]);
        reduce_rows(most, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            most[c] = fmaxf(most[c], row_max[c]);
            // An empty row uses 0 as its reference: -inf - -inf is NaN.
            float factor = exp2_fast(row_max[c] - (most[c] == -INF ? 0.0f : most[c]));
            row_max[c] = most[c];
            row_sum[c] = __fmul_rn(row_sum[c], factor);
            if (warp == 0 && lane < 4) shared.rescale[probs.index][row_of(c)] = factor;
        }
    }

    // Online softmax over the scores of a K tile, which become probabilities in shared memory. The maxima are raised
    // only if a score is above one by more than MARGIN, so that outputs are seldom rescaled: probabilities of 2^MARGIN
    // are no less exact.
    __device__ __forceinline__ void softmax_step() {
        constexpr float MARGIN = 8.0f;
        bool above = false;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            above |= fmaxf(scores[c / 2 * 4 + c % 2], scores[c / 2 * 4 + 2 + c % 2]) > row_max[c] + MARGIN;
        bool rescales = hopper::named_barrier_or(SCORES_BARRIER, 128, above);
        if (rescales) raise_maxima();
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            float reference = row_max[c] == -INF ? 0.0f : row_max[c];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &score = scores[c / 2 * 4 + 2 * half + c % 2];
                score = exp2_fast(score - reference);
                row_sum[c] = __fadd_rn(row_sum[c], score);
            }
        }
        wait_probs_empty();
        // Lane l gives the address of row l % 8 of matrix l / 8: rows of the tile, then the two groups of eight keys.
        SharedTile<ROWS> to = {base + PROBS_OFFSET + probs.index * PROB_BYTES};
#pragma unroll
        for (int j = 0; j < ROWS / 8; j += 2) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = (j + i / 2) * 4 + i % 2 * 2;
                pairs[i] = E::pack(scores[at], scores[at + 1]);
            }
            hopper::stmatrix_x4_transposed(to.chunk(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2), pairs[0],
                                           pairs[1], pairs[2], pairs[3]);
        }
        if (warp == 0 && lane == 0) shared.rescales[probs.index] = rescales;
        hopper::fence_proxy_async();
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_full[probs.index]));
        probs.advance();
    }

    // The rows' states at the end of a piece: to the workspace, or into factors of outputs and the LSE. A thread per
    // row.
    __device__ __forceinline__ void finish_rows(const Piece &piece) {
        reduce_rows(row_sum, [](float a, float b) { return a + b; });
        float *maxima = (float *)(dynamic_shared + PROBS_OFFSET + probs.index * PROB_BYTES);
        if (warp == 0) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
                if (lane < 4) maxima[row_of(c)] = row_max[c];
        }
        synchronize();
        hopper::mbarrier_wait(shared_address(&shared.factor_empty), factor_phase ^ 1);
        factor_phase ^= 1;
        int row_of_cta = 32 * warp + lane, row = first_row_of_cta() + row_of_cta;
        if (row_of_cta < ROWS && row < piece.tile.rows) {
            State state = {maxima[row_of_cta], exchange.rows[row_of_cta]};
            if (piece.is_whole()) {
                int head, token;
                piece.tile.find_row(params, row, head, token);
                FinalizedRow finalized =
                    finalize_row(params, state, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
                shared.out_factor[row_of_cta] = finalized.factor;
                if (params.lse.pointer) store_lse(params, piece.tile, head, token, finalized.lse);
            } else {
                float *partial = partial_state(params, part_index(), piece.starts_here ? 0 : 1);
                partial[row] = state.max;
                partial[TILE_ROWS + row] = state.sum;
            }
        }
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_full));
    }

    __device__ __forceinline__ void finish_part(const Piece &piece) const;
    __device__ __forceinline__ void run();
};

// A value warpgroup: O^T = V^T P^T for half of the value dims. Element [i][4 j + 2 h + e] of a thread's sums is value
// dim 64 i + 16 warp + lane / 4 + 8 h of the warpgroup's, and row 8 j + 2 (lane % 4) + e.
struct ValueWarpgroup {
    const AttentionParameters &params;
    Shared &shared;
    unsigned base;       // of shared memory
    int half;            // which value warpgroup
    int warp, lane;      // warp within it

    ChunkState chunks;
    PipelineState<PROB_STAGES> probs;
    PieceReader pieces;
    unsigned factor_phase = 0;
    float out[VALUE_SUBTILES][ROWS / 2];

    // This warpgroup's chunk i of the current K tile.
    __device__ __forceinline__ PipelineState<CHUNKS> own_chunk(int i) const {
        return chunks.at(i * VALUE_WARPGROUPS + half);
    }

    __device__ __forceinline__ void rescale() {
        const float *factors = shared.rescale[probs.index];
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float factor = factors[8 * j + 2 * (lane & 3) + e];
#pragma unroll
                for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) out[i][4 * j + 2 * h + e] *= factor;
            }
    }

    // 0 * NaN = NaN, so values that the piece does not have are zeroed.
    __device__ __forceinline__ void zero_others(const Piece &piece, int first_key) const {
        if (first_key >= piece.key_start && first_key + KEYS <= piece.key_end) return;
#pragma unroll 1
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(i));
#pragma unroll 1
            for (int at = threadIdx.x % 128; at < CHUNK_BYTES / 16; at += 128) {
                int key = first_key + at / 8 % KEYS;
                if (key < piece.key_start || key >= piece.key_end) st_shared_v4(keys + at * 16, make_uint4(0, 0, 0, 0));
            }
        }
        hopper::fence_proxy_async();
        hopper::named_barrier_sync(VALUES_BARRIER + half, 128);
    }

    // O^T += V^T P^T; every chunk is released as soon as it was read.
    __device__ __forceinline__ void mma_pv() {
        SharedTile<ROWS> p = {base + PROBS_OFFSET + probs.index * PROB_BYTES};
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        hopper::wgmma_fence();
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; i++) {
            unsigned keys = chunk_address(base, own_chunk(i));
#pragma unroll
            for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
                for (int j = 0; j < CHUNK_SUBTILES; j++)
                    Wgmma<ROWS>::mma_ss_rows_transposed(out[i * CHUNK_SUBTILES + j],
                                                        SharedTile<KEYS>{keys + j * SUBTILE_BYTES}.mn_major(step),
                                                        p.k_major(step));
            hopper::wgmma_commit();
        }
        static_assert(OWN_CHUNKS == 2, "the waits below");
        hopper::wgmma_wait<1>();
        release(own_chunk(0));
        hopper::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++) warpgroup_fence_operand(out[i]);
        release(own_chunk(1));
    }

    __device__ __forceinline__ void release(const PipelineState<CHUNKS> &chunk) const {
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.empty[chunk.index]));
    }

    // Calls `store(row of the CTA, f)` for this thread's rows that exist, one after another; `f(each)` calls
    // `each(dim, output)` for the thread's outputs of the row.
    template <class Store> __device__ __forceinline__ void for_each_row(const Piece &piece, Store store) const {
#pragma unroll
        for (int c = 0; c < ROWS / 4; c++) {
            int own_lane = opaque(lane), row = c / 2 * 8 + 2 * (own_lane & 3) + c % 2;
            int first_dim = half * DIMS_PER_WARPGROUP + 16 * warp + (own_lane >> 2);
            if (first_row_of_cta() + row >= piece.tile.rows) continue;
            store(row, [&](auto each) {
#pragma unroll
                for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
                    for (int h = 0; h < 2; h++) each(first_dim + 64 * i + 8 * h, out[i][c / 2 * 4 + 2 * h + c % 2]);
            });
        }
    }

    // Stores a piece's outputs: to the workspace, or normalized as rows of the output.
    __device__ __forceinline__ void store_outputs(const Piece &piece) const {
        if (!piece.is_whole()) {
            float *partial = partial_state(params, part_index(), piece.starts_here ? 0 : 1) + 2 * TILE_ROWS;
            for_each_row(piece, [&](int row, auto outputs) {
                float *to = partial + (first_row_of_cta() + row) * VALUE_DIM;
                outputs([&](int dim, float x) { to[dim] = x; });
            });
            return;
        }
        for_each_row(piece, [&](int row, auto outputs) {
            int head, token;
            piece.tile.find_row(params, first_row_of_cta() + row, head, token);
            float factor = shared.out_factor[row];
            long long at = out_offset(params, piece.tile, head, token);
            if (params.out_f32) {
                float *to = (float *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = __fmul_rn(x, factor); });
            } else {
                unsigned short *to = (unsigned short *)params.out.pointer + at;
                outputs([&](int dim, float x) { to[dim] = E::from_float(bound_output(__fmul_rn(x, factor))); });
            }
        });
    }

    __device__ __forceinline__ void run();
};

// Whether a piece leaves a partial state, so that all consumers have to have stored it before it is counted.
static __device__ __forceinline__ bool is_counted(const AttentionParameters &params, const Piece &piece) {
    return !piece.is_whole() || params.stream_k.partial_ranges;
}

// Counts a part of a tile that has others for `join`, or combines them if this is the last one.
__device__ __forceinline__ void ScoreWarpgroup::finish_part(const Piece &piece) const {
    int rank = blockIdx.x % CTAS_PER_TILE, thread = opaque(threadIdx.x % 128);
    unsigned *arrivals = arrivals_of(params, piece.first_part, rank);
    if (params.stream_k.partial_ranges) {
        if (thread != 0) return;
        if (params.stream_k.work_total) {
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
        } else if (piece.starts_here) {
            partial_range_of(params, piece.tile) = {piece.first_part, piece.last_part};
        }
        return;
    }
    if (thread == 0) {
        unsigned before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
        shared.last = before == (unsigned)(piece.last_part - piece.first_part);
        if (shared.last) *arrivals = 0;
    }
    synchronize();
    if (shared.last) {
        int end = min(piece.tile.rows, first_row_of_cta() + ROWS);
        for (int row = first_row_of_cta() + thread / 32; row < end; row += 4)
            combine_row<STATES_PER_BATCH>(params, piece.tile, row, thread & 31, piece.first_part, piece.last_part,
                                          element_out_type(params));
    }
    synchronize();
}

__device__ __forceinline__ void ScoreWarpgroup::run() {
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = pieces.wait(shared);
        if (!piece.more) return;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            row_max[c] = -INF;
            row_sum[c] = 0.0f;
        }
        load_queries(piece.tile);
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            mma_qk();
            modify_scores(piece.tile, key_tile * KEYS);
            softmax_step();
        }
        finish_rows(piece);
        if (is_counted(params, piece)) {
            hopper::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_THREADS);
            finish_part(piece);
        }
        pieces.release(shared, lane);
    }
}

__device__ __forceinline__ void ValueWarpgroup::run() {
    grid_dependency_wait();
#pragma unroll 1
    for (;;) {
        const Piece &piece = pieces.wait(shared);
        if (!piece.more) return;
#pragma unroll
        for (int i = 0; i < VALUE_SUBTILES; i++)
#pragma unroll
            for (int k = 0; k < ROWS / 2; k++) out[i][k] = 0.0f;
        int end = piece.end_tile();
#pragma unroll 1
        for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
            hopper::mbarrier_wait(shared_address(&shared.probs_full[probs.index]), probs.phase);
            if (shared.rescales[probs.index]) rescale();
            // The score warpgroup has waited for the K tile; so must everyone who reads what TMA wrote.
#pragma unroll
            for (int i = 0; i < OWN_CHUNKS; i++)
                hopper::mbarrier_wait(shared_address(&shared.full[own_chunk(i).index]), own_chunk(i).phase);
            zero_others(piece, key_tile * KEYS);
            mma_pv();
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.probs_empty[probs.index]));
            chunks.advance(TILE_CHUNKS);
            probs.advance();
        }
        hopper::mbarrier_wait(shared_address(&shared.factor_full), factor_phase);
        factor_phase ^= 1;
        store_outputs(piece);
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.factor_empty));
        if (is_counted(params, piece)) hopper::named_barrier_arrive(CONSUMERS_BARRIER, CONSUMER_THREADS);
        pieces.release(shared, lane);
    }
}

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
        ScoreWarpgroup scores = {params, shared, exchange, base, warp - SCORE_WARP, lane};
        scores.run();
    } else {
        hopper::setmaxnreg_inc<VALUE_REGISTERS>();
        ValueWarpgroup values = {params, shared, base, warp / 4, warp % 4, lane};
        values.run();
    }
}

// The kernel that combines the parts of tiles that `decode` split over several CTAs. Groups of VALUE_DIM / 4 threads have
// a row each, or all of a CTA have one and take its parts in turn: the host says by the grid.
constexpr int JOIN_THREADS = 512, JOIN_GROUP = VALUE_DIM / 4, JOIN_GROUPS = JOIN_THREADS / JOIN_GROUP;

struct JoinShared {
    float4 out[JOIN_GROUPS][JOIN_GROUP];
    float weights[JOIN_THREADS]; // of parts; a row has no more than threads
    float maxima[JOIN_THREADS / 32], sums[JOIN_THREADS / 32];
};

// `groups`: of a row. The row may not exist.
static __device__ __forceinline__ void join_row(const AttentionParameters &params, const JoinedRows &joined, int row,
                                                int groups) {
    JoinShared &shared = *(JoinShared *)dynamic_shared;
    int thread = threadIdx.x, lane = thread & 31, column = thread % JOIN_GROUP;
    int first_group = thread / (JOIN_GROUP * groups) * groups, group = thread / JOIN_GROUP - first_group;
    int first_thread = first_group * JOIN_GROUP, warps = groups * (JOIN_GROUP / 32);
    int parts = row < joined.rows ? joined.parts.last - joined.parts.first + 1 : 0;
    PartialStates slot = {partial_state(params, joined.parts.first, 1),
                          params.stream_k.partials_per_cta * (long long)PARTIAL_FLOATS};
    // A thread per four outputs of some parts, in batches: loads have long latency, so the first batch is on its way
    // while the weights are found, and each is loaded whole before any of it is used.
    constexpr int BATCH = 8;
    float4 values[BATCH];
    auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * groups < parts)
                values[i] =
                    __ldcg((const float4 *)(slot(first + i * groups) + 2 * TILE_ROWS + row * VALUE_DIM) + column);
    };
    load(group);
    // A thread per part: their weights.
    State mine = {-INF, 0.0f};
    int part = thread - first_thread;
    if (part < parts) mine = {__ldcg(slot(part) + row), __ldcg(slot(part) + TILE_ROWS + row)};
    float most = mine.max;
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    if (lane == 0) shared.maxima[thread / 32] = most;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < warps; i++) most = fmaxf(most, shared.maxima[first_thread / 32 + i]);
    float weight = exp2_fast(mine.max - (most == -INF ? 0.0f : most)), sum = __fmul_rn(mine.sum, weight);
    shared.weights[thread] = weight;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) shared.sums[thread / 32] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < warps; i++) sum += shared.sums[first_thread / 32 + i];
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int first = group; first < parts; first += groups * BATCH) {
        if (first != group) load(first);
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            if (first + i * groups < parts)
                out = add_four(out, shared.weights[first_thread + first + i * groups], values[i]);
    }
    if (groups > 1) {
        shared.out[first_group + group][column] = out;
        __syncthreads();
    }
    if (group != 0 || row >= joined.rows) return;
    for (int i = 1; i < groups; i++) out = add_four(out, 1.0f, shared.out[first_group + i][column]);
    int head, token;
    joined.tile.find_row(params, row, head, token);
    FinalizedRow finalized =
        finalize_row(params, {most, sum}, load_sink(params, head, 1.0f), 1.0f, params.lse.pointer != 0);
    store_four(params, out_offset(params, joined.tile, head, token), 4 * column, scale_four(out, finalized.factor),
               element_out_type(params));
    if (params.lse.pointer && column == 0) store_lse(params, joined.tile, head, token, finalized.lse);
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
