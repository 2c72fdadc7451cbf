//! The CUDA modules: the shipped modules, and the modules that a run launches.

use super::{Backend, CoverageCase, Feature, Features, Subject, Types};
use crate::cuda::{with_l2_bytes, with_multiprocessors};
use crate::{CacheSpec, Case, Granularity, Output, Scales, Spec};
use regard::cuda::registry::{Cache, Config, Element, Family, MODULES, Module, Storage};
use regard::cuda::{DeviceMemory, Gpu, Launches, launches};
use regard::{
    CudaFacts, DType, Device, Error, Inputs, Machine, Outputs, Plan, Problem, Values, Window,
};

/// CUDA modules that compute attention, planned for GPUs of all kinds.
#[derive(Debug, Clone)]
pub struct Cuda {
    machines: Vec<Machine>,
}

impl Cuda {
    /// All GPUs that selection tells apart.
    pub fn all() -> Cuda {
        Cuda { machines: machines().to_vec() }
    }

    /// The GPUs whose plans this GPU runs, and itself.
    pub fn on(gpu: &Gpu) -> Cuda {
        let Device::Cuda(here) = &gpu.machine().device else {
            return Cuda { machines: Vec::new() };
        };
        let mut machines: Vec<_> = machines().to_vec();
        machines.retain(|machine| match &machine.device {
            // Modules of Hopper's plans run nowhere else.
            Device::Cuda(facts) if facts.compute_capability == 90 => here.compute_capability == 90,
            // Later ones take modules of Hopper's that later GPUs run.
            Device::Cuda(facts) => {
                let oldest = if facts.compute_capability > 90 { 90 } else { 80 };
                oldest <= here.compute_capability && facts.shared_bytes <= here.shared_bytes
            }
            _ => false,
        });
        machines.retain(|machine| machine.device != gpu.machine().device);
        machines.insert(0, Machine { name: "this".into(), ..gpu.machine().clone() });
        Cuda { machines }
    }
}

/// The cases that try the modules for prefix groups.
const PREFIX_CASES: &str = "--cases prefixes/";

/// Modules that the search does not look for, each with what tries it: those for another purpose
/// than attention, and those for prefix groups, which run beside a decode module.
pub const OTHERS: [(&str, &str); 21] = [
    ("append", "--laws=append"),
    ("merge", "--laws=merge"),
    ("ceiling", "regard bench"),
    ("prefix_f16_64_64_plain_wgmma_sm90", PREFIX_CASES),
    ("prefix_f16_64_64_plain_sm90", PREFIX_CASES),
    ("prefix_f16_64_64_plain_sm80", PREFIX_CASES),
    ("prefix_f16_64_64_fallback_sm80", PREFIX_CASES),
    ("prefix_f16_128_128_plain_wgmma_sm90", PREFIX_CASES),
    ("prefix_f16_128_128_plain_sm90", PREFIX_CASES),
    ("prefix_f16_128_128_plain_sm80", PREFIX_CASES),
    ("prefix_f16_128_128_fallback_sm80", PREFIX_CASES),
    ("prefix_f16_256_256_fallback_sm80", PREFIX_CASES),
    ("prefix_bf16_64_64_plain_wgmma_sm90", PREFIX_CASES),
    ("prefix_bf16_64_64_plain_sm90", PREFIX_CASES),
    ("prefix_bf16_64_64_plain_sm80", PREFIX_CASES),
    ("prefix_bf16_64_64_fallback_sm80", PREFIX_CASES),
    ("prefix_bf16_128_128_plain_wgmma_sm90", PREFIX_CASES),
    ("prefix_bf16_128_128_plain_sm90", PREFIX_CASES),
    ("prefix_bf16_128_128_plain_sm80", PREFIX_CASES),
    ("prefix_bf16_128_128_fallback_sm80", PREFIX_CASES),
    ("prefix_bf16_256_256_fallback_sm80", PREFIX_CASES),
];

/// One GPU for each set of modules that selection knows: Hopper; data centre GPUs before and after
/// it, with much shared memory; workstation GPUs, with little. Plans for the other GPUs run on
/// Hopper too.
fn machines() -> [Machine; 4] {
    let gpu =
        |name: &str, compute_capability, multiprocessors, shared_kib: usize, l2_mib: usize| {
            Machine {
                name: name.into(),
                device: Device::Cuda(CudaFacts {
                    compute_capability,
                    multiprocessors,
                    shared_bytes: shared_kib << 10,
                    l2_bytes: l2_mib << 20,
                }),
            }
        };
    [
        gpu("h200", 90, 132, 227, 50),
        gpu("a100", 80, 108, 163, 40),
        gpu("l40s", 89, 142, 99, 96),
        gpu("b200", 100, 148, 227, 126),
    ]
}

/// Shapes that decode takes: one row and several, a group and none, in tiles of 8, 32 and 64 rows
/// and more rows than one tile has; keys for one block and for several.
const DECODE: [[usize; 5]; 20] = [
    [1, 2, 2, 70, 2],
    [1, 8, 2, 70, 3],
    [3, 4, 2, 90, 4],
    [5, 8, 2, 90, 3],
    [12, 2, 2, 90, 3],
    [1, 32, 2, 70, 3],
    [10, 8, 2, 90, 3],
    [33, 1, 1, 90, 3],
    [1, 64, 1, 70, 3],
    [16, 8, 1, 90, 3],
    [1, 8, 2, 700, 2],
    [3, 8, 2, 700, 3],
    [5, 16, 2, 700, 2],
    [16, 8, 2, 700, 2],
    // In a ragged batch the longest sequence is prefill's, and the others are decode's, in tiles
    // for one token of a large group.
    [20, 8, 1, 90, 3],
    [18, 32, 1, 90, 3],
    [18, 64, 1, 90, 3],
    [1, 32, 2, 600, 2],
    [18, 64, 1, 600, 3],
    [18, 32, 1, 600, 3],
];

/// Groups that fill more than tiles of 64 rows with one token.
const WIDE_GROUPS: [[usize; 5]; 3] = [[1, 72, 1, 70, 3], [2, 128, 1, 700, 2], [1, 160, 1, 600, 2]];

/// Shapes that decode takes with several key/value heads in a tile, on a GPU of one multiprocessor:
/// one row and several, a group and none.
const ADJACENT_HEADS: [[usize; 5]; 6] = [
    [1, 4, 4, 700, 3],
    [2, 12, 4, 700, 3],
    [1, 32, 4, 1000, 2],
    [1, 8, 8, 700, 2],
    [2, 24, 8, 500, 2],
    [1, 64, 8, 500, 2],
];

/// Shapes that prefill takes: a tile that is not full and several tiles, a group and none, few keys
/// and more than modules for short ones take.
const PREFILL: [[usize; 5]; 12] = [
    [40, 2, 1, 90, 1],
    [40, 4, 1, 90, 3],
    [70, 2, 2, 130, 3],
    [140, 2, 1, 190, 2],
    [200, 2, 1, 330, 1],
    [70, 2, 1, 600, 1],
    [70, 2, 1, 600, 3],
    [40, 2, 1, 1100, 3],
    [200, 1, 1, 1100, 1],
    // Too few rows per key for a copy of codes.
    [70, 1, 1, 90, 2],
    [70, 1, 1, 600, 3],
    [70, 1, 1, 1100, 3],
];

/// Shapes whose rows per key are enough for a copy that has more of each key, with a window too;
/// the last for a copy in parts.
const COPIED: [[usize; 5]; 4] =
    [[160, 8, 1, 190, 3], [50, 32, 1, 330, 1], [70, 20, 1, 1100, 1], [150, 8, 4, 200, 2]];

/// L2 bytes per head dim of a GPU that makes copies of so few keys in parts.
const SMALL_L2: usize = 240;

/// Shapes that the prefill kernel for short windows takes: four heads and more per key/value head,
/// in part of an item and in several.
const WINDOWED: [[usize; 5]; 4] =
    [[40, 4, 1, 90, 3], [70, 8, 2, 130, 3], [200, 5, 1, 330, 1], [140, 16, 2, 600, 2]];

/// A window that it takes.
const SHORT_WINDOW: Window = Window { left: Some(60), right: Some(20) };

fn subject(module: &Module, machines: &[Machine]) -> Option<Subject> {
    let operands = module.operands()?;
    let (head_dim, value_dim) = (operands.head_dim, operands.value_dim);
    let is_for_windows = module.family() == Family::PrefillSm90Window;
    let (shapes, page_keys) = match &module.config {
        Config::Prefix(_) => return None,
        Config::Prefill(prefill) if is_for_windows => (WINDOWED.to_vec(), prefill.box_keys()),
        Config::Prefill(prefill) if matches!(prefill.cache, Cache::Scaled | Cache::Terms(_)) => {
            ([&PREFILL[..], &COPIED].concat(), prefill.box_keys())
        }
        Config::Prefill(prefill) => (PREFILL.to_vec(), prefill.box_keys()),
        Config::Decode(config) if config.lists && config.cache.is_latent() => {
            ([&DECODE[..], &WIDE_GROUPS].concat(), 64)
        }
        Config::Decode(config) if config.tile_heads > 1 => (ADJACENT_HEADS.to_vec(), 64),
        Config::Decode(_) | Config::Utility(_) => (DECODE.to_vec(), 64),
    };
    let less = |keys, values| (head_dim - keys, value_dim - values);
    // Smaller ones: by rows of 16 bytes, another number of values than of keys, and whole blocks.
    let dims = match module.cache() {
        Cache::Elements | Cache::Scaled | Cache::Bytes => vec![less(0, 0), less(8, 8), less(8, 24)],
        Cache::Latent | Cache::Mla656 => vec![less(0, 0)],
        Cache::Q8_0 | Cache::Q4_0 | Cache::Terms(_) => vec![less(0, 0), less(32, 32)],
        Cache::Any => vec![less(0, 0), less(8, 8), less(8, 24), less(32, 32)],
        Cache::Pair(keys, values) if keys.has_blocks() || values.has_blocks() => {
            vec![less(0, 0), less(32, 32)]
        }
        Cache::Pair(..) => vec![less(0, 0), less(8, 8), less(8, 24)],
    };
    let runs_on = |machine: &&Machine| match &machine.device {
        Device::Cuda(facts) => module.runs_on(facts.compute_capability),
        _ => false,
    };
    // Tiles of several heads, and WGMMA at head dim 256, are for much to read per multiprocessor.
    let multiprocessors = match module.config {
        Config::Decode(config) if config.tile_heads > 1 => Some(1),
        Config::Decode(config) if config.wgmma && config.has_large_heads() => Some(2),
        _ => None,
    };
    let suited = |machine: Machine| match multiprocessors {
        Some(count) => with_multiprocessors(machine, count),
        None => machine,
    };
    let mut machines: Vec<_> = machines.iter().filter(runs_on).cloned().map(suited).collect();
    if matches!(module.cache(), Cache::Scaled | Cache::Terms(_)) {
        let of_parts = |machine: &Machine| with_l2_bytes(machine.clone(), SMALL_L2 * head_dim);
        let of_parts = machines.first().map(of_parts);
        machines.extend(of_parts);
    }
    Some(Subject {
        name: module.name().into(),
        types: types(module, operands.element),
        values: match module.cache().is_latent() {
            true => Values::KeyPrefix,
            false => Values::Separate,
        },
        lists: matches!(module.config, Config::Decode(config) if config.lists),
        page_lists: matches!(module.config, Config::Decode(config) if config.takes_page_lists()),
        window: if is_for_windows { SHORT_WINDOW } else { Window::default() },
        dims,
        shapes,
        page_keys,
        machines,
    })
}

/// Types that a module is for, or may be: between them every format, and every granularity of
/// scales.
fn types(module: &Module, element: Element) -> Vec<Types> {
    let queries = match element {
        Element::F16 => DType::F16,
        Element::Bf16 => DType::BF16,
        Element::F32 => DType::F32,
    };
    let of = |cache| Types { queries, cache };
    let caches = match module.cache() {
        Cache::Elements | Cache::Latent => vec![CacheSpec::default()],
        Cache::Bytes => vec![
            both(DType::E4M3, Granularity::Head),
            both(DType::I8, Granularity::Token),
            both(DType::E5M2, Granularity::Page),
            both(DType::E4M3, Granularity::Tensor),
        ],
        Cache::Scaled => vec![
            both(DType::I8, Granularity::Token),
            both(DType::E4M3, Granularity::Page),
            mixed(DType::E5M2, DType::Q4_0),
        ],
        Cache::Terms(_) if element == Element::F16 => vec![
            both(DType::Q8_0, Granularity::Head),
            both(DType::Q4_0, Granularity::Head),
            both(DType::I8, Granularity::Token),
            mixed(DType::Q4_0, DType::E4M3),
            mixed(DType::BF16, DType::F32),
        ],
        Cache::Terms(3) => vec![
            both(DType::Q8_0, Granularity::Head),
            mixed(DType::Q8_0, DType::E4M3),
            mixed(DType::F32, DType::BF16),
            both(DType::I8, Granularity::Token),
        ],
        Cache::Terms(_) => vec![
            both(DType::Q8_0, Granularity::Head),
            both(DType::Q4_0, Granularity::Head),
            mixed(DType::Q4_0, DType::E4M3),
            mixed(DType::F16, DType::F32),
            mixed(DType::F32, DType::BF16),
        ],
        Cache::Mla656 => vec![
            CacheSpec { v: Some(DType::Mla656Latent), ..both(DType::Mla656, Granularity::Token) },
            both(DType::E4M3, Granularity::Tensor),
        ],
        Cache::Q8_0 => vec![both(DType::Q8_0, Granularity::Head)],
        Cache::Q4_0 => vec![both(DType::Q4_0, Granularity::Head)],
        Cache::Pair(keys, values) => {
            let dtype = |storage| match storage {
                Storage::Elements => queries,
                Storage::Bytes => DType::E4M3,
                Storage::Q8_0 => DType::Q8_0,
                Storage::Q4_0 => DType::Q4_0,
            };
            vec![mixed(dtype(keys), dtype(values))]
        }
        Cache::Any if element == Element::F32 => return types_in_f32(),
        Cache::Any if module.family() == Family::PrefillSm90 => vec![
            mixed(DType::BF16, DType::Q8_0),
            mixed(DType::Q4_0, DType::BF16),
            mixed(DType::I8, DType::Q4_0),
            mixed(DType::Q8_0, DType::E4M3),
        ],
        Cache::Any => vec![
            both(DType::I8, Granularity::Head),
            both(DType::E4M3, Granularity::Token),
            both(DType::E5M2, Granularity::Page),
            mixed(DType::E4M3, DType::I8),
            mixed(DType::E4M3, queries),
        ],
    };
    caches.into_iter().map(of).collect()
}

/// The same for modules in f32 for caches in any format. Queries of f32 run in them over all
/// caches. Other queries run in them if keys and values are of different kinds or very long, and in
/// prefill if f16 cannot hold probabilities times the scales of values.
fn types_in_f32() -> Vec<Types> {
    let of = |queries, cache| Types { queries, cache };
    vec![
        of(DType::F32, both(DType::E4M3, Granularity::Token)),
        of(DType::F32, both(DType::I8, Granularity::Head)),
        of(DType::F32, both(DType::E5M2, Granularity::Page)),
        of(DType::F32, both(DType::Q8_0, Granularity::Head)),
        of(DType::F32, mixed(DType::BF16, DType::Q4_0)),
        of(DType::F16, both(DType::I8, Granularity::Token)),
        of(DType::F16, mixed(DType::E4M3, DType::F16)),
        of(DType::F16, mixed(DType::F32, DType::E5M2)),
        of(DType::BF16, mixed(DType::Q4_0, DType::I8)),
        of(DType::BF16, mixed(DType::BF16, DType::Q8_0)),
    ]
}

/// Keys and values in one format.
fn both(dtype: DType, granularity: Granularity) -> CacheSpec {
    CacheSpec::new(dtype, granularity, Scales::Fitted)
}

/// Keys and values in a format each.
fn mixed(keys: DType, values: DType) -> CacheSpec {
    CacheSpec { k: Some(keys), v: Some(values), ..both(keys, Granularity::Token) }
}

impl Backend for Cuda {
    fn subjects(&self) -> Vec<Subject> {
        let mut subjects: Vec<_> =
            MODULES.iter().filter_map(|module| subject(module, &self.machines)).collect();
        // Modules for all types and head dims.
        let utility = |family: Family, types| Subject {
            name: family.name().into(),
            types,
            values: Values::Separate,
            lists: false,
            page_lists: false,
            window: Window::default(),
            dims: vec![(64, 64), (128, 128)],
            shapes: PREFILL.to_vec(),
            page_keys: 64,
            machines: self.machines.clone(),
        };
        subjects.push(utility(Family::MaskMap, vec![Types::same(DType::BF16)]));
        let types = [DType::BF16, DType::F16].map(Types::same);
        subjects.push(utility(Family::CombineSplits, types.to_vec()));
        let of = |queries, cache| Types { queries, cache };
        let head = Granularity::Head;
        subjects.push(utility(
            Family::Widen,
            vec![
                of(DType::BF16, both(DType::E4M3, head)),
                of(DType::F16, both(DType::I8, Granularity::Tensor)),
                of(DType::BF16, CacheSpec { k: Some(DType::BF16), ..both(DType::E5M2, head) }),
                of(DType::F16, CacheSpec { v: Some(DType::E4M3), ..both(DType::E5M2, head) }),
                of(DType::BF16, both(DType::I8, Granularity::Token)),
                of(DType::BF16, both(DType::E4M3, Granularity::Page)),
                of(DType::BF16, mixed(DType::E5M2, DType::Q4_0)),
            ],
        ));
        subjects
    }

    fn runs(
        &self,
        spec: &Spec,
        lse: bool,
        machine: &Machine,
    ) -> Result<Vec<(String, Features)>, Error> {
        spec.outlined(lse, |inputs, outputs| {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
            let queued = launches(&plan, inputs, outputs)?;
            Ok(used(
                spec,
                plan.cuda().expect("for a GPU"),
                queued.iter().map(|launch| (launch.module, launch.entry)),
            ))
        })
    }
}

/// Runs a case on a GPU, twice.
///
/// # Errors
/// As [`Runner::run`](crate::cuda::Runner::run), or if something else runs than the case was made
/// for, or the two runs give different bits.
pub fn run(
    runner: &mut crate::cuda::Runner,
    subject: &Subject,
    case: &CoverageCase,
    data: &Case,
) -> Result<Output, Error> {
    let [first, second] = [(); 2].map(|()| run_once(runner, subject, case, data));
    let (first, second) = (first?, second?);
    for (name, a, b) in [("out", &first.out, &second.out), ("lse", &first.lse, &second.lse)] {
        if a.data().to_le_bytes() != b.data().to_le_bytes() {
            return Err(Error::argument(
                name,
                "other bits in a second run of the same plan",
                "the same bits",
            ));
        }
    }
    Ok(first)
}

fn run_once(
    runner: &mut crate::cuda::Runner,
    subject: &Subject,
    case: &CoverageCase,
    data: &Case,
) -> Result<Output, Error> {
    case.run(data, |inputs, outputs| {
        // Checked here: contents can be read here.
        Problem::from_operands(inputs, outputs)?;
        let planned = |_: &Gpu, inputs: &Inputs<DeviceMemory>, outputs: &Outputs<DeviceMemory>| {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &case.machine)?;
            let queued = launches(&plan, inputs, outputs)?;
            let queued = queued.iter().map(|launch| (launch.module, launch.entry));
            let used = used(&case.spec, plan.cuda().expect("for a GPU"), queued);
            if used.iter().any(|(name, _)| *name == subject.name) {
                return Ok(plan);
            }
            let names: Vec<_> = used.into_iter().map(|(name, _)| name).collect();
            Err(Error::argument("kernel", names.join(", "), &subject.name))
        };
        runner.run_planned(inputs, outputs, 1, planned).map(|_| ())
    })
}

/// The queued modules that have something to do, with the features of the run.
pub fn used(
    spec: &Spec,
    launches: &Launches,
    queued: impl Iterator<Item = (&'static str, &'static str)> + Clone,
) -> Vec<(String, Features)> {
    let min_len = launches.prefill.as_ref().map(|prefill| prefill.min_query_len as usize);
    let max_len = launches.decode.as_ref().map(|decode| decode.max_query_len as usize);
    let lengths =
        || spec.sequences.iter().map(|sequence| sequence.q_len).filter(|&q_len| q_len > 0);
    let prefills = min_len.is_some_and(|min_len| lengths().any(|q_len| q_len >= min_len));
    let decodes = max_len.is_some_and(|max_len| lengths().any(|q_len| q_len <= max_len));
    let mut of_run = Features::default();
    if prefills && decodes {
        of_run = of_run.with(Feature::Beside);
    }
    let busy = |entry| match entry {
        "prefill" | "mask_map" | "widen" | "widen_rounded" | "widen_units" | "combine_splits" => {
            prefills
        }
        _ => decodes,
    };
    if queued.clone().filter(|(_, entry)| *entry == "prefill").count() > 1 {
        of_run = of_run.with(Feature::HeadParts);
    }
    let runs = |name| queued.clone().any(|(_, entry)| entry == name);
    let (combines, splits) = (runs("combine"), runs("combine_splits"));
    let kernels = queued.filter(|(_, entry)| *entry != "combine" && busy(entry));
    let named = kernels.map(|(module, entry)| {
        let of_run = match entry {
            "decode" if combines => of_run.with(Feature::Combine),
            "prefill" if splits => of_run.with(Feature::KeySplits),
            _ => of_run,
        };
        (module.to_string(), of_run)
    });
    named.collect()
}
