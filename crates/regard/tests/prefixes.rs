//! Prefix groups: sequences that share their first keys.

mod support;

use regard::cpu::Level;
use regard::{DType, Error, KvStorage, Machine, Plan, Problem};
use regard_cases::check::Checker;
use regard_cases::rows::{Rows, bits, difference, rows as rows_of};
use regard_cases::{Array, Case, Keys, Spec, list};

/// The cases of prefix groups on every SIMD level and kernel of this machine.
#[test]
fn every_prefix_on_every_level() {
    let machines = support::machines();
    let specs: Vec<_> = list::prefixes().collect();
    support::for_all(&specs, |spec| {
        let case = spec.generate();
        let checker =
            Checker::new(&case, None).map_err(|failure| format!("{}: {failure}", spec.name))?;
        let clean = Spec { poison: false, ..spec.clone() }.generate();
        for machine in &machines {
            let output = support::run(&case, machine);
            if bits(&output) != bits(&support::run(&clean, machine)) {
                return Err(format!("{} on {machine} depends on unseen keys", spec.name));
            }
            checker.check(&output).map_err(|failure| {
                let path = support::leave_behind(&case);
                let replay = format!("replay: regard check {}", path.display());
                format!("{} on {machine}: {failure}\n    {replay}", spec.name)
            })?;
        }
        Ok(())
    });
}

fn rows(case: &Case, spec: &Spec, machine: &Machine) -> Rows {
    rows_of(spec, case, &support::run(case, machine))
}

/// Rows and keys of sequences, their groups, and the prefix of each group.
type Batch = (&'static [(usize, usize)], &'static [i32], &'static [usize]);

/// The law of prefix groups: with them, without them and with other groups, results agree within
/// the tolerance. In batch-invariant mode they have the same bits.
#[test]
fn groups_change_nothing() {
    let shapes: [Batch; 3] = [
        (&[(1, 700), (1, 660), (1, 900), (1, 641)], &[0, 0, 0, 0], &[640]),
        (&[(2, 300), (2, 280), (2, 290), (2, 400)], &[1, 0, 1, 0], &[200, 256]),
        (&[(1, 130), (1, 90), (1, 1200)], &[-1, 0, 0], &[64]),
    ];
    for (i, (lengths, groups, lens)) in shapes.into_iter().enumerate() {
        for (j, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
            let spec = Spec {
                keys: Keys::Paged { block_size: 16, interleaved: false },
                causal: true,
                sinks: true,
                ..Spec::new("law").lengths(lengths).heads(8, 2).dims(64, 64).dtype(dtype)
            };
            let spec = spec.prefixes(groups, lens).legal();
            let case = spec.generate();
            let mut flat = case.clone();
            (flat.attention.prefix_groups, flat.attention.prefix_lens) = (None, None);
            let threads = [1, 3][(i + j) % 2];
            for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
                let machine = support::machine(level, threads);
                let checker = Checker::new(&flat, None).expect("a case that can be checked");
                checker.check(&support::run(&case, &machine)).expect("as without groups");
                checker.check(&support::run(&flat, &machine)).expect("flat attention");
            }
            let machine = support::machine(Level::Scalar, threads);
            let invariant = |case: &Case| {
                let mut case = case.clone();
                case.attention.batch_invariant = true;
                rows(&case, &spec, &machine)
            };
            assert_eq!(difference(&invariant(&case), &invariant(&flat)), None);
        }
    }
}

/// Every mistake is an error that names the argument.
#[test]
fn bad_groups_are_errors() {
    let machine = support::machine(Level::Scalar, 1);
    let base = Spec {
        keys: Keys::Paged { block_size: 16, interleaved: false },
        causal: true,
        ..Spec::new("bad").lengths(&[(1, 100), (1, 90), (1, 80)])
    };
    let case = base.clone().prefixes(&[0, 1, 0], &[64, 32]).generate();
    let ints = |numbers: &[i32]| Some(Array::new(numbers.to_vec(), &[numbers.len()]).unwrap());
    let with = |change: &dyn Fn(&mut Case)| {
        let mut case = case.clone();
        change(&mut case);
        case
    };
    let cases = [
        ("`prefix_lens` is missing", with(&|c| c.attention.prefix_lens = None)),
        ("`prefix_groups` is missing", with(&|c| c.attention.prefix_groups = None)),
        ("`prefix_lens` is empty", with(&|c| c.attention.prefix_lens = ints(&[]))),
        ("`prefix_groups` is of shape [2]", with(&|c| c.attention.prefix_groups = ints(&[0, 0]))),
        ("`prefix_groups[1]` is 2", with(&|c| c.attention.prefix_groups = ints(&[0, 2, 0]))),
        ("`prefix_groups[2]` is -2", with(&|c| c.attention.prefix_groups = ints(&[0, 1, -2]))),
        ("`prefix_lens[1]` is -1", with(&|c| c.attention.prefix_lens = ints(&[64, -1]))),
        ("`prefix_lens[0]` is 81", with(&|c| c.attention.prefix_lens = ints(&[81, 32]))),
        ("`block_table[1, 0]` is", with(&|c| c.attention.prefix_groups = ints(&[0, 0, 0]))),
        ("`block_table[2, 4]` is", with(&|c| c.attention.prefix_lens = ints(&[65, 32]))),
        ("`prefix_groups` is given with keys Batched", {
            let mut flat = Spec { keys: Keys::Batched { slack: 0 }, ..base }.generate();
            flat.attention.prefix_groups = ints(&[0, 1, 0]);
            flat.attention.prefix_lens = ints(&[64, 32]);
            flat
        }),
    ];
    for (expected, case) in cases {
        match case.run(support::on(&machine)) {
            Err(error @ Error::Argument { .. }) => {
                let text = error.to_string();
                assert!(text.starts_with(expected), "expected {expected}, found {text}");
            }
            other => panic!("expected {expected}, found {:?}", other.map(|_| "results")),
        }
    }
}

/// A plan explains its use of groups, and takes as many as it was made for.
#[test]
fn plans_bound_groups() {
    let problem = Problem {
        batch: 8,
        query_heads: 4,
        kv_heads: 2,
        kv_len: 4096,
        keys: KvStorage::Paged { block_size: 16 },
        prefix_groups: 2,
        ..Problem::new(DType::F32, 64)
    };
    let machine = support::machine(Level::Scalar, 1);
    let plan = Plan::new(&problem, &machine).unwrap();
    assert!(plan.explain().contains("rows of a group walk their shared prefix together"));
    assert!(plan.explain().contains("up to 2 prefix groups"));
    let more = Problem { prefix_groups: 3, ..problem.clone() };
    let error = problem.covers(&more).unwrap_err().to_string();
    assert!(error.starts_with("`prefix_lens` is 3"), "{error}");
    let none = Problem { prefix_groups: 0, ..problem.clone() };
    assert!(problem.covers(&none).unwrap_err().to_string().starts_with("`prefix_groups`"));
    let invariant = Problem { batch_invariant: true, ..problem.clone() };
    let explained = Plan::new(&invariant, &machine).unwrap().explain();
    assert!(explained.contains("not used: bits must not depend on groups"), "{explained}");
    let h200: Machine = "h200".parse().unwrap();
    let explained = Plan::new(&problem.with_dtype(DType::BF16), &h200).unwrap().explain();
    assert!(explained.contains("merge_prefix"), "{explained}");
}
