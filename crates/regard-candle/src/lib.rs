//! [regard]'s fused attention on [candle]'s tensors.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use regard_candle::{Attention, attention};
//!
//! // One sequence: 2 new tokens against a cache of 5, 4 query heads over 2 key/value heads, head dim 8.
//! let q = Tensor::randn(0f32, 1., (1, 2, 4, 8), &Device::Cpu)?; // [batch, sequence, head, dim]
//! let k = Tensor::randn(0f32, 1., (1, 5, 2, 8), &Device::Cpu)?;
//! let v = Tensor::randn(0f32, 1., (1, 5, 2, 8), &Device::Cpu)?;
//! let out = attention(&q, &k, &v, &Attention::causal())?;
//! assert_eq!(out.dims(), [1, 2, 4, 8]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Tensors of f32, f16 or bf16, any strides with a unit innermost one: what `transpose`, `narrow` and `chunk` return is read
//! where it lies, and nothing is copied. Work runs on candle's own threads ([`Threads`]). What breaks the contract is an error that names the argument,
//! what it was and what is allowed. Every feature of regard is a field of [`Attention`]; what exactly is computed is written in regard's
//! `docs/semantics.md`.
//!
//! For a paged cache set [`block_table`](regard::Attention::block_table) and
//! [`kv_lens`](regard::Attention::kv_lens), and keep keys and values in a [`PagedCache`]. For
//! continuous batching [`attention_of_step`] takes both from a [`regard::paged::Step`]. The crate
//! `generate`, in regard's `examples` folder, serves a real model that way.
//!
//! # In the place of what you call now
//!
//! Queries, keys, values and the result are `[batch, sequence, head, dim]` here, as in candle-flash-attn. Heads of keys and values are not
//! repeated: grouped queries are understood. Where a call uses another order, `transpose` gives it: a view, not a copy.
//!
//! | now | with regard |
//! |---|---|
//! | `candle_flash_attn::flash_attn(&q, &k, &v, scale, causal)` | `attention(&q, &k, &v, &Attention { scale: Some(scale), causal, ..Default::default() })` |
//! | `flash_attn_windowed(&q, &k, &v, scale, left, right)` | the same with `window: Window { left, right }` |
//! | `flash_attn_alibi(&q, &k, &v, &slopes, scale, causal)` | with `alibi_slopes: Some(slopes)`, f32 |
//! | `flash_attn_alibi_windowed_softcap(.., softcap)` | with `softcap: Some(softcap)` as well |
//! | `flash_attn_varlen(&q, &k, &v, &seqlens_q, &seqlens_k, max_q, max_k, scale, causal)` | with `cu_seqlens_q: Some(seqlens_q)` and `cu_seqlens_k: Some(seqlens_k)`; the longest lengths are found |
//! | `candle_nn::attention::flash_attn(&q, &k, &v, scale, AttnMask::None, None, softcap)`, which returns `[batch, head, sequence, dim]` | `attention(&q, &k, &v, &Attention { scale: Some(scale), softcap, ..Default::default() })?.transpose(1, 2)?` |
//! | the same with `AttnMask::Causal { kv_offset }` | with `causal: true` and `q_offset: QueryOffset::Same(kv_offset as i64)`, which can be left out where the queries are the last tokens |
//! | the same with `AttnMask::Mask(mask)` | with `mask: Some(mask)`, `[B or 1, Hq or 1, Lq, Lk]`; u8 keeps where it is not 0, floats are added |
//! | `candle_nn::ops::sdpa(&q, &k, &v, None, causal, scale, 1.0)`, `[batch, head, sequence, dim]` | `q.transpose(1, 2)?` and so on, `attention(..)?.transpose(1, 2)?` |
//! | `repeat_kv`, `q.matmul(&k.t()?)`, a mask, `softmax_last_dim`, `matmul(&v)`, `[batch, head, sequence, dim]` | the same, with `causal: true` in the place of a causal mask |
//!
//! Two differences to know. `causal` puts the last query on the last key where the lengths differ (bottom right, as candle-flash-attn
//! does; `q_offset: QueryOffset::Same(0)` is the other alignment). And a row that sees nothing is 0, not NaN.
//!
//! # GPUs
//!
//! With the feature `cuda`, tensors on an NVIDIA GPU run on candle's stream, in candle's context, on the memory where they lie; what regard has no kernel
//! for is refused in words. This part is compiled and type-checked, and has not run on a GPU yet. [`PagedCache::write`] and
//! [`PagedCache::copy_blocks`] are for the CPU. Candle's `cuda` feature needs nvcc to build; regard's part needs nothing. Tensors on
//! Metal are refused ("no metal implementation for regard-attention").
//!
//! # What it does not do
//!
//! There is no backward pass: asking for a gradient through it is candle's error `BackwardNotSupported`.
//!
//! [regard]: https://docs.rs/regard
//! [candle]: https://docs.rs/candle-core
#![warn(missing_docs)]

mod attention;
#[cfg(feature = "cuda")]
mod cuda;
mod options;
mod paged;
mod view;

pub use attention::{attention, attention_with_lse};
pub use options::{Attention, Execution, Threads, attention_of_step};
pub use paged::{CacheShape, PagedCache};
pub use regard;
pub use regard::{Plan, QueryOffset, Window};
