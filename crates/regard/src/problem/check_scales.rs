//! Checks of the scales of codes.

use crate::dtype::DType;
use crate::error::Error;
use crate::expect::expect_dtype;
use crate::memory::Memory;
use crate::tensor::Tensor;

/// Checks scales: given for codes and for nothing else, of the shape of the codes.
pub(super) fn check_scales<M: Memory>(
    argument: &str,
    (scaled, codes): (&str, &Tensor<M>),
    scales: &Option<Tensor<M>>,
) -> Result<(), Error> {
    let of_codes = || format!("`{scaled}` is {}", codes.dtype());
    let Some(scales) = scales else {
        if codes.dtype().is_code() {
            return Err(Error::argument(argument, "missing", format!("scales: {}", of_codes())));
        }
        return Ok(());
    };
    if !codes.dtype().is_code() {
        let allowed = format!("none: {}, and only e4m3, e5m2 and i8 have them", of_codes());
        return Err(Error::argument(argument, "given", allowed));
    }
    expect_dtype(argument, scales.dtype(), &[DType::F32])?;
    let rows = &codes.shape()[..codes.rank() - 1];
    let fits = scales.rank() == rows.len()
        && scales.shape().iter().zip(rows).all(|(&found, &n)| found == 1 || found == n);
    if !fits {
        return Err(Error::argument(
            argument,
            format!("of shape {:?}", scales.shape()),
            format!("{rows:?}, any of them 1 (`{scaled}` without its last dimension)"),
        ));
    }
    Ok(())
}
