//! Work items of a run: numbered, made from their number when a thread asks for the next, and never stored.

use super::kernel::{Item, Task};
use super::{heads_an_item, way};
use crate::plan::{Plan, row_blocks};
use crate::problem::{Inputs, Problem, Sequence};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Hands out the items of one run, those with the most keys (in causal order, the last rows) first.
pub(super) struct Schedule<'a> {
    plan: &'a Plan,
    inputs: &'a Inputs<'a>,
    problem: Problem,
    /// The number of each sequence's first item, and the number of items.
    first_items: &'a [u64],
    /// For each row block, splits whose partial states have been stored.
    finished: &'a [AtomicU32],
    next: AtomicUsize,
    work: u64,
}

/// The splits that cover a range of keys.
fn splits_of(keys: &Range<usize>, split_keys: usize) -> Range<usize> {
    if keys.is_empty() { 0..0 } else { keys.start / split_keys..keys.end.div_ceil(split_keys) }
}

impl<'a> Schedule<'a> {
    /// Counts the items of these operands. `workspace` is the start of the plan's workspace.
    ///
    /// # Safety
    /// `workspace` is aligned and holds the plan's workspace for `'a`, and nothing else uses its bookkeeping parts meanwhile. The
    /// operands were checked and are covered by the plan.
    pub unsafe fn new(plan: &'a Plan, inputs: &'a Inputs<'a>, problem: Problem, workspace: *mut u8) -> Self {
        let layout = plan.workspace().expect("the plan is for a CPU");
        let blocks = row_blocks(problem.query_len * problem.group(), plan.choice().block_rows);
        let counters = if plan.split().parallel { problem.batch * problem.kv_heads * blocks } else { 0 };
        // SAFETY: the layout has room, aligned, for the plan's sequences and row blocks, of which there are no more here (`covers`; a plan
        // without rows has none for sequences, and `workspace` is not looked at then: `run` returns before). Both parts are initialised here,
        // and the first is shared only once it is complete.
        let (first_items, finished) = unsafe {
            let finished = workspace.add(layout.finished).cast::<AtomicU32>();
            finished.write_bytes(0, counters);
            let first_items = workspace.add(layout.items).cast::<u64>();
            first_items.write_bytes(0, problem.batch + 1);
            (
                std::slice::from_raw_parts_mut(first_items, problem.batch + 1),
                std::slice::from_raw_parts(finished, counters),
            )
        };
        let mut schedule = Schedule {
            plan,
            inputs,
            problem,
            first_items: &[],
            finished,
            next: AtomicUsize::new(0),
            work: 0,
        };
        for index in 0..schedule.problem.batch {
            let sequence = inputs.sequence(index);
            let rows = sequence.q_len * schedule.problem.group();
            let keys = schedule.keys_of_tokens(&sequence, 0..sequence.q_len);
            let items = row_blocks(rows, plan.choice().block_rows)
                * schedule.head_groups(&sequence).0
                * schedule.splits_of_sequence(&sequence).len().max(1);
            first_items[index + 1] = first_items[index] + items as u64;
            let dims = (schedule.problem.head_dim + schedule.problem.value_dim) as u64;
            let work = (rows * schedule.problem.kv_heads) as u64;
            let work = work.saturating_mul(keys.len() as u64).saturating_mul(dims);
            schedule.work = schedule.work.saturating_add(work);
        }
        Schedule { first_items, ..schedule }
    }

    /// How many items there are.
    pub fn items(&self) -> usize {
        self.first_items[self.problem.batch] as usize
    }

    /// Multiply-adds of all items, at most (a causal half is not taken off).
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Into how many groups the sequence's heads are divided, and heads a group.
    fn head_groups(&self, sequence: &Sequence) -> (usize, usize) {
        let rows = sequence.q_len * self.problem.group();
        let heads = heads_an_item(self.plan.choice(), rows, self.problem.kv_heads);
        (self.problem.kv_heads.div_ceil(heads), heads)
    }

    fn keys_of_tokens(&self, sequence: &Sequence, tokens: Range<usize>) -> Range<usize> {
        let position = sequence.q_offset + tokens.start as i64;
        self.problem.variant.visible_to_rows(position, tokens.len(), sequence.kv_len)
    }

    /// The splits that are items of their own; empty where splits are not shared among workers.
    fn splits_of_sequence(&self, sequence: &Sequence) -> Range<usize> {
        if !self.plan.split().parallel {
            return 0..0;
        }
        splits_of(&self.keys_of_tokens(sequence, 0..sequence.q_len), self.plan.split().keys)
    }

    /// The next item, or `None` when all have been handed out.
    pub fn next(&self) -> Option<Item> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let number = self.items().checked_sub(1)?.checked_sub(number)?;
            if let Some(item) = self.item(number as u64) {
                return Some(item);
            }
        }
    }

    /// What [`Schedule::next`] would say now, for whoever wants to fetch what it reads first. Another thread may get it.
    pub fn peek(&self) -> Option<Item> {
        let number = self.items().checked_sub(1)?.checked_sub(self.next.load(Ordering::Relaxed))?;
        self.item(number as u64)
    }

    /// Item `number`, or `None` where a block sees nothing of a split and has nothing to do there.
    fn item(&self, number: u64) -> Option<Item> {
        let index = self.first_items.partition_point(|&first| first <= number) - 1;
        let sequence = self.inputs.sequence(index);
        let shared = self.splits_of_sequence(&sequence);
        let number = (number - self.first_items[index]) as usize;
        let (number, split) = (number / shared.len().max(1), shared.start + number % shared.len().max(1));
        let (groups, heads) = self.head_groups(&sequence);
        let (block, first_head) = (number / groups, number % groups * heads);

        let (group, block_rows) = (self.problem.group(), self.plan.choice().block_rows);
        let first_row = block * block_rows;
        let rows = block_rows.min(sequence.q_len * group - first_row);
        let tokens = first_row / group..(first_row + rows).div_ceil(group);
        let keys = self.keys_of_tokens(&sequence, tokens);
        let splits = splits_of(&keys, self.plan.split().keys);
        let item = Item {
            sequence,
            heads: first_head..self.problem.kv_heads.min(first_head + heads),
            first_row,
            rows,
            way: way(self.plan.choice(), sequence.q_len * group),
            keys,
            splits,
            task: Task::Attend,
        };
        if shared.len() <= 1 || item.splits.len() <= 1 {
            // Not split after all: the first of the block's items does everything.
            return (split == shared.start).then_some(item);
        }
        item.splits.contains(&split).then(|| Item {
            splits: split..split + 1,
            task: Task::AttendPartial,
            ..item
        })
    }

    /// Notes that an item is done. The last split of a block to finish gets the block's merge to do.
    pub fn finish(&self, item: &Item) -> Option<Item> {
        if item.task != Task::AttendPartial {
            return None;
        }
        let block_rows = self.plan.choice().block_rows;
        let blocks = row_blocks(self.problem.query_len * self.problem.group(), block_rows);
        let head = item.sequence.index * self.problem.kv_heads + item.heads.start;
        let counter = &self.finished[head * blocks + item.first_row / block_rows];
        let splits = splits_of(&item.keys, self.plan.split().keys);
        // Release: this thread's partial state; acquire: those of the others.
        let finished = counter.fetch_add(1, Ordering::AcqRel) as usize + 1;
        (finished == splits.len()).then(|| Item { splits, task: Task::Merge, ..item.clone() })
    }
}
