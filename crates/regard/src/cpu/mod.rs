//! The CPU backend. Layers, each built on the ones before:
//!
//! 1. `vector`: a small trait over SIMD vectors, one implementation per level.
//! 2. `product`: the inner loops of S = Q K^T and O = P V.
//! 3. `walk`: takes the query rows of an item through its keys.
//! 4. The driver: `select` and `plan` decide, `compiled` instantiates the code per level,
//!    `schedule` hands out items, `executor` and `pool` are the threads, and [`run`] puts them
//!    together.
//! 5. [`Cpu`]: the device, with `append` and `merge`.

mod append;
mod compiled;
mod copy_blocks;
mod device;
mod executor;
mod mask_map;
mod merge;
mod number;
pub(crate) mod plan;
mod pool;
mod prefix;
mod process;
mod product;
mod schedule;
pub(crate) mod select;
mod tasks;
mod vector;
mod walk;
mod workspace;

pub use crate::tile_map::TileMap;
pub use device::Cpu;
#[cfg(feature = "rayon")]
pub use executor::Rayon;
pub use executor::{Executor, Inline, run_on_foreign_threads};
pub use pool::{DefaultExecutor, Threads};
pub use workspace::Workspace;

use crate::error::{Error, Refusal};
pub use crate::level::{Bf16Products, Level, OVERRIDE};
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::select::Kernel;
use crate::state::LOG4_E;
use compiled::Compiled;
use plan::{CpuPlan, WorkspaceLayout};
use schedule::Schedule;
use std::sync::atomic::{AtomicUsize, Ordering};
use walk::call::{Call, OutputView};
use walk::item::{Item, KeyWalk};
use walk::scratch::ALIGNMENT;
use walk::softmax::ScoreModifiers;

/// [`Plan::run`] on an executor of the caller's choice.
///
/// # Errors
/// As [`Plan::run`].
pub fn run(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: &mut [u8],
    executor: &dyn Executor,
) -> Result<(), Error> {
    run_prepared(plan, inputs, outputs, workspace, executor, Prepared::default())
}

/// [`Cpu::map_mask`] on an executor of the caller's choice.
///
/// # Errors
/// As [`Plan::run`].
pub fn map_mask(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &Outputs,
    workspace: &mut [u8],
    executor: &dyn Executor,
) -> Result<(), Error> {
    checked(plan, inputs, outputs, Some(&*workspace))?;
    let Some((map, mask)) = tile_map(plan, inputs, outputs)?.zip(inputs.attention.mask) else {
        return Ok(());
    };
    mask_map::fill(&map, &mut workspace[map.at..map.at + map.bytes()], &mask, executor);
    Ok(())
}

/// [`Cpu::run_mapped`] on an executor of the caller's choice.
///
/// # Errors
/// As [`Plan::run`].
pub fn run_mapped(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: &mut [u8],
    executor: &dyn Executor,
) -> Result<(), Error> {
    run_prepared(plan, inputs, outputs, workspace, executor, Prepared { tile_map: true })
}

/// The tile map that [`Cpu::run_mapped`] of the plan on these operands reads: for a caller that
/// makes it. `None` if no map is used: there is no mask, there are no rows, rows have lists of
/// keys, or the map would be larger than planned.
///
/// Heads are query heads, and rows the query tokens of a head, as many as the plan is for. A tile
/// is of kind 1 only under a boolean mask that hides none of its keys. An additive mask is read in
/// every tile of which it does not hide all keys.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, or the plan is not for a CPU.
pub fn tile_map(plan: &Plan, inputs: &Inputs, outputs: &Outputs) -> Result<Option<TileMap>, Error> {
    let (problem, cpu, _) = checked(plan, inputs, outputs, None)?;
    let place = cpu.map.filter(|_| problem.rows() > 0);
    Ok(place.and_then(|place| mask_map::tile_map(&place, &cpu.tiling, plan.problem(), inputs)))
}

/// Contents of the workspace that are made before a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Prepared {
    /// The tile map of the mask.
    tile_map: bool,
}

/// The problem of these operands, the CPU's part of the plan and the compiled code. Checks that the
/// plan covers the operands, and that the workspace, if given, is large enough and apart from every
/// operand.
fn checked<'a>(
    plan: &'a Plan,
    inputs: &Inputs,
    outputs: &Outputs,
    workspace: Option<&[u8]>,
) -> Result<(Problem, &'a CpuPlan, &'static Compiled), Error> {
    // References cannot overlap, but operands from raw addresses can.
    let range = workspace.filter(|workspace| !workspace.is_empty()).map(|workspace| {
        let range = workspace.as_ptr_range();
        (range.start as usize, range.end as usize)
    });
    let problem = Problem::from_operands_beside(inputs, outputs, range)?;
    plan.problem().covers(&problem)?;
    let (cpu, compiled) = code(plan)?;
    if let Some(workspace) = workspace.filter(|found| found.len() < plan.workspace_bytes()) {
        let found = format!("{} bytes long", workspace.len());
        let allowed = format!("at least {} bytes, as planned", plan.workspace_bytes());
        return Err(Error::argument("workspace", found, allowed));
    }
    Ok((problem, cpu, compiled))
}

/// Runs a plan, with the prepared contents of the workspace.
fn run_prepared(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: &mut [u8],
    executor: &dyn Executor,
    prepared: Prepared,
) -> Result<(), Error> {
    let (problem, cpu, compiled) = checked(plan, inputs, outputs, Some(&*workspace))?;
    if problem.rows() == 0 {
        // There is nothing to write, however many sequences there are.
        return Ok(());
    }
    if let Some(prefix) = &cpu.prefix {
        let flat = |plan: &Plan, inputs: &Inputs, outputs: &mut Outputs, workspace: &mut [u8]| {
            run(plan, inputs, outputs, workspace, executor)
        };
        if prefix.run(inputs, outputs, &problem, workspace, executor, &flat)? {
            return Ok(());
        }
    }
    // The map is behind all that runs write.
    let place = cpu.map.filter(|_| prepared.tile_map);
    let end = place.map_or(workspace.len(), |place| place.at);
    let (workspace, behind) = workspace.split_at_mut(end);
    let map = place
        .and_then(|place| mask_map::tile_map(&place, &cpu.tiling, plan.problem(), inputs))
        .zip(inputs.attention.mask.as_ref());
    let tiles = map.map(|(map, mask)| mask_map::lookups(&map, &behind[..map.bytes()], mask));
    let base = Base(workspace.as_mut_ptr());
    let base = Base(base.0.wrapping_add(base.0.align_offset(ALIGNMENT)));
    // SAFETY: the workspace is long enough, alignment included, and borrowed for as long as the
    // schedule lives. Only the schedule uses its sequence and counter parts. The operands are
    // checked and covered.
    let schedule = unsafe { Schedule::new(cpu, inputs, problem.clone(), base.0) };
    let peek_next_item = || schedule.peek();
    let call = Call {
        inputs,
        products: &compiled.products,
        softmax: compiled.softmax,
        write_output: compiled.write_output,
        peek_next_item: &peek_next_item,
        sizes: walk::sizes(&problem, &cpu.tiling, schedule.has_serial_splits()),
        split_keys: schedule.split_keys(),
        out: OutputView { data: outputs.out.as_mut_ptr(), dims: *outputs.out },
        lse: outputs.lse.as_mut().map(|lse| OutputView { data: lse.as_mut_ptr(), dims: **lse }),
        partials: base.at(cpu.layout.partials).cast(),
        score_factor: score_factor(inputs),
        modifiers: ScoreModifiers {
            attention: &inputs.attention,
            softcap: inputs.attention.softcap.map(|cap| cap * LOG4_E),
            unmodified: problem.variant.has_unmodified_scores(),
            tiles,
        },
        problem,
    };
    let runner = Runner { schedule: &schedule, layout: &cpu.layout, base, compiled, call: &call };
    // CPUs with AMX multiply f32 faster than pairs of bf16, and only packed tiles use AMX.
    let streams = plan.choice().kernel == Kernel::CpuAmx;
    // Verification has no products of blocks in bf16.
    let f32_code = match streams || cpu.tiling.packs_blocks {
        true => self::compiled(Kernel::Cpu(Level::Avx512)),
        false => None,
    };
    match f32_code {
        Some(compiled) => {
            let call = Call {
                products: &compiled.products,
                softmax: compiled.softmax,
                write_output: compiled.write_output,
                ..call.clone()
            };
            let in_f32 = F32Products { compiled, call: &call, streams };
            runner.run(Some(&in_f32), cpu.workers, executor);
        }
        None => runner.run(None, cpu.workers, executor),
    }
    Ok(())
}

/// The CPU's part of a plan, and its compiled code.
///
/// # Errors
/// If the plan is not for a CPU, or this one lacks the instructions.
fn code(plan: &Plan) -> Result<(&CpuPlan, &'static Compiled), Error> {
    let Some(cpu) = plan.backend::<CpuPlan>() else { return Err(plan.not_for("the CPU")) };
    let kernel = plan.choice().kernel;
    let Some(compiled) = compiled(kernel) else {
        let (arch, kernel) = (std::env::consts::ARCH, kernel.name());
        let reason = format!("this {arch} CPU lacks the instructions of {kernel}");
        return Err(Refusal { machine: plan.machine().to_string(), reason }.into());
    };
    Ok((cpu, compiled))
}

/// The factor of dot products: the scale in base 4, or the scale over the softcap.
fn score_factor(inputs: &Inputs) -> f32 {
    let scale = f64::from(inputs.scale());
    let softcap = inputs.attention.softcap;
    softcap.map_or(scale * f64::from(LOG4_E), |cap| scale / f64::from(cap)) as f32
}

/// Runs the items of a call.
struct Runner<'a> {
    schedule: &'a Schedule<'a>,
    layout: &'a WorkspaceLayout,
    base: Base,
    compiled: &'static Compiled,
    call: &'a Call<'a>,
}

/// The code and call of items that multiply f32 in a plan whose other items multiply bf16:
/// verification, and streaming if `streams`.
struct F32Products<'a> {
    compiled: &'static Compiled,
    call: &'a Call<'a>,
    streams: bool,
}

impl F32Products<'_> {
    fn takes(&self, walk: KeyWalk) -> bool {
        walk == KeyWalk::Verify || self.streams && walk == KeyWalk::Stream
    }
}

impl Runner<'_> {
    /// Runs all items on up to `workers` threads, or on fewer if they are not worth as many.
    fn run(&self, in_f32: Option<&F32Products>, workers: usize, executor: &dyn Executor) {
        let work = |worker| self.run_items(in_f32, worker);
        let workers = workers.min(self.schedule.items()).min(self.schedule.workers());
        if workers > 1 {
            let next_worker = AtomicUsize::new(0);
            executor.run(workers, &|| {
                let worker = next_worker.fetch_add(1, Ordering::Relaxed);
                if worker < workers {
                    work(worker);
                }
            });
        }
        // All items, or the items that the executor left. Its calls have returned, so worker 0's
        // scratch is free.
        work(0);
    }

    /// Runs items until none is left, with the scratch of `worker`.
    fn run_items(&self, in_f32: Option<&F32Products>, worker: usize) {
        let scratch = self.base.at(self.layout.scratch + worker * self.layout.scratch_bytes);
        while let Some(item) = self.schedule.next() {
            let (compiled, call) = match in_f32 {
                Some(in_f32) if in_f32.takes(item.walk) => (in_f32.compiled, in_f32.call),
                _ => (self.compiled, self.call),
            };
            let run_item = |item: &Item| {
                // SAFETY: the operands are checked, and the level's instructions are available
                // (`compiled`). Each item is handed out once. Each worker number below `workers`,
                // and so each scratch, belongs to one `run_items` at a time. Number 0 is used again
                // only after the executor's calls have returned: the borrow in the closure ensures
                // this. A block's merge is handed out once, after every split of the block has been
                // stored and is visible to this thread (AcqRel in `finish`).
                unsafe { (compiled.run_item)(call, item, scratch) };
            };
            run_item(&item);
            if let Some(merge) = self.schedule.finish(&item) {
                run_item(&merge);
            }
        }
    }
}

/// The start of the workspace, shared by the workers.
struct Base(*mut u8);

// SAFETY: workers use disjoint parts of the workspace, or synchronize through the schedule's
// counters.
unsafe impl Sync for Base {}

impl Base {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

/// The kernel's compiled code, if this machine can run it.
fn compiled(kernel: Kernel) -> Option<&'static Compiled> {
    match kernel {
        Kernel::Cpu(level) if !level.is_available() => None,
        Kernel::Cpu(Level::Scalar) => Some(&compiled::scalar::COMPILED),
        #[cfg(target_arch = "aarch64")]
        Kernel::Cpu(Level::Neon) => Some(&compiled::neon::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::Cpu(Level::Avx2) => Some(&compiled::avx2::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::Cpu(Level::Avx512) => Some(&compiled::avx512::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::CpuBf16 if Level::Avx512.has(Bf16Products::Pairs) => {
            Some(&compiled::avx512_bf16::COMPILED)
        }
        #[cfg(target_arch = "x86_64")]
        Kernel::CpuAmx if Level::Avx512.has(Bf16Products::Tiles) => {
            Some(&compiled::avx512_bf16::COMPILED)
        }
        _ => None,
    }
}
