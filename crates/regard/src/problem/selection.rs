//! Selection: lists of the keys that rows attend to.

use super::key_shape::KeyShape;
use super::lists::refuse_beside;
use super::page_lists::PageList;
use super::{Inputs, KeyLists, KvStorage, ListEntries, MAX_LEN, Problem, QueryStorage, Sequence};
use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{expect_dtype, expect_rank, expect_shape, expect_unit_stride, one_of};
use crate::memory::Memory;
use crate::tensor::Tensor;
use crate::variant::QueryOffset;

/// The entries in use of one list.
#[derive(Clone, Copy)]
pub(crate) enum KeyList<'a> {
    /// Keys of the sequence, or physical slots.
    Keys(&'a [i32]),
    /// Physical slots of two pools: first slots of `k` and `v`, then slots of the second cache.
    TwoPools([&'a [i32]; 2]),
    /// The slots of pages.
    Pages(PageList<'a>),
}

impl KeyList<'_> {
    /// The number of entries.
    pub fn len(&self) -> usize {
        match self {
            KeyList::Keys(entries) => entries.len(),
            KeyList::TwoPools([first, second]) => first.len() + second.len(),
            KeyList::Pages(pages) => pages.len,
        }
    }
}

impl Problem {
    /// Maximum keys that a row walks: the entries of its lists, or all.
    pub(crate) fn walked_keys(&self) -> usize {
        self.key_lists.map_or(self.kv_len, KeyLists::walked)
    }

    /// The problem that a GPU's decode kernels divide if rows have lists of keys. Each row is a
    /// sequence of one token; its keys are the entries of its list.
    pub(crate) fn listed_rows(&self) -> Option<Problem> {
        let lists = self.key_lists?;
        let (batch, kv_len) = (self.rows() / self.query_heads, lists.walked());
        let queries = QueryStorage::Batched;
        Some(Problem { batch, query_len: 1, kv_len, queries, ..self.clone() })
    }

    pub(super) fn validate_lists(&self) -> Result<(), Error> {
        let Some(lists) = self.key_lists else { return Ok(()) };
        one_of(lists.argument(), lists.len, 0..MAX_LEN + 1)?;
        if let Some(second) = lists.second {
            one_of("second_indices", second, 0..MAX_LEN + 1 - lists.len)?;
            if lists.entries != ListEntries::Slots {
                let allowed = "given together with key_indices of physical slots \
                               (indices_are_slots) only";
                return Err(Error::argument("second_indices", "given", allowed));
            }
        }
        if lists.entries == ListEntries::Keys {
            return Ok(());
        }
        let variant = &self.variant;
        let alone = |argument, given| refuse_beside(lists.entries, argument, given);
        if !lists.has_positions() {
            alone("causal", variant.causal)?;
            alone("window", variant.window != Default::default())?;
            alone("chunk", variant.chunk.is_some())?;
            alone("alibi_slopes", variant.alibi)?;
        }
        alone("mask", variant.mask.is_some())?;
        alone("tree_mask", variant.tree)?;
        alone("key_positions", variant.key_positions.is_some())?;
        match self.keys {
            KvStorage::Paged { .. } => Ok(()),
            KvStorage::Batched | KvStorage::Ragged => {
                let entries = match lists.entries {
                    ListEntries::Slots => "entries of key_indices are physical slots",
                    _ => "page_indices lists pages",
                };
                let allowed = format!("a pool of pages: {entries}");
                Err(Error::argument("keys", format!("{:?}", self.keys), allowed))
            }
        }
    }

    /// Checks that a plan with the lists of `self` serves the lists of `other`. Returns the planned
    /// and the found length.
    pub(super) fn covers_lists(&self, other: &Problem) -> Result<Option<(usize, usize)>, Error> {
        let Some(lists) = self.key_lists.or(other.key_lists) else { return Ok(None) };
        // Lists of keys and lists of pages are different arguments.
        let argument = lists.argument();
        let form = |lists: Option<KeyLists>| match lists {
            Some(lists) if lists.argument() == argument => lists.form(),
            _ => "not given".to_string(),
        };
        let (planned, found) = (form(self.key_lists), form(other.key_lists));
        if planned != found {
            return Err(Error::argument(argument, found, format!("{planned}, as planned")));
        }
        let (Some(planned), Some(found)) = (self.key_lists, other.key_lists) else {
            unreachable!("both have lists of one form")
        };
        if planned.entries != found.entries {
            let (argument, has) = match lists.lists_pages() {
                true => ("page_numbers", ListEntries::NumberedPages),
                false => ("indices_are_slots", ListEntries::Slots),
            };
            let allowed = format!("{}, as planned", planned.entries == has);
            return Err(Error::argument(argument, found.entries == has, allowed));
        }
        Ok(Some((planned.len, found.len)))
    }
}

impl<M: Memory> Inputs<'_, M> {
    /// The lists as plans see them. Their shape is checked by [`Inputs::check_list_shapes`].
    pub(crate) fn key_lists(&self) -> Option<KeyLists> {
        if let Some(lists) = self.page_lists() {
            return Some(lists);
        }
        let shape = self.attention.key_indices.as_ref()?.shape();
        let len = shape.last().copied().unwrap_or(0);
        // With one key/value head both forms are the same.
        let per_head = shape.len() == 3 && shape[1] > 1;
        let entries = match self.attention.indices_are_slots {
            true => ListEntries::Slots,
            false => ListEntries::Keys,
        };
        let second = self.second_len();
        Some(KeyLists { len, per_head: per_head || self.second_per_head(), entries, second })
    }

    /// Slots of the pool that an entry can address.
    pub(super) fn pool_slots(&self) -> usize {
        self.k.shape()[0].saturating_mul(self.k.shape()[1]).min(MAX_LEN)
    }

    /// Keys whose physical slots or pages are listed: a row walks at most as many as a list has
    /// entries.
    pub(super) fn pool_keys(&self, because: &str) -> Result<KeyShape, Error> {
        let shape = format!("[blocks, block_size, Hkv, D], {because}");
        expect_rank("k", self.k.shape(), 4, &shape)?;
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
        let refuse = |argument, given| refuse_beside(ListEntries::Slots, argument, given);
        refuse("causal", attention.causal)?;
        let positioned = !matches!(attention.q_offset, QueryOffset::BottomRight);
        refuse("q_offset", positioned)?;
        refuse("key_positions", attention.key_positions.is_some())?;
        let given = [
            ("block_table", &attention.block_table),
            ("kv_lens", &attention.kv_lens),
            ("cu_seqlens_k", &attention.cu_seqlens_k),
        ];
        given.into_iter().try_for_each(|(name, tensor)| refuse(name, tensor.is_some()))
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
        let counts = ("key_counts", &attention.key_counts);
        check_lists_of_rows(problem, ("key_indices", lists), counts)
    }
}

/// The types, shapes and strides of one list per row, or per row and key/value head, and of their
/// counts.
pub(super) fn check_lists_of_rows<M: Memory>(
    problem: &Problem,
    (name, lists): (&str, &Tensor<M>),
    (counts_name, counts): (&str, &Option<Tensor<M>>),
) -> Result<(), Error> {
    expect_dtype(name, lists.dtype(), &[DType::I32])?;
    expect_rank(name, lists.shape(), 3, "[rows, Hkv or 1, n]")?;
    expect_unit_stride(name, lists.shape(), lists.strides())?;
    let rows = problem.rows() / problem.query_heads;
    let heads = if lists.shape()[1] == 1 { 1 } else { problem.kv_heads };
    let expected = [rows, heads, lists.shape()[2]];
    expect_shape(name, lists.shape(), &expected, "[rows of q, Hkv or 1, n]")?;
    let Some(counts) = counts else { return Ok(()) };
    expect_dtype(counts_name, counts.dtype(), &[DType::I32])?;
    let why = format!("as {name} has, but for the last");
    expect_shape(counts_name, counts.shape(), &expected[..2], &why)?;
    expect_unit_stride(counts_name, counts.shape(), counts.strides())
}

/// Counts of entries, which the host can read: none exceeds the room of its list.
pub(super) fn check_counts(inputs: &Inputs) -> Result<(), Error> {
    let attention = &inputs.attention;
    check_counts_of("key_counts", &attention.key_indices, &attention.key_counts)?;
    check_counts_of("second_counts", &attention.second_indices, &attention.second_counts)
}

fn check_counts_of(
    name: &str,
    lists: &Option<Tensor>,
    counts: &Option<Tensor>,
) -> Result<(), Error> {
    let (Some(lists), Some(counts)) = (lists, counts) else { return Ok(()) };
    let len = lists.shape()[2];
    for row in 0..counts.shape()[0] {
        let counts = counts.select(0, row).expect("checked: a list per row");
        let counts = counts.as_slice::<i32>().expect("checked: i32 with unit stride");
        let outside = |&count: &i32| usize::try_from(count).map_or(true, |count| count > len);
        if let Some(head) = counts.iter().position(outside) {
            return Err(Error::argument(
                format!("{name}[{row}, {head}]"),
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
    ) -> Option<KeyList<'a>> {
        if let Some(pages) = self.page_list(sequence.index, head) {
            return Some(KeyList::Pages(pages));
        }
        let attention = &self.attention;
        let row = match &attention.cu_seqlens_q {
            Some(_) => sequence.q_start + token,
            None => sequence.index * self.q.shape()[1] + token,
        };
        let first = list_of_row(attention.key_indices?, attention.key_counts, [row, head]);
        Some(match attention.second_indices {
            None => KeyList::Keys(first),
            Some(second) => {
                let second = list_of_row(second, attention.second_counts, [row, head]);
                KeyList::TwoPools([first, second])
            }
        })
    }
}

/// The entries in use of a row's list for a key/value head.
fn list_of_row<'a>(
    lists: Tensor<'a>,
    counts: Option<Tensor<'a>>,
    [row, head]: [usize; 2],
) -> &'a [i32] {
    let head = if lists.shape()[1] == 1 { 0 } else { head };
    let list = lists.select(0, row).and_then(|row| row.select(0, head));
    let list = list.expect("checked: a list per row").as_slice::<i32>();
    let list = list.expect("checked: i32 with unit stride");
    let count = counts.map(|counts| {
        let counts = counts.select(0, row).expect("checked: a count per list");
        counts.as_slice::<i32>().expect("checked: i32 with unit stride")[head] as usize
    });
    &list[..count.unwrap_or(list.len())]
}
