//! Division of work over the CTAs of a launch if the host knows that all lengths are equal:
//! the numbers that `kernels/decode/stream_k.cuh` otherwise works out on the device.

use super::Decode;
use crate::positions::SequenceKeys;
use crate::problem::Problem;
use std::ops::Range;

/// The work of all tiles, and the part of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    /// CTAs.
    pub ctas: u32,
    /// Cost units of all tiles; 0 leaves counting to the kernel.
    pub work_total: i64,
    /// Units per CTA.
    pub work_per_cta: i64,
    /// Units of a tile.
    pub work_per_tile: i64,
    /// Units of a tile that stand for starting it.
    pub tile_start_work: i32,
}

#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "tests without CUDA look at parts of it only")
)]
impl Schedule {
    /// The kernel counts.
    pub fn on_device(decode: &Decode) -> Schedule {
        Schedule {
            ctas: decode.launch.grid[0],
            work_total: 0,
            work_per_cta: 0,
            work_per_tile: 0,
            tile_start_work: decode.start_units,
        }
    }

    /// All sequences have the problem's query length and these keys, and their first row is at
    /// `q_offset`.
    pub fn for_equal_lengths(
        problem: &Problem,
        decode: &Decode,
        q_offset: i64,
        keys: SequenceKeys,
    ) -> Schedule {
        let visible = problem.variant.visible_to_rows(q_offset, problem.query_len, keys);
        Schedule::for_visible_keys(problem, decode, visible)
    }

    /// All rows walk that many entries of their lists; `rows` is the problem as decode sees it.
    pub fn for_equal_lists(rows: &Problem, decode: &Decode, entries: usize) -> Schedule {
        Schedule::for_visible_keys(rows, decode, 0..entries)
    }

    fn for_visible_keys(problem: &Problem, decode: &Decode, visible: Range<usize>) -> Schedule {
        let unit_keys = decode.unit_keys as usize;
        let units = match visible.is_empty() {
            true => 0,
            false => (visible.end - 1) / unit_keys + 1 - visible.start / unit_keys,
        };
        let tiles = super::work::tiles(problem, decode.tile_rows as usize);
        let ctas = i64::from(decode.launch.grid[0] / decode.ctas_per_tile);
        // As `min_units` of decode_shape.cuh.
        let least = match decode.cache.has_codes() {
            true => i64::from(decode.key_groups + 1) / 2,
            false => i64::from(decode.key_groups),
        };
        let schedule = divide(
            tiles as i64,
            units as i64,
            ctas,
            (decode.start_units, least),
            problem.batch_invariant,
        );
        Schedule { ctas: schedule.ctas * decode.ctas_per_tile, ..schedule }
    }
}

/// `tiles` tiles of `units` units over at most `ctas` CTAs. Starting a tile costs as much as some
/// units; no part of one has fewer than `least`, which the groups of warps of a CTA take in one go.
fn divide(
    tiles: i64,
    units: i64,
    ctas: i64,
    (tile_start_work, least): (i32, i64),
    batch_invariant: bool,
) -> Schedule {
    let tile = units + i64::from(tile_start_work);
    let work_total = tiles * tile;
    let even = work_total.div_euclid(ctas) + i64::from(work_total % ctas != 0);
    let by_work_per_cta = |work_per_cta: i64, work_per_tile: i64, tile_start_work| {
        let (work_per_cta, work_total) = (work_per_cta.max(1), tiles * work_per_tile);
        let ctas = (work_total + work_per_cta - 1) / work_per_cta;
        Schedule {
            ctas: ctas.max(1) as u32,
            work_total,
            work_per_cta,
            work_per_tile,
            tile_start_work,
        }
    };
    if batch_invariant || tiles == 0 {
        return by_work_per_cta(even, tile, tile_start_work);
    }
    if tiles <= ctas {
        // Every tile has the same number of CTAs to itself: none starts twice. The last one may
        // take less.
        let parts = (ctas / tiles).min((units / least).max(1));
        let work_per_cta = ((units + parts - 1) / parts).max(1);
        let parts = ((units + work_per_cta - 1) / work_per_cta).max(1);
        return by_work_per_cta(work_per_cta, parts * work_per_cta, 0);
    }
    // Whole tiles for every CTA, where that is as even as cutting them (which starts one tile
    // more in each).
    let whole_tiles = (tiles + ctas - 1) / ctas * tile;
    let cut = even + i64::from(tile_start_work);
    by_work_per_cta(
        if whole_tiles * 25 <= cut * 26 { whole_tiles } else { even },
        tile,
        tile_start_work,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_assigned_and_no_cta_is_idle() {
        for tiles in [1, 2, 7, 8, 100, 132, 133, 512, 1000, 1024] {
            for units in [0, 1, 3, 64, 65, 2048, 100_000] {
                for ctas in [1, 8, 132, 264, 528] {
                    for (tile_start_work, invariant) in [(1, true), (1, false), (18, false)] {
                        let s = divide(tiles, units, ctas, (tile_start_work, 8), invariant);
                        let shown = format!("{tiles} tiles of {units} units on {ctas} ctas: {s:?}");
                        assert!(i64::from(s.ctas) <= ctas, "{shown}");
                        assert_eq!(s.work_total, tiles * s.work_per_tile, "{shown}");
                        assert!(
                            s.work_per_tile >= units + i64::from(s.tile_start_work)
                                && s.work_per_tile >= 1,
                            "{shown}"
                        );
                        let taken = i64::from(s.ctas) * s.work_per_cta;
                        assert!(
                            taken >= s.work_total && taken - s.work_per_cta < s.work_total,
                            "{shown}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn few_tiles_are_cut_at_the_same_places() {
        // 8 tiles of 2048 K tiles on an H200: 16 CTAs each.
        let s = divide(8, 2048, 132, (18, 8), false);
        assert_eq!(
            (s.ctas, s.work_per_cta, s.work_per_tile, s.tile_start_work),
            (128, 128, 2048, 0)
        );
        // 1024 tiles on 528 ctas: two each, 512 ctas.
        let s = divide(1024, 64, 528, (18, 8), false);
        assert_eq!((s.ctas, s.work_per_cta), (512, 2 * (64 + 18)));
    }
}
