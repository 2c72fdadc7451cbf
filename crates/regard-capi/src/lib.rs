//! The C ABI of regard. `include/regard.h` is generated from this crate (`cargo xtask header`);
//! `docs/c-abi.md` is the guide.
//!
//! Every entry point checks its arguments as far as possible, never unwinds into its caller, and
//! keeps the message of a failure for the calling thread.

#![allow(
    clippy::missing_safety_doc,
    reason = "the documentation is C's: it becomes the header, at whose head stands the promise \
              that Rust calls safety, the same for all functions"
)]

mod cache;
mod convert;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod lists;
#[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
mod metal;
mod status;
mod step;
mod types;

use cache::NewTokens;
use convert::bad;
use device::{Runner, Target};
use regard::paged::CopyBlocks;
use regard::{Error, Host, Machine, Problem, Refusal};
use status::{Failure, c_text};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;
use step::Memory;
use types::{Device, Operands, Status};

/// The execution of a problem on a device. Made once, run many times, from any number of threads at
/// once (each run with separate workspace and outputs).
pub struct Plan {
    plan: regard::Plan,
    runner: Runner,
    explanation: OnceLock<CString>,
}

/// Heads that slopes are written for, at most: more than any model has.
const MAX_SLOPES: usize = 1 << 16;

thread_local! {
    /// The last answer of `regard_machine_facts`.
    static FACTS: RefCell<CString> = RefCell::default();
}

/// The library's version, `major.minor.patch`. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn regard_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// The library's `REGARD_ABI_VERSION`. A program that was compiled against another number must not
/// go on.
#[unsafe(no_mangle)]
pub extern "C" fn regard_abi_version() -> u32 {
    types::REGARD_ABI_VERSION
}

/// The error message of the last call that failed on this thread, in UTF-8; empty if none has.
/// Never null. Valid until the next call fails on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn regard_last_error() -> *const c_char {
    status::last()
}

/// Describes a device in a line of UTF-8 ("host (CPU, avx512, 8 threads)"), or null. Valid until
/// the next call of this function on this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_machine_facts(device: *const Device) -> *const c_char {
    status::text(|| {
        // SAFETY: the caller's promise.
        let target = unsafe { Target::from_device(device)? };
        let facts = c_text(target.machine.to_string());
        FACTS
            .try_with(|slot| {
                *slot.borrow_mut() = facts;
                slot.borrow().as_ptr()
            })
            .map_err(|_| bad("thread", "ending", "a thread that runs"))
    })
}

/// Writes to `problem` the problem that operands pose on a device, all of them checked: shapes,
/// types, strides, and on the CPU also the contents of lengths and tables. Its lengths are the
/// operands' lengths: raise them to your upper bounds before you plan. `problem->size` must be set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_problem_of(
    operands: *const Operands,
    device: *const Device,
    problem: *mut types::Problem,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let target = Target::from_device(device)?;
        let found = problem_of(operands, &target)?;
        convert::write("problem", problem, &convert::c_problem(&found))
    })
}

/// Asks if a problem runs on a device: `REGARD_STATUS_OK`, or `REGARD_STATUS_REFUSED` with a
/// reason. `reason` may be null; otherwise it is set to the reason, or to null if there is none.
/// The text is the text of `regard_last_error`, and is valid as long.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_can_implement(
    problem: *const types::Problem,
    device: *const Device,
    reason: *mut *const c_char,
) -> Status {
    // SAFETY: the caller's promise.
    let status = status::status(|| unsafe { plan(problem, device) }.map(drop));
    if !reason.is_null() {
        let text = if status == Status::Ok { ptr::null() } else { status::last() };
        // SAFETY: the caller's promise.
        unsafe { reason.write_unaligned(text) };
    }
    status
}

/// Plans a problem for a device and sets `*plan`, to null on failure. `regard_plan_destroy` frees
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_create(
    problem: *const types::Problem,
    device: *const Device,
    plan: *mut *mut Plan,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { hand_out(plan, || self::plan(problem, device)) }
}

/// Plans for exactly these operands: `regard_problem_of` and `regard_plan_create` in one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_for(
    operands: *const Operands,
    device: *const Device,
    plan: *mut *mut Plan,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe {
        hand_out(plan, || {
            let target = Target::from_device(device)?;
            Plan::new(&problem_of(operands, &target)?, target)
        })
    }
}

/// Frees a plan. No run may be using it. Null is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_destroy(plan: *mut Plan) {
    if !plan.is_null() {
        status::status(|| {
            // SAFETY: it came from `hand_out`, and the caller promises that nothing uses it.
            drop(unsafe { Box::from_raw(plan) });
            Ok(())
        });
    }
}

/// Bytes of workspace that a run needs: on the CPU at any alignment, on a GPU at a multiple of 16.
/// 0 for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_workspace_bytes(plan: *const Plan) -> usize {
    status::guarded(|| {
        // SAFETY: the caller's promise.
        Ok(unsafe { expect_plan(plan)? }.plan.workspace_bytes())
    })
    .unwrap_or(0)
}

/// Bytes at the start of the workspace that must be zero before its first run; each run leaves them
/// zero. 0 on the CPU, and for null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_zeroed_bytes(plan: *const Plan) -> usize {
    status::guarded(|| {
        // SAFETY: the caller's promise.
        let plan = unsafe { expect_plan(plan)? };
        Ok(match &plan.plan.machine().device {
            #[cfg(feature = "cuda")]
            regard::Device::Cuda(_) => cuda::zeroed_bytes(&plan.plan),
            _ => 0,
        })
    })
    .unwrap_or(0)
}

/// Loads the kernels that the plan runs. Otherwise the first run loads them. Loading takes some
/// milliseconds, and cannot be done while a CUDA graph is captured. There is nothing to load on the
/// CPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_load(plan: *const Plan) -> Status {
    status::status(|| {
        // SAFETY: the caller's promise.
        let Plan { plan, runner, .. } = unsafe { expect_plan(plan)? };
        match runner {
            Runner::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => Ok(gpu.load(plan)?),
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => Ok(gpu.load(plan)?),
            Runner::Absent => Err(not_here(plan)),
        }
    })
}

/// The kernel of the plan, its settings and their reasons, in a few lines of UTF-8; null for a null
/// plan. Valid as long as the plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_explain(plan: *const Plan) -> *const c_char {
    status::text(|| {
        // SAFETY: the caller's promise.
        let plan = unsafe { expect_plan(plan)? };
        Ok(plan.explanation.get_or_init(|| c_text(plan.plan.explain())).as_ptr())
    })
}

/// Runs a plan on operands. They may be smaller than planned (fewer or shorter sequences), but have
/// the planned heads, dims, types and options. `workspace` is memory of the plan's device, at least
/// `regard_plan_workspace_bytes` of it, for one run at a time. It needs no initialization but for
/// `regard_plan_zeroed_bytes`, and keeps nothing between runs. Outputs and workspace share no
/// memory with each other or with an input. If addresses, shapes and strides show that they do, the
/// call is an error.
///
/// On the CPU the result is there when this returns, and `stream` must be null. On CUDA, `stream`
/// is the `CUstream` (or `cudaStream_t`) that the work is put on, null for the default stream, and
/// this returns before the work is done. It allocates no device memory and waits for nothing.
/// Lengths, offsets and table entries are read when the work runs, so a graph that captured the
/// work can be replayed with others. The device's context becomes current on this thread.
///
/// On Metal, `workspace` is an `id<MTLBuffer>`, used from its beginning, and `stream` an
/// `id<MTLComputeCommandEncoder>`, serial or concurrent, that the work is encoded in. Nothing is
/// committed, and nothing is waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_run(
    plan: *const Plan,
    operands: *const Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let workspace = Memory { data: workspace, bytes: workspace_bytes };
        step::run(expect_plan(plan)?, operands, workspace, stream, 0)
    })
}

/// Writes new keys and values to a cache: keys rotated on the way if asked for, keys and values
/// quantized if the pools have fewer bits. On a GPU this is work on `stream` (a `CUstream` or
/// `cudaStream_t`, null for the default stream; on Metal an `id<MTLComputeCommandEncoder>`), and
/// lengths and table entries are read when it runs. On the CPU it is done when the call returns,
/// and `stream` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_append_run(
    append: *const types::Append,
    device: *const Device,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let append = convert::read("append", append)?;
        let target = Target::from_device(device)?;
        match &target.runner {
            Runner::Cpu(executor) => {
                expect_no_stream(stream)?;
                let cpu = device::cpu(&target.machine, executor.as_ref())?;
                match cache::append::<Host>(&append)? {
                    NewTokens::Separate(mut append) => cpu.append(&mut append)?,
                    NewTokens::Latent(mut append) => cpu.append_latent(&mut append)?,
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => {
                match cache::append(&append)? {
                    NewTokens::Separate(mut append) => {
                        gpu.append_raw(stream.cast(), &mut append)?
                    }
                    NewTokens::Latent(mut append) => {
                        gpu.append_latent_raw(stream.cast(), &mut append)?
                    }
                }
                Ok(())
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => {
                let encoder = metal::encoder(stream)?;
                match cache::append(&append)? {
                    NewTokens::Separate(mut append) => gpu.append(encoder, &mut append)?,
                    NewTokens::Latent(mut append) => gpu.append_latent(encoder, &mut append)?,
                }
                Ok(())
            }
            Runner::Absent => {
                #[cfg(feature = "cuda")]
                if let regard::Device::Cuda(_) = target.machine.device {
                    cache::append::<regard::cuda::DeviceMemory>(&append)?;
                }
                Err(absent(&target.machine))
            }
        }
    })
}

/// Loads the kernels that `regard_append_run` runs, as `regard_plan_load` does for a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_append_load(device: *const Device) -> Status {
    status::status(|| {
        // SAFETY: the caller's promise.
        let target = unsafe { Target::from_device(device)? };
        match &target.runner {
            Runner::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => Ok(gpu.load_append()?),
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => Ok(gpu.load_append()?),
            Runner::Absent => Err(absent(&target.machine)),
        }
    })
}

/// Copies blocks of a cache's pools, as a page allocator asks for before new tokens are appended
/// (copy on write). On a GPU this is work on `stream` (a `CUstream` or `cudaStream_t`, null for the
/// default stream). On the CPU it is done when the call returns, and `stream` is null. Metal
/// refuses it: an `id<MTLBlitCommandEncoder>` copies there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_copy_blocks(
    copies: *const types::BlockCopies,
    device: *const Device,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let given = convert::read("block_copies", copies)?;
        let target = Target::from_device(device)?;
        match &target.runner {
            Runner::Cpu(executor) => {
                expect_no_stream(stream)?;
                let cpu = device::cpu(&target.machine, executor.as_ref())?;
                let (mut pools, copies) = cache::block_copies::<Host>(&given)?;
                Ok(cpu.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: &copies })?)
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => {
                let (mut pools, copies) = cache::block_copies(&given)?;
                let mut copy = CopyBlocks { pools: &mut pools, copies: &copies };
                Ok(gpu.copy_blocks_raw(stream.cast(), &mut copy)?)
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => {
                let encoder = metal::encoder(stream)?;
                let (mut pools, copies) = cache::block_copies(&given)?;
                let mut copy = CopyBlocks { pools: &mut pools, copies: &copies };
                Ok(gpu.copy_blocks(encoder, &mut copy)?)
            }
            Runner::Absent => {
                #[cfg(feature = "cuda")]
                if let regard::Device::Cuda(_) = target.machine.device {
                    cache::block_copies::<regard::cuda::DeviceMemory>(&given)?;
                }
                Err(absent(&target.machine))
            }
        }
    })
}

/// Writes the standard slopes of ALiBi (Press et al. 2021) for `query_heads` heads to `slopes`, an
/// array of as many elements: 2^(-8 (h + 1) / n) for n heads if n is a power of two. Otherwise the
/// slopes of the largest power of two below n, then every second slope of the next power of two.
/// Pass them as `alibi_slopes` of `regard_operands`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_alibi_slopes(query_heads: usize, slopes: *mut f32) -> Status {
    status::status(|| {
        if query_heads > MAX_SLOPES {
            return Err(bad("query_heads", query_heads, format!("at most {MAX_SLOPES}")));
        }
        if slopes.is_null() && query_heads > 0 {
            return Err(bad("slopes", "null", format!("room for {query_heads} floats")));
        }
        for (head, slope) in regard::alibi_slopes(query_heads).into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { slopes.add(head).write_unaligned(slope) };
        }
        Ok(())
    })
}

/// Merges partial results over disjoint sets of keys (a shared prefix and the keys after it, caches
/// spread over devices). On a GPU this is work on `stream` (a `CUstream` or `cudaStream_t`, null
/// for the default stream; on Metal an `id<MTLComputeCommandEncoder>`). On the CPU it is done when
/// the call returns, and `stream` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_merge_run(
    merge: *const types::Merge,
    device: *const Device,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let merge = convert::read("merge", merge)?;
        let target = Target::from_device(device)?;
        match &target.runner {
            Runner::Cpu(executor) => {
                expect_no_stream(stream)?;
                let cpu = device::cpu(&target.machine, executor.as_ref())?;
                Ok(cpu.merge(&mut cache::merge(&merge)?)?)
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => Ok(gpu.merge_raw(stream.cast(), &mut cache::merge(&merge)?)?),
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => {
                let encoder = metal::encoder(stream)?;
                Ok(gpu.merge(encoder, &mut cache::merge(&merge)?)?)
            }
            Runner::Absent => {
                #[cfg(feature = "cuda")]
                if let regard::Device::Cuda(_) = target.machine.device {
                    cache::merge::<regard::cuda::DeviceMemory>(&merge)?;
                }
                Err(absent(&target.machine))
            }
        }
    })
}

/// Loads the kernels that `regard_merge_run` runs, as `regard_plan_load` does for a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_merge_load(device: *const Device) -> Status {
    status::status(|| {
        // SAFETY: the caller's promise.
        let target = unsafe { Target::from_device(device)? };
        match &target.runner {
            Runner::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => Ok(gpu.load_merge()?),
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => Ok(gpu.load_merge()?),
            Runner::Absent => Err(absent(&target.machine)),
        }
    })
}

/// Takes compiled pipelines from a file of `regard_device_save_archive`, from now on and in place
/// of another such file: pipelines that are in it are not compiled again. Without such a file there
/// is nothing to take. `path` is UTF-8. For Metal; the CPU and CUDA ship compiled code, so that
/// nothing is read there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_device_use_archive(
    device: *const Device,
    path: *const c_char,
) -> Status {
    status::status(|| {
        // SAFETY: the caller's promise.
        let (target, _path) = unsafe { (Target::from_device(device)?, archive_path(path)?) };
        match &target.runner {
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => Ok(gpu.use_archive(_path)?),
            Runner::Absent => Err(absent(&target.machine)),
            _ => Ok(()),
        }
    })
}

/// Writes all pipelines that the device has loaded to a binary archive, in place of a file that is
/// there, and their number to `pipelines`, unless that is null. Metal reads it on GPUs and systems
/// of the same version; elsewhere pipelines are compiled as if it were empty. `path` is UTF-8. For
/// Metal; the CPU and CUDA ship compiled code, so that nothing is written there, and the number is
/// 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_device_save_archive(
    device: *const Device,
    path: *const c_char,
    pipelines: *mut usize,
) -> Status {
    status::status(|| {
        // SAFETY: the caller's promise.
        let (target, _path) = unsafe { (Target::from_device(device)?, archive_path(path)?) };
        let saved = match &target.runner {
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => gpu.save_archive(_path)?,
            Runner::Absent => return Err(absent(&target.machine)),
            _ => 0,
        };
        if !pipelines.is_null() {
            // SAFETY: the caller's promise.
            unsafe { pipelines.write_unaligned(saved) };
        }
        Ok(())
    })
}

/// # Safety
/// `path` is null or a string that ends in a zero.
unsafe fn archive_path<'a>(path: *const c_char) -> Result<&'a str, Failure> {
    if path.is_null() {
        return Err(bad("path", "null", "the path of a file"));
    }
    // SAFETY: passed on.
    let path = unsafe { CStr::from_ptr(path) };
    path.to_str().map_err(|_| bad("path", "not UTF-8", "the path of a file, in UTF-8"))
}

impl Plan {
    fn new(problem: &Problem, target: Target) -> Result<Plan, Failure> {
        let plan = regard::Plan::new(problem, &target.machine)?;
        Ok(Plan { plan, runner: target.runner, explanation: OnceLock::new() })
    }
}

/// # Safety
/// `problem` and `device` are as their conversions want them.
unsafe fn plan(problem: *const types::Problem, device: *const Device) -> Result<Plan, Failure> {
    // SAFETY: passed on.
    let problem = convert::problem(&unsafe { convert::read("problem", problem)? })?;
    // Before the device: an invalid problem is an argument error on every device.
    problem.validate()?;
    // SAFETY: passed on.
    Plan::new(&problem, unsafe { Target::from_device(device)? })
}

/// # Safety
/// `operands` is null or a `regard_operands` of its size; its tensors are memory of that device.
unsafe fn problem_of(operands: *const Operands, target: &Target) -> Result<Problem, Failure> {
    // SAFETY: passed on.
    let operands = unsafe { convert::read("operands", operands)? };
    match &target.machine.device {
        regard::Device::Cpu(_) => {
            // SAFETY: passed on.
            let (inputs, outputs) = unsafe { convert::operands::<Host>(&operands)? };
            Ok(Problem::from_operands(&inputs, &outputs)?)
        }
        #[cfg(feature = "cuda")]
        regard::Device::Cuda(_) => {
            // SAFETY: passed on.
            let (inputs, outputs) =
                unsafe { convert::operands::<regard::cuda::DeviceMemory>(&operands)? };
            Ok(Problem::from_operands(&inputs, &outputs)?)
        }
        #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
        regard::Device::Metal(_) => {
            // SAFETY: passed on.
            let (inputs, outputs) =
                unsafe { convert::operands::<regard::metal::MetalMemory>(&operands)? };
            Ok(Problem::from_operands(&inputs, &outputs)?)
        }
        _ => Err(refused(
            &target.machine,
            "this library was built without the feature for its memory",
        )),
    }
}

/// A refusal.
fn refused(machine: &Machine, reason: &str) -> Failure {
    Error::from(Refusal { machine: machine.to_string(), reason: reason.into() }).into()
}

/// The refusal of a machine that is not here.
fn absent(machine: &Machine) -> Failure {
    refused(machine, "it was asked for by name, and is not here")
}

/// Work on the CPU has no stream.
fn expect_no_stream(stream: *mut c_void) -> Result<(), Failure> {
    match stream.is_null() {
        true => Ok(()),
        false => Err(bad("stream", "not null", "null, because the device is a CPU")),
    }
}

/// The refusal of a plan whose machine is not here.
fn not_here(plan: &regard::Plan) -> Failure {
    refused(plan.machine(), "it was planned for by name, and is not here")
}

/// # Safety
/// `plan` is null, or came from [`hand_out`] and has not been destroyed.
unsafe fn expect_plan<'a>(plan: *const Plan) -> Result<&'a Plan, Failure> {
    // SAFETY: passed on.
    unsafe { plan.as_ref() }.ok_or_else(|| bad("plan", "null", "a plan"))
}

/// Gives the caller a plan to own, or null.
///
/// # Safety
/// `slot` is null or can be written.
unsafe fn hand_out(slot: *mut *mut Plan, make: impl FnOnce() -> Result<Plan, Failure>) -> Status {
    status::status(|| {
        if slot.is_null() {
            return Err(bad("plan", "null", "where to put the plan"));
        }
        // SAFETY: passed on.
        let set = |plan| unsafe { slot.write_unaligned(plan) };
        set(ptr::null_mut());
        set(Box::into_raw(Box::new(make()?)));
        Ok(())
    })
}
