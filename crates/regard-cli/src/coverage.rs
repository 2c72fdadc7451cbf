//! `regard check --coverage`: every kernel that ships, run with every feature that it accepts,
//! alone and in pairs.

use crate::case::{self, Runner};
use crate::output::{FAILED, Progress, Stop, print, print_json};
use rayon::prelude::*;
use regard::Error;
use regard_cases::Case;
use regard_cases::coverage::{Backend, Coverage, CoverageCase, Covered, Feature, Subject, cover};
use serde::Serialize;
use std::collections::BTreeMap;

/// A request to cover kernels.
pub struct Request<'a> {
    /// The device's name.
    pub device: &'a str,
    /// Only kernels whose names contain this.
    pub filter: Option<&'a str>,
    /// Judge about this many rows of each case instead of all.
    pub rows: Option<usize>,
    /// JSON instead of text.
    pub json: bool,
}

/// Cases are made, run and judged this many at a time: making and judging use all threads.
const BATCH: usize = 256;

/// Maximum failures of a kernel that are made smaller, and that text shows.
const MAX_SHRUNK: usize = 3;
const MAX_SHOWN: usize = 6;

/// The report: a table with a row per kernel.
#[derive(Serialize)]
struct Report {
    kernels: Vec<Row>,
    /// Kernels that ship for another purpose than attention, with the tests that try them.
    others: BTreeMap<String, String>,
    passed: usize,
    failed: usize,
    /// Cells without a case that passed, of all kernels.
    empty: usize,
}

#[derive(Serialize)]
struct Row {
    kernel: String,
    /// Whether this device can run it.
    runs_here: bool,
    passed: usize,
    failed: usize,
    /// Passed cases with each accepted feature.
    features: BTreeMap<&'static str, usize>,
    /// Passed cases with each accepted pair: `"causal sinks"`.
    pairs: BTreeMap<String, usize>,
    /// The reason why no problem with a feature selects the kernel.
    not_accepted: BTreeMap<&'static str, String>,
    /// The same for pairs of features that it accepts one by one.
    pairs_not_accepted: BTreeMap<String, String>,
    /// Accepted features and pairs without a passed case.
    empty: Vec<String>,
    failures: Vec<Failed>,
}

#[derive(Serialize)]
struct Failed {
    case: String,
    features: String,
    error: String,
    /// The fewest features with which it still fails, besides the features of its shape, if these
    /// were looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    smallest: Option<String>,
}

/// The GPU's kernels, the runner of cases, and the kernels that ship for other purposes.
struct Device<'a> {
    backend: Box<dyn Backend>,
    run: RunCase<'a>,
    others: BTreeMap<String, String>,
}

type RunCase<'a> =
    Box<dyn FnMut(&Subject, &CoverageCase, &Case) -> Result<regard_cases::Output, Error> + 'a>;

/// Covers and prints.
pub fn check(request: &Request) -> Result<u8, Stop> {
    let mut runner = Runner::new(&case::device(request.device)?)?;
    let Device { backend, mut run, others } = device(&mut runner)?;
    let filter = request.filter.unwrap_or_default();
    let mut subjects = backend.subjects();
    subjects.retain(|subject| subject.name.contains(filter));
    if subjects.is_empty() {
        return Err(Error::argument(
            "--filter",
            format!("\"{filter}\""),
            "part of a kernel's name",
        )
        .into());
    }
    let coverages: Vec<_> =
        subjects.par_iter().map(|subject| cover(backend.as_ref(), subject)).collect();
    let cases = || {
        coverages
            .iter()
            .flat_map(|coverage| coverage.cases.iter().map(move |case| (coverage, case)))
    };
    let progress = Progress::for_steps("cases", cases().count(), !request.json);
    let mut results = Vec::new();
    let all: Vec<_> = cases().collect();
    for batch in all.chunks(BATCH) {
        let data: Vec<_> = batch.par_iter().map(|(_, case)| case.spec.generate()).collect();
        let mut outputs = Vec::new();
        for ((coverage, case), data) in batch.iter().zip(&data) {
            progress.about(&coverage.subject.name);
            outputs.push(run(&coverage.subject, case, data));
        }
        let verdicts =
            batch.par_iter().zip(&data).zip(outputs).map(|(((_, case), data), output)| {
                progress.step();
                judge(case, data, output, request.rows)
            });
        results.extend(verdicts.collect::<Vec<_>>());
    }
    progress.finish();
    let mut report = Report { kernels: Vec::new(), others, passed: 0, failed: 0, empty: 0 };
    let mut results = results.into_iter();
    for coverage in &coverages {
        let results: Vec<_> = results.by_ref().take(coverage.cases.len()).collect();
        let row = row(coverage, results, backend.as_ref(), request.rows, &mut run);
        report.passed += row.passed;
        report.failed += row.failed;
        report.empty += row.empty.len();
        if !request.json {
            print(&row.text())?;
        }
        report.kernels.push(row);
    }
    match request.json {
        true => print_json(&report)?,
        false => print(&report.end())?,
    }
    let clean = report.failed == 0
        && report.empty == 0
        && report.passed > 0
        && report.unreached().next().is_none();
    Ok(if clean { 0 } else { FAILED })
}

fn device(runner: &mut Runner) -> Result<Device<'_>, Stop> {
    match runner {
        #[cfg(feature = "cuda")]
        Runner::Cuda(runner) => {
            use regard_cases::coverage::cuda;
            let backend = Box::new(cuda::Cuda::on(runner.gpu()));
            let others = cuda::OTHERS.map(|(name, by)| (name.to_string(), by.to_string())).into();
            let run: RunCase =
                Box::new(move |subject, case, data| cuda::run(runner, subject, case, data));
            Ok(Device { backend, run, others })
        }
        // The pipelines for all families: this GPU runs pipelines that are tuned for others too.
        #[cfg(all(feature = "metal", target_vendor = "apple"))]
        Runner::Metal(runner) => {
            let backend = Box::new(regard_cases::coverage::metal::Metal);
            let run: RunCase =
                Box::new(move |subject, case, data| runner.cover(subject, case, data));
            Ok(Device { backend, run, others: BTreeMap::new() })
        }
        #[cfg(feature = "metal-host")]
        Runner::MetalHost(host) => {
            let backend = Box::new(regard_cases::coverage::metal::Metal);
            let run: RunCase = Box::new(move |subject, case, data| host.cover(subject, case, data));
            Ok(Device { backend, run, others: BTreeMap::new() })
        }
        _ => Err(not_here()),
    }
}

fn not_here() -> Stop {
    Error::argument(
        "--coverage",
        "on a device that it cannot cover",
        "--device cuda, --device metal, --device metal-host",
    )
    .into()
}

fn judge(
    case: &CoverageCase,
    data: &Case,
    output: Result<regard_cases::Output, Error>,
    rows: Option<usize>,
) -> Result<(), String> {
    let output = output.map_err(|error| error.to_string())?;
    case.judge(data, &output, rows).map(|_| ()).map_err(|failure| failure.to_string())
}

/// The results of a kernel's cases.
fn row(
    coverage: &Coverage,
    results: Vec<Result<(), String>>,
    backend: &dyn Backend,
    rows: Option<usize>,
    run: &mut RunCase,
) -> Row {
    let Coverage { subject, cases, not_accepted, pairs_not_accepted, accepted_pairs } = coverage;
    let passed =
        cases.iter().zip(&results).filter(|(_, result)| result.is_ok()).map(|(case, _)| case);
    let covered: Covered = coverage.covered(passed);
    let (no_feature, no_pair) = coverage.empty(&covered);
    let pair = |(a, b): &(Feature, Feature)| format!("{a} {b}");
    let empty = no_feature.iter().map(Feature::to_string).chain(no_pair.iter().map(pair)).collect();
    let mut failures = Vec::new();
    for (case, result) in cases.iter().zip(results) {
        let Err(error) = result else { continue };
        let shrink = failures.len() < MAX_SHRUNK;
        let smallest =
            shrink.then(|| smallest(case.clone(), subject, backend, rows, run).added().to_string());
        let (case, features) = (case.spec.name.clone(), case.features.to_string());
        failures.push(Failed { case, features, error, smallest });
    }
    let of_feature = |feature: Feature| covered.features.get(&feature).copied().unwrap_or(0);
    let of_pair = |pair: &(Feature, Feature)| covered.pairs.get(pair).copied().unwrap_or(0);
    Row {
        kernel: subject.name.clone(),
        runs_here: !subject.machines.is_empty(),
        passed: cases.len() - failures.len(),
        failed: failures.len(),
        features: coverage
            .accepted()
            .iter()
            .map(|feature| (feature.name(), of_feature(feature)))
            .collect(),
        pairs: accepted_pairs.iter().map(|both| (pair(both), of_pair(both))).collect(),
        not_accepted: not_accepted
            .iter()
            .map(|(feature, why)| (feature.name(), why.clone()))
            .collect(),
        pairs_not_accepted: pairs_not_accepted
            .iter()
            .map(|(both, why)| (pair(both), why.clone()))
            .collect(),
        empty,
        failures,
    }
}

/// The case with features taken away as long as it fails.
fn smallest(
    mut case: CoverageCase,
    subject: &Subject,
    backend: &dyn Backend,
    rows: Option<usize>,
    run: &mut RunCase,
) -> CoverageCase {
    let mut fails = |case: &CoverageCase| {
        let data = case.spec.generate();
        let output = run(subject, case, &data);
        judge(case, &data, output, rows).is_err()
    };
    while let Some(smaller) = case.smaller(backend, subject).into_iter().find(&mut fails) {
        case = smaller;
    }
    case
}

impl Row {
    /// Whether no problem selects the kernel that this device could run.
    fn is_unreached(&self) -> bool {
        self.runs_here && self.passed + self.failed == 0
    }

    fn text(&self) -> String {
        if !self.runs_here {
            return format!("-    {}  this device cannot run it\n", self.kernel);
        }
        if self.is_unreached() {
            return format!("FAIL {}  no problem selects it\n", self.kernel);
        }
        let has =
            |cells: &mut dyn Iterator<Item = &usize>| cells.filter(|&&cases| cases > 0).count();
        let mut text = format!(
            "{} {:<40} features {:>2}/{:<2} pairs {:>3}/{:<3} cases {:>3}/{:<3}",
            if self.failed == 0 && self.empty.is_empty() { "ok  " } else { "FAIL" },
            self.kernel,
            has(&mut self.features.values()),
            self.features.len(),
            has(&mut self.pairs.values()),
            self.pairs.len(),
            self.passed,
            self.passed + self.failed,
        );
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (feature, why) in &self.not_accepted {
            reasons.entry(why).or_default().push(feature);
        }
        for (why, features) in reasons {
            text += &format!("\n     -  {}: {why}", features.join(" "));
        }
        if !self.empty.is_empty() {
            text += &format!("\n     EMPTY  {}", self.empty.join(", "));
        }
        for Failed { case, features, error, smallest } in self.failures.iter().take(MAX_SHOWN) {
            text += &format!(
                "\n     FAIL {case}  {}\n          has {features}",
                error.replace('\n', " ")
            );
            if let Some(smallest) = smallest {
                text += &format!("\n          fails with no more than {smallest}");
            }
        }
        if let more @ 1.. = self.failures.len().saturating_sub(MAX_SHOWN) {
            text += &format!("\n     and {more} more, all with --json");
        }
        text + "\n"
    }
}

impl Report {
    fn end(&self) -> String {
        let mut text = String::new();
        for (kernel, by) in &self.others {
            text += &format!("-    {kernel}  no attention kernel: {by} runs it\n");
        }
        text + &format!(
            "{} kernels: {} cases passed, {} failed, {} cells empty, {} kernels not selected\n",
            self.kernels.len(),
            self.passed,
            self.failed,
            self.empty,
            self.unreached().count()
        )
    }

    /// The kernels that no problem selects.
    fn unreached(&self) -> impl Iterator<Item = &Row> {
        self.kernels.iter().filter(|row| row.is_unreached())
    }
}
