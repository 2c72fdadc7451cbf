//! One attention problem: its shape ([`Problem`]), its operands ([`Inputs`], [`Outputs`]), and where each sequence's
//! rows lie in them ([`Sequence`]). Checking is here too: nothing later has to doubt a shape, a length or a table entry.

use crate::error::Error;
use crate::tensor::{DType, Tensor, TensorMut};
use crate::variant::{Attention, QueryOffset, Variant};
use std::ops::Range;

/// The largest head dim, of keys or of values.
pub const MAX_HEAD_DIM: usize = 576;

/// The longest sequence, and the largest number of sequences or blocks: what an `i32` can count.
pub const MAX_LEN: usize = i32::MAX as usize;

/// How queries are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryStorage {
    /// `[B, Lq, Hq, D]`.
    Batched,
    /// `[total, Hq, D]`, sequences one after the other.
    Ragged {
        /// Rows of all sequences together.
        total: usize,
    },
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvStorage {
    /// `[B, Lk, Hkv, D]`.
    Batched,
    /// `[total, Hkv, D]`, sequences one after the other.
    Ragged,
    /// Pools `[blocks, block_size, Hkv, D]` behind a block table.
    Paged {
        /// Slots a block.
        block_size: usize,
    },
}

/// The shape of an attention call: all that choosing a kernel and planning it depends on, and no data.
///
/// Lengths are upper bounds: a plan for this problem also runs smaller batches and shorter sequences.
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
    /// The most keys of any sequence.
    pub kv_len: usize,
    /// How queries (and outputs) are stored.
    pub queries: QueryStorage,
    /// How keys and values are stored.
    pub keys: KvStorage,
    /// The type of queries, keys and values.
    pub dtype: DType,
    /// The type of the output: `dtype` or `f32`.
    pub out_dtype: DType,
    /// The features in use.
    pub variant: Variant,
    /// Whether the log-sum-exp of each row is asked for.
    pub lse: bool,
    /// Whether a row's bits must not depend on what runs beside it.
    pub batch_invariant: bool,
}

/// What an attention call reads.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[B, Lq, Hq, Dk]`, or `[total, Hq, Dk]` with `cu_seqlens_q`.
    pub q: Tensor<'a>,
    /// `[B, Lk, Hkv, Dk]`, `[total, Hkv, Dk]` with `cu_seqlens_k`, or a pool `[blocks, block_size, Hkv, Dk]` with `block_table`.
    pub k: Tensor<'a>,
    /// Like `k`, with Dv for Dk.
    pub v: Tensor<'a>,
    /// Everything else.
    pub attention: Attention<'a>,
}

/// What an attention call writes: every element of it, always.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Like `q`, with Dv for Dk; of the inputs' type or `f32`.
    pub out: TensorMut<'a>,
    /// `f32`, the shape of `out` without its last dimension: natural logarithm of the softmax denominator, the sink
    /// included; minus infinity for a row that sees nothing.
    pub lse: Option<TensorMut<'a>>,
}

/// Where one sequence's rows and keys are.
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
    /// Its keys.
    pub kv_len: usize,
    /// The position, among its keys, of its first query row.
    pub q_offset: i64,
}

fn one_of(argument: &str, found: usize, range: Range<usize>) -> Result<(), Error> {
    if range.contains(&found) {
        return Ok(());
    }
    Err(Error::argument(argument, found, format!("{}..={}", range.start, range.end - 1)))
}

fn expect_shape(argument: &str, found: &[usize], expected: &[usize], why: &str) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::argument(argument, format!("of shape {found:?}"), format!("{expected:?} ({why})")))
}

fn expect_rank(argument: &str, shape: &[usize], rank: usize, layout: &str) -> Result<(), Error> {
    if shape.len() == rank {
        return Ok(());
    }
    Err(Error::argument(argument, format!("of shape {shape:?}"), format!("{rank} dimensions: {layout}")))
}

fn expect_dtype(argument: &str, found: DType, allowed: &[DType]) -> Result<(), Error> {
    if allowed.contains(&found) {
        return Ok(());
    }
    let mut allowed: Vec<_> = allowed.iter().map(|dtype| dtype.name()).collect();
    allowed.dedup();
    Err(Error::argument(argument, format!("of type {found}"), allowed.join(" or ")))
}

fn expect_unit_stride(argument: &str, shape: &[usize], strides: &[i64]) -> Result<(), Error> {
    match (shape.last(), strides.last()) {
        (Some(&n), Some(&stride)) if n > 1 && stride != 1 => Err(Error::argument(
            argument,
            format!("a view with strides {strides:?}"),
            "an innermost stride of 1".to_string(),
        )),
        _ => Ok(()),
    }
}

/// An `i32` vector of `len` entries, or the error that says what it is instead.
fn int_vector<'a>(argument: &str, tensor: &Tensor<'a>, len: usize, why: &str) -> Result<&'a [i32], Error> {
    expect_dtype(argument, tensor.dtype(), &[DType::I32])?;
    expect_shape(argument, tensor.shape(), &[len], why)?;
    expect_unit_stride(argument, tensor.shape(), tensor.strides())?;
    Ok(tensor.as_slice().expect("a contiguous i32 vector"))
}

/// Cumulative lengths: from 0, never falling, ending inside `total`; the longest step is returned.
fn check_cumulative(argument: &str, cumulative: &[i32], total: usize) -> Result<usize, Error> {
    let mut longest = 0;
    if cumulative[0] != 0 {
        return Err(Error::argument(format!("{argument}[0]"), cumulative[0], "0"));
    }
    for (i, pair) in cumulative.windows(2).enumerate() {
        if pair[1] < pair[0] || pair[1] as usize > total {
            return Err(Error::argument(
                format!("{argument}[{}]", i + 1),
                pair[1],
                format!("{}..={total} (never falling, within the rows there are)", pair[0]),
            ));
        }
        longest = longest.max((pair[1] - pair[0]) as usize);
    }
    let last = *cumulative.last().expect("one entry at least") as usize;
    if last != total {
        return Err(Error::argument(
            format!("{argument}[{}]", cumulative.len() - 1),
            last,
            format!("{total} (all rows belong to a sequence)"),
        ));
    }
    Ok(longest)
}

impl Problem {
    /// Query heads that share a key/value head.
    pub fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Query rows of all sequences and heads, at most.
    pub fn rows(&self) -> usize {
        let tokens = match self.queries {
            QueryStorage::Batched => self.batch.saturating_mul(self.query_len),
            QueryStorage::Ragged { total } => total,
        };
        tokens.saturating_mul(self.query_heads)
    }

    /// Whether the numbers make sense together.
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
                format!("{} x {} sequences x {} heads", self.query_len, self.batch, self.query_heads),
                "fewer than 2^51 rows in all",
            ));
        }
        if let QueryStorage::Ragged { total } = self.queries {
            one_of("query rows", total, 0..MAX_LEN + 1)?;
            one_of("query_len", self.query_len, 0..total + 1)?;
        }
        if let KvStorage::Paged { block_size } = self.keys {
            one_of("block_size", block_size, 1..MAX_LEN + 1)?;
        }
        expect_dtype("dtype", self.dtype, &[DType::F32, DType::F16, DType::BF16])?;
        expect_dtype("out_dtype", self.out_dtype, &[self.dtype, DType::F32])?;
        if let Some(mask) = self.variant.mask {
            expect_dtype("mask", mask, &[DType::Bool, DType::F32, DType::F16, DType::BF16])?;
        }
        Ok(())
    }

    /// The problem that these operands pose. Checks every shape, type, stride, length and visible block-table entry; what it
    /// accepts is safe to run.
    pub fn of(inputs: &Inputs, outputs: &Outputs) -> Result<Problem, Error> {
        let problem = inputs.problem(outputs.out.dtype(), outputs.lse.is_some())?;
        outputs.check(inputs, &problem)?;
        Ok(problem)
    }

    /// The problem that these inputs pose for results of type `out_dtype`: for planning before there are outputs. Checks the inputs as
    /// [`Problem::of`] does.
    pub fn of_inputs(inputs: &Inputs, out_dtype: DType, lse: bool) -> Result<Problem, Error> {
        inputs.problem(out_dtype, lse)
    }

    /// Whether a plan made for `self` also serves `other`: the same heads, dims, types and features, and nothing longer.
    pub fn covers(&self, other: &Problem) -> Result<(), Error> {
        fn same<T: PartialEq + std::fmt::Debug>(argument: &str, planned: &T, found: &T) -> Result<(), Error> {
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
            let say = |given| if given { "given" } else { "not given" };
            if planned == found {
                return Ok(());
            }
            Err(Error::argument(argument, say(found), format!("{}, as planned", say(planned))))
        }
        same("query_heads", &self.query_heads, &other.query_heads)?;
        same("kv_heads", &self.kv_heads, &other.kv_heads)?;
        same("head_dim", &self.head_dim, &other.head_dim)?;
        same("value_dim", &self.value_dim, &other.value_dim)?;
        same("dtype", &self.dtype, &other.dtype)?;
        same("out_dtype", &self.out_dtype, &other.out_dtype)?;
        let (planned, found) = (&self.variant, &other.variant);
        same("causal", &planned.causal, &found.causal)?;
        same("window", &planned.window, &found.window)?;
        given("softcap", planned.softcap, found.softcap)?;
        given("alibi_slopes", planned.alibi, found.alibi)?;
        given("sinks", planned.sinks, found.sinks)?;
        given("tree_mask", planned.tree, found.tree)?;
        given("mask", planned.mask.is_some(), found.mask.is_some())?;
        if let (Some(planned), Some(found)) = (planned.mask, found.mask) {
            expect_dtype("mask", found, &[planned])?;
        }
        same("batch_invariant", &self.batch_invariant, &other.batch_invariant)?;
        given("lse", self.lse, other.lse)?;
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

impl<'a> Inputs<'a> {
    /// Full attention of `q` over `k` and `v` as `attention` describes it.
    pub fn new(q: Tensor<'a>, k: Tensor<'a>, v: Tensor<'a>, attention: Attention<'a>) -> Self {
        Inputs { q, k, v, attention }
    }

    /// The softmax scale in force.
    pub fn scale(&self) -> f32 {
        self.attention.scale.unwrap_or_else(|| {
            let head_dim = *self.q.shape().last().expect("q has dimensions");
            (1.0 / (head_dim as f64).sqrt()) as f32
        })
    }

    /// Sequence `index` of the batch.
    ///
    /// # Panics
    /// May panic where the inputs were not checked ([`Problem::of`]) or have no such sequence.
    pub fn sequence(&self, index: usize) -> Sequence {
        let ints = |tensor: &Tensor<'a>| tensor.as_slice::<i32>().expect("checked: an i32 vector");
        let (q_start, q_len) = match &self.attention.cu_seqlens_q {
            Some(cumulative) => span(ints(cumulative), index),
            None => (0, self.q.shape()[1]),
        };
        let (kv_start, capacity) = match (&self.attention.cu_seqlens_k, &self.attention.block_table) {
            (Some(cumulative), _) => span(ints(cumulative), index),
            (None, Some(table)) => (0, table.shape()[1].saturating_mul(self.k.shape()[1])),
            (None, None) => (0, self.k.shape()[1]),
        };
        let kv_len = self.attention.kv_lens.as_ref().map_or(capacity, |lens| ints(lens)[index] as usize);
        let q_offset = match &self.attention.q_offset {
            QueryOffset::BottomRight => kv_len as i64 - q_len as i64,
            QueryOffset::Same(offset) => *offset,
            QueryOffset::PerSequence(offsets) => i64::from(ints(offsets)[index]),
        };
        Sequence { index, q_start, q_len, kv_start, kv_len, q_offset }
    }

    /// Row `sequence` of the block table, if keys are paged.
    pub(crate) fn block_row(&self, sequence: usize) -> Option<&'a [i32]> {
        let table = self.attention.block_table?;
        let row = table.select(0, sequence).expect("checked: one row a sequence");
        Some(row.as_slice().expect("checked: i32 rows with unit stride"))
    }

    /// The problem that these inputs pose, once they have been checked.
    pub(crate) fn problem(&self, out_dtype: DType, lse: bool) -> Result<Problem, Error> {
        let Inputs { q, k, v, attention } = self;
        let floats = [DType::F32, DType::F16, DType::BF16];
        expect_dtype("q", q.dtype(), &floats)?;
        expect_dtype("k", k.dtype(), &[q.dtype()])?;
        expect_dtype("v", v.dtype(), &[q.dtype()])?;
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            expect_unit_stride(name, tensor.shape(), tensor.strides())?;
            if tensor.rank() == 0 || tensor.shape().last() == Some(&0) {
                return Err(Error::argument(
                    name,
                    format!("of shape {:?}", tensor.shape()),
                    "a head dim of 1..=576".to_string(),
                ));
            }
        }

        // Queries.
        let (batch, queries, query_len) = match &attention.cu_seqlens_q {
            Some(cumulative) => {
                expect_rank("q", q.shape(), 3, "[total, Hq, D], because cu_seqlens_q is given")?;
                one_of("query rows", q.shape()[0], 0..MAX_LEN + 1)?;
                let entries = cumulative.shape().first().copied().unwrap_or(0);
                if entries == 0 {
                    return Err(Error::argument(
                        "cu_seqlens_q",
                        "empty",
                        "one entry more than there are sequences",
                    ));
                }
                let entries = int_vector("cu_seqlens_q", cumulative, entries, "one more than sequences")?;
                let longest = check_cumulative("cu_seqlens_q", entries, q.shape()[0])?;
                (entries.len() - 1, QueryStorage::Ragged { total: q.shape()[0] }, longest)
            }
            None => {
                expect_rank("q", q.shape(), 4, "[B, Lq, Hq, D] (or give cu_seqlens_q)")?;
                (q.shape()[0], QueryStorage::Batched, q.shape()[1])
            }
        };
        one_of("batch", batch, 0..MAX_LEN + 1)?;
        let &[query_heads, head_dim] = &q.shape()[q.rank() - 2..] else {
            unreachable!("q has 3 or 4 dimensions")
        };

        // Keys and values.
        if let (Some(table), Some(_)) = (&attention.block_table, &attention.cu_seqlens_k) {
            return Err(Error::argument(
                "cu_seqlens_k",
                format!("given together with a block table of shape {:?}", table.shape()),
                "one of the two: paged keys take their lengths from kv_lens",
            ));
        }
        let (keys, capacity) = match (&attention.block_table, &attention.cu_seqlens_k) {
            (Some(table), _) => {
                expect_rank("k", k.shape(), 4, "[blocks, block_size, Hkv, D], because block_table is given")?;
                expect_rank("block_table", table.shape(), 2, "[B, max_blocks]")?;
                expect_dtype("block_table", table.dtype(), &[DType::I32])?;
                expect_unit_stride("block_table", table.shape(), table.strides())?;
                expect_shape("block_table", &table.shape()[..1], &[batch], "one row a sequence")?;
                one_of("block_size", k.shape()[1], 1..MAX_LEN + 1)?;
                if attention.kv_lens.is_none() {
                    return Err(Error::argument(
                        "kv_lens",
                        "missing",
                        "[B] i32, because block_table is given",
                    ));
                }
                let capacity = table.shape()[1].saturating_mul(k.shape()[1]).min(MAX_LEN);
                (KvStorage::Paged { block_size: k.shape()[1] }, capacity)
            }
            (None, Some(cumulative)) => {
                expect_rank("k", k.shape(), 3, "[total, Hkv, D], because cu_seqlens_k is given")?;
                one_of("key rows", k.shape()[0], 0..MAX_LEN + 1)?;
                let entries = int_vector("cu_seqlens_k", cumulative, batch + 1, "one more than sequences")?;
                (KvStorage::Ragged, check_cumulative("cu_seqlens_k", entries, k.shape()[0])?)
            }
            (None, None) => {
                expect_rank("k", k.shape(), 4, "[B, Lk, Hkv, D] (or give cu_seqlens_k or block_table)")?;
                expect_shape("k", &k.shape()[..1], &[batch], "one entry a sequence, as q has")?;
                (KvStorage::Batched, k.shape()[1])
            }
        };
        expect_rank("v", v.shape(), k.rank(), "as k has")?;
        let last = k.rank() - 1;
        expect_shape("v", &v.shape()[..last], &k.shape()[..last], "as k has, but for the last")?;
        if k.shape()[last] != head_dim {
            return Err(Error::argument(
                "k",
                format!("of head dim {}", k.shape()[last]),
                format!("{head_dim}, as q has"),
            ));
        }
        let problem = Problem {
            batch,
            query_heads,
            kv_heads: k.shape()[last - 1],
            head_dim,
            value_dim: v.shape()[last],
            query_len,
            kv_len: capacity,
            queries,
            keys,
            dtype: q.dtype(),
            out_dtype,
            variant: attention.variant(),
            lse,
            batch_invariant: attention.batch_invariant,
        };
        problem.validate()?;
        self.check_variant(&problem)?;
        self.check_lengths(&problem)?;
        Ok(problem)
    }

    fn check_variant(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        if let Some(scale) = attention.scale
            && !scale.is_finite()
        {
            return Err(Error::argument("scale", scale, "a finite number"));
        }
        if let Some(cap) = attention.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::argument("softcap", cap, "a finite number above 0"));
        }
        for (name, tensor) in [("alibi_slopes", &attention.alibi_slopes), ("sinks", &attention.sinks)] {
            let Some(tensor) = tensor else { continue };
            expect_dtype(name, tensor.dtype(), &[DType::F32])?;
            expect_shape(name, tensor.shape(), &[problem.query_heads], "one a query head")?;
            expect_unit_stride(name, tensor.shape(), tensor.strides())?;
            let values = tensor.as_slice::<f32>().expect("a contiguous f32 vector");
            let sink = name == "sinks";
            if let Some(i) = values.iter().position(|x| !(x.is_finite() || (sink && *x == f32::NEG_INFINITY)))
            {
                let allowed = if sink { "a finite number or minus infinity" } else { "a finite number" };
                return Err(Error::argument(format!("{name}[{i}]"), values[i], allowed));
            }
        }
        if let Some(mask) = &attention.mask {
            expect_rank("mask", mask.shape(), 4, "[B, Hq, Lq, Lk], any of them 1")?;
            expect_unit_stride("mask", mask.shape(), mask.strides())?;
            let full = [problem.batch, problem.query_heads];
            for (i, name) in ["batch", "heads"].iter().enumerate() {
                if mask.shape()[i] != 1 && mask.shape()[i] != full[i] {
                    return Err(Error::argument(
                        "mask",
                        format!("of shape {:?}", mask.shape()),
                        format!("1 or {} in dimension {i} ({name})", full[i]),
                    ));
                }
            }
        }
        if let Some(tree) = &attention.tree_mask {
            expect_dtype("tree_mask", tree.dtype(), &[DType::I32])?;
            expect_unit_stride("tree_mask", tree.shape(), tree.strides())?;
            let words = problem.query_len.div_ceil(32);
            let expected = [problem.batch, problem.query_len, words];
            expect_shape("tree_mask", tree.shape(), &expected, "[B, Lq, ceil(Lq / 32)]")?;
        }
        Ok(())
    }

    /// What depends on the contents of the length and table tensors.
    fn check_lengths(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        if let Some(lens) = &attention.kv_lens {
            int_vector("kv_lens", lens, problem.batch, "one a sequence")?;
        }
        match &attention.q_offset {
            QueryOffset::BottomRight => {}
            QueryOffset::Same(offset) => {
                if i32::try_from(*offset).is_err() {
                    return Err(Error::argument("q_offset", offset, "-2^31..2^31"));
                }
            }
            QueryOffset::PerSequence(offsets) => {
                int_vector("q_offset", offsets, problem.batch, "one a sequence")?;
            }
        }
        let (mut longest_query, mut longest_kv) = (0, 0);
        for index in 0..problem.batch {
            // Lengths first: `sequence` trusts them.
            let capacity = match (&attention.cu_seqlens_k, problem.keys) {
                (Some(cumulative), _) => span(cumulative.as_slice().expect("checked above"), index).1,
                (None, _) => problem.kv_len,
            };
            if let Some(lens) = &attention.kv_lens {
                let len = lens.as_slice::<i32>().expect("checked above")[index];
                if len < 0 || len as usize > capacity {
                    return Err(Error::argument(
                        format!("kv_lens[{index}]"),
                        len,
                        format!("0..={capacity} (the keys that sequence can hold)"),
                    ));
                }
            }
            let sequence = self.sequence(index);
            longest_query = longest_query.max(sequence.q_len);
            longest_kv = longest_kv.max(sequence.kv_len);
            if let (Some(row), KvStorage::Paged { block_size }) = (self.block_row(index), problem.keys) {
                let visible =
                    problem.variant.visible_to_rows(sequence.q_offset, sequence.q_len, sequence.kv_len);
                if visible.is_empty() {
                    continue;
                }
                let blocks = self.k.shape()[0];
                let used = visible.start / block_size..visible.end.div_ceil(block_size);
                let outside = |&block: &i32| block < 0 || block as usize >= blocks;
                if let Some(i) = row[used.clone()].iter().position(outside) {
                    let i = used.start + i;
                    return Err(Error::argument(
                        format!("block_table[{index}, {i}]"),
                        row[i],
                        format!("0..{blocks}: keys {visible:?} of the sequence are visible"),
                    ));
                }
            }
        }
        if let Some(mask) = &attention.mask {
            for (i, (name, needed)) in [("rows", longest_query), ("keys", longest_kv)].into_iter().enumerate()
            {
                let found = mask.shape()[i + 2];
                if found != 1 && found < needed {
                    return Err(Error::argument(
                        "mask",
                        format!("of shape {:?}", mask.shape()),
                        format!("1, or at least {needed}, in dimension {} ({name})", i + 2),
                    ));
                }
            }
            if mask.is_empty() && longest_query > 0 && longest_kv > 0 && problem.batch > 0 {
                return Err(Error::argument(
                    "mask",
                    format!("of shape {:?}", mask.shape()),
                    "no empty dimension",
                ));
            }
        }
        Ok(())
    }
}

impl Outputs<'_> {
    fn check(&self, inputs: &Inputs, problem: &Problem) -> Result<(), Error> {
        let Inputs { q, k, v, attention } = inputs;
        let mut expected = [0; 4];
        expected[..q.rank()].copy_from_slice(q.shape());
        expected[q.rank() - 1] = problem.value_dim;
        expect_shape("out", self.out.shape(), &expected[..q.rank()], "as q, with v's head dim")?;
        expect_unit_stride("out", self.out.shape(), self.out.strides())?;
        if let Some(lse) = &self.lse {
            expect_dtype("lse", lse.dtype(), &[DType::F32])?;
            expect_shape(
                "lse",
                lse.shape(),
                &expected[..q.rank() - 1],
                "as out, without its last dimension",
            )?;
        }
        let offsets = match attention.q_offset {
            QueryOffset::PerSequence(offsets) => Some(offsets),
            _ => None,
        };
        let read = [
            ("q", Some(*q)),
            ("k", Some(*k)),
            ("v", Some(*v)),
            ("mask", attention.mask),
            ("alibi_slopes", attention.alibi_slopes),
            ("sinks", attention.sinks),
            ("tree_mask", attention.tree_mask),
            ("kv_lens", attention.kv_lens),
            ("cu_seqlens_q", attention.cu_seqlens_q),
            ("cu_seqlens_k", attention.cu_seqlens_k),
            ("block_table", attention.block_table),
            ("q_offset", offsets),
        ];
        let written = [("out", Some(&self.out)), ("lse", self.lse.as_ref())];
        let overlap = |a: Option<(usize, usize)>, b: Option<(usize, usize)>| match (a, b) {
            (Some(a), Some(b)) => a.0 < b.1 && b.0 < a.1,
            _ => false,
        };
        for (i, (name, tensor)) in written.iter().enumerate() {
            let Some(tensor) = tensor else { continue };
            if !tensor.is_injective() {
                return Err(Error::argument(
                    *name,
                    format!("a view of shape {:?} with strides {:?}", tensor.shape(), tensor.strides()),
                    "strides that give every element a place of its own",
                ));
            }
            let inputs = read.iter().filter_map(|(other, input)| Some((other, input.as_ref()?.byte_range())));
            let outputs = written[i + 1..]
                .iter()
                .filter_map(|(other, output)| Some((other, output.as_ref()?.byte_range())));
            for (other, range) in inputs.chain(outputs) {
                if overlap(tensor.byte_range(), range) {
                    return Err(Error::argument(
                        *name,
                        format!("memory shared with `{other}`"),
                        "memory of its own",
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Start and length of entry `index` of cumulative lengths.
fn span(cumulative: &[i32], index: usize) -> (usize, usize) {
    let (start, end) = (cumulative[index] as usize, cumulative[index + 1] as usize);
    (start, end - start)
}
