//! Paged caches: views of keys and values in pages, and the allocation of pages to sequences.
//!
//! # The view
//!
//! A paged cache is two pools of blocks and a table. Keys and values are views of shape `[blocks,
//! block_size, Hkv, D]`; slot `j` of sequence `b` is slot `j % block_size` of block `block_table[b,
//! j / block_size]`. `kv_lens[b]` is the number of slots in use. Any block size works, and any
//! order of the pool's dimensions in memory, because only strides differ:
//!
//! | the pool in memory | the view of the keys |
//! |---|---|
//! | `[blocks, block_size, Hkv, D]` ("NHD") | [`Tensor::new`](crate::Tensor::new) |
//! | `[blocks, Hkv, block_size, D]` ("HND") | `Tensor::new(..)?.bhsd()` |
//! | `[blocks, 2, block_size, Hkv, D]`, keys and values interleaved | `pool.select(1, 0)?` |
//! | `[2, blocks, block_size, Hkv, D]`, one after the other | `pool.select(0, 0)?` |
//! | `[blocks, 2, Hkv, block_size, D]`, interleaved HND | `pool.select(1, 0)?.bhsd()` |
//!
//! In a pool that holds both, values are the same with an index of 1, such as `pool.select(1, 1)?`.
//!
//! ```
//! use regard::{Attention, Tensor, attention, paged::PageAllocator};
//!
//! // A pool of 8 blocks of 4 slots for 2 key/value heads of dim 8, keys and values interleaved:
//! // [8, 2, 4, 2, 8].
//! let (block_size, heads, dim) = (4, 2, 8);
//! let mut pool = vec![f32::NAN; 8 * 2 * block_size * heads * dim];
//! let mut pages = PageAllocator::new(8, block_size)?;
//!
//! // Six tokens of one sequence: allocate their slots, and write them.
//! let sequence = pages.create();
//! for range in pages.append(sequence, 6)?.ranges() {
//!     for (slot, token) in range.slots.zip(range.tokens) {
//!         let row = |kv: usize| ((range.block * 2 + kv) * block_size + slot) * heads * dim;
//!         pool[row(0)..][..heads * dim].fill(token as f32); // the key
//!         pool[row(1)..][..heads * dim].fill(1.0); // the value
//!     }
//! }
//!
//! // One new query row with 4 heads attends to all of them.
//! let mut table = vec![0; pages.longest_table(&[sequence])?];
//! let mut kv_lens = [0];
//! pages.block_table(&[sequence], &mut table)?;
//! pages.kv_lens(&[sequence], &mut kv_lens)?;
//! let pool = Tensor::new(&pool, [8, 2, block_size, heads, dim])?;
//! let query = vec![0.5f32; 4 * dim];
//! let options = Attention {
//!     block_table: Some(Tensor::new(&table, [1, table.len()])?),
//!     kv_lens: Some(Tensor::from(&kv_lens)),
//!     ..Attention::causal()
//! };
//! let query = Tensor::new(&query, [1, 1, 4, dim])?;
//! let out: Vec<f32> = attention(query, pool.select(1, 0)?, pool.select(1, 1)?, &options)?;
//! // Slots 6 and 7 were never written: their contents do not matter.
//! assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6));
//! # Ok::<(), regard::Error>(())
//! ```
//!
//! # The allocator
//!
//! [`PageAllocator`] is the bookkeeping that an inference engine needs beside the pool: the tokens
//! in each block, the number of sequences that share it, and the free blocks. It touches no pool
//! memory, does not depend on a backend, and returns the writes and copies that the caller has to
//! make:
//!
//! - [`append`](PageAllocator::append) names the slots of new tokens. If the last block is partly
//!   filled and shared, it also names the one copy that has to come first (copy on write);
//! - [`fork`](PageAllocator::fork) makes a second sequence over the same blocks (parallel samples,
//!   beams); [`fork_at`](PageAllocator::fork_at) shares only a prefix. A prefix cache, such as a
//!   system prompt, is a sequence that is kept for being forked;
//! - [`truncate`](PageAllocator::truncate) takes back tokens from the end (a draft that was
//!   rejected);
//! - [`release_before`](PageAllocator::release_before) releases blocks that slid out of a window:
//!   their table entries become -1. Attention never reads through these as long as no row can see
//!   them;
//! - [`free`](PageAllocator::free) ends a sequence.
//!
//! [`Step`] collects the tables of one step of continuous batching: chunks of prompts and single
//! decodes of many sequences, with their positions, slots, lengths and block table.
//!
//! If pages run out, the error is [`Error::OutOfPages`] with the numbers, and nothing has changed:
//! free or evict a sequence, and call again.

mod copy;
mod groups;
mod step;
mod tables;

pub use copy::CopyBlocks;
pub(crate) use copy::{BlockPart, Rows};
pub use step::Step;
pub use tables::{TableLayout, Tables};

use crate::error::Error;
use crate::problem::MAX_LEN;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A sequence of a [`PageAllocator`]. Ids are not used again in a process: one that was freed, or
/// that is another allocator's, is an error, never another sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    index: usize,
    number: u64,
}

/// The number of the next sequence, counted over all allocators.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

/// Copy the first `slots` slots (keys and values, of every layer) of block `from` to block `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockCopy {
    /// The block to read; other sequences still use it.
    pub from: usize,
    /// The block to write.
    pub to: usize,
    /// Number of slots, from slot 0.
    pub slots: usize,
}

/// A run of new tokens in consecutive slots of one block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlotRange {
    /// The block to write.
    pub block: usize,
    /// The slots in it.
    pub slots: Range<usize>,
    /// The appended tokens that go there, counted from the first.
    pub tokens: Range<usize>,
}

/// The slots of appended tokens.
///
/// Do `copy` first, then write the tokens. If several sequences are appended to before anything is
/// written, do all copies in the order in which they were returned, then write all tokens: a block
/// that is copied may by then belong to another sequence.
#[derive(Debug, Clone, Copy)]
#[must_use = "the copy and the slots are what the caller has to carry out"]
pub struct Append<'a> {
    /// The copy to do before writing: the last block was partly filled and shared.
    pub copy: Option<BlockCopy>,
    table: &'a [i32],
    block_size: usize,
    start: usize,
    end: usize,
}

impl Append<'_> {
    /// The positions of the new tokens in their sequence.
    pub fn positions(&self) -> Range<usize> {
        self.start..self.end
    }

    /// The slots of the new tokens, in order, one range per block.
    pub fn ranges(&self) -> impl Iterator<Item = SlotRange> + '_ {
        let Append { table, block_size, start, end, .. } = *self;
        let columns =
            if start == end { 0..0 } else { start / block_size..end.div_ceil(block_size) };
        columns.map(move |column| {
            let first = start.max(column * block_size);
            let last = end.min((column + 1) * block_size);
            SlotRange {
                block: table[column] as usize,
                slots: first - column * block_size..last - column * block_size,
                tokens: first - start..last - start,
            }
        })
    }
}

/// Hands out the blocks of a paged cache to sequences, and shares them by reference counts.
///
/// Every operation takes time proportional to the blocks it touches, not to the pool's size.
/// Memory is reserved when the allocator is made (8 bytes per block) and when a sequence's table
/// grows; tables of freed sequences are used again.
///
/// A clone has the sequences that existed when it was made, with the same ids. A sequence that is
/// made later exists in one of the two only.
#[derive(Debug, Clone)]
pub struct PageAllocator {
    block_size: usize,
    /// Blocks of the pool.
    blocks: usize,
    /// Number of sequences that hold each block, for blocks that were handed out before. Later ones
    /// were never used.
    references: Vec<u32>,
    /// Blocks that were used and that none holds now; the last one is handed out next, so that
    /// memory in use stays warm.
    free: Vec<i32>,
    sequences: Vec<Sequence>,
    /// Indices of sequences that are not alive.
    vacant: Vec<usize>,
}

#[derive(Debug, Clone, Default)]
struct Sequence {
    /// The number of the sequence that has this place: ids of an earlier sequence are stale.
    number: u64,
    alive: bool,
    /// Tokens.
    len: usize,
    /// Leading blocks that were released.
    released: usize,
    /// One entry per block, -1 for the released ones.
    table: Vec<i32>,
}

impl PageAllocator {
    /// An allocator for a pool of `blocks` blocks of `block_size` slots, all free.
    ///
    /// # Errors
    /// If `block_size` is 0, either exceeds the range of an `i32`, or there is no memory to count
    /// so many blocks.
    pub fn new(blocks: usize, block_size: usize) -> Result<PageAllocator, Error> {
        if block_size == 0 || block_size > MAX_LEN {
            return Err(Error::argument("block_size", block_size, format!("1..={MAX_LEN}")));
        }
        if blocks > MAX_LEN {
            return Err(Error::argument("blocks", blocks, format!("0..={MAX_LEN}")));
        }
        let (mut references, mut free) = (Vec::new(), Vec::new());
        if references.try_reserve_exact(blocks).is_err() || free.try_reserve_exact(blocks).is_err()
        {
            return Err(Error::argument(
                "blocks",
                blocks,
                "as many as memory is left for, 8 bytes per block",
            ));
        }
        Ok(PageAllocator {
            block_size,
            blocks,
            references,
            free,
            sequences: Vec::new(),
            vacant: Vec::new(),
        })
    }

    /// Slots per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks of the pool.
    pub fn total_blocks(&self) -> usize {
        self.blocks
    }

    /// Blocks that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.free.len() + (self.blocks - self.references.len())
    }

    /// Blocks that at least one sequence holds; a shared one counts once.
    pub fn used_blocks(&self) -> usize {
        self.total_blocks() - self.free_blocks()
    }

    /// Sequences that are alive.
    pub fn sequences(&self) -> usize {
        self.sequences.len() - self.vacant.len()
    }

    /// A new sequence without tokens. It takes no block until something is appended.
    pub fn create(&mut self) -> SequenceId {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.sequences.push(Sequence::default());
            self.sequences.len() - 1
        });
        let sequence = &mut self.sequences[index];
        sequence.alive = true;
        sequence.number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        SequenceId { index, number: sequence.number }
    }

    /// A new sequence with all tokens of `sequence`. No block is taken: the two sequences share
    /// their common blocks until one of them writes.
    ///
    /// # Errors
    /// If the sequence was freed.
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId, Error> {
        self.fork_at(sequence, self.len(sequence)?)
    }

    /// A new sequence with the first `len` tokens of `sequence`, sharing their blocks. `len` need
    /// not be a multiple of the block size: a block of which only some slots are common is shared
    /// too, and copied at the first write (copy on write).
    ///
    /// # Errors
    /// If the sequence was freed, has fewer tokens, or has released blocks after `len`.
    pub fn fork_at(&mut self, sequence: SequenceId, len: usize) -> Result<SequenceId, Error> {
        let parent = self.get(sequence)?;
        parent.check_len(len, self.block_size)?;
        let released = parent.released;
        let blocks = len.div_ceil(self.block_size);
        let child = self.create();
        // Two places of one vector: the child's table is taken out while the parent's is read.
        let mut table = std::mem::take(&mut self.sequences[child.index].table);
        table.extend_from_slice(&self.sequences[sequence.index].table[..blocks]);
        for &block in &table[released..] {
            let references = &mut self.references[block as usize];
            *references = references.checked_add(1).expect("fewer than 2^32 sequences");
        }
        let state = &mut self.sequences[child.index];
        (state.len, state.released, state.table) = (len, released, table);
        Ok(child)
    }

    /// Blocks that appending `tokens` tokens would take now, the copy of a shared last block
    /// included.
    ///
    /// # Errors
    /// If the sequence was freed, or would become longer than an `i32` counts.
    pub fn blocks_needed(&self, sequence: SequenceId, tokens: usize) -> Result<usize, Error> {
        let state = self.get(sequence)?;
        let end = state.len.checked_add(tokens).filter(|&end| end <= MAX_LEN).ok_or_else(|| {
            Error::argument(
                "tokens",
                tokens,
                format!("0..={} (2^31 - 1 in all)", MAX_LEN - state.len),
            )
        })?;
        let fresh = end.div_ceil(self.block_size) - state.table.len();
        Ok(fresh + usize::from(tokens > 0 && self.tail_is_shared(state)))
    }

    /// Makes room for `tokens` more tokens and returns their slots.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] if there are too few free blocks, [`Error::Argument`] as
    /// [`PageAllocator::blocks_needed`]. Nothing has changed then.
    pub fn append(&mut self, sequence: SequenceId, tokens: usize) -> Result<Append<'_>, Error> {
        let needed = self.blocks_needed(sequence, tokens)?;
        if needed > self.free_blocks() {
            let (free, total) = (self.free_blocks(), self.total_blocks());
            return Err(Error::OutOfPages { needed, free, total });
        }
        let shared = tokens > 0 && self.tail_is_shared(&self.sequences[sequence.index]);
        let PageAllocator { block_size, references, free, sequences, .. } = self;
        let state = &mut sequences[sequence.index];
        let mut take = || match free.pop() {
            Some(block) => {
                references[block as usize] = 1;
                block
            }
            // The first that was never used: there is one, they were counted above, and their
            // numbers fit an i32.
            None => {
                references.push(1);
                references.len() as i32 - 1
            }
        };
        let mut copy = None;
        if shared {
            let tail = state.table.last_mut().expect("a partly filled block is in the table");
            let (from, to) = (*tail, take());
            *tail = to;
            let slots = state.len % *block_size;
            copy = Some(BlockCopy { from: from as usize, to: to as usize, slots });
        }
        state.table.extend((usize::from(shared)..needed).map(|_| take()));
        if let Some(copy) = copy {
            // Others hold it still: it was shared.
            references[copy.from] -= 1;
        }
        let start = state.len;
        state.len += tokens;
        Ok(Append { copy, table: &state.table, block_size: *block_size, start, end: state.len })
    }

    /// Drops the tokens from `len` on, and the blocks that held nothing else.
    ///
    /// # Errors
    /// If the sequence was freed, has fewer tokens, or has released blocks after `len`.
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> Result<(), Error> {
        self.get(sequence)?.check_len(len, self.block_size)?;
        let PageAllocator { block_size, references, free, sequences, .. } = self;
        let state = &mut sequences[sequence.index];
        for block in state.table.drain(len.div_ceil(*block_size)..) {
            give_back(references, free, block);
        }
        state.len = len;
        Ok(())
    }

    /// Releases the blocks that end before `position`: with a window of `left`, and the next query
    /// row at position `p`, that is `p - left`. The sequence keeps its length, and its table gets
    /// -1 for them. Returns the number of blocks that became free (other holders keep shared
    /// blocks).
    ///
    /// # Errors
    /// If the sequence was freed.
    pub fn release_before(
        &mut self,
        sequence: SequenceId,
        position: usize,
    ) -> Result<usize, Error> {
        let end = position.min(self.get(sequence)?.len) / self.block_size;
        let PageAllocator { references, free, sequences, .. } = self;
        let state = &mut sequences[sequence.index];
        let before = free.len();
        for entry in state.table.iter_mut().take(end).skip(state.released) {
            give_back(references, free, std::mem::replace(entry, -1));
        }
        state.released = state.released.max(end);
        Ok(free.len() - before)
    }

    /// Ends a sequence; blocks that no other one shares become free.
    ///
    /// # Errors
    /// If it was freed before.
    pub fn free(&mut self, sequence: SequenceId) -> Result<(), Error> {
        self.get(sequence)?;
        let PageAllocator { references, free, sequences, .. } = self;
        let state = &mut sequences[sequence.index];
        for &block in &state.table[state.released..] {
            give_back(references, free, block);
        }
        state.table.clear();
        (state.alive, state.len, state.released) = (false, 0, 0);
        self.vacant.push(sequence.index);
        Ok(())
    }

    /// Tokens of a sequence, the released ones included.
    ///
    /// # Errors
    /// If the sequence was freed.
    pub fn len(&self, sequence: SequenceId) -> Result<usize, Error> {
        Ok(self.get(sequence)?.len)
    }

    /// The blocks of a sequence, in order: its row of the block table, -1 for a released block.
    ///
    /// # Errors
    /// If the sequence was freed.
    pub fn blocks(&self, sequence: SequenceId) -> Result<&[i32], Error> {
        Ok(&self.get(sequence)?.table)
    }

    /// Sequences that hold a block; 0 if it is free.
    ///
    /// # Errors
    /// If the pool has no such block.
    pub fn holders(&self, block: usize) -> Result<usize, Error> {
        if block >= self.blocks {
            return Err(Error::argument("block", block, format!("0..{}", self.blocks)));
        }
        Ok(self.references.get(block).map_or(0, |&references| references as usize))
    }

    /// Maximum blocks of any of these sequences: the minimum `max_blocks` of their table.
    ///
    /// # Errors
    /// If one of them was freed.
    pub fn longest_table(&self, sequences: &[SequenceId]) -> Result<usize, Error> {
        sequences.iter().try_fold(0, |longest, &id| Ok(self.get(id)?.table.len().max(longest)))
    }

    /// Writes the block table of these sequences: `[B, max_blocks]` with `max_blocks = table.len()
    /// / B`, unused entries -1.
    ///
    /// # Errors
    /// If one of them was freed or has more than `max_blocks` blocks, or `table` does not divide
    /// into rows. Nothing is written then.
    pub fn block_table(&self, sequences: &[SequenceId], table: &mut [i32]) -> Result<(), Error> {
        let longest = self.longest_table(sequences)?;
        let batch = sequences.len();
        let max_blocks = table.len().checked_div(batch).unwrap_or(0);
        if table.len() != batch * max_blocks || max_blocks < longest {
            return Err(Error::argument(
                "table",
                format!("{} entries for {batch} sequences", table.len()),
                format!("a multiple of {batch}, at least {batch} x {longest}"),
            ));
        }
        // `chunks_exact_mut` refuses rows of length 0, and there is nothing to write in them.
        for (&id, row) in sequences.iter().zip(table.chunks_exact_mut(max_blocks.max(1))) {
            let blocks = &self.get(id)?.table;
            row[..blocks.len()].copy_from_slice(blocks);
            row[blocks.len()..].fill(-1);
        }
        Ok(())
    }

    /// Writes the lengths of these sequences: `[B]`.
    ///
    /// # Errors
    /// If one of them was freed or `kv_lens` has another length. Nothing is written then.
    pub fn kv_lens(&self, sequences: &[SequenceId], kv_lens: &mut [i32]) -> Result<(), Error> {
        if kv_lens.len() != sequences.len() {
            return Err(Error::argument(
                "kv_lens",
                format!("{} elements long", kv_lens.len()),
                format!("{} (one per sequence)", sequences.len()),
            ));
        }
        for &id in sequences {
            self.get(id)?;
        }
        for (&id, len) in sequences.iter().zip(kv_lens) {
            *len = self.get(id)?.len as i32;
        }
        Ok(())
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence, Error> {
        let alive = |sequence: &&Sequence| sequence.alive && sequence.number == id.number;
        self.sequences.get(id.index).filter(alive).ok_or_else(|| {
            Error::argument(
                "sequence",
                format!("{id:?}"),
                "a sequence of this allocator that was not freed",
            )
        })
    }

    /// Whether the next token would go to a block that others hold too.
    fn tail_is_shared(&self, sequence: &Sequence) -> bool {
        let partly_filled = !sequence.len.is_multiple_of(self.block_size);
        partly_filled
            && sequence.table.last().is_some_and(|&block| self.references[block as usize] > 1)
    }
}

impl Sequence {
    /// Checks that the sequence can end at `len`: it has that many tokens, and still has the block
    /// of the last of them.
    fn check_len(&self, len: usize, block_size: usize) -> Result<(), Error> {
        let first = self.released * block_size;
        if (first..=self.len).contains(&len) {
            return Ok(());
        }
        let why = if first > 0 { " (earlier blocks were released)" } else { " (its tokens)" };
        Err(Error::argument("len", len, format!("{first}..={}{why}", self.len)))
    }
}

/// Takes one holder from a block; the last one frees it.
fn give_back(references: &mut [u32], free: &mut Vec<i32>, block: i32) {
    let references = &mut references[block as usize];
    *references -= 1;
    if *references == 0 {
        free.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(append: &Append) -> Vec<(usize, Range<usize>, Range<usize>)> {
        append.ranges().map(|range| (range.block, range.slots, range.tokens)).collect()
    }

    #[test]
    fn tokens_fill_blocks_in_order() {
        let mut pages = PageAllocator::new(4, 4).unwrap();
        let a = pages.create();
        let first = pages.append(a, 3).unwrap();
        assert_eq!(
            (first.copy, first.positions(), slots(&first)),
            (None, 0..3, vec![(0, 0..3, 0..3)])
        );
        let more = pages.append(a, 6).unwrap();
        assert_eq!(slots(&more), vec![(0, 3..4, 0..1), (1, 0..4, 1..5), (2, 0..1, 5..6)]);
        assert_eq!(slots(&pages.append(a, 0).unwrap()), vec![]);
        assert_eq!((pages.len(a).unwrap(), pages.free_blocks(), pages.used_blocks()), (9, 1, 3));
        pages.free(a).unwrap();
        assert_eq!((pages.used_blocks(), pages.sequences()), (0, 0));
    }

    #[test]
    fn a_shared_last_block_is_copied_by_the_first_writer_and_kept_by_the_last() {
        let mut pages = PageAllocator::new(4, 4).unwrap();
        let a = pages.create();
        let _ = pages.append(a, 6).unwrap();
        let b = pages.fork(a).unwrap();
        assert_eq!(
            (pages.used_blocks(), pages.holders(0).unwrap(), pages.holders(1).unwrap()),
            (2, 2, 2)
        );
        assert_eq!(pages.blocks_needed(b, 1).unwrap(), 1);
        let write = pages.append(b, 1).unwrap();
        assert_eq!(write.copy, Some(BlockCopy { from: 1, to: 2, slots: 2 }));
        assert_eq!(slots(&write), vec![(2, 2..3, 0..1)]);
        assert_eq!(pages.append(a, 1).unwrap().copy, None);
        assert_eq!(
            (pages.blocks(a).unwrap(), pages.blocks(b).unwrap()),
            (&[0, 1][..], &[0, 2][..])
        );
    }

    #[test]
    fn a_fork_inside_a_block_copies_only_what_it_shares() {
        let mut pages = PageAllocator::new(4, 8).unwrap();
        let prompt = pages.create();
        let _ = pages.append(prompt, 7).unwrap();
        let reply = pages.fork_at(prompt, 3).unwrap();
        assert_eq!(
            pages.append(reply, 1).unwrap().copy,
            Some(BlockCopy { from: 0, to: 1, slots: 3 })
        );
        let empty = pages.fork_at(prompt, 0).unwrap();
        assert_eq!(pages.blocks(empty).unwrap(), &[] as &[i32]);
        let full = pages.fork_at(prompt, 8).unwrap_err();
        assert_eq!(full.to_string(), "`len` is 8; allowed: 0..=7 (its tokens)");
    }

    #[test]
    fn running_out_of_pages_changes_nothing_and_says_the_numbers() {
        let mut pages = PageAllocator::new(3, 2).unwrap();
        let a = pages.create();
        let _ = pages.append(a, 3).unwrap();
        let b = pages.fork(a).unwrap();
        let error = pages.append(b, 2).unwrap_err();
        assert_eq!(error, Error::OutOfPages { needed: 2, free: 1, total: 3 });
        assert_eq!(error.to_string(), "out of pages: 2 needed, 1 free of 3");
        assert_eq!((pages.len(b).unwrap(), pages.blocks(b).unwrap()), (3, &[0, 1][..]));
        pages.free(a).unwrap();
        assert_eq!(pages.append(b, 2).unwrap().copy, None);
    }

    #[test]
    fn rejected_tokens_give_their_blocks_back() {
        let mut pages = PageAllocator::new(4, 2).unwrap();
        let a = pages.create();
        let _ = pages.append(a, 7).unwrap();
        pages.truncate(a, 3).unwrap();
        assert_eq!((pages.blocks(a).unwrap(), pages.free_blocks()), (&[0, 1][..], 2));
        assert_eq!(slots(&pages.append(a, 1).unwrap()), vec![(1, 1..2, 0..1)]);
        assert!(pages.truncate(a, 5).is_err());
    }

    #[test]
    fn a_window_gives_up_blocks_but_not_positions() {
        let mut pages = PageAllocator::new(8, 4).unwrap();
        let a = pages.create();
        let _ = pages.append(a, 14).unwrap();
        let b = pages.fork_at(a, 8).unwrap();
        assert_eq!(pages.release_before(a, 11).unwrap(), 0, "b still holds both");
        assert_eq!(pages.release_before(a, 12).unwrap(), 1);
        assert_eq!((pages.len(a).unwrap(), pages.blocks(a).unwrap()), (14, &[-1, -1, -1, 3][..]));
        assert_eq!(pages.release_before(a, usize::MAX).unwrap(), 0, "the last block is in use");
        assert_eq!(
            pages.truncate(a, 11).unwrap_err().to_string(),
            "`len` is 11; allowed: 12..=14 (earlier blocks were released)"
        );
        pages.truncate(a, 12).unwrap();
        let c = pages.fork(a).unwrap();
        assert_eq!(pages.append(c, 1).unwrap().copy, None);
        assert_eq!(&pages.blocks(c).unwrap()[..3], &[-1, -1, -1]);
        for id in [a, b, c] {
            pages.free(id).unwrap();
        }
        assert_eq!(pages.free_blocks(), 8);
    }

    #[test]
    fn tables_are_padded_and_checked() {
        let mut pages = PageAllocator::new(8, 2).unwrap();
        let (a, b) = (pages.create(), pages.create());
        let _ = pages.append(a, 5).unwrap();
        let _ = pages.append(b, 1).unwrap();
        assert_eq!(pages.longest_table(&[a, b]).unwrap(), 3);
        let (mut table, mut lens) = ([7; 8], [7; 2]);
        pages.block_table(&[b, a], &mut table).unwrap();
        pages.kv_lens(&[b, a], &mut lens).unwrap();
        assert_eq!((table, lens), ([3, -1, -1, -1, 0, 1, 2, -1], [1, 5]));
        assert!(pages.block_table(&[a, b], &mut table[..7]).is_err());
        assert!(pages.block_table(&[a, b], &mut table[..4]).is_err());
        assert!(pages.block_table(&[], &mut table[..1]).is_err());
        pages.block_table(&[], &mut []).unwrap();
        assert!(pages.kv_lens(&[a], &mut lens).is_err());
    }

    #[test]
    fn misuse_is_named() {
        assert!(PageAllocator::new(1, 0).unwrap_err().to_string().starts_with("`block_size` is 0"));
        assert!(
            PageAllocator::new(1 << 31, 1)
                .unwrap_err()
                .to_string()
                .starts_with("`blocks` is 2147483648")
        );
        let mut pages = PageAllocator::new(1, 1).unwrap();
        let a = pages.create();
        let too_long = pages.append(a, usize::MAX).unwrap_err();
        assert!(
            too_long
                .to_string()
                .starts_with("`tokens` is 18446744073709551615; allowed: 0..=2147483647")
        );
        pages.free(a).unwrap();
        let b = pages.create();
        assert_ne!(a, b, "ids are not used again");
        for error in [pages.free(a), pages.truncate(a, 0), pages.len(a).map(|_| ())] {
            assert!(error.unwrap_err().to_string().contains("was not freed"));
        }
        assert!(pages.holders(1).is_err());
    }
}
