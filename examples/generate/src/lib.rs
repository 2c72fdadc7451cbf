//! Text from GGUF models of the Llama family. The model is candle's (quantized matrix products,
//! norms, rotary embeddings, tokenizer); all attention is regard's, over a paged cache that many
//! requests share.
//!
//! - [`model`]: the model, whose attention is an implementation of [`attend::Attend`];
//! - [`attend`]: regard over a paged cache, and candle's own attention to compare with;
//! - [`cache`]: the storage of keys and values;
//! - [`engine`]: continuous batching: chunks of prompts and decodes in one plan per step, shared
//!   prefixes, preemption;
//! - `flash`: candle-flash-attn over the same cache, to compare with (feature `candle-flash-attn`);
//! - [`graph`]: decode steps captured in CUDA graphs;
//! - [`stopwatch`]: the time of a part of the work, on the host or on a GPU;
//! - [`text`]: tokenizer and chat template.

pub mod attend;
pub mod cache;
pub mod engine;
#[cfg(feature = "candle-flash-attn")]
pub mod flash;
pub mod graph;
pub mod model;
mod prefix;
pub mod stopwatch;
pub mod text;

/// Peak memory of this process, if the system reports it (Linux).
pub fn peak_memory() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}

/// The device of a name: `cpu`, `cuda` or `cuda:N`.
///
/// # Errors
/// If there is no such device, or this build does not know it.
pub fn device(name: &str) -> candle_core::Result<candle_core::Device> {
    let ordinal = match name {
        "cpu" => return Ok(candle_core::Device::Cpu),
        "cuda" => Some(0),
        _ => name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()),
    };
    match ordinal {
        Some(_) if !candle_core::utils::cuda_is_available() => {
            candle_core::bail!("{name} needs a build with `--features cuda` (docs/serving.md)")
        }
        Some(ordinal) => {
            let device = candle_core::Device::new_cuda(ordinal)?;
            #[cfg(feature = "cuda")]
            // SAFETY: everything of this process is on this device's stream of one thread, so that
            // no tensor needs events that say when another stream is done with it. candle makes two
            // per tensor otherwise.
            unsafe {
                device.as_cuda_device()?.disable_event_tracking();
            }
            Ok(device)
        }
        None => candle_core::bail!("\"{name}\" is not a device; allowed: cpu, cuda, cuda:N"),
    }
}
