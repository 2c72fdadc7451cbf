//! Random problems: everything that the contract allows, composed at random, on any device.
//!
//! [`problem`] draws a problem from a seed and a number. [`trial`](trial()) runs the problem twice
//! and judges it. If it is batch-invariant, its bits are compared with the bits of other
//! arrangements. [`run`] does so with many problems on several threads, and makes failing problems
//! small ([`shrink()`]). `regard check --random` is this module as a command.

mod arrange;
mod axes;
mod cpu;
pub mod crash;
mod describe;
mod draw;
mod guard;
mod known;
mod leave;
mod shrink;
mod trial;

pub use arrange::Arrangement;
pub use axes::axes;
pub use cpu::{Cpu, with_larger_bounds};
pub use describe::describe;
pub use draw::{Profile, problem};
pub use guard::{Guarded, Side};
pub use known::known;
pub use leave::leave;
pub use shrink::shrink;
pub use trial::{Broken, Device, How, Kind, Passed, trial};

use crate::spec::{CacheSpec, Spec};
use regard::Error;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The problems to try, and the threads that try them.
#[derive(Debug, Clone)]
pub struct Options {
    /// The seed of all problems.
    pub seed: u64,
    /// The first problem's number.
    pub first: u64,
    /// Number of problems.
    pub count: u64,
    /// The kind of problems.
    pub profile: Profile,
    /// Threads, each with a separate device.
    pub threads: usize,
}

/// Makes the device of one of the threads, on that thread.
pub type MakeDevice<'a> = dyn Fn() -> Result<Box<dyn Device>, Error> + Sync + 'a;

/// A problem that failed.
#[derive(Debug, Clone)]
pub struct Found {
    /// Its number.
    pub number: u64,
    /// The problem as drawn.
    pub drawn: Spec,
    /// The plainest problem found that fails in the same way; the drawn problem if too many failed
    /// before.
    pub spec: Spec,
    /// The failure of the plainest problem.
    pub broken: Broken,
}

impl Found {
    /// A text that failures of one cause have in common: the kind of failure, and the features of
    /// the plainest problem that fails so. Sizes and types are left out.
    pub fn signature(&self) -> String {
        let sizes = ["dtype", "out", "Dk", "Dv", "heads", "rows", "keys", "batch", "lse", "unseen"];
        let plain = axes(&Spec::new("plain"));
        let features = axes(&self.spec).into_iter().filter(|axis| !plain.contains(axis));
        let features = features.filter(|(axis, _)| !sizes.contains(axis));
        let words: Vec<_> = features.map(|(axis, value)| format!("{axis} {value}")).collect();
        format!(
            "{:?}: {}",
            self.broken.kind,
            if words.is_empty() { "plain".into() } else { words.join(", ") }
        )
    }
}

/// The results of many problems.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Problems that passed.
    pub passed: u64,
    /// Rows judged.
    pub rows: u64,
    /// Rearrangements compared to the bit.
    pub arrangements: u64,
    /// The largest error, relative to the allowed error.
    pub worst: f64,
    /// Problems that no kernel took, by reason.
    pub refused: BTreeMap<String, u64>,
    /// Problems that failed.
    pub failed: u64,
    /// Whether the run ended early: the device was lost.
    pub lost: bool,
}

/// Maximum failures that are shrunk; further ones are only reported.
const MAX_SHRUNK: usize = 400;

/// Problems tried to make one failure small.
const SHRINK_TRIES: usize = 250;

/// Tries problems. `found` is told of each failure and `step` of each problem, from any thread.
///
/// # Errors
/// If a device cannot be made.
pub fn run(
    options: &Options,
    make: &MakeDevice<'_>,
    step: &(dyn Fn() + Sync),
    found: &(dyn Fn(Found) + Sync),
) -> Result<Summary, Error> {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let shrunk = AtomicUsize::new(0);
    let summary = Mutex::new(Ok(Summary::default()));
    std::thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                let worker =
                    Worker { options, next: &next, stop: &stop, shrunk: &shrunk, step, found };
                let part = make().map(|mut device| worker.work(&mut *device));
                let mut all = summary.lock().expect("no thread panics here");
                match (&mut *all, part) {
                    (Ok(all), Ok(part)) => all.add(part),
                    (all @ Ok(_), Err(error)) => *all = Err(error),
                    (Err(_), _) => {}
                }
            });
        }
    });
    summary.into_inner().expect("no thread panics here")
}

/// The value of `REGARD_RANDOM_SEED`, or a new number.
///
/// # Panics
/// If the variable holds no number.
pub fn new_seed() -> u64 {
    match std::env::var("REGARD_RANDOM_SEED") {
        Ok(seed) => seed.parse().expect("REGARD_RANDOM_SEED is a number"),
        Err(_) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64 % 1_000_000_007)
        }
    }
}

/// For tests: `count` problems of a new seed, which is printed even if the test passes.
///
/// # Errors
/// The failures, and the way to repeat them.
pub fn test(
    name: &str,
    count: u64,
    profile: Profile,
    make: &MakeDevice<'_>,
) -> Result<Summary, String> {
    let seed = new_seed();
    // Past the capture of tests' output.
    let _ =
        writeln!(std::io::stderr(), "{name}: {count} random problems, REGARD_RANDOM_SEED={seed}");
    let options = Options { seed, first: 0, count, profile, threads: 2 };
    let mut device = make().map_err(|error| error.to_string())?;
    for spec in known() {
        if let Err(Broken { way, text, .. }) = trial(&mut *device, &spec) {
            return Err(format!("{} on {way}: {text}", spec.name));
        }
    }
    drop(device);
    let failures = Mutex::new(Vec::new());
    let summary = run(&options, make, &|| (), &|found| {
        let Broken { way, text, .. } = &found.broken;
        let problem = describe(&found.spec);
        let text = format!("random/{seed}/{} on {way}: {text}\n    {problem}", found.number);
        failures.lock().expect("no thread panics here").push(text);
    });
    let summary = summary.map_err(|error| error.to_string())?;
    let failures = failures.into_inner().expect("no thread panics here");
    match failures.is_empty() {
        true => Ok(summary),
        false => {
            let shown: Vec<_> = failures.iter().take(20).cloned().collect();
            let again = format!("REGARD_RANDOM_SEED={seed} repeats them");
            Err(format!("{} of {count} failed; {again}:\n{}", failures.len(), shown.join("\n")))
        }
    }
}

impl Summary {
    fn add(&mut self, other: Summary) {
        self.passed += other.passed;
        self.rows += other.rows;
        self.arrangements += other.arrangements;
        self.worst = self.worst.max(other.worst);
        self.failed += other.failed;
        self.lost |= other.lost;
        for (reason, count) in other.refused {
            *self.refused.entry(reason).or_default() += count;
        }
    }
}

struct Worker<'a> {
    options: &'a Options,
    next: &'a AtomicU64,
    stop: &'a AtomicBool,
    shrunk: &'a AtomicUsize,
    step: &'a (dyn Fn() + Sync),
    found: &'a (dyn Fn(Found) + Sync),
}

impl Worker<'_> {
    fn work(&self, device: &mut dyn Device) -> Summary {
        let Options { seed, first, count, profile, .. } = *self.options;
        let mut summary = Summary::default();
        while !self.stop.load(Ordering::Relaxed) {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                break;
            }
            let number = first + number;
            let mut spec = problem(seed, number, profile);
            if !device.reads_cache(&spec) {
                spec.lists = None;
                if !device.reads_cache(&spec) {
                    spec.cache = CacheSpec::default();
                }
            }
            let noted = crash::Noted::new(seed, number);
            match trial(device, &spec) {
                Ok(passed) => {
                    summary.passed += 1;
                    summary.rows += passed.rows as u64;
                    summary.arrangements += passed.arrangements as u64;
                    summary.worst = summary.worst.max(passed.worst);
                }
                Err(Broken { kind: Kind::Refused, text, .. }) => {
                    *summary.refused.entry(text).or_default() += 1;
                }
                Err(broken) => {
                    summary.failed += 1;
                    if broken.kind == Kind::Driver {
                        summary.lost = true;
                        self.stop.store(true, Ordering::Relaxed);
                    }
                    (self.found)(self.plainest(device, number, spec, broken));
                }
            }
            drop(noted);
            (self.step)();
        }
        summary
    }

    fn plainest(&self, device: &mut dyn Device, number: u64, drawn: Spec, broken: Broken) -> Found {
        let mut last = broken.clone();
        let few = self.shrunk.fetch_add(1, Ordering::Relaxed) < MAX_SHRUNK;
        let tries = if few && broken.kind != Kind::Driver { SHRINK_TRIES } else { 0 };
        let spec = shrink(&drawn, tries, |candidate| match trial(device, candidate) {
            Err(other) if other.kind == broken.kind => {
                last = other;
                true
            }
            _ => false,
        });
        Found { number, drawn, spec, broken: last }
    }
}
