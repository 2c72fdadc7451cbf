//! Pairs of features in one kernel, at every class of head dims and in every type. A pair that
//! works in bf16 at head dim 128 may fail in f16 at 192, because these are separate modules.

use super::FLOATS;
use crate::spec::{Hide, Keys, MaskSpec, Spec};
use regard::DType;

/// The smallest and the largest head dims of each class that a GPU's prefill modules are compiled
/// for.
const CLASSES: [(usize, usize); 12] = [
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
    (200, 200),
    (256, 256),
    (512, 512),
    (576, 512),
    (576, 576),
];

/// Sizes that prefill kernels take, with more than one tile of rows and of keys.
const LENGTHS: (usize, usize) = (97, 130);

/// Slopes at every class of head dims: rows near position 0, whose distances go below 0.
pub(super) fn slopes() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, (head_dim, value_dim)) in CLASSES.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let causal = (i + j) % 2 == 0;
            let name = format!(
                "pairs/alibi{}-{head_dim}-{value_dim}-{dtype}",
                if causal { "-causal" } else { "" }
            );
            let spec = Spec::new(name).lengths(&[(LENGTHS.0, LENGTHS.0), LENGTHS]).heads(4, 2);
            let spec = Spec { ragged_queries: true, ..spec };
            let softcap = (i % 3 == 1).then_some(20.0);
            let sinks = i % 3 == 2;
            specs.push(Spec {
                alibi: true,
                causal,
                softcap,
                sinks,
                ..spec.dims(head_dim, value_dim).dtype(dtype)
            });
        }
    }
    specs
}

/// A tree under masks of every type that leave some tiles as they are: there the tree still hides
/// keys.
pub(super) fn trees_under_masks() -> Vec<Spec> {
    let masks = [
        (DType::Bool, [true, false, true, true], Hide::Infinite),
        (DType::Bool, [true, true, false, true], Hide::Infinite),
        (DType::F32, [true, false, true, true], Hide::Infinite),
        (DType::F16, [true, true, false, false], Hide::Blocks),
        (DType::BF16, [true, true, true, false], Hide::Blocks),
    ];
    let storages = [
        ("batched", false, Keys::Batched { slack: 3 }),
        ("ragged", true, Keys::Ragged { slack: 0 }),
        ("pages-of-3", false, Keys::Paged { block_size: 3, interleaved: false }),
        ("pages-of-16", true, Keys::Paged { block_size: 16, interleaved: true }),
    ];
    let mut specs = Vec::new();
    for (i, (mask_type, broadcast, hide)) in masks.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let (head_dim, value_dim) =
                [(17, 58), (64, 64), (97, 97), (128, 128), (512, 512)][(i + j) % 5];
            let (storage, ragged_queries, keys) = storages[(i + 2 * j) % 4];
            let name = format!("pairs/tree-and-{mask_type}-mask-{i}-{storage}-{head_dim}-{dtype}");
            let spec = Spec::new(name).lengths(&[(70, 200), (70, 70)]).heads(4, 2);
            let mask = Some(MaskSpec { dtype: mask_type, hide, broadcast });
            let spec = Spec { ragged_queries, keys, mask, tree: true, ..spec };
            specs.push(spec.dims(head_dim, value_dim).dtype(dtype));
        }
    }
    specs
}
