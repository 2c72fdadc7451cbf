//! Appending to a latent cache: rows that are keys, and whose first dims are values.

use super::{Append, AppendScales, AppendShape, Rotary};
use crate::error::Error;
use crate::expect::expect;
use crate::memory::{Host, Memory};
use crate::tensor::{Tensor, TensorMut};

/// New rows for the latent cache of multi-head latent attention (MLA), which are keys and values at
/// once ([`Values::KeyPrefix`](crate::Values)). Two things differ from [`Append`]: there are no
/// values to write, and the rotary embedding rotates the *last* dims of each row (in DeepSeek's
/// models the last 64 of 576) and of each query head.
#[derive(Debug)]
pub struct AppendLatent<'a, M: Memory = Host> {
    /// New rows, `[total, Hkv, Dk]`.
    pub key: Tensor<'a, M>,
    /// Their destination: `[blocks, block_size, Hkv, Dk]`, or `[B, Lk, Hkv, Dk]` without a block
    /// table; `Dk / 32` blocks of `q8_0` or `q4_0`, or one row of `mla656`, whose Dk is 576.
    pub key_pool: TensorMut<'a, M>,
    /// Scales of rows; for pools of `e4m3`, `e5m2` and `i8`.
    pub k_scales: Option<AppendScales<'a, M>>,
    /// As [`Append::block_table`].
    pub block_table: Option<Tensor<'a, M>>,
    /// As [`Append::kv_lens`].
    pub kv_lens: Tensor<'a, M>,
    /// As [`Append::cu_seqlens`].
    pub cu_seqlens: Option<Tensor<'a, M>>,
    /// Rotary position embedding of the last dims, as many as the table has.
    pub rotary: Option<Rotary<'a, M>>,
}

impl<M: Memory> AppendLatent<'_, M> {
    /// As an append of keys whose values have no dims.
    pub(crate) fn whole(&mut self) -> Append<'_, M> {
        self.whole_with_queries(0)
    }

    /// [`AppendLatent::whole`], with the dims of queries from `start` on.
    fn whole_with_queries(&mut self, start: usize) -> Append<'_, M> {
        let key_dim = self.key.shape().last().copied().unwrap_or(0);
        let pool_dim = self.key_pool.shape().last().copied().unwrap_or(0);
        let query_dims = |query: &TensorMut<M>| start..query.shape().last().copied().unwrap_or(0);
        Append {
            key: self.key.narrow(0..key_dim),
            value: self.key.narrow(0..0),
            value_pool: self.key_pool.narrow(0..0),
            key_pool: self.key_pool.narrow(0..pool_dim),
            k_scales: self.k_scales.as_ref().map(AppendScales::again),
            v_scales: None,
            block_table: self.block_table,
            kv_lens: self.kv_lens,
            cu_seqlens: self.cu_seqlens,
            rotary: self.rotary.as_ref().map(|rotary| Rotary {
                table: rotary.table,
                interleaved: rotary.interleaved,
                query: rotary.query.as_ref().map(|query| query.narrow(query_dims(query))),
            }),
        }
    }

    /// Checks shapes, types and strides.
    pub(crate) fn check(&mut self) -> Result<AppendShape, Error> {
        let mut shape = self.whole().check_rows_and_tables(false)?;
        shape.rotary_start = shape.head_dim - shape.rotary_dim;
        Ok(shape)
    }

    /// The append that writes these rows on a GPU, and its sizes. Rows that are quantized are
    /// written whole: the values of a scale lie on both sides of the first rotary dim.
    ///
    /// # Errors
    /// If the operands break the contract, or rows of the pool's type have only rotary dims.
    pub(crate) fn on_gpu(&mut self) -> Result<(Append<'_, M>, AppendShape), Error> {
        let shape = self.check()?;
        if shape.key_dtype != shape.dtype {
            return Ok((self.whole_with_queries(shape.rotary_start), shape));
        }
        let append = self.halves(&shape)?;
        let shape = append.check()?;
        Ok((append, shape))
    }

    /// The same as an append of two parts of each row to two parts of the pool. Kernels write keys,
    /// whose leading dims they rotate, and values: here the rotary dims are the keys, the other
    /// dims the values.
    fn halves(&mut self, shape: &AppendShape) -> Result<Append<'_, M>, Error> {
        let start = match shape.rotary_dim {
            0 => shape.head_dim / 2,
            _ => shape.rotary_start,
        };
        expect(
            "key",
            format_args!("of {} dims, to be written as {start} and the others", shape.head_dim),
            start > 0,
            "parts that are not empty, on a GPU",
        )?;
        let end = shape.head_dim;
        Ok(Append {
            key: self.key.narrow(start..end),
            value: self.key.narrow(0..start),
            key_pool: self.key_pool.narrow(start..end),
            value_pool: self.key_pool.narrow(0..start),
            k_scales: None,
            v_scales: None,
            block_table: self.block_table,
            kv_lens: self.kv_lens,
            cu_seqlens: self.cu_seqlens,
            rotary: self.rotary.as_ref().map(|rotary| Rotary {
                table: rotary.table,
                interleaved: rotary.interleaved,
                query: rotary.query.as_ref().map(|query| query.narrow(start..end)),
            }),
        })
    }
}

impl<M: Memory> AppendScales<'_, M> {
    /// The same scales.
    fn again(&self) -> AppendScales<'_, M> {
        match self {
            AppendScales::Static(scales) => AppendScales::Static(*scales),
            AppendScales::Dynamic(scales) => {
                let dims = scales.shape().last().copied().unwrap_or(0);
                AppendScales::Dynamic(scales.narrow(0..dims))
            }
        }
    }
}
