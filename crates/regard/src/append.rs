//! Appending to a cache: new keys and values go to their slots, and may be rotated and quantized on
//! the way. The operands, and the checks that all backends share.

mod latent;

pub use latent::AppendLatent;

use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{Strided, expect, expect_apart, expect_injective};
use crate::memory::{Host, Memory};
use crate::problem::{MAX_HEAD_DIM, MAX_LEN};
use crate::tensor::{Dims, Tensor, TensorMut};

/// New tokens for a cache. `total` counts them over all sequences, `B` counts sequences.
///
/// Sequence `b` has `kv_lens[b]` tokens afterwards, of which the last are new: token `kv_lens[b] -
/// n + i` is new token `i` of `n`, and goes to slot `token % block_size` of block `block_table[b,
/// token / block_size]`. A token is dropped if the table does not reach its slot, or if the table's
/// entry names no block. Rows that belong to no sequence are dropped too. A
/// [`Step`](crate::paged::Step) makes the three tables.
///
/// Pools have the type of the new tokens, or a format of 8 or 4 bits to which new tokens are
/// quantized, keys and values independently. Keys are quantized after rotation. See
/// [`quantize`](crate::quantize) for the rounding, which is the same on every backend, to the bit.
#[derive(Debug)]
pub struct Append<'a, M: Memory = Host> {
    /// New keys, `[total, Hkv, Dk]`.
    pub key: Tensor<'a, M>,
    /// New values, `[total, Hkv, Dv]`.
    pub value: Tensor<'a, M>,
    /// Destination of keys: `[blocks, block_size, Hkv, Dk]`, or `[B, Lk, Hkv, Dk]` without a block
    /// table; `Dk / 32` blocks of `q8_0` or `q4_0`.
    pub key_pool: TensorMut<'a, M>,
    /// Destination of values: `[blocks, block_size, Hkv, Dv]`, likewise.
    pub value_pool: TensorMut<'a, M>,
    /// Scales of keys; for pools of `e4m3`, `e5m2` and `i8`.
    pub k_scales: Option<AppendScales<'a, M>>,
    /// Scales of values, likewise.
    pub v_scales: Option<AppendScales<'a, M>>,
    /// `[B, max_blocks]` `i32`. `None`: sequence b is row b of `[B, Lk, Hkv, D]`.
    pub block_table: Option<Tensor<'a, M>>,
    /// `[B]` `i32`: tokens of each sequence, the new ones included.
    pub kv_lens: Tensor<'a, M>,
    /// `[B + 1]` `i32`, from 0 up: sequence b brings rows `cu_seqlens[b]..cu_seqlens[b + 1]`.
    /// `None`: each brings `total / B`.
    pub cu_seqlens: Option<Tensor<'a, M>>,
    /// Rotary position embedding, applied to keys as they are written and to queries in place.
    pub rotary: Option<Rotary<'a, M>>,
}

/// The scales of a pool of `e4m3`, `e5m2` or `i8`: a value is its code times its scale.
#[derive(Debug)]
#[non_exhaustive]
pub enum AppendScales<'a, M: Memory = Host> {
    /// Given: `f32`, broadcastable to `[blocks, block_size, Hkv]` (each dimension that, or 1),
    /// finite and not negative.
    Static(Tensor<'a, M>),
    /// One for each token and head, `f32` `[blocks, block_size, Hkv]`: the largest magnitude over
    /// the largest code, written to the token's slot.
    Dynamic(TensorMut<'a, M>),
}

impl<M: Memory> AppendScales<'_, M> {
    /// Their type, shape and strides.
    pub(crate) fn dims(&self) -> &Dims {
        match self {
            AppendScales::Static(tensor) => tensor,
            AppendScales::Dynamic(tensor) => tensor,
        }
    }

    /// The address of the first scale, in any memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self) -> u64 {
        match self {
            AppendScales::Static(tensor) => tensor.address(),
            AppendScales::Dynamic(tensor) => tensor.address(),
        }
    }

    /// The memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn memory(&self) -> M {
        match self {
            AppendScales::Static(tensor) => tensor.memory(),
            AppendScales::Dynamic(tensor) => tensor.memory(),
        }
    }

    /// Whether an append computes them.
    pub(crate) fn is_dynamic(&self) -> bool {
        matches!(self, AppendScales::Dynamic(_))
    }
}

/// Rotary position embedding (Su et al. 2021, "RoFormer"): pairs of the leading dims are rotated by
/// an angle that depends on the token's position.
#[derive(Debug)]
pub struct Rotary<'a, M: Memory = Host> {
    /// Cosines and sines of every position, `f32` `[positions, dims]`: `dims / 2` cosines, then as
    /// many sines. The first `dims` of a head are rotated. Tokens at or past `positions` take the
    /// last position, and tokens before the first position take the first.
    pub table: Tensor<'a, M>,
    /// Whether neighbours make a pair (`x[2 i]` and `x[2 i + 1]`), or the halves do (`x[i]` and
    /// `x[i + dims / 2]`).
    pub interleaved: bool,
    /// Queries of the same tokens, `[total, Hq, Dk]`, to be rotated too.
    pub query: Option<TensorMut<'a, M>>,
}

/// The sizes of an append that was checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AppendShape {
    pub batch: usize,
    /// New tokens of all sequences.
    pub tokens: usize,
    pub kv_heads: usize,
    /// 0 if no queries are rotated.
    pub query_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub blocks: usize,
    pub block_size: usize,
    /// Entries of a row of the block table; 1 without one.
    pub table_blocks: usize,
    /// Positions of the rotary table, and leading dims that are rotated; 0 without rotation.
    pub rotary_positions: usize,
    pub rotary_dim: usize,
    /// The first dim that is rotated.
    pub rotary_start: usize,
    /// The type of new keys, values and queries.
    pub dtype: DType,
    /// The types of the pools.
    pub key_dtype: DType,
    pub value_dtype: DType,
}

fn expect_ints<M: Memory>(
    argument: &str,
    tensor: &Tensor<M>,
    shape: &[usize],
) -> Result<(), Error> {
    let unit = tensor.shape().last().is_none_or(|&n| n <= 1) || tensor.strides().last() == Some(&1);
    let holds = tensor.dtype() == DType::I32 && tensor.shape() == shape && unit;
    expect(
        argument,
        Strided(tensor),
        holds,
        format_args!("i32{shape:?} with an innermost stride of 1"),
    )
}

/// This type and shape, with neighbours in the last dimension beside each other.
fn expect_rows(argument: &str, dims: &Dims, dtype: DType, shape: &[usize]) -> Result<(), Error> {
    let holds = dims.shape() == shape && dims.dtype() == dtype;
    expect(argument, format_args!("{dims:?}"), holds, format_args!("{dtype}{shape:?}"))?;
    let unit = dims.shape().last() == Some(&1) || dims.strides().last() == Some(&1);
    expect(
        argument,
        format_args!("a view with strides {:?}", dims.strides()),
        unit,
        "an innermost stride of 1",
    )
}

/// The scales of a pool of this type, whose heads of slots have the shape `slots`.
fn check_scales<M: Memory>(
    argument: &str,
    scales: Option<&AppendScales<M>>,
    dtype: DType,
    slots: [usize; 3],
) -> Result<(), Error> {
    let wanted = dtype.is_code();
    let Some(scales) = scales else {
        return expect(argument, "missing", !wanted, format_args!("scales of {dtype}"));
    };
    expect(argument, "given", wanted, format_args!("none for a pool of {dtype}"))?;
    let (dims, broadcasts) = (scales.dims(), !scales.is_dynamic());
    let fits = |(&found, &full): (&usize, &usize)| found == full || (broadcasts && found == 1);
    let holds = dims.dtype() == DType::F32
        && dims.rank() == slots.len()
        && dims.shape().iter().zip(&slots).all(fits);
    let or_ones = if broadcasts { ", each dimension that or 1" } else { "" };
    expect(
        argument,
        format_args!("{dims:?}"),
        holds,
        format_args!("f32{slots:?} ([blocks, block_size, Hkv]{or_ones})"),
    )?;
    match scales {
        AppendScales::Static(tensor) => check_scale_values(argument, tensor),
        AppendScales::Dynamic(_) => Ok(()),
    }
}

/// Scales per tensor or per head are all used, so each of them has to be a scale. Checked if the
/// host can read them. Scales of slots that are not appended to may be anything.
fn check_scale_values<M: Memory>(argument: &str, scales: &Tensor<M>) -> Result<(), Error> {
    let [1, 1, heads] = *scales.shape() else { return Ok(()) };
    let Some(scales) = scales.as_host() else { return Ok(()) };
    for head in 0..heads {
        let scale = scales.at(&[0, 0, head]);
        if !(0.0..=f64::from(f32::MAX)).contains(&scale) {
            let argument = format!("{argument}[0, 0, {head}]");
            return Err(Error::argument(argument, scale, "a finite number from 0 up"));
        }
    }
    Ok(())
}

impl<'a, M: Memory> AppendScales<'a, M> {
    /// The tensor, if it is only read.
    fn read(&self) -> Option<&Tensor<'a, M>> {
        match self {
            AppendScales::Static(tensor) => Some(tensor),
            AppendScales::Dynamic(_) => None,
        }
    }

    /// The tensor, if it is written.
    fn written(&self) -> Option<&TensorMut<'a, M>> {
        match self {
            AppendScales::Static(_) => None,
            AppendScales::Dynamic(tensor) => Some(tensor),
        }
    }
}

impl<M: Memory> Append<'_, M> {
    /// Checks shapes, types and strides.
    pub(crate) fn check(&self) -> Result<AppendShape, Error> {
        self.check_rows_and_tables(true)
    }

    /// [`Append::check`], maybe without values.
    fn check_rows_and_tables(&self, has_values: bool) -> Result<AppendShape, Error> {
        let mut shape = self.check_rows(has_values)?;
        self.check_tables(&mut shape)?;
        if let Some(rotary) = &self.rotary {
            rotary.check(&mut shape)?;
        }
        let slots = [shape.blocks, shape.block_size, shape.kv_heads];
        check_scales("k_scales", self.k_scales.as_ref(), shape.key_dtype, slots)?;
        if has_values {
            check_scales("v_scales", self.v_scales.as_ref(), shape.value_dtype, slots)?;
        }
        self.check_memory()?;
        Ok(shape)
    }

    /// New keys and values, and the pools.
    fn check_rows(&self, has_values: bool) -> Result<AppendShape, Error> {
        let dtype = self.key.dtype();
        expect("key", format_args!("of type {dtype}"), dtype.is_float(), "f32, f16 or bf16")?;
        let [tokens, kv_heads, head_dim] = *self.key.shape() else {
            let found = format!("of shape {:?}", self.key.shape());
            return Err(Error::argument("key", found, "[total, Hkv, Dk]"));
        };
        let value_dim = self.value.shape().last().copied().unwrap_or(0);
        let [blocks, block_size, ..] = *self.key_pool.shape() else {
            let found = format!("of shape {:?}", self.key_pool.shape());
            return Err(Error::argument("key_pool", found, "[blocks, block_size, Hkv, Dk]"));
        };
        for (name, new, dim) in [("key", &self.key, head_dim), ("value", &self.value, value_dim)] {
            expect_rows(name, new, dtype, &[tokens, kv_heads, dim])?;
        }
        for (name, pool, dim) in
            [("key_pool", &self.key_pool, head_dim), ("value_pool", &self.value_pool, value_dim)]
        {
            let pool_dtype = pool.dtype();
            expect(
                name,
                format_args!("of type {pool_dtype}"),
                pool_dtype == dtype || pool_dtype.is_code() || pool_dtype.is_block(),
                format_args!("{dtype}, e4m3, e5m2, i8, q8_0 or q4_0"),
            )?;
            expect(
                name,
                format_args!("of type {pool_dtype} with values of their own"),
                !(has_values && pool_dtype.is_latent_row()) && pool_dtype != DType::Mla656Latent,
                "mla656 in an append to a latent cache only",
            )?;
            let values = pool_dtype.values();
            expect(
                name,
                format_args!("of {pool_dtype} for a head dim of {dim}"),
                dim.is_multiple_of(values),
                format_args!("head dims that are a multiple of {values}"),
            )?;
            expect_rows(name, pool, pool_dtype, &[blocks, block_size, kv_heads, dim / values])?;
        }
        let values = has_values.then_some(("value", value_dim));
        for (name, dim) in [("key", head_dim)].into_iter().chain(values) {
            expect(
                name,
                format_args!("of head dim {dim}"),
                (1..=MAX_HEAD_DIM).contains(&dim),
                format_args!("1..={MAX_HEAD_DIM}"),
            )?;
        }
        let fits = (1..=MAX_LEN).contains(&block_size);
        expect("block_size", block_size, fits, format_args!("1..={MAX_LEN}"))?;
        expect(
            "key",
            format_args!("of {tokens} tokens"),
            tokens <= MAX_LEN,
            format_args!("at most {MAX_LEN}"),
        )?;
        Ok(AppendShape {
            batch: 0,
            tokens,
            kv_heads,
            query_heads: 0,
            head_dim,
            value_dim,
            blocks,
            block_size,
            table_blocks: 0,
            rotary_positions: 0,
            rotary_dim: 0,
            rotary_start: 0,
            dtype,
            key_dtype: self.key_pool.dtype(),
            value_dtype: self.value_pool.dtype(),
        })
    }

    /// The block table and lengths.
    fn check_tables(&self, shape: &mut AppendShape) -> Result<(), Error> {
        let (batch, table_blocks) = match &self.block_table {
            Some(table) => {
                let [batch, table_blocks] = *table.shape() else {
                    let found = format!("of shape {:?}", table.shape());
                    return Err(Error::argument("block_table", found, "[B, max_blocks]"));
                };
                expect_ints("block_table", table, &[batch, table_blocks])?;
                (batch, table_blocks)
            }
            None => (shape.blocks, 1),
        };
        expect("batch", batch, batch <= MAX_LEN, format_args!("at most {MAX_LEN}"))?;
        expect_ints("kv_lens", &self.kv_lens, &[batch])?;
        match &self.cu_seqlens {
            Some(cumulative) => expect_ints("cu_seqlens", cumulative, &[batch + 1])?,
            None => {
                let tokens = shape.tokens;
                let even = if batch == 0 { tokens == 0 } else { tokens.is_multiple_of(batch) };
                expect(
                    "cu_seqlens",
                    format_args!("missing with {tokens} tokens of {batch} sequences"),
                    even,
                    "[B + 1] i32, or as many tokens for every sequence",
                )?;
            }
        }
        (shape.batch, shape.table_blocks) = (batch, table_blocks);
        Ok(())
    }

    /// Written operands share no memory with any other.
    fn check_memory(&self) -> Result<(), Error> {
        let rotary = self.rotary.as_ref();
        let query = rotary.and_then(|rotary| rotary.query.as_ref());
        let read = [
            ("key", Some(&self.key)),
            ("value", Some(&self.value)),
            ("block_table", self.block_table.as_ref()),
            ("kv_lens", Some(&self.kv_lens)),
            ("cu_seqlens", self.cu_seqlens.as_ref()),
            ("rotary table", rotary.map(|rotary| &rotary.table)),
        ];
        // Pools may be interleaved, with each other and with their scales: their address ranges
        // overlap though their elements do not. The views are not enough to check this.
        let written = [
            ("key_pool", Some(&self.key_pool)),
            ("value_pool", Some(&self.value_pool)),
            ("k_scales", self.k_scales.as_ref().and_then(AppendScales::written)),
            ("v_scales", self.v_scales.as_ref().and_then(AppendScales::written)),
            ("query", query),
        ];
        for (name, tensor) in written {
            let Some(tensor) = tensor else { continue };
            expect_injective(name, tensor)?;
            for (other, input) in read {
                let range = input.and_then(Tensor::byte_range);
                expect_apart(name, tensor.byte_range(), other, range)?;
            }
            if name != "query" {
                let range = query.and_then(TensorMut::byte_range);
                expect_apart(name, tensor.byte_range(), "query", range)?;
            }
        }
        let query = query.and_then(TensorMut::byte_range);
        for (name, scales) in [("k_scales", &self.k_scales), ("v_scales", &self.v_scales)] {
            let range = scales.as_ref().and_then(AppendScales::read).and_then(Tensor::byte_range);
            expect_apart("query", query, name, range)?;
        }
        Ok(())
    }
}

impl<M: Memory> Rotary<'_, M> {
    fn check(&self, shape: &mut AppendShape) -> Result<(), Error> {
        let AppendShape { tokens, head_dim, dtype, .. } = *shape;
        let [positions, dims] = *self.table.shape() else {
            let found = format!("of shape {:?}", self.table.shape());
            return Err(Error::argument("rotary table", found, "[positions, dims]"));
        };
        let contiguous = self.table.strides() == [dims as i64, 1] || positions <= 1;
        let holds =
            self.table.dtype() == DType::F32 && contiguous && (1..=MAX_LEN).contains(&positions);
        expect(
            "rotary table",
            Strided(&self.table),
            holds,
            "f32 [positions, dims], contiguous, of one position at least",
        )?;
        let even = dims.is_multiple_of(2) && (2..=head_dim).contains(&dims);
        expect(
            "rotary table",
            format_args!("of {dims} dims"),
            even,
            format_args!("an even number up to {head_dim}"),
        )?;
        (shape.rotary_positions, shape.rotary_dim) = (positions, dims);
        let Some(query) = &self.query else { return Ok(()) };
        let query_heads = query.shape().get(1).copied().unwrap_or(0);
        let unit = head_dim == 1 || query.strides().last() == Some(&1);
        let holds =
            query.shape() == [tokens, query_heads, head_dim] && query.dtype() == dtype && unit;
        expect(
            "query",
            Strided(query),
            holds,
            format_args!("{dtype}[{tokens}, Hq, {head_dim}] with an innermost stride of 1"),
        )?;
        expect(
            "query",
            format_args!("of {query_heads} heads"),
            query_heads <= MAX_LEN,
            format_args!("at most {MAX_LEN}"),
        )?;
        shape.query_heads = query_heads;
        Ok(())
    }
}
