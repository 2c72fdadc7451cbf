//! `regard bench`: the speed of attention here, next to the machine's ceilings and to other
//! implementations. Described in `docs/bench.md`.

mod ceiling;
#[cfg(feature = "cuda")]
mod cuda;
mod load;
mod measure;
#[cfg(all(feature = "metal", target_vendor = "apple"))]
mod metal;
mod operands;
mod pipeline;
mod plot;
mod record;
mod shapes;
mod table;
mod totals;

pub use measure::Effort;
pub use shapes::{Layout, NAMED};

use crate::case;
use crate::files;
use crate::models::{self, Place};
use crate::output::{FAILED, Progress, Stop, error, print, print_json};
use ceiling::Ceilings;
use measure::{Failure, Setting};
use record::{Against, Record};
use regard::{DType, Device, Error, Machine};
use shapes::{Named, Target, Wish};
use std::path::{Path, PathBuf};

/// A request to measure, and its outputs.
pub struct Request<'a> {
    /// Names of shapes.
    pub names: &'a [String],
    /// Shapes in words.
    pub shapes: &'a [String],
    /// Names of models, instead of shapes.
    pub models: &'a [String],
    /// Names of workloads of the models.
    pub workloads: &'a [String],
    /// Variants of each shape, in words.
    pub variants: &'a [String],
    /// Types of operands.
    pub dtypes: &'a [String],
    /// Orders of dimensions.
    pub layouts: &'a [Layout],
    /// Lengths to run each shape at.
    pub lengths: &'a [usize],
    /// Operands in the caches.
    pub warm: bool,
    /// Runs that read one schedule, as the layers of a step do; `None` for runs without. On CUDA.
    pub layers: Option<usize>,
    /// The device's name.
    pub device: &'a str,
    /// Duration and number of runs.
    pub effort: Effort,
    /// Numbers of threads to measure each shape with, on CPUs. Empty: all threads of the machine.
    pub scaling: &'a [usize],
    /// Whether to measure ceilings.
    pub ceilings: bool,
    /// Result files to show instead of measuring.
    pub from: &'a [PathBuf],
    /// Result files to compare with.
    pub against: &'a [PathBuf],
    /// The folder of results.
    pub out: Option<&'a Path>,
    /// The file of the picture.
    pub plot: Option<&'a Path>,
    /// A markdown table.
    pub markdown: bool,
    /// JSON instead of a table.
    pub json: bool,
}

/// Lengths of the series that a picture needs, unless others are asked for.
const PREFILL_LENGTHS: [usize; 6] = [128, 256, 512, 1024, 2048, 4096];
const DECODE_LENGTHS: [usize; 7] = [256, 1024, 4096, 8192, 16384, 32768, 65536];

/// Measures, or reads earlier measurements, and prints.
pub fn bench(request: &Request) -> Result<u8, Stop> {
    // Before anything is measured for them.
    for path in request.out.into_iter().chain(request.plot) {
        files::expect_writable(path).map_err(|error| {
            Stop::Failed(format!("{}: cannot be written: {error}", path.display()))
        })?;
    }
    if request.out.is_some() && request.out == request.plot {
        return Err(Error::argument("--plot", "the file of --out", "another file").into());
    }
    let mut others = Vec::new();
    for path in request.against {
        others.push((path, record::read(path)?));
    }
    let (mut records, failed) = if request.from.is_empty() {
        let (records, failed) = measured(request)?;
        (totals::with_totals(records), failed)
    } else {
        let mut records = Vec::new();
        for path in request.from {
            records.extend(record::read(path)?);
        }
        (record::join_rounds(records), 0)
    };
    let unlike = others.iter().find(|(_, others)| {
        let any = records.iter().any(|record| others.iter().any(|other| other.same_work(record)));
        !any && failed == 0
    });
    let compared = match unlike {
        None => Ok(()),
        Some((path, _)) => {
            let what = "nothing in it was measured with the same shapes, types and threads";
            Err(Stop::Failed(format!("{}: {what}", path.display())))
        }
    };
    compare(
        &mut records,
        &record::join_rounds(others.into_iter().flat_map(|(_, others)| others).collect()),
    );
    // Each output is written even if another fails: measuring took long.
    let written = request.out.map_or(Ok(()), |path| record::write(&records, path));
    let drawn = request.plot.map_or(Ok(()), |path| {
        plot::draw(&records)
            .and_then(|picture| {
                files::write(path, picture.as_bytes()).map_err(|error| error.to_string())
            })
            .map_err(|message| Stop::Failed(format!("{}: {message}", path.display())))
    });
    let printed = if request.json {
        print_json(&records)
    } else if !records.is_empty() {
        let style = if request.markdown { table::Style::Markdown } else { table::Style::Text };
        print(&format!("{}\n{}", table::heading(&records), table::table(&records, style)))
    } else {
        Ok(())
    };
    written.and(drawn).and(printed).and(compared)?;
    Ok(if failed == 0 { 0 } else { FAILED })
}

/// Runs all targets. Returns the number of targets that did not run or were wrong.
fn measured(request: &Request) -> Result<(Vec<Record>, usize), Stop> {
    match case::device(request.device)? {
        case::Target::Cpu(machine) => measured_on_cpu(request, &machine),
        #[cfg(feature = "cuda")]
        case::Target::Cuda(ordinal) => {
            expect_no_scaling(request)?;
            cuda::measured(request, ordinal)
        }
        #[cfg(feature = "metal-host")]
        case::Target::MetalHost => {
            let allowed = "a device whose speed means something";
            Err(Error::argument("device", "metal-host", allowed).into())
        }
        #[cfg(all(feature = "metal", target_vendor = "apple"))]
        case::Target::Metal => {
            expect_no_cuda_options(request)?;
            expect_no_scaling(request)?;
            metal::measured(request)
        }
    }
}

/// Measures every target on a GPU. Returns the records with their targets, and the number of
/// targets that did not run or were wrong.
#[cfg(any(feature = "cuda", all(feature = "metal", target_vendor = "apple")))]
fn measure_each<'a>(
    targets: &'a [Target],
    progress: &Progress,
    measure: impl Fn(&Target) -> Result<Record, String>,
) -> (Vec<(Record, &'a Target)>, usize) {
    let (mut records, mut failed) = (Vec::new(), 0);
    for target in targets {
        let name = format!("{} {}", target.name, target.problem.dtype);
        progress.about(&name);
        match measure(target) {
            Ok(record) => records.push((record, target)),
            Err(message) => {
                failed += 1;
                progress.aside(|| error(&format!("{name}: {message}")));
            }
        }
        progress.step();
    }
    (records, failed)
}

/// Only CPUs have threads.
#[cfg(any(feature = "cuda", all(feature = "metal", target_vendor = "apple")))]
fn expect_no_scaling(request: &Request) -> Result<(), Stop> {
    match request.scaling.first() {
        Some(threads) => Err(Error::argument("--scaling", threads, "on --device cpu only").into()),
        None => Ok(()),
    }
}

/// Only on NVIDIA GPUs is there the schedule of a step, and are there graphs to pause between.
fn expect_no_cuda_options(request: &Request) -> Result<(), Stop> {
    let allowed = "on --device cuda only";
    if let Some(layers) = request.layers {
        return Err(Error::argument("--layers", layers, allowed).into());
    }
    match request.effort.pause {
        Some(pause) => Err(Error::argument("--pause", pause.as_secs_f64(), allowed).into()),
        None => Ok(()),
    }
}

fn measured_on_cpu(request: &Request, machine: &Machine) -> Result<(Vec<Record>, usize), Stop> {
    expect_no_cuda_options(request)?;
    let targets = targets(request, &NAMED, Place::Cpu)?;
    let Device::Cpu(facts) = &machine.device else {
        return Err(Stop::Failed("the device is not described as a CPU".into()));
    };
    let threads = thread_counts(request, facts.threads)?;
    let steps = targets.len() + 2 * usize::from(request.ceilings);
    let progress = Progress::for_steps("steps", steps, !request.json);
    // Before the shapes and after them: a disturbance of one of the two measurements hardly affects
    // the other.
    let ceilings = || -> Result<(Vec<Ceilings>, Vec<Option<ceiling::Reader>>), Error> {
        if !request.ceilings {
            return Ok((Vec::new(), threads.iter().map(|_| None).collect()));
        }
        progress.about("ceilings");
        load::Load::wait_for_quiet(request.effort.wait);
        let ceilings = Ceilings::measure(facts.level, &threads, facts.l3_bytes)?;
        progress.step();
        Ok(ceilings.into_iter().map(|(ceilings, reader)| (ceilings, Some(reader))).unzip())
    };
    let (before, readers) = ceilings().map_err(|error| Stop::Failed(error.to_string()))?;
    let setting = |(&threads, reader): (&usize, _)| Setting {
        machine: machine.clone().with_threads(threads),
        reader,
        models: request.ceilings,
    };
    let settings: Vec<_> = threads.iter().zip(readers).map(setting).collect();
    let mut measured: Vec<(Vec<Record>, &Target)> = Vec::new();
    let mut failed = 0;
    for target in &targets {
        progress.about(&format!("{} {}", target.name, target.problem.dtype));
        match measure::measure(target, &settings, &request.effort) {
            Ok(records) => measured.push((records, target)),
            Err(Failure::Error(Error::Refused(refusal))) => {
                return Err(Error::Refused(refusal).into());
            }
            Err(failure) => {
                failed += 1;
                let message = match failure {
                    Failure::Error(problem) => problem.to_string(),
                    Failure::Wrong(mismatch) => mismatch,
                };
                progress.aside(|| {
                    error(&format!("{} {}: {message}", target.name, target.problem.dtype))
                });
            }
        }
        progress.step();
    }
    if !before.is_empty() {
        // Results so far are kept even if these fail.
        let (after, _) = ceilings().unwrap_or_else(|problem| {
            progress.aside(|| error(&format!("ceilings afterwards: {problem}")));
            (before.clone(), Vec::new())
        });
        let ceilings: Vec<_> =
            before.into_iter().zip(after).map(|(before, after)| before.or_higher(after)).collect();
        for (records, target) in &mut measured {
            for (record, ceilings) in records.iter_mut().zip(&ceilings) {
                measure::relate(record, target, ceilings, facts.level);
            }
        }
    }
    progress.finish();
    Ok((measured.into_iter().flat_map(|(records, _)| records).collect(), failed))
}

/// The numbers of threads to measure with, from few to many.
fn thread_counts(request: &Request, threads: usize) -> Result<Vec<usize>, Error> {
    if let Some(&wrong) = request.scaling.iter().find(|&&count| count == 0 || count > threads) {
        return Err(Error::argument("--scaling", wrong, format!("1 to {threads} threads")));
    }
    let mut counts = request.scaling.to_vec();
    counts.sort_unstable();
    counts.dedup();
    Ok(if counts.is_empty() { vec![threads] } else { counts })
}

fn targets(request: &Request, named: &'static [Named], place: Place) -> Result<Vec<Target>, Error> {
    let floats = [DType::F32, DType::BF16, DType::F16];
    let dtype = |name: &String| {
        let found = floats.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| Error::argument("dtype", format!("\"{name}\""), "f32, bf16, f16"))
    };
    let dtypes = request.dtypes.iter().map(dtype).collect::<Result<Vec<_>, _>>()?;
    let wish = Wish {
        named,
        names: request.names,
        shapes: request.shapes,
        variants: request.variants,
        dtypes: &dtypes,
        layouts: request.layouts,
        lengths: request.lengths,
        warm: request.warm,
    };
    if !request.models.is_empty() {
        let workloads = models::workloads(request.workloads, place)?;
        return wish.model_targets(&models::models(request.models)?, &workloads);
    }
    let mut targets = wish.targets()?;
    if request.plot.is_some() && request.lengths.is_empty() {
        for (name, lengths) in [("p2048", &PREFILL_LENGTHS[..]), ("d4k", &DECODE_LENGTHS)] {
            targets.extend(
                Wish { names: &[name.into()], shapes: &[], variants: &[], lengths, ..wish }
                    .targets()?,
            );
        }
    }
    Ok(targets)
}

/// Notes others' times with the results of the same work.
fn compare(records: &mut [Record], others: &[Record]) {
    for record in records {
        for other in others {
            if !other.same_work(record) {
                continue;
            }
            let peer = match (other.peer.as_str(), &other.kernel) {
                ("regard", Some(kernel)) => format!("regard before ({kernel})"),
                (peer, _) => peer.to_string(),
            };
            let ratio = other.seconds / record.seconds;
            record.against.push(Against {
                peer,
                seconds: other.seconds,
                ratio,
                busy_elsewhere: other.busy_elsewhere,
            });
        }
    }
}
