//! Few query rows (decode): keys and values are read once, where they lie, without packing. Memory sets the pace, so the next rows are
//! prefetched: in a token-major cache neighbouring keys of a head lie pages apart, where no hardware prefetcher looks.

use super::vector::{Storage, Vector};

/// Scores of `M` query rows against `J` keys.
pub(super) struct Dots {
    /// `M` rows of `dims` floats.
    pub queries: *const f32,
    pub query_stride: usize,
    /// The `J` keys' addresses, and those of the keys to prefetch.
    pub keys: *const *const u8,
    pub prefetch: *const *const u8,
    /// Head dim: a multiple of LANES.
    pub dims: usize,
    /// `M` rows of `J` scores.
    pub scores: *mut f32,
    pub score_stride: usize,
}

/// The body of [`Vector::dots`], to be inlined into a function that has V's features enabled.
///
/// # Safety
/// The pointers cover what [`Dots`] says (prefetched addresses may be anything), and V's features are enabled where this is inlined.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, E: Storage, const M: usize, const J: usize>(work: &Dots) {
    // SAFETY: offsets stay inside what the caller vouches for.
    unsafe {
        for j in 0..J {
            prefetch_row::<V>(*work.prefetch.add(j), work.dims * size_of::<E>());
        }
        let mut keys = [std::ptr::null::<E>(); J];
        for (j, key) in keys.iter_mut().enumerate() {
            *key = (*work.keys.add(j)).cast();
        }
        let mut sums = [V::splat(0.0); 16];
        let mut dim = 0;
        while dim < work.dims {
            let mut lanes = [V::splat(0.0); J];
            for (lane, key) in lanes.iter_mut().zip(keys) {
                *lane = E::load::<V>(key.add(dim));
            }
            for m in 0..M {
                let query = V::load(work.queries.add(m * work.query_stride + dim));
                for (j, lane) in lanes.iter().enumerate() {
                    sums[m * J + j] = query.mul_add(*lane, sums[m * J + j]);
                }
            }
            dim += V::LANES;
        }
        let mut scores = [0.0f32; 16];
        V::sums(&sums, scores.as_mut_ptr());
        for m in 0..M {
            for j in 0..J {
                *work.scores.add(m * work.score_stride + j) = scores[m * J + j];
            }
        }
    }
}

/// `C = factor * C + P V` for `M` rows of probabilities and `N` vectors of the head dim.
pub(super) struct Weighted {
    /// `M` rows of `depth` probabilities.
    pub probabilities: *const f32,
    pub probability_stride: usize,
    /// `depth` values' addresses.
    pub values: *const *const u8,
    pub depth: usize,
    /// The first element of each value to use.
    pub first: usize,
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
        for k in 0..work.depth {
            let value = (*work.values.add(k)).cast::<E>().add(work.first);
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

/// Asks for all cache lines of a row.
///
/// # Safety
/// As [`Vector`]'s methods; the address may be anything.
#[inline(always)]
pub(super) unsafe fn prefetch_row<V: Vector>(address: *const u8, bytes: usize) {
    let mut offset = 0;
    while offset < bytes {
        // SAFETY: prefetching has no effect but on caches.
        unsafe { V::prefetch(address.wrapping_add(offset)) };
        offset += 64;
    }
}

/// Scores of `rows` query rows against `count` keys, as many at a time as there are accumulators. `ahead` keys further on,
/// rows are prefetched; the address list goes on that far.
///
/// # Safety
/// As [`dots`]; `rows` is 1..=[`MAX_ROWS`], and the address list holds `count + ahead` entries (and what a last group overlaps).
#[inline(always)]
pub(super) unsafe fn all_dots<V: Vector, E: Storage>(rows: usize, count: usize, ahead: usize, first: &Dots) {
    macro_rules! groups {
        ($rows:literal, $keys:literal) => {{
            let mut key = 0;
            // SAFETY: whole groups of keys, then single ones.
            unsafe {
                while key + $keys <= count {
                    V::dots::<E, $rows, $keys>(&at_key(first, key, ahead));
                    key += $keys;
                }
                while key < count {
                    V::dots::<E, $rows, 1>(&at_key(first, key, ahead));
                    key += 1;
                }
            }
        }};
    }
    // Keys a group: DOTS / rows. The guards remove the other level's shapes.
    match rows {
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

fn at_key(first: &Dots, key: usize, ahead: usize) -> Dots {
    Dots {
        keys: first.keys.wrapping_add(key),
        prefetch: first.keys.wrapping_add(key + ahead),
        scores: first.scores.wrapping_add(key),
        ..*first
    }
}

/// The most query rows that are streamed.
pub(super) const MAX_ROWS: usize = 8;

/// Values that are summed while their rows are in the first-level cache, before the next columns' turn.
const VALUES_A_PASS: usize = 32;

/// Adds the weighted sums of `work.depth` values to `rows` rows of `dims` columns. `ahead` as in [`all_dots`]. `work` is for the first row, value
/// and column; its factors are overwritten with ones.
///
/// # Safety
/// As [`weighted`], for all rows and columns.
#[inline(always)]
pub(super) unsafe fn all_weighted<V: Vector, E: Storage>(
    rows: usize,
    dims: usize,
    ahead: usize,
    factors: &mut [f32; MAX_ROWS],
    work: &Weighted,
) {
    macro_rules! tile {
        ($rows:expr, $columns:expr, $work:expr; $(($m:literal $n:literal))*) => {
            match ($rows, $columns) {
                $(($m, $n) if $m <= V::ROWS && $n <= V::COLUMNS => V::weighted::<E, $m, $n>($work),)*
                _ => unreachable!("a register tile has 1..=ROWS rows and 1..=COLUMNS columns"),
            }
        };
    }
    let mut value = 0;
    while value < work.depth {
        let depth = (work.depth - value).min(VALUES_A_PASS);
        // SAFETY: tiles cover the rows, columns and values once each.
        unsafe {
            for i in 0..depth {
                prefetch_row::<V>(*work.values.add(value + ahead + i), dims * size_of::<E>());
            }
            let mut row = 0;
            let blocks = rows.div_ceil(V::ROWS);
            for block in 0..blocks {
                let height = (rows - row).div_ceil(blocks - block);
                let mut column = 0;
                while column < dims {
                    let width = (dims - column).min(V::LANES * V::COLUMNS);
                    let part = Weighted {
                        probabilities: work.probabilities.add(row * work.probability_stride + value),
                        values: work.values.add(value),
                        depth,
                        first: column,
                        output: work.output.add(row * work.output_stride + column),
                        factors: factors.as_ptr().add(row),
                        ..*work
                    };
                    tile!(height, width / V::LANES, &part;
                        (1 1) (1 2) (1 3) (1 4) (2 1) (2 2) (2 3) (2 4) (3 1) (3 2) (3 3) (3 4)
                        (4 1) (4 2) (4 3) (4 4) (5 1) (5 2) (5 3) (5 4) (6 1) (6 2) (6 3) (6 4));
                    column += width;
                }
                row += height;
            }
        }
        *factors = [1.0; MAX_ROWS];
        value += depth;
    }
}
