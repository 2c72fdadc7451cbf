//! Answers do not depend on how they were computed: with candle's own attention, alone, beside
//! others, in chunks, over shared pages, after a preemption.

mod support;

use candle_core::Device;
use generate::attend::{Composed, Flash, Mode};
use generate::engine::{Engine, Event, Request, RequestId, Settings, alone};
use generate::model::{Llama, Weights};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use support::{CONTEXT, request};

fn settings() -> Settings {
    Settings { blocks: 512, block_size: 8, mode: Mode::BatchInvariant, ..Settings::default() }
}

fn run(engine: &mut Engine, requests: &[Request]) -> Vec<Vec<Event>> {
    let ids: Vec<RequestId> =
        requests.iter().map(|request| engine.submit(request.clone()).expect("sound")).collect();
    let mut answers: BTreeMap<RequestId, Vec<Event>> = BTreeMap::new();
    while !engine.is_idle() {
        for event in engine.step().expect("runs") {
            answers.entry(event.request).or_default().push(event);
        }
    }
    ids.iter().map(|id| answers.remove(id).expect("an answer")).collect()
}

/// Tokens, and margins to the bit.
fn bits(answer: &[Event]) -> Vec<(u32, u32)> {
    answer.iter().map(|event| (event.token, event.margin.to_bits())).collect()
}

fn solo(model: &Llama, request: &Request) -> Vec<(u32, u32)> {
    let mut engine = Engine::new(model, settings()).expect("sound");
    bits(&run(&mut engine, std::slice::from_ref(request))[0])
}

/// The largest difference between the margins of two answers, up to the first token in which they
/// differ, and that token's place.
fn apart(a: &[(u32, f32)], b: &[(u32, f32)]) -> (f32, Option<usize>) {
    let different = a.iter().zip(b).position(|(a, b)| a.0 != b.0);
    let same = different.unwrap_or(a.len().min(b.len()));
    let apart = a[..same].iter().zip(b).map(|(a, b)| (a.1 - b.1).abs()).fold(0.0, f32::max);
    (apart, different)
}

#[test]
fn greedy_answers_are_those_of_candles_own_attention() {
    let model = support::model("candle.gguf", Weights::F32);
    let mut random = StdRng::seed_from_u64(1);
    let requests: Vec<Request> = [1, 2, 7, 8, 9, 40, 130, 257]
        .into_iter()
        .map(|tokens| request(&mut random, &[], tokens, 48))
        .collect();
    let answers = run(&mut Engine::new(&model, settings()).expect("sound"), &requests);
    let layers = model.config().layers;
    let (mut tokens, mut candle, mut ours, mut differences) = (0, 0f32, 0f32, Vec::new());
    for (answer, request) in answers.iter().zip(&requests) {
        let answer: Vec<(u32, f32)> =
            answer.iter().map(|event| (event.token, event.margin)).collect();
        let composed =
            alone(&model, &mut Composed::new(layers, 1, &Device::Cpu).expect("a CPU"), request)
                .expect("runs");
        let flash = alone(&model, &mut Flash::new(layers, CONTEXT), request).expect("runs");
        // The effect of rounding: candle's two attentions against each other.
        candle = candle.max(apart(&composed, &flash).0);
        for other in [&composed, &flash] {
            let (error, different) = apart(&answer, other);
            ours = ours.max(error);
            differences.extend(different.map(|i| answer[i].1 + other[i].1));
            tokens += different.unwrap_or(answer.len());
        }
    }
    println!(
        "{tokens} tokens equal, {} answers differ; margins apart: {ours:.1e}, candle's own \
         {candle:.1e}",
        differences.len()
    );
    // If the best tokens differ, both implementations have the two tokens within rounding.
    // Otherwise regard is no further from candle than candle's two attentions from each other.
    assert!(ours <= 2.0 * candle, "{ours} {candle}");
    assert!(differences.iter().all(|&margins| margins <= 2.0 * candle), "{differences:?} {candle}");
    assert!(tokens > 8 * 48, "{tokens}");
}

#[test]
fn one_request_and_sixteen_give_the_same_bits() {
    let model = support::model("sixteen.gguf", Weights::Quantised);
    let mut random = StdRng::seed_from_u64(2);
    let system: Vec<u32> = (0..37).map(|_| random.random_range(0..256)).collect();
    let requests: Vec<Request> = (0..16)
        .map(|i| request(&mut random, if i % 2 == 0 { &system } else { &[] }, 3 + 11 * i, 40))
        .collect();
    // Small chunks, so that prompts and decodes run together.
    let mut engine =
        Engine::new(&model, Settings { step_tokens: 48, ..settings() }).expect("sound");
    let together = run(&mut engine, &requests);
    let found = engine.statistics();
    assert!(found.mixed_steps > 4 && found.shared_tokens >= 7 * system.len(), "{found:?}");
    for (answer, request) in together.iter().zip(&requests) {
        assert_eq!(bits(answer), solo(&model, request));
    }
    engine.release_retained().expect("sound");
    assert_eq!(engine.free_blocks(), 512);
}

#[test]
fn shared_prefixes_save_pages_and_change_no_answer() {
    let model = support::model("prefixes.gguf", Weights::Quantised);
    let mut random = StdRng::seed_from_u64(3);
    let system: Vec<u32> = (0..200).map(|_| random.random_range(0..256)).collect();
    let requests: Vec<Request> =
        (0..12).map(|i| request(&mut random, &system, 1 + i, 20)).collect();
    let [shared, own] = [true, false].map(|share_prefixes| {
        let mut engine =
            Engine::new(&model, Settings { share_prefixes, ..settings() }).expect("sound");
        let answers: Vec<_> =
            run(&mut engine, &requests).iter().map(|answer| bits(answer)).collect();
        (answers, engine.statistics())
    });
    assert_eq!(shared.0, own.0);
    // 25 pages hold the common beginning: once, or twelve times.
    assert!(
        shared.1.peak_blocks + 11 * 24 <= own.1.peak_blocks,
        "{} {}",
        shared.1.peak_blocks,
        own.1.peak_blocks
    );
    assert!(shared.1.prompt_rows + 11 * system.len() <= own.1.prompt_rows);
}

/// Reading shared pages together rounds otherwise than reading them alone, and no more than
/// candle's two attentions differ.
#[test]
fn prefix_groups_change_no_answer() {
    let model = support::model("groups.gguf", Weights::F32);
    let mut random = StdRng::seed_from_u64(5);
    let system: Vec<u32> = (0..200).map(|_| random.random_range(0..256)).collect();
    let mut requests: Vec<Request> =
        (0..12).map(|i| request(&mut random, &system, 1 + i, 40)).collect();
    // Some that share nothing.
    requests.extend((0..3).map(|i| request(&mut random, &[], 30 + i, 40)));
    let [grouped, flat] = [Mode::PrefixGroups, Mode::Flat].map(|mode| {
        let settings = Settings { mode, ..settings() };
        let mut engine = Engine::new(&model, settings).expect("sound");
        let answers: Vec<Vec<(u32, f32)>> = run(&mut engine, &requests)
            .iter()
            .map(|answer| answer.iter().map(|event| (event.token, event.margin)).collect())
            .collect();
        (answers, engine.statistics())
    });
    let layers = model.config().layers;
    let (mut tokens, mut ours, mut candle, mut differences) = (0, 0f32, 0f32, Vec::new());
    for ((grouped, flat), request) in grouped.0.iter().zip(&flat.0).zip(&requests) {
        let (error, different) = apart(grouped, flat);
        ours = ours.max(error);
        differences.extend(different.map(|i| grouped[i].1 + flat[i].1));
        tokens += different.unwrap_or(grouped.len());
        let composed =
            alone(&model, &mut Composed::new(layers, 1, &Device::Cpu).expect("a CPU"), request)
                .expect("runs");
        let flash = alone(&model, &mut Flash::new(layers, CONTEXT), request).expect("runs");
        candle = candle.max(apart(&composed, &flash).0);
    }
    println!("{tokens} tokens equal; margins apart: {ours:.1e}, candle's own {candle:.1e}");
    assert!(ours <= 2.0 * candle, "{ours} {candle}");
    assert!(differences.iter().all(|&margins| margins <= 2.0 * candle), "{differences:?} {candle}");
    assert!(tokens > 15 * 20, "{tokens}");
    assert!(grouped.1.grouped_steps >= 39 && flat.1.grouped_steps == 0, "{:?}", grouped.1);
}

#[test]
fn bad_requests_are_refused_and_others_continue() {
    let model = support::model("refused.gguf", Weights::Quantised);
    let settings = Settings { blocks: 4, ..settings() };
    let mut engine = Engine::new(&model, settings).expect("sound");
    let refused = |engine: &mut Engine, request: Request| {
        engine.submit(request).expect_err("refused").to_string()
    };
    let of = |tokens: usize, max_tokens: usize| Request {
        prompt: vec![1; tokens],
        max_tokens,
        stop: vec![],
    };
    assert!(refused(&mut engine, of(0, 1)).contains("at least one"));
    assert!(refused(&mut engine, of(1, 0)).contains("at least one"));
    assert!(refused(&mut engine, of(20, 14)).contains("the cache holds 32"));
    assert_eq!(run(&mut engine, &[of(20, 13)])[0].len(), 13);
    let context = Engine::new(&model, Settings { blocks: 1000, ..settings })
        .expect("sound")
        .submit(of(500, 14));
    assert!(context.expect_err("refused").to_string().contains("the model 512"));
    assert!(Engine::new(&model, Settings { step_tokens: 3, ..settings }).is_err());
    // A request that is over, or never was, cannot be cancelled.
    let id = engine.submit(of(3, 2)).expect("sound");
    assert!(engine.cancel(id).expect("sound"));
    assert!(!engine.cancel(id).expect("sound") && engine.is_idle());
}
