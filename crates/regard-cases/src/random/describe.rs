//! A problem in a line of words.

use crate::case::{KvLayout, Layout};
use crate::contents::Contents;
use crate::place::MemorySpec;
use crate::spec::{CacheSpec, KeyPositionsSpec, Keys, ListSpec, OffsetSpec, PrefixSpec, Spec};
use regard::{Values, Window};

/// Describes a problem by its differences from plain attention.
pub fn describe(spec: &Spec) -> String {
    let mut words = vec![
        format!("{} to {}", spec.dtype, spec.out_dtype),
        format!("heads {} over {}", spec.query_heads, spec.kv_heads),
        format!("dims {} and {}", spec.head_dim, spec.value_dim),
    ];
    let lengths: Vec<_> =
        spec.sequences.iter().map(|s| format!("{}x{}", s.q_len, s.kv_len)).collect();
    words.push(format!("rows x keys {}", lengths.join(" ")));
    let mut say = |holds: bool, what: String| {
        if holds {
            words.push(what);
        }
    };
    say(spec.ragged_queries, "ragged queries".into());
    match spec.keys {
        Keys::Batched { slack } => say(slack > 0, format!("{slack} unused keys")),
        Keys::Ragged { slack } => say(true, format!("ragged keys, {slack} unused")),
        Keys::Paged { block_size, interleaved } => {
            let order = if spec.kv_layout == KvLayout::Hnd { "hnd" } else { "nhd" };
            let interleaved = if interleaved { ", interleaved" } else { "" };
            say(true, format!("pages of {block_size} {order}{interleaved}"));
        }
    }
    if spec.cache != CacheSpec::default() {
        let (keys, values) = (spec.key_dtype(), spec.value_dtype());
        let CacheSpec { granularity, scales, .. } = spec.cache;
        say(true, format!("keys in {keys}, values in {values}"));
        let scaled = keys.is_code() || values.is_code();
        say(scaled, format!("{scales:?} scales per {granularity:?}").to_lowercase());
    }
    say(spec.values == Values::KeyPrefix, "values a prefix of the keys".into());
    say(spec.layout == Layout::Bhsd, "bhsd".into());
    say(spec.padding > 0, format!("padding {}", spec.padding));
    let memory = &spec.memory;
    let all = [
        ("q", memory.q),
        ("k", memory.k),
        ("v", memory.v),
        ("out", memory.out),
        ("mask", memory.mask),
    ];
    for (name, MemorySpec { first, order, gaps }) in all {
        let plain = MemorySpec { first, order, gaps } == MemorySpec::default();
        say(!plain, format!("{name} from element {first}, order {order:?}, gaps {gaps:?}"));
    }
    say(spec.causal, "causal".into());
    match &spec.offset {
        OffsetSpec::BottomRight => {}
        OffsetSpec::Same(offset) => say(true, format!("offset {offset}")),
        OffsetSpec::PerSequence(offsets) => say(true, format!("offsets {offsets:?}")),
    }
    if let Some(KeyPositionsSpec { offsets, stride }) = &spec.key_positions {
        say(true, format!("keys from {offsets:?} by {stride}"));
    }
    let side = |side: Option<usize>| side.map_or("none".into(), |side| side.to_string());
    let Window { left, right } = spec.window;
    say(spec.window != Window::default(), format!("window [{}, {}]", side(left), side(right)));
    if let Some(chunk) = spec.chunk {
        say(true, format!("chunks of {chunk}"));
    }
    if let Some(scale) = spec.scale {
        say(true, format!("scale {scale}"));
    }
    if let Some(cap) = spec.softcap {
        say(true, format!("softcap {cap}"));
    }
    say(spec.alibi, format!("{:?} slopes", spec.slope_kind).to_lowercase());
    say(spec.sinks, format!("{:?} sinks", spec.sink_kind).to_lowercase());
    if let Some(mask) = spec.mask {
        let broadcast: String =
            mask.broadcast.iter().map(|&one| if one { '1' } else { 'n' }).collect();
        let hide = format!("{:?}", mask.hide).to_lowercase();
        say(true, format!("mask {} of {broadcast} hiding {hide}", mask.dtype));
    }
    say(spec.tree, format!("tree of {:?} bits", spec.tree_kind).to_lowercase());
    if let Some(ListSpec { len, entries, per_head, counts, slots }) = spec.lists {
        let entries = format!("{entries:?}").to_lowercase();
        let of = if slots { "physical slots" } else { "keys" };
        let per_head = if per_head { " per key/value head" } else { "" };
        let counts = if counts { " with counts" } else { "" };
        say(true, format!("lists of {len} {of} ({entries}){per_head}{counts}"));
    }
    if let Some(PrefixSpec { groups, lens }) = &spec.prefixes {
        say(true, format!("prefix groups {groups:?} of {lens:?} keys"));
    }
    say(spec.batch_invariant, "batch-invariant".into());
    say(!spec.lse, "no lse".into());
    if spec.contents != Contents::default() {
        let Contents { q, k, v } = spec.contents;
        say(true, format!("q {q:?}, k {k:?}, v {v:?}").to_lowercase());
    }
    say(!spec.poison, "nothing poisoned".into());
    words.join(", ")
}
