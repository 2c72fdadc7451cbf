//! Lists of keys, as a problem of C's states them.

use crate::convert::{Options, bad, count};
use crate::status::Failure;
use crate::types::{self, *};
use regard::{KeyLists, ListEntries};

/// The properties of key lists that plans depend on.
pub fn key_lists(options: &Options, given: &types::Problem) -> Result<Option<KeyLists>, Failure> {
    let lists = (REGARD_KEY_LISTS, "REGARD_KEY_LISTS");
    let len = options.number("list_len", lists, given.list_len)?;
    let lists = (REGARD_SECOND_LISTS, "REGARD_SECOND_LISTS");
    let second = options.number("second_list_len", lists, given.second_list_len)?;
    let second = second.map(|len| count("second_list_len", len)).transpose()?;
    let forms = [
        (REGARD_LISTS_PER_HEAD, "REGARD_LISTS_PER_HEAD"),
        (REGARD_INDICES_ARE_SLOTS, "REGARD_INDICES_ARE_SLOTS"),
        (REGARD_LISTS_OF_PAGES, "REGARD_LISTS_OF_PAGES"),
        (REGARD_PAGE_NUMBERS, "REGARD_PAGE_NUMBERS"),
        (REGARD_SECOND_LISTS, "REGARD_SECOND_LISTS"),
    ];
    let [per_head, slots, pages, numbers, _] = forms.map(|(option, _)| options.has(option));
    let Some(len) = len else {
        return match forms.into_iter().find(|&(option, _)| options.has(option)) {
            None => Ok(None),
            Some((_, name)) => {
                let found = format!("{name} without lists");
                Err(bad("problem.options", found, "REGARD_KEY_LISTS too"))
            }
        };
    };
    let entries = match (slots, pages, numbers) {
        (false, false, false) => ListEntries::Keys,
        (true, false, false) => ListEntries::Slots,
        (false, true, false) => ListEntries::Pages,
        (false, true, true) => ListEntries::NumberedPages,
        (false, false, true) => {
            let allowed = "REGARD_LISTS_OF_PAGES too";
            return Err(bad("problem.options", "REGARD_PAGE_NUMBERS alone", allowed));
        }
        (true, ..) => {
            let found = "REGARD_INDICES_ARE_SLOTS with lists of pages";
            return Err(bad("problem.options", found, "one of the two"));
        }
    };
    Ok(Some(KeyLists { len: count("list_len", len)?, per_head, entries, second }))
}

/// The options of a problem with these lists, and whether each is set.
pub fn list_options(lists: Option<KeyLists>) -> [(bool, u32); 6] {
    let entries = lists.map(|lists| lists.entries);
    let numbered = entries == Some(ListEntries::NumberedPages);
    [
        (lists.is_some(), REGARD_KEY_LISTS),
        (lists.is_some_and(|lists| lists.per_head), REGARD_LISTS_PER_HEAD),
        (entries == Some(ListEntries::Slots), REGARD_INDICES_ARE_SLOTS),
        (entries == Some(ListEntries::Pages) || numbered, REGARD_LISTS_OF_PAGES),
        (numbered, REGARD_PAGE_NUMBERS),
        (lists.is_some_and(|lists| lists.second.is_some()), REGARD_SECOND_LISTS),
    ]
}
