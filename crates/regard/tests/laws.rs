//! Laws that hold for any numbers: changes that must not change a result do not, to the bit if the
//! contract requires it.

#[path = "support/dequantized.rs"]
mod dequantized;
mod support;

use dequantized::dequantized;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use regard::cpu::Level;
use regard::{DType, Machine, Plan, Problem, QueryOffset, Tensor, Window, state};
use regard_cases::check::Checker;
use regard_cases::random::with_larger_bounds;
use regard_cases::rows::{Rows, bits, difference, rows as rows_of};
use regard_cases::{
    Array, CacheSpec, Case, Granularity, Hide, Keys, KvLayout, Layout, MaskSpec, OffsetSpec,
    Scales, SequenceSpec, Spec, list,
};

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|level| level.is_available())
}

fn rows(spec: &Spec, machine: &Machine) -> Rows {
    let case = spec.clone().generate();
    rows_of(spec, &case, &support::run(&case, machine))
}

/// Every row of `some` is in `all`, with the same bits.
fn assert_rows_of(some: &Rows, all: &Rows, what: &str) {
    if let Some(difference) = difference(some, all) {
        panic!("{what}: {difference}");
    }
}

#[test]
fn batch_invariant_bits_depend_on_nothing_around_them() {
    let sequence = |id, q_len, kv_len| SequenceSpec { id, q_len, kv_len };
    let together =
        [sequence(1, 70, 70), sequence(2, 3, 2300), sequence(3, 1, 1030), sequence(4, 17, 130)];
    let cache = |dtype| CacheSpec::new(dtype, Granularity::Token, Scales::Fitted);
    let stored = [
        (DType::F32, CacheSpec::default()),
        (DType::F16, CacheSpec::default()),
        (DType::BF16, CacheSpec::default()),
        (DType::BF16, cache(DType::E4M3)),
        (DType::F16, cache(DType::Q8_0)),
        (DType::F32, CacheSpec { v: Some(DType::Q4_0), ..cache(DType::I8) }),
        (DType::BF16, CacheSpec { v: Some(DType::F16), ..cache(DType::Q4_0) }),
    ];
    for (dtype, cache) in stored {
        for level in levels() {
            let machine = support::machine(level, 1);
            let base = Spec {
                ragged_queries: true,
                keys: Keys::Ragged { slack: 0 },
                ..Spec::invariant().dtype(dtype).cache(cache)
            };
            let base = Spec { sequences: together.to_vec(), ..base }.legal();
            let dtype = format!("{dtype} over {cache:?}");
            let all = rows(&base, &machine);
            // Any number of threads.
            for threads in [2, 3, 16] {
                let found = rows(&base, &support::machine(level, threads));
                assert_rows_of(&found, &all, &format!("{level}, {dtype}, {threads} threads"));
            }
            // Alone, in batches of one, and among others in another order.
            for one in together {
                let alone = Spec { sequences: vec![one], ragged_queries: false, ..base.clone() };
                let alone = Spec { keys: Keys::Batched { slack: 3 }, ..alone };
                let what = format!("{level}, {dtype}, sequence {} alone", one.id);
                assert_rows_of(&rows(&alone, &support::machine(level, 3)), &all, &what);
            }
            let others =
                vec![together[3], sequence(9, 100, 4000), together[1], together[0], together[2]];
            let found =
                rows(&Spec { sequences: others, ..base.clone() }, &support::machine(level, 2));
            assert_rows_of(&all, &found, &format!("{level}, {dtype}, among others"));
            // Any page layout.
            for (block_size, interleaved, kv_layout) in
                [(1, false, KvLayout::Nhd), (16, true, KvLayout::Hnd), (100, false, KvLayout::Hnd)]
            {
                let paged = Spec {
                    keys: Keys::Paged { block_size, interleaved },
                    kv_layout,
                    ..base.clone()
                }
                .legal();
                let found = rows(&paged, &support::machine(level, 3));
                assert_rows_of(&found, &all, &format!("{level}, {dtype}, pages of {block_size}"));
            }
            // Any strides.
            let padded = Spec { padding: 5, layout: Layout::Bhsd, ..base.clone() };
            assert_rows_of(&rows(&padded, &machine), &all, &format!("{level}, {dtype}, padded"));
        }
    }
}

#[test]
fn appending_and_chunking_equal_prefill() {
    const TOKENS: usize = 150;
    for level in levels() {
        for (dtype, left) in
            [(DType::F32, None), (DType::BF16, None), (DType::F32, Some(34)), (DType::F16, Some(2))]
        {
            let spec = |q_len, kv_len| {
                let keys = Keys::Paged { block_size: 16, interleaved: false };
                let window = Window { left, right: None };
                // Outputs in f32 show every bit of a sum.
                let invariant = Spec { out_dtype: DType::F32, ..Spec::invariant().dtype(dtype) };
                Spec { keys, window, ..invariant.lengths(&[(q_len, kv_len)]) }
            };
            let batched = Spec { keys: Keys::Batched { slack: 0 }, ..spec(TOKENS, TOKENS) };
            let prefill = rows(&batched, &support::machine(level, 2));
            assert_eq!(prefill.len(), TOKENS * 6);
            for kv_len in 1..=TOKENS {
                let found = rows(&spec(1, kv_len), &support::machine(level, 1));
                assert_rows_of(&found, &prefill, &format!("{level}, {dtype}, token by token"));
            }
            for chunk in [7, 64, 100] {
                for start in (0..TOKENS).step_by(chunk) {
                    let end = TOKENS.min(start + chunk);
                    let found = rows(&spec(end - start, end), &support::machine(level, 3));
                    assert_rows_of(
                        &found,
                        &prefill,
                        &format!("{level}, {dtype}, chunks of {chunk}"),
                    );
                }
            }
        }
    }
}

/// Without the mode bits may differ, numbers may not: rows made one at a time pass for the rows of
/// the prefill.
#[test]
fn appending_equals_prefill_within_rounding_in_every_mode() {
    for level in levels() {
        let spec = |q_len, kv_len| Spec {
            batch_invariant: false,
            ..Spec::invariant().lengths(&[(q_len, kv_len)])
        };
        let case = spec(90, 90).generate();
        let checker = Checker::new(&case, None).unwrap();
        let mut appended = support::run(&case, &support::machine(level, 1));
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for kv_len in 1..=90 {
            let output = support::run(&spec(1, kv_len).generate(), &support::machine(level, 2));
            out.extend(output.out.numbers().unwrap().iter().map(|&x| x as f32));
            lse.extend(output.lse.numbers().unwrap().iter().map(|&x| x as f32));
        }
        appended.out = Array::new(out, appended.out.shape()).unwrap();
        appended.lse = Array::new(lse, appended.lse.shape()).unwrap();
        checker.check(&appended).unwrap_or_else(|failure| panic!("{level}: {failure}"));
    }
}

#[test]
fn permuting_pages_changes_no_bit() {
    for level in levels() {
        for (lengths, block_size) in
            [(vec![(1, 900), (1, 70), (1, 0)], 16), (vec![(9, 300)], 7), (vec![(2, 2500)], 64)]
        {
            for batch_invariant in [false, true] {
                let spec = |page_seed| Spec {
                    page_seed,
                    keys: Keys::Paged { block_size, interleaved: true },
                    causal: true,
                    batch_invariant,
                    ..Spec::new("pages").lengths(&lengths)
                };
                let machine = support::machine(level, 2);
                let first = spec(1).generate();
                let expected = bits(&support::run(&first, &machine));
                for page_seed in 2..6 {
                    let case = spec(page_seed).generate();
                    let table = |case: &Case| {
                        case.attention.block_table.as_ref().unwrap().numbers().unwrap()
                    };
                    assert_ne!(table(&case), table(&first));
                    assert_eq!(
                        bits(&support::run(&case, &machine)),
                        expected,
                        "{level}, {lengths:?}"
                    );
                }
            }
        }
    }
}

/// Codes times a power of two are numbers of every float type, and both products and sums commute
/// with it. Blocks are dequantized exactly, to f32.
#[test]
fn codes_with_scales_of_powers_of_two_equal_their_numbers() {
    let powers = |dtype, granularity| CacheSpec::new(dtype, granularity, Scales::PowerOfTwo);
    let caches = [
        (DType::F32, powers(DType::E4M3, Granularity::Token)),
        (DType::F32, powers(DType::Q8_0, Granularity::Token)),
        (DType::F32, powers(DType::Q4_0, Granularity::Token)),
        (DType::F16, powers(DType::I8, Granularity::Token)),
        (DType::F16, powers(DType::E4M3, Granularity::Head)),
        (DType::BF16, powers(DType::E4M3, Granularity::Token)),
        (DType::BF16, powers(DType::E5M2, Granularity::Page)),
        (DType::BF16, powers(DType::I8, Granularity::Tensor)),
    ];
    for machine in support::machines() {
        for (dtype, cache) in caches {
            for (rows, batch_invariant) in [(1, false), (1, true), (7, false), (70, false)] {
                let spec = Spec {
                    causal: true,
                    softcap: (rows == 7).then_some(20.0),
                    batch_invariant,
                    ..Spec::new("powers").lengths(&[(rows, 300)]).dims(64, 96).dtype(dtype)
                };
                let case = spec.cache(cache).legal().generate();
                let found = support::run(&case, &machine);
                let expected = support::run(&dequantized(&case, dtype), &machine);
                let what = format!("{dtype} over {cache:?}, {rows} rows on {machine}");
                assert!(bits(&found) == bits(&expected), "{what}");
            }
        }
    }
}

#[test]
fn poison_never_shows() {
    let machines: Vec<_> = levels().map(|level| support::machine(level, 2)).collect();
    let specs: Vec<_> = list::list().chain(list::caches()).collect();
    support::for_all(&specs, |spec| {
        let poisoned = Spec { poison: true, ..spec.clone() }.generate();
        let clean = Spec { poison: false, ..spec.clone() }.generate();
        for machine in &machines {
            if bits(&support::run(&poisoned, machine)) != bits(&support::run(&clean, machine)) {
                return Err(format!("{} on {machine} depends on what no row can see", spec.name));
            }
        }
        Ok(())
    });
}

#[test]
fn empty_rows_are_zero_and_their_lse_is_minus_infinity_or_the_sink() {
    for machine in support::machines() {
        for sinks in [false, true] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                // Rows 0 and 1 stand before the first key, the second sequence has none.
                let spec = Spec { causal: true, sinks, ..Spec::new("empty").dtype(dtype) };
                let offset = OffsetSpec::PerSequence(vec![-2, 0]);
                let spec = Spec { offset, ..spec.lengths(&[(4, 60), (4, 0)]) };
                let case = spec.generate();
                let output = support::run(&case, &machine);
                let sink = |head: usize| {
                    case.attention
                        .sinks
                        .as_ref()
                        .map_or(f64::NEG_INFINITY, |s| s.numbers().unwrap()[head])
                };
                let (out, lse) = (output.out.view().unwrap(), output.lse.view().unwrap());
                for (sequence, row) in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)] {
                    for head in 0..spec.query_heads {
                        let mut numbers = vec![f64::NAN; spec.value_dim];
                        out.read_row(&[sequence, row, head], &mut numbers);
                        assert!(numbers.iter().all(|x| x.to_bits() == 0), "{machine}: {numbers:?}");
                        let (found, sink) = (lse.at(&[sequence, row, head]), sink(head));
                        let close = (found - sink).abs() <= f64::from(f32::EPSILON) * sink.abs();
                        assert!(found == sink || close, "{machine}: {found} for {sink}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_plan_for_more_serves_less() {
    let machines: Vec<_> =
        levels().flat_map(|level| [1, 3, 16].map(|n| support::machine(level, n))).collect();
    // Bounds change the split of small cases as they change the split of large ones.
    let specs = list::within(support::limits::most_work(2_000_000));
    let specs: Vec<_> = specs.filter(|spec| !spec.sequences.is_empty()).collect();
    support::for_all(&specs, |spec| {
        let case = spec.generate();
        let checker = Checker::new(&case, None).map_err(|failure| failure.to_string())?;
        for machine in &machines {
            let output = case.run(|inputs, outputs| {
                let larger = with_larger_bounds(Problem::from_operands(inputs, outputs)?);
                let plan = Plan::new(&larger, machine)?;
                plan.run(inputs, outputs, &mut vec![0xff; plan.workspace_bytes()])
            });
            let output = output.map_err(|error| format!("{} on {machine}: {error}", spec.name))?;
            checker
                .check(&output)
                .map_err(|failure| format!("{} on {machine}: {failure}", spec.name))?;
            // Decode is split for the lengths in use, not for the plan's bounds.
            let decodes = spec.sequences.iter().all(|sequence| sequence.q_len <= 1);
            let same_bits = spec.batch_invariant || decodes;
            if same_bits && bits(&output) != bits(&support::run(&case, machine)) {
                return Err(format!("{} on {machine}: other bits under a larger plan", spec.name));
            }
        }
        Ok(())
    });
}

/// The case over keys `start..end` alone, without sinks. Positions move along, so that distances
/// stay.
fn part(case: &Case, spec: &Spec, start: usize, end: usize) -> Case {
    let mut part = case.clone();
    let cut = |array: &Array| {
        let [_, _, heads, dim] = *array.shape() else { panic!("one batched sequence") };
        let row = heads * dim;
        let strides = [0, row as i64, dim as i64, 1];
        Array::strided(array.data().clone(), start * row, &[1, end - start, heads, dim], &strides)
            .unwrap()
    };
    (part.k, part.v) = (cut(&case.k), cut(&case.v));
    part.attention.q_offset = QueryOffset::Same(spec.first_position(0) - start as i64);
    part.attention.mask = case.attention.mask.as_ref().map(|mask| {
        let [batch, heads, rows, keys] = *mask.shape() else { panic!("a mask of 4 dimensions") };
        let strides = [heads * rows * keys, rows * keys, keys, 1].map(|stride| stride as i64);
        Array::strided(mask.data().clone(), start, &[batch, heads, rows, end - start], &strides)
            .unwrap()
    });
    part.attention.sinks = None;
    part
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..ProptestConfig::default()
    })]

    /// Keys cut anywhere, each part attended to by itself, the parts merged: the whole, within its
    /// tolerance.
    #[test]
    fn splitting_keys_anywhere_and_merging_changes_nothing(
        (seed, q_len, kv_len) in (any::<u64>(), 1..9usize, 1..300usize),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 1..5),
        (causal, alibi, sinks, masked) in any::<(bool, bool, bool, bool)>(),
        (softcap, left) in (prop::option::of(1f32..9.0), prop::option::of(0..200usize)),
        dtype in prop::sample::select(&[DType::F32, DType::F16, DType::BF16][..]),
        offset in prop::option::of(-5..300i64),
    ) {
        let broadcast = [true, false, false, false];
        let mask = MaskSpec { dtype: DType::F32, hide: Hide::Infinite, broadcast };
        let spec = Spec {
            seed, causal, alibi, sinks, softcap, dtype, out_dtype: DType::F32,
            window: Window { left, right: None },
            mask: masked.then_some(mask),
            offset: offset.map_or(OffsetSpec::BottomRight, OffsetSpec::Same),
            ..Spec::new("split").lengths(&[(q_len, kv_len)])
        };
        let case = spec.generate();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(kv_len + 1)).collect();
        cuts.extend([0, kv_len]);
        cuts.sort_unstable();
        let checker = Checker::new(&case, None).unwrap();
        for level in levels() {
            let machine = support::machine(level, 1);
            let mut whole: Option<(Vec<f32>, Vec<f32>)> = None;
            for ends in cuts.windows(2) {
                let mut part = part(&case, &spec, ends[0], ends[1]);
                // A sink joins once.
                if whole.is_none() {
                    part.attention.sinks = case.attention.sinks.clone();
                }
                let output = support::run(&part, &machine);
                let numbers = |array: &Array| -> Vec<f32> {
                    array.numbers().unwrap().into_iter().map(|x| x as f32).collect()
                };
                let (out, lse) = (numbers(&output.out), numbers(&output.lse));
                match &mut whole {
                    None => whole = Some((out, lse)),
                    Some(whole) => {
                        let dim = spec.value_dim;
                        state::merge_rows(&mut whole.0, &mut whole.1, &out, &lse, dim).unwrap();
                    }
                }
            }
            let (out, lse) = whole.unwrap();
            let out = Tensor::new(&out, [1, q_len, 4, 32]).unwrap();
            let lse = Tensor::new(&lse, [1, q_len, 4]).unwrap();
            let verdict = checker.judge().check(&out, Some(&lse));
            prop_assert!(verdict.is_ok(), "{level}: {}", verdict.unwrap_err());
        }
    }
}
