//! Attention over several GPUs: [regard] on each, joined by NCCL.
//!
//! - [`ShardedDecode`]: the keys of a sequence are spread over ranks, as [`regard::Shard`] divides
//!   them.
//! - [`RingPrefill`]: the rows of prompts are spread over ranks, and keys pass around a ring.
//! - [`HeadParallel`]: the rows are spread over ranks, and heads are while they are computed.
//!
//! All of them are written over a [`Device`] and a [`Transport`]. The `nccl` module has both for
//! NVIDIA GPUs: one process per GPU, or one thread per GPU of a process. The `peer` module has a
//! faster transport for the GPUs of one host. [`Simulated`] is a group of threads over the host's
//! memory, on which the same code runs without a GPU:
//!
//! ```
//! use regard::cpu::Cpu;
//! use regard::{Attention, DType, Problem, Tensor, TensorMut};
//! use regard_nccl::{DecodeStep, Queries, Rank, ShardedDecode, Simulated};
//! use std::time::Duration;
//!
//! // One token, 4 query heads over 2 key/value heads, head dim 8, and 6 keys on each of 2 ranks.
//! fn run(transport: Simulated) -> Result<Vec<f32>, regard::Error> {
//!     let rank = Rank { device: Cpu::new()?, transport };
//!     let problem =
//!         Problem { query_heads: 4, kv_heads: 2, kv_len: 6, ..Problem::new(DType::F32, 8) };
//!     let mut decode = ShardedDecode::new(&rank, &problem, Queries::Sharded)?;
//!     // The queries of this rank's 2 heads, and the keys of this rank.
//!     let (q, kv, mut out) = (vec![0.5f32; 2 * 8], vec![0.25f32; 6 * 2 * 8], vec![0f32; 2 * 8]);
//!     let step = DecodeStep {
//!         q: Tensor::new(&q, [2, 1, 1, 8])?,
//!         k: Tensor::new(&kv, [1, 6, 2, 8])?,
//!         v: Tensor::new(&kv, [1, 6, 2, 8])?,
//!         attention: Attention::default(),
//!         out: TensorMut::new(&mut out, [2, 1, 1, 8])?,
//!         lse: None,
//!     };
//!     // SAFETY: on the host, the step is done when the call returns.
//!     unsafe { decode.run(&rank, step)? };
//!     Ok(out)
//! }
//! std::thread::scope(|scope| {
//!     for transport in Simulated::group(2, Duration::from_secs(10)) {
//!         scope.spawn(|| {
//!             let out = run(transport).expect("both ranks have the same problem");
//!             assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
//!         });
//!     }
//! });
//! ```
//!
//! `docs/scaling.md` compares them, and gives the limits of the links.
#![warn(missing_docs)]

mod decode;
mod device;
mod heads;
#[cfg(feature = "nccl")]
pub mod nccl;
#[cfg(feature = "nccl")]
pub mod peer;
mod rank;
mod ring;
mod sharding;
mod simulated;
mod transport;
mod views;

pub use decode::{DecodeStep, Queries, ShardedDecode};
pub use device::{Device, HostBuffer};
pub use heads::{HeadParallel, HeadStep};
pub use rank::Rank;
pub use ring::{RingPrefill, RingStep};
pub use sharding::{BalancedRows, RingSequence};
pub use simulated::Simulated;
pub use transport::{Exchange, Message, Span, Transport};
