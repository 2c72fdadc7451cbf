//! One case: read, run and timed.

use crate::memory;
use regard::cpu::{self, Inline};
use regard::{Device, Error, Inputs, Machine, Outputs, Plan, Problem, Refusal, Tensor, Values};
use regard_cases::{Case, Output, file};
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;
#[cfg(all(feature = "metal", target_vendor = "apple"))]
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Reads a case file.
pub fn read(path: &Path) -> Result<Case, Error> {
    let unreadable = |error: &dyn std::fmt::Display| {
        Error::argument("file", format!("unreadable ({error})"), "a case file")
    };
    let metadata = path.metadata().map_err(|error| unreadable(&error))?;
    // Pipes may wait for ever, and devices never end.
    if !metadata.is_file() {
        return Err(unreadable(&"no regular file"));
    }
    // Its bytes, and the tensors made of them.
    memory::expect_room("this file", metadata.len().saturating_mul(2))?;
    let bytes = std::fs::read(path).map_err(|error| unreadable(&error))?;
    file::from_bytes(&path.file_stem().unwrap_or_default().to_string_lossy(), &bytes)
}

/// The problem that a case poses.
pub fn problem(case: &Case) -> Result<Problem, Error> {
    memory::expect_room("the outputs of this case", output_bytes(case))?;
    let mut problem = None;
    case.run(|inputs, outputs| {
        problem = Some(Problem::from_operands(inputs, outputs)?);
        Ok(())
    })?;
    Ok(problem.expect("a case that runs calls its runner"))
}

/// A device to run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// This machine's CPU.
    Cpu(Machine),
    /// The GPU of that number.
    #[cfg(feature = "cuda")]
    Cuda(usize),
    /// This system's default Metal device.
    #[cfg(all(feature = "metal", target_vendor = "apple"))]
    Metal,
    /// The kernels for Apple's GPUs, on the host.
    #[cfg(feature = "metal-host")]
    MetalHost,
}

/// Threads that `--threads` asks for.
static THREADS: OnceLock<usize> = OnceLock::new();

/// Notes the number of threads that `--threads` asks for. Returns the number in use.
pub fn set_threads(threads: Option<usize>) -> Result<usize, Error> {
    if let Some(threads) = threads {
        THREADS.get_or_init(|| threads);
    }
    match host()?.device {
        regard::Device::Cpu(facts) => Ok(facts.threads),
        _ => unreachable!("the host is a CPU"),
    }
}

/// This machine's CPU, with as many threads as `--threads` asks for.
fn host() -> Result<Machine, Error> {
    let machine = Machine::host()?;
    Ok(match THREADS.get() {
        Some(&threads) => machine.with_threads(threads),
        None => machine,
    })
}

/// The device that `--device` names, or the reason why there is none.
pub fn device(name: &str) -> Result<Target, Error> {
    match name.split_once(':').unwrap_or((name, "0")) {
        ("cpu", _) if name == "cpu" => host().map(Target::Cpu),
        ("cuda", number) => cuda_device(name, number),
        ("metal", _) if name == "metal" => metal_device(),
        #[cfg(feature = "metal-host")]
        ("metal-host", _) if name == "metal-host" => Ok(Target::MetalHost),
        _ => Err(Error::argument("device", format!("\"{name}\""), "cpu, cuda, cuda:N, metal")),
    }
}

fn no_kernels(name: &str, why: &str) -> Error {
    let version = env!("CARGO_PKG_VERSION");
    let reason = format!("regard {version} {why}");
    Error::Refused(Refusal { machine: format!("device {name}"), reason })
}

#[cfg(feature = "cuda")]
fn cuda_device(name: &str, number: &str) -> Result<Target, Error> {
    gpu(name, number).map(|gpu| Target::Cuda(gpu.ordinal))
}

#[cfg(not(feature = "cuda"))]
fn cuda_device(name: &str, _number: &str) -> Result<Target, Error> {
    Err(no_kernels(name, "was built without its feature cuda; the devices it has are: cpu"))
}

#[cfg(all(feature = "metal", target_vendor = "apple"))]
fn metal_device() -> Result<Target, Error> {
    Ok(Target::Metal)
}

/// The system's default Metal device. All threads share it, and the pipelines that it has compiled.
#[cfg(all(feature = "metal", target_vendor = "apple"))]
pub fn apple_gpu() -> Result<Arc<regard::metal::device::Gpu>, Error> {
    static GPU: Mutex<Option<Arc<regard::metal::device::Gpu>>> = Mutex::new(None);
    let mut gpu = GPU.lock().expect("no thread panics here");
    match &*gpu {
        Some(gpu) => Ok(gpu.clone()),
        None => Ok(gpu.insert(Arc::new(regard::metal::device::Gpu::system_default()?)).clone()),
    }
}

#[cfg(not(all(feature = "metal", target_vendor = "apple")))]
fn metal_device() -> Result<Target, Error> {
    Err(no_kernels(
        "metal",
        "runs Metal kernels on Apple's systems only, built with its feature metal",
    ))
}

/// The GPU that `name`, `cuda:number`, is.
#[cfg(feature = "cuda")]
pub fn gpu(name: &str, number: &str) -> Result<regard::cuda::GpuInfo, Error> {
    let mut gpus = regard::cuda::gpus()?;
    match number.parse::<usize>() {
        Ok(ordinal) if ordinal < gpus.len() => Ok(gpus.swap_remove(ordinal)),
        _ => {
            let there = gpus.iter().map(|gpu| format!("cuda:{}", gpu.ordinal)).collect::<Vec<_>>();
            Err(Error::argument(
                "device",
                format!("\"{name}\""),
                format!("cpu, {}", there.join(", ")),
            ))
        }
    }
}

/// Runs cases one after the other, keeping the plan and the workspace for the next one.
pub enum Runner {
    /// On the CPU.
    Cpu(Box<CpuRunner>),
    /// On a GPU.
    #[cfg(feature = "cuda")]
    Cuda(Box<regard_cases::cuda::Runner>),
    /// On an Apple GPU.
    #[cfg(all(feature = "metal", target_vendor = "apple"))]
    Metal(Box<regard_cases::metal::Runner>),
    /// The kernels for Apple's GPUs, on the host.
    #[cfg(feature = "metal-host")]
    MetalHost(Box<metal_host::MetalHost>),
}

/// Runs cases on the CPU.
pub struct CpuRunner {
    machine: Machine,
    plan: Option<Plan>,
    workspace: Vec<u8>,
}

/// The result of a run.
pub struct Run {
    /// The result.
    pub output: Output,
    /// The kernel that ran.
    pub kernel: &'static str,
    /// Seconds of the attention itself, the best of the repetitions.
    pub seconds: f64,
    /// The amount of work.
    pub work: Work,
}

/// The amount of work of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Multiplications and additions: 2 (Dk + Dv) for each query head, row and key that its range
    /// (causal, window, length) holds.
    pub flops: u64,
    /// Bytes of keys and values that some row's range holds, each read once.
    pub kv_bytes: u64,
    /// Maximum query rows of a sequence.
    pub query_len: usize,
}

impl Runner {
    /// Runs on that device.
    pub fn new(target: &Target) -> Result<Runner, Error> {
        match target {
            Target::Cpu(machine) => Ok(Runner::on(machine.clone())),
            #[cfg(feature = "cuda")]
            Target::Cuda(ordinal) => {
                Ok(Runner::Cuda(Box::new(regard_cases::cuda::Runner::new(*ordinal)?)))
            }
            #[cfg(all(feature = "metal", target_vendor = "apple"))]
            Target::Metal => {
                Ok(Runner::Metal(Box::new(regard_cases::metal::Runner::new(apple_gpu()?))))
            }
            #[cfg(feature = "metal-host")]
            Target::MetalHost => Ok(Runner::MetalHost(Box::new(metal_host::MetalHost::new()?))),
        }
    }

    /// Runs on that machine's CPU.
    pub fn on(machine: Machine) -> Runner {
        Runner::Cpu(Box::new(CpuRunner { machine, plan: None, workspace: Vec::new() }))
    }

    /// The machine of a GPU's kernels, on a GPU or on the host.
    pub fn gpu(&self) -> Option<&Machine> {
        match self {
            Runner::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Runner::Cuda(runner) => Some(runner.gpu().machine()),
            #[cfg(all(feature = "metal", target_vendor = "apple"))]
            Runner::Metal(runner) => Some(runner.gpu().machine()),
            #[cfg(feature = "metal-host")]
            Runner::MetalHost(host) => host.machines().first(),
        }
    }

    /// Runs a case once, and again while that takes less than `patience` in all, up to
    /// `repetitions` times.
    pub fn run(
        &mut self,
        case: &Case,
        repetitions: usize,
        patience: Duration,
    ) -> Result<Run, Error> {
        memory::expect_room("the outputs of this case", output_bytes(case))?;
        match self {
            Runner::Cpu(runner) => runner.run(case, repetitions, patience),
            #[cfg(feature = "cuda")]
            Runner::Cuda(runner) => {
                let (mut seconds, mut work) = (f64::INFINITY, Work::default());
                let output = case.run(|inputs, outputs| {
                    // Checked here: contents can be read here.
                    Problem::from_operands(inputs, outputs)?;
                    work = Work::from_inputs(inputs);
                    seconds = runner.run_timed(inputs, outputs, repetitions)?;
                    Ok(())
                })?;
                let kernel = runner.plan().map_or("", |plan| plan.choice().kernel.name());
                Ok(Run { output, kernel, seconds, work })
            }
            #[cfg(all(feature = "metal", target_vendor = "apple"))]
            Runner::Metal(runner) => {
                let gpu = runner.gpu();
                let (mut kernel, mut seconds, mut work) = ("", f64::INFINITY, Work::default());
                let output = case.run(|inputs, outputs| {
                    let plan = gpu.plan(inputs, outputs)?;
                    kernel = plan.choice().kernel.name();
                    work = Work::from_inputs(inputs);
                    let started = Instant::now();
                    for repetition in 0..repetitions.max(1) {
                        if repetition > 0 && started.elapsed() > patience {
                            break;
                        }
                        seconds =
                            seconds.min(gpu.run_copied(&plan, inputs, outputs)?.as_secs_f64());
                    }
                    Ok(())
                })?;
                Ok(Run { output, kernel, seconds, work })
            }
            #[cfg(feature = "metal-host")]
            Runner::MetalHost(host) => {
                let (mut kernel, mut seconds, mut work) = ("", f64::INFINITY, Work::default());
                let output = case.run(|inputs, outputs| {
                    let begin = Instant::now();
                    kernel = host.run(inputs, outputs)?;
                    seconds = begin.elapsed().as_secs_f64();
                    work = Work::from_inputs(inputs);
                    Ok(())
                })?;
                Ok(Run { output, kernel, seconds, work })
            }
        }
    }
}

impl CpuRunner {
    fn run(&mut self, case: &Case, repetitions: usize, patience: Duration) -> Result<Run, Error> {
        let mut kernel = "";
        let mut best = f64::INFINITY;
        let mut work = Work::default();
        let CpuRunner { machine, plan, workspace } = self;
        let output = case.run(|inputs, outputs| {
            let plan = planned(plan, machine, &Problem::from_operands(inputs, outputs)?)?;
            if workspace.len() < plan.workspace_bytes() {
                *workspace = Vec::new();
                memory::expect_room("the workspace of this case", plan.workspace_bytes() as u64)?;
                *workspace = vec![0; plan.workspace_bytes()];
            }
            kernel = plan.choice().kernel.name();
            work = Work::from_inputs(inputs);
            let started = Instant::now();
            for repetition in 0..repetitions.max(1) {
                if repetition > 0 && started.elapsed() > patience {
                    break;
                }
                let begin = Instant::now();
                attend(plan, inputs, outputs, workspace)?;
                best = best.min(begin.elapsed().as_secs_f64());
            }
            Ok(())
        })?;
        Ok(Run { output, kernel, seconds: best, work })
    }
}

/// Bytes of the outputs that running a case makes.
fn output_bytes(case: &Case) -> u64 {
    let rows =
        case.q.shape().iter().rev().skip(1).fold(1u64, |all, &n| all.saturating_mul(n as u64));
    let value_dim = case.v.shape().last().map_or(0, |&n| n as u64);
    // At most `f32`, and one number more for the log-sum-exp.
    rows.saturating_mul(value_dim.saturating_add(1)).saturating_mul(4)
}

/// The plan for a problem: the last one, if it was for the same.
fn planned<'a>(
    last: &'a mut Option<Plan>,
    machine: &Machine,
    problem: &Problem,
) -> Result<&'a Plan, Error> {
    if last.as_ref().is_some_and(|plan| plan.problem() != problem) {
        *last = None;
    }
    match last {
        Some(plan) => Ok(plan),
        none => Ok(none.insert(Plan::new(problem, machine)?)),
    }
}

/// Runs a plan: on this thread if it is for one, else on the pool.
pub fn attend(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: &mut [u8],
) -> Result<(), Error> {
    match &plan.machine().device {
        // On this thread: other threads may run other cases.
        Device::Cpu(facts) if facts.threads == 1 => {
            cpu::run(plan, inputs, outputs, workspace, &Inline)
        }
        _ => plan.run(inputs, outputs, workspace),
    }
}

impl Work {
    /// The work of checked inputs.
    pub fn from_inputs(inputs: &Inputs) -> Work {
        let Inputs { q, k, v, attention } = inputs;
        let heads = |shape: &[usize]| shape[shape.len() - 2] as u64;
        let values = |tensor: &Tensor| tensor.shape()[tensor.rank() - 1] * tensor.dtype().values();
        let dims = (values(k) + values(v)) as u64;
        let has_own_values = attention.values == Values::Separate;
        let row_bytes =
            |tensor: &Tensor| (tensor.shape()[tensor.rank() - 1] * tensor.dtype().size()) as u64;
        let batch = match &attention.cu_seqlens_q {
            Some(cumulative) => cumulative.len().saturating_sub(1),
            None => q.shape()[0],
        };
        let variant = attention.variant();
        let last = |lists: Option<Tensor>| lists.and_then(|lists| lists.shape().last().copied());
        // All rows of a sequence have one list of pages.
        let in_pages = last(attention.page_indices).map(|pages| pages.saturating_mul(k.shape()[1]));
        let listed = last(attention.key_indices).or(in_pages);
        let (mut pairs, mut keys, mut query_len) = (0u64, 0u64, 0);
        let mut scales = shared_scales(inputs);
        for index in 0..batch {
            let sequence = inputs.sequence(index);
            query_len = query_len.max(sequence.q_len);
            let rows = 0..sequence.q_len as i64;
            pairs = rows
                .map(|row| variant.visible(sequence.q_offset + row, sequence.keys()).len())
                .map(|visible| listed.unwrap_or(visible) as u64)
                .fold(pairs, u64::saturating_add);
            let range = variant.visible_to_rows(sequence.q_offset, sequence.q_len, sequence.keys());
            // Rows of a sequence may list the same keys; no more than these are read.
            let read = listed.map_or(range.len(), |n| n.saturating_mul(sequence.q_len));
            let range = match in_pages.filter(|_| sequence.q_len > 0) {
                Some(n) => 0..n,
                None => range.start..range.start + read.min(range.len()),
            };
            keys = keys.saturating_add(range.len() as u64);
            scales = scales.saturating_add(own_scales(inputs, &range));
        }
        Work {
            // A block table can name a page any number of times: a small file can describe more
            // keys than a number holds.
            flops: pairs.saturating_mul(2 * dims).saturating_mul(heads(q.shape())),
            kv_bytes: keys
                .saturating_mul(heads(k.shape()))
                .saturating_mul(row_bytes(k) + if has_own_values { row_bytes(v) } else { 0 })
                .saturating_add(scales.saturating_mul(size_of::<f32>() as u64)),
            query_len,
        }
    }
}

/// The scales of keys and of values, if there are any.
fn scale_tensors<'a>(inputs: &Inputs<'a>) -> impl Iterator<Item = Tensor<'a>> {
    [inputs.attention.k_scales, inputs.attention.v_scales].into_iter().flatten()
}

/// Scales that all sequences share: one for the tensor, or one per head.
fn shared_scales(inputs: &Inputs) -> u64 {
    let shared = |scales: &Tensor| scales.shape()[..scales.rank() - 1].iter().all(|&n| n == 1);
    scale_tensors(inputs).filter(shared).map(|scales| scales.len() as u64).sum()
}

/// Scales of one sequence's keys in that range: one per head and token, page or sequence.
fn own_scales(inputs: &Inputs, range: &Range<usize>) -> u64 {
    let slots = inputs.k.shape()[inputs.k.rank().saturating_sub(3)];
    let count = |scales: Tensor| match *scales.shape() {
        [1, 1, _] | [1, _] => 0,
        [tokens, heads] if tokens > 1 => range.len() * heads,
        [_, tokens, heads] if tokens > 1 => range.len() * heads,
        [_, 1, heads] if inputs.attention.block_table.is_some() && !range.is_empty() => {
            (range.end.div_ceil(slots.max(1)) - range.start / slots.max(1)) * heads
        }
        [_, 1, heads] if !range.is_empty() => heads,
        _ => 0,
    };
    scale_tensors(inputs).map(|scales| count(scales) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::Attention;
    use regard::format::BlockQ8_0;

    #[test]
    fn work_counts_what_rows_can_see() {
        let data = vec![0.0f32; 2 * 4 * 4 * 8];
        let q = Tensor::new(&data[..2 * 3 * 4 * 8], [2, 3, 4, 8]).unwrap();
        let k = Tensor::new(&data[..2 * 4 * 2 * 8], [2, 4, 2, 8]).unwrap();
        let v = Tensor::new(&data[..2 * 4 * 2 * 4], [2, 4, 2, 4]).unwrap();
        let full = Work::from_inputs(&Inputs::new(q, k, v, Attention::default()));
        assert_eq!(full, Work { flops: 2 * 12 * 4 * 24, kv_bytes: 8 * 2 * 12 * 4, query_len: 3 });
        // Values that are a part of the keys are read with them.
        let latent = Inputs::latent(q, k, 4, Attention::default()).unwrap();
        assert_eq!(Work::from_inputs(&latent), Work { kv_bytes: 8 * 2 * 8 * 4, ..full });
        // Rows at 1, 2 and 3 see 2, 3 and 4 keys.
        let causal = Work::from_inputs(&Inputs::new(q, k, v, Attention::causal()));
        assert_eq!(causal, Work { flops: 2 * 12 * 4 * 18, kv_bytes: 8 * 2 * 12 * 4, query_len: 3 });
    }

    #[test]
    fn work_counts_codes_and_scales_once() {
        let (codes, blocks) = (vec![0i8; 6 * 4 * 2 * 32], vec![BlockQ8_0::default(); 6 * 4 * 2]);
        let floats = vec![1.0f32; 2 * 4 * 32];
        let q = Tensor::new(&floats, [2, 1, 4, 32]).unwrap();
        let k = Tensor::new(&codes, [6, 4, 2, 32]).unwrap();
        let v = Tensor::new(&blocks, [6, 4, 2, 1]).unwrap();
        let (table, lens) = ([0, 1, 2, 3, 4, 5], [9, 4]);
        let bytes = |scales: [usize; 3]| {
            let attention = Attention {
                block_table: Some(Tensor::new(&table, [2, 3]).unwrap()),
                kv_lens: Some(Tensor::from(&lens)),
                k_scales: Some(Tensor::new(&floats[..scales.iter().product()], scales).unwrap()),
                ..Attention::causal()
            };
            Work::from_inputs(&Inputs::new(q, k, v, attention)).kv_bytes
        };
        let rows = 13 * 2 * (32 + 34);
        assert_eq!(bytes([1, 1, 1]), rows + 4);
        assert_eq!(bytes([1, 1, 2]), rows + 4 * 2);
        // Nine keys are in three pages of four, four in one.
        assert_eq!(bytes([6, 1, 2]), rows + 4 * 2 * 4);
        assert_eq!(bytes([6, 4, 2]), rows + 4 * 2 * 13);
    }

    #[test]
    fn devices() {
        assert_eq!(device("cpu"), Machine::host().map(Target::Cpu));
        for (name, words) in [("cuda:4096", "cuda"), ("metal", "Apple's systems")] {
            let error = device(name).unwrap_err().to_string();
            assert!(error.contains(words) || error.contains("driver"), "{error}");
        }
        for name in ["tpu", "cpu:1"] {
            let expected = format!("`device` is \"{name}\"; allowed: cpu, cuda, cuda:N, metal");
            assert_eq!(device(name).unwrap_err().to_string(), expected);
        }
    }
}
