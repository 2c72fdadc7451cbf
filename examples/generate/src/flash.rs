//! candle-flash-attn's kernels over a paged cache, to compare with regard's.

use crate::attend::Attend;
use crate::stopwatch::Stopwatch;
use candle_core::{Result, Tensor};
use candle_flash_attn::flash_attn_varlen_paged_windowed;
use regard::paged::Step;
use regard_candle::{Attention, PagedCache, attention_of_step};
use std::time::Duration;

/// 0, and the sum of the lengths up to each: where sequences start and end, one after the other.
pub fn cumulative(lengths: impl Iterator<Item = u32>) -> Vec<u32> {
    let ends = lengths.scan(0, |sum, length| {
        *sum += length;
        Some(*sum)
    });
    std::iter::once(0).chain(ends).collect()
}

/// candle-flash-attn over a paged cache of floats: all sequences of a step at once. It has no
/// append, so that is regard's.
pub struct PagedFlash<'a> {
    cache: &'a PagedCache,
    /// The tables of the append.
    attention: Attention,
    seqlens_q: Tensor,
    seqlens_k: Tensor,
    block_table: Tensor,
    longest_query: usize,
    longest_keys: usize,
    stopwatch: Stopwatch,
}

impl<'a> PagedFlash<'a> {
    /// The kernels' pages have a multiple of that many tokens.
    pub const PAGE_STEP: usize = 32;

    /// For one finished step that copies no pages.
    ///
    /// # Errors
    /// If the step has copies, or does not fit the cache.
    pub fn new(cache: &'a PagedCache, step: &Step) -> Result<PagedFlash<'a>> {
        if !step.copies().is_empty() {
            candle_core::bail!("{} copies of pages; allowed: none", step.copies().len())
        }
        let device = cache.pools(0)?.0.device().clone();
        let mut stopwatch = Stopwatch::new(&device)?;
        let (sequences, unsigned) = (step.kv_lens().len(), |&number: &i32| number as u32);
        let mut tables: Vec<u32> = step.cu_seqlens_q().iter().map(unsigned).collect();
        tables.extend(cumulative(step.kv_lens().iter().map(unsigned)));
        let lengths = tables.len();
        tables.extend(step.block_table().iter().map(unsigned));
        let (attention, tables) = stopwatch.time(|| {
            Ok((attention_of_step(step, &device)?, Tensor::new(tables.as_slice(), &device)?))
        })?;
        Ok(PagedFlash {
            cache,
            attention,
            seqlens_q: tables.narrow(0, 0, sequences + 1)?,
            seqlens_k: tables.narrow(0, sequences + 1, sequences + 1)?,
            block_table: tables
                .narrow(0, lengths, tables.elem_count() - lengths)?
                .reshape((sequences, ()))?,
            longest_query: step.max_query_len(),
            longest_keys: step.kv_lens().iter().copied().max().unwrap_or(0) as usize,
            stopwatch,
        })
    }
}

impl Attend for PagedFlash<'_> {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.stopwatch.time(|| {
            self.cache.append(layer, k, v, &self.attention)?;
            let (keys, values) = self.cache.pools(layer)?;
            let (_, _, dim) = q.dims3()?;
            flash_attn_varlen_paged_windowed(
                q,
                keys,
                values,
                &self.seqlens_q,
                &self.seqlens_k,
                &self.block_table,
                None,
                self.longest_query,
                self.longest_keys,
                1.0 / (dim as f32).sqrt(),
                None,
                Some(0),
                self.cache.shape().block_size,
                None,
            )
        })
    }

    fn spent(&self) -> Duration {
        self.stopwatch.spent()
    }
}
