//! The walk layer: takes the query rows of an item through its keys, tile by tile.
//!
//! [`attend`] runs an item. Four walks ([`KeyWalk`]) share the online softmax ([`softmax`]),
//! prologue and epilogue ([`rows`]) and the merge of KV splits ([`merge`]).

pub mod address;
pub mod amx_tile;
pub mod attend;
pub mod block_scales;
pub mod call;
pub mod item;
pub mod list_tile;
pub mod mask_tile;
pub mod merge;
pub mod operand;
pub mod pack;
pub mod row_block;
pub mod row_tile;
pub mod rows;
pub mod scratch;
pub mod selection;
pub mod softmax;
pub mod stream;
pub mod tile;
pub mod tile_kinds;
pub mod tiling;
pub mod verify;

use crate::problem::Problem;
use item::KeyWalk;
use scratch::{MAX_VERIFY_ROWS, Sizes};
use tiling::Tiling;

/// The walk of an item of a sequence with `rows` query rows per key/value head.
pub fn key_walk(tiling: &Tiling, rows: usize) -> KeyWalk {
    match rows {
        _ if rows <= tiling.stream_rows => KeyWalk::Stream,
        _ if tiling.uses_amx => KeyWalk::Amx,
        0..=MAX_VERIFY_ROWS => KeyWalk::Verify,
        _ => KeyWalk::Tile,
    }
}

/// Key/value heads per item, for `rows` query rows per key/value head.
pub fn heads_per_item(tiling: &Tiling, rows: usize, kv_heads: usize) -> usize {
    match key_walk(tiling, rows) {
        KeyWalk::Stream => stream::heads_per_item(rows, kv_heads),
        KeyWalk::Verify => verify::heads_per_item(rows, kv_heads, tiling),
        KeyWalk::Tile | KeyWalk::Amx => 1,
    }
}

/// Maximum query rows, over all heads, of an item of a sequence with at most `rows` query rows per
/// key/value head.
pub fn max_item_rows(tiling: &Tiling, rows: usize, kv_heads: usize) -> usize {
    let few_rows = if rows <= tiling.stream_rows { stream::ITEM_ROWS } else { verify::ITEM_ROWS };
    let several_heads = rows.saturating_mul(kv_heads).min(few_rows);
    rows.min(tiling.block_rows).max(several_heads)
}

/// The sizes that lay out scratch and packed tiles. `serial_splits`: whether an item may walk
/// several splits and merge them itself.
pub fn sizes(problem: &Problem, tiling: &Tiling, serial_splits: bool) -> Sizes {
    let item_rows = verify::item_rows(problem, tiling).max(stream::ITEM_ROWS);
    // Sequences may have any number of rows up to the longest.
    let item_heads = problem.kv_heads.min(stream::ITEM_ROWS.max(verify::MAX_ITEM_HEADS));
    Sizes::new(problem, tiling, serial_splits, item_rows, item_heads)
}
