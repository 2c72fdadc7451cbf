//! Decode of many rows on Hopper with WGMMA: which problems have it, and how it is launched.

use super::decode::cache_of;
use super::registry::{self, Cache, DecodeConfig, Element, Module};
use super::work::{
    COMBINE_WARPS, combine, has_plain_scores, packed_rows, page_aligned_16, start_units, tiles,
};
use super::{COUNTER_BYTES, Decode, HopperDecode, Launch, PREFILL_COUNTER_BYTES};
use crate::machine::CudaFacts;
use crate::problem::{Problem, QueryStorage};

/// Rows per key/value head that `mma.sync` reads keys for as fast as memory brings them.
const FEW_ROWS: usize = 8;

/// Parts of a tile from which on another warp combines some of a row's.
const PARTS_PER_WARP: usize = 16;

/// The decode launch for a problem; `None` if no such module takes it on this GPU.
/// Operands whose rows do not start where its copies assume run without it.
pub(super) fn select(problem: &Problem, facts: &CudaFacts) -> Option<HopperDecode> {
    if !is_suitable(problem) {
        return None;
    }
    let (module, config) = find_module(problem, facts)?;
    let tiles = tiles(problem, config.tile_rows);
    let (key_bytes, value_bytes) = config.wgmma_row_bytes();
    let unit_bytes = DecodeConfig::WGMMA_TILE_KEYS * (key_bytes + value_bytes);
    let start_units = start_units(unit_bytes);
    let units = problem.kv_len.div_ceil(DecodeConfig::WGMMA_TILE_KEYS);
    if tiles.saturating_mul(units) < min_units(config) * facts.multiprocessors {
        return None;
    }
    let max_ctas = (facts.multiprocessors * config.wgmma_ctas_per_multiprocessor())
        .min((COUNTER_BYTES - PREFILL_COUNTER_BYTES) / 4);
    let ctas = tiles.saturating_mul(units + start_units).clamp(1, max_ctas);
    let partial_bytes = config.tile_rows * (config.operands.value_dim + 2) * 4;
    let partials_end = COUNTER_BYTES + ctas * 2 * partial_bytes;
    let combines = 2 * tiles <= ctas && problem.queries == QueryStorage::Batched;
    let combine = combines.then(|| {
        // Warps divide the parts of a row, some each, and leave states in shared memory.
        let warps = (ctas / tiles.max(1) / PARTS_PER_WARP).clamp(1, COMBINE_WARPS);
        let rows_per_cta = COMBINE_WARPS >> warps.ilog2();
        let mut combine = combine(module, tiles, config.tile_rows / rows_per_cta);
        let state_bytes = (config.operands.value_dim + 4) * 4;
        combine.shared_bytes += (COMBINE_WARPS * state_bytes) as u32;
        combine
    });
    let decode = Decode {
        launch: Launch {
            module: module.name(),
            entry: "decode",
            grid: [ctas as u32, 1, 1],
            threads: DecodeConfig::WGMMA_THREADS as u32,
            shared_bytes: config.wgmma_shared_bytes() as u32,
            ..Launch::default()
        },
        fallback: module.name(),
        max_query_len: i32::MAX,
        partials_per_cta: 2,
        key_groups: 1,
        tile_rows: config.tile_rows as i32,
        tile_heads: 1,
        ctas_per_tile: 1,
        unit_keys: DecodeConfig::WGMMA_TILE_KEYS as i32,
        start_units: start_units as i32,
        exact_dims: true,
        cache: config.cache,
        lists_pages: false,
        combine,
        schedule: None,
    };
    Some(HopperDecode { decode, workspace_bytes: partials_end })
}

/// K tiles per multiprocessor from which on these modules are faster than `mma.sync`. At head dim
/// 256 they take long to start.
fn min_units(config: &DecodeConfig) -> usize {
    match config.cache {
        _ if !config.has_large_heads() => 0,
        Cache::Elements => 4,
        _ => 2,
    }
}

/// Whether a problem has what these modules are for: plain scores, runs of 16 keys that are
/// neighbours in memory, and many rows.
fn is_suitable(problem: &Problem) -> bool {
    packed_rows(problem) > FEW_ROWS
        && has_plain_scores(problem)
        && problem.rotary_dim == 0
        && problem.key_lists.is_none()
        // The splits of a batch-invariant result are those of every other module.
        && !problem.batch_invariant
        && page_aligned_16(problem)
}

/// The module for a problem: that with the smallest tiles that hold all rows, else that with the
/// largest.
fn find_module(
    problem: &Problem,
    facts: &CudaFacts,
) -> Option<(&'static Module, &'static DecodeConfig)> {
    let (cache, rows) = (cache_of(problem), packed_rows(problem));
    let suits = |(module, config): &(&Module, &DecodeConfig)| {
        config.wgmma
            && config.cache == cache
            && config.operands.element == Element::from_dtype(problem.dtype)
            && config.operands.has_dims(problem.head_dim, problem.value_dim)
            && module.runs_on(facts.compute_capability)
            && config.wgmma_shared_bytes() <= facts.shared_bytes
    };
    let suitable = || registry::decode_modules().filter(suits);
    let holds_rows = |(_, config): &(_, &DecodeConfig)| rows <= config.tile_rows;
    let smallest = suitable().filter(holds_rows).min_by_key(|(_, config)| config.tile_rows);
    smallest.or_else(|| suitable().max_by_key(|(_, config)| config.tile_rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::cuda::facts;
    use crate::dtype::DType;
    use crate::problem::KvStorage;

    /// Verification of 8 tokens over e4m3.
    fn problem(batch: usize) -> Problem {
        Problem {
            batch,
            query_heads: 32,
            kv_heads: 8,
            query_len: 8,
            kv_len: 8192,
            key_dtype: DType::E4M3,
            value_dtype: DType::E4M3,
            ..Problem::new(DType::BF16, 128)
        }
    }

    #[test]
    fn shared_memory_suffices_for_all_ctas() {
        for (_, config) in registry::decode_modules().filter(|(_, config)| config.wgmma) {
            let (bytes, ctas) =
                (config.wgmma_shared_bytes(), config.wgmma_ctas_per_multiprocessor());
            assert!(bytes <= 227 << 10 && ctas * (bytes + 1024) <= 228 << 10, "{bytes}");
        }
    }

    #[test]
    fn a_few_tiles_have_a_kernel_that_combines_their_parts() {
        let combine = |batch| {
            let decode = select(&problem(batch), &facts("h200")).unwrap().decode;
            decode.combine.map(|combine| combine.grid)
        };
        assert_eq!(combine(1), Some([8, 8, 1]));
        assert_eq!(combine(8), Some([64, 4, 1]));
        assert_eq!(combine(64), None);
    }

    /// The module for a problem with caches of a type and heads of some dims.
    fn module(dtype: DType, head_dim: usize, problem: Problem) -> Option<&'static str> {
        let problem = Problem {
            key_dtype: dtype,
            value_dtype: dtype,
            head_dim,
            value_dim: head_dim,
            ..problem
        };
        select(&problem, &facts("h200")).map(|found| found.decode.launch.module)
    }

    #[test]
    fn few_rows_have_small_tiles() {
        let module = |dtype, query_len| module(dtype, 64, Problem { query_len, ..problem(64) });
        assert_eq!(module(DType::E4M3, 2), None);
        assert_eq!(module(DType::E4M3, 4), Some("decode_bf16_64_64_bytes_r16_plain_sm90a"));
        assert_eq!(module(DType::E4M3, 5), Some("decode_bf16_64_64_bytes_r32_plain_sm90a"));
        assert_eq!(module(DType::E4M3, 9), Some("decode_bf16_64_64_bytes_r32_plain_sm90a"));
        assert_eq!(module(DType::Q4_0, 4), Some("decode_bf16_64_64_q4_0_r32_plain_sm90a"));
    }

    #[test]
    fn large_heads_have_it_from_some_keys_on() {
        let module = |dtype, kv_len| module(dtype, 256, Problem { kv_len, ..problem(1) });
        assert_eq!(module(DType::BF16, 4096), None);
        assert_eq!(module(DType::BF16, 8192), Some("decode_bf16_256_256_r32_plain_sm90a"));
        assert_eq!(module(DType::E4M3, 2048), None);
        assert_eq!(module(DType::E4M3, 4096), Some("decode_bf16_256_256_bytes_r32_plain_sm90a"));
        // Blocks have small tiles only: 32 rows are two of them.
        assert_eq!(module(DType::Q8_0, 4096), Some("decode_bf16_256_256_q8_0_r16_plain_sm90a"));
    }

    #[test]
    fn the_other_kernels_keep_what_is_theirs() {
        let refused = |change: fn(&mut Problem), machine: &str| {
            let mut problem = problem(8);
            change(&mut problem);
            select(&problem, &facts(machine)).is_none()
        };
        assert!(!refused(|_| (), "h200"));
        assert!(!refused(|problem| problem.value_dtype = DType::I8, "h200"));
        assert!(!refused(|problem| problem.keys = KvStorage::Paged { block_size: 16 }, "h200"));
        assert!(refused(|_| (), "a100"));
        assert!(refused(|problem| problem.query_len = 2, "h200"));
        assert!(refused(|problem| problem.batch_invariant = true, "h200"));
        assert!(refused(|problem| problem.variant.softcap = true, "h200"));
        assert!(refused(|problem| problem.keys = KvStorage::Paged { block_size: 8 }, "h200"));
        assert!(refused(|problem| problem.key_dtype = DType::BF16, "h200"));
        assert!(refused(|problem| problem.value_dtype = DType::Q8_0, "h200"));
        assert!(refused(|problem| problem.value_dim = 64, "h200"));
        let blocks = |keys, values| {
            let problem = Problem { key_dtype: keys, value_dtype: values, ..problem(64) };
            select(&problem, &facts("h200")).map(|codes| codes.decode.launch.module)
        };
        let name = "decode_bf16_128_128_q4_0_r32_plain_sm90a";
        assert_eq!(blocks(DType::Q4_0, DType::Q4_0), Some(name));
        assert_eq!(blocks(DType::Q8_0, DType::Q4_0), None);
        assert!(refused(|problem| problem.dtype = DType::F32, "h200"));
    }
}
