//! Lists of pages that the rows of a sequence attend to, per key/value head.

use super::{Entries, Keys, ListSpec, Spec, Use, made};
use crate::array::Array;
use crate::noise::Noise;
use regard::ListEntries;

/// The pages of one list.
struct PageList {
    /// The number of each page in its sequence; `None` if it is skipped.
    pages: Vec<Option<usize>>,
    /// Keys in use.
    len: usize,
}

/// The operands of page lists.
pub(super) struct PageListTensors {
    pub indices: Array,
    pub lens: Option<Array>,
    pub numbers: Option<Array>,
}

impl Spec {
    /// The lists, if they are of pages.
    fn page_lists(&self) -> Option<&ListSpec> {
        self.lists
            .as_ref()
            .filter(|lists| matches!(lists.of, ListEntries::Pages | ListEntries::NumberedPages))
    }

    /// Whether rows attend to lists of pages.
    pub(crate) fn lists_pages(&self) -> bool {
        self.page_lists().is_some()
    }

    /// Whether rows attend to lists of pages with their numbers.
    pub(crate) fn has_page_numbers(&self) -> bool {
        self.lists.is_some_and(|lists| lists.of == ListEntries::NumberedPages)
    }

    /// The shape of page lists.
    pub(super) fn page_list_shape(&self) -> [usize; 3] {
        let pages = self.page_lists().map_or(0, |lists| lists.len.div_ceil(self.page_size()));
        [self.list_heads(), self.sequences.len(), pages]
    }

    fn page_size(&self) -> usize {
        match self.keys {
            Keys::Paged { block_size, .. } => block_size,
            _ => unreachable!("legal: lists of pages are of paged keys"),
        }
    }

    /// The list of a sequence and head. Not all keys of the sequence's last page are in use. So
    /// this page can only be the last of a list, and the list ends with its last used key.
    fn page_list(&self, lists: &ListSpec, index: usize, head: usize) -> PageList {
        let [_, _, count] = self.page_list_shape();
        let (size, sequence) = (self.page_size(), self.sequences[index]);
        let mut noise = self.noise(Use::List, [sequence.id, 1 << 40, head as u64]);
        let (full, rest) = (sequence.kv_len / size, sequence.kv_len % size);
        if lists.entries == Entries::All {
            let page = |page: usize| (page < sequence.kv_len.div_ceil(size)).then_some(page);
            let len = if full < count { sequence.kv_len } else { count * size };
            return PageList { pages: (0..count).map(page).collect(), len };
        }
        let empty = lists.entries == Entries::Any && noise.one_in(16);
        let step = full.checked_div(count).unwrap_or(0).max(1);
        let start = noise.below(step);
        let page = |i: usize| match lists.entries {
            Entries::All => unreachable!("returned above"),
            Entries::Sorted => Some(start + i * step).filter(|&page| page < full),
            Entries::Any => (full > 0 && !empty && !noise.one_in(8)).then(|| noise.below(full)),
        };
        let mut list = PageList { pages: (0..count).map(page).collect(), len: count * size };
        if lists.counts && !noise.one_in(4) {
            list.len = noise.below(count * size + 1);
            let last = list.len / size;
            if rest > 0 && last < count && noise.one_in(2) {
                (list.pages[last], list.len) = (Some(full), last * size + rest);
            }
        }
        list
    }

    /// Whether the lengths of page lists are given.
    pub(super) fn has_page_list_lens(&self) -> bool {
        let Some(lists) = self.page_lists() else { return false };
        let [heads, batch, count] = self.page_list_shape();
        let slots = count * self.page_size();
        lists.counts
            || (0..heads)
                .any(|head| (0..batch).any(|index| self.page_list(lists, index, head).len != slots))
    }

    /// Calls `name` with each key that a list of a sequence names, and the list's head; whether
    /// there are page lists.
    pub(super) fn each_key_of_pages(
        &self,
        index: usize,
        mut name: impl FnMut(usize, usize),
    ) -> bool {
        let Some(lists) = self.page_lists() else { return false };
        let size = self.page_size();
        for head in 0..self.list_heads() {
            let list = self.page_list(lists, index, head);
            for entry in 0..list.len {
                if let Some(page) = list.pages[entry / size] {
                    name(page * size + entry % size, head);
                }
            }
        }
        true
    }

    /// The lists, their lengths and their numbers. `blocks` are in the pool.
    pub(super) fn page_list_tensors(
        &self,
        table: &[Vec<i32>],
        blocks: usize,
    ) -> Option<PageListTensors> {
        let lists = self.page_lists()?;
        let shape @ [heads, _, count] = self.page_list_shape();
        let numbered = lists.of == ListEntries::NumberedPages;
        let (mut indices, mut numbers, mut lens) = (Vec::new(), Vec::new(), Vec::new());
        let mut strays = Noise::new(self.seed, &[Use::List as u64]);
        for head in 0..heads {
            for (index, row) in table.iter().enumerate() {
                let list = self.page_list(lists, index, head);
                lens.push(list.len as i32);
                for i in 0..count {
                    let used = i * self.page_size() < list.len;
                    let no_block = strays.pick(&[-1, i32::MIN, i32::MAX, blocks as i32, -7]);
                    let no_number = strays.pick(&[-1, i32::MIN, i32::MAX, -7]);
                    let (block, number) = match list.pages[i] {
                        _ if !used => (strays.below(300) as i32 - 20, strays.below(99) as i32 - 9),
                        Some(page) => (row[page], page as i32),
                        // Either makes the page a skipped one.
                        None if numbered && strays.one_in(2) => (0, no_number),
                        None => (no_block, strays.below(99) as i32),
                    };
                    indices.push(block);
                    numbers.push(number);
                }
            }
        }
        Some(PageListTensors {
            indices: made(Array::new(indices, &shape)),
            lens: self.has_page_list_lens().then(|| made(Array::new(lens, &shape[..2]))),
            numbers: numbered.then(|| made(Array::new(numbers, &shape))),
        })
    }
}
