//! AMX, the matrix unit of Intel's newer server CPUs: bf16 matrix products with f32 accumulators.

#[cfg(target_arch = "x86_64")]
mod instructions;
#[cfg(not(target_arch = "x86_64"))]
#[path = "unavailable.rs"]
mod instructions;

pub use instructions::{Tiles, product};

/// Rows of an AMX tile, and columns of 32 bits.
pub const TILE: usize = 16;

/// Depth of one TDPBF16PS: bf16 elements per row of A and per column of B. The instruction sums its
/// own products before it adds them to C.
pub const DEPTH: usize = 32;

/// Columns per product: two tiles.
pub const COLUMNS: usize = 2 * TILE;

/// Rows per product: two tiles.
pub const ROWS: usize = 2 * TILE;

/// `C = A B`, or `C += A B`, for up to two tiles of rows and two of columns.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "it is not read on other architectures")
)]
#[derive(Clone, Copy)]
pub struct AmxProduct {
    /// Rows of bf16. The stride is in bytes, as are the others.
    pub a: *const u8,
    pub a_stride: usize,
    /// Rows of bf16 pairs: row p holds elements 2 p and 2 p + 1 of each column (the VNNI layout).
    pub b: *const u8,
    pub b_stride: usize,
    /// The depth, in steps of [`DEPTH`] elements.
    pub steps: usize,
    /// Rows of f32.
    pub c: *mut u8,
    pub c_stride: usize,
    pub accumulate: bool,
}
