//! What the launches of a plan say about themselves.

use super::{Launch, Launches};
use crate::plan::{BackendPlan, Line};
use crate::problem::Problem;

impl BackendPlan for Launches {
    fn workers(&self) -> usize {
        self.blocks()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, _problem: &Problem) -> Vec<Line> {
        let line = |launch: Launch| {
            let Launch { module, entry, grid, threads, shared_bytes } = launch;
            let shape = format!("{grid:?} blocks of {threads} threads");
            let text = format!(
                "{entry} of {module}: {shape}, {shared_bytes} bytes of shared memory per block"
            );
            Line::new("launch", text)
        };
        self.in_order().map(line).collect()
    }
}
