//! AVX-512: 16 lanes, 32 registers; a register tile of 6 rows by 4 vectors.

use super::Level;
use super::kernel::{self, Call, Item};
use super::product::{self, Product};
use super::vector::Vector;
use half::{bf16, f16};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

/// # Safety
/// The CPU has [`Level::Avx512`]; otherwise as [`kernel::run_item`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run_item(call: &Call, item: &Item, scratch: *mut u8) {
    debug_assert!(Level::Avx512.is_available());
    // SAFETY: passed on; this function enables Avx512's features.
    unsafe { kernel::run_item::<Avx512>(call, item, scratch) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn product<const M: usize, const N: usize, const ACCUMULATE: bool>(work: &Product) {
    // SAFETY: passed on; this function enables Avx512's features.
    unsafe { product::product::<Avx512, M, N, ACCUMULATE>(work) }
}

// SAFETY, for the whole block: these are called with the level's features enabled, on pointers valid for LANES elements.
impl Vector for Avx512 {
    const LANES: usize = 16;
    const ROWS: usize = 6;
    const COLUMNS: usize = 4;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        unsafe { Avx512(_mm512_set1_ps(value)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Avx512(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        unsafe { Avx512(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_add_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_sub_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_mul_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_div_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        unsafe { Avx512(_mm512_fmadd_ps(self.0, factor.0, addend.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        unsafe { Avx512(_mm512_min_ps(self.0, other.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Avx512(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, sign: Self) -> Self {
        unsafe { Avx512(_mm512_or_ps(self.0, _mm512_and_ps(sign.0, _mm512_set1_ps(-0.0)))) }
    }
    #[inline(always)]
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self {
        unsafe {
            let mask = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, bound.0);
            Avx512(_mm512_mask_blend_ps(mask, other.0, below.0))
        }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Avx512(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Avx512(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, to: *mut f32, stride: usize) {
        unsafe {
            // First inside the 4 x 4 blocks: `blocks[q][c]` holds column c + 4 l of rows 4 q..4 q + 4 in its 128-bit lane l.
            let mut blocks = [[_mm512_setzero_ps(); 4]; 4];
            for (q, block) in blocks.iter_mut().enumerate() {
                let from = from.add(4 * q * 16);
                let r0 = _mm512_loadu_ps(from);
                let r1 = _mm512_loadu_ps(from.add(16));
                let r2 = _mm512_loadu_ps(from.add(32));
                let r3 = _mm512_loadu_ps(from.add(48));
                let even01 = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
                let odd01 = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
                let even23 = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
                let odd23 = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
                block[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(even01, even23));
                block[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(even01, even23));
                block[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(odd01, odd23));
                block[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(odd01, odd23));
            }
            // Then the lanes: 0x88 takes lanes 0 and 2 of each operand, 0xdd lanes 1 and 3.
            for c in 0..4 {
                let [q0, q1, q2, q3] = [blocks[0][c], blocks[1][c], blocks[2][c], blocks[3][c]];
                let (even01, odd01) =
                    (_mm512_shuffle_f32x4::<0x88>(q0, q1), _mm512_shuffle_f32x4::<0xdd>(q0, q1));
                let (even23, odd23) =
                    (_mm512_shuffle_f32x4::<0x88>(q2, q3), _mm512_shuffle_f32x4::<0xdd>(q2, q3));
                _mm512_storeu_ps(to.add(c * stride), _mm512_shuffle_f32x4::<0x88>(even01, even23));
                _mm512_storeu_ps(to.add((c + 4) * stride), _mm512_shuffle_f32x4::<0x88>(odd01, odd23));
                _mm512_storeu_ps(to.add((c + 8) * stride), _mm512_shuffle_f32x4::<0xdd>(even01, even23));
                _mm512_storeu_ps(to.add((c + 12) * stride), _mm512_shuffle_f32x4::<0xdd>(odd01, odd23));
            }
        }
    }
    #[inline(always)]
    unsafe fn product<const M: usize, const N: usize, const ACCUMULATE: bool>(work: &Product) {
        unsafe { product::<M, N, ACCUMULATE>(work) }
    }
}
