//! Lists of pages per key/value head that rows attend to. Their cases are in the list of
//! `selection.rs`.

mod support;

use regard::DType;
use regard::{
    Attention, Error, KeyLists, KeyOffset, KeyPositions, KvStorage, ListEntries, Machine, Plan,
    Problem, QueryOffset, Window,
};
use regard_cases::check::Checker;
use regard_cases::rows::{Rows, difference, rows as rows_of};
use regard_cases::{
    Array, CacheSpec, Case, Entries, Granularity, Keys, ListSpec, Scales, SequenceSpec, Spec,
};

const PAGES: [ListEntries; 2] = [ListEntries::Pages, ListEntries::NumberedPages];

fn rows(spec: &Spec, machine: &Machine) -> Rows {
    let case = spec.clone().generate();
    rows_of(spec, &case, &support::run(&case, machine))
}

fn paged(block_size: usize) -> Keys {
    Keys::Paged { block_size, interleaved: false }
}

fn page_lists(of: ListEntries, len: usize, entries: Entries) -> ListSpec {
    ListSpec { of, ..ListSpec::new(len, entries) }
}

/// A list of all pages in order gives the bits of dense attention in batch-invariant mode.
#[test]
fn a_full_list_equals_dense_attention() {
    let stored = [
        CacheSpec::default(),
        CacheSpec::new(DType::E4M3, Granularity::Token, Scales::Fitted),
        CacheSpec::new(DType::Q8_0, Granularity::Head, Scales::Fitted),
    ];
    for (i, machine) in support::machines().into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::F16, DType::BF16].into_iter().enumerate() {
            for (k, of) in PAGES.into_iter().enumerate() {
                let lengths = [[(1, 2300), (1, 130)], [(5, 5), (5, 300)]][(i + j + k) % 2];
                let longest = lengths.iter().map(|&(_, keys)| keys).max().unwrap();
                let heads = [(6, 2), (40, 2), (70, 1)][(i + j + k) % 3];
                let plain = Spec { softcap: Some(9.0), sinks: true, ..Spec::new("full") };
                let spec = match of {
                    ListEntries::Pages => Spec { batch_invariant: true, ..plain },
                    _ => Spec { mask: None, ..Spec::invariant() },
                };
                let dense = Spec { keys: paged([16, 7, 1][j]), ..spec }
                    .dtype(dtype)
                    .lengths(&lengths)
                    .heads(heads.0, heads.1)
                    .dims(64, 32)
                    .cache(stored[(i + k) % 3])
                    .legal();
                let expected = rows(&dense, &machine);
                for (per_head, len) in [(false, longest), (true, longest), (true, longest + 200)] {
                    let lists = ListSpec { per_head, ..page_lists(of, len, Entries::All) };
                    let found = rows(&dense.clone().lists(lists).legal(), &machine);
                    if let Some(difference) = difference(&found, &expected) {
                        panic!("{machine}, {dtype}, {of:?}, {heads:?}, {lengths:?}: {difference}");
                    }
                }
            }
        }
    }
}

/// A row has the same bits alone, among others, and with other threads.
#[test]
fn bits_of_rows_depend_on_nothing_around_them() {
    for level in regard::cpu::Level::ALL.into_iter().filter(|level| level.is_available()) {
        for of in PAGES {
            let lists =
                ListSpec { per_head: true, counts: true, ..page_lists(of, 1100, Entries::Any) };
            let spec = Spec { ragged_queries: true, keys: paged(16), ..Spec::invariant() }
                .heads(4, 2)
                .lengths(&[(3, 70), (2, 2300), (1, 1030)])
                .lists(lists)
                .legal();
            let all = rows(&spec, &support::machine(level, 1));
            for threads in [2, 16] {
                let found = rows(&spec, &support::machine(level, threads));
                assert_eq!(difference(&found, &all), None, "{level}, {threads} threads");
            }
            for index in 0..3 {
                let SequenceSpec { q_len, kv_len, .. } = spec.sequences[index];
                let offset = match of {
                    ListEntries::Pages => spec.offset.clone(),
                    _ => regard_cases::OffsetSpec::Same(kv_len as i64 - q_len as i64),
                };
                let sequences = vec![spec.sequences[index]];
                let alone = Spec { sequences, offset, ..spec.clone() };
                let found = rows(&alone, &support::machine(level, 2));
                assert_eq!(difference(&found, &all), None, "{level}, {index} alone");
            }
        }
    }
}

fn ints(values: Vec<i32>, shape: &[usize]) -> Option<Array> {
    Some(Array::new(values, shape).unwrap())
}

/// Mistakes with page lists are larger than the tolerance.
#[test]
fn wrong_lists_do_not_pass() {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let lists = ListSpec {
        counts: true,
        per_head: true,
        ..page_lists(ListEntries::NumberedPages, 160, Entries::Any)
    };
    let spec = Spec { poison: false, causal: true, alibi: true, ..Spec::new("mistakes") };
    let case = Spec { keys: paged(4), ..spec }.lengths(&[(6, 70), (6, 61)]);
    let case = case.lists(lists).legal().generate();
    let checker = Checker::new(&case, None).unwrap();
    checker.check(&support::run(&case, &machine)).unwrap();
    let changed = |array: &Option<Array>, change: &dyn Fn(usize, i32) -> i32| {
        let array = array.as_ref().unwrap();
        let numbers = array.numbers().unwrap().into_iter().enumerate();
        ints(numbers.map(|(i, x)| change(i, x as i32)).collect(), array.shape())
    };
    type Change<'a> = &'a dyn Fn(&mut Attention<Array>);
    let mistakes: [(&str, Change); 7] = [
        ("skipped pages taken for page 0", &|a| {
            let page = |_, x: i32| if (0..100).contains(&x) { x } else { 0 };
            a.page_indices = changed(&a.page_indices, &page);
            a.page_numbers = changed(&a.page_numbers, &page);
        }),
        ("lengths ignored", &|a| a.page_list_lens = None),
        ("lengths one too short", &|a| {
            a.page_list_lens = changed(&a.page_list_lens, &|_, x| (x - 1).max(0));
        }),
        ("numbers off by one", &|a| {
            a.page_numbers = changed(&a.page_numbers, &|_, x| x.saturating_add(1));
        }),
        ("numbers of another list", &|a| {
            let numbers = a.page_numbers.as_ref().unwrap().numbers().unwrap();
            let other = |i: usize| numbers[(i + numbers.len() / 2) % numbers.len()] as i32;
            a.page_numbers = changed(&a.page_numbers, &|i, _| other(i));
        }),
        ("the lists of another head", &|a| {
            let pages = a.page_indices.as_ref().unwrap().numbers().unwrap();
            let other = |i: usize| pages[(i + pages.len() / 2) % pages.len()] as i32;
            a.page_indices = changed(&a.page_indices, &|i, _| other(i));
        }),
        ("a page of ten forgotten", &|a| {
            a.page_indices = changed(&a.page_indices, &|i, x| if i % 10 == 0 { -1 } else { x });
        }),
    ];
    for (mistake, change) in mistakes {
        let mut wrong = case.clone();
        change(&mut wrong.attention);
        let verdict = checker.check(&support::run(&wrong, &machine));
        assert!(verdict.is_err(), "{mistake} passes: {verdict:?}");
    }
}

/// The message of a case that must not run.
fn message(case: &Case) -> String {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let error = case.run(support::on(&machine)).expect_err("this must not run");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
    error.to_string()
}

/// 2 sequences of 3 rows, 4/2 heads, lists of 5 pages of 4.
fn base(of: ListEntries) -> Case {
    let spec = Spec { keys: paged(4), ..Spec::new("bad").lengths(&[(3, 20), (3, 8)]) };
    let lists = ListSpec { per_head: true, counts: true, ..page_lists(of, 20, Entries::Any) };
    spec.lists(lists).legal().generate()
}

#[test]
fn bad_page_lists_are_errors_that_name_the_argument() {
    let numbered = base(ListEntries::NumberedPages);
    let with = |change: &dyn Fn(&mut Attention<Array>)| {
        let mut case = numbered.clone();
        change(&mut case.attention);
        message(&case)
    };
    let zeros = |shape: &[usize]| ints(vec![0; shape.iter().product()], shape);
    let floats = || Some(Array::new(vec![0.0f32; 20], &[2, 2, 5]).unwrap());
    for (what, found) in [
        ("`page_indices` is of type f32", with(&|a| a.page_indices = floats())),
        ("`page_indices` is of shape [2, 10]", with(&|a| a.page_indices = zeros(&[2, 10]))),
        ("`page_indices` is of shape [2, 3, 5]", with(&|a| a.page_indices = zeros(&[2, 3, 5]))),
        ("`page_indices` is of shape [3, 2, 5]", with(&|a| a.page_indices = zeros(&[3, 2, 5]))),
        ("`page_list_lens` is of type f32", with(&|a| a.page_list_lens = floats())),
        ("`page_list_lens` is of shape [1, 2]", with(&|a| a.page_list_lens = zeros(&[1, 2]))),
        ("`page_list_lens[1, 0]` is 21", {
            with(&|a| a.page_list_lens = ints(vec![20, 0, 21, 0], &[2, 2]))
        }),
        ("`page_list_lens[0, 1]` is -1", {
            with(&|a| a.page_list_lens = ints(vec![20, -1, 21, 0], &[2, 2]))
        }),
        ("`page_numbers` is of type f32", with(&|a| a.page_numbers = floats())),
        ("`page_numbers` is of shape [2, 2, 4]", with(&|a| a.page_numbers = zeros(&[2, 2, 4]))),
        ("`q_offset` is not given", with(&|a| a.q_offset = QueryOffset::BottomRight)),
        ("`page_numbers` is given", with(&|a| (a.page_indices, a.page_list_lens) = (None, None))),
        ("`page_list_lens` is given", with(&|a| (a.page_indices, a.page_numbers) = (None, None))),
    ] {
        assert!(found.contains(what), "{found:?} lacks {what:?}");
    }
    let mut case = numbered;
    case.k = Array::new(vec![0.0f32; 20 * 2 * 32], &[20, 2, 32]).unwrap();
    assert!(message(&case).contains("`k`"));
}

/// Nothing else gives the place of keys, and options that need positions need numbers of pages.
#[test]
fn page_lists_stand_alone() {
    type Change = fn(&mut Attention<Array>);
    let positions: [(&str, Change); 6] = [
        ("causal", |a| a.causal = true),
        ("window", |a| a.window = Window { left: Some(3), right: None }),
        ("chunk", |a| a.chunk = Some(3)),
        ("q_offset", |a| a.q_offset = QueryOffset::Same(0)),
        ("q_offset", |a| a.q_offset = QueryOffset::PerSequence(ints(vec![0; 2], &[2]).unwrap())),
        ("alibi_slopes", |a| {
            a.alibi_slopes = Some(Array::new(vec![0.5f32; 4], &[4]).unwrap());
        }),
    ];
    let never: [(&str, Change); 7] = [
        ("key_positions", |a| {
            a.key_positions = Some(KeyPositions { offset: KeyOffset::Same(0), stride: 1 });
        }),
        ("kv_lens", |a| a.kv_lens = ints(vec![1; 2], &[2])),
        ("cu_seqlens_k", |a| a.cu_seqlens_k = ints(vec![0, 1, 2], &[3])),
        ("block_table", |a| a.block_table = ints(vec![0; 2], &[2, 1])),
        ("key_indices", |a| a.key_indices = ints(vec![0; 6], &[6, 1, 1])),
        ("mask", |a| a.mask = Some(Array::new(vec![0.5f32; 32], &[1, 1, 1, 32]).unwrap())),
        ("tree_mask", |a| a.tree_mask = ints(vec![1; 6], &[2, 3, 1])),
    ];
    for of in PAGES {
        let base = base(of);
        support::run(&base, &support::machine(regard::cpu::Level::Scalar, 1));
        for (argument, change) in positions {
            let mut case = base.clone();
            change(&mut case.attention);
            match of {
                ListEntries::Pages => {
                    let found = message(&case);
                    assert!(found.contains(&format!("`{argument}`")), "{found:?}: {argument}");
                    assert!(found.contains("page_numbers"), "{found:?} does not give the reason");
                }
                _ => {
                    support::run(&case, &support::machine(regard::cpu::Level::Scalar, 1));
                }
            }
        }
        for (argument, change) in never {
            let mut case = base.clone();
            change(&mut case.attention);
            let found = message(&case);
            assert!(found.contains(&format!("`{argument}`")), "{found:?}: {argument}");
            assert!(found.contains("page_indices"), "{found:?} does not give the reason");
        }
    }
}

#[test]
fn a_plan_takes_no_page_lists_but_those_it_is_for() {
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    let spec = Spec { keys: paged(4), ..Spec::new("planned").lengths(&[(3, 20), (3, 9)]) };
    let spec = Spec { offset: regard_cases::OffsetSpec::Same(2), ..spec };
    let lists = page_lists(ListEntries::NumberedPages, 12, Entries::Any);
    let of = |lists: ListSpec| spec.clone().lists(lists).legal();
    let planned = |lists| Plan::new(&of(lists).problem(true), &machine).expect("sound");
    let run = |plan: &Plan, lists: ListSpec| {
        let output = of(lists).generate().run(|inputs, outputs| {
            plan.run(inputs, outputs, &mut vec![0xff; plan.workspace_bytes()])
        });
        output.map(|_| ()).map_err(|error| error.to_string())
    };
    let longer = planned(ListSpec { len: 19, ..lists });
    let words = "lists of up to 20 keys in numbered pages per sequence";
    assert!(longer.explain().contains(words), "{}", longer.explain());
    run(&longer, lists).unwrap();
    for (planned_for, what) in [
        (ListSpec { len: 8, ..lists }, "`page_indices` is 12"),
        (ListSpec { of: ListEntries::Pages, ..lists }, "`page_numbers` is true"),
        (ListSpec { of: ListEntries::Slots, ..lists }, "`key_indices` is not given"),
        (ListSpec { of: ListEntries::Keys, ..lists }, "`key_indices` is not given"),
        (ListSpec { per_head: true, ..lists }, "`page_indices` is one list per sequence;"),
    ] {
        let found = run(&planned(planned_for), lists).unwrap_err();
        assert!(found.contains(what), "{found:?} lacks {what:?}");
    }
}

#[test]
fn pages_of_whole_runs_have_a_kernel_of_their_own_on_hopper() {
    let kernel = |machine: &str, change: fn(&mut Problem)| {
        let lists =
            KeyLists { len: 4096, per_head: true, entries: ListEntries::Pages, second: None };
        let mut problem = Problem {
            query_heads: 32,
            kv_heads: 8,
            kv_len: 65536,
            keys: KvStorage::Paged { block_size: 64 },
            key_lists: Some(lists),
            ..Problem::new(DType::BF16, 128)
        };
        change(&mut problem);
        let plan = Plan::new(&problem, &machine.parse::<Machine>().unwrap()).unwrap();
        plan.choice().kernel.name().to_string()
    };
    let (by_page, by_key) =
        ("decode_bf16_128_128_r8_page_lists_sm90", "decode_bf16_128_128_r8_lists");
    assert_eq!(kernel("h200", |_| ()), by_page);
    assert_eq!(kernel("a100", |_| ()), by_key);
    let others: [fn(&mut Problem); 5] = [
        |problem| problem.keys = KvStorage::Paged { block_size: 8 },
        |problem| problem.variant.softcap = true,
        |problem| problem.batch_invariant = true,
        |problem| problem.head_dim = 120,
        |problem| problem.key_lists.as_mut().unwrap().entries = ListEntries::Slots,
    ];
    for change in others {
        assert_eq!(kernel("h200", change), by_key);
    }
}
