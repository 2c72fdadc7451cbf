//! The whole list of cases, on every SIMD level this machine has, on one thread and on several.

mod support;

use regard::{Attention, DType, QueryOffset, Window};
use regard_cases::check::Checker;
use regard_cases::{Array, Data, Hide, Keys, MaskSpec, Spec, list};
use std::collections::BTreeMap;
use std::sync::Mutex;

#[test]
fn every_case_on_every_level() {
    on_every_level(&list::within(support::limits::most_work(usize::MAX)).collect::<Vec<_>>());
}

/// Caches in 8 and 4 bits, and of another float type than queries.
#[test]
fn every_cache_on_every_level() {
    let most_work = support::limits::most_work(usize::MAX);
    on_every_level(&list::caches().filter(|spec| spec.work() <= most_work).collect::<Vec<_>>());
}

fn on_every_level(specs: &[Spec]) {
    let machines = support::machines();
    let worst = Mutex::new(BTreeMap::new());
    support::for_all(specs, |spec| {
        let case = spec.generate();
        let checker = Checker::new(&case, support::limits::judged_rows())
            .map_err(|failure| format!("{}: {failure}", spec.name))?;
        // Nothing reads poison, or the oracle would show it.
        if !checker.judge().reference().out.iter().all(|x| x.is_finite()) {
            return Err(format!("{}: the oracle sees poison", spec.name));
        }
        for machine in &machines {
            let result = case.run(support::on(machine)).map_err(Into::into);
            let verdict = result.and_then(|output| checker.check(&output)).map_err(|failure| {
                let path = support::leave_behind(&case);
                format!(
                    "{} on {machine}: {failure}\n    replay: regard check {}",
                    spec.name,
                    path.display()
                )
            })?;
            let found = (verdict.agreement.worst, spec.name.clone());
            let mut worst = worst.lock().expect("no thread panics here");
            let most =
                worst.entry((machine.to_string(), spec.dtype)).or_insert((0.0, String::new()));
            if found.0 > most.0 {
                *most = found;
            }
        }
        Ok(())
    });
    // Shown with --nocapture: the used fraction of the tolerance.
    for ((machine, dtype), (worst, name)) in worst.into_inner().expect("no thread panics here") {
        println!("{machine}, {dtype}: error at most {worst:.2} of what is allowed ({name})");
    }
}

/// A kernel that gets one thing wrong must not pass: the tolerance is too tight for that, in every
/// type.
#[test]
fn wrong_semantics_do_not_pass() {
    type Mistake = (&'static str, fn(&mut Attention<Array>));
    let mistakes: [Mistake; 11] = [
        ("causality ignored", |options| options.causal = false),
        ("causal alignment off by one", |options| options.q_offset = QueryOffset::Same(63)),
        ("window one key too wide", |options| options.window.left = Some(31)),
        ("window ignored", |options| options.window = Window::default()),
        ("softcap ignored", |options| options.softcap = None),
        ("ALiBi rewarded", |options| negate(&mut options.alibi_slopes)),
        ("sinks ignored", |options| options.sinks = None),
        ("mask ignored", |options| options.mask = None),
        ("scale 5% off (of 1/sqrt(32))", |options| options.scale = Some(0.1856)),
        ("last key forgotten", |options| {
            options.kv_lens = Some(Array::new(vec![69], &[1]).unwrap());
            options.q_offset = QueryOffset::Same(64);
        }),
        ("pages swapped", |options| {
            let table = options.block_table.as_ref().unwrap().numbers().unwrap();
            let mut table: Vec<i32> = table.into_iter().map(|block| block as i32).collect();
            table.swap(3, 4);
            options.block_table = Some(Array::new(table, &[1, 11]).unwrap());
        }),
    ];
    let machine = support::machine(regard::cpu::Level::Scalar, 1);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mask = MaskSpec {
            dtype: DType::F32,
            hide: Hide::Nothing,
            broadcast: [true, true, false, false],
        };
        let case = Spec {
            causal: true,
            window: Window { left: Some(30), right: None },
            softcap: Some(4.0),
            alibi: true,
            sinks: true,
            mask: Some(mask),
            keys: Keys::Paged { block_size: 7, interleaved: false },
            // Ordinary numbers in unseen slots: a mistake must be caught by its size, not by NaN.
            poison: false,
            ..Spec::new("mistakes").lengths(&[(6, 70)]).dtype(dtype)
        };
        let case = case.generate();
        // 11 columns: the spare one beyond 70 keys in pages of 7.
        assert_eq!(case.attention.block_table.as_ref().unwrap().shape(), [1, 11]);
        let checker = Checker::new(&case, None).unwrap();
        checker.check(&support::run(&case, &machine)).unwrap();
        for (mistake, make) in mistakes {
            let mut wrong = case.clone();
            make(&mut wrong.attention);
            let verdict = checker.check(&support::run(&wrong, &machine));
            assert!(verdict.is_err(), "{mistake} passes in {dtype}: {verdict:?}");
        }
    }
}

fn negate(array: &mut Option<Array>) {
    let numbers = array.as_ref().unwrap().numbers().unwrap();
    let shape = [numbers.len()];
    let negated = Data::from_numbers(DType::F32, numbers.into_iter().map(|x| -x));
    *array = Some(Array::new(negated, &shape).unwrap());
}
