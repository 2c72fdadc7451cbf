//! Measures the speed at which a model is served, and the share of attention. Writes JSON files,
//! which become a table and a picture.
//!
//! Each measurement takes about a minute. The machine should have nothing else to do.

#[cfg(feature = "candle-flash-attn")]
mod calls;
mod measure;
mod picture;
mod shapes;

use candle_core::{Device, Error, Result};
use clap::{Parser, Subcommand};
use generate::cache::CacheType;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Measure the speed at which a model is served, and the share of attention.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A decode step with candle's attention and with regard's: its time, and the share of
    /// attention
    Share {
        /// A GGUF file
        #[arg(long)]
        model: PathBuf,
        /// Tokens before the step
        #[arg(long, default_value_t = 2048)]
        context: usize,
        /// File of the results
        #[arg(long)]
        out: PathBuf,
    },
    /// Tokens per second at 1, 4 and 16 requests
    Rate {
        /// A GGUF file
        #[arg(long)]
        model: PathBuf,
        /// Tokens of each prompt
        #[arg(long, default_value_t = 512)]
        prompt: usize,
        /// File of the results
        #[arg(long)]
        out: PathBuf,
    },
    /// Peak memory, with and without shared prefixes
    Memory {
        /// A GGUF file
        #[arg(long)]
        model: PathBuf,
        /// Requests
        #[arg(long, default_value_t = 16)]
        requests: usize,
        /// Tokens that all prompts begin with
        #[arg(long, default_value_t = 1024)]
        shared: usize,
        /// File of the results
        #[arg(long)]
        out: PathBuf,
        /// Measure one way in this process, and print it
        #[arg(long, hide = true)]
        one: Option<bool>,
    },
    /// Tokens per second over a shared prompt, with and without prefix groups
    Prefix {
        /// A GGUF file
        #[arg(long)]
        model: PathBuf,
        /// Numbers of requests
        #[arg(long, value_delimiter = ',', default_value = "16,64")]
        requests: Vec<usize>,
        /// Tokens that all prompts begin with
        #[arg(long, default_value_t = 2048)]
        shared: usize,
        /// File of the results
        #[arg(long)]
        out: PathBuf,
    },
    /// Decode steps of models of real shapes and random weights, in bf16, with regard's attention
    /// and with candle's; with candle-flash-attn's too, if the build has it
    Shapes {
        /// llama-1b, llama-8b
        #[arg(long = "shape", value_delimiter = ',', default_value = "llama-1b,llama-8b")]
        shapes: Vec<String>,
        /// cpu, cuda or cuda:N
        #[arg(long, default_value = "cuda", value_parser = generate::device)]
        device: Device,
        /// Requests and tokens before the step, such as 16x512
        #[arg(
            long,
            value_delimiter = ',',
            value_parser = point,
            default_value = "1x512,16x512,64x512,256x512,8x2048,8x8192,8x32768"
        )]
        at: Vec<(usize, usize)>,
        /// regard's caches
        #[arg(long = "cache", value_enum, value_delimiter = ',', default_value = "model")]
        caches: Vec<CacheType>,
        /// Measure steps captured in CUDA graphs too
        #[arg(long)]
        graphs: bool,
        /// Leave candle's attention out
        #[arg(long)]
        no_candle: bool,
        /// File of the results
        #[arg(long)]
        out: PathBuf,
    },
    /// Calls of candle-flash-attn, and the same calls of regard-candle's functions of those names
    #[cfg(feature = "candle-flash-attn")]
    Calls,
    /// The table, in Markdown, and the picture
    Report {
        /// Files that `share`, `rate`, `memory` and `prefix` wrote, or files that `shapes` wrote
        #[arg(required = true)]
        results: Vec<PathBuf>,
        /// File of the picture
        #[arg(long)]
        plot: PathBuf,
    },
}

/// A decode step.
#[derive(Serialize, Deserialize)]
struct Step {
    products: String,
    attention: String,
    context: usize,
    /// Medians, in milliseconds.
    step_ms: f64,
    attention_ms: f64,
}

/// Requests served together.
#[derive(Serialize, Deserialize)]
struct Rate {
    products: String,
    requests: usize,
    prompt: usize,
    /// Tokens of all requests together, in steps that only decode.
    tokens_per_second: f64,
    attention_share: f64,
}

/// Memory with or without shared prefixes.
#[derive(Serialize, Deserialize)]
struct Memory {
    shared: bool,
    requests: usize,
    common_tokens: usize,
    pages_mib: f64,
    process_mib: f64,
    /// From the first step to the last answer.
    seconds: f64,
}

/// Decode steps of requests that share a prompt.
#[derive(Serialize, Deserialize)]
struct Prefixed {
    /// Whether the requests read the prompt's pages together.
    grouped: bool,
    requests: usize,
    common_tokens: usize,
    /// Medians, in milliseconds.
    step_ms: f64,
    attention_ms: f64,
}

/// A decode step of many requests.
#[derive(Serialize, Deserialize)]
struct Served {
    model: String,
    attention: String,
    /// The cache's type.
    cache: String,
    /// Whether the step is a CUDA graph.
    #[serde(default)]
    graph: bool,
    requests: usize,
    context: usize,
    /// Medians, in milliseconds; that of attention is not known of graphs.
    step_ms: f64,
    attention_ms: Option<f64>,
}

/// Requests and tokens, from `16x512`.
fn point(text: &str) -> std::result::Result<(usize, usize), String> {
    let parsed = text
        .split_once('x')
        .and_then(|(requests, context)| Some((requests.parse().ok()?, context.parse().ok()?)));
    parsed
        .filter(|&(requests, context): &(usize, usize)| requests > 0 && context > 0)
        .ok_or_else(|| "requests and tokens, such as 16x512".to_string())
}

/// The results of the measurements.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Results {
    steps: Vec<Step>,
    rates: Vec<Rate>,
    memory: Vec<Memory>,
    prefixes: Vec<Prefixed>,
    served: Vec<Served>,
}

fn main() -> std::process::ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("speed: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Share { model, context, out } => {
            write(&out, &Results { steps: measure::steps(&model, context)?, ..Results::default() })
        }
        Command::Rate { model, prompt, out } => {
            write(&out, &Results { rates: measure::rates(&model, prompt)?, ..Results::default() })
        }
        Command::Memory { model, requests, shared, one: Some(share), .. } => {
            let found = measure::memory(&model, requests, shared, share)?;
            println!("{}", serde_json::to_string(&found).map_err(Error::wrap)?);
            Ok(())
        }
        Command::Memory { model, requests, shared, out, one: None } => {
            // Each way in a process of its own: the most that a process had at once does not go
            // down again.
            let memory = [false, true].map(|share| {
                let arguments = [("--requests", requests), ("--shared", shared)]
                    .map(|(name, value)| [name.to_string(), value.to_string()])
                    .concat();
                let output = std::process::Command::new(std::env::current_exe()?)
                    .args([
                        "memory",
                        "--one",
                        if share { "true" } else { "false" },
                        "--out",
                        "-",
                        "--model",
                    ])
                    .arg(&model)
                    .args(arguments)
                    .stderr(std::process::Stdio::inherit())
                    .output()?;
                serde_json::from_slice(&output.stdout).map_err(Error::wrap)
            });
            write(
                &out,
                &Results {
                    memory: memory.into_iter().collect::<Result<_>>()?,
                    ..Results::default()
                },
            )
        }
        Command::Prefix { model, requests, shared, out } => {
            let prefixes = measure::prefixes(&model, &requests, shared)?;
            write(&out, &Results { prefixes, ..Results::default() })
        }
        Command::Shapes { shapes, device, at, caches, graphs, no_candle, out } => {
            let mut kinds = Vec::new();
            for cache in caches {
                kinds.push(shapes::Kind::Regard(cache));
                kinds.extend(graphs.then_some(shapes::Kind::Graph(cache)));
            }
            kinds.extend((!no_candle).then_some(shapes::Kind::Candle));
            #[cfg(feature = "candle-flash-attn")]
            kinds.push(shapes::Kind::Flash);
            let mut served = Vec::new();
            for shape in shapes {
                served.extend(shapes::served(&shape, &device, &at, &kinds)?);
            }
            print!("{}", shapes::table(&served));
            write(&out, &Results { served, ..Results::default() })
        }
        #[cfg(feature = "candle-flash-attn")]
        Command::Calls => {
            print!("{}", calls::table(&calls::measure()?));
            Ok(())
        }
        Command::Report { results, plot } => report(&results, &plot),
    }
}

/// Prints the table of those files, and draws the picture.
fn report(files: &[PathBuf], plot: &std::path::Path) -> Result<()> {
    let mut all = Results::default();
    for file in files {
        let text = std::fs::read_to_string(file)?;
        let Results { steps, rates, memory, prefixes, served } =
            serde_json::from_str(&text).map_err(Error::wrap)?;
        all.steps.extend(steps);
        all.rates.extend(rates);
        all.memory.extend(memory);
        all.prefixes.extend(prefixes);
        all.served.extend(served);
    }
    match all.served.is_empty() {
        true => print!("{}", table(&all)),
        false => print!("{}", shapes::table(&all.served)),
    }
    picture::draw(&all, plot).map_err(|error| Error::msg(error.to_string()))
}

fn write(file: &PathBuf, results: &Results) -> Result<()> {
    let text = serde_json::to_string_pretty(results).map_err(Error::wrap)?;
    std::fs::write(file, text + "\n")?;
    Ok(())
}

fn table(results: &Results) -> String {
    let mut text = String::new();
    let mut line = |line: String| text += &(line + "\n");
    if let Some(first) = results.steps.first() {
        line(format!(
            "| a decode step after {} tokens | whole step | attention | its share |",
            first.context
        ));
        line("|---|---|---|---|".into());
        for step in &results.steps {
            let Step { products, attention, step_ms, attention_ms, .. } = step;
            let share = 100.0 * attention_ms / step_ms;
            line(format!(
                "| {products} products, {attention} | {step_ms:.1} ms | {attention_ms:.2} ms | \
                 {share:.0}% |"
            ));
        }
        line(String::new());
    }
    if let Some(first) = results.rates.first() {
        line(format!(
            "| tokens per second, prompts of {} tokens | 1 request | 4 requests | 16 requests |",
            first.prompt
        ));
        line("|---|---|---|---|".into());
        for products in measure::PRODUCTS {
            let of = |requests: usize| {
                let rate = results
                    .rates
                    .iter()
                    .find(|rate| rate.products == products && rate.requests == requests);
                rate.map_or("-".to_string(), |rate| {
                    format!(
                        "{:.1} (attention {:.0}%)",
                        rate.tokens_per_second,
                        100.0 * rate.attention_share
                    )
                })
            };
            line(format!("| {products} products | {} | {} | {} |", of(1), of(4), of(16)));
        }
        line(String::new());
    }
    if let Some(first) = results.memory.first() {
        let Memory { requests, common_tokens, .. } = first;
        line(format!(
            "| {requests} requests with {common_tokens} tokens in common | pages | process | all \
             answered after |"
        ));
        line("|---|---|---|---|".into());
        for memory in &results.memory {
            let what = if memory.shared { "shared prefixes" } else { "every prompt on its own" };
            let Memory { pages_mib, process_mib, seconds, .. } = memory;
            line(format!(
                "| {what} | {pages_mib:.0} MiB | {process_mib:.0} MiB | {seconds:.1} s |"
            ));
        }
    }
    if let Some(first) = results.prefixes.first() {
        line(String::new());
        line(format!(
            "| requests over {} tokens in common | prefix groups | tokens per second | step | \
             attention | its share |",
            first.common_tokens
        ));
        line("|---|---|---|---|---|---|".into());
        for Prefixed { grouped, requests, step_ms, attention_ms, .. } in &results.prefixes {
            let (word, rate) = (if *grouped { "yes" } else { "no" }, 1e3 / step_ms);
            line(format!(
                "| {requests} | {word} | {:.1} | {step_ms:.1} ms | {attention_ms:.2} ms | {:.0}% |",
                rate * *requests as f64,
                100.0 * attention_ms / step_ms
            ));
        }
    }
    text
}
