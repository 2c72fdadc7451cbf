//! Selection and launch of the CUDA kernel of a problem: pure functions of the problem and the
//! GPU's facts.

use super::codes::{self, CodesDecode};
use super::latent::{self, LatentDecode};
use super::prefill::{self, Division};
use super::prefix;
use super::registry::{self, Build, Cache, DecodeConfig, Element, Module, Operands, Storage};
use super::shape::{Shape, max_key_groups};
use super::widen;
use super::work::{PARTIAL_RANGE_BYTES, packed_rows, page_aligned_16, start_units, tiles};
use super::{
    COUNTER_BYTES, Combine, Decode, Launch, Launches, PREFILL_COUNTER_BYTES, Prefill,
    SCHEDULED_BYTES, StepSchedule, WORKSPACE_ALIGNMENT, Widened,
};
use crate::dtype::DType;
use crate::error::Refusal;
use crate::machine::{CudaFacts, Machine};
use crate::plan::Selection;
use crate::problem::{Problem, QueryStorage};
use crate::select::{Choice, Kernel};
use crate::split::{INVARIANT_KEYS, Split};

/// The longest cache that a kernel's 32-bit key indices can walk past the end of.
const MAX_KEYS: usize = i32::MAX as usize - (1 << 16);

/// Threads of the kernel that computes the schedule of a step: as in `decode_schedule.cuh`.
const SCHEDULE_THREADS: u32 = 128;

/// Rows per CTA of the kernel that combines partial states: one per warp.
const COMBINE_ROWS: usize = 8;

/// Bytes of keys and values from which on a decode launch may wait for the kernel in front.
/// Measured on an H200 in tiles that are not split: 64 MB lose by it, 128 MB gain.
const LATE_BYTES: usize = 128 << 20;

/// Bytes of a line of L2.
const LINE_BYTES: usize = 128;

/// The kernels for a problem on a GPU, how they divide rows and keys, and their launches.
///
/// # Errors
/// The reason why this GPU cannot run it.
pub(crate) fn select(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let flat = select_flat(problem, facts, machine)?;
    Ok(prefix::with_groups(flat, problem, facts))
}

/// Checks what holds for all kernels.
///
/// # Errors
/// The reason why no kernel runs the problem on this GPU.
fn check_limits(problem: &Problem, facts: &CudaFacts) -> Result<(), String> {
    if facts.compute_capability < 80 {
        return Err(format!(
            "kernels are for compute capability 8.0 and later, this is {}.{}",
            facts.compute_capability / 10,
            facts.compute_capability % 10
        ));
    }
    let keys = problem.kv_len.max(problem.walked_keys());
    if keys > MAX_KEYS {
        return Err(format!("{keys} keys; CUDA kernels take up to {MAX_KEYS}"));
    }
    Ok(())
}

/// [`select`], if sequences share no prefixes.
fn select_flat(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    check_limits(problem, facts)
        .map_err(|reason| Refusal { machine: machine.to_string(), reason })?;
    if let Some(rows) = problem.listed_rows() {
        return select_decode_only(&rows, facts, machine);
    }
    let division = match cache_of(problem) {
        Cache::Q8_0 | Cache::Q4_0 if !prefill::takes_blocks(problem, facts) => Division::Decode,
        _ => prefill::division(problem),
    };
    match division {
        Division::Prefill => {
            if let Some(prefill) = prefill::select(problem, facts, 0, COUNTER_BYTES) {
                let prefill = with_copies(problem, prefill, facts, 0, COUNTER_BYTES);
                return Ok(prefill_alone(problem, prefill));
            }
        }
        Division::Mixed(max_tokens) => {
            // Most decode sequences have one token, so choose the decode tile for one token.
            let short = Problem { query_len: 1, ..problem.clone() };
            let decode = select_decode(&short, facts, machine)?;
            let map_at =
                decode.backend.workspace_bytes.next_multiple_of(WORKSPACE_ALIGNMENT as usize);
            if let Some(prefill) = prefill::select(problem, facts, max_tokens, map_at) {
                let end = decode.backend.workspace_bytes;
                let prefill = with_copies(problem, prefill, facts, max_tokens, end);
                return Ok(mixed(problem, prefill, decode, max_tokens));
            }
        }
        Division::Decode => {}
    }
    select_decode_only(problem, facts, machine)
}

/// A problem whose sequences all run in decode: with a kernel for Hopper over codes or a latent
/// cache, if there is one for it.
fn select_decode_only(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let decode = select_decode(problem, facts, machine)?;
    if let Some(codes) = codes::select(problem, facts) {
        return Ok(with_codes(problem, decode, codes));
    }
    Ok(match latent::select(problem, facts) {
        Some(latent) => with_latent(problem, decode, latent),
        None => decode,
    })
}

/// Decode with a kernel over codes that multiplies by WGMMA, for operands that it can read.
fn with_codes(
    problem: &Problem,
    general: Selection<Launches>,
    CodesDecode { decode: codes, workspace_bytes }: CodesDecode,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = general;
    let (keys, rows) = (codes.unit_keys as usize, codes.tile_rows as usize);
    let choice = Choice {
        kernel: Kernel::Cuda(codes.launch.module),
        tile_keys: keys,
        block_rows: rows,
        reason: format!(
            "{} rows per key/value head, tiles of {rows} rows, for which each code is converted \
             once; {} warpgroups per CTA, K tiles of {keys} keys; {} where rows do not start at \
             multiples of 16 bytes",
            packed_rows(problem),
            codes.key_groups,
            choice.kernel.name(),
        ),
    };
    let units = problem.kv_len.div_ceil(keys).max(1);
    let split = Split {
        keys,
        count: units,
        parallel: true,
        reason: format!(
            "stream-K: {} tiles of up to {units} units over {} CTAs",
            tiles(problem, rows),
            codes.launch.grid[0]
        ),
    };
    let backend = instead_of_decode(problem, launches, codes, workspace_bytes);
    Selection { choice, split, backend }
}

/// The launches with a kernel for Hopper before decode's, which runs operands that it cannot read.
fn instead_of_decode(
    problem: &Problem,
    launches: Launches,
    hopper: Decode,
    workspace_bytes: usize,
) -> Launches {
    // The fallback has no schedule: layers of a step may have operands for either. The schedule of
    // the kernel for Hopper follows the partial states of both.
    let decode = launches.decode.map(|decode| Decode { schedule: None, ..decode });
    let end = launches.workspace_bytes.max(workspace_bytes);
    let schedule = problem.key_lists.is_none().then(|| schedule_ctas(&hopper.launch, end));
    let ctas = hopper.launch.grid[0] as usize;
    let workspace_bytes =
        schedule.map_or(end, |schedule| schedule.at.saturating_add(ctas * SCHEDULED_BYTES));
    let hopper = Decode { schedule, ..hopper };
    Launches { hopper_decode: Some(hopper), decode, workspace_bytes, ..launches }
}

/// Decode with a kernel for latent caches, for operands that it can read.
fn with_latent(
    problem: &Problem,
    general: Selection<Launches>,
    LatentDecode { decode: latent, workspace_bytes }: LatentDecode,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = general;
    let choice = Choice {
        kernel: Kernel::Cuda(latent.launch.module),
        tile_keys: latent.unit_keys as usize,
        block_rows: latent.tile_rows as usize,
        reason: format!(
            "values are the first dims of keys, and each K tile is {} once; {} where operands are \
             not aligned to 16 bytes, or have strides that {} cannot read",
            if latent.cache == Cache::Mla656 { "converted" } else { "loaded" },
            choice.kernel.name(),
            if latent.cache == Cache::Mla656 { "copies of 16 bytes" } else { "TMA" },
        ),
    };
    let keys = latent.unit_keys as usize;
    let count = problem.kv_len.div_ceil(keys).max(1);
    let split = Split {
        keys,
        count,
        parallel: true,
        reason: format!(
            "{} tiles of up to {count} K tiles, divided equally among {} CTAs, {} \
             per part, when the lengths are known",
            tiles(problem, latent.tile_rows as usize),
            latent.launch.grid[0],
            latent.ctas_per_tile
        ),
    };
    let backend = instead_of_decode(problem, launches, latent, workspace_bytes);
    Selection { choice, split, backend }
}

/// Prefill over the cache, and over a copy of keys and values if that is faster.
struct PrefillPlan {
    prefill: Prefill,
    widened: Option<Widened>,
    workspace_bytes: usize,
}

impl PrefillPlan {
    /// With the operands that it is fastest for.
    fn fastest(&self) -> &Prefill {
        self.prefill.fastest(&self.widened)
    }
}

/// Adds prefill over a copy. `before`: the end of the workspace without tile maps and copies.
fn with_copies(
    problem: &Problem,
    prefill: Prefill,
    facts: &CudaFacts,
    max_decode_len: usize,
    before: usize,
) -> PrefillPlan {
    let end = prefill_end(&prefill, before);
    let widened = widen::select(problem, &prefill, facts, max_decode_len, end);
    let copies_end = |widened: &Widened| {
        let ends = widened.prefills().map(|prefill| prefill_end(prefill, widened.end));
        ends.max().unwrap_or(widened.end)
    };
    let workspace_bytes = widened.as_ref().map_or(end, copies_end);
    PrefillPlan { prefill, widened, workspace_bytes }
}

/// A problem whose sequences all run in prefill.
fn prefill_alone(problem: &Problem, plan: PrefillPlan) -> Selection<Launches> {
    let (choice, split) = (prefill_choice(problem, &plan), prefill_split(problem, plan.fastest()));
    let PrefillPlan { prefill, widened, workspace_bytes } = plan;
    let prefill = Some(prefill);
    let backend = Launches { prefill, widened, workspace_bytes, ..Launches::default() };
    Selection { choice, split, backend }
}

/// Both kernels: prefill first, for sequences of more than `max_tokens` tokens.
fn mixed(
    problem: &Problem,
    plan: PrefillPlan,
    decode: Selection<Launches>,
    max_tokens: usize,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = decode;
    let mut split = prefill_split(problem, plan.fastest());
    let mut both = prefill_choice(problem, &plan);
    both.reason = format!(
        "{}; sequences of up to {max_tokens} tokens: {}, {}",
        both.reason,
        choice.kernel.name(),
        choice.reason
    );
    split.reason =
        format!("{}; those of up to {max_tokens} tokens split their keys among CTAs", split.reason);
    let decode =
        launches.decode.map(|decode| Decode { max_query_len: max_tokens as i32, ..decode });
    let PrefillPlan { prefill, widened, workspace_bytes } = plan;
    let prefill = Some(prefill);
    let backend = Launches { prefill, widened, decode, workspace_bytes, ..launches };
    Selection { choice: both, split, backend }
}

/// The end of the workspace; `before` is its end without prefill's tile maps.
fn prefill_end(prefill: &Prefill, before: usize) -> usize {
    prefill.map.map_or(before, |map| map.specialized.end().max(map.fallback.end()))
}

fn prefill_choice(problem: &Problem, plan: &PrefillPlan) -> Choice {
    let prefill = plan.fastest();
    let kernel = &prefill.specialized;
    let mut others = String::new();
    if prefill.specialized != prefill.fallback {
        others += &format!(
            "; fallback {} if TMA cannot address the operands",
            prefill.fallback.launch.module
        );
    }
    if prefill.map.is_some() {
        others += "; a tile map of the mask is built first";
    }
    if plan.widened.is_some() {
        others += &format!(
            "; keys and values are copied to {} first, but where {} has to convert them",
            problem.dtype, plan.prefill.specialized.launch.module
        );
    }
    Choice {
        kernel: Kernel::Cuda(kernel.launch.module),
        tile_keys: kernel.tile_keys,
        block_rows: kernel.tile_rows,
        reason: format!(
            "{} tokens in tiles of {} tokens of one head{others}",
            problem.query_len, kernel.tile_rows
        ),
    }
}

fn prefill_split(problem: &Problem, prefill: &Prefill) -> Split {
    let kernel = &prefill.specialized;
    let tiles = prefill::tiles(problem, kernel).total;
    Split {
        keys: problem.kv_len.next_multiple_of(kernel.tile_keys).max(kernel.tile_keys),
        count: 1,
        parallel: false,
        reason: format!(
            "up to {tiles} tiles, persistent over {} CTAs, longest first, in L2 groups of {} \
             (sequence, key/value head) pairs",
            kernel.launch.grid[0], prefill.l2_group
        ),
    }
}

/// The same with the kernels for caches of any kind.
fn select_decode(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let refuse = |reason: String| Refusal { machine: machine.to_string(), reason };
    let kernel = DecodeKernel::find(problem, facts).map_err(refuse)?;
    let grid = DecodeGrid::for_kernel(problem, facts, &kernel);
    let launch = Launch {
        module: kernel.module.name(),
        entry: "decode",
        grid: [grid.ctas as u32, 1, 1],
        threads: (kernel.shape.group_warps() * grid.key_groups * 32) as u32,
        shared_bytes: kernel.shape.shared_bytes(grid.key_groups) as u32,
        starts_late: starts_late(facts, &kernel, &grid),
    };
    let combine = combine_tiles(problem, &kernel, &grid);
    let combine_bytes = if combine.is_some() { grid.tiles * PARTIAL_RANGE_BYTES } else { 0 };
    let combine_end = grid.partials_end.saturating_add(combine_bytes);
    // Rows with lists of keys have none: every layer has its own lists.
    let schedule = problem.key_lists.is_none().then(|| schedule_ctas(&launch, combine_end));
    let workspace_bytes = schedule
        .map_or(combine_end, |schedule| schedule.at.saturating_add(grid.ctas * SCHEDULED_BYTES));
    let decode = Decode {
        launch,
        fallback: kernel.fallback.name(),
        max_query_len: i32::MAX,
        partials_per_cta: i32::try_from(grid.partials)
            .map_err(|_| refuse(format!("{} partial states per CTA", grid.partials)))?,
        key_groups: grid.key_groups as i32,
        tile_rows: kernel.tile_rows as i32,
        ctas_per_tile: 1,
        unit_keys: grid.unit_keys as i32,
        start_units: grid.start_units as i32,
        exact_dims: kernel.exact_dims,
        cache: kernel.cache,
        combine,
        schedule,
    };
    let (choice, split) = (decode_choice(problem, &kernel, &grid), decode_split(problem, &grid));
    let backend = Launches { decode: Some(decode), workspace_bytes, ..Launches::default() };
    Ok(Selection { choice, split, backend })
}

/// Whether a launch starts only when the kernel in front has ended. Rows shorter than a line share
/// it with the next head's row. They are read at full speed only if the CTAs of both heads run at
/// the same time, which they do if they start together. With an early start, CTAs begin one by one:
/// that gains 2 us, and costs a long launch more (24% of 346 us at head dim 64).
fn starts_late(facts: &CudaFacts, kernel: &DecodeKernel, grid: &DecodeGrid) -> bool {
    let shape = &kernel.shape;
    let bytes = grid.tiles.saturating_mul(grid.units * grid.unit_keys * shape.key_bytes());
    kernel.cache == Cache::Bytes
        && shape.key_bytes() < 2 * LINE_BYTES
        && 2 * grid.tiles >= facts.multiprocessors
        && bytes >= LATE_BYTES
}

/// The decode modules for a problem.
struct DecodeKernel {
    /// The module that runs.
    module: &'static Module,
    /// The fallback module of the same tile.
    fallback: &'static Module,
    /// Whether the problem's head dims are those of the modules.
    exact_dims: bool,
    cache: Cache,
    tile_rows: usize,
    shape: Shape,
    /// The shape of the largest tile that this GPU can run.
    largest: Shape,
}

impl DecodeKernel {
    /// Finds the modules, or the reason why none runs on this GPU.
    fn find(problem: &Problem, facts: &CudaFacts) -> Result<DecodeKernel, String> {
        let fallbacks = find_fallbacks(problem);
        let largest_fitting = fallbacks.iter().rev().find(|(_, config)| fits(config, facts));
        let Some((_, largest)) = largest_fitting else {
            return Err(too_large(problem, facts, &fallbacks));
        };
        let tile_rows = find_tile_rows(problem, facts, &fallbacks, largest);
        let (fallback, config) = fallbacks
            .iter()
            .find(|(_, config)| config.tile_rows == tile_rows)
            .expect("one of their tiles");
        let exact_dims = config.operands.has_dims(problem.head_dim, problem.value_dim);
        Ok(DecodeKernel {
            module: find_specialized(problem, facts, config).unwrap_or(fallback),
            fallback,
            exact_dims,
            cache: config.cache,
            tile_rows,
            shape: shape_of(config),
            largest: shape_of(largest),
        })
    }
}

/// A module with its configuration.
type DecodeModule = (&'static Module, &'static DecodeConfig);

/// The class of modules for how a problem's keys and values are stored.
fn cache_of(problem: &Problem) -> Cache {
    let (keys, values) = (problem.key_dtype, problem.value_dtype);
    let largest_dim = problem.head_dim.max(problem.value_dim);
    match (keys, values) {
        _ if problem.key_lists.is_some() && problem.dtype == DType::F32 => Cache::Any,
        // Keys in two parts.
        _ if problem.rotary_dim > 0 => Cache::Any,
        _ if keys == problem.dtype && values == problem.dtype => Cache::Elements,
        _ if problem.key_lists.is_some() => Cache::Any,
        // Codes are multiplied in f16, which is not enough for f32.
        _ if problem.dtype == DType::F32 => Cache::Any,
        (DType::Q8_0, DType::Q8_0) if largest_dim <= 256 => Cache::Q8_0,
        (DType::Q4_0, DType::Q4_0) if largest_dim <= 256 => Cache::Q4_0,
        _ if keys.is_code() && values.is_code() && largest_dim <= 512 => Cache::Bytes,
        _ => match storage_of(problem, keys).zip(storage_of(problem, values)) {
            Some(pair) if largest_dim <= 256 && Cache::PAIRS.contains(&pair) => {
                Cache::Pair(pair.0, pair.1)
            }
            _ => Cache::Any,
        },
    }
}

/// How keys or values of a type are stored, if modules for pairs may read them.
fn storage_of(problem: &Problem, dtype: DType) -> Option<Storage> {
    match dtype {
        _ if dtype == problem.dtype => Some(Storage::Elements),
        DType::Q8_0 => Some(Storage::Q8_0),
        DType::Q4_0 => Some(Storage::Q4_0),
        _ if dtype.is_code() => Some(Storage::Bytes),
        _ => None,
    }
}

/// The fallback modules with the smallest head dims that a problem fits into, smallest tile first.
/// Head dims between those of the modules are padded with zeros.
fn find_fallbacks(problem: &Problem) -> Vec<DecodeModule> {
    let cache = cache_of(problem);
    let element = match cache {
        // Rounding keys and values to 16 bits would not be exact enough.
        Cache::Any => Element::F32,
        _ => Element::from_dtype(problem.dtype),
    };
    let suits = |operands: &Operands| {
        operands.build == Build::Fallback
            && operands.element == element
            && operands.fits(problem.head_dim, problem.value_dim)
    };
    let mut modules: Vec<DecodeModule> = registry::decode_modules()
        .filter(|(_, config)| config.lists == problem.key_lists.is_some())
        .filter(|(_, config)| config.cache == cache && suits(&config.operands))
        .collect();
    let dims = |config: &DecodeConfig| config.operands.head_dim + config.operands.value_dim;
    let smallest = modules.iter().map(|(_, config)| dims(config)).min();
    modules.retain(|(_, config)| Some(dims(config)) == smallest);
    modules.sort_by_key(|(_, config)| config.tile_rows);
    modules
}

/// The tile that the rows of a key/value head fit into, else the largest.
fn find_tile_rows(
    problem: &Problem,
    facts: &CudaFacts,
    modules: &[DecodeModule],
    largest: &DecodeConfig,
) -> usize {
    // The sums of a row depend on the keys per K tile: in batch-invariant mode only tiles of rows
    // with equally long K tiles are used.
    let strip_keys = shape_of(largest).strip_keys();
    let same_lengths = |config: &DecodeConfig| {
        !problem.batch_invariant || shape_of(config).strip_keys() == strip_keys
    };
    let packed = packed_rows(problem);
    let suitable = modules
        .iter()
        .map(|(_, config)| config)
        .find(|config| packed <= config.tile_rows && fits(config, facts) && same_lengths(config));
    suitable.map_or(largest.tile_rows, |config| config.tile_rows)
}

/// The specialized module of the same tile as a fallback, if the problem has plain scores, the
/// exact head dims and rows that can be read 16 keys at a time: the module for the newest
/// architecture that this GPU can run. Of rows with lists, keys are together where these are lists
/// of pages.
fn find_specialized(
    problem: &Problem,
    facts: &CudaFacts,
    fallback: &DecodeConfig,
) -> Option<&'static Module> {
    let plain = problem.variant.has_unmodified_scores()
        && problem.variant.has_even_ranges()
        && fallback.operands.has_dims(problem.head_dim, problem.value_dim)
        && page_aligned_16(problem)
        && problem.key_lists.is_none_or(|lists| lists.lists_pages() && !problem.batch_invariant);
    let operands = Operands { build: Build::Specialized, ..fallback.operands };
    registry::decode_modules()
        .filter(|(_, config)| **config == DecodeConfig { operands, ..*fallback })
        .map(|(module, _)| module)
        .filter(|module| plain && module.runs_on(facts.compute_capability))
        .max_by_key(|module| module.architecture)
}

fn shape_of(config: &DecodeConfig) -> Shape {
    Shape::new(config)
}

/// Whether the smallest CTA of a module fits into shared memory: consumer GPUs have less than half
/// of a data centre's.
fn fits(config: &DecodeConfig, facts: &CudaFacts) -> bool {
    shape_of(config).shared_bytes(1) <= facts.shared_bytes
}

/// Why none of these modules runs on this GPU.
fn too_large(problem: &Problem, facts: &CudaFacts, modules: &[DecodeModule]) -> String {
    let smallest = modules.first().map_or(0, |(_, config)| shape_of(config).shared_bytes(1));
    format!(
        "head dims {} and {} in {} need {smallest} bytes of shared memory per CTA, this GPU has {}",
        problem.head_dim, problem.value_dim, problem.dtype, facts.shared_bytes
    )
}

/// Division of a decode kernel's work among CTAs (stream-K).
struct DecodeGrid {
    /// At most.
    tiles: usize,
    ctas: usize,
    /// Groups of warps per CTA.
    key_groups: usize,
    /// Keys per unit of work.
    unit_keys: usize,
    /// Units per tile, at most.
    units: usize,
    /// Units that starting a tile counts for.
    start_units: usize,
    /// Partial states that one CTA may leave.
    partials: usize,
    /// The end of the partial states in the workspace.
    partials_end: usize,
}

impl DecodeGrid {
    fn for_kernel(problem: &Problem, facts: &CudaFacts, kernel: &DecodeKernel) -> DecodeGrid {
        let shape = &kernel.shape;
        let tiles = tiles(problem, kernel.tile_rows);
        let Occupancy { ctas_per_multiprocessor, key_groups } = match problem.batch_invariant {
            // The sums of a row depend on the number of groups: it has to be the same for all
            // tiles.
            true => Occupancy {
                ctas_per_multiprocessor: 1,
                key_groups: max_key_groups(&kernel.largest, facts.shared_bytes),
            },
            false if prefix::leaves_room(problem, facts) => {
                Occupancy::beside_prefix(shape, tiles, facts)
            }
            false => Occupancy::alone(problem, facts, kernel),
        };
        let invariant = problem.batch_invariant;
        let unit_keys = if invariant { INVARIANT_KEYS } else { shape.strip_keys() };
        let unit_bytes = unit_keys * shape.key_bytes();
        let start_units = if invariant { 1 } else { start_units(unit_bytes) };
        let units = problem.kv_len.div_ceil(unit_keys);
        let work_total = tiles.saturating_mul(units + start_units);
        let max_ctas = (facts.multiprocessors * ctas_per_multiprocessor)
            .min((COUNTER_BYTES - PREFILL_COUNTER_BYTES) / 4);
        let ctas = work_total.clamp(1, max_ctas);
        // A CTA leaves one partial state of the tile it starts, and one (in batch-invariant mode
        // one per unit) of the tile it ends.
        let partials = if invariant { 1 + units.min(work_total.div_ceil(ctas)).max(1) } else { 2 };
        let partials_end = COUNTER_BYTES
            .saturating_add(ctas.saturating_mul(partials).saturating_mul(shape.partial_bytes()));
        DecodeGrid {
            tiles,
            ctas,
            key_groups,
            unit_keys,
            units,
            start_units,
            partials,
            partials_end,
        }
    }
}

/// The launch that combines the partial states of all tiles, if that is faster than leaving it to
/// the last CTA of each tile: if every tile has several CTAs and more rows than a CTA has warps,
/// that CTA would work while the rest of the GPU is done. (In a ragged batch the tiles' numbers
/// depend on lengths; batch-invariant partial states are combined in an order of their own.)
fn combine_tiles(problem: &Problem, kernel: &DecodeKernel, grid: &DecodeGrid) -> Option<Combine> {
    let combines = kernel.tile_rows > COMBINE_ROWS
        && kernel.cache != Cache::Any
        && problem.key_lists.is_none()
        && 2 * grid.tiles <= grid.ctas
        && !problem.batch_invariant
        && problem.queries == QueryStorage::Batched;
    combines.then(|| Combine {
        launch: Launch {
            module: kernel.module.name(),
            entry: "combine",
            grid: [grid.tiles as u32, (kernel.tile_rows / COMBINE_ROWS) as u32, 1],
            threads: (32 * COMBINE_ROWS) as u32,
            ..Launch::default()
        },
        at: grid.partials_end,
    })
}

/// The launch that computes the schedule of a step for a launch of decode. It is behind the first
/// `start` bytes of the workspace.
fn schedule_ctas(decode: &Launch, start: usize) -> StepSchedule {
    let launch =
        Launch { entry: "schedule_ctas", threads: SCHEDULE_THREADS, shared_bytes: 0, ..*decode };
    StepSchedule { launch, at: start.saturating_add(15) / 16 * 16 }
}

fn decode_choice(problem: &Problem, kernel: &DecodeKernel, grid: &DecodeGrid) -> Choice {
    let DecodeKernel { shape, tile_rows, .. } = kernel;
    Choice {
        kernel: Kernel::Cuda(kernel.module.name()),
        tile_keys: shape.strip_keys(),
        block_rows: *tile_rows,
        reason: format!(
            "{} rows per key/value head, tiles of {tile_rows} rows; {} warp groups of {} warps per \
             CTA, K tiles of {} keys",
            packed_rows(problem),
            grid.key_groups,
            shape.group_warps(),
            shape.strip_keys()
        ),
    }
}

fn decode_split(problem: &Problem, grid: &DecodeGrid) -> Split {
    let DecodeGrid { tiles, ctas, unit_keys, units, .. } = grid;
    Split {
        keys: *unit_keys,
        count: (*units).max(1),
        parallel: true,
        reason: match problem.batch_invariant {
            true => format!(
                "batch-invariant: always {unit_keys} keys per split, merged in key order, {ctas} \
                 CTAs"
            ),
            false => format!("stream-K: {tiles} tiles of up to {units} units over {ctas} CTAs"),
        },
    }
}

/// Number of CTAs of a decode kernel that a multiprocessor has at a time, and their size.
struct Occupancy {
    ctas_per_multiprocessor: usize,
    /// Groups of warps per CTA.
    key_groups: usize,
}

impl Occupancy {
    /// For a decode kernel that runs alone. One large CTA has the most reads in flight and leaves
    /// the fewest partial states. With several tiles per CTA, smaller CTAs are better: some start
    /// or end a tile while others read.
    fn alone(problem: &Problem, facts: &CudaFacts, kernel: &DecodeKernel) -> Occupancy {
        let shape = &kernel.shape;
        let tiles = tiles(problem, kernel.tile_rows);
        let max_groups = max_key_groups(shape, facts.shared_bytes);
        let wanted = match tiles.checked_div(facts.multiprocessors).unwrap_or(0) {
            0 | 1 => 1,
            // Codes have half the bytes per key, and heads whose rows share cache lines should be
            // read at the same time.
            3.. if kernel.cache.has_codes() => 4,
            // Products of f32 take more time than reads. Keys and values of one line each are 3 to
            // 14% faster, as measured on an H200.
            _ if kernel.cache == Cache::Elements
                && (problem.dtype == DType::F32 || shape.key_bytes() <= 2 * LINE_BYTES) =>
            {
                4
            }
            2..=5 => 2,
            _ => 4,
        };
        let ctas = wanted.min(max_groups);
        // The driver reserves 1 KiB of shared memory per CTA.
        let shared = (facts.shared_bytes + 1024) / ctas;
        let groups = max_key_groups(shape, shared.saturating_sub(1024)).min(max_groups / ctas);
        let fits = groups > 0 && shape.shared_bytes(groups) + 1024 <= shared;
        match fits && (ctas * groups == max_groups || !needs_all_groups(problem, kernel)) {
            true => Occupancy { ctas_per_multiprocessor: ctas, key_groups: groups },
            false => Occupancy { ctas_per_multiprocessor: 1, key_groups: max_groups },
        }
    }

    /// The same beside the kernel for prefix groups: few enough threads that both fit. With many
    /// tiles, two CTAs start and end theirs while the other reads.
    fn beside_prefix(shape: &Shape, tiles: usize, facts: &CudaFacts) -> Occupancy {
        let groups = (prefix::DECODE_THREADS / 32 / shape.group_warps()).max(1);
        let groups = groups.min(max_key_groups(shape, facts.shared_bytes / 2));
        match tiles / facts.multiprocessors.max(1) {
            6.. if groups >= 2 => Occupancy { ctas_per_multiprocessor: 2, key_groups: groups / 2 },
            _ => Occupancy { ctas_per_multiprocessor: 1, key_groups: groups },
        }
    }
}

/// Whether smaller CTAs have to hold as many groups of warps together as one large CTA. A launch
/// that starts early fills the room that they leave on some multiprocessors, which then have more
/// of its CTAs than others (1.3 times the time at head dims 256 and 512). Keys that are read one by
/// one need all the warps that fit.
fn needs_all_groups(problem: &Problem, kernel: &DecodeKernel) -> bool {
    let starts_early = kernel.module.architecture >= registry::Architecture::Compute90;
    starts_early || kernel.cache == Cache::Any || problem.key_lists.is_some()
}

/// The launch of an append.
///
/// # Errors
/// The reason why this machine cannot run it.
#[cfg(feature = "cuda")]
pub(crate) fn append(
    parameters: &crate::params::AppendParameters,
    machine: &Machine,
) -> Result<Launch, Refusal> {
    let heads = 2 * i64::from(parameters.kv_heads) + i64::from(parameters.query_heads);
    let warps = i64::from(parameters.tokens) * heads;
    let blocks = u32::try_from(warps.unsigned_abs().div_ceil(8).max(1)).ok();
    let blocks = blocks.filter(|&blocks| blocks <= i32::MAX as u32);
    let Some(blocks) = blocks else {
        let reason = format!("{warps} heads of new tokens; an append takes up to 2^34 at once");
        return Err(Refusal { machine: machine.to_string(), reason });
    };
    Ok(Launch {
        module: registry::Family::Append.name(),
        entry: "append",
        grid: [blocks, 1, 1],
        threads: 256,
        ..Launch::default()
    })
}
