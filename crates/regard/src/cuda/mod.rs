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
pub(crate) mod select;
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

/// How the kernel of a plan is launched: all that is decided before the device knows any length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The module, by its name in [`shipped::MODULES`].
    pub module: &'static str,
    /// The kernel's name in it.
    pub entry: &'static str,
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory a block, in bytes.
    pub shared_bytes: u32,
    /// Bytes of the workspace, the counters at its start included ([`COUNTER_BYTES`]).
    pub workspace_bytes: usize,
    /// Cost units that one thread block takes; 0 where the kernel counts them.
    pub units_a_block: i64,
    /// Partial states that one thread block may leave.
    pub partials_a_block: i32,
    /// Groups of warps that share the keys of a thread block.
    pub key_groups: i32,
}
