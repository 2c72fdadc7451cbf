//! Axes of problems: each problem has one value per axis, so that coverage can be counted.

use crate::case::{KvLayout, Layout};
use crate::contents::{Numbers, Sinks, Slopes, Trees};
use crate::place::MemorySpec;
use crate::spec::Spec;
use crate::spec::{Caches, Entries, Granularity, Hide, Keys, OffsetSpec, Scales, SequenceSpec};
use regard::{DType, ListEntries, Values};

type Axis = (&'static str, &'static str);

/// A problem's value on each axis.
pub fn axes(spec: &Spec) -> Vec<Axis> {
    [types(spec), sizes(spec), memory(spec), scores(spec), masks(spec), lists(spec), modes(spec)]
        .concat()
}

/// Types of queries, caches and outputs.
fn types(spec: &Spec) -> Vec<Axis> {
    let stored = |dtype: DType| match dtype {
        _ if dtype == spec.dtype => "queries are",
        _ if dtype.is_float() => "another float",
        _ if dtype.is_code() => "codes",
        _ => "blocks",
    };
    let scaled = spec.key_dtype().is_code() || spec.value_dtype().is_code();
    vec![
        ("dtype", spec.dtype.name()),
        ("keys as", stored(spec.key_dtype())),
        ("values as", stored(spec.value_dtype())),
        (
            "scale per",
            match spec.cache.granularity {
                _ if !scaled => "nothing",
                Granularity::Tensor => "tensor",
                Granularity::Head => "head",
                Granularity::Page => "page",
                Granularity::Token => "token",
            },
        ),
        (
            "scales",
            match spec.cache.scales {
                _ if !scaled => "none",
                Scales::Fitted => "fitted",
                Scales::PowerOfTwo => "powers of two",
                Scales::Spread => "spread",
            },
        ),
        ("out", if spec.out_dtype == spec.dtype { "as in" } else { "f32" }),
    ]
}

/// Head dims, heads and lengths.
fn sizes(spec: &Spec) -> Vec<Axis> {
    let max = |length: fn(&SequenceSpec) -> usize| spec.sequences.iter().map(length).max();
    let min = |length: fn(&SequenceSpec) -> usize| spec.sequences.iter().map(length).min();
    let (rows, keys) = (max(|s| s.q_len).unwrap_or(0), max(|s| s.kv_len).unwrap_or(0));
    let group = spec.query_heads / spec.kv_heads.max(1);
    vec![
        ("Dk", dim(spec.head_dim)),
        (
            "values in",
            match spec.values {
                Values::KeyPrefix if spec.rotary_dim > 0 => "the keys, which are in two parts",
                Values::KeyPrefix => "the keys",
                _ => "a tensor of their own",
            },
        ),
        ("Dv", if spec.value_dim == spec.head_dim { "as Dk" } else { "other" }),
        (
            "heads",
            match (spec.kv_heads, group) {
                (_, 1) => "MHA",
                (1, _) => "MQA",
                _ => "GQA",
            },
        ),
        (
            "rows",
            match rows {
                0 => "none",
                1 => "decode",
                2..=8 => "verify",
                9..=64 => "few",
                _ => "prefill",
            },
        ),
        (
            "keys",
            match keys {
                0 => "none",
                1..=130 => "a tile",
                131..=599 => "some tiles",
                _ => "splits",
            },
        ),
        (
            "batch",
            match spec.sequences.len() {
                0 => "none",
                1 => "one",
                _ if min(|s| s.q_len.min(s.kv_len)) == Some(0) => "some empty",
                _ => "some",
            },
        ),
    ]
}

/// The memory layout and the numbers of operands.
fn memory(spec: &Spec) -> Vec<Axis> {
    vec![
        ("queries", if spec.ragged_queries { "ragged" } else { "batched" }),
        (
            "storage",
            match spec.keys {
                Keys::Batched { .. } => "batched",
                Keys::Ragged { .. } => "ragged",
                Keys::Paged { block_size, interleaved } => {
                    match (block_size.is_power_of_two(), interleaved) {
                        (true, true) => "interleaved pages of 2^n",
                        (true, false) => "pages of 2^n",
                        (false, true) => "interleaved pages",
                        (false, false) => "pages",
                    }
                }
            },
        ),
        ("layout", if spec.layout == Layout::Bshd { "bshd" } else { "bhsd" }),
        ("pages", if spec.kv_layout == KvLayout::Nhd { "nhd" } else { "hnd" }),
        ("q memory", place(&spec.memory.q)),
        ("k memory", place(&spec.memory.k)),
        ("v memory", place(&spec.memory.v)),
        ("out memory", place(&spec.memory.out)),
        ("q", numbers(spec.contents.q)),
        ("k", numbers(spec.contents.k)),
        ("v", numbers(spec.contents.v)),
    ]
}

/// Modifications of scores, and the range of keys that a row sees.
fn scores(spec: &Spec) -> Vec<Axis> {
    vec![
        (
            "scale",
            match spec.scale {
                None => "default",
                Some(0.0) => "zero",
                Some(scale) if scale < 0.0 => "negative",
                Some(_) => "given",
            },
        ),
        ("causal", if spec.causal { "yes" } else { "no" }),
        (
            "offset",
            match &spec.offset {
                OffsetSpec::BottomRight => "bottom right",
                OffsetSpec::Same(offset) if *offset < 0 => "negative",
                OffsetSpec::Same(_) => "given",
                OffsetSpec::PerSequence(_) => "per sequence",
            },
        ),
        (
            "key positions",
            match &spec.key_positions {
                None => "none",
                Some(positions) if positions.stride > 1 => "strided",
                Some(positions) if positions.offsets.len() > 1 => "per sequence",
                Some(_) => "from an offset",
            },
        ),
        (
            "window",
            match (spec.window.left, spec.window.right) {
                (None, None) => "none",
                (Some(0), Some(0)) => "self",
                (Some(_), None) => "left",
                (None, Some(_)) => "right",
                (Some(_), Some(_)) => "both",
            },
        ),
        ("chunk", if spec.chunk.is_some() { "yes" } else { "no" }),
        ("softcap", if spec.softcap.is_some() { "yes" } else { "no" }),
        (
            "alibi",
            match (spec.alibi, spec.slope_kind) {
                (false, _) => "no",
                (_, Slopes::Geometric) => "geometric",
                (_, Slopes::Signed) => "signed",
                (_, Slopes::Zero) => "zero",
                (_, Slopes::Steep) => "steep",
                (_, Slopes::Extreme) => "extreme",
            },
        ),
        (
            "sinks",
            match (spec.sinks, spec.sink_kind) {
                (false, _) => "no",
                (_, Sinks::Normal) => "normal",
                (_, Sinks::Infinite) => "minus infinity",
                (_, Sinks::Large) => "large",
                (_, Sinks::Extreme) => "extreme",
            },
        ),
    ]
}

/// Masks inside that range.
fn masks(spec: &Spec) -> Vec<Axis> {
    vec![
        (
            "mask",
            match spec.mask.map(|mask| mask.dtype) {
                None => "no",
                Some(DType::Bool) => "bool",
                Some(DType::F16) => "f16",
                Some(DType::BF16) => "bf16",
                Some(_) => "f32",
            },
        ),
        (
            "mask hides",
            match spec.mask.map(|mask| mask.hide) {
                None => "no mask",
                Some(Hide::Nothing) => "nothing",
                Some(Hide::Large) => "by -1e5",
                Some(Hide::Infinite) => "by -inf",
                Some(Hide::Blocks) => "blocks",
                Some(Hide::Rare) => "rarely",
                Some(Hide::Lowest) => "by the lowest",
                Some(Hide::Extreme) => "extreme",
            },
        ),
        (
            "mask broadcast",
            match spec.mask.map(|mask| mask.broadcast) {
                None => "no mask",
                Some([.., true, true]) => "rows and keys",
                Some([.., true, false]) => "rows",
                Some([.., true]) => "keys",
                Some([true, true, ..]) => "batch and heads",
                Some([true, ..]) => "batch",
                Some([_, true, ..]) => "heads",
                Some(_) => "none",
            },
        ),
        (
            "tree",
            match (spec.tree, spec.tree_kind) {
                (false, _) => "no",
                (_, Trees::Ancestors) => "ancestors",
                (_, Trees::Arbitrary) => "arbitrary",
            },
        ),
    ]
}

/// Lists of the keys that rows attend to.
fn lists(spec: &Spec) -> Vec<Axis> {
    let Some(lists) = spec.lists else {
        return vec![("lists", "no"), ("list entries", "no lists")];
    };
    let has_two = matches!(lists.caches, Caches::Two { .. });
    let kind = match (lists.of, lists.per_head) {
        (ListEntries::Slots, false) if has_two => "slots of two caches per row",
        (ListEntries::Slots, true) if has_two => "slots of two caches per row and head",
        (ListEntries::Keys, false) => "per row",
        (ListEntries::Keys, true) => "per row and head",
        (ListEntries::Slots, false) => "slots per row",
        (ListEntries::Slots, true) => "slots per row and head",
        (ListEntries::Pages, false) => "pages per sequence",
        (ListEntries::Pages, true) => "pages per sequence and head",
        (_, false) => "numbered pages per sequence",
        (_, true) => "numbered pages per sequence and head",
    };
    let entries = match (lists.entries, lists.counts) {
        (Entries::All, _) => "all keys",
        (Entries::Sorted, _) => "sorted",
        (Entries::Any, false) => "any",
        (Entries::Any, true) => "any, with counts",
    };
    vec![("lists", kind), ("list entries", entries)]
}

/// Further outputs and modes, and memory that a kernel must not touch.
fn modes(spec: &Spec) -> Vec<Axis> {
    vec![
        ("invariant", if spec.batch_invariant { "yes" } else { "no" }),
        ("lse", if spec.lse { "yes" } else { "no" }),
        ("unseen", if spec.poison { "poisoned" } else { "ordinary" }),
        ("stray entries", if spec.stray_entries { "yes" } else { "no" }),
        ("prefix groups", if spec.prefixes.is_some() { "yes" } else { "no" }),
    ]
}

fn dim(dim: usize) -> &'static str {
    match dim {
        0..=31 => "up to 31",
        32..=64 => "up to 64",
        65..=96 => "up to 96",
        97..=128 => "up to 128",
        129..=192 => "up to 192",
        193..=256 => "up to 256",
        257..=512 => "up to 512",
        _ => "up to 576",
    }
}

fn place(memory: &MemorySpec) -> &'static str {
    match memory {
        _ if *memory == MemorySpec::default() => "row-major",
        MemorySpec { first, .. } if first % 8 != 0 => "unaligned",
        MemorySpec { order, .. } if *order != [0, 1, 2] => "permuted",
        _ => "gaps",
    }
}

fn numbers(numbers: Numbers) -> &'static str {
    match numbers {
        Numbers::Normal => "normal",
        Numbers::Constant(_) => "constant",
        Numbers::Positive => "positive",
        Numbers::Scaled(factor) if factor > 1.0 => "huge",
        Numbers::Scaled(_) => "tiny",
        Numbers::Peaked => "peaked",
        Numbers::Outliers => "outliers",
        Numbers::Spread(_) => "spread",
    }
}
