//! Operands of the host's memory, copied.

#[cfg(metal_stand_in)]
use super::super::stand_in::{objc2, objc2_metal};
use super::objects::BufferObject;
use crate::error::Error;
use crate::metal::launch::expect_forwards;
use crate::metal::{BufferView, MetalMemory};
use crate::tensor::{Dims, Tensor, TensorMut};
use objc2::rc::Retained;
use objc2_metal::MTLBuffer;

/// A copy of a host tensor in a shared buffer: of [`Gpu::copy_of`](super::Gpu::copy_of).
#[derive(Debug)]
pub struct HostCopy {
    buffer: Retained<BufferObject>,
    bytes: usize,
}

impl HostCopy {
    /// Copies the memory of a view to a buffer of `allocate`; `range` is its bytes.
    pub(super) fn new(
        name: &str,
        dims: &Dims,
        range: Option<(usize, usize)>,
        allocate: impl FnOnce(usize) -> Result<Retained<BufferObject>, Error>,
    ) -> Result<HostCopy, Error> {
        expect_forwards(name, dims)?;
        let (host, end) = range.unwrap_or((0, 0));
        let (bytes, buffer) = (end - host, allocate(end - host)?);
        if bytes > 0 {
            // SAFETY: the range is memory of an operand, and the buffer is as long.
            unsafe {
                let from = host as *const u8;
                from.copy_to_nonoverlapping(buffer.contents().as_ptr().cast(), bytes);
            }
        }
        Ok(HostCopy { buffer, bytes })
    }

    /// The same view of the copy.
    ///
    /// # Errors
    /// If it has another form than the tensor that was copied.
    pub fn tensor(&self, host: &Tensor) -> Result<Tensor<'_, MetalMemory>, Error> {
        let view = BufferView::new(&self.buffer);
        view.tensor(0, host.dtype(), host.shape(), Some(host.strides()))
    }

    /// The same view of the copy, written.
    ///
    /// # Errors
    /// As [`HostCopy::tensor`].
    pub fn tensor_mut(&self, host: &TensorMut) -> Result<TensorMut<'_, MetalMemory>, Error> {
        let view = BufferView::new(&self.buffer);
        view.tensor_mut(0, host.dtype(), host.shape(), Some(host.strides()))
    }

    /// Copies its elements back, and nothing that is between them. Work that writes it has ended.
    ///
    /// # Panics
    /// If the tensor takes another number of bytes than the one that was copied, or has a negative
    /// stride.
    pub fn download(&self, to: &mut TensorMut) {
        let (start, end) = to.byte_range().unwrap_or((0, 0));
        let is_forwards = to.strides().iter().all(|&stride| stride >= 0);
        assert!(is_forwards && end - start == self.bytes, "it is a copy of another tensor");
        if self.bytes == 0 {
            return;
        }
        let element = to.dtype().size();
        let from: *const u8 = self.buffer.contents().as_ptr().cast();
        for_each_run(to.shape(), to.strides(), &mut |first, len| {
            let (at, bytes) = (first * element, len * element);
            // SAFETY: runs are inside the tensor, which is an output that nothing else uses
            // meanwhile, and the copy is as long.
            unsafe { (start as *mut u8).add(at).copy_from_nonoverlapping(from.add(at), bytes) };
        });
    }
}

/// Calls with the first element and the length of each run of neighbouring elements. Strides are
/// not negative.
fn for_each_run(shape: &[usize], strides: &[i64], call: &mut dyn FnMut(usize, usize)) {
    match (shape, strides) {
        ([], _) => call(0, 1),
        ([len], [1]) => call(0, *len),
        ([len, shape @ ..], [stride, strides @ ..]) => {
            for index in 0..*len {
                let start = index * *stride as usize;
                for_each_run(shape, strides, &mut |first, len| call(start + first, len));
            }
        }
        _ => unreachable!("a stride per dimension"),
    }
}
