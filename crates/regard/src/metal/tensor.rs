//! Views of Metal buffers: a buffer and an offset in bytes, checked as host slices are.

use crate::dtype::DType;
use crate::error::Error;
use crate::memory::{Memory, sealed};
use crate::tensor::{Dims, Tensor, TensorMut, raw_dims};
use std::marker::PhantomData;

/// Memory of a Metal buffer, shared or private. Contents are read on the device only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MetalMemory {
    /// The address of the `MTLBuffer` object.
    pub(super) buffer: usize,
    /// The address of its contents, as the device knows it.
    pub(super) address: usize,
    /// Its length.
    pub(super) bytes: usize,
}

impl Memory for MetalMemory {}
impl sealed::Contents for MetalMemory {}

/// A buffer to make views of. On Apple's systems `BufferView::new` borrows an `MTLBuffer`.
///
/// Nothing tracks what uses a buffer. Views are borrows of the buffer object; that its contents are
/// not used otherwise is the promise of the code that encodes work on them.
#[derive(Debug, Clone, Copy)]
pub struct BufferView<'a> {
    memory: MetalMemory,
    lifetime: PhantomData<&'a [u8]>,
}

impl<'a> BufferView<'a> {
    /// A buffer by the address of its object, the device's address of its contents, and its length.
    ///
    /// # Safety
    /// `buffer` is the address of an `MTLBuffer` object with that address and length, which lives
    /// for `'a`; or it is 0, and views are only used where kernels are executed on the host, on
    /// memory at their addresses.
    pub unsafe fn from_raw(buffer: usize, address: u64, bytes: usize) -> BufferView<'a> {
        let memory = MetalMemory { buffer, address: address as usize, bytes };
        BufferView { memory, lifetime: PhantomData }
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// The device's address of its contents.
    pub fn address(&self) -> u64 {
        self.memory.address as u64
    }

    /// A view of the buffer from `offset` on, in bytes. `strides` of `None` means contiguous.
    ///
    /// # Errors
    /// If the offset is not aligned for the type, or shape and strides reach outside the buffer.
    pub fn tensor(
        &self,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Tensor<'a, MetalMemory>, Error> {
        let (address, dims) = self.checked(offset, dtype, shape, strides)?;
        Ok(Tensor::on_device(address as *const u8, dims, self.memory))
    }

    /// A view that is written, as [`BufferView::tensor`].
    ///
    /// # Errors
    /// As there.
    pub fn tensor_mut(
        &self,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<TensorMut<'a, MetalMemory>, Error> {
        let (address, dims) = self.checked(offset, dtype, shape, strides)?;
        Ok(TensorMut::on_device(address as *mut u8, dims, self.memory))
    }

    /// The memory itself.
    pub(super) fn memory(&self) -> MetalMemory {
        self.memory
    }

    /// The address of the first element and the dims of a view, if its elements are in the buffer.
    fn checked(
        &self,
        offset: usize,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<(usize, Dims), Error> {
        let dims = raw_dims(dtype, shape, strides)?;
        let address = self.memory.address.wrapping_add(offset);
        let (size, alignment) = (dtype.size(), dtype.alignment());
        if !offset.is_multiple_of(alignment) || !address.is_multiple_of(alignment) {
            let allowed = format!("a multiple of {alignment} for {dtype}");
            return Err(Error::argument("offset", offset, allowed));
        }
        if let Some((low, high)) = dims.extent()? {
            let place = |element: i64| i128::from(element) * size as i128 + offset as i128;
            let (from, to) = (place(low), place(high + 1));
            if from < 0 || to > self.memory.bytes as i128 {
                let found = format!("{offset} with {dims:?} and strides {:?}", dims.strides());
                let allowed = format!(
                    "elements inside of the buffer: it has {} bytes, they take {from}..{to}",
                    self.memory.bytes
                );
                return Err(Error::argument("offset", found, allowed));
            }
        }
        Ok((address, dims))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_lie_inside_of_their_buffer() {
        // SAFETY: nothing runs on it.
        let buffer = unsafe { BufferView::from_raw(0, 4096, 64) };
        let tensor = buffer.tensor(16, DType::F16, &[3, 8], None).expect("it fits");
        assert_eq!((tensor.address(), tensor.shape()), (4112, &[3, 8][..]));
        assert!(buffer.tensor(64, DType::F32, &[0], None).is_ok());
        assert!(buffer.tensor(56, DType::F32, &[3], Some(&[-4])).is_ok());
        for (offset, shape, strides, words) in [
            (18, &[1][..], None, "a multiple of 4 for f32"),
            (52, &[4], None, "they take 52..68"),
            (usize::MAX - 3, &[1], None, "inside of the buffer"),
            (8, &[4], Some(&[-1][..]), "they take -4..12"),
        ] {
            let error = buffer.tensor_mut(offset, DType::F32, shape, strides).unwrap_err();
            let error = error.to_string();
            assert!(error.starts_with("`offset`") && error.contains(words), "{error}");
        }
    }
}
