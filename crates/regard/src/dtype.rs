//! Types of elements of queries, keys, values, masks and tables.

use crate::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656};
use half::{bf16, f16};
use std::fmt;

/// The type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// 32-bit signed integer: lengths, block tables, tree masks.
    I32,
    /// One byte, zero for false: boolean masks.
    Bool,
    /// [`E4m3`]: codes of a cache.
    E4M3,
    /// [`E5m2`]: codes of a cache.
    E5M2,
    /// 8-bit signed integer: codes of a cache.
    I8,
    /// [`BlockQ8_0`]: 32 values of a cache in 34 bytes.
    Q8_0,
    /// [`BlockQ4_0`]: 32 values of a cache in 18 bytes.
    Q4_0,
    /// [`Mla656`]: a row of a latent cache, 576 values in 656 bytes. The values of attention are a
    /// [prefix](crate::Tensor::prefix) of it.
    Mla656,
    /// The first 512 values of a row of [`Mla656`]: the type of `k.prefix(512)`. An element takes
    /// the 656 bytes of the row that it is a part of.
    Mla656Latent,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Bool | DType::E4M3 | DType::E5M2 | DType::I8 => 1,
            DType::Q8_0 => size_of::<BlockQ8_0>(),
            DType::Q4_0 => size_of::<BlockQ4_0>(),
            DType::Mla656 | DType::Mla656Latent => size_of::<Mla656>(),
        }
    }

    /// Alignment of an element, in bytes.
    pub fn alignment(self) -> usize {
        match self {
            DType::Q8_0 | DType::Q4_0 => align_of::<f16>(),
            DType::Mla656 | DType::Mla656Latent => align_of::<Mla656>(),
            _ => self.size(),
        }
    }

    /// Values per element: 32 in a block of GGUF's, 576 in a row of [`Mla656`], else 1. A last
    /// dimension of `n` elements is a head dim of `n` times that.
    pub fn values(self) -> usize {
        match self {
            DType::Q8_0 | DType::Q4_0 => BLOCK_VALUES,
            DType::Mla656 => Mla656::VALUES,
            DType::Mla656Latent => Mla656::LATENT_VALUES,
            _ => 1,
        }
    }

    /// The type of the first `values` values of rows of this type, as
    /// [`Tensor::prefix`](crate::Tensor::prefix) views them: [`DType::Mla656Latent`] for 512 values
    /// of [`DType::Mla656`], else the same.
    pub fn of_prefix(self, values: usize) -> DType {
        match self {
            DType::Mla656 if values == Mla656::LATENT_VALUES => DType::Mla656Latent,
            _ => self,
        }
    }

    /// Whether elements are whole rows of a latent cache. Such rows exist only with values that are
    /// a prefix of the keys.
    pub fn is_latent_row(self) -> bool {
        matches!(self, DType::Mla656 | DType::Mla656Latent)
    }

    /// Whether queries and outputs can have this type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// Whether elements are codes, which need a scale beside them.
    pub fn is_code(self) -> bool {
        matches!(self, DType::E4M3 | DType::E5M2 | DType::I8)
    }

    /// Whether an element is a block of values with its own scale.
    pub fn is_block(self) -> bool {
        self.values() > 1
    }

    /// The largest magnitude of a code; 0 for types that are none.
    pub fn largest_code(self) -> f32 {
        match self {
            DType::E4M3 => E4m3::MAX,
            DType::E5M2 => E5m2::MAX,
            DType::I8 => 127.0,
            _ => 0.0,
        }
    }

    /// The gap between 1 and the next number: 2^-23, 2^-10, 2^-7; 0 for types that are not
    /// floating.
    pub fn epsilon(self) -> f64 {
        match self {
            DType::F32 => f64::from(f32::EPSILON),
            DType::F16 => f64::from(f16::EPSILON),
            DType::BF16 => f64::from(bf16::EPSILON),
            _ => 0.0,
        }
    }

    /// The lower-case name: `f32`, `f16`, `bf16`, `i32`, `bool`, `e4m3`, `e5m2`, `i8`, `q8_0`,
    /// `q4_0`, `mla656`, `mla656_latent`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::Bool => "bool",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            DType::I8 => "i8",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Mla656 => "mla656",
            DType::Mla656Latent => "mla656_latent",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that a tensor can hold.
pub trait Element: Copy + sealed::Sealed + Send + Sync + 'static {
    /// Its run-time name.
    const DTYPE: DType;
}

/// An [`Element`] that queries, keys, values and outputs can have.
pub trait Float: Element {
    /// Zero, to fill a new buffer with.
    const ZERO: Self;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type { const DTYPE: DType = DType::$dtype; }
    )*};
}
elements!(
    f32 => F32, f16 => F16, bf16 => BF16, i32 => I32, bool => Bool, u8 => Bool,
    E4m3 => E4M3, E5m2 => E5M2, i8 => I8, BlockQ8_0 => Q8_0, BlockQ4_0 => Q4_0,
    Mla656 => Mla656
);

impl Float for f32 {
    const ZERO: f32 = 0.0;
}
impl Float for f16 {
    const ZERO: f16 = f16::ZERO;
}
impl Float for bf16 {
    const ZERO: bf16 = bf16::ZERO;
}
