//! The list itself: names, the cases that a bound on work leaves, and cases through a file.

use regard_cases::check::Checker;
use regard_cases::{file, list};
use std::collections::HashSet;

/// `every_case_on_every_level` checks that each case is sound, its poison unseen.
#[test]
fn names_are_unique() {
    let mut names = HashSet::new();
    for spec in list::list() {
        assert!(!names.contains(&spec.name), "{} is there twice", spec.name);
        names.insert(spec.name);
    }
    let core = list::core().count();
    assert!((40..200).contains(&core), "{core} core cases");
    println!("{} cases, {core} of them core", names.len());
}

#[test]
fn a_bound_on_work_leaves_every_kind_of_case() {
    let names = |most_work| list::within(most_work).map(|spec| spec.name).collect::<Vec<_>>();
    assert_eq!(names(usize::MAX), list::list().map(|spec| spec.name).collect::<Vec<_>>());
    let (few, more) = (names(0), names(2_000_000));
    for kind in [
        "lengths/",
        "splits/",
        "dims/",
        "variants/softcap-",
        "prefill/sloped-",
        "step/ragged-",
        "positions/prefill-",
        "wide/tree",
        "random/",
    ] {
        assert!(few.iter().any(|name| name.starts_with(kind)), "{kind}: {few:?}");
    }
    assert!(few.len() < 200 && (800..1400).contains(&more.len()), "{} {}", few.len(), more.len());
    assert!(list::within(2_000_000).any(|spec| spec.work() > 2_000_000));
}

#[test]
fn a_case_is_the_same_every_time_and_through_a_file() {
    for spec in list::core().take(60) {
        let case = spec.generate();
        let bytes = file::to_bytes(&case).unwrap();
        assert_eq!(bytes, file::to_bytes(&spec.generate()).unwrap(), "{}", spec.name);
        let mut again = file::from_bytes(&spec.name, &bytes).unwrap();
        again.out_dtype = case.out_dtype;
        let (a, b) = (Checker::new(&case, None).unwrap(), Checker::new(&again, None).unwrap());
        assert_eq!(a.judge().reference().out, b.judge().reference().out, "{}", spec.name);
        assert_eq!(a.judge().reference().lse, b.judge().reference().lse, "{}", spec.name);
    }
}
