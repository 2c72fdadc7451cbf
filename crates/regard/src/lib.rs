//! Fused attention for LLM inference: one description of the problem, one set of semantics, every
//! variant exact.
//!
//! ```
//! use regard::{Attention, Tensor, attention};
//!
//! // One sequence: 2 new tokens against a cache of 5, 4 query heads over 2 key/value heads,
//! // head dim 8.
//! let (q, k, v) = (vec![0.5f32; 2 * 4 * 8], vec![0.25f32; 5 * 2 * 8], vec![1.0f32; 5 * 2 * 8]);
//! let q = Tensor::new(&q, [1, 2, 4, 8])?; // [batch, sequence, head, dim]
//! let k = Tensor::new(&k, [1, 5, 2, 8])?;
//! let v = Tensor::new(&v, [1, 5, 2, 8])?;
//! let out: Vec<f32> = attention(q, k, v, &Attention::causal())?;
//! assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6));
//! # Ok::<(), regard::Error>(())
//! ```
//!
//! A problem without operands, to plan for and to ask whether something runs, is made step by step:
//!
//! ```
//! use regard::{Machine, Plan, Problem};
//!
//! let decode = Problem::default().with_heads(32, 8).with_lengths(64, 1, 8192).with_pages(16);
//! println!("{}", Plan::new(&decode, &"h200".parse::<Machine>()?)?.explain());
//! # Ok::<(), regard::Error>(())
//! ```
//!
//! [`Attention`] holds every variant: window, softcap, ALiBi, sinks, masks, trees, ragged batches,
//! paged caches, in any combination. An engine makes a [`Plan`] once and runs it many times without
//! allocating. `docs/semantics.md` defines the results, [`oracle`] computes them naively, and tests
//! compare every kernel with it.
#![warn(missing_docs)]

mod alibi;
mod append;
mod apple_chips;
mod backend;
pub mod cpu;
pub mod cuda;
mod dtype;
mod error;
mod expect;
pub mod format;
mod kernel_parameters;
mod level;
mod machine;
mod memory;
mod merge;
pub mod metal;
pub mod oracle;
pub mod paged;
#[doc(hidden)]
pub mod params;
mod plan;
mod positions;
mod problem;
pub mod quantize;
mod race;
mod select;
mod split;
pub mod state;
mod tensor;
mod tile_map;
mod variant;

pub use alibi::alibi_slopes;
pub use append::{Append, AppendLatent, AppendScales, Rotary};
pub use backend::select;
pub use dtype::{DType, Element, Float};
pub use error::{Error, Refusal};
pub use half::{bf16, f16};
pub use machine::{CpuFacts, CudaFacts, Device, Machine, MetalFacts};
pub use memory::{Host, Memory};
pub use merge::Merge;
pub use plan::Plan;
pub use positions::{KeyLayout, KeyOffset, KeyPositions, MAX_KEY_STRIDE, SequenceKeys, Shard};
pub use problem::{
    CACHE_DTYPES, Inputs, KeyLists, KvStorage, ListEntries, MAX_FACTOR, MAX_HEAD_DIM, MAX_LEN,
    Outputs, Problem, QueryStorage, Sequence,
};
pub use select::{Choice, Kernel};
pub use split::{INVARIANT_KEYS, Split};
pub use tensor::{Dims, MAX_RANK, Tensor, TensorMut};
pub use variant::{Attention, QueryOffset, Values, Variant, Window};

/// Attention of `q` over `k` and `v` on this machine's CPU, in a new contiguous vector of the shape
/// of `q` with `v`'s head dim.
///
/// `q` is `[B, Lq, Hq, Dk]`, `k` `[B, Lk, Hkv, Dk]`, `v` `[B, Lk, Hkv, Dv]`; ragged and paged forms
/// are described at [`Inputs`]. `T` is the type of the inputs, or `f32`. For many calls of one
/// shape make a [`Plan`]: it allocates once.
///
/// # Errors
/// If an operand breaks the contract; the message names it, its value and the allowed values.
pub fn attention<T: Float>(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention: &Attention<Tensor>,
) -> Result<Vec<T>, Error> {
    let inputs = Inputs::new(q, k, v, *attention);
    let value_dim = v.shape().last().copied().unwrap_or(0);
    let mut shape = [0; MAX_RANK];
    shape[..q.rank()].copy_from_slice(q.shape());
    if let Some(last) = q.rank().checked_sub(1) {
        shape[last] = value_dim;
    }
    let shape = &shape[..q.rank()];
    // Checked before anything is allocated: a view with stride 0 can claim any size.
    inputs.problem(T::DTYPE, false)?;
    let mut data = zeros("out", shape.iter().product(), T::ZERO)?;
    // SAFETY: `data` holds as many elements of `T` as the contiguous shape has (fewer than 2^61:
    // the problem was checked), outlives the view, and is not used until the run is over.
    let out = unsafe { TensorMut::from_raw(data.as_mut_ptr().cast(), T::DTYPE, shape, None)? };
    let mut outputs = Outputs { out, lse: None };
    let plan = Plan::for_operands(&inputs, &outputs)?;
    plan.run(&inputs, &mut outputs, &mut zeros("workspace", plan.workspace_bytes(), 0u8)?)?;
    Ok(data)
}

/// A vector of `len` elements, or an error if memory does not suffice.
fn zeros<T: Copy>(argument: &str, len: usize, zero: T) -> Result<Vec<T>, Error> {
    let mut data = Vec::new();
    if data.try_reserve_exact(len).is_err() {
        return Err(Error::argument(argument, format!("of {len} elements"), "what fits in memory"));
    }
    data.resize(len, zero);
    Ok(data)
}

/// The code of a page, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/mla.md")]
mod page_on_latent_attention {}

/// The code of a page, run as a test.
#[cfg(doctest)]
#[doc = include_str!("../docs/caches.md")]
mod page_on_caches {}
