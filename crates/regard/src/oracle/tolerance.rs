//! The tolerance: the allowed difference between a result and the oracle's.
//!
//! The contract has one rule: `err(kernel) <= 2 err(naive) + eps`. It is applied per row, with the
//! row's largest error over the head dim, so that a row of small numbers is not judged by its large
//! neighbours. `eps` is derived, not chosen: naive can by chance be right to the last bit, and a
//! kernel that adds in another order is not. So `eps` is the sum of
//!
//! - the effect of f32 roundings of each score, each probability and each sum on the row, to first
//!   order ([`Rounding`](super::Rounding)),
//! - for f16 and bf16, the effect of rounding each probability to that type before the second
//!   product: four roundings (2 epsilon), some seven standard deviations, of independent errors,
//!   or of equal ones where a list names a key several times
//!   ([`Rounding::probabilities`](super::Rounding::probabilities)),
//! - over codes and blocks, for f16 and bf16, the rounding of probabilities below 2^-29 of the
//!   row's largest, which a kernel may hold in f16 times 2^15,
//! - for equal probabilities, which are all rounded to the same number and so scale the result:
//!   half an epsilon of the inputs' type at the result's magnitude,
//! - and one rounding of the result in its own type, at the magnitude of the row's largest element
//!   (`epsilon * |out|`; for lse, `f32::EPSILON * |lse|`). Below the smallest normal number the
//!   spacing does not shrink any further.
//!
//! If naive itself is not finite, its error counts as 0. A row that keeps no key must be exactly
//! 0, and its lse exactly minus infinity if no sink gives it a value. A row whose reference is not
//! finite (its own query or a key it sees is not, or they are larger than the contract covers) is
//! not judged. Nor is a NaN in another row of a sequence and key/value head in which a key or value
//! is not finite: that may spread.

use super::{Cache, Reference, Row, all_rows, exact_rows, naive_rows};
use crate::dtype::DType;
use crate::error::Error;
use crate::problem::Inputs;
use crate::tensor::Tensor;
use half::{bf16, f16};
use std::collections::HashSet;
use std::fmt;

/// Judges results of one problem: the oracle's rows, and the tolerance of each.
#[derive(Debug, Clone)]
pub struct Judge {
    reference: Reference,
    out_bounds: Vec<Bound>,
    lse_bounds: Vec<Bound>,
    /// The index of each row in `out`, without the last dimension: `[sequence, query, head]`, or
    /// `[token, head]` if ragged.
    places: Vec<[usize; 3]>,
    place_rank: usize,
    value_dim: usize,
    /// Whether some row of the same sequence and key/value head sees a key or value that is not
    /// finite.
    may_be_nan: Vec<bool>,
}

/// The parts of a row's tolerance.
#[derive(Debug, Clone, Copy)]
struct Bound {
    naive_error: f64,
    eps: f64,
}

impl Bound {
    fn total(self) -> f64 {
        2.0 * self.naive_error + self.eps
    }
}

/// The agreement of a result with the oracle's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Agreement {
    /// Rows that were judged.
    pub rows: usize,
    /// Rows that were not: their reference is not finite.
    pub unjudged: usize,
    /// The largest error of any element of `out`.
    pub out_error: f64,
    /// The largest error of any `lse`.
    pub lse_error: f64,
    /// The largest error relative to the allowed error there; at most 1.
    pub worst: f64,
}

/// The first element that is further from the oracle than it may be.
#[derive(Debug, Clone, PartialEq)]
pub struct Mismatch {
    /// `out` or `lse`.
    pub tensor: &'static str,
    /// The row.
    pub row: Row,
    /// The element of the head dim; `None` for `lse`.
    pub dim: Option<usize>,
    /// The kernel's value.
    pub found: f64,
    /// The oracle's value.
    pub expected: f64,
    /// The largest allowed difference.
    pub bound: f64,
    /// The largest error of the naive computation in that row, or in any row if a whole tensor was
    /// judged at once.
    pub naive_error: f64,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { sequence, query, head } = self.row;
        write!(f, "{} of sequence {sequence}, query {query}, head {head}", self.tensor)?;
        if let Some(dim) = self.dim {
            write!(f, ", dim {dim}")?;
        }
        write!(f, " is {:e}; expected {:e}", self.found, self.expected)?;
        if self.bound == 0.0 {
            return write!(f, " exactly");
        }
        let error = (self.found - self.expected).abs();
        write!(
            f,
            ": off by {error:.3e}, allowed {:.3e} (2 x {:.3e} of the naive computation + rounding)",
            self.bound, self.naive_error
        )
    }
}

impl std::error::Error for Mismatch {}

impl Judge {
    /// A judge of all rows, for results of type `out_dtype`.
    ///
    /// # Errors
    /// If the inputs break the contract.
    pub fn new(inputs: &Inputs, out_dtype: DType) -> Result<Judge, Error> {
        Judge::for_rows(inputs, out_dtype, &all_rows(inputs)?)
    }

    /// A judge of these rows only.
    ///
    /// # Errors
    /// If the inputs break the contract.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn for_rows(inputs: &Inputs, out_dtype: DType, rows: &[Row]) -> Result<Judge, Error> {
        inputs.problem(out_dtype, true)?;
        let mut cache = Cache::new(inputs);
        let reference = exact_rows(inputs, rows, &mut cache);
        let naive = naive_rows(inputs, out_dtype, rows, &mut cache);
        let values = *inputs.v.shape().last().expect("v has dimensions");
        let value_dim = values * inputs.v.dtype().values();
        let error = |found: &[f64], expected: &[f64]| {
            let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
            errors.filter(|error| error.is_finite()).fold(0.0, f64::max)
        };
        // f32 probabilities are not rounded again: `Rounding::out` has theirs.
        let narrow =
            if inputs.q.dtype() == DType::F32 { 0.0 } else { 2.0 * inputs.q.dtype().epsilon() };
        let (mut out_bounds, mut lse_bounds) = (Vec::new(), Vec::new());
        for (i, rounding) in reference.rounding.iter().enumerate() {
            let out = i * value_dim..(i + 1) * value_dim;
            let largest = super::largest(&reference.out[out.clone()]);
            out_bounds.push(Bound {
                naive_error: error(&naive.out[out.clone()], &reference.out[out]),
                eps: rounding.out
                    + narrow * rounding.probabilities
                    + narrow / 4.0 * largest
                    + out_dtype.epsilon() * largest.max(smallest_normal(out_dtype)),
            });
            let lse = reference.lse[i];
            lse_bounds.push(Bound {
                naive_error: error(&[naive.lse[i]], &[lse]),
                eps: rounding.lse + DType::F32.epsilon() * lse.abs(),
            });
        }
        let ragged = inputs.attention.cu_seqlens_q.is_some();
        let place = |row: &Row| match ragged {
            true => [inputs.sequence(row.sequence).q_start + row.query, row.head, 0],
            false => [row.sequence, row.query, row.head],
        };
        Ok(Judge {
            out_bounds,
            lse_bounds,
            places: rows.iter().map(place).collect(),
            place_rank: if ragged { 2 } else { 3 },
            value_dim,
            may_be_nan: rows_beside_nan(inputs, &reference, value_dim),
            reference,
        })
    }

    /// The oracle's rows.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Checks that a result is right: every row by the contract's rule. `out` and `lse` have the
    /// shapes that [`Outputs`](crate::Outputs) asks for, any strides.
    ///
    /// # Errors
    /// The first element that is not right.
    ///
    /// # Panics
    /// If the shapes differ from the problem's.
    pub fn check(&self, out: &Tensor, lse: Option<&Tensor>) -> Result<Agreement, Box<Mismatch>> {
        self.compare(out, lse, |bounds, i| bounds[i])
    }

    /// Checks that a result of another implementation in this type agrees: the rule over the whole
    /// tensor, with the largest naive error and the largest `eps` of all rows allowed in each row.
    /// So a row need not be exact because naive is exact there by chance, but a file that
    /// contradicts the contract is still found. Empty rows must be exact here too.
    ///
    /// # Errors
    /// The first element that is too far off.
    ///
    /// # Panics
    /// If the shapes differ from the problem's.
    pub fn check_whole(
        &self,
        out: Option<&Tensor>,
        lse: Option<&Tensor>,
    ) -> Result<Agreement, Box<Mismatch>> {
        let tensor_bound = |bounds: &[Bound]| {
            let max = |part: fn(&Bound) -> f64| {
                bounds.iter().map(part).filter(|x| x.is_finite()).fold(0.0, f64::max)
            };
            Bound { naive_error: max(|bound| bound.naive_error), eps: max(|bound| bound.eps) }
        };
        let (out_bound, lse_bound) =
            (tensor_bound(&self.out_bounds), tensor_bound(&self.lse_bounds));
        let mut agreement = Agreement::default();
        if let Some(out) = out {
            agreement = self.compare(out, None, |_, _| out_bound)?;
        }
        if let Some(lse) = lse {
            self.compare_lse(lse, |_, _| lse_bound, &mut agreement)?;
        }
        Ok(agreement)
    }

    fn compare(
        &self,
        out: &Tensor,
        lse: Option<&Tensor>,
        bound: impl Fn(&[Bound], usize) -> Bound,
    ) -> Result<Agreement, Box<Mismatch>> {
        let mut agreement = Agreement::default();
        let mut found = vec![0.0; self.value_dim];
        for (i, expected) in self.reference.out.chunks_exact(self.value_dim).enumerate() {
            if expected.iter().any(|x| !x.is_finite()) {
                agreement.unjudged += 1;
                continue;
            }
            out.read_row(&self.places[i][..self.place_rank], &mut found);
            if self.may_be_nan[i] && found.iter().any(|x| x.is_nan()) {
                agreement.unjudged += 1;
                continue;
            }
            agreement.rows += 1;
            let mut row_bound = bound(&self.out_bounds, i);
            if self.reference.rounding[i].empty {
                row_bound = Bound { naive_error: 0.0, eps: 0.0 };
            }
            for (dim, (&found, &expected)) in found.iter().zip(expected).enumerate() {
                let error = (found - expected).abs();
                agreement.out_error = agreement.out_error.max(error);
                agreement.note(error, row_bound).map_err(|()| {
                    let element = Compared { dim: Some(dim), found, expected };
                    Box::new(self.mismatch("out", i, element, row_bound))
                })?;
            }
        }
        if let Some(lse) = lse {
            self.compare_lse(lse, bound, &mut agreement)?;
        }
        Ok(agreement)
    }

    fn compare_lse(
        &self,
        lse: &Tensor,
        bound: impl Fn(&[Bound], usize) -> Bound,
        agreement: &mut Agreement,
    ) -> Result<(), Box<Mismatch>> {
        for (i, &expected) in self.reference.lse.iter().enumerate() {
            if expected.is_nan() || expected == f64::INFINITY {
                continue;
            }
            let found = lse.at(&self.places[i][..self.place_rank]);
            if self.may_be_nan[i] && found.is_nan() {
                continue;
            }
            let (error, row_bound) = if expected == f64::NEG_INFINITY {
                let error = if found == expected { 0.0 } else { f64::NAN };
                (error, Bound { naive_error: 0.0, eps: 0.0 })
            } else {
                ((found - expected).abs(), bound(&self.lse_bounds, i))
            };
            agreement.lse_error = agreement.lse_error.max(error);
            agreement.note(error, row_bound).map_err(|()| {
                let element = Compared { dim: None, found, expected };
                Box::new(self.mismatch("lse", i, element, row_bound))
            })?;
        }
        Ok(())
    }

    fn mismatch(
        &self,
        tensor: &'static str,
        row: usize,
        element: Compared,
        bound: Bound,
    ) -> Mismatch {
        Mismatch {
            tensor,
            row: self.reference.rows[row],
            dim: element.dim,
            found: element.found,
            expected: element.expected,
            bound: bound.total(),
            naive_error: bound.naive_error,
        }
    }
}

/// An element that is compared; `dim` is its place in an output row.
struct Compared {
    dim: Option<usize>,
    found: f64,
    expected: f64,
}

/// For each row, whether a row of the same sequence and key/value head has a finite query and a
/// reference that is not finite. That row sees a key or value that is not finite, and this may
/// spread.
fn rows_beside_nan(inputs: &Inputs, reference: &Reference, value_dim: usize) -> Vec<bool> {
    let heads = |tensor: &Tensor| tensor.shape()[tensor.rank() - 2];
    let group = (heads(&inputs.q) / heads(&inputs.k)).max(1);
    let place = |row: &Row| (row.sequence, row.head / group);
    let mut not_finite = HashSet::new();
    for (i, row) in reference.rows.iter().enumerate() {
        let out = &reference.out[i * value_dim..(i + 1) * value_dim];
        if out.iter().any(|x| !x.is_finite())
            && super::RowOperands::new(inputs, *row).query().iter().all(|x| x.is_finite())
        {
            not_finite.insert(place(row));
        }
    }
    reference.rows.iter().map(|row| not_finite.contains(&place(row))).collect()
}

impl Agreement {
    /// Takes in one error, unless it is too large or no number.
    fn note(&mut self, error: f64, bound: Bound) -> Result<(), ()> {
        // Written so that NaN fails.
        if error == 0.0 {
            return Ok(());
        }
        let ratio = error / bound.total();
        if ratio <= 1.0 {
            self.worst = self.worst.max(ratio);
            return Ok(());
        }
        Err(())
    }
}

/// The smallest positive normal number.
fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::MIN_POSITIVE),
        DType::F16 => f16::MIN_POSITIVE.to_f64(),
        DType::BF16 => bf16::MIN_POSITIVE.to_f64(),
        _ => 0.0,
    }
}
