//! How work is divided over the blocks of a launch where the host knows all lengths to be alike: the numbers that `kernels/decode/stream_k.cuh`
//! otherwise works out on the device.

use super::Decode;
use crate::problem::Problem;

/// The line of tiles, and how much of it a block takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    /// Thread blocks.
    pub blocks: u32,
    /// Cost units of all tiles; 0 leaves counting to the kernel.
    pub line: i64,
    /// Units a block takes.
    pub share: i64,
    /// Units of a tile.
    pub tile_cost: i64,
    /// Units of a tile that stand for starting it.
    pub start_units: i32,
}

// Tests without CUDA look at parts of it only.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
impl Schedule {
    /// The kernel counts.
    pub fn on_device(decode: &Decode) -> Schedule {
        Schedule {
            blocks: decode.launch.grid[0],
            line: 0,
            share: 0,
            tile_cost: 0,
            start_units: decode.start_units,
        }
    }

    /// All sequences have the problem's lengths, and their first row is at `q_offset`.
    pub fn of_equal_lengths(problem: &Problem, decode: &Decode, q_offset: i64) -> Schedule {
        let visible = problem.variant.visible_to_rows(q_offset, problem.query_len, problem.kv_len);
        let unit_keys = decode.unit_keys as usize;
        let units = match visible.is_empty() {
            true => 0,
            false => (visible.end - 1) / unit_keys + 1 - visible.start / unit_keys,
        };
        let tiles = super::select::tiles(problem, decode.tile_rows as usize);
        let blocks = decode.launch.grid[0] as i64;
        let least = i64::from(decode.key_groups);
        divide(
            tiles as i64,
            units as i64,
            blocks,
            (decode.start_units, least),
            problem.batch_invariant,
        )
    }
}

/// `tiles` tiles of `units` units over at most `blocks` blocks. Starting a tile costs as much as some units; no part of one has fewer than `least`,
/// which a block's groups of warps take in one go.
fn divide(
    tiles: i64,
    units: i64,
    blocks: i64,
    (start_units, least): (i32, i64),
    batch_invariant: bool,
) -> Schedule {
    let tile = units + i64::from(start_units);
    let line = tiles * tile;
    let even = line.div_euclid(blocks) + i64::from(line % blocks != 0);
    let by_share = |share: i64, tile_cost: i64, start_units| {
        let (share, line) = (share.max(1), tiles * tile_cost);
        let blocks = (line + share - 1) / share;
        Schedule { blocks: blocks.max(1) as u32, line, share, tile_cost, start_units }
    };
    if batch_invariant || tiles == 0 {
        return by_share(even, tile, start_units);
    }
    if tiles <= blocks {
        // Every tile has the same number of blocks to itself: none starts twice. The last one's share may be cut short.
        let parts = (blocks / tiles).min((units / least).max(1));
        let share = ((units + parts - 1) / parts).max(1);
        let parts = ((units + share - 1) / share).max(1);
        return by_share(share, parts * share, 0);
    }
    // Whole tiles for every block, where that is as even as cutting them (which starts one tile more in each).
    let whole = (tiles + blocks - 1) / blocks * tile;
    let cut = even + i64::from(start_units);
    by_share(if whole * 25 <= cut * 26 { whole } else { even }, tile, start_units)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_somebodys_and_no_block_is_idle() {
        for tiles in [1, 2, 7, 8, 100, 132, 133, 512, 1000, 1024] {
            for units in [0, 1, 3, 64, 65, 2048, 100_000] {
                for blocks in [1, 8, 132, 264, 528] {
                    for (start_units, invariant) in [(1, true), (1, false), (18, false)] {
                        let s = divide(tiles, units, blocks, (start_units, 8), invariant);
                        let shown =
                            format!("{tiles} tiles of {units} units on {blocks} blocks: {s:?}");
                        assert!(i64::from(s.blocks) <= blocks, "{shown}");
                        assert_eq!(s.line, tiles * s.tile_cost, "{shown}");
                        assert!(
                            s.tile_cost >= units + i64::from(s.start_units) && s.tile_cost >= 1,
                            "{shown}"
                        );
                        let taken = i64::from(s.blocks) * s.share;
                        assert!(taken >= s.line && taken - s.share < s.line, "{shown}");
                    }
                }
            }
        }
    }

    #[test]
    fn few_tiles_are_cut_at_the_same_places() {
        // 8 tiles of 2048 strips on an H200: 16 blocks each.
        let s = divide(8, 2048, 132, (18, 8), false);
        assert_eq!((s.blocks, s.share, s.tile_cost, s.start_units), (128, 128, 2048, 0));
        // 1024 tiles on 528 blocks: two each, 512 blocks.
        let s = divide(1024, 64, 528, (18, 8), false);
        assert_eq!((s.blocks, s.share), (512, 2 * (64 + 18)));
    }
}
