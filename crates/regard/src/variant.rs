//! The options of attention: scale, masks, window, softcap, ALiBi, sinks, tree, and the tables of
//! sequences.
//!
//! A caller fills in [`Attention`]; [`Variant`] is the part that a plan depends on: which features
//! are used, without their data.

use crate::dtype::DType;
use crate::memory::Memory;
use crate::positions::{KeyLayout, KeyOffset, KeyPositions, SequenceKeys};
use crate::tensor::Tensor;
use std::convert::Infallible;
use std::ops::Range;

/// The reach of a query to either side of its own position, in positions. `None` is unbounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Window {
    /// Keys before the query's position that are kept.
    pub left: Option<usize>,
    /// Keys after the query's position that are kept.
    pub right: Option<usize>,
}

/// The position of a sequence's first query row among its keys.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum QueryOffset<T> {
    /// `kv_len - q_len`: the new tokens are the last ones of the cache.
    #[default]
    BottomRight,
    /// The same position for every sequence; 0 gives the top-left alignment, negative ones make the
    /// first rows empty. From -2^31 to 2^31 - 1, as if it stood in a tensor: another number is an
    /// error.
    Same(i64),
    /// One position per sequence: `[B]`, `i32`.
    PerSequence(T),
}

impl<T> QueryOffset<T> {
    /// The tensor of positions, if there is one per sequence.
    pub fn tensor(&self) -> Option<&T> {
        match self {
            QueryOffset::PerSequence(offsets) => Some(offsets),
            QueryOffset::BottomRight | QueryOffset::Same(_) => None,
        }
    }
}

/// The storage of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum Values {
    /// In a separate tensor (which may share a pool with the keys).
    #[default]
    Separate,
    /// The first Dv dims of each key: the latent cache of multi-head latent attention (MLA). `v` is
    /// that part of `k` ([`Tensor::prefix`]), and the scales of keys are the scales of values too.
    KeyPrefix,
}

/// Everything about an attention call besides queries, keys and values. Case files use the same
/// field names.
///
/// `B` is the number of sequences, `Hq` of query heads, `Lq` the longest query length, `Lk` the key
/// capacity of a sequence. The default is full (not causal) attention over dense sequences with
/// scale 1/sqrt(head dim).
///
/// `T` is the type of the tensors: [`Tensor`] for a call of regard's, another for tensors that a
/// caller owns. [`Attention::map`] and [`Attention::try_map`] go from one to the other, and
/// [`Attention::named`] lists the tensors that are given.
///
/// ```
/// use regard::{Attention, Tensor, Window};
///
/// let owned = Attention {
///     window: Window { left: Some(127), right: None },
///     kv_lens: Some(vec![3, 5]),
///     ..Attention::causal()
/// };
/// let borrowed: Attention<Tensor> = owned.as_ref().map(|_name, lengths| Tensor::from(lengths));
/// assert_eq!(borrowed.kv_lens.unwrap().shape(), [2]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Attention<T> {
    /// Multiplies the dot product; `None` is 1/sqrt(Dk). Of magnitude at most 2^60.
    pub scale: Option<f32>,
    /// Keep only keys at or before the query's position.
    pub causal: bool,
    /// Keep only keys near the query's position.
    pub window: Window,
    /// Chunked attention: positions are divided into chunks of this many, and a query sees the keys
    /// of its own chunk only (`key / chunk = position / chunk`, rounded down). From 1 to 2^31 - 1;
    /// `None` is one chunk for all.
    pub chunk: Option<usize>,
    /// Bounds scores smoothly: `cap * tanh(score / cap)`, before any bias. From 2^-60 to 2^60.
    pub softcap: Option<f32>,
    /// The position of each sequence's first query row.
    pub q_offset: QueryOffset<T>,
    /// Positions of keys, if key j is not at position j: a shard of the keys of a sequence. Needs
    /// `q_offset`. Masks, `kv_lens` and `key_indices` count keys of the call, not positions. Not
    /// given together with `tree_mask`, `indices_are_slots` or `page_indices`.
    pub key_positions: Option<KeyPositions<T>>,
    /// `[B, Hq, Lq, Lk]`, any of them 1 to broadcast. `bool`: keep where true. Floating: added to
    /// the score in natural units, without conversion to a narrower type; minus infinity hides a
    /// key, no finite number does.
    pub mask: Option<T>,
    /// `[Hq]` `f32`: `-slope * |distance|` is added to the score. Of magnitude at most 2^60.
    pub alibi_slopes: Option<T>,
    /// `[Hq]` `f32`: one more logit in each head's denominator. Finite, or minus infinity for none.
    pub sinks: Option<T>,
    /// `[B, Lq, ceil(Lq / 32)]` `i32`: the new tokens of the sequence (its last `q_len` keys) that
    /// each row sees, bit `t % 32` of word `t / 32`. Every row sees all earlier keys. Replaces
    /// `causal`.
    pub tree_mask: Option<T>,
    /// `[B]` `i32`: keys in use, at most the sequence's capacity. `None` uses all.
    pub kv_lens: Option<T>,
    /// `[B + 1]` `i32`, from 0 up: queries are `[total, Hq, D]` and sequence b owns rows
    /// `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: Option<T>,
    /// `[B + 1]` `i32`: likewise for keys and values `[total, Hkv, D]`.
    pub cu_seqlens_k: Option<T>,
    /// `[B, max_blocks]` `i32`: keys and values are pools `[blocks, block_size, Hkv, D]`, and slot
    /// j of sequence b is slot `j % block_size` of block `block_table[b, j / block_size]`. Needs
    /// `kv_lens`. Entries that no row can see are never read through.
    pub block_table: Option<T>,
    /// `f32`: the scales of keys that are codes (`e4m3`, `e5m2`, `i8`); `None` for other types. The
    /// shape of `k` without its last dimension, any of them 1 to broadcast: one scale for the
    /// tensor, per head, per page and head, or per token and head. Any strides, in separate memory
    /// or between the codes. Finite and not negative for every key that some row sees.
    pub k_scales: Option<T>,
    /// Likewise for values. With [`Values::KeyPrefix`] not given, or the same as `k_scales`.
    pub v_scales: Option<T>,
    /// The source of values: a tensor of their own, or the first dims of keys.
    pub values: Values,
    /// The shape of `k` with other dims (Dr for Dv), of its type: the last dims of keys. `k` has
    /// the first dims: key `j` is `[k_j, rotary_k_j]`, and Dk is Dv + Dr. Values are then all of
    /// `k` ([`Values::KeyPrefix`]): latent and rotary rows in two pools. Both have the scales of
    /// `k_scales`. Not given together with `second_k`.
    pub rotary_k: Option<T>,
    /// `[rows, Hkv]` or `[rows, 1]`, and `n` entries each, `i32`: the keys that each query row
    /// attends to, instead of all. Rows are numbered as in `q`: row `b * Lq + i`, or `i` of
    /// `[total, Hq, D]`. An entry is a position of the row's sequence. Entries that are negative,
    /// or not below the sequence's length, are skipped; each other entry counts once as listed.
    pub key_indices: Option<T>,
    /// The shape of `key_indices` without its last dimension, `i32`: the entries of each list that
    /// are used, from its start. `None` uses all.
    pub key_counts: Option<T>,
    /// Entries of `key_indices` are physical slots, `block * block_size + slot` of the pool
    /// `[blocks, block_size, Hkv, D]` that `k` and `v` are, without a `block_table`. They have no
    /// position, so nothing that depends on positions or lengths may be given.
    pub indices_are_slots: bool,
    /// `[Hkv, B, n]` or `[1, B, n]`, `i32`: the pages that the rows of each sequence attend to, per
    /// key/value head or for all of them, instead of a `block_table`. An entry is a block of the
    /// pool `[blocks, block_size, Hkv, D]` that `k` and `v` are; entries that are no block are
    /// skipped. Without `page_numbers`, nothing that depends on positions may be given.
    pub page_indices: Option<T>,
    /// The shape of `page_indices` without its last dimension, `i32`: the keys of each page list,
    /// which end within its last used page. `None` is all `n * block_size`.
    pub page_list_lens: Option<T>,
    /// The shape of `page_indices`, `i32`: the number of each listed page in its sequence, so that
    /// slot `s` of it is at position `number * block_size + s`. Pages of a negative number, and
    /// positions from 2^31 - 1 on, are skipped. Needs `q_offset`.
    pub page_numbers: Option<T>,
    /// `[blocks, block_size, Hkv, Dk]`: a second pool of keys, of the type of `k`, for
    /// `second_indices`. Blocks may be of another size than the blocks of `k`.
    pub second_k: Option<T>,
    /// Likewise for values. With [`Values::KeyPrefix`] not given: values are in `second_k`.
    pub second_v: Option<T>,
    /// The scales of `second_k`, as `k_scales` are the scales of `k`.
    pub second_k_scales: Option<T>,
    /// Likewise for values.
    pub second_v_scales: Option<T>,
    /// `[rows, Hkv]` or `[rows, 1]`, and entries, `i32`: a second list of each query row, of
    /// physical slots of `second_k` and `second_v`: one softmax runs over the entries of both
    /// lists. Needs `key_indices` and `indices_are_slots`.
    pub second_indices: Option<T>,
    /// The entries of each second list that are used, as `key_counts`.
    pub second_counts: Option<T>,
    /// `[B]` `i32`: the prefix group of each sequence, below `G`, or -1 for none. Sequences of a
    /// group share their first keys: the block-table entries that hold them are the same. Groups
    /// change no result within the tolerance: they let a backend read a shared prefix once for all
    /// rows of its group. Needs `block_table` and `prefix_lens`.
    pub prefix_groups: Option<T>,
    /// `[G]` `i32`: the keys that the sequences of each group share, from the first one on; at most
    /// the length of each of them.
    pub prefix_lens: Option<T>,
    /// A row's bits depend on nothing but its own query and keys: not on the batch, the chunking or
    /// the page layout.
    pub batch_invariant: bool,
}

/// Fields of [`Attention`] that hold a tensor.
const MAX_TENSORS: usize = 26;

impl<T> Default for Attention<T> {
    fn default() -> Self {
        Attention::from_named(|_| None)
    }
}

impl<T> Attention<T> {
    /// Causal attention, the new tokens last; everything else at its default.
    pub fn causal() -> Self {
        Attention { causal: true, ..Attention::default() }
    }

    /// The tensors that `tensor` gives for their names, everything else at its default. Names are
    /// the names of the fields; `q_offset` is the tensor of [`QueryOffset::PerSequence`].
    /// `key_offset` is the tensor of [`KeyOffset::PerSequence`](crate::KeyOffset), with a stride
    /// of 1.
    pub fn from_named(mut tensor: impl FnMut(&'static str) -> Option<T>) -> Self {
        Attention {
            scale: None,
            causal: false,
            window: Window::default(),
            chunk: None,
            softcap: None,
            mask: tensor("mask"),
            alibi_slopes: tensor("alibi_slopes"),
            sinks: tensor("sinks"),
            tree_mask: tensor("tree_mask"),
            kv_lens: tensor("kv_lens"),
            cu_seqlens_q: tensor("cu_seqlens_q"),
            cu_seqlens_k: tensor("cu_seqlens_k"),
            block_table: tensor("block_table"),
            k_scales: tensor("k_scales"),
            v_scales: tensor("v_scales"),
            values: Values::default(),
            rotary_k: tensor("rotary_k"),
            key_indices: tensor("key_indices"),
            key_counts: tensor("key_counts"),
            indices_are_slots: false,
            page_indices: tensor("page_indices"),
            page_list_lens: tensor("page_list_lens"),
            page_numbers: tensor("page_numbers"),
            second_k: tensor("second_k"),
            second_v: tensor("second_v"),
            second_k_scales: tensor("second_k_scales"),
            second_v_scales: tensor("second_v_scales"),
            second_indices: tensor("second_indices"),
            second_counts: tensor("second_counts"),
            prefix_groups: tensor("prefix_groups"),
            prefix_lens: tensor("prefix_lens"),
            q_offset: tensor("q_offset").map_or(QueryOffset::BottomRight, QueryOffset::PerSequence),
            key_positions: tensor("key_offset")
                .map(|offsets| KeyPositions { offset: KeyOffset::PerSequence(offsets), stride: 1 }),
            batch_invariant: false,
        }
    }

    /// The same with references to the tensors.
    pub fn as_ref(&self) -> Attention<&T> {
        Attention {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap,
            mask: self.mask.as_ref(),
            alibi_slopes: self.alibi_slopes.as_ref(),
            sinks: self.sinks.as_ref(),
            tree_mask: self.tree_mask.as_ref(),
            kv_lens: self.kv_lens.as_ref(),
            cu_seqlens_q: self.cu_seqlens_q.as_ref(),
            cu_seqlens_k: self.cu_seqlens_k.as_ref(),
            block_table: self.block_table.as_ref(),
            k_scales: self.k_scales.as_ref(),
            v_scales: self.v_scales.as_ref(),
            values: self.values,
            rotary_k: self.rotary_k.as_ref(),
            key_indices: self.key_indices.as_ref(),
            key_counts: self.key_counts.as_ref(),
            indices_are_slots: self.indices_are_slots,
            page_indices: self.page_indices.as_ref(),
            page_list_lens: self.page_list_lens.as_ref(),
            page_numbers: self.page_numbers.as_ref(),
            second_k: self.second_k.as_ref(),
            second_v: self.second_v.as_ref(),
            second_k_scales: self.second_k_scales.as_ref(),
            second_v_scales: self.second_v_scales.as_ref(),
            second_indices: self.second_indices.as_ref(),
            second_counts: self.second_counts.as_ref(),
            prefix_groups: self.prefix_groups.as_ref(),
            prefix_lens: self.prefix_lens.as_ref(),
            q_offset: match &self.q_offset {
                QueryOffset::BottomRight => QueryOffset::BottomRight,
                QueryOffset::Same(offset) => QueryOffset::Same(*offset),
                QueryOffset::PerSequence(offsets) => QueryOffset::PerSequence(offsets),
            },
            key_positions: self.key_positions.as_ref().map(KeyPositions::as_ref),
            batch_invariant: self.batch_invariant,
        }
    }

    /// The same with what `change` makes of each tensor that is given; a tensor of which it makes
    /// `None` is left out. It is called with their names, in the order of [`Attention::named`].
    ///
    /// # Errors
    /// The first error of `change`.
    pub fn try_filter_map<U, E>(
        self,
        mut change: impl FnMut(&'static str, T) -> Result<Option<U>, E>,
    ) -> Result<Attention<U>, E> {
        let mut each =
            |name, tensor: Option<T>| tensor.map_or(Ok(None), |tensor| change(name, tensor));
        Ok(Attention {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap,
            mask: each("mask", self.mask)?,
            alibi_slopes: each("alibi_slopes", self.alibi_slopes)?,
            sinks: each("sinks", self.sinks)?,
            tree_mask: each("tree_mask", self.tree_mask)?,
            kv_lens: each("kv_lens", self.kv_lens)?,
            cu_seqlens_q: each("cu_seqlens_q", self.cu_seqlens_q)?,
            cu_seqlens_k: each("cu_seqlens_k", self.cu_seqlens_k)?,
            block_table: each("block_table", self.block_table)?,
            k_scales: each("k_scales", self.k_scales)?,
            v_scales: each("v_scales", self.v_scales)?,
            values: self.values,
            rotary_k: each("rotary_k", self.rotary_k)?,
            key_indices: each("key_indices", self.key_indices)?,
            key_counts: each("key_counts", self.key_counts)?,
            indices_are_slots: self.indices_are_slots,
            page_indices: each("page_indices", self.page_indices)?,
            page_list_lens: each("page_list_lens", self.page_list_lens)?,
            page_numbers: each("page_numbers", self.page_numbers)?,
            second_k: each("second_k", self.second_k)?,
            second_v: each("second_v", self.second_v)?,
            second_k_scales: each("second_k_scales", self.second_k_scales)?,
            second_v_scales: each("second_v_scales", self.second_v_scales)?,
            second_indices: each("second_indices", self.second_indices)?,
            second_counts: each("second_counts", self.second_counts)?,
            prefix_groups: each("prefix_groups", self.prefix_groups)?,
            prefix_lens: each("prefix_lens", self.prefix_lens)?,
            q_offset: match self.q_offset {
                QueryOffset::BottomRight => QueryOffset::BottomRight,
                QueryOffset::Same(offset) => QueryOffset::Same(offset),
                QueryOffset::PerSequence(offsets) => change("q_offset", offsets)?
                    .map_or(QueryOffset::BottomRight, QueryOffset::PerSequence),
            },
            key_positions: match self.key_positions {
                Some(positions) => {
                    positions.try_filter_map(|offsets| change("key_offset", offsets))?
                }
                None => None,
            },
            batch_invariant: self.batch_invariant,
        })
    }

    /// As [`Attention::try_filter_map`], leaving out no tensor.
    ///
    /// # Errors
    /// The first error of `change`.
    pub fn try_map<U, E>(
        self,
        mut change: impl FnMut(&'static str, T) -> Result<U, E>,
    ) -> Result<Attention<U>, E> {
        self.try_filter_map(|name, tensor| change(name, tensor).map(Some))
    }

    /// As [`Attention::try_map`], for a change that cannot fail.
    pub fn map<U>(self, mut change: impl FnMut(&'static str, T) -> U) -> Attention<U> {
        let Ok(changed) = self.try_map(|name, tensor| Ok::<U, Infallible>(change(name, tensor)));
        changed
    }

    /// The tensors that are given, each with the name of its field, always in the same order.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &T)> {
        let mut tensors = [None; MAX_TENSORS];
        let mut given = tensors.iter_mut();
        self.as_ref().map(|name, tensor| {
            *given.next().expect("MAX_TENSORS counts the fields") = Some((name, tensor));
        });
        tensors.into_iter().flatten()
    }
}

impl<M: Memory> Attention<Tensor<'_, M>> {
    /// The features in use.
    pub fn variant(&self) -> Variant {
        Variant {
            causal: self.causal && self.tree_mask.is_none(),
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap.is_some(),
            alibi: self.alibi_slopes.is_some(),
            sinks: self.sinks.is_some(),
            mask: self.mask.map(|mask| mask.dtype()),
            tree: self.tree_mask.is_some(),
            key_positions: self.key_positions.map(|positions| positions.layout()),
        }
    }
}

/// The features that a problem uses: kernels are specialized and plans are made for them. No data,
/// no lengths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Variant {
    /// Keys after the query's position are hidden.
    pub causal: bool,
    /// Keys far from the query's position are hidden.
    pub window: Window,
    /// Chunked attention: keys of other chunks of this many positions are hidden.
    pub chunk: Option<usize>,
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
    /// The spacing of key positions, if they are given.
    pub key_positions: Option<KeyLayout>,
}

impl Variant {
    /// Whether a score that is kept is its dot product times the scale, and all keys of a range are
    /// kept: no softcap, bias, mask or tree.
    pub(crate) fn has_unmodified_scores(&self) -> bool {
        !self.softcap && !self.alibi && self.mask.is_none() && !self.tree
    }

    /// Whether the range of keys that a row sees moves by one key per row: no chunks, and keys at
    /// consecutive positions.
    pub(crate) fn has_even_ranges(&self) -> bool {
        self.chunk.is_none() && self.key_positions != Some(KeyLayout::RoundRobin)
    }

    /// The keys that a query at position `p` can see by causality, window, chunk and length: a
    /// contiguous range, maybe empty. Masks and trees hide further keys inside it.
    #[inline]
    pub fn visible(&self, p: i64, keys: impl Into<SequenceKeys>) -> Range<usize> {
        self.visible_to_rows(p, 1, keys)
    }

    /// The keys that any of the `rows` queries from position `p` on can see. Both ends of a query's
    /// range move right with its position, one step at a time, so the union runs from the first
    /// query's start to the last one's end.
    #[inline]
    pub fn visible_to_rows(
        &self,
        p: i64,
        rows: usize,
        keys: impl Into<SequenceKeys>,
    ) -> Range<usize> {
        if rows == 0 {
            return 0..0;
        }
        let keys = keys.into();
        let reach = |bound: usize| i64::try_from(bound).unwrap_or(i64::MAX);
        let last = p.saturating_add(reach(rows - 1));
        // The positions from `start` up to, not including, `end`.
        let (mut start, mut end) = (i64::MIN, i64::MAX);
        if self.causal {
            end = last.saturating_add(1);
        }
        if let Some(right) = self.window.right {
            end = end.min(last.saturating_add(reach(right)).saturating_add(1));
        }
        if let Some(left) = self.window.left {
            start = p.saturating_sub(reach(left));
        }
        if let Some(chunk) = self.chunk.map(|chunk| reach(chunk.max(1))) {
            // From the first row's chunk to the last row's.
            start = start.max(p.div_euclid(chunk).saturating_mul(chunk));
            end = end.min((last.div_euclid(chunk).saturating_add(1)).saturating_mul(chunk));
        }
        let end = keys.before(end);
        keys.before(start).min(end)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_keeps_its_name_and_place() {
        let mut names = Vec::new();
        let attention = Attention::from_named(|name| {
            names.push(name);
            Some(name)
        });
        let numbers = Attention {
            scale: Some(2.0),
            causal: true,
            window: Window { left: Some(3), right: Some(4) },
            chunk: Some(6),
            softcap: Some(5.0),
            values: Values::KeyPrefix,
            indices_are_slots: true,
            batch_invariant: true,
            key_positions: attention.key_positions.map(|it| KeyPositions { stride: 8, ..it }),
            ..attention
        };
        assert_eq!(names.len(), MAX_TENSORS);
        assert_eq!(names, numbers.named().map(|(name, _)| name).collect::<Vec<_>>());
        assert!(numbers.named().all(|(name, tensor)| name == *tensor));
        let changed = numbers.map(|name, tensor| {
            assert_eq!(name, tensor);
            tensor.to_string()
        });
        // `Debug` prints every field, so nothing was lost or swapped.
        assert_eq!(format!("{changed:?}"), format!("{numbers:?}"));
        assert_eq!(format!("{:?}", changed.as_ref()), format!("{numbers:?}"));
        let failed = changed.try_map(|name, tensor| match name {
            "sinks" => Err(name),
            _ => Ok(tensor),
        });
        assert_eq!(failed.unwrap_err(), "sinks");
        assert_eq!(Attention::<u8>::causal().named().count(), 0);
    }

    #[test]
    fn the_range_of_some_rows_is_the_union_of_their_ranges() {
        for (left, right, causal, chunk) in [
            (None, None, true, None),
            (Some(3), None, true, None),
            (Some(0), Some(0), false, None),
            (Some(2), Some(5), false, None),
            (None, None, false, Some(4)),
            (None, None, true, Some(3)),
            (Some(2), Some(1), false, Some(5)),
            (None, None, true, Some(1)),
        ] {
            let window = Window { left, right };
            let variant = Variant { causal, window, chunk, ..Variant::default() };
            for p in -12..20 {
                for rows in 1..9 {
                    let of_len = |len| {
                        [(0, 1), (-4, 1), (3, 1), (-4, 2), (1, 3), (0, 7)]
                            .map(|(offset, stride)| SequenceKeys { len, offset, stride })
                    };
                    for keys in [0, 1, 7].into_iter().flat_map(of_len) {
                        let union = (p..p + rows as i64)
                            .map(|p| variant.visible(p, keys))
                            .filter(|range| !range.is_empty())
                            .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
                        let range = variant.visible_to_rows(p, rows, keys);
                        match union {
                            Some(union) => {
                                assert_eq!(range, union, "{variant:?} p {p} rows {rows} {keys:?}")
                            }
                            None => assert!(range.is_empty()),
                        }
                    }
                }
            }
        }
    }
}
