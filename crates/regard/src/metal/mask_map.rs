//! The tile map of a mask on Metal: a kernel makes it in the workspace before prefill.

use super::{MapParameters, MetalMemory};
use crate::kernel_parameters::count;
use crate::params::MapStrides;
use crate::problem::{Inputs, Problem};
use crate::tile_map::{MapPlace, TileMap, max_map_bytes};

/// A map's parameters, as kernels read them.
pub(super) fn parameters(map: &TileMap) -> MapParameters {
    let stride = |extent: usize, inside: usize| if extent == 1 { 0 } else { inside as i64 };
    let (row, head) = (map.key_tiles, map.row_blocks * map.key_tiles);
    MapParameters {
        strides: MapStrides {
            batch: stride(map.batch, map.heads * head),
            head: stride(map.heads, head),
            row: stride(map.row_blocks, row),
        },
        row_blocks: count(map.row_blocks),
        key_tiles: count(map.key_tiles),
        mask_rows: count(map.rows),
        mask_keys: count(map.keys),
    }
}

/// Room for the largest map of a problem; `before` is the workspace without it.
pub(super) fn place(
    problem: &Problem,
    [rows, keys]: [usize; 2],
    before: usize,
) -> Option<MapPlace> {
    problem.variant.mask?;
    let blocks = problem.query_len.saturating_mul(problem.group()).div_ceil(rows);
    let key_tiles = problem.kv_len.div_ceil(keys);
    let bytes = max_map_bytes([problem.batch, problem.kv_heads, blocks, key_tiles]);
    Some(MapPlace { at: before.checked_next_multiple_of(16).unwrap_or(usize::MAX), bytes })
}

/// The tile map of checked operands, with that much room and these rows and keys per tile. `None`
/// if the mask is read without a map.
pub(super) fn tile_map(
    place: Option<MapPlace>,
    [block_rows, tile_keys]: [usize; 2],
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
) -> Option<TileMap> {
    let (place, mask) = (place?, inputs.attention.mask.as_ref()?);
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
        at: place.at,
        batch,
        heads: if heads == 1 { 1 } else { problem.kv_heads },
        row_blocks,
        key_tiles: keys.div_ceil(tile_keys),
        block_rows,
        tile_keys,
        rows,
        keys,
    };
    map.within(&place)
}
