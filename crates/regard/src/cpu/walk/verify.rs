//! Dozens of query rows (speculative verify): too many to be limited by memory bandwidth, too few
//! to amortise packing whole tiles.
//!
//! Scores are computed transposed, S^T = K Q^T. A is a few keys, in place or copied row by row. B
//! is the queries, transposed once per item. Then the scores are transposed in small blocks,
//! instead of the keys. As in [`stream`](super::stream), an item takes several heads together and
//! prefetches in memory order. Every element is the same sum of chains as in a packed tile
//! ([`tile`](super::tile)), so both walks give the same bits, and the choice between them only
//! affects speed.

use super::address::{HeadBlock, HeadRows, MAX_BLOCK_TOKENS};
use super::call::ItemContext;
use super::item::TileSpan;
use super::operand::{Operand, RowReader};
use super::pack::{self, score_depth};
use super::rows::{SoftmaxRows, softmax_rows};
use super::scratch::padded_rows;
use super::scratch::{MAX_VERIFY_ROWS as MAX_ROWS, VERIFY_KEYS_PER_BLOCK as KEYS_PER_BLOCK};
use super::tiling::Tiling;
use crate::cpu::product::prefetch::{PrefetchQueue, PrefetchRows};
use crate::cpu::product::register_tile::{self, Product, STEPS_PER_PREFETCH};
use crate::cpu::product::register_tile::{STEPS_PER_CHAIN, terms_per_step};
use crate::cpu::product::weighted::Weighted;
use crate::cpu::product::{ROWS, cover, cover_count};
use crate::cpu::vector::{Storage, Vector};
use crate::problem::Problem;

/// Maximum query rows of all heads of an item, each head padded to full vectors of the widest
/// level.
pub const ITEM_ROWS: usize = 256;

/// Maximum heads of an item.
pub const MAX_ITEM_HEADS: usize = ITEM_ROWS / padded_rows(1);

/// Values per block: one accumulation chain of the product, as in packed tiles. So rows have the
/// same bits in both.
const fn values_per_block<const PAIRED: bool>() -> usize {
    STEPS_PER_CHAIN * terms_per_step::<PAIRED>()
}

const _: () = assert!(values_per_block::<true>() <= MAX_BLOCK_TOKENS);

/// Heads per item, for `rows` rows per head and `heads` heads in total: nearly equal shares.
pub fn heads_per_item(rows: usize, heads: usize, tiling: &Tiling) -> usize {
    let max_heads = (ITEM_ROWS.min(tiling.block_rows) / padded_rows(rows.max(1))).max(1);
    heads.div_ceil(heads.div_ceil(max_heads))
}

/// Maximum padded rows of all heads of an item.
pub fn item_rows(problem: &Problem, tiling: &Tiling) -> usize {
    let rows = problem.query_len.saturating_mul(problem.group()).min(MAX_ROWS);
    ITEM_ROWS.min(tiling.block_rows).min(problem.kv_heads.saturating_mul(padded_rows(rows)))
}

/// Transposes the item's queries, which are loaded, to panels in place of the packed keys.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for an item of at most [`MAX_ROWS`] rows per head and
/// [`ITEM_ROWS`] in total.
#[inline(always)]
pub unsafe fn transpose_queries<V: Vector, const PAIRED: bool>(ctx: ItemContext) {
    let ItemContext { item, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let depth = score_depth::<PAIRED>(sizes);
    for head in 0..item.heads.len() {
        let mut rows = [std::ptr::null::<u8>(); MAX_ROWS];
        for (i, row) in rows[..item.rows].iter_mut().enumerate() {
            let offset = (head * item.rows + i) * sizes.padded_head_dim;
            *row = scratch.queries.wrapping_add(offset).cast();
        }
        let to = transposed_queries(ctx, head);
        let rows = &rows[..item.rows];
        // SAFETY: the rows hold at least `depth` floats. The packed keys have room for ITEM_ROWS
        // rows.
        unsafe {
            let reader = RowReader::in_place(f32::INDEX);
            pack::keys::<V, f32>(depth, &reader, rows, 0..item.rows, to, scratch.key_copy);
        }
    }
}

/// The transposed queries of a head.
fn transposed_queries(ctx: ItemContext, head: usize) -> *mut f32 {
    let offset = head * padded_rows(ctx.item.rows) * ctx.sizes().padded_head_dim;
    ctx.scratch.keys.wrapping_add(offset)
}

/// Takes the item's rows through the valid keys of a tile.
///
/// # Safety
/// As [`transpose_queries`], which has run.
#[inline(always)]
pub unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    k: &Operand,
    v: &Operand,
    span: &TileSpan,
) {
    let ItemContext { item, scratch, .. } = ctx;
    let valid = &span.valid;
    // SAFETY: `valid` is inside the tile, for which the scratch has room. The rows are the
    // item's.
    unsafe {
        let addresses = scratch.addresses(ctx.sizes());
        let [k_addresses, v_addresses] = addresses.map(|addresses| &mut *addresses);
        let k_addresses = k.known_addresses(span, k_addresses);
        let v_addresses = v.known_addresses(span, v_addresses);
        let (tokens, heads) = (valid.len(), item.heads.len());
        let sizes = ctx.sizes();
        let k_rows = HeadRows::new(&k.rows, k_addresses, tokens, heads, sizes.key_bytes);
        compute_scores::<V, E, PAIRED>(ctx, &k.reader, &k_rows, valid.start);
        let mut factors = [1.0f32; ITEM_ROWS];
        let scores = |row| score_row(ctx, row);
        let computed = valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES);
        softmax_rows(
            ctx,
            0..item.all_rows(),
            SoftmaxRows { span, computed, exponentials_later: None },
            &scores,
            &mut factors,
        );
        let v_rows = HeadRows::new(&v.rows, v_addresses, tokens, heads, sizes.value_bytes);
        accumulate_output::<V, E, PAIRED>(ctx, &v.reader, &v_rows, valid.start, &mut factors);
    }
}

/// The scores of one of the item's rows.
fn score_row(ctx: ItemContext, row: usize) -> *mut f32 {
    let rows = ctx.item.rows;
    let padded_row = row / rows * padded_rows(rows) + row % rows;
    ctx.scratch.scores.wrapping_add(padded_row * ctx.sizes().tile_keys)
}

/// S = scale * Q K^T for the tile, block by block of keys. `first` is the first token's key,
/// relative to the tile.
#[inline(always)]
unsafe fn compute_scores<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    k_rows: &HeadRows,
    first: usize,
) {
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < k_rows.tokens {
        // Blocks end at multiples of their length in the tile.
        let block_end = (first + start + 1).next_multiple_of(KEYS_PER_BLOCK) - first;
        let tokens = start..k_rows.tokens.min(block_end);
        let mut prefetch_order = k_rows.prefetch_after(&tokens);
        for head in 0..k_rows.heads {
            let prefetch = prefetch_order.next_rows(&mut buffer);
            let block = HeadBlock { head, tokens: tokens.clone(), first };
            // SAFETY: same contract.
            unsafe {
                compute_transposed_scores::<V, E, PAIRED>(ctx, reader, k_rows, &block, prefetch);
                transpose_scores::<V>(ctx, &block);
            }
        }
        start = tokens.end;
    }
}

/// The first key of the block of [`KEYS_PER_BLOCK`] keys, relative to the tile.
#[inline(always)]
fn block_start(block: &HeadBlock) -> usize {
    block.keys().start / KEYS_PER_BLOCK * KEYS_PER_BLOCK
}

/// The distance between keys in floats, if the keys can be read in place as floats (or as pairs of
/// bf16).
#[inline(always)]
fn in_place_stride<E: Storage, const PAIRED: bool>(
    keys: &[*const u8],
    offset: isize,
) -> Option<usize> {
    const FLOAT: usize = size_of::<f32>();
    let first = keys[0] as usize;
    let distance = |from: *const u8, to: *const u8| (to as usize).wrapping_sub(from as usize);
    let stride = keys.get(1).map_or(0, |&second| distance(keys[0], second));
    let evenly_spaced = keys.windows(2).all(|pair| distance(pair[0], pair[1]) == stride);
    let floats = PAIRED || size_of::<E>() == FLOAT;
    let first_is_aligned = first.wrapping_add_signed(offset).is_multiple_of(FLOAT);
    let aligned = first_is_aligned && stride.is_multiple_of(FLOAT);
    let in_range = stride <= isize::MAX as usize / ROWS;
    (evenly_spaced && floats && aligned && in_range).then_some(stride / FLOAT)
}

/// S^T = scale * K Q^T for a head and a block of keys.
#[inline(always)]
unsafe fn compute_transposed_scores<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    k_rows: &HeadRows,
    block: &HeadBlock,
    prefetch: PrefetchRows,
) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let depth = score_depth::<PAIRED>(sizes);
    let panel = V::LANES * V::TILE_VECTORS;
    let queries = transposed_queries(ctx, block.head);
    let tokens = &block.tokens;
    let key_blocks = tokens.len().div_ceil(ROWS);
    let portions = key_blocks * item.rows.div_ceil(panel) * depth.div_ceil(STEPS_PER_PREFETCH);
    let prefetch = PrefetchQueue::new(prefetch, portions);
    let skipped = block.keys().start - block_start(block);
    // SAFETY: keys of the tile, rows of the item, offsets inside the scratch. Keys that are read in
    // place are aligned and evenly spaced; others are copied row by row, at most ROWS of them.
    unsafe {
        let mut token = tokens.start;
        for key_block in 0..key_blocks {
            let count = (tokens.end - token).div_ceil(key_blocks - key_block);
            let offset = k_rows.head_offset(block.head) as isize;
            let keys = &k_rows.addresses[token..token + count];
            let in_place = match (reader.converts(), reader.is_converted()) {
                (false, _) => in_place_stride::<E, PAIRED>(keys, offset),
                (true, true) => in_place_stride::<f32, PAIRED>(keys, offset),
                (true, false) => None,
            };
            let (a, a_stride) = match in_place {
                Some(stride) => (keys[0].wrapping_offset(offset).cast::<f32>(), stride),
                None => {
                    for (i, address) in keys.iter().enumerate() {
                        let from = address.wrapping_offset(offset);
                        let to = scratch.key_copy.add(i * sizes.padded_head_dim);
                        match (reader.converts(), PAIRED) {
                            (true, _) => reader.convert_row(from, to.cast()),
                            (_, true) => pack::widen_row::<V, f32>(from.cast(), to, depth, depth),
                            (_, false) => pack::widen_row::<V, E>(from.cast(), to, depth, depth),
                        }
                    }
                    (scratch.key_copy.cast_const(), sizes.padded_head_dim)
                }
            };
            let key_in_block = skipped + token - tokens.start;
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
                    c: scratch.transposed_scores.add(key_in_block * MAX_ROWS + row),
                    c_stride: MAX_ROWS,
                    factors: std::ptr::null(),
                    scale: call.score_factor,
                    prefetch: &prefetch,
                    exponentials: None,
                    block_scales: None,
                };
                register_tile::run::<V>(&call.products.scores, count, width / V::LANES, work);
                row += panel;
            }
            token += count;
        }
    }
}

/// Transposes the scores of a head and a block of keys to the rows' scores.
#[inline(always)]
unsafe fn transpose_scores<V: Vector>(ctx: ItemContext, block: &HeadBlock) {
    let ItemContext { item, scratch, .. } = ctx;
    let tile_keys = ctx.sizes().tile_keys;
    // SAFETY: keys of the tile; rows are padded to whole vectors.
    unsafe {
        let to = score_row(ctx, block.head * item.rows).add(block_start(block));
        for key in (0..KEYS_PER_BLOCK).step_by(V::LANES) {
            for row in (0..item.rows).step_by(V::LANES) {
                let mut from = [std::ptr::null::<f32>(); 16];
                for (i, from) in from.iter_mut().enumerate().take(V::LANES) {
                    *from = scratch.transposed_scores.add((key + i) * MAX_ROWS + row);
                }
                V::transpose(&from, to.add(row * tile_keys + key), tile_keys);
            }
        }
    }
}

/// O = factor * O + P V for the tile, block by block of values. `first` is the first token's key,
/// relative to the tile. Once a block has applied the factors, they are set to 1.
#[inline(always)]
unsafe fn accumulate_output<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    v_rows: &HeadRows,
    first: usize,
    factors: &mut [f32; ITEM_ROWS],
) {
    let rows = ctx.item.rows;
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < v_rows.tokens {
        let block_end = (first + start + 1).next_multiple_of(values_per_block::<PAIRED>()) - first;
        let tokens = start..v_rows.tokens.min(block_end);
        let mut prefetch_order = v_rows.prefetch_after(&tokens);
        for head in 0..v_rows.heads {
            let prefetch = prefetch_order.next_rows(&mut buffer);
            let factors = &factors[head * rows..(head + 1) * rows];
            let block = HeadBlock { head, tokens: tokens.clone(), first };
            // SAFETY: same contract.
            unsafe {
                accumulate_head::<V, E, PAIRED>(ctx, reader, v_rows, &block, prefetch, factors);
            };
        }
        *factors = [1.0; ITEM_ROWS];
        start = tokens.end;
    }
}

/// One head's part of a block of values.
#[inline(always)]
unsafe fn accumulate_head<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    v_rows: &HeadRows,
    block: &HeadBlock,
    prefetch: PrefetchRows,
    factors: &[f32],
) {
    let mut values = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let values = &mut values[..block.tokens.len()];
    for (value, from) in values.iter_mut().zip(&v_rows.addresses[block.tokens.clone()]) {
        *value = from.wrapping_offset(v_rows.head_offset(block.head) as isize);
    }
    let whole_vectors = ctx.sizes().value_dim.is_multiple_of(V::LANES);
    // SAFETY: same contract.
    unsafe {
        let in_f32 = match reader.converts() {
            true => reader.is_converted() && !PAIRED,
            false => E::INDEX == f32::INDEX,
        };
        match in_f32 && whole_vectors {
            true => accumulate_in_place::<V, f32>(ctx, block, values, prefetch, factors),
            false => {
                accumulate_packed::<V, E, PAIRED>(ctx, reader, block, values, prefetch, factors)
            }
        }
    }
}

/// [`accumulate_head`] with values in place: L2 delivers them as fast as the product consumes them.
#[inline(always)]
unsafe fn accumulate_in_place<V: Vector, E: Storage>(
    ctx: ItemContext,
    block: &HeadBlock,
    values: &[*const u8],
    prefetch: PrefetchRows,
    factors: &[f32],
) {
    let ItemContext { call, item, .. } = ctx;
    let sizes = ctx.sizes();
    let vectors = sizes.value_dim / V::LANES;
    let row_blocks = item.rows.div_ceil(ROWS);
    let passes = row_blocks * cover_count(vectors, V::TILE_VECTORS);
    let portion = prefetch.rows.len().div_ceil(passes);
    let (mut row, mut prefetched) = (0, 0);
    for row_block in 0..row_blocks {
        let rows = (item.rows - row).div_ceil(row_blocks - row_block);
        cover(vectors, V::TILE_VECTORS, |width, vector| {
            let column = vector * V::LANES;
            let item_row = block.head * item.rows + row;
            let end = prefetch.rows.len().min(prefetched + portion);
            // SAFETY: rows of the item, columns of the head dim.
            unsafe {
                let work = Weighted {
                    probabilities: score_row(ctx, item_row).add(block.keys().start),
                    probability_stride: sizes.tile_keys,
                    values,
                    offset: 0,
                    first: column,
                    prefetch: PrefetchRows { rows: &prefetch.rows[prefetched..end], ..prefetch },
                    output: ctx.output_row(item_row).add(column),
                    output_stride: sizes.padded_value_dim,
                    factors: factors[row..].as_ptr(),
                };
                call.products.weighted[E::INDEX][rows - 1][width](&work);
            }
            prefetched = end;
        });
        row += rows;
    }
}

/// [`accumulate_head`] with values that are packed first.
#[inline(always)]
unsafe fn accumulate_packed<V: Vector, E: Storage, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    block: &HeadBlock,
    values: &[*const u8],
    prefetch: PrefetchRows,
    factors: &[f32],
) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let panel = V::LANES * V::TILE_VECTORS;
    let keys = block.keys();
    // SAFETY: values of the tile, rows of the item, offsets inside the scratch.
    unsafe {
        let to = scratch.values;
        match (PAIRED, reader.converts()) {
            (true, _) => pack::paired_values::<V>(sizes, reader, values, keys.clone(), to),
            (_, true) => pack::values::<V, f32>(sizes, reader, values, keys.start, to),
            (_, false) => pack::values::<V, E>(sizes, reader, values, keys.start, to),
        }
        let row_blocks = item.rows.div_ceil(ROWS);
        let keys_per_step = terms_per_step::<PAIRED>();
        let steps = keys.start / keys_per_step..keys.end.div_ceil(keys_per_step);
        let panels = sizes.value_dim.div_ceil(panel);
        let portions = row_blocks * panels * steps.len().div_ceil(STEPS_PER_PREFETCH);
        let prefetch = PrefetchQueue::new(prefetch, portions);
        let mut row = 0;
        for row_block in 0..row_blocks {
            let rows = (item.rows - row).div_ceil(row_blocks - row_block);
            let item_row = block.head * item.rows + row;
            let mut start = 0;
            while start < sizes.value_dim {
                let width = pack::panel_width::<V>(start, sizes.value_dim);
                let b = start * (sizes.tile_keys / keys_per_step) + steps.start * width;
                let work = Product {
                    a: score_row(ctx, item_row).add(steps.start),
                    a_stride: sizes.tile_keys,
                    b: scratch.values.add(b),
                    b_stride: width,
                    depth: steps.len(),
                    skipped: steps.start % STEPS_PER_CHAIN,
                    c: ctx.output_row(item_row).add(start),
                    c_stride: sizes.padded_value_dim,
                    factors: factors[row..].as_ptr(),
                    scale: 1.0,
                    prefetch: &prefetch,
                    exponentials: None,
                    block_scales: None,
                };
                register_tile::run::<V>(&call.products.output, rows, width / V::LANES, work);
                start += panel;
            }
            row += rows;
        }
    }
}
