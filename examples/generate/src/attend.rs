//! Who computes attention: regard over a paged cache, or candle's own attention over one sequence's
//! cache, to compare with.

use crate::cache::rows_for;
use crate::model::Weights;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::kv_cache::KvCache;
use regard::paged::Step;
use regard_candle::{Attention, Execution, PagedCache, Threads, attention_of_step};
use std::time::{Duration, Instant};

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

/// regard over a paged cache: all sequences of a step at once.
pub struct Paged<'a> {
    cache: &'a PagedCache,
    step: &'a Step,
    attention: Attention,
    execution: Execution,
    spent: Duration,
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
        batch_invariant: bool,
    ) -> Result<Paged<'a>> {
        let begun = Instant::now();
        cache.copy_blocks(step.copies())?;
        let threads = match weights {
            Weights::Quantised => Threads::Barrier,
            Weights::F32 => Threads::Rayon,
        };
        let attention = Attention { batch_invariant, ..attention_of_step(step, &Device::Cpu)? };
        let execution = Execution { threads, ..Execution::default() };
        Ok(Paged { cache, step, attention, execution, spent: begun.elapsed() })
    }
}

impl Attend for Paged<'_> {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let begun = Instant::now();
        let (k, v) = (rows_for(self.cache, k)?, rows_for(self.cache, v)?);
        self.cache.write(layer, &k, &v, self.step.slots())?;
        if self.execution.plan.is_none() {
            // The first layer plans for all of them.
            let plan = self.cache.plan(layer, q, &self.attention, &self.execution)?;
            self.execution.plan = Some(plan);
        }
        let out = self.cache.attention(layer, q, &self.attention, &self.execution)?;
        self.spent += begun.elapsed();
        Ok(out)
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}

/// What candle's Llama does on a CPU, for one sequence: appends by concatenation, repeats keys and
/// values for every query head, then matrix product, mask, softmax, matrix product.
pub struct Composed {
    layers: Vec<Option<(Tensor, Tensor)>>,
    spent: Duration,
}

impl Composed {
    /// An empty cache.
    pub fn new(layers: usize) -> Composed {
        Composed { layers: vec![None; layers], spent: Duration::ZERO }
    }
}

/// `[rows, heads, dim]` as `[1, heads, rows, dim]`.
fn head_major(x: &Tensor) -> Result<Tensor> {
    x.transpose(0, 1)?.unsqueeze(0)?.contiguous()
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
        let begun = Instant::now();
        let (rows, heads, dim) = q.dims3()?;
        let (q, k, v) = (head_major(q)?, head_major(k)?, head_major(v)?);
        let (k, v) = match &self.layers[layer] {
            Some((keys, values)) => (Tensor::cat(&[keys, &k], 2)?, Tensor::cat(&[values, &v], 2)?),
            None => (k, v),
        };
        let (keys, group) = (k.dim(2)?, heads / k.dim(1)?);
        self.layers[layer] = Some((k.clone(), v.clone()));
        let (k, v) = (repeated(&k, group)?, repeated(&v, group)?);
        let scores = (q.matmul(&k.t()?)? * (1.0 / (dim as f64).sqrt()))?;
        let scores = match rows {
            1 => scores,
            _ => scores.broadcast_add(&causal_mask(rows, keys)?)?,
        };
        let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let out = out.squeeze(0)?.transpose(0, 1)?.contiguous()?;
        self.spent += begun.elapsed();
        Ok(out)
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}

/// `[rows, keys]`: 0 where the last rows of a sequence see a key, minus infinity elsewhere.
fn causal_mask(rows: usize, keys: usize) -> Result<Tensor> {
    let before = keys - rows;
    let value = |i: usize| if i % keys <= before + i / keys { 0.0 } else { f32::NEG_INFINITY };
    Tensor::from_vec((0..rows * keys).map(value).collect(), (rows, keys), &Device::Cpu)
}

/// candle's fused CPU attention, `candle_nn::attention::flash_attn`, over candle's own cache, for
/// one sequence.
pub struct Flash {
    layers: Vec<KvCache>,
    spent: Duration,
}

impl Flash {
    /// An empty cache for that many tokens.
    pub fn new(layers: usize, tokens: usize) -> Flash {
        Flash {
            layers: (0..layers).map(|_| KvCache::new(1, tokens)).collect(),
            spent: Duration::ZERO,
        }
    }
}

impl Attend for Flash {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let begun = Instant::now();
        let (rows, _, dim) = q.dims3()?;
        let (k, v) = self.layers[layer].append(&k.unsqueeze(0)?, &v.unsqueeze(0)?)?;
        let mask = AttnMask::causal_with_offset(k.dim(1)? - rows);
        let scale = 1.0 / (dim as f32).sqrt();
        let q = q.unsqueeze(0)?;
        let out = flash_attn::<f32>(&q, &k, &v, scale, mask, None, None)?;
        // `[1, heads, rows, dim]` comes back.
        let out = out.squeeze(0)?.transpose(0, 1)?.to_dtype(DType::F32)?.contiguous()?;
        self.spent += begun.elapsed();
        Ok(out)
    }

    fn spent(&self) -> Duration {
        self.spent
    }
}
