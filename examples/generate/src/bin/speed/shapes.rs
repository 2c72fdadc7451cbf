//! Models of real shapes and random weights: the time of a decode step, and attention's part of it.

use super::Served;
use super::measure::{median, tokens};
use candle_core::{D, DType, Device, Result, Tensor};
use generate::attend::{Attend, Composed, Mode, Paged};
use generate::cache::{CacheType, rows_for};
#[cfg(feature = "candle-flash-attn")]
use generate::flash::PagedFlash;
use generate::graph::DecodeGraph;
use generate::model::{Config, Llama, Rows, Shape};
use regard::paged::{PageAllocator, SequenceId, Step};
use regard_candle::{CacheShape, PagedCache, attention_of_step};
use std::time::{Duration, Instant};

/// Steps that are not counted, and steps that are.
const WARM_UP: usize = 4;
const STEPS: usize = 16;
const BLOCK_SIZE: usize = 16;
/// Tokens of one append while a cache is filled.
const FILLED_AT_ONCE: usize = 4096;

/// A model's sizes by name, and two that are small enough for a test.
pub fn shape(name: &str) -> Result<Shape> {
    let small = |layers| {
        let Shape { config, .. } = Shape::llama_1b();
        let config = Config { layers, hidden: 256, heads: 4, kv_heads: 1, ..config };
        Shape { config, feed_forward: 512, vocabulary: 1024, tied: true }
    };
    match name {
        "llama-1b" => Ok(Shape::llama_1b()),
        "llama-8b" => Ok(Shape::llama_8b()),
        "tiny" => Ok(small(2)),
        _ => candle_core::bail!("{name}: allowed: llama-1b, llama-8b, tiny"),
    }
}

/// Random operands in bf16.
pub fn random(shape: &[usize], device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, device)?.to_dtype(DType::BF16)
}

/// Writes random keys and values to every slot, quantized where the cache is.
fn fill(cache: &PagedCache, device: &Device) -> Result<()> {
    let wrap = candle_core::Error::wrap;
    let CacheShape { layers, blocks, block_size, kv_heads, head_dim } = cache.shape();
    // One sequence that has all pages. Whoever gets them later finds them full.
    let mut pages = PageAllocator::new(blocks, block_size).map_err(wrap)?;
    let (sequence, mut step) = (pages.create(), Step::new());
    let slots = blocks * block_size;
    for begun in (0..slots).step_by(FILLED_AT_ONCE) {
        let rows = FILLED_AT_ONCE.min(slots - begun);
        step.clear();
        step.append(&mut pages, sequence, rows).map_err(wrap)?;
        step.finish(&pages).map_err(wrap)?;
        let attention = attention_of_step(&step, device)?;
        for layer in 0..layers {
            let [keys, values] = [(); 2].map(|()| random(&[rows, kv_heads, head_dim], device));
            let (keys, values) = (rows_for(cache, &keys?)?, rows_for(cache, &values?)?);
            match device.is_cpu() {
                true => cache.write(layer, &keys, &values, step.slots())?,
                false => cache.append(layer, &keys, &values, &attention)?,
            }
        }
    }
    Ok(())
}

/// A paged cache in which every sequence has its context.
struct Cache {
    cache: PagedCache,
    pages: PageAllocator,
    sequences: Vec<SequenceId>,
    step: Step,
}

impl Cache {
    fn new(
        model: &Llama,
        kind: CacheType,
        block_size: usize,
        (requests, context): (usize, usize),
    ) -> Result<Cache> {
        let wrap = candle_core::Error::wrap;
        let config = model.config();
        let blocks = requests * (context + WARM_UP + STEPS).div_ceil(block_size);
        let shape = CacheShape {
            layers: config.layers,
            blocks,
            block_size,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let cache = kind.pages(shape, DType::BF16, model.device())?;
        fill(&cache, model.device())?;
        let mut pages = PageAllocator::new(blocks, block_size).map_err(wrap)?;
        let sequences: Vec<SequenceId> = (0..requests).map(|_| pages.create()).collect();
        // In turns, so that the pages of a sequence are not neighbours.
        for begun in (0..context).step_by(block_size) {
            for &sequence in &sequences {
                // New pages only: there is nothing to copy, and nothing writes the slots.
                let _ = pages.append(sequence, block_size.min(context - begun)).map_err(wrap)?;
            }
        }
        Ok(Cache { cache, pages, sequences, step: Step::new() })
    }

    /// Adds a token to every sequence.
    fn advance(&mut self) -> Result<()> {
        let wrap = candle_core::Error::wrap;
        self.step.clear();
        for &sequence in &self.sequences {
            self.step.append(&mut self.pages, sequence, 1).map_err(wrap)?;
        }
        self.step.finish(&self.pages).map_err(wrap)
    }

    /// The attention of the next step.
    fn attend(&mut self, model: &Llama) -> Result<Paged<'_>> {
        self.advance()?;
        Paged::new(&self.cache, &self.step, model.weights(), Mode::Flat)
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// regard over a cache of that type.
    Regard(CacheType),
    /// The same, steps captured in a graph.
    Graph(CacheType),
    /// candle's products and softmax.
    Candle,
    /// candle-flash-attn's kernels.
    #[cfg(feature = "candle-flash-attn")]
    Flash,
}

/// The implementation that computes the attention.
enum Contender<'a> {
    Regard(Box<Cache>),
    Graph(Box<Cache>, Option<DecodeGraph<'a>>),
    Candle(Composed),
    #[cfg(feature = "candle-flash-attn")]
    Flash(Box<Cache>),
}

/// An implementation, with that many sequences and tokens in its cache.
fn contender<'a>(model: &'a Llama, kind: Kind, point: (usize, usize)) -> Result<Contender<'a>> {
    let cache = |kind, block_size| Cache::new(model, kind, block_size, point).map(Box::new);
    match kind {
        Kind::Regard(kind) => return Ok(Contender::Regard(cache(kind, BLOCK_SIZE)?)),
        Kind::Graph(kind) => return Ok(Contender::Graph(cache(kind, BLOCK_SIZE)?, None)),
        Kind::Candle => {}
        #[cfg(feature = "candle-flash-attn")]
        Kind::Flash => {
            return Ok(Contender::Flash(cache(CacheType::Model, PagedFlash::PAGE_STEP)?));
        }
    }
    let (requests, context) = point;
    let Config { layers, kv_heads, head_dim, .. } = *model.config();
    let mut composed = Composed::new(layers, requests, model.device())?;
    for layer in 0..layers {
        let shape = [requests, kv_heads, context, head_dim];
        composed.fill(layer, random(&shape, model.device())?, random(&shape, model.device())?);
    }
    Ok(Contender::Candle(composed))
}

/// Runs a step; the time in attention, if it is known.
fn run<'a>(
    model: &'a Llama,
    contender: &mut Contender<'a>,
    rows: Rows,
) -> Result<Option<Duration>> {
    let read = |scores: &Tensor| scores.argmax(D::Minus1)?.to_vec1::<u32>().map(drop);
    match contender {
        Contender::Regard(cache) => {
            let mut attend = cache.attend(model)?;
            read(&model.forward(rows, &mut attend)?)?;
            Ok(Some(attend.spent()))
        }
        Contender::Graph(cache, graph) => {
            cache.advance()?;
            match graph.as_ref().filter(|graph| graph.serves(&cache.step)) {
                Some(graph) => read(graph.replay(&cache.step, rows)?)?,
                None => {
                    let (new, scores) =
                        DecodeGraph::capture(model, &cache.cache, &cache.step, rows, false)?;
                    *graph = Some(new);
                    read(&scores)?;
                }
            }
            Ok(None)
        }
        Contender::Candle(attend) => {
            let before = attend.spent();
            read(&model.forward(rows, attend)?)?;
            Ok(Some(attend.spent() - before))
        }
        #[cfg(feature = "candle-flash-attn")]
        Contender::Flash(cache) => {
            cache.advance()?;
            let mut attend = PagedFlash::new(&cache.cache, &cache.step)?;
            read(&model.forward(rows, &mut attend)?)?;
            Ok(Some(attend.spent()))
        }
    }
}

/// Medians of a step and of its attention, in milliseconds.
fn decode<'a>(
    model: &'a Llama,
    contender: &mut Contender<'a>,
    (requests, context): (usize, usize),
) -> Result<(f64, Option<f64>)> {
    let (mut whole, mut part) = (Vec::new(), Vec::new());
    let (inputs, wanted) = (tokens(requests, 1), (0..requests as u32).collect::<Vec<_>>());
    let inputs: Vec<u32> = inputs.iter().map(|token| token % 1000).collect();
    for step in 0..WARM_UP + STEPS {
        let positions = vec![(context + step) as u32; requests];
        let rows = Rows { tokens: &inputs, positions: &positions, wanted: &wanted };
        let begun = Instant::now();
        let attention = run(model, contender, rows)?;
        let time = begun.elapsed();
        if step >= WARM_UP {
            whole.push(time.as_secs_f64() * 1e3);
            part.extend(attention.map(|time| time.as_secs_f64() * 1e3));
        }
    }
    let attention = (!part.is_empty()).then(|| median(part));
    Ok((median(whole), attention))
}

/// Decode steps of that many requests after that many tokens, of each kind. Points that do not fit
/// in memory are reported and left out.
pub fn served(
    name: &str,
    device: &Device,
    points: &[(usize, usize)],
    kinds: &[Kind],
) -> Result<Vec<Served>> {
    let begun = Instant::now();
    let model = Llama::random(&shape(name)?, device)?;
    device.synchronize()?;
    eprintln!("{name}: ready after {:.1} s", begun.elapsed().as_secs_f64());
    let mut found = Vec::new();
    for &(requests, context) in points {
        let point = (requests, context);
        for &kind in kinds {
            // The model computes in bf16.
            let cache_name = |kind| match kind {
                CacheType::Model => "bf16",
                _ => kind.name(),
            };
            let (attention, cache, graph) = match kind {
                Kind::Regard(kind) => ("regard", cache_name(kind), false),
                Kind::Graph(kind) => ("regard", cache_name(kind), true),
                Kind::Candle => ("candle", "bf16", false),
                #[cfg(feature = "candle-flash-attn")]
                Kind::Flash => ("candle-flash-attn", "bf16", false),
            };
            let in_graph = if graph { ", in a graph" } else { "" };
            let what = format!("{name}, {requests} x {context}, {attention}, {cache}{in_graph}");
            let times = contender(&model, kind, point)
                .and_then(|mut contender| decode(&model, &mut contender, point));
            let (step_ms, attention_ms) = match times {
                Ok(times) => times,
                Err(error) => {
                    eprintln!("{what}: {}", error.to_string().lines().next().unwrap_or_default());
                    continue;
                }
            };
            match attention_ms {
                Some(part) => eprintln!(
                    "{what}: {step_ms:.2} ms, attention {part:.3} ms, {:.1} us per layer",
                    1e3 * part / model.config().layers as f64
                ),
                None => eprintln!("{what}: {step_ms:.2} ms"),
            }
            let [model, attention, cache] = [name, attention, cache].map(str::to_string);
            found.push(Served {
                model,
                attention,
                cache,
                graph,
                requests,
                context,
                step_ms,
                attention_ms,
            });
        }
    }
    Ok(found)
}

/// What regard is compared with.
const PEERS: [&str; 2] = ["candle", "candle-flash-attn"];

/// The table, in Markdown.
pub fn table(served: &[Served]) -> String {
    let is_measured = |peer: &&str| served.iter().any(|served| served.attention == *peer);
    let peers: Vec<&str> = PEERS.into_iter().filter(is_measured).collect();
    let mut text = String::from(
        "| model | requests | tokens before the step | cache | regard: tokens/s | step | attention \
         | its share |",
    );
    for peer in &peers {
        text += &format!(" {peer}: tokens/s | attention | its share | regard to {peer} |");
    }
    text += &format!("\n|{}\n", "---|".repeat(8 + 4 * peers.len()));
    let rate = |served: &Served| served.requests as f64 / served.step_ms * 1e3;
    let attention = |served: &Served| match served.attention_ms {
        Some(ms) => format!("{ms:.2} ms | {:.0}%", 100.0 * ms / served.step_ms),
        None => "- | -".to_string(),
    };
    for ours in served.iter().filter(|served| served.attention == "regard") {
        let Served { model, cache, graph, requests, context, step_ms, .. } = ours;
        let graph = if *graph { ", graph" } else { "" };
        text += &format!(
            "| {model} | {requests} | {context} | {cache}{graph} | {:.0} | {step_ms:.2} ms | {} |",
            rate(ours),
            attention(ours)
        );
        for peer in &peers {
            let theirs = served.iter().find(|served| {
                served.attention == *peer
                    && (&served.model, served.requests, served.context)
                        == (model, *requests, *context)
            });
            text += &theirs.map_or(" not measured | | | |".to_string(), |theirs| {
                let ratio = rate(ours) / rate(theirs);
                format!(" {:.0} | {} | {ratio:.2}x |", rate(theirs), attention(theirs))
            });
        }
        text += "\n";
    }
    text
}
