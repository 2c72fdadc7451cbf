//! The work of a rank in each step of the ring.

use crate::sharding::RingSequence;
use regard::{SequenceKeys, Variant};
use std::cmp::Ordering;
use std::ops::Range;

/// Attention of some of a rank's rows to some of the keys that it holds in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    /// Chunks of the rank's rows: 0 is the early one, 1 the late one.
    pub rows: Range<usize>,
    /// Segments of the source rank's keys: 0 is its share of the prefix, 1 the early chunk, 2 the
    /// late one.
    pub keys: Range<usize>,
    /// Whether rows and keys are at their positions in the sequence. Otherwise only their order
    /// matters, and rows are aligned with the last keys.
    pub positions: bool,
    /// Whether some row precedes some key.
    pub causal: bool,
    /// Whether the sinks join here: exactly one call of each row.
    pub sinks: bool,
    /// The number of the partial result of its rows that it computes.
    pub part: usize,
}

impl Call {
    /// A call in which only order matters. Its part and sinks are found later.
    fn ordered(rows: Range<usize>, keys: Range<usize>, causal: bool) -> Call {
        Call { rows, keys, positions: false, causal, sinks: false, part: 0 }
    }

    /// A call in which positions matter.
    fn positioned(rows: Range<usize>, keys: Range<usize>, causal: bool) -> Call {
        Call { positions: true, ..Call::ordered(rows, keys, causal) }
    }
}

/// A step of the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// The rank whose keys are here.
    pub source: usize,
    /// The attention calls over these keys.
    pub calls: Vec<Call>,
}

/// The sequences that pass around, and the features of the attention over them.
#[derive(Debug, Clone)]
pub(super) struct Ring {
    /// Ragged sequences, or the one that all entries of a batch are like.
    pub sequences: Vec<RingSequence>,
    /// Entries of the batch; `None` if sequences are ragged.
    pub entries: Option<usize>,
    /// Ranks.
    pub ranks: usize,
    /// The features in use.
    pub variant: Variant,
}

impl Ring {
    /// Steps up to the last one that any rank computes in; the ring stops behind them.
    pub fn step_count(&self) -> usize {
        let computes = |&step: &usize| {
            (0..self.ranks).any(|rank| !self.calls(rank, self.source(rank, step)).is_empty())
        };
        (0..self.ranks).rev().find(computes).map_or(0, |last| last + 1)
    }

    /// The rank whose keys a rank has in a step.
    fn source(&self, rank: usize, step: usize) -> usize {
        (rank + self.ranks - step) % self.ranks
    }

    /// The steps of a rank.
    pub fn schedule(&self, rank: usize) -> Vec<Step> {
        // The partial results of early and of late rows so far.
        let mut parts = [0; 2];
        let steps = (0..self.step_count()).map(|step| {
            let source = self.source(rank, step);
            let mut calls = self.calls(rank, source);
            for call in &mut calls {
                let parts = &mut parts[call.rows.clone()];
                call.part = parts.iter().copied().max().unwrap_or(0);
                call.sinks = call.part == 0;
                parts.fill(call.part + 1);
            }
            Step { source, calls }
        });
        steps.collect()
    }

    /// The calls of a rank with the keys of `source`. With its own keys, all of its rows are in
    /// some call, so that they have sinks.
    fn calls(&self, rank: usize, source: usize) -> Vec<Call> {
        let mut calls = match self.needs_positions() {
            true => self.by_position(rank, source),
            false => self.by_order(rank, source),
        };
        calls.retain(|call| self.sees(rank, source, call));
        for chunk in 0..if source == rank { 2 } else { 0 } {
            let mut rows = self.sequences.iter().map(|it| it.rows(rank, self.ranks)[chunk].len());
            if rows.any(|rows| rows > 0) && !calls.iter().any(|call| call.rows.contains(&chunk)) {
                let (rows, keys) = (chunk..chunk + 1, chunk + 1..chunk + 2);
                calls.push(Call::positioned(rows, keys, self.variant.causal));
            }
        }
        calls
    }

    /// Whether more than the order of rows and keys matters.
    fn needs_positions(&self) -> bool {
        let Variant { window, chunk, alibi, causal, .. } = self.variant;
        let distances = window.left.is_some() || window.right.is_some() || chunk.is_some() || alibi;
        let is_last = |&sequence: &RingSequence| {
            let RingSequence { query_len, kv_len, .. } = sequence;
            query_len <= kv_len && sequence == RingSequence::new(query_len, kv_len)
        };
        distances || causal && !self.sequences.iter().all(is_last)
    }

    /// As few calls as a step takes, if only the order of positions matters.
    ///
    /// A rank's rows and its keys are in the order of positions, and all rows see all of the
    /// prefix. So its own keys take one causal call. All rows see all of an earlier rank's early
    /// chunk and nothing of its late chunk. The late rows see both chunks of a later rank; the
    /// early rows see neither. Each of these is as much work as the others.
    ///
    /// Chunks of ragged sequences are apart, so each takes calls of its own.
    fn by_order(&self, rank: usize, source: usize) -> Vec<Call> {
        let causal = self.variant.causal;
        // The segments of keys that a chunk of rows sees.
        let seen = [0, 1].map(|chunk| match (causal, source.cmp(&rank)) {
            (false, _) => 3,
            (true, Ordering::Equal) => 2 + chunk,
            (true, Ordering::Less) => 2,
            (true, Ordering::Greater) => 1 + 2 * chunk,
        });
        let own = causal && source == rank;
        if self.entries.is_some() && (own || seen[0] == seen[1]) {
            return vec![Call::ordered(0..2, 0..seen[1], own)];
        }
        let mut calls = Vec::new();
        for (chunk, seen) in seen.into_iter().enumerate() {
            let rows = chunk..chunk + 1;
            let first_late = if self.entries.is_some() { seen } else { seen.min(2) };
            calls.push(Call::ordered(rows.clone(), 0..first_late, own && seen == first_late));
            calls.push(Call::ordered(rows, first_late..seen, own));
        }
        calls
    }

    /// A call for each chunk of rows and segment of keys. Of a batch, a single rank has all chunks
    /// in the order of positions, and takes one call.
    fn by_position(&self, rank: usize, source: usize) -> Vec<Call> {
        let pairs = match self.ranks == 1 && self.entries.is_some() {
            true => vec![(0..2, 0..3)],
            false => (0..2).flat_map(|i| (0..3).map(move |j| (i..i + 1, j..j + 1))).collect(),
        };
        let calls = pairs.into_iter().map(|(rows, keys)| {
            let mut call = Call::positioned(rows, keys, false);
            call.causal = self.variant.causal && self.precedes(rank, source, &call);
            call
        });
        calls.collect()
    }

    /// The positions of a sequence's rows and keys in a call. If a call has several chunks, the
    /// positions between them too.
    pub fn positions(
        &self,
        sequence: RingSequence,
        (rank, source): (usize, usize),
        call: &Call,
    ) -> (Range<i64>, Range<i64>) {
        let RingSequence { q_offset, .. } = sequence;
        let (rows, keys) = (sequence.rows(rank, self.ranks), sequence.keys(source, self.ranks));
        let hull = |ranges: &[Range<usize>], first: i64| {
            let (start, end) = (ranges[0].start, ranges[ranges.len() - 1].end);
            first + start as i64..first + end as i64
        };
        (hull(&rows[call.rows.clone()], q_offset), hull(&keys[call.keys.clone()], 0))
    }

    /// Whether a row of some sequence may precede a key.
    fn precedes(&self, rank: usize, source: usize, call: &Call) -> bool {
        self.sequences.iter().any(|&sequence| {
            let (rows, keys) = self.positions(sequence, (rank, source), call);
            !rows.is_empty() && rows.start + 1 < keys.end
        })
    }

    /// Whether a row of some sequence sees a key.
    fn sees(&self, rank: usize, source: usize, call: &Call) -> bool {
        self.sequences.iter().any(|&sequence| {
            if call.positions {
                let (rows, keys) = self.positions(sequence, (rank, source), call);
                let count = |range: &Range<i64>| (range.end - range.start).max(0) as usize;
                let present = SequenceKeys { len: count(&keys), offset: keys.start, stride: 1 };
                return !self.variant.visible_to_rows(rows.start, count(&rows), present).is_empty();
            }
            let some = |ranges: &[Range<usize>]| ranges.iter().any(|range| !range.is_empty());
            some(&sequence.rows(rank, self.ranks)[call.rows.clone()])
                && some(&sequence.keys(source, self.ranks)[call.keys.clone()])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::Window;

    fn variants() -> Vec<Variant> {
        let window = |left, right| Window { left, right };
        let causal = Variant { causal: true, ..Variant::default() };
        vec![
            causal,
            Variant::default(),
            Variant { window: window(Some(3), None), ..causal },
            Variant { window: window(Some(2), Some(5)), ..Variant::default() },
            Variant { alibi: true, ..causal },
            Variant { chunk: Some(5), ..causal },
            Variant { chunk: Some(4), window: window(Some(3), Some(1)), ..Variant::default() },
        ]
    }

    /// Every visible pair of a position and a key is in exactly one call, and each row has sinks
    /// once.
    #[test]
    fn every_pair_is_computed_once() {
        let mut sequences = Vec::new();
        for len in [1, 2, 7, 16, 33] {
            let offset = |q_offset| RingSequence { query_len: len, kv_len: 21, q_offset };
            sequences.extend([0, 1, 10, 40].map(|prefix| RingSequence::new(len, len + prefix)));
            sequences.extend([0, 3, -2, 30].map(offset));
        }
        for variant in variants() {
            for ranks in 1..5 {
                for sequence in &sequences {
                    let sequences = vec![*sequence];
                    check(&Ring { sequences, entries: Some(1), ranks, variant });
                }
                check(&Ring { sequences: sequences.clone(), entries: None, ranks, variant });
                let last_rows = sequences.iter().filter(|it| it.kv_len >= it.query_len).copied();
                let last_rows = last_rows.map(|it| RingSequence::new(it.query_len, it.kv_len));
                check(&Ring { sequences: last_rows.collect(), entries: None, ranks, variant });
            }
        }
    }

    /// Whether a query at position `p` sees a key at position `j`.
    fn visible(variant: &Variant, p: i64, j: i64) -> bool {
        let side = |bound: Option<usize>, distance: i64| {
            bound.is_none_or(|bound| distance <= bound as i64)
        };
        let chunk = |position: i64, chunk: usize| position.div_euclid(chunk as i64);
        (!variant.causal || j <= p)
            && side(variant.window.left, p - j)
            && side(variant.window.right, j - p)
            && variant.chunk.is_none_or(|len| chunk(p, len) == chunk(j, len))
    }

    /// The rows and keys of a sequence, or of a call.
    fn pairs(rows: usize, keys: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..rows).flat_map(move |i| (0..keys).map(move |j| (i, j)))
    }

    fn check(ring: &Ring) {
        let Ring { variant, ranks, .. } = *ring;
        for sequence in &ring.sequences {
            let mut seen = vec![0; sequence.query_len * sequence.kv_len];
            for rank in 0..ranks {
                let own = sequence.rows(rank, ranks);
                let mut sinks = vec![0; sequence.query_len];
                let mut parts = std::collections::HashSet::new();
                for step in ring.schedule(rank) {
                    let held = sequence.keys(step.source, ranks);
                    for call in &step.calls {
                        let apart =
                            call.rows.len() > 1 || call.keys.contains(&1) && call.keys.end > 2;
                        assert!(ring.entries.is_some() || !apart, "{call:?} of ragged sequences");
                        let listed = |ranges: &[Range<usize>]| -> Vec<usize> {
                            ranges.iter().cloned().flatten().collect()
                        };
                        let rows = listed(&own[call.rows.clone()]);
                        let keys = listed(&held[call.keys.clone()]);
                        for &row in &rows {
                            sinks[row] += usize::from(call.sinks);
                            assert!(parts.insert((row, call.part)), "{call:?} takes a part again");
                        }
                        let within = Variant { causal: call.causal, ..variant };
                        for (i, j) in pairs(rows.len(), keys.len()) {
                            let (p, at) = (sequence.q_offset + rows[i] as i64, keys[j] as i64);
                            let kept = match call.positions {
                                true => visible(&within, p, at),
                                false => !call.causal || j + rows.len() <= i + keys.len(),
                            };
                            assert_eq!(kept, visible(&variant, p, at), "{call:?} {p} {at}");
                            seen[rows[i] * sequence.kv_len + keys[j]] += usize::from(kept);
                        }
                    }
                }
                let once = own.into_iter().flatten().all(|row| sinks[row] == 1);
                assert!(once, "{ring:?} rank {rank}: {sinks:?}");
            }
            for (i, j) in pairs(sequence.query_len, sequence.kv_len) {
                let expected = visible(&variant, sequence.q_offset + i as i64, j as i64);
                let found = seen[i * sequence.kv_len + j];
                assert_eq!(found, usize::from(expected), "{ring:?} {i} {j}");
            }
        }
    }

    #[test]
    fn causal_work_is_balanced() {
        let causal = Variant { causal: true, ..Variant::default() };
        let work = |entries, prefix: usize, rank| -> Vec<usize> {
            let sequence = RingSequence::new(4096, prefix + 4096);
            let ring = Ring { sequences: vec![sequence], entries, ranks: 4, variant: causal };
            let len = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum::<usize>();
            let cost = |source: usize, call: &Call| {
                let rows = len(&sequence.rows(rank, 4)[call.rows.clone()]);
                let keys = len(&sequence.keys(source, 4)[call.keys.clone()]);
                // Half of the square of rows and their own keys is hidden.
                rows * keys - if call.causal { rows * rows / 2 } else { 0 }
            };
            let steps = ring.schedule(rank).into_iter();
            let costs =
                steps.map(|step| step.calls.iter().map(|call| cost(step.source, call)).sum());
            costs.collect()
        };
        for (rank, entries) in (0..4).flat_map(|rank| [(rank, Some(1)), (rank, None)]) {
            assert_eq!(work(entries, 0, rank), [1024 * 512; 4], "rank {rank}");
            let with_prefix = work(entries, 8192, rank);
            assert_eq!(with_prefix, [1024 * (512 + 2048); 4], "rank {rank}, with a prefix");
        }
    }
}
