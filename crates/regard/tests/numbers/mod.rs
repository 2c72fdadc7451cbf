//! Numbers of every floating type, the same in every run.

use regard::{Float, bf16, f16};

/// A floating type, to and from f64.
pub trait Number: Float + PartialEq + std::fmt::Debug {
    fn to_f64(self) -> f64;
    fn from_f64(x: f64) -> Self;
}

impl Number for f32 {
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
}

impl Number for f16 {
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn from_f64(x: f64) -> f16 {
        f16::from_f64(x)
    }
}

impl Number for bf16 {
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn from_f64(x: f64) -> bf16 {
        bf16::from_f64(x)
    }
}

/// Numbers from -1 to 1 (splitmix64).
pub fn numbers<T: Number>(seed: u64, count: usize) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) as f64 / 2f64.powi(63) - 1.0
    };
    (0..count).map(|_| T::from_f64(next())).collect()
}
