//! Lists of keys that rows attend to, and the keys that no list names.

use super::second_list::Caches;
use super::{Keys, OffsetSpec, Spec, Use, made};
use crate::array::Array;
use crate::noise::Noise;
use regard::{KeyLists, ListEntries, Window};

/// Lists of the keys that rows attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListSpec {
    /// Entries of each list; of lists of pages, keys, rounded up to pages.
    pub len: usize,
    /// The keys or pages that the entries name.
    pub entries: Entries,
    /// Whether there is a list per key/value head.
    pub per_head: bool,
    /// Whether counts bound the entries in use of each list; the others are anything.
    pub counts: bool,
    /// The kind of entries. Slots and pages are of paged keys only.
    pub of: ListEntries,
    /// The caches whose slots are listed: one, unless entries are slots.
    pub caches: Caches,
}

/// The entries of lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entries {
    /// Every key in order, as far as the list goes; then entries that are skipped.
    All,
    /// Different keys in order, as a selection by score gives them.
    Sorted,
    /// Any keys in any order, some of them twice; one entry in 8 is skipped, and every entry of one
    /// list in 16.
    Any,
}

impl ListSpec {
    /// Lists of `len` positions, shared by all key/value heads.
    pub fn new(len: usize, entries: Entries) -> ListSpec {
        ListSpec {
            len,
            entries,
            per_head: false,
            counts: false,
            of: ListEntries::Keys,
            caches: Caches::One,
        }
    }
}

impl Spec {
    /// The same with rows that attend to lists of keys.
    pub fn lists(self, lists: ListSpec) -> Spec {
        Spec { lists: Some(lists), ..self }
    }

    /// Physical slots and pages are of pools, and nothing beside them depends on positions, unless
    /// pages are numbered. Then positions of queries are given.
    pub(crate) fn legal_lists(&mut self) {
        let paged = matches!(self.keys, Keys::Paged { .. });
        let Some(lists) = &mut self.lists else { return };
        if !paged {
            lists.of = ListEntries::Keys;
        }
        match &mut lists.caches {
            caches if lists.of != ListEntries::Slots => *caches = Caches::One,
            Caches::Two { second } => *second = (*second).min(lists.len),
            Caches::One | Caches::SecondOfTwo { .. } => {}
        }
        match lists.of {
            ListEntries::Slots | ListEntries::Pages => {
                (self.causal, self.alibi) = (false, false);
                (self.window, self.chunk) = (Window::default(), None);
                self.offset = OffsetSpec::BottomRight;
            }
            ListEntries::NumberedPages if self.offset == OffsetSpec::BottomRight => {
                let offsets = (0..self.sequences.len()).map(|i| self.first_position(i) as i32);
                let offsets: Vec<i32> = offsets.collect();
                self.offset = match offsets.is_empty() {
                    true => OffsetSpec::Same(0),
                    false => OffsetSpec::PerSequence(offsets),
                };
            }
            _ => {}
        }
        if self.has_listed_pool() {
            (self.tree, self.mask) = (false, None);
        }
    }

    /// The same. Numbered pages get positions of queries: the default ones.
    pub fn with_list_offsets(mut self) -> Spec {
        self.legal_lists();
        self
    }

    /// Whether entries are physical slots.
    pub(crate) fn lists_slots(&self) -> bool {
        self.lists.is_some_and(|lists| lists.of == ListEntries::Slots)
    }

    /// Whether lists lead to a pool without a block table.
    pub(crate) fn has_listed_pool(&self) -> bool {
        self.lists.is_some_and(|lists| lists.of != ListEntries::Keys)
    }

    /// The properties of key lists that plans depend on.
    pub(super) fn key_lists(&self) -> Option<KeyLists> {
        let lists = self.lists?;
        let len = match self.keys {
            Keys::Paged { block_size, .. } if self.lists_pages() => {
                lists.len.next_multiple_of(block_size)
            }
            _ => lists.own(lists.len).len(),
        };
        let (per_head, second) = (self.list_heads() > 1, lists.second_len());
        Some(KeyLists { len, per_head, entries: lists.of, second })
    }

    /// The lists of each row.
    pub(super) fn list_heads(&self) -> usize {
        if self.lists.is_some_and(|lists| lists.per_head) { self.kv_heads } else { 1 }
    }

    /// Rows of `q`.
    pub(super) fn list_rows(&self) -> usize {
        match self.ragged_queries {
            true => self.sequences.iter().map(|sequence| sequence.q_len).sum(),
            false => self.sequences.len() * self.max_lens().queries,
        }
    }

    /// Entries of a list as keys of the sequence; numbers outside of it are skipped.
    fn entries(&self, lists: &ListSpec, index: usize, row: usize, head: usize) -> Vec<i32> {
        let sequence = self.sequences[index];
        let position = (self.first_position(index) + row as i64) as u64;
        let mut noise = self.noise(Use::List, [sequence.id, position, head as u64]);
        let keys = sequence.kv_len;
        let skipped = [-1, i32::MIN, i32::MAX, keys as i32, keys as i32 + 7];
        let empty = lists.entries == Entries::Any && noise.one_in(16);
        let step = keys.checked_div(lists.len).unwrap_or(0).max(1);
        let start = noise.below(step);
        let entry = |i: usize| match lists.entries {
            Entries::All if i < keys => i as i32,
            Entries::Sorted if start + i * step < keys => (start + i * step) as i32,
            Entries::Any if keys > 0 && !empty && !noise.one_in(8) => noise.below(keys) as i32,
            Entries::All | Entries::Sorted => -1,
            Entries::Any => noise.pick(&skipped),
        };
        (0..lists.len).map(entry).collect()
    }

    /// The used entries of a list.
    fn count(&self, lists: &ListSpec, index: usize, row: usize, head: usize) -> usize {
        let position = (self.first_position(index) + row as i64) as u64;
        let at = [self.sequences[index].id, position, head as u64];
        let mut noise = Noise::new(self.seed, &[Use::List as u64, 1, at[0], at[1], at[2]]);
        if !lists.counts || noise.one_in(4) { lists.len } else { noise.below(lists.len + 1) }
    }

    /// For each key and key/value head of a sequence (`[key * heads + head]`), whether some row's
    /// list names it in this cache; `None` if rows have no lists.
    pub(super) fn listed(&self, index: usize) -> Option<Vec<bool>> {
        let lists = &self.lists?;
        let keys = self.sequences[index].kv_len;
        let mut listed = vec![false; keys * self.kv_heads];
        let per_head = self.list_heads() > 1;
        let of_pages = self.each_key_of_pages(index, |key, head| {
            let of_key = &mut listed[key * self.kv_heads..][..self.kv_heads];
            if per_head { of_key[head] = true } else { of_key.fill(true) }
        });
        if of_pages {
            return Some(listed);
        }
        for row in 0..self.sequences[index].q_len {
            for list_head in 0..self.list_heads() {
                let count = self.count(lists, index, row, list_head);
                for &entry in &self.entries(lists, index, row, list_head)[lists.own(count)] {
                    let Some(key) = usize::try_from(entry).ok().filter(|&key| key < keys) else {
                        continue;
                    };
                    let of_key = &mut listed[key * self.kv_heads..][..self.kv_heads];
                    match self.list_heads() {
                        1 => of_key.fill(true),
                        _ => of_key[list_head] = true,
                    }
                }
            }
        }
        Some(listed)
    }

    /// The pages of a sequence of which some key is listed; `None` if rows have no lists.
    pub(super) fn listed_pages(&self, index: usize, block_size: usize) -> Option<Vec<bool>> {
        let listed = self.listed(index)?;
        let page = block_size * self.kv_heads;
        Some(listed.chunks(page).map(|keys| keys.contains(&true)).collect())
    }

    /// The lists and their counts.
    pub(super) fn list_tensors(
        &self,
        table: &[Vec<i32>],
        blocks: usize,
    ) -> Option<(Array, Option<Array>)> {
        let lists = self.lists.as_ref().filter(|_| !self.lists_pages())?;
        let (rows, heads) = (self.list_rows(), self.list_heads());
        let mut strays = Noise::new(self.seed, &[Use::List as u64]);
        let mut indices = vec![-1i32; rows * heads * lists.len];
        let mut counts = vec![0i32; rows * heads];
        let mut first = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            for row in 0..sequence.q_len {
                for head in 0..heads {
                    let list = (first + row) * heads + head;
                    let count = self.count(lists, index, row, head);
                    let mut entries = self.entries(lists, index, row, head);
                    if lists.of == ListEntries::Slots {
                        let keys = sequence.kv_len;
                        entries.iter_mut().for_each(|entry| {
                            *entry = self.slot(*entry, keys, &table[index], blocks);
                        });
                    }
                    for entry in &mut entries[count..] {
                        *entry = strays.below(300) as i32 - 20;
                    }
                    counts[list] = count as i32;
                    indices[list * lists.len..][..lists.len].copy_from_slice(&entries);
                }
            }
            first += if self.ragged_queries { sequence.q_len } else { self.max_lens().queries };
        }
        let indices = made(Array::new(indices, &[rows, heads, lists.len]));
        let counts = lists.counts.then(|| made(Array::new(counts, &[rows, heads])));
        Some((indices, counts))
    }

    /// The physical slot of a key; outside of the pool of `blocks` blocks if the sequence has no
    /// such key, often by one.
    fn slot(&self, entry: i32, keys: usize, table: &[i32], blocks: usize) -> i32 {
        let Keys::Paged { block_size, .. } = self.keys else {
            unreachable!("legal: physical slots are of pages")
        };
        match usize::try_from(entry) {
            Ok(key) if key < keys => {
                // Pages that no list in use names are anywhere.
                let first = table[key / block_size].wrapping_mul(block_size as i32);
                first.wrapping_add((key % block_size) as i32)
            }
            Ok(_) if entry % 4 == 3 => i32::MAX - entry % 3,
            Ok(_) => (blocks * block_size) as i32,
            Err(_) => entry,
        }
    }
}
