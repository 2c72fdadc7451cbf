//! The rows of an item on their way through a packed tile: row blocks as high as a register tile,
//! in a software pipeline. The exponentials of a block are computed beside two products: first ones
//! beside the output of the block before, the rest beside the scores of the block after.

use super::block_scales;
use super::call::ItemContext;
use super::item::TileSpan;
use super::pack::{self, score_depth};
use super::rows::{SoftmaxRows, load_queries, softmax_rows, visible_keys};
use super::softmax::{self, MAX_ROWS, unmodified_maxima};
use super::stream;
use crate::cpu::product::ROWS;
use crate::cpu::product::exponentials::{Exponentials, Work};
use crate::cpu::product::prefetch::{PrefetchQueue, TilePrefetch};
use crate::cpu::product::register_tile::terms_per_step;
use crate::cpu::product::register_tile::{self, Product, STEPS_PER_CHAIN, STEPS_PER_PREFETCH};
use crate::cpu::vector::{Storage, Vector};
use std::ops::Range;

/// Optional steps of a tile.
pub struct TileFlags {
    /// First tile: load each row block's queries before it.
    pub load_queries: bool,
    /// Last tile: write each row block's output after it.
    pub write_output: bool,
}

/// A packed tile, and how the item's rows are cut on their way through it.
pub struct TileWork<'a> {
    pub span: &'a TileSpan,
    pub flags: &'a TileFlags,
    /// Row blocks.
    pub blocks: usize,
    /// The last row blocks, which prefetch the next tile.
    pub prefetching: usize,
    pub prefetch: TilePrefetch<'a>,
    pub no_prefetch: TilePrefetch<'static>,
}

impl TileWork<'_> {
    /// The prefetches of a row block.
    #[inline(always)]
    pub fn prefetch(&self, block: usize) -> &TilePrefetch<'_> {
        match block + self.prefetching < self.blocks {
            true => &self.no_prefetch,
            false => &self.prefetch,
        }
    }
}

/// The scratch has scores of at least this many rows: two buffers of a row block each.
const _: () = assert!(2 * ROWS <= stream::ITEM_ROWS);

/// Takes the item's rows through a packed tile.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for an item of one head. The tile is packed.
#[inline(always)]
pub unsafe fn attend_rows<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    work: &TileWork,
) {
    let ItemContext { item, scratch, .. } = ctx;
    let TileWork { span, flags, blocks, .. } = *work;
    let buffers = [0, 1].map(|_| Exponentials::empty());
    let mut previous: Option<RowBlock> = None;
    let mut row = 0;
    // SAFETY: same contract, for rows of the item.
    unsafe {
        for block in 0..blocks {
            // Register tiles of nearly equal height: 9 rows are 5 and 4, not 6 and 3.
            let rows = row..row + (item.rows - row).div_ceil(blocks - block);
            row = rows.end;
            if flags.load_queries {
                load_queries::<V, E, PAIRED>(ctx, rows.clone());
            }
            let seen = visible_keys(ctx, &rows, span);
            if seen.is_empty() {
                if flags.write_output {
                    (ctx.call.write_output)(ctx, scratch.output, scratch.states, rows);
                }
                continue;
            }
            let prefetch = work.prefetch(block);
            let buffer = previous.as_ref().map_or(0, |previous| 1 - previous.buffer);
            let mut next = RowBlock { rows, seen, buffer, factors: [1.0; MAX_ROWS] };
            let beside = previous.as_ref().map(|previous| &buffers[previous.buffer]);
            compute_scores::<V, PAIRED>(ctx, &next, span, &prefetch.k, beside);
            if let Some(previous) = &previous {
                previous.finish_softmax::<V, PAIRED>(ctx, &buffers[previous.buffer]);
            }
            begin_softmax::<V>(ctx, &mut next, span, &buffers[buffer]);
            let accumulates = previous.is_some();
            buffers[buffer].divide::<V>(portions::<V, PAIRED>(ctx, span, accumulates));
            if let Some(previous) = previous {
                let beside = Some(&buffers[buffer]);
                accumulate_output::<V, PAIRED>(ctx, &previous, &prefetch.v, beside);
                if flags.write_output {
                    (ctx.call.write_output)(ctx, scratch.output, scratch.states, previous.rows);
                }
            }
            previous = Some(next);
        }
        if let Some(last) = previous {
            last.finish_softmax::<V, PAIRED>(ctx, &buffers[last.buffer]);
            accumulate_output::<V, PAIRED>(ctx, &last, &work.prefetch(blocks - 1).v, None);
            if flags.write_output {
                (ctx.call.write_output)(ctx, scratch.output, scratch.states, last.rows);
            }
        }
    }
}

/// Approximate number of product portions beside which a row block's exponentials are computed: the
/// portions of the next block's scores and, if it `accumulates`, of the previous block's output.
#[inline(always)]
fn portions<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    span: &TileSpan,
    accumulates: bool,
) -> usize {
    let panel = V::LANES * V::TILE_VECTORS;
    let (sizes, keys) = (ctx.sizes(), span.valid.len());
    let portions = |columns: usize, depth: usize| columns / panel * (depth / STEPS_PER_PREFETCH);
    let scores = portions(keys, score_depth::<PAIRED>(sizes));
    let output = portions(sizes.value_dim, keys / terms_per_step::<PAIRED>());
    scores + if accumulates { output } else { 0 }
}

/// At most [`ROWS`] rows on their way through a tile.
struct RowBlock {
    rows: Range<usize>,
    /// The keys of the tile that at least one of the rows can see.
    seen: Range<usize>,
    /// The index of its buffer of scores and exponentials. There are two buffers: the next block's
    /// scores are computed while this block's exponentials are.
    buffer: usize,
    /// Factors of the rows' previous outputs.
    factors: [f32; MAX_ROWS],
}

impl RowBlock {
    /// The keys whose scores are computed: whole vectors.
    #[inline(always)]
    fn computed<V: Vector>(&self) -> Range<usize> {
        let panel = V::LANES * V::TILE_VECTORS;
        self.seen.start / panel * panel..self.seen.end.next_multiple_of(V::LANES)
    }

    /// The scores of its first row.
    #[inline(always)]
    fn scores(&self, ctx: ItemContext) -> *mut f32 {
        ctx.scratch.scores.wrapping_add(self.buffer * ROWS * ctx.sizes().tile_keys)
    }

    /// # Safety
    /// As [`finish_softmax`](softmax::finish_softmax).
    #[inline(always)]
    unsafe fn finish_softmax<V: Vector, const PAIRED: bool>(
        &self,
        ctx: ItemContext,
        exponentials: &Exponentials,
    ) {
        let states = ctx.scratch.states.wrapping_add(self.rows.start);
        // SAFETY: same contract; the states belong to the rows.
        unsafe {
            let states = std::slice::from_raw_parts_mut(states, self.rows.len());
            softmax::finish_softmax::<V, PAIRED>(exponentials, states);
        }
    }
}

/// S = scale * Q K^T.
///
/// # Safety
/// As [`attend_rows`], for rows of the item. `beside` belongs to another row block.
#[inline(always)]
unsafe fn compute_scores<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    block: &RowBlock,
    span: &TileSpan,
    prefetch: &PrefetchQueue,
    beside: Option<&Exponentials>,
) {
    let ItemContext { call, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    let computed = block.computed::<V>();
    let depth = score_depth::<PAIRED>(sizes);
    for start in computed.clone().step_by(panel) {
        let vectors = (computed.end - start).min(panel) / V::LANES;
        // SAFETY: panels are inside the packed tile.
        unsafe {
            let work = Product {
                a: scratch.queries.add(block.rows.start * sizes.padded_head_dim),
                a_stride: sizes.padded_head_dim,
                b: scratch.keys.add(start * pack::padded_depth(depth)),
                b_stride: pack::panel_width::<V>(start, span.valid.end),
                depth,
                skipped: 0,
                c: block.scores(ctx).add(start),
                c_stride: sizes.tile_keys,
                factors: std::ptr::null(),
                scale: call.score_factor,
                prefetch,
                exponentials: beside,
                block_scales: block_scales::of_keys(ctx, start),
            };
            register_tile::run::<V>(&call.products.scores, block.rows.len(), vectors, work);
        }
    }
}

/// P = softmax(S), without the exponentials, which are computed beside later products.
///
/// # Safety
/// As [`softmax_rows`].
#[inline(always)]
unsafe fn begin_softmax<V: Vector>(
    ctx: ItemContext,
    block: &mut RowBlock,
    span: &TileSpan,
    exponentials: &Exponentials,
) {
    let ItemContext { call, scratch, .. } = ctx;
    let (computed, rows) = (block.computed::<V>(), block.rows.clone());
    let work = Work {
        scores: block.scores(ctx),
        stride: ctx.sizes().tile_keys,
        rows: rows.len(),
        first_key: computed.start,
        end_key: computed.end,
        value_scales: match call.inputs.value_scales() {
            Some(_) => scratch.value_scales,
            None => std::ptr::null(),
        },
    };
    let unmodified = call.modifiers.unmodified
        && call.problem.key_lists.is_none()
        && call.inputs.attention.k_scales.is_none();
    // SAFETY: same contract; a buffer has ROWS rows of scores.
    unsafe {
        if unmodified {
            let ranges = std::slice::from_raw_parts(scratch.ranges.add(rows.start), rows.len());
            let states = std::slice::from_raw_parts_mut(scratch.states.add(rows.start), rows.len());
            let visible = |row: usize| ranges[row].within(span.tile_start, &span.valid);
            let (factors, subtract) = (&mut block.factors, &exponentials.subtract);
            unmodified_maxima::<V>(&work, visible, states, factors, subtract);
        } else {
            let scores = |row: usize| work.scores.add((row - rows.start) * work.stride);
            let exponentials_later = Some(&exponentials.subtract);
            let tile = SoftmaxRows { span, computed, exponentials_later };
            softmax_rows(ctx, rows.clone(), tile, &scores, &mut block.factors);
        }
        exponentials.begin(work);
    }
}

/// O = factor * O + P V.
///
/// # Safety
/// As [`compute_scores`]. The block's exponentials have been computed.
#[inline(always)]
unsafe fn accumulate_output<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    block: &RowBlock,
    prefetch: &PrefetchQueue,
    beside: Option<&Exponentials>,
) {
    let ItemContext { call, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    let keys_per_step = terms_per_step::<PAIRED>();
    let steps = block.seen.start / keys_per_step..block.seen.end.div_ceil(keys_per_step);
    for start in (0..sizes.value_dim).step_by(panel) {
        let width = pack::panel_width::<V>(start, sizes.value_dim);
        let b = start * (sizes.tile_keys / keys_per_step) + steps.start * width;
        // SAFETY: as for scores.
        unsafe {
            let work = Product {
                a: block.scores(ctx).add(steps.start),
                a_stride: sizes.tile_keys,
                b: scratch.values.add(b),
                b_stride: width,
                depth: steps.len(),
                skipped: steps.start % STEPS_PER_CHAIN,
                c: ctx.output_row(block.rows.start).add(start),
                c_stride: sizes.padded_value_dim,
                factors: block.factors.as_ptr(),
                scale: 1.0,
                prefetch,
                exponentials: beside,
                block_scales: None,
            };
            let vectors = width / V::LANES;
            register_tile::run::<V>(&call.products.output, block.rows.len(), vectors, work);
        }
    }
}
