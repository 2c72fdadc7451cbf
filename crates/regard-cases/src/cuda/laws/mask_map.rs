//! The tile map of a mask: made once for several layers, or written by the caller, it changes no
//! bits.

use super::{Broken, expect};
use crate::check::Checker;
use crate::cuda::{MirrorMut, Runner, Uploaded, Workspace};
use crate::rows::bits;
use crate::{Array, Case, Hide, Keys, MaskSpec, MemorySpec, OperandMemory, Output, Spec};
use regard::cuda::cudarc::driver::{CudaStream, result};
use regard::cuda::{DeviceMemory, Gpu, Prepared, RawWorkspace, TileMap, driver_error, tile_map};
use regard::{DType, Error, Inputs, Outputs, Plan};
use std::sync::Arc;

/// Runs that read one map, as the layers of a step do.
const LAYERS: usize = 2;

/// Rows that the oracle judges per case: judging one takes longer than computing it.
const JUDGED_ROWS: usize = 64;

/// Tile kinds as [`TileMap`] lists them.
const EMPTY: u8 = 0;
const FULL: u8 = 1;
const MIXED: u8 = 2;

/// The origin of a run's tile map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Map {
    /// Every run makes it.
    Plain,
    /// `map_mask` makes it, once.
    Made,
    /// `map_mask` makes it, of operands for the plan's other kernel if there are two.
    MadeForOthers,
    /// The caller writes it.
    Given,
    /// The caller says nothing of any tile. It is as right, but bits may differ: scores that no
    /// mask changes take a shorter path.
    Unknown,
}

/// The results of a run of a case on the GPU.
struct Mapped {
    output: Output,
    /// The map that its operands have.
    map: Option<TileMap>,
    /// Whether the operands of [`Map::MadeForOthers`] have another.
    others_differ: bool,
}

/// The map by its definition.
fn expected(map: &TileMap, mask: &Array) -> Result<Vec<u8>, Error> {
    let [batch, heads, rows, keys] = mask.shape()[..] else { panic!("masks have four dimensions") };
    assert_eq!((map.batch, map.heads), (batch, heads), "the mask's own");
    let (numbers, boolean) = (mask.numbers()?, mask.dtype() == DType::Bool);
    let kind = |sequence: usize, head: usize, block: usize, tile: usize| {
        let (mut keeps, mut changes) = (false, false);
        for row in (block * map.block_rows..map.rows).take(map.block_rows) {
            let first = ((sequence * heads + head) * rows + row) * keys;
            for key in (tile * map.tile_keys..map.keys).take(map.tile_keys) {
                // One key stands for all.
                let number = numbers[first + if keys == 1 { 0 } else { key }];
                let hides = number == if boolean { 0.0 } else { f64::NEG_INFINITY };
                keeps |= !hides;
                changes |= hides || (!boolean && number != 0.0);
            }
        }
        match (keeps, changes) {
            (false, _) => EMPTY,
            (true, false) => FULL,
            (true, true) => MIXED,
        }
    };
    let mut kinds = Vec::new();
    for sequence in 0..map.batch {
        for head in 0..map.heads {
            for block in 0..map.row_blocks {
                kinds.extend((0..map.key_tiles).map(|tile| kind(sequence, head, block, tile)));
            }
        }
    }
    Ok(kinds)
}

/// Copies a map to its place in the workspace.
fn write(
    map: &TileMap,
    kinds: &[u8],
    workspace: RawWorkspace,
    stream: &CudaStream,
) -> Result<(), Error> {
    assert_eq!(kinds.len(), map.bytes(), "a byte per tile");
    let address = workspace.address + map.at as u64;
    // SAFETY: the map lies in the workspace, which lives until the stream is waited for; the bytes
    // live until then too.
    unsafe { result::memcpy_htod_async(address, kinds, stream.cu_stream()) }
        .and_then(|()| stream.synchronize())
        .map_err(|error| driver_error("writing a tile map", error))
}

/// Queues the layers.
fn queue(
    (gpu, stream): (&Gpu, &Arc<CudaStream>),
    (plan, workspace): (&Plan, RawWorkspace),
    inputs: &Inputs<DeviceMemory>,
    outputs: &mut Outputs<DeviceMemory>,
    (map, mask): (Map, &Array),
) -> Result<(Option<TileMap>, bool), Error> {
    let raw = stream.cu_stream();
    let found = tile_map(plan, inputs, outputs)?;
    // A scale below zero is not for kernels that take maxima before they multiply.
    let scale = Some(-inputs.scale());
    let mut others = *inputs;
    others.attention.scale = scale;
    let differ = tile_map(plan, &others, outputs)? != found;
    // SAFETY: the stream is of this GPU, and the caller waits before it frees anything.
    unsafe {
        match (map, &found) {
            (Map::Plain, _) => gpu.run_raw(plan, raw, inputs, outputs, workspace)?,
            (Map::Made, _) => gpu.map_mask(plan, raw, inputs, outputs, workspace)?,
            (Map::MadeForOthers, _) => gpu.map_mask(plan, raw, &others, outputs, workspace)?,
            (Map::Given, Some(map)) => write(map, &expected(map, mask)?, workspace, stream)?,
            (Map::Unknown, Some(map)) => write(map, &vec![MIXED; map.bytes()], workspace, stream)?,
            (Map::Given | Map::Unknown, None) => {}
        }
        if map == Map::Plain {
            return Ok((found, differ));
        }
        // The second half of a step of chunks and single tokens.
        let prepared = Prepared { tile_map: true, schedule: true };
        gpu.schedule(plan, raw, inputs, outputs, workspace)?;
        gpu.run_prepared(plan, raw, inputs, outputs, workspace, prepared)?;
        for _ in 1..LAYERS {
            gpu.run_mapped(plan, raw, inputs, outputs, workspace)?;
        }
    }
    Ok((found, differ))
}

/// Runs a case.
fn run(runner: &Runner, case: &Case, map: Map) -> Result<Mapped, Broken> {
    let (gpu, stream) = (runner.gpu(), runner.stream());
    let mask = case.attention.mask.as_ref().expect("cases of masks");
    let mut found = (None, false);
    let output = case.run(|inputs, outputs| {
        let uploaded = Uploaded::new(inputs, stream)?;
        let inputs = uploaded.inputs();
        let out = MirrorMut::new(&mut outputs.out, stream)?;
        let lse = outputs.lse.as_mut().expect("cases ask for it");
        let device_lse = MirrorMut::new(lse, stream)?;
        let mut device = Outputs { out: out.view(), lse: Some(device_lse.view()) };
        let plan = gpu.plan(&inputs, &device)?;
        let workspace = Workspace::new(plan.workspace_bytes(), stream)?;
        gpu.load(&plan)?;
        let planned = (&plan, workspace.raw());
        found = queue((gpu, stream), planned, &inputs, &mut device, (map, mask))?;
        workspace.check(stream)?;
        if let (Map::Made | Map::MadeForOthers, Some(map)) = (map, found.0) {
            let made = workspace.bytes(map.at..map.at + map.bytes(), stream)?;
            assert_eq!(
                made,
                expected(&map, mask)?,
                "{}: another map than by definition",
                case.name
            );
        }
        out.download(&mut outputs.out, stream)?;
        device_lse.download(lse, stream)
    });
    let output = output.map_err(|error| Broken(format!("{}, {map:?}: {error}", case.name)))?;
    let (map, others_differ) = found;
    Ok(Mapped { output, map, others_differ })
}

/// Masks of every type over whole tiles, on specialized and fallback kernels, alone and beside
/// decode.
fn specs() -> Vec<Spec> {
    let all = [true, true, false, false];
    let each = [false; 4];
    let mut specs = Vec::new();
    for (dtype, dim, mask, broadcast) in [
        (DType::F32, 64, DType::Bool, all),
        (DType::F32, 40, DType::F32, [false, true, false, false]),
        (DType::BF16, 64, DType::Bool, each),
        (DType::BF16, 128, DType::BF16, all),
        (DType::F16, 64, DType::F16, [true, false, false, false]),
        (DType::BF16, 64, DType::Bool, [false, false, true, false]),
        (DType::BF16, 64, DType::F32, [true, true, false, true]),
    ] {
        let mask = Some(MaskSpec { dtype: mask, hide: Hide::Blocks, broadcast });
        let name = format!("mask-map/{dtype}-{dim}-{}", specs.len());
        let spec = Spec::new(name).lengths(&[(390, 800), (390, 700)]).heads(2, 1);
        let spec = spec.dims(dim, dim).dtype(dtype);
        let spec = Spec { mask, causal: specs.len() % 2 == 1, ..spec };
        // Single tokens in the same batch, for decode.
        let mixed = spec.clone().lengths(&[(1, 500), (390, 800), (3, 4)]);
        let name = format!("{}-mixed", spec.name);
        specs.push(Spec { name, ragged_queries: true, keys: Keys::Ragged { slack: 0 }, ..mixed });
        specs.push(spec);
    }
    // Elements apart from multiples of 16 bytes: TMA cannot read them.
    let beside = MemorySpec { first: 1, ..MemorySpec::default() };
    let memory = OperandMemory { k: beside, ..OperandMemory::default() };
    let beside = specs.iter().filter(|spec| spec.dtype == DType::BF16).cloned();
    let beside: Vec<Spec> =
        beside.map(|spec| Spec { name: format!("{}-beside", spec.name), memory, ..spec }).collect();
    specs.extend(beside);
    // All of it is decode's, and there is no map.
    let first = specs[0].clone();
    specs.push(Spec { name: "mask-map/decode".into(), ..first.lengths(&[(2, 700), (2, 30)]) });
    specs
}

/// A map that is made once, or written by the caller, gives the same bits as runs that make it
/// themselves.
pub fn mapped_equals_plain(runner: &mut Runner) -> Result<String, Broken> {
    let (mut cases, mut maps, mut both, mut kinds) = (0, 0, 0, [0; 3]);
    for spec in specs() {
        let case = spec.generate();
        let plain = run(runner, &case, Map::Plain)?;
        let unknown = run(runner, &case, Map::Unknown)?;
        Checker::new(&case, Some(JUDGED_ROWS))
            .and_then(|checker| checker.check(&unknown.output))
            .map_err(|failure| Broken(format!("{}, nothing known: {failure}", case.name)))?;
        for how in [Map::Made, Map::MadeForOthers, Map::Given] {
            let mapped = run(runner, &case, how)?;
            let same = bits(&plain.output) == bits(&mapped.output);
            expect(same, || format!("{}: other bits with a map: {how:?}", case.name))?;
        }
        cases += 1;
        both += usize::from(plain.others_differ);
        let Some(map) = plain.map else { continue };
        maps += 1;
        let mask = case.attention.mask.as_ref().expect("cases of masks");
        for kind in expected(&map, mask)? {
            kinds[usize::from(kind)] += 1;
        }
    }
    let [empty, full, mixed] = kinds;
    expect(maps + 1 == cases, || format!("{maps} of {cases} cases have a map"))?;
    expect(kinds.iter().all(|&n| n > 0), || format!("kinds of tiles: {kinds:?}"))?;
    Ok(format!(
        "{cases} cases, {maps} with a map, {both} with one for each of two kernels, {LAYERS} \
         layers each, to the bit; {empty} empty tiles, {full} full, {mixed} mixed"
    ))
}
