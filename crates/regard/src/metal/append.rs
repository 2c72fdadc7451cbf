//! Appending to a paged cache: the dispatch that writes new keys and values to their slots, and may
//! rotate keys and queries on the way (RoPE).

use super::launch::{BUFFERS, Dispatch, Params, count, expect_forwards, read, written};
use super::{AppendParameters, CONSTANTS, MetalMemory, Pipeline, SIMD_WIDTH};
use crate::append::{self, AppendShape};
use crate::dtype::DType;
use crate::error::Error;
use crate::params::{RowStrides, TokenStrides};
use crate::tensor::Dims;

/// New tokens for a paged cache in Metal buffers.
pub type Append<'a> = append::Append<'a, MetalMemory>;

/// New rows for a latent cache in Metal buffers.
pub type AppendLatent<'a> = append::AppendLatent<'a, MetalMemory>;

/// Rotary position embedding by a table in a Metal buffer.
pub type Rotary<'a> = append::Rotary<'a, MetalMemory>;

/// The strides of `[total, H, D]`.
fn token_strides(dims: &Dims) -> TokenStrides {
    TokenStrides { token: dims.strides()[0], head: dims.strides()[1] }
}

/// The strides of `[blocks, block_size, H, D]`.
fn pool_strides(dims: &Dims) -> RowStrides {
    let strides = dims.strides();
    RowStrides { batch: strides[0], token: strides[1], head: strides[2] }
}

/// What the kernel reads of operands that were checked.
fn parameters(append: &Append, shape: &AppendShape) -> AppendParameters {
    let query = append.rotary.as_ref().and_then(|rotary| rotary.query.as_ref());
    AppendParameters {
        key_strides: token_strides(&append.key),
        value_strides: token_strides(&append.value),
        query_strides: query.map_or(TokenStrides::default(), |query| token_strides(query)),
        key_pool_strides: pool_strides(&append.key_pool),
        value_pool_strides: pool_strides(&append.value_pool),
        block_table_stride: append.block_table.as_ref().map_or(0, |table| table.strides()[0]),
        batch: count(shape.batch),
        tokens: count(shape.tokens),
        new_tokens: match append.cu_seqlens {
            Some(_) => 0,
            None => count(shape.tokens.checked_div(shape.batch).unwrap_or(0)),
        },
        kv_heads: count(shape.kv_heads),
        head_dim: count(shape.head_dim),
        value_dim: count(shape.value_dim),
        rotary_dim: count(shape.rotary_dim),
        rotary_interleaved: append.rotary.as_ref().is_some_and(|rotary| rotary.interleaved).into(),
        rotary_positions: count(shape.rotary_positions),
        block_size: count(shape.block_size),
        blocks: count(shape.blocks),
        table_blocks: count(shape.table_blocks),
    }
}

/// The pipeline of a type.
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

/// The kernel copies elements as they are, to pages.
fn check_supported(append: &Append, shape: &AppendShape) -> Result<(), Error> {
    for (name, dtype) in [("key_pool", shape.key_dtype), ("value_pool", shape.value_dtype)] {
        if dtype != shape.dtype {
            let allowed = format!("{}: Metal's append does not quantize", shape.dtype);
            return Err(Error::argument(name, format!("of type {dtype}"), allowed));
        }
    }
    if append.block_table.is_none() {
        let allowed = "given: Metal's append writes to paged caches, one block per sequence too";
        return Err(Error::argument("block_table", "missing", allowed));
    }
    Ok(())
}

/// The dispatch of an append to a latent cache, as [`append`]: the kernel writes the rotary dims of
/// a row and the others as keys and values.
///
/// # Errors
/// As there, or if one of the two parts is empty.
pub fn append_latent(append_latent: &mut AppendLatent) -> Result<Option<Dispatch>, Error> {
    append(&append_latent.halves()?)
}

/// The dispatch of an append; `None` if there is nothing new. Lengths and table entries are read on
/// the device; a token for which they leave no place is not written.
///
/// # Errors
/// If shapes or types do not fit together.
pub fn append(append: &Append) -> Result<Option<Dispatch>, Error> {
    let shape = append.check()?;
    check_supported(append, &shape)?;
    let rotary = append.rotary.as_ref();
    let query = rotary.and_then(|rotary| rotary.query.as_ref());
    let named: [(&str, Option<&Dims>); 5] = [
        ("key", Some(&append.key)),
        ("value", Some(&append.value)),
        ("key_pool", Some(&append.key_pool)),
        ("value_pool", Some(&append.value_pool)),
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
    Ok(Some(Dispatch {
        pipeline: pipeline(shape.dtype),
        params: Params::Append(parameters(append, &shape)),
        buffers,
        grid: [shape.tokens as u32, (shape.kv_heads + shape.query_heads) as u32, 1],
        threads: SIMD_WIDTH as u32,
        threadgroup_bytes: 0,
    }))
}
