//! Caches in 8 and 4 bits, and caches of another float type than queries.

use super::{FLOATS, window};
use crate::case::{KvLayout, Layout};
use crate::contents::{Contents, Numbers};
use crate::place::MemorySpec;
use crate::spec::{
    CacheSpec, Granularity, Hide, Keys, MaskSpec, OffsetSpec, OperandMemory, Scales, Spec,
};
use regard::DType;

const CODES: [DType; 3] = [DType::E4M3, DType::E5M2, DType::I8];
const BLOCKS: [DType; 2] = [DType::Q8_0, DType::Q4_0];
const FORMATS: [DType; 5] = [DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0];
const GRANULARITIES: [Granularity; 4] =
    [Granularity::Tensor, Granularity::Head, Granularity::Page, Granularity::Token];
/// Decoding with a tile's end in the middle, verifying, and a prefill over several tiles.
const LENGTHS: [(&str, (usize, usize)); 3] =
    [("decode", (1, 333)), ("verify", (7, 150)), ("prefill", (70, 170))];

/// All of them.
pub(super) fn caches() -> Vec<Spec> {
    [
        formats(),
        granularities(),
        mixed(),
        storage(),
        packed_blocks(),
        converted_tiles(),
        copies(),
        padded_blocks(),
        features(),
        numbers(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Every format under every type of query, at every class of head dim.
fn formats() -> Vec<Spec> {
    let dims = [(64, 64), (128, 128), (256, 256), (512, 512), (96, 32), (192, 128), (576, 512)];
    let odd = [(40, 80), (1, 7), (129, 33)];
    let mut specs = Vec::new();
    for (i, format) in FORMATS.into_iter().enumerate() {
        let odd = if format.is_block() { &odd[..0] } else { &odd[..] };
        for (j, &(head_dim, value_dim)) in dims.iter().chain(odd).enumerate() {
            for (k, dtype) in FLOATS.into_iter().enumerate() {
                let (way, lengths) = LENGTHS[(i + j + k) % 3];
                let name = format!("caches/{way}-{format}-{head_dim}-{dtype}");
                let granularity = GRANULARITIES[(i + j) % 4];
                specs.push(Spec {
                    causal: (j + k) % 2 == 0,
                    core: head_dim == 64,
                    cache: CacheSpec::new(format, granularity, Scales::Fitted),
                    ..Spec::new(name).lengths(&[lengths]).dims(head_dim, value_dim).dtype(dtype)
                });
            }
        }
    }
    specs
}

/// Every granularity of scales over every storage of keys.
fn granularities() -> Vec<Spec> {
    let ways = [
        ("dense", Keys::Batched { slack: 5 }),
        ("ragged", Keys::Ragged { slack: 2 }),
        ("pages", Keys::Paged { block_size: 16, interleaved: false }),
        ("odd-pages", Keys::Paged { block_size: 7, interleaved: true }),
    ];
    let mut specs = Vec::new();
    for (i, (way, keys)) in ways.into_iter().enumerate() {
        for (j, granularity) in GRANULARITIES.into_iter().enumerate() {
            for (k, scales) in
                [Scales::Fitted, Scales::PowerOfTwo, Scales::Spread].into_iter().enumerate()
            {
                let format = CODES[(i + j + k) % 3];
                let name = format!("caches/{way}-{granularity:?}-{scales:?}-{format}");
                specs.push(Spec {
                    keys,
                    causal: k % 2 == 0,
                    padding: [0, 3][j % 2],
                    layout: [Layout::Bshd, Layout::Bhsd][(j + k) % 2],
                    kv_layout: [KvLayout::Nhd, KvLayout::Hnd][(i + k) % 2],
                    cache: CacheSpec::new(format, granularity, scales),
                    stray_entries: j == 2,
                    ..Spec::new(name.to_lowercase())
                        .lengths(&[(3, 70), (3, 0), (3, 129)])
                        .dims(64, 64)
                        .dtype(FLOATS[(j + k) % 3])
                });
            }
        }
    }
    specs
}

/// Keys of one format and values of another, floats of another type among them.
fn mixed() -> Vec<Spec> {
    let all = FLOATS.into_iter().chain(FORMATS);
    let pairs: Vec<_> = all.clone().flat_map(|k| all.clone().map(move |v| (k, v))).collect();
    let mut specs = Vec::new();
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for dtype in [FLOATS[i % 3], FLOATS[(i + 1) % 3]] {
            let (way, lengths) = LENGTHS[i % 3];
            specs.push(Spec {
                cache: CacheSpec {
                    k: Some(k),
                    v: Some(v),
                    granularity: GRANULARITIES[i % 4],
                    scales: Scales::Fitted,
                },
                causal: true,
                ..Spec::new(format!("caches/mixed-{way}-{k}-{v}-{dtype}"))
                    .lengths(&[lengths])
                    .dims(64, 96)
                    .dtype(dtype)
            });
        }
    }
    specs
}

/// Lengths around tiles and pages, ragged batches, empty rows, long batch-invariant splits.
fn storage() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, kv_len) in [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 129, 257].into_iter().enumerate() {
        for (j, q_len) in [1, 9, 65].into_iter().enumerate() {
            let format = FORMATS[(i + j) % 5];
            specs.push(Spec {
                causal: i % 3 == 0,
                keys: [
                    Keys::Batched { slack: 1 },
                    Keys::Paged { block_size: 16, interleaved: false },
                ][(i + j) % 2],
                cache: CacheSpec::new(format, GRANULARITIES[(i + 2 * j) % 4], Scales::Fitted),
                ..Spec::new(format!("caches/lengths-{q_len}x{kv_len}-{format}"))
                    .lengths(&[(q_len, kv_len)])
                    .dims(128, 128)
                    .dtype(FLOATS[i % 3])
            });
        }
    }
    for (i, format) in FORMATS.into_iter().enumerate() {
        // The strides of dimensions of 1 may be anything, unaligned too.
        let one_row = MemorySpec { first: 0, order: [0, 2, 1], gaps: [0, 7, 7] };
        specs.push(Spec {
            keys: Keys::Ragged { slack: 0 },
            memory: OperandMemory { k: one_row, v: one_row, ..OperandMemory::default() },
            cache: CacheSpec::new(format, GRANULARITIES[i % 4], Scales::Fitted),
            ..Spec::new(format!("caches/one-key-{format}"))
                .lengths(&[(1, 1)])
                .heads(16, 1)
                .dims(128, 128)
                .dtype(FLOATS[1 + i % 2])
        });
    }
    for (i, format) in FORMATS.into_iter().enumerate() {
        let cache = CacheSpec::new(format, GRANULARITIES[i % 4], Scales::Fitted);
        let mixed = [(1, 300), (33, 90), (0, 12), (70, 71), (1, 0), (2, 900)];
        specs.push(Spec {
            causal: true,
            ragged_queries: true,
            keys: Keys::Paged { block_size: 64, interleaved: i % 2 == 0 },
            cache,
            ..Spec::new(format!("caches/mixed-batch-{format}"))
                .lengths(&mixed)
                .heads(8, 2)
                .dims(128, 128)
                .dtype(FLOATS[1 + i % 2])
        });
        specs.push(Spec {
            batch_invariant: true,
            causal: true,
            cache,
            ..Spec::new(format!("caches/invariant-{format}"))
                .lengths(&[(2, 2100), (2, 5)])
                .dims(64, 64)
                .dtype(FLOATS[1 + i % 2])
        });
    }
    specs
}

/// Blocks under many rows, for which CPUs pack tiles. Where bf16 are multiplied in pairs or on a
/// matrix unit, keys are packed as codes.
fn packed_blocks() -> Vec<Spec> {
    let pairs = [
        (DType::Q8_0, DType::Q8_0),
        (DType::Q4_0, DType::Q4_0),
        (DType::Q8_0, DType::BF16),
        (DType::BF16, DType::Q4_0),
        (DType::I8, DType::Q8_0),
        (DType::Q4_0, DType::E4M3),
        (DType::Q8_0, DType::F16),
    ];
    let dims = [(32, 32), (64, 96), (128, 128), (256, 256), (192, 128), (512, 512)];
    let mut specs = Vec::new();
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for (j, (head_dim, value_dim)) in dims.into_iter().enumerate() {
            let scales = Scales::Fitted;
            let granularity = GRANULARITIES[(i + j) % 4];
            let left = ((i + j) % 3 == 0).then_some(90);
            specs.push(Spec {
                causal: j % 2 == 0,
                ragged_queries: true,
                keys: Keys::Paged { block_size: 16, interleaved: i % 2 == 0 },
                window: window(left, left.map(|_| 0)),
                softcap: (j == 3).then_some(20.0),
                sinks: j == 2,
                batch_invariant: j == 4,
                cache: CacheSpec { k: Some(k), v: Some(v), granularity, scales },
                ..Spec::new(format!("caches/packed-{k}-{v}-{head_dim}"))
                    .lengths(&[(70, 311), (1, 40), (37, 530), (65, 3)])
                    .heads(8, 2)
                    .dims(head_dim, value_dim)
                    .dtype(DType::BF16)
            });
        }
    }
    specs
}

/// Formats that Hopper's prefill converts to tiles of bf16: rows that TMA can address and rows that
/// it cannot; fewer rows per key than a copy is made for.
fn converted_tiles() -> Vec<Spec> {
    let pairs = [
        (DType::Q8_0, DType::Q8_0),
        (DType::Q4_0, DType::Q4_0),
        (DType::I8, DType::E5M2),
        (DType::BF16, DType::Q8_0),
        (DType::Q4_0, DType::BF16),
        (DType::E4M3, DType::Q4_0),
    ];
    let ways = [
        ("dense", Keys::Batched { slack: 5 }, KvLayout::Nhd),
        ("ragged", Keys::Ragged { slack: 2 }, KvLayout::Nhd),
        ("pages", Keys::Paged { block_size: 16, interleaved: true }, KvLayout::Nhd),
        ("head-major", Keys::Paged { block_size: 64, interleaved: false }, KvLayout::Hnd),
        ("odd-pages", Keys::Paged { block_size: 7, interleaved: false }, KvLayout::Nhd),
    ];
    let mut specs = Vec::new();
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for (j, (way, keys, kv_layout)) in ways.into_iter().enumerate() {
            let dims = [64, 128][(i + j) % 2];
            let granularity = [Granularity::Token, Granularity::Page][i % 2];
            let left = (j == 0).then_some(70);
            specs.push(Spec {
                keys,
                kv_layout,
                causal: j % 2 == 0,
                ragged_queries: j == 1,
                window: window(left, left.map(|_| 0)),
                sinks: j == 2,
                lse: j != 3,
                stray_entries: j == 4,
                cache: CacheSpec { k: Some(k), v: Some(v), granularity, scales: Scales::Fitted },
                ..Spec::new(format!("caches/converted-{way}-{k}-{v}-{dims}"))
                    .lengths(&[(120, 203), (120, 31)])
                    .heads(2, 2)
                    .dims(dims, dims)
                    .dtype(DType::BF16)
            });
        }
    }
    specs
}

/// Formats that prefill copies first on Hopper, where many rows read a key: what is not exact in
/// the queries' type, and numbers that are far apart or small there.
fn copies() -> Vec<Spec> {
    let pairs = [
        (DType::Q8_0, DType::Q8_0),
        (DType::Q4_0, DType::Q4_0),
        (DType::Q8_0, DType::Q4_0),
        (DType::Q4_0, DType::E4M3),
        (DType::F32, DType::F32),
        (DType::F16, DType::BF16),
        (DType::BF16, DType::F16),
        (DType::I8, DType::I8),
        (DType::E5M2, DType::Q8_0),
        (DType::F32, DType::E4M3),
    ];
    let ways = [
        ("dense", Keys::Batched { slack: 5 }),
        ("ragged", Keys::Ragged { slack: 2 }),
        ("pages", Keys::Paged { block_size: 16, interleaved: false }),
        ("odd-pages", Keys::Paged { block_size: 7, interleaved: false }),
    ];
    let small = Numbers::Scaled(1e-4);
    let contents = [
        Contents::default(),
        Contents { k: Numbers::Spread(24), v: Numbers::Spread(24), ..Contents::default() },
        Contents { k: Numbers::Outliers, v: small, ..Contents::default() },
        Contents { q: Numbers::Scaled(1e4), k: small, v: Numbers::Peaked },
        Contents { q: Numbers::Outliers, k: Numbers::Outliers, v: Numbers::Peaked },
    ];
    let mut specs = Vec::new();
    for (i, (k, v)) in pairs.into_iter().enumerate() {
        for (j, dtype) in [DType::F16, DType::BF16].into_iter().enumerate() {
            for (c, &contents) in contents.iter().enumerate() {
                let (way, keys) = ways[(i + c) % 4];
                let dims = [64, 128, 256, 96][(i + j + c) % 4];
                let granularity = [Granularity::Token, Granularity::Page][i % 2];
                let left = (c == 1).then_some(90);
                specs.push(Spec {
                    keys,
                    contents,
                    causal: c % 2 == 0,
                    ragged_queries: (i + c) % 3 == 1,
                    window: window(left, left.map(|_| 0)),
                    softcap: ((i + c) % 4 == 3).then_some(20.0),
                    sinks: i % 4 == 2,
                    lse: c < 3,
                    stray_entries: c == 2,
                    cache: CacheSpec {
                        k: Some(k),
                        v: Some(v),
                        granularity,
                        scales: Scales::Fitted,
                    },
                    ..Spec::new(format!("caches/copied-{way}-{k}-{v}-{dims}-{dtype}-{c}"))
                        .lengths(&[(230, 203), (230, 31), (230, 300), (230, 90)])
                        .heads(8, 1)
                        .dims(dims, dims)
                        .dtype(dtype)
                });
            }
        }
    }
    specs
}

/// Blocks of head dims that no kernel is made for, whose rows start at multiples of two bytes or of
/// four, and in small pages; from one row to several tiles.
fn padded_blocks() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, dims) in [32, 96, 160, 192, 320, 384].into_iter().enumerate() {
        for (j, format) in [DType::Q8_0, DType::Q4_0].into_iter().enumerate() {
            for (k, rows) in [1, 9, 40].into_iter().enumerate() {
                let dtype = [DType::BF16, DType::F16][(i + j + k) % 2];
                let keys = [Keys::Batched { slack: 2 }, Keys::Ragged { slack: 1 }];
                let pages =
                    [1, 16, 3, 8].map(|block_size| Keys::Paged { block_size, interleaved: false });
                let spec = Spec::new(format!("caches/padded-{format}-{dims}-{rows}-{dtype}"));
                specs.push(Spec {
                    keys: [keys[0], pages[0], keys[1], pages[1], pages[2], pages[3]]
                        [(i + j + 2 * k) % 6],
                    causal: k > 0,
                    lse: k == 1,
                    cache: CacheSpec::new(format, Granularity::Head, Scales::Fitted),
                    ..spec
                        .lengths(&[(rows, 133), (rows, 47)])
                        .heads(6, 3)
                        .dims(dims, dims)
                        .dtype(dtype)
                });
            }
        }
    }
    specs
}

/// Every feature over a cache of codes and of blocks.
fn features() -> Vec<Spec> {
    let mask = |dtype, hide| Some(MaskSpec { dtype, hide, broadcast: [true, false, false, false] });
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 9] = [
        ("window", |spec| spec.window = window(Some(20), Some(0))),
        ("chunk", |spec| spec.chunk = Some(48)),
        ("softcap", |spec| spec.softcap = Some(20.0)),
        ("alibi", |spec| spec.alibi = true),
        ("sinks", |spec| spec.sinks = true),
        ("tree", |spec| spec.tree = true),
        ("offset", |spec| spec.offset = OffsetSpec::PerSequence(vec![-3, 40])),
        ("bool-mask", |_| ()),
        ("mask", |_| ()),
    ];
    let mut specs = Vec::new();
    for (i, (feature, change)) in changes.into_iter().enumerate() {
        for (j, format) in FORMATS.into_iter().enumerate() {
            let (way, (q_len, kv_len)) = LENGTHS[(i + j) % 3];
            let mut spec = Spec {
                causal: feature != "tree",
                core: j == i % 5,
                cache: CacheSpec::new(format, GRANULARITIES[(i + j) % 4], Scales::Fitted),
                ..Spec::new(format!("caches/{feature}-{way}-{format}"))
                    .lengths(&[(q_len, kv_len), (q_len, kv_len / 2)])
                    .dims(64, 64)
                    .dtype(FLOATS[(i + j) % 3])
            };
            change(&mut spec);
            spec.mask = match feature {
                "bool-mask" => mask(DType::Bool, Hide::Infinite),
                "mask" => mask(spec.dtype, Hide::Extreme),
                _ => None,
            };
            specs.push(spec);
        }
    }
    specs
}

/// Numbers at the ends of what types hold, under codes.
fn numbers() -> Vec<Spec> {
    let scaled =
        |q, k, v| Contents { q: Numbers::Scaled(q), k: Numbers::Scaled(k), v: Numbers::Scaled(v) };
    let kinds = [
        ("peaked", Contents::from_numbers(Numbers::Peaked)),
        ("outliers", Contents { k: Numbers::Outliers, ..Contents::default() }),
        ("positive", Contents::from_numbers(Numbers::Positive)),
        ("constant", Contents::from_numbers(Numbers::Constant(0.3))),
        ("zero", Contents { q: Numbers::Normal, ..Contents::from_numbers(Numbers::Constant(0.0)) }),
        ("huge-queries", scaled(1e12, 1e-12, 1.0)),
        ("tiny-queries", scaled(1e-12, 1e12, 1.0)),
        ("huge-values", scaled(1.0, 1.0, 1e25)),
        ("tiny-values", scaled(1.0, 1.0, 1e-30)),
        ("huge-scores", scaled(1e10, 1e10, 1.0)),
    ];
    let mut specs = Vec::new();
    for (i, (kind, contents)) in kinds.into_iter().enumerate() {
        for (j, granularity) in GRANULARITIES.into_iter().enumerate() {
            let format = if j == 3 { CODES[i % 3] } else { FORMATS[(i + j) % 5] };
            let (way, lengths) = LENGTHS[(i + j) % 3];
            let dtype = [DType::F32, DType::BF16][(i + j) % 2];
            // Block scales are f16.
            if BLOCKS.contains(&format) && (kind.contains("huge") || kind.contains("tiny")) {
                continue;
            }
            specs.push(Spec {
                contents,
                causal: j % 2 == 0,
                out_dtype: DType::F32,
                cache: CacheSpec::new(format, granularity, Scales::Fitted),
                ..Spec::new(format!("caches/{kind}-{way}-{format}-{dtype}"))
                    .lengths(&[lengths])
                    .dims(128, 128)
                    .dtype(dtype)
            });
        }
    }
    specs
}
