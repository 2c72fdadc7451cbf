//! Appending to a paged cache: new keys and values go to their slots, and may be rotated on the way.

use super::gpu::{Gpu, argument};
use super::{DeviceMemory, select};
use crate::error::Error;
use crate::expect::overlaps;
use crate::params::AppendParameters;
use crate::problem::{MAX_HEAD_DIM, MAX_LEN};
use crate::tensor::{DType, Tensor, TensorMut};
use cudarc::driver::{CudaStream, sys};

/// New tokens for a paged cache. `total` counts them over all sequences, `B` counts sequences.
///
/// Sequence `b` has `kv_lens[b]` tokens afterwards, of which the last are new: token `kv_lens[b] - n + i` is new token `i` of `n`, and goes to
/// slot `token % block_size` of block `block_table[b, token / block_size]`. Tokens of slots that the table does not reach, or whose entry names
/// no block, are dropped.
#[derive(Debug)]
pub struct Append<'a> {
    /// New keys, `[total, Hkv, Dk]`.
    pub key: Tensor<'a, DeviceMemory>,
    /// New values, `[total, Hkv, Dv]`.
    pub value: Tensor<'a, DeviceMemory>,
    /// Where keys go: `[blocks, block_size, Hkv, Dk]`.
    pub key_pool: TensorMut<'a, DeviceMemory>,
    /// Where values go: `[blocks, block_size, Hkv, Dv]`.
    pub value_pool: TensorMut<'a, DeviceMemory>,
    /// `[B, max_blocks]` `i32`.
    pub block_table: Tensor<'a, DeviceMemory>,
    /// `[B]` `i32`: tokens of each sequence, the new ones included.
    pub kv_lens: Tensor<'a, DeviceMemory>,
    /// `[B + 1]` `i32`, from 0 up: sequence b brings rows `cu_seqlens[b]..cu_seqlens[b + 1]`. `None`: each brings `total / B`.
    pub cu_seqlens: Option<Tensor<'a, DeviceMemory>>,
    /// Rotary position embedding, applied to keys on the way and to queries where they lie.
    pub rotary: Option<Rotary<'a>>,
}

/// Rotary position embedding (Su et al. 2021, "RoFormer"): pairs of the leading dims are turned by an angle that depends on the token's
/// position.
#[derive(Debug)]
pub struct Rotary<'a> {
    /// Cosines and sines of every position, `f32` `[positions, dims]`: `dims / 2` cosines, then as many sines. The first `dims` of a head are
    /// rotated. Tokens at or past `positions` take the last.
    pub table: Tensor<'a, DeviceMemory>,
    /// Whether neighbours make a pair (`x[2 i]` and `x[2 i + 1]`), or the halves do (`x[i]` and `x[i + dims / 2]`).
    pub interleaved: bool,
    /// Queries of the same tokens, `[total, Hq, Dk]`, to be rotated too.
    pub query: Option<TensorMut<'a, DeviceMemory>>,
}

fn expect(
    argument: &str,
    found: impl std::fmt::Display,
    holds: bool,
    allowed: impl Into<String>,
) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::argument(argument, found, allowed)) }
}

fn expect_ints(
    argument: &str,
    tensor: &Tensor<DeviceMemory>,
    shape: &[usize],
) -> Result<(), Error> {
    let found = format!("{:?} with strides {:?}", **tensor, tensor.strides());
    let unit = tensor.shape().last().is_none_or(|&n| n <= 1) || tensor.strides().last() == Some(&1);
    let holds = tensor.dtype() == DType::I32 && tensor.shape() == shape && unit;
    expect(argument, found, holds, format!("i32{shape:?} with an innermost stride of 1"))
}

impl Append<'_> {
    /// Checks everything that shapes, types and strides tell, and fills in what the kernel reads.
    fn parameters(&self) -> Result<AppendParameters, Error> {
        let dtype = self.key.dtype();
        expect("key", format!("of type {dtype}"), dtype.is_float(), "f32, f16 or bf16")?;
        let [tokens, kv_heads, head_dim] = *self.key.shape() else {
            return Err(Error::argument(
                "key",
                format!("of shape {:?}", self.key.shape()),
                "[total, Hkv, Dk]",
            ));
        };
        let value_dim = self.value.shape().last().copied().unwrap_or(0);
        let [blocks, block_size, ..] = *self.key_pool.shape() else {
            let found = format!("of shape {:?}", self.key_pool.shape());
            return Err(Error::argument("key_pool", found, "[blocks, block_size, Hkv, Dk]"));
        };
        for (name, dims, expected) in [
            ("key", *self.key, vec![tokens, kv_heads, head_dim]),
            ("value", *self.value, vec![tokens, kv_heads, value_dim]),
            ("key_pool", *self.key_pool, vec![blocks, block_size, kv_heads, head_dim]),
            ("value_pool", *self.value_pool, vec![blocks, block_size, kv_heads, value_dim]),
        ] {
            let holds = dims.shape() == expected && dims.dtype() == dtype;
            expect(name, format!("{dims:?}"), holds, format!("{dtype}{expected:?}"))?;
            let unit = dims.shape().last() == Some(&1) || dims.strides().last() == Some(&1);
            let found = format!("a view with strides {:?}", dims.strides());
            expect(name, found, unit, "an innermost stride of 1")?;
        }
        for (name, dim) in [("key", head_dim), ("value", value_dim)] {
            let found = format!("of head dim {dim}");
            expect(name, found, (1..=MAX_HEAD_DIM).contains(&dim), format!("1..={MAX_HEAD_DIM}"))?;
        }
        expect(
            "block_size",
            block_size,
            (1..=MAX_LEN).contains(&block_size),
            format!("1..={MAX_LEN}"),
        )?;
        expect(
            "key",
            format!("of {tokens} tokens"),
            tokens <= MAX_LEN,
            format!("at most {MAX_LEN}"),
        )?;
        let [batch, table_blocks] = *self.block_table.shape() else {
            let found = format!("of shape {:?}", self.block_table.shape());
            return Err(Error::argument("block_table", found, "[B, max_blocks]"));
        };
        expect("batch", batch, batch <= MAX_LEN, format!("at most {MAX_LEN}"))?;
        expect_ints("block_table", &self.block_table, &[batch, table_blocks])?;
        expect_ints("kv_lens", &self.kv_lens, &[batch])?;
        match &self.cu_seqlens {
            Some(cumulative) => expect_ints("cu_seqlens", cumulative, &[batch + 1])?,
            None => {
                let even = if batch == 0 { tokens == 0 } else { tokens.is_multiple_of(batch) };
                let found = format!("missing with {tokens} tokens of {batch} sequences");
                expect(
                    "cu_seqlens",
                    found,
                    even,
                    "[B + 1] i32, or as many tokens for every sequence",
                )?;
            }
        }
        self.check_memory()?;
        let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let (key, value) = (self.key.strides(), self.value.strides());
        let (keys, values) = (self.key_pool.strides(), self.value_pool.strides());
        let mut p = AppendParameters {
            key: self.key.address(),
            value: self.value.address(),
            key_pool: self.key_pool.address(),
            value_pool: self.value_pool.address(),
            block_table: self.block_table.address(),
            kv_lens: self.kv_lens.address(),
            cu_seqlens: self.cu_seqlens.as_ref().map_or(0, Tensor::address),
            key_token_stride: key[0],
            key_head_stride: key[1],
            value_token_stride: value[0],
            value_head_stride: value[1],
            key_block_stride: keys[0],
            key_slot_stride: keys[1],
            key_pool_head_stride: keys[2],
            value_block_stride: values[0],
            value_slot_stride: values[1],
            value_pool_head_stride: values[2],
            block_table_stride: self.block_table.strides()[0],
            batch: count(batch),
            tokens: count(tokens),
            new_tokens: count(tokens.checked_div(batch).unwrap_or(0)),
            kv_heads: count(kv_heads),
            head_dim: count(head_dim),
            value_dim: count(value_dim),
            block_size: count(block_size),
            blocks: count(blocks),
            table_blocks: count(table_blocks),
            element_bytes: count(dtype.size()),
            element_type: match dtype {
                DType::F16 => 0,
                DType::BF16 => 1,
                _ => 2,
            },
            ..AppendParameters::default()
        };
        if let Some(rotary) = &self.rotary {
            rotary.set(&mut p, [tokens, head_dim], dtype)?;
        }
        Ok(p)
    }

    /// What is written shares no memory with anything else.
    fn check_memory(&self) -> Result<(), Error> {
        let rotary = self.rotary.as_ref();
        let query = rotary.and_then(|rotary| rotary.query.as_ref());
        let mut written = vec![("key_pool", &self.key_pool), ("value_pool", &self.value_pool)];
        written.extend(query.map(|query| ("query", query)));
        let read = [
            ("key", Some(&self.key)),
            ("value", Some(&self.value)),
            ("block_table", Some(&self.block_table)),
            ("kv_lens", Some(&self.kv_lens)),
            ("cu_seqlens", self.cu_seqlens.as_ref()),
            ("rotary table", rotary.map(|rotary| &rotary.table)),
        ];
        for (i, (name, tensor)) in written.iter().enumerate() {
            let found =
                format!("a view of shape {:?} with strides {:?}", tensor.shape(), tensor.strides());
            expect(
                name,
                found,
                tensor.is_injective(),
                "strides that give every element a place of its own",
            )?;
            // Pools may be interleaved: their ranges overlap, their elements do not, which the two views alone cannot tell.
            let others = written[i + 1..].iter().filter(|(other, _)| *other != "value_pool");
            let others = others.map(|(other, tensor)| (*other, tensor.byte_range()));
            let inputs =
                read.iter().filter_map(|(other, input)| Some((*other, (*input)?.byte_range())));
            for (other, range) in inputs.chain(others) {
                let apart = !overlaps(tensor.byte_range(), range);
                expect(name, format!("memory shared with `{other}`"), apart, "memory of its own")?;
            }
        }
        Ok(())
    }

    /// Everything that has to be lent to the stream.
    fn memories(&self) -> Vec<(&'static str, DeviceMemory)> {
        let mut all = vec![
            ("key", self.key.memory()),
            ("value", self.value.memory()),
            ("key_pool", self.key_pool.memory()),
            ("value_pool", self.value_pool.memory()),
            ("block_table", self.block_table.memory()),
            ("kv_lens", self.kv_lens.memory()),
        ];
        all.extend(self.cu_seqlens.map(|tensor| ("cu_seqlens", tensor.memory())));
        if let Some(rotary) = &self.rotary {
            all.push(("rotary table", rotary.table.memory()));
            all.extend(rotary.query.as_ref().map(|tensor| ("query", tensor.memory())));
        }
        all
    }
}

impl Rotary<'_> {
    fn set(
        &self,
        p: &mut AppendParameters,
        [tokens, head_dim]: [usize; 2],
        dtype: DType,
    ) -> Result<(), Error> {
        let [positions, dims] = *self.table.shape() else {
            let found = format!("of shape {:?}", self.table.shape());
            return Err(Error::argument("rotary table", found, "[positions, dims]"));
        };
        let contiguous = self.table.strides() == [dims as i64, 1] || positions <= 1;
        let found = format!("{:?} with strides {:?}", *self.table, self.table.strides());
        let holds =
            self.table.dtype() == DType::F32 && contiguous && (1..=MAX_LEN).contains(&positions);
        expect(
            "rotary table",
            found,
            holds,
            "f32 [positions, dims], contiguous, of one position at least",
        )?;
        let even = dims.is_multiple_of(2) && (2..=head_dim).contains(&dims);
        expect(
            "rotary table",
            format!("of {dims} dims"),
            even,
            format!("an even number up to {head_dim}"),
        )?;
        p.rotary = self.table.address();
        p.rotary_dim = dims as i32;
        p.rotary_positions = positions as i32;
        p.rotary_interleaved = self.interleaved.into();
        let Some(query) = &self.query else { return Ok(()) };
        let query_heads = query.shape().get(1).copied().unwrap_or(0);
        let unit = head_dim == 1 || query.strides().last() == Some(&1);
        let holds =
            query.shape() == [tokens, query_heads, head_dim] && query.dtype() == dtype && unit;
        let found = format!("{:?} with strides {:?}", **query, query.strides());
        expect(
            "query",
            found,
            holds,
            format!("{dtype}[{tokens}, Hq, {head_dim}] with an innermost stride of 1"),
        )?;
        expect(
            "query",
            format!("of {query_heads} heads"),
            query_heads <= MAX_LEN,
            format!("at most {MAX_LEN}"),
        )?;
        p.query = query.address();
        p.query_heads = query_heads as i32;
        (p.query_token_stride, p.query_head_stride) = (query.strides()[0], query.strides()[1]);
        Ok(())
    }
}

impl Gpu {
    /// Loads what [`Gpu::append`] runs, so that nothing is left to load while a graph is captured.
    ///
    /// # Errors
    /// If the driver does not take the code.
    pub fn load_append(&self) -> Result<(), Error> {
        self.function(&select::append(&AppendParameters::default(), self.machine())?).map(|_| ())
    }

    /// Queues an append on `stream`, and returns. Lengths and table entries are read when the kernel runs.
    ///
    /// # Errors
    /// If an operand breaks the contract or was lent to another stream; nothing is queued then. Or if the driver fails.
    pub fn append(&self, stream: &CudaStream, append: &mut Append) -> Result<(), Error> {
        self.expect_context(stream)?;
        for (name, memory) in append.memories() {
            memory.expect_stream(name, stream)?;
        }
        // SAFETY: the stream is of this context, and operands are lent to it, or their makers have promised as much.
        unsafe { self.append_raw(stream.cu_stream(), append) }
    }

    /// [`Gpu::append`] for engines with streams of their own.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and nothing else writes the operands, or reads what is written, until the append is done.
    pub unsafe fn append_raw(
        &self,
        stream: sys::CUstream,
        append: &mut Append,
    ) -> Result<(), Error> {
        let parameters = append.parameters()?;
        if parameters.tokens == 0 || parameters.batch == 0 {
            return Ok(());
        }
        let launch = select::append(&parameters, self.machine())?;
        let function = self.function(&launch)?;
        // SAFETY: the kernel reads these parameters; shapes are checked, and the caller has promised the rest.
        unsafe { self.launch(function, &launch, &mut [argument(&parameters)], stream) }
    }
}
