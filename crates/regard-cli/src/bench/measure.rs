//! One target: run, timed, and judged by the oracle.

use super::ceiling::{Ceilings, Reader, median};
use super::load::Load;
use super::operands::{Operands, host_bytes};
use super::pipeline::Pipeline;
use super::record::{Bound, Record};
use super::shapes::{Layout, Target};
use crate::case::{Work, attend};
use crate::memory;
use regard::cpu::Level;
use regard::oracle::{Judge, Row, all_rows};
use regard::{Device, Error, Inputs, Kernel, Machine, Outputs, Plan, Problem};
use std::time::{Duration, Instant};

/// Duration and number of runs.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Run until this much time has passed, and at least `repetitions` times.
    pub time: Duration,
    /// Minimum number of runs.
    pub repetitions: usize,
    /// Maximum wait until other processes are idle.
    pub wait: Duration,
    /// Pause before each timed graph. On CUDA.
    pub pause: Option<Duration>,
    /// Rows that the oracle computes.
    pub rows: usize,
}

/// Runs that are not counted, as long as their total is below this.
const WARM_UP: usize = 3;
const WARM_UP_LIMIT: Duration = Duration::from_secs(5);

/// However slow something is, runs that count end after this.
const LIMIT: Duration = Duration::from_secs(25);

/// Calls shorter than this are timed several at once, because reading the clock takes some 30 ns.
const MIN_SAMPLE: Duration = Duration::from_micros(50);

/// The reason why a target has no result.
pub enum Failure {
    /// It did not run.
    Error(Error),
    /// It ran and was wrong.
    Wrong(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

/// The machine that a target is measured on, with its number of threads, and the speed at which
/// these read memory, if it is measured.
pub struct Setting {
    pub machine: Machine,
    pub reader: Option<Reader>,
    /// Whether to measure the models of shapes too.
    pub models: bool,
}

/// Measures and judges, in each setting with the same operands.
pub fn measure(
    target: &Target,
    settings: &[Setting],
    effort: &Effort,
) -> Result<Vec<Record>, Failure> {
    let problem = target.planned(target.problem.clone());
    let mut planned = 0;
    for setting in settings {
        planned = planned.max(Plan::new(&problem, &setting.machine)?.workspace_bytes() as u64);
    }
    // At most as much again for the exact plan, if the planned one is for larger bounds.
    let planned = planned.saturating_mul(if target.bounds.is_some() { 2 } else { 1 });
    let bytes = host_bytes(target, |kv_bytes| target.copies(kv_bytes)).saturating_add(planned);
    memory::expect_room("the operands of this shape", bytes)?;
    let mut operands = Operands::new(target)?;
    let (cases, _) = operands.parts()?;
    let inputs = cases[0].inputs()?;
    let judge = Judge::for_rows(&inputs, target.problem.out_dtype, &sample(&inputs, effort.rows)?)?;
    settings
        .iter()
        .map(|setting| measure_in(target, setting, &judge, &mut operands, effort))
        .collect()
}

/// Measures and judges in one setting.
fn measure_in(
    target: &Target,
    setting: &Setting,
    judge: &Judge,
    operands: &mut Operands,
    effort: &Effort,
) -> Result<Record, Failure> {
    let machine = &setting.machine;
    let Device::Cpu(facts) = &machine.device else {
        return Err(Error::argument("device", &machine.name, "a CPU").into());
    };
    // A first run for the oracle alone, on outputs that hold NaN; the last timed run is judged too.
    operands.unwrite();
    let (cases, mut outputs) = operands.parts()?;
    let inputs = cases[0].inputs()?;
    let work = work(target, &inputs);
    let exact = Problem::from_operands(&inputs, &outputs)?;
    let mut plans = vec![Planned::new(&target.planned(exact.clone()), machine)?];
    if target.bounds.is_some() {
        // In turns, because memory bandwidth drifts within seconds.
        plans.push(Planned::new(&exact, machine)?);
    }
    plans[0].run(&inputs, &mut outputs)?;
    check(judge, operands)?;
    Load::wait_for_quiet(effort.wait);
    // Memory is shared with neighbours that no process list shows, so its bandwidth is measured
    // right beside.
    let reader = setting.reader.as_ref().filter(|_| target.rotates());
    let before = reader.map(Reader::rate);
    let mut model = match setting.models {
        true => Pipeline::new(target, machine)?,
        false => None,
    };
    let mut model_rate = || model.as_mut().map(Pipeline::rate).transpose();
    let model_before = model_rate()?;
    let load = Load::now();
    let mut times = {
        let (cases, mut outputs) = operands.parts()?;
        let copies = cases.iter().map(|case| case.inputs()).collect::<Result<Vec<_>, _>>()?;
        time(&mut plans, &copies, &mut outputs, effort, target.pause)?
    };
    let others = load.others();
    let after = reader.map(Reader::rate);
    let model_after = model_rate()?;
    let (max_error, worst) = check(judge, operands)?;

    Ok(Record {
        machine: super::load::cpu_model(),
        threads: facts.threads,
        kernel: Some(plans[0].plan.choice().kernel.name().into()),
        simd: Some(facts.level.name().into()),
        copies: Some(operands.copies().len()),
        exact_seconds: target.bounds.and_then(|_| times.pop()).map(median),
        read_beside: before.into_iter().chain(after).max_by(f64::total_cmp),
        pipeline: model_before.into_iter().chain(model_after).max_by(f64::total_cmp),
        max_error: Some(max_error),
        error_of_allowed: Some(worst),
        busy_elsewhere: others,
        ..timed("cpu", target, &work, times.swap_remove(0))
    })
}

/// A plan with its workspace.
struct Planned {
    plan: Plan,
    workspace: Vec<u8>,
}

impl Planned {
    fn new(problem: &Problem, machine: &Machine) -> Result<Planned, Error> {
        let plan = Plan::new(problem, machine)?;
        let workspace = vec![0; plan.workspace_bytes()];
        Ok(Planned { plan, workspace })
    }

    fn run(&mut self, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        attend(&self.plan, inputs, outputs, &mut self.workspace)
    }
}

/// A target and its speed, on any device.
pub(super) fn timed(device: &str, target: &Target, work: &Work, mut times: Vec<f64>) -> Record {
    times.sort_by(f64::total_cmp);
    let seconds = median(times.clone());
    let rate = |amount: f64| amount / seconds / 1e9;
    Record {
        name: target.name.clone(),
        base: Some(target.base.clone()),
        length: target.length,
        query_tokens: Some(target.problem.query_len),
        model: target.layers.map(|layers| layers.model.into()),
        workload: target.layers.map(|layers| layers.workload.into()),
        layers: target.layers.map(|layers| layers.count),
        peer: "regard".into(),
        device: device.into(),
        machine: None,
        threads: 0,
        dtype: target.problem.dtype.name().into(),
        kernel: None,
        simd: None,
        layout: Some(match target.layout {
            Layout::TokenMajor => "token-major".into(),
            Layout::HeadMajor => "head-major".into(),
        }),
        copies: None,
        exact_seconds: None,
        seconds,
        fastest: times.first().copied(),
        quartiles: Some([times[times.len() / 4], times[times.len() * 3 / 4]]),
        runs: Some(times.len()),
        gflops: rate(work.flops as f64),
        gbytes_per_second: rate(work.kv_bytes as f64),
        flops_per_byte: Some(work.flops as f64 / work.kv_bytes as f64),
        read_beside: None,
        pipeline: None,
        ceiling: None,
        bound: None,
        fraction_of_ceiling: None,
        max_error: None,
        error_of_allowed: None,
        busy_elsewhere: None,
        ceilings: None,
        against: Vec::new(),
    }
}

/// Seconds per call of each plan, sample by sample. Plans take turns.
fn time(
    plans: &mut [Planned],
    copies: &[Inputs],
    outputs: &mut Outputs,
    effort: &Effort,
    pause: Duration,
) -> Result<Vec<Vec<f64>>, Error> {
    // Each plan goes through all copies, and meets no copy that another plan has just read.
    let mut order: Vec<usize> = (0..plans.len()).collect();
    let first = |plan: usize| plan * copies.len() / plans.len();
    let mut turns: Vec<_> =
        order.iter().map(|&plan| copies.iter().cycle().skip(first(plan))).collect();
    let mut sample = |plan: usize, calls: usize| -> Result<f64, Error> {
        std::thread::sleep(pause);
        let begin = Instant::now();
        for inputs in turns[plan].by_ref().take(calls) {
            plans[plan].run(inputs, outputs)?;
        }
        Ok(begin.elapsed().as_secs_f64() / calls as f64)
    };
    let mut times = vec![Vec::new(); order.len()];
    let mut warm = Vec::new();
    let started = Instant::now();
    while warm.len() < WARM_UP * order.len() && started.elapsed() < WARM_UP_LIMIT {
        for &plan in &order {
            warm.push(sample(plan, 1)?);
        }
    }
    let calls = match pause.is_zero() {
        true => (MIN_SAMPLE.as_secs_f64() / median(warm)).ceil().clamp(1.0, 1000.0) as usize,
        // Only the first call after a pause counts.
        false => 1,
    };
    let started = Instant::now();
    let mut past = Duration::ZERO;
    let time = effort.time * order.len() as u32;
    while past < time || (times[0].len() < effort.repetitions && past < LIMIT) {
        for &plan in &order {
            times[plan].push(sample(plan, calls)?);
        }
        // Each plan follows itself as often as it follows another plan.
        order.reverse();
        past = started.elapsed();
    }
    Ok(times)
}

/// Multiply-adds and bytes. A causal triangle counts as half of its square, as is customary; other
/// ranges count exactly.
pub(super) fn work(target: &Target, inputs: &Inputs) -> Work {
    let problem = &target.problem;
    let mut work = Work::from_inputs(inputs);
    let unbounded =
        problem.variant.window == regard::Window::default() && problem.variant.chunk.is_none();
    if problem.variant.causal
        && unbounded
        && problem.query_len == problem.kv_len
        && problem.query_len > 1
    {
        let factors = [
            problem.batch,
            problem.query_heads,
            problem.query_len,
            problem.kv_len,
            problem.head_dim + problem.value_dim,
        ];
        work.flops = factors.iter().fold(1, |all, &n| all.saturating_mul(n as u64));
    }
    work
}

/// Puts a result under the nearer ceiling: the ceiling of the products, or of reading keys and
/// values once.
pub fn relate(record: &mut Record, target: &Target, ceilings: &Ceilings, level: Level) {
    record.ceilings = Some(ceilings.clone());
    // With operands in the caches neither ceiling is the limit, only the launch overhead.
    if target.warm {
        return;
    }
    let (unit, gflops) = match record.kernel.as_deref().unwrap_or_default() {
        name if name == Kernel::CpuAmx.name() => ("bf16 AMX".into(), ceilings.tiles),
        name if name == Kernel::CpuBf16.name() => ("bf16 VDPBF16PS".into(), ceilings.bf16),
        _ => (format!("f32 {level}"), ceilings.f32_at(level)),
    };
    let Some(gflops) = gflops else { return };
    let products = Bound::Products { unit, gflops };
    let flops_per_byte = record.flops_per_byte.unwrap_or(f64::INFINITY);
    let read = record.read_beside.unwrap_or(ceilings.read);
    let reads = Bound::Reads { gbytes_per_second: read };
    let bound = if read * flops_per_byte < products.value() { reads } else { products };
    record.ceiling = Some(bound.value());
    record.fraction_of_ceiling = Some(bound.fraction(record.gflops, record.gbytes_per_second));
    record.bound = Some(bound);
}

/// About that many rows, evenly spread; the last one always.
pub(super) fn sample(inputs: &Inputs, max_rows: usize) -> Result<Vec<Row>, Error> {
    let rows = all_rows(inputs)?;
    // An odd step, so that a power-of-two number of heads is not always sampled at the same head.
    let step = rows.len().div_ceil(max_rows.max(1)).max(1) | 1;
    let last = rows.last().copied();
    let mut sampled: Vec<_> = rows.iter().copied().step_by(step).collect();
    if sampled.last() != last.as_ref() {
        sampled.extend(last);
    }
    Ok(sampled)
}

/// The largest error, absolute and relative to the allowed error.
fn check(judge: &Judge, operands: &Operands) -> Result<(f64, f64), Failure> {
    let case = &operands.copies()[0];
    let (out, lse) = operands.outputs();
    let lse = lse.map(|lse| lse.view()).transpose()?.map(|lse| case.query_order(lse));
    match judge.check(&case.query_order(out.view()?), lse.as_ref()) {
        Ok(agreement) => Ok((agreement.out_error, agreement.worst)),
        Err(mismatch) => Err(Failure::Wrong(mismatch.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::shapes::{Bounds, Wish};
    use super::*;

    #[test]
    fn plans_for_larger_bounds_take_turns_with_exact_ones() {
        let shapes = ["hq=4 hkv=2 d=16 lq=1 lk=300 dtype=f32".to_string()];
        let wish = Wish {
            named: &crate::bench::NAMED,
            names: &[],
            shapes: &shapes,
            variants: &[],
            dtypes: &[],
            layouts: &[],
            lengths: &[],
            warm: true,
        };
        let exact = wish.targets().unwrap().remove(0);
        let bounds = Some(Bounds { batch: 4, kv_len: 4096 });
        let bounded = Target { bounds, ..exact.clone() };
        let machine = Machine::host().unwrap();
        let settings = [1, 2].map(|threads| Setting {
            machine: machine.clone().with_threads(threads),
            reader: None,
            models: false,
        });
        let wait = Duration::ZERO;
        let effort = Effort { time: Duration::ZERO, repetitions: 4, wait, pause: None, rows: 4 };
        for (target, has_exact) in [(exact, false), (bounded, true)] {
            let Ok(records) = measure(&target, &settings, &effort) else {
                panic!("it runs and is right");
            };
            for (record, threads) in records.iter().zip([1, 2]) {
                assert_eq!((record.threads, record.runs), (threads, Some(4)));
                assert_eq!(record.exact_seconds.is_some_and(|exact| exact > 0.0), has_exact);
                assert_eq!(record.of_exact().is_some(), has_exact);
            }
            assert_eq!(records.len(), 2);
        }
    }
}
