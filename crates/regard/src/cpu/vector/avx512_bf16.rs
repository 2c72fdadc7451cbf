//! The AVX512_BF16 instructions that the [`Avx512`](super::avx512::Avx512) vector uses: VDPBF16PS
//! multiplies pairs of bf16 and accumulates in f32.

use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;

/// # Safety
/// The CPU has AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn pair_mul_add(a: __m512, b: __m512, addend: __m512) -> __m512 {
    // SAFETY: both types are 64 bytes of plain bits.
    let pairs = |vector: __m512| unsafe { std::mem::transmute::<__m512, __m512bh>(vector) };
    _mm512_dpbf16_ps(addend, pairs(a), pairs(b))
}

/// The numbers of both vectors as bf16, those of `low` first.
///
/// # Safety
/// The CPU has AVX512_BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn join(low: __m512, high: __m512) -> __m512 {
    // SAFETY: both types are 64 bytes of plain bits.
    unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// # Safety
/// The CPU has AVX512_BF16; `to` holds 16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn store_paired(vector: __m512, to: *mut bf16) {
    // SAFETY: both types are 32 bytes of plain bits; `to` has room for them.
    unsafe {
        let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(vector));
        _mm256_storeu_si256(to.cast(), rounded);
    }
}

/// [`pair_mul_add`] with the pair at `factors + OFFSET` in all lanes. The offset is a part of the
/// instruction's address: an address of its own per pair would take an instruction more.
///
/// # Safety
/// The CPU has AVX512_BF16; there is a pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn pair_mul_add_at<const OFFSET: usize>(
    a: __m512,
    factors: *const f32,
    mut addend: __m512,
) -> __m512 {
    // SAFETY: same contract. The instruction reads a pair and writes a register.
    unsafe {
        asm!(
            "vdpbf16ps {addend}, {a}, dword ptr [{factors} + {offset}]{{1to16}}",
            addend = inout(zmm_reg) addend,
            a = in(zmm_reg) a,
            factors = in(reg) factors,
            offset = const OFFSET * size_of::<f32>(),
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    addend
}
