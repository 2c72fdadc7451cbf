//! Contents of operands: numbers of one sign, huge, tiny and peaked ones, and parameters at the
//! bounds of the contract.

use super::{FLOATS, window};
use crate::contents::{Contents, Numbers, Sinks, Slopes};
use crate::spec::{Hide, Keys, MaskSpec, OffsetSpec, Spec};
use regard::DType;

/// Decoding, verifying and a prefill over several tiles.
const LENGTHS: [(&str, (usize, usize)); 3] =
    [("decode", (1, 700)), ("verify", (7, 150)), ("prefill", (90, 210))];

/// All of them.
pub(super) fn numbers() -> Vec<Spec> {
    [contents(), masks(), parameters()].into_iter().flatten().collect()
}

/// Kinds of numbers, in every type and class of head dims.
fn contents() -> Vec<Spec> {
    let scaled =
        |q, k, v| Contents { q: Numbers::Scaled(q), k: Numbers::Scaled(k), v: Numbers::Scaled(v) };
    let mixed = Contents { v: Numbers::Constant(0.1), ..Contents::from_numbers(Numbers::Positive) };
    let kinds = [
        ("constant", Contents::from_numbers(Numbers::Constant(0.3))),
        // Products that are exact in any order.
        (
            "constant-exact",
            Contents {
                q: Numbers::Constant(0.5),
                ..Contents::from_numbers(Numbers::Constant(0.25))
            },
        ),
        ("positive", Contents::from_numbers(Numbers::Positive)),
        ("positive-constant-values", mixed),
        ("peaked", Contents::from_numbers(Numbers::Peaked)),
        ("outliers", Contents::from_numbers(Numbers::Outliers)),
        // Scores of every size up to one key that takes all, values near the largest that f32 and
        // f16 can add up.
        ("huge", scaled(1e3, 1e3, 1e30)),
        ("huge-scores", scaled(1e17, 1e17, 1.0)),
        ("huge-queries", scaled(1e12, 1e-12, 1.0)),
        // Products that vanish, and values that are subnormal or may count as 0.
        ("tiny", scaled(1e-25, 1e-25, 1e-37)),
        ("tiny-values", scaled(1.0, 1.0, 1e-40)),
    ];
    let dims = [(64, 64), (128, 128), (320, 264), (576, 512), (192, 128), (256, 256), (40, 80)];
    let mut specs = Vec::new();
    for (i, (kind, contents)) in kinds.into_iter().enumerate() {
        for (j, (head_dim, value_dim)) in dims.into_iter().enumerate() {
            let (way, lengths) = LENGTHS[(i + j) % 3];
            for dtype in [FLOATS[0], FLOATS[1 + (i + j) % 2]] {
                let name = format!("numbers/{kind}-{way}-{head_dim}-{dtype}");
                let spec = Spec::new(name).lengths(&[lengths]).heads(2, 1);
                specs.push(Spec {
                    contents,
                    causal: i % 2 == 0,
                    out_dtype: DType::F32,
                    core: head_dim == 40 && dtype == DType::F32,
                    ..spec.dims(head_dim, value_dim).dtype(dtype)
                });
            }
        }
    }
    // Thousands of equal keys and values.
    for (i, q_len) in [1, 5, 20, 70].into_iter().enumerate() {
        for batch_invariant in [false, true] {
            let mode = if batch_invariant { "-invariant" } else { "" };
            let spec = Spec::new(format!("numbers/equal-keys-{q_len}-rows{mode}"))
                .lengths(&[(q_len, 4100)]);
            let contents =
                Contents { q: Numbers::Normal, ..Contents::from_numbers(Numbers::Constant(0.3)) };
            specs.push(Spec {
                contents,
                batch_invariant,
                ..spec.heads(1, 1).dims(16, 16).dtype(FLOATS[i % 3])
            });
        }
    }
    specs
}

/// Additive masks of the lowest number there is, and of any.
fn masks() -> Vec<Spec> {
    let mut specs = Vec::new();
    for (i, (kind, hide)) in
        [("lowest", Hide::Lowest), ("extreme", Hide::Extreme)].into_iter().enumerate()
    {
        for (j, mask_dtype) in FLOATS.into_iter().enumerate() {
            for (k, (way, lengths)) in LENGTHS.into_iter().enumerate() {
                let dtype = FLOATS[(j + k) % 3];
                let broadcast = [true, k % 2 == 0, false, false];
                let spec = Spec::new(format!("numbers/mask-{kind}-of-{mask_dtype}-{way}-{dtype}"));
                let spec = spec.lengths(&[lengths]).heads(2, 1).dims(64, 64).dtype(dtype);
                specs.push(Spec {
                    mask: Some(MaskSpec { dtype: mask_dtype, hide, broadcast }),
                    sinks: (i + j + k) % 2 == 0,
                    sink_kind: [Sinks::Normal, Sinks::Extreme][k % 2],
                    softcap: (j == 2).then_some(30.0),
                    alibi: k == 1,
                    causal: j == 0,
                    core: way == "verify",
                    ..spec
                });
            }
        }
    }
    specs
}

/// Scales, softcaps, slopes and sinks as large as they may be, and positions as far away.
fn parameters() -> Vec<Spec> {
    let large = (1u64 << 60) as f32;
    let offset = |offset| OffsetSpec::Same(offset);
    let (first, last) = (i64::from(i32::MIN), i64::from(i32::MAX));
    let base = || Spec::new("");
    let kinds = [
        ("scale-largest", Spec { scale: Some(large), ..base() }),
        ("scale-smallest", Spec { scale: Some(-1e-38), ..base() }),
        ("softcap-largest", Spec { softcap: Some(large), ..base() }),
        ("softcap-smallest", Spec { softcap: Some(1.0 / large), ..base() }),
        ("softcap-and-scale", Spec { softcap: Some(1.0 / large), scale: Some(-large), ..base() }),
        ("slopes", Spec { alibi: true, slope_kind: Slopes::Extreme, ..base() }),
        (
            "slopes-far-after",
            Spec { alibi: true, slope_kind: Slopes::Extreme, offset: offset(last), ..base() },
        ),
        ("alibi-far-after", Spec { alibi: true, offset: offset(last), ..base() }),
        (
            "alibi-far-before",
            Spec { alibi: true, slope_kind: Slopes::Signed, offset: offset(first), ..base() },
        ),
        (
            "window-far-after",
            Spec { window: window(Some(usize::MAX), None), offset: offset(last), ..base() },
        ),
        ("sinks", Spec { sinks: true, sink_kind: Sinks::Extreme, ..base() }),
    ];
    let mut specs = Vec::new();
    for (i, (kind, base)) in kinds.into_iter().enumerate() {
        for (j, (way, lengths)) in LENGTHS.into_iter().enumerate() {
            let dtype = FLOATS[(i + j) % 3];
            let spec = base.clone().lengths(&[lengths]).heads(4, 2).dims(64, 64).dtype(dtype);
            let keys =
                [Keys::Batched { slack: 1 }, Keys::Paged { block_size: 16, interleaved: false }]
                    [i % 2];
            specs.push(Spec {
                name: format!("numbers/{kind}-{way}-{dtype}"),
                keys,
                core: j == 1,
                ..spec
            });
        }
    }
    specs
}
