//! The tile map of a mask: which K tiles of a block of rows it empties, and which it leaves alone.
//! A kernel makes it in the workspace before prefill; layers that share a mask share its map.

use super::{MapParameters, MetalMemory};
use crate::kernel_parameters::count;
use crate::params::MapStrides;
use crate::problem::{Inputs, Problem};

/// The largest tile map, in bytes: as CUDA's. A byte describes some 1000 elements of a mask, so the
/// mask of a larger map takes gigabytes.
const MAX_MAP_BYTES: usize = 4 << 20;

/// Room for a tile map in the workspace of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapSpace {
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Maximum size. A mask whose map is larger is read without a map.
    pub bytes: usize,
}

/// The tile map of a mask under a plan: a byte for each sequence, key/value head, block of rows and
/// K tile, in this order, without gaps. 0: the mask hides all keys of the tile from all rows of
/// the block. 1: it changes no score. 2: neither, or not known.
///
/// Rows are packed: row r of a key/value head is token r / group of query head r % group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileMap {
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Sequences; 1 where the mask is the same for all.
    pub batch: usize,
    /// Key/value heads, likewise.
    pub heads: usize,
    /// Blocks of rows, likewise.
    pub row_blocks: usize,
    /// K tiles.
    pub key_tiles: usize,
    /// Rows per block.
    pub block_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// Rows and keys of the mask.
    rows: usize,
    keys: usize,
}

impl TileMap {
    /// Its size.
    pub fn bytes(&self) -> usize {
        [self.heads, self.row_blocks, self.key_tiles]
            .into_iter()
            .fold(self.batch, usize::saturating_mul)
    }

    /// Its parameters, as kernels read them.
    pub(super) fn parameters(&self) -> MapParameters {
        let stride = |extent: usize, inside: usize| if extent == 1 { 0 } else { inside as i64 };
        let (row, head) = (self.key_tiles, self.row_blocks * self.key_tiles);
        MapParameters {
            strides: MapStrides {
                batch: stride(self.batch, self.heads * head),
                head: stride(self.heads, head),
                row: stride(self.row_blocks, row),
            },
            row_blocks: count(self.row_blocks),
            key_tiles: count(self.key_tiles),
            mask_rows: count(self.rows),
            mask_keys: count(self.keys),
        }
    }
}

/// Room for the largest map of a problem: a plan does not know whether sequences, heads or rows
/// share a mask. `before` is the workspace without it.
pub(super) fn space(
    problem: &Problem,
    [rows, keys]: [usize; 2],
    before: usize,
) -> Option<MapSpace> {
    problem.variant.mask?;
    let blocks = problem.query_len.saturating_mul(problem.group()).div_ceil(rows);
    let all = [problem.kv_heads, blocks, problem.kv_len.div_ceil(keys)];
    let bytes = all.into_iter().fold(problem.batch, usize::saturating_mul).min(MAX_MAP_BYTES);
    Some(MapSpace { at: before.checked_next_multiple_of(16).unwrap_or(usize::MAX), bytes })
}

/// The tile map of checked operands, with that much room and these rows and keys per tile. `None`
/// if the mask is read without a map.
pub(super) fn tile_map(
    space: Option<MapSpace>,
    [block_rows, tile_keys]: [usize; 2],
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
) -> Option<TileMap> {
    let (space, mask) = (space?, inputs.attention.mask.as_ref()?);
    let [batch, heads, rows, keys] = *mask.shape().first_chunk::<4>()?;
    // A dimension of 1 stands for every index; for keys, whose tiles keep their places, as many are
    // written out.
    let keys = if keys == 1 { problem.kv_len } else { keys.min(problem.kv_len) };
    let (rows, row_blocks) = match rows {
        1 => (1, 1),
        rows => {
            let rows = rows.min(problem.query_len);
            (rows, (rows * problem.group()).div_ceil(block_rows))
        }
    };
    let map = TileMap {
        at: space.at,
        batch,
        heads: if heads == 1 { 1 } else { problem.kv_heads },
        row_blocks,
        key_tiles: keys.div_ceil(tile_keys),
        block_rows,
        tile_keys,
        rows,
        keys,
    };
    (1..=space.bytes).contains(&map.bytes()).then_some(map)
}
