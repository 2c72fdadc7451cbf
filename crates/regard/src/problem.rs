//! One attention problem: its shape ([`Problem`]), its operands ([`Inputs`], [`Outputs`]), and
//! the rows of each sequence in them ([`Sequence`]). Operands are checked here too: `shapes` checks
//! shapes, types and strides of operands in any memory, `contents` the contents of operands in the
//! host's memory. Later code relies on both.

mod builder;
mod check_scales;
mod contents;
mod describe;
mod key_shape;
mod lists;
mod page_lists;
mod prefix;
mod rotary;
mod second_list;
mod selection;
mod shapes;
mod values;

pub(crate) use lists::ListTensors;
pub(crate) use page_lists::{ListedKey, PageList};
pub(crate) use selection::KeyList;

use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{expect_dtype, one_of};
use crate::memory::{Host, Memory};
use crate::positions::{KeyOffset, KeyPositions, SequenceKeys};
use crate::tensor::{Tensor, TensorMut};
use crate::variant::{Attention, QueryOffset, Values, Variant};
use std::convert::Infallible;

/// The largest head dim, of keys or of values.
pub const MAX_HEAD_DIM: usize = 576;

/// The longest sequence, and the largest number of sequences or blocks: the range of an `i32`.
pub const MAX_LEN: usize = i32::MAX as usize;

/// The largest magnitude of `scale`, of `softcap` (whose minimum is the inverse of this) and of an
/// ALiBi slope: 2^60. Within it, the scale over the softcap and a slope times any distance are
/// numbers that f32 holds, with nothing lost to underflow. Models use numbers between 1e-3 and 1e2.
pub const MAX_FACTOR: f32 = (1u64 << 60) as f32;

/// The types that keys and values can have in a cache.
pub const CACHE_DTYPES: [DType; 10] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::E4M3,
    DType::E5M2,
    DType::I8,
    DType::Q8_0,
    DType::Q4_0,
    DType::Mla656,
    DType::Mla656Latent,
];

/// Checks that a head dim is a multiple of the values of a type's element.
fn whole_blocks(argument: &str, dim: usize, dtype: DType) -> Result<(), Error> {
    if dim.is_multiple_of(dtype.values()) {
        return Ok(());
    }
    let allowed = format!("a multiple of {}, the values of a block of {dtype}", dtype.values());
    Err(Error::argument(argument, dim, allowed))
}

/// The storage of queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QueryStorage {
    /// `[B, Lq, Hq, D]`.
    Batched,
    /// `[total, Hq, D]`, sequences one after the other.
    Ragged {
        /// Rows of all sequences together.
        total: usize,
    },
}

/// The storage of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvStorage {
    /// `[B, Lk, Hkv, D]`.
    Batched,
    /// `[total, Hkv, D]`, sequences one after the other.
    Ragged,
    /// Pools `[blocks, block_size, Hkv, D]` behind a block table.
    Paged {
        /// Slots per block.
        block_size: usize,
    },
}

/// The properties of key lists that plans depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyLists {
    /// Entries of the longest list; of lists of pages, the slots of all pages.
    pub len: usize,
    /// Whether there is a list per key/value head.
    pub per_head: bool,
    /// The kind of entries.
    pub entries: ListEntries,
    /// Entries of the longest second list, into a second cache, if there are second lists.
    pub second: Option<usize>,
}

/// The kind of entries in lists of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum ListEntries {
    /// Keys of the row's sequence, by position. There is a list per row.
    #[default]
    Keys,
    /// Physical slots of the pool, without positions. There is a list per row.
    Slots,
    /// Pages of the pool, without positions. There is a list per sequence.
    Pages,
    /// Pages of the pool with their numbers in the sequence. There is a list per sequence.
    NumberedPages,
}

/// The shape of an attention call: all that choosing a kernel and planning it depends on, and no
/// data.
///
/// Lengths are upper bounds: a plan for this problem also runs smaller batches and shorter
/// sequences.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub query_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Head dim of queries and keys (Dk).
    pub head_dim: usize,
    /// Head dim of values and outputs (Dv).
    pub value_dim: usize,
    /// The longest query of any sequence.
    pub query_len: usize,
    /// Maximum keys of a sequence; with physical slots and pages, the longest list.
    pub kv_len: usize,
    /// The storage of queries (and outputs).
    pub queries: QueryStorage,
    /// The storage of keys and values.
    pub keys: KvStorage,
    /// The type of queries.
    pub dtype: DType,
    /// The type of keys: `f32`, `f16`, `bf16`, codes of 8 bits with scales beside them, or blocks
    /// of 32 values.
    pub key_dtype: DType,
    /// The type of values, likewise. It may differ from the type of keys.
    pub value_dtype: DType,
    /// The source of values: a tensor of their own, or the first dims of keys.
    pub values: Values,
    /// The last dims of keys, which are in a tensor of their own; 0 if keys are in one.
    pub rotary_dim: usize,
    /// The type of the output: `dtype` or `f32`.
    pub out_dtype: DType,
    /// The features in use.
    pub variant: Variant,
    /// Lists of the keys that rows attend to, if rows do not attend to all.
    pub key_lists: Option<KeyLists>,
    /// Maximum prefix groups; 0 if no sequences share their first keys.
    pub prefix_groups: usize,
    /// Whether the log-sum-exp of each row is asked for.
    pub lse: bool,
    /// Whether a row's bits must not depend on the rows beside it.
    pub batch_invariant: bool,
}

/// The operands that an attention call reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, M: Memory = Host> {
    /// `[B, Lq, Hq, Dk]`, or `[total, Hq, Dk]` with `cu_seqlens_q`.
    pub q: Tensor<'a, M>,
    /// `[B, Lk, Hkv, Dk]`, `[total, Hkv, Dk]` with `cu_seqlens_k`, or a pool `[blocks, block_size,
    /// Hkv, Dk]` with `block_table`, `page_indices` or `indices_are_slots`; with `rotary_k` the
    /// first dims of keys only.
    pub k: Tensor<'a, M>,
    /// Like `k`, with Dv for Dk.
    pub v: Tensor<'a, M>,
    /// Everything else.
    pub attention: Attention<Tensor<'a, M>>,
}

/// The operands that an attention call writes: always every element.
#[derive(Debug)]
pub struct Outputs<'a, M: Memory = Host> {
    /// Like `q`, with Dv for Dk; of the inputs' type or `f32`.
    pub out: TensorMut<'a, M>,
    /// `f32`, the shape of `out` without its last dimension: natural logarithm of the softmax
    /// denominator, the sink included; minus infinity for a row that sees nothing.
    pub lse: Option<TensorMut<'a, M>>,
}

/// The rows and keys of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequence {
    /// Its place in the batch.
    pub index: usize,
    /// Its first row: in its own batch entry (0), or in the ragged tensor.
    pub q_start: usize,
    /// Its query rows.
    pub q_len: usize,
    /// Its first key: in its own batch entry or block table row (0), or in the ragged tensor.
    pub kv_start: usize,
    /// Its keys. If lists hold physical slots, the slots of the pool; if lists hold pages, the
    /// slots of a list.
    pub kv_len: usize,
    /// The position of its first query row.
    pub q_offset: i64,
    /// The position of its first key.
    pub key_offset: i64,
    /// From one key's position to the next one's.
    pub key_stride: usize,
}

impl Sequence {
    /// Its keys and their positions.
    pub fn keys(&self) -> SequenceKeys {
        let Sequence { kv_len, key_offset, key_stride, .. } = *self;
        SequenceKeys { len: kv_len, offset: key_offset, stride: key_stride }
    }
}

impl Problem {
    /// One query row of one head over no keys, batched, full attention, with values as wide as
    /// keys, and keys, values and results of the queries' type. A caller starts from it, and names
    /// only the differences.
    ///
    /// ```
    /// use regard::{DType, KvStorage, Machine, Plan, Problem, Variant};
    ///
    /// // Decode: up to 8 sequences of up to 4096 keys in pages of 16.
    /// let problem = Problem {
    ///     batch: 8,
    ///     query_heads: 32,
    ///     kv_heads: 8,
    ///     kv_len: 4096,
    ///     keys: KvStorage::Paged { block_size: 16 },
    ///     variant: Variant { causal: true, ..Variant::default() },
    ///     ..Problem::new(DType::BF16, 128)
    /// };
    /// let plan = Plan::new(&problem, &Machine::host()?)?;
    /// assert!(plan.explain().contains("32/8 heads"));
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn new(dtype: DType, head_dim: usize) -> Problem {
        Problem {
            batch: 1,
            query_heads: 1,
            kv_heads: 1,
            head_dim,
            value_dim: head_dim,
            query_len: 1,
            kv_len: 0,
            queries: QueryStorage::Batched,
            keys: KvStorage::Batched,
            dtype,
            key_dtype: dtype,
            value_dtype: dtype,
            values: Values::default(),
            rotary_dim: 0,
            out_dtype: dtype,
            variant: Variant::default(),
            key_lists: None,
            prefix_groups: 0,
            lse: false,
            batch_invariant: false,
        }
    }

    /// Query heads that share a key/value head; 0 if there is no key/value head, which
    /// [`Problem::validate`] refuses.
    pub fn group(&self) -> usize {
        self.query_heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Maximum query rows of all sequences and heads.
    pub fn rows(&self) -> usize {
        let tokens = match self.queries {
            QueryStorage::Batched => self.batch.saturating_mul(self.query_len),
            QueryStorage::Ragged { total } => total,
        };
        tokens.saturating_mul(self.query_heads)
    }

    /// Checks that the numbers are consistent.
    pub fn validate(&self) -> Result<(), Error> {
        one_of("batch", self.batch, 0..MAX_LEN + 1)?;
        one_of("query_heads", self.query_heads, 1..MAX_LEN + 1)?;
        one_of("kv_heads", self.kv_heads, 1..MAX_LEN + 1)?;
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(Error::argument(
                "query_heads",
                format!("{} with {} key/value heads", self.query_heads, self.kv_heads),
                "a multiple of the number of key/value heads",
            ));
        }
        one_of("head_dim", self.head_dim, 1..MAX_HEAD_DIM + 1)?;
        one_of("value_dim", self.value_dim, 1..MAX_HEAD_DIM + 1)?;
        one_of("query_len", self.query_len, 0..MAX_LEN + 1)?;
        one_of("kv_len", self.kv_len, 0..MAX_LEN + 1)?;
        if self.rows() > isize::MAX as usize / 4096 {
            return Err(Error::argument(
                "query_len",
                format!(
                    "{} x {} sequences x {} heads",
                    self.query_len, self.batch, self.query_heads
                ),
                "fewer than 2^51 rows in all",
            ));
        }
        if let Some(chunk) = self.variant.chunk {
            one_of("chunk", chunk, 1..MAX_LEN + 1)?;
        }
        if let QueryStorage::Ragged { total } = self.queries {
            one_of("query rows", total, 0..MAX_LEN + 1)?;
            one_of("query_len", self.query_len, 0..total + 1)?;
        }
        if let KvStorage::Paged { block_size } = self.keys {
            one_of("block_size", block_size, 1..MAX_LEN + 1)?;
        }
        expect_dtype("dtype", self.dtype, &[DType::F32, DType::F16, DType::BF16])?;
        expect_dtype("key_dtype", self.key_dtype, &CACHE_DTYPES)?;
        expect_dtype("value_dtype", self.value_dtype, &CACHE_DTYPES)?;
        whole_blocks("head_dim", self.head_dim, self.key_dtype)?;
        whole_blocks("value_dim", self.value_dim, self.value_dtype)?;
        if self.values == Values::KeyPrefix {
            one_of("value_dim", self.value_dim, 1..self.head_dim + 1)?;
            let values = self.key_dtype.of_prefix(self.value_dim);
            expect_dtype("value_dtype", self.value_dtype, &[values])?;
        }
        self.validate_latent_rows()?;
        self.validate_rotary()?;
        expect_dtype("out_dtype", self.out_dtype, &[self.dtype, DType::F32])?;
        self.validate_lists()?;
        if self.variant.key_positions.is_some() && self.variant.tree {
            let allowed = "none together with key_positions: a tree's new tokens are the last keys \
                           of the sequence, which another shard may have";
            return Err(Error::argument("tree_mask", "given", allowed));
        }
        self.validate_prefix_groups()?;
        if let Some(mask) = self.variant.mask {
            expect_dtype("mask", mask, &[DType::Bool, DType::F32, DType::F16, DType::BF16])?;
        }
        Ok(())
    }

    /// The problem that these operands pose. Checks every shape, type, stride, length and visible
    /// block-table entry. Operands that it accepts are safe to run.
    pub fn from_operands<M: Memory>(
        inputs: &Inputs<M>,
        outputs: &Outputs<M>,
    ) -> Result<Problem, Error> {
        Problem::from_operands_beside(inputs, outputs, None)
    }

    /// As [`Problem::from_operands`], for a run in a workspace at these addresses, which no operand
    /// may share: all ranges of memory are compared at once.
    pub(crate) fn from_operands_beside<M: Memory>(
        inputs: &Inputs<M>,
        outputs: &Outputs<M>,
        workspace: Option<(usize, usize)>,
    ) -> Result<Problem, Error> {
        let problem = inputs.problem(outputs.out.dtype(), outputs.lse.is_some())?;
        outputs.check(inputs, &problem, workspace)?;
        Ok(problem)
    }

    /// The problem that these inputs pose for results of type `out_dtype`: for planning before
    /// there are outputs. Checks the inputs as [`Problem::from_operands`] does.
    pub fn from_inputs<M: Memory>(
        inputs: &Inputs<M>,
        out_dtype: DType,
        lse: bool,
    ) -> Result<Problem, Error> {
        inputs.problem(out_dtype, lse)
    }

    /// Lowers the maximum query length and key count of ragged sequences to the planned ones: the
    /// shapes allow more, and only the device knows the lengths.
    pub(crate) fn bound_ragged_by(&mut self, planned: &Problem) {
        if let QueryStorage::Ragged { .. } = self.queries {
            self.query_len = self.query_len.min(planned.query_len);
        }
        if self.keys == KvStorage::Ragged {
            self.kv_len = self.kv_len.min(planned.kv_len);
        }
    }

    /// Checks that a plan made for `self` also serves `other`: the same heads, dims, types and
    /// features, and nothing longer.
    pub fn covers(&self, other: &Problem) -> Result<(), Error> {
        fn same<T: PartialEq + std::fmt::Debug>(
            argument: &str,
            planned: &T,
            found: &T,
        ) -> Result<(), Error> {
            if planned == found {
                return Ok(());
            }
            Err(Error::argument(argument, format!("{found:?}"), format!("{planned:?}, as planned")))
        }
        fn at_most(argument: &str, planned: usize, found: usize) -> Result<(), Error> {
            if found <= planned {
                return Ok(());
            }
            Err(Error::argument(argument, found, format!("at most {planned}, as planned")))
        }
        fn given(argument: &str, planned: bool, found: bool) -> Result<(), Error> {
            let word = |given| if given { "given" } else { "not given" };
            if planned == found {
                return Ok(());
            }
            Err(Error::argument(argument, word(found), format!("{}, as planned", word(planned))))
        }
        same("query_heads", &self.query_heads, &other.query_heads)?;
        same("kv_heads", &self.kv_heads, &other.kv_heads)?;
        same("head_dim", &self.head_dim, &other.head_dim)?;
        same("value_dim", &self.value_dim, &other.value_dim)?;
        same("dtype", &self.dtype, &other.dtype)?;
        same("key_dtype", &self.key_dtype, &other.key_dtype)?;
        same("value_dtype", &self.value_dtype, &other.value_dtype)?;
        same("values", &self.values, &other.values)?;
        same("rotary_dim", &self.rotary_dim, &other.rotary_dim)?;
        same("out_dtype", &self.out_dtype, &other.out_dtype)?;
        let (planned, found) = (&self.variant, &other.variant);
        same("causal", &planned.causal, &found.causal)?;
        same("window", &planned.window, &found.window)?;
        same("chunk", &planned.chunk, &found.chunk)?;
        given("softcap", planned.softcap, found.softcap)?;
        given("alibi_slopes", planned.alibi, found.alibi)?;
        given("sinks", planned.sinks, found.sinks)?;
        given("tree_mask", planned.tree, found.tree)?;
        same("key_positions", &planned.key_positions, &found.key_positions)?;
        given("mask", planned.mask.is_some(), found.mask.is_some())?;
        if let (Some(planned), Some(found)) = (planned.mask, found.mask) {
            expect_dtype("mask", found, &[planned])?;
        }
        same("batch_invariant", &self.batch_invariant, &other.batch_invariant)?;
        given("lse", self.lse, other.lse)?;
        if let Some((planned, found)) = self.covers_lists(other)? {
            let lists = self.key_lists.expect("covered: both have lists");
            at_most(lists.argument(), planned, found)?;
            let second = |problem: &Problem| problem.key_lists.and_then(|lists| lists.second);
            let (planned, found) = (second(self), second(other));
            given("second_indices", planned.is_some(), found.is_some())?;
            at_most("second_indices", planned.unwrap_or(0), found.unwrap_or(0))?;
        }
        given("prefix_groups", self.prefix_groups > 0, other.prefix_groups > 0)?;
        at_most("prefix_lens", self.prefix_groups, other.prefix_groups)?;
        at_most("batch", self.batch, other.batch)?;
        at_most("query_len", self.query_len, other.query_len)?;
        at_most("kv_len", self.kv_len, other.kv_len)?;
        match (self.queries, other.queries) {
            (QueryStorage::Batched, QueryStorage::Batched) => {}
            (QueryStorage::Ragged { total }, QueryStorage::Ragged { total: found }) => {
                at_most("query rows", total, found)?;
            }
            (planned, found) => same("queries", &planned, &found)?,
        }
        same("keys", &self.keys, &other.keys)
    }
}

impl<'a, M: Memory> Inputs<'a, M> {
    /// Full attention of `q` over `k` and `v` as `attention` describes it.
    pub fn new(
        q: Tensor<'a, M>,
        k: Tensor<'a, M>,
        v: Tensor<'a, M>,
        attention: Attention<Tensor<'a, M>>,
    ) -> Self {
        Inputs { q, k, v, attention }
    }

    /// Every tensor that is given, by its name: `q`, `k`, `v`, and the tensors that
    /// [`Attention::named`] lists. Values that are a part of the keys, and their scales, are not
    /// listed again.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &Tensor<'a, M>)> {
        let own_values = (!self.has_key_prefix()).then_some(("v", &self.v));
        let own_scales = !self.has_key_scales();
        let attention =
            self.attention.named().filter(move |(name, _)| own_scales || *name != "v_scales");
        [("q", &self.q), ("k", &self.k)].into_iter().chain(own_values).chain(attention)
    }

    /// The same inputs with what `change` makes of each tensor that [`Inputs::named`] lists, called
    /// in that order: views of a copy, for example, or of another memory.
    ///
    /// # Errors
    /// The first error of `change`.
    ///
    /// # Panics
    /// If values are a part of the keys, and `change` makes keys without room for them.
    pub fn try_map<'b, N: Memory, E>(
        self,
        mut change: impl FnMut(&'static str, Tensor<'a, M>) -> Result<Tensor<'b, N>, E>,
    ) -> Result<Inputs<'b, N>, E> {
        let mut attention = self.attention;
        if self.has_key_scales() {
            attention.v_scales = None;
        }
        let (q, k) = (change("q", self.q)?, change("k", self.k)?);
        let v = match self.has_key_prefix() {
            true => k.prefix(self.value_dim()).expect("keys with as many dims as before"),
            false => change("v", self.v)?,
        };
        Ok(Inputs { q, k, v, attention: attention.try_map(change)? })
    }

    /// As [`Inputs::try_map`], for a change that cannot fail.
    pub fn map<'b, N: Memory>(
        self,
        mut change: impl FnMut(&'static str, Tensor<'a, M>) -> Tensor<'b, N>,
    ) -> Inputs<'b, N> {
        let Ok(changed) = self.try_map(|name, tensor| Ok::<_, Infallible>(change(name, tensor)));
        changed
    }

    /// The softmax scale in force.
    pub fn scale(&self) -> f32 {
        self.attention.scale.unwrap_or_else(|| {
            let head_dim = *self.q.shape().last().expect("q has dimensions");
            (1.0 / (head_dim as f64).sqrt()) as f32
        })
    }
}

impl<'a> Inputs<'a> {
    /// Sequence `index` of the batch.
    ///
    /// # Panics
    /// May panic if the inputs were not checked ([`Problem::from_operands`]) or have no such
    /// sequence.
    pub fn sequence(&self, index: usize) -> Sequence {
        let ints = |tensor: &Tensor<'a>| tensor.as_slice::<i32>().expect("checked: an i32 vector");
        let (q_start, q_len) = match &self.attention.cu_seqlens_q {
            Some(cumulative) => span(ints(cumulative), index),
            None => (0, self.q.shape()[1]),
        };
        let (kv_start, capacity) = match (&self.attention.cu_seqlens_k, &self.attention.block_table)
        {
            (Some(cumulative), _) => span(ints(cumulative), index),
            (None, Some(table)) => (0, table.shape()[1].saturating_mul(self.k.shape()[1])),
            (None, None) if self.attention.indices_are_slots => (0, self.pool_slots()),
            (None, None) if self.attention.page_indices.is_some() => (0, self.page_slots()),
            (None, None) => (0, self.k.shape()[1]),
        };
        let kv_len =
            self.attention.kv_lens.as_ref().map_or(capacity, |lens| ints(lens)[index] as usize);
        let q_offset = match &self.attention.q_offset {
            QueryOffset::BottomRight => kv_len as i64 - q_len as i64,
            QueryOffset::Same(offset) => *offset,
            QueryOffset::PerSequence(offsets) => i64::from(ints(offsets)[index]),
        };
        let (key_offset, key_stride) = match &self.attention.key_positions {
            None => (0, 1),
            Some(KeyPositions { offset: KeyOffset::Same(offset), stride }) => (*offset, *stride),
            Some(KeyPositions { offset: KeyOffset::PerSequence(offsets), stride }) => {
                (i64::from(ints(offsets)[index]), *stride)
            }
        };
        Sequence { index, q_start, q_len, kv_start, kv_len, q_offset, key_offset, key_stride }
    }

    /// Row `sequence` of the block table, if there is one.
    pub(crate) fn block_row(&self, sequence: usize) -> Option<&'a [i32]> {
        let table = self.attention.block_table?;
        let row = table.select(0, sequence).expect("checked: one row per sequence");
        Some(row.as_slice().expect("checked: i32 rows with unit stride"))
    }
}

/// Start and length of entry `index` of cumulative lengths.
fn span(cumulative: &[i32], index: usize) -> (usize, usize) {
    let (start, end) = (cumulative[index] as usize, cumulative[index + 1] as usize);
    (start, end - start)
}
