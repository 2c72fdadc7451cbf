//! Keys in two parts: latent rows and rotary rows in tensors of their own.

use super::{FLOATS, GRANULARITIES};
use crate::case::{KvLayout, Layout};
use crate::place::MemorySpec;
use crate::spec::{
    CacheSpec, Entries, Hide, Keys, ListSpec, MaskSpec, OffsetSpec, OperandMemory, Scales, Spec,
};
use regard::{DType, ListEntries};

/// Dims of latent and of rotary rows: dims of models, and others around vectors.
const DIMS: [(usize, usize); 6] = [(512, 64), (256, 64), (128, 64), (32, 64), (23, 18), (1, 3)];

/// All of them.
pub(super) fn two_parts() -> Vec<Spec> {
    [dims(), storage(), latent(), caches(), lists(), features()].into_iter().flatten().collect()
}

/// Pages of `block_size` slots.
fn paged(block_size: usize) -> Keys {
    Keys::Paged { block_size, interleaved: false }
}

/// Every dims in every type: decoding, verifying and prefill, of one head and of several.
fn dims() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, (latent, rotary)) in DIMS.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            for (k, (rows, kv_len)) in [(1, 129), (3, 70), (33, 66)].into_iter().enumerate() {
                let (query_heads, kv_heads) = [(4, 1), (16, 1), (6, 3)][(i + j + k) % 3];
                let name = format!("two-parts/{rows}-rows-{latent}-{rotary}-{dtype}");
                specs.push(Spec {
                    causal: (i + j + k) % 2 == 0,
                    ..Spec::new(name)
                        .lengths(&[(rows, kv_len)])
                        .heads(query_heads, kv_heads)
                        .two_parts(latent, rotary)
                        .dtype(dtype)
                });
            }
        }
    }
    specs
}

/// Pages of all sizes, ragged and dense keys, head-major ones, gaps and unaligned rows.
fn storage() -> Vec<Spec> {
    let base = |name: &str| {
        let spec = Spec::new(format!("two-parts/{name}")).lengths(&[(2, 70), (2, 0), (2, 131)]);
        Spec { causal: true, stray_entries: true, ..spec.heads(8, 2).two_parts(128, 64) }
    };
    let mut specs = Vec::new();
    for (i, block_size) in [1, 7, 16, 64].into_iter().enumerate() {
        let kv_layout = [KvLayout::Nhd, KvLayout::Hnd][i % 2];
        let spec = base(&format!("pages-of-{block_size}")).dtype(FLOATS[i % 3]);
        specs.push(Spec { keys: paged(block_size), kv_layout, padding: [0, 3][i / 2], ..spec });
    }
    for (i, dtype) in FLOATS.into_iter().enumerate() {
        let ragged = base(&format!("ragged-{dtype}")).dtype(dtype);
        specs.push(Spec {
            keys: Keys::Ragged { slack: i },
            ragged_queries: true,
            padding: [0, 8, 1][i],
            ..ragged.lengths(&[(1, 90), (70, 70), (0, 5), (4, 40)])
        });
        let k = MemorySpec { first: [0, 8, 3][i], order: [0, 1, 2], gaps: [0, 8, 3] };
        specs.push(Spec {
            keys: Keys::Batched { slack: 2 },
            layout: [Layout::Bshd, Layout::Bhsd][i % 2],
            memory: OperandMemory { k, ..OperandMemory::default() },
            ..base(&format!("dense-{dtype}")).dtype(dtype)
        });
    }
    specs
}

/// The dims of DeepSeek's models in 16 bits, for which Hopper has a kernel: every tile of it, TMA
/// boxes of several sizes, and operands that it cannot read.
fn latent() -> Vec<Spec> {
    let storage = [
        paged(64),
        paged(16),
        paged(8),
        paged(5),
        Keys::Batched { slack: 1 },
        Keys::Ragged { slack: 2 },
    ];
    let mut specs = Vec::new();
    for (i, keys) in storage.into_iter().enumerate() {
        for (j, dtype) in [DType::F16, DType::BF16].into_iter().enumerate() {
            let (rows, heads) = [(1, 16), (2, 40), (1, 128), (3, 1)][(i + 2 * j) % 4];
            let spec = Spec::new(format!("two-parts/latent-{i}-{dtype}"));
            specs.push(Spec {
                keys,
                causal: j == 0,
                kv_layout: [KvLayout::Nhd, KvLayout::Hnd][usize::from(i == 1)],
                padding: if i == 2 { 3 } else { 0 },
                stray_entries: i < 2,
                ..spec
                    .lengths(&[(rows, if heads > 16 { 200 } else { 700 }), (rows, 0), (rows, 65)])
                    .heads(heads, 1)
                    .two_parts(512, 64)
                    .dtype(dtype)
            });
        }
    }
    let kinds = [
        (Keys::Batched { slack: 3 }, ListEntries::Keys),
        (Keys::Ragged { slack: 1 }, ListEntries::Keys),
        (paged(64), ListEntries::Keys),
        (paged(7), ListEntries::Slots),
        (paged(16), ListEntries::Pages),
    ];
    for (i, (keys, of)) in kinds.into_iter().enumerate() {
        let lists = ListSpec { of, ..ListSpec::new(90 + 40 * i, Entries::Any) };
        let dtype = [DType::BF16, DType::F16][i % 2];
        let spec = Spec::new(format!("two-parts/latent-lists-of-{of:?}-{i}").to_lowercase());
        let spec = Spec { keys, causal: of == ListEntries::Keys, ..spec };
        specs.push(
            spec.lengths(&[(2, 300), (2, 40)])
                .heads([16, 70, 128][i % 3], 1)
                .two_parts(512, 64)
                .dtype(dtype)
                .lists(lists),
        );
    }
    specs
}

/// Codes and blocks: both parts have the scales of the keys.
fn caches() -> Vec<Spec> {
    let formats = [DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0, DType::F32];
    let mut specs = Vec::new();
    for (i, format) in formats.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let granularity = GRANULARITIES[(i + j) % 4];
            let rows = [1, 5, 40][(i + j) % 3];
            let name = format!("two-parts/{format}-{granularity:?}-{dtype}");
            specs.push(Spec {
                causal: j % 2 == 0,
                keys: [paged(16), Keys::Batched { slack: 3 }][j % 2],
                ..Spec::new(name.to_lowercase())
                    .lengths(&[(rows, 150), (rows, 33)])
                    .heads([16, 4][i % 2], [1, 2][i % 2])
                    .two_parts(96, 32)
                    .dtype(dtype)
                    .cache(CacheSpec::new(format, granularity, Scales::Fitted))
            });
        }
    }
    specs
}

/// Selected keys, of every kind of list.
fn lists() -> Vec<Spec> {
    let kinds = [
        (Keys::Batched { slack: 3 }, ListEntries::Keys),
        (paged(16), ListEntries::Keys),
        (paged(7), ListEntries::Slots),
        (paged(16), ListEntries::Pages),
        (paged(32), ListEntries::NumberedPages),
    ];
    let mut specs = Vec::new();
    for (i, (keys, of)) in kinds.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let (query_heads, kv_heads) = [(16, 1), (6, 2), (70, 1)][(i + j) % 3];
            let entries = [Entries::Any, Entries::Sorted, Entries::All][(i + 2 * j) % 3];
            let lists = ListSpec {
                of,
                per_head: kv_heads > 1,
                counts: j != 1,
                ..ListSpec::new([40, 70, 130][j], entries)
            };
            let name = format!("two-parts/lists-of-{of:?}-{i}-{dtype}");
            let spec =
                Spec { keys, causal: of == ListEntries::Keys, ..Spec::new(name.to_lowercase()) };
            specs.push(
                spec.lengths(&[(2, 300), (2, 40), (2, 0)])
                    .heads(query_heads, kv_heads)
                    .two_parts(64, 32)
                    .dtype(dtype)
                    .lists(lists),
            );
        }
    }
    specs
}

/// Features of scores and ranges, splits of batch-invariant mode, and prefix groups.
fn features() -> Vec<Spec> {
    let mask = |dtype, hide| MaskSpec { dtype, hide, broadcast: [false, true, false, false] };
    let mut specs = Vec::new();
    for (rows, dtype) in [(1, DType::BF16), (6, DType::F32), (40, DType::F16)] {
        let spec = |name: &str| {
            let name = format!("two-parts/{name}-{rows}-rows");
            let spec = Spec::new(name).lengths(&[(rows, 150), (rows, 64)]).heads(8, 1);
            Spec { keys: paged(16), ..spec.two_parts(128, 64).dtype(dtype) }
        };
        let long = spec("invariant").lengths(&[(rows, 1300), (rows, 64)]);
        let shared = spec("prefix").lengths(&[(rows, 250), (rows, 190), (rows, 170)]);
        specs.extend([
            Spec { softcap: Some(20.0), sinks: true, ..spec("softcap-sinks") },
            Spec { alibi: true, offset: OffsetSpec::Same(40), ..spec("alibi") },
            Spec { mask: Some(mask(DType::F32, Hide::Infinite)), ..spec("mask-f32") },
            Spec { tree: true, ..spec("tree") },
            Spec { causal: true, batch_invariant: true, ..long },
            Spec { causal: true, out_dtype: DType::F32, ..spec("out-f32") },
            Spec { causal: true, ..shared.prefixes(&[0], &[128]) },
        ]);
    }
    specs
}
