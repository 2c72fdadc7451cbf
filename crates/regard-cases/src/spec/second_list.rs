//! A second cache: the last entries of each list of slots are a list into a second pool. This pool
//! has the same keys in pages of another size, in another order and with other strides.

use super::{Keys, ListSpec, Spec, made};
use crate::array::Array;
use crate::case::Case;
use regard::Values;
use std::ops::Range;

/// The caches whose slots lists name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Caches {
    /// One.
    #[default]
    One,
    /// Two: the last `second` entries of each list are a list into the second cache.
    Two {
        /// Entries of each second list.
        second: usize,
    },
    /// The second of two pools alone, which these entries name.
    SecondOfTwo {
        /// Entries of each second list.
        second: usize,
    },
}

impl ListSpec {
    /// Entries of each second list, if there are any.
    pub(super) fn second_len(&self) -> Option<usize> {
        match self.caches {
            Caches::Two { second } => Some(second),
            Caches::One | Caches::SecondOfTwo { .. } => None,
        }
    }

    /// The entries, of a list's first `count`, that name keys of this cache.
    pub(super) fn own(&self, count: usize) -> Range<usize> {
        let own = match self.caches {
            Caches::One => 0..self.len,
            Caches::Two { second } => 0..self.len - second,
            Caches::SecondOfTwo { second } => self.len - second..self.len,
        };
        own.start.min(count)..own.end.min(count)
    }
}

impl Spec {
    /// The second cache, if there are two.
    pub(super) fn second_cache(&self) -> Option<Spec> {
        let lists = self.lists?;
        let second = lists.second_len()?;
        let caches = Caches::SecondOfTwo { second };
        let Keys::Paged { block_size, interleaved } = self.keys else {
            unreachable!("legal: slots are of pages")
        };
        Some(Spec {
            keys: Keys::Paged { block_size: block_size % 64 + 3, interleaved },
            lists: Some(ListSpec { caches, ..lists }),
            padding: self.padding + 16,
            page_seed: self.page_seed + 1,
            ..self.clone()
        })
    }

    /// Makes two lists of each, and the second cache, if there are two.
    pub(super) fn divide_lists(&self, case: &mut Case) {
        let (Some(lists), Some(second)) = (self.lists, self.second_cache()) else { return };
        let second_len = lists.second_len().unwrap_or(0);
        let first_len = lists.len - second_len;
        let Case { k, v, attention: other, .. } = second.generate();
        let attention = &mut case.attention;
        let indices = attention.key_indices.take();
        attention.key_indices = indices.map(|lists| columns(&lists, 0..first_len));
        attention.second_indices =
            other.key_indices.map(|lists| columns(&lists, first_len..lists.shape()[2]));
        if let Some(counts) = attention.key_counts.take() {
            let changed = |change: &dyn Fn(i32) -> i32| {
                let changed: Vec<i32> = integers(&counts).into_iter().map(change).collect();
                Some(made(Array::new(changed, counts.shape())))
            };
            attention.key_counts = changed(&|count| count.min(first_len as i32));
            attention.second_counts = changed(&|count| (count - first_len as i32).max(0));
        }
        attention.second_k = Some(k);
        attention.second_k_scales = other.k_scales;
        if self.values == Values::Separate {
            (attention.second_v, attention.second_v_scales) = (Some(v), other.v_scales);
        }
    }
}

/// Some columns of lists.
fn columns(lists: &Array, columns: Range<usize>) -> Array {
    let &[rows, heads, len] = lists.shape() else { unreachable!("lists of rows") };
    let all = integers(lists);
    let of_row = |row: usize| all[row * len..][..len][columns.clone()].to_vec();
    let entries: Vec<i32> = (0..rows * heads).flat_map(of_row).collect();
    made(Array::new(entries, &[rows, heads, columns.len()]))
}

fn integers(array: &Array) -> Vec<i32> {
    array.numbers().expect("numbers").into_iter().map(|x| x as i32).collect()
}
