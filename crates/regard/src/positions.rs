//! Positions of keys: keys of a sequence may be spread over devices, and a shard has its own
//! positions.

use crate::error::Error;
use crate::expect::one_of;

/// The largest [`KeyPositions::stride`]: 2^15. Kernels divide positions by it within 64 bits.
pub const MAX_KEY_STRIDE: usize = 1 << 15;

/// Positions of the keys of a call: key j of a sequence is at position `offset + stride * j`.
/// Causality, windows, chunks and ALiBi count from positions; masks, key lists and lengths count
/// keys of the call.
///
/// ```
/// use regard::{Attention, KeyLayout, QueryOffset, Shard, Tensor};
///
/// // Decode: 1 query over a sequence of 300 keys, of which every fourth is here.
/// let shard = Shard { rank: 1, count: 4, layout: KeyLayout::RoundRobin };
/// let attention: Attention<Tensor> = Attention {
///     q_offset: QueryOffset::Same(299),
///     key_positions: Some(shard.key_positions(300)?),
///     ..Attention::causal()
/// };
/// assert_eq!(shard.positions(300)?.len, 75);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct KeyPositions<T> {
    /// The position of each sequence's first key.
    pub offset: KeyOffset<T>,
    /// From one key's position to the next one's: 1 for contiguous keys, n for keys that n devices
    /// take in turn. From 1 to [`MAX_KEY_STRIDE`], the same for all sequences.
    pub stride: usize,
}

/// The position of a sequence's first key.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum KeyOffset<T> {
    /// The same for every sequence; may be negative. From -2^31 to 2^31 - 1, as if it were in a
    /// tensor.
    Same(i64),
    /// One position per sequence: `[B]`, `i32`.
    PerSequence(T),
}

impl<T> KeyPositions<T> {
    /// The tensor of offsets, if there is one per sequence.
    pub fn tensor(&self) -> Option<&T> {
        match &self.offset {
            KeyOffset::PerSequence(offsets) => Some(offsets),
            KeyOffset::Same(_) => None,
        }
    }

    /// The layout that the stride gives.
    pub fn layout(&self) -> KeyLayout {
        if self.stride == 1 { KeyLayout::Contiguous } else { KeyLayout::RoundRobin }
    }

    /// The same with a reference to the tensor.
    pub fn as_ref(&self) -> KeyPositions<&T> {
        let offset = match &self.offset {
            KeyOffset::Same(offset) => KeyOffset::Same(*offset),
            KeyOffset::PerSequence(offsets) => KeyOffset::PerSequence(offsets),
        };
        KeyPositions { offset, stride: self.stride }
    }

    /// The same with what `change` makes of the tensor; `None` if it makes `None` of it.
    pub(crate) fn try_filter_map<U, E>(
        self,
        change: impl FnOnce(T) -> Result<Option<U>, E>,
    ) -> Result<Option<KeyPositions<U>>, E> {
        let offset = match self.offset {
            KeyOffset::Same(offset) => Some(KeyOffset::Same(offset)),
            KeyOffset::PerSequence(offsets) => change(offsets)?.map(KeyOffset::PerSequence),
        };
        Ok(offset.map(|offset| KeyPositions { offset, stride: self.stride }))
    }
}

/// The division of a sequence's keys among devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyLayout {
    /// Each device has keys of consecutive positions: the stride is 1.
    Contiguous,
    /// Devices take keys in turn: the stride is their number.
    RoundRobin,
}

/// The keys of one sequence in a call: key j, for j below `len`, is at position `offset + stride *
/// j`. A length alone, `300.into()`, stands for keys at positions 0 to 299.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceKeys {
    /// Keys.
    pub len: usize,
    /// The position of the first key.
    pub offset: i64,
    /// From one key's position to the next one's; not 0.
    pub stride: usize,
}

impl From<usize> for SequenceKeys {
    fn from(len: usize) -> SequenceKeys {
        SequenceKeys { len, offset: 0, stride: 1 }
    }
}

impl SequenceKeys {
    /// The position of key `j`.
    #[inline]
    pub fn position(&self, j: usize) -> i64 {
        self.offset + (self.stride * j) as i64
    }

    /// Keys before a position; `len` if all are.
    #[inline]
    pub fn before(&self, position: i64) -> usize {
        let Some(distance) = distance(position, self.offset) else { return 0 };
        let keys = if self.stride == 1 { distance } else { distance.div_ceil(self.stride as u64) };
        usize::try_from(keys).map_or(self.len, |keys| keys.min(self.len))
    }
}

/// `position - offset`, if it is above 0.
#[inline]
fn distance(position: i64, offset: i64) -> Option<u64> {
    (position > offset).then(|| position.wrapping_sub(offset) as u64)
}

/// One device's part of the keys of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The device, from 0.
    pub rank: usize,
    /// Devices, from 1 to [`MAX_KEY_STRIDE`].
    pub count: usize,
    /// The keys that the device has.
    pub layout: KeyLayout,
}

impl Shard {
    /// The keys of this shard, of a sequence of `keys` keys at positions 0 to `keys - 1`.
    /// Contiguous shards have `keys / count` keys, rounded up; the last ones have fewer or none.
    ///
    /// # Errors
    /// If `rank` is not below `count`, or `count` is out of bounds.
    pub fn positions(&self, keys: usize) -> Result<SequenceKeys, Error> {
        one_of("count", self.count, 1..MAX_KEY_STRIDE + 1)?;
        one_of("rank", self.rank, 0..self.count)?;
        Ok(match self.layout {
            KeyLayout::Contiguous => {
                let part = keys.div_ceil(self.count);
                let start = keys.min(self.rank.saturating_mul(part));
                let offset = i64::try_from(start).unwrap_or(i64::MAX);
                SequenceKeys { len: part.min(keys - start), offset, stride: 1 }
            }
            KeyLayout::RoundRobin => SequenceKeys {
                len: keys.saturating_sub(self.rank).div_ceil(self.count),
                offset: self.rank as i64,
                stride: self.count,
            },
        })
    }

    /// [`Attention::key_positions`](crate::Attention::key_positions) for sequences of `keys` keys
    /// each.
    ///
    /// # Errors
    /// As [`Shard::positions`].
    pub fn key_positions<T>(&self, keys: usize) -> Result<KeyPositions<T>, Error> {
        let SequenceKeys { offset, stride, .. } = self.positions(keys)?;
        Ok(KeyPositions { offset: KeyOffset::Same(offset), stride })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_the_keys_of_a_sequence() {
        for layout in [KeyLayout::Contiguous, KeyLayout::RoundRobin] {
            for count in 1..6 {
                for keys in [0, 1, 2, 3, 5, 12, 97] {
                    let mut positions = Vec::new();
                    for rank in 0..count {
                        let shard = Shard { rank, count, layout }.positions(keys).unwrap();
                        positions.extend((0..shard.len).map(|j| shard.position(j)));
                    }
                    positions.sort_unstable();
                    assert!(positions.into_iter().eq(0..keys as i64), "{layout:?} {count} {keys}");
                }
            }
        }
        let shard = |rank, count| Shard { rank, count, layout: KeyLayout::RoundRobin };
        assert!(shard(2, 2).positions(1).unwrap_err().to_string().contains("rank"));
        assert!(shard(0, 0).positions(1).unwrap_err().to_string().contains("count"));
        assert!(shard(0, MAX_KEY_STRIDE + 1).positions(1).is_err());
    }

    #[test]
    fn keys_before_a_position_are_counted() {
        for stride in [1, 2, 3, 7] {
            for offset in [-5, 0, 4] {
                let keys = SequenceKeys { len: 6, offset, stride };
                for position in -20..60 {
                    let before = (0..6).filter(|&j| keys.position(j) < position).count();
                    assert_eq!(keys.before(position), before, "{keys:?} {position}");
                }
                assert_eq!((keys.before(i64::MIN), keys.before(i64::MAX)), (0, 6));
            }
        }
    }
}
