//! The inner loop of packed tiles: a register-tiled matrix product of a few rows by a few vectors
//! of columns.
//!
//! Both products of attention use it. Scores: A is query rows, B is a packed tile of keys
//! (`[dim][key]`), the depth is the head dim. Output: A is probabilities, B is a packed tile of
//! values (`[key][dim]`), the depth is keys.
//!
//! Blocked summation: each element of C is a sum of partial sums, and each partial sum is an FMA
//! chain over [`STEPS_PER_CHAIN`] steps in depth order, starting from zero. The order does not
//! depend on the shape of the register tile, so a row's bits do not depend on its neighbours. A
//! single chain over the whole depth would round too much when all terms have the same sign
//! (docs/semantics.md, "Tolerance").

use super::exponentials::Exponentials;
use super::prefetch::PrefetchQueue;
use super::shapes::{RegisterTiles, cover};
use crate::cpu::vector::Vector;
use crate::format::BLOCK_VALUES;

pub type ProductFn = unsafe fn(&Product);

/// `C = scale * A B`, or `C = factor * C + A B` with one factor per row.
///
/// A and B hold floats. In `PAIRED` code they hold pairs of bf16 instead, twice the depth in as
/// many steps.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    /// `M` rows of `depth` floats, `a_stride` apart.
    pub a: *const f32,
    pub a_stride: usize,
    /// `depth` rows of `N` vectors, `b_stride` apart.
    pub b: *const f32,
    pub b_stride: usize,
    pub depth: usize,
    /// Steps to leave out at the start of the first chain. Chains start at multiples of
    /// [`STEPS_PER_CHAIN`] in the tile, even if the product starts in between.
    pub skipped: usize,
    /// `M` rows of `N` vectors, `c_stride` apart.
    pub c: *mut f32,
    pub c_stride: usize,
    /// `M` floats; read only when accumulating.
    pub factors: *const f32,
    /// Used only when not accumulating.
    pub scale: f32,
    /// One portion is prefetched every [`STEPS_PER_PREFETCH`] steps.
    pub prefetch: &'a PrefetchQueue<'a>,
    /// Likewise, of another row block: in register tiles of the largest width and at least
    /// [`MIN_ROWS_BESIDE`] rows.
    pub exponentials: Option<&'a Exponentials>,
    /// Scales of blocks of B, in `PAIRED` code that does not accumulate; `skipped` is 0.
    pub block_scales: Option<BlockScales>,
}

/// A scale for each block of [`BLOCK_VALUES`] terms of depth and each column of B. They multiply
/// the sums of blocks, so each block is a chain of its own.
#[derive(Clone, Copy)]
pub struct BlockScales {
    /// A row of `N` vectors for each block, `stride` apart.
    pub scales: *const f32,
    pub stride: usize,
}

/// Fewer rows of a register tile have too few multiply-adds to compute exponentials beside them.
pub const MIN_ROWS_BESIDE: usize = 4;

/// Steps of depth between two portions of the work beside the product.
pub const STEPS_PER_PREFETCH: usize = 8;

/// Steps of depth per chain: a multiple of [`STEPS_PER_PREFETCH`]. Shorter chains are more accurate
/// but slower, because each chain loads and stores C.
pub const STEPS_PER_CHAIN: usize = 64;

/// Steps of depth per block of `q8_0` and `q4_0`, in `PAIRED` code.
const STEPS_PER_BLOCK: usize = BLOCK_VALUES / terms_per_step::<true>();

const _: () = assert!(STEPS_PER_CHAIN.is_multiple_of(STEPS_PER_PREFETCH));
const _: () = assert!(STEPS_PER_BLOCK.is_multiple_of(STEPS_PER_PREFETCH));

/// Terms per step: `PAIRED` code multiplies two at a time.
pub const fn terms_per_step<const PAIRED: bool>() -> usize {
    if PAIRED { 2 } else { 1 }
}

/// To be inlined into a function that enables V's features.
///
/// # Safety
/// The pointers cover the extent in [`Product`], and the enclosing function enables V's features.
#[inline(always)]
pub unsafe fn product<
    V: Vector,
    const M: usize,
    const N: usize,
    const ACCUMULATE: bool,
    const PAIRED: bool,
>(
    product: &Product,
) {
    let Product { a, a_stride, b, b_stride, depth, skipped, .. } = *product;
    let Product { c, c_stride, factors, scale, prefetch, exponentials, .. } = *product;
    let mut block_scales = product.block_scales.filter(|_| PAIRED && !ACCUMULATE);
    let steps_per_chain = if block_scales.is_some() { STEPS_PER_BLOCK } else { STEPS_PER_CHAIN };
    debug_assert!(depth > 0 && skipped < steps_per_chain);
    // SAFETY: all offsets stay inside what the caller guarantees.
    unsafe {
        let mut b = b;
        let mut step = 0;
        let mut chain_end = steps_per_chain - skipped;
        while step < depth {
            let first = step == 0;
            let mut sums = [[V::splat(0.0); N]; M];
            let chain = depth.min(chain_end);
            chain_end += steps_per_chain;
            while step < chain {
                prefetch.prefetch_portion::<V>();
                if M >= MIN_ROWS_BESIDE
                    && N == V::TILE_VECTORS
                    && let Some(exponentials) = exponentials
                {
                    exponentials.run_portion::<V, PAIRED>();
                }
                let end = chain.min(step + STEPS_PER_PREFETCH);
                for k in step..end {
                    let mut columns = [V::splat(0.0); N];
                    for n in 0..N {
                        columns[n] = V::load(b.add(n * V::LANES));
                    }
                    for m in 0..M {
                        let value = V::splat(*a.add(m * a_stride + k));
                        for n in 0..N {
                            sums[m][n] = match PAIRED {
                                true => value.pair_mul_add(columns[n], sums[m][n]),
                                false => value.mul_add(columns[n], sums[m][n]),
                            };
                        }
                    }
                    b = b.add(b_stride);
                }
                step = end;
            }
            if let Some(block) = &mut block_scales {
                for n in 0..N {
                    let scales = V::load(block.scales.add(n * V::LANES));
                    for m in 0..M {
                        sums[m][n] = sums[m][n].mul(scales);
                    }
                }
                block.scales = block.scales.add(block.stride);
            }
            // Products with 1 are exact: the chains of a call share an epilogue.
            let last_scale = V::splat(if step == depth { scale } else { 1.0 });
            if ACCUMULATE {
                update::<V, M, N>(&sums, c, c_stride, |m, c, sum| {
                    let factor = if first { *factors.add(m) } else { 1.0 };
                    c.mul_add(V::splat(factor), sum)
                });
            } else if first {
                store_scaled::<V, M, N>(&sums, c, c_stride, last_scale);
            } else {
                update::<V, M, N>(&sums, c, c_stride, |_, c, sum| c.add(sum).mul(last_scale));
            }
        }
    }
}

/// Replaces each vector of C by `with(row, vector of C, sum)`.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub unsafe fn update<V: Vector, const M: usize, const N: usize>(
    sums: &[[V; N]; M],
    c: *mut f32,
    c_stride: usize,
    with: impl Fn(usize, V, V) -> V,
) {
    for m in 0..M {
        for n in 0..N {
            // SAFETY: rows and vectors of the register tile.
            unsafe {
                let to = c.add(m * c_stride + n * V::LANES);
                with(m, V::load(to), sums[m][n]).store(to);
            }
        }
    }
}

/// Stores the scaled sums to C.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn store_scaled<V: Vector, const M: usize, const N: usize>(
    sums: &[[V; N]; M],
    c: *mut f32,
    c_stride: usize,
    scale: V,
) {
    for m in 0..M {
        for n in 0..N {
            // SAFETY: rows and vectors of the register tile.
            unsafe { sums[m][n].mul(scale).store(c.add(m * c_stride + n * V::LANES)) };
        }
    }
}

/// Runs a product of `rows` rows, at most [`ROWS`](super::ROWS), and `vectors` vectors of columns,
/// at most TILE_VECTORS, in register tiles.
///
/// # Safety
/// As [`product`]; the tiles are of V's level.
#[inline(always)]
pub unsafe fn run<V: Vector>(
    tiles: &RegisterTiles<ProductFn>,
    rows: usize,
    vectors: usize,
    work: Product,
) {
    cover(vectors, V::TILE_VECTORS, |width, first| {
        let offset = first * V::LANES;
        // SAFETY: the columns of the register tile are columns of the product.
        unsafe {
            tiles[rows - 1][width](&Product {
                b: work.b.add(offset),
                c: work.c.add(offset),
                block_scales: work
                    .block_scales
                    .map(|block| BlockScales { scales: block.scales.add(offset), ..block }),
                ..work
            })
        };
    });
}
