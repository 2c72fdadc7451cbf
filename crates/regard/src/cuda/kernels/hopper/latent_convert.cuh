// Loaders of the decode kernel for latent caches of mla656: a warp reads the codes of a chunk of a K tile into
// registers, and writes them as bf16, without their scales, in the layout that TMA would write.
//
// Loads hit L2: the records of a K tile are prefetched two K tiles ahead.
#pragma once
#include "hopper/latent_keys.cuh"

namespace latent {

// 16 codes, which are read once; zeros if they are not `present`.
static __device__ __forceinline__ uint4 load_codes(const unsigned char *from, bool present) {
    uint4 x = make_uint4(0, 0, 0, 0);
    asm volatile("{\n"
                 ".reg .pred present;\n"
                 "setp.ne.b32 present, %5, 0;\n"
                 "@present ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];\n"
                 "}"
                 : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
                 : "l"(from), "r"((int)present)
                 : "memory");
    return x;
}

// The codes in the lower 16 bits, as f16, in which they are exact. NaN stays NaN.
static __device__ __forceinline__ unsigned widen_pair(unsigned codes) {
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)codes));
    return pair;
}

// The same as bf16, in which they are exact too.
static __device__ __forceinline__ unsigned convert_pair(unsigned codes) {
    typedef Element<ElementType::F16> Half;
    unsigned pair = widen_pair(codes);
    return E::pack(Half::to_float((unsigned short)pair), Half::to_float((unsigned short)(pair >> 16)));
}

// A loader warp: takes chunks of K tiles in turn with the others.
struct Converter : KeyLoader {
    static constexpr int PREFETCH = 2;                    // K tiles ahead
    static constexpr int LOADS = KEYS * CHUNK_DIMS / 512; // of a lane per chunk, 16 codes each
    static constexpr int BATCH = LOADS / 2;               // in flight: those of 32 keys
    static_assert(BATCH == 8 && CHUNK_SUBTILES == 2, "four keys per load of a warp, eight lanes each");

    // The chunk that this warp converts, and its keys.
    int key_tile, chunk; // `chunk`: of the K tile
    ChunkState chunks;   // of the K tile
    PipelineState<REST_STAGES> rest;
    Keys keys;
    uint4 codes[BATCH];

    // This lane's key among four, and its 16 codes among those of a key. Eight lanes that store at once have two keys
    // and one of two 64-dim columns, so that their stores have no bank conflicts.
    __device__ __forceinline__ int own_key() const { return lane / 16 * 2 + lane / 4 % 2; }
    __device__ __forceinline__ int own_part() const { return lane / 8 % 2 * 4 + lane % 4; }

    // Asks for the records of a K tile.
    __device__ __forceinline__ void prefetch(const Piece &piece, int tile) const {
        if (tile >= piece.end_tile()) return;
        Keys ahead = find_keys(piece, tile);
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (ahead.present[half] >> lane & 1) hopper::bulk_prefetch(policy, ahead.from[half], RECORD_BYTES);
    }

    // Begins to load 16 codes of keys 32 * half + 4 * i to 32 * half + 4 * i + 3.
    __device__ __forceinline__ void load(int half, int i) {
        int key = 4 * i + own_key();
        const unsigned char *from = (const unsigned char *)__shfl_sync(~0u, (unsigned long long)keys.from[half], key) +
                                    (first_dim_of(chunk) + own_part() * 16);
        codes[i] = load_codes(from, keys.present[half] >> key & 1);
    }

    // Converts what `load` has loaded. `to`: where this lane's first eight numbers of keys 0 to 3 go, in an even and in
    // an odd group of four keys.
    __device__ __forceinline__ void convert(int half, int i, const unsigned (&to)[2]) const {
        unsigned at = to[i % 2] + (32 * half + 4 * i) * 128;
        const uint4 &x = codes[i];
        st_shared_v4(
            at, make_uint4(convert_pair(x.x), convert_pair(x.x >> 16), convert_pair(x.y), convert_pair(x.y >> 16)));
        st_shared_v4(at ^ 16, make_uint4(convert_pair(x.z), convert_pair(x.z >> 16), convert_pair(x.w),
                                         convert_pair(x.w >> 16)));
    }

    __device__ __forceinline__ void next_tile() {
        key_tile++;
        chunks.advance(TILE_CHUNKS);
        rest.advance();
    }

    // Goes to the next chunk of this warp, which may be past the piece; whether the piece has it. If not, no keys are
    // present.
    __device__ __forceinline__ bool advance(const Piece &piece) {
        chunk += LOADERS;
        bool same_tile = chunk < TILE_CHUNKS;
#pragma unroll 1
        for (; chunk >= TILE_CHUNKS; chunk -= TILE_CHUNKS) next_tile();
        bool more = key_tile < piece.end_tile();
        if (!more) {
            keys.present[0] = keys.present[1] = 0;
        } else if (!same_tile) {
            keys = find_keys(piece, key_tile);
        }
        return more;
    }

    // Converts the chunks of a piece that this warp takes, of which it has at least one.
    __device__ __forceinline__ void run_piece(const Piece &piece) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) load(0, i);
        bool more;
#pragma unroll 1
        do {
            // With some chunk of each K tile, its rest, and the records of a later K tile.
            if (chunk == 0) load_rest(keys, rest);
            if (chunk == 2) prefetch(piece, key_tile + PREFETCH);
            PipelineState<CHUNKS> stage = chunks.at(chunk);
            hopper::mbarrier_wait(shared_address(&shared.empty[stage.index]), stage.phase ^ 1);
            unsigned even = SharedTile<KEYS>{chunk_address(base, stage)}.chunk(own_key(), 2 * own_part());
            const unsigned to[2] = {even, even ^ 64};
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                convert(0, i, to);
                load(1, i);
            }
            more = advance(piece);
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                convert(1, i, to);
                load(0, i);
            }
            hopper::fence_proxy_async();
            __syncwarp();
            if (lane == 0) hopper::mbarrier_arrive(shared_address(&shared.full[stage.index]));
        } while (more);
    }

    __device__ __forceinline__ void run() {
        // If the lengths are scheduled, the page table is not written by the preceding kernel either.
        bool waits = is_scheduled(params);
        if (!waits) grid_dependency_wait();
        // The first chunk of this warp may be past the first K tile, and past a piece.
        key_tile = 0;
        for (chunk = index; chunk >= TILE_CHUNKS; chunk -= TILE_CHUNKS) next_tile();
        PieceReader pieces;
#pragma unroll 1
        for (;;) {
            const Piece &piece = pieces.wait(shared);
            if (!piece.more) break;
            if (index < PREFETCH) prefetch(piece, piece.first_tile() + index);
            key_tile += piece.first_tile();
            bool has_chunks = key_tile < piece.end_tile();
            if (has_chunks) keys = find_keys(piece, key_tile);
            if (waits) grid_dependency_wait();
            waits = false;
            if (has_chunks) run_piece(piece);
            key_tile -= piece.end_tile();
            pieces.release(shared, lane);
        }
        // The CTA's shared memory lives until its copies are done.
        cp_async_wait<0>();
    }
};

} // namespace latent
