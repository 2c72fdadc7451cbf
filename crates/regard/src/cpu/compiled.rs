//! What is compiled once a level: the item, and the inner loops in all their shapes, as tables of functions.
//!
//! The loops are reached through the call's table, so that none of them is inlined into another: each has the registers to itself, is
//! compiled once whoever uses it, and has a name in a profile. (`#[inline(never)]` is not kept on functions with target features.)

use super::kernel::{Call, Item};
use super::product::Product;
use super::softmax::Scores;
use super::stream::{self, Dots, Weighted};
use crate::problem::Sequence;
use crate::state::State;

/// Rows of the tallest register tile: 6 rows by `COLUMNS` vectors of sums, the vectors of B and one of A fill the register file.
pub(super) const ROWS: usize = 6;

/// The widths of register tiles, in vectors, that each level has (the widest is its `COLUMNS`).
pub(super) const WIDTHS: [usize; 3] = [1, 2, 4];

/// One function for each register tile: `[rows - 1][width]`.
pub(super) type Tiles<Work> = [[Work; WIDTHS.len()]; ROWS];

type ProductTile = unsafe fn(&Product);
type DotsTile = unsafe fn(&Dots);
type WeightedTile = unsafe fn(&Weighted);

/// A level's code.
///
/// All of it is unsafe to call: the CPU must have the level's features, and the arguments are vouched for as the functions' bodies ask
/// ([`run_item`](super::kernel::run_item), [`rows`](super::softmax::rows), [`product`](super::product::product), [`dots`](super::stream::dots),
/// [`weighted`](super::stream::weighted)).
pub(super) struct Compiled {
    pub run_item: unsafe fn(&Call, &Item, *mut u8),
    /// Probabilities as the output product takes them.
    pub softmax: unsafe fn(&Call, &Sequence, &Scores, &mut [State], &mut [f32]),
    pub scores: Tiles<ProductTile>,
    pub output: Tiles<ProductTile>,
    /// `[type][rows - 1]`, types as [`Storage::INDEX`](super::vector::Storage::INDEX) numbers them.
    pub dots: [[DotsTile; stream::MAX_ROWS]; 3],
    /// `[type]`.
    pub weighted: [Tiles<WeightedTile>; 3],
}

/// Covers `vectors` columns with tiles: calls `run` with the index of each tile's width and its first vector.
#[inline(always)]
pub(super) fn cover(vectors: usize, most: usize, mut run: impl FnMut(usize, usize)) {
    let mut done = 0;
    for (index, width) in WIDTHS.into_iter().enumerate().rev() {
        while width <= most && vectors - done >= width {
            run(index, done);
            done += width;
        }
    }
}

/// Makes a level's [`Compiled`]: its CPU features, its vector, its widths (as many as [`WIDTHS`]; where the level lacks the last, the one before stands
/// in and is never used), its dot products at a time, and whether bf16 are paired.
macro_rules! compile {
    ($(features: $features:literal,)? vector: $vector:ty, widths: $widths:tt, dots: $dots:literal, paired: $paired:literal) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn run_item(call: &crate::cpu::kernel::Call, item: &crate::cpu::kernel::Item, scratch: *mut u8) {
            // SAFETY: passed on; this function enables the features. So do the next ones.
            unsafe { crate::cpu::kernel::run_item::<$vector, $paired>(call, item, scratch) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn softmax(
            call: &crate::cpu::kernel::Call,
            sequence: &crate::problem::Sequence,
            scores: &crate::cpu::softmax::Scores,
            states: &mut [crate::state::State],
            factors: &mut [f32],
        ) {
            // SAFETY: passed on.
            unsafe { crate::cpu::softmax::rows::<$vector, $paired>(call, sequence, scores, states, factors) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn product<const M: usize, const N: usize, const ACCUMULATE: bool>(work: &crate::cpu::product::Product) {
            // SAFETY: passed on.
            unsafe { crate::cpu::product::product::<$vector, M, N, ACCUMULATE, $paired>(work) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn dots<E: crate::cpu::vector::Storage, const M: usize, const J: usize>(work: &crate::cpu::stream::Dots) {
            // SAFETY: passed on.
            unsafe { crate::cpu::stream::dots::<$vector, E, M, J, $paired>(work) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn weighted<E: crate::cpu::vector::Storage, const M: usize, const N: usize>(
            work: &crate::cpu::stream::Weighted,
        ) {
            // SAFETY: passed on.
            unsafe { crate::cpu::stream::weighted::<$vector, E, M, N, $paired>(work) }
        }

        pub(super) static COMPILED: crate::cpu::compiled::Compiled = crate::cpu::compiled::Compiled {
            run_item,
            softmax,
            scores: crate::cpu::compiled::compile!(@tiles product, $widths, [false]),
            output: crate::cpu::compiled::compile!(@tiles product, $widths, [true]),
            dots: [
                crate::cpu::compiled::compile!(@dots f32, $dots),
                crate::cpu::compiled::compile!(@dots half::f16, $dots),
                crate::cpu::compiled::compile!(@dots half::bf16, $dots),
            ],
            weighted: [
                crate::cpu::compiled::compile!(@weighted f32, $widths),
                crate::cpu::compiled::compile!(@weighted half::f16, $widths),
                crate::cpu::compiled::compile!(@weighted half::bf16, $widths),
            ],
        };
    };
    (@tiles $function:ident, $widths:tt, $rest:tt) => {
        [
            crate::cpu::compiled::compile!(@row 1, $function, $widths, $rest),
            crate::cpu::compiled::compile!(@row 2, $function, $widths, $rest),
            crate::cpu::compiled::compile!(@row 3, $function, $widths, $rest),
            crate::cpu::compiled::compile!(@row 4, $function, $widths, $rest),
            crate::cpu::compiled::compile!(@row 5, $function, $widths, $rest),
            crate::cpu::compiled::compile!(@row 6, $function, $widths, $rest),
        ]
    };
    (@row $rows:literal, $function:ident, [$($width:literal)*], [$rest:literal]) => {
        [$($function::<$rows, $width, $rest>),*]
    };
    (@weighted $element:ty, $widths:tt) => {
        [
            crate::cpu::compiled::compile!(@weighted_row 1, $element, $widths),
            crate::cpu::compiled::compile!(@weighted_row 2, $element, $widths),
            crate::cpu::compiled::compile!(@weighted_row 3, $element, $widths),
            crate::cpu::compiled::compile!(@weighted_row 4, $element, $widths),
            crate::cpu::compiled::compile!(@weighted_row 5, $element, $widths),
            crate::cpu::compiled::compile!(@weighted_row 6, $element, $widths),
        ]
    };
    (@weighted_row $rows:literal, $element:ty, [$($width:literal)*]) => {
        [$(weighted::<$element, $rows, $width>),*]
    };
    (@dots $element:ty, $dots:literal) => {
        [
            dots::<$element, 1, { $dots }>,
            dots::<$element, 2, { $dots / 2 }>,
            dots::<$element, 3, { $dots / 3 }>,
            dots::<$element, 4, { $dots / 4 }>,
            dots::<$element, 5, { $dots / 5 }>,
            dots::<$element, 6, { $dots / 6 }>,
            dots::<$element, 7, { $dots / 7 }>,
            dots::<$element, 8, { $dots / 8 }>,
        ]
    };
}
pub(super) use compile;
