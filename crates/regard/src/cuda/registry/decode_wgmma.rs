//! The shape of a CTA of decode modules with WGMMA ([`Family::DecodeWgmma`](super::Family)).

use super::{Cache, DecodeConfig, Operands};

impl DecodeConfig {
    /// Keys per K tile of a group, which is a warpgroup, with WGMMA.
    pub const WGMMA_TILE_KEYS: usize = 64;

    /// Whether operands of keys and of values do not fit into registers together with WGMMA:
    /// `HAS_LARGE_HEADS` of `decode_wgmma_shape.cuh`.
    pub const fn has_large_heads(&self) -> bool {
        self.operands.head_dim > 128
    }

    /// Maximum groups of a CTA with WGMMA: a thread takes up to 255 registers. 16-bit elements
    /// fill shared memory with one.
    pub const fn wgmma_groups(&self) -> usize {
        if matches!(self.cache, Cache::Elements) { 1 } else { 2 }
    }

    /// Pipeline stages of a group with WGMMA.
    pub const fn wgmma_stages(&self) -> usize {
        match self.cache {
            Cache::Elements => 3,
            _ if self.has_large_heads() => 2,
            _ => 4,
        }
    }

    /// Dynamic shared memory of a CTA with this many groups with WGMMA: the layout of
    /// `decode_wgmma_shape.cuh`.
    pub const fn wgmma_shared_bytes(&self, groups: usize) -> usize {
        let (rows, head_dim) = (self.tile_rows, self.operands.head_dim);
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let queries = head_dim / 64 * rows * 128;
        // Numbers of rows that warps exchange, powers of weights, and the tile.
        let exchange = (self.wgmma_groups() * 5 * rows * 4 + 256).next_multiple_of(1024);
        // Keys and values, and a scale of each, which only codes of a byte use.
        let ((keys, values), (key_bytes, value_bytes)) =
            (self.cache.sides(), self.wgmma_row_bytes());
        let pitches = keys.pitch(key_bytes) + values.pitch(value_bytes);
        let stages =
            (self.wgmma_stages() * Self::WGMMA_TILE_KEYS * (pitches + 8)).next_multiple_of(1024);
        facts + queries + exchange + groups * (2 * rows * 128 + stages)
    }

    /// Bytes of a key, and of its value, in memory, with WGMMA.
    pub const fn wgmma_row_bytes(&self) -> (usize, usize) {
        let Operands { element, head_dim, value_dim, .. } = self.operands;
        let (keys, values) = self.cache.sides();
        (keys.row_bytes(head_dim, element.bytes()), values.row_bytes(value_dim, element.bytes()))
    }
}
