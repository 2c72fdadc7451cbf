//! Tiles that a mask hides: their keys and values are neither packed nor multiplied.

use super::call::ItemContext;
use super::item::TileSpan;
use super::softmax::MaskRow;
use crate::dtype::DType;
use std::ops::{BitOr, BitXor, Range};

/// Elements that are looked at together.
const CHUNK: usize = 64;

/// Whether the mask hides every key of the tile that any of these rows can see. It stops at the
/// first key that it does not hide.
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
        // SAFETY: `load_queries` wrote the ranges. The mask was checked to have an element for each
        // visible key, or one for all.
        unsafe {
            let visible = (*scratch.ranges.add(row)).within(span.tile_start, &span.valid);
            if visible.is_empty() {
                return true;
            }
            let first = span.tile_start + visible.start;
            let elements = MaskRow::new(mask, &item.sequence, token, head, first);
            let count = if elements.broadcast { 1 } else { visible.len() };
            match mask.dtype() {
                DType::Bool => all_equal(elements.data, count, 0),
                DType::F32 => all_equal(elements.data.cast(), count, f32::NEG_INFINITY.to_bits()),
                DType::F16 => {
                    all_equal(elements.data.cast(), count, half::f16::NEG_INFINITY.to_bits())
                }
                DType::BF16 => {
                    all_equal(elements.data.cast(), count, half::bf16::NEG_INFINITY.to_bits())
                }
                _ => unreachable!("checked: masks are boolean or floating"),
            }
        }
    })
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
