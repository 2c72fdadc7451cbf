//! Per-level compilation: instantiates the generic code of the other layers for each SIMD level,
//! with its CPU features enabled, as tables of functions.
//!
//! Inner loops are called through a table so that none is inlined into another: each has all
//! registers, is compiled once for all callers, and has a name in a profile. (The compiler ignores
//! `#[inline(never)]` on functions with target features.)

use super::product::ProductTable;
use super::walk::call::{Call, WriteOutputFn};
use super::walk::item::Item;
use super::walk::softmax::SoftmaxFn;

/// The compiled code of one level.
///
/// All of it is unsafe to call: the CPU must have the level's features, and the arguments must
/// satisfy the contracts of [`run_item`](super::walk::attend::run_item),
/// [`softmax_step`](super::walk::softmax::softmax_step),
/// [`write_output`](super::walk::rows::write_output) and [`ProductTable`].
pub struct Compiled {
    pub run_item: unsafe fn(&Call, &Item, *mut u8),
    pub softmax: SoftmaxFn,
    pub write_output: WriteOutputFn,
    pub products: ProductTable,
}

/// Makes a level's [`Compiled`] from its CPU features, its vector, its register tile widths, its
/// [`DOT_SUMS`](super::vector::Vector::DOT_SUMS), and whether bf16 are multiplied in pairs. There
/// are as many widths as in `product::shapes::WIDTHS`: a level without the last width repeats the
/// width before, and the repeated entry is never called. `reads`: the formats that products read in
/// place (f32, f16, bf16, i8, q8_0, q4_0, e4m3); a level that does not read one repeats another.
macro_rules! compile {
    (
        $(features: $features:literal,)?
        vector: $vector:ty,
        widths: $widths:tt,
        dots: $dots:literal,
        paired: $paired:literal,
        reads_codes: $reads_codes:literal,
        reads: [$f32:ty, $f16:ty, $bf16:ty, $i8:ty, $q8_0:ty, $q4_0:ty, $e4m3:ty]
    ) => {
        use crate::cpu::product::convert::{Codes, Format};
        use crate::cpu::product::dots::Dots;
        use crate::cpu::product::register_tile::Product;
        use crate::cpu::product::rows::RowFormat;
        use crate::cpu::product::weighted::Weighted;
        use crate::cpu::walk::call::{Call, ItemContext};
        use crate::cpu::walk::item::Item;
        use crate::cpu::walk::softmax::{ScoreModifiers, ScoreTile};
        use crate::state::State;
        use std::ops::Range;

        $(#[target_feature(enable = $features)])?
        unsafe fn run_item(call: &Call, item: &Item, scratch: *mut u8) {
            // SAFETY: same contract. This function, like the following ones, enables the features.
            unsafe { crate::cpu::walk::attend::run_item::<$vector, $paired>(call, item, scratch) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn softmax(
            modifiers: &ScoreModifiers,
            sequence: &crate::problem::Sequence,
            tile: &ScoreTile,
            states: &mut [State],
            factors: &mut [f32],
        ) {
            use crate::cpu::walk::softmax::softmax_step;
            // SAFETY: same contract.
            unsafe { softmax_step::<$vector, $paired>(modifiers, sequence, tile, states, factors) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn write_output(
            ctx: ItemContext,
            output: *const f32,
            states: *const State,
            rows: Range<usize>,
        ) {
            // SAFETY: same contract.
            unsafe { crate::cpu::walk::rows::write_output::<$vector>(ctx, output, states, rows) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn product<const M: usize, const N: usize, const ACCUMULATE: bool>(work: &Product) {
            use crate::cpu::product::register_tile::product;
            // SAFETY: same contract.
            unsafe { product::<$vector, M, N, ACCUMULATE, $paired>(work) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn dots<E: RowFormat, const M: usize, const J: usize>(work: &Dots) {
            // SAFETY: same contract.
            unsafe { crate::cpu::product::dots::dots::<$vector, E, M, J, $paired>(work) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn weighted<E: RowFormat, const M: usize, const N: usize>(work: &Weighted) {
            // SAFETY: same contract.
            unsafe { crate::cpu::product::weighted::weighted::<$vector, E, M, N, $paired>(work) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn convert<F: Format>(from: *const u8, to: *mut u8, values: usize) {
            use crate::cpu::product::convert::convert;
            // SAFETY: same contract.
            unsafe { convert::<$vector, F, $paired>(from, to, values) }
        }

        pub static COMPILED: crate::cpu::compiled::Compiled = crate::cpu::compiled::Compiled {
            run_item,
            softmax,
            write_output,
            products: crate::cpu::product::ProductTable {
                scores: compile!(@tiles product, $widths, [false]),
                output: compile!(@tiles product, $widths, [true]),
                dots: [
                    compile!(@dots $f32, $dots),
                    compile!(@dots $f16, $dots),
                    compile!(@dots $bf16, $dots),
                    compile!(@dots $i8, $dots),
                    compile!(@dots $q8_0, $dots),
                    compile!(@dots $q4_0, $dots),
                    compile!(@dots $e4m3, $dots),
                ],
                weighted: [
                    compile!(@weighted $f32, $widths),
                    compile!(@weighted $f16, $widths),
                    compile!(@weighted $bf16, $widths),
                    compile!(@weighted $i8, $widths),
                    compile!(@weighted $q8_0, $widths),
                    compile!(@weighted $q4_0, $widths),
                    compile!(@weighted $e4m3, $widths),
                ],
                reads_codes: $reads_codes,
                convert: [
                    convert::<f32>,
                    convert::<half::f16>,
                    convert::<half::bf16>,
                    convert::<crate::format::E4m3>,
                    convert::<crate::format::E5m2>,
                    convert::<i8>,
                    convert::<crate::format::BlockQ8_0>,
                    convert::<crate::format::BlockQ4_0>,
                    convert::<crate::format::Mla656>,
                    convert::<Codes<crate::format::BlockQ8_0>>,
                    convert::<Codes<crate::format::BlockQ4_0>>,
                ],
            },
        };
    };
    (@tiles $function:ident, $widths:tt, $rest:tt) => {
        [
            compile!(@row 1, $function, $widths, $rest),
            compile!(@row 2, $function, $widths, $rest),
            compile!(@row 3, $function, $widths, $rest),
            compile!(@row 4, $function, $widths, $rest),
            compile!(@row 5, $function, $widths, $rest),
            compile!(@row 6, $function, $widths, $rest),
        ]
    };
    (@row $rows:literal, $function:ident, [$($width:literal)*], [$rest:literal]) => {
        [$($function::<$rows, $width, $rest>),*]
    };
    (@weighted $element:ty, $widths:tt) => {
        [
            compile!(@weighted_row 1, $element, $widths),
            compile!(@weighted_row 2, $element, $widths),
            compile!(@weighted_row 3, $element, $widths),
            compile!(@weighted_row 4, $element, $widths),
            compile!(@weighted_row 5, $element, $widths),
            compile!(@weighted_row 6, $element, $widths),
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

/// [`Level::Scalar`](super::Level::Scalar).
pub mod scalar {
    use crate::cpu::vector::scalar::Scalar;
    use half::{bf16, f16};
    compile!(
        vector: Scalar, widths: [1 2 2], dots: 8, paired: false,
        reads_codes: false, reads: [f32, f16, bf16, f32, f32, f32, f32]
    );
}

/// [`Level::Neon`](super::Level::Neon).
#[cfg(target_arch = "aarch64")]
pub mod neon {
    use crate::cpu::vector::neon::Neon;
    use half::{bf16, f16};
    compile!(
        features: "neon",
        vector: Neon, widths: [1 2 4], dots: 16, paired: false,
        reads_codes: false, reads: [f32, f16, bf16, f32, f32, f32, f32]
    );
}

/// [`Level::Avx2`](super::Level::Avx2).
#[cfg(target_arch = "x86_64")]
pub mod avx2 {
    use crate::cpu::vector::avx2::Avx2;
    use crate::format::{BlockQ4_0, BlockQ8_0};
    use half::{bf16, f16};
    compile!(
        features: "avx2,fma,f16c",
        vector: Avx2, widths: [1 2 2], dots: 8, paired: false,
        reads_codes: true, reads: [f32, f16, bf16, i8, BlockQ8_0, BlockQ4_0, f32]
    );
}

/// [`Level::Avx512`](super::Level::Avx512).
#[cfg(target_arch = "x86_64")]
pub mod avx512 {
    use crate::cpu::vector::avx512::Avx512;
    use crate::format::{BlockQ4_0, BlockQ8_0};
    use half::{bf16, f16};
    compile!(
        features: "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c",
        vector: Avx512, widths: [1 2 4], dots: 16, paired: false,
        reads_codes: true, reads: [f32, f16, bf16, i8, BlockQ8_0, BlockQ4_0, f32]
    );
}

/// [`Level::Avx512`](super::Level::Avx512) with products of bf16 pairs.
#[cfg(target_arch = "x86_64")]
pub mod avx512_bf16 {
    use crate::cpu::vector::avx512::Avx512;
    use crate::format::{BlockQ4_0, BlockQ8_0, E4m3};
    use half::bf16;
    compile!(
        features: "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c",
        vector: Avx512, widths: [1 2 4], dots: 16, paired: true,
        reads_codes: true, reads: [bf16, bf16, bf16, i8, BlockQ8_0, BlockQ4_0, E4m3]
    );
}
