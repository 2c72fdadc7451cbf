//! Some dozens of query rows (verifying drafted tokens): too many for memory alone to set the pace, too few to pay for packing whole tiles.
//!
//! Scores are computed the other way round: a few keys, where they lie or copied row by row, are the product's A, and the queries, transposed once
//! an item, its B. A small transposition then turns the scores, not the keys. As where rows are few, an item takes several heads together and
//! fetches in the order of memory. Every element is the same sum of runs as in a packed tile ([`tile`](super::tile)): the bits are the
//! same, and which of the two ways runs is a matter of speed alone.

use super::address::{Ahead, Fetch, Keys};
use super::compiled::{ROWS, cover};
use super::kernel::{Call, Item, Scratch};
use super::pack;
use super::product::{self, Product, RUN, STEPS_A_PORTION, run_steps};
use super::softmax;
use super::stream::{MAX_BLOCK, Walk, Weighted};
use super::tile::{key_depth, keys_a_step};
use super::vector::{Storage, Vector};
use crate::problem::{MAX_HEAD_DIM, Problem};
use crate::select::Choice;
use std::ops::Range;

/// The most query rows of a head.
pub(super) const MAX_ROWS: usize = 64;

/// The most query rows of all heads of an item, counted in whole vectors of the widest level.
pub(super) const ITEM_ROWS: usize = 256;

/// Tokens a block of keys, and of values: the next block is fetched while one is computed.
const TOKENS_A_BLOCK: usize = 16;
/// Values make whole runs of the product.
const VALUES_A_BLOCK: usize = RUN;

/// Floats of the staging block: a register tile's keys.
pub(super) const STAGING: usize = ROWS * MAX_HEAD_DIM;

/// Floats of the scores of a block of keys.
pub(super) const TURNED: usize = TOKENS_A_BLOCK * MAX_ROWS;

/// Rows of a head as they are laid out here.
fn padded(rows: usize) -> usize {
    rows.next_multiple_of(16)
}

/// Heads of `rows` rows that one item takes, of `heads` in all: nearly equal shares.
pub(super) fn heads_an_item(rows: usize, heads: usize, choice: &Choice) -> usize {
    let most = (ITEM_ROWS.min(choice.block_rows) / padded(rows.max(1))).max(1);
    heads.div_ceil(heads.div_ceil(most))
}

/// The most rows of all heads of an item, counted so.
pub(super) fn item_rows(problem: &Problem, choice: &Choice) -> usize {
    let rows = problem.query_len.saturating_mul(problem.group()).min(MAX_ROWS);
    ITEM_ROWS.min(choice.block_rows).min(problem.kv_heads.saturating_mul(padded(rows)))
}

/// Transposes the item's queries, which are loaded, to panels in the place of packed keys.
///
/// # Safety
/// As [`run_item`](super::kernel::run_item), for an item of at most [`MAX_ROWS`] rows a head and [`ITEM_ROWS`] in all.
#[inline(always)]
pub(super) unsafe fn turn_queries<V: Vector, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
) {
    let shape = &call.shape;
    let depth = key_depth::<PAIRED>(shape);
    for head in 0..item.heads.len() {
        let mut rows = [std::ptr::null::<u8>(); MAX_ROWS];
        for (i, row) in rows[..item.rows].iter_mut().enumerate() {
            *row = scratch.queries.wrapping_add((head * item.rows + i) * shape.padded_head_dim).cast();
        }
        let to = turned_queries(call, item, scratch, head);
        // SAFETY: the rows hold `depth` floats or more; the place of packed keys has room for ITEM_ROWS of them.
        unsafe { pack::keys::<V, f32>(depth, &rows[..item.rows], 0..item.rows, to, scratch.staging) };
    }
}

/// Where the transposed queries of a head lie.
fn turned_queries(call: &Call, item: &Item, scratch: &Scratch, head: usize) -> *mut f32 {
    scratch.keys.wrapping_add(head * padded(item.rows) * call.shape.padded_head_dim)
}

/// Takes the item's rows through the tile that starts at key `first`, of which `valid` is this item's; the item's keys end at `end`.
///
/// # Safety
/// As [`turn_queries`], which has run.
#[inline(always)]
pub(super) unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (k, v): (&Keys, &Keys),
    (first, valid, end): (usize, Range<usize>, usize),
) {
    let shape = &call.shape;
    // SAFETY: `valid` lies inside the tile, for which the scratch has room; rows are the item's.
    unsafe {
        let start = first + valid.start;
        let [k_addresses, v_addresses] = scratch.addresses(shape).map(|addresses| &mut *addresses);
        k.addresses_ahead(start..end, k_addresses);
        v.addresses_ahead(start..end, v_addresses);
        let size = (valid.len(), item.heads.len());
        all_scores::<V, E, PAIRED>(call, item, scratch, &Walk::new(k, k_addresses, size), valid.start);
        let mut factors = [1.0f32; ITEM_ROWS];
        let scores = |row| scores_of(call, item, scratch, row);
        let computed = valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES);
        let places = (first, &valid, computed);
        softmax::item_rows(call, item, scratch, 0..item.all_rows(), places, (scores, &mut factors));
        all_output::<V, E, PAIRED>(
            call,
            item,
            scratch,
            (&Walk::new(v, v_addresses, size), &valid),
            &mut factors,
        );
    }
}

/// The scores of one of the item's rows.
fn scores_of(call: &Call, item: &Item, scratch: &Scratch, row: usize) -> *mut f32 {
    let place = row / item.rows * padded(item.rows) + row % item.rows;
    scratch.scores.wrapping_add(place * call.shape.tile_keys)
}

/// All scores of the tile. The walk's first key is `first` in the tile.
#[inline(always)]
unsafe fn all_scores<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    walk: &Walk,
    first: usize,
) {
    let mut rows = [std::ptr::null(); MAX_BLOCK];
    let mut start = 0;
    while start < walk.tokens {
        // Blocks end at multiples of their length in the tile.
        let end = walk.tokens.min((first + start + 1).next_multiple_of(TOKENS_A_BLOCK) - first);
        let mut upcoming = walk.ahead(&(start..end));
        for head in 0..walk.heads {
            let ahead =
                Ahead { rows: upcoming.share(&mut rows), row_bytes: call.shape.head_dim * size_of::<E>() };
            // SAFETY: passed on.
            unsafe { scores::<V, E, PAIRED>(call, item, scratch, walk, (head, first, start..end), ahead) };
        }
        start = end;
    }
}

/// The floats from a key to the next, if the keys can be read as floats (or pairs in their place) where they lie.
#[inline(always)]
fn in_place<E: Storage, const PAIRED: bool>(keys: &[*const u8], offset: isize) -> Option<usize> {
    const FLOAT: usize = size_of::<f32>();
    let first = keys[0] as usize;
    let stride = keys.get(1).map_or(0, |&second| (second as usize).wrapping_sub(first));
    let even = keys.windows(2).all(|pair| (pair[1] as usize).wrapping_sub(pair[0] as usize) == stride);
    let floats = PAIRED || size_of::<E>() == FLOAT;
    let aligned = first.wrapping_add_signed(offset).is_multiple_of(FLOAT) && stride.is_multiple_of(FLOAT);
    (even && floats && aligned && stride <= isize::MAX as usize / ROWS).then_some(stride / FLOAT)
}

/// The scores of a head against a block of keys.
#[inline(always)]
unsafe fn scores<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    walk: &Walk,
    (head, first, tokens): (usize, usize, Range<usize>),
    ahead: Ahead,
) {
    let shape = &call.shape;
    let depth = key_depth::<PAIRED>(shape);
    let panel = V::LANES * V::COLUMNS;
    let queries = turned_queries(call, item, scratch, head);
    let blocks = tokens.len().div_ceil(ROWS);
    let fetch = Fetch::new(ahead, blocks * item.rows.div_ceil(panel) * depth.div_ceil(STEPS_A_PORTION));
    // Where the block's first place is in the tile, and the first key in the block.
    let place = (first + tokens.start) / TOKENS_A_BLOCK * TOKENS_A_BLOCK;
    let skipped = first + tokens.start - place;
    // SAFETY: keys of the tile, rows of the item, places in the scratch. Keys that are read in place are aligned floats, or pairs in their
    // place, an even distance apart; others are copied row by row, ROWS of them at most.
    unsafe {
        let mut token = tokens.start;
        for block in 0..blocks {
            let count = (tokens.end - token).div_ceil(blocks - block);
            let offset = walk.head_offset(head) as isize;
            let keys = &walk.addresses[token..token + count];
            let (a, a_stride) = match in_place::<E, PAIRED>(keys, offset) {
                Some(stride) => (keys[0].wrapping_offset(offset).cast::<f32>(), stride),
                None => {
                    for (i, address) in keys.iter().enumerate() {
                        let from = address.wrapping_offset(offset);
                        let to = scratch.staging.add(i * shape.padded_head_dim);
                        match PAIRED {
                            true => pack::widen_row::<V, f32>(from.cast(), to, depth, depth),
                            false => pack::widen_row::<V, E>(from.cast(), to, depth, depth),
                        }
                    }
                    (scratch.staging.cast_const(), shape.padded_head_dim)
                }
            };
            let mut row = 0;
            while row < item.rows {
                let width = pack::panel_width::<V>(row, item.rows);
                let work = Product {
                    a,
                    a_stride,
                    b: queries.add(row * pack::padded_depth(depth)),
                    b_stride: width,
                    depth,
                    skipped: 0,
                    c: scratch.turned.add((skipped + token - tokens.start) * MAX_ROWS + row),
                    c_stride: MAX_ROWS,
                    factors: std::ptr::null(),
                    scale: call.score_factor,
                    fetch: &fetch,
                };
                product::run::<V>(&call.compiled.scores, count, width / V::LANES, work);
                row += panel;
            }
            token += count;
        }
        let to = scores_of(call, item, scratch, head * item.rows).add(place);
        for key in (0..TOKENS_A_BLOCK).step_by(V::LANES) {
            for row in (0..item.rows).step_by(V::LANES) {
                let mut from = [std::ptr::null::<f32>(); 16];
                for (i, from) in from.iter_mut().enumerate().take(V::LANES) {
                    *from = scratch.turned.add((key + i) * MAX_ROWS + row);
                }
                V::transpose(&from, to.add(row * shape.tile_keys + key), shape.tile_keys);
            }
        }
    }
}

/// Adds the tile's weighted values to all rows' outputs, block by block. The factors are overwritten with ones once they have been applied.
#[inline(always)]
unsafe fn all_output<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (walk, valid): (&Walk, &Range<usize>),
    factors: &mut [f32; ITEM_ROWS],
) {
    let mut rows = [std::ptr::null(); MAX_BLOCK];
    let mut start = 0;
    while start < walk.tokens {
        let first = valid.start;
        let end = walk.tokens.min((first + start + 1).next_multiple_of(VALUES_A_BLOCK) - first);
        let mut upcoming = walk.ahead(&(start..end));
        for head in 0..walk.heads {
            let ahead =
                Ahead { rows: upcoming.share(&mut rows), row_bytes: call.shape.value_dim * size_of::<E>() };
            let factors = &factors[head * item.rows..(head + 1) * item.rows];
            // SAFETY: passed on.
            unsafe {
                output::<V, E, PAIRED>(call, item, scratch, walk, (head, first, start..end), (ahead, factors))
            };
        }
        *factors = [1.0; ITEM_ROWS];
        start = end;
    }
}

/// Adds a block's weighted values to a head's outputs.
#[inline(always)]
unsafe fn output<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    walk: &Walk,
    (head, first, tokens): (usize, usize, Range<usize>),
    (ahead, factors): (Ahead, &[f32]),
) {
    let mut addresses = [std::ptr::null(); VALUES_A_BLOCK];
    let addresses = &mut addresses[..tokens.len()];
    for (address, from) in addresses.iter_mut().zip(&walk.addresses[tokens.clone()]) {
        *address = from.wrapping_offset(walk.head_offset(head) as isize);
    }
    let values = (&*addresses, first + tokens.start..first + tokens.end);
    let whole = call.shape.value_dim.is_multiple_of(V::LANES);
    // SAFETY: passed on.
    unsafe {
        match E::INDEX == f32::INDEX && whole {
            true => output_in_place::<V, E>(call, item, scratch, (head, values), (ahead, factors)),
            false => output_packed::<V, E, PAIRED>(call, item, scratch, (head, values), (ahead, factors)),
        }
    }
}

/// [`output`] of values that are read where they lie. They come from the second-level cache as fast as the product takes them.
#[inline(always)]
unsafe fn output_in_place<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (head, (addresses, keys)): (usize, (&[*const u8], Range<usize>)),
    (ahead, factors): (Ahead, &[f32]),
) {
    let shape = &call.shape;
    let blocks = item.rows.div_ceil(ROWS);
    let mut widths = 0;
    cover(shape.value_dim / V::LANES, V::COLUMNS, |_, _| widths += 1);
    let share = ahead.rows.len().div_ceil(blocks * widths);
    let (mut row, mut asked) = (0, 0);
    for block in 0..blocks {
        let rows = (item.rows - row).div_ceil(blocks - block);
        cover(shape.value_dim / V::LANES, V::COLUMNS, |width, vector| {
            let column = vector * V::LANES;
            let end = ahead.rows.len().min(asked + share);
            // SAFETY: rows of the item, columns of the head dim.
            unsafe {
                let work = Weighted {
                    probabilities: scores_of(call, item, scratch, head * item.rows + row).add(keys.start),
                    probability_stride: shape.tile_keys,
                    values: addresses,
                    offset: (column * size_of::<E>()) as i64,
                    ahead: Ahead { rows: &ahead.rows[asked..end], row_bytes: ahead.row_bytes },
                    output: scratch.output.add((head * item.rows + row) * shape.padded_value_dim + column),
                    output_stride: shape.padded_value_dim,
                    factors: factors[row..].as_ptr(),
                };
                call.compiled.weighted[E::INDEX][rows - 1][width](&work);
            }
            asked = end;
        });
        row += rows;
    }
}

/// [`output`] of values that are packed first.
#[inline(always)]
unsafe fn output_packed<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (head, (addresses, keys)): (usize, (&[*const u8], Range<usize>)),
    (ahead, factors): (Ahead, &[f32]),
) {
    let shape = &call.shape;
    let panel = V::LANES * V::COLUMNS;
    // SAFETY: values of the tile, rows of the item, places in the scratch.
    unsafe {
        match PAIRED {
            true => pack::paired_values::<V>(shape, addresses, keys.clone(), scratch.values),
            false => pack::values::<V, E>(shape, addresses, keys.start, scratch.values),
        }
        let blocks = item.rows.div_ceil(ROWS);
        let keys_a_step = keys_a_step::<PAIRED>();
        let steps = keys.start / keys_a_step..keys.end.div_ceil(keys_a_step);
        let portions = blocks * shape.value_dim.div_ceil(panel) * steps.len().div_ceil(STEPS_A_PORTION);
        let fetch = Fetch::new(ahead, portions);
        let mut row = 0;
        for block in 0..blocks {
            let rows = (item.rows - row).div_ceil(blocks - block);
            let mut start = 0;
            while start < shape.value_dim {
                let width = pack::panel_width::<V>(start, shape.value_dim);
                let work = Product {
                    a: scores_of(call, item, scratch, head * item.rows + row).add(steps.start),
                    a_stride: shape.tile_keys,
                    b: scratch.values.add(start * (shape.tile_keys / keys_a_step) + steps.start * width),
                    b_stride: width,
                    depth: steps.len(),
                    skipped: steps.start % run_steps::<PAIRED>(),
                    c: scratch.output.add((head * item.rows + row) * shape.padded_value_dim + start),
                    c_stride: shape.padded_value_dim,
                    factors: factors[row..].as_ptr(),
                    scale: 1.0,
                    fetch: &fetch,
                };
                product::run::<V>(&call.compiled.output, rows, width / V::LANES, work);
                start += panel;
            }
            row += rows;
        }
    }
}
