//! Text from GGUF models of the Llama family. The model is candle's (quantised matrix products,
//! norms, rotary embeddings, tokenizer); all attention is regard's, over a paged cache that many
//! requests share.
//!
//! - [`model`]: the model, which leaves attention to whoever implements [`attend::Attend`];
//! - [`attend`]: regard over a paged cache, and candle's own attention to compare with;
//! - [`cache`]: how the cache stores keys and values;
//! - [`engine`]: continuous batching: chunks of prompts and decodes in one plan a step, shared
//!   prefixes, preemption;
//! - [`text`]: tokenizer and chat template.

pub mod attend;
pub mod cache;
pub mod engine;
pub mod model;
mod prefix;
pub mod text;

/// The most memory that this process had at once, where the system tells (Linux).
pub fn peak_memory() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}
