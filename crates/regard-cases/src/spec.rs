//! A description of a case, cheap to make and to pass around; [`Spec::generate`] makes the case.

use crate::array::{Array, Data};
use crate::case::{Case, KvLayout, Layout};
use crate::contents::{Contents, Sinks, Slopes, Trees, largest};
use crate::noise::Noise;
use crate::place::{MemorySpec, Place};
use regard::{Attention, DType, QueryOffset, Values, Window};
use std::ops::Range;

mod cache;
mod outline;
mod page_lists;
mod positions;
mod prefix;
mod rotary;
mod second_list;
mod selection;

use cache::Operand;
pub use cache::{CacheSpec, Granularity, Scales};
use page_lists::PageListTensors;
pub use positions::KeyPositionsSpec;
pub use prefix::PrefixSpec;
pub use second_list::Caches;
pub use selection::{Entries, ListSpec};

/// One sequence of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceSpec {
    /// Its numbers depend on this and the seed only: a sequence of the same id has the same numbers
    /// in every batch.
    pub id: u64,
    /// Query rows.
    pub q_len: usize,
    /// Keys in use.
    pub kv_len: usize,
}

/// The storage of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// A batch dimension, and this many slots more than the longest sequence needs.
    Batched {
        /// Unused slots.
        slack: usize,
    },
    /// One sequence after the other, each with unused slots behind it.
    Ragged {
        /// Unused slots of each.
        slack: usize,
    },
    /// Pages in random order.
    Paged {
        /// Slots per page.
        block_size: usize,
        /// Whether each page's keys and values are neighbours in one pool.
        interleaved: bool,
    },
}

/// A mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaskSpec {
    /// Boolean, or the type of the added numbers.
    pub dtype: DType,
    /// The pattern of hidden keys in an additive mask.
    pub hide: Hide,
    /// The dimensions of `[B, Hq, Lq, Lk]` that are 1.
    pub broadcast: [bool; 4],
}

/// The additive mask's number for hidden keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hide {
    /// A normal number: nothing is hidden.
    Nothing,
    /// -1e5 (-6e4 in f16): almost nothing, but not nothing.
    Large,
    /// Minus infinity.
    Infinite,
    /// Minus infinity, block by block of `MASK_BLOCK` rows and keys: everything in some, nothing in
    /// others, keys at random in the rest. A boolean mask hides likewise. An additive mask adds 0
    /// to keys that it does not hide.
    Blocks,
    /// Minus infinity, for one key in 20,000. Nothing is added to the others, and a boolean mask
    /// keeps them: most tiles are hidden or kept entirely.
    Rare,
    /// The lowest finite number of the mask's type, as transformers writes it: one row in 4 is
    /// hidden entirely, of the others a third of the keys.
    Lowest,
    /// Nothing by itself: a third of the keys get finite numbers from one end of the mask's type to
    /// the other.
    Extreme,
}

/// Rows and keys of a block of [`Hide::Blocks`]: whole tiles of any kernel are inside.
pub const MASK_BLOCK: u64 = 384;

/// The position of the first query row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OffsetSpec {
    /// `kv_len - q_len`.
    BottomRight,
    /// The same everywhere.
    Same(i64),
    /// These, repeated over the batch.
    PerSequence(Vec<i32>),
}

/// A case, described.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Spec {
    pub name: String,
    /// One of the few that slow tools (sanitizers, emulators) run.
    pub core: bool,
    pub seed: u64,
    /// Only the order of pages depends on it.
    pub page_seed: u64,
    pub dtype: DType,
    pub out_dtype: DType,
    /// The storage of keys and values.
    pub cache: CacheSpec,
    /// The source of values. As a prefix of the keys, values have the storage of keys.
    pub values: Values,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    /// The last of the `head_dim` dims, if they are in a tensor of their own; else 0.
    pub rotary_dim: usize,
    pub sequences: Vec<SequenceSpec>,
    pub ragged_queries: bool,
    pub keys: Keys,
    pub layout: Layout,
    pub kv_layout: KvLayout,
    /// Elements of padding after each row and each outer dimension of q, k and v.
    pub padding: usize,
    pub scale: Option<f32>,
    pub causal: bool,
    pub offset: OffsetSpec,
    /// The positions of keys, if key j is not at position j.
    pub key_positions: Option<KeyPositionsSpec>,
    pub window: Window,
    pub chunk: Option<usize>,
    pub softcap: Option<f32>,
    pub alibi: bool,
    pub sinks: bool,
    pub mask: Option<MaskSpec>,
    pub tree: bool,
    /// Lists of the keys that rows attend to, if rows do not attend to all.
    pub lists: Option<ListSpec>,
    /// Sequences that share their first keys.
    pub prefixes: Option<PrefixSpec>,
    pub batch_invariant: bool,
    /// Whether slots that no row can see hold NaN and infinity (else ordinary numbers), and
    /// block-table entries -1.
    pub poison: bool,
    /// Whether block-table entries of pages that no row can see hold all sorts of numbers outside
    /// of the pool instead of -1.
    pub stray_entries: bool,
    /// The numbers of queries, keys and values.
    pub contents: Contents,
    /// The slopes, if `alibi` is set.
    pub slope_kind: Slopes,
    /// The logits, if `sinks` is set.
    pub sink_kind: Sinks,
    /// The tree's bits, if `tree` is set.
    pub tree_kind: Trees,
    /// The memory layout of operands, beyond `layout` and `padding`.
    pub memory: OperandMemory,
    /// Whether the log-sum-exp is asked for. For runners that can leave it out; [`Case::run`]
    /// always asks for it.
    pub lse: bool,
}

/// The memory layout of each operand, beyond its `Layout` and padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct OperandMemory {
    pub q: MemorySpec,
    /// In interleaved pages only the keys' `first` and `gaps` count, for keys and values.
    pub k: MemorySpec,
    pub v: MemorySpec,
    /// For runners that bring their own outputs; [`Case::run`] makes contiguous ones.
    pub out: MemorySpec,
    pub mask: MemorySpec,
}

/// The streams of noise.
#[derive(Clone, Copy)]
enum Use {
    Query,
    Key,
    Value,
    Mask,
    Sink,
    Tree,
    Pages,
    Unseen,
    Slope,
    Scale,
    List,
}

/// Maximum lengths of the sequences of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaxLens {
    /// Query tokens.
    pub queries: usize,
    pub keys: usize,
}

/// The places of keys and values.
struct CachePlace {
    keys: Place,
    values: Place,
    /// The block table; empty without pages.
    table: Vec<Vec<i32>>,
}

impl Spec {
    /// Multiplications of a computation that leaves nothing out.
    pub fn work(&self) -> usize {
        let scores: usize =
            self.sequences.iter().map(|sequence| sequence.q_len * sequence.kv_len).sum();
        scores * self.query_heads * (self.head_dim + self.value_dim)
    }

    /// One sequence of 5 queries and 70 keys, 4 query heads over 2 key/value heads, head dim 32,
    /// f32.
    pub fn new(name: impl Into<String>) -> Spec {
        Spec {
            name: name.into(),
            core: false,
            seed: 1,
            page_seed: 1,
            dtype: DType::F32,
            out_dtype: DType::F32,
            cache: CacheSpec::default(),
            values: Values::default(),
            query_heads: 4,
            kv_heads: 2,
            head_dim: 32,
            value_dim: 32,
            rotary_dim: 0,
            sequences: vec![SequenceSpec { id: 0, q_len: 5, kv_len: 70 }],
            ragged_queries: false,
            keys: Keys::Batched { slack: 0 },
            layout: Layout::Bshd,
            kv_layout: KvLayout::Nhd,
            padding: 0,
            scale: None,
            causal: false,
            offset: OffsetSpec::BottomRight,
            key_positions: None,
            window: Window::default(),
            chunk: None,
            softcap: None,
            alibi: false,
            sinks: false,
            mask: None,
            tree: false,
            lists: None,
            prefixes: None,
            batch_invariant: false,
            poison: true,
            stray_entries: false,
            contents: Contents::default(),
            slope_kind: Slopes::default(),
            sink_kind: Sinks::default(),
            tree_kind: Trees::default(),
            memory: OperandMemory::default(),
            lse: true,
        }
    }

    /// Everything that a row's bits could depend on, in batch-invariant mode: 6 query heads over 2
    /// key/value heads, head dims 40 and 24.
    pub fn invariant() -> Spec {
        Spec {
            batch_invariant: true,
            causal: true,
            sinks: true,
            alibi: true,
            softcap: Some(9.0),
            window: Window { left: Some(1500), right: None },
            mask: Some(MaskSpec {
                dtype: DType::F32,
                hide: Hide::Infinite,
                broadcast: [false, true, false, false],
            }),
            ..Spec::new("invariant").heads(6, 2).dims(40, 24)
        }
    }

    /// The same with these sequences, numbered from 0.
    pub fn lengths(mut self, lengths: &[(usize, usize)]) -> Spec {
        let numbered = lengths.iter().enumerate();
        self.sequences = numbered
            .map(|(i, &(q_len, kv_len))| SequenceSpec { id: i as u64, q_len, kv_len })
            .collect();
        self
    }

    /// The same with `query_heads` over `kv_heads`.
    pub fn heads(self, query_heads: usize, kv_heads: usize) -> Spec {
        Spec { query_heads, kv_heads, ..self }
    }

    /// The same with these head dims.
    pub fn dims(self, head_dim: usize, value_dim: usize) -> Spec {
        Spec { head_dim, value_dim, ..self }
    }

    /// The same with values that are the first `value_dim` dims of keys of `head_dim`.
    pub fn latent(self, head_dim: usize, value_dim: usize) -> Spec {
        Spec { head_dim, value_dim, values: Values::KeyPrefix, ..self }
    }

    /// The same in this type, outputs too.
    pub fn dtype(self, dtype: DType) -> Spec {
        Spec { dtype, out_dtype: dtype, ..self }
    }

    /// The nearest description that can be made: without a batch dimension to differ in, queries
    /// are equally long.
    pub fn legal(mut self) -> Spec {
        if !self.ragged_queries
            && let Some(first) = self.sequences.first().copied()
        {
            self.sequences.iter_mut().for_each(|sequence| sequence.q_len = first.q_len);
        }
        if !matches!(self.keys, Keys::Paged { .. }) {
            self.kv_layout = KvLayout::Nhd;
        }
        if self.out_dtype != DType::F32 {
            self.out_dtype = self.dtype;
        }
        self.legal_cache();
        self.legal_lists();
        self.legal_rotary();
        self.legal_positions();
        self.legal_prefixes();
        self
    }

    fn noise(&self, purpose: Use, coordinates: [u64; 3]) -> Noise {
        let [a, b, c] = coordinates;
        Noise::new(self.seed, &[purpose as u64, a, b, c])
    }

    /// A buffer for slots that are filled in later.
    fn unseen(&self, length: usize) -> Vec<f32> {
        let mut noise = self.noise(Use::Unseen, [0; 3]);
        let poison = [f32::NAN, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN];
        (0..length)
            .map(|_| if self.poison { noise.pick(&poison) } else { noise.normal() })
            .collect()
    }

    /// Makes the case.
    ///
    /// # Panics
    /// If the description is not [legal](Spec::legal).
    pub fn generate(&self) -> Case {
        let CachePlace { keys: key_place, values: value_place, table } = self.place_cache();
        let [k, v] = self.keys_and_values([&key_place, &value_place], &table);
        let mut case = Case::new(self.name.clone(), self.queries(), k, v);
        case.layout = self.layout;
        case.kv_layout = self.kv_layout;
        case.out_dtype = Some(self.out_dtype);
        case.attention = self.attention(&table);
        case.attention.rotary_k = self.rotary_keys(&key_place, &table);
        case.attention.k_scales = self.scales(Operand::Key, &key_place, &table);
        case.attention.v_scales = self.scales(Operand::Value, &value_place, &table);
        let blocks = key_place.shape[0];
        if let Some((indices, counts)) = self.list_tensors(&table, blocks) {
            (case.attention.key_indices, case.attention.key_counts) = (Some(indices), counts);
        }
        if let Some(PageListTensors { indices, lens, numbers }) =
            self.page_list_tensors(&table, blocks)
        {
            case.attention.page_indices = Some(indices);
            (case.attention.page_list_lens, case.attention.page_numbers) = (lens, numbers);
        }
        self.divide_lists(&mut case);
        if let Some([groups, lens]) = self.prefix_tensors() {
            (case.attention.prefix_groups, case.attention.prefix_lens) = (Some(groups), Some(lens));
        }
        case
    }

    /// The options that are numbers, without tensors.
    fn numbers<T>(&self) -> Attention<T> {
        Attention {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            chunk: self.chunk,
            softcap: self.softcap,
            indices_are_slots: self.lists_slots(),
            batch_invariant: self.batch_invariant,
            values: self.values,
            ..Attention::default()
        }
    }

    /// The options of the case, with the tensors that it has.
    fn attention(&self, table: &[Vec<i32>]) -> Attention<Array> {
        let mut attention = Attention {
            mask: self.mask.map(|mask| self.mask(&mask)),
            tree_mask: self.tree.then(|| self.tree_mask()),
            key_positions: self.key_position_operand(),
            ..self.numbers()
        };
        attention.q_offset = match &self.offset {
            OffsetSpec::BottomRight => QueryOffset::BottomRight,
            OffsetSpec::Same(offset) => QueryOffset::Same(*offset),
            OffsetSpec::PerSequence(_) => {
                let offsets = (0..self.sequences.len()).map(|i| self.first_position(i) as i32);
                QueryOffset::PerSequence(vector(offsets.collect()))
            }
        };
        if self.ragged_queries {
            attention.cu_seqlens_q =
                Some(cumulative(self.sequences.iter().map(|sequence| sequence.q_len)));
        }
        if let Keys::Ragged { slack } = self.keys {
            attention.cu_seqlens_k =
                Some(cumulative(self.sequences.iter().map(|sequence| sequence.kv_len + slack)));
        }
        if matches!(self.keys, Keys::Paged { .. }) && !self.has_listed_pool() {
            let columns = table.first().map_or(1, Vec::len);
            let entries: Vec<i32> = table.iter().flatten().copied().collect();
            attention.block_table = Some(made(Array::new(entries, &[table.len(), columns])));
        }
        if self.needs_lens() {
            let lens = self.sequences.iter().map(|sequence| sequence.kv_len as i32);
            attention.kv_lens = Some(vector(lens.collect()));
        }
        if self.alibi {
            let noise = |head| self.noise(Use::Slope, [head as u64, 0, 0]);
            let slope = |head| self.slope_kind.slope(head, self.query_heads, &mut noise(head));
            attention.alibi_slopes =
                Some(vector((0..self.query_heads).map(slope).collect::<Vec<f32>>()));
        }
        if self.sinks {
            let noise = |head| self.noise(Use::Sink, [head as u64, 0, 0]);
            let sink = |head| self.sink_kind.logit(head, &mut noise(head));
            attention.sinks = Some(vector((0..self.query_heads).map(sink).collect::<Vec<f32>>()));
        }
        attention
    }

    /// Whether lengths of keys have to be given.
    pub(crate) fn needs_lens(&self) -> bool {
        match self.keys {
            Keys::Paged { .. } => !self.has_listed_pool(),
            Keys::Ragged { slack } => slack > 0,
            Keys::Batched { slack } => {
                slack > 0
                    || self.sequences.iter().any(|sequence| sequence.kv_len != self.max_lens().keys)
            }
        }
    }

    /// Maximum lengths of the sequences.
    pub(crate) fn max_lens(&self) -> MaxLens {
        let queries = self.sequences.iter().map(|sequence| sequence.q_len).max();
        let keys = self.sequences.iter().map(|sequence| sequence.kv_len).max();
        MaxLens { queries: queries.unwrap_or(0), keys: keys.unwrap_or(0) }
    }

    /// The layout of queries, or of rows as wide as `dim`.
    fn place_queries(&self, dim: usize, padding: usize, memory: &MemorySpec) -> Place {
        let (heads, batch) = (self.query_heads, self.sequences.len());
        match (self.ragged_queries, self.layout) {
            (true, _) => {
                let total = self.sequences.iter().map(|sequence| sequence.q_len).sum();
                Place::new(&[total, heads, dim], padding, memory)
            }
            (false, Layout::Bshd) => {
                Place::new(&[batch, self.max_lens().queries, heads, dim], padding, memory)
            }
            (false, Layout::Bhsd) => {
                Place::new(&[batch, heads, self.max_lens().queries, dim], padding, memory)
            }
        }
    }

    fn queries(&self) -> Array {
        let (heads, dim) = (self.query_heads, self.head_dim);
        let place = self.place_queries(dim, self.padding, &self.memory.q);
        let mut buffer = self.unseen(place.end);
        let mut token = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            for row in 0..sequence.q_len {
                let position = (self.first_position(index) + row as i64) as u64;
                for head in 0..heads {
                    let start = match (self.ragged_queries, self.layout) {
                        (true, _) => place.at(&[token, head]),
                        (false, Layout::Bshd) => place.at(&[index, row, head]),
                        (false, Layout::Bhsd) => place.at(&[index, head, row]),
                    };
                    let mut noise = self.noise(Use::Query, [sequence.id, position, head as u64]);
                    let row = &mut buffer[start..start + dim];
                    self.contents.q.fill(row, &mut noise, 1.5, largest(self.dtype));
                }
                token += 1;
            }
        }
        place.over(data(self.dtype, buffer))
    }

    /// The places of keys and values. Making the block table takes most of the time.
    fn place_keys(&self, make_table: impl FnOnce(usize) -> Vec<Vec<i32>>) -> CachePlace {
        let (heads, batch, longest) = (self.kv_heads, self.sequences.len(), self.max_lens().keys);
        let place = |outer: [usize; 3], (dim, memory): (usize, &_)| {
            Place::new(&[outer[0], outer[1], outer[2], dim], self.padding, memory)
        };
        let OperandMemory { k, v, .. } = &self.memory;
        let [key_dim, value_dim] = self.stored_dims();
        let both = |place: &dyn Fn((usize, &MemorySpec)) -> Place| CachePlace {
            keys: place((key_dim, k)),
            values: place((value_dim, v)),
            table: Vec::new(),
        };
        match self.keys {
            Keys::Batched { slack } => both(&|operand| match self.layout {
                Layout::Bshd => place([batch, longest + slack, heads], operand),
                Layout::Bhsd => place([batch, heads, longest + slack], operand),
            }),
            Keys::Ragged { slack } => {
                let total = self.sequences.iter().map(|sequence| sequence.kv_len + slack).sum();
                both(&|(dim, memory)| Place::new(&[total, heads, dim], self.padding, memory))
            }
            Keys::Paged { block_size, interleaved } => {
                let blocks = self.blocks(block_size);
                let shape = match self.kv_layout {
                    KvLayout::Nhd => [blocks, block_size, heads],
                    KvLayout::Hnd => [blocks, heads, block_size],
                };
                let CachePlace { keys: mut k, values: mut v, .. } =
                    both(&|operand| place(shape, operand));
                if interleaved {
                    // Rows as wide as the wider of the two, each block's keys before its values.
                    let memory = MemorySpec { order: [0, 1, 2], ..self.memory.k };
                    let wide = place(shape, (key_dim.max(value_dim), &memory));
                    let block = wide.strides[0];
                    for (half, place) in [&mut k, &mut v].into_iter().enumerate() {
                        place.strides = wide.strides.clone();
                        place.strides[0] = 2 * block;
                        place.offset = memory.first + half * block as usize;
                        place.end = memory.first + 2 * block as usize * blocks;
                    }
                }
                CachePlace { keys: k, values: v, table: make_table(block_size) }
            }
        }
    }

    /// The places of keys and values, with values in the keys if values are a prefix of the keys.
    fn place_cache(&self) -> CachePlace {
        self.place_cache_with(|block_size| self.block_table(block_size))
    }

    fn place_cache_with(&self, make_table: impl FnOnce(usize) -> Vec<Vec<i32>>) -> CachePlace {
        let mut cache = self.place_keys(make_table);
        if self.values == Values::KeyPrefix {
            let [_, value_dim] = self.stored_dims();
            cache.values = cache.keys.clone();
            *cache.values.shape.last_mut().expect("keys have dimensions") = value_dim;
        }
        cache
    }

    /// The pages of a sequence that hold visible keys.
    fn used_pages(&self, index: usize, block_size: usize) -> Range<usize> {
        let visible = self.visible(index);
        match visible.is_empty() {
            true => 0..0,
            false => visible.start / block_size..visible.end.div_ceil(block_size),
        }
    }

    /// Pages of the pool.
    fn blocks(&self, block_size: usize) -> usize {
        let used = |index| self.used_pages(index, block_size).len();
        (0..self.sequences.len()).map(used).sum::<usize>() + 2
    }

    /// Columns of the block table.
    fn block_columns(&self, block_size: usize) -> usize {
        self.max_lens().keys.div_ceil(block_size) + 1
    }

    /// Pages in random order, some of them unused. Pages of a shared prefix are in the row of the
    /// group's first sequence whether it sees them or not.
    fn block_table(&self, block_size: usize) -> Vec<Vec<i32>> {
        let (blocks, columns) = (self.blocks(block_size), self.block_columns(block_size));
        let mut order =
            Noise::new(self.page_seed, &[Use::Pages as u64]).permutation(blocks).into_iter();
        let mut strays = self.noise(Use::Pages, [0; 3]);
        let mut nowhere = || match (self.poison, self.stray_entries) {
            (false, _) => 0,
            (true, false) => -1,
            (true, true) => strays.pick(&[-1, i32::MIN, i32::MAX, blocks as i32, 1 << 20, -7]),
        };
        let row = |_| (0..columns).map(|_| nowhere()).collect();
        let mut table: Vec<Vec<i32>> = (0..self.sequences.len()).map(row).collect();
        let mut shared = vec![vec![None; columns]; self.sequences.len()];
        for index in 0..self.sequences.len() {
            let listed = self.listed_pages(index, block_size);
            let owner = self.prefix_owner(index);
            let shares = self.shared_pages(index, block_size);
            for page in self.used_pages(index, block_size) {
                if listed.as_ref().is_some_and(|listed| !listed[page]) {
                    continue;
                }
                let mut next = || order.next().expect("one page each") as i32;
                table[index][page] = match shares.contains(&page) {
                    true => *shared[owner][page].get_or_insert_with(next),
                    false => next(),
                };
                if shares.contains(&page) {
                    table[owner][page] = table[index][page];
                }
            }
        }
        table
    }

    /// The layout of a mask.
    fn place_mask(&self, mask: &MaskSpec) -> Place {
        let MaxLens { queries: longest_query, keys: longest_key } = self.max_lens();
        // A row and two columns more than needed.
        let full = [self.sequences.len(), self.query_heads, longest_query + 1, longest_key + 2];
        let shape: Vec<usize> = full
            .iter()
            .zip(mask.broadcast)
            .map(|(&n, broadcast)| if broadcast { 1 } else { n })
            .collect();
        Place::new(&shape, 0, &self.memory.mask)
    }

    /// The effect of [`Hide::Blocks`] around an element: hides everything (0), nothing (1), or keys
    /// at random (2).
    fn mask_block(&self, [a, b, c, d]: [u64; 4]) -> usize {
        let [c, d] = [c, d].map(|at| at / MASK_BLOCK);
        Noise::new(self.seed, &[Use::Mask as u64, a, b, c, d]).below(3)
    }

    fn mask(&self, mask: &MaskSpec) -> Array {
        let place = self.place_mask(mask);
        let mut buffer = self.unseen(place.end);
        for (index, sequence) in self.sequences.iter().enumerate() {
            for head in 0..self.query_heads {
                for row in 0..sequence.q_len {
                    for key in self.visible(index) {
                        let position = (self.first_position(index) + row as i64) as u64;
                        let wide = [
                            (index, sequence.id),
                            (head, head as u64),
                            (row, position),
                            (key, key as u64),
                        ];
                        let mut at = [0; 4];
                        let mut coordinates = [0; 4];
                        for i in 0..4 {
                            if !mask.broadcast[i] {
                                (at[i], coordinates[i]) = wide[i];
                            }
                        }
                        let [a, b, c, d] = coordinates;
                        let mut noise = Noise::new(self.seed, &[Use::Mask as u64, a, b, c, d]);
                        let block = match mask.hide {
                            Hide::Blocks => self.mask_block(coordinates),
                            // One draw per row: it decides if all of the row is hidden.
                            Hide::Lowest => {
                                Noise::new(self.seed, &[Use::Mask as u64, a, b, c]).below(4)
                            }
                            _ => 0,
                        };
                        buffer[place.at(&at[..3]) + at[3]] = mask.element(&mut noise, block);
                    }
                }
            }
        }
        place.over(data(mask.dtype, buffer))
    }

    /// Trees of the kind asked for. Bits past the last token,
    /// and rows past the last, mean nothing.
    fn tree_mask(&self) -> Array {
        let longest = self.max_lens().queries;
        let words = longest.div_ceil(32);
        let mut bits = Vec::with_capacity(self.sequences.len() * longest * words);
        for sequence in &self.sequences {
            let mut noise = self.noise(Use::Tree, [sequence.id, 0, 0]);
            let mut seen: Vec<Vec<bool>> = Vec::new();
            for row in 0..longest {
                if self.tree_kind == Trees::Arbitrary {
                    let mut noise = self.noise(Use::Tree, [sequence.id, 1 + row as u64, 0]);
                    seen.push((0..longest).map(|_| !noise.one_in(4)).collect());
                    continue;
                }
                let mut sees = match noise.below(row + 1) {
                    0 => vec![false; longest],
                    parent => seen[parent - 1].clone(),
                };
                sees[row] = true;
                seen.push(sees);
            }
            for (row, sees) in seen.iter().enumerate() {
                for word in 0..words {
                    let bit = |t: usize| match sees.get(t) {
                        Some(&sees) if row < sequence.q_len && t < sequence.q_len => sees,
                        _ => self.poison,
                    };
                    bits.push(
                        (0..32).fold(0u32, |all, t| all | u32::from(bit(word * 32 + t)) << t)
                            as i32,
                    );
                }
            }
        }
        made(Array::new(bits, &[self.sequences.len(), longest, words]))
    }
}

impl MaskSpec {
    /// One element, in a block of that kind.
    fn element(&self, noise: &mut Noise, block: usize) -> f32 {
        let keep = !noise.one_in(3);
        let keep = match (self.hide, block) {
            (Hide::Blocks | Hide::Lowest, 0) => false,
            (Hide::Blocks, 1) => true,
            (Hide::Rare, _) => !noise.one_in(20_000),
            _ => keep,
        };
        match (self.dtype, self.hide) {
            (DType::Bool, _) => f32::from(u8::from(keep)),
            (DType::F16, Hide::Large) if !keep => -6e4,
            (_, Hide::Large) if !keep => -1e5,
            (dtype, Hide::Lowest) if !keep => -largest(dtype),
            (dtype, Hide::Extreme) if !keep => {
                noise.pick(&[-1.0, -0.999, -0.9, -0.7, -0.5, -1e-9, 1e-9, 0.5, 0.7, 0.9, 1.0])
                    * largest(dtype)
            }
            (_, Hide::Infinite | Hide::Blocks | Hide::Rare) if !keep => f32::NEG_INFINITY,
            (_, Hide::Blocks) if block == 1 => 0.0,
            (_, Hide::Rare) => 0.0,
            _ => noise.normal(),
        }
    }
}

fn data(dtype: DType, buffer: Vec<f32>) -> Data {
    match dtype {
        DType::F32 => buffer.into(),
        _ => Data::from_numbers(dtype, buffer.into_iter().map(f64::from)),
    }
}

fn vector<T>(elements: Vec<T>) -> Array
where
    Data: From<Vec<T>>,
{
    let shape = [elements.len()];
    made(Array::new(elements, &shape))
}

fn cumulative(lengths: impl Iterator<Item = usize>) -> Array {
    let mut all = vec![0i32];
    for length in lengths {
        all.push(all[all.len() - 1] + length as i32);
    }
    vector(all)
}

fn made(array: Result<Array, regard::Error>) -> Array {
    array.expect("a description makes arrays that fit")
}
