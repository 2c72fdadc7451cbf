//! The tile map of a mask on CUDA: a kernel makes it in the workspace before prefill.

use super::{DeviceMemory, Launch, Prefill, PrefillKernel, prefill};
use crate::kernel_parameters::count;
use crate::params::{MapStrides, TileMap as MapParameters};
use crate::problem::{Inputs, Problem};
use crate::tile_map::TileMap;

/// The map of a kernel's tiles for checked operands, if the plan has room for it. A mask is read
/// without a map otherwise.
pub(super) fn tile_map(
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
    // A dimension of 1 stands for every index; for keys, whose tiles keep their places, as many are
    // written out.
    let rows = if rows == 1 { 1 } else { rows.min(problem.query_len) };
    let keys = if keys == 1 { problem.kv_len } else { keys.min(problem.kv_len) };
    let [batch, heads, row_blocks, key_tiles] =
        prefill::map_extents([batch, heads, rows, keys], kernel);
    let map = TileMap {
        at: place.at,
        batch,
        heads,
        row_blocks,
        key_tiles,
        block_rows: kernel.tile_rows,
        tile_keys: kernel.tile_keys,
        rows,
        keys,
    };
    map.within(&place)
}

/// A map's parameters, as kernels read them, in a workspace at that address.
pub(super) fn parameters(map: &TileMap, workspace: u64) -> MapParameters {
    let stride = |extent: usize, inside: usize| if extent == 1 { 0 } else { inside as i64 };
    let (row, head) = (map.key_tiles, map.row_blocks * map.key_tiles);
    MapParameters {
        pointer: workspace + map.at as u64,
        strides: MapStrides {
            batch: stride(map.batch, map.heads * head),
            head: stride(map.heads, head),
            // Not of blocks: several rows may be one block.
            row: stride(map.rows, row),
        },
        tile_rows: count(map.block_rows),
        tile_keys: count(map.tile_keys),
        batch: count(map.batch),
        heads: count(map.heads),
        row_tiles: count(map.row_blocks),
        key_tiles: count(map.key_tiles),
        mask_rows: count(map.rows),
        mask_keys: count(map.keys),
    }
}

/// The launch that makes a map: a warp per byte, as many CTAs as there is work for.
pub(super) fn map_launch(map: &TileMap, launch: &Launch) -> Launch {
    launch.with_ctas(launch.grid[0].min(u32::try_from(map.bytes()).unwrap_or(u32::MAX)))
}
