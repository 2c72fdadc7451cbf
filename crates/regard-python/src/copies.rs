//! `regard.copy_blocks`: copies between the blocks of pools.

use crate::array::{Array, Place};
use crate::errors::{Fault, argument};
use crate::operands::View;
use crate::{device, framework, operands};
use pyo3::prelude::*;
use regard::cpu::Cpu;
use regard::cuda::DeviceMemory;
use regard::paged::{BlockCopy, CopyBlocks};
use regard::{Error, Host, TensorMut};

/// Copies blocks of pools, as `Step.copies` and `Appended.copy` ask for before new tokens are
/// written (copy on write).
///
/// Copies are made one after the other, in every pool: a block that one copy has written can be
/// read by the next. Elements are moved and not looked into, so that pools may be of any type.
///
/// pools: a list of arrays, `[blocks, block_size, ...]`: keys, values and scales of all layers,
///     written. All have as many blocks and slots; a pool with something per block instead of per
///     slot has 1 in place of block_size. Scales that blocks share are none of them.
/// copies: (from block, to block, slots): the first slots of a block go to another.
/// kv_layout: "nhd", or "hnd" if pools have heads before slots.
/// stream: as for `attention`.
#[pyfunction]
#[pyo3(signature = (pools, copies, *, kv_layout = None, stream = None))]
pub fn copy_blocks<'py>(
    py: Python<'py>,
    pools: Vec<Bound<'py, PyAny>>,
    copies: Vec<(usize, usize, usize)>,
    kv_layout: Option<Bound<'py, PyAny>>,
    stream: Option<Bound<'py, PyAny>>,
) -> PyResult<()> {
    let is_hnd = kv_layout.as_ref().map_or(Ok(false), operands::is_hnd)?;
    let mut arrays = Vec::with_capacity(pools.len());
    for pool in &pools {
        let mut array = Array::read_mut("pools", pool)?;
        if is_hnd {
            array.swap_heads(array.shape().len().max(3), "hnd")?;
        }
        arrays.push(array);
    }
    let Some(first) = arrays.first() else { return Ok(()) };
    let place = first.place;
    for array in &arrays {
        operands::expect_place(array, place, "as the first of pools")?;
    }
    let handle = framework::stream(stream.as_ref(), &pools[0], first)?;
    let to_copy = |(from, to, slots)| BlockCopy { from, to, slots };
    let copies: Vec<BlockCopy> = copies.into_iter().map(to_copy).collect();
    match place {
        Place::Cpu => py.detach(|| copy_on_host(&arrays, &copies))?,
        _ => py.detach(|| copy_on_gpu(&arrays, &copies, handle))?,
    }
    if stream.is_some() {
        for pool in &pools {
            framework::record_stream(pool, &arrays[0], handle)?;
        }
    }
    Ok(())
}

/// Views of the pools.
///
/// # Safety
/// All arrays are in this memory, and nothing else uses them meanwhile.
unsafe fn views<M: View>(arrays: &[Array]) -> Result<Vec<TensorMut<'_, M>>, Error> {
    // SAFETY: passed on.
    arrays.iter().map(|array| unsafe { M::output(array) }).collect()
}

fn copy_on_host(arrays: &[Array], copies: &[BlockCopy]) -> Result<(), Fault> {
    // SAFETY: all arrays are in host memory, which they hold until the call returns.
    let mut pools = unsafe { views::<Host>(arrays)? };
    Ok(Cpu::new()?.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies })?)
}

fn copy_on_gpu(arrays: &[Array], copies: &[BlockCopy], stream: u64) -> Result<(), Fault> {
    let place = arrays[0].place;
    let Place::Cuda(ordinal) = place else {
        return Err(argument("pools", format!("on {place}"), "cpu or cuda"));
    };
    let gpu = device::gpu(ordinal)?;
    let _context = device::CurrentContext::kept();
    // SAFETY: all arrays are in this GPU's memory, which is freed in the order of the stream, or
    // the stream is waited for below. The stream is of this GPU (`framework::stream`).
    unsafe {
        let mut pools = views::<DeviceMemory>(arrays)?;
        let mut copy = CopyBlocks { pools: &mut pools, copies };
        gpu.copy_blocks_raw(device::handle(stream), &mut copy)?;
    }
    if !arrays.iter().all(|array| array.framework.frees_in_stream_order()) {
        device::synchronize(ordinal, stream)?;
    }
    Ok(())
}
