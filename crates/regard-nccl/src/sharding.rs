//! Which rank has which keys and rows.

use std::ops::Range;

/// The keys of a sequence that one rank has: key j of the shard stands at position `offset + stride
/// * j` of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyShard {
    /// The position of the shard's first key.
    pub offset: usize,
    /// Positions from one key of the shard to the next.
    pub stride: usize,
    /// Keys of the shard.
    pub len: usize,
}

impl KeyShard {
    /// Contiguous runs of equal length; the last ones may be shorter.
    ///
    /// # Panics
    /// Unless `rank` is below `ranks`.
    pub fn contiguous(keys: usize, ranks: usize, rank: usize) -> KeyShard {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let run = keys.div_ceil(ranks);
        let offset = (rank * run).min(keys);
        KeyShard { offset, stride: 1, len: run.min(keys - offset) }
    }

    /// Round robin: the key at position p is with rank `p % ranks`. Shards stay equally long as a
    /// sequence grows.
    ///
    /// # Panics
    /// Unless `rank` is below `ranks`.
    pub fn round_robin(keys: usize, ranks: usize, rank: usize) -> KeyShard {
        assert!(rank < ranks, "rank {rank} of {ranks}");
        let len = keys.saturating_sub(rank).div_ceil(ranks);
        KeyShard { offset: rank, stride: ranks, len }
    }

    /// The positions of the shard's keys.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |j| self.offset + self.stride * j)
    }
}

/// The rows of a sequence that each rank of a [`RingPrefill`](crate::RingPrefill) has. The sequence
/// is cut into `2 * ranks` chunks, and rank r has chunks r and `2 * ranks - 1 - r`: an early and a
/// late one, so that causal attention costs every rank the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BalancedRows {
    /// Rows of the sequence.
    pub len: usize,
    /// Ranks.
    pub ranks: usize,
}

impl BalancedRows {
    /// Positions of a chunk. The last chunks may be shorter, or empty.
    fn chunk(self, index: usize) -> Range<usize> {
        let run = self.len.div_ceil(2 * self.ranks);
        (index * run).min(self.len)..((index + 1) * run).min(self.len)
    }

    /// The positions of the rows of a rank: those of the early chunk, then those of the late one.
    ///
    /// # Panics
    /// Unless `rank` is one of the ranks.
    pub fn chunks(self, rank: usize) -> [Range<usize>; 2] {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        [self.chunk(rank), self.chunk(2 * self.ranks - 1 - rank)]
    }

    /// Rows of a rank.
    ///
    /// # Panics
    /// Unless `rank` is one of the ranks.
    pub fn count(self, rank: usize) -> usize {
        self.chunks(rank).iter().map(Range::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_the_keys() {
        for ranks in 1..6 {
            for keys in 0..40 {
                for shard in [KeyShard::contiguous, KeyShard::round_robin] {
                    let mut all: Vec<usize> =
                        (0..ranks).flat_map(|rank| shard(keys, ranks, rank).positions()).collect();
                    all.sort_unstable();
                    assert!(all.into_iter().eq(0..keys), "{keys} keys over {ranks}");
                }
                let rows = BalancedRows { len: keys, ranks };
                let mut all: Vec<usize> =
                    (0..ranks).flat_map(|rank| rows.chunks(rank)).flatten().collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..keys), "{keys} rows over {ranks}");
            }
        }
    }
}
