// Prefix groups: which sequences share a prefix, and the work items over prefixes. One CTA finds both on the device, so
// that a recorded graph serves any groups and lengths.
//
// A work item is a tile of the rows of a (group, key/value head) and a split of the prefix. Groups of one sequence have
// nothing to share: decode attends to all of their keys.
#pragma once
#include "common/grid_dependency.cuh"
#include "common/problem.cuh"

// Sequences that make a group worth a partial state, and keys that make a prefix worth one.
constexpr int MIN_MEMBERS = 2;
constexpr int MIN_PREFIX_KEYS = 16;

// Keys that prefixes must spare per two keys that sequences have of their own. For less, reading a prefix once per
// sequence, mostly from L2, takes no longer than the partial states do. A group that spares many elements of keys and
// values needs fewer.
constexpr int MIN_SPARED_RATIO = 4, MIN_SPARED_RATIO_OF_MANY = 1;
constexpr long long MANY_SPARED_ELEMENTS = 32 << 20;
constexpr int KEY_UNIT = 16; // sums of lengths fit 32 bits in these units

// Tallies are in shared memory if there is room for all groups.
constexpr int SHARED_TALLIES = 512;

constexpr int SCHEDULE_THREADS = 256;

// Sums over the sequences of a group.
struct PrefixTally {
    int tokens;  // then the first token of the group
    int members; // then the number of the group among those in use, or -1
    int len;
    int sequence; // the first one
    int keys;     // of all sequences, in units of KEY_UNIT
};

// Sequence and token of a query token, or group in use and first token of a sequence.
struct IntPair {
    int first, second;
};

struct PrefixTotals {
    int items, groups;
};

static __device__ __forceinline__ int scan_group(int x, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += other;
    }
    return x;
}

// Whether decode leaves this sequence's results to `merge_prefix`: longer ones belong to the prefill launch.
static __device__ __forceinline__ bool is_decoded(const AttentionParameters &params, const SequenceInfo &seq) {
    return seq.q_len > 0 && seq.q_len <= params.max_query_len;
}

// The summands of a sequence.
struct PrefixSequence {
    int group; // -1 for none
    int tokens, len, keys;
};

static __device__ __forceinline__ PrefixSequence load_member(const AttentionParameters &params,
                                                             const PrefixParameters &prefix, int index) {
    SequenceInfo seq = load_sequence(params, index);
    int group = ((const int *)prefix.groups)[index];
    if (group < 0 || group >= prefix.group_count || !is_decoded(params, seq)) group = -1;
    // Tree bits are of the last keys only: the prefix ends before them.
    return {group, seq.q_len, params.tree_mask ? max(seq.kv_len - seq.q_len, 0) : seq.kv_len, seq.kv_len / KEY_UNIT};
}

// Adds 32 sequences to the tallies of their groups, in the order of the batch. Returns the first token of this lane's
// sequence within its group. One warp.
static __device__ __forceinline__ int tally_members(PrefixTally *tallies, const PrefixSequence &mine, int index) {
    int lane = threadIdx.x & 31, first = 0, tokens = 0, members = 0;
    unsigned peers = __match_any_sync(~0u, mine.group);
    bool leads = (peers & ((1u << lane) - 1)) == 0;
    if (__all_sync(~0u, mine.tokens == __shfl_sync(~0u, mine.tokens, 0))) {
        first = mine.tokens * __popc(peers & ((1u << lane) - 1));
        members = __popc(peers);
        tokens = mine.tokens * members;
    } else {
#pragma unroll 1
        for (int other = 0; other < 32; other++) {
            int other_tokens = __shfl_sync(~0u, mine.tokens, other);
            if (!(peers >> other & 1)) continue;
            if (other < lane) first += other_tokens;
            tokens += other_tokens;
            members++;
        }
    }
    if (mine.group >= 0) {
        PrefixTally &tally = tallies[mine.group];
        first += tally.tokens;
        atomicMin(&tally.len, mine.len);
        atomicAdd(&tally.keys, mine.keys);
    }
    __syncwarp();
    if (mine.group >= 0 && leads) {
        PrefixTally &tally = tallies[mine.group];
        tally.tokens += tokens;
        tally.members += members;
        if (tally.sequence < 0) tally.sequence = index;
    }
    __syncwarp();
    return first;
}

// The work of a group for splits of `split_tiles` K tiles.
struct GroupWork {
    int rows, row_tiles, key_tiles, splits;
    bool in_use;
};

static __device__ __forceinline__ GroupWork group_work(const AttentionParameters &params,
                                                       const PrefixParameters &prefix, const PrefixTally &tally,
                                                       int split_tiles) {
    GroupWork work = {0, 0, 0, 0, false};
    long long shared = (long long)tally.members * tally.len, own = (long long)tally.keys * KEY_UNIT - shared,
              spared = shared - tally.len;
    bool many = spared * params.kv_heads * (params.head_dim + params.value_dim) >= MANY_SPARED_ELEMENTS;
    work.in_use = tally.members >= MIN_MEMBERS && tally.len >= MIN_PREFIX_KEYS &&
                  2 * spared >= (many ? MIN_SPARED_RATIO_OF_MANY : MIN_SPARED_RATIO) * own;
    if (!work.in_use) return work;
    work.rows = tally.tokens * params.group;
    work.row_tiles = (work.rows + prefix.tile_rows - 1) / prefix.tile_rows;
    work.key_tiles = (tally.len + prefix.tile_keys - 1) / prefix.tile_keys;
    work.splits = (work.key_tiles + split_tiles - 1) / split_tiles;
    return work;
}

static __device__ __forceinline__ PrefixTally tally_of(const PrefixParameters &prefix, const PrefixTally *tallies,
                                                       int group) {
    return group < prefix.group_count ? tallies[group] : PrefixTally{0, 0, 0, -1, 0};
}

// K tiles per split: as many splits as all CTAs can take at once. More items than that only if there are more tiles of
// rows. One warp.
static __device__ int find_split_tiles(const AttentionParameters &params, const PrefixParameters &prefix,
                                       const PrefixTally *tallies) {
    int lane = threadIdx.x & 31;
    // f32 is exact enough for a choice, and does not overflow.
    float work = 0.0f;
    int tiles = 0, longest = 1;
    for (int group = lane; group < prefix.group_count; group += 32) {
        GroupWork here = group_work(params, prefix, tallies[group], 1);
        tiles += here.row_tiles * params.kv_heads;
        work += (float)here.row_tiles * (float)params.kv_heads * (float)here.key_tiles;
        longest = max(longest, here.key_tiles);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        tiles += __shfl_xor_sync(~0u, tiles, step);
        work += __shfl_xor_sync(~0u, work, step);
        longest = max(longest, __shfl_xor_sync(~0u, longest, step));
    }
    int split_tiles = max(1, (int)ceilf(work / (float)prefix.workers));
    while (tiles <= prefix.workers && split_tiles < longest) {
        int items = 0;
        for (int group = lane; group < prefix.group_count; group += 32) {
            GroupWork here = group_work(params, prefix, tallies[group], split_tiles);
            items += here.row_tiles * params.kv_heads * here.splits;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) items += __shfl_xor_sync(~0u, items, step);
        if (items <= prefix.workers) break;
        split_tiles += max(1, split_tiles / 8);
    }
    return split_tiles;
}

// Numbers the groups in use, their tokens, work items and partial states. One warp.
static __device__ void schedule_groups(const AttentionParameters &params, const PrefixParameters &prefix,
                                       PrefixTally *tallies) {
    int lane = threadIdx.x & 31, split_tiles = find_split_tiles(params, prefix, tallies);
    int groups = 0, tokens = 0, items = 0;
    long long states = 0;
#pragma unroll 1
    for (int base = 0; base < prefix.group_count; base += 32) {
        int index = base + lane;
        PrefixTally tally = tally_of(prefix, tallies, index);
        GroupWork work = group_work(params, prefix, tally, split_tiles);
        int here_tokens = work.in_use ? tally.tokens : 0, here_items = work.row_tiles * params.kv_heads * work.splits;
        int group = groups + scan_group(work.in_use, lane) - work.in_use;
        int token = tokens + scan_group(here_tokens, lane) - here_tokens;
        int item = items + scan_group(here_items, lane) - here_items;
        long long here_states = (long long)work.rows * params.kv_heads * work.splits, until = here_states;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            long long other = __shfl_up_sync(~0u, until, step);
            if (lane >= step) until += other;
        }
        if (work.in_use) {
            PrefixGroup &to = ((PrefixGroup *)prefix.schedule)[group];
            to.first_state = states + until - here_states;
            to.sequence = tally.sequence;
            to.len = tally.len;
            to.first_token = token;
            to.rows = work.rows;
            to.row_tiles = work.row_tiles;
            to.splits = work.splits;
            to.split_keys = (work.key_tiles + work.splits - 1) / work.splits * prefix.tile_keys;
            to.first_item = item;
        }
        if (index < prefix.group_count) {
            tallies[index].tokens = token;
            tallies[index].members = work.in_use ? group : -1;
        }
        groups += __shfl_sync(~0u, scan_group(work.in_use, lane), 31);
        tokens += __shfl_sync(~0u, scan_group(here_tokens, lane), 31);
        items += __shfl_sync(~0u, scan_group(here_items, lane), 31);
        states += __shfl_sync(~0u, until, 31);
    }
    if (lane == 0) *(PrefixTotals *)prefix.totals = {items, groups};
}

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Finds groups, members and work items. One CTA.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
    schedule(const __grid_constant__ AttentionParameters params, const __grid_constant__ PrefixParameters prefix) {
    launch_dependents();
    wait_for_preceding();
    PrefixSequence *members = (PrefixSequence *)(dynamic_shared + SHARED_TALLIES * sizeof(PrefixTally));
    bool in_shared = prefix.group_count <= SHARED_TALLIES;
    PrefixTally *tallies = in_shared ? (PrefixTally *)dynamic_shared : (PrefixTally *)prefix.tallies;
    for (int group = threadIdx.x; group < prefix.group_count; group += SCHEDULE_THREADS)
        tallies[group] = {0, 0, max(((const int *)prefix.lens)[group], 0), -1, 0};
    // All threads load, one warp counts.
#pragma unroll 1
    for (int base = 0; base < params.batch; base += SCHEDULE_THREADS) {
        __syncthreads();
        int index = base + threadIdx.x;
        members[threadIdx.x] = {-1, 0, 0, 0};
        if (index < params.batch) members[threadIdx.x] = load_member(params, prefix, index);
        __syncthreads();
        if (threadIdx.x >= 32) continue;
#pragma unroll 1
        for (int i = threadIdx.x; i < SCHEDULE_THREADS && base + i - threadIdx.x < params.batch; i += 32) {
            int first = tally_members(tallies, members[i], base + i);
            if (base + i < params.batch) ((IntPair *)prefix.places)[base + i] = {members[i].group, first};
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) schedule_groups(params, prefix, tallies);
    __syncthreads();
    for (int index = threadIdx.x; index < params.batch; index += SCHEDULE_THREADS) {
        IntPair &place = ((IntPair *)prefix.places)[index];
        PrefixTally tally = {0, -1, 0, -1, 0};
        if (place.first >= 0) tally = tallies[place.first];
        place.first = tally.members;
        ((int *)prefix.first_keys)[index] = tally.members < 0 ? 0 : tally.len;
        if (tally.members < 0) continue;
        int q_len = load_sequence(params, index).q_len;
        IntPair *tokens = (IntPair *)prefix.tokens + tally.tokens + place.second;
#pragma unroll 1
        for (int token = 0; token < q_len; token++) tokens[token] = {index, token};
    }
}
