//! The shape of a CTA of decode modules over codes with WGMMA.

use super::{DecodeConfig, Operands};

impl DecodeConfig {
    /// Keys per K tile of a group, which is a warpgroup, over codes with WGMMA.
    pub const CODES_TILE_KEYS: usize = 64;

    /// Maximum groups of a CTA over codes with WGMMA: a thread takes up to 255 registers.
    pub const CODES_GROUPS: usize = 2;

    /// Pipeline stages of a group over codes with WGMMA.
    pub const CODES_STAGES: usize = 4;

    /// Dynamic shared memory of a CTA with this many groups over codes with WGMMA: the layout of
    /// `codes_shape.cuh`.
    pub const fn codes_shared_bytes(&self, groups: usize) -> usize {
        let (rows, head_dim) = (self.tile_rows, self.operands.head_dim);
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let queries = head_dim / 64 * rows * 128;
        // Numbers of rows that warps exchange, powers of weights, and the tile.
        let exchange = (Self::CODES_GROUPS * 5 * rows * 4 + 256).next_multiple_of(1024);
        // Codes, and a scale of each key and value, which blocks do not use.
        let ((keys, values), (key_bytes, value_bytes)) =
            (self.cache.sides(), self.codes_row_bytes());
        let pitches = keys.pitch(key_bytes) + values.pitch(value_bytes);
        let stages =
            (Self::CODES_STAGES * Self::CODES_TILE_KEYS * (pitches + 8)).next_multiple_of(1024);
        facts + queries + exchange + groups * (2 * rows * 128 + stages)
    }

    /// Bytes of a key, and of its value, in memory, over codes with WGMMA.
    pub const fn codes_row_bytes(&self) -> (usize, usize) {
        let Operands { element, head_dim, value_dim, .. } = self.operands;
        let (keys, values) = self.cache.sides();
        (keys.row_bytes(head_dim, element.bytes()), values.row_bytes(value_dim, element.bytes()))
    }
}
