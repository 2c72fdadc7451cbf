//! NVIDIA GPUs.
//!
//! Planning (kernel, launch configuration, workspace) is always compiled, so that a plan for a GPU
//! can be made and read on any machine. Running a plan needs the feature `cuda`, and at run time
//! only the driver: `docs/cuda.md`.

#[cfg(feature = "cuda")]
mod append;
#[cfg(feature = "cuda")]
mod copy_blocks;
mod decode;
mod decode_wgmma;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod heads;
mod latent;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod lists;
#[cfg(feature = "cuda")]
mod mask_map;
#[cfg(feature = "cuda")]
mod merge;
#[cfg(feature = "cuda")]
mod modules;
#[cfg(feature = "cuda")]
mod operands;
pub(crate) mod plan;
mod prefill;
mod prefix;
#[doc(hidden)]
pub mod registry;
#[cfg(any(feature = "cuda", test))]
mod schedule;
pub(crate) mod select;
mod shape;
mod splits;
#[cfg(feature = "cuda")]
mod tensor;
#[cfg(feature = "cuda")]
mod tensor_map;
mod widen;
mod work;
#[cfg(feature = "cuda")]
mod workspace;

use crate::dtype::DType;
#[cfg(feature = "cuda")]
use crate::params::CacheFormat;
use crate::params::ElementType;
use crate::tile_map::MapPlace;
#[cfg(feature = "cuda")]
pub use crate::tile_map::TileMap;
#[cfg(feature = "cuda")]
pub use append::{Append, AppendLatent, Rotary};
#[cfg(feature = "cuda")]
pub use copy_blocks::CopyBlocks;
#[cfg(feature = "cuda")]
pub use cudarc;
#[cfg(feature = "cuda")]
pub use driver::driver_error;
#[cfg(feature = "cuda")]
pub use gpu::{Gpu, GpuInfo, Prepared, gpus};
#[cfg(feature = "cuda")]
pub use launch::tile_map;
#[cfg(feature = "cuda")]
pub use merge::Merge;
#[cfg(feature = "cuda")]
pub use tensor::{DeviceMemory, DeviceView, DeviceViewMut};
#[cfg(feature = "cuda")]
pub use workspace::{RawWorkspace, Workspace};

// Hidden items, here and below, are for the tools and tests of this repository: they are not part
// of the interface.
#[doc(hidden)]
#[cfg(feature = "cuda")]
pub use launch::launches;
#[doc(hidden)]
pub use prefix::{Prefix, PrefixLayout};

/// Bytes at the start of every workspace that are zero before and after a run: a counter per CTA or
/// per tile.
pub const COUNTER_BYTES: usize = 4096;

/// Alignment of a workspace's address, in bytes.
pub const WORKSPACE_ALIGNMENT: u64 = 16;

/// Bytes at the end of these that count the tiles of prefill; decode has the others.
pub(crate) const PREFILL_COUNTER_BYTES: usize = 16;

/// Bytes that the schedule of a step has per CTA of decode, as in `decode_tile.cuh`.
pub(crate) const SCHEDULED_BYTES: usize = 128;

/// Launches of a plan's kernels: everything that is decided before lengths are known. At
/// least one of the two is `Some`. If both are, prefill runs first, and each kernel skips the
/// sequences of the other.
#[doc(hidden)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Launches {
    /// Sequences of many query tokens.
    pub prefill: Option<Prefill>,
    /// Instead of `prefill` over codes, if there are many rows.
    pub widened: Option<Widened>,
    /// Sequences of few.
    pub decode: Option<Decode>,
    /// Instead of `decode` on Hopper, over a latent cache, over codes or over blocks, if it can
    /// read the operands.
    pub hopper_decode: Option<Decode>,
    /// Before and after decode, if sequences share prefixes.
    pub prefix: Option<Prefix>,
    /// Bytes of the workspace, the counters at its start included ([`COUNTER_BYTES`]).
    pub workspace_bytes: usize,
}

/// A kernel and its grid.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Launch {
    /// The module, by its name in [`registry::MODULES`].
    pub module: &'static str,
    /// The kernel's name in it.
    pub entry: &'static str,
    /// CTAs, at most.
    pub grid: [u32; 3],
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory per CTA, in bytes.
    pub shared_bytes: u32,
    /// Whether it starts only when the kernel in front has ended, even if its module could start
    /// earlier.
    pub starts_late: bool,
}

impl Launch {
    /// The same with a grid of this many CTAs.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_ctas(&self, ctas: u32) -> Launch {
        Launch { grid: [ctas, 1, 1], ..*self }
    }
}

/// A decode launch of a kernel for Hopper, instead of the general one.
struct HopperDecode {
    decode: Decode,
    /// Bytes of its workspace, the counters included.
    workspace_bytes: usize,
}

/// The launch of a decode kernel.
#[doc(hidden)]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decode {
    /// The launch.
    pub launch: Launch,
    /// The module for operands whose rows do not start at multiples of 16 bytes. Same bits.
    pub fallback: &'static str,
    /// Maximum query tokens of a sequence that decode computes; `i32::MAX` for all sequences.
    pub max_query_len: i32,
    /// Partial states that one CTA may leave.
    pub partials_per_cta: i32,
    /// Groups of warps that share the keys of a CTA.
    pub key_groups: i32,
    /// Query rows per tile.
    pub tile_rows: i32,
    /// Adjacent key/value heads of a tile, which its parameters count as one.
    pub tile_heads: usize,
    /// CTAs that share a tile.
    pub ctas_per_tile: u32,
    /// Keys per unit of cost: a power of 2.
    pub unit_keys: i32,
    /// Units of cost that starting a tile counts for, where lengths differ.
    pub start_units: i32,
    /// Whether the problem's head dims are those that the modules are compiled for.
    pub exact_dims: bool,
    /// Loads of keys and values by the modules.
    pub cache: registry::Cache,
    /// Whether the modules are for lists of keys, and read the pages of each sequence as one.
    pub lists_pages: bool,
    /// The second kernel that combines the partial states of tiles, from the module of the decode
    /// kernel that ran; `None` if the last CTA of each tile does.
    pub combine: Option<Launch>,
    /// The launch that computes the work of each CTA once per step; `None` if every run does.
    pub schedule: Option<StepSchedule>,
}

/// The launch that computes the schedule of a step.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSchedule {
    /// The launch: a CTA per CTA of the decode kernel.
    pub launch: Launch,
    /// Offset in the workspace of what it leaves.
    pub at: usize,
}

/// The launch of a prefill kernel.
#[doc(hidden)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefill {
    /// The launch.
    pub specialized: PrefillKernel,
    /// The kernel for scales that keys or values of a head do not share, if the specialized one
    /// takes no others.
    pub any_scales: Option<PrefillKernel>,
    /// The kernel for operands whose strides or alignment the specialized one cannot read.
    pub fallback: PrefillKernel,
    /// Minimum query tokens of a sequence that prefill computes; 0 for all sequences.
    pub min_query_len: i32,
    /// (Sequence, key/value head) pairs whose keys and values share the L2 cache, at most.
    pub l2_group: i32,
    /// Room for the tile map of a mask, which is made first.
    pub map: Option<MapSpace>,
    /// Room for partial states, if a kernel may split the keys of its tiles.
    pub partials: Option<PartialSpace>,
}

impl Prefill {
    /// Its kernels.
    fn kernels(&self) -> impl Iterator<Item = PrefillKernel> + use<> {
        [self.specialized].into_iter().chain(self.any_scales).chain([self.fallback])
    }
}

/// Room in the workspace for partial states of prefill, and the launch that combines them.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartialSpace {
    /// Its offset.
    pub at: usize,
    /// Its size.
    pub bytes: usize,
    /// The launch; a call fills in its grid.
    pub combine: Launch,
}

/// Prefill over a copy of keys and values in the type of queries, which a kernel makes first.
#[doc(hidden)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Widened {
    /// The launch that makes the copies: a CTA per block of keys, and of values.
    pub rounded: Launch,
    /// The same if no copy is rounded, where that can be.
    pub exact: Option<Launch>,
    /// The launch before `rounded`, if it rounds to f16: it finds what copies are multiples of.
    pub units: Option<Launch>,
    /// Offset of the copy of keys in the workspace.
    pub keys_at: usize,
    /// Offset of the copy of values.
    pub values_at: usize,
    /// Offset of the scales of keys, if there is one for each.
    pub scales_at: usize,
    /// Offset of what the keys and the values of each sequence and head are multiples of.
    pub units_at: usize,
    /// The end of the copies.
    pub end: usize,
    /// The launch of the kernels that read copies, if keys are exact there: they have no scales, or
    /// heads share them.
    pub shared: Option<Prefill>,
    /// The launch of the kernel that takes more of each key: a scale, or two elements for one.
    pub extended: Option<Prefill>,
}

/// A prefill kernel. Tiles are query tokens of one head.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillKernel {
    /// The launch, of a persistent grid.
    pub launch: Launch,
    /// Query tokens per tile.
    pub tile_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// CTAs that share a tile: a cluster.
    pub cluster_size: usize,
    /// Keys per TMA box, if the pages of the cache allow it.
    pub box_keys: usize,
    /// Whether it reads by TMA: 16-bit operands whose rows and strides TMA can address.
    pub tensor_maps: bool,
    /// Whether the problem's head dims are those that the module is compiled for.
    pub exact_dims: bool,
    /// Loads of keys and values.
    pub cache: registry::Cache,
    /// Whether it takes only scales that all keys, or values, of a head share.
    pub head_scales: bool,
    /// Whether it can leave partial states over splits of a tile's keys.
    pub splits_keys: bool,
    /// The value dim that the module is compiled for.
    pub value_dim: usize,
}

/// Room for the tile maps of a mask: which tiles the mask hides, and which it leaves unmodified.
/// Each kernel has its own, because operands choose the kernel, and layers that share a mask may
/// have others. Kernels whose tiles are the same share one.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapSpace {
    /// The launch that makes a map.
    pub launch: Launch,
    /// For the specialized kernel.
    pub specialized: MapPlace,
    /// For the fallback kernel.
    pub fallback: MapPlace,
}

impl Launches {
    /// CTAs of the largest launch.
    pub fn ctas(&self) -> usize {
        let prefill = self.fastest_prefill().map(|prefill| prefill.specialized.launch);
        let decode =
            self.hopper_decode.as_ref().or(self.decode.as_ref()).map(|decode| decode.launch);
        let ctas = |launch: Launch| launch.grid.iter().map(|&n| n as usize).product();
        prefill.into_iter().chain(decode).map(ctas).max().unwrap_or(0)
    }

    /// The launches that a run queues, in order; of the specialized kernels.
    pub fn in_order(&self) -> impl Iterator<Item = Launch> {
        let widen = self.widened.iter();
        let widen = widen.flat_map(Widened::launches);
        let prefill = self.fastest_prefill();
        let map = prefill.and_then(|prefill| prefill.map).map(|map| map.launch);
        let prefill = prefill.map(|prefill| prefill.specialized.launch);
        let decode = self.hopper_decode.as_ref().or(self.decode.as_ref());
        let combine = decode.and_then(|decode| decode.combine);
        let decode = decode.map(|decode| decode.launch);
        let prefix = self.prefix.iter();
        widen
            .chain(map)
            .chain(prefill)
            .chain(prefix.clone().map(|prefix| prefix.schedule))
            .chain(decode)
            .chain(combine)
            .chain(prefix.flat_map(|prefix| [prefix.kernel, prefix.merge]))
    }

    /// Whether a GPU can run all of them: it is of an architecture that the modules are compiled
    /// for, and has the shared memory.
    #[cfg(feature = "cuda")]
    pub(crate) fn run_on(&self, facts: &crate::machine::CudaFacts) -> bool {
        let runs = |name: &str| {
            let module = registry::MODULES.iter().find(|module| module.name() == name);
            module.is_some_and(|module| module.runs_on(facts.compute_capability))
        };
        let prefix = self.prefix.iter().map(|prefix| prefix.fallback);
        self.modules().all(|(module, _)| runs(module))
            && self
                .in_order()
                .chain(self.other_prefill())
                .chain(prefix)
                .all(|launch| launch.shared_bytes as usize <= facts.shared_bytes)
    }

    /// Prefill with the operands that it is fastest for.
    fn fastest_prefill(&self) -> Option<&Prefill> {
        self.prefill.as_ref().map(|prefill| prefill.fastest(&self.widened))
    }

    /// The prefill launches that may take the place of the first one.
    fn other_prefill(&self) -> impl Iterator<Item = Launch> {
        self.all_prefill().flat_map(Prefill::kernels).map(|kernel| kernel.launch)
    }

    /// Prefill over the cache, and over copies.
    fn all_prefill(&self) -> impl Iterator<Item = &Prefill> {
        self.prefill.iter().chain(self.widened.iter().flat_map(Widened::prefills))
    }

    /// Every module that a run may need, with the kernel's name in it.
    pub fn modules(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let others = self.decode.iter().flat_map(|decode| {
            [decode.launch.module, decode.fallback].into_iter().flat_map(|module| {
                let combine = decode.combine.map(|combine| (module, combine.entry));
                [(module, decode.launch.entry)].into_iter().chain(combine)
            })
        });
        let schedule =
            self.decode.iter().chain(&self.hopper_decode).filter_map(|decode| decode.schedule);
        let schedule = schedule.map(|schedule| (schedule.launch.module, schedule.launch.entry));
        let prefix = self.prefix.iter().flat_map(|prefix| {
            let launches = [prefix.schedule, prefix.kernel, prefix.merge];
            launches.into_iter().map(|launch| (prefix.fallback.module, launch.entry))
        });
        let widen = self.widened.iter();
        let widen = widen.flat_map(|widened| widened.units.into_iter().chain([widened.rounded]));
        let partials = self.all_prefill().filter_map(|prefill| prefill.partials);
        let combines = partials.map(|space| space.combine);
        let launches = self.in_order().chain(widen).chain(self.other_prefill()).chain(combines);
        let launches = launches.map(|launch| (launch.module, launch.entry));
        launches.chain(others).chain(schedule).chain(prefix)
    }
}

impl registry::Element {
    /// The element type of operands of that type.
    pub(crate) fn from_dtype(dtype: DType) -> registry::Element {
        match dtype {
            DType::F16 => registry::Element::F16,
            DType::BF16 => registry::Element::Bf16,
            _ => registry::Element::F32,
        }
    }
}

#[cfg(feature = "cuda")]
impl ElementType {
    /// The type of an operand's elements, as kernels know it.
    pub(crate) fn from_dtype(dtype: DType) -> ElementType {
        match dtype {
            DType::F16 => ElementType::F16,
            DType::BF16 => ElementType::BF16,
            _ => ElementType::F32,
        }
    }
}

#[cfg(feature = "cuda")]
impl CacheFormat {
    /// The format of keys or values, as kernels know it.
    pub(crate) fn from_dtype(dtype: DType) -> CacheFormat {
        match dtype {
            DType::F16 => CacheFormat::F16,
            DType::BF16 => CacheFormat::BF16,
            DType::E4M3 => CacheFormat::E4M3,
            DType::E5M2 => CacheFormat::E5M2,
            DType::I8 => CacheFormat::I8,
            DType::Q8_0 => CacheFormat::Q8_0,
            DType::Q4_0 => CacheFormat::Q4_0,
            DType::Mla656 | DType::Mla656Latent => CacheFormat::Mla656,
            _ => CacheFormat::F32,
        }
    }
}

// The registry imports nothing, so it numbers element types on its own.
const _: () = {
    use registry::Element;
    assert!(Element::F16.number() == ElementType::F16 as usize);
    assert!(Element::Bf16.number() == ElementType::BF16 as usize);
    assert!(Element::F32.number() == ElementType::F32 as usize);
};

/// The facts of a GPU by its name as a [`Machine`](crate::machine::Machine).
#[cfg(test)]
fn facts(name: &str) -> crate::machine::CudaFacts {
    match name.parse::<crate::machine::Machine>().unwrap().device {
        crate::machine::Device::Cuda(facts) => facts,
        _ => unreachable!("{name} is a GPU"),
    }
}
