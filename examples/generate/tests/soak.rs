//! 500 requests with random lengths, cancellations and far too small a cache: every page comes
//! back, every answer is, bit by bit, the answer that the request alone would have got.

mod support;

use generate::attend::Mode;
use generate::cache::CacheType;
use generate::engine::{Engine, Event, Request, RequestId, Settings};
use generate::model::{Llama, Weights};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;
use support::request;

const REQUESTS: usize = 500;
const BLOCKS: usize = 40;

struct Served {
    request: Request,
    events: Vec<Event>,
    cancelled: bool,
}

fn solo(model: &Llama, cache: CacheType, request: &Request) -> Vec<(u32, u32)> {
    let settings = Settings {
        blocks: 64,
        block_size: 8,
        cache,
        mode: Mode::BatchInvariant,
        ..Settings::default()
    };
    let mut engine = Engine::new(model, settings).expect("sound");
    engine.submit(request.clone()).expect("sound");
    let mut answer = Vec::new();
    while !engine.is_idle() {
        answer.extend(
            engine.step().expect("runs").iter().map(|event| (event.token, event.margin.to_bits())),
        );
    }
    answer
}

#[test]
fn five_hundred_requests_in_a_cache_for_a_few() {
    soak("soak.gguf", CacheType::F32);
}

#[test]
fn five_hundred_requests_in_a_cache_of_8_bits() {
    soak("soak-i8.gguf", CacheType::I8);
}

fn soak(file: &str, cache: CacheType) {
    let model = support::model(file, Weights::Quantised);
    let mut random = StdRng::seed_from_u64(4);
    let settings = Settings {
        blocks: BLOCKS,
        block_size: 8,
        cache,
        requests: 12,
        step_tokens: 40,
        mode: Mode::BatchInvariant,
        share_prefixes: true,
        graphs: false,
    };
    let mut engine = Engine::new(&model, settings).expect("sound");
    let systems: Vec<Vec<u32>> =
        [0, 21, 64].map(|n| (0..n).map(|_| random.random_range(0..256)).collect()).to_vec();
    let mut served: BTreeMap<RequestId, Served> = BTreeMap::new();
    let mut alive: Vec<RequestId> = Vec::new();
    while served.len() < REQUESTS || !engine.is_idle() {
        // They arrive in bursts, faster than they are served.
        if served.len() < REQUESTS && alive.len() < 40 {
            for _ in 0..random.random_range(0..6) {
                let system = &systems[random.random_range(0..systems.len())];
                let (tokens, most) = (random.random_range(1..90), random.random_range(1..70));
                let request = request(&mut random, system, tokens, most);
                let id = engine.submit(request.clone()).expect("fits alone");
                served.insert(id, Served { request, events: Vec::new(), cancelled: false });
                alive.push(id);
            }
        }
        if !alive.is_empty() && random.random_bool(0.03) {
            let id = alive.swap_remove(random.random_range(0..alive.len()));
            assert!(engine.cancel(id).expect("sound"));
            served.get_mut(&id).expect("submitted").cancelled = true;
        }
        for event in engine.step().expect("runs") {
            let entry = served.get_mut(&event.request).expect("submitted");
            assert!(!entry.cancelled, "an answer after the cancellation");
            entry.events.push(event);
            if event.last {
                alive.retain(|id| *id != event.request);
            }
        }
    }

    engine.release_retained().expect("sound");
    assert_eq!(engine.free_blocks(), BLOCKS, "every page came back");
    let found = engine.statistics();
    let (mut cancelled, mut complete) = (0, 0);
    for Served { request, events, cancelled: was_cancelled } in served.into_values() {
        let answer: Vec<_> =
            events.iter().map(|event| (event.token, event.margin.to_bits())).collect();
        let expected = solo(&model, cache, &request);
        if was_cancelled {
            cancelled += 1;
            assert!(expected.starts_with(&answer), "what was answered before the cancellation");
        } else {
            complete += 1;
            assert_eq!(answer, expected);
        }
    }
    println!("{complete} complete, {cancelled} cancelled; {found:?}");
    assert!(
        found.preemptions > 50 && cancelled > 20 && found.shared_tokens > 5000,
        "{cancelled} {found:?}"
    );
    assert!(found.peak_blocks > BLOCKS - 4 && found.mixed_steps > 100, "{found:?}");
}
