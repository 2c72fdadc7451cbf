//! Rows of keys and values that products read in place: as they are stored, and converted in
//! registers.

use crate::cpu::vector::{PairFormat, Vector};
use crate::dtype::DType;
use crate::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3};
use half::{bf16, f16};
use std::mem::offset_of;

/// The storage of a row.
pub trait RowFormat: Sized {
    /// Values of a block, which begins with their scale; 0 if there are no blocks. `Self` is a
    /// block, or else a value.
    const BLOCK: usize = 0;
    /// The format of its pairs, if products multiply pairs of bf16.
    const PAIRS: PairFormat = PairFormat::Bf16;

    /// Bytes in front of value `first`, or in front of its block.
    #[inline(always)]
    fn offset(first: usize) -> usize {
        first.checked_div(Self::BLOCK).unwrap_or(first) * size_of::<Self>()
    }

    /// The scale of the block that starts at value `first`.
    ///
    /// # Safety
    /// As [`Vector`]'s methods, for a row that has such a block.
    #[inline(always)]
    unsafe fn block_scale<V: Vector>(_row: *const u8, _first: usize) -> V {
        // SAFETY: same contract.
        unsafe { V::splat(1.0) }
    }

    /// The values from `first` on, a multiple of `LANES`, times the scale of their block.
    ///
    /// # Safety
    /// As [`Vector`]'s methods, for `LANES` values of the row.
    unsafe fn load<V: Vector>(row: *const u8, first: usize, scale: V) -> V;
}

macro_rules! floats {
    ($type:ty, $load:ident) => {
        impl RowFormat for $type {
            #[inline(always)]
            unsafe fn load<V: Vector>(row: *const u8, first: usize, _scale: V) -> V {
                // SAFETY: same contract.
                unsafe { V::$load(row.cast::<$type>().add(first)) }
            }
        }
    };
}
floats!(f32, load);
floats!(f16, load_f16);
floats!(bf16, load_bf16);

macro_rules! codes {
    ($type:ty, $load:ident, $pairs:ident) => {
        impl RowFormat for $type {
            const PAIRS: PairFormat = PairFormat::$pairs;

            #[inline(always)]
            unsafe fn load<V: Vector>(row: *const u8, first: usize, _scale: V) -> V {
                // SAFETY: same contract.
                unsafe { V::$load(row.cast::<$type>().add(first)) }
            }
        }
    };
}
codes!(i8, load_i8, I8);
codes!(E4m3, load_e4m3, E4m3);

impl RowFormat for BlockQ8_0 {
    const BLOCK: usize = BLOCK_VALUES;
    const PAIRS: PairFormat = PairFormat::Q8_0;

    #[inline(always)]
    unsafe fn block_scale<V: Vector>(row: *const u8, first: usize) -> V {
        let scale = row.wrapping_add(Self::offset(first)).wrapping_add(offset_of!(Self, scale));
        // SAFETY: same contract.
        unsafe { V::splat_f16(scale.cast()) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(row: *const u8, first: usize, scale: V) -> V {
        let within = offset_of!(Self, codes) + first % BLOCK_VALUES;
        let codes = row.wrapping_add(Self::offset(first)).wrapping_add(within);
        // SAFETY: same contract.
        unsafe { scale.mul(V::load_i8(codes.cast())) }
    }
}

impl RowFormat for BlockQ4_0 {
    const BLOCK: usize = BLOCK_VALUES;
    const PAIRS: PairFormat = PairFormat::Q4_0;

    #[inline(always)]
    unsafe fn block_scale<V: Vector>(row: *const u8, first: usize) -> V {
        let scale = row.wrapping_add(Self::offset(first)).wrapping_add(offset_of!(Self, scale));
        // SAFETY: same contract.
        unsafe { V::splat_f16(scale.cast()) }
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(row: *const u8, first: usize, scale: V) -> V {
        const HALF: usize = BLOCK_VALUES / 2;
        let within = offset_of!(Self, nibbles) + first % HALF;
        let nibbles = row.wrapping_add(Self::offset(first)).wrapping_add(within);
        // SAFETY: same contract. A half of a block holds whole vectors.
        let [low, high] = unsafe { V::load_nibbles(nibbles, scale) };
        if first % BLOCK_VALUES < HALF { low } else { high }
    }
}

/// The addresses of 16 rows: at most 16, of which the last one is repeated. `filled` is for fewer.
#[inline(always)]
pub fn sixteen<'a>(
    addresses: &'a [*const u8],
    filled: &'a mut [*const u8; 16],
) -> &'a [*const u8; 16] {
    if let Ok(all) = addresses.try_into() {
        return all;
    }
    for (i, address) in filled.iter_mut().enumerate() {
        *address = addresses[i.min(addresses.len() - 1)];
    }
    filled
}

/// Index of a storage type in the tables of products: behind the floats, which have that of
/// [`Storage`](crate::cpu::vector::Storage). `None` if products do not read it in place. `paired`:
/// products of bf16 pairs.
pub fn index(dtype: DType, paired: bool) -> Option<usize> {
    match dtype {
        DType::I8 => Some(3),
        DType::Q8_0 => Some(4),
        DType::Q4_0 => Some(5),
        // f32 would gain 5% and take a second more to build.
        DType::E4M3 if paired => Some(6),
        _ => None,
    }
}
