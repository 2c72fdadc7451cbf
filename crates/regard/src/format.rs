//! Storage formats of caches below 16 bits: the values of codes, and the rounding of numbers to
//! codes.
//!
//! | element | values | a value is |
//! |---|---|---|
//! | [`E4m3`] | 1 | the code: OCP fp8, 4 bits of exponent, no infinity, at most 448 |
//! | [`E5m2`] | 1 | the code: OCP fp8, 5 bits of exponent, at most 57344 |
//! | `i8` | 1 | the code, -127 to 127 |
//! | [`BlockQ8_0`] | 32 | code times the block's scale, -127 to 127, as GGUF stores it |
//! | [`BlockQ4_0`] | 32 | code times the block's scale, -8 to 7, as GGUF stores it |
//! | [`Mla656`] | 576 | 512 `e4m3` codes times one scale per 128, then 64 `bf16` numbers |
//!
//! Codes of 8 bits have scales in a separate tensor
//! ([`Attention::k_scales`](crate::Attention::k_scales)). The arithmetic here is scalar, and the
//! reference for the kernels of all backends.

mod mla656;

pub use mla656::Mla656;

use half::f16;

/// Values of a block of [`BlockQ8_0`] or [`BlockQ4_0`].
pub const BLOCK_VALUES: usize = 32;

/// An 8-bit float of 4 exponent and 3 mantissa bits (OCP "e4m3fn"): no infinities, NaN is
/// `S.1111.111`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct E4m3(u8);

/// An 8-bit float of 5 exponent and 2 mantissa bits: the upper half of an f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct E5m2(u8);

/// 32 values in 34 bytes: GGUF's `Q8_0`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Multiplies every code.
    pub scale: f16,
    /// One per value.
    pub codes: [i8; BLOCK_VALUES],
}

/// 32 values in 18 bytes: GGUF's `Q4_0`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Multiplies every code.
    pub scale: f16,
    /// Byte `i` holds value `i` in its low and value `i + 16` in its high four bits, each plus 8.
    pub nibbles: [u8; BLOCK_VALUES / 2],
}

const _: () = assert!(size_of::<BlockQ8_0>() == 34 && size_of::<BlockQ4_0>() == 18);

impl E4m3 {
    /// The largest value.
    pub const MAX: f32 = 448.0;

    /// The value of that bit pattern.
    pub const fn from_bits(bits: u8) -> E4m3 {
        E4m3(bits)
    }

    /// The bit pattern.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The nearest value, ties to even, at most [`E4m3::MAX`] in magnitude; NaN stays NaN.
    pub fn from_f32(x: f32) -> E4m3 {
        if x.is_nan() {
            return E4m3(0x7f | sign_bit(x));
        }
        let bits = nearest_code(x.abs().min(E4m3::MAX), 3, -6);
        E4m3(bits | sign_bit(x))
    }

    /// The value, exactly.
    pub fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            return f32::NAN.copysign(if self.0 & 0x80 == 0 { 1.0 } else { -1.0 });
        }
        // The bits of exponent and mantissa in their places of an f32, whose exponent bias is 120
        // more. The product is exact for subnormal codes too.
        let magnitude = f32::from_bits(u32::from(self.0 & 0x7f) << 20) * 2f32.powi(120);
        magnitude.copysign(if self.0 & 0x80 == 0 { 1.0 } else { -1.0 })
    }
}

impl E5m2 {
    /// The largest finite value.
    pub const MAX: f32 = 57344.0;

    /// The value of that bit pattern.
    pub const fn from_bits(bits: u8) -> E5m2 {
        E5m2(bits)
    }

    /// The bit pattern.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// The nearest finite value, ties to even, at most [`E5m2::MAX`] in magnitude; NaN stays NaN.
    pub fn from_f32(x: f32) -> E5m2 {
        if x.is_nan() {
            return E5m2(0x7f | sign_bit(x));
        }
        let bits = nearest_code(x.abs().min(E5m2::MAX), 2, -14);
        E5m2(bits | sign_bit(x))
    }

    /// The value, exactly. Two codes are infinite, six are NaN.
    pub fn to_f32(self) -> f32 {
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }
}

fn sign_bit(x: f32) -> u8 {
    if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The bits of exponent and mantissa of the nearest number, ties to even, in a format with
/// `mantissa_bits` mantissa bits and smallest normal number 2^`min_exponent`. `magnitude` does
/// not exceed the largest number.
fn nearest_code(magnitude: f32, mantissa_bits: u32, min_exponent: i32) -> u8 {
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(min_exponent);
    // The distance between neighbours there is 2^(exponent - mantissa_bits): a power of two, so the
    // quotient is exact.
    let steps = f64::from(magnitude) * 2f64.powi(mantissa_bits as i32 - exponent);
    let steps = steps.round_ties_even() as u32;
    // Mantissa steps carry into the exponent: 2^mantissa_bits of them are the smallest normal
    // number.
    (((exponent - min_exponent) as u32) * (1 << mantissa_bits) + steps) as u8
}

/// A scale past the range of f16 saturates; GGUF stores an infinity.
fn saturate_scale(scale: f32) -> f32 {
    if f16::from_f32(scale).is_infinite() { f16::MAX.to_f32().copysign(scale) } else { scale }
}

/// The factor from values to codes: 0 if the scale is 0 or its inverse overflows.
fn inverse_scale(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

impl BlockQ8_0 {
    /// GGUF's rounding: the scale is the largest magnitude over 127, codes are rounded half away
    /// from zero. A block with a NaN has the scale NaN.
    pub fn from_f32(values: &[f32; BLOCK_VALUES]) -> BlockQ8_0 {
        let largest =
            values.iter().fold(0.0f32, |max, x| if x.abs() > max { x.abs() } else { max });
        let scale = saturate_scale(largest / 127.0);
        let inverse = inverse_scale(scale);
        let scale = if values.iter().any(|x| x.is_nan()) { f32::NAN } else { scale };
        BlockQ8_0 {
            scale: f16::from_f32(scale),
            codes: values.map(|x| (x * inverse).round().clamp(-127.0, 127.0) as i8),
        }
    }

    /// The values: code times scale, exact in f32.
    pub fn to_f32(&self) -> [f32; BLOCK_VALUES] {
        self.codes.map(|code| f32::from(code) * self.scale.to_f32())
    }
}

impl BlockQ4_0 {
    /// GGUF's rounding: the scale is the number of largest magnitude over -8, so that this number
    /// gets the code -8. Codes are rounded half up. A block with a NaN has the scale NaN.
    pub fn from_f32(values: &[f32; BLOCK_VALUES]) -> BlockQ4_0 {
        let largest =
            values.iter().fold(0.0f32, |max, &x| if x.abs() > max.abs() { x } else { max });
        let scale = saturate_scale(largest / -8.0);
        let inverse = inverse_scale(scale);
        let code = |x: f32| ((x * inverse + 8.5) as u8).min(15); // `as` saturates
        let scale = if values.iter().any(|x| x.is_nan()) { f32::NAN } else { scale };
        let mut nibbles = [0; BLOCK_VALUES / 2];
        for (i, nibble) in nibbles.iter_mut().enumerate() {
            *nibble = code(values[i]) | code(values[i + BLOCK_VALUES / 2]) << 4;
        }
        BlockQ4_0 { scale: f16::from_f32(scale), nibbles }
    }

    /// The code of a value: -8 to 7.
    pub fn code(&self, value: usize) -> i8 {
        let byte = self.nibbles[value % (BLOCK_VALUES / 2)];
        let nibble = if value < BLOCK_VALUES / 2 { byte & 15 } else { byte >> 4 };
        nibble as i8 - 8
    }

    /// The values: code times scale, exact in f32.
    pub fn to_f32(&self) -> [f32; BLOCK_VALUES] {
        std::array::from_fn(|i| f32::from(self.code(i)) * self.scale.to_f32())
    }
}

/// The nearest code of an `i8` cache, ties to even, from -127 to 127; 0 for NaN.
pub fn i8_from_f32(x: f32) -> i8 {
    x.round_ties_even().clamp(-127.0, 127.0) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of a format, found by trying: the nearest, and of two equally near numbers the
    /// one with an even code.
    fn by_search(x: f32, codes: &[(u8, f32)]) -> u8 {
        let distance = |y: f32| (f64::from(x) - f64::from(y)).abs();
        let nearest = codes.iter().map(|&(_, y)| distance(y)).fold(f64::INFINITY, f64::min);
        let mut found = codes.iter().filter(|&&(_, y)| distance(y) == nearest);
        let first = found.next().unwrap().0;
        found.next().map_or(first, |&(second, _)| if first % 2 == 0 { first } else { second })
    }

    #[test]
    fn codes_of_8_bits_come_back_and_are_the_nearest() {
        let e4m3 = |bits: u8| E4m3::from_bits(bits).to_f32();
        let e5m2 = |bits: u8| E5m2::from_bits(bits).to_f32();
        assert_eq!((e4m3(0x7e), e4m3(0x01), e4m3(0x08)), (448.0, 2f32.powi(-9), 2f32.powi(-6)));
        assert_eq!((e5m2(0x7b), e5m2(0x01), e5m2(0x7c)), (57344.0, 2f32.powi(-16), f32::INFINITY));
        for bits in 0..=255u8 {
            if e4m3(bits).is_nan() {
                assert_eq!(bits & 0x7f, 0x7f);
            } else {
                assert_eq!(E4m3::from_f32(e4m3(bits)).to_bits(), bits);
            }
            if e5m2(bits).is_finite() {
                assert_eq!(E5m2::from_f32(e5m2(bits)).to_bits(), bits);
            }
        }
        let finite = |value: &dyn Fn(u8) -> f32| -> Vec<(u8, f32)> {
            (0..128).map(|bits| (bits, value(bits))).filter(|(_, x)| x.is_finite()).collect()
        };
        let (small, wide) = (finite(&e4m3), finite(&e5m2));
        let mut x = 1e-6f32;
        while x < 1e6 {
            assert_eq!(E4m3::from_f32(x).to_bits(), by_search(x, &small), "{x}");
            assert_eq!(E5m2::from_f32(-x).to_bits(), 0x80 | by_search(x, &wide), "{x}");
            x *= 1.0037;
        }
        for pair in small.windows(2).chain(wide.windows(2)) {
            let tie = (pair[0].1 + pair[1].1) / 2.0;
            assert_eq!(E4m3::from_f32(tie).to_bits(), by_search(tie, &small), "{tie}");
            assert_eq!(E5m2::from_f32(tie).to_bits(), by_search(tie, &wide), "{tie}");
        }
        assert_eq!(E4m3::from_f32(f32::NEG_INFINITY).to_f32(), -448.0);
        assert_eq!(E5m2::from_f32(f32::INFINITY).to_f32(), 57344.0);
        assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan());
        assert!(E5m2::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!([i8_from_f32(-1e9), i8_from_f32(2.5), i8_from_f32(126.6)], [-127, 2, 127]);
    }

    #[test]
    fn blocks_hold_their_values_within_half_a_step() {
        let values: [f32; 32] = std::array::from_fn(|i| ((i * 37 + 11) % 64) as f32 - 31.5);
        let block = BlockQ8_0::from_f32(&values);
        let largest = 31.5;
        for (x, y) in values.iter().zip(block.to_f32()) {
            assert!((x - y).abs() <= 0.51 * largest / 127.0, "{x} {y}");
        }
        let block = BlockQ4_0::from_f32(&values);
        for (i, (x, y)) in values.iter().zip(block.to_f32()).enumerate() {
            // The end opposite to the largest is one step short.
            assert!((x - y).abs() <= 1.01 * largest / 8.0, "{x} {y}");
            assert!((-8..8).contains(&block.code(i)));
        }
        assert_eq!(BlockQ8_0::from_f32(&[0.0; 32]), BlockQ8_0::default());
        assert_eq!(BlockQ4_0::from_f32(&[0.0; 32]).to_f32(), [0.0; 32]);
        let mut broken = values;
        broken[7] = f32::NAN;
        assert!(BlockQ8_0::from_f32(&broken).scale.is_nan());
        assert!(BlockQ4_0::from_f32(&broken).scale.is_nan());
    }
}
