//! Which CUDA kernel runs a problem, and how it is launched: pure functions of the problem and the GPU's facts.

use super::prefill::{self, Division};
use super::shape::{Shape, most_key_groups};
use super::{
    COUNTER_BYTES, Decode, Join, Launch, Launches, PREFILL_COUNTER_BYTES, Prefill,
    WORKSPACE_ALIGNMENT,
};
use crate::error::Refusal;
use crate::machine::{CudaFacts, Machine};
use crate::problem::{KvStorage, Problem, QueryStorage};
use crate::select::{Choice, Kernel};
use crate::split::{INVARIANT_KEYS, Split};
use crate::tensor::DType;

/// One line of the table: problems up to these head dims, in tiles of so many rows.
struct Line {
    head_dim: usize,
    value_dim: usize,
    /// Tiles of so many rows are there in the plain kind (empty: none) and in the general kind.
    plain: &'static [usize],
    plain_sm90: &'static [usize],
    general: &'static [usize],
}

/// The modules of 16-bit types, smallest head dims first. What a model has runs at its own size; what lies between is padded with zeros.
const SIXTEEN_BIT: [Line; 8] = [
    line(64, 64, &[8, 32, 64], &[8, 32, 64], &[8, 32, 64]),
    line(96, 96, &[], &[], &[8, 64]),
    line(128, 128, &[8, 32, 64], &[8, 32, 64], &[8, 32, 64]),
    line(192, 128, &[], &[], &[8, 64]),
    line(256, 256, &[8, 32], &[8, 32], &[8, 32]),
    line(512, 512, &[], &[8], &[8, 32]),
    line(576, 512, &[], &[32], &[8, 32]),
    line(576, 576, &[], &[], &[8, 32]),
];

const F32: [Line; 4] = [
    line(64, 64, &[], &[], &[8, 32]),
    line(128, 128, &[], &[], &[8, 32]),
    line(256, 256, &[], &[], &[8, 32]),
    line(576, 576, &[], &[], &[8, 32]),
];

const fn line(
    head_dim: usize,
    value_dim: usize,
    plain: &'static [usize],
    plain_sm90: &'static [usize],
    general: &'static [usize],
) -> Line {
    Line { head_dim, value_dim, plain, plain_sm90, general }
}

/// The longest cache that a kernel's 32-bit key indices can walk past the end of.
const MOST_KEYS: usize = i32::MAX as usize - (1 << 16);

/// What the decode kernel notes of a tile for the kernel that joins its parts: the first and the last block.
const CUT_BYTES: usize = 8;

/// Bytes of keys and values that a thread block could have read while it starts on a tile and ends it: 4.5 us, measured on an H200, at that GPU's
/// 33 bytes a nanosecond and multiprocessor.
const START_BYTES: usize = 144 << 10;

/// The kernels for a problem on a GPU, how they divide rows and keys, and their launches.
///
/// # Errors
/// The reason why nothing runs it there.
pub(crate) fn select(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<(Choice, Split, Launches), Refusal> {
    let refuse = |reason: String| Refusal { machine: machine.to_string(), reason };
    if facts.compute_capability < 80 {
        return Err(refuse(format!(
            "kernels are for compute capability 8.0 and later, this is {}.{}",
            facts.compute_capability / 10,
            facts.compute_capability % 10
        )));
    }
    if problem.kv_len > MOST_KEYS {
        return Err(refuse(format!(
            "{} keys; CUDA kernels take up to {MOST_KEYS}",
            problem.kv_len
        )));
    }
    let prefill_alone = || prefill::select(problem, facts, 0, COUNTER_BYTES);
    match prefill::division(problem) {
        Division::Prefill => {
            if let Some(prefill) = prefill_alone() {
                let (choice, split) =
                    (prefill_choice(problem, &prefill), prefill_split(problem, &prefill));
                let workspace_bytes = prefill_end(&prefill, COUNTER_BYTES);
                return Ok((
                    choice,
                    split,
                    Launches { prefill: Some(prefill), decode: None, workspace_bytes },
                ));
            }
        }
        Division::Mixed(most) => {
            // Most of those that are decode's have one token: its tiles are for that.
            let short = Problem { query_len: 1, ..problem.clone() };
            let decode = select_decode(&short, facts, machine)?;
            let map_at = decode.2.workspace_bytes.next_multiple_of(WORKSPACE_ALIGNMENT as usize);
            if let Some(prefill) = prefill::select(problem, facts, most, map_at) {
                return Ok(mixed(problem, prefill, decode, most));
            }
        }
        Division::Decode => {}
    }
    select_decode(problem, facts, machine)
}

/// Both kernels: prefill first, for sequences of more than `most` tokens.
fn mixed(
    problem: &Problem,
    prefill: Prefill,
    (choice, _, launches): (Choice, Split, Launches),
    most: usize,
) -> (Choice, Split, Launches) {
    let mut split = prefill_split(problem, &prefill);
    let mut first = prefill_choice(problem, &prefill);
    first.reason = format!(
        "{}; sequences of up to {most} tokens: {}, {}",
        first.reason,
        choice.kernel.name(),
        choice.reason
    );
    split.reason =
        format!("{}; those of up to {most} tokens share their keys among blocks", split.reason);
    let workspace_bytes = prefill_end(&prefill, launches.workspace_bytes);
    let decode = launches.decode.map(|decode| Decode { most_query_len: most as i32, ..decode });
    (first, split, Launches { prefill: Some(prefill), decode, workspace_bytes })
}

/// Where the workspace ends, if without prefill's tile map it ends at `before`.
fn prefill_end(prefill: &Prefill, before: usize) -> usize {
    prefill.map.map_or(before, |map| map.at.saturating_add(map.bytes))
}

fn prefill_choice(problem: &Problem, prefill: &Prefill) -> Choice {
    let kernel = &prefill.first;
    let replaced = match prefill.first == prefill.general {
        true => String::new(),
        false => {
            format!("; {} where operands lie as it cannot read them", prefill.general.launch.module)
        }
    };
    let mask = match prefill.map {
        Some(_) => "; first a map says which tiles the mask empties and which it leaves alone",
        None => "",
    };
    Choice {
        kernel: Kernel::Cuda(kernel.launch.module),
        tile_keys: kernel.tile_keys,
        block_rows: kernel.tile_rows,
        reason: format!(
            "{} tokens in tiles of {} tokens of one head{replaced}{mask}",
            problem.query_len, kernel.tile_rows
        ),
    }
}

fn prefill_split(problem: &Problem, prefill: &Prefill) -> Split {
    let kernel = &prefill.first;
    let (_, tiles) = prefill::tiles(problem, kernel);
    Split {
        keys: problem.kv_len.next_multiple_of(kernel.tile_keys).max(kernel.tile_keys),
        count: 1,
        parallel: false,
        reason: format!(
            "up to {tiles} tiles, taken by {} blocks one after the other, the longest first, in sections of {} pairs of sequence and key/value head",
            kernel.launch.grid[0], prefill.section
        ),
    }
}

/// A problem that decode takes whole.
fn select_decode(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<(Choice, Split, Launches), Refusal> {
    let refuse = |reason: String| Refusal { machine: machine.to_string(), reason };
    let lines: &[Line] = if problem.dtype == DType::F32 { &F32 } else { &SIXTEEN_BIT };
    let line = lines
        .iter()
        .find(|line| problem.head_dim <= line.head_dim && problem.value_dim <= line.value_dim)
        .expect("the last line takes the largest head dims");
    let packed = problem.query_len.saturating_mul(problem.group());
    // Tiles whose smallest block fits into shared memory: consumer GPUs have less than half of a data centre's.
    let of_rows = |rows: usize| Shape::new(problem.dtype, line.head_dim, line.value_dim, rows);
    let fitting: Vec<_> = line
        .general
        .iter()
        .copied()
        .filter(|&rows| of_rows(rows).shared_bytes(1) <= facts.shared_bytes)
        .collect();
    let Some(&largest) = fitting.last() else {
        return Err(refuse(format!(
            "head dims {} and {} in {} take {} bytes of shared memory a block, this GPU gives {}",
            problem.head_dim,
            problem.value_dim,
            problem.dtype,
            of_rows(line.general[0]).shared_bytes(1),
            facts.shared_bytes
        )));
    };
    // A row's sums depend on the length of strips: where its bits must not, only tiles with strips of one length are used.
    let strip_keys = of_rows(largest).strip_keys();
    let alike =
        |rows: &usize| !problem.batch_invariant || of_rows(*rows).strip_keys() == strip_keys;
    let rows =
        fitting.iter().copied().filter(alike).find(|&tile| packed <= tile).unwrap_or(largest);
    let shape = of_rows(rows);

    // The general kernel takes anything; the plain one is shorter.
    let name = |kind: &str, suffix: &str| {
        let wanted = format!(
            "decode_{}_{}_{}_r{rows}_{kind}{suffix}",
            problem.dtype, line.head_dim, line.value_dim
        );
        let module = super::shipped::MODULES.iter().find(|module| module.name == wanted);
        module.unwrap_or_else(|| unreachable!("{wanted} is not among the shipped modules")).name
    };
    let general = name("general", "");
    let whole = problem.head_dim == line.head_dim && problem.value_dim == line.value_dim;
    let bare = problem.variant.has_bare_scores();
    let hopper = facts.compute_capability >= 90;
    let module = match whole && bare && runs_of_16(problem) {
        true if hopper && line.plain_sm90.contains(&rows) => name("plain", "_sm90"),
        true if line.plain.contains(&rows) => name("plain", ""),
        _ => general,
    };

    let tiles = tiles(problem, rows);
    let (blocks_per_multiprocessor, key_groups) = match problem.batch_invariant {
        // The sums of a row depend on the number of groups: it has to be the same for tiles of any number of rows.
        true => (1, most_key_groups(&of_rows(largest), facts.shared_bytes)),
        false => occupancy(&shape, tiles, facts),
    };
    let shared_bytes = shape.shared_bytes(key_groups);
    let unit_keys = if problem.batch_invariant { INVARIANT_KEYS } else { shape.strip_keys() };
    let unit_bytes = unit_keys * shape.key_bytes();
    let start_units = if problem.batch_invariant { 1 } else { (START_BYTES / unit_bytes).max(1) };
    let units = problem.kv_len.div_ceil(unit_keys);
    let line_length = tiles.saturating_mul(units + start_units);
    let most_blocks = (facts.multiprocessors * blocks_per_multiprocessor)
        .min((COUNTER_BYTES - PREFILL_COUNTER_BYTES) / 4);
    let blocks = line_length.clamp(1, most_blocks);
    // A block leaves one partial of the tile it starts, and one, or in batch-invariant mode one a unit, of the tile it ends.
    let partials = match problem.batch_invariant {
        true => 1 + units.min(line_length.div_ceil(blocks)).max(1),
        false => 2,
    };
    let partials_end = COUNTER_BYTES
        .saturating_add(blocks.saturating_mul(partials).saturating_mul(shape.partial_bytes()));
    // Where every tile has several blocks, and more rows than a block has warps, the last of them would join a tile's rows while the rest of the GPU
    // is done. (In a ragged batch the tiles' numbers depend on lengths; batch-invariant parts are joined in an order of their own.)
    let joins_at_once = rows > 8
        && 2 * tiles <= blocks
        && !problem.batch_invariant
        && problem.queries == QueryStorage::Batched;
    let join = joins_at_once.then_some(Join {
        launch: Launch {
            module,
            entry: "join",
            grid: [tiles as u32, (rows / 8) as u32, 1],
            threads: 256,
            shared_bytes: 0,
        },
        at: partials_end,
    });
    let workspace_bytes =
        if joins_at_once { partials_end.saturating_add(tiles * CUT_BYTES) } else { partials_end };
    let decode = Decode {
        launch: Launch {
            module,
            entry: "decode",
            grid: [blocks as u32, 1, 1],
            threads: (shape.group_warps() * key_groups * 32) as u32,
            shared_bytes: shared_bytes as u32,
        },
        general,
        most_query_len: i32::MAX,
        partials_a_block: i32::try_from(partials)
            .map_err(|_| refuse(format!("{partials} partial states a block")))?,
        key_groups: key_groups as i32,
        tile_rows: rows as i32,
        unit_keys: unit_keys as i32,
        start_units: start_units as i32,
        whole_rows: whole,
        join,
    };
    let choice = Choice {
        kernel: Kernel::Cuda(module),
        tile_keys: shape.strip_keys(),
        block_rows: rows,
        reason: format!(
            "{packed} rows a key/value head in tiles of {rows}; {key_groups} groups of {} warps a block, each with strips of {} keys",
            shape.group_warps(),
            shape.strip_keys()
        ),
    };
    let split = Split {
        keys: unit_keys,
        count: units.max(1),
        parallel: true,
        reason: match problem.batch_invariant {
            true => format!(
                "batch-invariant: always {unit_keys} keys a split, joined in key order, shared by {blocks} blocks"
            ),
            false => format!(
                "{tiles} tiles of up to {units} strips in a line, cut into equal parts for {blocks} blocks when the lengths are known"
            ),
        },
    };
    Ok((choice, split, Launches { prefill: None, decode: Some(decode), workspace_bytes }))
}

/// Tiles of a problem, at most.
pub(super) fn tiles(problem: &Problem, rows: usize) -> usize {
    let row_tiles = problem.query_len.saturating_mul(problem.group()).div_ceil(rows);
    problem.batch.saturating_mul(problem.kv_heads).saturating_mul(row_tiles)
}

/// Whether 16 keys in a row are neighbours in memory.
fn runs_of_16(problem: &Problem) -> bool {
    match problem.keys {
        KvStorage::Batched | KvStorage::Ragged => true,
        KvStorage::Paged { block_size } => block_size.is_multiple_of(16),
    }
}

/// Blocks a multiprocessor, and groups of warps a block. One block has the most reads under way and the fewest partial states; where there are so
/// many tiles that a block has several, smaller ones start and end theirs while others read.
fn occupancy(shape: &Shape, tiles: usize, facts: &CudaFacts) -> (usize, usize) {
    let alone = most_key_groups(shape, facts.shared_bytes);
    let wanted = match tiles.checked_div(facts.multiprocessors).unwrap_or(0) {
        0 | 1 => 1,
        2..=5 => 2,
        _ => 4,
    };
    let blocks = wanted.min(alone);
    // The driver keeps 1 KiB of shared memory for each block.
    let shared = (facts.shared_bytes + 1024) / blocks;
    match most_key_groups(shape, shared.saturating_sub(1024)).min(alone / blocks) {
        0 => (1, alone),
        groups if shape.shared_bytes(groups) + 1024 <= shared => (blocks, groups),
        _ => (1, alone),
    }
}

/// The launch of an append.
///
/// # Errors
/// The reason why nothing runs it there.
#[cfg(feature = "cuda")]
pub(crate) fn append(
    parameters: &crate::params::AppendParameters,
    machine: &Machine,
) -> Result<Launch, Refusal> {
    let heads = 2 * i64::from(parameters.kv_heads) + i64::from(parameters.query_heads);
    let warps = i64::from(parameters.tokens) * heads;
    let blocks = u32::try_from(warps.unsigned_abs().div_ceil(8).max(1)).ok();
    let blocks = blocks.filter(|&blocks| blocks <= i32::MAX as u32);
    let Some(blocks) = blocks else {
        let reason = format!("{warps} heads of new tokens; an append takes up to 2^34 at once");
        return Err(Refusal { machine: machine.to_string(), reason });
    };
    Ok(Launch {
        module: "append",
        entry: "append",
        grid: [blocks, 1, 1],
        threads: 256,
        shared_bytes: 0,
    })
}
