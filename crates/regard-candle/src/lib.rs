//! [regard]'s fused attention on [candle]'s tensors.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use regard_candle::{Attention, attention};
//!
//! // One sequence: 2 new tokens against a cache of 5, 4 query heads over 2 key/value heads,
//! // head dim 8.
//! let q = Tensor::randn(0f32, 1., (1, 2, 4, 8), &Device::Cpu)?; // [batch, sequence, head, dim]
//! let k = Tensor::randn(0f32, 1., (1, 5, 2, 8), &Device::Cpu)?;
//! let v = Tensor::randn(0f32, 1., (1, 5, 2, 8), &Device::Cpu)?;
//! let out = attention(&q, &k, &v, &Attention::causal())?;
//! assert_eq!(out.dims(), [1, 2, 4, 8]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Tensors of f32, f16 or bf16, of any strides: results of `transpose`, `narrow`, `chunk` and
//! `broadcast_as` are read in place, unless the innermost stride is not 1 ([`attention()`] lists
//! the copies). Work runs on candle's threads ([`Threads`]). An operand that breaks the contract is
//! an error that names the argument, its value and what is allowed. Every feature of regard is a
//! field of [`Attention`]; regard's `docs/semantics.md` defines the results.
//!
//! For a paged cache set [`block_table`](regard::Attention::block_table) and
//! [`kv_lens`](regard::Attention::kv_lens), and keep keys and values in a [`PagedCache`], which
//! also has MLA's form ([`PagedCache::latent`]). For continuous batching [`attention_of_step`]
//! takes both from a [`regard::paged::Step`], and [`grouped_attention_of_step`] also what
//! sequences share. On a GPU, [`Execution::max_query_len`] tells that a step has single tokens
//! only. The crate `generate`, in regard's `examples` folder, serves a real model that way.
//!
//! # Caches in 8 and 4 bits
//!
//! Keys and values can be stored as 8-bit codes with scales, or as GGUF's blocks, for queries of
//! any type ([`CacheFormat`]). [`PagedCache::with_format`] is a paged cache of them:
//! [`PagedCache::write`] quantizes, with a scale per token and head.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use regard_candle::{Attention, CacheFormat, Execution, regard};
//!
//! let q = Tensor::randn(0f32, 1., (1, 1, 4, 64), &Device::Cpu)?;
//! // Codes of 5 tokens of 2 heads, as u8, and one scale for all.
//! let codes = Tensor::rand(0f32, 100., (1, 5, 2, 64), &Device::Cpu)?.to_dtype(DType::U8)?;
//! let scales = Tensor::full(0.01f32, (1, 1, 1), &Device::Cpu)?;
//! let options = Attention {
//!     k_scales: Some(scales.clone()),
//!     v_scales: Some(scales),
//!     ..Attention::causal()
//! };
//! let execution =
//!     Execution { format: CacheFormat::new(regard::DType::I8), ..Execution::default() };
//! let out = execution.attention(&q, &codes, &codes, &options)?;
//! assert_eq!(out.dims(), [1, 1, 4, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # Drop-in for candle-flash-attn and `sdpa`
//!
//! This crate has functions with the names and signatures of `candle_flash_attn`'s and of
//! `candle_nn::ops::sdpa`, on the CPU as well as on GPUs. A model that calls them changes one line:
//!
//! ```
//! use regard_candle as candle_flash_attn;
//!
//! # use candle_core::{Device, Tensor};
//! # let q = Tensor::randn(0f32, 1., (1, 2, 4, 8), &Device::Cpu)?;
//! # let (k, v, softmax_scale, causal) = (q.clone(), q.clone(), 0.3, true);
//! let out = candle_flash_attn::flash_attn(&q, &k, &v, softmax_scale, causal)?;
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Or none in its source, and one in `Cargo.toml`, which the package `drop-in` in regard's
//! `examples` folder does with two models of candle-transformers:
//!
//! ```toml
//! candle-flash-attn = { package = "regard-candle", version = "0.1.0" }
//! ```
//!
//! | function of `candle_flash_attn` | the same as [`attention()`] with |
//! |---|---|
//! | [`flash_attn`] | `scale`, `causal` |
//! | [`flash_attn_windowed`] | `scale`, `window`; a right side of 0 is `causal` |
//! | [`flash_attn_alibi`] | `scale`, `causal`, `alibi_slopes` |
//! | [`flash_attn_alibi_windowed`] | `scale`, `window`, `alibi_slopes` |
//! | [`flash_attn_alibi_windowed_softcap`] | also `softcap`; 0 is none |
//! | [`flash_attn_varlen`] | `cu_seqlens_q`, `cu_seqlens_k`, `scale`, `causal` |
//! | [`flash_attn_varlen_windowed`] | the same with `window` |
//! | [`flash_attn_varlen_alibi`] | the same with `causal`, `alibi_slopes` |
//! | [`flash_attn_varlen_alibi_windowed`] | the same with `window`, `alibi_slopes` |
//! | [`flash_attn_varlen_alibi_windowed_softcap`] | also `softcap` |
//! | [`flash_attn_varlen_paged_windowed`] | below |
//!
//! - [`flash_attn_varlen_paged_windowed`] has `cu_seqlens_q`, `block_table`, `kv_lens`, `window`
//!   and `softcap`; `mm_prefix_ranges` are refused.
//! - `candle_nn::ops::sdpa` is [`sdpa()`]: [`attention()`] of tensors that are transposed to and
//!   from `[batch, sequence, head, dim]`. A `softcapping` of 1 is none.
//! - `candle_nn::attention::flash_attn(&q, &k, &v, scale, AttnMask::None, None, softcap)` returns
//!   `[batch, head, sequence, dim]`: the `transpose(1, 2)` of [`attention()`] with `scale` and
//!   `softcap`. `AttnMask::Mask(mask)` is `mask`. `AttnMask::Causal { kv_offset }` is `causal` and
//!   `q_offset: QueryOffset::Same(kv_offset as i64)`, which can be left out if the queries are the
//!   last tokens.
//! - `repeat_kv`, `q.matmul(&k.t()?)`, a mask, `softmax_last_dim` and `matmul(&v)` on `[batch,
//!   head, sequence, dim]` are [`sdpa()`] without `repeat_kv`. A causal mask is `causal`.
//!
//! Differences to know:
//!
//! - Queries, keys, values and results are f32 too, of any head dim up to 576, and values may have
//!   another head dim than keys.
//! - Heads of keys and values need not be repeated.
//! - A mask of integers keeps a key if it is not 0. Models of candle-transformers that fill scores
//!   by `where_cond` have masks that hide if it is not 0: give `mask.eq(0u32)`.
//! - A mask of fewer than four dimensions is broadcast as candle does: `[Lq, Lk]`, `[Hq, Lq, Lk]`.
//! - `causal` puts the last query on the last key if the lengths differ (bottom right, as
//!   candle-flash-attn does; `q_offset: QueryOffset::Same(0)` is the other alignment).
//! - A row that sees nothing is 0, not NaN.
//!
//! # GPUs
//!
//! With the feature `cuda`, tensors on an NVIDIA GPU run on candle's stream, in candle's context,
//! on their memory, without synchronization. A problem without a kernel is an error with the
//! reason. Each stream keeps a workspace, which grows as calls need it, and its latest plans, until
//! the stream is gone (a thread's default stream: until the thread ends). Calls can be captured in
//! a CUDA graph after an equal call has loaded their kernels; a captured call allocates its
//! workspace in the graph, and none of the stream's memory is in there. Candle's `cuda` feature
//! needs nvcc to build, which a few Python wheels have (`scripts/candle_cuda.sh` in regard's
//! repository); regard's part needs nothing.
//!
//! With the feature `metal`, which builds on Apple's systems, tensors on an Apple GPU run in
//! candle's command buffer, on their buffers, without synchronization; candle's encoder orders
//! them with its own kernels. No Mac has run this yet: it is type-checked. Without the features,
//! tensors on GPUs are refused ("no metal implementation for regard-attention").
//!
//! # What it does not do
//!
//! There is no backward pass: asking for a gradient through it is candle's error
//! `BackwardNotSupported`.
//!
//! [regard]: https://docs.rs/regard
//! [candle]: https://docs.rs/candle-core
#![warn(missing_docs)]

mod attention;
#[cfg(feature = "cuda")]
mod cuda;
mod drop_in;
mod merge;
#[cfg(feature = "metal")]
mod metal;
mod options;
mod paged;
mod prepare;
mod view;

pub use attention::{attention, attention_with_lse};
pub use drop_in::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed,
    flash_attn_varlen_windowed, flash_attn_windowed, sdpa,
};
pub use merge::merge;
pub use options::{
    Attention, CacheFormat, Execution, Threads, attention_of_step, attention_of_tables,
    grouped_attention_of_step,
};
pub use paged::{CacheShape, PagedCache};
pub use regard;
pub use regard::{Plan, QueryOffset, Window};
