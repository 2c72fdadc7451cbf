//! Division of rows and keys among ranks.

use std::ops::Range;

/// The rows of a sequence that each rank of a [`RingPrefill`](crate::RingPrefill) has. The sequence
/// is cut into `2 * ranks` chunks. Rank r has an early chunk, r, and a late one, `2 * ranks - 1 -
/// r`: causal attention then costs every rank the same.
///
/// [`RingSequence`] adds the keys of a cached prefix.
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

    /// The positions of the rows of a rank: the early chunk, then the late chunk.
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

/// A sequence of a [`RingPrefill`](crate::RingPrefill): new rows, and the keys of a cached prefix
/// followed by the keys of the new rows.
///
/// The last `min(query_len, kv_len)` keys are divided among ranks as rows are ([`BalancedRows`]).
/// The keys before them are the prefix, which is divided into contiguous shares: rank r has the
/// r-th of `ranks` equal shares. The last shares may be shorter, or empty.
///
/// ```
/// use regard_nccl::RingSequence;
///
/// // 8 new tokens after 100 cached ones, on 2 ranks.
/// let sequence = RingSequence::new(8, 108);
/// assert_eq!(sequence.rows(0, 2), [0..2, 6..8]);
/// assert_eq!(sequence.keys(0, 2), [0..50, 100..102, 106..108]);
/// assert_eq!(sequence.keys(1, 2), [50..100, 102..104, 104..106]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct RingSequence {
    /// New rows.
    pub query_len: usize,
    /// Keys, of the prefix and of the new rows.
    pub kv_len: usize,
    /// The position of the first row: `kv_len - query_len` if the rows are the last ones of the
    /// sequence. Key j is at position j.
    pub q_offset: i64,
}

impl RingSequence {
    /// A sequence whose rows are its last ones.
    pub fn new(query_len: usize, kv_len: usize) -> RingSequence {
        RingSequence { query_len, kv_len, q_offset: kv_len as i64 - query_len as i64 }
    }

    /// The rows of a rank, counted from the first new one: an early and a late chunk.
    ///
    /// # Panics
    /// Unless `rank` is one of the ranks.
    pub fn rows(self, rank: usize, ranks: usize) -> [Range<usize>; 2] {
        BalancedRows { len: self.query_len, ranks }.chunks(rank)
    }

    /// The keys of a rank, by position: its share of the prefix, an early and a late chunk.
    ///
    /// # Panics
    /// Unless `rank` is one of the ranks.
    pub fn keys(self, rank: usize, ranks: usize) -> [Range<usize>; 3] {
        let new = self.query_len.min(self.kv_len);
        let prefix = self.kv_len - new;
        let [early, late] = BalancedRows { len: new, ranks }
            .chunks(rank)
            .map(|chunk| prefix + chunk.start..prefix + chunk.end);
        let share = prefix.div_ceil(ranks);
        [(rank * share).min(prefix)..((rank + 1) * share).min(prefix), early, late]
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
    #[test]
    fn ranks_divide_the_keys() {
        for ranks in 1..6 {
            for (query_len, kv_len) in [(0, 0), (0, 9), (1, 1), (1, 30), (7, 20), (9, 4), (40, 41)]
            {
                let sequence = RingSequence::new(query_len, kv_len);
                let mut all: Vec<usize> =
                    (0..ranks).flat_map(|rank| sequence.keys(rank, ranks)).flatten().collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..kv_len), "{sequence:?} over {ranks}");
            }
        }
    }
}
