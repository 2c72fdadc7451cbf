//! Which pairs of chunks a rank computes in which step of the ring.

use crate::sharding::BalancedRows;
use regard::{SequenceKeys, Variant};
use std::ops::Range;

/// Attention of some of a rank's rows to some of the keys that it holds in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    /// Rows of the rank.
    pub rows: Range<usize>,
    /// Keys of the source rank.
    pub keys: Range<usize>,
    /// Where the first row and the first key are, if more than their order matters. Otherwise the
    /// rows are aligned with the last keys.
    pub positions: Option<Positions>,
    /// Whether some row precedes some key.
    pub causal: bool,
    /// Whether the sinks join here: exactly one call of each row.
    pub sinks: bool,
    /// Which partial result of its rows it computes.
    pub part: usize,
}

/// Positions in the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Positions {
    /// Of the first row.
    pub row: i64,
    /// Of the first key.
    pub key: i64,
}

/// A step of the ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// The rank whose keys are here.
    pub source: usize,
    /// What is computed with them.
    pub calls: Vec<Call>,
}

/// The steps of a rank.
pub(super) fn schedule(rows: BalancedRows, rank: usize, variant: &Variant) -> Vec<Step> {
    let distances = variant.window.left.is_some()
        || variant.window.right.is_some()
        || variant.chunk.is_some()
        || variant.alibi;
    let mut parts = [0; 2];
    (0..rows.ranks)
        .map(|step| {
            let source = (rank + rows.ranks - step) % rows.ranks;
            let calls = match distances {
                true => pairs(rows, (rank, source), variant, &mut parts),
                false => joined(rows, (rank, source), variant.causal, step),
            };
            Step { source, calls }
        })
        .collect()
}

/// One call for all that a step computes, where only the order of positions matters.
///
/// A rank's rows are in the order of positions. So its own keys take one causal call. Of an earlier
/// rank, all rows see all of the early chunk and nothing of the late one. Of a later rank, the late
/// rows see both chunks and the early rows nothing. Each of these is as much work as the others.
fn joined(
    rows: BalancedRows,
    (rank, source): (usize, usize),
    causal: bool,
    step: usize,
) -> Vec<Call> {
    let [early, _] = rows.chunks(rank);
    let [early_keys, _] = rows.chunks(source);
    let (mut first_row, mut last_key) = (0, rows.count(source));
    if causal && source < rank {
        last_key = early_keys.len();
    } else if causal && source > rank {
        first_row = early.len();
    }
    let call = Call {
        rows: first_row..rows.count(rank),
        keys: 0..last_key,
        positions: None,
        causal: causal && source == rank,
        sinks: source == rank,
        part: step,
    };
    let empty = call.rows.is_empty() || call.keys.is_empty();
    if empty { Vec::new() } else { vec![call] }
}

/// A call per pair of chunks that see each other, where distances matter. `parts` counts the
/// partial results of early and of late rows.
fn pairs(
    rows: BalancedRows,
    (rank, source): (usize, usize),
    variant: &Variant,
    parts: &mut [usize; 2],
) -> Vec<Call> {
    let (chunks, key_chunks) = (rows.chunks(rank), rows.chunks(source));
    let mut calls = Vec::new();
    for (i, positions) in chunks.iter().enumerate() {
        for (j, keys) in key_chunks.iter().enumerate() {
            if !sees(variant, positions, keys) {
                continue;
            }
            let local = |chunks: &[Range<usize>; 2], which: usize| {
                let start = if which == 0 { 0 } else { chunks[0].len() };
                start..start + chunks[which].len()
            };
            calls.push(Call {
                rows: local(&chunks, i),
                keys: local(&key_chunks, j),
                positions: Some(Positions { row: positions.start as i64, key: keys.start as i64 }),
                causal: variant.causal && keys.end > positions.start + 1,
                sinks: positions == keys,
                part: parts[i],
            });
            parts[i] += 1;
        }
    }
    calls
}

/// Whether some position sees some key.
fn sees(variant: &Variant, positions: &Range<usize>, keys: &Range<usize>) -> bool {
    let keys = SequenceKeys { len: keys.len(), offset: keys.start as i64, stride: 1 };
    !variant.visible_to_rows(positions.start as i64, positions.len(), keys).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::Window;

    /// Every visible pair of a position and a key is in exactly one call, and each row has sinks
    /// once.
    #[test]
    fn every_pair_is_computed_once() {
        let window = |left, right| Window { left, right };
        let variants = [
            Variant { causal: true, ..Variant::default() },
            Variant::default(),
            Variant { causal: true, window: window(Some(3), None), ..Variant::default() },
            Variant { window: window(Some(2), Some(5)), ..Variant::default() },
            Variant { causal: true, alibi: true, ..Variant::default() },
            Variant { causal: true, chunk: Some(5), ..Variant::default() },
            Variant { chunk: Some(4), window: window(Some(3), Some(1)), ..Variant::default() },
        ];
        for variant in variants {
            for ranks in 1..5 {
                for len in [1, 2, 7, 16, 33] {
                    check(&variant, BalancedRows { len, ranks });
                }
            }
        }
    }

    /// Whether a query at position `p` sees a key at position `j`.
    fn visible(variant: &Variant, p: i64, j: i64) -> bool {
        let side = |bound: Option<usize>, distance: i64| {
            bound.is_none_or(|bound| distance <= bound as i64)
        };
        (!variant.causal || j <= p)
            && side(variant.window.left, p - j)
            && side(variant.window.right, j - p)
            && variant.chunk.is_none_or(|chunk| p / chunk as i64 == j / chunk as i64)
    }

    /// Whether row `i` of a call sees its key `j`.
    fn keeps(call: &Call, variant: &Variant, i: usize, j: usize) -> bool {
        let variant = Variant { causal: call.causal, ..*variant };
        let (i, j) = (i as i64, j as i64);
        match call.positions {
            Some(first) => visible(&variant, first.row + i, first.key + j),
            None => !call.causal || j <= i + call.keys.len() as i64 - call.rows.len() as i64,
        }
    }

    fn check(variant: &Variant, rows: BalancedRows) {
        let mut seen = vec![0; rows.len * rows.len];
        for rank in 0..rows.ranks {
            let own: Vec<usize> = rows.chunks(rank).into_iter().flatten().collect();
            let mut sinks = vec![0; own.len()];
            let mut parts = std::collections::HashSet::new();
            for step in schedule(rows, rank, variant) {
                let keys: Vec<usize> = rows.chunks(step.source).into_iter().flatten().collect();
                for call in step.calls {
                    for (i, row) in call.rows.clone().enumerate() {
                        sinks[row] += usize::from(call.sinks);
                        assert!(parts.insert((row, call.part)), "{call:?} takes a part again");
                        for (j, key) in call.keys.clone().enumerate() {
                            let (p, at) = (own[row], keys[key]);
                            let kept = keeps(&call, variant, i, j);
                            let expected = visible(variant, p as i64, at as i64);
                            assert_eq!(kept, expected, "{variant:?} {call:?} {p} {at}");
                            seen[p * rows.len + at] += usize::from(kept);
                        }
                    }
                }
            }
            assert!(sinks.iter().all(|&n| n == 1), "{variant:?} {rows:?} rank {rank}: {sinks:?}");
        }
        for p in 0..rows.len {
            for j in 0..rows.len {
                let expected = usize::from(visible(variant, p as i64, j as i64));
                assert_eq!(seen[p * rows.len + j], expected, "{variant:?} {rows:?} {p} {j}");
            }
        }
    }

    #[test]
    fn causal_work_is_balanced() {
        let rows = BalancedRows { len: 4096, ranks: 4 };
        let causal = Variant { causal: true, ..Variant::default() };
        let work = |rank| -> Vec<usize> {
            let steps = schedule(rows, rank, &causal);
            let cost =
                |call: &Call| call.rows.len() * call.keys.len() / (1 + usize::from(call.causal));
            steps.iter().map(|step| step.calls.iter().map(cost).sum()).collect()
        };
        for rank in 0..4 {
            assert_eq!(work(rank), [1024 * 512; 4], "rank {rank}");
        }
    }
}
