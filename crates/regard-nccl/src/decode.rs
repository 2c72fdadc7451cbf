//! Decode over keys that are spread over ranks.

use crate::device::Device;
use crate::rank::{Rank, terms};
use crate::transport::{Exchange, Span, Transport};
use crate::views::{InlineVec, expect_contiguous, expect_dtype, expect_lse, expect_shape, span_of};
use regard::{
    Attention, DType, Error, Inputs, Memory, Merge, Outputs, Plan, Problem, QueryOffset,
    QueryStorage, Tensor, TensorMut, Variant,
};

/// The queries that a rank has before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Queries {
    /// The queries of its own heads: a step begins by gathering them.
    Sharded,
    /// The queries of all heads.
    Replicated,
}

/// Operands of a step on one rank. `tokens` stands for `B, Lq`, or for `total` if sequences are
/// ragged. Rank r has query heads `r * Hq / ranks..(r + 1) * Hq / ranks`.
///
/// Heads are the outermost dimension of the exchanged tensors. So the part of a rank is in one
/// piece, and nothing is repacked. For one token per step this is also the order of a projection.
#[derive(Debug)]
pub struct DecodeStep<'a, M: Memory> {
    /// With [`Queries::Sharded`] the queries of the own heads, contiguous `[Hq / ranks, tokens,
    /// Dk]`. With [`Queries::Replicated`] all of them, as [`Inputs::q`].
    pub q: Tensor<'a, M>,
    /// The keys of this rank, as [`Inputs::k`].
    pub k: Tensor<'a, M>,
    /// Their values, as [`Inputs::v`].
    pub v: Tensor<'a, M>,
    /// Everything else. It is the same on every rank, except the parts that describe the keys of
    /// the rank (lengths, tables, scales, `key_positions`). Sinks are given on every rank and count
    /// once. If results depend on positions, `q_offset` is given, with
    /// [`Shard::key_positions`](regard::Shard::key_positions).
    pub attention: Attention<Tensor<'a, M>>,
    /// The result of the own heads over the keys of all ranks: contiguous `[Hq / ranks, tokens,
    /// Dv]`.
    pub out: TensorMut<'a, M>,
    /// Its log-sum-exp: contiguous `f32` `[Hq / ranks, tokens]`.
    pub lse: Option<TensorMut<'a, M>>,
}

/// Decode (or the verification of a few draft tokens) over keys that are spread over ranks.
///
/// A step gathers the queries, attends to the keys of the rank, exchanges partial outputs and
/// log-sum-exps by heads, and merges them. All of it is queued on the device's compute queue,
/// nothing is allocated, and a CUDA graph can capture it.
#[derive(Debug)]
pub struct ShardedDecode<D: Device> {
    plan: Plan,
    problem: Problem,
    queries: Queries,
    ranks: usize,
    rank: usize,
    buffers: Buffers<D::Buffer>,
    workspace: D::Workspace,
}

/// Device memory of a step, heads outermost.
#[derive(Debug)]
struct Buffers<B> {
    queries: Option<B>,
    partial: B,
    partial_lse: B,
    received: B,
    received_lse: B,
}

impl<D: Device> ShardedDecode<D> {
    /// Plans and allocates. `problem` is the problem of one rank: all query heads and tokens over
    /// at most `kv_len` keys of a shard. Lengths are upper bounds, `kv_len` may differ from rank to
    /// rank. `out_dtype` and `lse` describe the merged result; partial outputs are `f32`.
    ///
    /// Ranks exchange a description of their problems, so all of them have to call this.
    ///
    /// # Errors
    /// As [`Plan::new`]; if query heads do not divide among the ranks; if ranks differ in anything
    /// but `kv_len` and `keys`: the error names it. If a rank does not answer.
    pub fn new<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
        queries: Queries,
    ) -> Result<ShardedDecode<D>, Error> {
        let (device, ranks) = (&rank.device, rank.transport.size());
        let mut described = terms("sharded decode", problem);
        described.push(("queries", format!("{queries:?}")));
        rank.agree(&described)?;
        problem.validate()?;
        if !problem.query_heads.is_multiple_of(ranks) {
            let allowed = format!("a multiple of {ranks}, the number of ranks");
            return Err(Error::argument("query_heads", problem.query_heads, allowed));
        }
        if problem.variant.tree && ranks > 1 {
            let allowed = "not given: the new tokens of a tree are on one rank";
            return Err(Error::argument("tree_mask", "given", allowed));
        }
        let sinks = problem.variant.sinks && rank.transport.rank() == 0;
        let planned = Problem {
            out_dtype: DType::F32,
            lse: true,
            variant: Variant { sinks, ..problem.variant },
            ..problem.clone()
        };
        let plan = Plan::new(&planned, device.machine())?;
        device.load(&plan)?;
        let rows = problem.rows();
        let bytes = |per_row: usize| rows.saturating_mul(per_row);
        let query_bytes = bytes(problem.head_dim * problem.dtype.size());
        let value_bytes = bytes(problem.value_dim * size_of::<f32>());
        let gathered = (queries == Queries::Sharded).then(|| device.allocate(query_bytes));
        let buffers = Buffers {
            queries: gathered.transpose()?,
            partial: device.allocate(value_bytes)?,
            partial_lse: device.allocate(bytes(size_of::<f32>()))?,
            received: device.allocate(value_bytes)?,
            received_lse: device.allocate(bytes(size_of::<f32>()))?,
        };
        Ok(ShardedDecode {
            workspace: device.workspace(plan.workspace_bytes())?,
            plan,
            problem: problem.clone(),
            queries,
            ranks,
            rank: rank.transport.rank(),
            buffers,
        })
    }

    /// The plan of the rank's own part.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Queues a step. Operands may be smaller than planned, as with [`Plan::run`]; all ranks have
    /// the same tokens.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan; before anything is queued, if shapes,
    /// types or strides tell. If the driver or the transport fails.
    ///
    /// # Safety
    /// Until the step is done, nothing writes its inputs and nothing uses its outputs. On a GPU,
    /// operands are ready on the device's compute queue.
    pub unsafe fn run<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        step: DecodeStep<D::Memory>,
    ) -> Result<(), Error> {
        let layout = self.layout(&step)?;
        let DecodeStep { q, k, v, mut attention, out, lse } = step;
        if self.rank > 0 {
            attention.sinks = None;
        }
        let device = &rank.device;
        let q = match &mut self.buffers.queries {
            None => q,
            Some(gathered) => {
                let address = device.address(gathered);
                let row_bytes = self.problem.head_dim * self.problem.dtype.size();
                let all = Span { address, bytes: layout.rows * row_bytes };
                // SAFETY: `q` is contiguous and is one rank's part of the queries that `all` has
                // room for; only this step uses the buffer.
                unsafe { rank.transport.all_gather(device.compute(), span_of::<D>(&q), all)? };
                let (shape, strides) = layout.attention(Some(self.problem.head_dim));
                // SAFETY: the buffer has room for all rows, and is written before the run reads it.
                unsafe { D::tensor(address, self.problem.dtype, &shape, Some(&strides))? }
            }
        };
        let partial = device.address(&mut self.buffers.partial);
        let partial_lse = device.address(&mut self.buffers.partial_lse);
        let (shape, strides) = layout.attention(Some(self.problem.value_dim));
        let (lse_shape, lse_strides) = layout.attention(None);
        // SAFETY: the buffers have room for all rows, and only this step uses them.
        let mut outputs = unsafe {
            let lse = D::tensor_mut(partial_lse, DType::F32, &lse_shape, Some(&lse_strides))?;
            Outputs {
                out: D::tensor_mut(partial, DType::F32, &shape, Some(&strides))?,
                lse: Some(lse),
            }
        };
        let inputs = Inputs::new(q, k, v, attention);
        // SAFETY: the caller's promise, and buffers are of this step alone.
        unsafe { device.run(&self.plan, &inputs, &mut outputs, &mut self.workspace)? };
        // SAFETY: as above.
        unsafe { self.merge(rank, &layout, out, lse) }
    }

    /// Exchanges partial results by heads, and merges them.
    ///
    /// # Safety
    /// As [`ShardedDecode::run`].
    unsafe fn merge<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        layout: &Layout,
        out: TensorMut<D::Memory>,
        lse: Option<TensorMut<D::Memory>>,
    ) -> Result<(), Error> {
        let device = &rank.device;
        let Buffers { partial, partial_lse, received, received_lse, .. } = &mut self.buffers;
        let float = size_of::<f32>();
        let exchange = |from, to, bytes| Exchange {
            from: Span { address: from, bytes },
            to: Span { address: to, bytes },
        };
        let (received, received_lse) = (device.address(received), device.address(received_lse));
        let value_dim = self.problem.value_dim;
        let exchanges = [
            exchange(device.address(partial), received, layout.rows * value_dim * float),
            exchange(device.address(partial_lse), received_lse, layout.rows * float),
        ];
        // SAFETY: the buffers have room for all rows, which divide among the ranks, and only this
        // step uses them.
        unsafe { rank.transport.all_to_all(device.compute(), &exchanges)? };
        let heads = layout.heads / self.ranks;
        let parts = |dim| -> InlineVec<usize> {
            [self.ranks].into_iter().chain(layout.exchanged(heads, dim).iter().copied()).collect()
        };
        // SAFETY: the exchange has written all of both buffers when the merge runs.
        let mut merge = unsafe {
            Merge {
                parts: D::tensor(received, DType::F32, &parts(Some(value_dim)), None)?,
                part_lse: D::tensor(received_lse, DType::F32, &parts(None), None)?,
                out,
                lse,
            }
        };
        // SAFETY: the caller's promise.
        unsafe { device.merge(&mut merge) }
    }

    /// The rows of a step, after checking the tensors that the ranks exchange.
    fn layout(&self, step: &DecodeStep<D::Memory>) -> Result<Layout, Error> {
        let Problem { query_heads, head_dim, value_dim, .. } = self.problem;
        let ragged = matches!(self.problem.queries, QueryStorage::Ragged { .. });
        let rank = if ragged { 3 } else { 4 };
        let heads = query_heads / self.ranks;
        if step.q.rank() != rank {
            let found = format!("of shape {:?}", step.q.shape());
            return Err(Error::argument("q", found, format!("of {rank} dimensions")));
        }
        expect_dtype("q", &step.q, self.problem.dtype)?;
        let layout = match self.queries {
            Queries::Replicated => Layout::new(&step.q.shape()[..rank - 2], query_heads),
            Queries::Sharded => Layout::new(&step.q.shape()[1..rank - 1], query_heads),
        };
        if self.queries == Queries::Sharded {
            expect_shape("q", &step.q, &layout.exchanged(heads, Some(head_dim)))?;
            expect_contiguous("q", &step.q)?;
        }
        let (tokens, planned) = (layout.rows / query_heads, self.problem.rows() / query_heads);
        if tokens > planned {
            let found = format!("of {tokens} tokens");
            return Err(Error::argument("q", found, format!("at most {planned}, as planned")));
        }
        expect_dtype("out", &step.out, self.problem.out_dtype)?;
        expect_shape("out", &step.out, &layout.exchanged(heads, Some(value_dim)))?;
        expect_contiguous("out", &step.out)?;
        expect_lse(self.problem.lse, step.lse.as_deref())?;
        if let Some(lse) = &step.lse {
            expect_shape("lse", lse, &layout.exchanged(heads, None))?;
            expect_contiguous("lse", lse)?;
        }
        self.expect_offset(&step.attention)?;
        Ok(layout)
    }

    /// On a shard, "the new tokens are the last ones" is not known from the shard's own length.
    fn expect_offset(&self, attention: &Attention<Tensor<D::Memory>>) -> Result<(), Error> {
        let Variant { causal, window, chunk, alibi, .. } = self.problem.variant;
        let one_row = self.problem.query_len <= 1 && window.right.is_none();
        let positions = (causal && !one_row)
            || window.left.is_some()
            || window.right.is_some()
            || chunk.is_some()
            || alibi;
        if positions && self.ranks > 1 && matches!(attention.q_offset, QueryOffset::BottomRight) {
            let allowed = "given: with causal attention of several rows, windows, chunks or ALiBi, \
                           a shard does not know the positions of queries";
            return Err(Error::argument("q_offset", "not given", allowed));
        }
        Ok(())
    }
}

/// The rows of a step, of all heads: heads are outermost in memory.
struct Layout {
    /// `[B, Lq]` or `[total]`.
    tokens: InlineVec<usize>,
    heads: usize,
    rows: usize,
}

impl Layout {
    fn new(tokens: &[usize], heads: usize) -> Layout {
        let rows = tokens.iter().fold(heads, |rows, &n| rows.saturating_mul(n));
        Layout { tokens: tokens.iter().copied().collect(), heads, rows }
    }

    /// `[heads, tokens]`, and `dim` if there is one, in the order of memory.
    fn exchanged(&self, heads: usize, dim: Option<usize>) -> InlineVec<usize> {
        [heads].into_iter().chain(self.tokens.iter().copied()).chain(dim).collect()
    }

    /// Shape and strides of `[tokens, heads]`, and `dim` if there is one, as regard has it.
    fn attention(&self, dim: Option<usize>) -> (InlineVec<usize>, InlineVec<i64>) {
        let shape = self.tokens.iter().copied().chain([self.heads]).chain(dim);
        let row = dim.unwrap_or(1);
        let head_stride = (self.rows / self.heads * row) as i64;
        let token_stride = |i: usize| (self.tokens[i + 1..].iter().product::<usize>() * row) as i64;
        let strides = (0..self.tokens.len()).map(token_stride).chain([head_stride]);
        (shape.collect(), strides.chain(dim.map(|_| 1)).collect())
    }
}
