//! The launches of a plan with operands: which module runs, its grid and its parameters.

use super::heads::HeadCall;
use super::lists::{kv_tensor, list_parameters, pages_as_lists};
use super::mask_map;
use super::operands::{
    aligned_load_kind, attention, cache_parameters, has_head_scales, head_scales, load_kind,
    reads_16_bytes, reads_block_rows, reads_joined_rows, writes_16_bytes, writes_four,
};
use super::registry::{Cache, Storage};
use super::schedule::Schedule;
use super::splits;
use super::tensor_map::{Described, QUERY_BOX, key_box};
use super::widen::{Copies, WidenCall};
use super::{
    Decode, DeviceMemory, Launch, Launches, Prefill, PrefillKernel, Widened, prefill, work,
};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernel_parameters::{count, window};
use crate::params::{
    AttentionParameters, CacheParameters, KvTensor, ListParameters, LoadKind, PrefillParameters,
    StreamK, TileMap as MapParameters,
};
use crate::plan::Plan;
use crate::positions::{KeyOffset, KeyPositions, SequenceKeys};
use crate::problem::{Inputs, KvStorage, Outputs, Problem, QueryStorage};
use crate::tensor::Tensor;
use crate::tile_map::TileMap;
use crate::variant::{QueryOffset, Values, Variant};

/// Facts that a decode launch may rely on beside its operands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DecodeContext {
    /// Decode attends to the keys behind each sequence's prefix: how many these are is known on
    /// the device only.
    pub has_groups: bool,
    /// The workspace has the schedule of the step.
    pub scheduled: bool,
}

/// A decode launch with operands: the module that can read them, its grid, and the kernel's
/// parameters.
pub(super) struct DecodeCall {
    /// The launch that combines the partial states of tiles, with the same parameters.
    pub combine: Option<Launch>,
    pub module: &'static str,
    pub ctas: u32,
    pub parameters: AttentionParameters,
    /// Further parameters of modules for caches that are not stored in the type of queries.
    pub cache: CacheParameters,
    /// The dims of keys behind the value dims, if they are in a tensor of their own or the module
    /// reads them apart: a further parameter of modules for caches in any format, and of those for
    /// latent caches where rows have lists of keys.
    pub rest: KvTensor,
    /// Lists of keys, if rows have them.
    pub lists: Option<ListParameters>,
}

/// A prefill launch with operands.
pub(super) struct PrefillCall<'a> {
    /// The copies of keys and values that the kernel reads, if it does not read the cache.
    pub widen: Option<WidenCall>,
    /// The plan of the kernel.
    pub plan: &'a Prefill,
    pub kernel: &'a PrefillKernel,
    /// The types of the keys and values that the kernel reads.
    pub stored: [DType; 2],
    pub ctas: u32,
    /// The launch that combines partial states, with the same parameters, if keys are split.
    pub combine: Option<Launch>,
    pub attention: AttentionParameters,
    pub parameters: PrefillParameters,
    /// Further parameters of modules for caches that are not stored in the type of queries.
    pub cache: CacheParameters,
    /// The tensor maps of a kernel that reads by TMA.
    pub maps: Option<Maps>,
    /// The tile map of a mask that the kernel reads.
    pub tile_map: Option<TileMap>,
}

/// The tensor maps of a latent cache, before the driver encodes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LatentMaps {
    /// Keys, of which the kernel reads the dims that are values.
    pub keys: Described,
    /// Their other dims, which may be in a tensor of their own.
    pub rest: Described,
}

/// The tensor maps of a call, before the driver encodes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Maps {
    pub query: Described,
    /// `None` where the kernel reads keys and values otherwise.
    pub key: Option<Described>,
    /// Likewise.
    pub value: Option<Described>,
    /// Whether keys and values are described as bytes, whatever their type.
    pub as_bytes: bool,
    /// `None` for outputs in f32, which are not written by TMA.
    pub out: Option<Described>,
}

/// The launches that a run of the plan on these operands queues, in order. Which module runs
/// depends on the operands' strides and alignment; their contents are not read, and no GPU is
/// needed.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, or the plan is not for an NVIDIA GPU.
pub fn launches(
    plan: &Plan,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Result<Vec<Launch>, Error> {
    let (problem, launches) = covered(plan, inputs, outputs)?;
    let mut queued = Vec::new();
    if problem.rows() == 0 {
        return Ok(queued);
    }
    for call in choose_prefill(&problem, launches, inputs, outputs, 0) {
        queued.extend(call.widen.iter().flat_map(WidenCall::launches));
        let map = call.tile_map.zip(call.plan.map);
        queued.extend(map.map(|(map, space)| mask_map::map_launch(&map, &space.launch)));
        queued.push(call.kernel.launch.with_ctas(call.ctas));
        queued.extend(call.combine);
    }
    let prefix = launches.prefix.as_ref();
    let prefix = prefix.map(|prefix| prefix.call(&problem, inputs, outputs, 0));
    let context = DecodeContext { has_groups: prefix.is_some(), scheduled: false };
    queued.extend(prefix.iter().map(|call| call.schedule));
    if let Some((decode, _)) = choose_decode(&problem, launches, inputs, outputs) {
        let call = decode_call(&problem, decode, inputs, outputs, 0, context);
        queued.push(Launch { module: call.module, ..decode.launch.with_ctas(call.ctas) });
        queued.extend(call.combine);
    }
    queued.extend(prefix.iter().flat_map(|call| [call.kernel, call.merge]));
    Ok(queued)
}

/// The problem of these operands, which the plan covers, and the plan's launches.
fn covered<'a>(
    plan: &'a Plan,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Result<(Problem, &'a Launches), Error> {
    let mut problem = Problem::from_operands(inputs, outputs)?;
    problem.bound_ragged_by(plan.problem());
    plan.problem().covers(&problem)?;
    let launches = plan.cuda().ok_or_else(|| plan.not_for("an NVIDIA GPU"))?;
    Ok((problem, launches))
}

/// The tile map that a run of the plan on these operands makes and reads: for a caller that makes
/// it, and runs with [`Gpu::run_mapped`](super::Gpu::run_mapped). `None` if no map is used: there
/// is no mask, decode kernels run, there are no rows, or the map would be larger than planned.
///
/// Heads are query heads, and rows the query tokens of a head. With kind 2 in place of 1, results
/// are as right, but not always to the bit.
///
/// Strides and alignment of the operands, the scale and the type of the output choose between two
/// prefill kernels, whose tiles may differ; each has its own place in the workspace. The answer
/// holds for operands of the same strides and alignment. A caller with several kinds of layers
/// asks, and writes a map, for each kind.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, or the plan is not for an NVIDIA GPU.
pub fn tile_map(
    plan: &Plan,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Result<Option<TileMap>, Error> {
    let (problem, launches) = covered(plan, inputs, outputs)?;
    if problem.rows() == 0 {
        return Ok(None);
    }
    // With a mask, all heads are one call.
    let mut calls = choose_prefill(&problem, launches, inputs, outputs, 0);
    Ok(calls.next().and_then(|call| call.tile_map))
}

/// Loads that keys and values allow to a decode kernel's module.
fn decode_load_kind(problem: &Problem, inputs: &Inputs<DeviceMemory>, decode: &Decode) -> LoadKind {
    let caches = [&inputs.k, &inputs.v];
    match decode.cache {
        Cache::Elements | Cache::Scaled | Cache::Terms(_) | Cache::Latent | Cache::Mla656 => {
            load_kind(problem, inputs)
        }
        // Keys and values are read value by value; this is about queries.
        Cache::Any if reads_16_bytes(&inputs.q) => LoadKind::Chunks,
        Cache::Any => LoadKind::Elements,
        Cache::Bytes if !caches.into_iter().all(reads_16_bytes) => LoadKind::Elements,
        Cache::Bytes => aligned_load_kind(problem),
        Cache::Q8_0 | Cache::Q4_0 if !caches.into_iter().all(reads_block_rows) => {
            LoadKind::Elements
        }
        // Copies of blocks are made for the module's dims.
        Cache::Q8_0 | Cache::Q4_0 if !decode.exact_dims => LoadKind::Chunks,
        Cache::Q8_0 | Cache::Q4_0 => aligned_load_kind(problem),
        Cache::Pair(keys, values) => {
            let reads = |(tensor, storage): (&Tensor<DeviceMemory>, Storage)| {
                if storage.has_blocks() { reads_block_rows(tensor) } else { reads_16_bytes(tensor) }
            };
            let has_blocks = keys.has_blocks() || values.has_blocks();
            // Queries are copied as they are where keys are elements.
            let reads_queries = keys != Storage::Elements || reads_16_bytes(&inputs.q);
            match reads_queries && [(&inputs.k, keys), (&inputs.v, values)].into_iter().all(reads) {
                false => LoadKind::Elements,
                true if has_blocks && !decode.exact_dims => LoadKind::Chunks,
                true => aligned_load_kind(problem),
            }
        }
    }
}

/// The decode launch of a plan: a kernel with WGMMA or for blocks on Hopper, or that for latent
/// caches, with the tensor maps of the keys unless it copies or converts them one by one, if it can
/// read and write the operands; else the fallback one.
pub(super) fn choose_decode<'a>(
    problem: &Problem,
    launches: &'a Launches,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Option<(&'a Decode, Option<LatentMaps>)> {
    let hopper = launches.hopper_decode.as_ref().filter(|_| writes_16_bytes(&outputs.out));
    let hopper = hopper.and_then(|hopper| {
        if !hopper.cache.is_latent() {
            let reads_rows = match hopper.tile_heads {
                1 => {
                    decode_load_kind(problem, inputs, hopper) == LoadKind::PageAligned16
                        && reads_16_bytes(&inputs.q)
                }
                _ => [&inputs.k, &inputs.v].into_iter().all(reads_joined_rows),
            };
            return reads_rows.then_some((hopper, None));
        }
        if hopper.lists_pages && !sees_all_keys(problem, inputs) {
            return None;
        }
        let has_lists = problem.key_lists.is_some() || hopper.lists_pages;
        if has_lists || hopper.cache == Cache::Mla656 {
            let takes = copies_16_bytes(inputs) && has_head_scales(inputs);
            return takes.then_some((hopper, None));
        }
        let maps = describe_latent(problem, hopper, inputs)?;
        Some((hopper, Some(maps)))
    });
    hopper.or(launches.decode.as_ref().map(|decode| (decode, None)))
}

/// Whether the row of each sequence sees all of its keys, whatever its window to the right.
fn sees_all_keys(problem: &Problem, inputs: &Inputs<DeviceMemory>) -> bool {
    let right = if problem.variant.causal { Some(0) } else { problem.variant.window.right };
    let attention = &inputs.attention;
    let is_last = matches!(attention.q_offset, QueryOffset::BottomRight);
    (is_last || right.is_none()) && attention.key_positions.is_none()
}

/// Whether queries and keys, in both parts and of a second cache too, start at multiples of 16
/// bytes.
fn copies_16_bytes(inputs: &Inputs<DeviceMemory>) -> bool {
    let Inputs { q, k, attention, .. } = inputs;
    let others = [&attention.rotary_k, &attention.second_k].into_iter().flatten();
    [q, k].into_iter().chain(others).all(reads_16_bytes)
}

/// Describes the tensor maps of a latent cache; `None` if TMA cannot read it, or queries do not
/// start at multiples of 16 bytes.
fn describe_latent(
    problem: &Problem,
    latent: &Decode,
    inputs: &Inputs<DeviceMemory>,
) -> Option<LatentMaps> {
    if problem.values != Values::KeyPrefix || !reads_16_bytes(&inputs.q) {
        return None;
    }
    let box_keys = keys_per_box(problem, latent.unit_keys as usize)?;
    let keys = describe(&inputs.k, box_keys)?;
    let rest = match &inputs.attention.rotary_k {
        Some(rotary) => describe(rotary, box_keys)?,
        None => keys.without_first(problem.value_dim)?,
    };
    Some(LatentMaps { keys, rest })
}

/// The dims of keys behind the value dims, for modules that take them as a tensor of their own.
fn rest_of_keys(problem: &Problem, decode: &Decode, inputs: &Inputs<DeviceMemory>) -> KvTensor {
    match &inputs.attention.rotary_k {
        Some(rotary) => kv_tensor(rotary),
        None if decode.cache == Cache::Latent => {
            let keys = kv_tensor(&inputs.k);
            let value_bytes = problem.value_dim * problem.key_dtype.size();
            KvTensor { pointer: keys.pointer + value_bytes as u64, ..keys }
        }
        None => KvTensor::default(),
    }
}

/// The decode call for these operands.
pub(super) fn decode_call(
    problem: &Problem,
    decode: &Decode,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
    workspace: u64,
    context: DecodeContext,
) -> DecodeCall {
    let problem = &*work::joined_heads(problem, decode.tile_heads);
    let pages = decode.lists_pages.then(|| pages_as_lists(problem, inputs)).flatten();
    let rows = match pages {
        Some(_) => Some(problem.clone()),
        None => problem.listed_rows(),
    };
    let lists = pages.or_else(|| list_parameters(problem, inputs));
    let known = match (&rows, &lists) {
        (Some(rows), Some(lists)) => equal_lists(decode, inputs, lists)
            .map(|entries| Schedule::for_equal_lists(rows, decode, entries)),
        _ => equal_lengths(problem, inputs)
            .map(|(q_offset, keys)| Schedule::for_equal_lengths(problem, decode, q_offset, keys)),
    };
    let known = known.filter(|_| !context.has_groups);
    let schedule = known.unwrap_or_else(|| Schedule::on_device(decode));
    let scheduled = decode.schedule.filter(|_| context.scheduled && schedule.work_total == 0);
    let mut parameters = AttentionParameters {
        stream_k: StreamK {
            combines: 0,
            schedule: scheduled.map_or(0, |scheduled| workspace + scheduled.at as u64),
            work_total: schedule.work_total,
            work_per_cta: schedule.work_per_cta,
            work_per_tile: schedule.work_per_tile,
            work_unit_shift: decode.unit_keys.trailing_zeros() as i32,
            tile_start_work: schedule.tile_start_work,
            partials_per_cta: decode.partials_per_cta,
            key_groups: decode.key_groups,
        },
        max_query_len: decode.max_query_len,
        ..attention(problem, inputs, outputs, workspace)
    };
    parameters.keys.strides.head *= decode.tile_heads as i64;
    parameters.values.strides.head *= decode.tile_heads as i64;
    parameters.load_kind = match (decode_load_kind(problem, inputs, decode), lists) {
        // Keys of a list are anywhere, unless the module is for lists of pages.
        (LoadKind::PageAligned16, Some(_)) if !has_page_module(decode) => LoadKind::Chunks,
        (load_kind, _) => load_kind,
    };
    if lists.is_some() {
        parameters.batch = count(problem.rows() / problem.query_heads);
    }
    if decode.lists_pages {
        // Slots have no positions.
        parameters.window = window(&Variant::default());
    }
    let module = if parameters.load_kind == LoadKind::PageAligned16 {
        decode.launch.module
    } else {
        decode.fallback
    };
    let tiles = work::tiles(rows.as_ref().unwrap_or(problem), decode.tile_rows as usize);
    // If the host knows that every tile has one CTA, there is nothing to combine.
    let combine =
        decode.combine.filter(|_| schedule.work_total == 0 || schedule.ctas as usize > tiles);
    let combine = combine.map(|combine| {
        parameters.stream_k.combines = 1;
        let [_, rows, _] = combine.grid;
        Launch { module, grid: [tiles as u32, rows, 1], ..combine }
    });
    let cache = cache_parameters(problem, inputs);
    let rest = rest_of_keys(problem, decode, inputs);
    DecodeCall { module, ctas: schedule.ctas, parameters, cache, rest, lists, combine }
}

/// The prefill calls of a plan for these operands, in order: over copies of keys and values, of
/// some heads each, if there is one for their scales; else one over the cache. None if all
/// sequences run in decode. (Nothing is allocated: steps of an engine must not.)
pub(super) fn choose_prefill<'a>(
    problem: &Problem,
    launches: &'a Launches,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
    workspace: u64,
) -> impl Iterator<Item = PrefillCall<'a>> {
    let on_copies = launches.widened.as_ref().and_then(|widened| {
        let mut parts = widened.parts(problem, inputs)?;
        let call = move |heads| {
            let part = HeadCall::new(problem, inputs, outputs, &heads);
            call_on_copies(widened, &part, workspace)
        };
        let first = call(parts.next()?)?;
        // The kernel may take the operands of some heads only.
        let takes_others = parts.clone().all(|heads| call(heads).is_some());
        takes_others.then(|| std::iter::once(first).chain(parts.filter_map(call)))
    });
    let on_cache = launches.prefill.as_ref().filter(|_| on_copies.is_none());
    let on_cache =
        on_cache.map(|prefill| prefill_call(problem, prefill, inputs, outputs, workspace));
    on_copies.into_iter().flatten().chain(on_cache)
}

/// The prefill call for some heads, over copies of their keys and values.
fn call_on_copies<'a>(
    widened: &'a Widened,
    part: &HeadCall,
    workspace: u64,
) -> Option<PrefillCall<'a>> {
    let copies = widened.copies(part, workspace)?;
    let Copies { prefill, problem, inputs, key_scales, value_scales, call } = copies;
    let each_key = call.parameters.each_key;
    let prefill = prefill_call(&problem, prefill, &inputs, &part.outputs, workspace);
    // Some kernels that take more of each key have no other beside them.
    if prefill.kernel.tensor_maps && prefill.maps.is_none() {
        return None;
    }
    let parameters = PrefillParameters { key_scales, value_scales, each_key, ..prefill.parameters };
    Some(PrefillCall { widen: Some(call), parameters, ..prefill })
}

/// The prefill call for these operands.
fn prefill_call<'a>(
    problem: &Problem,
    plan: &'a Prefill,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
    workspace: u64,
) -> PrefillCall<'a> {
    let mut attention = attention(problem, inputs, outputs, workspace);
    // A kernel with its tensor maps, if it takes the operands.
    let suits = |kernel: &'a PrefillKernel| match (kernel.tensor_maps, kernel.cache) {
        _ if kernel.head_scales && !has_head_scales(inputs) => None,
        (true, _) => maps(problem, kernel, inputs, outputs).map(|maps| (kernel, Some(maps))),
        // The plain kernel cannot write another output type, nor rows that do not start at
        // multiples of four elements.
        (false, Cache::Elements) => {
            let takes = load_kind(problem, inputs) == LoadKind::PageAligned16
                && attention.out_f32 == 0
                && attention.out_aligned == 1
                && keeps_order(inputs.scale());
            takes.then_some((kernel, None))
        }
        (false, _) => Some((kernel, None)),
    };
    let mut faster = [&plan.specialized].into_iter().chain(&plan.any_scales);
    let (kernel, maps) = faster.find_map(suits).unwrap_or((&plan.fallback, None));
    attention.load_kind = match kernel.cache {
        Cache::Elements | Cache::Scaled | Cache::Terms(_) => load_kind(problem, inputs),
        // This is about queries.
        _ if reads_16_bytes(&inputs.q) => LoadKind::Chunks,
        _ => LoadKind::Elements,
    };
    let mut ctas = kernel.launch.grid[0];
    let (splits, combine) = splits::of_call(problem, plan, kernel, workspace);
    let mut parameters = PrefillParameters {
        splits,
        counters: workspace + prefill::COUNTERS_AT as u64,
        l2_group: plan.l2_group,
        min_query_len: plan.min_query_len,
        map: MapParameters {
            tile_rows: count(kernel.tile_rows),
            tile_keys: count(kernel.tile_keys),
            ..MapParameters::default()
        },
        ..PrefillParameters::default()
    };
    if problem.queries == QueryStorage::Batched {
        let tiles = prefill::tiles(problem, kernel);
        (parameters.row_tiles, parameters.tiles) = (count(tiles.rows), tiles.total as i64);
        let max_ctas = tiles.total.max(1).saturating_mul(kernel.cluster_size) << splits.shift;
        ctas = ctas.min(u32::try_from(max_ctas).unwrap_or(u32::MAX));
    }
    let key_map = maps.and_then(|maps| maps.key);
    parameters.box_keys = key_map.map_or(0, |map| map.box_dims[2] as i32);
    let tile_map = mask_map::tile_map(plan, kernel, problem, inputs);
    if let Some(map) = tile_map {
        parameters.map = mask_map::parameters(&map, workspace);
    }
    if kernel.head_scales {
        parameters.value_scales = head_scales(inputs.value_scales());
        // The kernel with `mma.sync` reads those of keys one by one.
        if kernel.cache == Cache::Bytes {
            parameters.key_scales = head_scales(&inputs.attention.k_scales);
        }
    }
    PrefillCall {
        widen: None,
        plan,
        kernel,
        stored: [problem.key_dtype, problem.value_dtype],
        ctas,
        combine,
        attention,
        parameters,
        cache: cache_parameters(problem, inputs),
        maps,
        tile_map,
    }
}

/// Whether maxima stay maxima: some kernels take them before they multiply by the scale.
pub(super) fn keeps_order(scale: f32) -> bool {
    scale > 0.0 && scale.is_finite()
}

/// Describes the tensor maps of these operands, if TMA can read all of them and the kernel takes
/// the scale.
fn maps(
    problem: &Problem,
    kernel: &PrefillKernel,
    inputs: &Inputs<DeviceMemory>,
    outputs: &Outputs<DeviceMemory>,
) -> Option<Maps> {
    if !kernel.tensor_maps || !keeps_order(inputs.scale()) {
        return None;
    }
    let out_f32 = outputs.out.dtype() == DType::F32;
    // These are written two at a time.
    if out_f32 && !(writes_four(&outputs.out) && problem.value_dim.is_multiple_of(2)) {
        return None;
    }
    let Inputs { q, k, v, .. } = inputs;
    let keys = keys_per_box(problem, kernel.box_keys);
    let (key, value) = match (kernel.cache, keys) {
        (Cache::Any, None) => (None, None),
        (Cache::Any, Some(keys)) => {
            let rows = |tensor: &Tensor<_>| Described::from_rows(tensor.address(), tensor, keys);
            rows(k).zip(rows(v)).unzip()
        }
        (_, keys) => (Some(describe(k, keys?)?), Some(describe(v, keys?)?)),
    };
    Some(Maps {
        query: Described::from_dims(q.address(), q, QUERY_BOX)?,
        key,
        value,
        as_bytes: kernel.cache == Cache::Any,
        out: match out_f32 {
            true => None,
            false => Some(Described::from_dims(outputs.out.address(), &outputs.out, QUERY_BOX)?),
        },
    })
}

/// Keys per TMA box of a kernel that takes at most `max_keys`: [`key_box`].
pub(super) fn keys_per_box(problem: &Problem, max_keys: usize) -> Option<usize> {
    match problem.keys {
        KvStorage::Paged { block_size } => key_box(max_keys, Some(block_size)),
        KvStorage::Batched | KvStorage::Ragged => key_box(max_keys, None),
    }
}

/// Describes the tensor map of keys or values. A box of codes holds entire rows.
pub(super) fn describe(tensor: &Tensor<DeviceMemory>, box_keys: usize) -> Option<Described> {
    let described = Described::from_dims(tensor.address(), tensor, box_keys)?;
    if !tensor.dtype().is_code() {
        return Some(described);
    }
    let [_, heads, tokens, sequences] = described.box_dims;
    let row = u32::try_from(described.dims[0]).ok()?;
    Some(Described { box_dims: [row, heads, tokens, sequences], ..described })
}

/// Whether the launch is of a module for lists of pages, beside one for any lists.
fn has_page_module(decode: &Decode) -> bool {
    decode.launch.module != decode.fallback
}

/// The entries that each row walks, if the host knows that all walk as many, and the kernel takes
/// that: one for lists of pages, or for latent caches.
fn equal_lists(
    decode: &Decode,
    inputs: &Inputs<DeviceMemory>,
    lists: &ListParameters,
) -> Option<usize> {
    let attention = &inputs.attention;
    let takes = decode.cache.is_latent()
        || has_page_module(decode) && !matches!(attention.q_offset, QueryOffset::PerSequence(_));
    let known = attention.cu_seqlens_q.is_none() && lists.counts == 0 && lists.second.counts == 0;
    (takes && known).then_some((lists.len + lists.second.len) as usize)
}

/// The offset and the keys that all sequences share, if the host knows that they do.
fn equal_lengths(problem: &Problem, inputs: &Inputs<DeviceMemory>) -> Option<(i64, SequenceKeys)> {
    let attention = &inputs.attention;
    let known = attention.kv_lens.is_none()
        && attention.cu_seqlens_q.is_none()
        && attention.cu_seqlens_k.is_none()
        && !inputs.k.is_empty();
    let q_offset = match attention.q_offset {
        _ if !known => return None,
        QueryOffset::BottomRight => problem.kv_len as i64 - problem.query_len as i64,
        QueryOffset::Same(offset) => offset,
        QueryOffset::PerSequence(_) => return None,
    };
    let keys = match attention.key_positions {
        None => problem.kv_len.into(),
        Some(KeyPositions { offset: KeyOffset::Same(offset), stride }) => {
            SequenceKeys { len: problem.kv_len, offset, stride }
        }
        Some(KeyPositions { offset: KeyOffset::PerSequence(_), .. }) => return None,
    };
    Some((q_offset, keys))
}
