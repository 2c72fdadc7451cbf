//! NVIDIA GPUs.
//!
//! What is decided without one (which shipped kernel runs, how it is launched, what workspace it needs) is always here, so that a plan for a
//! GPU can be made and read anywhere. Running one takes the feature `cuda`, and at run time the driver and nothing else: `docs/cuda.md`.

#[cfg(feature = "cuda")]
mod append;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod modules;
#[cfg(any(feature = "cuda", test))]
mod schedule;
pub(crate) mod select;
mod shape;
pub mod shipped;
#[cfg(feature = "cuda")]
mod tensor;
#[cfg(feature = "cuda")]
mod workspace;

#[cfg(feature = "cuda")]
pub use append::{Append, Rotary};
#[cfg(feature = "cuda")]
pub use cudarc;
#[cfg(feature = "cuda")]
pub use driver::failed;
#[cfg(feature = "cuda")]
pub use gpu::{Gpu, GpuInfo, gpus};
#[cfg(feature = "cuda")]
pub use modules::inside;
#[cfg(feature = "cuda")]
pub use tensor::{DeviceMemory, Lent, LentMut};
#[cfg(feature = "cuda")]
pub use workspace::Workspace;

/// Bytes at the start of every workspace that are zero before and after a run: one counter a thread block.
pub const COUNTER_BYTES: usize = 4096;

/// What the address of a workspace is a multiple of.
pub const WORKSPACE_ALIGNMENT: u64 = 16;

/// How the kernel of a plan is launched: all that is decided before any length is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launch {
    /// The module, by its name in [`shipped::MODULES`].
    pub module: &'static str,
    /// The module that runs in its place where operands turn out to lie in memory as that one cannot read them (rows that do not start at
    /// multiples of 16 bytes); gives the same results, to the bit.
    pub general: &'static str,
    /// The kernel's name in both.
    pub entry: &'static str,
    /// Thread blocks, at most.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Bytes of the workspace, the counters at its start included ([`COUNTER_BYTES`]).
    pub workspace_bytes: usize,
    /// Partial states that one thread block may leave.
    pub partials_a_block: i32,
    /// Groups of warps that share the keys of a thread block.
    pub key_groups: i32,
    /// Query rows a tile.
    pub tile_rows: i32,
    /// Keys a unit of cost: a power of 2.
    pub unit_keys: i32,
    /// Units of cost that starting a tile counts for, where lengths differ.
    pub start_units: i32,
    /// Whether the problem's head dims are those that the modules are compiled for.
    pub whole_rows: bool,
}
