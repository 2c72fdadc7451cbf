//! A captured graph is replayed with lengths, tables and queries that it was not captured with.

use super::{Broken, expect};
use crate::check::Checker;
use crate::cuda::MirrorMut;
use crate::cuda::{Runner, Uploaded, Workspace};
use crate::list::prefixes;
use crate::{Array, Case, Hide, Keys, MaskSpec, OffsetSpec, Spec};
use regard::cuda::cudarc::driver::CudaGraph;
use regard::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use regard::cuda::{DeviceMemory, Prepared, RawWorkspace, driver_error};
use regard::{DType, Error, Inputs, KeyOffset, KeyPositions, Outputs, Plan, QueryOffset, Window};

/// The work that a graph has captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Captured {
    /// One run.
    Run,
    /// The parts that the layers of a step share (its schedule, the tile map of its mask), and two
    /// layers that read them.
    Step,
}

/// Captures a run, or a step.
fn capture(
    runner: &Runner,
    plan: &Plan,
    inputs: &Inputs<DeviceMemory>,
    outputs: &mut Outputs<DeviceMemory>,
    workspace: RawWorkspace,
    captured: Captured,
) -> Result<CudaGraph, Error> {
    let stream = runner.stream();
    let doing = |error| driver_error("capturing a graph", error);
    runner.gpu().load(plan)?;
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(doing)?;
    let (gpu, raw) = (runner.gpu(), stream.cu_stream());
    // SAFETY: the stream is of this GPU; the caller keeps everything until the graph has run.
    let run = unsafe {
        match captured {
            Captured::Run => gpu.run_raw(plan, raw, inputs, outputs, workspace),
            Captured::Step => {
                let prepared = Prepared { schedule: true, tile_map: true };
                gpu.schedule(plan, raw, inputs, outputs, workspace)
                    .and_then(|()| gpu.map_mask(plan, raw, inputs, outputs, workspace))
                    .and_then(|()| {
                        (0..2).try_for_each(|_layer| {
                            gpu.run_prepared(plan, raw, inputs, outputs, workspace, prepared)
                        })
                    })
            }
        }
    };
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(doing)?;
    run?;
    graph.ok_or_else(|| Error::argument("graph", "empty", "a launch"))
}

/// Replaces the operands of these names, replays, and holds each result to the oracle.
fn replay(
    runner: &mut Runner,
    captured: Captured,
    base: &Case,
    replaced: &[&str],
    replays: &[Case],
) -> Result<(), Broken> {
    let stream = runner.stream().clone();
    let inputs = base.inputs()?;
    let mut uploaded = Uploaded::new(&inputs, &stream)?;
    let mut written = None;
    base.run(|_, outputs| {
        let out = MirrorMut::new(&mut outputs.out, &stream)?;
        let lse = outputs.lse.as_mut().map(|lse| MirrorMut::new(lse, &stream)).transpose()?;
        written = Some((out, lse.expect("cases ask for it")));
        Ok(())
    })?;
    let (out, lse) = written.expect("the runner was called");
    let (graph, workspace) = {
        let inputs = uploaded.inputs();
        let mut outputs = Outputs { out: out.view(), lse: Some(lse.view()) };
        let plan = runner.gpu().plan(&inputs, &outputs)?;
        let workspace = Workspace::new(plan.workspace_bytes(), &stream)?;
        let raw = workspace.raw();
        (capture(runner, &plan, &inputs, &mut outputs, raw, captured)?, workspace)
    };
    for (i, case) in replays.iter().enumerate() {
        let inputs = case.inputs()?;
        for &operand in replaced {
            let found = inputs.named().find(|(name, _)| *name == operand);
            let (_, with) = found.expect("the case has it");
            uploaded.replace(operand, with, &stream)?;
        }
        out.clear(&stream)?;
        lse.clear(&stream)?;
        graph.launch().map_err(|error| driver_error("replaying a graph", error))?;
        let output = case.run(|_, outputs| {
            out.download(&mut outputs.out, &stream)?;
            lse.download(outputs.lse.as_mut().expect("cases ask for it"), &stream)
        })?;
        workspace.check(&stream)?;
        Checker::new(case, None)
            .and_then(|checker| checker.check(&output))
            .map_err(|failure| Broken(format!("{}, replay {i}: {failure}", case.name)))?;
    }
    Ok(())
}

fn ints(values: Vec<i32>, shape: &[usize]) -> Result<Option<Array>, Error> {
    Array::new(values, shape).map(Some)
}

/// Decode over pages: new lengths, new tables, entries of the batch that are padding (no keys, no
/// pages).
pub fn decode(runner: &mut Runner) -> Result<String, Broken> {
    let replays_run = replay_decode(runner, Captured::Run)?;
    Ok(format!("{replays_run} replays with other lengths and tables"))
}

/// Decode and prefill over shards: new positions of rows and of keys.
pub fn shards(runner: &mut Runner) -> Result<String, Broken> {
    let replays_run = replay_shards(runner, Captured::Run)?;
    Ok(format!("{replays_run} replays with other positions"))
}

/// Ragged queries: the rows of the batch are dealt out anew.
pub fn ragged(runner: &mut Runner) -> Result<String, Broken> {
    let replays_run = replay_ragged(runner, Captured::Run)?;
    Ok(format!("{replays_run} replays with rows dealt out anew"))
}

/// The same graphs with the schedule of the step, and layers that read it: a replay computes the
/// schedule anew for its lengths. Then graphs under a mask: a replay makes the tile map anew.
pub fn scheduled(runner: &mut Runner) -> Result<String, Broken> {
    let captured = Captured::Step;
    let decode = replay_decode(runner, captured)?;
    let shards = replay_shards(runner, captured)?;
    let ragged = replay_ragged(runner, captured)?;
    let groups = replay_groups(runner, captured)?;
    let masks = replay_masks(runner, captured)?;
    Ok(format!(
        "{decode} replays of decode, {shards} over shards, {ragged} with rows dealt out anew, \
         {groups} with other prefix groups, {masks} under other masks, two layers each"
    ))
}

fn replay_decode(runner: &mut Runner, captured: Captured) -> Result<usize, Broken> {
    const CAPACITY: usize = 3000;
    let mut replays_run = 0;
    for (dtype, dim, window) in
        [(DType::BF16, 128, None), (DType::F16, 64, Some(700)), (DType::F32, 80, None)]
    {
        let spec = |page_seed| Spec {
            page_seed,
            keys: Keys::Paged { block_size: 16, interleaved: false },
            causal: true,
            sinks: window.is_some(),
            window: Window { left: window, right: None },
            poison: false,
            ..Spec::new(format!("graph/decode-{dtype}"))
                .lengths(&[(1, CAPACITY); 5])
                .heads(8, 2)
                .dims(dim, dim)
                .dtype(dtype)
        };
        let base = spec(1).generate();
        let mut replays = Vec::new();
        for (i, lens) in [
            [CAPACITY; 5],
            [1, 2, 3, 4, 5],
            [2999, 0, 17, 0, 1024],
            [0; 5],
            [1, 1, 1, 1, CAPACITY],
            [1025, 513, 257, 129, 65],
        ]
        .iter()
        .enumerate()
        {
            let mut case = base.clone();
            case.name = format!("{} {lens:?}", base.name);
            case.attention.kv_lens = ints(lens.iter().map(|&n| n as i32).collect(), &[5])?;
            // Other pages every second time, and none for padding.
            let table = base.attention.block_table.as_ref().expect("paged");
            let columns = table.shape()[1];
            let mut entries: Vec<i32> = table.numbers()?.into_iter().map(|x| x as i32).collect();
            if i % 2 == 1 {
                entries.rotate_left(columns);
            }
            for (row, &len) in entries.chunks_mut(columns).zip(lens) {
                row[len.div_ceil(16)..].fill(-1);
            }
            case.attention.block_table = ints(entries, &[5, columns])?;
            replays.push(case);
        }
        replay(runner, captured, &base, &["kv_lens", "block_table"], &replays)?;
        replays_run += replays.len();
    }
    Ok(replays_run)
}

fn replay_shards(runner: &mut Runner, captured: Captured) -> Result<usize, Broken> {
    let mut replays_run = 0;
    for (dtype, rows, stride) in
        [(DType::BF16, 1, 1), (DType::BF16, 1, 4), (DType::F32, 3, 2), (DType::BF16, 150, 3)]
    {
        let spec = Spec {
            causal: true,
            alibi: stride == 2,
            window: Window { left: (stride == 1).then_some(600), right: None },
            offset: OffsetSpec::PerSequence(vec![900, 900, 900]),
            ..Spec::new(format!("graph/shards-by-{stride}-{rows}-{dtype}"))
                .lengths(&[(rows, 700); 3])
                .heads(4, 2)
                .dims(128, 128)
                .dtype(dtype)
                .key_positions(&[0, 0, 0], stride)
        };
        let spec = Spec { poison: false, ..spec };
        let base = spec.generate();
        let mut replays = Vec::new();
        for (positions, offsets) in [
            ([900, 40, 2800], [0, 39, -500]),
            ([0, 1_000_000, -7], [-300, 999_000, -8]),
            ([i32::MAX - 700, i32::MIN, 5], [i32::MAX - 900, i32::MIN, 4000]),
        ] {
            let mut case = base.clone();
            case.name = format!("{} {positions:?} {offsets:?}", base.name);
            case.attention.q_offset =
                QueryOffset::PerSequence(Array::new(positions.to_vec(), &[3])?);
            let offset = KeyOffset::PerSequence(Array::new(offsets.to_vec(), &[3])?);
            case.attention.key_positions = Some(KeyPositions { offset, stride });
            replays.push(case);
        }
        replay(runner, captured, &base, &["q_offset", "key_offset"], &replays)?;
        replays_run += replays.len();
    }
    Ok(replays_run)
}

fn replay_ragged(runner: &mut Runner, captured: Captured) -> Result<usize, Broken> {
    let mut replays_run = 0;
    for (dtype, dim) in [(DType::BF16, 128), (DType::F32, 40)] {
        let spec = Spec {
            ragged_queries: true,
            keys: Keys::Paged { block_size: 32, interleaved: true },
            causal: true,
            poison: false,
            ..Spec::new(format!("graph/ragged-{dtype}"))
                .lengths(&[(4, 900), (4, 900), (4, 900), (4, 900)])
                .heads(4, 1)
                .dims(dim, dim)
                .dtype(dtype)
        };
        let base = spec.generate();
        let mut replays = Vec::new();
        for (cumulative, lens) in [
            ([0, 4, 8, 12, 16], [900, 900, 900, 900]),
            ([0, 16, 16, 16, 16], [850, 0, 0, 0]),
            ([0, 0, 1, 2, 16], [0, 1, 900, 14]),
            ([0, 0, 0, 0, 16], [5, 5, 5, 5]),
            ([0, 1, 3, 15, 16], [1, 2, 899, 33]),
        ] {
            let mut case = base.clone();
            case.name = format!("{} {cumulative:?} {lens:?}", base.name);
            case.attention.cu_seqlens_q = ints(cumulative.to_vec(), &[5])?;
            case.attention.kv_lens = ints(lens.to_vec(), &[4])?;
            replays.push(case);
        }
        replay(runner, captured, &base, &["cu_seqlens_q", "kv_lens"], &replays)?;
        replays_run += replays.len();
    }
    expect(replays_run > 0, || "nothing was replayed".into())?;
    Ok(replays_run)
}

/// Decode of sequences that share prefixes: other groups, other prefixes, none.
fn replay_groups(runner: &mut Runner, captured: Captured) -> Result<usize, Broken> {
    let mut replays_run = 0;
    for spec in prefixes().filter(|spec| spec.core && spec.prefixes.is_some()) {
        let base = Spec { poison: false, ..spec }.generate();
        let mut replays = vec![base.clone()];
        let groups = base.attention.prefix_groups.as_ref().expect("the specs have groups");
        let lens = base.attention.prefix_lens.as_ref().expect("the specs have groups");
        // Nothing is shared.
        let mut none = base.clone();
        none.name = format!("{} without groups", base.name);
        none.attention.prefix_groups = ints(vec![-1; groups.shape()[0]], groups.shape())?;
        replays.push(none);
        let mut short = base.clone();
        short.name = format!("{} without prefixes", base.name);
        short.attention.prefix_lens = ints(vec![0; lens.shape()[0]], lens.shape())?;
        replays.push(short);
        replays.push(base.clone());
        replay(runner, captured, &base, &["prefix_groups", "prefix_lens"], &replays)?;
        replays_run += replays.len();
    }
    expect(replays_run > 0, || "there are no cases of prefix groups".into())?;
    Ok(replays_run)
}

/// Prefill under masks that hide and keep entire tiles, other ones in every replay.
fn replay_masks(runner: &mut Runner, captured: Captured) -> Result<usize, Broken> {
    let mut replays_run = 0;
    for (dtype, mask) in [(DType::F32, DType::Bool), (DType::BF16, DType::BF16)] {
        let broadcast = [true, true, false, false];
        let mask = MaskSpec { dtype: mask, hide: Hide::Blocks, broadcast };
        let spec = |seed| Spec {
            mask: Some(mask),
            poison: false,
            seed,
            ..Spec::new(format!("graph/masks-{dtype}"))
                .lengths(&[(390, 800)])
                .dims(64, 64)
                .dtype(dtype)
        };
        let base = spec(1).generate();
        let mut replays = Vec::new();
        for seed in 2..5 {
            let mut case = base.clone();
            case.name = format!("{} {seed}", base.name);
            case.attention.mask = spec(seed).generate().attention.mask;
            replays.push(case);
        }
        replay(runner, captured, &base, &["mask"], &replays)?;
        replays_run += replays.len();
    }
    Ok(replays_run)
}
