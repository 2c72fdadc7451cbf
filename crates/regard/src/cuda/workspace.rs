//! The workspace: device memory for counters, partial states and tile maps.

use super::{COUNTER_BYTES, DeviceMemory, WORKSPACE_ALIGNMENT, driver};
use crate::error::Error;
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, SyncOnDrop};
use std::fmt;
use std::sync::Arc;

/// A workspace: device memory of the caller's whose counters are zero. Any plan that it is large
/// enough for can use it, one run at a time: runs on one stream follow each other; runs that may
/// overlap each need their own.
pub struct Workspace {
    memory: CudaSlice<u8>,
}

impl Workspace {
    /// Takes memory as a workspace, and queues on `stream` that its first [`COUNTER_BYTES`] become
    /// zero. No run may come before that: use the same stream, or wait.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(mut memory: CudaSlice<u8>, stream: &Arc<CudaStream>) -> Result<Workspace, Error> {
        let counters = COUNTER_BYTES.min(memory.len());
        if counters > 0 {
            stream.memset_zeros(&mut memory.slice_mut(..counters)).map_err(|error| {
                driver::driver_error("zeroing the counters of a workspace", error)
            })?;
        }
        Ok(Workspace { memory })
    }

    /// Allocates, on `stream`, a workspace of exactly what the plan needs.
    ///
    /// # Errors
    /// If the GPU has too little memory.
    pub fn for_plan(plan: &Plan, stream: &Arc<CudaStream>) -> Result<Workspace, Error> {
        let bytes = plan.workspace_bytes();
        // SAFETY: nothing reads it before it is written: the counters are zeroed now, kernels write
        // the rest before they read it.
        let memory = unsafe { stream.alloc::<u8>(bytes.max(1)) }.map_err(|error| {
            driver::driver_error(format!("allocating a workspace of {bytes} bytes"), error)
        })?;
        Workspace::new(memory, stream)
    }

    /// Its size, in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// The memory again.
    pub fn into_memory(self) -> CudaSlice<u8> {
        self.memory
    }

    /// Its address, for a run that is queued on `stream` before the guard is dropped.
    pub(super) fn lend<'a>(&'a mut self, stream: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        self.memory.device_ptr_mut(stream)
    }
}

/// A workspace as [`Gpu::run_raw`](super::Gpu::run_raw) takes it: device memory that the caller
/// manages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawWorkspace {
    /// Its address, a multiple of [`WORKSPACE_ALIGNMENT`](super::WORKSPACE_ALIGNMENT).
    pub address: u64,
    /// Its size, at least [`Plan::workspace_bytes`].
    pub bytes: usize,
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace({} bytes)", self.memory.len())
    }
}

/// The workspace is large enough, aligned, and apart from every operand.
pub(super) fn check_workspace(
    plan: &Plan,
    RawWorkspace { address, bytes }: RawWorkspace,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Result<(), Error> {
    if bytes < plan.workspace_bytes() {
        let allowed = format!("at least {} bytes, as planned", plan.workspace_bytes());
        return Err(Error::argument("workspace", format!("{bytes} bytes long"), allowed));
    }
    if !address.is_multiple_of(WORKSPACE_ALIGNMENT) {
        let allowed = format!("a multiple of {WORKSPACE_ALIGNMENT}");
        return Err(Error::argument("workspace", format!("at {address:#x}"), allowed));
    }
    let used = plan.workspace_bytes().max(COUNTER_BYTES.min(bytes));
    outputs.check_workspace(inputs, address as usize, used)
}
