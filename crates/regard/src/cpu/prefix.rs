//! Prefix groups on the CPU: sequences that share their first keys.
//!
//! A run with groups is two runs of plans without. The first run attends to the prefixes. The query
//! rows of a group's members are gathered into one ragged sequence, so each tile of keys serves all
//! of them, and a prefix is read from memory once. The second run attends to the keys that each
//! sequence has of its own. Its block table starts behind the prefix, and its positions are shifted
//! likewise. Each row's two results are merged by their log-sum-exps.
//!
//! A group takes part if all its rows see its whole prefix, which then needs neither positions nor
//! masks. Prefixes end at whole pages. All intermediate results are in the workspace.

use super::executor::Executor;
use super::number::Number;
use super::tasks::run_tasks;
use crate::dtype::DType;
use crate::error::Error;
use crate::plan::Plan;
use crate::problem::{Inputs, KvStorage, Outputs, Problem, QueryStorage, Sequence};
use crate::tensor::{Dims, Tensor, TensorMut};
use crate::variant::{Attention, QueryOffset, Variant};
use half::{bf16, f16};
use std::ops::Range;

/// Keys that a group must spare its members together: the second run and the merge cost some time.
const MIN_SPARED_KEYS: usize = 64;

/// Alignment of parts of the workspace, in bytes.
const ALIGNMENT: usize = 64;

/// Rows of a task of the merge.
const TASK_ROWS: usize = 64;

/// Runs a plan on operands, in a workspace.
pub type RunPlan<'a> = &'a dyn Fn(&Plan, &Inputs, &mut Outputs, &mut [u8]) -> Result<(), Error>;

/// The additional part of a plan if sequences share prefixes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixPlan {
    /// Gathered rows over prefixes.
    shared: Plan,
    /// All rows over the keys behind them.
    own: Plan,
    layout: Layout,
    /// Bytes of workspace.
    pub total: usize,
}

/// Offsets in the workspace, in bytes from its aligned start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Layout {
    groups: usize,
    places: usize,
    cu_seqlens: usize,
    lens: usize,
    table: usize,
    queries: usize,
    shared_out: usize,
    shared_lse: usize,
    own_table: usize,
    own_lens: usize,
    own_offsets: usize,
    own_out: usize,
    own_lse: usize,
    /// Workspace of the two plans, one after the other.
    plans: usize,
}

/// A prefix group of a run.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Group {
    /// Keys of the prefix; 0 if the group takes no part.
    len: usize,
    members: usize,
    /// Query tokens of all members.
    tokens: usize,
    /// The member whose block table the prefix is read through.
    first: usize,
    /// The group's first gathered token.
    start: usize,
}

/// The place of a sequence's tokens among the gathered tokens.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Place {
    /// Keys of its prefix; 0 if it has none.
    len: usize,
    token: usize,
}

/// The reason why groups change nothing on the CPU, if they do not.
pub fn refusal(problem: &Problem) -> Option<&'static str> {
    let variant = &problem.variant;
    let reasons = [
        (problem.batch_invariant, "bits must not depend on groups (batch-invariant)"),
        (variant.alibi, "ALiBi depends on positions"),
        (variant.chunk.is_some(), "chunks depend on positions"),
        (variant.key_positions.is_some(), "keys are a shard"),
        (variant.mask.is_some(), "masks depend on positions"),
    ];
    reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
}

impl PrefixPlan {
    /// Plans the two runs of a problem with prefix groups; `flat_bytes` is the workspace of a run
    /// in which no group takes part.
    ///
    /// # Errors
    /// As `plan`.
    pub fn new(
        problem: &Problem,
        flat_bytes: usize,
        plan: impl Fn(&Problem) -> Result<Plan, Error>,
    ) -> Result<PrefixPlan, Error> {
        let KvStorage::Paged { block_size } = problem.keys else {
            unreachable!("checked: sequences with prefix groups have pages")
        };
        let (batch, rows) = (problem.batch, problem.rows());
        let tokens = rows / problem.query_heads;
        let groups = problem.prefix_groups.min(batch / 2);
        let flat =
            Problem { out_dtype: DType::F32, lse: true, prefix_groups: 0, ..problem.clone() };
        let shared = Problem {
            batch: groups,
            query_len: tokens,
            queries: QueryStorage::Ragged { total: tokens },
            variant: Variant { softcap: problem.variant.softcap, ..Variant::default() },
            ..flat.clone()
        };
        let (shared, own) = (plan(&shared)?, plan(&flat)?);
        let columns = problem.kv_len.div_ceil(block_size);
        let mut end = 0usize;
        let mut place = |count: usize, bytes: usize| {
            let start = end;
            end = start.saturating_add(count.saturating_mul(bytes));
            end = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
            start
        };
        let layout = Layout {
            groups: place(problem.prefix_groups, size_of::<Group>()),
            places: place(batch, size_of::<Place>()),
            cu_seqlens: place(groups + 1, 4),
            lens: place(groups, 4),
            table: place(groups.saturating_mul(columns), 4),
            queries: place(rows.saturating_mul(problem.head_dim), problem.dtype.size()),
            shared_out: place(rows.saturating_mul(problem.value_dim), 4),
            shared_lse: place(rows, 4),
            own_table: place(batch.saturating_mul(columns), 4),
            own_lens: place(batch, 4),
            own_offsets: place(batch, 4),
            own_out: place(rows.saturating_mul(problem.value_dim), 4),
            own_lse: place(rows, 4),
            plans: place(shared.workspace_bytes().max(own.workspace_bytes()), 1),
        };
        let total = end.saturating_add(ALIGNMENT).max(flat_bytes);
        Ok(PrefixPlan { shared, own, layout, total })
    }

    /// Runs operands that were checked and that the plan covers. Returns false if no group takes
    /// part; then nothing has run, and nothing is written.
    ///
    /// # Errors
    /// As `run`.
    pub fn run(
        &self,
        inputs: &Inputs,
        outputs: &mut Outputs,
        problem: &Problem,
        workspace: &mut [u8],
        executor: &dyn Executor,
        run: RunPlan,
    ) -> Result<bool, Error> {
        let skip = workspace.as_ptr().align_offset(ALIGNMENT);
        let parts = Parts { base: workspace[skip..].as_mut_ptr(), layout: &self.layout };
        let gathered = gather(inputs, problem, &parts);
        if gathered.groups == 0 {
            return Ok(false);
        }
        let bytes = workspace.len() - skip - self.layout.plans;
        // SAFETY: the last part of the workspace, which no view below reaches.
        let plans = unsafe { std::slice::from_raw_parts_mut(parts.at(self.layout.plans), bytes) };
        let call = Call { inputs, problem, parts: &parts, run };
        attend_shared(&call, &self.shared, &gathered, plans)?;
        attend_own(&call, &self.own, plans)?;
        merge(&call, outputs, executor);
        Ok(true)
    }
}

/// State shared by the steps of a run.
struct Call<'a> {
    inputs: &'a Inputs<'a>,
    problem: &'a Problem,
    parts: &'a Parts<'a>,
    run: RunPlan<'a>,
}

/// The parts of a workspace.
struct Parts<'a> {
    base: *mut u8,
    layout: &'a Layout,
}

// SAFETY: tasks of the merge only read through it.
unsafe impl Sync for Parts<'_> {}

impl Parts<'_> {
    fn at(&self, offset: usize) -> *mut u8 {
        self.base.wrapping_add(offset)
    }

    /// `count` elements of the part at `offset`.
    ///
    /// # Safety
    /// The part has room for them, they were written, and nothing writes them meanwhile.
    unsafe fn slice<T>(&self, offset: usize, count: usize) -> &[T] {
        // SAFETY: same contract; parts are aligned.
        unsafe { std::slice::from_raw_parts(self.at(offset).cast(), count) }
    }

    /// The same to be written: they become zero first.
    ///
    /// # Safety
    /// The part has room for them, nothing else uses them meanwhile, and zeros are a `T`.
    #[allow(clippy::mut_from_ref, reason = "parts do not overlap")]
    unsafe fn zeroed<T>(&self, offset: usize, count: usize) -> &mut [T] {
        let first = self.at(offset).cast::<T>();
        // SAFETY: same contract; parts are aligned.
        unsafe {
            first.write_bytes(0, count);
            std::slice::from_raw_parts_mut(first, count)
        }
    }
}

/// The groups and tokens that take part in a run.
struct Gathered {
    groups: usize,
    tokens: usize,
}

/// Keys of a sequence's prefix that all its rows see, if they see all of it; in whole pages.
fn shared_keys(problem: &Problem, sequence: &Sequence, len: usize, block_size: usize) -> usize {
    // Tree bits are of the last keys only.
    let max_len =
        sequence.kv_len.saturating_sub(if problem.variant.tree { sequence.q_len } else { 0 });
    let len = len.min(max_len) / block_size * block_size;
    let last = sequence.q_offset.saturating_add(sequence.q_len as i64 - 1);
    let (first, last) = (
        problem.variant.visible(sequence.q_offset, sequence.kv_len),
        problem.variant.visible(last, sequence.kv_len),
    );
    let sees_all = first.end >= len && last.start == 0 && first.start == 0;
    let moves = i32::try_from(sequence.q_offset - len as i64).is_ok();
    if sees_all && moves { len } else { 0 }
}

/// Finds the groups that take part, and the places of their tokens.
fn gather(inputs: &Inputs, problem: &Problem, parts: &Parts) -> Gathered {
    let KvStorage::Paged { block_size } = problem.keys else {
        unreachable!("checked: sequences with prefix groups have pages")
    };
    // SAFETY: the layout has room for the plan's groups and sequences, and the operands have no
    // more. Zeros are such structs.
    let (groups, places) = unsafe {
        (
            parts.zeroed::<Group>(parts.layout.groups, problem.prefix_groups),
            parts.zeroed::<Place>(parts.layout.places, problem.batch),
        )
    };
    for (index, place) in places.iter_mut().enumerate() {
        let Some((number, len)) = inputs.prefix(index) else { continue };
        let sequence = inputs.sequence(index);
        if sequence.q_len == 0 {
            continue;
        }
        let (group, len) = (&mut groups[number], shared_keys(problem, &sequence, len, block_size));
        if group.members == 0 {
            (group.len, group.first) = (len, index);
        }
        group.len = group.len.min(len);
        place.token = group.tokens;
        group.members += 1;
        group.tokens += sequence.q_len;
    }
    let mut gathered = Gathered { groups: 0, tokens: 0 };
    for group in groups.iter_mut() {
        if group.members < 2 || (group.members - 1).saturating_mul(group.len) < MIN_SPARED_KEYS {
            group.len = 0;
            continue;
        }
        group.start = gathered.tokens;
        gathered.groups += 1;
        gathered.tokens += group.tokens;
    }
    for (index, place) in places.iter_mut().enumerate() {
        let Some((number, _)) = inputs.prefix(index) else { continue };
        let group = &groups[number];
        if group.len > 0 && inputs.sequence(index).q_len > 0 {
            *place = Place { len: group.len, token: group.start + place.token };
        }
    }
    gathered
}

/// The address of row (token, head) of a sequence in `q`, `out` or `lse`.
fn row_of(dims: &Dims, leading: usize, sequence: &Sequence, token: usize, head: usize) -> isize {
    let strides = dims.strides();
    let at = |i: usize, index: usize| strides[i] * index as i64;
    let offset = match leading {
        3 => at(0, sequence.index) + at(1, token) + at(2, head),
        _ => at(0, sequence.q_start + token) + at(1, head),
    };
    offset as isize
}

/// Attends to the prefixes: gathered rows, full attention.
fn attend_shared(
    call: &Call,
    plan: &Plan,
    gathered: &Gathered,
    workspace: &mut [u8],
) -> Result<(), Error> {
    let Call { inputs, problem, parts, run } = *call;
    let KvStorage::Paged { block_size } = problem.keys else { unreachable!("checked") };
    let (layout, heads) = (parts.layout, problem.query_heads);
    let Gathered { groups, tokens, .. } = *gathered;
    let columns = inputs.attention.block_table.map_or(0, |table| table.shape()[1]);
    // SAFETY: the layout has room for the plan's groups, rows and columns, and there are no more.
    // Nothing else uses these parts while the views live.
    unsafe {
        let given = parts.slice::<Group>(layout.groups, problem.prefix_groups);
        let places = parts.slice::<Place>(layout.places, problem.batch);
        let starts = parts.zeroed::<i32>(layout.cu_seqlens, groups + 1);
        let lens = parts.zeroed::<i32>(layout.lens, groups);
        let table = parts.zeroed::<i32>(layout.table, groups * columns);
        for (i, group) in given.iter().filter(|group| group.len > 0).enumerate() {
            starts[i + 1] = (group.start + group.tokens) as i32;
            lens[i] = group.len as i32;
            let row = inputs.block_row(group.first).expect("checked: keys are paged");
            let pages = group.len / block_size;
            table[i * columns..][..pages].copy_from_slice(&row[..pages]);
        }
        let row_bytes = problem.head_dim * problem.dtype.size();
        let (q, leading) = (&inputs.q, inputs.q.rank() - 1);
        for (index, place) in places.iter().enumerate().filter(|(_, place)| place.len > 0) {
            let sequence = inputs.sequence(index);
            for (token, head) in (0..sequence.q_len).flat_map(|i| (0..heads).map(move |h| (i, h))) {
                let offset = row_of(q, leading, &sequence, token, head);
                let from = q.as_ptr().wrapping_offset(offset * problem.dtype.size() as isize);
                let to = ((place.token + token) * heads + head) * row_bytes;
                parts.at(layout.queries + to).copy_from_nonoverlapping(from, row_bytes);
            }
        }
        let shape = [tokens, heads, problem.head_dim];
        let q = Tensor::from_raw(parts.at(layout.queries), problem.dtype, &shape, None)?;
        let attention = Attention {
            scale: Some(inputs.scale()),
            softcap: inputs.attention.softcap,
            cu_seqlens_q: Some(Tensor::new(starts, [groups + 1])?),
            kv_lens: Some(Tensor::new(lens, [groups])?),
            block_table: Some(Tensor::new(table, [groups, columns])?),
            k_scales: inputs.attention.k_scales,
            v_scales: inputs.attention.v_scales,
            values: inputs.attention.values,
            rotary_k: inputs.attention.rotary_k,
            ..Attention::default()
        };
        let inputs = Inputs::new(q, inputs.k, inputs.v, attention);
        let rows = [tokens, heads, problem.value_dim];
        let mut outputs = results(parts, [layout.shared_out, layout.shared_lse], &rows)?;
        run(plan, &inputs, &mut outputs, workspace)
    }
}

/// Outputs in the workspace: f32 of that shape, and their log-sum-exps.
///
/// # Safety
/// The parts at these offsets have room for them, and nothing else uses them meanwhile.
unsafe fn results<'a>(
    parts: &'a Parts,
    [out, lse]: [usize; 2],
    shape: &[usize],
) -> Result<Outputs<'a>, Error> {
    let (_, rows) = shape.split_last().expect("a last dimension");
    // SAFETY: same contract.
    unsafe {
        let out = TensorMut::from_raw(parts.at(out), DType::F32, shape, None)?;
        let lse = TensorMut::from_raw(parts.at(lse), DType::F32, rows, None)?;
        Ok(Outputs { out, lse: Some(lse) })
    }
}

/// Attends to the keys behind the prefixes: block tables, lengths and positions start there.
fn attend_own(call: &Call, plan: &Plan, workspace: &mut [u8]) -> Result<(), Error> {
    let Call { inputs, problem, parts, run } = *call;
    let KvStorage::Paged { block_size } = problem.keys else { unreachable!("checked") };
    let (layout, batch) = (parts.layout, problem.batch);
    let columns = inputs.attention.block_table.map_or(0, |table| table.shape()[1]);
    // SAFETY: as in `attend_shared`.
    unsafe {
        let places = parts.slice::<Place>(layout.places, batch);
        let table = parts.zeroed::<i32>(layout.own_table, batch * columns);
        let lens = parts.zeroed::<i32>(layout.own_lens, batch);
        let offsets = parts.zeroed::<i32>(layout.own_offsets, batch);
        for (index, place) in places.iter().enumerate() {
            let sequence = inputs.sequence(index);
            let row = inputs.block_row(index).expect("checked: keys are paged");
            let pages = place.len / block_size;
            table[index * columns..][..columns - pages].copy_from_slice(&row[pages..]);
            lens[index] = (sequence.kv_len - place.len) as i32;
            offsets[index] = (sequence.q_offset - place.len as i64) as i32;
        }
        let attention = Attention {
            kv_lens: Some(Tensor::new(lens, [batch])?),
            block_table: Some(Tensor::new(table, [batch, columns])?),
            q_offset: QueryOffset::PerSequence(Tensor::new(offsets, [batch])?),
            prefix_groups: None,
            prefix_lens: None,
            ..inputs.attention
        };
        let (mut shape, rank) = ([0; 4], inputs.q.rank());
        shape[..rank].copy_from_slice(inputs.q.shape());
        shape[rank - 1] = problem.value_dim;
        let inputs = Inputs { attention, ..*inputs };
        let mut outputs = results(parts, [layout.own_out, layout.own_lse], &shape[..rank])?;
        run(plan, &inputs, &mut outputs, workspace)
    }
}

/// A result of the caller's: its first element, and the layout of its rows.
struct Rows<E> {
    data: *mut E,
    dims: Dims,
    leading: usize,
}

// SAFETY: the pointer is to a checked output that the call borrows. Tasks write disjoint rows, and
// every element has a place of its own.
unsafe impl<E> Sync for Rows<E> {}

impl<E> Rows<E> {
    fn row(&self, sequence: &Sequence, token: usize, head: usize) -> *mut E {
        self.data.wrapping_offset(row_of(&self.dims, self.leading, sequence, token, head))
    }
}

/// Merges each row's two results, and writes the caller's.
fn merge(call: &Call, outputs: &mut Outputs, executor: &dyn Executor) {
    match outputs.out.dtype() {
        DType::F32 => merge_to::<f32>(call, outputs, executor),
        DType::F16 => merge_to::<f16>(call, outputs, executor),
        DType::BF16 => merge_to::<bf16>(call, outputs, executor),
        _ => unreachable!("checked: outputs are floating"),
    }
}

fn merge_to<E: Number>(call: &Call, outputs: &mut Outputs, executor: &dyn Executor) {
    let Call { inputs, problem, parts, .. } = *call;
    let (layout, heads, dim) = (parts.layout, problem.query_heads, problem.value_dim);
    let (leading, rows) = (inputs.q.rank() - 1, problem.rows());
    let out = Rows::<E> { data: outputs.out.as_mut_ptr().cast(), dims: *outputs.out, leading };
    let lse = outputs.lse.as_mut();
    let lse = lse.map(|lse| Rows::<f32> { data: lse.as_mut_ptr().cast(), dims: **lse, leading });
    // SAFETY: the two runs have written their results: the run over own keys as many rows as the
    // problem has, the run over prefixes as many rows as were gathered.
    let (places, own_out, own_lse) = unsafe {
        (
            parts.slice::<Place>(layout.places, problem.batch),
            parts.slice::<f32>(layout.own_out, rows * dim),
            parts.slice::<f32>(layout.own_lse, rows),
        )
    };
    let merge_sequence = |index: usize, tokens: Range<usize>| {
        let (sequence, place) = (inputs.sequence(index), places[index]);
        let first = if leading == 3 { index * inputs.q.shape()[1] } else { sequence.q_start };
        let last = tokens.end.min(sequence.q_len);
        for (token, head) in
            (tokens.start..last).flat_map(|token| (0..heads).map(move |head| (token, head)))
        {
            let row = (first + token) * heads + head;
            let shared = (place.len > 0).then(|| (place.token + token) * heads + head);
            // SAFETY: the row was gathered, and its result written.
            let shared = shared.map(|row| unsafe {
                let out = parts.slice::<f32>(layout.shared_out + row * dim * 4, dim);
                RowResult { out, lse: parts.slice::<f32>(layout.shared_lse + row * 4, 1)[0] }
            });
            let own = RowResult { out: &own_out[row * dim..][..dim], lse: own_lse[row] };
            let merged = Merged::new(own, shared);
            let to = out.row(&sequence, token, head);
            for i in 0..dim {
                // SAFETY: checked: the row has `dim` elements, without gaps, and is this task's.
                unsafe { to.add(i).write_unaligned(E::from_f32(merged.at(i))) };
            }
            if let Some(lse) = &lse {
                // SAFETY: checked: there is a place for the row's log-sum-exp.
                unsafe { lse.row(&sequence, token, head).write_unaligned(merged.lse) };
            }
        }
    };
    let chunk = TASK_ROWS.div_ceil(heads);
    let chunks = problem.query_len.div_ceil(chunk);
    run_tasks(executor, problem.batch * chunks, rows * dim * 12, &|task| {
        let start = task % chunks * chunk;
        merge_sequence(task / chunks, start..start + chunk);
    });
}

/// A row's result over some keys.
struct RowResult<'a> {
    out: &'a [f32],
    lse: f32,
}

/// A row's two results, with their weights.
struct Merged<'a> {
    own: &'a [f32],
    shared: Option<&'a [f32]>,
    weights: [f32; 2],
    lse: f32,
}

impl<'a> Merged<'a> {
    fn new(own: RowResult<'a>, shared: Option<RowResult<'a>>) -> Merged<'a> {
        let Some(shared) = shared else {
            return Merged { own: own.out, shared: None, weights: [1.0, 0.0], lse: own.lse };
        };
        let max = own.lse.max(shared.lse);
        // A row that has seen no key in either has weights of 0, and an output of 0.
        let weight = |lse: f32| if lse == f32::NEG_INFINITY { 0.0 } else { (lse - max).exp() };
        let weights = [weight(own.lse), weight(shared.lse)];
        let sum = weights[0] + weights[1];
        let inverse = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        let lse = if sum > 0.0 { max + sum.ln() } else { f32::NEG_INFINITY };
        let weights = weights.map(|x| x * inverse);
        Merged { own: own.out, shared: Some(shared.out), weights, lse }
    }

    fn at(&self, i: usize) -> f32 {
        match self.shared {
            Some(shared) => self.weights[0] * self.own[i] + self.weights[1] * shared[i],
            None => self.own[i],
        }
    }
}
