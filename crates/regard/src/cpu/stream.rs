//! Few query rows (decode): keys and values are read once, where they lie, without packing. Memory sets the pace.
//!
//! In a token-major cache the heads of a token are neighbours and the tokens of a head lie pages apart. Reading head by head then
//! touches a few lines in each of many pages, which caches, prefetchers and DRAM all serve badly. So an item takes several heads together and
//! fetches in the order of memory, a block of tokens ahead of what it computes ([`Walk`]).

use super::address::{Ahead, Asked, Keys};
use super::compiled::{ROWS, cover};
use super::kernel::{Call, Item, Scratch};
use super::product;
use super::softmax;
use super::tile::keys_a_step;
use super::vector::{Storage, Vector};
use crate::problem::MAX_HEAD_DIM;
use half::bf16;
use std::ops::Range;

/// The most query rows of a head that are streamed.
pub(super) const MAX_ROWS: usize = 8;

/// The most query rows of all heads of an item.
pub(super) const ITEM_ROWS: usize = 64;

/// Heads of `rows` rows that one item takes, of `heads` in all: nearly equal shares.
pub(super) fn heads_an_item(rows: usize, heads: usize) -> usize {
    let most = (ITEM_ROWS / rows.max(1)).max(1);
    heads.div_ceil(heads.div_ceil(most))
}

/// Tokens a block, at least, in a token-major cache: a block is walked head by head while the next one is fetched in the order of memory.
/// Few enough that the hardware still sees few streams, enough to share what a head loads.
const TOKENS_A_BLOCK: usize = 8;

/// The same in a head-major cache, where a head's tokens are neighbours: as many as the first-level cache holds.
const TOKENS_A_BLOCK_HEAD_MAJOR: usize = 32;

/// Vectors of a head dim that a dot product takes from zero in one chain: levels of four lanes take more than one such run for the largest head dims.
/// Longer ones stray too far where all terms have one sign (docs/semantics.md, "Tolerance").
const DOT_RUN: usize = MAX_HEAD_DIM / 8;

/// No block is longer.
pub(super) const MAX_BLOCK: usize = 64;

/// The keys (or values) of some heads for some tokens.
pub(super) struct Walk<'a> {
    /// Each token's first head, and some tokens more.
    pub addresses: &'a [*const u8],
    pub head_bytes: i64,
    pub tokens: usize,
    pub heads: usize,
    token_major: bool,
}

impl<'a> Walk<'a> {
    pub fn new(keys: &Keys, addresses: &'a [*const u8], (tokens, heads): (usize, usize)) -> Walk<'a> {
        let head_bytes = keys.head_bytes();
        let token_major = heads > 1 && head_bytes.unsigned_abs() < keys.key_bytes().unsigned_abs();
        Walk { addresses, head_bytes, tokens, heads, token_major }
    }

    /// Bytes from a token's first head to another of the walk's heads. Of one head the stride may be any number: see [`Keys`].
    pub fn head_offset(&self, head: usize) -> i64 {
        (head as i64).wrapping_mul(self.head_bytes)
    }

    /// Tokens a block: whole groups of `group`.
    fn block(&self, group: usize) -> usize {
        let least = if self.token_major { TOKENS_A_BLOCK } else { TOKENS_A_BLOCK_HEAD_MAJOR };
        least.next_multiple_of(group)
    }

    /// What to fetch while `block` is computed: as many rows of the tokens that follow as the block has, in the order of memory. Each head's share
    /// of the work takes the next share of them.
    pub fn ahead(&self, block: &Range<usize>) -> Upcoming<'_> {
        Upcoming { walk: self, first: block.end, count: block.len(), token: 0, head: 0 }
    }
}

/// The rows of a block to come, handed out in the order of memory.
pub(super) struct Upcoming<'a> {
    walk: &'a Walk<'a>,
    first: usize,
    count: usize,
    token: usize,
    head: usize,
}

impl Upcoming<'_> {
    /// The next rows, as many as a head has in the block.
    #[inline(always)]
    pub fn share<'b>(&mut self, rows: &'b mut [*const u8; MAX_BLOCK]) -> &'b [*const u8] {
        let last = self.walk.addresses.len() - 1;
        for row in &mut rows[..self.count] {
            let address = self.walk.addresses[(self.first + self.token).min(last)];
            *row = address.wrapping_offset(self.walk.head_offset(self.head) as isize);
            let (inner, end) = match self.walk.token_major {
                true => (&mut self.head, self.walk.heads),
                false => (&mut self.token, self.count),
            };
            *inner += 1;
            if *inner == end {
                *inner = 0;
                *(if self.walk.token_major { &mut self.token } else { &mut self.head }) += 1;
            }
        }
        &rows[..self.count]
    }
}

/// Takes the item's rows through the tile that starts at key `first`, of which `valid` is this item's; the item's keys end at `end`.
///
/// # Safety
/// As [`run_item`](super::kernel::run_item), for an item of at most [`ITEM_ROWS`] rows whose queries are loaded, and head dims that are
/// whole vectors.
#[inline(always)]
pub(super) unsafe fn attend_tile<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (k, v): (&Keys, &Keys),
    (first, valid, end): (usize, Range<usize>, usize),
) {
    let shape = &call.shape;
    // SAFETY: the scratch layout has room for two tiles' addresses of keys and of values (its bytes are initialised, and any are an
    // address), and for a tile of scores for ITEM_ROWS rows; `valid` is not empty and lies inside the tile.
    unsafe {
        let start = first + valid.start;
        let [k_addresses, v_addresses] = scratch.addresses(shape).map(|addresses| &mut *addresses);
        k.addresses_ahead(start..end, k_addresses);
        v.addresses_ahead(start..end, v_addresses);
        let size = (valid.len(), item.heads.len());
        let walk = Walk::new(k, k_addresses, size);
        all_dots::<V, E>(call, item, scratch, &walk, valid.start);
        let mut factors = [1.0f32; ITEM_ROWS];
        let scores = |row| scratch.scores.add(row * shape.tile_keys);
        let computed = valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES);
        let places = (first, &valid, computed);
        softmax::item_rows(call, item, scratch, 0..item.all_rows(), places, (scores, &mut factors));
        let walk = Walk::new(v, v_addresses, size);
        all_weighted::<V, E, PAIRED>(call, item, scratch, (&walk, valid.start), &mut factors);
    }
}

/// Scores of `M` query rows of a head against `J` of its keys.
pub(super) struct Dots<'a> {
    /// `M` rows, `query_stride` apart.
    pub queries: *const f32,
    pub query_stride: usize,
    /// The keys' addresses (for head 0), and what to add to each. Where there are fewer than `J`, the last one stands for the rest.
    pub keys: &'a [*const u8],
    pub offset: i64,
    pub ahead: Ahead<'a>,
    /// Head dim: a multiple of LANES.
    pub dims: usize,
    /// `M` rows of a score a key, `score_stride` apart.
    pub scores: *mut f32,
    pub score_stride: usize,
    /// Multiplies the scores.
    pub scale: f32,
}

/// To be inlined into a function that has V's features enabled.
///
/// # Safety
/// The pointers cover what [`Dots`] says, and V's features are enabled where this is inlined.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, E: Storage, const M: usize, const J: usize, const PAIRED: bool>(
    work: &Dots,
) {
    // SAFETY: `dims` is a multiple of LANES, so whole vectors of queries and keys lie inside their rows. There is a key at least, and no more
    // than J scores are stored.
    unsafe {
        let count = work.keys.len().min(J);
        let mut keys = [std::ptr::null::<u8>(); J];
        for (j, key) in keys.iter_mut().enumerate() {
            *key = work.keys[j.min(count - 1)].wrapping_offset(work.offset as isize);
        }
        let mut asked = Asked::default();
        let mut scores = [0.0f32; 16];
        let mut dim = 0;
        while dim < work.dims {
            let end = if V::LANES * DOT_RUN < MAX_HEAD_DIM {
                work.dims.min(dim + V::LANES * DOT_RUN)
            } else {
                work.dims
            };
            let mut sums = [V::splat(0.0); 16];
            while PAIRED && dim < end {
                let pairs = (end - dim).min(2 * V::LANES);
                // Before the loads: what is loaded would not all fit into registers across the branches of this.
                for _ in 0..J {
                    asked.line::<V>(&work.ahead);
                }
                let mut columns = [V::splat(0.0); J];
                for (column, key) in columns.iter_mut().zip(keys) {
                    *column = V::load_pairs(key.cast::<bf16>().add(dim), pairs);
                }
                for m in 0..M {
                    let query = work.queries.add(m * work.query_stride).cast::<bf16>();
                    let query = V::load_pairs(query.add(dim), pairs);
                    for (j, &column) in columns.iter().enumerate() {
                        sums[m * J + j] = query.pair_mul_add(column, sums[m * J + j]);
                    }
                }
                dim += pairs;
            }
            while dim < end {
                for _ in 0..J {
                    asked.line::<V>(&work.ahead);
                }
                let mut columns = [V::splat(0.0); J];
                for (column, key) in columns.iter_mut().zip(keys) {
                    *column = E::load::<V>(key.cast::<E>().add(dim));
                }
                for m in 0..M {
                    let query = V::load(work.queries.add(m * work.query_stride + dim));
                    for (j, &column) in columns.iter().enumerate() {
                        sums[m * J + j] = query.mul_add(column, sums[m * J + j]);
                    }
                }
                dim += V::LANES;
            }
            let mut run = [0.0f32; 16];
            V::sums(&sums, run.as_mut_ptr());
            for (score, run) in scores.iter_mut().zip(run) {
                *score += run;
            }
        }
        for score in &mut scores {
            *score *= work.scale;
        }
        for m in 0..M {
            let (from, to) = (scores.as_ptr().add(m * J), work.scores.add(m * work.score_stride));
            // The whole group in one store, where it is whole.
            match count == J {
                true => to.cast::<[f32; J]>().write_unaligned(from.cast::<[f32; J]>().read()),
                false => to.copy_from_nonoverlapping(from, count),
            }
        }
    }
}

/// All scores of the tile. They start at `first` in their rows.
#[inline(always)]
unsafe fn all_dots<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    walk: &Walk,
    first: usize,
) {
    let shape = &call.shape;
    // Keys a group: as many as there are accumulators for.
    let group = V::DOTS / item.rows.min(V::DOTS);
    let run = call.compiled.dots[E::INDEX][item.rows - 1];
    let block = walk.block(group);
    let mut rows = [std::ptr::null(); MAX_BLOCK];
    let mut start = 0;
    while start < walk.tokens {
        let tokens = start..walk.tokens.min(start + block);
        let mut upcoming = walk.ahead(&tokens);
        for head in 0..walk.heads {
            let ahead = upcoming.share(&mut rows);
            let row = head * item.rows;
            let mut token = start;
            while token < tokens.end {
                let group = token..tokens.end.min(token + group);
                let work = Dots {
                    queries: scratch.queries.wrapping_add(row * shape.padded_head_dim),
                    query_stride: shape.padded_head_dim,
                    keys: &walk.addresses[group.clone()],
                    offset: walk.head_offset(head),
                    ahead: Ahead {
                        rows: &ahead[token - start..group.end - start],
                        row_bytes: shape.head_dim * size_of::<E>(),
                    },
                    dims: shape.head_dim,
                    scores: scratch.scores.wrapping_add(row * shape.tile_keys + first + token),
                    score_stride: shape.tile_keys,
                    scale: call.score_factor,
                };
                // SAFETY: the keys, queries and scores are the item's. Head dims are whole vectors of the level that `run` is of:
                // selection streams nothing else.
                unsafe { run(&work) };
                token = group.end;
            }
        }
        start = tokens.end;
    }
}

/// `C = factor * C + P V` for `M` rows of probabilities and `N` vectors of the head dim.
pub(super) struct Weighted<'a> {
    /// `M` rows of probabilities, one a value: floats, or bf16 in the first half of their row.
    pub probabilities: *const f32,
    /// Floats from a row to the next.
    pub probability_stride: usize,
    /// The values' addresses (for head 0), and what to add to each.
    pub values: &'a [*const u8],
    pub offset: i64,
    pub ahead: Ahead<'a>,
    /// `M` rows of `N` vectors.
    pub output: *mut f32,
    pub output_stride: usize,
    /// `M` floats.
    pub factors: *const f32,
}

/// To be inlined into a function that has V's features enabled.
///
/// # Safety
/// As [`dots`], for [`Weighted`].
#[inline(always)]
pub(super) unsafe fn weighted<V: Vector, E: Storage, const M: usize, const N: usize, const PAIRED: bool>(
    work: &Weighted,
) {
    if PAIRED {
        // SAFETY: passed on. Code that pairs runs bf16 only.
        return unsafe { weighted_pairs::<V, M, N>(work) };
    }
    // SAFETY: the values hold N whole vectors from where the work starts, output and probabilities M rows.
    unsafe {
        // From zero: a block of values is a run of the sum over all keys.
        let mut sums = [[V::splat(0.0); N]; M];
        let mut asked = Asked::default();
        for (k, value) in work.values.iter().enumerate() {
            let value = value.wrapping_offset(work.offset as isize).cast::<E>();
            let mut columns = [V::splat(0.0); N];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = E::load::<V>(value.add(n * V::LANES));
                asked.line::<V>(&work.ahead);
            }
            for (m, row) in sums.iter_mut().enumerate() {
                let probability = V::splat(*work.probabilities.add(m * work.probability_stride + k));
                for (sum, &column) in row.iter_mut().zip(&columns) {
                    *sum = probability.mul_add(column, *sum);
                }
            }
        }
        let to = (work.output, work.output_stride);
        product::join::<V, M, N>(&sums, to, |m, total, sum| {
            total.mul_add(V::splat(*work.factors.add(m)), sum)
        });
    }
}

/// [`weighted`] of bf16, two values at a time.
///
/// # Safety
/// As [`weighted`].
#[inline(always)]
unsafe fn weighted_pairs<V: Vector, const M: usize, const N: usize>(work: &Weighted) {
    let value = |k: usize| work.values[k].wrapping_offset(work.offset as isize).cast::<bf16>();
    let row = |m: usize| work.probabilities.wrapping_add(m * work.probability_stride).cast::<bf16>();
    // SAFETY: as `weighted`.
    unsafe {
        // From zero: a block of values is a run of the sum over all keys.
        let mut sums = [[V::splat(0.0); N]; M];
        let mut asked = Asked::default();
        let mut k = 0;
        while k < work.values.len() {
            // An odd last value is its own partner, with probability 0.
            let pair = k + 1 < work.values.len();
            let (low, high) = (value(k), value(if pair { k + 1 } else { k }));
            let mut columns = [V::splat(0.0); N];
            V::interleave_all(low, high, &mut columns);
            for _ in 0..N {
                asked.line::<V>(&work.ahead);
            }
            for (m, row_sums) in sums.iter_mut().enumerate() {
                let bits = match pair {
                    true => row(m).add(k).cast::<u32>().read_unaligned(),
                    false => u32::from((*row(m).add(k)).to_bits()),
                };
                let probabilities = V::splat(f32::from_bits(bits));
                for (sum, &column) in row_sums.iter_mut().zip(&columns) {
                    *sum = probabilities.pair_mul_add(column, *sum);
                }
            }
            k += 2;
        }
        let to = (work.output, work.output_stride);
        product::join::<V, M, N>(&sums, to, |m, total, sum| {
            total.mul_add(V::splat(*work.factors.add(m)), sum)
        });
    }
}

/// Adds the tile's weighted values to all rows' outputs, block by block of tokens. Scores start at `first` in their rows; the factors are
/// overwritten with ones once they have been applied.
#[inline(always)]
unsafe fn all_weighted<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (walk, first): (&Walk, usize),
    factors: &mut [f32; ITEM_ROWS],
) {
    let block = walk.block(1);
    let mut rows = [std::ptr::null(); MAX_BLOCK];
    let mut start = 0;
    while start < walk.tokens {
        let tokens = start..walk.tokens.min(start + block);
        let mut upcoming = walk.ahead(&tokens);
        for head in 0..walk.heads {
            let ahead = upcoming.share(&mut rows);
            // SAFETY: the rows, columns and values are the item's.
            unsafe {
                weighted_head::<V, E, PAIRED>(
                    call,
                    item,
                    scratch,
                    (walk, first),
                    (head, tokens.clone(), ahead),
                    factors,
                )
            };
        }
        *factors = [1.0; ITEM_ROWS];
        start = tokens.end;
    }
}

/// One head's part of a block of tokens, in register tiles.
#[inline(always)]
unsafe fn weighted_head<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (walk, first): (&Walk, usize),
    (head, tokens, ahead): (usize, Range<usize>, &[*const u8]),
    factors: &[f32; ITEM_ROWS],
) {
    let shape = &call.shape;
    let tiles = &call.compiled.weighted[E::INDEX];
    // Each pass over the values asks for its share of what is ahead.
    let mut widths = 0;
    cover(shape.value_dim / V::LANES, V::COLUMNS, |_, _| widths += 1);
    let blocks = item.rows.div_ceil(ROWS);
    let share = tokens.len().div_ceil(blocks * widths);
    let (mut row, last, mut asked) = (head * item.rows, (head + 1) * item.rows, 0);
    for block in 0..blocks {
        let rows = (last - row).div_ceil(blocks - block);
        cover(shape.value_dim / V::LANES, V::COLUMNS, |width, vector| {
            let column = vector * V::LANES;
            // SAFETY: rows of the item, columns of the head dim.
            unsafe {
                let work = Weighted {
                    probabilities: scratch
                        .scores
                        .add(row * shape.tile_keys)
                        .byte_add((first + tokens.start) * size_of::<f32>() / keys_a_step::<PAIRED>()),
                    probability_stride: shape.tile_keys,
                    values: &walk.addresses[tokens.clone()],
                    offset: walk.head_offset(head).wrapping_add((column * size_of::<E>()) as i64),
                    ahead: Ahead {
                        rows: &ahead[asked.min(ahead.len())..ahead.len().min(asked + share)],
                        row_bytes: shape.value_dim * size_of::<E>(),
                    },
                    output: scratch.output.add(row * shape.padded_value_dim + column),
                    output_stride: shape.padded_value_dim,
                    factors: factors.as_ptr().add(row),
                };
                tiles[rows - 1][width](&work);
            }
            asked += share;
        });
        row += rows;
    }
}
