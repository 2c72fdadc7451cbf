//! Quantizing rows of keys and values: the scalar reference that every backend's append agrees with
//! to the bit.
//!
//! - `e4m3`, `e5m2`, `i8`: the code nearest to `x / scale`, ties to even, saturated.
//!   A scale of 0 makes every code 0.
//! - `q8_0`, `q4_0`: blocks of 32 values with an `f16` scale, rounded as GGUF rounds them.
//! - A NaN stays where it is: its `e4m3` or `e5m2` code is NaN, the scale of its `q8_0` or `q4_0`
//!   block is NaN, and so is the dynamic scale of its `i8` row.
//!   `i8` under a given scale has no NaN: the code is 0.

use crate::tensor::DType;
use half::f16;

/// Values in a block of `q8_0` or `q4_0`.
pub const BLOCK_VALUES: usize = 32;

/// The NaN of an `f16` scale.
const NAN_SCALE: u16 = 0x7e00;

/// The largest code of a format with scales of its own: 448, 57344, 127; `None` for other types.
pub fn max_code(format: DType) -> Option<f32> {
    match format {
        DType::E4M3 => Some(448.0),
        DType::E5M2 => Some(57344.0),
        DType::I8 => Some(127.0),
        _ => None,
    }
}

/// The scale that maps the largest magnitude of a row to the largest code of `format`: 0 for a row
/// of zeros, at most `f32::MAX / max_code`. NaNs are passed over, but make a scale of `i8` NaN.
///
/// # Panics
/// If `format` has no scales of its own.
pub fn dynamic_scale(row: &[f32], format: DType) -> f32 {
    let max_code = max_code(format).expect("e4m3, e5m2 or i8");
    if format == DType::I8 && row.iter().any(|x| x.is_nan()) {
        return f32::NAN;
    }
    // `f32::max` passes over NaN.
    let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    largest.min(f32::MAX) / max_code
}

/// Writes the codes of a row under a scale.
///
/// # Panics
/// If `format` is not `e4m3`, `e5m2` or `i8`, or if there are not as many codes as values.
pub fn quantize_row(row: &[f32], format: DType, scale: f32, codes: &mut [u8]) {
    assert_eq!(row.len(), codes.len(), "a code for each value");
    let encode = match format {
        DType::E4M3 => encode_e4m3,
        DType::E5M2 => encode_e5m2,
        DType::I8 => encode_i8,
        _ => panic!("{format} has no scales of its own"),
    };
    for (&x, code) in row.iter().zip(codes) {
        *code = encode(if scale == 0.0 && !x.is_nan() { 0.0 } else { x / scale });
    }
}

/// Writes the blocks of a row.
///
/// # Panics
/// If `format` is not `q8_0` or `q4_0`, if the row is not a multiple of 32 values, or if there is
/// not exactly room for its blocks.
pub fn quantize_blocks(row: &[f32], format: DType, blocks: &mut [u8]) {
    assert!(row.len().is_multiple_of(BLOCK_VALUES), "blocks of 32 values");
    assert_eq!(blocks.len(), row.len() / BLOCK_VALUES * format.size(), "room for the blocks");
    let encode = match format {
        DType::Q8_0 => encode_q8_0,
        DType::Q4_0 => encode_q4_0,
        _ => panic!("{format} is not a format of blocks"),
    };
    for (values, block) in row.chunks_exact(BLOCK_VALUES).zip(blocks.chunks_exact_mut(format.size()))
    {
        encode(values, block);
    }
}

/// A floating format of 8 bits.
struct Float8 {
    mantissa_bits: u32,
    /// Of the exponent.
    bias: i32,
    max: f32,
}

impl Float8 {
    const NAN: u8 = 0x7f;

    /// The nearest code, ties to even, saturated.
    fn encode(&self, x: f32) -> u8 {
        if x.is_nan() {
            return Self::NAN;
        }
        let sign = (x.to_bits() >> 31 << 7) as u8;
        let magnitude = x.abs().min(self.max);
        let dropped = 23 - self.mantissa_bits;
        let min_normal = f32::from_bits(((127 + 1 - self.bias) as u32) << 23);
        if magnitude < min_normal {
            // Multiples of the smallest code. The one past the largest subnormal is the smallest
            // normal, in code as in value.
            let unit = (self.bias - 1) as u32 + self.mantissa_bits;
            let codes = magnitude * f32::from_bits((127 + unit) << 23);
            return sign | codes.round_ties_even() as u8;
        }
        let bits = magnitude.to_bits();
        let rounded = bits + (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
        let exponent_offset = ((127 - self.bias) as u32) << self.mantissa_bits;
        sign | ((rounded >> dropped) - exponent_offset) as u8
    }
}

fn encode_e4m3(x: f32) -> u8 {
    Float8 { mantissa_bits: 3, bias: 7, max: 448.0 }.encode(x)
}

fn encode_e5m2(x: f32) -> u8 {
    Float8 { mantissa_bits: 2, bias: 15, max: 57344.0 }.encode(x)
}

fn encode_i8(x: f32) -> u8 {
    // A NaN becomes 0.
    (x.clamp(-127.0, 127.0).round_ties_even() as i8).cast_unsigned()
}

/// The scale of a block, as it is stored and as its codes are found.
struct BlockScale {
    stored: u16,
    /// 0 if the scale is.
    inverse: f32,
}

impl BlockScale {
    /// Codes are found with the scale before it is rounded to f16, as in GGUF. A scale past the
    /// range of f16 saturates, where GGUF stores an infinity.
    fn new(scale: f32) -> BlockScale {
        let scale = if f16::from_f32(scale).is_infinite() {
            f16::MAX.to_f32().copysign(scale)
        } else {
            scale
        };
        let inverse = 1.0 / scale;
        BlockScale {
            stored: f16::from_f32(scale).to_bits(),
            inverse: if inverse.is_finite() { inverse } else { 0.0 },
        }
    }
}

/// `block`: the scale, then 32 signed codes.
fn encode_q8_0(values: &[f32], block: &mut [u8]) {
    let (stored, codes) = block.split_at_mut(2);
    if values.iter().any(|x| x.is_nan()) {
        stored.copy_from_slice(&NAN_SCALE.to_le_bytes());
        codes.fill(0);
        return;
    }
    let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    let scale = BlockScale::new(largest / 127.0);
    stored.copy_from_slice(&scale.stored.to_le_bytes());
    for (&x, code) in values.iter().zip(codes) {
        // Half away from zero.
        *code = ((x * scale.inverse).round().clamp(-127.0, 127.0) as i8).cast_unsigned();
    }
}

/// `block`: the scale, then 16 bytes: value i in the low half of byte i, value i + 16 in the high.
fn encode_q4_0(values: &[f32], block: &mut [u8]) {
    const ZERO: u8 = 0x88;
    let (stored, codes) = block.split_at_mut(2);
    if values.iter().any(|x| x.is_nan()) {
        stored.copy_from_slice(&NAN_SCALE.to_le_bytes());
        codes.fill(ZERO);
        return;
    }
    // The first value of the largest magnitude, with its sign: its code is 0, which stands for -8.
    let largest =
        values.iter().fold(0f32, |largest, &x| if largest.abs() < x.abs() { x } else { largest });
    let scale = BlockScale::new(largest / -8.0);
    stored.copy_from_slice(&scale.stored.to_le_bytes());
    let (low, high) = values.split_at(BLOCK_VALUES / 2);
    let encode = |x: f32| (x * scale.inverse + 8.5).clamp(0.0, 15.0) as u8;
    for ((&low, &high), code) in low.iter().zip(high).zip(codes) {
        *code = encode(low) | encode(high) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code, NaN and infinities included.
    fn value(format: &Float8, code: u8) -> f64 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let (exponent, mantissa) = (
            i32::from(code & 0x7f) >> format.mantissa_bits,
            f64::from(code & ((1 << format.mantissa_bits) - 1)),
        );
        let unit = 2f64.powi(exponent.max(1) - format.bias - format.mantissa_bits as i32);
        let implicit = if exponent == 0 { 0.0 } else { f64::from(1 << format.mantissa_bits) };
        sign * (implicit + mantissa) * unit
    }

    /// Every boundary between two codes, what is beside it, and every code itself.
    #[test]
    fn codes_of_8_bits_are_nearest_with_ties_to_even() {
        for (format, last, encode) in [
            (
                Float8 { mantissa_bits: 3, bias: 7, max: 448.0 },
                0x7e,
                encode_e4m3 as fn(f32) -> u8,
            ),
            (Float8 { mantissa_bits: 2, bias: 15, max: 57344.0 }, 0x7b, encode_e5m2),
        ] {
            assert_eq!(value(&format, last), f64::from(format.max));
            for code in 0..=last {
                let here = value(&format, code) as f32;
                assert_eq!(encode(here), code);
                assert_eq!(encode(-here), code | 0x80);
                if code == last {
                    continue;
                }
                let middle = ((value(&format, code) + value(&format, code + 1)) / 2.0) as f32;
                assert_eq!(encode(middle), code + (code & 1), "a tie goes to the even code");
                assert_eq!(encode(middle.next_down()), code);
                assert_eq!(encode(middle.next_up()), code + 1);
            }
            for large in [format.max.next_up(), f32::MAX, f32::INFINITY] {
                assert_eq!((encode(large), encode(-large)), (last, last | 0x80));
            }
            assert_eq!((encode(f32::NAN), encode(-f32::NAN)), (0x7f, 0x7f));
            assert_eq!((encode(1e-40), encode(0.0), encode(-0.0)), (0, 0, 0x80));
        }
        for code in -127i8..=127 {
            let code_bits = |x: f32| encode_i8(x).cast_signed();
            assert_eq!(code_bits(f32::from(code)), code);
            assert_eq!(code_bits(f32::from(code) + 0.5), (code + (code & 1)).min(127));
        }
        assert_eq!((encode_i8(f32::NAN), encode_i8(-1e9)), (0, (-127i8).cast_unsigned()));
    }

    #[test]
    fn dynamic_scales_reach_the_largest_code() {
        for (format, largest) in [(DType::E4M3, 0x7e), (DType::E5M2, 0x7b), (DType::I8, 127)] {
            for magnitude in [1.0, 3.7e-3, 1e30, f32::MAX, 1e-30, f32::INFINITY] {
                let row = [0.0, -magnitude, magnitude / 2.0, magnitude];
                let scale = dynamic_scale(&row, format);
                let mut codes = [1; 4];
                quantize_row(&row, format, scale, &mut codes);
                assert!(scale.is_finite() && scale > 0.0);
                assert_eq!((codes[0], codes[3]), (0, largest), "{format} {magnitude}");
            }
            let mut codes = [1; 3];
            assert_eq!(dynamic_scale(&[0.0, -0.0, 0.0], format), 0.0);
            quantize_row(&[0.0, -0.0, 5.0], format, 0.0, &mut codes);
            assert_eq!(codes, [0; 3], "a scale of 0 has codes of 0");
        }
    }

    #[test]
    fn a_nan_stays_where_it_is() {
        let row = [1.0, f32::NAN, -2.0];
        let mut codes = [0; 3];
        let scale = dynamic_scale(&row, DType::E4M3);
        quantize_row(&row, DType::E4M3, scale, &mut codes);
        assert_eq!((scale, codes[1], codes[2]), (2.0 / 448.0, 0x7f, 0xfe));
        assert!(dynamic_scale(&row, DType::I8).is_nan());
        let mut values = [1f32; 64];
        values[40] = f32::NAN;
        for format in [DType::Q8_0, DType::Q4_0] {
            let mut blocks = vec![0; 2 * format.size()];
            quantize_blocks(&values, format, &mut blocks);
            let scale = |block: &[u8]| f16::from_le_bytes([block[0], block[1]]);
            let (first, second) = blocks.split_at(format.size());
            assert!(scale(first).is_finite() && scale(second).is_nan());
        }
    }

    /// Blocks have the bits that the Python package `gguf` 0.19 gives them ("bit-exact same results
    /// as reference implementation in ggml-quants.c"): hashes of both, over the same numbers.
    #[test]
    fn blocks_are_those_of_gguf() {
        let mut state = 12345u32;
        let mut values: Vec<f32> = (0..1024 * BLOCK_VALUES)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Scales from 1 down to those that are 0 in f16.
                let exponent = 19 + (i / BLOCK_VALUES % 32) as i32;
                ((state >> 8) as f32 - (1 << 23) as f32) * 2f32.powi(-exponent)
            })
            .collect();
        values[5 * 32..6 * 32].fill(0.0);
        for (i, x) in values[7 * 32..8 * 32].iter_mut().enumerate() {
            *x = if i % 2 == 0 { -3.0 } else { 3.0 };
        }
        for (format, expected) in
            [(DType::Q8_0, 0x4a08_3652_0ada_52e5), (DType::Q4_0, 0x84ca_df2b_d5bd_e70f)]
        {
            let mut blocks = vec![0; values.len() / BLOCK_VALUES * format.size()];
            quantize_blocks(&values, format, &mut blocks);
            let hash = blocks.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
            assert_eq!(hash, expected, "{format}");
        }
    }

    /// A scale past the range of f16 saturates: the values come back as large as they can be.
    #[test]
    fn scales_of_blocks_saturate() {
        for (format, largest) in [(DType::Q8_0, 127.0), (DType::Q4_0, -8.0)] {
            for magnitude in [1e9, f32::MAX, f32::INFINITY] {
                let mut values = [0f32; 32];
                values[3] = magnitude;
                let mut block = vec![0; format.size()];
                quantize_blocks(&values, format, &mut block);
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                let code = match format {
                    DType::Q8_0 => f32::from(block[2 + 3].cast_signed()),
                    _ => f32::from(block[2 + 3] & 15) - 8.0,
                };
                assert_eq!((scale.abs(), code), (65504.0, largest));
                assert!(scale * code > 0.0);
            }
        }
    }
}
