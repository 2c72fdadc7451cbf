//! The measurements.

use super::{Memory, Prefixed, Rate, Step};
use candle_core::{Device, Result, Tensor};
use generate::attend::{Attend, Composed, Flash, Mode, Paged};
use generate::engine::{Engine, Request, Settings};
use generate::model::{Llama, Rows, Weights};
use regard::paged::PageAllocator;
use regard_candle::{CacheShape, PagedCache};
use std::path::Path;
use std::time::{Duration, Instant};

/// Arithmetic of matrix products, as the results name it.
pub const PRODUCTS: [&str; 2] = ["f32", "quantized"];

/// Rounds, in each of which all attentions take turns, so that a machine that changes its pace does
/// so for all.
const ROUNDS: usize = 5;
/// Steps of a turn; the first is not counted.
const STEPS: usize = 5;

fn load(model: &Path, products: &str) -> Result<Llama> {
    let weights = if products == "f32" { Weights::F32 } else { Weights::Quantised };
    Ok(Llama::load(model, weights, &Device::Cpu)?.0)
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Text that no model was asked for: token ids that differ from each other and from request to
/// request.
pub fn tokens(count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| 20 + ((i * 7919 + seed * 104_729) % 20_000) as u32).collect()
}

/// The implementation that computes the attention of one sequence, its cache full up to the
/// context.
enum Contender {
    Candle(Box<dyn Attend>),
    Regard { cache: Box<PagedCache>, pages: PageAllocator, sequence: regard::paged::SequenceId },
}

impl Contender {
    /// Runs the model for one token more, or only attention for `rows` random ones; returns the
    /// time in attention.
    fn advance(
        &mut self,
        rows: usize,
        weights: Weights,
        run: &mut dyn FnMut(&mut dyn Attend) -> Result<()>,
    ) -> Result<Duration> {
        match self {
            Contender::Candle(attend) => {
                let before = attend.spent();
                run(attend.as_mut())?;
                Ok(attend.spent() - before)
            }
            Contender::Regard { cache, pages, sequence } => {
                let mut step = regard::paged::Step::new();
                let wrap = candle_core::Error::wrap;
                step.append(pages, *sequence, rows).map_err(wrap)?;
                step.finish(pages).map_err(wrap)?;
                let mut attend = Paged::new(cache, &step, weights, Mode::Flat)?;
                run(&mut attend)?;
                Ok(attend.spent())
            }
        }
    }
}

/// A decode step after `context` tokens, with each attention.
pub fn steps(model: &Path, context: usize) -> Result<Vec<Step>> {
    let mut found = Vec::new();
    for products in PRODUCTS {
        let model = load(model, products)?;
        let config = model.config().clone();
        let (layers, room) = (config.layers, context + ROUNDS * STEPS + 1);
        let block_size = Settings::default().block_size;
        let blocks = room.div_ceil(block_size);
        let shape = CacheShape {
            layers,
            blocks,
            block_size,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let mut pages = PageAllocator::new(blocks, block_size).map_err(candle_core::Error::wrap)?;
        let sequence = pages.create();
        let cache = PagedCache::new(shape, candle_core::DType::F32, &Device::Cpu)?;
        let mut contenders = [
            (
                "candle's attention (products and softmax, as in its Llama)",
                Contender::Candle(Box::new(Composed::new(layers, 1, &Device::Cpu)?)),
            ),
            (
                "candle's attention (`flash_attn`)",
                Contender::Candle(Box::new(Flash::new(layers, room))),
            ),
            ("regard", Contender::Regard { cache: Box::new(cache), pages, sequence }),
        ];
        let mut times: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); contenders.len()];
        for (_, contender) in &mut contenders {
            // The time does not depend on the contents of keys: random keys fill the cache, a layer
            // at a time.
            contender.advance(context, model.weights(), &mut |attend| {
                (0..layers).try_for_each(|layer| {
                    let random = |heads| {
                        Tensor::randn(0f32, 1., (context, heads, config.head_dim), &Device::Cpu)
                    };
                    let (q, k, v) =
                        (random(config.heads)?, random(config.kv_heads)?, random(config.kv_heads)?);
                    attend.attend(layer, &q, &k, &v).map(drop)
                })
            })?;
        }
        for round in 0..ROUNDS {
            for ((_, contender), (whole, part)) in contenders.iter_mut().zip(&mut times) {
                for step in 0..STEPS {
                    let position = [(context + round * STEPS + step) as u32];
                    let rows = Rows { tokens: &[40], positions: &position, wanted: &[0] };
                    let begun = Instant::now();
                    let attention = contender.advance(1, model.weights(), &mut |attend| {
                        model.forward(rows, attend)?.to_vec2::<f32>().map(drop)
                    })?;
                    if step > 0 {
                        whole.push(begun.elapsed().as_secs_f64() * 1e3);
                        part.push(attention.as_secs_f64() * 1e3);
                    }
                }
            }
        }
        for ((attention, _), (whole, part)) in contenders.into_iter().zip(times) {
            let (step_ms, attention_ms) = (median(whole), median(part));
            eprintln!(
                "{products} products, {attention}: {step_ms:.1} ms, attention {attention_ms:.2} ms"
            );
            let (products, attention) = (products.to_string(), attention.to_string());
            found.push(Step { products, attention, context, step_ms, attention_ms });
        }
    }
    Ok(found)
}

fn serve(
    engine: &mut Engine,
    prompts: impl IntoIterator<Item = Vec<u32>>,
    max_tokens: usize,
) -> Result<()> {
    for prompt in prompts {
        engine.submit(Request { prompt, max_tokens, stop: Vec::new() })?;
    }
    while !engine.is_idle() {
        engine.step()?;
    }
    Ok(())
}

/// Requests that are served together; all begin with the same `prompt` tokens but for the last few,
/// as with a system prompt.
pub fn rates(model: &Path, prompt: usize) -> Result<Vec<Rate>> {
    let mut found = Vec::new();
    for products in PRODUCTS {
        let model = load(model, products)?;
        for requests in [1, 4, 16] {
            let mut engine = Engine::new(&model, Settings::default())?;
            let prompts = (0..requests).map(|i| [tokens(prompt - 8, 0), tokens(8, i + 1)].concat());
            serve(&mut engine, prompts, if products == "f32" { 48 } else { 16 })?;
            let statistics = engine.statistics();
            let time = statistics.decode_time.as_secs_f64();
            let tokens_per_second = statistics.decode_step_rows as f64 / time;
            let attention_share = statistics.decode_attention_time.as_secs_f64() / time;
            eprintln!("{products} products, {requests} requests: {tokens_per_second:.1} tokens/s");
            found.push(Rate {
                products: products.into(),
                requests,
                prompt,
                tokens_per_second,
                attention_share,
            });
        }
    }
    Ok(found)
}

/// Requests with `common` tokens in common, in this process.
pub fn memory(model: &Path, requests: usize, common: usize, share: bool) -> Result<Memory> {
    let model = load(model, "f32")?;
    let blocks = requests * (common + 128).div_ceil(Settings::default().block_size);
    let mut engine = Engine::new(
        &model,
        Settings { blocks, requests, share_prefixes: share, ..Settings::default() },
    )?;
    let prompts = (0..requests).map(|i| [tokens(common, 0), tokens(16, i + 1)].concat());
    let begun = Instant::now();
    serve(&mut engine, prompts, 32)?;
    let seconds = begun.elapsed().as_secs_f64();
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let pages_mib = mib(engine.statistics().peak_blocks * engine.block_bytes());
    let process_mib = generate::peak_memory().map_or(f64::NAN, mib);
    eprintln!(
        "shared {share}: pages {pages_mib:.0} MiB, process {process_mib:.0} MiB, {seconds:.1} s"
    );
    Ok(Memory { shared: share, requests, common_tokens: common, pages_mib, process_mib, seconds })
}

/// Tokens of each request's own question, and of its answer.
const QUESTION: usize = 16;
const ANSWER: usize = 64;
/// Steps that a setting takes before the other setting's turn.
const TURN: usize = 4;

/// An engine of one setting, and the times of its decode steps in milliseconds.
struct Contestant<'a> {
    mode: Mode,
    engine: Engine<'a>,
    steps: Vec<f64>,
    attention: Vec<f64>,
}

impl Contestant<'_> {
    /// Runs a step; keeps its times if it decoded all requests and did nothing else.
    fn advance(&mut self, requests: usize) -> Result<()> {
        let before = self.engine.statistics();
        self.engine.step()?;
        let after = self.engine.statistics();
        if after.decode_step_rows - before.decode_step_rows == requests {
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            self.steps.push(ms(after.decode_time - before.decode_time));
            self.attention.push(ms(after.decode_attention_time - before.decode_attention_time));
        }
        Ok(())
    }
}

/// Decode steps over a shared prompt of `common` tokens, with prefix groups and without. Both
/// settings serve the same requests in this process and take turns.
pub fn prefixes(model: &Path, requests: &[usize], common: usize) -> Result<Vec<Prefixed>> {
    let model = load(model, "f32")?;
    let mut found = Vec::new();
    for &requests in requests {
        let block_size = Settings::default().block_size;
        let own = (QUESTION + ANSWER).div_ceil(block_size) + 1;
        let blocks = common.div_ceil(block_size) + requests * own;
        let mut served = Vec::new();
        for mode in [Mode::Flat, Mode::PrefixGroups] {
            let settings =
                Settings { blocks, requests, step_tokens: 256, mode, ..Settings::default() };
            let mut engine = Engine::new(&model, settings)?;
            for i in 0..requests {
                let prompt = [tokens(common, 0), tokens(QUESTION, i + 1)].concat();
                engine.submit(Request { prompt, max_tokens: ANSWER, stop: Vec::new() })?;
            }
            served.push(Contestant { mode, engine, steps: Vec::new(), attention: Vec::new() });
        }
        while served.iter().any(|contestant| !contestant.engine.is_idle()) {
            for contestant in &mut served {
                (0..TURN).try_for_each(|_| contestant.advance(requests))?;
            }
        }
        for Contestant { mode, steps, attention, .. } in served {
            let count = steps.len();
            let (step_ms, attention_ms) = (median(steps), median(attention));
            eprintln!(
                "{requests} requests, {mode:?}: {:.1} tokens/s; step {step_ms:.1} ms, attention \
                 {attention_ms:.2} ms; medians of {count} steps",
                requests as f64 * 1e3 / step_ms
            );
            let grouped = mode == Mode::PrefixGroups;
            found.push(Prefixed {
                grouped,
                requests,
                common_tokens: common,
                step_ms,
                attention_ms,
            });
        }
    }
    Ok(found)
}
