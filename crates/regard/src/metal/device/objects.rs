//! Metal's objects by short names, views of its buffers, and its errors in words.

#[cfg(metal_stand_in)]
use super::super::stand_in::{objc2, objc2_foundation, objc2_metal};
use crate::error::{Error, Refusal};
use crate::metal::BufferView;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSError;
use objc2_metal::{
    MTLBuffer, MTLCommandQueue, MTLComputeCommandEncoder, MTLComputePipelineState, MTLDevice,
};

/// A Metal device.
pub type DeviceObject = ProtocolObject<dyn MTLDevice>;
/// A command queue.
pub type QueueObject = ProtocolObject<dyn MTLCommandQueue>;
/// A buffer.
pub type BufferObject = ProtocolObject<dyn MTLBuffer>;
/// A compute command encoder.
pub type EncoderObject = ProtocolObject<dyn MTLComputeCommandEncoder>;
/// A compiled pipeline.
pub type PipelineObject = ProtocolObject<dyn MTLComputePipelineState>;

impl<'a> BufferView<'a> {
    /// Borrows a buffer, shared or private.
    pub fn new(buffer: &'a BufferObject) -> BufferView<'a> {
        let object = std::ptr::from_ref(buffer) as usize;
        // SAFETY: the object is borrowed for `'a`.
        unsafe { BufferView::from_raw(object, buffer.gpuAddress(), buffer.length()) }
    }
}

pub(super) fn refusal(machine: &str, reason: impl Into<String>) -> Error {
    Refusal { machine: machine.into(), reason: reason.into() }.into()
}

pub(super) fn description(error: &NSError) -> String {
    error.localizedDescription().to_string()
}
