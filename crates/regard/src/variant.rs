//! What is computed: scale, masks, window, softcap, ALiBi, sinks, tree, and where each sequence lives.
//!
//! [`Attention`] is what a caller fills in; [`Variant`] is the part of it that a plan depends on: which features are
//! used, without their data.

use crate::memory::{Host, Memory};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// How far a query sees to either side of its own position. `None` is unbounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Window {
    /// Keys before the query's position that are kept.
    pub left: Option<usize>,
    /// Keys after the query's position that are kept.
    pub right: Option<usize>,
}

/// Where a sequence's first query row stands among its keys.
#[derive(Debug, Clone, Copy, Default)]
pub enum QueryOffset<'a, M: Memory = Host> {
    /// `kv_len - q_len`: the new tokens are the last ones of the cache.
    #[default]
    BottomRight,
    /// The same position for every sequence; 0 gives the top-left alignment, negative ones make the first rows empty. From -2^31 to
    /// 2^31 - 1, as if it stood in a tensor: another number is an error.
    Same(i64),
    /// One position a sequence: `[B]`, `i32`.
    PerSequence(Tensor<'a, M>),
}

/// Everything about an attention call besides queries, keys and values. Field names are those of the case files.
///
/// `B` is the number of sequences, `Hq` of query heads, `Lq` the longest query length, `Lk` the key capacity of a sequence.
/// The default is full (not causal) attention over dense sequences with scale 1/sqrt(head dim).
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention<'a, M: Memory = Host> {
    /// Multiplies the dot product; `None` is 1/sqrt(Dk). Of magnitude at most 2^60.
    pub scale: Option<f32>,
    /// Keep only keys at or before the query's position.
    pub causal: bool,
    /// Keep only keys near the query's position.
    pub window: Window,
    /// Bounds scores smoothly: `cap * tanh(score / cap)`, before any bias. From 2^-60 to 2^60.
    pub softcap: Option<f32>,
    /// The position of each sequence's first query row.
    pub q_offset: QueryOffset<'a, M>,
    /// `[B, Hq, Lq, Lk]`, any of them 1 to broadcast. `bool`: keep where true. Floating: added to the score as it stands
    /// (natural units, never squeezed through a narrower type); minus infinity hides, no finite number does.
    pub mask: Option<Tensor<'a, M>>,
    /// `[Hq]` `f32`: `-slope * |distance|` is added to the score. Of magnitude at most 2^60.
    pub alibi_slopes: Option<Tensor<'a, M>>,
    /// `[Hq]` `f32`: one more logit in each head's denominator. Finite, or minus infinity for none.
    pub sinks: Option<Tensor<'a, M>>,
    /// `[B, Lq, ceil(Lq / 32)]` `i32`: which of the sequence's new tokens (its last `q_len` keys) each row sees, bit `t % 32` of
    /// word `t / 32`; earlier keys are seen by all. Replaces `causal`.
    pub tree_mask: Option<Tensor<'a, M>>,
    /// `[B]` `i32`: keys in use, at most the sequence's capacity. `None` uses all.
    pub kv_lens: Option<Tensor<'a, M>>,
    /// `[B + 1]` `i32`, from 0 up: queries are `[total, Hq, D]` and sequence b owns rows `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: Option<Tensor<'a, M>>,
    /// `[B + 1]` `i32`: likewise for keys and values `[total, Hkv, D]`.
    pub cu_seqlens_k: Option<Tensor<'a, M>>,
    /// `[B, max_blocks]` `i32`: keys and values are pools `[blocks, block_size, Hkv, D]`, and slot j of sequence b is slot
    /// `j % block_size` of block `block_table[b, j / block_size]`. Needs `kv_lens`. Entries that no row can see are never read through.
    pub block_table: Option<Tensor<'a, M>>,
    /// A row's bits depend on nothing but its own query and keys: not on the batch, the chunking or the page layout.
    pub batch_invariant: bool,
}

impl<M: Memory> Attention<'_, M> {
    /// Causal attention, the new tokens last; everything else at its default.
    pub fn causal() -> Self {
        Attention { causal: true, ..Attention::default() }
    }

    /// Which features are used.
    pub fn variant(&self) -> Variant {
        Variant {
            causal: self.causal && self.tree_mask.is_none(),
            window: self.window,
            softcap: self.softcap.is_some(),
            alibi: self.alibi_slopes.is_some(),
            sinks: self.sinks.is_some(),
            mask: self.mask.map(|mask| mask.dtype()),
            tree: self.tree_mask.is_some(),
        }
    }
}

/// Which features a problem uses: what kernels specialise on and plans are made for. No data, no lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Variant {
    /// Keys after the query's position are hidden.
    pub causal: bool,
    /// Keys far from the query's position are hidden.
    pub window: Window,
    /// Scores are capped.
    pub softcap: bool,
    /// Scores fall with distance.
    pub alibi: bool,
    /// A sink joins each head's denominator.
    pub sinks: bool,
    /// The element type of the mask, if there is one.
    pub mask: Option<DType>,
    /// The new tokens form a tree.
    pub tree: bool,
}

impl Variant {
    /// Whether a score that is kept is its dot product times the scale, and all keys of a range are kept: no softcap, bias, mask or tree.
    pub(crate) fn has_bare_scores(&self) -> bool {
        !self.softcap && !self.alibi && self.mask.is_none() && !self.tree
    }

    /// The keys that a query at position `p` can see by causality, window and length: a contiguous range, maybe empty.
    /// Masks and trees hide further keys inside it.
    #[inline]
    pub fn visible(&self, p: i64, kv_len: usize) -> Range<usize> {
        self.visible_to_rows(p, 1, kv_len)
    }

    /// The keys that any of the `rows` queries from position `p` on can see. Both ends of a query's range move right with
    /// its position, one step at a time, so the union runs from the first query's start to the last one's end.
    #[inline]
    pub fn visible_to_rows(&self, p: i64, rows: usize, kv_len: usize) -> Range<usize> {
        if rows == 0 {
            return 0..0;
        }
        let reach = |bound: usize| i64::try_from(bound).unwrap_or(i64::MAX);
        let last = p.saturating_add(reach(rows - 1));
        let mut end = reach(kv_len);
        if self.causal {
            end = end.min(last.saturating_add(1));
        }
        if let Some(right) = self.window.right {
            end = end.min(last.saturating_add(reach(right)).saturating_add(1));
        }
        let end = end.max(0);
        let start = self.window.left.map_or(0, |left| p.saturating_sub(reach(left)).clamp(0, end));
        start as usize..end as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_some_rows_is_the_union_of_their_ranges() {
        for (left, right, causal) in [
            (None, None, true),
            (Some(3), None, true),
            (Some(0), Some(0), false),
            (Some(2), Some(5), false),
        ] {
            let variant = Variant { causal, window: Window { left, right }, ..Variant::default() };
            for p in -12..20 {
                for rows in 1..9 {
                    for kv_len in [0, 1, 7] {
                        let union = (p..p + rows as i64)
                            .map(|p| variant.visible(p, kv_len))
                            .filter(|range| !range.is_empty())
                            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
                        let range = variant.visible_to_rows(p, rows, kv_len);
                        match union {
                            Some(union) => {
                                assert_eq!(
                                    range, union,
                                    "{variant:?} p {p} rows {rows} kv_len {kv_len}"
                                )
                            }
                            None => assert!(range.is_empty()),
                        }
                    }
                }
            }
        }
    }
}
