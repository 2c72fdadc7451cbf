//! One step of continuous batching: the sequences that run, the number of new tokens of each, and
//! the slots of these tokens.

use super::groups::{BatchTables, PrefixFinder, PrefixGroups};
use super::tables::{TableLayout, Tables};
use super::{BlockCopy, PageAllocator, SequenceId};
use crate::error::Error;
use crate::tensor::Tensor;
use crate::variant::Attention;

/// The sequences that run together in one step of an engine, prompts in chunks and decodes mixed,
/// with the tables that attention and append read.
///
/// New tokens of all sequences are concatenated ("ragged"), in the order in which they were
/// appended. Every vector with an entry per token is in that order. One `Step` is filled again for
/// every step: it stops allocating after the largest step.
///
/// ```
/// use regard::paged::{PageAllocator, Step};
///
/// let mut pages = PageAllocator::new(8, 4)?;
/// let (old, new) = (pages.create(), pages.create());
/// let mut step = Step::new();
/// step.append(&mut pages, old, 6)?; // its prompt
/// step.finish(&pages)?;
///
/// step.clear();
/// step.append(&mut pages, old, 1)?; // decodes one token
/// step.append(&mut pages, new, 3)?; // the first chunk of another prompt
/// step.finish(&pages)?;
/// assert_eq!(step.positions(), [6, 0, 1, 2]);
/// assert_eq!(step.slots(), [6, 8, 9, 10]);
/// // Causal, ragged, paged; q is [4, Hq, D], keys and values are the pools.
/// let attention = step.attention();
/// # assert!(attention.causal);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Step {
    sequences: Vec<SequenceId>,
    cu_seqlens_q: Vec<i32>,
    kv_lens: Vec<i32>,
    block_table: Vec<i32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    copies: Vec<BlockCopy>,
    packed: Vec<i32>,
    finder: PrefixFinder,
    prefixes: PrefixGroups,
    finished: bool,
}

impl Default for Step {
    fn default() -> Step {
        Step::new()
    }
}

impl Step {
    /// A step without sequences.
    pub fn new() -> Step {
        Step {
            sequences: Vec::new(),
            // Cumulative lengths start with 0, also of no sequence.
            cu_seqlens_q: vec![0],
            kv_lens: Vec::new(),
            block_table: Vec::new(),
            positions: Vec::new(),
            slots: Vec::new(),
            copies: Vec::new(),
            packed: Vec::new(),
            finder: PrefixFinder::default(),
            prefixes: PrefixGroups::default(),
            finished: false,
        }
    }

    /// Takes all sequences out, and keeps the memory.
    pub fn clear(&mut self) {
        self.sequences.clear();
        self.cu_seqlens_q.clear();
        self.cu_seqlens_q.push(0);
        self.kv_lens.clear();
        self.block_table.clear();
        self.positions.clear();
        self.slots.clear();
        self.copies.clear();
        self.packed.clear();
        self.finished = false;
    }

    /// Adds a sequence with `tokens` new tokens, and allocates the pages for them.
    ///
    /// # Errors
    /// As [`PageAllocator::append`], also for a sequence of another allocator. Or if the sequence
    /// is in this step already, the step is finished, or a slot's number (`block * block_size +
    /// slot`) exceeds 32 bits. After an error nothing has changed.
    pub fn append(
        &mut self,
        pages: &mut PageAllocator,
        sequence: SequenceId,
        tokens: usize,
    ) -> Result<(), Error> {
        if self.finished {
            return Err(Error::argument(
                "step",
                "finished",
                "one that was cleared after it was finished",
            ));
        }
        if self.sequences.contains(&sequence) {
            let allowed = "a sequence that is not in the step yet";
            return Err(Error::argument("sequence", format!("{sequence:?}, given twice"), allowed));
        }
        let slots = pages.total_blocks() as u64 * pages.block_size() as u64;
        let rows = self.positions.len().saturating_add(tokens);
        if slots > 1 << 32 || i32::try_from(rows).is_err() {
            let found = format!("{rows} rows in a pool of {slots} slots");
            return Err(Error::argument("tokens", found, "rows below 2^31, slots up to 2^32"));
        }
        let block_size = pages.block_size();
        let added = pages.append(sequence, tokens)?;
        self.copies.extend(added.copy);
        self.positions.extend(added.positions().map(|position| position as u32));
        for range in added.ranges() {
            let first = range.block * block_size;
            self.slots.extend(range.slots.map(|slot| (first + slot) as u32));
        }
        self.kv_lens.push(added.positions().end as i32);
        self.cu_seqlens_q.push(self.positions.len() as i32);
        self.sequences.push(sequence);
        Ok(())
    }

    /// Writes the block table: the last thing before the step runs.
    ///
    /// # Errors
    /// If one of the sequences was freed, or changed its length since it was added.
    pub fn finish(&mut self, pages: &PageAllocator) -> Result<(), Error> {
        for (&sequence, &len) in self.sequences.iter().zip(&self.kv_lens) {
            let found = pages.len(sequence)?;
            if found != len as usize {
                let found = format!("{sequence:?} with {found} tokens");
                return Err(Error::argument(
                    "sequence",
                    found,
                    format!("{len} tokens, as when it was added"),
                ));
            }
        }
        let width = pages.longest_table(&self.sequences)?;
        self.block_table.resize(self.sequences.len() * width, -1);
        pages.block_table(&self.sequences, &mut self.block_table)?;
        let tables = BatchTables {
            table: &self.block_table,
            width,
            kv_lens: &self.kv_lens,
            block_size: pages.block_size(),
        };
        self.finder.find(&tables, &mut self.prefixes);
        self.finished = true;
        let layout = self.table_layout();
        let mut packed = std::mem::take(&mut self.packed);
        packed.resize(layout.len(), 0);
        self.pack(&layout, &mut packed)?;
        self.packed = packed;
        Ok(())
    }

    /// The sequences, in the order of the batch.
    pub fn sequences(&self) -> &[SequenceId] {
        &self.sequences
    }

    /// Whether the step has no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// New tokens of all sequences: the rows of `q`.
    pub fn tokens(&self) -> usize {
        self.positions.len()
    }

    /// New tokens of the sequence that has the most, for
    /// [`Problem::query_len`](crate::Problem::query_len). 0 if the step is empty.
    pub fn max_query_len(&self) -> usize {
        let lens = self.cu_seqlens_q.windows(2).map(|ends| ends[1] - ends[0]);
        lens.max().map_or(0, |len| usize::try_from(len).expect("ends ascend"))
    }

    /// `[B + 1]`: sequence b has rows `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`.
    pub fn cu_seqlens_q(&self) -> &[i32] {
        &self.cu_seqlens_q
    }

    /// `[B]`: keys of each sequence, the new ones included.
    pub fn kv_lens(&self) -> &[i32] {
        &self.kv_lens
    }

    /// `[B, max_blocks]`, row after row, with `max_blocks = block_table.len() / B`. Empty before
    /// [`Step::finish`].
    pub fn block_table(&self) -> &[i32] {
        &self.block_table
    }

    /// `[B]`: the prefix group of each sequence, -1 for none: sequences that share their first
    /// pages, in the groups that save the most reads. Empty before [`Step::finish`].
    pub fn prefix_groups(&self) -> &[i32] {
        &self.prefixes.groups
    }

    /// `[max(B, 1)]`: the keys that the sequences of each group share; 0 for unused
    /// groups. Empty before [`Step::finish`].
    pub fn prefix_lens(&self) -> &[i32] {
        &self.prefixes.lens
    }

    /// Whether some sequences of the step share their first pages. False before [`Step::finish`].
    pub fn has_prefix_groups(&self) -> bool {
        self.prefixes.groups.iter().any(|&group| group >= 0)
    }

    /// The position of each new token in its sequence, for rotary embeddings.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The slot of each new token's key and value: `block * block_size + slot`.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Copies to do, in this order, before any new token is written.
    pub fn copies(&self) -> &[BlockCopy] {
        &self.copies
    }

    /// The offset of each table in [`Step::packed`].
    pub fn table_layout(&self) -> TableLayout {
        let sequences = self.sequences.len();
        let max_blocks = self.block_table.len().checked_div(sequences).unwrap_or(0);
        TableLayout { sequences, max_blocks }
    }

    /// All tables in one buffer, by [`Step::table_layout`], for one copy to a device.
    /// Empty before [`Step::finish`].
    pub fn packed(&self) -> &[i32] {
        &self.packed
    }

    /// [`Step::packed`] as bytes, in this machine's byte order.
    pub fn packed_bytes(&self) -> &[u8] {
        // SAFETY: integers have no padding, bytes need no alignment, and the slice covers the same
        // memory.
        unsafe {
            std::slice::from_raw_parts(self.packed.as_ptr().cast(), size_of_val(&*self.packed))
        }
    }

    /// Writes all tables into one buffer by a layout that may have room for more. Sequences that
    /// the step does not have bring no rows and have no keys; entries that rows do not have are -1.
    ///
    /// # Errors
    /// If the layout has too little room, or `packed` is not as long as the layout. Nothing is
    /// written then.
    ///
    /// # Panics
    /// If the step was not finished.
    pub fn pack(&self, layout: &TableLayout, packed: &mut [i32]) -> Result<(), Error> {
        assert!(self.finished, "Step::finish comes before Step::pack");
        let needed = self.table_layout();
        if layout.sequences < needed.sequences || layout.max_blocks < needed.max_blocks {
            return Err(Error::argument(
                "layout",
                format!("{layout:?}"),
                format!("room for {needed:?}"),
            ));
        }
        if packed.len() != layout.len() {
            let found = format!("{} elements long", packed.len());
            return Err(Error::argument("packed", found, layout.len().to_string()));
        }
        let sequences = needed.sequences;
        let (starts, rest) = packed.split_at_mut(layout.sequences + 1);
        let (kv_lens, rest) = rest.split_at_mut(layout.sequences);
        let (table, rest) = rest.split_at_mut(layout.block_table().len());
        let (groups, lens) = rest.split_at_mut(layout.sequences);
        groups[..sequences].copy_from_slice(&self.prefixes.groups);
        groups[sequences..].fill(-1);
        lens.fill(0);
        lens[..self.prefixes.lens.len()].copy_from_slice(&self.prefixes.lens);
        starts[..=sequences].copy_from_slice(&self.cu_seqlens_q);
        starts[sequences..].fill(self.positions.len() as i32);
        kv_lens[..sequences].copy_from_slice(&self.kv_lens);
        kv_lens[sequences..].fill(0);
        table.fill(-1);
        if needed.max_blocks > 0 {
            let rows = self.block_table.chunks_exact(needed.max_blocks);
            for (from, to) in rows.zip(table.chunks_exact_mut(layout.max_blocks)) {
                to[..from.len()].copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// The tables here, for attention and append on the CPU.
    ///
    /// # Panics
    /// If the step was not finished.
    pub fn tables(&self) -> Tables<'_> {
        assert!(self.finished, "Step::finish comes before Step::tables");
        let packed = Tensor::from(&self.packed);
        self.table_layout().tables(packed).expect("packed by this layout")
    }

    /// Causal attention of the step's rows: `q` is `[tokens, Hq, D]`, keys and values are the
    /// pools. Call it after [`Step::finish`], and set the options of the model (scale, window,
    /// softcap).
    ///
    /// # Panics
    /// If the step was not finished.
    pub fn attention(&self) -> Attention<Tensor<'_>> {
        assert!(self.finished, "Step::finish comes before Step::attention");
        self.tables().attention()
    }

    /// The same with the prefix groups of the step: sequences that share pages read them together.
    ///
    /// # Panics
    /// If the step was not finished.
    pub fn grouped_attention(&self) -> Attention<Tensor<'_>> {
        assert!(self.finished, "Step::finish comes before Step::grouped_attention");
        self.tables().grouped_attention()
    }
}
