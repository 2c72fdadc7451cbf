//! The shape of a CTA of decode modules for latent caches.

use super::{Cache, DecodeConfig, Operands};

impl DecodeConfig {
    /// CTAs that share a tile.
    pub const fn ctas_per_tile(&self) -> usize {
        if self.cache.is_latent() && self.tile_rows > 64 { self.tile_rows / 64 } else { 1 }
    }

    /// Threads per CTA over latent caches: two value warpgroups, a producer's, and with 16 rows or
    /// over records of `mla656` a score warpgroup. With 16 rows records have a second warpgroup of
    /// producers, to convert them.
    pub const fn latent_threads(&self) -> usize {
        match (self.tile_rows, self.cache) {
            (16, Cache::Mla656) => 128 * 5,
            (16, _) | (_, Cache::Mla656) => 128 * 4,
            _ => 128 * 3,
        }
    }

    /// Dynamic shared memory per CTA over latent caches, in bytes; the kernel asserts its layout
    /// against it.
    pub const fn latent_shared_bytes(&self) -> usize {
        let Operands { head_dim, value_dim, .. } = self.operands;
        let rows = self.tile_rows / self.ctas_per_tile();
        let queries = rows * head_dim * 2;
        if rows > 16 && matches!(self.cache, Cache::Mla656) {
            // Five halves of K tiles as they are in memory, four copies of probabilities, five
            // numbers per row.
            return 1024 + queries + 5 * 32 * 656 + 4 * rows * 128 + 512 + 5 * rows * 4;
        }
        // 64 rows keep their probabilities in the place of keys, and more numbers per row. Over
        // records of `mla656` there are probabilities for each chunk of values, and four scales per
        // key.
        let (chunks, probabilities, scales, numbers) = match (rows, self.cache) {
            (16, Cache::Mla656) => (10, 4 * 2 * rows * 128, 3 * 64 * 16, 3),
            (16, _) => (11, 2 * rows * 128, 0, 3),
            _ => (8, 0, 0, 6),
        };
        let keys = 64 * 2 * (chunks * 128 + 3 * (head_dim - value_dim)) + scales;
        let exchange = 512 + numbers * rows * 4;
        1024 + queries + keys + probabilities + exchange
    }
}
