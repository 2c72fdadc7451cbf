//! Decode's units of work: tiles of rows, and units of keys.

use crate::problem::{KvStorage, Problem};

/// Bytes per tile that the decode kernel notes for the kernel that combines its partial states: the
/// first and the last CTA.
pub(super) const PARTIAL_RANGE_BYTES: usize = 8;

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

/// The problem as a kernel sees it whose tiles have several adjacent key/value heads: these are one
/// head with the rows of all.
pub(super) fn joined_heads(problem: &Problem, tile_heads: usize) -> Problem {
    Problem { kv_heads: problem.kv_heads / tile_heads, ..problem.clone() }
}
