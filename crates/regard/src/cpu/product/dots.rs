//! Scores of a few query rows against keys that are read in place, without packing.

use super::prefetch::{PrefetchCursor, PrefetchRows};
use super::rows::RowFormat;
use crate::cpu::vector::Vector;
use crate::problem::MAX_HEAD_DIM;
use half::bf16;

/// Vectors of the head dim per accumulation chain. Levels of four lanes need more than one chain
/// for the largest head dims: longer chains round too much when all terms have the same sign
/// (docs/semantics.md, "Tolerance").
const CHAIN_VECTORS: usize = MAX_HEAD_DIM / 8;

pub type DotsFn = unsafe fn(&Dots);

/// Scores of `M` query rows of a head against a block of its keys, `J` at a time.
pub struct Dots<'a> {
    /// `M` rows, `query_stride` apart.
    pub queries: *const f32,
    pub query_stride: usize,
    /// The keys' addresses for head 0, and the offset to add to each. In a group of fewer than `J`,
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
/// The pointers cover the extent in [`Dots`], and the enclosing function enables V's features.
#[inline(always)]
pub unsafe fn dots<V: Vector, E: RowFormat, const M: usize, const J: usize, const PAIRED: bool>(
    work: &Dots,
) {
    let vectors_per_step = if PAIRED { 2 } else { 1 };
    let steps = work.keys.len().div_ceil(J) * work.dims.div_ceil(V::LANES * vectors_per_step);
    let lines_per_step = work.prefetch.lines().div_ceil(steps);
    let mut cursor = PrefetchCursor::default();
    for (group, addresses) in work.keys.chunks(J).enumerate() {
        let mut keys = [std::ptr::null::<u8>(); J];
        for j in 0..J {
            let address = addresses[j.min(addresses.len() - 1)];
            keys[j] = address.wrapping_offset(work.offset as isize);
        }
        let scores = work.scores.wrapping_add(group * J);
        // SAFETY: same contract, for the keys of the group.
        unsafe {
            let group = Group::<J> { keys, count: addresses.len(), scores };
            group_dots::<V, E, M, J, PAIRED>(work, &group, &mut cursor, lines_per_step);
        }
    }
}

/// `J` keys of a block, of which `count` are not repeated, and the destination of their scores.
struct Group<const J: usize> {
    keys: [*const u8; J],
    count: usize,
    scores: *mut f32,
}

/// [`dots`] of one group of keys.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn group_dots<
    V: Vector,
    E: RowFormat,
    const M: usize,
    const J: usize,
    const PAIRED: bool,
>(
    work: &Dots,
    group: &Group<J>,
    cursor: &mut PrefetchCursor,
    lines_per_step: usize,
) {
    let Group { keys, count, .. } = *group;
    // SAFETY: `dims` is a multiple of LANES, so whole vectors of queries and keys are inside their
    // rows. There is at least one key, and at most J scores are stored per row.
    unsafe {
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
                for _ in 0..lines_per_step {
                    cursor.prefetch_line::<V>(&work.prefetch);
                }
                let mut columns = [V::splat(0.0); J];
                for j in 0..J {
                    columns[j] = E::load_pairs::<V>(keys[j], dim, pairs);
                }
                for m in 0..M {
                    let query = work.queries.add(m * work.query_stride).cast::<bf16>();
                    let query = V::load_pairs(query.add(dim), pairs);
                    for j in 0..J {
                        sums[m * J + j] = query.pair_mul_add(columns[j], sums[m * J + j]);
                    }
                }
                dim += pairs;
            }
            while dim < end {
                let mut scales = [V::splat(1.0); J];
                let block_end = if E::BLOCK > 0 { end.min(dim + E::BLOCK) } else { end };
                if E::BLOCK > 0 {
                    for j in 0..J {
                        scales[j] = E::block_scale(keys[j], dim);
                    }
                }
                while dim < block_end {
                    for _ in 0..lines_per_step {
                        cursor.prefetch_line::<V>(&work.prefetch);
                    }
                    let mut columns = [V::splat(0.0); J];
                    for j in 0..J {
                        columns[j] = E::load(keys[j], dim, scales[j]);
                    }
                    for m in 0..M {
                        let query = V::load(work.queries.add(m * work.query_stride + dim));
                        for j in 0..J {
                            sums[m * J + j] = query.mul_add(columns[j], sums[m * J + j]);
                        }
                    }
                    dim += V::LANES;
                }
            }
            let mut partial = [0.0f32; 16];
            V::sums(&sums, partial.as_mut_ptr());
            for i in 0..16 {
                scores[i] += partial[i];
            }
        }
        for score in &mut scores {
            *score *= work.scale;
        }
        for m in 0..M {
            let from = scores.as_ptr().add(m * J);
            let to = group.scores.add(m * work.score_stride);
            if count == J {
                to.cast::<[f32; J]>().write_unaligned(from.cast::<[f32; J]>().read());
                continue;
            }
            // Not a copy of `count` floats: the compiler would join it with the store above, into
            // a call of `memcpy` for every row.
            for j in 0..J - 1 {
                if j < count {
                    *to.add(j) = *from.add(j);
                }
            }
        }
    }
}
