//! The registry of CUDA modules: each is a kernel source compiled for one configuration.
//!
//! A module's name, its macros, its threads and its shared memory follow from its configuration.
//! `cargo xtask cuda build` compiles this very folder to learn what to build, so it may name
//! nothing else of the crate.

mod decode_wgmma;
mod latent;
mod name;
mod prefill;
mod tables;

use name::Name;
pub use tables::MODULES;

/// Shared memory that a CTA on Hopper can have, in bytes.
pub const HOPPER_SHARED_BYTES: usize = 227 << 10;

/// A kernel source compiled for one configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    name: Name,
    /// The configuration that the source is compiled for.
    pub config: Config,
    /// The GPUs that it runs on.
    pub architecture: Architecture,
    /// The crate that its images ship in.
    pub package: Package,
    /// Whether a register spill or local memory in any of its kernels, on any architecture, is an
    /// error. `docs/perf/cuda.md` lists the spills of the other modules.
    pub must_not_spill: bool,
}

/// A crate of images. A registry takes packages of 10 MiB, so there is more than one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    /// Keys and values of 16 and 32 bits, and the utilities.
    Base,
    /// Keys and values of 8 and 4 bits, and in mixed formats.
    EightBit,
}

impl Package {
    /// Every crate of images.
    pub const ALL: [Package; 2] = [Package::Base, Package::EightBit];

    /// The name of the crate, and of its folder.
    pub const fn name(self) -> &'static str {
        match self {
            Package::Base => "regard-cuda-images",
            Package::EightBit => "regard-cuda-images-8bit",
        }
    }
}

/// Modules that are compiled from one source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Few query rows per key/value head, keys divided among CTAs by stream-K.
    Decode,
    /// The same of rows that have lists of pages.
    DecodePages,
    /// The same over latent caches, with WGMMA and TMA: values are the first dims of keys.
    DecodeLatent,
    /// The same of more than 8 rows, with WGMMA: each key is read once, and each code converted
    /// once, for all rows of a tile.
    DecodeWgmma,
    /// The rows of prefix groups over their shared prefix, with `mma.sync`.
    PrefixSm80,
    /// The same with WGMMA and TMA.
    PrefixSm90,
    /// Prefill with `mma.sync`.
    PrefillSm80,
    /// Prefill with WGMMA and TMA.
    PrefillSm90,
    /// The same for short windows: the query heads of a key/value head share the keys of a tile.
    PrefillSm90Window,
    /// Prefill with WGMMA and TMA for large head dims: a cluster of two CTAs has a tile.
    PrefillSm90Wide,
    /// Writes new keys and values into a cache.
    Append,
    /// Merges partial states.
    Merge,
    /// Measures the bandwidth of memory.
    Ceiling,
    /// Finds the tiles that a mask empties or leaves unchanged.
    MaskMap,
    /// Copies keys and values of codes into the type of queries.
    Widen,
    /// Combines the partial states of prefill over splits of the keys.
    CombineSplits,
}

/// The configuration of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Config {
    /// A module of [`Family::Decode`].
    Decode(DecodeConfig),
    /// A prefill module.
    Prefill(PrefillConfig),
    /// A module for prefix groups.
    Prefix(PrefillConfig),
    /// A module for all element types and head dims.
    Utility(Family),
}

/// The minimum architecture of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Architecture {
    /// `compute_80`: every GPU from compute capability 8.0 on.
    Compute80,
    /// `compute_90`: Hopper and later.
    Compute90,
    /// `compute_90a`: Hopper only.
    Compute90a,
}

/// The type of queries, keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

/// The storage of the keys and values that a module reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cache {
    /// As elements of the queries' type.
    #[default]
    Elements,
    /// 8-bit codes with scales: e4m3, e5m2 or i8 each, known at run time.
    Bytes,
    /// Both as GGUF's q8_0.
    Q8_0,
    /// Both as GGUF's q4_0.
    Q4_0,
    /// Any format each, dequantized to the module's type while they are loaded.
    Any,
    /// As elements of the queries' type, and a scale per key beside them.
    Scaled,
    /// As elements of the queries' type, that many of which (two or three) add up to one of a key:
    /// a rounded one, and what rounding took, which may be rounded again.
    Terms(usize),
    /// As elements, and values are the first dims of keys.
    Latent,
    /// As records of `mla656`, whose first dims are the values.
    Mla656,
    /// Keys and values in a class each: one of [`Cache::PAIRS`].
    Pair(Storage, Storage),
}

/// How keys, or values, are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// As elements of the queries' type.
    Elements,
    /// As 8-bit codes.
    Bytes,
    /// As GGUF's q8_0.
    Q8_0,
    /// As GGUF's q4_0.
    Q4_0,
}

impl Storage {
    /// The number that kernels know it by: `CacheClass` of `cache_class.cuh`.
    const fn number(self) -> usize {
        self as usize
    }

    /// Its part of a module's name.
    const fn name(self) -> &'static str {
        match self {
            Storage::Elements => "elements_",
            Storage::Bytes => "bytes_",
            Storage::Q8_0 => "q8_0_",
            Storage::Q4_0 => "q4_0_",
        }
    }

    /// Whether it is in blocks.
    pub const fn has_blocks(self) -> bool {
        matches!(self, Storage::Q8_0 | Storage::Q4_0)
    }

    /// Bytes of 32 values: blocks have their scale inside. `None`: those of elements.
    pub const fn block_bytes(self) -> Option<usize> {
        match self {
            Storage::Elements => None,
            Storage::Bytes => Some(32),
            Storage::Q8_0 => Some(34),
            Storage::Q4_0 => Some(18),
        }
    }

    /// Bytes of a key or a value of `dim` dims in memory, for one head.
    pub const fn row_bytes(self, dim: usize, element_bytes: usize) -> usize {
        match self.block_bytes() {
            Some(bytes) => dim / 32 * bytes,
            None => dim * element_bytes,
        }
    }

    /// Bytes from row to row in the shared memory of decode: `PITCH` of `decode_shape.cuh`.
    pub const fn pitch(self, row_bytes: usize) -> usize {
        match self {
            // Rows are copied from the multiple of 16 bytes before; an odd number of 16 bytes.
            Storage::Q8_0 | Storage::Q4_0 => {
                ((row_bytes + 16 - row_alignment(row_bytes)).div_ceil(16) | 1) * 16
            }
            Storage::Bytes if row_bytes == 64 => 64,
            Storage::Elements | Storage::Bytes => row_bytes.next_multiple_of(128),
        }
    }
}

impl Cache {
    /// The pairs of classes, keys and values, that modules are compiled for.
    pub const PAIRS: [(Storage, Storage); 4] = [
        (Storage::Elements, Storage::Bytes),
        (Storage::Elements, Storage::Q8_0),
        (Storage::Elements, Storage::Q4_0),
        (Storage::Q8_0, Storage::Q4_0),
    ];

    /// How keys and how values are stored. Of records and of any format: as they are multiplied.
    pub const fn sides(self) -> (Storage, Storage) {
        let both = match self {
            Cache::Pair(keys, values) => return (keys, values),
            Cache::Elements
            | Cache::Scaled
            | Cache::Terms(_)
            | Cache::Any
            | Cache::Latent
            | Cache::Mla656 => Storage::Elements,
            Cache::Bytes => Storage::Bytes,
            Cache::Q8_0 => Storage::Q8_0,
            Cache::Q4_0 => Storage::Q4_0,
        };
        (both, both)
    }

    /// The number that kernels know it by: `CacheClass` of `cache_class.cuh`.
    const fn number(self) -> usize {
        match self {
            Cache::Elements | Cache::Scaled | Cache::Terms(_) | Cache::Latent => 0,
            Cache::Bytes => 1,
            Cache::Q8_0 => 2,
            Cache::Q4_0 => 3,
            Cache::Any => 4,
            Cache::Mla656 => 5,
            Cache::Pair(..) => 6,
        }
    }

    /// Its parts of a module's name.
    const fn names(self) -> [&'static str; 2] {
        let name = match self {
            Cache::Elements => "",
            Cache::Bytes => "bytes_",
            Cache::Q8_0 => "q8_0_",
            Cache::Q4_0 => "q4_0_",
            Cache::Any => "any_",
            Cache::Scaled => "scaled_",
            Cache::Terms(3) => "terms3_",
            Cache::Terms(_) => "terms_",
            Cache::Latent => "latent_",
            Cache::Mla656 => "mla656_",
            Cache::Pair(keys, values) => return [keys.name(), values.name()],
        };
        [name, ""]
    }

    /// Whether prefill converts keys and values on the way into products.
    pub const fn is_converted(self) -> bool {
        !matches!(self, Cache::Elements | Cache::Scaled | Cache::Terms(_))
    }

    /// Elements that add up to one of a key.
    pub const fn key_terms(self) -> usize {
        match self {
            Cache::Terms(terms) => terms,
            _ => 1,
        }
    }

    /// Whether values are the first dims of keys.
    pub const fn is_latent(self) -> bool {
        matches!(self, Cache::Latent | Cache::Mla656)
    }

    /// Whether shared memory holds codes, which are converted on the way into products.
    pub const fn has_codes(self) -> bool {
        !matches!(self.sides(), (Storage::Elements, Storage::Elements))
    }
}

/// Alignment of a row of q8_0 or q4_0 blocks, in bytes: `ALIGNMENT` of `decode_shape.cuh`.
pub const fn row_alignment(row_bytes: usize) -> usize {
    match row_bytes % 16 {
        0 => 16,
        8 => 8,
        _ => 4,
    }
}

/// Problems that an attention module accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// Plain scores (dot products times the scale), exact head dims and aligned rows only.
    Specialized,
    /// All features, smaller head dims and rows of any alignment.
    Fallback,
}

/// Element type, head dims and build of an attention module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operands {
    /// The type of queries, keys and values.
    pub element: Element,
    /// The largest head dim of queries and keys.
    pub head_dim: usize,
    /// The largest head dim of values.
    pub value_dim: usize,
    /// Problems of these dims that it accepts.
    pub build: Build,
}

/// The configuration of a decode module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeConfig {
    /// Element type, head dims and build.
    pub operands: Operands,
    /// Storage of keys and values.
    pub cache: Cache,
    /// Query rows per tile.
    pub tile_rows: usize,
    /// Adjacent key/value heads of a tile.
    pub tile_heads: usize,
    /// Whether each row has a list of the keys that it attends to.
    pub lists: bool,
    /// Whether it multiplies by WGMMA, from registers: of [`Family::DecodeWgmma`].
    pub wgmma: bool,
}

/// The configuration of a prefill module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillConfig {
    /// Element type, head dims and build.
    pub operands: Operands,
    /// Storage of keys and values: [`Cache::Elements`], [`Cache::Any`]; and with WGMMA
    /// [`Cache::Bytes`], [`Cache::Scaled`] and [`Cache::Terms`].
    pub cache: Cache,
    /// Query tokens per tile.
    pub tile_rows: usize,
    /// Keys per tile.
    pub tile_keys: usize,
    /// The instructions of the main loop, and its own parameters.
    pub mainloop: Mainloop,
}

/// The main loop of a prefill module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mainloop {
    /// `mma.sync`.
    Sm80 {
        /// Query rows per warp: 16 or 32.
        warp_rows: usize,
        /// Warps that share these rows. Each takes a part of the keys in the first product and of
        /// the value dims in the second.
        value_warps: usize,
        /// K and V tiles that shared memory holds: 4, keys and values of two K tiles; 2, keys and
        /// values of one; 1, keys or values of one.
        kv_buffers: usize,
        /// Minimum resident CTAs per multiprocessor (`__launch_bounds__`): limits registers.
        min_ctas_per_sm: usize,
        /// Whether a larger module of the same operands ships too.
        small: bool,
    },
    /// WGMMA and TMA, one producer and several consumer warpgroups.
    Sm90 {
        /// The sequences that the tile shape is for.
        keys: KeyRange,
    },
    /// The same for windows that leave each 64 rows at most
    /// [`WINDOW_BLOCKS`](PrefillConfig::WINDOW_BLOCKS) blocks of keys.
    Sm90Window,
    /// WGMMA and TMA with a cluster of two CTAs per tile.
    Sm90Wide,
    /// WGMMA and TMA for prefix groups.
    Sm90Prefix,
}

/// The key counts that a module is selected for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRange {
    /// All.
    Any,
    /// Up to [`KeyRange::MAX_SHORT`] keys.
    Short,
    /// Up to [`KeyRange::MAX_SHORT`] keys, causal.
    ShortCausal,
}

impl KeyRange {
    /// Maximum keys of a short sequence.
    pub const MAX_SHORT: usize = 1024;

    /// Whether a problem of this many keys is in the range.
    pub fn contains(self, keys: usize, causal: bool) -> bool {
        match self {
            KeyRange::Any => true,
            KeyRange::Short => keys <= KeyRange::MAX_SHORT,
            KeyRange::ShortCausal => keys <= KeyRange::MAX_SHORT && causal,
        }
    }
}

impl Family {
    /// The file in `kernels/`.
    pub const fn source(self) -> &'static str {
        match self {
            Family::Decode => "decode.cu",
            Family::DecodePages => "decode_pages.cu",
            Family::DecodeLatent => "decode_latent_sm90.cu",
            Family::DecodeWgmma => "decode_wgmma_sm90.cu",
            Family::PrefixSm80 | Family::PrefillSm80 => "prefill_sm80.cu",
            Family::PrefixSm90 => "prefix_sm90.cu",
            Family::PrefillSm90 => "prefill_sm90.cu",
            Family::PrefillSm90Window => "prefill_sm90_window.cu",
            Family::PrefillSm90Wide => "prefill_sm90_wide.cu",
            Family::Append => "append.cu",
            Family::Merge => "merge.cu",
            Family::Ceiling => "ceiling.cu",
            Family::MaskMap => "mask_map.cu",
            Family::Widen => "widen.cu",
            Family::CombineSplits => "combine_splits.cu",
        }
    }

    /// The name of all its modules, or what their names start with.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Decode | Family::DecodePages | Family::DecodeLatent | Family::DecodeWgmma => {
                "decode"
            }
            Family::PrefillSm80
            | Family::PrefillSm90
            | Family::PrefillSm90Window
            | Family::PrefillSm90Wide => "prefill",
            Family::PrefixSm80 | Family::PrefixSm90 => "prefix",
            Family::Append => "append",
            Family::Merge => "merge",
            Family::Ceiling => "ceiling",
            Family::MaskMap => "mask_map",
            Family::Widen => "widen",
            Family::CombineSplits => "combine_splits",
        }
    }

    /// Whether its main loop multiplies by WGMMA and reads by TMA.
    pub const fn uses_wgmma(self) -> bool {
        match self {
            Family::DecodeLatent
            | Family::DecodeWgmma
            | Family::PrefixSm90
            | Family::PrefillSm90
            | Family::PrefillSm90Window
            | Family::PrefillSm90Wide => true,
            Family::Decode
            | Family::DecodePages
            | Family::PrefixSm80
            | Family::PrefillSm80
            | Family::Append
            | Family::Merge
            | Family::Ceiling
            | Family::MaskMap
            | Family::Widen
            | Family::CombineSplits => false,
        }
    }
}

impl Architecture {
    /// As NVRTC calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Compute80 => "compute_80",
            Architecture::Compute90 => "compute_90",
            Architecture::Compute90a => "compute_90a",
        }
    }

    /// Whether a GPU of that compute capability (90 is 9.0) is one of them.
    pub const fn runs_on(self, compute_capability: u32) -> bool {
        match self {
            Architecture::Compute80 => compute_capability >= 80,
            Architecture::Compute90 => compute_capability >= 90,
            Architecture::Compute90a => compute_capability == 90,
        }
    }
}

impl Element {
    /// Bytes per element.
    pub const fn bytes(self) -> usize {
        match self {
            Element::F16 | Element::Bf16 => 2,
            Element::F32 => 4,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::F32 => "f32",
        }
    }

    /// The number that kernels know it by: `ElementType` of their parameters.
    pub(crate) const fn number(self) -> usize {
        match self {
            Element::F16 => 0,
            Element::Bf16 => 1,
            Element::F32 => 2,
        }
    }
}

impl Operands {
    /// Whether problems of these head dims fit.
    pub const fn fits(&self, head_dim: usize, value_dim: usize) -> bool {
        head_dim <= self.head_dim && value_dim <= self.value_dim
    }

    /// Whether a module of these operands needs no padding for these head dims.
    pub const fn has_dims(&self, head_dim: usize, value_dim: usize) -> bool {
        head_dim == self.head_dim && value_dim == self.value_dim
    }

    fn defines(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("ELEMENT_TYPE", self.element.number()),
            ("HEAD_DIM", self.head_dim),
            ("VALUE_DIM", self.value_dim),
        ]
    }

    /// The macro for the build.
    fn fallback(&self) -> (&'static str, usize) {
        ("FALLBACK", (self.build == Build::Fallback) as usize)
    }

    /// The start of a module's name.
    const fn name(&self, family: Family) -> Name {
        let name = Name::new(family.name()).text("_").text(self.element.name());
        name.text("_").number(self.head_dim).text("_").number(self.value_dim).text("_")
    }

    const fn build_name(&self) -> &'static str {
        match self.build {
            Build::Specialized => "plain",
            Build::Fallback => "fallback",
        }
    }
}

impl DecodeConfig {
    /// Tiles of one key/value head without lists, multiplied by `mma.sync`.
    pub const fn new(operands: Operands, cache: Cache, tile_rows: usize) -> DecodeConfig {
        DecodeConfig { operands, cache, tile_rows, tile_heads: 1, lists: false, wgmma: false }
    }

    /// Threads that compute in a CTA of [`Family::Decode`], at most.
    pub const MAX_THREADS: usize = 256;

    /// Threads that copy, where tiles have several heads.
    pub const COPY_THREADS: usize = 128;

    /// The source that it is compiled from.
    pub const fn family(&self) -> Family {
        if self.cache.is_latent() {
            Family::DecodeLatent
        } else if self.wgmma {
            Family::DecodeWgmma
        } else if self.takes_page_lists() {
            Family::DecodePages
        } else {
            Family::Decode
        }
    }

    /// Whether lists are of pages only.
    pub const fn takes_page_lists(&self) -> bool {
        self.lists && !self.cache.is_latent() && matches!(self.operands.build, Build::Specialized)
    }

    const fn name(&self, architecture: Architecture) -> Name {
        let name = self.operands.name(Family::Decode);
        let [first, second] = self.cache.names();
        let name = name.text(first).text(second);
        let name = name.text("r").number(self.tile_rows).text("_");
        let name = match self.tile_heads {
            1 => name,
            heads => name.text("h").number(heads).text("_"),
        };
        let name = name.text(match self.lists {
            true if self.takes_page_lists() => "page_lists",
            true => "lists",
            false => self.operands.build_name(),
        });
        name.text(match architecture {
            Architecture::Compute80 => "",
            Architecture::Compute90a if self.wgmma => "_sm90a",
            Architecture::Compute90 | Architecture::Compute90a => "_sm90",
        })
    }

    fn defines(&self) -> Vec<(&'static str, usize)> {
        let mut defines = self.operands.defines();
        defines.push(("TILE_ROWS", self.tile_rows));
        defines.push(self.operands.fallback());
        if self.tile_heads > 1 {
            defines.push(("HEADS", self.tile_heads));
        }
        if self.lists {
            defines.push(("LISTS", 1));
        }
        match self.cache {
            cache if self.wgmma => {
                defines.extend([
                    ("CACHE", cache.number()),
                    ("THREADS", DecodeConfig::WGMMA_THREADS),
                    ("RING_STAGES", self.wgmma_stages()),
                ]);
            }
            Cache::Elements | Cache::Scaled | Cache::Terms(_) => {
                defines.push(("MAX_THREADS", DecodeConfig::MAX_THREADS));
            }
            Cache::Bytes | Cache::Q8_0 | Cache::Q4_0 | Cache::Any => {
                let copying = if self.tile_heads > 1 { DecodeConfig::COPY_THREADS } else { 0 };
                defines.push(("MAX_THREADS", DecodeConfig::MAX_THREADS + copying));
                defines.push(("CACHE", self.cache.number()));
            }
            Cache::Pair(keys, values) => defines.extend([
                ("MAX_THREADS", DecodeConfig::MAX_THREADS),
                ("CACHE", self.cache.number()),
                ("KEY_CACHE", keys.number()),
                ("VALUE_CACHE", values.number()),
            ]),
            Cache::Latent | Cache::Mla656 => {
                defines.push(("CTAS_PER_TILE", self.ctas_per_tile()));
                defines.push(("THREADS", self.latent_threads()));
                defines.push(("SHARED_BYTES", self.latent_shared_bytes()));
            }
        }
        if matches!(self.cache, Cache::Mla656) {
            defines.push(("CACHE", self.cache.number()));
        }
        defines
    }
}

impl Module {
    const fn new(config: Config, architecture: Architecture) -> Module {
        let name = match &config {
            Config::Decode(decode) => decode.name(architecture),
            Config::Prefill(prefill) => prefill.name(),
            Config::Prefix(prefix) => prefix.prefix_name(architecture),
            Config::Utility(family) => Name::new(family.name()),
        };
        Module { name, config, architecture, package: Package::Base, must_not_spill: false }
    }

    /// Its name, and the stem of its image files: letters, digits and `_`.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The source that it is compiled from.
    pub const fn family(&self) -> Family {
        match &self.config {
            Config::Decode(decode) => decode.family(),
            Config::Prefill(prefill) => prefill.family(),
            Config::Prefix(prefix) => prefix.prefix_family(),
            Config::Utility(family) => *family,
        }
    }

    /// Element type, head dims and build, unless it is for all.
    pub const fn operands(&self) -> Option<&Operands> {
        match &self.config {
            Config::Decode(decode) => Some(&decode.operands),
            Config::Prefill(prefill) | Config::Prefix(prefill) => Some(&prefill.operands),
            Config::Utility(_) => None,
        }
    }

    /// The storage of the keys and values that it reads; [`Cache::Elements`] for utilities.
    pub const fn cache(&self) -> Cache {
        match &self.config {
            Config::Decode(decode) => decode.cache,
            Config::Prefill(prefill) | Config::Prefix(prefill) => prefill.cache,
            Config::Utility(_) => Cache::Elements,
        }
    }

    /// Macros defined for it: name and value.
    pub fn defines(&self) -> Vec<(&'static str, usize)> {
        match &self.config {
            Config::Decode(decode) => decode.defines(),
            Config::Prefill(prefill) => prefill.defines(),
            Config::Prefix(prefix) => prefix.prefix_defines(),
            Config::Utility(_) => Vec::new(),
        }
    }

    /// Whether a module of the same configuration for Hopper and later ships too.
    pub fn is_replaced_on_hopper(&self) -> bool {
        let replaces = |other: &Module| {
            other.config == self.config && other.architecture == Architecture::Compute90
        };
        self.architecture == Architecture::Compute80 && MODULES.iter().any(replaces)
    }

    /// Whether it is compiled for plain scores and exact head dims only.
    pub fn is_specialized(&self) -> bool {
        self.operands().is_some_and(|operands| operands.build == Build::Specialized)
    }

    /// Whether a GPU of that compute capability (90 is 9.0) can run it.
    pub const fn runs_on(&self, compute_capability: u32) -> bool {
        self.architecture.runs_on(compute_capability)
    }
}

/// The decode modules.
pub fn decode_modules() -> impl Iterator<Item = (&'static Module, &'static DecodeConfig)> {
    MODULES.iter().filter_map(|module| match &module.config {
        Config::Decode(decode) => Some((module, decode)),
        Config::Prefill(_) | Config::Prefix(_) | Config::Utility(_) => None,
    })
}

/// The prefill modules.
pub fn prefill_modules() -> impl Iterator<Item = (&'static Module, &'static PrefillConfig)> {
    MODULES.iter().filter_map(|module| match &module.config {
        Config::Prefill(prefill) => Some((module, prefill)),
        Config::Decode(_) | Config::Prefix(_) | Config::Utility(_) => None,
    })
}

/// The modules for prefix groups.
pub fn prefix_modules() -> impl Iterator<Item = (&'static Module, &'static PrefillConfig)> {
    MODULES.iter().filter_map(|module| match &module.config {
        Config::Prefix(prefix) => Some((module, prefix)),
        Config::Decode(_) | Config::Prefill(_) | Config::Utility(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_specialized_decode_module_has_a_fallback_of_its_tile() {
        for (module, config) in decode_modules() {
            // Modules for latent caches fall back to the modules for elements, or for any format,
            // those for several heads to the modules for one.
            if config.cache.is_latent() || config.wgmma || config.tile_heads > 1 {
                continue;
            }
            let operands = Operands { build: Build::Fallback, ..config.operands };
            let fallback = DecodeConfig { operands, ..*config };
            let found = decode_modules().filter(|(_, other)| **other == fallback).count();
            assert_eq!(found, 1, "{}", module.name());
        }
    }

    #[test]
    fn the_largest_head_dims_run_in_the_shared_memory_of_every_gpu() {
        // A CTA on Hopper has 227 KiB, one on a consumer GPU 99 KiB.
        for (module, config) in prefill_modules() {
            assert!(config.shared_bytes() <= HOPPER_SHARED_BYTES, "{}", module.name());
        }
        for element in [Element::F16, Element::Bf16, Element::F32] {
            let largest =
                Operands { element, head_dim: 576, value_dim: 576, build: Build::Fallback };
            let fits = |config: &PrefillConfig| {
                config.operands == largest && config.shared_bytes() <= 99 << 10
            };
            assert!(prefill_modules().any(|(_, config)| fits(config)), "{element:?}");
        }
    }
}
