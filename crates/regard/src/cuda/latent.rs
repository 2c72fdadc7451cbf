//! Decode over latent caches on Hopper: which problems have it, and how it is launched.

use super::registry::{self, Cache, DecodeConfig, Element, Module};
use super::work::{combine, packed_rows, start_units, tiles};
use super::{COUNTER_BYTES, Decode, HopperDecode, Launch, PREFILL_COUNTER_BYTES};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{KeyLists, KvStorage, ListEntries, Problem, QueryStorage};
use crate::variant::Values;

/// Keys per K tile: units of work, and the maximum keys per TMA box.
const TILE_KEYS: usize = 64;

/// Threads of a CTA that combines partial states.
const COMBINE_THREADS: usize = 512;

/// Its shared memory besides the word of its tile: `CombineShared` of the kernel.
const COMBINE_SHARED_BYTES: usize = COMBINE_THREADS * (16 + 2 * 4) + 2 * (COMBINE_THREADS / 32) * 4;

/// Parts of a tile from which on a CTA has no more than one row.
const MANY_PARTS: usize = 32;

/// Slices of a row whose parts are many, if there are multiprocessors for a CTA per slice.
const COMBINE_SLICES: usize = 4;

/// Keys per TMA box are a multiple of this: shared memory is swizzled in groups of 8 rows.
const BOX_STEP: usize = 8;

/// The decode launch for a problem over a latent cache; `None` if no such module takes it on this
/// GPU. Operands that TMA cannot read run without it.
pub(super) fn select(problem: &Problem, facts: &CudaFacts) -> Option<HopperDecode> {
    if !is_plain(problem) {
        return None;
    }
    let (module, config) = find_module(problem, facts)?;
    let ctas_per_tile = config.ctas_per_tile();
    let tiles = tiles(problem, config.tile_rows);
    let start_units = start_units(TILE_KEYS * key_bytes(problem));
    let units = problem.kv_len.div_ceil(TILE_KEYS);
    let max_parts = (facts.multiprocessors / ctas_per_tile)
        .min((COUNTER_BYTES - PREFILL_COUNTER_BYTES) / 4 / ctas_per_tile);
    let parts = tiles.saturating_mul(units + start_units).clamp(1, max_parts.max(1));
    let combines = 2 * tiles <= parts && problem.queries == QueryStorage::Batched;
    // A row that has few parts has one group of threads, which also weigh the parts.
    let parts = if combines { parts.min(row_threads(config)) } else { parts };
    let partial_bytes = config.tile_rows * (config.operands.value_dim + 2) * 4;
    let partials_end = COUNTER_BYTES + parts * 2 * partial_bytes;
    let combine = combines.then(|| {
        let mut combine = combine(module, tiles, combine_ctas(config, tiles, parts, facts));
        combine.threads = COMBINE_THREADS as u32;
        combine.shared_bytes += COMBINE_SHARED_BYTES as u32;
        combine
    });
    let decode = Decode {
        launch: Launch {
            module: module.name(),
            entry: "decode",
            grid: [(parts * ctas_per_tile) as u32, 1, 1],
            threads: config.latent_threads() as u32,
            shared_bytes: config.latent_shared_bytes() as u32,
            ..Launch::default()
        },
        fallback: module.name(),
        max_query_len: i32::MAX,
        partials_per_cta: 2,
        key_groups: 1,
        tile_rows: config.tile_rows as i32,
        tile_heads: 1,
        ctas_per_tile: ctas_per_tile as u32,
        unit_keys: TILE_KEYS as i32,
        start_units: start_units as i32,
        exact_dims: true,
        cache: config.cache,
        lists_pages: false,
        combine,
        schedule: None,
    };
    Some(HopperDecode { decode, workspace_bytes: partials_end })
}

/// The same for pages that are smaller than TMA boxes: modules for lists of keys read the page
/// table of each sequence as the list of its one row, which sees all of its keys.
pub(super) fn select_small_pages(problem: &Problem, facts: &CudaFacts) -> Option<HopperDecode> {
    let KvStorage::Paged { .. } = problem.keys else { return None };
    let sees_all =
        problem.variant.window.left.is_none() && problem.queries == QueryStorage::Batched;
    let is_whole = problem.key_lists.is_none() && problem.prefix_groups == 0;
    if problem.query_len != 1 || !sees_all || !is_whole {
        return None;
    }
    let lists = KeyLists {
        len: problem.kv_len,
        per_head: false,
        entries: ListEntries::Slots,
        second: None,
    };
    let listed = Problem { key_lists: Some(lists), ..problem.clone() };
    let found = select(&listed, facts)?;
    Some(HopperDecode { decode: Decode { lists_pages: true, ..found.decode }, ..found })
}

/// CTAs per tile that combine partial states: each has a slice of a row, a row, or several rows
/// with a group of threads each.
fn combine_ctas(config: &DecodeConfig, tiles: usize, parts: usize, facts: &CudaFacts) -> usize {
    let rows = config.tile_rows;
    let (has_many, all_rows) = (parts > MANY_PARTS * tiles, rows * tiles);
    if has_many && all_rows * COMBINE_SLICES <= facts.multiprocessors {
        rows * COMBINE_SLICES
    } else if has_many || all_rows <= facts.multiprocessors {
        rows
    } else {
        rows / (COMBINE_THREADS / row_threads(config))
    }
}

/// Threads that have four outputs each: one row.
fn row_threads(config: &DecodeConfig) -> usize {
    config.operands.value_dim / 4
}

/// Whether keys are rows of `e4m3` codes, which the modules for records of `mla656` take too: of
/// one head, which has one scale; in one tensor, and without lists into a second cache, whose keys
/// have a scale of their own.
fn are_e4m3_rows(problem: &Problem) -> bool {
    let has_second = problem.key_lists.is_some_and(|lists| lists.second.is_some());
    let is_alone = problem.kv_heads == 1 && problem.rotary_dim == 0 && !has_second;
    problem.key_dtype == DType::E4M3 && is_alone
}

/// Bytes of a key in memory.
fn key_bytes(problem: &Problem) -> usize {
    problem.head_dim / problem.key_dtype.values() * problem.key_dtype.size()
}

/// Loads of keys by the modules for a problem; `None` if there are no such modules.
fn cache_of(problem: &Problem) -> Option<Cache> {
    match problem.key_dtype {
        DType::Mla656 => Some(Cache::Mla656),
        DType::E4M3 if are_e4m3_rows(problem) => Some(Cache::Mla656),
        keys if keys == problem.dtype => Some(Cache::Latent),
        _ => None,
    }
}

/// Whether a problem has what these modules are for: scores that are dot products times the scale,
/// and pages that are multiples of a TMA box unless keys are copied or converted one by one.
fn is_plain(problem: &Problem) -> bool {
    problem.values == Values::KeyPrefix
        && problem.variant.has_unmodified_scores()
        && problem.variant.chunk.is_none()
        // The splits of a batch-invariant result are those of every other module.
        && !problem.batch_invariant
        && match problem.keys {
            _ if problem.key_lists.is_some() || problem.key_dtype != problem.dtype => true,
            KvStorage::Batched | KvStorage::Ragged => true,
            KvStorage::Paged { block_size } => block_size.is_multiple_of(BOX_STEP),
        }
}

/// The module of the smallest tile that the rows of a key/value head fit into, else of the largest.
fn find_module(
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<(&'static Module, &'static DecodeConfig)> {
    let cache = cache_of(problem)?;
    let suits = |(module, config): &(&Module, &DecodeConfig)| {
        config.cache == cache
            && config.lists == problem.key_lists.is_some()
            && config.operands.element == Element::from_dtype(problem.dtype)
            && config.operands.has_dims(problem.head_dim, problem.value_dim)
            && module.runs_on(facts.compute_capability)
            && config.latent_shared_bytes() <= facts.shared_bytes
    };
    let rows = packed_rows(problem);
    let too_few = |config: &DecodeConfig| config.tile_rows < rows;
    registry::decode_modules().filter(suits).min_by_key(|(_, config)| match too_few(config) {
        true => (true, usize::MAX - config.tile_rows),
        false => (false, config.tile_rows),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::cuda::facts;

    /// Decoding of `heads` over one latent head; caches have `keys` keys.
    fn problem(batch: usize, heads: usize, keys: usize) -> Problem {
        Problem {
            batch,
            query_heads: heads,
            kv_len: keys,
            value_dim: 512,
            values: Values::KeyPrefix,
            keys: KvStorage::Paged { block_size: 64 },
            ..Problem::new(DType::BF16, 576)
        }
    }

    #[test]
    fn the_tile_is_the_smallest_that_the_rows_fit_into() {
        let rows = |heads| {
            let HopperDecode { decode, .. } =
                select(&problem(8, heads, 16384), &facts("h200")).unwrap();
            (decode.tile_rows, decode.ctas_per_tile, decode.launch.grid[0])
        };
        assert_eq!([1, 16].map(rows), [(16, 1, 128); 2]);
        assert_eq!([17, 64].map(rows), [(64, 1, 128); 2]);
        assert_eq!([65, 128, 256].map(rows), [(128, 2, 132); 3]);
    }

    #[test]
    fn records_of_656_bytes_have_modules_of_their_own() {
        let records = |dtype, keys| Problem {
            dtype,
            key_dtype: DType::Mla656,
            value_dtype: DType::Mla656Latent,
            out_dtype: dtype,
            keys,
            ..problem(8, 16, 16384)
        };
        for keys in [KvStorage::Batched, KvStorage::Paged { block_size: 7 }] {
            let latent = select(&records(DType::BF16, keys), &facts("h200")).unwrap();
            let launch = latent.decode.launch;
            assert_eq!(launch.module, "decode_bf16_576_512_mla656_r16_plain_sm90");
            // It has two score warpgroups.
            assert_eq!((launch.threads, launch.grid[0]), (640, 128));
            let many = Problem { query_heads: 128, ..records(DType::BF16, keys) };
            let many = select(&many, &facts("h200")).unwrap().decode.launch;
            assert_eq!(many.module, "decode_bf16_576_512_mla656_r128_plain_sm90");
            assert_eq!((many.threads, many.grid[0]), (512, 132));
            // f16 cannot hold their rotary dims.
            assert!(select(&records(DType::F16, keys), &facts("h200")).is_none());
        }
    }

    #[test]
    fn rows_of_e4m3_run_in_the_modules_for_records() {
        let rows = |kv_heads, rotary_dim| Problem {
            key_dtype: DType::E4M3,
            value_dtype: DType::E4M3,
            kv_heads,
            rotary_dim,
            keys: KvStorage::Paged { block_size: 1 },
            ..problem(8, 16, 16384)
        };
        let latent = select(&rows(1, 0), &facts("h200")).unwrap();
        assert_eq!(latent.decode.launch.module, "decode_bf16_576_512_mla656_r16_plain_sm90");
        assert!(select(&rows(2, 0), &facts("h200")).is_none());
        assert!(select(&rows(1, 64), &facts("h200")).is_none());
    }

    #[test]
    fn small_pages_of_one_row_are_lists() {
        let module = |problem: &Problem| {
            select_small_pages(problem, &facts("h200")).map(|found| found.decode.launch.module)
        };
        let pages =
            |block_size| Problem { keys: KvStorage::Paged { block_size }, ..problem(8, 16, 16384) };
        let lists = Some("decode_bf16_576_512_latent_r16_lists_sm90");
        assert_eq!([1, 4].map(|block_size| module(&pages(block_size))), [lists; 2]);
        assert_eq!(module(&Problem { query_len: 2, ..pages(1) }), None);
        let mut windowed = pages(1);
        windowed.variant.window.left = Some(100);
        assert_eq!(module(&windowed), None);
    }

    #[test]
    fn combine_kernel_is_used_for_few_tiles() {
        let combine = |batch, keys| {
            let HopperDecode { decode, .. } =
                select(&problem(batch, 16, keys), &facts("h200")).unwrap();
            decode.combine.map(|combine| combine.grid)
        };
        // 128 parts of one tile: a CTA has a quarter of a row.
        assert_eq!(combine(1, 16384), Some([1, 64, 1]));
        // 16 parts each of 8 tiles: a CTA has a row. More tiles: four.
        assert_eq!(combine(8, 16384), Some([8, 16, 1]));
        assert_eq!(combine(16, 16384), Some([16, 4, 1]));
        // Most tiles have one CTA: the last CTA of the others combines.
        assert_eq!(combine(128, 4096), None);
    }

    #[test]
    fn the_other_kernels_keep_what_is_theirs() {
        let refused = |change: fn(&mut Problem), machine: &str| {
            let mut problem = problem(8, 16, 4096);
            change(&mut problem);
            select(&problem, &facts(machine)).is_none()
        };
        assert!(!refused(|_| (), "h200"));
        assert!(refused(|_| (), "a100"));
        assert!(refused(|problem| problem.values = Values::Separate, "h200"));
        assert!(refused(|problem| problem.batch_invariant = true, "h200"));
        assert!(refused(|problem| problem.variant.softcap = true, "h200"));
        assert!(refused(|problem| problem.keys = KvStorage::Paged { block_size: 4 }, "h200"));
        assert!(refused(|problem| problem.value_dim = 448, "h200"));
        assert!(refused(|problem| problem.dtype = DType::F32, "h200"));
    }
}
