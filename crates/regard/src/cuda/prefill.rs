//! Which prefill kernel runs a problem, and how its tiles are numbered: pure functions of the problem and the GPU's facts.
//!
//! A tile is some query tokens of one query head; a fixed grid of thread blocks takes one after the other. The table is the list of what
//! ships: a module's macros say what it is compiled for.

use super::shipped::{MODULES, Module};
use super::{COUNTER_BYTES, Launch, PREFILL_COUNTER_BYTES, Prefill, PrefillKernel, TileMap};
use crate::machine::CudaFacts;
use crate::problem::{Problem, QueryStorage};
use crate::tensor::DType;

/// Query rows (tokens times the heads of a group) of a sequence up to which it is decode's: its largest tile.
const DECODE_ROWS: usize = 64;

/// Query tokens up to which a sequence is decode's, whatever its rows: a tile of prefill, 128 tokens of one head, would be nearly empty.
const DECODE_TOKENS: usize = 16;

/// The same where sequences of few tokens run beside long ones: most have one token then, and decode's tiles are as small as suits that.
const MIXED_TOKENS: usize = 8;

/// The part of the L2 cache that keys and values of a section may take: the rest is for queries and outputs, and each half of the cache keeps its own copy.
const SECTION_PART: (usize, usize) = (1, 4);

/// The largest tile map, in bytes. A byte stands for some 16,000 elements of a mask: what needs more does not fit into memory.
const MOST_MAP_BYTES: usize = 4 << 20;

/// Blocks a multiprocessor and threads a block of the kernel that makes a tile map.
const MAP_BLOCKS: usize = 8;
const MAP_THREADS: u32 = 256;

/// Shared memory of a multiprocessor that the driver keeps for each block. One block can have all but that.
const RESERVED_BYTES: usize = 1 << 10;

/// Which of the two kernels sequences are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Division {
    /// All are decode's.
    Decode,
    /// All are prefill's.
    Prefill,
    /// Those of at most so many query tokens are decode's, the others prefill's.
    Mixed(usize),
}

/// Divides the sequences of a problem, by the number of query tokens alone.
pub(super) fn division(problem: &Problem) -> Division {
    let most = (DECODE_ROWS / problem.group()).max(DECODE_TOKENS);
    // The bits of a row may not depend on which kernel its sequence is for.
    if problem.batch_invariant || problem.query_len <= most {
        return Division::Decode;
    }
    match problem.queries {
        // Where every sequence has as many rows as the longest, or one has them all, none is short.
        QueryStorage::Ragged { total }
            if problem.batch > 1 && total < problem.batch.saturating_mul(problem.query_len) =>
        {
            Division::Mixed(MIXED_TOKENS.min(most))
        }
        QueryStorage::Ragged { .. } | QueryStorage::Batched => Division::Prefill,
    }
}

/// The prefill launch for a problem whose sequences are all prefill's or [`Division::Mixed`]; nothing where no kernel that ships takes it on this GPU.
/// The tile map of a mask starts at `map_at` in the workspace.
pub(super) fn select(
    problem: &Problem,
    facts: &CudaFacts,
    most_decode: usize,
    map_at: usize,
) -> Option<Prefill> {
    let bare = problem.variant.has_bare_scores();
    let fitting = |source: &str, general: bool| fitting(source, general, problem, facts);
    let general = fitting("prefill_sm80.cu", true)?;
    // Kernels that are not general take neither padding nor another type of output.
    let plain = |source: &str| {
        let suits = bare && problem.out_dtype == problem.dtype;
        fitting(source, false).filter(|kernel| suits && kernel.whole_rows)
    };
    // What the first of them does not take is the other's.
    let by_maps = || {
        let sources = ["prefill_sm90.cu", "prefill_sm90_wide.cu"];
        sources.into_iter().find_map(|source| plain(source).or(fitting(source, true)))
    };
    let hopper = facts.compute_capability == 90 && problem.dtype != DType::F32;
    let first = match hopper && problem.out_dtype == problem.dtype {
        true => by_maps().or(plain("prefill_sm80.cu")),
        false => plain("prefill_sm80.cu"),
    };
    let first = first.unwrap_or(general);
    let map = problem.variant.mask.is_some().then(|| {
        let module = MODULES.iter().find(|module| module.source == "mask_map.cu")?;
        let bytes = [first, general]
            .iter()
            .map(|kernel| most_map_bytes(problem, kernel))
            .max()
            .unwrap_or(0);
        let grid = [(facts.multiprocessors * MAP_BLOCKS) as u32, 1, 1];
        let launch = Launch {
            module: module.name,
            entry: "mask_map",
            grid,
            threads: MAP_THREADS,
            shared_bytes: 0,
        };
        Some(TileMap { launch, at: map_at, bytes })
    });
    Some(Prefill {
        first,
        general,
        least_query_len: if most_decode == 0 { 0 } else { most_decode as i32 + 1 },
        section: section(problem, facts),
        map: map.flatten(),
    })
}

/// The module of that source and kind with the smallest head dims that the problem's fit, if this GPU can run it; of two the one for few keys, where there are
/// few.
fn fitting(
    source: &str,
    general: bool,
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<PrefillKernel> {
    let element_type = match problem.dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        _ => 2,
    };
    let dims = |module: &Module| Some([module.number("HEAD_DIM")?, module.number("VALUE_DIM")?]);
    let causal = problem.variant.causal;
    let suits = |module: &Module| match module.number("MOST_KEYS").unwrap_or(0) {
        0 => true,
        most => problem.kv_len <= most && (causal || module.number("CAUSAL") == Some(0)),
    };
    let fits = |module: &&Module| {
        module.source == source
            && suits(module)
            && module.number("ELEMENT_TYPE") == Some(element_type)
            && module.number("GENERAL") == Some(general.into())
            && module.number("SHARED_BYTES").is_some_and(|bytes| bytes <= facts.shared_bytes)
            && dims(module)
                .is_some_and(|[key, value]| problem.head_dim <= key && problem.value_dim <= value)
    };
    let smallest = MODULES
        .iter()
        .filter(fits)
        .min_by_key(|module| dims(module).map(|[key, value]| key + value))?;
    // Blocks that wait for others to end would start last, on the longest tiles.
    let shared_bytes = smallest.number("SHARED_BYTES")?;
    let resident = (facts.shared_bytes + RESERVED_BYTES) / (shared_bytes + RESERVED_BYTES);
    let cluster = smallest.number("CLUSTER").unwrap_or(1);
    let blocks =
        facts.multiprocessors * smallest.number("BLOCKS")?.min(resident) / cluster * cluster;
    Some(PrefillKernel {
        launch: Launch {
            module: smallest.name,
            entry: "prefill",
            grid: [blocks as u32, 1, 1],
            threads: smallest.number("THREADS")? as u32,
            shared_bytes: shared_bytes as u32,
        },
        tile_rows: smallest.number("TILE_ROWS")?,
        tile_keys: smallest.number("TILE_KEYS")?,
        cluster,
        box_keys: smallest.number("BOX_KEYS").or(smallest.number("TILE_KEYS"))?,
        tensor_maps: source.starts_with("prefill_sm90"),
        whole_rows: dims(smallest) == Some([problem.head_dim, problem.value_dim]),
    })
}

/// (Sequence, key/value head) pairs that share the L2 cache: as few sections as that allows, of the same size.
fn section(problem: &Problem, facts: &CudaFacts) -> i32 {
    let pairs = problem.batch.saturating_mul(problem.kv_heads).max(1);
    let key_bytes = (problem.head_dim + problem.value_dim) * problem.dtype.size();
    let (part, whole) = SECTION_PART;
    let most =
        (facts.l2_bytes / whole * part / problem.kv_len.max(1).saturating_mul(key_bytes)).max(1);
    let sections = pairs.div_ceil(most);
    i32::try_from(pairs.div_ceil(sections)).unwrap_or(i32::MAX)
}

/// Row tiles of each (sequence, query head) and tiles in all.
#[cfg_attr(not(any(feature = "cuda", test)), allow(dead_code))]
pub(super) fn tiles(problem: &Problem, kernel: &PrefillKernel) -> (usize, usize) {
    let row_tiles = problem.query_len.div_ceil(kernel.tile_rows);
    (row_tiles, problem.batch.saturating_mul(problem.query_heads).saturating_mul(row_tiles))
}

/// The extents of a tile map: sequences, query heads, row tiles, key tiles.
pub(super) fn map_extents(
    [batch, heads, rows, keys]: [usize; 4],
    kernel: &PrefillKernel,
) -> [usize; 4] {
    [batch, heads, rows.div_ceil(kernel.tile_rows), keys.div_ceil(kernel.tile_keys)]
}

/// Bytes of a map of these extents.
pub(super) fn map_bytes(extents: [usize; 4]) -> usize {
    extents.into_iter().fold(1, usize::saturating_mul)
}

/// The same for a mask that is the same for no two sequences, heads or rows: a plan does not know.
fn most_map_bytes(problem: &Problem, kernel: &PrefillKernel) -> usize {
    let mask = [problem.batch, problem.query_heads, problem.query_len, problem.kv_len];
    map_bytes(map_extents(mask, kernel)).min(MOST_MAP_BYTES)
}

/// Where the two counters of the tiles are in the workspace.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) const COUNTERS_AT: usize = COUNTER_BYTES - PREFILL_COUNTER_BYTES;
