//! The problem that tests of bad input start from.

use regard::{DType, KvStorage, Problem, QueryStorage, Variant};

/// Two sequences of 3 queries and 5 keys, 4 query heads over 2 key/value heads, head dims 8 and 4.
pub fn dense_problem() -> Problem {
    Problem {
        batch: 2,
        query_heads: 4,
        kv_heads: 2,
        head_dim: 8,
        value_dim: 4,
        query_len: 3,
        kv_len: 5,
        queries: QueryStorage::Batched,
        keys: KvStorage::Batched,
        dtype: DType::F32,
        out_dtype: DType::F32,
        variant: Variant::default(),
        lse: false,
        batch_invariant: false,
    }
}
