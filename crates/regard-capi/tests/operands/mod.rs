//! Operands as C describes them.

use super::types::{self, Operands, REGARD_MAX_RANK, Tensor};
use regard::{DType, Inputs, KeyOffset, KeyPositions, QueryOffset, Values};
use std::ptr;

/// The outputs of a call.
pub struct Results {
    pub out: Tensor,
    pub lse: Option<Tensor>,
}

/// A tensor of C.
pub fn tensor(data: *mut u8, dims: &regard::Dims) -> Tensor {
    let dtype = match dims.dtype() {
        DType::F32 => types::DType::F32,
        DType::F16 => types::DType::F16,
        DType::BF16 => types::DType::Bf16,
        DType::I32 => types::DType::I32,
        DType::Bool => types::DType::Bool,
        DType::E4M3 => types::DType::E4m3,
        DType::E5M2 => types::DType::E5m2,
        DType::I8 => types::DType::I8,
        DType::Q8_0 => types::DType::Q8_0,
        DType::Q4_0 => types::DType::Q4_0,
        DType::Mla656 => types::DType::Mla656,
        DType::Mla656Latent => types::DType::Mla656Latent,
        other => unreachable!("no random problem has elements of type {other}"),
    };
    let (mut shape, mut strides) = ([0; REGARD_MAX_RANK], [0; REGARD_MAX_RANK]);
    for (i, (&n, &stride)) in dims.shape().iter().zip(dims.strides()).enumerate() {
        (shape[i], strides[i]) = (n as i64, stride);
    }
    Tensor {
        data: data.cast(),
        dtype: dtype as i32,
        rank: dims.rank() as u32,
        shape,
        strides,
        options: types::REGARD_STRIDED,
        reserved: 0,
        offset: 0,
    }
}

/// The option bits of an attention.
fn options(attention: &regard::Attention<regard::Tensor>) -> u32 {
    let has_offset = matches!(attention.q_offset, QueryOffset::Same(_));
    let options = [
        (attention.causal, types::REGARD_CAUSAL),
        (attention.window.left.is_some(), types::REGARD_WINDOW_LEFT),
        (attention.window.right.is_some(), types::REGARD_WINDOW_RIGHT),
        (attention.chunk.is_some(), types::REGARD_CHUNK),
        (attention.values == Values::KeyPrefix, types::REGARD_VALUES_KEY_PREFIX),
        (attention.softcap.is_some(), types::REGARD_SOFTCAP),
        (attention.indices_are_slots, types::REGARD_INDICES_ARE_SLOTS),
        (attention.key_positions.is_some(), types::REGARD_KEY_POSITIONS),
        (attention.batch_invariant, types::REGARD_BATCH_INVARIANT),
        (attention.scale.is_some(), types::REGARD_SCALE),
        (has_offset, types::REGARD_Q_OFFSET),
    ];
    options.into_iter().filter(|(given, _)| *given).fold(0, |all, (_, option)| all | option)
}

/// Calls `work` with the operands of a call; `given` describes each input. Values that are a prefix
/// of the keys can be left out.
pub fn with_operands<R>(
    inputs: &Inputs,
    results: &Results,
    has_v: bool,
    mut given: impl FnMut(&regard::Tensor) -> Tensor,
    work: impl FnOnce(&Operands) -> R,
) -> R {
    let attention = &inputs.attention;
    let tensors = attention.map(|_, input| given(&input));
    let pointer = |tensor: Option<&Tensor>| tensor.map_or(ptr::null(), ptr::from_ref);
    let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(|input| given(&input));
    let side = |side: Option<usize>| side.map_or(0, |side| i64::try_from(side).unwrap_or(i64::MAX));
    let operands = Operands {
        size: size_of::<Operands>(),
        q: &q,
        k: &k,
        v: if has_v { &v } else { ptr::null() },
        out: &results.out,
        lse: pointer(results.lse.as_ref()),
        mask: pointer(tensors.mask.as_ref()),
        alibi_slopes: pointer(tensors.alibi_slopes.as_ref()),
        sinks: pointer(tensors.sinks.as_ref()),
        tree_mask: pointer(tensors.tree_mask.as_ref()),
        kv_lens: pointer(tensors.kv_lens.as_ref()),
        q_offsets: pointer(tensors.q_offset.tensor()),
        cu_seqlens_q: pointer(tensors.cu_seqlens_q.as_ref()),
        cu_seqlens_k: pointer(tensors.cu_seqlens_k.as_ref()),
        block_table: pointer(tensors.block_table.as_ref()),
        options: options(attention),
        scale: attention.scale.unwrap_or(0.0),
        softcap: attention.softcap.unwrap_or(0.0),
        chunk: attention.chunk.map_or(0, |chunk| u32::try_from(chunk).unwrap_or(u32::MAX)),
        window_left: side(attention.window.left),
        window_right: side(attention.window.right),
        q_offset: match attention.q_offset {
            QueryOffset::Same(offset) => offset,
            _ => 0,
        },
        k_scales: pointer(tensors.k_scales.as_ref()),
        v_scales: pointer(tensors.v_scales.as_ref()),
        key_indices: pointer(tensors.key_indices.as_ref()),
        key_counts: pointer(tensors.key_counts.as_ref()),
        key_offsets: pointer(tensors.key_positions.as_ref().and_then(KeyPositions::tensor)),
        key_offset: match attention.key_positions {
            Some(KeyPositions { offset: KeyOffset::Same(offset), .. }) => offset,
            _ => 0,
        },
        key_stride: attention.key_positions.map_or(0, |positions| positions.stride as i64),
        prefix_groups: pointer(tensors.prefix_groups.as_ref()),
        prefix_lens: pointer(tensors.prefix_lens.as_ref()),
        page_indices: pointer(tensors.page_indices.as_ref()),
        page_list_lens: pointer(tensors.page_list_lens.as_ref()),
        page_numbers: pointer(tensors.page_numbers.as_ref()),
        second_k: pointer(tensors.second_k.as_ref()),
        second_v: pointer(tensors.second_v.as_ref()),
        second_k_scales: pointer(tensors.second_k_scales.as_ref()),
        second_v_scales: pointer(tensors.second_v_scales.as_ref()),
        second_indices: pointer(tensors.second_indices.as_ref()),
        second_counts: pointer(tensors.second_counts.as_ref()),
        rotary_k: pointer(tensors.rotary_k.as_ref()),
    };
    work(&operands)
}
