//! Keys at positions of their own: the shards of sequences that are spread over devices.

use super::{FLOATS, window};
use crate::contents::Slopes;
use crate::spec::{Hide, Keys, MaskSpec, OffsetSpec, Spec};
use regard::{DType, KeyLayout, MAX_KEY_STRIDE, Shard, Window};

/// All of them.
pub(super) fn positions() -> Vec<Spec> {
    [features_of_shards(), far(), masked(), latent(), devices()].into_iter().flatten().collect()
}

/// Features that count from positions, and some beside them.
fn features() -> Vec<(&'static str, Spec)> {
    let base = || Spec::new("");
    let around = window(Some(70), Some(45));
    vec![
        ("full", base()),
        ("causal", Spec { causal: true, ..base() }),
        ("window-left", Spec { causal: true, window: window(Some(90), None), ..base() }),
        ("window-both", Spec { window: around, ..base() }),
        ("window-self", Spec { window: window(Some(0), Some(0)), sinks: true, ..base() }),
        ("chunk", Spec { chunk: Some(100), ..base() }),
        ("chunk-causal", Spec { causal: true, chunk: Some(64), ..base() }),
        ("chunk-window", Spec { chunk: Some(33), window: around, ..base() }),
        ("alibi", Spec { alibi: true, ..base() }),
        ("alibi-causal", Spec { alibi: true, causal: true, ..base() }),
        ("alibi-signed", Spec { alibi: true, slope_kind: Slopes::Signed, ..base() }),
        ("softcap", Spec { softcap: Some(2.5), causal: true, sinks: true, ..base() }),
        ("invariant", Spec { batch_invariant: true, causal: true, alibi: true, ..base() }),
    ]
}

/// Shards: offsets of keys, stride, and the position of the first row of each sequence.
const SHARDS: [(&str, &[i32], usize, &[i32]); 9] = [
    ("first", &[0], 1, &[150]),
    ("contiguous", &[60], 1, &[140]),
    ("after-all-rows", &[700], 1, &[150]),
    ("before-all-rows", &[-900], 1, &[150]),
    ("contiguous-each", &[-30, 88], 1, &[60, 40]),
    ("by-2", &[1], 2, &[130]),
    ("by-3", &[-100], 3, &[20]),
    ("by-8-each", &[5, -411], 8, &[700, -60]),
    ("by-61", &[7, 2], 61, &[1500]),
];

/// Every feature over every kind of shard, storages and kernels in turn.
fn features_of_shards() -> Vec<Spec> {
    let storage = [
        Keys::Batched { slack: 0 },
        Keys::Paged { block_size: 16, interleaved: false },
        Keys::Ragged { slack: 3 },
        Keys::Paged { block_size: 64, interleaved: true },
        Keys::Batched { slack: 5 },
        Keys::Paged { block_size: 7, interleaved: false },
    ];
    let kinds = [
        ("decode", [(1, 200), (1, 65), (1, 0)], (128, 128)),
        ("prefill", [(140, 260), (70, 130), (9, 0)], (128, 128)),
        ("verify", [(6, 150), (6, 90), (6, 1)], (64, 64)),
        ("prefill", [(130, 300), (75, 64), (3, 20)], (64, 64)),
        ("wide", [(70, 150), (33, 140), (5, 0)], (512, 512)),
        ("decode", [(1, 700), (2, 30), (1, 128)], (80, 96)),
    ];
    let mut specs = Vec::new();
    for (i, (shard, offsets, stride, positions)) in SHARDS.into_iter().enumerate() {
        for (j, (feature, base)) in features().into_iter().enumerate() {
            let (kind, lengths, (head_dim, value_dim)) = kinds[(i + j) % kinds.len()];
            let dtype = FLOATS[(i + j / 2) % 3];
            let spec = base.lengths(&lengths).heads(2 + 2 * (j % 2), 2).dims(head_dim, value_dim);
            let spec = spec.dtype(dtype).key_positions(offsets, stride);
            specs.push(Spec {
                name: format!("positions/{kind}-{shard}-{feature}-{dtype}"),
                core: kind == "verify" && i % 2 == 0,
                offset: row_positions(positions),
                keys: storage[(2 * i + j) % storage.len()],
                ragged_queries: true,
                ..spec
            });
        }
    }
    specs
}

fn row_positions(positions: &[i32]) -> OffsetSpec {
    match *positions {
        [position] => OffsetSpec::Same(i64::from(position)),
        _ => OffsetSpec::PerSequence(positions.to_vec()),
    }
}

/// Positions and strides at the ends of their ranges, which 32 bits cannot add up.
fn far() -> Vec<Spec> {
    let (min, max) = (i32::MIN, i32::MAX);
    let wide = MAX_KEY_STRIDE;
    let half = window(Some(1 << 20), Some(1 << 20));
    let all: [(&str, i32, usize, i32, Spec); 10] = [
        ("last", max - 40, 1, max - 8, Spec { causal: true, ..Spec::new("") }),
        (
            "last-window",
            max - 90,
            1,
            max - 60,
            Spec { window: window(Some(9), Some(4)), ..Spec::new("") },
        ),
        ("first", min, 1, min + 30, Spec { causal: true, ..Spec::new("") }),
        ("first-chunk", min, 1, min + 30, Spec { chunk: Some(24), ..Spec::new("") }),
        ("apart", min, 1, max - 8, Spec { causal: true, alibi: true, ..Spec::new("") }),
        ("apart-before", max, 1, min, Spec { causal: true, ..Spec::new("") }),
        ("strides", -(1 << 20), wide, 900, Spec { causal: true, ..Spec::new("") }),
        ("strides-window", max - 7, wide, max - 8, Spec { window: half, ..Spec::new("") }),
        ("strides-alibi", 11, wide, 1 << 20, Spec { alibi: true, ..Spec::new("") }),
        (
            "strides-chunk",
            min,
            wide - 1,
            min + (1 << 20),
            Spec { chunk: Some(max as usize), ..Spec::new("") },
        ),
    ];
    let mut specs = Vec::new();
    for (i, (name, offset, stride, position, base)) in all.into_iter().enumerate() {
        for (j, rows) in [1, 7, 70].into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let spec = base.clone().lengths(&[(rows, 90), (rows, 70)]).dims(64, 64).dtype(dtype);
            specs.push(Spec {
                name: format!("positions/far-{name}-{rows}-rows-{dtype}"),
                offset: OffsetSpec::Same(i64::from(position)),
                ..spec.key_positions(&[offset], stride)
            });
        }
    }
    specs
}

/// Masks, whose columns are keys of the shard.
fn masked() -> Vec<Spec> {
    let kinds = [
        (DType::Bool, Hide::Nothing),
        (DType::F32, Hide::Infinite),
        (DType::BF16, Hide::Large),
        (DType::Bool, Hide::Blocks),
    ];
    let mut specs = Vec::new();
    for (i, (dtype, hide)) in kinds.into_iter().enumerate() {
        for (j, (rows, keys)) in [(1, 300), (5, 90), (150, 420)].into_iter().enumerate() {
            let mask = MaskSpec { dtype, hide, broadcast: [false, true, i == 2, false] };
            let spec = Spec::new(format!("positions/mask-{dtype}-{hide:?}-{rows}").to_lowercase())
                .lengths(&[(rows, keys), (rows, keys / 2)])
                .dims(64, 128)
                .dtype(FLOATS[(i + j) % 3]);
            specs.push(Spec {
                mask: Some(mask),
                causal: i % 2 == 0,
                alibi: i == 1,
                offset: OffsetSpec::PerSequence(vec![310, 77]),
                ..spec.key_positions(&[3, -40], 1 + j)
            });
        }
    }
    specs
}

/// Decode over a latent cache whose tokens several devices take in turn.
fn latent() -> Vec<Spec> {
    let mut specs = Vec::new();
    let windows = [Window::default(), window(Some(200), None), Window::default()];
    for (i, window) in windows.into_iter().enumerate() {
        for (j, (rows, heads)) in [(1, 16), (2, 64), (1, 128)].into_iter().enumerate() {
            let spec = Spec::new(format!("positions/latent-{i}-{rows}x{heads}"))
                .lengths(&[(rows, 330), (rows, 64)])
                .heads(heads, 1)
                .latent(576, 512)
                .dtype(DType::BF16);
            specs.push(Spec {
                keys: Keys::Paged { block_size: 64, interleaved: false },
                causal: i < 2,
                alibi: i == 2,
                window,
                offset: OffsetSpec::PerSequence(vec![800, 127]),
                ..spec.key_positions(&[i as i32, 1], [4, 1, 3][j])
            });
        }
    }
    specs
}

/// One prompt and one decoded token over 1 to 4 devices, each with its own keys.
fn devices() -> Vec<Spec> {
    const TOKENS: usize = 203;
    let mut specs = Vec::new();
    for count in 1..=4 {
        for rank in 0..count {
            for rows in [1, 96] {
                let layout = [KeyLayout::Contiguous, KeyLayout::RoundRobin][rank % 2];
                let shard = Shard { rank, count, layout };
                let keys = shard.positions(TOKENS).expect("a rank below the count");
                let name = format!("positions/shard-{rank}-of-{count}-{layout:?}-{rows}");
                let spec = Spec::new(name.to_lowercase())
                    .lengths(&[(rows, keys.len)])
                    .dims(128, 128)
                    .dtype(DType::BF16);
                specs.push(Spec {
                    causal: true,
                    sinks: rank == 0,
                    offset: OffsetSpec::Same((TOKENS - rows) as i64),
                    ..spec.key_positions(&[keys.offset as i32], keys.stride)
                });
            }
        }
    }
    specs
}
