//! The inner loops of the ceilings: as many multiply-adds as a core can do, and reading memory as
//! fast as it comes.
//!
//! Each loop of products keeps [`CHAINS`] independent sums in registers, more than latency times
//! the number of units on any CPU so far. Then only the units limit the loop.

use regard::cpu::Level;
use std::hint::black_box;

/// Independent sums. With two operands they still fit the 16 registers of AVX2.
const CHAINS: usize = 12;

/// A loop of multiply-adds: runs that many times, and returns a number that depends on all of it.
pub type Products = unsafe fn(rounds: u64) -> f32;

/// One product loop and its work.
#[derive(Clone, Copy)]
pub struct ProductLoop {
    /// Needs the instructions that it was found for.
    pub run: Products,
    /// Multiplications and additions per round.
    pub flops_per_round: u64,
}

/// The loop of f32 multiply-adds at a SIMD level that this CPU has.
pub fn f32_products(level: Level) -> ProductLoop {
    let run: Products = match level {
        #[cfg(target_arch = "x86_64")]
        Level::Scalar => x86::sse,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => x86::avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => x86::avx512,
        #[cfg(target_arch = "aarch64")]
        Level::Neon => neon::neon,
        _ => plain,
    };
    ProductLoop { run, flops_per_round: (2 * CHAINS * level.lanes()) as u64 }
}

/// The loop of bf16 products added up in f32 by VDPBF16PS, if this CPU has it.
pub fn bf16_products() -> Option<ProductLoop> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16") {
        return Some(ProductLoop { run: x86::bf16, flops_per_round: (4 * CHAINS * 16) as u64 });
    }
    None
}

/// The loop of bf16 products on the matrix unit (AMX), if this CPU has it and the system permits
/// it.
pub fn tile_products() -> Option<ProductLoop> {
    #[cfg(target_arch = "x86_64")]
    if Level::Avx512.has(regard::cpu::Bf16Products::Tiles) {
        return Some(ProductLoop { run: x86::tiles, flops_per_round: 4 * 2 * 16 * 16 * 32 });
    }
    None
}

/// The fallback: a multiplication and an addition per lane.
unsafe fn plain(rounds: u64) -> f32 {
    let (factor, term) = black_box((1.000_000_1f32, 1e-7f32));
    let mut sums = [[1.0f32; 4]; CHAINS];
    for _ in 0..rounds {
        for sum in sums.as_flattened_mut() {
            *sum = *sum * factor + term;
        }
    }
    sums.as_flattened().iter().sum()
}

/// Adds up memory, `STREAMS` parts of it side by side, and prefetches `ahead` bytes ahead.
/// Integers, so that the compiler may vectorize with any instructions.
#[inline(always)]
fn add_up<const STREAMS: usize>(data: &[[u64; 8]], ahead: usize) -> u64 {
    let part = data.len() / STREAMS;
    let mut sums = [[0u64; 8]; STREAMS];
    for i in 0..part {
        for (stream, sum) in sums.iter_mut().enumerate() {
            let line = &data[stream * part + i];
            prefetch(line, ahead);
            for (sum, x) in sum.iter_mut().zip(line) {
                *sum = sum.wrapping_add(*x);
            }
        }
    }
    sums.as_flattened().iter().fold(0, |all, x| all.wrapping_add(*x))
}

#[inline(always)]
fn prefetch(line: &[u64; 8], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of every x86-64 CPU, and a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast::<i8>().wrapping_add(ahead)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (line, ahead);
}

/// Ways to read memory. The fastest way depends on the CPU's own prefetching, so the ceiling is the
/// best of them.
pub const READ_PATTERNS: usize = 4;

/// Reads memory in one of the ways, and returns a number that depends on all of it.
///
/// # Safety
/// This CPU has the instructions of the level.
pub unsafe fn read(level: Level, pattern: usize, data: &[[u64; 8]]) -> u64 {
    match level {
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { x86::read_avx512(pattern, data) },
        // SAFETY: the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { x86::read_avx2(pattern, data) },
        _ => read_any(pattern, data),
    }
}

#[inline(always)]
fn read_any(pattern: usize, data: &[[u64; 8]]) -> u64 {
    match pattern {
        0 => add_up::<1>(data, 0),
        1 => add_up::<1>(data, 4096),
        2 => add_up::<4>(data, 0),
        _ => add_up::<4>(data, 1024),
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, black_box, read_any};
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Keeps the compiler from seeing through a sum, and the sum in its register.
    macro_rules! opaque {
        ($class:ident, $($sum:expr),*) => {
            // SAFETY: no instruction at all.
            $(unsafe {
                asm!(
                    "/* {0} */",
                    inout($class) $sum,
                    options(pure, nomem, nostack, preserves_flags)
                )
            };)*
        };
    }

    macro_rules! products {
        (
            $(#[$meta:meta])*
            $name:ident, $class:ident, $vector:ty, $set:ident, $add:ident, $step:expr, $first:ident
        ) => {
            $(#[$meta])*
            pub unsafe fn $name(rounds: u64) -> f32 {
                let mut sums: [$vector; CHAINS] = [$set(black_box(1.0)); CHAINS];
                let (factor, term) = ($set(black_box(1.000_000_1)), $set(black_box(1e-7)));
                let step = $step;
                let [mut a, mut b, mut c, mut d, mut e, mut f, ..] = sums;
                let [.., mut g, mut h, mut i, mut j, mut k, mut l] = sums;
                for _ in 0..rounds {
                    for sum in [
                        &mut a, &mut b, &mut c, &mut d, &mut e, &mut f,
                        &mut g, &mut h, &mut i, &mut j, &mut k, &mut l,
                    ] {
                        *sum = step(*sum, factor, term);
                    }
                    opaque!($class, a, b, c, d, e, f, g, h, i, j, k, l);
                }
                sums = [a, b, c, d, e, f, g, h, i, j, k, l];
                let mut all = sums[0];
                for sum in &sums[1..] {
                    all = $add(all, *sum);
                }
                $first(all)
            }
        };
    }

    products!(
        #[target_feature(enable = "sse2")]
        sse,
        xmm_reg,
        __m128,
        _mm_set1_ps,
        _mm_add_ps,
        |sum, factor, term| _mm_add_ps(_mm_mul_ps(sum, factor), term),
        _mm_cvtss_f32
    );
    products!(
        #[target_feature(enable = "avx2,fma")]
        avx2,
        ymm_reg,
        __m256,
        _mm256_set1_ps,
        _mm256_add_ps,
        |sum, factor, term| _mm256_fmadd_ps(sum, factor, term),
        _mm256_cvtss_f32
    );
    products!(
        #[target_feature(enable = "avx512f")]
        avx512,
        zmm_reg,
        __m512,
        _mm512_set1_ps,
        _mm512_add_ps,
        |sum, factor, term| _mm512_fmadd_ps(sum, factor, term),
        _mm512_cvtss_f32
    );
    products!(
        #[target_feature(enable = "avx512f,avx512bf16")]
        bf16,
        zmm_reg,
        __m512,
        _mm512_set1_ps,
        _mm512_add_ps,
        |sum, factor: __m512, term: __m512| {
            // SAFETY: 64 bytes each; every bit pattern is two bf16. The bits of these numbers read
            // as small finite ones.
            let (factor, term) = unsafe {
                (
                    std::mem::transmute::<__m512, __m512bh>(factor),
                    std::mem::transmute::<__m512, __m512bh>(term),
                )
            };
            _mm512_dpbf16_ps(sum, factor, term)
        },
        _mm512_cvtss_f32
    );

    /// Four tiles of sums: products take 16 cycles each and their sums 52.
    pub unsafe fn tiles(rounds: u64) -> f32 {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        let mut configuration = Configuration([0; 64]);
        configuration.0[0] = 1;
        for tile in 0..8 {
            configuration.0[16 + 2 * tile] = 64;
            configuration.0[48 + tile] = 16;
        }
        // SAFETY: the loop is selected only if the CPU has AMX; the configuration is of eight whole
        // tiles.
        unsafe {
            asm!(
                "ldtilecfg [{configuration}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                configuration = in(reg) configuration.0.as_ptr(),
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        0.0
    }

    #[target_feature(enable = "avx2")]
    pub unsafe fn read_avx2(pattern: usize, data: &[[u64; 8]]) -> u64 {
        read_any(pattern, data)
    }

    #[target_feature(enable = "avx512f")]
    pub unsafe fn read_avx512(pattern: usize, data: &[[u64; 8]]) -> u64 {
        read_any(pattern, data)
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::{CHAINS, black_box};
    use std::arch::aarch64::*;

    /// Two sets of chains: four units with a latency of four need 16.
    pub unsafe fn neon(rounds: u64) -> f32 {
        // SAFETY: NEON is part of every aarch64 CPU.
        unsafe {
            let (factor, term) =
                (vdupq_n_f32(black_box(1.000_000_1)), vdupq_n_f32(black_box(1e-7)));
            let mut sums = [[vdupq_n_f32(black_box(1.0)); CHAINS]; 2];
            for _ in 0..rounds / 2 {
                for sum in sums.as_flattened_mut() {
                    *sum = vfmaq_f32(term, *sum, factor);
                }
            }
            sums.as_flattened().iter().map(|sum| vaddvq_f32(*sum)).sum()
        }
    }
}
