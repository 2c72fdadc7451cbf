//! Some heads of a call, as a call of its own: every head is attended to by itself.

use super::DeviceMemory;
use super::work::with_heads;
use crate::problem::{Inputs, Outputs, Problem};
use crate::tensor::Tensor;
use crate::variant::Attention;
use std::ops::Range;

/// A call of some key/value heads, with the query heads that attend to them.
pub(super) struct HeadCall<'a> {
    pub problem: Problem,
    pub inputs: Inputs<'a, DeviceMemory>,
    pub outputs: Outputs<'a, DeviceMemory>,
}

impl<'a> HeadCall<'a> {
    /// Key/value heads `heads` of a call of prefill: without lists of keys, or keys in two parts.
    pub(super) fn new(
        problem: &Problem,
        inputs: &Inputs<'a, DeviceMemory>,
        outputs: &'a Outputs<DeviceMemory>,
        heads: &Range<usize>,
    ) -> Self {
        let group = problem.group();
        let query_heads = heads.start * group..heads.end * group;
        let Inputs { q, k, v, attention } = inputs;
        let per_query_head = |tensor: &Option<Tensor<'a, _>>| {
            tensor.as_ref().map(|tensor| tensor.narrow_at(0, &query_heads))
        };
        // Heads may share scales.
        let scales = |tensor: &Option<Tensor<'a, _>>| {
            tensor.as_ref().map(|tensor| narrow_shared(tensor, tensor.rank() - 1, heads))
        };
        let attention = Attention {
            mask: attention.mask.as_ref().map(|mask| narrow_shared(mask, 1, &query_heads)),
            alibi_slopes: per_query_head(&attention.alibi_slopes),
            sinks: per_query_head(&attention.sinks),
            k_scales: scales(&attention.k_scales),
            v_scales: scales(&attention.v_scales),
            ..*attention
        };
        // The last dimension of all three is that of a head.
        let inputs = Inputs {
            q: q.narrow_at(q.rank() - 2, &query_heads),
            k: k.narrow_at(k.rank() - 2, heads),
            v: v.narrow_at(v.rank() - 2, heads),
            attention,
        };
        let Outputs { out, lse } = outputs;
        let outputs = Outputs {
            out: out.narrow_at(out.rank() - 2, &query_heads),
            lse: lse.as_ref().map(|lse| lse.narrow_at(lse.rank() - 1, &query_heads)),
        };
        HeadCall { problem: with_heads(problem, heads.len()), inputs, outputs }
    }
}

/// A part of a dimension, all of which one element may stand for.
fn narrow_shared<'a>(
    tensor: &Tensor<'a, DeviceMemory>,
    dim: usize,
    range: &Range<usize>,
) -> Tensor<'a, DeviceMemory> {
    if tensor.shape()[dim] == 1 { *tensor } else { tensor.narrow_at(dim, range) }
}
