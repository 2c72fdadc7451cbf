//! Checks of arguments that several calls share, so that bad input gets the same words everywhere.

use crate::dtype::DType;
use crate::error::Error;
use crate::memory::Memory;
use crate::tensor::{Dims, Tensor, TensorMut};
use std::fmt::{self, Display};
use std::ops::Range;

/// A number within a range.
pub(crate) fn one_of(argument: &str, found: usize, range: Range<usize>) -> Result<(), Error> {
    if range.contains(&found) {
        return Ok(());
    }
    Err(Error::argument(argument, found, format!("{}..={}", range.start, range.end - 1)))
}

/// Exactly this shape.
pub(crate) fn expect_shape(
    argument: &str,
    found: &[usize],
    expected: &[usize],
    why: &str,
) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::argument(argument, format!("of shape {found:?}"), format!("{expected:?} ({why})")))
}

/// Exactly this number of dimensions.
pub(crate) fn expect_rank(
    argument: &str,
    shape: &[usize],
    rank: usize,
    layout: &str,
) -> Result<(), Error> {
    if shape.len() == rank {
        return Ok(());
    }
    Err(Error::argument(
        argument,
        format!("of shape {shape:?}"),
        format!("{rank} dimensions: {layout}"),
    ))
}

/// One of these types.
pub(crate) fn expect_dtype(argument: &str, found: DType, allowed: &[DType]) -> Result<(), Error> {
    if allowed.contains(&found) {
        return Ok(());
    }
    let mut allowed: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
    allowed.dedup();
    Err(Error::argument(argument, format!("of type {found}"), allowed.join(" or ")))
}

/// Neighbours in the last dimension are neighbours in memory.
pub(crate) fn expect_unit_stride(
    argument: &str,
    shape: &[usize],
    strides: &[i64],
) -> Result<(), Error> {
    match (shape.last(), strides.last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => Err(Error::argument(
            argument,
            format!("a view with strides {strides:?}"),
            "an innermost stride of 1".to_string(),
        )),
        _ => Ok(()),
    }
}

/// A contiguous vector of `i32`.
pub(crate) fn expect_int_vector<M: Memory>(
    argument: &str,
    tensor: &Tensor<M>,
    len: usize,
    why: &str,
) -> Result<(), Error> {
    expect_dtype(argument, tensor.dtype(), &[DType::I32])?;
    expect_shape(argument, tensor.shape(), &[len], why)?;
    expect_unit_stride(argument, tensor.shape(), tensor.strides())
}

/// Whether two ranges of addresses share any; empty views have none.
pub(crate) fn overlaps(a: Option<(usize, usize)>, b: Option<(usize, usize)>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
        _ => false,
    }
}

/// An error with these words unless `holds`. With `format_args!` nothing is allocated if it does.
pub(crate) fn expect(
    argument: &str,
    found: impl Display,
    holds: bool,
    allowed: impl Display,
) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::argument(argument, found, allowed.to_string())) }
}

/// A shape with its strides, in words.
pub(crate) struct Strided<'a>(pub &'a Dims);

impl Display for Strided<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} with strides {:?}", self.0, self.0.strides())
    }
}

/// An error if elements of a written operand share an address.
pub(crate) fn expect_injective<M: Memory>(
    argument: &str,
    tensor: &TensorMut<M>,
) -> Result<(), Error> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    expect(
        argument,
        format_args!("a view of shape {shape:?} with strides {strides:?}"),
        tensor.is_injective(),
        "strides that give every element a place of its own",
    )
}

/// An error if `argument`, which is written, shares memory with `other`.
pub(crate) fn expect_apart(
    argument: &str,
    range: Option<(usize, usize)>,
    other: &str,
    other_range: Option<(usize, usize)>,
) -> Result<(), Error> {
    expect(
        argument,
        format_args!("memory shared with `{other}`"),
        !overlaps(range, other_range),
        "memory of its own",
    )
}
