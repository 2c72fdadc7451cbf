//! The tiling that selection chooses: items and their key walks.

/// Maximum keys per tile.
pub const MAX_TILE_KEYS: usize = 256;

/// The division of a problem into items and tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Keys per tile: packed once and used by all rows of a block. Tiles start at multiples of
    /// this.
    pub tile_keys: usize,
    /// Query rows per block.
    pub block_rows: usize,
    /// Sequences with at most this many query rows per key/value head stream keys and values in
    /// place, without packing. 0 in batch-invariant mode, because streaming sums in another order,
    /// and if head dims are not whole vectors. Then all sequences pack.
    pub stream_rows: usize,
    /// Whether packed tiles are multiplied on the matrix unit.
    pub uses_amx: bool,
    /// Whether packed tiles hold `q8_0` and `q4_0` in bf16: keys as codes
    /// ([`block_scales`](super::block_scales)), values rounded. Verification multiplies in f32
    /// then.
    pub packs_blocks: bool,
}
