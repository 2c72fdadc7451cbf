//! An NVIDIA GPU as a rank's device.

use crate::device::{Device, expect_inside};
use regard::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use regard::cuda::{COUNTER_BYTES, DeviceMemory, Gpu, RawWorkspace, driver_error};
use regard::{DType, Error, Inputs, Machine, Merge, Outputs, Plan, Tensor, TensorMut};
use std::sync::Arc;

/// Memory of a GPU, apart from cudarc's tracking of streams: its users order their own work. Freed
/// when it is dropped, which waits for the GPU.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Memory of zeros.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<DeviceBuffer, Error> {
        let failed =
            |error| driver_error(format!("allocating {bytes} bytes of the GPU's memory"), error);
        context.bind_to_thread().map_err(failed)?;
        // The driver does not allocate nothing.
        // SAFETY: the context is current.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failed)?;
        let buffer = DeviceBuffer { context: Arc::clone(context), address, bytes };
        // SAFETY: the memory has just been allocated, of that size.
        unsafe { result::memset_d8_sync(address, 0, bytes) }.map_err(failed)?;
        // The memset may still run when the call returns.
        context.synchronize().map_err(failed)?;
        Ok(buffer)
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        expect_inside(bytes.len(), self.bytes)?;
        let failed = |error| driver_error("copying to the GPU", error);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the buffer is that large, and of the context.
        unsafe { result::memcpy_htod_sync(self.address, bytes) }.map_err(failed)?;
        self.context.synchronize().map_err(failed)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the memory was allocated by `new`, and the driver waits for its users.
            let _freed = unsafe { result::free_sync(self.address) };
        }
    }
}

/// A GPU with the caller's stream for kernels, and a stream of its own for transfers that overlap
/// with them.
#[derive(Debug)]
pub struct GpuRank {
    gpu: Gpu,
    compute: Arc<CudaStream>,
    transfers: Arc<CudaStream>,
    computed: CudaEvent,
    transferred: CudaEvent,
}

impl GpuRank {
    /// The GPU of a stream. Kernels are queued on it.
    ///
    /// # Errors
    /// If the driver does not make a stream, or does not describe the GPU.
    pub fn new(compute: Arc<CudaStream>) -> Result<GpuRank, Error> {
        let context = compute.context();
        let gpu = Gpu::from_context(Arc::clone(context))?;
        gpu.load_merge()?;
        let failed = |error| driver_error("making a stream for transfers", error);
        context.bind_to_thread().map_err(failed)?;
        // Transfers get the first multiprocessors that are free.
        let (_, highest) = result::stream::get_priority_range().map_err(failed)?;
        let transfers = context.new_stream_with_priority(highest).map_err(failed)?;
        let computed = context.new_event(None).map_err(failed)?;
        let transferred = context.new_event(None).map_err(failed)?;
        Ok(GpuRank { gpu, compute, transfers, computed, transferred })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

/// Work that `later` queues from now on waits for the work queued on `earlier`.
fn order(earlier: &CudaStream, later: &CudaStream, event: &CudaEvent) -> Result<(), Error> {
    let failed = |error| driver_error("ordering streams", error);
    event.record(earlier).map_err(failed)?;
    later.wait(event).map_err(failed)
}

impl Device for GpuRank {
    type Memory = DeviceMemory;
    type Queue = Arc<CudaStream>;
    type Buffer = DeviceBuffer;
    type Workspace = DeviceBuffer;

    fn machine(&self) -> &Machine {
        self.gpu.machine()
    }

    fn compute(&self) -> &Arc<CudaStream> {
        &self.compute
    }

    fn transfers(&self) -> &Arc<CudaStream> {
        &self.transfers
    }

    fn transfers_follow_compute(&self) -> Result<(), Error> {
        order(&self.compute, &self.transfers, &self.computed)
    }

    fn compute_follows_transfers(&self) -> Result<(), Error> {
        order(&self.transfers, &self.compute, &self.transferred)
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceBuffer, Error> {
        DeviceBuffer::new(self.gpu.context(), bytes)
    }

    fn workspace(&self, bytes: usize) -> Result<DeviceBuffer, Error> {
        // The counters at its start are zero, and every run leaves them so.
        DeviceBuffer::new(self.gpu.context(), bytes.max(COUNTER_BYTES))
    }

    fn address(&self, buffer: &mut DeviceBuffer) -> u64 {
        buffer.address
    }

    fn write(&self, buffer: &mut DeviceBuffer, bytes: &[u8]) -> Result<(), Error> {
        DeviceBuffer::write(buffer, bytes)
    }

    fn tensor_address(tensor: &Tensor<DeviceMemory>) -> u64 {
        tensor.device_address()
    }

    fn tensor_mut_address(tensor: &mut TensorMut<DeviceMemory>) -> u64 {
        tensor.device_address()
    }

    unsafe fn tensor<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Tensor<'a, DeviceMemory>, Error> {
        // SAFETY: the caller's promise.
        unsafe { Tensor::from_device_address(address, dtype, shape, strides) }
    }

    unsafe fn tensor_mut<'a>(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<TensorMut<'a, DeviceMemory>, Error> {
        // SAFETY: the caller's promise.
        unsafe { TensorMut::from_device_address(address, dtype, shape, strides) }
    }

    fn load(&self, plan: &Plan) -> Result<(), Error> {
        self.gpu.load(plan)
    }

    unsafe fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: &mut DeviceBuffer,
    ) -> Result<(), Error> {
        let workspace = RawWorkspace { address: workspace.address, bytes: workspace.bytes };
        // SAFETY: the stream is of the GPU's context, the workspace's counters are zero between
        // runs, and the caller has promised the rest.
        unsafe { self.gpu.run_raw(plan, self.compute.cu_stream(), inputs, outputs, workspace) }
    }

    unsafe fn merge(&self, merge: &mut Merge<DeviceMemory>) -> Result<(), Error> {
        // SAFETY: the stream is of the GPU's context, and the caller has promised the rest.
        unsafe { self.gpu.merge_raw(self.compute.cu_stream(), merge) }
    }
}
