//! Many query rows (prefill): a K tile and a V tile are packed once and used by all rows of the
//! block.

use super::address::KeyAddresses;
use super::amx_tile;
use super::call::{Call, ItemContext};
use super::item::{KeyWalk, TileSpan};
use super::operand::Operand;
use super::pack::{self, score_depth};
use super::rows::{load_queries, softmax_rows, visible_keys, write_output};
use crate::cpu::product::prefetch::{PrefetchQueue, PrefetchRows, TilePrefetch};
use crate::cpu::product::register_tile::{self, Product, STEPS_PER_PREFETCH};
use crate::cpu::product::register_tile::{steps_per_chain, terms_per_step};
use crate::cpu::product::{ROWS, amx};
use crate::cpu::vector::{Storage, Vector};
use std::ops::Range;

/// The next tile is prefetched by the last row blocks of this one: 1 / PREFETCH_FRACTION of them,
/// but at least MIN_PREFETCH_ROWS rows. In a token-major cache a head's rows are pages apart and
/// compete with the block's working set for a few L2 sets: rows that are prefetched early are
/// evicted before they are packed.
const PREFETCH_FRACTION: usize = 8;
const MIN_PREFETCH_ROWS: usize = 8 * ROWS;

/// Optional steps of a tile.
pub struct TileFlags {
    /// First tile: load each row block's queries before it.
    pub load_queries: bool,
    /// Last tile: write each row block's output after it.
    pub write_output: bool,
}

/// Packs the valid keys and values of a tile, and takes the item's rows through it. Meanwhile
/// the next tile is prefetched.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for an item of one head whose queries are loaded here
/// or before.
#[inline(always)]
pub unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    k: &Operand,
    v: &Operand,
    span: &TileSpan,
    flags: &TileFlags,
) {
    let ItemContext { item, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let use_amx = PAIRED && item.walk == KeyWalk::Amx;
    // SAFETY: `valid` lies inside the tile, for which the scratch has room.
    let (k_next, v_next) =
        unsafe { pack_tile::<V, E, PAIRED>(ctx, k, v, span, flags.write_output) };
    let max_rows = if use_amx { amx::ROWS } else { ROWS };
    let blocks = item.rows.div_ceil(max_rows);
    let panel = V::LANES * V::TILE_VECTORS;
    let prefetching_blocks =
        blocks.div_ceil(PREFETCH_FRACTION).max(MIN_PREFETCH_ROWS.div_ceil(max_rows)).min(blocks);
    let portions = |columns: usize, depth: usize| match use_amx {
        true => prefetching_blocks * amx_tile::prefetch_portions(columns),
        false => prefetching_blocks * columns.div_ceil(panel) * depth.div_ceil(STEPS_PER_PREFETCH),
    };
    let keys = span.valid.len();
    let (k_depth, v_depth) =
        (score_depth::<PAIRED>(sizes), keys.div_ceil(terms_per_step::<PAIRED>()));
    let no_prefetch = TilePrefetch { k: PrefetchQueue::empty(), v: PrefetchQueue::empty() };
    let prefetch = TilePrefetch {
        k: PrefetchQueue::new(k_next, portions(keys, k_depth)),
        v: PrefetchQueue::new(v_next, portions(sizes.value_dim, v_depth)),
    };
    let mut row = 0;
    for block in 0..blocks {
        // Register tiles of nearly equal height: 9 rows are 5 and 4, not 6 and 3. AMX tiles are
        // full.
        let rows = match use_amx {
            true => max_rows.min(item.rows - row),
            false => (item.rows - row).div_ceil(blocks - block),
        };
        let rows = row..row + rows;
        // SAFETY: `rows` are rows of the item.
        unsafe {
            if flags.load_queries {
                load_queries::<V, E, PAIRED>(ctx, rows.clone());
            }
            let prefetch = match block + prefetching_blocks < blocks {
                true => &no_prefetch,
                false => &prefetch,
            };
            match use_amx {
                true => amx_tile::attend_rows::<V>(ctx, rows.clone(), span, prefetch),
                false => attend_rows::<V, PAIRED>(ctx, rows.clone(), span, prefetch),
            }
            if flags.write_output {
                write_output::<V>(ctx, scratch.output, scratch.states, rows.clone());
            }
        };
        row = rows.end;
    }
}

/// Packs the tile's keys and values. Returns the rows of the next tile, to be prefetched: if this
/// is the item's last tile, the first tile of the next item.
///
/// # Safety
/// As [`attend_tile`].
#[inline(always)]
unsafe fn pack_tile<'a, V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext<'a>,
    k: &Operand,
    v: &Operand,
    span: &TileSpan,
    last_tile: bool,
) -> (PrefetchRows<'a>, PrefetchRows<'a>) {
    let ItemContext { call, item, scratch } = ctx;
    let (sizes, valid) = (ctx.sizes(), &span.valid);
    let start = span.first_key();
    // SAFETY: `valid` lies inside the tile, for which the scratch has room.
    unsafe {
        let [k_addresses, v_addresses] = scratch.addresses(sizes).map(|addresses| &mut *addresses);
        let mut known = (span.end - start).min(k_addresses.len());
        k.addresses(span, &mut k_addresses[..known]);
        v.addresses(span, &mut v_addresses[..known]);
        if last_tile {
            let (k_rest, v_rest) = (&mut k_addresses[known..], &mut v_addresses[known..]);
            known += next_item_addresses(call, k_rest, v_rest);
        }
        let (k_tile, k_next) = k_addresses[..known].split_at(valid.len());
        let (v_tile, v_next) = v_addresses[..known].split_at(valid.len());
        let depth = score_depth::<PAIRED>(sizes);
        let (keys, key_copy) = (scratch.keys, scratch.key_copy);
        match PAIRED {
            true => {
                pack::keys::<V, f32>(depth, &k.reader, k_tile, valid.clone(), keys, key_copy);
                let to = scratch.values;
                pack::paired_values::<V>(sizes, &v.reader, v_tile, valid.clone(), to);
                if item.walk == KeyWalk::Amx {
                    amx_tile::clear_invalid_values::<V>(sizes, valid, scratch.values);
                }
            }
            false => {
                let (k, v, to) = (&k.reader, &v.reader, scratch.values);
                match k.converts() {
                    true => pack::keys::<V, f32>(depth, k, k_tile, valid.clone(), keys, key_copy),
                    false => pack::keys::<V, E>(depth, k, k_tile, valid.clone(), keys, key_copy),
                }
                match v.converts() {
                    true => pack::values::<V, f32>(sizes, v, v_tile, valid.start, to),
                    false => pack::values::<V, E>(sizes, v, v_tile, valid.start, to),
                }
            }
        }
        (
            PrefetchRows { rows: k_next, row_bytes: sizes.key_bytes },
            PrefetchRows { rows: v_next, row_bytes: sizes.value_bytes },
        )
    }
}

/// Writes the addresses of the keys and values that the next item packs first, as far as there is
/// room. Returns their number. Another thread may get that item.
fn next_item_addresses(
    call: &Call,
    k_addresses: &mut [*const u8],
    v_addresses: &mut [*const u8],
) -> usize {
    let Some(item) = (call.peek_next_item)() else { return 0 };
    if !item.walk.packs() || item.keys.is_empty() || call.problem.key_lists.is_some() {
        return 0;
    }
    let start = item.keys.start.max(item.splits.start * call.split_keys);
    let tile_end = (start + 1).next_multiple_of(call.sizes.tile_keys);
    let count = (item.keys.end.min(tile_end) - start).min(k_addresses.len());
    for (tensor, addresses) in [(&call.inputs.k, k_addresses), (&call.inputs.v, v_addresses)] {
        let keys = KeyAddresses::new(call.inputs, tensor, &item.sequence, item.heads.start);
        keys.addresses(start, &mut addresses[..count]);
    }
    count
}

/// Scores, softmax and output of at most [`ROWS`] rows against the packed tile.
#[inline(always)]
unsafe fn attend_rows<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    rows: Range<usize>,
    span: &TileSpan,
    prefetch: &TilePrefetch,
) {
    let ItemContext { call, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    // SAFETY: `rows` are rows of the item; panels lie inside the packed tile.
    unsafe {
        let seen = visible_keys(ctx, &rows, span);
        if seen.is_empty() {
            return;
        }
        // S = scale * Q K^T
        let computed = seen.start / panel * panel..seen.end.next_multiple_of(V::LANES);
        let depth = score_depth::<PAIRED>(sizes);
        let mut start = computed.start;
        while start < computed.end {
            let vectors = (computed.end - start).min(panel) / V::LANES;
            let work = Product {
                a: scratch.queries.add(rows.start * sizes.padded_head_dim),
                a_stride: sizes.padded_head_dim,
                b: scratch.keys.add(start * pack::padded_depth(depth)),
                b_stride: pack::panel_width::<V>(start, span.valid.end),
                depth,
                skipped: 0,
                c: scratch.scores.add(start),
                c_stride: sizes.tile_keys,
                factors: std::ptr::null(),
                scale: call.score_factor,
                prefetch: &prefetch.k,
            };
            register_tile::run::<V>(&call.products.scores, rows.len(), vectors, work);
            start += panel;
        }
        // P = softmax(S)
        let mut factors = [1.0f32; ROWS];
        let scores = |row: usize| scratch.scores.add((row - rows.start) * sizes.tile_keys);
        softmax_rows(ctx, rows.clone(), span, computed, scores, &mut factors);
        // O = factor * O + P V
        let keys_per_step = terms_per_step::<PAIRED>();
        let steps = seen.start / keys_per_step..seen.end.div_ceil(keys_per_step);
        let mut start = 0;
        while start < sizes.value_dim {
            let width = pack::panel_width::<V>(start, sizes.value_dim);
            let b = start * (sizes.tile_keys / keys_per_step) + steps.start * width;
            let work = Product {
                a: scratch.scores.add(steps.start),
                a_stride: sizes.tile_keys,
                b: scratch.values.add(b),
                b_stride: width,
                depth: steps.len(),
                skipped: steps.start % steps_per_chain::<PAIRED>(),
                c: ctx.output_row(rows.start).add(start),
                c_stride: sizes.padded_value_dim,
                factors: factors.as_ptr(),
                scale: 1.0,
                prefetch: &prefetch.v,
            };
            register_tile::run::<V>(&call.products.output, rows.len(), width / V::LANES, work);
            start += panel;
        }
    }
}
