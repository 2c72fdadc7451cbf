//! Prefix groups: sequences that share their first keys.

use super::{Keys, Spec, vector};
use crate::array::Array;
use std::ops::Range;

/// Prefix groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixSpec {
    /// The group of each sequence, repeated over the batch; -1 for none.
    pub groups: Vec<i32>,
    /// Keys that the sequences of each group share, at most: no more than the shortest of them has.
    pub lens: Vec<usize>,
}

impl Spec {
    /// The same with sequences that share their first keys.
    pub fn prefixes(self, groups: &[i32], lens: &[usize]) -> Spec {
        let prefixes = PrefixSpec { groups: groups.to_vec(), lens: lens.to_vec() };
        Spec { prefixes: Some(prefixes), ..self }
    }

    /// Makes prefixes legal: only sequences in pages share them, and rows with lists of keys share
    /// none.
    pub(super) fn legal_prefixes(&mut self) {
        let paged = matches!(self.keys, Keys::Paged { .. });
        if !paged || self.lists.is_some() || self.sequences.is_empty() {
            self.prefixes = None;
        }
    }

    /// Prefix groups; 0 if there are none.
    pub(super) fn prefix_group_count(&self) -> usize {
        self.prefixes.as_ref().map_or(0, |prefixes| prefixes.lens.len())
    }

    /// The prefix group of a sequence.
    fn group_of(&self, index: usize) -> Option<usize> {
        let groups = &self.prefixes.as_ref()?.groups;
        usize::try_from(groups[index % groups.len()]).ok()
    }

    fn members(&self, group: usize) -> impl Iterator<Item = usize> {
        (0..self.sequences.len()).filter(move |&index| self.group_of(index) == Some(group))
    }

    fn prefix_len(&self, group: usize) -> usize {
        let prefix_len = self.prefixes.as_ref().map_or(0, |prefixes| prefixes.lens[group]);
        self.members(group).map(|index| self.sequences[index].kv_len).fold(prefix_len, usize::min)
    }

    /// The first sequence of this one's group; itself without one.
    pub(super) fn prefix_owner(&self, index: usize) -> usize {
        let first = self.group_of(index).and_then(|group| self.members(group).next());
        first.unwrap_or(index)
    }

    /// The pages that a sequence shares with its group, the last of them maybe in part.
    pub(super) fn shared_pages(&self, index: usize, block_size: usize) -> Range<usize> {
        0..self.group_of(index).map_or(0, |group| self.prefix_len(group).div_ceil(block_size))
    }

    /// The number that a key's contents depend on. Keys of shared pages are the keys of the group's
    /// first sequence.
    pub(super) fn key_id(&self, index: usize, key: usize) -> u64 {
        let shared = match self.keys {
            Keys::Paged { block_size, .. } => self.shared_pages(index, block_size).end * block_size,
            Keys::Batched { .. } | Keys::Ragged { .. } => 0,
        };
        self.sequences[if key < shared { self.prefix_owner(index) } else { index }].id
    }

    /// The group of each sequence, and the prefix length of each group.
    pub(super) fn prefix_tensors(&self) -> Option<[Array; 2]> {
        self.prefixes.as_ref()?;
        let group = |index| self.group_of(index).map_or(-1, |group| group as i32);
        let groups: Vec<i32> = (0..self.sequences.len()).map(group).collect();
        let lens = (0..self.prefix_group_count()).map(|group| self.prefix_len(group) as i32);
        Some([vector(groups), vector(lens.collect::<Vec<i32>>())])
    }
}
