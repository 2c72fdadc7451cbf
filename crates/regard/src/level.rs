//! The SIMD level: detected once, or forced with `REGARD_SIMD`.

#[cfg(target_arch = "x86_64")]
mod amx;

use crate::error::{Error, Refusal};
use crate::race::FirstResult;
use std::fmt;
use std::str::FromStr;

/// The vector instructions that a CPU kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Level {
    /// Portable Rust on arrays, compiled for the target's baseline.
    Scalar,
    /// 128-bit NEON (every aarch64 CPU).
    Neon,
    /// 256-bit AVX2 with FMA and F16C.
    Avx2,
    /// 512-bit AVX-512 F, BW, DQ and VL.
    Avx512,
}

/// Arithmetic of the products of bf16 queries, keys and values. Accumulators are always f32.
/// [`Bf16Products::Pairs`] and [`Bf16Products::Tiles`] round probabilities to bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Bf16Products {
    /// Converted to f32.
    Widened,
    /// In pairs, with VDPBF16PS (AVX512_BF16), on CPUs that have AVX512_VBMI too.
    Pairs,
    /// In tiles of 16 rows, with AMX, the matrix unit of Intel's newer server CPUs, if the
    /// operating system permits it. Few rows (decode) are converted to f32.
    Tiles,
}

impl Bf16Products {
    /// All variants, the simplest first.
    pub const ALL: [Bf16Products; 3] =
        [Bf16Products::Widened, Bf16Products::Pairs, Bf16Products::Tiles];
}

impl fmt::Display for Bf16Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bf16Products::Widened => "widened to f32",
            Bf16Products::Pairs => "products of pairs (AVX512_BF16)",
            Bf16Products::Tiles => "products of tiles (AMX)",
        })
    }
}

/// Whether this is an Intel CPU, by CPUID.
fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The environment variable that overrides detection.
pub const OVERRIDE: &str = "REGARD_SIMD";

impl Level {
    /// All levels, the simplest first.
    pub const ALL: [Level; 4] = [Level::Scalar, Level::Neon, Level::Avx2, Level::Avx512];

    /// The name used by `REGARD_SIMD` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Neon => "neon",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    /// 32-bit lanes per vector.
    pub fn lanes(self) -> usize {
        match self {
            Level::Scalar | Level::Neon => 4,
            Level::Avx2 => 8,
            Level::Avx512 => 16,
        }
    }

    /// Whether this machine has the instructions.
    pub fn is_available(self) -> bool {
        match self {
            Level::Scalar => true,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[allow(unreachable_patterns, reason = "levels of other architectures")]
            _ => false,
        }
    }

    /// Whether this level can multiply bf16 like this on this machine.
    pub fn has(self, products: Bf16Products) -> bool {
        match products {
            Bf16Products::Widened => self.is_available(),
            #[cfg(target_arch = "x86_64")]
            Bf16Products::Pairs => {
                self == Level::Avx512
                    && self.is_available()
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vbmi")
            }
            #[cfg(target_arch = "x86_64")]
            Bf16Products::Tiles => self.has(Bf16Products::Pairs) && amx::is_available(),
            #[allow(unreachable_patterns, reason = "products of other architectures")]
            _ => false,
        }
    }

    /// The fastest way to multiply bf16 at this level on this machine. Intel CPUs multiply pairs at
    /// half the speed of f32 (measured on Emerald Rapids), AMD CPUs at twice the speed.
    pub fn bf16_products(self) -> Bf16Products {
        let fastest_first = [Bf16Products::Tiles, Bf16Products::Pairs];
        let best = fastest_first.into_iter().find(|&products| self.has(products));
        best.filter(|&products| products != Bf16Products::Pairs || !is_intel())
            .unwrap_or(Bf16Products::Widened)
    }

    /// The level to use on this machine: the one in `REGARD_SIMD`, else the widest available.
    /// Detected once.
    ///
    /// # Errors
    /// If `REGARD_SIMD` names no level, or one that this CPU lacks.
    pub fn detect() -> Result<Level, Error> {
        static DETECTED: FirstResult<Result<Level, Error>> = FirstResult::new();
        DETECTED.get_or_init(|| Level::choose(std::env::var(OVERRIDE).ok().as_deref())).clone()
    }

    /// The result of [`Level::detect`] for this value of `REGARD_SIMD`.
    pub fn choose(wish: Option<&str>) -> Result<Level, Error> {
        let widest = Level::ALL.into_iter().rev().find(|level| level.is_available());
        let widest = widest.expect("the scalar level is always available");
        let Some(wish) = wish.filter(|wish| !wish.is_empty()) else { return Ok(widest) };
        let level: Level = wish.parse()?;
        if !level.is_available() {
            let machine = format!("this {} CPU", std::env::consts::ARCH);
            let reason = format!(
                "{OVERRIDE}={level} asks for instructions that it lacks; \
                 the widest here is {widest}"
            );
            return Err(Error::Refused(Refusal { machine, reason }));
        }
        Ok(level)
    }
}

impl FromStr for Level {
    type Err = Error;

    /// The level with this name.
    fn from_str(name: &str) -> Result<Level, Error> {
        Level::ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| {
            Error::argument(OVERRIDE, format!("\"{name}\""), "scalar, avx2, avx512 or neon")
        })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
