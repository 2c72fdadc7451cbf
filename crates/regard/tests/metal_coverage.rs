//! Every Metal pipeline with every feature that it accepts, alone and in pairs, run on the host:
//! see `support/metal.rs`.
//!
//! `REGARD_METAL_CASES` keeps the pipelines whose names contain it.

#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, Library, run_plan};
use regard::{Error, Inputs, Outputs, Plan, Problem, metal};
use regard_cases::Output;
use regard_cases::coverage::metal::{Metal, function, names};
use regard_cases::coverage::{Backend, Coverage, CoverageCase, cover};
use std::collections::BTreeSet;
use support::{compiler, for_all, run};

fn coverages() -> Vec<Coverage> {
    let only = std::env::var("REGARD_METAL_CASES").unwrap_or_default();
    let subjects = Metal.subjects().into_iter().filter(|subject| subject.name.contains(&only));
    subjects.map(|subject| cover(&Metal, &subject)).collect()
}

/// The result of a case, if the pipeline that it was made for takes part in it.
fn output_of(
    library: &mut Library,
    name: &str,
    case: &CoverageCase,
    schedule: u32,
) -> Result<Output, String> {
    let mut findings = Ok(());
    let output = case.run(
        &case.spec.generate(),
        |inputs: &Inputs, outputs: &mut Outputs| -> Result<(), Error> {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &case.machine)?;
            if !names(&plan).iter().any(|(ran, _)| ran == name) {
                findings = Err(format!("{:?} instead of {name}", names(&plan)));
            }
            run_plan(&plan, 0xff, inputs, outputs, |dispatch| {
                findings = findings.clone().and_then(|()| run(library, dispatch, schedule));
                Ok(())
            })
        },
    );
    findings.and(output.map_err(|error| error.to_string()))
}

#[test]
fn every_pipeline_with_every_pair_of_features() {
    // Minutes of the slower builds would show nothing that their core lists do not.
    if support::build() != Build::Plain {
        return;
    }
    let Some(compiler) = compiler() else { return };
    let coverages = coverages();
    let cases: Vec<_> = coverages
        .iter()
        .flat_map(|coverage| coverage.cases.iter().map(|case| (&coverage.subject.name, case)))
        .enumerate()
        .collect();
    for_all(
        (&compiler, &metal::source(), Build::Plain),
        &cases,
        |library, &(number, (name, case))| {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{} ({}): {why}", case.spec.name, case.features)
            };
            let output =
                output_of(library, name, case, number as u32 % 5).map_err(|why| failed(&why))?;
            case.judge(&case.spec.generate(), &output, support::limits::judged_rows())
                .map(|_| ())
                .map_err(|failure| failed(&failure))
        },
    );
    println!("{} pipelines, {} cases", coverages.len(), cases.len());
}

#[test]
fn every_function_is_covered_and_no_accepted_pair_is_missing() {
    let coverages = coverages();
    let mut found = BTreeSet::new();
    for coverage in &coverages {
        let (features, pairs) = coverage.empty(&coverage.covered(coverage.cases.iter()));
        let name = &coverage.subject.name;
        println!(
            "{name}: {} features, {} pairs in {} cases; not {:?}",
            coverage.accepted().len(),
            coverage.accepted_pairs.len(),
            coverage.cases.len(),
            coverage.not_accepted
        );
        assert!(features.is_empty() && pairs.is_empty(), "{name}: {features:?} {pairs:?}");
        found.insert(function(name).to_string());
    }
    if std::env::var_os("REGARD_METAL_CASES").is_some() {
        return;
    }
    let shipped: BTreeSet<String> = metal::functions().map(str::to_string).collect();
    assert_eq!(found, shipped);
}
