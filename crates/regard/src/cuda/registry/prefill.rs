//! Consequences of the configuration of a module of prefill or for prefix groups: its source, its
//! name, its macros, its threads and its shared memory.

use super::name::Name;
use super::{
    Architecture, Cache, Family, HOPPER_SHARED_BYTES, KeyRange, Mainloop, Operands, PrefillConfig,
};

impl PrefillConfig {
    /// The source that it is compiled from.
    pub const fn family(&self) -> Family {
        match self.mainloop {
            Mainloop::Sm80 { .. } => Family::PrefillSm80,
            Mainloop::Sm90 { .. } => Family::PrefillSm90,
            Mainloop::Sm90Window => Family::PrefillSm90Window,
            Mainloop::Sm90Wide => Family::PrefillSm90Wide,
            Mainloop::Sm90Prefix => Family::PrefixSm90,
        }
    }

    /// Threads per CTA.
    pub const fn threads(&self) -> usize {
        match self.mainloop {
            Mainloop::Sm80 { warp_rows, value_warps, .. } => {
                self.tile_rows / warp_rows * value_warps * 32
            }
            // A consumer warpgroup for each 64 rows of a CTA, and a producer.
            Mainloop::Sm90 { .. } | Mainloop::Sm90Prefix => {
                128 * (self.tile_rows / 64 + 1 + self.converters())
            }
            // Each consumer has a head of its own.
            Mainloop::Sm90Window => 128 * (PrefillConfig::WINDOW_CONSUMERS + 1),
            // Two consumers share the 64 rows of a CTA.
            Mainloop::Sm90Wide => 128 * 3,
        }
    }

    /// Warpgroups that convert keys and values to 16-bit tiles.
    const fn converters(&self) -> usize {
        self.cache.is_converted() as usize
    }

    /// CTAs that a multiprocessor has room for, by registers.
    pub const fn min_ctas_per_sm(&self) -> usize {
        match self.mainloop {
            Mainloop::Sm80 { min_ctas_per_sm, .. } => min_ctas_per_sm,
            Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Wide
            | Mainloop::Sm90Prefix => 1,
        }
    }

    /// CTAs per tile.
    pub const fn cluster_size(&self) -> usize {
        match self.mainloop {
            Mainloop::Sm80 { .. }
            | Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Prefix => 1,
            Mainloop::Sm90Wide => 2,
        }
    }

    /// Keys per TMA box.
    pub const fn box_keys(&self) -> usize {
        match self.mainloop {
            Mainloop::Sm80 { .. }
            | Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Prefix => self.tile_keys,
            Mainloop::Sm90Wide => 32,
        }
    }

    /// The key counts that it is selected for.
    pub const fn key_range(&self) -> KeyRange {
        match self.mainloop {
            Mainloop::Sm90 { keys } => keys,
            Mainloop::Sm80 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Wide
            | Mainloop::Sm90Prefix => KeyRange::Any,
        }
    }

    /// Dynamic shared memory per CTA, in bytes. Each kernel asserts its own layout against this.
    pub const fn shared_bytes(&self) -> usize {
        match self.mainloop {
            Mainloop::Sm80 { value_warps, kv_buffers, .. } => {
                self.sm80_bytes(value_warps, kv_buffers)
            }
            Mainloop::Sm90 { .. } => self.sm90_bytes(),
            Mainloop::Sm90Window => self.sm90_window_bytes(),
            Mainloop::Sm90Wide => self.sm90_wide_bytes(),
            Mainloop::Sm90Prefix => self.sm90_prefix_bytes(),
        }
    }

    /// The layout of `prefill_shape.cuh`: header, queries, keys, values; then probabilities and row
    /// maxima if warps share rows, and scales.
    const fn sm80_bytes(&self, value_warps: usize, kv_buffers: usize) -> usize {
        let Operands { element, head_dim, value_dim, .. } = self.operands;
        let key_pitch = (head_dim * element.bytes()).next_multiple_of(64);
        let value_pitch = (value_dim * element.bytes()).next_multiple_of(64);
        let header = 1024;
        let queries = self.tile_rows * key_pitch;
        let terms_pitch = self.cache.key_terms() * key_pitch;
        let larger_pitch = if terms_pitch > value_pitch { terms_pitch } else { value_pitch };
        let tiles = match kv_buffers {
            4 => 2 * self.tile_keys * (terms_pitch + value_pitch),
            2 => self.tile_keys * (terms_pitch + value_pitch),
            _ => self.tile_keys * larger_pitch,
        };
        let exchange = if value_warps > 1 {
            let weight_pitch = (self.tile_keys * element.bytes()).next_multiple_of(64);
            self.tile_rows * (weight_pitch + value_warps * 4)
        } else {
            0
        };
        let stages = if kv_buffers == 4 { 2 } else { 1 };
        let scales = match self.cache {
            Cache::Any => stages * 2 * self.tile_keys * 4,
            _ => 0,
        };
        header + queries + tiles + exchange + scales
    }

    /// The layout of `prefill_sm90.cu`: header, queries, pipelines of keys and of values; then the
    /// output if it fits.
    const fn sm90_bytes(&self) -> usize {
        let key_row = Self::swizzled_row(self.operands.head_dim);
        let value_row = Self::swizzled_row(self.operands.value_dim);
        let (stages, query_slots) = if self.operands.head_dim <= 64 { (3, 2) } else { (2, 1) };
        let header = 1024;
        let queries = query_slots * self.tile_rows * key_row;
        let terms = self.cache.key_terms();
        let pipelines = stages * self.tile_keys * (terms * key_row + value_row);
        let (dims, blocks) =
            (self.operands.head_dim + self.operands.value_dim, self.operands.head_dim / 32);
        // Codes of a K tile; or rows of two as they are stored, notes of them, and scales of keys;
        // or scales of keys alone.
        let stored = match self.cache {
            Cache::Any => self.tile_keys * (2 * (2 * dims + 2 * 16 + 2 * 16) + stages * blocks * 4),
            Cache::Scaled => stages * self.tile_keys * 4,
            _ => self.tile_keys * self.converters() * dims,
        };
        let unstaged = (header + queries + pipelines + stored).next_multiple_of(1024);
        let staged = unstaged + self.tile_rows * value_row;
        if staged <= HOPPER_SHARED_BYTES { staged } else { unstaged }
    }

    /// Consumer warpgroups of `prefill_sm90_window.cu`.
    pub const WINDOW_CONSUMERS: usize = 3;

    /// Blocks of `tile_keys` keys that the rows of an item of `prefill_sm90_window.cu` see at most.
    pub const WINDOW_BLOCKS: usize = 3;

    /// The layout of `prefill_sm90_window.cu`: header, queries of two heads and the output of one
    /// per consumer, keys and values of two items.
    const fn sm90_window_bytes(&self) -> usize {
        let key_row = Self::swizzled_row(self.operands.head_dim);
        let value_row = Self::swizzled_row(self.operands.value_dim);
        let (header, stages, consumers) = (1024, 2, PrefillConfig::WINDOW_CONSUMERS);
        let heads = consumers * self.tile_rows * (2 * key_row + value_row);
        let keys = PrefillConfig::WINDOW_BLOCKS * self.tile_keys;
        header + heads + stages * keys * (key_row + value_row)
    }

    /// The layout of `prefill_sm90_wide.cu`: header, the queries of a CTA, two buffers of
    /// probabilities; the rest is a pipeline of 16 KiB chunks.
    const fn sm90_wide_bytes(&self) -> usize {
        let rows = self.tile_rows / self.cluster_size();
        let header = 2048;
        let queries = rows * Self::swizzled_row(self.operands.head_dim);
        let weights = 2 * rows * Self::swizzled_row(self.tile_keys);
        let (chunk, before) = (16 << 10, header + queries + weights);
        before + (HOPPER_SHARED_BYTES - before) / chunk * chunk
    }

    /// The layout of `prefix_sm90_shape.cuh`: header, queries, pipelines of keys and of values.
    const fn sm90_prefix_bytes(&self) -> usize {
        let key_row = Self::swizzled_row(self.operands.head_dim);
        let value_row = Self::swizzled_row(self.operands.value_dim);
        let (header, stages) = (1024, 4);
        header + self.tile_rows * key_row + stages * self.tile_keys * (key_row + value_row)
    }

    /// Bytes of a row of 16-bit elements in 128-byte swizzled columns.
    const fn swizzled_row(elements: usize) -> usize {
        (elements * 2).next_multiple_of(128)
    }

    /// Bytes per row of a module for prefix groups, behind the layout of its main loop:
    /// `PrefixRow` of `prefix_item.cuh`.
    const PREFIX_ROW_BYTES: usize = 48;

    /// Dynamic shared memory per CTA of a module for prefix groups, in bytes.
    pub const fn prefix_shared_bytes(&self) -> usize {
        self.shared_bytes() + self.tile_rows * PrefillConfig::PREFIX_ROW_BYTES
    }

    /// The source of a module for prefix groups.
    pub const fn prefix_family(&self) -> Family {
        match self.mainloop {
            Mainloop::Sm90Prefix => Family::PrefixSm90,
            Mainloop::Sm80 { .. }
            | Mainloop::Sm90 { .. }
            | Mainloop::Sm90Window
            | Mainloop::Sm90Wide => Family::PrefixSm80,
        }
    }

    pub(super) const fn prefix_name(&self, architecture: Architecture) -> Name {
        let name = self.operands.name(Family::PrefixSm80);
        name.text(self.operands.build_name()).text(match architecture {
            Architecture::Compute80 => "_sm80",
            Architecture::Compute90 => "_sm90",
            Architecture::Compute90a => "_wgmma_sm90",
        })
    }

    pub(super) fn prefix_defines(&self) -> Vec<(&'static str, usize)> {
        let shared_bytes = ("SHARED_BYTES", self.prefix_shared_bytes());
        let others = self.defines().into_iter().filter(|(name, _)| *name != shared_bytes.0);
        others.chain([shared_bytes, ("PREFIX", 1)]).collect()
    }

    pub(super) const fn name(&self) -> Name {
        let [cache, _] = self.cache.names();
        let name = self.operands.name(self.family()).text(cache);
        name.text(self.operands.build_name()).text(match self.mainloop {
            Mainloop::Sm80 { small: false, .. } => "_sm80",
            Mainloop::Sm80 { small: true, .. } => "_sm80_small",
            Mainloop::Sm90 { keys: KeyRange::Any } => "_sm90",
            Mainloop::Sm90 { keys: KeyRange::Short | KeyRange::ShortCausal } => "_sm90_short",
            Mainloop::Sm90Window => "_sm90_window",
            Mainloop::Sm90Wide => "_sm90_wide",
            Mainloop::Sm90Prefix => "_wgmma_sm90",
        })
    }

    pub(super) fn defines(&self) -> Vec<(&'static str, usize)> {
        let mut defines = self.operands.defines();
        defines.push(self.operands.fallback());
        defines.push(("TILE_ROWS", self.tile_rows));
        defines.push(("TILE_KEYS", self.tile_keys));
        if let Mainloop::Sm80 { warp_rows, value_warps, kv_buffers, .. } = self.mainloop {
            defines.push(("WARP_ROWS", warp_rows));
            defines.push(("VALUE_WARPS", value_warps));
            defines.push(("KV_BUFFERS", kv_buffers));
        }
        defines.push(("THREADS", self.threads()));
        defines.push(("SHARED_BYTES", self.shared_bytes()));
        defines.push(("MIN_CTAS_PER_SM", self.min_ctas_per_sm()));
        match self.cache {
            Cache::Elements => {}
            Cache::Scaled => defines.push(("SCALES_KEYS", 1)),
            Cache::Terms(terms) => defines.push(("KEY_TERMS", terms)),
            _ => defines.push(("CACHE", self.cache.number())),
        }
        match self.mainloop {
            Mainloop::Sm80 { .. } | Mainloop::Sm90Window | Mainloop::Sm90Prefix => {}
            Mainloop::Sm90 { keys } => {
                let max = if keys == KeyRange::Any { 0 } else { KeyRange::MAX_SHORT };
                defines.push(("MAX_KEYS", max));
                defines.push(("CAUSAL", (keys == KeyRange::ShortCausal) as usize));
            }
            Mainloop::Sm90Wide => {
                defines.push(("CLUSTER_SIZE", self.cluster_size()));
                defines.push(("BOX_KEYS", self.box_keys()));
            }
        }
        defines
    }
}
