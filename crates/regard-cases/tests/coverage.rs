//! Every kernel that ships is selected by some problem, and no pair of features that it accepts lacks a case.

#[cfg(feature = "cuda")]
#[test]
fn every_cuda_module_has_a_case_for_each_pair_of_features() {
    use regard_cases::coverage::cuda::Cuda;
    use regard_cases::coverage::{Backend, cover};
    let backend = Cuda::all();
    let only = std::env::var("REGARD_COVERAGE").unwrap_or_default();
    let subjects: Vec<_> =
        backend.subjects().into_iter().filter(|subject| subject.name.contains(&only)).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut all = Vec::new();
        while let Some(subject) = subjects.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            all.push(cover(&backend, subject));
        }
        all
    };
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut total = 0;
    for coverage in &all {
        let (features, pairs) = coverage.empty(&coverage.covered(coverage.cases.iter()));
        total += coverage.cases.len();
        println!(
            "{}: {} features, {} pairs in {} cases; not {:?}; not pairs {:?}",
            coverage.subject.name,
            coverage.accepted().len(),
            coverage.accepted_pairs.len(),
            coverage.cases.len(),
            coverage.not_accepted,
            coverage.pairs_not_accepted,
        );
        assert!(!coverage.cases.is_empty(), "nothing selects {}", coverage.subject.name);
        assert!(features.is_empty() && pairs.is_empty(), "{}: {features:?} {pairs:?}", coverage.subject.name);
    }
    println!("{} modules, {total} cases", all.len());
}
