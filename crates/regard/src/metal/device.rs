//! Runs plans on an Apple GPU, with the caller's device, queue and buffers or with its own.
//!
//! Operands are ordinary views ([`Tensor`](crate::Tensor)) of the contents of shared buffers. An
//! Apple GPU and its CPU share memory, so lengths and tables are checked before anything runs, and
//! nothing is copied. [`Gpu::run_copied`] copies operands from anywhere.
//!
//! The kernels' source is compiled when a [`Gpu`] is made, and a pipeline (a kernel with its
//! function constants) when a plan first needs it. [`Gpu::load`] compiles a plan's pipelines in
//! advance, so that nothing is compiled while serving.

use super::launch::{Binding, Dispatch};
use super::plan::plan;
use super::{
    CONSTANTS, ConstantType, LEAST_FAMILY, Pipeline, cores_of_architecture, dispatches, pipelines,
    source,
};
use crate::error::{Error, Refusal};
use crate::machine::{Device, Machine, MetalFacts};
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString, NSURL};
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue,
    MTLCompileOptions, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLCreateSystemDefaultDevice, MTLDataType, MTLDevice, MTLFunctionConstantValues, MTLGPUFamily,
    MTLLanguageVersion, MTLLibrary, MTLResource, MTLResourceOptions, MTLSize, MTLStorageMode,
};
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A Metal device.
pub type DeviceObject = ProtocolObject<dyn MTLDevice>;
/// A command queue.
pub type QueueObject = ProtocolObject<dyn MTLCommandQueue>;
/// A buffer.
pub type BufferObject = ProtocolObject<dyn MTLBuffer>;
/// A compute command encoder.
pub type EncoderObject = ProtocolObject<dyn MTLComputeCommandEncoder>;
type PipelineObject = ProtocolObject<dyn MTLComputePipelineState>;

/// GPU cores that plans assume if the name of the architecture does not tell. The number affects
/// how keys are split, and no result.
const ASSUMED_CORES: usize = 10;

/// A pipeline, or nothing until it is compiled. The lock is held while it is.
type PipelineSlot = Arc<Mutex<Option<Retained<PipelineObject>>>>;

/// A GPU with the kernels compiled for it.
pub struct Gpu {
    device: Retained<DeviceObject>,
    queue: Retained<QueueObject>,
    library: Retained<ProtocolObject<dyn MTLLibrary>>,
    pipelines: Mutex<HashMap<Pipeline, PipelineSlot>>,
    machine: Machine,
}

fn refusal(machine: &str, reason: impl Into<String>) -> Error {
    Refusal { machine: machine.into(), reason: reason.into() }.into()
}

fn description(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

impl Gpu {
    /// This system's default GPU, with a queue of our own.
    ///
    /// # Errors
    /// A refusal if there is none, if it is older than family 7, or if its compiler does not take
    /// the kernels.
    pub fn system_default() -> Result<Gpu, Error> {
        let none = || refusal("this machine", "it has no Metal device");
        let device = MTLCreateSystemDefaultDevice().ok_or_else(none)?;
        let queue = device.newCommandQueue().ok_or_else(none)?;
        Gpu::new(device, queue)
    }

    /// The caller's device and queue; compiles the shipped source.
    ///
    /// # Errors
    /// A refusal if the device is older than family 7, or if its compiler does not take the
    /// kernels.
    pub fn new(device: Retained<DeviceObject>, queue: Retained<QueueObject>) -> Result<Gpu, Error> {
        let machine = machine_of(&device)?;
        let options = MTLCompileOptions::new();
        // bfloat came with 3.1 (macOS 14, iOS 17).
        options.setLanguageVersion(MTLLanguageVersion::Version3_1);
        // What replaced it exists from macOS 15 on only.
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
        let library = autoreleasepool(|_| {
            device
                .newLibraryWithSource_options_error(&NSString::from_str(&source()), Some(&options))
                .map_err(|error| {
                    let reason = format!("the kernels do not compile: {}", description(&error));
                    refusal(&machine.name, reason)
                })
        })?;
        Ok(Gpu { device, queue, library, pipelines: Mutex::default(), machine })
    }

    /// The same with a metallib made from [`source`] (`xcrun metal -std=metal3.1 -fno-fast-math`),
    /// so that nothing is compiled from source at run time.
    ///
    /// # Errors
    /// As [`Gpu::new`]; if the file cannot be loaded.
    pub fn with_metallib(
        device: Retained<DeviceObject>,
        queue: Retained<QueueObject>,
        path: &str,
    ) -> Result<Gpu, Error> {
        let machine = machine_of(&device)?;
        let url = NSURL::fileURLWithPath(&NSString::from_str(path));
        let library = device
            .newLibraryWithURL_error(&url)
            .map_err(|error| refusal(&machine.name, format!("{path}: {}", description(&error))))?;
        Ok(Gpu { device, queue, library, pipelines: Mutex::default(), machine })
    }

    /// The same, planning for this many GPU cores. Otherwise the number is that of the largest GPU
    /// of the architecture's name, or 10.
    pub fn with_cores(mut self, cores: usize) -> Gpu {
        if let Device::Metal(facts) = &mut self.machine.device {
            facts.cores = cores.max(1);
        }
        self
    }

    /// What plans are made for.
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

    /// Plans operands for this GPU.
    ///
    /// # Errors
    /// As [`Problem::from_operands`] and [`Plan::new`].
    pub fn plan(&self, inputs: &Inputs, outputs: &Outputs) -> Result<Plan, Error> {
        let Device::Metal(facts) = &self.machine.device else { unreachable!("this is a GPU") };
        plan(&Problem::from_operands(inputs, outputs)?, facts, &self.machine)
    }

    /// Compiles the pipelines that a plan can need, so that none is compiled when it runs. Threads
    /// compile different pipelines at the same time.
    ///
    /// # Errors
    /// If the plan is for another kind of machine, or a kernel cannot be specialised.
    pub fn load(&self, plan: &Plan) -> Result<(), Error> {
        for (pipeline, threads) in pipelines(plan)? {
            self.pipeline(&pipeline, threads)?;
        }
        Ok(())
    }

    /// A buffer that this GPU and the CPU share. Its contents are undefined.
    ///
    /// # Errors
    /// A refusal if there is no memory.
    pub fn shared_buffer(&self, bytes: usize) -> Result<Retained<BufferObject>, Error> {
        self.device
            .newBufferWithLength_options(bytes.max(16), MTLResourceOptions::StorageModeShared)
            .ok_or_else(|| {
                refusal(&self.machine.name, format!("no memory for a buffer of {bytes} bytes"))
            })
    }

    /// Encodes a plan into the caller's encoder, serial or concurrent: up to two dispatches, with a
    /// barrier between them. Every operand lies in the contents of one of `buffers`; `workspace`
    /// holds [`Plan::workspace_bytes`] bytes.
    ///
    /// # Errors
    /// If an operand breaks the contract, exceeds the plan or lies in none of the buffers. Nothing
    /// is encoded then.
    ///
    /// # Safety
    /// Until the GPU has run what was encoded, nothing writes the operands that it reads or uses
    /// those that it writes, the workspace included; lengths and tables are not changed between
    /// this call and then. All objects belong to this GPU's device.
    pub unsafe fn encode(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
        buffers: &[&BufferObject],
        workspace: &BufferObject,
        encoder: &EncoderObject,
    ) -> Result<(), Error> {
        if workspace.length() < plan.workspace_bytes() {
            let allowed = format!("at least {} bytes, as planned", plan.workspace_bytes());
            return Err(Error::argument(
                "workspace",
                format!("{} bytes long", workspace.length()),
                allowed,
            ));
        }
        let home = contents(workspace)
            .ok_or_else(|| Error::argument("workspace", "a private buffer", "a shared one"))?;
        outputs.check_workspace(inputs, home, plan.workspace_bytes())?;
        let mut all = buffers.to_vec();
        all.push(workspace);
        for (index, dispatch) in
            dispatches(plan, inputs, outputs, home)?.iter().flatten().enumerate()
        {
            if index > 0 {
                // `merge` reads what the splits wrote. On a concurrent encoder nothing else orders
                // them; on a serial one this costs nothing.
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
            // SAFETY: passed on.
            unsafe { self.encode_dispatch(dispatch, &all, encoder)? };
        }
        Ok(())
    }

    /// Encodes one dispatch, of attention or of [`append`](super::append); its operands lie in the
    /// contents of `buffers`.
    ///
    /// # Errors
    /// If an operand lies in none of the buffers, or the kernel cannot be specialised.
    ///
    /// # Safety
    /// As [`Gpu::encode`].
    pub unsafe fn encode_dispatch(
        &self,
        dispatch: &Dispatch,
        buffers: &[&BufferObject],
        encoder: &EncoderObject,
    ) -> Result<(), Error> {
        let mut places = [None; super::launch::BUFFERS];
        for (place, binding) in places.iter_mut().zip(&dispatch.buffers) {
            *place = binding.as_ref().map(|binding| find(binding, buffers)).transpose()?;
        }
        let pipeline = self.pipeline(&dispatch.pipeline, dispatch.threads)?;
        // Metal wants a buffer wherever a kernel declares one, read or not.
        let any = places.iter().flatten().next().copied();
        encoder.setComputePipelineState(&pipeline);
        // SAFETY: the parameters are copied at once; places lie inside their buffers; the rest is
        // the caller's promise.
        unsafe {
            let params = dispatch.params.bytes();
            let address = NonNull::from(params).cast::<c_void>();
            encoder.setBytes_length_atIndex(address, params.len(), 0);
            for (index, place) in places.iter().enumerate().skip(1) {
                if let Some((buffer, offset)) = place.or(any) {
                    encoder.setBuffer_offset_atIndex(Some(buffer), offset, index);
                }
            }
            if dispatch.threadgroup_bytes > 0 {
                let bytes = dispatch.threadgroup_bytes.next_multiple_of(16);
                encoder.setThreadgroupMemoryLength_atIndex(bytes, 0);
            }
        }
        let [width, height, depth] = dispatch.grid.map(|n| n as usize);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(
            MTLSize { width, height, depth },
            MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 },
        );
        Ok(())
    }

    /// Runs a plan on our queue and waits for it; how long that took. Operands lie in the contents
    /// of `buffers`.
    ///
    /// # Errors
    /// As [`Gpu::encode`]; [`Error::Driver`] if the GPU fails. The outputs are undefined then.
    ///
    /// # Safety
    /// Nothing else uses the outputs or writes the inputs meanwhile; the buffers belong to this
    /// GPU's device.
    pub unsafe fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
        buffers: &[&BufferObject],
        workspace: &BufferObject,
    ) -> Result<Duration, Error> {
        // SAFETY: the work has ended when `submit` returns.
        self.submit(|encoder| unsafe {
            self.encode(plan, inputs, outputs, buffers, workspace, encoder)
        })
    }

    /// Runs a plan on operands that lie anywhere: they are copied to buffers of our own, and
    /// outputs back. How long the GPU's part took.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, there is no memory, or the GPU fails.
    pub fn run_copied(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<Duration, Error> {
        let workspace = self.shared_buffer(plan.workspace_bytes())?;
        let home = workspace.contents().as_ptr() as usize;
        let dispatches = dispatches(plan, inputs, outputs, home)?;
        let Some(first) = &dispatches[0] else { return Ok(Duration::ZERO) };
        // One buffer for each binding; those of the second dispatch are the same.
        let mut copies: Vec<(Binding, Retained<BufferObject>)> = Vec::new();
        for binding in first.buffers.iter().flatten() {
            if binding.address != home {
                let copy = self.shared_buffer(binding.bytes)?;
                // SAFETY: a binding covers initialised memory of an operand, or an output's; the
                // copy is as long.
                unsafe {
                    let from = binding.address as *const u8;
                    from.copy_to_nonoverlapping(copy.contents().as_ptr().cast(), binding.bytes);
                }
                copies.push((*binding, copy));
            }
        }
        let took = self.submit(|encoder| {
            for dispatch in dispatches.iter().flatten() {
                let mut moved = *dispatch;
                for binding in moved.buffers.iter_mut().flatten() {
                    if let Some((_, copy)) = copies.iter().find(|(original, _)| original == binding)
                    {
                        binding.address = copy.contents().as_ptr() as usize;
                    }
                }
                let buffers: Vec<_> =
                    copies.iter().map(|(_, copy)| &**copy).chain([&*workspace]).collect();
                // SAFETY: the buffers are ours and outlive the work, which has ended when `submit`
                // returns.
                unsafe { self.encode_dispatch(&moved, &buffers, encoder)? };
            }
            Ok(())
        })?;
        for (binding, copy) in copies.iter().filter(|(binding, _)| binding.writable) {
            // SAFETY: a writable binding is an output, which nothing else uses meanwhile; what lies
            // between its elements was copied too.
            unsafe {
                let to = binding.address as *mut u8;
                to.copy_from_nonoverlapping(copy.contents().as_ptr().cast(), binding.bytes);
            }
        }
        Ok(took)
    }

    /// Lets `encode` fill a command buffer of our queue, commits it and waits. Returns how long
    /// committing and waiting took.
    ///
    /// # Errors
    /// Those of `encode`; [`Error::Driver`] if the GPU fails or stops the work, with the status of
    /// the command buffer.
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

    /// The compiled pipeline. Only threads that want the same one wait while it compiles.
    fn pipeline(&self, wanted: &Pipeline, threads: u32) -> Result<Retained<PipelineObject>, Error> {
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = pipelines.entry(*wanted).or_default().clone();
        drop(pipelines);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = &*slot {
            return Ok(pipeline.clone());
        }
        let pipeline = autoreleasepool(|_| self.compile(wanted))?;
        let allowed = pipeline.maxTotalThreadsPerThreadgroup();
        if allowed < threads as usize {
            let reason = format!(
                "{} runs with {allowed} threads per threadgroup, {threads} are planned",
                wanted.function
            );
            return Err(refusal(&self.machine.name, reason));
        }
        Ok(slot.insert(pipeline).clone())
    }

    fn compile(&self, wanted: &Pipeline) -> Result<Retained<PipelineObject>, Error> {
        let values = MTLFunctionConstantValues::new();
        for (index, ((_, ty), value)) in CONSTANTS.iter().zip(wanted.constants).enumerate() {
            let flag = value != 0;
            // SAFETY: each pointer is to a value of the type that goes with it, and is read at
            // once.
            unsafe {
                match ty {
                    ConstantType::Int => {
                        let value = NonNull::from(&value).cast();
                        values.setConstantValue_type_atIndex(value, MTLDataType::Int, index);
                    }
                    ConstantType::Bool => {
                        let value = NonNull::from(&flag).cast();
                        values.setConstantValue_type_atIndex(value, MTLDataType::Bool, index);
                    }
                }
            }
        }
        let name = wanted.function;
        let failed = |error: &NSError| {
            refusal(&self.machine.name, format!("{name}: {}", description(error)))
        };
        let function = self
            .library
            .newFunctionWithName_constantValues_error(&NSString::from_str(name), &values)
            .map_err(|error| failed(&error))?;
        self.device
            .newComputePipelineStateWithFunction_error(&function)
            .map_err(|error| failed(&error))
    }
}

/// The address of a buffer's contents; `None` if the CPU cannot read them.
fn contents(buffer: &BufferObject) -> Option<usize> {
    (buffer.storageMode() != MTLStorageMode::Private).then(|| buffer.contents().as_ptr() as usize)
}

/// The buffer in whose contents an operand lies, and where.
fn find<'a>(
    binding: &Binding,
    buffers: &[&'a BufferObject],
) -> Result<(&'a BufferObject, usize), Error> {
    for buffer in buffers {
        let Some(start) = contents(buffer) else { continue };
        if let Some(offset) = binding.address.checked_sub(start)
            && binding.bytes <= buffer.length().saturating_sub(offset)
        {
            return Ok((buffer, offset));
        }
    }
    Err(Error::argument(
        "buffers",
        format!("none that holds the {} bytes at {:#x}", binding.bytes, binding.address),
        "for every operand, the shared buffer in whose contents it lies",
    ))
}

/// The facts of a device.
fn machine_of(device: &DeviceObject) -> Result<Machine, Error> {
    let name = device.name().to_string();
    // Later families include earlier ones; 1000 is the first number of Apple's.
    let family = (1..=20)
        .rev()
        .find(|&family| device.supportsFamily(MTLGPUFamily(1000 + family)))
        .unwrap_or(0);
    if family < LEAST_FAMILY as isize {
        let reason = format!(
            "it is of Apple GPU family {family}; the kernels need {LEAST_FAMILY} (M1, A14) or later"
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
