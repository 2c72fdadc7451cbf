//! `regard.Plan`, and running a plan on operands.

use crate::array::{Array, Place};
use crate::device;
use crate::errors::{Fault, argument};
use crate::framework::{self, Framework};
use crate::openmp::OpenMp;
use crate::operands::{self, Call, Fixed, Main, Results, Takes};
use crate::step::{Shared, Step};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};
use regard::cpu::{Executor, Inline, Threads};
use regard::cuda::{DeviceMemory, Prepared};
use regard::{DType, Device, Host, Machine, Problem};
use std::sync::{Mutex, PoisonError};

/// A plan, and memory to run it with.
pub struct Planned {
    /// The plan.
    pub plan: regard::Plan,
    /// Host workspaces that no run uses now: one, unless runs overlapped.
    idle: Mutex<Vec<Vec<u8>>>,
    /// Shared by the layers of a step.
    step: Step,
}

/// The error about a device that regard has no backend for here.
fn unsupported(place: Place) -> PyErr {
    argument("q", format!("on {place}"), "cpu or cuda").into()
}

/// The machine that a place belongs to.
fn machine(place: Place, threads: Option<usize>) -> PyResult<Machine> {
    match place {
        Place::Cpu => {
            let host = Machine::host().map_err(Fault)?;
            match threads {
                Some(0) => Err(argument("threads", 0, "1 or more").into()),
                Some(threads) => Ok(host.with_threads(threads)),
                None => Ok(host),
            }
        }
        _ if threads.is_some() => {
            Err(argument("threads", "given", "threads for plans of the CPU only").into())
        }
        Place::Cuda(ordinal) => Ok(crate::device::gpu(ordinal).map_err(Fault)?.machine().clone()),
        Place::Other(_) => Err(unsupported(place)),
    }
}

/// The problem that a call poses, for results of this type.
///
/// # Errors
/// If an operand breaks the contract.
pub fn problem(call: &Call, out_dtype: DType, lse: bool) -> PyResult<Problem> {
    let posed = match call.place() {
        // SAFETY: all arrays are where q is (`Call::read`), and outlive the check.
        Place::Cpu => unsafe {
            call.inputs::<Host>().and_then(|inputs| Problem::from_inputs(&inputs, out_dtype, lse))
        },
        // SAFETY: as above.
        Place::Cuda(_) => unsafe {
            call.inputs::<regard::cuda::DeviceMemory>()
                .and_then(|inputs| Problem::from_inputs(&inputs, out_dtype, lse))
        },
        place @ Place::Other(_) => return Err(unsupported(place)),
    };
    let mut problem = posed.map_err(Fault)?;
    if let Some(bound) = call.choices.max_query_len {
        problem.query_len = bound;
    }
    if let Some(bound) = call.choices.max_kv_len {
        problem.kv_len = bound;
    }
    Ok(problem)
}

impl Planned {
    /// Plans a problem for the machine that a place belongs to.
    ///
    /// # Errors
    /// If no kernel runs it there.
    pub fn new(problem: &Problem, place: Place, threads: Option<usize>) -> PyResult<Planned> {
        let plan = regard::Plan::new(problem, &machine(place, threads)?).map_err(Fault)?;
        Ok(Planned { plan, idle: Mutex::new(Vec::new()), step: Step::default() })
    }

    /// Runs the plan, without the GIL. On a GPU the run is queued on `stream`.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan.
    pub fn run(&self, py: Python<'_>, call: &Call, results: &Results, stream: u64) -> PyResult<()> {
        expect_places(call, results)?;
        match call.place() {
            Place::Cpu => self.run_on_host(py, call, results),
            Place::Cuda(ordinal) => self.run_on_gpu(py, call, results, (ordinal, stream)),
            Place::Other(_) => Err(unsupported(call.place())),
        }
    }

    fn run_on_host(&self, py: Python<'_>, call: &Call, results: &Results) -> PyResult<()> {
        // SAFETY: all arrays are in host memory, which `call` and `results` hold until the run is
        // over. That no other thread writes it meanwhile is the caller's promise, as with any array
        // library.
        let (inputs, mut outputs) = unsafe {
            (call.inputs::<Host>().map_err(Fault)?, results.outputs::<Host>().map_err(Fault)?)
        };
        let (plan, executor, mapped) = (&self.plan, self.executor(call), call.extra.mapped);
        let result = py.detach(|| {
            self.with_host_workspace(|memory| match mapped {
                true => {
                    self.step.expect_map(plan, &inputs, &outputs, memory)?;
                    regard::cpu::run_mapped(plan, &inputs, &mut outputs, memory, executor)
                }
                false => regard::cpu::run(plan, &inputs, &mut outputs, memory, executor),
            })
        });
        Ok(result.map_err(Fault)?)
    }

    /// The threads of a call on the CPU.
    fn executor(&self, call: &Call) -> &'static dyn Executor {
        let threads = &self.plan.machine().device;
        match call.q.framework {
            _ if matches!(threads, Device::Cpu(facts) if facts.threads == 1) => &Inline,
            Framework::Torch => &OpenMp,
            _ => &Threads,
        }
    }

    /// Calls `work` with host memory that no other run uses.
    fn with_host_workspace<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut workspace = taken.unwrap_or_else(|| vec![0; self.plan.workspace_bytes()]);
        let result = work(&mut workspace);
        idle().push(workspace);
        result
    }

    /// Computes what the layers of a step share, without the GIL. On a GPU it is queued on
    /// `stream`, and left in a workspace of the plan's own.
    ///
    /// # Errors
    /// As [`Planned::run`].
    fn share(
        &self,
        py: Python<'_>,
        call: &Call,
        results: &Results,
        stream: u64,
        shared: Shared,
    ) -> PyResult<()> {
        expect_places(call, results)?;
        match call.place() {
            Place::Cpu => {
                // SAFETY: as for a run.
                let (inputs, outputs) = unsafe {
                    (
                        call.inputs::<Host>().map_err(Fault)?,
                        results.outputs::<Host>().map_err(Fault)?,
                    )
                };
                let (plan, executor) = (&self.plan, self.executor(call));
                let result = py.detach(|| {
                    self.with_host_workspace(|memory| {
                        self.step.share_on_host(plan, &inputs, &outputs, memory, executor, shared)
                    })
                });
                Ok(result.map_err(Fault)?)
            }
            Place::Cuda(ordinal) => {
                let in_order = call.frees_in_stream_order() && results.frees_in_stream_order();
                // SAFETY: as for a run.
                let (inputs, outputs) = unsafe {
                    (
                        call.inputs::<DeviceMemory>().map_err(Fault)?,
                        results.outputs::<DeviceMemory>().map_err(Fault)?,
                    )
                };
                let result = py.detach(|| -> Result<(), Fault> {
                    let place = (ordinal, stream);
                    self.step.share_on_gpu(&self.plan, &inputs, &outputs, place, shared)?;
                    if in_order { Ok(()) } else { Ok(device::synchronize(ordinal, stream)?) }
                });
                Ok(result?)
            }
            Place::Other(_) => Err(unsupported(call.place())),
        }
    }

    fn run_on_gpu(
        &self,
        py: Python<'_>,
        call: &Call,
        results: &Results,
        (ordinal, stream): (i32, u64),
    ) -> PyResult<()> {
        // SAFETY: all arrays are in this GPU's memory, which is freed in the order of the stream,
        // or the stream is waited for below.
        let (inputs, mut outputs) = unsafe {
            (
                call.inputs::<DeviceMemory>().map_err(Fault)?,
                results.outputs::<DeviceMemory>().map_err(Fault)?,
            )
        };
        let in_order = call.frees_in_stream_order() && results.frees_in_stream_order();
        let plan = &self.plan;
        let prepared = Prepared { schedule: call.extra.scheduled, tile_map: call.extra.mapped };
        let result = py.detach(|| -> Result<(), Fault> {
            let gpu = device::gpu(ordinal)?;
            if prepared != Prepared::default() {
                let place = (ordinal, stream);
                self.step.run_on_gpu(plan, &inputs, &mut outputs, place, prepared)?;
                return if in_order { Ok(()) } else { Ok(device::synchronize(ordinal, stream)?) };
            }
            let bytes = plan.workspace_bytes();
            device::with_workspace(ordinal, stream, bytes, |workspace| {
                // SAFETY: the stream is of this GPU (`framework::stream`). The workspace is the
                // stream's, and its counters are zero between runs.
                unsafe {
                    let stream = device::handle(stream);
                    gpu.run_raw(plan, stream, &inputs, &mut outputs, workspace)
                }
            })?;
            if !in_order {
                device::synchronize(ordinal, stream)?;
            }
            Ok(())
        });
        Ok(result?)
    }
}

/// An error unless results are where the operands are.
fn expect_places(call: &Call, results: &Results) -> PyResult<()> {
    operands::expect_place(&results.out, call.place(), "as q")?;
    if let Some(lse) = &results.lse {
        operands::expect_place(lse, call.place(), "as q")?;
    }
    Ok(())
}

/// Attention of arrays like these on their device: made once, run many times without
/// allocating.
///
/// Arguments are those of `attention`, without `out` and `stream`; `lse` is whether runs write
/// it. Arrays are examples: their lengths are upper bounds (`max_query_len` and `max_kv_len` set
/// others). Numbers (scale, causal, window, chunk, softcap, key_stride, layouts) are fixed for all
/// runs.
///
/// Any number of threads may run a plan at once. On a GPU, plans that run on one stream share its
/// workspace, which regard keeps: graphs that were captured on one stream are replayed one at a
/// time.
#[pyclass(frozen, module = "regard")]
pub struct Plan {
    planned: Planned,
    fixed: Fixed,
    place: Place,
}

const NEW: Takes = Takes { function: "Plan", fixed: true, threads: true, ..Takes::NOTHING };
const RUN: Takes = Takes { function: "Plan.run", stream: true, prepared: true, ..Takes::NOTHING };
const SCHEDULE: Takes = Takes { function: "Plan.schedule", stream: true, ..Takes::NOTHING };
const MAP_MASK: Takes = Takes { function: "Plan.map_mask", stream: true, ..Takes::NOTHING };

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(
        signature = (q, k, v, **options),
        text_signature = "(q, k, v, *, value_dim=None, scale=None, causal=False, window=None, \
        chunk=None, softcap=None, q_offset=None, key_offset=None, key_stride=None, \
        mask=None, alibi_slopes=None, sinks=None, \
        tree_mask=None, \
        kv_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, \
        k_scales=None, v_scales=None, rotary_k=None, key_indices=None, key_counts=None, \
        page_indices=None, page_list_lens=None, page_numbers=None, \
        second_k=None, second_v=None, second_k_scales=None, second_v_scales=None, \
        second_indices=None, second_counts=None, \
        prefix_groups=None, prefix_lens=None, indices_are_slots=False, \
        kv_format=None, k_format=None, v_format=None, \
        batch_invariant=False, layout='bshd', kv_layout='nhd', max_query_len=None, \
        max_kv_len=None, out_dtype=None, lse=False, threads=None)"
    )]
    fn new(
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Plan> {
        let call = Call::read(NEW, Main { q, k, v }, options, Fixed::default())?;
        let lse = match &call.extra.lse {
            Some(wanted) if wanted.is_instance_of::<PyBool>() => wanted.is_truthy()?,
            Some(_) => {
                return Err(argument("lse", "an array", "True or False; give it to run").into());
            }
            None => false,
        };
        let problem = problem(&call, call.extra.out_dtype.unwrap_or(call.q.dtype), lse)?;
        let planned = Planned::new(&problem, call.place(), call.extra.threads)?;
        Ok(Plan { planned, fixed: call.fixed(), place: call.place() })
    }

    /// Runs the plan on arrays that may be smaller than planned (fewer sequences, shorter queries
    /// or caches), and writes every element of `out` and `lse`. Arguments are those of `attention`.
    ///
    /// `scheduled=True` reads what `schedule` has left for this stream, and `mapped=True` what
    /// `map_mask` has: same bits, less work per layer. On a GPU they run in a workspace of the
    /// plan's own, which lives as long as the plan: keep it for as long as graphs that have
    /// captured such runs.
    #[pyo3(
        signature = (q, k, v, out, **options),
        text_signature = "($self, q, k, v, out, *, lse=None, q_offset=None, key_offset=None, \
        mask=None, \
        alibi_slopes=None, sinks=None, tree_mask=None, kv_lens=None, cu_seqlens_q=None, \
        cu_seqlens_k=None, block_table=None, k_scales=None, v_scales=None, rotary_k=None, \
        key_indices=None, key_counts=None, page_indices=None, page_list_lens=None, \
        page_numbers=None, second_k=None, second_v=None, second_k_scales=None, \
        second_v_scales=None, second_indices=None, second_counts=None, \
        prefix_groups=None, prefix_lens=None, \
        stream=None, scheduled=False, mapped=False)"
    )]
    fn run(
        &self,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let py = q.py();
        let call = Call::read(RUN, Main { q, k, v }, options, self.fixed)?;
        operands::expect_place(&call.q, self.place, "as planned")?;
        let lse = call.extra.lse.as_ref();
        let results = Results::read(out, lse, &call)?;
        let stream = framework::stream(call.extra.stream.as_ref(), q, &call.q)?;
        self.planned.run(py, &call, &results, stream)?;
        record_streams(&call, [q, k, v, out], options, stream)
    }

    /// Computes the schedule of a step, for all layers that run with `scheduled=True` on this
    /// stream: how a GPU divides the work of decode. Arguments are those of `run`; only shapes,
    /// lengths, offsets and prefix groups are read, and nothing is written to `out`. Until the next
    /// call, runs have the same lengths, offsets, tables and groups: with others a GPU reads memory
    /// outside of the arrays. On the CPU there is nothing to compute.
    #[pyo3(
        signature = (q, k, v, out, **options),
        text_signature = "($self, q, k, v, out, *, lse=None, q_offset=None, key_offset=None, \
        mask=None, \
        alibi_slopes=None, sinks=None, tree_mask=None, kv_lens=None, cu_seqlens_q=None, \
        cu_seqlens_k=None, block_table=None, k_scales=None, v_scales=None, rotary_k=None, \
        key_indices=None, key_counts=None, page_indices=None, page_list_lens=None, \
        page_numbers=None, second_k=None, second_v=None, second_k_scales=None, \
        second_v_scales=None, second_indices=None, second_counts=None, \
        prefix_groups=None, prefix_lens=None, \
        stream=None)"
    )]
    fn schedule(
        &self,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        self.share_with((SCHEDULE, Shared::Schedule), [q, k, v, out], options)
    }

    /// Makes the tile map of the mask, for all layers that run with `mapped=True` (on a GPU, on
    /// this stream): which tiles of rows and keys the mask hides or leaves unchanged. Arguments are
    /// those of `run`; only shapes and the mask are read, and nothing is written to `out`. Until
    /// the next call, runs have the same mask; with another, results are meaningless.
    #[pyo3(
        signature = (q, k, v, out, **options),
        text_signature = "($self, q, k, v, out, *, lse=None, q_offset=None, key_offset=None, \
        mask=None, \
        alibi_slopes=None, sinks=None, tree_mask=None, kv_lens=None, cu_seqlens_q=None, \
        cu_seqlens_k=None, block_table=None, k_scales=None, v_scales=None, rotary_k=None, \
        key_indices=None, key_counts=None, page_indices=None, page_list_lens=None, \
        page_numbers=None, second_k=None, second_v=None, second_k_scales=None, \
        second_v_scales=None, second_indices=None, second_counts=None, \
        prefix_groups=None, prefix_lens=None, \
        stream=None)"
    )]
    fn map_mask(
        &self,
        q: &Bound<'_, PyAny>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        self.share_with((MAP_MASK, Shared::TileMap), [q, k, v, out], options)
    }

    /// Loads the plan's kernels and makes the stream's workspace ahead of the first run, as a CUDA
    /// graph needs it. Nothing on the CPU.
    #[pyo3(signature = (stream = None))]
    fn prepare(&self, py: Python<'_>, stream: Option<Bound<'_, PyAny>>) -> PyResult<()> {
        let Place::Cuda(ordinal) = self.place else { return Ok(()) };
        let stream = framework::current_or_given(py, stream.as_ref(), ordinal)?;
        Ok(crate::device::prepare(&self.planned.plan, ordinal, stream)?)
    }

    /// The kernels that will run and the reasons, in a few lines.
    fn explain(&self) -> String {
        self.planned.plan.explain()
    }

    /// Bytes of workspace that a run uses.
    #[getter]
    fn workspace_bytes(&self) -> usize {
        self.planned.plan.workspace_bytes()
    }

    /// The kernel's name.
    #[getter]
    fn kernel(&self) -> &'static str {
        self.planned.plan.choice().kernel.name()
    }

    /// Device of the plan: "cpu" or "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.place.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<regard.Plan of {} on {}>", self.kernel(), self.planned.plan.machine())
    }
}

impl Plan {
    /// `schedule` or `map_mask`.
    fn share_with<'py>(
        &self,
        (takes, shared): (Takes, Shared),
        arrays: [&Bound<'py, PyAny>; 4],
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<()> {
        let [q, k, v, out] = arrays;
        let call = Call::read(takes, Main { q, k, v }, options, self.fixed)?;
        operands::expect_place(&call.q, self.place, "as planned")?;
        let results = Results::read(out, call.extra.lse.as_ref(), &call)?;
        let stream = framework::stream(call.extra.stream.as_ref(), q, &call.q)?;
        self.planned.share(q.py(), &call, &results, stream, shared)?;
        record_streams(&call, arrays, options, stream)
    }
}

impl Results {
    /// Reads where results go, and brings dimensions into regard's order.
    ///
    /// # Errors
    /// If one is no array that can be written.
    pub fn read(
        out: &Bound<'_, PyAny>,
        lse: Option<&Bound<'_, PyAny>>,
        call: &Call,
    ) -> PyResult<Results> {
        let mut out = Array::read_mut("out", out)?;
        let mut lse = lse.map(|lse| Array::read_mut("lse", lse)).transpose()?;
        if call.choices.heads_first && !call.is_ragged() {
            out.swap_heads(4, "bhsd")?;
            lse.as_mut().map_or(Ok(()), |lse| lse.swap_heads(3, "bhsd"))?;
        }
        Ok(Results { out, lse })
    }

    fn frees_in_stream_order(&self) -> bool {
        let lse = self.lse.as_ref().is_none_or(|lse| lse.framework.frees_in_stream_order());
        lse && self.out.framework.frees_in_stream_order()
    }
}

/// Tells PyTorch which tensors a stream of the caller's choice uses.
///
/// # Errors
/// If PyTorch fails.
pub fn record_streams<'py>(
    call: &Call,
    objects: impl IntoIterator<Item = &'py Bound<'py, PyAny>>,
    options: Option<&Bound<'_, PyDict>>,
    stream: u64,
) -> PyResult<()> {
    if call.extra.stream.is_none() || call.place() == Place::Cpu {
        return Ok(());
    }
    for object in objects {
        framework::record_stream(object, &call.q, stream)?;
    }
    for (_, object) in options.into_iter().flatten() {
        framework::record_stream(&object, &call.q, stream)?;
    }
    Ok(())
}
