//! The call that an item is part of: operands, inner loops and sizes.

use super::item::Item;
use super::list_tile::ListTile;
use super::scratch::{Scratch, Sizes};
use super::softmax::{ScoreModifiers, SoftmaxFn};
use crate::cpu::product::ProductTable;
use crate::problem::{Inputs, Problem};
use crate::state::State;
use crate::tensor::Dims;
use std::ops::Range;

/// [`write_output`](super::rows::write_output), compiled for a level.
pub type WriteOutputFn = unsafe fn(ItemContext, *const f32, *const State, Range<usize>);

/// One call, shared by all its items.
#[derive(Clone)]
pub struct Call<'a> {
    pub inputs: &'a Inputs<'a>,
    /// The actual problem (the plan's problem may be larger).
    pub problem: Problem,
    pub products: &'static ProductTable,
    pub softmax: SoftmaxFn,
    pub write_output: WriteOutputFn,
    /// Peeks at the item that the schedule hands out next, in order to prefetch its first tile.
    /// Another thread may get that item.
    pub peek_next_item: &'a (dyn Fn() -> Option<Item> + Sync),
    pub sizes: Sizes,
    /// Keys per KV split.
    pub split_keys: usize,
    pub out: OutputView,
    pub lse: Option<OutputView>,
    /// Split-KV: the partial states, one per row and split. Each is the padded output row, max and
    /// sum.
    pub partials: *mut f32,
    /// Multiplies dot products: the scale in base 4, or the scale over the softcap.
    pub score_factor: f32,
    pub modifiers: ScoreModifiers<'a>,
}

/// An output tensor.
#[derive(Clone, Copy)]
pub struct OutputView {
    pub data: *mut u8,
    pub dims: Dims,
}

// SAFETY: the raw pointers are to outputs and workspace, which the call has exclusively. Items
// write disjoint rows of outputs and disjoint partial states. A partial state is read by the thread
// that finishes its block's last split, after the schedule's counter (AcqRel) has made the writes
// visible.
unsafe impl Sync for Call<'_> {}

impl Call<'_> {
    /// The partial state of one of the item's rows and a split.
    pub fn partial_state(&self, item: &Item, row: usize, split: usize) -> *mut f32 {
        let head = item.heads.start + row / item.rows;
        let rows_per_head = item.sequence.q_len * self.problem.group();
        let row = head * rows_per_head + item.first_row + row % item.rows;
        let states = &item.states;
        let index = states.first + row * states.splits + (split - states.first_split);
        self.partials.wrapping_add(index * self.sizes.partial_floats())
    }
}

/// An item that runs: the call, the item, and the scratch of the thread that runs it.
#[derive(Clone, Copy)]
pub struct ItemContext<'a> {
    pub call: &'a Call<'a>,
    pub item: &'a Item,
    pub scratch: &'a Scratch,
}

impl<'a> ItemContext<'a> {
    #[inline(always)]
    pub fn sizes(&self) -> &'a Sizes {
        &self.call.sizes
    }

    /// The entries of the tile that is being walked, if rows have lists of keys; else null.
    pub fn list(&self) -> *const ListTile {
        match self.call.problem.key_lists {
            Some(_) => self.scratch.list.cast_const(),
            None => std::ptr::null(),
        }
    }

    /// The unnormalized output of one of the item's rows.
    #[inline(always)]
    pub fn output_row(&self, row: usize) -> *mut f32 {
        self.scratch.output.wrapping_add(row * self.call.sizes.padded_value_dim)
    }
}
