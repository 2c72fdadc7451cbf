//! Rows with a second list of slots, into a second cache.

use super::{FLOATS, GRANULARITIES};
use crate::case::KvLayout;
use crate::spec::{CacheSpec, Caches, Entries, Keys, ListSpec, Scales, Spec};
use regard::{DType, ListEntries};

const ENTRIES: [Entries; 3] = [Entries::Any, Entries::Sorted, Entries::All];

/// All of them.
pub(super) fn second_lists() -> Vec<Spec> {
    [lengths(), storage(), caches()].into_iter().flatten().collect()
}

/// Lists of `first` slots of the first cache and `second` of the second.
fn lists(first: usize, second: usize, entries: Entries) -> ListSpec {
    let (of, caches) = (ListEntries::Slots, Caches::Two { second });
    ListSpec { of, caches, ..ListSpec::new(first + second, entries) }
}

/// Both lists around vectors, tiles and splits; one of them empty.
fn lengths() -> Vec<Spec> {
    let lengths = [
        [0, 0],
        [0, 65],
        [65, 0],
        [1, 1],
        [15, 17],
        [64, 64],
        [63, 66],
        [127, 130],
        [16, 1030],
        [1030, 16],
        [1025, 1200],
    ];
    let mut specs = Vec::new();
    for (i, [first, second]) in lengths.into_iter().enumerate() {
        for (j, entries) in ENTRIES.into_iter().enumerate() {
            let (q_len, dtype) = ([1, 3, 1][(i + j) % 3], FLOATS[(i + j) % 3]);
            let block_size = [16, 1, 7, 64][(i + j) % 4];
            let name = format!("selection/second-len-{first}-{second}-{entries:?}-{dtype}");
            specs.push(Spec {
                core: first == 64 || first == 1025 && j == 0,
                keys: Keys::Paged { block_size, interleaved: i % 2 == 0 },
                batch_invariant: j == 1,
                ..Spec::new(name.to_lowercase())
                    .lengths(&[(q_len, 2500), (q_len, 40), (q_len, 0)])
                    .dims(64, 64)
                    .dtype(dtype)
                    .lists(ListSpec {
                        per_head: i % 2 == 0,
                        counts: j == 0,
                        ..lists(first, second, entries)
                    })
            });
        }
    }
    specs
}

/// Pages of every size and order, ragged queries, heads, head dims and values in the keys.
fn storage() -> Vec<Spec> {
    let heads = [(8, 2), (16, 1), (68, 1), (9, 3), (4, 4)];
    let dims = [(64, 64), (128, 128), (40, 24), (576, 512), (80, 80)];
    let mut specs = Vec::new();
    for (i, block_size) in [16, 7, 1, 64, 100].into_iter().enumerate() {
        for (j, ragged_queries) in [false, true].into_iter().enumerate() {
            for (k, latent) in [false, true].into_iter().enumerate() {
                let (dtype, entries) = (FLOATS[(i + j + k) % 3], ENTRIES[(i + j) % 3]);
                let queries = if ragged_queries { [5, 0, 1] } else { [2, 2, 2] };
                let lengths: Vec<_> = queries.into_iter().zip([330, 120, 0]).collect();
                let (query_heads, kv_heads) = heads[(i + j + k) % 5];
                let (head_dim, value_dim) = dims[(i + 2 * k) % 5];
                let name = format!("selection/second-{block_size}-{j}-{k}-{dtype}");
                let spec = Spec {
                    ragged_queries,
                    core: i == 1,
                    keys: Keys::Paged { block_size, interleaved: (i + j) % 2 == 0 },
                    kv_layout: [KvLayout::Nhd, KvLayout::Hnd][(i + k) % 2],
                    padding: [0, 3][(i + j + k) % 2],
                    sinks: j == 1,
                    softcap: (i % 3 == 2).then_some(4.0),
                    ..Spec::new(name.to_lowercase())
                        .lengths(&lengths)
                        .heads(query_heads, kv_heads)
                        .dims(head_dim, value_dim)
                        .dtype(dtype)
                        .lists(ListSpec {
                            per_head: (i + k) % 2 == 0,
                            counts: j == 0,
                            ..lists(70, 90 - 20 * k, entries)
                        })
                };
                specs.push(if latent { spec.latent(head_dim, value_dim) } else { spec });
            }
        }
    }
    specs
}

/// Every format and granularity of scales: the two caches have scales of their own.
fn caches() -> Vec<Spec> {
    let formats = [
        DType::E4M3,
        DType::I8,
        DType::E5M2,
        DType::E4M3,
        DType::Q8_0,
        DType::Q4_0,
        DType::BF16,
        DType::F32,
    ];
    let mut specs = Vec::new();
    for (i, format) in formats.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let granularity = GRANULARITIES[(i + j) % 4];
            let name = format!("selection/second-cache-{i}-{format}-{granularity:?}-{dtype}");
            let spec = Spec {
                keys: Keys::Paged { block_size: [16, 5][j % 2], interleaved: false },
                kv_layout: [KvLayout::Nhd, KvLayout::Hnd][i % 2],
                ..Spec::new(name.to_lowercase())
                    .lengths(&[(2, 300), (2, 70)])
                    .heads(8, 2)
                    .dims(64, 64)
                    .dtype(dtype)
                    .cache(CacheSpec::new(format, granularity, Scales::Fitted))
                    .lists(ListSpec { per_head: j == 0, ..lists(75, 66, ENTRIES[(i + j) % 3]) })
            };
            specs.push(if (i + j) % 4 == 3 { spec.latent(96, 64) } else { spec });
        }
    }
    specs
}
