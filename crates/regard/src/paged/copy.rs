//! Copies between the blocks of pools, which a step asks for before its new tokens are written. The
//! operands, the checks and the byte ranges that all backends share.

use super::BlockCopy;
use crate::error::Error;
use crate::expect::{Strided, expect, expect_injective};
use crate::memory::{Host, Memory};
use crate::tensor::{Dims, MAX_RANK, TensorMut};

/// Copies of blocks ([`Step::copies`](super::Step::copies)) in the pools of a cache.
///
/// Copies are made one after the other, in every pool: a copy can read a block that the copy before
/// has written, and overwrite a block that the copy before has read. A copy of a block to itself
/// does nothing.
///
/// Elements are moved and not looked into, so that pools may be of any type. The scales of a pool
/// are a pool too, unless blocks share them. Pools may be interleaved: their address ranges may
/// overlap, but no two pools have an element in common. The caller makes sure of this.
#[derive(Debug)]
pub struct CopyBlocks<'p, 'a, M: Memory = Host> {
    /// Keys, values and scales of all layers: `[blocks, block_size, ...]`, with any further
    /// dimensions and any strides. All have as many blocks and slots. A pool with something per
    /// block instead of per slot, such as scales per page, has 1 in place of `block_size`.
    pub pools: &'p mut [TensorMut<'a, M>],
    /// The copies to make, in this order.
    pub copies: &'p [BlockCopy],
}

/// Bytes of one pool to copy: `rows` rows of `row_bytes`, which start `pitch` bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Offset of the first byte to read, from the first element of the pool.
    pub from: i64,
    /// Offset of the first byte to write, likewise.
    pub to: i64,
    pub row_bytes: usize,
    pub rows: usize,
    /// At least `row_bytes`.
    pub pitch: usize,
}

/// A dimension of a block: its length, and its stride in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Dimension {
    len: usize,
    stride: i64,
}

/// The part of a block that is copied, as few dimensions as it can be.
#[derive(Debug)]
pub(crate) struct BlockPart {
    /// Bytes of a row.
    row_bytes: usize,
    /// Rows, and outside of them other dimensions.
    dimensions: [Dimension; MAX_RANK],
    /// Bytes from block to block.
    block_stride: i64,
    /// The lowest byte of a block, from its first element: strides may be negative.
    start: i64,
}

impl BlockPart {
    /// The first `slots` slots of a block.
    pub(crate) fn new(pool: &Dims, slots: usize) -> BlockPart {
        let size = pool.dtype().size();
        let mut dimensions = [Dimension { len: 1, stride: 0 }; MAX_RANK];
        let mut part = BlockPart { row_bytes: size, dimensions, block_stride: 0, start: 0 };
        part.block_stride = pool.strides()[0] * size as i64;
        for (i, to) in dimensions.iter_mut().enumerate().take(pool.rank()).skip(1) {
            let len = if i == 1 { slots.min(pool.shape()[1]) } else { pool.shape()[i] };
            if len == 0 {
                return BlockPart { row_bytes: 0, ..part };
            }
            let stride = pool.strides()[i] * size as i64;
            if len > 1 {
                part.start += stride.min(0) * (len as i64 - 1);
                *to = Dimension { len, stride: stride.abs() };
            }
        }
        dimensions.sort_unstable_by_key(|dimension| dimension.stride);
        let mut last = 0;
        for dimension in dimensions.into_iter().filter(|dimension| dimension.len > 1) {
            let row = &mut part.dimensions[last];
            if row.len == 1 && dimension.stride == part.row_bytes as i64 {
                part.row_bytes *= dimension.len;
            } else if row.len == 1 {
                *row = dimension;
            } else if dimension.stride == row.stride * row.len as i64 {
                row.len *= dimension.len;
            } else {
                last += 1;
                part.dimensions[last] = dimension;
            }
        }
        part
    }

    /// The bytes to move.
    pub(crate) fn bytes(&self) -> usize {
        let lens = self.dimensions.iter().map(|dimension| dimension.len);
        lens.fold(self.row_bytes, usize::saturating_mul)
    }

    /// The rows to copy from one block to another.
    pub(crate) fn rows(&self, from: usize, to: usize) -> impl Iterator<Item = Rows> + '_ {
        let [inner, outer @ ..] = &self.dimensions;
        let count = match self.row_bytes == 0 || from == to {
            true => 0,
            false => outer.iter().map(|dimension| dimension.len).product(),
        };
        let pitch = if inner.len > 1 { inner.stride as usize } else { self.row_bytes };
        (0..count).map(move |mut index: usize| {
            let mut offset = self.start;
            for dimension in outer {
                offset += (index % dimension.len) as i64 * dimension.stride;
                index /= dimension.len;
            }
            Rows {
                from: from as i64 * self.block_stride + offset,
                to: to as i64 * self.block_stride + offset,
                row_bytes: self.row_bytes,
                rows: inner.len,
                pitch,
            }
        })
    }
}

impl<M: Memory> CopyBlocks<'_, '_, M> {
    /// Checks pools and copies.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Some(first) = self.pools.first() else { return Ok(()) };
        let blocks = first.shape().first().copied().unwrap_or(0);
        let slots = |pool: &TensorMut<M>| pool.shape().get(1).copied().unwrap_or(0);
        let block_size = self.pools.iter().map(slots).max().unwrap_or(0);
        for (i, pool) in self.pools.iter().enumerate() {
            let fits = pool.rank() >= 2
                && pool.shape()[0] == blocks
                && (pool.shape()[1] == block_size || pool.shape()[1] == 1);
            if !fits {
                expect(
                    &format!("pools[{i}]"),
                    Strided(pool),
                    false,
                    format_args!("[{blocks}, {block_size} or 1, ...] ([blocks, block_size, ...])"),
                )?;
            }
            if !pool.is_injective() {
                expect_injective(&format!("pools[{i}]"), pool)?;
            }
        }
        for (i, &BlockCopy { from, to, slots }) in self.copies.iter().enumerate() {
            if from >= blocks || to >= blocks || slots > block_size {
                return Err(Error::argument(
                    format!("copies[{i}]"),
                    format!("{slots} slots of block {from} to block {to}"),
                    format!("blocks below {blocks}, at most {block_size} slots"),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::tensor::raw_dims;

    fn rows(shape: &[usize], strides: Option<&[i64]>, slots: usize) -> Vec<Rows> {
        let pool = raw_dims(DType::F16, shape, strides).expect("a view");
        BlockPart::new(&pool, slots).rows(1, 3).collect()
    }

    #[test]
    fn a_contiguous_block_is_one_row() {
        let whole = Rows { from: 640, to: 1920, row_bytes: 640, rows: 1, pitch: 640 };
        assert_eq!(rows(&[8, 4, 2, 40], None, 4), [whole]);
        assert_eq!(rows(&[8, 4, 2, 40], None, 3), [Rows { row_bytes: 480, pitch: 480, ..whole }]);
        // [blocks, Hkv, block_size, D]: whole blocks are contiguous, parts have a row per head.
        let hnd: &[i64] = &[320, 40, 160, 1];
        assert_eq!(rows(&[8, 4, 2, 40], Some(hnd), 4), [whole]);
        let parts = Rows { row_bytes: 240, rows: 2, pitch: 320, ..whole };
        assert_eq!(rows(&[8, 4, 2, 40], Some(hnd), 3), [parts]);
    }

    #[test]
    fn other_blocks_are_as_few_rows_as_strides_allow() {
        // Keys of an interleaved pool [blocks, block_size, Hkv, 2, D].
        let keys: &[i64] = &[640, 160, 80, 1];
        let row = Rows { from: 1280, to: 3840, row_bytes: 80, rows: 6, pitch: 160 };
        assert_eq!(rows(&[8, 4, 2, 40], Some(keys), 3), [row]);
        // Nothing is contiguous: rows of one element, and two dimensions outside.
        let apart: &[i64] = &[1000, 200, 100, 2];
        let found = rows(&[8, 4, 2, 40], Some(apart), 2);
        let row =
            |at: i64| Rows { from: 2000 + at, to: 6000 + at, row_bytes: 2, rows: 40, pitch: 4 };
        assert_eq!(found, [row(0), row(200), row(400), row(600)]);
        // Backwards: rows start at the lowest address.
        let row = Rows { from: 80 - 6, to: 240 - 6, row_bytes: 8, rows: 1, pitch: 8 };
        assert_eq!(rows(&[8, 4], Some(&[40, -1]), 4), [row]);
        assert_eq!(rows(&[8, 4, 0], None, 4), []);
        assert_eq!(rows(&[8, 4], None, 0), []);
    }
}
