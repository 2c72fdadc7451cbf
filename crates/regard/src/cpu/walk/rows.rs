//! The rows of an item: load queries (prologue), softmax, and write outputs (epilogue).

use super::address::RowAddresses;
use super::call::{ItemContext, OutputView};
use super::item::{Item, KeyWalk, TileSpan};
use super::mask_tile::hides_tile;
use super::pack;
use super::scratch::RowRange;
use super::softmax::{MAX_ROWS, ScoreRow, ScoreTile};
use crate::cpu::product::amx;
use crate::cpu::product::prefetch::CACHE_LINE;
use crate::cpu::vector::{Storage, Vector};
use crate::dtype::DType;
use crate::state::State;
use half::{bf16, f16};
use std::cell::Cell;
use std::ops::Range;

/// Rows of queries, and of outputs, that are prefetched ahead: each is used once, and they may be
/// pages apart.
const PREFETCHED_ROWS: usize = 8;

/// Loads the queries of these rows, as f32 or (`PAIRED`) as bf16, and computes the range of keys
/// that each row can see.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for rows of the item.
#[inline(always)]
pub unsafe fn load_queries<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    rows: Range<usize>,
) {
    let ItemContext { call, item, scratch } = ctx;
    let (sizes, group) = (ctx.sizes(), call.problem.group());
    let sequence = &item.sequence;
    let q = &call.inputs.q;
    let addresses = RowAddresses::new(q.as_ptr().cast_mut(), q, q.rank() - 1, sequence);
    // SAFETY: rows of the item are inside q and inside the scratch, where they are padded to whole
    // vectors and to whole AMX steps.
    unsafe {
        prefetch_rows::<V>(item, &rows, group, &addresses, sizes.head_dim * size_of::<E>());
        let mut row_iter = item.rows_from(rows.start, group);
        for row in rows {
            let (token, head) = row_iter.next();
            let from = addresses.address(token, head).cast::<E>();
            let to = scratch.queries.add(row * sizes.padded_head_dim);
            if PAIRED {
                // Pairs, as floats. AMX reads whole steps.
                let padded = sizes.head_dim.next_multiple_of(amx::DEPTH) / 2;
                pack::widen_row::<V, f32>(from.cast(), to, sizes.head_dim / 2, padded);
            } else {
                pack::widen_row::<V, E>(from, to, sizes.head_dim, sizes.padded_head_dim);
            }
            let position = sequence.q_offset + token as i64;
            let visible = match call.problem.key_lists {
                Some(_) => item.keys.clone(),
                None => call.problem.variant.visible(position, sequence.keys()),
            };
            let range = RowRange { start: visible.start as u32, end: visible.end as u32 };
            *scratch.ranges.add(row) = range;
        }
    }
}

/// Prefetches the item's rows that follow `rows`. For the first rows, prefetches `rows` as well.
///
/// # Safety
/// The enclosing function enables V's features.
#[inline(always)]
unsafe fn prefetch_rows<V: Vector>(
    item: &Item,
    rows: &Range<usize>,
    group: usize,
    addresses: &RowAddresses,
    row_bytes: usize,
) {
    let last = item.all_rows().min(rows.end + PREFETCHED_ROWS);
    let first = if rows.start == 0 { 0 } else { last.min(rows.start + PREFETCHED_ROWS) };
    let mut row_iter = item.rows_from(first, group);
    for _ in first..last {
        let (token, head) = row_iter.next();
        for offset in (0..row_bytes).step_by(CACHE_LINE) {
            // SAFETY: a prefetch never faults.
            unsafe { V::prefetch(addresses.address(token, head).wrapping_add(offset)) };
        }
    }
}

/// The keys of the tile that at least one of these rows can see, relative to the tile's first key.
/// None, if a mask hides all of them.
///
/// # Safety
/// The rows' queries are loaded.
#[inline(always)]
pub unsafe fn visible_keys(ctx: ItemContext, rows: &Range<usize>, span: &TileSpan) -> Range<usize> {
    // SAFETY: `load_queries` wrote the ranges.
    let ranges =
        unsafe { std::slice::from_raw_parts(ctx.scratch.ranges.add(rows.start), rows.len()) };
    let mut seen = span.valid.end..span.valid.start;
    for range in ranges {
        let visible = range.within(span.tile_start, &span.valid);
        if !visible.is_empty() {
            seen = seen.start.min(visible.start)..seen.end.max(visible.end);
        }
    }
    // SAFETY: same contract.
    if unsafe { hides_tile(ctx, rows, span) } { 0..0 } else { seen }
}

/// Operands of [`softmax_rows`].
pub struct SoftmaxRows<'a> {
    pub span: &'a TileSpan,
    /// The keys of the tile that have scores: whole vectors.
    pub computed: Range<usize>,
    /// As in [`ScoreTile`], for at most [`MAX_ROWS`] rows.
    pub exponentials_later: Option<&'a Cell<[f32; MAX_ROWS]>>,
}

/// Online softmax of some of the item's rows against a tile. `scores(row)` is the address of a
/// row's scores. Writes one rescale factor per row.
///
/// # Safety
/// As [`softmax_step`](super::softmax::softmax_step), for rows of the item whose queries are
/// loaded.
pub unsafe fn softmax_rows(
    ctx: ItemContext,
    rows: Range<usize>,
    work: SoftmaxRows,
    scores: &dyn Fn(usize) -> *mut f32,
    factors: &mut [f32],
) {
    const EMPTY: ScoreRow = ScoreRow {
        scores: std::ptr::null_mut(),
        key_scales: std::ptr::null(),
        value_scales: std::ptr::null(),
        visible: 0..0,
        token: 0,
        head: 0,
    };
    let ItemContext { call, item, scratch } = ctx;
    let SoftmaxRows { span, computed, exponentials_later } = work;
    let mut row_iter = item.rows_from(rows.start, call.problem.group());
    let mut start = rows.start;
    let scales = [
        call.inputs
            .attention
            .k_scales
            .map_or(std::ptr::null(), |_| scratch.key_scales.cast_const()),
        call.inputs.value_scales().map_or(std::ptr::null(), |_| scratch.value_scales.cast_const()),
    ];
    for factors in factors[..rows.len()].chunks_mut(MAX_ROWS) {
        // SAFETY: rows of the item.
        unsafe {
            let ranges = std::slice::from_raw_parts(scratch.ranges.add(start), factors.len());
            let states = std::slice::from_raw_parts_mut(scratch.states.add(start), factors.len());
            let mut rows = [EMPTY; MAX_ROWS];
            for ((i, range), row) in ranges.iter().enumerate().zip(&mut rows) {
                let (token, head) = row_iter.next();
                let visible = range.within(span.tile_start, &span.valid);
                let [key_scales, value_scales] = scales.map(|scales| match scales.is_null() {
                    true => scales,
                    false => scales.add((start + i) / item.rows * ctx.sizes().tile_keys),
                });
                let scores = scores(start + i);
                *row = ScoreRow { scores, key_scales, value_scales, visible, token, head };
            }
            let tile = ScoreTile {
                rows: &rows[..factors.len()],
                computed: computed.clone(),
                tile_start: span.tile_start,
                scale: (item.walk == KeyWalk::Amx).then_some(call.score_factor),
                list: call.problem.key_lists.map(|_| &*scratch.list),
                exponentials_later,
            };
            (call.softmax)(&call.modifiers, &item.sequence, &tile, states, factors);
        }
        start += factors.len();
    }
}

/// Epilogue: adds the sinks to these rows, normalizes, and writes output and log-sum-exp.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for rows of the item.
#[inline(always)]
pub unsafe fn write_output<V: Vector>(
    ctx: ItemContext,
    output: *const f32,
    states: *const State,
    rows: Range<usize>,
) {
    // SAFETY: same contract.
    unsafe {
        match ctx.call.out.dims.dtype() {
            DType::F32 => write_rows::<V, f32>(ctx, output, states, rows),
            DType::F16 => write_rows::<V, f16>(ctx, output, states, rows),
            DType::BF16 => write_rows::<V, bf16>(ctx, output, states, rows),
            _ => unreachable!("checked: outputs are floating"),
        }
    }
}

#[inline(always)]
unsafe fn write_rows<V: Vector, E: Storage>(
    ctx: ItemContext,
    output: *const f32,
    states: *const State,
    rows: Range<usize>,
) {
    let ItemContext { call, item, .. } = ctx;
    let (sizes, group) = (ctx.sizes(), call.problem.group());
    let leading = call.inputs.q.rank() - 1;
    let addresses =
        |view: &OutputView| RowAddresses::new(view.data, &view.dims, leading, &item.sequence);
    let out = addresses(&call.out);
    let lse = call.lse.as_ref().map(addresses);
    let sinks = call.inputs.attention.sinks.and_then(|sinks| sinks.as_slice::<f32>());
    // SAFETY: each address is a row of an output. Its elements were checked not to overlap each
    // other or any input, and only this item writes them. Output rows in the scratch are padded to
    // whole vectors.
    unsafe {
        prefetch_rows::<V>(item, &rows, group, &out, sizes.value_dim * size_of::<E>());
        let mut row_iter = item.rows_from(rows.start, group);
        for row in rows {
            let (token, head) = row_iter.next();
            let mut state = *states.add(row);
            let mut factor = 1.0;
            if let Some(sinks) = sinks {
                (state, factor, _) = state.merge(State::sink(sinks[head]));
            }
            if let Some(lse) = &lse {
                lse.address(token, head).cast::<f32>().write_unaligned(state.lse());
            }
            // The output of an empty row is 0 / 1.
            let sum = if state.max == f32::NEG_INFINITY { 1.0 } else { state.sum };
            let from = output.add(row * sizes.padded_value_dim);
            let to = out.address(token, head).cast::<E>();
            narrow_row::<V, E>(from, to, sizes.value_dim, V::splat(factor / sum));
        }
    }
}

/// Multiplies `count` floats by `factor` and stores them as E.
///
/// # Safety
/// As [`Vector`]'s methods; `from` is padded to whole vectors.
#[inline(always)]
unsafe fn narrow_row<V: Vector, E: Storage>(from: *const f32, to: *mut E, count: usize, factor: V) {
    // SAFETY: `i` stays below `count` on writes, and below `count` rounded up to whole vectors on
    // reads.
    unsafe {
        let mut i = 0;
        while i < count {
            // Adding 0 turns -0 into 0, so that a tile in which the row sees nothing leaves no
            // trace.
            let vector = V::load(from.add(i)).mul_add(factor, V::splat(0.0));
            if i + V::LANES <= count {
                E::store(vector, to.add(i));
            } else {
                let mut lanes = [0.0f32; 16];
                vector.store(lanes.as_mut_ptr());
                for (j, &lane) in lanes.iter().enumerate().take(count - i) {
                    *to.add(i + j) = E::narrow(lane);
                }
            }
            i += V::LANES;
        }
    }
}
