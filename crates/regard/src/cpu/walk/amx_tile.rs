//! Scores, softmax and output of a few dozen rows on the matrix unit ([`amx`]), from the packed
//! tiles of bf16 pairs of [`tile`](super::tile).
//!
//! A row's bits do not depend on its neighbours: keys are taken in steps that start at multiples of
//! [`DEPTH`] in the tile, and keys that a row does not see contribute 0.

use super::call::ItemContext;
use super::item::TileSpan;
use super::pack::{self, score_depth};
use super::rows::{SoftmaxRows, softmax_rows, visible_keys};
use super::scratch::Sizes;
use crate::cpu::product::amx::{self, AmxProduct, COLUMNS, DEPTH, ROWS, TILE};
use crate::cpu::product::prefetch::TilePrefetch;
use crate::cpu::vector::Vector;
use std::ops::Range;

/// Bytes per score, per output and per pair of bf16.
const FLOAT: usize = size_of::<f32>();

/// Prefetch portions per block of rows: one per product. `columns` is the number of keys, or the
/// head dim of values.
pub fn prefetch_portions(columns: usize) -> usize {
    columns.div_ceil(COLUMNS)
}

/// Clears the packed values of invalid keys that share an AMX step with valid ones. Their
/// probabilities are 0, but 0 * NaN = NaN.
///
/// # Safety
/// The scratch holds a packed tile, and `valid` is inside it.
pub unsafe fn clear_invalid_values<V: Vector>(
    sizes: &Sizes,
    valid: &Range<usize>,
    values: *mut f32,
) {
    let valid_pairs = valid.start / 2..valid.end.div_ceil(2);
    let step_pairs = valid.start / DEPTH * TILE..valid.end.div_ceil(DEPTH) * TILE;
    let invalid = [step_pairs.start..valid_pairs.start, valid_pairs.end..step_pairs.end];
    let mut start = 0;
    while start < sizes.value_dim {
        let width = pack::panel_width::<V>(start, sizes.value_dim);
        for pairs in &invalid {
            // SAFETY: pairs of the tile, whose keys are a multiple of DEPTH.
            unsafe {
                let to = values.add(start * (sizes.tile_keys / 2) + pairs.start * width);
                to.write_bytes(0, pairs.len() * width);
            }
        }
        start += V::LANES * V::TILE_VECTORS;
    }
}

/// Takes at most [`ROWS`] rows through the packed tile. The scratch holds whole AMX tiles of rows:
/// padding rows of the last block are computed as well, and not used.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for rows of the item, the first a multiple of
/// [`ROWS`]. AMX tiles are configured.
#[inline(always)]
pub unsafe fn attend_rows<V: Vector>(
    ctx: ItemContext,
    rows: Range<usize>,
    span: &TileSpan,
    prefetch: &TilePrefetch,
) {
    let ItemContext { scratch, .. } = ctx;
    let tile_keys = ctx.sizes().tile_keys;
    // SAFETY: `rows` are rows of the item.
    unsafe {
        let seen = visible_keys(ctx, &rows, span);
        if seen.is_empty() {
            return;
        }
        let computed = seen.start / DEPTH * DEPTH..seen.end.next_multiple_of(DEPTH);
        compute_scores::<V>(ctx, &rows, span, &computed, prefetch);
        let scores = |row: usize| scratch.scores.add((row - rows.start) * tile_keys);
        let mut factors = [1.0f32; ROWS];
        softmax_rows(
            ctx,
            rows.clone(),
            SoftmaxRows { span, computed: computed.clone(), exponentials_later: None },
            scores,
            &mut factors,
        );
        rescale_output::<V>(ctx, &rows, &factors);
        accumulate_output::<V>(ctx, &rows, &computed, prefetch);
    }
}

/// S = Q K^T, not scaled.
///
/// # Safety
/// As [`attend_rows`].
#[inline(always)]
unsafe fn compute_scores<V: Vector>(
    ctx: ItemContext,
    rows: &Range<usize>,
    span: &TileSpan,
    computed: &Range<usize>,
    prefetch: &TilePrefetch,
) {
    let ItemContext { scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    let row_tiles = rows.len().div_ceil(TILE);
    // Scores past the packed keys are not computed. The softmax hides them.
    let packed = computed.end.min(span.valid.end.next_multiple_of(TILE));
    let depth = pack::padded_depth(score_depth::<true>(sizes));
    // SAFETY: panels are inside the packed tile; whole tiles of rows are inside the scratch.
    unsafe {
        for start in (computed.start..packed).step_by(COLUMNS) {
            let in_panel = start % panel;
            let width = pack::panel_width::<V>(start - in_panel, span.valid.end);
            let work = AmxProduct {
                a: scratch.queries.add(rows.start * sizes.padded_head_dim).cast(),
                a_stride: sizes.padded_head_dim * FLOAT,
                b: scratch.keys.add((start - in_panel) * depth + in_panel).cast(),
                b_stride: width * FLOAT,
                steps: depth / TILE,
                c: scratch.scores.add(start).cast(),
                c_stride: sizes.tile_keys * FLOAT,
                accumulate: false,
            };
            amx::product(&work, row_tiles, (packed - start).min(COLUMNS).div_ceil(TILE));
            prefetch.k.prefetch_portion::<V>();
        }
    }
}

/// O = factor * O, for the rows whose max has changed.
///
/// # Safety
/// As [`attend_rows`].
#[inline(always)]
unsafe fn rescale_output<V: Vector>(ctx: ItemContext, rows: &Range<usize>, factors: &[f32; ROWS]) {
    let dims = ctx.sizes().padded_value_dim;
    let output = ctx.output_row(rows.start);
    for (row, &factor) in factors.iter().enumerate().take(rows.len()) {
        if factor != 1.0 {
            for dim in (0..dims).step_by(V::LANES) {
                // SAFETY: output rows are padded to whole vectors.
                unsafe {
                    let sum = output.add(row * dims + dim);
                    V::load(sum).mul(V::splat(factor)).store(sum);
                }
            }
        }
    }
}

/// O += P V.
///
/// # Safety
/// As [`attend_rows`].
#[inline(always)]
unsafe fn accumulate_output<V: Vector>(
    ctx: ItemContext,
    rows: &Range<usize>,
    computed: &Range<usize>,
    prefetch: &TilePrefetch,
) {
    let ItemContext { scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    let row_tiles = rows.len().div_ceil(TILE);
    let output = ctx.output_row(rows.start);
    // SAFETY: panels are inside the packed tile; whole tiles of rows are inside the scratch.
    unsafe {
        for start in (0..sizes.value_dim).step_by(COLUMNS) {
            let in_panel = start % panel;
            let width = pack::panel_width::<V>(start - in_panel, sizes.value_dim);
            let pairs = (start - in_panel) * (sizes.tile_keys / 2) + computed.start / 2 * width;
            let work = AmxProduct {
                a: scratch.scores.add(computed.start / 2).cast(),
                a_stride: sizes.tile_keys * FLOAT,
                b: scratch.values.add(pairs + in_panel).cast(),
                b_stride: width * FLOAT,
                steps: computed.len() / DEPTH,
                c: output.add(start).cast(),
                c_stride: sizes.padded_value_dim * FLOAT,
                accumulate: true,
            };
            amx::product(&work, row_tiles, (width - in_panel).min(COLUMNS) / TILE);
            prefetch.v.prefetch_portion::<V>();
        }
    }
}
