// Shapes and shared memory of decode of many rows on Hopper (decode_wgmma_sm90.cu).
//
// From the module: ELEMENT_TYPE, HEAD_DIM, VALUE_DIM, TILE_ROWS, CACHE, FALLBACK (0), THREADS, RING_STAGES.
#pragma once
#include "hopper/codes_wgmma.cuh"
#include "hopper/work_pieces.cuh"

namespace decode_wgmma {

// The type of what is multiplied: codes become f16.
constexpr ElementType OPERAND = READS_CODES ? ElementType::F16 : ElementType(ELEMENT_TYPE);

constexpr int ROWS = TILE_ROWS, ROW_BLOCKS = ROWS / 8;
static_assert(ROWS % 16 == 0, "probabilities are stored for 16 rows at a time");
constexpr int KEYS = 64;       // per K tile: 16 per warp
constexpr int WARP_KEYS = 16;  // a run of neighbours in memory
constexpr int SUMS = ROWS / 2; // elements of a thread per 64 keys, or per 64 value dims
constexpr int VALUE_BLOCKS = VALUE_DIM / 64;
constexpr int KEY_STEPS = HEAD_DIM / 16, VALUE_STEPS = KEYS / 16;
// Operands of keys and of values do not fit into registers at head dim 256. There one block of values is converted
// beside Q K^T, each of the others beside P V of the one before, and keys after P V.
constexpr bool HAS_LARGE_HEADS = HEAD_DIM > 128;
constexpr int EARLY_BLOCKS = HAS_LARGE_HEADS && !ValueSide::HAS_BLOCKS ? 1 : VALUE_BLOCKS; // of values, beside Q K^T
static_assert(HEAD_DIM % 64 == 0 && VALUE_DIM % 64 == 0 && HEAD_DIM <= 256, "whole chunks, and no parts of sums");

// A warpgroup of consumers, and one of loaders. Of two CTAs per multiprocessor one starts or ends a tile while the
// other multiplies; 16-bit elements at head dim 256 fill shared memory with one.
constexpr int CONSUMER_THREADS = 128, LOADER_THREADS = 128, CONSUMER_WARPS = CONSUMER_THREADS / 32;
static_assert(THREADS == CONSUMER_THREADS + LOADER_THREADS, "as the host has it");
constexpr int CTAS_PER_SM = READS_CODES ? 2 : 1;
// Registers of a thread, where all threads together would need too many.
constexpr bool SHARES_REGISTERS = READS_CODES;
constexpr int LOADER_REGISTERS = 40, CONSUMER_REGISTERS = 256 - LOADER_REGISTERS;

// A pipeline stage: keys and values as they are stored, scales of keys and of values.
constexpr int SCALE_OFFSET = KEYS * (KEY_PITCH + VALUE_PITCH);
constexpr int STAGE_BYTES = SCALE_OFFSET + KEYS * 8;

typedef WorkPiece<KEYS> Piece;

// What loaders know of a piece: its keys, the index in the page table of the last one's page, and where keys (0) and
// values (1) of the head start, of the sequence or of the pool, with strides of tokens in bytes. They read it per K
// tile, as registers are scarce.
struct alignas(16) CopiedRows {
    int key_start, key_end, last_entry, unused;
    struct {
        unsigned long long start;
        long long stride;
    } sides[2];
};

// Shared memory starts with the queues between warps. Keep in step with registry/decode_wgmma.rs.
constexpr int PIECES = 2; // on their way from a loader to the other warps
struct Queues {
    unsigned long long full[RING_STAGES], empty[RING_STAGES];
    unsigned long long piece_full[PIECES], piece_empty[PIECES];
    Piece pieces[PIECES + 1]; // the last: of the rehearsal
    CopiedRows rows[PIECES];
    unsigned loader_places[LOADER_THREADS / 32][2]; // in the ring, between pieces, of which finding one takes registers
};

// What scores of two neighbouring rows are multiplied by, greater than 0; they are in units of log2 then. And the
// references of their exponents.
struct alignas(16) RowPair {
    float scale[2], reference[2];
};

// What the output of a row is multiplied by, one after the other, and where it is stored: counted in elements, -1 if
// there is no such row.
struct alignas(16) RowOut {
    float factors[4];
    long long at;
};

// What keys and values need besides products: bits.
enum : unsigned {
    KEYS_SCALED = 1, // keys of a sequence have different scales
    VALUES_SCALED = 2,
    KEYS_I8 = 4,
    VALUES_I8 = 8,
    KEYS_E5M2 = 16,
    VALUES_E5M2 = 32, // without a bit of a format: e4m3, or no codes of a byte
};

constexpr bool MAY_REHEARSE = KeySide::IS_BYTES; // `init_rehearsal`: blocks have more code, which takes longer

// Then numbers of rows.
struct Rows {
    RowPair pairs[ROWS / 2];
    RowOut out[ROWS];
    float weight_powers[ROWS]; // that bring weights into f16's range, if values are scaled
    float exchange[CONSUMER_WARPS][ROWS];
    unsigned needs; // of keys and values: bits
    bool rehearses; // whether this CTA does

    __device__ __forceinline__ float &scale(int row) { return pairs[row / 2].scale[row % 2]; }
    __device__ __forceinline__ float &reference(int row) { return pairs[row / 2].reference[row % 2]; }
};
constexpr int ROWS_OFFSET = 1024, FACTS_OFFSET = ROWS_OFFSET + (16 + 60 * ROWS + 1023) / 1024 * 1024;
static_assert(sizeof(Queues) <= ROWS_OFFSET && ROWS_OFFSET + sizeof(Rows) <= FACTS_OFFSET, "as the host has it");

// Then facts of rows, and of the CTA's work.
struct Facts {
    RowFacts rows[ROWS];
    CtaRange range; // what is left of the CTA's work
    ScheduledCta scheduled;
    bool is_last; // CTA to finish a part of a tile
};

// Then queries, two K tiles of probabilities, and the pipeline stages.
constexpr int QUERY_OFFSET = FACTS_OFFSET + (1024 + 128 * ROWS + 1023) / 1024 * 1024;
constexpr int PROBABILITY_OFFSET = QUERY_OFFSET + HEAD_DIM / 64 * ROWS * 128, PROBABILITY_BYTES = ROWS * 128;
constexpr int RING_OFFSET = PROBABILITY_OFFSET + 2 * PROBABILITY_BYTES;
static_assert(FACTS_OFFSET + sizeof(Facts) <= QUERY_OFFSET, "as the host has it");
static_assert(RING_OFFSET + RING_STAGES * STAGE_BYTES <= hopper::MAX_SHARED_BYTES, "it fits");

static __device__ __forceinline__ Queues &queues() { return *(Queues *)dynamic_shared; }
static __device__ __forceinline__ Rows &row_numbers() { return *(Rows *)(dynamic_shared + ROWS_OFFSET); }

constexpr int CONSUMER_BARRIER = 1; // a named barrier
static __device__ __forceinline__ void synchronize_consumers() {
    hopper::named_barrier_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
}
static __device__ __forceinline__ bool any_consumer(bool x) {
    return hopper::named_barrier_or(CONSUMER_BARRIER, CONSUMER_THREADS, x);
}

// The lane of this thread, for the compiler not to keep it, and what depends on it, in registers or local memory.
static __device__ __forceinline__ int read_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// The address of shared memory, likewise.
static __device__ __forceinline__ unsigned read_base() {
    unsigned base;
    asm volatile("mov.u32 %0, dynamic_shared;" : "=r"(base));
    return base;
}

constexpr int COMBINE_WARPS = 8; // of a CTA of `combine`

// A number that is the same in all lanes of a warp, as the compiler is told: what depends on it is computed once.
static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A position in the ring of pipeline stages.
struct RingState {
    PipelineState<RING_STAGES> state;

    __device__ __forceinline__ unsigned address(unsigned base) const {
        return base + RING_OFFSET + state.index * STAGE_BYTES;
    }
    // Its mbarriers, with which `Queues` starts.
    __device__ __forceinline__ unsigned full(unsigned base) const { return base + state.index * 8; }
    __device__ __forceinline__ unsigned empty(unsigned base) const { return base + (RING_STAGES + state.index) * 8; }

    // By consumers: waits for the next K tile, and gives its place back, each warp when it has read it.
    __device__ __forceinline__ void wait_full(unsigned base) const { hopper::mbarrier_wait(full(base), state.phase); }
    __device__ __forceinline__ void release(unsigned base) {
        if (read_lane() == 0) hopper::mbarrier_arrive(empty(base));
        state.advance();
    }

    // By loaders: waits for the next place, and has its copies, which have been started, announced.
    __device__ __forceinline__ void wait_empty(unsigned base) const {
        hopper::mbarrier_wait(empty(base), state.phase ^ 1);
    }
    __device__ __forceinline__ void announce(unsigned base) {
        hopper::mbarrier_arrive_copies(full(base));
        state.advance();
    }
};

// Bound of the sum of two probabilities, and of one times its scale of values: f16 can hold them.
constexpr float MAX_WEIGHT = 32768.0f;
// Exponents (of 2) of probabilities where references move, one of which such a sum has, and of the largest one then.
constexpr float MAX_EXPONENT = 14.0f, USUAL_EXPONENT = 7.0f;

} // namespace decode_wgmma
