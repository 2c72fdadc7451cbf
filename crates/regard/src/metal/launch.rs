//! Turns a plan and operands into dispatches: pipelines, parameters, bindings and grids. A Mac's
//! host code encodes them, and tests run them on the host.

use super::{AppendParameters, AttentionParameters, CONSTANTS, Launch, Pipeline, SIMD_WIDTH};
use crate::error::Error;
use crate::plan::Plan;
use crate::problem::{Inputs, KvStorage, Outputs, Problem};
use crate::tensor::{DType, Dims, Tensor, TensorMut};
use crate::variant::QueryOffset;

/// Memory bound to a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The address of the first element.
    pub address: usize,
    /// Bytes from there that the kernel may touch.
    pub bytes: usize,
    /// Whether it writes them.
    pub writable: bool,
}

/// The parameters of a dispatch: buffer 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Params {
    /// Of the attention kernels and `merge`.
    Attention(AttentionParameters),
    /// Of `append`.
    Append(AppendParameters),
}

impl Params {
    /// The bytes that the kernel reads.
    pub fn bytes(&self) -> &[u8] {
        let (address, length) = match self {
            Params::Attention(call) => {
                (std::ptr::from_ref(call).cast::<u8>(), size_of::<AttentionParameters>())
            }
            Params::Append(call) => {
                (std::ptr::from_ref(call).cast::<u8>(), size_of::<AppendParameters>())
            }
        };
        // SAFETY: both structs are plain numbers without padding, and live as long as `self`.
        unsafe { std::slice::from_raw_parts(address, length) }
    }
}

/// The most buffers that a kernel has, parameters included.
pub(crate) const BUFFERS: usize = 16;

/// One kernel launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dispatch {
    /// What runs.
    pub pipeline: Pipeline,
    /// Buffer 0.
    pub params: Params,
    /// Buffers 1 and up, by index; `None` is never touched by the kernel (Metal wants something
    /// bound there all the same).
    pub buffers: [Option<Binding>; BUFFERS],
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup, in one dimension.
    pub threads: u32,
    /// Bytes of threadgroup memory 0.
    pub threadgroup_bytes: usize,
}

/// The memory that a view covers, from its first element on; `None` if it is empty.
fn bound(address: usize, dims: &Dims, writable: bool) -> Option<Binding> {
    let (_, high) = dims.extent().ok()??;
    Some(Binding { address, bytes: (high as usize + 1) * dims.dtype().size(), writable })
}

/// An error if elements lie before the first one: buffers are bound, and copied, from there on.
pub(super) fn expect_forwards(argument: &str, dims: &Dims) -> Result<(), Error> {
    match dims.extent()? {
        Some((low, _)) if low < 0 => {
            let found = format!("a view with strides {:?}", dims.strides());
            Err(Error::argument(
                argument,
                found,
                "strides from 0 up: a Metal buffer is bound from the first element on",
            ))
        }
        _ => Ok(()),
    }
}

pub(super) fn read(tensor: &Tensor) -> Option<Binding> {
    bound(tensor.as_ptr() as usize, tensor, false)
}

pub(super) fn written(tensor: &mut TensorMut) -> Option<Binding> {
    let address = tensor.as_mut_ptr() as usize;
    bound(address, tensor, true)
}

/// The strides of sequences (or pages), tokens and heads. Ragged tensors have no stride of
/// sequences.
pub(super) fn row_strides(dims: &Dims, ragged: bool) -> [i64; 3] {
    let strides = dims.strides();
    if ragged { [0, strides[0], strides[1]] } else { [strides[0], strides[1], strides[2]] }
}

/// Whether every row starts at a multiple of 4 elements and is a multiple of 4 long.
fn aligned(tensor: &Tensor) -> bool {
    let Some((&dim, outer)) = tensor.shape().split_last() else { return false };
    let steps = tensor.strides().iter().zip(outer).all(|(stride, &n)| n <= 1 || stride % 4 == 0);
    dim.is_multiple_of(4)
        && steps
        && (tensor.as_ptr() as usize).is_multiple_of(4 * tensor.dtype().size())
}

/// A window's bound as kernels take it: no position is further than 2^40 from a key.
fn bound_of_window(side: Option<usize>) -> i64 {
    side.map_or(1 << 40, |bound| i64::try_from(bound).unwrap_or(i64::MAX).min(1 << 40))
}

/// The dispatches that run a plan on these operands, in order: attention, then the merge of partial
/// states where the plan has one; none where there is nothing to do. `workspace` is the address of
/// [`Plan::workspace_bytes`] bytes, aligned to 16, that only these dispatches use.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, or the plan is for another kind of
/// machine.
pub fn dispatches(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &mut Outputs,
    workspace: usize,
) -> Result<[Option<Dispatch>; 2], Error> {
    let problem = Problem::from_operands(inputs, outputs)?;
    plan.problem().covers(&problem)?;
    let Some(launch) = plan.backend::<Launch>() else { return Err(plan.not_for("a Metal device")) };
    for (name, tensor) in inputs.named() {
        expect_forwards(name, tensor)?;
    }
    expect_forwards("out", &outputs.out)?;
    outputs.lse.as_ref().map_or(Ok(()), |lse| expect_forwards("lse", lse))?;
    let call = attention_call(plan, inputs, outputs, &problem);
    if problem.batch == 0 || call.rows == 0 || problem.rows() == 0 {
        return Ok([None, None]);
    }
    let partial = plan.split().parallel;
    let pipeline = pipeline(plan, &problem, is_aligned(inputs));
    let attention = &inputs.attention;
    let offsets = match &attention.q_offset {
        QueryOffset::PerSequence(offsets) => read(offsets),
        _ => None,
    };
    let states = problem.batch * problem.kv_heads * call.rows as usize * call.splits as usize;
    let partials =
        Binding { address: workspace, bytes: states * (problem.value_dim + 2) * 4, writable: true };
    let optional = |tensor: &Option<Tensor>| tensor.as_ref().and_then(read);
    let buffers = [
        None,
        read(&inputs.q),
        read(&inputs.k),
        read(&inputs.v),
        written(&mut outputs.out),
        outputs.lse.as_mut().and_then(written),
        optional(&attention.mask),
        optional(&attention.alibi_slopes),
        optional(&attention.sinks),
        optional(&attention.tree_mask),
        optional(&attention.kv_lens),
        optional(&attention.cu_seqlens_q),
        optional(&attention.cu_seqlens_k),
        optional(&attention.block_table),
        offsets,
        partial.then_some(partials),
    ];
    let splits = if partial { call.splits as u32 } else { 1 };
    let heads = [problem.kv_heads as u32, problem.batch as u32];
    let attend = Dispatch {
        pipeline,
        params: Params::Attention(call),
        buffers,
        grid: [call.row_blocks as u32 * splits, heads[0], heads[1]],
        threads: (launch.simd_groups * SIMD_WIDTH) as u32,
        threadgroup_bytes: launch.threadgroup_bytes,
    };
    let merge = launch.merge.map(|function| {
        let mut merge = attend;
        merge.pipeline = merge_pipeline(pipeline, function);
        merge.grid = [(call.rows as u32).div_ceil(MERGE_SIMD_GROUPS as u32), heads[0], heads[1]];
        merge.threads = MERGE_THREADS;
        merge.threadgroup_bytes = 0;
        merge
    });
    Ok([Some(attend), merge])
}

/// SIMD groups of a merge threadgroup, one per row.
const MERGE_SIMD_GROUPS: usize = 4;

/// The pipelines that a plan can need, each with the threads of its threadgroups: for aligned
/// operands and for others.
///
/// # Errors
/// If the plan is for another kind of machine.
pub fn pipelines(plan: &Plan) -> Result<Vec<(Pipeline, u32)>, Error> {
    let Some(launch) = plan.backend::<Launch>() else { return Err(plan.not_for("a Metal device")) };
    let mut all = Vec::new();
    for aligned in [true, false] {
        let attention = pipeline(plan, plan.problem(), aligned);
        all.push((attention, (launch.simd_groups * SIMD_WIDTH) as u32));
        if let Some(function) = launch.merge {
            all.push((merge_pipeline(attention, function), MERGE_THREADS));
        }
    }
    Ok(all)
}

/// The merge's pipeline: the constants of the attention kernel's, but for the SIMD groups.
fn merge_pipeline(attention: Pipeline, function: &'static str) -> Pipeline {
    let mut merge = Pipeline { function, ..attention };
    merge.constants[SIMD_GROUPS] = MERGE_SIMD_GROUPS as i32;
    merge
}

/// Threads of a merge threadgroup.
const MERGE_THREADS: u32 = (MERGE_SIMD_GROUPS * SIMD_WIDTH) as u32;

/// The place of `SIMD_GROUPS` in [`CONSTANTS`].
const SIMD_GROUPS: usize = 4;

/// Whether kernels may load four elements of any row of these operands at once.
fn is_aligned(inputs: &Inputs) -> bool {
    [&inputs.q, &inputs.k, &inputs.v].into_iter().all(aligned)
}

fn pipeline(plan: &Plan, problem: &Problem, aligned: bool) -> Pipeline {
    let launch = plan.backend::<Launch>().expect("the caller has it");
    let variant = &problem.variant;
    let (choice, split) = (plan.choice(), plan.split());
    let bounded = variant.causal
        || variant.chunk.is_some()
        || variant.window.left.is_some()
        || variant.window.right.is_some();
    let block_size = match problem.keys {
        KvStorage::Paged { block_size } => block_size as i32,
        KvStorage::Batched | KvStorage::Ragged => 0,
    };
    let mask = match variant.mask {
        Some(DType::Bool) => 1,
        Some(DType::F32) => 2,
        Some(DType::F16) => 3,
        Some(DType::BF16) => 4,
        _ => 0,
    };
    let constants: [i32; CONSTANTS.len()] = [
        problem.head_dim as i32,
        problem.value_dim as i32,
        choice.block_rows as i32,
        choice.tile_keys as i32,
        launch.simd_groups as i32,
        split.parallel.into(),
        (split.count > 1 && !split.parallel).into(),
        bounded.into(),
        variant.softcap.into(),
        variant.alibi.into(),
        variant.sinks.into(),
        mask,
        variant.tree.into(),
        block_size,
        problem.lse.into(),
        (problem.out_dtype != problem.dtype).into(),
        aligned.into(),
    ];
    Pipeline { function: launch.function, constants }
}

fn attention_call(
    plan: &Plan,
    inputs: &Inputs,
    outputs: &Outputs,
    problem: &Problem,
) -> AttentionParameters {
    let attention = &inputs.attention;
    let (ragged_queries, ragged_keys) =
        (attention.cu_seqlens_q.is_some(), attention.cu_seqlens_k.is_some());
    let q = row_strides(&inputs.q, ragged_queries);
    let k = row_strides(&inputs.k, ragged_keys);
    let v = row_strides(&inputs.v, ragged_keys);
    let out = row_strides(&outputs.out, ragged_queries);
    let lse = outputs.lse.as_ref().map_or([0; 3], |lse| row_strides(lse, ragged_queries));
    let mask = attention.mask.as_ref().map_or([0; 4], |mask| {
        std::array::from_fn(|i| if mask.shape()[i] > 1 { mask.strides()[i] } else { 0 })
    });
    let tree =
        attention.tree_mask.as_ref().map_or([0; 2], |tree| [tree.strides()[0], tree.strides()[1]]);
    let scale = f64::from(inputs.scale());
    let softcap = attention.softcap;
    // Base 16 under the condition of BASE_16 in `common.metal`, else base 2.
    let adds_mask = problem.variant.mask.is_some_and(DType::is_float);
    let unit =
        std::f64::consts::LOG2_E / if adds_mask || problem.variant.sinks { 4.0 } else { 1.0 };
    let (offset_kind, q_offset) = match attention.q_offset {
        QueryOffset::BottomRight => (0, 0),
        QueryOffset::Same(offset) => (1, offset),
        QueryOffset::PerSequence(_) => (2, 0),
    };
    let rows = problem.query_len * problem.group();
    let split = plan.split();
    let right =
        if problem.variant.causal { 0 } else { bound_of_window(problem.variant.window.right) };
    AttentionParameters {
        q_batch_stride: q[0],
        q_token_stride: q[1],
        q_head_stride: q[2],
        k_batch_stride: k[0],
        k_token_stride: k[1],
        k_head_stride: k[2],
        v_batch_stride: v[0],
        v_token_stride: v[1],
        v_head_stride: v[2],
        out_batch_stride: out[0],
        out_token_stride: out[1],
        out_head_stride: out[2],
        lse_batch_stride: lse[0],
        lse_token_stride: lse[1],
        lse_head_stride: lse[2],
        mask_batch_stride: mask[0],
        mask_head_stride: mask[1],
        mask_row_stride: mask[2],
        mask_key_stride: mask[3],
        tree_batch_stride: tree[0],
        tree_row_stride: tree[1],
        table_stride: attention.block_table.map_or(0, |table| table.strides()[0]),
        window_left: bound_of_window(problem.variant.window.left),
        window_right: right,
        chunk: problem.variant.chunk.map_or(0, |chunk| chunk as i64),
        q_offset,
        split_keys: split.keys as i64,
        score_factor: softcap.map_or(scale * unit, |cap| scale / f64::from(cap)) as f32,
        softcap: softcap.map_or(0.0, |cap| f64::from(cap) * unit) as f32,
        kv_heads: problem.kv_heads as i32,
        group: problem.group() as i32,
        query_len: problem.query_len as i32,
        kv_len: problem.kv_len as i32,
        query_total: if ragged_queries { inputs.q.shape()[0] as i32 } else { 0 },
        key_total: if ragged_keys { inputs.k.shape()[0] as i32 } else { 0 },
        blocks: if attention.block_table.is_some() { inputs.k.shape()[0] as i32 } else { 0 },
        offset_kind,
        ragged_queries: ragged_queries.into(),
        ragged_keys: ragged_keys.into(),
        given_kv_lens: attention.kv_lens.is_some().into(),
        row_blocks: rows.div_ceil(plan.choice().block_rows) as i32,
        splits: problem.kv_len.div_ceil(split.keys).clamp(1, split.count.max(1)) as i32,
        rows: rows as i32,
    }
}
