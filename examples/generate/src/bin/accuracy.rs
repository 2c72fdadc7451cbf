//! The effect of the cache's storage on a model: `accuracy --model FILE --text FILE --prompts FILE`
//! prints, for each cache, bytes per token, the perplexity of a text, and the agreement of greedy
//! answers with the answers over the first cache.

use candle_core::{D, Device, Error, Result};
use clap::Parser;
use generate::attend::{Mode, Paged};
use generate::cache::CacheType;
use generate::engine::{Engine, Request, RequestId, Settings};
use generate::model::{Llama, Rows, Weights};
use generate::text::Text;
use regard_candle::CacheShape;
use regard_candle::regard::paged::{PageAllocator, Step};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Perplexity and greedy answers of a model, by the storage of its cache.
#[derive(Parser)]
struct Arguments {
    /// The model, a GGUF file
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// A text, of which the first tokens are predicted
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of the text
    #[arg(long, value_name = "N", default_value_t = 2000)]
    tokens: usize,
    /// Questions, one per line
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 128)]
    answer: usize,
    /// Arithmetic of matrix products
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    products: Weights,
    /// Caches; answers are compared with the answers over the first
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [
        CacheType::F16, CacheType::Bf16, CacheType::I8, CacheType::E4m3, CacheType::E5m2,
        CacheType::Q8_0, CacheType::Q4_0,
    ])]
    caches: Vec<CacheType>,
}

/// Rows of a step: with logits of the whole vocabulary, they take the memory.
const STEP_ROWS: usize = 128;
const BLOCK_SIZE: usize = 16;

fn main() -> std::process::ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("accuracy: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let (model, content) = Llama::load(&arguments.model, arguments.products, &Device::Cpu)?;
    let text = Text::from_content(&content)?;
    let read = |file: &PathBuf| {
        std::fs::read_to_string(file)
            .map_err(|error| Error::msg(format!("cannot read {}: {error}", file.display())))
    };
    let mut tokens = text.encode(&read(&arguments.text)?, true)?;
    tokens.truncate(arguments.tokens);
    let questions = read(&arguments.prompts)?;
    let questions: Vec<_> = questions.lines().filter(|line| !line.trim().is_empty()).collect();
    println!(
        "| cache | bytes per token | perplexity of {} tokens | answers that differ | \
         tokens until then, median |",
        tokens.len()
    );
    println!("|---|--:|--:|--:|--:|");
    let mut first: Option<Vec<Vec<u32>>> = None;
    for &cache in &arguments.caches {
        let perplexity = perplexity(&model, cache, &tokens)?;
        let (answers, bytes) = answers(&model, cache, &text, &questions, arguments.answer)?;
        let reference = first.get_or_insert_with(|| answers.clone());
        let mut agreed: Vec<usize> = answers
            .iter()
            .zip(reference.iter())
            .filter(|(answer, reference)| answer != reference)
            .map(|(answer, reference)| {
                answer.iter().zip(reference).take_while(|(a, b)| a == b).count()
            })
            .collect();
        agreed.sort_unstable();
        let median = agreed.get(agreed.len() / 2).map_or("-".into(), usize::to_string);
        println!(
            "| {} | {bytes} | {perplexity:.3} | {} of {} | {median} |",
            cache.name(),
            agreed.len(),
            answers.len()
        );
    }
    Ok(())
}

/// The exponential of the mean negative log-probability of each token but the first.
fn perplexity(model: &Llama, cache: CacheType, tokens: &[u32]) -> Result<f64> {
    let config = model.config();
    let blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let shape = CacheShape {
        layers: config.layers,
        blocks,
        block_size: BLOCK_SIZE,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
    };
    let pool = cache.pages(shape, model.weights().dtype(), model.device())?;
    let mut pages = PageAllocator::new(blocks, BLOCK_SIZE).map_err(Error::wrap)?;
    let sequence = pages.create();
    let mut step = Step::new();
    let (mut total, mut computed) = (0.0, 0);
    let inputs = &tokens[..tokens.len().saturating_sub(1)];
    for rows in inputs.chunks(STEP_ROWS) {
        step.clear();
        step.append(&mut pages, sequence, rows.len()).map_err(Error::wrap)?;
        step.finish(&pages).map_err(Error::wrap)?;
        let mut attend = Paged::new(&pool, &step, model.weights(), Mode::Flat)?;
        let wanted: Vec<u32> = (0..rows.len() as u32).collect();
        let rows = Rows { tokens: rows, positions: step.positions(), wanted: &wanted };
        let logits = model.forward(rows, &mut attend)?;
        let normalizers = logits.log_sum_exp(D::Minus1)?.to_vec1::<f32>()?;
        for (row, normalizer) in logits.to_vec2::<f32>()?.iter().zip(normalizers) {
            computed += 1;
            total += f64::from(normalizer - row[tokens[computed] as usize]);
        }
    }
    Ok((total / computed.max(1) as f64).exp())
}

/// Greedy answers, and bytes of the cache per token.
fn answers(
    model: &Llama,
    cache: CacheType,
    text: &Text,
    questions: &[&str],
    max_tokens: usize,
) -> Result<(Vec<Vec<u32>>, usize)> {
    // Only the caches are compared: no answer depends on the requests that ran beside it.
    let settings = Settings { cache, mode: Mode::BatchInvariant, ..Settings::default() };
    let mut engine = Engine::new(model, settings)?;
    let mut requests: BTreeMap<RequestId, usize> = BTreeMap::new();
    for (index, question) in questions.iter().enumerate() {
        let prompt = text.question(None, question)?;
        let request = Request { prompt, max_tokens, stop: text.stop().to_vec() };
        requests.insert(engine.submit(request)?, index);
    }
    let mut answers = vec![Vec::new(); questions.len()];
    while !engine.is_idle() {
        for event in engine.step()? {
            answers[requests[&event.request]].push(event.token);
        }
    }
    Ok((answers, engine.block_bytes() / settings.block_size))
}
