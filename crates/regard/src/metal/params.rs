//! The parameter structs of the Metal kernels: declared once, and printed as MSL
//! ([`declarations`]).

use crate::params::{Language, Parameters, parameters};

parameters! {
    #[doc = " One attention call. Strides are in elements."]
    AttentionParameters {
        #[doc = " Queries: from one sequence to the next (0 if ragged)."]
        q_batch_stride: i64,
        #[doc = " Queries: from one token to the next."]
        q_token_stride: i64,
        #[doc = " Queries: from one head to the next."]
        q_head_stride: i64,
        #[doc = " Keys: from one sequence (0 if ragged) or page to the next."]
        k_batch_stride: i64,
        #[doc = " Keys: from one token or slot to the next."]
        k_token_stride: i64,
        #[doc = " Keys: from one head to the next."]
        k_head_stride: i64,
        #[doc = " Values: from one sequence (0 if ragged) or page to the next."]
        v_batch_stride: i64,
        #[doc = " Values: from one token or slot to the next."]
        v_token_stride: i64,
        #[doc = " Values: from one head to the next."]
        v_head_stride: i64,
        #[doc = " Output: from one sequence to the next (0 if ragged)."]
        out_batch_stride: i64,
        #[doc = " Output: from one token to the next."]
        out_token_stride: i64,
        #[doc = " Output: from one head to the next."]
        out_head_stride: i64,
        #[doc = " Log-sum-exp: from one sequence to the next (0 if ragged)."]
        lse_batch_stride: i64,
        #[doc = " Log-sum-exp: from one token to the next."]
        lse_token_stride: i64,
        #[doc = " Log-sum-exp: from one head to the next."]
        lse_head_stride: i64,
        #[doc = " Mask: from one sequence to the next; like the others, 0 if the dimension is 1."]
        mask_batch_stride: i64,
        #[doc = " Mask: from one head to the next."]
        mask_head_stride: i64,
        #[doc = " Mask: from one row to the next."]
        mask_row_stride: i64,
        #[doc = " Mask: from one key to the next."]
        mask_key_stride: i64,
        #[doc = " Tree bits: from one sequence to the next."]
        tree_batch_stride: i64,
        #[doc = " Tree bits: from one row to the next."]
        tree_row_stride: i64,
        #[doc = " Block table: from one sequence to the next."]
        table_stride: i64,
        #[doc = " Visible keys to the left of a row's position."]
        window_left: i64,
        #[doc = " Visible keys to the right; causality is a bound of 0."]
        window_right: i64,
        #[doc = " Chunked attention: positions per chunk; 0 if positions are not divided."]
        chunk: i64,
        #[doc = " The position of every first row, if `offset_kind` is 1."]
        q_offset: i64,
        #[doc = " Keys per split."]
        split_keys: i64,
        #[doc = " Multiplies dot products: to the base of the scores, or to units of the softcap."]
        score_factor: f32,
        #[doc = " The softcap in the base of the scores."]
        softcap: f32,
        #[doc = " Key/value heads."]
        kv_heads: i32,
        #[doc = " Query heads per key/value head."]
        group: i32,
        #[doc = " The longest query of any sequence."]
        query_len: i32,
        #[doc = " The most keys of any sequence."]
        kv_len: i32,
        #[doc = " Query rows of all sequences, if ragged."]
        query_total: i32,
        #[doc = " Keys of all sequences, if ragged."]
        key_total: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " 0 bottom right, 1 the same for all sequences, 2 one per sequence."]
        offset_kind: i32,
        #[doc = " Whether queries are ragged."]
        ragged_queries: i32,
        #[doc = " Whether keys are ragged."]
        ragged_keys: i32,
        #[doc = " Whether `kv_lens` is given."]
        given_kv_lens: i32,
        #[doc = " Blocks of rows of the longest query."]
        row_blocks: i32,
        #[doc = " Splits of the longest sequence."]
        splits: i32,
        #[doc = " Rows of the longest query: tokens times grouped heads."]
        rows: i32,
    }
    #[doc = " What `append` reads. Strides are in elements."]
    AppendParameters {
        #[doc = " New keys: from one sequence to the next (0 if ragged)."]
        new_k_batch_stride: i64,
        #[doc = " New keys: from one token to the next."]
        new_k_token_stride: i64,
        #[doc = " New keys: from one head to the next."]
        new_k_head_stride: i64,
        #[doc = " New values: from one sequence to the next (0 if ragged)."]
        new_v_batch_stride: i64,
        #[doc = " New values: from one token to the next."]
        new_v_token_stride: i64,
        #[doc = " New values: from one head to the next."]
        new_v_head_stride: i64,
        #[doc = " Cached keys: from one sequence or page to the next."]
        k_batch_stride: i64,
        #[doc = " Cached keys: from one token or slot to the next."]
        k_token_stride: i64,
        #[doc = " Cached keys: from one head to the next."]
        k_head_stride: i64,
        #[doc = " Cached values: from one sequence or page to the next."]
        v_batch_stride: i64,
        #[doc = " Cached values: from one token or slot to the next."]
        v_token_stride: i64,
        #[doc = " Cached values: from one head to the next."]
        v_head_stride: i64,
        #[doc = " Queries: from one sequence to the next (0 if ragged)."]
        query_batch_stride: i64,
        #[doc = " Queries: from one token to the next."]
        query_token_stride: i64,
        #[doc = " Queries: from one head to the next."]
        query_head_stride: i64,
        #[doc = " Block table: from one sequence to the next."]
        table_stride: i64,
        #[doc = " Dk."]
        head_dim: i32,
        #[doc = " Dv."]
        value_dim: i32,
        #[doc = " New tokens per sequence, if they are not ragged."]
        new_tokens: i32,
        #[doc = " New tokens of all sequences, if they are ragged."]
        total: i32,
        #[doc = " Whether new tokens are ragged."]
        ragged: i32,
        #[doc = " Keys that a sequence can hold."]
        capacity: i32,
        #[doc = " Slots per page; 0 if the cache is not paged."]
        block_size: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " Key/value heads; further heads of the grid are queries."]
        kv_heads: i32,
        #[doc = " Leading dims that are rotated: even, at most Dk; 0 for none."]
        rotary_dim: i32,
        #[doc = " Whether neighbours are rotated together (1) or halves (0)."]
        rotary_interleaved: i32,
        #[doc = " Positions of the table of cosines and sines."]
        rotary_positions: i32,
    }
}

/// Both structs as MSL text.
pub(super) fn declarations() -> String {
    [AttentionParameters::LAYOUT, AppendParameters::LAYOUT]
        .map(|layout| layout.declaration(Language::Metal))
        .join("\n")
}
