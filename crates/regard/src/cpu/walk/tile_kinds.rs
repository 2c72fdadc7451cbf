//! The tile map of a mask, as walks look into it.

/// The effect of a mask on the keys of a tile, for the rows of a block: a byte of a tile map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TileKind {
    /// It hides all of them from all rows.
    Hidden = 0,
    /// It is boolean, and hides none of them.
    Full = 1,
    /// Neither, or not known.
    Mixed = 2,
}

/// The tile map of a mask, for lookups.
#[derive(Clone, Copy)]
pub struct TileKinds<'a> {
    /// A byte per tile.
    pub kinds: &'a [u8],
    /// From one sequence, query head, block of rows and K tile to the next; 0 if the mask is the
    /// same for all.
    pub strides: [usize; 4],
    /// Tokens per block of rows, and keys per tile.
    pub block_rows: usize,
    pub tile_keys: usize,
}

impl TileKinds<'_> {
    /// The effect of the mask on the tile of `key`, for a token and query head.
    #[inline]
    pub fn kind(&self, sequence: usize, head: usize, token: usize, key: usize) -> TileKind {
        let indices = [sequence, head, token / self.block_rows, key / self.tile_keys];
        let at: usize =
            indices.iter().zip(self.strides).map(|(index, stride)| index * stride).sum();
        match self.kinds[at] {
            0 => TileKind::Hidden,
            1 => TileKind::Full,
            // A map that the caller wrote may hold anything.
            _ => TileKind::Mixed,
        }
    }
}
