//! Checks of problems, of sequences and of operands that the ring takes.

use super::{RingPrefill, RingStep};
use crate::device::Device;
use crate::sharding::RingSequence;
use crate::views::{expect_contiguous, expect_dtype, expect_lse, expect_shape};
use regard::{Error, KvStorage, MAX_LEN, Problem, QueryOffset, QueryStorage, Values, Variant};

/// The features that the ring passes around.
pub(super) fn expect_supported(problem: &Problem) -> Result<(), Error> {
    let refuse = |argument: &str, found: String, allowed: &str| {
        Err(Error::argument(argument, found, format!("{allowed}, in ring prefill")))
    };
    let keys = match problem.queries {
        QueryStorage::Batched => KvStorage::Batched,
        QueryStorage::Ragged { .. } => KvStorage::Ragged,
        _ => return refuse("queries", format!("{:?}", problem.queries), "batched or ragged"),
    };
    if problem.keys != keys {
        return refuse("keys", format!("{:?}", problem.keys), "batched or ragged, as queries are");
    }
    if problem.values != Values::Separate {
        return refuse("values", format!("{:?}", problem.values), "a tensor of their own");
    }
    for (name, dtype) in [("key_dtype", problem.key_dtype), ("value_dtype", problem.value_dtype)] {
        if dtype != problem.dtype {
            return refuse(name, dtype.to_string(), "the type of queries");
        }
    }
    let Variant { mask, tree, key_positions, .. } = problem.variant;
    let features = [
        ("mask", mask.is_some()),
        ("tree_mask", tree),
        ("key_positions", key_positions.is_some()),
        ("key_indices", problem.key_lists.is_some()),
    ];
    match features.into_iter().find(|(_, given)| *given) {
        Some((name, _)) => refuse(name, "given".into(), "not given"),
        None => Ok(()),
    }
}

/// Sequences within the bounds of the problem; equal ones, if they are a batch.
pub(super) fn expect_sequences(problem: &Problem, sequences: &[RingSequence]) -> Result<(), Error> {
    let at_most = |argument: String, found: usize, most: usize| {
        if found <= most {
            return Ok(());
        }
        Err(Error::argument(argument, found, format!("at most {most}, as in the problem")))
    };
    at_most("batch".into(), sequences.len(), problem.batch)?;
    let (mut rows, mut keys) = (0usize, 0usize);
    for (i, sequence) in sequences.iter().enumerate() {
        let RingSequence { query_len, kv_len, q_offset } = *sequence;
        at_most(format!("sequences[{i}].query_len"), query_len, problem.query_len)?;
        at_most(format!("sequences[{i}].kv_len"), kv_len, problem.kv_len)?;
        let end = q_offset.checked_add(query_len as i64);
        if i32::try_from(q_offset).is_err() || end.is_none_or(|end| end > MAX_LEN as i64) {
            let allowed = "positions from -2^31 to 2^31 - 1 for all rows";
            return Err(Error::argument(format!("sequences[{i}].q_offset"), q_offset, allowed));
        }
        rows = rows.saturating_add(query_len);
        keys = keys.saturating_add(kv_len);
        if problem.queries == QueryStorage::Batched && *sequence != sequences[0] {
            let allowed =
                format!("{:?}, as the first: sequences of a batch are equal", sequences[0]);
            let argument = format!("sequences[{i}]");
            return Err(Error::argument(argument, format!("{sequence:?}"), allowed));
        }
    }
    if let QueryStorage::Ragged { total } = problem.queries {
        at_most("query rows".into(), rows, total)?;
        at_most("key rows".into(), keys, MAX_LEN)?;
    }
    Ok(())
}

/// A description of sequences that ranks compare.
pub(super) fn describe(count: usize, sequences: &[RingSequence]) -> String {
    match sequences {
        [] => "none".into(),
        [first, others @ ..] if others.iter().all(|it| it == first) => {
            format!("{count} of {first:?}")
        }
        _ => {
            let sum = |of: fn(&RingSequence) -> usize| sequences.iter().map(of).sum::<usize>();
            let (rows, keys) = (sum(|it| it.query_len), sum(|it| it.kv_len));
            // FNV-1a.
            let numbers = sequences.iter();
            let numbers =
                numbers.flat_map(|it| [it.query_len as u64, it.kv_len as u64, it.q_offset as u64]);
            let checksum = numbers.fold(0xcbf2_9ce4_8422_2325u64, |sum, number| {
                (sum ^ number).wrapping_mul(0x0000_0100_0000_01b3)
            });
            format!("{count} of {rows} rows and {keys} keys (checksum {checksum:x})")
        }
    }
}

impl<D: Device> RingPrefill<D> {
    /// Checks shapes and types, and that the attention is the planned one.
    pub(super) fn expect_operands(&self, step: &RingStep<D::Memory>) -> Result<(), Error> {
        let Problem { query_heads, kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let (rows, keys) = (self.ring.row_count(self.rank), self.ring.key_count(self.rank));
        for (name, tensor, shape) in [
            ("q", &step.q, self.shape(rows, &[query_heads, head_dim])),
            ("k", &step.k, self.shape(keys, &[kv_heads, head_dim])),
            ("v", &step.v, self.shape(keys, &[kv_heads, value_dim])),
        ] {
            expect_dtype(name, tensor, dtype)?;
            expect_shape(name, tensor, &shape)?;
        }
        expect_contiguous("k", &step.k)?;
        expect_contiguous("v", &step.v)?;
        expect_dtype("out", &step.out, self.problem.out_dtype)?;
        expect_shape("out", &step.out, &self.shape(rows, &[query_heads, value_dim]))?;
        expect_contiguous("out", &step.out)?;
        expect_lse(self.problem.lse, step.lse.as_deref())?;
        if let Some(lse) = &step.lse {
            expect_shape("lse", lse, &self.shape(rows, &[query_heads]))?;
            expect_contiguous("lse", lse)?;
        }
        let planned = |name: &str| ["cu_seqlens_q", "cu_seqlens_k", "q_offset"].contains(&name);
        let passed = |name: &str| ["alibi_slopes", "sinks"].contains(&name);
        if let Some((name, _)) = step.attention.named().find(|(name, _)| !passed(name)) {
            let allowed = match planned(name) {
                true => "not given: it is planned, by sequences",
                false => "not given: the ring has no such feature",
            };
            return Err(Error::argument(name, "given", allowed));
        }
        if let QueryOffset::Same(offset) = step.attention.q_offset
            && let Some(other) = self.ring.sequences.iter().find(|it| it.q_offset != offset)
        {
            let allowed = format!("{}, as planned, or not given", other.q_offset);
            return Err(Error::argument("q_offset", offset, allowed));
        }
        let found = step.attention.variant();
        if found != self.problem.variant {
            let allowed = format!("{:?}, as planned", self.problem.variant);
            return Err(Error::argument("attention", format!("{found:?}"), allowed));
        }
        Ok(())
    }
}
