//! The vector layer: a small trait over SIMD vectors of f32, one implementation per level, and the
//! elementary functions (exp2, tanh) written on it.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
pub mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod avx512_pairs;
#[cfg(target_arch = "x86_64")]
pub mod avx512_vbmi;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod scalar;

use crate::format::{E4m3, E5m2};
use half::{bf16, f16};

/// Values of a row that are read as pairs together.
pub const UNIT_DIMS: usize = 64;

/// A format of rows that are read as pairs of bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PairFormat {
    Bf16,
    I8,
    E4m3,
    Q8_0,
    Q4_0,
}

impl PairFormat {
    /// Whether [`Vector::load_pairs`] leaves values in their order.
    pub const fn is_in_order(self) -> bool {
        matches!(self, PairFormat::Bf16 | PairFormat::I8)
    }
}

/// A vector of `LANES` 32-bit floats.
///
/// # Safety
/// Every method needs the CPU features of its level and must be inlined into a function that
/// enables them. Pointers are valid for `LANES` elements; no alignment is required. Implementations
/// are `#[inline(always)]`.
pub trait Vector: Copy {
    /// Floats per vector.
    const LANES: usize;
    /// Vectors per row of the widest register tile.
    const TILE_VECTORS: usize;
    /// Accumulators of [`dots`](crate::cpu::product::dots::dots): a multiple of LANES, at most 16.
    const DOT_SUMS: usize;

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
    /// The larger; `other` if either is NaN (NEON: NaN).
    unsafe fn max(self, other: Self) -> Self;
    /// The smaller; `other` if either is NaN (NEON: NaN).
    unsafe fn min(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// The magnitude of self with the sign of `sign`. Self must not be negative.
    unsafe fn with_sign_of(self, sign: Self) -> Self;
    /// Per lane: `if self < bound { below } else { other }`.
    unsafe fn select_below(self, bound: Self, below: Self, other: Self) -> Self;
    /// Rounds to the nearest integer, ties to even. NaN stays NaN.
    unsafe fn round(self) -> Self;
    /// 2^self for an integer in -127..=127; -127 gives 0.
    unsafe fn power_of_two(self) -> Self;
    /// 2^self for self <= 127. Results below 2^-126 are flushed to 0; NaN stays NaN.
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // SAFETY: same contract.
        unsafe { exp2(self) }
    }
    /// 4^self for self <= 63.5. Results below 2^-126 are flushed to 0; NaN stays NaN.
    #[inline(always)]
    unsafe fn exp4(self) -> Self {
        // SAFETY: same contract. Doubling is exact, or overflows to -inf, whose exponential is 0.
        unsafe { self.add(self).exp2() }
    }
    unsafe fn reduce_max(self) -> f32;
    unsafe fn reduce_add(self) -> f32;
    /// Transposes `LANES` rows of `LANES` elements. The rows of the result are `stride` floats
    /// apart.
    unsafe fn transpose<E: Storage>(from: &[*const E; 16], to: *mut f32, stride: usize);
    /// Horizontal sums of the first `DOT_SUMS` vectors.
    unsafe fn sums(vectors: &[Self; 16], to: *mut f32);
    /// Prefetches the cache line of `address` into L2. Not L1: rows a page apart map to a few L1
    /// sets and would evict each other.
    unsafe fn prefetch(address: *const u8);
    /// Each lane holds a pair of bf16: multiplies the pairs element by element and adds both
    /// products to `addend` in f32 (VDPBF16PS). This and the other pair methods exist only on
    /// levels that run `PAIRED` code.
    unsafe fn pair_mul_add(self, _factor: Self, _addend: Self) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// [`Vector::pair_mul_add`] with the pair at `factors + OFFSET` in all lanes, which the
    /// instruction itself reads.
    unsafe fn pair_mul_add_at<const OFFSET: usize>(
        self,
        _factors: *const f32,
        _addend: Self,
    ) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// Lane i holds the pair (`low[i]`, `high[i]`), `low[i]` in the low half.
    unsafe fn interleave(_low: *const bf16, _high: *const bf16) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// [`Vector::interleave`] for all vectors of `to`.
    #[inline(always)]
    unsafe fn interleave_all(low: *const bf16, high: *const bf16, to: &mut [Self]) {
        for (n, to) in to.iter_mut().enumerate() {
            // SAFETY: the caller guarantees LANES elements per vector of `to` at both pointers.
            *to = unsafe { Self::interleave(low.add(n * Self::LANES), high.add(n * Self::LANES)) };
        }
    }
    /// Rounds to bf16 like `store_bf16`, but may flush denormals to 0.
    unsafe fn store_paired(self, _to: *mut bf16) {
        unreachable!("this level has no bf16 products")
    }
    /// `count` values of a row from `first` on as pairs, a multiple of LANES up to [`UNIT_DIMS`],
    /// in the order of [`Vector::arrange_pairs`]. Missing elements are 0.
    unsafe fn load_pairs(
        _format: PairFormat,
        _row: *const u8,
        _first: usize,
        _count: usize,
    ) -> [Self; 2] {
        unreachable!("this level has no bf16 products")
    }
    /// Puts [`UNIT_DIMS`] elements of bf16 into the order in which [`Vector::load_pairs`] leaves
    /// those of another format.
    unsafe fn arrange_pairs(_format: PairFormat, _pairs: [Self; 2]) -> [Self; 2] {
        unreachable!("this level has no bf16 products")
    }
    /// The codes of the blocks at `offset` of LANES keys, a key per lane, for
    /// [`Vector::block_columns`].
    unsafe fn block_codes(
        _format: PairFormat,
        _keys: &[*const u8; 16],
        _offset: isize,
    ) -> [Self; 8] {
        unreachable!("this level has no bf16 products")
    }
    /// A quarter of the blocks' codes as pairs: vector i holds pair 4 * quarter + i of all blocks,
    /// in the order of [`Vector::arrange_block`].
    unsafe fn block_columns(_format: PairFormat, _codes: &[Self; 8], _quarter: usize) -> [Self; 4] {
        unreachable!("this level has no bf16 products")
    }
    /// The elements of a query that a block of keys is multiplied by, in the order of
    /// [`Vector::block_columns`].
    unsafe fn arrange_block(_format: PairFormat, _elements: *const bf16) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// Stores the first `count` lanes, at least one.
    unsafe fn store_first(self, _to: *mut f32, _count: usize) {
        unreachable!("this level has no bf16 products")
    }
    /// The half-precision numbers at `offset` of LANES rows. They need not be aligned.
    unsafe fn gather_f16(_rows: &[*const u8; 16], _offset: isize) -> Self {
        unreachable!("this level has no bf16 products")
    }
    /// [`Vector::interleave_all`] of rows of a format. Codes of blocks are not multiplied by their
    /// scales.
    unsafe fn interleave_rows(_format: PairFormat, _rows: [*const u8; 2], _to: &mut [Self]) {
        unreachable!("this level has no bf16 products")
    }

    /// One half-precision number in all lanes. It need not be aligned.
    #[inline(always)]
    unsafe fn splat_f16(from: *const f16) -> Self {
        // SAFETY: the caller guarantees one element.
        unsafe { Self::splat(from.read_unaligned().to_f32()) }
    }
    /// The codes of an `i8` cache.
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        // SAFETY: same contract.
        unsafe { load_codes(from, f32::from) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(from: *const E4m3) -> Self {
        // SAFETY: same contract.
        unsafe { load_codes(from, E4m3::to_f32) }
    }
    /// Converts the first of `count` codes to f32: all, some or none. Returns the number of
    /// converted codes.
    #[inline(always)]
    unsafe fn convert_e4m3_row(_from: *const E4m3, _to: *mut f32, _count: usize) -> usize {
        0
    }
    /// Converts the first of `count` codes to bf16: all, some or none. Returns the number of
    /// converted codes. For levels that run `PAIRED` code.
    #[inline(always)]
    unsafe fn convert_e4m3_pairs(_from: *const E4m3, _to: *mut bf16, _count: usize) -> usize {
        0
    }
    #[inline(always)]
    unsafe fn load_e5m2(from: *const E5m2) -> Self {
        // SAFETY: same contract.
        unsafe { load_codes(from, E5m2::to_f32) }
    }
    /// `scale` times the codes in `LANES` bytes of a [`BlockQ4_0`](crate::format::BlockQ4_0): the
    /// codes in the low four bits, and the codes in the high four bits.
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8, scale: Self) -> [Self; 2] {
        // SAFETY: same contract.
        unsafe {
            let low = load_codes(from, |byte: u8| f32::from(byte & 15) - 8.0);
            let high = load_codes(from, |byte: u8| f32::from(byte >> 4) - 8.0);
            [scale.mul(low), scale.mul(high)]
        }
    }

    /// Rounds to nearest, ties to even.
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut f16) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: no vector has more than 16 lanes; the caller guarantees LANES elements at `to`.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (i, &lane) in lanes.iter().enumerate().take(Self::LANES) {
                *to.add(i) = f16::from_f32(lane);
            }
        }
    }

    /// Rounds to nearest, ties to even.
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

/// `LANES` codes of one byte, converted one by one.
///
/// # Safety
/// As [`Vector`]'s methods.
#[inline(always)]
unsafe fn load_codes<V: Vector, Code: Copy>(from: *const Code, value: impl Fn(Code) -> f32) -> V {
    let mut lanes = [0.0f32; 16];
    // SAFETY: no vector has more than 16 lanes; the caller guarantees LANES codes.
    unsafe {
        for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
            *lane = value(*from.add(i));
        }
        V::load(lanes.as_ptr())
    }
}

/// An element type of queries, keys, values, masks and outputs.
pub trait Storage: Copy {
    /// Index of the type in function tables.
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
                // SAFETY: same contract.
                unsafe { V::$load(from) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
                // SAFETY: same contract.
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

/// 2^x for x <= 127. Results below 2^-126 are flushed to 0; NaN stays NaN.
///
/// x = n + f with n the nearest integer. 2^f on [-1/2, 1/2] is a polynomial of degree 6 (Remez)
/// with a relative error of 1.9e-9, below f32 rounding.
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
    // SAFETY: inlined into a function that enables V's features.
    unsafe {
        // `max` returns its argument if either is NaN, so NaN propagates.
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

/// tanh(x), accurate to a few ulp at any magnitude.
///
/// |x| < 0.6: x + x^3 P(x^2) with P of degree 4 (Remez, relative error 5e-9). Otherwise
/// 1 - 2 / (e^2x + 1), which has no cancellation there.
#[inline(always)]
pub unsafe fn tanh<V: Vector>(x: V) -> V {
    const P: [f32; 5] =
        [-0.333_333_07, 0.133_319_78, -0.053_776_986, 0.020_744_895, -0.005_810_691];
    const TWO_LOG2_E: f32 = 2.0 * std::f32::consts::LOG2_E;
    // SAFETY: inlined into a function that enables V's features.
    unsafe {
        let magnitude = x.abs();
        let square = x.mul(x);
        let mut p = V::splat(P[4]);
        p = p.mul_add(square, V::splat(P[3]));
        p = p.mul_add(square, V::splat(P[2]));
        p = p.mul_add(square, V::splat(P[1]));
        p = p.mul_add(square, V::splat(P[0]));
        let small = p.mul(square).mul_add(x, x);
        // tanh(10) rounds to 1, so clamp to keep the exponential finite. `min` returns its argument
        // if either is NaN, so NaN propagates.
        let clamped = V::splat(10.0).min(magnitude);
        let exponential = clamped.mul(V::splat(TWO_LOG2_E)).exp2();
        let one = V::splat(1.0);
        let large = one.sub(V::splat(2.0).div(exponential.add(one))).with_sign_of(x);
        magnitude.select_below(V::splat(0.6), small, large)
    }
}
