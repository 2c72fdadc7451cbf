// Gathers and all-to-alls between GPUs that write each other's memory, in one launch per rank.
//
// A part travels as lines of 16 bytes: eight bytes of the part, with a flag behind each four. Both halves of a line are
// single stores of 8 bytes, so a reader that sees the flags has the bytes: there is no fence and no separate signal.
// Lines arrive in the landing memory of the reader, which empties them again.
//
// Landing memory has two halves, and a CTA of every rank uses them in turn. A rank writes a half again only after the
// lines of the exchange between have arrived from every rank. A rank sends these after it has emptied the half.
typedef unsigned long long Address;

constexpr int MAX_RANKS = 16, MAX_SPANS = 4;
constexpr int WORD_BYTES = 8;
constexpr unsigned FULL = 1;
// Reads of a line between two looks at the host's flag.
constexpr unsigned PATIENCE = 1 << 14;

// Part r of `from` goes to rank r, and part r of `to` comes from there.
struct Span {
    Address from, to;
    // Bytes of a part, and from a part of `from` to the next: 0 if every rank gets the same.
    Address part_bytes, from_stride;
};

struct Parameters {
    // The landing memory of each rank, as this GPU sees it: [half, source rank, CTA, line].
    Address landing[MAX_RANKS];
    Span spans[MAX_SPANS];
    // Per CTA: the half that it uses next.
    Address halves;
    // A number of the host: not 0 if nothing more will arrive.
    Address ended;
    int rank, ranks, span_count;
    // Lines of a part, of all spans together; lines per CTA; room for lines per CTA, and for CTAs.
    int lines, cta_lines, max_cta_lines, max_ctas;
};

struct Word {
    unsigned low, high;
};

static __device__ bool is_whole(Address address, Address left) {
    return left >= WORD_BYTES && address % WORD_BYTES == 0;
}

// The next eight bytes, or fewer if fewer are left.
static __device__ Word load_word(Address address, Address left) {
    if (is_whole(address, left)) {
        uint2 word = *(const uint2 *)address;
        return {word.x, word.y};
    }
    Address word = 0;
    for (int i = 0; i < WORD_BYTES && i < left; i++) word |= (Address) * (const unsigned char *)(address + i) << 8 * i;
    return {(unsigned)word, (unsigned)(word >> 32)};
}

static __device__ void store_word(Address address, Address left, Word word) {
    if (is_whole(address, left)) {
        *(uint2 *)address = make_uint2(word.low, word.high);
        return;
    }
    Address bytes = word.low | (Address)word.high << 32;
    for (int i = 0; i < WORD_BYTES && i < left; i++) *(unsigned char *)(address + i) = bytes >> 8 * i;
}

static __device__ void store_line(Address line, Word word, unsigned flag) {
    Address low = word.low | (Address)flag << 32, high = word.high | (Address)flag << 32;
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(low), "l"(high) : "memory");
}

// Waits for a line, and empties it. False if nothing more will arrive.
static __device__ bool receive_line(Address line, Word &word, Address ended) {
    for (unsigned tries = 1;; tries++) {
        Address low, high;
        asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(line) : "memory");
        if (low >> 32 == FULL && high >> 32 == FULL) {
            word = {(unsigned)low, (unsigned)high};
            store_line(line, {0, 0}, 0);
            return true;
        }
        if (tries % PATIENCE == 0 && *(const volatile int *)ended) return false;
    }
}

// The place of a line in the spans.
struct Place {
    Address from, to, part_bytes, from_stride, left;
};

static __device__ Place locate(const Parameters &params, int line) {
    int span = 0;
    for (; span + 1 < params.span_count; span++) {
        int lines = (params.spans[span].part_bytes + WORD_BYTES - 1) / WORD_BYTES;
        if (line < lines) break;
        line -= lines;
    }
    const Span &here = params.spans[span];
    Address at = (Address)line * WORD_BYTES;
    return {here.from + at, here.to + at, here.part_bytes, here.from_stride, here.part_bytes - at};
}

extern "C" __global__ void __launch_bounds__(512) exchange(const __grid_constant__ Parameters params) {
    int *halves = (int *)params.halves;
    int half = halves[blockIdx.x];
    int first = blockIdx.x * params.cta_lines, end = min(first + params.cta_lines, params.lines);
    Address cta_bytes = (Address)params.max_cta_lines * 16;
    // This CTA's lines from a source, in the landing memory of any rank.
    auto landing_of = [&](int source) {
        return (((Address)half * params.ranks + source) * params.max_ctas + blockIdx.x) * cta_bytes;
    };
    // Ranks send to different ones first.
    Address own = landing_of(params.rank);
    for (int line = first + threadIdx.x; line < end; line += blockDim.x) {
        Place place = locate(params, line);
        for (int i = 1; i < params.ranks; i++) {
            int peer = (params.rank + i) % params.ranks;
            Word word = load_word(place.from + peer * place.from_stride, place.left);
            store_line(params.landing[peer] + own + (Address)(line - first) * 16, word, FULL);
        }
    }
    for (int line = first + threadIdx.x; line < end; line += blockDim.x) {
        Place place = locate(params, line);
        for (int i = 0; i < params.ranks; i++) {
            int peer = (params.rank + i) % params.ranks;
            Word word;
            if (i == 0)
                word = load_word(place.from + peer * place.from_stride, place.left);
            else if (!receive_line(params.landing[params.rank] + landing_of(peer) + (Address)(line - first) * 16, word,
                                   params.ended))
                return;
            store_word(place.to + peer * place.part_bytes, place.left, word);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) halves[blockIdx.x] = half ^ 1;
}
