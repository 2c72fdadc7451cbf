//! Selection: lists of the keys that rows attend to.

use super::key_shape::KeyShape;
use super::{Inputs, KeyLists, KvStorage, MAX_LEN, Problem, Sequence};
use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{expect_dtype, expect_rank, expect_shape, expect_unit_stride, one_of};
use crate::memory::Memory;
use crate::variant::QueryOffset;

impl KeyLists {
    /// In words, for `Plan::explain`.
    pub(super) fn description(self) -> String {
        let entries = if self.slots { "physical slots" } else { "keys" };
        let owner = if self.per_head { "row and key/value head" } else { "row" };
        format!("lists of up to {} {entries} per {owner}", self.len)
    }
}

impl Problem {
    /// Maximum keys that a row walks: the length of its list, or all.
    pub(crate) fn walked_keys(&self) -> usize {
        self.key_lists.map_or(self.kv_len, |lists| lists.len)
    }

    pub(super) fn validate_lists(&self) -> Result<(), Error> {
        let Some(lists) = self.key_lists else { return Ok(()) };
        one_of("key_indices", lists.len, 0..MAX_LEN + 1)?;
        if !lists.slots {
            return Ok(());
        }
        let variant = &self.variant;
        let alone = refuse_with_slots;
        alone("causal", variant.causal)?;
        alone("window", variant.window != Default::default())?;
        alone("chunk", variant.chunk.is_some())?;
        alone("alibi_slopes", variant.alibi)?;
        alone("mask", variant.mask.is_some())?;
        alone("tree_mask", variant.tree)?;
        alone("key_positions", variant.key_positions.is_some())?;
        match self.keys {
            KvStorage::Paged { .. } => Ok(()),
            KvStorage::Batched | KvStorage::Ragged => Err(Error::argument(
                "keys",
                format!("{:?}", self.keys),
                "a pool of pages: entries of key_indices are physical slots",
            )),
        }
    }

    /// Whether a plan with the lists of `self` serves those of `other`. Returns the planned and the
    /// found length.
    pub(super) fn covers_lists(&self, other: &Problem) -> Result<Option<(usize, usize)>, Error> {
        let say = |lists: Option<KeyLists>| match lists {
            None => "not given".to_string(),
            Some(KeyLists { per_head: false, .. }) => "one list per row".to_string(),
            Some(_) => "one list per row and key/value head".to_string(),
        };
        let form = |lists: Option<KeyLists>| lists.map(|lists| lists.per_head);
        if form(self.key_lists) != form(other.key_lists) {
            let allowed = format!("{}, as planned", say(self.key_lists));
            return Err(Error::argument("key_indices", say(other.key_lists), allowed));
        }
        let (Some(planned), Some(found)) = (self.key_lists, other.key_lists) else {
            return Ok(None);
        };
        if planned.slots != found.slots {
            let allowed = format!("{}, as planned", planned.slots);
            return Err(Error::argument("indices_are_slots", found.slots, allowed));
        }
        Ok(Some((planned.len, found.len)))
    }
}

/// An error if an argument that needs positions or lengths is given together with physical slots.
fn refuse_with_slots(argument: &str, given: bool) -> Result<(), Error> {
    if !given {
        return Ok(());
    }
    let allowed = "nothing that needs positions or lengths: entries of key_indices are physical \
                   slots (indices_are_slots)";
    Err(Error::argument(argument, "given", allowed))
}

impl<M: Memory> Inputs<'_, M> {
    /// The lists as plans see them. Their shape is checked by [`Inputs::check_list_shapes`].
    pub(super) fn key_lists(&self) -> Option<KeyLists> {
        let shape = self.attention.key_indices.as_ref()?.shape();
        let len = shape.last().copied().unwrap_or(0);
        // With one key/value head both forms are the same.
        let per_head = shape.len() == 3 && shape[1] > 1;
        Some(KeyLists { len, per_head, slots: self.attention.indices_are_slots })
    }

    /// Slots of the pool that an entry can address.
    pub(super) fn pool_slots(&self) -> usize {
        self.k.shape()[0].saturating_mul(self.k.shape()[1]).min(MAX_LEN)
    }

    /// Keys whose physical slots are listed: a row walks at most as many as a list has entries.
    pub(super) fn slot_keys(&self) -> Result<KeyShape, Error> {
        let why = "[blocks, block_size, Hkv, D], because indices_are_slots is set";
        expect_rank("k", self.k.shape(), 4, why)?;
        one_of("block_size", self.k.shape()[1], 1..MAX_LEN + 1)?;
        let max_len = self.key_lists().map_or(0, |lists| lists.len);
        Ok(KeyShape { storage: KvStorage::Paged { block_size: self.k.shape()[1] }, max_len })
    }

    /// Physical slots have no positions and belong to no sequence.
    pub(super) fn check_slots_stand_alone(&self) -> Result<(), Error> {
        let attention = &self.attention;
        if !attention.indices_are_slots {
            return Ok(());
        }
        if attention.key_indices.is_none() {
            let allowed = "set together with key_indices only";
            return Err(Error::argument("indices_are_slots", "set", allowed));
        }
        refuse_with_slots("causal", attention.causal)?;
        let positioned = !matches!(attention.q_offset, QueryOffset::BottomRight);
        refuse_with_slots("q_offset", positioned)?;
        refuse_with_slots("key_positions", attention.key_positions.is_some())?;
        let given = [
            ("block_table", &attention.block_table),
            ("kv_lens", &attention.kv_lens),
            ("cu_seqlens_k", &attention.cu_seqlens_k),
        ];
        given.into_iter().try_for_each(|(name, tensor)| refuse_with_slots(name, tensor.is_some()))
    }

    /// The types, shapes and strides of lists and of their counts.
    pub(super) fn check_list_shapes(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        let Some(lists) = &attention.key_indices else {
            if attention.key_counts.is_some() {
                let allowed = "given together with key_indices only";
                return Err(Error::argument("key_counts", "given", allowed));
            }
            return Ok(());
        };
        expect_dtype("key_indices", lists.dtype(), &[DType::I32])?;
        expect_rank("key_indices", lists.shape(), 3, "[rows, Hkv or 1, n]")?;
        expect_unit_stride("key_indices", lists.shape(), lists.strides())?;
        let rows = problem.rows() / problem.query_heads;
        let heads = if lists.shape()[1] == 1 { 1 } else { problem.kv_heads };
        let expected = [rows, heads, lists.shape()[2]];
        expect_shape("key_indices", lists.shape(), &expected, "[rows of q, Hkv or 1, n]")?;
        let Some(counts) = &attention.key_counts else { return Ok(()) };
        expect_dtype("key_counts", counts.dtype(), &[DType::I32])?;
        let why = "as key_indices has, but for the last";
        expect_shape("key_counts", counts.shape(), &expected[..2], why)?;
        expect_unit_stride("key_counts", counts.shape(), counts.strides())
    }
}

/// Counts of entries, which the host can read: none exceeds the room of its list.
pub(super) fn check_counts(inputs: &Inputs) -> Result<(), Error> {
    let (Some(lists), Some(counts)) = (&inputs.attention.key_indices, &inputs.attention.key_counts)
    else {
        return Ok(());
    };
    let len = lists.shape()[2];
    for row in 0..counts.shape()[0] {
        let counts = counts.select(0, row).expect("checked: a list per row");
        let counts = counts.as_slice::<i32>().expect("checked: i32 with unit stride");
        let outside = |&count: &i32| usize::try_from(count).map_or(true, |count| count > len);
        if let Some(head) = counts.iter().position(outside) {
            return Err(Error::argument(
                format!("key_counts[{row}, {head}]"),
                counts[head],
                format!("0..={len} (the entries of a list)"),
            ));
        }
    }
    Ok(())
}

impl<'a> Inputs<'a> {
    /// The entries in use of the list of query row `token` of a sequence and of key/value head
    /// `head`; `None` if rows have no lists.
    pub(crate) fn key_list(
        &self,
        sequence: &Sequence,
        token: usize,
        head: usize,
    ) -> Option<&'a [i32]> {
        let lists = self.attention.key_indices?;
        let row = match &self.attention.cu_seqlens_q {
            Some(_) => sequence.q_start + token,
            None => sequence.index * self.q.shape()[1] + token,
        };
        let head = if lists.shape()[1] == 1 { 0 } else { head };
        let list = lists.select(0, row).and_then(|row| row.select(0, head));
        let list = list.expect("checked: a list per row").as_slice::<i32>();
        let list = list.expect("checked: i32 with unit stride");
        let count = self.attention.key_counts.map(|counts| {
            let counts = counts.select(0, row).expect("checked: a count per list");
            counts.as_slice::<i32>().expect("checked: i32 with unit stride")[head] as usize
        });
        Some(&list[..count.unwrap_or(list.len())])
    }
}
