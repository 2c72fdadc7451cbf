//! Packs a tile of keys or values in the order in which the product reads it, as f32 or as pairs of
//! bf16, once for all query rows of a block.

use super::operand::RowReader;
use super::scratch::Sizes;
use crate::cpu::product::register_tile::terms_per_step;
use crate::cpu::vector::{Storage, Vector};
use crate::problem::MAX_HEAD_DIM;
use half::bf16;
use std::ops::Range;

/// Converts `count` elements to f32, and pads with zeros up to `padded`.
///
/// # Safety
/// As [`Vector`]'s methods; `from` holds `count` elements and `to` holds `padded >= count` floats.
#[inline(always)]
pub unsafe fn widen_row<V: Vector, E: Storage>(
    from: *const E,
    to: *mut f32,
    count: usize,
    padded: usize,
) {
    // SAFETY: `i` stays below `count` on reads and below `padded` on writes.
    unsafe {
        let mut i = 0;
        while i + V::LANES <= count {
            E::load::<V>(from.add(i)).store(to.add(i));
            i += V::LANES;
        }
        while i < count {
            // Pairs of bf16 that are read as floats may only be aligned for bf16.
            *to.add(i) = from.add(i).read_unaligned().widen();
            i += 1;
        }
        while i < padded {
            *to.add(i) = 0.0;
            i += 1;
        }
    }
}

/// Packs keys, read by `reader`, as panels of up to TILE_VECTORS vectors of keys: `[panel][dim][key
/// in panel]`. `addresses[i]` is key `valid.start + i` of the tile; lanes outside `valid` are zero.
/// A key has `depth` elements of E. For pairs of bf16, E is f32 and `depth` is half the head dim.
///
/// # Safety
/// As [`Vector`]'s methods; every address holds `depth` elements, `to` and `key_copy` are as large
/// as in the scratch.
#[inline(always)]
pub unsafe fn keys<V: Vector, E: Storage>(
    depth: usize,
    reader: &RowReader,
    addresses: &[*const u8],
    valid: Range<usize>,
    to: *mut f32,
    key_copy: *mut f32,
) {
    let panel = V::LANES * V::TILE_VECTORS;
    let mut group = valid.start / V::LANES * V::LANES;
    // SAFETY: groups of LANES keys are inside panels, and panels inside the packed tile.
    unsafe {
        while group < valid.end {
            let start = group / panel * panel;
            let width = panel_width::<V>(start, valid.end);
            let base = to.add(start * padded_depth(depth) + (group - start));
            let mut dim = 0;
            let full = valid.contains(&group) && group + V::LANES <= valid.end;
            let first = group.max(valid.start);
            let keys = first - valid.start..valid.end.min(group + V::LANES) - valid.start;
            let mut key_rows = [std::ptr::null(); 16];
            let key_rows = reader.read(&addresses[keys], 0, &mut key_rows).addresses;
            while dim < depth {
                let dims = (depth - dim).min(V::LANES);
                let to = base.add(dim * width);
                if full && dims == V::LANES {
                    let mut rows = [std::ptr::null::<E>(); 16];
                    for (row, key) in rows.iter_mut().zip(key_rows) {
                        *row = key.cast::<E>().add(dim);
                    }
                    V::transpose(&rows, to, width);
                } else {
                    // Edges are copied first, so that nothing is read past a key or past the valid
                    // keys.
                    let mut rows = [std::ptr::null::<f32>(); 16];
                    for (lane, row) in rows.iter_mut().enumerate().take(V::LANES) {
                        let copy = key_copy.add(lane * V::LANES);
                        V::splat(0.0).store(copy);
                        if valid.contains(&(group + lane)) {
                            let key = key_rows[group + lane - first].cast::<E>();
                            widen_row::<V, E>(key.add(dim), copy, dims, V::LANES);
                        }
                        *row = copy;
                    }
                    V::transpose(&rows, to, width);
                }
                dim += V::LANES;
            }
            group += V::LANES;
        }
    }
}

/// Packs values, read by `reader`, as panels of up to TILE_VECTORS vectors of dims:
/// `[panel][key][dim in panel]`, dims padded with zeros. `addresses[i]` is key `first + i` of the
/// tile.
///
/// # Safety
/// As [`keys`], with `sizes.value_dim` elements per address.
#[inline(always)]
pub unsafe fn values<V: Vector, E: Storage>(
    sizes: &Sizes,
    reader: &RowReader,
    addresses: &[*const u8],
    first: usize,
    to: *mut f32,
) {
    let panel = V::LANES * V::TILE_VECTORS;
    // SAFETY: as for keys.
    unsafe {
        for (i, &address) in addresses.iter().enumerate() {
            let key = first + i;
            let value = reader.read_row(address, 0).cast::<E>();
            let mut start = 0;
            while start < sizes.value_dim {
                let width = panel_width::<V>(start, sizes.value_dim);
                let row = to.add(start * sizes.tile_keys + key * width);
                let dims = (sizes.value_dim - start).min(panel);
                widen_row::<V, E>(value.add(start), row, dims, width);
                start += panel;
            }
        }
    }
}

/// Like [`values`], in pairs of keys: `[panel][pair of keys][dim in panel]`, each 32-bit element
/// holding the bf16 of both keys. The missing key of a pair is zero.
///
/// # Safety
/// As [`values`].
#[inline(always)]
pub unsafe fn paired_values<V: Vector>(
    sizes: &Sizes,
    reader: &RowReader,
    addresses: &[*const u8],
    valid: Range<usize>,
    to: *mut f32,
) {
    static ZEROS: [bf16; MAX_HEAD_DIM] = [bf16::ZERO; MAX_HEAD_DIM];
    let panel = V::LANES * V::TILE_VECTORS;
    let key = |key: usize| match valid.contains(&key) {
        // SAFETY: an address of a row; two rows are used together.
        true => unsafe { reader.read_row(addresses[key - valid.start], key % 2).cast::<bf16>() },
        false => ZEROS.as_ptr(),
    };
    // SAFETY: as for keys; ZEROS is as long as any value.
    unsafe {
        for pair in valid.start / 2..valid.end.div_ceil(2) {
            let (low, high) = (key(2 * pair), key(2 * pair + 1));
            let mut start = 0;
            while start < sizes.value_dim {
                let width = panel_width::<V>(start, sizes.value_dim);
                let row = to.add(start * (sizes.tile_keys / 2) + pair * width);
                let end = sizes.value_dim.min(start + panel);
                let mut dim = start;
                while dim + 2 * V::LANES <= end {
                    let mut pairs = [V::splat(0.0); 2];
                    V::interleave_all(low.add(dim), high.add(dim), &mut pairs);
                    pairs[0].store(row.add(dim - start));
                    pairs[1].store(row.add(dim - start + V::LANES));
                    dim += 2 * V::LANES;
                }
                while dim + V::LANES <= end {
                    V::interleave(low.add(dim), high.add(dim)).store(row.add(dim - start));
                    dim += V::LANES;
                }
                while dim < end {
                    let bits = |key: *const bf16| u32::from((*key.add(dim)).to_bits());
                    *row.add(dim - start) = f32::from_bits(bits(low) | bits(high) << 16);
                    dim += 1;
                }
                for dim in end..start + width {
                    *row.add(dim - start) = 0.0;
                }
                start += panel;
            }
        }
    }
}

/// Rows of a panel of keys: whole transposed blocks.
#[inline(always)]
pub fn padded_depth(depth: usize) -> usize {
    depth.next_multiple_of(16)
}

/// Floats per row of the panel that starts at column `start` of `end`: whole vectors, at most
/// TILE_VECTORS.
#[inline(always)]
pub fn panel_width<V: Vector>(start: usize, end: usize) -> usize {
    (end - start).next_multiple_of(V::LANES).min(V::LANES * V::TILE_VECTORS)
}

/// Steps of the product that computes scores.
#[inline(always)]
pub fn score_depth<const PAIRED: bool>(sizes: &Sizes) -> usize {
    sizes.head_dim / terms_per_step::<PAIRED>()
}
