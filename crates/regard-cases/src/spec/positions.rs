//! Positions of queries and keys, and the keys that rows see by them.

use super::{OffsetSpec, Spec, vector};
use crate::array::Array;
use regard::{KeyOffset, KeyPositions, SequenceKeys};
use std::ops::Range;

/// The positions of keys: key j of sequence b is at `offsets[b] + stride * j`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPositionsSpec {
    /// Positions of the sequences' first keys, repeated over the batch. One offset is given as a
    /// number, several as a tensor.
    pub offsets: Vec<i32>,
    /// From one key's position to the next one's.
    pub stride: usize,
}

impl Spec {
    /// The same with keys at these positions.
    pub fn key_positions(self, offsets: &[i32], stride: usize) -> Spec {
        let offsets = offsets.to_vec();
        Spec { key_positions: Some(KeyPositionsSpec { offsets, stride }), ..self }
    }

    /// Makes positions legal: trees and physical slots have no positions of keys, and positions of
    /// keys need positions of rows.
    pub(super) fn legal_positions(&mut self) {
        if self.tree || self.has_listed_pool() {
            self.key_positions = None;
        }
        if self.key_positions.is_some() && self.offset == OffsetSpec::BottomRight {
            let first = (!self.sequences.is_empty()).then(|| self.first_position(0));
            self.offset = OffsetSpec::Same(first.unwrap_or(0));
        }
    }

    /// The position of a sequence's first query row.
    pub fn first_position(&self, index: usize) -> i64 {
        let sequence = self.sequences[index];
        match &self.offset {
            OffsetSpec::BottomRight => sequence.kv_len as i64 - sequence.q_len as i64,
            OffsetSpec::Same(offset) => *offset,
            OffsetSpec::PerSequence(offsets) => i64::from(offsets[index % offsets.len()]),
        }
    }

    /// A sequence's keys and their positions.
    pub fn keys_of(&self, index: usize) -> SequenceKeys {
        let len = self.sequences[index].kv_len;
        match &self.key_positions {
            None => len.into(),
            Some(KeyPositionsSpec { offsets, stride }) => {
                let offset = i64::from(offsets[index % offsets.len()]);
                SequenceKeys { len, offset, stride: *stride }
            }
        }
    }

    /// Keys of a sequence that some row can see by length, causality, window and chunk.
    pub(crate) fn visible(&self, index: usize) -> Range<usize> {
        let q_len = self.sequences[index].q_len;
        if q_len == 0 {
            return 0..0;
        }
        let SequenceKeys { len, offset, stride } = self.keys_of(index);
        // The first key at or after a position, or `len`.
        let key_at = |position: i128| {
            let distance = position - i128::from(offset);
            let key = (distance + stride as i128 - 1).div_euclid(stride as i128);
            key.clamp(0, len as i128) as usize
        };
        let first = i128::from(self.first_position(index));
        let last = first + q_len as i128 - 1;
        let right = if self.causal && !self.tree { Some(0) } else { None };
        let right = [right, self.window.right].into_iter().flatten().min();
        let mut end = right.map_or(len, |right| key_at(last + right as i128 + 1));
        let mut start = self.window.left.map_or(0, |left| key_at(first - left as i128));
        if let Some(chunk) = self.chunk.map(|chunk| chunk as i128) {
            end = end.min(key_at((last.div_euclid(chunk) + 1) * chunk));
            start = start.max(key_at(first.div_euclid(chunk) * chunk));
        }
        start.min(end)..end
    }

    /// The positions of keys as a case has them.
    pub(super) fn key_position_operand(&self) -> Option<KeyPositions<Array>> {
        let KeyPositionsSpec { offsets, stride } = self.key_positions.as_ref()?;
        let offset = match offsets[..] {
            [offset] => KeyOffset::Same(i64::from(offset)),
            _ => {
                let offsets = (0..self.sequences.len()).map(|i| self.keys_of(i).offset as i32);
                KeyOffset::PerSequence(vector(offsets.collect()))
            }
        };
        Some(KeyPositions { offset, stride: *stride })
    }
}
