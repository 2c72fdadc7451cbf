//! Head-parallel attention: from rows of all heads to heads of all rows, and back.

use crate::device::Device;
use crate::rank::{Rank, terms};
use crate::transport::{Exchange, Span, Transport};
use crate::views::{expect_contiguous, expect_dtype, expect_shape, span_of};
use regard::{
    Attention, Error, Inputs, KvStorage, Memory, Outputs, Plan, Problem, QueryOffset, QueryStorage,
    Tensor, TensorMut, Values,
};

/// Operands of a head-parallel call on one rank. Rank r has rows `r * rows..(r + 1) *
/// rows` of the sequence. All tensors are contiguous, with heads outermost.
#[derive(Debug)]
pub struct HeadStep<'a, M: Memory> {
    /// `[Hq, rows, Dk]`.
    pub q: Tensor<'a, M>,
    /// `[Hkv, rows, Dk]`.
    pub k: Tensor<'a, M>,
    /// `[Hkv, rows, Dv]`.
    pub v: Tensor<'a, M>,
    /// `scale`, `causal`, `window`, `chunk` and `softcap`, the same on every rank. `alibi_slopes`
    /// and `sinks` of the own heads: `[Hq / ranks]`.
    pub attention: Attention<Tensor<'a, M>>,
    /// `[Hq, rows, Dv]`.
    pub out: TensorMut<'a, M>,
}

/// Attention of one sequence whose rows are spread over ranks, for models with enough heads. An
/// all-to-all gives each rank all rows of some heads; a second all-to-all gives the results back.
///
/// Both exchanges move memory in one piece per rank. Received memory is read in place: rank i's
/// rows are entry i of a batch, and its keys are page i of all entries.
#[derive(Debug)]
pub struct HeadParallel<D: Device> {
    plan: Plan,
    problem: Problem,
    ranks: usize,
    buffers: Buffers<D::Buffer>,
    workspace: D::Workspace,
}

#[derive(Debug)]
struct Buffers<B> {
    /// Queries, keys, values and outputs of the own heads, `[ranks, H / ranks, rows, D]`.
    q: B,
    k: B,
    v: B,
    out: B,
    /// `i32`: `[ranks]`, `[ranks]` and `[ranks, ranks]`.
    kv_lens: B,
    q_offset: B,
    block_table: B,
}

impl<D: Device> HeadParallel<D> {
    /// Plans and allocates. `problem` is the problem of the whole sequence, as one device would
    /// have it: `batch` is 1, `query_len` and `kv_len` are all rows.
    ///
    /// Ranks exchange a description of their problems, so all of them have to call this.
    ///
    /// # Errors
    /// As [`Plan::new`]; if heads or rows do not divide among the ranks; if the problem has a
    /// feature that is not passed on; if ranks differ: the error names the argument. If a rank does
    /// not answer.
    pub fn new<T: Transport<Queue = D::Queue>>(
        rank: &Rank<D, T>,
        problem: &Problem,
    ) -> Result<HeadParallel<D>, Error> {
        let (device, ranks) = (&rank.device, rank.transport.size());
        let mut described = terms("head-parallel attention", problem);
        described.push(("kv_len", problem.kv_len.to_string()));
        rank.agree(&described)?;
        problem.validate()?;
        expect_supported(problem, ranks)?;
        let (len, rows) = (problem.query_len, problem.query_len / ranks);
        let planned = Problem {
            batch: ranks,
            query_heads: problem.query_heads / ranks,
            kv_heads: problem.kv_heads / ranks,
            query_len: rows,
            keys: KvStorage::Paged { block_size: rows.max(1) },
            ..problem.clone()
        };
        let plan = Plan::new(&planned, device.machine())?;
        device.load(&plan)?;
        let size = problem.dtype.size();
        let tensor = |heads: usize, dim: usize| device.allocate(heads * rows * dim * size);
        let numbers = |numbers: &mut dyn Iterator<Item = usize>| -> Result<D::Buffer, Error> {
            let bytes: Vec<u8> = numbers.flat_map(|n| (n as i32).to_ne_bytes()).collect();
            let mut buffer = device.allocate(bytes.len())?;
            device.write(&mut buffer, &bytes)?;
            Ok(buffer)
        };
        Ok(HeadParallel {
            buffers: Buffers {
                q: tensor(problem.query_heads, problem.head_dim)?,
                k: tensor(problem.kv_heads, problem.head_dim)?,
                v: tensor(problem.kv_heads, problem.value_dim)?,
                out: tensor(problem.query_heads, problem.value_dim)?,
                kv_lens: numbers(&mut (0..ranks).map(|_| len))?,
                q_offset: numbers(&mut (0..ranks).map(|i| i * rows))?,
                block_table: numbers(&mut (0..ranks * ranks).map(|i| i % ranks))?,
            },
            workspace: device.workspace(plan.workspace_bytes())?,
            plan,
            problem: problem.clone(),
            ranks,
        })
    }

    /// The plan of the rank's own heads.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Queues a call, all of it on the compute queue.
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
        step: HeadStep<D::Memory>,
    ) -> Result<(), Error> {
        self.expect_operands(&step)?;
        let device = &rank.device;
        let HeadStep { q, k, v, attention, mut out } = step;
        let buffers = &mut self.buffers;
        let [q_at, k_at, v_at, out_at] =
            [&mut buffers.q, &mut buffers.k, &mut buffers.v, &mut buffers.out]
                .map(|buffer| device.address(buffer));
        let to = |from: Span, address| Exchange { from, to: Span { address, ..from } };
        let exchanges =
            [to(span_of::<D>(&q), q_at), to(span_of::<D>(&k), k_at), to(span_of::<D>(&v), v_at)];
        // SAFETY: the spans are of the same sizes, and heads divide among the ranks.
        unsafe { rank.transport.all_to_all(device.compute(), &exchanges)? };

        let Problem { query_heads, kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let (ranks, rows) = (self.ranks, self.problem.query_len / self.ranks);
        let shape = |heads: usize, dim| [ranks, rows, heads / ranks, dim];
        let strides = |heads: usize, dim: usize| {
            [heads / ranks * rows * dim, dim, rows * dim, 1].map(|n| n as i64)
        };
        // SAFETY: the exchange writes all of the buffers before the run reads them.
        let view = |address, heads, dim| unsafe {
            D::tensor(address, dtype, &shape(heads, dim), Some(&strides(heads, dim)))
        };
        let numbers = |buffer: &mut D::Buffer, shape: &[usize]| {
            // SAFETY: the buffers hold that many numbers, and nothing writes them.
            unsafe { D::tensor(device.address(buffer), regard::DType::I32, shape, None) }
        };
        let attention = Attention {
            kv_lens: Some(numbers(&mut buffers.kv_lens, &[ranks])?),
            q_offset: QueryOffset::PerSequence(numbers(&mut buffers.q_offset, &[ranks])?),
            block_table: Some(numbers(&mut buffers.block_table, &[ranks, ranks])?),
            ..attention
        };
        let inputs = Inputs::new(
            view(q_at, query_heads, head_dim)?,
            view(k_at, kv_heads, head_dim)?,
            view(v_at, kv_heads, value_dim)?,
            attention,
        );
        let (out_shape, out_strides) =
            (shape(query_heads, value_dim), strides(query_heads, value_dim));
        // SAFETY: the buffer has room for all rows of the own heads, and only this call uses it.
        let partial = unsafe { D::tensor_mut(out_at, dtype, &out_shape, Some(&out_strides))? };
        let mut outputs = Outputs { out: partial, lse: None };
        // SAFETY: the caller's promise, and buffers are of this call alone.
        unsafe { device.run(&self.plan, &inputs, &mut outputs, &mut self.workspace)? };
        let from = Span { address: out_at, bytes: query_heads * rows * value_dim * dtype.size() };
        let back = [to(from, D::tensor_mut_address(&mut out))];
        // SAFETY: `out` is contiguous and of the size of the buffer.
        unsafe { rank.transport.all_to_all(device.compute(), &back) }
    }

    /// Checks shapes and types.
    fn expect_operands(&self, step: &HeadStep<D::Memory>) -> Result<(), Error> {
        let Problem { query_heads, kv_heads, head_dim, value_dim, dtype, .. } = self.problem;
        let rows = self.problem.query_len / self.ranks;
        for (name, dims, shape) in [
            ("q", &*step.q, [query_heads, rows, head_dim]),
            ("k", &*step.k, [kv_heads, rows, head_dim]),
            ("v", &*step.v, [kv_heads, rows, value_dim]),
            ("out", &*step.out, [query_heads, rows, value_dim]),
        ] {
            expect_dtype(name, dims, dtype)?;
            expect_shape(name, dims, &shape)?;
            expect_contiguous(name, dims)?;
        }
        let passed = |name: &str| ["alibi_slopes", "sinks"].contains(&name);
        if let Some((name, _)) = step.attention.named().find(|(name, _)| !passed(name)) {
            let allowed = "not given: head-parallel attention has no such feature";
            return Err(Error::argument(name, "given", allowed));
        }
        match step.attention.q_offset {
            QueryOffset::BottomRight | QueryOffset::Same(0) => Ok(()),
            _ => Err(Error::argument("q_offset", "given", "0: the call has all rows and keys")),
        }
    }
}

/// The shape and the features that are passed on.
fn expect_supported(problem: &Problem, ranks: usize) -> Result<(), Error> {
    for (name, count) in [
        ("query_heads", problem.query_heads),
        ("kv_heads", problem.kv_heads),
        ("query_len", problem.query_len),
    ] {
        if !count.is_multiple_of(ranks) {
            let allowed = format!("a multiple of {ranks}, the number of ranks");
            return Err(Error::argument(name, count, allowed));
        }
    }
    let conditions = [
        ("batch", problem.batch == 1),
        ("query_len", problem.query_len == problem.kv_len),
        ("queries", problem.queries == QueryStorage::Batched),
        ("keys", problem.keys == KvStorage::Batched),
        ("key_dtype", problem.key_dtype == problem.dtype),
        ("value_dtype", problem.value_dtype == problem.dtype),
        ("out_dtype", problem.out_dtype == problem.dtype),
        ("values", problem.values == Values::Separate),
        ("mask", problem.variant.mask.is_none()),
        ("tree_mask", !problem.variant.tree),
        ("key_positions", problem.variant.key_positions.is_none()),
        ("key_indices", problem.key_lists.is_none()),
        ("lse", !problem.lse),
    ];
    match conditions.into_iter().find(|(_, holds)| !holds) {
        None => Ok(()),
        Some((name, _)) => Err(Error::argument(
            name,
            "not what head-parallel attention takes",
            "one batched sequence of one type, as many queries as keys, without masks, trees, \
             lists of keys and log-sum-exp",
        )),
    }
}
