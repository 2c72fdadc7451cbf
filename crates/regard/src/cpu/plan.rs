//! The CPU's part of a plan: tiles, threads and the layout of the workspace.

use super::mask_map;
use super::prefix::{self, PrefixPlan};
use super::select::select;
use super::walk::scratch::{ALIGNMENT, MAX_VERIFY_ROWS};
use super::walk::tiling::Tiling;
use super::walk::{self, heads_per_item, key_walk, max_item_rows};
use crate::error::Error;
use crate::machine::{CpuFacts, Machine};
use crate::plan::{BackendPlan, Line, Plan, Selection};
use crate::problem::Problem;
use crate::split::{INVARIANT_KEYS, ITEMS_PER_WORKER, MIN_KEYS, PARTIAL_BLOCKS_PER_WORKER};
use crate::split::{Split, Work, split};
use crate::tile_map::MapPlace;

/// Target KV splits per worker when there are fewer items than workers. Each split starts with cold
/// keys, and one worker merges the partial states of all.
pub const SPLITS_PER_WORKER: usize = 2;

/// Maximum partial states that a plan for many rows provides for problems smaller than its bounds,
/// in row blocks per worker. A split into [`SPLITS_PER_WORKER`] needs no more. Plans for few rows
/// provide [`PARTIAL_BLOCKS_PER_WORKER`].
const SMALLER_PROBLEM_BLOCKS: usize = 3;

/// The same in batch-invariant mode, whose items have scratch for merging splits themselves.
const SMALLER_INVARIANT_BLOCKS: usize = 2;

/// The CPU's part of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuPlan {
    pub tiling: Tiling,
    /// Threads that take part, at most.
    pub workers: usize,
    /// Threads of the machine, for which a run splits keys.
    pub threads: usize,
    pub layout: WorkspaceLayout,
    /// For sequences that share prefixes.
    pub prefix: Option<PrefixPlan>,
    /// Room for the tile map of a mask, behind all else.
    pub map: Option<MapPlace>,
}

/// Offsets in the workspace, in bytes from its (aligned) start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// [`SequenceStart`]: one per sequence and one more.
    pub sequences: usize,
    /// `u32` per row block whose keys are split: splits of it that have finished.
    pub finished: usize,
    /// `f32`: partial states of rows and splits.
    pub partials: usize,
    /// Partial states that `partials` has room for.
    pub max_states: usize,
    /// `f32`: the scratch of each worker.
    pub scratch: usize,
    /// Bytes of scratch per worker.
    pub scratch_bytes: usize,
    /// Total bytes, room for alignment included.
    pub total: usize,
}

/// Whether one worker may walk several of an item's `count` splits and merge them itself. True in
/// batch-invariant mode, whose splits are fixed even if there are too few workers to share them.
pub fn has_serial_splits(problem: &Problem, count: usize) -> bool {
    problem.batch_invariant && count > 1
}

/// The first items, rows and partial states of a sequence, counted through all sequences of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct SequenceStart {
    pub item: u64,
    /// Partial states, and counters of finished splits, of sequences whose keys are split.
    pub state: u64,
    pub counter: u64,
}

/// Query rows per key/value head that walk the same keys, of a sequence of `tokens` query tokens:
/// the rows of one token if rows have key lists, else all.
pub fn walk_rows(problem: &Problem, tokens: usize) -> usize {
    let tokens = if problem.key_lists.is_some() { tokens.min(1) } else { tokens };
    tokens.saturating_mul(problem.group())
}

/// Row blocks per key/value head of a sequence of `tokens` query tokens.
pub fn problem_blocks(problem: &Problem, tokens: usize, block_rows: usize) -> usize {
    let blocks = walk_rows(problem, tokens).div_ceil(block_rows);
    if problem.key_lists.is_some() { blocks.saturating_mul(tokens) } else { blocks }
}

/// Key/value heads per item of a sequence of `tokens` query tokens. The heads of an item read the
/// same keys.
pub fn problem_heads_per_item(problem: &Problem, tiling: &Tiling, tokens: usize) -> usize {
    match problem.key_lists {
        // Items of several heads read all of them with one stride.
        Some(lists) if lists.per_head || lists.second.is_some() => 1,
        // Both parts of keys are put together in the row tile of one head.
        _ if problem.rotary_dim > 0 => 1,
        _ => heads_per_item(tiling, walk_rows(problem, tokens), problem.kv_heads),
    }
}

/// Plans a problem that was checked: the kernel, and how rows and keys are split among threads.
///
/// # Errors
/// The reason why no kernel runs the problem on this machine.
pub fn plan(problem: &Problem, facts: &CpuFacts, machine: &Machine) -> Result<Plan, Error> {
    let (choice, tiling) = select(problem, facts, machine)?;
    let rows = problem.query_len.saturating_mul(problem.group());
    let blocks = problem_blocks(problem, problem.query_len, tiling.block_rows);
    let heads = problem_heads_per_item(problem, &tiling, problem.query_len);
    let items =
        problem.batch.saturating_mul(problem.kv_heads.div_ceil(heads)).saturating_mul(blocks);
    let split = split(&Work {
        items,
        rows: rows.saturating_mul(heads),
        block_rows: tiling.block_rows,
        kv_len: problem.walked_keys(),
        tile_keys: tiling.tile_keys,
        workers: facts.threads,
        splits_per_worker: SPLITS_PER_WORKER,
        batch_invariant: problem.batch_invariant,
    });
    let all_items = if split.parallel { items.saturating_mul(split.count) } else { items };
    let workers = facts.threads.min(all_items).max(1);
    let layout = WorkspaceLayout::new(problem, &tiling, &split, workers, facts.threads);
    let has_groups = problem.prefix_groups > 0 && prefix::refusal(problem).is_none();
    let planned = |problem: &Problem| plan(problem, facts, machine);
    let prefix = has_groups.then(|| PrefixPlan::new(problem, layout.total, planned)).transpose()?;
    let before = prefix.as_ref().map_or(layout.total, |prefix| prefix.total);
    let map = mask_map::place(problem, &tiling, before);
    let backend = CpuPlan { tiling, workers, threads: facts.threads, layout, prefix, map };
    Plan::from_selection(problem, machine, Selection { choice, split, backend })
}

impl BackendPlan for CpuPlan {
    fn workers(&self) -> usize {
        self.workers
    }

    fn workspace_bytes(&self) -> usize {
        match &self.map {
            Some(map) => map.end(),
            None => self.prefix.as_ref().map_or(self.layout.total, |prefix| prefix.total),
        }
    }

    fn explain(&self, problem: &Problem) -> Vec<Line> {
        let rows = walk_rows(problem, problem.query_len);
        let walk = key_walk(&self.tiling, rows).description();
        let lists = problem.key_lists.map(|lists| {
            let heads = if lists.per_head { ", one key/value head per item" } else { "" };
            let list = if lists.lists_pages() { "its sequence's list" } else { "its own list" };
            Line::new("lists", format!("each row walks the entries of {list}{heads}"))
        });
        let keys = Line::new("keys", format!("{rows} rows per key/value head: {walk}"));
        let groups = (problem.prefix_groups > 0).then(|| {
            let text = match prefix::refusal(problem) {
                Some(reason) => format!("not used: {reason}"),
                None => {
                    "rows of a group walk their shared prefix together; then each sequence its \
                         own keys"
                        .to_string()
                }
            };
            Line::new("prefixes", text)
        });
        let map = self.map.map(|map| {
            let text = format!("room for a tile map of up to {} bytes", map.bytes);
            Line::new("mask", text)
        });
        [Some(keys), lists, groups, map].into_iter().flatten().collect()
    }
}

/// The partial states that a run of this problem, or of a smaller one, may need.
fn max_states(problem: &Problem, tiling: &Tiling, split: &Split, threads: usize) -> usize {
    let min_keys = if problem.batch_invariant { INVARIANT_KEYS } else { MIN_KEYS };
    if threads <= 1 || problem.walked_keys() <= min_keys {
        return 0;
    }
    let rows = problem.query_len.saturating_mul(problem.group());
    let all_rows = problem.batch.saturating_mul(problem.kv_heads).saturating_mul(rows);
    let at_bounds = if split.parallel { all_rows.saturating_mul(split.count) } else { 0 };
    // Ranges of keys that windows leave may begin within a split.
    let splits = problem.walked_keys().div_ceil(min_keys).saturating_add(1);
    let blocks = match problem.batch_invariant {
        _ if rows <= MAX_VERIFY_ROWS => PARTIAL_BLOCKS_PER_WORKER,
        true => SMALLER_INVARIANT_BLOCKS,
        false => SMALLER_PROBLEM_BLOCKS,
    };
    let blocks = threads.saturating_mul(blocks);
    let mut states = all_rows.saturating_mul(splits).min(blocks.saturating_mul(tiling.block_rows));
    if !problem.batch_invariant {
        // Fewer items than ITEMS_PER_WORKER per worker are split into fewer than twice as many.
        let items = threads.saturating_mul(2 * ITEMS_PER_WORKER);
        states = states.min(items.saturating_mul(max_item_rows(tiling, rows, problem.kv_heads)));
    }
    at_bounds.max(states)
}

impl WorkspaceLayout {
    /// The layout for `workers` of a pool of `threads`.
    fn new(
        problem: &Problem,
        tiling: &Tiling,
        split: &Split,
        workers: usize,
        threads: usize,
    ) -> WorkspaceLayout {
        let mut end = 0usize;
        let mut place = |bytes: usize| {
            let start = end;
            end =
                end.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
            start
        };
        let starts = if problem.rows() == 0 { 0 } else { problem.batch + 1 };
        let sequences = place(starts.saturating_mul(size_of::<SequenceStart>()));
        let max_states = max_states(problem, tiling, split, threads);
        // A block of at least one row has at least two states.
        let finished = place((max_states / 2).saturating_mul(size_of::<u32>()));
        let sizes = walk::sizes(problem, tiling, has_serial_splits(problem, split.count));
        let state_bytes = sizes.partial_floats() * 4;
        let partials = place(max_states.saturating_mul(state_bytes));
        let scratch_bytes = sizes.scratch_bytes();
        let scratch = place(scratch_bytes.saturating_mul(workers));
        WorkspaceLayout {
            sequences,
            finished,
            partials,
            max_states,
            scratch,
            scratch_bytes,
            total: end.saturating_add(ALIGNMENT),
        }
    }
}
