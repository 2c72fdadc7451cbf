//! Facts of lists of keys in plans.

use super::{Inputs, KeyLists, ListEntries, MAX_LEN};
use crate::error::Error;
use crate::memory::Memory;
use crate::tensor::Tensor;

impl KeyLists {
    /// In words, for `Plan::explain`.
    pub(super) fn description(self) -> String {
        let (entries, owner) = match self.entries {
            ListEntries::Keys => ("keys", "row"),
            ListEntries::Slots => ("physical slots", "row"),
            ListEntries::Pages => ("keys in pages", "sequence"),
            ListEntries::NumberedPages => ("keys in numbered pages", "sequence"),
        };
        let head = if self.per_head { " and key/value head" } else { "" };
        let second = match self.second {
            None => String::new(),
            Some(len) => format!(", and of {len} of a second cache"),
        };
        format!("lists of up to {} {entries} per {owner}{head}{second}", self.len)
    }

    /// The argument that has the lists.
    pub(super) fn argument(self) -> &'static str {
        if self.lists_pages() { "page_indices" } else { "key_indices" }
    }

    /// Entries of the longest list, and of the longest second list.
    pub(crate) fn walked(self) -> usize {
        self.len.saturating_add(self.second.unwrap_or(0)).min(MAX_LEN)
    }

    /// Whether the lists are of pages.
    pub(crate) fn lists_pages(self) -> bool {
        matches!(self.entries, ListEntries::Pages | ListEntries::NumberedPages)
    }

    /// Whether entries have positions.
    pub(super) fn has_positions(self) -> bool {
        matches!(self.entries, ListEntries::Keys | ListEntries::NumberedPages)
    }

    /// In which form the lists are given.
    pub(super) fn form(self) -> String {
        let owner = if self.lists_pages() { "sequence" } else { "row" };
        let head = if self.per_head { " and key/value head" } else { "" };
        format!("one list per {owner}{head}")
    }
}

/// The tensors of a call's lists.
pub(crate) struct ListTensors<'t, 'a, M: Memory> {
    pub lists: KeyLists,
    /// Entries, or pages.
    pub indices: Option<&'t Tensor<'a, M>>,
    /// The number of entries in use, per list.
    pub counts: Option<&'t Tensor<'a, M>>,
    /// The numbers of pages.
    pub numbers: Option<&'t Tensor<'a, M>>,
}

impl<'a, M: Memory> Inputs<'a, M> {
    /// The tensors of lists of keys or of pages, if rows have lists.
    pub(crate) fn list_tensors(&self) -> Option<ListTensors<'_, 'a, M>> {
        let (lists, attention) = (self.key_lists()?, &self.attention);
        let (indices, counts) = match lists.lists_pages() {
            true => (&attention.page_indices, &attention.page_list_lens),
            false => (&attention.key_indices, &attention.key_counts),
        };
        let numbers = attention.page_numbers.as_ref();
        Some(ListTensors { lists, indices: indices.as_ref(), counts: counts.as_ref(), numbers })
    }
}

/// An error if an argument is given that lists of such entries leave no meaning.
pub(super) fn refuse_beside(
    entries: ListEntries,
    argument: &str,
    given: bool,
) -> Result<(), Error> {
    if !given {
        return Ok(());
    }
    let allowed = match entries {
        ListEntries::Keys => unreachable!("positions go with everything"),
        ListEntries::Slots => {
            "nothing that needs positions or lengths: entries of key_indices are physical slots \
             (indices_are_slots)"
        }
        ListEntries::Pages => {
            "nothing that needs positions or other lengths: page_indices is given without \
             page_numbers"
        }
        ListEntries::NumberedPages => {
            "nothing that counts keys of the sequence: page_indices is given"
        }
    };
    Err(Error::argument(argument, "given", allowed))
}
