//! Weighted sums of values that are read in place, without packing.

use super::prefetch::{PrefetchCursor, PrefetchRows};
use super::register_tile::update;
use super::rows::RowFormat;
use crate::cpu::vector::Vector;
use half::bf16;

pub type WeightedFn = unsafe fn(&Weighted);

/// `C = factor * C + P V` for `M` rows of probabilities and `N` vectors of the head dim.
pub struct Weighted<'a> {
    /// `M` rows of one probability per value: floats, or bf16 in the first half of their row.
    pub probabilities: *const f32,
    /// Distance between rows, in floats.
    pub probability_stride: usize,
    /// The values' addresses for head 0, and the offset to add to each.
    pub values: &'a [*const u8],
    pub offset: i64,
    /// The first value dim of each row. Where rows have scales of blocks, it starts a block, or all
    /// dims are of one block.
    pub first: usize,
    pub prefetch: PrefetchRows<'a>,
    /// `M` rows of `N` vectors.
    pub output: *mut f32,
    pub output_stride: usize,
    /// `M` floats.
    pub factors: *const f32,
}

/// To be inlined into a function that enables V's features.
///
/// # Safety
/// As [`dots`](super::dots::dots), for [`Weighted`].
#[inline(always)]
pub unsafe fn weighted<
    V: Vector,
    E: RowFormat,
    const M: usize,
    const N: usize,
    const PAIRED: bool,
>(
    work: &Weighted,
) {
    if PAIRED {
        // SAFETY: same contract.
        return unsafe { weighted_pairs::<V, E, M, N>(work) };
    }
    // SAFETY: each value holds N whole vectors; output and probabilities hold M rows.
    unsafe {
        // From zero: the values of one call are one partial sum of the sum over all keys.
        let mut sums = [[V::splat(0.0); N]; M];
        let mut cursor = PrefetchCursor::default();
        let lines_per_step = work.prefetch.lines().div_ceil(work.values.len());
        for (k, value) in work.values.iter().enumerate() {
            let value = value.wrapping_offset(work.offset as isize);
            let mut columns = [V::splat(0.0); N];
            let mut scale = V::splat(1.0);
            for n in 0..N {
                let dim = work.first + n * V::LANES;
                if E::BLOCK > 0 && (n * V::LANES).is_multiple_of(E::BLOCK) {
                    scale = E::block_scale(value, dim);
                }
                columns[n] = E::load(value, dim, scale);
            }
            for _ in 0..lines_per_step {
                cursor.prefetch_line::<V>(&work.prefetch);
            }
            for m in 0..M {
                let probability =
                    V::splat(*work.probabilities.add(m * work.probability_stride + k));
                for n in 0..N {
                    sums[m][n] = probability.mul_add(columns[n], sums[m][n]);
                }
            }
        }
        update::<V, M, N>(&sums, work.output, work.output_stride, |m, output, sum| {
            output.mul_add(V::splat(*work.factors.add(m)), sum)
        });
    }
}

/// [`weighted`] for pairs of bf16, two values at a time.
///
/// # Safety
/// As [`weighted`].
#[inline(always)]
unsafe fn weighted_pairs<V: Vector, E: RowFormat, const M: usize, const N: usize>(work: &Weighted) {
    let value = |k: usize| work.values[k].wrapping_offset(work.offset as isize);
    let row =
        |m: usize| work.probabilities.wrapping_add(m * work.probability_stride).cast::<bf16>();
    // SAFETY: as `weighted`.
    unsafe {
        // From zero: the values of one call are one partial sum of the sum over all keys.
        let mut sums = [[V::splat(0.0); N]; M];
        let mut cursor = PrefetchCursor::default();
        let lines_per_step = work.prefetch.lines().div_ceil(work.values.len().div_ceil(2));
        let mut k = 0;
        while k < work.values.len() {
            // An odd last value is paired with itself, with probability 0.
            let pair = k + 1 < work.values.len();
            let rows = [value(k), value(if pair { k + 1 } else { k })];
            let mut columns = [V::splat(0.0); N];
            E::interleave_all(rows, work.first, &mut columns);
            for _ in 0..lines_per_step {
                cursor.prefetch_line::<V>(&work.prefetch);
            }
            for m in 0..M {
                let bits = match pair {
                    true => row(m).add(k).cast::<u32>().read_unaligned(),
                    false => u32::from((*row(m).add(k)).to_bits()),
                };
                let probabilities = V::splat(f32::from_bits(bits));
                for n in 0..N {
                    sums[m][n] = probabilities.pair_mul_add(columns[n], sums[m][n]);
                }
            }
            k += 2;
        }
        update::<V, M, N>(&sums, work.output, work.output_stride, |m, output, sum| {
            output.mul_add(V::splat(*work.factors.add(m)), sum)
        });
    }
}
