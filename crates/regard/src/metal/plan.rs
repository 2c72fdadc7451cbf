//! Plans for Apple GPUs.

use super::Launch;
use super::select::select;
use crate::error::Error;
use crate::machine::{Machine, MetalFacts};
use crate::plan::{BackendPlan, Line, Plan};
use crate::problem::Problem;

/// Plans a problem that was checked.
///
/// # Errors
/// The reason why nothing runs it there.
pub(crate) fn plan(
    problem: &Problem,
    facts: &MetalFacts,
    machine: &Machine,
) -> Result<Plan, Error> {
    Plan::from_selection(problem, machine, select(problem, facts, machine)?)
}

impl BackendPlan for Launch {
    fn workers(&self) -> usize {
        self.grid.iter().map(|&n| n as usize).product()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, problem: &Problem) -> Vec<Line> {
        let combine = self.combine.map_or(String::new(), |combine| format!("; then {combine}"));
        let map = if self.map.is_some() { "the tile map of the mask; then " } else { "" };
        let text = format!(
            "{map}{:?} threadgroups of {} SIMD groups, {} bytes of threadgroup memory \
             each{combine}",
            self.grid, self.simd_groups, self.threadgroup_bytes
        );
        let groups = (problem.prefix_groups > 0).then(|| {
            Line::new("prefixes", "groups are not used: each sequence reads all its keys")
        });
        [Some(Line::new("launch", text)), groups].into_iter().flatten().collect()
    }
}
