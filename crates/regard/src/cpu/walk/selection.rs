//! Lists of keys: an item whose row has a list walks the list's entries as if they were its keys.
//! Entry i of the list takes the place of key i in tiles and splits, so a list of all keys in order
//! gives the bits of dense attention.

use super::call::ItemContext;
use super::item::TileSpan;
use super::list_tile::MAX_ENTRIES;
use crate::positions::SequenceKeys;
use crate::problem::{KeyList, KvStorage, ListedKey, MAX_LEN, PageList};
use crate::tensor::Tensor;
use std::ops::Range;

/// The list of an item's row.
pub struct RowList<'a> {
    entries: Entries<'a>,
    /// Positions that the row can see.
    visible: Range<usize>,
}

enum Entries<'a> {
    Keys {
        list: &'a [i32],
        pages: Pages<'a>,
    },
    /// Physical slots of two pools.
    TwoPools {
        lists: [&'a [i32]; 2],
        pools: [SlotPool; 2],
    },
    Pages(PageList<'a>),
}

/// A pool whose slots are listed.
struct SlotPool {
    page_size: u32,
    slots: usize,
}

/// Lookup from an entry of a list of keys to an address.
enum Pages<'a> {
    /// A position, and keys are not paged.
    None,
    /// A position, and a block table leads to its page. The pool has `blocks` blocks.
    Table { table: &'a [i32], page_size: u32, blocks: u32 },
    /// A physical slot.
    Slots { page_size: u32 },
}

impl SlotPool {
    /// The key of a slot; `None` if the pool has no such slot.
    #[inline(always)]
    fn key(&self, slot: i32, pool: u8) -> Option<ListedKey> {
        let at = u32::try_from(slot).ok().filter(|&at| (at as usize) < self.slots)?;
        let (block, in_block) = ((at / self.page_size) as i32, (at % self.page_size) as i32);
        Some(ListedKey { pool, key: slot, block, slot: in_block })
    }
}

impl<'a> RowList<'a> {
    /// The list of the item's row, if rows have lists. Such an item has rows of one token only.
    pub fn new(ctx: ItemContext<'a>) -> Option<RowList<'a>> {
        let ItemContext { call, item, .. } = ctx;
        let token = item.first_row / call.problem.group();
        let list = call.inputs.key_list(&item.sequence, token, item.heads.start)?;
        let position = item.sequence.q_offset + token as i64;
        let list = match list {
            KeyList::Keys(list) => list,
            KeyList::TwoPools(lists) => {
                let inputs = call.inputs;
                let pool =
                    |keys: &Tensor, slots| SlotPool { page_size: keys.shape()[1] as u32, slots };
                let second = inputs.attention.second_k.as_ref().expect("checked: given with lists");
                let pools =
                    [pool(&inputs.k, item.sequence.kv_len), pool(second, inputs.second_slots())];
                return Some(RowList {
                    entries: Entries::TwoPools { lists, pools },
                    visible: 0..0,
                });
            }
            KeyList::Pages(pages) => {
                let keys = SequenceKeys::from(MAX_LEN);
                let visible = call.problem.variant.visible(position, keys);
                return Some(RowList { entries: Entries::Pages(pages), visible });
            }
        };
        let pages = match (call.problem.keys, call.inputs.block_row(item.sequence.index)) {
            (KvStorage::Paged { block_size }, Some(table)) => Pages::Table {
                table,
                page_size: block_size as u32,
                blocks: call.inputs.k.shape()[0].min(i32::MAX as usize) as u32,
            },
            (KvStorage::Paged { block_size }, None) => {
                Pages::Slots { page_size: block_size as u32 }
            }
            _ => Pages::None,
        };
        let visible = call.problem.variant.visible(position, item.sequence.keys());
        Some(RowList { entries: Entries::Keys { list, pages }, visible })
    }

    /// The key of an entry; `None` if the entry is skipped.
    #[inline(always)]
    fn key(&self, entry: usize) -> Option<ListedKey> {
        let visible = |key: i32| usize::try_from(key).is_ok_and(|key| self.visible.contains(&key));
        let (list, pages) = match &self.entries {
            Entries::Keys { list, pages } => (list, pages),
            Entries::Pages(list) => return list.key(entry).filter(|listed| visible(listed.key)),
            Entries::TwoPools { lists: [first, second], pools } => {
                let (pool, entry) = match entry.checked_sub(first.len()) {
                    None => (0, first[entry]),
                    Some(entry) => (1, second[entry]),
                };
                return pools[pool].key(entry, pool as u8);
            }
        };
        let key = Some(list[entry]).filter(|&key| visible(key))?;
        let at = key as u32;
        match *pages {
            Pages::None => Some(ListedKey { pool: 0, key, block: 0, slot: key }),
            Pages::Slots { page_size } => {
                let (block, slot) = ((at / page_size) as i32, (at % page_size) as i32);
                Some(ListedKey { pool: 0, key, block, slot })
            }
            Pages::Table { table, page_size, blocks } => {
                let block = table[(at / page_size) as usize];
                let slot = (at % page_size) as i32;
                ((block as u32) < blocks).then_some(ListedKey { pool: 0, key, block, slot })
            }
        }
    }

    /// Resolves the entries of a tile, and some more for prefetching. Returns whether the row keeps
    /// any entry of the tile; if it keeps none, there is nothing to compute.
    ///
    /// # Safety
    /// As [`run_item`](super::attend::run_item), for a tile of the item.
    pub unsafe fn resolve(&self, ctx: ItemContext, span: &TileSpan) -> bool {
        // SAFETY: the scratch has room for one. Its bytes are initialized, and any bytes are valid.
        let tile = unsafe { &mut *ctx.scratch.list };
        let (first, in_tile) = (span.first_key(), span.valid.len());
        debug_assert!(span.valid.start == 0, "splits start with tiles");
        let len = MAX_ENTRIES.min(2 * ctx.sizes().tile_keys).min(span.end - first);
        let mut kept = None;
        let mut skipped = 0;
        for i in 0..len {
            let listed = self.key(first + i);
            if kept.is_none() && i < in_tile {
                kept = listed;
            }
            skipped += usize::from(listed.is_none() && i < in_tile);
            let none = ListedKey { pool: 0, key: -1, block: 0, slot: 0 };
            let ListedKey { pool, key, block, slot } = listed.unwrap_or(none);
            (tile.keys[i], tile.blocks[i], tile.slots[i]) = (key, block, slot);
            tile.pools[i] = pool;
        }
        (tile.first, tile.len, tile.skipped) = (first, len, skipped);
        let Some(ListedKey { pool, block, slot, .. }) = kept else { return false };
        for i in (0..len).filter(|&i| tile.keys[i] < 0) {
            (tile.blocks[i], tile.slots[i], tile.pools[i]) = (block, slot, pool);
        }
        true
    }
}
