//! The shape of a CTA of decode modules for latent caches.

use super::{Cache, DecodeConfig, Operands};

impl DecodeConfig {
    /// CTAs that share a tile.
    pub const fn ctas_per_tile(&self) -> usize {
        if self.cache.is_latent() && self.tile_rows > 64 { self.tile_rows / 64 } else { 1 }
    }

    /// Score warpgroups per CTA over latent caches: one with 16 rows or over records of `mla656`,
    /// two with both, unless lists name the records. Else value warpgroups have the scores.
    const fn score_warpgroups(&self) -> usize {
        match (self.tile_rows, self.cache) {
            (16, Cache::Mla656) if !self.lists => 2,
            (16, _) | (_, Cache::Mla656) => 1,
            _ => 0,
        }
    }

    /// Threads per CTA over latent caches: two value warpgroups, a producer's, and score
    /// warpgroups.
    pub const fn latent_threads(&self) -> usize {
        128 * (3 + self.score_warpgroups())
    }

    /// Dynamic shared memory per CTA over latent caches, in bytes; the kernel asserts its layout
    /// against it.
    pub const fn latent_shared_bytes(&self) -> usize {
        let Operands { head_dim, value_dim, .. } = self.operands;
        let rows = self.tile_rows / self.ctas_per_tile();
        let queries = rows * head_dim * 2;
        let few = rows == 16;
        // Records of `mla656` are in shared memory by halves of K tiles, as they are in memory, and
        // each of their four chunks of values has its own probabilities. 64 rows of other keys have
        // their probabilities in the place of keys, and more numbers per row.
        let (keys, probabilities, numbers) = if matches!(self.cache, Cache::Mla656) {
            let (halves, stages) = if few { (9, 2) } else { (5, 1) };
            (halves * 32 * 656, 4 * stages * rows * 128, 3 + stages + self.score_warpgroups())
        } else {
            let (chunks, stages, numbers) = if few { (11, 2, 3) } else { (8, 0, 6) };
            (64 * 2 * (chunks * 128 + 3 * (head_dim - value_dim)), stages * rows * 128, numbers)
        };
        // Where listed keys are, which loaders share; 64 rows have them in the place of `numbers`.
        let addresses =
            if few && self.lists && !matches!(self.cache, Cache::Mla656) { 512 } else { 0 };
        1024 + queries + keys + probabilities + addresses + 512 + numbers * rows * 4
    }
}
