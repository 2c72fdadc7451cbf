// Generated from crates/regard/src/params.rs: REGARD_WRITE_PARAMETERS=1 cargo test -p regard params. Do not edit.
#pragma once

// The type of elements in memory.
enum class ElementType : int {
    F16 = 0, // IEEE half precision.
    BF16 = 1, // bfloat16.
    F32 = 2, // IEEE single precision.
};

// The source of the position of a sequence's first row.
enum class OffsetKind : int {
    BottomRight = 0, // Bottom right: the last row is at the last key.
    Same = 1, // `q_offset`, the same for all sequences.
    PerSequence = 2, // `q_offsets`, one per sequence.
};

// The mask, and the type of its elements. From F32 on it is additive.
enum class MaskKind : int {
    None = 0, // No mask.
    Bool = 1, // Boolean: keys whose byte is 0 are hidden.
    F32 = 2, // Additive, f32.
    F16 = 3, // Additive, f16.
    BF16 = 4, // Additive, bf16.
};

// How rows of keys and values can be loaded.
enum class LoadKind : int {
    Elements = 0, // Element by element: rows are not 16-byte aligned.
    Chunks = 1, // In 16-byte chunks.
    PageAligned16 = 2, // In 16-byte chunks that rows fill, 16 contiguous keys at a time.
};

// A byte of the tile map of a mask: what the mask does to the scores of a K tile.
enum class MapKind : int {
    Empty = 0, // It hides all of them.
    Full = 1, // It changes none of them.
    Mixed = 2, // Neither.
};

// How keys or values are stored.
enum class CacheFormat : int {
    F16 = 0, // IEEE half precision.
    BF16 = 1, // bfloat16.
    F32 = 2, // IEEE single precision.
    E4M3 = 3, // fp8, 4 bits of exponent and 3 of mantissa (e4m3fn: no infinity).
    E5M2 = 4, // fp8, 5 bits of exponent and 2 of mantissa.
    I8 = 5, // Signed 8-bit integers.
    Q8_0 = 6, // GGUF q8_0: blocks of an f16 scale and 32 signed bytes.
    Q4_0 = 7, // GGUF q4_0: blocks of an f16 scale and 32 nibbles less 8.
    Mla656 = 8, // Latent rows: 512 e4m3 codes, an f32 scale per 128 of them, 64 bf16 rotary dims.
};

// Strides of rows.
struct RowStrides {
    long long batch; // From one sequence (0 where ragged) or block to the next.
    long long token; // From one token or slot to the next.
    long long head; // From one head to the next.
};
static_assert(sizeof(RowStrides) == 24, "as the host has it");

// Strides of a mask; 0 where a dimension is 1.
struct MaskStrides {
    long long batch; // From one sequence to the next.
    long long head; // From one head to the next.
    long long row; // From one row to the next.
    long long key; // From one key to the next.
};
static_assert(sizeof(MaskStrides) == 32, "as the host has it");

// Strides of tree bits, in words.
struct TreeStrides {
    long long batch; // From one sequence to the next.
    long long row; // From one row to the next.
};
static_assert(sizeof(TreeStrides) == 16, "as the host has it");

// Strides of the tile map of a mask, in bytes; 0 where the mask is the same for all.
struct MapStrides {
    long long batch; // From one sequence to the next.
    long long head; // From one query head to the next.
    long long row; // From one row tile to the next.
};
static_assert(sizeof(MapStrides) == 24, "as the host has it");

// Strides of the tokens of a ragged batch.
struct TokenStrides {
    long long token; // From one token to the next.
    long long head; // From one head to the next.
};
static_assert(sizeof(TokenStrides) == 16, "as the host has it");

// Queries, the output or its log-sum-exp.
struct RowTensor {
    unsigned long long pointer; // Its address; 0 for none.
    RowStrides strides; // Its strides.
};
static_assert(sizeof(RowTensor) == 32, "as the host has it");

// Keys or values: of sequences, ragged, or in pages.
struct KvTensor {
    unsigned long long pointer; // Its address.
    RowStrides strides; // Its strides.
};
static_assert(sizeof(KvTensor) == 32, "as the host has it");

// New keys or values of a ragged batch, or queries beside them.
struct TokenTensor {
    unsigned long long pointer; // Its address; 0 for none.
    TokenStrides strides; // Its strides.
};
static_assert(sizeof(TokenTensor) == 24, "as the host has it");

// Sliding window: keys that a row sees beside its position.
struct Window {
    long long left; // Keys to the left; the largest value for no bound.
    long long right; // Keys to the right, likewise; causality is a bound of 0.
};
static_assert(sizeof(Window) == 16, "as the host has it");

// Chunked attention: a row sees the keys of its position's chunk.
struct Chunk {
    long long length; // Positions per chunk; 0 if positions are not divided.
    unsigned long long inverse; // 2^64 over `length`, rounded up.
};
static_assert(sizeof(Chunk) == 16, "as the host has it");

// Positions of keys: key j is at offset + stride * j.
struct KeyPositions {
    unsigned long long offsets; // Of the first key of each sequence, i32 [B]; 0 if all have `offset`.
    long long offset; // Of every first key, if there are no `offsets`.
    long long stride; // From one key's position to the next one's.
    unsigned long long inverse; // 2^64 over `stride`, rounded up; not read if the stride is 1.
};
static_assert(sizeof(KeyPositions) == 32, "as the host has it");

// Stream-K: how the work of all tiles is divided among the CTAs of a decode launch.
struct StreamK {
    unsigned long long combines; // Whether `combine` combines the parts of a tile (1); else its last CTA does (0).
    unsigned long long schedule; // Workspace: the work of each CTA, as `schedule_ctas` left it; 0 if decode finds it.
    long long work_total; // Work of all tiles if the host knows that all lengths are equal; else 0.
    long long work_per_cta; // Work per CTA.
    long long work_per_tile; // Work per tile, if `work_total` is given.
    int work_unit_shift; // log2 of the keys per unit of work.
    int tile_start_work; // Units of work for starting a tile.
    int partials_per_cta; // Partial states that one CTA may leave.
    int key_groups; // Groups of warps that share the keys of a CTA.
};
static_assert(sizeof(StreamK) == 56, "as the host has it");

// The tile map of a mask: what the mask does to each K tile.
struct TileMap {
    unsigned long long pointer; // Workspace: one MapKind byte per K tile; 0 for none.
    MapStrides strides; // Its strides.
    int tile_rows; // Query tokens per row tile.
    int tile_keys; // Keys per K tile.
    int batch; // Sequences: 1 where the mask is the same for all.
    int heads; // Query heads, likewise.
    int row_tiles; // Row tiles, likewise.
    int key_tiles; // K tiles: bytes per row of the map.
    int mask_rows; // Rows of the mask per sequence and head; the last row tile may extend past them.
    int mask_keys; // Keys of the mask, likewise.
};
static_assert(sizeof(TileMap) == 64, "as the host has it");

// One attention call, for decode and prefill. An address may be 0 (none); strides are in elements.
struct AttentionParameters {
    RowTensor query; // Queries: [B, Lq, Hq, Dk], or [total, Hq, Dk].
    KvTensor keys; // Keys: [B, Lk, Hkv, Dk], [total, Hkv, Dk] or [blocks, block_size, Hkv, Dk].
    KvTensor values; // Values, like the keys.
    RowTensor out; // Output, like the queries.
    RowTensor lse; // Log-sum-exp of each row, f32.
    unsigned long long mask; // Mask [B, Hq, Lq, Lk], of the type in `mask_kind`.
    unsigned long long alibi_slopes; // ALiBi slopes, f32 [Hq].
    unsigned long long sinks; // Sinks, f32 [Hq].
    unsigned long long tree_mask; // Tree bits, i32 [B, Lq, words].
    unsigned long long kv_lens; // Keys in use, i32 [B].
    unsigned long long cu_seqlens_q; // Cumulative query lengths, i32 [B + 1].
    unsigned long long cu_seqlens_k; // Cumulative key lengths, i32 [B + 1].
    unsigned long long block_table; // Page table, i32 [B, blocks].
    unsigned long long q_offsets; // Positions of the first rows, i32 [B].
    unsigned long long workspace; // Workspace: counters, then partial states.
    // Workspace, for prefix groups: the first key of each sequence that decode attends to, i32 [B]; 0 for none. Decode
    // leaves states of the rows of which it is above 0.
    unsigned long long first_keys;
    RowTensor own_out; // Workspace: the unnormalized outputs of these rows, f32.
    RowTensor own_states; // Workspace: their maxima and sums, pairs of f32.
    MaskStrides mask_strides; // Mask.
    TreeStrides tree_strides; // Tree bits.
    long long block_table_stride; // Page table: from one sequence to the next.
    Window window; // Sliding window and causality.
    Chunk chunk; // Chunked attention.
    KeyPositions key_positions; // Positions of keys.
    long long q_offset; // The position of every first row, if `offset_kind` is Same.
    StreamK stream_k; // How the work of a decode launch is divided.
    float scale; // Multiplies dot products.
    float softcap; // Bounds scores; 0 where there is no cap.
    int batch; // Sequences.
    int kv_heads; // Key/value heads.
    int group; // Query heads that share one of them.
    int head_dim; // Dk.
    int value_dim; // Dv.
    int query_len; // The longest query of any sequence; where ragged, rows there are in all.
    int kv_len; // Maximum keys of a sequence; if ragged, the total number of key rows.
    int block_size; // Slots per page, 0 if keys are not paged.
    int blocks; // Pages in the pool.
    OffsetKind offset_kind; // The source of positions.
    MaskKind mask_kind; // The mask and its type.
    int out_f32; // Whether the output is f32 though the inputs are not.
    int block_shift; // log2 of the slots per page, -1 if that is no power of 2.
    LoadKind load_kind; // How queries, keys and values are loaded.
    int unmodified_scores; // Whether scores are dot products times the scale: no softcap, slopes or additive mask.
    int out_aligned; // Whether four elements of the output can be written at once.
    int batch_invariant; // Whether keys are split at fixed places.
    int max_query_len; // Longer sequences belong to the prefill launch; the largest value for none.
    int query_len_bound; // Maximum query tokens of a ragged sequence; lengths are clamped to it.
    int kv_len_bound; // Maximum keys of a ragged sequence, likewise.
};
static_assert(sizeof(AttentionParameters) == 584, "as the host has it");

// Scales that all keys, or all values, of a head share, in all sequences or in one.
struct HeadScales {
    unsigned long long pointer; // f32 [Hkv], [B, Hkv], or one for all heads; 0 if all are 1.
    long long stride; // From head to head, in elements.
    long long sequence_stride; // From sequence to sequence.
};
static_assert(sizeof(HeadScales) == 24, "as the host has it");

// Workspace: a scale per key and head, of keys that were widened.
struct KeyScales {
    unsigned long long pointer; // f32 [B, Hkv, keys]; 0 if there are none.
    long long stride; // From head to head, in elements: keys, rounded up to a K tile.
};
static_assert(sizeof(KeyScales) == 16, "as the host has it");

// Workspace: partial states of prefill, where the keys of a tile are split.
struct KeySplits {
    RowTensor out; // Unnormalized outputs of the rows over the first split, f32.
    RowTensor states; // Their maxima and sums, pairs of f32.
    long long out_stride; // From the outputs over one split to those over the next, in elements.
    long long state_stride; // From states to states, likewise.
    int count; // Splits, a power of two; 1 if keys are not split, and there are no partial states.
    int shift; // log2 of them.
    ElementType out_type; // Type of the output.
    int unused; // Unused, so that no compiler pads.
};
static_assert(sizeof(KeySplits) == 96, "as the host has it");

// Further parameters of the prefill kernels: the tile scheduler, the tile map of a mask, scales of codes that were
// widened, and splits of the keys.
struct PrefillParameters {
    unsigned long long counters; // Workspace: u32 next tile, u32 finished CTAs; zero before and after a run.
    TileMap map; // The tile map of the mask.
    HeadScales key_scales; // Scales of keys.
    HeadScales value_scales; // Scales of values.
    KeyScales each_key; // Scales of single keys, for the fallback kernels with WGMMA.
    KeySplits splits; // Splits of the keys of each tile, for kernels with WGMMA at head dims up to 256.
    long long tiles; // Tiles in all if the host knows that all query lengths are equal; else 0.
    int row_tiles; // Row tiles of each (sequence, query head), where `tiles` is given.
    int l2_group; // (sequence, key/value head) pairs whose keys and values fit the L2 cache together.
    int min_query_len; // Shorter sequences belong to the decode launch; 0 for none.
    int box_keys; // Keys per TMA box; divides both K tiles and pages.
};
static_assert(sizeof(PrefillParameters) == 256, "as the host has it");

// Widening: copies of keys and values in the type of queries, for prefill.
struct WidenParameters {
    KvTensor keys; // The copy of keys: [B, Lk, Hkv, Dk], or [total, Hkv, Dk]; 2 Hkv heads if each element becomes two.
    KvTensor values; // The copy of values, like that of keys.
    KeyScales each_key; // The copy of scales of keys, if prefill takes a scale for each.
    // f32 [2, B, Hkv]: what copies of keys, and of values, are multiples of; 0 if of 1. Behind them is the same once
    // per split of the keys: their largest magnitudes.
    unsigned long long units;
    unsigned long long counter; // u32, zero before and after: CTAs that have found the largest magnitude of their keys.
    int min_query_len; // Sequences of fewer query tokens are not widened.
    int key_blocks; // Blocks of keys per sequence, each for one CTA.
    int aligned; // Whether all rows start at multiples of 16 bytes.
    // Elements of the copy that add up to one of a key, with its scale: 2; or 1 if keys are copied as they are.
    int key_terms;
    int round_values; // Whether values are multiplied by their scales, and rounded.
    int unused; // Zero.
};
static_assert(sizeof(WidenParameters) == 120, "as the host has it");

// A prefix group: sequences whose rows attend to a shared prefix together.
struct PrefixGroup {
    long long first_state; // Workspace: the group's first partial state.
    int sequence; // The sequence whose page table the prefix is read through.
    int len; // Keys of the prefix.
    int first_token; // The group's first query token, among those of all groups.
    int rows; // Query rows per key/value head: tokens times heads that share one.
    int row_tiles; // Row tiles per key/value head.
    int splits; // Splits of the prefix.
    int split_keys; // Keys per split.
    int first_item; // The group's first work item.
};
static_assert(sizeof(PrefixGroup) == 40, "as the host has it");

// Further parameters of the kernels for prefix groups.
struct PrefixParameters {
    unsigned long long groups; // Group of each sequence, i32 [B]; -1 for none.
    unsigned long long lens; // Prefix length of each group, i32 [G].
    unsigned long long totals; // Workspace: work items and groups in use, i32 [2].
    unsigned long long schedule; // Workspace: the groups in use, PrefixGroup [G].
    unsigned long long tallies; // Workspace: four i32 per group that is given, while they are counted.
    unsigned long long places; // Workspace: group in use (or -1) and first token in it of each sequence, i32 [B, 2].
    unsigned long long tokens; // Workspace: sequence and token of each query token of a group, i32 [tokens, 2].
    unsigned long long first_keys; // Workspace: `first_keys` of the decode launch, i32 [B].
    unsigned long long partial_out; // Workspace: partial outputs over prefixes, f32 [states, compiled Dv].
    unsigned long long partial_states; // Workspace: their maxima and sums, f32 [states, 2].
    int group_count; // Groups that are given (G).
    int workers; // CTAs that take work items at a time.
    int tile_rows; // Query rows per work item, at most.
    int tile_keys; // Keys per K tile.
};
static_assert(sizeof(PrefixParameters) == 96, "as the host has it");

// How the keys and values of a call are stored if not as the queries are.
struct CacheParameters {
    unsigned long long key_scales; // Scales of keys, f32 [blocks or B, slots or Lk, Hkv]; 0 where the format has none.
    unsigned long long value_scales; // Scales of values, likewise.
    RowStrides key_scale_strides; // Scales of keys; 0 where broadcast.
    RowStrides value_scale_strides; // Scales of values, likewise.
    CacheFormat key_format; // Format of keys.
    CacheFormat value_format; // Format of values.
    ElementType query_type; // Type of queries, and of the output unless that is f32.
    int unused; // Unused, so that no compiler pads.
};
static_assert(sizeof(CacheParameters) == 80, "as the host has it");

// A second cache, and the list of its slots that each row attends to as well.
struct SecondCache {
    unsigned long long indices; // Slots, i32 [rows, Hkv or 1, len]; 0 if there are no second lists.
    unsigned long long counts; // Entries of each list that are used, i32 [rows, Hkv or 1]; 0 if all are.
    TokenStrides index_strides; // Lists, from row to row; no stride of heads where all share a list.
    TokenStrides count_strides; // Counts, likewise.
    KvTensor keys; // Pool of keys [blocks, block_size, Hkv, Dk].
    KvTensor values; // Pool of values.
    unsigned long long key_scales; // Scales of keys, f32 [blocks, block_size, Hkv]; 0 where the format has none.
    unsigned long long value_scales; // Scales of values, likewise.
    RowStrides key_scale_strides; // Scales of keys; 0 where broadcast.
    RowStrides value_scale_strides; // Scales of values, likewise.
    int len; // Entries per list, at most.
    int blocks; // Pages in the pool.
    int block_size; // Slots per page.
    int block_shift; // log2 of the slots per page, -1 if that is no power of 2.
};
static_assert(sizeof(SecondCache) == 192, "as the host has it");

// Lists of the keys that rows attend to, or of the pages that sequences do.
struct ListParameters {
    // Entries, i32 [rows, Hkv or 1, len]; pages, i32 [Hkv or 1, sequences, len / block_size].
    unsigned long long indices;
    // Entries of each list that are used, i32 [rows, Hkv or 1] or [Hkv or 1, sequences]; 0 if all are.
    unsigned long long counts;
    // Lists, from row to row or from sequence to sequence; no stride of heads where all share a list.
    TokenStrides index_strides;
    TokenStrides count_strides; // Counts, likewise.
    int len; // Entries per list, at most.
    int are_slots; // Whether entries are physical slots of the pool, not positions.
    int sequences; // Sequences: `batch` of the call counts rows.
    int are_pages; // Whether lists are of pages: an entry is a slot of one of them.
    // The number of each listed page in its sequence, i32, as `indices`; 0 if pages have no positions.
    unsigned long long numbers;
    TokenStrides number_strides; // Numbers, likewise.
    SecondCache second; // The second cache and its lists.
};
static_assert(sizeof(ListParameters) == 280, "as the host has it");

// An attention call whose rows have lists of keys.
struct ListedParameters {
    AttentionParameters attention; // The call.
    ListParameters lists; // The lists.
};
static_assert(sizeof(ListedParameters) == 864, "as the host has it");

// Parameters of `append`: new keys and values, and their slots in the pages.
struct AppendParameters {
    TokenTensor new_keys; // New keys [total, Hkv, Dk].
    TokenTensor new_values; // New values [total, Hkv, Dv].
    KvTensor keys; // Pool of keys [blocks, block_size, Hkv, Dk].
    KvTensor values; // Pool of values.
    TokenTensor query; // Queries to rotate in place [total, Hq, Dk], or none.
    unsigned long long rotary; // Cosines and sines, f32 [positions, rotary_dim]: cosines first; 0 for no rotation.
    unsigned long long block_table; // Page table, i32 [B, blocks]; 0 if sequence b is page b.
    unsigned long long kv_lens; // Tokens of each sequence after appending, i32 [B].
    unsigned long long cu_seqlens; // Cumulative new lengths, i32 [B + 1]; 0 if every sequence has `new_tokens`.
    long long block_table_stride; // Page table: from one sequence to the next.
    CacheParameters cache; // Formats of the pools, and their scales; written where they are dynamic.
    int batch; // Sequences.
    int tokens; // Tokens in all.
    int new_tokens; // New tokens of each sequence where there is no `cu_seqlens`.
    int kv_heads; // Key/value heads.
    int query_heads; // Query heads; 0 where no queries are rotated.
    int head_dim; // Dk.
    int value_dim; // Dv.
    int rotary_dim; // Leading dimensions that are rotated: even, at most Dk; 0 for none.
    int rotary_interleaved; // Whether RoPE pairs adjacent dims (1) or halves (0).
    int rotary_positions; // Positions that the table of cosines and sines covers.
    int block_size; // Slots per page.
    int blocks; // Pages in the pool.
    int table_blocks; // Entries of a sequence's page table.
    int element_bytes; // Bytes of an element: 2 or 4.
    ElementType element_type; // Type of an element.
    int dynamic_key_scales; // Whether scales of keys are computed and written, one for each token and head.
    int dynamic_value_scales; // Whether scales of values are.
    int rotary_start; // The first dimension of a quantized key that is rotated.
};
static_assert(sizeof(AppendParameters) == 328, "as the host has it");

// Parameters of `merge`: partial results over disjoint sets of keys.
struct MergeParameters {
    unsigned long long parts; // Partial outputs [parts, rows, dim].
    unsigned long long part_lse; // Their log-sum-exps, f32 [parts, rows].
    unsigned long long out; // Output [rows, dim].
    unsigned long long lse; // Its log-sum-exp, f32 [rows]; 0 for none.
    long long part_stride; // From one part's output to the next.
    long long part_lse_stride; // From one part's log-sum-exp to the next.
    long long rows; // Rows.
    int dim; // Elements per row.
    int count; // Parts.
    ElementType part_type; // Type of parts.
    ElementType out_type; // Type of the output.
};
static_assert(sizeof(MergeParameters) == 72, "as the host has it");

// A TMA descriptor (CUtensorMap).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};
static_assert(sizeof(TensorMap) == 128, "as the host has it");

// The TMA descriptors of the Hopper prefill kernels.
struct TensorMaps {
    TensorMap query, key, value, out;
};
static_assert(sizeof(TensorMaps) == 512, "as the host has it");
