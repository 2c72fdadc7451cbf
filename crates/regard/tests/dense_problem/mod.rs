//! The problem that tests of bad input start from.

use regard::{DType, Problem};

/// Two sequences of 3 queries and 5 keys, 4 query heads over 2 key/value heads, head dims 8 and 4.
pub fn dense_problem() -> Problem {
    Problem {
        batch: 2,
        query_heads: 4,
        kv_heads: 2,
        value_dim: 4,
        query_len: 3,
        kv_len: 5,
        ..Problem::new(DType::F32, 8)
    }
}
