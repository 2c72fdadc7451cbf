//! `regard check`: cases run and judged.

use crate::case::{self, Run, Runner};
use crate::files::{self, Input};
use crate::output::{FAILED, Progress, Stop, print, print_json};
use rayon::prelude::*;
use regard::Error;
use regard::oracle::Agreement;
use regard_cases::Case;
use regard_cases::check::{Checker, Failure, Verdict};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// What to check.
pub struct Request<'a> {
    /// Files and directories.
    pub files: &'a [PathBuf],
    /// The device's name.
    pub device: &'a str,
    /// Judge about this many rows of each case instead of all.
    pub rows: Option<usize>,
    /// JSON instead of text.
    pub json: bool,
}

/// Attention is timed as the best of this many runs, as long as they take less than [`PATIENCE`] together.
const REPETITIONS: usize = 5;
const PATIENCE: Duration = Duration::from_millis(50);

/// Cases are read, run and judged this many at a time, or as many as have this many bytes. Reading and judging use all
/// threads for different cases; running has all threads for one case, so that its time means something.
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
    #[serde(flatten)]
    timing: Option<Timing>,
    #[serde(flatten)]
    agreement: Option<Judged>,
    /// How the expected tensors agree with the oracle, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<Judged>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Timing {
    kernel: &'static str,
    seconds: f64,
    gflops: f64,
    /// Gigabytes of keys and values a second, each read once.
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
    /// The largest error in units of what was allowed there.
    worst: f64,
}

/// Checks and prints.
pub fn check(request: &Request) -> Result<u8, Stop> {
    let machine = case::device(request.device)?;
    let inputs = files::find(request.files)?;
    let progress = Progress::new(inputs.len(), !request.json);
    let mut runner = Runner::new(machine);
    let mut report = Report { cases: Vec::new(), passed: 0, failed: 0 };
    let mut rest = &inputs[..];
    while !rest.is_empty() {
        let (batch, after) = rest.split_at(batch_len(rest));
        rest = after;
        let cases: Vec<_> = batch.par_iter().map(|input| case::read(&input.path)).collect();
        let runs: Vec<_> = cases.iter().map(|case| run(&mut runner, case)).collect();
        let verdicts: Vec<_> = cases
            .par_iter()
            .zip(&runs)
            .map(|(case, run)| {
                let verdict = judge(case, run, request.rows);
                progress.step();
                verdict
            })
            .collect();
        for ((input, run), verdict) in batch.iter().zip(&runs).zip(verdicts) {
            let line = Line::new(input.path.display().to_string(), run.as_ref().ok(), verdict);
            if line.passed {
                report.passed += 1;
            } else {
                report.failed += 1;
            }
            if request.json {
                report.cases.push(line);
            } else {
                progress.aside(|| print(&line.text()))?;
            }
        }
    }
    progress.finish();
    if request.json {
        print_json(&report)?;
    } else {
        print(&format!("{} passed, {} failed\n", report.passed, report.failed))?;
    }
    Ok(if report.failed == 0 && report.passed > 0 { 0 } else { FAILED })
}

/// How many of these inputs to take together: one at least.
fn batch_len(inputs: &[Input]) -> usize {
    let mut bytes = 0u64;
    let fits = |input: &&Input| {
        bytes = bytes.saturating_add(input.bytes);
        bytes <= BATCH_BYTES
    };
    inputs.iter().take(BATCH_CASES).take_while(fits).count().max(1)
}

fn run(runner: &mut Runner, case: &Result<Case, Error>) -> Result<Run, Error> {
    match case {
        Ok(case) => runner.run(case, REPETITIONS, PATIENCE),
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
            Ok(verdict) => (Some(verdict.agreement.into()), verdict.expected.map(Judged::from), None),
            Err(failure) => (None, None, Some(failure.to_string())),
        };
        Line { case, passed: error.is_none(), timing: run.map(Timing::from), agreement, expected, error }
    }

    fn text(&self) -> String {
        let mut text = format!("{} {}", if self.passed { "ok  " } else { "FAIL" }, self.case);
        if let Some(timing) = &self.timing {
            let speed = match timing.decode {
                true => format!("{:.1} GB/s", timing.gbytes),
                false => format!("{:.1} GFLOP/s", timing.gflops),
            };
            text += &format!("  {}  {}  {speed}", timing.kernel, duration(timing.seconds));
        }
        if let Some(Judged { rows, rows_not_finite, out_error, lse_error, worst }) = self.agreement {
            text += &format!(
                "  {rows} rows, error {out_error:.1e} (lse {lse_error:.1e}), at most {:.0}% of what is allowed",
                worst * 100.0
            );
            if rows_not_finite > 0 {
                text += &format!("  {rows_not_finite} rows not judged: their reference is not finite");
            }
        }
        if let Some(expected) = &self.expected {
            text += &format!("  expected tensors agree to {:.1e}", expected.out_error);
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
        let rate = |amount: u64| if run.seconds > 0.0 { amount as f64 / run.seconds / 1e9 } else { 0.0 };
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
