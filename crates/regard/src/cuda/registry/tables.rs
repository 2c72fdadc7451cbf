//! The table of modules.

use super::Architecture::{self, Compute80, Compute90, Compute90a};
use super::Build::{self, Fallback, Specialized};
use super::{
    Cache, Config, DecodeConfig, Element, Family, KeyRange, Mainloop, Module, Operands, Package,
    PrefillConfig,
};

/// Every module that ships.
pub static MODULES: [Module; COUNT] = collect();

/// The rows of one element type.
struct Rows {
    element: Element,
}

const F16: Rows = Rows { element: Element::F16 };
const BF16: Rows = Rows { element: Element::Bf16 };
const F32: Rows = Rows { element: Element::F32 };

/// The extents of a prefill tile.
struct Tile {
    rows: usize,
    keys: usize,
}

impl Rows {
    const fn operands(&self, head_dim: usize, value_dim: usize, build: Build) -> Operands {
        Operands { element: self.element, head_dim, value_dim, build }
    }

    /// A decode module: head dims, query rows per tile, build, GPUs.
    const fn decode(
        &self,
        head_dim: usize,
        value_dim: usize,
        tile_rows: usize,
        build: Build,
        architecture: Architecture,
    ) -> Module {
        let operands = self.operands(head_dim, value_dim, build);
        let config = DecodeConfig::new(operands, Cache::Elements, tile_rows);
        Module::new(Config::Decode(config), architecture)
    }

    /// A decode module for a cache that is not stored as queries are: head dims of keys and of
    /// values, query rows per tile, build, GPUs.
    const fn decode_cache(
        &self,
        cache: Cache,
        (head_dim, value_dim): (usize, usize),
        tile_rows: usize,
        build: Build,
    ) -> Module {
        let operands = self.operands(head_dim, value_dim, build);
        let architecture = match build {
            Specialized => Compute90,
            Fallback => Compute80,
        };
        let config = DecodeConfig::new(operands, cache, tile_rows);
        Module::new(Config::Decode(config), architecture)
    }

    /// A decode module for blocks of several adjacent key/value heads per tile, each with up to 8
    /// rows, on Hopper: storage, head dim, heads.
    const fn heads(&self, cache: Cache, dims: usize, tile_heads: usize) -> Module {
        let operands = self.operands(dims, dims, Specialized);
        let one = DecodeConfig::new(operands, cache, 8 * tile_heads);
        let config = DecodeConfig { tile_heads, ..one };
        Module::new(Config::Decode(config), Compute90a)
    }

    /// The decode modules of a 16-bit type for several heads. At head dim 256, and at 64 over
    /// `q4_0`, they are not faster than modules for one.
    const fn decode_heads(&self) -> [Module; 3] {
        [
            self.heads(Cache::Q8_0, 64, 4),
            self.heads(Cache::Q8_0, 128, 4),
            self.heads(Cache::Q4_0, 128, 4),
        ]
    }

    /// A decode module for latent caches, 576/512: storage, query rows per tile, whether rows have
    /// lists of keys.
    const fn latent(&self, cache: Cache, tile_rows: usize, lists: bool) -> Module {
        let operands = self.operands(576, 512, Specialized);
        let config = DecodeConfig { lists, ..DecodeConfig::new(operands, cache, tile_rows) };
        Module::new(Config::Decode(config), Compute90a)
    }

    /// A decode module with WGMMA, for Hopper: storage, head dim, query rows per tile.
    const fn wgmma(&self, cache: Cache, dims: usize, tile_rows: usize) -> Module {
        let operands = self.operands(dims, dims, Specialized);
        let config = DecodeConfig { wgmma: true, ..DecodeConfig::new(operands, cache, tile_rows) };
        Module::new(Config::Decode(config), Compute90a)
    }

    /// The decode modules with WGMMA over codes. Over `q4_0` at head dim 64, tiles of 16 rows are
    /// slower than those of 32. Their loaders have few registers, and spill between pieces of work.
    const fn decode_wgmma_codes(&self) -> [Module; 15] {
        [
            self.wgmma(Cache::Bytes, 64, 16),
            self.wgmma(Cache::Q8_0, 64, 16),
            self.wgmma(Cache::Bytes, 128, 16),
            self.wgmma(Cache::Q8_0, 128, 16),
            self.wgmma(Cache::Q4_0, 128, 16),
            self.wgmma(Cache::Bytes, 256, 16),
            self.wgmma(Cache::Q8_0, 256, 16),
            self.wgmma(Cache::Q4_0, 256, 16),
            self.wgmma(Cache::Bytes, 64, 32),
            self.wgmma(Cache::Q8_0, 64, 32),
            self.wgmma(Cache::Q4_0, 64, 32),
            self.wgmma(Cache::Bytes, 128, 32),
            self.wgmma(Cache::Q8_0, 128, 32),
            self.wgmma(Cache::Q4_0, 128, 32),
            self.wgmma(Cache::Bytes, 256, 32),
        ]
    }

    /// The decode modules with WGMMA over 16-bit elements. At smaller head dims `mma.sync` reads
    /// them as fast as memory brings them.
    const fn decode_wgmma(&self) -> [Module; 1] {
        [self.wgmma(Cache::Elements, 256, 32)]
    }

    /// A decode module for rows with lists of keys: storage, head dims of keys and values, query
    /// rows per tile.
    const fn lists(&self, cache: Cache, dims: usize, tile_rows: usize) -> Module {
        let operands = self.operands(dims, dims, Fallback);
        let config = DecodeConfig { lists: true, ..DecodeConfig::new(operands, cache, tile_rows) };
        Module::new(Config::Decode(config), Compute80)
    }

    /// A decode module for rows with lists of pages: head dims of keys and values.
    const fn page_lists(&self, dims: usize, architecture: Architecture) -> Module {
        let operands = self.operands(dims, dims, Specialized);
        let one = DecodeConfig::new(operands, Cache::Elements, 8);
        let config = DecodeConfig { lists: true, ..one };
        Module::new(Config::Decode(config), architecture)
    }

    /// A prefill module: head dims, build, tile, main loop.
    const fn prefill(
        &self,
        head_dim: usize,
        value_dim: usize,
        build: Build,
        Tile { rows: tile_rows, keys: tile_keys }: Tile,
        mainloop: Mainloop,
    ) -> Module {
        let operands = self.operands(head_dim, value_dim, build);
        let architecture = match mainloop {
            Mainloop::Sm80 { .. } => Compute80,
            Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Wide
            | Mainloop::Sm90Prefix => Compute90a,
        };
        let cache = Cache::Elements;
        let config = PrefillConfig { operands, cache, tile_rows, tile_keys, mainloop };
        Module::new(Config::Prefill(config), architecture)
    }

    /// The same for keys and values that are stored otherwise.
    const fn prefill_cache(
        &self,
        cache: Cache,
        build: Build,
        dims: usize,
        tile: Tile,
        loops: Mainloop,
    ) -> Module {
        let module = self.prefill(dims, dims, build, tile, loops);
        let Config::Prefill(config) = module.config else { panic!("a prefill module") };
        Module::new(Config::Prefill(PrefillConfig { cache, ..config }), module.architecture)
    }

    /// The decode modules of a 16-bit type. Specialized modules, for the head dims that models
    /// have, come in two builds: that for Hopper and later supports programmatic dependent launch.
    const fn decode_16_bit(&self) -> [Module; 36] {
        [
            self.decode(64, 64, 8, Specialized, Compute90),
            self.decode(64, 64, 32, Specialized, Compute90),
            self.decode(64, 64, 64, Specialized, Compute90),
            self.decode(128, 128, 8, Specialized, Compute90),
            self.decode(128, 128, 32, Specialized, Compute90),
            self.decode(128, 128, 64, Specialized, Compute90),
            self.decode(256, 256, 8, Specialized, Compute90),
            self.decode(256, 256, 32, Specialized, Compute90),
            self.decode(512, 512, 8, Specialized, Compute90),
            self.decode(576, 512, 32, Specialized, Compute90),
            self.decode(64, 64, 8, Specialized, Compute80),
            self.decode(64, 64, 32, Specialized, Compute80),
            self.decode(64, 64, 64, Specialized, Compute80),
            self.decode(128, 128, 8, Specialized, Compute80),
            self.decode(128, 128, 32, Specialized, Compute80),
            self.decode(128, 128, 64, Specialized, Compute80),
            self.decode(256, 256, 8, Specialized, Compute80),
            self.decode(256, 256, 32, Specialized, Compute80),
            self.decode(64, 64, 8, Fallback, Compute80).must_not_spill(),
            self.decode(64, 64, 32, Fallback, Compute80),
            self.decode(64, 64, 64, Fallback, Compute80),
            self.decode(96, 96, 8, Fallback, Compute80),
            self.decode(96, 96, 64, Fallback, Compute80),
            self.decode(128, 128, 8, Fallback, Compute80),
            self.decode(128, 128, 32, Fallback, Compute80),
            self.decode(128, 128, 64, Fallback, Compute80),
            self.decode(192, 128, 8, Fallback, Compute80),
            self.decode(192, 128, 64, Fallback, Compute80),
            self.decode(256, 256, 8, Fallback, Compute80),
            self.decode(256, 256, 32, Fallback, Compute80),
            self.decode(512, 512, 8, Fallback, Compute80),
            self.decode(512, 512, 32, Fallback, Compute80),
            self.decode(576, 512, 8, Fallback, Compute80),
            self.decode(576, 512, 32, Fallback, Compute80),
            self.decode(576, 576, 8, Fallback, Compute80),
            self.decode(576, 576, 32, Fallback, Compute80),
        ]
    }

    /// The decode modules of a 16-bit type for 8-bit codes. The specialized ones are for Hopper and
    /// later.
    const fn decode_bytes(&self) -> [Module; 16] {
        let bytes = Cache::Bytes;
        [
            self.decode_cache(bytes, (64, 64), 8, Specialized),
            self.decode_cache(bytes, (64, 64), 32, Specialized),
            self.decode_cache(bytes, (128, 128), 8, Specialized),
            self.decode_cache(bytes, (128, 128), 32, Specialized),
            self.decode_cache(bytes, (256, 256), 8, Specialized),
            self.decode_cache(bytes, (256, 256), 32, Specialized),
            self.decode_cache(bytes, (512, 512), 8, Specialized),
            self.decode_cache(bytes, (512, 512), 32, Specialized),
            self.decode_cache(bytes, (64, 64), 8, Fallback),
            self.decode_cache(bytes, (64, 64), 32, Fallback),
            self.decode_cache(bytes, (128, 128), 8, Fallback),
            self.decode_cache(bytes, (128, 128), 32, Fallback),
            self.decode_cache(bytes, (256, 256), 8, Fallback),
            self.decode_cache(bytes, (256, 256), 32, Fallback),
            self.decode_cache(bytes, (512, 512), 8, Fallback),
            self.decode_cache(bytes, (512, 512), 32, Fallback),
        ]
    }

    /// The decode modules of a 16-bit type for blocks of `q8_0` or `q4_0`.
    const fn decode_blocks(&self, blocks: Cache) -> [Module; 10] {
        [
            self.decode_cache(blocks, (64, 64), 8, Specialized),
            self.decode_cache(blocks, (64, 64), 32, Specialized),
            self.decode_cache(blocks, (128, 128), 8, Specialized),
            self.decode_cache(blocks, (128, 128), 32, Specialized),
            self.decode_cache(blocks, (256, 256), 8, Specialized),
            self.decode_cache(blocks, (64, 64), 8, Fallback),
            self.decode_cache(blocks, (64, 64), 32, Fallback),
            self.decode_cache(blocks, (128, 128), 8, Fallback),
            self.decode_cache(blocks, (128, 128), 32, Fallback),
            self.decode_cache(blocks, (256, 256), 8, Fallback),
        ]
    }

    /// The same for head dims to 512: in bf16 only, as models of such dims are.
    const fn decode_wide_blocks(&self, blocks: Cache) -> [Module; 2] {
        [
            self.decode_cache(blocks, (512, 512), 8, Specialized),
            self.decode_cache(blocks, (512, 512), 8, Fallback),
        ]
    }

    /// The decode modules of a 16-bit type for keys of one class and values of another.
    const fn decode_pairs<const N: usize>(
        &self,
        dims: [usize; N],
    ) -> [[Module; N]; Cache::PAIRS.len()] {
        let mut modules = [[self.decode_pair(0, dims[0]); N]; Cache::PAIRS.len()];
        let mut i = 0;
        while i < modules.len() * N {
            modules[i / N][i % N] = self.decode_pair(i / N, dims[i % N]);
            i += 1;
        }
        modules
    }

    const fn decode_pair(&self, number: usize, dim: usize) -> Module {
        let (keys, values) = Cache::PAIRS[number];
        self.decode_cache(Cache::Pair(keys, values), (dim, dim), 8, Fallback)
    }

    /// The decode modules of a 16-bit type for latent caches, on Hopper.
    const fn decode_latent(&self) -> [Module; 6] {
        [
            self.latent(Cache::Latent, 16, false),
            self.latent(Cache::Latent, 64, false),
            self.latent(Cache::Latent, 128, false),
            self.latent(Cache::Latent, 16, true),
            self.latent(Cache::Latent, 64, true),
            self.latent(Cache::Latent, 128, true),
        ]
    }

    /// The same over records of `mla656`.
    const fn decode_mla656(&self) -> [Module; 6] {
        [
            self.latent(Cache::Mla656, 16, false),
            self.latent(Cache::Mla656, 64, false),
            self.latent(Cache::Mla656, 128, false),
            self.latent(Cache::Mla656, 16, true),
            self.latent(Cache::Mla656, 64, true),
            self.latent(Cache::Mla656, 128, true),
        ]
    }

    /// The decode modules for caches in any format each under queries of any type, in f32.
    const fn decode_any(&self) -> [Module; 8] {
        let any = Cache::Any;
        [
            self.decode_cache(any, (64, 64), 8, Fallback),
            self.decode_cache(any, (64, 64), 32, Fallback),
            self.decode_cache(any, (128, 128), 8, Fallback),
            self.decode_cache(any, (128, 128), 32, Fallback),
            self.decode_cache(any, (256, 256), 8, Fallback),
            self.decode_cache(any, (256, 256), 32, Fallback),
            self.decode_cache(any, (576, 576), 8, Fallback),
            self.decode_cache(any, (576, 576), 32, Fallback),
        ]
    }

    /// The decode modules of a 16-bit type for rows with lists of keys.
    const fn decode_lists(&self) -> [Module; 6] {
        let elements = Cache::Elements;
        [
            self.page_lists(128, Compute90),
            self.page_lists(256, Compute90),
            self.lists(elements, 128, 8),
            self.lists(elements, 256, 8),
            self.lists(elements, 576, 8),
            self.lists(elements, 576, 32),
        ]
    }

    /// The same for caches in any format each under queries of any type, in f32.
    const fn decode_any_lists(&self) -> [Module; 3] {
        let any = Cache::Any;
        [self.lists(any, 128, 8), self.lists(any, 256, 8), self.lists(any, 576, 8)]
    }

    /// The decode modules of f32.
    const fn decode_f32(&self) -> [Module; 8] {
        [
            self.decode(64, 64, 8, Fallback, Compute80).must_not_spill(),
            self.decode(64, 64, 32, Fallback, Compute80),
            self.decode(128, 128, 8, Fallback, Compute80).must_not_spill(),
            self.decode(128, 128, 32, Fallback, Compute80),
            self.decode(256, 256, 8, Fallback, Compute80),
            self.decode(256, 256, 32, Fallback, Compute80),
            self.decode(576, 576, 8, Fallback, Compute80),
            self.decode(576, 576, 32, Fallback, Compute80),
        ]
    }

    /// The prefill modules of a 16-bit type for Hopper.
    const fn prefill_sm90(&self) -> [Module; 15] {
        [
            self.prefill(64, 64, Specialized, tile(128, 128), sm90(KeyRange::ShortCausal))
                .must_not_spill(),
            self.prefill(64, 64, Specialized, tile(192, 128), sm90(KeyRange::Any)),
            self.prefill(64, 64, Specialized, tile(64, 64), Mainloop::Sm90Window).must_not_spill(),
            self.prefill(80, 80, Specialized, tile(128, 128), sm90(KeyRange::Any)).must_not_spill(),
            self.prefill(96, 96, Specialized, tile(128, 128), sm90(KeyRange::Any)).must_not_spill(),
            self.prefill(128, 128, Specialized, tile(128, 128), sm90(KeyRange::Any))
                .must_not_spill(),
            self.prefill(192, 128, Specialized, tile(128, 112), sm90(KeyRange::Any))
                .must_not_spill(),
            self.prefill(256, 256, Specialized, tile(128, 64), sm90(KeyRange::Short))
                .must_not_spill(),
            // In f16 one value is kept in local memory, outside the loop over K tiles.
            self.prefill(256, 256, Specialized, tile(128, 80), sm90(KeyRange::Any))
                .must_not_spill_if(matches!(self.element, Element::Bf16)),
            self.prefill(64, 64, Fallback, tile(128, 128), sm90(KeyRange::Any)),
            self.prefill(96, 96, Fallback, tile(128, 128), sm90(KeyRange::Any)),
            self.prefill(128, 128, Fallback, tile(128, 128), sm90(KeyRange::Any)),
            self.prefill(192, 128, Fallback, tile(128, 112), sm90(KeyRange::Any)),
            self.prefill(192, 192, Fallback, tile(128, 112), sm90(KeyRange::Any)),
            self.prefill(256, 256, Fallback, tile(128, 80), sm90(KeyRange::Any)),
        ]
    }

    /// The prefill modules of a 16-bit type for large head dims on Hopper.
    const fn prefill_sm90_wide(&self) -> [Module; 4] {
        let wide = Mainloop::Sm90Wide;
        [
            self.prefill(512, 512, Specialized, tile(128, 128), wide).must_not_spill(),
            self.prefill(576, 512, Specialized, tile(128, 128), wide).must_not_spill(),
            self.prefill(512, 512, Fallback, tile(128, 128), wide),
            self.prefill(576, 512, Fallback, tile(128, 128), wide),
        ]
    }

    /// The prefill modules of a 16-bit type for every GPU. Of equal head dims the first that fits
    /// into the shared memory of a CTA is selected: GPUs of data centres have 163 to 227 KiB,
    /// others 99.
    const fn prefill_sm80_16_bit(&self) -> [Module; 14] {
        [
            self.prefill(64, 64, Specialized, tile(128, 64), sm80(32, 1, 4, 2)),
            self.prefill(128, 128, Specialized, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefill(256, 256, Specialized, tile(128, 64), sm80(32, 2, 4, 1)),
            self.prefill(512, 512, Specialized, tile(64, 64), sm80(32, 4, 2, 1)),
            self.prefill(64, 64, Fallback, tile(128, 64), sm80(32, 1, 4, 2)),
            self.prefill(96, 96, Fallback, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefill(128, 128, Fallback, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefill(192, 128, Fallback, tile(128, 64), sm80(32, 2, 2, 1)),
            self.prefill(256, 256, Fallback, tile(128, 64), sm80(32, 2, 2, 1)),
            self.prefill(256, 256, Fallback, tile(64, 32), sm80(32, 2, 2, 2).small()),
            self.prefill(512, 512, Fallback, tile(64, 64), sm80(32, 4, 2, 1)),
            self.prefill(512, 512, Fallback, tile(64, 32), sm80(16, 2, 2, 1).small()),
            self.prefill(576, 512, Fallback, tile(64, 32), sm80(32, 4, 2, 1)),
            self.prefill(576, 576, Fallback, tile(64, 16), sm80(16, 2, 1, 1)),
        ]
    }

    /// The prefill modules of a 16-bit type for 8-bit codes, on Hopper: plain scores, and one scale
    /// per head.
    const fn prefill_bytes(&self) -> [Module; 3] {
        let (bytes, mainloop) = (Cache::Bytes, sm90(KeyRange::Any));
        [
            self.prefill_cache(bytes, Specialized, 64, tile(128, 128), mainloop),
            self.prefill_cache(bytes, Specialized, 128, tile(128, 128), mainloop),
            self.prefill_cache(bytes, Specialized, 256, tile(128, 64), mainloop),
        ]
    }

    /// The prefill modules of a 16-bit type for caches in any format, on Hopper: plain scores.
    const fn prefill_stored(&self) -> [Module; 2] {
        let (any, mainloop) = (Cache::Any, sm90(KeyRange::Any));
        [
            self.prefill_cache(any, Specialized, 64, tile(128, 64), mainloop),
            self.prefill_cache(any, Specialized, 128, tile(128, 64), mainloop),
        ]
    }

    /// The prefill modules of a 16-bit type for elements with a scale per key, on Hopper. Of the
    /// tiles of modules for elements.
    const fn prefill_scaled(&self) -> [Module; 6] {
        let (scaled, mainloop) = (Cache::Scaled, sm90(KeyRange::Any));
        [
            self.prefill_cache(scaled, Specialized, 64, tile(192, 128), mainloop),
            self.prefill_cache(scaled, Specialized, 128, tile(128, 128), mainloop).must_not_spill(),
            self.prefill_cache(scaled, Specialized, 256, tile(128, 80), mainloop).must_not_spill(),
            self.prefill_cache(scaled, Fallback, 64, tile(128, 128), mainloop),
            self.prefill_cache(scaled, Fallback, 128, tile(128, 128), mainloop),
            self.prefill_cache(scaled, Fallback, 256, tile(128, 80), mainloop),
        ]
    }

    /// The prefill modules of a 16-bit type for keys of two elements each, on Hopper.
    const fn prefill_terms(&self) -> [Module; 8] {
        let (terms, mainloop) = (Cache::Terms(2), sm90(KeyRange::Any));
        let wide = Mainloop::Sm90Wide;
        [
            self.prefill_cache(terms, Specialized, 64, tile(192, 128), mainloop),
            self.prefill_cache(terms, Specialized, 128, tile(128, 128), mainloop).must_not_spill(),
            self.prefill_cache(terms, Specialized, 256, tile(128, 48), mainloop),
            self.prefill_cache(terms, Specialized, 512, tile(128, 128), wide).must_not_spill(),
            self.prefill_cache(terms, Fallback, 64, tile(128, 128), mainloop),
            self.prefill_cache(terms, Fallback, 128, tile(128, 128), mainloop),
            self.prefill_cache(terms, Fallback, 256, tile(128, 48), mainloop),
            self.prefill_cache(terms, Fallback, 512, tile(128, 128), wide),
        ]
    }

    /// The prefill modules of a 16-bit type for keys of two elements each, for every GPU.
    const fn prefill_terms_sm80(&self) -> [Module; 3] {
        let terms = Cache::Terms(2);
        [
            self.prefill_cache(terms, Fallback, 64, tile(128, 64), sm80(32, 1, 4, 2)),
            self.prefill_cache(terms, Fallback, 128, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefill_cache(terms, Fallback, 256, tile(64, 32), sm80(32, 2, 2, 2)),
        ]
    }

    /// The prefill modules of a 16-bit type for keys of three elements each, on Hopper: for a
    /// log-sum-exp, so there is no specialized one above head dim 256.
    const fn prefill_three_terms(&self) -> [Module; 7] {
        let (terms, mainloop) = (Cache::Terms(3), sm90(KeyRange::Any));
        [
            self.prefill_cache(terms, Specialized, 64, tile(192, 96), mainloop),
            self.prefill_cache(terms, Specialized, 128, tile(128, 96), mainloop),
            self.prefill_cache(terms, Specialized, 256, tile(128, 32), mainloop),
            self.prefill_cache(terms, Fallback, 64, tile(128, 96), mainloop),
            self.prefill_cache(terms, Fallback, 128, tile(128, 96), mainloop),
            self.prefill_cache(terms, Fallback, 256, tile(128, 32), mainloop),
            self.prefill_cache(terms, Fallback, 512, tile(128, 128), Mainloop::Sm90Wide),
        ]
    }

    /// The prefill modules of a 16-bit type for caches in any format, for every GPU.
    const fn prefill_any(&self) -> [Module; 3] {
        let any = Cache::Any;
        [
            self.prefill_cache(any, Fallback, 128, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefill_cache(any, Fallback, 256, tile(64, 32), sm80(32, 2, 2, 2)),
            self.prefill_cache(any, Fallback, 576, tile(64, 16), sm80(16, 2, 1, 1)),
        ]
    }

    /// The same for queries of f32, and for queries of f16 over values whose scales f16 cannot
    /// take.
    const fn prefill_any_f32(&self) -> [Module; 3] {
        let any = Cache::Any;
        [
            self.prefill_cache(any, Fallback, 128, tile(64, 32), sm80(16, 1, 2, 2)),
            self.prefill_cache(any, Fallback, 256, tile(32, 32), sm80(16, 2, 2, 2)),
            self.prefill_cache(any, Fallback, 576, tile(16, 16), sm80(16, 2, 1, 3)),
        ]
    }

    /// A module for prefix groups: head dims, build, main loop of 128 rows.
    const fn prefix(&self, dims: usize, build: Build, tile: Tile, mainloop: Mainloop) -> Module {
        let module = self.prefill(dims, dims, build, tile, mainloop);
        let Config::Prefill(config) = module.config else { panic!("a prefill module") };
        Module::new(Config::Prefix(config), module.architecture)
    }

    /// The modules for prefix groups of a 16-bit type. Specialized modules come in three builds:
    /// for Hopper; for later GPUs, where it runs beside decode; and for earlier ones. All have the
    /// same tiles, because the layers of a step have one schedule.
    const fn prefix_16_bit(&self) -> [Module; 9] {
        [
            self.prefix(64, Specialized, tile(128, 64), Mainloop::Sm90Prefix).must_not_spill(),
            self.prefix(128, Specialized, tile(128, 64), Mainloop::Sm90Prefix).must_not_spill(),
            self.prefix(64, Specialized, tile(128, 64), sm80(32, 1, 4, 2)).for_hopper(),
            self.prefix(128, Specialized, tile(128, 64), sm80(32, 1, 2, 2)).for_hopper(),
            self.prefix(64, Specialized, tile(128, 64), sm80(32, 1, 4, 2)),
            self.prefix(128, Specialized, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefix(64, Fallback, tile(128, 64), sm80(32, 1, 4, 2)),
            self.prefix(128, Fallback, tile(128, 64), sm80(32, 1, 2, 2)),
            self.prefix(256, Fallback, tile(64, 32), sm80(32, 2, 2, 2)),
        ]
    }

    /// The prefill modules of f32.
    const fn prefill_sm80_f32(&self) -> [Module; 4] {
        [
            self.prefill(64, 64, Fallback, tile(64, 32), sm80(16, 1, 2, 2)),
            self.prefill(128, 128, Fallback, tile(64, 32), sm80(16, 1, 2, 2)),
            self.prefill(256, 256, Fallback, tile(32, 32), sm80(16, 2, 2, 2)),
            self.prefill(576, 576, Fallback, tile(16, 16), sm80(16, 2, 1, 3)),
        ]
    }
}

const UTILITIES: [Module; 5] = [
    Module::new(Config::Utility(Family::Append), Compute80),
    Module::new(Config::Utility(Family::Merge), Compute80),
    Module::new(Config::Utility(Family::Ceiling), Compute80),
    Module::new(Config::Utility(Family::MaskMap), Compute80),
    Module::new(Config::Utility(Family::CombineSplits), Compute90),
];

impl Module {
    /// The same for Hopper and later.
    const fn for_hopper(self) -> Module {
        Module::new(self.config, Compute90)
    }

    const fn must_not_spill(self) -> Module {
        self.must_not_spill_if(true)
    }

    const fn must_not_spill_if(self, must_not_spill: bool) -> Module {
        Module { must_not_spill, ..self }
    }
}

const fn tile(rows: usize, keys: usize) -> Tile {
    Tile { rows, keys }
}

const fn sm80(
    warp_rows: usize,
    value_warps: usize,
    kv_buffers: usize,
    min_ctas_per_sm: usize,
) -> Mainloop {
    Mainloop::Sm80 { warp_rows, value_warps, kv_buffers, min_ctas_per_sm, small: false }
}

const fn sm90(keys: KeyRange) -> Mainloop {
    Mainloop::Sm90 { keys }
}

impl Mainloop {
    /// The same for a module beside a larger one of the same operands.
    const fn small(self) -> Mainloop {
        match self {
            Mainloop::Sm80 { warp_rows, value_warps, kv_buffers, min_ctas_per_sm, .. } => {
                Mainloop::Sm80 { warp_rows, value_warps, kv_buffers, min_ctas_per_sm, small: true }
            }
            Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Wide
            | Mainloop::Sm90Prefix => self,
        }
    }
}

/// Modules, and the crate that their images ship in.
struct List {
    package: Package,
    modules: &'static [Module],
}

const LISTS: [List; 49] = [
    base(&F16.decode_16_bit()),
    base(&BF16.decode_16_bit()),
    base(&F16.decode_lists()),
    base(&BF16.decode_lists()),
    base(&F16.decode_latent()),
    base(&BF16.decode_latent()),
    base(&F32.decode_f32()),
    base(&F16.prefill_sm90()),
    base(&BF16.prefill_sm90()),
    base(&F16.prefill_sm90_wide()),
    base(&BF16.prefill_sm90_wide()),
    base(&F16.prefill_sm80_16_bit()),
    base(&BF16.prefill_sm80_16_bit()),
    base(&F32.prefill_sm80_f32()),
    base(&F16.prefix_16_bit()),
    base(&BF16.prefix_16_bit()),
    base(&UTILITIES),
    base(&F16.decode_wgmma()),
    base(&BF16.decode_wgmma()),
    eight_bit(&F16.decode_bytes()),
    eight_bit(&BF16.decode_bytes()),
    eight_bit(&F16.decode_wgmma_codes()),
    eight_bit(&BF16.decode_wgmma_codes()),
    eight_bit(&F16.decode_blocks(Cache::Q8_0)),
    eight_bit(&BF16.decode_blocks(Cache::Q8_0)),
    eight_bit(&F16.decode_blocks(Cache::Q4_0)),
    eight_bit(&BF16.decode_blocks(Cache::Q4_0)),
    eight_bit(&BF16.decode_wide_blocks(Cache::Q8_0)),
    eight_bit(&BF16.decode_wide_blocks(Cache::Q4_0)),
    eight_bit(&F16.decode_heads()),
    eight_bit(&BF16.decode_heads()),
    // Of other head dims they would take more room than Python's package has.
    eight_bit(F16.decode_pairs([128]).as_flattened()),
    eight_bit(BF16.decode_pairs([64, 128, 256]).as_flattened()),
    // f16 cannot hold all rotary dims.
    eight_bit(&BF16.decode_mla656()),
    eight_bit(&F32.decode_any()),
    eight_bit(&F32.decode_any_lists()),
    eight_bit(&F16.prefill_bytes()),
    eight_bit(&BF16.prefill_bytes()),
    eight_bit(&BF16.prefill_stored()),
    eight_bit(&BF16.prefill_scaled()),
    eight_bit(&F16.prefill_terms()),
    eight_bit(&BF16.prefill_terms()),
    eight_bit(&BF16.prefill_three_terms()),
    eight_bit(&F16.prefill_terms_sm80()),
    eight_bit(&BF16.prefill_terms_sm80()),
    eight_bit(&F16.prefill_any()),
    eight_bit(&BF16.prefill_any()),
    eight_bit(&F32.prefill_any_f32()),
    eight_bit(&[Module::new(Config::Utility(Family::Widen), Compute80)]),
];

const fn eight_bit(modules: &'static [Module]) -> List {
    List { package: Package::EightBit, modules }
}

const fn base(modules: &'static [Module]) -> List {
    List { package: Package::Base, modules }
}

const COUNT: usize = {
    let (mut count, mut list) = (0, 0);
    while list < LISTS.len() {
        count += LISTS[list].modules.len();
        list += 1;
    }
    count
};

const fn collect() -> [Module; COUNT] {
    let mut all = [UTILITIES[0]; COUNT];
    let (mut list, mut at) = (0, 0);
    while list < LISTS.len() {
        let mut i = 0;
        while i < LISTS[list].modules.len() {
            let List { package, modules } = LISTS[list];
            all[at] = Module { package, ..modules[i] };
            i += 1;
            at += 1;
        }
        list += 1;
    }
    all
}
