//! From raw scores to probabilities, one row of one tile at a time.

use super::kernel::Way;
use super::kernel::{Call, Item, Scratch};
use super::matrix;
use super::vector::{Storage, Vector, tanh};
use crate::problem::Sequence;
use crate::select::CPU_TILES;
use crate::state::{LARGEST_SCORE, LOG4_E, State};
use crate::tensor::{DType, Tensor};
use half::{bf16, f16};
use std::ops::Range;

/// Keys a tile at most.
const MAX_TILE_KEYS: usize = 128;

/// 0, 1, 2...: the keys of a tile, to measure distances from.
///
/// They are loaded without a check of bounds, by whole vectors: no tile may be longer, and none may end inside a vector.
static INDICES: [f32; MAX_TILE_KEYS] = {
    let mut indices = [0.0; MAX_TILE_KEYS];
    let mut i = 0;
    while i < MAX_TILE_KEYS {
        indices[i] = i as f32;
        i += 1;
    }
    indices
};

const _: () = {
    let mut line = 0;
    while line < CPU_TILES.len() {
        let keys = CPU_TILES[line].tile_keys;
        assert!(keys <= MAX_TILE_KEYS, "a tile of selection's table is longer than INDICES");
        assert!(
            keys.is_multiple_of(matrix::DEPTH),
            "a tile ends inside a vector, or inside a step of the matrix unit"
        );
        assert!(
            CPU_TILES[line].block_rows.is_multiple_of(matrix::ROWS),
            "a block ends inside a tile of rows"
        );
        line += 1;
    }
};

/// Some rows' scores against one tile. Key indices are relative to the tile.
pub(super) struct Scores<'a> {
    /// At most [`MOST_ROWS`].
    pub rows: &'a [Row],
    /// Which of each row's scores hold dot products: whole vectors.
    pub computed: Range<usize>,
    /// The tile's first key.
    pub tile: usize,
    /// Multiplies the dot products, where that is left to be done.
    pub scale: Option<f32>,
}

/// One of the rows.
#[derive(Clone)]
pub(super) struct Row {
    /// A float a key of the tile.
    pub scores: *mut f32,
    /// Which of them causality, window and length let the row see; inside `computed`, or empty.
    pub visible: Range<usize>,
    pub token: usize,
    pub head: usize,
}

/// Rows that are taken together.
pub(super) const MOST_ROWS: usize = 16;

/// Turns the scores into unnormalised probabilities under each row's running maximum, adds them to the rows' states, and writes the factors by
/// which the rows' earlier outputs shrink. With `PAIRED`, probabilities are left as bf16.
///
/// Rows are independent, but each is a chain of dependent steps: first all maxima, then all factors, then all probabilities, without branches on
/// the numbers, so that the CPU has several rows in flight.
///
/// # Safety
/// As [`Vector`]'s methods; `computed` lies inside the scores; states and factors are as many as rows.
#[inline(always)]
pub(super) unsafe fn rows<V: Vector, const PAIRED: bool>(
    call: &Call,
    sequence: &Sequence,
    scores: &Scores,
    states: &mut [State],
    factors: &mut [f32],
) {
    let Scores { rows, ref computed, tile, scale } = *scores;
    let bare = call.problem.variant.has_bare_scores();
    let (mut maxima, mut before, mut shrink) =
        ([f32::NEG_INFINITY; MOST_ROWS], [f32::NEG_INFINITY; MOST_ROWS], [1.0f32; MOST_ROWS]);
    // SAFETY: all indices lie in `computed`, which is whole vectors of the rows' scores; there are at most MOST_ROWS rows, which is a multiple
    // of LANES, so whole vectors of maxima lie inside their arrays.
    unsafe {
        let mut vectors = [V::splat(f32::NEG_INFINITY); MOST_ROWS];
        for (row, max) in rows.iter().zip(&mut vectors) {
            if let Some(scale) = scale {
                let mut key = computed.start;
                while key < computed.end {
                    let score = row.scores.add(key);
                    V::load(score).mul(V::splat(scale)).store(score);
                    key += V::LANES;
                }
            }
            if !bare && !row.visible.is_empty() {
                adjust::<V>(call, sequence, row, computed, tile);
            }
            hide::<V>(row, computed);
            let mut key = computed.start;
            while key < computed.end {
                *max = V::load(row.scores.add(key)).max(*max);
                key += V::LANES;
            }
        }
        for (i, max) in vectors.iter().enumerate().take(rows.len()) {
            maxima[i] = max.reduce_max();
            before[i] = states[i].max;
        }
        let mut i = 0;
        while i < rows.len() {
            let (tile_max, before) = (V::load(maxima.as_ptr().add(i)), V::load(before.as_ptr().add(i)));
            // A NaN maximum is taken over, so that it shows.
            let max = tile_max.select_below(before, before, tile_max);
            // A row that has seen nothing yet has nothing to shrink. (Where the maximum stays, 4^0 is exactly 1.)
            let (finite, one) = (V::splat(f32::MIN), V::splat(1.0));
            max.select_below(finite, one, exp4(before.sub(max))).store(shrink.as_mut_ptr().add(i));
            max.store(maxima.as_mut_ptr().add(i));
            i += V::LANES;
        }
        for (i, row) in rows.iter().enumerate() {
            // Of a row that has seen nothing all scores are -inf: less anything finite they stay so, and their powers are 0.
            let subtract = if maxima[i] == f32::NEG_INFINITY { 0.0 } else { maxima[i] };
            let subtract = V::splat(subtract);
            let mut sum = V::splat(0.0);
            let mut key = computed.start;
            while key < computed.end {
                let p = exp4(V::load(row.scores.add(key)).sub(subtract));
                store::<V, PAIRED>(p, row.scores, key);
                sum = sum.add(p);
                key += V::LANES;
            }
            vectors[i] = sum;
        }
        for (i, sum) in vectors.iter().enumerate().take(rows.len()) {
            states[i] = State { max: maxima[i], sum: states[i].sum * shrink[i] + sum.reduce_add() };
            factors[i] = shrink[i];
        }
    }
}

/// Takes rows of an item through the softmax of a tile: that starts at key `first`, of which `valid` is the item's and `computed` holds scores.
/// `scores` says where a row's are.
///
/// # Safety
/// As [`rows`], for rows of the item, whose ranges and states are in the scratch; a factor a row.
#[inline(always)]
pub(super) unsafe fn item_rows(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    taken: Range<usize>,
    (first, valid, computed): (usize, &Range<usize>, Range<usize>),
    (scores, factors): (impl Fn(usize) -> *mut f32, &mut [f32]),
) {
    let mut places = item.places(taken.start, call.problem.group());
    let mut start = taken.start;
    for factors in factors[..taken.len()].chunks_mut(MOST_ROWS) {
        // SAFETY: rows of the item.
        unsafe {
            let ranges = std::slice::from_raw_parts(scratch.ranges.add(start), factors.len());
            let states = std::slice::from_raw_parts_mut(scratch.states.add(start), factors.len());
            let mut rows =
                [const { Row { scores: std::ptr::null_mut(), visible: 0..0, token: 0, head: 0 } }; MOST_ROWS];
            for ((i, range), row) in ranges.iter().enumerate().zip(&mut rows) {
                let (token, head) = places.next();
                *row = Row { scores: scores(start + i), visible: range.within(first, valid), token, head };
            }
            let scale = (item.way == Way::Matrix).then_some(call.score_factor);
            let rows = &rows[..factors.len()];
            let tile = Scores { rows, computed: computed.clone(), tile: first, scale };
            (call.compiled.softmax)(call, &item.sequence, &tile, states, factors);
        }
        start += factors.len();
    }
}

/// Hides the computed scores that the row cannot see.
#[inline(always)]
unsafe fn hide<V: Vector>(row: &Row, computed: &Range<usize>) {
    let visible = if row.visible.is_empty() { computed.end..computed.end } else { row.visible.clone() };
    let hidden = V::LANES - 1;
    // SAFETY: whole vectors of `computed`, which lies inside the tile; INDICES is as long as the longest.
    unsafe {
        let none = V::splat(f32::NEG_INFINITY);
        let (start, end) = (V::splat(visible.start as f32), V::splat(visible.end as f32));
        // The vectors up to the first whole one, and those from the last.
        let before = computed.start..computed.end.min((visible.start + hidden) & !hidden);
        let after = before.end.max(visible.end & !hidden)..computed.end;
        for keys in [before, after] {
            let mut key = keys.start;
            while key < keys.end {
                let (index, to) = (V::load(INDICES.as_ptr().add(key)), row.scores.add(key));
                let seen = index.select_below(end, V::load(to), none);
                index.select_below(start, none, seen).store(to);
                key += V::LANES;
            }
        }
    }
}

/// Stores probabilities where their scores were: as floats, or as bf16 in the first half of the row, for the second product.
#[inline(always)]
unsafe fn store<V: Vector, const PAIRED: bool>(probabilities: V, scores: *mut f32, i: usize) {
    // SAFETY: i is in the row; bf16 take half the place, behind what is still to be read.
    unsafe {
        match PAIRED {
            true => probabilities.store_paired(scores.cast::<bf16>().add(i)),
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

/// Softcap, ALiBi, mask and tree, in the contract's order. Scores are in base 4 (over the softcap, where there is one).
#[inline(always)]
unsafe fn adjust<V: Vector>(
    call: &Call,
    sequence: &Sequence,
    row: &Row,
    computed: &Range<usize>,
    tile: usize,
) {
    let attention = &call.inputs.attention;
    let scores = row.scores;
    // SAFETY: whole vectors of `computed`, for which there are INDICES; masks and trees are looked at inside `visible` alone, for which they
    // were checked.
    unsafe {
        if let Some(cap) = call.softcap {
            let mut i = computed.start;
            while i < computed.end {
                tanh(V::load(scores.add(i))).mul(V::splat(cap)).store(scores.add(i));
                i += V::LANES;
            }
        }
        if let Some(slopes) = attention.alibi_slopes.and_then(|slopes| slopes.as_slice::<f32>()) {
            let slope = V::splat(-slopes[row.head] * LOG4_E);
            let position = sequence.q_offset + row.token as i64;
            let position = V::splat((position - tile as i64) as f32);
            let mut i = computed.start;
            while i < computed.end {
                let distance = position.sub(V::load(INDICES.as_ptr().add(i))).abs();
                distance.mul_add(slope, V::load(scores.add(i))).store(scores.add(i));
                i += V::LANES;
            }
        }
        if let Some(mask) = &attention.mask {
            match mask.dtype() {
                DType::Bool => boolean_mask(mask, sequence, row, tile),
                DType::F32 => additive_mask::<V, f32>(mask, sequence, row, tile),
                DType::F16 => additive_mask::<V, f16>(mask, sequence, row, tile),
                DType::BF16 => additive_mask::<V, bf16>(mask, sequence, row, tile),
                DType::I32 => unreachable!("checked: masks are boolean or floating"),
            }
        }
        if let Some(tree) = &attention.tree_mask {
            tree_mask(tree, sequence, row, tile);
        }
    }
}

/// The mask's element for the first visible key, and whether one element serves all keys.
fn mask_row(mask: &Tensor, sequence: &Sequence, row: &Row, tile: usize) -> (*const u8, bool) {
    let (shape, strides) = (mask.shape(), mask.strides());
    let indices = [sequence.index, row.head, row.token, tile + row.visible.start];
    let mut offset = 0i64;
    for i in 0..4 {
        if shape[i] > 1 {
            offset += indices[i] as i64 * strides[i];
        }
    }
    (mask.as_ptr().wrapping_offset((offset * mask.dtype().size() as i64) as isize), shape[3] == 1)
}

#[inline(always)]
unsafe fn boolean_mask(mask: &Tensor, sequence: &Sequence, row: &Row, tile: usize) {
    let (from, broadcast) = mask_row(mask, sequence, row, tile);
    // SAFETY: `from` is the element of the first visible key, of a view that was checked to have one for each visible key, or one for all;
    // the scores are the row's.
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
unsafe fn additive_mask<V: Vector, E: Storage>(mask: &Tensor, sequence: &Sequence, row: &Row, tile: usize) {
    let (from, broadcast) = mask_row(mask, sequence, row, tile);
    let (from, count) = (from.cast::<E>(), row.visible.len());
    // SAFETY: as `boolean_mask`.
    unsafe {
        let scores = row.scores.add(row.visible.start);
        let mut i = 0;
        if !broadcast {
            while i + V::LANES <= count {
                let bias = E::load::<V>(from.add(i));
                biased(V::load(scores.add(i)), bias).store(scores.add(i));
                i += V::LANES;
            }
        }
        while i < count {
            let bias = (*from.add(if broadcast { 0 } else { i })).widen();
            *scores.add(i) = first_lane(biased(V::splat(*scores.add(i)), V::splat(bias)));
            i += 1;
        }
    }
}

/// A score with a mask's bias, which is in natural units. Scores end where natural ones end in f32: minus infinity alone hides, the lowest finite
/// numbers, which stand for "hidden" in many engines' masks, do not, and a row of nothing else is not empty.
#[inline(always)]
unsafe fn biased<V: Vector>(score: V, bias: V) -> V {
    // SAFETY: the caller runs below an entry with V's features.
    unsafe {
        let sum = bias.mul_add(V::splat(LOG4_E), score);
        // `max` and `min` give their argument where either is NaN: NaN goes on.
        let ended = V::splat(LARGEST_SCORE).min(V::splat(-LARGEST_SCORE).max(sum));
        bias.select_below(V::splat(f32::MIN), V::splat(f32::NEG_INFINITY), ended)
    }
}

/// 4^x for x <= 63.5. Doubling is exact; what overflows in it is minus infinity, whose power is 0.
#[inline(always)]
unsafe fn exp4<V: Vector>(x: V) -> V {
    // SAFETY: as `biased`.
    unsafe { x.add(x).exp2() }
}

/// Hides the new tokens that the row's bits leave out. New token t is key `kv_len - q_len + t`.
#[inline(always)]
unsafe fn tree_mask(tree: &Tensor, sequence: &Sequence, row: &Row, tile: usize) {
    let strides = tree.strides();
    let offset = sequence.index as i64 * strides[0] + row.token as i64 * strides[1];
    let words = tree.as_ptr().cast::<i32>().wrapping_offset(offset as isize);
    let first_new = sequence.kv_len as i64 - sequence.q_len as i64 - tile as i64;
    // SAFETY: keys are below kv_len, so t is below q_len, and each row of the tree has ceil(q_len / 32) words (checked).
    unsafe {
        for i in row.visible.clone() {
            let t = i as i64 - first_new;
            if t >= 0 && *words.add(t as usize / 32) as u32 >> (t % 32) & 1 == 0 {
                *row.scores.add(i) = f32::NEG_INFINITY;
            }
        }
    }
}
