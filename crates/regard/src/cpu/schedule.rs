//! The scheduler: the work items of a run are numbered, and each is computed from its number when a
//! thread takes it. Items are not stored.

use super::plan::{
    CpuPlan, SPLITS_PER_WORKER, SequenceStart, has_serial_splits, problem_blocks,
    problem_heads_per_item, walk_rows,
};
use super::walk::item::{Item, SequenceStates, Task};
use super::walk::key_walk;
use crate::problem::{Inputs, Problem, Sequence};
use crate::split::{Cut, Work, cut};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Multiply-adds that are worth a worker: some 7 us of one core. A run of less than twice as many
/// stays on the calling thread. A helper thread that spins starts within a microsecond. Waking a
/// helper that sleeps costs the caller a few microseconds, and the helper some 15.
const MULTIPLY_ADDS_PER_WORKER: u64 = 350_000;

/// Hands out the items of one run, longest first (with a causal mask, the last rows).
///
/// Keys are split for the lengths in use: the plan's are only bounds.
pub struct Schedule<'a> {
    cpu: &'a CpuPlan,
    cut: Cut,
    inputs: &'a Inputs<'a>,
    problem: Problem,
    /// The start of each sequence, followed by the end of the last one.
    starts: &'a [SequenceStart],
    /// Split-KV: per row block, the number of splits whose partial states are stored.
    finished_splits: &'a [AtomicU32],
    next: AtomicUsize,
    totals: Totals,
}

/// Keys that are not split, wherever the first visible one is.
const WHOLE: Cut = Cut { keys: usize::MAX, count: 1, parallel: false };

/// Totals over the items of a run if keys are not split.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    /// Keys of all items.
    keys: u64,
    /// Keys of the longest item.
    max_keys: usize,
    /// An upper bound: a causal mask is not subtracted.
    multiply_adds: u64,
}

impl Totals {
    /// As many items of the longest one's length as all items together.
    fn equal_items(&self) -> usize {
        usize::try_from(self.keys / (self.max_keys as u64).max(1)).unwrap_or(usize::MAX)
    }
}

/// The KV splits that cover a range of keys.
fn splits_of_keys(keys: &Range<usize>, split_keys: usize) -> Range<usize> {
    if keys.is_empty() { 0..0 } else { keys.start / split_keys..keys.end.div_ceil(split_keys) }
}

impl<'a> Schedule<'a> {
    /// Splits keys and numbers the items of these operands. `cpu` is the plan's CPU part, and
    /// `workspace` the start of its workspace.
    ///
    /// # Safety
    /// `workspace` is aligned and holds the plan's workspace for `'a`. Nothing else uses its
    /// sequence and counter parts meanwhile. The operands were checked, and the plan covers them.
    pub unsafe fn new(
        cpu: &'a CpuPlan,
        inputs: &'a Inputs<'a>,
        problem: Problem,
        workspace: *mut u8,
    ) -> Self {
        let mut schedule = Schedule {
            cpu,
            cut: WHOLE,
            inputs,
            problem,
            starts: &[],
            finished_splits: &[],
            next: AtomicUsize::new(0),
            totals: Totals::default(),
        };
        schedule.totals = schedule.totals();
        schedule.cut = schedule.cut_keys();
        let sequences = schedule.problem.batch;
        // SAFETY: the layout has aligned room for the plan's sequences, and the operands have no
        // more (`covers`). A plan without rows has no room for sequences, but then `run` has
        // returned before. The part is initialized here.
        let starts = unsafe {
            let starts = workspace.add(cpu.layout.sequences).cast::<SequenceStart>();
            starts.write(SequenceStart::default());
            for index in 0..sequences {
                let start = *starts.add(index);
                starts.add(index + 1).write(schedule.start_of_next(index, &start));
            }
            std::slice::from_raw_parts(starts, sequences + 1)
        };
        // SAFETY: `cut_keys` splits into no more states than the layout has room for, and a block
        // that has a counter has at least two. Every byte of a counter may be 0.
        let finished_splits = unsafe {
            let counters = starts[sequences].counter as usize;
            let finished = workspace.add(cpu.layout.finished).cast::<AtomicU32>();
            finished.write_bytes(0, counters);
            std::slice::from_raw_parts(finished, counters)
        };
        Schedule { starts, finished_splits, ..schedule }
    }

    fn totals(&self) -> Totals {
        let dims = (self.problem.head_dim + self.problem.value_dim) as u64;
        let mut totals = Totals::default();
        for index in 0..self.problem.batch {
            let sequence = self.inputs.sequence(index);
            let keys = self.walked_keys(&sequence).len();
            let item_keys = (self.unsplit_items(&sequence) as u64).saturating_mul(keys as u64);
            totals.keys = totals.keys.saturating_add(item_keys);
            totals.max_keys = totals.max_keys.max(keys);
            let rows = (sequence.q_len * self.problem.query_heads) as u64;
            let multiply_adds = rows.saturating_mul(keys as u64).saturating_mul(dims);
            totals.multiply_adds = totals.multiply_adds.saturating_add(multiply_adds);
        }
        totals
    }

    /// Splits keys as a plan for these lengths would, as far as there is room for partial states.
    fn cut_keys(&self) -> Cut {
        let Schedule { cpu, problem, totals, .. } = self;
        let cut = cut(&Work {
            items: totals.equal_items(),
            // Only for a bound of states that is checked here.
            rows: 0,
            block_rows: cpu.tiling.block_rows,
            kv_len: if problem.batch_invariant { problem.walked_keys() } else { totals.max_keys },
            tile_keys: cpu.tiling.tile_keys,
            workers: self.workers(),
            splits_per_worker: SPLITS_PER_WORKER,
            batch_invariant: problem.batch_invariant,
        });
        let max_states = cpu.layout.max_states as u64;
        let fits = |cut: &Cut| self.states(cut) <= max_states;
        if problem.batch_invariant {
            return Cut { parallel: cut.parallel && fits(&cut), ..cut };
        }
        if !cut.parallel {
            return WHOLE;
        }
        let mut cut = cut;
        while !fits(&cut) {
            cut.keys = cut.keys.saturating_mul(2);
        }
        cut
    }

    /// The partial states of all sequences for a cut.
    fn states(&self, cut: &Cut) -> u64 {
        (0..self.problem.batch).fold(0, |states, index| {
            let sequence = self.inputs.sequence(index);
            states.saturating_add(self.sequence_states(&sequence, cut))
        })
    }

    /// The partial states of a sequence for a cut: none if it has only one split.
    fn sequence_states(&self, sequence: &Sequence, cut: &Cut) -> u64 {
        match self.parallel_splits(sequence, cut).len() as u64 {
            0 | 1 => 0,
            splits => splits.saturating_mul((sequence.q_len * self.problem.query_heads) as u64),
        }
    }

    /// The start of the sequence after `index`, which starts at `start`.
    fn start_of_next(&self, index: usize, start: &SequenceStart) -> SequenceStart {
        let sequence = self.inputs.sequence(index);
        let splits = self.parallel_splits(&sequence, &self.cut).len();
        let blocks = self.row_blocks(&sequence) * self.problem.kv_heads;
        SequenceStart {
            item: start.item + (self.unsplit_items(&sequence) * splits.max(1)) as u64,
            state: start.state + self.sequence_states(&sequence, &self.cut),
            counter: start.counter + if splits > 1 { blocks as u64 } else { 0 },
        }
    }

    /// The number of items.
    pub fn items(&self) -> usize {
        self.starts[self.problem.batch].item as usize
    }

    /// Keys per split.
    pub fn split_keys(&self) -> usize {
        self.cut.keys
    }

    /// Whether an item may walk several splits and merge them itself.
    pub fn has_serial_splits(&self) -> bool {
        has_serial_splits(&self.problem, self.cut.count)
    }

    /// Threads that the multiply-adds of the run are worth, at most the machine's.
    pub fn workers(&self) -> usize {
        let worth = self.totals.multiply_adds / MULTIPLY_ADDS_PER_WORKER;
        usize::try_from(worth).unwrap_or(usize::MAX).clamp(1, self.cpu.threads.max(1))
    }

    /// The number of the sequence's items if its keys are not split.
    fn unsplit_items(&self, sequence: &Sequence) -> usize {
        self.row_blocks(sequence) * self.head_groups(sequence).0
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

    /// The keys that at least one row of the sequence walks: the keys that it can see, or the
    /// entries of the longest list.
    fn walked_keys(&self, sequence: &Sequence) -> Range<usize> {
        match self.problem.key_lists {
            Some(lists) => 0..lists.walked(),
            None => self.keys_of_tokens(sequence, 0..sequence.q_len),
        }
    }

    /// The keys that at least one of these tokens can see.
    fn keys_of_tokens(&self, sequence: &Sequence, tokens: Range<usize>) -> Range<usize> {
        let position = sequence.q_offset + tokens.start as i64;
        self.problem.variant.visible_to_rows(position, tokens.len(), sequence.keys())
    }

    /// The splits that are separate items; empty if splits are not parallel.
    fn parallel_splits(&self, sequence: &Sequence, cut: &Cut) -> Range<usize> {
        match cut.parallel {
            true => splits_of_keys(&self.walked_keys(sequence), cut.keys),
            false => 0..0,
        }
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
        let index = self.starts.partition_point(|start| start.item <= number) - 1;
        let (sequence, start) = (self.inputs.sequence(index), &self.starts[index]);
        let parallel = self.parallel_splits(&sequence, &self.cut);
        let number = (number - start.item) as usize;
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
        let splits = splits_of_keys(&keys, self.cut.keys);
        let states = SequenceStates {
            first: start.state as usize,
            first_split: parallel.start,
            splits: parallel.len(),
        };
        let item = Item {
            sequence,
            heads: first_head..self.problem.kv_heads.min(first_head + heads),
            first_row,
            rows,
            walk: key_walk(&self.cpu.tiling, walk_rows(&self.problem, sequence.q_len)),
            keys,
            splits,
            states,
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
        let blocks = self.row_blocks(&item.sequence);
        let block = item.heads.start * blocks + self.block_of(item.first_row);
        let first = self.starts[item.sequence.index].counter as usize;
        let counter = &self.finished_splits[first + block];
        let splits = splits_of_keys(&item.keys, self.cut.keys);
        // Release this thread's partial state; acquire the partial states of the other threads.
        let finished = counter.fetch_add(1, Ordering::AcqRel) as usize + 1;
        (finished == splits.len()).then(|| Item { splits, task: Task::Merge, ..item.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::plan::CpuPlan;
    use crate::machine::Machine;
    use crate::plan::Plan;
    use crate::problem::Outputs;
    use crate::tensor::{Tensor, TensorMut};
    use crate::variant::{Attention, Window};

    const HEADS: [usize; 2] = [8, 2];
    const DIM: usize = 128;
    const WORKERS: usize = 16;

    /// The extent of an item: sequence, heads, rows, keys.
    type Piece = (usize, Range<usize>, Range<usize>, Range<usize>);

    struct Call {
        query_len: usize,
        kv_lens: Vec<i32>,
        window: Window,
    }

    impl Call {
        fn new(query_len: usize, kv_lens: &[i32]) -> Call {
            Call { query_len, kv_lens: kv_lens.to_vec(), window: Window::default() }
        }

        /// The items of a run under a plan for the problem that `bounds` makes of this one.
        fn pieces(&self, bounds: impl Fn(&mut Problem)) -> Vec<Piece> {
            let (workers, pieces) = self.shared(bounds);
            assert!(workers > 1, "too small to be shared");
            pieces
        }

        /// The workers of such a run, and its items.
        fn shared(&self, bounds: impl Fn(&mut Problem)) -> (usize, Vec<Piece>) {
            let (batch, [heads, kv_heads]) = (self.kv_lens.len(), HEADS);
            let capacity = self.kv_lens.iter().max().copied().unwrap_or(0) as usize;
            let queries = vec![0f32; batch * self.query_len * heads * DIM];
            let keys = vec![0f32; batch * capacity * kv_heads * DIM];
            let mut out = queries.clone();
            let shape = [batch, self.query_len, heads, DIM];
            let kv = Tensor::new(&keys, [batch, capacity, kv_heads, DIM]).unwrap();
            let attention = Attention {
                kv_lens: Some(Tensor::new(&self.kv_lens, [batch]).unwrap()),
                window: self.window,
                ..Attention::causal()
            };
            let inputs = Inputs::new(Tensor::new(&queries, shape).unwrap(), kv, kv, attention);
            let outputs = Outputs { out: TensorMut::new(&mut out, shape).unwrap(), lse: None };
            let problem = Problem::from_operands(&inputs, &outputs).unwrap();
            let mut planned = problem.clone();
            bounds(&mut planned);
            let machine = Machine::host().unwrap().with_threads(WORKERS);
            let plan = Plan::new(&planned, &machine).unwrap();
            let mut workspace = vec![0u64; plan.workspace_bytes().div_ceil(8)];
            let base = workspace.as_mut_ptr().cast::<u8>();
            let base = base.wrapping_add(base.align_offset(64));
            let cpu = plan.backend::<CpuPlan>().unwrap();
            // SAFETY: the operands are checked, and the workspace is as large as planned.
            let schedule = unsafe { Schedule::new(cpu, &inputs, problem, base) };
            let mut pieces = Vec::new();
            while let Some(item) = schedule.next() {
                let start = item.splits.start.saturating_mul(schedule.split_keys());
                let end = item.splits.end.saturating_mul(schedule.split_keys());
                let keys = item.keys.start.max(start)..item.keys.end.min(end);
                let rows = item.first_row..item.first_row + item.rows;
                pieces.push((item.sequence.index, item.heads.clone(), rows, keys));
                schedule.finish(&item);
            }
            (schedule.workers(), pieces)
        }
    }

    fn engine_bounds(problem: &mut Problem) {
        (problem.batch, problem.query_len, problem.kv_len) = (64, 2048, 131_072);
    }

    /// The time until all pieces are done, and the best possible time, in rows times keys. A worker
    /// takes the next piece when it is done with one.
    fn makespan(pieces: &[Piece]) -> (usize, usize) {
        let mut loads = [0; WORKERS];
        let cost = |(_, heads, rows, keys): &Piece| heads.len() * rows.len() * keys.len();
        for piece in pieces {
            *loads.iter_mut().min().expect("there are workers") += cost(piece);
        }
        let total: usize = pieces.iter().map(cost).sum();
        (loads.into_iter().max().unwrap_or(0), total.div_ceil(WORKERS))
    }

    fn window_call() -> Call {
        let window = Window { left: Some(4095), right: None };
        Call { window, ..Call::new(1, &[32_768]) }
    }

    #[test]
    fn larger_bounds_cut_the_same_pieces() {
        let calls = [
            Call::new(1, &[8192]),
            Call::new(1, &[3000]),
            Call::new(1, &[8192, 64, 64, 64, 64, 64, 64, 64]),
            Call::new(1, &[3000; 24]),
            Call::new(8, &[4096]),
            Call::new(64, &[4096, 1000]),
            Call::new(300, &[300]),
            window_call(),
        ];
        for call in calls {
            let (exact, found) = (call.pieces(|_| {}), call.pieces(engine_bounds));
            assert_eq!(exact, found, "{} rows, {:?} keys", call.query_len, call.kv_lens);
        }
    }

    #[test]
    fn all_workers_share_the_keys_in_use() {
        let uneven = Call::new(1, &[8192, 64, 64, 64, 64, 64, 64, 64]);
        for call in [Call::new(1, &[8192]), uneven, Call::new(8, &[8192]), window_call()] {
            let (time, best) = makespan(&call.pieces(engine_bounds));
            assert!(time <= best + best / 8, "{:?} keys: {time}, at best {best}", call.kv_lens);
        }
    }

    #[test]
    fn short_runs_have_few_workers_and_few_pieces() {
        // A key takes 8 * 256 multiply-adds.
        for (keys, expected) in [(16, 1), (341, 1), (342, 2), (1024, 5), (2048, 11), (4096, 16)] {
            for invariant in [false, true] {
                let bounds = |problem: &mut Problem| problem.batch_invariant = invariant;
                let (workers, pieces) = Call::new(1, &[keys]).shared(bounds);
                assert_eq!(workers, expected, "{keys} keys");
                // Splits are whole tiles, so there may be one more.
                let most = if expected > 1 { SPLITS_PER_WORKER * workers + 1 } else { HEADS[1] };
                assert!(pieces.len() <= most, "{keys} keys: {} pieces", pieces.len());
            }
        }
    }

    #[test]
    fn pieces_cover_every_key_once() {
        let short = Call::new(1, &[700, 300]);
        let long = Call::new(1, &[8192, 700, 64]);
        for call in [short, long, Call::new(64, &[4096, 1000]), window_call()] {
            let mut pieces = call.pieces(engine_bounds);
            pieces.sort_by_key(|(sequence, heads, rows, keys)| {
                (*sequence, heads.start, rows.start, keys.start)
            });
            for pair in pieces.windows(2) {
                let [(a, heads, rows, keys), (b, other_heads, other_rows, other)] = pair else {
                    unreachable!("windows of two")
                };
                if (a, heads, rows) == (b, other_heads, other_rows) {
                    assert_eq!(keys.end, other.start, "{pair:?}");
                }
            }
            let rows: usize =
                pieces.iter().map(|(_, heads, rows, _)| heads.len() * rows.len()).sum();
            assert!(rows >= call.query_len * HEADS[0] * call.kv_lens.len());
        }
    }
}
