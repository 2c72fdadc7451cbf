//! Appending to a cache: writes new keys and values, and may rotate keys and queries (RoPE).

use super::launch::{BUFFERS, Dispatch, Params, expect_forwards, read, row_strides, written};
use super::{AppendParameters, CONSTANTS, Pipeline, SIMD_WIDTH};
use crate::error::Error;
use crate::problem::{MAX_HEAD_DIM, MAX_LEN};
use crate::tensor::{DType, Dims, Tensor, TensorMut};

/// New keys and values, and the cache that they go to. The new tokens of a sequence are the last of
/// those that `kv_lens` counts.
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
    /// Rotary position embedding, applied to keys on the way and to queries in place.
    pub rotary: Option<Rotary<'a>>,
}

/// Rotary position embedding (Su et al. 2021, "RoFormer"): pairs of the leading dims are rotated by
/// an angle that depends on the token's position.
#[derive(Debug)]
pub struct Rotary<'a> {
    /// Cosines and sines of every position, `f32` `[positions, dims]`: `dims / 2` cosines, then as
    /// many sines. The first `dims` of a head are rotated. Tokens at or past `positions` take the
    /// last.
    pub table: Tensor<'a>,
    /// Whether neighbours make a pair (`x[2 i]` and `x[2 i + 1]`), or the halves do (`x[i]` and
    /// `x[i + dims / 2]`).
    pub interleaved: bool,
    /// Queries of the same tokens, `[B, L, Hq, Dk]` or `[total, Hq, Dk]`, to be rotated too.
    pub query: Option<TensorMut<'a>>,
}

/// The rotation as the kernel takes it.
#[derive(Default)]
struct Rotation {
    /// Dims, positions, interleaved.
    table: [i32; 3],
    query_heads: usize,
    query_strides: [i64; 3],
}

impl Rotary<'_> {
    /// Checks the rotation of new keys of this shape.
    fn check(&self, new_k: &Dims, ragged: bool) -> Result<Rotation, Error> {
        let head_dim = new_k.shape().last().copied().unwrap_or(0);
        let shape_error = |name: &str, found: &Dims, allowed: String| {
            let found = format!("{found:?} with strides {:?}", found.strides());
            Err(Error::argument(name, found, allowed))
        };
        let table: &Dims = &self.table;
        let [positions, dims] = *table.shape() else {
            return shape_error("rotary table", table, "[positions, dims]".into());
        };
        let contiguous = table.strides() == [dims as i64, 1] || positions <= 1;
        if table.dtype() != DType::F32
            || !contiguous
            || !(1..=MAX_LEN).contains(&positions)
            || !dims.is_multiple_of(2)
            || !(2..=head_dim).contains(&dims)
        {
            let allowed = "f32 [positions, dims], contiguous, of one position at least";
            let allowed = format!("{allowed}, and of an even number of dims up to {head_dim}");
            return shape_error("rotary table", table, allowed);
        }
        let mut rotation = Rotation {
            table: [dims as i32, positions as i32, self.interleaved.into()],
            ..Rotation::default()
        };
        let Some(query) = &self.query else { return Ok(rotation) };
        let query: &Dims = query;
        expect_forwards("query", query)?;
        let heads_at = new_k.shape().len() - 2;
        rotation.query_heads = query.shape().get(heads_at).copied().unwrap_or(0);
        let mut expected = new_k.shape().to_vec();
        expected[heads_at] = rotation.query_heads;
        let unit = head_dim == 1 || query.strides().last() == Some(&1);
        if query.shape() != expected
            || query.dtype() != new_k.dtype()
            || !unit
            || rotation.query_heads > MAX_LEN
        {
            let allowed = format!(
                "{} {expected:?}, as new_k has, with an innermost stride of 1",
                new_k.dtype()
            );
            return shape_error("query", query, allowed);
        }
        rotation.query_strides = row_strides(query, ragged);
        Ok(rotation)
    }
}

/// Makes the dispatch that appends; `None` if there is nothing new. Lengths and table entries are
/// read on the device; a token for which they leave no place is not written.
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
    let rotation = match &call.rotary {
        Some(rotary) => rotary.check(&call.new_k, ragged)?,
        None => Rotation::default(),
    };
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
        query_batch_stride: rotation.query_strides[0],
        query_token_stride: rotation.query_strides[1],
        query_head_stride: rotation.query_strides[2],
        kv_heads: heads as i32,
        rotary_dim: rotation.table[0],
        rotary_positions: rotation.table[1],
        rotary_interleaved: rotation.table[2],
    };
    let mut buffers = [None; BUFFERS];
    buffers[1] = read(&call.new_k);
    buffers[2] = read(&call.new_v);
    buffers[3] = written(&mut call.k);
    buffers[4] = written(&mut call.v);
    buffers[5] = read(&call.kv_lens);
    buffers[6] = call.cu_seqlens.as_ref().and_then(read);
    buffers[7] = call.block_table.as_ref().and_then(read);
    if let Some(rotary) = &mut call.rotary {
        buffers[8] = read(&rotary.table);
        buffers[9] = rotary.query.as_mut().and_then(written);
    }
    let function = match dtype {
        DType::F32 => "append_float",
        DType::F16 => "append_half",
        _ => "append_bfloat",
    };
    Ok(Some(Dispatch {
        // The kernel reads none of the constants; Metal wants those that a library declares all the
        // same.
        pipeline: Pipeline { function, constants: [0; CONSTANTS.len()] },
        params: Params::Append(params),
        buffers,
        grid: [new_tokens as u32, (heads + rotation.query_heads) as u32, batch as u32],
        threads: SIMD_WIDTH as u32,
        threadgroup_bytes: 0,
    }))
}
