//! The algorithm, once, over [`Vector`]: tiled attention with a running softmax.
//!
//! An item is a block of query rows of one (sequence, key/value head): tokens times grouped heads, so that every tile of keys and
//! values serves the whole group. It walks its keys tile by tile, in one of two ways: many rows pack the tile ([`tile`]), few
//! rows, of several heads at once, read it where it lies ([`stream`]). Tiles start at multiples of `tile_keys` from key 0 whatever is visible, and
//! rows never mix: a tile that a row sees nothing of changes no bit of it.

use super::address::{Keys, Rows};
use super::amx;
use super::compiled::Compiled;
use super::matrix;
use super::pack;
use super::schedule::Schedule;
use super::stream;
use super::tile;
use super::vector::{Storage, Vector};
use super::verify;
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
    /// Rows of all heads of an item that takes several.
    pub item_rows: usize,
    /// Whether an item may walk several splits and join them itself.
    pub folds: bool,
}

/// One call, as every item sees it.
#[derive(Clone)]
pub(super) struct Call<'a> {
    pub inputs: &'a Inputs<'a>,
    /// What the operands are (the plan's problem may be larger).
    pub problem: Problem,
    pub plan: &'a Plan,
    pub schedule: &'a Schedule<'a>,
    pub compiled: &'static Compiled,
    pub shape: Shape,
    pub out: Written,
    pub lse: Option<Written>,
    pub partials: Partials,
    /// Multiplies dot products: the scale, in base 4, or over the softcap.
    pub score_factor: f32,
    /// The softcap, in base 4.
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

// SAFETY: the raw pointers are to outputs and workspace, which the call has to itself. Items write disjoint rows of outputs and disjoint
// partial states; a partial state is read by the thread that finishes its block's last split, after the schedule's counter (AcqRel)
// has shown it the writes.
unsafe impl Sync for Call<'_> {}

/// One piece of work.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub sequence: Sequence,
    /// Key/value heads: several where the item streams.
    pub heads: Range<usize>,
    /// Rows `first_row..first_row + rows` of each (sequence, key/value head): row r is token r / group, query head r % group of the group.
    pub first_row: usize,
    pub rows: usize,
    pub way: Way,
    /// Keys that some row of the block can see.
    pub keys: Range<usize>,
    /// Splits of the keys that this item walks.
    pub splits: Range<usize>,
    pub task: Task,
}

/// How an item walks its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// [`stream`].
    Stream,
    /// [`verify`].
    Verify,
    /// [`tile`].
    Tile,
    /// [`tile`] with the products of [`matrix`].
    Matrix,
}

impl Way {
    /// What it does with keys and values.
    pub fn in_words(self) -> &'static str {
        match self {
            Way::Stream => "keys and values are read where they lie, heads together",
            Way::Verify => "queries are transposed instead of keys, heads together",
            Way::Tile => "tiles of keys and values are packed",
            Way::Matrix => "tiles of keys and values are packed for the matrix unit",
        }
    }
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

impl Item {
    /// Rows of all heads, head by head: what the scratch holds.
    pub fn all_rows(&self) -> usize {
        self.heads.len() * self.rows
    }

    /// The tokens and the query heads of one of them and those after it.
    pub fn places(&self, row: usize, group: usize) -> Places<'_> {
        let within = self.first_row + row % self.rows;
        let head = self.heads.start + row / self.rows;
        Places {
            item: self,
            group,
            left: self.rows - row % self.rows,
            head,
            token: within / group,
            member: within % group,
        }
    }
}

/// Counts through an item's rows: divisions a row would cost as much as a vector of its scores.
#[derive(Clone)]
pub(super) struct Places<'a> {
    item: &'a Item,
    group: usize,
    /// Rows left of the head.
    left: usize,
    head: usize,
    token: usize,
    member: usize,
}

impl Places<'_> {
    /// The token and the query head of the next row.
    #[inline(always)]
    pub fn next(&mut self) -> (usize, usize) {
        let place = (self.token, self.head * self.group + self.member);
        self.member += 1;
        if self.member == self.group {
            (self.token, self.member) = (self.token + 1, 0);
        }
        self.left -= 1;
        if self.left == 0 {
            *self = self.item.places((self.head + 1 - self.item.heads.start) * self.item.rows, self.group);
        }
        place
    }
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
            item_rows: verify::item_rows(problem, choice).max(stream::ITEM_ROWS),
            folds: split.count > 1 && !split.parallel,
        }
    }

    /// Floats of one partial state.
    pub fn partial_floats(&self) -> usize {
        self.padded_value_dim + 2
    }

    /// Bytes of scratch, a multiple of [`ALIGNMENT`].
    pub fn scratch_bytes(&self) -> usize {
        // Laid out from null: only the size is wanted, nothing is followed.
        Scratch::at(std::ptr::null_mut(), self).1
    }
}

/// What a worker keeps for itself while it runs an item. Rows are those of [`Item::all_rows`].
pub(super) struct Scratch {
    pub queries: *mut f32,
    pub output: *mut f32,
    pub states: *mut State,
    folded_output: *mut f32,
    folded_states: *mut State,
    pub keys: *mut f32,
    pub values: *mut f32,
    pub scores: *mut f32,
    /// Scores of a block of keys, key by key.
    pub turned: *mut f32,
    /// Some keys as f32, or a block to be transposed.
    pub staging: *mut f32,
    /// Two tiles of keys' addresses and two of values'.
    addresses: *mut *const u8,
    pub ranges: *mut RowRange,
}

/// The keys that a row can see by causality, window and length.
#[derive(Clone, Copy)]
pub(super) struct RowRange {
    start: u32,
    end: u32,
}

impl RowRange {
    /// What of the tile's valid keys lies in the range, relative to the tile's first key.
    #[inline(always)]
    pub fn within(&self, tile: usize, valid: &Range<usize>) -> Range<usize> {
        let relative = |key: u32| (key as usize).clamp(tile + valid.start, tile + valid.end) - tile;
        relative(self.start)..relative(self.end)
    }
}

impl Scratch {
    /// Room for two tiles' addresses of keys and of values: this one's and, to be fetched ahead, the next one's.
    pub fn addresses(&self, shape: &Shape) -> [*mut [*const u8]; 2] {
        let entries = 2 * shape.tile_keys;
        [0, entries]
            .map(|first| std::ptr::slice_from_raw_parts_mut(self.addresses.wrapping_add(first), entries))
    }

    /// The parts laid out from `start` on, and the bytes they take.
    fn at(start: *mut u8, shape: &Shape) -> (Scratch, usize) {
        let mut bytes = 0;
        let mut place = |size: usize, count: usize| {
            let part = start.wrapping_add(bytes);
            bytes = (bytes + size * count).next_multiple_of(ALIGNMENT);
            part
        };
        let (rows, tile) = (shape.block_rows.max(shape.item_rows), shape.tile_keys);
        let folded = if shape.folds { rows } else { 0 };
        let scratch = Scratch {
            queries: place(4, rows * shape.padded_head_dim).cast(),
            output: place(4, rows * shape.padded_value_dim).cast(),
            states: place(size_of::<State>(), rows).cast(),
            folded_output: place(4, folded * shape.padded_value_dim).cast(),
            folded_states: place(size_of::<State>(), folded).cast(),
            keys: place(4, tile.max(shape.item_rows) * shape.padded_head_dim).cast(),
            values: place(4, tile * shape.padded_value_dim).cast(),
            scores: place(4, shape.item_rows * tile).cast(),
            turned: place(4, verify::TURNED).cast(),
            staging: place(4, verify::STAGING).cast(),
            addresses: place(size_of::<*const u8>(), 4 * tile).cast(),
            ranges: place(size_of::<RowRange>(), rows).cast(),
        };
        (scratch, bytes)
    }
}

/// Does one item. `PAIRED` code runs bf16 products on pairs; it is for [`Kernel::CpuBf16`](crate::Kernel::CpuBf16).
///
/// # Safety
/// V's CPU features are there. The call's operands were checked, the item belongs to it, no other thread has the item, and
/// `scratch` holds `Shape::scratch_bytes` bytes, aligned, for this thread alone.
#[inline(always)]
pub(super) unsafe fn run_item<V: Vector, const PAIRED: bool>(call: &Call, item: &Item, scratch: *mut u8) {
    let (scratch, _) = Scratch::at(scratch, &call.shape);
    // SAFETY: passed on.
    unsafe {
        match (item.task, call.problem.dtype) {
            (Task::Merge, _) => merge::<V>(call, item, &scratch),
            (_, DType::F32) => attend::<V, f32, false>(call, item, &scratch),
            (_, DType::F16) => attend::<V, f16, false>(call, item, &scratch),
            (_, DType::BF16) => attend::<V, bf16, PAIRED>(call, item, &scratch),
            (_, DType::I32 | DType::Bool) => unreachable!("checked: queries are floating"),
        }
    }
}

#[inline(always)]
unsafe fn attend<V: Vector, E: Storage, const PAIRED: bool>(call: &Call, item: &Item, scratch: &Scratch) {
    let shape = &call.shape;
    let split_keys = call.plan.split().keys;
    let (rows, fold) = (item.all_rows(), item.splits.len() > 1);
    // Many rows are loaded on their way through the first tile, and written on their way through the last: memory works meanwhile.
    let passes = matches!(item.way, Way::Tile | Way::Matrix) && !item.keys.is_empty();
    let writes = passes && !fold && item.task == Task::Attend;
    let mut ends = tile::Ends { loads: passes, writes: false };
    // SAFETY: an item has at most `block_rows` rows, or `item_rows` where it takes several heads, and tiles have `tile_keys` keys: every offset
    // below stays inside the scratch layout, which has room for the larger of both, or inside the checked operands. The matrix unit is only
    // planned for, and run, where it is available.
    unsafe {
        if !passes {
            load_queries::<V, E, PAIRED>(call, item, scratch, 0..rows);
        }
        clear(shape, rows, scratch.output, scratch.states);
        if fold {
            clear(shape, rows, scratch.folded_output, scratch.folded_states);
        }
        if item.way == Way::Verify {
            verify::turn_queries::<V, PAIRED>(call, item, scratch);
        }
        let _tiles = (item.way == Way::Matrix).then(|| amx::Tiles::configure());
        let k = Keys::of(call.inputs, &call.inputs.k, &item.sequence, item.heads.start);
        let v = Keys::of(call.inputs, &call.inputs.v, &item.sequence, item.heads.start);
        for split in item.splits.clone() {
            let start = item.keys.start.max(split * split_keys);
            let end = item.keys.end.min((split + 1).saturating_mul(split_keys));
            let mut first = start / shape.tile_keys * shape.tile_keys;
            while first < end {
                let valid = start.max(first) - first..end.min(first + shape.tile_keys) - first;
                let (keys, place) = ((&k, &v), (first, valid, end));
                match item.way {
                    Way::Stream => stream::attend_tile::<V, E, PAIRED>(call, item, scratch, keys, place),
                    Way::Verify => verify::attend_tile::<V, E, PAIRED>(call, item, scratch, keys, place),
                    Way::Tile | Way::Matrix => {
                        ends.writes = writes && first + shape.tile_keys >= end;
                        tile::attend_tile::<V, E, PAIRED>(call, item, scratch, keys, place, &ends);
                        ends.loads = false;
                    }
                }
                first += shape.tile_keys;
            }
            if fold {
                for row in 0..rows {
                    let offset = row * shape.padded_value_dim;
                    fold_row::<V>(
                        shape,
                        (scratch.folded_output.add(offset), &mut *scratch.folded_states.add(row)),
                        (scratch.output.add(offset), *scratch.states.add(row)),
                    );
                }
                clear(shape, rows, scratch.output, scratch.states);
            }
        }
        match item.task {
            Task::AttendPartial => store_partials(call, item, scratch),
            _ if writes => {}
            _ if fold => write_block::<V>(call, item, scratch.folded_output, scratch.folded_states, 0..rows),
            _ => write_block::<V>(call, item, scratch.output, scratch.states, 0..rows),
        }
    }
}

/// Queries of these rows in f32 (or, to be paired, as they are); and what each row can see.
///
/// # Safety
/// As [`run_item`], for rows of the item.
#[inline(always)]
pub(super) unsafe fn load_queries<V: Vector, E: Storage, const PAIRED: bool>(
    call: &Call,
    item: &Item,
    scratch: &Scratch,
    taken: Range<usize>,
) {
    let (shape, group) = (&call.shape, call.problem.group());
    let sequence = &item.sequence;
    let q = &call.inputs.q;
    let rows = Rows::of(q.as_ptr().cast_mut(), q, q.rank() - 1, sequence, sequence.q_start);
    // SAFETY: rows of the item lie inside q and inside the scratch layout, where they are padded to whole vectors and steps of the matrix unit.
    unsafe {
        ahead::<V>(item, &taken, group, &rows, shape.head_dim * size_of::<E>());
        let mut places = item.places(taken.start, group);
        for row in taken {
            let (token, head) = places.next();
            let from = rows.address(token, head).cast::<E>();
            let to = scratch.queries.add(row * shape.padded_head_dim);
            if PAIRED {
                to.cast::<E>().copy_from_nonoverlapping(from, shape.head_dim);
                // The matrix unit takes whole steps.
                let whole = shape.head_dim.next_multiple_of(matrix::DEPTH);
                to.cast::<E>().add(shape.head_dim).write_bytes(0, whole - shape.head_dim);
            } else {
                pack::widen_row::<V, E>(from, to, shape.head_dim, shape.padded_head_dim);
            }
            let position = sequence.q_offset + token as i64;
            let visible = call.problem.variant.visible(position, sequence.kv_len);
            *scratch.ranges.add(row) = RowRange { start: visible.start as u32, end: visible.end as u32 };
        }
    }
}

/// Rows of queries, and of outputs, that are fetched ahead: each is touched once, and they may lie pages apart.
const ROWS_AHEAD: usize = 8;

/// Fetches rows of the item that come after `taken`, of `bytes` each; first of all those too.
///
/// # Safety
/// V's CPU features are there.
#[inline(always)]
unsafe fn ahead<V: Vector>(item: &Item, taken: &Range<usize>, group: usize, rows: &Rows, bytes: usize) {
    let last = item.all_rows().min(taken.end + ROWS_AHEAD);
    let first = if taken.start == 0 { 0 } else { last.min(taken.start + ROWS_AHEAD) };
    let mut places = item.places(first, group);
    for _ in first..last {
        let (token, head) = places.next();
        for offset in (0..bytes).step_by(64) {
            // SAFETY: prefetching has no effect but on caches.
            unsafe { V::prefetch(rows.address(token, head).wrapping_add(offset)) };
        }
    }
}

unsafe fn clear(shape: &Shape, rows: usize, output: *mut f32, states: *mut State) {
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
    if part.1 == State::EMPTY {
        return;
    }
    let (joined, total_factor, part_factor) = total.1.join(part.1);
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
    /// The partial state of that row of the item and that split.
    fn partial(&self, item: &Item, row: usize, split: usize) -> *mut f32 {
        let head = item.sequence.index * self.problem.kv_heads + item.heads.start + row / item.rows;
        let row = head * self.partials.rows + item.first_row + row % item.rows;
        self.partials.data.wrapping_add((row * self.partials.splits + split) * self.shape.partial_floats())
    }
}

unsafe fn store_partials(call: &Call, item: &Item, scratch: &Scratch) {
    let dims = call.shape.padded_value_dim;
    // SAFETY: the workspace has a partial state for every row and split of the plan, of which the call has no more; no other item has this
    // split of these rows.
    unsafe {
        for row in 0..item.all_rows() {
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
        clear(shape, item.all_rows(), scratch.output, scratch.states);
        for row in 0..item.all_rows() {
            for split in item.splits.clone() {
                let part = call.partial(item, row, split).cast_const();
                let state = State { max: *part.add(dims), sum: *part.add(dims + 1) };
                let total = (scratch.output.add(row * dims), &mut *scratch.states.add(row));
                fold_row::<V>(shape, total, (part, state));
            }
        }
        write_block::<V>(call, item, scratch.output, scratch.states, 0..item.all_rows());
    }
}

/// Adds the sinks to these rows, normalises, and writes output and log-sum-exp.
///
/// # Safety
/// As [`run_item`], for rows of the item.
#[inline(always)]
pub(super) unsafe fn write_block<V: Vector>(
    call: &Call,
    item: &Item,
    output: *const f32,
    states: *const State,
    rows: Range<usize>,
) {
    // SAFETY: passed on.
    unsafe {
        match call.out.dims.dtype() {
            DType::F32 => write_rows::<V, f32>(call, item, output, states, rows),
            DType::F16 => write_rows::<V, f16>(call, item, output, states, rows),
            DType::BF16 => write_rows::<V, bf16>(call, item, output, states, rows),
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
    rows: Range<usize>,
) {
    let (shape, group) = (&call.shape, call.problem.group());
    let leading = call.inputs.q.rank() - 1;
    let rows_of = |written: &Written| {
        Rows::of(written.data, &written.dims, leading, &item.sequence, item.sequence.q_start)
    };
    let out = rows_of(&call.out);
    let lse = call.lse.as_ref().map(rows_of);
    let sinks = call.inputs.attention.sinks.and_then(|sinks| sinks.as_slice::<f32>());
    // SAFETY: each address is a row of an output, whose elements were checked to be apart from each other and from everything that is read, and
    // is written by this item alone. Output rows in the scratch are padded to whole vectors.
    unsafe {
        ahead::<V>(item, &rows, group, &out, shape.value_dim * size_of::<E>());
        let mut places = item.places(rows.start, group);
        for row in rows {
            let (token, head) = places.next();
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
            let factor = V::splat(factor / sum);
            let from = output.add(row * shape.padded_value_dim);
            let to = out.address(token, head).cast::<E>();
            let mut i = 0;
            while i < shape.value_dim {
                // Adding 0 turns -0 into 0: whether a row met a tile that it sees nothing of leaves no trace.
                let vector = V::load(from.add(i)).mul_add(factor, V::splat(0.0));
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
