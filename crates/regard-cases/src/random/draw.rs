//! Draws problems: everything that the contract allows, jointly.

use crate::case::{KvLayout, Layout};
use crate::contents::{Contents, Numbers, Sinks, Slopes, Trees};
use crate::noise::Noise;
use crate::place::MemorySpec;
use crate::spec::{CacheSpec, Caches, Entries, Granularity, KeyPositionsSpec, ListSpec, Scales};
use crate::spec::{Hide, Keys, MaskSpec, OffsetSpec, OperandMemory, SequenceSpec, Spec};
use regard::{DType, ListEntries, MAX_KEY_STRIDE, Values, Window};

/// The kind of problems to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Profile {
    /// All: most are small, a few are large.
    #[default]
    All,
    /// Small ones with 65 to 257 query rows, so that CUDA's prefill kernels take them, for
    /// emulators.
    Prefill,
    /// Small ones only, for emulators and interpreters.
    Small,
    /// Many short sequences of few query rows over q8_0 or q4_0 blocks of 4 key/value heads and
    /// more, which decode on Hopper takes in tiles of several heads.
    Batches,
}

/// The maximum cost of the problems of a profile.
struct Limits {
    /// Multiplications ([`Spec::work`]).
    work: usize,
    /// Elements of queries, keys, values, outputs and mask together.
    elements: usize,
    /// Query rows that a longer sequence keeps when it is cut to the limits.
    min_rows: usize,
    /// Keys that sequences of more keys keep.
    min_keys: usize,
}

/// Query rows from which on every kernel of CUDA's prefill family is asked.
const PREFILL_ROWS: usize = 65;

/// Head dims that models have and kernels are made for; drawn with their neighbours.
const DIMS: [usize; 9] = [64, 80, 96, 128, 160, 192, 256, 512, 576];

/// Slots of a page.
const BLOCK_SIZES: [usize; 18] =
    [1, 2, 3, 5, 7, 8, 12, 16, 16, 16, 32, 33, 48, 64, 64, 100, 128, 256];

/// Keys around vectors, tiles and splits.
const KEYS: [usize; 20] =
    [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1025, 2049];

/// The problem of a number: the same for the same seed, number and profile.
pub fn problem(seed: u64, number: u64, profile: Profile) -> Spec {
    let mut noise = Noise::new(seed, &[0x636f_6d70_6f73_6564, number]);
    let noise = &mut noise;
    let limits = limits(noise, profile);
    if profile == Profile::Batches {
        let spec = Spec::new(format!("random/{seed}/{number}"));
        let spec = batches(noise, spec).legal();
        return within(noise, spec, &limits);
    }
    // Half of the problems suit specialized kernels: aligned rows of the dims that models have.
    let tidy = noise.one_in(2);
    let dtype = noise.pick(&[DType::F32, DType::F16, DType::BF16]);
    let (mut head_dim, mut value_dim) = dims(noise, tidy);
    if profile == Profile::Prefill && !noise.one_in(4) {
        // Smaller ones leave room for more heads and keys.
        (head_dim, value_dim) = (head_dim.min(192), value_dim.min(192));
    }
    let kv_heads = noise.pick(&[1, 1, 1, 2, 2, 3, 4]);
    let group = noise.pick(&[1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16]);
    let group = if noise.one_in(60) { 71 } else { group };
    let ragged_queries = noise.one_in(2);
    let spec = Spec {
        seed: noise.bits(),
        page_seed: noise.bits(),
        dtype,
        out_dtype: if noise.one_in(3) { DType::F32 } else { dtype },
        sequences: sequences(noise, profile, ragged_queries),
        ragged_queries,
        keys: keys(noise),
        layout: noise.pick(&[Layout::Bshd, Layout::Bhsd]),
        kv_layout: noise.pick(&[KvLayout::Nhd, KvLayout::Hnd]),
        padding: if tidy { noise.pick(&[0, 0, 8]) } else { noise.pick(&[0, 0, 1, 8]) },
        ..Spec::new(format!("random/{seed}/{number}"))
    };
    let spec = spec.heads(kv_heads * group, kv_heads).dims(head_dim, value_dim);
    let spec = variant(noise, spec);
    let mut spec = data(noise, spec, tidy);
    // Batch-invariant problems run in decode on CUDA, for any number of rows.
    spec.batch_invariant &= profile != Profile::Prefill;
    // From numbers of its own: everything else is as it is over a cache of the queries' type.
    let spec = cache(&mut Noise::new(seed, &[0x63_6163_6865, number]), spec);
    let spec = latent(&mut Noise::new(seed, &[0x6c61_7465_6e74, number]), spec);
    let spec = lists(&mut Noise::new(seed, &[0x6c_6973_7473, number]), spec);
    let spec = prefixes(&mut Noise::new(seed, &[0x7072_6566_6978, number]), spec);
    within(noise, spec.legal(), &limits)
}

/// Many short sequences of few rows over blocks.
fn batches(noise: &mut Noise, spec: Spec) -> Spec {
    let dim = noise.pick(&[64, 64, 128, 128, 256]);
    let kv_heads: usize = noise.pick(&[4, 4, 8, 8, 12, 16]);
    let group: usize = noise.pick(&[1, 1, 2, 3, 4, 4, 5, 7, 8]);
    let dtype = noise.pick(&[DType::F16, DType::BF16]);
    let ragged_queries = noise.one_in(4);
    let first = 1 + noise.below(8 / group);
    let mut sequence = |id| {
        let q_len = if ragged_queries { 1 + noise.below(8 / group) } else { first };
        let kv_len = match noise.below(8) {
            0 => 0,
            1 => noise.pick(&KEYS[..16]),
            _ => noise.below(70),
        };
        SequenceSpec { id, q_len, kv_len }
    };
    // Some plans are for GPUs of two multiprocessors, which have enough to read.
    let count = 60 / kv_heads as u64 + 2;
    let sequences = (0..count).map(&mut sequence).collect();
    let blocks = noise.pick(&[DType::Q8_0, DType::Q8_0, DType::Q4_0]);
    let spec = Spec {
        seed: noise.bits(),
        page_seed: noise.bits(),
        dtype,
        out_dtype: if noise.one_in(3) { DType::F32 } else { dtype },
        sequences,
        ragged_queries,
        keys: keys(noise),
        layout: noise.pick(&[Layout::Bshd, Layout::Bhsd]),
        kv_layout: noise.pick(&[KvLayout::Nhd, KvLayout::Nhd, KvLayout::Hnd]),
        causal: noise.one_in(2),
        sinks: noise.one_in(3),
        ..spec
    };
    let spec = spec.heads(kv_heads * group, kv_heads).dims(dim, dim);
    let spec = if noise.one_in(4) { variant(noise, spec) } else { spec };
    let mut spec = data(noise, spec, true);
    spec.cache = CacheSpec {
        k: Some(blocks),
        v: Some(blocks),
        granularity: Granularity::Head,
        scales: noise.pick(&[Scales::Fitted, Scales::Fitted, Scales::Spread]),
    };
    spec
}

/// Sequences that share their first keys, in a third of the problems with pages.
fn prefixes(noise: &mut Noise, spec: Spec) -> Spec {
    if !noise.one_in(3) || spec.sequences.len() < 2 {
        return spec;
    }
    let count = 1 + noise.below(3);
    let group = |noise: &mut Noise| noise.below(count + 1) as i32 - 1;
    let groups: Vec<i32> = (0..spec.sequences.len()).map(|_| group(noise)).collect();
    let longest = spec.sequences.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0);
    let lens: Vec<usize> = (0..count)
        .map(|_| match noise.below(3) {
            0 => longest,
            1 => noise.below(longest + 1),
            _ => noise.pick(&KEYS),
        })
        .collect();
    spec.prefixes(&groups, &lens)
}

/// The storage of keys and values. In a third of the problems it differs from the queries'.
fn cache(noise: &mut Noise, mut spec: Spec) -> Spec {
    const FORMATS: [DType; 8] = [
        DType::E4M3,
        DType::E5M2,
        DType::I8,
        DType::Q8_0,
        DType::Q4_0,
        DType::F32,
        DType::F16,
        DType::BF16,
    ];
    if !noise.one_in(3) {
        return spec;
    }
    let one = |noise: &mut Noise| noise.pick(&FORMATS);
    let (k, v) = match noise.below(4) {
        0 => (Some(one(noise)), Some(one(noise))),
        1 => (Some(one(noise)), None),
        2 => (None, Some(one(noise))),
        _ => {
            let both = Some(one(noise));
            (both, both)
        }
    };
    let granularity = noise.pick(&[
        Granularity::Tensor,
        Granularity::Head,
        Granularity::Page,
        Granularity::Token,
        Granularity::Token,
    ]);
    let scales = noise.pick(&[Scales::Fitted, Scales::PowerOfTwo, Scales::Spread]);
    spec.cache = CacheSpec { k, v, granularity, scales };
    if matches!(spec.contents.v, Numbers::Scaled(factor) if factor > 1.0) {
        if spec.value_dtype().is_block() {
            // Scales of blocks are f16.
            spec.contents.v = Numbers::Normal;
        }
        if spec.value_dtype().is_code() && scales == Scales::Spread {
            // Sums of values over keys stay below f32's largest number.
            spec.cache.scales = Scales::PowerOfTwo;
        }
    }
    spec
}

/// Values that are a prefix of the keys, in a tenth of the problems; half of these with the dims
/// that models have, and some of these over rows of `mla656`.
fn latent(noise: &mut Noise, mut spec: Spec) -> Spec {
    if !noise.one_in(10) {
        return spec;
    }
    spec.values = Values::KeyPrefix;
    if spec.key_dtype().is_block() && matches!(spec.contents.v, Numbers::Scaled(_)) {
        // Values are blocks as well, whose scales are f16.
        spec.contents.v = Numbers::Normal;
    }
    if noise.one_in(2) {
        let dims = noise.pick(&[(576, 512), (576, 512), (320, 256), (512, 512), (192, 128)]);
        (spec.head_dim, spec.value_dim) = dims;
        if dims == (576, 512) && noise.one_in(2) {
            spec.cache = CacheSpec::new(DType::Mla656, Granularity::Token, Scales::Fitted);
        }
    }
    // Rotary dims in a tensor of their own.
    if noise.one_in(3) {
        let dims = noise.pick(&[64, 64, 32, 8, 1]);
        spec.rotary_dim = dims.min(spec.head_dim / 2);
    }
    spec
}

/// Lists of keys, in a sixth of the problems.
fn lists(noise: &mut Noise, spec: Spec) -> Spec {
    if !noise.one_in(6) {
        return spec;
    }
    let longest = spec.sequences.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0);
    let len = match noise.below(4) {
        0 => longest,
        1 => noise.below(longest + 20),
        2 => noise.pick(&KEYS),
        _ => noise.below(150),
    };
    let entries = noise.pick(&[Entries::All, Entries::Sorted, Entries::Any, Entries::Any]);
    let (per_head, counts) = (noise.one_in(2), noise.one_in(2));
    let of = noise.pick(&[
        ListEntries::Keys,
        ListEntries::Keys,
        ListEntries::Slots,
        ListEntries::Slots,
        ListEntries::Pages,
        ListEntries::NumberedPages,
    ]);
    let caches = match of {
        ListEntries::Slots if noise.one_in(2) => Caches::Two { second: noise.below(len + 1) },
        _ => Caches::One,
    };
    spec.lists(ListSpec { len, entries, per_head, counts, of, caches })
}

fn limits(noise: &mut Noise, profile: Profile) -> Limits {
    let (work, elements) = match (profile, noise.below(32)) {
        (Profile::Small, _) => (200_000, 20_000),
        (Profile::Prefill, _) => (10_000_000, 400_000),
        (Profile::Batches, _) => (50_000_000, 5_000_000),
        (Profile::All, 0) => (50_000_000, 1_500_000),
        (Profile::All, 1..=5) => (4_000_000, 300_000),
        (Profile::All, _) => (400_000, 60_000),
    };
    // Two tiles of keys and a bit: tiles that are whole, and that a mask leaves alone, have paths
    // of their own.
    let (min_rows, min_keys) =
        if profile == Profile::Prefill { (PREFILL_ROWS, 150) } else { (0, 0) };
    Limits { work, elements, min_rows, min_keys }
}

/// Head dims of keys and of values.
fn dims(noise: &mut Noise, tidy: bool) -> (usize, usize) {
    let mut one = |tidy: bool| match (tidy, noise.below(8)) {
        (true, 0..=5) | (false, 0) => noise.pick(&DIMS),
        (true, _) => 8 * (1 + noise.below(72)),
        (false, 1..=3) => (noise.pick(&DIMS) + noise.below(3) - 1).min(576),
        (false, 4 | 5) => 1 + noise.below(24),
        (false, _) => 1 + noise.below(576),
    };
    let (head_dim, other) = (one(tidy), one(tidy));
    match noise.below(8) {
        0..=4 => (head_dim, head_dim),
        5 if tidy => noise.pick(&[(192, 128), (576, 512), (128, 64), (64, 128)]),
        _ => (head_dim, other),
    }
}

fn keys(noise: &mut Noise) -> Keys {
    let slack = noise.pick(&[0, 0, 1, 3, 20]);
    match noise.below(4) {
        0 => Keys::Batched { slack },
        1 => Keys::Ragged { slack },
        _ => Keys::Paged { block_size: noise.pick(&BLOCK_SIZES), interleaved: noise.one_in(2) },
    }
}

/// Query rows of a sequence: decode, verify, a few tiles, prefill, none.
fn query_len(noise: &mut Noise, profile: Profile) -> usize {
    match (profile, noise.below(20)) {
        (Profile::Prefill, 0..=14) => PREFILL_ROWS + noise.below(193),
        (_, 0..=6) => 1,
        (_, 7..=11) => 2 + noise.below(7),
        (_, 12..=14) => 9 + noise.below(56),
        (Profile::Small, _) => 1 + noise.below(40),
        (_, 19) => 0,
        _ => {
            let more = if profile == Profile::Prefill { 193 } else { noise.pick(&[80, 80, 536]) };
            PREFILL_ROWS + noise.below(more)
        }
    }
}

fn kv_len(noise: &mut Noise, query_len: usize) -> usize {
    match noise.below(16) {
        0 => 0,
        1..=3 => 1 + noise.below(20),
        4..=6 => 20 + noise.below(120),
        7..=9 => noise.pick(&KEYS),
        10 | 11 => query_len,
        12 | 13 => query_len + noise.below(200),
        14 => 130 + noise.below(600),
        _ => 600 + noise.below(3500),
    }
}

fn sequences(noise: &mut Noise, profile: Profile, ragged: bool) -> Vec<SequenceSpec> {
    let batch = match noise.below(50) {
        _ if profile == Profile::Prefill => noise.pick(&[1, 1, 2, 3]),
        0 => 0,
        _ => noise.pick(&[1, 1, 1, 2, 2, 3, 4, 5, 9]),
    };
    let first = match profile {
        Profile::Prefill => PREFILL_ROWS + noise.below(193),
        _ => query_len(noise, profile),
    };
    let mut sequence = |id| {
        let q_len = if ragged && id > 0 { query_len(noise, profile) } else { first };
        SequenceSpec { id, q_len, kv_len: kv_len(noise, q_len) }
    };
    (0..batch).map(&mut sequence).collect()
}

/// Scale, masks, window and the other options.
fn variant(noise: &mut Noise, spec: Spec) -> Spec {
    let offsets = |noise: &mut Noise, far: bool| match (noise.below(6), far) {
        (0, true) => noise.pick(&[-1_000_000, 1_000_000, i32::MIN, i32::MAX - 1000]),
        (0 | 1, _) => noise.below(4000) as i32 - 2000,
        _ => noise.below(120) as i32 - 40,
    };
    let alibi = noise.one_in(4);
    let offset = match noise.below(5) {
        // f32 holds distances up to 2^24 exactly.
        0 => OffsetSpec::Same(i64::from(offsets(noise, !alibi))),
        1 => {
            let count = 1 + noise.below(4);
            OffsetSpec::PerSequence((0..count).map(|_| offsets(noise, !alibi)).collect())
        }
        _ => OffsetSpec::BottomRight,
    };
    let key_positions = noise.one_in(5).then(|| {
        let count = if noise.one_in(2) { 1 } else { 1 + noise.below(4) };
        KeyPositionsSpec {
            offsets: (0..count).map(|_| offsets(noise, !alibi)).collect(),
            stride: noise.pick(&[1, 1, 2, 2, 3, 4, 8, 61, MAX_KEY_STRIDE]),
        }
    });
    let side = |noise: &mut Noise| match noise.below(8) {
        0 | 1 => None,
        2 => Some(0),
        3 | 4 => Some(1 + noise.below(8)),
        5 | 6 => Some(noise.below(300)),
        _ => Some(noise.pick(&[4096, i32::MAX as usize, usize::MAX])),
    };
    let windowed = noise.one_in(3);
    let window = Window { left: side(noise), right: side(noise) };
    let mask = MaskSpec {
        dtype: noise.pick(&[DType::Bool, DType::Bool, DType::F32, DType::F16, DType::BF16]),
        // Blocks and rare keys most of all: tiles in which nothing, or everything, is hidden have
        // paths of their own in kernels.
        hide: noise.pick(&[
            Hide::Nothing,
            Hide::Large,
            Hide::Infinite,
            Hide::Blocks,
            Hide::Blocks,
            Hide::Rare,
            Hide::Rare,
            Hide::Lowest,
            Hide::Extreme,
        ]),
        broadcast: [(); 4].map(|()| noise.one_in(2)),
    };
    Spec {
        scale: match noise.below(10) {
            0 => Some(0.0),
            1 => Some(-0.3),
            2 => Some(noise.pick(&[0.02, 0.2, 1.0, 5.0])),
            _ => None,
        },
        causal: noise.one_in(2),
        offset,
        key_positions,
        window: if windowed { window } else { Window::default() },
        chunk: noise.one_in(6).then(|| noise.pick(&[1, 2, 7, 16, 33, 64, 100, 256, 1000])),
        softcap: noise.one_in(4).then(|| noise.pick(&[0.01, 0.5, 2.5, 30.0, 50.0, 1000.0])),
        alibi,
        slope_kind: noise.pick(&[
            Slopes::Geometric,
            Slopes::Signed,
            Slopes::Zero,
            Slopes::Steep,
            Slopes::Extreme,
        ]),
        sinks: noise.one_in(4),
        sink_kind: noise.pick(&[Sinks::Normal, Sinks::Infinite, Sinks::Large, Sinks::Extreme]),
        mask: noise.one_in(2).then_some(mask),
        tree: noise.one_in(4),
        tree_kind: noise.pick(&[Trees::Ancestors, Trees::Arbitrary]),
        batch_invariant: noise.one_in(4),
        lse: !noise.one_in(4),
        ..spec
    }
}

/// The contents and memory layout of operands.
fn data(noise: &mut Noise, spec: Spec, tidy: bool) -> Spec {
    let mut memory = || {
        let plain = MemorySpec::default();
        if !noise.one_in(3) {
            return plain;
        }
        let order = noise.pick(&[[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]);
        let sizes = if tidy { [0, 8, 16] } else { [0, 1, 7] };
        let gaps = [(); 3].map(|()| noise.pick(&sizes));
        let first = if tidy { noise.pick(&[0, 8]) } else { noise.pick(&[0, 1, 2, 3, 4, 8]) };
        MemorySpec { first, order, gaps }
    };
    let memory =
        OperandMemory { q: memory(), k: memory(), v: memory(), out: memory(), mask: memory() };
    let numbers = |noise: &mut Noise, value: bool| match noise.below(10) {
        0 => Numbers::Constant(noise.pick(&[0.0, 0.25, 0.5, -1.0, 3.0])),
        1 | 2 => Numbers::Positive,
        // Sums of values over keys stay below f32's largest number.
        3 if value => Numbers::Scaled(1e30),
        3 => Numbers::Scaled(noise.pick(&[30.0, 1e3])),
        4 => Numbers::Scaled(noise.pick(&[1e-4, 1e-20])),
        5 | 6 => Numbers::Peaked,
        7 => Numbers::Outliers,
        // Kernels of f16 round probabilities to f16, whose smallest is 2^-24: that of a key whose
        // value is 2^24 times as large as the others' is lost (docs/perf/cuda.md).
        8 if value && spec.dtype == DType::F16 => Numbers::Spread(10),
        8 => Numbers::Spread(24),
        _ => Numbers::Normal,
    };
    let special = noise.one_in(2);
    let contents =
        Contents { q: numbers(noise, false), k: numbers(noise, false), v: numbers(noise, true) };
    Spec {
        memory,
        contents: if special { contents } else { Contents::default() },
        poison: !noise.one_in(8),
        stray_entries: noise.one_in(2),
        ..spec
    }
}

/// The elements of all operands, roughly.
fn elements(spec: &Spec) -> usize {
    let Spec { query_heads, kv_heads, head_dim, value_dim, .. } = *spec;
    let batch = spec.sequences.len();
    let max =
        |length: fn(&SequenceSpec) -> usize| spec.sequences.iter().map(length).max().unwrap_or(0);
    let (q_len, kv_len) = (max(|sequence| sequence.q_len), max(|sequence| sequence.kv_len));
    let mask = spec.mask.map_or(0, |mask| {
        let full = [batch, query_heads, q_len + 1, kv_len + 2];
        full.iter()
            .zip(mask.broadcast)
            .map(|(&n, broadcast)| if broadcast { 1 } else { n })
            .product()
    });
    let dims = head_dim + value_dim;
    batch * (q_len * query_heads + kv_len * kv_heads) * dims + mask
}

/// The problem made smaller until it keeps the limits, now in this direction and now in that.
fn within(noise: &mut Noise, mut spec: Spec, limits: &Limits) -> Spec {
    while spec.work() > limits.work || elements(&spec) > limits.elements {
        let group = spec.query_heads / spec.kv_heads.max(1);
        match noise.below(6) {
            0 if spec.sequences.len() > 1 => {
                spec.sequences.truncate(spec.sequences.len().div_ceil(2))
            }
            1 if group > 1 => spec.query_heads = spec.kv_heads * (group / 2),
            2 if spec.kv_heads > 1 => {
                spec.kv_heads = 1;
                spec.query_heads = group;
            }
            // Head dims are halved last: kernels differ by them.
            3 if spec.sequences.len() == 1 && spec.query_heads == 1 && noise.one_in(4) => {
                if spec.key_dtype().is_latent_row() {
                    // Rows of mla656 have their dims.
                    spec.cache = CacheSpec::default();
                }
                spec.head_dim = spec.head_dim.div_ceil(2);
                spec.value_dim = spec.value_dim.div_ceil(2);
                spec = spec.legal();
            }
            4 => spec.sequences.iter_mut().for_each(|sequence| {
                let shorter = sequence.kv_len - sequence.kv_len / 3;
                sequence.kv_len = shorter.max(limits.min_keys.min(sequence.kv_len));
            }),
            5 => {
                // Prefill stays prefill as long as something else can give way.
                let max_len =
                    spec.sequences.iter().map(|sequence| sequence.q_len).max().unwrap_or(0);
                if max_len > 130 || noise.one_in(3) {
                    for sequence in &mut spec.sequences {
                        let shorter = sequence.q_len - sequence.q_len / 3;
                        sequence.q_len = shorter.max(limits.min_rows.min(sequence.q_len));
                    }
                }
            }
            _ => {}
        }
    }
    spec
}
