//! Keys in two parts: latent rows, which are the values too, and rotary rows in a tensor of their
//! own.

use super::{Inputs, Problem, whole_blocks};
use crate::error::Error;
use crate::expect::{expect_dtype, expect_rank, expect_shape, expect_unit_stride, one_of};
use crate::memory::Memory;
use crate::variant::Values;

impl Problem {
    /// Checks that the dims of keys in two parts fit together.
    pub(super) fn validate_rotary(&self) -> Result<(), Error> {
        if self.rotary_dim == 0 {
            return Ok(());
        }
        one_of("rotary_dim", self.rotary_dim, 0..self.head_dim)?;
        whole_blocks("rotary_dim", self.rotary_dim, self.key_dtype)?;
        if self.values != Values::KeyPrefix {
            let allowed = "0, unless values are a prefix of the keys";
            return Err(Error::argument("rotary_dim", self.rotary_dim, allowed));
        }
        let latent_dim = self.head_dim - self.rotary_dim;
        if self.value_dim != latent_dim {
            let allowed = format!(
                "{latent_dim}, all dims of `k`, because the other {} are in rotary_k",
                self.rotary_dim
            );
            return Err(Error::argument("value_dim", self.value_dim, allowed));
        }
        if self.key_lists.is_some_and(|lists| lists.second.is_some()) {
            let allowed = "none beside rotary_k: a second cache has keys in one part";
            return Err(Error::argument("second_indices", "given", allowed));
        }
        Ok(())
    }
}

impl<M: Memory> Inputs<'_, M> {
    /// The dims of keys that are in `rotary_k`; 0 without it.
    pub(super) fn rotary_dim(&self) -> usize {
        let last = |keys: &crate::tensor::Tensor<M>| {
            keys.shape().last().map_or(0, |last| last.saturating_mul(keys.dtype().values()))
        };
        self.attention.rotary_k.as_ref().map_or(0, last)
    }

    /// Checks the type, shape and strides of `rotary_k`, and the options beside it. The shape of
    /// `k` has been checked, but for its head dim.
    pub(super) fn check_rotary(&self) -> Result<(), Error> {
        let Some(rotary) = &self.attention.rotary_k else { return Ok(()) };
        if self.attention.values != Values::KeyPrefix {
            let allowed = "given together with values that are a prefix of the keys only";
            return Err(Error::argument("rotary_k", "given", allowed));
        }
        let k = &self.k;
        expect_dtype("rotary_k", rotary.dtype(), &[k.dtype()])?;
        expect_rank("rotary_k", rotary.shape(), k.rank(), "as k has")?;
        let last = k.rank() - 1;
        let rows = &rotary.shape()[..last];
        expect_shape("rotary_k", rows, &k.shape()[..last], "as k has, but for the last")?;
        expect_unit_stride("rotary_k", rotary.shape(), rotary.strides())?;
        if rotary.shape()[last] == 0 {
            let found = format!("of shape {:?}", rotary.shape());
            return Err(Error::argument("rotary_k", found, "a rotary dim of 1 or more"));
        }
        if self.attention.second_k.is_some() {
            let allowed = "none beside rotary_k: a second cache has keys in one part";
            return Err(Error::argument("second_k", "given", allowed));
        }
        Ok(())
    }
}
