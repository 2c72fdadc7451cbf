//! The features that a problem can have.

use crate::case::{KvLayout, Layout};
use crate::spec::{
    CacheSpec, Caches, Entries, Granularity, Hide, KeyPositionsSpec, Keys, ListSpec, MaskSpec,
    MaxLens, OffsetSpec, Scales, Spec,
};
use regard::{DType, ListEntries, Values};
use std::fmt;
use std::ops::Range;

macro_rules! features {
    ($($name:ident $text:literal $meaning:literal;)*) => {
        /// A property of a problem that a kernel must take care of: of operands, storage or
        /// variant. A problem has any number of them.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum Feature {
            $(#[doc = $meaning] $name),*
        }

        impl Feature {
            /// All of them.
            pub const ALL: [Feature; [$(Feature::$name),*].len()] = [$(Feature::$name),*];

            /// A word for tables and names of cases.
            pub fn name(self) -> &'static str {
                match self { $(Feature::$name => $text),* }
            }

            /// The meaning of the feature.
            pub fn meaning(self) -> &'static str {
                match self { $(Feature::$name => $meaning),* }
            }
        }
    };
}

features! {
    Causal "causal" "Keys after a row's position are hidden.";
    WindowLeft "window-left" "Keys far before a row's position are hidden.";
    WindowRight "window-right" "Keys far behind a row's position are hidden.";
    Chunk "chunk" "Keys of other chunks of positions are hidden.";
    Softcap "softcap" "Scores are capped.";
    Alibi "alibi" "Scores fall with distance.";
    AlibiBothSides "alibi-both-sides"
        "Scores fall with distance, and rows see keys on both sides of them.";
    Sinks "sinks" "A sink joins each head's denominator.";
    MaskBool "mask-bool" "A boolean mask.";
    MaskF32 "mask-f32" "An additive mask in f32.";
    MaskF16 "mask-f16" "An additive mask in f16.";
    MaskBf16 "mask-bf16" "An additive mask in bf16.";
    MaskBroadcast "mask-broadcast" "A mask with a dimension of 1.";
    Tree "tree" "The new tokens form a tree.";
    RaggedQueries "ragged-queries" "Queries without a batch dimension.";
    RaggedKeys "ragged-keys" "Keys without a batch dimension.";
    KeyLengths "kv-lens" "Lengths of keys that are given apart from their storage.";
    PagesLarge "pages-large" "Pages of 64 slots or more.";
    PagesSmall "pages-small" "Pages of fewer slots, a multiple of 8.";
    PagesOdd "pages-odd" "Pages whose slots are no multiple of 8.";
    HeadMajorPages "pages-hnd" "Pages with heads before slots.";
    OnePool "one-pool" "Keys and values of a page in one pool.";
    CodeCache "cache-codes" "Keys and values in codes of 8 bits with scales.";
    BlockCache "cache-blocks" "Keys and values in blocks of 8 or 4 bits.";
    FloatCache "cache-floats" "Keys and values in floats of another type than the queries.";
    KeyPrefix "key-prefix" "Values that are a prefix of the keys.";
    TwoParts "two-parts" "The other dims of such keys in a tensor of their own.";
    KeyLists "lists" "Rows that attend to lists of keys.";
    HeadLists "lists-per-head" "A list of keys per row and key/value head.";
    ListCounts "list-counts" "Lists of keys whose entries in use are counted.";
    SlotLists "lists-slots" "Lists of physical slots.";
    SecondLists "lists-second" "A second list of physical slots, into a second cache.";
    PageLists "lists-pages" "Lists of pages.";
    PageNumbers "lists-page-numbers" "Lists of pages with their numbers in the sequence.";
    HeadMajor "bhsd" "Heads before tokens in memory.";
    Gaps "gaps" "Gaps between rows that keep them at multiples of 16 bytes.";
    Unaligned "unaligned" "Rows that do not start at multiples of 16 bytes.";
    ExactDims "exact-dims" "Head dims that the kernel is compiled for.";
    PaddedDims "padded-dims" "Smaller head dims.";
    Offset "offset" "A position of the first row that is given.";
    Offsets "offsets" "The same for each sequence.";
    KeyOffset "key-offset" "Keys at consecutive positions that do not begin at 0.";
    KeyOffsets "key-offsets" "A position of the first key that is given for each sequence.";
    KeyStride "key-stride" "Keys at every second, third, ... position.";
    EmptyRows "empty-rows" "Rows that see no key.";
    EmptySequence "empty-sequence" "A sequence without keys.";
    Scale "scale" "A scale that is given.";
    NegativeScale "scale-negative" "A scale below 0.";
    OutF32 "out-f32" "Outputs in f32 for inputs of 16 bits.";
    Lse "lse" "The log-sum-exp of each row.";
    BatchInvariant "batch-invariant" "Bits that depend on nothing around a row.";
    SeveralTokens "tokens" "More than one query token.";
    GroupedHeads "grouped-heads" "Several query heads share keys.";
    ManyKeys "many-keys" "Keys enough for several tiles, which decode shares among thread blocks.";
    Beside "prefill-beside-decode" "Long sequences and short ones in one run.";
    Combine "combine" "Parts of tiles are combined by a kernel of their own.";
    HeadParts "head-parts" "Some heads' keys and values are copied and read before the next ones'.";
    KeySplits "key-splits" "Several thread blocks of prefill share the keys of a tile.";
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Keys from which on a sequence has [`Feature::ManyKeys`].
const MANY_KEYS: usize = 512;

/// A set of features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Features(u64);

const _: () = assert!(Feature::ALL.len() <= 64);

impl Features {
    /// The set of these.
    pub fn from_list(features: &[Feature]) -> Features {
        features.iter().fold(Features::default(), |set, &feature| set.with(feature))
    }

    /// With one more.
    #[must_use]
    pub fn with(self, feature: Feature) -> Features {
        Features(self.0 | 1 << feature as u8)
    }

    /// Without one.
    #[must_use]
    pub fn without(self, feature: Feature) -> Features {
        Features(self.0 & !(1 << feature as u8))
    }

    /// All that are in one of the two.
    #[must_use]
    pub fn and(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// Whether a feature is in it.
    pub fn has(self, feature: Feature) -> bool {
        self.0 >> (feature as u8) & 1 == 1
    }

    /// Whether all of `other` are in it.
    pub fn has_all(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// Number of features.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = Feature> + Clone {
        Feature::ALL.into_iter().filter(move |&feature| self.has(feature))
    }

    /// Each pair of them, the earlier first.
    pub fn pairs(self) -> impl Iterator<Item = (Feature, Feature)> {
        let all = self.iter();
        all.clone().flat_map(move |a| all.clone().filter(move |&b| a < b).map(move |b| (a, b)))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(Feature::name).collect();
        f.write_str(if names.is_empty() { "nothing" } else { "" })?;
        f.write_str(&names.join("+"))
    }
}

/// The features that a description has by itself. Exact head dims, [`Feature::Beside`],
/// [`Feature::Combine`], [`Feature::HeadParts`] and [`Feature::KeySplits`] depend on the kernel
/// that runs it.
pub fn features(spec: &Spec, lse: bool) -> Features {
    use Feature::*;
    let MaxLens { queries, keys } = spec.max_lens();
    let causal = spec.causal && !spec.tree;
    let block_size = match spec.keys {
        Keys::Paged { block_size, .. } => Some(block_size),
        Keys::Batched { .. } | Keys::Ragged { .. } => None,
    };
    let mask = |dtype| spec.mask.is_some_and(|mask| mask.dtype == dtype);
    // Elements that 16 bytes have.
    let unit = 16 / spec.dtype.size();
    let aligned =
        [spec.head_dim, spec.value_dim].iter().all(|dim| (dim + spec.padding).is_multiple_of(unit))
            && spec.padding.is_multiple_of(unit);
    let [key_dtype, value_dtype] = [spec.key_dtype(), spec.value_dtype()];
    let head_major = spec.layout == Layout::Bhsd
        && (!spec.ragged_queries || matches!(spec.keys, Keys::Batched { .. }));
    let key_positions =
        |holds: fn(&KeyPositionsSpec) -> bool| spec.key_positions.as_ref().is_some_and(holds);
    let has = |feature| match feature {
        Causal => causal,
        WindowLeft => spec.window.left.is_some(),
        WindowRight => spec.window.right.is_some(),
        Chunk => spec.chunk.is_some(),
        Softcap => spec.softcap.is_some(),
        Alibi => spec.alibi,
        AlibiBothSides => spec.alibi && sees_both_sides(spec),
        Sinks => spec.sinks,
        MaskBool => mask(DType::Bool),
        MaskF32 => mask(DType::F32),
        MaskF16 => mask(DType::F16),
        MaskBf16 => mask(DType::BF16),
        MaskBroadcast => spec.mask.is_some_and(|mask| mask.broadcast.contains(&true)),
        Tree => spec.tree,
        RaggedQueries => spec.ragged_queries,
        RaggedKeys => matches!(spec.keys, Keys::Ragged { .. }),
        KeyLengths => block_size.is_none() && spec.needs_lens(),
        PagesLarge => block_size.is_some_and(|size| size >= 64 && size.is_multiple_of(8)),
        PagesSmall => block_size.is_some_and(|size| size < 64 && size.is_multiple_of(8)),
        PagesOdd => block_size.is_some_and(|size| !size.is_multiple_of(8)),
        HeadMajorPages => block_size.is_some() && spec.kv_layout == KvLayout::Hnd,
        OnePool => matches!(spec.keys, Keys::Paged { interleaved: true, .. }),
        CodeCache => key_dtype.is_code() || value_dtype.is_code(),
        BlockCache => key_dtype.is_block() || value_dtype.is_block(),
        FloatCache => {
            [key_dtype, value_dtype].iter().any(|dtype| dtype.is_float() && *dtype != spec.dtype)
        }
        KeyPrefix => spec.values == Values::KeyPrefix,
        TwoParts => spec.rotary_dim > 0,
        KeyLists => spec.lists.is_some(),
        HeadLists => spec.lists.is_some_and(|lists| lists.per_head) && spec.kv_heads > 1,
        ListCounts => spec.lists.is_some_and(|lists| lists.counts),
        SlotLists => spec.lists_slots(),
        SecondLists => spec.lists.is_some_and(|lists| lists.caches != Caches::One),
        PageLists => spec.lists_pages(),
        PageNumbers => spec.has_page_numbers(),
        HeadMajor => head_major,
        Gaps => spec.padding > 0 && aligned,
        Unaligned => !aligned,
        Feature::Offset => matches!(spec.offset, OffsetSpec::Same(_)),
        Offsets => matches!(spec.offset, OffsetSpec::PerSequence(_)),
        Feature::KeyOffset => key_positions(|keys| keys.stride == 1 && keys.offsets.len() == 1),
        KeyOffsets => key_positions(|keys| keys.offsets.len() > 1),
        KeyStride => key_positions(|keys| keys.stride > 1),
        EmptyRows => has_empty_rows(spec),
        EmptySequence => spec.sequences.iter().any(|sequence| sequence.kv_len == 0),
        Scale => spec.scale.is_some(),
        NegativeScale => spec.scale.is_some_and(|scale| scale < 0.0),
        OutF32 => spec.out_dtype != spec.dtype,
        Lse => lse,
        BatchInvariant => spec.batch_invariant,
        SeveralTokens => queries > 1,
        GroupedHeads => spec.query_heads > spec.kv_heads,
        ManyKeys => keys >= MANY_KEYS,
        ExactDims | PaddedDims | Beside | Combine | HeadParts | KeySplits => false,
    };
    Feature::ALL
        .into_iter()
        .filter(|&feature| has(feature))
        .fold(Features::default(), Features::with)
}

/// The first position of a sequence, and the position behind its last.
fn positions(spec: &Spec, index: usize) -> Range<i64> {
    let first = spec.first_position(index);
    first..first + spec.sequences[index].q_len as i64
}

/// Whether some row sees keys before and after its own position.
fn sees_both_sides(spec: &Spec) -> bool {
    let around = |index: usize| {
        let (rows, visible, keys) =
            (positions(spec, index), spec.visible(index), spec.keys_of(index));
        let Some(last) = visible.clone().last() else { return false };
        let (first, last) = (keys.position(visible.start), keys.position(last));
        rows.start.max(first + 1) < rows.end.min(last)
    };
    let causal = spec.causal && !spec.tree;
    !causal && spec.window.right != Some(0) && (0..spec.sequences.len()).any(around)
}

/// Whether some row sees no key, by causality, window or length.
fn has_empty_rows(spec: &Spec) -> bool {
    let left = spec.window.left.map_or(i64::MAX, |left| i64::try_from(left).unwrap_or(i64::MAX));
    let empty = |index: usize| {
        let (rows, keys) = (positions(spec, index), spec.keys_of(index));
        let before = spec.causal && !spec.tree && rows.start < keys.offset;
        let after = |p: i64| keys.before(p.saturating_sub(left)) == keys.len;
        !rows.is_empty() && (before || keys.len == 0 || after(rows.end - 1))
    };
    (0..spec.sequences.len()).any(empty)
}

/// A description with one more feature; `None` if it conflicts with the present ones. The feature's
/// prerequisites (pages, a mask) must be present. Bounds are chosen such that most rows still see
/// most keys: hidden keys would hide defects.
pub(super) fn add(feature: Feature, mut spec: Spec, page_keys: usize) -> Option<Spec> {
    use Feature::*;
    let possible = match feature {
        Causal
        | WindowLeft
        | WindowRight
        | Chunk
        | Tree
        | Feature::Offset
        | Offsets
        | Feature::KeyOffset
        | KeyOffsets
        | KeyStride
        | EmptyRows => add_to_range(feature, &mut spec),
        Softcap | Alibi | AlibiBothSides | Sinks | Scale | NegativeScale | MaskBool | MaskF32
        | MaskF16 | MaskBf16 | MaskBroadcast => add_to_scores(feature, &mut spec),
        RaggedQueries | RaggedKeys | KeyLengths | PagesLarge | PagesSmall | PagesOdd
        | HeadMajorPages | OnePool | EmptySequence => add_to_storage(feature, &mut spec, page_keys),
        CodeCache | BlockCache | FloatCache | KeyPrefix | TwoParts => add_cache(feature, &mut spec),
        KeyLists | HeadLists | ListCounts | SlotLists | SecondLists | PageLists | PageNumbers => {
            add_to_lists(feature, &mut spec)
        }
        HeadMajor | Gaps | Unaligned => add_to_strides(feature, &mut spec),
        OutF32 => {
            spec.out_dtype = DType::F32;
            true
        }
        BatchInvariant => {
            spec.batch_invariant = true;
            true
        }
        // Features of the base, of the kernel that runs it, or of the outputs.
        ExactDims | PaddedDims | SeveralTokens | GroupedHeads | ManyKeys | Beside | Combine
        | HeadParts | KeySplits | Lse => false,
    };
    possible.then_some(spec)
}

/// As [`add`], for the range of keys that rows see. Returns whether it is possible.
fn add_to_range(feature: Feature, spec: &mut Spec) -> bool {
    use Feature::*;
    let before = spec.offset.clone();
    let MaxLens { queries, keys } = spec.max_lens();
    match feature {
        Causal => {
            spec.causal = true;
            !spec.tree
        }
        WindowLeft => {
            spec.window.left = Some(keys / 2 + 3);
            true
        }
        WindowRight => {
            spec.window.right = Some(queries / 3 + 2);
            true
        }
        Chunk => {
            spec.chunk = Some(keys * 2 / 3 + 1);
            true
        }
        Tree => {
            spec.tree = true;
            !spec.causal && spec.key_positions.is_none()
        }
        Feature::KeyOffset | KeyOffsets | KeyStride => add_key_positions(feature, spec),
        Feature::Offset => {
            spec.offset = OffsetSpec::Same((keys - queries.min(keys)) as i64 * 3 / 4);
            before == OffsetSpec::BottomRight
        }
        Offsets => {
            let first = (keys / 2) as i32 - (queries / 2) as i32;
            spec.offset = OffsetSpec::PerSequence(vec![first, 5, first / 2]);
            before == OffsetSpec::BottomRight
        }
        EmptyRows => {
            // Rows before all keys, if keys after a row are hidden.
            spec.offset = OffsetSpec::Same(-(queries.div_ceil(8) as i64));
            spec.causal = !spec.tree;
            before == OffsetSpec::BottomRight && !spec.tree
        }
        _ => unreachable!("{feature:?} is no range of keys"),
    }
}

/// As [`add`], for positions of keys, which need positions of rows. Returns whether it is possible.
fn add_key_positions(feature: Feature, spec: &mut Spec) -> bool {
    let MaxLens { queries, keys } = spec.max_lens();
    let before = spec.key_positions.take();
    let max_offset = keys as i32;
    let (offsets, stride) = match (feature, &before) {
        (Feature::KeyOffset, _) => (vec![max_offset / 3], 1),
        (Feature::KeyOffsets, None) => (vec![max_offset / 3, -7, max_offset / 5], 1),
        (Feature::KeyOffsets, Some(before)) => (vec![3, -7, max_offset / 5], before.stride),
        (_, None) => (vec![-5], 3),
        (_, Some(before)) => (before.offsets.clone(), 3),
    };
    if spec.offset == OffsetSpec::BottomRight {
        let last = i64::from(offsets[0]) + (stride * keys) as i64;
        spec.offset = OffsetSpec::Same(last - queries.min(keys) as i64);
    }
    spec.key_positions = Some(KeyPositionsSpec { offsets, stride });
    let had = |holds: fn(&KeyPositionsSpec) -> bool| before.as_ref().is_some_and(holds);
    let free = match feature {
        Feature::KeyOffset => before.is_none(),
        Feature::KeyOffsets => !had(|keys| keys.offsets.len() > 1),
        _ => !had(|keys| keys.stride > 1),
    };
    free && !spec.tree
}

/// As [`add`], for features that change scores. Returns whether it is possible.
fn add_to_scores(feature: Feature, spec: &mut Spec) -> bool {
    use Feature::*;
    let MaxLens { queries, keys } = spec.max_lens();
    let has_scale = spec.scale.is_some();
    let mut mask = |dtype| {
        let hide = Hide::Blocks;
        let free = spec.mask.is_none();
        spec.mask = Some(MaskSpec { dtype, hide, broadcast: [false; 4] });
        free
    };
    match feature {
        Softcap => {
            spec.softcap = Some(3.0);
            true
        }
        Alibi => {
            spec.alibi = true;
            true
        }
        AlibiBothSides => {
            spec.alibi = true;
            if !matches!(spec.offset, OffsetSpec::PerSequence(_)) {
                spec.offset = OffsetSpec::Same((keys / 2) as i64 - (queries / 2) as i64);
            }
            !spec.causal
        }
        Sinks => {
            spec.sinks = true;
            true
        }
        MaskBool => mask(DType::Bool),
        MaskF32 => mask(DType::F32),
        MaskF16 => mask(DType::F16),
        MaskBf16 => mask(DType::BF16),
        MaskBroadcast => {
            let shapes = [
                [true, true, false, false],
                [false, false, true, false],
                [true, false, false, true],
            ];
            let shape = shapes[(spec.seed % 3) as usize];
            spec.mask = spec.mask.map(|mask| MaskSpec { broadcast: shape, ..mask });
            spec.mask.is_some()
        }
        Scale => {
            spec.scale = Some(0.11);
            !has_scale
        }
        NegativeScale => {
            spec.scale = Some(-0.13);
            !has_scale
        }
        _ => unreachable!("{feature:?} does not change scores"),
    }
}

/// As [`add`], for lengths and pages. Returns whether it is possible.
fn add_to_storage(feature: Feature, spec: &mut Spec, page_keys: usize) -> bool {
    use Feature::*;
    let MaxLens { queries, .. } = spec.max_lens();
    let was_dense = matches!(spec.keys, Keys::Batched { slack: 0 });
    let was_paged = matches!(spec.keys, Keys::Paged { .. });
    let odd_page = if spec.seed.is_multiple_of(2) { 7 } else { 12 };
    let mut shorten_in = |keys| {
        spec.keys = keys;
        shorten(spec);
        was_dense
    };
    let page = |block_size| Keys::Paged { block_size, interleaved: false };
    match feature {
        RaggedQueries => {
            spec.ragged_queries = true;
            // Another length for each, and a short one beside long ones.
            if spec.sequences.len() > 1 {
                let lengths = [queries, 3.min(queries), queries / 2 + 2, 0];
                for (sequence, q_len) in spec.sequences.iter_mut().zip(lengths) {
                    sequence.q_len = q_len;
                }
            }
            true
        }
        RaggedKeys => shorten_in(Keys::Ragged { slack: 0 }),
        KeyLengths => {
            spec.keys = match spec.keys {
                Keys::Ragged { .. } => Keys::Ragged { slack: 5 },
                _ => Keys::Batched { slack: 5 },
            };
            shorten(spec);
            !was_paged
        }
        PagesLarge => shorten_in(page(page_keys.max(64))),
        PagesSmall => shorten_in(page(16)),
        PagesOdd => shorten_in(page(odd_page)),
        HeadMajorPages => {
            spec.kv_layout = KvLayout::Hnd;
            matches!(spec.keys, Keys::Paged { .. })
        }
        OnePool => match &mut spec.keys {
            Keys::Paged { interleaved, .. } => {
                *interleaved = true;
                spec.values == Values::Separate
            }
            _ => false,
        },
        EmptySequence => {
            if let Some(last) = spec.sequences.last_mut() {
                last.kv_len = 0;
            }
            spec.sequences.len() > 1
        }
        _ => unreachable!("{feature:?} is no storage"),
    }
}

/// As [`add`], for lists of keys. Returns whether it is possible.
fn add_to_lists(feature: Feature, spec: &mut Spec) -> bool {
    let paged = matches!(spec.keys, Keys::Paged { .. });
    if feature == Feature::KeyLists {
        // Positions more than once, skipped entries, empty lists.
        let len = spec.max_lens().keys;
        spec.lists.get_or_insert(ListSpec::new(len, Entries::Any));
        return true;
    }
    let Some(lists) = &mut spec.lists else { return false };
    match feature {
        Feature::HeadLists => lists.per_head = true,
        Feature::ListCounts => lists.counts = true,
        Feature::SlotLists => {
            lists.of = ListEntries::Slots;
            return paged;
        }
        Feature::SecondLists => {
            lists.of = ListEntries::Slots;
            lists.caches = Caches::Two { second: lists.len / 2 };
            return paged;
        }
        Feature::PageLists if lists.of == ListEntries::NumberedPages => {}
        Feature::PageLists => {
            lists.of = ListEntries::Pages;
            return paged;
        }
        Feature::PageNumbers => {
            lists.of = ListEntries::NumberedPages;
            // Positions of queries are needed: the default positions.
            spec.legal_lists();
            return paged;
        }
        _ => unreachable!("{feature:?} is not of lists"),
    }
    true
}

/// As [`add`], for the storage of keys and values. Returns whether it is possible.
fn add_cache(feature: Feature, spec: &mut Spec) -> bool {
    if matches!(feature, Feature::KeyPrefix | Feature::TwoParts) {
        let one_pool = matches!(spec.keys, Keys::Paged { interleaved: true, .. });
        spec.values = Values::KeyPrefix;
        if feature == Feature::TwoParts {
            spec.rotary_dim = spec.head_dim.saturating_sub(spec.value_dim);
            return spec.rotary_dim > 0 && !one_pool;
        }
        return spec.value_dim <= spec.head_dim && !one_pool;
    }
    let seed = spec.seed as usize;
    let dtype = match feature {
        Feature::CodeCache => [DType::E4M3, DType::E5M2, DType::I8][seed % 3],
        Feature::BlockCache => [DType::Q8_0, DType::Q4_0][seed % 2],
        Feature::FloatCache if spec.dtype == DType::F32 => [DType::F16, DType::BF16][seed % 2],
        Feature::FloatCache => DType::F32,
        _ => unreachable!("{feature:?} is no type of keys"),
    };
    let granularity =
        [Granularity::Token, Granularity::Page, Granularity::Head, Granularity::Tensor][seed % 4];
    let was_native = spec.cache == CacheSpec::default();
    spec.cache = CacheSpec::new(dtype, granularity, Scales::Fitted);
    was_native
}

/// As [`add`], for the order of dimensions and the gaps between rows. Returns whether it is
/// possible.
fn add_to_strides(feature: Feature, spec: &mut Spec) -> bool {
    use Feature::*;
    let had_gaps = spec.padding != 0;
    match feature {
        HeadMajor => {
            spec.layout = Layout::Bhsd;
            true
        }
        Gaps => {
            spec.padding = 16;
            !had_gaps
        }
        Unaligned => {
            spec.padding = 1;
            !had_gaps
        }
        _ => unreachable!("{feature:?} is no order in memory"),
    }
}

/// Fewer keys in each sequence but the first.
fn shorten(spec: &mut Spec) {
    for (i, sequence) in spec.sequences.iter_mut().enumerate().skip(1) {
        sequence.kv_len -= sequence.kv_len * i / (i + 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_and_their_pairs() {
        let set = Features::from_list(&[Feature::Tree, Feature::Causal, Feature::Combine]);
        assert_eq!((set.len(), set.pairs().count()), (3, 3));
        assert_eq!(set.to_string(), "causal+tree+combine");
        assert!(set.has_all(Features::from_list(&[Feature::Combine])) && !set.has(Feature::Sinks));
        assert_eq!(
            set.without(Feature::Tree).pairs().next(),
            Some((Feature::Causal, Feature::Combine))
        );
        assert_eq!(Features::default().to_string(), "nothing");
    }

    #[test]
    fn every_feature_that_can_be_added_is_then_there() {
        let base = Spec::new("base").lengths(&[(6, 80), (6, 80), (6, 80)]).dtype(DType::BF16);
        for feature in Feature::ALL {
            let needs_pages = matches!(feature, Feature::HeadMajorPages | Feature::OnePool);
            let needs_mask = feature == Feature::MaskBroadcast;
            let mut spec = base.clone();
            if needs_pages {
                assert!(add(feature, spec.clone(), 64).is_none());
                spec = add(Feature::PagesSmall, spec, 64).unwrap();
            }
            if needs_mask {
                assert!(add(feature, spec.clone(), 64).is_none());
                spec = add(Feature::MaskF16, spec, 64).unwrap();
            }
            let Some(with) = add(feature, spec.clone(), 64) else { continue };
            assert!(!features(&spec, true).has(feature), "{feature} before");
            assert!(features(&with, true).has(feature), "{feature} after");
        }
    }
}
