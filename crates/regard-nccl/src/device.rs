//! The device of a rank, as the algorithms of this crate see it: a CPU or a GPU.

use regard::cpu::{Cpu, Workspace};
use regard::{DType, Error, Inputs, Machine, Memory, Merge, Outputs, Plan, Tensor, TensorMut};

/// A device with two queues: one for kernels, one for transfers that overlap with them.
pub trait Device {
    /// The memory of its operands.
    type Memory: Memory;
    /// A queue of work: a CUDA stream; `()` on the host.
    type Queue;
    /// Memory that is freed when this is dropped.
    type Buffer;
    /// Memory for the partial states of runs.
    type Workspace;

    /// The device as plans are made for it.
    fn machine(&self) -> &Machine;

    /// The queue of kernels.
    fn compute(&self) -> &Self::Queue;

    /// The queue of transfers.
    fn transfers(&self) -> &Self::Queue;

    /// Transfers that are queued from now on wait for the kernels that are queued now.
    ///
    /// # Errors
    /// If the driver fails.
    fn transfers_follow_compute(&self) -> Result<(), Error>;

    /// Kernels that are queued from now on wait for the transfers that are queued now.
    ///
    /// # Errors
    /// If the driver fails.
    fn compute_follows_transfers(&self) -> Result<(), Error>;

    /// Memory of zeros. It may wait for the device.
    ///
    /// # Errors
    /// If memory does not suffice.
    fn allocate(&self, bytes: usize) -> Result<Self::Buffer, Error>;

    /// A workspace for plans that need at most `bytes` bytes.
    ///
    /// # Errors
    /// If memory does not suffice.
    fn workspace(&self, bytes: usize) -> Result<Self::Workspace, Error>;

    /// The address of a buffer.
    fn address(&self, buffer: &mut Self::Buffer) -> u64;

    /// Writes bytes to the start of a buffer, and waits until they are there.
    ///
    /// # Errors
    /// If there are more bytes than the buffer has, or the driver fails.
    fn write(&self, buffer: &mut Self::Buffer, bytes: &[u8]) -> Result<(), Error>;

    /// The address of a tensor's first element.
    fn tensor_address(tensor: &Tensor<Self::Memory>) -> u64;

    /// The address of the first element of a tensor that is written.
    fn tensor_mut_address(tensor: &mut TensorMut<Self::Memory>) -> u64;

    /// A view of memory; `strides` of `None` means contiguous.
    ///
    /// # Errors
    /// If shape and strides make no sense together.
    ///
    /// # Safety
    /// As [`Tensor::from_raw`].
    unsafe fn tensor<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Tensor<'a, Self::Memory>, Error>;

    /// A view of memory that is written.
    ///
    /// # Errors
    /// If shape and strides make no sense together.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    unsafe fn tensor_mut<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<TensorMut<'a, Self::Memory>, Error>;

    /// Loads the kernels of a plan and a merge.
    ///
    /// # Errors
    /// If the device cannot run the plan.
    fn load(&self, plan: &Plan) -> Result<(), Error>;

    /// Queues a run of a plan.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, or the driver fails.
    ///
    /// # Safety
    /// Until the run is done, nothing else uses the workspace, nothing writes the inputs, and
    /// nothing uses the outputs.
    unsafe fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs<Self::Memory>,
        outputs: &mut Outputs<Self::Memory>,
        workspace: &mut Self::Workspace,
    ) -> Result<(), Error>;

    /// Queues a merge of partial results.
    ///
    /// # Errors
    /// If an operand breaks the contract, or the driver fails.
    ///
    /// # Safety
    /// Until the merge is done, nothing writes its inputs and nothing uses its outputs.
    unsafe fn merge(&self, merge: &mut Merge<Self::Memory>) -> Result<(), Error>;
}

/// Memory of the host, aligned for every element type.
#[derive(Debug)]
pub struct HostBuffer {
    words: Vec<u64>,
    bytes: usize,
}

impl HostBuffer {
    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the words are that many initialized bytes, and bytes have no invalid values.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }
}

/// The error of a write beyond a buffer's end.
pub(crate) fn expect_inside(found: usize, bytes: usize) -> Result<(), Error> {
    if found <= bytes {
        return Ok(());
    }
    Err(Error::argument("bytes", found, format!("at most {bytes}, the size of the buffer")))
}

fn out_of_memory(argument: &str, bytes: usize) -> Error {
    Error::argument(argument, format!("of {bytes} bytes"), "what fits in memory")
}

impl Device for Cpu {
    type Memory = regard::Host;
    type Queue = ();
    type Buffer = HostBuffer;
    type Workspace = Workspace;

    fn machine(&self) -> &Machine {
        Cpu::machine(self)
    }

    fn compute(&self) -> &() {
        &()
    }

    fn transfers(&self) -> &() {
        &()
    }

    fn transfers_follow_compute(&self) -> Result<(), Error> {
        Ok(())
    }

    fn compute_follows_transfers(&self) -> Result<(), Error> {
        Ok(())
    }

    fn allocate(&self, bytes: usize) -> Result<HostBuffer, Error> {
        let count = bytes.div_ceil(size_of::<u64>());
        let mut words = Vec::new();
        if words.try_reserve_exact(count).is_err() {
            return Err(out_of_memory("buffer", bytes));
        }
        words.resize(count, 0);
        Ok(HostBuffer { words, bytes })
    }

    fn workspace(&self, bytes: usize) -> Result<Workspace, Error> {
        let mut memory = Vec::new();
        if memory.try_reserve_exact(bytes).is_err() {
            return Err(out_of_memory("workspace", bytes));
        }
        memory.resize(bytes, 0);
        Ok(Workspace::new(memory))
    }

    fn address(&self, buffer: &mut HostBuffer) -> u64 {
        buffer.words.as_mut_ptr() as u64
    }

    fn write(&self, buffer: &mut HostBuffer, bytes: &[u8]) -> Result<(), Error> {
        expect_inside(bytes.len(), buffer.bytes)?;
        buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn tensor_address(tensor: &Tensor) -> u64 {
        tensor.as_ptr() as u64
    }

    fn tensor_mut_address(tensor: &mut TensorMut) -> u64 {
        tensor.as_mut_ptr() as u64
    }

    unsafe fn tensor<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Tensor<'a>, Error> {
        // SAFETY: the caller's promise.
        unsafe { Tensor::from_raw(address as *const u8, dtype, shape, strides) }
    }

    unsafe fn tensor_mut<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<TensorMut<'a>, Error> {
        // SAFETY: the caller's promise.
        unsafe { TensorMut::from_raw(address as *mut u8, dtype, shape, strides) }
    }

    fn load(&self, plan: &Plan) -> Result<(), Error> {
        Cpu::load(self, plan)
    }

    unsafe fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        Cpu::run(self, plan, inputs, outputs, workspace)
    }

    unsafe fn merge(&self, merge: &mut Merge) -> Result<(), Error> {
        Cpu::merge(self, merge)
    }
}
