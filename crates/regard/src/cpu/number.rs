//! Elements of floating tensors as f32, for code that is not compiled per SIMD level.

use half::{bf16, f16};

/// An element type of queries, keys, values and outputs.
pub trait Number: Copy {
    fn to_f32(self) -> f32;
    /// Rounded to the nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Number for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Number for f16 {
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

impl Number for bf16 {
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}
