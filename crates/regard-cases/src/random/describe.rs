//! A problem in a line of words.

use crate::case::{KvLayout, Layout};
use crate::contents::Contents;
use crate::place::MemorySpec;
use crate::spec::{
    CacheSpec, Caches, KeyPositionsSpec, Keys, ListSpec, OffsetSpec, PrefixSpec, Spec,
};
use regard::{ListEntries, Values, Window};

/// The parts of a description.
struct Words(Vec<String>);

impl Words {
    fn add(&mut self, part: String) {
        self.0.push(part);
    }

    /// Adds a part if it holds.
    fn add_if(&mut self, holds: bool, part: String) {
        if holds {
            self.add(part);
        }
    }
}

/// Describes a problem by its differences from plain attention.
pub fn describe(spec: &Spec) -> String {
    let mut words = Words(vec![
        format!("{} to {}", spec.dtype, spec.out_dtype),
        format!("heads {} over {}", spec.query_heads, spec.kv_heads),
        format!("dims {} and {}", spec.head_dim, spec.value_dim),
    ]);
    let lengths: Vec<_> =
        spec.sequences.iter().map(|s| format!("{}x{}", s.q_len, s.kv_len)).collect();
    words.add(format!("rows x keys {}", lengths.join(" ")));
    storage(spec, &mut words);
    positions(spec, &mut words);
    scores(spec, &mut words);
    masks_and_lists(spec, &mut words);
    modes(spec, &mut words);
    words.0.join(", ")
}

/// The storage of keys and values, and the memory of operands.
fn storage(spec: &Spec, words: &mut Words) {
    words.add_if(spec.ragged_queries, "ragged queries".into());
    match spec.keys {
        Keys::Batched { slack } => words.add_if(slack > 0, format!("{slack} unused keys")),
        Keys::Ragged { slack } => words.add(format!("ragged keys, {slack} unused")),
        Keys::Paged { block_size, interleaved } => {
            let order = if spec.kv_layout == KvLayout::Hnd { "hnd" } else { "nhd" };
            let interleaved = if interleaved { ", interleaved" } else { "" };
            words.add(format!("pages of {block_size} {order}{interleaved}"));
        }
    }
    if spec.cache != CacheSpec::default() {
        let (keys, values) = (spec.key_dtype(), spec.value_dtype());
        let CacheSpec { granularity, scales, .. } = spec.cache;
        words.add(format!("keys in {keys}, values in {values}"));
        let scaled = keys.is_code() || values.is_code();
        words.add_if(scaled, format!("{scales:?} scales per {granularity:?}").to_lowercase());
    }
    words.add_if(spec.values == Values::KeyPrefix, "values a prefix of the keys".into());
    let parts = format!("{} rotary dims in a tensor of their own", spec.rotary_dim);
    words.add_if(spec.rotary_dim > 0, parts);
    words.add_if(spec.layout == Layout::Bhsd, "bhsd".into());
    words.add_if(spec.padding > 0, format!("padding {}", spec.padding));
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
        words
            .add_if(!plain, format!("{name} from element {first}, order {order:?}, gaps {gaps:?}"));
    }
}

/// Positions of queries and keys, and the range of keys that a row sees.
fn positions(spec: &Spec, words: &mut Words) {
    words.add_if(spec.causal, "causal".into());
    match &spec.offset {
        OffsetSpec::BottomRight => {}
        OffsetSpec::Same(offset) => words.add(format!("offset {offset}")),
        OffsetSpec::PerSequence(offsets) => words.add(format!("offsets {offsets:?}")),
    }
    if let Some(KeyPositionsSpec { offsets, stride }) = &spec.key_positions {
        words.add(format!("keys from {offsets:?} by {stride}"));
    }
    let side = |side: Option<usize>| side.map_or("none".into(), |side| side.to_string());
    let Window { left, right } = spec.window;
    words.add_if(
        spec.window != Window::default(),
        format!("window [{}, {}]", side(left), side(right)),
    );
    if let Some(chunk) = spec.chunk {
        words.add(format!("chunks of {chunk}"));
    }
}

/// Modifications of scores.
fn scores(spec: &Spec, words: &mut Words) {
    if let Some(scale) = spec.scale {
        words.add(format!("scale {scale}"));
    }
    if let Some(cap) = spec.softcap {
        words.add(format!("softcap {cap}"));
    }
    words.add_if(spec.alibi, format!("{:?} slopes", spec.slope_kind).to_lowercase());
    words.add_if(spec.sinks, format!("{:?} sinks", spec.sink_kind).to_lowercase());
}

/// Masks, lists of keys and shared prefixes.
fn masks_and_lists(spec: &Spec, words: &mut Words) {
    if let Some(mask) = spec.mask {
        let broadcast: String =
            mask.broadcast.iter().map(|&one| if one { '1' } else { 'n' }).collect();
        let hide = format!("{:?}", mask.hide).to_lowercase();
        words.add(format!("mask {} of {broadcast} hiding {hide}", mask.dtype));
    }
    words.add_if(spec.tree, format!("tree of {:?} bits", spec.tree_kind).to_lowercase());
    if let Some(ListSpec { len, entries, per_head, counts, of, caches }) = spec.lists {
        let entries = format!("{entries:?}").to_lowercase();
        let of = match of {
            ListEntries::Keys => "keys",
            ListEntries::Slots => "physical slots",
            ListEntries::Pages => "keys in pages",
            _ => "keys in numbered pages",
        };
        let per_head = if per_head { " per key/value head" } else { "" };
        let counts = if counts { " with counts" } else { "" };
        let second = match caches {
            Caches::Two { second } => format!(", {second} of them of a second cache"),
            Caches::One | Caches::SecondOfTwo { .. } => String::new(),
        };
        words.add(format!("lists of {len} {of} ({entries}){per_head}{counts}{second}"));
    }
    if let Some(PrefixSpec { groups, lens }) = &spec.prefixes {
        words.add(format!("prefix groups {groups:?} of {lens:?} keys"));
    }
}

/// Modes, outputs and the numbers of operands.
fn modes(spec: &Spec, words: &mut Words) {
    words.add_if(spec.batch_invariant, "batch-invariant".into());
    words.add_if(!spec.lse, "no lse".into());
    if spec.contents != Contents::default() {
        let Contents { q, k, v } = spec.contents;
        words.add(format!("q {q:?}, k {k:?}, v {v:?}").to_lowercase());
    }
    words.add_if(!spec.poison, "nothing poisoned".into());
}
