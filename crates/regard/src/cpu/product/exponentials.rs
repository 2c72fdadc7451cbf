//! Exponentials beside products: the last phase of a row block's softmax, computed between the
//! steps of other products.
//!
//! An exponential is a chain of dependent operations, and a product keeps the multiply-add units
//! busy with independent ones. So a few vectors of exponentials between two portions of a product's
//! steps cost little more than the multiply-adds that they take themselves.

use super::ROWS;
use crate::cpu::vector::Vector;
use half::bf16;
use std::cell::Cell;

/// Most lanes of any level.
const MAX_LANES: usize = 16;

/// The exponentials of a row block, in order: row by row, key by key. The order of the sums does
/// not depend on how they are divided among products.
pub struct Exponentials {
    work: Cell<Work>,
    /// The reference subtracted from the scores of each row: its running max; 0 if it has seen no
    /// key.
    pub subtract: Cell<[f32; MAX_LANES]>,
    /// Sums of each row's exponentials, lane by lane.
    sums: [Cell<[f32; MAX_LANES]>; ROWS],
    next_row: Cell<usize>,
    next_key: Cell<usize>,
    vectors_per_portion: Cell<usize>,
}

/// The scores that become unnormalized probabilities.
#[derive(Clone, Copy)]
pub struct Work {
    /// Rows of one float per key, `stride` apart.
    pub scores: *mut f32,
    pub stride: usize,
    /// At most [`ROWS`].
    pub rows: usize,
    /// The keys that have scores: whole vectors.
    pub first_key: usize,
    pub end_key: usize,
    /// One float per key that multiplies probabilities, but not their sum; null if none do.
    pub value_scales: *const f32,
}

/// Replaces a vector of scores by 4^(score - max). Returns the exponentials, without the scales of
/// values. `PAIRED` code stores them as bf16 in the first half of the row.
///
/// # Safety
/// As [`Vector`]'s methods. The row has scores (and scales, if they are not null) for the keys from
/// `key` on. The scores before `key` are probabilities already.
#[inline(always)]
pub unsafe fn exponentiate<V: Vector, const PAIRED: bool>(
    scores: *mut f32,
    value_scales: *const f32,
    key: usize,
    max: V,
) -> V {
    // SAFETY: same contract. bf16 take half the space, so they overwrite only scores that were
    // read.
    unsafe {
        let p = V::load(scores.add(key)).sub(max).exp4();
        let scaled = match value_scales.is_null() {
            true => p,
            false => p.mul(V::load(value_scales.add(key))),
        };
        match PAIRED {
            true => scaled.store_paired(scores.cast::<bf16>().add(key)),
            false => scaled.store(scores.add(key)),
        }
        p
    }
}

impl Exponentials {
    /// None.
    pub fn empty() -> Exponentials {
        let (scores, value_scales) = (std::ptr::null_mut(), std::ptr::null());
        let work = Work { scores, stride: 0, rows: 0, first_key: 0, end_key: 0, value_scales };
        Exponentials {
            work: Cell::new(work),
            subtract: Cell::new([0.0; MAX_LANES]),
            sums: [const { Cell::new([0.0; MAX_LANES]) }; ROWS],
            next_row: Cell::new(0),
            next_key: Cell::new(0),
            vectors_per_portion: Cell::new(0),
        }
    }

    /// Begins with another row block.
    #[inline(always)]
    pub fn begin(&self, work: Work) {
        for sum in &self.sums[..work.rows] {
            sum.set([0.0; MAX_LANES]);
        }
        self.next_row.set(0);
        self.next_key.set(work.first_key);
        self.work.set(work);
    }

    /// Divides the exponentials among as many portions.
    #[inline(always)]
    pub fn divide<V: Vector>(&self, portions: usize) {
        let work = self.work.get();
        let vectors = work.rows * (work.end_key - work.first_key) / V::LANES;
        self.vectors_per_portion.set(vectors.div_ceil(portions.max(1)));
    }

    /// Computes the next portion, if any are left.
    ///
    /// # Safety
    /// As [`exponentiate`], for all rows.
    #[inline(always)]
    pub unsafe fn run_portion<V: Vector, const PAIRED: bool>(&self) {
        let work = self.work.as_ptr();
        let (mut row, mut key) = (self.next_row.get(), self.next_key.get());
        // SAFETY: at most ROWS rows were begun with; each vector is whole. Nothing else has the
        // cells now.
        unsafe {
            let mut vectors = self.vectors_per_portion.get();
            while vectors > 0 && row < (*work).rows {
                let scores = (*work).scores.add(row * (*work).stride);
                let max = V::splat(*self.subtract.as_ptr().cast::<f32>().add(row));
                let sum_at = self.sums.get_unchecked(row).as_ptr().cast::<f32>();
                let mut sum = V::load(sum_at);
                while vectors > 0 && key < (*work).end_key {
                    let p = exponentiate::<V, PAIRED>(scores, (*work).value_scales, key, max);
                    sum = sum.add(p);
                    key += V::LANES;
                    vectors -= 1;
                }
                sum.store(sum_at);
                if key >= (*work).end_key {
                    (row, key) = (row + 1, (*work).first_key);
                }
            }
        }
        self.next_row.set(row);
        self.next_key.set(key);
    }

    /// Computes the remaining exponentials.
    ///
    /// # Safety
    /// As [`run_portion`](Exponentials::run_portion).
    #[inline(always)]
    pub unsafe fn finish<V: Vector, const PAIRED: bool>(&self) {
        self.vectors_per_portion.set(usize::MAX);
        // SAFETY: same contract.
        unsafe { self.run_portion::<V, PAIRED>() };
    }

    /// The sum of a row's exponentials.
    ///
    /// # Safety
    /// As [`Vector`]'s methods. All exponentials have been computed; `row` is one of the rows.
    #[inline(always)]
    pub unsafe fn sum<V: Vector>(&self, row: usize) -> f32 {
        // SAFETY: same contract; no vector has more than MAX_LANES lanes.
        unsafe { V::load(self.sums[row].as_ptr().cast::<f32>()).reduce_add() }
    }
}
