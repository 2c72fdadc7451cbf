//! Turns a plan and operands into dispatches: pipelines, parameters, bindings and grids. A Mac's
//! host code encodes them, and tests run them on the host.

use super::params::{KvFormat, SecondCache};
use super::{
    AppendParameters, AttentionParameters, BufferView, CONSTANTS, Launch, MergeParameters,
    MetalMemory, Pipeline, SIMD_WIDTH, TileMap, mask_map,
};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernel_parameters::{
    Lengths, count, list_strides, mask_kind, mask_strides, query_offset, row_strides,
    scale_strides, tree_strides, window,
};
use crate::params::RowStrides;
use crate::plan::Plan;
use crate::positions::{KeyOffset, KeyPositions};
use crate::problem::{Inputs, KeyLists, KvStorage, ListEntries, ListTensors, Outputs, Problem};
use crate::tensor::{Dims, Tensor, TensorMut};
use crate::variant::QueryOffset;

/// Memory bound to a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The address of the `MTLBuffer` object; 0 where kernels are executed on the host.
    pub buffer: usize,
    /// Bytes from the buffer's beginning to the first element.
    pub offset: usize,
    /// The address of the first element, as the device knows it.
    pub address: usize,
    /// Bytes from there that the kernel may touch.
    pub bytes: usize,
    /// Whether it writes them.
    pub writable: bool,
}

/// The parameters of a dispatch: buffer 0.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "few exist, and they are copied as parameters are")]
pub enum Params {
    /// Of the attention kernels and `combine`.
    Attention(AttentionParameters),
    /// Of `append`.
    Append(AppendParameters),
    /// Of `merge`.
    Merge(MergeParameters),
}

impl Params {
    /// The bytes that the kernel reads.
    pub fn bytes(&self) -> &[u8] {
        fn bytes<T: Copy>(params: &T) -> &[u8] {
            // SAFETY: parameter structs are plain numbers without padding.
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast(), size_of::<T>()) }
        }
        match self {
            Params::Attention(params) => bytes(params),
            Params::Append(params) => bytes(params),
            Params::Merge(params) => bytes(params),
        }
    }
}

/// Maximum buffers of a kernel, parameters included.
pub(crate) const BUFFERS: usize = 30;

/// One kernel launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dispatch {
    /// The pipeline.
    pub pipeline: Pipeline,
    /// Buffer 0.
    pub params: Params,
    /// Buffers 1 and up, by index; `None` is never touched by the kernel (Metal wants something
    /// bound there all the same).
    pub buffers: [Option<Binding>; BUFFERS],
    /// Threadgroups.
    pub grid: [u32; 3],
    /// Threads of a threadgroup, in one dimension.
    pub threads: u32,
    /// Bytes of threadgroup memory 0.
    pub threadgroup_bytes: usize,
}

/// The memory that a view covers, from its first element on; `None` if it is empty.
fn bound(address: u64, dims: &Dims, memory: MetalMemory, writable: bool) -> Option<Binding> {
    let (_, high) = dims.extent().ok()??;
    let address = address as usize;
    Some(Binding {
        buffer: memory.buffer,
        offset: address - memory.address,
        address,
        bytes: (high as usize + 1) * dims.dtype().size(),
        writable,
    })
}

pub(super) fn read(tensor: &Tensor<MetalMemory>) -> Option<Binding> {
    bound(tensor.address(), tensor, tensor.memory(), false)
}

pub(super) fn written(tensor: &TensorMut<MetalMemory>) -> Option<Binding> {
    bound(tensor.address(), tensor, tensor.memory(), true)
}

/// An error if a stride is negative: buffers are bound, and copied, from the first element on.
pub(super) fn expect_forwards(argument: &str, dims: &Dims) -> Result<(), Error> {
    match dims.extent()? {
        Some((low, _)) if low < 0 => {
            let found = format!("a view with strides {:?}", dims.strides());
            Err(Error::argument(
                argument,
                found,
                "strides from 0 up: a Metal buffer is bound from the first element on",
            ))
        }
        _ => Ok(()),
    }
}

/// Whether every row starts at a multiple of 4 elements and is a multiple of 4 long. Rows of blocks
/// are read in pairs of bytes, wherever they start.
fn aligned(tensor: &Tensor<MetalMemory>) -> bool {
    if tensor.dtype().is_block() {
        return true;
    }
    let Some((&dim, outer)) = tensor.shape().split_last() else { return false };
    let steps = tensor.strides().iter().zip(outer).all(|(stride, &n)| n <= 1 || stride % 4 == 0);
    dim.is_multiple_of(4)
        && steps
        && tensor.address().is_multiple_of(4 * tensor.dtype().size() as u64)
}

/// The dispatches that run a plan on some operands, in order: the tile map of a mask, attention (in
/// several pieces if it is long), then the combination of partial states if the plan has one. Empty
/// if there is nothing to compute.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatches {
    map: Option<Dispatch>,
    attention: Option<Dispatch>,
    pieces: usize,
    combine: Option<Dispatch>,
}

impl Dispatches {
    /// The dispatch that makes the tile map of the mask. Attention reads the map, so a barrier
    /// follows. Skip it if the map is in the workspace already.
    pub fn map(&self) -> Option<&Dispatch> {
        self.map.as_ref()
    }

    /// Attention, in pieces that may run in any order.
    pub fn attention(&self) -> impl Iterator<Item = Dispatch> {
        self.attention.iter().flat_map(|attention| attention.cut(self.pieces))
    }

    /// The combination of partial states, which reads what all of attention wrote: a barrier comes
    /// before it.
    pub fn combine(&self) -> Option<&Dispatch> {
        self.combine.as_ref()
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Dispatch> {
        self.map.into_iter().chain(self.attention()).chain(self.combine)
    }
}

/// Floating-point operations of a dispatch, about. A GPU that also drives a display is taken from
/// work that keeps it for seconds; at 10% of an M1's peak this takes two.
const MAX_DISPATCH_FLOPS: f64 = (1u64 << 39) as f64;

/// In how many pieces attention runs.
fn pieces(problem: &Problem) -> usize {
    let dims = (problem.head_dim + problem.value_dim) as f64;
    let flops = 2.0 * problem.rows() as f64 * problem.kv_len as f64 * dims;
    (flops / MAX_DISPATCH_FLOPS).ceil().max(1.0) as usize
}

impl Dispatch {
    /// The same threadgroups as about `pieces` dispatches: of fewer sequences each, or of fewer
    /// blocks of rows of one sequence. Append and merge are not cut.
    pub fn cut(&self, pieces: usize) -> impl Iterator<Item = Dispatch> + use<> {
        let all = *self;
        let [x, y, z] = self.grid;
        let pieces = match self.params {
            Params::Attention(_) => u32::try_from(pieces).unwrap_or(u32::MAX),
            Params::Append(_) | Params::Merge(_) => 1,
        };
        let sequences = z.div_ceil(pieces).max(1);
        let blocks = x.div_ceil(pieces.div_ceil(z.max(1))).max(1);
        (0..z).step_by(sequences as usize).flat_map(move |first_sequence| {
            (0..x).step_by(blocks as usize).map(move |first_block| {
                let mut piece = all;
                piece.grid = [blocks.min(x - first_block), y, sequences.min(z - first_sequence)];
                if let Params::Attention(params) = &mut piece.params {
                    (params.first_block, params.first_sequence) =
                        (first_block as i32, first_sequence as i32);
                }
                piece
            })
        })
    }
}

/// The dispatches that run a plan on these operands. Lengths, offsets and table entries are read
/// when the kernels run, which clamp them to what the operands can hold. `workspace` has
/// [`Plan::workspace_bytes`] bytes, aligned to 16, that only these dispatches use.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, the workspace is too small, or the plan
/// is for another kind of machine.
pub fn dispatches(
    plan: &Plan,
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
    workspace: &BufferView,
) -> Result<Dispatches, Error> {
    let Some(launch) = plan.backend::<Launch>() else { return Err(plan.not_for("a Metal device")) };
    let mut problem = Problem::from_operands(inputs, outputs)?;
    problem.bound_ragged_by(plan.problem());
    plan.problem().covers(&problem)?;
    check_forwards(inputs, outputs)?;
    check_workspace(plan, inputs, outputs, workspace)?;
    let params = attention(plan, &problem, inputs, outputs);
    // The grid has rows in place of sequences if rows have lists of keys.
    let problem = problem.listed_rows().unwrap_or(problem);
    if problem.batch == 0 || params.rows == 0 || problem.rows() == 0 {
        return Ok(Dispatches { map: None, attention: None, pieces: 1, combine: None });
    }
    let pipeline = pipeline(plan, &problem, is_aligned(inputs));
    let states = problem.batch * problem.kv_heads * params.rows as usize * params.splits as usize;
    let partials = plan.split().parallel.then(|| Binding {
        buffer: workspace.memory().buffer,
        offset: 0,
        address: workspace.memory().address,
        bytes: states * (problem.value_dim + 2) * 4,
        writable: true,
    });
    let splits = if partials.is_some() { params.splits as u32 } else { 1 };
    let heads = [problem.kv_heads as u32, problem.batch as u32];
    let mut attend = Dispatch {
        pipeline,
        params: Params::Attention(params),
        buffers: attention_buffers(inputs, outputs, partials),
        grid: [params.row_blocks as u32 * splits, heads[0], heads[1]],
        threads: (launch.simd_groups * SIMD_WIDTH) as u32,
        threadgroup_bytes: launch.threadgroup_bytes,
    };
    let map = mask_map::tile_map(launch.map, tile_of(plan), &problem, inputs)
        .and_then(|map| map_dispatch(&map, &mut attend, inputs, workspace));
    let combine = launch.combine.map(|function| {
        let mut combine = attend;
        combine.pipeline = combine_pipeline(pipeline, function);
        combine.grid =
            [(params.rows as u32).div_ceil(COMBINE_SIMD_GROUPS as u32), heads[0], heads[1]];
        combine.threads = COMBINE_THREADS;
        combine.threadgroup_bytes = 0;
        combine
    });
    Ok(Dispatches { map, attention: Some(attend), pieces: pieces(&problem), combine })
}

/// Buffers are bound from the first element on.
fn check_forwards(
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
) -> Result<(), Error> {
    for (name, tensor) in inputs.named() {
        expect_forwards(name, tensor)?;
    }
    expect_forwards("out", &outputs.out)?;
    outputs.lse.as_ref().map_or(Ok(()), |lse| expect_forwards("lse", lse))
}

/// The workspace is large enough, aligned, and apart from every operand.
fn check_workspace(
    plan: &Plan,
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
    workspace: &BufferView,
) -> Result<(), Error> {
    let MetalMemory { address, bytes, .. } = workspace.memory();
    let needed = plan.workspace_bytes();
    if bytes < needed {
        let allowed = format!("at least {needed} bytes, as planned");
        return Err(Error::argument("workspace", format!("{bytes} bytes long"), allowed));
    }
    if needed > 0 && !address.is_multiple_of(16) {
        return Err(Error::argument("workspace", format!("at {address:#x}"), "a multiple of 16"));
    }
    outputs.check_workspace(inputs, address, needed)
}

/// The buffers of the attention kernels and of `combine`, by index.
fn attention_buffers(
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
    partials: Option<Binding>,
) -> [Option<Binding>; BUFFERS] {
    let attention = &inputs.attention;
    let optional = |tensor: &Option<Tensor<MetalMemory>>| tensor.as_ref().and_then(read);
    let lists = inputs.list_tensors();
    let offsets = match &attention.q_offset {
        QueryOffset::PerSequence(offsets) => read(offsets),
        QueryOffset::BottomRight | QueryOffset::Same(_) => None,
    };
    [
        None,
        read(&inputs.q),
        read(&inputs.k),
        read(&inputs.v),
        written(&outputs.out),
        outputs.lse.as_ref().and_then(written),
        optional(&attention.mask),
        optional(&attention.alibi_slopes),
        optional(&attention.sinks),
        optional(&attention.tree_mask),
        optional(&attention.kv_lens),
        optional(&attention.cu_seqlens_q),
        optional(&attention.cu_seqlens_k),
        optional(&attention.block_table),
        offsets,
        partials,
        optional(&attention.k_scales),
        optional(inputs.value_scales()),
        None,
        attention.key_positions.as_ref().and_then(KeyPositions::tensor).and_then(read),
        lists.as_ref().and_then(|lists| lists.indices).and_then(read),
        lists.as_ref().and_then(|lists| lists.counts).and_then(read),
        lists.as_ref().and_then(|lists| lists.numbers).and_then(read),
        optional(&attention.second_k),
        optional(&inputs.second_values()),
        optional(&attention.second_k_scales),
        optional(inputs.second_value_scales()),
        optional(&attention.second_indices),
        optional(&attention.second_counts),
        optional(&attention.rotary_k),
    ]
}

/// Rows and keys of a plan's tiles.
fn tile_of(plan: &Plan) -> [usize; 2] {
    [plan.choice().block_rows, plan.choice().tile_keys]
}

/// The tile map that a run of the plan on these operands makes and reads: for a caller that makes
/// it. `None` if no map is used: there is no mask, decode kernels run, or the map would be larger
/// than planned.
///
/// Heads are key/value heads, and rows are packed: row r of a key/value head is token r / group of
/// query head r % group.
///
/// # Errors
/// If an operand breaks the contract or exceeds the plan, or the plan is for another kind of
/// machine.
pub fn tile_map(
    plan: &Plan,
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
) -> Result<Option<TileMap>, Error> {
    let Some(launch) = plan.backend::<Launch>() else { return Err(plan.not_for("a Metal device")) };
    let mut problem = Problem::from_operands(inputs, outputs)?;
    problem.bound_ragged_by(plan.problem());
    plan.problem().covers(&problem)?;
    Ok(mask_map::tile_map(launch.map, tile_of(plan), &problem, inputs))
}

/// SIMD groups of a threadgroup that makes a tile map, one per tile: as `mask_map.metal` has it.
const MAP_SIMD_GROUPS: usize = 8;

/// The buffers of the mask and of its tile map.
const MASK: usize = 6;
const MAP: usize = 18;

/// The pipeline that makes the tile map of a mask of this type, with the constants of the attention
/// kernel's, and its threads.
fn map_pipeline(attention: Pipeline, mask: DType) -> (Pipeline, u32) {
    let function = match mask {
        DType::F32 => "mask_map_float",
        DType::F16 => "mask_map_half",
        DType::BF16 => "mask_map_bfloat",
        _ => "mask_map_bool",
    };
    (Pipeline { function, ..attention }, (MAP_SIMD_GROUPS * SIMD_WIDTH) as u32)
}

/// Tells attention where the tile map is, and returns the dispatch that makes it.
fn map_dispatch(
    map: &TileMap,
    attention: &mut Dispatch,
    inputs: &Inputs<MetalMemory>,
    workspace: &BufferView,
) -> Option<Dispatch> {
    let mask = inputs.attention.mask.as_ref()?;
    let MetalMemory { buffer, address, .. } = workspace.memory();
    let (address, bytes) = (address + map.at, map.bytes());
    let binding = Binding { buffer, offset: map.at, address, bytes, writable: false };
    attention.buffers[MAP] = Some(binding);
    if let Params::Attention(params) = &mut attention.params {
        params.map = mask_map::parameters(map);
    }
    let mut buffers = [None; BUFFERS];
    buffers[MASK] = read(mask);
    buffers[MAP] = Some(Binding { writable: true, ..binding });
    let (pipeline, threads) = map_pipeline(attention.pipeline, mask.dtype());
    let threadgroups = map.key_tiles.div_ceil(MAP_SIMD_GROUPS);
    Some(Dispatch {
        pipeline,
        params: attention.params,
        buffers,
        grid: [threadgroups as u32, (map.row_blocks * map.heads) as u32, map.batch as u32],
        threads,
        threadgroup_bytes: 0,
    })
}

/// SIMD groups of a combine threadgroup, one per row.
const COMBINE_SIMD_GROUPS: usize = 4;

/// The pipelines that a plan can need, each with the threads of its threadgroups: for aligned
/// operands and for others.
///
/// # Errors
/// If the plan is for another kind of machine.
pub fn pipelines(plan: &Plan) -> Result<Vec<(Pipeline, u32)>, Error> {
    let Some(launch) = plan.backend::<Launch>() else { return Err(plan.not_for("a Metal device")) };
    let mut all = Vec::new();
    for aligned in [true, false] {
        let attention = pipeline(plan, plan.problem(), aligned);
        all.push((attention, (launch.simd_groups * SIMD_WIDTH) as u32));
        if let Some(function) = launch.combine {
            all.push((combine_pipeline(attention, function), COMBINE_THREADS));
        }
        if let (Some(_), Some(mask)) = (launch.map, plan.problem().variant.mask) {
            all.push(map_pipeline(attention, mask));
        }
    }
    Ok(all)
}

/// The pipeline of `combine`: the constants of the attention kernel's, but for the SIMD groups.
fn combine_pipeline(attention: Pipeline, function: &'static str) -> Pipeline {
    let mut combine = Pipeline { function, ..attention };
    combine.constants[SIMD_GROUPS] = COMBINE_SIMD_GROUPS as i32;
    combine
}

/// Threads of a combine threadgroup.
const COMBINE_THREADS: u32 = (COMBINE_SIMD_GROUPS * SIMD_WIDTH) as u32;

/// The place of `SIMD_GROUPS` in [`CONSTANTS`].
const SIMD_GROUPS: usize = 4;

/// Whether kernels may load four elements of any row of these operands at once.
fn is_aligned(inputs: &Inputs<MetalMemory>) -> bool {
    let attention = &inputs.attention;
    let others = [attention.rotary_k, attention.second_k, inputs.second_values()];
    [&inputs.q, &inputs.k, &inputs.v].into_iter().chain(others.iter().flatten()).all(aligned)
}

/// Storage class of keys or values of this type, as kernels read them under queries of that one.
pub(super) fn kv_format(dtype: DType, queries: DType) -> KvFormat {
    match dtype {
        _ if dtype == queries => KvFormat::Native,
        DType::F32 => KvFormat::F32,
        DType::F16 => KvFormat::F16,
        DType::BF16 => KvFormat::BF16,
        DType::E4M3 => KvFormat::E4M3,
        DType::E5M2 => KvFormat::E5M2,
        DType::I8 => KvFormat::I8,
        DType::Q8_0 => KvFormat::Q8_0,
        DType::Q4_0 => KvFormat::Q4_0,
        DType::Mla656 | DType::Mla656Latent => KvFormat::Mla656,
        DType::I32 | DType::Bool => unreachable!("checked: keys and values are of another type"),
    }
}

fn pipeline(plan: &Plan, problem: &Problem, aligned: bool) -> Pipeline {
    let launch = plan.backend::<Launch>().expect("the caller has it");
    let variant = &problem.variant;
    let (choice, split) = (plan.choice(), plan.split());
    let bounded = variant.causal
        || variant.chunk.is_some()
        || variant.window.left.is_some()
        || variant.window.right.is_some();
    let block_size = match problem.keys {
        KvStorage::Paged { block_size } => block_size as i32,
        KvStorage::Batched | KvStorage::Ragged => 0,
    };
    let constants: [i32; CONSTANTS.len()] = [
        problem.head_dim as i32,
        problem.value_dim as i32,
        choice.block_rows as i32,
        choice.tile_keys as i32,
        launch.simd_groups as i32,
        split.parallel.into(),
        (split.count > 1 && !split.parallel).into(),
        bounded.into(),
        variant.softcap.into(),
        variant.alibi.into(),
        variant.sinks.into(),
        mask_kind(variant.mask) as i32,
        variant.tree.into(),
        block_size,
        problem.lse.into(),
        (problem.out_dtype != problem.dtype).into(),
        aligned.into(),
        kv_format(problem.key_dtype, problem.dtype) as i32,
        kv_format(problem.value_dtype, problem.dtype) as i32,
        problem.key_lists.map_or(0, list_kind),
        (problem.rotary_dim > 0).into(),
    ];
    Pipeline { function: launch.function, constants }
}

/// The parameters of the attention kernels and `combine`, from operands that are checked and
/// covered by the plan.
fn attention(
    plan: &Plan,
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
) -> AttentionParameters {
    let mut parameters = AttentionParameters::default();
    set_shapes(&mut parameters, problem, inputs);
    set_strides(&mut parameters, inputs, outputs);
    set_variant(&mut parameters, problem, inputs);
    set_lists(&mut parameters, problem, inputs);
    let split = plan.split();
    let walked = problem.listed_rows();
    let problem = walked.as_ref().unwrap_or(problem);
    parameters.split_keys = split.keys as i64;
    parameters.splits = count(problem.kv_len.div_ceil(split.keys).clamp(1, split.count.max(1)));
    parameters.rows = count(problem.query_len * problem.group());
    parameters.row_blocks = count((parameters.rows as usize).div_ceil(plan.choice().block_rows));
    parameters
}

fn set_shapes(
    parameters: &mut AttentionParameters,
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
) {
    let attention = &inputs.attention;
    parameters.kv_heads = count(problem.kv_heads);
    parameters.group = count(problem.group());
    let lengths = Lengths::from_operands(problem, inputs);
    parameters.query_len = lengths.query_len;
    parameters.kv_len = lengths.kv_len;
    parameters.query_len_bound = lengths.query_len_bound;
    parameters.kv_len_bound = lengths.kv_len_bound;
    parameters.blocks = lengths.blocks;
    parameters.ragged_queries = attention.cu_seqlens_q.is_some().into();
    parameters.ragged_keys = attention.cu_seqlens_k.is_some().into();
    parameters.given_kv_lens = attention.kv_lens.is_some().into();
}

fn set_strides(
    parameters: &mut AttentionParameters,
    inputs: &Inputs<MetalMemory>,
    outputs: &Outputs<MetalMemory>,
) {
    let Inputs { q, k, v, attention } = inputs;
    let leading = q.rank() - 1;
    parameters.query_strides = row_strides(q, leading);
    parameters.key_strides = row_strides(k, k.rank() - 1);
    parameters.value_strides = row_strides(v, v.rank() - 1);
    parameters.out_strides = row_strides(&outputs.out, leading);
    if let Some(rotary) = &attention.rotary_k {
        parameters.rotary_strides = row_strides(rotary, rotary.rank() - 1);
    }
    if let Some(scales) = &attention.k_scales {
        parameters.key_scale_strides = scale_strides(scales);
    }
    if let Some(scales) = inputs.value_scales() {
        parameters.value_scale_strides = scale_strides(scales);
    }
    if let Some(lse) = &outputs.lse {
        parameters.lse_strides = row_strides(lse, leading);
    }
    if let Some(mask) = &attention.mask {
        parameters.mask_strides = mask_strides(mask);
    }
    if let Some(tree) = &attention.tree_mask {
        parameters.tree_strides = tree_strides(tree);
    }
    parameters.block_table_stride =
        attention.block_table.as_ref().map_or(0, |table| table.strides()[0]);
}

fn set_lists(
    parameters: &mut AttentionParameters,
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
) {
    parameters.sequences = count(problem.batch);
    let Some(ListTensors { lists, indices, counts, numbers }) = inputs.list_tensors() else {
        return;
    };
    parameters.list_len = count(lists.len);
    parameters.list_strides = list_strides(lists, indices);
    parameters.count_strides = list_strides(lists, counts);
    parameters.number_strides = list_strides(lists, numbers);
    parameters.given_key_counts = counts.is_some().into();
    parameters.second = second_cache(lists, inputs).unwrap_or_default();
}

/// The second cache and its lists, if there is one.
fn second_cache(lists: KeyLists, inputs: &Inputs<MetalMemory>) -> Option<SecondCache> {
    let attention = &inputs.attention;
    let (keys, values) = (attention.second_k?, inputs.second_values()?);
    let (indices, counts) = (attention.second_indices.as_ref(), attention.second_counts.as_ref());
    let &[blocks, block_size, ..] = keys.shape() else { unreachable!("checked: a pool") };
    let strides_of_scales = |scales: &Option<Tensor<MetalMemory>>| {
        scales.as_ref().map_or(RowStrides::default(), |scales| scale_strides(scales))
    };
    Some(SecondCache {
        list_strides: list_strides(lists, indices),
        count_strides: list_strides(lists, counts),
        key_strides: row_strides(&keys, keys.rank() - 1),
        value_strides: row_strides(&values, values.rank() - 1),
        key_scale_strides: strides_of_scales(&attention.second_k_scales),
        value_scale_strides: strides_of_scales(inputs.second_value_scales()),
        len: count(lists.second?),
        given_counts: counts.is_some().into(),
        blocks: count(blocks),
        block_size: count(block_size),
    })
}

/// The kernels' constant LISTS.
fn list_kind(lists: KeyLists) -> i32 {
    match lists.entries {
        ListEntries::Keys => 1,
        ListEntries::Slots if lists.second.is_some() => 5,
        ListEntries::Slots => 2,
        ListEntries::Pages => 3,
        ListEntries::NumberedPages => 4,
    }
}

fn set_variant(
    parameters: &mut AttentionParameters,
    problem: &Problem,
    inputs: &Inputs<MetalMemory>,
) {
    let variant = &problem.variant;
    let window = window(variant);
    (parameters.window_left, parameters.window_right) = (window.left, window.right);
    parameters.chunk = variant.chunk.map_or(0, |chunk| chunk as i64);
    (parameters.offset_kind, parameters.q_offset) = query_offset(&inputs.attention.q_offset);
    parameters.key_stride = 1;
    if let Some(KeyPositions { offset, stride }) = &inputs.attention.key_positions {
        parameters.key_stride = *stride as i64;
        match offset {
            KeyOffset::Same(offset) => parameters.key_offset = *offset,
            KeyOffset::PerSequence(_) => parameters.given_key_offsets = 1,
        }
    }
    // Base 16 under the condition of BASE_16 in `common.metal`, else base 2.
    let adds_mask = variant.mask.is_some_and(DType::is_float);
    let unit = std::f64::consts::LOG2_E / if adds_mask || variant.sinks { 4.0 } else { 1.0 };
    let scale = f64::from(inputs.scale());
    let softcap = inputs.attention.softcap.map(f64::from);
    parameters.score_factor = softcap.map_or(scale * unit, |cap| scale / cap) as f32;
    parameters.softcap = softcap.map_or(0.0, |cap| cap * unit) as f32;
}
