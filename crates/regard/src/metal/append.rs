//! Writing new keys and values into a cache.

use super::launch::{BUFFERS, Dispatch, Params, expect_forwards, read, row_strides, written};
use super::{AppendParameters, CONSTANTS, Pipeline, SIMD_WIDTH};
use crate::error::Error;
use crate::problem::{MAX_HEAD_DIM, MAX_LEN};
use crate::tensor::{DType, Dims, Tensor, TensorMut};

/// New keys and values, and the cache that they go to. The new tokens of a sequence are the last of those that `kv_lens` counts.
#[derive(Debug)]
pub struct Append<'a> {
    /// `[B, L, Hkv, Dk]`, or `[total, Hkv, Dk]` with `cu_seqlens`: the new keys.
    pub new_k: Tensor<'a>,
    /// Likewise, with Dv: the new values.
    pub new_v: Tensor<'a>,
    /// `[B, Lk, Hkv, Dk]`, or pages `[blocks, block_size, Hkv, Dk]` with `block_table`.
    pub k: TensorMut<'a>,
    /// Likewise, with Dv.
    pub v: TensorMut<'a>,
    /// `[B]` `i32`: keys in use, the new ones included.
    pub kv_lens: Tensor<'a>,
    /// `[B + 1]` `i32`: how many new tokens each sequence has.
    pub cu_seqlens: Option<Tensor<'a>>,
    /// `[B, max_blocks]` `i32`.
    pub block_table: Option<Tensor<'a>>,
}

/// The dispatch that appends; `None` where there is nothing new. Lengths and table entries are read on the device: a token that they leave no place
/// for is not written.
///
/// # Errors
/// If shapes or types do not fit together.
pub fn append(mut call: Append) -> Result<Option<Dispatch>, Error> {
    let (ragged, paged) = (call.cu_seqlens.is_some(), call.block_table.is_some());
    let rank = if ragged { 3 } else { 4 };
    let shape_error = |name: &str, found: &[usize], allowed: &str| {
        Err(Error::argument(name, format!("of shape {found:?}"), allowed))
    };
    if call.new_k.rank() != rank {
        let allowed = if ragged {
            "[total, Hkv, Dk], because cu_seqlens is given"
        } else {
            "[B, L, Hkv, Dk]"
        };
        return shape_error("new_k", call.new_k.shape(), allowed);
    }
    if call.k.rank() != 4 {
        return shape_error(
            "k",
            call.k.shape(),
            "[B, Lk, Hkv, Dk] or [blocks, block_size, Hkv, Dk]",
        );
    }
    let dtype = call.new_k.dtype();
    let named: [(&str, &Dims); 4] =
        [("new_k", &call.new_k), ("new_v", &call.new_v), ("k", &call.k), ("v", &call.v)];
    for (name, dims) in named {
        expect_forwards(name, dims)?;
        if dims.dtype() != dtype || !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::argument(
                name,
                format!("of type {}", dims.dtype()),
                "f32, f16 or bf16, all alike",
            ));
        }
        if dims.shape().last().is_some_and(|&dim| dim > 1) && dims.strides().last() != Some(&1) {
            return Err(Error::argument(
                name,
                format!("a view with strides {:?}", dims.strides()),
                "an innermost stride of 1",
            ));
        }
    }
    let (tokens, cache) = (call.new_k.shape(), call.k.shape());
    let (heads, head_dim) = (tokens[rank - 2], tokens[rank - 1]);
    let value_dim = call.new_v.shape().last().copied().unwrap_or(0);
    let mut expected = tokens.to_vec();
    expected[rank - 1] = value_dim;
    if call.new_v.shape() != expected {
        return shape_error(
            "new_v",
            call.new_v.shape(),
            &format!("{expected:?}, as new_k has, but for the last"),
        );
    }
    if cache[2..] != [heads, head_dim] {
        return shape_error("k", cache, &format!("{heads} heads of dim {head_dim}, as new_k has"));
    }
    if call.v.shape() != [cache[0], cache[1], heads, value_dim] {
        return shape_error("v", call.v.shape(), "as k, with new_v's head dim");
    }
    if !(1..=MAX_HEAD_DIM).contains(&head_dim) || !(1..=MAX_HEAD_DIM).contains(&value_dim) {
        return shape_error("new_k", tokens, &format!("head dims of 1 to {MAX_HEAD_DIM}"));
    }
    let batch = call.kv_lens.shape().first().copied().unwrap_or(0);
    let vectors = [
        ("kv_lens", Some(&call.kv_lens), batch),
        ("cu_seqlens", call.cu_seqlens.as_ref(), batch + 1),
    ];
    for (name, tensor, length) in vectors {
        let Some(tensor) = tensor else { continue };
        if tensor.dtype() != DType::I32
            || tensor.shape() != [length]
            || (length > 1 && tensor.strides() != [1])
        {
            return Err(Error::argument(
                name,
                format!("{tensor:?}"),
                format!("i32[{length}], contiguous"),
            ));
        }
    }
    if let Some(table) = &call.block_table
        && (table.dtype() != DType::I32
            || table.rank() != 2
            || table.shape()[0] != batch
            || (table.shape()[1] > 1 && table.strides()[1] != 1))
    {
        return Err(Error::argument(
            "block_table",
            format!("{table:?}"),
            format!("i32[{batch}, max_blocks]"),
        ));
    }
    if (!ragged && tokens[0] != batch) || (!paged && cache[0] != batch) {
        return Err(Error::argument("kv_lens", format!("of {batch} entries"), "one a sequence"));
    }
    let new_tokens = if ragged { tokens[0] } else { tokens[1] };
    let capacity =
        call.block_table.map_or(cache[1], |table| table.shape()[1].saturating_mul(cache[1]));
    if [new_tokens, cache[0], cache[1], batch, heads].into_iter().any(|n| n > MAX_LEN) {
        return Err(Error::argument(
            "k",
            format!("of shape {cache:?}"),
            format!("dimensions to {MAX_LEN}"),
        ));
    }
    if new_tokens == 0 || batch == 0 || heads == 0 {
        return Ok(None);
    }
    let new_k = row_strides(&call.new_k, ragged);
    let new_v = row_strides(&call.new_v, ragged);
    let (k, v) = (row_strides(&call.k, false), row_strides(&call.v, false));
    let params = AppendParameters {
        new_k_batch_stride: new_k[0],
        new_k_token_stride: new_k[1],
        new_k_head_stride: new_k[2],
        new_v_batch_stride: new_v[0],
        new_v_token_stride: new_v[1],
        new_v_head_stride: new_v[2],
        k_batch_stride: k[0],
        k_token_stride: k[1],
        k_head_stride: k[2],
        v_batch_stride: v[0],
        v_token_stride: v[1],
        v_head_stride: v[2],
        table_stride: call.block_table.map_or(0, |table| table.strides()[0]),
        head_dim: head_dim as i32,
        value_dim: value_dim as i32,
        new_tokens: new_tokens as i32,
        total: if ragged { tokens[0] as i32 } else { 0 },
        ragged: ragged.into(),
        capacity: capacity.min(MAX_LEN) as i32,
        block_size: if paged { cache[1] as i32 } else { 0 },
        blocks: cache[0] as i32,
    };
    let mut buffers = [None; BUFFERS];
    buffers[1] = read(&call.new_k);
    buffers[2] = read(&call.new_v);
    buffers[3] = written(&mut call.k);
    buffers[4] = written(&mut call.v);
    buffers[5] = read(&call.kv_lens);
    buffers[6] = call.cu_seqlens.as_ref().and_then(read);
    buffers[7] = call.block_table.as_ref().and_then(read);
    let function = match dtype {
        DType::F32 => "append_float",
        DType::F16 => "append_half",
        _ => "append_bfloat",
    };
    Ok(Some(Dispatch {
        // The kernel reads none of the constants; Metal wants those that a library declares all the same.
        pipeline: Pipeline { function, constants: [0; CONSTANTS.len()] },
        params: Params::Append(params),
        buffers,
        grid: [new_tokens as u32, heads as u32, batch as u32],
        threads: SIMD_WIDTH as u32,
        threadgroup_bytes: 0,
    }))
}
