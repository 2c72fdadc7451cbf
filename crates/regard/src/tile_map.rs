//! Tile maps of masks: which K tiles of a block of rows a mask hides, and which it leaves
//! unchanged. Layers that share a mask share its map. Each backend has tiles of its own, and makes
//! and reads the maps itself.

/// The largest tile map, in bytes. A byte describes some 1,000 elements of a mask or more, so the
/// mask of a larger map takes gigabytes.
const MAX_MAP_BYTES: usize = 4 << 20;

/// Bytes of the largest map of these extents that a plan has room for: it does not know whether
/// sequences, heads or rows share a mask.
pub(crate) fn max_map_bytes(extents: [usize; 4]) -> usize {
    map_bytes(extents).min(MAX_MAP_BYTES)
}

/// A byte for each sequence, head, block of rows and K tile.
fn map_bytes(extents: [usize; 4]) -> usize {
    extents.into_iter().fold(1, usize::saturating_mul)
}

/// Room for a tile map in the workspace of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapPlace {
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Maximum size. A mask whose map is larger is read without a map.
    pub bytes: usize,
}

impl MapPlace {
    /// Offset of the first byte behind it.
    pub(crate) fn end(&self) -> usize {
        self.at.saturating_add(self.bytes)
    }
}

/// The tile map of a mask under a plan: a byte for each sequence, head, block of rows and K tile,
/// in this order, without gaps. 0: the mask hides all keys of the tile from all rows of the block.
/// 1: it changes no score. 2: neither, or not known.
///
/// `tile_map` of each backend makes it, and its documentation defines the heads and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileMap {
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Sequences; 1 if the mask is the same for all.
    pub batch: usize,
    /// Heads, likewise.
    pub heads: usize,
    /// Blocks of rows, likewise.
    pub row_blocks: usize,
    /// K tiles.
    pub key_tiles: usize,
    /// Rows per block.
    pub block_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// Query tokens of the mask that the map describes.
    pub rows: usize,
    /// Keys of the mask that the map describes.
    pub keys: usize,
}

impl TileMap {
    /// Its size.
    pub fn bytes(&self) -> usize {
        map_bytes([self.batch, self.heads, self.row_blocks, self.key_tiles])
    }

    /// The map, if it is not empty and there is room for it.
    pub(crate) fn within(self, place: &MapPlace) -> Option<TileMap> {
        (1..=place.bytes).contains(&self.bytes()).then_some(self)
    }
}
