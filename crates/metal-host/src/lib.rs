//! regard's Metal kernels on the host: the shipped source, compiled by clang as C++ (`msl-host`),
//! with the dispatches that the library computes for a Mac (pipelines, parameters, bindings,
//! grids). For tests and for `regard check --device metal-host`.
#![warn(missing_docs)]

pub use msl_host::{self, Buffer, Build, Compiler, Library};

use regard::metal::{
    self, BufferView, CONSTANTS, ConstantType, Dispatch, LibrarySource, MetalMemory, Pipeline,
};
use regard::{
    Device, Error, Inputs, Machine, MetalFacts, Outputs, Plan, Problem, Tensor, TensorMut,
};
use regard_cases::coverage::{self, CoverageCase, Subject};
use regard_cases::random::{self, How};
use regard_cases::{Case, Output, Spec};
use std::path::PathBuf;

/// An Apple GPU of that family, with that number of cores.
pub fn gpu(family: u32, cores: usize) -> Machine {
    Machine {
        name: format!("apple{family}"),
        device: Device::Metal(MetalFacts { family, cores, threadgroup_bytes: 32 << 10 }),
    }
}

/// A source, compiled and loaded.
///
/// # Errors
/// As [`Compiler::library`].
pub fn library(
    compiler: &Compiler,
    source: &str,
    build: Build,
) -> Result<Library, msl_host::Error> {
    compiler.library("regard.metal", source, build)
}

/// The source of one pipeline: its kernel alone, and its function constants as numbers. The
/// compiler of a GPU makes code from the same source.
pub fn specialized_source(pipeline: &Pipeline) -> String {
    let constant = |line: &str| {
        let index = line.split_once("[[function_constant(")?.1.split_once(')')?.0;
        let index: usize = index.parse().ok()?;
        let ((name, ty), value) = (CONSTANTS[index], pipeline.constants[index]);
        Some(match ty {
            ConstantType::Int => format!("constant int {name} = {value};"),
            ConstantType::Bool => format!("constant bool {name} = {};", value != 0),
        })
    };
    let text = LibrarySource::of_function(pipeline.function).text();
    let lines = text
        .lines()
        .map(|line| constant(line).unwrap_or_else(|| only_instance(line, pipeline.function)));
    lines.collect::<Vec<_>>().join("\n")
}

/// A line that instantiates a kernel for several sizes, reduced to the size of `function`: `4x1` of
/// `decode_half_4x1`.
fn only_instance(line: &str, function: &str) -> String {
    let sizes = function.rsplit('_').next().and_then(|sizes| sizes.split_once('x'));
    for call in ["DECODE(T, ", "PREFILL(NAME, Q, T, "] {
        let (Some((before, rest)), Some((first, second))) = (line.split_once(call), sizes) else {
            continue;
        };
        // The line that defines the macro has names in the place of sizes.
        if !rest.starts_with(|c: char| c.is_ascii_digit()) {
            continue;
        }
        let is_wanted = |instance: &&str| {
            let rest = instance.strip_prefix(&format!("{first}, {second}"));
            rest.is_some_and(|rest| rest.starts_with([',', ')']))
        };
        let instance = rest.split(call).find(is_wanted).expect("the sizes are in the line");
        return format!("{before}{call}{instance}");
    }
    line.to_string()
}

/// Runs one dispatch. The error lists the findings.
///
/// # Errors
/// In words.
pub fn run(library: &mut Library, dispatch: &Dispatch, schedule: u32) -> Result<(), String> {
    run_from(library, dispatch, schedule, [0; 3])
}

/// Runs the threadgroups of a dispatch from `first` on, in each dimension.
///
/// # Errors
/// In words.
pub fn run_from(
    library: &mut Library,
    dispatch: &Dispatch,
    schedule: u32,
    first: [u32; 3],
) -> Result<(), String> {
    let params = dispatch.params.bytes();
    // SAFETY: the parameters outlive the run.
    let mut buffers = vec![(0, unsafe { Buffer::read(params.as_ptr(), params.len()) })];
    for (index, binding) in (0..).zip(&dispatch.buffers) {
        let Some(binding) = binding else { continue };
        let data = binding.address as *mut u8;
        // SAFETY: bindings cover operands, outputs and the workspace, which the caller keeps until
        // the run is over.
        let buffer = unsafe {
            match binding.writable {
                true => Buffer::write(data, binding.bytes),
                false => Buffer::read(data, binding.bytes),
            }
        };
        buffers.push((index, buffer));
    }
    let constants: Vec<_> = (0..).zip(dispatch.pipeline.constants.map(f64::from)).collect();
    let findings = library
        .run(&msl_host::Dispatch {
            kernel: dispatch.pipeline.function,
            threadgroups: dispatch.grid,
            threads: [dispatch.threads, 1, 1],
            constants: &constants,
            buffers: &buffers,
            threadgroup_bytes: &[(0, dispatch.threadgroup_bytes)],
            threadgroup_limit: 32 << 10,
            first_threadgroup: first,
            schedule,
        })
        .map_err(|error| error.to_string())?;
    match findings.is_empty() {
        true => Ok(()),
        false => Err(format!("{}:\n    {}", dispatch.pipeline.function, findings.join("\n    "))),
    }
}

/// Runs a kernel that was encoded by way of the stand-in for Metal's classes.
///
/// # Errors
/// The defects found, in words.
#[cfg(metal_stand_in)]
pub fn run_stand_in(
    library: &mut Library,
    launch: &metal::stand_in::KernelLaunch,
    schedule: u32,
) -> Result<(), String> {
    let bound = |&(index, data, bytes): &(u32, *mut u8, usize)| {
        // SAFETY: the stand-in keeps the memory of bound buffers until the command has run.
        (index, unsafe { Buffer::write(data, bytes) })
    };
    let buffers: Vec<_> = launch.buffers.iter().map(bound).collect();
    let findings = library
        .run(&msl_host::Dispatch {
            kernel: launch.function,
            threadgroups: launch.threadgroups,
            threads: [launch.threads, 1, 1],
            constants: launch.constants,
            buffers: &buffers,
            threadgroup_bytes: &[(0, launch.threadgroup_bytes)],
            threadgroup_limit: 32 << 10,
            first_threadgroup: [0; 3],
            schedule,
        })
        .map_err(|error| error.to_string())?;
    if findings.is_empty() { Ok(()) } else { Err(findings.join("; ")) }
}

/// The machine and the conditions of a run.
#[derive(Debug, Clone, Copy)]
pub struct On<'a> {
    /// The GPU that is planned for.
    pub machine: &'a Machine,
    /// The order of SIMD groups and lanes.
    pub schedule: u32,
    /// The initial value of every byte of the workspace.
    pub garbage: u8,
}

/// Everything that the host can address, as one buffer: kernels run on the operands in place.
fn host_memory<'a>() -> BufferView<'a> {
    // SAFETY: views of it are of tensors of the host's, and are used on the host alone.
    unsafe { BufferView::from_raw(0, 0, isize::MAX as usize) }
}

/// A host tensor as an operand of the dispatches that [`run`] runs.
///
/// # Errors
/// If a Metal buffer could not hold it there.
pub fn operand<'a>(tensor: &Tensor<'a>) -> Result<Tensor<'a, MetalMemory>, Error> {
    let place = tensor.as_ptr() as usize;
    host_memory().tensor(place, tensor.dtype(), tensor.shape(), Some(tensor.strides()))
}

/// A host tensor that is written, as [`operand`].
///
/// # Errors
/// As [`operand`].
pub fn operand_mut<'a>(tensor: &'a mut TensorMut) -> Result<TensorMut<'a, MetalMemory>, Error> {
    let place = tensor.as_mut_ptr() as usize;
    host_memory().tensor_mut(place, tensor.dtype(), tensor.shape(), Some(tensor.strides()))
}

/// Runs a plan's dispatches on operands of the host's memory, with a workspace full of `garbage`.
/// Each dispatch goes to `execute`.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan. Errors of `execute`.
pub fn run_plan(
    plan: &Plan,
    garbage: u8,
    inputs: &Inputs,
    outputs: &mut Outputs,
    mut execute: impl FnMut(&Dispatch) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut memory = vec![u128::from_ne_bytes([garbage; 16]); plan.workspace_bytes().div_ceil(16)];
    let home = memory.as_mut_ptr() as u64;
    // SAFETY: it is memory of the host's, and outlives the run.
    let workspace = unsafe { BufferView::from_raw(0, home, memory.len() * 16) };
    let inputs = inputs.try_map(|_, tensor| operand(&tensor))?;
    let out = operand_mut(&mut outputs.out)?;
    let lse = outputs.lse.as_mut().map(operand_mut).transpose()?;
    let outputs = Outputs { out, lse };
    let dispatches = metal::dispatches(plan, &inputs, &outputs, &workspace)?;
    dispatches.iter().try_for_each(|dispatch| execute(&dispatch))
}

/// Plans a problem and runs the plan's dispatches. `tamper` may change device memory after all
/// checks. Returns the kernel's name.
///
/// # Errors
/// If it is refused. Findings are an error of the argument `kernel`.
pub fn run_problem(
    library: &mut Library,
    On { machine, schedule, garbage }: On,
    inputs: &Inputs,
    outputs: &mut Outputs,
    tamper: impl Fn(&Dispatch),
) -> Result<&'static str, Error> {
    // Planned with readable contents; the dispatches know shapes alone.
    let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
    run_plan(&plan, garbage, inputs, outputs, |dispatch| {
        tamper(dispatch);
        run(library, dispatch, schedule).map_err(|findings| {
            Error::argument(
                "kernel",
                format!("wrong: {findings}"),
                "a run in which nothing is found",
            )
        })
    })?;
    Ok(plan.choice().kernel.name())
}

/// [`run_case`] with tampering, as [`run_problem`].
///
/// # Errors
/// In words.
pub fn run_tampered(
    library: &mut Library,
    case: &Case,
    (machine, schedule): (&Machine, u32),
    tamper: impl Fn(&Dispatch),
) -> Result<Output, String> {
    let on = On { machine, schedule, garbage: 0xff };
    let output =
        case.run(|inputs, outputs| run_problem(library, on, inputs, outputs, &tamper).map(|_| ()));
    output.map_err(|error| error.to_string())
}

/// Runs a case on a GPU and with a schedule, the workspace full of NaN.
///
/// # Errors
/// In words.
pub fn run_case(library: &mut Library, case: &Case, on: (&Machine, u32)) -> Result<Output, String> {
    run_tampered(library, case, on, |_| {})
}

/// The kernels as a device: GPUs of few and many cores and of several families, in many orders of
/// execution.
pub struct MetalHost {
    library: Library,
    machines: Vec<Machine>,
    ran: String,
}

impl MetalHost {
    /// Compiles and loads the shipped kernels.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no suitable clang, [`Error::Driver`] if it fails.
    pub fn new() -> Result<MetalHost, Error> {
        let failed = |error: msl_host::Error| match error {
            msl_host::Error::Unavailable(reason) => {
                Error::Refused(regard::Refusal { machine: "device metal-host".into(), reason })
            }
            error => Error::Driver {
                doing: "compiling the Metal kernels for the host".into(),
                reason: error.to_string(),
            },
        };
        let compiler = Compiler::new(folder()).map_err(failed)?;
        let library = library(&compiler, &metal::source(), Build::Plain).map_err(failed)?;
        let machines = vec![gpu(7, 8), gpu(8, 1), gpu(9, 40), gpu(9, 64)];
        Ok(MetalHost { library, machines, ran: String::new() })
    }

    /// Runs a problem on one of the GPUs. Returns the kernel's name.
    ///
    /// # Errors
    /// As [`run_problem`].
    pub fn run(&mut self, inputs: &Inputs, outputs: &mut Outputs) -> Result<&'static str, Error> {
        let on = On { machine: &self.machines[0], schedule: 2, garbage: 0xff };
        run_problem(&mut self.library, on, inputs, outputs, |_| {})
    }

    /// The GPUs that problems are planned for.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Runs a case of the coverage of Metal's pipelines on the GPU that it was made for.
    ///
    /// # Errors
    /// As [`run_problem`], and if another pipeline runs than the case was made for.
    pub fn cover(
        &mut self,
        subject: &Subject,
        case: &CoverageCase,
        data: &Case,
    ) -> Result<Output, Error> {
        case.run(data, |inputs, outputs| {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &case.machine)?;
            let used: Vec<_> =
                coverage::metal::names(&plan).into_iter().map(|(name, _)| name).collect();
            if !used.contains(&subject.name) {
                return Err(Error::argument("kernel", used.join(", "), &subject.name));
            }
            let on =
                On { machine: &case.machine, schedule: case.spec.seed as u32 % 5, garbage: 0xff };
            run_problem(&mut self.library, on, inputs, outputs, |_| {}).map(|_| ())
        })
    }
}

impl random::Device for MetalHost {
    fn way(&self, _way: usize) -> String {
        self.ran.clone()
    }

    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        let machine = &self.machines[how.plan as usize % self.machines.len()];
        // 0 is ascending and 1 descending; the others are random.
        let schedule = how.order as u32 % 64;
        self.ran = format!("{machine}, schedule {schedule}");
        let on = On { machine, schedule, garbage: how.garbage };
        run_problem(&mut self.library, on, inputs, outputs, |_| {}).map(|_| ())
    }

    fn reads_cache(&self, spec: &Spec) -> bool {
        self.machines.iter().all(|machine| spec.has_plan_on(machine))
    }

    fn guards(&self) -> bool {
        true
    }
}

/// The cache of compiled libraries.
fn folder() -> PathBuf {
    std::env::temp_dir().join("regard-metal-host")
}
