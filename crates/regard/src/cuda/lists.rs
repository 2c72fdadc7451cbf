//! Kernel parameters of lists of keys, of pages, and of slots of a second cache.

use super::DeviceMemory;
use crate::kernel_parameters::{count, list_strides, row_strides, scale_strides};
use crate::params::{KvTensor, ListParameters, RowStrides, SecondCache, TokenStrides};
use crate::problem::{Inputs, KeyLists, KvStorage, ListEntries, ListTensors, Problem};
use crate::tensor::Tensor;

/// The lists of keys of a problem's rows, or of the pages of its sequences.
pub(super) fn list_parameters(
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
) -> Option<ListParameters> {
    let planned = problem.key_lists?;
    let ListTensors { lists, indices, counts, numbers } = inputs.list_tensors()?;
    let strides = |tensor| list_strides(lists, tensor);
    Some(ListParameters {
        indices: address(indices),
        counts: address(counts),
        index_strides: strides(indices),
        count_strides: strides(counts),
        len: count(lists.len.min(planned.len)),
        are_slots: (lists.entries == ListEntries::Slots).into(),
        sequences: count(problem.batch),
        are_pages: lists.lists_pages().into(),
        numbers: address(numbers),
        number_strides: strides(numbers),
        second: second_cache(planned, lists, inputs).unwrap_or_default(),
    })
}

/// The pages of each sequence as the list of its row's slots: for rows that see all keys.
pub(super) fn pages_as_lists(
    problem: &Problem,
    inputs: &Inputs<DeviceMemory>,
) -> Option<ListParameters> {
    let KvStorage::Paged { block_size } = problem.keys else { return None };
    let table = inputs.attention.block_table.as_ref()?;
    let lens = inputs.attention.kv_lens.as_ref();
    let strides = |token| TokenStrides { token, head: 0 };
    Some(ListParameters {
        indices: table.address(),
        counts: address(lens),
        index_strides: strides(table.strides()[0]),
        count_strides: strides(1),
        len: count(problem.kv_len),
        // Slots are found in fewer instructions, which a page of one is.
        are_slots: (block_size == 1).into(),
        are_pages: (block_size != 1).into(),
        sequences: count(problem.batch),
        ..ListParameters::default()
    })
}

/// The second cache and its lists, if there is one.
fn second_cache(
    planned: KeyLists,
    lists: KeyLists,
    inputs: &Inputs<DeviceMemory>,
) -> Option<SecondCache> {
    let attention = &inputs.attention;
    let (keys, values) = (attention.second_k?, inputs.second_values()?);
    let (indices, counts) = (attention.second_indices.as_ref(), attention.second_counts.as_ref());
    let (key_scales, value_scales) = (&attention.second_k_scales, inputs.second_value_scales());
    let &[blocks, block_size, ..] = keys.shape() else { unreachable!("checked: a pool") };
    let scale_strides = |scales: &Option<Tensor<DeviceMemory>>| {
        scales.as_ref().map_or(RowStrides::default(), |scales| scale_strides(scales))
    };
    let shift = block_size.is_power_of_two().then(|| block_size.trailing_zeros() as i32);
    Some(SecondCache {
        indices: address(indices),
        counts: address(counts),
        index_strides: list_strides(lists, indices),
        count_strides: list_strides(lists, counts),
        keys: kv_tensor(&keys),
        values: kv_tensor(&values),
        key_scales: address(key_scales.as_ref()),
        value_scales: address(value_scales.as_ref()),
        key_scale_strides: scale_strides(key_scales),
        value_scale_strides: scale_strides(value_scales),
        len: count(lists.second?.min(planned.second?)),
        blocks: count(blocks),
        block_size: count(block_size),
        block_shift: shift.unwrap_or(-1),
    })
}

/// Keys or values of a cache.
pub(super) fn kv_tensor(tensor: &Tensor<DeviceMemory>) -> KvTensor {
    KvTensor { pointer: tensor.address(), strides: row_strides(tensor, tensor.rank() - 1) }
}

fn address(tensor: Option<&Tensor<DeviceMemory>>) -> u64 {
    tensor.map_or(0, Tensor::address)
}
