//! The product layer: the inner loops of both products of attention, S = Q K^T and O = P V, and the
//! tables of their compiled shapes.
//!
//! - [`register_tile`]: a register-tiled matrix product from packed panels.
//! - [`dots`]: scores of a few query rows against keys in place.
//! - [`weighted`]: weighted sums of values in place.
//! - [`amx`]: both products on the matrix unit.

pub mod amx;
pub mod dots;
pub mod prefetch;
pub mod register_tile;
pub mod weighted;

use dots::Dots;
use register_tile::Product;
use weighted::Weighted;

/// Rows of the tallest register tile. 6 rows of `TILE_VECTORS` accumulators, the vectors of B and
/// one of A fill the register file.
pub const ROWS: usize = 6;

/// Widths of register tiles, in vectors. The widest of a level is its `TILE_VECTORS`.
pub const WIDTHS: [usize; 3] = [1, 2, 4];

/// Most query rows of one [`Dots`].
pub const MAX_DOT_ROWS: usize = 8;

/// One function per register tile: `[rows - 1][width index]`.
pub type RegisterTiles<Function> = [[Function; WIDTHS.len()]; ROWS];

pub type ProductFn = unsafe fn(&Product);
pub type DotsFn = unsafe fn(&Dots);
pub type WeightedFn = unsafe fn(&Weighted);

/// The inner loops of one level, in all shapes.
///
/// All of them are unsafe to call: the CPU must have the level's features, and the arguments must
/// satisfy the contracts of [`product`](register_tile::product), [`dots`](dots::dots) and
/// [`weighted`](weighted::weighted).
pub struct ProductTable {
    /// S = scale * Q K^T.
    pub scores: RegisterTiles<ProductFn>,
    /// O = factor * O + P V.
    pub output: RegisterTiles<ProductFn>,
    /// `[element type][rows - 1]`. [`Storage::INDEX`](super::vector::Storage::INDEX) numbers the
    /// types.
    pub dots: [[DotsFn; MAX_DOT_ROWS]; 3],
    /// `[element type]`.
    pub weighted: [RegisterTiles<WeightedFn>; 3],
}

/// Covers `vectors` columns with register tiles of at most `max_width` vectors, the widest first.
/// Calls `run` with each tile's width index and first vector.
#[inline(always)]
pub fn cover(vectors: usize, max_width: usize, mut run: impl FnMut(usize, usize)) {
    let mut done = 0;
    for (index, width) in WIDTHS.into_iter().enumerate().rev() {
        while width <= max_width && vectors - done >= width {
            run(index, done);
            done += width;
        }
    }
}

/// Number of register tiles that [`cover`] uses.
#[inline(always)]
pub fn cover_count(vectors: usize, max_width: usize) -> usize {
    let mut count = 0;
    cover(vectors, max_width, |_, _| count += 1);
    count
}
