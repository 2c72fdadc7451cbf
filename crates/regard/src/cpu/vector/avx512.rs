//! AVX-512: 16 lanes, 32 registers; a register tile of 6 rows by 4 vectors.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each method is one or two instructions under the trait's contract: an unsafe block \
              in each would add nothing"
)]

use super::{PairFormat, Storage, Vector};
use super::{avx512_bf16, avx512_pairs, avx512_vbmi};
use crate::format::{E4m3, E5m2};
use half::{bf16, f16};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx512(__m512);

/// Permutation indices that interleave two vectors of 32 bf16: the low half of the result, then the
/// high half.
static INTERLEAVED: [[u16; 32]; 2] = {
    let mut indices = [[0; 32]; 2];
    let mut i = 0;
    while i < 32 {
        indices[i / 16][i % 16 * 2] = i as u16;
        indices[i / 16][i % 16 * 2 + 1] = i as u16 + 32;
        i += 1;
    }
    indices
};

/// The bits of 2^(k / 16), less k shifted by 19: adding (16 n + k) << 19 gives 2^(n + k / 16).
static POWERS: [u32; 16] = [
    0x3f80_0000,
    0x3f7d_aac3,
    0x3f7b_95c2,
    0x3f79_c3d3,
    0x3f78_37f0,
    0x3f76_f532,
    0x3f75_fed7,
    0x3f75_583f,
    0x3f75_04f3,
    0x3f75_08a4,
    0x3f75_672a,
    0x3f76_248c,
    0x3f77_44fd,
    0x3f78_ccdf,
    0x3f7a_c0c7,
    0x3f7d_257d,
];

impl Vector for Avx512 {
    const LANES: usize = 16;
    const TILE_VECTORS: usize = 4;
    const DOT_SUMS: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Avx512(_mm512_set1_ps(value))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx512(_mm512_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
    }
    #[inline(always)]
    unsafe fn splat_f16(from: *const f16) -> Self {
        Avx512(_mm512_cvtph_ps(_mm256_set1_epi16(from.cast::<i16>().read_unaligned())))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        Avx512(avx512_pairs::load_i8(from))
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const E4m3) -> Self {
        // As on AVX2.
        let codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast()));
        let largest = _mm256_set1_epi16(0x3f80);
        let magnitude = _mm256_and_si256(_mm256_slli_epi16::<7>(codes), largest);
        let nan = _mm256_cmpeq_epi16_mask(magnitude, largest);
        let sign = _mm256_and_si256(codes, _mm256_set1_epi16(i16::MIN));
        let halves = _mm256_or_si256(magnitude, sign);
        let halves = _mm256_mask_mov_epi16(halves, nan, _mm256_set1_epi16(0x7e00));
        Avx512(_mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0)))
    }
    #[inline(always)]
    unsafe fn convert_e4m3_row(from: *const E4m3, to: *mut f32, count: usize) -> usize {
        match avx512_vbmi::is_available() {
            true => avx512_vbmi::convert_e4m3_row(from, to, count),
            false => 0,
        }
    }
    #[inline(always)]
    unsafe fn convert_e4m3_pairs(from: *const E4m3, to: *mut bf16, count: usize) -> usize {
        avx512_vbmi::convert_e4m3_pairs(from, to, count)
    }
    #[inline(always)]
    unsafe fn load_e5m2(from: *const E5m2) -> Self {
        let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
        Avx512(_mm512_cvtph_ps(_mm256_slli_epi16::<8>(codes)))
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, scale: Self) -> [Self; 2] {
        // A table of the 16 values. Only the low four bits of an index count.
        let codes = _mm512_setr_ps(
            -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
        );
        let values = _mm512_mul_ps(codes, scale.0);
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        let high = _mm512_srli_epi32::<4>(bytes);
        [Avx512(_mm512_permutexvar_ps(bytes, values)), Avx512(_mm512_permutexvar_ps(high, values))]
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm512_storeu_ps(to, self.0)
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        _mm512_mask_storeu_ps(to, u16::MAX >> (16 - count), self.0)
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        // Round to nearest even on the bits; NaN keeps its upper half, made quiet.
        let bits = _mm512_castps_si512(self.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        let rounded = _mm512_mask_blend_epi32(nan, rounded, quiet);
        _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded)));
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx512(_mm512_add_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx512(_mm512_sub_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx512(_mm512_mul_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Avx512(_mm512_div_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Avx512(_mm512_fmadd_ps(self.0, factor.0, addend.0))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Avx512(_mm512_max_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Avx512(_mm512_min_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Avx512(_mm512_abs_ps(self.0))
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, sign: Self) -> Self {
        Avx512(_mm512_or_ps(self.0, _mm512_and_ps(sign.0, _mm512_set1_ps(-0.0))))
    }
    #[inline(always)]
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self {
        let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
        Avx512(_mm512_mask_blend_ps(mask, other.0, below.0))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
        Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // x = n + f with n = floor(x). 2^f on [0, 1] is a polynomial of degree 6 with a relative
        // error of 2.0e-9, below f32 rounding. VSCALEFPS multiplies by 2^n.
        const C: [f32; 7] = [
            1.0,
            0.693_147_06,
            0.240_229_31,
            0.055_485_282,
            0.009_675_452,
            0.001_246_784_6,
            0.000_216_129_16,
        ];
        // VREDUCEPS immediate: round down to integers, suppress exceptions.
        const FLOOR: i32 = 0b1001;
        let f = Avx512(_mm512_reduce_ps::<FLOOR>(self.0));
        let mut p = Self::splat(C[6]);
        for c in C[..6].iter().rev() {
            p = p.mul_add(f, Self::splat(*c));
        }
        // Flush denormals to 0: products with denormals take some CPUs a hundred cycles.
        let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-126.0));
        Avx512(_mm512_maskz_scalef_ps(normal, p.0, self.0))
    }
    #[inline(always)]
    unsafe fn exp4(self) -> Self {
        // x = n / 2 + k / 32 + r, with 16 n + k the integer nearest to 32 x, and |r| <= 1/64.
        // 2^(k / 16) is from a table, and 4^r is a polynomial of degree 3 with a relative error of
        // 1.6e-9, exactly 1 at 0. Half the multiply-adds of exp2, whose units products need.
        const C: [f32; 4] = [1.0, 1.386_294_4, 0.960_937_14, 0.444_017_08];
        // Its last bit is 1/32: adding it leaves 16 n + k in the low bits.
        const ROUND: f32 = 1.5 * (1 << 18) as f32;
        // VPERMD takes the low four bits, k, of an index.
        let rounded = self.add(Self::splat(ROUND));
        let integer = _mm512_castps_si512(rounded.0);
        let power = _mm512_permutexvar_epi32(integer, _mm512_loadu_si512(POWERS.as_ptr().cast()));
        let power = _mm512_add_epi32(_mm512_slli_epi32::<19>(integer), power);
        let r = self.sub(rounded.sub(Self::splat(ROUND)));
        let p = Self::splat(C[3]).mul_add(r, Self::splat(C[2]));
        let p = p.mul_add(r, Self::splat(C[1])).mul_add(r, Self::splat(C[0]));
        // Flush denormals to 0: products with denormals take some CPUs a hundred cycles.
        let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-63.0));
        Avx512(_mm512_maskz_mul_ps(normal, p.0, _mm512_castsi512_ps(power)))
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        _mm512_reduce_max_ps(self.0)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        _mm512_reduce_add_ps(self.0)
    }
    #[inline(always)]
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize) {
        // Step 1, transpose 4 x 4 blocks: 128-bit lane l of `blocks[q][c]` holds column c + 4 l of
        // rows 4 q..4 q + 4.
        let mut blocks = [[_mm512_setzero_ps(); 4]; 4];
        for (q, block) in blocks.iter_mut().enumerate() {
            let (r0, r1) = (E::load::<Self>(from[4 * q]).0, E::load::<Self>(from[4 * q + 1]).0);
            let (r2, r3) = (E::load::<Self>(from[4 * q + 2]).0, E::load::<Self>(from[4 * q + 3]).0);
            let even01 = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
            let odd01 = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
            let even23 = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
            let odd23 = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
            block[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(even01, even23));
            block[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(even01, even23));
            block[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(odd01, odd23));
            block[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(odd01, odd23));
        }
        // Step 2, shuffle 128-bit lanes: 0x88 takes lanes 0 and 2 of each operand, 0xdd lanes 1
        // and 3.
        let [b0, b1, b2, b3] = blocks;
        for c in 0..4 {
            let (q0, q1, q2, q3) = (b0[c], b1[c], b2[c], b3[c]);
            let (even01, odd01) =
                (_mm512_shuffle_f32x4::<0x88>(q0, q1), _mm512_shuffle_f32x4::<0xdd>(q0, q1));
            let (even23, odd23) =
                (_mm512_shuffle_f32x4::<0x88>(q2, q3), _mm512_shuffle_f32x4::<0xdd>(q2, q3));
            _mm512_storeu_ps(to.add(c * stride), _mm512_shuffle_f32x4::<0x88>(even01, even23));
            _mm512_storeu_ps(to.add((c + 4) * stride), _mm512_shuffle_f32x4::<0x88>(odd01, odd23));
            _mm512_storeu_ps(
                to.add((c + 8) * stride),
                _mm512_shuffle_f32x4::<0xdd>(even01, even23),
            );
            _mm512_storeu_ps(to.add((c + 12) * stride), _mm512_shuffle_f32x4::<0xdd>(odd01, odd23));
        }
    }
    #[inline(always)]
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32) {
        // Step 1, add within 128-bit lanes: each lane of `quads[q]` holds that lane's sums of
        // vectors 4 q..4 q + 4.
        let mut quads = [_mm512_setzero_ps(); 4];
        for (q, quad) in quads.iter_mut().enumerate() {
            let (a, b) = (vectors[4 * q].0, vectors[4 * q + 1].0);
            let (c, d) = (vectors[4 * q + 2].0, vectors[4 * q + 3].0);
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            *quad = _mm512_add_ps(low, high);
        }
        // Step 2, add across 128-bit lanes.
        let [q0, q1, q2, q3] = quads;
        let q01 = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x88>(q0, q1),
            _mm512_shuffle_f32x4::<0xdd>(q0, q1),
        );
        let q23 = _mm512_add_ps(
            _mm512_shuffle_f32x4::<0x88>(q2, q3),
            _mm512_shuffle_f32x4::<0xdd>(q2, q3),
        );
        let even = _mm512_shuffle_f32x4::<0x88>(q01, q23);
        let odd = _mm512_shuffle_f32x4::<0xdd>(q01, q23);
        _mm512_storeu_ps(to, _mm512_add_ps(even, odd));
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(address.cast())
    }
    #[inline(always)]
    unsafe fn pair_mul_add_at<const OFFSET: usize>(
        self,
        factors: *const f32,
        addend: Self,
    ) -> Self {
        Avx512(avx512_bf16::pair_mul_add_at::<OFFSET>(self.0, factors, addend.0))
    }
    #[inline(always)]
    unsafe fn pair_mul_add(self, factor: Self, addend: Self) -> Self {
        Self(avx512_bf16::pair_mul_add(self.0, factor.0, addend.0))
    }
    #[inline(always)]
    unsafe fn interleave(low: *const bf16, high: *const bf16) -> Self {
        let low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(low.cast()));
        let high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(high.cast()));
        Avx512(_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high))))
    }
    #[inline(always)]
    unsafe fn interleave_all(low: *const bf16, high: *const bf16, to: &mut [Self]) {
        for (n, to) in to.chunks_mut(2).enumerate() {
            let (low, high) = (low.add(32 * n), high.add(32 * n));
            match to {
                [first, second] => {
                    let low = _mm512_loadu_si512(low.cast());
                    let high = _mm512_loadu_si512(high.cast());
                    let lanes = |indices: &[u16; 32]| {
                        let pairs = _mm512_permutex2var_epi16(
                            low,
                            _mm512_loadu_si512(indices.as_ptr().cast()),
                            high,
                        );
                        Avx512(_mm512_castsi512_ps(pairs))
                    };
                    (*first, *second) = (lanes(&INTERLEAVED[0]), lanes(&INTERLEAVED[1]));
                }
                rest => rest[0] = Self::interleave(low, high),
            }
        }
    }
    #[inline(always)]
    unsafe fn store_paired(self, to: *mut bf16) {
        avx512_bf16::store_paired(self.0, to)
    }
    #[inline(always)]
    unsafe fn load_pairs(
        format: PairFormat,
        row: *const u8,
        first: usize,
        count: usize,
    ) -> [Self; 2] {
        wrap(avx512_pairs::load(format, row, first, count))
    }
    #[inline(always)]
    unsafe fn arrange_pairs(format: PairFormat, pairs: [Self; 2]) -> [Self; 2] {
        wrap(avx512_pairs::arrange(format, [pairs[0].0, pairs[1].0]))
    }
    #[inline(always)]
    unsafe fn interleave_rows(format: PairFormat, rows: [*const u8; 2], to: &mut [Self]) {
        if format == PairFormat::Bf16 {
            return Self::interleave_all(rows[0].cast(), rows[1].cast(), to);
        }
        let mut pairs = [_mm512_setzero_ps(); 4];
        avx512_pairs::interleave(format, rows, &mut pairs[..to.len()]);
        to.copy_from_slice(&wrap(pairs)[..to.len()]);
    }
    #[inline(always)]
    unsafe fn block_codes(format: PairFormat, keys: &[*const u8; 16], offset: isize) -> [Self; 8] {
        wrap(avx512_pairs::block_codes(format, keys, offset))
    }
    #[inline(always)]
    unsafe fn block_columns(format: PairFormat, codes: &[Self; 8], quarter: usize) -> [Self; 4] {
        let mut registers = [_mm512_setzero_ps(); 8];
        for n in 0..8 {
            registers[n] = codes[n].0;
        }
        wrap(avx512_pairs::columns(format, &registers, quarter))
    }
    #[inline(always)]
    unsafe fn arrange_block(format: PairFormat, elements: *const bf16) -> Self {
        Avx512(avx512_pairs::arrange_block(format, elements))
    }
    #[inline(always)]
    unsafe fn gather_f16(rows: &[*const u8; 16], offset: isize) -> Self {
        Avx512(avx512_pairs::gather_f16(rows, offset))
    }
}

/// Registers as vectors.
#[inline(always)]
unsafe fn wrap<const N: usize>(registers: [__m512; N]) -> [Avx512; N] {
    let mut vectors = [Avx512(_mm512_setzero_ps()); N];
    for n in 0..N {
        vectors[n] = Avx512(registers[n]);
    }
    vectors
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4^x of 16 numbers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn exp4(x: [f32; 16]) -> [f32; 16] {
        let mut results = [0.0; 16];
        // SAFETY: this function enables the features.
        unsafe { Avx512::load(x.as_ptr()).exp4().store(results.as_mut_ptr()) };
        results
    }

    #[test]
    fn exponentials_are_accurate_and_flush_denormals() {
        if !is_x86_feature_detected!("avx512dq") || !is_x86_feature_detected!("avx512bw") {
            eprintln!("skipped: this CPU has no AVX-512");
            return;
        }
        for first in -6300..6350 {
            let x: [f32; 16] = std::array::from_fn(|i| first as f32 / 100.0 + i as f32 * 6.2e-4);
            // SAFETY: the CPU has the features that were checked, and the others come with them.
            for (x, found) in x.into_iter().zip(unsafe { exp4(x) }) {
                let expected = 4f64.powf(f64::from(x));
                let error = (f64::from(found) / expected - 1.0).abs();
                assert!(error < 2.5e-7, "4^{x} = {found}, error {error:e}");
            }
        }
        let mut x = [0.0; 16];
        x[..6].copy_from_slice(&[0.0, f32::NEG_INFINITY, f32::MIN, -63.01, -63.0, f32::NAN]);
        // SAFETY: as above.
        let found = unsafe { exp4(x) };
        assert_eq!(found[..5], [1.0, 0.0, 0.0, 0.0, f32::MIN_POSITIVE]);
        assert!(found[5].is_nan());
    }
}
