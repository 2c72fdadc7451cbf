//! Many query rows (prefill): a tile of keys and values is packed once and used by every row of the block.

use super::address::Keys;
use super::compiled::ROWS;
use super::kernel::{Call, Item, Scratch, Shape};
use super::pack;
use super::product::{self, Product};
use super::softmax::RowScores;
use super::vector::{Storage, Vector};
use std::ops::Range;

/// Packs the tile that starts at key `first`, of which `valid` is this item's, and takes the item's rows through it.
///
/// # Safety
/// As [`run_item`](super::kernel::run_item), for an item of one head whose queries are loaded.
#[inline(always)]
pub(super) unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (k, v): (&Keys, &Keys),
    (first, valid): (usize, Range<usize>),
) {
    let shape = &call.shape;
    // SAFETY: `valid` lies inside the tile, for which the scratch has room.
    unsafe {
        let addresses = std::slice::from_raw_parts_mut(scratch.addresses, valid.len());
        k.addresses(first + valid.start, addresses);
        let depth = key_depth::<PAIRED>(shape);
        match PAIRED {
            true => pack::keys::<V, f32>(depth, addresses, valid.clone(), scratch.keys, scratch.staging),
            false => pack::keys::<V, E>(depth, addresses, valid.clone(), scratch.keys, scratch.staging),
        }
        v.addresses(first + valid.start, addresses);
        match PAIRED {
            true => pack::paired_values::<V>(shape, addresses, valid.clone(), scratch.values),
            false => pack::values::<V, E>(shape, addresses, valid.start, scratch.values),
        }
    }
    let mut row = 0;
    // Register tiles of nearly equal height: 9 rows are 5 and 4, not 6 and 3.
    let blocks = item.rows.div_ceil(ROWS);
    for block in 0..blocks {
        let rows = (item.rows - row).div_ceil(blocks - block);
        // SAFETY: rows row..row + rows are rows of the block.
        unsafe { attend_rows::<V, PAIRED>(call, item, scratch, row..row + rows, (first, valid.clone())) };
        row += rows;
    }
}

/// Steps of the product that makes scores.
#[inline(always)]
fn key_depth<const PAIRED: bool>(shape: &Shape) -> usize {
    if PAIRED { shape.head_dim / 2 } else { shape.head_dim }
}

/// Scores, softmax and output of at most ROWS rows against the packed tile.
#[inline(always)]
unsafe fn attend_rows<V: Vector, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    rows: Range<usize>,
    (first, valid): (usize, Range<usize>),
) {
    let (shape, group) = (&call.shape, call.problem.group());
    let panel = V::LANES * V::COLUMNS;
    // SAFETY: the rows are rows of the block; panels lie inside the packed tile.
    unsafe {
        let ranges = std::slice::from_raw_parts(scratch.ranges.add(rows.start), rows.len());
        // What these few rows see of the tile, relative to its first key.
        let mut seen = valid.end..valid.start;
        for range in ranges {
            let visible = range.within(first, &valid);
            if !visible.is_empty() {
                seen = seen.start.min(visible.start)..seen.end.max(visible.end);
            }
        }
        if seen.start >= seen.end {
            return;
        }
        let computed = seen.start / panel * panel..seen.end.next_multiple_of(V::LANES);
        let depth = key_depth::<PAIRED>(shape);
        let mut start = computed.start;
        while start < computed.end {
            let columns = (computed.end - start).min(panel) / V::LANES;
            let work = Product {
                a: scratch.queries.add(rows.start * shape.padded_head_dim),
                a_stride: shape.padded_head_dim,
                b: scratch.keys.add(start * pack::padded_depth(depth)),
                b_stride: pack::panel_width::<V>(start, valid.end),
                depth,
                c: scratch.scores.add(start),
                c_stride: shape.tile_keys,
                factors: std::ptr::null(),
                scale: call.query_factor,
            };
            product::run::<V>(&call.compiled.scores, rows.len(), columns, work);
            start += panel;
        }
        let mut factors = [1.0f32; ROWS];
        for (i, range) in ranges.iter().enumerate() {
            let (token, head) = item.place(rows.start + i, group);
            let row = RowScores {
                scores: scratch.scores.add(i * shape.tile_keys),
                computed: computed.clone(),
                visible: range.within(first, &valid),
                tile: first,
                token,
                head,
            };
            let state = &mut *scratch.states.add(rows.start + i);
            factors[i] = (call.compiled.softmax_row_packed)(call, &item.sequence, &row, state);
        }
        // Steps of the product that makes the output: keys, or pairs of keys.
        let keys_a_step = if PAIRED { 2 } else { 1 };
        let steps = seen.start / keys_a_step..seen.end.div_ceil(keys_a_step);
        let mut start = 0;
        while start < shape.value_dim {
            let width = pack::panel_width::<V>(start, shape.value_dim);
            let work = Product {
                a: scratch.scores.add(steps.start),
                a_stride: shape.tile_keys,
                b: scratch.values.add(start * (shape.tile_keys / keys_a_step) + steps.start * width),
                b_stride: width,
                depth: steps.len(),
                c: scratch.output.add(rows.start * shape.padded_value_dim + start),
                c_stride: shape.padded_value_dim,
                factors: factors.as_ptr(),
                scale: 1.0,
            };
            product::run::<V>(&call.compiled.output, rows.len(), width / V::LANES, work);
            start += panel;
        }
    }
}
