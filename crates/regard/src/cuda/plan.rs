//! Plans for NVIDIA GPUs.

use super::select::select;
use super::{Launch, Launches};
use crate::error::Error;
use crate::machine::{CudaFacts, Machine};
use crate::plan::{BackendPlan, Line, Plan};
use crate::problem::Problem;

/// Plans a problem that was checked.
///
/// # Errors
/// The reason why nothing runs it there.
pub(crate) fn plan(problem: &Problem, facts: &CudaFacts, machine: &Machine) -> Result<Plan, Error> {
    Plan::from_selection(problem, machine, select(problem, facts, machine)?)
}

impl BackendPlan for Launches {
    fn workers(&self) -> usize {
        self.ctas()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, _problem: &Problem) -> Vec<Line> {
        let line = |launch: Launch| {
            let Launch { module, entry, grid, threads, shared_bytes, starts_late } = launch;
            let shape = format!("{grid:?} CTAs of {threads} threads");
            let when = if starts_late { ", when the kernel in front has ended" } else { "" };
            let text = format!(
                "{entry} of {module}: {shape}, {shared_bytes} bytes of shared memory per CTA{when}"
            );
            Line::new("launch", text)
        };
        self.in_order().map(line).collect()
    }
}
