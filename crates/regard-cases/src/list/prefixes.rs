//! Sequences that share their first keys.

use super::{FLOATS, FORMATS, GRANULARITIES, window};
use crate::case::{KvLayout, Layout};
use crate::contents::Sinks;
use crate::spec::{CacheSpec, Hide, Keys, MaskSpec, OffsetSpec, Scales, Spec};
use regard::DType;

const PAGES: Keys = Keys::Paged { block_size: 16, interleaved: false };

/// All of them.
pub(super) fn prefixes() -> Vec<Spec> {
    [shapes(), groups(), beside(), features(), caches()].into_iter().flatten().collect()
}

/// Head dims, heads, and prefixes around pages and tiles.
fn shapes() -> Vec<Spec> {
    let dims = [(64, 64), (128, 128), (256, 256), (96, 96), (80, 40), (192, 128), (576, 512)];
    let heads = [(4, 2), (8, 1), (32, 2), (3, 3)];
    let lens = [0, 1, 15, 16, 17, 63, 64, 65, 130, 257, 600];
    let mut specs = Vec::new();
    for (i, len) in lens.into_iter().enumerate() {
        for (j, (head_dim, value_dim)) in dims.into_iter().enumerate() {
            let (query_heads, kv_heads) = heads[(i + j) % 4];
            let (dtype, q_len) = (FLOATS[(i + j) % 3], [1, 1, 3][(i + 2 * j) % 3]);
            if head_dim > 128 && (i + j) % 3 > 0 {
                continue;
            }
            let lengths: Vec<_> =
                [40, 9, 130, 0, 77].iter().map(|own| (q_len, len + own)).collect();
            specs.push(
                Spec {
                    core: len == 65 && j < 2,
                    causal: j % 2 == 0,
                    out_dtype: if i % 4 == 1 { DType::F32 } else { dtype },
                    keys: Keys::Paged {
                        block_size: [16, 16, 7, 64][(i + j) % 4],
                        interleaved: i % 2 == 0,
                    },
                    kv_layout: [KvLayout::Nhd, KvLayout::Hnd][j % 2],
                    layout: [Layout::Bshd, Layout::Bhsd][i % 2],
                    ..Spec::new(format!("prefixes/{len}-keys-dim-{head_dim}-{dtype}"))
                        .lengths(&lengths)
                        .heads(query_heads, kv_heads)
                        .dims(head_dim, value_dim)
                        .dtype(dtype)
                }
                .prefixes(&[0], &[len]),
            );
        }
    }
    specs
}

/// Different groups: orders, groups of one, sequences without a group, ragged queries, many rows.
fn groups() -> Vec<Spec> {
    let orders: [(&str, &[i32], &[usize]); 6] = [
        ("two", &[0, 1, 0, 1, 0, 1, 1], &[130, 65]),
        ("some-alone", &[-1, 0, -1, 0, 2, 1], &[200, 90, 64]),
        ("unused", &[3, -1, 3], &[0, 7, 200, 150, 9]),
        ("none-shared", &[0, 1, 2, 3, 4, 5, 6, 7], &[64, 64, 64, 64, 64, 64, 64, 64]),
        ("no-members", &[-1], &[100]),
        ("all-of-it", &[0, 0, 1], &[400, 400]),
    ];
    let mut specs = Vec::new();
    for (i, (name, groups, lens)) in orders.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let queries = if j == 0 { [1; 8] } else { [1, 4, 0, 2, 1, 9, 1, 3] };
            let keys = [300, 210, 230, 201, 400, 260, 222, 199];
            let lengths: Vec<_> = queries.into_iter().zip(keys).collect();
            specs.push(
                Spec {
                    core: i < 2 && j == 2,
                    causal: true,
                    ragged_queries: j > 0,
                    keys: PAGES,
                    stray_entries: i % 2 == 0,
                    batch_invariant: i == 0 && j == 1,
                    ..Spec::new(format!("prefixes/groups-{name}-{dtype}"))
                        .lengths(&lengths)
                        .heads(8, 2)
                        .dims([64, 128][i % 2], [64, 128][i % 2])
                        .dtype(dtype)
                }
                .prefixes(groups, lens),
            );
        }
    }
    // More rows than a tile has: 40 sequences of 8 rows per key/value head.
    for (dtype, dim) in [(DType::BF16, 128), (DType::F16, 64), (DType::BF16, 256)] {
        let lengths: Vec<_> = (0..40).map(|i| (1, 330 + i % 7)).collect();
        let spec = Spec::new(format!("prefixes/many-rows-{dim}-{dtype}")).lengths(&lengths);
        let spec = spec.heads(16, 2).dims(dim, dim).dtype(dtype);
        specs.push(Spec { causal: true, keys: PAGES, ..spec }.prefixes(&[0, 0, 0, 1], &[320, 100]));
    }
    specs
}

/// Enough sequences and keys per group that decode leaves room for the kernel over prefixes, which
/// runs beside it: one tile of rows and several, windows that end in the prefix, several tokens.
fn beside() -> Vec<Spec> {
    let shapes = [
        ("one-tile", 8, 1, None),
        ("two-tiles", 40, 1, None),
        ("window", 20, 1, Some(1333)),
        ("tokens", 6, 3, None),
    ];
    let types = [(DType::BF16, 128), (DType::F16, 64), (DType::F16, 128), (DType::BF16, 64)];
    let mut specs = Vec::new();
    for (i, (name, batch, q_len, left)) in shapes.into_iter().enumerate() {
        for (j, (dtype, dim)) in types.into_iter().enumerate() {
            let lengths: Vec<_> = (0..batch).map(|k| (q_len, 2017 + (31 * k) % 150)).collect();
            let spec = Spec {
                core: i == 1 && j < 2,
                causal: true,
                window: window(left, None),
                keys: Keys::Paged { block_size: [16, 64, 48][(i + j) % 3], interleaved: i == 2 },
                kv_layout: [KvLayout::Nhd, KvLayout::Hnd][j % 2],
                ..Spec::new(format!("prefixes/beside-{name}-{dim}-{dtype}"))
            };
            let spec = spec.lengths(&lengths).heads(8, 2).dims(dim, dim).dtype(dtype);
            specs.push(spec.prefixes(&[0], &[1999 - 7 * j]));
        }
    }
    specs
}

/// The other features: each row keeps its own position.
fn features() -> Vec<Spec> {
    let mask = |dtype, hide, broadcast| Some(MaskSpec { dtype, hide, broadcast });
    let base = || Spec { keys: PAGES, causal: true, ..Spec::new("") };
    let variants = [
        ("softcap", Spec { softcap: Some(3.0), ..base() }),
        ("scale", Spec { scale: Some(-0.2), ..base() }),
        ("sinks", Spec { sinks: true, sink_kind: Sinks::Infinite, ..base() }),
        ("alibi", Spec { alibi: true, ..base() }),
        ("alibi-offset", Spec { alibi: true, offset: OffsetSpec::Same(60), ..base() }),
        ("offset", Spec { offset: OffsetSpec::Same(50), ..base() }),
        ("offsets", Spec { offset: OffsetSpec::PerSequence(vec![9, 288, -1]), ..base() }),
        ("window", Spec { window: window(Some(120), None), ..base() }),
        ("window-before", Spec { window: window(Some(20), None), ..base() }),
        ("window-right", Spec { window: window(Some(170), Some(3)), causal: false, ..base() }),
        ("chunk", Spec { chunk: Some(64), ..base() }),
        ("mask", Spec { mask: mask(DType::Bool, Hide::Nothing, [false; 4]), ..base() }),
        (
            "mask-f32",
            Spec { mask: mask(DType::F32, Hide::Infinite, [false, true, false, false]), ..base() },
        ),
        (
            "mask-lowest",
            Spec { mask: mask(DType::F32, Hide::Lowest, [false; 4]), causal: false, ..base() },
        ),
        ("tree", Spec { tree: true, ..base() }),
        (
            "all",
            Spec {
                softcap: Some(9.0),
                alibi: true,
                sinks: true,
                mask: mask(DType::F32, Hide::Infinite, [false, true, false, false]),
                window: window(Some(250), None),
                ..base()
            },
        ),
    ];
    let mut specs = Vec::new();
    for (i, (name, spec)) in variants.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let q_len = [2, 5, 1][(i + j) % 3];
            let lengths = [(q_len, 300), (q_len, 163), (q_len, 220), (q_len, 170)];
            specs.push(
                Spec {
                    name: format!("prefixes/{name}-{dtype}"),
                    core: j == 2,
                    ..spec
                        .clone()
                        .lengths(&lengths)
                        .heads(6, 2)
                        .dims([64, 128][(i + j) % 2], [64, 128][(i + j) % 2])
                        .dtype(dtype)
                }
                .prefixes(&[0, 0, 0, -1], &[160]),
            );
        }
    }
    specs
}

/// Every format of the cache.
fn caches() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, format) in FORMATS.into_iter().enumerate() {
        let (granularity, dtype) = (GRANULARITIES[i % 4], FLOATS[i % 3]);
        specs.push(
            Spec {
                keys: PAGES,
                causal: true,
                cache: CacheSpec::new(format, granularity, Scales::Fitted),
                ..Spec::new(format!("prefixes/cache-{format}-{dtype}"))
                    .lengths(&[(1, 300), (1, 163), (1, 220), (1, 170)])
                    .heads(8, 2)
                    .dims(128, 128)
                    .dtype(dtype)
            }
            .prefixes(&[0, 0, 1, 0], &[160, 90]),
        );
    }
    let latent = Spec { keys: PAGES, causal: true, ..Spec::new("prefixes/latent-bf16") };
    let latent = latent.lengths(&[(1, 300), (1, 170)]).heads(16, 1).dtype(DType::BF16);
    specs.push(latent.latent(576, 512).prefixes(&[0], &[160]));
    specs
}
