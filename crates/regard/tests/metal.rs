//! The shipped Metal kernels, run on the host by msl-host with the dispatches that the library computes, on the one list of cases.
//!
//! `REGARD_METAL_BUILD=plain|fast-math|sanitized|races` picks how the kernels are compiled (plain by default); `scripts/metal.sh` runs
//! all of them. Where there is no clang, nothing runs, and a line says so.

mod support;

use msl_host::{Buffer, Build, Compiler, Library};
use regard::metal::{self, Dispatch};
use regard::{Error, Inputs, Machine, Outputs, Plan, Problem};
use regard_cases::check::Checker;
use regard_cases::{Case, Spec, list};

fn build() -> Build {
    let name = std::env::var("REGARD_METAL_BUILD").unwrap_or_else(|_| "plain".into());
    Build::named(&name).unwrap_or_else(|| panic!("REGARD_METAL_BUILD is {name}"))
}

/// clang, or nothing and a loud line.
fn compiler() -> Option<Compiler> {
    match Compiler::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/msl")) {
        Ok(compiler) => Some(compiler),
        Err(why) => {
            eprintln!("SKIPPED: the Metal kernels are not tested: {why}");
            None
        }
    }
}

fn library(compiler: &Compiler, source: &str, build: Build) -> Library {
    compiler.library("regard.metal", source, build).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs one dispatch on the host.
fn run(library: &mut Library, dispatch: &Dispatch, schedule: u32) -> Result<(), String> {
    let params = dispatch.params.bytes();
    // SAFETY: bindings cover operands, outputs and the workspace, which live until the caller's run is over.
    let mut buffers = vec![(0, unsafe { Buffer::read(params.as_ptr(), params.len()) })];
    for (index, binding) in dispatch.buffers.iter().enumerate() {
        let Some(binding) = binding else { continue };
        let data = binding.address as *mut u8;
        // SAFETY: as above.
        let buffer = unsafe {
            if binding.writable {
                Buffer::write(data, binding.bytes)
            } else {
                Buffer::read(data, binding.bytes)
            }
        };
        buffers.push((index as u32, buffer));
    }
    let constants: Vec<_> = (0..).zip(dispatch.pipeline.constants.map(f64::from)).collect();
    let findings = library.run(&msl_host::Dispatch {
        kernel: dispatch.pipeline.function,
        threadgroups: dispatch.grid,
        threads: [dispatch.threads, 1, 1],
        constants: &constants,
        buffers: &buffers,
        threadgroup_bytes: &[(0, dispatch.threadgroup_bytes)],
        threadgroup_limit: 32 << 10,
        schedule,
    });
    match findings {
        Ok(findings) if findings.is_empty() => Ok(()),
        Ok(findings) => Err(format!("{}: {}", dispatch.pipeline.function, findings.join("\n    "))),
        Err(error) => Err(error.to_string()),
    }
}

/// Plans a case for a GPU and runs the plan's dispatches, the workspace full of NaN.
fn run_case(
    library: &mut Library,
    case: &Case,
    machine: &Machine,
    schedule: u32,
) -> Result<regard_cases::Output, String> {
    let mut findings = Ok(());
    let output = case.run(|inputs: &Inputs, outputs: &mut Outputs| -> Result<(), Error> {
        let plan = Plan::new(&Problem::of(inputs, outputs)?, machine)?;
        let workspace = vec![[0xffu8; 16]; plan.workspace_bytes().div_ceil(16)];
        let address = workspace.as_ptr() as usize;
        for dispatch in metal::dispatches(&plan, inputs, outputs, address)?.iter().flatten() {
            findings = findings.clone().and_then(|()| run(library, dispatch, schedule));
        }
        Ok(())
    });
    findings.and(output.map_err(|error| error.to_string()))
}

fn gpu(family: u32, cores: usize) -> Machine {
    Machine {
        name: format!("family {family}, {cores} cores"),
        device: regard::Device::Metal(regard::MetalFacts { family, cores, threadgroup_bytes: 32 << 10 }),
    }
}

/// Checks a case on several GPUs and schedules.
fn check(library: &mut Library, spec: &Spec, runs: &[(Machine, u32)]) -> Result<f64, String> {
    let case = spec.generate();
    let checker = Checker::new(&case, None).map_err(|failure| failure.to_string())?;
    let mut worst: f64 = 0.0;
    for (machine, schedule) in runs {
        let output = run_case(library, &case, machine, *schedule)
            .map_err(|why| format!("{} on {machine}, schedule {schedule}: {why}", spec.name))?;
        let verdict = checker
            .check(&output)
            .map_err(|failure| format!("{} on {machine}, schedule {schedule}: {failure}", spec.name))?;
        worst = worst.max(verdict.agreement.worst);
    }
    Ok(worst)
}

/// Calls `work` for every item from two threads, each with a library of its own; panics with all that failed.
fn for_all<T: Sync>(
    compiler: &Compiler,
    items: &[T],
    work: impl Fn(&mut Library, &T) -> Result<(), String> + Sync,
) {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let source = metal::source();
    drop(library(compiler, &source, build()));
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut library = library(compiler, &source, build());
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(failure) = work(&mut library, item) {
                        failures.lock().expect("no thread panics here").push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics here");
    let shown: Vec<_> = failures.iter().take(20).cloned().collect();
    assert!(failures.is_empty(), "{} of {} failed:\n{}", failures.len(), items.len(), shown.join("\n"));
}

#[test]
fn every_case() {
    let Some(compiler) = compiler() else { return };
    let only = std::env::var("REGARD_METAL_CASES").unwrap_or_default();
    let specs: Vec<_> = list::list().filter(|spec| spec.name.contains(&only)).collect();
    for_all(&compiler, &specs, |library, spec| {
        let start = std::time::Instant::now();
        check(library, spec, &[(gpu(7, 8), 0)])?;
        if start.elapsed().as_secs_f64() > 1.0 {
            eprintln!("{}: {:.1} s", spec.name, start.elapsed().as_secs_f64());
        }
        Ok(())
    });
}

#[test]
fn the_source_type_checks_with_address_spaces() {
    let Some(compiler) = compiler() else { return };
    compiler.typecheck("regard.metal", &metal::source()).unwrap_or_else(|error| panic!("{error}"));
}
