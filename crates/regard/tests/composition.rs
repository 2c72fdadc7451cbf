//! Everything composed at random, thousands of small cases; a failure shrinks, and leaves a case
//! file for `regard check`.
//!
//! The cases are the same on every run. `PROPTEST_RNG_SEED=n` draws others, `PROPTEST_CASES=n` more
//! of them.

mod support;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, RngSeed, TestRunner};
use regard::{DType, Error, Window};
use regard_cases::check::{self, Checker, Failure};
use regard_cases::random::{self, Cpu, Device, Profile};
use regard_cases::{Hide, Keys, KvLayout, Layout, MaskSpec, OffsetSpec, Spec, file};

const CASES: u32 = 4000;

fn one_of<T: Clone + std::fmt::Debug + 'static>(these: &'static [T]) -> impl Strategy<Value = T> {
    prop::sample::select(these)
}

/// Lengths: mostly short, now and then past a tile.
fn lengths() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let q_len = prop_oneof![4 => 0..6usize, 2 => 6..40usize, 1 => 60..70usize];
    let kv_len =
        prop_oneof![3 => 0..20usize, 3 => 20..70usize, 2 => 120..140usize, 1 => 250..600usize];
    prop::collection::vec((q_len, kv_len), 1..5)
}

fn keys() -> impl Strategy<Value = Keys> {
    prop_oneof![
        (0..4usize).prop_map(|slack| Keys::Batched { slack }),
        (0..4usize).prop_map(|slack| Keys::Ragged { slack }),
        (one_of(&[1usize, 2, 7, 16, 33, 64, 100]), any::<bool>())
            .prop_map(|(block_size, interleaved)| Keys::Paged { block_size, interleaved }),
    ]
}

fn offset() -> impl Strategy<Value = OffsetSpec> {
    prop_oneof![
        2 => Just(OffsetSpec::BottomRight),
        1 => (-20..60i64).prop_map(OffsetSpec::Same),
        1 => prop::collection::vec(-20..60i32, 1..4).prop_map(OffsetSpec::PerSequence),
    ]
}

fn mask() -> impl Strategy<Value = MaskSpec> {
    let dtype = one_of(&[DType::Bool, DType::F32, DType::F16, DType::BF16]);
    let hide = one_of(&[Hide::Nothing, Hide::Large, Hide::Infinite]);
    (dtype, hide, any::<[bool; 4]>()).prop_map(|(dtype, hide, broadcast)| MaskSpec {
        dtype,
        hide,
        broadcast,
    })
}

fn window() -> impl Strategy<Value = Window> {
    let side = || prop::option::of(prop_oneof![3 => 0..10usize, 1 => 10..100usize]);
    (side(), side()).prop_map(|(left, right)| Window { left, right })
}

fn spec() -> impl Strategy<Value = Spec> {
    let dim = || prop_oneof![3 => 1..20usize, 1 => one_of(&[24usize, 40, 64, 80, 128, 130])];
    let shape = (1..4usize, 1..4usize, dim(), dim(), any::<bool>(), lengths());
    let storage = (
        any::<u64>(),
        one_of(&[DType::F32, DType::F16, DType::BF16]),
        any::<bool>(),
        any::<bool>(),
        keys(),
        one_of(&[Layout::Bshd, Layout::Bhsd]),
        one_of(&[KvLayout::Nhd, KvLayout::Hnd]),
        0..4usize,
    );
    let variant = (
        prop::option::weighted(0.2, 0.01f32..1.0),
        any::<bool>(),
        offset(),
        prop_oneof![Just(Window::default()), window()],
        prop::option::weighted(0.3, 0.5f32..20.0),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.3),
        prop::option::weighted(0.3, mask()),
        prop::bool::weighted(0.15),
        prop::bool::weighted(0.3),
    );
    (shape, storage, variant).prop_map(|(shape, storage, variant)| {
        let (kv_heads, group, head_dim, value_dim, same_dim, lengths) = shape;
        let (seed, dtype, to_f32, ragged_queries, keys, layout, kv_layout, padding) = storage;
        let (scale, causal, offset, window, softcap, alibi, sinks, mask, tree, batch_invariant) =
            variant;
        let spec = Spec {
            seed,
            page_seed: seed,
            dtype,
            out_dtype: if to_f32 { DType::F32 } else { dtype },
            ragged_queries,
            keys,
            layout,
            kv_layout,
            padding,
            scale,
            causal,
            offset,
            window,
            softcap,
            alibi,
            sinks,
            mask,
            tree,
            batch_invariant,
            ..Spec::new("composition")
        };
        let value_dim = if same_dim { head_dim } else { value_dim };
        spec.lengths(&lengths).heads(kv_heads * group, kv_heads).dims(head_dim, value_dim).legal()
    })
}

#[test]
fn anything_composes_with_anything() {
    let mut config = ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 3000,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = CASES;
    }
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(2026);
    }
    config.rng_algorithm = RngAlgorithm::ChaCha;
    let machines = support::machines();
    let check = |spec: Spec| -> Result<(), String> {
        let case = spec.generate();
        let all = || -> Result<(), Failure> {
            let checker = Checker::new(&case, support::limits::judged_rows())?;
            for machine in &machines {
                checker.check(&case.run(support::on(machine))?)?;
            }
            Ok(())
        };
        all().map_err(|failure| {
            format!("{failure}\nreplay: regard check {}", support::leave_behind(&case).display())
        })
    };
    let result =
        TestRunner::new(config).run(&spec(), |spec| check(spec).map_err(TestCaseError::fail));
    if let Err(failure) = result {
        panic!("{failure}");
    }
}

/// Wider than that, and with another seed every time: `regard check --random` as a test, at every
/// SIMD level, between guard pages.
#[test]
fn random_problems_of_a_new_seed() {
    let count =
        std::env::var("PROPTEST_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(500);
    let make = || -> Result<Box<dyn Device>, Error> { Ok(Box::new(Cpu::all_levels()?)) };
    let summary = random::test("on the CPU", count, Profile::All, &make);
    let summary = summary.unwrap_or_else(|failures| panic!("{failures}"));
    assert_eq!(summary.passed, count, "{:?}", summary.refused);
}

/// Tests the report of a failure: the case file that it writes replays, its output type included.
#[test]
fn failure_record_replays() {
    for (layout, dtype) in
        [(Layout::Bshd, DType::F16), (Layout::Bhsd, DType::F16), (Layout::Bhsd, DType::F32)]
    {
        let keys = Keys::Paged { block_size: 7, interleaved: true };
        let name = format!("left/behind {layout:?} {dtype}");
        let spec = Spec { layout, keys, padding: 3, causal: true, ..Spec::new(name).dtype(dtype) };
        let spec = Spec { out_dtype: DType::F32, ..spec.lengths(&[(3, 20), (3, 9)]) };
        let path = support::leave_behind(&spec.generate());
        let case = file::read(&path).unwrap();
        assert_eq!(case.out_dtype(), DType::F32);
        check::check(&case, support::on(&support::machines()[0])).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
