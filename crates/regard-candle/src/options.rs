//! Everything about an attention call besides queries, keys and values, in candle's tensors.

use crate::view::{refuse, wrap};
use candle_core::{DType, Device, Layout, Result, Storage, StorageRef, Tensor};
use regard::paged::{Step, TableLayout};
use regard::{Inputs, Memory, Plan};
use std::sync::Arc;

/// Candle's thread pool that computes attention.
///
/// Candle keeps two pools, and the threads of either spin for a while when their work is done.
/// Attention is fastest on the pool that the matrix products before it ran on: on the other one it
/// finds the cores taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Threads {
    /// Rayon's global pool, as candle's float matrix products.
    #[default]
    Rayon,
    /// Candle's barrier pool, as its quantized matrix products.
    Barrier,
}

/// Everything about an attention call besides queries, keys and values: regard's options with
/// candle's tensors, on the device of the queries. A boolean mask is `u8`, and tables may be
/// candle's `u32` instead of `i32`.
pub type Attention = regard::Attention<Tensor>;

/// Execution of calls, and facts of the operands that candle's types do not hold. The functions
/// of the crate use the default.
#[derive(Debug, Clone, Default)]
pub struct Execution {
    /// The type of the result: that of the queries (`None`) or `f32`, which is what the kernel
    /// holds before it rounds.
    pub out_dtype: Option<DType>,
    /// Candle's thread pool that does the work.
    pub threads: Threads,
    /// Formats of `u8` keys and values.
    pub format: CacheFormat,
    /// Rows of the longest sequence of a ragged batch, at most, on a device, whose lengths the host
    /// does not read; `None` stands for all rows of the batch. It decides whether the kernels for
    /// few rows are used, and rows beyond it are zeros. Of a step it is
    /// [`Step::max_query_len`](regard::paged::Step::max_query_len).
    pub max_query_len: Option<usize>,
    /// Keys of the longest sequence of ragged keys, likewise.
    pub max_kv_len: Option<usize>,
    /// Whether every row of a ragged batch belongs to a sequence, and none is beyond
    /// `max_query_len`, as in a step ([`Execution::of_step`]). A GPU then need not fill the results
    /// with zeros first, which is one launch less per call. If it is set and not so, those rows of
    /// the results have any values.
    pub covers_all_rows: bool,
    /// A plan made beforehand ([`Execution::plan`]), for every layer that has these shapes. Without
    /// one, each call plans for itself, which takes microseconds; on NVIDIA GPUs it finds the plan
    /// of an earlier call with the same shapes and options.
    pub plan: Option<Arc<Plan>>,
}

/// The format of `u8` keys and values, which candle has no types for: `e4m3`, `e5m2` and `i8` are
/// one byte per value, and need [`k_scales`](regard::Attention::k_scales) and
/// [`v_scales`](regard::Attention::v_scales); `q8_0` and `q4_0` are blocks of 32 values in 34 and
/// 18 bytes, so that a head dim of 128 is a last dimension of 136 or 72 bytes. Candle's `f8e4m3`
/// needs no format: it is `e4m3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheFormat {
    /// Keys; `None` if they are not `u8`.
    pub keys: Option<regard::DType>,
    /// Values, likewise.
    pub values: Option<regard::DType>,
}

impl CacheFormat {
    /// Keys and values in one format.
    pub fn new(format: regard::DType) -> CacheFormat {
        CacheFormat { keys: Some(format), values: Some(format) }
    }

    /// The format of an operand's bytes; `None` for those that have none.
    pub(crate) fn for_argument(&self, argument: &str) -> Option<regard::DType> {
        match argument {
            "k" | "rotary_k" | "second_k" | "key_pool" => self.keys,
            "v" | "second_v" | "value_pool" => self.values,
            _ => None,
        }
    }
}

/// Causal attention of a finished step over a paged cache: queries are `[tokens, Hq, D]`, keys and
/// values the pools. Its tables are one upload.
///
/// # Errors
/// If the device cannot hold the tables.
pub fn attention_of_step(step: &Step, device: &Device) -> Result<Attention> {
    StepTables::upload(step, device)?.attention(&step.table_layout())
}

/// [`attention_of_step`] over tables that the caller has brought to the device:
/// [`Step::pack`](regard::paged::Step::pack) by that layout, in one vector of i32 or u32. An engine
/// that captures its steps in CUDA graphs overwrites the vector before each replay. Candle does
/// that to a vector of u32 ([`Tensor::slice_set`]).
///
/// # Errors
/// If the vector is not as long as the layout.
pub fn attention_of_tables(packed: &Tensor, layout: &TableLayout) -> Result<Attention> {
    if packed.dims() != [layout.len()] {
        let found = format!("of shape {:?}", packed.dims());
        return Err(refuse("packed", found, &format!("[{}]", layout.len())));
    }
    StepTables(packed.clone()).attention(layout)
}

/// [`attention_of_step`] with the prefix groups of the step: sequences that share pages read them
/// together, with the same results within the tolerance. For steps that found groups
/// ([`Step::has_prefix_groups`]); a plan made for either kind does not serve the other. Its tables
/// are one upload.
///
/// # Errors
/// If the device cannot hold the tables.
pub fn grouped_attention_of_step(step: &Step, device: &Device) -> Result<Attention> {
    let layout = step.table_layout();
    let tables = StepTables::upload(step, device)?;
    Ok(Attention {
        prefix_groups: Some(tables.part(layout.prefix_groups())?),
        prefix_lens: Some(tables.part(layout.prefix_lens())?),
        ..tables.attention(&layout)?
    })
}

/// The tables of a step on a device.
struct StepTables(Tensor);

impl StepTables {
    fn upload(step: &Step, device: &Device) -> Result<StepTables> {
        Ok(StepTables(Tensor::new(step.packed(), device)?))
    }

    fn part(&self, range: std::ops::Range<usize>) -> Result<Tensor> {
        self.0.narrow(0, range.start, range.len())
    }

    /// Causal attention over the pages.
    fn attention(&self, layout: &TableLayout) -> Result<Attention> {
        let (sequences, width) = (layout.sequences, layout.max_blocks);
        Ok(Attention {
            cu_seqlens_q: Some(self.part(layout.cu_seqlens_q())?),
            kv_lens: Some(self.part(layout.kv_lens())?),
            block_table: Some(self.part(layout.block_table())?.reshape((sequences, width))?),
            ..Attention::causal()
        })
    }
}

/// The kind of memory of a custom op's operands.
pub(crate) trait Place {
    /// Candle's name for it.
    type Storage;
    /// regard's.
    type Memory: Memory;
    /// A guard that must live as long as a view is used.
    type Guard<'a>
    where
        Self: 'a;

    /// Name in errors.
    const NAME: &'static str;

    /// The storage, if it is of this kind.
    fn storage(storage: &Storage) -> Option<&Self::Storage>;

    /// A view of the operand named `argument`.
    fn view<'a>(
        &'a self,
        argument: &str,
        storage: &'a Self::Storage,
        layout: &Layout,
    ) -> Result<(regard::Tensor<'a, Self::Memory>, Self::Guard<'a>)>;
}

/// One operand of a custom op: its memory, and the shape and strides of the tensor that was given.
pub(crate) type Operand<'a, P> = (&'a <P as Place>::Storage, &'a Layout);

/// A tensor of the options, its storage locked for reading.
pub(crate) struct Held<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Held<'a> {
    pub(crate) fn new(tensor: &'a Tensor) -> Held<'a> {
        let (storage, layout) = tensor.storage_and_layout();
        Held { storage, layout }
    }

    /// Its memory, if it is where `P` is.
    pub(crate) fn storage<P: Place>(&self, argument: &str) -> Result<&P::Storage> {
        P::storage(&self.storage).ok_or_else(|| {
            let found = match &*self.storage {
                Storage::Cpu(_) => "on the CPU",
                Storage::Cuda(_) => "on a CUDA device",
                Storage::Metal(_) => "on a Metal device",
            };
            refuse(argument, found, &format!("{}, where q is", P::NAME))
        })
    }

    #[cfg(feature = "metal")]
    pub(crate) fn layout(&self) -> &Layout {
        self.layout
    }

    /// A view of the tensor, under the name of an argument.
    #[cfg(any(feature = "cuda", feature = "metal"))]
    pub(crate) fn view<'b, P: Place>(
        &'b self,
        argument: &str,
        place: &'b P,
    ) -> Result<(regard::Tensor<'b, P::Memory>, P::Guard<'b>)> {
        place.view(argument, self.storage::<P>(argument)?, self.layout)
    }
}

/// Calls `work` with regard's form of these operands, all storages held meanwhile.
pub(crate) fn with_inputs<P: Place, R>(
    attention: &Attention,
    place: &P,
    [q, k, v]: [Operand<P>; 3],
    work: impl FnOnce(&Inputs<P::Memory>) -> Result<R>,
) -> Result<R> {
    let held = attention.as_ref().map(|_, tensor| Held::new(tensor));
    let mut guards = Vec::new();
    let mut operand = |argument, (storage, layout)| {
        let (tensor, guard) = place.view(argument, storage, layout)?;
        guards.push(guard);
        Ok::<_, candle_core::Error>(tensor)
    };
    let attention = held
        .as_ref()
        .try_map(|argument, held| operand(argument, (held.storage::<P>(argument)?, held.layout)))?;
    let (q, k, v) = (operand("q", q)?, operand("k", k)?, operand("v", v)?);
    work(&Inputs::new(q, k, v, attention))
}

impl Execution {
    /// The facts of a finished step, for [`PagedCache::attention`](crate::PagedCache::attention)
    /// and other attention over its tables ([`attention_of_step`]).
    pub fn of_step(step: &Step) -> Execution {
        let max_query_len = Some(step.max_query_len());
        Execution { max_query_len, covers_all_rows: true, ..Execution::default() }
    }

    /// The type of the result for queries of that type.
    pub(crate) fn out_dtype(&self, queries: regard::DType) -> Result<regard::DType> {
        match self.out_dtype {
            None => Ok(queries),
            Some(DType::F32) => Ok(regard::DType::F32),
            Some(DType::F16) => Ok(regard::DType::F16),
            Some(DType::BF16) => Ok(regard::DType::BF16),
            Some(other) => Err(refuse("out_dtype", other.as_str(), "that of q, or f32")),
        }
    }
}

impl Threads {
    /// This machine, with as many threads as that.
    pub(crate) fn machine(self) -> Result<regard::Machine> {
        let threads = match self {
            Threads::Rayon => rayon::current_num_threads(),
            Threads::Barrier => candle_core::utils::barrier_pool().n_workers() + 1,
        };
        Ok(regard::Machine::host().map_err(wrap)?.with_threads(threads))
    }
}
