//! The calls of a rank with their plans, and the partial results that they leave.

use super::layout::Extent;
use super::schedule::{Call, Ring, Step};
use crate::device::Device;
use regard::{Error, KeyLayout, Plan, Problem, QueryStorage, Variant};
use std::ops::Range;

/// The calls that a rank runs, and their plans.
#[derive(Debug)]
pub(super) struct Planned {
    /// Steps up to the last one that any rank computes in.
    pub steps: Vec<PlannedStep>,
    /// The plans of all calls, each once.
    pub plans: Vec<Plan>,
    /// The partial results.
    pub groups: Vec<Group>,
    /// Whether one call computes all rows, and no keys pass around.
    pub direct: bool,
    /// The tables of all calls.
    pub tables: Vec<i32>,
}

/// A step of the ring.
#[derive(Debug)]
pub(super) struct PlannedStep {
    /// The rank whose keys are here.
    pub source: usize,
    /// The attention calls over these keys.
    pub calls: Vec<PlannedCall>,
}

/// A call with its plan.
#[derive(Debug)]
pub(super) struct PlannedCall {
    /// The call.
    pub call: Call,
    /// The places of its rows and keys.
    pub extent: Extent,
    /// The number of the plan that it runs.
    pub plan: usize,
    /// The number of the group that its part belongs to.
    pub group: usize,
    /// The start of its tables among the tables of all calls.
    pub tables: usize,
}

/// Rows that have the same number of partial results.
#[derive(Debug)]
pub(super) struct Group {
    /// Rows of the rank, of all batch entries.
    pub rows: Range<usize>,
    /// Partial results of each.
    pub parts: usize,
    /// Rows in the parts of groups before it.
    pub first: usize,
    /// Whether each row has all of them.
    pub complete: bool,
}

impl Planned {
    /// Plans the calls of a rank, and loads their kernels.
    pub fn new<D: Device>(
        device: &D,
        problem: &Problem,
        ring: &Ring,
        rank: usize,
    ) -> Result<Planned, Error> {
        let steps = ring.schedule(rank);
        let all_rows = |call| ring.extent(rank, rank, call).rows.len() == ring.row_count(rank);
        let direct = match &steps[..] {
            [Step { calls, .. }] => calls.len() == 1 && all_rows(&calls[0]),
            _ => false,
        };
        let groups = groups(ring, rank, &steps);
        let mut planned =
            Planned { steps: Vec::new(), plans: Vec::new(), groups, direct, tables: Vec::new() };
        for Step { source, calls } in steps {
            let calls = calls.into_iter().map(|call| {
                let extent = ring.extent(rank, source, &call);
                planned.call(device, problem, ring, (call, extent))
            });
            let calls = calls.collect::<Result<_, Error>>()?;
            planned.steps.push(PlannedStep { source, calls });
        }
        Ok(planned)
    }

    /// Rows in the parts of all groups.
    pub fn part_rows(&self) -> usize {
        let rows = |group: &Group| group.parts * group.rows.len();
        if self.direct { 0 } else { self.groups.iter().map(rows).sum() }
    }

    /// Plans a call, unless it is like one before.
    fn call<D: Device>(
        &mut self,
        device: &D,
        problem: &Problem,
        ring: &Ring,
        (call, extent): (Call, Extent),
    ) -> Result<PlannedCall, Error> {
        let ragged = ring.entries.is_none();
        let total = extent.rows.len();
        let planned = Problem {
            batch: ring.batch(),
            query_len: extent.query_len,
            kv_len: extent.kv_len,
            queries: if ragged { QueryStorage::Ragged { total } } else { problem.queries },
            out_dtype: if self.direct { problem.out_dtype } else { problem.dtype },
            lse: problem.lse || !self.direct,
            variant: Variant {
                causal: call.causal,
                sinks: call.sinks && problem.variant.sinks,
                key_positions: call.positions.then_some(KeyLayout::Contiguous),
                ..problem.variant
            },
            ..problem.clone()
        };
        let known = self.plans.iter().position(|plan| *plan.problem() == planned);
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = Plan::new(&planned, device.machine())?;
                device.load(&plan)?;
                self.plans.push(plan);
                self.plans.len() - 1
            }
        };
        let tables = self.tables.len();
        self.tables.extend(&extent.tables);
        let group = if ragged { call.rows.start } else { 0 };
        Ok(PlannedCall { call, extent, plan, group, tables })
    }
}

/// The groups of a rank's rows: all rows of a batch, or the early and the late rows of ragged
/// sequences.
fn groups(ring: &Ring, rank: usize, steps: &[Step]) -> Vec<Group> {
    let calls = || steps.iter().flat_map(|step| &step.calls);
    let (early, all) = (ring.chunk_rows(rank, 0), ring.row_count(rank));
    let chunks_and_rows = match ring.entries {
        Some(entries) => vec![(0..2, 0..entries * all)],
        None => vec![(0..1, 0..early), (1..2, early..all)],
    };
    let mut first = 0;
    let groups = chunks_and_rows.into_iter().map(|(chunks, rows)| {
        let here = || calls().filter(|call| chunks.contains(&call.rows.start));
        let parts = here().map(|call| call.part + 1).max().unwrap_or(0);
        let chunk_rows = |call: &Call| -> usize {
            call.rows.clone().map(|chunk| ring.chunk_rows(rank, chunk)).sum()
        };
        let written = here().map(chunk_rows).sum::<usize>() * ring.entries.unwrap_or(1);
        let group = Group { parts, first, complete: written == parts * rows.len(), rows };
        first += parts * group.rows.len();
        group
    });
    groups.collect()
}
