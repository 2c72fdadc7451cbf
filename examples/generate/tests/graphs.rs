//! Decode steps captured in CUDA graphs give the answers of steps that are not, and graphs are
//! refused where there are none.
//!
//! Without a GPU, or without the feature `cuda`, the first test passes and prints SKIPPED. With
//! `REGARD_CUDA_REQUIRED` set it fails. `scripts/candle_cuda.sh` builds and runs it.

mod support;

use candle_core::Device;
use generate::attend::Mode;
use generate::engine::{Engine, Event, Request, Settings, Statistics};
use generate::model::{Llama, Weights};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use support::request;

/// The answers, in the order of the requests.
fn answers(
    model: &Llama,
    settings: Settings,
    requests: &[Request],
) -> (Vec<Vec<Event>>, Statistics) {
    let mut engine = Engine::new(model, settings).expect("sound");
    let mut answers = BTreeMap::new();
    for request in requests {
        answers.insert(engine.submit(request.clone()).expect("sound"), Vec::new());
    }
    while !engine.is_idle() {
        for event in engine.step().expect("runs") {
            answers.get_mut(&event.request).expect("a request").push(event);
        }
    }
    (answers.into_values().collect(), engine.statistics())
}

#[test]
fn answers_of_graphs_are_those_of_launches() {
    let device = match generate::device("cuda") {
        Ok(device) => device,
        Err(reason) => {
            // Without the backtrace.
            let reason = reason.to_string().lines().next().unwrap_or_default().to_string();
            let required = std::env::var_os("REGARD_CUDA_REQUIRED").is_some();
            assert!(!required, "REGARD_CUDA_REQUIRED is set, and there is no GPU: {reason}");
            // Bypasses the capture of test output, so that a skipped test is visible.
            use std::io::Write;
            let name = "answers_of_graphs_are_those_of_launches";
            let _ = writeln!(std::io::stderr(), "\nSKIPPED, no GPU was used: {name}: {reason}");
            return;
        }
    };
    let mut random = StdRng::seed_from_u64(11);
    let system: Vec<u32> = (0..37).map(|_| random.random_range(0..256)).collect();
    // Lengths and ends that differ: numbers of requests and widths of tables change, pages are
    // copied, and graphs come again.
    let requests: Vec<Request> = (0..9)
        .map(|i| {
            let beginning = if i % 2 == 0 { &system[..] } else { &[] };
            request(&mut random, beginning, 3 + 11 * i, 20 + 9 * i)
        })
        .collect();
    for weights in [Weights::F32, Weights::Bf16] {
        let model = support::model_on(&device, "graphs.gguf", weights);
        for mode in [Mode::BatchInvariant, Mode::Flat] {
            let settings = Settings { blocks: 512, block_size: 8, mode, ..Settings::default() };
            let (launches, found) = answers(&model, settings, &requests);
            assert_eq!(found.graph_steps, 0);
            let settings = Settings { graphs: true, ..settings };
            let (graphs, found) = answers(&model, settings, &requests);
            let what = format!("{weights:?}, {mode:?}: {found:?}");
            assert!(4 * found.graph_steps > found.steps, "{what}");
            // Plans of graphs are for longer tables, and may divide keys otherwise, unless a row's
            // bits do not depend on that.
            let bits = |answers: &[Vec<Event>]| -> Vec<Vec<(u32, u32)>> {
                let bits = |event: &Event| (event.token, event.margin.to_bits());
                answers.iter().map(|answer| answer.iter().map(bits).collect()).collect()
            };
            let tokens = |answers: &[Vec<Event>]| -> Vec<Vec<u32>> {
                answers
                    .iter()
                    .map(|events| events.iter().map(|event| event.token).collect())
                    .collect()
            };
            match (weights, mode) {
                (_, Mode::BatchInvariant) => assert_eq!(bits(&graphs), bits(&launches), "{what}"),
                (Weights::F32, _) => assert_eq!(tokens(&graphs), tokens(&launches), "{what}"),
                _ => {}
            }
        }
    }
}

#[test]
fn a_cpu_has_no_graphs() {
    let model = support::model_on(&Device::Cpu, "no-graphs.gguf", Weights::F32);
    let settings = Settings { graphs: true, ..Settings::default() };
    let error = Engine::new(&model, settings).err().expect("a CPU").to_string();
    assert!(error.contains("graphs: the model is on the CPU"), "{error}");
}
