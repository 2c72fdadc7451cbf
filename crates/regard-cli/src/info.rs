//! `regard info`: what this machine offers.

use crate::output::{Stop, print, print_json};
use regard::cpu::{Level, OVERRIDE};
use regard::{CpuFacts, Device, Machine};
use serde::Serialize;

#[derive(Serialize)]
struct Info {
    version: &'static str,
    arch: &'static str,
    simd: &'static str,
    simd_available: Vec<&'static str>,
    /// What `REGARD_SIMD` says; null if it says nothing.
    simd_override: Option<String>,
    /// Whether bf16 is multiplied in pairs.
    bf16_products: bool,
    threads: usize,
    l1d_bytes: Option<usize>,
    l2_bytes: Option<usize>,
    l3_bytes: Option<usize>,
    backends: Vec<&'static str>,
}

/// Prints it.
pub fn info(json: bool) -> Result<u8, Stop> {
    let Device::Cpu(CpuFacts { level, bf16_products, threads, l1d_bytes, l2_bytes, l3_bytes }) =
        Machine::host()?.device
    else {
        return Err(Stop::Failed("the host is not described as a CPU".into()));
    };
    let available = Level::ALL.into_iter().filter(|level| level.is_available());
    let info = Info {
        version: env!("CARGO_PKG_VERSION"),
        arch: std::env::consts::ARCH,
        simd: level.name(),
        simd_available: available.map(Level::name).collect(),
        simd_override: std::env::var(OVERRIDE).ok().filter(|wish| !wish.is_empty()),
        bf16_products,
        threads,
        l1d_bytes,
        l2_bytes,
        l3_bytes,
        backends: vec!["cpu"],
    };
    if json {
        print_json(&info)?;
    } else {
        print(&text(&info))?;
    }
    Ok(0)
}

fn text(info: &Info) -> String {
    let caches: Vec<_> = [("L1d", info.l1d_bytes), ("L2", info.l2_bytes), ("L3", info.l3_bytes)]
        .into_iter()
        .filter_map(|(name, bytes)| bytes.map(|bytes| format!("{name} {} KiB", bytes >> 10)))
        .collect();
    let caches = if caches.is_empty() { "not known".into() } else { caches.join(", ") };
    let wish = match &info.simd_override {
        Some(wish) => format!("set by {OVERRIDE}={wish}"),
        None => format!("the widest here; {OVERRIDE} is not set"),
    };
    format!(
        "regard    {}\n\
         cpu       {}\n\
         simd      {} ({wish}), available: {}\n\
         bf16      {}\n\
         threads   {}\n\
         caches    {caches}\n\
         backends  cpu. This version has no CUDA and no Metal kernels.\n",
        info.version,
        info.arch,
        info.simd,
        info.simd_available.join(", "),
        if info.bf16_products { "products of pairs (AVX512_BF16)" } else { "widened to f32" },
        info.threads,
    )
}
