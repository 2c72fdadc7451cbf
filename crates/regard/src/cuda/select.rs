//! Selection and launch of the CUDA kernel of a problem: pure functions of the problem and the
//! GPU's facts.

use super::decode::{DecodeGrid, DecodeKernel, cache_of, decode_launch};
use super::decode_wgmma;
use super::latent;
use super::prefill::{self, Division};
use super::prefix;
use super::registry::Cache;
use super::splits;
use super::widen;
use super::work::{joined_heads, packed_rows, tiles};
use super::{
    COUNTER_BYTES, Decode, HopperDecode, Launch, Launches, Prefill, SCHEDULED_BYTES, StepSchedule,
    WORKSPACE_ALIGNMENT, Widened,
};
use crate::error::Refusal;
use crate::machine::{CudaFacts, Machine};
use crate::plan::Selection;
use crate::problem::Problem;
use crate::select::{Choice, Kernel};
use crate::split::Split;

/// The longest cache that a kernel's 32-bit key indices can walk past the end of.
const MAX_KEYS: usize = i32::MAX as usize - (1 << 16);

/// Threads of the kernel that computes the schedule of a step: as in `decode_schedule.cuh`.
const SCHEDULE_THREADS: u32 = 128;

/// The kernels for a problem on a GPU, how they divide rows and keys, and their launches.
///
/// # Errors
/// The reason why this GPU cannot run it.
pub(crate) fn select(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let flat = select_flat(problem, facts, machine)?;
    Ok(prefix::with_groups(flat, problem, facts))
}

/// Checks what holds for all kernels.
///
/// # Errors
/// The reason why no kernel runs the problem on this GPU.
fn check_limits(problem: &Problem, facts: &CudaFacts) -> Result<(), String> {
    if facts.compute_capability < 80 {
        return Err(format!(
            "kernels are for compute capability 8.0 and later, this is {}.{}",
            facts.compute_capability / 10,
            facts.compute_capability % 10
        ));
    }
    let keys = problem.kv_len.max(problem.walked_keys());
    if keys > MAX_KEYS {
        return Err(format!("{keys} keys; CUDA kernels take up to {MAX_KEYS}"));
    }
    Ok(())
}

/// [`select`], if sequences share no prefixes.
fn select_flat(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    check_limits(problem, facts)
        .map_err(|reason| Refusal { machine: machine.to_string(), reason })?;
    if let Some(rows) = problem.listed_rows() {
        return select_decode_only(&rows, facts, machine);
    }
    let is_taken = |plan: &PrefillPlan| match cache_of(problem) {
        Cache::Q8_0 | Cache::Q4_0 => {
            let has_wgmma = decode_wgmma::select(problem, facts).is_some();
            prefill::outruns_decode(problem, &plan.fastest().specialized, has_wgmma, facts)
        }
        _ => true,
    };
    match prefill::division(problem, facts) {
        Division::Prefill => {
            let plan = prefill::select(problem, facts, 0, COUNTER_BYTES)
                .map(|prefill| with_copies(problem, prefill, facts, 0, COUNTER_BYTES));
            if let Some(plan) = plan.filter(is_taken) {
                return Ok(prefill_alone(problem, plan));
            }
        }
        Division::Mixed(max_tokens) => {
            // Most decode sequences have one token, so choose the decode tile for one token.
            let short = Problem { query_len: 1, ..problem.clone() };
            let decode = select_decode(&short, facts, machine)?;
            let map_at =
                decode.backend.workspace_bytes.next_multiple_of(WORKSPACE_ALIGNMENT as usize);
            let end = decode.backend.workspace_bytes;
            let plan = prefill::select(problem, facts, max_tokens, map_at)
                .map(|prefill| with_copies(problem, prefill, facts, max_tokens, end));
            if let Some(plan) = plan.filter(is_taken) {
                return Ok(mixed(problem, plan, decode, max_tokens));
            }
        }
        Division::Decode => {}
    }
    select_decode_only(problem, facts, machine)
}

/// A problem whose sequences all run in decode: with a kernel for Hopper over codes or a latent
/// cache, if there is one for it.
fn select_decode_only(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let decode = select_decode(problem, facts, machine)?;
    if let Some(wgmma) = decode_wgmma::select(problem, facts) {
        return Ok(with_wgmma(problem, decode, wgmma));
    }
    if let Some(kernel) = DecodeKernel::for_heads(problem, facts) {
        return Ok(with_heads(problem, facts, decode, &kernel));
    }
    let latent = latent::select(problem, facts);
    Ok(match latent.or_else(|| latent::select_small_pages(problem, facts)) {
        Some(latent) => with_latent(problem, decode, latent),
        None => decode,
    })
}

/// Decode with a kernel for more than 8 rows that multiplies by WGMMA, for operands that it can
/// read.
fn with_wgmma(
    problem: &Problem,
    general: Selection<Launches>,
    HopperDecode { decode: wgmma, workspace_bytes }: HopperDecode,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = general;
    let (keys, rows) = (wgmma.unit_keys as usize, wgmma.tile_rows as usize);
    let choice = Choice {
        kernel: Kernel::Cuda(wgmma.launch.module),
        tile_keys: keys,
        block_rows: rows,
        reason: format!(
            "{} rows per key/value head, tiles of {rows} rows, for which each {} once; {} \
             warpgroups per CTA, K tiles of {keys} keys; {} where rows do not start as its copies \
             assume",
            packed_rows(problem),
            if wgmma.cache == Cache::Elements { "key is read" } else { "code is converted" },
            wgmma.key_groups,
            choice.kernel.name(),
        ),
    };
    let units = problem.kv_len.div_ceil(keys).max(1);
    let split = Split {
        keys,
        count: units,
        parallel: true,
        reason: format!(
            "stream-K: {} tiles of up to {units} units over {} CTAs",
            tiles(problem, rows),
            wgmma.launch.grid[0]
        ),
    };
    let backend = instead_of_decode(problem, launches, wgmma, workspace_bytes);
    Selection { choice, split, backend }
}

/// Decode with a kernel over blocks whose tiles have several key/value heads, for operands that it
/// can read.
fn with_heads(
    problem: &Problem,
    facts: &CudaFacts,
    general: Selection<Launches>,
    kernel: &DecodeKernel,
) -> Selection<Launches> {
    let joined = joined_heads(problem, kernel.tile_heads);
    let grid = DecodeGrid::for_kernel(&joined, facts, kernel);
    let Ok((decode, end)) = decode_launch(&joined, facts, kernel, &grid) else { return general };
    let Selection { choice, backend: launches, .. } = general;
    let other = choice.kernel.name();
    let mut choice = decode_choice(problem, kernel, &grid);
    choice.reason = format!(
        "{} key/value heads per tile, whose rows share sectors; {}; {other} where rows of \
         adjacent heads do not follow one another",
        kernel.tile_heads, choice.reason
    );
    let split = decode_split(&joined, &grid);
    let backend = instead_of_decode(problem, launches, decode, end);
    Selection { choice, split, backend }
}

/// The launches with a kernel for Hopper before decode's, which runs operands that it cannot read.
fn instead_of_decode(
    problem: &Problem,
    launches: Launches,
    hopper: Decode,
    workspace_bytes: usize,
) -> Launches {
    // The fallback has no schedule: layers of a step may have operands for either. The schedule of
    // the kernel for Hopper follows the partial states of both.
    let decode = launches.decode.map(|decode| Decode { schedule: None, ..decode });
    let end = launches.workspace_bytes.max(workspace_bytes);
    let has_lists = problem.key_lists.is_some() || hopper.lists_pages;
    let schedule = (!has_lists).then(|| schedule_ctas(&hopper.launch, end));
    let ctas = hopper.launch.grid[0] as usize;
    let workspace_bytes =
        schedule.map_or(end, |schedule| schedule.at.saturating_add(ctas * SCHEDULED_BYTES));
    let hopper = Decode { schedule, ..hopper };
    Launches { hopper_decode: Some(hopper), decode, workspace_bytes, ..launches }
}

/// Decode with a kernel for latent caches, for operands that it can read.
fn with_latent(
    problem: &Problem,
    general: Selection<Launches>,
    HopperDecode { decode: latent, workspace_bytes }: HopperDecode,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = general;
    let choice = Choice {
        kernel: Kernel::Cuda(latent.launch.module),
        tile_keys: latent.unit_keys as usize,
        block_rows: latent.tile_rows as usize,
        reason: format!(
            "values are the first dims of keys, and each K tile is {} once; {} where operands are \
             not aligned to 16 bytes, or have strides that {} cannot read",
            if latent.cache == Cache::Mla656 { "converted" } else { "loaded" },
            choice.kernel.name(),
            if latent.cache == Cache::Mla656 { "copies of 16 bytes" } else { "TMA" },
        ),
    };
    let keys = latent.unit_keys as usize;
    let count = problem.kv_len.div_ceil(keys).max(1);
    let split = Split {
        keys,
        count,
        parallel: true,
        reason: format!(
            "{} tiles of up to {count} K tiles, divided equally among {} CTAs, {} \
             per part, when the lengths are known",
            tiles(problem, latent.tile_rows as usize),
            latent.launch.grid[0],
            latent.ctas_per_tile
        ),
    };
    let backend = instead_of_decode(problem, launches, latent, workspace_bytes);
    Selection { choice, split, backend }
}

/// Prefill over the cache, and over a copy of keys and values if that is faster.
struct PrefillPlan {
    prefill: Prefill,
    widened: Option<Widened>,
    workspace_bytes: usize,
}

impl PrefillPlan {
    /// With the operands that it is fastest for.
    fn fastest(&self) -> &Prefill {
        self.prefill.fastest(&self.widened)
    }
}

/// Adds prefill over a copy. `before`: the end of the workspace without tile maps and copies.
fn with_copies(
    problem: &Problem,
    prefill: Prefill,
    facts: &CudaFacts,
    max_decode_len: usize,
    before: usize,
) -> PrefillPlan {
    // Partial states of prefill over the cache have the place of copies: one of the two runs.
    let start = prefill.maps_end().unwrap_or(before);
    let widened = widen::select(problem, &prefill, facts, max_decode_len, start);
    let copies_end = |widened: &Widened| {
        let ends = widened.prefills().map(|prefill| prefill.end().unwrap_or(0));
        ends.fold(widened.end, usize::max)
    };
    let end = prefill.end().unwrap_or(before);
    let workspace_bytes = widened.iter().map(copies_end).fold(end, usize::max);
    PrefillPlan { prefill, widened, workspace_bytes }
}

/// A problem whose sequences all run in prefill.
fn prefill_alone(problem: &Problem, plan: PrefillPlan) -> Selection<Launches> {
    let (choice, split) = (prefill_choice(problem, &plan), prefill_split(problem, plan.fastest()));
    let PrefillPlan { prefill, widened, workspace_bytes } = plan;
    let prefill = Some(prefill);
    let backend = Launches { prefill, widened, workspace_bytes, ..Launches::default() };
    Selection { choice, split, backend }
}

/// Both kernels: prefill first, for sequences of more than `max_tokens` tokens.
fn mixed(
    problem: &Problem,
    plan: PrefillPlan,
    decode: Selection<Launches>,
    max_tokens: usize,
) -> Selection<Launches> {
    let Selection { choice, backend: launches, .. } = decode;
    let mut split = prefill_split(problem, plan.fastest());
    let mut both = prefill_choice(problem, &plan);
    both.reason = format!(
        "{}; sequences of up to {max_tokens} tokens: {}, {}",
        both.reason,
        choice.kernel.name(),
        choice.reason
    );
    split.reason =
        format!("{}; those of up to {max_tokens} tokens split their keys among CTAs", split.reason);
    let decode =
        launches.decode.map(|decode| Decode { max_query_len: max_tokens as i32, ..decode });
    let PrefillPlan { prefill, widened, workspace_bytes } = plan;
    let prefill = Some(prefill);
    let backend = Launches { prefill, widened, decode, workspace_bytes, ..launches };
    Selection { choice: both, split, backend }
}

fn prefill_choice(problem: &Problem, plan: &PrefillPlan) -> Choice {
    let prefill = plan.fastest();
    let kernel = &prefill.specialized;
    let mut others = String::new();
    if prefill.specialized != prefill.fallback {
        others += &format!(
            "; fallback {} if TMA cannot address the operands",
            prefill.fallback.launch.module
        );
    }
    if prefill.map.is_some() {
        others += "; a tile map of the mask is built first";
    }
    if plan.widened.is_some() {
        others += &format!(
            "; keys and values are copied to {} first, but where {} has to convert them",
            problem.dtype, plan.prefill.specialized.launch.module
        );
    }
    Choice {
        kernel: Kernel::Cuda(kernel.launch.module),
        tile_keys: kernel.tile_keys,
        block_rows: kernel.tile_rows,
        reason: format!(
            "{} tokens in tiles of {} tokens of one head{others}",
            problem.query_len, kernel.tile_rows
        ),
    }
}

fn prefill_split(problem: &Problem, prefill: &Prefill) -> Split {
    let kernel = &prefill.specialized;
    let tiles = prefill::tiles(problem, kernel).total;
    let count = 1 << splits::shift(problem, kernel);
    let splits = match count {
        1 => String::new(),
        _ => format!(", {count} splits of the keys of each, whose states are combined"),
    };
    Split {
        keys: problem
            .kv_len
            .div_ceil(count)
            .next_multiple_of(kernel.tile_keys)
            .max(kernel.tile_keys),
        count,
        parallel: count > 1,
        reason: format!(
            "up to {tiles} tiles, persistent over {} CTAs, longest first, in L2 groups of {} \
             (sequence, key/value head) pairs{splits}",
            kernel.launch.grid[0], prefill.l2_group
        ),
    }
}

/// The same with the kernels for caches of any kind.
fn select_decode(
    problem: &Problem,
    facts: &CudaFacts,
    machine: &Machine,
) -> Result<Selection<Launches>, Refusal> {
    let refuse = |reason: String| Refusal { machine: machine.to_string(), reason };
    let kernel = DecodeKernel::find(problem, facts).map_err(refuse)?;
    let grid = DecodeGrid::for_kernel(problem, facts, &kernel);
    let (decode, end) = decode_launch(problem, facts, &kernel, &grid).map_err(refuse)?;
    // Rows with lists of keys have none: every layer has its own lists.
    let schedule = problem.key_lists.is_none().then(|| schedule_ctas(&decode.launch, end));
    let workspace_bytes =
        schedule.map_or(end, |schedule| schedule.at.saturating_add(grid.ctas * SCHEDULED_BYTES));
    let decode = Some(Decode { schedule, ..decode });
    let (choice, split) = (decode_choice(problem, &kernel, &grid), decode_split(problem, &grid));
    let backend = Launches { decode, workspace_bytes, ..Launches::default() };
    Ok(Selection { choice, split, backend })
}

/// The launch that computes the schedule of a step for a launch of decode. It is behind the first
/// `start` bytes of the workspace.
fn schedule_ctas(decode: &Launch, start: usize) -> StepSchedule {
    let launch =
        Launch { entry: "schedule_ctas", threads: SCHEDULE_THREADS, shared_bytes: 0, ..*decode };
    StepSchedule { launch, at: start.saturating_add(15) / 16 * 16 }
}

fn decode_choice(problem: &Problem, kernel: &DecodeKernel, grid: &DecodeGrid) -> Choice {
    let DecodeKernel { shape, tile_rows, .. } = kernel;
    Choice {
        kernel: Kernel::Cuda(kernel.module.name()),
        tile_keys: shape.strip_keys(),
        block_rows: *tile_rows,
        reason: format!(
            "{} rows per key/value head, tiles of {tile_rows} rows; {} warp groups of {} warps per \
             CTA, K tiles of {} keys",
            packed_rows(problem),
            grid.key_groups,
            shape.group_warps(),
            shape.strip_keys()
        ),
    }
}

fn decode_split(problem: &Problem, grid: &DecodeGrid) -> Split {
    let DecodeGrid { tiles, ctas, unit_keys, units, .. } = grid;
    Split {
        keys: *unit_keys,
        count: (*units).max(1),
        parallel: true,
        reason: match problem.batch_invariant {
            true => format!(
                "batch-invariant: always {unit_keys} keys per split, merged in key order, {ctas} \
                 CTAs"
            ),
            false => format!("stream-K: {tiles} tiles of up to {units} units over {ctas} CTAs"),
        },
    }
}

/// The launch of an append.
///
/// # Errors
/// The reason why this machine cannot run it.
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
        module: super::registry::Family::Append.name(),
        entry: "append",
        grid: [blocks, 1, 1],
        threads: 256,
        ..Launch::default()
    })
}
