//! The pools of a paged cache, as candle tensors.

mod append;
mod mla656;

#[cfg(any(feature = "cuda", feature = "metal"))]
pub(crate) use append::HeldTables;
pub(crate) use append::{AppendLatentRows, AppendRows};

use crate::options::{Attention, CacheFormat, Execution};
use crate::prepare::{option, unit_stride};
use crate::view::refuse;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Result, Tensor};
use half::{bf16, f16};
use regard::paged::BlockCopy;
use regard::quantize::{dynamic_scale, quantize_blocks, quantize_row};
use regard::{Plan, Values};
use std::sync::Arc;

/// The sizes of a [`PagedCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers of the model.
    pub layers: usize,
    /// Blocks of each pool.
    pub blocks: usize,
    /// Slots (tokens) per block.
    pub block_size: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Head dim of keys and of values; of a latent cache, the length of its rows.
    pub head_dim: usize,
}

/// Keys and values of every layer, in pages: two pools `[blocks, block_size, Hkv, D]` per layer.
///
/// This is the memory only: a [`regard::paged::PageAllocator`], whose sequences span all layers,
/// assigns blocks to sequences. A step of an engine is
/// [`copy_blocks`](PagedCache::copy_blocks) once, then in each layer [`append`](PagedCache::append)
/// and [`attention`](PagedCache::attention). On a GPU all of them queue work on candle's stream.
///
/// [`PagedCache::latent`] is the cache of multi-head latent attention (MLA), as DeepSeek's models
/// have it: one pool per layer, whose rows are keys and whose rows' first elements are values.
#[derive(Debug, Clone)]
pub struct PagedCache {
    shape: CacheShape,
    pools: Vec<[Tensor; 2]>,
    /// The format of the bytes of pools, if they are no floats.
    format: CacheFormat,
    /// Scales of each layer's keys and values, `[blocks, block_size, Hkv]`, where they are codes.
    scales: Vec<[Option<Tensor>; 2]>,
    /// Values are the first elements of keys, in the same memory.
    is_latent: bool,
}

impl PagedCache {
    /// Empty pools. On Linux, memory is taken as pages are first written.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn new(shape: CacheShape, dtype: DType, device: &Device) -> Result<PagedCache> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim } = shape;
        let pool = || Tensor::zeros((blocks, block_size, kv_heads, head_dim), dtype, device);
        let pools = (0..layers).map(|_| Ok([pool()?, pool()?])).collect::<Result<_>>()?;
        let (format, scales) = (CacheFormat::default(), vec![[None, None]; layers]);
        Ok(PagedCache { shape, pools, format, scales, is_latent: false })
    }

    /// Empty pools in a format of 8 or 4 bits. [`PagedCache::write`] quantizes what it is given,
    /// `e4m3`, `e5m2` and `i8` with a scale per token and head.
    ///
    /// ```
    /// use candle_core::Device;
    /// use regard_candle::{CacheFormat, CacheShape, PagedCache, regard::DType};
    ///
    /// let shape =
    ///     CacheShape { layers: 2, blocks: 8, block_size: 16, kv_heads: 2, head_dim: 64 };
    /// let cache = PagedCache::with_format(shape, CacheFormat::new(DType::Q8_0), &Device::Cpu)?;
    /// // 34 bytes for 32 values of keys and of values.
    /// assert_eq!(cache.block_bytes(), 2 * 2 * 16 * 2 * 2 * 34);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the format of keys or of values is none, the head dim is not a multiple of its
    /// block, or the device has too little memory.
    pub fn with_format(
        shape: CacheShape,
        format: CacheFormat,
        device: &Device,
    ) -> Result<PagedCache> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim } = shape;
        let both = [("format of keys", format.keys), ("format of values", format.values)];
        let mut formats = [regard::DType::I8; 2];
        for (dtype, (argument, given)) in formats.iter_mut().zip(both) {
            let stored = given.filter(|format| {
                format.is_code() || (format.is_block() && !format.is_latent_row())
            });
            let Some(stored) = stored else {
                let found = given.map_or("none", regard::DType::name);
                return Err(refuse(argument, found, "e4m3, e5m2, i8, q8_0 or q4_0"));
            };
            if !head_dim.is_multiple_of(stored.values()) {
                let allowed = format!("a multiple of {}, for {stored}", stored.values());
                return Err(refuse("head_dim", head_dim, &allowed));
            }
            *dtype = stored;
        }
        let pool = |format: regard::DType| {
            let bytes = head_dim / format.values() * format.size();
            Tensor::zeros((blocks, block_size, kv_heads, bytes), DType::U8, device)
        };
        let scales = |format: regard::DType| {
            let shape = (blocks, block_size, kv_heads);
            format.is_code().then(|| Tensor::zeros(shape, DType::F32, device)).transpose()
        };
        let [keys, values] = formats;
        let pools = (0..layers).map(|_| Ok([pool(keys)?, pool(values)?]));
        let pools = pools.collect::<Result<_>>()?;
        let scales = (0..layers).map(|_| Ok([scales(keys)?, scales(values)?]));
        let scales = scales.collect::<Result<_>>()?;
        Ok(PagedCache { shape, pools, format, scales, is_latent: false })
    }

    /// An empty latent cache: the values are the first `value_dim` elements of each row. MLA's rows
    /// are a compressed part and rotary elements, in DeepSeek's models 512 and 64: `head_dim` 576,
    /// `value_dim` 512, and one key/value head. [`PagedCache::write_latent`] fills it.
    ///
    /// # Errors
    /// If `value_dim` exceeds the head dim, or the device has too little memory.
    pub fn latent(
        shape: CacheShape,
        value_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<PagedCache> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim } = shape;
        if value_dim > head_dim {
            return Err(refuse("value_dim", value_dim, &format!("at most {head_dim}")));
        }
        let pools = (0..layers).map(|_| {
            let rows = Tensor::zeros((blocks, block_size, kv_heads, head_dim), dtype, device)?;
            let values = rows.narrow(3, 0, value_dim)?;
            Ok([rows, values])
        });
        let pools = pools.collect::<Result<_>>()?;
        let (format, scales) = (CacheFormat::default(), vec![[None, None]; layers]);
        Ok(PagedCache { shape, pools, format, scales, is_latent: true })
    }

    /// The sizes.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Bytes of one block, keys and values of all layers together, their scales included.
    pub fn block_bytes(&self) -> usize {
        let bytes = |pool: &Tensor| {
            pool.dims()[1..].iter().product::<usize>() * pool.dtype().size_in_bytes()
        };
        self.memory().map(bytes).sum()
    }

    /// The format of the bytes of pools, if they are no floats.
    pub fn format(&self) -> CacheFormat {
        self.format
    }

    /// The pools with separate memory, and scales.
    fn memory(&self) -> impl Iterator<Item = &Tensor> {
        let pools_per_layer = if self.is_latent { 1 } else { 2 };
        let pools = self.pools.iter().flat_map(move |pools| &pools[..pools_per_layer]);
        pools.chain(self.scales.iter().flatten().flatten())
    }

    /// The pools of keys and of values of a layer.
    ///
    /// # Errors
    /// If there is no such layer.
    pub fn pools(&self, layer: usize) -> Result<(&Tensor, &Tensor)> {
        match self.pools.get(layer) {
            Some([keys, values]) => Ok((keys, values)),
            None => Err(refuse("layer", layer, &format!("0..{}", self.pools.len()))),
        }
    }

    /// Makes the copies of [`Step::copies`](regard::paged::Step::copies), in every layer, in that
    /// order.
    ///
    /// # Errors
    /// If a block or a slot is outside the pools. Nothing is copied then.
    pub fn copy_blocks(&self, copies: &[BlockCopy]) -> Result<()> {
        let CacheShape { blocks, block_size, .. } = self.shape;
        for copy in copies {
            if copy.from >= blocks || copy.to >= blocks || copy.slots > block_size {
                let allowed = format!("blocks in 0..{blocks}, at most {block_size} slots");
                return Err(refuse("copies", format!("{copy:?}"), &allowed));
            }
        }
        if copies.is_empty() {
            return Ok(());
        }
        self.memory().try_for_each(|pool| pool.inplace_op1(&CopyBlocks(copies)))
    }

    /// Writes the keys and values of new tokens, `[tokens, Hkv, D]`, to the slots of a step,
    /// `block * block_size + slot`. On a GPU each call sends the slots there;
    /// [`PagedCache::append`] finds them on the device. A cache of a
    /// [format](PagedCache::with_format) takes f32, f16 and bf16.
    ///
    /// # Errors
    /// If there is no such layer, a shape or type does not fit the cache, or a slot is outside the
    /// pools. Nothing is written then.
    pub fn write(&self, layer: usize, keys: &Tensor, values: &Tensor, slots: &[u32]) -> Result<()> {
        let (key_pool, _) = self.pools(layer)?;
        if self.is_latent {
            return Err(refuse("values", "given", "write_latent: they are a part of the keys"));
        }
        self.check_rows("keys", keys, slots.len())?;
        self.check_rows("values", values, slots.len())?;
        self.check_slots(slots)?;
        if !key_pool.device().is_cpu() {
            return self.append_at(layer, keys, values, &self.tables_of_slots(slots)?);
        }
        self.store(layer, keys, values, slots)
    }

    /// Writes the rows of new tokens, `[tokens, Hkv, D]`, to the slots of a step of a latent cache.
    ///
    /// # Errors
    /// As [`PagedCache::write`], or if the cache is not latent. Nothing is written then.
    pub fn write_latent(&self, layer: usize, rows: &Tensor, slots: &[u32]) -> Result<()> {
        let (pool, _) = self.pools(layer)?;
        if !self.is_latent {
            return Err(refuse("values", "missing", "write: the cache is not latent"));
        }
        self.check_rows("rows", rows, slots.len())?;
        self.check_slots(slots)?;
        if !pool.device().is_cpu() {
            return self.append_latent_at(layer, rows, &self.tables_of_slots(slots)?);
        }
        self.store_rows(layer, rows, slots)
    }

    /// Writes the keys and values of new tokens, `[tokens, Hkv, D]`, by the tables of these
    /// options ([`attention_of_step`](crate::attention_of_step)): as the last tokens of their
    /// sequences. A token whose entry of the block table names no block is dropped.
    ///
    /// On a GPU this is one launch per layer, and reads the tables in place.
    ///
    /// # Errors
    /// If there is no such layer, a shape or type does not fit the cache, or a table is missing or
    /// is elsewhere. Nothing is written then.
    pub fn append(
        &self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        attention: &Attention,
    ) -> Result<()> {
        let (key_pool, _) = self.pools(layer)?;
        if self.is_latent {
            return Err(refuse("values", "given", "append_latent: they are a part of the keys"));
        }
        let tokens = keys.dims().first().copied().unwrap_or(0);
        self.check_rows("keys", keys, tokens)?;
        self.check_rows("values", values, tokens)?;
        let tables = Tables::new(attention, self.shape.block_size)?;
        if !key_pool.device().is_cpu() {
            return self.append_at(layer, keys, values, &tables);
        }
        self.store(layer, keys, values, &tables.slots(tokens, self.shape.blocks)?)
    }

    /// [`PagedCache::append`] for a latent cache: rows of new tokens, `[tokens, Hkv, D]`.
    ///
    /// # Errors
    /// As there, or if the cache is not latent. Nothing is written then.
    pub fn append_latent(&self, layer: usize, rows: &Tensor, attention: &Attention) -> Result<()> {
        let (pool, _) = self.pools(layer)?;
        if !self.is_latent {
            return Err(refuse("values", "missing", "append: the cache is not latent"));
        }
        let tokens = rows.dims().first().copied().unwrap_or(0);
        self.check_rows("rows", rows, tokens)?;
        let tables = Tables::new(attention, self.shape.block_size)?;
        if !pool.device().is_cpu() {
            return self.append_latent_at(layer, rows, &tables);
        }
        self.store_rows(layer, rows, &tables.slots(tokens, self.shape.blocks)?)
    }

    /// Writes keys, or rows of a latent cache, that were checked, on the CPU.
    fn store_rows(&self, layer: usize, rows: &Tensor, slots: &[u32]) -> Result<()> {
        let (pool, scales) = (&self.pools[layer][0], &self.scales[layer][0]);
        store(pool, scales, rows, StoreRows { slots, format: self.format.keys })
    }

    /// Writes rows that were checked, on the CPU.
    fn store(&self, layer: usize, keys: &Tensor, values: &Tensor, slots: &[u32]) -> Result<()> {
        let (value_pool, value_scales) = (&self.pools[layer][1], &self.scales[layer][1]);
        self.store_rows(layer, keys, slots)?;
        store(value_pool, value_scales, values, StoreRows { slots, format: self.format.values })
    }

    /// Queues an append on the stream of a GPU.
    fn append_at(
        &self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        tables: &Tables,
    ) -> Result<()> {
        let (key_pool, value_pool) = self.pools(layer)?;
        let [k_scales, v_scales] = &self.scales[layer];
        let op = AppendRows {
            value_pool: tables.paged(value_pool)?,
            scales: [tables.paged_scales(k_scales)?, tables.paged_scales(v_scales)?],
            format: self.format,
            tables,
        };
        tables.paged(key_pool)?.inplace_op3(&unit_stride(keys)?, &unit_stride(values)?, &op)
    }

    /// Queues an append to a latent cache.
    fn append_latent_at(&self, layer: usize, rows: &Tensor, tables: &Tables) -> Result<()> {
        let (pool, _) = self.pools(layer)?;
        let op = AppendLatentRows { format: self.format, tables };
        tables.paged(pool)?.inplace_op2(&unit_stride(rows)?, &op)
    }

    /// One sequence whose pages are of one slot each: those slots.
    fn tables_of_slots(&self, slots: &[u32]) -> Result<Tables> {
        let tokens = slots.len();
        let mut numbers = slots.to_vec();
        numbers.push(tokens as u32);
        let numbers = Tensor::new(numbers, self.pools(0)?.0.device())?;
        Ok(Tables {
            block_table: numbers.narrow(0, 0, tokens)?.unsqueeze(0)?,
            kv_lens: numbers.narrow(0, tokens, 1)?,
            cu_seqlens: None,
            block_size: 1,
        })
    }

    /// An error unless the rows fit the pools, and there are `tokens` of them.
    fn check_rows(&self, argument: &str, rows: &Tensor, tokens: usize) -> Result<()> {
        let expected = [tokens, self.shape.kv_heads, self.shape.head_dim];
        let dtype = match self.pools.first() {
            Some([keys, _]) if self.format == CacheFormat::default() => keys.dtype(),
            _ => rows.dtype(),
        };
        if rows.dims() != expected || rows.dtype() != dtype {
            let found = format!("{} of shape {:?}", rows.dtype().as_str(), rows.dims());
            let allowed = format!("{} of shape {expected:?}", dtype.as_str());
            return Err(refuse(argument, found, &allowed));
        }
        if !matches!(rows.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(refuse(argument, rows.dtype().as_str(), "f32, f16 or bf16"));
        }
        Ok(())
    }

    fn check_slots(&self, slots: &[u32]) -> Result<()> {
        let end = self.shape.blocks * self.shape.block_size;
        match slots.iter().position(|&slot| slot as usize >= end) {
            Some(i) => Err(refuse(&format!("slots[{i}]"), slots[i], &format!("0..{end}"))),
            None => Ok(()),
        }
    }

    /// Attention of `q` over a layer's pools; the options carry a block table and lengths
    /// ([`attention_of_step`](crate::attention_of_step)).
    ///
    /// # Errors
    /// As [`Execution::attention`], or if there is no such layer.
    pub fn attention(
        &self,
        layer: usize,
        q: &Tensor,
        attention: &Attention,
        execution: &Execution,
    ) -> Result<Tensor> {
        let (keys, values) = self.pools(layer)?;
        if self.format == CacheFormat::default() && !self.is_latent {
            return execution.attention(q, keys, values, attention);
        }
        let execution = Execution { format: self.format, ..execution.clone() };
        execution.attention(q, keys, values, &self.complete(layer, attention))
    }

    /// Plans what [`PagedCache::attention`] will run, as [`Execution::plan`] does.
    ///
    /// # Errors
    /// As there, or if there is no such layer.
    pub fn plan(
        &self,
        layer: usize,
        q: &Tensor,
        attention: &Attention,
        execution: &Execution,
    ) -> Result<Arc<Plan>> {
        let (keys, values) = self.pools(layer)?;
        let execution = Execution { format: self.format, ..execution.clone() };
        execution.plan(q, keys, values, &self.complete(layer, attention))
    }

    /// The options with the scales of a layer, and the storage of values.
    fn complete(&self, layer: usize, attention: &Attention) -> Attention {
        let [k_scales, v_scales] = self.scales[layer].clone();
        let values = match self.is_latent {
            true => Values::KeyPrefix,
            false => Values::Separate,
        };
        Attention { k_scales, v_scales, values, ..attention.clone() }
    }
}

/// The tables that map new tokens to slots.
pub(crate) struct Tables {
    /// `[B, max_blocks]`.
    pub(crate) block_table: Tensor,
    /// `[B]`, the new tokens included.
    pub(crate) kv_lens: Tensor,
    /// `[B + 1]`: the rows of each sequence. `None`: all have the same number.
    pub(crate) cu_seqlens: Option<Tensor>,
    block_size: usize,
}

/// No slot: the row is dropped.
const NO_SLOT: u32 = u32::MAX;

impl Tables {
    fn new(attention: &Attention, block_size: usize) -> Result<Tables> {
        let table = |name: &str, tensor: &Option<Tensor>| match tensor {
            Some(tensor) => option(name, tensor),
            None => Err(refuse(name, "missing", "a table of the step")),
        };
        Ok(Tables {
            block_table: table("block_table", &attention.block_table)?,
            kv_lens: table("kv_lens", &attention.kv_lens)?,
            cu_seqlens: match &attention.cu_seqlens_q {
                Some(_) => Some(table("cu_seqlens_q", &attention.cu_seqlens_q)?),
                None => None,
            },
            block_size,
        })
    }

    /// The pool in pages of the tables' size.
    fn paged(&self, pool: &Tensor) -> Result<Tensor> {
        let (blocks, block_size, heads, dim) = pool.dims4()?;
        match self.block_size == block_size {
            true => Ok(pool.clone()),
            false => {
                pool.reshape((blocks * block_size / self.block_size, self.block_size, heads, dim))
            }
        }
    }

    /// Scales in such pages.
    fn paged_scales(&self, scales: &Option<Tensor>) -> Result<Option<Tensor>> {
        let Some(scales) = scales else { return Ok(None) };
        let (blocks, block_size, heads) = scales.dims3()?;
        let pages = blocks * block_size / self.block_size;
        scales.reshape((pages, self.block_size, heads)).map(Some)
    }

    /// The slot of each of `tokens` rows, for the CPU.
    fn slots(&self, tokens: usize, blocks: usize) -> Result<Vec<u32>> {
        for (name, table) in [("block_table", &self.block_table), ("kv_lens", &self.kv_lens)] {
            if !table.device().is_cpu() {
                return Err(refuse(name, "on another device", "on the CPU, where the cache is"));
            }
        }
        let numbers = |x: &Tensor| x.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>();
        let (batch, width) = self.block_table.dims2()?;
        let (table, lens) = (numbers(&self.block_table)?, numbers(&self.kv_lens)?);
        let starts = match &self.cu_seqlens {
            Some(starts) => numbers(starts)?,
            None if batch > 0 && tokens.is_multiple_of(batch) => {
                (0..=batch).map(|b| (b * (tokens / batch)) as i64).collect()
            }
            None => {
                let found = format!("missing with {tokens} tokens of {batch} sequences");
                return Err(refuse("cu_seqlens_q", found, "as many tokens for every sequence"));
            }
        };
        if lens.len() != batch || starts.len() != batch + 1 {
            let found = format!("of {} and {} elements", lens.len(), starts.len());
            let allowed = format!("{batch} and {}, as block_table", batch + 1);
            return Err(refuse("kv_lens and cu_seqlens_q", found, &allowed));
        }
        let mut slots = vec![NO_SLOT; tokens];
        for b in 0..batch {
            let [start, end] = [b, b + 1].map(|b| starts[b].clamp(0, tokens as i64));
            for row in start..end {
                let Ok(position) = usize::try_from(lens[b] - end + row) else { continue };
                let (page, slot) = (position / self.block_size, position % self.block_size);
                let block = table[b * width..][..width].get(page).copied();
                let block = block.and_then(|block| usize::try_from(block).ok());
                if let Some(block) = block.filter(|&block| block < blocks) {
                    slots[row as usize] = (block * self.block_size + slot) as u32;
                }
            }
        }
        Ok(slots)
    }
}

struct CopyBlocks<'a>(&'a [BlockCopy]);

impl InplaceOp1 for CopyBlocks<'_> {
    fn name(&self) -> &'static str {
        "regard-copy-blocks"
    }

    fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match pool {
            CpuStorage::F32(pool) => copy_blocks(pool, layout, self.0),
            CpuStorage::F16(pool) => copy_blocks(pool, layout, self.0),
            CpuStorage::BF16(pool) => copy_blocks(pool, layout, self.0),
            CpuStorage::U8(pool) => copy_blocks(pool, layout, self.0),
            _ => candle_core::bail!("{}: pools are f32, f16, bf16 or u8", self.name()),
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, pool: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::copy_blocks(pool, layout, self.0)
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(&self, pool: &mut candle_core::MetalStorage, layout: &Layout) -> Result<()> {
        crate::metal::copy_blocks(pool, layout, self.0)
    }
}

fn copy_blocks<T: Copy>(pool: &mut [T], layout: &Layout, copies: &[BlockCopy]) {
    let [block, slot] = [0, 1].map(|dim| layout.stride()[dim]);
    for copy in copies {
        let from = layout.start_offset() + copy.from * block;
        pool.copy_within(from..from + copy.slots * slot, layout.start_offset() + copy.to * block);
    }
}

/// The destination of rows, and the format of its bytes; `None` for floats.
#[derive(Clone, Copy)]
struct StoreRows<'a> {
    slots: &'a [u32],
    format: Option<regard::DType>,
}

/// Writes rows to the slots of a pool, and their scales where the pool has any.
fn store(pool: &Tensor, scales: &Option<Tensor>, rows: &Tensor, to: StoreRows) -> Result<()> {
    let Some(format) = to.format else {
        return pool.inplace_op2(rows, &WriteRows(to.slots));
    };
    if let Some(scales) = scales {
        scales.inplace_op2(rows, &WriteScales { slots: to.slots, format })?;
    }
    pool.inplace_op2(rows, &Quantize { slots: to.slots, format })
}

/// The scale of each row, in a tensor `[blocks, block_size, Hkv]`.
struct WriteScales<'a> {
    slots: &'a [u32],
    format: regard::DType,
}

impl InplaceOp2 for WriteScales<'_> {
    fn name(&self) -> &'static str {
        "regard-write-scales"
    }

    fn cpu_fwd(
        &self,
        scales: &mut CpuStorage,
        to: &Layout,
        rows: &CpuStorage,
        from: &Layout,
    ) -> Result<()> {
        let CpuStorage::F32(scales) = scales else {
            candle_core::bail!("{}: scales are f32", self.name())
        };
        each_row(self.slots, (rows, from), |index, row| {
            scales[to.start_offset() + index] = dynamic_scale(row, self.format);
        })
    }
}

/// Each row in a format, in a pool of bytes.
struct Quantize<'a> {
    slots: &'a [u32],
    format: regard::DType,
}

impl InplaceOp2 for Quantize<'_> {
    fn name(&self) -> &'static str {
        "regard-quantize-rows"
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        to: &Layout,
        rows: &CpuStorage,
        from: &Layout,
    ) -> Result<()> {
        let CpuStorage::U8(pool) = pool else {
            candle_core::bail!("{}: pools are u8", self.name())
        };
        let bytes = from.dims()[2] / self.format.values() * self.format.size();
        each_row(self.slots, (rows, from), |index, row| {
            let codes = &mut pool[to.start_offset() + index * bytes..][..bytes];
            match self.format.is_block() {
                true => quantize_blocks(row, self.format, codes),
                false => quantize_row(row, self.format, dynamic_scale(row, self.format), codes),
            }
        })
    }
}

/// Calls `visit` with the place of each row, `slot * Hkv + head`, and its numbers.
fn each_row(
    slots: &[u32],
    (rows, layout): (&CpuStorage, &Layout),
    mut visit: impl FnMut(usize, &[f32]),
) -> Result<()> {
    let number: Box<dyn Fn(usize) -> f32> = match rows {
        CpuStorage::F32(rows) => Box::new(|i| rows[i]),
        CpuStorage::F16(rows) => Box::new(|i| f16::to_f32(rows[i])),
        CpuStorage::BF16(rows) => Box::new(|i| bf16::to_f32(rows[i])),
        _ => candle_core::bail!("rows are f32, f16 or bf16"),
    };
    let [heads, dim] = [1, 2].map(|d| layout.dims()[d]);
    let &[token_stride, head_stride, stride] = layout.stride() else {
        unreachable!("checked: three dimensions")
    };
    let mut row = vec![0.0; dim];
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT) {
        for head in 0..heads {
            let start = layout.start_offset() + token * token_stride + head * head_stride;
            row.iter_mut().enumerate().for_each(|(i, x)| *x = number(start + i * stride));
            visit(slot as usize * heads + head, &row);
        }
    }
    Ok(())
}

struct WriteRows<'a>(&'a [u32]);

impl InplaceOp2 for WriteRows<'_> {
    fn name(&self) -> &'static str {
        "regard-write-rows"
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        pool_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        match (pool, rows) {
            (CpuStorage::F32(pool), CpuStorage::F32(rows)) => {
                write_rows((pool, pool_layout), (rows, rows_layout), self.0)
            }
            (CpuStorage::F16(pool), CpuStorage::F16(rows)) => {
                write_rows((pool, pool_layout), (rows, rows_layout), self.0)
            }
            (CpuStorage::BF16(pool), CpuStorage::BF16(rows)) => {
                write_rows((pool, pool_layout), (rows, rows_layout), self.0)
            }
            _ => candle_core::bail!(
                "{}: pool and rows are of one type, f32, f16 or bf16",
                self.name()
            ),
        }
        Ok(())
    }
}

/// The pool is contiguous, as [`PagedCache::new`] made it; rows may have any strides.
fn write_rows<T: Copy>(
    (pool, to): (&mut [T], &Layout),
    (rows, from): (&[T], &Layout),
    slots: &[u32],
) {
    let [heads, dim] = [1, 2].map(|d| from.dims()[d]);
    let &[token_stride, head_stride, stride] = from.stride() else {
        unreachable!("checked: three dimensions")
    };
    for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != NO_SLOT) {
        for head in 0..heads {
            let target = to.start_offset() + (slot as usize * heads + head) * dim;
            let source = from.start_offset() + token * token_stride + head * head_stride;
            let target = &mut pool[target..target + dim];
            if stride == 1 {
                target.copy_from_slice(&rows[source..source + dim]);
            } else {
                for (i, x) in target.iter_mut().enumerate() {
                    *x = rows[source + i * stride];
                }
            }
        }
    }
}
