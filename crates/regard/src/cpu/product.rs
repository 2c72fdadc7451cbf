//! The one inner loop: a register-tiled matrix product of a few rows by a few vectors of columns.
//!
//! Both products of attention are this one. Scores: A is query rows, B a packed tile of keys (`[dim][key]`), the depth is the head
//! dim. Output: A is probabilities, B a packed tile of values (`[key][dim]`), the depth is keys. Every element of C is a sum of runs, each a chain
//! of multiply-adds over [`RUN`] terms from zero, in depth order, whatever the shape of the register tile around it: this is what makes a row's bits
//! independent of its neighbours. Runs, because a chain as long as the depth strays too far where all terms have one sign (docs/semantics.md,
//! "Tolerance").

use super::address::Fetch;
use super::compiled::{Tiles, cover};
use super::vector::Vector;

/// `C = scale * A B`, or `C = factor * C + A B` with one factor a row.
///
/// A and B hold floats, or, in `PAIRED` code, pairs of bf16 in the place of each: twice the depth in as many steps.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    /// `M` rows of `depth` floats, `a_stride` apart.
    pub a: *const f32,
    pub a_stride: usize,
    /// `depth` rows of `N` vectors, `b_stride` apart.
    pub b: *const f32,
    pub b_stride: usize,
    pub depth: usize,
    /// Steps of the first run that the depth leaves out in front: runs begin at multiples of [`run_steps`] in the tile, wherever a product begins.
    pub skipped: usize,
    /// `M` rows of `N` vectors, `c_stride` apart.
    pub c: *mut f32,
    pub c_stride: usize,
    /// `M` floats; read only when accumulating.
    pub factors: *const f32,
    /// Used only when not accumulating.
    pub scale: f32,
    /// What to fetch meanwhile, a portion every [`STEPS_A_PORTION`] steps.
    pub fetch: &'a Fetch<'a>,
}

/// Steps of depth between two portions of what is fetched: a burst of prefetches would hold up the loads of the product itself.
pub(super) const STEPS_A_PORTION: usize = 8;

/// Terms of a run: elements of the head dim, or keys. Shorter runs would be more exact and slower: each one loads and stores C.
pub(super) const RUN: usize = 64;

/// Steps of depth a run, a multiple of [`STEPS_A_PORTION`]: `PAIRED` code takes two terms a step.
pub(super) const fn run_steps<const PAIRED: bool>() -> usize {
    if PAIRED { RUN / 2 } else { RUN }
}

/// To be inlined into a function that has V's features enabled.
///
/// # Safety
/// The pointers cover what [`Product`] says, and V's features are enabled where this is inlined.
#[inline(always)]
pub(super) unsafe fn product<
    V: Vector,
    const M: usize,
    const N: usize,
    const ACCUMULATE: bool,
    const PAIRED: bool,
>(
    product: &Product,
) {
    let Product { a, a_stride, b, b_stride, depth, skipped, c, c_stride, factors, scale, fetch } = *product;
    debug_assert!(depth > 0 && skipped < run_steps::<PAIRED>());
    // SAFETY: all offsets stay inside what the caller vouches for.
    unsafe {
        let mut b = b;
        let mut step = 0;
        let mut run_end = run_steps::<PAIRED>() - skipped;
        while step < depth {
            let first = step == 0;
            let mut sums = [[V::splat(0.0); N]; M];
            let run = depth.min(run_end);
            run_end += run_steps::<PAIRED>();
            while step < run {
                fetch.portion::<V>();
                let end = run.min(step + STEPS_A_PORTION);
                for k in step..end {
                    let mut columns = [V::splat(0.0); N];
                    for (n, column) in columns.iter_mut().enumerate() {
                        *column = V::load(b.add(n * V::LANES));
                    }
                    for (m, row) in sums.iter_mut().enumerate() {
                        let value = V::splat(*a.add(m * a_stride + k));
                        for (sum, &column) in row.iter_mut().zip(&columns) {
                            *sum = match PAIRED {
                                true => value.pair_mul_add(column, *sum),
                                false => value.mul_add(column, *sum),
                            };
                        }
                    }
                    b = b.add(b_stride);
                }
                step = end;
            }
            let to = (c, c_stride);
            match (ACCUMULATE, first, step == depth) {
                (true, true, _) => {
                    join::<V, M, N>(&sums, to, |m, c, sum| c.mul_add(V::splat(*factors.add(m)), sum))
                }
                (true, false, _) | (false, false, false) => {
                    join::<V, M, N>(&sums, to, |_, c, sum| c.add(sum))
                }
                (false, true, last) => {
                    let scale = V::splat(if last { scale } else { 1.0 });
                    store_scaled::<V, M, N>(&sums, to, scale);
                }
                (false, false, true) => {
                    join::<V, M, N>(&sums, to, |_, c, sum| c.add(sum).mul(V::splat(scale)));
                }
            }
        }
    }
}

/// Makes each vector of C what `with` makes of its row's number, itself and the register tile's sums: `M` rows of `N` vectors.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn join<V: Vector, const M: usize, const N: usize>(
    sums: &[[V; N]; M],
    (c, stride): (*mut f32, usize),
    with: impl Fn(usize, V, V) -> V,
) {
    for (m, row) in sums.iter().enumerate() {
        for (n, &sum) in row.iter().enumerate() {
            // SAFETY: rows and vectors of the tile.
            unsafe {
                let to = c.add(m * stride + n * V::LANES);
                with(m, V::load(to), sum).store(to);
            }
        }
    }
}

/// Puts the register tile's sums, scaled, where C is.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn store_scaled<V: Vector, const M: usize, const N: usize>(
    sums: &[[V; N]; M],
    (c, stride): (*mut f32, usize),
    scale: V,
) {
    for (m, row) in sums.iter().enumerate() {
        for (n, &sum) in row.iter().enumerate() {
            // SAFETY: rows and vectors of the tile.
            unsafe { sum.mul(scale).store(c.add(m * stride + n * V::LANES)) };
        }
    }
}

/// Runs a product of `rows` rows and `vectors` vectors of columns, at most [`ROWS`](super::compiled::ROWS) and COLUMNS, in register tiles.
///
/// # Safety
/// As [`product`]; the tiles are of V's level.
#[inline(always)]
pub(super) unsafe fn run<V: Vector>(
    tiles: &Tiles<unsafe fn(&Product)>,
    rows: usize,
    vectors: usize,
    work: Product,
) {
    cover(vectors, V::COLUMNS, |width, first| {
        let offset = first * V::LANES;
        // SAFETY: the tile's columns are columns of the product.
        unsafe { tiles[rows - 1][width](&Product { b: work.b.add(offset), c: work.c.add(offset), ..work }) };
    });
}
