//! The shape of a CTA of decode modules over codes with WGMMA.

use super::{Cache, DecodeConfig, Operands, row_alignment};

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
        let (rows, Operands { head_dim, value_dim, .. }) = (self.tile_rows, self.operands);
        let facts = (1024 + 128 * rows).next_multiple_of(1024);
        let queries = head_dim / 64 * rows * 128;
        // Numbers of rows that warps exchange, powers of weights, and the tile.
        let exchange = (Self::CODES_GROUPS * 5 * rows * 4 + 256).next_multiple_of(1024);
        // Codes, and a scale of each key and value, which blocks do not use.
        let pitches = self.codes_pitch(head_dim) + self.codes_pitch(value_dim);
        let stages =
            (Self::CODES_STAGES * Self::CODES_TILE_KEYS * (pitches + 8)).next_multiple_of(1024);
        facts + queries + exchange + groups * (2 * rows * 128 + stages)
    }

    /// Bytes of a key of `dim` dims, or of its value, in memory.
    pub const fn codes_row_bytes(&self, dim: usize) -> usize {
        match self.cache.sides().0.block_bytes() {
            Some(bytes) => dim / 32 * bytes,
            None => panic!("a module over codes"),
        }
    }

    /// Bytes from row to row in shared memory: of blocks, an odd number of 16 bytes, because rows
    /// are as far from a multiple of 16 there as in memory.
    const fn codes_pitch(&self, dim: usize) -> usize {
        let bytes = self.codes_row_bytes(dim);
        match self.cache {
            Cache::Bytes if bytes == 64 => 64,
            Cache::Bytes => bytes.next_multiple_of(128),
            _ => ((bytes + 16 - row_alignment(bytes)).div_ceil(16) | 1) * 16,
        }
    }
}
