//! Views of parts of tensors, and the checks of shapes that the operations share.

use crate::device::Device;
use crate::transport::Span;
use regard::{DType, Dims, Error, MAX_RANK, Tensor};
use std::ops::{Deref, Range};

/// The dimensions or strides of a tensor: a list that is not on the heap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InlineVec<T> {
    items: [T; MAX_RANK],
    len: usize,
}

impl<T: Default + Copy> FromIterator<T> for InlineVec<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut few = InlineVec { items: [T::default(); MAX_RANK], len: 0 };
        for item in items {
            few.items[few.len] = item;
            few.len += 1;
        }
        few
    }
}

impl<T> Deref for InlineVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..self.len]
    }
}

/// The log-sum-exp is given if it was planned, and `f32`.
pub(crate) fn expect_lse(planned: bool, lse: Option<&Dims>) -> Result<(), Error> {
    if let (true, Some(lse)) = (planned, lse) {
        return expect_dtype("lse", lse, DType::F32);
    }
    if planned == lse.is_some() {
        return Ok(());
    }
    let word = |given| if given { "given" } else { "not given" };
    let allowed = format!("{}, as planned", word(planned));
    Err(Error::argument("lse", word(lse.is_some()), allowed))
}

/// The shape of a tensor must be this one.
pub(crate) fn expect_shape(argument: &str, dims: &Dims, shape: &[usize]) -> Result<(), Error> {
    if dims.shape() == shape {
        return Ok(());
    }
    Err(Error::argument(argument, format!("of shape {:?}", dims.shape()), format!("{shape:?}")))
}

/// The type of a tensor must be this one.
pub(crate) fn expect_dtype(argument: &str, dims: &Dims, dtype: DType) -> Result<(), Error> {
    if dims.dtype() == dtype {
        return Ok(());
    }
    Err(Error::argument(argument, format!("of type {}", dims.dtype()), format!("{dtype}")))
}

/// Whether elements are contiguous, in row-major order.
pub(crate) fn is_contiguous(dims: &Dims) -> bool {
    let mut step = 1;
    dims.is_empty()
        || (0..dims.rank()).rev().all(|i| {
            let (n, stride) = (dims.shape()[i], dims.strides()[i]);
            let holds = n == 1 || stride == step;
            step = step.saturating_mul(n as i64);
            holds
        })
}

/// A tensor that a transport reads or writes is contiguous.
pub(crate) fn expect_contiguous(argument: &str, dims: &Dims) -> Result<(), Error> {
    if is_contiguous(dims) {
        return Ok(());
    }
    let found = format!("of shape {:?} with strides {:?}", dims.shape(), dims.strides());
    Err(Error::argument(argument, found, "contiguous"))
}

/// The memory of a contiguous tensor.
pub(crate) fn span_of<D: Device>(tensor: &Tensor<D::Memory>) -> Span {
    let bytes = tensor.len() * tensor.dtype().size();
    Span { address: D::tensor_address(tensor), bytes }
}

/// The indices `range` of a dimension.
pub(crate) fn narrow<'a, D: Device>(
    tensor: &Tensor<'a, D::Memory>,
    dim: usize,
    range: &Range<usize>,
) -> Result<Tensor<'a, D::Memory>, Error> {
    let mut shape: InlineVec<usize> = tensor.shape().iter().copied().collect();
    shape.items[dim] = range.len();
    let step = tensor.strides()[dim].wrapping_mul(tensor.dtype().size() as i64);
    let offset = step.wrapping_mul(range.start as i64);
    let address = D::tensor_address(tensor).wrapping_add_signed(offset);
    // SAFETY: the callers' ranges are inside the dimension, so the view is a part of the tensor.
    unsafe { D::tensor(address, tensor.dtype(), &shape, Some(tensor.strides())) }
}
