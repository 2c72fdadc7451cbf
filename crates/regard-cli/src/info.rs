//! `regard info`: the facts of this machine.

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
    /// The value of `REGARD_SIMD`; null if it is not set.
    simd_override: Option<String>,
    /// Arithmetic of the products of bf16: "widened to f32", "products of pairs (AVX512_BF16)" or
    /// "products of tiles (AMX)".
    bf16_products: String,
    threads: usize,
    l1d_bytes: Option<usize>,
    l2_bytes: Option<usize>,
    l3_bytes: Option<usize>,
    /// Backends that can run here.
    backends: Vec<&'static str>,
    gpus: Vec<Gpu>,
    /// The reason why there is no GPU, if there is none.
    no_gpu: Option<String>,
}

/// A GPU of this machine.
#[derive(Serialize)]
struct Gpu {
    device: String,
    name: String,
    /// 9.0 is 90.
    compute_capability: u32,
    multiprocessors: usize,
    shared_bytes: usize,
    l2_bytes: usize,
    memory_bytes: usize,
    /// The newest CUDA that the driver knows.
    driver: String,
}

/// The GPUs of this machine, or the reason why there are none.
#[cfg(feature = "cuda")]
fn gpus() -> Result<Vec<Gpu>, String> {
    let found = regard::cuda::gpus().map_err(|error| match error {
        regard::Error::Refused(refusal) => refusal.reason,
        other => other.to_string(),
    })?;
    if found.is_empty() {
        return Err("the NVIDIA driver finds none".into());
    }
    let gpu = |gpu: regard::cuda::GpuInfo| Gpu {
        device: format!("cuda:{}", gpu.ordinal),
        name: gpu.name,
        compute_capability: gpu.facts.compute_capability,
        multiprocessors: gpu.facts.multiprocessors,
        shared_bytes: gpu.facts.shared_bytes,
        l2_bytes: gpu.facts.l2_bytes,
        memory_bytes: gpu.memory_bytes,
        driver: format!("{}.{}", gpu.driver.0, gpu.driver.1),
    };
    Ok(found.into_iter().map(gpu).collect())
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Result<Vec<Gpu>, String> {
    Err("this command was built without its feature cuda".into())
}

/// Prints it.
pub fn info(json: bool) -> Result<u8, Stop> {
    let Device::Cpu(CpuFacts { level, bf16_products, threads, l1d_bytes, l2_bytes, l3_bytes }) =
        Machine::host()?.device
    else {
        return Err(Stop::Failed("the host is not described as a CPU".into()));
    };
    let available = Level::ALL.into_iter().filter(|level| level.is_available());
    let (gpus, no_gpu) = match gpus() {
        Ok(gpus) => (gpus, None),
        Err(reason) => (Vec::new(), Some(reason)),
    };
    let mut backends = vec!["cpu"];
    backends.extend((!gpus.is_empty()).then_some("cuda"));
    backends.extend(cfg!(all(feature = "metal", target_vendor = "apple")).then_some("metal"));
    let info = Info {
        version: env!("CARGO_PKG_VERSION"),
        arch: std::env::consts::ARCH,
        simd: level.name(),
        simd_available: available.map(Level::name).collect(),
        simd_override: std::env::var(OVERRIDE).ok().filter(|wish| !wish.is_empty()),
        bf16_products: bf16_products.to_string(),
        threads,
        l1d_bytes,
        l2_bytes,
        l3_bytes,
        backends,
        gpus,
        no_gpu,
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
         {}\
         backends  {}\n",
        info.version,
        info.arch,
        info.simd,
        info.simd_available.join(", "),
        info.bf16_products,
        info.threads,
        gpu_lines(info),
        info.backends.join(", "),
    )
}

/// One line per GPU, or a line with the reason why there is none.
fn gpu_lines(info: &Info) -> String {
    let line = |gpu: &Gpu| {
        format!(
            "gpu       {} {}: sm_{}, {} SMs, {} MiB of L2, {:.1} GiB of memory; the driver is for \
             CUDA {}\n",
            gpu.device,
            gpu.name,
            gpu.compute_capability,
            gpu.multiprocessors,
            gpu.l2_bytes >> 20,
            gpu.memory_bytes as f64 / f64::from(1 << 30),
            gpu.driver,
        )
    };
    match &info.no_gpu {
        Some(reason) => format!("gpu       none: {reason}\n"),
        None => info.gpus.iter().map(line).collect(),
    }
}
