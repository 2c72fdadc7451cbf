//! What the Metal kernels read besides tensors: declared here once, emitted as MSL ([`declarations`]).

use crate::params::{Language, Parameters, parameters};

parameters! {
    #[doc = " One attention call. Strides are in elements."]
    AttentionParameters {
        #[doc = " Queries: from one sequence to the next (0 where ragged)."]
        q_batch_stride: i64,
        #[doc = " Queries: from one token to the next."]
        q_token_stride: i64,
        #[doc = " Queries: from one head to the next."]
        q_head_stride: i64,
        #[doc = " Keys: from one sequence (0 where ragged) or page to the next."]
        k_batch_stride: i64,
        #[doc = " Keys: from one token or slot to the next."]
        k_token_stride: i64,
        #[doc = " Keys: from one head to the next."]
        k_head_stride: i64,
        #[doc = " Values: from one sequence (0 where ragged) or page to the next."]
        v_batch_stride: i64,
        #[doc = " Values: from one token or slot to the next."]
        v_token_stride: i64,
        #[doc = " Values: from one head to the next."]
        v_head_stride: i64,
        #[doc = " Output: from one sequence to the next (0 where ragged)."]
        out_batch_stride: i64,
        #[doc = " Output: from one token to the next."]
        out_token_stride: i64,
        #[doc = " Output: from one head to the next."]
        out_head_stride: i64,
        #[doc = " Log-sum-exp: from one sequence to the next (0 where ragged)."]
        lse_batch_stride: i64,
        #[doc = " Log-sum-exp: from one token to the next."]
        lse_token_stride: i64,
        #[doc = " Log-sum-exp: from one head to the next."]
        lse_head_stride: i64,
        #[doc = " Mask: from one sequence to the next; like the others, 0 where the dimension is 1."]
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
        #[doc = " Keys to the left of its position that a row sees."]
        window_left: i64,
        #[doc = " Keys to the right, likewise; causality is a bound of 0."]
        window_right: i64,
        #[doc = " The position of every first row, where `offset_kind` says so."]
        q_offset: i64,
        #[doc = " Keys a split."]
        split_keys: i64,
        #[doc = " Multiplies dot products: to the base of the scores, or to units of the softcap."]
        score_factor: f32,
        #[doc = " The softcap in the base of the scores."]
        softcap: f32,
        #[doc = " Key/value heads."]
        kv_heads: i32,
        #[doc = " Query heads that share one of them."]
        group: i32,
        #[doc = " The longest query of any sequence."]
        query_len: i32,
        #[doc = " The most keys of any sequence."]
        kv_len: i32,
        #[doc = " Query rows of all sequences, where ragged."]
        query_total: i32,
        #[doc = " Keys of all sequences, where ragged."]
        key_total: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
        #[doc = " 0 bottom right, 1 the same everywhere, 2 one a sequence."]
        offset_kind: i32,
        #[doc = " Whether queries are ragged."]
        ragged_queries: i32,
        #[doc = " Whether keys are ragged."]
        ragged_keys: i32,
        #[doc = " Whether there are lengths of keys in use."]
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
        #[doc = " New keys: from one sequence to the next (0 where ragged)."]
        new_k_batch_stride: i64,
        #[doc = " New keys: from one token to the next."]
        new_k_token_stride: i64,
        #[doc = " New keys: from one head to the next."]
        new_k_head_stride: i64,
        #[doc = " New values: from one sequence to the next (0 where ragged)."]
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
        #[doc = " Block table: from one sequence to the next."]
        table_stride: i64,
        #[doc = " Dk."]
        head_dim: i32,
        #[doc = " Dv."]
        value_dim: i32,
        #[doc = " New tokens of each sequence, where they are not ragged."]
        new_tokens: i32,
        #[doc = " New tokens of all sequences, where they are."]
        total: i32,
        #[doc = " Whether new tokens are ragged."]
        ragged: i32,
        #[doc = " Keys that a sequence can hold."]
        capacity: i32,
        #[doc = " Slots a page; 0 where the cache is not paged."]
        block_size: i32,
        #[doc = " Pages in the pool."]
        blocks: i32,
    }
}

/// Both structs as MSL text.
pub(super) fn declarations() -> String {
    [AttentionParameters::LAYOUT, AppendParameters::LAYOUT]
        .map(|layout| layout.declaration(Language::Metal))
        .join("\n")
}
