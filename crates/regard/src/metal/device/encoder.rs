//! The encoder that work is encoded in.

#[cfg(metal_stand_in)]
use super::super::stand_in::objc2_metal;
use super::objects::{BufferObject, EncoderObject, PipelineObject};
use objc2_metal::{MTLBarrierScope, MTLComputeCommandEncoder, MTLSize};
use std::ffi::c_void;
use std::ptr::NonNull;

/// A receiver of compute commands: Metal's encoder, or that of an engine that keeps track of which
/// buffers its commands read and write.
pub trait Encoder {
    /// Sets the pipeline of the dispatches that follow.
    fn set_pipeline(&self, pipeline: &PipelineObject);

    /// Binds a copy of the bytes, 4 KiB at most.
    fn set_bytes(&self, bytes: &[u8], index: usize);

    /// Binds a buffer from an offset on, in bytes, which kernels write if it is `writable`.
    ///
    /// # Safety
    /// The offset is inside the buffer, which lives and is not used otherwise until the GPU has
    /// run what is encoded.
    unsafe fn set_buffer(&self, buffer: &BufferObject, offset: usize, writable: bool, index: usize);

    /// Sets the length of threadgroup memory 0, a multiple of 16.
    fn set_threadgroup_memory(&self, bytes: usize);

    /// Dispatches threadgroups of that many threads, in one dimension.
    fn dispatch(&self, threadgroups: [usize; 3], threads: usize);

    /// Has later dispatches see what earlier ones wrote to buffers.
    fn barrier(&self);
}

impl Encoder for EncoderObject {
    fn set_pipeline(&self, pipeline: &PipelineObject) {
        self.setComputePipelineState(pipeline);
    }

    fn set_bytes(&self, bytes: &[u8], index: usize) {
        let address = NonNull::from(bytes).cast::<c_void>();
        // SAFETY: there are as many bytes, and they are copied at once.
        unsafe { self.setBytes_length_atIndex(address, bytes.len(), index) };
    }

    unsafe fn set_buffer(&self, buffer: &BufferObject, offset: usize, _: bool, index: usize) {
        // SAFETY: passed on.
        unsafe { self.setBuffer_offset_atIndex(Some(buffer), offset, index) };
    }

    fn set_threadgroup_memory(&self, bytes: usize) {
        // SAFETY: a length is not memory; Metal refuses more than there is.
        unsafe { self.setThreadgroupMemoryLength_atIndex(bytes, 0) };
    }

    fn dispatch(&self, [width, height, depth]: [usize; 3], threads: usize) {
        self.dispatchThreadgroups_threadsPerThreadgroup(
            MTLSize { width, height, depth },
            MTLSize { width: threads, height: 1, depth: 1 },
        );
    }

    fn barrier(&self) {
        self.memoryBarrierWithScope(MTLBarrierScope::Buffers);
    }
}
