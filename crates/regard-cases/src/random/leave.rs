//! Leaves a problem behind as a case file.

use crate::array::{Array, Data};
use crate::case::{Case, Layout};
use crate::file;
use regard::Error;
use std::path::Path;

/// Writes a case for `regard check`. A file asks for an output of another type than the inputs' by
/// bringing one: the oracle's.
///
/// # Errors
/// As [`file::write`].
pub fn leave(case: &Case, path: &Path) -> Result<(), Error> {
    let mut case = case.clone();
    if case.out_dtype() != case.q.dtype()
        && let Ok(inputs) = case.inputs()
        && let Ok(reference) = regard::oracle::attention(&inputs)
    {
        let data = Data::from_numbers(case.out_dtype(), reference.out.into_iter());
        let mut shape = case.q.shape().to_vec();
        *shape.last_mut().expect("q has dimensions") =
            *case.v.shape().last().expect("v has dimensions");
        case.expected_out = match (
            case.layout,
            case.attention.cu_seqlens_q.is_some(),
            <[usize; 4]>::try_from(&shape[..]),
        ) {
            // The oracle's rows are [B, Lq, Hq, Dv].
            (Layout::Bhsd, false, Ok([_, heads, tokens, dim])) => {
                let strides =
                    [heads * tokens * dim, dim, heads * dim, 1].map(|stride| stride as i64);
                Array::strided(data, 0, &shape, &strides).ok()
            }
            _ => Array::new(data, &shape).ok(),
        };
    }
    file::write(&case, path)
}
