//! What a plan for a CPU consists of: tiles, threads and the layout of the workspace.

use super::select::select;
use super::walk::scratch::ALIGNMENT;
use super::walk::tiling::Tiling;
use super::walk::{self, heads_per_item, key_walk};
use crate::error::Error;
use crate::machine::{CpuFacts, Machine};
use crate::plan::{BackendPlan, Line, Plan};
use crate::problem::Problem;
use crate::split::{Split, Work, split};
use std::sync::Arc;

/// Target KV splits per worker when there are fewer items than workers. Each split starts with cold
/// keys, and one worker merges the partial states of all.
const SPLITS_PER_WORKER: usize = 2;

/// The CPU's part of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuPlan {
    pub tiling: Tiling,
    /// Threads that take part, at most.
    pub workers: usize,
    pub layout: WorkspaceLayout,
}

/// Where things lie in the workspace, in bytes from its (aligned) start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// `u64` a sequence and one more: the first work item of each.
    pub items: usize,
    /// `u32` a row block: splits of it that have finished.
    pub finished: usize,
    /// `f32`: partial states of rows and splits.
    pub partials: usize,
    /// `f32`: what one worker needs for itself.
    pub scratch: usize,
    /// Bytes of scratch a worker.
    pub scratch_bytes: usize,
    /// Bytes in all, room for alignment included.
    pub total: usize,
}

/// Query rows per key/value head that walk the same keys, of a sequence of `tokens` query tokens.
/// Those of a token, if rows have lists of keys; else all.
pub fn walk_rows(problem: &Problem, tokens: usize) -> usize {
    let tokens = if problem.key_lists.is_some() { tokens.min(1) } else { tokens };
    tokens.saturating_mul(problem.group())
}

/// Row blocks per key/value head of a sequence of `tokens` query tokens.
pub fn problem_blocks(problem: &Problem, tokens: usize, block_rows: usize) -> usize {
    let blocks = walk_rows(problem, tokens).div_ceil(block_rows);
    if problem.key_lists.is_some() { blocks.saturating_mul(tokens) } else { blocks }
}

/// Key/value heads per item of a sequence of `tokens` query tokens: those of an item read the same
/// keys.
pub fn problem_heads_per_item(problem: &Problem, tiling: &Tiling, tokens: usize) -> usize {
    match problem.key_lists {
        Some(lists) if lists.per_head => 1,
        _ => heads_per_item(tiling, walk_rows(problem, tokens), problem.kv_heads),
    }
}

/// Plans a problem that was checked: the kernel, and how rows and keys are split among threads.
///
/// # Errors
/// The reason why nothing runs it there.
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
    let layout = WorkspaceLayout::new(problem, &tiling, &split, workers);
    let cpu = Arc::new(CpuPlan { tiling, workers, layout });
    Plan::from_parts(problem, machine, choice, split, cpu)
}

impl BackendPlan for CpuPlan {
    fn workers(&self) -> usize {
        self.workers
    }

    fn workspace_bytes(&self) -> usize {
        self.layout.total
    }

    fn explain(&self, problem: &Problem) -> Vec<Line> {
        let rows = walk_rows(problem, problem.query_len);
        let walk = key_walk(&self.tiling, rows).description();
        let lists = problem.key_lists.map(|lists| {
            let heads = if lists.per_head { ", one key/value head per item" } else { "" };
            Line::new("lists", format!("each row walks the entries of its own list{heads}"))
        });
        let keys = Line::new("keys", format!("{rows} rows per key/value head: {walk}"));
        [Some(keys), lists].into_iter().flatten().collect()
    }
}

impl WorkspaceLayout {
    fn new(problem: &Problem, tiling: &Tiling, split: &Split, workers: usize) -> WorkspaceLayout {
        let mut end = 0usize;
        let mut place = |bytes: usize| {
            let start = end;
            end =
                end.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
            start
        };
        let items = place(if problem.rows() == 0 { 0 } else { (problem.batch + 1) * 8 });
        let rows = problem.query_len.saturating_mul(problem.group());
        let blocks = problem.batch.saturating_mul(problem.kv_heads).saturating_mul(problem_blocks(
            problem,
            problem.query_len,
            tiling.block_rows,
        ));
        let finished = place(if split.parallel { blocks.saturating_mul(4) } else { 0 });
        let states = if split.parallel {
            problem
                .batch
                .saturating_mul(problem.kv_heads)
                .saturating_mul(rows)
                .saturating_mul(split.count)
        } else {
            0
        };
        let sizes = walk::sizes(problem, tiling, split);
        let state_bytes = sizes.partial_floats() * 4;
        let partials = place(states.saturating_mul(state_bytes));
        let scratch_bytes = sizes.scratch_bytes();
        let scratch = place(scratch_bytes.saturating_mul(workers));
        WorkspaceLayout {
            items,
            finished,
            partials,
            scratch,
            scratch_bytes,
            total: end.saturating_add(ALIGNMENT),
        }
    }
}
