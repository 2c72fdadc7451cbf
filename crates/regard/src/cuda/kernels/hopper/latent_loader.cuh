// The scheduler and the loader warps of the decode kernel for latent caches.
#pragma once
#include "hopper/latent_shape.cuh"

namespace latent {

// Whether the keys that rows see depend on numbers on the device, though the host knows how long all lists are.
static __device__ __forceinline__ bool reads_lengths(const AttentionParameters &params) {
    return LISTS && (params.kv_lens || params.cu_seqlens_k || params.key_positions.offsets ||
                     params.offset_kind == OffsetKind::PerSequence);
}

#if LISTS
// The parameters of lists, which follow those of the call: as touch_parameters.
static __device__ __forceinline__ void touch_lists(const AttentionParameters &params) {
    int touched =
        ((const int *)&lists_of(params))[min(threadIdx.x / 32 * 16, (unsigned)sizeof(ListParameters) / 4 - 1)];
    asm volatile("" ::"r"(touched));
}

// Brings the list of a piece into L1: loaders read it one K tile at a time. They read that of few K tiles themselves as
// soon.
static __device__ __forceinline__ void touch_list(const AttentionParameters &params, const Piece &piece, int lane) {
    if (lists_of(params).are_pages || piece.end_tile() - piece.first_tile() <= 2) return;
    int end = min(piece.key_end, piece.tile.first_list_len);
    [[maybe_unused]] int unused; // the load only fills the cache
#pragma unroll 1
    for (int entry = piece.key_start + 32 * lane; entry < end; entry += 32 * 32)
        asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(piece.tile.list + entry));
}
#endif

// The scheduler warp: hands the pieces to loaders and consumers. `load(piece)`: what it loads of them itself.
template <class Load> static __device__ __forceinline__ void
run_scheduler(Shared &shared, WorkIterator<KEYS, false> work, int lane, Load load) {
    PipelineState<PIECES> slot;
    Piece piece;
    bool first = true;
#pragma unroll 1
    do {
        piece.more = work.next(piece);
        hopper::mbarrier_wait(shared_address(&shared.piece_empty[slot.index]), slot.phase ^ 1);
        if (lane == 0) {
            shared.pieces[slot.index] = piece;
            if (piece.more && !piece.starts_here) {
                shared.first_part = piece;
            } else if (piece.more && !piece.ends_here) {
                shared.last_part = slot.index;
            }
            hopper::mbarrier_arrive(shared_address(&shared.piece_full[slot.index]));
        }
        __syncwarp();
        const Piece &handed = shared.pieces[slot.index];
        slot.advance();
        if (!piece.more) break;
        // With lists, the first piece needs no prefetch. Its queries are loaded as soon as its keys.
        if (!LISTS || !first) prefetch_queries<ROWS>(work.params, piece.tile, first_row_of_cta(), lane);
        first = false;
#if LISTS
        grid_dependency_wait();
        touch_list(work.params, piece, lane);
#endif
        load(handed);
    } while (true);
}

// A loader warp: loads the chunks of value warpgroup `index`, or the rest of K tiles.
struct Loader {
    const AttentionParameters &params;
    const TensorMap &map; // of the dims that it loads
    Shared &shared;
    unsigned base; // of shared memory
    int index, lane;
    int box_shift; // log2 of the keys per TMA box
    // Keys that are read once must not drive the kernel's code out of L2.
    unsigned long long policy = hopper::evict_first_policy();

    // The key of this lane's box within a K tile, and its 64-dim column within a chunk.
    __device__ __forceinline__ int own_key() const { return (lane << box_shift) & (KEYS - 1); }
    __device__ __forceinline__ int own_column() const { return (lane << box_shift) / KEYS; }

    // The place of this lane's box of a K tile. Entries past the last visible key are not read.
    __device__ __forceinline__ KeyPlace find_box(const Piece &piece, int key_tile) const {
        const Tile &tile = piece.tile;
        int key = key_tile * KEYS + own_key();
        if (!params.block_size) return contiguous_place(params, tile, key);
        int entry = min(page_index(params, key), page_index(params, piece.key_end - 1));
        int slot = page_slot(params, key, entry);
        KeyPlace place;
        place.token = slot < params.block_size ? slot : 0;
        place.batch = page_of(params, page_table(params, tile.sequence)[entry]);
        return place;
    }

    // 64-dim columns of a K tile that this warp loads together.
    struct Columns {
        int first, count;
        int owner; // the CTA that loads the first one; the CTAs of a cluster have one each
    };

    // Whether this lane has a box of some columns.
    __device__ __forceinline__ bool has_box(const Columns &columns) const {
        return own_column() < columns.count &&
               (!MULTICAST || own_column() == ((int)blockIdx.x + columns.owner) % CTAS_PER_TILE);
    }

    // The stage that they go to: its mbarriers, the phase of their pipeline, and its address.
    struct Stage {
        unsigned long long &full, &empty;
        unsigned phase, address;
    };

    // TMA loads of columns into a stage, when it is free.
    __device__ __forceinline__ void load(const Stage &stage, const Columns &columns, int kv_head,
                                         KeyPlace place) const {
        hopper::mbarrier_wait(shared_address(&stage.empty), stage.phase ^ 1);
        unsigned barrier = shared_address(&stage.full);
        if (lane == 0) hopper::mbarrier_arrive_expect_tx(barrier, columns.count * SUBTILE_BYTES);
        __syncwarp();
        if (!has_box(columns)) return;
        unsigned to = stage.address + (own_column() * SUBTILE_BYTES + own_key() * 128);
        int dim = (columns.first + own_column()) * 64;
        if (MULTICAST) {
            hopper::tma_load_multicast_with(policy, (1 << CTAS_PER_TILE) - 1, to, map, barrier,
                                            {dim, kv_head, place.token, place.batch});
        } else {
            hopper::tma_load_with(policy, to, map, barrier, {dim, kv_head, place.token, place.batch});
        }
    }

    __device__ __forceinline__ void run() {
        // If the lengths are scheduled, the page table is not written by the preceding kernel either.
        bool waits = is_scheduled(params);
        if (!waits) grid_dependency_wait();
        ChunkState chunks;
        PipelineState<REST_STAGES> rest;
        PieceReader<PIECES> pieces;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            int kv_head = piece.tile.kv_head, end = piece.end_tile();
#pragma unroll 1
            for (int key_tile = piece.first_tile(); key_tile < end; key_tile++) {
                KeyPlace place = find_box(piece, key_tile);
                if (waits) grid_dependency_wait();
                waits = false;
                if (index == VALUE_WARPGROUPS) {
                    Stage stage = {shared.rest_full[rest.index], shared.rest_empty[rest.index], rest.phase,
                                   base + REST_OFFSET + rest.index * REST_BYTES};
                    load(stage, {0, REST_SUBTILES, key_tile}, kv_head, place);
                    rest.advance();
                } else {
#pragma unroll 1
                    for (int i = index; i < TILE_CHUNKS; i += VALUE_WARPGROUPS) {
                        PipelineState<CHUNKS> chunk = chunks.at(i);
                        Stage stage = {shared.full[chunk.index], shared.empty[chunk.index], chunk.phase,
                                       chunk_address(base, chunk)};
                        load(stage, {first_dim_of(i) / 64, CHUNK_SUBTILES, 0}, kv_head, place);
                    }
                    chunks.advance(TILE_CHUNKS);
                }
            }
            pieces.release(shared, lane);
        }
    }
};

} // namespace latent
