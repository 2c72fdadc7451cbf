//! Decode steps as CUDA graphs: a step is captured once, and replayed by one launch, where it was
//! hundreds that the GPU waited for.

use crate::attend::Attend;
use crate::cache::rows_for;
use crate::model::{Inputs, Llama, Rows};
use candle_core::{Device, Result, Tensor};
use regard::paged::{Step, TableLayout};
use regard_candle::{Attention, Execution, PagedCache, attention_of_tables};
use std::time::Duration;

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{
    CudaGraph,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
};

fn wrap(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// A decode step of a number of requests, whose pages fit a table of some width.
pub struct DecodeGraph<'a> {
    model: &'a Llama,
    layout: TableLayout,
    /// [`Rows::packed`] and the tables of the step, where the graph reads them.
    numbers: Tensor,
    recording: Recording,
    /// Its memory is in the graph.
    cache: PagedCache,
}

/// The layout of a graph for the step: wider tables, so that it serves longer sequences too.
fn layout_for(step: &Step) -> TableLayout {
    let TableLayout { sequences, max_blocks } = step.table_layout();
    TableLayout { sequences, max_blocks: max_blocks.next_power_of_two() }
}

/// All that a step brings to the device, in one upload: rows and tables. As u32, between which
/// candle copies; table entries that are -1 stay so to the kernels.
fn upload(step: &Step, layout: &TableLayout, rows: Rows, device: &Device) -> Result<Tensor> {
    let mut tables = vec![0; layout.len()];
    step.pack(layout, &mut tables).map_err(wrap)?;
    let mut numbers = rows.packed();
    numbers.extend(tables.iter().map(|&entry| entry as u32));
    Tensor::new(numbers, device)
}

impl<'a> DecodeGraph<'a> {
    /// Runs a step in which every sequence has one token, and captures it. Does its copies, and
    /// returns the scores too, as [`Llama::forward`] does.
    ///
    /// # Errors
    /// If the model is not on an NVIDIA GPU, the step has longer sequences, or the GPU cannot
    /// capture it.
    pub fn capture(
        model: &'a Llama,
        cache: &PagedCache,
        step: &Step,
        rows: Rows,
        batch_invariant: bool,
    ) -> Result<(DecodeGraph<'a>, Tensor)> {
        if step.max_query_len() != 1 || step.tokens() != step.sequences().len() {
            candle_core::bail!("graphs are of steps with one token per sequence");
        }
        cache.copy_blocks(step.copies())?;
        let (device, layout) = (model.device(), layout_for(step));
        let numbers = upload(step, &layout, rows, device)?;
        let inputs = Inputs::new(&numbers, rows)?;
        let tables = numbers.narrow(0, rows.packed().len(), layout.len())?;
        let attention = Attention { batch_invariant, ..attention_of_tables(&tables, &layout)? };
        let (cache, execution) = (cache.clone(), Execution::of_step(step));
        let recording = Recording::new(device, || {
            let attend = Recorded { cache: &cache, attention: &attention, execution: &execution };
            model.forward_on(&inputs, &mut { attend })
        })?;
        let scores = recording.result.copy()?;
        Ok((DecodeGraph { model, layout, numbers, recording, cache }, scores))
    }

    /// Whether the step, of one token per sequence, is as the captured one.
    pub fn serves(&self, step: &Step) -> bool {
        layout_for(step) == self.layout
    }

    /// Does the copies of such a step and runs it. The scores are overwritten by the next replay.
    ///
    /// # Errors
    /// If the step does not fit, or the GPU fails.
    pub fn replay(&self, step: &Step, rows: Rows) -> Result<&Tensor> {
        self.cache.copy_blocks(step.copies())?;
        self.numbers.slice_set(&upload(step, &self.layout, rows, self.model.device())?, 0, 0)?;
        self.recording.replay()?;
        Ok(&self.recording.result)
    }
}

/// The graphs of an engine: captured when steps of a layout come again, the latest of them kept.
#[derive(Default)]
pub struct Graphs<'a> {
    /// The last one used comes first.
    latest: Vec<DecodeGraph<'a>>,
    /// The layout of the step before, and how often it has come in a row.
    before: Option<(TableLayout, usize)>,
}

/// Graphs that are kept at once.
const KEPT: usize = 16;
/// Steps of one layout in a row, after which the next one is captured. A capture takes longer than
/// a step.
const PATIENCE: usize = 4;

impl<'a> Graphs<'a> {
    /// Does the copies of a step in which every sequence has one token, and runs it; `None`, and
    /// nothing is done, if it has no graph yet.
    ///
    /// # Errors
    /// As [`DecodeGraph::capture`] and [`DecodeGraph::replay`].
    pub fn scores(
        &mut self,
        model: &'a Llama,
        cache: &PagedCache,
        step: &Step,
        rows: Rows,
        batch_invariant: bool,
    ) -> Result<Option<Tensor>> {
        if let Some(index) = self.latest.iter().position(|graph| graph.serves(step)) {
            self.latest[..=index].rotate_right(1);
            return self.latest[0].replay(step, rows).cloned().map(Some);
        }
        let layout = layout_for(step);
        let count = match self.before {
            Some((before, count)) if before == layout => count + 1,
            _ => 1,
        };
        self.before = Some((layout, count));
        if count <= PATIENCE {
            return Ok(None);
        }
        let (graph, scores) = DecodeGraph::capture(model, cache, step, rows, batch_invariant)?;
        self.latest.truncate(KEPT - 1);
        self.latest.insert(0, graph);
        Ok(Some(scores))
    }
}

/// Attention over tables that stay where they are, without a clock.
struct Recorded<'a> {
    cache: &'a PagedCache,
    attention: &'a Attention,
    execution: &'a Execution,
}

impl Attend for Recorded<'_> {
    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let Recorded { cache, attention, execution } = self;
        cache.append(layer, &rows_for(cache, k)?, &rows_for(cache, v)?, attention)?;
        cache.attention(layer, q, attention, execution)
    }

    /// Nothing is measured inside a graph.
    fn spent(&self) -> Duration {
        Duration::ZERO
    }
}

/// Work that a stream has captured, and its result.
struct Recording {
    result: Tensor,
    #[cfg(feature = "cuda")]
    graph: CudaGraph,
}

impl Recording {
    /// Does the work, and captures it once more.
    #[cfg(feature = "cuda")]
    fn new(device: &Device, work: impl Fn() -> Result<Tensor>) -> Result<Recording> {
        let device = device.as_cuda_device()?;
        let stream = device.cuda_stream();
        // candle's kernels read shapes and strides from memory that is filled in the first pass.
        let _shapes = device.enable_cuda_graph_htod_cache();
        let result = work()?;
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(wrap)?;
        // Everything else that the work allocates is freed in the graph.
        let done = work().and_then(|again| result.slice_set(&again, 0, 0));
        // Ended in any case, so that the stream can be used.
        let graph = stream.end_capture(CUgraphInstantiate_flags(0));
        done?;
        let Some(graph) = graph.map_err(wrap)? else {
            candle_core::bail!("nothing was captured");
        };
        Ok(Recording { result, graph })
    }

    #[cfg(not(feature = "cuda"))]
    fn new(_: &Device, _: impl Fn() -> Result<Tensor>) -> Result<Recording> {
        candle_core::bail!("graphs need an NVIDIA GPU, and a build with `--features cuda`")
    }

    /// Queues the work.
    fn replay(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.graph.launch().map_err(wrap)?;
        Ok(())
    }
}
