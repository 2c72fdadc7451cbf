//! Decode steps captured in CUDA graphs give the answers of steps that are not, and graphs are
//! refused where there are none.
//!
//! Without a GPU, or without the feature `cuda`, the tests of answers pass and print SKIPPED. With
//! `REGARD_CUDA_REQUIRED` set they fail. `scripts/candle_cuda.sh` builds and runs them.

mod support;

use candle_core::Device;
use generate::attend::Mode;
use generate::engine::{Engine, Event, Request, Settings, Statistics};
use generate::model::{Config, Llama, Shape, Weights};
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

/// The first GPU, or `None` and a line on standard error if there is none.
fn gpu(test: &str) -> Option<Device> {
    let reason = match generate::device("cuda") {
        Ok(device) => return Some(device),
        // Without the backtrace.
        Err(reason) => reason.to_string().lines().next().unwrap_or_default().to_string(),
    };
    let required = std::env::var_os("REGARD_CUDA_REQUIRED").is_some();
    assert!(!required, "REGARD_CUDA_REQUIRED is set, and there is no GPU: {reason}");
    // Bypasses the capture of test output, so that a skipped test is visible.
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "\nSKIPPED, no GPU was used: {test}: {reason}");
    None
}

/// Lengths and ends that differ: numbers of requests and widths of tables change, pages are copied,
/// and graphs come again.
fn requests() -> Vec<Request> {
    let mut random = StdRng::seed_from_u64(11);
    let system: Vec<u32> = (0..37).map(|_| random.random_range(0..256)).collect();
    let mut next = |i: usize| {
        let beginning = if i.is_multiple_of(2) { &system[..] } else { &[] };
        request(&mut random, beginning, 3 + 11 * i, 20 + 9 * i)
    };
    (0..9).map(&mut next).collect()
}

/// Tokens, and margins to the bit.
fn bits(answers: &[Vec<Event>]) -> Vec<Vec<(u32, u32)>> {
    let bits = |event: &Event| (event.token, event.margin.to_bits());
    answers.iter().map(|answer| answer.iter().map(bits).collect()).collect()
}

fn tokens(answers: &[Vec<Event>]) -> Vec<Vec<u32>> {
    answers.iter().map(|answer| answer.iter().map(|event| event.token).collect()).collect()
}

/// The answers by launches, and by graphs.
fn both(model: &Llama, mode: Mode) -> [Vec<Vec<Event>>; 2] {
    let settings = Settings { blocks: 512, block_size: 8, mode, ..Settings::default() };
    let (launches, found) = answers(model, settings, &requests());
    assert_eq!(found.graph_steps, 0);
    let (graphs, found) = answers(model, Settings { graphs: true, ..settings }, &requests());
    assert!(4 * found.graph_steps > found.steps, "{mode:?}: {found:?}");
    [launches, graphs]
}

#[test]
fn answers_of_graphs_are_those_of_launches() {
    let Some(device) = gpu("answers_of_graphs_are_those_of_launches") else { return };
    let Shape { config, .. } = Shape::llama_1b();
    let config = Config { layers: 3, hidden: 256, heads: 4, kv_heads: 2, context: 512, ..config };
    let shape = Shape { config, feed_forward: 512, vocabulary: support::VOCABULARY, tied: false };
    let model = Llama::random(&shape, &device).expect("memory");
    let [launches, graphs] = both(&model, Mode::BatchInvariant);
    assert_eq!(bits(&graphs), bits(&launches));
    // Here plans of graphs, which are for longer tables, may divide keys otherwise.
    both(&model, Mode::Flat);
}

/// The same from a file, in f32, in which rounding changes no token, and with quantized products.
#[test]
fn answers_of_graphs_in_f32_are_those_of_launches() {
    let Some(device) = gpu("answers_of_graphs_in_f32_are_those_of_launches") else { return };
    for weights in [Weights::F32, Weights::Quantised] {
        let model = support::model_on(&device, "graphs.gguf", weights);
        let [launches, graphs] = both(&model, Mode::BatchInvariant);
        assert_eq!(bits(&graphs), bits(&launches), "{weights:?}");
        if weights == Weights::F32 {
            let [launches, graphs] = both(&model, Mode::Flat);
            assert_eq!(tokens(&graphs), tokens(&launches));
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
