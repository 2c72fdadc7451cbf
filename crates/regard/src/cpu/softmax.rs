//! From raw scores to probabilities, one row of one tile at a time.

use super::kernel::Call;
use super::vector::{Storage, Vector, exp2, tanh};
use crate::problem::Sequence;
use crate::state::{LOG2_E, State};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// Keys a tile at most.
const MAX_TILE_KEYS: usize = 128;

/// 0, 1, 2...: the keys of a tile, to measure distances from.
static INDICES: [f32; MAX_TILE_KEYS] = {
    let mut indices = [0.0; MAX_TILE_KEYS];
    let mut i = 0;
    while i < MAX_TILE_KEYS {
        indices[i] = i as f32;
        i += 1;
    }
    indices
};

/// One row's scores against one tile. Key indices are relative to the tile.
pub(super) struct RowScores {
    /// A float a key of the tile.
    pub scores: *mut f32,
    /// Which of them hold dot products: whole vectors.
    pub computed: Range<usize>,
    /// Which of them causality, window and length let the row see; inside `computed`, or empty.
    pub visible: Range<usize>,
    /// The tile's first key.
    pub tile: usize,
    pub token: usize,
    pub head: usize,
}

/// Turns the scores into unnormalised probabilities under the row's running maximum, adds them to its state, and returns the factor by
/// which the row's earlier output shrinks. With `PAIRED`, probabilities are left as bf16.
///
/// # Safety
/// As [`Vector`]'s methods; `computed` lies inside the scores.
#[inline(always)]
pub(super) unsafe fn row<V: Vector, const PAIRED: bool>(
    call: &Call,
    sequence: &Sequence,
    row: &RowScores,
    state: &mut State,
) -> f32 {
    let scores = row.scores;
    // SAFETY: all indices lie in `computed`.
    unsafe {
        if !row.visible.is_empty() {
            adjust::<V>(call, sequence, row);
        }
        for i in (row.computed.start..row.visible.start).chain(row.visible.end..row.computed.end) {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut max = V::splat(f32::NEG_INFINITY);
        let mut i = row.computed.start;
        while i < row.computed.end {
            max = V::load(scores.add(i)).max(max);
            i += V::LANES;
        }
        let tile_max = max.reduce_max();
        // A NaN maximum is taken over, so that it shows.
        let max = if tile_max <= state.max { state.max } else { tile_max };
        if max == f32::NEG_INFINITY {
            let mut i = row.computed.start;
            while i < row.computed.end {
                store::<V, PAIRED>(V::splat(0.0), scores, i);
                i += V::LANES;
            }
            return 1.0;
        }
        let mut sum = V::splat(0.0);
        let mut i = row.computed.start;
        while i < row.computed.end {
            let p = exp2(V::load(scores.add(i)).sub(V::splat(max)));
            store::<V, PAIRED>(p, scores, i);
            sum = sum.add(p);
            i += V::LANES;
        }
        let factor = if max == state.max { 1.0 } else { first_lane(exp2(V::splat(state.max - max))) };
        state.max = max;
        state.sum = state.sum * factor + sum.reduce_add();
        factor
    }
}

/// Stores probabilities where their scores were: as floats, or as bf16 in the first half of the row, for the second product.
#[inline(always)]
unsafe fn store<V: Vector, const PAIRED: bool>(probabilities: V, scores: *mut f32, i: usize) {
    // SAFETY: i is in the row; bf16 take half the place, behind what is still to be read.
    unsafe {
        match PAIRED {
            true => probabilities.store_bf16(scores.cast::<bf16>().add(i)),
            false => probabilities.store(scores.add(i)),
        }
    }
}

#[inline(always)]
unsafe fn first_lane<V: Vector>(vector: V) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: 16 is the widest vector.
    unsafe { vector.store(lanes.as_mut_ptr()) };
    lanes[0]
}

/// Softcap, ALiBi, mask and tree, in the contract's order. Scores are in base 2 (over the softcap, where there is one).
#[inline(always)]
unsafe fn adjust<V: Vector>(call: &Call, sequence: &Sequence, row: &RowScores) {
    let attention = &call.inputs.attention;
    let scores = row.scores;
    // SAFETY: whole vectors of `computed`; mask reads stay inside `visible`, for which the mask was checked.
    unsafe {
        if let Some(cap) = call.softcap {
            let mut i = row.computed.start;
            while i < row.computed.end {
                tanh(V::load(scores.add(i))).mul(V::splat(cap)).store(scores.add(i));
                i += V::LANES;
            }
        }
        if let Some(slopes) = attention.alibi_slopes.and_then(|slopes| slopes.as_slice::<f32>()) {
            let slope = V::splat(-slopes[row.head] * LOG2_E);
            let position = sequence.q_offset + row.token as i64;
            let position = V::splat((position - row.tile as i64) as f32);
            let mut i = row.computed.start;
            while i < row.computed.end {
                let distance = position.sub(V::load(INDICES.as_ptr().add(i))).abs();
                distance.mul_add(slope, V::load(scores.add(i))).store(scores.add(i));
                i += V::LANES;
            }
        }
        if let Some(mask) = &attention.mask {
            match mask.dtype() {
                DType::Bool => boolean_mask(mask, sequence, row),
                DType::F32 => additive_mask::<V, f32>(mask, sequence, row),
                DType::F16 => additive_mask::<V, f16>(mask, sequence, row),
                DType::BF16 => additive_mask::<V, bf16>(mask, sequence, row),
                DType::I32 => unreachable!("checked: masks are boolean or floating"),
            }
        }
        if let Some(tree) = &attention.tree_mask {
            tree_mask(tree, sequence, row);
        }
    }
}

/// The mask's element for the first visible key, and whether one element serves all keys.
fn mask_row(mask: &Tensor, sequence: &Sequence, row: &RowScores) -> (*const u8, bool) {
    let (shape, strides) = (mask.shape(), mask.strides());
    let indices = [sequence.index, row.head, row.token, row.tile + row.visible.start];
    let mut offset = 0i64;
    for i in 0..4 {
        if shape[i] > 1 {
            offset += indices[i] as i64 * strides[i];
        }
    }
    (mask.as_ptr().wrapping_offset((offset * mask.dtype().size() as i64) as isize), shape[3] == 1)
}

#[inline(always)]
unsafe fn boolean_mask(mask: &Tensor, sequence: &Sequence, row: &RowScores) {
    let (from, broadcast) = mask_row(mask, sequence, row);
    // SAFETY: the mask has an element for every visible key, or one for all.
    unsafe {
        let scores = row.scores.add(row.visible.start);
        for i in 0..row.visible.len() {
            let keep = *from.add(if broadcast { 0 } else { i }) != 0;
            let score = *scores.add(i);
            *scores.add(i) = if keep { score } else { f32::NEG_INFINITY };
        }
    }
}

#[inline(always)]
unsafe fn additive_mask<V: Vector, E: Storage>(mask: &Tensor, sequence: &Sequence, row: &RowScores) {
    let (from, broadcast) = mask_row(mask, sequence, row);
    let (from, count) = (from.cast::<E>(), row.visible.len());
    // SAFETY: as `boolean_mask`.
    unsafe {
        let scores = row.scores.add(row.visible.start);
        let mut i = 0;
        if !broadcast {
            while i + V::LANES <= count {
                let bias = base_2(E::load::<V>(from.add(i)));
                V::load(scores.add(i)).add(bias).store(scores.add(i));
                i += V::LANES;
            }
        }
        while i < count {
            let bias = (*from.add(if broadcast { 0 } else { i })).widen();
            *scores.add(i) += first_lane(base_2(V::splat(bias)));
            i += 1;
        }
    }
}

/// Natural units to base 2. The most negative finite numbers, which stand for "hidden" in many engines' masks, stay finite: a row
/// of nothing else is not empty.
#[inline(always)]
unsafe fn base_2<V: Vector>(bias: V) -> V {
    // SAFETY: the caller runs below an entry with V's features.
    unsafe {
        let lowest = V::splat(-f32::MAX);
        let scaled = lowest.max(bias.mul(V::splat(LOG2_E)));
        bias.select_below(lowest, V::splat(f32::NEG_INFINITY), scaled)
    }
}

/// Hides the new tokens that the row's bits leave out. New token t is key `kv_len - q_len + t`.
#[inline(always)]
unsafe fn tree_mask(tree: &Tensor, sequence: &Sequence, row: &RowScores) {
    let strides = tree.strides();
    let offset = sequence.index as i64 * strides[0] + row.token as i64 * strides[1];
    let words = tree.as_ptr().cast::<i32>().wrapping_offset(offset as isize);
    let first_new = sequence.kv_len as i64 - sequence.q_len as i64 - row.tile as i64;
    // SAFETY: t stays below q_len, for which the mask has words.
    unsafe {
        for i in row.visible.clone() {
            let t = i as i64 - first_new;
            if t >= 0 && *words.add(t as usize / 32) as u32 >> (t % 32) & 1 == 0 {
                *row.scores.add(i) = f32::NEG_INFINITY;
            }
        }
    }
}
