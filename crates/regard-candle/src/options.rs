//! Everything about an attention call besides queries, keys and values, in candle's tensors.

use crate::view::{refuse, wrap};
use candle_core::{DType, Device, Layout, Result, Storage, StorageRef, Tensor};
use regard::paged::Step;
use regard::{Inputs, Memory, Plan, Window};
use std::sync::Arc;

/// Where a sequence's first query row stands among its keys.
#[derive(Debug, Clone, Default)]
pub enum QueryOffset {
    /// `kv_len - q_len`: the new tokens are the last ones of the cache.
    #[default]
    BottomRight,
    /// The same position for every sequence; 0 gives the top-left alignment, negative ones make the first rows empty.
    Same(i64),
    /// One position a sequence: `[B]`, `i32`.
    PerSequence(Tensor),
}

/// Which of candle's threads compute attention.
///
/// Candle keeps two pools, and the threads of either spin for a while when their work is done. Attention is fastest on the pool that the matrix
/// products before it ran on: on the other one it finds the cores taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Threads {
    /// Rayon's global pool, as candle's float matrix products.
    #[default]
    Rayon,
    /// Candle's barrier pool, as its quantised matrix products.
    Barrier,
}

/// Everything about an attention call besides queries, keys and values: regard's `Attention` with candle's tensors, which lie on the device
/// of the queries.
///
/// `B` is the number of sequences, `Hq` of query heads, `Lq` the longest query length, `Lk` the key capacity of a sequence. Where a
/// table says `i32`, candle's `u32` does too. The default is full (not causal) attention over dense sequences with scale 1/sqrt(head dim).
#[derive(Debug, Clone, Default)]
pub struct Attention {
    /// Multiplies the dot product; `None` is 1/sqrt(Dk).
    pub scale: Option<f32>,
    /// Keep only keys at or before the query's position.
    pub causal: bool,
    /// Keep only keys near the query's position.
    pub window: Window,
    /// Bounds scores smoothly: `cap * tanh(score / cap)`, before any bias. Positive and finite.
    pub softcap: Option<f32>,
    /// The position of each sequence's first query row.
    pub q_offset: QueryOffset,
    /// `[B, Hq, Lq, Lk]`, any of them 1 to broadcast. `u8`: keep where not 0. Floating: added to the score as it stands; minus infinity
    /// hides.
    pub mask: Option<Tensor>,
    /// `[Hq]` `f32`: `-slope * |distance|` is added to the score.
    pub alibi_slopes: Option<Tensor>,
    /// `[Hq]` `f32`: one more logit in each head's denominator.
    pub sinks: Option<Tensor>,
    /// `[B, Lq, ceil(Lq / 32)]` `i32`: which of the sequence's new tokens (its last `q_len` keys) each row sees, bit `t % 32` of
    /// word `t / 32`; earlier keys are seen by all. Replaces `causal`.
    pub tree_mask: Option<Tensor>,
    /// `[B]` `i32`: keys in use, at most the sequence's capacity. `None` uses all.
    pub kv_lens: Option<Tensor>,
    /// `[B + 1]` `i32`, from 0 up: queries are `[total, Hq, D]` and sequence b owns rows `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`.
    pub cu_seqlens_q: Option<Tensor>,
    /// `[B + 1]` `i32`: likewise for keys and values `[total, Hkv, D]`.
    pub cu_seqlens_k: Option<Tensor>,
    /// `[B, max_blocks]` `i32`: keys and values are pools `[blocks, block_size, Hkv, D]`, and slot j of sequence b is slot
    /// `j % block_size` of block `block_table[b, j / block_size]`. Needs `kv_lens`. Entries that no row can see are never read through.
    pub block_table: Option<Tensor>,
    /// A row's bits depend on nothing but its own query and keys: not on the batch, the chunking or the page layout.
    pub batch_invariant: bool,
    /// The type of the result: that of the queries (`None`) or `f32`, which is what the kernel holds before it rounds.
    pub out_dtype: Option<DType>,
    /// Which of candle's threads do the work.
    pub threads: Threads,
    /// A plan made beforehand ([`plan`](crate::plan)), for every layer that has these shapes. Without one, each call plans for
    /// itself, which takes microseconds.
    pub plan: Option<Arc<Plan>>,
}

impl Attention {
    /// Causal attention, the new tokens last; everything else at its default.
    pub fn causal() -> Attention {
        Attention { causal: true, ..Attention::default() }
    }

    /// Causal attention of a finished step over a paged cache: queries are `[tokens, Hq, D]`, keys and values the pools.
    ///
    /// # Errors
    /// If the device cannot hold the tables.
    pub fn from_step(step: &Step, device: &Device) -> Result<Attention> {
        let batch = step.sequences().len();
        let width = step.block_table().len().checked_div(batch).unwrap_or(0);
        Ok(Attention {
            cu_seqlens_q: Some(Tensor::new(step.cu_seqlens_q(), device)?),
            kv_lens: Some(Tensor::new(step.kv_lens(), device)?),
            block_table: Some(Tensor::from_slice(step.block_table(), (batch, width), device)?),
            ..Attention::causal()
        })
    }
}

/// The kind of memory that a custom op's operands lie in.
pub(crate) trait Place {
    /// Candle's name for it.
    type Storage;
    /// regard's.
    type Memory: Memory;
    /// What has to live as long as a view is used.
    type Guard<'a>
    where
        Self: 'a;

    /// How errors call it.
    const NAME: &'static str;

    /// The storage, if it is of this kind.
    fn storage(storage: &Storage) -> Option<&Self::Storage>;

    /// The operand named `argument`, where it lies.
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
struct Held<'a> {
    argument: &'static str,
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Held<'a> {
    fn new(argument: &'static str, tensor: Option<&'a Tensor>) -> Option<Held<'a>> {
        let (storage, layout) = tensor?.storage_and_layout();
        Some(Held { argument, storage, layout })
    }

    fn storage<P: Place>(&self) -> Result<&P::Storage> {
        P::storage(&self.storage).ok_or_else(|| {
            let found = match &*self.storage {
                Storage::Cpu(_) => "on the CPU",
                Storage::Cuda(_) => "on a CUDA device",
                Storage::Metal(_) => "on a Metal device",
            };
            refuse(self.argument, found, &format!("{}, where q is", P::NAME))
        })
    }
}

impl Attention {
    /// Calls `work` with regard's form of these operands, all storages held meanwhile.
    pub(crate) fn with_inputs<P: Place, R>(
        &self,
        place: &P,
        [q, k, v]: [Operand<P>; 3],
        work: impl FnOnce(&Inputs<P::Memory>) -> Result<R>,
    ) -> Result<R> {
        let offsets = match &self.q_offset {
            QueryOffset::PerSequence(offsets) => Some(offsets),
            QueryOffset::BottomRight | QueryOffset::Same(_) => None,
        };
        let held = [
            Held::new("q_offset", offsets),
            Held::new("mask", self.mask.as_ref()),
            Held::new("alibi_slopes", self.alibi_slopes.as_ref()),
            Held::new("sinks", self.sinks.as_ref()),
            Held::new("tree_mask", self.tree_mask.as_ref()),
            Held::new("kv_lens", self.kv_lens.as_ref()),
            Held::new("cu_seqlens_q", self.cu_seqlens_q.as_ref()),
            Held::new("cu_seqlens_k", self.cu_seqlens_k.as_ref()),
            Held::new("block_table", self.block_table.as_ref()),
        ];
        let mut guards = Vec::new();
        let mut views = [None; 9];
        for (view, held) in views.iter_mut().zip(&held) {
            if let Some(held) = held {
                let (tensor, guard) =
                    place.view(held.argument, held.storage::<P>()?, held.layout)?;
                *view = Some(tensor);
                guards.push(guard);
            }
        }
        let [
            offsets,
            mask,
            alibi_slopes,
            sinks,
            tree_mask,
            kv_lens,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
        ] = views;
        let attention = regard::Attention {
            scale: self.scale,
            causal: self.causal,
            window: self.window,
            softcap: self.softcap,
            q_offset: match (&self.q_offset, offsets) {
                (_, Some(offsets)) => regard::QueryOffset::PerSequence(offsets),
                (QueryOffset::Same(offset), _) => regard::QueryOffset::Same(*offset),
                _ => regard::QueryOffset::BottomRight,
            },
            mask,
            alibi_slopes,
            sinks,
            tree_mask,
            kv_lens,
            cu_seqlens_q,
            cu_seqlens_k,
            block_table,
            batch_invariant: self.batch_invariant,
        };
        let mut operand = |argument, (storage, layout)| {
            let (tensor, guard) = place.view(argument, storage, layout)?;
            guards.push(guard);
            Ok::<_, candle_core::Error>(tensor)
        };
        let (q, k, v) = (operand("q", q)?, operand("k", k)?, operand("v", v)?);
        work(&Inputs::new(q, k, v, attention))
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
