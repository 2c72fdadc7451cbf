//! Page lists: the pages that the rows of a sequence attend to, per key/value head.

use super::lists::refuse_beside;
use super::{Inputs, KeyLists, ListEntries, MAX_LEN, Problem};
use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{expect_dtype, expect_rank, expect_shape, expect_unit_stride};
use crate::memory::Memory;
use crate::variant::QueryOffset;

/// The pages that one sequence and key/value head attends to. Entry `e` of the list is slot `e %
/// page_size` of page `e / page_size`.
#[derive(Clone, Copy)]
pub(crate) struct PageList<'a> {
    blocks: &'a [i32],
    numbers: Option<&'a [i32]>,
    /// Entries in use.
    pub len: usize,
    page_size: u32,
    /// Blocks of the pool.
    pool_blocks: u32,
}

/// The key of an entry of a page list.
#[derive(Clone, Copy)]
pub(crate) struct ListedKey {
    /// The pool that it is in: 1 is the second cache.
    pub pool: u8,
    /// Its position, or the entry itself if pages are not numbered.
    pub key: i32,
    pub block: i32,
    pub slot: i32,
}

impl PageList<'_> {
    /// The key of an entry; `None` if its page is skipped.
    #[inline]
    pub fn key(&self, entry: usize) -> Option<ListedKey> {
        let (page, slot) = (entry as u32 / self.page_size, entry as u32 % self.page_size);
        let block = self.blocks[page as usize];
        if block as u32 >= self.pool_blocks {
            return None;
        }
        let key = match self.numbers {
            None => entry as i32,
            Some(numbers) => {
                let first = u32::try_from(numbers[page as usize]).ok()?.checked_mul(self.page_size);
                i32::try_from(first?.checked_add(slot)?).ok().filter(|&key| key < i32::MAX)?
            }
        };
        Some(ListedKey { pool: 0, key, block, slot: slot as i32 })
    }
}

impl<M: Memory> Inputs<'_, M> {
    /// The lists as plans see them. Their shape is checked by [`Inputs::check_page_list_shapes`].
    pub(super) fn page_lists(&self) -> Option<KeyLists> {
        let per_head =
            self.attention.page_indices.as_ref()?.shape().first().is_some_and(|&n| n > 1);
        let entries = match self.attention.page_numbers {
            Some(_) => ListEntries::NumberedPages,
            None => ListEntries::Pages,
        };
        Some(KeyLists { len: self.page_slots(), per_head, entries, second: None })
    }

    /// Slots of all pages of a list.
    pub(super) fn page_slots(&self) -> usize {
        let pages = self.attention.page_indices.as_ref().and_then(|lists| lists.shape().last());
        pages.map_or(0, |pages| pages.saturating_mul(self.k.shape()[1]).min(MAX_LEN))
    }

    /// Only page lists give the place of keys, and positions are given for queries and pages or for
    /// neither.
    pub(super) fn check_pages_stand_alone(&self) -> Result<(), Error> {
        let attention = &self.attention;
        if attention.page_indices.is_none() {
            let beside = [
                ("page_list_lens", &attention.page_list_lens),
                ("page_numbers", &attention.page_numbers),
            ];
            return match beside.into_iter().find(|(_, tensor)| tensor.is_some()) {
                None => Ok(()),
                Some((argument, _)) => {
                    let allowed = "given together with page_indices only";
                    Err(Error::argument(argument, "given", allowed))
                }
            };
        }
        let positioned = !matches!(attention.q_offset, QueryOffset::BottomRight);
        let entries = match attention.page_numbers {
            Some(_) => ListEntries::NumberedPages,
            None => ListEntries::Pages,
        };
        match entries {
            ListEntries::NumberedPages if !positioned => {
                let allowed = "given, because page_numbers is: a list does not tell where the \
                               queries are";
                return Err(Error::argument("q_offset", "not given", allowed));
            }
            ListEntries::Pages => {
                refuse_beside(entries, "causal", attention.causal)?;
                refuse_beside(entries, "q_offset", positioned)?;
            }
            _ => {}
        }
        refuse_beside(entries, "key_positions", attention.key_positions.is_some())?;
        let given = [
            ("block_table", &attention.block_table),
            ("kv_lens", &attention.kv_lens),
            ("cu_seqlens_k", &attention.cu_seqlens_k),
            ("key_indices", &attention.key_indices),
        ];
        given
            .into_iter()
            .try_for_each(|(name, tensor)| refuse_beside(entries, name, tensor.is_some()))
    }

    /// Whether keys and values are a pool of pages.
    pub(crate) fn has_pool(&self) -> bool {
        let attention = &self.attention;
        attention.block_table.is_some()
            || attention.indices_are_slots
            || attention.page_indices.is_some()
    }

    /// The types, shapes and strides of page lists, their lengths and their numbers.
    pub(super) fn check_page_list_shapes(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        let Some(lists) = &attention.page_indices else { return Ok(()) };
        expect_dtype("page_indices", lists.dtype(), &[DType::I32])?;
        expect_rank("page_indices", lists.shape(), 3, "[Hkv or 1, B, n]")?;
        expect_unit_stride("page_indices", lists.shape(), lists.strides())?;
        let heads = if lists.shape()[0] == 1 { 1 } else { problem.kv_heads };
        let expected = [heads, problem.batch, lists.shape()[2]];
        expect_shape("page_indices", lists.shape(), &expected, "[Hkv or 1, B, n]")?;
        if let Some(lens) = &attention.page_list_lens {
            expect_dtype("page_list_lens", lens.dtype(), &[DType::I32])?;
            let why = "as page_indices has, but for the last";
            expect_shape("page_list_lens", lens.shape(), &expected[..2], why)?;
            expect_unit_stride("page_list_lens", lens.shape(), lens.strides())?;
        }
        let Some(numbers) = &attention.page_numbers else { return Ok(()) };
        expect_dtype("page_numbers", numbers.dtype(), &[DType::I32])?;
        expect_shape("page_numbers", numbers.shape(), &expected, "as page_indices has")?;
        expect_unit_stride("page_numbers", numbers.shape(), numbers.strides())
    }
}

/// Lengths of page lists, which the host can read: none exceeds the pages of its list.
pub(super) fn check_lens(inputs: &Inputs) -> Result<(), Error> {
    let Some(lens) = &inputs.attention.page_list_lens else { return Ok(()) };
    let slots = inputs.page_slots();
    for head in 0..lens.shape()[0] {
        let lens = lens.select(0, head).expect("checked: a length per list");
        let lens = lens.as_slice::<i32>().expect("checked: i32 with unit stride");
        let outside = |&len: &i32| usize::try_from(len).map_or(true, |len| len > slots);
        if let Some(sequence) = lens.iter().position(outside) {
            return Err(Error::argument(
                format!("page_list_lens[{head}, {sequence}]"),
                lens[sequence],
                format!("0..={slots} (the slots of a list's pages)"),
            ));
        }
    }
    Ok(())
}

impl<'a> Inputs<'a> {
    /// The page list of a sequence and of key/value head `head`; `None` if there are no page lists.
    pub(super) fn page_list(&self, sequence: usize, head: usize) -> Option<PageList<'a>> {
        let lists = self.attention.page_indices?;
        let head = if lists.shape()[0] == 1 { 0 } else { head };
        let row = |tensor: crate::tensor::Tensor<'a>| {
            let row = tensor.select(0, head).and_then(|lists| lists.select(0, sequence));
            let row = row.expect("checked: a list per sequence");
            row.as_slice::<i32>().expect("checked: i32 with unit stride")
        };
        let len = self.attention.page_list_lens.map(|lens| {
            let lens = lens.select(0, head).expect("checked: a length per list");
            lens.as_slice::<i32>().expect("checked: i32 with unit stride")[sequence] as usize
        });
        Some(PageList {
            blocks: row(lists),
            numbers: self.attention.page_numbers.map(row),
            len: len.unwrap_or(self.page_slots()),
            page_size: self.k.shape()[1] as u32,
            pool_blocks: self.k.shape()[0].min(i32::MAX as usize) as u32,
        })
    }
}
