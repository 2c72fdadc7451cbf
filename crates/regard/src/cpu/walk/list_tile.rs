//! The entries of a tile of listed keys, resolved to addresses.

use super::tiling::MAX_TILE_KEYS;

/// Entries that are resolved at a time: a tile, and the next one for prefetching.
pub const MAX_ENTRIES: usize = 2 * MAX_TILE_KEYS;

/// The addresses of the keys of a tile's entries.
pub struct ListTile {
    /// The first entry.
    pub first: usize,
    /// Entries that are resolved.
    pub len: usize,
    /// Entries of the tile that are skipped.
    pub skipped: usize,
    /// The position (or physical slot) of each entry's key; -1 if it is skipped.
    pub keys: [i32; MAX_ENTRIES],
    /// The key's block, or 0 if keys are not paged, and its slot in it. A skipped entry has the
    /// block and slot of another entry of the tile. A row that sees only finite values stays right:
    /// 0 times a finite value is 0.
    pub blocks: [i32; MAX_ENTRIES],
    pub slots: [i32; MAX_ENTRIES],
    /// The pool that each key is in: 1 is the second cache.
    pub pools: [u8; MAX_ENTRIES],
}

/// The place of an entry's key.
pub struct EntryPlace {
    pub pool: usize,
    pub block: i64,
    pub slot: i64,
}

impl ListTile {
    /// The pool, block and slot of an entry. An entry past the last resolved one gets the place of
    /// the last: it is only prefetched.
    #[inline(always)]
    pub fn place(&self, entry: usize) -> EntryPlace {
        let i = (entry - self.first).min(self.len - 1);
        EntryPlace {
            pool: usize::from(self.pools[i]),
            block: i64::from(self.blocks[i]),
            slot: i64::from(self.slots[i]),
        }
    }
}
