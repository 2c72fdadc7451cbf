//! Forms of operands that candle's models use and regard's kernels do not read: each is replaced
//! by an equivalent view if there is one, else by a copy.

use crate::options::Attention;
use candle_core::{DType, Result, Tensor};

/// Queries, keys and values, and everything else, as the kernels read them.
pub(crate) struct Prepared {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) attention: Attention,
}

impl Prepared {
    pub(crate) fn new(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        attention: &Attention,
    ) -> Result<Prepared> {
        // A pool belongs to all sequences, however few of them are asked about: it is not copied.
        let rows = |x: &Tensor| match attention.block_table {
            Some(_) => Ok(x.clone()),
            None => unit_stride(x),
        };
        Ok(Prepared {
            q: unit_stride(q)?,
            k: rows(k)?,
            v: rows(v)?,
            attention: attention.as_ref().try_map(option)?,
        })
    }
}

/// A tensor of the options.
pub(crate) fn option(name: &str, x: &Tensor) -> Result<Tensor> {
    match name {
        "mask" => mask(x),
        "alibi_slopes" | "sinks" => match x.dtype() {
            DType::F16 | DType::BF16 | DType::F64 => unit_stride(&x.to_dtype(DType::F32)?),
            _ => unit_stride(x),
        },
        // Of any strides: between the codes, for example.
        "k_scales" | "v_scales" | "second_k_scales" | "second_v_scales" => match x.dtype() {
            DType::F16 | DType::BF16 | DType::F64 => x.to_dtype(DType::F32),
            _ => Ok(x.clone()),
        },
        // Its words are bits, not numbers.
        "tree_mask" => unit_stride(x),
        _ => match x.dtype() {
            DType::I64 => narrowed(x),
            _ => unit_stride(x),
        },
    }
}

/// A mask of four dimensions. Missing ones are broadcast, as candle does: `[Lq, Lk]` is of every
/// sequence and head, `[Hq, Lq, Lk]` of every sequence.
fn mask(x: &Tensor) -> Result<Tensor> {
    let mut mask = x.clone();
    while mask.rank() < 4 {
        mask = mask.unsqueeze(0)?;
    }
    let shape = mask.shape().clone();
    let convert = match x.dtype() {
        DType::U32 | DType::I16 | DType::I32 | DType::I64 => |x: &Tensor| x.ne(0u32),
        DType::F64 => |x: &Tensor| x.to_dtype(DType::F32),
        _ if has_unit_stride(&mask) => return Ok(mask),
        _ => Tensor::contiguous,
    };
    // Broadcast elements are copied once.
    for dim in 0..shape.rank() - 1 {
        if mask.stride()[dim] == 0 && mask.dim(dim)? > 1 {
            mask = mask.narrow(dim, 0, 1)?;
        }
    }
    unit_stride(&convert(&mask)?)?.broadcast_as(shape)
}

/// Whether neighbours of the last dimension are neighbours in memory.
fn has_unit_stride(x: &Tensor) -> bool {
    match (x.dims().last(), x.stride().last()) {
        (Some(&n), Some(&stride)) => n <= 1 || stride == 1,
        _ => true,
    }
}

/// The tensor with a unit innermost stride: a copy if it has another.
pub(crate) fn unit_stride(x: &Tensor) -> Result<Tensor> {
    if has_unit_stride(x) { Ok(x.clone()) } else { x.contiguous() }
}

/// 64-bit integers as 32-bit ones, saturated: no valid length, position or block is at the limit.
fn narrowed(x: &Tensor) -> Result<Tensor> {
    // Through u32, which has the bits of the i32 that regard reads.
    x.clamp(i64::from(i32::MIN), i64::from(i32::MAX))?.to_dtype(DType::U32)?.contiguous()
}
