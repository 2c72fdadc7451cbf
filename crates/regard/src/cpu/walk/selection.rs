//! Lists of keys: an item whose row has a list walks the list's entries as if they were its keys.
//! Entry i of the list takes the place of key i in tiles and splits, so a list of all keys in order
//! gives the bits of dense attention.

use super::call::ItemContext;
use super::item::TileSpan;
use super::list_tile::MAX_ENTRIES;
use crate::problem::KvStorage;
use std::ops::Range;

/// The list of an item's row.
pub struct RowList<'a> {
    entries: &'a [i32],
    /// Positions that the row can see.
    visible: Range<usize>,
    pages: Pages<'a>,
}

/// How an entry of a key list becomes an address.
enum Pages<'a> {
    /// A position, and keys are not paged.
    None,
    /// A position, and a block table leads to its page. The pool has `blocks` blocks.
    Table { table: &'a [i32], page_size: u32, blocks: u32 },
    /// A physical slot.
    Slots { page_size: u32 },
}

impl<'a> RowList<'a> {
    /// The list of the item's row, if rows have lists. Such an item has rows of one token only.
    pub fn new(ctx: ItemContext<'a>) -> Option<RowList<'a>> {
        let ItemContext { call, item, .. } = ctx;
        let token = item.first_row / call.problem.group();
        let entries = call.inputs.key_list(&item.sequence, token, item.heads.start)?;
        let position = item.sequence.q_offset + token as i64;
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
        Some(RowList { entries, visible, pages })
    }

    /// The block and slot of an entry's key; `None` if the entry is skipped.
    #[inline(always)]
    fn place(&self, entry: i32) -> Option<(i32, i32)> {
        let key =
            u32::try_from(entry).ok().filter(|&key| self.visible.contains(&(key as usize)))?;
        match self.pages {
            Pages::None => Some((0, entry)),
            Pages::Slots { page_size } => {
                Some(((key / page_size) as i32, (key % page_size) as i32))
            }
            Pages::Table { table, page_size, blocks } => {
                let block = table[(key / page_size) as usize];
                ((block as u32) < blocks).then_some((block, (key % page_size) as i32))
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
        for (i, &entry) in self.entries[first..first + len].iter().enumerate() {
            let place = self.place(entry);
            if kept.is_none() && i < in_tile {
                kept = place;
            }
            skipped += usize::from(place.is_none() && i < in_tile);
            tile.keys[i] = if place.is_some() { entry } else { -1 };
            (tile.blocks[i], tile.slots[i]) = place.unwrap_or_default();
        }
        (tile.first, tile.len, tile.skipped) = (first, len, skipped);
        let Some((block, slot)) = kept else { return false };
        for i in (0..len).filter(|&i| tile.keys[i] < 0) {
            (tile.blocks[i], tile.slots[i]) = (block, slot);
        }
        true
    }
}
