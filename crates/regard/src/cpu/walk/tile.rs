//! Many query rows (prefill): a K tile and a V tile are packed once and used by all rows of the
//! block.

use super::address::KeyAddresses;
use super::amx_tile;
use super::block_scales;
use super::call::{Call, ItemContext};
use super::item::{KeyWalk, TileSpan};
use super::operand::Operand;
use super::pack::{self, score_depth};
use super::row_block::{self, TileFlags, TileWork};
use super::rows::load_queries;
use crate::cpu::product::prefetch::{PrefetchQueue, PrefetchRows, TilePrefetch};
use crate::cpu::product::register_tile::{STEPS_PER_PREFETCH, terms_per_step};
use crate::cpu::product::{ROWS, amx};
use crate::cpu::vector::{Storage, Vector};

/// The next tile is prefetched by the last row blocks of this one: 1 / PREFETCH_FRACTION of them,
/// but at least MIN_PREFETCH_ROWS rows. In a token-major cache a head's rows are pages apart and
/// compete with the block's working set for a few L2 sets: rows that are prefetched early are
/// evicted before they are packed.
const PREFETCH_FRACTION: usize = 8;
const MIN_PREFETCH_ROWS: usize = 8 * ROWS;

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
    let sizes = ctx.sizes();
    let use_amx = PAIRED && ctx.item.walk == KeyWalk::Amx;
    // SAFETY: `valid` is inside the tile, for which the scratch has room.
    let (k_next, v_next) =
        unsafe { pack_tile::<V, E, PAIRED>(ctx, k, v, span, flags.write_output) };
    let blocks = ctx.item.rows.div_ceil(if use_amx { amx::ROWS } else { ROWS });
    let min_blocks = MIN_PREFETCH_ROWS.div_ceil(if use_amx { amx::ROWS } else { ROWS });
    let prefetching = blocks.div_ceil(PREFETCH_FRACTION).max(min_blocks).min(blocks);
    let keys = span.valid.len();
    let v_depth = keys.div_ceil(terms_per_step::<PAIRED>());
    let panel = V::LANES * V::TILE_VECTORS;
    let portions = |columns: usize, depth: usize| match use_amx {
        true => prefetching * amx_tile::prefetch_portions(columns),
        false => prefetching * columns.div_ceil(panel) * depth.div_ceil(STEPS_PER_PREFETCH),
    };
    let work = TileWork {
        span,
        flags,
        blocks,
        prefetching,
        prefetch: TilePrefetch {
            k: PrefetchQueue::new(k_next, portions(keys, score_depth::<PAIRED>(sizes))),
            v: PrefetchQueue::new(v_next, portions(sizes.value_dim, v_depth)),
        },
        no_prefetch: TilePrefetch { k: PrefetchQueue::empty(), v: PrefetchQueue::empty() },
    };
    // SAFETY: same contract.
    unsafe {
        match use_amx {
            true => attend_on_amx::<V, E>(ctx, &work),
            false => row_block::attend_rows::<V, E, PAIRED>(ctx, &work),
        }
    }
}

/// Takes the item's rows through a tile on the matrix unit, in full blocks.
///
/// # Safety
/// As [`attend_tile`]. AMX tiles are configured.
#[inline(always)]
unsafe fn attend_on_amx<V: Vector, E: Storage>(ctx: ItemContext, work: &TileWork) {
    let ItemContext { item, scratch, .. } = ctx;
    for block in 0..work.blocks {
        let rows = block * amx::ROWS..item.rows.min((block + 1) * amx::ROWS);
        // SAFETY: `rows` are rows of the item.
        unsafe {
            if work.flags.load_queries {
                load_queries::<V, E, true>(ctx, rows.clone());
            }
            amx_tile::attend_rows::<V>(ctx, rows.clone(), work.span, work.prefetch(block));
            if work.flags.write_output {
                (ctx.call.write_output)(ctx, scratch.output, scratch.states, rows);
            }
        }
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
    // SAFETY: `valid` is inside the tile, for which the scratch has room.
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
                block_scales::load::<V>(ctx, k_tile, valid);
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
