//! The tables of a step in one buffer, so that they reach a device in one copy.

use crate::dtype::DType;
use crate::error::Error;
use crate::memory::{Host, Memory};
use crate::tensor::Tensor;
use crate::variant::Attention;
use std::ops::Range;

/// The tables that attention and append read, in any memory.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a, M: Memory = Host> {
    /// `[B + 1]`: sequence b has rows `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: Tensor<'a, M>,
    /// `[B]`: keys of each sequence, the new ones included.
    pub kv_lens: Tensor<'a, M>,
    /// `[B, max_blocks]`: blocks of each sequence, -1 if there is none.
    pub block_table: Tensor<'a, M>,
    /// `[B]`: the prefix group of each sequence, -1 for none.
    pub prefix_groups: Tensor<'a, M>,
    /// `[max(B, 1)]`: the keys that the sequences of each group share.
    pub prefix_lens: Tensor<'a, M>,
}

impl<'a, M: Memory> Tables<'a, M> {
    /// Causal attention of a step's rows: `q` is `[tokens, Hq, D]`, keys and values are the pools.
    /// Set the options of the model (scale, window, softcap).
    pub fn attention(&self) -> Attention<Tensor<'a, M>> {
        Attention {
            cu_seqlens_q: Some(self.cu_seqlens_q),
            kv_lens: Some(self.kv_lens),
            block_table: Some(self.block_table),
            ..Attention::causal()
        }
    }

    /// The same with the prefix groups: sequences that share pages read them together.
    pub fn grouped_attention(&self) -> Attention<Tensor<'a, M>> {
        Attention {
            prefix_groups: Some(self.prefix_groups),
            prefix_lens: Some(self.prefix_lens),
            ..self.attention()
        }
    }
}

/// The offset of each table in a packed buffer of `i32`: cumulative lengths, lengths, the block
/// table, prefix groups and their lengths.
///
/// An engine that records its launches packs every step by one layout, its largest: each table then
/// has the same address in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableLayout {
    /// Sequences (`B`).
    pub sequences: usize,
    /// Entries of a row of the block table.
    pub max_blocks: usize,
}

impl TableLayout {
    /// `i32` elements of the buffer (the largest `usize` if they overflow it).
    pub fn len(&self) -> usize {
        let tables = self.sequences.saturating_mul(self.max_blocks.saturating_add(3));
        tables.saturating_add(1).saturating_add(self.sequences.max(1))
    }

    /// Never: cumulative lengths of no sequences have one entry.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.len().saturating_mul(size_of::<i32>())
    }

    /// The elements of the cumulative lengths, `[B + 1]`.
    pub fn cu_seqlens_q(&self) -> Range<usize> {
        0..self.sequences + 1
    }

    /// The elements of the lengths, `[B]`.
    pub fn kv_lens(&self) -> Range<usize> {
        self.sequences + 1..2 * self.sequences + 1
    }

    /// The elements of the block table, `[B, max_blocks]`.
    pub fn block_table(&self) -> Range<usize> {
        let start = 2 * self.sequences + 1;
        start..start + self.sequences * self.max_blocks
    }

    /// The elements of the prefix groups, `[B]`.
    pub fn prefix_groups(&self) -> Range<usize> {
        let start = self.block_table().end;
        start..start + self.sequences
    }

    /// The elements of their lengths, `[max(B, 1)]`.
    pub fn prefix_lens(&self) -> Range<usize> {
        let start = self.prefix_groups().end;
        start..start + self.sequences.max(1)
    }

    /// The tables in a packed buffer, in any memory: a contiguous vector of
    /// [`TableLayout::len`] `i32`.
    ///
    /// # Errors
    /// If it is not such a vector.
    pub fn tables<'a, M: Memory>(&self, packed: Tensor<'a, M>) -> Result<Tables<'a, M>, Error> {
        let contiguous = packed.strides() == [1] || packed.len() <= 1;
        if packed.dtype() != DType::I32 || packed.shape() != [self.len()] || !contiguous {
            let found = format!("{packed:?} with strides {:?}", packed.strides());
            return Err(Error::argument(
                "packed",
                found,
                format!("i32[{}], contiguous", self.len()),
            ));
        }
        let block_table = [self.sequences, self.max_blocks];
        Ok(Tables {
            cu_seqlens_q: packed.part(0, &[self.sequences + 1])?,
            kv_lens: packed.part(self.kv_lens().start, &[self.sequences])?,
            block_table: packed.part(self.block_table().start, &block_table)?,
            prefix_groups: packed.part(self.prefix_groups().start, &[self.sequences])?,
            prefix_lens: packed.part(self.prefix_lens().start, &[self.sequences.max(1)])?,
        })
    }
}
