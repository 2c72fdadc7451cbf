//! Quantizing rows of keys and values: the scalar reference that every backend's append agrees with
//! to the bit.
//!
//! - `e4m3`, `e5m2`, `i8`: the code nearest to `x / scale`, ties to even, saturated.
//!   A scale of 0 makes every code 0.
//! - `q8_0`, `q4_0`: blocks of 32 values with an `f16` scale, rounded as GGUF rounds them.
//! - `mla656`: `e4m3` codes under a dynamic scale per 128 values, and rotary dims in `bf16`.
//! - A NaN stays where it is: its `e4m3`, `e5m2` or `bf16` is NaN, the scale of its `q8_0` or
//!   `q4_0` block is NaN, and so is the dynamic scale of its `i8` row. `i8` under a given scale has
//!   no NaN: the code is 0.

use crate::dtype::DType;
use crate::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656, i8_from_f32};

/// The scale that maps the largest magnitude of a row to the largest code of `format`: 0 for a row
/// of zeros, at most `f32::MAX / format.largest_code()`. NaNs are passed over, but make a scale of
/// `i8` NaN.
///
/// # Panics
/// If `format` is not `e4m3`, `e5m2` or `i8`.
pub fn dynamic_scale(row: &[f32], format: DType) -> f32 {
    assert!(format.is_code(), "{format} has no scales of its own");
    if format == DType::I8 && row.iter().any(|x| x.is_nan()) {
        return f32::NAN;
    }
    // `f32::max` passes over NaN.
    let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    largest.min(f32::MAX) / format.largest_code()
}

/// Writes the codes of a row under a scale.
///
/// # Panics
/// If `format` is not `e4m3`, `e5m2` or `i8`, or if there are not as many codes as values.
pub fn quantize_row(row: &[f32], format: DType, scale: f32, codes: &mut [u8]) {
    assert_eq!(row.len(), codes.len(), "a code for each value");
    let encode: fn(f32) -> u8 = match format {
        DType::E4M3 => |x| E4m3::from_f32(x).to_bits(),
        DType::E5M2 => |x| E5m2::from_f32(x).to_bits(),
        DType::I8 => |x| i8_from_f32(x).cast_unsigned(),
        _ => panic!("{format} has no scales of its own"),
    };
    for (&x, code) in row.iter().zip(codes) {
        let quotient = if scale == 0.0 { 0.0 } else { x / scale };
        // One NaN only: CPUs and GPUs differ in the signs of theirs.
        *code = encode(if x.is_nan() { f32::NAN } else { quotient });
    }
}

/// Writes the blocks of a row, as bytes.
///
/// # Panics
/// If `format` is not `q8_0`, `q4_0` or `mla656`, if the row is not a multiple of the values of a
/// block, or if there is not exactly room for its blocks.
pub fn quantize_blocks(row: &[f32], format: DType, blocks: &mut [u8]) {
    if format == DType::Mla656 {
        let (rows, rest) = row.as_chunks::<{ Mla656::VALUES }>();
        assert!(rest.is_empty(), "whole rows of 576 values");
        assert_eq!(blocks.len(), rows.len() * format.size(), "room for the rows");
        for (values, bytes) in rows.iter().zip(blocks.chunks_exact_mut(format.size())) {
            bytes.copy_from_slice(&Mla656::from_f32(values).to_bytes());
        }
        return;
    }
    let (values, rest) = row.as_chunks::<BLOCK_VALUES>();
    assert!(rest.is_empty(), "whole blocks of 32 values");
    assert_eq!(blocks.len(), values.len() * format.size(), "room for the blocks");
    for (values, block) in values.iter().zip(blocks.chunks_exact_mut(format.size())) {
        let (scale, codes) = block.split_at_mut(size_of::<u16>());
        let stored = match format {
            DType::Q8_0 => {
                let block = BlockQ8_0::from_f32(values);
                codes.copy_from_slice(&block.codes.map(i8::cast_unsigned));
                block.scale
            }
            DType::Q4_0 => {
                let block = BlockQ4_0::from_f32(values);
                codes.copy_from_slice(&block.nibbles);
                block.scale
            }
            _ => panic!("{format} is not a format of blocks"),
        };
        scale.copy_from_slice(&stored.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

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
                // Scales from 1 down to scales that are 0 in f16.
                let exponent = 19 + (i / BLOCK_VALUES % 32) as i32;
                ((state >> 8) as f32 - (1 << 23) as f32) * 2f32.powi(-exponent)
            })
            .collect();
        values[5 * 32..6 * 32].fill(0.0);
        for (i, x) in values[7 * 32..8 * 32].iter_mut().enumerate() {
            *x = if i % 2 == 0 { -3.0 } else { 3.0 };
        }
        for (format, expected) in
            [(DType::Q8_0, 0x4a08_3654_0ada_52e5), (DType::Q4_0, 0x84ca_df2b_d5bd_e70f)]
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
