//! The one inner loop: a register-tiled matrix product of a few rows by a few vectors of columns.
//!
//! Both products of attention are this one. Scores: A is query rows, B a packed tile of keys (`[dim][key]`), the depth is the head
//! dim. Output: A is probabilities, B a packed tile of values (`[key][dim]`), the depth is keys. Every element of C is one chain of
//! multiply-adds in depth order, whatever the shape of the register tile around it: this is what makes a row's bits
//! independent of its neighbours.

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
    /// `M` rows of `N` vectors, `c_stride` apart.
    pub c: *mut f32,
    pub c_stride: usize,
    /// `M` floats; read only when accumulating.
    pub factors: *const f32,
    /// Used only when not accumulating, and only by `PAIRED` code: f32 queries are scaled when they are loaded.
    pub scale: f32,
    /// What to fetch meanwhile, a portion every [`STEPS_A_PORTION`] steps.
    pub fetch: &'a Fetch<'a>,
}

/// Steps of depth between two portions of what is fetched: a burst of prefetches would hold up the loads of the product itself.
pub(super) const STEPS_A_PORTION: usize = 8;

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
    let Product { a, a_stride, b, b_stride, depth, c, c_stride, factors, scale, fetch } = *product;
    // SAFETY: all offsets stay inside what the caller vouches for.
    unsafe {
        let mut sums = match ACCUMULATE {
            true => load_scaled::<V, M, N>(c, c_stride, factors),
            false => [[V::splat(0.0); N]; M],
        };
        let mut b = b;
        let mut step = 0;
        while step < depth {
            fetch.portion::<V>();
            let end = depth.min(step + STEPS_A_PORTION);
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
        if PAIRED && !ACCUMULATE {
            for sum in sums.as_flattened_mut() {
                *sum = sum.mul(V::splat(scale));
            }
        }
        store::<V, M, N>(&sums, c, c_stride);
    }
}

/// The register tile's sums so far: `M` rows of `N` vectors, `stride` apart, each row times its factor.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn load_scaled<V: Vector, const M: usize, const N: usize>(
    c: *const f32,
    stride: usize,
    factors: *const f32,
) -> [[V; N]; M] {
    // SAFETY: rows and vectors of the tile.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        for (m, row) in sums.iter_mut().enumerate() {
            let factor = V::splat(*factors.add(m));
            for (n, sum) in row.iter_mut().enumerate() {
                *sum = V::load(c.add(m * stride + n * V::LANES)).mul(factor);
            }
        }
        sums
    }
}

/// Puts the register tile's sums back.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn store<V: Vector, const M: usize, const N: usize>(
    sums: &[[V; N]; M],
    c: *mut f32,
    stride: usize,
) {
    for (m, row) in sums.iter().enumerate() {
        for (n, &sum) in row.iter().enumerate() {
            // SAFETY: rows and vectors of the tile.
            unsafe { sum.store(c.add(m * stride + n * V::LANES)) };
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
