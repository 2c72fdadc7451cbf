//! Measuring on an Apple GPU: runs encoded in one command buffer, whose commit and wait are timed.

use super::measure::{sample, timed, work};
use super::operands::{Operands, host_bytes};
use super::record::Record;
use super::shapes::{NAMED, Target};
use super::{Effort, Request, measure_each, targets};
use crate::models::Place;
use crate::output::{Progress, Stop};
use regard::metal::MetalMemory;
use regard::metal::device::{Gpu, HostCopy, Workspace};
use regard::oracle::Judge;
use regard::{Error, Inputs, Outputs, Plan, Problem};
use regard_cases::Case;
use std::time::{Duration, Instant};

/// Approximate time of a command buffer: submitting one takes some tens of microseconds.
const COMMANDS: Duration = Duration::from_millis(20);

/// Maximum runs in a command buffer.
const MAX_RUNS: usize = 4096;

/// However slow something is, runs that count end after this.
const LIMIT: Duration = Duration::from_secs(10);

/// Runs all targets. Returns the number of targets that did not run or were wrong.
pub fn measured(request: &Request) -> Result<(Vec<Record>, usize), Stop> {
    let gpu = Gpu::system_default()?;
    let targets = targets(request, &NAMED, Place::Cpu)?;
    let progress = Progress::for_steps("steps", targets.len(), !request.json);
    let (records, failed) =
        measure_each(&targets, &progress, |target| measure(&gpu, target, request));
    progress.finish();
    Ok((records.into_iter().map(|(record, _)| record).collect(), failed))
}

/// The inputs of a call in buffers of the GPU's.
struct Uploaded {
    copies: Vec<HostCopy>,
}

impl Uploaded {
    fn new(gpu: &Gpu, inputs: &Inputs) -> Result<Uploaded, Error> {
        let copies = inputs.named().map(|(name, tensor)| gpu.copy_of(name, tensor));
        Ok(Uploaded { copies: copies.collect::<Result<_, _>>()? })
    }

    fn inputs(&self, host: &Inputs) -> Result<Inputs<'_, MetalMemory>, Error> {
        let mut next = self.copies.iter();
        host.try_map(|_, tensor| {
            next.next().expect("one per tensor, in the same order").tensor(&tensor)
        })
    }
}

/// Times a target and judges it.
fn measure(gpu: &Gpu, target: &Target, request: &Request) -> Result<Record, String> {
    let text = |error: Error| error.to_string();
    let bytes = host_bytes(target, |kv_bytes| 2 * target.copies(kv_bytes));
    crate::memory::expect_room("the operands of this shape", bytes).map_err(text)?;
    let mut operands = Operands::new(target).map_err(text)?;
    operands.unwrite();
    let (times, plan, judge, work) = {
        let (cases, mut outputs) = operands.parts().map_err(text)?;
        let host = cases.iter().map(Case::inputs).collect::<Result<Vec<_>, _>>().map_err(text)?;
        let rows = sample(&host[0], request.effort.rows).map_err(text)?;
        let judge = Judge::for_rows(&host[0], target.problem.out_dtype, &rows).map_err(text)?;
        let problem = target.planned(Problem::from_operands(&host[0], &outputs).map_err(text)?);
        let plan = Plan::new(&problem, gpu.machine()).map_err(text)?;
        let times = time(gpu, &plan, &host, &mut outputs, &request.effort).map_err(text)?;
        (times, plan, judge, work(target, &host[0]))
    };
    let case = &operands.copies()[0];
    let (out, lse) = operands.outputs();
    let lse = lse.map(|lse| lse.view()).transpose().map_err(text)?;
    let lse = lse.map(|lse| case.query_order(lse));
    let agreement = judge
        .check(&case.query_order(out.view().map_err(text)?), lse.as_ref())
        .map_err(|mismatch| mismatch.to_string())?;
    Ok(Record {
        machine: Some(gpu.machine().name.clone()),
        kernel: Some(plan.choice().kernel.name().into()),
        copies: Some(operands.copies().len()),
        max_error: Some(agreement.out_error),
        error_of_allowed: Some(agreement.worst),
        ..timed("metal", target, &work, times)
    })
}

/// Seconds per call, one time per command buffer. `outputs` gets the results of the last run.
fn time(
    gpu: &Gpu,
    plan: &Plan,
    host: &[Inputs],
    outputs: &mut Outputs,
    effort: &Effort,
) -> Result<Vec<f64>, Error> {
    let uploaded =
        host.iter().map(|inputs| Uploaded::new(gpu, inputs)).collect::<Result<Vec<_>, _>>()?;
    let inputs = uploaded
        .iter()
        .zip(host)
        .map(|(uploaded, host)| uploaded.inputs(host))
        .collect::<Result<Vec<_>, _>>()?;
    let out = gpu.copy_of_output("out", &outputs.out)?;
    let lse = outputs.lse.as_ref().map(|lse| gpu.copy_of_output("lse", lse)).transpose()?;
    let lse_view = match (&lse, &outputs.lse) {
        (Some(copy), Some(lse)) => Some(copy.tensor_mut(lse)?),
        _ => None,
    };
    let mut results = Outputs { out: out.tensor_mut(&outputs.out)?, lse: lse_view };
    let mut workspace = Workspace::for_plan(plan, gpu)?;
    gpu.load(plan)?;
    let mut sample = |runs: usize| -> Result<f64, Error> {
        let took = gpu.submit(|encoder| {
            inputs.iter().cycle().take(runs).try_for_each(|inputs| {
                // SAFETY: the buffers are ours, and the work has ended when `submit` returns. The
                // encoder is serial, so that runs do not overlap.
                unsafe { gpu.run(plan, encoder, inputs, &mut results, &mut workspace) }
            })
        })?;
        Ok(took.as_secs_f64() / runs as f64)
    };
    // The first runs also bring the GPU to its working frequency.
    sample(inputs.len())?;
    let one = sample(inputs.len())?;
    let rounds = (COMMANDS.as_secs_f64() / one.max(1e-7) / inputs.len() as f64).ceil().max(1.0);
    let runs = (rounds as usize * inputs.len()).min(MAX_RUNS.next_multiple_of(inputs.len()));
    for _ in 0..3 {
        sample(runs)?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < effort.time
        || (times.len() < effort.repetitions && started.elapsed() < LIMIT)
    {
        times.push(sample(runs)?);
    }
    out.download(&mut outputs.out);
    if let (Some(copy), Some(lse)) = (&lse, &mut outputs.lse) {
        copy.download(lse);
    }
    Ok(times)
}
