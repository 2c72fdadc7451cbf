//! Few query rows (decode): keys and values are read once, where they lie, without packing. Memory sets the pace.
//!
//! In a token-major cache the heads of a token are neighbours and the tokens of a head lie pages apart. Reading head by head then
//! touches a few lines in each of many pages, which caches, prefetchers and DRAM all serve badly. So an item takes several heads together and
//! reads in the order of memory: token by token, or head by head where that is how the cache lies ([`Walk`]).

use super::address::Keys;
use super::kernel::{Call, Item, Scratch};
use super::softmax::{self, RowScores};
use super::vector::{Storage, Vector};
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

/// Bytes ahead of the reader that are asked for. The hardware follows a stream by itself; this carries it over page boundaries.
const PREFETCH_BYTES: usize = 8192;

/// Tokens whose values are summed before the running output is stored, in a token-major cache: one block is read while the
/// next is fetched.
const TOKENS_A_BLOCK: usize = 8;

/// The same in a head-major cache, where a head's values are neighbours: as many as the first-level cache holds.
const TOKENS_A_BLOCK_HEAD_MAJOR: usize = 32;

/// The keys (or values) of some heads for some tokens, in the order of memory.
struct Walk<'a> {
    /// Each token's first head, and some tokens more.
    addresses: &'a [*const u8],
    head_bytes: i64,
    tokens: usize,
    heads: usize,
    token_major: bool,
}

impl<'a> Walk<'a> {
    fn new(keys: &Keys, addresses: &'a [*const u8], tokens: usize, heads: usize) -> Walk<'a> {
        let head_bytes = keys.head_bytes();
        let token_major = heads > 1 && head_bytes.unsigned_abs() < keys.key_bytes().unsigned_abs();
        Walk { addresses, head_bytes, tokens, heads, token_major }
    }

    fn address(&self, token: usize, head: usize) -> *const u8 {
        self.addresses[token].wrapping_offset((head as i64 * self.head_bytes) as isize)
    }

    /// The token and head after these.
    fn next(&self, (token, head): (usize, usize)) -> (usize, usize) {
        if self.token_major {
            if head + 1 < self.heads { (token, head + 1) } else { (token + 1, 0) }
        } else if token + 1 < self.tokens {
            (token + 1, head)
        } else {
            (0, head + 1)
        }
    }

    /// How many tokens ahead to prefetch, for rows of `bytes`.
    fn ahead(&self, bytes: usize) -> usize {
        let step = if self.token_major { self.heads * bytes } else { bytes };
        PREFETCH_BYTES.div_ceil(step).min(self.addresses.len() - self.tokens)
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
    let (shape, group) = (&call.shape, call.problem.group());
    // SAFETY: the scratch layout has room for two tiles' addresses of keys and of values, and for a tile of scores for ITEM_ROWS rows.
    unsafe {
        // This tile's addresses and, to prefetch, those of the next.
        let entries = 2 * shape.tile_keys;
        let start = first + valid.start;
        let k_addresses = std::slice::from_raw_parts_mut(scratch.addresses, entries);
        let v_addresses = std::slice::from_raw_parts_mut(scratch.addresses.add(entries), entries);
        for (keys, addresses) in [(k, &mut *k_addresses), (v, &mut *v_addresses)] {
            let known = (end - start).min(entries);
            keys.addresses(start, &mut addresses[..known]);
            // Past the end there is nothing to ask for: ask again for the last.
            let last = addresses[known - 1];
            addresses[known..].fill(last);
        }
        let walk = Walk::new(k, k_addresses, valid.len(), item.heads.len());
        all_dots::<V, E, PAIRED>(call, item, scratch, &walk, valid.start);
        let ranges = std::slice::from_raw_parts(scratch.ranges, item.all_rows());
        let mut factors = [1.0f32; ITEM_ROWS];
        for (i, range) in ranges.iter().enumerate() {
            let (token, head) = item.place(i, group);
            let row = RowScores {
                scores: scratch.scores.add(i * shape.tile_keys),
                computed: valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES),
                visible: range.within(first, &valid),
                tile: first,
                token,
                head,
            };
            factors[i] = softmax::row::<V, false>(call, &item.sequence, &row, &mut *scratch.states.add(i));
        }
        let walk = Walk::new(v, v_addresses, valid.len(), item.heads.len());
        all_weighted::<V, E>(call, item, scratch, (&walk, valid.start), &mut factors);
    }
}

/// Dot products of some (token, head) pairs with the query rows of their heads.
pub(super) struct Dots {
    /// Each pair's key.
    pub keys: [*const u8; 16],
    /// Each pair's first query row; further rows are `query_stride` apart.
    pub queries: [*const f32; 16],
    pub query_stride: usize,
    /// Each pair's score for the first row; further rows' are `score_stride` apart.
    pub scores: [*mut f32; 16],
    pub score_stride: usize,
    /// Head dim: a multiple of LANES.
    pub dims: usize,
    /// Multiplies the scores, in `PAIRED` code only: f32 queries are scaled when they are loaded.
    pub scale: f32,
}

/// The body of [`Vector::dots`]: `J` pairs of `M` rows each. To be inlined into a function that has V's features enabled.
///
/// # Safety
/// The pointers cover what [`Dots`] says, and V's features are enabled where this is inlined.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, E: Storage, const M: usize, const J: usize, const PAIRED: bool>(
    work: &Dots,
) {
    // SAFETY: offsets stay inside what the caller vouches for.
    unsafe {
        let mut sums = [V::splat(0.0); 16];
        let mut dim = 0;
        while PAIRED && dim < work.dims {
            let count = (work.dims - dim).min(2 * V::LANES);
            for j in 0..J {
                let key = V::load_pairs(work.keys[j].cast::<bf16>().add(dim), count);
                for m in 0..M {
                    let query = work.queries[j].add(m * work.query_stride).cast::<bf16>();
                    let query = V::load_pairs(query.add(dim), count);
                    sums[m * J + j] = query.pair_mul_add(key, sums[m * J + j]);
                }
            }
            dim += count;
        }
        while dim < work.dims {
            for j in 0..J {
                let key = E::load::<V>(work.keys[j].cast::<E>().add(dim));
                for m in 0..M {
                    let query = V::load(work.queries[j].add(m * work.query_stride + dim));
                    sums[m * J + j] = query.mul_add(key, sums[m * J + j]);
                }
            }
            dim += V::LANES;
        }
        let mut scores = [0.0f32; 16];
        V::sums(&sums, scores.as_mut_ptr());
        for m in 0..M {
            for j in 0..J {
                let score = scores[m * J + j];
                *work.scores[j].add(m * work.score_stride) = if PAIRED { score * work.scale } else { score };
            }
        }
    }
}

/// All scores of the tile, in the order of memory, as many pairs at a time as there are accumulators.
#[inline(always)]
unsafe fn all_dots<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    walk: &Walk,
    first: usize,
) {
    let shape = &call.shape;
    let bytes = shape.head_dim * size_of::<E>();
    let ahead = walk.ahead(bytes);
    let mut work = Dots {
        keys: [std::ptr::null(); 16],
        queries: [std::ptr::null(); 16],
        query_stride: shape.padded_head_dim,
        scores: [std::ptr::null_mut(); 16],
        score_stride: shape.tile_keys,
        dims: shape.head_dim,
        scale: call.query_factor,
    };
    let (mut pair, mut left) = ((0, 0), walk.tokens * walk.heads);
    macro_rules! groups {
        ($rows:literal, $pairs:literal) => {
            while left > 0 {
                let count = left.min($pairs);
                for j in 0..count {
                    let (token, head) = pair;
                    let row = head * item.rows;
                    work.keys[j] = walk.address(token, head);
                    work.queries[j] = scratch.queries.wrapping_add(row * shape.padded_head_dim);
                    work.scores[j] = scratch.scores.wrapping_add(row * shape.tile_keys + first + token);
                    // SAFETY: prefetching has no effect but on caches.
                    unsafe { prefetch_row::<V>(walk.address(token + ahead, head), bytes) };
                    pair = walk.next(pair);
                }
                // A short last group does its last pair again.
                for j in count..$pairs {
                    work.keys[j] = work.keys[count - 1];
                    work.queries[j] = work.queries[count - 1];
                    work.scores[j] = work.scores[count - 1];
                }
                // SAFETY: the pairs' keys, queries and scores are the item's.
                unsafe { V::dots::<E, $rows, $pairs, PAIRED>(&work) };
                left -= count;
            }
        };
    }
    // Pairs a group: DOTS / rows. The guards remove the shapes of levels with more accumulators.
    match item.rows {
        1 if V::DOTS == 16 => groups!(1, 16),
        2 if V::DOTS == 16 => groups!(2, 8),
        3 if V::DOTS == 16 => groups!(3, 5),
        4 if V::DOTS == 16 => groups!(4, 4),
        5 if V::DOTS == 16 => groups!(5, 3),
        6 if V::DOTS == 16 => groups!(6, 2),
        7 if V::DOTS == 16 => groups!(7, 2),
        8 if V::DOTS == 16 => groups!(8, 2),
        1 => groups!(1, 8),
        2 => groups!(2, 4),
        3 => groups!(3, 2),
        4 => groups!(4, 2),
        5 => groups!(5, 1),
        6 => groups!(6, 1),
        7 => groups!(7, 1),
        8 => groups!(8, 1),
        _ => unreachable!("at most MAX_ROWS rows are streamed"),
    }
}

/// `C = factor * C + P V` for `M` rows of probabilities and `N` vectors of the head dim.
pub(super) struct Weighted<'a> {
    /// `M` rows of probabilities, one a value.
    pub probabilities: *const f32,
    pub probability_stride: usize,
    /// The values' addresses (for head 0), and what to add to each.
    pub values: &'a [*const u8],
    pub offset: i64,
    /// `M` rows of `N` vectors.
    pub output: *mut f32,
    pub output_stride: usize,
    /// `M` floats.
    pub factors: *const f32,
}

/// The body of [`Vector::weighted`], to be inlined into a function that has V's features enabled.
///
/// # Safety
/// As [`dots`], for [`Weighted`].
#[inline(always)]
pub(super) unsafe fn weighted<V: Vector, E: Storage, const M: usize, const N: usize>(work: &Weighted) {
    // SAFETY: offsets stay inside what the caller vouches for.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        for (m, row) in sums.iter_mut().enumerate() {
            let factor = V::splat(*work.factors.add(m));
            for (n, sum) in row.iter_mut().enumerate() {
                *sum = V::load(work.output.add(m * work.output_stride + n * V::LANES)).mul(factor);
            }
        }
        for (k, value) in work.values.iter().enumerate() {
            let value = value.wrapping_offset(work.offset as isize).cast::<E>();
            let mut columns = [V::splat(0.0); N];
            for (n, column) in columns.iter_mut().enumerate() {
                *column = E::load::<V>(value.add(n * V::LANES));
            }
            for (m, row) in sums.iter_mut().enumerate() {
                let probability = V::splat(*work.probabilities.add(m * work.probability_stride + k));
                for (sum, &column) in row.iter_mut().zip(&columns) {
                    *sum = probability.mul_add(column, *sum);
                }
            }
        }
        for (m, row) in sums.iter().enumerate() {
            for (n, &sum) in row.iter().enumerate() {
                sum.store(work.output.add(m * work.output_stride + n * V::LANES));
            }
        }
    }
}

/// Adds the tile's weighted values to all rows' outputs, block by block of tokens. Scores start at `first` in their rows; the factors are
/// overwritten with ones once they have been applied.
#[inline(always)]
unsafe fn all_weighted<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (walk, first): (&Walk, usize),
    factors: &mut [f32; ITEM_ROWS],
) {
    let shape = &call.shape;
    let bytes = shape.value_dim * size_of::<E>();
    let block = if walk.token_major { TOKENS_A_BLOCK } else { TOKENS_A_BLOCK_HEAD_MAJOR };
    let mut token = 0;
    while token < walk.tokens {
        let tokens = token..walk.tokens.min(token + block);
        // Shares of the next block are asked for while this one is summed, in the order of memory.
        let mut ahead = (0, 0);
        for head in 0..walk.heads {
            for _ in 0..tokens.len() {
                let asked = (tokens.end + ahead.0).min(walk.addresses.len() - 1);
                // SAFETY: prefetching has no effect but on caches.
                unsafe { prefetch_row::<V>(walk.address(asked, ahead.1), bytes) };
                ahead = match walk.token_major {
                    true => walk.next(ahead),
                    false if ahead.0 + 1 < tokens.len() => (ahead.0 + 1, ahead.1),
                    false => (0, ahead.1 + 1),
                };
            }
            // SAFETY: the rows, columns and values are the item's.
            unsafe {
                weighted_head::<V, E>(call, item, scratch, (walk, first), (head, tokens.clone()), factors)
            };
        }
        *factors = [1.0; ITEM_ROWS];
        token = tokens.end;
    }
}

/// One head's part of a block of tokens, in register tiles.
#[inline(always)]
unsafe fn weighted_head<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (walk, first): (&Walk, usize),
    (head, tokens): (usize, Range<usize>),
    factors: &[f32; ITEM_ROWS],
) {
    macro_rules! register_tile {
        ($rows:expr, $columns:expr, $work:expr; $(($m:literal $n:literal))*) => {
            match ($rows, $columns) {
                $(($m, $n) if $m <= V::ROWS && $n <= V::COLUMNS => V::weighted::<E, $m, $n>($work),)*
                _ => unreachable!("a register tile has 1..=ROWS rows and 1..=COLUMNS columns"),
            }
        };
    }
    let shape = &call.shape;
    let (mut row, last) = (head * item.rows, (head + 1) * item.rows);
    let blocks = item.rows.div_ceil(V::ROWS);
    for block in 0..blocks {
        let rows = (last - row).div_ceil(blocks - block);
        let mut column = 0;
        while column < shape.value_dim {
            let width = (shape.value_dim - column).min(V::LANES * V::COLUMNS);
            // SAFETY: rows of the item, columns of the head dim.
            unsafe {
                let work = Weighted {
                    probabilities: scratch.scores.add(row * shape.tile_keys + first + tokens.start),
                    probability_stride: shape.tile_keys,
                    values: &walk.addresses[tokens.clone()],
                    offset: head as i64 * walk.head_bytes + (column * size_of::<E>()) as i64,
                    output: scratch.output.add(row * shape.padded_value_dim + column),
                    output_stride: shape.padded_value_dim,
                    factors: factors.as_ptr().add(row),
                };
                register_tile!(rows, width / V::LANES, &work;
                    (1 1) (1 2) (1 3) (1 4) (2 1) (2 2) (2 3) (2 4) (3 1) (3 2) (3 3) (3 4)
                    (4 1) (4 2) (4 3) (4 4) (5 1) (5 2) (5 3) (5 4) (6 1) (6 2) (6 3) (6 4));
            }
            column += width;
        }
        row += rows;
    }
}

/// Asks for all cache lines of a row.
///
/// # Safety
/// As [`Vector`]'s methods; the address may be anything.
#[inline(always)]
unsafe fn prefetch_row<V: Vector>(address: *const u8, bytes: usize) {
    let mut offset = 0;
    while offset < bytes {
        // SAFETY: prefetching has no effect but on caches.
        unsafe { V::prefetch(address.wrapping_add(offset)) };
        offset += 64;
    }
}
