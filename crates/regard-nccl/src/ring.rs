//! Context-parallel prefill: keys and values pass around a ring of ranks.

mod check;
mod layout;
mod plans;
mod schedule;

use crate::device::Device;
use crate::rank::{Rank, terms};
use crate::sharding::RingSequence;
use crate::transport::{Message, Span, Transport};
use crate::views::{InlineVec, narrow, span_of};
use check::{describe, expect_sequences, expect_supported};
use layout::table_ranges;
use plans::Planned;
use regard::{
    Attention, DType, Error, Inputs, KeyOffset, KeyPositions, Memory, Merge, Outputs, Plan,
    Problem, QueryOffset, QueryStorage, Tensor, TensorMut,
};
use schedule::Ring;

/// Operands of a prefill on one rank. [`RingSequence::rows`] and [`RingSequence::keys`] give its
/// rows and keys.
///
/// In a batch, each entry has its early rows, then its late rows. Its keys are its share of the
/// prefix, then the keys of the early rows, then the keys of the late rows. Ragged tensors have the
/// early rows of all sequences, then the late rows of all. Their keys are the share of the prefix
/// and the early keys of each sequence, then the late keys of all. Without prefixes, queries and
/// keys are in one order.
#[derive(Debug)]
pub struct RingStep<'a, M: Memory> {
    /// `[B, rows, Hq, Dk]`, or `[rows, Hq, Dk]` of ragged sequences.
    pub q: Tensor<'a, M>,
    /// Contiguous `[B, keys, Hkv, Dk]`, or `[keys, Hkv, Dk]`.
    pub k: Tensor<'a, M>,
    /// Contiguous `[B, keys, Hkv, Dv]`, or `[keys, Hkv, Dv]`.
    pub v: Tensor<'a, M>,
    /// `scale`, `causal`, `window`, `chunk`, `softcap`, `alibi_slopes` and `sinks`, the same on
    /// every rank. Lengths and positions are planned: `q_offset` is the planned one, or not given.
    pub attention: Attention<Tensor<'a, M>>,
    /// Contiguous `[B, rows, Hq, Dv]`, or `[rows, Hq, Dv]`.
    pub out: TensorMut<'a, M>,
    /// Contiguous `f32` `[B, rows, Hq]`, or `[rows, Hq]`.
    pub lse: Option<TensorMut<'a, M>>,
}

/// Prefill of sequences whose rows are spread over ranks, each with an early and a late chunk, and
/// with a share of the keys of a cached prefix.
///
/// In step s a rank attends to the keys of rank `rank - s`, while it passes them on to the next
/// rank and receives the keys of the next step. Parts of the result are merged by their log-sum-exp
/// at the end.
///
/// Lengths and positions are known when a prefill is planned. [`RingPrefill::set_sequences`] plans
/// for others, in the same memory if they fit.
///
/// Parts are of the queries' type. They take at most [`RingPrefill::parts`] times the memory of
/// `out`. The number of parts is the number of ranks. It is up to twice the number for ragged
/// sequences, and with ALiBi, a window, chunked attention, or rows at an offset; up to three times
/// the number with one of these four and a prefix. Keys and values take two buffers of a rank's
/// share.
#[derive(Debug)]
pub struct RingPrefill<D: Device> {
    problem: Problem,
    ring: Ring,
    rank: usize,
    planned: Planned,
    buffers: Buffers<D::Buffer, D::Workspace>,
}

/// Memory of a device, and its size.
#[derive(Debug)]
struct Reserved<B> {
    buffer: B,
    bytes: usize,
}

impl<B> Reserved<B> {
    fn empty(buffer: B) -> Reserved<B> {
        Reserved { buffer, bytes: 0 }
    }

    /// Replaces the memory if it is smaller than `bytes`.
    fn reserve(
        &mut self,
        bytes: usize,
        allocate: impl FnOnce(usize) -> Result<B, Error>,
    ) -> Result<(), Error> {
        if bytes > self.bytes {
            *self = Reserved { buffer: allocate(bytes)?, bytes };
        }
        Ok(())
    }
}

/// Memory for keys and values of other ranks, in two turns: keys, then values. It is the
/// transport's, or else the device's.
#[derive(Debug)]
struct Incoming<B> {
    inbox: Option<Span>,
    own: Reserved<B>,
    /// Bytes of the keys, and of the values, of a turn.
    key_bytes: usize,
    value_bytes: usize,
}

impl<B> Incoming<B> {
    /// Makes room for shares of any rank.
    fn prepare<D: Device<Buffer = B>, T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        problem: &Problem,
        ring: &Ring,
        planned: &Planned,
    ) -> Result<(), Error> {
        const ALIGNMENT: usize = 256;
        let most_keys = (0..ring.ranks).map(|rank| ring.key_count(rank)).max().unwrap_or(0);
        let rows = most_keys.saturating_mul(ring.entries.unwrap_or(1));
        let bytes = |dim: usize| {
            let row_bytes = problem.kv_heads.saturating_mul(dim * problem.dtype.size());
            rows.saturating_mul(row_bytes).div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT)
        };
        (self.key_bytes, self.value_bytes) = (bytes(problem.head_dim), bytes(problem.value_dim));
        // The keys of the first step are the caller's.
        let turns = planned.steps.len().saturating_sub(1).min(2);
        let bytes = self.key_bytes.saturating_add(self.value_bytes).saturating_mul(turns);
        let inbox = match bytes {
            0 => None,
            _ => rank.transport.inbox(rank.device.compute(), bytes)?,
        };
        self.inbox = inbox;
        match inbox {
            Some(_) => Ok(()),
            None => self.own.reserve(bytes, |bytes| rank.device.allocate(bytes)),
        }
    }

    /// The addresses of the keys and the values of a step.
    fn addresses<D: Device<Buffer = B>>(&mut self, device: &D, step: usize) -> (u64, u64) {
        let base = match self.inbox {
            Some(inbox) => inbox.address,
            None => device.address(&mut self.own.buffer),
        };
        let keys = base + (step % 2 * (self.key_bytes + self.value_bytes)) as u64;
        (keys, keys + self.key_bytes as u64)
    }
}

#[derive(Debug)]
struct Buffers<B, W> {
    /// Keys and values of the other ranks.
    incoming: Incoming<B>,
    /// Outputs of the parts and their log-sum-exps: of each group `[parts, rows, Hq, Dv]`. A part
    /// that does not exist for a row has a log-sum-exp of minus infinity.
    parts: Reserved<B>,
    part_lse: Reserved<B>,
    /// The tables of ragged calls, `i32`.
    tables: Reserved<B>,
    workspace: Reserved<W>,
}

impl<B, W> Buffers<B, W> {
    fn new<D: Device<Buffer = B, Workspace = W>>(device: &D) -> Result<Buffers<B, W>, Error> {
        let empty = || device.allocate(0).map(Reserved::empty);
        Ok(Buffers {
            incoming: Incoming { inbox: None, own: empty()?, key_bytes: 0, value_bytes: 0 },
            parts: empty()?,
            part_lse: empty()?,
            tables: empty()?,
            workspace: Reserved::empty(device.workspace(0)?),
        })
    }

    /// Makes room for a rank's calls, and writes their tables.
    fn prepare<D: Device<Buffer = B, Workspace = W>, T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        problem: &Problem,
        ring: &Ring,
        planned: &Planned,
    ) -> Result<(), Error> {
        self.incoming.prepare(rank, problem, ring, planned)?;
        let device = &rank.device;
        let allocate = |bytes| device.allocate(bytes);
        let part_rows = planned.part_rows() * problem.query_heads;
        let part_bytes = part_rows.saturating_mul(problem.value_dim * problem.dtype.size());
        self.parts.reserve(part_bytes, allocate)?;
        self.part_lse.reserve(part_rows * size_of::<f32>(), allocate)?;
        if !planned.groups.iter().all(|group| group.complete) {
            let none = f32::NEG_INFINITY.to_ne_bytes().repeat(part_rows);
            device.write(&mut self.part_lse.buffer, &none)?;
        }
        let tables: Vec<u8> = planned.tables.iter().flat_map(|n| n.to_ne_bytes()).collect();
        self.tables.reserve(tables.len(), allocate)?;
        if !tables.is_empty() {
            device.write(&mut self.tables.buffer, &tables)?;
        }
        let workspace = planned.plans.iter().map(Plan::workspace_bytes).max().unwrap_or(0);
        self.workspace.reserve(workspace, |bytes| device.workspace(bytes))
    }
}

impl<D: Device> RingPrefill<D> {
    /// Plans and allocates. `problem` is the problem of the whole sequences, as one device would
    /// have it: a batch of sequences with `query_len` new rows, which are the last of `kv_len`
    /// keys.
    ///
    /// Ranks exchange a description of their problems, so all of them have to call this.
    ///
    /// # Errors
    /// As [`Plan::new`]; if the problem has a feature that the ring does not pass around (pages,
    /// masks, trees, lists of keys, codes with scales), or is ragged; if ranks differ: the error
    /// names the argument. If a rank does not answer.
    pub fn new<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
    ) -> Result<RingPrefill<D>, Error> {
        let sequence = RingSequence::new(problem.query_len, problem.kv_len);
        agree(rank, problem, &describe(problem.batch, &[sequence]))?;
        expect_supported(problem)?;
        if problem.queries != QueryStorage::Batched {
            let allowed = "batched, or planned by `with_sequences`, in ring prefill";
            return Err(Error::argument("queries", format!("{:?}", problem.queries), allowed));
        }
        RingPrefill::build(rank, problem, (vec![sequence], Some(problem.batch)))
    }

    /// As [`RingPrefill::new`], for ragged sequences, or for a batch of equal sequences at an
    /// offset. The lengths of `problem` are upper bounds, as everywhere; `sequences` are the
    /// sequences to prefill.
    ///
    /// # Errors
    /// As [`RingPrefill::new`]; if a sequence exceeds the problem, or the sequences of a batch
    /// differ.
    pub fn with_sequences<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
        sequences: &[RingSequence],
    ) -> Result<RingPrefill<D>, Error> {
        agree(rank, problem, &describe(sequences.len(), sequences))?;
        expect_supported(problem)?;
        expect_sequences(problem, sequences)?;
        RingPrefill::build(rank, problem, stored(problem, sequences))
    }

    /// Plans for other sequences within the bounds of the problem. Waits for the queued work.
    /// Memory is allocated only if these sequences need more than earlier ones.
    ///
    /// Ranks exchange a description of the sequences, so all of them have to call this.
    ///
    /// # Errors
    /// As [`RingPrefill::with_sequences`]. If planning fails, the prefill is of no more use.
    pub fn set_sequences<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        sequences: &[RingSequence],
    ) -> Result<(), Error> {
        rank.agree(&[("sequences", describe(sequences.len(), sequences))])?;
        expect_sequences(&self.problem, sequences)?;
        rank.wait()?;
        let (sequences, entries) = stored(&self.problem, sequences);
        let ring = Ring { sequences, entries, ..self.ring };
        let planned = Planned::new(&rank.device, &self.problem, &ring, self.rank)?;
        self.buffers.prepare(rank, &self.problem, &ring, &planned)?;
        (self.ring, self.planned) = (ring, planned);
        Ok(())
    }

    fn build<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
        (sequences, entries): (Vec<RingSequence>, Option<usize>),
    ) -> Result<RingPrefill<D>, Error> {
        let (device, ranks) = (&rank.device, rank.transport.size());
        let ring = Ring { sequences, entries, ranks, variant: problem.variant };
        let planned = Planned::new(device, problem, &ring, rank.transport.rank())?;
        let mut buffers = Buffers::new(device)?;
        buffers.prepare(rank, problem, &ring, &planned)?;
        let (problem, rank) = (problem.clone(), rank.transport.rank());
        Ok(RingPrefill { problem, ring, rank, planned, buffers })
    }

    /// Partial results of a row, at most.
    pub fn parts(&self) -> usize {
        self.planned.groups.iter().map(|group| group.parts).max().unwrap_or(1).max(1)
    }

    /// Queues a prefill.
    ///
    /// # Errors
    /// If an operand breaks the contract or differs from the plan; before anything is queued, if
    /// shapes, types or strides tell. If the driver or the transport fails.
    ///
    /// # Safety
    /// Until the work is done, nothing writes its inputs and nothing uses its outputs. On a GPU,
    /// operands are ready on the device's compute queue.
    pub unsafe fn run<T: Transport<Queue = D::Queue>>(
        &mut self,
        rank: &Rank<D, T>,
        step: RingStep<D::Memory>,
    ) -> Result<(), Error> {
        self.expect_operands(&step)?;
        let device = &rank.device;
        let RingStep { q, k, v, attention, out, lse } = step;
        let mut next = (span_of::<D>(&k), span_of::<D>(&v));
        if self.planned.direct {
            let inputs = self.inputs(device, (0, 0), next, &q, &attention)?;
            let mut outputs = Outputs { out, lse };
            let plan = &self.planned.plans[self.planned.steps[0].calls[0].plan];
            let workspace = &mut self.buffers.workspace.buffer;
            // SAFETY: the caller's promise; the workspace is of this run alone.
            return unsafe { device.run(plan, &inputs, &mut outputs, workspace) };
        }
        let step_count = self.planned.steps.len();
        for number in 0..step_count {
            if number > 0 {
                // The keys of this step have arrived.
                device.compute_follows_transfers()?;
            }
            let here = next;
            if number + 1 < step_count {
                // The step that read the buffer before has ended. The exchange is queued ahead of
                // the kernels that it overlaps with, so that it finds free multiprocessors.
                device.transfers_follow_compute()?;
                // SAFETY: the queues have just been ordered; the spans are keys and values of a
                // rank.
                next = unsafe { self.pass_on(rank, number, here)? };
            }
            for call in 0..self.planned.steps[number].calls.len() {
                let inputs = self.inputs(device, (number, call), here, &q, &attention)?;
                // SAFETY: the caller's promise, and buffers are of this run alone.
                unsafe { self.attend(device, (number, call), &inputs)? };
            }
        }
        // SAFETY: as above.
        unsafe { self.merge(device, out, lse) }
    }

    /// Sends keys and values to the next rank, and receives the keys and values of the next step.
    /// Returns their place.
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
        let (device, ranks) = (&rank.device, self.ring.ranks);
        let source = self.planned.steps[number + 1].source;
        let tokens = self.ring.entries.unwrap_or(1) * self.ring.key_count(source);
        let row_bytes = self.problem.kv_heads * self.problem.dtype.size();
        let (key_address, value_address) = self.buffers.incoming.addresses(device, number);
        let span = |address, dim| Span { address, bytes: tokens * row_bytes * dim };
        let received_keys = span(key_address, self.problem.head_dim);
        let received_values = span(value_address, self.problem.value_dim);
        let to_next = |span| Message { peer: (self.rank + 1) % ranks, span };
        let from_previous = |span| Message { peer: (self.rank + ranks - 1) % ranks, span };
        let sends = [to_next(keys), to_next(values)];
        let receives = [from_previous(received_keys), from_previous(received_values)];
        // SAFETY: the caller's promise; buffers have room for the share of any rank.
        unsafe { rank.transport.exchange(device.transfers(), &sends, &receives)? };
        Ok((received_keys, received_values))
    }

    /// The shape of a tensor with that many tokens, in each entry of a batch or in all.
    fn shape(&self, tokens: usize, row: &[usize]) -> InlineVec<usize> {
        self.ring.entries.into_iter().chain([tokens]).chain(row.iter().copied()).collect()
    }

    /// The inputs of a call, whose keys and values are in these spans.
    fn inputs<'a>(
        &mut self,
        device: &D,
        (number, call): (usize, usize),
        (keys, values): (Span, Span),
        q: &Tensor<'a, D::Memory>,
        attention: &Attention<Tensor<'a, D::Memory>>,
    ) -> Result<Inputs<'a, D::Memory>, Error> {
        let Problem { kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let step = &self.planned.steps[number];
        let tokens = self.ring.key_count(step.source);
        let [key_shape, value_shape] =
            [head_dim, value_dim].map(|dim| self.shape(tokens, &[kv_heads, dim]));
        // SAFETY: the spans hold that many elements, of the caller or of a buffer.
        let (k, v) = unsafe {
            (
                D::tensor(keys.address, dtype, &key_shape, None)?,
                D::tensor(values.address, dtype, &value_shape, None)?,
            )
        };
        let call = &step.calls[call];
        let mut attention = Attention {
            causal: call.call.causal,
            q_offset: QueryOffset::BottomRight,
            sinks: attention.sinks.filter(|_| call.call.sinks),
            ..*attention
        };
        let token_dim = usize::from(self.ring.entries.is_some());
        if token_dim == 0 {
            let tables = device.address(&mut self.buffers.tables.buffer);
            let ranges = table_ranges(self.ring.batch());
            let [cu_seqlens_q, cu_seqlens_k, kv_lens, rows, keys] = ranges.map(|range| {
                let address = tables + ((call.tables + range.start) * size_of::<i32>()) as u64;
                // SAFETY: the buffer holds the tables of all calls, and nothing writes them.
                unsafe { D::tensor(address, DType::I32, &[range.len()], None) }
            });
            attention.cu_seqlens_q = Some(cu_seqlens_q?);
            attention.cu_seqlens_k = Some(cu_seqlens_k?);
            attention.kv_lens = Some(kv_lens?);
            if call.call.positions {
                let offset = KeyOffset::PerSequence(keys?);
                attention.q_offset = QueryOffset::PerSequence(rows?);
                attention.key_positions = Some(KeyPositions { offset, stride: 1 });
            }
        } else if call.call.positions {
            let (row, key) = call.extent.positions;
            attention.q_offset = QueryOffset::Same(row);
            attention.key_positions =
                Some(KeyPositions { offset: KeyOffset::Same(key), stride: 1 });
        }
        Ok(Inputs::new(
            narrow::<D>(q, token_dim, &call.extent.rows)?,
            narrow::<D>(&k, token_dim, &call.extent.keys)?,
            narrow::<D>(&v, token_dim, &call.extent.keys)?,
            attention,
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
        let Problem { query_heads, value_dim, dtype, .. } = self.problem;
        let call = &self.planned.steps[number].calls[call];
        let (group, rows) = (&self.planned.groups[call.group], &call.extent.rows);
        // A group is a part of a ragged tensor, and all of a batch.
        let in_group = if self.ring.entries.is_some() { 0 } else { group.rows.start };
        let first = group.first + call.call.part * group.rows.len() + rows.start - in_group;
        let first = first * query_heads;
        let (out_at, lse_at) = (first * value_dim * dtype.size(), first * size_of::<f32>());
        let shape = self.shape(rows.len(), &[query_heads, value_dim]);
        let entry = (self.ring.row_count(self.rank) * query_heads) as i64;
        let outer = self.ring.entries.map(|_| entry);
        let lse_strides: InlineVec<i64> =
            outer.into_iter().chain([query_heads as i64, 1]).collect();
        let strides: InlineVec<i64> =
            lse_strides.iter().map(|stride| stride * value_dim as i64).chain([1]).collect();
        let out = device.address(&mut self.buffers.parts.buffer) + out_at as u64;
        let lse = device.address(&mut self.buffers.part_lse.buffer) + lse_at as u64;
        let lse_shape = &shape[..shape.len() - 1];
        // SAFETY: the rows belong to a part that the buffers have room for.
        let mut outputs = unsafe {
            let lse = D::tensor_mut(lse, DType::F32, lse_shape, Some(&lse_strides))?;
            Outputs { out: D::tensor_mut(out, dtype, &shape, Some(&strides))?, lse: Some(lse) }
        };
        let plan = &self.planned.plans[call.plan];
        // SAFETY: the caller's promise.
        unsafe { device.run(plan, inputs, &mut outputs, &mut self.buffers.workspace.buffer) }
    }

    /// Queues the merge of all parts.
    ///
    /// # Safety
    /// As [`RingPrefill::attend`]; `out` and `lse` are not used until the merge is done.
    unsafe fn merge(
        &mut self,
        device: &D,
        mut out: TensorMut<D::Memory>,
        mut lse: Option<TensorMut<D::Memory>>,
    ) -> Result<(), Error> {
        let Problem { query_heads, value_dim, dtype, out_dtype, .. } = self.problem;
        let out_at = D::tensor_mut_address(&mut out);
        let lse_at = lse.as_mut().map(D::tensor_mut_address);
        let parts = device.address(&mut self.buffers.parts.buffer);
        let part_lse = device.address(&mut self.buffers.part_lse.buffer);
        for group in self.planned.groups.iter().filter(|group| !group.rows.is_empty()) {
            let shape = [group.parts, group.rows.len(), query_heads, value_dim];
            let at = |start: u64, row: usize, row_bytes: usize| {
                start + (row * query_heads * row_bytes) as u64
            };
            let (first, row) = (group.first, group.rows.start);
            // SAFETY: every row of a part has been written, or its log-sum-exp is minus infinity.
            // Outputs are contiguous and have the rows of all groups.
            let mut merge = unsafe {
                let parts = at(parts, first, value_dim * dtype.size());
                let part_lse = at(part_lse, first, size_of::<f32>());
                let out = at(out_at, row, value_dim * out_dtype.size());
                let lse = lse_at.map(|lse| {
                    let lse = at(lse, row, size_of::<f32>());
                    D::tensor_mut(lse, DType::F32, &shape[1..3], None)
                });
                Merge {
                    parts: D::tensor(parts, dtype, &shape, None)?,
                    part_lse: D::tensor(part_lse, DType::F32, &shape[..3], None)?,
                    out: D::tensor_mut(out, out_dtype, &shape[1..], None)?,
                    lse: lse.transpose()?,
                }
            };
            // SAFETY: the caller's promise.
            unsafe { device.merge(&mut merge)? };
        }
        Ok(())
    }
}

/// An error on every rank if problems or sequences differ, or a problem is not valid.
fn agree<D: Device, T: Transport<Queue = D::Queue>>(
    rank: &Rank<D, T>,
    problem: &Problem,
    sequences: &str,
) -> Result<(), Error> {
    let mut described = terms("ring prefill", problem);
    described.push(("kv_len", problem.kv_len.to_string()));
    described.push(("keys", format!("{:?}", problem.keys)));
    described.push(("sequences", sequences.to_owned()));
    rank.agree(&described)?;
    problem.validate()
}

/// Sequences as the ring keeps them: one for all entries of a batch.
fn stored(problem: &Problem, sequences: &[RingSequence]) -> (Vec<RingSequence>, Option<usize>) {
    match problem.queries {
        QueryStorage::Batched => {
            let one = sequences.first().copied().unwrap_or_default();
            (vec![one], Some(sequences.len()))
        }
        _ => (sequences.to_vec(), None),
    }
}
