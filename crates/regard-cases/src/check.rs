//! Checks results.
//!
//! The kernel's result is held to the f64 oracle, row by row, by the contract's rule
//! ([`regard::oracle::Judge`]). Expected tensors of a case are held to the oracle too, by the same
//! rule over the whole tensor ([`Judge::check_whole`]). Another implementation rounds differently:
//! comparing the kernel with it directly would need a third tolerance, or would reject a kernel
//! that is more exact. If both agree with the oracle, they agree with each other within the sum of
//! both tolerances. If the expected tensors do not, the file contradicts regard's contract, and the
//! check fails with that message.

use crate::case::{Case, Output};
use regard::oracle::{Agreement, Judge, Mismatch, all_rows};
use regard::{Error, Inputs, Outputs};
use std::fmt;

/// A case that passed.
#[derive(Debug, Clone)]
pub struct Verdict {
    /// The agreement of the result with the oracle.
    pub agreement: Agreement,
    /// The agreement of the expected tensors with the oracle, if the case has any.
    pub expected: Option<Agreement>,
}

/// The reason why a case did not pass.
#[derive(Debug, Clone)]
pub enum Failure {
    /// It did not run.
    Error(Error),
    /// The result is not right.
    Result(Box<Mismatch>),
    /// The case's expected tensors have other shapes or types than the contract asks for.
    Expected(Box<Mismatch>),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Error(error) => error.fmt(f),
            Failure::Result(mismatch) => mismatch.fmt(f),
            Failure::Expected(mismatch) => {
                write!(f, "the expected tensors in the file disagree with the oracle: {mismatch}")
            }
        }
    }
}

impl std::error::Error for Failure {}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

/// A case with its judge: judged as often as one likes, the oracle having run once.
#[derive(Debug, Clone)]
pub struct Checker<'a> {
    case: &'a Case,
    judge: Judge,
    expected: Option<Agreement>,
}

impl<'a> Checker<'a> {
    /// Computes the expected results, for all rows, or for about `most_rows` of them evenly spread.
    ///
    /// # Errors
    /// If the case breaks the contract, or its expected tensors disagree with the oracle.
    pub fn new(case: &'a Case, max_rows: Option<usize>) -> Result<Checker<'a>, Failure> {
        let inputs = case.inputs()?;
        let mut rows = all_rows(&inputs)?;
        if let Some(max_rows) = max_rows {
            // Rows go head by head: a step that shares no divisor with the number of heads comes by
            // all of them.
            let heads = rows.iter().map(|row| row.head + 1).max().unwrap_or(1);
            let mut step = rows.len().div_ceil(max_rows.max(1)).max(1);
            while step > 1 && divisor(step, heads) > 1 {
                step += 1;
            }
            rows = rows.into_iter().step_by(step).collect();
        }
        check_expected_shapes(case)?;
        let judge = Judge::for_rows(&inputs, case.out_dtype(), &rows)?;
        let expected = if case.expected_out.is_some() || case.expected_lse.is_some() {
            let view = |array: &'a Option<crate::Array>| -> Result<_, Error> {
                let view = array.as_ref().map(crate::Array::view).transpose()?;
                Ok(view.map(|view| case.query_order(view)))
            };
            let (out, lse) = (view(&case.expected_out)?, view(&case.expected_lse)?);
            Some(judge.check_whole(out.as_ref(), lse.as_ref()).map_err(Failure::Expected)?)
        } else {
            None
        };
        Ok(Checker { case, judge, expected })
    }

    /// The judge.
    pub fn judge(&self) -> &Judge {
        &self.judge
    }

    /// Judges a result.
    ///
    /// # Errors
    /// If it is not right.
    pub fn check(&self, output: &Output) -> Result<Verdict, Failure> {
        let out = self.case.query_order(output.out.view()?);
        let lse = self.case.query_order(output.lse.view()?);
        let agreement = self.judge.check(&out, Some(&lse)).map_err(Failure::Result)?;
        Ok(Verdict { agreement, expected: self.expected })
    }
}

/// Runs a case and judges every row of the result.
///
/// # Errors
/// If it did not run, or the result is not right.
pub fn check(
    case: &Case,
    runner: impl FnMut(&Inputs, &mut Outputs) -> Result<(), Error>,
) -> Result<Verdict, Failure> {
    let output = case.run(runner)?;
    Checker::new(case, None)?.check(&output)
}

/// The greatest common divisor.
fn divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { divisor(b, a % b) }
}

fn check_expected_shapes(case: &Case) -> Result<(), Error> {
    let mut shape = case.q.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = case.value_dim();
    }
    for (name, array, expected) in [
        ("out", &case.expected_out, &shape[..]),
        ("lse", &case.expected_lse, &shape[..shape.len() - 1]),
    ] {
        let Some(array) = array else { continue };
        if array.shape() != expected {
            return Err(Error::argument(
                name,
                format!("of shape {:?}", array.shape()),
                format!("{expected:?}, from q and v"),
            ));
        }
        if !array.dtype().is_float() {
            return Err(Error::argument(
                name,
                format!("of type {}", array.dtype()),
                "f32, f16 or bf16",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Spec;

    #[test]
    fn a_sample_of_rows_comes_by_every_head() {
        let case = Spec::new("sample").lengths(&[(40, 50)]).heads(6, 2).generate();
        for max_rows in [1, 20, 40, 120, 1000] {
            let checker = Checker::new(&case, Some(max_rows)).unwrap();
            let rows = &checker.judge().reference().rows;
            assert!(
                (1..=max_rows.min(240)).contains(&rows.len()),
                "{} rows for {max_rows}",
                rows.len()
            );
            let mut heads: Vec<_> = rows.iter().map(|row| row.head).collect();
            heads.sort_unstable();
            heads.dedup();
            assert!(max_rows < 20 || heads.len() == 6, "{heads:?}");
        }
    }
}
