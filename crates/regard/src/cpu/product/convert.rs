//! Converts keys and values of caches that products do not read as they are stored: 8- and 4-bit
//! formats, and floats of another type than the queries.
//!
//! Codes of 8 bits keep their scale outside: it joins the score or the probability. Values of
//! blocks are multiplied by the block's scale, which is exact in f32, or stay codes.

use crate::cpu::vector::{Storage, Vector};
use crate::dtype::DType;
use crate::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656};
use half::bf16;
use std::mem::offset_of;

/// Converts a row. Arguments: the row as it is stored; the destination of `values` numbers;
/// `values`.
pub type ConvertFn = unsafe fn(*const u8, *mut u8, usize);

/// Index of a storage type in the table of converters.
pub fn index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::E4M3 => 3,
        DType::E5M2 => 4,
        DType::I8 => 5,
        DType::Q8_0 => 6,
        DType::Q4_0 => 7,
        DType::Mla656 | DType::Mla656Latent => 8,
        _ => unreachable!("checked: keys and values have one of these types"),
    }
}

/// Likewise, of the conversion of blocks to their codes, without scales.
pub fn index_of_codes(dtype: DType) -> usize {
    match dtype {
        DType::Q8_0 => 9,
        DType::Q4_0 => 10,
        _ => unreachable!("keys in blocks"),
    }
}

/// The codes of a block, as a format of their own.
#[repr(transparent)]
pub struct Codes<Block>(Block);

/// Stores a vector of the row's values from value `i` on. Loops over rows are written out: closures
/// are compiled without the level's instructions.
///
/// # Safety
/// As [`Vector`]'s methods.
#[inline(always)]
unsafe fn store<V: Vector, const PAIRED: bool>(vector: V, to: *mut u8, i: usize) {
    // SAFETY: same contract.
    unsafe {
        match PAIRED {
            true => vector.store_paired(to.cast::<bf16>().add(i)),
            false => vector.store(to.cast::<f32>().add(i)),
        }
    }
}

/// The storage format of a row of keys or values.
pub trait Format {
    /// Values per element.
    const VALUES: usize = 1;

    /// Converts `count` values, a multiple of LANES and of VALUES.
    ///
    /// # Safety
    /// As [`Vector`]'s methods, for `count` values.
    unsafe fn convert_vectors<V: Vector, const PAIRED: bool>(
        from: *const Self,
        to: *mut u8,
        count: usize,
    );

    /// Converts the first of `count` values, in larger groups than a vector. Returns the number of
    /// converted values.
    ///
    /// # Safety
    /// As [`Format::convert_vectors`].
    #[inline(always)]
    unsafe fn load_groups<V: Vector, const PAIRED: bool>(
        _from: *const Self,
        _to: *mut u8,
        _count: usize,
    ) -> usize {
        0
    }

    /// One value, of a format of one value per element.
    ///
    /// # Safety
    /// There is such a value.
    unsafe fn value(from: *const Self, index: usize) -> f32;
}

macro_rules! format_of_single_values {
    ($type:ty, $load:expr, $value:expr $(, $load_row:expr, $load_pairs:expr)?) => {
        impl Format for $type {
            #[inline(always)]
            unsafe fn convert_vectors<V: Vector, const PAIRED: bool>(
                from: *const Self,
                to: *mut u8,
                count: usize,
            ) {
                let mut i = 0;
                while i < count {
                    // SAFETY: whole vectors inside the row.
                    unsafe { store::<V, PAIRED>($load(from.add(i)), to, i) };
                    i += V::LANES;
                }
            }
            $(
                #[inline(always)]
                unsafe fn load_groups<V: Vector, const PAIRED: bool>(
                    from: *const Self,
                    to: *mut u8,
                    count: usize,
                ) -> usize {
                    // SAFETY: same contract.
                    unsafe {
                        match PAIRED {
                            true => $load_pairs(from, to.cast(), count),
                            false => $load_row(from, to.cast(), count),
                        }
                    }
                }
            )?
            #[inline(always)]
            unsafe fn value(from: *const Self, index: usize) -> f32 {
                // SAFETY: same contract.
                unsafe { $value(from.add(index).read_unaligned()) }
            }
        }
    };
}
format_of_single_values!(f32, V::load, std::convert::identity);
format_of_single_values!(half::f16, V::load_f16, half::f16::to_f32);
format_of_single_values!(bf16, V::load_bf16, bf16::to_f32);
format_of_single_values!(
    E4m3,
    V::load_e4m3,
    E4m3::to_f32,
    V::convert_e4m3_row,
    V::convert_e4m3_pairs
);
format_of_single_values!(E5m2, V::load_e5m2, E5m2::to_f32);
format_of_single_values!(i8, V::load_i8, f32::from);

/// Stores the values of a block, or (not `SCALED`) its codes.
///
/// # Safety
/// As [`Format::convert_vectors`], for one block.
#[inline(always)]
unsafe fn store_q8_0<V: Vector, const PAIRED: bool, const SCALED: bool>(
    block: *const BlockQ8_0,
    to: *mut u8,
    first: usize,
) {
    // SAFETY: same contract. A block holds whole vectors.
    unsafe {
        let data = block.cast::<u8>();
        let scale = V::splat_f16(data.add(offset_of!(BlockQ8_0, scale)).cast());
        let codes = data.add(offset_of!(BlockQ8_0, codes)).cast::<i8>();
        for i in (0..BLOCK_VALUES).step_by(V::LANES) {
            let codes = V::load_i8(codes.add(i));
            store::<V, PAIRED>(if SCALED { scale.mul(codes) } else { codes }, to, first + i);
        }
    }
}

/// As [`store_q8_0`].
///
/// # Safety
/// As [`store_q8_0`].
#[inline(always)]
unsafe fn store_q4_0<V: Vector, const PAIRED: bool, const SCALED: bool>(
    block: *const BlockQ4_0,
    to: *mut u8,
    first: usize,
) {
    // SAFETY: same contract. Half a block holds whole vectors.
    unsafe {
        let data = block.cast::<u8>();
        let scale = match SCALED {
            true => V::splat_f16(data.add(offset_of!(BlockQ4_0, scale)).cast()),
            false => V::splat(1.0),
        };
        let nibbles = data.add(offset_of!(BlockQ4_0, nibbles));
        for i in (0..BLOCK_VALUES / 2).step_by(V::LANES) {
            let [low, high] = V::load_nibbles(nibbles.add(i), scale);
            store::<V, PAIRED>(low, to, first + i);
            store::<V, PAIRED>(high, to, first + i + BLOCK_VALUES / 2);
        }
    }
}

macro_rules! format_of_blocks {
    ($format:ty, $block:ty, $store:ident, scaled: $scaled:literal) => {
        impl Format for $format {
            const VALUES: usize = BLOCK_VALUES;

            #[inline(always)]
            unsafe fn convert_vectors<V: Vector, const PAIRED: bool>(
                from: *const Self,
                to: *mut u8,
                count: usize,
            ) {
                for block in 0..count / BLOCK_VALUES {
                    let from = from.cast::<$block>().wrapping_add(block);
                    // SAFETY: whole blocks of the row.
                    unsafe { $store::<V, PAIRED, $scaled>(from, to, block * BLOCK_VALUES) };
                }
            }
            unsafe fn value(_from: *const Self, _index: usize) -> f32 {
                unreachable!("blocks are whole vectors")
            }
        }
    };
}
format_of_blocks!(BlockQ8_0, BlockQ8_0, store_q8_0, scaled: true);
format_of_blocks!(BlockQ4_0, BlockQ4_0, store_q4_0, scaled: true);
format_of_blocks!(Codes<BlockQ8_0>, BlockQ8_0, store_q8_0, scaled: false);
format_of_blocks!(Codes<BlockQ4_0>, BlockQ4_0, store_q4_0, scaled: false);

impl Format for Mla656 {
    const VALUES: usize = Mla656::VALUES;

    /// All values of the row, or only its codes.
    #[inline(always)]
    unsafe fn convert_vectors<V: Vector, const PAIRED: bool>(
        from: *const Self,
        to: *mut u8,
        count: usize,
    ) {
        let row = from.cast::<u8>();
        let mut i = 0;
        // SAFETY: `count` values of one row. Its parts are whole vectors.
        unsafe {
            let codes = row.add(offset_of!(Mla656, codes)).cast::<E4m3>();
            let scales = row.add(offset_of!(Mla656, scales)).cast::<f32>();
            let rotary = row.add(offset_of!(Mla656, rotary)).cast::<bf16>();
            while i < Mla656::LATENT_VALUES.min(count) {
                let scale = V::splat(scales.add(i / Mla656::SCALED_VALUES).read_unaligned());
                store::<V, PAIRED>(scale.mul(V::load_e4m3(codes.add(i))), to, i);
                i += V::LANES;
            }
            while i < count {
                let values = V::load_bf16(rotary.add(i - Mla656::LATENT_VALUES));
                store::<V, PAIRED>(values, to, i);
                i += V::LANES;
            }
        }
    }
    unsafe fn value(_from: *const Self, _index: usize) -> f32 {
        unreachable!("parts of a row are whole vectors")
    }
}

/// Converts a row to the type that products read: f32, or bf16 in `PAIRED` code. To be inlined into
/// a function that enables V's features.
///
/// # Safety
/// As [`Vector`]'s methods; `from` holds `values` values, a multiple of `F::VALUES`, and `to` has
/// room for them.
#[inline(always)]
pub unsafe fn convert<V: Vector, F: Format, const PAIRED: bool>(
    from: *const u8,
    to: *mut u8,
    values: usize,
) {
    let from = from.cast::<F>();
    // SAFETY: same contract.
    unsafe {
        let done = F::load_groups::<V, PAIRED>(from, to, values);
        let size = if PAIRED { size_of::<bf16>() } else { size_of::<f32>() };
        let (from, to) = (from.add(done / F::VALUES), to.add(done * size));
        let values = values - done;
        let full = if F::VALUES > 1 { values } else { values / V::LANES * V::LANES };
        F::convert_vectors::<V, PAIRED>(from, to, full);
        for i in full..values {
            let value = F::value(from, i);
            match PAIRED {
                true => to.cast::<bf16>().add(i).write(bf16::narrow(value)),
                false => to.cast::<f32>().add(i).write(value),
            }
        }
    }
}
