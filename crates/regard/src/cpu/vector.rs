//! The little that the kernel asks of a vector unit, and the elementary functions written on it.

use half::{bf16, f16};

/// A vector of `LANES` 32-bit floats.
///
/// # Safety
/// Every method needs the CPU features of its level, and is only called below an entry point that has them enabled; pointers are
/// valid for `LANES` elements (no alignment is asked for). Implementations are `#[inline(always)]` so that they melt into that entry.
pub(super) trait Vector: Copy {
    /// Floats a vector.
    const LANES: usize;
    /// Vectors a row of the widest register tile.
    const COLUMNS: usize;
    /// Dot products that are accumulated together: a multiple of LANES, at most 16.
    const DOTS: usize;

    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const f16) -> Self;
    unsafe fn load_bf16(from: *const bf16) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once where the hardware can.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The greater; `other` if either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    /// The lesser; `other` if either is NaN.
    unsafe fn min(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Magnitude of self, sign of `sign`. Self is not negative.
    unsafe fn with_sign_of(self, sign: Self) -> Self;
    /// `if self < bound { below } else { other }`, lane by lane.
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self;
    /// To the nearest integer, ties to even. NaN stays NaN.
    unsafe fn round(self) -> Self;
    /// 2 to the power of self, which is an integer in -127..=127; -127 gives 0.
    unsafe fn power_of_two(self) -> Self;
    /// 2 to the power of self, which is at most 127. Below 2^-126 the result is 0; NaN stays NaN.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: the caller's word.
        unsafe { exp2(self) }
    }
    unsafe fn reduce_max(self) -> f32;
    unsafe fn reduce_add(self) -> f32;
    /// The transpose of `LANES` rows of `LANES` elements, to rows `stride` apart at `to`.
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize);
    /// The sum of the lanes of each of the first `DOTS` vectors.
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32);
    /// Asks for the cache line of `address`, into the second level: rows a page apart share a few sets of the first, which
    /// could not keep them.
    unsafe fn prefetch(address: *const u8);
    /// With both operands' lanes taken as pairs of bf16: the products of the pairs, added to `addend` in f32. Only levels that run
    /// `PAIRED` code have it, and those below.
    unsafe fn pair_mul_add(self, _factor: Self, _addend: Self) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// Lane i holds `low[i]` and, above it, `high[i]`.
    unsafe fn interleave(_low: *const bf16, _high: *const bf16) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// The same for as many lanes as `to` has.
    #[inline(always)]
    unsafe fn interleave_all(low: *const bf16, high: *const bf16, to: &mut [Self]) {
        for (n, to) in to.iter_mut().enumerate() {
            // SAFETY: both pointers hold LANES elements for each vector of `to`, by the caller's word.
            *to = unsafe { Self::interleave(low.add(n * Self::LANES), high.add(n * Self::LANES)) };
        }
    }
    /// Rounded to bf16 as `store_bf16` does; numbers too small to be normal may become 0.
    unsafe fn store_paired(self, _to: *mut bf16) {
        unreachable!("this level has no bf16 products")
    }
    /// `count` elements, a multiple of LANES and at most twice LANES, as pairs; zeros above.
    unsafe fn load_pairs(_from: *const bf16, _count: usize) -> Self {
        unreachable!("this level has no bf16 products")
    }

    /// Rounded to nearest, ties to even.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: 16 is the widest vector; `to` holds LANES elements by the caller's word.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (i, &lane) in lanes.iter().enumerate().take(Self::LANES) {
                *to.add(i) = f16::from_f32(lane);
            }
        }
    }

    /// Rounded to nearest, ties to even.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: as `store_f16`.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (i, &lane) in lanes.iter().enumerate().take(Self::LANES) {
                *to.add(i) = bf16::from_f32(lane);
            }
        }
    }
}

/// An element type that queries, keys, values, masks and outputs can have, as the kernel loads and stores it.
pub(super) trait Storage: Copy {
    /// Its place in tables of functions.
    const INDEX: usize;
    /// # Safety
    /// As [`Vector`]'s methods.
    unsafe fn load<V: Vector>(from: *const Self) -> V;
    /// # Safety
    /// As [`Vector`]'s methods.
    unsafe fn store<V: Vector>(vector: V, to: *mut Self);
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

macro_rules! storage {
    ($index:literal, $type:ty, $load:ident, $store:ident, $widen:expr, $narrow:expr) => {
        impl Storage for $type {
            const INDEX: usize = $index;
            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                // SAFETY: passed on.
                unsafe { V::$load(from) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
                // SAFETY: passed on.
                unsafe { vector.$store(to) }
            }
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(value: f32) -> Self {
                $narrow(value)
            }
        }
    };
}
storage!(0, f32, load, store, std::convert::identity, std::convert::identity);
storage!(1, f16, load_f16, store_f16, f16::to_f32, f16::from_f32);
storage!(2, bf16, load_bf16, store_bf16, bf16::to_f32, bf16::from_f32);

/// 2^x for x <= 127. Below 2^-126 the result is 0; NaN stays NaN.
///
/// x = n + f with n the nearest integer; 2^f on [-1/2, 1/2] is a polynomial of degree 6 (Remez, relative error 1.9e-9, so
/// that f32 rounding dominates).
#[inline(always)]
unsafe fn exp2<V: Vector>(x: V) -> V {
    const C: [f32; 7] = [
        1.0,
        std::f32::consts::LN_2,
        0.240_226_47,
        0.055_503_29,
        0.009_618_489,
        0.001_339_993_1,
        0.000_153_458_12,
    ];
    // SAFETY: the caller runs below an entry with V's features.
    unsafe {
        // `max` gives its argument where either is NaN: NaN goes on.
        let x = V::splat(-127.0).max(x);
        let n = x.round();
        let f = x.sub(n);
        let mut p = V::splat(C[6]);
        p = p.mul_add(f, V::splat(C[5]));
        p = p.mul_add(f, V::splat(C[4]));
        p = p.mul_add(f, V::splat(C[3]));
        p = p.mul_add(f, V::splat(C[2]));
        p = p.mul_add(f, V::splat(C[1]));
        p = p.mul_add(f, V::splat(C[0]));
        p.mul(n.power_of_two())
    }
}

/// tanh(x), to a few units in the last place at any magnitude.
///
/// Below 0.6: x + x^3 P(x^2), P of degree 4 (Remez, relative error 5e-9). Above: 1 - 2 / (e^2x + 1), where nothing cancels.
#[inline(always)]
pub(super) unsafe fn tanh<V: Vector>(x: V) -> V {
    const P: [f32; 5] = [-0.333_333_07, 0.133_319_78, -0.053_776_986, 0.020_744_895, -0.005_810_691];
    const TWO_LOG2_E: f32 = 2.0 * std::f32::consts::LOG2_E;
    // SAFETY: the caller runs below an entry with V's features.
    unsafe {
        let magnitude = x.abs();
        let square = x.mul(x);
        let mut p = V::splat(P[4]);
        p = p.mul_add(square, V::splat(P[3]));
        p = p.mul_add(square, V::splat(P[2]));
        p = p.mul_add(square, V::splat(P[1]));
        p = p.mul_add(square, V::splat(P[0]));
        let small = p.mul(square).mul_add(x, x);
        // tanh(10) rounds to 1: clamping keeps the exponential finite. `min` gives its argument where either is NaN.
        let clamped = V::splat(10.0).min(magnitude);
        let exponential = clamped.mul(V::splat(TWO_LOG2_E)).exp2();
        let one = V::splat(1.0);
        let large = one.sub(V::splat(2.0).div(exponential.add(one))).with_sign_of(x);
        magnitude.select_below(V::splat(0.6), small, large)
    }
}
