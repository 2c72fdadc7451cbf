//! Context-parallel prefill: keys and values pass around a ring of ranks.

mod schedule;

use crate::device::Device;
use crate::rank::{Rank, terms};
use crate::sharding::BalancedRows;
use crate::transport::{Message, Span, Transport};
use crate::views::{expect_contiguous, expect_dtype, expect_lse, expect_shape, narrow, span_of};
use regard::{
    Attention, DType, Error, Inputs, KeyLayout, KeyOffset, KeyPositions, KvStorage, Memory, Merge,
    Outputs, Plan, Problem, QueryOffset, QueryStorage, Tensor, TensorMut, Values, Variant,
};
use schedule::{Call, Positions, Step, schedule};

/// Operands of a prefill on one rank. `rows` are those of [`BalancedRows`]: the early
/// chunk, then the late one.
#[derive(Debug)]
pub struct RingStep<'a, M: Memory> {
    /// `[B, rows, Hq, Dk]`.
    pub q: Tensor<'a, M>,
    /// Contiguous `[B, rows, Hkv, Dk]`.
    pub k: Tensor<'a, M>,
    /// Contiguous `[B, rows, Hkv, Dv]`.
    pub v: Tensor<'a, M>,
    /// `scale`, `causal`, `window`, `chunk`, `softcap`, `alibi_slopes` and `sinks`, the same on
    /// every rank.
    pub attention: Attention<Tensor<'a, M>>,
    /// Contiguous `[B, rows, Hq, Dv]`.
    pub out: TensorMut<'a, M>,
    /// Contiguous `f32` `[B, rows, Hq]`.
    pub lse: Option<TensorMut<'a, M>>,
}

/// Prefill of sequences whose rows are spread over ranks, each with an early and a late chunk.
///
/// In step s a rank attends to the keys of rank `rank - s`, while it passes them on to the next
/// rank and receives those of the step after. Parts of the result are merged by their log-sum-exp
/// at the end.
///
/// Parts are of the queries' type. They take [`RingPrefill::parts`] times the memory of `out`: the
/// number of ranks, with ALiBi, a window or chunked attention twice that at most. Keys and values take two buffers of
/// a rank's share.
#[derive(Debug)]
pub struct RingPrefill<D: Device> {
    problem: Problem,
    rows: BalancedRows,
    ranks: usize,
    rank: usize,
    steps: Vec<Step>,
    /// Steps that any rank computes in; the ring stops behind them.
    step_count: usize,
    plans: Vec<Plan>,
    /// Which plan each call of each step runs, in order.
    plan_of_call: Vec<Vec<usize>>,
    parts: usize,
    buffers: Buffers<D::Buffer>,
    workspace: D::Workspace,
}

#[derive(Debug)]
struct Buffers<B> {
    /// Keys and values of the other ranks, in turns.
    keys: [B; 2],
    values: [B; 2],
    /// Outputs of the parts and their log-sum-exps, `[parts, B, rows, Hq, Dv]`. A part that does
    /// not exist for a row has a log-sum-exp of minus infinity.
    parts: B,
    part_lse: B,
}

impl<B> Buffers<B> {
    /// Buffers for so many steps of the ring, and so many rows of all parts together.
    fn new<D: Device<Buffer = B>>(
        device: &D,
        problem: &Problem,
        rows: BalancedRows,
        (step_count, part_rows): (usize, usize),
    ) -> Result<Buffers<B>, Error> {
        let most_rows = (0..rows.ranks).map(|rank| rows.count(rank)).max().unwrap_or(0);
        let size = problem.dtype.size();
        let key_rows = problem.batch.saturating_mul(most_rows).saturating_mul(problem.kv_heads);
        // The keys of the first step are the caller's.
        let buffer = |turn: usize, dim: usize| {
            let needed = turn + 1 < step_count;
            device.allocate(if needed { key_rows.saturating_mul(dim * size) } else { 0 })
        };
        let mut part_lse = device.allocate(part_rows * size_of::<f32>())?;
        device.write(&mut part_lse, &f32::NEG_INFINITY.to_ne_bytes().repeat(part_rows))?;
        Ok(Buffers {
            keys: [buffer(0, problem.head_dim)?, buffer(1, problem.head_dim)?],
            values: [buffer(0, problem.value_dim)?, buffer(1, problem.value_dim)?],
            parts: device.allocate(part_rows * problem.value_dim * size)?,
            part_lse,
        })
    }
}

impl<D: Device> RingPrefill<D> {
    /// Plans and allocates. `problem` is that of the whole sequences, as one device would have it:
    /// `query_len` and `kv_len` are all rows, of `batch` sequences of that length.
    ///
    /// Ranks exchange a description of their problems, so all of them have to call this.
    ///
    /// # Errors
    /// As [`Plan::new`]; if the problem has a feature that the ring does not pass around (pages,
    /// ragged batches, masks, trees, lists of keys, codes with scales); if ranks
    /// differ: the error names the argument. If a rank does not answer.
    pub fn new<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
    ) -> Result<RingPrefill<D>, Error> {
        let (device, ranks) = (&rank.device, rank.transport.size());
        let number = rank.transport.rank();
        let mut described = terms("ring prefill", problem);
        described.push(("kv_len", problem.kv_len.to_string()));
        described.push(("keys", format!("{:?}", problem.keys)));
        rank.agree(&described)?;
        problem.validate()?;
        expect_supported(problem)?;
        let rows = BalancedRows { len: problem.query_len, ranks };
        let of_rank = |rank| schedule(rows, rank, &problem.variant);
        let steps = of_rank(number);
        let end = |steps: &[Step]| {
            steps.iter().rposition(|step| !step.calls.is_empty()).map_or(0, |last| last + 1)
        };
        let step_count = (0..ranks).map(|rank| end(&of_rank(rank))).max().unwrap_or(0);
        let parts = steps.iter().flat_map(|step| &step.calls).map(|call| call.part + 1).max();
        let parts = parts.unwrap_or(1);
        let own_rows = rows.count(number);
        let direct = is_direct(&steps, own_rows, step_count);
        let (plans, plan_of_call) = plans(problem, &steps, direct, device)?;
        let workspace = plans.iter().map(Plan::workspace_bytes).max().unwrap_or(0);
        let part_rows = match direct {
            true => 0,
            false => parts * problem.batch * own_rows * problem.query_heads,
        };
        Ok(RingPrefill {
            buffers: Buffers::new(device, problem, rows, (step_count, part_rows))?,
            workspace: device.workspace(workspace)?,
            problem: problem.clone(),
            rows,
            ranks,
            rank: number,
            steps,
            step_count,
            plans,
            plan_of_call,
            parts,
        })
    }

    /// Partial results of a row, at most.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Queues a prefill.
    ///
    /// # Errors
    /// If an operand breaks the contract or differs from what was planned; before anything is
    /// queued, if shapes, types or strides tell. If the driver or the transport fails.
    ///
    /// # Safety
    /// Until the work is done, nothing writes what it reads and nothing uses what it writes. On a
    /// GPU, operands are ready on the device's compute queue.
    pub unsafe fn run<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        step: RingStep<D::Memory>,
    ) -> Result<(), Error> {
        self.expect_operands(&step)?;
        let device = &rank.device;
        let RingStep { q, k, v, attention, out, lse } = step;
        let mut next = (span_of::<D>(&k), span_of::<D>(&v));
        if self.is_direct() {
            let inputs = self.inputs((0, 0), next, &q, &attention)?;
            let mut outputs = Outputs { out, lse };
            // SAFETY: the caller's promise; the workspace is of this run alone.
            return unsafe {
                device.run(&self.plans[0], &inputs, &mut outputs, &mut self.workspace)
            };
        }
        for number in 0..self.step_count {
            if number > 0 {
                // The keys of this step have arrived.
                device.compute_follows_transfers()?;
            }
            let here = next;
            if number + 1 < self.step_count {
                // The step that read the buffer before has ended. The exchange is queued ahead of
                // the kernels that it overlaps with, so that it finds free multiprocessors.
                device.transfers_follow_compute()?;
                // SAFETY: the queues have just been ordered; the spans are keys and values of a
                // rank.
                next = unsafe { self.pass_on(rank, number, here)? };
            }
            for call in 0..self.steps[number].calls.len() {
                let inputs = self.inputs((number, call), here, &q, &attention)?;
                // SAFETY: the caller's promise, and buffers are of this run alone.
                unsafe { self.attend(device, (number, call), &inputs)? };
            }
        }
        // SAFETY: as above.
        unsafe { self.merge(device, out, lse) }
    }

    /// Whether one call computes the result of the rank.
    fn is_direct(&self) -> bool {
        is_direct(&self.steps, self.rows.count(self.rank), self.step_count)
    }

    /// Sends keys and values to the next rank, and receives those of the step after this one: where
    /// they are then.
    ///
    /// # Safety
    /// The spans hold the keys and values of this step, and no kernel of an earlier step still
    /// reads a buffer.
    unsafe fn pass_on<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        number: usize,
        (keys, values): (Span, Span),
    ) -> Result<(Span, Span), Error> {
        let (device, ranks) = (&rank.device, self.ranks);
        let source = self.steps[number + 1].source;
        let tokens = self.problem.batch * self.rows.count(source) * self.problem.kv_heads;
        let size = self.problem.dtype.size();
        let buffer = |buffer: &mut D::Buffer, dim: usize| Span {
            address: device.address(buffer),
            bytes: tokens * dim * size,
        };
        let received_keys = buffer(&mut self.buffers.keys[number % 2], self.problem.head_dim);
        let received_values = buffer(&mut self.buffers.values[number % 2], self.problem.value_dim);
        let to_next = |span| Message { peer: (self.rank + 1) % ranks, span };
        let from_previous = |span| Message { peer: (self.rank + ranks - 1) % ranks, span };
        let sends = [to_next(keys), to_next(values)];
        let receives = [from_previous(received_keys), from_previous(received_values)];
        // SAFETY: the caller's promise; buffers have room for the share of any rank.
        unsafe { rank.transport.exchange(device.transfers(), &sends, &receives)? };
        Ok((received_keys, received_values))
    }

    /// The inputs of a call, whose keys and values are in these spans.
    fn inputs<'a>(
        &self,
        (number, call): (usize, usize),
        (keys, values): (Span, Span),
        q: &Tensor<'a, D::Memory>,
        attention: &Attention<Tensor<'a, D::Memory>>,
    ) -> Result<Inputs<'a, D::Memory>, Error> {
        let Step { source, calls } = &self.steps[number];
        let call = &calls[call];
        let Problem { batch, kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let shape = |dim| [batch, self.rows.count(*source), kv_heads, dim];
        // SAFETY: the spans hold that many elements, of the caller or of a buffer.
        let (k, v) = unsafe {
            (
                D::tensor(keys.address, dtype, &shape(head_dim), None)?,
                D::tensor(values.address, dtype, &shape(value_dim), None)?,
            )
        };
        let (q_offset, key_positions) = match call.positions {
            None => (QueryOffset::BottomRight, None),
            Some(Positions { row, key }) => {
                let positions = KeyPositions { offset: KeyOffset::Same(key), stride: 1 };
                (QueryOffset::Same(row), Some(positions))
            }
        };
        Ok(Inputs::new(
            narrow::<D>(q, 1, &call.rows)?,
            narrow::<D>(&k, 1, &call.keys)?,
            narrow::<D>(&v, 1, &call.keys)?,
            Attention {
                causal: call.causal,
                q_offset,
                key_positions,
                sinks: attention.sinks.filter(|_| call.sinks),
                ..*attention
            },
        ))
    }

    /// Queues a call, into its part.
    ///
    /// # Safety
    /// The inputs are ready on the compute queue, and this run alone uses the buffers.
    unsafe fn attend(
        &mut self,
        device: &D,
        (number, call): (usize, usize),
        inputs: &Inputs<D::Memory>,
    ) -> Result<(), Error> {
        let plan = &self.plans[self.plan_of_call[number][call]];
        let call = &self.steps[number].calls[call];
        let Problem { batch, query_heads, value_dim, dtype, .. } = self.problem;
        let rows = self.rows.count(self.rank);
        let heads_of = |row: usize| row * query_heads;
        let first = call.part * batch * rows + call.rows.start;
        let (out_at, lse_at) = (heads_of(first) * value_dim * dtype.size(), heads_of(first) * 4);
        let shape = [batch, call.rows.len(), query_heads, value_dim];
        let strides = [heads_of(rows) * value_dim, query_heads * value_dim, value_dim, 1];
        let lse_strides = [heads_of(rows) as i64, query_heads as i64, 1];
        let out = device.address(&mut self.buffers.parts) + out_at as u64;
        let lse = device.address(&mut self.buffers.part_lse) + lse_at as u64;
        // SAFETY: the rows are those of a part that the buffers have room for.
        let mut outputs = unsafe {
            let lse = D::tensor_mut(lse, DType::F32, &shape[..3], Some(&lse_strides))?;
            Outputs {
                out: D::tensor_mut(out, dtype, &shape, Some(&strides.map(|n| n as i64)))?,
                lse: Some(lse),
            }
        };
        // SAFETY: the caller's promise.
        unsafe { device.run(plan, inputs, &mut outputs, &mut self.workspace) }
    }

    /// Queues the merge of all parts.
    ///
    /// # Safety
    /// As [`RingPrefill::attend`]; `out` and `lse` are not used until the merge is done.
    unsafe fn merge(
        &mut self,
        device: &D,
        out: TensorMut<D::Memory>,
        lse: Option<TensorMut<D::Memory>>,
    ) -> Result<(), Error> {
        let Problem { batch, query_heads, value_dim, dtype, .. } = self.problem;
        let shape = [self.parts, batch, self.rows.count(self.rank), query_heads, value_dim];
        let (parts, part_lse) = (&mut self.buffers.parts, &mut self.buffers.part_lse);
        // SAFETY: every row of a part has been written, or its log-sum-exp is minus infinity.
        let mut merge = unsafe {
            Merge {
                parts: D::tensor(device.address(parts), dtype, &shape, None)?,
                part_lse: D::tensor(device.address(part_lse), DType::F32, &shape[..4], None)?,
                out,
                lse,
            }
        };
        // SAFETY: the caller's promise.
        unsafe { device.merge(&mut merge) }
    }

    /// Checks shapes and types, and that the attention is the planned one.
    fn expect_operands(&self, step: &RingStep<D::Memory>) -> Result<(), Error> {
        let Problem { batch, query_heads, kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let rows = self.rows.count(self.rank);
        for (name, tensor, shape) in [
            ("q", &step.q, [batch, rows, query_heads, head_dim]),
            ("k", &step.k, [batch, rows, kv_heads, head_dim]),
            ("v", &step.v, [batch, rows, kv_heads, value_dim]),
        ] {
            expect_dtype(name, tensor, dtype)?;
            expect_shape(name, tensor, &shape)?;
        }
        expect_contiguous("k", &step.k)?;
        expect_contiguous("v", &step.v)?;
        expect_dtype("out", &step.out, self.problem.out_dtype)?;
        expect_shape("out", &step.out, &[batch, rows, query_heads, value_dim])?;
        expect_contiguous("out", &step.out)?;
        expect_lse(self.problem.lse, step.lse.as_deref())?;
        if let Some(lse) = &step.lse {
            expect_shape("lse", lse, &[batch, rows, query_heads])?;
            expect_contiguous("lse", lse)?;
        }
        let passed = |name: &str| ["alibi_slopes", "sinks"].contains(&name);
        if let Some((name, _)) = step.attention.named().find(|(name, _)| !passed(name)) {
            return Err(Error::argument(name, "given", "not given: the ring has no such feature"));
        }
        if !matches!(step.attention.q_offset, QueryOffset::BottomRight | QueryOffset::Same(0)) {
            return Err(Error::argument("q_offset", "given", "0: the ring has all rows and keys"));
        }
        let found = step.attention.variant();
        if found != self.problem.variant {
            let allowed = format!("{:?}, as planned", self.problem.variant);
            return Err(Error::argument("attention", format!("{found:?}"), allowed));
        }
        Ok(())
    }
}

/// Whether one call computes all rows, and no keys pass around.
fn is_direct(steps: &[Step], rows: usize, step_count: usize) -> bool {
    let only = |calls: &[Call]| matches!(calls, [call] if call.rows == (0..rows));
    step_count == 1 && only(&steps[0].calls)
}

/// The plans of all calls, each once, and which of them each call runs.
fn plans<D: Device>(
    problem: &Problem,
    steps: &[Step],
    direct: bool,
    device: &D,
) -> Result<(Vec<Plan>, Vec<Vec<usize>>), Error> {
    let mut plans: Vec<Plan> = Vec::new();
    let mut plan = |call: &Call| -> Result<usize, Error> {
        let variant = Variant {
            causal: call.causal,
            sinks: call.sinks && problem.variant.sinks,
            key_positions: call.positions.map(|_| KeyLayout::Contiguous),
            ..problem.variant
        };
        let planned = Problem {
            query_len: call.rows.len(),
            kv_len: call.keys.len(),
            out_dtype: if direct { problem.out_dtype } else { problem.dtype },
            lse: problem.lse || !direct,
            variant,
            ..problem.clone()
        };
        if let Some(found) = plans.iter().position(|plan| *plan.problem() == planned) {
            return Ok(found);
        }
        let plan = Plan::new(&planned, device.machine())?;
        device.load(&plan)?;
        plans.push(plan);
        Ok(plans.len() - 1)
    };
    let of_calls = steps.iter().map(|step| step.calls.iter().map(&mut plan).collect());
    let of_calls = of_calls.collect::<Result<_, Error>>()?;
    Ok((plans, of_calls))
}

/// The features that the ring passes around.
fn expect_supported(problem: &Problem) -> Result<(), Error> {
    let refuse = |argument: &str, found: String, allowed: &str| {
        Err(Error::argument(argument, found, format!("{allowed}, in ring prefill")))
    };
    if problem.queries != QueryStorage::Batched {
        return refuse("queries", format!("{:?}", problem.queries), "sequences of one length");
    }
    if problem.keys != KvStorage::Batched {
        return refuse("keys", format!("{:?}", problem.keys), "sequences of one length");
    }
    if problem.query_len != problem.kv_len {
        let found = format!("{} with {} keys", problem.query_len, problem.kv_len);
        return refuse("query_len", found, "as many queries as keys");
    }
    if problem.values != Values::Separate {
        return refuse("values", format!("{:?}", problem.values), "a tensor of their own");
    }
    for (name, dtype) in [("key_dtype", problem.key_dtype), ("value_dtype", problem.value_dtype)] {
        if dtype != problem.dtype {
            return refuse(name, dtype.to_string(), "the type of queries");
        }
    }
    let Variant { mask, tree, key_positions, .. } = problem.variant;
    let features = [
        ("mask", mask.is_some()),
        ("tree_mask", tree),
        ("key_positions", key_positions.is_some()),
        ("key_indices", problem.key_lists.is_some()),
    ];
    match features.into_iter().find(|(_, given)| *given) {
        Some((name, _)) => refuse(name, "given".into(), "not given"),
        None => Ok(()),
    }
}
