//! The test of the tests: each threadgroup barrier of the Metal kernels is deleted in turn, and
//! both the values (in several orders) and the race checker have to notice.

#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, Compiler};
use regard::{DType, metal};
use regard_cases::Spec;
use regard_cases::check::Checker;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{compiler, gpu, library, run_case};

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

/// Cases that pass every barrier, in f32.
fn specs() -> Vec<Spec> {
    let causal = |name: &str, lengths, dims| {
        let spec =
            Spec::new(name).lengths(&[lengths]).heads(4, 2).dims(dims, dims).dtype(DType::F32);
        Spec { causal: true, sinks: true, ..spec }
    };
    vec![
        causal("decode", (2, 150), 32),
        causal("prefill", (19, 90), 32),
        causal("prefill in parts", (19, 50), 160),
    ]
}

/// The first finding about a source in a build, if there is one.
fn findings(compiler: &Compiler, source: &str, build: Build, schedules: u32) -> Option<String> {
    let mut library = library(compiler, source, build);
    for spec in specs() {
        let case = spec.generate();
        let checker = Checker::new(&case, None).expect("a sound case");
        for schedule in 0..schedules {
            let verdict = run_case(&mut library, &case, (&gpu(8, 1), schedule))
                .and_then(|output| checker.check(&output).map_err(|failure| failure.to_string()));
            if let Err(found) = verdict {
                return Some(format!("{}: {found}", spec.name));
            }
        }
    }
    None
}

#[test]
fn no_barrier_can_be_deleted_unnoticed() {
    let Some(compiler) = compiler() else { return };
    // One type is enough, and compiles in a third of the time.
    let mut source = metal::source();
    for line in [
        "DECODE_TYPE(half)\n",
        "DECODE_TYPE(bfloat)\n",
        "PREFILL_TYPES(\"half\", half, half)\n",
        "PREFILL_TYPES(\"bfloat\", bfloat, bfloat)\n",
        "PREFILL_TYPES(\"half_float\", half, float)\n",
        "PREFILL_TYPES(\"bfloat_float\", bfloat, float)\n",
    ] {
        assert!(source.contains(line), "{line}");
        source = source.replace(line, "\n");
    }
    let barriers: Vec<_> = source.match_indices(BARRIER).map(|(at, _)| at).collect();
    assert!(barriers.len() >= 6, "{} barriers", barriers.len());
    // The source as it is, and without one barrier: each compiled in both builds, which takes most
    // of the time, two at once.
    let sources = std::iter::once(None).chain(barriers.into_iter().map(Some));
    let tasks: Vec<_> = sources
        .flat_map(|without| [Build::Plain, Build::Races].map(|build| (without, build)))
        .collect();
    let (next, unnoticed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(&(without, build)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(at) = without else {
                assert_eq!(
                    findings(&compiler, &source, build, 4),
                    None,
                    "{} with all barriers",
                    build.name()
                );
                continue;
            };
            let mutant = format!("{}{}", &source[..at], &source[at + BARRIER.len()..]);
            let after = source[at..].lines().nth(1).unwrap_or("").trim();
            let schedules = if build == Build::Plain { 8 } else { 1 };
            let place = format!("before `{after}` in the {} build", build.name());
            match findings(&compiler, &mutant, build, schedules) {
                Some(found) => println!("{place}: {}", found.replace('\n', " ")),
                None => unnoticed
                    .lock()
                    .expect("no thread panics here")
                    .push(format!("the barrier {place}")),
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
    let unnoticed = unnoticed.into_inner().expect("no thread panics here");
    assert!(unnoticed.is_empty(), "not noticed:\n{}", unnoticed.join("\n"));
}
