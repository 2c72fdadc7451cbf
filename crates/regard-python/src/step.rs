//! Shared by the layers of a step: its schedule, and the tile map of a mask.

use crate::device::{self, Allocation, lock};
use crate::errors::{Fault, argument};
use regard::cpu::{self, Executor, TileMap};
use regard::cuda::{DeviceMemory, Prepared, RawWorkspace};
use regard::{Error, Inputs, Memory, Outputs, Plan, Problem};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;

/// Results that are computed once per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Division of decode's work.
    Schedule,
    /// Tiles that a mask hides or leaves unchanged.
    TileMap,
}

/// Shared by a plan's layers. Runs of other plans, and those that read nothing of it, have other
/// workspaces, so they do not overwrite it.
#[derive(Default)]
pub struct Step {
    /// On a GPU, by stream: the plan is for one device.
    streams: Mutex<HashMap<u64, Own>>,
    /// On the CPU: a tile map, which runs copy into the workspace that they take.
    host: Mutex<Option<(TileMap, Vec<u8>)>>,
}

/// A workspace of a plan's own, and for which shapes it has what.
struct Own {
    allocation: Allocation,
    bytes: usize,
    schedule: Option<Problem>,
    /// With the shape of the mask, of which a problem knows only that there is one.
    tile_map: Option<(Problem, Vec<usize>)>,
}

impl Own {
    fn new(ordinal: i32, plan: &Plan) -> Result<Own, Fault> {
        let bytes = plan.workspace_bytes();
        let allocation = Allocation::workspace(ordinal, bytes)?;
        Ok(Own { allocation, bytes, schedule: None, tile_map: None })
    }

    fn raw(&self) -> RawWorkspace {
        RawWorkspace { address: self.allocation.address(), bytes: self.bytes }
    }

    /// An error unless it has what the run is to read.
    fn expect(&self, prepared: Prepared, posed: &Posed) -> Result<(), Fault> {
        let (problem, mask) = posed;
        if prepared.schedule {
            let same = self.schedule.as_ref().map(|known| known == problem);
            expect("scheduled", "schedule", same)?;
        }
        if prepared.tile_map {
            let same = self.tile_map.as_ref().map(|known| (&known.0, &known.1) == (problem, mask));
            expect("mapped", "map_mask", same)?;
        }
        Ok(())
    }
}

/// Shapes of operands: the problem, whether or not a run writes the log-sum-exp, and the mask's.
type Posed = (Problem, Vec<usize>);

fn posed<M: Memory>(inputs: &Inputs<M>, outputs: &Outputs<M>) -> Result<Posed, Error> {
    let problem = Problem { lse: false, ..Problem::from_operands(inputs, outputs)? };
    let mask = inputs.attention.mask.as_ref().map_or(Vec::new(), |mask| mask.shape().to_vec());
    Ok((problem, mask))
}

/// An error unless what a run is to read is there (`Some`), for the same shapes (`true`).
fn expect(name: &str, method: &str, same: Option<bool>) -> Result<(), Fault> {
    match same {
        Some(true) => Ok(()),
        Some(false) => {
            let allowed = format!("operands of the shapes that {method} was given");
            Err(argument(name, "True, with operands of other shapes", allowed))
        }
        None => {
            let allowed = format!("False, before {method} of this plan on this stream");
            Err(argument(name, "True", allowed))
        }
    }
}

impl Step {
    /// Computes what is shared on the CPU: nothing, or the map, in a workspace that is lent for it.
    ///
    /// # Errors
    /// As a run.
    pub fn share_on_host(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &Outputs,
        workspace: &mut [u8],
        executor: &dyn Executor,
        shared: Shared,
    ) -> Result<(), Error> {
        let map = cpu::tile_map(plan, inputs, outputs)?;
        if shared == Shared::Schedule {
            return Ok(());
        }
        cpu::map_mask(plan, inputs, outputs, workspace, executor)?;
        let kinds = map.map(|map| (map, workspace[map.at..map.at + map.bytes()].to_vec()));
        *lock(&self.host) = kinds;
        Ok(())
    }

    /// Copies the map into the workspace of a run on the CPU.
    ///
    /// # Errors
    /// If there is none, or one of another shape.
    pub fn expect_map(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &Outputs,
        workspace: &mut [u8],
    ) -> Result<(), Error> {
        // If no map is used, none is missing.
        let Some(wanted) = cpu::tile_map(plan, inputs, outputs)? else { return Ok(()) };
        let host = lock(&self.host);
        let same = host.as_ref().map(|(map, _)| *map == wanted);
        expect("mapped", "map_mask", same).map_err(|Fault(error)| error)?;
        if let Some((map, kinds)) = &*host {
            workspace[map.at..map.at + map.bytes()].copy_from_slice(kinds);
        }
        Ok(())
    }

    /// Queues what computes it on a GPU and stream, in the plan's own workspace there.
    ///
    /// # Errors
    /// As a run, or if the GPU has too little memory.
    pub fn share_on_gpu(
        &self,
        plan: &Plan,
        inputs: &Inputs<DeviceMemory>,
        outputs: &Outputs<DeviceMemory>,
        (ordinal, stream): (i32, u64),
        shared: Shared,
    ) -> Result<(), Fault> {
        let gpu = device::gpu(ordinal)?;
        let (problem, mask) = posed(inputs, outputs)?;
        device::beside_captures(|| {
            let mut streams = lock(&self.streams);
            let own = match streams.entry(stream) {
                Entry::Occupied(own) => own.into_mut(),
                Entry::Vacant(place) => place.insert(Own::new(ordinal, plan)?),
            };
            let raw = device::handle(stream);
            // SAFETY: the stream is of this GPU (`framework::stream`). The workspace is for this
            // plan and stream alone, and its counters are zero between runs.
            unsafe {
                match shared {
                    Shared::Schedule => {
                        own.schedule = None;
                        gpu.schedule(plan, raw, inputs, outputs, own.raw())?;
                        own.schedule = Some(problem);
                    }
                    Shared::TileMap => {
                        own.tile_map = None;
                        gpu.map_mask(plan, raw, inputs, outputs, own.raw())?;
                        own.tile_map = Some((problem, mask));
                    }
                }
            }
            Ok(())
        })
    }

    /// Queues a run that reads it.
    ///
    /// # Errors
    /// As a run, or if it is not there for these shapes.
    pub fn run_on_gpu(
        &self,
        plan: &Plan,
        inputs: &Inputs<DeviceMemory>,
        outputs: &mut Outputs<DeviceMemory>,
        (ordinal, stream): (i32, u64),
        prepared: Prepared,
    ) -> Result<(), Fault> {
        let gpu = device::gpu(ordinal)?;
        let posed = posed(inputs, outputs)?;
        device::beside_captures(|| {
            // Held while launches are queued, so that those of two runs do not mix.
            let streams = lock(&self.streams);
            let Some(own) = streams.get(&stream) else {
                let (name, method) = match prepared.schedule {
                    true => ("scheduled", "schedule"),
                    false => ("mapped", "map_mask"),
                };
                return expect(name, method, None);
            };
            own.expect(prepared, &posed)?;
            let stream = device::handle(stream);
            // SAFETY: as above. The schedule is of these shapes; that lengths are the same is the
            // caller's promise.
            unsafe { gpu.run_prepared(plan, stream, inputs, outputs, own.raw(), prepared)? };
            Ok(())
        })
    }
}
