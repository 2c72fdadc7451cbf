//! Prefill over codes on a copy of keys and values in the type of queries: a kernel makes the copy
//! in the workspace, and the kernels over elements read it. Many rows read each key, so that one
//! conversion for all of them is less work than one per tile of rows.
//!
//! Codes are exact in the copy without their scales. Scales that heads share join scores and
//! outputs. Other scales of keys are copied beside them, and multiply scores; other scales of
//! values multiply the values, which are rounded.

use super::prefill;
use super::registry::{Cache, Family};
use super::{Launch, Prefill, PrefillKernel, Widened};
use crate::dtype::DType;
use crate::machine::CudaFacts;
use crate::problem::{KvStorage, Problem};
use crate::variant::Values;
#[cfg(feature = "cuda")]
use {
    super::DeviceMemory,
    super::lists::kv_tensor,
    super::operands::{attention, cache_parameters, head_scales, is_per_head, reads_16_bytes},
    crate::kernel_parameters::count,
    crate::params::{AttentionParameters, CacheParameters, HeadScales, KeyScales, WidenParameters},
    crate::problem::{Inputs, Outputs},
    crate::tensor::{Tensor, raw_dims},
    crate::variant::Attention,
};

/// The largest copy of keys and values: those of 131072 tokens of 8 heads at head dim 128.
const MAX_COPY_BYTES: usize = 512 << 20;

/// Alignment of the copies in the workspace, in bytes: of a line of memory.
const COPY_ALIGNMENT: usize = 128;

/// Threads per CTA and keys per CTA, as in `widen.cu`.
const THREADS: u32 = 256;
const BLOCK_KEYS: usize = 64;

/// Keys of the largest K tile of prefill.
const MAX_TILE_KEYS: usize = 128;

/// Rows that read each copied key from which on a copy pays, as measured on an H200 (docs/perf):
/// beside the kernels for codes that multiply by WGMMA, which convert them while others multiply,
/// at head dims up to 128 and above; beside the kernel for any formats that does, if heads share
/// scales and if not; and, estimated from bytes and operations, beside those with `mma.sync`.
const ROWS_BESIDE_CODES: usize = 1200;
const ROWS_BESIDE_CODES_WIDE: usize = 600;
const ROWS_BESIDE_STORED: usize = 256;
const ROWS_BESIDE_STORED_SCALED: usize = 128;
const ROWS_BESIDE_SM80: usize = 100;

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

/// Bytes of the copies of keys and of values of this many tokens.
fn copy_bytes(problem: &Problem, tokens: usize) -> [usize; 2] {
    let token_bytes = |dim| problem.kv_heads * row_elements(dim) * problem.dtype.size();
    [problem.head_dim, problem.value_dim].map(|dim| tokens.saturating_mul(token_bytes(dim)))
}

/// Elements from head to head of the scales of keys: prefill reads whole K tiles.
fn scale_stride(problem: &Problem) -> usize {
    problem.kv_len.saturating_add(MAX_TILE_KEYS).next_multiple_of(4)
}

/// Prefill over a copy, if that is faster than the kernels that read codes; the copies and the tile
/// maps of a mask are behind the first `start` bytes of the workspace.
pub(super) fn select(
    problem: &Problem,
    beside: &Prefill,
    facts: &CudaFacts,
    max_decode_len: usize,
    start: usize,
) -> Option<Widened> {
    let rows = rows_per_key(problem);
    let takes_shared = (holds_codes(problem) || takes_scales(problem))
        && rows >= min_rows(problem, &beside.specialized);
    let on_copy = widened(problem);
    let takes_scaled = takes_scales(problem) && rows >= min_rows_scaled(beside);
    let scaled = takes_scaled.then(|| prefill::find_scaled(&on_copy, facts)).flatten();
    if !takes_shared && scaled.is_none() {
        return None;
    }
    let [key_bytes, value_bytes] = copy_bytes(problem, planned_tokens(problem));
    if key_bytes.saturating_add(value_bytes) > MAX_COPY_BYTES {
        return None;
    }
    let scale_bytes = problem.batch.checked_mul(problem.kv_heads)?;
    let scale_bytes = scale_bytes.checked_mul(4 * scale_stride(problem))?;
    let behind =
        |at: usize, bytes: usize| at.checked_add(bytes)?.checked_next_multiple_of(COPY_ALIGNMENT);
    let keys_at = behind(start, 0)?;
    let values_at = behind(keys_at, key_bytes)?;
    let scales_at = behind(values_at, value_bytes)?;
    let end = behind(scales_at, if scaled.is_some() { scale_bytes } else { 0 })?;
    let shared = takes_shared.then(|| prefill::select(&on_copy, facts, max_decode_len, end));
    let shared = shared.flatten();
    let scaled = scaled.map(|kernel| {
        prefill::with_kernels([kernel; 2], None, &on_copy, facts, max_decode_len, end)
    });
    if shared.is_none() && scaled.is_none() {
        return None;
    }
    let blocks = problem.batch.checked_mul(problem.kv_len.div_ceil(BLOCK_KEYS))?.checked_mul(2)?;
    let launch = Launch {
        module: Family::Widen.name(),
        entry: "widen",
        grid: [i32::try_from(blocks).ok()? as u32, 1, 1],
        threads: THREADS,
        ..Launch::default()
    };
    Some(Widened { launch, keys_at, values_at, scales_at, end, shared, scaled })
}

impl Prefill {
    /// The fastest launch over copies, if there are any; else this one.
    pub(super) fn fastest<'a>(&'a self, widened: &'a Option<Widened>) -> &'a Prefill {
        widened.as_ref().and_then(|widened| widened.prefills().next()).unwrap_or(self)
    }
}

impl Widened {
    /// Prefill over the copies, in the order of speed.
    pub(super) fn prefills(&self) -> impl Iterator<Item = &Prefill> {
        self.shared.iter().chain(&self.scaled)
    }
}

/// Whether a copy holds keys and values as they are, without the scales of codes: they are exact in
/// the type of queries, one of 16 bits, and not all are stored in it.
fn holds_codes(problem: &Problem) -> bool {
    matches!(problem.dtype, DType::F16 | DType::BF16)
        && problem.rotary_dim == 0
        && prefill::is_exact(problem, problem.key_dtype)
        && prefill::is_exact(problem, problem.value_dtype)
        && !prefill::has_elements(problem)
}

/// Whether a copy may hold values that are multiplied by their scales, and rounded to the type of
/// queries: codes or blocks. The range of f16 is too small.
fn takes_scales(problem: &Problem) -> bool {
    let holds_blocks = problem.rotary_dim == 0
        && prefill::is_exact(problem, problem.key_dtype)
        && problem.value_dtype.is_block();
    problem.dtype == DType::BF16 && (holds_codes(problem) || holds_blocks)
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

/// Rows from which on a copy pays beside that kernel, if heads share scales.
fn min_rows(problem: &Problem, kernel: &PrefillKernel) -> usize {
    match (kernel.tensor_maps, kernel.cache) {
        (true, Cache::Bytes) if problem.head_dim > 128 => ROWS_BESIDE_CODES_WIDE,
        (true, Cache::Bytes) => ROWS_BESIDE_CODES,
        (true, _) => ROWS_BESIDE_STORED,
        (false, _) => ROWS_BESIDE_SM80,
    }
}

/// Rows from which on a copy pays, if heads do not share scales.
fn min_rows_scaled(beside: &Prefill) -> usize {
    let kernel = match beside.specialized.head_scales {
        true => beside.any_scales.unwrap_or(beside.fallback),
        false => beside.specialized,
    };
    if kernel.tensor_maps { ROWS_BESIDE_STORED_SCALED } else { ROWS_BESIDE_SM80 }
}

/// The call of the kernel that makes the copies.
#[cfg(feature = "cuda")]
pub(super) struct WidenCall {
    pub launch: Launch,
    pub attention: AttentionParameters,
    pub parameters: WidenParameters,
    pub cache: CacheParameters,
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
    /// The copies of these operands in a workspace at that address; `None` if no kernel takes their
    /// scales, or the copies would be larger than planned.
    pub(super) fn copies<'a, 'p>(
        &'p self,
        problem: &Problem,
        inputs: &Inputs<'a, DeviceMemory>,
        outputs: &Outputs<DeviceMemory>,
        workspace: u64,
    ) -> Option<Copies<'a, 'p>> {
        let tokens = match problem.keys {
            KvStorage::Ragged => inputs.k.shape()[0],
            KvStorage::Batched | KvStorage::Paged { .. } => planned_tokens(problem),
        };
        let [key_bytes, value_bytes] = copy_bytes(problem, tokens);
        let fits = self.keys_at.saturating_add(key_bytes) <= self.values_at
            && self.values_at.saturating_add(value_bytes) <= self.scales_at;
        if !fits || problem.kv_len == 0 || inputs.k.is_empty() {
            return None;
        }
        let (of_keys, of_values) = (&inputs.attention.k_scales, inputs.value_scales());
        let shares_values = is_per_head(of_values) && !problem.value_dtype.is_block();
        if !shares_values && !takes_scales(problem) {
            return None;
        }
        let shared = self.shared.as_ref().filter(|_| is_per_head(of_keys));
        // The cache's kernels are faster than copies with a scale per key, if heads share all.
        let prefill = match is_per_head(of_keys) && shares_values {
            true => shared?,
            false => shared.or(self.scaled.as_ref().filter(|_| of_keys.is_some()))?,
        };
        let shares_keys = shared.is_some();
        let copy = |at: usize, dim: usize| copy_of(problem, tokens, workspace + at as u64, dim);
        let k = copy(self.keys_at, problem.head_dim)?;
        let v = copy(self.values_at, problem.value_dim)?;
        let of_heads =
            |scales, shares: bool| if shares { head_scales(scales) } else { HeadScales::default() };
        let key_scales = of_heads(of_keys, shares_keys);
        let value_scales = of_heads(of_values, shares_values);
        let each_key = match of_keys {
            Some(_) if !shares_keys => KeyScales {
                pointer: workspace + self.scales_at as u64,
                stride: scale_stride(problem) as i64,
            },
            _ => KeyScales::default(),
        };
        let key_blocks = problem.kv_len.div_ceil(BLOCK_KEYS);
        let parameters = WidenParameters {
            keys: kv_tensor(&k),
            values: kv_tensor(&v),
            each_key,
            min_query_len: prefill.min_query_len,
            key_blocks: count(key_blocks),
            aligned: [&inputs.k, &inputs.v].into_iter().all(reads_16_bytes).into(),
            scale_values: (!shares_values).into(),
        };
        let call = WidenCall {
            launch: self.launch.with_ctas((2 * problem.batch * key_blocks) as u32),
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

/// The tensor of a copy of this many tokens.
#[cfg(feature = "cuda")]
fn copy_of<'a>(
    problem: &Problem,
    tokens: usize,
    address: u64,
    dim: usize,
) -> Option<Tensor<'a, DeviceMemory>> {
    let heads = problem.kv_heads;
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

    /// The same, if they do not.
    fn scaled_module(problem: &Problem) -> Option<&'static str> {
        Some(launches(problem, "h200").widened?.scaled?.specialized.launch.module)
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
        // What is not exact in 16 bits, or has no use of a copy.
        for other in [DType::BF16, DType::F16, DType::Q8_0] {
            assert_eq!(module(&Problem { key_dtype: other, value_dtype: other, ..base() }), None);
        }
    }

    #[test]
    fn scales_of_any_granularity_are_copied_too() {
        let over = |key_dtype, value_dtype| Problem { key_dtype, value_dtype, ..base() };
        let scaled = Some("prefill_bf16_128_128_scaled_plain_sm90");
        assert_eq!(scaled_module(&base()), scaled);
        let mut capped = base();
        capped.variant.softcap = true;
        let fallback = Some("prefill_bf16_128_128_scaled_fallback_sm90");
        assert_eq!(scaled_module(&capped), fallback);
        assert_eq!(scaled_module(&Problem { head_dim: 120, ..base() }), fallback);
        // Values in blocks are multiplied by their scales.
        let plain = Some("prefill_bf16_128_128_plain_sm90");
        for keys in [DType::BF16, DType::I8] {
            let problem = over(keys, DType::Q4_0);
            assert_eq!((module(&problem), scaled_module(&problem)), (plain, scaled));
        }
        // Blocks have several scales per key, the range of f16 is too small, and other GPUs have no
        // kernel.
        assert_eq!(scaled_module(&over(DType::Q8_0, DType::Q8_0)), None);
        assert_eq!(scaled_module(&Problem { dtype: DType::F16, ..base() }), None);
        assert!(launches(&base(), "a100").widened.unwrap().scaled.is_none());
        // The kernel over codes with their scales is that for any formats, or `mma.sync`.
        let short = |head_dim| Problem {
            query_len: 30,
            head_dim,
            value_dim: head_dim,
            ..over(DType::I8, DType::I8)
        };
        assert_eq!(rows_per_key(&short(128)), 120);
        assert_eq!(scaled_module(&short(128)), None);
        assert_eq!(scaled_module(&short(256)), Some("prefill_bf16_256_256_scaled_plain_sm90"));
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
        assert_eq!(planned.workspace_bytes, copies.end);
        let of_bytes = |kv_len| module(&Problem { batch: 1, kv_len, ..base() });
        assert!(of_bytes(131072).is_some() && of_bytes(131073).is_none());
        assert!(module(&Problem { batch: usize::MAX / 8, kv_len: 1 << 30, ..base() }).is_none());
    }
}
