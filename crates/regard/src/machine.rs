//! Facts about devices that selection and planning need, for this machine and for others.

use crate::apple_chips::{Chip, chip};
use crate::error::Error;
use crate::level::{Bf16Products, Level};
use crate::race::FirstResult;
use std::fmt;
use std::str::FromStr;

/// A device that a problem can be planned for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// `host`, or the name it was asked for by.
    pub name: String,
    /// The device and its facts.
    pub device: Device,
}

/// The kinds of device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Device {
    /// A CPU.
    Cpu(CpuFacts),
    /// An NVIDIA GPU.
    Cuda(CudaFacts),
    /// An Apple GPU.
    Metal(MetalFacts),
}

/// The facts of a CPU that plans depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuFacts {
    /// The vector instructions to use.
    pub level: Level,
    /// Arithmetic of the products of bf16. Pairs and tiles need the level [`Level::Avx512`]; a
    /// machine that contradicts this gets no plan.
    pub bf16_products: Bf16Products,
    /// Threads to use.
    pub threads: usize,
    /// First-level data cache of a core, in bytes; `None` if it is not known.
    pub l1d_bytes: Option<usize>,
    /// Second-level cache of a core, in bytes.
    pub l2_bytes: Option<usize>,
    /// Last-level cache shared by cores, in bytes.
    pub l3_bytes: Option<usize>,
}

/// The facts of an NVIDIA GPU that plans depend on. Source: the CUDA C++ programming guide's table
/// of compute capabilities, and the product's data sheet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaFacts {
    /// Compute capability, 90 for 9.0.
    pub compute_capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Shared memory that one CTA can have, in bytes.
    pub shared_bytes: usize,
    /// L2 cache, in bytes.
    pub l2_bytes: usize,
}

/// The facts of an Apple GPU that plans depend on. Source: Apple's Metal feature set tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetalFacts {
    /// Apple GPU family, 8 for `apple8`.
    pub family: u32,
    /// GPU cores.
    pub cores: usize,
    /// Threadgroup memory, in bytes.
    pub threadgroup_bytes: usize,
}

const MIB: usize = 1 << 20;

impl Machine {
    /// This machine's CPU: all its threads, its widest vector instructions (or the level that
    /// `REGARD_SIMD` names). Starts no thread.
    ///
    /// "All its threads" is a thread per core that this process may use, or fewer if
    /// `RAYON_NUM_THREADS` says so. Inside a rayon pool (feature `rayon`) it is the number of
    /// threads of that pool. [`Machine::with_threads`] sets another number.
    ///
    /// # Errors
    /// If `REGARD_SIMD` names an unknown level, or a level that this machine lacks.
    pub fn host() -> Result<Machine, Error> {
        // Looked up once: reading them takes longer than a small attention.
        static CACHES: FirstResult<[Option<usize>; 3]> = FirstResult::new();
        let [l1d_bytes, l2_bytes, l3_bytes] = *CACHES.get_or_init(|| [1, 2, 3].map(cache_bytes));
        let level = Level::detect()?;
        let facts = CpuFacts {
            level,
            bf16_products: level.bf16_products(),
            threads: default_threads(),
            l1d_bytes,
            l2_bytes,
            l3_bytes,
        };
        Ok(Machine { name: "host".into(), device: Device::Cpu(facts) })
    }

    /// The names that machines can be parsed from.
    #[rustfmt::skip]
    pub const NAMES: [&'static str; 25] = [
        "host", "scalar", "neon", "avx2", "avx512", "h200", "a100",
        "m1", "m1-pro", "m1-max", "m1-ultra", "m2", "m2-pro", "m2-max", "m2-ultra",
        "m3", "m3-pro", "m3-max", "m3-ultra", "m4", "m4-pro", "m4-max", "m5",
        "m5-pro", "m5-max",
    ];

    /// The same machine with another SIMD level. No effect on GPUs.
    pub fn with_level(mut self, level: Level) -> Machine {
        if let Device::Cpu(facts) = &mut self.device {
            facts.level = level;
            facts.bf16_products = level.bf16_products();
        }
        self
    }

    /// The same machine multiplying bf16 in that way. If its level lacks that arithmetic here, bf16
    /// are widened. No effect on GPUs.
    pub fn with_bf16_products(mut self, products: Bf16Products) -> Machine {
        if let Device::Cpu(facts) = &mut self.device {
            facts.bf16_products =
                if facts.level.has(products) { products } else { Bf16Products::Widened };
        }
        self
    }

    /// The same machine using that many threads (at least one). No effect on GPUs.
    pub fn with_threads(mut self, threads: usize) -> Machine {
        if let Device::Cpu(facts) = &mut self.device {
            facts.threads = threads.max(1);
        }
        self
    }
}

impl FromStr for Machine {
    type Err = Error;

    /// A machine by name: `host`, this machine's CPU held to a SIMD level (`scalar`, `avx2`,
    /// `avx512`, `neon`), or a GPU that need not be here (`h200`, `a100`, `m1` to `m5`, `m2-pro`,
    /// `m2-max`, `m2-ultra` and so on).
    ///
    /// # Errors
    /// If no machine has that name.
    fn from_str(name: &str) -> Result<Machine, Error> {
        let device = match name {
            "host" => return Machine::host(),
            "scalar" | "neon" | "avx2" | "avx512" => {
                return Ok(Machine {
                    name: name.into(),
                    ..Machine::host()?.with_level(name.parse()?)
                });
            }
            "h200" => Device::Cuda(CudaFacts {
                compute_capability: 90,
                multiprocessors: 132,
                shared_bytes: 227 << 10,
                l2_bytes: 50 * MIB,
            }),
            "a100" => Device::Cuda(CudaFacts {
                compute_capability: 80,
                multiprocessors: 108,
                shared_bytes: 163 << 10,
                l2_bytes: 40 * MIB,
            }),
            _ => {
                let Chip { family, cores } = chip(name).ok_or_else(|| {
                    Error::argument("machine", format!("\"{name}\""), Machine::NAMES.join(", "))
                })?;
                Device::Metal(MetalFacts { family, cores, threadgroup_bytes: 32 << 10 })
            }
        };
        Ok(Machine { name: name.into(), device })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.device {
            Device::Cpu(facts) => {
                let threads = if facts.threads == 1 { "thread" } else { "threads" };
                write!(f, "{} (CPU, {}, {} {threads})", self.name, facts.level, facts.threads)
            }
            Device::Cuda(facts) => {
                let capability = facts.compute_capability;
                write!(
                    f,
                    "{} (NVIDIA GPU, sm_{capability}, {} SMs)",
                    self.name, facts.multiprocessors
                )
            }
            Device::Metal(facts) => {
                write!(
                    f,
                    "{} (Apple GPU, family {}, {} cores)",
                    self.name, facts.family, facts.cores
                )
            }
        }
    }
}

/// The environment variable that bounds the number of threads by default.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Threads to use by default. Asking rayon outside of a pool would start its global pool, which
/// panics if no threads can be had.
fn default_threads() -> usize {
    #[cfg(feature = "rayon")]
    if rayon::current_thread_index().is_some() {
        return rayon::current_num_threads();
    }
    static THREADS_HERE: FirstResult<usize> = FirstResult::new();
    *THREADS_HERE.get_or_init(|| {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        bounded_threads(cores, std::env::var(THREADS).ok().as_deref())
    })
}

/// As many threads as cores, or fewer if the variable has a number from 1 up.
fn bounded_threads(cores: usize, wish: Option<&str>) -> usize {
    // A number that is too large for its type is too large for this machine as well.
    let wish = wish.and_then(|wish| wish.trim().parse().ok()).filter(|&wish: &usize| wish > 0);
    wish.map_or(cores, |wish| wish.min(cores))
}

/// The size of the first core's data (or unified) cache at that level, in bytes; `None` if the
/// operating system does not report it (Linux does).
fn cache_bytes(level: u32) -> Option<usize> {
    let caches = std::path::Path::new("/sys/devices/system/cpu/cpu0/cache");
    for index in 0..8 {
        let read =
            |file: &str| std::fs::read_to_string(caches.join(format!("index{index}/{file}"))).ok();
        let (Some(found), Some(kind), Some(size)) = (read("level"), read("type"), read("size"))
        else {
            continue;
        };
        if found.trim() == level.to_string() && kind.trim() != "Instruction" {
            return size.trim().strip_suffix('K')?.parse::<usize>().ok().map(|kib| kib << 10);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_bounds_threads_and_asks_for_no_more_than_cores() {
        let threads = |wish| bounded_threads(8, wish);
        assert_eq!([None, Some(""), Some("0"), Some("many"), Some("-1")].map(threads), [8; 5]);
        assert_eq!([Some("1"), Some(" 3 "), Some("8")].map(threads), [1, 3, 8]);
        assert_eq!(
            [Some("9"), Some("1000000000000"), Some("99999999999999999999999")].map(threads),
            [8; 3]
        );
    }
}
