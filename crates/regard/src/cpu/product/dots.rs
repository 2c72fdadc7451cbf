//! Scores of a few query rows against keys that are read in place, without packing.

use super::prefetch::{PrefetchCursor, PrefetchRows};
use super::rows::{RowFormat, sixteen};
use crate::cpu::vector::{PairFormat, UNIT_DIMS, Vector};
use crate::format::BLOCK_VALUES;
use crate::problem::MAX_HEAD_DIM;
use half::bf16;
use std::mem::MaybeUninit;

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
    if PAIRED && E::BLOCK > 0 {
        // SAFETY: same contract.
        return unsafe { block_dots::<V, E, M>(work) };
    }
    let steps_per_group = match PAIRED {
        true => work.dims.div_ceil(UNIT_DIMS),
        false => work.dims.div_ceil(V::LANES),
    };
    let steps = work.keys.len().div_ceil(J) * steps_per_group;
    let lines_per_step = work.prefetch.lines().div_ceil(steps);
    let mut cursor = PrefetchCursor::default();
    let mut arranged = ArrangedQueries::<V, M>::uninit();
    if PAIRED && !E::PAIRS.is_in_order() {
        // SAFETY: same contract.
        unsafe { arrange_queries::<V, E, M>(work, &mut arranged) };
    }
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
            let sums = match PAIRED {
                true => {
                    paired_sums::<V, E, M, J>(work, &arranged, &group, &mut cursor, lines_per_step)
                }
                false => sums::<V, E, M, J>(work, &group, &mut cursor, lines_per_step),
            };
            store_scores::<V, M, J>(work, &group, sums);
        }
    }
}

/// `J` keys of a block, of which `count` are not repeated, and the destination of their scores.
struct Group<const J: usize> {
    keys: [*const u8; J],
    count: usize,
    scores: *mut f32,
}

/// Products of the group's keys and `M` query rows: key j and row m at m * J + j.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn sums<V: Vector, E: RowFormat, const M: usize, const J: usize>(
    work: &Dots,
    group: &Group<J>,
    cursor: &mut PrefetchCursor,
    lines_per_step: usize,
) -> [f32; 16] {
    let Group { keys, .. } = *group;
    let mut totals = [0.0f32; 16];
    let mut dim = 0;
    while dim < work.dims {
        let end = if V::LANES * CHAIN_VECTORS < MAX_HEAD_DIM {
            work.dims.min(dim + V::LANES * CHAIN_VECTORS)
        } else {
            work.dims
        };
        // SAFETY: `dims` is a multiple of LANES, so whole vectors of queries and keys are inside
        // their rows.
        unsafe {
            let mut sums = [V::splat(0.0); 16];
            while dim < end {
                let mut scales = [V::splat(1.0); J];
                let block_end = if E::BLOCK > 0 { end.min(dim + E::BLOCK) } else { end };
                if E::BLOCK > 0 {
                    for j in 0..J {
                        scales[j] = E::block_scale(keys[j], dim);
                    }
                }
                while dim < block_end {
                    // Before the loads: across these branches the loaded vectors would not all fit
                    // into registers.
                    cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
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
                totals[i] += partial[i];
            }
        }
    }
    totals
}

/// `M` query rows as pairs of bf16, in the order of the pairs of keys.
type ArrangedQueries<V, const M: usize> = MaybeUninit<[[[V; 2]; MAX_HEAD_DIM / UNIT_DIMS]; M]>;

/// The address of a query row of bf16.
#[inline(always)]
fn paired_query(work: &Dots, row: usize) -> *const u8 {
    work.queries.wrapping_add(row * work.query_stride).cast()
}

/// # Safety
/// As [`dots`], for rows of bf16.
#[inline(always)]
unsafe fn arrange_queries<V: Vector, E: RowFormat, const M: usize>(
    work: &Dots,
    arranged: &mut ArrangedQueries<V, M>,
) {
    let rows = arranged.as_mut_ptr().cast::<[[V; 2]; MAX_HEAD_DIM / UNIT_DIMS]>();
    for m in 0..M {
        let mut to = rows.wrapping_add(m).cast::<[V; 2]>();
        let mut dim = 0;
        while dim < work.dims {
            let count = (work.dims - dim).min(UNIT_DIMS);
            // SAFETY: same contract. Dims are at most MAX_HEAD_DIM.
            unsafe {
                let pairs = V::load_pairs(PairFormat::Bf16, paired_query(work, m), dim, count);
                to.write(V::arrange_pairs(E::PAIRS, pairs));
            }
            to = to.wrapping_add(1);
            dim += UNIT_DIMS;
        }
    }
}

/// [`sums`] of pairs of bf16.
///
/// # Safety
/// As [`dots`], for rows of bf16.
#[inline(always)]
unsafe fn paired_sums<V: Vector, E: RowFormat, const M: usize, const J: usize>(
    work: &Dots,
    arranged: &ArrangedQueries<V, M>,
    group: &Group<J>,
    cursor: &mut PrefetchCursor,
    lines_per_step: usize,
) -> [f32; 16] {
    // SAFETY: as `sums`.
    unsafe {
        let mut sums = [V::splat(0.0); 16];
        let mut dim = 0;
        // Full units apart: with a count that varies, sums would not all stay in registers.
        while dim + UNIT_DIMS <= work.dims {
            cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
            add_unit::<V, E, M, J>(work, arranged, &group.keys, [dim, UNIT_DIMS], &mut sums);
            dim += UNIT_DIMS;
        }
        if dim < work.dims {
            cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
            add_unit::<V, E, M, J>(work, arranged, &group.keys, [dim, work.dims - dim], &mut sums);
        }
        let mut totals = [0.0f32; 16];
        V::sums(&sums, totals.as_mut_ptr());
        totals
    }
}

/// Adds the products of `count` dims from `dim` on.
///
/// # Safety
/// As [`paired_sums`].
#[inline(always)]
unsafe fn add_unit<V: Vector, E: RowFormat, const M: usize, const J: usize>(
    work: &Dots,
    arranged: &ArrangedQueries<V, M>,
    keys: &[*const u8; J],
    [dim, count]: [usize; 2],
    sums: &mut [V; 16],
) {
    let rows = arranged.as_ptr().cast::<[[V; 2]; MAX_HEAD_DIM / UNIT_DIMS]>();
    // SAFETY: same contract.
    unsafe {
        let mut columns = [[V::splat(0.0); 2]; J];
        for j in 0..J {
            columns[j] = V::load_pairs(E::PAIRS, keys[j], dim, count);
        }
        for m in 0..M {
            let query = match E::PAIRS.is_in_order() {
                true => V::load_pairs(PairFormat::Bf16, paired_query(work, m), dim, count),
                false => rows.add(m).cast::<[V; 2]>().add(dim / UNIT_DIMS).read(),
            };
            for half in 0..2 {
                for j in 0..J {
                    let sum = &mut sums[m * J + j];
                    *sum = query[half].pair_mul_add(columns[j][half], *sum);
                }
            }
        }
    }
}

/// Stores the scores of a group.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn store_scores<V: Vector, const M: usize, const J: usize>(
    work: &Dots,
    group: &Group<J>,
    mut sums: [f32; 16],
) {
    // SAFETY: same contract: there is at least one key, and at most J scores are stored per row.
    unsafe {
        for i in (0..V::DOT_SUMS).step_by(V::LANES) {
            let scores = sums.as_mut_ptr().add(i);
            V::load(scores).mul(V::splat(work.scale)).store(scores);
        }
        for m in 0..M {
            let from = sums.as_ptr().add(m * J);
            let to = group.scores.add(m * work.score_stride);
            if group.count == J {
                to.cast::<[f32; J]>().write_unaligned(from.cast::<[f32; J]>().read());
                continue;
            }
            // Not a copy of `count` floats: the compiler would join it with the store above, into
            // a call of `memcpy` for every row.
            for j in 0..J - 1 {
                if j < group.count {
                    *to.add(j) = *from.add(j);
                }
            }
        }
    }
}

/// [`dots`] of pairs of bf16 and keys in blocks: LANES keys at a time, a lane each.
///
/// # Safety
/// As [`dots`], for rows of bf16 and keys that have blocks.
#[inline(always)]
unsafe fn block_dots<V: Vector, E: RowFormat, const M: usize>(work: &Dots) {
    let blocks = work.dims / E::BLOCK;
    let steps = work.keys.len().div_ceil(V::LANES) * blocks;
    let lines_per_step = work.prefetch.lines().div_ceil(steps);
    let mut cursor = PrefetchCursor::default();
    let mut arranged = MaybeUninit::<[[V; MAX_HEAD_DIM / BLOCK_VALUES]; M]>::uninit();
    let rows = arranged.as_mut_ptr().cast::<[V; MAX_HEAD_DIM / BLOCK_VALUES]>();
    for m in 0..M {
        for block in 0..blocks {
            // SAFETY: same contract. Dims are at most MAX_HEAD_DIM.
            unsafe {
                let elements = paired_query(work, m).cast::<bf16>().add(block * E::BLOCK);
                let pairs = V::arrange_block(E::PAIRS, elements);
                rows.add(m).cast::<V>().add(block).write(pairs);
            }
        }
    }
    for (group, addresses) in work.keys.chunks(V::LANES).enumerate() {
        let mut filled = [std::ptr::null(); 16];
        let keys = sixteen(addresses, &mut filled);
        // SAFETY: same contract. Every key has these blocks.
        unsafe {
            let zero = V::splat(0.0);
            let mut sums = [zero; M];
            for block in 0..blocks {
                cursor.prefetch_lines::<V>(&work.prefetch, lines_per_step);
                let offset = work.offset as isize + (block * size_of::<E>()) as isize;
                let codes = V::block_codes(E::PAIRS, keys, offset);
                let scales = V::gather_f16(keys, offset);
                let mut parts = [[zero; 4]; M];
                let queries = rows.cast::<V>().add(block).cast::<f32>();
                add_four_pairs::<V, M, 0>(queries, E::PAIRS, &codes, &mut parts);
                add_four_pairs::<V, M, 1>(queries, E::PAIRS, &codes, &mut parts);
                add_four_pairs::<V, M, 2>(queries, E::PAIRS, &codes, &mut parts);
                add_four_pairs::<V, M, 3>(queries, E::PAIRS, &codes, &mut parts);
                for m in 0..M {
                    let mut product = parts[m][0];
                    for chain in 1..chains_per_row(M) {
                        product = product.add(parts[m][chain]);
                    }
                    sums[m] = product.mul_add(scales, sums[m]);
                }
            }
            for m in 0..M {
                let to = work.scores.add(m * work.score_stride + group * V::LANES);
                sums[m].mul(V::splat(work.scale)).store_first(to, addresses.len());
            }
        }
    }
}

/// Chains of products per row: products of few rows would wait for each other.
const fn chains_per_row(rows: usize) -> usize {
    match rows {
        1..=3 => 4,
        4..=6 => 2,
        _ => 1,
    }
}

/// Adds the products of the quarter's four pairs of a block. `queries` is the block of row 0. A
/// function, because a loop over all pairs is not unrolled, and would keep them in memory.
///
/// # Safety
/// As [`block_dots`].
#[inline(always)]
unsafe fn add_four_pairs<V: Vector, const M: usize, const QUARTER: usize>(
    queries: *const f32,
    format: PairFormat,
    codes: &[V; 8],
    parts: &mut [[V; 4]; M],
) {
    // SAFETY: same contract.
    unsafe {
        let pairs = V::block_columns(format, codes, QUARTER);
        for m in 0..M {
            let row = queries.add(m * (MAX_HEAD_DIM / BLOCK_VALUES) * 16 + 4 * QUARTER);
            for i in 0..4 {
                let part = &mut parts[m][i % chains_per_row(M)];
                // The instruction reads its second factor: on Zen 4, to broadcast it by another
                // takes a port that products need.
                *part = match i {
                    0 => pairs[i].pair_mul_add_at::<0>(row, *part),
                    1 => pairs[i].pair_mul_add_at::<1>(row, *part),
                    2 => pairs[i].pair_mul_add_at::<2>(row, *part),
                    _ => pairs[i].pair_mul_add_at::<3>(row, *part),
                };
            }
        }
    }
}
