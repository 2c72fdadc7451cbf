//! The places of a call's rows and keys in the tensors of a rank.
//!
//! In a batch, each entry has a rank's chunks one after the other. Ragged tensors have the early
//! chunks of all sequences, then their late chunks. Each early chunk of keys has the rank's share
//! of that sequence's prefix before it. So the rows of a chunk are one ragged tensor, and the keys
//! that they see in a call are a ragged tensor with gaps.

use super::schedule::{Call, Ring};
use crate::sharding::RingSequence;
use std::ops::Range;

/// The places of a call's operands.
#[derive(Debug)]
pub(super) struct Extent {
    /// Rows of the rank: in each batch entry, or of all sequences together.
    pub rows: Range<usize>,
    /// Keys of the source rank, likewise.
    pub keys: Range<usize>,
    /// Maximum rows of a sequence.
    pub query_len: usize,
    /// Maximum keys of a sequence, with the gap behind them.
    pub kv_len: usize,
    /// The positions of the first row and of the first key in a batch entry.
    pub positions: (i64, i64),
    /// The tables of a ragged call; empty for others.
    pub tables: Vec<i32>,
}

/// The ranges of a ragged call's tables: `cu_seqlens_q`, `cu_seqlens_k`, `kv_lens`, and the
/// positions of the first row and of the first key of each sequence.
pub(super) fn table_ranges(sequences: usize) -> [Range<usize>; 5] {
    let mut end = 0;
    [1, 1, 0, 0, 0].map(|more| {
        let start = end;
        end += sequences + more;
        start..end
    })
}

/// The elements of some ranges together.
fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

/// The place of ranges `which`, if all ranges are stored one after the other.
fn stored(ranges: &[Range<usize>], which: &Range<usize>) -> Range<usize> {
    let start = total(&ranges[..which.start]);
    start..start + total(&ranges[which.clone()])
}

impl Ring {
    /// Sequences of the batch.
    pub fn batch(&self) -> usize {
        self.entries.unwrap_or(self.sequences.len())
    }

    /// Rows of a rank: in a batch entry, or of all sequences together.
    pub fn row_count(&self, rank: usize) -> usize {
        self.sequences.iter().map(|it| total(&it.rows(rank, self.ranks))).sum()
    }

    /// Rows of a rank in a chunk, likewise.
    pub fn chunk_rows(&self, rank: usize, chunk: usize) -> usize {
        self.sequences.iter().map(|it| it.rows(rank, self.ranks)[chunk].len()).sum()
    }

    /// Keys of a rank, likewise.
    pub fn key_count(&self, rank: usize) -> usize {
        self.sequences.iter().map(|it| total(&it.keys(rank, self.ranks))).sum()
    }

    /// The places of the operands of `rank`'s call with the keys of `source`.
    pub fn extent(&self, rank: usize, source: usize, call: &Call) -> Extent {
        if self.entries.is_none() {
            return self.ragged_extent((rank, source), call);
        }
        let sequence = self.sequences[0];
        let (rows, keys) = self.positions(sequence, (rank, source), call);
        let positions = (rows.start, keys.start);
        let rows = stored(&sequence.rows(rank, self.ranks), &call.rows);
        let keys = stored(&sequence.keys(source, self.ranks), &call.keys);
        let (query_len, kv_len) = (rows.len(), keys.len());
        Extent { rows, keys, query_len, kv_len, positions, tables: Vec::new() }
    }

    /// As [`Ring::extent`], for a call of one chunk of rows, with keys that do not reach from an
    /// early chunk into the late one.
    fn ragged_extent(&self, (rank, source): (usize, usize), call: &Call) -> Extent {
        let chunk = call.rows.start;
        // The segments that are stored together, sequence by sequence.
        let together = if call.keys.start == 2 { 2..3 } else { 0..2 };
        let early_rows = if chunk == 0 { 0 } else { self.chunk_rows(rank, 0) };
        let early_keys = |it: &RingSequence| total(&it.keys(source, self.ranks)[..together.start]);
        let mut row = early_rows;
        let mut key: usize = self.sequences.iter().map(early_keys).sum();
        let (mut row_starts, mut key_starts, mut key_lens) = (Vec::new(), Vec::new(), Vec::new());
        let (mut row_positions, mut key_positions) = (Vec::new(), Vec::new());
        for &sequence in &self.sequences {
            let keys = sequence.keys(source, self.ranks);
            row_starts.push(row);
            key_starts.push(key + total(&keys[together.start..call.keys.start]));
            key_lens.push(total(&keys[call.keys.clone()]));
            row += sequence.rows(rank, self.ranks)[chunk].len();
            key += total(&keys[together.clone()]);
            let (rows, keys) = self.positions(sequence, (rank, source), call);
            row_positions.push(rows.start as i32);
            key_positions.push(keys.start as i32);
        }
        let last_key = key_starts.last().zip(key_lens.last()).map_or(0, |(start, len)| start + len);
        row_starts.push(row);
        key_starts.push(last_key);
        let (rows, keys) = (early_rows..row, key_starts[0]..last_key);
        let from = |first: usize| move |n: &usize| (n - first) as i32;
        let longest = |starts: &[usize]| starts.windows(2).map(|it| it[1] - it[0]).max();
        let tables = row_starts.iter().map(from(rows.start));
        let tables = tables.chain(key_starts.iter().map(from(keys.start)));
        let tables = tables.chain(key_lens.iter().map(from(0)));
        Extent {
            rows,
            keys,
            query_len: longest(&row_starts).unwrap_or(0),
            kv_len: longest(&key_starts).unwrap_or(0),
            positions: (0, 0),
            tables: tables.chain(row_positions).chain(key_positions).collect(),
        }
    }
}
