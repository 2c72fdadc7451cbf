//! The shape of a CTA of decode modules with WGMMA ([`Family::DecodeWgmma`](super::Family)).

use super::{Cache, DecodeConfig, Operands};

impl DecodeConfig {
    /// Keys per K tile with WGMMA.
    pub const WGMMA_TILE_KEYS: usize = 64;

    /// Threads of a CTA with WGMMA: a warpgroup of consumers, and one of loaders.
    pub const WGMMA_THREADS: usize = 256;

    /// Whether operands of keys and of values do not fit into registers together with WGMMA:
    /// `HAS_LARGE_HEADS` of `decode_wgmma_shape.cuh`.
    pub const fn has_large_heads(&self) -> bool {
        self.operands.head_dim > 128
    }

    /// CTAs per multiprocessor with WGMMA: one starts or ends a tile while the other multiplies.
    pub const fn wgmma_ctas_per_multiprocessor(&self) -> usize {
        if matches!(self.cache, Cache::Elements) { 1 } else { 2 }
    }

    /// Pipeline stages with WGMMA.
    pub const fn wgmma_stages(&self) -> usize {
        match self.cache {
            Cache::Elements => 3,
            _ if self.has_large_heads() => 2,
            _ => 4,
        }
    }

    /// Dynamic shared memory of a CTA with WGMMA: the layout of `decode_wgmma_shape.cuh`.
    pub const fn wgmma_shared_bytes(&self) -> usize {
        let Operands { head_dim, .. } = self.operands;
        let rows = self.tile_rows;
        let queues = 1024;
        let numbers = (16 + 60 * rows).next_multiple_of(1024);
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let (queries, probabilities) = (head_dim / 64 * rows * 128, 2 * rows * 128);
        // Keys and values, and a scale of each, which only codes of a byte use.
        let ((keys, values), (key_bytes, value_bytes)) =
            (self.cache.sides(), self.wgmma_row_bytes());
        let pitches = keys.pitch(key_bytes) + values.pitch(value_bytes);
        let stages = self.wgmma_stages() * Self::WGMMA_TILE_KEYS * (pitches + 8);
        queues + numbers + facts + queries + probabilities + stages
    }

    /// Bytes of a key, and of its value, in memory, with WGMMA.
    pub const fn wgmma_row_bytes(&self) -> (usize, usize) {
        let Operands { element, head_dim, value_dim, .. } = self.operands;
        let (keys, values) = self.cache.sides();
        (keys.row_bytes(head_dim, element.bytes()), values.row_bytes(value_dim, element.bytes()))
    }
}
