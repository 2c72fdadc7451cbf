//! Splits of the keys of prefill's tiles: where tiles are few, several CTAs share the keys of one,
//! and leave partial states that a second kernel combines.

use super::registry::Family;
use super::{Launch, PartialSpace, Prefill, PrefillKernel, WORKSPACE_ALIGNMENT};
#[cfg(feature = "cuda")]
use crate::params::{ElementType, KeySplits, RowStrides, RowTensor};
use crate::problem::{Problem, QueryStorage};

/// Splits of a tile, at most: a lane each of the kernel that combines (`combine_splits.cu`).
const MAX_SPLITS: usize = 32;

/// K tiles of a split, at least: about what combining takes.
const MIN_KEY_TILES: usize = 4;

/// Threads of a CTA that combines, a warp per row at a time.
const COMBINE_THREADS: usize = 256;

/// CTAs per multiprocessor that combine, at most.
#[cfg(feature = "cuda")]
const COMBINE_CTAS: usize = 2;

/// Bytes of a row's maximum and sum.
const STATE_BYTES: usize = 8;

/// Tiles of a problem, at most.
fn max_tiles(problem: &Problem, kernel: &PrefillKernel) -> usize {
    let of_head = match problem.queries {
        QueryStorage::Batched => {
            problem.query_len.div_ceil(kernel.tile_rows).saturating_mul(problem.batch)
        }
        // Every sequence may end within a tile.
        QueryStorage::Ragged { total } => {
            let ends = problem.batch.saturating_mul(kernel.tile_rows - 1);
            (total.saturating_add(ends) / kernel.tile_rows).min(total)
        }
    };
    of_head.saturating_mul(problem.query_heads)
}

/// K tiles that a tile sees, at most.
fn key_tiles(problem: &Problem, kernel: &PrefillKernel) -> usize {
    let Problem { kv_len, ref variant, .. } = *problem;
    let right = if variant.causal { Some(0) } else { variant.window.right };
    let window = variant.window.left.zip(right).map(|(left, right)| left.saturating_add(right));
    let seen = [window, variant.chunk].into_iter().flatten().min();
    let seen = seen.map_or(kv_len, |seen| kv_len.min(seen.saturating_add(kernel.tile_rows)));
    seen.div_ceil(kernel.tile_keys)
}

/// log2 of the splits of each tile's keys: as many as there are CTAs for, of enough K tiles.
pub(super) fn shift(problem: &Problem, kernel: &PrefillKernel) -> u32 {
    if !kernel.splits_keys {
        return 0;
    }
    let ctas = kernel.launch.grid[0] as usize;
    let by_ctas = ctas / max_tiles(problem, kernel).max(1);
    let by_keys = key_tiles(problem, kernel) / MIN_KEY_TILES;
    by_ctas.min(by_keys).clamp(1, MAX_SPLITS).ilog2()
}

/// Room for the partial states of the kernels of a plan, behind the first `start` bytes of the
/// workspace; `None` if none splits keys of the problem, or of a smaller one.
pub(super) fn space(problem: &Problem, prefill: &Prefill, start: usize) -> Option<PartialSpace> {
    let few_keys = |kernel: &PrefillKernel| key_tiles(problem, kernel) < 2 * MIN_KEY_TILES;
    // Splits times tiles are no more than CTAs.
    let bytes = |kernel: PrefillKernel| {
        let rows = kernel.launch.grid[0] as usize * kernel.tile_rows;
        rows.checked_mul(4 * kernel.value_dim + STATE_BYTES)
    };
    let kernels = prefill.kernels().filter(|kernel| kernel.splits_keys && !few_keys(kernel));
    let bytes = kernels.filter_map(bytes).max()?;
    let at = start.checked_next_multiple_of(WORKSPACE_ALIGNMENT as usize)?;
    at.checked_add(bytes)?;
    let module = Family::CombineSplits.name();
    let combine = Launch {
        module,
        entry: module,
        grid: [1; 3],
        threads: COMBINE_THREADS as u32,
        ..Launch::default()
    };
    Some(PartialSpace { at, bytes, combine })
}

/// The splits of a call, whose workspace is at `workspace`; and the launch that combines them.
#[cfg(feature = "cuda")]
pub(super) fn of_call(
    problem: &Problem,
    prefill: &Prefill,
    kernel: &PrefillKernel,
    workspace: u64,
) -> (KeySplits, Option<Launch>) {
    let none = KeySplits { count: 1, ..KeySplits::default() };
    let shift = shift(problem, kernel);
    let Some(space) = prefill.partials.filter(|_| shift > 0) else { return (none, None) };
    let (rows, heads) = (problem.rows(), problem.query_heads);
    let of_sequence = match problem.queries {
        QueryStorage::Batched => problem.query_len * heads,
        // Tokens are counted from the first of all sequences.
        QueryStorage::Ragged { .. } => 0,
    };
    let count = 1 << shift;
    let out_bytes = count * rows * kernel.value_dim * 4;
    if out_bytes + count * rows * STATE_BYTES > space.bytes {
        return (none, None);
    }
    let rows_of = |pointer: u64, row: usize| RowTensor {
        pointer,
        strides: RowStrides {
            batch: (of_sequence * row) as i64,
            token: (heads * row) as i64,
            head: row as i64,
        },
    };
    let out = workspace + space.at as u64;
    let splits = KeySplits {
        out: rows_of(out, kernel.value_dim),
        states: rows_of(out + out_bytes as u64, STATE_BYTES / 4),
        out_stride: (rows * kernel.value_dim) as i64,
        state_stride: (rows * STATE_BYTES / 4) as i64,
        count: count as i32,
        shift: shift as i32,
        out_type: ElementType::from_dtype(problem.out_dtype),
        unused: 0,
    };
    let tiles = max_tiles(problem, kernel);
    let slices = COMBINE_CTAS * kernel.launch.grid[0] as usize / tiles.max(1);
    let most = kernel.tile_rows.div_ceil(COMBINE_THREADS / 32);
    let grid = [tiles as u32, slices.clamp(1, most) as u32, 1];
    (splits, Some(Launch { grid, ..space.combine }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{facts, prefill};
    use crate::dtype::DType;

    fn splits(query_len: usize, kv_len: usize, queries: QueryStorage) -> u32 {
        let problem = Problem {
            query_heads: 32,
            kv_heads: 8,
            query_len,
            kv_len,
            queries,
            ..Problem::new(DType::BF16, 128)
        };
        let plan = prefill::select(&problem, &facts("h200"), 0, 0).unwrap();
        1 << shift(&problem, &plan.specialized)
    }

    #[test]
    fn few_tiles_over_many_keys_are_split() {
        let batched = |query_len, kv_len| splits(query_len, kv_len, QueryStorage::Batched);
        // 32 tiles, for 132 multiprocessors; then 64, and 128.
        assert_eq!([32, 128, 129, 512].map(|tokens| batched(tokens, 32768)), [4, 4, 2, 1]);
        assert_eq!([512, 1024, 2048].map(|keys| batched(128, keys)), [1, 2, 4]);
        // One sequence has all tokens; of two, each may end within a tile.
        let ragged = |total| splits(128, 32768, QueryStorage::Ragged { total });
        assert_eq!([64, 128, 256].map(ragged), [4, 4, 2]);
    }

    #[test]
    fn room_does_not_depend_on_the_length() {
        let space = |query_len, kv_len| {
            let problem = Problem {
                query_heads: 32,
                kv_heads: 8,
                query_len,
                kv_len,
                ..Problem::new(DType::BF16, 128)
            };
            let plan = prefill::select(&problem, &facts("h200"), 0, 4096).unwrap();
            plan.partials.map(|space| (space.at, space.bytes))
        };
        let all = Some((4096, 132 * 128 * (128 * 4 + 8)));
        assert_eq!([space(128, 32768), space(8192, 8192)], [all, all]);
        assert_eq!(space(128, 512), None, "keys are not split");
    }
}
