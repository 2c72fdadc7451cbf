//! A second list of keys into a second cache: a row attends to the entries of both.

use super::check_scales::check_scales;
use super::selection::check_lists_of_rows;
use super::{Inputs, Problem};
use crate::error::Error;
use crate::expect::{expect_dtype, expect_rank, expect_shape, expect_unit_stride, one_of};
use crate::memory::Memory;
use crate::tensor::Tensor;
use crate::variant::Values;

impl<'a, M: Memory> Inputs<'a, M> {
    /// The entries of the longest second list, if there are second lists.
    pub(super) fn second_len(&self) -> Option<usize> {
        let lists = self.attention.second_indices.as_ref()?;
        Some(lists.shape().last().copied().unwrap_or(0))
    }

    /// Whether there is a second list per key/value head.
    pub(super) fn second_per_head(&self) -> bool {
        let lists = self.attention.second_indices.as_ref();
        lists.is_some_and(|lists| lists.shape().len() == 3 && lists.shape()[1] > 1)
    }

    /// The values of the second cache: the first dims of its keys, if values are a prefix of the
    /// keys. `None` without such a cache.
    pub(crate) fn second_values(&self) -> Option<Tensor<'a, M>> {
        match self.attention.values {
            Values::Separate => self.attention.second_v,
            Values::KeyPrefix => {
                let dim = self.v.shape().last().map_or(0, |last| last * self.v.dtype().values());
                self.attention.second_k.and_then(|keys| keys.prefix(dim).ok())
            }
        }
    }

    /// The scales of the values of the second cache.
    pub(crate) fn second_value_scales(&self) -> &Option<Tensor<'a, M>> {
        match self.attention.values {
            Values::Separate => &self.attention.second_v_scales,
            Values::KeyPrefix => &self.attention.second_k_scales,
        }
    }

    /// A second cache and its list are given together, beside physical slots.
    fn check_second_is_whole(&self) -> Result<bool, Error> {
        let attention = &self.attention;
        let beside = [
            ("second_k", &attention.second_k),
            ("second_v", &attention.second_v),
            ("second_k_scales", &attention.second_k_scales),
            ("second_v_scales", &attention.second_v_scales),
            ("second_counts", &attention.second_counts),
        ];
        if attention.second_indices.is_none() {
            return match beside.into_iter().find(|(_, tensor)| tensor.is_some()) {
                None => Ok(false),
                Some((argument, _)) => {
                    let allowed = "given together with second_indices only";
                    Err(Error::argument(argument, "given", allowed))
                }
            };
        }
        if !attention.indices_are_slots {
            let allowed = "given together with key_indices of physical slots (indices_are_slots) \
                           only";
            return Err(Error::argument("second_indices", "given", allowed));
        }
        if attention.second_k.is_none() {
            let allowed = "given, because second_indices is";
            return Err(Error::argument("second_k", "missing", allowed));
        }
        let in_keys = attention.values == Values::KeyPrefix;
        match (in_keys, &attention.second_v, &attention.second_v_scales) {
            (false, None, _) => {
                let allowed = "given, because second_indices is";
                Err(Error::argument("second_v", "missing", allowed))
            }
            (true, Some(_), _) => {
                let allowed = "none: values are a prefix of the keys";
                Err(Error::argument("second_v", "given", allowed))
            }
            (true, _, Some(_)) => {
                let allowed = "none: values are a prefix of the keys";
                Err(Error::argument("second_v_scales", "given", allowed))
            }
            _ => Ok(true),
        }
    }

    /// The types, shapes and strides of a second cache, of its scales and of its lists.
    pub(super) fn check_second_list(&self, problem: &Problem) -> Result<(), Error> {
        if !self.check_second_is_whole()? {
            return Ok(());
        }
        let attention = &self.attention;
        let pools = [
            ("second_k", &attention.second_k, ("k", &self.k)),
            ("second_v", &attention.second_v, ("v", &self.v)),
        ];
        for (name, pool, (first_name, first)) in pools {
            let Some(pool) = pool else { continue };
            expect_dtype(name, pool.dtype(), &[first.dtype()])?;
            expect_rank(name, pool.shape(), 4, "[blocks, block_size, Hkv, D]")?;
            let &[blocks, block_size, ..] = pool.shape() else {
                unreachable!("of four dimensions")
            };
            let &[.., heads, dim] = first.shape() else { unreachable!("checked: a pool") };
            let why = format!("heads and dims as {first_name} has");
            expect_shape(name, pool.shape(), &[blocks, block_size, heads, dim], &why)?;
            expect_unit_stride(name, pool.shape(), pool.strides())?;
        }
        if let (Some(k), Some(v)) = (&attention.second_k, &attention.second_v) {
            let &[blocks, block_size, heads, _] = k.shape() else {
                unreachable!("of 4 dimensions")
            };
            let why = "as second_k has, but for the last";
            expect_shape("second_v", v.shape(), &[blocks, block_size, heads, v.shape()[3]], why)?;
        }
        if let Some(k) = &attention.second_k {
            one_of("block_size of second_k", k.shape()[1], 1..super::MAX_LEN + 1)?;
            check_scales("second_k_scales", ("second_k", k), &attention.second_k_scales)?;
        }
        if let Some(v) = &attention.second_v {
            check_scales("second_v_scales", ("second_v", v), &attention.second_v_scales)?;
        }
        let Some(lists) = &attention.second_indices else { return Ok(()) };
        let counts = ("second_counts", &attention.second_counts);
        check_lists_of_rows(problem, ("second_indices", lists), counts)
    }
}

impl<'a> Inputs<'a> {
    /// The keys (or slots) of the second cache.
    pub(crate) fn second_slots(&self) -> usize {
        let shape = self.attention.second_k.as_ref().map(|keys| [keys.shape()[0], keys.shape()[1]]);
        shape.map_or(0, |[blocks, size]| blocks.saturating_mul(size).min(super::MAX_LEN))
    }
}
