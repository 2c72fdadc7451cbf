//! Weighted sums of values that are read in place, without packing.

use super::prefetch::{PrefetchCursor, PrefetchRows};
use super::register_tile::update;
use super::rows::{RowFormat, sixteen};
use crate::cpu::vector::Vector;
use half::bf16;
use std::mem::MaybeUninit;

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
            cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
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

/// Values whose weights are computed together.
const WEIGHTED_TOGETHER: usize = 32;

/// The weights of values, in pairs of bf16: per row, for each block of the head dim. They are
/// probabilities, times the scales of the blocks if there are any. A row is a cache line.
#[repr(align(64))]
struct Weights<const M: usize>([[[f32; WEIGHTED_TOGETHER / 2]; 2]; M]);

/// [`weighted`] for pairs of bf16, two values at a time.
///
/// # Safety
/// As [`weighted`].
#[inline(always)]
unsafe fn weighted_pairs<V: Vector, E: RowFormat, const M: usize, const N: usize>(work: &Weighted) {
    // SAFETY: as `weighted`.
    unsafe {
        // From zero: the values of one call are one partial sum of the sum over all keys.
        let mut sums = [[V::splat(0.0); N]; M];
        let mut weights = MaybeUninit::<Weights<M>>::uninit();
        let offset = work.offset as isize + E::offset(work.first) as isize;
        let mut cursor = PrefetchCursor::default();
        let lines_per_step = work.prefetch.lines().div_ceil(work.values.len().div_ceil(2));
        let mut first = 0;
        while first < work.values.len() {
            let count = (work.values.len() - first).min(WEIGHTED_TOGETHER);
            compute_weights::<V, E, M, N>(work, offset, [first, count], &mut weights);
            let weights = weights.as_ptr().cast::<[[f32; WEIGHTED_TOGETHER / 2]; 2]>();
            let values = work.values.as_ptr().add(first);
            let value = |k: usize| (*values.add(k)).wrapping_offset(offset);
            for pair in 0..count.div_ceil(2) {
                // An odd last value is paired with itself, with weight 0.
                let rows = [value(2 * pair), value((2 * pair + 1).min(count - 1))];
                let mut columns = [V::splat(0.0); N];
                V::interleave_rows(E::PAIRS, rows, &mut columns);
                cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
                for m in 0..M {
                    let weights = (*weights.add(m))[0].as_ptr().add(pair);
                    for n in 0..N {
                        const SECOND: usize = WEIGHTED_TOGETHER / 2;
                        sums[m][n] = match (n * V::LANES).checked_div(E::BLOCK) {
                            None => V::splat(*weights).pair_mul_add(columns[n], sums[m][n]),
                            Some(0) => columns[n].pair_mul_add_at::<0>(weights, sums[m][n]),
                            Some(_) => columns[n].pair_mul_add_at::<SECOND>(weights, sums[m][n]),
                        };
                    }
                }
            }
            first += count;
        }
        update::<V, M, N>(&sums, work.output, work.output_stride, |m, output, sum| {
            output.mul_add(V::splat(*work.factors.add(m)), sum)
        });
    }
}

/// Computes the weights of `count` values from `first` on, for N vectors of the head dim. Behind an
/// odd number of weights there is a 0.
///
/// # Safety
/// As [`weighted`].
#[inline(always)]
unsafe fn compute_weights<V: Vector, E: RowFormat, const M: usize, const N: usize>(
    work: &Weighted,
    offset: isize,
    [first, count]: [usize; 2],
    weights: &mut MaybeUninit<Weights<M>>,
) {
    let blocks = if E::BLOCK > 0 { (N * V::LANES).div_ceil(E::BLOCK) } else { 1 };
    let weights = weights.as_mut_ptr();
    let to = |m: usize, block: usize| {
        let row = weights.cast::<[bf16; WEIGHTED_TOGETHER]>();
        row.wrapping_add(2 * m + block).cast::<bf16>()
    };
    let row =
        |m: usize| work.probabilities.wrapping_add(m * work.probability_stride).cast::<bf16>();
    for i in (0..count).step_by(V::LANES) {
        // SAFETY: same contract. A row of floats has room for twice as many bf16, so whole vectors
        // are inside it. A block begins with its scale.
        unsafe {
            if E::BLOCK == 0 {
                for m in 0..M {
                    let bits = row(m).add(first + i).cast::<[bf16; 16]>().read_unaligned();
                    to(m, 0).add(i).cast::<[bf16; 16]>().write_unaligned(bits);
                }
                continue;
            }
            let end = (i + V::LANES).min(count);
            let mut filled = [std::ptr::null(); 16];
            let values = sixteen(&work.values[first + i..first + end], &mut filled);
            for block in 0..blocks {
                let scales = V::gather_f16(values, offset + (block * size_of::<E>()) as isize);
                for m in 0..M {
                    let weights = V::load_bf16(row(m).add(first + i)).mul(scales);
                    weights.store_paired(to(m, block).add(i));
                }
            }
        }
    }
    if !count.is_multiple_of(2) {
        for (m, block) in (0..M).flat_map(|m| (0..blocks).map(move |block| (m, block))) {
            // SAFETY: there is room for an even number of weights.
            unsafe { to(m, block).add(count).write(bf16::ZERO) };
        }
    }
}
