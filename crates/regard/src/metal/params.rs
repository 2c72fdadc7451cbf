//! The parameter structs of the Metal kernels: declared once, printed as MSL ([`declarations`]).
//!
//! Enums and strides are those of the CUDA kernels. Addresses are bound as buffers instead of being
//! fields, and what a pipeline is specialized on is a function constant.

// Comments of fields go into the kernels' text as they stand; `[B]` is a shape there.
#![allow(rustdoc::broken_intra_doc_links)]

use crate::params::{
    ElementType, Enumerated, Enumeration, Language, Layout, MapKind, MapStrides, MaskKind,
    MaskStrides, OffsetKind, Parameters, RowStrides, TokenStrides, TreeStrides, parameters,
};

parameters! {
    /// Storage of keys or values.
    enum KvFormat {
        /// In the type of the queries.
        Native,
        /// Single precision.
        F32,
        /// Half precision.
        F16,
        /// bfloat16.
        BF16,
        /// Codes of 8 bits: 4 of exponent, 3 of mantissa.
        E4M3,
        /// Codes of 8 bits: the upper byte of half precision.
        E5M2,
        /// Codes of 8 bits: integers.
        I8,
        /// Blocks of 32: a scale in half precision, 32 integers of 8 bits.
        Q8_0,
        /// Blocks of 32: a scale in half precision, 32 integers of 4 bits.
        Q4_0,
        /// Latent rows: 512 codes (E4M3), a float per 128 of them, 64 rotary dims (bfloat16).
        Mla656,
    }
    /// The tile map of a mask: what the mask does to each K tile of a block of rows.
    MapParameters {
        /// From sequence to sequence, key/value head to head, and block of rows to block, in bytes.
        strides: MapStrides,
        /// Blocks of rows: 1 where the mask is the same for all.
        row_blocks: i32,
        /// K tiles: bytes per row of the map; 0 for no map.
        key_tiles: i32,
        /// Rows of the mask per sequence and head; the last block may extend past them.
        mask_rows: i32,
        /// Keys of the mask, likewise.
        mask_keys: i32,
    }
    /// A second cache, and the list of its slots that each row attends to as well.
    SecondCache {
        /// Lists, from row to row; no stride of heads where all share a list.
        list_strides: TokenStrides,
        /// Entries of lists that are used, likewise.
        count_strides: TokenStrides,
        /// Keys.
        key_strides: RowStrides,
        /// Values.
        value_strides: RowStrides,
        /// Scales of keys; 0 along what shares one.
        key_scale_strides: RowStrides,
        /// Scales of values.
        value_scale_strides: RowStrides,
        /// Entries per list, at most.
        len: i32,
        /// Whether `second_counts` is given.
        given_counts: i32,
        /// Pages in the pool.
        blocks: i32,
        /// Slots per page.
        block_size: i32,
    }
    /// One attention call, for decode, prefill and combine. Strides are in elements.
    AttentionParameters {
        /// Queries.
        query_strides: RowStrides,
        /// Keys.
        key_strides: RowStrides,
        /// The last dims of keys, if they are in a tensor of their own.
        rotary_strides: RowStrides,
        /// Values.
        value_strides: RowStrides,
        /// Scales of keys; 0 along what shares one.
        key_scale_strides: RowStrides,
        /// Scales of values.
        value_scale_strides: RowStrides,
        /// Output.
        out_strides: RowStrides,
        /// Log-sum-exp.
        lse_strides: RowStrides,
        /// Mask.
        mask_strides: MaskStrides,
        /// Tree bits.
        tree_strides: TreeStrides,
        /// The tile map of the mask.
        map: MapParameters,
        /// Lists of keys, from row to row, or of pages, from sequence to sequence; no stride of
        /// heads where all share a list.
        list_strides: TokenStrides,
        /// Entries of lists that are used, likewise.
        count_strides: TokenStrides,
        /// Numbers of listed pages, likewise.
        number_strides: TokenStrides,
        /// The second cache and its lists.
        second: SecondCache,
        /// Block table: from one sequence to the next.
        block_table_stride: i64,
        /// Keys that a row sees to the left of its position; a large value for no bound.
        window_left: i64,
        /// Keys to the right, likewise; causality is a bound of 0.
        window_right: i64,
        /// Chunked attention: positions per chunk; 0 if positions are not divided.
        chunk: i64,
        /// The position of every first row, if `offset_kind` is Same.
        q_offset: i64,
        /// The position of every first key, if there are no `key_offsets`.
        key_offset: i64,
        /// From one key's position to the next one's.
        key_stride: i64,
        /// Whether `key_offsets`, positions of each sequence's first key, are given.
        given_key_offsets: i64,
        /// Keys per split.
        split_keys: i64,
        /// Multiplies dot products: to the base of the scores, or to units of the softcap.
        score_factor: f32,
        /// The softcap in the base of the scores.
        softcap: f32,
        /// Key/value heads.
        kv_heads: i32,
        /// Query heads that share one of them.
        group: i32,
        /// The longest query of any sequence; where ragged, rows there are in all.
        query_len: i32,
        /// Maximum keys of a sequence; if ragged, the total number of key rows.
        kv_len: i32,
        /// Maximum query tokens of a ragged sequence; lengths are clamped to it.
        query_len_bound: i32,
        /// Maximum keys of a ragged sequence, likewise.
        kv_len_bound: i32,
        /// Pages in the pool.
        blocks: i32,
        /// The source of positions.
        offset_kind: OffsetKind,
        /// Whether queries are ragged.
        ragged_queries: i32,
        /// Whether keys are ragged.
        ragged_keys: i32,
        /// Whether `kv_lens` is given.
        given_kv_lens: i32,
        /// The first sequence of the dispatch.
        first_sequence: i32,
        /// The first threadgroup of the dispatch, along rows and splits.
        first_block: i32,
        /// Blocks of rows of the longest query.
        row_blocks: i32,
        /// Splits of the longest sequence.
        splits: i32,
        /// Rows of the longest query: tokens times grouped heads.
        rows: i32,
        /// Entries per list, at most; slots, if lists are of pages.
        list_len: i32,
        /// Whether `key_counts` or `page_list_lens` is given.
        given_key_counts: i32,
        /// Sequences.
        sequences: i32,
        /// Unused, so that no compiler pads.
        unused: i32,
    }
    /// Parameters of `append`: new keys and values, and their slots in the pages.
    AppendParameters {
        /// New keys.
        key_strides: TokenStrides,
        /// New values.
        value_strides: TokenStrides,
        /// Queries.
        query_strides: TokenStrides,
        /// Pool of keys.
        key_pool_strides: RowStrides,
        /// Pool of values.
        value_pool_strides: RowStrides,
        /// Scales of keys; 0 along what shares one.
        key_scale_strides: RowStrides,
        /// Scales of values.
        value_scale_strides: RowStrides,
        /// Block table: from one sequence to the next.
        block_table_stride: i64,
        /// Sequences.
        batch: i32,
        /// New tokens of each sequence; 0 if `cu_seqlens` is given.
        new_tokens: i32,
        /// Key/value heads; in the grid heads of keys, then of values, then of queries.
        kv_heads: i32,
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
        /// Whether there is a page table (1); otherwise sequence b is block b.
        given_block_table: i32,
        /// Storage of keys in the pool.
        key_format: KvFormat,
        /// Storage of values in the pool.
        value_format: KvFormat,
        /// Whether scales of keys are computed and written (1) or given (0).
        dynamic_key_scales: i32,
        /// Likewise for values.
        dynamic_value_scales: i32,
        /// The first dimension of a quantized key that is rotated.
        rotary_start: i32,
        /// Unused, so that no compiler pads.
        unused: i32,
    }
    /// Parameters of `merge`: partial results over disjoint sets of keys.
    MergeParameters {
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
        /// Type of the output.
        out_type: ElementType,
        /// Whether the log-sum-exp is written.
        writes_lse: i32,
    }
}

/// Every enum that a Metal kernel reads.
const ENUMS: [Enumeration; 5] = [
    ElementType::ENUMERATION,
    OffsetKind::ENUMERATION,
    MaskKind::ENUMERATION,
    MapKind::ENUMERATION,
    KvFormat::ENUMERATION,
];

/// Every struct that a Metal kernel reads, parts first.
const STRUCTS: [Layout; 10] = [
    RowStrides::LAYOUT,
    MaskStrides::LAYOUT,
    TreeStrides::LAYOUT,
    MapStrides::LAYOUT,
    TokenStrides::LAYOUT,
    MapParameters::LAYOUT,
    SecondCache::LAYOUT,
    AttentionParameters::LAYOUT,
    AppendParameters::LAYOUT,
    MergeParameters::LAYOUT,
];

/// All of them as MSL text.
pub(super) fn declarations() -> String {
    let enums = ENUMS.iter().map(Enumeration::declaration);
    let structs = STRUCTS.iter().map(|layout| layout.declaration(Language::Metal));
    enums.chain(structs).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_padded() {
        for layout in STRUCTS {
            assert_eq!(layout.size, layout.packed_size(), "{}", layout.name);
        }
    }
}
