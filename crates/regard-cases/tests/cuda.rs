//! The whole list of cases, and the laws, on this machine's GPU: `cargo test --release -p
//! regard-cases --features cuda`. `regard check --device cuda --cases --laws` does the same on
//! machines without Rust.
//!
//! Without a GPU the tests pass and print SKIPPED. With `REGARD_CUDA_REQUIRED` set, a skipped test
//! or law fails.
#![cfg(feature = "cuda")]

use regard::Error;
use regard::cuda::gpus;
use regard_cases::check::Checker;
use regard_cases::cuda::Runner;
use regard_cases::cuda::laws::{LAWS, SKIPPED};
use regard_cases::list;
use regard_cases::random::{self, Device, Profile};

/// Whether a skipped test is a failure.
fn required() -> bool {
    std::env::var_os("REGARD_CUDA_REQUIRED").is_some()
}

/// A runner, or `None` and a line on standard error if there is no GPU.
fn runner(test: &str) -> Option<Runner> {
    match gpus() {
        Ok(_) => Some(Runner::new(0).unwrap()),
        Err(reason) => {
            assert!(!required(), "REGARD_CUDA_REQUIRED is set, and there is no GPU: {reason}");
            // Bypasses the capture of test output, so that a skipped test is visible.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "\nSKIPPED, no GPU was used: {test}: {reason}");
            None
        }
    }
}

#[test]
fn every_case() {
    let Some(mut runner) = runner("every_case") else { return };
    let mut failures = Vec::new();
    let machine = runner.gpu().machine().clone();
    for spec in list::list_with_caches().filter(|spec| spec.has_plan_on(&machine)) {
        let case = spec.generate();
        let result = Checker::new(&case, None).and_then(|checker| {
            let output = case.run(|inputs, outputs| runner.run(inputs, outputs))?;
            checker.check(&output)
        });
        failures.extend(result.err().map(|failure| format!("{}: {failure}", spec.name)));
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_law() {
    let Some(mut runner) = runner("every_law") else { return };
    let mut failures = Vec::new();
    for law in LAWS {
        match (law.check)(&mut runner) {
            Ok(tried) if required() && tried.starts_with(SKIPPED) => {
                failures.push(format!("{}: {tried}", law.name));
            }
            Ok(tried) => println!("{}: {tried}", law.name),
            Err(broken) => failures.push(format!("{}: {broken}", law.name)),
        }
    }
    assert!(failures.is_empty(), "{} broken:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn random_problems_of_a_new_seed() {
    if runner("random_problems_of_a_new_seed").is_none() {
        return;
    }
    let make = || -> Result<Box<dyn Device>, Error> { Ok(Box::new(Runner::new(0)?)) };
    let summary = random::test("on a GPU", 2000, Profile::All, &make);
    let summary = summary.unwrap_or_else(|failures| panic!("{failures}"));
    assert_eq!(summary.passed, 2000, "{:?}", summary.refused);
}
