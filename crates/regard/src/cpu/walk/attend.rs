//! The algorithm, once, over [`Vector`]: tiled attention with an online softmax.
//!
//! An item is a block of packed GQA rows of one (sequence, key/value head): tokens times grouped
//! heads, so that each tile of keys and values serves the whole group. It walks its keys tile by
//! tile ([`KeyWalk`]). Tiles start at multiples of `tile_keys` from key 0, for any mask, and
//! rows never mix: a tile in which a row sees nothing changes no bit of the row.

use super::call::{Call, ItemContext};
use super::item::{Item, KeyWalk, Task, TileSpan};
use super::mask_tile::hides_tile;
use super::merge::{clear, merge_partials, merge_serial_split, store_partials};
use super::operand::Operand;
use super::row_block::TileFlags;
use super::row_tile::RowTile;
use super::rows::load_queries;
use super::scratch::Scratch;
use super::selection::RowList;
use super::stream;
use super::tile;
use super::verify;
use crate::cpu::product::amx;
use crate::cpu::vector::Vector;
use crate::dtype::DType;
use half::{bf16, f16};

/// Runs one item. `PAIRED` code multiplies pairs of bf16; it is for
/// [`Kernel::CpuBf16`](crate::Kernel::CpuBf16) and [`Kernel::CpuAmx`](crate::Kernel::CpuAmx).
///
/// # Safety
/// The CPU has V's features. The call's operands were checked, the item belongs to the call, and no
/// other thread runs it. `scratch` holds `Sizes::scratch_bytes` bytes, aligned, for this thread
/// alone.
#[inline(always)]
pub unsafe fn run_item<V: Vector, const PAIRED: bool>(call: &Call, item: &Item, scratch: *mut u8) {
    let (scratch, _) = Scratch::layout(scratch, &call.sizes);
    let ctx = ItemContext { call, item, scratch: &scratch };
    // SAFETY: same contract.
    unsafe {
        match item.task {
            Task::Merge => merge_partials::<V>(ctx),
            _ => attend::<V, PAIRED>(ctx),
        }
    }
}

/// Evaluates an expression with `E` the call's type of queries, in code that has `PAIRED`. The
/// expression is compiled for each type, so it holds only what depends on it.
macro_rules! for_queries {
    ($call:expr, $E:ident => $expression:expr) => {
        match $call.problem.dtype {
            DType::F32 if !PAIRED => {
                type $E = f32;
                $expression
            }
            DType::F16 if !PAIRED => {
                type $E = f16;
                $expression
            }
            DType::BF16 => {
                type $E = bf16;
                $expression
            }
            _ => unreachable!("checked: queries are floating, and bf16 where pairs are"),
        }
    };
}

#[inline(always)]
unsafe fn attend<V: Vector, const PAIRED: bool>(ctx: ItemContext) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let (rows, several_splits) = (item.all_rows(), item.splits.len() > 1);
    // With many rows, queries are loaded on the way through the first tile and outputs written on
    // the way through the last one, to overlap both with the products. Tiles of listed keys may be
    // skipped.
    let listed = call.problem.key_lists.is_some();
    let overlaps = item.walk.packs() && !item.keys.is_empty() && !listed;
    let writes_in_last_tile = overlaps && !several_splits && item.task == Task::Attend;
    let mut flags = TileFlags { load_queries: overlaps, write_output: false };
    // SAFETY: an item has at most `block_rows` rows, or `item_rows` if it takes several heads, and
    // tiles have `tile_keys` keys. So every offset below stays inside the scratch, which has room
    // for the larger of both, or inside the checked operands. AMX is only planned for, and run, if
    // it is available.
    unsafe {
        if !overlaps {
            for_queries!(call, E => load_queries::<V, E, PAIRED>(ctx, 0..rows));
        }
        clear(sizes, rows, scratch.output, scratch.states);
        if several_splits {
            clear(sizes, rows, scratch.merged_output, scratch.merged_states);
        }
        if item.walk == KeyWalk::Verify {
            verify::transpose_queries::<V, PAIRED>(ctx);
        }
        let _tiles = (item.walk == KeyWalk::Amx).then(|| amx::Tiles::configure());
        let list = RowList::new(ctx);
        let k = Operand::keys::<PAIRED>(ctx);
        let v = Operand::values::<PAIRED>(ctx);
        let row_tile = RowTile::new::<PAIRED>(ctx, &k);
        for split in item.splits.clone() {
            let start = item.keys.start.max(split * call.split_keys);
            let end = item.keys.end.min((split + 1).saturating_mul(call.split_keys));
            let mut tile_start = start / sizes.tile_keys * sizes.tile_keys;
            while tile_start < end {
                let tile_end = end.min(tile_start + sizes.tile_keys);
                let valid = start.max(tile_start) - tile_start..tile_end - tile_start;
                let span = TileSpan { tile_start, valid, end };
                let last = tile_start + sizes.tile_keys >= end;
                flags.write_output = writes_in_last_tile && last;
                // Nothing but the tile itself would be left out.
                let skippable = !flags.load_queries && !flags.write_output;
                if list.as_ref().is_some_and(|list| !list.resolve(ctx, &span))
                    || skippable && hides_tile(ctx, &(0..rows), &span)
                {
                    tile_start += sizes.tile_keys;
                    continue;
                }
                k.load_scales(ctx, &span);
                v.load_scales(ctx, &span);
                let rows = row_tile.as_ref().map(|tile| tile.load::<PAIRED>(ctx, &k, &span));
                let (k, v) = rows.as_ref().map_or((&k, &v), |rows| (rows, rows));
                match item.walk {
                    KeyWalk::Stream => stream::attend_tile::<V, PAIRED>(ctx, k, v, &span),
                    KeyWalk::Verify => {
                        for_queries!(call, E => {
                            verify::attend_tile::<V, E, PAIRED>(ctx, k, v, &span)
                        });
                    }
                    KeyWalk::Tile | KeyWalk::Amx => {
                        for_queries!(call, E => {
                            tile::attend_tile::<V, E, PAIRED>(ctx, k, v, &span, &flags)
                        });
                        flags.load_queries = false;
                    }
                }
                tile_start += sizes.tile_keys;
            }
            if several_splits {
                merge_serial_split::<V>(ctx);
            }
        }
        let (output, states) = match several_splits {
            true => (scratch.merged_output, scratch.merged_states),
            false => (scratch.output, scratch.states),
        };
        match item.task {
            Task::AttendPartial => store_partials(ctx),
            _ if writes_in_last_tile => {}
            _ => (call.write_output)(ctx, output, states, 0..rows),
        }
    }
}
