//! Measuring on an NVIDIA GPU. Times are the GPU's own: launches recorded in a graph, between two
//! events.

mod lists;
mod operands;
mod timing;

use super::ceiling::Ceilings;
use super::measure::{sample, timed, work};
use super::operands::host_bytes;
use super::record::{Bound, Record};
use super::shapes::{NAMED_CUDA, Target};
use super::{Request, measure_each, targets};
use crate::models::Place;
use crate::output::{Progress, Stop};
use operands::Operands;
use regard::cuda::cudarc::driver::CudaStream;
use regard::cuda::{Gpu, driver_error, gpus};
use regard::oracle::Judge;
use regard::{Error, Outputs, Plan, Problem};
use regard_cases::Case;
use regard_cases::cuda::{MirrorMut, Uploaded, Workspace};
use std::sync::Arc;

/// A GPU to measure on.
pub struct Bench {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    name: String,
}

impl Bench {
    fn new(ordinal: usize) -> Result<Bench, Error> {
        let name = gpus()?.swap_remove(ordinal).name;
        let gpu = Gpu::new(ordinal)?;
        // SAFETY: everything is queued on one stream.
        unsafe { gpu.context().disable_event_tracking() };
        let stream =
            gpu.context().new_stream().map_err(|error| driver_error("making a stream", error))?;
        Ok(Bench { gpu, stream, name })
    }
}

/// Runs all targets. Returns the number of targets that did not run or were wrong.
pub fn measured(request: &Request, ordinal: usize) -> Result<(Vec<Record>, usize), Stop> {
    let bench = Bench::new(ordinal)?;
    let targets = targets(request, &NAMED_CUDA, Place::Gpu)?;
    let progress = Progress::for_steps(
        "steps",
        targets.len() + 2 * usize::from(request.ceilings),
        !request.json,
    );
    let ceilings = || -> Result<Option<Ceilings>, Error> {
        if !request.ceilings {
            return Ok(None);
        }
        progress.about("ceilings");
        let ceilings = timing::ceilings(&bench)?;
        progress.step();
        Ok(Some(ceilings))
    };
    let before = ceilings()?;
    let (mut records, failed) =
        measure_each(&targets, &progress, |target| measure(&bench, target, request));
    // Before the shapes and after them, and the higher of the two.
    let ceilings = before.zip(ceilings()?).map(|(before, after)| before.or_higher(after));
    for (record, target) in &mut records {
        relate(record, target, ceilings.as_ref());
    }
    progress.finish();
    Ok((records.into_iter().map(|(record, _)| record).collect(), failed))
}

/// Puts a decode under the speed of reading its keys and values once.
fn relate(record: &mut Record, target: &Target, ceilings: Option<&Ceilings>) {
    let Some(ceilings) = ceilings else { return };
    record.ceilings = Some(ceilings.clone());
    // Prefill is held to peers: the speed of matrix units depends on power, shapes and types too
    // much to be one number.
    if target.rotates() {
        let bound = Bound::Reads { gbytes_per_second: ceilings.read };
        record.ceiling = Some(bound.value());
        record.fraction_of_ceiling = Some(bound.fraction(record.gflops, record.gbytes_per_second));
        record.bound = Some(bound);
    }
}

/// Times a target and judges it.
fn measure(bench: &Bench, target: &Target, request: &Request) -> Result<Record, String> {
    let text = |error: Error| error.to_string();
    crate::memory::expect_room("the operands of this shape", host_bytes(target, |_| 1))
        .map_err(text)?;
    let operands = Operands::new(target).map_err(text)?;
    let case = operands.case();
    let inputs = case.inputs().map_err(text)?;
    let work = work(target, &inputs);
    let copies = target.copies(work.kv_bytes);
    let uploaded =
        (0..copies).map(|_| Uploaded::new(&inputs, &bench.stream)).collect::<Result<Vec<_>, _>>();
    let uploaded = uploaded.map_err(text)?;
    let rows = sample(&inputs, request.effort.rows).map_err(text)?;
    let judge = Judge::for_rows(&inputs, target.problem.out_dtype, &rows).map_err(text)?;

    let (mut plan, mut kernel_times) = (None, None);
    // Outputs are downloaded and judged twice: after a first run, and after the last timed one.
    let judged = |output: &regard_cases::Output, case: &Case| {
        let out = output.out.view().map_err(text)?;
        let lse = output.lse.view().map_err(text)?;
        let lse = target.problem.lse.then(|| case.query_order(lse));
        let agreement = judge.check(&case.query_order(out), lse.as_ref());
        agreement.map_err(|mismatch| mismatch.to_string())
    };
    let first = case.run(|_, outputs| {
        let on_gpu = OnGpu::new(bench, target, &uploaded, outputs)?;
        on_gpu.queue(bench, &uploaded[0], request.layers.map(|_| true))?;
        on_gpu.download(bench, outputs)?;
        Ok(())
    });
    judged(&first.map_err(text)?, case)?;
    let last = case.run(|_, outputs| {
        let on_gpu = OnGpu::new(bench, target, &uploaded, outputs)?;
        kernel_times = Some(on_gpu.time(bench, &uploaded, request)?);
        on_gpu.download(bench, outputs)?;
        plan = Some(on_gpu.plan);
        Ok(())
    });
    let agreement = judged(&last.map_err(text)?, case)?;
    let (plan, times) = plan.zip(kernel_times).ok_or("the runner was not called")?;

    let mut record = timed("cuda", target, &work, times);
    if request.layers.is_some() {
        record.name.push_str(" scheduled");
    }
    Ok(Record {
        machine: Some(bench.name.clone()),
        kernel: Some(plan.choice().kernel.name().into()),
        copies: Some(copies),
        max_error: Some(agreement.out_error),
        error_of_allowed: Some(agreement.worst),
        ..record
    })
}

/// A plan with the memory that it writes.
struct OnGpu {
    plan: Plan,
    out: MirrorMut,
    lse: Option<MirrorMut>,
    workspace: Workspace,
}

impl OnGpu {
    fn new(
        bench: &Bench,
        target: &Target,
        uploaded: &[Uploaded],
        outputs: &mut Outputs,
    ) -> Result<OnGpu, Error> {
        let stream = &bench.stream;
        let out = MirrorMut::new(&mut outputs.out, stream)?;
        let lse = outputs.lse.as_mut().filter(|_| target.problem.lse);
        let lse = lse.map(|lse| MirrorMut::new(lse, stream)).transpose()?;
        let inputs = uploaded[0].inputs();
        let views = Outputs { out: out.view(), lse: lse.as_ref().map(MirrorMut::view) };
        let plan = Plan::new(&Problem::from_operands(&inputs, &views)?, bench.gpu.machine())?;
        bench.gpu.load(&plan)?;
        let workspace = Workspace::new(plan.workspace_bytes(), stream)?;
        Ok(OnGpu { plan, out, lse, workspace })
    }

    /// Queues a run on one copy of the operands. `schedule`: whether the run reads a schedule, and
    /// whether it is the first run that does.
    fn queue(&self, bench: &Bench, on: &Uploaded, schedule: Option<bool>) -> Result<(), Error> {
        let mut views =
            Outputs { out: self.out.view(), lse: self.lse.as_ref().map(MirrorMut::view) };
        let (plan, inputs) = (&self.plan, on.inputs());
        let (stream, workspace) = (bench.stream.cu_stream(), self.workspace.raw());
        // SAFETY: the stream is of this GPU; operands, outputs and workspace live until it has been
        // waited for. All copies of the operands have the same lengths.
        unsafe {
            if schedule == Some(true) {
                bench.gpu.schedule(plan, stream, &inputs, &views, workspace)?;
            }
            match schedule {
                Some(_) => bench.gpu.run_scheduled(plan, stream, &inputs, &mut views, workspace),
                None => bench.gpu.run_raw(plan, stream, &inputs, &mut views, workspace),
            }
        }
    }

    fn download(&self, bench: &Bench, outputs: &mut Outputs) -> Result<(), Error> {
        self.workspace.check(&bench.stream)?;
        self.out.download(&mut outputs.out, &bench.stream)?;
        match (&self.lse, &mut outputs.lse) {
            (Some(lse), Some(to)) => lse.download(to, &bench.stream),
            _ => Ok(()),
        }
    }

    /// Seconds per call, sample by sample.
    fn time(
        &self,
        bench: &Bench,
        copies: &[Uploaded],
        request: &Request,
    ) -> Result<Vec<f64>, Error> {
        let launch = |i: usize| {
            let schedule = request.layers.map(|layers| i.is_multiple_of(layers));
            self.queue(bench, &copies[i % copies.len()], schedule)
        };
        timing::time(bench, copies.len(), launch, &request.effort)
    }
}
