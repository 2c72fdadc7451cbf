//! Scores, softmax and output of a few dozen rows on the matrix unit ([`amx`]): what [`tile`](super::tile) does with its
//! register tiles, from the same packed tiles of bf16 pairs.
//!
//! A row's bits do not depend on its neighbours: keys are taken in steps that start at multiples of [`DEPTH`] in the tile, and what a row
//! does not see is added as 0.

use super::address::Fetch;
use super::amx;
use super::kernel::{Call, Item, Scratch, Shape};
use super::pack;
use super::softmax;
use super::tile::{key_depth, seen_by};
use super::vector::Vector;
use std::ops::Range;

/// Rows, and columns of 32 bits, of a tile.
pub(super) const TILE: usize = 16;

/// Elements of bf16 that a row of A and a column of B meet in, in one instruction. It adds up its own products before C joins them: a run.
pub(super) const DEPTH: usize = 32;

/// Rows that are taken together: two tiles. The scratch holds whole tiles of rows: a block's last rows may be nobody's, and computed all the same.
pub(super) const ROWS: usize = 2 * TILE;

/// Columns of a product: two tiles.
const COLUMNS: usize = 2 * TILE;

/// `C = A B`, or `C += A B`, for up to two tiles of rows and two of columns.
// Elsewhere nobody reads it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[derive(Clone, Copy)]
pub(super) struct TileProduct {
    /// Rows of bf16, their distance in bytes.
    pub a: *const u8,
    pub a_stride: usize,
    /// Rows of pairs of bf16: pair p of column n belongs to elements 2 p and 2 p + 1 of the rows of A.
    pub b: *const u8,
    pub b_stride: usize,
    /// How often [`DEPTH`] elements.
    pub steps: usize,
    /// Rows of f32.
    pub c: *mut u8,
    pub c_stride: usize,
    pub accumulate: bool,
}

/// Products between which a tile of `count` keys, or dims of values, is fetched for a block of rows.
pub(super) fn portions(count: usize) -> usize {
    count.div_ceil(COLUMNS)
}

/// Clears the packed values that share a step with valid ones but are not valid themselves: their probabilities are 0, but 0 times anything is
/// not.
///
/// # Safety
/// The scratch holds a packed tile, `valid` lies inside.
pub(super) unsafe fn clear_values<V: Vector>(shape: &Shape, valid: &Range<usize>, values: *mut f32) {
    let pairs = valid.start / 2..valid.end.div_ceil(2);
    let whole = valid.start / DEPTH * TILE..valid.end.div_ceil(DEPTH) * TILE;
    let mut start = 0;
    while start < shape.value_dim {
        let width = pack::panel_width::<V>(start, shape.value_dim);
        for cleared in [whole.start..pairs.start, pairs.end..whole.end] {
            // SAFETY: pairs of the tile, whose keys are a multiple of DEPTH.
            unsafe {
                let to = values.add(start * (shape.tile_keys / 2) + cleared.start * width);
                to.write_bytes(0, cleared.len() * width);
            }
        }
        start += V::LANES * V::COLUMNS;
    }
}

/// Takes at most [`ROWS`] rows through the packed tile.
///
/// # Safety
/// As [`run_item`](super::kernel::run_item), for rows of the item, of which the first is a multiple of [`ROWS`]; tiles are configured.
#[inline(always)]
pub(super) unsafe fn attend_rows<V: Vector>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    rows: Range<usize>,
    (first, valid): (usize, Range<usize>),
    (k_fetch, v_fetch): &(Fetch, Fetch),
) {
    let shape = &call.shape;
    let panel = V::LANES * V::COLUMNS;
    let height = rows.len().div_ceil(TILE);
    const FLOAT: usize = size_of::<f32>();
    // SAFETY: the rows are rows of the block; panels lie inside the packed tile; tiles of rows lie inside the scratch.
    unsafe {
        let seen = seen_by(scratch, &rows, first, &valid);
        if seen.is_empty() {
            return;
        }
        // What lies beyond the packed keys is hidden before anybody looks at it.
        let computed = seen.start / DEPTH * DEPTH..seen.end.next_multiple_of(DEPTH);
        let packed = computed.end.min(valid.end.next_multiple_of(TILE));
        let depth = pack::padded_depth(key_depth::<true>(shape));
        for start in (computed.start..packed).step_by(COLUMNS) {
            let in_panel = start % panel;
            let width = pack::panel_width::<V>(start - in_panel, valid.end);
            let work = TileProduct {
                a: scratch.queries.add(rows.start * shape.padded_head_dim).cast(),
                a_stride: shape.padded_head_dim * FLOAT,
                b: scratch.keys.add((start - in_panel) * depth + in_panel).cast(),
                b_stride: width * FLOAT,
                steps: depth / TILE,
                c: scratch.scores.add(start).cast(),
                c_stride: shape.tile_keys * FLOAT,
                accumulate: false,
            };
            amx::product(&work, height, (packed - start).min(COLUMNS).div_ceil(TILE));
            k_fetch.portion::<V>();
        }
        let scores = |row: usize| scratch.scores.add((row - rows.start) * shape.tile_keys);
        let mut factors = [1.0f32; ROWS];
        let places = (first, &valid, computed.clone());
        softmax::item_rows(call, item, scratch, rows.clone(), places, (scores, &mut factors));
        let output = scratch.output.add(rows.start * shape.padded_value_dim);
        for (row, &factor) in factors.iter().enumerate().take(rows.len()) {
            if factor != 1.0 {
                for dim in (0..shape.padded_value_dim).step_by(V::LANES) {
                    let sum = output.add(row * shape.padded_value_dim + dim);
                    V::load(sum).mul(V::splat(factor)).store(sum);
                }
            }
        }
        for start in (0..shape.value_dim).step_by(COLUMNS) {
            let in_panel = start % panel;
            let width = pack::panel_width::<V>(start - in_panel, shape.value_dim);
            let pairs = (start - in_panel) * (shape.tile_keys / 2) + computed.start / 2 * width;
            let work = TileProduct {
                a: scratch.scores.add(computed.start / 2).cast(),
                a_stride: shape.tile_keys * FLOAT,
                b: scratch.values.add(pairs + in_panel).cast(),
                b_stride: width * FLOAT,
                steps: computed.len() / DEPTH,
                c: output.add(start).cast(),
                c_stride: shape.padded_value_dim * FLOAT,
                accumulate: true,
            };
            amx::product(&work, height, (width - in_panel).min(COLUMNS) / TILE);
            v_fetch.portion::<V>();
        }
    }
}
