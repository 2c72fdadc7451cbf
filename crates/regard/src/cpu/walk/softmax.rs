//! Online softmax: scores of one tile become unnormalized probabilities, and the rows' states are
//! updated.

use super::list_tile::ListTile;
use super::tile_kinds::{TileKind, TileKinds};
use super::tiling::MAX_TILE_KEYS;
use crate::cpu::product::exponentials::{self, Exponentials, Work};
use crate::cpu::vector::{Storage, Vector, tanh};
use crate::dtype::DType;
use crate::problem::Sequence;
use crate::state::{LARGEST_SCORE, LOG4_E, State};
use crate::tensor::Tensor;
use crate::variant::Attention;
use half::{bf16, f16};
use std::cell::Cell;
use std::ops::Range;

/// 0, 1, 2...: key indices relative to the tile.
///
/// Loaded as whole vectors without a bounds check. So no tile may be longer, and none may end
/// inside a vector; the parent module asserts both.
static KEY_INDICES: [f32; MAX_TILE_KEYS] = {
    let mut indices = [0.0; MAX_TILE_KEYS];
    let mut i = 0;
    while i < MAX_TILE_KEYS {
        indices[i] = i as f32;
        i += 1;
    }
    indices
};

/// The modifications of scores between dot product and softmax, besides the scale.
#[derive(Clone, Copy)]
pub struct ScoreModifiers<'a> {
    pub attention: &'a Attention<Tensor<'a>>,
    /// The softcap, in base 4.
    pub softcap: Option<f32>,
    /// No softcap, ALiBi, mask or tree mask.
    pub unmodified: bool,
    /// The tile map of the mask, if the workspace has it.
    pub tiles: Option<TileKinds<'a>>,
}

/// The scores of some rows against one tile. Key indices are relative to the tile.
pub struct ScoreTile<'a> {
    /// At most [`MAX_ROWS`].
    pub rows: &'a [ScoreRow],
    /// The keys whose dot products were computed: whole vectors.
    pub computed: Range<usize>,
    /// The tile's first key.
    pub tile_start: usize,
    /// Multiplies the dot products, if they are not scaled yet.
    pub scale: Option<f32>,
    /// The entries of the tile, if rows have lists of keys. Then "keys" of the tile are entries.
    pub list: Option<&'a ListTile>,
    /// If exponentials are computed later: the place for the number that is subtracted from each
    /// row's scores. States get everything but the sums of the exponentials.
    pub exponentials_later: Option<&'a Cell<[f32; MAX_ROWS]>>,
}

/// The scores of one row.
#[derive(Clone)]
pub struct ScoreRow {
    /// One float per key of the tile.
    pub scores: *mut f32,
    /// One float per key of the tile that multiplies scores; null if none do.
    pub key_scales: *const f32,
    /// One float per key of the tile that multiplies probabilities, but not their sum; null if
    /// none do.
    pub value_scales: *const f32,
    /// The keys that the row can see by causality, window and length: inside `computed`, or empty.
    pub visible: Range<usize>,
    pub token: usize,
    pub head: usize,
}

/// Maximum rows per [`softmax_step`].
pub const MAX_ROWS: usize = 16;

/// [`softmax_step`], compiled for a level.
pub type SoftmaxFn = unsafe fn(&ScoreModifiers, &Sequence, &ScoreTile, &mut [State], &mut [f32]);

/// One step of the online softmax. Turns scores into unnormalized probabilities relative to each
/// row's running max, updates the rows' states, and writes the factors that rescale the rows'
/// previous outputs. `PAIRED` code stores probabilities as bf16.
///
/// Each row is a chain of dependent operations. The three phases (all maxima, all rescale factors,
/// all exponentials) have no branches on scores, so that the CPU overlaps independent rows.
///
/// # Safety
/// As [`Vector`]'s methods. `computed` is inside the scores. There are as many states and factors
/// as rows.
#[inline(always)]
pub unsafe fn softmax_step<V: Vector, const PAIRED: bool>(
    modifiers: &ScoreModifiers,
    sequence: &Sequence,
    tile: &ScoreTile,
    states: &mut [State],
    factors: &mut [f32],
) {
    let rows = tile.rows;
    let mut maxima = [f32::NEG_INFINITY; MAX_ROWS];
    let mut rescale = [1.0f32; MAX_ROWS];
    // SAFETY: same contract. MAX_ROWS is a multiple of LANES.
    unsafe {
        let mut vectors = [V::splat(f32::NEG_INFINITY); MAX_ROWS];
        modify_and_find_maxima::<V>(modifiers, sequence, tile, &mut vectors);
        let mut old_maxima = [f32::NEG_INFINITY; MAX_ROWS];
        for (i, max) in vectors.iter().enumerate().take(rows.len()) {
            maxima[i] = max.reduce_max();
            old_maxima[i] = states[i].max;
        }
        rescale_factors::<V>(rows.len(), &old_maxima, &mut maxima, &mut rescale);
        if let Some(subtract) = tile.exponentials_later {
            factors.copy_from_slice(&rescale[..rows.len()]);
            leave_exponentials(states, maxima, factors, subtract);
            return;
        }
        exponentiate::<V, PAIRED>(tile, &maxima, &mut vectors);
        for (i, sum) in vectors.iter().enumerate().take(rows.len()) {
            let sum = states[i].sum * rescale[i] + sum.reduce_add();
            states[i] = State { max: maxima[i], sum };
            factors[i] = rescale[i];
        }
    }
}

/// [`softmax_step`] without exponentials, for a row block whose scores nothing modifies. `visible`
/// is the keys of the tile that a row can see.
///
/// # Safety
/// As [`softmax_step`].
#[inline(always)]
pub unsafe fn unmodified_maxima<V: Vector>(
    work: &Work,
    visible: impl Fn(usize) -> Range<usize>,
    states: &mut [State],
    factors: &mut [f32; MAX_ROWS],
    subtract: &Cell<[f32; MAX_ROWS]>,
) {
    let computed = work.first_key..work.end_key;
    let mut maxima = [f32::NEG_INFINITY; MAX_ROWS];
    let mut old_maxima = [f32::NEG_INFINITY; MAX_ROWS];
    // SAFETY: same contract. MAX_ROWS is a multiple of LANES.
    unsafe {
        for (row, state) in states.iter().enumerate() {
            let scores = work.scores.add(row * work.stride);
            hide_invisible::<V>(scores, &visible(row), &computed);
            // Two chains: a chain of all vectors would take longer than loading them.
            let mut max = [V::splat(f32::NEG_INFINITY); 2];
            let mut key = computed.start;
            while key + 2 * V::LANES <= computed.end {
                max[0] = V::load(scores.add(key)).max(max[0]);
                max[1] = V::load(scores.add(key + V::LANES)).max(max[1]);
                key += 2 * V::LANES;
            }
            if key < computed.end {
                max[0] = V::load(scores.add(key)).max(max[0]);
            }
            maxima[row] = max[0].max(max[1]).reduce_max();
            old_maxima[row] = state.max;
        }
        rescale_factors::<V>(states.len(), &old_maxima, &mut maxima, factors);
    }
    leave_exponentials(states, maxima, factors, subtract);
}

/// Updates the states by everything but the exponentials, which are computed later.
#[inline(always)]
fn leave_exponentials(
    states: &mut [State],
    mut maxima: [f32; MAX_ROWS],
    factors: &[f32],
    subtract: &Cell<[f32; MAX_ROWS]>,
) {
    for ((state, max), factor) in states.iter_mut().zip(&mut maxima).zip(factors) {
        *state = State { max: *max, sum: state.sum * factor };
        *max = subtracted(*max);
    }
    subtract.set(maxima);
}

/// The end of a softmax whose exponentials are computed later: computes the remaining exponentials,
/// and adds them to the states.
///
/// # Safety
/// As [`softmax_step`], for the rows that the exponentials began with.
#[inline(always)]
pub unsafe fn finish_softmax<V: Vector, const PAIRED: bool>(
    exponentials: &Exponentials,
    states: &mut [State],
) {
    // SAFETY: same contract.
    unsafe {
        exponentials.finish::<V, PAIRED>();
        for (row, state) in states.iter_mut().enumerate() {
            state.sum += exponentials.sum::<V>(row);
        }
    }
}

/// The reference subtracted from the scores of a row. If the row has seen no key, all its scores
/// are -inf. Subtracting a finite number keeps them so, and the exponentials are 0; -inf - -inf
/// would be NaN.
#[inline(always)]
fn subtracted(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

/// Phase 1: scales, modifies and masks the scores, and finds each row's max, lane by lane.
///
/// # Safety
/// As [`softmax_step`].
#[inline(always)]
unsafe fn modify_and_find_maxima<V: Vector>(
    modifiers: &ScoreModifiers,
    sequence: &Sequence,
    tile: &ScoreTile,
    maxima: &mut [V; MAX_ROWS],
) {
    let computed = &tile.computed;
    // SAFETY: `computed` is whole vectors of the rows' scores.
    unsafe {
        for (row, max) in tile.rows.iter().zip(maxima) {
            if let Some(scale) = tile.scale {
                let mut key = computed.start;
                while key < computed.end {
                    let score = row.scores.add(key);
                    V::load(score).mul(V::splat(scale)).store(score);
                    key += V::LANES;
                }
            }
            if !row.key_scales.is_null() {
                let mut key = computed.start;
                while key < computed.end {
                    let score = row.scores.add(key);
                    V::load(score).mul(V::load(row.key_scales.add(key))).store(score);
                    key += V::LANES;
                }
            }
            if !modifiers.unmodified && !row.visible.is_empty() {
                modify_scores::<V>(modifiers, sequence, row, tile);
            }
            hide_invisible::<V>(row.scores, &row.visible, computed);
            if let Some(list) = tile.list {
                hide_skipped(list, row);
            }
            let mut key = computed.start;
            while key < computed.end {
                *max = V::load(row.scores.add(key)).max(*max);
                key += V::LANES;
            }
        }
    }
}

/// Phase 2: replaces the tile's maxima by the new running maxima, and computes the factors that
/// rescale the previous outputs, 4^(old max - new max).
///
/// # Safety
/// As [`Vector`]'s methods.
#[inline(always)]
unsafe fn rescale_factors<V: Vector>(
    rows: usize,
    old_maxima: &[f32; MAX_ROWS],
    maxima: &mut [f32; MAX_ROWS],
    rescale: &mut [f32; MAX_ROWS],
) {
    // SAFETY: MAX_ROWS is a multiple of LANES, so whole vectors are inside the arrays.
    unsafe {
        let mut i = 0;
        while i < rows {
            let tile_max = V::load(maxima.as_ptr().add(i));
            let old_max = V::load(old_maxima.as_ptr().add(i));
            // A NaN max is kept, so that it reaches the output.
            let max = tile_max.select_below(old_max, old_max, tile_max);
            // A row that has seen no key has nothing to rescale. If the max stays, 4^0 is exactly
            // 1.
            let (finite, one) = (V::splat(f32::MIN), V::splat(1.0));
            let factor = max.select_below(finite, one, old_max.sub(max).exp4());
            factor.store(rescale.as_mut_ptr().add(i));
            max.store(maxima.as_mut_ptr().add(i));
            i += V::LANES;
        }
    }
}

/// Phase 3: replaces each score by 4^(score - max), and sums them up, lane by lane.
///
/// # Safety
/// As [`softmax_step`].
#[inline(always)]
unsafe fn exponentiate<V: Vector, const PAIRED: bool>(
    tile: &ScoreTile,
    maxima: &[f32; MAX_ROWS],
    sums: &mut [V; MAX_ROWS],
) {
    let computed = &tile.computed;
    // SAFETY: `computed` is whole vectors of the rows' scores.
    unsafe {
        for ((row, &max), sums) in tile.rows.iter().zip(maxima).zip(sums) {
            let max = V::splat(subtracted(max));
            let mut sum = V::splat(0.0);
            let mut key = computed.start;
            while key < computed.end {
                sum = sum.add(exponentials::exponentiate::<V, PAIRED>(
                    row.scores,
                    row.value_scales,
                    key,
                    max,
                ));
                key += V::LANES;
            }
            *sums = sum;
        }
    }
}

/// Sets the computed scores of a row that it cannot see to -inf.
///
/// # Safety
/// As [`softmax_step`], for a row of scores.
#[inline(always)]
unsafe fn hide_invisible<V: Vector>(
    scores: *mut f32,
    visible: &Range<usize>,
    computed: &Range<usize>,
) {
    let empty = computed.end..computed.end;
    let visible = if visible.is_empty() { &empty } else { visible };
    let lane_mask = V::LANES - 1;
    // SAFETY: whole vectors of `computed`, which is inside the tile; KEY_INDICES covers the
    // longest tile.
    unsafe {
        let hidden = V::splat(f32::NEG_INFINITY);
        let (start, end) = (V::splat(visible.start as f32), V::splat(visible.end as f32));
        // Only the vectors before the first fully visible vector, and the vectors after the last.
        let before = computed.start..computed.end.min((visible.start + lane_mask) & !lane_mask);
        let after = before.end.max(visible.end & !lane_mask)..computed.end;
        for keys in [before, after] {
            let mut key = keys.start;
            while key < keys.end {
                let (index, to) = (V::load(KEY_INDICES.as_ptr().add(key)), scores.add(key));
                let seen = index.select_below(end, V::load(to), hidden);
                index.select_below(start, hidden, seen).store(to);
                key += V::LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn first_lane<V: Vector>(vector: V) -> f32 {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than 16 lanes.
    unsafe { vector.store(lanes.as_mut_ptr()) };
    lanes[0]
}

/// Applies softcap, ALiBi, mask and tree mask, in the order of docs/semantics.md. Scores are in
/// base 4; with a softcap they are divided by it.
#[inline(always)]
unsafe fn modify_scores<V: Vector>(
    modifiers: &ScoreModifiers,
    sequence: &Sequence,
    row: &ScoreRow,
    tile: &ScoreTile,
) {
    let (computed, tile_start) = (&tile.computed, tile.tile_start);
    let attention = modifiers.attention;
    let scores = row.scores;
    // SAFETY: whole vectors of `computed`, which KEY_INDICES covers. Masks and trees are read only
    // inside `visible`, for which they were checked.
    unsafe {
        if let Some(cap) = modifiers.softcap {
            let mut i = computed.start;
            while i < computed.end {
                tanh(V::load(scores.add(i))).mul(V::splat(cap)).store(scores.add(i));
                i += V::LANES;
            }
        }
        if let Some(list) = tile.list {
            return modify_listed_scores::<V>(attention, sequence, row, computed, list);
        }
        if let Some(slopes) = attention.alibi_slopes.and_then(|slopes| slopes.as_slice::<f32>()) {
            let slope = V::splat(-slopes[row.head] * LOG4_E);
            let position = sequence.q_offset + row.token as i64;
            let first = sequence.keys().position(tile_start);
            let position = V::splat((position - first) as f32);
            // Exact: a stride is at most 2^15.
            let back = V::splat(-(sequence.key_stride as f32));
            let mut i = computed.start;
            while i < computed.end {
                let index = V::load(KEY_INDICES.as_ptr().add(i));
                let distance = index.mul_add(back, position).abs();
                distance.mul_add(slope, V::load(scores.add(i))).store(scores.add(i));
                i += V::LANES;
            }
        }
        let mask = attention.mask.as_ref().filter(|_| {
            // A full tile of a boolean mask changes nothing. A map has no others.
            let kind = modifiers
                .tiles
                .map(|tiles| tiles.kind(sequence.index, row.head, row.token, tile_start));
            kind != Some(TileKind::Full)
        });
        if let Some(mask) = mask {
            match mask.dtype() {
                DType::Bool => boolean_mask(mask, sequence, row, tile_start),
                DType::F32 => additive_mask::<V, f32>(mask, sequence, row, tile_start),
                DType::F16 => additive_mask::<V, f16>(mask, sequence, row, tile_start),
                DType::BF16 => additive_mask::<V, bf16>(mask, sequence, row, tile_start),
                _ => unreachable!("checked: masks are boolean or floating"),
            }
        }
        if let Some(tree) = &attention.tree_mask {
            tree_mask(tree, sequence, row, tile_start);
        }
    }
}

/// The mask elements of one row, from a key on.
pub struct MaskRow {
    pub data: *const u8,
    /// Whether all keys share one element; else elements are contiguous.
    pub broadcast: bool,
}

impl MaskRow {
    /// The elements of a token and query head from `key` on.
    pub fn new(mask: &Tensor, sequence: usize, token: usize, head: usize, key: usize) -> MaskRow {
        let (shape, strides) = (mask.shape(), mask.strides());
        let indices = [sequence, head, token, key];
        let mut offset = 0i64;
        for i in 0..4 {
            if shape[i] > 1 {
                offset += indices[i] as i64 * strides[i];
            }
        }
        let bytes = (offset * mask.dtype().size() as i64) as isize;
        MaskRow { data: mask.as_ptr().wrapping_offset(bytes), broadcast: shape[3] == 1 }
    }

    /// Mask elements that stand for `keys` keys.
    pub fn count(&self, keys: usize) -> usize {
        if self.broadcast { keys.min(1) } else { keys }
    }

    /// The element of the key that is `i` after the first.
    ///
    /// # Safety
    /// `E` is the mask's type, and the mask has an element for the key.
    #[inline(always)]
    unsafe fn at<E: Copy>(&self, i: usize) -> E {
        // SAFETY: same contract.
        unsafe { *self.data.cast::<E>().add(if self.broadcast { 0 } else { i }) }
    }
}

#[inline(always)]
unsafe fn boolean_mask(mask: &Tensor, sequence: &Sequence, row: &ScoreRow, tile_start: usize) {
    let elements =
        MaskRow::new(mask, sequence.index, row.token, row.head, tile_start + row.visible.start);
    // SAFETY: the first element belongs to the first visible key. The view was checked to have one
    // element per visible key, or one for all.
    unsafe {
        let scores = row.scores.add(row.visible.start);
        for i in 0..row.visible.len() {
            let keep = elements.at::<u8>(i) != 0;
            let score = *scores.add(i);
            *scores.add(i) = if keep { score } else { f32::NEG_INFINITY };
        }
    }
}

#[inline(always)]
unsafe fn additive_mask<V: Vector, E: Storage>(
    mask: &Tensor,
    sequence: &Sequence,
    row: &ScoreRow,
    tile_start: usize,
) {
    let elements =
        MaskRow::new(mask, sequence.index, row.token, row.head, tile_start + row.visible.start);
    let (from, count) = (elements.data.cast::<E>(), row.visible.len());
    // SAFETY: as `boolean_mask`.
    unsafe {
        let scores = row.scores.add(row.visible.start);
        let mut i = 0;
        if !elements.broadcast {
            while i + V::LANES <= count {
                let bias = E::load::<V>(from.add(i));
                add_bias(V::load(scores.add(i)), bias).store(scores.add(i));
                i += V::LANES;
            }
        }
        while i < count {
            let bias = elements.at::<E>(i).widen();
            *scores.add(i) = first_lane(add_bias(V::splat(*scores.add(i)), V::splat(bias)));
            i += 1;
        }
    }
}

/// Adds a mask's bias, in natural units, to a score. Scores are clamped to the range of natural f32
/// scores. Only -inf hides a key. The lowest finite numbers, which many engines use for "hidden",
/// do not hide it: a row with no other keys is not empty.
///
/// # Safety
/// As [`Vector`]'s methods.
#[inline(always)]
unsafe fn add_bias<V: Vector>(score: V, bias: V) -> V {
    // SAFETY: inlined into a function that enables V's features.
    unsafe {
        let sum = bias.mul_add(V::splat(LOG4_E), score);
        // `max` and `min` return their argument if either is NaN, so NaN propagates.
        let clamped = V::splat(LARGEST_SCORE).min(V::splat(-LARGEST_SCORE).max(sum));
        bias.select_below(V::splat(f32::MIN), V::splat(f32::NEG_INFINITY), clamped)
    }
}

/// A row of the tree mask. Keys are counted from one of the sequence's keys on.
struct TreeRow {
    words: *const i32,
    /// The first new token, as such a key.
    first_new: i64,
}

impl TreeRow {
    /// Keys are counted from `key` on.
    fn new(tree: &Tensor, sequence: &Sequence, row: &ScoreRow, key: usize) -> TreeRow {
        let strides = tree.strides();
        let offset = sequence.index as i64 * strides[0] + row.token as i64 * strides[1];
        let words = tree.as_ptr().cast::<i32>().wrapping_offset(offset as isize);
        // The new tokens are the sequence's last keys.
        let first_new = sequence.kv_len as i64 - sequence.q_len as i64 - key as i64;
        TreeRow { words, first_new }
    }

    /// Whether the key is a new token whose bit is 0.
    ///
    /// # Safety
    /// The tree was checked: its rows have ceil(q_len / 32) words. The key is one of the sequence,
    /// so new tokens are below q_len.
    #[inline(always)]
    unsafe fn hides(&self, key: i64) -> bool {
        let token = key - self.first_new;
        // SAFETY: same contract.
        token >= 0
            && unsafe { *self.words.add(token as usize / 32) } as u32 >> (token % 32) & 1 == 0
    }
}

/// Hides the new tokens whose bit in the row's tree mask is 0.
#[inline(always)]
unsafe fn tree_mask(tree: &Tensor, sequence: &Sequence, row: &ScoreRow, tile_start: usize) {
    let tree_row = TreeRow::new(tree, sequence, row, tile_start);
    // SAFETY: the tree was checked, and visible keys are below kv_len.
    unsafe {
        for i in row.visible.clone() {
            if tree_row.hides(i as i64) {
                *row.scores.add(i) = f32::NEG_INFINITY;
            }
        }
    }
}

/// Sets the scores of skipped entries to -inf.
///
/// # Safety
/// As [`softmax_step`].
#[inline(always)]
unsafe fn hide_skipped(list: &ListTile, row: &ScoreRow) {
    if list.skipped == 0 {
        return;
    }
    for i in row.visible.clone() {
        if list.keys[i] < 0 {
            // SAFETY: same contract.
            unsafe { *row.scores.add(i) = f32::NEG_INFINITY };
        }
    }
}

/// Applies ALiBi, mask and tree mask to the scores of listed keys, by their positions.
///
/// # Safety
/// As [`softmax_step`].
#[inline(always)]
unsafe fn modify_listed_scores<V: Vector>(
    attention: &Attention<Tensor>,
    sequence: &Sequence,
    row: &ScoreRow,
    computed: &Range<usize>,
    list: &ListTile,
) {
    let keys = &list.keys[..row.visible.end];
    let mut numbers = [0.0f32; MAX_TILE_KEYS];
    // SAFETY: whole vectors of `computed`, which is inside the tile. A kept key is below
    // `kv_len`, so the mask and the tree, which were checked, have an element for it.
    unsafe {
        if let Some(slopes) = attention.alibi_slopes.and_then(|slopes| slopes.as_slice::<f32>()) {
            let slope = V::splat(-slopes[row.head] * LOG4_E);
            let (first, stride) = (sequence.key_offset, sequence.key_stride as i64);
            let position = sequence.q_offset + row.token as i64 - first;
            for (distance, &key) in numbers.iter_mut().zip(keys) {
                *distance = (position - stride * i64::from(key)).unsigned_abs() as f32;
            }
            let mut i = computed.start;
            while i < computed.end {
                let to = row.scores.add(i);
                V::load(numbers.as_ptr().add(i)).mul_add(slope, V::load(to)).store(to);
                i += V::LANES;
            }
        }
        if let Some(mask) = &attention.mask {
            if mask.dtype() == DType::Bool {
                let elements = MaskRow::new(mask, sequence.index, row.token, row.head, 0);
                for (i, &key) in keys.iter().enumerate().filter(|(_, key)| **key >= 0) {
                    if elements.at::<u8>(key as usize) == 0 {
                        *row.scores.add(i) = f32::NEG_INFINITY;
                    }
                }
            } else {
                gather_biases(mask, sequence, row, keys, &mut numbers);
                let mut i = computed.start;
                while i < computed.end {
                    let to = row.scores.add(i);
                    add_bias(V::load(to), V::load(numbers.as_ptr().add(i))).store(to);
                    i += V::LANES;
                }
            }
        }
        if let Some(tree) = &attention.tree_mask {
            let tree_row = TreeRow::new(tree, sequence, row, 0);
            for (i, &key) in keys.iter().enumerate().filter(|(_, key)| **key >= 0) {
                if tree_row.hides(i64::from(key)) {
                    *row.scores.add(i) = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// The mask's numbers for each key; 0 for skipped ones.
///
/// # Safety
/// The mask has an element for each key that is not negative.
#[inline(always)]
unsafe fn gather_biases(
    mask: &Tensor,
    sequence: &Sequence,
    row: &ScoreRow,
    keys: &[i32],
    to: &mut [f32; MAX_TILE_KEYS],
) {
    let elements = MaskRow::new(mask, sequence.index, row.token, row.head, 0);
    for (to, &key) in to.iter_mut().zip(keys) {
        // SAFETY: same contract.
        *to = unsafe {
            match mask.dtype() {
                _ if key < 0 => 0.0,
                DType::F32 => elements.at::<f32>(key as usize),
                DType::F16 => elements.at::<f16>(key as usize).widen(),
                DType::BF16 => elements.at::<bf16>(key as usize).widen(),
                _ => unreachable!("checked: masks are boolean or floating"),
            }
        };
    }
    to[keys.len()..].fill(0.0);
}
