//! The command: `generate --model FILE --prompt TEXT`, or `--prompts FILE` for many at once.

use candle_core::{Device, Error, Result};
use clap::{Parser, ValueEnum};
use generate::attend::{Attend, Composed, Flash, Mode};
use generate::cache::CacheType;
use generate::engine::{Engine, Request, RequestId, Settings, alone};
use generate::model::{Llama, Weights};
use generate::text::{Stream, Text};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Text from a GGUF model of the Llama family, its attention computed by regard over a paged cache.
/// Always the likeliest token.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The model, a GGUF file
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// One question; the answer is printed as it comes
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "prompts",
        conflicts_with = "prompts"
    )]
    prompt: Option<String>,
    /// Many questions, one per line, served together
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Instructions to the model before each question
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the text as it stands, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Tokens of an answer, at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Do not stop before that many tokens
    #[arg(long)]
    ignore_stop: bool,
    /// Requests that run at once, at most
    #[arg(long, value_name = "N", default_value_t = Settings::default().requests)]
    requests: usize,
    /// Maximum tokens per step: decodes first, then chunks of prompts
    #[arg(long, value_name = "N", default_value_t = Settings::default().step_tokens)]
    step_tokens: usize,
    /// Pages of the cache
    #[arg(long, value_name = "N", default_value_t = Settings::default().blocks)]
    blocks: usize,
    /// Tokens per page
    #[arg(long, value_name = "N", default_value_t = Settings::default().block_size)]
    block_size: usize,
    /// Storage of keys and values in the cache
    #[arg(long, value_enum, default_value_t = CacheType::Model)]
    cache: CacheType,
    /// An answer's bits do not depend on the requests beside it
    #[arg(long)]
    batch_invariant: bool,
    /// Every request reads all of its pages, instead of reading shared ones together
    #[arg(long)]
    no_prefix_groups: bool,
    /// Compute and store every prompt on its own
    #[arg(long)]
    no_shared_prefixes: bool,
    /// Arithmetic of matrix products
    #[arg(long, value_enum, default_value_t = Weights::Quantised)]
    products: Weights,
    /// Device of the model: cpu, cuda or cuda:N
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = generate::device)]
    device: Device,
    /// Capture steps that only decode in CUDA graphs: one launch per step
    #[arg(long)]
    graphs: bool,
    /// Implementation of attention; candle's serves one request after the other
    #[arg(long, value_enum, default_value_t = Attention::Regard)]
    attention: Attention,
    /// Write prompts, answers and margins as token ids
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Arguments {
    fn mode(&self) -> Mode {
        match (self.batch_invariant, self.no_prefix_groups) {
            (true, _) => Mode::BatchInvariant,
            (false, true) => Mode::Flat,
            (false, false) => Mode::PrefixGroups,
        }
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Attention {
    /// regard over a paged cache
    Regard,
    /// Matrix product, mask, softmax, matrix product, as in candle's own Llama
    Candle,
    /// Candle's fused attention for CPUs
    CandleFlash,
}

/// One request and its answer.
#[derive(Serialize)]
struct Answer {
    text: String,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// Each token's score, less the runner-up's score.
    margins: Vec<f32>,
    answer: String,
}

fn main() -> std::process::ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let begun = Instant::now();
    let (model, content) = Llama::load(&arguments.model, arguments.products, &arguments.device)?;
    let text = Text::from_content(&content)?;
    eprintln!(
        "{}: {} layers, {}/{} heads of dim {}, loaded in {:.1} s",
        arguments.model.file_name().unwrap_or_default().to_string_lossy(),
        model.config().layers,
        model.config().heads,
        model.config().kv_heads,
        model.config().head_dim,
        begun.elapsed().as_secs_f64()
    );
    let questions = match (&arguments.prompts, &arguments.prompt) {
        (Some(file), _) => lines(file)?,
        (None, Some(prompt)) => vec![prompt.clone()],
        (None, None) => unreachable!("clap asks for one of the two"),
    };
    let mut answers = Vec::with_capacity(questions.len());
    for question in questions {
        let prompt = match arguments.raw {
            true => text.encode(&question, true)?,
            false => text.question(arguments.system.as_deref(), &question)?,
        };
        let (tokens, margins) = (Vec::new(), Vec::new());
        answers.push(Answer { text: question, prompt, tokens, margins, answer: String::new() });
    }
    match arguments.attention {
        Attention::Regard => serve(arguments, &model, &text, &mut answers)?,
        Attention::Candle | Attention::CandleFlash => {
            one_by_one(arguments, &model, &text, &mut answers)?
        }
    }
    if let Some(file) = &arguments.json {
        let json = serde_json::to_string_pretty(&answers).map_err(Error::wrap)?;
        std::fs::write(file, json + "\n")?;
    }
    Ok(())
}

fn lines(file: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| Error::msg(format!("cannot read {}: {error}", file.display())))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect())
}

fn request(arguments: &Arguments, text: &Text, answer: &Answer) -> Request {
    let stop = if arguments.ignore_stop { Vec::new() } else { text.stop().to_vec() };
    Request { prompt: answer.prompt.clone(), max_tokens: arguments.max_tokens, stop }
}

fn serve(arguments: &Arguments, model: &Llama, text: &Text, answers: &mut [Answer]) -> Result<()> {
    let settings = Settings {
        blocks: arguments.blocks,
        block_size: arguments.block_size,
        cache: arguments.cache,
        requests: arguments.requests,
        step_tokens: arguments.step_tokens,
        mode: arguments.mode(),
        share_prefixes: !arguments.no_shared_prefixes,
        graphs: arguments.graphs,
    };
    let mut engine = Engine::new(model, settings)?;
    let mut requests: BTreeMap<RequestId, (usize, Stream)> = BTreeMap::new();
    for (index, answer) in answers.iter().enumerate() {
        requests
            .insert(engine.submit(request(arguments, text, answer))?, (index, Stream::default()));
    }
    let alone = answers.len() == 1;
    let begun = Instant::now();
    let mut first_token = None;
    while !engine.is_idle() {
        for event in engine.step()? {
            first_token.get_or_insert_with(|| begun.elapsed());
            let (index, stream) =
                requests.get_mut(&event.request).expect("a request of this engine");
            let answer = &mut answers[*index];
            answer.tokens.push(event.token);
            answer.margins.push(event.margin);
            let new = stream.push(text, event.token)?;
            answer.answer += &new;
            if alone {
                print!("{new}");
                std::io::stdout().flush()?;
            } else if event.last {
                println!("[{}] {}\n{}\n", *index + 1, answer.text, answer.answer.trim());
            }
        }
    }
    if alone {
        println!();
    }
    let time = begun.elapsed().as_secs_f64();
    report(&engine, arguments, answers, time, first_token);
    Ok(())
}

fn report(
    engine: &Engine,
    arguments: &Arguments,
    answers: &[Answer],
    time: f64,
    first_token: Option<Duration>,
) {
    let first_token = first_token.unwrap_or_default().as_secs_f64();
    let found = engine.statistics();
    let generated: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let asked: usize = answers.iter().map(|answer| answer.prompt.len()).sum();
    eprintln!(
        "{asked} prompt tokens ({} computed, {} shared), first token after {first_token:.2} s",
        found.prompt_rows, found.shared_tokens
    );
    eprint!(
        "{generated} tokens in {time:.2} s: {:.1} tokens/s, {:.1} in steps that only decode",
        generated as f64 / time,
        found.decode_step_rows as f64 / found.decode_time.as_secs_f64(),
    );
    let share = found.decode_attention_time.as_secs_f64() / found.decode_time.as_secs_f64();
    match arguments.graphs {
        true => eprintln!(", {} of these graphs", found.graph_steps),
        false => eprintln!(", attention {:.0}% of these", 100.0 * share),
    }
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    eprint!(
        "{} steps, {} of them mixed, {} preemptions; at most {} pages of {} ({:.1} MiB)",
        found.steps,
        found.mixed_steps,
        found.preemptions,
        found.peak_blocks,
        arguments.cache.name(),
        mib(found.peak_blocks * engine.block_bytes())
    );
    match generate::peak_memory() {
        Some(bytes) => eprintln!(", process {:.0} MiB", mib(bytes)),
        None => eprintln!(),
    }
}

fn one_by_one(
    arguments: &Arguments,
    model: &Llama,
    text: &Text,
    answers: &mut [Answer],
) -> Result<()> {
    let begun = Instant::now();
    let many = answers.len() > 1;
    for (index, answer) in answers.iter_mut().enumerate() {
        let request = request(arguments, text, answer);
        let layers = model.config().layers;
        let mut attend: Box<dyn Attend> = match arguments.attention {
            Attention::CandleFlash if !arguments.device.is_cpu() => {
                candle_core::bail!("candle-flash is candle's fused attention for CPUs")
            }
            Attention::CandleFlash => {
                Box::new(Flash::new(layers, request.prompt.len() + request.max_tokens))
            }
            _ => Box::new(Composed::new(layers, 1, &arguments.device)?),
        };
        (answer.tokens, answer.margins) =
            alone(model, attend.as_mut(), &request)?.into_iter().unzip();
        answer.answer = text.decode(&answer.tokens)?;
        match many {
            true => println!("[{}] {}\n{}\n", index + 1, answer.text, answer.answer.trim()),
            false => println!("{}", answer.answer),
        }
    }
    let generated: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let time = begun.elapsed().as_secs_f64();
    eprintln!(
        "{generated} tokens in {time:.2} s: {:.1} tokens/s, one request after the other",
        generated as f64 / time
    );
    Ok(())
}
