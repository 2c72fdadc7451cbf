//! Runs of plans, and the work that is done once for all layers of a step.

use crate::convert::{self, bad};
use crate::device::{self, Runner};
#[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
use crate::metal;
use crate::status::{self, Failure};
use crate::types::{Operands, REGARD_PREPARED_SCHEDULE, REGARD_PREPARED_TILE_MAP, Status, TileMap};
use crate::{Plan, expect_no_stream, expect_plan, not_here};
use regard::Host;
use std::ffi::c_void;

/// A workspace of the caller's.
#[derive(Clone, Copy)]
pub struct Memory {
    /// Its address; on Metal an `id<MTLBuffer>`.
    pub data: *mut c_void,
    pub bytes: usize,
}

impl Memory {
    /// In device memory.
    #[cfg(feature = "cuda")]
    fn on_cuda(self) -> regard::cuda::RawWorkspace {
        regard::cuda::RawWorkspace { address: self.data as u64, bytes: self.bytes }
    }

    /// In a buffer.
    #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
    fn on_metal(self) -> metal::Workspace {
        metal::Workspace { buffer: self.data, bytes: self.bytes }
    }
}

/// Runs a plan on operands, with the prepared parts of the workspace: bits of
/// `REGARD_PREPARED_SCHEDULE` and `REGARD_PREPARED_TILE_MAP`.
///
/// # Safety
/// As [`regard_plan_run`](crate::regard_plan_run), or [`regard_plan_run_prepared`].
pub unsafe fn run(
    Plan { plan, runner, .. }: &Plan,
    operands: *const Operands,
    memory: Memory,
    stream: *mut c_void,
    prepared: u32,
) -> Result<(), Failure> {
    let known = REGARD_PREPARED_SCHEDULE | REGARD_PREPARED_TILE_MAP;
    if prepared & !known != 0 {
        let allowed = "REGARD_PREPARED_SCHEDULE (1), REGARD_PREPARED_TILE_MAP (2), or both";
        return Err(bad("prepared", format!("{prepared:#x}"), allowed));
    }
    let mapped = prepared & REGARD_PREPARED_TILE_MAP != 0;
    // SAFETY: the caller's promise.
    unsafe {
        let operands = convert::read("operands", operands)?;
        match runner {
            Runner::Cpu(executor) => {
                expect_no_stream(stream)?;
                let (inputs, mut outputs) = convert::operands(&operands)?;
                let workspace =
                    convert::workspace(memory.data, memory.bytes, plan.workspace_bytes())?;
                let executor = executor.as_ref();
                device::run_on_cpu(plan, executor, &inputs, &mut outputs, workspace, mapped)?;
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => {
                let (inputs, mut outputs) = convert::operands(&operands)?;
                let prepared = regard::cuda::Prepared {
                    schedule: prepared & REGARD_PREPARED_SCHEDULE != 0,
                    tile_map: mapped,
                };
                let (stream, workspace) = (stream.cast(), memory.on_cuda());
                gpu.run_prepared(plan, stream, &inputs, &mut outputs, workspace, prepared)?;
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => {
                let (inputs, mut outputs) = convert::operands(&operands)?;
                metal::run(gpu, plan, stream, (&inputs, &mut outputs), &memory.on_metal(), mapped)?;
            }
            Runner::Absent => return Err(not_here(plan)),
        }
        Ok(())
    }
}

/// Computes the schedule of a step: the division of decode's work on a GPU, and the sequences that
/// share prefixes. All layers of a step have the same lengths, so one call serves all of them:
/// `regard_plan_run_scheduled` reads it from the workspace. Of the operands, only shapes, lengths,
/// offsets and prefix groups are read. Work on `stream` as `regard_plan_run`; a captured graph can
/// have both. On the CPU and on Metal this does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_schedule(
    plan: *const Plan,
    operands: *const Operands,
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] workspace: *mut c_void,
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let Plan { plan, runner, .. } = expect_plan(plan)?;
        let operands = convert::read("operands", operands)?;
        match runner {
            Runner::Cpu(_) => {
                expect_no_stream(stream)?;
                convert::operands::<Host>(&operands)?;
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(_) => {}
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                let memory = Memory { data: workspace, bytes: workspace_bytes };
                gpu.schedule(plan, stream.cast(), &inputs, &outputs, memory.on_cuda())?;
            }
            Runner::Absent => return Err(not_here(plan)),
        }
        Ok(())
    })
}

/// `regard_plan_run` with the schedule that `regard_plan_schedule` has left in the workspace; the
/// same bits. The call of `regard_plan_schedule` came before this one, on the same stream or in
/// order with it, with the same plan and workspace, and operands of the same shapes, options,
/// lengths, offsets and prefix groups. Since then nothing else has used the workspace but runs with
/// that schedule, and nothing has written lengths, offsets, block tables or prefix groups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_run_scheduled(
    plan: *const Plan,
    operands: *const Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    let memory = Memory { data: workspace, bytes: workspace_bytes };
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        run(expect_plan(plan)?, operands, memory, stream, REGARD_PREPARED_SCHEDULE)
    })
}

/// Makes the tile map of the mask in the workspace: which tiles of rows and keys the mask hides or
/// leaves unchanged. Layers that share a mask make it once, and read it with
/// `regard_plan_run_mapped`. Of the operands, only shapes and the mask are read. Work on `stream`
/// as `regard_plan_run`; a captured graph can have both. If no map is used
/// (`regard_plan_tile_map`), this does nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_map_mask(
    plan: *const Plan,
    operands: *const Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    let memory = Memory { data: workspace, bytes: workspace_bytes };
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let Plan { plan, runner, .. } = expect_plan(plan)?;
        let operands = convert::read("operands", operands)?;
        match runner {
            Runner::Cpu(executor) => {
                expect_no_stream(stream)?;
                let (inputs, outputs) = convert::operands(&operands)?;
                let workspace =
                    convert::workspace(memory.data, memory.bytes, plan.workspace_bytes())?;
                device::map_on_cpu(plan, executor.as_ref(), &inputs, &outputs, workspace)?;
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(gpu) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                gpu.map_mask(plan, stream.cast(), &inputs, &outputs, memory.on_cuda())?;
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(gpu) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                metal::map_mask(gpu, plan, stream, (&inputs, &outputs), &memory.on_metal())?;
            }
            Runner::Absent => return Err(not_here(plan)),
        }
        Ok(())
    })
}

/// `regard_plan_run` with the tile map in the workspace. `regard_plan_map_mask` has made it, on the
/// same stream or in order with this call, with the same plan, mask, and operands of the same
/// shapes. Or the caller has written it as `regard_plan_tile_map` describes. With the same map, the
/// same bits. Runs leave a map as it is. With the map of another mask, results are meaningless.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_run_mapped(
    plan: *const Plan,
    operands: *const Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    let memory = Memory { data: workspace, bytes: workspace_bytes };
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        run(expect_plan(plan)?, operands, memory, stream, REGARD_PREPARED_TILE_MAP)
    })
}

/// `regard_plan_run` with the prepared parts of the workspace: `prepared` is
/// `REGARD_PREPARED_SCHEDULE` (as `regard_plan_run_scheduled`), `REGARD_PREPARED_TILE_MAP` (as
/// `regard_plan_run_mapped`), both, or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_run_prepared(
    plan: *const Plan,
    operands: *const Operands,
    workspace: *mut c_void,
    workspace_bytes: usize,
    stream: *mut c_void,
    prepared: u32,
) -> Status {
    let memory = Memory { data: workspace, bytes: workspace_bytes };
    // SAFETY: the caller's promise.
    status::status(|| unsafe { run(expect_plan(plan)?, operands, memory, stream, prepared) })
}

/// Writes to `map` the place of the tile map that `regard_plan_run_mapped` reads with these
/// operands, for a caller that writes the map. A map of 0 bytes means that none is used: there is
/// no mask, kernels for few rows run, or the map would be larger than planned. On CUDA the strides,
/// the alignment and the scale of the operands choose between two kernels, whose maps may differ:
/// ask for each kind of layer. `map->size` must be set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn regard_plan_tile_map(
    plan: *const Plan,
    operands: *const Operands,
    map: *mut TileMap,
) -> Status {
    let found = |map: Option<regard::cpu::TileMap>| match map {
        None => TileMap { size: size_of::<TileMap>(), ..TileMap::default() },
        Some(map) => TileMap {
            size: size_of::<TileMap>(),
            at: map.at,
            bytes: map.bytes(),
            batch: map.batch as i64,
            heads: map.heads as i64,
            row_blocks: map.row_blocks as i64,
            key_tiles: map.key_tiles as i64,
            block_rows: map.block_rows as i64,
            tile_keys: map.tile_keys as i64,
        },
    };
    // SAFETY: the caller's promise.
    status::status(|| unsafe {
        let Plan { plan, runner, .. } = expect_plan(plan)?;
        let operands = convert::read("operands", operands)?;
        let map_found = match runner {
            Runner::Cpu(_) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                found(regard::cpu::tile_map(plan, &inputs, &outputs)?)
            }
            #[cfg(feature = "cuda")]
            Runner::Cuda(_) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                found(regard::cuda::tile_map(plan, &inputs, &outputs)?)
            }
            #[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
            Runner::Metal(_) => {
                let (inputs, outputs) = convert::operands(&operands)?;
                found(regard::metal::tile_map(plan, &inputs, &outputs)?)
            }
            Runner::Absent => return Err(not_here(plan)),
        };
        convert::write("map", map, &map_found)
    })
}
