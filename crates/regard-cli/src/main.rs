//! The `regard` command: what this machine offers, what would run, and attention on case files. Described in `docs/cli.md`.

mod case;
mod check;
mod files;
mod info;
mod output;
mod plan;
mod run;
mod shape;

use clap::{Args, Parser, Subcommand, builder::RangedU64ValueParser};
use output::{FAILED, Stop};
use std::path::PathBuf;
use std::process::ExitCode;

/// Exact attention for LLM inference: run, check and plan attention problems.
///
/// Exit status: 0 done; 1 something failed, or there was nothing to check; 2 the command was not understood; 3 no kernel of this version runs
/// that there.
#[derive(Parser)]
#[command(name = "regard", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what this machine offers: vector instructions, threads, caches, backends
    Info {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what would run for a problem on a machine, and why
    Plan(PlanArguments),
    /// Run case files and write their results
    Run(RunArguments),
    /// Run cases and judge the results
    Check(CheckArguments),
}

#[derive(Args)]
struct PlanArguments {
    /// A case file
    #[arg(required_unless_present = "shape", conflicts_with = "shape")]
    file: Option<PathBuf>,
    /// The problem as words, such as "hq=32 hkv=8 d=128 lq=1 lk=4096 causal"
    #[arg(long, value_name = "WORDS", long_help = shape::help())]
    shape: Option<String>,
    /// The machine to plan for, here or not: host, scalar, neon, avx2, avx512 (this CPU at that level), h200, a100, m2
    #[arg(long, value_name = "NAME", default_value = "host")]
    machine: String,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct RunArguments {
    /// Case files, and directories with case files in them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The directory to write results to, each under its input's name
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    device: DeviceArgument,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct CheckArguments {
    /// Case files, and directories with case files in them
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Judge about this many rows of each case, evenly spread, instead of all
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rows: Option<usize>,
    #[command(flatten)]
    device: DeviceArgument,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct DeviceArgument {
    /// The device to run on
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: String,
}

#[derive(Args)]
struct Common {
    /// Threads to use (all of this machine's)
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come this way too, on stdout.
            let status = u8::try_from(error.exit_code()).unwrap_or(FAILED);
            return ExitCode::from(if error.print().is_ok() { status } else { FAILED });
        }
    };
    let status = match arguments.command {
        Command::Info { json } => info::info(json),
        Command::Plan(arguments) => plan::plan(&plan::Request {
            file: arguments.file.as_deref(),
            shape: arguments.shape.as_deref(),
            machine: &arguments.machine,
            threads: arguments.common.threads,
            json: arguments.common.json,
        }),
        Command::Run(arguments) => with_threads(arguments.common.threads, || {
            run::run(&run::Request {
                files: &arguments.files,
                out: &arguments.out,
                device: &arguments.device.device,
                json: arguments.common.json,
            })
        }),
        Command::Check(arguments) => with_threads(arguments.common.threads, || {
            check::check(&check::Request {
                files: &arguments.files,
                device: &arguments.device.device,
                rows: arguments.rows,
                json: arguments.common.json,
            })
        }),
    };
    ExitCode::from(status.unwrap_or_else(Stop::report))
}

/// Does something with that many threads in the pool that everything runs on.
fn with_threads(threads: Option<usize>, work: impl FnOnce() -> Result<u8, Stop>) -> Result<u8, Stop> {
    if let Some(threads) = threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        pool.map_err(|error| Stop::Failed(format!("cannot start {threads} threads: {error}")))?;
    }
    work()
}
