//! The shape of a CTA of decode modules over codes with WGMMA.

use super::DecodeConfig;

/// Keys per K tile of a group, a warpgroup.
pub const CODES_TILE_KEYS: usize = 64;

impl DecodeConfig {
    /// Maximum threads per CTA over codes with WGMMA.
    pub const fn codes_threads(&self) -> usize {
        if self.tile_rows > 8 { 128 * 2 } else { 128 * 3 }
    }

    /// Pipeline stages of a group.
    pub const fn codes_stages(&self) -> usize {
        if self.tile_rows > 8 { 4 } else { 3 }
    }

    /// Bytes of a key, or of a value, from row to row in shared memory.
    const fn codes_pitch(dim: usize) -> usize {
        if dim == 64 { 64 } else { dim.next_multiple_of(128) }
    }

    /// Bytes of a pipeline stage.
    const fn codes_stage_bytes(&self) -> usize {
        let pitches = DecodeConfig::codes_pitch(self.operands.head_dim)
            + DecodeConfig::codes_pitch(self.operands.value_dim);
        CODES_TILE_KEYS * (pitches + 8)
    }

    /// Dynamic shared memory of a CTA with this many groups; as `codes_shape.cuh` has it.
    pub const fn codes_shared_bytes(&self, groups: usize) -> usize {
        let rows = self.tile_rows;
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let queries = self.operands.head_dim / 64 * rows * 128;
        // Numbers of rows that warps exchange, powers of weights, and the tile.
        let exchange = (self.codes_threads() / 128 * 5 * rows * 4 + 256).next_multiple_of(1024);
        let ring = (self.codes_stages() * self.codes_stage_bytes()).next_multiple_of(1024);
        facts + queries + exchange + groups * (2 * rows * 128 + ring)
    }
}
