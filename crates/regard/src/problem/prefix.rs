//! Prefix groups: sequences that share their first keys.

use super::{Inputs, KvStorage, MAX_LEN, Problem, Sequence};
use crate::error::Error;
use crate::expect::{expect_int_vector, one_of};
use crate::memory::Memory;
use crate::tensor::Tensor;
use std::ops::Range;

impl Problem {
    pub(super) fn validate_prefix_groups(&self) -> Result<(), Error> {
        one_of("prefix_groups", self.prefix_groups, 0..MAX_LEN + 1)?;
        if self.prefix_groups == 0 {
            return Ok(());
        }
        if let Some(lists) = self.key_lists {
            let allowed = "given without prefix_groups: each row has keys of its own";
            return Err(Error::argument(lists.argument(), "given", allowed));
        }
        match self.keys {
            KvStorage::Paged { .. } => Ok(()),
            KvStorage::Batched | KvStorage::Ragged => Err(Error::argument(
                "prefix_groups",
                format!("given with keys {:?}", self.keys),
                "given with a block_table: sequences share pages",
            )),
        }
    }
}

impl<M: Memory> Inputs<'_, M> {
    /// Prefix groups that there are places for. Their shape is checked by
    /// [`Inputs::check_prefix_shapes`].
    pub(super) fn prefix_groups(&self) -> usize {
        let lens = self.attention.prefix_groups.and(self.attention.prefix_lens);
        lens.and_then(|lens| lens.shape().first().copied()).unwrap_or(0)
    }

    /// The types and shapes of groups and of their prefix lengths.
    pub(super) fn check_prefix_shapes(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        let (groups, lens) = match (&attention.prefix_groups, &attention.prefix_lens) {
            (None, None) => return Ok(()),
            (Some(groups), Some(lens)) => (groups, lens),
            (given, _) => {
                let (argument, other) = match given {
                    Some(_) => ("prefix_lens", "prefix_groups"),
                    None => ("prefix_groups", "prefix_lens"),
                };
                let allowed = format!("given, because {other} is");
                return Err(Error::argument(argument, "missing", allowed));
            }
        };
        expect_int_vector("prefix_groups", groups, problem.batch, "one per sequence")?;
        let count = lens.shape().first().copied().unwrap_or(0);
        if count == 0 {
            return Err(Error::argument("prefix_lens", "empty", "one length a group, 1 at least"));
        }
        expect_int_vector("prefix_lens", lens, count, "one per group")
    }
}

impl<'a> Inputs<'a> {
    /// The prefix group of a sequence and the keys that it shares, if it is in a group.
    pub(crate) fn prefix(&self, sequence: usize) -> Option<(usize, usize)> {
        let ints = |tensor: Tensor<'a>| tensor.as_slice::<i32>().expect("checked: an i32 vector");
        let group = ints(self.attention.prefix_groups?)[sequence];
        let group = usize::try_from(group).ok()?;
        Some((group, ints(self.attention.prefix_lens?)[group] as usize))
    }

    /// Entries of a sequence's row of the block table that hold keys of its prefix which it sees.
    fn prefix_entries(&self, problem: &Problem, sequence: &Sequence, len: usize) -> Range<usize> {
        let KvStorage::Paged { block_size } = problem.keys else { return 0..0 };
        let visible =
            problem.variant.visible_to_rows(sequence.q_offset, sequence.q_len, sequence.keys());
        let end = visible.end.min(len);
        if visible.start >= end {
            0..0
        } else {
            visible.start / block_size..end.div_ceil(block_size)
        }
    }
}

/// Groups and lengths, which the host can read: no group is out of range, no prefix is longer than
/// a sequence of its group, and the block tables of a group agree within the prefix.
pub(super) fn check_prefixes(inputs: &Inputs, problem: &Problem) -> Result<(), Error> {
    let (Some(groups), Some(lens)) =
        (&inputs.attention.prefix_groups, &inputs.attention.prefix_lens)
    else {
        return Ok(());
    };
    let groups = groups.as_slice::<i32>().expect("checked: an i32 vector");
    let lens = lens.as_slice::<i32>().expect("checked: an i32 vector");
    if let Some(group) = lens.iter().position(|&len| len < 0) {
        let argument = format!("prefix_lens[{group}]");
        return Err(Error::argument(argument, lens[group], "0 or more keys"));
    }
    // The first sequence of each group, and the table entries that members have seen so far.
    let mut first = vec![None; lens.len()];
    for (index, &group) in groups.iter().enumerate() {
        if group < -1 || group >= lens.len() as i32 {
            let allowed = format!("-1 (none) or a group below {}, of prefix_lens", lens.len());
            return Err(Error::argument(format!("prefix_groups[{index}]"), group, allowed));
        }
        let Ok(group) = usize::try_from(group) else { continue };
        let (sequence, len) = (inputs.sequence(index), lens[group] as usize);
        if len > sequence.kv_len {
            return Err(Error::argument(
                format!("prefix_lens[{group}]"),
                len,
                format!("at most {}: the keys of sequence {index}", sequence.kv_len),
            ));
        }
        let first = *first[group].get_or_insert(index);
        let row = |index| inputs.block_row(index).expect("checked: keys are paged");
        let (expected, found) = (row(first), row(index));
        let seen = inputs.prefix_entries(problem, &sequence, len);
        if let Some(i) = seen.clone().find(|&i| expected[i] != found[i]) {
            return Err(Error::argument(
                format!("block_table[{index}, {i}]"),
                found[i],
                format!(
                    "{}, as of sequence {first}: both share the first {len} keys (prefix_groups)",
                    expected[i]
                ),
            ));
        }
    }
    Ok(())
}
