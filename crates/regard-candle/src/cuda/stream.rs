//! State that calls on one stream of candle's share: the workspace and the latest plans.
//!
//! Runs on one stream follow each other, so one workspace serves all of them. It grows as plans
//! need more; the smaller one is freed on the stream, behind the runs that use it. Two streams
//! never share a workspace:
//!
//! - `Device::new_cuda` has CUDA's per-thread default stream: one handle, but another stream in
//!   every thread. Its state belongs to the thread, and is freed when the thread ends.
//! - Streams of their own (`Device::new_cuda_with_stream`) have one state for all threads, locked
//!   while a call queues its launches. When the last other reference to the stream is gone, its
//!   state is freed by the next call on a stream that is new.
//!
//! While a stream is captured into a CUDA graph, each call allocates its workspace there, in nodes
//! of the graph: the graph owns that memory, so no workspace of this module is in a graph, and
//! replays may overlap other work.

use candle_core::{Error, Result};
use regard::cuda::cudarc::driver::{CudaContext, CudaStream, sys::CUstreamCaptureStatus};
use regard::cuda::{Gpu, Workspace};
use regard::{Plan, Problem};
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::new_plan;
use crate::view::wrap;

/// `CU_STREAM_PER_THREAD`: the handle of the default stream of whichever thread uses it.
const PER_THREAD: usize = 2;

/// Sizes of workspaces are multiples of this: a little growth is none.
const WORKSPACE_STEP: usize = 1 << 20;

/// Plans that a stream remembers: models have few kinds of layers, and a step runs through all.
const PLANS: usize = 8;

/// The state of one stream.
pub(super) struct StreamState {
    pub(super) gpu: Arc<Gpu>,
    workspace: Option<Workspace>,
    /// The last one used comes first.
    plans: Vec<(Problem, Arc<Plan>)>,
}

impl StreamState {
    fn new(gpu: Arc<Gpu>) -> StreamState {
        StreamState { gpu, workspace: None, plans: Vec::new() }
    }

    /// A plan for the problem on this GPU: the one of an earlier call, or a new one.
    pub(super) fn plan(&mut self, problem: &Problem) -> Result<Arc<Plan>> {
        match self.plans.iter().position(|(planned, _)| planned == problem) {
            Some(index) => self.plans[..=index].rotate_right(1),
            None => {
                let plan = new_plan(problem, self.gpu.machine())?;
                self.plans.truncate(PLANS - 1);
                self.plans.insert(0, (problem.clone(), plan));
            }
        }
        Ok(Arc::clone(&self.plans[0].1))
    }

    /// Calls `run` with a workspace that is large enough for the plan.
    pub(super) fn with_workspace(
        &mut self,
        plan: &Plan,
        stream: &Arc<CudaStream>,
        run: impl FnOnce(&Gpu, &mut Workspace) -> Result<()>,
    ) -> Result<()> {
        if is_captured(stream)? {
            let mut workspace = Workspace::for_plan(plan, stream).map_err(wrap)?;
            return run(&self.gpu, &mut workspace);
        }
        let bytes = plan.workspace_bytes();
        let mut workspace = match self.workspace.take() {
            Some(workspace) if workspace.bytes() >= bytes => workspace,
            smaller => {
                drop(smaller);
                new_workspace(bytes, stream)?
            }
        };
        run(&self.gpu, &mut workspace)?;
        // Kept only if the run was queued whole: a run that failed may leave counters behind.
        self.workspace = Some(workspace);
        Ok(())
    }

    /// References to the stream that the state has: memory belongs to a stream.
    fn references(&self) -> usize {
        usize::from(self.workspace.is_some())
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        // The handle of a thread's default stream means the stream of the current context, and
        // memory is freed on it.
        let context = self.gpu.context();
        context.record_err(context.bind_to_thread());
    }
}

/// A workspace of at least that many bytes, and room for plans that need a little more.
fn new_workspace(bytes: usize, stream: &Arc<CudaStream>) -> Result<Workspace> {
    let bytes = bytes.max(1).checked_next_multiple_of(WORKSPACE_STEP).unwrap_or(bytes);
    // SAFETY: nothing reads it before it is written: `Workspace::new` zeroes the counters, kernels
    // write the rest before they read it.
    let memory = unsafe { stream.alloc::<u8>(bytes) }.map_err(|error| {
        Error::wrap(error).context(format!("allocating a workspace of {bytes} bytes"))
    })?;
    Workspace::new(memory, stream).map_err(wrap)
}

/// Whether work on the stream goes into a graph.
fn is_captured(stream: &CudaStream) -> Result<bool> {
    let status = stream.capture_status().map_err(Error::wrap)?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// A stream that several threads may use, and its state.
struct Shared {
    stream: Arc<CudaStream>,
    state: Arc<Mutex<StreamState>>,
}

impl Shared {
    /// Whether anybody else has the stream. A state in use is: its user has the stream.
    fn is_alive(&self) -> bool {
        let Ok(state) = self.state.try_lock() else { return true };
        Arc::strong_count(&self.stream) > 1 + state.references()
    }
}

/// States of streams that several threads may use.
static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

thread_local! {
    /// States of this thread's default streams, by context.
    static OWN: RefCell<Vec<(Arc<CudaContext>, StreamState)>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with the state of the stream, which no other call has meanwhile.
pub(super) fn with_state<R>(
    stream: &Arc<CudaStream>,
    work: impl FnOnce(&mut StreamState) -> Result<R>,
) -> Result<R> {
    if stream.cu_stream() as usize == PER_THREAD {
        return with_own(stream, work);
    }
    let state = {
        // Poisoning is ignored, here and below: a panic leaves whole entries, and of a state at
        // most a workspace less.
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        match all.iter().find(|shared| Arc::ptr_eq(&shared.stream, stream)) {
            Some(shared) => Arc::clone(&shared.state),
            None => {
                all.retain(Shared::is_alive);
                let state = Arc::new(Mutex::new(StreamState::new(super::gpu(stream)?)));
                all.push(Shared { stream: Arc::clone(stream), state: Arc::clone(&state) });
                state
            }
        }
    };
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut state)
}

/// The same for the default stream of this thread.
fn with_own<R>(
    stream: &Arc<CudaStream>,
    work: impl FnOnce(&mut StreamState) -> Result<R>,
) -> Result<R> {
    OWN.with_borrow_mut(|own| {
        let context = stream.context();
        let index = match own.iter().position(|(of, _)| of.cu_ctx() == context.cu_ctx()) {
            Some(index) => index,
            None => {
                own.push((Arc::clone(context), StreamState::new(super::gpu(stream)?)));
                own.len() - 1
            }
        };
        work(&mut own[index].1)
    })
}
