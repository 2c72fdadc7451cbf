//! Operands as kernels take them: the parameters common to all kernels, and what strides and
//! alignment allow.

use super::lists::kv_tensor;
use super::registry::row_alignment;
use super::{DeviceMemory, work};
use crate::dtype::DType;
use crate::kernel_parameters::{
    Lengths, count, mask_kind, mask_strides, query_offset, row_strides, scale_strides,
    tree_strides, window,
};
use crate::memory::Memory;
use crate::params::{
    AttentionParameters, CacheFormat, CacheParameters, Chunk, ElementType, HeadScales,
    KeyPositions as DevicePositions, LoadKind, RowStrides, RowTensor, Window,
};
use crate::positions::{KeyOffset, KeyPositions};
use crate::problem::{Inputs, KvStorage, Outputs, Problem};
use crate::tensor::{Tensor, TensorMut};
use crate::variant::QueryOffset;

/// The parameters common to all kernels, from operands that are checked and covered by their plan.
pub(super) fn attention(
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
    workspace: u64,
) -> AttentionParameters {
    let mut parameters = AttentionParameters {
        workspace,
        max_query_len: i32::MAX,
        ..AttentionParameters::default()
    };
    set_shapes(&mut parameters, problem, inputs);
    set_operands(&mut parameters, inputs, outputs);
    set_variant(&mut parameters, problem, inputs);
    parameters
}

/// Loads that keys and values allow. Queries have the same alignment.
pub(super) fn load_kind(problem: &Problem, inputs: &Inputs<DeviceMemory>) -> LoadKind {
    let second = [inputs.attention.second_k, inputs.second_values()];
    let operands = [&inputs.q, &inputs.k, &inputs.v].into_iter().chain(second.iter().flatten());
    match { operands }.all(reads_16_bytes) {
        true => aligned_load_kind(problem),
        false => LoadKind::Elements,
    }
}

/// Loads of rows that start at multiples of 16 bytes.
pub(super) fn aligned_load_kind(problem: &Problem) -> LoadKind {
    let rows = [(problem.head_dim, problem.key_dtype), (problem.value_dim, problem.value_dtype)];
    let fill_chunks = rows.iter().all(|(dim, dtype)| (dim * dtype.size()).is_multiple_of(16));
    match fill_chunks && work::page_aligned_16(problem) {
        true => LoadKind::PageAligned16,
        false => LoadKind::Chunks,
    }
}

/// Whether rows of blocks start at multiples of what kernels assume, and runs of 16 rows equally
/// far from multiples of 16 bytes.
pub(super) fn reads_block_rows(tensor: &Tensor<DeviceMemory>) -> bool {
    let size = tensor.dtype().size() as i64;
    let Some((&blocks, rows)) = tensor.shape().split_last() else { return false };
    let alignment = row_alignment(blocks * tensor.dtype().size()) as i64;
    let aligned = |(&n, &stride): (&usize, &i64)| {
        n <= 1 || stride.checked_mul(size).is_some_and(|bytes| bytes % alignment == 0)
    };
    // Blocks of a pool, or sequences of a batch.
    let first = rows.first().is_none_or(|&n| {
        rows.len() < 3 || n <= 1 || tensor.strides()[0].wrapping_mul(size) % 16 == 0
    });
    tensor.address().is_multiple_of(alignment as u64)
        && first
        && rows.iter().zip(tensor.strides()).all(aligned)
}

/// Whether the rows of blocks of a token follow one another, head by head, and start at multiples
/// of 16 bytes together.
pub(super) fn reads_joined_rows(tensor: &Tensor<DeviceMemory>) -> bool {
    let heads = tensor.rank() - 2;
    starts_at_16(tensor, heads) && tensor.strides()[heads] == tensor.shape()[heads + 1] as i64
}

/// The parameters of a cache that is not stored in the type of queries.
pub(super) fn cache_parameters(
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
) -> CacheParameters {
    let attention = &inputs.attention;
    let strides = |scales: &Option<Tensor<DeviceMemory>>| {
        scales.as_ref().map_or(RowStrides::default(), |scales| scale_strides(scales))
    };
    CacheParameters {
        key_scales: address(&attention.k_scales),
        value_scales: address(inputs.value_scales()),
        key_scale_strides: strides(&attention.k_scales),
        value_scale_strides: strides(inputs.value_scales()),
        key_format: CacheFormat::from_dtype(problem.key_dtype),
        value_format: CacheFormat::from_dtype(problem.value_dtype),
        query_type: ElementType::from_dtype(problem.dtype),
        unused: 0,
    }
}

/// Scales of which each head has one, if there are any.
pub(super) fn head_scales(scales: &Option<Tensor<DeviceMemory>>) -> HeadScales {
    let Some(scales) = scales else { return HeadScales::default() };
    let last = scales.shape().last().zip(scales.strides().last());
    let stride = last.map_or(0, |(&heads, &stride)| if heads > 1 { stride } else { 0 });
    HeadScales { pointer: scales.address(), stride, sequence_stride: 0 }
}

/// Whether all keys of a head share a scale, and all values.
pub(super) fn has_head_scales(inputs: &Inputs<DeviceMemory>) -> bool {
    is_per_head(&inputs.attention.k_scales) && is_per_head(inputs.value_scales())
}

/// Whether there is at most one scale per head.
pub(super) fn is_per_head(scales: &Option<Tensor<DeviceMemory>>) -> bool {
    scales.as_ref().is_none_or(|scales| {
        let (_, outer) = scales.shape().split_last().expect("checked: of heads");
        outer.iter().all(|&n| n == 1)
    })
}

fn set_shapes(
    parameters: &mut AttentionParameters,
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
) {
    parameters.batch = count(problem.batch);
    parameters.kv_heads = count(problem.kv_heads);
    parameters.group = count(problem.group());
    parameters.head_dim = count(problem.head_dim);
    parameters.value_dim = count(problem.value_dim);
    let lengths = Lengths::from_operands(problem, inputs);
    parameters.query_len = lengths.query_len;
    parameters.kv_len = lengths.kv_len;
    parameters.query_len_bound = lengths.query_len_bound;
    parameters.kv_len_bound = lengths.kv_len_bound;
    parameters.blocks = lengths.blocks;
    if let KvStorage::Paged { block_size } = problem.keys {
        parameters.block_size = count(block_size);
        parameters.block_shift =
            if block_size.is_power_of_two() { block_size.trailing_zeros() as i32 } else { -1 };
    }
    parameters.batch_invariant = problem.batch_invariant.into();
    parameters.out_f32 = (problem.out_dtype == DType::F32 && problem.dtype != DType::F32).into();
}

/// Keys or values as kernels read them.
pub(super) fn address<M: Memory>(tensor: &Option<Tensor<M>>) -> u64 {
    tensor.as_ref().map_or(0, Tensor::address)
}

fn set_operands(
    parameters: &mut AttentionParameters,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) {
    let Inputs { q, k, v, attention } = inputs;
    let leading = q.rank() - 1;
    let out = &outputs.out;
    parameters.query = RowTensor { pointer: q.address(), strides: row_strides(q, leading) };
    parameters.keys = kv_tensor(k);
    parameters.values = kv_tensor(v);
    parameters.out = RowTensor { pointer: out.address(), strides: row_strides(out, leading) };
    if let Some(lse) = &outputs.lse {
        parameters.lse = RowTensor { pointer: lse.address(), strides: row_strides(lse, leading) };
    }
    parameters.out_aligned = writes_four(out).into();
    parameters.kv_lens = address(&attention.kv_lens);
    parameters.cu_seqlens_q = address(&attention.cu_seqlens_q);
    parameters.cu_seqlens_k = address(&attention.cu_seqlens_k);
    if let Some(table) = &attention.block_table {
        parameters.block_table = table.address();
        parameters.block_table_stride = table.strides()[0];
    }
}

/// Whether every row starts at a multiple of 16 bytes.
pub(super) fn reads_16_bytes(tensor: &Tensor<DeviceMemory>) -> bool {
    starts_at_16(tensor, tensor.rank() - 1)
}

/// Whether all that `leading` dimensions count starts at a multiple of 16 bytes.
fn starts_at_16(tensor: &Tensor<DeviceMemory>, leading: usize) -> bool {
    let size = tensor.dtype().size() as i64;
    let counted = tensor.shape().iter().zip(tensor.strides()).take(leading);
    tensor.address().is_multiple_of(16)
        && counted.into_iter().all(|(&n, &stride)| n <= 1 || (stride.wrapping_mul(size)) % 16 == 0)
}

/// Whether every row starts at a multiple of four elements.
pub(super) fn writes_four(out: &TensorMut<DeviceMemory>) -> bool {
    has_rows_at(4, out)
}

/// Whether every row starts at a multiple of 16 bytes.
pub(super) fn writes_16_bytes(out: &TensorMut<DeviceMemory>) -> bool {
    has_rows_at(16 / out.dtype().size(), out)
}

/// Whether every row starts at a multiple of `elements`.
fn has_rows_at(elements: usize, out: &TensorMut<DeviceMemory>) -> bool {
    let rows = out.shape().iter().zip(out.strides()).take(out.rank() - 1);
    out.address().is_multiple_of((elements * out.dtype().size()) as u64)
        && rows.into_iter().all(|(&n, &stride)| n <= 1 || stride % elements as i64 == 0)
}

/// Parameters of kernels for positions of keys, which have been checked.
fn device_positions(positions: &Option<KeyPositions<Tensor<DeviceMemory>>>) -> DevicePositions {
    let Some(positions) = positions else {
        return DevicePositions { stride: 1, ..DevicePositions::default() };
    };
    let (offset, offsets) = match &positions.offset {
        KeyOffset::Same(offset) => (*offset, 0),
        KeyOffset::PerSequence(offsets) => (0, offsets.address()),
    };
    let stride = positions.stride as u64;
    // Kernels do not divide by 1, whose inverse would not fit.
    let inverse = if stride > 1 { u64::MAX / stride + 1 } else { 0 };
    DevicePositions { offsets, offset, stride: stride as i64, inverse }
}

fn set_variant(
    parameters: &mut AttentionParameters,
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
) {
    let attention = &inputs.attention;
    let variant = &problem.variant;
    parameters.window = window(variant);
    match variant.chunk {
        // A chunk of one position is a window of one key; its inverse would not fit.
        Some(1) => parameters.window = Window { left: 0, right: 0 },
        Some(chunk) => {
            parameters.chunk = Chunk { length: chunk as i64, inverse: u64::MAX / chunk as u64 + 1 };
        }
        None => {}
    }
    parameters.scale = inputs.scale();
    parameters.softcap = attention.softcap.unwrap_or(0.0);
    parameters.unmodified_scores = variant.has_unmodified_scores().into();
    (parameters.offset_kind, parameters.q_offset) = query_offset(&attention.q_offset);
    if let QueryOffset::PerSequence(offsets) = &attention.q_offset {
        parameters.q_offsets = offsets.address();
    }
    parameters.key_positions = device_positions(&attention.key_positions);
    parameters.alibi_slopes = address(&attention.alibi_slopes);
    parameters.sinks = address(&attention.sinks);
    if let Some(tree) = &attention.tree_mask {
        parameters.tree_mask = tree.address();
        parameters.tree_strides = tree_strides(tree);
    }
    if let Some(mask) = &attention.mask {
        parameters.mask = mask.address();
        parameters.mask_kind = mask_kind(Some(mask.dtype()));
        parameters.mask_strides = mask_strides(mask);
    }
}
