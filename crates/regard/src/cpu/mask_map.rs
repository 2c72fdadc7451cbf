//! The tile map of a mask on the CPU: its place in the workspace, its lookups, and filling it in.

use super::executor::Executor;
use super::tasks::run_tasks;
use super::walk::mask_tile::tile_kind;
use super::walk::tile_kinds::TileKinds;
use super::walk::tiling::Tiling;
use crate::problem::{Inputs, Problem};
use crate::tensor::Tensor;
use crate::tile_map::{MapPlace, TileMap, max_map_bytes};

/// Query tokens of a head per block of rows: as many rows as an AMX tile. Larger blocks would
/// compute more rows of which the mask hides all keys.
const BLOCK_ROWS: usize = 16;

/// The map of the mask of these operands, if there is room for it.
pub(super) fn tile_map(
    place: &MapPlace,
    tiling: &Tiling,
    planned: &Problem,
    inputs: &Inputs,
) -> Option<TileMap> {
    let mask = inputs.attention.mask.as_ref()?;
    let [batch, heads, rows, keys] = *mask.shape().first_chunk::<4>()?;
    // A mask may be larger than the plan. The lengths of this step are not used here: one map may
    // serve several steps.
    let (rows, keys) = (rows.min(planned.query_len), keys.min(planned.kv_len));
    let map = TileMap {
        at: place.at,
        batch,
        heads,
        row_blocks: rows.div_ceil(BLOCK_ROWS),
        key_tiles: keys.div_ceil(tiling.tile_keys),
        block_rows: BLOCK_ROWS,
        tile_keys: tiling.tile_keys,
        rows,
        keys,
    };
    map.within(place)
}

/// A map in memory of its size, for lookups.
pub(super) fn lookups<'a>(map: &TileMap, kinds: &'a [u8], mask: &Tensor) -> TileKinds<'a> {
    let head = map.row_blocks * map.key_tiles;
    let strides = [map.heads * head, head, map.key_tiles, 1];
    let shape = mask.shape();
    TileKinds {
        kinds,
        // A dimension of 1 stands for every index.
        strides: std::array::from_fn(|i| if shape[i] == 1 { 0 } else { strides[i] }),
        block_rows: map.block_rows,
        tile_keys: map.tile_keys,
    }
}

/// Fills a map in on the threads of an executor; `kinds` is as long as the map.
pub(super) fn fill(map: &TileMap, kinds: &mut [u8], mask: &Tensor, executor: &dyn Executor) {
    let (rows, keys) = (map.rows, map.keys);
    let to = Kinds(kinds.as_mut_ptr());
    let (blocks, tiles) = (map.batch * map.heads * map.row_blocks, map.key_tiles);
    let task = |number: usize| {
        let (matrix, block) = (number / map.row_blocks, number % map.row_blocks);
        let matrix = [matrix / map.heads, matrix % map.heads];
        let tokens = map.block_rows * block..rows.min(map.block_rows * (block + 1));
        for tile in 0..tiles {
            let keys = map.tile_keys * tile..keys.min(map.tile_keys * (tile + 1));
            // SAFETY: tokens and keys are the mask's; each task has its own bytes of the map.
            unsafe {
                let kind = tile_kind(mask, matrix, tokens.clone(), &keys);
                to.at(number * tiles + tile).write(kind as u8);
            }
        }
    };
    let bytes = [map.heads, rows, keys, mask.dtype().size()];
    let bytes = bytes.into_iter().fold(map.batch, usize::saturating_mul);
    run_tasks(executor, blocks, bytes, &task);
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

/// Room for the largest map of a problem, behind a workspace of `before` bytes: bytes need no
/// alignment. Listed keys are in no tiles.
pub(super) fn place(problem: &Problem, tiling: &Tiling, before: usize) -> Option<MapPlace> {
    if problem.variant.mask.is_none() || problem.key_lists.is_some() {
        return None;
    }
    let blocks = problem.query_len.div_ceil(BLOCK_ROWS);
    let key_tiles = problem.kv_len.div_ceil(tiling.tile_keys);
    let bytes = max_map_bytes([problem.batch, problem.query_heads, blocks, key_tiles]);
    Some(MapPlace { at: before, bytes })
}
