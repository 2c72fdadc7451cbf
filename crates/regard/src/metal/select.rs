//! Selects the Metal kernel of a problem and its launch: tables and pure functions.
//! `docs/perf/metal.md` has the reasons of the tables, which are on paper until a Mac measures
//! them.

use super::mask_map;
use super::{MIN_FAMILY, SIMD_WIDTH};
use crate::dtype::DType;
use crate::error::Refusal;
use crate::machine::{Machine, MetalFacts};
use crate::plan::Selection;
use crate::problem::Problem;
use crate::select::{Choice, Kernel};
use crate::split::{Split, Work, split};
use crate::tile_map::MapPlace;

/// The launch of a plan's kernels, as far as it does not depend on operands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The attention kernel's name in the [source](super::source).
    pub function: &'static str,
    /// The kernel that combines partial states, if keys are split among threadgroups.
    pub combine: Option<&'static str>,
    /// SIMD groups of an attention threadgroup.
    pub simd_groups: usize,
    /// Threadgroup memory of an attention threadgroup, in bytes.
    pub threadgroup_bytes: usize,
    /// Threadgroups of the attention kernel, at most: row blocks times splits, key/value heads,
    /// sequences.
    pub grid: [u32; 3],
    /// Room for the tile map of a mask, if there is one and the kernel reads its map.
    pub map: Option<MapPlace>,
    /// Bytes of workspace: partial states, and the tile map.
    pub workspace_bytes: usize,
}

/// A row of the decode table: for head dims (the larger of Dk and Dv) up to `dims`, and up to
/// `rows` query rows per key/value head.
struct Decode {
    dims: usize,
    rows: usize,
    /// In f32, f16 and bf16.
    functions: [&'static str; 3],
}

/// More query rows would not fit in 128 registers beside the keys in flight:
/// `scripts/metal-compile/registers.txt`.
const DECODE: [Decode; 4] = [
    Decode {
        dims: 64,
        rows: 8,
        functions: ["decode_float_2x1", "decode_half_2x1", "decode_bfloat_2x1"],
    },
    Decode {
        dims: 128,
        rows: 8,
        functions: ["decode_float_4x1", "decode_half_4x1", "decode_bfloat_4x1"],
    },
    Decode {
        dims: 256,
        rows: 4,
        functions: ["decode_float_4x2", "decode_half_4x2", "decode_bfloat_4x2"],
    },
    Decode {
        dims: 576,
        rows: 1,
        functions: ["decode_float_4x5", "decode_half_4x5", "decode_bfloat_4x5"],
    },
];

/// A row of the prefill table: for head dims up to `dims`, `parts` SIMD groups share 8 query rows.
struct Prefill {
    dims: usize,
    parts: usize,
    /// Keys per K tile, for elements of 4 bytes and of 2. With its padding a tile takes 9 to 19
    /// KiB.
    tile_keys: [usize; 2],
    /// SIMD groups of a threadgroup, by row of [`FAMILIES`].
    simd_groups: [usize; 2],
    functions: [&'static str; 3],
    /// For queries in f16 and bf16, with products of f32.
    wide_functions: [&'static str; 2],
}

const PREFILL: [Prefill; 4] = [
    Prefill {
        dims: 64,
        parts: 1,
        tile_keys: [32, 32],
        simd_groups: [4, 8],
        functions: ["prefill_float_8x1", "prefill_half_8x1", "prefill_bfloat_8x1"],
        wide_functions: ["prefill_half_float_8x1", "prefill_bfloat_float_8x1"],
    },
    Prefill {
        dims: 128,
        parts: 1,
        tile_keys: [32, 32],
        simd_groups: [4, 8],
        functions: ["prefill_float_16x1", "prefill_half_16x1", "prefill_bfloat_16x1"],
        wide_functions: ["prefill_half_float_16x1", "prefill_bfloat_float_16x1"],
    },
    Prefill {
        dims: 256,
        parts: 2,
        tile_keys: [16, 32],
        simd_groups: [8, 8],
        functions: ["prefill_float_16x2", "prefill_half_16x2", "prefill_bfloat_16x2"],
        wide_functions: ["prefill_half_float_16x2", "prefill_bfloat_float_16x2"],
    },
    Prefill {
        dims: 576,
        parts: 4,
        tile_keys: [8, 16],
        simd_groups: [8, 8],
        functions: ["prefill_float_18x4", "prefill_half_18x4", "prefill_bfloat_18x4"],
        wide_functions: ["prefill_half_float_18x4", "prefill_bfloat_float_18x4"],
    },
];

const COMBINE: [&str; 3] = ["combine_float", "combine_half", "combine_bfloat"];

/// The functions of the [source](super::source) that compute attention; each is run by some plan.
pub fn functions() -> impl Iterator<Item = &'static str> {
    let decode = DECODE.iter().flat_map(|entry| entry.functions);
    let prefill = PREFILL.iter().flat_map(|entry| entry.functions);
    let wide = PREFILL.iter().flat_map(|entry| entry.wide_functions);
    decode.chain(prefill).chain(wide).chain(COMBINE)
}

/// The first GPU family of each column of tuning. From family 9 on, registers and threadgroup
/// memory are allocated from one cache by need, so larger threadgroups cost less occupancy.
const FAMILIES: [u32; 2] = [7, 9];

/// Maximum threadgroup memory of a decode threadgroup of 8 SIMD groups: half of the 32 KiB, so that
/// two threadgroups fit a core.
const DECODE_BYTES: usize = 16 << 10;

/// Maximum keys of a sequence: kernels count them in `i32`, up to a tile or step past the last.
const MAX_KEYS: usize = i32::MAX as usize - 4096;

/// A kernel of a family and its tile, before keys are split.
struct Chosen {
    function: &'static str,
    simd_groups: usize,
    threadgroup_bytes: usize,
    block_rows: usize,
    tile_keys: usize,
    reason: String,
}

/// f32, f16, bf16 as the tables order them.
fn type_index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        _ => 2,
    }
}

/// Selects a kernel, a split of the keys and a launch.
///
/// # Errors
/// The reason why no kernel runs it there.
pub(crate) fn select(
    problem: &Problem,
    facts: &MetalFacts,
    machine: &Machine,
) -> Result<Selection<Launch>, Refusal> {
    select_kernels(problem, facts)
        .map_err(|reason| Refusal { machine: machine.to_string(), reason })
}

/// [`select`], with the reason alone as the error.
fn select_kernels(problem: &Problem, facts: &MetalFacts) -> Result<Selection<Launch>, String> {
    check_limits(problem, facts)?;
    let listed = problem.listed_rows();
    let problem = listed.as_ref().unwrap_or(problem);
    let rows = row_count(problem);
    let (chosen, is_prefill) = match decode(problem, rows) {
        Some(chosen) => (chosen, false),
        None => (prefill(problem, facts), true),
    };
    if chosen.threadgroup_bytes > facts.threadgroup_bytes {
        return Err(format!(
            "{} needs {} bytes of threadgroup memory, the GPU has {}",
            chosen.function, chosen.threadgroup_bytes, facts.threadgroup_bytes
        ));
    }
    let blocks = rows.div_ceil(chosen.block_rows);
    let mut split = split(&Work {
        items: problem.batch.saturating_mul(problem.kv_heads).saturating_mul(blocks),
        rows,
        block_rows: chosen.block_rows,
        kv_len: problem.kv_len,
        tile_keys: chosen.tile_keys,
        workers: facts.cores,
        splits_per_worker: crate::split::ITEMS_PER_WORKER,
        batch_invariant: problem.batch_invariant,
    });
    // Decode does not walk splits, and a row's bits may not depend on how many lists there are.
    split.parallel |= problem.batch_invariant && problem.key_lists.is_some();
    let splits = if split.parallel { split.count } else { 1 };
    let state_bytes = state_bytes(problem, &split);
    let tile = [chosen.block_rows, chosen.tile_keys];
    let map = mask_map::place(problem, tile, state_bytes).filter(|_| is_prefill);
    let backend = Launch {
        function: chosen.function,
        combine: split.parallel.then(|| COMBINE[type_index(problem.dtype)]),
        simd_groups: chosen.simd_groups,
        threadgroup_bytes: chosen.threadgroup_bytes,
        grid: grid(problem, blocks, splits)?,
        map,
        workspace_bytes: map.map_or(state_bytes, |map| map.at.saturating_add(map.bytes)),
    };
    let choice = Choice {
        kernel: Kernel::Metal(chosen.function),
        tile_keys: chosen.tile_keys,
        block_rows: chosen.block_rows,
        reason: chosen.reason,
    };
    Ok(Selection { choice, split, backend })
}

/// Query rows per key/value head of a sequence: tokens times grouped heads.
fn row_count(problem: &Problem) -> usize {
    problem.query_len.saturating_mul(problem.group())
}

/// Checks what holds for all kernels.
///
/// # Errors
/// The reason why no kernel runs the problem on this GPU.
fn check_limits(problem: &Problem, facts: &MetalFacts) -> Result<(), String> {
    if facts.family < MIN_FAMILY {
        return Err(format!(
            "the kernels need GPU family {MIN_FAMILY} (M1, A14) or later for SIMD-group matrices"
        ));
    }
    if row_count(problem) > i32::MAX as usize {
        return Err(format!(
            "{} tokens times {} grouped heads are more rows than a kernel counts (2^31 - 1)",
            problem.query_len,
            problem.group()
        ));
    }
    let keys = problem.kv_len.max(problem.walked_keys());
    if keys > MAX_KEYS {
        return Err(format!(
            "{keys} keys of a sequence are more than a kernel counts ({MAX_KEYS})"
        ));
    }
    Ok(())
}

/// Threadgroups of the attention kernel.
///
/// # Errors
/// If they are more than a grid has.
fn grid(problem: &Problem, blocks: usize, splits: usize) -> Result<[u32; 3], String> {
    let (Ok(x), Ok(y), Ok(z)) = (
        u32::try_from(blocks.saturating_mul(splits)),
        u32::try_from(problem.kv_heads),
        u32::try_from(problem.batch),
    ) else {
        return Err(format!(
            "{blocks} blocks of rows in {splits} splits exceed a grid of 2^32 - 1"
        ));
    };
    Ok([x, y, z])
}

/// Bytes of the partial states, if keys are split among threadgroups.
fn state_bytes(problem: &Problem, split: &Split) -> usize {
    if !split.parallel {
        return 0;
    }
    let rows = problem.batch.saturating_mul(problem.kv_heads).saturating_mul(row_count(problem));
    rows.saturating_mul(split.count).saturating_mul((problem.value_dim + 2) * 4)
}

/// The decode kernel, if all rows of a key/value head fit in one row block: it reads every key
/// once. Not in batch-invariant mode, where one family runs everything, so that one row has the
/// bits that it would have among many.
fn decode(problem: &Problem, rows: usize) -> Option<Chosen> {
    let dims = problem.head_dim.max(problem.value_dim);
    let entry = DECODE
        .iter()
        .find(|entry| dims <= entry.dims)
        .expect("the last entry takes the largest head dim");
    // Lists of keys are decode's alone: the query heads of one token, in several blocks if need be.
    let has_lists = problem.key_lists.is_some();
    if !has_lists && (rows > entry.rows || problem.batch_invariant) {
        return None;
    }
    let block_rows = rows.next_power_of_two().min(entry.rows);
    let bytes = |simd_groups: usize| simd_groups * block_rows * (problem.value_dim + 3) * 4;
    let simd_groups = if bytes(8) <= DECODE_BYTES { 8 } else { 4 };
    Some(Chosen {
        function: entry.functions[type_index(problem.dtype)],
        simd_groups,
        threadgroup_bytes: bytes(simd_groups),
        block_rows,
        tile_keys: simd_groups * SIMD_WIDTH / block_rows,
        reason: format!(
            "{rows} rows per key/value head in blocks of {block_rows}, at most {} for dims to {}; \
             {simd_groups} SIMD groups share the keys",
            entry.rows, entry.dims
        ),
    })
}

/// The type of prefill's products, which holds keys and values exactly: that of the queries if they
/// have it too or are codes, else f32.
fn product_dtype(problem: &Problem) -> DType {
    let is_exact = |dtype: DType| dtype == problem.dtype || dtype.is_code();
    match is_exact(problem.key_dtype) && is_exact(problem.value_dtype) {
        true => problem.dtype,
        false => DType::F32,
    }
}

fn prefill(problem: &Problem, facts: &MetalFacts) -> Chosen {
    let dims = problem.head_dim.max(problem.value_dim);
    let entry = PREFILL
        .iter()
        .find(|entry| dims <= entry.dims)
        .expect("the last entry takes the largest head dim");
    let product_dtype = product_dtype(problem);
    let element = product_dtype.size();
    let index = type_index(problem.dtype);
    let function = match product_dtype == problem.dtype {
        true => entry.functions[index],
        false => entry.wide_functions[index - 1],
    };
    let tile_keys = entry.tile_keys[usize::from(element < 4)];
    let family = FAMILIES.iter().rposition(|&first| facts.family >= first).unwrap_or(0);
    let simd_groups = entry.simd_groups[family];
    let padded = dims.next_multiple_of(8 * entry.parts);
    let tile = tile_keys * (padded * element + 16);
    let exchange = if entry.parts > 1 { simd_groups * 8 * tile_keys * 4 } else { 0 };
    let has_scales = problem.key_dtype.is_code() || problem.value_dtype.is_code();
    let scales = if has_scales { 2 * tile_keys * size_of::<f32>() } else { 0 };
    let block_rows = 8 * simd_groups / entry.parts;
    Chosen {
        function,
        simd_groups,
        threadgroup_bytes: tile + exchange + scales,
        block_rows,
        tile_keys,
        reason: format!(
            "dims to {}: {simd_groups} SIMD groups, {} to 8 rows; \
             a tile of {tile_keys} keys takes {tile} bytes of threadgroup memory",
            entry.dims, entry.parts
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::MAX_HEAD_DIM;

    fn plain(dtype: DType, dims: usize, query_len: usize, batch_invariant: bool) -> Problem {
        Problem {
            query_heads: 2,
            query_len,
            kv_len: 5000,
            batch_invariant,
            ..Problem::new(dtype, dims)
        }
    }

    #[test]
    fn every_entry_fits_in_threadgroup_memory_and_takes_its_dims() {
        for family in [7, 8, 9, 10] {
            let facts = MetalFacts { family, cores: 10, threadgroup_bytes: 32 << 10 };
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for dims in 1..=MAX_HEAD_DIM {
                    for query_len in [1, 2, 3, 4, 8, 9, 4000] {
                        for batch_invariant in [false, true] {
                            let problem = plain(dtype, dims, query_len, batch_invariant);
                            let machine = Machine {
                                name: "test".into(),
                                device: crate::machine::Device::Metal(facts.clone()),
                            };
                            let Selection { choice, backend: launch, .. } =
                                select(&problem, &facts, &machine).expect("all fit");
                            assert!(launch.threadgroup_bytes <= 32 << 10);
                            assert!(launch.simd_groups * SIMD_WIDTH <= 1024);
                            // Splits of batch-invariant mode begin with a tile.
                            assert!(!batch_invariant || 1024 % choice.tile_keys == 0);
                        }
                    }
                }
            }
        }
    }
}
