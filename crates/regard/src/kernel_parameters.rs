//! From operands to the kernel parameters that CUDA and Metal share: lengths, windows, strides.

use crate::dtype::DType;
use crate::memory::Memory;
use crate::params::{
    MaskKind, MaskStrides, OffsetKind, RowStrides, TokenStrides, TreeStrides, Window,
};
use crate::problem::{Inputs, KeyLists, KvStorage, Problem, QueryStorage};
use crate::tensor::{Dims, Tensor};
use crate::variant::{QueryOffset, Variant};

/// A window bound that nothing reaches. Distances of queries and keys are below 2^48, so sums with
/// it do not overflow.
const UNBOUNDED: i64 = 1 << 50;

/// A number that checking has bounded by the range of an `i32`.
pub(crate) fn count(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// Lengths, as far as shapes tell them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// Query tokens per sequence; of all sequences if queries are ragged.
    pub query_len: i32,
    /// Keys per sequence; of all sequences if keys are ragged; 0 for an empty pool.
    pub kv_len: i32,
    /// Bound on the query tokens of a sequence.
    pub query_len_bound: i32,
    /// Bound on the keys of a sequence.
    pub kv_len_bound: i32,
    /// Pages of the pool; 0 without pages.
    pub blocks: i32,
}

impl Lengths {
    /// The lengths of checked operands.
    pub(crate) fn from_operands<M: Memory>(problem: &Problem, inputs: &Inputs<M>) -> Lengths {
        let attention = &inputs.attention;
        let key_rows = inputs.k.shape()[0];
        // A dimension of 1 of a mask stands for every index.
        let mask = |i: usize| match &attention.mask {
            Some(mask) if mask.shape()[i] != 1 => mask.shape()[i],
            _ => usize::MAX,
        };
        let tree = attention.tree_mask.as_ref().map_or(usize::MAX, |tree| tree.shape()[1]);
        Lengths {
            query_len: count(match problem.queries {
                QueryStorage::Batched => problem.query_len,
                QueryStorage::Ragged { total } => total,
            }),
            kv_len: count(match problem.keys {
                // An empty pool has no keys, so lengths are ignored.
                _ if inputs.k.is_empty() => 0,
                KvStorage::Ragged => key_rows,
                KvStorage::Batched | KvStorage::Paged { .. } => problem.kv_len,
            }),
            query_len_bound: count(problem.query_len.min(mask(2)).min(tree)),
            kv_len_bound: count(problem.kv_len.min(mask(3))),
            blocks: match problem.keys {
                // Entries of the table are i32: pages past their range cannot be named.
                KvStorage::Paged { .. } => count(key_rows),
                KvStorage::Batched | KvStorage::Ragged => 0,
            },
        }
    }
}

/// The window of rows, the causal mask included as a right bound of 0.
pub(crate) fn window(variant: &Variant) -> Window {
    let bound = |side: Option<usize>| {
        side.and_then(|keys| i64::try_from(keys).ok()).unwrap_or(UNBOUNDED).min(UNBOUNDED)
    };
    Window {
        left: bound(variant.window.left),
        right: if variant.causal { 0 } else { bound(variant.window.right) },
    }
}

/// The source of a sequence's first position, and the offset that all sequences share; 0 if they
/// share none.
pub(crate) fn query_offset<T>(offset: &QueryOffset<T>) -> (OffsetKind, i64) {
    match offset {
        QueryOffset::BottomRight => (OffsetKind::BottomRight, 0),
        QueryOffset::Same(offset) => (OffsetKind::Same, *offset),
        QueryOffset::PerSequence(_) => (OffsetKind::PerSequence, 0),
    }
}

/// Strides from sequence to sequence (0 if ragged), token to token and head to head. The tensor may
/// lack the last dimension. `leading` is the number of dimensions up to the heads: 3, or 2 if
/// ragged.
///
/// A dimension of 1 may have any stride, and gets 0: kernels form addresses of rows that do not
/// exist, which have to be as aligned as those that do.
pub(crate) fn row_strides(dims: &Dims, leading: usize) -> RowStrides {
    let stride = |i| broadcast_stride(dims, i);
    match leading {
        3 => RowStrides { batch: stride(0), token: stride(1), head: stride(2) },
        2 => RowStrides { batch: 0, token: stride(0), head: stride(1) },
        _ => unreachable!("checked: two or three dimensions before the head dim"),
    }
}

/// Strides of a tensor of tokens and heads, `[total, H, D]`.
pub(crate) fn token_strides(dims: &Dims) -> TokenStrides {
    TokenStrides { token: dims.strides()[0], head: dims.strides()[1] }
}

/// The stride along a dimension; 0 if it is 1.
fn broadcast_stride(dims: &Dims, i: usize) -> i64 {
    if dims.shape()[i] == 1 { 0 } else { dims.strides()[i] }
}

/// As [`row_strides`], of scales without a last dimension: a dimension of 1 stands for every index.
pub(crate) fn scale_strides(scales: &Dims) -> RowStrides {
    let stride = |i| broadcast_stride(scales, i);
    match scales.rank() {
        2 => RowStrides { batch: 0, token: stride(0), head: stride(1) },
        _ => RowStrides { batch: stride(0), token: stride(1), head: stride(2) },
    }
}

/// Strides of lists, of their counts or of their numbers, zeros if there are none: from row to row
/// or, of pages, from sequence to sequence. No stride of heads if all share a list.
pub(crate) fn list_strides<M: Memory>(lists: KeyLists, tensor: Option<&Tensor<M>>) -> TokenStrides {
    let (owner, head) = if lists.lists_pages() { (1, 0) } else { (0, 1) };
    tensor.map_or(TokenStrides::default(), |tensor| TokenStrides {
        token: tensor.strides()[owner],
        head: broadcast_stride(tensor, head),
    })
}

/// Strides of a mask: a dimension of 1 stands for every index.
pub(crate) fn mask_strides(mask: &Dims) -> MaskStrides {
    let stride = |i| broadcast_stride(mask, i);
    MaskStrides { batch: stride(0), head: stride(1), row: stride(2), key: stride(3) }
}

/// Strides of a tree mask.
pub(crate) fn tree_strides(tree: &Dims) -> TreeStrides {
    TreeStrides { batch: tree.strides()[0], row: tree.strides()[1] }
}

/// The kind of a mask of this type, as kernels see it.
pub(crate) fn mask_kind(mask: Option<DType>) -> MaskKind {
    match mask {
        None => MaskKind::None,
        Some(DType::Bool) => MaskKind::Bool,
        Some(DType::F32) => MaskKind::F32,
        Some(DType::F16) => MaskKind::F16,
        Some(DType::BF16) => MaskKind::BF16,
        Some(_) => unreachable!("checked: masks are boolean or floating"),
    }
}
