//! Rows that attend to lists of keys.

use super::{FLOATS, FORMATS, GRANULARITIES, window};
use crate::case::{KvLayout, Layout};
use crate::contents::Sinks;
use crate::spec::{
    CacheSpec, Entries, Granularity, Hide, Keys, ListSpec, MaskSpec, OffsetSpec, Scales, Spec,
};
use regard::{DType, ListEntries};

const ENTRIES: [Entries; 3] = [Entries::Any, Entries::Sorted, Entries::All];
const STORAGE: [Keys; 5] = [
    Keys::Batched { slack: 5 },
    Keys::Ragged { slack: 2 },
    Keys::Paged { block_size: 16, interleaved: false },
    Keys::Paged { block_size: 7, interleaved: true },
    Keys::Paged { block_size: 1, interleaved: false },
];

/// All of them.
pub(super) fn selection() -> Vec<Spec> {
    [lengths(), repeated(), shapes(), storage(), caches(), features(), slots()]
        .into_iter()
        .flatten()
        .collect()
}

/// Lists around vectors, tiles and splits.
fn lengths() -> Vec<Spec> {
    let mut specs = Vec::new();
    let lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1023, 1025, 2050];
    for (i, len) in lengths.into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            let (q_len, dtype) = ([1, 3, 1][(i + j) % 3], FLOATS[(i + j) % 3]);
            specs.push(Spec {
                core: len == 65 || len == 129,
                batch_invariant: j == 1,
                causal: i % 2 == 0,
                ..Spec::new(format!("selection/len-{len}-{entries:?}-{dtype}").to_lowercase())
                    .lengths(&[(q_len, 1500), (q_len, 40), (q_len, 0)])
                    .dims(64, 64)
                    .dtype(dtype)
                    .lists(ListSpec { counts: j == 0, ..ListSpec::new(len, entries) })
            });
        }
    }
    specs
}

/// Lists that name each of a few keys hundreds of times: the roundings of equal probabilities are
/// equal.
fn repeated() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (keys, len) in [(2, 300), (5, 891), (9, 2050)] {
        for dtype in [DType::F16, DType::BF16] {
            specs.push(
                Spec::new(format!("selection/few-keys-{keys}-{dtype}"))
                    .lengths(&[(1, keys), (4, keys)])
                    .heads(3, 1)
                    .dims(191, 1)
                    .dtype(dtype)
                    .lists(ListSpec::new(len, Entries::Any)),
            );
        }
    }
    specs
}

/// Heads and head dims: every walk of the keys, latent heads included.
fn shapes() -> Vec<Spec> {
    let dims = [(128, 128), (576, 512), (80, 80), (40, 24), (1, 7), (512, 512), (192, 128)];
    let heads = [(4, 2), (8, 8), (12, 1), (70, 1), (140, 1), (32, 2), (9, 3)];
    let mut specs = Vec::new();
    for (i, (head_dim, value_dim)) in dims.into_iter().enumerate() {
        for (j, (query_heads, kv_heads)) in heads.into_iter().enumerate() {
            if query_heads > 32 && (i + j) % 2 == 1 {
                continue;
            }
            let dtype = FLOATS[(i + j) % 3];
            let name = format!("selection/heads-{query_heads}-{kv_heads}-{head_dim}-{dtype}");
            specs.push(Spec {
                core: i == 3,
                out_dtype: if j == 2 { DType::F32 } else { dtype },
                batch_invariant: (i + j) % 5 == 1,
                ..Spec::new(name)
                    .lengths(&[(2, 300)])
                    .heads(query_heads, kv_heads)
                    .dims(head_dim, value_dim)
                    .dtype(dtype)
                    .lists(ListSpec {
                        per_head: j % 2 == 0,
                        counts: i % 2 == 0,
                        ..ListSpec::new(150, ENTRIES[(i + j) % 3])
                    })
            });
        }
    }
    specs
}

/// Every storage of keys.
fn storage() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, keys) in STORAGE.into_iter().enumerate() {
        for (j, ragged_queries) in [false, true].into_iter().enumerate() {
            for (k, entries) in ENTRIES.into_iter().enumerate() {
                let dtype = FLOATS[(i + j + k) % 3];
                let queries = if ragged_queries { [5, 0, 1, 2] } else { [3, 3, 3, 3] };
                let lengths: Vec<_> = queries.into_iter().zip([140, 9, 300, 0]).collect();
                let name = format!("selection/storage-{i}-{j}-{entries:?}-{dtype}");
                specs.push(
                    Spec {
                        keys,
                        ragged_queries,
                        core: k == 0,
                        layout: [Layout::Bshd, Layout::Bhsd][(i + k) % 2],
                        kv_layout: [KvLayout::Nhd, KvLayout::Hnd][(j + k) % 2],
                        padding: [0, 3][k % 2],
                        causal: i % 2 == 0,
                        stray_entries: k == 1,
                        ..Spec::new(name.to_lowercase()).lengths(&lengths).dims(64, 32).dtype(dtype)
                    }
                    .lists(ListSpec {
                        per_head: k == 1,
                        counts: j == 1,
                        ..ListSpec::new(90, entries)
                    }),
                );
            }
        }
    }
    specs
}

/// Every format of the cache.
fn caches() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, format) in FORMATS.into_iter().enumerate() {
        for (j, granularity) in GRANULARITIES.into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let keys = STORAGE[(i + j) % 4];
            // Streamed, verified, packed.
            let (query_heads, kv_heads) = [(4, 2), (24, 2), (80, 1)][(i + 2 * j) % 3];
            let name = format!("selection/cache-{format}-{granularity:?}-{dtype}").to_lowercase();
            specs.push(Spec {
                keys,
                batch_invariant: (i + j) % 4 == 3,
                cache: CacheSpec::new(format, granularity, Scales::Fitted),
                ..Spec::new(name)
                    .lengths(&[(2, 200), (2, 70)])
                    .heads(query_heads, kv_heads)
                    .dims(64, 64)
                    .dtype(dtype)
                    .lists(ListSpec { per_head: j == 0, ..ListSpec::new(140, ENTRIES[j % 3]) })
            });
        }
    }
    specs
}

/// The other features, alone and together, by positions.
fn features() -> Vec<Spec> {
    let mask = |dtype, hide, broadcast| Some(MaskSpec { dtype, hide, broadcast });
    let base = || Spec::new("").lengths(&[(6, 200), (6, 90)]).dims(64, 64);
    let one_mask = mask(DType::Bool, Hide::Nothing, [false; 4]);
    let variants = [
        ("softcap", Spec { softcap: Some(3.0), ..base() }),
        ("scale", Spec { scale: Some(-0.2), ..base() }),
        ("sinks", Spec { sinks: true, sink_kind: Sinks::Infinite, ..base() }),
        ("alibi", Spec { alibi: true, ..base() }),
        ("alibi-offset", Spec { alibi: true, offset: OffsetSpec::Same(60), ..base() }),
        ("causal-offset", Spec { causal: true, offset: OffsetSpec::Same(-2), ..base() }),
        ("offsets", Spec { causal: true, offset: OffsetSpec::PerSequence(vec![9, 88]), ..base() }),
        (
            "positions",
            Spec { causal: true, alibi: true, offset: OffsetSpec::Same(90), ..base() }
                .key_positions(&[4, -30], 3),
        ),
        (
            "positions-window",
            Spec { window: window(Some(40), Some(9)), offset: OffsetSpec::Same(30), ..base() }
                .key_positions(&[-20], 1),
        ),
        ("window", Spec { window: window(Some(70), None), causal: true, ..base() }),
        ("window-right", Spec { window: window(Some(20), Some(3)), ..base() }),
        ("chunk", Spec { chunk: Some(64), causal: true, ..base() }),
        ("mask", Spec { mask: one_mask, ..base() }),
        (
            "mask-keys",
            Spec { mask: mask(DType::Bool, Hide::Nothing, [true, true, true, false]), ..base() },
        ),
        ("mask-f32", Spec { mask: mask(DType::F32, Hide::Infinite, [false; 4]), ..base() }),
        (
            "mask-f16",
            Spec { mask: mask(DType::F16, Hide::Large, [false, true, false, false]), ..base() },
        ),
        (
            "mask-bf16",
            Spec { mask: mask(DType::BF16, Hide::Lowest, [true, false, false, true]), ..base() },
        ),
        ("tree", Spec { tree: true, ..base() }),
        ("tree-window", Spec { tree: true, window: window(Some(40), None), ..base() }),
        (
            "all",
            Spec {
                softcap: Some(9.0),
                alibi: true,
                sinks: true,
                causal: true,
                mask: mask(DType::F32, Hide::Infinite, [false, true, false, false]),
                window: window(Some(150), None),
                keys: Keys::Paged { block_size: 16, interleaved: true },
                ..base()
            },
        ),
    ];
    let mut specs = Vec::new();
    for (i, (name, spec)) in variants.into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            // Streamed, verified, packed.
            let (query_heads, kv_heads) = [(4, 2), (18, 2), (72, 1)][(i + j) % 3];
            specs.push(Spec {
                name: format!("selection/{name}-{entries:?}-{dtype}").to_lowercase(),
                core: j == 0,
                batch_invariant: (i + j) % 3 == 1,
                ..spec
                    .clone()
                    .heads(query_heads, kv_heads)
                    .dtype(dtype)
                    .lists(ListSpec { per_head: i % 2 == 0, ..ListSpec::new(160, entries) })
            });
        }
    }
    specs
}

/// Physical slots of the pool.
fn slots() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, block_size) in [16, 7, 1, 64].into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            for (k, ragged_queries) in [false, true].into_iter().enumerate() {
                let dtype = FLOATS[(i + j + k) % 3];
                let queries = if ragged_queries { [4, 1] } else { [2, 2] };
                let cache = match (i + k) % 3 {
                    0 => CacheSpec::default(),
                    1 => CacheSpec::new(DType::E4M3, Granularity::Token, Scales::Fitted),
                    _ => CacheSpec::new(DType::Q8_0, Granularity::Token, Scales::Fitted),
                };
                let name = format!("selection/slots-{block_size}-{entries:?}-{k}-{dtype}");
                let (query_heads, kv_heads) = [(8, 2), (16, 1), (68, 1)][(j + k) % 3];
                specs.push(Spec {
                    ragged_queries,
                    cache,
                    core: i == 1,
                    keys: Keys::Paged { block_size, interleaved: (i + j) % 2 == 0 },
                    kv_layout: [KvLayout::Nhd, KvLayout::Hnd][(i + j) % 2],
                    sinks: j == 1,
                    softcap: (j == 2).then_some(4.0),
                    batch_invariant: k == 1 && j == 0,
                    ..Spec::new(name.to_lowercase())
                        .lengths(&[(queries[0], 130), (queries[1], 270)])
                        .heads(query_heads, kv_heads)
                        .dims(64, 64)
                        .dtype(dtype)
                        .lists(ListSpec {
                            of: ListEntries::Slots,
                            per_head: j == 0,
                            counts: k == 0,
                            ..ListSpec::new(133, entries)
                        })
                });
            }
        }
    }
    specs
}
