//! `regard check --random`: random problems, tried, judged and made small if they fail.

use crate::case::{self, Target};
use crate::output::{FAILED, Progress, Stop, print, print_json};
use regard::Error;
use regard_cases::random::{self, Cpu, Device, Found, Options, Profile, Summary};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

/// A request to try random problems.
pub struct Request<'a> {
    /// Number of problems.
    pub count: u64,
    /// The seed of the problems; a new number without.
    pub seed: Option<u64>,
    /// The number of the first one.
    pub first: u64,
    /// The kind of problems.
    pub profile: Profile,
    /// On the CPU: all levels, not the one detected.
    pub all_levels: bool,
    /// The folder of failures.
    pub out: &'a Path,
    /// The device's name.
    pub device: &'a str,
    /// JSON instead of text.
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    seed: u64,
    device: String,
    passed: u64,
    failed: u64,
    refused: Vec<Refused>,
    rows: u64,
    arrangements: u64,
    worst: f64,
    /// Whether the device was lost, and the run ended early.
    lost: bool,
    /// Number of failures of each kind, by the way they failed and the features that the plainest
    /// problems have in common.
    kinds: BTreeMap<String, u64>,
    failures: Vec<Failure>,
}

#[derive(Serialize)]
struct Refused {
    count: u64,
    reason: String,
}

#[derive(Serialize)]
struct Failure {
    case: String,
    device: String,
    error: String,
    problem: String,
    file: String,
    repeat: String,
}

/// Threads that run and judge: beyond that many they only wait for a GPU.
const MAX_THREADS: usize = 64;

/// Maximum failures of one kind that are shown and left behind. Further failures of the kind are
/// only counted.
const MAX_SAME_FAILURES: u64 = 4;

/// Tries and prints.
pub fn check(request: &Request) -> Result<u8, Stop> {
    let target = case::device(request.device)?;
    let seed = request.seed.unwrap_or_else(random::new_seed);
    random::crash::watch();
    let options = Options {
        seed,
        first: request.first,
        count: request.count,
        profile: request.profile,
        threads: rayon::current_num_threads()
            .clamp(1, MAX_THREADS)
            .min(request.count.max(1) as usize),
    };
    if request.count > 0 && !request.json {
        let last = request.first + request.count.saturating_sub(1);
        print(&format!(
            "random problems {}..={last} of seed {seed} on {}\n",
            request.first, request.device
        ))?;
    }
    let begin = Instant::now();
    let progress = Progress::for_steps("problems", request.count as usize, !request.json);
    let failures = Mutex::new(Vec::new());
    let tally = Mutex::new(BTreeMap::<String, u64>::new());
    let make = || device(&target, request.all_levels);
    let summary = random::run(&options, &make, &|| progress.step(), &|found| {
        let same_failures = {
            let mut tally = tally.lock().expect("no thread panics here");
            let same_failures = tally.entry(found.signature()).or_default();
            *same_failures += 1;
            *same_failures
        };
        if same_failures > MAX_SAME_FAILURES {
            return;
        }
        let failure = failure(request, seed, &found);
        if !request.json {
            // If stdout is closed, the failures still count.
            let _ = progress.aside(|| print(&failure.text()));
        }
        failures.lock().expect("no thread panics here").push(failure);
    })?;
    progress.finish();
    let failures = failures.into_inner().expect("no thread panics here");
    let tally = tally.into_inner().expect("no thread panics here");
    let report = Report::new(request, seed, summary, (failures, tally));
    let status = if report.failed == 0 && report.passed > 0 { 0 } else { FAILED };
    match request.json {
        true => print_json(&report)?,
        false => print(&report.text(begin.elapsed().as_secs_f64()))?,
    }
    Ok(status)
}

fn device(target: &Target, all_levels: bool) -> Result<Box<dyn Device>, Error> {
    Ok(match target {
        Target::Cpu(_) if all_levels => Box::new(Cpu::all_levels()?),
        Target::Cpu(_) => Box::new(Cpu::detected()?),
        #[cfg(feature = "cuda")]
        Target::Cuda(ordinal) => Box::new(regard_cases::cuda::Runner::new(*ordinal)?),
        #[cfg(all(feature = "metal", target_vendor = "apple"))]
        Target::Metal => Box::new(regard_cases::metal::Runner::new(case::apple_gpu()?)),
        #[cfg(feature = "metal-host")]
        Target::MetalHost => Box::new(metal_host::MetalHost::new()?),
    })
}

/// Writes a failure to files, and prints their names.
fn failure(request: &Request, seed: u64, found: &Found) -> Failure {
    let case = found.spec.generate();
    let path = request.out.join(format!("random-{seed}-{}.safetensors", found.number));
    let left = std::fs::create_dir_all(request.out)
        .map_err(|error| error.to_string())
        .and_then(|()| random::leave(&case, &path).map_err(|error| error.to_string()));
    let profile = match request.profile {
        Profile::All => "",
        Profile::Prefill => " --profile prefill",
        Profile::Small => " --profile small",
        Profile::Batches => " --profile batches",
    };
    let levels = if request.all_levels { " --levels all" } else { "" };
    Failure {
        case: format!("random/{seed}/{}", found.number),
        device: found.broken.way.clone(),
        error: found.broken.text.clone(),
        problem: random::describe(&found.spec),
        file: match left {
            Ok(()) => path.display().to_string(),
            Err(error) => format!("not written: {error}"),
        },
        repeat: format!(
            "regard check --random 1 --first {} --seed {seed}{profile} --device {}{levels}",
            found.number, request.device
        ),
    }
}

impl Failure {
    fn text(&self) -> String {
        let Failure { case, device, error, problem, file, repeat } = self;
        let error = error.replace('\n', " ");
        format!(
            "FAIL {case}  {device}  {error}\n     {problem}\n     file: {file}\n     \
             repeat: {repeat}\n"
        )
    }
}

impl Report {
    fn new(
        request: &Request,
        seed: u64,
        summary: Summary,
        (failures, kinds): (Vec<Failure>, BTreeMap<String, u64>),
    ) -> Report {
        let Summary { passed, rows, arrangements, worst, refused, failed, lost } = summary;
        let refused =
            refused.into_iter().map(|(reason, count)| Refused { count, reason }).collect();
        let device = request.device.to_string();
        Report {
            seed,
            device,
            passed,
            failed,
            refused,
            rows,
            arrangements,
            worst,
            lost,
            kinds,
            failures,
        }
    }

    fn text(&self, seconds: f64) -> String {
        let mut text = format!(
            "{} rows judged, at most {:.0}% of what is allowed; {} arrangements compared to the \
             bit; {seconds:.0} s\n",
            self.rows,
            self.worst * 100.0,
            self.arrangements
        );
        for Refused { count, reason } in &self.refused {
            text += &format!("refused {count}: {reason}\n");
        }
        for (kind, count) in &self.kinds {
            text += &format!("failed {count}: {kind}\n");
        }
        if self.lost {
            text += "the run ended early: the device's driver failed, and nothing is known of \
                     what came after\n";
        }
        text + &format!("{} passed, {} failed\n", self.passed, self.failed)
    }
}
