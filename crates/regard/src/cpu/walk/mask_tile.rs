//! Tiles that a mask hides are neither packed nor multiplied. Tiles of which a boolean mask hides
//! nothing are computed without reading the mask.

use super::call::ItemContext;
use super::item::TileSpan;
use super::softmax::MaskRow;
use super::tile_kinds::TileKind;
use crate::dtype::DType;
use crate::tensor::Tensor;
use std::ops::{BitOr, BitXor, Range};

/// Elements that are looked at together.
const CHUNK: usize = 64;

/// Whether the mask hides every key of the tile that any of these rows can see. With a tile map,
/// true for whole tiles only. Otherwise the mask is read, up to the first key that it does not
/// hide.
///
/// # Safety
/// The rows' queries are loaded.
pub unsafe fn hides_tile(ctx: ItemContext, rows: &Range<usize>, span: &TileSpan) -> bool {
    let ItemContext { call, item, scratch } = ctx;
    let Some(mask) = call.inputs.attention.mask.as_ref() else { return false };
    if call.problem.key_lists.is_some() {
        return false;
    }
    let mut row_iter = item.rows_from(rows.start, call.problem.group());
    rows.clone().all(|row| {
        let (token, head) = row_iter.next();
        // SAFETY: `load_queries` wrote the ranges.
        let visible = unsafe { &*scratch.ranges.add(row) }.within(span.tile_start, &span.valid);
        if visible.is_empty() {
            return true;
        }
        if let Some(tiles) = &call.modifiers.tiles {
            let kind = tiles.kind(item.sequence.index, head, token, span.tile_start);
            return kind == TileKind::Hidden;
        }
        let first = span.tile_start + visible.start;
        let elements = MaskRow::new(mask, item.sequence.index, token, head, first);
        // SAFETY: the mask was checked to have an element for each visible key, or one for all.
        unsafe { hides_keys(mask, &elements, visible.len()) }
    })
}

/// The effect of a mask on some tokens of a query head, and some keys.
///
/// # Safety
/// The mask has an element for each of these tokens and keys, or one for all.
pub unsafe fn tile_kind(
    mask: &Tensor,
    [sequence, head]: [usize; 2],
    mut tokens: Range<usize>,
    keys: &Range<usize>,
) -> TileKind {
    let row = |token| MaskRow::new(mask, sequence, token, head, keys.start);
    // SAFETY: same contract.
    if tokens.clone().all(|token| unsafe { hides_keys(mask, &row(token), keys.len()) }) {
        return TileKind::Hidden;
    }
    // Adding 0 is not nothing: sums are clamped.
    let full = mask.dtype() == DType::Bool
        && tokens.all(|token| {
            let row = row(token);
            // SAFETY: same contract.
            unsafe { all_kept(row.data, row.count(keys.len())) }
        });
    if full { TileKind::Full } else { TileKind::Mixed }
}

/// Whether a row of the mask hides all of the keys that start at its first element.
///
/// # Safety
/// The mask has an element for each, or one for all.
unsafe fn hides_keys(mask: &Tensor, row: &MaskRow, keys: usize) -> bool {
    let (data, count) = (row.data, row.count(keys));
    // SAFETY: same contract.
    unsafe {
        match mask.dtype() {
            DType::Bool => all_equal(data, count, 0),
            DType::F32 => all_equal(data.cast(), count, f32::NEG_INFINITY.to_bits()),
            DType::F16 => all_equal(data.cast(), count, half::f16::NEG_INFINITY.to_bits()),
            DType::BF16 => all_equal(data.cast(), count, half::bf16::NEG_INFINITY.to_bits()),
            _ => unreachable!("checked: masks are boolean or floating"),
        }
    }
}

/// Whether `count` elements are all equal to `hidden`, bit by bit.
///
/// # Safety
/// There are as many, of any alignment.
unsafe fn all_equal<T>(from: *const T, count: usize, hidden: T) -> bool
where
    T: Copy + Default + PartialEq + BitXor<Output = T> + BitOr<Output = T>,
{
    (0..count).step_by(CHUNK).all(|start| {
        // Without an early end inside a chunk, so that it becomes vector operations.
        let differing = (start..count.min(start + CHUNK)).fold(T::default(), |differing, i| {
            // SAFETY: same contract.
            differing | (unsafe { from.add(i).read_unaligned() } ^ hidden)
        });
        differing == T::default()
    })
}

/// Whether none of `count` elements of a boolean mask is false.
///
/// # Safety
/// There are as many.
unsafe fn all_kept(from: *const u8, count: usize) -> bool {
    (0..count).step_by(CHUNK).all(|start| {
        // SAFETY: same contract.
        let hides = |i| unsafe { *from.add(i) } == 0;
        !(start..count.min(start + CHUNK)).fold(false, |any, i| any | hides(i))
    })
}
