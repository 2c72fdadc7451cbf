//! Many query rows: lengths around the tiles of prefill kernels, every storage and every feature
//! over several tiles, and large head dims.

use super::{FLOATS, features, window};
use crate::case::Layout;
use crate::spec::{Hide, Keys, MaskSpec, OffsetSpec, Spec};
use regard::DType;

/// The head dims that prefill kernels are made for.
const PREFILL_DIMS: [(usize, usize); 7] =
    [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (512, 512), (80, 80)];

fn paged(block_size: usize) -> Keys {
    Keys::Paged { block_size, interleaved: block_size == 32 }
}

/// Rows and keys around tiles, in all storages; prefixes in pages; chunks beside single tokens.
pub(super) fn prefill() -> Vec<Spec> {
    let mut specs = around_tiles();
    specs.extend(storages());
    specs.extend(steps());
    specs.extend(short_windows());
    specs.extend(few_tiles());
    // Rows that cannot be copied in units of 16 bytes.
    for (i, padding) in [1, 4].into_iter().enumerate() {
        let spec =
            Spec::new(format!("prefill/padding-{padding}")).lengths(&[(150, 170), (150, 90)]);
        specs.push(Spec { padding, causal: true, ..spec.dims(64, 64).dtype(FLOATS[1 + i]) });
    }
    specs
}

/// Rows around tiles of 64, 128 and 192, keys around tiles of 64 to 192.
fn around_tiles() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, q_len) in [63, 65, 127, 128, 129, 191, 192, 193, 257].into_iter().enumerate() {
        for (j, kv_len) in [79, 81, 128, 129, 176, 177, 192, 255, 257, 400].into_iter().enumerate()
        {
            let (head_dim, value_dim) = PREFILL_DIMS[(i + j) % 3];
            let dtype = FLOATS[1 + (i + j / 2) % 2];
            let causal = (i + j) % 2 == 0;
            let name = format!(
                "prefill/{q_len}x{kv_len}-{head_dim}-{dtype}{}",
                if causal { "-causal" } else { "" }
            );
            let spec =
                Spec::new(name).lengths(&[(q_len, kv_len)]).heads(2, 1).dims(head_dim, value_dim);
            specs.push(Spec { causal, ..spec.dtype(dtype) });
        }
    }
    specs
}

/// Few rows over many keys, with every feature that changes which of them a row sees: kernels may
/// split these keys.
fn few_tiles() -> Vec<Spec> {
    let broadcast = [true, true, false, false];
    let mask = |dtype, hide| Some(MaskSpec { dtype, hide, broadcast });
    type Change = fn(&mut Spec);
    let changes: [(&str, Change); 12] = [
        ("plain", |_| ()),
        ("causal", |spec| spec.causal = true),
        ("window", |spec| spec.window = window(Some(1500), Some(0))),
        ("chunk", |spec| spec.chunk = Some(1700)),
        ("softcap", |spec| spec.softcap = Some(20.0)),
        ("alibi", |spec| spec.alibi = true),
        ("sinks", |spec| spec.sinks = true),
        ("out-f32", |spec| spec.out_dtype = DType::F32),
        ("offset", |spec| {
            spec.causal = true;
            spec.offset = OffsetSpec::PerSequence(vec![300, 1900]);
        }),
        ("ragged", |spec| {
            spec.causal = true;
            spec.ragged_queries = true;
            spec.keys = Keys::Ragged { slack: 3 };
        }),
        ("pages-of-16", |spec| spec.keys = paged(16)),
        ("pages-of-1", |spec| spec.keys = paged(1)),
    ];
    let mut specs = Vec::new();
    for (i, (name, change)) in changes.into_iter().enumerate() {
        for (j, dtype) in [DType::BF16, DType::F16].into_iter().enumerate() {
            let dims = [128, 64, 256, 96][(i + j) % 4];
            let spec = Spec::new(format!("prefill/few-tiles-{name}-{dims}-{dtype}"));
            let spec = spec.lengths(&[(70, 2100), ([70, 131][j], 1300)]).heads(2, 1);
            let mut spec = Spec { lse: i % 2 == j, ..spec.dims(dims, dims).dtype(dtype) };
            change(&mut spec);
            specs.push(spec);
        }
    }
    for (name, dtype, hide) in [
        ("bool", DType::Bool, Hide::Blocks),
        ("f32", DType::F32, Hide::Infinite),
        ("bf16", DType::BF16, Hide::Blocks),
    ] {
        let spec = Spec::new(format!("prefill/few-tiles-mask-{name}")).lengths(&[(70, 2100)]);
        let spec = spec.heads(2, 1).dims(128, 128).dtype(DType::BF16);
        specs.push(Spec { mask: mask(dtype, hide), lse: true, ..spec });
    }
    specs
}

/// Every type and head dim, several sequences, groups, and pages of all kinds.
fn storages() -> Vec<Spec> {
    let mut specs = Vec::new();
    let storages = [
        ("batched", false, Keys::Batched { slack: 7 }),
        ("ragged", true, Keys::Ragged { slack: 3 }),
        ("pages-of-8", true, paged(8)),
        ("pages-of-16", false, paged(16)),
        ("pages-of-32", true, paged(32)),
        ("pages-of-100", false, paged(100)),
        ("pages-of-256", true, paged(256)),
    ];
    for (i, (head_dim, value_dim)) in PREFILL_DIMS.into_iter().enumerate() {
        for (j, (storage, ragged_queries, keys)) in storages.into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let name = format!("prefill/{storage}-{head_dim}-{value_dim}-{dtype}");
            let spec = Spec::new(name)
                .lengths(&[(140, 230), (70, 90), (193, 193)])
                .heads([4, 2, 2][j % 3], [2, 1, 2][j % 3]);
            let spec = spec.dims(head_dim, value_dim).dtype(dtype);
            let layout = [Layout::Bshd, Layout::Bhsd][j % 2];
            specs.push(Spec {
                keys,
                ragged_queries,
                layout,
                causal: true,
                core: (i, j) == (1, 3),
                ..spec
            });
        }
    }
    specs
}

/// An engine's step: chunks against the keys that are in the pages already, beside single tokens,
/// verified drafts and nothing at all.
fn steps() -> Vec<Spec> {
    let mut specs = Vec::new();
    let step = [
        (1, 300),
        (129, 129),
        (0, 50),
        (1, 1),
        (64, 400),
        (9, 80),
        (8, 77),
        (130, 133),
        (2, 2),
        (1, 600),
    ];
    for (i, (storage, keys)) in [
        ("ragged", Keys::Ragged { slack: 2 }),
        ("pages-of-16", paged(16)),
        ("pages-of-7", paged(7)),
        ("pages-of-64", paged(64)),
    ]
    .into_iter()
    .enumerate()
    {
        for (j, (query_heads, kv_heads)) in [(4, 4), (8, 2), (6, 1)].into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let spec = Spec::new(format!("step/{storage}-{query_heads}-over-{kv_heads}-{dtype}"))
                .lengths(&step);
            let spec = spec
                .heads(query_heads, kv_heads)
                .dims([64, 128][j % 2], [64, 128][j % 2])
                .dtype(dtype);
            let mask = (i + j == 2).then_some(MaskSpec {
                dtype: DType::Bool,
                hide: Hide::Nothing,
                broadcast: [false, true, false, false],
            });
            specs.push(Spec {
                keys,
                ragged_queries: true,
                causal: true,
                sinks: j == 1,
                mask,
                core: i == 1,
                ..spec
            });
        }
    }
    specs
}

/// Every feature over several tiles, at the head dims of models.
pub(super) fn prefill_features() -> Vec<Spec> {
    let mut specs = features_alone();
    specs.extend(blocks());
    specs.extend(capped());
    specs.extend(sloped());
    specs.extend(sloped_both_ways());
    let spec = Spec::new("prefill/tree")
        .lengths(&[(140, 300), (140, 150)])
        .dims(128, 128)
        .dtype(DType::BF16);
    specs.push(Spec { tree: true, ..spec });
    specs
}

fn features_alone() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, (feature, base)) in features().into_iter().enumerate() {
        let (head_dim, value_dim) = PREFILL_DIMS[i % PREFILL_DIMS.len()];
        let dtype = FLOATS[1 + i % 2];
        let spec = base.lengths(&[(150, 210)]).heads(2, 1).dims(head_dim, value_dim).dtype(dtype);
        let name = format!("prefill/{feature}-{head_dim}-{value_dim}-{dtype}");
        specs.push(Spec { name, core: matches!(feature, "softcap" | "sinks"), ..spec });
    }
    for (left, right) in [(Some(100), Some(0)), (Some(0), Some(200)), (Some(64), Some(64))] {
        let spec = Spec::new(
            format!("prefill/window-{left:?}-{right:?}").to_lowercase().replace(['(', ')'], "-"),
        );
        let spec = spec.lengths(&[(500, 640), (500, 510)]).dims(64, 64).dtype(DType::BF16);
        specs.push(Spec { window: window(left, right), ..spec });
    }
    specs
}

/// Windows that leave each 64 rows a few keys, for which heads share them: all storages, groups of
/// heads that a kernel's warpgroups cannot divide equally, rows before all keys, past them and
/// between multiples of 64, and sequences that are too short or empty.
fn short_windows() -> Vec<Spec> {
    let mut specs = Vec::new();
    let left = [Some(127), Some(128), Some(20), Some(64), Some(0), Some(100), None];
    let right = [Some(0), Some(0), Some(0), Some(64), Some(0), Some(28), Some(128)];
    let storages = [
        ("batched", Keys::Batched { slack: 7 }),
        ("ragged", Keys::Ragged { slack: 3 }),
        ("pages-of-8", paged(8)),
        ("pages-of-48", paged(48)),
        ("pages-of-16", paged(16)),
        ("pages-of-32", paged(32)),
        ("pages-of-128", paged(128)),
    ];
    for (i, (storage, keys)) in storages.into_iter().enumerate() {
        for (j, offset) in
            [OffsetSpec::BottomRight, OffsetSpec::PerSequence(vec![250, -60, 64, 3000, 0, 7])]
                .into_iter()
                .enumerate()
        {
            let window = window(left[i], right[(i + 7 * j) % 7]);
            let (query_heads, kv_heads) = [(8, 1), (8, 2), (10, 2)][(i + j) % 3];
            let spec = Spec::new(format!("prefill/short-window-{storage}-{}", ["end", "at"][j]));
            let lengths = [(300, 900), (140, 700), (261, 261), (70, 500), (129, 60), (96, 0)];
            let ragged = [(300, 900), (1, 700), (261, 261), (70, 500), (0, 40), (200, 3)];
            let spec = spec.lengths(if (i + j) % 2 == 0 { &lengths } else { &ragged });
            let spec = spec.heads(query_heads, kv_heads).dims(64, 64).dtype(FLOATS[1 + i % 2]);
            let causal = right[i] == Some(0) && i % 2 == 0;
            let sinks = i % 3 != 1;
            specs.push(Spec {
                keys,
                ragged_queries: true,
                offset,
                window,
                causal,
                sinks,
                core: i == 0,
                ..spec
            });
        }
    }
    // Sequences of equal lengths, whose rows start at multiples of 64 or not.
    for (i, kv_len) in [448, 470].into_iter().enumerate() {
        let spec = Spec::new(format!("prefill/short-window-equal-{kv_len}"));
        let spec = spec.lengths(&[(320, kv_len), (320, kv_len)]).heads(8, 2).dims(64, 64);
        let window = window(Some(127), None);
        specs.push(Spec { causal: true, sinks: i == 0, window, ..spec.dtype(FLOATS[1 + i]) });
    }
    specs
}

/// A separate mask per sequence and head.
const WIDE: [bool; 4] = [true, true, false, false];

/// Masks that empty tiles and leave others as they are.
fn blocks() -> Vec<Spec> {
    let mut specs = Vec::new();
    let masks = [
        (DType::Bool, WIDE),
        (DType::Bool, [true, false, false, false]),
        (DType::Bool, [false, true, true, false]),
        (DType::Bool, [true, true, false, true]),
        (DType::F32, WIDE),
        (DType::F32, [false, true, false, false]),
        (DType::F16, WIDE),
        (DType::BF16, WIDE),
    ];
    for (i, (dtype, broadcast)) in masks.into_iter().enumerate() {
        let spec =
            Spec::new(format!("prefill/blocks-{i}-of-{dtype}")).lengths(&[(800, 800), (800, 390)]);
        let spec =
            spec.heads(1 + usize::from(!broadcast[1]), 1).dims(64, 64).dtype(FLOATS[1 + i % 2]);
        let mask = Some(MaskSpec { dtype, hide: Hide::Blocks, broadcast });
        specs.push(Spec { mask, causal: i == 1, offset: OffsetSpec::Same(0), ..spec });
    }
    specs
}

/// Caps that scores stay far below, that some come near and that most reach; alone, and with masks
/// and biases.
fn capped() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, cap) in [50.0, 8.0, 4.0, 1.0].into_iter().enumerate() {
        let (head_dim, value_dim) = PREFILL_DIMS[i];
        let causal = i % 2 == 0;
        let spec = Spec::new(format!("prefill/capped-at-{cap}-{head_dim}"))
            .lengths(&[(260, 400), (150, 130)]);
        let spec = spec.heads(4, 2).dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        specs.push(Spec { softcap: Some(cap), causal, ..spec.clone() });
        let name = format!("prefill/capped-at-{cap}-and-more-{head_dim}");
        let masks = [None, None, Some(DType::Bool), Some(DType::F16)];
        let mask = masks[i].map(|dtype| MaskSpec { dtype, hide: Hide::Blocks, broadcast: WIDE });
        specs.push(Spec { name, softcap: Some(cap), causal, alibi: i < 2, mask, ..spec });
    }
    specs
}

/// Slopes over keys behind all rows, on both sides of them and before them.
fn sloped() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, offset) in [1000, 130, -1000, 0].into_iter().enumerate() {
        let (head_dim, value_dim) = PREFILL_DIMS[i];
        let spec =
            Spec::new(format!("prefill/sloped-from-{offset}-{head_dim}")).lengths(&[(260, 400)]);
        let spec = spec.heads(8, 2).dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        specs.push(Spec { alibi: true, offset: OffsetSpec::Same(offset), causal: i == 3, ..spec });
    }
    specs
}

/// The same over many tiles, in which a kernel may begin at the rows' own position and wrap around:
/// chunks, rows before all keys and past them, in pages and windows, and masks that leave nothing
/// where rows are.
fn sloped_both_ways() -> Vec<Spec> {
    let mut specs = Vec::new();
    let storages = [
        ("batched", Keys::Batched { slack: 7 }),
        ("pages-of-16", Keys::Paged { block_size: 16, interleaved: false }),
        ("pages-of-32", Keys::Paged { block_size: 32, interleaved: true }),
        ("ragged", Keys::Ragged { slack: 3 }),
    ];
    for (i, (storage, keys)) in storages.into_iter().enumerate() {
        let (head_dim, value_dim) = PREFILL_DIMS[i];
        let spec = Spec::new(format!("prefill/sloped-both-ways-{storage}-{head_dim}"));
        let spec = spec.lengths(&[(300, 900), (140, 700), (260, 260), (70, 500)]).heads(4, 2);
        let spec = spec.dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        let offset = OffsetSpec::PerSequence(vec![250, -60, 0, 3000]);
        let window = if i == 3 { window(Some(250), Some(300)) } else { spec.window };
        specs.push(Spec { keys, ragged_queries: true, alibi: true, offset, window, ..spec });
    }
    for (i, dtype) in [DType::Bool, DType::F16, DType::Bool].into_iter().enumerate() {
        let (head_dim, value_dim) = PREFILL_DIMS[i];
        let spec = Spec::new(format!("prefill/sloped-both-ways-and-masked-by-{dtype}-{head_dim}"));
        let spec = spec.lengths(&[(800, 1200), (500, 1000)]).heads(2, 1);
        let spec = spec.dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        let mask =
            Some(MaskSpec { dtype, hide: Hide::Blocks, broadcast: [false, true, false, false] });
        specs.push(Spec { mask, alibi: true, offset: OffsetSpec::Same(200), ..spec });
    }
    specs
}

/// Head dims past 256, for which a cluster of CTAs shares rows and keys: rows for one CTA only,
/// keys for several rounds of the pipeline, dims between the modules' dims, all storages and
/// features.
pub(super) fn wide_prefill() -> Vec<Spec> {
    let dims = [(512, 512), (576, 512), (320, 264), (16, 512), (512, 64)];
    let mut specs = Vec::new();
    for (i, q_len) in [17, 64, 65, 129, 200].into_iter().enumerate() {
        for (j, kv_len) in [40, 127, 129, 257, 520].into_iter().enumerate() {
            let (head_dim, value_dim) = dims[(i + j) % dims.len()];
            let (dtype, causal) = (FLOATS[1 + (i + j / 2) % 2], (i + j / 2) % 2 == 0);
            let kind = if causal { "-causal" } else { "" };
            let name = format!("wide/{q_len}x{kv_len}-{head_dim}-{value_dim}-{dtype}{kind}");
            let spec = Spec::new(name).lengths(&[(q_len, kv_len)]).heads(1, 1);
            specs.push(Spec { causal, ..spec.dims(head_dim, value_dim).dtype(dtype) });
        }
    }
    let paged = |block_size| Keys::Paged { block_size, interleaved: block_size == 16 };
    for (i, (storage, keys)) in [
        ("ragged", Keys::Ragged { slack: 3 }),
        ("pages-of-8", paged(8)),
        ("pages-of-16", paged(16)),
        ("pages-of-48", paged(48)),
        ("pages-of-256", paged(256)),
    ]
    .into_iter()
    .enumerate()
    {
        let (head_dim, value_dim) = dims[i % 3];
        for (j, window) in [window(None, None), window(Some(150), None)].into_iter().enumerate() {
            let name = format!(
                "wide/{storage}-{head_dim}-{value_dim}{}",
                if j == 1 { "-window" } else { "" }
            );
            let spec =
                Spec::new(name).lengths(&[(70, 330), (1, 600), (140, 140), (130, 389)]).heads(2, 1);
            let spec = spec.dims(head_dim, value_dim).dtype(FLOATS[1 + (i + j) % 2]);
            specs.push(Spec { keys, ragged_queries: i % 2 == 0, causal: true, window, ..spec });
        }
    }
    for (i, (feature, base)) in features().into_iter().enumerate() {
        let (head_dim, value_dim) = dims[i % 3];
        let spec = base.lengths(&[(70 + 60 * (i % 2), 150)]).heads(2, 1);
        let spec = spec.dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        specs.push(Spec { name: format!("wide/{feature}-{head_dim}-{value_dim}"), ..spec });
    }
    for (i, dtype) in [DType::Bool, DType::F32, DType::BF16].into_iter().enumerate() {
        let (head_dim, value_dim) = dims[i];
        let spec =
            Spec::new(format!("wide/blocks-of-{dtype}")).lengths(&[(450, 800)]).heads(2 - i % 2, 1);
        let broadcast = [true, i == 0, false, false];
        let mask = Some(MaskSpec { dtype, hide: Hide::Blocks, broadcast });
        let spec = spec.dims(head_dim, value_dim).dtype(FLOATS[1 + i % 2]);
        specs.push(Spec { mask, causal: i == 1, offset: OffsetSpec::Same(0), ..spec });
    }
    let spec = Spec::new("wide/tree").lengths(&[(140, 300), (140, 150)]).heads(1, 1).dims(512, 512);
    specs.push(Spec { tree: true, ..spec.dtype(DType::BF16) });
    // Slopes over many keys on both sides of rows, with and without a mask that leaves nothing
    // where some rows are.
    for (i, mask) in [None, Some(DType::Bool)].into_iter().enumerate() {
        let spec =
            Spec::new(format!("wide/sloped-both-ways-{i}")).lengths(&[(500, 800), (150, 600)]);
        let spec = spec.heads(2, 1).dims(512, 512).dtype(FLOATS[1 + i]);
        let mask = mask.map(|dtype| MaskSpec {
            dtype,
            hide: Hide::Blocks,
            broadcast: [false, true, false, false],
        });
        specs.push(Spec { mask, alibi: true, offset: OffsetSpec::Same(200), ..spec });
    }
    specs
}
