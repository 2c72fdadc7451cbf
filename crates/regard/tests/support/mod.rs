//! Code that tests share: machines to force, a runner, and work spread over threads.

#![allow(dead_code, reason = "compiled into each test on its own, and none uses all of it")]

pub mod limits;

use regard::cpu::{Bf16Products, Level};
use regard::{Error, Inputs, Machine, Outputs, Plan, Problem};
use regard_cases::{Case, Output, random};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// This machine's CPU at every SIMD level it has, with and without products of bf16 pairs if it has
/// them, on one thread and on several. If `REGARD_SIMD` forces a level, at that level only.
pub fn machines() -> Vec<Machine> {
    let forced = std::env::var("REGARD_SIMD").ok().filter(|name| !name.is_empty());
    let forced = forced.map(|_| Level::detect().expect("a level of this machine"));
    let is_tested = |level: Level| level.is_available() && forced.is_none_or(|only| only == level);
    let levels = Level::ALL.into_iter().filter(|&level| is_tested(level));
    let mut machines: Vec<_> =
        levels.flat_map(|level| [1, 3].map(|threads| machine(level, threads))).collect();
    // The ways to multiply bf16 that the widest level would not choose by itself.
    for level in Level::ALL.into_iter().filter(|&level| is_tested(level)) {
        let others = Bf16Products::ALL.into_iter().filter(|&products| level.has(products));
        for products in others.filter(|&products| products != level.bf16_products()) {
            machines
                .extend([1, 3].map(|threads| machine(level, threads).with_bf16_products(products)));
        }
    }
    machines
}

/// This machine's CPU held to a SIMD level and a number of threads.
pub fn machine(level: Level, threads: usize) -> Machine {
    Machine::host().expect("this machine").with_level(level).with_threads(threads)
}

/// A runner for [`Case::run`]: plans for the machine and runs, the workspace full of garbage.
pub fn on(machine: &Machine) -> impl Fn(&Inputs, &mut Outputs) -> Result<(), Error> + use<'_> {
    |inputs, outputs| {
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
        plan.run(inputs, outputs, &mut vec![0xff; plan.workspace_bytes()])
    }
}

/// Runs a case that must run.
pub fn run(case: &Case, machine: &Machine) -> Output {
    case.run(on(machine)).unwrap_or_else(|error| panic!("{} on {machine}: {error}", case.name))
}

/// Calls `work` for every item, from two threads; panics with all that failed.
pub fn for_all<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<(), String> + Sync) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(failure) = work(item) {
                        failures.lock().expect("no thread panics here").push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics here");
    let shown: Vec<_> = failures.iter().take(40).cloned().collect();
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        items.len(),
        shown.join("\n")
    );
}

/// Leaves a case behind for `regard check`, and prints its path. The file asks for an f32 output by
/// bringing the oracle's.
pub fn leave_behind(case: &Case) -> PathBuf {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = directory.join(format!("{}.safetensors", case.name.replace(['/', ' '], "-")));
    random::leave(case, &path).expect("the build's temporary directory can be written");
    path
}
