//! Appending to a cache: the dispatch that writes new keys and values to their slots, and may
//! rotate keys and queries (RoPE) and quantize on the way.

use super::launch::{
    BUFFERS, Binding, Dispatch, Params, expect_forwards, kv_format, read, written,
};
use super::{AppendParameters, CONSTANTS, MetalMemory, Pipeline, SIMD_WIDTH};
use crate::append::{self, AppendScales, AppendShape};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernel_parameters::{count, row_strides, scale_strides, token_strides};
use crate::params::{RowStrides, TokenStrides};
use crate::tensor::Dims;

/// New tokens for a cache in Metal buffers.
pub type Append<'a> = append::Append<'a, MetalMemory>;

/// New rows for a latent cache in Metal buffers.
pub type AppendLatent<'a> = append::AppendLatent<'a, MetalMemory>;

/// Rotary position embedding by a table in a Metal buffer.
pub type Rotary<'a> = append::Rotary<'a, MetalMemory>;

/// A pool's scales as a buffer.
fn bound_scales(scales: Option<&AppendScales<'_, MetalMemory>>) -> Option<Binding> {
    match scales? {
        AppendScales::Static(tensor) => read(tensor),
        AppendScales::Dynamic(tensor) => written(tensor),
    }
}

/// The kernel's parameters, from checked operands.
fn parameters(append: &Append, shape: &AppendShape) -> AppendParameters {
    let query = append.rotary.as_ref().and_then(|rotary| rotary.query.as_ref());
    let strides = |scales: &Option<AppendScales<MetalMemory>>| {
        scales.as_ref().map_or(RowStrides::default(), |scales| scale_strides(scales.dims()))
    };
    let is_dynamic = |scales: &Option<AppendScales<MetalMemory>>| {
        scales.as_ref().is_some_and(AppendScales::is_dynamic)
    };
    AppendParameters {
        key_strides: token_strides(&append.key),
        value_strides: token_strides(&append.value),
        query_strides: query.map_or(TokenStrides::default(), |query| token_strides(query)),
        key_pool_strides: row_strides(&append.key_pool, 3),
        value_pool_strides: row_strides(&append.value_pool, 3),
        key_scale_strides: strides(&append.k_scales),
        value_scale_strides: strides(&append.v_scales),
        block_table_stride: append.block_table.as_ref().map_or(0, |table| table.strides()[0]),
        batch: count(shape.batch),
        new_tokens: match append.cu_seqlens {
            Some(_) => 0,
            None => count(shape.tokens.checked_div(shape.batch).unwrap_or(0)),
        },
        kv_heads: count(shape.kv_heads),
        head_dim: count(shape.head_dim),
        value_dim: count(shape.value_dim),
        rotary_dim: count(shape.rotary_dim),
        rotary_interleaved: append.rotary.as_ref().is_some_and(|rotary| rotary.interleaved).into(),
        rotary_start: count(shape.rotary_start),
        rotary_positions: count(shape.rotary_positions),
        block_size: count(shape.block_size),
        blocks: count(shape.blocks),
        table_blocks: count(shape.table_blocks),
        given_block_table: append.block_table.is_some().into(),
        key_format: kv_format(shape.key_dtype, shape.dtype),
        value_format: kv_format(shape.value_dtype, shape.dtype),
        dynamic_key_scales: is_dynamic(&append.k_scales).into(),
        dynamic_value_scales: is_dynamic(&append.v_scales).into(),
        unused: 0,
    }
}

/// The pipeline of a type of new tokens. The formats of the pools are parameters: this way there
/// are three pipelines, not a hundred.
pub(super) fn pipeline(dtype: DType) -> Pipeline {
    let function = match dtype {
        DType::F32 => "append_float",
        DType::F16 => "append_half",
        _ => "append_bfloat",
    };
    // The kernel reads none of the constants; Metal wants those that a library declares all the
    // same.
    Pipeline { function, constants: [0; CONSTANTS.len()] }
}

/// The dispatch of an append to a latent cache, as `append`. Rows that are not quantized are
/// written as the rotary dims and the others.
///
/// # Errors
/// As there, or if rows that are not quantized have only rotary dims.
pub fn append_latent(append_latent: &mut AppendLatent) -> Result<Option<Dispatch>, Error> {
    let (append, shape) = append_latent.on_gpu()?;
    dispatch(&append, &shape)
}

/// The dispatch of an append; `None` if there is nothing new. Lengths and table entries are read on
/// the device; a token for which they leave no place is not written.
///
/// # Errors
/// If shapes or types do not fit together.
pub fn append(append: &Append) -> Result<Option<Dispatch>, Error> {
    dispatch(append, &append.check()?)
}

/// The dispatch of an append whose operands have been checked.
fn dispatch(append: &Append, shape: &AppendShape) -> Result<Option<Dispatch>, Error> {
    let rotary = append.rotary.as_ref();
    let query = rotary.and_then(|rotary| rotary.query.as_ref());
    let named: [(&str, Option<&Dims>); 7] = [
        ("key", Some(&append.key)),
        ("value", Some(&append.value)),
        ("key_pool", Some(&append.key_pool)),
        ("value_pool", Some(&append.value_pool)),
        ("k_scales", append.k_scales.as_ref().map(AppendScales::dims)),
        ("v_scales", append.v_scales.as_ref().map(AppendScales::dims)),
        ("query", query.map(|query| &**query)),
    ];
    for (name, dims) in named {
        dims.map_or(Ok(()), |dims| expect_forwards(name, dims))?;
    }
    if shape.tokens == 0 || shape.batch == 0 || shape.kv_heads + shape.query_heads == 0 {
        return Ok(None);
    }
    let mut buffers = [None; BUFFERS];
    buffers[1] = read(&append.key);
    buffers[2] = read(&append.value);
    buffers[3] = written(&append.key_pool);
    buffers[4] = written(&append.value_pool);
    buffers[5] = read(&append.kv_lens);
    buffers[6] = append.cu_seqlens.as_ref().and_then(read);
    buffers[7] = append.block_table.as_ref().and_then(read);
    buffers[8] = rotary.and_then(|rotary| read(&rotary.table));
    buffers[9] = query.and_then(written);
    buffers[10] = bound_scales(append.k_scales.as_ref());
    buffers[11] = bound_scales(append.v_scales.as_ref());
    Ok(Some(Dispatch {
        pipeline: pipeline(shape.dtype),
        params: Params::Append(parameters(append, shape)),
        buffers,
        grid: [shape.tokens as u32, (2 * shape.kv_heads + shape.query_heads) as u32, 1],
        threads: SIMD_WIDTH as u32,
        threadgroup_bytes: 0,
    }))
}
