//! The implementations of attention: regard over a paged cache, and for comparison candle's
//! attention over one sequence's cache.

use crate::cache::rows_for;
use crate::model::Weights;
use crate::stopwatch::Stopwatch;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::kv_cache::KvCache;
use regard::paged::Step;
use regard_candle::{
    Attention, Execution, PagedCache, Threads, attention_of_step, grouped_attention_of_step,
};
use std::time::Duration;

/// Attention of a model: keeps the keys and values of new tokens, and attends to all that a row
/// sees.
pub trait Attend {
    /// `q` is `[rows, Hq, D]`, `k` and `v` `[rows, Hkv, D]`; so is the result to `q`.
    ///
    /// # Errors
    /// If the operands do not fit.
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;

    /// Time spent in [`Attend::attend`], the keeping of keys and values included.
    fn spent(&self) -> Duration;
}

/// The effect that sequences of a step may have on each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// Sequences that share pages read them together.
    #[default]
    PrefixGroups,
    /// Each sequence reads all of its pages.
    Flat,
    /// As `Flat`, and the bits of a row do not depend on the rows beside it.
    BatchInvariant,
}

impl Mode {
    /// Whether the sequences of this step read shared pages together.
    pub fn groups(self, step: &Step) -> bool {
        self == Mode::PrefixGroups && step.has_prefix_groups()
    }
}

/// regard over a paged cache: all sequences of a step at once.
pub struct Paged<'a> {
    cache: &'a PagedCache,
    step: &'a Step,
    attention: Attention,
    execution: Execution,
    stopwatch: Stopwatch,
}

impl<'a> Paged<'a> {
    /// For one finished step of a model with such products; does the step's copies.
    ///
    /// # Errors
    /// If the step does not fit the cache.
    pub fn new(
        cache: &'a PagedCache,
        step: &'a Step,
        weights: Weights,
        mode: Mode,
    ) -> Result<Paged<'a>> {
        let device = cache.pools(0)?.0.device().clone();
        let mut stopwatch = Stopwatch::new(&device)?;
        let attention = stopwatch.time(|| {
            cache.copy_blocks(step.copies())?;
            match mode.groups(step) {
                true => grouped_attention_of_step(step, &device),
                false => attention_of_step(step, &device),
            }
        })?;
        let threads = match weights {
            Weights::Quantised => Threads::Barrier,
            Weights::F32 | Weights::Bf16 => Threads::Rayon,
        };
        let batch_invariant = mode == Mode::BatchInvariant;
        let attention = Attention { batch_invariant, ..attention };
        let execution = Execution { threads, ..Execution::of_step(step) };
        Ok(Paged { cache, step, attention, execution, stopwatch })
    }
}

impl Attend for Paged<'_> {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Paged { cache, step, attention, execution, stopwatch } = self;
        stopwatch.time(|| {
            let (k, v) = (rows_for(cache, k)?, rows_for(cache, v)?);
            match q.device().is_cpu() {
                true => cache.write(layer, &k, &v, step.slots())?,
                // The tables are there already.
                false => cache.append(layer, &k, &v, attention)?,
            }
            if execution.plan.is_none() {
                // The first layer plans for all of them.
                execution.plan = Some(cache.plan(layer, q, attention, execution)?);
            }
            cache.attention(layer, q, attention, execution)
        })
    }

    fn spent(&self) -> Duration {
        self.stopwatch.spent()
    }
}

/// Candle's Llama without candle-flash-attn, for sequences of one length: appends by
/// concatenation, repeats keys and values for every query head, then matrix product, mask, softmax,
/// matrix product.
pub struct Composed {
    layers: Vec<Option<(Tensor, Tensor)>>,
    sequences: usize,
    stopwatch: Stopwatch,
}

impl Composed {
    /// An empty cache for that many sequences. Each brings the same number of rows in every call.
    ///
    /// # Errors
    /// If the device is not there.
    pub fn new(layers: usize, sequences: usize, device: &Device) -> Result<Composed> {
        let stopwatch = Stopwatch::new(device)?;
        Ok(Composed { layers: vec![None; layers], sequences, stopwatch })
    }

    /// The cache of a layer: keys and values `[sequences, Hkv, tokens, D]`.
    pub fn fill(&mut self, layer: usize, keys: Tensor, values: Tensor) {
        self.layers[layer] = Some((keys, values));
    }
}

/// `[sequences * rows, heads, dim]` as `[sequences, heads, rows, dim]`.
fn head_major(x: &Tensor, sequences: usize) -> Result<Tensor> {
    let (rows, heads, dim) = x.dims3()?;
    x.reshape((sequences, rows / sequences, heads, dim))?.transpose(1, 2)?.contiguous()
}

/// Every head `times` times, side by side.
fn repeated(x: &Tensor, times: usize) -> Result<Tensor> {
    let (batch, heads, rows, dim) = x.dims4()?;
    x.unsqueeze(2)?.expand((batch, heads, times, rows, dim))?.reshape((
        batch,
        heads * times,
        rows,
        dim,
    ))
}

impl Attend for Composed {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Composed { layers, sequences, stopwatch } = self;
        stopwatch.time(|| {
            let (_, heads, dim) = q.dims3()?;
            let [q, k, v] = [q, k, v].map(|x| head_major(x, *sequences));
            let (q, k, v) = (q?, k?, v?);
            let (k, v) = match layers[layer].take() {
                Some((keys, values)) => {
                    (Tensor::cat(&[&keys, &k], 2)?, Tensor::cat(&[&values, &v], 2)?)
                }
                None => (k, v),
            };
            let (rows, keys, group) = (q.dim(2)?, k.dim(2)?, heads / k.dim(1)?);
            layers[layer] = Some((k.clone(), v.clone()));
            let (k, v) = (repeated(&k, group)?, repeated(&v, group)?);
            let scores = (q.matmul(&k.t()?)? * (1.0 / (dim as f64).sqrt()))?;
            let scores = match rows {
                1 => scores,
                _ => scores.broadcast_add(&causal_mask(rows, keys, &scores)?)?,
            };
            let out = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)?;
            out.transpose(1, 2)?.contiguous()?.flatten(0, 1)
        })
    }

    fn spent(&self) -> Duration {
        self.stopwatch.spent()
    }
}

/// `[rows, keys]`: 0 if the row (of the last rows of a sequence) sees the key, else minus infinity.
/// It has the type and the device of the scores.
fn causal_mask(rows: usize, keys: usize, scores: &Tensor) -> Result<Tensor> {
    let before = keys - rows;
    let value = |i: usize| if i % keys <= before + i / keys { 0.0 } else { f32::NEG_INFINITY };
    let mask = (0..rows * keys).map(value).collect::<Vec<f32>>();
    Tensor::from_vec(mask, (rows, keys), scores.device())?.to_dtype(scores.dtype())
}

/// candle's fused CPU attention, `candle_nn::attention::flash_attn`, over candle's own cache, for
/// one sequence.
pub struct Flash {
    layers: Vec<KvCache>,
    stopwatch: Stopwatch,
}

impl Flash {
    /// An empty cache for that many tokens.
    pub fn new(layers: usize, tokens: usize) -> Flash {
        Flash {
            layers: (0..layers).map(|_| KvCache::new(1, tokens)).collect(),
            stopwatch: Stopwatch::default(),
        }
    }
}

impl Attend for Flash {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Flash { layers, stopwatch } = self;
        stopwatch.time(|| {
            let (rows, _, dim) = q.dims3()?;
            let (k, v) = layers[layer].append(&k.unsqueeze(0)?, &v.unsqueeze(0)?)?;
            let mask = AttnMask::causal_with_offset(k.dim(1)? - rows);
            let scale = 1.0 / (dim as f32).sqrt();
            let q = q.unsqueeze(0)?;
            let out = flash_attn::<f32>(&q, &k, &v, scale, mask, None, None)?;
            // `[1, heads, rows, dim]` comes back.
            out.squeeze(0)?.transpose(0, 1)?.to_dtype(DType::F32)?.contiguous()
        })
    }

    fn spent(&self) -> Duration {
        self.stopwatch.spent()
    }
}
