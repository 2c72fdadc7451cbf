//! The AVX512_BF16 instructions that the [`Avx512`] vector uses: VDPBF16PS multiplies pairs of bf16
//! and accumulates in f32.

use super::avx512::Avx512;
use half::bf16;
use std::arch::x86_64::*;

/// # Safety
/// The CPU has AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn pair_mul_add(a: Avx512, b: Avx512, addend: Avx512) -> Avx512 {
    // SAFETY: both types are 64 bytes of plain bits.
    let pairs = |vector: Avx512| unsafe { std::mem::transmute::<__m512, __m512bh>(vector.0) };
    Avx512(_mm512_dpbf16_ps(addend.0, pairs(a), pairs(b)))
}

/// # Safety
/// The CPU has AVX512_BF16; `to` holds 16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn store_paired(vector: Avx512, to: *mut bf16) {
    // SAFETY: both types are 32 bytes of plain bits; `to` has room for them.
    unsafe {
        let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(vector.0));
        _mm256_storeu_si256(to.cast(), rounded);
    }
}
