//! The parameter structs of the Metal kernels: declared once, printed as MSL ([`declarations`]).
//!
//! Enums and strides are those of the CUDA kernels. Addresses are bound as buffers instead of being
//! fields, and what a pipeline is specialised on is a function constant.

// Comments of fields go into the kernels' text as they stand; `[B]` is a shape there.
#![allow(rustdoc::broken_intra_doc_links)]

use crate::params::{
    ElementType, Enumerated, Enumeration, Language, Layout, MaskKind, MaskStrides, OffsetKind,
    Parameters, PoolStrides, RowStrides, TokenStrides, TreeStrides, parameters,
};

parameters! {
    #[doc = " One attention call, for decode, prefill and join. Strides are in elements."]
    AttentionParameters {
        #[doc = " Queries."]
        query_strides: RowStrides,
        #[doc = " Keys."]
        key_strides: RowStrides,
        #[doc = " Values."]
        value_strides: RowStrides,
        #[doc = " Output."]
        out_strides: RowStrides,
        #[doc = " Log-sum-exp."]
        lse_strides: RowStrides,
        #[doc = " Mask."]
        mask_strides: MaskStrides,
        #[doc = " Tree bits."]
        tree_strides: TreeStrides,
        #[doc = " Block table: from one sequence to the next."]
        block_table_stride: i64,
        #[doc = " Keys that a row sees to the left of its position; a large value for no bound."]
        window_left: i64,
        #[doc = " Keys to the right, likewise; causality is a bound of 0."]
        window_right: i64,
        #[doc = " Chunked attention: positions per chunk; 0 if positions are not divided."]
        chunk: i64,
        #[doc = " The position of every first row, if `offset_kind` is Same."]
        q_offset: i64,
        #[doc = " Keys per split."]
        split_keys: i64,
        #[doc = " Multiplies dot products: to the base of the scores, or to units of the softcap."]
        score_factor: f32,
        #[doc = " The softcap in the base of the scores."]
        softcap: f32,
        #[doc = " Key/value heads."]
        kv_heads: i32,
        #[doc = " Query heads that share one of them."]
        group: i32,
        #[doc = " The longest query of any sequence; where ragged, rows there are in all."]
        query_len: i32,
        #[doc = " The most keys of any sequence; where ragged, rows there are in all."]
        kv_len: i32,
        #[doc = " The most query tokens of a ragged sequence; lengths are clamped to it."]
        query_len_bound: i32,
        #[doc = " The most keys of a ragged sequence, likewise."]
        kv_len_bound: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " Where positions come from."]
        offset_kind: OffsetKind,
        #[doc = " Whether queries are ragged."]
        ragged_queries: i32,
        #[doc = " Whether keys are ragged."]
        ragged_keys: i32,
        #[doc = " Whether `kv_lens` is given."]
        given_kv_lens: i32,
        #[doc = " The first sequence of the dispatch."]
        first_sequence: i32,
        #[doc = " The first threadgroup of the dispatch, along rows and splits."]
        first_block: i32,
        #[doc = " Blocks of rows of the longest query."]
        row_blocks: i32,
        #[doc = " Splits of the longest sequence."]
        splits: i32,
        #[doc = " Rows of the longest query: tokens times grouped heads."]
        rows: i32,
    }
    #[doc = " What `append` reads: new keys and values, and their places in the pages."]
    AppendParameters {
        #[doc = " New keys."]
        key_strides: TokenStrides,
        #[doc = " New values."]
        value_strides: TokenStrides,
        #[doc = " Queries."]
        query_strides: TokenStrides,
        #[doc = " Pool of keys."]
        key_pool_strides: PoolStrides,
        #[doc = " Pool of values."]
        value_pool_strides: PoolStrides,
        #[doc = " Block table: from one sequence to the next."]
        block_table_stride: i64,
        #[doc = " Sequences."]
        batch: i32,
        #[doc = " Tokens in all."]
        tokens: i32,
        #[doc = " New tokens of each sequence; 0 if `cu_seqlens` is given."]
        new_tokens: i32,
        #[doc = " Key/value heads; further heads of the grid are queries."]
        kv_heads: i32,
        #[doc = " Dk."]
        head_dim: i32,
        #[doc = " Dv."]
        value_dim: i32,
        #[doc = " Leading dimensions that are rotated: even, at most Dk; 0 for none."]
        rotary_dim: i32,
        #[doc = " Whether RoPE pairs adjacent dims (1) or halves (0)."]
        rotary_interleaved: i32,
        #[doc = " Positions that the table of cosines and sines covers."]
        rotary_positions: i32,
        #[doc = " Slots per page."]
        block_size: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " Entries of a sequence's page table."]
        table_blocks: i32,
    }
    #[doc = " What `merge` reads: partial results over disjoint sets of keys."]
    MergeParameters {
        #[doc = " From one part's output to the next."]
        part_stride: i64,
        #[doc = " From one part's log-sum-exp to the next."]
        part_lse_stride: i64,
        #[doc = " Rows."]
        rows: i64,
        #[doc = " Elements per row."]
        dim: i32,
        #[doc = " Parts."]
        count: i32,
        #[doc = " Type of the output."]
        out_type: ElementType,
        #[doc = " Whether the log-sum-exp is written."]
        writes_lse: i32,
    }
}

/// Every enum that a Metal kernel reads.
const ENUMS: [Enumeration; 3] =
    [ElementType::ENUMERATION, OffsetKind::ENUMERATION, MaskKind::ENUMERATION];

/// Every struct that a Metal kernel reads, parts first.
const STRUCTS: [Layout; 8] = [
    RowStrides::LAYOUT,
    MaskStrides::LAYOUT,
    TreeStrides::LAYOUT,
    TokenStrides::LAYOUT,
    PoolStrides::LAYOUT,
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
