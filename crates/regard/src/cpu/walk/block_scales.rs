//! The scales of keys in blocks (`q8_0`, `q4_0`) in code that multiplies pairs of bf16.
//!
//! Codes are exact in bf16, and codes times scales are not: rounded keys break the tolerance of
//! log-sum-exps. So packed tiles hold codes, and the sums of products over a block of dims are
//! multiplied by its scales, in f32. Values are rounded to bf16, as probabilities are.

use super::call::ItemContext;
use crate::cpu::product::register_tile::BlockScales;
use crate::cpu::vector::Vector;
use half::f16;
use std::ops::Range;

/// Loads the scales of the tile's valid keys. `addresses[i]` is key `valid.start + i` of the tile.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for a tile of the item. Each address is the address
/// of a visible key.
#[inline(always)]
pub unsafe fn load<V: Vector>(ctx: ItemContext, addresses: &[*const u8], valid: &Range<usize>) {
    let ItemContext { call, scratch, .. } = ctx;
    let sizes = ctx.sizes();
    let block_bytes = call.problem.key_dtype.size();
    for block in 0..sizes.key_blocks {
        let to = scratch.block_scales.wrapping_add(block * sizes.tile_keys);
        for first in (valid.start / V::LANES * V::LANES..valid.end).step_by(V::LANES) {
            let mut scales = [f16::ONE; 16];
            for key in first.max(valid.start)..valid.end.min(first + V::LANES) {
                let scale = addresses[key - valid.start].wrapping_add(block * block_bytes);
                // SAFETY: a block begins with its scale.
                scales[key - first] = unsafe { scale.cast::<f16>().read_unaligned() };
            }
            // SAFETY: no vector has more than 16 lanes, and tiles are whole vectors.
            unsafe { V::load_f16(scales.as_ptr()).store(to.add(first)) };
        }
    }
}

/// The scales of the packed keys from `first` on; `None` if the tile has no codes of blocks.
#[inline(always)]
pub fn of_keys(ctx: ItemContext, first: usize) -> Option<BlockScales> {
    let sizes = ctx.sizes();
    (sizes.key_blocks > 0).then(|| BlockScales {
        scales: ctx.scratch.block_scales.wrapping_add(first),
        stride: sizes.tile_keys,
    })
}
