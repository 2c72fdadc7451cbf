//! NVIDIA GPUs: the ones that were asked for, their workspaces, streams and memory.

use crate::errors::{Fault, argument};
use pyo3::intern;
use pyo3::prelude::*;
use regard::cuda::cudarc::driver::sys;
use regard::cuda::{COUNTER_BYTES, Gpu, RawWorkspace, driver_error};
use regard::{Error, Plan};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Handles below this name default streams, which every context has.
const FIRST_REAL_STREAM: u64 = 3;

/// The GPU of that number. Each is opened once and stays open: graphs that were captured may use
/// its kernels at any time.
///
/// # Errors
/// If there is no driver or no such GPU.
pub fn gpu(ordinal: i32) -> Result<Arc<Gpu>, Error> {
    static GPUS: Mutex<Option<HashMap<i32, Arc<Gpu>>>> = Mutex::new(None);
    let mut gpus = lock(&GPUS);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&ordinal) {
        return Ok(Arc::clone(gpu));
    }
    let _context = CurrentContext::kept();
    let gpu = Arc::new(Gpu::new(usize::try_from(ordinal).unwrap_or(usize::MAX))?);
    gpus.insert(ordinal, Arc::clone(&gpu));
    Ok(gpu)
}

/// The guarded value is consistent even after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives this thread its current context back when dropped: frameworks take it for their current
/// device.
pub struct CurrentContext(sys::CUcontext);

impl CurrentContext {
    /// Remembers this thread's current context.
    pub fn kept() -> CurrentContext {
        // Looking for the library takes microseconds, and runs come here.
        static DRIVER: OnceLock<bool> = OnceLock::new();
        let mut context = std::ptr::null_mut();
        // SAFETY: loading the driver's library runs its own initializers, as any use of it does.
        // Without a driver there is no context to keep.
        if *DRIVER.get_or_init(|| unsafe { sys::is_culib_present() }) {
            // SAFETY: the driver writes one pointer.
            let _ = unsafe { sys::cuCtxGetCurrent(&mut context) };
        }
        CurrentContext(context)
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it was current on this thread.
            let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
        }
    }
}

/// Lets this thread allocate although another, or itself, captures a graph: nothing here touches
/// the streams that are captured.
struct RelaxedCapture(sys::CUstreamCaptureMode);

impl RelaxedCapture {
    fn begin() -> RelaxedCapture {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the driver swaps one number.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        RelaxedCapture(mode)
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

/// Device memory.
pub struct Allocation {
    gpu: Arc<Gpu>,
    address: u64,
}

impl Allocation {
    /// Uninitialized bytes on that GPU.
    ///
    /// # Errors
    /// If there is not so much memory.
    pub fn new(ordinal: i32, bytes: usize) -> Result<Allocation, Fault> {
        let gpu = gpu(ordinal)?;
        let _context = CurrentContext::kept();
        let _relaxed = RelaxedCapture::begin();
        bind(&gpu)?;
        let mut address = 0;
        // SAFETY: the driver writes one address.
        let status = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        status
            .result()
            .map_err(|error| driver_error(format!("allocating {bytes} bytes"), error))?;
        Ok(Allocation { gpu, address })
    }

    /// A workspace of its own for a plan: its counters are zero.
    ///
    /// # Errors
    /// As [`Allocation::new`].
    pub fn workspace(ordinal: i32, bytes: usize) -> Result<Allocation, Fault> {
        let allocation = Allocation::new(ordinal, bytes.max(COUNTER_BYTES))?;
        allocation.zero(COUNTER_BYTES)?;
        Ok(allocation)
    }

    /// A `CUdeviceptr`.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Zeroes its first bytes, and waits until they are.
    fn zero(&self, bytes: usize) -> Result<(), Error> {
        let failed = |error| driver_error("zeroing the counters of a workspace", error);
        let _context = CurrentContext::kept();
        let _relaxed = RelaxedCapture::begin();
        bind(&self.gpu)?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the stream is new and of the context that is current; the memory is this one's.
        unsafe {
            sys::cuStreamCreate(&mut stream, flags).result().map_err(failed)?;
            let zeroed = sys::cuMemsetD8Async(self.address, 0, bytes, stream).result();
            let done = zeroed.and_then(|()| sys::cuStreamSynchronize(stream).result());
            let destroyed = sys::cuStreamDestroy_v2(stream).result();
            done.and(destroyed).map_err(failed)
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _context = CurrentContext::kept();
        if bind(&self.gpu).is_ok() {
            // SAFETY: it was allocated in this context, and the driver waits for work that uses it.
            // A process that ends may have ended the driver before.
            let _ = unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

fn bind(gpu: &Gpu) -> Result<(), Error> {
    let failed = |error| driver_error("using the GPU's context", error);
    gpu.context().bind_to_thread().map_err(failed)
}

/// The workspaces of all streams.
///
/// Runs on one stream follow each other, so they share one, whatever their plans. It grows, and
/// what it was before is kept: graphs that were captured still use it.
#[derive(Default)]
struct Workspaces {
    /// By GPU and stream: an allocation and its bytes.
    streams: HashMap<(i32, u64), (Arc<Allocation>, usize)>,
    outgrown: Vec<Arc<Allocation>>,
}

impl Workspaces {
    fn get(&mut self, ordinal: i32, stream: u64, bytes: usize) -> Result<RawWorkspace, Fault> {
        if let Some((allocation, size)) = self.streams.get(&(ordinal, stream))
            && *size >= bytes
        {
            return Ok(RawWorkspace { address: allocation.address(), bytes: *size });
        }
        let size = bytes.max(COUNTER_BYTES).next_power_of_two();
        let allocation = Allocation::new(ordinal, size)?;
        allocation.zero(COUNTER_BYTES)?;
        let found = RawWorkspace { address: allocation.address(), bytes: size };
        let made = (Arc::new(allocation), size);
        if let Some((old, _)) = self.streams.insert((ordinal, stream), made) {
            self.outgrown.push(old);
        }
        Ok(found)
    }
}

static WORKSPACES: Mutex<Option<Workspaces>> = Mutex::new(None);

/// Calls `queue` with the stream's workspace. No other run is queued meanwhile, so that launches of
/// two runs on one stream do not mix.
///
/// # Errors
/// If the GPU has too little memory, or as `queue`.
pub fn with_workspace(
    ordinal: i32,
    stream: u64,
    bytes: usize,
    queue: impl FnOnce(RawWorkspace) -> Result<(), Error>,
) -> Result<(), Fault> {
    beside_captures(|| {
        let mut workspaces = lock(&WORKSPACES);
        let workspace = workspaces.get_or_insert_default().get(ordinal, stream, bytes)?;
        Ok(queue(workspace)?)
    })
}

/// Calls `work`, which may load kernels and allocate while a graph is captured. The thread's
/// context is as before afterwards.
///
/// # Errors
/// As `work`.
pub fn beside_captures<T>(work: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    let _context = CurrentContext::kept();
    let _relaxed = RelaxedCapture::begin();
    work()
}

/// Loads a plan's kernels and makes the stream's workspace, so that nothing is left to do while a
/// graph is captured.
///
/// # Errors
/// If the driver fails.
pub fn prepare(plan: &Plan, ordinal: i32, stream: u64) -> Result<(), Fault> {
    let gpu = gpu(ordinal)?;
    with_workspace(ordinal, stream, plan.workspace_bytes(), |_| gpu.load(plan))
}

/// A handle as the driver takes it.
pub fn handle(stream: u64) -> sys::CUstream {
    stream as sys::CUstream
}

/// Waits for the work of a stream.
///
/// # Errors
/// If the driver fails.
pub fn synchronize(ordinal: i32, stream: u64) -> Result<(), Error> {
    let gpu = gpu(ordinal)?;
    let _context = CurrentContext::kept();
    bind(&gpu)?;
    // SAFETY: the stream was checked, or is its framework's current one.
    let status = unsafe { sys::cuStreamSynchronize(handle(stream)) };
    status.result().map_err(|error| driver_error("waiting for a stream", error))
}

/// An error unless the stream is of that GPU.
///
/// # Errors
/// If it is of another, or no stream.
pub fn expect_stream(stream: u64, ordinal: i32) -> Result<(), Fault> {
    if stream < FIRST_REAL_STREAM {
        return Ok(());
    }
    let gpu = gpu(ordinal)?;
    let _context = CurrentContext::kept();
    bind(&gpu)?;
    let mut context = std::ptr::null_mut();
    // SAFETY: the driver writes one pointer. That the number is a stream's is the caller's promise.
    let status = unsafe { sys::cuStreamGetCtx(handle(stream), &mut context) };
    status.result().map_err(|error| driver_error("looking a stream up", error))?;
    if context == gpu.context().cu_ctx() {
        return Ok(());
    }
    Err(argument("stream", "of another device", format!("a stream of cuda:{ordinal}")))
}

/// The GPU that memory is on, which `__cuda_array_interface__` does not tell.
///
/// # Errors
/// If it is on none.
pub fn ordinal_of(name: &str, address: u64, object: &Bound<'_, PyAny>) -> PyResult<i32> {
    let py = object.py();
    // CuPy reports it, and faster than the driver.
    if let Some(device) = object.getattr_opt(intern!(py, "device"))?
        && let Some(id) = device.getattr_opt(intern!(py, "id"))?
        && let Ok(id) = id.extract()
    {
        return Ok(id);
    }
    if address == 0 {
        return Ok(0);
    }
    gpu(0).map_err(Fault)?;
    let mut ordinal = 0i32;
    let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: the driver writes one `int`, and looks the address up without reading it.
    let status =
        unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, address) };
    match status.result() {
        Ok(()) => Ok(ordinal),
        Err(error) => {
            let doing = format!("looking the memory of `{name}` up");
            Err(Fault(driver_error(doing, error)).into())
        }
    }
}
