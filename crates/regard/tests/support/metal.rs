//! Runs plans for Apple GPUs on the host: the shipped source through msl-host, with the dispatches that the library computes.
//!
//! `REGARD_METAL_BUILD=plain|fast-math|sanitized|races` picks how the kernels are compiled, plain if it is not set; `scripts/metal.sh` runs all.

// Compiled into each test on its own, and none uses all of it.
#![allow(dead_code)]

use msl_host::{Buffer, Build, Compiler, Library};
use regard::metal::{self, Dispatch};
use regard::{Device, Error, Inputs, Machine, MetalFacts, Outputs, Plan, Problem};
use regard_cases::{Case, Output};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The build that is asked for.
pub fn build() -> Build {
    let name = std::env::var("REGARD_METAL_BUILD").unwrap_or_else(|_| "plain".into());
    Build::named(&name).unwrap_or_else(|| panic!("REGARD_METAL_BUILD is {name}; see Build::ALL"))
}

/// clang, or nothing and a loud line. With `REGARD_METAL_REQUIRED` set, nothing is a failure.
pub fn compiler() -> Option<Compiler> {
    match Compiler::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/msl")) {
        Ok(compiler) => Some(compiler),
        Err(why) => {
            assert!(std::env::var_os("REGARD_METAL_REQUIRED").is_none(), "{why}");
            // Straight to stderr: what a test that passes prints is not shown.
            let _ = writeln!(std::io::stderr(), "SKIPPED: the Metal kernels are not tested: {why}");
            None
        }
    }
}

/// The kernels, compiled and loaded.
pub fn library(compiler: &Compiler, source: &str, build: Build) -> Library {
    compiler.library("regard.metal", source, build).unwrap_or_else(|error| panic!("{error}"))
}

/// An Apple GPU of that family, with so many cores.
pub fn gpu(family: u32, cores: usize) -> Machine {
    Machine {
        name: format!("apple{family}"),
        device: Device::Metal(MetalFacts { family, cores, threadgroup_bytes: 32 << 10 }),
    }
}

/// Runs one dispatch; what is found wrong is the error.
pub fn run(library: &mut Library, dispatch: &Dispatch, schedule: u32) -> Result<(), String> {
    let params = dispatch.params.bytes();
    // SAFETY: the parameters outlive the run.
    let mut buffers = vec![(0, unsafe { Buffer::read(params.as_ptr(), params.len()) })];
    for (index, binding) in (0..).zip(&dispatch.buffers) {
        let Some(binding) = binding else { continue };
        let data = binding.address as *mut u8;
        // SAFETY: bindings cover operands, outputs and the workspace, which the caller keeps until the run is over.
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
            schedule,
        })
        .map_err(|error| error.to_string())?;
    match findings.is_empty() {
        true => Ok(()),
        false => Err(format!("{}:\n    {}", dispatch.pipeline.function, findings.join("\n    "))),
    }
}

/// Plans a case for a GPU and runs the plan's dispatches, the workspace full of NaN. `tamper` may change what is in device memory, after
/// everything has been checked.
pub fn run_tampered(
    library: &mut Library,
    case: &Case,
    (machine, schedule): (&Machine, u32),
    tamper: impl Fn(&Dispatch),
) -> Result<Output, String> {
    let mut findings = Ok(());
    let output = case.run(|inputs: &Inputs, outputs: &mut Outputs| -> Result<(), Error> {
        let plan = Plan::new(&Problem::of(inputs, outputs)?, machine)?;
        let mut workspace = vec![u128::MAX; plan.workspace_bytes().div_ceil(16)];
        let home = workspace.as_mut_ptr() as usize;
        for dispatch in metal::dispatches(&plan, inputs, outputs, home)?.iter().flatten() {
            tamper(dispatch);
            findings = findings.clone().and_then(|()| run(library, dispatch, schedule));
        }
        Ok(())
    });
    findings.and(output.map_err(|error| error.to_string()))
}

/// [`run_tampered`] without tampering.
pub fn run_case(library: &mut Library, case: &Case, on: (&Machine, u32)) -> Result<Output, String> {
    run_tampered(library, case, on, |_| {})
}

/// Calls `work` for every item from two threads, each with a library of its own; panics with all that failed.
pub fn for_all<T: Sync>(
    (compiler, source, build): (&Compiler, &str, Build),
    items: &[T],
    work: impl Fn(&mut Library, &T) -> Result<(), String> + Sync,
) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Compiled once, before both threads want it.
    let first = Mutex::new(Some(library(compiler, source, build)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let loaded = first.lock().expect("no thread panics here").take();
                let mut library = loaded.unwrap_or_else(|| library(compiler, source, build));
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
