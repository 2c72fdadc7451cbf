//! Many query rows (prefill): a tile of keys and values is packed once and used by every row of the block.

use super::address::{Ahead, Fetch, Keys};
use super::compiled::ROWS;
use super::kernel::{Call, Item, Scratch, Shape, Way, load_queries, write_block};
use super::matrix;
use super::pack;
use super::product::{self, Product, STEPS_A_PORTION, run_steps};
use super::softmax;
use super::vector::{Storage, Vector};
use std::ops::Range;

/// The part of the row blocks that fetches the next tile, the last ones, and how many rows they have at least. In a token-major cache a head's rows lie pages apart
/// and share a few sets of the second-level cache with what the blocks use: what is fetched early is gone when it is packed.
const FETCHING_PART: usize = 8;
const FETCHING_ROWS: usize = 8 * ROWS;

/// What else is done on the way through a tile.
pub(super) struct Ends {
    /// This is the first tile: rows are loaded before they need it.
    pub loads: bool,
    /// This is the last one: rows are written after it.
    pub writes: bool,
}

/// Packs the tile that starts at key `first`, of which `valid` is this item's, and takes the item's rows through it. The item's keys end at
/// `end`; the next tile is fetched meanwhile.
///
/// # Safety
/// As [`run_item`](super::kernel::run_item), for an item of one head whose queries are loaded, or will be here.
#[inline(always)]
pub(super) unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (k, v): (&Keys, &Keys),
    (first, valid, end): (usize, Range<usize>, usize),
    ends: &Ends,
) {
    let shape = &call.shape;
    let matrix = PAIRED && item.way == Way::Matrix;
    let start = first + valid.start;
    // SAFETY: `valid` lies inside the tile, for which the scratch has room.
    let (k_ahead, v_ahead) = unsafe {
        let [k_addresses, v_addresses] = scratch.addresses(shape).map(|addresses| &mut *addresses);
        let mut known = (end - start).min(k_addresses.len());
        k.addresses(start, &mut k_addresses[..known]);
        v.addresses(start, &mut v_addresses[..known]);
        if ends.writes {
            known += upcoming_addresses(call, &mut k_addresses[known..], &mut v_addresses[known..]);
        }
        let (k_tile, k_ahead) = k_addresses[..known].split_at(valid.len());
        let (v_tile, v_ahead) = v_addresses[..known].split_at(valid.len());
        let depth = key_depth::<PAIRED>(shape);
        match PAIRED {
            true => {
                pack::keys::<V, f32>(depth, k_tile, valid.clone(), scratch.keys, scratch.staging);
                pack::paired_values::<V>(shape, v_tile, valid.clone(), scratch.values);
                if matrix {
                    matrix::clear_values::<V>(shape, &valid, scratch.values);
                }
            }
            false => {
                pack::keys::<V, E>(depth, k_tile, valid.clone(), scratch.keys, scratch.staging);
                pack::values::<V, E>(shape, v_tile, valid.start, scratch.values);
            }
        }
        (
            Ahead { rows: k_ahead, row_bytes: shape.head_dim * size_of::<E>() },
            Ahead { rows: v_ahead, row_bytes: shape.value_dim * size_of::<E>() },
        )
    };
    let mut row = 0;
    let height = if matrix { matrix::ROWS } else { ROWS };
    // Keys of the next tile are fetched between the steps of the products that make scores, values between those that make the output.
    let blocks = item.rows.div_ceil(height);
    let panel = V::LANES * V::COLUMNS;
    let fetching = blocks.div_ceil(FETCHING_PART).max(FETCHING_ROWS.div_ceil(height)).min(blocks);
    let portions = |columns: usize, depth: usize| match matrix {
        true => fetching * matrix::portions(columns),
        false => fetching * columns.div_ceil(panel) * depth.div_ceil(STEPS_A_PORTION),
    };
    let idle = (Fetch::none(), Fetch::none());
    let fetches = (
        Fetch::new(k_ahead, portions(valid.len(), key_depth::<PAIRED>(shape))),
        Fetch::new(v_ahead, portions(shape.value_dim, valid.len().div_ceil(keys_a_step::<PAIRED>()))),
    );
    for block in 0..blocks {
        // Register tiles of nearly equal height: 9 rows are 5 and 4, not 6 and 3. Those of the matrix unit are whole.
        let rows = match matrix {
            true => height.min(item.rows - row),
            false => (item.rows - row).div_ceil(blocks - block),
        };
        // SAFETY: rows row..row + rows are rows of the block.
        unsafe {
            if ends.loads {
                load_queries::<V, E, PAIRED>(call, item, scratch, row..row + rows);
            }
            let fetches = if block + fetching < blocks { &idle } else { &fetches };
            let place = (first, valid.clone());
            match matrix {
                true => matrix::attend_rows::<V>(call, item, scratch, row..row + rows, place, fetches),
                false => attend_rows::<V, PAIRED>(call, item, scratch, row..row + rows, place, fetches),
            }
            if ends.writes {
                write_block::<V>(call, item, scratch.output, scratch.states, row..row + rows);
            }
        };
        row += rows;
    }
}

/// The addresses of the keys and the values that the next item, whoever gets it, packs first, as far as there is room; and how many they are.
fn upcoming_addresses(call: &Call, k_addresses: &mut [*const u8], v_addresses: &mut [*const u8]) -> usize {
    let Some(item) = call.schedule.peek() else { return 0 };
    if !matches!(item.way, Way::Tile | Way::Matrix) || item.keys.is_empty() {
        return 0;
    }
    let start = item.keys.start.max(item.splits.start * call.plan.split().keys);
    let tile_end = (start + 1).next_multiple_of(call.shape.tile_keys);
    let count = (item.keys.end.min(tile_end) - start).min(k_addresses.len());
    for (tensor, addresses) in [(&call.inputs.k, k_addresses), (&call.inputs.v, v_addresses)] {
        let keys = Keys::of(call.inputs, tensor, &item.sequence, item.heads.start);
        keys.addresses(start, &mut addresses[..count]);
    }
    count
}

/// Steps of the product that makes scores.
#[inline(always)]
pub(super) fn key_depth<const PAIRED: bool>(shape: &Shape) -> usize {
    if PAIRED { shape.head_dim / 2 } else { shape.head_dim }
}

/// Keys in a step of the product that makes the output.
pub(super) const fn keys_a_step<const PAIRED: bool>() -> usize {
    if PAIRED { 2 } else { 1 }
}

/// What these rows see of the tile's valid keys, relative to its first one.
///
/// # Safety
/// The rows are rows of the scratch, and loaded.
#[inline(always)]
pub(super) unsafe fn seen_by(
    scratch: &Scratch,
    rows: &Range<usize>,
    first: usize,
    valid: &Range<usize>,
) -> Range<usize> {
    // SAFETY: the caller's word.
    let ranges = unsafe { std::slice::from_raw_parts(scratch.ranges.add(rows.start), rows.len()) };
    let mut seen = valid.end..valid.start;
    for range in ranges {
        let visible = range.within(first, valid);
        if !visible.is_empty() {
            seen = seen.start.min(visible.start)..seen.end.max(visible.end);
        }
    }
    seen
}

/// Scores, softmax and output of at most ROWS rows against the packed tile.
#[inline(always)]
unsafe fn attend_rows<V: Vector, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    rows: Range<usize>,
    (first, valid): (usize, Range<usize>),
    (k_fetch, v_fetch): &(Fetch, Fetch),
) {
    let shape = &call.shape;
    let panel = V::LANES * V::COLUMNS;
    // SAFETY: the rows are rows of the block; panels lie inside the packed tile.
    unsafe {
        let seen = seen_by(scratch, &rows, first, &valid);
        if seen.is_empty() {
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
                skipped: 0,
                c: scratch.scores.add(start),
                c_stride: shape.tile_keys,
                factors: std::ptr::null(),
                scale: call.score_factor,
                fetch: k_fetch,
            };
            product::run::<V>(&call.compiled.scores, rows.len(), columns, work);
            start += panel;
        }
        let mut factors = [1.0f32; ROWS];
        let scores = |row: usize| scratch.scores.add((row - rows.start) * shape.tile_keys);
        let places = (first, &valid, computed);
        softmax::item_rows(call, item, scratch, rows.clone(), places, (scores, &mut factors));
        // Steps of the product that makes the output: keys, or pairs of keys.
        let keys_a_step = keys_a_step::<PAIRED>();
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
                skipped: steps.start % run_steps::<PAIRED>(),
                c: scratch.output.add(rows.start * shape.padded_value_dim + start),
                c_stride: shape.padded_value_dim,
                factors: factors.as_ptr(),
                scale: 1.0,
                fetch: v_fetch,
            };
            product::run::<V>(&call.compiled.output, rows.len(), width / V::LANES, work);
            start += panel;
        }
    }
}
