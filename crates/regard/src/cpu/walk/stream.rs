//! Few query rows (decode): keys and values are streamed in place, each read once, without packing.
//! Memory bandwidth is the limit.
//!
//! An item takes several heads together, so that a token-major cache is read in memory order: see
//! [`HeadRows`].

use super::address::{HeadBlock, HeadRows, MAX_BLOCK_TOKENS, PrefetchOrder};
use super::call::ItemContext;
use super::item::TileSpan;
use super::operand::{Operand, ReadRows, RowReader};
use super::rows::{SoftmaxRows, softmax_rows};
use crate::cpu::product::dots::Dots;
use crate::cpu::product::prefetch::PrefetchRows;
use crate::cpu::product::register_tile::terms_per_step;
use crate::cpu::product::weighted::Weighted;
use crate::cpu::product::{MAX_DOT_ROWS, ROWS, cover, cover_count};
use crate::cpu::vector::Vector;
use std::ops::Range;

/// Maximum query rows per head that are streamed.
pub const MAX_ROWS: usize = MAX_DOT_ROWS;

/// Maximum query rows of all heads of an item.
pub const ITEM_ROWS: usize = 64;

/// Heads per item, for `rows` rows per head and `heads` heads in total: nearly equal shares.
pub fn heads_per_item(rows: usize, heads: usize) -> usize {
    let max_heads = (ITEM_ROWS / rows.max(1)).max(1);
    heads.div_ceil(heads.div_ceil(max_heads))
}

/// Tokens per block. A block is walked head by head while the next block is prefetched in memory
/// order. Enough to amortise the loads per head. Few enough that the next block stays in L2, and
/// that an item starts with few cold keys.
const BLOCK_TOKENS: Range<usize> = 8..32;

/// Bytes per block in a token-major cache, within [`BLOCK_TOKENS`]: as much as L1 holds.
const BLOCK_BYTES: usize = 32 << 10;

/// Tokens per block: a multiple of `group`.
fn tokens_per_block(rows: &HeadRows, group: usize) -> usize {
    let tokens = match rows.token_major {
        true => BLOCK_BYTES / (rows.heads * rows.row_bytes).max(1),
        // A head's tokens are adjacent.
        false => BLOCK_TOKENS.end,
    };
    tokens.clamp(BLOCK_TOKENS.start, BLOCK_TOKENS.end).next_multiple_of(group)
}

/// Takes the item's rows through the valid keys of a tile.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for an item of at most [`ITEM_ROWS`] rows whose
/// queries are loaded, and head dims that are whole vectors.
#[inline(always)]
pub unsafe fn attend_tile<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    k: &Operand,
    v: &Operand,
    span: &TileSpan,
) {
    let ItemContext { item, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let valid = &span.valid;
    // SAFETY: the scratch has room for the addresses of two tiles of keys and of values (its bytes
    // are initialized, and any bytes are an address), and for a tile of scores of ITEM_ROWS rows.
    // `valid` is not empty and is inside the tile.
    unsafe {
        let [k_addresses, v_addresses] = scratch.addresses(sizes).map(|addresses| &mut *addresses);
        let k_addresses = k.known_addresses(span, k_addresses);
        let v_addresses = v.known_addresses(span, v_addresses);
        let (tokens, heads) = (valid.len(), item.heads.len());
        let k_rows = HeadRows::new(&k.rows, k_addresses, tokens, heads, sizes.key_bytes);
        let v_rows = HeadRows::new(&v.rows, v_addresses, tokens, heads, sizes.value_bytes);
        let later = k_addresses.len() - tokens;
        let k_later = HeadRows::new(&k.rows, &k_addresses[tokens..], later, heads, sizes.key_bytes);
        let rows = TileRows { rows: &k_rows, next: &v_rows, first: valid.start };
        compute_scores::<V>(ctx, &k.reader, &rows);
        let mut factors = [1.0f32; ITEM_ROWS];
        let scores = |row| scratch.scores.add(row * sizes.tile_keys);
        let computed = valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES);
        softmax_rows(
            ctx,
            0..item.all_rows(),
            SoftmaxRows { span, computed, exponentials_later: None },
            &scores,
            &mut factors,
        );
        let rows = TileRows { rows: &v_rows, next: &k_later, first: valid.start };
        accumulate_output::<V, PAIRED>(ctx, &v.reader, &rows, &mut factors);
    }
}

/// The keys (or values) of a tile, and the rows that are read after them.
struct TileRows<'a> {
    rows: &'a HeadRows<'a>,
    /// The values of the tile (or the keys of the next one), to be prefetched.
    next: &'a HeadRows<'a>,
    /// Index of the first token's score in each row of scores.
    first: usize,
}

impl TileRows<'_> {
    /// The rows to prefetch while the tokens of `block` are computed: the next block, or the first
    /// block of the rows that are read next.
    fn prefetch_after(&self, block: &Range<usize>) -> PrefetchOrder<'_> {
        if block.end < self.rows.tokens {
            return self.rows.prefetch_after(block);
        }
        self.next.prefetch_order(0..self.next.tokens.min(tokens_per_block(self.next, 1)))
    }
}

/// S = scale * Q K^T for the tile, block by block of tokens.
#[inline(always)]
unsafe fn compute_scores<V: Vector>(ctx: ItemContext, reader: &RowReader, tile: &TileRows) {
    let TileRows { rows: k_rows, first, .. } = *tile;
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let dots = call.products.dots[reader.index][item.rows - 1];
    // Whole groups of keys that have their scores computed together.
    let block_tokens = tokens_per_block(k_rows, V::DOT_SUMS);
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut converted = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < k_rows.tokens {
        let tokens = start..k_rows.tokens.min(start + block_tokens);
        let mut prefetch_order = tile.prefetch_after(&tokens);
        for head in 0..k_rows.heads {
            let prefetch = prefetch_order.next_rows(&mut buffer);
            let row = head * item.rows;
            let (addresses, offset) = (&k_rows.addresses[tokens.clone()], k_rows.head_offset(head));
            // SAFETY: rows of the item; a block has no more than MAX_BLOCK_TOKENS.
            let keys = unsafe { reader.read(addresses, offset, &mut converted) };
            let work = Dots {
                queries: scratch.queries.wrapping_add(row * sizes.padded_head_dim),
                query_stride: sizes.padded_head_dim,
                keys: keys.addresses,
                offset: keys.offset,
                prefetch,
                dims: sizes.head_dim,
                scores: scratch.scores.wrapping_add(row * sizes.tile_keys + first + start),
                score_stride: sizes.tile_keys,
                scale: call.score_factor,
            };
            // SAFETY: the keys, queries and scores are the item's. Head dims are whole vectors of
            // the kernel's level: selection streams no others.
            unsafe { dots(&work) };
        }
        start = tokens.end;
    }
}

/// O = factor * O + P V for the tile, block by block of tokens. Once a block has applied the
/// factors, they are set to 1.
#[inline(always)]
unsafe fn accumulate_output<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    tile: &TileRows,
    factors: &mut [f32; ITEM_ROWS],
) {
    let TileRows { rows: v_rows, first, .. } = *tile;
    let block_tokens = tokens_per_block(v_rows, 1);
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut converted = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < v_rows.tokens {
        let tokens = start..v_rows.tokens.min(start + block_tokens);
        let mut prefetch_order = tile.prefetch_after(&tokens);
        for head in 0..v_rows.heads {
            let prefetch = prefetch_order.next_rows(&mut buffer);
            let block = HeadBlock { head, tokens: tokens.clone(), first };
            let (addresses, offset) = (&v_rows.addresses[tokens.clone()], v_rows.head_offset(head));
            // SAFETY: the rows, columns and values are the item's; a block has no more than
            // MAX_BLOCK_TOKENS.
            unsafe {
                let values = reader.read(addresses, offset, &mut converted);
                accumulate_head::<V, PAIRED>(ctx, reader, &values, &block, prefetch, factors);
            };
        }
        *factors = [1.0; ITEM_ROWS];
        start = tokens.end;
    }
}

/// One head's part of a block, in register tiles.
#[inline(always)]
unsafe fn accumulate_head<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    values: &ReadRows,
    block: &HeadBlock,
    prefetch: PrefetchRows,
    factors: &[f32; ITEM_ROWS],
) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let weighted = &call.products.weighted[reader.index];
    let vectors = sizes.value_dim / V::LANES;
    // Each pass over the values prefetches an equal portion of the next block.
    let row_blocks = item.rows.div_ceil(ROWS);
    let passes = row_blocks * cover_count(vectors, V::TILE_VECTORS);
    let portion = prefetch.rows.len().div_ceil(passes);
    let (mut row, last) = (block.head * item.rows, (block.head + 1) * item.rows);
    let mut prefetched = 0;
    for row_block in 0..row_blocks {
        let rows = (last - row).div_ceil(row_blocks - row_block);
        cover(vectors, V::TILE_VECTORS, |width, vector| {
            let column = vector * V::LANES;
            let portion_start = prefetched.min(prefetch.rows.len());
            let portion_end = prefetch.rows.len().min(prefetched + portion);
            // SAFETY: rows of the item, columns of the head dim.
            unsafe {
                let first_key = block.first + block.tokens.start;
                let work = Weighted {
                    probabilities: scratch
                        .scores
                        .add(row * sizes.tile_keys)
                        .byte_add(first_key * size_of::<f32>() / terms_per_step::<PAIRED>()),
                    probability_stride: sizes.tile_keys,
                    values: values.addresses,
                    offset: values.offset,
                    first: column,
                    prefetch: PrefetchRows {
                        rows: &prefetch.rows[portion_start..portion_end],
                        ..prefetch
                    },
                    output: ctx.output_row(row).add(column),
                    output_stride: sizes.padded_value_dim,
                    factors: factors.as_ptr().add(row),
                };
                weighted[rows - 1][width](&work);
            }
            prefetched += portion;
        });
        row += rows;
    }
}
