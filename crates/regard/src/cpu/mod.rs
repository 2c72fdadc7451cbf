//! The CPU backend: hands a plan's work items to threads.

mod address;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod compiled;
mod kernel;
mod level;
mod matrix;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pack;
mod pool;
mod process;
mod product;
mod scalar;
mod schedule;
mod softmax;
mod stream;
mod tile;
mod vector;
mod verify;

pub use level::{Bf16Products, Level, OVERRIDE};
pub use pool::Threads;

use crate::error::{Error, Refusal};
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::select::{Choice, Kernel};
use crate::split::Split;
use crate::state::LOG4_E;
use compiled::Compiled;
use kernel::{Call, Partials, Shape, Way, Written};
use schedule::Schedule;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads to run on: regard's ([`Threads`]), rayon's, or the caller's own.
pub trait Executor: Sync {
    /// Calls `work` from up to `copies` threads at once (this one may be among them) and returns when every call has returned.
    /// Fewer calls are fine: whatever they leave undone, the calling thread does afterwards.
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync));
}

/// Runs everything on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl Executor for Inline {
    fn run(&self, _copies: usize, work: &(dyn Fn() + Sync)) {
        work();
    }
}

/// Runs on the rayon pool that is current where it is used: the global one, or the one the caller is inside of.
#[cfg(feature = "rayon")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
impl Executor for Rayon {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        // `join` keeps its jobs on the stack: nothing is allocated.
        match copies {
            0 => {}
            1 => work(),
            _ => {
                let half = copies / 2;
                rayon::join(|| self.run(half, work), || self.run(copies - half, work));
            }
        }
    }
}

#[cfg(feature = "rayon")]
impl Executor for rayon::ThreadPool {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        self.install(|| Rayon.run(copies, work));
    }
}

/// [`Threads`]; where the caller is inside a rayon pool, that pool, whose threads then wait for work anyway.
pub(crate) struct DefaultExecutor;

impl Executor for DefaultExecutor {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        #[cfg(feature = "rayon")]
        if rayon::current_thread_index().is_some() {
            return Rayon.run(copies, work);
        }
        Threads.run(copies, work);
    }
}

/// Bytes of scratch that one worker needs.
pub(crate) fn scratch_bytes(problem: &Problem, choice: &Choice, split: &Split) -> usize {
    Shape::new(problem, choice, split).scratch_bytes()
}

/// Splits of the keys a worker where there are fewer items than workers. Each starts with keys that nobody has fetched ahead, and one worker joins
/// the partial states of all.
pub(crate) const FEW_ITEMS_A_WORKER: usize = 2;

/// The most query rows of a (sequence, key/value head) that memory sets the pace for.
pub(crate) const STREAM_ROWS: usize = stream::MAX_ROWS;

/// How an item of a sequence with so many rows a key/value head walks its keys.
pub(crate) fn way(choice: &Choice, rows: usize) -> Way {
    match rows {
        _ if rows <= choice.stream_rows => Way::Stream,
        _ if choice.kernel == Kernel::CpuAmx => Way::Matrix,
        0..=verify::MAX_ROWS => Way::Verify,
        _ => Way::Tile,
    }
}

/// Key/value heads that one work item takes, for so many rows a head.
pub(crate) fn heads_an_item(choice: &Choice, rows: usize, kv_heads: usize) -> usize {
    match way(choice, rows) {
        Way::Stream => stream::heads_an_item(rows, kv_heads),
        Way::Verify => verify::heads_an_item(rows, kv_heads, choice),
        Way::Tile | Way::Matrix => 1,
    }
}

/// Floats of one row's partial state.
pub(crate) fn partial_floats(problem: &Problem, choice: &Choice, split: &Split) -> usize {
    Shape::new(problem, choice, split).partial_floats()
}

/// Multiply-adds below which a second thread is not asked: some 15 us of one core. A thread that looks out for work comes within a
/// microsecond; waking one that sleeps takes the caller a few, and the thread some 15.
const LEAST_SHARED_WORK: u64 = 700_000;

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
    let problem = Problem::of(inputs, outputs)?;
    plan.problem().covers(&problem)?;
    let Some(layout) = plan.workspace() else { return Err(plan.not_for("the CPU")) };
    let Some(compiled) = compiled(plan.choice().kernel) else {
        let kernel = plan.choice().kernel.name();
        let reason = format!("this {} CPU lacks the instructions of {kernel}", std::env::consts::ARCH);
        return Err(Refusal { machine: plan.machine().to_string(), reason }.into());
    };
    if workspace.len() < plan.workspace_bytes() {
        let allowed = format!("at least {} bytes, as planned", plan.workspace_bytes());
        return Err(Error::argument("workspace", format!("{} bytes long", workspace.len()), allowed));
    }
    // References cannot share memory, but operands from raw addresses can.
    outputs.check_workspace(inputs, workspace.as_ptr() as usize, workspace.len())?;
    if problem.rows() == 0 {
        // However many sequences there are, they have nothing to write.
        return Ok(());
    }
    let base = Base(workspace.as_mut_ptr());
    let base = Base(base.0.wrapping_add(base.0.align_offset(crate::plan::ALIGNMENT)));
    // SAFETY: the workspace is long enough, alignment included, and borrowed for as long as the schedule lives; nothing below uses its
    // bookkeeping parts but the schedule. The operands are checked and covered.
    let schedule = unsafe { Schedule::new(plan, inputs, problem.clone(), base.0) };
    let scale = f64::from(inputs.scale());
    let softcap = inputs.attention.softcap;
    let call = Call {
        inputs,
        plan,
        schedule: &schedule,
        compiled,
        shape: Shape::new(&problem, plan.choice(), plan.split()),
        out: Written { data: outputs.out.as_mut_ptr(), dims: *outputs.out },
        lse: outputs.lse.as_mut().map(|lse| Written { data: lse.as_mut_ptr(), dims: **lse }),
        partials: Partials {
            data: base.at(layout.partials).cast(),
            splits: plan.split().count,
            rows: problem.query_len * problem.group(),
        },
        score_factor: softcap.map_or(scale * f64::from(LOG4_E), |cap| scale / f64::from(cap)) as f32,
        softcap: softcap.map(|cap| cap * LOG4_E),
        problem,
    };
    // The CPUs with AMX multiply floats faster than pairs of bf16, and streams do not use it.
    let floats = (plan.choice().kernel == Kernel::CpuAmx).then(|| self::compiled(Kernel::Cpu(Level::Avx512)));
    let streams = floats.flatten().map(|compiled| Call { compiled, ..call.clone() });
    let work = |worker: usize| {
        let scratch = base.at(layout.scratch + worker * layout.scratch_bytes);
        while let Some(item) = schedule.next() {
            let call = match &streams {
                Some(streams) if item.way == Way::Stream => streams,
                _ => &call,
            };
            // SAFETY: the operands are checked, the level's instructions are here (`compiled`), each item is handed out once, and each
            // worker number below `workers`, so each scratch, belongs to one call of `work`: number 0 is used again after the
            // executor's calls have returned, which the borrow of this closure makes sure of.
            unsafe { (call.compiled.run_item)(call, &item, scratch) };
            if let Some(merge) = schedule.finish(&item) {
                // SAFETY: as above; every split of the block has been stored and is visible to this thread (AcqRel in `finish`), and a
                // block's merge is handed out once.
                unsafe { (call.compiled.run_item)(call, &merge, scratch) };
            }
        }
    };
    let workers = plan.workers().min(schedule.items());
    if workers > 1 && schedule.work() >= LEAST_SHARED_WORK {
        let number = AtomicUsize::new(0);
        executor.run(workers, &|| {
            let worker = number.fetch_add(1, Ordering::Relaxed);
            if worker < workers {
                work(worker);
            }
        });
    }
    // Everything, or what the executor left undone; its calls have returned, so worker 0's scratch is free.
    work(0);
    Ok(())
}

/// The start of the workspace, shared by the workers.
struct Base(*mut u8);

// SAFETY: workers use disjoint parts of the workspace, or synchronise over the schedule's counters.
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
        Kernel::Cpu(Level::Scalar) => Some(&scalar::COMPILED),
        #[cfg(target_arch = "aarch64")]
        Kernel::Cpu(Level::Neon) => Some(&neon::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::Cpu(Level::Avx2) => Some(&avx2::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::Cpu(Level::Avx512) => Some(&avx512::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::CpuBf16 if Level::Avx512.has(Bf16Products::Pairs) => Some(&avx512_bf16::COMPILED),
        #[cfg(target_arch = "x86_64")]
        Kernel::CpuAmx if Level::Avx512.has(Bf16Products::Tiles) => Some(&avx512_bf16::COMPILED),
        _ => None,
    }
}
