//! Problems made step by step: [`Problem::default`] and the methods that change it.

use super::{KeyLists, KvStorage, Problem, QueryStorage};
use crate::dtype::DType;
use crate::variant::{Values, Variant, Window};

/// [`Problem::new`] in `bf16` with head dim 128, as most models have it.
impl Default for Problem {
    fn default() -> Problem {
        Problem::new(DType::BF16, 128)
    }
}

/// Each method changes the property in its name and nothing else, unless it says so. Methods can be
/// called in any order. [`Problem::validate`] and [`Plan::new`](crate::Plan::new) check the result.
///
/// ```
/// use regard::{DType, Machine, Plan, Problem, Window};
///
/// // Decode: up to 8 sequences of up to 4096 keys in pages of 16, of which each row sees 1024.
/// let problem = Problem::default()
///     .with_heads(32, 8)
///     .with_lengths(8, 1, 4096)
///     .with_pages(16)
///     .with_causality()
///     .with_window(Window { left: Some(1023), right: None })
///     .with_cache_dtypes(DType::E4M3, DType::E4M3)
///     .with_lse();
/// problem.validate()?;
/// assert_eq!((problem.dtype, problem.key_dtype), (DType::BF16, DType::E4M3));
/// assert_eq!(problem.head_dim, 128);
/// let plan = Plan::new(&problem, &"h200".parse::<Machine>()?)?;
/// assert!(plan.explain().contains("32/8 heads"));
/// # Ok::<(), regard::Error>(())
/// ```
impl Problem {
    /// Query heads, and key/value heads that divide them.
    pub fn with_heads(self, query_heads: usize, kv_heads: usize) -> Problem {
        Problem { query_heads, kv_heads, ..self }
    }

    /// Head dims of queries and keys, and of values and outputs.
    pub fn with_head_dims(self, head_dim: usize, value_dim: usize) -> Problem {
        Problem { head_dim, value_dim, ..self }
    }

    /// Sequences, the longest query of any, and maximum keys of a sequence.
    pub fn with_lengths(self, batch: usize, query_len: usize, kv_len: usize) -> Problem {
        Problem { batch, query_len, kv_len, ..self }
    }

    /// Queries and outputs `[total, Hq, D]`, with `total` rows of all sequences together.
    pub fn with_ragged_queries(self, total: usize) -> Problem {
        Problem { queries: QueryStorage::Ragged { total }, ..self }
    }

    /// Keys and values `[total, Hkv, D]`, sequences one after the other.
    pub fn with_ragged_keys(self) -> Problem {
        Problem { keys: KvStorage::Ragged, ..self }
    }

    /// Keys and values in pools `[blocks, block_size, Hkv, D]` behind a block table.
    pub fn with_pages(self, block_size: usize) -> Problem {
        Problem { keys: KvStorage::Paged { block_size }, ..self }
    }

    /// Queries, keys, values and results of one type.
    pub fn with_dtype(self, dtype: DType) -> Problem {
        Problem { dtype, key_dtype: dtype, value_dtype: dtype, out_dtype: dtype, ..self }
    }

    /// Types of keys and of values in the cache, one of [`CACHE_DTYPES`](crate::CACHE_DTYPES) each.
    pub fn with_cache_dtypes(self, key_dtype: DType, value_dtype: DType) -> Problem {
        Problem { key_dtype, value_dtype, ..self }
    }

    /// The type of the output: the type of the queries, or `f32`.
    pub fn with_out_dtype(self, out_dtype: DType) -> Problem {
        Problem { out_dtype, ..self }
    }

    /// Values are the first `value_dim` dims of the keys, as in the latent cache of MLA.
    pub fn with_latent_values(self, value_dim: usize) -> Problem {
        Problem { values: Values::KeyPrefix, value_dim, ..self }
    }

    /// All features of scores and visibility at once, in place of the present ones.
    pub fn with_variant(self, variant: Variant) -> Problem {
        Problem { variant, ..self }
    }

    /// Keys after the query's position are hidden.
    pub fn with_causality(self) -> Problem {
        Problem { variant: Variant { causal: true, ..self.variant }, ..self }
    }

    /// Keys outside this window around the query's position are hidden.
    pub fn with_window(self, window: Window) -> Problem {
        Problem { variant: Variant { window, ..self.variant }, ..self }
    }

    /// Rows attend to lists of keys.
    pub fn with_key_lists(self, key_lists: KeyLists) -> Problem {
        Problem { key_lists: Some(key_lists), ..self }
    }

    /// At most `prefix_groups` groups of sequences share their first keys.
    pub fn with_prefix_groups(self, prefix_groups: usize) -> Problem {
        Problem { prefix_groups, ..self }
    }

    /// The log-sum-exp of each row is asked for.
    pub fn with_lse(self) -> Problem {
        Problem { lse: true, ..self }
    }

    /// A row's bits do not depend on the rows beside it.
    pub fn with_batch_invariance(self) -> Problem {
        Problem { batch_invariant: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::ListEntries;

    #[test]
    fn each_method_changes_what_it_names() {
        let window = Window { left: Some(7), right: Some(0) };
        let lists = KeyLists { len: 64, per_head: true, entries: ListEntries::Slots, second: None };
        let built = Problem::default()
            .with_causality()
            .with_window(window)
            .with_heads(16, 4)
            .with_latent_values(512)
            .with_head_dims(576, 512)
            .with_lengths(3, 5, 700)
            .with_ragged_queries(11)
            .with_pages(64)
            .with_dtype(DType::F16)
            .with_cache_dtypes(DType::I8, DType::Q4_0)
            .with_out_dtype(DType::F32)
            .with_key_lists(lists)
            .with_prefix_groups(2)
            .with_lse()
            .with_batch_invariance();
        let expected = Problem {
            batch: 3,
            query_heads: 16,
            kv_heads: 4,
            head_dim: 576,
            value_dim: 512,
            rotary_dim: 0,
            query_len: 5,
            kv_len: 700,
            queries: QueryStorage::Ragged { total: 11 },
            keys: KvStorage::Paged { block_size: 64 },
            dtype: DType::F16,
            key_dtype: DType::I8,
            value_dtype: DType::Q4_0,
            values: Values::KeyPrefix,
            out_dtype: DType::F32,
            variant: Variant { causal: true, window, ..Variant::default() },
            key_lists: Some(lists),
            prefix_groups: 2,
            lse: true,
            batch_invariant: true,
        };
        assert_eq!(built, expected);
        let variant = Variant { sinks: true, ..Variant::default() };
        assert_eq!(built.clone().with_variant(variant).variant, variant);
        assert_eq!(built.with_ragged_keys().keys, KvStorage::Ragged);
        assert_eq!(Problem::default(), Problem::new(DType::BF16, 128));
        Problem::default().validate().expect("one row over no keys");
    }
}
