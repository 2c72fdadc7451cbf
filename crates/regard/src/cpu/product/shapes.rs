//! The shapes of the inner loops: register tiles, and how they cover a row of vectors.

/// Rows of the tallest register tile. 6 rows of `TILE_VECTORS` accumulators, the vectors of B and
/// one of A fill the register file.
pub const ROWS: usize = 6;

/// Widths of register tiles, in vectors. The widest of a level is its `TILE_VECTORS`.
pub const WIDTHS: [usize; 3] = [1, 2, 4];

/// Maximum query rows of one [`Dots`](super::dots::Dots).
pub const MAX_DOT_ROWS: usize = 8;

/// One function per register tile: `[rows - 1][width index]`.
pub type RegisterTiles<Function> = [[Function; WIDTHS.len()]; ROWS];

/// Covers `vectors` columns with register tiles of at most `max_width` vectors, the widest first.
/// Calls `run` with each tile's width index and first vector.
#[inline(always)]
pub fn cover(vectors: usize, max_width: usize, mut run: impl FnMut(usize, usize)) {
    let mut done = 0;
    for (index, width) in WIDTHS.into_iter().enumerate().rev() {
        while width <= max_width && vectors - done >= width {
            run(index, done);
            done += width;
        }
    }
}

/// Number of register tiles that [`cover`] uses.
#[inline(always)]
pub fn cover_count(vectors: usize, max_width: usize) -> usize {
    let mut count = 0;
    cover(vectors, max_width, |_, _| count += 1);
    count
}
