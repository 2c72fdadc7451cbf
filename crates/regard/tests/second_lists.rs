//! A second list of slots into a second cache: one softmax over the entries of both lists.

mod support;

use regard::{Attention, DType, Error, ListEntries, Machine, Plan};
use regard_cases::rows::{Rows, difference, rows as rows_of};
use regard_cases::{
    Array, CacheSpec, Caches, Case, Entries, Granularity, Keys, ListSpec, Scales, Spec,
};

fn rows(spec: &Spec, machine: &Machine) -> Rows {
    let case = spec.clone().generate();
    rows_of(spec, &case, &support::run(&case, machine))
}

/// Two lists give the bits of one list of both one after the other.
#[test]
fn two_lists_equal_one() {
    let stored =
        [CacheSpec::default(), CacheSpec::new(DType::E4M3, Granularity::Token, Scales::Fitted)];
    for (i, machine) in support::machines().into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
            let keys = Keys::Paged { block_size: [16, 7][(i + j) % 2], interleaved: false };
            let heads = [(6, 2), (40, 1), (70, 1)][(i + j) % 3];
            let lists = ListSpec {
                of: ListEntries::Slots,
                counts: j == 1,
                ..ListSpec::new(1300, Entries::Any)
            };
            let one = Spec { keys, batch_invariant: true, sinks: true, ..Spec::new("one") }
                .dtype(dtype)
                .lengths(&[(1, 2300), (1, 130)])
                .heads(heads.0, heads.1)
                .dims(64, 32)
                .cache(stored[(i / 2 + j) % 2])
                .lists(lists)
                .legal();
            let two = one
                .clone()
                .lists(ListSpec { caches: Caches::Two { second: 650 }, ..lists })
                .legal();
            if let Some(difference) = difference(&rows(&two, &machine), &rows(&one, &machine)) {
                panic!("{machine}, {dtype}, {heads:?}: {difference}");
            }
        }
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
fn bad_second_lists_are_errors_that_name_the_argument() {
    let keys = Keys::Paged { block_size: 4, interleaved: false };
    let lists = ListSpec {
        of: ListEntries::Slots,
        caches: Caches::Two { second: 5 },
        counts: true,
        ..ListSpec::new(10, Entries::Any)
    };
    let spec = Spec { keys, ..Spec::new("bad").lengths(&[(3, 20), (3, 9)]).lists(lists) }.legal();
    let base = spec.generate();
    support::run(&base, &support::machine(regard::cpu::Level::Scalar, 1));
    let with = |change: &dyn Fn(&mut Attention<Array>)| {
        let mut case = base.clone();
        change(&mut case.attention);
        message(&case)
    };
    let floats = |shape: &[usize]| Array::new(vec![0.0f32; shape.iter().product()], shape).ok();
    let halves = |shape: &[usize]| {
        let zeros = vec![half::f16::ZERO; shape.iter().product()];
        Some(Array::new(zeros, shape).unwrap())
    };
    for (what, found) in [
        ("`second_k` is missing", with(&|a| a.second_k = None)),
        ("`second_v` is missing", with(&|a| a.second_v = None)),
        ("`second_k` is given", with(&|a| (a.second_indices, a.second_counts) = (None, None))),
        ("`second_k` is of type f16", with(&|a| a.second_k = halves(&[3, 7, 2, 32]))),
        ("`second_k` is of shape [21, 2, 32]", with(&|a| a.second_k = floats(&[21, 2, 32]))),
        ("`second_k` is of shape [9, 7, 2, 16]", with(&|a| a.second_k = floats(&[9, 7, 2, 16]))),
        ("`second_v` is of shape [9, 8, 2, 32]", with(&|a| a.second_v = floats(&[9, 8, 2, 32]))),
        ("`second_k_scales` is given", with(&|a| a.second_k_scales = floats(&[1, 1, 1]))),
        ("`second_indices` is of shape [6, 3, 2]", {
            with(&|a| a.second_indices = ints(vec![0; 36], &[6, 3, 2]))
        }),
        ("`second_counts[2, 0]` is 6", {
            with(&|a| a.second_counts = ints(vec![0, 0, 6, 0, 0, 0], &[6, 1]))
        }),
        ("`second_indices` is given", {
            with(&|a| {
                a.indices_are_slots = false;
                a.block_table = ints(vec![0; 10], &[2, 5]);
                a.kv_lens = ints(vec![20, 9], &[2]);
            })
        }),
    ] {
        assert!(found.contains(what), "{found:?} lacks {what:?}");
    }
}

#[test]
fn every_gpu_takes_a_second_cache() {
    let lists = ListSpec {
        of: ListEntries::Slots,
        caches: Caches::Two { second: 30 },
        ..ListSpec::new(64, Entries::Any)
    };
    let keys = Keys::Paged { block_size: 16, interleaved: false };
    let spec = Spec { keys, ..Spec::new("gpu").lists(lists).dtype(DType::BF16) }.legal();
    for name in ["h200", "a100", "m1", "m3-max"] {
        let plan = Plan::new(&spec.problem(true), &name.parse().unwrap());
        let text = plan.unwrap_or_else(|error| panic!("{name}: {error}")).explain();
        assert!(text.contains("30 of a second cache"), "{name}: {text}");
    }
}

/// A plan serves second lists up to its own, and no longer ones.
#[test]
fn second_lists_longer_than_planned_are_refused() {
    let keys = Keys::Paged { block_size: 4, interleaved: false };
    let spec = |second: usize| {
        let lists = ListSpec {
            of: ListEntries::Slots,
            caches: Caches::Two { second },
            ..ListSpec::new(5 + second, Entries::Any)
        };
        Spec { keys, ..Spec::new("planned").lengths(&[(2, 20)]).lists(lists) }.legal()
    };
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let plan = Plan::new(&spec(6).problem(true), &machine).unwrap();
    let run = |second: usize| {
        spec(second)
            .generate()
            .run(|inputs, outputs| plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()]))
    };
    for second in [0, 5, 6] {
        run(second).unwrap();
    }
    let error = run(7).expect_err("longer than planned");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
    assert_eq!(error.to_string(), "`second_indices` is 7; allowed: at most 6, as planned");
    // A plan without second lists serves none.
    let one = ListSpec { of: ListEntries::Slots, ..ListSpec::new(5, Entries::Any) };
    let one = Spec { keys, ..Spec::new("one").lengths(&[(2, 20)]).lists(one) }.legal();
    let plan = Plan::new(&one.problem(true), &machine).unwrap();
    let given = spec(0)
        .generate()
        .run(|inputs, outputs| plan.run(inputs, outputs, &mut vec![0; plan.workspace_bytes()]));
    let error = given.expect_err("planned without").to_string();
    assert!(error.contains("`second_indices` is given"), "{error}");
}
