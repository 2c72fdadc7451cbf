//! The shape of a CTA of decode modules over codes with WGMMA.

use super::{Cache, DecodeConfig};

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

    /// Bytes of a key, or of a value, from row to row in shared memory: as decode's `Shape` has it.
    const fn codes_pitch(&self, dim: usize) -> usize {
        match self.cache {
            // A head dim of 128: rows of 136 and of 72 bytes, from the multiple of 16 before.
            Cache::Q8_0 => 144,
            Cache::Q4_0 => 80,
            _ if dim == 64 => 64,
            _ => dim.next_multiple_of(128),
        }
    }

    /// Rows of probabilities: blocks have those of each block of value dims.
    const fn codes_weight_rows(&self) -> usize {
        match self.cache {
            Cache::Q8_0 | Cache::Q4_0 => self.tile_rows * self.operands.value_dim / 32,
            _ => self.tile_rows,
        }
    }

    /// Bytes of a pipeline stage.
    const fn codes_stage_bytes(&self) -> usize {
        let pitches =
            self.codes_pitch(self.operands.head_dim) + self.codes_pitch(self.operands.value_dim);
        let scales = if matches!(self.cache, Cache::Bytes) { 8 } else { 0 };
        CODES_TILE_KEYS * (pitches + scales)
    }

    /// Dynamic shared memory of a CTA with this many groups; as `codes_shape.cuh` has it.
    pub const fn codes_shared_bytes(&self, groups: usize) -> usize {
        let (rows, weights) = (self.tile_rows, self.codes_weight_rows());
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let queries = self.operands.head_dim / 64 * rows * 128;
        // Numbers of rows that warps exchange, powers of weights, and the tile.
        let exchange = (self.codes_threads() / 128 * 5 * weights * 4 + 256).next_multiple_of(1024);
        let ring = (self.codes_stages() * self.codes_stage_bytes()).next_multiple_of(1024);
        facts + queries + exchange + groups * (2 * weights * 128 + ring)
    }
}
