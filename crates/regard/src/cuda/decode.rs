//! Decode kernels: the modules for a problem, how they divide its work among CTAs, and their
//! launch.

use super::prefix;
use super::registry::{self, Build, Cache, DecodeConfig, Element, Module, Operands, Storage};
use super::shape::{Shape, max_key_groups};
use super::work::{
    COMBINE_WARPS, combine, has_plain_scores, packed_rows, page_aligned_16, start_units, tiles,
};
use super::{COUNTER_BYTES, Decode, Launch, PREFILL_COUNTER_BYTES};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{Problem, QueryStorage};
use crate::split::INVARIANT_KEYS;

/// Bytes of keys and values from which on a decode launch may wait for the kernel in front.
/// Measured on an H200 in tiles that are not split: 64 MB lose by it, 128 MB gain.
const LATE_BYTES: usize = 128 << 20;

/// Bytes of keys and values per multiprocessor from which on decode takes tiles of several heads,
/// which have more rows to load and to combine. Measured on an H200 at 64 sequences of 8 heads: 18
/// MB lose by it; at 20 sequences, 189 MB gain.
const HEADS_BYTES: usize = 1 << 20;

/// Bytes of a line of L2.
const LINE_BYTES: usize = 128;

/// The decode modules for a problem.
pub(super) struct DecodeKernel {
    /// The module that runs.
    pub module: &'static Module,
    /// The fallback module of the same tile.
    pub fallback: &'static Module,
    /// Whether the problem's head dims are those of the modules.
    pub exact_dims: bool,
    pub cache: Cache,
    pub tile_rows: usize,
    /// Key/value heads of a tile: the kernel sees the problem of
    /// [`joined_heads`](super::work::joined_heads).
    pub tile_heads: usize,
    pub shape: Shape,
    /// The shape of the largest tile that this GPU can run.
    pub largest: Shape,
}

impl DecodeKernel {
    /// Finds the modules, or the reason why none runs on this GPU.
    pub fn find(problem: &Problem, facts: &CudaFacts) -> Result<DecodeKernel, String> {
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
            tile_heads: 1,
            shape: shape_of(config),
            largest: shape_of(largest),
        })
    }

    /// The module for tiles of the most key/value heads, if a problem over blocks has one on this
    /// GPU. Tiles of one head are as fast where each has a CTA of its own, and have fewer parts to
    /// combine.
    pub fn for_heads(problem: &Problem, facts: &CudaFacts) -> Option<DecodeKernel> {
        let suits = has_plain_scores(problem)
            && page_aligned_16(problem)
            && problem.key_lists.is_none()
            && !problem.batch_invariant
            && problem.batch.saturating_mul(problem.kv_heads) > facts.multiprocessors;
        let takes = |(module, config): &DecodeModule| {
            let bytes = problem.kv_len.saturating_mul(shape_of(config).key_bytes());
            let tiles = problem.batch.saturating_mul(problem.kv_heads / config.tile_heads);
            config.tile_heads > 1
                && tiles.saturating_mul(bytes) >= facts.multiprocessors * HEADS_BYTES
                && config.cache == cache_of(problem)
                && config.operands.element == Element::from_dtype(problem.dtype)
                && config.operands.has_dims(problem.head_dim, problem.value_dim)
                && problem.kv_heads.is_multiple_of(config.tile_heads)
                && packed_rows(problem) <= config.tile_rows / config.tile_heads
                && module.runs_on(facts.compute_capability)
                && shape_of(config).has_all_groups(facts.shared_bytes)
        };
        let modules = registry::decode_modules().filter(|module| suits && takes(module));
        let (module, config) = modules.max_by_key(|(_, config)| config.tile_heads)?;
        Some(DecodeKernel {
            module,
            fallback: module,
            exact_dims: true,
            cache: config.cache,
            tile_rows: config.tile_rows,
            tile_heads: config.tile_heads,
            shape: shape_of(config),
            largest: shape_of(config),
        })
    }
}

/// A module with its configuration.
type DecodeModule = (&'static Module, &'static DecodeConfig);

/// The class of modules for how a problem's keys and values are stored.
pub(super) fn cache_of(problem: &Problem) -> Cache {
    let (keys, values) = (problem.key_dtype, problem.value_dtype);
    let largest_dim = problem.head_dim.max(problem.value_dim);
    let (largest_of_blocks, largest_of_pairs) = match problem.dtype {
        DType::BF16 => (512, 256),
        _ => (256, 128),
    };
    match (keys, values) {
        _ if problem.key_lists.is_some() && problem.dtype == DType::F32 => Cache::Any,
        // Keys in two parts.
        _ if problem.rotary_dim > 0 => Cache::Any,
        _ if keys == problem.dtype && values == problem.dtype => Cache::Elements,
        _ if problem.key_lists.is_some() => Cache::Any,
        // Codes are multiplied in f16, which is not enough for f32.
        _ if problem.dtype == DType::F32 => Cache::Any,
        _ if largest_dim > 512 => Cache::Any,
        (DType::Q8_0, DType::Q8_0) if largest_dim <= largest_of_blocks => Cache::Q8_0,
        (DType::Q4_0, DType::Q4_0) if largest_dim <= largest_of_blocks => Cache::Q4_0,
        _ if keys.is_code() && values.is_code() => Cache::Bytes,
        _ => match storage_of(problem, keys).zip(storage_of(problem, values)) {
            Some(pair) if largest_dim <= largest_of_pairs && Cache::PAIRS.contains(&pair) => {
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
    let plain = has_plain_scores(problem)
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

/// The launch of a kernel, without a schedule, and the end of its workspace; or the reason why
/// there is none.
pub(super) fn decode_launch(
    problem: &Problem,
    facts: &CudaFacts,
    kernel: &DecodeKernel,
    grid: &DecodeGrid,
) -> Result<(Decode, usize), String> {
    let launch = Launch {
        module: kernel.module.name(),
        entry: "decode",
        grid: [grid.ctas as u32, 1, 1],
        threads: kernel.shape.threads(grid.key_groups) as u32,
        shared_bytes: kernel.shape.shared_bytes(grid.key_groups) as u32,
        starts_late: starts_late(facts, kernel, grid),
    };
    let combine = combine_tiles(problem, kernel, grid);
    let decode = Decode {
        launch,
        fallback: kernel.fallback.name(),
        max_query_len: i32::MAX,
        partials_per_cta: i32::try_from(grid.partials)
            .map_err(|_| format!("{} partial states per CTA", grid.partials))?,
        key_groups: grid.key_groups as i32,
        tile_rows: kernel.tile_rows as i32,
        tile_heads: kernel.tile_heads,
        ctas_per_tile: 1,
        unit_keys: grid.unit_keys as i32,
        start_units: grid.start_units as i32,
        exact_dims: kernel.exact_dims,
        cache: kernel.cache,
        lists_pages: false,
        combine,
        schedule: None,
    };
    Ok((decode, grid.partials_end))
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

/// Division of a decode kernel's work among CTAs (stream-K).
pub(super) struct DecodeGrid {
    /// At most.
    pub tiles: usize,
    pub ctas: usize,
    /// Groups of warps per CTA.
    pub key_groups: usize,
    /// Keys per unit of work.
    pub unit_keys: usize,
    /// Units per tile, at most.
    pub units: usize,
    /// Units that starting a tile counts for.
    pub start_units: usize,
    /// Partial states that one CTA may leave.
    pub partials: usize,
    /// The end of the partial states in the workspace.
    pub partials_end: usize,
}

impl DecodeGrid {
    pub fn for_kernel(problem: &Problem, facts: &CudaFacts, kernel: &DecodeKernel) -> DecodeGrid {
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
fn combine_tiles(problem: &Problem, kernel: &DecodeKernel, grid: &DecodeGrid) -> Option<Launch> {
    let ctas_per_tile = kernel.tile_rows / COMBINE_WARPS; // a warp per row
    let combines = ctas_per_tile > 1
        && kernel.cache != Cache::Any
        && problem.key_lists.is_none()
        && 2 * grid.tiles <= grid.ctas
        && !problem.batch_invariant
        && problem.queries == QueryStorage::Batched;
    combines.then(|| combine(kernel.module, grid.tiles, ctas_per_tile))
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
        if kernel.tile_heads > 1 {
            // Compiled for all groups.
            return Occupancy { ctas_per_multiprocessor: 1, key_groups: max_groups };
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    use crate::cuda::facts;
    use crate::cuda::work::joined_heads;
    use crate::problem::KvStorage;

    /// Decoding over blocks, 32 sequences.
    fn problem(blocks: DType) -> Problem {
        Problem {
            batch: 32,
            query_heads: 32,
            kv_heads: 8,
            kv_len: 8192,
            key_dtype: blocks,
            value_dtype: blocks,
            ..Problem::new(DType::BF16, 128)
        }
    }

    #[test]
    fn blocks_of_many_heads_have_tiles_of_several() {
        let name = |change: fn(&mut Problem), blocks, machine| {
            let mut problem = problem(blocks);
            change(&mut problem);
            let kernel = DecodeKernel::for_heads(&problem, &facts(machine))?;
            Some(kernel.module.name())
        };
        let four = "decode_bf16_128_128_q8_0_r32_h4_plain_sm90";
        let nibbles = "decode_bf16_128_128_q4_0_r32_h4_plain_sm90";
        let of = |blocks| name(|_| (), blocks, "h200");
        assert_eq!([of(DType::Q8_0), of(DType::Q4_0)], [Some(four), Some(nibbles)]);
        let of = |change| name(change, DType::Q8_0, "h200");
        assert_eq!(of(|problem| problem.kv_heads = 4), None, "128 heads");
        assert_eq!(of(|problem| (problem.kv_heads, problem.batch) = (4, 64)), Some(four));
        assert_eq!(of(|problem| problem.query_len = 2), Some(four));
        assert_eq!(of(|problem| problem.kv_len = 1024), None, "71 MB");
        assert_eq!(of(|problem| problem.keys = KvStorage::Paged { block_size: 16 }), Some(four));
        assert_eq!(of(|problem| problem.keys = KvStorage::Paged { block_size: 8 }), None);
        assert_eq!(of(|problem| problem.query_len = 3), None, "12 rows per head");
        assert_eq!(of(|problem| (problem.query_heads, problem.kv_heads) = (30, 6)), None);
        assert_eq!(of(|problem| problem.batch_invariant = true), None);
        assert_eq!(of(|problem| problem.variant.softcap = true), None);
        assert_eq!(of(|problem| problem.value_dtype = DType::BF16), None);
        assert_eq!(name(|_| (), DType::Q8_0, "a100"), None);
    }

    #[test]
    fn joined_heads_keep_all_rows() {
        let problem = problem(DType::Q8_0);
        let joined = joined_heads(&problem, 4);
        assert_eq!((joined.kv_heads, packed_rows(&joined)), (2, 16));
        let grid = DecodeGrid::for_kernel(
            &joined,
            &facts("h200"),
            &DecodeKernel::for_heads(&problem, &facts("h200")).unwrap(),
        );
        assert_eq!((grid.tiles, grid.ctas, grid.key_groups), (64, 132, 2));
    }
}
