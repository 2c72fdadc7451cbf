//! A plan: everything decided before the first byte of input is read. Each backend adds its part
//! ([`BackendPlan`]).

use crate::error::{Error, Refusal};
use crate::machine::Machine;
use crate::problem::Problem;
use crate::select::Choice;
use crate::split::Split;
use std::any::Any;
use std::fmt::{Debug, Write};
use std::sync::Arc;

/// The execution of a [`Problem`] on a [`Machine`]: the kernel, the split, and the size of the
/// workspace. Made once, run many times.
#[derive(Debug, Clone)]
pub struct Plan {
    problem: Problem,
    machine: Machine,
    choice: Choice,
    split: Split,
    backend: Arc<dyn BackendPlan>,
}

/// The decisions of a backend for a problem.
#[derive(Debug)]
pub(crate) struct Selection<B> {
    /// The kernel and its tile.
    pub choice: Choice,
    /// The split of the keys.
    pub split: Split,
    /// The backend's part of the plan.
    pub backend: B,
}

/// The backend's part of a plan.
pub(crate) trait BackendPlan: Any + Debug + Send + Sync {
    /// Threads that take part, at most; on a GPU, thread blocks (threadgroups).
    fn workers(&self) -> usize;

    /// Bytes of workspace.
    fn workspace_bytes(&self) -> usize;

    /// Its lines of [`Plan::explain`].
    fn explain(&self, problem: &Problem) -> Vec<Line>;
}

/// A line of [`Plan::explain`].
#[derive(Debug)]
pub(crate) struct Line {
    label: &'static str,
    text: String,
}

impl Line {
    pub fn new(label: &'static str, text: impl Into<String>) -> Line {
        Line { label, text: text.into() }
    }
}

impl PartialEq for Plan {
    /// Planning is a pure function of problem and machine.
    fn eq(&self, other: &Plan) -> bool {
        self.problem == other.problem && self.machine == other.machine
    }
}

impl Eq for Plan {}

impl Plan {
    /// A plan of a backend's decisions.
    ///
    /// # Errors
    /// If its workspace is larger than memory can be.
    pub(crate) fn from_selection<B: BackendPlan>(
        problem: &Problem,
        machine: &Machine,
        selection: Selection<B>,
    ) -> Result<Plan, Error> {
        let Selection { choice, split, backend } = selection;
        let limit = isize::MAX as usize / 2;
        if backend.workspace_bytes() > limit {
            return Err(Error::argument(
                "problem",
                format!("{problem:?}"),
                format!("a workspace below {limit} bytes"),
            ));
        }
        Ok(Plan {
            problem: problem.clone(),
            machine: machine.clone(),
            choice,
            split,
            backend: Arc::new(backend),
        })
    }

    /// The problem that was planned for.
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

    /// The split of the keys.
    pub fn split(&self) -> &Split {
        &self.split
    }

    /// Threads that take part, at most; on a GPU, thread blocks (threadgroups).
    pub fn workers(&self) -> usize {
        self.backend.workers()
    }

    /// Bytes of workspace that running the plan needs; on the CPU, at any alignment.
    pub fn workspace_bytes(&self) -> usize {
        self.backend.workspace_bytes()
    }

    /// The backend's part, if the plan is for a backend whose parts are of that type.
    pub(crate) fn backend<T: BackendPlan>(&self) -> Option<&T> {
        let backend: &dyn Any = &*self.backend;
        backend.downcast_ref()
    }

    /// The refusal of a backend that the plan is not for.
    pub(crate) fn not_for(&self, backend: &str) -> Error {
        let reason = format!("the plan is for that machine, not for {backend}");
        Refusal { machine: self.machine.to_string(), reason }.into()
    }

    /// The kernel, its settings and their reasons, in a few lines of plain text.
    pub fn explain(&self) -> String {
        let Plan { problem, choice, split, .. } = self;
        let tile =
            format!("{} rows x {} keys: {}", choice.block_rows, choice.tile_keys, choice.reason);
        let mut lines = vec![
            Line::new("problem", problem.description()),
            Line::new("machine", self.machine.to_string()),
            Line::new("kernel", choice.kernel.name()),
            Line::new("tile", tile),
        ];
        lines.extend(self.backend.explain(problem));
        lines.extend([
            Line::new("split", split.reason.clone()),
            Line::new("workers", self.workers().to_string()),
            Line::new("workspace", format!("{} bytes", self.workspace_bytes())),
        ]);
        let mut text = String::new();
        for Line { label, text: value } in lines {
            writeln!(text, "{label:<10} {value}").expect("writing to a String cannot fail");
        }
        text
    }
}
