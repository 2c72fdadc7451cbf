//! Runs plans on an Apple GPU, with the caller's device, queue, encoders and buffers.
//!
//! Operands are views of buffers, shared or private ([`BufferView::new`]); lengths and tables are
//! read on the device. [`Gpu::run`], [`Gpu::append`] and [`Gpu::merge`] encode into the caller's
//! encoder, wait for nothing and allocate nothing on the GPU. [`Gpu::run_copied`] copies operands
//! from the host's memory and waits.
//!
//! Nothing is compiled before it is needed: the source of a kind of kernel and a type when the
//! first of its pipelines is, and a pipeline (a kernel with its function constants) when a run
//! first needs it. [`Gpu::load`] compiles a plan's pipelines in advance, so that nothing is
//! compiled while serving. [`Gpu::with_archive`] takes compiled pipelines from a file.

mod encoder;
mod host_copy;
mod objects;
mod pipelines;

pub use encoder::Encoder;
pub use host_copy::HostCopy;
pub use objects::{BufferObject, DeviceObject, EncoderObject, PipelineObject, QueueObject};

use super::launch::{Binding, Dispatch, Dispatches};
use super::merge::MERGE_THREADS;
use super::plan::plan;
// Tests run this file without a Mac.
#[cfg(metal_stand_in)]
use super::stand_in::{objc2, objc2_metal};
use super::{
    Append, AppendLatent, BufferView, MIN_FAMILY, Merge, MetalMemory, SIMD_WIDTH, append,
    append_latent, cores_of_architecture, dispatches, merge, pipelines as pipelines_of,
};
use crate::dtype::DType;
use crate::error::Error;
use crate::machine::{Device, Machine, MetalFacts};
use crate::memory::Memory;
use crate::paged::CopyBlocks;
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::tensor::{Tensor, TensorMut};
use objc2::Message;
use objc2::rc::{Retained, autoreleasepool};
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLCreateSystemDefaultDevice,
    MTLDevice, MTLGPUFamily, MTLResourceOptions,
};
use objects::{description, refusal};
use pipelines::Pipelines;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// GPU cores that plans assume for an unknown architecture name. The number affects how keys are
/// split, but no result.
const ASSUMED_CORES: usize = 10;

/// The types that kernels are compiled for.
const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A GPU with the kernels compiled for it.
pub struct Gpu {
    device: Retained<DeviceObject>,
    queue: Retained<QueueObject>,
    pipelines: Pipelines,
    machine: Machine,
}

impl Gpu {
    /// This system's default GPU, with a queue of our own.
    ///
    /// # Errors
    /// A refusal if there is none, or if it is older than family 7.
    pub fn system_default() -> Result<Gpu, Error> {
        let none = || refusal("this machine", "it has no Metal device");
        let device = MTLCreateSystemDefaultDevice().ok_or_else(none)?;
        let queue = device.newCommandQueue().ok_or_else(none)?;
        Gpu::new(device, queue)
    }

    /// The caller's device and queue, with the shipped source.
    ///
    /// # Errors
    /// A refusal if the device is older than family 7.
    pub fn new(device: Retained<DeviceObject>, queue: Retained<QueueObject>) -> Result<Gpu, Error> {
        let machine = machine_of(&device)?;
        let pipelines = Pipelines::from_source(device.clone(), &machine.name);
        Ok(Gpu { device, queue, pipelines, machine })
    }

    /// A device by the address of its object, with a queue of our own: for callers that are not
    /// Rust.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    ///
    /// # Safety
    /// It is an `id<MTLDevice>`, which is retained here.
    pub unsafe fn from_raw_device(device: NonNull<c_void>) -> Result<Gpu, Error> {
        // SAFETY: the caller's promise.
        let device = unsafe { device.cast::<DeviceObject>().as_ref() }.retain();
        let none = || refusal("this machine", "the device makes no command queue");
        let queue = device.newCommandQueue().ok_or_else(none)?;
        Gpu::new(device, queue)
    }

    /// The same with a metallib made from [`source`](super::source) (`xcrun metal -std=metal3.1
    /// -fno-fast-math`), so that nothing is compiled from source at run time.
    ///
    /// # Errors
    /// As [`Gpu::new`]; if the file cannot be loaded.
    pub fn with_metallib(
        device: Retained<DeviceObject>,
        queue: Retained<QueueObject>,
        path: &str,
    ) -> Result<Gpu, Error> {
        let machine = machine_of(&device)?;
        let pipelines = Pipelines::from_metallib(device.clone(), &machine.name, path)?;
        Ok(Gpu { device, queue, pipelines, machine })
    }

    /// The same with a binary archive of [`Gpu::save_archive`]: pipelines that are in it are not
    /// compiled for this GPU again. Without such a file there is nothing to take. The source of the
    /// kernels is still compiled to Metal's intermediate form, unless there is a metallib.
    ///
    /// # Errors
    /// A refusal if Metal cannot read the file.
    pub fn with_archive(self, path: &str) -> Result<Gpu, Error> {
        self.use_archive(path)?;
        Ok(self)
    }

    /// [`Gpu::with_archive`] of a GPU that is in use. Pipelines that have been loaded stay as they
    /// are, and no other archive is used any longer.
    ///
    /// # Errors
    /// As there; the archive before stays in use then.
    pub fn use_archive(&self, path: &str) -> Result<(), Error> {
        self.pipelines.use_archive(path)
    }

    /// Writes all pipelines that have been loaded to a binary archive, in place of a file that is
    /// there. Metal reads it on GPUs and systems of the same version; elsewhere pipelines are
    /// compiled as if it were empty. Returns the number of pipelines.
    ///
    /// # Errors
    /// A refusal if Metal cannot make the archive, or it cannot be written.
    pub fn save_archive(&self, path: &str) -> Result<usize, Error> {
        self.pipelines.save_archive(path)
    }

    /// The same, planning for this many GPU cores. Otherwise the number is that of the largest GPU
    /// of the architecture's name, or 10.
    pub fn with_cores(mut self, cores: usize) -> Gpu {
        if let Device::Metal(facts) = &mut self.machine.device {
            facts.cores = cores.max(1);
        }
        self
    }

    /// The machine that plans are made for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The device.
    pub fn device(&self) -> &DeviceObject {
        &self.device
    }

    /// The queue.
    pub fn queue(&self) -> &QueueObject {
        &self.queue
    }

    /// Plans operands for this GPU. Lengths in device memory are not read: shapes bound them. For
    /// ragged batches the caller may set smaller bounds in a [`Problem`] and plan that.
    ///
    /// # Errors
    /// As [`Problem::from_operands`] and [`Plan::new`].
    pub fn plan<M: Memory>(&self, inputs: &Inputs<M>, outputs: &Outputs<M>) -> Result<Plan, Error> {
        let Device::Metal(facts) = &self.machine.device else { unreachable!("this is a GPU") };
        plan(&Problem::from_operands(inputs, outputs)?, facts, &self.machine)
    }

    /// Compiles the pipelines that a plan can need, so that none is compiled when it runs. Threads
    /// compile different pipelines at the same time.
    ///
    /// # Errors
    /// If the plan is for another kind of machine, or a kernel cannot be specialized.
    pub fn load(&self, plan: &Plan) -> Result<(), Error> {
        for (pipeline, threads) in pipelines_of(plan)? {
            self.pipelines.get(&pipeline, threads)?;
        }
        Ok(())
    }

    /// Compiles the pipelines of [`Gpu::append`].
    ///
    /// # Errors
    /// If a kernel cannot be specialized.
    pub fn load_append(&self) -> Result<(), Error> {
        TYPES.into_iter().try_for_each(|dtype| {
            self.pipelines.get(&super::append::pipeline(dtype), SIMD_WIDTH as u32).map(|_| ())
        })
    }

    /// Compiles the pipelines of [`Gpu::merge`].
    ///
    /// # Errors
    /// If a kernel cannot be specialized.
    pub fn load_merge(&self) -> Result<(), Error> {
        TYPES.into_iter().try_for_each(|dtype| {
            self.pipelines.get(&super::merge::pipeline(dtype), MERGE_THREADS).map(|_| ())
        })
    }

    fn buffer(
        &self,
        bytes: usize,
        options: MTLResourceOptions,
    ) -> Result<Retained<BufferObject>, Error> {
        self.device.newBufferWithLength_options(bytes.max(16), options).ok_or_else(|| {
            refusal(&self.machine.name, format!("no memory for a buffer of {bytes} bytes"))
        })
    }

    /// A buffer that this GPU and the CPU share. Its contents are undefined.
    ///
    /// # Errors
    /// A refusal if there is no memory.
    pub fn shared_buffer(&self, bytes: usize) -> Result<Retained<BufferObject>, Error> {
        self.buffer(bytes, MTLResourceOptions::StorageModeShared)
    }

    /// A buffer of this GPU's own. Its contents are undefined.
    ///
    /// # Errors
    /// A refusal if there is no memory.
    pub fn private_buffer(&self, bytes: usize) -> Result<Retained<BufferObject>, Error> {
        self.buffer(bytes, MTLResourceOptions::StorageModePrivate)
    }

    /// Encodes a run of the plan into the caller's encoder, serial or concurrent, and returns: one
    /// dispatch, or several if attention is long, keys are split, or a mask has a tile map. As with
    /// [`Plan::run`], operands may be smaller than planned, but heads, dims, types and features are
    /// the planned ones. Lengths, offsets and table entries are read when the kernels run, which
    /// clamp them to what the operands can hold. Rows of `out` that no sequence has stay as they
    /// are.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, the workspace is too small, or a
    /// kernel cannot be specialized; nothing is encoded then.
    ///
    /// # Safety
    /// All objects belong to this GPU's device. Until the GPU has run what was encoded, buffers are
    /// not freed (command buffers retain them unless asked not to), and nothing else writes the
    /// operands or uses the outputs and the workspace. Later work on a serial encoder may.
    pub unsafe fn run(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &mut Outputs<MetalMemory>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.run_raw(plan, encoder, inputs, outputs, &workspace.view()) }
    }

    /// [`Gpu::run`] with a view of the caller's buffer as the workspace.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn run_raw(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &mut Outputs<MetalMemory>,
        workspace: &BufferView,
    ) -> Result<(), Error> {
        let dispatches = self.prepare(plan, inputs, outputs, workspace)?;
        // SAFETY: passed on, here and below.
        unsafe {
            self.encode_map(&dispatches, encoder)?;
            self.encode_attention(&dispatches, encoder)
        }
    }

    /// Encodes the first part of [`Gpu::run`] alone: the tile map of the mask, which marks the
    /// tiles that the mask empties or leaves unchanged. Layers that share a mask make it once, and
    /// run with [`Gpu::run_mapped`].
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn map_mask(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &Outputs<MetalMemory>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.map_mask_raw(plan, encoder, inputs, outputs, &workspace.view()) }
    }

    /// [`Gpu::map_mask`] with a view of the caller's buffer as the workspace.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn map_mask_raw(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &Outputs<MetalMemory>,
        workspace: &BufferView,
    ) -> Result<(), Error> {
        let dispatches = self.prepare(plan, inputs, outputs, workspace)?;
        // SAFETY: passed on.
        unsafe { self.encode_map(&dispatches, encoder) }
    }

    /// [`Gpu::run`] with the tile map that the workspace has: of [`Gpu::map_mask`] or of an earlier
    /// run with this plan, this mask and operands of these shapes, or written by the caller where
    /// [`tile_map`](super::tile_map) says.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn run_mapped(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &mut Outputs<MetalMemory>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.run_mapped_raw(plan, encoder, inputs, outputs, &workspace.view()) }
    }

    /// [`Gpu::run_mapped`] with a view of the caller's buffer as the workspace.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn run_mapped_raw(
        &self,
        plan: &Plan,
        encoder: &dyn Encoder,
        inputs: &Inputs<MetalMemory>,
        outputs: &mut Outputs<MetalMemory>,
        workspace: &BufferView,
    ) -> Result<(), Error> {
        let dispatches = self.prepare(plan, inputs, outputs, workspace)?;
        // SAFETY: passed on.
        unsafe { self.encode_attention(&dispatches, encoder) }
    }

    /// The dispatches of a run, with their pipelines compiled: all that can fail does so before
    /// anything is encoded.
    fn prepare(
        &self,
        plan: &Plan,
        inputs: &Inputs<MetalMemory>,
        outputs: &Outputs<MetalMemory>,
        workspace: &BufferView,
    ) -> Result<Dispatches, Error> {
        let dispatches = dispatches(plan, inputs, outputs, workspace)?;
        for dispatch in dispatches.iter() {
            self.pipelines.get(&dispatch.pipeline, dispatch.threads)?;
        }
        Ok(dispatches)
    }

    /// Encodes the making of a tile map, and the barrier after it: on a concurrent encoder nothing
    /// else orders them; on a serial one this costs nothing.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    unsafe fn encode_map(
        &self,
        dispatches: &Dispatches,
        encoder: &dyn Encoder,
    ) -> Result<(), Error> {
        let Some(map) = dispatches.map() else { return Ok(()) };
        // SAFETY: passed on.
        unsafe { self.encode(map, encoder)? };
        encoder.barrier();
        Ok(())
    }

    /// Encodes attention and the combine of its splits.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    unsafe fn encode_attention(
        &self,
        dispatches: &Dispatches,
        encoder: &dyn Encoder,
    ) -> Result<(), Error> {
        // SAFETY: passed on, here and below.
        dispatches
            .attention()
            .try_for_each(|dispatch| unsafe { self.encode(&dispatch, encoder) })?;
        let Some(combine) = dispatches.combine() else { return Ok(()) };
        // It reads what the splits wrote.
        encoder.barrier();
        // SAFETY: as above.
        unsafe { self.encode(combine, encoder) }
    }

    /// Encodes an append. Lengths and table entries are read when the kernel runs.
    ///
    /// # Errors
    /// If an operand breaks the contract, or the kernel cannot be specialized; nothing is encoded
    /// then.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn append(&self, encoder: &dyn Encoder, operands: &mut Append) -> Result<(), Error> {
        match append(operands)? {
            // SAFETY: passed on.
            Some(dispatch) => unsafe { self.encode(&dispatch, encoder) },
            None => Ok(()),
        }
    }

    /// Encodes an append to a latent cache, as [`Gpu::append`].
    ///
    /// # Errors
    /// As there, or if rows that are not quantized have only rotary dims.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn append_latent(
        &self,
        encoder: &dyn Encoder,
        operands: &mut AppendLatent,
    ) -> Result<(), Error> {
        match append_latent(operands)? {
            // SAFETY: passed on.
            Some(dispatch) => unsafe { self.encode(&dispatch, encoder) },
            None => Ok(()),
        }
    }

    /// Encodes a merge.
    ///
    /// # Errors
    /// If an operand breaks the contract, or the kernel cannot be specialized; nothing is encoded
    /// then.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    pub unsafe fn merge(&self, encoder: &dyn Encoder, operands: &mut Merge) -> Result<(), Error> {
        match merge(operands)? {
            // SAFETY: passed on.
            Some(dispatch) => unsafe { self.encode(&dispatch, encoder) },
            None => Ok(()),
        }
    }

    /// Copies of blocks are refused: a compute encoder cannot copy memory, and there is no kernel
    /// for it. Make them with a blit encoder, one encoder after the other where a copy reads or
    /// writes a block that another has written or read.
    ///
    /// # Errors
    /// If an operand breaks the contract, or there is something to copy.
    pub fn copy_blocks(
        &self,
        _encoder: &dyn Encoder,
        operands: &mut CopyBlocks<MetalMemory>,
    ) -> Result<(), Error> {
        operands.check()?;
        if operands.pools.is_empty() || operands.copies.is_empty() {
            return Ok(());
        }
        let reason = "copies of blocks have no kernel, and a compute encoder cannot copy memory: \
                      use a blit encoder";
        Err(refusal(&self.machine.to_string(), reason))
    }

    /// Encodes one dispatch.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    unsafe fn encode(&self, dispatch: &Dispatch, encoder: &dyn Encoder) -> Result<(), Error> {
        let pipeline = self.pipelines.get(&dispatch.pipeline, dispatch.threads)?;
        // Metal wants a buffer wherever a kernel declares one, read or not.
        let any = dispatch.buffers.iter().flatten().next().copied();
        // Setters and dispatches may leave autoreleased objects, and a thread may have no pool.
        autoreleasepool(|_| {
            encoder.set_pipeline(&pipeline);
            encoder.set_bytes(dispatch.params.bytes(), 0);
            for (index, binding) in dispatch.buffers.iter().enumerate().skip(1) {
                // A stand-in for a buffer is not written.
                let writable = binding.is_some_and(|binding| binding.writable);
                if let Some(Binding { buffer, offset, .. }) = binding.or(any) {
                    // SAFETY: bindings are inside their buffers, which their views have borrowed;
                    // the rest is the caller's promise.
                    unsafe {
                        let buffer = &*(buffer as *const BufferObject);
                        encoder.set_buffer(buffer, offset, writable, index);
                    }
                }
            }
            if dispatch.threadgroup_bytes > 0 {
                encoder.set_threadgroup_memory(dispatch.threadgroup_bytes.next_multiple_of(16));
            }
            encoder.dispatch(dispatch.grid.map(|n| n as usize), dispatch.threads as usize);
        });
        Ok(())
    }

    /// Runs a plan on operands in the host's memory: they are copied to buffers of our own, and
    /// outputs back. Waits; how long the GPU's part took.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, there is no memory, or the GPU fails.
    pub fn run_copied(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<Duration, Error> {
        self.run_copied_in(Workspace::for_plan(plan, self)?, plan, inputs, outputs)
    }

    /// [`Gpu::run_copied`] with every byte of the workspace set before: for tests.
    #[doc(hidden)]
    pub fn run_copied_over(
        &self,
        garbage: u8,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<Duration, Error> {
        let bytes = plan.workspace_bytes();
        let buffer = self.shared_buffer(bytes)?;
        if bytes > 0 {
            // SAFETY: the buffer is ours, shared, and at least as long.
            unsafe { buffer.contents().as_ptr().cast::<u8>().write_bytes(garbage, bytes) };
        }
        self.run_copied_in(Workspace::new(buffer), plan, inputs, outputs)
    }

    fn run_copied_in(
        &self,
        mut workspace: Workspace,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<Duration, Error> {
        // Here contents can be checked too.
        plan.problem().covers(&Problem::from_operands(inputs, outputs)?)?;
        let copies: Vec<HostCopy> = inputs
            .named()
            .map(|(name, tensor)| self.copy_of(name, tensor))
            .collect::<Result<_, _>>()?;
        let mut next = copies.iter();
        let copied = inputs.try_map(|_, tensor| {
            let copy = next.next().expect("one per tensor, in the same order");
            copy.tensor(&tensor)
        })?;
        let out = self.copy_of_output("out", &outputs.out)?;
        let lse = match &outputs.lse {
            Some(lse) => Some(self.copy_of_output("lse", lse)?),
            None => None,
        };
        let lse_view = match (&lse, &outputs.lse) {
            (Some(copy), Some(lse)) => Some(copy.tensor_mut(lse)?),
            _ => None,
        };
        let mut results = Outputs { out: out.tensor_mut(&outputs.out)?, lse: lse_view };
        let took = self.submit(|encoder| {
            // SAFETY: the buffers are ours and outlive the work, which has ended when `submit`
            // returns.
            unsafe { self.run(plan, encoder, &copied, &mut results, &mut workspace) }
        })?;
        out.download(&mut outputs.out);
        if let (Some(copy), Some(lse)) = (&lse, &mut outputs.lse) {
            copy.download(lse);
        }
        Ok(took)
    }

    /// Copies a tensor to a shared buffer. Errors call it `name`.
    ///
    /// # Errors
    /// If a stride is negative, or there is no memory.
    pub fn copy_of(&self, name: &str, host: &Tensor) -> Result<HostCopy, Error> {
        HostCopy::new(name, host, host.byte_range(), |bytes| self.shared_buffer(bytes))
    }

    /// Copies a tensor that will be written, as [`Gpu::copy_of`].
    ///
    /// # Errors
    /// As there.
    pub fn copy_of_output(&self, name: &str, host: &TensorMut) -> Result<HostCopy, Error> {
        HostCopy::new(name, host, host.byte_range(), |bytes| self.shared_buffer(bytes))
    }

    /// Lets `encode` fill a command buffer of our queue, commits it and waits. Returns how long
    /// committing and waiting took.
    ///
    /// # Errors
    /// The errors of `encode`; [`Error::Driver`] if the GPU fails or stops the work, with the
    /// status of the command buffer.
    pub fn submit(
        &self,
        encode: impl FnOnce(&EncoderObject) -> Result<(), Error>,
    ) -> Result<Duration, Error> {
        let driver_error = |doing: &str, reason: String| Error::Driver {
            doing: format!("{doing} on {}", self.machine.name),
            reason,
        };
        // Command buffers and encoders are autoreleased, and a thread of the caller's may have no
        // pool.
        autoreleasepool(|_| {
            let none = || driver_error("encoding", "no command buffer or encoder".into());
            let commands = self.queue.commandBuffer().ok_or_else(none)?;
            let encoder = commands.computeCommandEncoder().ok_or_else(none)?;
            let encoded = encode(&encoder);
            encoder.endEncoding();
            encoded?;
            let begun = Instant::now();
            commands.commit();
            commands.waitUntilCompleted();
            let took = begun.elapsed();
            match commands.error() {
                None => Ok(took),
                Some(error) => {
                    let status = commands.status().0;
                    let reason = format!("{} (status {status})", description(&error));
                    Err(driver_error("running a command buffer", reason))
                }
            }
        })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.machine)
    }
}

/// The memory that runs leave partial results in: a buffer that any plan can use that it is large
/// enough for, one run at a time. Runs on one serial encoder follow each other; runs that may
/// overlap each need their own.
pub struct Workspace {
    buffer: Retained<BufferObject>,
}

// SAFETY: buffers may be used and released on any thread; what is in them is the GPU's.
unsafe impl Send for Workspace {}

impl Workspace {
    /// Takes a buffer as a workspace.
    pub fn new(buffer: Retained<BufferObject>) -> Workspace {
        Workspace { buffer }
    }

    /// Allocates a private buffer of exactly what the plan needs.
    ///
    /// # Errors
    /// A refusal if there is no memory.
    pub fn for_plan(plan: &Plan, gpu: &Gpu) -> Result<Workspace, Error> {
        Ok(Workspace { buffer: gpu.private_buffer(plan.workspace_bytes())? })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.buffer.length()
    }

    /// The buffer again.
    pub fn into_buffer(self) -> Retained<BufferObject> {
        self.buffer
    }

    fn view(&self) -> BufferView<'_> {
        BufferView::new(&self.buffer)
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Workspace({} bytes)", self.bytes())
    }
}

/// The facts of a device.
fn machine_of(device: &DeviceObject) -> Result<Machine, Error> {
    let name = device.name().to_string();
    // Later families include earlier ones; 1000 is the first number of Apple's.
    let family = (1..=20)
        .rev()
        .find(|&family| device.supportsFamily(MTLGPUFamily(1000 + family)))
        .unwrap_or(0);
    if family < MIN_FAMILY as isize {
        let reason = format!(
            "it is of Apple GPU family {family}; the kernels need {MIN_FAMILY} (M1, A14) or later"
        );
        return Err(refusal(&name, reason));
    }
    let architecture = device.architecture().name().to_string();
    let facts = MetalFacts {
        family: family as u32,
        cores: cores_of_architecture(&architecture).unwrap_or(ASSUMED_CORES),
        threadgroup_bytes: device.maxThreadgroupMemoryLength(),
    };
    Ok(Machine { name, device: Device::Metal(facts) })
}
