//! NVIDIA GPUs: their memory as operands, and the GPUs that have been asked for.

use crate::convert::{Options, Place, View, bad, expect_zero, input, output, required};
use crate::status::Failure;
use crate::types::{self, REGARD_APPEND_LATENT, REGARD_ROTARY_INTERLEAVED};
use regard::cuda::{Append, AppendLatent, DeviceMemory, Gpu, Merge, Rotary};
use regard::{Error, Plan, Tensor, TensorMut};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

impl Place for DeviceMemory {
    unsafe fn input<'a>(view: &View) -> Result<Tensor<'a, DeviceMemory>, Error> {
        // SAFETY: passed on.
        unsafe {
            Tensor::from_device_address(view.data as u64, view.dtype, view.shape(), view.strides())
        }
    }

    unsafe fn output<'a>(view: &View) -> Result<TensorMut<'a, DeviceMemory>, Error> {
        // SAFETY: passed on.
        unsafe {
            TensorMut::from_device_address(
                view.data as u64,
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
    // What is inserted is whole, whatever panicked.
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

/// New tokens, as rows of a latent cache if there are no values.
pub struct NewTokens<'a> {
    rows: AppendLatent<'a>,
    /// Values and their pool.
    values: Option<(Tensor<'a, DeviceMemory>, TensorMut<'a, DeviceMemory>)>,
}

impl NewTokens<'_> {
    /// Queues the append on a stream.
    ///
    /// # Safety
    /// As [`Gpu::append_raw`].
    pub unsafe fn append(self, gpu: &Gpu, stream: *mut c_void) -> Result<(), Error> {
        let NewTokens { mut rows, values } = self;
        let Some((value, value_pool)) = values else {
            // SAFETY: passed on.
            return unsafe { gpu.append_latent_raw(stream.cast(), &mut rows) };
        };
        let mut append = Append {
            key: rows.key,
            value,
            key_pool: rows.key_pool,
            value_pool,
            k_scales: None,
            v_scales: None,
            block_table: rows.block_table,
            kv_lens: rows.kv_lens,
            cu_seqlens: rows.cu_seqlens,
            rotary: rows.rotary,
        };
        // SAFETY: passed on.
        unsafe { gpu.append_raw(stream.cast(), &mut append) }
    }
}

/// A caller's append.
///
/// # Safety
/// The tensors can be read, and describe memory as [`Place`] wants it.
pub unsafe fn append<'a>(given: &types::Append) -> Result<NewTokens<'a>, Failure> {
    let known = REGARD_ROTARY_INTERLEAVED | REGARD_APPEND_LATENT;
    let options = Options::new("append", given.options, known)?;
    expect_zero("append.reserved", given.reserved)?;
    // SAFETY: passed on.
    let read = |name, tensor| unsafe { input(name, tensor) };
    // SAFETY: passed on.
    let written = |name, tensor| unsafe { output(name, tensor) };
    let query = written("query", given.query)?;
    let rotary = match read("rotary_table", given.rotary_table)? {
        Some(table) => {
            Some(Rotary { table, interleaved: options.has(REGARD_ROTARY_INTERLEAVED), query })
        }
        None if query.is_some() => {
            return Err(bad("query", "given without rotary_table", "null, or both"));
        }
        None if options.has(REGARD_ROTARY_INTERLEAVED) => {
            return Err(bad(
                "append.options",
                "REGARD_ROTARY_INTERLEAVED without rotary_table",
                "0, or both",
            ));
        }
        None => None,
    };
    let rows = AppendLatent {
        key: required("key", read("key", given.key)?)?,
        key_pool: required("key_pool", written("key_pool", given.key_pool)?)?,
        k_scales: None,
        block_table: Some(required("block_table", read("block_table", given.block_table)?)?),
        kv_lens: required("kv_lens", read("kv_lens", given.kv_lens)?)?,
        cu_seqlens: read("cu_seqlens", given.cu_seqlens)?,
        rotary,
    };
    let (value, value_pool) =
        (read("value", given.value)?, written("value_pool", given.value_pool)?);
    let values = match options.has(REGARD_APPEND_LATENT) {
        false => Some((required("value", value)?, required("value_pool", value_pool)?)),
        true if value.is_some() => {
            return Err(bad("value", "given with REGARD_APPEND_LATENT", "null"));
        }
        true if value_pool.is_some() => {
            return Err(bad("value_pool", "given with REGARD_APPEND_LATENT", "null"));
        }
        true => None,
    };
    Ok(NewTokens { rows, values })
}

/// A caller's merge.
///
/// # Safety
/// As [`append`].
pub unsafe fn merge<'a>(given: &types::Merge) -> Result<Merge<'a>, Failure> {
    // SAFETY: passed on.
    let read = |name, tensor| unsafe { input(name, tensor) };
    // SAFETY: passed on.
    let written = |name, tensor| unsafe { output(name, tensor) };
    Ok(Merge {
        parts: required("parts", read("parts", given.parts)?)?,
        part_lse: required("part_lse", read("part_lse", given.part_lse)?)?,
        out: required("out", written("out", given.out)?)?,
        lse: written("lse", given.lse)?,
    })
}
