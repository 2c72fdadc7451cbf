//! Decode over codes on Hopper with WGMMA: which problems have it, and how it is launched.

use super::registry::codes::CODES_TILE_KEYS;
use super::registry::{self, Cache, DecodeConfig, Element, Module};
use super::work::{PARTIAL_RANGE_BYTES, packed_rows, page_aligned_16, start_units, tiles};
use super::{COUNTER_BYTES, Combine, Decode, Launch, PREFILL_COUNTER_BYTES};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{Problem, QueryStorage};

/// Rows per CTA of the kernel that combines partial states: one per warp.
const COMBINE_ROWS: usize = 8;

/// A decode launch over codes.
pub(super) struct CodesDecode {
    pub decode: Decode,
    /// Bytes of its workspace, the counters included.
    pub workspace_bytes: usize,
}

/// The decode launch for a problem over codes; `None` if no such module takes it on this GPU.
/// Operands whose rows do not start at multiples of 16 bytes run without it.
pub(super) fn select(problem: &Problem, facts: &CudaFacts) -> Option<CodesDecode> {
    if !is_plain(problem) || std::env::var("REGARD_CODES").is_ok_and(|x| x == "0") {
        return None;
    }
    let (module, config) = find_module(problem, facts)?;
    let tiles = tiles(problem, config.tile_rows);
    let (ctas_per_multiprocessor, key_groups) = occupancy(config, tiles, facts);
    let block_bytes = config.cache.block_bytes().expect("codes");
    let unit_bytes = CODES_TILE_KEYS * (problem.head_dim + problem.value_dim) / 32 * block_bytes;
    let start_units = start_units(unit_bytes);
    let units = problem.kv_len.div_ceil(CODES_TILE_KEYS);
    let max_ctas = (facts.multiprocessors * ctas_per_multiprocessor)
        .min((COUNTER_BYTES - PREFILL_COUNTER_BYTES) / 4);
    let ctas = tiles.saturating_mul(units + start_units).clamp(1, max_ctas);
    let partial_bytes = config.tile_rows * (config.operands.value_dim + 2) * 4;
    let partials_end = COUNTER_BYTES + ctas * 2 * partial_bytes;
    let combines = config.tile_rows > COMBINE_ROWS
        && 2 * tiles <= ctas
        && problem.queries == QueryStorage::Batched;
    let combine = combines.then(|| Combine {
        launch: Launch {
            module: module.name(),
            entry: "combine",
            grid: [tiles as u32, (config.tile_rows / COMBINE_ROWS) as u32, 1],
            threads: (32 * COMBINE_ROWS) as u32,
            shared_bytes: 0,
        },
        at: partials_end,
    });
    let decode = Decode {
        launch: Launch {
            module: module.name(),
            entry: "decode",
            grid: [ctas as u32, 1, 1],
            threads: (128 * key_groups) as u32,
            shared_bytes: config.codes_shared_bytes(key_groups) as u32,
        },
        fallback: module.name(),
        max_query_len: i32::MAX,
        partials_per_cta: 2,
        key_groups: key_groups as i32,
        tile_rows: config.tile_rows as i32,
        ctas_per_tile: 1,
        unit_keys: CODES_TILE_KEYS as i32,
        start_units: start_units as i32,
        exact_dims: true,
        cache: config.cache,
        combine,
        schedule: None,
    };
    let ranges = if combine.is_some() { tiles * PARTIAL_RANGE_BYTES } else { 0 };
    Some(CodesDecode { decode, workspace_bytes: partials_end + ranges })
}

/// CTAs per multiprocessor, and groups of a CTA: as [`super::select`] has it for other kernels,
/// one large CTA where there are few tiles, else one per group.
fn occupancy(config: &DecodeConfig, tiles: usize, facts: &CudaFacts) -> (usize, usize) {
    let max_groups = config.codes_threads() / 128;
    if let Some(n) = std::env::var("REGARD_CODES_CTAS").ok().and_then(|x| x.parse::<usize>().ok()) {
        return (n, max_groups / n);
    }
    let ctas = match tiles / facts.multiprocessors.max(1) {
        0 | 1 => 1,
        _ => max_groups,
    };
    (ctas, max_groups / ctas)
}

/// Whether a problem has what these modules are for: plain scores, and runs of 16 keys that are
/// neighbours in memory.
fn is_plain(problem: &Problem) -> bool {
    problem.variant.has_unmodified_scores()
        && problem.variant.has_even_ranges()
        && problem.rotary_dim == 0
        && problem.key_lists.is_none()
        // The splits of a batch-invariant result are those of every other module.
        && !problem.batch_invariant
        && page_aligned_16(problem)
}

/// The module of the smallest tile that the rows of a key/value head fit into, else of the largest.
fn find_module(
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<(&'static Module, &'static DecodeConfig)> {
    let cache = match (problem.key_dtype, problem.value_dtype) {
        (DType::Q8_0, DType::Q8_0) => Cache::Q8_0,
        (DType::Q4_0, DType::Q4_0) => Cache::Q4_0,
        (keys, values) if keys.is_code() && values.is_code() => Cache::Bytes,
        _ => return None,
    };
    let rows = packed_rows(problem);
    let suits = |(module, config): &(&Module, &DecodeConfig)| {
        config.wgmma
            && config.cache == cache
            && config.operands.element == Element::from_dtype(problem.dtype)
            && config.operands.has_dims(problem.head_dim, problem.value_dim)
            && module.runs_on(facts.compute_capability)
            && config.codes_shared_bytes(config.codes_threads() / 128) <= facts.shared_bytes
            // Blocks have no larger tile.
            && (config.cache == Cache::Bytes || rows <= config.tile_rows)
    };
    let too_few = |config: &DecodeConfig| config.tile_rows < rows;
    registry::decode_modules().filter(suits).min_by_key(|(_, config)| match too_few(config) {
        true => (true, usize::MAX - config.tile_rows),
        false => (false, config.tile_rows),
    })
}
