//! AVX2 with FMA and F16C: 8 lanes, 16 registers; a register tile of 6 rows by 2 vectors.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each method is one or two instructions under the trait's contract: an unsafe block \
              in each would add nothing"
)]

use super::{Storage, Vector};
use crate::format::{E4m3, E5m2};
use half::{bf16, f16};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub struct Avx2(__m256);

impl Vector for Avx2 {
    const LANES: usize = 8;
    const TILE_VECTORS: usize = 2;
    const DOT_SUMS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Avx2(_mm256_set1_ps(value))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx2(_mm256_loadu_ps(from))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        Avx2(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
    }
    #[inline(always)]
    unsafe fn splat_f16(from: *const f16) -> Self {
        Avx2(_mm256_cvtph_ps(_mm_set1_epi16(from.cast::<i16>().read_unaligned())))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        Avx2(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))))
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const E4m3) -> Self {
        // The bits of exponent and mantissa in their places of an f16, whose exponent bias is 8
        // more; the conversion takes denormals at full speed.
        let codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(from.cast()));
        let largest = _mm_set1_epi16(0x3f80);
        let magnitude = _mm_and_si128(_mm_slli_epi16::<7>(codes), largest);
        let nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, largest), _mm_set1_epi16(0x7e00));
        let sign = _mm_and_si128(codes, _mm_set1_epi16(i16::MIN));
        let halves = _mm_or_si128(_mm_or_si128(magnitude, nan), sign);
        Avx2(_mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0)))
    }
    #[inline(always)]
    unsafe fn load_e5m2(from: *const E5m2) -> Self {
        let halves = _mm_slli_epi16::<8>(_mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast())));
        Avx2(_mm256_cvtph_ps(halves))
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, scale: Self) -> [Self; 2] {
        let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
        let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
        let high = _mm256_srli_epi32::<4>(bytes);
        let zero = _mm256_set1_epi32(8);
        let (low, high) = (_mm256_sub_epi32(low, zero), _mm256_sub_epi32(high, zero));
        [
            Avx2(_mm256_mul_ps(_mm256_cvtepi32_ps(low), scale.0)),
            Avx2(_mm256_mul_ps(_mm256_cvtepi32_ps(high), scale.0)),
        ]
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        _mm256_storeu_ps(to, self.0)
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx2(_mm256_add_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Avx2(_mm256_sub_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx2(_mm256_mul_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Avx2(_mm256_div_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Avx2(_mm256_fmadd_ps(self.0, factor.0, addend.0))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Avx2(_mm256_max_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Avx2(_mm256_min_ps(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Avx2(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0))
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, sign: Self) -> Self {
        Avx2(_mm256_or_ps(self.0, _mm256_and_ps(sign.0, _mm256_set1_ps(-0.0))))
    }
    #[inline(always)]
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self {
        let mask = _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, bound.0);
        Avx2(_mm256_blendv_ps(other.0, below.0, mask))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Avx2(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
        Avx2(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let half = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
        let pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
        let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize) {
        // Step 1, transpose 4 x 4 blocks: 128-bit lane l of `blocks[q][c]` holds column c + 4 l of
        // rows 4 q..4 q + 4.
        let mut blocks = [[_mm256_setzero_ps(); 4]; 2];
        for (q, block) in blocks.iter_mut().enumerate() {
            let (r0, r1) = (E::load::<Self>(from[4 * q]).0, E::load::<Self>(from[4 * q + 1]).0);
            let (r2, r3) = (E::load::<Self>(from[4 * q + 2]).0, E::load::<Self>(from[4 * q + 3]).0);
            let even01 = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1));
            let odd01 = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
            let even23 = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3));
            let odd23 = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
            block[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(even01, even23));
            block[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(even01, even23));
            block[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(odd01, odd23));
            block[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(odd01, odd23));
        }
        let [b0, b1] = blocks;
        for c in 0..4 {
            let (low, high) = (b0[c], b1[c]);
            _mm256_storeu_ps(to.add(c * stride), _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(to.add((c + 4) * stride), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }
    #[inline(always)]
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32) {
        // `quads[q]` holds, in each 128-bit lane, that lane's sums of vectors 4 q..4 q + 4.
        let mut quads = [_mm256_setzero_ps(); 2];
        for (q, quad) in quads.iter_mut().enumerate() {
            let ab = _mm256_hadd_ps(vectors[4 * q].0, vectors[4 * q + 1].0);
            let cd = _mm256_hadd_ps(vectors[4 * q + 2].0, vectors[4 * q + 3].0);
            *quad = _mm256_hadd_ps(ab, cd);
        }
        let low = _mm256_permute2f128_ps::<0x20>(quads[0], quads[1]);
        let high = _mm256_permute2f128_ps::<0x31>(quads[0], quads[1]);
        _mm256_storeu_ps(to, _mm256_add_ps(low, high));
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(address.cast())
    }
}
