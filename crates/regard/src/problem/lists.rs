//! What plans know of lists of keys.

use super::{KeyLists, ListEntries};
use crate::error::Error;

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
        format!("lists of up to {} {entries} per {owner}{head}", self.len)
    }

    /// The argument that has the lists.
    pub(super) fn argument(self) -> &'static str {
        if self.lists_pages() { "page_indices" } else { "key_indices" }
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
