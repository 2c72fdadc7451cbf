//! NVIDIA GPUs: their memory as operands, and the GPUs that have been asked for.

use crate::convert::{Place, View, bad};
use crate::status::Failure;
use regard::cuda::{DeviceMemory, Gpu};
use regard::{Error, Plan, Tensor, TensorMut};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

impl Place for DeviceMemory {
    unsafe fn input<'a>(view: &View) -> Result<Tensor<'a, DeviceMemory>, Error> {
        // SAFETY: passed on.
        unsafe {
            Tensor::from_device_address(
                view.address() as u64,
                view.dtype,
                view.shape(),
                view.strides(),
            )
        }
    }

    unsafe fn output<'a>(view: &View) -> Result<TensorMut<'a, DeviceMemory>, Error> {
        // SAFETY: passed on.
        unsafe {
            TensorMut::from_device_address(
                view.address() as u64,
                view.dtype,
                view.shape(),
                view.strides(),
            )
        }
    }
}

/// The GPU of that number. Each is opened once and stays open: graphs that were captured may use
/// its kernels at any time.
pub fn gpu(ordinal: usize, context: *mut c_void) -> Result<Arc<Gpu>, Failure> {
    static GPUS: Mutex<Option<HashMap<usize, Arc<Gpu>>>> = Mutex::new(None);
    // Poisoning is ignored: entries are inserted complete.
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let gpus = gpus.get_or_insert_default();
    let gpu = match gpus.get(&ordinal) {
        Some(gpu) => Arc::clone(gpu),
        None => Arc::clone(gpus.entry(ordinal).or_insert(Arc::new(Gpu::new(ordinal)?))),
    };
    if !context.is_null() && gpu.context().cu_ctx().cast::<c_void>() != context {
        let found = format!("not the primary context of cuda:{ordinal}");
        return Err(bad(
            "device.context",
            found,
            "null, or that context (cuDevicePrimaryCtxRetain)",
        ));
    }
    Ok(gpu)
}

/// Bytes at the start of a plan's workspace that have to be zero.
pub fn zeroed_bytes(plan: &Plan) -> usize {
    regard::cuda::COUNTER_BYTES.min(plan.workspace_bytes())
}
