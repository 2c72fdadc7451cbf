//! Values that are a part of the keys: the latent cache of multi-head latent attention (MLA). Each
//! key's first dims are its value.

use super::{Inputs, Problem};
use crate::dtype::DType;
use crate::error::Error;
use crate::memory::Memory;
use crate::tensor::Tensor;
use crate::variant::{Attention, Values};

impl Problem {
    /// Rows of a latent cache are keys, whose prefix the values are.
    pub(super) fn validate_latent_rows(&self) -> Result<(), Error> {
        let Problem { key_dtype, value_dtype, values, .. } = *self;
        let is_prefix = values == Values::KeyPrefix;
        let dtypes =
            [("key_dtype", key_dtype, DType::Mla656), ("value_dtype", value_dtype, value_dtype)];
        for (argument, dtype, allowed) in dtypes {
            if dtype.is_latent_row() && !(is_prefix && dtype == allowed) {
                let found = format!("{dtype} with values {values:?}");
                let allowed = "mla656 for keys, whose prefix the values are (Values::KeyPrefix)";
                return Err(Error::argument(argument, found, allowed));
            }
        }
        Ok(())
    }
}

impl<'a, M: Memory> Inputs<'a, M> {
    /// Full attention of `q` over the latent cache `k`, whose first `value_dim` dims are the
    /// values, as `attention` describes it. One tensor is enough: `v` and [`Attention::values`] are
    /// set here.
    ///
    /// ```
    /// use regard::{Attention, Inputs, Tensor, Values};
    ///
    /// // 16 heads over one latent head, as DeepSeek's models have it: 512 compressed and 64 rotary
    /// // dims.
    /// let (q, cache) = (vec![0f32; 16 * 576], vec![0f32; 300 * 576]);
    /// let q = Tensor::new(&q, [1, 1, 16, 576])?;
    /// let k = Tensor::new(&cache, [1, 300, 1, 576])?;
    /// let inputs = Inputs::latent(q, k, 512, Attention::causal())?;
    /// assert_eq!(inputs.v.shape(), [1, 300, 1, 512]);
    /// assert_eq!(inputs.attention.values, Values::KeyPrefix);
    /// # Ok::<(), regard::Error>(())
    /// ```
    ///
    /// # Errors
    /// If `value_dim` is 0, keys have fewer dims, or blocks of values would be cut.
    pub fn latent(
        q: Tensor<'a, M>,
        k: Tensor<'a, M>,
        value_dim: usize,
        attention: Attention<Tensor<'a, M>>,
    ) -> Result<Self, Error> {
        let v = k.prefix(value_dim).ok().filter(|_| value_dim > 0).ok_or_else(|| {
            let found = format!("{value_dim} over keys {:?}", *k);
            let allowed = "1 or more, at most the head dim of keys, in whole blocks";
            Error::argument("value_dim", found, allowed)
        })?;
        let attention = Attention { values: Values::KeyPrefix, ..attention };
        Ok(Inputs { q, k, v, attention })
    }

    /// The scales of values. They are the scales of keys if values are a part of the keys.
    pub(crate) fn value_scales(&self) -> &Option<Tensor<'a, M>> {
        match self.attention.values {
            Values::Separate => &self.attention.v_scales,
            Values::KeyPrefix => &self.attention.k_scales,
        }
    }

    /// Dv; 0 if `v` has no dimensions.
    pub(super) fn value_dim(&self) -> usize {
        self.v.shape().last().map_or(0, |last| last.saturating_mul(self.v.dtype().values()))
    }

    /// Whether `Attention::values` makes values a part of the keys, and they are.
    pub(super) fn has_key_prefix(&self) -> bool {
        self.attention.values == Values::KeyPrefix && self.v.is_prefix_of(&self.k)
    }

    /// Whether values are a part of the keys, and the scales given for values are the scales of
    /// keys.
    pub(super) fn has_key_scales(&self) -> bool {
        let same = |(k, v): (&Tensor<M>, &Tensor<M>)| v.is_prefix_of(k) && k.is_prefix_of(v);
        let attention = &self.attention;
        self.has_key_prefix()
            && attention.k_scales.as_ref().zip(attention.v_scales.as_ref()).is_some_and(same)
    }

    /// Checks values that should be a part of the keys, and their scales.
    pub(super) fn check_values(&self) -> Result<(), Error> {
        let Inputs { k, v, attention, .. } = self;
        if attention.values == Values::Separate {
            return Ok(());
        }
        if !v.is_prefix_of(k) {
            let found = match v.address() == k.address() {
                true => format!("{:?} with strides {:?}", **v, v.strides()),
                false => format!("{:?} with strides {:?} in other memory", **v, v.strides()),
            };
            return Err(Error::argument(
                "v",
                found,
                format!(
                    "the first dims of `k` in its memory ({:?} with strides {:?}), because values \
                     are a prefix of the keys",
                    **k,
                    k.strides()
                ),
            ));
        }
        if attention.v_scales.is_some() && !self.has_key_scales() {
            return Err(Error::argument(
                "v_scales",
                "given",
                "none, or the view that k_scales is: values are a prefix of the keys",
            ));
        }
        Ok(())
    }
}
