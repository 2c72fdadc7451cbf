//! AVX-512 with BF16 products: [`Avx512`], with both products of attention on pairs of bf16 (VDPBF16PS), twice as many a cycle.

use super::avx512::Avx512;
use super::compiled::compile;
use half::bf16;
use std::arch::x86_64::*;

compile!(features: "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c", vector: Avx512, widths: [1 2 4], dots: 16, paired: true);

/// # Safety
/// The CPU has AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn pair_mul_add(a: Avx512, b: Avx512, addend: Avx512) -> Avx512 {
    // SAFETY: both types are 64 bytes of plain bits.
    let pairs = |vector: Avx512| unsafe { std::mem::transmute::<__m512, __m512bh>(vector.0) };
    Avx512(_mm512_dpbf16_ps(addend.0, pairs(a), pairs(b)))
}

/// # Safety
/// The CPU has AVX512_BF16; `to` holds 16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) unsafe fn store_paired(vector: Avx512, to: *mut bf16) {
    // SAFETY: both types are 32 bytes of plain bits; `to` has room for them.
    unsafe {
        let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(vector.0));
        _mm256_storeu_si256(to.cast(), rounded);
    }
}
