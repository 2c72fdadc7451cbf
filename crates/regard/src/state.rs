//! The algebra of partial softmax results.
//!
//! Attention over some of the keys leaves, per row, an output and its weight. Two such states over
//! disjoint keys merge into the state over both. Merging is associative and commutative up to
//! rounding, and the state of no keys is its neutral element, exactly. Split-KV, shared prefixes
//! and context parallelism all use it. A sink is the state of one key whose value is zero. (Milakov
//! and Gimelshein 2018, "Online normalizer calculation for softmax".)
//!
//! Two forms: callers hold normalized outputs with their log-sum-exp in natural units ([`merge`],
//! [`merge_rows`]); kernels hold unnormalized outputs with a running [`State`] in base 4.
//!
//! Base 4, because `log4 e` is below 1: every score that is finite in f32 in natural units is
//! finite in base 4, for any mask or sink. In base 2 scores beyond 2.36e38 would overflow. `4^x` is
//! `2^(x + x)`, and doubling is exact: ordinary numbers have the same bits either way.

use crate::error::Error;

/// log2(e): scores in base 2 are natural scores times this.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// log4(e): scores in base 4 are natural scores times this.
pub const LOG4_E: f32 = LOG2_E / 2.0;

/// The largest score in base 4: `f32::MAX` in natural units. Scores are clamped to plus and minus
/// this.
pub(crate) const LARGEST_SCORE: f32 = f32::MAX * LOG4_E;

/// The running state of a row over the keys so far: the weight of its unnormalized output.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct State {
    /// The largest score, in base 4; minus infinity if no key was seen.
    pub max: f32,
    /// The sum of `4^(score - max)`; 0 if no key was seen.
    pub sum: f32,
}

impl State {
    /// The state of no keys.
    pub const EMPTY: State = State { max: f32::NEG_INFINITY, sum: 0.0 };

    /// The state of one more logit (natural units) without a value: an attention sink.
    pub fn sink(logit: f32) -> State {
        if logit == f32::NEG_INFINITY {
            State::EMPTY
        } else {
            State { max: logit * LOG4_E, sum: 1.0 }
        }
    }

    /// Merges two states over disjoint keys; also the factors by which their unnormalized outputs
    /// count in the sum.
    pub fn merge(self, other: State) -> (State, f32, f32) {
        if other.max == f32::NEG_INFINITY {
            return (self, 1.0, 0.0);
        }
        if self.max == f32::NEG_INFINITY {
            return (other, 0.0, 1.0);
        }
        let max = self.max.max(other.max);
        let exp4 = |x: f32| (x + x).exp2();
        let (a, b) = (exp4(self.max - max), exp4(other.max - max));
        (State { max, sum: self.sum * a + other.sum * b }, a, b)
    }

    /// Log-sum-exp in natural units: minus infinity if no key was seen.
    pub fn lse(self) -> f32 {
        if self.max == f32::NEG_INFINITY {
            return f32::NEG_INFINITY;
        }
        let lse = f64::from(self.max) * (2.0 * std::f64::consts::LN_2) + f64::from(self.sum).ln();
        // At the end of the range the sum may round from f32::MAX to infinity.
        let lse =
            if self.max.is_finite() { lse.clamp(f32::MIN.into(), f32::MAX.into()) } else { lse };
        lse as f32
    }
}

/// Merges one row: `out` and `lse` over some keys, `other_out` and `other_lse` over others, become
/// the result over both.
///
/// Outputs are normalized (as a plan writes them), `lse` is in natural units. An `lse` of minus
/// infinity means that no key was seen: the other side's bits are kept, and the empty side's output
/// is not read. Give a sink to one part only, or merge a zero output with the sink's logit as its
/// `lse`.
///
/// # Panics
/// If the two outputs differ in length.
pub fn merge(out: &mut [f32], lse: &mut f32, other_out: &[f32], other_lse: f32) {
    assert_eq!(out.len(), other_out.len(), "both outputs have the same head dim");
    if other_lse == f32::NEG_INFINITY {
        return;
    }
    if *lse == f32::NEG_INFINITY {
        out.copy_from_slice(other_out);
        *lse = other_lse;
        return;
    }
    let max = lse.max(other_lse);
    let (a, b) = ((*lse - max).exp(), (other_lse - max).exp());
    let total = a + b;
    for (x, &y) in out.iter_mut().zip(other_out) {
        *x = (*x * a + y * b) / total;
    }
    *lse = max + total.ln();
}

/// [`merge`] for many rows: `out` and `other_out` are `[rows, value_dim]`, `lse` and `other_lse`
/// are `[rows]`.
///
/// # Errors
/// If the lengths disagree, or `value_dim` is 0.
pub fn merge_rows(
    out: &mut [f32],
    lse: &mut [f32],
    other_out: &[f32],
    other_lse: &[f32],
    value_dim: usize,
) -> Result<(), Error> {
    if value_dim == 0 {
        return Err(Error::argument("value_dim", 0, "1 or more"));
    }
    let rows = lse.len();
    let Some(elements) = rows.checked_mul(value_dim) else {
        let found = format!("{value_dim} with {rows} rows");
        return Err(Error::argument(
            "value_dim",
            found,
            "as many elements as out has, divided by the rows",
        ));
    };
    let check = |argument: &str, found: usize, expected: usize, what: &str| {
        if found == expected {
            return Ok(());
        }
        Err(Error::argument(
            argument,
            format!("{found} elements long"),
            format!("{expected} ({what})"),
        ))
    };
    check("other_lse", other_lse.len(), rows, "as lse")?;
    check("out", out.len(), elements, "rows x value_dim")?;
    check("other_out", other_out.len(), elements, "rows x value_dim")?;
    let rows = out.chunks_exact_mut(value_dim).zip(other_out.chunks_exact(value_dim));
    for ((out, other_out), (lse, &other_lse)) in rows.zip(lse.iter_mut().zip(other_lse)) {
        merge(out, lse, other_out, other_lse);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_empty_state_is_neutral_to_the_bit() {
        let some = State { max: 3.25, sum: 1.7 };
        assert_eq!(some.merge(State::EMPTY), (some, 1.0, 0.0));
        assert_eq!(State::EMPTY.merge(some), (some, 0.0, 1.0));
        assert_eq!(State::EMPTY.merge(State::EMPTY).0, State::EMPTY);
        assert_eq!(State::EMPTY.lse(), f32::NEG_INFINITY);

        let (mut out, mut lse) = ([0.1f32, -7.5], 2.5f32);
        merge(&mut out, &mut lse, &[f32::NAN, 0.0], f32::NEG_INFINITY);
        assert_eq!((out, lse), ([0.1, -7.5], 2.5));
        let (mut out, mut lse) = ([f32::NAN, 0.0], f32::NEG_INFINITY);
        merge(&mut out, &mut lse, &[0.1, -7.5], 2.5);
        assert_eq!((out, lse), ([0.1, -7.5], 2.5));
    }

    #[test]
    fn a_sink_is_a_key_without_a_value() {
        let (mut out, mut lse) = ([4.0f32], 1.0f32);
        merge(&mut out, &mut lse, &[0.0], 1.0);
        assert_eq!(out, [2.0]);
        assert!((lse - (1.0 + std::f32::consts::LN_2)).abs() < 1e-6);
        assert_eq!(State::sink(f32::NEG_INFINITY), State::EMPTY);
    }
}
