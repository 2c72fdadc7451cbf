//! What the launch of a plan says about itself.

use super::Launch;
use crate::plan::{BackendPlan, Line};
use crate::problem::Problem;

impl BackendPlan for Launch {
    fn workers(&self) -> usize {
        self.grid.iter().map(|&n| n as usize).product()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn explain(&self, _problem: &Problem) -> Vec<Line> {
        let merge = self.merge.map_or(String::new(), |merge| format!("; then {merge}"));
        let text = format!(
            "{:?} threadgroups of {} SIMD groups, {} bytes of threadgroup memory each{merge}",
            self.grid, self.simd_groups, self.threadgroup_bytes
        );
        vec![Line::new("launch", text)]
    }
}
