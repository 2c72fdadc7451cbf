//! The AVX512_VBMI instructions that the [`Avx512`](super::avx512::Avx512) vector uses if the CPU
//! has them: VPERMI2B looks 64 bytes up in a table of 128.

use crate::format::E4m3;
use half::bf16;
use std::arch::x86_64::*;

/// The value of each nonnegative e4m3 code as bf16.
static E4M3_AS_BF16: [u16; 128] = {
    let mut values = [0; 128];
    let mut code = 0;
    while code < 128 {
        let (exponent, mantissa) = (code >> 3, code & 7);
        values[code as usize] = match (exponent, mantissa) {
            (15, 7) => 0x7fc0,
            (0, 0) => 0,
            // Subnormal: mantissa * 2^-9, normal as bf16.
            (0, 1) => 118 << 7,
            (0, 2..4) => 119 << 7 | (mantissa - 2) << 6,
            (0, _) => 120 << 7 | (mantissa - 4) << 5,
            _ => (exponent + 120) << 7 | mantissa << 4,
        };
        code += 1;
    }
    values
};

/// The upper and the lower byte of each nonnegative e4m3 code's value as bf16.
static E4M3_BYTES: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        [bytes[0][code], bytes[1][code]] = E4M3_AS_BF16[code].to_be_bytes();
        code += 1;
    }
    bytes
};

/// Moves qwords to where unpacking bytes to words leaves them in order.
static UNPACKED_QWORDS: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Transposes 4 x 4 dwords, so that unpacking bytes and then words leaves them in order.
pub(super) static TRANSPOSED_DWORDS: [u32; 16] =
    [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// Whether this CPU has AVX512_VBMI.
#[inline]
pub fn is_available() -> bool {
    is_x86_feature_detected!("avx512vbmi")
}

/// # Safety
/// The enclosing function enables AVX-512F; `from` holds 64 bytes.
#[inline(always)]
pub(super) unsafe fn load_512(from: *const u8) -> __m512i {
    // SAFETY: same contract.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// Unpacks bytes to words, of these lower and upper bytes: the first eight of each 128-bit lane,
/// and the other eight.
///
/// # Safety
/// The enclosing function enables AVX-512BW.
#[inline(always)]
pub(super) unsafe fn unpack(low: __m512i, high: __m512i) -> [__m512i; 2] {
    // SAFETY: same contract.
    unsafe { [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)] }
}

/// The bytes of two tables at these indices, of which the low seven bits count.
///
/// # Safety
/// The enclosing function enables AVX512_VBMI.
#[inline(always)]
pub(super) unsafe fn look_up(tables: &[[u8; 128]; 2], indices: __m512i) -> [__m512i; 2] {
    let mut bytes = [indices; 2];
    for (table, bytes) in tables.iter().zip(&mut bytes) {
        // SAFETY: same contract; a table has 128 bytes.
        unsafe {
            let (first, second) = (load_512(table.as_ptr()), load_512(table.as_ptr().add(64)));
            *bytes = _mm512_permutex2var_epi8(first, indices, second);
        }
    }
    bytes
}

/// Words of these upper and lower bytes, with the signs of the codes, unpacked.
///
/// # Safety
/// The enclosing function enables AVX-512BW.
#[inline(always)]
pub(super) unsafe fn signed_words(high: __m512i, low: __m512i, codes: __m512i) -> [__m512i; 2] {
    // SAFETY: same contract.
    unsafe {
        // high | (codes & sign)
        let sign = _mm512_set1_epi8(i8::MIN);
        unpack(low, _mm512_ternarylogic_epi32::<0xf8>(high, codes, sign))
    }
}

/// 64 `e4m3` codes as bf16, unpacked.
///
/// # Safety
/// The enclosing function enables AVX-512BW and AVX512_VBMI.
#[inline(always)]
pub(super) unsafe fn e4m3_words(codes: __m512i) -> [__m512i; 2] {
    // SAFETY: same contract.
    unsafe {
        let [high, low] = look_up(&E4M3_BYTES, codes);
        signed_words(high, low, codes)
    }
}

/// Converts whole groups of 64 codes to f32. Returns the number of converted codes.
///
/// # Safety
/// The CPU has AVX512_VBMI; `from` and `to` hold `count` elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub unsafe fn convert_e4m3_row(from: *const E4m3, to: *mut f32, count: usize) -> usize {
    // SAFETY: groups of 64 inside the row.
    unsafe {
        let order = _mm512_loadu_si512(TRANSPOSED_DWORDS.as_ptr().cast());
        let zero = _mm512_setzero_si512();
        let full = count / 64 * 64;
        for i in (0..full).step_by(64) {
            let codes = _mm512_loadu_si512(from.add(i).cast());
            let codes = _mm512_permutexvar_epi32(order, codes);
            for (half, words) in e4m3_words(codes).into_iter().enumerate() {
                let to = to.add(i + 32 * half);
                _mm512_storeu_si512(to.cast(), _mm512_unpacklo_epi16(zero, words));
                _mm512_storeu_si512(to.add(16).cast(), _mm512_unpackhi_epi16(zero, words));
            }
        }
        full
    }
}

/// Converts whole groups of 64 codes to bf16. Returns the number of converted codes.
///
/// # Safety
/// The CPU has AVX512_VBMI; `from` and `to` hold `count` elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub unsafe fn convert_e4m3_pairs(from: *const E4m3, to: *mut bf16, count: usize) -> usize {
    // SAFETY: groups of 64 inside the row.
    unsafe {
        let order = _mm512_loadu_si512(UNPACKED_QWORDS.as_ptr().cast());
        let full = count / 64 * 64;
        for i in (0..full).step_by(64) {
            let codes = _mm512_loadu_si512(from.add(i).cast());
            let codes = _mm512_permutexvar_epi64(order, codes);
            let [low, high] = e4m3_words(codes);
            _mm512_storeu_si512(to.add(i).cast(), low);
            _mm512_storeu_si512(to.add(i + 32).cast(), high);
        }
        full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_code_is_its_value() {
        if !is_available() || !is_x86_feature_detected!("avx512bw") {
            return;
        }
        let codes: Vec<E4m3> = (0..=255).map(E4m3::from_bits).collect();
        let mut values = [0.0f32; 256];
        // SAFETY: the CPU has the instructions; both hold 256 elements.
        assert_eq!(unsafe { convert_e4m3_row(codes.as_ptr(), values.as_mut_ptr(), 256) }, 256);
        for (code, value) in codes.iter().zip(values) {
            let expected = code.to_f32();
            let same = expected.to_bits() == value.to_bits();
            assert!(same || expected.is_nan() && value.is_nan(), "{code:?}: {value}");
        }
    }

    #[test]
    fn every_e4m3_code_is_its_value_as_bf16() {
        if !is_available() || !is_x86_feature_detected!("avx512bw") {
            return;
        }
        // In several orders, so that each code is in several lanes.
        for step in [1u8, 37, 101] {
            let codes: Vec<_> =
                (0..=255u8).map(|i| E4m3::from_bits(i.wrapping_mul(step))).collect();
            let mut found = [bf16::ONE; 300];
            // SAFETY: the CPU has the instructions; both hold 256 elements.
            let count = unsafe { convert_e4m3_pairs(codes.as_ptr(), found.as_mut_ptr(), 256) };
            assert_eq!((count, &found[256..]), (256, &[bf16::ONE; 44][..]));
            for (code, found) in codes.iter().zip(found) {
                // Exact; NaN keeps its sign and is quiet.
                let expected = bf16::from_f32(code.to_f32());
                assert_eq!(expected.to_bits(), found.to_bits(), "{code:?}: {found}");
            }
            let mut some = [bf16::ONE; 80];
            // SAFETY: as above. Only whole groups of 64 are converted.
            let count = unsafe { convert_e4m3_pairs(codes.as_ptr(), some.as_mut_ptr(), 80) };
            assert_eq!((count, &some[64..]), (64, &[bf16::ONE; 16][..]));
        }
    }
}
