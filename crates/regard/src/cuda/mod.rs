//! NVIDIA GPUs.
//!
//! What is decided without one (which shipped kernel runs, how it is launched, what workspace it needs) is always here, so that a plan for a
//! GPU can be made and read anywhere.

pub(crate) mod select;
pub mod shipped;

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
    /// Bytes at the start of the workspace that are zero before and after every run: counters.
    pub counter_bytes: usize,
    /// Bytes of the workspace, counters included.
    pub workspace_bytes: usize,
    /// Cost units that one thread block takes; 0 where the kernel counts them.
    pub units_a_block: i64,
    /// Partial states that one thread block may leave.
    pub partials_a_block: i32,
    /// Groups of warps that share the keys of a thread block.
    pub key_groups: i32,
}
