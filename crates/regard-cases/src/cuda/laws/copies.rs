//! Copies between the blocks of pools: the same bytes as on the CPU, directly and by a graph.

use super::{Broken, expect};
use crate::cuda::{MirrorMut, Runner};
use crate::{Array, Data};
use regard::cpu::Cpu;
use regard::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use regard::cuda::driver_error;
use regard::paged::{BlockCopy, CopyBlocks};
use regard::{DType, Error};

const BLOCKS: usize = 6;
const SLOTS: usize = 4;
const HEADS: usize = 3;
const DIM: usize = 16;

/// A pool whose elements count up, in one of several layouts, on both sides.
fn pool(dtype: DType, strides: [usize; 4], gap: usize) -> Result<Array, Error> {
    let len = BLOCKS * SLOTS * HEADS * DIM * gap;
    let data = Data::from_numbers(dtype, (0..len).map(|i| (i % 251) as f64 / 4.0));
    let shape = [BLOCKS, SLOTS, HEADS, DIM];
    Array::strided(data, 0, &shape, &strides.map(|stride| stride as i64))
}

/// Scales, per slot and head, and per page.
fn scales(slots: usize) -> Result<Array, Error> {
    let len = BLOCKS * slots * HEADS;
    let data = Data::from_numbers(DType::F32, (0..len).map(|i| i as f64));
    Array::new(data, &[BLOCKS, slots, HEADS])
}

/// Pools of several types and layouts at once: copied directly, and by a graph that was captured.
pub fn copies(runner: &mut Runner) -> Result<String, Broken> {
    let (row, slot) = (DIM, HEADS * DIM);
    let block = SLOTS * slot;
    let arrays = || -> Result<Vec<Array>, Error> {
        Ok(vec![
            pool(DType::BF16, [block, slot, row, 1], 1)?,
            pool(DType::E4M3, [block, row, SLOTS * row, 1], 1)?,
            pool(DType::F32, [2 * block, 2 * slot, 2 * row, 1], 2)?,
            pool(DType::F16, [2 * block, 2 * slot, 2 * row, 2], 2)?,
            scales(SLOTS)?,
            scales(1)?,
        ])
    };
    let list = [[0, 1, 4], [1, 2, 3], [3, 0, 1], [4, 4, 4], [5, 3, 0], [2, 5, 2]];
    let list = list.map(|[from, to, slots]| BlockCopy { from, to, slots });
    let mut expected = arrays()?;
    let mut pools = expected.iter_mut().map(Array::view_mut).collect::<Result<Vec<_>, _>>()?;
    Cpu::new()?.copy_blocks(&mut CopyBlocks { pools: &mut pools, copies: &list })?;
    drop(pools);
    let stream = runner.stream().clone();
    for captured in [false, true] {
        let mut found = arrays()?;
        let mut mirrors = Vec::new();
        for array in &mut found {
            mirrors.push(MirrorMut::filled(&mut array.view_mut()?, &stream)?);
        }
        let mut pools: Vec<_> = mirrors.iter().map(MirrorMut::view).collect();
        let mut copy = CopyBlocks { pools: &mut pools, copies: &list };
        if captured {
            let doing = |error| driver_error("capturing a graph", error);
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            stream.begin_capture(mode).map_err(doing)?;
            let queued = runner.gpu().copy_blocks(&stream, &mut copy);
            let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(doing)?;
            queued?;
            let graph = graph.ok_or_else(|| Broken("the graph is empty".into()))?;
            graph.launch().map_err(doing)?;
        } else {
            runner.gpu().copy_blocks(&stream, &mut copy)?;
        }
        for (i, mirror) in mirrors.iter().enumerate() {
            mirror.download(&mut found[i].view_mut()?, &stream)?;
            let (found, expected) = (found[i].numbers()?, expected[i].numbers()?);
            expect(found == expected, || format!("pool {i}, captured: {captured}"))?;
        }
    }
    let mut first = arrays()?.swap_remove(0);
    let mirror = MirrorMut::filled(&mut first.view_mut()?, &stream)?;
    let beyond = [BlockCopy { from: 0, to: BLOCKS, slots: 1 }];
    let refused = runner
        .gpu()
        .copy_blocks(&stream, &mut CopyBlocks { pools: &mut [mirror.view()], copies: &beyond });
    super::interface::expect_refused("a block that is not there", refused, "`copies[0]` is")?;
    Ok(format!("{} copies in {} pools, directly and by a graph", list.len(), expected.len()))
}
