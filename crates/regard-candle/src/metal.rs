//! Tensors on Apple GPUs: in candle's command encoder, by buffer and offset.
//!
//! Candle's buffers are not tracked by Metal. Its encoder, which is concurrent, notes what each
//! kernel reads and writes and puts barriers in between; regard's kernels are encoded by way of it.

use crate::attention::{Fused, GpuCall, new_plan};
use crate::merge::MergeParts;
use crate::options::{Attention, CacheFormat, Execution, Held, Operand, Place, with_inputs};
use crate::paged::{AppendLatentRows, AppendRows, HeldTables};
use crate::view::{Elements, elements, refuse, strides, wrap};
use candle_core::backend::BackendStorage;
use candle_core::{
    DType as CandleDType, Layout, MetalDevice, MetalStorage, Result, Shape, Storage,
};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use objc2::Message;
use objc2_metal::MTLSize;
use regard::metal::device::{BufferObject, Encoder, Gpu, PipelineObject};
use regard::metal::{Append, AppendLatent, BufferView, Merge, MetalMemory};
use regard::paged::BlockCopy;
use regard::{AppendScales, DType, MAX_RANK, Outputs, Plan, Tensor, TensorMut};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock};

/// Candle's encoder, as regard's kernels are encoded in it.
struct Tracked<'a>(&'a ComputeCommandEncoder);

impl Encoder for Tracked<'_> {
    fn set_pipeline(&self, pipeline: &PipelineObject) {
        self.0.set_compute_pipeline_state(&ComputePipeline::new(pipeline.retain()));
    }

    fn set_bytes(&self, bytes: &[u8], index: usize) {
        self.0.set_bytes_directly(index, bytes.len(), bytes.as_ptr().cast());
    }

    unsafe fn set_buffer(
        &self,
        buffer: &BufferObject,
        offset: usize,
        writable: bool,
        index: usize,
    ) {
        let buffer = Buffer::new(buffer.retain());
        match writable {
            true => self.0.set_output_buffer(index, Some(&buffer), offset),
            false => self.0.set_input_buffer(index, Some(&buffer), offset),
        }
    }

    fn set_threadgroup_memory(&self, bytes: usize) {
        self.0.set_threadgroup_memory_length(0, bytes);
    }

    fn dispatch(&self, [width, height, depth]: [usize; 3], threads: usize) {
        self.0.dispatch_thread_groups(
            MTLSize { width, height, depth },
            MTLSize { width: threads, height: 1, depth: 1 },
        );
    }

    fn barrier(&self) {
        self.0.insert_memory_barrier();
    }
}

/// Buffers of candle's.
pub(crate) struct Metal {
    /// Formats of keys and values that are bytes.
    format: CacheFormat,
}

impl Place for Metal {
    type Storage = MetalStorage;
    type Memory = MetalMemory;
    type Guard<'a> = ();

    const NAME: &'static str = "on the Metal device";

    fn storage(storage: &Storage) -> Option<&MetalStorage> {
        match storage {
            Storage::Metal(storage) => Some(storage),
            Storage::Cpu(_) | Storage::Cuda(_) => None,
        }
    }

    fn view<'a>(
        &'a self,
        argument: &str,
        storage: &'a MetalStorage,
        layout: &Layout,
    ) -> Result<(Tensor<'a, MetalMemory>, ())> {
        let buffer = BufferView::new(storage.buffer().as_ref());
        if let (CandleDType::U8, Some(format)) =
            (storage.dtype(), self.format.for_argument(argument))
        {
            let Elements { shape, strides } = elements(argument, layout, format)?;
            let tensor = buffer.tensor(layout.start_offset(), format, &shape, Some(&strides));
            return Ok((tensor.map_err(wrap)?, ()));
        }
        let dtype = element_type(argument, storage)?;
        let strides: [i64; MAX_RANK] = strides(argument, layout)?;
        let strides = Some(&strides[..layout.dims().len()]);
        let offset = layout.start_offset() * dtype.size();
        let tensor = buffer.tensor(offset, dtype, layout.dims(), strides).map_err(wrap)?;
        Ok((tensor, ()))
    }
}

/// The type of a storage's elements. A `u32` above `i32::MAX` is negative to the kernel, which
/// clamps it.
fn element_type(argument: &str, storage: &MetalStorage) -> Result<DType> {
    Ok(match storage.dtype() {
        CandleDType::F8E4M3 => DType::E4M3,
        CandleDType::F32 => DType::F32,
        CandleDType::F16 => DType::F16,
        CandleDType::BF16 => DType::BF16,
        CandleDType::I32 | CandleDType::U32 => DType::I32,
        CandleDType::U8 => DType::Bool,
        other => {
            let found = format!("of type {}", other.as_str());
            return Err(refuse(argument, found, "f32, f16, bf16, f8e4m3, i32, u32 or u8"));
        }
    })
}

impl Metal {
    /// A view of a storage that is written: of floats, or of the format of `argument`.
    fn view_mut<'a>(
        &self,
        argument: &str,
        storage: &'a MetalStorage,
        layout: &Layout,
    ) -> Result<TensorMut<'a, MetalMemory>> {
        let buffer = BufferView::new(storage.buffer().as_ref());
        let dtype = match (storage.dtype(), self.format.for_argument(argument)) {
            (CandleDType::U8, Some(format)) => {
                let Elements { shape, strides } = elements(argument, layout, format)?;
                let (start, strides) = (layout.start_offset(), Some(&strides[..]));
                return buffer.tensor_mut(start, format, &shape, strides).map_err(wrap);
            }
            (CandleDType::F32, _) => DType::F32,
            (CandleDType::F16, _) => DType::F16,
            (CandleDType::BF16, _) => DType::BF16,
            (other, _) => {
                let found = format!("of type {}", other.as_str());
                return Err(refuse(argument, found, "f32, f16 or bf16"));
            }
        };
        let strides: [i64; MAX_RANK] = strides(argument, layout)?;
        let strides = Some(&strides[..layout.dims().len()]);
        let offset = layout.start_offset() * dtype.size();
        buffer.tensor_mut(offset, dtype, layout.dims(), strides).map_err(wrap)
    }

    /// A view of what candle holds for reading only, to be written: its encoder orders what is
    /// done to its memory.
    fn written<'a>(&self, argument: &str, held: &'a Held) -> Result<TensorMut<'a, MetalMemory>> {
        self.view_mut(argument, held.storage::<Metal>(argument)?, held.layout())
    }
}

/// The GPU of a device of candle's, which keeps the kernels that were compiled.
fn gpu(device: &MetalDevice) -> Result<Arc<Gpu>> {
    static GPUS: OnceLock<Mutex<HashMap<u64, Arc<Gpu>>>> = OnceLock::new();
    let metal = device.metal_device();
    let mut gpus =
        GPUS.get_or_init(Mutex::default).lock().expect("no thread panics while it is locked");
    if let Some(gpu) = gpus.get(&metal.registry_id()) {
        return Ok(Arc::clone(gpu));
    }
    // SAFETY: it is the device's object.
    let gpu = unsafe { Gpu::from_raw_device(NonNull::from(metal.as_ref()).cast()) };
    let gpu = Arc::new(gpu.map_err(wrap)?);
    gpus.insert(metal.registry_id(), Arc::clone(&gpu));
    Ok(gpu)
}

/// New memory for a result.
struct NewTensor {
    storage: MetalStorage,
    layout: Layout,
}

impl NewTensor {
    /// Zeros if kernels do not write all of it, else whatever is there.
    fn new(device: &MetalDevice, dtype: DType, shape: &[usize], zeroed: bool) -> Result<NewTensor> {
        let candle_dtype = match dtype {
            DType::F16 => CandleDType::F16,
            DType::BF16 => CandleDType::BF16,
            _ => CandleDType::F32,
        };
        let count: usize = shape.iter().product();
        let builder = device.new_buffer_builder();
        let builder = match zeroed {
            true => builder.with_zeros(count.max(1) * dtype.size()),
            false => builder.with_size_for(count.max(1), candle_dtype),
        };
        let buffer = builder.with_label("regard").build()?;
        let storage = MetalStorage::new(buffer, device.clone(), count, candle_dtype);
        Ok(NewTensor { storage, layout: Layout::contiguous(shape) })
    }

    fn view(&self, argument: &str) -> Result<TensorMut<'_, MetalMemory>> {
        let place = Metal { format: CacheFormat::default() };
        place.view_mut(argument, &self.storage, &self.layout)
    }
}

pub(crate) fn plan(
    execution: &Execution,
    attention: &Attention,
    operands: [Operand<Metal>; 3],
) -> Result<Arc<Plan>> {
    let gpu = gpu(operands[0].0.device())?;
    let place = Metal { format: execution.format };
    with_inputs(attention, &place, operands, |inputs| {
        new_plan(&execution.problem(inputs)?, gpu.machine())
    })
}

/// Encodes attention in candle's command buffer.
pub(crate) fn forward(op: &Fused, operands: [Operand<Metal>; 3]) -> Result<(MetalStorage, Shape)> {
    let device = operands[0].0.device().clone();
    let gpu = gpu(&device)?;
    let place = Metal { format: op.execution.format };
    with_inputs(&op.attention, &place, operands, |inputs| {
        let GpuCall { plan, dtype, shape, zeroed } =
            op.gpu_call(inputs, |problem| new_plan(problem, gpu.machine()))?;
        let rows = &shape[..shape.len().saturating_sub(1)];
        let out = NewTensor::new(&device, dtype, &shape, zeroed)?;
        let lse = match &op.lse {
            Some(_) => Some(NewTensor::new(&device, DType::F32, rows, zeroed)?),
            None => None,
        };
        let bytes = plan.workspace_bytes().max(16);
        let workspace =
            device.new_buffer_builder().with_size_for(bytes, CandleDType::U8).build()?;
        let mut outputs = Outputs {
            out: out.view("out")?,
            lse: lse.as_ref().map(|lse| lse.view("lse")).transpose()?,
        };
        let commands = device.command_encoder()?;
        let (encoder, view) = (Tracked(commands.as_ref()), BufferView::new((*workspace).as_ref()));
        // SAFETY: candle keeps buffers until the GPU has run what is encoded, and orders their
        // uses.
        unsafe { gpu.run_raw(&plan, &encoder, inputs, &mut outputs, &view) }.map_err(wrap)?;
        drop(commands);
        if let (Some(to), Some(lse)) = (&op.lse, lse) {
            *to.lock().expect("no pass has panicked") = Some(Storage::Metal(lse.storage));
        }
        Ok((out.storage, Shape::from(shape)))
    })
}

/// Encodes an append in candle's command buffer.
pub(crate) fn append(
    op: &AppendRows,
    (pool, layout): (&mut MetalStorage, &Layout),
    [keys, values]: [Operand<Metal>; 2],
) -> Result<()> {
    let device = pool.device().clone();
    let gpu = gpu(&device)?;
    let place = Metal { format: op.format };
    let tables = HeldTables::new(op.tables);
    let tables = tables.views(&place)?;
    let value_pool = Held::new(&op.value_pool);
    let scales = op.scales.each_ref().map(|scales| scales.as_ref().map(Held::new));
    let mut dynamic = [None, None];
    for ((to, held), name) in dynamic.iter_mut().zip(&scales).zip(["k_scales", "v_scales"]) {
        let Some(held) = held else { continue };
        *to = Some(AppendScales::Dynamic(place.written(name, held)?));
    }
    let [k_scales, v_scales] = dynamic;
    let mut append = Append {
        key: place.view("keys", keys.0, keys.1)?.0,
        value: place.view("values", values.0, values.1)?.0,
        key_pool: place.view_mut("key_pool", pool, layout)?,
        value_pool: place.written("value_pool", &value_pool)?,
        k_scales,
        v_scales,
        block_table: Some(tables.block_table),
        kv_lens: tables.kv_lens,
        cu_seqlens: tables.cu_seqlens,
        rotary: None,
    };
    let commands = device.command_encoder()?;
    // SAFETY: as in `forward`.
    unsafe { gpu.append(&Tracked(commands.as_ref()), &mut append) }.map_err(wrap)
}

/// Encodes an append to a latent cache in candle's command buffer.
pub(crate) fn append_latent(
    op: &AppendLatentRows,
    (pool, layout): (&mut MetalStorage, &Layout),
    rows: Operand<Metal>,
) -> Result<()> {
    let device = pool.device().clone();
    let gpu = gpu(&device)?;
    let place = Metal { format: op.format };
    let tables = HeldTables::new(op.tables);
    let tables = tables.views(&place)?;
    let mut append = AppendLatent {
        key: place.view("rows", rows.0, rows.1)?.0,
        key_pool: place.view_mut("key_pool", pool, layout)?,
        k_scales: None,
        block_table: Some(tables.block_table),
        kv_lens: tables.kv_lens,
        cu_seqlens: tables.cu_seqlens,
        rotary: None,
    };
    let commands = device.command_encoder()?;
    // SAFETY: as in `forward`.
    unsafe { gpu.append_latent(&Tracked(commands.as_ref()), &mut append) }.map_err(wrap)
}

/// Encodes copies between the blocks of a pool, one after the other.
pub(crate) fn copy_blocks(
    pool: &mut MetalStorage,
    layout: &Layout,
    copies: &[BlockCopy],
) -> Result<()> {
    let size = pool.dtype().size_in_bytes();
    let [block, slot] = [0, 1].map(|dim| layout.stride()[dim] * size);
    let place = |n: usize| layout.start_offset() * size + n * block;
    for copy in copies.iter().filter(|copy| copy.from != copy.to) {
        let (from, to, bytes) = (place(copy.from), place(copy.to), copy.slots * slot);
        // An encoder each: nothing orders the copies of one encoder.
        let mut commands = pool.device().blit_command_encoder()?;
        commands.copy_from_buffer(pool.buffer(), from, pool.buffer(), to, bytes);
    }
    Ok(())
}

/// Encodes a merge in candle's command buffer.
pub(crate) fn merge(
    op: &MergeParts,
    parts: Operand<Metal>,
    part_lse: Operand<Metal>,
) -> Result<(MetalStorage, Shape)> {
    let device = parts.0.device().clone();
    let gpu = gpu(&device)?;
    let place = Metal { format: CacheFormat::default() };
    let shape = parts.1.dims().get(1..).unwrap_or(&[]).to_vec();
    let rows = &shape[..shape.len().saturating_sub(1)];
    let (parts, ()) = place.view("parts", parts.0, parts.1)?;
    let (part_lse, ()) = place.view("part_lse", part_lse.0, part_lse.1)?;
    let out = NewTensor::new(&device, parts.dtype(), &shape, false)?;
    let lse = NewTensor::new(&device, DType::F32, rows, false)?;
    let mut merge = Merge { parts, part_lse, out: out.view("out")?, lse: Some(lse.view("lse")?) };
    let commands = device.command_encoder()?;
    // SAFETY: as in `forward`.
    unsafe { gpu.merge(&Tracked(commands.as_ref()), &mut merge) }.map_err(wrap)?;
    drop(commands);
    *op.lse.lock().expect("no pass has panicked") = Some(Storage::Metal(lse.storage));
    Ok((out.storage, Shape::from(shape)))
}
