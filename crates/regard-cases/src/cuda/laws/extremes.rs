//! More rows than 16 bits count, and offsets past 2^31 elements.

use super::{Broken, SKIPPED};
use crate::check::Checker;
use crate::cuda::{MirrorMut, Runner, Uploaded, Workspace, mirror};
use crate::{Case, Keys, Spec};
use regard::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use regard::cuda::{DeviceMemory, driver_error};
use regard::{Attention, DType, Error, Inputs, Outputs, Tensor, TensorMut};
use std::sync::Arc;

/// Number of rows, about, that are judged of very large problems.
const JUDGED: usize = 400;

fn judge(runner: &mut Runner, spec: &Spec) -> Result<usize, Broken> {
    let (case, output) = runner.generated(spec)?;
    let verdict = Checker::new(&case, Some(JUDGED))?.check(&output)?;
    Ok(verdict.agreement.rows)
}

/// One sequence of more than 65,535 rows.
pub fn many_rows(runner: &mut Runner) -> Result<String, Broken> {
    let mut judged = 0;
    for (ragged_queries, dtype) in [(false, DType::BF16), (true, DType::F32)] {
        let spec = Spec {
            ragged_queries,
            causal: true,
            keys: Keys::Batched { slack: 0 },
            ..Spec::new("many rows").lengths(&[(70_001, 80)]).heads(3, 1).dims(16, 16).dtype(dtype)
        };
        judged += judge(runner, &spec)?;
    }
    Ok(format!("2 problems of 70001 rows, {judged} rows judged"))
}

/// More than 65,535 sequences.
pub fn many_sequences(runner: &mut Runner) -> Result<String, Broken> {
    let lengths: Vec<_> = (0..66_000).map(|i| (1, i * 7 % 23)).collect();
    let mut judged = 0;
    for (ragged_queries, keys) in [
        (true, Keys::Ragged { slack: 0 }),
        (false, Keys::Paged { block_size: 16, interleaved: false }),
    ] {
        let spec = Spec {
            ragged_queries,
            keys,
            ..Spec::new("many sequences")
                .lengths(&lengths)
                .heads(2, 1)
                .dims(16, 16)
                .dtype(DType::F16)
        };
        judged += judge(runner, &spec)?;
    }
    // Some of them bring a chunk.
    let mixed: Vec<_> = lengths
        .iter()
        .enumerate()
        .map(|(i, &(_, keys))| (if i % 3000 == 7 { 90 } else { 1 }, keys))
        .collect();
    let spec = Spec {
        ragged_queries: true,
        keys: Keys::Ragged { slack: 0 },
        causal: true,
        ..Spec::new("many sequences, some long")
            .lengths(&mixed)
            .heads(2, 1)
            .dims(16, 16)
            .dtype(DType::BF16)
    };
    judged += judge(runner, &spec)?;
    Ok(format!("3 problems of {} sequences, {judged} rows judged", lengths.len()))
}

/// Checks that there is so much memory; if not, returns the reason why the law was not tried.
fn room(runner: &Runner, bytes: usize) -> Result<Option<String>, Broken> {
    let (free, _) = runner
        .gpu()
        .context()
        .mem_get_info()
        .map_err(|error| driver_error("asking for free memory", error))?;
    let words = || format!("{SKIPPED}: needs {} GiB, {} GiB are free", bytes >> 30, free >> 30);
    Ok((free < bytes + (1 << 30)).then(words))
}

fn upload(
    memory: &CudaSlice<u8>,
    at: usize,
    bytes: &[u8],
    stream: &Arc<CudaStream>,
) -> Result<(), Error> {
    assert!(at + bytes.len() <= memory.len(), "inside the memory");
    let address = memory.device_ptr(stream).0 + at as u64;
    // SAFETY: the range is inside the memory, as was just made sure of.
    unsafe { result::memcpy_htod_async(address, bytes, stream.cu_stream()) }
        .map_err(|error| driver_error("copying to the GPU", error))?;
    // The host's memory has to outlive the copy.
    stream.synchronize().map_err(|error| driver_error("copying to the GPU", error))
}

/// Pages at the far end of a pool of more than 2^32 elements.
pub fn far_pages(runner: &mut Runner) -> Result<String, Broken> {
    const BLOCKS: usize = 1_100_000;
    let mut judged = (0, 0.0);
    for q_len in [3, 150] {
        let spec = Spec {
            keys: Keys::Paged { block_size: 16, interleaved: false },
            causal: true,
            ..Spec::new("far pages").heads(8, 2).dims(128, 128).dtype(DType::BF16)
        };
        match far_pages_of(runner, &spec.lengths(&[(q_len, 1500), (q_len, 190)]), BLOCKS)? {
            Ok((rows, gigabytes)) => judged = (judged.0 + rows, gigabytes),
            Err(skipped) => return Ok(skipped),
        }
    }
    Ok(format!("pools of {:.1} GB, {} rows", judged.1, judged.0))
}

/// Rows judged and the size of the pools, or the reason why there are none.
fn far_pages_of(
    runner: &mut Runner,
    spec: &Spec,
    all_blocks: usize,
) -> Result<Result<(usize, f64), String>, Broken> {
    let mut case = spec.generate();
    let [blocks, block_size, heads, dim] = *case.k.shape() else { panic!("a pool") };
    let block_bytes = block_size * heads * dim * 2;
    let pool_bytes = all_blocks * block_bytes;
    if let Some(skipped) = room(runner, 2 * pool_bytes)? {
        return Ok(Err(skipped));
    }
    let stream = runner.stream().clone();
    // The table names blocks of the large pools. Its host twin names blocks of the small pools.
    let far = (all_blocks - blocks) as i32;
    let table = case.attention.block_table.clone().expect("paged");
    let moved = table
        .numbers()?
        .iter()
        .map(|&x| if x < 0.0 { -1 } else { x as i32 + far })
        .collect::<Vec<_>>();
    let pools = [&case.k, &case.v].map(|pool| -> Result<_, Error> {
        let memory = mirror::filled(pool_bytes, 0xff, &stream)?;
        let bytes = pool.to_contiguous()?.data().to_le_bytes();
        upload(&memory, far as usize * block_bytes, &bytes, &stream)?;
        Ok(memory)
    });
    let [k, v] = pools;
    let (k, v) = (k?, v?);
    let view = |memory: &CudaSlice<u8>| {
        // SAFETY: the memory is that large, and lives until the run is done.
        unsafe {
            Tensor::<DeviceMemory>::from_device_address(
                memory.device_ptr(&stream).0,
                DType::BF16,
                &[all_blocks, block_size, heads, dim],
                None,
            )
        }
    };
    let judged_case = case.clone();
    case.attention.block_table = Some(crate::Array::new(moved, table.shape())?);
    let output = run_with(runner, &judged_case, &case, (view(&k)?, view(&v)?))?;
    let verdict = Checker::new(&judged_case, None)?.check(&output)?;
    Ok(Ok((verdict.agreement.rows, pool_bytes as f64 / 1e9)))
}

/// Plans and runs operands in the GPU's memory, and waits.
fn run_on_gpu(
    runner: &Runner,
    inputs: &Inputs<DeviceMemory>,
    outputs: &mut Outputs<DeviceMemory>,
) -> Result<(), Error> {
    let stream = runner.stream();
    let plan = runner.gpu().plan(inputs, outputs)?;
    let workspace = Workspace::new(plan.workspace_bytes(), stream)?;
    // SAFETY: the stream is of this GPU, and everything lives until it has been waited for.
    unsafe {
        runner.gpu().run_raw(&plan, stream.cu_stream(), inputs, outputs, workspace.raw())?;
    }
    workspace.check(stream)
}

/// Runs a case with keys and values that are elsewhere and with the table of `device_case`. The
/// host's side is `host_case`.
fn run_with(
    runner: &mut Runner,
    host_case: &Case,
    device_case: &Case,
    (k, v): (Tensor<DeviceMemory>, Tensor<DeviceMemory>),
) -> Result<crate::Output, Error> {
    let stream = runner.stream().clone();
    host_case.run(|host_inputs, outputs| {
        let host_inputs = Inputs {
            attention: Attention {
                block_table: device_case.inputs()?.attention.block_table,
                ..host_inputs.attention
            },
            ..*host_inputs
        };
        let uploaded = Uploaded::new(&host_inputs, &stream)?;
        let inputs = Inputs { k, v, ..uploaded.inputs() };
        let out = MirrorMut::new(&mut outputs.out, &stream)?;
        let lse = MirrorMut::new(outputs.lse.as_mut().expect("cases ask for it"), &stream)?;
        let mut device_outputs = Outputs { out: out.view(), lse: Some(lse.view()) };
        run_on_gpu(runner, &inputs, &mut device_outputs)?;
        out.download(&mut outputs.out, &stream)?;
        lse.download(outputs.lse.as_mut().expect("as above"), &stream)
    })
}

/// Strides past 2^31 elements in every operand, dimension by dimension.
pub fn far_strides(runner: &mut Runner) -> Result<String, Broken> {
    // Elements between neighbours of the far dimension: 2^32 bytes and a bit.
    const FAR: usize = (1 << 31) + 4096;
    let spec = |q_len| Spec {
        keys: Keys::Batched { slack: 0 },
        causal: true,
        ..Spec::new("far strides")
            .lengths(&[(q_len, 700), (q_len, 650)])
            .heads(4, 2)
            .dims(64, 64)
            .dtype(DType::BF16)
    };
    if let Some(skipped) = room(runner, 4 * FAR * 2 + (2 << 30))? {
        return Ok(skipped);
    }
    let mut judged = 0;
    // Batch, then heads: two of each in keys and values. Queries and outputs are far apart in the
    // batch.
    for (dimension, q_len) in [(0, 2), (2, 2), (0, 150), (2, 150)] {
        judged += far_dimension(runner, &spec(q_len).generate(), dimension, FAR)?;
    }
    Ok(format!("batch and heads {FAR} elements apart, {judged} rows"))
}

/// A host tensor of two entries along `dimension`, `far` elements apart on the GPU.
struct Spread {
    memory: CudaSlice<u8>,
    shape: Vec<usize>,
    strides: Vec<i64>,
    dimension: usize,
    far: usize,
}

impl Spread {
    fn new(
        shape: &[usize],
        dimension: usize,
        far: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<Spread, Error> {
        // The other dimensions are contiguous.
        let (mut strides, mut stride) = (vec![0i64; shape.len()], 1i64);
        for i in (0..shape.len()).rev() {
            if i == dimension {
                strides[i] = far as i64;
            } else {
                strides[i] = stride;
                stride *= shape[i] as i64;
            }
        }
        let bytes = ((shape[dimension] - 1) * far + stride as usize) * 2;
        let memory = mirror::filled(bytes, 0xff, stream)?;
        Ok(Spread { memory, shape: shape.to_vec(), strides, dimension, far })
    }

    /// The elements of one entry, in order, from and to a contiguous bf16 array of the shape.
    fn entry(&self, entry: usize) -> Vec<usize> {
        let outer: usize = self.shape[..self.dimension].iter().product();
        let (entries, inner) = (
            self.shape[self.dimension],
            self.shape[self.dimension + 1..].iter().product::<usize>(),
        );
        (0..outer)
            .flat_map(|i| {
                let start = (i * entries + entry) * inner;
                start..start + inner
            })
            .collect()
    }

    fn upload(&self, data: &[u8], stream: &Arc<CudaStream>) -> Result<(), Error> {
        for entry in 0..self.shape[self.dimension] {
            let bytes: Vec<u8> =
                self.entry(entry).iter().flat_map(|&i| [data[2 * i], data[2 * i + 1]]).collect();
            upload(&self.memory, entry * self.far * 2, &bytes, stream)?;
        }
        Ok(())
    }

    fn address(&self, stream: &CudaStream) -> u64 {
        self.memory.device_ptr(stream).0
    }
}

fn far_dimension(
    runner: &mut Runner,
    case: &Case,
    dimension: usize,
    far: usize,
) -> Result<usize, Broken> {
    let stream = runner.stream().clone();
    let output = case.run(|host, outputs| {
        let spread = |array: &crate::Array, dimension| -> Result<Spread, Error> {
            let array = array.to_contiguous()?;
            let spread = Spread::new(array.shape(), dimension, far, &stream)?;
            spread.upload(&array.data().to_le_bytes(), &stream)?;
            Ok(spread)
        };
        let (k, v) = (spread(&case.k, dimension)?, spread(&case.v, dimension)?);
        let (q, out) = (spread(&case.q, 0)?, Spread::new(case.q.shape(), 0, far, &stream)?);
        let view = |spread: &Spread| {
            // SAFETY: the memory holds all that the strides reach, and lives until the run is done.
            unsafe {
                Tensor::<DeviceMemory>::from_device_address(
                    spread.address(&stream),
                    DType::BF16,
                    &spread.shape,
                    Some(&spread.strides),
                )
            }
        };
        let uploaded = Uploaded::new(host, &stream)?;
        let inputs = Inputs { q: view(&q)?, k: view(&k)?, v: view(&v)?, ..uploaded.inputs() };
        let lse = MirrorMut::new(outputs.lse.as_mut().expect("cases ask for it"), &stream)?;
        // SAFETY: as for the inputs, and nothing else reads it meanwhile.
        let out_view = unsafe {
            TensorMut::from_device_address(
                out.address(&stream),
                DType::BF16,
                &out.shape,
                Some(&out.strides),
            )
        }?;
        let mut device_outputs = Outputs { out: out_view, lse: Some(lse.view()) };
        run_on_gpu(runner, &inputs, &mut device_outputs)?;
        lse.download(outputs.lse.as_mut().expect("as above"), &stream)?;
        let to = outputs.out.as_mut_ptr();
        for entry in 0..out.shape[0] {
            let elements = out.entry(entry);
            let at = entry * far * 2;
            let bytes =
                mirror::downloaded(&out.memory.slice(at..at + 2 * elements.len()), &stream)?;
            for (pair, i) in bytes.chunks_exact(2).zip(elements) {
                // SAFETY: the host's output is contiguous and of this shape.
                unsafe { std::ptr::copy_nonoverlapping(pair.as_ptr(), to.add(2 * i), 2) };
            }
        }
        Ok(())
    })?;
    let verdict = Checker::new(case, None)?.check(&output)?;
    Ok(verdict.agreement.rows)
}
