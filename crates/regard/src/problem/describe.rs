//! A problem in words.

use super::{KvStorage, Problem, QueryStorage};
use crate::positions::KeyLayout;
use crate::variant::Values;

impl Problem {
    /// One line: the shape and every feature in use.
    pub(crate) fn description(&self) -> String {
        let value_dim = match self.value_dim == self.head_dim {
            true => String::new(),
            false => format!("/{}", self.value_dim),
        };
        let cache = match (self.key_dtype == self.dtype, self.key_dtype == self.value_dtype) {
            (true, true) => String::new(),
            (_, true) => format!(" over {}", self.key_dtype),
            (_, false) => format!(" over {}/{}", self.key_dtype, self.value_dtype),
        };
        let out_dtype = match self.out_dtype == self.dtype {
            true => String::new(),
            false => format!(" to {}", self.out_dtype),
        };
        let mut text = format!(
            "{} x {}/{} heads, {} x {} tokens, head dim {}{value_dim}, {}{cache}{out_dtype}",
            self.batch,
            self.query_heads,
            self.kv_heads,
            self.query_len,
            self.kv_len,
            self.head_dim,
            self.dtype,
        );
        for feature in self.features() {
            text.push_str(", ");
            text.push_str(&feature);
        }
        text
    }

    /// Every feature in use, in words.
    fn features(&self) -> Vec<String> {
        let variant = &self.variant;
        let given = |used: bool, name: &str| used.then(|| name.to_string());
        let queries = match self.queries {
            QueryStorage::Batched => None,
            QueryStorage::Ragged { total } => Some(format!("ragged queries ({total} rows)")),
        };
        let keys = match self.keys {
            KvStorage::Batched => None,
            KvStorage::Ragged => Some("ragged keys".to_string()),
            KvStorage::Paged { block_size } => Some(format!("pages of {block_size} keys")),
        };
        let window = match (variant.window.left, variant.window.right) {
            (None, None) => None,
            (Some(left), None) => Some(format!("window of {left} keys before")),
            (None, Some(right)) => Some(format!("window of {right} keys after")),
            (Some(left), Some(right)) => {
                Some(format!("window of {left} keys before and {right} after"))
            }
        };
        let features = [
            given(variant.causal, "causal"),
            window,
            variant.chunk.map(|chunk| format!("chunks of {chunk} keys")),
            queries,
            keys,
            given(self.values == Values::KeyPrefix, "values a prefix of the keys"),
            (self.rotary_dim > 0)
                .then(|| format!("{} rotary dims in a tensor of their own", self.rotary_dim)),
            variant.mask.map(|dtype| format!("{dtype} mask")),
            given(variant.tree, "tree mask"),
            variant.key_positions.map(|layout| match layout {
                KeyLayout::Contiguous => "key positions from an offset".to_string(),
                KeyLayout::RoundRobin => "key positions with a stride".to_string(),
            }),
            given(variant.softcap, "softcap"),
            given(variant.alibi, "ALiBi"),
            given(variant.sinks, "sinks"),
            self.key_lists.map(|lists| lists.description()),
            (self.prefix_groups > 0).then(|| format!("up to {} prefix groups", self.prefix_groups)),
            given(self.lse, "LSE"),
            given(self.batch_invariant, "batch-invariant"),
        ];
        features.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{KeyLists, ListEntries};
    use crate::variant::{Values, Variant, Window};

    #[test]
    fn every_feature_is_named() {
        let mut problem = Problem {
            batch: 2,
            query_heads: 32,
            kv_heads: 8,
            query_len: 16,
            kv_len: 4096,
            ..Problem::new(DType::BF16, 128)
        };
        let plain = "2 x 32/8 heads, 16 x 4096 tokens, head dim 128";
        assert_eq!(problem.description(), format!("{plain}, bf16"));
        problem.queries = QueryStorage::Ragged { total: 20 };
        problem.keys = KvStorage::Paged { block_size: 64 };
        (problem.lse, problem.batch_invariant, problem.out_dtype) = (true, true, DType::F32);
        problem.variant = Variant {
            causal: true,
            window: Window { left: Some(1023), right: Some(0) },
            chunk: Some(8192),
            softcap: true,
            alibi: true,
            sinks: true,
            mask: Some(DType::Bool),
            tree: true,
            key_positions: Some(KeyLayout::RoundRobin),
        };
        assert_eq!(
            problem.description(),
            format!(
                "{plain}, bf16 to f32, causal, window of 1023 keys before and 0 after, \
                 chunks of 8192 keys, ragged queries (20 rows), pages of 64 keys, bool mask, \
                 tree mask, key positions with a stride, softcap, ALiBi, sinks, LSE, \
                 batch-invariant"
            )
        );
        problem.key_lists =
            Some(KeyLists { len: 2048, per_head: false, entries: ListEntries::Keys, second: None });
        assert!(problem.description().contains("sinks, lists of up to 2048 keys per row, LSE"));
        problem.prefix_groups = 3;
        assert!(problem.description().contains("keys per row, up to 3 prefix groups, LSE"));
        problem.key_lists = Some(KeyLists {
            len: 64,
            per_head: true,
            entries: ListEntries::Slots,
            second: Some(9),
        });
        let lists = "physical slots per row and key/value head, and of 9 of a second cache";
        assert!(problem.description().contains(lists));
        problem.variant.window.right = None;
        assert!(
            problem
                .description()
                .contains(", window of 1023 keys before, chunks of 8192 keys, ragged")
        );
        (problem.key_dtype, problem.value_dtype) = (DType::E4M3, DType::E4M3);
        assert!(problem.description().contains("head dim 128, bf16 over e4m3 to f32, causal"));
        problem.value_dtype = DType::Q8_0;
        assert!(problem.description().contains("bf16 over e4m3/q8_0 to f32"));
        (problem.value_dtype, problem.values) = (DType::E4M3, Values::KeyPrefix);
        assert!(problem.description().contains(", values a prefix of the keys, bool mask"));
        problem.rotary_dim = 64;
        let parts = ", values a prefix of the keys, 64 rotary dims in a tensor of their own, bool";
        assert!(problem.description().contains(parts));
        problem.rotary_dim = 0;
        problem.values = Values::Separate;
        problem.variant.window = Window { left: None, right: Some(3) };
        problem.keys = KvStorage::Ragged;
        assert!(
            problem
                .description()
                .contains(", window of 3 keys after, chunks of 8192 keys, ragged queries")
        );
        assert!(problem.description().contains(", ragged keys, bool mask"));
    }
}
