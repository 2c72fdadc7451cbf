//! Scores, softmax and output of a few dozen rows on the matrix unit ([`amx`]), from the packed
//! tiles of bf16 pairs of [`tile`](super::tile).
//!
//! A row's bits do not depend on its neighbours: keys are taken in steps that start at multiples of
//! [`DEPTH`] in the tile, and keys that a row does not see contribute 0.

use super::block_scales;
use super::call::ItemContext;
use super::item::TileSpan;
use super::pack::{self, score_depth};
use super::rows::{SoftmaxRows, softmax_rows, visible_keys};
use super::scratch::{BLOCKS_PER_PRODUCT, Sizes};
use crate::cpu::product::amx::{self, AmxProduct, COLUMNS, DEPTH, ROWS, TILE};
use crate::cpu::product::prefetch::TilePrefetch;
use crate::cpu::product::register_tile::BlockScales;
use crate::cpu::vector::Vector;
use crate::format::BLOCK_VALUES;
use half::bf16;
use std::ops::Range;

/// A step is a block of `q8_0` and `q4_0`.
const _: () = assert!(DEPTH == BLOCK_VALUES);

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
            &scores,
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
            let column_tiles = (packed - start).min(COLUMNS).div_ceil(TILE);
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
            match block_scales::of_keys(ctx, start) {
                Some(scales) => scaled_product::<V>(ctx, &work, scales, row_tiles, column_tiles),
                None => amx::product(&work, row_tiles, column_tiles),
            }
            prefetch.k.prefetch_portion::<V>();
        }
    }
}

/// `C = A B`, whose sums over each block of depth are multiplied by the scales of that block.
///
/// # Safety
/// As [`attend_rows`], for a product of whole blocks that does not accumulate.
#[inline(always)]
unsafe fn scaled_product<V: Vector>(
    ctx: ItemContext,
    work: &AmxProduct,
    scales: BlockScales,
    row_tiles: usize,
    column_tiles: usize,
) {
    const SUMS: usize = ROWS * COLUMNS;
    let sums = ctx.scratch.block_sums;
    for first in (0..work.steps).step_by(BLOCKS_PER_PRODUCT) {
        let blocks = (work.steps - first).min(BLOCKS_PER_PRODUCT);
        // SAFETY: the scratch has room for the sums of BLOCKS_PER_PRODUCT blocks. The caller
        // guarantees A, B, C and the scales.
        unsafe {
            for i in 0..blocks {
                let block = first + i;
                let product = AmxProduct {
                    a: work.a.add(block * DEPTH * size_of::<bf16>()),
                    b: work.b.add(block * TILE * work.b_stride),
                    steps: 1,
                    c: sums.add(i * SUMS).cast(),
                    c_stride: COLUMNS * FLOAT,
                    ..*work
                };
                amx::product(&product, row_tiles, column_tiles);
            }
            let BlockScales { scales, stride } = scales;
            let scales = scales.add(first * stride);
            for column in (0..column_tiles * TILE).step_by(V::LANES) {
                let mut factors = [V::splat(0.0); BLOCKS_PER_PRODUCT];
                for (i, factor) in factors.iter_mut().enumerate().take(blocks) {
                    *factor = V::load(scales.add(i * stride + column));
                }
                for row in 0..row_tiles * TILE {
                    let to = work.c.add(row * work.c_stride).cast::<f32>().add(column);
                    let mut score = if first == 0 { V::splat(0.0) } else { V::load(to) };
                    for (i, &factor) in factors.iter().enumerate().take(blocks) {
                        let sum = V::load(sums.add(i * SUMS + row * COLUMNS + column));
                        score = sum.mul_add(factor, score);
                    }
                    score.store(to);
                }
            }
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
