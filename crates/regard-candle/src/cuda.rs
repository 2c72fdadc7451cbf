//! Tensors on NVIDIA GPUs: on candle's stream, in candle's context, by the addresses of its memory.

use crate::attention::{Fused, set_last};
use crate::options::{Attention, CacheFormat, Execution, Operand, Place, with_inputs};
use crate::view::{Elements, elements, refuse, strides, wrap};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorageSlice as Slice;
use candle_core::{CudaDevice, CudaStorage, Layout, Result, Shape, Storage};
use half::{bf16, f16};
use regard::cuda::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
};
use regard::cuda::{DeviceMemory, DeviceViewMut, Gpu, Workspace};
use regard::{DType, Element, MAX_RANK, Outputs, Plan, Problem, Tensor};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Memory of the GPU that a stream belongs to.
pub(crate) struct Cuda {
    stream: Arc<CudaStream>,
    /// How bytes of keys and values are meant.
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
        match (&storage.slice, self.format.of(argument)) {
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
            // What does not fit an i32 is negative to the kernel, which clamps it.
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

/// The GPU of a device of candle's, which keeps the kernels that were loaded: one a context.
fn gpu(stream: &CudaStream) -> Result<Arc<Gpu>> {
    static GPUS: OnceLock<Mutex<HashMap<usize, Arc<Gpu>>>> = OnceLock::new();
    let context = stream.context();
    let mut gpus =
        GPUS.get_or_init(Mutex::default).lock().expect("nobody panics while it is locked");
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
) -> Result<Plan> {
    let place = Cuda { stream: operands[0].0.device().cuda_stream(), format: execution.format };
    with_inputs(attention, &place, operands, |inputs| {
        let problem = Problem::from_inputs(inputs, execution.out_dtype(inputs.q.dtype())?, false);
        Plan::new(&problem.map_err(wrap)?, gpu(&place.stream)?.machine()).map_err(wrap)
    })
}

/// Queues attention on candle's stream.
pub(crate) fn forward(op: &Fused, operands: [Operand<Cuda>; 3]) -> Result<(CudaStorage, Shape)> {
    let device = operands[0].0.device().clone();
    let place = Cuda { stream: device.cuda_stream(), format: op.execution.format };
    with_inputs(&op.attention, &place, operands, |inputs| {
        let mut shape = inputs.q.shape().to_vec();
        set_last(&mut shape, inputs);
        let dtype = op.execution.out_dtype(inputs.q.dtype())?;
        let mut problem = Problem::from_inputs(inputs, dtype, op.lse.is_some()).map_err(wrap)?;
        if let Some(longest) = op.longest {
            longest.bound(&mut problem);
        }
        let gpu = gpu(&place.stream)?;
        let own;
        let plan = match &op.execution.plan {
            Some(plan) => &**plan,
            None => {
                own = Plan::new(&problem, gpu.machine()).map_err(wrap)?;
                &own
            }
        };
        let mut workspace = Workspace::for_plan(plan, &place.stream).map_err(wrap)?;
        let rows = &shape[..shape.len().saturating_sub(1)];
        // Rows that no sequence has are not written: zeros, as on the CPU.
        let mut lse = op.lse.as_ref().map(|_| zeros::<f32>(&device, rows)).transpose()?;
        let mut run = |out| {
            let mut lent = lse.as_mut().map(|lse| DeviceViewMut::new(lse, &place.stream));
            let lse = lent.as_mut().map(|lse| lse.tensor(rows, None)).transpose().map_err(wrap)?;
            let mut outputs = Outputs { out, lse };
            gpu.run(plan, &place.stream, inputs, &mut outputs, &mut workspace).map_err(wrap)
        };
        let slice = match dtype {
            DType::F16 => {
                let mut out = zeros::<f16>(&device, &shape)?;
                run(DeviceViewMut::new(&mut out, &place.stream)
                    .tensor(&shape, None)
                    .map_err(wrap)?)?;
                Slice::F16(out)
            }
            DType::BF16 => {
                let mut out = zeros::<bf16>(&device, &shape)?;
                run(DeviceViewMut::new(&mut out, &place.stream)
                    .tensor(&shape, None)
                    .map_err(wrap)?)?;
                Slice::BF16(out)
            }
            _ => {
                let mut out = zeros::<f32>(&device, &shape)?;
                run(DeviceViewMut::new(&mut out, &place.stream)
                    .tensor(&shape, None)
                    .map_err(wrap)?)?;
                Slice::F32(out)
            }
        };
        if let (Some(to), Some(lse)) = (&op.lse, lse) {
            let storage = CudaStorage { slice: Slice::F32(lse), device: device.clone() };
            *to.lock().expect("no pass has panicked") = Some(Storage::Cuda(storage));
        }
        Ok((CudaStorage { slice, device: device.clone() }, Shape::from(shape)))
    })
}

fn zeros<T: Element + DeviceRepr + ValidAsZeroBits>(
    device: &CudaDevice,
    shape: &[usize],
) -> Result<CudaSlice<T>> {
    device.alloc_zeros(shape.iter().product())
}
