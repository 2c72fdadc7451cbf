//! Prefill over a cache in other types than queries, or in small pages, on a contiguous copy of
//! keys and values in their type: a kernel makes the copy in the workspace, and the kernels over
//! elements read it. Many rows read each key, so that one conversion for all of them is less work
//! than one per tile of rows.
//!
//! Codes are exact in the copy without their scales. Scales that heads share join scores and
//! outputs. Other scales of keys are copied beside them, and multiply scores. Values with other
//! scales, in blocks or of another type are rounded, as probabilities are.
//!
//! Rounded keys would not be exact enough. So keys in blocks or of another type become two
//! elements: a rounded one, and what rounding took, also rounded; or three, where a log-sum-exp
//! shows what is left. f16 has a small range: what is rounded to it is a multiple of a power of
//! two, the unit of its sequence and head.

use super::prefill;
use super::registry::{Cache, Family};
use super::work::with_heads;
use super::{Launch, Prefill, PrefillKernel, Widened};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{KvStorage, Problem};
use crate::variant::Values;
#[cfg(feature = "cuda")]
use {
    super::DeviceMemory,
    super::heads::HeadCall,
    super::lists::kv_tensor,
    super::operands::{attention, cache_parameters, head_scales, is_per_head, reads_16_bytes},
    crate::kernel_parameters::count,
    crate::params::{AttentionParameters, CacheParameters, HeadScales, KeyScales, WidenParameters},
    crate::problem::Inputs,
    crate::tensor::{Tensor, raw_dims},
    crate::variant::Attention,
    std::ops::Range,
};

/// The largest copy of keys and values, in L2 caches: 1000 MiB on an H200, which is 256,000 tokens
/// of 8 heads at head dim 128, or two thirds of these if keys become two elements. Of more, some
/// heads are copied and read at a time. Parts of half that size cost no time yet.
const MAX_COPY_CACHES: usize = 20;

/// Alignment of the copies in the workspace, in bytes: of a line of memory.
const COPY_ALIGNMENT: usize = 128;

/// Threads per CTA and keys per CTA, as in `widen.cu`; and threads where it finds units.
const THREADS: u32 = 256;
const BLOCK_KEYS: usize = 32;
const UNIT_THREADS: u32 = 1024;

/// Keys from which on another CTA finds units.
const UNIT_KEYS: usize = 1024;

/// Keys of the largest K tile of prefill.
const MAX_TILE_KEYS: usize = 128;

/// Rows that read each copied key from which on a copy pays, as measured on an H200 (docs/perf):
/// beside the kernels for codes that multiply by WGMMA, which convert them while others multiply,
/// at head dims up to 128 and above; beside the kernel for any formats that does, if heads share
/// scales and if not; and, estimated from bytes and operations, beside those with `mma.sync`, where
/// kernels on the copy have WGMMA and where they have not.
const ROWS_BESIDE_CODES: usize = 1200;
const ROWS_BESIDE_CODES_WIDE: usize = 600;
const ROWS_BESIDE_STORED: usize = 256;
const ROWS_BESIDE_STORED_SCALED: usize = 128;
const ROWS_BESIDE_SM80_ON_HOPPER: usize = 16;
const ROWS_BESIDE_SM80: usize = 100;

/// The same in tiles of rows, each of one query head, for keys of several elements beside the
/// kernel for any formats with WGMMA: an estimate from the bytes of copies.
const TILES_BESIDE_STORED: usize = 3;
const TILE_ROWS: usize = 128;

/// Keys per TMA box from which on pages are read as fast as contiguous keys.
const MIN_BOX_KEYS: usize = 16;

/// Units of a sequence and head: of keys and of values.
const UNITS: usize = 2;

/// The problem of the kernels over elements.
fn widened(problem: &Problem) -> Problem {
    let keys = match problem.keys {
        KvStorage::Paged { .. } => KvStorage::Batched,
        contiguous => contiguous,
    };
    let (key_dtype, value_dtype) = (problem.dtype, problem.dtype);
    Problem { keys, key_dtype, value_dtype, values: Values::Separate, ..problem.clone() }
}

/// Elements from head to head of a copy: rows start at multiples of 16 bytes.
fn row_elements(dim: usize) -> usize {
    dim.next_multiple_of(8)
}

/// Tokens of a copy: of a ragged batch, if its sequences follow each other without gaps.
fn planned_tokens(problem: &Problem) -> usize {
    problem.batch.saturating_mul(problem.kv_len)
}

/// Bytes of the copies of keys and of values of this many tokens. `terms`: elements per one of a
/// key.
fn copy_bytes(problem: &Problem, tokens: usize, terms: usize) -> [usize; 2] {
    let bytes =
        |heads: usize, dim| tokens.saturating_mul(heads * row_elements(dim) * problem.dtype.size());
    [bytes(terms * problem.kv_heads, problem.head_dim), bytes(problem.kv_heads, problem.value_dim)]
}

/// Heads whose copies are small enough together: about as many each time, if not all of them.
/// `None` if those of one head are too large, or all are needed.
fn heads_at_once(problem: &Problem, terms: usize, facts: &CudaFacts) -> Option<usize> {
    let head = copy_bytes(&with_heads(problem, 1), planned_tokens(problem), terms);
    let bytes = head.into_iter().fold(0, usize::saturating_add);
    equal_parts(problem, facts.l2_bytes.saturating_mul(MAX_COPY_CACHES) / bytes.max(1))
}

/// Heads of each part, if that may have `most` of them.
fn equal_parts(problem: &Problem, most: usize) -> Option<usize> {
    let heads = problem.kv_heads;
    // The tile map of a mask is of all heads.
    let min = if problem.variant.mask.is_some() { heads } else { heads.min(1) };
    (most >= min).then(|| heads.div_ceil(heads.div_ceil(most.max(1)).max(1)))
}

/// Elements from head to head of the scales of keys: prefill reads whole K tiles.
fn scale_stride(problem: &Problem) -> usize {
    problem.kv_len.saturating_add(MAX_TILE_KEYS).next_multiple_of(4)
}

/// Bytes of the scales of keys, if each has its own.
fn scale_bytes(problem: &Problem) -> Option<usize> {
    problem.batch.checked_mul(problem.kv_heads)?.checked_mul(4 * scale_stride(problem))
}

/// Bytes of the units of each sequence and head, and of what is found of them in parts.
fn unit_bytes(problem: &Problem, splits: usize) -> Option<usize> {
    problem.batch.checked_mul(problem.kv_heads)?.checked_mul(4 * UNITS * (1 + splits))
}

/// Prefill over a copy, if that is faster than the kernels that read the cache; the copies and the
/// tile maps of a mask are behind the first `start` bytes of the workspace.
pub(super) fn select(
    problem: &Problem,
    beside: &Prefill,
    facts: &CudaFacts,
    max_decode_len: usize,
    start: usize,
) -> Option<Widened> {
    if !is_copied(problem) {
        return None;
    }
    let rows = rows_per_key(problem);
    let takes_shared = prefill::is_exact(problem, problem.key_dtype)
        && rows >= min_rows(problem, &beside.specialized, facts);
    let extended = find_extended(problem, facts)
        .filter(|[kernel, _]| heads_at_once(problem, kernel.cache.key_terms(), facts).is_some())
        .filter(|[kernel, _]| rows >= min_rows_extended(problem, kernel, beside));
    if !takes_shared && extended.is_none() {
        return None;
    }
    let cache = extended.map_or(Cache::Elements, |[kernel, _]| kernel.cache);
    let terms = cache.key_terms();
    // From here on those of one part.
    let problem = &with_heads(problem, heads_at_once(problem, terms, facts)?);
    let on_copy = widened(problem);
    let [key_bytes, value_bytes] = copy_bytes(problem, planned_tokens(problem), terms);
    let heads = problem.batch.checked_mul(problem.kv_heads)?;
    let scale_bytes = if cache == Cache::Scaled { scale_bytes(problem)? } else { 0 };
    let has_units = problem.dtype == DType::F16;
    let splits = unit_splits(problem, facts);
    let unit_bytes = if has_units { unit_bytes(problem, splits)? } else { 0 };
    let behind =
        |at: usize, bytes: usize| at.checked_add(bytes)?.checked_next_multiple_of(COPY_ALIGNMENT);
    let keys_at = behind(start, 0)?;
    let values_at = behind(keys_at, key_bytes)?;
    let scales_at = behind(values_at, value_bytes)?;
    let units_at = behind(scales_at, scale_bytes)?;
    let end = behind(units_at, unit_bytes)?;
    let shared = takes_shared.then(|| prefill::select(&on_copy, facts, max_decode_len, end));
    let shared = shared.flatten();
    let extended = extended
        .map(|kernels| prefill::with_kernels(kernels, None, &on_copy, facts, max_decode_len, end));
    if shared.is_none() && extended.is_none() {
        return None;
    }
    let blocks = problem.batch.checked_mul(problem.kv_len.div_ceil(BLOCK_KEYS))?.checked_mul(2)?;
    let grid = |ctas: usize| Some([i32::try_from(ctas).ok()? as u32, 1, 1]);
    let rounded = Launch {
        module: Family::Widen.name(),
        entry: "widen_rounded",
        grid: grid(blocks)?,
        threads: THREADS,
        ..Launch::default()
    };
    let [of_heads, ..] = grid(UNITS * heads)?;
    let units = Launch {
        entry: "widen_units",
        grid: [of_heads, splits as u32, 1],
        threads: UNIT_THREADS,
        shared_bytes: (UNIT_THREADS / 32 + 1) * 4,
        ..rounded
    };
    let units = has_units.then_some(units);
    let is_exact = |stored| prefill::is_exact(problem, stored);
    let can_be_exact = is_exact(problem.key_dtype) && is_exact(problem.value_dtype);
    let exact = can_be_exact.then_some(Launch { entry: "widen", ..rounded });
    Some(Widened {
        rounded,
        exact,
        units,
        keys_at,
        values_at,
        scales_at,
        units_at,
        end,
        shared,
        extended,
    })
}

/// Parts of a sequence's keys for which units are found by a CTA each: as many as fill the GPU.
fn unit_splits(problem: &Problem, facts: &CudaFacts) -> usize {
    let heads = UNITS.saturating_mul(problem.batch).saturating_mul(problem.kv_heads);
    let parts = problem.kv_len.div_ceil(UNIT_KEYS);
    (2 * facts.multiprocessors / heads.max(1)).clamp(1, parts.max(1))
}

/// The kernels that take more of a key than an element of the copy, if keys may need it: a
/// scale for each key, or several elements for one. Keys of 8-bit codes need neither if heads share
/// their scales.
fn find_extended(problem: &Problem, facts: &CudaFacts) -> Option<[PrefillKernel; 2]> {
    let stored = problem.key_dtype;
    let in_bf16 = problem.dtype == DType::BF16;
    let find = |cache| prefill::find_extended(cache, &widened(problem), facts);
    if stored == problem.dtype {
        return None;
    }
    let scaled = (stored.is_code() && in_bf16).then(|| find(Cache::Scaled)).flatten();
    // Two elements of bf16 have 16 bits, which are too few for the log-sum-exp of some formats.
    let has_few_bits = matches!(stored, DType::Q4_0 | DType::F16);
    let terms = if in_bf16 && problem.lse && !has_few_bits { 3 } else { 2 };
    scaled.or_else(|| find(Cache::Terms(terms)))
}

impl Prefill {
    /// The fastest launch over copies, if there are any; else this one.
    pub(super) fn fastest<'a>(&'a self, widened: &'a Option<Widened>) -> &'a Prefill {
        widened.as_ref().and_then(|widened| widened.prefills().next()).unwrap_or(self)
    }
}

impl Widened {
    /// The launches that make the copies, in order; with the operands that they are fastest for.
    pub(super) fn launches(&self) -> impl Iterator<Item = Launch> + use<> {
        let units = self.units.filter(|_| self.exact.is_none());
        units.into_iter().chain([self.exact.unwrap_or(self.rounded)])
    }

    /// Prefill over the copies, in the order of speed.
    pub(super) fn prefills(&self) -> impl Iterator<Item = &Prefill> {
        self.shared.iter().chain(&self.extended)
    }
}

/// Whether keys and values that prefill takes can be copied, into a type of 16 bits, and are not
/// all stored in it, in pages that TMA reads as fast as contiguous keys.
fn is_copied(problem: &Problem) -> bool {
    let KvStorage::Paged { block_size } = problem.keys else {
        return problem.dtype != DType::F32 && !prefill::has_elements(problem);
    };
    let is_scattered = !block_size.is_multiple_of(MIN_BOX_KEYS);
    problem.dtype != DType::F32 && (is_scattered || !prefill::has_elements(problem))
}

/// Rows that read a copied key, on average, if all sequences are as long as the longest. (The short
/// ones of a ragged batch run in decode, and are not copied.)
fn rows_per_key(problem: &Problem) -> usize {
    let &Problem { kv_len, query_len: tokens, ref variant, .. } = problem;
    let right = if variant.causal { Some(0) } else { variant.window.right };
    let window = variant.window.left.zip(right).map(|(left, right)| {
        (left.saturating_add(right).saturating_add(1), left.saturating_add(right))
    });
    // Of the keys of a causal row, half of the new ones lie behind it.
    let causal = kv_len - if variant.causal { tokens.min(kv_len) / 2 } else { 0 };
    let (seen, copied) = match window {
        Some((seen, more)) => (causal.min(seen), kv_len.min(tokens.saturating_add(more))),
        None => (causal, kv_len),
    };
    let seen = variant.chunk.map_or(seen, |chunk| seen.min(chunk));
    problem.group().saturating_mul(tokens).saturating_mul(seen) / copied.max(1)
}

/// Rows from which on a copy pays beside that kernel, if keys are exact there.
fn min_rows(problem: &Problem, kernel: &PrefillKernel, facts: &CudaFacts) -> usize {
    match (kernel.tensor_maps, kernel.cache) {
        (true, Cache::Bytes) if problem.head_dim > 128 => ROWS_BESIDE_CODES_WIDE,
        (true, Cache::Bytes) => ROWS_BESIDE_CODES,
        (true, _) => ROWS_BESIDE_STORED,
        (false, _) if prefill::has_wgmma(problem, facts) => ROWS_BESIDE_SM80_ON_HOPPER,
        (false, _) => ROWS_BESIDE_SM80,
    }
}

/// The same for a kernel that takes more of each key.
fn min_rows_extended(problem: &Problem, extended: &PrefillKernel, beside: &Prefill) -> usize {
    let kernel = match beside.specialized.head_scales {
        true => beside.any_scales.unwrap_or(beside.fallback),
        false => beside.specialized,
    };
    match (kernel.tensor_maps, extended.cache) {
        // A tile takes as long with few rows.
        (true, Cache::Terms(_)) => TILES_BESIDE_STORED * problem.query_len.min(TILE_ROWS),
        (true, _) => ROWS_BESIDE_STORED_SCALED,
        (false, _) if extended.tensor_maps => ROWS_BESIDE_SM80_ON_HOPPER,
        (false, _) => ROWS_BESIDE_SM80,
    }
}

/// The call of the kernels that make the copies.
#[cfg(feature = "cuda")]
pub(super) struct WidenCall {
    /// The one that finds units, if there are any.
    pub units: Option<Launch>,
    pub launch: Launch,
    pub attention: AttentionParameters,
    pub parameters: WidenParameters,
    pub cache: CacheParameters,
}

#[cfg(feature = "cuda")]
impl WidenCall {
    /// The launches, in order; all have the same parameters.
    pub(super) fn launches(&self) -> impl Iterator<Item = Launch> {
        self.units.into_iter().chain([self.launch])
    }
}

/// What prefill over a copy needs beside the operands.
#[cfg(feature = "cuda")]
pub(super) struct Copies<'a, 'p> {
    /// The launch that reads them.
    pub prefill: &'p Prefill,
    pub problem: Problem,
    /// Keys and values are the copies.
    pub inputs: Inputs<'a, DeviceMemory>,
    pub key_scales: HeadScales,
    pub value_scales: HeadScales,
    pub call: WidenCall,
}

#[cfg(feature = "cuda")]
impl Widened {
    /// Heads of these operands whose copies the workspace has room for together; `None` if it has
    /// too little, or no kernel takes the operands' scales.
    pub(super) fn parts(
        &self,
        problem: &Problem,
        inputs: &Inputs<DeviceMemory>,
    ) -> Option<impl Iterator<Item = Range<usize>> + Clone + use<>> {
        if problem.kv_len == 0 || inputs.k.is_empty() {
            return None;
        }
        let reader = self.reader(problem, inputs)?;
        let head = with_heads(problem, 1);
        let [keys, values] =
            copy_bytes(&head, copied_tokens(problem, inputs), reader.cache().key_terms());
        let scales = match reader.cache() {
            Cache::Scaled => scale_bytes(&head)?,
            _ => 0,
        };
        let units = self
            .units
            .map_or(0, |units| unit_bytes(&head, units.grid[1] as usize).unwrap_or(usize::MAX));
        let room = [self.keys_at, self.values_at, self.scales_at, self.units_at, self.end];
        let fitting = [keys, values, scales, units].into_iter().zip(room.windows(2));
        let most = fitting
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, room)| (room[1] - room[0]) / bytes);
        let heads = problem.kv_heads;
        let at_once = equal_parts(problem, most.min()?)?;
        Some((0..heads).step_by(at_once.max(1)).map(move |first| first..heads.min(first + at_once)))
    }

    /// The copies of the operands of one of these parts, in a workspace at that address; `None` if
    /// no kernel takes their scales.
    pub(super) fn copies<'a, 'p>(
        &'p self,
        HeadCall { problem, inputs, outputs }: &HeadCall<'a>,
        workspace: u64,
    ) -> Option<Copies<'a, 'p>> {
        let tokens = copied_tokens(problem, inputs);
        let reader = self.reader(problem, inputs)?;
        let (prefill, terms) = (reader.prefill, reader.cache().key_terms());
        let copy = |at: usize, heads: usize, dim: usize| {
            copy_of(problem, tokens, workspace + at as u64, heads, dim)
        };
        let k = copy(self.keys_at, terms * problem.kv_heads, problem.head_dim)?;
        let v = copy(self.values_at, problem.kv_heads, problem.value_dim)?;
        let find_units = self.units.filter(|_| reader.rounds());
        let units = find_units.map(|_| workspace + self.units_at as u64);
        let scales = reader.scales(problem, inputs, workspace + self.scales_at as u64, units);
        let Scales { key_scales, value_scales, each_key } = scales;
        let key_blocks = problem.kv_len.div_ceil(BLOCK_KEYS);
        let parameters = WidenParameters {
            keys: kv_tensor(&k),
            values: kv_tensor(&v),
            each_key,
            units: units.unwrap_or(0),
            counter: workspace + prefill::UNIT_COUNTER_AT as u64,
            min_query_len: prefill.min_query_len,
            key_blocks: count(key_blocks),
            aligned: [&inputs.k, &inputs.v].into_iter().all(reads_16_bytes).into(),
            key_terms: count(terms),
            round_values: (!reader.values_are_exact).into(),
            unused: 0,
        };
        let launch = self.exact.filter(|_| !reader.rounds()).unwrap_or(self.rounded);
        let call = WidenCall {
            launch: launch.with_ctas((2 * problem.batch * key_blocks) as u32),
            units: find_units.map(|launch| {
                let [_, splits, _] = launch.grid;
                let heads = (UNITS * problem.batch * problem.kv_heads) as u32;
                Launch { grid: [heads, splits, 1], ..launch }
            }),
            attention: attention(problem, inputs, outputs, 0),
            parameters,
            cache: cache_parameters(problem, inputs),
        };
        let attention = Attention {
            values: Values::Separate,
            block_table: None,
            k_scales: None,
            v_scales: None,
            ..inputs.attention
        };
        let inputs = Inputs { q: inputs.q, k, v, attention };
        Some(Copies { prefill, problem: widened(problem), inputs, key_scales, value_scales, call })
    }
}

/// The launch that reads copies of some operands.
#[cfg(feature = "cuda")]
struct Reader<'p> {
    prefill: &'p Prefill,
    /// Whether values are copied as they are: their scales join outputs, if they have any.
    values_are_exact: bool,
}

/// What prefill multiplies copies by.
#[cfg(feature = "cuda")]
struct Scales {
    key_scales: HeadScales,
    value_scales: HeadScales,
    each_key: KeyScales,
}

#[cfg(feature = "cuda")]
impl Widened {
    /// The launch that reads copies of these operands; `None` if none takes their scales.
    fn reader(&self, problem: &Problem, inputs: &Inputs<DeviceMemory>) -> Option<Reader<'_>> {
        let (of_keys, of_values) = (&inputs.attention.k_scales, inputs.value_scales());
        let is_exact = |stored, scales| prefill::is_exact(problem, stored) && is_per_head(scales);
        let keys_are_exact = is_exact(problem.key_dtype, of_keys);
        let values_are_exact = is_exact(problem.value_dtype, of_values);
        let shared = self.shared.as_ref().filter(|_| keys_are_exact);
        let takes = |plan: &&Prefill| plan.specialized.cache != Cache::Scaled || of_keys.is_some();
        // The cache's kernels are faster than copies of all that a key may need, if heads share all
        // scales.
        let prefill = match keys_are_exact && values_are_exact {
            true => shared?,
            false => shared.or_else(|| self.extended.as_ref().filter(takes))?,
        };
        Some(Reader { prefill, values_are_exact })
    }
}

#[cfg(feature = "cuda")]
impl Reader<'_> {
    fn cache(&self) -> Cache {
        self.prefill.specialized.cache
    }

    /// Whether some of the copies are rounded.
    fn rounds(&self) -> bool {
        matches!(self.cache(), Cache::Terms(_)) || !self.values_are_exact
    }

    /// The scales of copies. `each_key`: the address of those of single keys; `units`: of what
    /// rounded copies are multiples of, if not of 1.
    fn scales(
        &self,
        problem: &Problem,
        inputs: &Inputs<DeviceMemory>,
        each_key: u64,
        units: Option<u64>,
    ) -> Scales {
        let heads = problem.batch * problem.kv_heads;
        let of_units = |side: usize| {
            units.map_or(HeadScales::default(), |units| HeadScales {
                pointer: units + (4 * side * heads) as u64,
                stride: 1,
                sequence_stride: problem.kv_heads as i64,
            })
        };
        let each_key = KeyScales { pointer: each_key, stride: scale_stride(problem) as i64 };
        let (key_scales, each_key) = match self.cache() {
            Cache::Scaled => (HeadScales::default(), each_key),
            Cache::Terms(_) => (of_units(0), KeyScales::default()),
            _ => (head_scales(&inputs.attention.k_scales), KeyScales::default()),
        };
        let value_scales = match self.values_are_exact {
            true => head_scales(inputs.value_scales()),
            false => of_units(1),
        };
        Scales { key_scales, value_scales, each_key }
    }
}

/// Tokens of a copy of these operands.
#[cfg(feature = "cuda")]
fn copied_tokens(problem: &Problem, inputs: &Inputs<DeviceMemory>) -> usize {
    match problem.keys {
        KvStorage::Ragged => inputs.k.shape()[0],
        KvStorage::Batched | KvStorage::Paged { .. } => planned_tokens(problem),
    }
}

/// The tensor of a copy of this many tokens.
#[cfg(feature = "cuda")]
fn copy_of<'a>(
    problem: &Problem,
    tokens: usize,
    address: u64,
    heads: usize,
    dim: usize,
) -> Option<Tensor<'a, DeviceMemory>> {
    let head = row_elements(dim) as i64;
    let token = head * heads as i64;
    let dims = match problem.keys {
        KvStorage::Ragged => {
            raw_dims(problem.dtype, &[tokens, heads, dim], Some(&[token, head, 1]))
        }
        KvStorage::Batched | KvStorage::Paged { .. } => {
            let (batch, keys) = (problem.batch, problem.kv_len);
            let strides = [token * keys as i64, token, head, 1];
            raw_dims(problem.dtype, &[batch, keys, heads, dim], Some(&strides))
        }
    };
    Some(Tensor::on_device(address as *const u8, dims.ok()?, DeviceMemory::default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{COUNTER_BYTES, Launches};
    use crate::machine::{Device, Machine};
    use crate::variant::Window;

    fn base() -> Problem {
        Problem {
            batch: 2,
            query_heads: 32,
            kv_heads: 8,
            query_len: 2048,
            kv_len: 4096,
            key_dtype: DType::E4M3,
            value_dtype: DType::E4M3,
            ..Problem::new(DType::BF16, 128)
        }
    }

    fn launches(problem: &Problem, machine: &str) -> Launches {
        let machine = machine.parse::<Machine>().unwrap();
        let Device::Cuda(facts) = &machine.device else { unreachable!("a GPU") };
        crate::cuda::select::select(problem, facts, &machine).unwrap().backend
    }

    /// The module that reads the copies, if heads share scales.
    fn module(problem: &Problem) -> Option<&'static str> {
        Some(launches(problem, "h200").widened?.shared?.specialized.launch.module)
    }

    /// The same, if it takes more of each key.
    fn extended_module(problem: &Problem) -> Option<&'static str> {
        Some(launches(problem, "h200").widened?.extended?.specialized.launch.module)
    }

    #[test]
    fn many_rows_over_codes_read_a_copy() {
        assert_eq!(module(&base()), Some("prefill_bf16_128_128_plain_sm90"));
        let ampere = launches(&base(), "a100").widened.unwrap();
        assert_eq!(
            ampere.shared.unwrap().specialized.launch.module,
            "prefill_bf16_128_128_plain_sm80"
        );
        let mut capped = base();
        capped.variant.softcap = true;
        assert_eq!(module(&capped), Some("prefill_bf16_128_128_fallback_sm90"));
        // One side in the type of queries, and pages.
        let paged = KvStorage::Paged { block_size: 16 };
        assert!(module(&Problem { keys: paged, value_dtype: DType::BF16, ..base() }).is_some());
        // Keys that are not exact in 16 bits, or have no use of a copy.
        for other in [DType::BF16, DType::F16, DType::Q8_0] {
            assert_eq!(module(&Problem { key_dtype: other, value_dtype: other, ..base() }), None);
        }
    }

    #[test]
    fn keys_that_are_not_exact_become_two_elements() {
        let over = |dtype, key_dtype, value_dtype| Problem {
            key_dtype,
            value_dtype,
            out_dtype: dtype,
            dtype,
            ..base()
        };
        for (dtype, keys, values) in [
            (DType::BF16, DType::Q8_0, DType::Q8_0),
            (DType::BF16, DType::Q4_0, DType::E4M3),
            (DType::BF16, DType::F16, DType::BF16),
            (DType::BF16, DType::F32, DType::F32),
            (DType::F16, DType::Q8_0, DType::Q4_0),
            (DType::F16, DType::BF16, DType::BF16),
            (DType::F16, DType::I8, DType::I8),
        ] {
            let problem = over(dtype, keys, values);
            let name = format!("prefill_{dtype}_128_128_terms_plain_sm90");
            assert_eq!(extended_module(&problem), Some(name.as_str()), "{keys} {values}");
            let widened = launches(&problem, "h200").widened.unwrap();
            assert_eq!(widened.values_at - widened.keys_at, 2 * 2 * 4096 * 8 * 128 * 2);
            assert_eq!(widened.units.is_some(), dtype == DType::F16);
        }
        // Few rows divide their keys among CTAs.
        let blocks = over(DType::BF16, DType::Q8_0, DType::Q8_0);
        assert!(
            launches(&Problem { batch: 1, query_len: 17, ..blocks.clone() }, "h200")
                .widened
                .is_none()
        );
        let ampere = launches(&blocks, "a100").widened.unwrap().extended.unwrap();
        assert_eq!(ampere.specialized.launch.module, "prefill_bf16_128_128_terms_fallback_sm80");
        // Hopper has that for operands that TMA cannot read.
        let hopper = launches(&blocks, "h200").widened.unwrap().extended.unwrap();
        assert_eq!(hopper.fallback.launch.module, ampere.specialized.launch.module);
        // The log-sum-exp of some keys needs three elements of bf16.
        let with_lse =
            |dtype, keys| extended_module(&Problem { lse: true, ..over(dtype, keys, DType::I8) });
        let two = ["prefill_bf16_128_128_terms_plain_sm90", "prefill_f16_128_128_terms_plain_sm90"];
        for keys in [DType::Q4_0, DType::F16] {
            assert_eq!(with_lse(DType::BF16, keys), Some(two[0]));
        }
        for keys in [DType::Q8_0, DType::F32] {
            let three = Some("prefill_bf16_128_128_terms3_plain_sm90");
            assert_eq!(with_lse(DType::BF16, keys), three);
            assert_eq!(with_lse(DType::F16, keys), Some(two[1]));
        }
    }

    #[test]
    fn scales_of_any_granularity_are_copied_too() {
        let over = |key_dtype, value_dtype| Problem { key_dtype, value_dtype, ..base() };
        let scaled = Some("prefill_bf16_128_128_scaled_plain_sm90");
        assert_eq!(extended_module(&base()), scaled);
        let mut capped = base();
        capped.variant.softcap = true;
        let fallback = Some("prefill_bf16_128_128_scaled_fallback_sm90");
        assert_eq!(extended_module(&capped), fallback);
        assert_eq!(extended_module(&Problem { head_dim: 120, ..base() }), fallback);
        // Values in blocks are multiplied by their scales.
        let plain = Some("prefill_bf16_128_128_plain_sm90");
        for keys in [DType::BF16, DType::I8] {
            let problem = over(keys, DType::Q4_0);
            let extended = (keys == DType::I8).then_some(scaled).flatten();
            assert_eq!((module(&problem), extended_module(&problem)), (plain, extended));
        }
        // Other GPUs take two elements.
        let ampere = launches(&base(), "a100").widened.unwrap().extended.unwrap();
        assert_eq!(ampere.specialized.launch.module, "prefill_bf16_128_128_terms_fallback_sm80");
        // The kernel over codes with their scales is that for any formats, or `mma.sync`.
        let short = |head_dim| Problem {
            query_len: 30,
            head_dim,
            value_dim: head_dim,
            ..over(DType::I8, DType::I8)
        };
        assert_eq!(rows_per_key(&short(128)), 120);
        assert_eq!(extended_module(&short(128)), None);
        assert_eq!(extended_module(&short(256)), Some("prefill_bf16_256_256_scaled_plain_sm90"));
    }

    #[test]
    fn few_rows_read_the_cache() {
        let rows = |query_len| rows_per_key(&Problem { query_len, ..base() });
        assert_eq!([rows(2048), rows(256)], [8192, 1024]);
        assert!(module(&Problem { query_len: 256, ..base() }).is_none());
        let mut causal = Problem { query_len: 4096, ..base() };
        causal.variant.causal = true;
        assert_eq!(rows_per_key(&causal), 8192);
        // Rows of a window see few of the keys that are copied for all of them.
        causal.variant.window = Window { left: Some(127), right: None };
        assert_eq!(rows_per_key(&causal), 4 * 4096 * 128 / 4096);
        assert_eq!(rows_per_key(&Problem { kv_len: 0, ..base() }), 0);
        assert_eq!(rows_per_key(&Problem { batch: 0, ..base() }), 8192);
    }

    #[test]
    fn copies_are_in_the_workspace_and_bounded() {
        let planned = launches(&base(), "h200");
        let copies = planned.widened.unwrap();
        let (side, scales) = (2 * 4096 * 8 * 128 * 2, 2 * 8 * (4096 + MAX_TILE_KEYS) * 4);
        let scales_at = COUNTER_BYTES + 2 * side;
        assert_eq!(
            [copies.keys_at, copies.values_at, copies.scales_at, copies.end],
            [COUNTER_BYTES, COUNTER_BYTES + side, scales_at, scales_at + scales]
        );
        // Behind them are partial states, for as many tiles as there are CTAs.
        assert_eq!(planned.workspace_bytes, copies.end + PARTIAL_BYTES);
    }

    const PARTIAL_BYTES: usize = 132 * 128 * (4 * 128 + 8);

    #[test]
    fn large_copies_are_made_in_parts() {
        let over = |kv_len| Problem { batch: 1, kv_len, ..base() };
        let heads = |problem: &Problem| {
            let widened = launches(problem, "h200").widened?;
            Some((widened.scales_at - widened.values_at) / (problem.kv_len * 128 * 2))
        };
        assert_eq!(
            [256_000, 256_001, 600_000].map(|len| heads(&over(len))),
            [Some(8), Some(4), Some(3)]
        );
        let halves = launches(&over(300_000), "h200");
        assert!(halves.workspace_bytes < 4 * 300_000 * 130 * 4 + PARTIAL_BYTES);
        let blocks = |kv_len| Problem { key_dtype: DType::Q8_0, ..over(kv_len) };
        assert_eq!([170_000, 171_000].map(|len| heads(&blocks(len))), [Some(8), Some(4)]);
        // Those of one head are too large, or of any.
        assert_eq!(heads(&over(2_048_001)), None);
        assert_eq!(heads(&Problem { batch: usize::MAX / 8, kv_len: 1 << 30, ..base() }), None);
        // The tile map of a mask is of all heads.
        let mut masked = over(300_000);
        masked.variant.mask = Some(DType::Bool);
        assert_eq!(heads(&masked), None);
    }
}
