//! Selection of a kernel and its tile. Each backend selects among its kernels, by tables and pure
//! functions.

use crate::level::Level;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// Tiled attention on the CPU, for prefill and decode.
    Cpu(Level),
    /// The same with AVX-512 and both products on pairs of bf16 (VDPBF16PS). Probabilities are
    /// rounded to bf16.
    CpuBf16,
    /// The same with both products on the matrix unit (AMX). Few rows (decode) are converted to
    /// f32.
    CpuAmx,
    /// A kernel that ships as device code for NVIDIA GPUs: the name of its module.
    Cuda(&'static str),
    /// A kernel for Apple GPUs: its name in [`metal::source`](crate::metal::source).
    Metal(&'static str),
}

impl Kernel {
    /// Its name in reports: family and architecture.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Cpu(Level::Scalar) => "cpu_scalar",
            Kernel::Cpu(Level::Neon) => "cpu_neon",
            Kernel::Cpu(Level::Avx2) => "cpu_avx2",
            Kernel::Cpu(Level::Avx512) => "cpu_avx512",
            Kernel::CpuBf16 => "cpu_avx512_bf16",
            Kernel::CpuAmx => "cpu_amx_bf16",
            Kernel::Cuda(module) => module,
            Kernel::Metal(function) => function,
        }
    }

    /// The SIMD level whose vectors the kernel uses, if it is one for CPUs.
    pub(crate) fn level(self) -> Option<Level> {
        match self {
            Kernel::Cpu(level) => Some(level),
            Kernel::CpuBf16 | Kernel::CpuAmx => Some(Level::Avx512),
            Kernel::Cuda(_) | Kernel::Metal(_) => None,
        }
    }
}

/// A kernel and its tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The kernel.
    pub kernel: Kernel,
    /// Keys per tile: packed once and used by all rows of a block. Tiles start at multiples of
    /// this.
    pub tile_keys: usize,
    /// Query rows per block (rows of one key/value head: tokens times grouped heads).
    pub block_rows: usize,
    /// The reason for this tile.
    pub reason: String,
}
