//! Makes a failing problem smaller and plainer for as long as it fails in the same way.

use crate::case::{KvLayout, Layout};
use crate::contents::{Contents, Numbers, Sinks, Slopes, Trees};
use crate::place::MemorySpec;
use crate::spec::{CacheSpec, Caches, Entries, Granularity, KeyPositionsSpec, ListSpec, Scales};
use crate::spec::{Hide, Keys, MaskSpec, OffsetSpec, OperandMemory, Spec};
use regard::{DType, ListEntries, Values, Window};

/// The plainest problem found for which `fails` still holds, after at most `tries` of them.
pub fn shrink(spec: &Spec, mut tries: usize, mut fails: impl FnMut(&Spec) -> bool) -> Spec {
    let mut best = spec.clone();
    let mut progress = true;
    while progress {
        progress = false;
        let mut number = 0;
        // After a success the list is made anew, and the walk goes on from the same place: changes
        // that failed before seldom help right afterwards.
        while let Some(candidate) = candidates(&best).into_iter().nth(number) {
            let candidate = candidate.legal();
            if candidate == best {
                number += 1;
                continue;
            }
            if tries == 0 {
                return best;
            }
            tries -= 1;
            if fails(&candidate) {
                best = candidate;
                progress = true;
            } else {
                number += 1;
            }
        }
    }
    best
}

/// Problems one step plainer, the largest steps first. Each is smaller or has a feature less, so
/// that shrinking ends.
fn candidates(spec: &Spec) -> Vec<Spec> {
    let mut all = Vec::new();
    sequences(spec, &mut all);
    features(spec, &mut all);
    lengths(spec, &mut all);
    heads_and_dims(spec, &mut all);
    all
}

fn sequences(spec: &Spec, all: &mut Vec<Spec>) {
    let count = spec.sequences.len();
    let without = |range: std::ops::Range<usize>| {
        let mut without = spec.clone();
        without.sequences.drain(range.clone());
        if let OffsetSpec::PerSequence(_) = spec.offset {
            let mut offsets: Vec<_> =
                (0..count).map(|index| spec.first_position(index) as i32).collect();
            offsets.drain(range.clone());
            without.offset = OffsetSpec::PerSequence(offsets);
        }
        if let Some(positions) = &mut without.key_positions {
            positions.offsets = (0..count).map(|i| spec.keys_of(i).offset as i32).collect();
            positions.offsets.drain(range.clone());
        }
        without
    };
    if count > 1 {
        all.push(without(count / 2..count));
        all.push(without(0..count / 2));
    }
    if count > 2 {
        all.extend((0..count).map(|index| without(index..index + 1)));
    }
}

/// Adds the problem with a change to the candidates.
type With<'a> = &'a mut dyn FnMut(&dyn Fn(&mut Spec));

fn features(spec: &Spec, all: &mut Vec<Spec>) {
    let mut with = |change: &dyn Fn(&mut Spec)| {
        let mut changed = spec.clone();
        change(&mut changed);
        all.push(changed);
    };
    caches_and_lists(spec, &mut with);
    options(&mut with);
    numbers_and_memory(&mut with);
    details(spec, &mut with);
}

/// The storage of keys and values, the keys that a row attends to, and the sequences that share
/// them.
fn caches_and_lists(spec: &Spec, with: With) {
    with(&|s| s.cache = CacheSpec::default());
    with(&|s| s.rotary_dim = 0);
    with(&|s| s.values = Values::Separate);
    with(&|s| s.cache.k = None);
    with(&|s| s.cache.v = None);
    with(&|s| s.cache.granularity = Granularity::Head);
    with(&|s| s.cache.scales = Scales::Fitted);
    with(&|s| s.lists = None);
    with(&|s| s.prefixes = None);
    if let Some(prefixes) = &spec.prefixes {
        let halved = |s: &mut Spec| {
            if let Some(prefixes) = &mut s.prefixes {
                prefixes.lens.iter_mut().for_each(|len| *len /= 2);
            }
        };
        let one_group = |s: &mut Spec| {
            if let Some(prefixes) = &mut s.prefixes {
                prefixes.groups = vec![0];
                prefixes.lens.truncate(1);
            }
        };
        with(&halved);
        if prefixes.groups != [0] {
            with(&one_group);
        }
    }
    if let Some(lists) = spec.lists {
        with(&|s| s.lists = Some(ListSpec { len: lists.len / 2, ..lists }));
        with(&|s| s.lists = Some(ListSpec { len: lists.len - lists.len.min(1), ..lists }));
        with(&|s| s.lists = Some(ListSpec { caches: Caches::One, ..lists }));
        with(&|s| s.lists = Some(ListSpec { per_head: false, ..lists }));
        with(&|s| s.lists = Some(ListSpec { counts: false, ..lists }));
        with(&|s| s.lists = Some(ListSpec { of: ListEntries::Keys, ..lists }));
        with(&|s| s.lists = Some(ListSpec { entries: Entries::Sorted, ..lists }));
        with(&|s| s.lists = Some(ListSpec { entries: Entries::All, ..lists }));
    }
}

/// Options of attention, layouts and outputs.
fn options(with: With) {
    with(&|s| s.mask = None);
    with(&|s| s.tree = false);
    with(&|s| s.window = Window::default());
    with(&|s| s.window.left = None);
    with(&|s| s.window.right = None);
    with(&|s| s.chunk = None);
    with(&|s| s.softcap = None);
    with(&|s| s.alibi = false);
    with(&|s| s.sinks = false);
    with(&|s| s.causal = false);
    with(&|s| s.key_positions = None);
    with(&|s| s.offset = OffsetSpec::BottomRight);
    with(&|s| s.scale = None);
    with(&|s| s.batch_invariant = false);
    with(&|s| s.contents = Contents::default());
    with(&|s| s.memory = OperandMemory::default());
    with(&|s| s.padding = 0);
    with(&|s| s.keys = Keys::Batched { slack: 0 });
    with(&|s| s.ragged_queries = false);
    with(&|s| s.layout = Layout::Bshd);
    with(&|s| s.kv_layout = KvLayout::Nhd);
    with(&|s| s.out_dtype = s.dtype);
    with(&|s| s.poison = false);
    with(&|s| s.stray_entries = false);
    with(&|s| s.lse = false);
}

/// The numbers of operands, and their memory layout.
fn numbers_and_memory(with: With) {
    with(&|s| s.contents.q = Numbers::Normal);
    with(&|s| s.contents.k = Numbers::Normal);
    with(&|s| s.contents.v = Numbers::Normal);
    with(&|s| s.memory.q = MemorySpec::default());
    with(&|s| s.memory.k = MemorySpec::default());
    with(&|s| s.memory.v = MemorySpec::default());
    with(&|s| s.memory.out = MemorySpec::default());
    with(&|s| s.memory.mask = MemorySpec::default());
    with(&|s| s.slope_kind = Slopes::Geometric);
    with(&|s| s.sink_kind = Sinks::Normal);
    with(&|s| s.tree_kind = Trees::Ancestors);
}

/// Plainer forms of features that stay.
fn details(spec: &Spec, with: With) {
    if let Keys::Paged { block_size, interleaved } = spec.keys {
        with(&|s| s.keys = Keys::Paged { block_size, interleaved: false });
        if block_size > 16 {
            with(&|s| s.keys = Keys::Paged { block_size: 16, interleaved });
        }
    }
    if let Some(KeyPositionsSpec { offsets, stride }) = &spec.key_positions {
        with(&|s| s.key_positions = Some(KeyPositionsSpec { offsets: offsets.clone(), stride: 1 }));
        for offsets in [vec![0], vec![offsets[0]]] {
            with(&|s| {
                s.key_positions =
                    Some(KeyPositionsSpec { offsets: offsets.clone(), stride: *stride });
            });
        }
    }
    if let Some(MaskSpec { dtype, hide, broadcast }) = spec.mask {
        if dtype != DType::Bool && dtype != DType::F32 {
            with(&|s| s.mask = Some(MaskSpec { dtype: DType::F32, hide, broadcast }));
        }
        if hide != Hide::Nothing {
            with(&|s| s.mask = Some(MaskSpec { dtype, hide: Hide::Nothing, broadcast }));
        }
        for (dim, _) in broadcast.iter().enumerate().filter(|(_, broadcast)| !**broadcast) {
            let mut broadcast = broadcast;
            broadcast[dim] = true;
            with(&|s| s.mask = Some(MaskSpec { dtype, hide, broadcast }));
        }
    }
}

/// Smaller numbers to try, down to `min`: the minimum, half, a little less.
fn smaller(number: usize, min: usize) -> Vec<usize> {
    let mut all = vec![min, number / 2, number - number / 4, number.saturating_sub(1)];
    all.retain(|&other| other >= min && other < number);
    all.dedup();
    all
}

fn lengths(spec: &Spec, all: &mut Vec<Spec>) {
    let max_len = spec.sequences.iter().map(|sequence| sequence.q_len).max().unwrap_or(0);
    if !spec.ragged_queries {
        // All of them at once: they are equal.
        for q_len in smaller(max_len, 1) {
            let mut changed = spec.clone();
            changed.sequences.iter_mut().for_each(|sequence| sequence.q_len = q_len);
            all.push(changed);
        }
    }
    for (index, sequence) in spec.sequences.iter().enumerate() {
        for q_len in smaller(sequence.q_len, 0).into_iter().filter(|_| spec.ragged_queries) {
            let mut changed = spec.clone();
            changed.sequences[index].q_len = q_len;
            all.push(changed);
        }
        for kv_len in smaller(sequence.kv_len, 0) {
            let mut changed = spec.clone();
            changed.sequences[index].kv_len = kv_len;
            all.push(changed);
        }
    }
}

fn heads_and_dims(spec: &Spec, all: &mut Vec<Spec>) {
    let group = spec.query_heads / spec.kv_heads.max(1);
    all.extend(smaller(spec.kv_heads, 1).into_iter().map(|n| spec.clone().heads(n * group, n)));
    all.extend(
        smaller(group, 1).into_iter().map(|n| spec.clone().heads(spec.kv_heads * n, spec.kv_heads)),
    );
    let (head_dim, value_dim) = (spec.head_dim, spec.value_dim);
    all.extend(smaller(head_dim.min(value_dim), 1).into_iter().map(|n| spec.clone().dims(n, n)));
    all.extend(smaller(head_dim, 1).into_iter().map(|n| spec.clone().dims(n, value_dim)));
    all.extend(smaller(value_dim, 1).into_iter().map(|n| spec.clone().dims(head_dim, n)));
    // Down to the next multiple of 16: kernels differ there.
    let shorter = |n: usize| if n > 16 { (n - 1) / 16 * 16 } else { n };
    all.push(spec.clone().dims(shorter(head_dim), shorter(value_dim)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Profile, problem};

    #[test]
    fn shrinks_to_what_matters() {
        // A defect of windows to the left over pages with at least 9 rows, whatever else there is.
        let defect = |spec: &Spec| {
            let long = spec.sequences.iter().any(|sequence| sequence.q_len >= 9);
            spec.window.left.is_some() && matches!(spec.keys, Keys::Paged { .. }) && long
        };
        let mut shrunk = 0;
        for number in 0..3000 {
            let spec = problem(5, number, Profile::All);
            if !defect(&spec) {
                continue;
            }
            shrunk += 1;
            let plain = shrink(&spec, 2000, defect);
            assert!(defect(&plain), "{plain:?}");
            assert_eq!(plain.sequences.len(), 1, "{plain:?}");
            assert_eq!((plain.sequences[0].q_len, plain.sequences[0].kv_len), (9, 0));
            assert_eq!(
                (plain.query_heads, plain.kv_heads, plain.head_dim, plain.value_dim),
                (1, 1, 1, 1)
            );
            assert!(
                plain.mask.is_none()
                    && !plain.tree
                    && !plain.causal
                    && plain.window.right.is_none()
            );
            assert_eq!(plain.memory, OperandMemory::default());
        }
        assert!(shrunk > 20, "{shrunk}");
    }

    #[test]
    fn a_budget_is_kept() {
        let spec = problem(5, 1, Profile::All);
        let mut tried = 0;
        shrink(&spec, 17, |_| {
            tried += 1;
            true
        });
        assert!(tried <= 17);
    }
}
