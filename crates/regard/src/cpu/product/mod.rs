//! The product layer: the inner loops of both products of attention, S = Q K^T and O = P V, and the
//! tables of their compiled shapes.
//!
//! - [`register_tile`]: a register-tiled matrix product from packed panels.
//! - [`dots`]: scores of a few query rows against keys in place.
//! - [`weighted`]: weighted sums of values in place.
//! - [`exponentials`]: the exponentials of a softmax between the steps of these products.
//! - [`convert`]: converts rows of caches that are not stored as products read them.
//! - [`rows`]: the rows that dots and weighted sums read in place.
//! - [`amx`]: both products on the matrix unit.
//!
//! Inner loops count with indices and use neither `zip` nor `map` of arrays. A build without LTO
//! (`lto = "off"`) does not inline these functions of `core`, and loses up to four fifths of its
//! speed.

#![allow(clippy::needless_range_loop, reason = "a build without LTO does not inline `zip`")]

pub mod amx;
pub mod convert;
pub mod dots;
pub mod exponentials;
pub mod prefetch;
pub mod register_tile;
pub mod rows;
mod shapes;
pub mod weighted;

use convert::ConvertFn;
use dots::DotsFn;
use register_tile::ProductFn;
pub use shapes::{MAX_DOT_ROWS, ROWS, RegisterTiles, cover, cover_count};
use weighted::WeightedFn;

/// The inner loops of one level, in all shapes.
///
/// All of them are unsafe to call: the CPU must have the level's features, and the arguments must
/// satisfy the contracts of [`product`](register_tile::product), [`dots`](dots::dots),
/// [`weighted`](weighted::weighted) and [`convert`](convert::convert).
pub struct ProductTable {
    /// S = scale * Q K^T.
    pub scores: RegisterTiles<ProductFn>,
    /// O = factor * O + P V.
    pub output: RegisterTiles<ProductFn>,
    /// `[element type][rows - 1]`. [`Storage::INDEX`](super::vector::Storage::INDEX) and
    /// [`rows::index`] number the types.
    pub dots: [[DotsFn; MAX_DOT_ROWS]; 7],
    /// `[element type]`.
    pub weighted: [RegisterTiles<WeightedFn>; 7],
    /// Whether they have the types that [`rows::index`] numbers.
    pub reads_codes: bool,
    /// `[storage type]`, numbered by [`convert::index`] and [`convert::index_of_codes`].
    pub convert: [ConvertFn; 11],
}
