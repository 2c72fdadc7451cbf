//! The `regard` command: the facts of this machine, plans for problems, and attention on case
//! files. Described in `docs/cli.md`.

mod bench;
mod case;
mod check;
mod coverage;
#[cfg(test)]
mod documents;
mod files;
mod info;
mod memory;
mod models;
mod output;
mod plan;
mod random;
mod run;
mod shape;

use clap::{Args, Parser, Subcommand, builder::RangedU64ValueParser};
use output::{FAILED, Stop, usage_error};
use regard_cases::random::Profile;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Exact attention for LLM inference: run, check and plan attention problems.
///
/// Exit status: 0 done; 1 something failed, or there was nothing to check; 2 the command was not
/// understood; 3 no kernel of this version runs that there.
#[derive(Parser)]
#[command(name = "regard", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the facts of this machine: vector instructions, threads, caches, backends
    Info {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the plan for a problem on a machine, and why
    Plan(PlanArguments),
    /// Run case files and write their results
    Run(RunArguments),
    /// Run cases and judge the results
    Check(CheckArguments),
    /// Measure the speed of attention here, next to the machine's ceilings
    Bench(Box<BenchArguments>),
}

#[derive(Args)]
struct PlanArguments {
    /// A case file
    #[arg(
        required_unless_present_any = ["shape", "models"],
        conflicts_with_all = ["shape", "models"]
    )]
    file: Option<PathBuf>,
    /// The problem as words, such as "hq=32 hkv=8 d=128 lq=1 lk=4096 causal"
    #[arg(long, value_name = "WORDS", long_help = shape::help(), conflicts_with = "models")]
    shape: Option<String>,
    #[command(flatten)]
    models: ModelArguments,
    #[arg(long, value_name = "NAME", default_value = "host", help = machine_help())]
    machine: String,
    #[command(flatten)]
    common: Common,
}

#[derive(Args)]
struct ModelArguments {
    #[arg(
        long = "model",
        value_name = "NAMES",
        value_delimiter = ',',
        help = model_help()
    )]
    models: Vec<String>,
    #[arg(
        long = "workload",
        value_name = "NAMES",
        value_delimiter = ',',
        requires = "models",
        help = workload_help()
    )]
    workloads: Vec<String>,
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
    #[arg(
        required_unless_present_any = ["cases", "laws", "random", "coverage"],
        value_name = "FILE"
    )]
    files: Vec<PathBuf>,
    #[command(flatten)]
    random: RandomArguments,
    /// Check the built-in cases too: all, or the cases whose names start with PREFIX
    #[arg(long, value_name = "PREFIX", num_args = 0..=1, default_missing_value = "")]
    cases: Option<String>,
    /// Only cases whose names contain this
    #[arg(long, value_name = "SUBSTRING")]
    filter: Option<String>,
    /// Check laws that hold on a GPU too: all, or the laws whose names contain SUBSTRING
    #[arg(long, value_name = "SUBSTRING", num_args = 0..=1, default_missing_value = "")]
    laws: Option<String>,
    /// Neither the cases nor the laws whose names contain this
    #[arg(long, value_name = "SUBSTRING", conflicts_with = "coverage")]
    without: Option<String>,
    /// Run every kernel that ships for a GPU with every feature that it accepts, alone and in pairs
    #[arg(long, conflicts_with_all = ["files", "cases", "laws", "random"])]
    coverage: bool,
    /// Judge about this many rows of each case, evenly spread, instead of all
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rows: Option<usize>,
    /// Run each case up to N times, to print its shortest time [default: 5]
    #[arg(
        long,
        value_name = "N",
        value_parser = RangedU64ValueParser::<usize>::new().range(1..),
        conflicts_with_all = ["coverage", "random"]
    )]
    repeat: Option<usize>,
    #[command(flatten)]
    device: DeviceArgument,
    #[command(flatten)]
    common: Common,
}

/// Arguments that conflict with random problems.
const NOT_RANDOM: [&str; 6] = ["files", "cases", "laws", "filter", "without", "rows"];

#[derive(Args)]
struct RandomArguments {
    /// Try this many random problems instead
    #[arg(long, value_name = "N", conflicts_with_all = NOT_RANDOM)]
    random: Option<u64>,
    /// Seed of the problems [default: a new number, which is printed]
    #[arg(long, value_name = "SEED", requires = "random", conflicts_with_all = NOT_RANDOM)]
    seed: Option<u64>,
    /// The number of the first problem
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        requires = "random",
        conflicts_with_all = NOT_RANDOM
    )]
    first: u64,
    /// The kind of problems: all, small (for emulators), prefill (small ones that CUDA's prefill
    /// kernels take), batches (many short sequences over blocks of several heads)
    #[arg(
        long,
        value_name = "NAME",
        default_value = "all",
        value_parser = profile,
        requires = "random",
        conflicts_with_all = NOT_RANDOM
    )]
    profile: Profile,
    /// SIMD levels of the CPU: detected, or all, with every way to multiply bf16
    #[arg(
        long,
        value_name = "WHICH",
        default_value = "detected",
        value_parser = ["detected", "all"],
        requires = "random",
        conflicts_with_all = NOT_RANDOM
    )]
    levels: String,
    /// The directory for case files of problems that fail
    #[arg(
        long,
        value_name = "DIR",
        default_value = "failures",
        requires = "random",
        conflicts_with_all = NOT_RANDOM
    )]
    out: PathBuf,
}

#[derive(Args)]
struct BenchArguments {
    #[arg(value_name = "NAME", help = names_help(), conflicts_with_all = ["from", "models"])]
    names: Vec<String>,
    /// A shape in words, such as "hq=32 hkv=8 d=128 lq=1 lk=4096 causal"; repeatable
    #[arg(
        long = "shape",
        value_name = "WORDS",
        long_help = shape::help(),
        conflicts_with_all = ["from", "models"]
    )]
    shapes: Vec<String>,
    #[command(flatten)]
    models: ModelArguments,
    /// Words on top of every shape, such as "softcap" or "page=16 window=512,0"; repeatable, each
    /// is a run of its own, and "plain" is the shape as it is
    #[arg(long = "with", value_name = "WORDS", conflicts_with = "from")]
    variants: Vec<String>,
    /// Types of operands: f32, bf16, f16 (all three)
    #[arg(long, value_name = "TYPES", value_delimiter = ',', conflicts_with = "from")]
    dtype: Vec<String>,
    /// Orders of dimensions in memory: token (batch, sequence, head, dim; the default), head
    /// (batch, head, sequence, dim)
    #[arg(
        long,
        value_name = "ORDERS",
        value_delimiter = ',',
        value_parser = layout,
        conflicts_with = "from"
    )]
    layout: Vec<bench::Layout>,
    /// Run every shape at each of these lengths instead of its own
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', conflicts_with = "from")]
    lengths: Vec<usize>,
    /// Leave operands in the caches: no rotation over copies
    #[arg(long, conflicts_with = "from")]
    warm: bool,
    /// Compute the schedule of a step once per N runs, as a model of N layers does (CUDA only)
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with = "from"
    )]
    layers: Option<u32>,
    /// Seconds to pause before each timed graph: a GPU that works without pause comes to its power
    /// limit (CUDA only)
    #[arg(long, value_name = "S", value_parser = seconds, conflicts_with = "from")]
    pause: Option<f64>,
    /// Measure every shape with each of these numbers of threads, with the same operands (CPU only)
    #[arg(
        long,
        value_name = "THREADS",
        value_delimiter = ',',
        conflicts_with_all = ["from", "models", "plot", "threads"]
    )]
    scaling: Vec<usize>,
    /// Seconds to run each shape, at least
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = seconds)]
    seconds: f64,
    /// Minimum number of runs of each shape
    #[arg(
        long,
        value_name = "N",
        default_value_t = 5,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=1_000_000)
    )]
    repeat: usize,
    /// Seconds to wait, at most, before each shape until other processes are idle (Linux)
    #[arg(long, value_name = "S", default_value_t = 0.0, value_parser = seconds)]
    wait: f64,
    /// Judge about this many rows of each result, evenly spread
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..)
    )]
    rows: usize,
    /// Do not measure the machine's ceilings
    #[arg(long, conflicts_with = "from")]
    no_ceilings: bool,
    /// Show these result files instead of measuring; repeatable, several rounds become one by their
    /// medians
    #[arg(long, value_name = "FILE", conflicts_with = "models")]
    from: Vec<PathBuf>,
    /// Compare with this result file, of a peer or of an earlier run; repeatable
    #[arg(long, value_name = "FILE")]
    against: Vec<PathBuf>,
    /// Write results to this file too, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Draw throughput against length and the roofline; measures a series of lengths for it, unless
    /// --lengths or --from is given
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print the table as markdown
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
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
    #[arg(
        long,
        value_name = "N",
        value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024)
    )]
    threads: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn machine_help() -> String {
    format!("The machine to plan for, here or not: {}", regard::Machine::NAMES.join(", "))
}

fn model_help() -> String {
    format!(
        "The attention layers of these models, separated by commas: {}, all",
        models::model_names()
    )
}

fn workload_help() -> String {
    format!(
        "Steps of an engine that the models run: {}, all [default: some]",
        models::workload_names()
    )
}

fn names_help() -> String {
    let names: Vec<_> = bench::NAMED.iter().map(|named| named.name).collect();
    format!(
        "Shapes to run: {}; or prefill, decode, mla, verify, bounds, latency, all \
         [default: all]",
        names.join(", ")
    )
}

fn layout(name: &str) -> Result<bench::Layout, String> {
    match name {
        "token" => Ok(bench::Layout::TokenMajor),
        "head" => Ok(bench::Layout::HeadMajor),
        _ => Err("allowed: token, head".into()),
    }
}

fn profile(name: &str) -> Result<Profile, String> {
    match name {
        "all" => Ok(Profile::All),
        "small" => Ok(Profile::Small),
        "prefill" => Ok(Profile::Prefill),
        "batches" => Ok(Profile::Batches),
        _ => Err("allowed: all, small, prefill, batches".into()),
    }
}

/// A time on the command line: not negative, and no longer than a day.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("allowed: a number of seconds, 0 to 86400".into()),
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come this way too, on stdout.
            let status = u8::try_from(error.exit_code()).unwrap_or(FAILED);
            if error.use_stderr() {
                usage_error(&error.render().to_string());
                return ExitCode::from(status);
            }
            return ExitCode::from(if error.print().is_ok() { status } else { FAILED });
        }
    };
    let status = match arguments.command {
        Command::Info { json } => info::info(json),
        Command::Plan(arguments) => plan::plan(&plan::Request {
            file: arguments.file.as_deref(),
            shape: arguments.shape.as_deref(),
            models: &arguments.models.models,
            workloads: &arguments.models.workloads,
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
        Command::Check(arguments) => with_threads(arguments.common.threads, || check(&arguments)),
        Command::Bench(arguments) => with_threads(arguments.common.threads, || measure(&arguments)),
    };
    ExitCode::from(status.unwrap_or_else(Stop::report))
}

/// Checks random problems, the coverage of a GPU's kernels, or cases and laws.
fn check(arguments: &CheckArguments) -> Result<u8, Stop> {
    let CheckArguments { random, device, common, .. } = arguments;
    if let Some(count) = random.random {
        return random::check(&random::Request {
            count,
            seed: random.seed,
            first: random.first,
            profile: random.profile,
            all_levels: random.levels == "all",
            out: &random.out,
            device: &device.device,
            json: common.json,
        });
    }
    if arguments.coverage {
        return coverage::check(&coverage::Request {
            device: &device.device,
            filter: arguments.filter.as_deref(),
            rows: arguments.rows,
            json: common.json,
        });
    }
    check::check(&check::Request {
        files: &arguments.files,
        cases: arguments.cases.as_deref(),
        filter: arguments.filter.as_deref(),
        laws: arguments.laws.as_deref(),
        without: arguments.without.as_deref(),
        device: &device.device,
        rows: arguments.rows,
        repeat: arguments.repeat,
        json: common.json,
    })
}

/// Measures speed.
fn measure(arguments: &BenchArguments) -> Result<u8, Stop> {
    bench::bench(&bench::Request {
        names: &arguments.names,
        shapes: &arguments.shapes,
        models: &arguments.models.models,
        workloads: &arguments.models.workloads,
        variants: &arguments.variants,
        dtypes: &arguments.dtype,
        layouts: &arguments.layout,
        lengths: &arguments.lengths,
        warm: arguments.warm,
        layers: arguments.layers.map(|layers| layers as usize),
        device: &arguments.device.device,
        effort: bench::Effort {
            time: Duration::from_secs_f64(arguments.seconds),
            repetitions: arguments.repeat,
            wait: Duration::from_secs_f64(arguments.wait),
            pause: arguments.pause.map(Duration::from_secs_f64),
            rows: arguments.rows,
        },
        scaling: &arguments.scaling,
        ceilings: !arguments.no_ceilings,
        from: &arguments.from,
        against: &arguments.against,
        out: arguments.out.as_deref(),
        plot: arguments.plot.as_deref(),
        markdown: arguments.markdown,
        json: arguments.common.json,
    })
}

/// Does something with that many threads: in plans for this machine's CPU, and in the pool that
/// files are shared out on.
fn with_threads(
    threads: Option<usize>,
    work: impl FnOnce() -> Result<u8, Stop>,
) -> Result<u8, Stop> {
    let threads = case::set_threads(threads)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    // One thread is this one: none has to be started.
    let pool = if threads == 1 { pool.use_current_thread() } else { pool };
    pool.build_global().map_err(|error| {
        let hint = if threads == 1 { "" } else { "; `--threads 1` starts none" };
        Stop::Failed(format!("cannot start {threads} threads: {error}{hint}"))
    })?;
    work()
}
