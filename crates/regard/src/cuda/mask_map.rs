//! The tile map of a mask: which K tiles of a row tile it empties, and which it leaves alone. A
//! kernel makes it in the workspace before prefill; layers that share a mask share its map.

use super::{DeviceMemory, Launch, Prefill, PrefillKernel, prefill};
use crate::kernel_parameters::count;
use crate::params::{MapStrides, TileMap as MapParameters};
use crate::problem::{Inputs, Problem};

/// The tile map of a mask under a plan: a byte for each sequence, query head, block of rows and K
/// tile, in this order, without gaps. 0: the mask hides all keys of the tile from all rows of the
/// block. 1: it changes no score. 2: neither, or not known; results are as right then, but not
/// always to the bit.
///
/// Rows are the query tokens of a head. [`tile_map`](super::tile_map) finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileMap {
    /// Offset in the workspace, in bytes.
    pub at: usize,
    /// Sequences; 1 where the mask is the same for all.
    pub batch: usize,
    /// Query heads, likewise.
    pub heads: usize,
    /// Blocks of rows, likewise.
    pub row_blocks: usize,
    /// K tiles.
    pub key_tiles: usize,
    /// Rows per block.
    pub block_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// Rows of the mask, as many as the operands can have: others do not count.
    pub rows: usize,
    /// Keys of the mask, likewise; if one stands for all, as many as the operands can have.
    pub keys: usize,
}

impl TileMap {
    /// The map of a kernel's tiles for checked operands, if the plan has room for it. A mask is
    /// read without a map otherwise.
    pub(super) fn new(
        plan: &Prefill,
        kernel: &PrefillKernel,
        problem: &Problem,
        inputs: &Inputs<DeviceMemory>,
    ) -> Option<TileMap> {
        let (space, mask) = (plan.map.as_ref()?, inputs.attention.mask.as_ref()?);
        let place = match *kernel == plan.specialized {
            true => space.specialized,
            false => space.fallback,
        };
        let [batch, heads, rows, keys] = *mask.shape().first_chunk::<4>()?;
        // A dimension of 1 stands for every index; for keys, whose tiles keep their places, as many
        // are written out.
        let rows = if rows == 1 { 1 } else { rows.min(problem.query_len) };
        let keys = if keys == 1 { problem.kv_len } else { keys.min(problem.kv_len) };
        let extents = prefill::map_extents([batch, heads, rows, keys], kernel);
        let [_, _, row_blocks, key_tiles] = extents;
        let bytes = prefill::map_bytes(extents);
        (1..=place.bytes).contains(&bytes).then_some(TileMap {
            at: place.at,
            batch,
            heads,
            row_blocks,
            key_tiles,
            block_rows: kernel.tile_rows,
            tile_keys: kernel.tile_keys,
            rows,
            keys,
        })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        prefill::map_bytes([self.batch, self.heads, self.row_blocks, self.key_tiles])
    }

    /// Its parameters, as kernels read them, in a workspace at that address.
    pub(super) fn parameters(&self, workspace: u64) -> MapParameters {
        let stride = |extent: usize, inside: usize| if extent == 1 { 0 } else { inside as i64 };
        let (row, head) = (self.key_tiles, self.row_blocks * self.key_tiles);
        MapParameters {
            pointer: workspace + self.at as u64,
            strides: MapStrides {
                batch: stride(self.batch, self.heads * head),
                head: stride(self.heads, head),
                // Not of blocks: several rows may be one block.
                row: stride(self.rows, row),
            },
            tile_rows: count(self.block_rows),
            tile_keys: count(self.tile_keys),
            batch: count(self.batch),
            heads: count(self.heads),
            row_tiles: count(self.row_blocks),
            key_tiles: count(self.key_tiles),
            mask_rows: count(self.rows),
            mask_keys: count(self.keys),
        }
    }

    /// The launch that makes it: a warp per byte, as many CTAs as there is work for.
    pub(super) fn launch(&self, launch: &Launch) -> Launch {
        launch.with_ctas(launch.grid[0].min(u32::try_from(self.bytes()).unwrap_or(u32::MAX)))
    }
}
