//! Copies between the blocks of pools on a GPU, by the driver's copies: they need no kernel.

use super::gpu::Gpu;
use super::{DeviceMemory, driver};
use crate::error::Error;
use crate::paged::{self, BlockPart, Rows};
use cudarc::driver::{CudaStream, result, sys};

/// Copies of blocks in pools in a GPU's memory.
pub type CopyBlocks<'p, 'a> = paged::CopyBlocks<'p, 'a, DeviceMemory>;

/// Rows that the driver copies in one call lie at most so far apart
/// (`CU_DEVICE_ATTRIBUTE_MAX_PITCH`, the same on every GPU).
const MAX_PITCH: usize = i32::MAX as usize;

/// Queues the copy of some rows.
///
/// # Safety
/// The GPU's context is current on this thread, the stream is of this context, and the rows lie in
/// the memory at `pool`.
unsafe fn queue(pool: u64, rows: Rows, stream: sys::CUstream) -> Result<(), Error> {
    let failed = |error| driver::driver_error("copying blocks", error);
    let (from, to) = (pool.wrapping_add_signed(rows.from), pool.wrapping_add_signed(rows.to));
    if rows.rows == 1 || rows.pitch > MAX_PITCH {
        for row in 0..rows.rows {
            let offset = (row * rows.pitch) as u64;
            // SAFETY: the caller's promise.
            unsafe {
                result::memcpy_dtod_async(to + offset, from + offset, rows.row_bytes, stream)
            }
            .map_err(failed)?;
        }
        return Ok(());
    }
    let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: std::ptr::null(),
        srcDevice: from,
        srcArray: std::ptr::null_mut(),
        srcPitch: rows.pitch,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: std::ptr::null_mut(),
        dstDevice: to,
        dstArray: std::ptr::null_mut(),
        dstPitch: rows.pitch,
        WidthInBytes: rows.row_bytes,
        Height: rows.rows,
    };
    // SAFETY: the driver reads the struct before it returns; the rest is the caller's promise.
    unsafe { sys::cuMemcpy2DAsync_v2(&copy, stream) }.result().map_err(failed)
}

impl Gpu {
    /// Queues copies of blocks on `stream`, and returns. There is nothing to load. In a graph that
    /// is captured they are copies between these blocks, whatever a later step asks for: an engine
    /// makes them before it replays.
    ///
    /// # Errors
    /// If an operand breaks the contract or was lent to another stream; nothing is queued then. Or
    /// if the driver fails.
    pub fn copy_blocks(&self, stream: &CudaStream, copy: &mut CopyBlocks) -> Result<(), Error> {
        self.expect_context(stream)?;
        for pool in copy.pools.iter() {
            pool.memory().expect_stream("pools", stream)?;
        }
        // SAFETY: the stream is of this context, and operands are lent to it, or their makers have
        // promised as much.
        unsafe { self.copy_blocks_raw(stream.cu_stream(), copy) }
    }

    /// [`Gpu::copy_blocks`] on a raw stream, for engines that manage their streams.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and nothing else writes the blocks, or reads
    /// what is written, until the copies are done.
    pub unsafe fn copy_blocks_raw(
        &self,
        stream: sys::CUstream,
        copy: &mut CopyBlocks,
    ) -> Result<(), Error> {
        copy.check()?;
        if copy.copies.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // All pools of a copy, then the next: the stream keeps the order.
        for &paged::BlockCopy { from, to, slots } in copy.copies {
            for pool in copy.pools.iter() {
                for rows in BlockPart::new(pool, slots).rows(from, to) {
                    // SAFETY: blocks and slots are checked to be in the pool; the rest is the
                    // caller's promise.
                    unsafe { queue(pool.address(), rows, stream)? };
                }
            }
        }
        Ok(())
    }
}
