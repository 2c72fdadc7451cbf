//! Portable Rust on arrays of four floats, compiled for the target's baseline.

#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each method is one or two instructions under the trait's contract: an unsafe block \
              in each would add nothing"
)]

use super::{Storage, Vector};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub struct Scalar([f32; 4]);

impl Scalar {
    #[inline(always)]
    fn map(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

impl Vector for Scalar {
    const LANES: usize = 4;
    const TILE_VECTORS: usize = 2;
    const DOT_SUMS: usize = 8;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Scalar([value; 4])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Scalar(from.cast::<[f32; 4]>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        Scalar(from.cast::<[f16; 4]>().read_unaligned().map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        Scalar(from.cast::<[bf16; 4]>().read_unaligned().map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        to.cast::<[f32; 4]>().write_unaligned(self.0)
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.map(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.map(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.map(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.map(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // Rounds twice: `f32::mul_add` is a library call on a baseline without FMA.
        Scalar(std::array::from_fn(|i| self.0[i] * factor.0[i] + addend.0[i]))
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.map(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.map(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        Scalar(self.0.map(f32::abs))
    }
    #[inline(always)]
    unsafe fn with_sign_of(self, sign: Self) -> Self {
        self.map(sign, f32::copysign)
    }
    #[inline(always)]
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self {
        Scalar(std::array::from_fn(
            |i| if self.0[i] < bound.0[i] { below.0[i] } else { other.0[i] },
        ))
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even, for
        // |x| < 2^22. Callers stay below 128. (`round_ties_even` is a library call on this
        // baseline.)
        const SHIFT: f32 = 12_582_912.0;
        Scalar(self.0.map(|x| (x + SHIFT) - SHIFT))
    }
    #[inline(always)]
    unsafe fn power_of_two(self) -> Self {
        Scalar(
            self.0.map(|n| {
                if n.is_nan() { n } else { f32::from_bits(((n as i32 + 127) as u32) << 23) }
            }),
        )
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        let [a, b, c, d] = self.0;
        let greater = |a: f32, b: f32| if a > b { a } else { b };
        greater(greater(a, b), greater(c, d))
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }
    #[inline(always)]
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize) {
        for (i, &row) in from.iter().enumerate().take(4) {
            for column in 0..4 {
                *to.add(column * stride + i) = (*row.add(column)).widen();
            }
        }
    }
    #[inline(always)]
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32) {
        for (i, vector) in vectors.iter().enumerate().take(Self::DOT_SUMS) {
            *to.add(i) = vector.reduce_add();
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_address: *const u8) {}
}
