//! Decode's units of work: tiles of rows, and units of keys.

use super::Launch;
use super::registry::Module;
use crate::problem::{KvStorage, Problem};
use std::borrow::Cow;

/// Warps per CTA of the kernel that combines partial states. Each has a row, or part of one.
pub(super) const COMBINE_WARPS: usize = 8;

/// Bytes of shared memory of every kernel that combines: the word of its tile, rounded up.
const TILE_WORD_BYTES: u32 = 16;

/// Bytes of keys and values that a CTA could have read while it starts on a tile and ends it: 4.5
/// us, measured on an H200, at that GPU's 33 bytes per nanosecond and multiprocessor.
const START_BYTES: usize = 144 << 10;

/// Units of `unit_bytes` bytes that starting a tile counts for.
pub(super) fn start_units(unit_bytes: usize) -> usize {
    (START_BYTES / unit_bytes).max(1)
}

/// Query rows per key/value head, with the heads of a group packed.
pub(super) fn packed_rows(problem: &Problem) -> usize {
    problem.query_len.saturating_mul(problem.group())
}

/// Tiles of a problem, at most.
pub(super) fn tiles(problem: &Problem, rows: usize) -> usize {
    let row_tiles = packed_rows(problem).div_ceil(rows);
    problem.batch.saturating_mul(problem.kv_heads).saturating_mul(row_tiles)
}

/// Whether 16 keys in a row are neighbours in memory.
pub(super) fn page_aligned_16(problem: &Problem) -> bool {
    match problem.keys {
        KvStorage::Batched | KvStorage::Ragged => true,
        KvStorage::Paged { block_size } => block_size.is_multiple_of(16),
    }
}

/// The problem of that many key/value heads of it.
pub(super) fn with_heads(problem: &Problem, kv_heads: usize) -> Problem {
    Problem { kv_heads, query_heads: kv_heads * problem.group(), ..problem.clone() }
}

/// The problem as a kernel sees it whose tiles have several adjacent key/value heads: these are one
/// head with the rows of all.
pub(super) fn joined_heads(problem: &Problem, tile_heads: usize) -> Cow<'_, Problem> {
    match tile_heads {
        1 => Cow::Borrowed(problem),
        n => Cow::Owned(Problem { kv_heads: problem.kv_heads / n, ..problem.clone() }),
    }
}

/// Whether scores are plain, of rows whose ranges of keys move by one key per row.
pub(super) fn has_plain_scores(problem: &Problem) -> bool {
    problem.variant.has_unmodified_scores() && problem.variant.has_even_ranges()
}

/// The launch of a module's kernel that combines the partial states of tiles, each by
/// `ctas_per_tile` CTAs. The tiles' CTA ranges are at `at` in the workspace.
pub(super) fn combine(module: &'static Module, tiles: usize, ctas_per_tile: usize) -> Launch {
    Launch {
        module: module.name(),
        entry: "combine",
        grid: [tiles as u32, ctas_per_tile as u32, 1],
        threads: (32 * COMBINE_WARPS) as u32,
        shared_bytes: TILE_WORD_BYTES,
        ..Launch::default()
    }
}
