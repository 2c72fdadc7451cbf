//! Tensors on NVIDIA GPUs: on candle's stream, in candle's context, by the addresses of its memory.

mod stream;

use stream::with_state;

use crate::attention::{Fused, GpuCall};
use crate::merge::MergeParts;
use crate::options::{Attention, CacheFormat, Execution, Held, Operand, Place, with_inputs};
use crate::paged::{AppendLatentRows, AppendRows, HeldTables};
use crate::view::{Elements, elements, refuse, strides, wrap};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorageSlice as Slice;
use candle_core::{CudaDevice, CudaStorage, Layout, Result, Shape, Storage};
use half::{bf16, f16};
use regard::cuda::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
};
use regard::cuda::{Append, AppendLatent, CopyBlocks, DeviceMemory, DeviceViewMut, Gpu, Merge};
use regard::paged::BlockCopy;
use regard::{AppendScales, DType, Element, MAX_RANK, Outputs, Plan, Tensor, TensorMut};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Memory of the GPU that a stream belongs to.
pub(crate) struct Cuda {
    stream: Arc<CudaStream>,
    /// Formats of keys and values that are bytes.
    format: CacheFormat,
}

impl Place for Cuda {
    type Storage = CudaStorage;
    type Memory = DeviceMemory;
    type Guard<'a> = SyncOnDrop<'a>;

    const NAME: &'static str = "on the CUDA device";

    fn storage(storage: &Storage) -> Option<&CudaStorage> {
        match storage {
            Storage::Cuda(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Metal(_) => None,
        }
    }

    fn view<'a>(
        &'a self,
        argument: &str,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<(Tensor<'a, DeviceMemory>, SyncOnDrop<'a>)> {
        match (&storage.slice, self.format.for_argument(argument)) {
            (Slice::U8(slice), Some(format)) => {
                let Elements { shape, strides } = elements(argument, layout, format)?;
                let (address, guard) = slice.device_ptr(&self.stream);
                let address = address + layout.start_offset() as u64;
                let strides = Some(&strides[..]);
                // SAFETY: as in `lend`: the elements are the bytes of the layout.
                let tensor =
                    unsafe { Tensor::from_device_address(address, format, &shape, strides) };
                Ok((tensor.map_err(wrap)?, guard))
            }
            (Slice::F8E4M3(slice), _) => self.lend(argument, (slice, DType::E4M3), layout),
            (Slice::F32(slice), _) => self.lend(argument, (slice, DType::F32), layout),
            (Slice::F16(slice), _) => self.lend(argument, (slice, DType::F16), layout),
            (Slice::BF16(slice), _) => self.lend(argument, (slice, DType::BF16), layout),
            (Slice::I32(slice), _) => self.lend(argument, (slice, DType::I32), layout),
            // A u32 above i32::MAX is negative to the kernel, which clamps it.
            (Slice::U32(slice), _) => self.lend(argument, (slice, DType::I32), layout),
            (Slice::U8(slice), _) => self.lend(argument, (slice, DType::Bool), layout),
            _ => {
                let found = format!("of type {}", storage.dtype().as_str());
                Err(refuse(argument, found, "f32, f16, bf16, f8e4m3, i32, u32 or u8"))
            }
        }
    }
}

impl Cuda {
    /// Lends a slice to the stream until the guard is dropped.
    fn lend<'a, T>(
        &'a self,
        argument: &str,
        (slice, dtype): (&'a CudaSlice<T>, DType),
        layout: &Layout,
    ) -> Result<(Tensor<'a, DeviceMemory>, SyncOnDrop<'a>)> {
        let strides: [i64; MAX_RANK] = strides(argument, layout)?;
        let (address, guard) = slice.device_ptr(&self.stream);
        let address = address + (layout.start_offset() * dtype.size()) as u64;
        let strides = Some(&strides[..layout.dims().len()]);
        // SAFETY: candle's layouts stay inside their storage, which is lent to the stream that the
        // view is used on until the guard is dropped.
        let tensor = unsafe { Tensor::from_device_address(address, dtype, layout.dims(), strides) };
        Ok((tensor.map_err(wrap)?, guard))
    }
}

impl Cuda {
    /// The address of a storage that the stream writes until the guard is dropped, and the type of
    /// its elements: floats, or those of the format of `argument`.
    fn lend_mut<'a>(
        &'a self,
        argument: &str,
        storage: &'a mut CudaStorage,
    ) -> Result<(u64, DType, SyncOnDrop<'a>)> {
        let dtype = storage.dtype();
        let ((address, guard), dtype) =
            match (&mut storage.slice, self.format.for_argument(argument)) {
                (Slice::U8(slice), Some(format)) => (slice.device_ptr_mut(&self.stream), format),
                (Slice::F32(slice), _) => (slice.device_ptr_mut(&self.stream), DType::F32),
                (Slice::F16(slice), _) => (slice.device_ptr_mut(&self.stream), DType::F16),
                (Slice::BF16(slice), _) => (slice.device_ptr_mut(&self.stream), DType::BF16),
                _ => {
                    let found = format!("of type {}", dtype.as_str());
                    return Err(refuse(argument, found, "f32, f16 or bf16"));
                }
            };
        Ok((address, dtype, guard))
    }
}

/// A view of memory that is written, by a layout that stays inside it.
///
/// # Safety
/// `base` is the start of memory that has every element of the layout, and is lent to the stream
/// that the view is used on while it is.
unsafe fn view_mut<'a>(
    argument: &str,
    (base, dtype): (u64, DType),
    layout: &Layout,
) -> Result<TensorMut<'a, DeviceMemory>> {
    let is_stored = dtype.is_code() || dtype.is_block();
    let Elements { shape, strides } = match is_stored {
        true => elements(argument, layout, dtype)?,
        false => {
            let strides: [i64; MAX_RANK] = strides(argument, layout)?;
            let strides = strides[..layout.dims().len()].to_vec();
            Elements { shape: layout.dims().to_vec(), strides }
        }
    };
    // Layouts of a format count bytes.
    let unit = if is_stored { 1 } else { dtype.size() };
    let address = base + (layout.start_offset() * unit) as u64;
    // SAFETY: the caller's promise.
    unsafe { TensorMut::from_device_address(address, dtype, &shape, Some(&strides)) }.map_err(wrap)
}

/// A view of what is read, of the same memory to be written. candle locks such an operand for
/// reading only, and lends it as if it were read: all work on a device of candle's is on one
/// stream, where both have one order.
///
/// # Safety
/// Nothing else that uses this memory is queued beside what the view is used for.
unsafe fn written<'a>(read: &Tensor<'a, DeviceMemory>) -> Result<TensorMut<'a, DeviceMemory>> {
    let (address, strides) = (read.device_address(), Some(read.strides()));
    // SAFETY: the memory is lent to the stream for as long; the rest is the caller's promise.
    unsafe { TensorMut::from_device_address(address, read.dtype(), read.shape(), strides) }
        .map_err(wrap)
}

/// The GPU of a device of candle's, which keeps the kernels that were loaded: one per context.
fn gpu(stream: &CudaStream) -> Result<Arc<Gpu>> {
    static GPUS: OnceLock<Mutex<HashMap<usize, Arc<Gpu>>>> = OnceLock::new();
    let context = stream.context();
    let mut gpus =
        GPUS.get_or_init(Mutex::default).lock().expect("no thread panics while it is locked");
    if let Some(gpu) = gpus.get(&(context.cu_ctx() as usize)) {
        return Ok(Arc::clone(gpu));
    }
    let gpu = Arc::new(Gpu::from_context(Arc::clone(context)).map_err(wrap)?);
    // The GPU keeps its context alive, so that no other context can have this address later.
    gpus.insert(context.cu_ctx() as usize, Arc::clone(&gpu));
    Ok(gpu)
}

pub(crate) fn plan(
    execution: &Execution,
    attention: &Attention,
    operands: [Operand<Cuda>; 3],
) -> Result<Arc<Plan>> {
    let place = Cuda { stream: operands[0].0.device().cuda_stream(), format: execution.format };
    with_inputs(attention, &place, operands, |inputs| {
        let problem = execution.problem(inputs)?;
        with_state(&place.stream, |state| state.plan(&problem))
    })
}

/// Queues attention on candle's stream.
pub(crate) fn forward(op: &Fused, operands: [Operand<Cuda>; 3]) -> Result<(CudaStorage, Shape)> {
    let device = operands[0].0.device().clone();
    let place = Cuda { stream: device.cuda_stream(), format: op.execution.format };
    let stream = &place.stream;
    with_inputs(&op.attention, &place, operands, |inputs| {
        with_state(stream, |state| {
            let GpuCall { plan, dtype, shape, zeroed } =
                op.gpu_call(inputs, |problem| state.plan(problem))?;
            let rows = &shape[..shape.len().saturating_sub(1)];
            let new = NewTensor { device: &device, stream, zeroed };
            let mut lse = op.lse.as_ref().map(|_| new.memory::<f32>(rows)).transpose()?;
            let slice = new.floats(dtype, &shape, |out| {
                let mut lent = lse.as_mut().map(|lse| DeviceViewMut::new(lse, stream));
                let lse = lent.as_mut().map(|lse| lse.tensor(rows, None)).transpose();
                let mut outputs = Outputs { out, lse: lse.map_err(wrap)? };
                state.with_workspace(&plan, stream, |gpu, workspace| {
                    gpu.run(&plan, stream, inputs, &mut outputs, workspace).map_err(wrap)
                })
            })?;
            if let (Some(to), Some(lse)) = (&op.lse, lse) {
                let storage = CudaStorage { slice: Slice::F32(lse), device: device.clone() };
                *to.lock().expect("no pass has panicked") = Some(Storage::Cuda(storage));
            }
            Ok((CudaStorage { slice, device: device.clone() }, Shape::from(shape)))
        })
    })
}

/// How memory of results is made.
struct NewTensor<'a> {
    device: &'a CudaDevice,
    stream: &'a CudaStream,
    /// Zeros, or whatever is there: for kernels that write every element.
    zeroed: bool,
}

impl NewTensor<'_> {
    fn memory<T: DeviceRepr + ValidAsZeroBits>(&self, shape: &[usize]) -> Result<CudaSlice<T>> {
        let count = shape.iter().product();
        match self.zeroed {
            true => self.device.alloc_zeros(count),
            // SAFETY: the kernels that are queued next write every element, of rows that see no key
            // too, before anything else on the stream reads it. If queueing them fails, the memory
            // is freed unread.
            false => unsafe { self.device.alloc(count) },
        }
    }

    /// Memory of that shape, which `run` writes.
    fn written<T: Element + DeviceRepr + ValidAsZeroBits>(
        &self,
        shape: &[usize],
        run: impl FnOnce(TensorMut<DeviceMemory>) -> Result<()>,
    ) -> Result<CudaSlice<T>> {
        let mut memory = self.memory::<T>(shape)?;
        run(DeviceViewMut::new(&mut memory, self.stream).tensor(shape, None).map_err(wrap)?)?;
        Ok(memory)
    }

    /// The same for results of the floating type `dtype`.
    fn floats(
        &self,
        dtype: DType,
        shape: &[usize],
        run: impl FnOnce(TensorMut<DeviceMemory>) -> Result<()>,
    ) -> Result<Slice> {
        Ok(match dtype {
            DType::F16 => Slice::F16(self.written::<f16>(shape, run)?),
            DType::BF16 => Slice::BF16(self.written::<bf16>(shape, run)?),
            _ => Slice::F32(self.written::<f32>(shape, run)?),
        })
    }
}

/// Queues an append on candle's stream.
pub(crate) fn append(
    op: &AppendRows,
    (pool, layout): (&mut CudaStorage, &Layout),
    [keys, values]: [Operand<Cuda>; 2],
) -> Result<()> {
    let place = Cuda { stream: pool.device().cuda_stream(), format: op.format };
    let gpu = gpu(&place.stream)?;
    let tables = HeldTables::new(op.tables);
    let (key, _key) = place.view("keys", keys.0, keys.1)?;
    let (value, _value) = place.view("values", values.0, values.1)?;
    let tables = tables.views(&place)?;
    let value_pool = Held::new(&op.value_pool);
    let (value_pool, _values) = value_pool.view("value_pool", &place)?;
    let scales = op.scales.each_ref().map(|scales| scales.as_ref().map(Held::new));
    let (mut dynamic, mut guards) = ([None, None], Vec::new());
    for ((to, held), name) in dynamic.iter_mut().zip(&scales).zip(["k_scales", "v_scales"]) {
        let Some(held) = held else { continue };
        let (view, guard) = held.view(name, &place)?;
        guards.push(guard);
        // SAFETY: only this append uses them.
        *to = Some(AppendScales::Dynamic(unsafe { written(&view) }?));
    }
    let [k_scales, v_scales] = dynamic;
    let (base, dtype, _pool) = place.lend_mut("key_pool", pool)?;
    let mut append = Append {
        key,
        value,
        // SAFETY: candle's layouts stay inside their storage, which is lent until this returns.
        key_pool: unsafe { view_mut("key_pool", (base, dtype), layout) }?,
        // SAFETY: only this append uses it.
        value_pool: unsafe { written(&value_pool) }?,
        k_scales,
        v_scales,
        block_table: Some(tables.block_table),
        kv_lens: tables.kv_lens,
        cu_seqlens: tables.cu_seqlens,
        rotary: None,
    };
    gpu.append(&place.stream, &mut append).map_err(wrap)
}

/// Queues an append to a latent cache on candle's stream.
pub(crate) fn append_latent(
    op: &AppendLatentRows,
    (pool, layout): (&mut CudaStorage, &Layout),
    rows: Operand<Cuda>,
) -> Result<()> {
    let place = Cuda { stream: pool.device().cuda_stream(), format: op.format };
    let gpu = gpu(&place.stream)?;
    let tables = HeldTables::new(op.tables);
    let (key, _key) = place.view("rows", rows.0, rows.1)?;
    let tables = tables.views(&place)?;
    let (base, dtype, _pool) = place.lend_mut("key_pool", pool)?;
    let mut append = AppendLatent {
        key,
        // SAFETY: candle's layouts stay inside their storage, which is lent until this returns.
        key_pool: unsafe { view_mut("key_pool", (base, dtype), layout) }?,
        k_scales: None,
        block_table: Some(tables.block_table),
        kv_lens: tables.kv_lens,
        cu_seqlens: tables.cu_seqlens,
        rotary: None,
    };
    gpu.append_latent(&place.stream, &mut append).map_err(wrap)
}

/// Queues copies between the blocks of a pool, one after the other.
pub(crate) fn copy_blocks(
    pool: &mut CudaStorage,
    layout: &Layout,
    copies: &[BlockCopy],
) -> Result<()> {
    // Bytes are moved and not looked into.
    let place = Cuda { stream: pool.device().cuda_stream(), format: CacheFormat::new(DType::I8) };
    let gpu = gpu(&place.stream)?;
    let (base, dtype, _pool) = place.lend_mut("key_pool", pool)?;
    // SAFETY: candle's layouts stay inside their storage, which is lent until this returns.
    let pool = unsafe { view_mut("pool", (base, dtype), layout) }?;
    gpu.copy_blocks(&place.stream, &mut CopyBlocks { pools: &mut [pool], copies }).map_err(wrap)
}

/// Queues a merge on candle's stream.
pub(crate) fn merge(
    op: &MergeParts,
    parts: Operand<Cuda>,
    part_lse: Operand<Cuda>,
) -> Result<(CudaStorage, Shape)> {
    let device = parts.0.device().clone();
    let place = Cuda { stream: device.cuda_stream(), format: CacheFormat::default() };
    let gpu = gpu(&place.stream)?;
    let shape = parts.1.dims().get(1..).unwrap_or(&[]).to_vec();
    let rows = &shape[..shape.len().saturating_sub(1)];
    let (parts, _parts) = place.view("parts", parts.0, parts.1)?;
    let (part_lse, _part_lse) = place.view("part_lse", part_lse.0, part_lse.1)?;
    // Rows without elements are not looked at.
    let zeroed = shape.last() == Some(&0);
    let new = NewTensor { device: &device, stream: &place.stream, zeroed };
    let mut lse = new.memory::<f32>(rows)?;
    let slice = new.floats(parts.dtype(), &shape, |out| {
        let mut lent = DeviceViewMut::new(&mut lse, &place.stream);
        let lse = Some(lent.tensor(rows, None).map_err(wrap)?);
        gpu.merge(&place.stream, &mut Merge { parts, part_lse, out, lse }).map_err(wrap)
    })?;
    let storage = CudaStorage { slice: Slice::F32(lse), device: device.clone() };
    *op.lse.lock().expect("no pass has panicked") = Some(Storage::Cuda(storage));
    Ok((CudaStorage { slice, device }, Shape::from(shape)))
}
