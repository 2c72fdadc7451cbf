//! Work items: blocks of query rows of one sequence, and the walk of each over its keys.

use crate::problem::Sequence;
use std::ops::Range;

/// One work item: a block of query rows of one (sequence, key/value head), or of several key/value
/// heads.
#[derive(Debug, Clone)]
pub struct Item {
    pub sequence: Sequence,
    /// Key/value heads: several if the item streams or verifies.
    pub heads: Range<usize>,
    /// Rows `first_row..first_row + rows` of each (sequence, key/value head). Packed GQA: row r is
    /// token r / group and query head r % group of the group.
    pub first_row: usize,
    pub rows: usize,
    pub walk: KeyWalk,
    /// Keys that at least one row of the block can see.
    pub keys: Range<usize>,
    /// KV splits that this item walks.
    pub splits: Range<usize>,
    /// Split-KV: the partial states of the item's sequence.
    pub states: SequenceStates,
    pub task: Task,
}

/// Split-KV: the partial states of a sequence, one per row of each key/value head and split.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SequenceStates {
    /// The number of the sequence's first state among the states of the call.
    pub first: usize,
    /// The first split with keys that the sequence can see.
    pub first_split: usize,
    /// The number of splits from there on.
    pub splits: usize,
}

/// The loop by which an item walks its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyWalk {
    /// [`stream`](super::stream): few rows, K and V read in place.
    Stream,
    /// [`verify`](super::verify): dozens of rows, queries transposed instead of keys.
    Verify,
    /// [`tile`](super::tile): many rows, K and V tiles packed.
    Tile,
    /// [`tile`](super::tile) with the products on the matrix unit ([`amx_tile`](super::amx_tile)).
    Amx,
}

impl KeyWalk {
    /// One line for [`Plan::explain`](crate::Plan::explain).
    pub fn description(self) -> &'static str {
        match self {
            KeyWalk::Stream => "keys and values are streamed in place, several heads per item",
            KeyWalk::Verify => "queries are transposed instead of keys, several heads per item",
            KeyWalk::Tile => "tiles of keys and values are packed",
            KeyWalk::Amx => "tiles of keys and values are packed for the matrix unit (AMX)",
        }
    }

    /// Whether K and V tiles are packed.
    pub fn packs(self) -> bool {
        matches!(self, KeyWalk::Tile | KeyWalk::Amx)
    }
}

/// The part of the computation that an item does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Walk the splits and write the output.
    Attend,
    /// Split-KV: walk one split and store its partial state.
    AttendPartial,
    /// Split-KV: merge the partial states of all splits and write the output.
    Merge,
}

impl Item {
    /// Rows of all heads, head by head, as the scratch holds them.
    pub fn all_rows(&self) -> usize {
        self.heads.len() * self.rows
    }

    /// Iterates over the (token, query head) of the rows from `row` on. `group` is the GQA group
    /// size.
    pub fn rows_from(&self, row: usize, group: usize) -> RowIter<'_> {
        let row_in_head = self.first_row + row % self.rows;
        let head = self.heads.start + row / self.rows;
        RowIter {
            item: self,
            group,
            rows_left: self.rows - row % self.rows,
            head,
            token: row_in_head / group,
            member: row_in_head % group,
        }
    }
}

/// The token and query head of each row of an item. It counts instead of dividing: two divisions
/// per row would cost as much as a vector of its scores.
#[derive(Clone)]
pub struct RowIter<'a> {
    item: &'a Item,
    group: usize,
    /// Rows left in this key/value head.
    rows_left: usize,
    head: usize,
    token: usize,
    member: usize,
}

impl RowIter<'_> {
    /// The token and query head of the next row.
    #[inline(always)]
    pub fn next(&mut self) -> (usize, usize) {
        let row = (self.token, self.head * self.group + self.member);
        self.member += 1;
        if self.member == self.group {
            (self.token, self.member) = (self.token + 1, 0);
        }
        self.rows_left -= 1;
        if self.rows_left == 0 {
            let heads_done = self.head + 1 - self.item.heads.start;
            *self = self.item.rows_from(heads_done * self.item.rows, self.group);
        }
        row
    }
}

/// The part of a K tile that an item walks.
#[derive(Clone)]
pub struct TileSpan {
    /// The tile's first key.
    pub tile_start: usize,
    /// The item's keys in the tile, relative to `tile_start`.
    pub valid: Range<usize>,
    /// End of the item's keys in this split.
    pub end: usize,
}

impl TileSpan {
    /// The first valid key.
    pub fn first_key(&self) -> usize {
        self.tile_start + self.valid.start
    }
}
