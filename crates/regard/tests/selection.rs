//! Selection: rows that attend to lists of keys.

mod support;

use regard::{
    Attention, DType, Error, KeyLists, KeyOffset, KeyPositions, ListEntries, Machine, Plan,
    Problem, QueryOffset,
};
use regard_cases::check::Checker;
use regard_cases::rows::{Rows, bits, difference, rows as rows_of};
use regard_cases::{
    Array, CacheSpec, Case, Entries, Granularity, Keys, ListSpec, Scales, Spec, list,
};

/// The cases of selection on every SIMD level and kernel of this machine.
#[test]
fn every_selection_on_every_level() {
    let machines = support::machines();
    let specs: Vec<_> = list::selection().collect();
    support::for_all(&specs, |spec| {
        let case = spec.generate();
        let checker =
            Checker::new(&case, None).map_err(|failure| format!("{}: {failure}", spec.name))?;
        let clean = Spec { poison: false, ..spec.clone() }.generate();
        for machine in &machines {
            let result = case.run(support::on(machine)).map_err(Into::into);
            if let Ok(output) = &result
                && bits(output) != bits(&support::run(&clean, machine))
            {
                return Err(format!("{} on {machine} depends on unlisted keys", spec.name));
            }
            result.and_then(|output| checker.check(&output)).map_err(|failure| {
                let path = support::leave_behind(&case);
                let replay = format!("replay: regard check {}", path.display());
                format!("{} on {machine}: {failure}\n    {replay}", spec.name)
            })?;
        }
        Ok(())
    });
}

fn rows(spec: &Spec, machine: &Machine) -> Rows {
    let case = spec.clone().generate();
    rows_of(spec, &case, &support::run(&case, machine))
}

/// A list of all keys in order gives the bits of dense attention in batch-invariant mode.
#[test]
fn a_full_list_equals_dense_attention() {
    let stored = [
        CacheSpec::default(),
        CacheSpec::new(DType::E4M3, Granularity::Token, Scales::Fitted),
        CacheSpec::new(DType::Q8_0, Granularity::Head, Scales::Fitted),
    ];
    let storage = [
        Keys::Batched { slack: 3 },
        Keys::Ragged { slack: 0 },
        Keys::Paged { block_size: 16, interleaved: false },
    ];
    for (i, machine) in support::machines().into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
            for (k, lengths) in
                [vec![(1, 2300), (1, 130)], vec![(5, 5), (5, 300)]].into_iter().enumerate()
            {
                let longest = lengths.iter().map(|&(_, keys)| keys).max().unwrap();
                let heads = [(6, 2), (40, 2), (70, 1)][(i + j + k) % 3];
                let dense = Spec { keys: storage[(i + j) % 3], ..Spec::invariant() }
                    .dtype(dtype)
                    .lengths(&lengths)
                    .heads(heads.0, heads.1)
                    .dims(64, 32)
                    .cache(stored[(i + k) % 3])
                    .legal();
                let expected = rows(&dense, &machine);
                for (per_head, len) in [(false, longest), (true, longest), (false, longest + 200)] {
                    let lists = ListSpec { per_head, ..ListSpec::new(len, Entries::All) };
                    let found = rows(&dense.clone().lists(lists).legal(), &machine);
                    if let Some(difference) = difference(&found, &expected) {
                        panic!("{machine}, {dtype}, {heads:?}, {lengths:?}: {difference}");
                    }
                }
            }
        }
    }
}

/// A row of a list has the same bits alone, among others, with other threads and in other pages.
#[test]
fn bits_of_listed_rows_depend_on_nothing_around_them() {
    let lists = ListSpec { per_head: true, counts: true, ..ListSpec::new(1100, Entries::Any) };
    for level in regard::cpu::Level::ALL.into_iter().filter(|level| level.is_available()) {
        for dtype in [DType::F32, DType::BF16] {
            let spec = Spec { ragged_queries: true, ..Spec::invariant() }
                .dtype(dtype)
                .heads(4, 2)
                .lengths(&[(3, 70), (2, 2300), (1, 1030)])
                .lists(lists)
                .legal();
            let all = rows(&spec, &support::machine(level, 1));
            for (threads, block_size) in [(2, 1), (3, 16), (16, 100)] {
                let keys = Keys::Paged { block_size, interleaved: true };
                let paged = Spec { keys, ..spec.clone() }.legal();
                let found = rows(&paged, &support::machine(level, threads));
                assert_eq!(difference(&found, &all), None, "{level}, {dtype}, {block_size}");
            }
            for index in 0..3 {
                let alone = Spec { sequences: vec![spec.sequences[index]], ..spec.clone() };
                let found = rows(&alone, &support::machine(level, 2));
                assert_eq!(difference(&found, &all), None, "{level}, {dtype}, {index} alone");
            }
        }
    }
}

/// Mistakes with lists are larger than the tolerance.
#[test]
fn wrong_lists_do_not_pass() {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let base = Spec { poison: false, causal: true, ..Spec::new("mistakes").lengths(&[(6, 70)]) };
    let lists = ListSpec { counts: true, per_head: true, ..ListSpec::new(30, Entries::Any) };
    let case = base.lists(lists).generate();
    let checker = Checker::new(&case, None).unwrap();
    checker.check(&support::run(&case, &machine)).unwrap();
    let change = |entry: fn(usize, i32) -> i32| {
        let mut wrong = case.clone();
        let indices = case.attention.key_indices.as_ref().unwrap();
        let numbers = indices.numbers().unwrap();
        let changed = numbers.into_iter().enumerate().map(|(i, x)| entry(i, x as i32));
        let changed: Vec<i32> = changed.collect();
        wrong.attention.key_indices = Some(Array::new(changed, indices.shape()).unwrap());
        wrong
    };
    let mut mistakes = vec![
        ("skipped entries taken for key 0", change(|_, x| x.max(0))),
        ("off by one", change(|_, x| x.saturating_add(1))),
        ("an entry of ten forgotten", change(|i, x| if i % 10 == 0 { -1 } else { x })),
    ];
    let mut wrong = case.clone();
    wrong.attention.key_counts = None;
    mistakes.push(("counts ignored", wrong));
    let mut wrong = case.clone();
    (wrong.attention.key_indices, wrong.attention.key_counts) = (None, None);
    mistakes.push(("lists ignored", wrong));
    for (mistake, wrong) in mistakes {
        let verdict = checker.check(&support::run(&wrong, &machine));
        assert!(verdict.is_err(), "{mistake} passes: {verdict:?}");
    }
}

fn ints(values: Vec<i32>, shape: &[usize]) -> Option<Array> {
    Some(Array::new(values, shape).unwrap())
}

/// The message of a case that must not run.
fn message(case: &Case) -> String {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let error = case.run(support::on(&machine)).expect_err("this must not run");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
    error.to_string()
}

#[test]
fn bad_lists_are_errors_that_name_the_argument() {
    // 2 sequences of 3 rows, 4/2 heads.
    let spec = Spec::new("bad").lengths(&[(3, 20), (3, 9)]);
    let base = spec.clone().lists(ListSpec::new(5, Entries::Any)).generate();
    let with = |change: &dyn Fn(&mut Attention<Array>)| {
        let mut case = base.clone();
        change(&mut case.attention);
        message(&case)
    };
    let floats = || Some(Array::new(vec![0.0f32; 30], &[6, 1, 5]).unwrap());
    let counts = |count: i32| ints(vec![5, 5, 5, count, 5, 5], &[6, 1]);
    for (what, found) in [
        ("`key_indices` is of type f32", with(&|a| a.key_indices = floats())),
        ("`key_indices` is of shape [6, 5]", with(&|a| a.key_indices = ints(vec![0; 30], &[6, 5]))),
        ("`key_indices` is of shape [5, 1, 6]", {
            with(&|a| a.key_indices = ints(vec![0; 30], &[5, 1, 6]))
        }),
        ("`key_indices` is of shape [6, 3, 1]", {
            with(&|a| a.key_indices = ints(vec![0; 18], &[6, 3, 1]))
        }),
        ("`key_counts` is of shape [6, 2]", with(&|a| a.key_counts = ints(vec![0; 12], &[6, 2]))),
        ("`key_counts` is of shape [6]", with(&|a| a.key_counts = ints(vec![0; 6], &[6]))),
        ("`key_counts[3, 0]` is 6", with(&|a| a.key_counts = counts(6))),
        ("`key_counts[3, 0]` is -1", with(&|a| a.key_counts = counts(-1))),
        ("`key_counts` is given", { with(&|a| (a.key_indices, a.key_counts) = (None, counts(1))) }),
        ("`indices_are_slots` is set", {
            with(&|a| (a.key_indices, a.indices_are_slots) = (None, true))
        }),
    ] {
        assert!(found.contains(what), "{found:?} lacks {what:?}");
    }
}

#[test]
fn physical_slots_take_nothing_that_needs_positions() {
    let lists = ListSpec { of: ListEntries::Slots, ..ListSpec::new(5, Entries::Any) };
    let keys = Keys::Paged { block_size: 4, interleaved: false };
    let spec = Spec { keys, ..Spec::new("slots").lengths(&[(1, 20), (1, 9)]) };
    let base = spec.lists(lists).legal().generate();
    support::run(&base, &support::machine(regard::cpu::Level::Scalar, 1));
    type Change = fn(&mut Attention<Array>);
    let changes: [(&str, Change); 12] = [
        ("causal", |a| a.causal = true),
        ("window", |a| a.window.left = Some(3)),
        ("chunk", |a| a.chunk = Some(3)),
        ("key_positions", |a| {
            a.key_positions = Some(KeyPositions { offset: KeyOffset::Same(0), stride: 1 });
        }),
        ("q_offset", |a| a.q_offset = QueryOffset::Same(0)),
        ("q_offset", |a| a.q_offset = QueryOffset::PerSequence(ints(vec![0; 2], &[2]).unwrap())),
        ("kv_lens", |a| a.kv_lens = ints(vec![1; 2], &[2])),
        ("cu_seqlens_k", |a| a.cu_seqlens_k = ints(vec![0, 1, 2], &[3])),
        ("block_table", |a| a.block_table = ints(vec![0; 2], &[2, 1])),
        ("alibi_slopes", |a| {
            a.alibi_slopes = Some(Array::new(vec![0.5f32; 4], &[4]).unwrap());
        }),
        ("mask", |a| a.mask = Some(Array::new(vec![0.5f32; 32], &[1, 1, 1, 32]).unwrap())),
        ("tree_mask", |a| a.tree_mask = ints(vec![1; 2], &[2, 1, 1])),
    ];
    for (argument, change) in changes {
        let mut case = base.clone();
        change(&mut case.attention);
        let found = message(&case);
        assert!(found.contains(&format!("`{argument}`")), "{found:?} does not name {argument}");
        assert!(found.contains("indices_are_slots"), "{found:?} does not give the reason");
    }
    let mut case = base;
    case.k = Array::new(vec![0.0f32; 20 * 2 * 32], &[20, 2, 32]).unwrap();
    assert!(message(&case).contains("`k`"));
}

#[test]
fn a_plan_takes_no_lists_but_those_it_is_for() {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let spec = Spec::new("planned").lengths(&[(3, 20), (3, 9)]);
    let lists = ListSpec::new(5, Entries::Any);
    let planned = |lists: Option<ListSpec>| {
        let plan = Plan::new(&Spec { lists, ..spec.clone() }.problem(true), &machine);
        plan.expect("sound")
    };
    let run = |plan: &Plan, lists: Option<ListSpec>| {
        let case = Spec { lists, ..spec.clone() }.generate();
        let output = case.run(|inputs, outputs| {
            plan.run(inputs, outputs, &mut vec![0xff; plan.workspace_bytes()])
        });
        output.map(|_| ()).map_err(|error| error.to_string())
    };
    let longer = planned(Some(ListSpec::new(9, Entries::Any)));
    assert!(longer.explain().contains("lists of up to 9 keys per row"), "{}", longer.explain());
    run(&longer, Some(lists)).unwrap();
    for (plan, given, what) in [
        (Some(ListSpec::new(4, Entries::Any)), Some(lists), "`key_indices` is 5"),
        (None, Some(lists), "`key_indices` is one list per row"),
        (Some(lists), None, "`key_indices` is not given"),
        (
            Some(lists),
            Some(ListSpec { per_head: true, ..lists }),
            "`key_indices` is one list per row and key/value head",
        ),
    ] {
        let found = run(&planned(plan), given).unwrap_err();
        assert!(found.contains(what), "{found:?} lacks {what:?}");
    }
}

#[test]
fn gpus_plan_lists_of_any_length() {
    for len in [0, 1, 2048, 100_000] {
        let key_lists =
            Some(KeyLists { len, per_head: false, entries: ListEntries::Keys, second: None });
        let problem = Problem { kv_len: 65536, key_lists, ..Problem::new(DType::BF16, 128) };
        for name in ["h200", "a100", "m3-max"] {
            let plan = Plan::new(&problem, &name.parse::<Machine>().unwrap()).unwrap();
            let kernel = plan.choice().kernel.name();
            assert!(kernel.starts_with("decode_"), "{kernel} walks lists of {len} keys");
        }
    }
}
