//! The law of shards: keys of a sequence spread over devices, each shard attended to by itself at
//! its own positions, the results merged: the whole.

mod support;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use regard::cpu::Level;
use regard::{DType, KeyLayout, KeyOffset, KeyPositions, SequenceKeys, Shard, Window, state};
use regard_cases::check::Checker;
use regard_cases::{Array, Case, Data, Hide, MaskSpec, OffsetSpec, Spec};

/// The case over the keys of one shard, without sinks. `base` is the position of the whole's first
/// key.
fn shard_of(case: &Case, keys: SequenceKeys, base: i64) -> Case {
    let mut part = case.clone();
    let start = keys.offset as usize;
    let cut = |array: &Array| {
        let [_, _, heads, dim] = *array.shape() else { panic!("one batched sequence") };
        let row = heads * dim;
        let strides = [0, (keys.stride * row) as i64, dim as i64, 1];
        let first = if keys.len == 0 { 0 } else { start * row };
        Array::strided(array.data().clone(), first, &[1, keys.len, heads, dim], &strides).unwrap()
    };
    (part.k, part.v) = (cut(&case.k), cut(&case.v));
    // Columns of a mask are contiguous.
    part.attention.mask = case.attention.mask.as_ref().map(|mask| {
        let [batch, heads, rows, columns] = *mask.shape() else { panic!("4 dimensions") };
        let numbers = mask.numbers().unwrap();
        let kept = numbers.chunks(columns).flat_map(|row| {
            row.iter().skip(start).step_by(keys.stride).take(keys.len).copied().collect::<Vec<_>>()
        });
        let data = Data::from_numbers(mask.dtype(), kept);
        Array::new(data, &[batch, heads, rows, keys.len]).unwrap()
    });
    let offset = KeyOffset::Same(base + keys.offset);
    part.attention.key_positions = Some(KeyPositions { offset, stride: keys.stride });
    part.attention.sinks = None;
    part
}

/// The parameters of a problem.
#[derive(Debug, Clone)]
struct Drawn {
    spec: Spec,
    base: i64,
    layout: KeyLayout,
    level: Level,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let levels: Vec<_> = Level::ALL.into_iter().filter(|level| level.is_available()).collect();
    let lengths = (any::<u64>(), prop_oneof![1..3usize, 3..100usize], 1..300usize);
    let side = || prop::option::of(0..200usize);
    let ranges = (any::<bool>(), side(), side(), prop::option::of(1..90usize));
    let scores = (any::<[bool; 3]>(), prop::option::of(1f32..9.0));
    let places = (
        prop::sample::select(&[0, 5, -7, -250, 1 << 30, i32::MIN as i64][..]),
        0..400i64,
        any::<bool>(),
        prop::sample::select(levels),
        prop::sample::select(&[DType::F32, DType::F16, DType::BF16][..]),
    );
    (lengths, ranges, scores, places).prop_map(|(lengths, ranges, scores, places)| {
        let (seed, q_len, kv_len) = lengths;
        let (causal, left, right, chunk) = ranges;
        let ([alibi, sinks, masked], softcap) = scores;
        let (base, position, contiguous, level, dtype) = places;
        let broadcast = [true, false, false, false];
        let spec = Spec {
            seed,
            causal,
            window: Window { left, right },
            chunk,
            alibi,
            sinks,
            softcap,
            mask: masked.then_some(MaskSpec { dtype: DType::F32, hide: Hide::Infinite, broadcast }),
            offset: OffsetSpec::Same((base + position - 50).max(i64::from(i32::MIN))),
            dtype,
            out_dtype: DType::F32,
            ..Spec::new("shards").lengths(&[(q_len, kv_len)]).key_positions(&[base as i32], 1)
        };
        let layout = if contiguous { KeyLayout::Contiguous } else { KeyLayout::RoundRobin };
        Drawn { spec: spec.legal(), base, layout, level }
    })
}

fn numbers(array: &Array) -> Vec<f32> {
    array.numbers().unwrap().into_iter().map(|x| x as f32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(11),
        ..ProptestConfig::default()
    })]

    /// Merged shards of 1 to 4 devices are the whole, within its tolerance.
    #[test]
    fn merged_shards_equal_the_whole(drawn in drawn()) {
        let Drawn { spec, base, layout, level } = drawn;
        let case = spec.generate();
        let checker = Checker::new(&case, None).unwrap();
        let (q_len, kv_len) = (spec.sequences[0].q_len, spec.sequences[0].kv_len);
        for count in 1..=4 {
            let mut whole: Option<(Vec<f32>, Vec<f32>)> = None;
            for rank in 0..count {
                let keys = Shard { rank, count, layout }.positions(kv_len).unwrap();
                let mut part = shard_of(&case, keys, base);
                // A sink is given to one shard.
                if rank + 1 == count {
                    part.attention.sinks = case.attention.sinks.clone();
                }
                let output = support::run(&part, &support::machine(level, 1 + rank));
                let (out, lse) = (numbers(&output.out), numbers(&output.lse));
                match &mut whole {
                    None => whole = Some((out, lse)),
                    Some((all, all_lse)) => {
                        state::merge_rows(all, all_lse, &out, &lse, spec.value_dim).unwrap();
                    }
                }
            }
            let (out, lse) = whole.expect("one shard or more");
            let out = regard::Tensor::new(&out, [1, q_len, 4, 32]).unwrap();
            let lse = regard::Tensor::new(&lse, [1, q_len, 4]).unwrap();
            let verdict = checker.judge().check(&out, Some(&lse));
            prop_assert!(verdict.is_ok(), "{level}, {count}: {}", verdict.unwrap_err());
        }
    }
}

/// Contiguous keys from position 0 are keys without positions, to the bit.
#[test]
fn positions_from_0_are_the_plain_ones() {
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for rows in [1, 9, 90] {
                let plain = Spec {
                    causal: true,
                    alibi: true,
                    window: Window { left: Some(120), right: None },
                    offset: OffsetSpec::Same(190),
                    ..Spec::new("plain").lengths(&[(rows, 280), (rows, 70)]).dtype(dtype)
                };
                let machine = support::machine(level, 2);
                let bits = |spec: &Spec| {
                    regard_cases::rows::bits(&support::run(&spec.generate(), &machine))
                };
                let expected = bits(&plain);
                let what = format!("{level} {dtype} {rows}");
                assert_eq!(bits(&plain.clone().key_positions(&[0], 1)), expected, "{what}");
                assert_eq!(bits(&plain.key_positions(&[0, 0], 1)), expected, "{what}, a tensor");
            }
        }
    }
}
