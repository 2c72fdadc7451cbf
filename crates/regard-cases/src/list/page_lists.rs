//! Sequences whose rows attend to lists of pages, per key/value head.

use super::{FLOATS, FORMATS, GRANULARITIES, window};
use crate::case::KvLayout;
use crate::contents::Sinks;
use crate::spec::{CacheSpec, Entries, Keys, ListSpec, OffsetSpec, Scales, Spec};
use regard::{DType, ListEntries, Values};

const ENTRIES: [Entries; 3] = [Entries::Any, Entries::Sorted, Entries::All];
const OF: [ListEntries; 2] = [ListEntries::NumberedPages, ListEntries::Pages];

/// All of them.
pub(super) fn page_lists() -> Vec<Spec> {
    [lengths(), storage(), whole_runs(), caches(), features()].into_iter().flatten().collect()
}

/// Lists around vectors, tiles, splits and pages.
fn lengths() -> Vec<Spec> {
    let mut specs = Vec::new();
    let lengths = [0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 257, 1023, 1025, 2050];
    for (i, len) in lengths.into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            let (q_len, dtype) = ([1, 3, 1][(i + j) % 3], FLOATS[(i + j) % 3]);
            let (block_size, of) = ([16, 1, 7, 64][(i + j) % 4], OF[(i + j / 2) % 2]);
            let name = format!("selection/pages-len-{len}-{entries:?}-{dtype}").to_lowercase();
            specs.push(Spec {
                core: len == 65 || len == 129,
                keys: Keys::Paged { block_size, interleaved: i % 2 == 0 },
                batch_invariant: j == 1,
                causal: of == ListEntries::NumberedPages,
                ..Spec::new(name)
                    .lengths(&[(q_len, 1500), (q_len, 40), (q_len, 0)])
                    .dims(64, 64)
                    .dtype(dtype)
                    .lists(ListSpec {
                        of,
                        per_head: j != 2,
                        counts: j == 0,
                        ..ListSpec::new(len, entries)
                    })
            });
        }
    }
    specs
}

/// Pages of every size and order, ragged queries, heads and head dims.
fn storage() -> Vec<Spec> {
    let mut specs = Vec::new();
    let heads = [(8, 2), (16, 1), (68, 1), (9, 3), (4, 4)];
    let dims = [(64, 64), (128, 128), (40, 24), (576, 512), (80, 80)];
    for (i, block_size) in [16, 7, 1, 64, 100].into_iter().enumerate() {
        for (j, ragged_queries) in [false, true].into_iter().enumerate() {
            for (k, of) in OF.into_iter().enumerate() {
                let (dtype, entries) = (FLOATS[(i + j + k) % 3], ENTRIES[(i + j) % 3]);
                let queries = if ragged_queries { [5, 0, 1] } else { [2, 2, 2] };
                let lengths: Vec<_> = queries.into_iter().zip([330, 120, 0]).collect();
                let (query_heads, kv_heads) = heads[(i + j + k) % 5];
                let (head_dim, value_dim) = dims[(i + 2 * k) % 5];
                let name = format!("selection/pages-{block_size}-{j}-{of:?}-{dtype}");
                specs.push(Spec {
                    ragged_queries,
                    core: i == 1,
                    keys: Keys::Paged { block_size, interleaved: (i + j) % 2 == 0 },
                    kv_layout: [KvLayout::Nhd, KvLayout::Hnd][(i + k) % 2],
                    padding: [0, 3][k % 2],
                    stray_entries: j == 1,
                    causal: i % 2 == 0,
                    ..Spec::new(name.to_lowercase())
                        .lengths(&lengths)
                        .heads(query_heads, kv_heads)
                        .dims(head_dim, value_dim)
                        .dtype(dtype)
                        .lists(ListSpec {
                            of,
                            per_head: (i + j) % 3 != 2,
                            counts: k == j,
                            ..ListSpec::new(200, entries)
                        })
                });
            }
        }
    }
    specs
}

/// Plain scores at head dim 128 in pages of 16 keys and multiples, which have a kernel of their own
/// on Hopper: skipped pages, windows that begin and end inside pages, lists that are empty or end
/// inside them, groups that fill tiles and leave some rows.
fn whole_runs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, block_size) in [16, 48, 64, 256].into_iter().enumerate() {
        for (j, len) in [0, 77, 1000].into_iter().enumerate() {
            let (of, dtype) = (OF[(i + j) % 2], [DType::F16, DType::BF16][i % 2]);
            let (query_heads, kv_heads) = [(8, 2), (8, 1), (12, 1), (3, 3)][(i + j) % 4];
            let lists = ListSpec {
                of,
                per_head: j != 1,
                counts: (i + j) % 3 == 0,
                ..ListSpec::new(len, ENTRIES[(i + 2 * j) % 3])
            };
            let name = format!("selection/pages-runs-{block_size}-{len}-{of:?}-{dtype}");
            let numbered = of == ListEntries::NumberedPages;
            specs.push(Spec {
                core: j == 1,
                keys: Keys::Paged { block_size, interleaved: i % 2 == 1 },
                kv_layout: [KvLayout::Nhd, KvLayout::Hnd][j % 2],
                ragged_queries: i == 3,
                causal: numbered && j == 1,
                window: if numbered && j == 2 {
                    window(Some(200), Some(9))
                } else {
                    window(None, None)
                },
                sinks: i == 1,
                ..Spec::new(name.to_lowercase())
                    .lengths(&[(2, 900), (2, 70), (2, 0)])
                    .heads(query_heads, kv_heads)
                    .dims(128, 128)
                    .dtype(dtype)
                    .lists(lists)
            });
        }
    }
    specs
}

/// Every format of the cache, and values that are a prefix of the keys.
fn caches() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, format) in FORMATS.into_iter().enumerate() {
        for (j, of) in OF.into_iter().enumerate() {
            let (dtype, granularity) = (FLOATS[(i + j) % 3], GRANULARITIES[(i + j) % 4]);
            // Streamed, verified, packed.
            let (query_heads, kv_heads) = [(4, 2), (24, 2), (80, 1)][(i + 2 * j) % 3];
            let name = format!("selection/pages-cache-{format}-{of:?}-{dtype}").to_lowercase();
            specs.push(Spec {
                keys: Keys::Paged { block_size: [16, 7][(i + j) % 2], interleaved: false },
                batch_invariant: (i + j) % 4 == 3,
                values: [Values::Separate, Values::KeyPrefix][(i / 2 + j) % 2],
                cache: CacheSpec::new(format, granularity, Scales::Fitted),
                ..Spec::new(name)
                    .lengths(&[(2, 200), (2, 70)])
                    .heads(query_heads, kv_heads)
                    .dims(64, 64)
                    .dtype(dtype)
                    .lists(ListSpec {
                        of,
                        per_head: j == 0,
                        counts: i % 2 == 0,
                        ..ListSpec::new(140, ENTRIES[(i + j) % 3])
                    })
            });
        }
    }
    specs
}

/// The features that go with page lists: by position, where pages are numbered.
fn features() -> Vec<Spec> {
    let base = || {
        let keys = Keys::Paged { block_size: 16, interleaved: false };
        Spec { keys, ..Spec::new("").lengths(&[(6, 200), (6, 90)]).dims(64, 64) }
    };
    let variants = [
        ("softcap", ListEntries::Pages, Spec { softcap: Some(3.0), ..base() }),
        ("scale", ListEntries::Pages, Spec { scale: Some(-0.2), ..base() }),
        ("sinks", ListEntries::Pages, Spec { sinks: true, sink_kind: Sinks::Infinite, ..base() }),
        ("alibi", ListEntries::NumberedPages, Spec { alibi: true, ..base() }),
        (
            "alibi-offset",
            ListEntries::NumberedPages,
            Spec { alibi: true, offset: OffsetSpec::Same(60), ..base() },
        ),
        (
            "causal-offset",
            ListEntries::NumberedPages,
            Spec { causal: true, offset: OffsetSpec::Same(-2), ..base() },
        ),
        (
            "offsets",
            ListEntries::NumberedPages,
            Spec { causal: true, offset: OffsetSpec::PerSequence(vec![9, 88]), ..base() },
        ),
        (
            "window",
            ListEntries::NumberedPages,
            Spec { window: window(Some(40), Some(9)), ..base() },
        ),
        ("chunk", ListEntries::NumberedPages, Spec { chunk: Some(33), causal: true, ..base() }),
        (
            "all",
            ListEntries::NumberedPages,
            Spec {
                softcap: Some(9.0),
                alibi: true,
                sinks: true,
                causal: true,
                window: window(Some(150), None),
                keys: Keys::Paged { block_size: 7, interleaved: true },
                ..base()
            },
        ),
    ];
    let mut specs = Vec::new();
    for (i, (name, of, spec)) in variants.into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let (query_heads, kv_heads) = [(4, 2), (18, 2), (72, 1)][(i + j) % 3];
            specs.push(Spec {
                name: format!("selection/pages-{name}-{entries:?}-{dtype}").to_lowercase(),
                core: j == 0,
                batch_invariant: (i + j) % 3 == 1,
                ..spec.clone().heads(query_heads, kv_heads).dtype(dtype).lists(ListSpec {
                    of,
                    per_head: true,
                    ..ListSpec::new(160, entries)
                })
            });
        }
    }
    specs
}
