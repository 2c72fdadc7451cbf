//! Apple GPUs: their buffers as operands, and the GPUs that have been asked for.

use crate::convert::{Place, View, bad};
use crate::status::Failure;
use regard::metal::device::{BufferObject, EncoderObject, Gpu};
use regard::metal::{BufferView, MetalMemory};
use regard::{Error, Inputs, Outputs, Plan, Tensor, TensorMut};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(all(test, metal_stand_in))]
mod tests;

impl Place for MetalMemory {
    const HAS_ADDRESSES: bool = false;

    unsafe fn input<'a>(view: &View) -> Result<Tensor<'a, MetalMemory>, Error> {
        // SAFETY: passed on.
        let buffer = unsafe { buffer(view.data.cast()) };
        buffer.tensor(offset(view)?, view.dtype, view.shape(), view.strides())
    }

    unsafe fn output<'a>(view: &View) -> Result<TensorMut<'a, MetalMemory>, Error> {
        // SAFETY: passed on.
        let buffer = unsafe { buffer(view.data.cast()) };
        buffer.tensor_mut(offset(view)?, view.dtype, view.shape(), view.strides())
    }
}

fn offset(view: &View) -> Result<usize, Error> {
    usize::try_from(view.offset)
        .map_err(|_| Error::argument("offset", view.offset, "a number of bytes of the buffer"))
}

/// A buffer of the caller's; null is one without contents.
///
/// # Safety
/// It is null or an `id<MTLBuffer>`, which lives for `'a`.
unsafe fn buffer<'a>(buffer: *mut c_void) -> BufferView<'a> {
    // SAFETY: the caller's promise.
    match unsafe { buffer.cast::<BufferObject>().as_ref() } {
        Some(buffer) => BufferView::new(buffer),
        // SAFETY: a view of it has no elements.
        None => unsafe { BufferView::from_raw(0, 0, 0) },
    }
}

/// The GPU of an `id<MTLDevice>`, or the default one for null. Each is opened once and stays open,
/// with all pipelines that were compiled for it.
///
/// # Safety
/// `device` is null or an `id<MTLDevice>`.
pub unsafe fn gpu(device: *mut c_void) -> Result<Arc<Gpu>, Failure> {
    static GPUS: Mutex<Option<HashMap<usize, Arc<Gpu>>>> = Mutex::new(None);
    // Poisoning is ignored: entries are inserted complete.
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    if let Some(gpu) = gpus.get(&(device as usize)) {
        return Ok(Arc::clone(gpu));
    }
    let gpu = match NonNull::new(device) {
        // SAFETY: the caller's promise.
        Some(device) => unsafe { Gpu::from_raw_device(device)? },
        None => Gpu::system_default()?,
    };
    // A GPU keeps its device, so that no other device can have this address later.
    Ok(Arc::clone(gpus.entry(device as usize).or_insert(Arc::new(gpu))))
}

/// The caller's encoder.
///
/// # Safety
/// `stream` is null or an `id<MTLComputeCommandEncoder>`, which lives for `'a`.
pub unsafe fn encoder<'a>(stream: *mut c_void) -> Result<&'a EncoderObject, Failure> {
    // SAFETY: the caller's promise.
    unsafe { stream.cast::<EncoderObject>().as_ref() }
        .ok_or_else(|| bad("stream", "null", "an id<MTLComputeCommandEncoder>"))
}

/// Memory of the caller's for a run.
pub struct Workspace {
    /// An `id<MTLBuffer>`.
    pub buffer: *mut c_void,
    /// Its first bytes that may be used.
    pub bytes: usize,
}

impl Workspace {
    /// The buffer's first bytes.
    ///
    /// # Safety
    /// It is null or an `id<MTLBuffer>`, which lives for `'a`.
    unsafe fn view<'a>(&self) -> Result<BufferView<'a>, Failure> {
        // SAFETY: passed on.
        let view = unsafe { buffer(self.buffer) };
        if self.bytes > view.bytes() {
            let allowed = format!("at most {}, the length of the buffer", view.bytes());
            return Err(bad("workspace_bytes", self.bytes, allowed));
        }
        // SAFETY: the same buffer, and no more of it than it has.
        Ok(unsafe { BufferView::from_raw(self.buffer as usize, view.address(), self.bytes) })
    }
}

/// Encodes a run; `mapped`, with the tile map that the workspace has.
///
/// # Safety
/// As [`Gpu::run`]; `stream` as [`encoder`] wants it, and the workspace is null or an
/// `id<MTLBuffer>`.
pub unsafe fn run(
    gpu: &Gpu,
    plan: &Plan,
    stream: *mut c_void,
    (inputs, outputs): (&Inputs<MetalMemory>, &mut Outputs<MetalMemory>),
    workspace: &Workspace,
    mapped: bool,
) -> Result<(), Failure> {
    // SAFETY: passed on, here and below.
    unsafe {
        let (encoder, view) = (encoder(stream)?, workspace.view()?);
        match mapped {
            true => gpu.run_mapped_raw(plan, encoder, inputs, outputs, &view)?,
            false => gpu.run_raw(plan, encoder, inputs, outputs, &view)?,
        }
    }
    Ok(())
}

/// Encodes the making of a tile map.
///
/// # Safety
/// As [`run`].
pub unsafe fn map_mask(
    gpu: &Gpu,
    plan: &Plan,
    stream: *mut c_void,
    (inputs, outputs): (&Inputs<MetalMemory>, &Outputs<MetalMemory>),
    workspace: &Workspace,
) -> Result<(), Failure> {
    // SAFETY: passed on.
    unsafe {
        let (encoder, view) = (encoder(stream)?, workspace.view()?);
        Ok(gpu.map_mask_raw(plan, encoder, inputs, outputs, &view)?)
    }
}
