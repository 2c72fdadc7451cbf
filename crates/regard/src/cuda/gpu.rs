//! One GPU: its facts, its loaded kernels, and running plans on it.

use super::launch::{DecodeCall, DecodeContext, LatentMaps, PrefillCall};
use super::mask_map;
use super::modules::{Function, Modules};
use super::plan::plan;
use super::prefix::PrefixCall;
use super::registry::{Cache, Family};
use super::tensor_map::Described;
use super::widen::WidenCall;
use super::workspace::check_workspace;
use super::{
    Decode, DeviceMemory, Launch, Launches, Prefill, RawWorkspace, Workspace, driver, launch,
};
use crate::dtype::DType;
use crate::error::Error;
use crate::machine::{CudaFacts, Device, Machine};
use crate::params::{
    AttentionParameters, ListedParameters, PrefillParameters, TensorMap, TensorMaps,
};
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::tile_map::TileMap;
use cudarc::driver::sys::CUdevice_attribute_enum as Attribute;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// Results of a step that the workspace has before a layer runs: [`Gpu::run_prepared`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prepared {
    /// The schedule of the step: [`Gpu::schedule`].
    pub schedule: bool,
    /// The tile map of the mask: [`Gpu::map_mask`].
    pub tile_map: bool,
}

/// One GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number, as CUDA counts.
    pub ordinal: usize,
    /// The product name.
    pub name: String,
    /// The facts that plans depend on.
    pub facts: CudaFacts,
    /// Its memory, in bytes.
    pub memory_bytes: usize,
    /// The newest CUDA that the driver knows: `(12, 8)`.
    pub driver: (u32, u32),
}

/// The GPUs of this machine. Looks without using any: no context is made.
///
/// # Errors
/// [`Error::Refused`], with the reason in words, where there is no driver or no GPU.
pub fn gpus() -> Result<Vec<GpuInfo>, Error> {
    driver::require()?;
    let count = result::device::get_count()
        .map_err(|error| driver::driver_error("counting GPUs", error))?;
    (0..count).map(gpu_info).collect()
}

fn gpu_info(ordinal: i32) -> Result<GpuInfo, Error> {
    let failed = |error| driver::driver_error(format!("describing GPU {ordinal}"), error);
    let device = result::device::get(ordinal).map_err(failed)?;
    Ok(GpuInfo {
        ordinal: ordinal as usize,
        name: result::device::get_name(device).map_err(failed)?,
        facts: facts_of(device)?,
        // SAFETY: the device has just been named by the driver.
        memory_bytes: unsafe { result::device::total_mem(device) }.map_err(failed)?,
        driver: driver::version()?,
    })
}

fn facts_of(device: sys::CUdevice) -> Result<CudaFacts, Error> {
    let attribute = |attribute| {
        // SAFETY: the device was named by the driver.
        unsafe { result::device::get_attribute(device, attribute) }
            .map(|value| value.max(0) as usize)
            .map_err(|error| driver::driver_error("asking a GPU what it has", error))
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(CudaFacts {
        compute_capability: (10 * major + minor) as u32,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
    })
}

/// A GPU to run plans on: a context, and the kernels loaded into it. Any number of threads may use
/// one at once.
///
/// It makes no stream, allocates no device memory and waits for nothing: all of that is the
/// caller's. Kernels are loaded when they are first needed, or ahead of that by [`Gpu::load`].
///
/// ```no_run
/// use regard::cuda::{Gpu, DeviceView, DeviceViewMut, Workspace};
/// use regard::{Attention, Inputs, Outputs, bf16};
///
/// // One new token against a cache of 4096, 32 query heads over 8 key/value heads, head dim 128.
/// let gpu = Gpu::new(0)?;
/// let stream = gpu.context().new_stream()?;
/// let q = stream.alloc_zeros::<bf16>(32 * 128)?;
/// let k = stream.alloc_zeros::<bf16>(4096 * 8 * 128)?;
/// let v = stream.alloc_zeros::<bf16>(4096 * 8 * 128)?;
/// let mut out = stream.alloc_zeros::<bf16>(32 * 128)?;
/// {
///     let [q, k, v] = [&q, &k, &v].map(|tensor| DeviceView::new(tensor, &stream));
///     let mut out = DeviceViewMut::new(&mut out, &stream);
///     let inputs = Inputs::new(
///         q.tensor(&[1, 1, 32, 128], None)?,
///         k.tensor(&[1, 4096, 8, 128], None)?,
///         v.tensor(&[1, 4096, 8, 128], None)?,
///         Attention::causal(),
///     );
///     let mut outputs = Outputs { out: out.tensor(&[1, 1, 32, 128], None)?, lse: None };
///     let plan = gpu.plan(&inputs, &outputs)?;
///     let mut workspace = Workspace::for_plan(&plan, &stream)?;
///     gpu.run(&plan, &stream, &inputs, &mut outputs, &mut workspace)?;
/// }
/// let out: Vec<bf16> = stream.clone_dtoh(&out)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Gpu {
    context: Arc<CudaContext>,
    machine: Machine,
    modules: Modules,
}

impl Gpu {
    /// The GPU of that number, by its primary context: the one that CUDA's runtime, PyTorch and
    /// candle use too.
    ///
    /// # Errors
    /// [`Error::Refused`] where there is no driver or no GPU, [`Error::Argument`] if there is none
    /// of that number.
    pub fn new(ordinal: usize) -> Result<Gpu, Error> {
        driver::require()?;
        let count = result::device::get_count()
            .map_err(|error| driver::driver_error("counting GPUs", error))?;
        if ordinal >= count.max(0) as usize {
            return Err(Error::argument(
                "device",
                format!("cuda:{ordinal}"),
                format!("cuda:0 to cuda:{}", count - 1),
            ));
        }
        let context = CudaContext::new(ordinal)
            .map_err(|error| driver::driver_error(format!("using GPU {ordinal}"), error))?;
        Gpu::from_context(context)
    }

    /// The GPU of a context that the caller has.
    ///
    /// # Errors
    /// If the driver does not describe it.
    pub fn from_context(context: Arc<CudaContext>) -> Result<Gpu, Error> {
        driver::require()?;
        let facts = facts_of(context.cu_device())?;
        let machine = Machine {
            name: format!("cuda:{}", context.ordinal()),
            device: Device::Cuda(facts.clone()),
        };
        let modules = Modules::new(Arc::clone(&context), facts);
        Ok(Gpu { context, machine, modules })
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The GPU as plans are made for it: `Plan::new(&problem, gpu.machine())`.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Plans these operands for this GPU. Lengths in device memory are not read: shapes bound them.
    /// For ragged batches the caller may set smaller bounds in a [`Problem`] and plan that.
    ///
    /// # Errors
    /// As [`Problem::from_operands`] and [`Plan::new`].
    pub fn plan(
        &self,
        inputs: &Inputs<DeviceMemory>,
        outputs: &Outputs<DeviceMemory>,
    ) -> Result<Plan, Error> {
        let Device::Cuda(facts) = &self.machine.device else { unreachable!("this is a GPU") };
        plan(&Problem::from_operands(inputs, outputs)?, facts, &self.machine)
    }

    /// Loads what the plan runs, so that nothing is left to load when it does: while a graph is
    /// captured, loading is not possible.
    ///
    /// # Errors
    /// If this GPU cannot run the plan, or the driver does not take the code.
    pub fn load(&self, plan: &Plan) -> Result<(), Error> {
        self.launches_of(plan)?
            .modules()
            .try_for_each(|(module, entry)| self.modules.function(module, entry).map(|_| ()))
    }

    /// Queues a run of the plan on `stream`, and returns. As with [`Plan::run`], operands may be
    /// smaller than planned, but heads, dims, types and features are the planned ones. Lengths,
    /// offsets and table entries are read when the kernel runs; it clamps them to what the operands
    /// can hold. Rows of `out` that no sequence has stay as they are.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, was lent to another stream, or the
    /// workspace is too small; nothing is queued then. Or if the driver fails.
    pub fn run(
        &self,
        plan: &Plan,
        stream: &CudaStream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        self.expect_context(stream)?;
        for (name, tensor) in inputs.named() {
            tensor.memory().expect_stream(name, stream)?;
        }
        outputs.out.memory().expect_stream("out", stream)?;
        outputs.lse.as_ref().map_or(Ok(()), |lse| lse.memory().expect_stream("lse", stream))?;
        let bytes = workspace.bytes();
        let (address, _until_queued) = workspace.lend(stream);
        let workspace = RawWorkspace { address, bytes };
        // SAFETY: the stream is of this context, the workspace is lent to it and its counters are
        // zero between runs (`Workspace` sees to that); operands are lent to it too, or their
        // makers have promised as much.
        unsafe { self.run_raw(plan, stream.cu_stream(), inputs, outputs, workspace) }
    }

    /// [`Gpu::run`] on a raw stream and raw memory, for engines that manage both.
    ///
    /// The context becomes current on this thread if it is not.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context. The workspace is device memory of at least its
    /// `bytes`, its first [`COUNTER_BYTES`](super::COUNTER_BYTES) are zero (every run leaves them
    /// so), and nothing else uses it until the run is done, nor does anything write the operands.
    pub unsafe fn run_raw(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<(), Error> {
        // SAFETY: passed on; the workspace is said to have nothing.
        unsafe { self.run_prepared(plan, stream, inputs, outputs, workspace, Prepared::default()) }
    }

    /// Queues the schedule of a step: how the work of decode is divided, and which sequences share
    /// prefixes. All layers of a step have the same lengths, so one call serves all of them:
    /// [`Gpu::run_scheduled`] reads from the workspace what [`Gpu::run_raw`] finds anew in every
    /// layer. Of the operands, only shapes, lengths, offsets and prefix groups are read. It is one
    /// small launch, or two with prefix groups, and none where the host knows the lengths or all
    /// sequences are prefill's.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run_raw`].
    pub unsafe fn schedule(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &Outputs<DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<(), Error> {
        let run = self.checked(plan, stream, inputs, outputs, workspace)?;
        // SAFETY: operands and workspace are checked, and the caller has promised the rest.
        run.map_or(Ok(()), |run| unsafe { run.schedule() })
    }

    /// [`Gpu::run_raw`] with the schedule that [`Gpu::schedule`] has left in the workspace. The
    /// same bits.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run_raw`]. [`Gpu::schedule`] has been queued before, on this stream or in order
    /// with it, with the same plan and workspace, and operands of the same shapes, features,
    /// lengths, offsets and prefix groups. Since then nothing has used the workspace but runs with
    /// that schedule, and nothing has written lengths, offsets, page tables or prefix groups.
    pub unsafe fn run_scheduled(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<(), Error> {
        let prepared = Prepared { schedule: true, ..Prepared::default() };
        // SAFETY: passed on.
        unsafe { self.run_prepared(plan, stream, inputs, outputs, workspace, prepared) }
    }

    /// Queues the tile map of the mask: which tiles the mask empties or leaves unchanged. Layers
    /// that share a mask make it once, and run with [`Gpu::run_mapped`]. Of the operands, only
    /// shapes and the mask are read. It is one launch, or two where the tiles of the plan's two
    /// prefill kernels differ: strides and alignment of a layer's operands choose between them. It
    /// is none without a mask, and where all sequences are decode's.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run_raw`].
    pub unsafe fn map_mask(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &Outputs<DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<(), Error> {
        let run = self.checked(plan, stream, inputs, outputs, workspace)?;
        // SAFETY: operands and workspace are checked, and the caller has promised the rest.
        run.map_or(Ok(()), |run| unsafe { run.map_mask() })
    }

    /// [`Gpu::run_raw`] with the tile map that the workspace has: of [`Gpu::map_mask`], or written
    /// by the caller where [`tile_map`](super::tile_map) says. With the same map, the same bits.
    ///
    /// If plan, mask and shapes are those of [`Gpu::map_mask`], operands may have any strides
    /// and alignment: the workspace has the map of either kernel. A map that a plain run or the
    /// caller has left is that of one kernel, which [`tile_map`](super::tile_map) tells.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run_raw`]. With a map of another mask or of other shapes, or with bytes that are
    /// no map, results are meaningless; kernels read and write no other memory than otherwise.
    pub unsafe fn run_mapped(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<(), Error> {
        let prepared = Prepared { tile_map: true, ..Prepared::default() };
        // SAFETY: passed on.
        unsafe { self.run_prepared(plan, stream, inputs, outputs, workspace, prepared) }
    }

    /// [`Gpu::run_raw`] with what the workspace has: the schedule of the step, the tile map of the
    /// mask, or both, as a step of chunks and single tokens under a mask wants.
    ///
    /// # Errors
    /// As [`Gpu::run`].
    ///
    /// # Safety
    /// As [`Gpu::run_raw`], and as [`Gpu::run_scheduled`] and [`Gpu::run_mapped`] for what is said
    /// to be there.
    pub unsafe fn run_prepared(
        &self,
        plan: &Plan,
        stream: sys::CUstream,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        workspace: RawWorkspace,
        prepared: Prepared,
    ) -> Result<(), Error> {
        let run = self.checked(plan, stream, inputs, outputs, workspace)?;
        // SAFETY: operands and workspace are checked, and the caller has promised the rest.
        run.map_or(Ok(()), |run| unsafe { run.queue(prepared) })
    }

    /// A run whose operands and workspace are checked; `None` if it has no rows.
    fn checked<'a>(
        &'a self,
        plan: &'a Plan,
        stream: sys::CUstream,
        inputs: &'a Inputs<'a, DeviceMemory>,
        outputs: &'a Outputs<'a, DeviceMemory>,
        workspace: RawWorkspace,
    ) -> Result<Option<Run<'a>>, Error> {
        let launches = self.launches_of(plan)?;
        let mut problem = Problem::from_operands(inputs, outputs)?;
        problem.bound_ragged_by(plan.problem());
        plan.problem().covers(&problem)?;
        check_workspace(plan, workspace, inputs, outputs)?;
        if problem.rows() == 0 {
            return Ok(None);
        }
        let workspace = workspace.address;
        Ok(Some(Run { gpu: self, stream, launches, problem, inputs, outputs, workspace }))
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), Error> {
        self.context
            .bind_to_thread()
            .map_err(|error| driver::driver_error("using the GPU's context", error))
    }

    /// Queues a kernel that only reads device memory: its bandwidth is the roofline of attention.
    /// The last 16 bytes of the memory may be written.
    ///
    /// # Errors
    /// If the address or size is not a multiple of 16 bytes, or the driver fails.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and `bytes` bytes of device memory start at
    /// `address`.
    #[doc(hidden)]
    pub unsafe fn read_memory(
        &self,
        stream: sys::CUstream,
        address: u64,
        bytes: usize,
    ) -> Result<(), Error> {
        let aligned = address.is_multiple_of(16) && bytes.is_multiple_of(16) && bytes > 16;
        if !aligned {
            let found = format!("{bytes} bytes at {address:#x}");
            return Err(Error::argument(
                "memory",
                found,
                "an address and a size that are multiples of 16, 32 bytes at least",
            ));
        }
        let function = self.modules.function(Family::Ceiling.name(), "read_ceiling")?;
        let failed = |error| driver::driver_error("reading memory", error);
        self.context.bind_to_thread().map_err(failed)?;
        let Device::Cuda(facts) = &self.machine.device else { unreachable!("this is a GPU") };
        // A multiprocessor holds four CTAs of 512 threads.
        let blocks = 4 * facts.multiprocessors as u32;
        let (count, sink) = (bytes as i64 / 16 - 1, address + bytes as u64 - 16);
        let mut arguments = [argument(&address), argument(&count), argument(&sink)];
        // SAFETY: the kernel takes these three; the caller has promised the memory and the stream.
        unsafe {
            result::launch_kernel(
                function.handle,
                (blocks, 1, 1),
                (512, 1, 1),
                0,
                stream,
                &mut arguments,
            )
        }
        .map_err(failed)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// `arguments` points to values of the kernel's parameter types, addresses in them are valid,
    /// and the stream is of this context.
    pub(super) unsafe fn launch(
        &self,
        function: Function,
        launch: &Launch,
        arguments: &mut [*mut c_void],
        stream: sys::CUstream,
    ) -> Result<(), Error> {
        let failed = |error| {
            driver::driver_error(format!("launching {} of {}", launch.entry, launch.module), error)
        };
        self.bind()?;
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: Default::default(),
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream,
            attrs: &mut early,
            numAttrs: (function.starts_early && !launch.starts_late).into(),
        };
        // SAFETY: the driver copies configuration and parameters before it returns; the rest is the
        // caller's promise.
        let status = unsafe {
            sys::cuLaunchKernelEx(
                &config,
                function.handle,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        status.result().map_err(failed)
    }

    /// A kernel that is loaded, or is now.
    pub(super) fn function(&self, launch: &Launch) -> Result<Function, Error> {
        self.modules.function(launch.module, launch.entry)
    }

    /// An error unless the stream is of this GPU's context.
    pub(super) fn expect_context(&self, stream: &CudaStream) -> Result<(), Error> {
        if stream.context().cu_ctx() == self.context.cu_ctx() {
            return Ok(());
        }
        let found = format!("of another context (GPU {})", stream.context().ordinal());
        Err(Error::argument(
            "stream",
            found,
            format!("a stream of the context of {}", self.machine.name),
        ))
    }

    /// Whether this GPU can run the plan: one made for it, or one for another GPU whose modules run
    /// here too. A plan for an older architecture does not have this one's best kernels.
    pub fn can_run(&self, plan: &Plan) -> bool {
        let (Device::Cuda(planned), Device::Cuda(here)) =
            (&plan.machine().device, &self.machine.device)
        else {
            return false;
        };
        let launches_here = |launches: &Launches| launches.run_on(here);
        planned.compute_capability == here.compute_capability
            || plan.backend().is_some_and(launches_here)
    }

    /// The launches of a plan that runs on this GPU.
    fn launches_of<'a>(&self, plan: &'a Plan) -> Result<&'a Launches, Error> {
        plan.backend::<Launches>()
            .filter(|_| self.can_run(plan))
            .ok_or_else(|| plan.not_for(&self.machine.to_string()))
    }
}

/// A run whose operands and workspace are checked.
struct Run<'a> {
    gpu: &'a Gpu,
    stream: sys::CUstream,
    launches: &'a Launches,
    problem: Problem,
    inputs: &'a Inputs<'a, DeviceMemory>,
    outputs: &'a Outputs<'a, DeviceMemory>,
    /// The address of the workspace.
    workspace: u64,
}

/// # Safety of its methods
/// As [`Gpu::run_raw`].
impl Run<'_> {
    /// Queues all launches of the plan, but for those that would compute what the workspace has.
    unsafe fn queue(&self, prepared: Prepared) -> Result<(), Error> {
        let scheduled = prepared.schedule;
        let Run { launches, ref problem, inputs, outputs, workspace, .. } = *self;
        for call in launch::choose_prefill(problem, launches, inputs, outputs, workspace) {
            // SAFETY: passed on.
            unsafe { self.prefill(&call, prepared.tile_map)? };
        }
        let prefix = self.prefix_call();
        let prefix_maps = prefix.as_ref().and_then(|call| call.maps);
        let prefix_maps = prefix_maps.map(|maps| self.prefix_maps(&maps)).transpose()?;
        if let Some(call) = prefix.as_ref().filter(|_| !scheduled) {
            // SAFETY: passed on.
            unsafe { self.prefix(call, &call.schedule)? };
        }
        if let Some((decode, maps)) = launch::choose_decode(problem, launches, inputs, outputs) {
            let call = self.decode_call(decode, prefix.as_ref(), scheduled);
            // SAFETY: passed on.
            unsafe { self.decode(decode, &call, maps)? };
        }
        if let Some(call) = &prefix {
            // SAFETY: passed on.
            unsafe {
                self.prefix_items(call, prefix_maps.as_ref())?;
                self.prefix(call, &call.merge)?;
            }
        }
        Ok(())
    }

    /// Queues the launches that make the tile maps of the mask, one for each kernel's tiles.
    unsafe fn map_mask(&self) -> Result<(), Error> {
        let Run { launches, ref problem, inputs, outputs, workspace, .. } = *self;
        let mut calls = launch::choose_prefill(problem, launches, inputs, outputs, workspace);
        let Some(call) = calls.next() else { return Ok(()) };
        let prefill = call.plan;
        let map = |kernel| mask_map::tile_map(prefill, kernel, problem, inputs);
        let specialized = map(&prefill.specialized);
        // Kernels of the same tiles have the same map.
        let fallback = map(&prefill.fallback).filter(|map| specialized != Some(*map));
        // SAFETY: passed on.
        [specialized, fallback].into_iter().flatten().try_for_each(|map| unsafe {
            let parameters =
                PrefillParameters { map: mask_map::parameters(&map, workspace), ..call.parameters };
            self.tile_map(prefill, &map, &call.attention, &parameters)
        })
    }

    /// Queues the kernel that makes a tile map.
    unsafe fn tile_map(
        &self,
        plan: &Prefill,
        map: &TileMap,
        attention: &AttentionParameters,
        parameters: &PrefillParameters,
    ) -> Result<(), Error> {
        let Some(space) = &plan.map else { return Ok(()) };
        let mut arguments = [argument(attention), argument(parameters)];
        // SAFETY: the kernel reads these; the caller has promised the rest.
        unsafe { self.launch(&mask_map::map_launch(map, &space.launch), &mut arguments) }
    }

    /// Queues the launches that compute the step's schedule.
    unsafe fn schedule(&self) -> Result<(), Error> {
        let prefix = self.prefix_call();
        if let Some(call) = &prefix {
            // SAFETY: passed on.
            unsafe { self.prefix(call, &call.schedule)? };
        }
        // The schedule of the kernel for Hopper, for any operands: layers may have others.
        let decode = self.launches.hopper_decode.as_ref().or(self.launches.decode.as_ref());
        let Some(decode) = decode else { return Ok(()) };
        let Some(schedule) = &decode.schedule else { return Ok(()) };
        let DecodeCall { parameters, .. } = self.decode_call(decode, prefix.as_ref(), true);
        if parameters.stream_k.schedule == 0 {
            return Ok(());
        }
        // SAFETY: the kernel reads these; the caller has promised the rest.
        unsafe { self.launch(&schedule.launch, &mut [argument(&parameters)]) }
    }

    /// The kernels for prefix groups, if the plan has them.
    fn prefix_call(&self) -> Option<PrefixCall> {
        let prefix = self.launches.prefix.as_ref();
        prefix.map(|prefix| prefix.call(&self.problem, self.inputs, self.outputs, self.workspace))
    }

    /// The decode call, over the keys behind each sequence's prefix if there are groups.
    fn decode_call(
        &self,
        decode: &Decode,
        prefix: Option<&PrefixCall>,
        scheduled: bool,
    ) -> DecodeCall {
        let Run { ref problem, inputs, outputs, workspace, .. } = *self;
        let context = DecodeContext { has_groups: prefix.is_some(), scheduled };
        let mut call = launch::decode_call(problem, decode, inputs, outputs, workspace, context);
        if let Some(prefix) = prefix {
            prefix.set_own_keys(&mut call.parameters);
        }
        call
    }

    /// Queues prefill, and before it the kernels that make copies of keys and values, and the tile
    /// map of a mask unless the workspace has it.
    unsafe fn prefill(&self, call: &PrefillCall, mapped: bool) -> Result<(), Error> {
        let maps = call.maps.map(|maps| self.tensor_maps(&maps, call.stored)).transpose()?;
        // Loaded before anything is queued, so that a failure leaves nothing queued.
        let function = self.gpu.function(&call.kernel.launch)?;
        call.combine.map_or(Ok(()), |combine| self.gpu.function(&combine).map(|_| ()))?;
        let mut arguments = [
            argument(&call.attention),
            argument(&call.parameters),
            maps.as_ref().map_or(argument(&call.cache), argument),
            argument(&call.cache),
        ];
        if let Some(call) = &call.widen {
            let WidenCall { attention, parameters, cache, .. } = call;
            let mut arguments = [argument(attention), argument(parameters), argument(cache)];
            for launch in call.launches() {
                // SAFETY: the kernels read these; the caller has promised the rest.
                unsafe { self.launch(&launch, &mut arguments)? };
            }
        }
        if let Some(map) = call.tile_map.filter(|_| !mapped) {
            // SAFETY: passed on.
            unsafe { self.tile_map(call.plan, &map, &call.attention, &call.parameters)? };
        }
        let converts = usize::from(call.kernel.cache.is_converted());
        let count = 2 + usize::from(maps.is_some()) + converts;
        let launch = call.kernel.launch.with_ctas(call.ctas);
        // SAFETY: the kernel reads these parameters, and maps if it is one that does; the caller
        // has promised the rest.
        unsafe { self.gpu.launch(function, &launch, &mut arguments[..count], self.stream)? };
        call.combine.map_or(Ok(()), |combine| {
            // SAFETY: it reads the first two; the caller has promised the rest.
            unsafe { self.launch(&combine, &mut arguments[..2]) }
        })
    }

    /// Queues one of the kernels for prefix groups.
    unsafe fn prefix(&self, call: &PrefixCall, launch: &Launch) -> Result<(), Error> {
        let mut arguments = [argument(&call.attention), argument(&call.parameters)];
        // SAFETY: the kernels read these; the caller has promised the rest.
        unsafe { self.launch(launch, &mut arguments) }
    }

    /// Queues the kernel over prefixes. `maps`: the tensor maps of keys and values, if it reads by
    /// TMA.
    unsafe fn prefix_items(
        &self,
        call: &PrefixCall,
        maps: Option<&[TensorMap; 2]>,
    ) -> Result<(), Error> {
        let mut arguments = vec![argument(&call.attention), argument(&call.parameters)];
        arguments.extend(maps.into_iter().flatten().map(argument));
        // SAFETY: the kernel reads these; the caller has promised the rest.
        unsafe { self.launch(&call.kernel, &mut arguments) }
    }

    /// Encodes the tensor maps of keys and values for the kernel over prefixes.
    fn prefix_maps(&self, [keys, values]: &[Described; 2]) -> Result<[TensorMap; 2], Error> {
        self.gpu.bind()?;
        Ok([
            driver::encode("k", self.problem.key_dtype, keys)?,
            driver::encode("v", self.problem.value_dtype, values)?,
        ])
    }

    /// Queues decode, and the kernel that combines partial states if there is one. `maps` describes
    /// the tensor maps of a latent cache.
    unsafe fn decode(
        &self,
        decode: &Decode,
        call: &DecodeCall,
        maps: Option<LatentMaps>,
    ) -> Result<(), Error> {
        let maps = maps.map(|maps| self.latent_maps(&maps)).transpose()?;
        let listed = call.lists.map(|lists| ListedParameters { attention: call.parameters, lists });
        let first = listed.as_ref().map_or(argument(&call.parameters), argument);
        let (cache, rest) = (argument(&call.cache), argument(&call.rest));
        let (mut arguments, count) = match (decode.cache, &maps) {
            (Cache::Elements | Cache::Scaled | Cache::Terms(_), _) => ([first; 3], 1),
            (Cache::Latent, Some([keys, rest])) => ([first, argument(keys), argument(rest)], 3),
            (Cache::Latent, None) => ([first, rest, rest], 2),
            (Cache::Any, _) => ([first, cache, rest], 3),
            (Cache::Bytes | Cache::Q8_0 | Cache::Q4_0 | Cache::Mla656 | Cache::Pair(..), _) => {
                ([first, cache, cache], 2)
            }
        };
        let launch = Launch { module: call.module, ..decode.launch.with_ctas(call.ctas) };
        // SAFETY: the kernel reads these parameters; the caller has promised the rest.
        unsafe { self.launch(&launch, &mut arguments[..count])? };
        // SAFETY: it reads the first; the caller has promised the rest.
        call.combine.map_or(Ok(()), |combine| unsafe { self.launch(&combine, &mut arguments[..1]) })
    }

    /// Loads and launches a kernel.
    unsafe fn launch(&self, launch: &Launch, arguments: &mut [*mut c_void]) -> Result<(), Error> {
        // SAFETY: passed on.
        unsafe { self.gpu.launch(self.gpu.function(launch)?, launch, arguments, self.stream) }
    }

    /// Encodes the tensor maps of a latent cache with the driver: of keys, and of their dims that
    /// are not values.
    fn latent_maps(&self, maps: &LatentMaps) -> Result<[TensorMap; 2], Error> {
        let dtype = self.problem.key_dtype;
        let rest = if self.problem.rotary_dim > 0 { "rotary_k" } else { "k" };
        self.gpu.bind()?;
        Ok([driver::encode("k", dtype, &maps.keys)?, driver::encode(rest, dtype, &maps.rest)?])
    }

    /// Encodes tensor maps with the driver. `stored`: the types of keys and values.
    fn tensor_maps(&self, maps: &launch::Maps, stored: [DType; 2]) -> Result<TensorMaps, Error> {
        let dtype = self.problem.dtype;
        let [key_dtype, value_dtype] = if maps.as_bytes { [DType::I8; 2] } else { stored };
        self.gpu.bind()?;
        let encode = |argument, dtype, map: &Option<_>| match map {
            Some(map) => driver::encode(argument, dtype, map),
            None => Ok(TensorMap([0; 128])),
        };
        Ok(TensorMaps {
            query: driver::encode("q", dtype, &maps.query)?,
            key: encode("k", key_dtype, &maps.key)?,
            value: encode("v", value_dtype, &maps.value)?,
            out: encode("out", dtype, &maps.out)?,
        })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.machine)
    }
}

/// A struct of parameters as launches take them.
pub(super) fn argument<T: Copy>(parameters: &T) -> *mut c_void {
    std::ptr::from_ref(parameters).cast_mut().cast()
}
