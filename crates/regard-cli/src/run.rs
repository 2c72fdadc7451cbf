//! `regard run`: case files in, results out.

use crate::case::{self, Runner, Target};
use crate::files::{self, Input};
use crate::output::{FAILED, Progress, Stop, error, print, print_json};
use rayon::prelude::*;
use regard::{Error, Machine};
use regard_cases::file;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A request to run.
pub struct Request<'a> {
    /// Files and directories.
    pub files: &'a [PathBuf],
    /// The folder of results.
    pub out: &'a Path,
    /// The device's name.
    pub device: &'a str,
    /// JSON instead of text.
    pub json: bool,
}

/// Files up to this size run beside each other, each on one thread: reading, planning and writing
/// them costs more than attention. It depends on the file alone, so that its result does too.
const SMALL: u64 = 256 << 10;

#[derive(Serialize)]
struct Report {
    files: Vec<Line>,
    written: usize,
    failed: usize,
}

#[derive(Serialize)]
struct Line {
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    out: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Runs and writes.
pub fn run(request: &Request) -> Result<u8, Stop> {
    let target = case::device(request.device)?;
    let mut runner = Runner::new(&target)?;
    let inputs = files::find(request.files).map_err(|error| Stop::Failed(error.to_string()))?;
    let outputs = files::outputs(&inputs, request.files, request.out)?;
    for directory in directories(&outputs) {
        std::fs::create_dir_all(directory).map_err(|error| {
            Stop::Failed(format!("cannot create the directory {}: {error}", directory.display()))
        })?;
    }

    let progress = Progress::new(inputs.len(), !request.json);
    let work = |runner: &mut Runner, (input, output): (&Input, &PathBuf)| {
        let line = match one(runner, input, output) {
            Ok((kernel, seconds)) => Line {
                out: Some(output.display().to_string()),
                kernel: Some(kernel),
                seconds: Some(seconds),
                ..failed(input, None)
            },
            Err(problem) => {
                let message = problem.to_string();
                progress.aside(|| error(&format!("{}: {message}", input.path.display())));
                failed(input, Some(message))
            }
        };
        progress.step();
        line
    };
    // Small files together first, then the others one by one on all threads; reported in the order
    // of the arguments. A GPU takes all one by one.
    let mut lines: Vec<Option<Line>> = match &target {
        Target::Cpu(machine) => inputs
            .par_iter()
            .zip(&outputs)
            .map_init(
                || Runner::on(single(machine)),
                |runner, pair| (pair.0.bytes <= SMALL).then(|| work(runner, pair)),
            )
            .collect(),
        #[cfg(feature = "cuda")]
        Target::Cuda(_) => inputs.iter().map(|_| None).collect(),
        #[cfg(all(feature = "metal", target_vendor = "apple"))]
        Target::Metal => inputs.iter().map(|_| None).collect(),
        #[cfg(feature = "metal-host")]
        Target::MetalHost => inputs.iter().map(|_| None).collect(),
    };
    for (line, pair) in lines.iter_mut().zip(inputs.iter().zip(&outputs)) {
        if line.is_none() {
            *line = Some(work(&mut runner, pair));
        }
    }
    progress.finish();

    let files: Vec<_> = lines.into_iter().flatten().collect();
    let bad = files.iter().filter(|line| line.error.is_some()).count();
    let report = Report { written: files.len() - bad, failed: bad, files };
    if request.json {
        print_json(&report)?;
    } else {
        print(&format!("{} written, {} failed\n", report.written, report.failed))?;
    }
    Ok(if report.failed == 0 { 0 } else { FAILED })
}

fn single(machine: &Machine) -> Machine {
    machine.clone().with_threads(1)
}

fn failed(input: &Input, error: Option<String>) -> Line {
    Line { file: input.path.display().to_string(), out: None, kernel: None, seconds: None, error }
}

fn one(runner: &mut Runner, input: &Input, output: &Path) -> Result<(&'static str, f64), Error> {
    let case = case::read(&input.path)?;
    let run = runner.run(&case, 1, Duration::ZERO)?;
    let bytes = file::output_to_bytes(&run.output)?;
    files::write(output, &bytes).map_err(|error| {
        Error::argument(
            output.display().to_string(),
            format!("not writable ({error})"),
            "a path to write to",
        )
    })?;
    Ok((run.kernel, run.seconds))
}

/// The directories that results go to, each once.
fn directories(outputs: &[PathBuf]) -> Vec<&Path> {
    let mut directories: Vec<_> = outputs.iter().filter_map(|output| output.parent()).collect();
    directories.sort();
    directories.dedup();
    directories
}
