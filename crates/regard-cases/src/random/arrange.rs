//! The same sequences arranged otherwise. This must not change a bit of a batch-invariant problem.

use crate::case::{KvLayout, Layout};
use crate::noise::Noise;
use crate::spec::{
    Granularity, KeyPositionsSpec, Keys, OffsetSpec, OperandMemory, SequenceSpec, Spec,
};

/// A kind of rearrangement of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// One of its sequences by itself, stored otherwise.
    Alone,
    /// The later rows of a sequence by themselves, as the next chunk of a prompt.
    LaterChunk,
    /// The earlier rows, before the later keys are there.
    EarlierChunk,
    /// All sequences in other pages.
    Pages,
    /// All sequences in the other order and another layout, with one more.
    Among,
}

/// Rearrangements to compare with a problem, drawn from its seed.
pub fn arrangements(spec: &Spec) -> Vec<Spec> {
    let mut noise = Noise::new(spec.seed, &[0x61_7272_616e_6765]);
    let noise = &mut noise;
    let mut all = Vec::new();
    let batch = spec.sequences.len();
    // Keys of a shared page are the keys of one sequence. Apart from that sequence, the others
    // would have other keys.
    if batch == 0 || spec.prefixes.is_some() {
        return all;
    }
    let apart = can_be_apart(spec);
    if batch > 1 && apart {
        all.push(stored_otherwise(noise, alone(spec, noise.clone().below(batch))));
    }
    // Trees speak of the last tokens of their sequence: rows by themselves are another tree.
    let long: Vec<usize> = (0..batch).filter(|&index| spec.sequences[index].q_len > 1).collect();
    if !spec.tree && apart && !long.is_empty() {
        let index = noise.pick(&long);
        let cut = 1 + noise.below(spec.sequences[index].q_len - 1);
        all.push(stored_otherwise(noise, later_chunk(spec, index, cut)));
        if let Some(earlier) = earlier_chunk(spec, index, cut) {
            all.push(earlier);
        }
    }
    let block_size = noise.pick(&[1, 7, 16, 64, 100]);
    let keys = Keys::Paged { block_size, interleaved: noise.one_in(2) };
    let keys = if has_fixed_pages(spec) { spec.keys } else { keys };
    let kv_layout = noise.pick(&[KvLayout::Nhd, KvLayout::Hnd]);
    let pages = Spec { keys, kv_layout, page_seed: noise.bits(), ..spec.clone() };
    all.push(named(pages.legal(), "pages"));
    if batch > 1 && apart {
        all.push(among(spec));
    }
    all.retain(|arranged| has_one_shared_scale(arranged) == has_one_shared_scale(spec));
    all
}

/// Whether scales per token are the scales of a single token. They cannot be told from scales per
/// head, and make another problem than the same token among others.
fn has_one_shared_scale(spec: &Spec) -> bool {
    let scaled = spec.key_dtype().is_code() || spec.value_dtype().is_code();
    let slots = match spec.keys {
        Keys::Batched { slack } => spec.max_lens().keys + slack,
        Keys::Ragged { slack } => spec.sequences.iter().map(|s| s.kv_len + slack).sum(),
        Keys::Paged { .. } => return false,
    };
    scaled && spec.cache.granularity == Granularity::Token && slots <= 1
}

/// Whether codes, or the keys of lists of pages, are other ones in pages of another size.
fn has_fixed_pages(spec: &Spec) -> bool {
    let scaled = spec.key_dtype().is_code() || spec.value_dtype().is_code();
    scaled && spec.cache.granularity == Granularity::Page || spec.lists_pages()
}

/// Whether sequences keep their masks by themselves. A description makes masks by position. If
/// sequences at different positions share one row of a mask, the row is made for the last of them.
fn can_be_apart(spec: &Spec) -> bool {
    let shared = spec.mask.is_some_and(|mask| mask.broadcast[0] && !mask.broadcast[2]);
    let positions = positions(spec);
    !shared || positions.iter().all(|&position| position == positions[0])
}

/// The kind of that rearrangement.
pub fn kind_of(arranged: &Spec) -> Arrangement {
    match arranged.name.rsplit_once('/').map_or("", |(_, name)| name) {
        name if name.starts_with("alone") => Arrangement::Alone,
        name if name.starts_with("rows-from") => Arrangement::LaterChunk,
        name if name.starts_with("rows-to") => Arrangement::EarlierChunk,
        "pages" => Arrangement::Pages,
        _ => Arrangement::Among,
    }
}

/// The rearrangement in words.
pub fn words(spec: &Spec, arranged: &Spec) -> String {
    let storage = format!("{:?}, {:?}, {:?}", arranged.keys, arranged.layout, arranged.kv_layout);
    let name =
        arranged.name.strip_prefix(&spec.name).unwrap_or(&arranged.name).trim_start_matches('/');
    let sequences: Vec<_> = arranged.sequences.iter().map(|s| (s.q_len, s.kv_len)).collect();
    let offsets: Vec<_> =
        (0..arranged.sequences.len()).map(|i| arranged.first_position(i)).collect();
    format!("{name} (rows and keys {sequences:?}, positions {offsets:?}; {storage}) has other bits")
}

fn named(spec: Spec, name: impl std::fmt::Display) -> Spec {
    Spec { name: format!("{}/{name}", spec.name), ..spec }
}

/// Positions of each sequence, written out.
fn positions(spec: &Spec) -> Vec<i32> {
    (0..spec.sequences.len()).map(|index| spec.first_position(index) as i32).collect()
}

/// A sequence of the problem by itself, or some of its rows and keys.
fn one(spec: &Spec, index: usize, sequence: SequenceSpec, position: i64) -> Spec {
    let offset = OffsetSpec::PerSequence(vec![position as i32]);
    let key_positions = key_offsets(spec)
        .map(|(offsets, stride)| KeyPositionsSpec { offsets: vec![offsets[index]], stride });
    Spec { sequences: vec![sequence], offset, key_positions, ..spec.clone() }
}

/// Positions of each sequence's first key, written out, and their stride.
fn key_offsets(spec: &Spec) -> Option<(Vec<i32>, usize)> {
    let stride = spec.key_positions.as_ref()?.stride;
    let offsets = (0..spec.sequences.len()).map(|index| spec.keys_of(index).offset as i32);
    Some((offsets.collect(), stride))
}

fn alone(spec: &Spec, index: usize) -> Spec {
    let sequence = spec.sequences[index];
    named(one(spec, index, sequence, spec.first_position(index)), format!("alone-{}", sequence.id))
}

fn later_chunk(spec: &Spec, index: usize, cut: usize) -> Spec {
    let sequence = spec.sequences[index];
    let chunk = SequenceSpec { q_len: sequence.q_len - cut, ..sequence };
    let position = spec.first_position(index) + cut as i64;
    named(one(spec, index, chunk, position), format!("rows-from-{cut}-of-sequence-{}", sequence.id))
}

/// Causal rows before `cut` see none of the keys from their last position on.
fn earlier_chunk(spec: &Spec, index: usize, cut: usize) -> Option<Spec> {
    let sequence = spec.sequences[index];
    let position = spec.first_position(index);
    let keys = spec.keys_of(index).before(position + cut as i64);
    let chunk = SequenceSpec { q_len: cut, kv_len: keys, ..sequence };
    let spec = named(
        one(spec, index, chunk, position),
        format!("rows-to-{cut}-of-sequence-{}", sequence.id),
    );
    // Lists are drawn from all keys of the sequence.
    (spec.causal && !spec.tree && spec.lists.is_none()).then_some(spec)
}

/// All sequences from the last to the first, and another one between them.
fn among(spec: &Spec) -> Spec {
    let mut sequences = spec.sequences.clone();
    let mut offsets = positions(spec);
    let guest = SequenceSpec { id: 1 << 32, q_len: sequences[0].q_len, kv_len: 300 };
    sequences.insert(1, guest);
    offsets.insert(1, offsets[0]);
    sequences.reverse();
    offsets.reverse();
    let key_positions = key_offsets(spec).map(|(mut offsets, stride)| {
        offsets.insert(1, offsets[0]);
        offsets.reverse();
        KeyPositionsSpec { offsets, stride }
    });
    let layout = if spec.layout == Layout::Bshd { Layout::Bhsd } else { Layout::Bshd };
    // Physical slots, and pages without numbers, have no positions.
    let offset = match spec.has_listed_pool() && !spec.has_page_numbers() {
        true => OffsetSpec::BottomRight,
        false => OffsetSpec::PerSequence(offsets),
    };
    named(
        Spec {
            sequences,
            offset,
            key_positions,
            layout,
            memory: OperandMemory::default(),
            ..spec.clone()
        },
        "among",
    )
}

fn stored_otherwise(noise: &mut Noise, spec: Spec) -> Spec {
    let keys = [
        Keys::Batched { slack: noise.below(4) },
        Keys::Ragged { slack: noise.below(4) },
        Keys::Paged { block_size: noise.pick(&[1, 8, 13, 16, 64]), interleaved: noise.one_in(2) },
    ];
    let keys = noise.pick(&keys);
    Spec {
        keys: if has_fixed_pages(&spec) { spec.keys } else { keys },
        ragged_queries: noise.one_in(2),
        layout: noise.pick(&[Layout::Bshd, Layout::Bhsd]),
        padding: noise.pick(&[0, 0, 1, 8]),
        page_seed: noise.bits(),
        ..spec
    }
    .legal()
}
