//! The tile map of a mask: which K tiles of a block of rows it hides, and which it leaves alone.
//! Layers that share a mask share its map.

use super::executor::Executor;
use super::tasks::run_tasks;
use super::walk::mask_tile::tile_kind;
use super::walk::tile_kinds::TileKinds;
use super::walk::tiling::Tiling;
use crate::problem::{Inputs, Problem};
use crate::tensor::Tensor;

/// Query tokens of a head per block of rows: as many rows as a register tile, at most, so that few
/// of them are computed beside those that the mask leaves something of.
const BLOCK_ROWS: usize = 16;

/// The largest tile map, in bytes: as on GPUs. A byte describes 1000 elements of a mask or more.
const MAX_MAP_BYTES: usize = 4 << 20;

/// Room for a tile map in the workspace of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapSpace {
    /// Offset in the workspace, in bytes. Not from its aligned start: bytes need no alignment, and
    /// the caller finds the map without.
    pub at: usize,
    /// Maximum size. A mask whose map is larger is read without a map.
    pub bytes: usize,
}

/// The tile map of a mask under a plan: a byte for each sequence, query head, block of rows and K
/// tile, in this order, without gaps. 0: the mask hides all keys of the tile from all rows of the
/// block. 1: it is boolean, and hides none of them; an additive mask is read wherever it does not
/// hide all. 2: neither, or not known.
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
    /// K tiles, likewise.
    pub key_tiles: usize,
    /// Rows per block.
    pub block_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// Rows of the mask, as many as the plan is for: others do not count.
    pub rows: usize,
    /// Keys of the mask, likewise.
    pub keys: usize,
}

impl TileMap {
    /// The map of a mask, if there is room for it.
    pub(super) fn new(
        space: &MapSpace,
        tiling: &Tiling,
        planned: &Problem,
        inputs: &Inputs,
    ) -> Option<TileMap> {
        let mask = inputs.attention.mask.as_ref()?;
        let [batch, heads, rows, keys] = *mask.shape().first_chunk::<4>()?;
        // A mask may be larger than the plan. What it is for the lengths of one step does not
        // count: the map may be made once for several.
        let (rows, keys) = (rows.min(planned.query_len), keys.min(planned.kv_len));
        let map = TileMap {
            at: space.at,
            batch,
            heads,
            row_blocks: rows.div_ceil(BLOCK_ROWS),
            key_tiles: keys.div_ceil(tiling.tile_keys),
            block_rows: BLOCK_ROWS,
            tile_keys: tiling.tile_keys,
            rows,
            keys,
        };
        (1..=space.bytes).contains(&map.bytes()).then_some(map)
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        [self.heads, self.row_blocks, self.key_tiles]
            .into_iter()
            .fold(self.batch, usize::saturating_mul)
    }

    /// The map in memory of that size, for lookups.
    pub(super) fn kinds<'a>(&self, kinds: &'a [u8], mask: &Tensor) -> TileKinds<'a> {
        let inside =
            [self.heads * self.row_blocks * self.key_tiles, self.row_blocks * self.key_tiles];
        let strides = [inside[0], inside[1], self.key_tiles, 1];
        let shape = mask.shape();
        TileKinds {
            kinds,
            // A dimension of 1 stands for every index.
            strides: std::array::from_fn(|i| if shape[i] == 1 { 0 } else { strides[i] }),
            block_rows: self.block_rows,
            tile_keys: self.tile_keys,
        }
    }

    /// Fills it in on the threads of an executor; `kinds` is as long as the map.
    pub(super) fn fill(&self, kinds: &mut [u8], mask: &Tensor, executor: &dyn Executor) {
        let (rows, keys) = (self.rows, self.keys);
        let to = Kinds(kinds.as_mut_ptr());
        let (blocks, tiles) = (self.batch * self.heads * self.row_blocks, self.key_tiles);
        let task = |number: usize| {
            let (matrix, block) = (number / self.row_blocks, number % self.row_blocks);
            let matrix = [matrix / self.heads, matrix % self.heads];
            let tokens = self.block_rows * block..rows.min(self.block_rows * (block + 1));
            for tile in 0..tiles {
                let keys = self.tile_keys * tile..keys.min(self.tile_keys * (tile + 1));
                // SAFETY: tokens and keys are the mask's; each task has its own bytes of the map.
                unsafe {
                    let kind = tile_kind(mask, matrix, tokens.clone(), &keys);
                    to.at(number * tiles + tile).write(kind as u8);
                }
            }
        };
        let bytes = [self.heads, rows, keys, mask.dtype().size()];
        let bytes = bytes.into_iter().fold(self.batch, usize::saturating_mul);
        run_tasks(executor, blocks, bytes, &task);
    }
}

/// The bytes of a map, shared by the threads that write it.
struct Kinds(*mut u8);

// SAFETY: each byte is written by one task.
unsafe impl Sync for Kinds {}

impl Kinds {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// Room for the largest map of a problem, behind a workspace of `before` bytes: a plan does not
/// know whether sequences, heads or rows share a mask. Listed keys are in no tiles.
pub(super) fn space(problem: &Problem, tiling: &Tiling, before: usize) -> Option<MapSpace> {
    if problem.variant.mask.is_none() || problem.key_lists.is_some() {
        return None;
    }
    let blocks = problem.query_len.div_ceil(BLOCK_ROWS);
    let all = [problem.query_heads, blocks, problem.kv_len.div_ceil(tiling.tile_keys)];
    let bytes = all.into_iter().fold(problem.batch, usize::saturating_mul).min(MAX_MAP_BYTES);
    Some(MapSpace { at: before, bytes })
}
