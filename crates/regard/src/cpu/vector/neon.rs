//! NEON: 4 lanes, 32 registers; a register tile of 6 rows by 4 vectors.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each method is one or two instructions under the trait's contract: an unsafe block \
              in each would add nothing"
)]

use super::{Storage, Vector};
use crate::format::{E4m3, E5m2};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

#[derive(Clone, Copy)]
pub struct Neon(float32x4_t);

impl Neon {
    #[inline(always)]
    unsafe fn from_f16(narrow: uint16x4_t) -> Neon {
        // The intrinsic needs the unstable f16 type. The instruction is baseline ARMv8.
        let wide: float32x4_t;
        asm!("fcvtl {wide:v}.4s, {narrow:v}.4h", wide = out(vreg) wide, narrow = in(vreg) narrow,
            options(pure, nomem, nostack, preserves_flags));
        Neon(wide)
    }
}

/// Four bytes in the low half of a vector.
#[inline(always)]
unsafe fn load_bytes(from: *const u8) -> uint8x8_t {
    vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()))
}

impl Vector for Neon {
    const LANES: usize = 4;
    const TILE_VECTORS: usize = 4;
    const DOT_SUMS: usize = 16;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Neon(vdupq_n_f32(value))
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Neon(vld1q_f32(from))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        Neon::from_f16(vld1_u16(from.cast()))
    }
    #[inline(always)]
    unsafe fn splat_f16(from: *const f16) -> Self {
        Neon::from_f16(vdup_n_u16(from.cast::<u16>().read_unaligned()))
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        let words = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_bytes(from.cast()))));
        Neon(vcvtq_f32_s32(vmovl_s16(words)))
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const E4m3) -> Self {
        // The bits of exponent and mantissa in their places of an f16, whose exponent bias is 8
        // more.
        let codes = vget_low_u16(vmovl_u8(load_bytes(from.cast())));
        let largest = vdup_n_u16(0x3f80);
        let magnitude = vand_u16(vshl_n_u16::<7>(codes), largest);
        let nan = vand_u16(vceq_u16(magnitude, largest), vdup_n_u16(0x7e00));
        let sign = vand_u16(vshl_n_u16::<8>(codes), vdup_n_u16(0x8000));
        let halves = vorr_u16(vorr_u16(magnitude, nan), sign);
        Neon(vmulq_n_f32(Neon::from_f16(halves).0, 256.0))
    }
    #[inline(always)]
    unsafe fn load_e5m2(from: *const E5m2) -> Self {
        let codes = vget_low_u16(vmovl_u8(load_bytes(from.cast())));
        Neon::from_f16(vshl_n_u16::<8>(codes))
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, scale: Self) -> [Self; 2] {
        let bytes = load_bytes(from);
        let low = vand_u8(bytes, vdup_n_u8(15));
        let (low, high) = (vreinterpret_s8_u8(low), vreinterpret_s8_u8(vshr_n_u8::<4>(bytes)));
        let low = vmovl_s16(vget_low_s16(vmovl_s8(vsub_s8(low, vdup_n_s8(8)))));
        let high = vmovl_s16(vget_low_s16(vmovl_s8(vsub_s8(high, vdup_n_s8(8)))));
        [
            Neon(vmulq_f32(vcvtq_f32_s32(low), scale.0)),
            Neon(vmulq_f32(vcvtq_f32_s32(high), scale.0)),
        ]
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        Neon(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast()))))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        vst1q_f32(to, self.0)
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        let narrow: uint16x4_t;
        asm!("fcvtn {narrow:v}.4h, {wide:v}.4s", narrow = out(vreg) narrow, wide = in(vreg) self.0,
            options(pure, nomem, nostack, preserves_flags));
        vst1_u16(to.cast(), narrow);
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Neon(vaddq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        Neon(vsubq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Neon(vmulq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Neon(vdivq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        Neon(vfmaq_f32(addend.0, self.0, factor.0))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        // FMAX returns NaN if either operand is NaN. The trait allows it: callers propagate NaN.
        Neon(vmaxq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Neon(vminq_f32(self.0, other.0))
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Neon(vabsq_f32(self.0))
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, sign: Self) -> Self {
        Neon(vbslq_f32(vdupq_n_u32(1 << 31), sign.0, self.0))
    }
    #[inline(always)]
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self {
        Neon(vbslq_f32(vcltq_f32(self.0, bound.0), below.0, other.0))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        Neon(vrndnq_f32(self.0))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        let biased = vaddq_s32(vcvtnq_s32_f32(self.0), vdupq_n_s32(127));
        Neon(vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        vmaxvq_f32(self.0)
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        vaddvq_f32(self.0)
    }
    #[inline(always)]
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize) {
        let (r0, r1) = (E::load::<Self>(from[0]).0, E::load::<Self>(from[1]).0);
        let (r2, r3) = (E::load::<Self>(from[2]).0, E::load::<Self>(from[3]).0);
        let even01 = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1));
        let odd01 = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
        let even23 = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3));
        let odd23 = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
        vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
        vst1q_f32(to.add(stride), vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
        vst1q_f32(to.add(2 * stride), vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
        vst1q_f32(to.add(3 * stride), vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
    }
    #[inline(always)]
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32) {
        for q in 0..4 {
            let ab = vpaddq_f32(vectors[4 * q].0, vectors[4 * q + 1].0);
            let cd = vpaddq_f32(vectors[4 * q + 2].0, vectors[4 * q + 3].0);
            vst1q_f32(to.add(4 * q), vpaddq_f32(ab, cd));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(address: *const u8) {
        asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly))
    }
}
