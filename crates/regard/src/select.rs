//! Which kernel runs a problem on a machine: a table and a pure function, or a reason why none
//! does.

use crate::cpu::{Bf16Products, Level};
use crate::error::{Error, Refusal};
use crate::machine::{CpuFacts, Device, Machine};
use crate::problem::Problem;
use crate::tensor::DType;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// Tiled attention on the CPU, prefill and decode alike.
    Cpu(Level),
    /// The same with AVX-512 and both products on pairs of bf16 (VDPBF16PS). Probabilities are
    /// rounded to bf16.
    CpuBf16,
    /// The same with both products on the matrix unit (AMX). Few rows (decode) are converted to
    /// f32.
    CpuAmx,
    /// One that ships as device code for NVIDIA GPUs: the name of its module.
    Cuda(&'static str),
    /// One of those for Apple GPUs: its name in [`metal::source`](crate::metal::source).
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
    /// Sequences with at most this many query rows per key/value head stream keys and values in
    /// place, without packing. 0 in batch-invariant mode, because streaming sums in another order,
    /// and if head dims are not whole vectors. Then all sequences pack.
    pub stream_rows: usize,
    /// Why this tile.
    pub reason: String,
}

/// One line of the CPU table: the tile for Dk + Dv up to `dims`.
pub(crate) struct CpuTile {
    pub dims: usize,
    pub tile_keys: usize,
    pub block_rows: usize,
}

/// A block's queries and outputs (`block_rows * (Dk + Dv)`) and a tile's keys and values
/// (`tile_keys * (Dk + Dv)`), all f32, share a core's L2 cache. Its common size is 1 MiB: each line
/// stays under 3/4 of it.
pub(crate) const CPU_TILES: [CpuTile; 3] = [
    CpuTile { dims: 256, tile_keys: 128, block_rows: 512 },
    CpuTile { dims: 512, tile_keys: 128, block_rows: 256 },
    CpuTile { dims: 1152, tile_keys: 64, block_rows: 96 },
];

/// The kernel for a problem on a machine.
///
/// # Errors
/// [`Error::Argument`] if the problem's numbers make no sense together, [`Error::Refused`] with the
/// reason why nothing runs it there.
pub fn select(problem: &Problem, machine: &Machine) -> Result<Choice, Error> {
    problem.validate()?;
    match &machine.device {
        Device::Cpu(facts) => Ok(select_cpu(problem, facts, machine)?),
        Device::Cuda(facts) => Ok(crate::cuda::select::select(problem, facts, machine)?.0),
        Device::Metal(facts) => Ok(crate::metal::select::select(problem, facts, machine)?.0),
    }
}

/// The kernel for a problem that has been checked.
fn select_cpu(problem: &Problem, facts: &CpuFacts, machine: &Machine) -> Result<Choice, Refusal> {
    // The fields are public, so they may disagree. `run` checks that this CPU has the level: a plan
    // may be for another machine.
    if facts.bf16_products != Bf16Products::Widened && facts.level != Level::Avx512 {
        let reason = format!(
            "its facts disagree: bf16 as {} take the level {}, and its level is {}",
            facts.bf16_products,
            Level::Avx512,
            facts.level
        );
        return Err(Refusal { machine: machine.to_string(), reason });
    }
    let dims = problem.head_dim + problem.value_dim;
    // Pairs run along the head dim of keys: with an odd head dim the last element has no partner.
    let paired = problem.dtype == DType::BF16 && problem.head_dim.is_multiple_of(2);
    let kernel = match facts.bf16_products {
        Bf16Products::Pairs if paired => Kernel::CpuBf16,
        Bf16Products::Tiles if paired => Kernel::CpuAmx,
        _ => Kernel::Cpu(facts.level),
    };
    // The lanes of the kernel's level: streaming reads whole vectors of keys and values in place.
    let lanes = kernel.level().expect("a kernel for CPUs").lanes();
    let whole = problem.head_dim.is_multiple_of(lanes) && problem.value_dim.is_multiple_of(lanes);
    let tile = CPU_TILES
        .iter()
        .find(|tile| dims <= tile.dims)
        .expect("the last line takes the largest head dim");
    Ok(Choice {
        kernel,
        tile_keys: tile.tile_keys,
        block_rows: tile.block_rows,
        stream_rows: if whole && !problem.batch_invariant {
            crate::cpu::MAX_STREAM_ROWS
        } else {
            0
        },
        reason: format!(
            "Dk + Dv = {dims} <= {}: {} keys per tile and {} rows per block take {} KiB of a core's L2 cache",
            tile.dims,
            tile.tile_keys,
            tile.block_rows,
            ((tile.tile_keys + tile.block_rows) * dims * 4) >> 10
        ),
    })
}
