//! Views of a part of a dimension.

use super::{Dims, Tensor, TensorMut};
use crate::error::Error;
use crate::memory::Memory;
use std::marker::PhantomData;
use std::ops::Range;

impl Dims {
    /// Elements `range` of the last dimension. Nothing of a tensor without dimensions.
    fn narrow(self, range: &Range<usize>) -> Dims {
        match self.rank().checked_sub(1) {
            Some(last) => self.narrow_at(last, range).0,
            None => self,
        }
    }

    /// Elements `range` of a dimension, and how many bytes they are behind the first one.
    fn narrow_at(mut self, dim: usize, range: &Range<usize>) -> (Dims, isize) {
        debug_assert!(range.end <= self.shape[dim]);
        self.shape[dim] = range.len();
        let items = self.strides[dim].wrapping_mul(range.start as i64);
        (self, items.wrapping_mul(self.dtype().size() as i64) as isize)
    }
}

impl<M: Memory> Tensor<'_, M> {
    /// The first `values` values of the last dimension: of a latent cache's keys `k.prefix(512)` is
    /// the values ([`Values::KeyPrefix`](crate::Values)). Rows of `mla656` have two prefixes: all
    /// 576 values, and the first 512 as [`DType::Mla656Latent`](crate::DType::Mla656Latent).
    ///
    /// # Errors
    /// If there are fewer, or if blocks of values would be cut.
    pub fn prefix(self, values: usize) -> Result<Self, Error> {
        let last = self.rank().checked_sub(1);
        let all = last.map_or(0, |last| self.shape()[last].saturating_mul(self.dtype().values()));
        let dtype = match last.map(|last| self.shape()[last]) {
            Some(1) => self.dtype().of_prefix(values),
            _ => self.dtype(),
        };
        let per_element = dtype.values();
        if values > all || !values.is_multiple_of(per_element) || last.is_none() {
            let allowed = match dtype.is_latent_row() {
                true => "512 or 576 values of one row".to_string(),
                false => format!("0..={all}, a multiple of {per_element}"),
            };
            let found = format!("{values} values of {:?}", self.dims);
            return Err(Error::argument("prefix", found, allowed));
        }
        let mut dims = Dims { dtype, ..self.dims };
        dims.shape[dims.rank() - 1] = values / per_element;
        Ok(Tensor { dims, ..self })
    }

    /// Elements `range` of the last dimension, which has as many.
    pub(crate) fn narrow(&self, range: Range<usize>) -> Self {
        let dims = self.dims.narrow(&range);
        let bytes = range.start * self.dtype().size();
        Tensor { data: self.data.wrapping_add(bytes), dims, ..*self }
    }

    /// Elements `range` of dimension `dim`, which has as many.
    #[cfg(feature = "cuda")]
    pub(crate) fn narrow_at(&self, dim: usize, range: &Range<usize>) -> Self {
        let (dims, bytes) = self.dims.narrow_at(dim, range);
        Tensor { data: self.data.wrapping_offset(bytes), dims, ..*self }
    }

    /// Whether this is a [prefix](Tensor::prefix) of `whole`: the same memory, type, strides and
    /// shape, but for the last dimension, which may be shorter.
    pub(crate) fn is_prefix_of(&self, other: &Self) -> bool {
        let Some(last) = self.rank().checked_sub(1) else { return false };
        let same_stride = |i: usize| {
            self.strides()[i] == other.strides()[i] || other.shape()[i] <= 1 || i == last
        };
        let values = |dims: &Dims| dims.shape()[last].saturating_mul(dims.dtype().values());
        (self.dtype() == other.dtype() || self.dtype() == other.dtype().of_prefix(values(self)))
            && self.rank() == other.rank()
            && self.address() == other.address()
            && self.shape()[..last] == other.shape()[..last]
            && self.shape()[last] <= other.shape()[last]
            && (0..=last).all(same_stride)
    }
}

impl<M: Memory> TensorMut<'_, M> {
    /// Elements `range` of the last dimension, which has as many, in steps of 1. Several such views
    /// may exist at once; each element is then written through one of them only.
    pub(crate) fn narrow(&self, range: Range<usize>) -> TensorMut<'_, M> {
        let dims = self.dims.narrow(&range);
        let data = self.data.wrapping_add(range.start * self.dtype().size());
        TensorMut { data, dims, memory: self.memory, lifetime: PhantomData }
    }

    /// The same of dimension `dim`.
    #[cfg(feature = "cuda")]
    pub(crate) fn narrow_at(&self, dim: usize, range: &Range<usize>) -> TensorMut<'_, M> {
        let (dims, bytes) = self.dims.narrow_at(dim, range);
        let data = self.data.wrapping_offset(bytes);
        TensorMut { data, dims, memory: self.memory, lifetime: PhantomData }
    }
}
