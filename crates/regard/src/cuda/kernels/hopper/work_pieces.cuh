// The work of a CTA in pieces, for warp-specialized decode kernels: one warp finds them, and hands them to the others
// through shared memory.
#pragma once
#include "decode/decode_tile.cuh"
#include "hopper/pipeline.cuh"

// A piece of work: a tile over a range of keys, in K tiles of KEYS keys.
template <int KEYS> struct WorkPiece {
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

// The pieces of work of a CTA, one after another. IN_STEP: see `find_in_step`.
template <int KEYS, bool IN_STEP> struct WorkIterator {
    const AttentionParameters &params;
    CtaRange range;
    SequenceInfo first;  // of the range's cursor
    bool knows_sequence; // whether `first` is that of the cursor

    // Where every CTA has some whole tiles of equal sequences: has neighbouring CTAs take the tiles of one sequence,
    // then those of the next, so that they read all heads of a token at about the same time; they are neighbours in
    // memory.
    __device__ __forceinline__ bool find_in_step(const SequenceTiles &tiles, int &sequence, int &number) const {
        int own = (int)divide(range.work_per_cta, tiles.cost);
        if (own < 2 || (long long)own * tiles.cost != range.work_per_cta) return false;
        int first = sequence - sequence % own; // of as many sequences
        if (first + own > params.batch) return false;
        int within = (sequence - first) * (int)tiles.count(params) + number;
        number = within / own;
        sequence = first + within - number * own;
        return true;
    }

    __device__ __forceinline__ bool next(WorkPiece<KEYS> &piece) {
        WorkCursor &cursor = range.cursor;
        Tile &tile = piece.tile;
        while (range.begin < range.end) {
            tile.sequence = cursor.sequence;
            tile.seq = knows_sequence ? first : load_work(params, cursor.sequence);
            knows_sequence = false;
#if LISTS
            tile.sequence = tile.seq.sequence;
#endif
            SequenceTiles tiles = sequence_tiles(params, tile.seq, range.costs);
            long long work = tiles.work(params);
            if (range.begin >= cursor.before + work) {
                cursor = {cursor.sequence + 1, cursor.before + work};
                if (!params.stream_k.work_total) cursor = find_sequence(params, range.costs, cursor, range.begin);
                if (cursor.sequence >= params.batch) return false;
                continue;
            }
            int number = (int)divide(range.begin - cursor.before, tiles.cost);
            long long start = cursor.before + (long long)number * tiles.cost, keys_start = start + range.costs.start,
                      end = start + tiles.cost;
            if (IN_STEP && params.stream_k.work_total && find_in_step(tiles, tile.sequence, number))
                tile.seq = load_work(params, tile.sequence);
            tile.kv_head = tiles.row_tiles == 1 ? number : (int)divide(number, tiles.row_tiles);
            tile.first_row = (number - tile.kv_head * tiles.row_tiles) * TILE_ROWS;
            tile.rows = min(TILE_ROWS, tile.seq.q_len * params.group - tile.first_row);
            tile.find_keys(params, tiles.keys, threadIdx.x & 31);
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

// Consumers begin with a rehearsal: a piece without rows and keys, while there is no other yet. It brings the code of a
// piece's start and end into the instruction caches, of which a call with few keys would wait for every line.
//
// Until the preceding kernel has ended nothing that it may write is loaded: L1 would keep it. So a rehearsal loads and
// stores no memory but shared memory.
template <class Piece> static __device__ __forceinline__ void init_rehearsal(Piece &piece) {
    piece = {};
    piece.more = true;
    piece.tile.seq.q_len = 1;
}

// A warp's position in the queue of pieces. `Queue` has the pieces, and mbarriers of each place.
template <int PIECES> struct PieceReader {
    PipelineState<PIECES> slot;

    template <class Queue> __device__ __forceinline__ const auto &wait(const Queue &queue) const {
        hopper::mbarrier_wait(shared_address(&queue.piece_full[slot.index]), slot.phase);
        return queue.pieces[slot.index];
    }
    // The next piece when the preceding kernel has ended, or the rehearsal.
    template <class Queue> __device__ __forceinline__ const auto &next(const Queue &queue, bool rehearses) const {
        if (!rehearses) {
            grid_dependency_wait();
            wait(queue);
        }
        return queue.pieces[rehearses ? PIECES : slot.index];
    }
    template <class Queue> __device__ __forceinline__ void release(Queue &queue, int lane) {
        __syncwarp();
        if (lane == 0) hopper::mbarrier_arrive(shared_address(&queue.piece_empty[slot.index]));
        slot.advance();
    }
};

// Asks for the queries of ROWS rows of a tile, from `first` on, ahead of its keys, behind which they would wait for
// memory. A warp calls this.
template <int ROWS> static __device__ __forceinline__ void prefetch_queries(const AttentionParameters &params,
                                                                            const Tile &tile, int first, int lane) {
    constexpr int LINES = HEAD_DIM * 2 / 128; // of a row
    int rows = min(ROWS, tile.rows - first);
#pragma unroll 1
    for (int i = lane; i < rows * LINES; i += 32) {
        int head, token, row = i / LINES;
        tile.find_row(params, first + row, head, token);
        const RowStrides &strides = params.query.strides;
        long long at =
            tile.sequence * strides.batch + (long long)(tile.seq.q_start + token) * strides.token + head * strides.head;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(params.query.pointer + at * 2 + (i - row * LINES) * 128));
    }
}
