//! The list itself: its cases are what they say, and the oracle has an answer to each.

use regard::oracle;
use regard_cases::check::Checker;
use regard_cases::{file, list};
use std::collections::HashSet;

#[test]
fn names_are_unique_and_cases_sound() {
    let mut names = HashSet::new();
    for spec in list::list() {
        assert!(names.insert(spec.name.clone()), "{} is there twice", spec.name);
        let case = spec.generate();
        let reference = oracle::attention(&case.inputs().unwrap());
        let reference = reference.unwrap_or_else(|error| panic!("{}: {error}", spec.name));
        // Poison is only where nobody looks, or the oracle would show it.
        assert!(reference.out.iter().all(|x| x.is_finite()), "{} shows poison", spec.name);
    }
    let core = list::core().count();
    assert!((40..200).contains(&core), "{core} core cases");
    println!("{} cases, {core} of them core", names.len());
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
