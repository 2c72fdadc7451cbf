//! Pairs of bf16 from 16-bit rows, codes and blocks, by AVX512_VBMI: VPERMI2B looks 64 bytes up in
//! a table of 128.

#![allow(clippy::needless_range_loop, reason = "a build without LTO does not inline `zip`")]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each function is a few instructions under one contract: an unsafe block in each \
              would add nothing"
)]

use super::avx512_bf16;
use super::avx512_vbmi::{TRANSPOSED_DWORDS, e4m3_words, load_512, look_up, signed_words, unpack};
use super::{PairFormat, UNIT_DIMS};
use crate::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::mem::offset_of;

/// The upper and the lower byte of each magnitude of an `i8` code as bf16.
static I8_BYTES: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut magnitude = 0;
    while magnitude < 128 {
        let value = bf16::from_f32_const(magnitude as f32);
        [bytes[0][magnitude], bytes[1][magnitude]] = value.to_be_bytes();
        magnitude += 1;
    }
    bytes
};

/// The codes of `q4_0` as bf16, twice: VPERMW takes the low five bits of an index, and the fifth
/// is of another code.
static Q4_0_AS_BF16: [bf16; 32] = {
    let mut values = [bf16::ZERO; 32];
    let mut index = 0;
    while index < 32 {
        values[index] = bf16::from_f32_const((index % 16) as f32 - 8.0);
        index += 1;
    }
    values
};

/// Byte i of two blocks of nibbles in the lower halves of words 2 i and 2 i + 1, by VPERMI2B. The
/// upper halves are of no interest.
static INTERLEAVED_BYTES: [u8; 64] = {
    let mut indices = [0; 64];
    let mut byte = 0;
    while byte < 16 {
        indices[4 * byte] = byte as u8;
        indices[4 * byte + 2] = 64 + byte as u8;
        byte += 1;
    }
    indices
};

/// Four keys of four codes each per 128-bit lane: the first two codes of the keys, and then the
/// others.
static HALVES_OF_DWORDS: [u8; 64] = {
    const LANE: [u8; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];
    let mut indices = [0; 64];
    let mut i = 0;
    while i < 64 {
        indices[i] = LANE[i % 16];
        i += 1;
    }
    indices
};

/// The dims of a block of `q4_0` in the order of [`columns`].
static Q4_0_ORDER: [u16; 32] = {
    let mut dims = [0; 32];
    let mut pair = 0;
    while pair < 16 {
        // Four bytes of each block are a dword; its nibbles are shifted to the front one by one.
        let (dword, nibble) = (pair as u16 / 4, pair as u16 % 4);
        let dim = 4 * dword + nibble / 2 + 16 * (nibble % 2);
        dims[2 * pair] = dim;
        dims[2 * pair + 1] = dim + 2;
        pair += 1;
    }
    dims
};

/// [`Vector::load_pairs`](super::Vector::load_pairs).
///
/// # Safety
/// As there. The enclosing function enables AVX-512BW and AVX512_VBMI.
#[inline(always)]
pub unsafe fn load(format: PairFormat, row: *const u8, first: usize, count: usize) -> [__m512; 2] {
    let [low, high] = match format {
        PairFormat::Bf16 => {
            let from = row.cast::<bf16>().add(first);
            match count {
                UNIT_DIMS => [load_512(from.cast()), load_512(from.add(32).cast())],
                _ => {
                    let mask = u64::MAX >> (UNIT_DIMS - count);
                    let [low, high] = [mask as u32, (mask >> 32) as u32];
                    // The second address may be behind the row, where nothing is loaded.
                    let behind = from.wrapping_add(32);
                    [
                        _mm512_maskz_loadu_epi16(low, from.cast()),
                        _mm512_maskz_loadu_epi16(high, behind.cast()),
                    ]
                }
            }
        }
        PairFormat::I8 => {
            let from = row.add(first);
            let codes = |i: usize| match i < count {
                true => load_i8(from.add(i).cast()),
                false => _mm512_setzero_ps(),
            };
            let low = avx512_bf16::join(codes(0), codes(16));
            let high = avx512_bf16::join(codes(32), codes(48));
            [_mm512_castps_si512(low), _mm512_castps_si512(high)]
        }
        PairFormat::E4m3 => e4m3_words(load_codes(row.add(first), count)),
        PairFormat::Q8_0 | PairFormat::Q4_0 => unreachable!("block_columns takes them"),
    };
    [as_floats(low), as_floats(high)]
}

/// [`Vector::arrange_pairs`](super::Vector::arrange_pairs).
///
/// # Safety
/// The enclosing function enables AVX-512F.
#[inline(always)]
pub unsafe fn arrange(format: PairFormat, pairs: [__m512; 2]) -> [__m512; 2] {
    let [low, high] = pairs;
    match format {
        PairFormat::Bf16 | PairFormat::I8 => pairs,
        // Unpacking bytes took each 16 codes to the same 128-bit lane of both vectors.
        PairFormat::E4m3 => {
            [_mm512_shuffle_f32x4::<0x88>(low, high), _mm512_shuffle_f32x4::<0xdd>(low, high)]
        }
        PairFormat::Q8_0 | PairFormat::Q4_0 => unreachable!("arrange_block takes them"),
    }
}

/// [`Vector::block_codes`](super::Vector::block_codes): vector i holds bytes 4 i to 4 i + 3 of all
/// blocks.
///
/// # Safety
/// As there. The enclosing function enables AVX-512F.
#[inline(always)]
pub unsafe fn block_codes(
    format: PairFormat,
    keys: &[*const u8; 16],
    offset: isize,
) -> [__m512; 8] {
    let (first, vectors) = match format {
        PairFormat::Q8_0 => (offset_of!(BlockQ8_0, codes), 8),
        PairFormat::Q4_0 => (offset_of!(BlockQ4_0, nibbles), 4),
        _ => unreachable!("they have no blocks"),
    };
    let mut codes = [_mm512_setzero_ps(); 8];
    for i in (0..vectors).step_by(4) {
        let dwords = transposed_dwords(keys, offset + (first + 4 * i) as isize);
        for j in 0..4 {
            codes[i + j] = as_floats(dwords[j]);
        }
    }
    codes
}

/// [`Vector::block_columns`](super::Vector::block_columns).
///
/// # Safety
/// As there. The enclosing function enables AVX-512BW and AVX512_VBMI.
#[inline(always)]
pub unsafe fn columns(format: PairFormat, codes: &[__m512; 8], quarter: usize) -> [__m512; 4] {
    // No closures: they would be compiled without the level's instructions.
    let pairs = match format {
        PairFormat::Q8_0 => {
            let order = load_512(HALVES_OF_DWORDS.as_ptr());
            let first = _mm512_castps_si512(codes[2 * quarter]);
            let second = _mm512_castps_si512(codes[2 * quarter + 1]);
            let [a, b] = i8_words(_mm512_shuffle_epi8(first, order));
            let [c, d] = i8_words(_mm512_shuffle_epi8(second, order));
            [a, b, c, d]
        }
        PairFormat::Q4_0 => {
            let words = _mm512_castps_si512(codes[quarter]);
            let [a, b] = nibbles(words);
            let [c, d] = nibbles(_mm512_srli_epi16::<8>(words));
            [a, b, c, d]
        }
        _ => unreachable!("they have no blocks"),
    };
    let [a, b, c, d] = pairs;
    [as_floats(a), as_floats(b), as_floats(c), as_floats(d)]
}

/// [`Vector::arrange_block`](super::Vector::arrange_block).
///
/// # Safety
/// The enclosing function enables AVX-512BW.
#[inline(always)]
pub unsafe fn arrange_block(format: PairFormat, elements: *const bf16) -> __m512 {
    let pairs = load_512(elements.cast());
    let order = load_512(Q4_0_ORDER.as_ptr().cast());
    as_floats(match format {
        PairFormat::Q4_0 => _mm512_permutexvar_epi16(order, pairs),
        _ => pairs,
    })
}

/// 16 bytes at `offset` of each of 16 rows: vector i holds bytes 4 i to 4 i + 3 of all rows.
#[inline(always)]
unsafe fn transposed_dwords(rows: &[*const u8; 16], offset: isize) -> [__m512i; 4] {
    let load = |row: usize| _mm_loadu_si128(rows[row].wrapping_offset(offset).cast());
    // Lane l has row 4 l + r.
    let mut lanes = [_mm512_setzero_si512(); 4];
    for r in 0..4 {
        let low = _mm256_set_m128i(load(4 + r), load(r));
        let low = _mm512_zextsi256_si512(low);
        let three = _mm512_inserti32x4::<2>(low, load(8 + r));
        lanes[r] = _mm512_inserti32x4::<3>(three, load(12 + r));
    }
    let [a, b, c, d] = lanes;
    let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(ab_low, cd_low),
        _mm512_unpackhi_epi64(ab_low, cd_low),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// [`Vector::gather_f16`](super::Vector::gather_f16).
///
/// # Safety
/// As there. The enclosing function enables AVX-512F.
#[inline(always)]
pub unsafe fn gather_f16(rows: &[*const u8; 16], offset: isize) -> __m512 {
    let mut numbers = [f16::ZERO; 16];
    for i in 0..16 {
        numbers[i] = rows[i].wrapping_offset(offset).cast::<f16>().read_unaligned();
    }
    _mm512_cvtph_ps(_mm256_loadu_si256(numbers.as_ptr().cast()))
}

/// [`Vector::interleave_rows`](super::Vector::interleave_rows).
///
/// # Safety
/// As there. The enclosing function enables AVX-512BW and AVX512_VBMI.
#[inline(always)]
pub unsafe fn interleave(format: PairFormat, rows: [*const u8; 2], to: &mut [__m512]) {
    let [low, high] = rows;
    match format {
        PairFormat::Bf16 => unreachable!("Vector::interleave_all takes them"),
        PairFormat::I8 | PairFormat::Q8_0 => {
            for n in 0..to.len() {
                let from = match format {
                    PairFormat::I8 => 16 * n,
                    _ => {
                        let block = 16 * n / BLOCK_VALUES * size_of::<BlockQ8_0>();
                        block + offset_of!(BlockQ8_0, codes) + 16 * n % BLOCK_VALUES
                    }
                };
                // Codes are exact in bf16: the upper half of their f32.
                let bits = |row: *const u8| _mm512_castps_si512(load_i8(row.add(from).cast()));
                let (low, high) = (_mm512_srli_epi32::<16>(bits(low)), bits(high));
                // low | (high & upper half)
                let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
                to[n] = as_floats(_mm512_ternarylogic_epi32::<0xf8>(low, high, upper));
            }
        }
        PairFormat::E4m3 => {
            let order = load_512(TRANSPOSED_DWORDS.as_ptr().cast());
            let codes = |row| _mm512_permutexvar_epi32(order, load_codes(row, 16 * to.len()));
            let [first, second] = unpack(codes(low), codes(high));
            let ([a, b], [c, d]) = (e4m3_words(first), e4m3_words(second));
            let pairs = [a, b, c, d];
            for n in 0..to.len() {
                to[n] = as_floats(pairs[n]);
            }
        }
        PairFormat::Q4_0 => {
            for n in 0..to.len().div_ceil(2) {
                let bytes = |row: *const u8| {
                    let block = row.cast::<BlockQ4_0>().add(n).cast::<u8>();
                    let bytes = block.add(offset_of!(BlockQ4_0, nibbles));
                    _mm512_zextsi128_si512(_mm_loadu_si128(bytes.cast()))
                };
                let order = load_512(INTERLEAVED_BYTES.as_ptr());
                let words = _mm512_permutex2var_epi8(bytes(low), order, bytes(high));
                let [low_nibbles, high_nibbles] = nibbles(words);
                to[2 * n] = as_floats(low_nibbles);
                if 2 * n + 1 < to.len() {
                    to[2 * n + 1] = as_floats(high_nibbles);
                }
            }
        }
    }
}

/// 16 codes of an `i8` cache.
///
/// # Safety
/// The enclosing function enables AVX-512F; `from` holds 16 codes.
#[inline(always)]
pub unsafe fn load_i8(from: *const i8) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
}

/// `count` bytes, and zeros.
#[inline(always)]
unsafe fn load_codes(from: *const u8, count: usize) -> __m512i {
    match count {
        UNIT_DIMS => load_512(from),
        _ => _mm512_maskz_loadu_epi8(u64::MAX >> (UNIT_DIMS - count), from.cast()),
    }
}

/// 64 codes of an `i8` cache as bf16, unpacked.
#[inline(always)]
unsafe fn i8_words(codes: __m512i) -> [__m512i; 2] {
    let magnitudes = _mm512_abs_epi8(codes);
    let [high, low] = look_up(&I8_BYTES, magnitudes);
    // The magnitude 128, of one code, has the index of 0. Their lower bytes are the same.
    let is_128 = _mm512_movepi8_mask(magnitudes);
    let high = _mm512_mask_mov_epi8(high, is_128, _mm512_set1_epi8(0x43));
    signed_words(high, low, codes)
}

/// The codes in bits 0 to 3 of each word, and in bits 4 to 7.
#[inline(always)]
unsafe fn nibbles(words: __m512i) -> [__m512i; 2] {
    let values = load_512(Q4_0_AS_BF16.as_ptr().cast());
    let high = _mm512_srli_epi16::<4>(words);
    [_mm512_permutexvar_epi16(words, values), _mm512_permutexvar_epi16(high, values)]
}

#[inline(always)]
unsafe fn as_floats(bits: __m512i) -> __m512 {
    _mm512_castsi512_ps(bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::E4m3;
    use crate::level::{Bf16Products, Level};

    /// Two blocks of `q8_0` and then some, or 64 codes of a byte each.
    type Row = [u8; 72];

    type Bits = [[u16; 32]; 2];

    /// 16 rows with all bytes, each in another order.
    fn rows() -> [Row; 16] {
        std::array::from_fn(|row| {
            std::array::from_fn(|i| ((i * (2 * row + 1) + 16 * row) % 256) as u8)
        })
    }

    /// The code of value `dim` of a row as bf16.
    fn code(format: PairFormat, row: &Row, dim: usize) -> u16 {
        let (block, within) = (dim / BLOCK_VALUES, dim % BLOCK_VALUES);
        let code = match format {
            PairFormat::Bf16 => unreachable!("it has no codes"),
            PairFormat::I8 => f32::from(row[dim] as i8),
            PairFormat::E4m3 => E4m3::from_bits(row[dim]).to_f32(),
            PairFormat::Q8_0 => f32::from(row[block * size_of::<BlockQ8_0>() + 2 + within] as i8),
            PairFormat::Q4_0 => {
                let byte = row[block * size_of::<BlockQ4_0>() + 2 + within % 16];
                f32::from(if within < 16 { byte & 15 } else { byte >> 4 }) - 8.0
            }
        };
        bf16::from_f32(code).to_bits()
    }

    fn bits(pairs: __m512) -> [u16; 32] {
        // SAFETY: both types are 64 bytes of plain bits.
        unsafe { std::mem::transmute(pairs) }
    }

    fn is_available() -> bool {
        let available = Level::Avx512.has(Bf16Products::Pairs);
        if !available {
            eprintln!("skipped: this CPU has no AVX512_BF16 or no AVX512_VBMI");
        }
        available
    }

    /// The numbers 0 to 63 in the order of pairs, and `count` values of a row.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi")]
    unsafe fn loaded(format: PairFormat, row: &Row, count: usize) -> (Bits, Bits) {
        let numbers: [u16; 64] = std::array::from_fn(|i| i as u16);
        // SAFETY: this function enables the features. The row and the numbers have 64 elements.
        unsafe {
            let numbers = load(PairFormat::Bf16, numbers.as_ptr().cast(), 0, 64);
            let order = arrange(format, numbers);
            (order.map(bits), load(format, row.as_ptr(), 0, count).map(bits))
        }
    }

    /// The numbers 0 to 31 in the order of a block, and the columns of the second block of rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    unsafe fn second_columns(
        format: PairFormat,
        rows: &[Row; 16],
        block_bytes: usize,
    ) -> ([u16; 32], [[u16; 32]; 16]) {
        let numbers: [u16; 32] = std::array::from_fn(|i| i as u16);
        let keys: [*const u8; 16] = std::array::from_fn(|row| rows[row].as_ptr());
        // SAFETY: this function enables the features. Rows have two blocks.
        unsafe {
            let order = bits(arrange_block(format, numbers.as_ptr().cast()));
            let codes = block_codes(format, &keys, block_bytes as isize);
            let mut found = [[0; 32]; 16];
            for quarter in 0..4 {
                let pairs = columns(format, &codes, quarter).map(bits);
                found[4 * quarter..4 * quarter + 4].copy_from_slice(&pairs);
            }
            (order, found)
        }
    }

    /// # Safety
    /// The CPU has the features.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    unsafe fn interleaved(format: PairFormat, rows: [&Row; 2], vectors: usize) -> [[u16; 32]; 4] {
        // SAFETY: this function enables the features. Rows have 64 values.
        unsafe {
            let mut pairs = [_mm512_setzero_ps(); 4];
            interleave(format, rows.map(|row| row.as_ptr()), &mut pairs[..vectors]);
            pairs.map(bits)
        }
    }

    #[test]
    fn rows_of_codes_are_pairs_in_the_order_of_queries() {
        if !is_available() {
            return;
        }
        for (format, count) in [PairFormat::I8, PairFormat::E4m3]
            .into_iter()
            .flat_map(|format| [16, 32, 48, 64].map(|count| (format, count)))
        {
            for row in rows() {
                // SAFETY: the CPU has the features.
                let (order, found) = unsafe { loaded(format, &row, count) };
                for (&dim, &found) in order.as_flattened().iter().zip(found.as_flattened()) {
                    let dim = usize::from(dim);
                    let expected = if dim < count { code(format, &row, dim) } else { 0 };
                    assert_eq!(found, expected, "{format:?}, value {dim} of {count}: {row:?}");
                }
            }
        }
    }

    #[test]
    fn columns_of_blocks_are_pairs_in_the_order_of_queries() {
        if !is_available() {
            return;
        }
        let formats = [
            (PairFormat::Q8_0, size_of::<BlockQ8_0>()),
            (PairFormat::Q4_0, size_of::<BlockQ4_0>()),
        ];
        for (format, block_bytes) in formats {
            let rows = rows();
            // SAFETY: the CPU has the features.
            let (order, found) = unsafe { second_columns(format, &rows, block_bytes) };
            for (i, pair) in order.chunks(2).enumerate() {
                for (row, key) in rows.iter().enumerate() {
                    let expected = [pair[0], pair[1]]
                        .map(|dim| code(format, key, BLOCK_VALUES + usize::from(dim)));
                    let found = &found[i][2 * row..2 * row + 2];
                    assert_eq!(found, expected, "{format:?}, pair {i} of key {row}");
                }
            }
        }
    }

    #[test]
    fn values_of_two_rows_interleave_in_order() {
        if !is_available() {
            return;
        }
        let rows = rows();
        for format in [PairFormat::I8, PairFormat::E4m3, PairFormat::Q8_0, PairFormat::Q4_0] {
            for (pair, vectors) in rows.chunks(2).flat_map(|pair| [2, 4].map(|n| (pair, n))) {
                // SAFETY: the CPU has the features.
                let found = unsafe { interleaved(format, [&pair[0], &pair[1]], vectors) };
                for (i, &found) in found[..vectors].as_flattened().iter().enumerate() {
                    let expected = code(format, &pair[i % 2], i / 2);
                    assert_eq!(found, expected, "{format:?}, value {} of row {}", i / 2, i % 2);
                }
            }
        }
    }
}
