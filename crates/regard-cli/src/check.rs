//! `regard check`: cases run and judged.

use crate::case::{self, Run, Runner};
use crate::files::{self, Input};
use crate::output::{FAILED, Progress, Stop, print, print_json};
use rayon::prelude::*;
use regard::Error;
use regard::oracle::Agreement;
use regard_cases::check::{Checker, Failure, Verdict};
#[cfg(feature = "cuda")]
use regard_cases::cuda::laws::{LAWS, Law, SKIPPED};
use regard_cases::list::list_with_caches;
use regard_cases::{Case, Spec};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// A request to check.
pub struct Request<'a> {
    /// Files and directories.
    pub files: &'a [PathBuf],
    /// The built-in cases whose names start so; none without.
    pub cases: Option<&'a str>,
    /// Only the cases and files whose names contain this.
    pub filter: Option<&'a str>,
    /// The laws whose names contain this; none without.
    pub laws: Option<&'a str>,
    /// Neither the cases and files nor the laws whose names contain this.
    pub without: Option<&'a str>,
    /// The device's name.
    pub device: &'a str,
    /// Judge about this many rows of each case instead of all.
    pub rows: Option<usize>,
    /// Run each case up to this many times instead of [`REPETITIONS`].
    pub repeat: Option<usize>,
    /// JSON instead of text.
    pub json: bool,
}

impl Request<'_> {
    /// Whether a case, file or law of this name is not wanted.
    fn leaves_out(&self, name: &str) -> bool {
        self.without.is_some_and(|without| name.contains(without))
    }
}

/// Attention is timed as the best of this many runs, as long as they take less than [`PATIENCE`]
/// together.
const REPETITIONS: usize = 5;
const PATIENCE: Duration = Duration::from_millis(50);

/// Cases are read, run and judged this many at a time, or as many as have this many bytes. Reading
/// and judging use all threads for different cases; running has all threads for one case, so that
/// its time means something.
const BATCH_CASES: usize = 256;
const BATCH_BYTES: u64 = 64 << 20;

#[derive(Serialize)]
struct Report {
    cases: Vec<Line>,
    passed: usize,
    failed: usize,
}

#[derive(Serialize)]
struct Line {
    case: String,
    passed: bool,
    /// A law that could not be tried here: neither passed nor failed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skipped: bool,
    #[serde(flatten)]
    timing: Option<Timing>,
    #[serde(flatten)]
    agreement: Option<Judged>,
    /// The agreement of the expected tensors with the oracle, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<Judged>,
    /// The problems that a law was tried with.
    #[serde(skip_serializing_if = "Option::is_none")]
    tried: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Timing {
    kernel: &'static str,
    seconds: f64,
    gflops: f64,
    /// Gigabytes of keys and values per second, each read once.
    gbytes: f64,
    #[serde(skip)]
    decode: bool,
}

#[derive(Serialize)]
struct Judged {
    rows: usize,
    rows_not_finite: usize,
    out_error: f64,
    lse_error: f64,
    /// The largest error in units of the allowed error there.
    worst: f64,
}

/// Checks and prints.
pub fn check(request: &Request) -> Result<u8, Stop> {
    let mut runner = Runner::new(&case::device(request.device)?)?;
    let (sources, refused) = runnable(&runner, sources(request)?);
    let progress = Progress::new(sources.len(), !request.json);
    let mut report = Report { cases: Vec::new(), passed: 0, failed: 0 };
    let mut rest = &sources[..];
    while !rest.is_empty() {
        let (batch, after) = rest.split_at(batch_len(rest));
        rest = after;
        let cases: Vec<_> = batch.par_iter().map(Source::case).collect();
        let runs: Vec<_> =
            cases.iter().map(|case| run(&mut runner, case, request.repeat)).collect();
        let verdicts: Vec<_> = cases
            .par_iter()
            .zip(&runs)
            .map(|(case, run)| {
                let verdict = judge(case, run, request.rows);
                progress.step();
                verdict
            })
            .collect();
        for ((source, run), verdict) in batch.iter().zip(&runs).zip(verdicts) {
            let line = Line::new(source.name(), run.as_ref().ok(), verdict);
            report.add(line, request.json, &progress)?;
        }
    }
    if let Some(name) = request.laws {
        check_laws(request, name, &mut runner, &mut report, &progress)?;
    }
    progress.finish();
    if request.json {
        print_json(&report)?;
    } else {
        if let Some(first) = refused.first() {
            let (count, name) = (refused.len(), first.name());
            print(&format!(
                "SKIPPED {count} cases of caches or key lists that no kernel of this device takes, \
                 the first of them {name}\n"
            ))?;
        }
        print(&format!("{} passed, {} failed\n", report.passed, report.failed))?;
    }
    Ok(if report.failed == 0 && report.passed > 0 { 0 } else { FAILED })
}

impl Report {
    /// Counts a line, and keeps or prints it.
    fn add(&mut self, line: Line, json: bool, progress: &Progress) -> Result<(), Stop> {
        match (line.passed, line.skipped) {
            (_, true) => {}
            (true, false) => self.passed += 1,
            (false, false) => self.failed += 1,
        }
        if json {
            self.cases.push(line);
            return Ok(());
        }
        progress.aside(|| print(&line.text()))
    }
}

/// Checks the laws whose names contain `name`.
#[cfg(feature = "cuda")]
fn check_laws(
    request: &Request,
    name: &str,
    runner: &mut Runner,
    report: &mut Report,
    progress: &Progress,
) -> Result<(), Stop> {
    let Runner::Cuda(runner) = runner else {
        return Err(Error::argument("--laws", "on the CPU", "on a GPU: --device cuda").into());
    };
    let wanted = |law: &&Law| law.name.contains(name) && !request.leaves_out(law.name);
    if !LAWS.iter().any(|law| wanted(&law)) {
        let names: Vec<_> = LAWS.iter().map(|law| law.name).collect();
        return Err(Error::argument("--laws", format!("\"{name}\""), names.join(", ")).into());
    }
    for law in LAWS.iter().filter(wanted) {
        progress.about(law.name);
        let begin = std::time::Instant::now();
        let (tried, error) = match (law.check)(runner) {
            Ok(tried) => {
                (Some(format!("{tried}  ({})", duration(begin.elapsed().as_secs_f64()))), None)
            }
            Err(broken) => (None, Some(broken.to_string())),
        };
        let line = Line {
            case: format!("law/{}", law.name),
            passed: error.is_none(),
            skipped: tried.as_ref().is_some_and(|tried: &String| tried.starts_with(SKIPPED)),
            timing: None,
            agreement: None,
            expected: None,
            tried,
            error,
        };
        report.add(line, request.json, progress)?;
    }
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn check_laws(
    _: &Request,
    _: &str,
    _: &mut Runner,
    _: &mut Report,
    _: &Progress,
) -> Result<(), Stop> {
    Err(Error::argument("--laws", "on the CPU", "on a GPU: --device cuda").into())
}

/// The source of a case.
enum Source {
    File(Input),
    /// The built-in list. Its cases are small.
    Listed(Box<Spec>),
}

impl Source {
    fn name(&self) -> String {
        match self {
            Source::File(input) => input.path.display().to_string(),
            Source::Listed(spec) => spec.name.clone(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Source::File(input) => input.bytes,
            Source::Listed(_) => 0,
        }
    }

    fn case(&self) -> Result<Case, Error> {
        match self {
            Source::File(input) => case::read(&input.path),
            Source::Listed(spec) => Ok(spec.generate()),
        }
    }
}

/// Splits the sources into sources to run and listed cases that no kernel of the GPU takes. Files
/// are always run, so that a refusal is reported.
fn runnable(runner: &Runner, sources: Vec<Source>) -> (Vec<Source>, Vec<Source>) {
    let Some(machine) = runner.gpu() else { return (sources, Vec::new()) };
    sources.into_iter().partition(|source| match source {
        Source::Listed(spec) => spec.has_plan_on(machine),
        Source::File(_) => true,
    })
}

fn sources(request: &Request) -> Result<Vec<Source>, Stop> {
    let inputs = files::find(request.files).map_err(|error| Stop::Failed(error.to_string()))?;
    let mut sources: Vec<_> = inputs.into_iter().map(Source::File).collect();
    if let Some(prefix) = request.cases {
        let before = sources.len();
        let wanted = list_with_caches().filter(|spec| spec.name.starts_with(prefix));
        sources.extend(wanted.map(|spec| Source::Listed(Box::new(spec))));
        if sources.len() == before {
            let mut groups: Vec<_> = list_with_caches()
                .filter_map(|spec| Some(spec.name.split_once('/')?.0.to_string()))
                .collect();
            groups.dedup();
            return Err(
                Error::argument("--cases", format!("\"{prefix}\""), groups.join(", ")).into()
            );
        }
    }
    if let Some(filter) = request.filter {
        sources.retain(|source| source.name().contains(filter));
    }
    sources.retain(|source| !request.leaves_out(&source.name()));
    Ok(sources)
}

/// Number of these to take together: one at least.
fn batch_len(sources: &[Source]) -> usize {
    let mut bytes = 0u64;
    let fits = |source: &&Source| {
        bytes = bytes.saturating_add(source.bytes());
        bytes <= BATCH_BYTES
    };
    sources.iter().take(BATCH_CASES).take_while(fits).count().max(1)
}

fn run(
    runner: &mut Runner,
    case: &Result<Case, Error>,
    repeat: Option<usize>,
) -> Result<Run, Error> {
    match case {
        Ok(case) => runner.run(case, repeat.unwrap_or(REPETITIONS), PATIENCE),
        Err(error) => Err(error.clone()),
    }
}

fn judge(
    case: &Result<Case, Error>,
    run: &Result<Run, Error>,
    rows: Option<usize>,
) -> Result<Verdict, Failure> {
    match (case, run) {
        (Ok(case), Ok(run)) => Checker::new(case, rows)?.check(&run.output),
        (Err(error), _) | (_, Err(error)) => Err(Failure::Error(error.clone())),
    }
}

impl Line {
    fn new(case: String, run: Option<&Run>, verdict: Result<Verdict, Failure>) -> Line {
        let (agreement, expected, error) = match verdict {
            Ok(verdict) => {
                (Some(verdict.agreement.into()), verdict.expected.map(Judged::from), None)
            }
            Err(failure) => (None, None, Some(failure.to_string())),
        };
        let timing = run.map(Timing::from);
        Line {
            case,
            passed: error.is_none(),
            skipped: false,
            timing,
            agreement,
            expected,
            tried: None,
            error,
        }
    }

    fn text(&self) -> String {
        let verdict = match (self.passed, self.skipped) {
            (_, true) => "skip",
            (true, false) => "ok  ",
            (false, false) => "FAIL",
        };
        let mut text = format!("{verdict} {}", self.case);
        if let Some(timing) = &self.timing {
            let speed = match timing.decode {
                true => format!("{:.1} GB/s", timing.gbytes),
                false => format!("{:.1} GFLOP/s", timing.gflops),
            };
            text += &format!("  {}  {}  {speed}", timing.kernel, duration(timing.seconds));
        }
        if let Some(Judged { rows, rows_not_finite, out_error, lse_error, worst }) = self.agreement
        {
            text += &format!(
                "  {rows} rows, error {out_error:.1e} (lse {lse_error:.1e}), at most {:.0}% of \
                 what is allowed",
                worst * 100.0
            );
            if rows_not_finite > 0 {
                text +=
                    &format!("  {rows_not_finite} rows not judged: their reference is not finite");
            }
        }
        if let Some(expected) = &self.expected {
            text += &format!("  expected tensors agree to {:.1e}", expected.out_error);
        }
        if let Some(tried) = &self.tried {
            text += &format!("  {tried}");
        }
        if let Some(error) = &self.error {
            text += &format!("  {error}");
        }
        text.replace('\n', " ") + "\n"
    }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.1} us", s * 1e6),
        s if s < 1.0 => format!("{:.2} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

impl From<&Run> for Timing {
    fn from(run: &Run) -> Timing {
        let rate =
            |amount: u64| if run.seconds > 0.0 { amount as f64 / run.seconds / 1e9 } else { 0.0 };
        Timing {
            kernel: run.kernel,
            seconds: run.seconds,
            gflops: rate(run.work.flops),
            gbytes: rate(run.work.kv_bytes),
            decode: run.work.query_len == 1,
        }
    }
}

impl From<Agreement> for Judged {
    fn from(agreement: Agreement) -> Judged {
        let Agreement { rows, unjudged, out_error, lse_error, worst } = agreement;
        Judged { rows, rows_not_finite: unjudged, out_error, lse_error, worst }
    }
}
