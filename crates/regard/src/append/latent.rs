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
    /// table; `Dk / 32` blocks of `q8_0` or `q4_0`.
    pub key_pool: TensorMut<'a, M>,
    /// Scales of rows; for pools of `e4m3`, `e5m2` and `i8`. Dynamic scales run on the CPU only: a
    /// GPU kernel writes the rotary dims and the other dims separately.
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
        let key_dim = self.key.shape().last().copied().unwrap_or(0);
        let pool_dim = self.key_pool.shape().last().copied().unwrap_or(0);
        let query_dims = |query: &TensorMut<M>| 0..query.shape().last().copied().unwrap_or(0);
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

    /// The same as an append of two parts of each row to two parts of the pool, for kernels that
    /// write keys, whose leading dims they rotate, and values: the rotary dims are its keys, the
    /// others its values.
    ///
    /// # Errors
    /// If the operands break the contract, or rows cannot be written in two parts.
    pub(crate) fn halves(&mut self) -> Result<Append<'_, M>, Error> {
        let shape = self.check()?;
        if let Some(AppendScales::Dynamic(_)) = self.k_scales {
            let allowed = "given ones: a GPU's kernel writes the parts of a row apart";
            return Err(Error::argument("k_scales", "dynamic in a latent cache", allowed));
        }
        let values = shape.key_dtype.values();
        let start = match shape.rotary_dim {
            0 => shape.head_dim / 2 / values * values,
            _ => shape.rotary_start,
        };
        expect(
            "key",
            format_args!("of {} dims, to be written as {start} and the others", shape.head_dim),
            start > 0 && start.is_multiple_of(values),
            format_args!("parts that are not empty, of a multiple of {values} dims, on a GPU"),
        )?;
        let (end, scales) = (shape.head_dim, self.k_scales.as_ref());
        Ok(Append {
            key: self.key.narrow(start..end),
            value: self.key.narrow(0..start),
            key_pool: self.key_pool.narrow(start / values..end / values),
            value_pool: self.key_pool.narrow(0..start / values),
            k_scales: scales.map(AppendScales::again),
            v_scales: scales.map(AppendScales::again),
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
