//! Values that are a prefix of the keys: the latent cache of multi-head latent attention (MLA).

use super::{FLOATS, window};
use crate::case::{KvLayout, Layout};
use crate::contents::{Contents, Numbers};
use crate::place::MemorySpec;
use crate::spec::{
    CacheSpec, Caches, Entries, Granularity, Hide, Keys, ListSpec, MaskSpec, OffsetSpec,
    OperandMemory, Scales, Spec,
};
use regard::{DType, ListEntries};

/// Dims of keys and of values: dims of models, and others around vectors.
const DIMS: [(usize, usize); 8] =
    [(576, 512), (320, 256), (512, 512), (192, 128), (64, 64), (96, 32), (41, 23), (576, 1)];

/// Pages of `block_size` slots.
fn paged(block_size: usize) -> Keys {
    Keys::Paged { block_size, interleaved: false }
}

/// All over a cache of the queries' type.
pub(super) fn latent() -> Vec<Spec> {
    [dims(), heads(), storage(), features()].into_iter().flatten().collect()
}

/// Latent caches of codes and blocks.
pub(super) fn caches() -> Vec<Spec> {
    let formats = [DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0];
    let granularities =
        [Granularity::Tensor, Granularity::Head, Granularity::Page, Granularity::Token];
    let mut specs = Vec::new();
    for (i, format) in formats.into_iter().enumerate() {
        for (j, granularity) in granularities.into_iter().enumerate() {
            let (rows, kv_len) = [(1, 150), (5, 70), (40, 90)][(i + j) % 3];
            let dtype = FLOATS[(i + 2 * j) % 3];
            let (head_dim, value_dim) =
                [(576, 512), (320, 256), (96, 64), (64, 64)][(2 * i + j) % 4];
            specs.push(Spec {
                causal: j % 2 == 0,
                keys: [paged(16), Keys::Batched { slack: 3 }, Keys::Ragged { slack: 1 }]
                    [(i + j) % 3],
                cache: CacheSpec::new(
                    format,
                    granularity,
                    [Scales::Fitted, Scales::PowerOfTwo, Scales::Spread][j % 3],
                ),
                ..Spec::new(format!("latent/{format}-{granularity:?}-{dtype}").to_lowercase())
                    .lengths(&[(rows, kv_len), (rows, 33)])
                    .heads([16, 4][j % 2], [1, 2][j % 2])
                    .latent(head_dim, value_dim)
                    .dtype(dtype)
            });
        }
    }
    specs.extend(rows_of_656_bytes());
    specs.extend(tiles_of_rows(DType::E4M3, Granularity::Tensor));
    specs
}

/// Rows of `mla656`: every type of queries, storage and feature over them, and values that are all
/// of a row.
fn rows_of_656_bytes() -> Vec<Spec> {
    let storages = [
        ("dense", Keys::Batched { slack: 3 }),
        ("ragged", Keys::Ragged { slack: 1 }),
        ("pages", paged(64)),
        ("odd-pages", paged(7)),
    ];
    let lengths = [(1, 150), (3, 70), (40, 90)];
    let mut specs = Vec::new();
    for (i, (storage, keys)) in storages.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            let (rows, kv_len) = lengths[(i + j) % 3];
            let (query_heads, kv_heads) = [(16, 1), (4, 2), (128, 1), (1, 1)][(i + 2 * j) % 4];
            let name = format!("latent/mla656-{storage}-{dtype}");
            let spec = Spec {
                keys,
                kv_layout: if i % 2 == 1 { KvLayout::Hnd } else { KvLayout::Nhd },
                ..mla656(name, dtype, if i == 3 && j == 1 { 576 } else { 512 })
            };
            let batch = [(rows, kv_len), (rows, 33), (rows, 0)];
            let batch = if query_heads == 128 { &batch[..1] } else { &batch[..] };
            specs.push(Spec {
                causal: (i + j) % 2 == 0,
                lse: j == 0,
                core: i == 2,
                ..spec.lengths(batch).heads(query_heads, kv_heads)
            });
        }
    }
    let lists = [
        (ListEntries::Keys, Caches::default()),
        (ListEntries::Slots, Caches::default()),
        (ListEntries::Slots, Caches::Two { second: 20 }),
        (ListEntries::NumberedPages, Caches::default()),
    ];
    for (i, (of, caches)) in lists.into_iter().enumerate() {
        let name = format!("latent/mla656-listed-{of:?}-{i}").to_lowercase();
        specs.push(Spec {
            keys: paged(16),
            causal: matches!(of, ListEntries::Keys | ListEntries::NumberedPages),
            ..mla656(name, FLOATS[i % 3], 512).lengths(&[(2, 150), (2, 40)]).heads(8, 1).lists(
                ListSpec { of, counts: i % 2 == 0, caches, ..ListSpec::new(70, Entries::Any) },
            )
        });
    }
    specs.extend(tiles_of_rows(DType::Mla656, Granularity::Token));
    let featured = mla656("latent/mla656-features".into(), DType::BF16, 512);
    specs.push(Spec {
        keys: paged(16),
        window: window(Some(40), Some(3)),
        softcap: Some(20.0),
        sinks: true,
        alibi: true,
        ..featured.lengths(&[(2, 200), (2, 50)]).heads(16, 1)
    });
    let masked = mla656("latent/mla656-masked".into(), DType::F32, 512);
    let mask = Some(MaskSpec {
        dtype: DType::Bool,
        hide: Hide::Nothing,
        broadcast: [false, true, false, false],
    });
    specs.push(Spec { mask, ..masked.lengths(&[(5, 90), (5, 20)]).heads(4, 1) });
    specs
}

/// bf16 queries over rows of `mla656`, or of codes that have one scale: tiles of 16, 64 and 128
/// rows, full and not, over keys of several K tiles and over lists of them.
fn tiles_of_rows(format: DType, granularity: Granularity) -> Vec<Spec> {
    // Fewer rows over codes stream on a CPU: in another order than over a copy of their values.
    let few = if format == DType::Mla656 { 1 } else { 9 };
    let heads = [(few, 1), (16, 1), (17, 1), (64, 1), (72, 1), (130, 1), (40, 2)];
    let keys = [paged(1), Keys::Batched { slack: 3 }, paged(32), Keys::Ragged { slack: 2 }];
    let mut specs = Vec::new();
    for (i, (query_heads, kv_heads)) in heads.into_iter().enumerate() {
        let spec = |name: &str| {
            let name = format!("latent/{format}-{name}-{query_heads}-{kv_heads}");
            let spec = Spec::new(name).latent(576, 512).dtype(DType::BF16);
            let cache = CacheSpec::new(format, granularity, Scales::Fitted);
            let spec = spec.cache(cache).heads(query_heads, kv_heads);
            Spec { lse: i % 2 == 0, sinks: i % 3 == 0, ..spec }
        };
        specs.push(Spec {
            keys: keys[i % 4],
            window: window((i % 2 == 1).then_some(300), Some(0)),
            out_dtype: if i % 4 == 1 { DType::F32 } else { DType::BF16 },
            ..spec("tiles").lengths(&[(1 + i % 2, 700), (2, 0), (1, 130)])
        });
        // Scales of rows that are far apart.
        let contents = Contents { k: Numbers::Spread(24), ..Contents::default() };
        specs.push(Spec { contents, ..spec("spread").lengths(&[(1, 500), (2, 3), (1, 1)]) });
        let (of, caches) = [
            (ListEntries::Keys, Caches::default()),
            (ListEntries::Slots, Caches::default()),
            (ListEntries::Slots, Caches::Two { second: 90 }),
        ][i % 3];
        let lists = ListSpec {
            of,
            caches,
            per_head: kv_heads > 1,
            counts: i % 2 == 0,
            ..ListSpec::new([63, 300, 190][i % 3], Entries::Any)
        };
        specs.push(Spec {
            keys: paged([64, 7][i % 2]),
            causal: of == ListEntries::Keys,
            ..spec("lists").lengths(&[(2, 800), (1, 90)]).lists(lists)
        });
    }
    specs
}

/// Queries of a type over rows of `mla656`.
fn mla656(name: String, dtype: DType, value_dim: usize) -> Spec {
    let cache = CacheSpec::new(DType::Mla656, Granularity::Token, Scales::Fitted);
    Spec::new(name).latent(576, value_dim).dtype(dtype).cache(cache)
}

/// Every dims in every type: decoding, verifying and prefill.
fn dims() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, (head_dim, value_dim)) in DIMS.into_iter().enumerate() {
        for (j, dtype) in FLOATS.into_iter().enumerate() {
            for (k, (rows, kv_len)) in [(1, 129), (3, 70), (33, 66)].into_iter().enumerate() {
                let name = format!("latent/{rows}-rows-{head_dim}-{value_dim}-{dtype}");
                let spec = Spec::new(name).lengths(&[(rows, kv_len)]).heads(4, 1).dtype(dtype);
                specs.push(Spec {
                    causal: (i + j + k) % 2 == 0,
                    core: head_dim == 64 && j == k,
                    ..spec.latent(head_dim, value_dim)
                });
            }
        }
    }
    specs
}

/// From one head over one to 128 over one, and several latent heads.
fn heads() -> Vec<Spec> {
    let heads = [(1, 1), (8, 1), (9, 1), (16, 1), (64, 1), (65, 1), (128, 1), (6, 3), (32, 2)];
    let mut specs = Vec::new();
    for (i, (query_heads, kv_heads)) in heads.into_iter().enumerate() {
        let dtype = FLOATS[i % 3];
        let name = format!("latent/{query_heads}-over-{kv_heads}-{dtype}");
        let spec = Spec::new(name).lengths(&[(1, 100), (1, 65)]).heads(query_heads, kv_heads);
        specs.push(Spec { keys: paged(64), ..spec.latent(576, 512).dtype(dtype) });
    }
    specs
}

/// Selected keys of 576/512: tiles of 16, 64 and 128 heads, full and not, of every kind of list,
/// shorter and longer than a K tile.
pub(super) fn selection() -> Vec<Spec> {
    let heads = [(1, 1), (16, 1), (17, 1), (64, 1), (72, 1), (128, 1), (130, 1), (40, 2)];
    let lengths = [1, 63, 64, 65, 130, 190, 700, 2050];
    let kinds = [
        (Keys::Batched { slack: 3 }, ListEntries::Keys, false),
        (paged(16), ListEntries::Keys, false),
        (paged(64), ListEntries::Slots, false),
        (paged(7), ListEntries::Slots, true),
        (paged(32), ListEntries::NumberedPages, false),
    ];
    let mut specs = Vec::new();
    for (i, (query_heads, kv_heads)) in heads.into_iter().enumerate() {
        for (j, (keys, of, two)) in kinds.into_iter().enumerate() {
            let (dtype, len) = ([DType::BF16, DType::F16][(i + j) % 2], lengths[(i + 3 * j) % 8]);
            let second = len / 3;
            let lists = ListSpec {
                of,
                per_head: kv_heads > 1,
                counts: (i + j) % 3 != 0,
                caches: if two { Caches::Two { second } } else { Caches::default() },
                ..ListSpec::new(len, [Entries::Any, Entries::Sorted, Entries::All][(i + j) % 3])
            };
            let name = format!("selection/latent-{query_heads}-{kv_heads}-{len}-{of:?}-{two}");
            let spec = Spec {
                keys,
                causal: matches!(of, ListEntries::Keys | ListEntries::NumberedPages),
                ragged_queries: j % 2 == 1,
                lse: i % 2 == 0,
                out_dtype: if i % 4 == 3 { DType::F32 } else { dtype },
                core: query_heads == 17,
                ..Spec::new(name.to_lowercase())
            };
            let lengths = match i % 3 {
                0 => vec![(1, 900), (1, 0), (1, 130)],
                1 => vec![(3, 2200), (3, 70)],
                _ => vec![(2, 2100)],
            };
            let spec = spec.lengths(&lengths).heads(query_heads, kv_heads).latent(576, 512);
            specs.push(spec.dtype(dtype).lists(lists));
        }
    }
    specs
}

/// Pages of all sizes, ragged and dense keys, head-major ones, gaps and unaligned rows.
fn storage() -> Vec<Spec> {
    let memory = |first, order| {
        let k = MemorySpec { first, order, gaps: [0, 8, 3] };
        OperandMemory { k, ..OperandMemory::default() }
    };
    let base = |name: &str| {
        let spec = Spec::new(format!("latent/{name}")).lengths(&[(2, 70), (2, 0), (2, 131)]);
        Spec { causal: true, stray_entries: true, ..spec.heads(8, 2).latent(192, 128) }
    };
    let mut specs = Vec::new();
    for (i, block_size) in [1, 2, 7, 16, 33, 64, 256].into_iter().enumerate() {
        let kv_layout = [KvLayout::Nhd, KvLayout::Hnd][i % 2];
        let spec = base(&format!("pages-of-{block_size}")).dtype(FLOATS[i % 3]);
        specs.push(Spec { keys: paged(block_size), kv_layout, ..spec });
    }
    for (i, dtype) in FLOATS.into_iter().enumerate() {
        let ragged = base(&format!("ragged-{dtype}")).dtype(dtype);
        specs.push(Spec {
            keys: Keys::Ragged { slack: i },
            ragged_queries: true,
            padding: [0, 8, 1][i],
            ..ragged.lengths(&[(1, 90), (70, 70), (0, 5), (4, 40)])
        });
        let dense = base(&format!("dense-{dtype}")).dtype(dtype);
        specs.push(Spec {
            keys: Keys::Batched { slack: 2 },
            layout: [Layout::Bshd, Layout::Bhsd][i % 2],
            memory: memory([0, 8, 3][i], [[0, 1, 2], [1, 0, 2], [2, 1, 0]][i]),
            ..dense
        });
    }
    specs
}

/// Every feature of scores and ranges.
fn features() -> Vec<Spec> {
    let spec = |name: &str, rows: usize, dtype| {
        let name = format!("latent/{name}-{rows}-rows");
        let spec = Spec::new(name).lengths(&[(rows, 150), (rows, 64)]).heads(8, 1);
        Spec { keys: paged(16), ..spec.latent(192, 128).dtype(dtype) }
    };
    let mask = |dtype, hide| MaskSpec { dtype, hide, broadcast: [false, true, false, false] };
    let mut specs = Vec::new();
    for (rows, dtype) in [(1, DType::BF16), (6, DType::F32), (40, DType::F16)] {
        let spec = |name| spec(name, rows, dtype);
        specs.extend([
            Spec { causal: true, window: window(Some(30), None), ..spec("window") },
            Spec { chunk: Some(48), ..spec("chunks") },
            Spec { softcap: Some(20.0), sinks: true, ..spec("softcap-sinks") },
            Spec { alibi: true, offset: OffsetSpec::Same(40), ..spec("alibi") },
            Spec { mask: Some(mask(DType::Bool, Hide::Nothing)), ..spec("mask-bool") },
            Spec { mask: Some(mask(DType::F32, Hide::Infinite)), ..spec("mask-f32") },
            Spec { tree: true, ..spec("tree") },
            Spec { causal: true, batch_invariant: true, ..spec("invariant") },
            Spec { causal: true, out_dtype: DType::F32, ..spec("out-f32") },
            Spec {
                scale: Some(-0.05),
                offset: OffsetSpec::Same(-3),
                causal: true,
                ..spec("empty")
            },
        ]);
    }
    specs
}
