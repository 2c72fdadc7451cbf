//! Prefix groups on a GPU: sequences that share their first keys.
//!
//! Four launches, all of fixed grids: `schedule` finds the groups and the work items over their
//! prefixes (once per step where the engine asks for it: `Gpu::schedule`); decode attends to the
//! keys that each sequence has of its own; `prefix` attends to the prefixes, the rows of all
//! members together; `merge_prefix` merges what both have left. From Hopper on a CTA of `prefix`
//! starts where those of decode have left room for it. After Hopper that is at once where a plan
//! has few groups (`leaves_room`): one kernel waits for memory while the other multiplies.

use super::registry::{self, Build, Cache, Element, PrefillConfig};
use super::work::page_aligned_16;
use super::{Launch, Launches, WORKSPACE_ALIGNMENT};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::params::PrefixGroup;
use crate::plan::Selection;
use crate::problem::Problem;
use crate::select::Choice;
use std::cmp::Reverse;

/// Shared memory of the kernel that finds the groups, for up to as many as `SHARED_TALLIES` of
/// `prefix_schedule.cuh` says.
const SCHEDULE_BYTES: u32 = (512 * TALLY_BYTES + SMALL_THREADS as usize * 16) as u32;

/// Bytes that a group takes while it is counted.
const TALLY_BYTES: usize = 20;

/// Threads of the kernels beside that over prefixes.
const SMALL_THREADS: u32 = 256;

/// Rows of a CTA that merges states: one per warp.
const MERGE_ROWS: usize = 8;

/// Maximum CTAs that merge the rows of one sequence.
const MAX_MERGE_CTAS: usize = 64;

/// Shared memory of a multiprocessor that the driver keeps for each CTA.
const RESERVED_BYTES: usize = 1 << 10;

/// Sequences per group that a plan provides for, from which on it expects them to share much.
const MANY_PER_GROUP: usize = 4;

/// Keys of a sequence, likewise.
const MANY_KEYS: usize = 2048;

/// Threads of decode per multiprocessor that leave registers for a CTA of `prefix`.
pub(super) const DECODE_THREADS: usize = 128;

/// Whether decode leaves room for `prefix` on each multiprocessor: with it, both run at the same
/// time; without, decode alone has more reads under way. On an H200 in bf16, with the kernel of
/// `mma.sync`: 64 x (8192 + 512) keys take 79 us instead of 100, and 64 x 4096 keys of which none
/// are shared 325 instead of 267. So only where a plan has few groups for its sequences. Hopper has
/// a kernel of WGMMA, which is over sooner behind a decode that has all threads.
pub(super) fn leaves_room(problem: &Problem, facts: &CudaFacts) -> bool {
    let groups = problem.prefix_groups;
    groups > 0
        && groups.saturating_mul(MANY_PER_GROUP) <= problem.batch
        && problem.kv_len >= MANY_KEYS
        && problem.head_dim.max(problem.value_dim) <= 128
        && facts.compute_capability > 90
        && !problem.batch_invariant
        && problem.dtype != DType::F32
        && problem.key_dtype == problem.dtype
        && problem.value_dtype == problem.dtype
        && problem.rotary_dim == 0
}

/// Launch of the kernels for prefix groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// Finds groups and work items.
    pub schedule: Launch,
    /// Attends to prefixes; CTAs take one work item after the other.
    pub kernel: Launch,
    /// Merges partial states.
    pub merge: Launch,
    /// The kernel for operands whose rows do not start at multiples of 16 bytes, or that TMA cannot
    /// read where `kernel` does so. The same grid and tiles.
    pub fallback: Launch,
    /// Whether `kernel` reads keys and values by TMA.
    pub tensor_maps: bool,
    /// Query rows a work item, at most.
    pub tile_rows: usize,
    /// Keys a K tile.
    pub tile_keys: usize,
    /// Maximum query tokens of a sequence of a group: prefill computes longer ones.
    pub max_query_len: i32,
    /// Offsets in the workspace.
    pub layout: PrefixLayout,
}

/// Offsets in the workspace, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixLayout {
    /// Work items and groups in use.
    pub totals: usize,
    /// Groups in use.
    pub schedule: usize,
    /// Groups while they are counted.
    pub tallies: usize,
    /// Of each sequence: its group and its first token there.
    pub places: usize,
    /// Of each token of a group: its sequence and its place there.
    pub tokens: usize,
    /// Of each sequence: the first key that decode attends to.
    pub first_keys: usize,
    /// The maxima and sums that decode leaves.
    pub own_states: usize,
    /// The outputs that decode leaves.
    pub own_out: usize,
    /// From one of these rows to the next, in elements.
    pub own_pitch: usize,
    /// Maxima and sums over prefixes.
    pub partial_states: usize,
    /// Outputs over prefixes.
    pub partial_out: usize,
    /// The end of all.
    pub end: usize,
}

impl PrefixLayout {
    /// Behind the first `start` bytes of a workspace, with room for so many partial states of
    /// `value_dim` outputs.
    fn new(problem: &Problem, start: usize, states: usize, value_dim: usize) -> PrefixLayout {
        let mut end = start.next_multiple_of(WORKSPACE_ALIGNMENT as usize);
        let mut place = |count: usize, bytes: usize| {
            let at = end;
            let size = count.saturating_mul(bytes);
            end = end.saturating_add(size.saturating_add(15) / 16 * 16);
            at
        };
        let (batch, groups, rows) = (problem.batch, problem.prefix_groups, problem.rows());
        let own_pitch = problem.value_dim.next_multiple_of(4);
        let layout = PrefixLayout {
            totals: place(2, 4),
            schedule: place(groups.min(batch / 2), size_of::<PrefixGroup>()),
            tallies: place(groups, TALLY_BYTES),
            places: place(batch, 8),
            tokens: place(rows / problem.query_heads, 8),
            first_keys: place(batch, 4),
            own_states: place(rows, 8),
            own_out: place(rows.saturating_mul(own_pitch), 4),
            own_pitch,
            partial_states: place(states, 8),
            partial_out: place(states.saturating_mul(value_dim), 4),
            end: 0,
        };
        PrefixLayout { end, ..layout }
    }
}

/// Adds the launches for prefix groups to those of a problem that has some, or the reason why they
/// change nothing.
pub(super) fn with_groups(
    selection: Selection<Launches>,
    problem: &Problem,
    facts: &CudaFacts,
) -> Selection<Launches> {
    if problem.prefix_groups == 0 {
        return selection;
    }
    let Selection { choice, split, backend: launches } = selection;
    let (reason, launches) = match select(problem, facts, &launches) {
        Ok(prefix) => {
            let reason = format!(
                "prefixes of groups by {} in {} CTAs, {} rows x {} keys per tile",
                prefix.kernel.module, prefix.kernel.grid[0], prefix.tile_rows, prefix.tile_keys
            );
            let workspace_bytes = prefix.layout.end;
            (reason, Launches { prefix: Some(prefix), workspace_bytes, ..launches })
        }
        Err(reason) => (format!("prefix groups are not used: {reason}"), launches),
    };
    let choice = Choice { reason: format!("{}; {reason}", choice.reason), ..choice };
    Selection { choice, split, backend: launches }
}

/// The launches for the prefix groups of a problem.
///
/// # Errors
/// The reason why its prefixes are attended to as all other keys.
fn select(problem: &Problem, facts: &CudaFacts, launches: &Launches) -> Result<Prefix, String> {
    if problem.batch_invariant {
        return Err("bits must not depend on groups (batch-invariant)".to_string());
    }
    if problem.variant.key_positions.is_some() {
        return Err("keys are a shard".to_string());
    }
    let Some(decode) = &launches.decode else {
        return Err("all sequences are prefill's".to_string());
    };
    if launches.hopper_decode.as_ref().is_some_and(|decode| decode.cache.is_latent()) {
        return Err("values are the first dims of keys".to_string());
    }
    if problem.key_dtype != problem.dtype || problem.value_dtype != problem.dtype {
        let (keys, values) = (problem.key_dtype, problem.value_dtype);
        return Err(format!("no kernel reads prefixes in {keys} and {values}"));
    }
    if problem.rotary_dim > 0 {
        return Err("keys are in two tensors".to_string());
    }
    let dims = format!("head dims {} and {}", problem.head_dim, problem.value_dim);
    let no_module = || format!("no kernel reads prefixes in {} of {dims} here", problem.dtype);
    let (module, config) = find(problem, facts, Build::Fallback).ok_or_else(no_module)?;
    let exact_dims = config.operands.has_dims(problem.head_dim, problem.value_dim);
    let plain = problem.variant.has_unmodified_scores()
        && problem.variant.chunk.is_none()
        && page_aligned_16(problem);
    let specialized = find(problem, facts, Build::Specialized).filter(|(_, other)| {
        plain && exact_dims && other.operands.has_dims(problem.head_dim, problem.value_dim)
    });
    let fallback = kernel_launch(module, config);
    let (module, config) = specialized.unwrap_or((module, config));
    let launch = kernel_launch(module, config);
    let shared_bytes = config.prefix_shared_bytes();
    let resident = (facts.shared_bytes + RESERVED_BYTES) / (shared_bytes + RESERVED_BYTES);
    let ctas_per_sm = match leaves_room(problem, facts) {
        true => 1,
        false => config.min_ctas_per_sm().min(resident).max(1),
    };
    let ctas = facts.multiprocessors * ctas_per_sm;
    // Items are no more than tiles and CTAs together: see `find_split_tiles`.
    let states = problem.rows().saturating_add(ctas * config.tile_rows);
    let value_dim = config.operands.value_dim;
    let small = Launch { module, grid: [1, 1, 1], threads: SMALL_THREADS, ..Launch::default() };
    let sequence_rows = problem.query_len.saturating_mul(problem.query_heads);
    let merge_ctas = sequence_rows.div_ceil(MERGE_ROWS).clamp(1, MAX_MERGE_CTAS);
    Ok(Prefix {
        schedule: Launch { entry: "schedule", shared_bytes: SCHEDULE_BYTES, ..small },
        kernel: Launch { grid: [ctas as u32, 1, 1], ..launch },
        merge: Launch {
            entry: "merge_prefix",
            grid: [u32::try_from(problem.batch).unwrap_or(u32::MAX), merge_ctas as u32, 1],
            ..small
        },
        fallback: Launch { grid: [ctas as u32, 1, 1], ..fallback },
        tensor_maps: config.prefix_family().uses_wgmma(),
        tile_rows: config.tile_rows,
        tile_keys: config.tile_keys,
        max_query_len: decode.max_query_len,
        layout: PrefixLayout::new(problem, launches.workspace_bytes, states, value_dim),
    })
}

/// The launch of a module's kernel over prefixes, without its grid.
fn kernel_launch(module: &'static str, config: &PrefillConfig) -> Launch {
    Launch {
        module,
        entry: "prefix",
        threads: config.threads() as u32,
        shared_bytes: config.prefix_shared_bytes() as u32,
        ..Launch::default()
    }
}

/// The module of a build with the smallest head dims that a problem fits into, for the newest
/// architecture that this GPU can run.
fn find(
    problem: &Problem,
    facts: &CudaFacts,
    build: Build,
) -> Option<(&'static str, &'static PrefillConfig)> {
    let suits = |config: &PrefillConfig| {
        config.operands.build == build
            && config.operands.element == Element::from_dtype(problem.dtype)
            && config.cache == Cache::Elements
            && config.operands.fits(problem.head_dim, problem.value_dim)
            && config.prefix_shared_bytes() <= facts.shared_bytes
    };
    registry::prefix_modules()
        .filter(|(module, config)| suits(config) && module.runs_on(facts.compute_capability))
        .min_by_key(|(module, config)| (config.operands.head_dim, Reverse(module.architecture)))
        .map(|(module, config)| (module.name(), config))
}

#[cfg(feature = "cuda")]
pub(super) use call::PrefixCall;

#[cfg(feature = "cuda")]
mod call {
    use super::super::launch::{describe, keeps_order, keys_per_box};
    use super::super::operands::{address, attention, load_kind};
    use super::super::tensor_map::Described;
    use super::super::{DeviceMemory, Launch};
    use super::Prefix;
    use crate::params::{AttentionParameters, LoadKind, PrefixParameters, RowStrides, RowTensor};
    use crate::problem::{Inputs, Outputs, Problem, QueryStorage};

    /// The launches for prefix groups with operands.
    pub(in super::super) struct PrefixCall {
        pub schedule: Launch,
        pub kernel: Launch,
        /// The tensor maps of keys and values, if `kernel` reads by TMA.
        pub maps: Option<[Described; 2]>,
        pub merge: Launch,
        pub attention: AttentionParameters,
        pub parameters: PrefixParameters,
    }

    impl Prefix {
        /// Describes the tensor maps of keys and values, if the kernel reads by TMA and can read
        /// these.
        fn describe(
            &self,
            problem: &Problem,
            inputs: &Inputs<DeviceMemory>,
        ) -> Option<[Described; 2]> {
            let keys = keys_per_box(problem, self.tile_keys).filter(|_| self.tensor_maps)?;
            Some([describe(&inputs.k, keys)?, describe(&inputs.v, keys)?])
        }

        /// The calls for these operands.
        pub(in super::super) fn call(
            &self,
            problem: &Problem,
            inputs: &Inputs<DeviceMemory>,
            outputs: &Outputs<DeviceMemory>,
            workspace: u64,
        ) -> PrefixCall {
            let mut attention = attention(problem, inputs, outputs, workspace);
            attention.load_kind = load_kind(problem, inputs);
            attention.max_query_len = self.max_query_len;
            let maps = self.describe(problem, inputs);
            let suits = attention.load_kind == LoadKind::PageAligned16
                && keeps_order(inputs.scale())
                && maps.is_some() == self.tensor_maps;
            let kernel = if suits { self.kernel } else { self.fallback };
            let on = |launch: Launch| Launch { module: kernel.module, ..launch };
            let [_, merge_ctas, _] = self.merge.grid;
            let at = |offset: usize| workspace + offset as u64;
            let layout = &self.layout;
            let rows = |address: usize, pitch: usize| {
                let token = (problem.query_heads * pitch) as i64;
                let batch = match problem.queries {
                    QueryStorage::Batched => problem.query_len as i64 * token,
                    QueryStorage::Ragged { .. } => 0,
                };
                let strides = RowStrides { batch, token, head: pitch as i64 };
                RowTensor { pointer: at(address), strides }
            };
            let lens = inputs.attention.prefix_lens;
            let parameters = PrefixParameters {
                groups: address(&inputs.attention.prefix_groups),
                lens: address(&lens),
                totals: at(layout.totals),
                schedule: at(layout.schedule),
                tallies: at(layout.tallies),
                places: at(layout.places),
                tokens: at(layout.tokens),
                first_keys: at(layout.first_keys),
                partial_out: at(layout.partial_out),
                partial_states: at(layout.partial_states),
                group_count: problem.prefix_groups as i32,
                workers: self.kernel.grid[0] as i32,
                tile_rows: self.tile_rows as i32,
                tile_keys: self.tile_keys as i32,
            };
            attention.own_out = rows(layout.own_out, layout.own_pitch);
            attention.own_states = rows(layout.own_states, 2);
            PrefixCall {
                schedule: on(self.schedule),
                kernel,
                maps: maps.filter(|_| suits),
                merge: on(Launch { grid: [problem.batch as u32, merge_ctas, 1], ..self.merge }),
                attention,
                parameters,
            }
        }
    }

    impl PrefixCall {
        /// Has decode attend to the keys behind each sequence's prefix, and leave states of the
        /// rows that have one.
        pub(in super::super) fn set_own_keys(&self, decode: &mut AttentionParameters) {
            decode.first_keys = self.parameters.first_keys;
            (decode.own_out, decode.own_states) =
                (self.attention.own_out, self.attention.own_states);
        }
    }
}
