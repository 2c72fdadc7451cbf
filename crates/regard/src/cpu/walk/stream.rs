//! Few query rows (decode): keys and values are streamed in place, each read once, without packing.
//! Memory bandwidth is the limit.
//!
//! An item takes several heads together, so that a token-major cache is read in memory order: see
//! [`HeadRows`].

use super::address::{HeadBlock, HeadRows, MAX_BLOCK_TOKENS};
use super::call::ItemContext;
use super::item::TileSpan;
use super::operand::{Operand, ReadRows, RowReader};
use super::rows::softmax_rows;
use crate::cpu::product::dots::Dots;
use crate::cpu::product::prefetch::PrefetchRows;
use crate::cpu::product::register_tile::terms_per_step;
use crate::cpu::product::weighted::Weighted;
use crate::cpu::product::{MAX_DOT_ROWS, ROWS, cover, cover_count};
use crate::cpu::vector::Vector;

/// Maximum query rows per head that are streamed.
pub const MAX_ROWS: usize = MAX_DOT_ROWS;

/// Maximum query rows of all heads of an item.
pub const ITEM_ROWS: usize = 64;

/// Heads per item, for `rows` rows per head and `heads` heads in total: nearly equal shares.
pub fn heads_per_item(rows: usize, heads: usize) -> usize {
    let max_heads = (ITEM_ROWS / rows.max(1)).max(1);
    heads.div_ceil(heads.div_ceil(max_heads))
}

/// Fewest tokens per block in a token-major cache. A block is walked head by head while the next
/// block is prefetched in memory order. Few enough that the hardware sees few streams; enough to
/// amortise what a head loads.
const MIN_BLOCK_TOKENS: usize = 8;

/// The same in a head-major cache, where a head's tokens are adjacent: as many as L1 holds.
const MIN_BLOCK_TOKENS_HEAD_MAJOR: usize = 32;

/// Tokens per block: a multiple of `group`.
fn tokens_per_block(rows: &HeadRows, group: usize) -> usize {
    let min = if rows.token_major { MIN_BLOCK_TOKENS } else { MIN_BLOCK_TOKENS_HEAD_MAJOR };
    min.next_multiple_of(group)
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
    // `valid` is not empty and lies inside the tile.
    unsafe {
        let [k_addresses, v_addresses] = scratch.addresses(sizes).map(|addresses| &mut *addresses);
        k.padded_addresses(span, k_addresses);
        v.padded_addresses(span, v_addresses);
        let k_rows = HeadRows::new(&k.rows, k_addresses, valid.len(), item.heads.len());
        compute_scores::<V>(ctx, &k.reader, &k_rows, valid.start);
        let mut factors = [1.0f32; ITEM_ROWS];
        let scores = |row| scratch.scores.add(row * sizes.tile_keys);
        let computed = valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES);
        softmax_rows(ctx, 0..item.all_rows(), span, computed, scores, &mut factors);
        let v_rows = HeadRows::new(&v.rows, v_addresses, valid.len(), item.heads.len());
        accumulate_output::<V, PAIRED>(ctx, &v.reader, &v_rows, valid.start, &mut factors);
    }
}

/// S = scale * Q K^T for the tile, block by block of tokens. The scores of the first token are at
/// `first` in their rows.
#[inline(always)]
unsafe fn compute_scores<V: Vector>(
    ctx: ItemContext,
    reader: &RowReader,
    k_rows: &HeadRows,
    first: usize,
) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    // As many keys per group as there are accumulators for.
    let keys_per_group = V::DOT_SUMS / item.rows.min(V::DOT_SUMS);
    let dots = call.products.dots[reader.index][item.rows - 1];
    let block_tokens = tokens_per_block(k_rows, keys_per_group);
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut converted = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < k_rows.tokens {
        let tokens = start..k_rows.tokens.min(start + block_tokens);
        let mut prefetch_order = k_rows.prefetch_after(&tokens);
        for head in 0..k_rows.heads {
            let prefetch = prefetch_order.next_rows(&mut buffer);
            let row = head * item.rows;
            let (addresses, offset) = (&k_rows.addresses[tokens.clone()], k_rows.head_offset(head));
            // SAFETY: rows of the item; a block has no more than MAX_BLOCK_TOKENS.
            let keys = unsafe { reader.read(addresses, offset, &mut converted) };
            let mut token = start;
            while token < tokens.end {
                let group = token..tokens.end.min(token + keys_per_group);
                let score = row * sizes.tile_keys + first + token;
                let work = Dots {
                    queries: scratch.queries.wrapping_add(row * sizes.padded_head_dim),
                    query_stride: sizes.padded_head_dim,
                    keys: &keys.addresses[token - start..group.end - start],
                    offset: keys.offset,
                    prefetch: PrefetchRows {
                        rows: &prefetch[token - start..group.end - start],
                        row_bytes: sizes.key_bytes,
                    },
                    dims: sizes.head_dim,
                    scores: scratch.scores.wrapping_add(score),
                    score_stride: sizes.tile_keys,
                    scale: call.score_factor,
                };
                // SAFETY: the keys, queries and scores are the item's. Head dims are whole vectors
                // of the kernel's level: selection streams no others.
                unsafe { dots(&work) };
                token = group.end;
            }
        }
        start = tokens.end;
    }
}

/// O = factor * O + P V for the tile, block by block of tokens. The scores of the first token are
/// at `first` in their rows. Once a block has applied the factors, they are set to 1.
#[inline(always)]
unsafe fn accumulate_output<V: Vector, const PAIRED: bool>(
    ctx: ItemContext,
    reader: &RowReader,
    v_rows: &HeadRows,
    first: usize,
    factors: &mut [f32; ITEM_ROWS],
) {
    let block_tokens = tokens_per_block(v_rows, 1);
    let mut buffer = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut converted = [std::ptr::null(); MAX_BLOCK_TOKENS];
    let mut start = 0;
    while start < v_rows.tokens {
        let tokens = start..v_rows.tokens.min(start + block_tokens);
        let mut prefetch_order = v_rows.prefetch_after(&tokens);
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
    prefetch: &[*const u8],
    factors: &[f32; ITEM_ROWS],
) {
    let ItemContext { call, item, scratch } = ctx;
    let sizes = ctx.sizes();
    let weighted = &call.products.weighted[reader.index];
    let vectors = sizes.value_dim / V::LANES;
    // Each pass over the values prefetches an equal portion of the next block.
    let row_blocks = item.rows.div_ceil(ROWS);
    let passes = row_blocks * cover_count(vectors, V::TILE_VECTORS);
    let portion = block.tokens.len().div_ceil(passes);
    let (mut row, last) = (block.head * item.rows, (block.head + 1) * item.rows);
    let mut prefetched = 0;
    for row_block in 0..row_blocks {
        let rows = (last - row).div_ceil(row_blocks - row_block);
        cover(vectors, V::TILE_VECTORS, |width, vector| {
            let column = vector * V::LANES;
            let portion_start = prefetched.min(prefetch.len());
            let portion_end = prefetch.len().min(prefetched + portion);
            let column_bytes = (column * reader.element_bytes) as i64;
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
                    offset: values.offset.wrapping_add(column_bytes),
                    prefetch: PrefetchRows {
                        rows: &prefetch[portion_start..portion_end],
                        row_bytes: sizes.value_bytes,
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
