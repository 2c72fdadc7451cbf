//! The one list of cases. Tests of every backend, `regard check` and sanitizers all take their
//! cases from here: a new feature or a found defect adds a line, and every kernel is tested with
//! it.
//!
//! Listing is cheap; [`Spec::generate`] makes the data.

mod caches;
mod latent;
mod numbers;
mod page_lists;
mod pairs;
mod positions;
mod prefill;
mod prefixes;
mod second_lists;
mod selection;
mod two_parts;

use crate::case::{KvLayout, Layout};
use crate::noise::Noise;
use crate::spec::{Granularity, Hide, Keys, MaskSpec, OffsetSpec, Spec};
use regard::{DType, Window};
use std::collections::{BTreeMap, BTreeSet};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Formats of caches that differ from queries.
const FORMATS: [DType; 6] =
    [DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0, DType::F16];

const GRANULARITIES: [Granularity; 4] =
    [Granularity::Token, Granularity::Page, Granularity::Head, Granularity::Tensor];

/// Every case over a cache of the queries' type.
pub fn list() -> impl Iterator<Item = Spec> {
    let groups = [
        lengths(),
        blocks_and_splits(),
        head_dims(),
        head_groups(),
        layouts(),
        variants(),
        masks(),
        trees(),
        ragged(),
        many(),
        paged(),
        prefill::prefill(),
        prefill::prefill_features(),
        prefill::wide_prefill(),
        pairs::slopes(),
        pairs::trees_under_masks(),
        numbers::numbers(),
        latent::latent(),
        positions::positions(),
        models(),
        engines(),
        everything(),
        random_compositions(),
    ];
    groups.into_iter().flatten().map(Spec::legal)
}

/// Every case: also cases over caches of another type than queries, of selected keys, of shared
/// prefixes and of keys in two parts.
pub fn list_with_caches() -> impl Iterator<Item = Spec> {
    list().chain(caches()).chain(selection()).chain(prefixes()).chain(two_parts())
}

/// Cases of sequences that share their first keys.
pub fn prefixes() -> impl Iterator<Item = Spec> {
    prefixes::prefixes().into_iter().map(Spec::legal)
}

/// Cases of keys in two parts.
pub fn two_parts() -> impl Iterator<Item = Spec> {
    two_parts::two_parts().into_iter().map(Spec::legal)
}

/// The cases whose rows attend to lists of keys.
pub fn selection() -> impl Iterator<Item = Spec> {
    let groups = [
        selection::selection(),
        latent::selection(),
        page_lists::page_lists(),
        second_lists::second_lists(),
    ];
    groups.into_iter().flatten().map(Spec::legal)
}

/// The cases over caches of another type than queries.
pub fn caches() -> impl Iterator<Item = Spec> {
    caches::caches().into_iter().chain(latent::caches()).map(Spec::legal)
}

/// The few cases that together touch every feature: for sanitizers and emulators.
pub fn core() -> impl Iterator<Item = Spec> {
    list().filter(|spec| spec.core)
}

/// The cases of at most that much work ([`Spec::work`]), and the cheapest case of every kind: for
/// sanitizers and emulators, on which the largest cases take as long as all others together.
pub fn within(max_work: usize) -> impl Iterator<Item = Spec> {
    let mut cheapest = BTreeMap::new();
    for (number, spec) in list().enumerate() {
        let cheapest_of_kind =
            cheapest.entry(kind(&spec.name).to_string()).or_insert((spec.work(), number));
        *cheapest_of_kind = (*cheapest_of_kind).min((spec.work(), number));
    }
    let kept: BTreeSet<usize> = cheapest.into_values().map(|(_, number)| number).collect();
    let keeps =
        move |(number, spec): &(usize, Spec)| spec.work() <= max_work || kept.contains(number);
    list().enumerate().filter(keeps).map(|(_, spec)| spec)
}

/// The kind of a case by its name: its group and the first word after that, without numbers.
fn kind(name: &str) -> &str {
    let group = name.find('/').map_or(0, |slash| slash + 1);
    let word = name[group..].find(|c: char| c == '-' || c.is_ascii_digit());
    word.map_or(name, |end| &name[..group + end])
}

/// Query and key lengths around vectors of 4, 8 and 16 lanes and tiles of 64 and 128 keys.
fn lengths() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, q_len) in [1, 2, 3, 5, 8, 31, 33, 64, 65].into_iter().enumerate() {
        for (j, kv_len) in
            [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257].into_iter().enumerate()
        {
            let causal = (i + j) % 2 == 0;
            let dtype = FLOATS[(i + 2 * j) % 3];
            let name =
                format!("lengths/{q_len}x{kv_len}-{dtype}{}", if causal { "-causal" } else { "" });
            let spec =
                Spec::new(name).lengths(&[(q_len, kv_len)]).heads(2, 1).dims(16, 16).dtype(dtype);
            specs.push(Spec { causal, core: q_len == 3 && kv_len < 20, ..spec });
        }
    }
    specs.push(Spec::new("lengths/no-sequences").lengths(&[]));
    specs.push(Spec::new("lengths/no-queries").lengths(&[(0, 9)]));
    specs
}

/// Rows around a block of rows, keys around a split of keys, and many small items.
fn blocks_and_splits() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (rows, dims) in [(96, 576), (256, 144), (512, 16)] {
        for q_len in [rows - 1, rows, rows + 1] {
            let spec = Spec::new(format!("blocks/{q_len}-rows-dim-{dims}")).lengths(&[(q_len, 33)]);
            specs.push(spec.heads(1, 1).dims(dims, dims));
        }
        let q_len = rows / 3 + 1;
        let spec = Spec::new(format!("blocks/{q_len}x3-rows-dim-{dims}"))
            .lengths(&[(q_len, 65)])
            .heads(3, 1);
        specs.push(Spec { causal: true, ..spec.dims(dims, dims) });
    }
    for kv_len in [255, 256, 511, 513, 1023, 1024, 1025, 2048, 2049, 4097] {
        for batch_invariant in [false, true] {
            let mode = if batch_invariant { "-invariant" } else { "" };
            let spec =
                Spec::new(format!("splits/1x{kv_len}{mode}")).lengths(&[(1, kv_len)]).dims(16, 24);
            specs.push(Spec { batch_invariant, causal: true, core: kv_len == 1025, ..spec });
            let spec = Spec::new(format!("splits/3x{kv_len}-window{mode}"))
                .lengths(&[(3, kv_len)])
                .dims(8, 8);
            let window = Window { left: Some(300), right: None };
            specs.push(Spec { batch_invariant, causal: true, window, sinks: true, ..spec });
        }
    }
    // Most splits of the short sequences are empty.
    let lengths = [(1, 3000), (1, 0), (1, 1), (1, 700)];
    let spec = Spec::new("splits/uneven").lengths(&lengths).dims(16, 16);
    specs.push(Spec { keys: Keys::Ragged { slack: 1 }, ..spec });
    specs
}

/// Head dims that are a vector, none, and between; values of another dim than keys.
fn head_dims() -> Vec<Spec> {
    let equal = [1, 2, 3, 7, 8, 15, 16, 17, 31, 40, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576];
    let mixed = [
        (192, 128),
        (576, 512),
        (128, 64),
        (64, 128),
        (1, 3),
        (3, 1),
        (40, 80),
        (80, 96),
        (16, 576),
    ];
    let dims = equal.into_iter().map(|dim| (dim, dim)).chain(mixed);
    let mut specs = Vec::new();
    for (head_dim, value_dim) in dims {
        for dtype in FLOATS {
            let spec =
                Spec::new(format!("dims/{head_dim}-{value_dim}-{dtype}")).lengths(&[(5, 70)]);
            let core = (head_dim, value_dim) == (3, 1);
            specs.push(Spec { core, ..spec.heads(2, 1).dims(head_dim, value_dim).dtype(dtype) });
        }
        let spec = Spec::new(format!("dims/{head_dim}-{value_dim}-decode")).lengths(&[(1, 300)]);
        specs.push(Spec {
            causal: true,
            ..spec.heads(4, 1).dims(head_dim, value_dim).dtype(DType::BF16)
        });
    }
    specs
}

/// MHA, GQA and MQA, at decode, verify and prefill.
fn head_groups() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (query_heads, kv_heads) in
        [(1, 1), (3, 3), (3, 1), (4, 4), (8, 2), (9, 3), (8, 1), (16, 2), (71, 1)]
    {
        for (i, q_len) in [1, 7, 40].into_iter().enumerate() {
            let spec = Spec::new(format!("heads/{query_heads}-over-{kv_heads}-{q_len}-rows"))
                .lengths(&[(q_len, 90), (q_len, 90)])
                .heads(query_heads, kv_heads);
            specs.push(Spec { causal: true, ..spec.dims(24, 24).dtype(FLOATS[i]) });
        }
    }
    specs
}

/// Layouts, strides with padding, and output types.
fn layouts() -> Vec<Spec> {
    let mut specs = Vec::new();
    for dtype in FLOATS {
        for layout in [Layout::Bshd, Layout::Bhsd] {
            for (padding, slack) in [(0, 0), (3, 2), (8, 20)] {
                for out_dtype in [dtype, DType::F32] {
                    let name = format!("layouts/{layout:?}-pad-{padding}-{dtype}-to-{out_dtype}")
                        .to_lowercase();
                    let spec =
                        Spec::new(name).lengths(&[(6, 37), (6, 41)]).dims(20, 12).dtype(dtype);
                    let core = padding == 3;
                    let keys = Keys::Batched { slack };
                    specs.push(Spec {
                        layout,
                        padding,
                        out_dtype,
                        keys,
                        core,
                        causal: true,
                        ..spec
                    });
                }
                if dtype == DType::F32 {
                    specs.pop();
                }
            }
        }
    }
    specs
}

fn window(left: Option<usize>, right: Option<usize>) -> Window {
    Window { left, right }
}

/// Every feature without masks, alone.
fn features() -> Vec<(&'static str, Spec)> {
    let base = || Spec::new("");
    let offset = |offset| Spec { causal: true, offset: OffsetSpec::Same(offset), ..base() };
    vec![
        ("full", base()),
        ("causal", Spec { causal: true, ..base() }),
        ("causal-offset-0", offset(0)),
        ("causal-offset-3", offset(3)),
        ("causal-offset-negative", offset(-2)),
        ("causal-offset-all-empty", offset(-1000)),
        ("causal-offset-beyond", offset(1000)),
        ("offsets", Spec { causal: true, offset: OffsetSpec::PerSequence(vec![-3, 2]), ..base() }),
        ("window-left", Spec { window: window(Some(4), None), ..base() }),
        ("window-right", Spec { window: window(None, Some(2)), ..base() }),
        ("window-both", Spec { window: window(Some(9), Some(3)), ..base() }),
        ("window-self", Spec { window: window(Some(0), Some(0)), ..base() }),
        ("window-causal", Spec { causal: true, window: window(Some(7), None), ..base() }),
        (
            "window-wide",
            Spec { causal: true, window: window(Some(usize::MAX), Some(usize::MAX)), ..base() },
        ),
        (
            "window-past-the-keys",
            Spec { offset: OffsetSpec::Same(500), window: window(Some(5), Some(5)), ..base() },
        ),
        (
            "window-last-rows-empty",
            Spec { offset: OffsetSpec::Same(36), window: window(Some(5), None), ..base() },
        ),
        ("chunk", Spec { chunk: Some(5), ..base() }),
        ("chunk-causal", Spec { causal: true, chunk: Some(16), ..base() }),
        ("chunk-one", Spec { chunk: Some(1), ..base() }),
        ("chunk-beyond", Spec { causal: true, chunk: Some(i32::MAX as usize), ..base() }),
        (
            "chunk-window",
            Spec { causal: true, chunk: Some(8), window: window(Some(5), None), ..base() },
        ),
        (
            "chunk-offsets",
            Spec { chunk: Some(4), offset: OffsetSpec::PerSequence(vec![-3, 2]), ..base() },
        ),
        ("softcap", Spec { softcap: Some(2.5), ..base() }),
        ("softcap-large", Spec { softcap: Some(50.0), causal: true, ..base() }),
        ("alibi", Spec { alibi: true, ..base() }),
        ("alibi-causal", Spec { alibi: true, causal: true, ..base() }),
        ("alibi-offset", Spec { alibi: true, offset: OffsetSpec::Same(100), ..base() }),
        ("sinks", Spec { sinks: true, ..base() }),
        ("sinks-empty-rows", Spec { sinks: true, ..offset(-2) }),
        ("scale", Spec { scale: Some(0.7), ..base() }),
        ("scale-0", Spec { scale: Some(0.0), causal: true, ..base() }),
        ("scale-negative", Spec { scale: Some(-0.3), ..base() }),
        ("scale-large", Spec { scale: Some(20.0), ..base() }),
        ("batch-invariant", Spec { batch_invariant: true, causal: true, ..base() }),
    ]
}

/// Every feature alone, at decode, verify and prefill, in f32 and bf16.
fn variants() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (feature, base) in features() {
        for (kind, lengths) in [
            ("decode", vec![(1, 40), (1, 40)]),
            ("verify", vec![(6, 39), (6, 33)]),
            ("prefill", vec![(70, 70)]),
        ] {
            for dtype in [DType::F32, DType::BF16] {
                let spec = base.clone().lengths(&lengths).dims(16, 16).dtype(dtype);
                let name = format!("variants/{feature}-{kind}-{dtype}");
                specs.push(Spec { name, core: kind == "verify", ..spec });
            }
        }
    }
    specs
}

/// Boolean and additive masks, broadcast in each dimension.
fn masks() -> Vec<Spec> {
    let mut specs = Vec::new();
    let kinds = [
        ("bool", DType::Bool, Hide::Nothing),
        ("f32", DType::F32, Hide::Nothing),
        ("f32-1e5", DType::F32, Hide::Large),
        ("f32-inf", DType::F32, Hide::Infinite),
        ("f16-6e4", DType::F16, Hide::Large),
        ("f16-inf", DType::F16, Hide::Infinite),
        ("bf16-1e5", DType::BF16, Hide::Large),
    ];
    for (i, (kind, dtype, hide)) in kinds.into_iter().enumerate() {
        for (j, shape) in [0b0000, 0b0001, 0b0010, 0b0100, 0b1000, 0b1100, 0b1101, 0b0011, 0b1111]
            .into_iter()
            .enumerate()
        {
            let broadcast = [8, 4, 2, 1].map(|bit| shape & bit != 0);
            let spec = Spec::new(format!("masks/{kind}-broadcast-{shape:04b}"))
                .lengths(&[(6, 37), (6, 20)])
                .dims(16, 16)
                .dtype(FLOATS[(i + j) % 3]);
            let mask = Some(MaskSpec { dtype, hide, broadcast });
            specs.push(Spec { mask, causal: j % 2 == 1, core: shape == 0b1100, ..spec });
        }
        let mask = Some(MaskSpec { dtype, hide, broadcast: [true, true, false, false] });
        let spec = Spec::new(format!("masks/{kind}-prefill")).lengths(&[(70, 140)]).dims(16, 16);
        specs.push(Spec { mask, ..spec });
        let spec = Spec::new(format!("masks/{kind}-decode")).lengths(&[(1, 1100)]).dims(16, 16);
        specs.push(Spec { mask, ..spec });
    }
    specs
}

/// Speculative verify, more tokens than a word has bits too.
fn trees() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (q_len, kv_len) in
        [(1, 1), (1, 20), (2, 2), (7, 50), (31, 31), (32, 64), (33, 100), (70, 200), (9, 4)]
    {
        for (i, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
            let spec = Spec::new(format!("trees/{q_len}-of-{kv_len}-{dtype}"))
                .lengths(&[(q_len, kv_len); 2]);
            let spec = Spec {
                tree: true,
                causal: i == 0,
                core: q_len == 33,
                ..spec.dims(16, 16).dtype(dtype)
            };
            specs.push(spec);
        }
    }
    let spec = Spec::new("trees/ragged").lengths(&[(3, 20), (0, 5), (40, 60), (1, 0)]).dims(16, 16);
    specs.push(Spec {
        tree: true,
        ragged_queries: true,
        keys: Keys::Ragged { slack: 3 },
        core: true,
        ..spec
    });
    let spec = Spec::new("trees/window").lengths(&[(9, 60)]).dims(16, 16);
    specs.push(Spec { tree: true, window: window(Some(11), Some(2)), sinks: true, ..spec });
    specs
}

/// Sequences of many lengths, nothing among them.
fn ragged() -> Vec<Spec> {
    let mut specs = Vec::new();
    let lengths = [(3, 17), (0, 9), (1, 130), (40, 40), (5, 0), (0, 0), (2, 1), (1, 64)];
    for dtype in FLOATS {
        for (queries, ragged_queries) in [("ragged", true), ("batched", false)] {
            for (storage, keys) in [
                ("ragged", Keys::Ragged { slack: 0 }),
                ("ragged-slack", Keys::Ragged { slack: 5 }),
                ("batched", Keys::Batched { slack: 0 }),
                ("batched-slack", Keys::Batched { slack: 7 }),
            ] {
                let name = format!("ragged/{queries}-queries-{storage}-keys-{dtype}");
                let spec = Spec::new(name).lengths(&lengths).dims(16, 24).dtype(dtype);
                let core = dtype == DType::F16 && storage.contains("slack");
                specs.push(Spec { ragged_queries, keys, core, causal: true, ..spec });
            }
        }
    }
    let spec = Spec::new("ragged/all-empty").lengths(&[(0, 0), (0, 7), (0, 0)]);
    specs.push(Spec { ragged_queries: true, keys: Keys::Ragged { slack: 0 }, ..spec });
    let many: Vec<_> = (0..40).map(|i| (i % 4, i * 3)).collect();
    let spec = Spec::new("ragged/many").lengths(&many).dims(8, 8);
    specs.push(Spec {
        ragged_queries: true,
        keys: Keys::Ragged { slack: 0 },
        causal: true,
        ..spec
    });
    specs
}

/// Decode of many sequences: a GPU divides their work by warps up to 32 sequences, by CTAs up to
/// 256, and else in 64 bits, as it does large work.
fn many() -> Vec<Spec> {
    let ragged = |i: usize| (1, i * 7 % 90);
    let equal = |_| (1, 40);
    // So few have queries that each may take several CTAs.
    let sparse = |i: usize| (usize::from(i % 30 == 5), 4 * i);
    let large = |i: usize| (1, if i == 77 { 7000 } else { i % 60 });
    let batches = [
        ("ragged-33", 33, (8, 8), ragged as fn(usize) -> (usize, usize)),
        ("ragged-200", 200, (8, 2), ragged),
        ("ragged-300", 300, (8, 8), ragged),
        ("ragged-1000", 1000, (4, 1), ragged),
        ("equal-40", 40, (8, 8), equal),
        ("equal-300", 300, (8, 1), equal),
        ("sparse-300", 300, (2, 1), sparse),
        ("large-200", 200, (64, 64), large),
    ];
    let mut specs = Vec::new();
    for (name, count, (query_heads, kv_heads), lengths) in batches {
        for dtype in [DType::BF16, DType::F32] {
            let lengths: Vec<_> = (0..count).map(lengths).collect();
            let spec = Spec::new(format!("many/{name}-{dtype}")).lengths(&lengths).dtype(dtype);
            specs.push(Spec {
                ragged_queries: lengths.iter().any(|&(rows, _)| rows != 1),
                keys: Keys::Ragged { slack: 0 },
                causal: true,
                ..spec.heads(query_heads, kv_heads).dims(64, 64)
            });
        }
    }
    specs
}

/// Any page size, both page layouts, one pool or two, one query row or several.
fn paged() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, block_size) in [1, 7, 16, 64, 100, 128, 256].into_iter().enumerate() {
        for kv_layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for interleaved in [false, true] {
                for (j, q_len) in [1, 4, 17].into_iter().enumerate() {
                    let pools = if interleaved { "one-pool" } else { "two-pools" };
                    let name = format!("paged/{block_size}-{kv_layout:?}-{pools}-{q_len}-rows")
                        .to_lowercase();
                    let lengths = [(q_len, 150), (q_len, 0), (q_len, 64), (q_len, 65)];
                    let spec =
                        Spec::new(name).lengths(&lengths).dims(16, 16).dtype(FLOATS[(i + j) % 3]);
                    let keys = Keys::Paged { block_size, interleaved };
                    let core = block_size == 7 && q_len == 4;
                    specs.push(Spec { keys, kv_layout, core, causal: true, ..spec });
                }
            }
        }
        let keys = Keys::Paged { block_size, interleaved: false };
        let spec = Spec::new(format!("paged/{block_size}-window"))
            .lengths(&[(2, 900), (2, 30)])
            .dims(16, 16);
        specs.push(Spec { keys, causal: true, window: window(Some(50), None), ..spec });
        let spec = Spec::new(format!("paged/{block_size}-ragged")).lengths(&[
            (3, 40),
            (0, 300),
            (20, 130),
        ]);
        specs.push(Spec { keys, ragged_queries: true, causal: true, ..spec.dims(8, 40) });
        let spec =
            Spec::new(format!("paged/{block_size}-prefix-and-block")).lengths(&[(8, 200), (8, 70)]);
        specs.push(Spec { keys, ..spec.dims(16, 16) });
        let spec = Spec::new(format!("paged/{block_size}-long")).lengths(&[(1, 2500)]).dims(8, 8);
        specs.push(Spec { keys, causal: true, padding: 5, batch_invariant: i % 2 == 0, ..spec });
    }
    specs
}

/// The attention of models, by name.
fn models() -> Vec<Spec> {
    let paged = |block_size| Keys::Paged { block_size, interleaved: false };
    let bf16 = |name: &str| Spec::new(format!("models/{name}")).dtype(DType::BF16);
    vec![
        // Gemma 2: softcap and window.
        Spec {
            causal: true,
            softcap: Some(50.0),
            window: window(Some(30), None),
            ..bf16("gemma").lengths(&[(33, 80), (33, 80)]).heads(8, 4).dims(256, 256)
        },
        // gpt-oss: window and sinks, paged decode.
        Spec {
            causal: true,
            sinks: true,
            window: window(Some(127), None),
            keys: paged(16),
            ..bf16("gpt-oss").lengths(&[(1, 400), (1, 90), (1, 1)]).heads(16, 2).dims(64, 64)
        },
        // BLOOM and MPT: ALiBi.
        Spec {
            causal: true,
            alibi: true,
            ..bf16("bloom").lengths(&[(20, 120)]).heads(8, 8).dims(64, 64)
        },
        // DeepSeek: MLA in its two forms. In the second, values are a part of the keys.
        Spec {
            causal: true,
            ..bf16("mla-prefill").lengths(&[(40, 40)]).heads(4, 4).dims(192, 128)
        },
        Spec {
            causal: true,
            keys: paged(64),
            ..bf16("mla-decode").lengths(&[(1, 200), (1, 65)]).heads(16, 1).latent(576, 512)
        },
        // A block of a diffusion model against its prefix: everything sees everything.
        Spec {
            keys: paged(32),
            ..bf16("block-diffusion").lengths(&[(32, 132), (32, 64)]).heads(8, 2).dims(64, 64)
        },
        // Whisper: an encoder, and its cross attention.
        Spec {
            ..Spec::new("models/encoder")
                .dtype(DType::F16)
                .lengths(&[(75, 75)])
                .heads(6, 6)
                .dims(64, 64)
        },
        Spec {
            ..Spec::new("models/cross")
                .dtype(DType::F16)
                .lengths(&[(3, 150)])
                .heads(6, 6)
                .dims(64, 64)
        },
    ]
}

/// Attention as serving engines call it.
fn engines() -> Vec<Spec> {
    let paged = |block_size| Keys::Paged { block_size, interleaved: false };
    let bf16 = |name: &str| Spec::new(format!("models/{name}")).dtype(DType::BF16);
    vec![
        // Speculative verify over a paged cache.
        Spec {
            tree: true,
            keys: paged(16),
            sinks: true,
            ..bf16("verify").lengths(&[(40, 300), (40, 45)]).heads(8, 2).dims(128, 128)
        },
        // A padded batch, as transformers makes it: an additive mask over everything.
        Spec {
            mask: Some(MaskSpec {
                dtype: DType::F32,
                hide: Hide::Large,
                broadcast: [false, true, false, false],
            }),
            layout: Layout::Bhsd,
            ..Spec::new("models/transformers")
                .lengths(&[(24, 24), (24, 24)])
                .heads(9, 3)
                .dims(64, 64)
        },
        // Continuous batching: prefill and decode together.
        Spec {
            causal: true,
            ragged_queries: true,
            keys: paged(16),
            ..bf16("continuous-batching")
                .lengths(&[(60, 60), (1, 200), (1, 33), (17, 90), (1, 1)])
                .heads(8, 2)
                .dims(128, 128)
        },
    ]
}

/// Everything at once, in every storage and type.
fn everything() -> Vec<Spec> {
    let mut specs = Vec::new();
    for dtype in FLOATS {
        for (storage, keys) in [
            ("batched", Keys::Batched { slack: 3 }),
            ("ragged", Keys::Ragged { slack: 2 }),
            ("paged", Keys::Paged { block_size: 12, interleaved: true }),
        ] {
            let spec = Spec::new(format!("everything/{storage}-{dtype}"));
            specs.push(Spec {
                keys,
                ragged_queries: true,
                causal: true,
                core: true,
                padding: 2,
                window: window(Some(60), Some(3)),
                softcap: Some(8.0),
                alibi: true,
                sinks: true,
                mask: Some(MaskSpec {
                    dtype: DType::F32,
                    hide: Hide::Infinite,
                    broadcast: [false, true, false, false],
                }),
                offset: OffsetSpec::PerSequence(vec![40, -2, 7]),
                out_dtype: DType::F32,
                ..spec
                    .lengths(&[(9, 80), (4, 30), (0, 3), (1, 140)])
                    .heads(6, 2)
                    .dims(40, 24)
                    .dtype(dtype)
            });
        }
    }
    specs
}

fn random_compositions() -> Vec<Spec> {
    (0..120).map(|seed| Spec { core: seed < 8, ..random(seed) }).collect()
}

/// Everything composed at random: a small case, the same for the same seed.
pub fn random(seed: u64) -> Spec {
    let mut noise = Noise::new(seed, &[0x72616e646f6d]);
    let noise = &mut noise;
    let kv_heads = noise.pick(&[1, 1, 2, 3]);
    let sequences = noise.pick(&[1, 1, 2, 3, 5]);
    let longest_query = noise.pick(&[1, 1, 3, 8, 34, 70]);
    let longest_key = noise.pick(&[4, 20, 70, 140, 300]);
    let lengths: Vec<_> = (0..sequences)
        .map(|_| (noise.below(longest_query + 1), noise.below(longest_key + 1)))
        .collect();
    let block_size = noise.pick(&[1, 3, 7, 16, 32, 64, 100]);
    let keys = [
        Keys::Batched { slack: noise.below(4) },
        Keys::Ragged { slack: noise.below(4) },
        Keys::Paged { block_size, interleaved: noise.one_in(2) },
    ];
    let dtype = noise.pick(&FLOATS);
    let dims = [1, 3, 8, 16, 17, 32, 40, 64, 80, 96, 128];
    let head_dim = noise.pick(&dims);
    let value_dim = if noise.one_in(2) { head_dim } else { noise.pick(&dims) };
    let base = Spec::new(format!("random/{seed}"))
        .lengths(&lengths)
        .heads(kv_heads * noise.pick(&[1, 2, 3, 4]), kv_heads);
    let offset = match noise.below(4) {
        0 => OffsetSpec::Same(noise.below(40) as i64 - 10),
        1 => OffsetSpec::PerSequence((0..sequences).map(|_| noise.below(80) as i32 - 20).collect()),
        _ => OffsetSpec::BottomRight,
    };
    let mut side = || if noise.one_in(2) { Some(noise.below(50)) } else { None };
    let window = if side().is_some() { window(side(), side()) } else { Window::default() };
    let mask = MaskSpec {
        dtype: noise.pick(&[DType::Bool, DType::F32, DType::F16, DType::BF16]),
        hide: noise.pick(&[Hide::Nothing, Hide::Large, Hide::Infinite]),
        broadcast: [(); 4].map(|()| noise.one_in(2)),
    };
    Spec {
        seed,
        out_dtype: if noise.one_in(3) { DType::F32 } else { dtype },
        ragged_queries: noise.one_in(2),
        keys: noise.pick(&keys),
        layout: noise.pick(&[Layout::Bshd, Layout::Bhsd]),
        kv_layout: noise.pick(&[KvLayout::Nhd, KvLayout::Hnd]),
        padding: noise.pick(&[0, 0, 1, 8]),
        scale: if noise.one_in(4) { Some(0.2) } else { None },
        causal: noise.one_in(2),
        offset,
        window,
        softcap: if noise.one_in(3) { Some(noise.pick(&[1.5, 30.0])) } else { None },
        alibi: noise.one_in(3),
        sinks: noise.one_in(3),
        mask: if noise.one_in(3) { Some(mask) } else { None },
        tree: noise.one_in(6),
        batch_invariant: noise.one_in(4),
        dtype,
        ..base.dims(head_dim, value_dim)
    }
    .legal()
}
