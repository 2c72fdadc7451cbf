//! Scores of a few query rows against keys that are read in place, without packing.

use super::prefetch::{PrefetchCursor, PrefetchRows};
use crate::cpu::vector::{Storage, Vector};
use crate::problem::MAX_HEAD_DIM;
use half::bf16;

/// Vectors of the head dim per accumulation chain. Levels of four lanes need more than one chain
/// for the largest head dims: longer chains round too much when all terms have the same sign
/// (docs/semantics.md, "Tolerance").
const CHAIN_VECTORS: usize = MAX_HEAD_DIM / 8;

pub type DotsFn = unsafe fn(&Dots);

/// Scores of `M` query rows of a head against `J` of its keys.
pub struct Dots<'a> {
    /// `M` rows, `query_stride` apart.
    pub queries: *const f32,
    pub query_stride: usize,
    /// The keys' addresses for head 0, and the offset to add to each. If there are fewer than `J`,
    /// the last one is repeated.
    pub keys: &'a [*const u8],
    pub offset: i64,
    pub prefetch: PrefetchRows<'a>,
    /// Head dim: a multiple of LANES.
    pub dims: usize,
    /// `M` rows of one score per key, `score_stride` apart.
    pub scores: *mut f32,
    pub score_stride: usize,
    /// Multiplies the scores.
    pub scale: f32,
}

/// To be inlined into a function that enables V's features.
///
/// # Safety
/// The pointers cover what [`Dots`] says, and the enclosing function enables V's features.
#[inline(always)]
pub unsafe fn dots<V: Vector, E: Storage, const M: usize, const J: usize, const PAIRED: bool>(
    work: &Dots,
) {
    // SAFETY: `dims` is a multiple of LANES, so whole vectors of queries and keys lie inside their
    // rows. There is at least one key, and at most J scores are stored per row.
    unsafe {
        let count = work.keys.len().min(J);
        let mut keys = [std::ptr::null::<u8>(); J];
        for (j, key) in keys.iter_mut().enumerate() {
            *key = work.keys[j.min(count - 1)].wrapping_offset(work.offset as isize);
        }
        let mut cursor = PrefetchCursor::default();
        let mut scores = [0.0f32; 16];
        let mut dim = 0;
        while dim < work.dims {
            let end = if V::LANES * CHAIN_VECTORS < MAX_HEAD_DIM {
                work.dims.min(dim + V::LANES * CHAIN_VECTORS)
            } else {
                work.dims
            };
            let mut sums = [V::splat(0.0); 16];
            while PAIRED && dim < end {
                let pairs = (end - dim).min(2 * V::LANES);
                // Before the loads: across these branches the loaded vectors would not all fit into
                // registers.
                for _ in 0..J {
                    cursor.prefetch_line::<V>(&work.prefetch);
                }
                let mut columns = [V::splat(0.0); J];
                for (column, key) in columns.iter_mut().zip(keys) {
                    *column = V::load_pairs(key.cast::<bf16>().add(dim), pairs);
                }
                for m in 0..M {
                    let query = work.queries.add(m * work.query_stride).cast::<bf16>();
                    let query = V::load_pairs(query.add(dim), pairs);
                    for (j, &column) in columns.iter().enumerate() {
                        sums[m * J + j] = query.pair_mul_add(column, sums[m * J + j]);
                    }
                }
                dim += pairs;
            }
            while dim < end {
                for _ in 0..J {
                    cursor.prefetch_line::<V>(&work.prefetch);
                }
                let mut columns = [V::splat(0.0); J];
                for (column, key) in columns.iter_mut().zip(keys) {
                    *column = E::load::<V>(key.cast::<E>().add(dim));
                }
                for m in 0..M {
                    let query = V::load(work.queries.add(m * work.query_stride + dim));
                    for (j, &column) in columns.iter().enumerate() {
                        sums[m * J + j] = query.mul_add(column, sums[m * J + j]);
                    }
                }
                dim += V::LANES;
            }
            let mut partial = [0.0f32; 16];
            V::sums(&sums, partial.as_mut_ptr());
            for (score, partial) in scores.iter_mut().zip(partial) {
                *score += partial;
            }
        }
        for score in &mut scores {
            *score *= work.scale;
        }
        for m in 0..M {
            let from = scores.as_ptr().add(m * J);
            let to = work.scores.add(m * work.score_stride);
            // One store for a full group.
            match count == J {
                true => to.cast::<[f32; J]>().write_unaligned(from.cast::<[f32; J]>().read()),
                false => to.copy_from_nonoverlapping(from, count),
            }
        }
    }
}
