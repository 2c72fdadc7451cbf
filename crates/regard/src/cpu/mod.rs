//! The CPU backend: hands a plan's work items to threads.

mod level;

pub use level::{Level, OVERRIDE};

use crate::error::Error;
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::select::Choice;
use crate::split::Split;

/// Threads to run on: rayon's, or the caller's own.
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

#[cfg(feature = "rayon")]
pub(crate) fn default_executor() -> impl Executor {
    Rayon
}

#[cfg(not(feature = "rayon"))]
pub(crate) fn default_executor() -> impl Executor {
    Inline
}

/// Bytes of scratch that one worker needs.
pub(crate) fn scratch_bytes(_problem: &Problem, _choice: &Choice, _split: &Split) -> usize {
    0
}

/// [`Plan::run`] on an executor of the caller's choice.
///
/// # Errors
/// As [`Plan::run`].
pub fn run(
    _plan: &Plan,
    _inputs: &Inputs,
    _outputs: &mut Outputs,
    _workspace: &mut [u8],
    _executor: &dyn Executor,
) -> Result<(), Error> {
    Err(Error::argument("plan", "not implemented yet", "nothing yet"))
}
