//! The walk layer: takes the query rows of an item through its keys, tile by tile.
//!
//! [`attend`] runs an item. Four walks ([`KeyWalk`]) share the online softmax ([`softmax`]),
//! prologue and epilogue ([`rows`]) and the merge of KV splits ([`merge`]).

pub mod address;
pub mod amx_tile;
pub mod attend;
pub mod call;
pub mod item;
pub mod merge;
pub mod pack;
pub mod rows;
pub mod scratch;
pub mod softmax;
pub mod stream;
pub mod tile;
pub mod verify;

use super::product::amx;
use crate::problem::Problem;
use crate::select::{CPU_TILES, Choice, Kernel};
use crate::split::Split;
use item::KeyWalk;
use scratch::{MAX_VERIFY_ROWS, Sizes};

const _: () = {
    let mut i = 0;
    while i < CPU_TILES.len() {
        let tile = &CPU_TILES[i];
        assert!(tile.tile_keys <= softmax::MAX_TILE_KEYS, "a tile is longer than KEY_INDICES");
        assert!(
            tile.tile_keys.is_multiple_of(amx::DEPTH),
            "a tile ends inside a vector, or inside an AMX step"
        );
        assert!(tile.block_rows.is_multiple_of(amx::ROWS), "a block ends inside an AMX tile");
        i += 1;
    }
};

/// The walk of an item of a sequence with `rows` query rows per key/value head.
pub fn key_walk(choice: &Choice, rows: usize) -> KeyWalk {
    match rows {
        _ if rows <= choice.stream_rows => KeyWalk::Stream,
        _ if choice.kernel == Kernel::CpuAmx => KeyWalk::Amx,
        0..=MAX_VERIFY_ROWS => KeyWalk::Verify,
        _ => KeyWalk::Tile,
    }
}

/// Key/value heads per item, for `rows` query rows per key/value head.
pub fn heads_per_item(choice: &Choice, rows: usize, kv_heads: usize) -> usize {
    match key_walk(choice, rows) {
        KeyWalk::Stream => stream::heads_per_item(rows, kv_heads),
        KeyWalk::Verify => verify::heads_per_item(rows, kv_heads, choice),
        KeyWalk::Tile | KeyWalk::Amx => 1,
    }
}

/// The sizes that lay out scratch and packed tiles.
pub fn sizes(problem: &Problem, choice: &Choice, split: &Split) -> Sizes {
    let item_rows = verify::item_rows(problem, choice).max(stream::ITEM_ROWS);
    Sizes::new(problem, choice, split, item_rows)
}
