//! Bits of the shipped Metal kernels, run on the host: the same in every run, and the same whether
//! a pipeline's function constants are variables or, as on a GPU, constants that the compiler
//! folds.

#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, Compiler, Library, On, run_plan, run_problem, specialized_source};
use regard::metal::{self, Pipeline};
use regard::{DType, Error, Plan, Problem};
use regard_cases::rows::bits;
use regard_cases::{Keys, Spec, list};
use std::collections::HashMap;
use support::{compiler, gpu, library, run};

/// Decode, prefill, splits that are shared and splits that are walked, with and without features.
fn specs() -> Vec<Spec> {
    let lengths = [(1, 1030), (17, 130)];
    let invariant = |dtype| Spec::invariant().dtype(dtype).lengths(&lengths);
    let features = Spec::new("features").lengths(&[(9, 700)]).heads(4, 2).dims(64, 64);
    vec![
        invariant(DType::F32),
        invariant(DType::BF16),
        Spec::new("decode").lengths(&[(1, 900)]).heads(4, 1).dims(128, 128).dtype(DType::F16),
        Spec {
            causal: true,
            softcap: Some(20.0),
            sinks: true,
            alibi: true,
            keys: Keys::Paged { block_size: 16, interleaved: true },
            ..features.dtype(DType::BF16)
        },
    ]
}

#[test]
fn two_runs_have_the_same_bits() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &metal::source(), Build::Plain);
    for spec in specs() {
        let case = spec.generate();
        let machine = gpu(8, 8);
        let [first, second] = [(0, 0xff), (37, 0x3c)].map(|(schedule, garbage)| {
            let on = On { machine: &machine, schedule, garbage };
            let output = case.run(|inputs, outputs| {
                run_problem(&mut library, on, inputs, outputs, |_| {}).map(|_| ())
            });
            bits(&output.unwrap_or_else(|error| panic!("{}: {error}", spec.name)))
        });
        assert!(first == second, "{}", spec.name);
    }
}

/// Runs specs by pipelines that are compiled on their own, and compares.
fn check_specialized(compiler: &Compiler, specs: &[Spec]) {
    let mut generic = library(compiler, &metal::source(), Build::Plain);
    let mut specialized: HashMap<Pipeline, Library> = HashMap::new();
    let machine = gpu(8, 8);
    for spec in specs {
        let case = spec.generate();
        let mut output = |is_specialized: bool| {
            let output = case.run(|inputs, outputs| {
                let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &machine)?;
                run_plan(&plan, 0xff, inputs, outputs, |dispatch| {
                    let library = match is_specialized {
                        false => &mut generic,
                        true => specialized.entry(dispatch.pipeline).or_insert_with(|| {
                            let source = specialized_source(&dispatch.pipeline);
                            library(compiler, &source, Build::Plain)
                        }),
                    };
                    run(library, dispatch, 3)
                        .map_err(|findings| Error::argument("kernel", findings, "a clean run"))
                })
            });
            bits(&output.unwrap_or_else(|error| panic!("{}: {error}", spec.name)))
        };
        assert!(output(false) == output(true), "{}", spec.name);
    }
    println!("{} pipelines", specialized.len());
}

#[test]
fn constants_that_are_folded_change_no_bits() {
    let Some(compiler) = compiler() else { return };
    check_specialized(&compiler, &specs());
}

/// A second and more of clang for each pipeline.
#[test]
#[ignore = "long: scripts/metal.sh runs it"]
fn constants_that_are_folded_change_no_bits_of_the_core_list() {
    let Some(compiler) = compiler() else { return };
    let specs: Vec<_> = list::core().chain(list::caches().filter(|spec| spec.core)).collect();
    check_specialized(&compiler, &specs);
}
