//! Which rank has which rows.

use std::ops::Range;

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
    fn ranks_divide_the_rows() {
        for ranks in 1..6 {
            for len in 0..40 {
                let rows = BalancedRows { len, ranks };
                let mut all: Vec<usize> =
                    (0..ranks).flat_map(|rank| rows.chunks(rank)).flatten().collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..len), "{len} rows over {ranks}");
            }
        }
    }
}
