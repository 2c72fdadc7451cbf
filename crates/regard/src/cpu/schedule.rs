//! The scheduler: the work items of a run are numbered, and each is computed from its number when a
//! thread takes it. Items are not stored.

use super::plan::{CpuPlan, problem_blocks, problem_heads_per_item, walk_rows};
use super::walk::item::{Item, Task};
use super::walk::key_walk;
use crate::plan::Plan;
use crate::problem::{Inputs, Problem, Sequence};
use crate::split::Split;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Hands out the items of one run. Those with the most keys (with a causal mask, the last rows)
/// come first.
pub struct Schedule<'a> {
    cpu: &'a CpuPlan,
    split: &'a Split,
    inputs: &'a Inputs<'a>,
    problem: Problem,
    /// The number of each sequence's first item, followed by the number of items.
    first_items: &'a [u64],
    /// Split-KV: per row block, the number of splits whose partial states are stored.
    finished_splits: &'a [AtomicU32],
    next: AtomicUsize,
    multiply_adds: u64,
}

/// The KV splits that cover a range of keys.
fn splits_of_keys(keys: &Range<usize>, split_keys: usize) -> Range<usize> {
    if keys.is_empty() { 0..0 } else { keys.start / split_keys..keys.end.div_ceil(split_keys) }
}

impl<'a> Schedule<'a> {
    /// Numbers the items of these operands. `cpu` is the plan's CPU part, and
    /// `workspace` the start of its workspace.
    ///
    /// # Safety
    /// `workspace` is aligned and holds the plan's workspace for `'a`. Nothing else uses its item
    /// and counter parts meanwhile. The operands were checked, and the plan covers them.
    pub unsafe fn new(
        plan: &'a Plan,
        cpu: &'a CpuPlan,
        inputs: &'a Inputs<'a>,
        problem: Problem,
        workspace: *mut u8,
    ) -> Self {
        let layout = &cpu.layout;
        let blocks = problem_blocks(&problem, problem.query_len, cpu.tiling.block_rows);
        let counters =
            if plan.split().parallel { problem.batch * problem.kv_heads * blocks } else { 0 };
        // SAFETY: the layout has aligned room for the plan's sequences and row blocks, and the
        // operands have no more (`covers`). A plan without rows has no room for sequences, but then
        // `run` has returned before. Both parts are initialised here, and the first is shared only
        // once it is complete.
        let (first_items, finished_splits) = unsafe {
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
            cpu,
            split: plan.split(),
            inputs,
            problem,
            first_items: &[],
            finished_splits,
            next: AtomicUsize::new(0),
            multiply_adds: 0,
        };
        for index in 0..schedule.problem.batch {
            let sequence = inputs.sequence(index);
            let rows = sequence.q_len * schedule.problem.group();
            let keys = schedule.walked_keys(&sequence);
            let items = schedule.row_blocks(&sequence)
                * schedule.head_groups(&sequence).0
                * schedule.parallel_splits(&sequence).len().max(1);
            first_items[index + 1] = first_items[index] + items as u64;
            let dims = (schedule.problem.head_dim + schedule.problem.value_dim) as u64;
            let rows = (rows * schedule.problem.kv_heads) as u64;
            let multiply_adds = rows.saturating_mul(keys.len() as u64).saturating_mul(dims);
            schedule.multiply_adds = schedule.multiply_adds.saturating_add(multiply_adds);
        }
        Schedule { first_items, ..schedule }
    }

    /// The number of items.
    pub fn items(&self) -> usize {
        self.first_items[self.problem.batch] as usize
    }

    /// An upper bound of the multiply-adds of all items: a causal mask is not subtracted.
    pub fn multiply_adds(&self) -> u64 {
        self.multiply_adds
    }

    /// The number of groups that the sequence's key/value heads are divided into, and heads per
    /// group.
    fn head_groups(&self, sequence: &Sequence) -> (usize, usize) {
        let heads = problem_heads_per_item(&self.problem, &self.cpu.tiling, sequence.q_len);
        (self.problem.kv_heads.div_ceil(heads), heads)
    }

    /// Row blocks per key/value head of a sequence.
    fn row_blocks(&self, sequence: &Sequence) -> usize {
        problem_blocks(&self.problem, sequence.q_len, self.cpu.tiling.block_rows)
    }

    /// The keys that at least one row of the sequence walks: those that it can see, or the entries
    /// of the longest list.
    fn walked_keys(&self, sequence: &Sequence) -> Range<usize> {
        match self.problem.key_lists {
            Some(lists) => 0..lists.len,
            None => self.keys_of_tokens(sequence, 0..sequence.q_len),
        }
    }

    /// The keys that at least one of these tokens can see.
    fn keys_of_tokens(&self, sequence: &Sequence, tokens: Range<usize>) -> Range<usize> {
        let position = sequence.q_offset + tokens.start as i64;
        self.problem.variant.visible_to_rows(position, tokens.len(), sequence.kv_len)
    }

    /// The splits that are items of their own; empty if splits are not parallel.
    fn parallel_splits(&self, sequence: &Sequence) -> Range<usize> {
        if !self.split.parallel {
            return 0..0;
        }
        splits_of_keys(&self.walked_keys(sequence), self.split.keys)
    }

    /// Takes the next item, or `None` if all have been taken.
    pub fn next(&self) -> Option<Item> {
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let number = self.items().checked_sub(1)?.checked_sub(number)?;
            if let Some(item) = self.item(number as u64) {
                return Some(item);
            }
        }
    }

    /// The item that [`Schedule::next`] would return now, in order to prefetch its first tile.
    /// Another thread may take it.
    pub fn peek(&self) -> Option<Item> {
        let number = self.items().checked_sub(1)?.checked_sub(self.next.load(Ordering::Relaxed))?;
        self.item(number as u64)
    }

    /// Item `number`, or `None` if its rows see no key of its split.
    fn item(&self, number: u64) -> Option<Item> {
        let index = self.first_items.partition_point(|&first| first <= number) - 1;
        let sequence = self.inputs.sequence(index);
        let parallel = self.parallel_splits(&sequence);
        let number = (number - self.first_items[index]) as usize;
        let (number, split) =
            (number / parallel.len().max(1), parallel.start + number % parallel.len().max(1));
        let (groups, heads) = self.head_groups(&sequence);
        let (block, first_head) = (number / groups, number % groups * heads);

        let (first_row, rows) = self.rows_of_block(&sequence, block);
        let group = self.problem.group();
        let tokens = first_row / group..(first_row + rows).div_ceil(group);
        let keys = match self.inputs.key_list(&sequence, tokens.start, first_head) {
            Some(list) => 0..list.len(),
            None => self.keys_of_tokens(&sequence, tokens),
        };
        let splits = splits_of_keys(&keys, self.split.keys);
        let item = Item {
            sequence,
            heads: first_head..self.problem.kv_heads.min(first_head + heads),
            first_row,
            rows,
            walk: key_walk(&self.cpu.tiling, walk_rows(&self.problem, sequence.q_len)),
            keys,
            splits,
            task: Task::Attend,
        };
        if parallel.len() <= 1 || item.splits.len() <= 1 {
            // The block sees only one split: the block's first item takes it alone.
            return (split == parallel.start).then_some(item);
        }
        item.splits.contains(&split).then(|| Item {
            splits: split..split + 1,
            task: Task::AttendPartial,
            ..item
        })
    }

    /// The first row of a block, and its rows. If rows have lists of keys, no block has rows of two
    /// tokens.
    fn rows_of_block(&self, sequence: &Sequence, block: usize) -> (usize, usize) {
        let (group, block_rows) = (self.problem.group(), self.cpu.tiling.block_rows);
        let (token, block, rows) = match self.problem.key_lists {
            Some(_) => {
                let blocks = group.div_ceil(block_rows);
                (block / blocks, block % blocks, group)
            }
            None => (0, block, sequence.q_len * group),
        };
        (token * group + block * block_rows, block_rows.min(rows - block * block_rows))
    }

    /// The number of the block that starts with row `first_row`.
    fn block_of(&self, first_row: usize) -> usize {
        let (group, block_rows) = (self.problem.group(), self.cpu.tiling.block_rows);
        match self.problem.key_lists {
            Some(_) => {
                first_row / group * group.div_ceil(block_rows) + first_row % group / block_rows
            }
            None => first_row / block_rows,
        }
    }

    /// Records that an item is done. The last split of a block to finish returns the block's merge.
    pub fn finish(&self, item: &Item) -> Option<Item> {
        if item.task != Task::AttendPartial {
            return None;
        }
        let block_rows = self.cpu.tiling.block_rows;
        let blocks = problem_blocks(&self.problem, self.problem.query_len, block_rows);
        let head = item.sequence.index * self.problem.kv_heads + item.heads.start;
        let counter = &self.finished_splits[head * blocks + self.block_of(item.first_row)];
        let splits = splits_of_keys(&item.keys, self.split.keys);
        // Release this thread's partial state; acquire those of the other threads.
        let finished = counter.fetch_add(1, Ordering::AcqRel) as usize + 1;
        (finished == splits.len()).then(|| Item { splits, task: Task::Merge, ..item.clone() })
    }
}
