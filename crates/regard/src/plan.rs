//! A plan: everything decided before the first byte of input is read.

use crate::cuda;
use crate::error::{Error, Refusal};
use crate::machine::{Device, Machine};
use crate::metal;
use crate::problem::{Inputs, Outputs, Problem};
use crate::select::{Choice, select};
use crate::split::{Split, Work, split};
use std::fmt::Write;

/// How a [`Problem`] runs on a [`Machine`]: the kernel, the split, and the workspace it needs. Made once, run many times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    problem: Problem,
    machine: Machine,
    choice: Choice,
    split: Split,
    workers: usize,
    backend: Backend,
}

/// What only the backend that runs a plan knows about it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Backend {
    Cpu(Workspace),
    Cuda(Box<cuda::Launches>),
    Metal(metal::Launch),
}

/// Where things lie in the workspace, in bytes from its (aligned) start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Workspace {
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

/// Alignment of everything in the workspace: a cache line, and the widest vector.
pub(crate) const ALIGNMENT: usize = 64;

/// Row blocks of `rows` query rows.
pub(crate) fn row_blocks(rows: usize, block_rows: usize) -> usize {
    rows.div_ceil(block_rows)
}

impl Plan {
    /// Plans a problem for a machine. The problem's lengths are upper bounds: see [`Plan::run`].
    ///
    /// # Errors
    /// [`Error::Argument`] if the problem's numbers make no sense together, [`Error::Refused`] if no kernel runs it there.
    pub fn new(problem: &Problem, machine: &Machine) -> Result<Plan, Error> {
        problem.validate()?;
        let (choice, split, workers, backend) = match &machine.device {
            Device::Cpu(facts) => {
                let choice = select(problem, machine)?;
                let (split, workers, workspace) = plan_cpu(problem, &choice, facts.threads);
                (choice, split, workers, Backend::Cpu(workspace))
            }
            Device::Cuda(facts) => {
                let (choice, split, launches) = cuda::select::select(problem, facts, machine)?;
                (choice, split, launches.blocks(), Backend::Cuda(Box::new(launches)))
            }
            Device::Metal(facts) => {
                let (choice, split, launch) = metal::select::select(problem, facts, machine)?;
                let threadgroups = launch.grid.iter().map(|&n| n as usize).product();
                (choice, split, threadgroups, Backend::Metal(launch))
            }
        };
        let plan = Plan {
            problem: problem.clone(),
            machine: machine.clone(),
            choice,
            split,
            workers,
            backend,
        };
        let limit = isize::MAX as usize / 2;
        if plan.workspace_bytes() > limit {
            return Err(Error::argument(
                "problem",
                format!("{problem:?}"),
                format!("a workspace below {limit} bytes"),
            ));
        }
        Ok(plan)
    }

    /// Plans these operands for this machine's CPU.
    ///
    /// # Errors
    /// As [`Problem::of`] and [`Plan::new`].
    pub fn of(inputs: &Inputs, outputs: &Outputs) -> Result<Plan, Error> {
        Plan::new(&Problem::of(inputs, outputs)?, &Machine::host()?)
    }

    /// What was planned for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The machine it was planned for.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The kernel and its tile.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// How keys are split.
    pub fn split(&self) -> &Split {
        &self.split
    }

    /// Threads that take part, at most; on a GPU, thread blocks (threadgroups).
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Bytes of workspace that running the plan needs; on the CPU, at any alignment.
    pub fn workspace_bytes(&self) -> usize {
        match &self.backend {
            Backend::Cpu(workspace) => workspace.total,
            Backend::Cuda(launches) => launches.workspace_bytes,
            Backend::Metal(launch) => launch.workspace_bytes,
        }
    }

    /// How the kernels are launched, if the plan is for an NVIDIA GPU.
    pub fn cuda(&self) -> Option<&cuda::Launches> {
        match &self.backend {
            Backend::Cuda(launches) => Some(launches),
            Backend::Cpu(_) | Backend::Metal(_) => None,
        }
    }

    /// How the kernels are launched, if the plan is for an Apple GPU.
    pub fn metal(&self) -> Option<&metal::Launch> {
        match &self.backend {
            Backend::Metal(launch) => Some(launch),
            Backend::Cpu(_) | Backend::Cuda(_) => None,
        }
    }

    /// The layout of the workspace, if the plan is for a CPU.
    pub(crate) fn workspace(&self) -> Option<&Workspace> {
        match &self.backend {
            Backend::Cpu(workspace) => Some(workspace),
            Backend::Cuda(_) | Backend::Metal(_) => None,
        }
    }

    /// The refusal of a backend that the plan is not for.
    pub(crate) fn not_for(&self, backend: &str) -> Error {
        let reason = format!("the plan is for that machine, not for {backend}");
        Refusal { machine: self.machine.to_string(), reason }.into()
    }

    /// Runs the plan, which has to be for a CPU ([`cuda`](crate::cuda) runs those for NVIDIA GPUs). `inputs` may be smaller than planned (fewer sequences, shorter queries or caches), but heads, dims, types
    /// and features are the planned ones. Allocates nothing; `workspace` needs no initialisation and keeps nothing between runs.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, or the workspace is too small. Nothing is written then.
    pub fn run(
        &self,
        inputs: &Inputs,
        outputs: &mut Outputs,
        workspace: &mut [u8],
    ) -> Result<(), Error> {
        crate::cpu::run(self, inputs, outputs, workspace, &crate::cpu::DefaultExecutor)
    }

    /// What will run and why, in a few lines of plain text.
    pub fn explain(&self) -> String {
        let Plan { problem, choice, split, .. } = self;
        let mut text = String::new();
        let mut line = |label: &str, value: String| {
            writeln!(text, "{label:<10} {value}").expect("writing to a String cannot fail");
        };
        line(
            "problem",
            format!(
                "{} x {}/{} heads, {} x {} tokens, head dim {}{}, {}{}",
                problem.batch,
                problem.query_heads,
                problem.kv_heads,
                problem.query_len,
                problem.kv_len,
                problem.head_dim,
                if problem.value_dim == problem.head_dim {
                    String::new()
                } else {
                    format!("/{}", problem.value_dim)
                },
                problem.dtype,
                if problem.out_dtype == problem.dtype {
                    String::new()
                } else {
                    format!(" to {}", problem.out_dtype)
                },
            ),
        );
        line("machine", self.machine.to_string());
        line("kernel", choice.kernel.name().to_string());
        line(
            "tile",
            format!("{} rows x {} keys: {}", choice.block_rows, choice.tile_keys, choice.reason),
        );
        match &self.backend {
            Backend::Cpu(_) => line("keys", key_walk_description(problem, choice)),
            Backend::Cuda(launches) => {
                for launch in launches.in_order() {
                    let cuda::Launch { module, entry, grid, threads, shared_bytes } = launch;
                    let shape = format!("{grid:?} blocks of {threads} threads");
                    line(
                        "launch",
                        format!(
                            "{entry} of {module}: {shape}, {shared_bytes} bytes of shared memory a block"
                        ),
                    );
                }
            }
            Backend::Metal(launch) => line(
                "launch",
                format!(
                    "{:?} threadgroups of {} SIMD groups, {} bytes of threadgroup memory each{}",
                    launch.grid,
                    launch.simd_groups,
                    launch.threadgroup_bytes,
                    launch.merge.map_or(String::new(), |merge| format!("; then {merge}")),
                ),
            ),
        }
        line("split", split.reason.clone());
        line("workers", self.workers.to_string());
        line("workspace", format!("{} bytes", self.workspace_bytes()));
        text
    }
}

/// How rows and keys are split among the threads of a CPU.
fn plan_cpu(problem: &Problem, choice: &Choice, threads: usize) -> (Split, usize, Workspace) {
    let rows = problem.query_len.saturating_mul(problem.group());
    let blocks = row_blocks(rows, choice.block_rows);
    let heads = crate::cpu::heads_per_item(choice, rows, problem.kv_heads);
    let items =
        problem.batch.saturating_mul(problem.kv_heads.div_ceil(heads)).saturating_mul(blocks);
    let split = split(&Work {
        items,
        rows: rows.saturating_mul(heads),
        block_rows: choice.block_rows,
        kv_len: problem.kv_len,
        tile_keys: choice.tile_keys,
        workers: threads,
        few_items_a_worker: crate::cpu::SPLITS_PER_WORKER,
        batch_invariant: problem.batch_invariant,
    });
    let all_items = if split.parallel { items.saturating_mul(split.count) } else { items };
    let workers = threads.min(all_items).max(1);
    let workspace = Workspace::new(problem, choice, &split, workers);
    (split, workers, workspace)
}

/// How a CPU walks keys and values, in words.
fn key_walk_description(problem: &Problem, choice: &Choice) -> String {
    let rows = problem.query_len.saturating_mul(problem.group());
    format!("{rows} rows per key/value head: {}", crate::cpu::key_walk(choice, rows).description())
}

impl Workspace {
    fn new(problem: &Problem, choice: &Choice, split: &Split, workers: usize) -> Workspace {
        let mut end = 0usize;
        let mut place = |bytes: usize| {
            let start = end;
            end =
                end.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
            start
        };
        let items = place(if problem.rows() == 0 { 0 } else { (problem.batch + 1) * 8 });
        let rows = problem.query_len.saturating_mul(problem.group());
        let blocks = problem
            .batch
            .saturating_mul(problem.kv_heads)
            .saturating_mul(row_blocks(rows, choice.block_rows));
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
        let state_bytes = crate::cpu::partial_floats(problem, choice, split) * 4;
        let partials = place(states.saturating_mul(state_bytes));
        let scratch_bytes = crate::cpu::scratch_bytes(problem, choice, split);
        let scratch = place(scratch_bytes.saturating_mul(workers));
        Workspace {
            items,
            finished,
            partials,
            scratch,
            scratch_bytes,
            total: end.saturating_add(ALIGNMENT),
        }
    }
}
