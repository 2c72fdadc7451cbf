//! The device that a `regard_device` names, and the caller's threads.

use crate::convert::{self, bad};
use crate::status::Failure;
use crate::types::{self, DeviceKind};
use regard::cpu::{Cpu, DefaultExecutor, Executor, Inline, run_on_foreign_threads};
use regard::{Device, Error, Inputs, Machine, Outputs, Plan};
use std::ffi::{CStr, c_void};
#[cfg(any(feature = "cuda", metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
use std::sync::Arc;

/// A device that a caller named, looked up.
pub struct Target {
    /// Its facts.
    pub machine: Machine,
    /// The backend that runs its plans.
    pub runner: Runner,
}

/// A backend that runs plans.
pub enum Runner {
    /// The CPU, on the caller's threads if there are any.
    Cpu(Option<Callback>),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Arc<regard::cuda::Gpu>),
    /// An Apple GPU.
    #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
    Metal(Arc<regard::metal::device::Gpu>),
    /// Nothing: the machine is not here.
    Absent,
}

impl Target {
    /// # Safety
    /// `device` is null or points to a `regard_device` of its size; its `machine` is null or a
    /// string that ends in a zero.
    pub unsafe fn from_device(device: *const types::Device) -> Result<Target, Failure> {
        if device.is_null() {
            return Ok(Target { machine: Machine::host()?, runner: Runner::Cpu(None) });
        }
        // SAFETY: passed on.
        let device = unsafe { convert::read("device", device)? };
        if device.reserved != 0 {
            return Err(bad("device.reserved", device.reserved, "0"));
        }
        // SAFETY: passed on.
        let name = unsafe { name(&device)? };
        match device.kind {
            kind if kind == DeviceKind::Cpu as i32 => Target::cpu(&device, name),
            kind if kind == DeviceKind::Cuda as i32 => Target::cuda(&device, name),
            // SAFETY: passed on.
            kind if kind == DeviceKind::Metal as i32 => unsafe { Target::metal(&device, name) },
            kind => {
                Err(bad("device.kind", kind, "REGARD_DEVICE_KIND_CPU (0), _CUDA (1) or _METAL (2)"))
            }
        }
    }

    fn cpu(device: &types::Device, name: Option<&str>) -> Result<Target, Failure> {
        if device.ordinal != 0 {
            return Err(bad("device.ordinal", device.ordinal, "0 for the CPU"));
        }
        if !device.context.is_null() {
            return Err(bad("device.context", "not null", "null for the CPU"));
        }
        let mut machine = name.unwrap_or("host").parse::<Machine>()?;
        if !matches!(machine.device, Device::Cpu(_)) {
            let found = format!("\"{}\", which is no CPU", machine.name);
            return Err(bad("device.machine", found, "a machine of device.kind"));
        }
        if device.threads > 0 {
            machine = machine.with_threads(device.threads as usize);
        }
        let executor = device.executor.map(|run| Callback { run, data: device.executor_data });
        Ok(Target { machine, runner: Runner::Cpu(executor) })
    }

    fn cuda(device: &types::Device, name: Option<&str>) -> Result<Target, Failure> {
        expect_no_threads(device)?;
        if device.ordinal < 0 {
            return Err(bad("device.ordinal", device.ordinal, "a number from 0 up"));
        }
        let Some(name) = name else { return Target::gpu(device) };
        let is_cuda = |facts: &Device| matches!(facts, Device::Cuda(_));
        absent(device, name, is_cuda, "no NVIDIA GPU")
    }

    /// # Safety
    /// `device.context` is null or an `id<MTLDevice>`.
    unsafe fn metal(device: &types::Device, name: Option<&str>) -> Result<Target, Failure> {
        expect_no_threads(device)?;
        if device.ordinal != 0 {
            return Err(bad("device.ordinal", device.ordinal, "0 for an Apple GPU"));
        }
        // SAFETY: passed on.
        let Some(name) = name else { return unsafe { Target::apple_gpu(device) } };
        let is_metal = |facts: &Device| matches!(facts, Device::Metal(_));
        absent(device, name, is_metal, "no Apple GPU")
    }

    /// # Safety
    /// `device.context` is null or an `id<MTLDevice>`.
    #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
    unsafe fn apple_gpu(device: &types::Device) -> Result<Target, Failure> {
        // SAFETY: passed on.
        let gpu = unsafe { crate::metal::gpu(device.context)? };
        Ok(Target { machine: gpu.machine().clone(), runner: Runner::Metal(gpu) })
    }

    /// # Safety
    /// None: there are no such devices here.
    #[cfg(not(any(metal_stand_in, all(feature = "metal", target_vendor = "apple"))))]
    unsafe fn apple_gpu(_: &types::Device) -> Result<Target, Failure> {
        let reason = match cfg!(target_vendor = "apple") {
            true => "this library was built without the feature metal",
            false => "Metal is there on Apple's systems only",
        };
        Err(Error::from(regard::Refusal { machine: "metal".into(), reason: reason.into() }).into())
    }

    #[cfg(feature = "cuda")]
    fn gpu(device: &types::Device) -> Result<Target, Failure> {
        let gpu = crate::cuda::gpu(device.ordinal as usize, device.context)?;
        Ok(Target { machine: gpu.machine().clone(), runner: Runner::Cuda(gpu) })
    }

    #[cfg(not(feature = "cuda"))]
    fn gpu(device: &types::Device) -> Result<Target, Failure> {
        let reason = "this library was built without the feature cuda".into();
        Err(Error::from(regard::Refusal { machine: format!("cuda:{}", device.ordinal), reason })
            .into())
    }
}

/// Work on a GPU uses none of the caller's threads.
fn expect_no_threads(device: &types::Device) -> Result<(), Failure> {
    if device.threads != 0 {
        return Err(bad("device.threads", device.threads, "0 for a GPU"));
    }
    match device.executor {
        Some(_) => Err(bad("device.executor", "not null", "null for a GPU")),
        None => Ok(()),
    }
}

/// A GPU that was named, and need not be here.
fn absent(
    device: &types::Device,
    name: &str,
    is_kind: impl Fn(&Device) -> bool,
    otherwise: &str,
) -> Result<Target, Failure> {
    let machine = name.parse::<Machine>()?;
    if !is_kind(&machine.device) {
        let found = format!("\"{name}\", which is {otherwise}");
        return Err(bad("device.machine", found, "a machine of device.kind"));
    }
    if !device.context.is_null() {
        let allowed = "null for a machine that need not be here";
        return Err(bad("device.context", "not null", allowed));
    }
    Ok(Target { machine, runner: Runner::Absent })
}

/// The name of a machine that need not be here.
///
/// # Safety
/// `device.machine` is null or a string that ends in a zero.
unsafe fn name(device: &types::Device) -> Result<Option<&str>, Failure> {
    if device.machine.is_null() {
        return Ok(None);
    }
    // SAFETY: passed on.
    let name = unsafe { CStr::from_ptr(device.machine) };
    let name =
        name.to_str().map_err(|_| bad("device.machine", "not UTF-8", Machine::NAMES.join(", ")))?;
    Ok(Some(name))
}

/// The caller's threads.
#[derive(Clone, Copy)]
pub struct Callback {
    run: unsafe extern "C" fn(*mut c_void, usize, types::Work, *mut c_void),
    data: *mut c_void,
}

// SAFETY: the caller promises that its function can be called with its data from any thread that
// runs a plan.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Executor for Callback {
    fn run(&self, copies: usize, copy: &(dyn Fn() + Sync)) {
        // SAFETY: the caller promised that its function takes these and returns when all calls of
        // the work have.
        unsafe {
            run_on_foreign_threads(copy, |work, shared| {
                (self.run)(self.data, copies, Some(work), shared)
            });
        }
    }
}

/// The CPU as that machine describes it, on the caller's threads if there are some, on this thread
/// if it is for one, else on the library's.
pub fn cpu(machine: &Machine, executor: Option<&Callback>) -> Result<Cpu, Error> {
    let cpu = Cpu::new()?.with_machine(machine.clone())?;
    Ok(match (executor, &machine.device) {
        (Some(&executor), _) => cpu.with_executor(executor),
        (None, Device::Cpu(facts)) if facts.threads == 1 => cpu.with_executor(Inline),
        _ => cpu,
    })
}

/// The threads of a CPU plan: the caller's if there are some, this thread if it is for one, else
/// the library's.
fn executor_of<'a>(plan: &Plan, executor: Option<&'a Callback>) -> &'a dyn Executor {
    match (executor, &plan.machine().device) {
        (Some(executor), _) => executor,
        (None, Device::Cpu(facts)) if facts.threads == 1 => &Inline,
        _ => &DefaultExecutor,
    }
}

/// Runs a CPU plan; `mapped`, with the tile map that the workspace has.
pub fn run_on_cpu(
    plan: &Plan,
    executor: Option<&Callback>,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: &mut [u8],
    mapped: bool,
) -> Result<(), Error> {
    let run = if mapped { regard::cpu::run_mapped } else { regard::cpu::run };
    run(plan, inputs, outputs, workspace, executor_of(plan, executor))
}

/// Makes the tile map of a CPU plan.
pub fn map_on_cpu(
    plan: &Plan,
    executor: Option<&Callback>,
    inputs: &Inputs,
    outputs: &Outputs,
    workspace: &mut [u8],
) -> Result<(), Error> {
    regard::cpu::map_mask(plan, inputs, outputs, workspace, executor_of(plan, executor))
}
