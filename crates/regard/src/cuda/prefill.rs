//! Selection of the prefill kernel of a problem, and numbering of its tiles: pure functions of the
//! problem and the GPU's facts.
//!
//! A tile is some query tokens of one query head. The kernels are persistent: a fixed grid of CTAs
//! takes one tile after the other.

use super::registry::{self, Build, Cache, Element, Family, Module, PrefillConfig};
use super::splits;
use super::work::has_plain_scores;
use super::{
    COUNTER_BYTES, Launch, MapSpace, PREFILL_COUNTER_BYTES, Prefill, PrefillKernel,
    WORKSPACE_ALIGNMENT,
};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{Problem, QueryStorage};
use crate::tile_map::{MapPlace, max_map_bytes};

/// Sequences of up to this many query rows (tokens times the heads of a group) run in decode: the
/// largest decode tile.
const DECODE_ROWS: usize = 64;

/// Sequences of up to this many query tokens run in decode, regardless of rows: a prefill tile (128
/// tokens of one head) would be nearly empty.
const DECODE_TOKENS: usize = 16;

/// The same for batches that mix short and long sequences: most short ones have one token, and the
/// decode tile is chosen for one token.
const MIXED_TOKENS: usize = 8;

/// The same under a mask, if prefill has WGMMA and there are this many keys: decode reads the mask
/// of every tile, and prefill that of tiles which it changes. With 8 sequences of 8192 keys, 4
/// tokens take 173 us in decode and 16 take 298; in prefill up to 128 take 120 (H200).
const MASKED_TOKENS: usize = 7;
const MASKED_KEYS: usize = 1024;

/// Rows per tile of the decode kernels for blocks.
const BLOCK_DECODE_ROWS: usize = 32;

/// Keys and values of an L2 group may take 1 / `L2_GROUP_DIVISOR` of the L2 cache. The rest is for
/// queries and outputs, and each half of the cache keeps a copy.
const L2_GROUP_DIVISOR: usize = 4;

/// Query heads per key/value head from which on the kernel for short windows is selected: each
/// item's keys are loaded for its heads only.
const MIN_WINDOW_GROUP: usize = 4;

/// CTAs per multiprocessor and threads per CTA of the kernel that makes a tile map.
const MAP_CTAS: usize = 8;
const MAP_THREADS: u32 = 256;

/// Shared memory of a multiprocessor that the driver keeps for each CTA. One CTA can have all but
/// that.
const RESERVED_BYTES: usize = 1 << 10;

/// Division of sequences between decode and prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Division {
    /// All run in decode.
    Decode,
    /// All run in prefill.
    Prefill,
    /// Sequences of at most this many query tokens run in decode, the others in prefill.
    Mixed(usize),
}

/// Divides the sequences of a problem, by the number of query tokens.
pub(super) fn division(problem: &Problem, facts: &CudaFacts) -> Division {
    let is_masked = problem.variant.mask.is_some() && problem.kv_len >= MASKED_KEYS;
    let max_tokens = match is_masked && has_wgmma(problem, facts) {
        true => MASKED_TOKENS,
        false => (DECODE_ROWS / problem.group()).max(DECODE_TOKENS),
    };
    // Batch-invariant: the kernel of a row must not depend on the lengths of other sequences.
    if problem.batch_invariant || problem.query_len <= max_tokens {
        return Division::Decode;
    }
    match problem.queries {
        // If all sequences are as long as the longest, or one has all tokens, none is short.
        QueryStorage::Ragged { total }
            if problem.batch > 1 && total < problem.batch.saturating_mul(problem.query_len) =>
        {
            Division::Mixed(MIXED_TOKENS.min(max_tokens))
        }
        QueryStorage::Ragged { .. } | QueryStorage::Batched => Division::Prefill,
    }
}

/// The prefill launch for a problem whose sequences all run in prefill or are [`Division::Mixed`];
/// `None` if no module takes it on this GPU. The tile maps of a mask start at `map_at` in the
/// workspace.
pub(super) fn select(
    problem: &Problem,
    facts: &CudaFacts,
    max_decode_len: usize,
    map_at: usize,
) -> Option<Prefill> {
    let fallback = find_fallback(problem, facts)?;
    let (specialized, any_scales) = find_specialized(problem, facts);
    let specialized = specialized.unwrap_or(fallback);
    Some(with_kernels([specialized, fallback], any_scales, problem, facts, max_decode_len, map_at))
}

/// The prefill launch with these kernels: see [`Prefill`].
pub(super) fn with_kernels(
    [specialized, fallback]: [PrefillKernel; 2],
    any_scales: Option<PrefillKernel>,
    problem: &Problem,
    facts: &CudaFacts,
    max_decode_len: usize,
    map_at: usize,
) -> Prefill {
    let map = problem.variant.mask.is_some();
    let prefill = Prefill {
        specialized,
        any_scales,
        fallback,
        min_query_len: if max_decode_len == 0 { 0 } else { max_decode_len as i32 + 1 },
        l2_group: l2_group(problem, specialized.cache.key_terms(), facts),
        map: map.then(|| map_space(problem, facts, [&specialized, &fallback], map_at)),
        partials: None,
    };
    let partials = splits::space(problem, &prefill, prefill.maps_end().unwrap_or(map_at));
    Prefill { partials, ..prefill }
}

impl Prefill {
    /// The end of its tile maps in the workspace, if it has some.
    pub(super) fn maps_end(&self) -> Option<usize> {
        self.map.map(|map| map.specialized.end().max(map.fallback.end()))
    }

    /// The end of all that it has in the workspace, if it has something.
    pub(super) fn end(&self) -> Option<usize> {
        self.partials.map(|space| space.at + space.bytes).or(self.maps_end())
    }
}

/// The fastest kernel over elements that takes more of each key, as a class of caches says
/// (`Cache::Scaled` or [`Cache::Terms`]), and the one for operands that this cannot read, if there
/// is another; `None` if there is none for the problem.
pub(super) fn find_extended(
    cache: Cache,
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<[PrefillKernel; 2]> {
    let element = Element::from_dtype(problem.dtype);
    let find = |family| {
        let find = |build| find_kind(family, Kind { build, cache, element }, problem, facts);
        let is_plain = takes_plain(family, problem);
        let plain = find(Build::Specialized).filter(|kernel| is_plain && kernel.exact_dims);
        plain.or_else(|| find(Build::Fallback))
    };
    let families = || [Family::PrefillSm90, Family::PrefillSm90Wide].into_iter();
    let on_hopper = has_wgmma(problem, facts).then(|| families().find_map(find)).flatten();
    let anywhere = find(Family::PrefillSm80);
    let fastest = on_hopper.or(anywhere)?;
    Some([fastest, anywhere.unwrap_or(fastest)])
}

/// Whether keys or values of this type are exact in the type of queries; codes without their
/// scales.
pub(super) fn is_exact(problem: &Problem, stored: DType) -> bool {
    stored == problem.dtype || stored.is_code()
}

/// Whether keys and values are stored in the type of queries.
pub(super) fn has_elements(problem: &Problem) -> bool {
    problem.key_dtype == problem.dtype && problem.value_dtype == problem.dtype
}

/// The kernel that accepts every problem of its types; `None` for keys in two parts and latent
/// rows, which run in decode for any number of rows.
fn find_fallback(problem: &Problem, facts: &CudaFacts) -> Option<PrefillKernel> {
    let (keys, values) = (problem.key_dtype, problem.value_dtype);
    let in_two_parts = problem.rotary_dim > 0;
    if in_two_parts || keys.is_latent_row() {
        return None;
    }
    if has_elements(problem) {
        return find_module(Family::PrefillSm80, Build::Fallback, problem, facts);
    }
    let is_exact = |stored| is_exact(problem, stored);
    let in_16_bits = match problem.dtype {
        // Values in blocks are rounded, as probabilities are.
        DType::BF16 => is_exact(keys) && (is_exact(values) || values.is_block()),
        // In f16 a probability times the scale of its value could underflow.
        DType::F16 => is_exact(keys) && values == DType::F16,
        _ => false,
    };
    let element = if in_16_bits { Element::from_dtype(problem.dtype) } else { Element::F32 };
    let kind = Kind { build: Build::Fallback, cache: Cache::Any, element };
    find_kind(Family::PrefillSm80, kind, problem, facts)
}

/// The fastest kernels for a cache that is not stored in the type of queries, if there are any
/// beside the fallback: for codes with one scale per head, and for scales of any granularity.
fn find_specialized_cache(
    problem: &Problem,
    facts: &CudaFacts,
) -> (Option<PrefillKernel>, Option<PrefillKernel>) {
    let element = Element::from_dtype(problem.dtype);
    let stored = find_stored(problem, facts);
    if problem.value_dtype.is_code() && has_wgmma(problem, facts) && problem.key_dtype.is_code() {
        let hopper = Kind { build: Build::Specialized, cache: Cache::Bytes, element };
        let kernel = find_kind(Family::PrefillSm90, hopper, problem, facts);
        if let Some(kernel) = kernel.filter(|kernel| has_plain_scores(problem) && kernel.exact_dims)
        {
            return (Some(kernel), stored);
        }
    }
    let takes_head_scales = problem.dtype == DType::F16
        && is_exact(problem, problem.key_dtype)
        && problem.value_dtype.is_code();
    let any = Kind { build: Build::Fallback, cache: Cache::Any, element };
    let in_f16 =
        || takes_head_scales.then(|| find_kind(Family::PrefillSm80, any, problem, facts)).flatten();
    (stored.or_else(in_f16), None)
}

/// Whether a prefill kernel is faster than decode for a problem whose keys and values are in blocks
/// of one kind. Decode has kernels for them too, faster than prefill's fallback; and where there
/// are few rows, faster than its kernels for Hopper, because they divide the keys of a tile among
/// CTAs. `has_decode_wgmma`: whether decode would multiply by WGMMA.
pub(super) fn outruns_decode(
    problem: &Problem,
    kernel: &PrefillKernel,
    has_decode_wgmma: bool,
    facts: &CudaFacts,
) -> bool {
    if !kernel.tensor_maps && !matches!(kernel.cache, Cache::Terms(_)) {
        return false;
    }
    let tiles = |rows_per_token: usize, tile_rows: usize| {
        let of_tokens = |tokens: usize| tokens.saturating_mul(rows_per_token).div_ceil(tile_rows);
        match problem.queries {
            QueryStorage::Batched => of_tokens(problem.query_len).saturating_mul(problem.batch),
            // Each sequence but the last may end within a tile.
            QueryStorage::Ragged { total } => {
                of_tokens(total).saturating_add(problem.batch.saturating_sub(1))
            }
        }
    };
    let ctas = facts.multiprocessors;
    let rounds = tiles(1, kernel.tile_rows).saturating_mul(problem.query_heads).div_ceil(ctas);
    let decode = tiles(problem.group(), BLOCK_DECODE_ROWS).saturating_mul(problem.kv_heads);
    // In quarters of the time in which decode with WGMMA does a tile, as measured on an H200
    // (docs/perf): a tile of prefill, with the copy of a sequence's keys and values of a head.
    let (of_tile, of_copy) = match kernel.cache {
        Cache::Terms(_) if kernel.tensor_maps => (4, 9),
        Cache::Terms(_) => (8, 9),
        _ => (8, 0),
    };
    let copies = problem.batch.saturating_mul(problem.kv_heads).saturating_mul(of_copy);
    let prefill = rounds.saturating_mul(ctas * of_tile).saturating_add(copies);
    let of_decode_tile = if has_decode_wgmma { 4 } else { 8 };
    decode.saturating_mul(of_decode_tile) > prefill
}

/// Hopper's kernel for caches in any formats whose codes and floats are exact in the type of
/// queries. Products of values and their scales are rounded to that type: f16 has not the range.
fn find_stored(problem: &Problem, facts: &CudaFacts) -> Option<PrefillKernel> {
    let is_taken = |stored: DType| is_exact(problem, stored) || stored.is_block();
    let takes = problem.dtype == DType::BF16
        && is_taken(problem.key_dtype)
        && is_taken(problem.value_dtype)
        && problem.rotary_dim == 0
        && has_plain_scores(problem)
        && has_wgmma(problem, facts);
    let element = Element::from_dtype(problem.dtype);
    let stored = Kind { build: Build::Specialized, cache: Cache::Any, element };
    takes
        .then(|| find_kind(Family::PrefillSm90, stored, problem, facts))
        .flatten()
        .filter(|kernel| kernel.exact_dims)
}

/// The fastest kernels for a problem, if there are any beside the fallback: one of Hopper's with
/// WGMMA and TMA, or one with `mma.sync` for plain scores; and one for scales that heads do not
/// share, if that does not take them.
fn find_specialized(
    problem: &Problem,
    facts: &CudaFacts,
) -> (Option<PrefillKernel>, Option<PrefillKernel>) {
    if !has_elements(problem) {
        return find_specialized_cache(problem, facts);
    }
    let wgmma = || {
        let loops = [Family::PrefillSm90, Family::PrefillSm90Wide].into_iter().find_map(|family| {
            find_plain(family, problem, facts).or(find_module(
                family,
                Build::Fallback,
                problem,
                facts,
            ))
        });
        find_window(problem, facts).or(loops)
    };
    let kernel = has_wgmma(problem, facts).then(wgmma).flatten();
    (kernel.or_else(|| find_plain(Family::PrefillSm80, problem, facts)), None)
}

/// Whether WGMMA kernels take the problem's types: 16-bit operands, and outputs of their type, or
/// in f32 up to head dim 256.
pub(super) fn has_wgmma(problem: &Problem, facts: &CudaFacts) -> bool {
    facts.compute_capability == 90
        && problem.dtype != DType::F32
        && (problem.out_dtype == problem.dtype || problem.head_dim.max(problem.value_dim) <= 256)
}

/// Whether the kernels of a family write the problem's outputs.
fn writes(family: Family, problem: &Problem) -> bool {
    let takes_f32 = matches!(family, Family::PrefillSm80 | Family::PrefillSm90);
    problem.out_dtype == problem.dtype || takes_f32
}

/// The kernel for short windows, if each 64 rows from a multiple of 64 on see few enough blocks of
/// keys, and enough query heads share these.
fn find_window(problem: &Problem, facts: &CudaFacts) -> Option<PrefillKernel> {
    let kernel = find_plain(Family::PrefillSm90Window, problem, facts)?;
    let window = problem.variant.window;
    let right = if problem.variant.causal { Some(0) } else { window.right };
    let blocks = |keys: Option<usize>| Some(keys?.div_ceil(kernel.tile_keys));
    let seen = blocks(window.left)?.checked_add(blocks(right)?)?.checked_add(1)?;
    (seen <= PrefillConfig::WINDOW_BLOCKS && problem.group() >= MIN_WINDOW_GROUP).then_some(kernel)
}

/// The specialized module of a family for a problem that it takes, of the module's exact head dims.
fn find_plain(family: Family, problem: &Problem, facts: &CudaFacts) -> Option<PrefillKernel> {
    find_module(family, Build::Specialized, problem, facts)
        .filter(|kernel| takes_plain(family, problem) && kernel.exact_dims)
}

/// Whether the specialized modules of a family take a problem, but for its dims: with plain scores
/// and even ranges, and outputs of the operands' type, or in f32 if they write these. The scores of
/// those above head dim 256 are not exact enough for a log-sum-exp.
fn takes_plain(family: Family, problem: &Problem) -> bool {
    has_plain_scores(problem)
        && (problem.out_dtype == problem.dtype || family == Family::PrefillSm90)
        && !(family == Family::PrefillSm90Wide && problem.lse)
}

/// The module of a family and build with the smallest head dims that the problem fits into, if this
/// GPU can run it. Modules for few keys come before those for any number.
fn find_module(
    family: Family,
    build: Build,
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<PrefillKernel> {
    let kind = Kind { build, cache: Cache::Elements, element: Element::from_dtype(problem.dtype) };
    find_kind(family, kind, problem, facts)
}

/// Differences of the modules of a family, apart from dims and tiles.
#[derive(Debug, Clone, Copy)]
struct Kind {
    build: Build,
    cache: Cache,
    element: Element,
}

/// [`find_module`] for a kind of module.
fn find_kind(
    family: Family,
    Kind { build, cache, element }: Kind,
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<PrefillKernel> {
    let suits = |config: &PrefillConfig| {
        config.family() == family
            && writes(family, problem)
            && config.operands.build == build
            && config.operands.element == element
            && config.cache == cache
            && config.operands.fits(problem.head_dim, problem.value_dim)
            && config.key_range().contains(problem.kv_len, problem.variant.causal)
            && config.shared_bytes() <= facts.shared_bytes
    };
    registry::prefill_modules()
        .filter(|(_, config)| suits(config))
        .min_by_key(|(_, config)| config.operands.head_dim + config.operands.value_dim)
        .map(|(module, config)| kernel(module, config, problem, facts))
}

/// A module's kernel and its persistent grid. The grid is resident at once: tiles are sorted
/// longest first, so a CTA that starts late would be given a long tile late.
fn kernel(
    module: &'static Module,
    config: &PrefillConfig,
    problem: &Problem,
    facts: &CudaFacts,
) -> PrefillKernel {
    let shared_bytes = config.shared_bytes();
    let resident = (facts.shared_bytes + RESERVED_BYTES) / (shared_bytes + RESERVED_BYTES);
    let cluster_size = config.cluster_size();
    let ctas = facts.multiprocessors * config.min_ctas_per_sm().min(resident);
    PrefillKernel {
        launch: Launch {
            module: module.name(),
            entry: "prefill",
            grid: [(ctas / cluster_size * cluster_size) as u32, 1, 1],
            threads: config.threads() as u32,
            shared_bytes: shared_bytes as u32,
            ..Launch::default()
        },
        tile_rows: config.tile_rows,
        tile_keys: config.tile_keys,
        cluster_size,
        box_keys: config.box_keys(),
        tensor_maps: config.family().uses_wgmma(),
        exact_dims: config.operands.has_dims(problem.head_dim, problem.value_dim),
        cache: config.cache,
        head_scales: config.cache == Cache::Bytes
            || (config.cache == Cache::Any && config.operands.element == Element::F16),
        splits_keys: config.family() == Family::PrefillSm90,
        value_dim: config.operands.value_dim,
    }
}

/// The launch that makes a tile map of a mask, and room for those of both kernels.
fn map_space(
    problem: &Problem,
    facts: &CudaFacts,
    [specialized, fallback]: [&PrefillKernel; 2],
    at: usize,
) -> MapSpace {
    let launch = Launch {
        module: Family::MaskMap.name(),
        entry: "mask_map",
        grid: [(facts.multiprocessors * MAP_CTAS) as u32, 1, 1],
        threads: MAP_THREADS,
        ..Launch::default()
    };
    let mask = [problem.batch, problem.query_heads, problem.query_len, problem.kv_len];
    let place = |at, kernel| MapPlace { at, bytes: max_map_bytes(map_extents(mask, kernel)) };
    let first = place(at, specialized);
    let tile = |kernel: &PrefillKernel| (kernel.tile_rows, kernel.tile_keys);
    let behind = || first.end().checked_next_multiple_of(WORKSPACE_ALIGNMENT as usize);
    let second = || place(behind().unwrap_or(usize::MAX), fallback);
    let fallback = if tile(specialized) == tile(fallback) { first } else { second() };
    MapSpace { launch, specialized: first, fallback }
}

/// (Sequence, key/value head) pairs that share the L2 cache: groups of equal size, as few as
/// possible.
fn l2_group(problem: &Problem, key_terms: usize, facts: &CudaFacts) -> i32 {
    let pairs = problem.batch.saturating_mul(problem.kv_heads).max(1);
    let key_bytes = (key_terms * problem.head_dim + problem.value_dim) * problem.dtype.size();
    let pair_bytes = problem.kv_len.max(1).saturating_mul(key_bytes);
    let max_pairs = (facts.l2_bytes / L2_GROUP_DIVISOR / pair_bytes).max(1);
    let groups = pairs.div_ceil(max_pairs);
    i32::try_from(pairs.div_ceil(groups)).unwrap_or(i32::MAX)
}

/// Number of tiles that a kernel divides a problem into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    /// Row tiles of each (sequence, query head).
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "launches ask for them"))]
    pub rows: usize,
    /// Row tiles of all of them.
    pub total: usize,
}

/// The tiles of a problem, where all sequences are as long as the longest.
pub(super) fn tiles(problem: &Problem, kernel: &PrefillKernel) -> Tiles {
    let rows = problem.query_len.div_ceil(kernel.tile_rows);
    let heads = problem.batch.saturating_mul(problem.query_heads);
    Tiles { rows, total: heads.saturating_mul(rows) }
}

/// The extents of a tile map: sequences, query heads, row tiles, key tiles.
pub(super) fn map_extents(
    [batch, heads, rows, keys]: [usize; 4],
    kernel: &PrefillKernel,
) -> [usize; 4] {
    [batch, heads, rows.div_ceil(kernel.tile_rows), keys.div_ceil(kernel.tile_keys)]
}

/// Offset of the two tile counters in the workspace, in bytes.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "launches point there"))]
pub(super) const COUNTERS_AT: usize = COUNTER_BYTES - PREFILL_COUNTER_BYTES;

/// Offset of the counter of CTAs that find the units of copies: behind those two.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "launches point there"))]
pub(super) const UNIT_COUNTER_AT: usize = COUNTERS_AT + 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::facts;
    use crate::variant::Window;

    fn h200() -> CudaFacts {
        facts("h200")
    }

    #[test]
    fn caches_of_any_scales_and_formats_have_a_kernel_on_hopper() {
        let facts = h200();
        let base = Problem {
            query_heads: 32,
            kv_heads: 8,
            query_len: 2048,
            kv_len: 2048,
            ..Problem::new(DType::BF16, 128)
        };
        let stored = |key_dtype, value_dtype| Problem { key_dtype, value_dtype, ..base.clone() };
        let module =
            |problem: &Problem| select(problem, &facts, 0, 0).unwrap().specialized.launch.module;
        let any = "prefill_bf16_128_128_any_plain_sm90";
        for [keys, values] in [
            [DType::Q8_0, DType::Q4_0],
            [DType::BF16, DType::E4M3],
            [DType::I8, DType::BF16],
            [DType::Q4_0, DType::Q4_0],
        ] {
            assert_eq!(module(&stored(keys, values)), any);
        }
        // Codes alone: a kernel for one scale per head, and this one for other scales.
        let codes = select(&stored(DType::I8, DType::E4M3), &facts, 0, 0).unwrap();
        assert_eq!(codes.specialized.launch.module, "prefill_bf16_128_128_bytes_plain_sm90");
        assert_eq!(codes.any_scales.unwrap().launch.module, any);
        // Problems that it does not take.
        assert_ne!(module(&stored(DType::F16, DType::Q8_0)), any, "f16 is not exact in bf16");
        assert_ne!(
            module(&Problem {
                dtype: DType::F16,
                out_dtype: DType::F16,
                ..stored(DType::Q8_0, DType::Q8_0)
            }),
            any
        );
        let mut capped = stored(DType::Q8_0, DType::Q8_0);
        capped.variant.softcap = true;
        assert_ne!(module(&capped), any);
    }

    #[test]
    fn blocks_of_one_kind_go_to_prefill_where_there_are_many_rows() {
        let facts = h200();
        let takes = |batch, query_len| {
            let problem = Problem {
                batch,
                query_heads: 32,
                kv_heads: 8,
                query_len,
                kv_len: 8192,
                key_dtype: DType::Q8_0,
                value_dtype: DType::Q8_0,
                ..Problem::new(DType::BF16, 128)
            };
            let stored = find_stored(&problem, &facts).unwrap();
            outruns_decode(&problem, &stored, true, &facts)
        };
        assert!(!takes(1, 17) && !takes(1, 128) && takes(1, 512) && takes(1, 2048));
        assert!(!takes(8, 17) && !takes(8, 64) && takes(8, 256) && takes(8, 512));
        assert!(!takes(0, 512) && !takes(1, 0));
    }

    #[test]
    fn short_windows_have_a_kernel_of_their_own() {
        let facts = h200();
        let base = Problem {
            query_heads: 8,
            query_len: 2048,
            kv_len: 2048,
            ..Problem::new(DType::BF16, 64)
        };
        let is_chosen = |problem: Problem| {
            select(&problem, &facts, 0, 0).unwrap().specialized.launch.module
                == "prefill_bf16_64_64_plain_sm90_window"
        };
        let windowed = |left, right, causal| {
            let mut problem = base.clone();
            (problem.variant.window, problem.variant.causal) = (Window { left, right }, causal);
            problem
        };
        let chosen = |left, right, causal| is_chosen(windowed(left, right, causal));
        // Blocks of 64 keys to the left and to the right: two at most.
        assert!(chosen(Some(127), None, true) && chosen(Some(128), Some(500), true));
        assert!(!chosen(Some(129), None, true) && !chosen(None, None, true));
        assert!(chosen(Some(64), Some(64), false) && chosen(Some(0), Some(128), false));
        assert!(!chosen(Some(65), Some(64), false) && !chosen(Some(64), None, false));
        assert!(!chosen(Some(usize::MAX), Some(usize::MAX), false));
        // Problems that it does not take.
        let windowed = windowed(Some(127), None, true);
        assert!(!is_chosen(Problem { query_heads: 3, ..windowed.clone() }), "few heads per key");
        assert!(!is_chosen(Problem { head_dim: 56, value_dim: 56, ..windowed.clone() }));
        assert!(!is_chosen(Problem { out_dtype: DType::F32, ..windowed.clone() }));
        let mut capped = windowed;
        capped.variant.softcap = true;
        assert!(!is_chosen(capped));
    }
}
