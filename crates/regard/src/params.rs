//! Every struct and enum that a GPU kernel reads, declared once.
//!
//! [`parameters!`](crate::params) makes `#[repr(C)]` Rust structs and `#[repr(i32)]` enums, and
//! their declarations in CUDA and Metal, with the same names and an assertion of each size. Kernels
//! include a generated file; a test compares it with this one. Fields are ordered by size, so that
//! no compiler pads them.

// Comments of fields go into kernels' headers as they stand; `[B]` is a shape there.
#![allow(rustdoc::broken_intra_doc_links)]

mod declaration;

pub(crate) use declaration::parameters;
pub use declaration::{
    Enumerated, Enumeration, Field, FieldType, Language, Layout, Parameters, Value,
};

parameters! {
    /// The type of elements in memory.
    enum ElementType {
        /// IEEE half precision.
        F16,
        /// bfloat16.
        BF16,
        /// IEEE single precision.
        F32,
    }
    /// The source of the position of a sequence's first row.
    enum OffsetKind {
        /// Bottom right: the last row is at the last key.
        BottomRight,
        /// `q_offset`, the same for all sequences.
        Same,
        /// `q_offsets`, one per sequence.
        PerSequence,
    }
    /// The mask, and the type of its elements. From F32 on it is additive.
    enum MaskKind {
        /// No mask.
        None,
        /// Boolean: keys whose byte is 0 are hidden.
        Bool,
        /// Additive, f32.
        F32,
        /// Additive, f16.
        F16,
        /// Additive, bf16.
        BF16,
    }
    /// How rows of keys and values can be loaded.
    enum LoadKind {
        /// Element by element: rows are not 16-byte aligned.
        Elements,
        /// In 16-byte chunks.
        Chunks,
        /// In 16-byte chunks that rows fill, 16 contiguous keys at a time.
        PageAligned16,
    }
    /// A byte of the tile map of a mask: what the mask does to the scores of a K tile.
    enum MapKind {
        /// It hides all of them.
        Empty,
        /// It changes none of them.
        Full,
        /// Neither.
        Mixed,
    }
    /// How keys or values are stored.
    enum CacheFormat {
        /// IEEE half precision.
        F16,
        /// bfloat16.
        BF16,
        /// IEEE single precision.
        F32,
        /// fp8, 4 bits of exponent and 3 of mantissa (e4m3fn: no infinity).
        E4M3,
        /// fp8, 5 bits of exponent and 2 of mantissa.
        E5M2,
        /// Signed 8-bit integers.
        I8,
        /// GGUF q8_0: blocks of an f16 scale and 32 signed bytes.
        Q8_0,
        /// GGUF q4_0: blocks of an f16 scale and 32 nibbles less 8.
        Q4_0,
        /// Latent rows: 512 e4m3 codes, an f32 scale per 128 of them, 64 bf16 rotary dims.
        Mla656,
    }
    /// Strides of rows.
    RowStrides {
        /// From one sequence (0 where ragged) or block to the next.
        batch: i64,
        /// From one token or slot to the next.
        token: i64,
        /// From one head to the next.
        head: i64,
    }
    /// Strides of a mask; 0 where a dimension is 1.
    MaskStrides {
        /// From one sequence to the next.
        batch: i64,
        /// From one head to the next.
        head: i64,
        /// From one row to the next.
        row: i64,
        /// From one key to the next.
        key: i64,
    }
    /// Strides of tree bits, in words.
    TreeStrides {
        /// From one sequence to the next.
        batch: i64,
        /// From one row to the next.
        row: i64,
    }
    /// Strides of the tile map of a mask, in bytes; 0 where the mask is the same for all.
    MapStrides {
        /// From one sequence to the next.
        batch: i64,
        /// From one query head to the next.
        head: i64,
        /// From one row tile to the next.
        row: i64,
    }
    /// Strides of the tokens of a ragged batch.
    TokenStrides {
        /// From one token to the next.
        token: i64,
        /// From one head to the next.
        head: i64,
    }
    /// Queries, the output or its log-sum-exp.
    RowTensor {
        /// Its address; 0 for none.
        pointer: u64,
        /// Its strides.
        strides: RowStrides,
    }
    /// Keys or values: of sequences, ragged, or in pages.
    KvTensor {
        /// Its address.
        pointer: u64,
        /// Its strides.
        strides: RowStrides,
    }
    /// New keys or values of a ragged batch, or queries beside them.
    TokenTensor {
        /// Its address; 0 for none.
        pointer: u64,
        /// Its strides.
        strides: TokenStrides,
    }
    /// Sliding window: keys that a row sees beside its position.
    Window {
        /// Keys to the left; the largest value for no bound.
        left: i64,
        /// Keys to the right, likewise; causality is a bound of 0.
        right: i64,
    }
    /// Chunked attention: a row sees the keys of its position's chunk.
    Chunk {
        /// Positions per chunk; 0 if positions are not divided.
        length: i64,
        /// 2^64 over `length`, rounded up.
        inverse: u64,
    }
    /// Positions of keys: key j is at offset + stride * j.
    KeyPositions {
        /// Of the first key of each sequence, i32 [B]; 0 if all have `offset`.
        offsets: u64,
        /// Of every first key, if there are no `offsets`.
        offset: i64,
        /// From one key's position to the next one's.
        stride: i64,
        /// 2^64 over `stride`, rounded up; not read if the stride is 1.
        inverse: u64,
    }
    /// Stream-K: how the work of all tiles is divided among the CTAs of a decode launch.
    StreamK {
        /// Whether `combine` combines the parts of a tile (1); else its last CTA does (0).
        combines: u64,
        /// Workspace: the work of each CTA, as `schedule_ctas` left it; 0 if decode finds it.
        schedule: u64,
        /// Work of all tiles if the host knows that all lengths are equal; else 0.
        work_total: i64,
        /// Work per CTA.
        work_per_cta: i64,
        /// Work per tile, if `work_total` is given.
        work_per_tile: i64,
        /// log2 of the keys per unit of work.
        work_unit_shift: i32,
        /// Units of work for starting a tile.
        tile_start_work: i32,
        /// Partial states that one CTA may leave.
        partials_per_cta: i32,
        /// Groups of warps that share the keys of a CTA.
        key_groups: i32,
    }
    /// The tile map of a mask: what the mask does to each K tile.
    TileMap {
        /// Workspace: one MapKind byte per K tile; 0 for none.
        pointer: u64,
        /// Its strides.
        strides: MapStrides,
        /// Query tokens per row tile.
        tile_rows: i32,
        /// Keys per K tile.
        tile_keys: i32,
        /// Sequences: 1 where the mask is the same for all.
        batch: i32,
        /// Query heads, likewise.
        heads: i32,
        /// Row tiles, likewise.
        row_tiles: i32,
        /// K tiles: bytes per row of the map.
        key_tiles: i32,
        /// Rows of the mask per sequence and head; the last row tile may extend past them.
        mask_rows: i32,
        /// Keys of the mask, likewise.
        mask_keys: i32,
    }
    /// One attention call, for decode and prefill. An address may be 0 (none); strides are in
    /// elements.
    AttentionParameters {
        /// Queries: [B, Lq, Hq, Dk], or [total, Hq, Dk].
        query: RowTensor,
        /// Keys: [B, Lk, Hkv, Dk], [total, Hkv, Dk] or [blocks, block_size, Hkv, Dk].
        keys: KvTensor,
        /// Values, like the keys.
        values: KvTensor,
        /// Output, like the queries.
        out: RowTensor,
        /// Log-sum-exp of each row, f32.
        lse: RowTensor,
        /// Mask [B, Hq, Lq, Lk], of the type in `mask_kind`.
        mask: u64,
        /// ALiBi slopes, f32 [Hq].
        alibi_slopes: u64,
        /// Sinks, f32 [Hq].
        sinks: u64,
        /// Tree bits, i32 [B, Lq, words].
        tree_mask: u64,
        /// Keys in use, i32 [B].
        kv_lens: u64,
        /// Cumulative query lengths, i32 [B + 1].
        cu_seqlens_q: u64,
        /// Cumulative key lengths, i32 [B + 1].
        cu_seqlens_k: u64,
        /// Page table, i32 [B, blocks].
        block_table: u64,
        /// Positions of the first rows, i32 [B].
        q_offsets: u64,
        /// Workspace: counters, then partial states.
        workspace: u64,
        /// Workspace, for prefix groups: the first key of each sequence that decode attends to, i32
        /// [B]; 0 for none. Decode leaves states of the rows of which it is above 0.
        first_keys: u64,
        /// Workspace: the unnormalized outputs of these rows, f32.
        own_out: RowTensor,
        /// Workspace: their maxima and sums, pairs of f32.
        own_states: RowTensor,
        /// Mask.
        mask_strides: MaskStrides,
        /// Tree bits.
        tree_strides: TreeStrides,
        /// Page table: from one sequence to the next.
        block_table_stride: i64,
        /// Sliding window and causality.
        window: Window,
        /// Chunked attention.
        chunk: Chunk,
        /// Positions of keys.
        key_positions: KeyPositions,
        /// The position of every first row, if `offset_kind` is Same.
        q_offset: i64,
        /// How the work of a decode launch is divided.
        stream_k: StreamK,
        /// Multiplies dot products.
        scale: f32,
        /// Bounds scores; 0 where there is no cap.
        softcap: f32,
        /// Sequences.
        batch: i32,
        /// Key/value heads.
        kv_heads: i32,
        /// Query heads that share one of them.
        group: i32,
        /// Dk.
        head_dim: i32,
        /// Dv.
        value_dim: i32,
        /// The longest query of any sequence; where ragged, rows there are in all.
        query_len: i32,
        /// Maximum keys of a sequence; if ragged, the total number of key rows.
        kv_len: i32,
        /// Slots per page, 0 if keys are not paged.
        block_size: i32,
        /// Pages in the pool.
        blocks: i32,
        /// The source of positions.
        offset_kind: OffsetKind,
        /// The mask and its type.
        mask_kind: MaskKind,
        /// Whether the output is f32 though the inputs are not.
        out_f32: i32,
        /// log2 of the slots per page, -1 if that is no power of 2.
        block_shift: i32,
        /// How queries, keys and values are loaded.
        load_kind: LoadKind,
        /// Whether scores are dot products times the scale: no softcap, slopes or additive mask.
        unmodified_scores: i32,
        /// Whether four elements of the output can be written at once.
        out_aligned: i32,
        /// Whether keys are split at fixed places.
        batch_invariant: i32,
        /// Longer sequences belong to the prefill launch; the largest value for none.
        max_query_len: i32,
        /// Maximum query tokens of a ragged sequence; lengths are clamped to it.
        query_len_bound: i32,
        /// Maximum keys of a ragged sequence, likewise.
        kv_len_bound: i32,
    }
    /// Scales that all keys, or all values, of a head share, in all sequences or in one.
    HeadScales {
        /// f32 [Hkv], [B, Hkv], or one for all heads; 0 if all are 1.
        pointer: u64,
        /// From head to head, in elements.
        stride: i64,
        /// From sequence to sequence.
        sequence_stride: i64,
    }
    /// Workspace: a scale per key and head, of keys that were widened.
    KeyScales {
        /// f32 [B, Hkv, keys]; 0 if there are none.
        pointer: u64,
        /// From head to head, in elements: keys, rounded up to a K tile.
        stride: i64,
    }
    /// Workspace: partial states of prefill, where the keys of a tile are split.
    KeySplits {
        /// Unnormalized outputs of the rows over the first split, f32.
        out: RowTensor,
        /// Their maxima and sums, pairs of f32.
        states: RowTensor,
        /// From the outputs over one split to those over the next, in elements.
        out_stride: i64,
        /// From states to states, likewise.
        state_stride: i64,
        /// Splits, a power of two; 1 if keys are not split, and there are no partial states.
        count: i32,
        /// log2 of them.
        shift: i32,
        /// Type of the output.
        out_type: ElementType,
        /// Unused, so that no compiler pads.
        unused: i32,
    }
    /// Further parameters of the prefill kernels: the tile scheduler, the tile map of a mask,
    /// scales of codes that were widened, and splits of the keys.
    PrefillParameters {
        /// Workspace: u32 next tile, u32 finished CTAs; zero before and after a run.
        counters: u64,
        /// The tile map of the mask.
        map: TileMap,
        /// Scales of keys.
        key_scales: HeadScales,
        /// Scales of values.
        value_scales: HeadScales,
        /// Scales of single keys, for the fallback kernels with WGMMA.
        each_key: KeyScales,
        /// Splits of the keys of each tile, for kernels with WGMMA at head dims up to 256.
        splits: KeySplits,
        /// Tiles in all if the host knows that all query lengths are equal; else 0.
        tiles: i64,
        /// Row tiles of each (sequence, query head), where `tiles` is given.
        row_tiles: i32,
        /// (sequence, key/value head) pairs whose keys and values fit the L2 cache together.
        l2_group: i32,
        /// Shorter sequences belong to the decode launch; 0 for none.
        min_query_len: i32,
        /// Keys per TMA box; divides both K tiles and pages.
        box_keys: i32,
    }
    /// Widening: copies of keys and values in the type of queries, for prefill.
    WidenParameters {
        /// The copy of keys: [B, Lk, Hkv, Dk], or [total, Hkv, Dk]; 2 Hkv heads if each element
        /// becomes two.
        keys: KvTensor,
        /// The copy of values, like that of keys.
        values: KvTensor,
        /// The copy of scales of keys, if prefill takes a scale for each.
        each_key: KeyScales,
        /// f32 [2, B, Hkv]: what copies of keys, and of values, are multiples of; 0 if of 1. Behind
        /// them is the same once per split of the keys: their largest magnitudes.
        units: u64,
        /// u32, zero before and after: CTAs that have found the largest magnitude of their keys.
        counter: u64,
        /// Sequences of fewer query tokens are not widened.
        min_query_len: i32,
        /// Blocks of keys per sequence, each for one CTA.
        key_blocks: i32,
        /// Whether all rows start at multiples of 16 bytes.
        aligned: i32,
        /// Elements of the copy that add up to one of a key, with its scale: 2; or 1 if keys are
        /// copied as they are.
        key_terms: i32,
        /// Whether values are multiplied by their scales, and rounded.
        round_values: i32,
        /// Zero.
        unused: i32,
    }
    /// A prefix group: sequences whose rows attend to a shared prefix together.
    PrefixGroup {
        /// Workspace: the group's first partial state.
        first_state: i64,
        /// The sequence whose page table the prefix is read through.
        sequence: i32,
        /// Keys of the prefix.
        len: i32,
        /// The group's first query token, among those of all groups.
        first_token: i32,
        /// Query rows per key/value head: tokens times heads that share one.
        rows: i32,
        /// Row tiles per key/value head.
        row_tiles: i32,
        /// Splits of the prefix.
        splits: i32,
        /// Keys per split.
        split_keys: i32,
        /// The group's first work item.
        first_item: i32,
    }
    /// Further parameters of the kernels for prefix groups.
    PrefixParameters {
        /// Group of each sequence, i32 [B]; -1 for none.
        groups: u64,
        /// Prefix length of each group, i32 [G].
        lens: u64,
        /// Workspace: work items and groups in use, i32 [2].
        totals: u64,
        /// Workspace: the groups in use, PrefixGroup [G].
        schedule: u64,
        /// Workspace: four i32 per group that is given, while they are counted.
        tallies: u64,
        /// Workspace: group in use (or -1) and first token in it of each sequence, i32 [B, 2].
        places: u64,
        /// Workspace: sequence and token of each query token of a group, i32 [tokens, 2].
        tokens: u64,
        /// Workspace: `first_keys` of the decode launch, i32 [B].
        first_keys: u64,
        /// Workspace: partial outputs over prefixes, f32 [states, compiled Dv].
        partial_out: u64,
        /// Workspace: their maxima and sums, f32 [states, 2].
        partial_states: u64,
        /// Groups that are given (G).
        group_count: i32,
        /// CTAs that take work items at a time.
        workers: i32,
        /// Query rows per work item, at most.
        tile_rows: i32,
        /// Keys per K tile.
        tile_keys: i32,
    }
    /// How the keys and values of a call are stored if not as the queries are.
    CacheParameters {
        /// Scales of keys, f32 [blocks or B, slots or Lk, Hkv]; 0 where the format has none.
        key_scales: u64,
        /// Scales of values, likewise.
        value_scales: u64,
        /// Scales of keys; 0 where broadcast.
        key_scale_strides: RowStrides,
        /// Scales of values, likewise.
        value_scale_strides: RowStrides,
        /// Format of keys.
        key_format: CacheFormat,
        /// Format of values.
        value_format: CacheFormat,
        /// Type of queries, and of the output unless that is f32.
        query_type: ElementType,
        /// Unused, so that no compiler pads.
        unused: i32,
    }
    /// A second cache, and the list of its slots that each row attends to as well.
    SecondCache {
        /// Slots, i32 [rows, Hkv or 1, len]; 0 if there are no second lists.
        indices: u64,
        /// Entries of each list that are used, i32 [rows, Hkv or 1]; 0 if all are.
        counts: u64,
        /// Lists, from row to row; no stride of heads where all share a list.
        index_strides: TokenStrides,
        /// Counts, likewise.
        count_strides: TokenStrides,
        /// Pool of keys [blocks, block_size, Hkv, Dk].
        keys: KvTensor,
        /// Pool of values.
        values: KvTensor,
        /// Scales of keys, f32 [blocks, block_size, Hkv]; 0 where the format has none.
        key_scales: u64,
        /// Scales of values, likewise.
        value_scales: u64,
        /// Scales of keys; 0 where broadcast.
        key_scale_strides: RowStrides,
        /// Scales of values, likewise.
        value_scale_strides: RowStrides,
        /// Entries per list, at most.
        len: i32,
        /// Pages in the pool.
        blocks: i32,
        /// Slots per page.
        block_size: i32,
        /// log2 of the slots per page, -1 if that is no power of 2.
        block_shift: i32,
    }
    /// Lists of the keys that rows attend to, or of the pages that sequences do.
    ListParameters {
        /// Entries, i32 [rows, Hkv or 1, len]; pages, i32 [Hkv or 1, sequences, len / block_size].
        indices: u64,
        /// Entries of each list that are used, i32 [rows, Hkv or 1] or [Hkv or 1, sequences]; 0 if
        /// all are.
        counts: u64,
        /// Lists, from row to row or from sequence to sequence; no stride of heads where all share
        /// a list.
        index_strides: TokenStrides,
        /// Counts, likewise.
        count_strides: TokenStrides,
        /// Entries per list, at most.
        len: i32,
        /// Whether entries are physical slots of the pool, not positions.
        are_slots: i32,
        /// Sequences: `batch` of the call counts rows.
        sequences: i32,
        /// Whether lists are of pages: an entry is a slot of one of them.
        are_pages: i32,
        /// The number of each listed page in its sequence, i32, as `indices`; 0 if pages have no
        /// positions.
        numbers: u64,
        /// Numbers, likewise.
        number_strides: TokenStrides,
        /// The second cache and its lists.
        second: SecondCache,
    }
    /// An attention call whose rows have lists of keys.
    ListedParameters {
        /// The call.
        attention: AttentionParameters,
        /// The lists.
        lists: ListParameters,
    }
    /// Parameters of `append`: new keys and values, and their slots in the pages.
    AppendParameters {
        /// New keys [total, Hkv, Dk].
        new_keys: TokenTensor,
        /// New values [total, Hkv, Dv].
        new_values: TokenTensor,
        /// Pool of keys [blocks, block_size, Hkv, Dk].
        keys: KvTensor,
        /// Pool of values.
        values: KvTensor,
        /// Queries to rotate in place [total, Hq, Dk], or none.
        query: TokenTensor,
        /// Cosines and sines, f32 [positions, rotary_dim]: cosines first; 0 for no rotation.
        rotary: u64,
        /// Page table, i32 [B, blocks]; 0 if sequence b is page b.
        block_table: u64,
        /// Tokens of each sequence after appending, i32 [B].
        kv_lens: u64,
        /// Cumulative new lengths, i32 [B + 1]; 0 if every sequence has `new_tokens`.
        cu_seqlens: u64,
        /// Page table: from one sequence to the next.
        block_table_stride: i64,
        /// Formats of the pools, and their scales; written where they are dynamic.
        cache: CacheParameters,
        /// Sequences.
        batch: i32,
        /// Tokens in all.
        tokens: i32,
        /// New tokens of each sequence where there is no `cu_seqlens`.
        new_tokens: i32,
        /// Key/value heads.
        kv_heads: i32,
        /// Query heads; 0 where no queries are rotated.
        query_heads: i32,
        /// Dk.
        head_dim: i32,
        /// Dv.
        value_dim: i32,
        /// Leading dimensions that are rotated: even, at most Dk; 0 for none.
        rotary_dim: i32,
        /// Whether RoPE pairs adjacent dims (1) or halves (0).
        rotary_interleaved: i32,
        /// Positions that the table of cosines and sines covers.
        rotary_positions: i32,
        /// Slots per page.
        block_size: i32,
        /// Pages in the pool.
        blocks: i32,
        /// Entries of a sequence's page table.
        table_blocks: i32,
        /// Bytes of an element: 2 or 4.
        element_bytes: i32,
        /// Type of an element.
        element_type: ElementType,
        /// Whether scales of keys are computed and written, one for each token and head.
        dynamic_key_scales: i32,
        /// Whether scales of values are.
        dynamic_value_scales: i32,
        /// The first dimension of a quantized key that is rotated.
        rotary_start: i32,
    }
    /// Parameters of `merge`: partial results over disjoint sets of keys.
    MergeParameters {
        /// Partial outputs [parts, rows, dim].
        parts: u64,
        /// Their log-sum-exps, f32 [parts, rows].
        part_lse: u64,
        /// Output [rows, dim].
        out: u64,
        /// Its log-sum-exp, f32 [rows]; 0 for none.
        lse: u64,
        /// From one part's output to the next.
        part_stride: i64,
        /// From one part's log-sum-exp to the next.
        part_lse_stride: i64,
        /// Rows.
        rows: i64,
        /// Elements per row.
        dim: i32,
        /// Parts.
        count: i32,
        /// Type of parts.
        part_type: ElementType,
        /// Type of the output.
        out_type: ElementType,
    }
}

/// Every enum that a CUDA kernel reads.
const CUDA_ENUMS: [Enumeration; 6] = [
    ElementType::ENUMERATION,
    OffsetKind::ENUMERATION,
    MaskKind::ENUMERATION,
    LoadKind::ENUMERATION,
    MapKind::ENUMERATION,
    CacheFormat::ENUMERATION,
];

/// Every struct that a CUDA kernel reads, parts first.
const CUDA: [Layout; 27] = [
    RowStrides::LAYOUT,
    MaskStrides::LAYOUT,
    TreeStrides::LAYOUT,
    MapStrides::LAYOUT,
    TokenStrides::LAYOUT,
    RowTensor::LAYOUT,
    KvTensor::LAYOUT,
    TokenTensor::LAYOUT,
    Window::LAYOUT,
    Chunk::LAYOUT,
    KeyPositions::LAYOUT,
    StreamK::LAYOUT,
    TileMap::LAYOUT,
    AttentionParameters::LAYOUT,
    HeadScales::LAYOUT,
    KeyScales::LAYOUT,
    KeySplits::LAYOUT,
    PrefillParameters::LAYOUT,
    WidenParameters::LAYOUT,
    PrefixGroup::LAYOUT,
    PrefixParameters::LAYOUT,
    CacheParameters::LAYOUT,
    SecondCache::LAYOUT,
    ListParameters::LAYOUT,
    ListedParameters::LAYOUT,
    AppendParameters::LAYOUT,
    MergeParameters::LAYOUT,
];

/// A TMA tensor map as the driver encodes it (`CUtensorMap`).
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap(pub [u8; 128]);

/// The TMA descriptors of the Hopper prefill kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMaps {
    /// Queries.
    pub query: TensorMap,
    /// Keys.
    pub key: TensorMap,
    /// Values.
    pub value: TensorMap,
    /// Output.
    pub out: TensorMap,
}

/// The same for kernels.
const TENSOR_MAPS: &str = "\
// A TMA descriptor (CUtensorMap).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};
static_assert(sizeof(TensorMap) == 128, \"as the host has it\");

// The TMA descriptors of the Hopper prefill kernels.
struct TensorMaps {
    TensorMap query, key, value, out;
};
static_assert(sizeof(TensorMaps) == 512, \"as the host has it\");
";

/// The generated header beside the CUDA kernels.
pub fn cuda_header() -> String {
    let mut text = String::from(
        "// Generated from crates/regard/src/params.rs: REGARD_WRITE_PARAMETERS=1 cargo test -p \
         regard params. Do not edit.\n#pragma once\n",
    );
    let enums = CUDA_ENUMS.iter().map(Enumeration::declaration);
    let structs = CUDA.iter().map(|layout| layout.declaration(Language::Cuda));
    for declaration in enums.chain(structs) {
        text.push('\n');
        text.push_str(&declaration);
    }
    text.push('\n');
    text.push_str(TENSOR_MAPS);
    text
}

#[cfg(test)]
mod tests;
