//! `regard.append`, `regard.append_latent` and `regard.merge`.

use crate::array::{Array, Place};
use crate::errors::{Fault, argument};
use crate::operands::View;
use crate::{device, framework, operands};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};
use regard::cpu::Cpu;
use regard::cuda::DeviceMemory;
use regard::{AppendScales, DType, Error, Host};

/// New tokens for a paged cache, as Python gives them.
pub struct Append {
    /// `[total, Hkv, Dk]`.
    pub key: Array,
    /// `[blocks, block_size, Hkv, Dk]`.
    pub key_pool: Array,
    /// Values `[total, Hkv, Dv]`, and their pool `[blocks, block_size, Hkv, Dv]`; none for a latent
    /// cache.
    pub values: Option<[Array; 2]>,
    /// `[B, max_blocks]`.
    pub block_table: Array,
    /// `[B]`, the new tokens included.
    pub kv_lens: Array,
    /// `[B + 1]`, or as many tokens for every sequence.
    pub cu_seqlens: Option<Array>,
    /// `[positions, dims]`: `dims / 2` cosines, then as many sines.
    pub rotary_table: Option<Array>,
    /// Whether neighbours make a pair, or the halves do.
    pub interleaved: bool,
    /// `[total, Hq, Dk]`, rotated in place.
    pub query: Option<Array>,
    /// Scales of a key pool of codes.
    pub k_scales: Option<Scales>,
    /// Scales of a value pool of codes.
    pub v_scales: Option<Scales>,
}

/// Scales of a pool of 8-bit codes.
pub struct Scales {
    /// f32, broadcastable to `[blocks, block_size, Hkv]`; of that shape if computed.
    array: Array,
    /// Whether append computes and writes them.
    dynamic: bool,
}

/// Arguments that name no operand, and those that are read when all are known.
#[derive(Default)]
struct Options<'py> {
    stream: Option<Bound<'py, PyAny>>,
    pages_heads_first: bool,
    kv_format: Option<DType>,
    k_format: Option<DType>,
    v_format: Option<DType>,
    k_scales: Option<Bound<'py, PyAny>>,
    v_scales: Option<Bound<'py, PyAny>>,
    dynamic_k_scales: bool,
    dynamic_v_scales: bool,
}

/// Reads the scales of one pool.
fn scales(
    name: &'static str,
    given: Option<&Bound<'_, PyAny>>,
    dynamic: bool,
) -> PyResult<Option<Scales>> {
    let array = match given {
        Some(given) if dynamic => Array::read_mut(name, given)?,
        Some(given) => Array::read(name, given)?,
        None if dynamic => {
            let found = format!("missing with dynamic_{name}");
            return Err(argument(name, found, "f32 [blocks, block_size, Hkv]").into());
        }
        None => return Ok(None),
    };
    Ok(Some(Scales { array, dynamic }))
}

impl Append {
    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let Append { key, key_pool, block_table, kv_lens, .. } = self;
        let optional = [&self.cu_seqlens, &self.rotary_table, &self.query];
        let scales = [&self.k_scales, &self.v_scales].into_iter().flatten();
        [key, key_pool, block_table, kv_lens]
            .into_iter()
            .chain(self.values.iter().flatten())
            .chain(optional.into_iter().flatten())
            .chain(scales.map(|scales| &scales.array))
    }

    fn function(&self) -> &'static str {
        if self.values.is_some() { "append" } else { "append_latent" }
    }

    /// Reads the arguments that are given by name.
    fn read_options<'py>(&mut self, given: &Bound<'py, PyDict>) -> PyResult<Options<'py>> {
        let mut options = Options::default();
        let has_values = self.values.is_some();
        for (name, value) in given.iter() {
            let given = !value.is_none();
            let read = |name| if given { Array::read(name, &value).map(Some) } else { Ok(None) };
            match name.cast::<PyString>()?.to_str()? {
                "cu_seqlens" => self.cu_seqlens = read("cu_seqlens")?,
                "rotary_table" => self.rotary_table = read("rotary_table")?,
                "interleaved" => self.interleaved = value.is_truthy()?,
                "query" if given => self.query = Some(Array::read_mut("query", &value)?),
                "query" => self.query = None,
                "kv_layout" => options.pages_heads_first = operands::is_hnd(&value)?,
                "kv_format" => options.kv_format = operands::format("kv_format", &value)?,
                "k_format" => options.k_format = operands::format("k_format", &value)?,
                "k_scales" => options.k_scales = given.then_some(value),
                "dynamic_k_scales" => options.dynamic_k_scales = value.is_truthy()?,
                "v_format" if has_values => {
                    options.v_format = operands::format("v_format", &value)?;
                }
                "v_scales" if has_values => options.v_scales = given.then_some(value),
                "dynamic_v_scales" if has_values => {
                    options.dynamic_v_scales = value.is_truthy()?;
                }
                "stream" => options.stream = given.then_some(value),
                name => {
                    let function = self.function();
                    let text = format!("{function}() got an unexpected keyword argument '{name}'");
                    return Err(PyTypeError::new_err(text));
                }
            }
        }
        if self.query.is_some() && self.rotary_table.is_none() {
            return Err(argument("query", "given without rotary_table", "both or none").into());
        }
        let Options { k_scales, v_scales, dynamic_k_scales, dynamic_v_scales, .. } = &options;
        self.k_scales = scales("k_scales", k_scales.as_ref(), *dynamic_k_scales)?;
        self.v_scales = scales("v_scales", v_scales.as_ref(), *dynamic_v_scales)?;
        Ok(options)
    }
}

/// Writes new keys and values to their slots of a paged cache, and quantizes them if the pools have
/// 8 or 4 bits.
///
/// Sequence b has `kv_lens[b]` tokens afterwards, of which the last are new. Tokens whose slot the
/// table does not reach, or whose entry names no block, are dropped.
///
/// key, value: `[total, Hkv, Dk]` and `[total, Hkv, Dv]`, of f32, f16 or bf16.
/// key_pool, value_pool: `[blocks, block_size, Hkv, D]`, of the same type, or of a format of 8 or 4
///     bits; written.
/// block_table: i32 `[B, max_blocks]`.
/// kv_lens: i32 `[B]`, the new tokens included.
/// cu_seqlens: i32 `[B + 1]`: rows of each sequence; without it each brings total / B.
/// rotary_table: f32 `[positions, dims]`, dims / 2 cosines and then as many sines of each position:
///     keys are rotated on the way (RoPE), their first dims elements.
/// interleaved: neighbours make a pair (x[2i], x[2i + 1]), else the halves do (x[i],
///     x[i + dims / 2]).
/// query: `[total, Hq, Dk]`, rotated in place.
/// k_scales, v_scales: f32, for pools of "e4m3", "e5m2" and "i8": `[blocks, block_size, Hkv]`, any
///     of these 1. They are read, and numbers beyond the largest code saturate.
/// dynamic_k_scales, dynamic_v_scales: scales are computed, one per token and head (the largest
///     magnitude over the largest code), and written to k_scales or v_scales.
/// kv_format, k_format, v_format: as for `attention`, for pools of bytes.
/// kv_layout: "nhd", or "hnd" if pages and scales have heads before slots.
/// stream: as for `attention`.
#[pyfunction]
#[pyo3(
    signature = (key, value, key_pool, value_pool, block_table, kv_lens, **options),
    text_signature = "(key, value, key_pool, value_pool, block_table, kv_lens, *, cu_seqlens=None, \
        rotary_table=None, interleaved=False, query=None, k_scales=None, v_scales=None, \
        dynamic_k_scales=False, dynamic_v_scales=False, kv_format=None, k_format=None, \
        v_format=None, kv_layout='nhd', stream=None)"
)]
pub fn append<'py>(
    key: &Bound<'py, PyAny>,
    value: &Bound<'py, PyAny>,
    key_pool: &Bound<'py, PyAny>,
    value_pool: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    kv_lens: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<()> {
    let mut append = Append::read(key, key_pool, block_table, kv_lens)?;
    append.values =
        Some([Array::read("value", value)?, Array::read_mut("value_pool", value_pool)?]);
    append.run(&[key, value, key_pool, value_pool, block_table, kv_lens], options)
}

/// Writes new rows to their slots of a paged latent cache (MLA), whose rows are keys and whose
/// first dims are values (`value_dim` of `attention`).
///
/// As `append`, but there are no values, and the *last* dims of rows and queries are rotated.
///
/// key: `[total, Hkv, Dk]`, of f32, f16 or bf16.
/// key_pool: `[blocks, block_size, Hkv, Dk]`, of the same type, or of a format of 8 or 4 bits;
///     written. Of "mla656" the last dimension is the 656 bytes of a row.
/// block_table, kv_lens, cu_seqlens, interleaved, k_scales, kv_format, k_format, kv_layout, stream:
///     as for `append`.
/// dynamic_k_scales: as for `append`.
/// rotary_table: as for `append`; as many of the last dims are rotated as it has.
/// query: `[total, Hq, Dk]`, whose last dims are rotated in place.
#[pyfunction]
#[pyo3(
    signature = (key, key_pool, block_table, kv_lens, **options),
    text_signature = "(key, key_pool, block_table, kv_lens, *, cu_seqlens=None, \
        rotary_table=None, interleaved=False, query=None, k_scales=None, dynamic_k_scales=False, \
        kv_format=None, k_format=None, kv_layout='nhd', stream=None)"
)]
pub fn append_latent<'py>(
    key: &Bound<'py, PyAny>,
    key_pool: &Bound<'py, PyAny>,
    block_table: &Bound<'py, PyAny>,
    kv_lens: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<()> {
    let append = Append::read(key, key_pool, block_table, kv_lens)?;
    append.run(&[key, key_pool, block_table, kv_lens], options)
}

impl Append {
    /// Arguments of both functions. There are no values yet.
    fn read(
        key: &Bound<'_, PyAny>,
        key_pool: &Bound<'_, PyAny>,
        block_table: &Bound<'_, PyAny>,
        kv_lens: &Bound<'_, PyAny>,
    ) -> PyResult<Append> {
        Ok(Append {
            key: Array::read("key", key)?,
            key_pool: Array::read_mut("key_pool", key_pool)?,
            values: None,
            block_table: Array::read("block_table", block_table)?,
            kv_lens: Array::read("kv_lens", kv_lens)?,
            cu_seqlens: None,
            rotary_table: None,
            interleaved: false,
            query: None,
            k_scales: None,
            v_scales: None,
        })
    }

    /// Brings the pools and their scales into regard's types and order.
    fn lay_out(&mut self, named: &Options<'_>) -> Result<(), Fault> {
        let Options { kv_format, k_format, v_format, .. } = *named;
        if let Some(format) = k_format.or(kv_format) {
            self.key_pool.stored_as(format)?;
        }
        let mut value_pool = self.values.as_mut().map(|[_, pool]| pool);
        if let (Some(pool), Some(format)) = (&mut value_pool, v_format.or(kv_format)) {
            pool.stored_as(format)?;
        }
        if named.pages_heads_first {
            self.key_pool.swap_heads(4, "hnd")?;
            value_pool.map_or(Ok(()), |pool| pool.swap_heads(4, "hnd"))?;
            let scales = [&mut self.k_scales, &mut self.v_scales].into_iter().flatten();
            for scales in scales {
                scales.array.swap_heads(3, "hnd")?;
            }
        }
        Ok(())
    }

    /// Reads the other arguments, and appends. `objects` are the arrays given by place, of which
    /// the first is the key.
    fn run<'py>(
        mut self,
        objects: &[&Bound<'py, PyAny>],
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        let named = match options {
            Some(options) => self.read_options(options)?,
            None => Options::default(),
        };
        self.lay_out(&named)?;
        let (key, place) = (objects[0], self.key.place);
        self.arrays().try_for_each(|array| operands::expect_place(array, place, "as key"))?;
        let stream = framework::stream(named.stream.as_ref(), key, &self.key)?;
        match place {
            Place::Cpu => key.py().detach(|| append_on_host(&self))?,
            _ => key.py().detach(|| append_on_gpu(&self, stream))?,
        }
        if named.stream.is_some() {
            for object in objects {
                framework::record_stream(object, &self.key, stream)?;
            }
            for (_, object) in options.into_iter().flatten() {
                framework::record_stream(&object, &self.key, stream)?;
            }
        }
        Ok(())
    }
}

/// The operands of an append with values.
///
/// # Safety
/// All arrays are in this memory, and those that are written nothing else uses meanwhile.
unsafe fn append_operands<'a, M: View>(
    append: &'a Append,
    [value, value_pool]: &'a [Array; 2],
) -> Result<regard::Append<'a, M>, Error> {
    // SAFETY: passed on.
    unsafe {
        let latent = latent_operands::<M>(append)?;
        Ok(regard::Append {
            key: latent.key,
            value: M::input(value)?,
            key_pool: latent.key_pool,
            value_pool: M::output(value_pool)?,
            k_scales: latent.k_scales,
            v_scales: scale_operands(&append.v_scales)?,
            block_table: latent.block_table,
            kv_lens: latent.kv_lens,
            cu_seqlens: latent.cu_seqlens,
            rotary: latent.rotary,
        })
    }
}

/// The scales of one pool.
///
/// # Safety
/// As [`append_operands`].
unsafe fn scale_operands<M: View>(
    scales: &Option<Scales>,
) -> Result<Option<AppendScales<'_, M>>, Error> {
    let Some(Scales { array, dynamic }) = scales else { return Ok(None) };
    // SAFETY: passed on.
    unsafe {
        Ok(Some(match dynamic {
            true => AppendScales::Dynamic(M::output(array)?),
            false => AppendScales::Static(M::input(array)?),
        }))
    }
}

/// The operands of an append without values.
///
/// # Safety
/// As [`append_operands`].
unsafe fn latent_operands<M: View>(append: &Append) -> Result<regard::AppendLatent<'_, M>, Error> {
    // SAFETY: passed on.
    unsafe {
        let query = append.query.as_ref().map(|query| M::output(query)).transpose()?;
        let interleaved = append.interleaved;
        let table = operands::optional(&append.rotary_table)?;
        Ok(regard::AppendLatent {
            key: M::input(&append.key)?,
            key_pool: M::output(&append.key_pool)?,
            k_scales: scale_operands(&append.k_scales)?,
            block_table: Some(M::input(&append.block_table)?),
            kv_lens: M::input(&append.kv_lens)?,
            cu_seqlens: operands::optional(&append.cu_seqlens)?,
            rotary: table.map(|table| regard::Rotary { table, interleaved, query }),
        })
    }
}

fn append_on_host(append: &Append) -> Result<(), Fault> {
    // SAFETY: all arrays are in host memory (`Append::run`), which they hold until the call
    // returns.
    let appended = unsafe {
        match &append.values {
            Some(values) => Cpu::new()?.append(&mut append_operands::<Host>(append, values)?),
            None => Cpu::new()?.append_latent(&mut latent_operands::<Host>(append)?),
        }
    };
    Ok(appended?)
}

fn append_on_gpu(append: &Append, stream: u64) -> Result<(), Fault> {
    let Place::Cuda(ordinal) = append.key.place else {
        return Err(argument("key", format!("on {}", append.key.place), "cpu or cuda"));
    };
    let gpu = device::gpu(ordinal)?;
    let _context = device::CurrentContext::kept();
    let in_order = append.arrays().all(|array| array.framework.frees_in_stream_order());
    // SAFETY: all arrays are in this GPU's memory (`Append::run`), which is freed in the order of
    // the stream, or the stream is waited for below. The stream is of this GPU
    // (`framework::stream`).
    unsafe {
        let stream = device::handle(stream);
        match &append.values {
            Some(values) => {
                gpu.append_raw(stream, &mut append_operands::<DeviceMemory>(append, values)?)?;
            }
            None => {
                gpu.append_latent_raw(stream, &mut latent_operands::<DeviceMemory>(append)?)?;
            }
        }
    }
    if !in_order {
        device::synchronize(ordinal, stream)?;
    }
    Ok(())
}

/// Partial results over disjoint sets of keys, and where their merge goes.
pub struct Merge {
    /// `[parts, ..., dim]`.
    pub parts: Array,
    /// `[parts, ...]`.
    pub part_lse: Array,
    /// `[..., dim]`.
    pub out: Array,
    /// `[...]`.
    pub lse: Array,
}

/// Merges outputs over disjoint sets of keys (a shared prefix and what follows it, a cache spread
/// over devices) into the output over all of them; returns (out, lse).
///
/// parts: `[parts, ..., dim]`, f32, f16 or bf16: each part's output.
/// part_lse: f32 `[parts, ...]`, natural logarithms; -inf for a part that saw no key, whose output
///     is not looked at.
/// out: where the result goes, `[..., dim]` of a floating type; lse likewise, f32 `[...]`. New ones
///     are made if not given.
/// stream: as for `attention`.
#[pyfunction]
#[pyo3(signature = (parts, part_lse, *, out = None, lse = None, stream = None))]
pub fn merge<'py>(
    parts: &Bound<'py, PyAny>,
    part_lse: &Bound<'py, PyAny>,
    out: Option<Bound<'py, PyAny>>,
    lse: Option<Bound<'py, PyAny>>,
    stream: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = parts.py();
    let read = Array::read("parts", parts)?;
    let [_, rows @ .., _] = read.shape() else {
        let found = format!("of shape {:?}", read.shape());
        return Err(argument("parts", found, "[parts, rows, dim]").into());
    };
    let rows = rows.to_vec();
    let made = |given: Option<Bound<'py, PyAny>>, shape: &[usize], dtype| match given {
        Some(given) => Ok((given, false)),
        None => Ok::<_, PyErr>((framework::empty(parts, &read, shape, dtype)?, true)),
    };
    let (out, out_is_new) = made(out, &read.shape()[1..], read.dtype)?;
    let (lse, lse_is_new) = made(lse, &rows, DType::F32)?;
    let merge = Merge {
        part_lse: Array::read("part_lse", part_lse)?,
        out: Array::read_mut("out", &out)?,
        lse: Array::read_mut("lse", &lse)?,
        parts: read,
    };
    let place = merge.parts.place;
    for array in [&merge.part_lse, &merge.out, &merge.lse] {
        operands::expect_place(array, place, "as parts")?;
    }
    let handle = framework::stream(stream.as_ref(), parts, &merge.parts)?;
    match place {
        Place::Cpu => py.detach(|| merge_on_host(&merge))?,
        _ => py.detach(|| merge_on_gpu(&merge, handle))?,
    }
    if stream.is_some() {
        for object in [parts, part_lse, &out, &lse] {
            framework::record_stream(object, &merge.parts, handle)?;
        }
    }
    let framework = merge.parts.framework;
    drop(merge);
    let hand_over = |made, is_new| {
        if is_new { framework::handed_over(made, framework) } else { Ok(made) }
    };
    Ok(PyTuple::new(py, [hand_over(out, out_is_new)?, hand_over(lse, lse_is_new)?])?.into_any())
}

/// The operands of a merge.
///
/// # Safety
/// As [`append_operands`].
unsafe fn merge_operands<M: View>(merge: &Merge) -> Result<regard::Merge<'_, M>, Error> {
    // SAFETY: passed on.
    unsafe {
        Ok(regard::Merge {
            parts: M::input(&merge.parts)?,
            part_lse: M::input(&merge.part_lse)?,
            out: M::output(&merge.out)?,
            lse: Some(M::output(&merge.lse)?),
        })
    }
}

fn merge_on_host(merge: &Merge) -> Result<(), Fault> {
    // SAFETY: as `append_on_host`.
    let mut operands = unsafe { merge_operands::<Host>(merge)? };
    Ok(Cpu::new()?.merge(&mut operands)?)
}

fn merge_on_gpu(merge: &Merge, stream: u64) -> Result<(), Fault> {
    let Place::Cuda(ordinal) = merge.parts.place else {
        return Err(argument("parts", format!("on {}", merge.parts.place), "cpu or cuda"));
    };
    let gpu = device::gpu(ordinal)?;
    let _context = device::CurrentContext::kept();
    // SAFETY: as `append_on_gpu`.
    unsafe {
        let mut operands = merge_operands::<DeviceMemory>(merge)?;
        gpu.merge_raw(device::handle(stream), &mut operands)?;
    }
    let arrays = [&merge.parts, &merge.part_lse, &merge.out, &merge.lse];
    if !arrays.into_iter().all(|array| array.framework.frees_in_stream_order()) {
        device::synchronize(ordinal, stream)?;
    }
    Ok(())
}
