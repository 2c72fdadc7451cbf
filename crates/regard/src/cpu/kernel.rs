//! The algorithm, once, over [`Vector`]: tiled attention with a running softmax.
//!
//! An item is a block of query rows of one (sequence, key/value head): tokens times grouped heads, so that every packed tile of keys and
//! values serves the whole group. For each tile of keys: pack, then for each few rows: scores (product), softmax, output
//! (product). Tiles start at multiples of `tile_keys` from key 0 whatever is visible, and rows never mix: a tile that a row
//! sees nothing of changes no bit of it.

use super::address::{Keys, Rows};
use super::pack::{self, STAGING};
use super::product::{Product, dispatch};
use super::softmax::{self, RowScores};
use super::stream::{self, Dots, Weighted};
use super::vector::{Storage, Vector};
use crate::plan::{ALIGNMENT, Plan};
use crate::problem::{Inputs, Problem, Sequence};
use crate::select::Choice;
use crate::split::Split;
use crate::state::State;
use crate::tensor::{DType, Dims};
use half::{bf16, f16};
use std::ops::Range;

/// The sizes that lay out scratch and packed tiles.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub head_dim: usize,
    pub value_dim: usize,
    /// Head dims rounded up to the widest vector.
    pub padded_head_dim: usize,
    pub padded_value_dim: usize,
    pub tile_keys: usize,
    pub block_rows: usize,
    /// Whether an item may walk several splits and join them itself.
    pub folds: bool,
}

/// One call, as every item sees it.
pub(super) struct Call<'a> {
    pub inputs: &'a Inputs<'a>,
    /// What the operands are (the plan's problem may be larger).
    pub problem: Problem,
    pub plan: &'a Plan,
    pub shape: Shape,
    pub out: Written,
    pub lse: Option<Written>,
    pub partials: Partials,
    /// Multiplies queries: the scale, in base 2, or over the softcap.
    pub query_factor: f32,
    /// The softcap, in base 2.
    pub softcap: Option<f32>,
}

/// An output tensor.
#[derive(Clone, Copy)]
pub(super) struct Written {
    pub data: *mut u8,
    pub dims: Dims,
}

/// Where the states of parallel splits are kept: a row's output (padded), maximum and sum, for each split.
#[derive(Clone, Copy)]
pub(super) struct Partials {
    pub data: *mut f32,
    /// Splits a row has room for.
    pub splits: usize,
    /// Rows a (sequence, key/value head) has room for.
    pub rows: usize,
}

// SAFETY: the raw pointers are to memory that the call owns exclusively; items write disjoint parts of it.
unsafe impl Sync for Call<'_> {}

/// One piece of work.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub sequence: Sequence,
    pub kv_head: usize,
    /// Rows `first_row..first_row + rows` of the (sequence, key/value head): row r is token r / group, query head r % group of the group.
    pub first_row: usize,
    pub rows: usize,
    /// Keys that some row of the block can see.
    pub keys: Range<usize>,
    /// Splits of the keys that this item walks.
    pub splits: Range<usize>,
    pub task: Task,
}

/// What is done with an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// Walk the splits and write the output.
    Attend,
    /// Walk the one split and leave its state among the partials.
    AttendPartial,
    /// Join the splits' partial states and write the output.
    Merge,
}

impl Shape {
    pub fn new(problem: &Problem, choice: &Choice, split: &Split) -> Shape {
        let widest = ALIGNMENT / size_of::<f32>();
        Shape {
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            padded_head_dim: problem.head_dim.next_multiple_of(widest),
            padded_value_dim: problem.value_dim.next_multiple_of(widest),
            tile_keys: choice.tile_keys,
            block_rows: choice.block_rows,
            folds: split.count > 1 && !split.parallel,
        }
    }

    /// Floats of one partial state.
    pub fn partial_floats(&self) -> usize {
        self.padded_value_dim + 2
    }

    /// Bytes of scratch, a multiple of [`ALIGNMENT`].
    pub fn scratch_bytes(&self) -> usize {
        // SAFETY: offsets from null are only taken for their size and never followed.
        Scratch::at(std::ptr::null_mut(), self).1
    }
}

/// What a worker keeps for itself while it runs an item.
struct Scratch {
    queries: *mut f32,
    output: *mut f32,
    states: *mut State,
    folded_output: *mut f32,
    folded_states: *mut State,
    keys: *mut f32,
    values: *mut f32,
    scores: *mut f32,
    staging: *mut f32,
    /// Two tiles of keys' addresses and two of values'.
    addresses: *mut *const u8,
    ranges: *mut RowRange,
}

/// The keys that a row can see by causality, window and length.
#[derive(Clone, Copy)]
struct RowRange {
    start: u32,
    end: u32,
}

impl RowRange {
    /// What of the tile's valid keys lies in the range, relative to the tile's first key.
    #[inline(always)]
    fn within(&self, tile: usize, valid: &Range<usize>) -> Range<usize> {
        let relative = |key: u32| (key as usize).clamp(tile + valid.start, tile + valid.end) - tile;
        relative(self.start)..relative(self.end)
    }
}

impl Scratch {
    /// The parts laid out from `start` on, and the bytes they take.
    fn at(start: *mut u8, shape: &Shape) -> (Scratch, usize) {
        let mut bytes = 0;
        let mut place = |size: usize, count: usize| {
            let part = start.wrapping_add(bytes);
            bytes = (bytes + size * count).next_multiple_of(ALIGNMENT);
            part
        };
        let (rows, tile) = (shape.block_rows, shape.tile_keys);
        let folded = if shape.folds { rows } else { 0 };
        let scratch = Scratch {
            queries: place(4, rows * shape.padded_head_dim).cast(),
            output: place(4, rows * shape.padded_value_dim).cast(),
            states: place(size_of::<State>(), rows).cast(),
            folded_output: place(4, folded * shape.padded_value_dim).cast(),
            folded_states: place(size_of::<State>(), folded).cast(),
            keys: place(4, tile * shape.padded_head_dim).cast(),
            values: place(4, tile * shape.padded_value_dim).cast(),
            scores: place(4, softmax::MAX_ROWS.max(stream::MAX_ROWS) * tile).cast(),
            staging: place(4, STAGING).cast(),
            addresses: place(size_of::<*const u8>(), 4 * tile).cast(),
            ranges: place(size_of::<RowRange>(), rows).cast(),
        };
        (scratch, bytes)
    }
}

/// Does one item.
///
/// # Safety
/// V's CPU features are there. The call's operands were checked, the item belongs to it, no other thread has the item, and
/// `scratch` holds `Shape::scratch_bytes` bytes, aligned, for this thread alone.
#[inline(always)]
pub(super) unsafe fn run_item<V: Vector>(call: &Call, item: &Item, scratch: *mut u8) {
    let (scratch, _) = Scratch::at(scratch, &call.shape);
    // SAFETY: passed on.
    unsafe {
        match (item.task, call.problem.dtype) {
            (Task::Merge, _) => merge::<V>(call, item, &scratch),
            (_, DType::F32) => attend::<V, f32>(call, item, &scratch),
            (_, DType::F16) => attend::<V, f16>(call, item, &scratch),
            (_, DType::BF16) => attend::<V, bf16>(call, item, &scratch),
            (_, DType::I32 | DType::Bool) => unreachable!("checked: queries are floating"),
        }
    }
}

#[inline(always)]
unsafe fn attend<V: Vector, E: Storage>(call: &Call, item: &Item, scratch: &Scratch) {
    let shape = &call.shape;
    let split_keys = call.plan.split().keys;
    let fold = item.splits.len() > 1;
    // SAFETY: every offset below stays inside the scratch layout (block_rows rows, tile_keys keys) or the checked operands.
    unsafe {
        load_queries::<V, E>(call, item, scratch);
        if fold {
            clear::<V>(shape, item.rows, scratch.folded_output, scratch.folded_states);
        }
        let k = Keys::of(call.inputs, &call.inputs.k, &item.sequence, item.kv_head);
        let v = Keys::of(call.inputs, &call.inputs.v, &item.sequence, item.kv_head);
        for split in item.splits.clone() {
            clear::<V>(shape, item.rows, scratch.output, scratch.states);
            let start = item.keys.start.max(split * split_keys);
            let end = item.keys.end.min((split + 1).saturating_mul(split_keys));
            let mut tile = start / shape.tile_keys * shape.tile_keys;
            let streams = call.streams::<V>(item.rows);
            while tile < end {
                let valid = start.max(tile) - tile..end.min(tile + shape.tile_keys) - tile;
                if streams {
                    stream_tile::<V, E>(call, item, scratch, (&k, &v), (tile, valid, end));
                    tile += shape.tile_keys;
                    continue;
                }
                let addresses = std::slice::from_raw_parts_mut(scratch.addresses, valid.len());
                k.addresses(tile + valid.start, addresses);
                pack::keys::<V, E>(shape, addresses, valid.clone(), scratch.keys, scratch.staging);
                v.addresses(tile + valid.start, addresses);
                pack::values::<V, E>(shape, addresses, valid.start, scratch.values);
                attend_tile::<V>(call, item, scratch, tile, valid);
                tile += shape.tile_keys;
            }
            if fold {
                for row in 0..item.rows {
                    let offset = row * shape.padded_value_dim;
                    fold_row::<V>(
                        shape,
                        (scratch.folded_output.add(offset), &mut *scratch.folded_states.add(row)),
                        (scratch.output.add(offset), *scratch.states.add(row)),
                    );
                }
            }
        }
        if item.splits.is_empty() {
            clear::<V>(shape, item.rows, scratch.output, scratch.states);
        }
        match item.task {
            Task::AttendPartial => store_partials::<V>(call, item, scratch),
            _ if fold => write_block::<V>(call, item, scratch.folded_output, scratch.folded_states),
            _ => write_block::<V>(call, item, scratch.output, scratch.states),
        }
    }
}

/// Queries of the block in f32, times the scale; and what each row can see.
#[inline(always)]
unsafe fn load_queries<V: Vector, E: Storage>(call: &Call, item: &Item, scratch: &Scratch) {
    let (shape, group) = (&call.shape, call.problem.group());
    let sequence = &item.sequence;
    let q = &call.inputs.q;
    let rows = Rows::of(q.as_ptr().cast_mut(), q, q.rank() - 1, sequence, sequence.q_start);
    // SAFETY: rows of the block lie inside q and inside the scratch layout.
    unsafe {
        let factor = V::splat(call.query_factor);
        for row in 0..item.rows {
            let (token, head) = ((item.first_row + row) / group, (item.first_row + row) % group);
            let from = rows.address(token, item.kv_head * group + head).cast::<E>();
            let to = scratch.queries.add(row * shape.padded_head_dim);
            pack::widen_row::<V, E>(from, to, shape.head_dim, shape.padded_head_dim);
            let mut i = 0;
            while i < shape.padded_head_dim {
                V::load(to.add(i)).mul(factor).store(to.add(i));
                i += V::LANES;
            }
            let position = sequence.q_offset + token as i64;
            let visible = call.problem.variant.visible(position, sequence.kv_len);
            *scratch.ranges.add(row) = RowRange { start: visible.start as u32, end: visible.end as u32 };
        }
    }
}

/// Scores, softmax and output of all rows of the block against one packed tile.
#[inline(always)]
unsafe fn attend_tile<V: Vector>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    tile: usize,
    valid: Range<usize>,
) {
    let (shape, group) = (&call.shape, call.problem.group());
    let panel = V::LANES * V::COLUMNS;
    let mut row = 0;
    // Register tiles of nearly equal height: 9 rows are 5 and 4, not 6 and 3.
    let blocks = item.rows.div_ceil(V::ROWS);
    for block in 0..blocks {
        let rows = (item.rows - row).div_ceil(blocks - block);
        // SAFETY: rows row..row + rows are rows of the block; panels lie inside the packed tile.
        unsafe {
            let ranges = std::slice::from_raw_parts(scratch.ranges.add(row), rows);
            // What these few rows see of the tile, relative to its first key.
            let mut seen = valid.end..valid.start;
            for range in ranges {
                let visible = range.within(tile, &valid);
                if !visible.is_empty() {
                    seen = seen.start.min(visible.start)..seen.end.max(visible.end);
                }
            }
            if seen.start < seen.end {
                let first = seen.start / panel * panel;
                let last = seen.end.next_multiple_of(V::LANES);
                let mut start = first;
                while start < last {
                    let columns = (last - start).min(panel) / V::LANES;
                    let work = Product {
                        a: scratch.queries.add(row * shape.padded_head_dim),
                        a_stride: shape.padded_head_dim,
                        b: scratch.keys.add(start * shape.padded_head_dim),
                        b_stride: pack::panel_width::<V>(start, valid.end),
                        depth: shape.head_dim,
                        c: scratch.scores.add(start),
                        c_stride: shape.tile_keys,
                        factors: std::ptr::null(),
                    };
                    dispatch::<V, false>(rows, columns, &work);
                    start += panel;
                }
                let mut factors = [1.0f32; softmax::MAX_ROWS];
                for (i, range) in ranges.iter().enumerate() {
                    let index = item.first_row + row + i;
                    let scores = RowScores {
                        scores: scratch.scores.add(i * shape.tile_keys),
                        computed: first..last,
                        visible: range.within(tile, &valid),
                        tile,
                        token: index / group,
                        head: item.kv_head * group + index % group,
                    };
                    let state = &mut *scratch.states.add(row + i);
                    factors[i] = softmax::row::<V>(call, &item.sequence, &scores, state);
                }
                let mut start = 0;
                while start < shape.value_dim {
                    let width = pack::panel_width::<V>(start, shape.value_dim);
                    let work = Product {
                        a: scratch.scores.add(seen.start),
                        a_stride: shape.tile_keys,
                        b: scratch.values.add(start * shape.tile_keys + seen.start * width),
                        b_stride: width,
                        depth: seen.len(),
                        c: scratch.output.add(row * shape.padded_value_dim + start),
                        c_stride: shape.padded_value_dim,
                        factors: factors.as_ptr(),
                    };
                    dispatch::<V, true>(rows, width / V::LANES, &work);
                    start += panel;
                }
            }
        }
        row += rows;
    }
}

/// As [`attend_tile`] for few rows, from keys and values where they lie. `tile` is the tile's first key, what is valid of it, and the end of the
/// item's keys: the next tile is prefetched.
#[inline(always)]
unsafe fn stream_tile<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    (k, v): (&Keys, &Keys),
    (tile, valid, end): (usize, Range<usize>, usize),
) {
    let (shape, group) = (&call.shape, call.problem.group());
    // How far to prefetch: some 8 KiB, which a core reads in about two memory latencies.
    let ahead = (8192 / (shape.head_dim.max(shape.value_dim) * size_of::<E>())).clamp(4, shape.tile_keys);
    let first = tile + valid.start;
    // SAFETY: the scratch layout has room for two tiles' addresses of keys and of values; `ahead` is at most a tile.
    unsafe {
        let entries = 2 * shape.tile_keys;
        let k_addresses = std::slice::from_raw_parts_mut(scratch.addresses, entries);
        let v_addresses = std::slice::from_raw_parts_mut(scratch.addresses.add(entries), entries);
        for (keys, addresses) in [(k, &mut *k_addresses), (v, &mut *v_addresses)] {
            let known = (end - first).min(entries);
            keys.addresses(first, &mut addresses[..known]);
            // Past the end there is nothing to ask for: ask again for the last.
            let last = addresses[known - 1];
            addresses[known..].fill(last);
        }
        let scores = scratch.scores.add(valid.start);
        let work = Dots {
            queries: scratch.queries,
            query_stride: shape.padded_head_dim,
            keys: k_addresses.as_ptr(),
            prefetch: k_addresses.as_ptr(),
            dims: shape.head_dim,
            scores,
            score_stride: shape.tile_keys,
        };
        stream::all_dots::<V, E>(item.rows, valid.len(), ahead, &work);
        let ranges = std::slice::from_raw_parts(scratch.ranges, item.rows);
        let mut factors = [1.0f32; stream::MAX_ROWS];
        for (i, range) in ranges.iter().enumerate() {
            let index = item.first_row + i;
            let row = RowScores {
                scores: scratch.scores.add(i * shape.tile_keys),
                computed: valid.start / V::LANES * V::LANES..valid.end.next_multiple_of(V::LANES),
                visible: range.within(tile, &valid),
                tile,
                token: index / group,
                head: item.kv_head * group + index % group,
            };
            factors[i] = softmax::row::<V>(call, &item.sequence, &row, &mut *scratch.states.add(i));
        }
        let work = Weighted {
            probabilities: scores,
            probability_stride: shape.tile_keys,
            values: v_addresses.as_ptr(),
            depth: valid.len(),
            first: 0,
            output: scratch.output,
            output_stride: shape.padded_value_dim,
            factors: std::ptr::null(),
        };
        stream::all_weighted::<V, E>(item.rows, shape.value_dim, ahead, &mut factors, &work);
    }
}

#[inline(always)]
unsafe fn clear<V: Vector>(shape: &Shape, rows: usize, output: *mut f32, states: *mut State) {
    // SAFETY: `rows` rows of the scratch layout.
    unsafe {
        output.write_bytes(0, rows * shape.padded_value_dim);
        for row in 0..rows {
            states.add(row).write(State::EMPTY);
        }
    }
}

/// Joins one row's split into what earlier splits left. Both ways of running splits, in order by one item and in parallel, join here and in
/// key order: their results have the same bits.
#[inline(always)]
unsafe fn fold_row<V: Vector>(shape: &Shape, total: (*mut f32, &mut State), part: (*const f32, State)) {
    let (joined, total_factor, part_factor) = total.1.join(part.1);
    if part.1 == State::EMPTY {
        return;
    }
    *total.1 = joined;
    // SAFETY: both rows hold padded_value_dim floats.
    unsafe {
        let mut i = 0;
        while i < shape.padded_value_dim {
            let scaled = V::load(total.0.add(i)).mul(V::splat(total_factor));
            V::load(part.0.add(i)).mul_add(V::splat(part_factor), scaled).store(total.0.add(i));
            i += V::LANES;
        }
    }
}

impl Call<'_> {
    /// Whether a block of so few rows reads keys and values where they lie. Batch-invariant rows never do: their sums would run in
    /// another order than those of longer blocks.
    fn streams<V: Vector>(&self, rows: usize) -> bool {
        let whole = |dims: usize| dims.is_multiple_of(V::LANES);
        rows <= self.plan.choice().stream_rows && whole(self.shape.head_dim) && whole(self.shape.value_dim)
    }

    /// The partial state of that row (of the item's sequence and head) and split.
    fn partial(&self, item: &Item, row: usize, split: usize) -> *mut f32 {
        let head = item.sequence.index * self.problem.kv_heads + item.kv_head;
        let row = head * self.partials.rows + item.first_row + row;
        self.partials.data.wrapping_add((row * self.partials.splits + split) * self.shape.partial_floats())
    }
}

#[inline(always)]
unsafe fn store_partials<V: Vector>(call: &Call, item: &Item, scratch: &Scratch) {
    let dims = call.shape.padded_value_dim;
    // SAFETY: the workspace has a partial state for every row and split of the plan.
    unsafe {
        for row in 0..item.rows {
            let to = call.partial(item, row, item.splits.start);
            let state = *scratch.states.add(row);
            to.copy_from_nonoverlapping(scratch.output.add(row * dims), dims);
            *to.add(dims) = state.max;
            *to.add(dims + 1) = state.sum;
        }
    }
}

#[inline(always)]
unsafe fn merge<V: Vector>(call: &Call, item: &Item, scratch: &Scratch) {
    let (shape, dims) = (&call.shape, call.shape.padded_value_dim);
    // SAFETY: as `store_partials`; the splits of this block have all been stored.
    unsafe {
        clear::<V>(shape, item.rows, scratch.output, scratch.states);
        for row in 0..item.rows {
            for split in item.splits.clone() {
                let part = call.partial(item, row, split).cast_const();
                let state = State { max: *part.add(dims), sum: *part.add(dims + 1) };
                let total = (scratch.output.add(row * dims), &mut *scratch.states.add(row));
                fold_row::<V>(shape, total, (part, state));
            }
        }
        write_block::<V>(call, item, scratch.output, scratch.states);
    }
}

/// Adds the sinks, normalises, and writes output and log-sum-exp.
#[inline(always)]
unsafe fn write_block<V: Vector>(call: &Call, item: &Item, output: *const f32, states: *const State) {
    // SAFETY: passed on.
    unsafe {
        match call.out.dims.dtype() {
            DType::F32 => write_rows::<V, f32>(call, item, output, states),
            DType::F16 => write_rows::<V, f16>(call, item, output, states),
            DType::BF16 => write_rows::<V, bf16>(call, item, output, states),
            DType::I32 | DType::Bool => unreachable!("checked: outputs are floating"),
        }
    }
}

#[inline(always)]
unsafe fn write_rows<V: Vector, E: Storage>(
    call: &Call,
    item: &Item,
    output: *const f32,
    states: *const State,
) {
    let (shape, group) = (&call.shape, call.problem.group());
    let leading = call.inputs.q.rank() - 1;
    let rows_of = |written: &Written| {
        Rows::of(written.data, &written.dims, leading, &item.sequence, item.sequence.q_start)
    };
    let out = rows_of(&call.out);
    let lse = call.lse.as_ref().map(rows_of);
    let sinks = call.inputs.attention.sinks.and_then(|sinks| sinks.as_slice::<f32>());
    // SAFETY: each address is a row of an output, written by this item alone.
    unsafe {
        for row in 0..item.rows {
            let token = (item.first_row + row) / group;
            let head = item.kv_head * group + (item.first_row + row) % group;
            let mut state = *states.add(row);
            let mut factor = 1.0;
            if let Some(sinks) = sinks {
                (state, factor, _) = state.join(State::sink(sinks[head]));
            }
            if let Some(lse) = &lse {
                lse.address(token, head).cast::<f32>().write_unaligned(state.lse());
            }
            // An empty row's output is zero: 0 / 1.
            let sum = if state.max == f32::NEG_INFINITY { 1.0 } else { state.sum };
            let (factor, sum) = (V::splat(factor), V::splat(sum));
            let from = output.add(row * shape.padded_value_dim);
            let to = out.address(token, head).cast::<E>();
            let mut i = 0;
            while i < shape.value_dim {
                // Adding 0 turns -0 into 0: whether a row met a tile that it sees nothing of leaves no trace.
                let vector = V::load(from.add(i)).mul(factor).div(sum).add(V::splat(0.0));
                if i + V::LANES <= shape.value_dim {
                    E::store(vector, to.add(i));
                } else {
                    let mut lanes = [0.0f32; 16];
                    vector.store(lanes.as_mut_ptr());
                    for (j, &lane) in lanes.iter().enumerate().take(shape.value_dim - i) {
                        *to.add(i + j) = E::narrow(lane);
                    }
                }
                i += V::LANES;
            }
        }
    }
}
