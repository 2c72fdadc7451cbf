//! From operands to what a kernel reads.

use super::schedule::Schedule;
use super::{DeviceMemory, Launch};
use crate::memory::Memory;
use crate::params::AttentionParameters;
use crate::problem::{Inputs, KvStorage, Outputs, Problem, QueryStorage};
use crate::tensor::{DType, Dims, Tensor, TensorMut};
use crate::variant::QueryOffset;

/// A window bound that nothing reaches. Positions are below 2^33, so sums with it do not overflow.
const UNBOUNDED: i64 = 1 << 40;

/// How keys and values can be read, as `decode.cu` has it.
const FETCH_ELEMENTS: i32 = 0;
const FETCH_CHUNKS: i32 = 1;
const FETCH_RUNS: i32 = 2;

/// A launch with operands: the module that can read them, its thread blocks, and what the kernel reads.
pub(super) struct Call {
    pub module: &'static str,
    pub blocks: u32,
    pub parameters: AttentionParameters,
}

/// The call for these operands, which have been checked and are covered by the plan of `launch`.
pub(super) fn call(
    problem: &Problem,
    launch: &Launch,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
    workspace: u64,
) -> Call {
    let schedule = match equal_lengths(problem, inputs) {
        Some(q_offset) => Schedule::of_equal_lengths(problem, launch, q_offset),
        None => Schedule::on_device(launch),
    };
    let mut p = AttentionParameters {
        workspace,
        line: schedule.line,
        share: schedule.share,
        tile_cost: schedule.tile_cost,
        start_units: schedule.start_units,
        unit_shift: launch.unit_keys.trailing_zeros() as i32,
        partials_a_block: launch.partials_a_block,
        key_groups: launch.key_groups,
        most_query_len: i32::MAX,
        ..AttentionParameters::default()
    };
    set_shapes(&mut p, problem, inputs);
    set_operands(&mut p, inputs, outputs);
    set_variant(&mut p, problem, inputs);
    p.fetch = match [&inputs.q, &inputs.k, &inputs.v].into_iter().all(reads_16_bytes) {
        false => FETCH_ELEMENTS,
        true if launch.whole_rows && (p.block_size == 0 || p.block_size % 16 == 0) => FETCH_RUNS,
        true => FETCH_CHUNKS,
    };
    let module = if p.fetch == FETCH_RUNS { launch.module } else { launch.general };
    Call { module, blocks: schedule.blocks, parameters: p }
}

/// The offset that all sequences share, where the host knows all lengths to be alike.
fn equal_lengths(problem: &Problem, inputs: &Inputs<DeviceMemory>) -> Option<i64> {
    let attention = &inputs.attention;
    let known = attention.kv_lens.is_none()
        && attention.cu_seqlens_q.is_none()
        && attention.cu_seqlens_k.is_none()
        && !inputs.k.is_empty();
    match attention.q_offset {
        _ if !known => None,
        QueryOffset::BottomRight => Some(problem.kv_len as i64 - problem.query_len as i64),
        QueryOffset::Same(offset) => Some(offset),
        QueryOffset::PerSequence(_) => None,
    }
}

/// A number that checking has bounded by what an `i32` can count.
fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn set_shapes(p: &mut AttentionParameters, problem: &Problem, inputs: &Inputs<DeviceMemory>) {
    p.batch = count(problem.batch);
    p.kv_heads = count(problem.kv_heads);
    p.group = count(problem.group());
    p.head_dim = count(problem.head_dim);
    p.value_dim = count(problem.value_dim);
    p.query_len = count(match problem.queries {
        QueryStorage::Batched => problem.query_len,
        QueryStorage::Ragged { total } => total,
    });
    let key_rows = inputs.k.shape()[0];
    p.kv_len = count(match problem.keys {
        // Without a block there is no key, whatever the lengths say.
        _ if inputs.k.is_empty() => 0,
        KvStorage::Ragged => key_rows,
        KvStorage::Batched | KvStorage::Paged { .. } => problem.kv_len,
    });
    if let KvStorage::Paged { block_size } = problem.keys {
        p.block_size = count(block_size);
        p.block_shift = if block_size.is_power_of_two() { block_size.trailing_zeros() as i32 } else { -1 };
        // Entries of the table are i32: blocks past their range cannot be named.
        p.blocks = count(key_rows);
    }
    p.batch_invariant = problem.batch_invariant.into();
    p.out_f32 = (problem.out_dtype == DType::F32 && problem.dtype != DType::F32).into();
}

/// Strides from sequence to sequence (0 where ragged), token to token and head to head of a tensor with or without a last dimension;
/// `leading` is the number of dimensions up to the heads, 3 or 2 where ragged.
fn row_strides(dims: &Dims, leading: usize) -> [i64; 3] {
    match dims.strides()[..leading] {
        [batch, token, head] => [batch, token, head],
        [token, head] => [0, token, head],
        _ => unreachable!("checked: two or three dimensions before the head dim"),
    }
}

fn address<M: Memory>(tensor: &Option<Tensor<M>>) -> u64 {
    tensor.as_ref().map_or(0, Tensor::address)
}

fn set_operands(p: &mut AttentionParameters, inputs: &Inputs<DeviceMemory>, outputs: &Outputs<DeviceMemory>) {
    let Inputs { q, k, v, attention } = inputs;
    let leading = q.rank() - 1;
    p.query = q.address();
    [p.query_batch_stride, p.query_token_stride, p.query_head_stride] = row_strides(q, leading);
    p.key = k.address();
    [p.key_batch_stride, p.key_token_stride, p.key_head_stride] = row_strides(k, k.rank() - 1);
    p.value = v.address();
    [p.value_batch_stride, p.value_token_stride, p.value_head_stride] = row_strides(v, v.rank() - 1);
    p.out = outputs.out.address();
    [p.out_batch_stride, p.out_token_stride, p.out_head_stride] = row_strides(&outputs.out, leading);
    if let Some(lse) = &outputs.lse {
        p.lse = lse.address();
        [p.lse_batch_stride, p.lse_token_stride, p.lse_head_stride] = row_strides(lse, leading);
    }
    p.out_aligned = writes_four(&outputs.out).into();
    p.kv_lens = address(&attention.kv_lens);
    p.cu_seqlens_q = address(&attention.cu_seqlens_q);
    p.cu_seqlens_k = address(&attention.cu_seqlens_k);
    if let Some(table) = &attention.block_table {
        p.block_table = table.address();
        p.block_table_stride = table.strides()[0];
    }
}

/// Whether every row starts at a multiple of 16 bytes.
fn reads_16_bytes(tensor: &Tensor<DeviceMemory>) -> bool {
    let size = tensor.dtype().size() as i64;
    let rows = tensor.shape().iter().zip(tensor.strides()).take(tensor.rank() - 1);
    tensor.address().is_multiple_of(16)
        && rows.into_iter().all(|(&n, &stride)| n <= 1 || (stride.wrapping_mul(size)) % 16 == 0)
}

/// Whether every row starts at a multiple of four elements.
fn writes_four(out: &TensorMut<DeviceMemory>) -> bool {
    let size = 4 * out.dtype().size() as u64;
    let rows = out.shape().iter().zip(out.strides()).take(out.rank() - 1);
    out.address().is_multiple_of(size) && rows.into_iter().all(|(&n, &stride)| n <= 1 || stride % 4 == 0)
}

fn set_variant(p: &mut AttentionParameters, problem: &Problem, inputs: &Inputs<DeviceMemory>) {
    let attention = &inputs.attention;
    let variant = &problem.variant;
    let bound = |side: Option<usize>| {
        side.and_then(|keys| i64::try_from(keys).ok()).unwrap_or(UNBOUNDED).min(UNBOUNDED)
    };
    p.window_left = bound(variant.window.left);
    p.window_right = if variant.causal { 0 } else { bound(variant.window.right) };
    p.scale = inputs.scale();
    p.softcap = attention.softcap.unwrap_or(0.0);
    p.bare_scores = variant.has_bare_scores().into();
    match &attention.q_offset {
        QueryOffset::BottomRight => {}
        QueryOffset::Same(offset) => (p.offset_kind, p.q_offset) = (1, *offset),
        QueryOffset::PerSequence(offsets) => (p.offset_kind, p.q_offsets) = (2, offsets.address()),
    }
    p.alibi_slopes = address(&attention.alibi_slopes);
    p.sinks = address(&attention.sinks);
    if let Some(tree) = &attention.tree_mask {
        p.tree_mask = tree.address();
        (p.tree_batch_stride, p.tree_row_stride) = (tree.strides()[0], tree.strides()[1]);
    }
    if let Some(mask) = &attention.mask {
        p.mask = mask.address();
        p.mask_type = match mask.dtype() {
            DType::Bool => 1,
            DType::F32 => 2,
            DType::F16 => 3,
            DType::BF16 => 4,
            DType::I32 => unreachable!("checked: masks are boolean or floating"),
        };
        // A dimension of 1 stands for every index.
        let stride = |i: usize| if mask.shape()[i] == 1 { 0 } else { mask.strides()[i] };
        (p.mask_batch_stride, p.mask_head_stride) = (stride(0), stride(1));
        (p.mask_row_stride, p.mask_key_stride) = (stride(2), stride(3));
    }
}
