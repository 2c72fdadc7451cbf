//! `regard.PageAllocator` and `regard.Step`: who owns which page of a paged cache, and one step of
//! continuous batching.

use crate::array::{Array, Place};
use crate::buffer::Buffer;
use crate::errors::{Fault, argument};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PySlice, PyType};
use regard::DType;
use regard::paged::{self, SequenceId};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A sequence of a `PageAllocator`. Hashable; ids are not used again in a process.
#[pyclass(frozen, eq, hash, module = "regard")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sequence {
    id: SequenceId,
}

#[pymethods]
impl Sequence {
    fn __repr__(&self) -> String {
        format!("<regard.Sequence {:?}>", self.id)
    }
}

/// Slots of appended tokens. Do `copy` first, then write the tokens.
#[pyclass(frozen, module = "regard")]
pub struct Appended {
    /// (from block, to block, slots): copy the first slots of a block, keys and values of every
    /// layer.
    #[pyo3(get)]
    copy: Option<(usize, usize, usize)>,
    positions: (usize, usize),
    ranges: Vec<paged::SlotRange>,
    block_size: usize,
}

#[pymethods]
impl Appended {
    /// Positions of the new tokens in their sequence.
    #[getter]
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        range(py, self.positions)
    }

    /// (block, slots, tokens) for each block, with slots and tokens as `range`.
    #[getter]
    fn ranges<'py>(&self, py: Python<'py>) -> PyResult<Vec<Placed<'py>>> {
        let placed = |run: &paged::SlotRange| {
            let slots = range(py, (run.slots.start, run.slots.end))?;
            Ok((run.block, slots, range(py, (run.tokens.start, run.tokens.end))?))
        };
        self.ranges.iter().map(placed).collect()
    }

    /// Slot of each new token: block * block_size + slot.
    #[getter]
    fn slots(&self) -> Vec<usize> {
        let run = |run: &paged::SlotRange| {
            let first = run.block * self.block_size;
            first + run.slots.start..first + run.slots.end
        };
        self.ranges.iter().flat_map(run).collect()
    }
}

/// A block, its slots, and the tokens that go there.
type Placed<'py> = (usize, Bound<'py, PyAny>, Bound<'py, PyAny>);

fn range<'py>(py: Python<'py>, bounds: (usize, usize)) -> PyResult<Bound<'py, PyAny>> {
    py.import("builtins")?.getattr("range")?.call1(bounds)
}

/// Hands out the blocks of a paged cache to sequences, and shares them by reference counts.
#[pyclass(frozen, module = "regard")]
pub struct PageAllocator {
    pages: Mutex<paged::PageAllocator>,
}

impl PageAllocator {
    fn lock(&self) -> MutexGuard<'_, paged::PageAllocator> {
        // The allocator's methods leave it consistent if they panic.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ids(sequences: &[Bound<'_, Sequence>]) -> Vec<SequenceId> {
    sequences.iter().map(|sequence| sequence.get().id).collect()
}

/// The integers of an array of the caller's: contiguous, 32 bits, of the host.
fn host_ints(array: &mut Array) -> Result<&mut [i32], Fault> {
    let name = array.name;
    if array.place != Place::Cpu || array.dtype != DType::I32 {
        let found = format!("{} on {}", array.dtype, array.place);
        return Err(argument(name, found, "i32 on cpu"));
    }
    let shape = array.shape();
    let contiguous = crate::array::contiguous(shape);
    let same = |i: usize| shape[i] <= 1 || array.strides()[i] == contiguous[i];
    if !(0..shape.len()).all(same) {
        let found = format!("a view with strides {:?}", array.strides());
        return Err(argument(name, found, "contiguous"));
    }
    let count = shape.iter().product();
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: so many aligned integers are at `data`, which the array holds; they may be written
    // (`Array::read_mut`), and the GIL keeps other writers of Python's out.
    Ok(unsafe { std::slice::from_raw_parts_mut(array.data.cast::<i32>(), count) })
}

#[pymethods]
impl PageAllocator {
    #[new]
    fn new(blocks: usize, block_size: usize) -> PyResult<PageAllocator> {
        let pages = paged::PageAllocator::new(blocks, block_size).map_err(Fault)?;
        Ok(PageAllocator { pages: Mutex::new(pages) })
    }

    /// Slots per block.
    #[getter]
    fn block_size(&self) -> usize {
        self.lock().block_size()
    }

    /// Blocks of the pool.
    #[getter]
    fn total_blocks(&self) -> usize {
        self.lock().total_blocks()
    }

    /// Blocks that no sequence holds.
    #[getter]
    fn free_blocks(&self) -> usize {
        self.lock().free_blocks()
    }

    /// Blocks that at least one sequence holds.
    #[getter]
    fn used_blocks(&self) -> usize {
        self.lock().used_blocks()
    }

    /// Sequences that are alive.
    #[getter]
    fn sequences(&self) -> usize {
        self.lock().sequences()
    }

    /// A new sequence without tokens.
    fn create(&self) -> Sequence {
        Sequence { id: self.lock().create() }
    }

    /// A new sequence with all tokens of another, or its first `length`, sharing their blocks.
    #[pyo3(signature = (sequence, length = None))]
    fn fork(&self, sequence: &Bound<'_, Sequence>, length: Option<usize>) -> PyResult<Sequence> {
        let (mut pages, id) = (self.lock(), sequence.get().id);
        let forked = match length {
            Some(length) => pages.fork_at(id, length),
            None => pages.fork(id),
        };
        Ok(Sequence { id: forked.map_err(Fault)? })
    }

    /// Makes room for more tokens and returns their slots.
    fn append(&self, sequence: &Bound<'_, Sequence>, tokens: usize) -> PyResult<Appended> {
        let mut pages = self.lock();
        let block_size = pages.block_size();
        let appended = pages.append(sequence.get().id, tokens).map_err(Fault)?;
        let positions = appended.positions();
        Ok(Appended {
            copy: appended.copy.map(|copy| (copy.from, copy.to, copy.slots)),
            positions: (positions.start, positions.end),
            ranges: appended.ranges().collect(),
            block_size,
        })
    }

    /// Blocks that appending so many tokens would take now.
    fn blocks_needed(&self, sequence: &Bound<'_, Sequence>, tokens: usize) -> PyResult<usize> {
        Ok(self.lock().blocks_needed(sequence.get().id, tokens).map_err(Fault)?)
    }

    /// Drops the tokens from `length` on.
    fn truncate(&self, sequence: &Bound<'_, Sequence>, length: usize) -> PyResult<()> {
        Ok(self.lock().truncate(sequence.get().id, length).map_err(Fault)?)
    }

    /// Releases the blocks that end before a position; returns how many became free.
    fn release_before(&self, sequence: &Bound<'_, Sequence>, position: usize) -> PyResult<usize> {
        Ok(self.lock().release_before(sequence.get().id, position).map_err(Fault)?)
    }

    /// Ends a sequence; blocks that no other one shares become free.
    fn free(&self, sequence: &Bound<'_, Sequence>) -> PyResult<()> {
        Ok(self.lock().free(sequence.get().id).map_err(Fault)?)
    }

    /// Tokens of a sequence.
    fn length(&self, sequence: &Bound<'_, Sequence>) -> PyResult<usize> {
        Ok(self.lock().len(sequence.get().id).map_err(Fault)?)
    }

    /// Blocks of a sequence in order, -1 where one was released.
    fn blocks(&self, sequence: &Bound<'_, Sequence>) -> PyResult<Vec<i32>> {
        Ok(self.lock().blocks(sequence.get().id).map_err(Fault)?.to_vec())
    }

    /// Sequences that hold a block.
    fn holders(&self, block: usize) -> PyResult<usize> {
        Ok(self.lock().holders(block).map_err(Fault)?)
    }

    /// The block table of these sequences, `[B, max_blocks]`: written to `out`, or a new buffer as
    /// wide as the longest needs.
    #[pyo3(signature = (sequences, out = None))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        sequences: Vec<Bound<'py, Sequence>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = ids(&sequences);
        let pages = self.lock();
        if let Some(out) = out {
            let mut array = Array::read_mut("out", &out)?;
            pages.block_table(&ids, host_ints(&mut array)?).map_err(Fault)?;
            return Ok(out);
        }
        let width = pages.longest_table(&ids).map_err(Fault)?;
        let mut table = vec![-1; ids.len() * width];
        pages.block_table(&ids, &mut table).map_err(Fault)?;
        Ok(Bound::new(py, Buffer::from_ints(&table, &[ids.len(), width])?)?.into_any())
    }

    /// The lengths of these sequences, `[B]`: written to `out`, or a new buffer.
    #[pyo3(signature = (sequences, out = None))]
    fn kv_lens<'py>(
        &self,
        py: Python<'py>,
        sequences: Vec<Bound<'py, Sequence>>,
        out: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ids = ids(&sequences);
        let pages = self.lock();
        if let Some(out) = out {
            let mut array = Array::read_mut("out", &out)?;
            pages.kv_lens(&ids, host_ints(&mut array)?).map_err(Fault)?;
            return Ok(out);
        }
        let mut lens = vec![0; ids.len()];
        pages.kv_lens(&ids, &mut lens).map_err(Fault)?;
        Ok(Bound::new(py, Buffer::from_ints(&lens, &[ids.len()])?)?.into_any())
    }

    fn __repr__(&self) -> String {
        let pages = self.lock();
        let (used, total) = (pages.used_blocks(), pages.total_blocks());
        format!("<regard.PageAllocator: {used} of {total} blocks of {} slots>", pages.block_size())
    }
}

/// The sequences that run together in one step of an engine. Append to it, finish it, run, clear
/// it.
#[pyclass(frozen, module = "regard")]
pub struct Step {
    step: Mutex<paged::Step>,
}

impl Step {
    fn lock(&self) -> MutexGuard<'_, paged::Step> {
        // As `PageAllocator::lock`.
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers below 2^31 as a buffer.
fn buffer(numbers: &[u32]) -> PyResult<Buffer> {
    let ints: Result<Vec<i32>, _> = numbers.iter().map(|&number| i32::try_from(number)).collect();
    match ints {
        Ok(ints) => Buffer::from_ints(&ints, &[ints.len()]),
        Err(_) => Err(argument("slots", "2^31 or more", "a pool below 2^31 slots").into()),
    }
}

#[pymethods]
impl Step {
    #[new]
    fn new() -> Step {
        Step { step: Mutex::new(paged::Step::new()) }
    }

    /// Takes all sequences out.
    fn clear(&self) {
        self.lock().clear();
    }

    /// Adds a sequence that brings so many new tokens, and takes the pages for them.
    fn append(
        &self,
        pages: &Bound<'_, PageAllocator>,
        sequence: &Bound<'_, Sequence>,
        tokens: usize,
    ) -> PyResult<()> {
        let mut pages = pages.get().lock();
        Ok(self.lock().append(&mut pages, sequence.get().id, tokens).map_err(Fault)?)
    }

    /// Writes the block table: the last thing before the step runs.
    fn finish(&self, pages: &Bound<'_, PageAllocator>) -> PyResult<()> {
        Ok(self.lock().finish(&pages.get().lock()).map_err(Fault)?)
    }

    /// New tokens of all sequences: the rows of q.
    #[getter]
    fn tokens(&self) -> usize {
        self.lock().tokens()
    }

    /// New tokens of the sequence that has the most: `max_query_len` of attention.
    #[getter]
    fn max_query_len(&self) -> usize {
        self.lock().max_query_len()
    }

    /// `[B + 1]`: rows of each sequence.
    #[getter]
    fn cu_seqlens_q(&self) -> PyResult<Buffer> {
        let step = self.lock();
        Buffer::from_ints(step.cu_seqlens_q(), &[step.cu_seqlens_q().len()])
    }

    /// `[B]`: keys of each sequence, the new ones included.
    #[getter]
    fn kv_lens(&self) -> PyResult<Buffer> {
        let step = self.lock();
        Buffer::from_ints(step.kv_lens(), &[step.kv_lens().len()])
    }

    /// `[B, max_blocks]`.
    #[getter]
    fn block_table(&self) -> PyResult<Buffer> {
        let step = self.lock();
        let batch = step.sequences().len();
        let width = step.block_table().len().checked_div(batch).unwrap_or(0);
        Buffer::from_ints(step.block_table(), &[batch, width])
    }

    /// `[B]`: the group of sequences that share their first pages, -1 for none: `prefix_groups` of
    /// `attention`.
    #[getter]
    fn prefix_groups(&self) -> PyResult<Buffer> {
        let step = self.lock();
        Buffer::from_ints(step.prefix_groups(), &[step.prefix_groups().len()])
    }

    /// `[B]`: keys that the sequences of each group share: `prefix_lens` of `attention`.
    #[getter]
    fn prefix_lens(&self) -> PyResult<Buffer> {
        let step = self.lock();
        Buffer::from_ints(step.prefix_lens(), &[step.prefix_lens().len()])
    }

    /// Whether some sequences share their first pages, so that groups save reads.
    #[getter]
    fn has_prefix_groups(&self) -> bool {
        self.lock().has_prefix_groups()
    }

    /// `[tokens]`: position of each new token in its sequence.
    #[getter]
    fn positions(&self) -> PyResult<Buffer> {
        buffer(self.lock().positions())
    }

    /// `[tokens]`: slot of each new token, block * block_size + slot.
    #[getter]
    fn slots(&self) -> PyResult<Buffer> {
        buffer(self.lock().slots())
    }

    /// (from block, to block, slots) to copy in this order before any token is written.
    #[getter]
    fn copies(&self) -> Vec<(usize, usize, usize)> {
        self.lock().copies().iter().map(|copy| (copy.from, copy.to, copy.slots)).collect()
    }

    /// All tables in one array, i32 `[n]`, so that they reach a device in one copy: `tables` finds
    /// them there.
    #[getter]
    fn packed(&self) -> PyResult<Buffer> {
        let step = self.lock();
        if step.packed().is_empty() {
            return Err(argument("step", "not finished", "a step after `finish`").into());
        }
        Buffer::from_ints(step.packed(), &[step.packed().len()])
    }

    /// Views of the tables in `packed`, a copy of `Step.packed` in any memory: a dict with
    /// `cu_seqlens_q`, `kv_lens`, `block_table`, `prefix_groups` and `prefix_lens`, by the names
    /// that `attention` has for them. They are slices of the array, of its library.
    fn tables<'py>(&self, packed: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
        let layout = self.lock().table_layout();
        let py = packed.py();
        let shape = packed.getattr("shape")?.extract::<Vec<usize>>()?;
        if shape != [layout.len()] {
            let allowed = format!("[{}], as Step.packed has", layout.len());
            return Err(argument("packed", format!("of shape {shape:?}"), allowed).into());
        }
        let part = |range: std::ops::Range<usize>| {
            packed.get_item(PySlice::new(py, range.start as isize, range.end as isize, 1))
        };
        let tables = PyDict::new(py);
        tables.set_item("cu_seqlens_q", part(layout.cu_seqlens_q())?)?;
        tables.set_item("kv_lens", part(layout.kv_lens())?)?;
        let block_table = part(layout.block_table())?;
        let rows = (layout.sequences, layout.max_blocks);
        tables.set_item("block_table", block_table.call_method1("reshape", (rows,))?)?;
        tables.set_item("prefix_groups", part(layout.prefix_groups())?)?;
        tables.set_item("prefix_lens", part(layout.prefix_lens())?)?;
        Ok(tables)
    }
}

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let classes: [Bound<'_, PyType>; 4] = {
        let py = module.py();
        [
            py.get_type::<Sequence>(),
            py.get_type::<Appended>(),
            py.get_type::<PageAllocator>(),
            py.get_type::<Step>(),
        ]
    };
    for class in classes {
        module.add(class.name()?, &class)?;
    }
    Ok(())
}
